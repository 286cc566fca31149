//! Each token crosses once to every other host that has an expert of its, and there goes on to the ranks; sums return the
//! same way.

mod hops;
mod host_id;
mod lists;

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use super::all_to_all::message_maps;
use super::dispatcher_state::DispatcherState;
use super::hop_maps::HopMaps;
use super::messages::{GatherSources, Movement, PeerCounts, exchange};
use super::packing::{ReceivedRows, RowMover, RowParts};
use super::row_transport::{HandleCall, ReturnRows, RowTransport};
use super::{DispatchInputs, DispatcherKind, Handle, RowOrder};

use hops::{exchange_choices, in_rank_order};
use host_id::Hosts;
use lists::HostPlace;

const CALL: &str = "Group::new";

/// Dispatcher between hosts, over any communicator. Every call is two all-to-alls, in which most messages are empty: one
/// between the ranks that have the same place in their hosts, and one between the ranks of a host.
///
/// Out, a token crosses once to each host that has an expert of its, with all its weights, and is passed on to the ranks.
/// Back, a host's outputs are added in the order of k in f32 and rounded to the tokens' dtype, cross as one row, and are
/// added over hosts in their order. So networks carry a row for each (token, host) both ways, where [`AllToAll`] has one for
/// each (token, rank) out and for each choice back.
///
/// [`AllToAll`]: super::AllToAll
#[derive(Debug)]
pub struct Hierarchical<D: Kernels> {
    core: DispatcherState<D>,
    place: HostPlace,
}

impl<D: Kernels> Hierarchical<D> {
    /// Ranks by hosts as the group's configuration has them, or as they say (one collective, also where the two are compared).
    pub(super) fn join(mut core: DispatcherState<D>) -> Result<Self> {
        let hosts = Hosts::gather(&core.device, &mut *core.comm)?;
        let ranks_per_host = match core.config.ranks_per_host {
            0 => hosts.ranks_of_each(CALL)?,
            given => {
                // Imitated, as tests do, or a mistake that costs what the dispatcher is taken for.
                if core.rank() == 0 && !hosts.have_each(given) {
                    tracing::warn!(
                        ranks_per_host = given,
                        hosts = ?hosts.numbers(),
                        "ranks_per_host does not agree with the hosts of the ranks"
                    );
                }
                given
            }
        };
        let place = HostPlace::of(core.rank(), core.ranks(), ranks_per_host);
        Ok(Self { core, place })
    }
}

fn hops<'a, D: Kernels>(step: &HandleCall<'a, D>) -> Result<&'a HopMaps<D>> {
    let missing = || Error::invalid(step.call, "handle", "one with the hops between hosts", "one without");
    step.handle.hops.as_ref().ok_or_else(missing)
}

/// The rows of an exchange, which always has some.
fn rows_of<'a, D: Kernels>(step: &HandleCall<'_, D>, moved: &'a ReceivedRows<D>) -> Result<TensorRef<'a, D>> {
    let missing = || Error::invalid(step.call, "rows", "those of an exchange", "none");
    moved.rows.as_ref().map(Tensor::view).ok_or_else(missing)
}

impl<D: Kernels> RowTransport<D> for Hierarchical<D> {
    const KIND: DispatcherKind = DispatcherKind::Hierarchical;
    const ROW_ORDER: RowOrder = RowOrder::UniqueRows;

    fn core(&mut self) -> &mut DispatcherState<D> {
        &mut self.core
    }

    fn into_core(self: Box<Self>) -> Result<DispatcherState<D>> {
        Ok(self.core)
    }

    fn complete(&mut self, handle: &mut Handle<D>) -> Result<()> {
        handle.hops = Some(exchange_choices(&mut self.core, self.place, handle)?);
        Ok(())
    }

    fn send(&mut self, step: &HandleCall<'_, D>, inputs: &DispatchInputs<'_, D>) -> Result<ReceivedRows<D>> {
        let (maps, hops) = (message_maps(&step.handle.plan)?, hops(step)?);
        let across = Movement {
            // All weights of a token.
            parts: RowParts { weight: inputs.weights.map_or(0, |w| w.row_bytes()), ..RowParts::of(inputs) },
            send: PeerCounts::of(&hops.crossing, &hops.crossing),
            recv: PeerCounts::of(&hops.arriving, &hops.arriving),
            sources: GatherSources {
                rows: inputs.tokens.borrow(),
                row_map: hops.list(&hops.crossing_tokens)?,
                weights: inputs.weights.as_ref().map(TensorRef::borrow),
                weight_map: hops.list(&hops.crossing_tokens)?,
                scales: inputs.scales.as_ref().map(TensorRef::borrow),
            },
            last: false,
        };
        let arrived = exchange(&mut self.core, step, &across)?;
        let within = Movement {
            parts: RowParts::of(inputs),
            send: PeerCounts::of(&hops.forwarded, &hops.choices),
            recv: PeerCounts::of(&hops.received, &hops.slots),
            sources: GatherSources {
                rows: rows_of(step, &arrived)?,
                row_map: hops.list(&hops.forwarded_rows)?,
                weights: arrived.weights.as_ref().map(Tensor::view),
                weight_map: hops.list(&hops.forwarded_choices)?,
                scales: arrived.scales.as_ref().map(Tensor::view),
            },
            last: false,
        };
        let received = exchange(&mut self.core, step, &within)?;
        let ordered = in_rank_order(&self.core.device, self.place, maps, received);
        step.refuse_own_error(&mut self.core, ordered)
    }

    fn return_sums(&mut self, step: &HandleCall<'_, D>, back: ReturnRows<'_, D>) -> Result<()> {
        let hops = hops(step)?;
        let weight = if back.with_weights { back.rows.dtype().accumulator().size() } else { 0 };
        let parts = RowParts { row: back.rows.row_bytes(), weight, scale: 0 };
        let slots = hops.return_slots.view();
        let within = Movement {
            parts,
            send: PeerCounts::of(&hops.slots, &hops.slots),
            recv: PeerCounts::of(&hops.choices, &hops.choices),
            sources: GatherSources {
                rows: back.rows.borrow(),
                row_map: slots,
                weights: back.weights.as_ref().map(TensorRef::borrow),
                weight_map: slots,
                scales: None,
            },
            last: false,
        };
        let outputs = exchange(&mut self.core, step, &within)?;
        let sums = self.host_sums(step, hops, &outputs, back.rows.borrow());
        let (sums, weights) = step.refuse_own_error(&mut self.core, sums)?;
        let across = Movement {
            parts: RowParts { weight: weight * step.handle.spec().top_k, ..parts },
            send: PeerCounts::of(&hops.arriving, &hops.arriving),
            recv: PeerCounts::of(&hops.crossing, &hops.crossing),
            sources: GatherSources {
                rows: sums.view(),
                row_map: hops.list(&hops.arrived_rows)?,
                weights: weights.as_ref().map(Tensor::view),
                weight_map: hops.list(&hops.arrived_rows)?,
                scales: None,
            },
            last: true,
        };
        let returned = exchange(&mut self.core, step, &across)?;
        let mover = RowMover::of(&self.core.device, step.handle);
        mover.reduce(rows_of(step, &returned)?, hops.rows(&hops.row_of, self.place.hosts)?, back.out)?;
        if let (Some(out), Some(weights)) = (back.out_weights, &returned.weights) {
            mover.gather_elements(weights.view(), hops.list(&hops.weight_of)?, out)?;
        }
        Ok(())
    }
}

impl<D: Kernels> Hierarchical<D> {
    /// The outputs of this host's ranks added for each row that has arrived, and the K weights of each.
    fn host_sums(
        &self,
        step: &HandleCall<'_, D>,
        hops: &HopMaps<D>,
        outputs: &ReceivedRows<D>,
        like: TensorRef<'_, D>,
    ) -> Result<(Tensor<D>, Option<Tensor<D>>)> {
        let (device, k) = (&self.core.device, step.handle.spec().top_k);
        let mover = RowMover::of(device, step.handle);
        let rows = hops.arrived_rows.len();
        let mut sums = Tensor::empty(device, like.dtype(), &[rows, like.row_bytes() / like.dtype().size()])?;
        mover.reduce(rows_of(step, outputs)?, hops.rows(&hops.choice_of, k)?, sums.view_mut())?;
        let Some(weights) = &outputs.weights else { return Ok((sums, None)) };
        let mut by_row = Tensor::empty(device, weights.dtype(), &[rows, k])?;
        mover.gather_elements(weights.view(), hops.rows(&hops.choice_of, k)?, by_row.view_mut())?;
        Ok((sums, Some(by_row)))
    }
}
