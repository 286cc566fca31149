//! Expert parallelism: prepare → dispatch → combine, and back.
//!
//! R ranks hold E experts; expert e lives on rank e / L, L = E / R. A token's K choices become rows in the segments of
//! their experts:
//!
//! ```text
//! prepare       ids [T, K]            → handle (slots, segments)          1 collective
//! dispatch      x [T, H], w [T, K]    → recv [N, H], recv_w [N]        1 collective
//! combine       expert out [N, H]     → out [T, H]   (unweighted sum)  1 collective
//! combine_bwd   d out [T, H]          → d expert out [N, H]            1 collective
//! dispatch_bwd  d recv [N, H], d recv_w [N] → d x [T, H], d w [T, K]   1 collective
//! ```
//!
//! That is what [`AllToAll`] does; [`AllGather`] needs two collectives for dispatch_bwd, [`Hierarchical`] two for each, and
//! [`Local`] none for anything.
//!
//! Errors: a rank that finds one of its own (a bad id, a wrong shape) still takes part in the collective that the
//! others wait in, as a failure. It returns its error, every other rank returns [`Error::Peer`]
//! naming it at once, and the group works again. Code between the calls does the same with
//! [`Communicator::refuse`].
//!
//! Bits: [`Local`] and [`AllToAll`] add a token's expert outputs in the order of k at the token's rank, so results do
//! not depend on the number of ranks; [`AllGather`] adds per rank first, [`Hierarchical`] per host, and they differ by
//! rounding. All are the same in every run.
//!
//! Slot order inside a segment is (source rank, token, k) ascending in every dispatcher of this crate's own; NCCL EP
//! has its library's. Pad rows are zero where a caller asks for the layout, and never read. Semantics follow
//! TransformerEngine's EP interface.

mod all_gather;
mod all_to_all;
mod check;
pub(crate) mod check_tensors;
mod config;
pub(crate) mod dispatcher_state;
mod group;
pub(crate) mod handle;
mod heuristics;
mod hierarchical;
mod hop_maps;
mod local;
mod measure;
mod messages;
pub(crate) mod packing;
mod prepare_on_device;
#[cfg(feature = "nccl")]
pub(crate) mod reports;
pub(crate) mod row_transport;
pub(crate) mod select;
mod shared_group;

pub use all_gather::AllGather;
pub use all_to_all::AllToAll;
#[cfg(feature = "nccl")]
pub(crate) use config::MovementSms;
pub use config::{DispatchShape, DispatcherKind, GroupConfig, Overlap, ReturnFormat};
pub use group::Group;
pub use handle::{Agreement, Handle};
pub use hierarchical::Hierarchical;
pub use local::Local;
pub use select::{DISPATCHER_VARIABLE, LibraryDispatchers};
#[cfg(feature = "burn")]
pub(crate) use shared_group::BackwardFailure;
pub use shared_group::EpGroup;
#[cfg(any(feature = "candle", feature = "burn"))]
pub(crate) use shared_group::Membership;

pub use crate::plan::{
    Capacity, DevicePlan, DispatchSpec, HostCounts, HostPlanRequest, MessageMaps, Overflow, Plan, PlanFor, PlanIds,
    PlanRecords, PlanRequest, RecordIds, Reporting, RowOrder, Stats, ZoneMaps,
};

use std::fmt;

use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Kernels, RouteAndPlan, RowSource};
use crate::tensor::{Tensor, TensorMut, TensorRef};

/// Inputs of dispatch, of this rank's tokens.
#[derive(Debug)]
pub struct DispatchInputs<'a, D: Kernels> {
    /// `[T, H]`; a floating type, or U8 for opaque rows (a multiple of 16 bytes, whatever the device, as all
    /// transports of opaque rows want; floating rows may have any size here).
    pub tokens: TensorRef<'a, D>,
    /// `[T, K]`, accumulator type.
    pub weights: Option<TensorRef<'a, D>>,
    /// Quantization scales that travel with the rows, `U8 [T, bytes]`, a multiple of 16 bytes each.
    pub scales: Option<TensorRef<'a, D>>,
}

/// Outputs of dispatch in expert-major layout; padding is zeroed, rows from the last segment's end on are not
/// written (where only the device knows that end: zeroed).
#[derive(Debug)]
pub struct DispatchOutputs<'a, D: Kernels> {
    /// `[N, H]`.
    pub tokens: TensorMut<'a, D>,
    /// `[N]`.
    pub weights: Option<TensorMut<'a, D>>,
    /// `U8 [N, bytes]`.
    pub scales: Option<TensorMut<'a, D>>,
}

/// Received rows as the transport left them: slot s is row `map[s]`. Spares the copy into expert-major order
/// where the consumer is a GEMM that gathers.
#[derive(Debug)]
pub struct Received<D: Kernels> {
    /// The rows; `None`: they are the caller's own tokens.
    pub rows: Option<Tensor<D>>,
    /// Weights in slot order `[N]`, accumulator type; padding unspecified.
    pub weights: Option<Tensor<D>>,
    /// Scales beside `rows`; `None`: there are none, or they are the caller's own.
    pub scales: Option<Tensor<D>>,
    /// Row for each slot, `I32 [N]`, where only the transport knows it; `None`: as the handle has it.
    pub map: Option<Tensor<D>>,
}

impl<D: Kernels> Received<D> {
    /// The rows as a GEMM reads them; `tokens` are those given to dispatch.
    pub fn source<'a>(&'a self, tokens: TensorRef<'a, D>, handle: &'a Handle<D>) -> RowSource<'a, D> {
        match (&self.rows, &self.map) {
            (Some(rows), Some(map)) => RowSource::mapped(rows.view(), map.view()),
            (Some(rows), None) if handle.in_slots => RowSource::direct(rows.view()),
            (rows, _) => RowSource::mapped(rows.as_ref().map_or(tokens, Tensor::view), handle.row_map()),
        }
    }
}

/// What of a rank's own work can run while its rows travel ([`TokenDispatcher::dispatch_rows_overlapped`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkBesideRows {
    /// Nothing: it follows them.
    None,
    /// A product that may start early ([`Up::movement_sms`](crate::kernels::Up::movement_sms)), for which the movement leaves SMs,
    /// and so takes longer.
    EarlyProduct,
    /// Any: the movement begins, and ends behind the work.
    Any,
}

/// Moves tokens to experts and back. One object a rank; every method is a collective of all ranks of the group in
/// the same order, except [`check`](Self::check).
///
/// Routing lives in [`Handle`]s, which are owned values: any number may be in flight (1F1B), in any order that is the
/// same on all ranks.
pub trait TokenDispatcher<D: Kernels>: fmt::Debug + Send {
    /// Turns choices into slots. `ids`: `[T, K]`, I32 or I64, −1 = dropped choice. `weights` (accumulator type,
    /// `[T, K]`) are needed where an expert capacity keeps by probability; their shape is checked in any case.
    ///
    /// # Errors
    /// Bad ids, weights of another shape, too small capacity, no memory for the ranks' routing, different specs or
    /// dtypes between ranks: on every rank.
    fn prepare(
        &mut self,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<Handle<D>>;
    /// Routes this rank's tokens and turns the choices into slots, where one rank's device does both [at
    /// once](Kernels::route_and_plan): the handle, and the weight of each slot. `None`, and nothing done: route, then
    /// [`prepare`](Self::prepare).
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare), and as [`Kernels::route`].
    fn route_and_prepare(&mut self, call: RouteAndPlan<'_, D>) -> Result<Option<(Handle<D>, Tensor<D>)>> {
        let _ = call;
        Ok(None)
    }
    /// Rows to their experts, into expert-major order.
    ///
    /// # Errors
    /// Tensors whose shapes or types do not fit the handle or one another, or that the transport cannot carry, and a
    /// handle of another group: the other ranks are told, and fail with [`Error::Peer`] or, between
    /// processes, with the communicator's end. No memory; the communicator's or a driver's.
    fn dispatch(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        outputs: DispatchOutputs<'_, D>,
    ) -> Result<()>;
    /// Rows to their experts, left where the transport put them.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    fn dispatch_rows(&mut self, handle: &Handle<D>, inputs: DispatchInputs<'_, D>) -> Result<Received<D>>;
    /// The same with other work of this rank beside it, which is enqueued while rows travel where
    /// [`overlaps`](Self::overlaps) says so, and after them elsewhere. It is told how many SMs the movement takes while it runs, 0
    /// where that has no bearing on it: then it begins with a product that may start early
    /// ([`Up::movement_sms`](crate::kernels::Up::movement_sms)), and has taken what memory it needs before.
    ///
    /// # Errors
    /// As [`dispatch_rows`](Self::dispatch_rows); what `work` returns, when the rows have arrived.
    fn dispatch_rows_overlapped(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        work: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Received<D>> {
        let received = self.dispatch_rows(handle, inputs)?;
        work(0).map(|()| received)
    }
    /// What of a rank's own work can run while its rows travel over such a handle; the same on all ranks.
    fn overlaps(&self, handle: &Handle<D>) -> WorkBesideRows {
        let _ = handle;
        WorkBesideRows::None
    }
    /// Whether products of some rows may run while they travel; the same on all ranks.
    fn may_overlap_products(&self) -> bool {
        false
    }
    /// Whether those of rows of so many elements do, over such a handle ([`dispatch_rows_with_product`] and its like); the
    /// same on all ranks.
    ///
    /// [`dispatch_rows_with_product`]: Self::dispatch_rows_with_product
    fn overlaps_products(&self, handle: &Handle<D>, dtype: DType, width: usize) -> bool {
        let _ = (handle, dtype, width);
        false
    }
    /// [`dispatch_rows`](Self::dispatch_rows), and a product of these rows that starts while they come. `product` is
    /// called once, as soon as rows are on their way: it enqueues that product before anything else, has taken what memory
    /// it needs before, and keeps its own errors.
    ///
    /// # Errors
    /// As [`dispatch_rows`](Self::dispatch_rows), and then `product` may not have been called; a dispatcher that does not
    /// [overlap products](Self::overlaps_products).
    fn dispatch_rows_with_product(
        &mut self,
        handle: &Handle<D>,
        inputs: DispatchInputs<'_, D>,
        product: &mut ProductOfRows<'_, D>,
    ) -> Result<Received<D>> {
        let _ = (handle, inputs, product);
        Err(no_overlap("dispatch_rows_with_product", self.kind()))
    }
    /// [`combine_bwd_rows`](Self::combine_bwd_rows), likewise.
    ///
    /// # Errors
    /// As [`combine_bwd`](Self::combine_bwd) and [`dispatch_rows_with_product`](Self::dispatch_rows_with_product).
    fn combine_bwd_rows_with_product(
        &mut self,
        handle: &Handle<D>,
        grad: TensorRef<'_, D>,
        product: &mut ProductOfRows<'_, D>,
    ) -> Result<Received<D>> {
        let _ = (handle, grad, product);
        Err(no_overlap("combine_bwd_rows_with_product", self.kind()))
    }
    /// [`dispatch_bwd`](Self::dispatch_bwd), and other work of this rank that runs meanwhile: it begins with a product that
    /// may start early ([`Wgrad::movement_sms`](crate::kernels::Wgrad::movement_sms)), is told how many SMs the movement
    /// takes, and keeps its own errors.
    ///
    /// # Errors
    /// As [`dispatch_bwd`](Self::dispatch_bwd) and [`dispatch_rows_with_product`](Self::dispatch_rows_with_product).
    fn dispatch_bwd_with_products(
        &mut self,
        handle: &Handle<D>,
        grads: DispatchGrads<'_, D>,
        work: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let _ = (handle, grads, work);
        Err(no_overlap("dispatch_bwd_with_products", self.kind()))
    }
    /// Memory `[N, width]` that the rows of the next combine or dispatch_bwd had better be written to, where the
    /// transport has some that peers can read; elsewhere rows may lie anywhere.
    ///
    /// # Errors
    /// A driver's.
    fn place_for_return(&mut self, handle: &Handle<D>, dtype: DType, width: usize) -> Result<Option<Tensor<D>>> {
        let _ = (handle, dtype, width);
        Ok(None)
    }
    /// Sums each token's expert outputs, unweighted. Padding of `expert_out [N, H]` is not read.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    fn combine(&mut self, handle: &Handle<D>, expert_out: TensorRef<'_, D>, out: TensorMut<'_, D>) -> Result<()>;
    /// Gradient of combine into expert-major order; padding is zeroed.
    ///
    /// # Errors
    /// A handle whose ranks did not all ask for backward ([`Error::BackwardNotAgreed`],
    /// before any collective); as [`dispatch`](Self::dispatch).
    fn combine_bwd(
        &mut self,
        handle: &Handle<D>,
        grad: TensorRef<'_, D>,
        grad_expert_out: TensorMut<'_, D>,
    ) -> Result<()>;
    /// Gradient of combine, left where the transport put it.
    ///
    /// # Errors
    /// As [`combine_bwd`](Self::combine_bwd).
    fn combine_bwd_rows(&mut self, handle: &Handle<D>, grad: TensorRef<'_, D>) -> Result<Received<D>>;
    /// Gradient of dispatch. `grad_weights [N]` absent counts as zeros; `d_weights [T, K]` is written in full,
    /// 0 for dropped choices. Padding of the inputs is not read.
    ///
    /// # Errors
    /// As [`combine_bwd`](Self::combine_bwd).
    fn dispatch_bwd(&mut self, handle: &Handle<D>, grads: DispatchGrads<'_, D>) -> Result<()>;
    /// Copies that memory given by the caller has cost so far where rows go through windows.
    fn copies(&self) -> u64 {
        0
    }
    /// Returns and clears the first deferred error.
    ///
    /// # Errors
    /// Errors that prepare found too late to return: a bad id, a capacity that is too small, specs or dtypes that
    /// differ between ranks; a fault that a kernel raised; a rank that came too late for NCCL EP's low latency, or
    /// ([`Error::LateRanks`]) for [`GroupConfig::patience`]; a driver's.
    fn check(&mut self) -> Result<()>;
    /// Whether it can carry rows of this shape, for what decides between dispatchers. No collective.
    ///
    /// # Errors
    /// The rule that the shape breaks.
    fn check_shape(&self, shape: &DispatchShape) -> Result<()> {
        let _ = shape;
        Ok(())
    }
    /// The communicator, for collectives beside the tokens' own.
    fn communicator(&mut self) -> &mut dyn Communicator<D>;
    /// Ends the dispatcher (collective, where it has built on the communicator), and gives the communicator back.
    ///
    /// # Errors
    /// The communicator's or the device's, where it has to meet the other ranks.
    fn into_communicator(self: Box<Self>) -> Result<Box<dyn Communicator<D>>>;
    /// Which it is; never [`DispatcherKind::Auto`].
    fn kind(&self) -> DispatcherKind;
    /// That of its kind ([`DispatcherKind::name`]).
    fn name(&self) -> &'static str {
        self.kind().name()
    }
}

/// Rows that are on their way, as a product reads them that starts before they have come.
#[derive(Debug)]
pub struct ArrivingRows<'a, D: Kernels> {
    /// The rows, and what the product waits for.
    pub rows: RowSource<'a, D>,
    /// Weights, accumulator type, which come with the rows.
    pub weights: Option<TensorRef<'a, D>>,
    /// Which of these each slot has, `I32 [N]`.
    pub weight_map: TensorRef<'a, D>,
}

/// Enqueues a product of rows that are on their way.
pub type ProductOfRows<'p, D> = dyn FnMut(ArrivingRows<'_, D>) + 'p;

fn no_overlap(call: &'static str, kind: DispatcherKind) -> Error {
    Error::invalid(call, "dispatcher", "one that overlaps products", kind)
}

/// Arguments of [`TokenDispatcher::dispatch_bwd`].
#[derive(Debug)]
pub struct DispatchGrads<'a, D: Kernels> {
    /// Gradient of the received rows `[N, H]`.
    pub rows: TensorRef<'a, D>,
    /// Gradient of the received weights `[N]`, accumulator type.
    pub weights: Option<TensorRef<'a, D>>,
    /// Gradient of the tokens `[T, H]`, overwritten.
    pub d_tokens: TensorMut<'a, D>,
    /// Gradient of the weights `[T, K]`, accumulator type, overwritten.
    pub d_weights: Option<TensorMut<'a, D>>,
}
