//! The parameters that a save writes, asked for matrix by matrix: this process's own, or those of several ranks, which
//! come to the first one as it writes.

use std::borrow::Cow;
use std::ops::Range;

use super::convert::RowPlacement;
use super::gather::ExpertMatrix;
use super::layout::DiskRows;
use super::params::LayerBlock;
use super::parts::{RankBlock, RankModel, RankPart, RankTensor};
use crate::comm::{Communicator, Exchange, Op, Tag};
use crate::compare::gather_numbers;
use crate::config::MoeConfig;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::layer::{ParamKind, PerParam};
use crate::optim::ParamShard;
use crate::tensor::Tensor;

const CALL: &str = "Checkpoint::save_over_ranks";
/// The other ranks wait for the first one in collectives, whose time is bounded: it meets them at least once in so many
/// bytes.
pub(super) const BARRIER_BYTES: usize = 256 << 20;

/// Parameters of blocks and other tensors, and the ranks that hold them.
pub(super) struct RankParams<'a> {
    blocks: Cow<'a, [RankBlock<'a>]>,
    tensors: &'a [RankTensor<'a>],
    /// The ranks, where there are several.
    link: Option<&'a mut dyn RankExchange>,
    /// Elements that each rank holds of each item.
    held: Vec<(Item, Vec<Range<usize>>)>,
    /// Bytes written since the ranks met.
    since: usize,
}

/// A tensor that ranks hold parts of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    /// A parameter of the block with this index.
    Block(usize, ParamKind),
    /// Another tensor.
    Other(usize),
}

impl<'a> RankParams<'a> {
    /// Nothing.
    pub fn none() -> Self {
        Self { blocks: Cow::Borrowed(&[]), tensors: &[], link: None, held: Vec::new(), since: 0 }
    }

    /// Parts of a rank, and the other ranks.
    pub fn parts(model: RankModel<'a>) -> Self {
        Self { blocks: Cow::Borrowed(model.blocks), tensors: model.tensors, ..Self::none() }
    }

    /// The experts of rank `rank` of `ranks`, and what all hold.
    pub fn of_experts(blocks: &[LayerBlock<'a>], rank: usize, ranks: usize) -> Self {
        let blocks = blocks.iter().map(|LayerBlock { layer, params }| {
            let part = |kind: ParamKind, t: Option<&'a Tensor<crate::cpu::Cpu>>| {
                let shard = |t: &Tensor<crate::cpu::Cpu>| match kind.is_replicated() {
                    true => ParamShard::whole(t.dims()),
                    false => ParamShard::experts(t.dims(), rank, ranks),
                };
                t.map(|t| RankPart::of(shard(t), t))
            };
            RankBlock { layer: *layer, params: params.per_param().map(part) }
        });
        Self { blocks: Cow::Owned(blocks.collect()), ..Self::none() }
    }

    /// With the other ranks.
    pub fn over(self, link: &'a mut dyn RankExchange) -> Self {
        Self { link: Some(link), ..self }
    }

    /// Layers of the blocks, and the types of their parameters.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, PerParam<Option<DType>>)> {
        self.blocks.iter().map(|block| {
            let dtypes = block.params.as_ref().map(|_, part| part.as_ref().map(|part| part.dtype()));
            (block.layer, dtypes)
        })
    }

    /// The layer of a block.
    pub fn layer(&self, index: usize) -> usize {
        self.blocks[index].layer
    }

    /// Refuses parts of other sizes than the configuration's parameters.
    pub fn check_block(&self, index: usize, config: &MoeConfig) -> Result<()> {
        for (kind, part) in self.blocks[index].params.present() {
            let dims = kind.dims(config, config.router.num_experts);
            let count = dims.map_or(0, |dims| dims.iter().product());
            if part.count() != count || !part.dtype().is_float() {
                let found = format!("{} {} elements", part.count(), part.dtype());
                let name = self.name(Item::Block(index, kind));
                return Err(Error::invalid(CALL, name, format!("parts of {count} floating elements"), found));
            }
        }
        Ok(())
    }

    /// Other tensors than the blocks'.
    pub fn tensors(&self) -> &'a [RankTensor<'a>] {
        self.tensors
    }

    pub fn rank(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.rank())
    }

    /// Whether this rank writes.
    pub fn writes(&self) -> bool {
        self.rank() == 0
    }

    fn items(&self) -> Vec<Item> {
        let blocks = self.blocks.iter().enumerate();
        let params =
            blocks.flat_map(|(index, block)| block.params.present().map(move |(kind, _)| Item::Block(index, kind)));
        params.chain((0..self.tensors.len()).map(Item::Other)).collect()
    }

    fn part(&self, item: Item) -> Result<&RankPart<'a>> {
        let part = match item {
            Item::Block(index, kind) => self.blocks[index].params.get(kind),
            Item::Other(index) => self.tensors.get(index).map(|tensor| &tensor.part),
        };
        part.ok_or_else(|| Error::invalid(CALL, format!("{item:?}"), "a tensor", "none"))
    }

    fn name(&self, item: Item) -> String {
        match item {
            Item::Block(index, kind) => format!("layer {}: {}", self.layer(index), kind.name()),
            Item::Other(index) => self.tensors.get(index).map_or_else(String::new, |tensor| tensor.name.clone()),
        }
    }

    /// Learns which rank holds what (collective), and refuses what no rank holds.
    pub fn exchange_ranges(&mut self) -> Result<()> {
        let items = self.items();
        let mut own = Vec::with_capacity(2 * items.len());
        for item in &items {
            let Range { start, end } = self.part(*item)?.elements();
            own.extend([start as u64, end as u64]);
        }
        let all = match &mut self.link {
            Some(link) => link.gather(&own)?,
            None => vec![own],
        };
        let range = |numbers: &Vec<u64>, at: usize| numbers[2 * at] as usize..numbers[2 * at + 1] as usize;
        let held = |(at, item)| (item, all.iter().map(|numbers| range(numbers, at)).collect());
        self.held = items.into_iter().enumerate().map(held).collect();
        for (item, held) in &self.held {
            let count = self.part(*item)?.count();
            owners(held, 0..count).map_err(|missing| {
                let found = format!("none that holds element {missing} of {count}");
                Error::invalid(CALL, self.name(*item), "ranks whose parts make it whole", found)
            })?;
        }
        Ok(())
    }

    /// A matrix as it lies on disk: on the first rank; elsewhere nothing.
    pub fn matrix(&mut self, index: usize, matrix: &ExpertMatrix, config: &MoeConfig) -> Result<Vec<u8>> {
        let ExpertMatrix { expert, part } = matrix;
        let experts = config.router.num_experts;
        let all: usize = part.kind.dims(config, experts).unwrap_or_default().iter().product();
        let first = if part.kind.is_replicated() { 0 } else { expert * (all / experts) };
        let (start, rows, place) = match part.rows {
            DiskRows::From(start) => (start, part.out, DiskRows::From(0)),
            DiskRows::Alternate(half) => (0, 2 * half, part.rows),
        };
        let window = first + start * part.inn..first + (start + rows) * part.inn;
        let (values, size) = self.elements(Item::Block(index, part.kind), window)?;
        if values.is_empty() {
            return Ok(values);
        }
        let mut disk = vec![0; part.out * part.inn * size];
        let columns = if part.transposed { part.out } else { part.inn };
        let place = RowPlacement { first: 0, columns, transposed: part.transposed, rows: place, inn: part.inn };
        place.extract(&values, &mut disk, size);
        Ok(disk)
    }

    /// Elements of a tensor: on the first rank; elsewhere nothing. With the bytes of each.
    pub fn elements(&mut self, item: Item, window: Range<usize>) -> Result<(Vec<u8>, usize)> {
        let (rank, size) = (self.rank(), self.part(item)?.dtype().size());
        let bytes = window.len() * size;
        let held = self.held.iter().find(|(other, _)| *other == item).map_or(&[][..], |(_, held)| held);
        let owners = owners(held, window).map_err(|missing| {
            Error::invalid(CALL, self.name(item), "ranks whose parts make it whole", format!("no element {missing}"))
        })?;
        let own = owners.iter().find(|(owner, _)| *owner == rank);
        let own = match own {
            Some((_, range)) => self.part(item)?.read(&self.name(item), range.clone())?,
            None => Vec::new(),
        };
        let lengths: Vec<(usize, usize)> = owners.iter().map(|(owner, range)| (*owner, range.len() * size)).collect();
        match &mut self.link {
            Some(link) if owners.iter().any(|(owner, _)| *owner != 0) => {
                let received = link.fetch(&own, &lengths)?;
                self.since = 0;
                Ok((received, size))
            }
            _ => {
                self.wrote(bytes)?;
                Ok((own, size))
            }
        }
    }

    /// Says that so many bytes were written without the other ranks.
    pub fn wrote(&mut self, bytes: usize) -> Result<()> {
        self.since += bytes;
        if self.since < BARRIER_BYTES { Ok(()) } else { self.barrier() }
    }

    /// Waits for all ranks.
    pub fn barrier(&mut self) -> Result<()> {
        self.since = 0;
        self.link.as_mut().map_or(Ok(()), |link| link.barrier())
    }

    /// Passes a result on: of an error of this rank's own, the others hear.
    pub fn refuse_on_error<T>(&mut self, result: Result<T>) -> Result<T> {
        if let (Err(error), Some(link)) = (&result, &mut self.link)
            && !matches!(error, Error::Comm(_))
        {
            // By the link, whose device is not known here, and so not by `refusal`'s function of this name. That they
            // cannot be told is not this call's error.
            let _ = link.refuse(&error.to_string());
        }
        result
    }

    /// Refuses numbers that are not the same on every rank.
    pub fn agree(&mut self, number: u64) -> Result<()> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let numbers = link.gather(&[number])?;
        match numbers.iter().position(|other| *other != numbers[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::invalid(
                CALL,
                "shares",
                "the same layers, types and files on every rank",
                format!("others on rank {rank} than on rank 0"),
            )),
        }
    }
}

/// Ranks that hold the elements of a window, with what each of them gives, by what each rank holds; or the first element
/// that none holds.
fn owners(held: &[Range<usize>], window: Range<usize>) -> std::result::Result<Vec<(usize, Range<usize>)>, usize> {
    let mut owners = Vec::new();
    let mut next = window.start;
    while next < window.end {
        let holder = held.iter().position(|held| held.contains(&next)).ok_or(next)?;
        let end = held[holder].end.min(window.end);
        owners.push((holder, next..end));
        next = end;
    }
    Ok(owners)
}

/// The collectives that a save needs.
pub(super) trait RankExchange {
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    /// Bytes of several ranks, to rank 0, one behind the other in the order of `lengths` (rank and bytes, each rank
    /// once); nothing on the others. `own` is what this rank gives.
    fn fetch(&mut self, own: &[u8], lengths: &[(usize, usize)]) -> Result<Vec<u8>>;
    /// Every rank's numbers.
    fn gather(&mut self, numbers: &[u64]) -> Result<Vec<Vec<u64>>>;
    fn barrier(&mut self) -> Result<()>;
    fn refuse(&mut self, reason: &str) -> Result<()>;
}

const TAG: Tag = Tag { layer: 0, op: Op::Weights, sequence: 0 };

/// The ranks of a communicator.
pub(super) struct Ranks<'a, D: Kernels> {
    comm: &'a mut dyn Communicator<D>,
    /// The communicator's, if it tells its own: what is sent comes from the host, and goes there again, on its stream.
    device: D,
}

impl<'a, D: Kernels> Ranks<'a, D> {
    pub(super) fn new(device: &D, comm: &'a mut dyn Communicator<D>) -> Self {
        let device = comm.device().unwrap_or(device).clone();
        Self { comm, device }
    }
}

impl<D: Kernels> RankExchange for Ranks<'_, D> {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn ranks(&self) -> usize {
        self.comm.size()
    }

    fn fetch(&mut self, own: &[u8], lengths: &[(usize, usize)]) -> Result<Vec<u8>> {
        let (device, rank, ranks) = (&self.device, self.rank(), self.ranks());
        let mut send = Tensor::<D>::empty(device, DType::U8, &[own.len()])?;
        if !own.is_empty() {
            device.upload(own, send.view_mut())?;
        }
        let (mut send_bytes, mut recv_bytes) = (vec![0; ranks], vec![0; ranks]);
        send_bytes[0] = own.len();
        for (owner, bytes) in lengths.iter().filter(|_| rank == 0) {
            recv_bytes[*owner] = *bytes;
        }
        let mut recv = Tensor::<D>::empty(device, DType::U8, &[recv_bytes.iter().sum()])?;
        let exchange = Exchange {
            send: send.view(),
            send_bytes: &send_bytes,
            recv: recv.view_mut(),
            recv_bytes: &recv_bytes,
            dtype: DType::U8,
        };
        self.comm.all_to_all_v(TAG, exchange)?;
        if recv.bytes() == 0 {
            return Ok(Vec::new());
        }
        // They lie in the ranks' order.
        let bytes = device.download(recv.view())?;
        let first = |owner: usize| recv_bytes[..owner].iter().sum::<usize>();
        Ok(lengths.iter().flat_map(|(owner, len)| &bytes[first(*owner)..][..*len]).copied().collect())
    }

    fn gather(&mut self, numbers: &[u64]) -> Result<Vec<Vec<u64>>> {
        if numbers.is_empty() {
            return Ok(vec![Vec::new(); self.ranks()]);
        }
        let all = gather_numbers(&self.device, &mut *self.comm, TAG, numbers)?;
        Ok(all.chunks_exact(numbers.len()).map(<[u64]>::to_vec).collect())
    }

    fn barrier(&mut self) -> Result<()> {
        self.comm.barrier(TAG)
    }

    fn refuse(&mut self, reason: &str) -> Result<()> {
        self.comm.refuse(TAG, reason)
    }
}
