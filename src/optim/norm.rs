//! The norm over all ranks' gradients: which rank sums which rows, and where each sum goes.

use std::ops::Range;

use crate::DType;
use crate::comm::{Communicator, Op, Tag};
use crate::compare::{ComparedField, compare_fields, gather_numbers};
use crate::error::{Error, Result};
use crate::etp::StreamPair;
use crate::fnv1a::fnv1a;
use crate::kernels::optimizer::{LEAF, NormNodes, SquareSums, SquaredTensor, nodes};
use crate::tensor::{Tensor, TensorRef};

use super::{ParamSpec, StepDevice};

const CALL: &str = "AdamW";

/// How this rank takes part in a norm.
#[derive(Debug)]
pub(super) struct NormPlan<D: StepDevice> {
    /// Height and first node of each of this rank's parts.
    own: Vec<OwnNodes>,
    /// This rank's nodes.
    nodes: Tensor<D>,
    /// All ranks', if there are others.
    gathered: Option<Tensor<D>>,
    order: Tensor<D>,
    starts: Tensor<D>,
    sums: Tensor<D>,
}

#[derive(Debug, Clone, Copy)]
struct OwnNodes {
    height: u32,
    first: usize,
}

/// Rows of each parameter that each rank holds.
pub(super) type RankRows = Vec<Vec<Range<usize>>>;

impl<D: StepDevice> NormPlan<D> {
    /// `rank_rows[rank][parameter]`, of all ranks.
    pub(super) fn new(device: &D, specs: &[ParamSpec], rank_rows: &RankRows, rank: usize) -> Result<Self> {
        let heights: Vec<u32> = (0..specs.len()).map(|p| height(&specs[p], rank_rows.iter().map(|h| &h[p]))).collect();
        let layout = |parts: &[Range<usize>]| {
            let mut next = 0;
            let mut firsts = Vec::with_capacity(parts.len());
            for ((part, spec), height) in parts.iter().zip(specs).zip(&heights) {
                firsts.push(next);
                next += nodes(part.len() * leaves_of_row(spec), *height);
            }
            (firsts, next)
        };
        let layouts: Vec<_> = rank_rows.iter().map(|parts| layout(parts)).collect();
        // Equal blocks for the all-gather.
        let block = layouts.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
        let (mut order, mut starts) = (Vec::new(), vec![0]);
        for (p, (spec, height)) in specs.iter().zip(&heights).enumerate() {
            for (owner, rows) in owners(spec, rank_rows, p)? {
                let first = owner * block + layouts[owner].0[p];
                let count = nodes(rows.len() * leaves_of_row(spec), *height);
                order.extend((first..first + count).map(|at| at as i32));
            }
            starts.push(order.len() as i32);
        }
        if i32::try_from(rank_rows.len().saturating_mul(block)).is_err() || i32::try_from(order.len()).is_err() {
            return Err(Error::invalid(CALL, "parameters", "cuts of at most 2^31 sums", order.len()));
        }
        let put = |values: Vec<i32>| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            upload(device, DType::I32, &bytes)
        };
        let own =
            layouts[rank].0.iter().zip(&heights).map(|(first, height)| OwnNodes { first: *first, height: *height });
        Ok(Self {
            own: own.collect(),
            nodes: Tensor::zeros(device, DType::F64, &[block])?,
            gathered: match rank_rows.len() {
                1 => None,
                ranks => Some(Tensor::empty(device, DType::F64, &[ranks * block])?),
            },
            // An empty tensor has no address.
            order: put(if order.is_empty() { vec![0] } else { order })?,
            starts: put(starts)?,
            sums: Tensor::empty(device, DType::F64, &[specs.len()])?,
        })
    }

    /// This rank's sums of squares.
    pub(super) fn own_sums(&mut self, device: &D, step: NormStep<'_, '_, D>) -> Result<()> {
        let parts = step.specs.iter().zip(&self.own).zip(step.gradients);
        let mut tensors = Vec::with_capacity(self.own.len());
        let mut absent = false;
        for ((spec, own), gradient) in parts {
            let (rows, width) = (spec.shard.rows().len(), spec.shard.width());
            let Some(gradient) = gradient.as_ref() else {
                absent = true;
                continue;
            };
            if rows * width > 0 {
                let (height, node) = (own.height, own.first);
                tensors.push(SquaredTensor { gradient: gradient.borrow(), rows, width, height, node });
            }
        }
        if absent {
            // Nodes that are not written count nothing.
            device.zero(self.nodes.view_mut().into_data())?;
        }
        device.square_sums(SquareSums { tensors, out: self.nodes.view_mut() })
    }

    /// All ranks' sums.
    pub(super) fn gather(
        &mut self,
        comm: Option<&mut (dyn Communicator<D> + 'static)>,
        streams: &StreamPair<D>,
        tag: Tag,
    ) -> Result<()> {
        let (Some(comm), Some(gathered)) = (comm, &mut self.gathered) else { return Ok(()) };
        streams.run_on_transfer(|| comm.all_gather(tag, self.nodes.view(), gathered.view_mut()))
    }

    /// All ranks' sums, as the numbers of a step are made of them.
    pub(super) fn nodes(&mut self) -> NormNodes<'_, D> {
        NormNodes {
            nodes: self.gathered.as_ref().unwrap_or(&self.nodes).view(),
            order: self.order.view(),
            starts: self.starts.view(),
            sums: self.sums.view_mut(),
        }
    }
}

/// The gradients of a step.
pub(super) struct NormStep<'s, 'a, D: StepDevice> {
    pub(super) specs: &'s [ParamSpec],
    /// One a parameter.
    pub(super) gradients: &'s [Option<TensorRef<'a, D>>],
}

fn leaves_of_row(spec: &ParamSpec) -> usize {
    spec.shard.width().div_ceil(LEAF)
}

/// Height of the largest nodes that no cut divides: the whole tree where there is none.
fn height<'h>(spec: &ParamSpec, parts: impl Iterator<Item = &'h Range<usize>>) -> u32 {
    let (leaves, all) = (leaves_of_row(spec), spec.shard.all_rows());
    let cuts = parts.filter(|rows| !rows.is_empty()).flat_map(|rows| [rows.start, rows.end]);
    let most = (leaves * all).next_power_of_two().trailing_zeros();
    cuts.filter(|row| *row != 0 && *row != all).map(|row| (row * leaves).trailing_zeros()).fold(most, u32::min)
}

/// The ranks that count for a parameter, with their rows, in the rows' order: of those that hold the same rows the
/// first.
pub(super) fn owners(spec: &ParamSpec, rank_rows: &RankRows, p: usize) -> Result<Vec<(usize, Range<usize>)>> {
    let mut parts: Vec<(usize, Range<usize>)> =
        rank_rows.iter().map(|parts| parts[p].clone()).enumerate().filter(|(_, rows)| !rows.is_empty()).collect();
    parts.sort_by_key(|(rank, rows)| (rows.start, rows.end, *rank));
    parts.dedup_by(|next, first| next.1 == first.1);
    let mut end = 0;
    for (rank, rows) in &parts {
        if rows.start != end {
            let expected = format!("the ranks' rows to make up its {} rows, each once", spec.shard.all_rows());
            let found = format!("rows {rows:?} of rank {rank} behind row {end}");
            return Err(Error::invalid(CALL, format!("parameter {}", spec.name), expected, found));
        }
        end = rows.end;
    }
    // A parameter without elements has no rows that anybody holds.
    if end != spec.shard.all_rows() && spec.shard.width() > 0 {
        let expected = format!("the ranks' rows to make up its {} rows", spec.shard.all_rows());
        return Err(Error::invalid(CALL, format!("parameter {}", spec.name), expected, format!("{end} of them")));
    }
    Ok(parts)
}

/// Parts of a parameter's description, which ranks compare by their hashes.
const PARTS: [&str; 4] = ["name", "dims", "dtype", "group"];
/// Numbers of a parameter in what ranks exchange: those hashes, and the rows that the rank holds.
const COLUMNS: usize = PARTS.len() + 2;
/// Bytes of a part of a description, of which two differ; a longer one is cut.
const TEXT_BYTES: usize = 256;

/// What all ranks have alike of an optimizer but for its parameters.
pub(super) struct OptimizerFields<'a> {
    /// The number of groups among them.
    pub(super) fields: &'a [ComparedField],
    /// The groups' options.
    pub(super) of_groups: &'a [ComparedField],
}

/// Exchanges which rows all ranks hold. Ranks compare fields and parameters first: one that differs is named on every
/// rank.
pub(super) fn exchange<D: StepDevice>(
    device: &D,
    comm: Option<&mut (dyn Communicator<D> + 'static)>,
    specs: &[ParamSpec],
    OptimizerFields { fields, of_groups }: OptimizerFields<'_>,
) -> Result<(RankRows, usize)> {
    let own: Vec<Range<usize>> = specs.iter().map(|spec| spec.shard.rows()).collect();
    let Some(comm) = comm.filter(|comm| comm.size() > 1) else { return Ok((vec![own], 0)) };
    let (ranks, rank) = (comm.size(), comm.rank());
    let streams = StreamPair::new(device, comm.device());
    let mut gather = |sequence: u64, numbers: &[u64]| -> Result<Vec<Vec<u64>>> {
        let all = gather_numbers(&streams.transfer, comm, Tag { layer: 0, op: Op::Init, sequence }, numbers)?;
        let of_rank = |rank: usize| all[rank * numbers.len()..(rank + 1) * numbers.len()].to_vec();
        Ok((0..ranks).map(of_rank).collect())
    };

    let all = gather(0, &ComparedField::values(fields))?.concat();
    compare_fields(CALL, rank, fields, &all)?;
    // As many groups everywhere, as `fields` says.
    let all = gather(3, &ComparedField::values(of_groups))?.concat();
    compare_fields(CALL, rank, of_groups, &all)?;
    let columns = |spec: &ParamSpec| {
        let rows = spec.shard.rows();
        description(spec).map(fnv1a).into_iter().chain([rows.start as u64, rows.end as u64])
    };
    let table: Vec<u64> = specs.iter().flat_map(columns).collect();
    let all = gather(1, &table)?;
    for (p, spec) in specs.iter().enumerate() {
        for (part, name) in PARTS.iter().enumerate() {
            let at = p * COLUMNS + part;
            // A number that is not the same on all ranks differs from another rank's on each of them.
            let Some(peer) = all.iter().position(|theirs| theirs[at] != table[at]) else { continue };
            // All ranks are here: this part is the first that differs on each of them.
            let own = &description(spec)[part];
            let texts = gather(2, &as_numbers(own))?;
            let of = if part == 0 { String::new() } else { format!(" of {}", spec.name) };
            let field = format!("optimizer.parameters[{p}].{name}{of}");
            let (value, peer_value) = (own.clone(), as_text(&texts[peer]));
            return Err(Error::ConfigMismatch { call: CALL, field, rank, value, peer, peer_value });
        }
    }
    let rows = |of: &[u64]| of[PARTS.len()] as usize..of[PARTS.len() + 1] as usize;
    Ok((all.iter().map(|table| table.chunks(COLUMNS).map(rows).collect()).collect(), rank))
}

/// What ranks must have alike of a parameter, as [`PARTS`] names it.
fn description(spec: &ParamSpec) -> [String; PARTS.len()] {
    [spec.name.clone(), format!("{:?}", spec.shard.dims()), spec.dtype.to_string(), spec.group.to_string()]
}

/// A text as numbers that travel.
fn as_numbers(text: &str) -> Vec<u64> {
    let mut bytes = text.as_bytes()[..text.floor_char_boundary(TEXT_BYTES)].to_vec();
    bytes.resize(TEXT_BYTES, 0);
    bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
}

/// The text again.
fn as_text(numbers: &[u64]) -> String {
    let bytes: Vec<u8> = numbers.iter().flat_map(|v| v.to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string()
}

/// A vector of these bytes.
pub(super) fn upload<D: StepDevice>(device: &D, dtype: DType, bytes: &[u8]) -> Result<Tensor<D>> {
    let mut to = Tensor::empty(device, dtype, &[bytes.len() / dtype.size()])?;
    device.upload(bytes, to.view_mut())?;
    Ok(to)
}
