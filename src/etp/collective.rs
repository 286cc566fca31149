//! The collectives that a collective thread runs: each with its buffers, and what becomes of it.

use std::sync::Arc;

use crate::comm::refusal::{refuse_on_error, refuse_unless_entered};
use crate::comm::{Communicator, ReduceOp, Tag};
use crate::compare::{gather_numbers, meet};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::etp::buffers::stream_pair::{StreamPair, TransferBuffer};
use crate::etp::shards::in_place;
use crate::etp::shards::quantized::QuantizedShard;
use crate::etp::shards::source::ShardSource;
use crate::etp::{Reduction, ShardDevice, Shares};

/// A rank's shard on its way to the others.
#[derive(Debug)]
pub(in crate::etp) enum GatherInput<D: ShardDevice> {
    /// As it is.
    Plain(Arc<dyn ShardSource<D>>),
    /// As it was cast.
    ShardCodes(Arc<QuantizedShard<D>>),
    /// It lies in its place of what is gathered (`shards/in_place.rs`).
    Placed,
}

/// One collective.
#[derive(Debug)]
pub(in crate::etp) enum Collective<D: ShardDevice> {
    /// All ranks' shards to `into`.
    Gather { tag: Tag, shard: GatherInput<D>, into: TransferBuffer<D> },
    /// The ranks' amaxes, joined where they are.
    Join { tag: Tag, amaxes: TransferBuffer<D> },
    /// `gradient`, padded, to this rank's rows: their sum, or the other ranks' shares of it where the caller adds them.
    Reduce { tag: Tag, how: Reduction, gradient: TransferBuffer<D>, into: TransferBuffer<D> },
    /// A main gradient, summed over the replicas where it is.
    Sum { tag: Tag, how: Reduction, sums: TransferBuffer<D, Tensor<D>> },
    /// Brings all ranks together, as they are enqueued or run: after a refusal of one it fails on all.
    Meet { tag: Tag },
    /// In place of a collective that this rank cannot give: the others, which wait in it, are told why.
    Refuse { tag: Tag },
    /// Memory that the collective thread's collectives move beside the computation.
    Allocate { tag: Tag, dtype: DType, dims: Vec<usize>, made: Option<Tensor<D>> },
    /// A number of this rank, for all ranks'.
    Compare { tag: Tag, own: u64, all: Vec<u64> },
    /// Meets the other ranks after a failure: whatever they have in their collective threads fails, until all meet
    /// here.
    Recover { tag: Tag, reason: Option<String> },
}

/// A collective that is done, or enqueued: its buffers, in the collective's order, and what became of it.
#[derive(Debug)]
pub(in crate::etp) struct CollectiveResult<D: ShardDevice> {
    pub buffers: Vec<TransferBuffer<D>>,
    /// A main gradient, where that was summed.
    pub sums: Option<TransferBuffer<D, Tensor<D>>>,
    pub outcome: Result<()>,
    /// The end of its work.
    pub ready: Option<D::Event>,
    /// Memory, where that was asked for.
    pub made: Option<Tensor<D>>,
    /// All ranks' numbers, where they were compared.
    pub numbers: Vec<u64>,
}

impl<D: ShardDevice> CollectiveResult<D> {
    /// With nothing left on a stream.
    pub fn with(buffers: Vec<TransferBuffer<D>>, outcome: Result<()>) -> Self {
        Self { buffers, sums: None, outcome, ready: None, made: None, numbers: Vec::new() }
    }

    pub fn failed(error: Error) -> Self {
        Self::with(Vec::new(), Err(error))
    }
}

impl<D: ShardDevice> Collective<D> {
    /// Gives a collective's buffers back, with what became of it.
    pub fn end(self, outcome: Result<()>) -> CollectiveResult<D> {
        match self {
            Collective::Gather { into: buffer, .. } | Collective::Join { amaxes: buffer, .. } => {
                CollectiveResult::with(vec![buffer], outcome)
            }
            Collective::Reduce { gradient, into, .. } => CollectiveResult::with(vec![gradient, into], outcome),
            Collective::Sum { sums, .. } => {
                CollectiveResult { sums: Some(sums), ..CollectiveResult::with(Vec::new(), outcome) }
            }
            Collective::Allocate { made, .. } => {
                CollectiveResult { made, ..CollectiveResult::with(Vec::new(), outcome) }
            }
            Collective::Compare { all, .. } => {
                CollectiveResult { numbers: all, ..CollectiveResult::with(Vec::new(), outcome) }
            }
            Collective::Meet { .. } | Collective::Refuse { .. } | Collective::Recover { .. } => {
                CollectiveResult::with(Vec::new(), outcome)
            }
        }
    }

    /// Runs it, or enqueues it, behind `after`.
    pub fn run(
        mut self,
        comm: &mut dyn Communicator<D>,
        (streams, after): (&StreamPair<D>, Result<Option<D::Event>>),
    ) -> CollectiveResult<D> {
        let transfer = &streams.transfer;
        let waited = after.and_then(|after| transfer.wait(after.as_ref()));
        let outcome = refuse_on_error(comm, self.tag(), waited).and_then(|()| self.collective(comm, transfer));
        match self {
            // Nothing is left on the stream, and what all ranks have made none of them gives up.
            Collective::Allocate { .. } | Collective::Compare { .. } => self.end(outcome),
            collective => {
                let (ready, outcome) = match transfer.record_event() {
                    Ok(ready) => (ready, outcome),
                    Err(error) => (None, outcome.and(Err(error))),
                };
                CollectiveResult { ready, ..collective.end(outcome) }
            }
        }
    }

    fn tag(&self) -> Tag {
        match self {
            Collective::Gather { tag, .. } | Collective::Join { tag, .. } | Collective::Reduce { tag, .. } => *tag,
            Collective::Allocate { tag, .. } | Collective::Compare { tag, .. } | Collective::Sum { tag, .. } => *tag,
            Collective::Meet { tag } | Collective::Refuse { tag } | Collective::Recover { tag, .. } => *tag,
        }
    }

    fn collective(&mut self, comm: &mut dyn Communicator<D>, transfer: &D) -> Result<()> {
        let gone = || Error::invalid("etp", "buffer", "one for the collective", "none");
        match self {
            Collective::Gather { tag, shard, into } => {
                let into = into.buffer().ok_or_else(gone)?.tensor.view_mut();
                match shard {
                    GatherInput::ShardCodes(quantized) => quantized.gather(comm, *tag, into),
                    GatherInput::Plain(shard) => gather_plain(comm, *tag, &**shard, into),
                    GatherInput::Placed => comm.gather_in_place(*tag, into),
                }
            }
            Collective::Join { tag, amaxes } => {
                let amaxes = &mut amaxes.buffer().ok_or_else(gone)?.tensor;
                let dims = amaxes.dims().to_vec();
                // No amax has a sign, so their bits are in the numbers' order, and a NaN's are the largest: integers,
                // which every communicator joins where they are.
                let bits = TensorMut::new(amaxes.view_mut().into_data(), DType::I32, &dims)?;
                comm.all_reduce(*tag, ReduceOp::Max, bits)
            }
            Collective::Reduce { tag, how, gradient, into } => {
                let gradient = gradient.buffer().ok_or_else(gone)?.tensor.view();
                reduce(comm, *tag, *how, (gradient, into.buffer().ok_or_else(gone)?.tensor.view_mut()))
            }
            Collective::Allocate { tag, dtype, dims, made } => {
                *made = comm.memory(*tag, *dtype, dims)?;
                Ok(())
            }
            Collective::Compare { tag, own, all } => {
                *all = gather_numbers(transfer, comm, *tag, &[*own])?;
                Ok(())
            }
            Collective::Sum { tag, how, sums } => {
                let sums = sums.buffer().ok_or_else(gone)?;
                sum_over_replicas(&StreamPair::of_one(transfer), comm, (*tag, *how), sums)
            }
            Collective::Meet { tag } => meet(transfer, comm, *tag),
            // Its order brings the reason, and does not come here.
            Collective::Refuse { .. } => Err(gone()),
            Collective::Recover { tag, reason } => recover(comm, *tag, reason.take()),
        }
    }
}

fn gather_plain<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    shard: &dyn ShardSource<D>,
    mut into: TensorMut<'_, D>,
) -> Result<()> {
    refuse_unless_entered(comm, tag, |entry| {
        shard.read(&mut |shard| gather(entry.enter(), tag, shard, into.reborrow()))
    })
}

/// A shard of another size is told to the other ranks, and exchanged with nobody.
fn gather<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    shard: TensorRef<'_, D>,
    into: TensorMut<'_, D>,
) -> Result<()> {
    let fits = in_place::fits(&shard, &into, comm.size());
    refuse_on_error(comm, tag, fits)?;
    comm.all_gather(tag, shard, into)
}

fn reduce<D: Device>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    how: Reduction,
    (gradient, into): (TensorRef<'_, D>, TensorMut<'_, D>),
) -> Result<()> {
    match how {
        Reduction::Native => comm.reduce_scatter(tag, gradient, into),
        Reduction::Pairwise => comm.exchange_blocks(tag, gradient, into),
    }
}

/// Sums a main gradient over the replicas, where it is, between work of the computation's stream. Sums in pairs take
/// room for all replicas' values, until they are added.
pub(in crate::etp) fn sum_over_replicas<D: ShardDevice>(
    streams: &StreamPair<D>,
    comm: &mut dyn Communicator<D>,
    (tag, how): (Tag, Reduction),
    sums: &mut Tensor<D>,
) -> Result<()> {
    match how {
        Reduction::Native => streams.run_on_transfer(|| comm.all_reduce(tag, ReduceOp::Sum, sums.view_mut())),
        Reduction::Pairwise => {
            let dims = [comm.size() * sums.view().rows(), sums.dims()[1]];
            let memory = Tensor::empty(&streams.compute, sums.dtype(), &dims);
            let mut shares = refuse_on_error(comm, tag, memory)?;
            streams.run_on_transfer(|| comm.all_gather(tag, sums.view(), shares.view_mut()))?;
            let shares = Shares::together(shares.view(), sums.view().count(), 1.0, true)?;
            streams.compute.add_shares(shares, sums.view_mut())
        }
    }
}

/// Ranks that are still in an earlier collective meet this as a mismatch, and are one collective further. After as many
/// meetings as the longest collective thread has collectives, all ranks are here.
pub(crate) fn recover<D: Device>(comm: &mut dyn Communicator<D>, tag: Tag, reason: Option<String>) -> Result<()> {
    use CommError::{ArgumentMismatch, Refused, SizeMismatch, TagMismatch};
    let mut met = match reason {
        Some(reason) => comm.refuse(tag, &reason).and_then(|()| comm.barrier(tag)),
        None => comm.barrier(tag),
    };
    loop {
        match met {
            Err(Error::Comm(Refused { .. } | TagMismatch { .. } | SizeMismatch { .. } | ArgumentMismatch { .. }))
                if !comm.ended() =>
            {
                met = comm.barrier(tag)
            }
            other => return other,
        }
    }
}
