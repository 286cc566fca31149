//! The primitives that a device supplies. The layer composes them and does no arithmetic of its own; arguments are
//! description structs, so that a fused back-end sees everything a stage knows.
//!
//! Notation: T tokens of this rank, K top-k, E experts, L local experts, H hidden, I inner size, G gate factor
//! (2 with a gate, 1 without), N slots (rows of the expert-major layout, padding included). "Accumulator type" is
//! [`DType::accumulator`] of the tokens' type.

mod experts;
mod layout;
mod nvfp4_stack;
pub mod optimizer;
mod router;
mod rows;

use std::sync::Arc;

use crate::dtype::DType;
use crate::error::Result;
use crate::plan::{DevicePlan, DispatchSpec, HostPlanRequest, Plan, PlanRecords, PlanRequest, RecordIds, Reporting};
use crate::quant::Codec;
use crate::tensor::{Tensor, TensorMut, TensorRef};

pub use experts::{BiasGrad, Down, DownBwd, InputWeightBwd, Up, UpDgrad, Wgrad};
pub use layout::{Arrivals, RowDest, RowSource, SlotWeights};
pub use router::{
    AuxBwd, AuxSums, AuxTotal, Jitter, Linear, LinearBwd, RenormalizeKept, Route, RouteAndPlan, RouteBwd, RoutedPlan,
    Scalar, Sigmoid,
};
#[cfg(feature = "cuda")]
pub(crate) use rows::ConcatLayout;
pub use rows::{ConcatRows, GatherRows, ReduceRows, SplitRows};

pub use crate::plan::{Origin, Segments};

/// Everything the layer computes, with the [`Codec`] of what travels quantized. A device's calls do
/// their work in the order in which they are made, and may return before it is done (not on the CPU): a
/// [`Device`](crate::device::Device) is its stream. A call checks shapes and dtypes of its arguments first.
pub trait Kernels: Codec {
    /// How a layer has what only the device sees reported, unless told otherwise.
    const REPORTING: Reporting = Reporting::Immediate;
    /// [`Linear`].
    ///
    /// # Errors
    /// Types or shapes that do not fit each other or the device, before anything is done; no memory; the device's.
    fn linear(&self, call: Linear<'_, Self>) -> Result<()>;
    /// [`LinearBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn linear_bwd(&self, call: LinearBwd<'_, Self>) -> Result<()>;
    /// [`Route`]. Fails on a NaN logit, at once or as [`Route::reporting`] says.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); [`Error::NanLogits`](crate::Error::NanLogits), at once or as [`Route::reporting`]
    /// says.
    fn route(&self, call: Route<'_, Self>) -> Result<()>;
    /// [`RouteBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn route_bwd(&self, call: RouteBwd<'_, Self>) -> Result<()>;
    /// [`AuxSums`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn aux_sums(&self, call: AuxSums<'_, Self>) -> Result<()>;
    /// [`AuxTotal`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn aux_total(&self, call: AuxTotal<'_, Self>) -> Result<()>;
    /// [`RenormalizeKept`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn renormalize_kept(&self, call: RenormalizeKept<'_, Self>) -> Result<()>;
    /// Slots for all ranks' choices, which the host has, as seen from one rank.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); [`Error::Capacity`](crate::Error::Capacity).
    fn plan(&self, call: HostPlanRequest<'_>) -> Result<Plan<Self>>;
    /// The plan of a group of one rank ([`RowOrder::Local`](crate::ep::RowOrder::Local)) from ids `[T, K]` (I32 or
    /// I64) that nobody has checked, without waiting for the device: bad ids count as −1, and [`check`](Self::check)
    /// tells of them. `None`: the device cannot, or not for this request. May return an error of an earlier call.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); one of an earlier call.
    fn plan_on_device(&self, call: PlanRequest<'_, Self>) -> Result<Option<Plan<Self>>> {
        let _ = call;
        Ok(None)
    }
    /// [`RouteAndPlan`] at once, to the bits of the separate calls, without waiting for the device. `None`, and nothing done:
    /// the device has nothing quicker than those for this request. May return an error of an earlier call.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); one of an earlier call.
    fn route_and_plan(&self, call: RouteAndPlan<'_, Self>) -> Result<Option<RoutedPlan<Self>>> {
        let _ = call;
        Ok(None)
    }
    /// Whether [`plan_records`](Self::plan_records) can plan for such a spec, whatever the ids.
    fn plans_records(&self, spec: &DispatchSpec, num_experts: usize) -> bool;
    /// [`RecordIds`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn record_ids(&self, call: RecordIds<'_, Self>) -> Result<()>;
    /// The plan of records that ranks have exchanged, without waiting for the device but for the number of rows where
    /// that is open. What is wrong with them is kept in [`PlanRecords::errors`], and [`check`](Self::check) fails for
    /// it on a device that runs behind the host.
    ///
    /// # Errors
    /// As [`linear`](Self::linear); of the records none but those that [`check`](Self::check) and
    /// [`PlanRecords::errors`] tell.
    fn plan_records(&self, call: PlanRecords<'_, Self>) -> Result<DevicePlan<Self>>;
    /// Waits for the device, and returns and clears the first error that kernels have met since the last call.
    ///
    /// # Errors
    /// The first of an earlier call: NaN logits, bad ids, a capacity that is too small,
    /// [`Error::RowMap`](crate::Error::RowMap), [`Error::Segment`](crate::Error::Segment); the device's.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Whether [`up`](Self::up) and [`down_bwd`](Self::down_bwd) of gated experts of `[hidden, intermediate]`, with weights
    /// of the rows' `dtype`, start before their rows have come ([`Arrivals`]). Of sizes and the kind of device alone, so that
    /// ranks on devices of one kind find the same.
    fn products_wait(&self, dtype: DType, sizes: [usize; 2]) -> bool {
        let _ = (dtype, sizes);
        false
    }
    /// Makes the list of a layout's row tiles that its products share, where the device has such and there is none yet. A
    /// product that starts early has no time for it.
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn list_tiles(&self, segments: &Segments<Self>) -> Result<()> {
        let _ = segments;
        Ok(())
    }
    /// Whether rows behind a map, which several products read, had better be brought into slot order once: `columns` is
    /// the fewest that one of these products makes of a row.
    fn orders_rows(&self, dtype: DType, columns: usize) -> bool {
        let _ = (dtype, columns);
        false
    }
    /// [`GatherRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn gather_rows(&self, call: GatherRows<'_, Self>) -> Result<()>;
    /// [`ConcatRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn concat_rows(&self, call: ConcatRows<'_, Self>) -> Result<()>;
    /// [`SplitRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn split_rows(&self, call: SplitRows<'_, Self>) -> Result<()>;
    /// [`ReduceRows`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn reduce_rows(&self, call: ReduceRows<'_, Self>) -> Result<()>;
    /// [`Up`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn up(&self, call: Up<'_, Self>) -> Result<()>;
    /// [`Down`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn down(&self, call: Down<'_, Self>) -> Result<()>;
    /// [`DownBwd`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn down_bwd(&self, call: DownBwd<'_, Self>) -> Result<()>;
    /// [`UpDgrad`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn up_dgrad(&self, call: UpDgrad<'_, Self>) -> Result<()>;
    /// [`Wgrad`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn wgrad(&self, call: Wgrad<'_, Self>) -> Result<()>;
    /// [`Sigmoid`].
    ///
    /// # Errors
    /// As [`linear`](Self::linear).
    fn sigmoid(&self, call: Sigmoid<'_, Self>) -> Result<()>;
    /// Layout of one expert that every one of `rows` tokens visits.
    ///
    /// # Errors
    /// Rows that no memory has the numbers for; the device's.
    fn single_segment(&self, rows: usize) -> Result<Arc<Segments<Self>>>;
    /// Makes later work of this device wait for an event, which may be another device's of the same memory.
    ///
    /// # Errors
    /// The device's.
    fn wait(&self, event: Option<&Self::Event>) -> Result<()>;
    /// A small tensor from values on the host; integers up to 2⁵³ are exact.
    ///
    /// # Errors
    /// A number of values that does not fit the sizes; a type that the device has not; no memory; the device's.
    fn write(&self, values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Self>>;
    /// Values of a small tensor on the host, as `f64`; waits for the device.
    ///
    /// # Errors
    /// Errors of earlier calls, as [`check`](Self::check) returns them; no memory; the device's.
    fn read(&self, tensor: TensorRef<'_, Self>) -> Result<Vec<f64>>;
    /// A tensor's bytes on the host; waits for the device.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn download(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>>;
    /// The same whatever earlier calls have found wrong, which stays for who asks for it.
    ///
    /// # Errors
    /// No memory; the device's.
    fn download_unchecked(&self, from: TensorRef<'_, Self>) -> Result<Vec<u8>> {
        self.download(from)
    }
    /// Copies bytes of the host, as many as the tensor has.
    ///
    /// # Errors
    /// Another number of bytes than the tensor has; the device's.
    fn upload(&self, from: &[u8], to: TensorMut<'_, Self>) -> Result<()>;
}
