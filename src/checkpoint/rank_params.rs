//! The parameters that a save writes, asked for matrix by matrix: this process's own, or those of several ranks, which
//! come to the first one as it writes.

use std::borrow::Cow;

use super::BlockParams;
use super::gather::{ExpertMatrix, disk_bytes};
use crate::comm::{Exchange, Op, Tag};
use crate::dtype::DType;
use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// The other ranks wait for the first one in collectives, whose time is bounded: it meets them at least once in so many
/// bytes.
const BARRIER_BYTES: usize = 256 << 20;

/// Parameters of blocks, by layer, and the ranks that hold them.
pub(super) struct RankParams<'a> {
    pub blocks: &'a [(usize, &'a BlockParams)],
    /// The ranks, where there are several.
    link: Option<&'a mut dyn RankExchange>,
    /// Bytes written since the ranks met.
    since: usize,
}

impl<'a> RankParams<'a> {
    /// Whole blocks.
    pub fn own(blocks: &'a [(usize, &'a BlockParams)]) -> Self {
        Self { blocks, link: None, since: 0 }
    }

    /// Each rank's experts.
    pub fn over(blocks: &'a [(usize, &'a BlockParams)], link: &'a mut dyn RankExchange) -> Self {
        Self { blocks, link: Some(link), since: 0 }
    }

    pub fn rank(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.rank())
    }

    pub fn ranks(&self) -> usize {
        self.link.as_ref().map_or(1, |link| link.ranks())
    }

    /// Whether this rank writes.
    pub fn writes(&self) -> bool {
        self.rank() == 0
    }

    /// A matrix as it lies on disk: on the first rank; elsewhere nothing.
    pub fn matrix(
        &mut self,
        index: usize,
        matrix: &ExpertMatrix,
        dtype: DType,
        experts: usize,
    ) -> Result<Cow<'static, [u8]>> {
        let ExpertMatrix { expert, part } = matrix;
        let (local, rank) = (experts / self.ranks(), self.rank());
        let owner = if part.kind.is_replicated() { 0 } else { expert / local };
        let count = part.out * part.inn * dtype.size();
        let own = (owner == rank).then(|| disk_bytes(part, self.blocks[index].1, expert % local, local));
        let own = own.transpose()?.unwrap_or_default();
        match &mut self.link {
            Some(link) if owner != 0 => {
                let received = link.fetch(owner, &own, count)?;
                self.since = 0;
                Ok(received.into())
            }
            _ => {
                self.wrote(count)?;
                Ok(own.into())
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
            // That they cannot be told is not this call's error.
            let _ = link.refuse(&error.to_string());
        }
        result
    }

    /// Refuses numbers that are not the same on every rank.
    pub fn agree(&mut self, number: u64) -> Result<()> {
        let Some(link) = &mut self.link else { return Ok(()) };
        let numbers = link.gather(number)?;
        match numbers.iter().position(|other| *other != numbers[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::invalid(
                "Checkpoint::save_over_ranks",
                "shares",
                "the same layers, types and files on every rank",
                format!("others on rank {rank} than on rank 0"),
            )),
        }
    }
}

/// The collectives that a save needs.
pub(super) trait RankExchange {
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    /// Bytes of `owner`'s, to rank 0; nothing on the others.
    fn fetch(&mut self, owner: usize, own: &[u8], count: usize) -> Result<Vec<u8>>;
    /// Every rank's number.
    fn gather(&mut self, number: u64) -> Result<Vec<u64>>;
    fn barrier(&mut self) -> Result<()>;
    fn refuse(&mut self, reason: &str) -> Result<()>;
}

const TAG: Tag = Tag { layer: 0, op: Op::Weights, sequence: 0 };

impl<D: Kernels> RankExchange for Group<D> {
    fn rank(&self) -> usize {
        Group::rank(self)
    }

    fn ranks(&self) -> usize {
        Group::ranks(self)
    }

    fn fetch(&mut self, owner: usize, own: &[u8], count: usize) -> Result<Vec<u8>> {
        let device = self.device().clone();
        let (rank, ranks) = (Group::rank(self), Group::ranks(self));
        let mut send = Tensor::<D>::empty(&device, DType::U8, &[own.len()])?;
        if !own.is_empty() {
            device.upload(own, send.view_mut())?;
        }
        let (mut send_bytes, mut recv_bytes) = (vec![0; ranks], vec![0; ranks]);
        send_bytes[0] = own.len();
        recv_bytes[owner] = if rank == 0 { count } else { 0 };
        let mut recv = Tensor::<D>::empty(&device, DType::U8, &[recv_bytes[owner]])?;
        let exchange = Exchange {
            send: send.view(),
            send_bytes: &send_bytes,
            recv: recv.view_mut(),
            recv_bytes: &recv_bytes,
            payload: DType::U8,
        };
        self.dispatcher().communicator().all_to_all_v(TAG, exchange)?;
        if recv.bytes() == 0 { Ok(Vec::new()) } else { device.download(recv.view()) }
    }

    fn gather(&mut self, number: u64) -> Result<Vec<u64>> {
        let device = self.device().clone();
        let mut send = Tensor::<D>::empty(&device, DType::U8, &[8])?;
        device.upload(&number.to_le_bytes(), send.view_mut())?;
        let mut recv = Tensor::<D>::empty(&device, DType::U8, &[8 * Group::ranks(self)])?;
        self.dispatcher().communicator().all_gather(TAG, send.view(), recv.view_mut())?;
        let bytes = device.download(recv.view())?;
        Ok(bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect())
    }

    fn barrier(&mut self) -> Result<()> {
        self.dispatcher().communicator().barrier(TAG)
    }

    fn refuse(&mut self, reason: &str) -> Result<()> {
        self.dispatcher().communicator().refuse(TAG, reason)
    }
}
