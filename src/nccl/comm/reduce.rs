//! Sums over the ranks in rank order.

use crate::comm::ReduceOp;
use crate::cpu::sum_ranks;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Kernels, Origin, ReduceRows};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use crate::nccl::comm::communicator::NcclComm;
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::ffi::sys::RedOp;

use super::heuristics::{MOST_MAPS, ONE_EXCHANGE_BYTES, ROW_ELEMENTS};

/// How the ranks' values are joined.
enum JoinMethod {
    /// By this crate's kernel.
    Kernel,
    /// By NCCL: any order gives the same bits.
    Library(RedOp),
    /// By the host.
    Host,
}

fn join_method(op: ReduceOp, dtype: DType) -> JoinMethod {
    match (op, dtype) {
        (ReduceOp::Sum, DType::F32 | DType::F16 | DType::BF16) => JoinMethod::Kernel,
        (ReduceOp::Sum, DType::I64 | DType::I32 | DType::U8) => JoinMethod::Library(RedOp::SUM),
        (ReduceOp::Max, DType::I64 | DType::I32 | DType::U8) => JoinMethod::Library(RedOp::MAX),
        _ => JoinMethod::Host,
    }
}

/// Length of the rows that a part of so many elements is cut into: a divisor of it with as many twos as it has itself,
/// so that rows begin where words do.
fn row(count: usize) -> usize {
    let words = ROW_ELEMENTS.min(1 << count.trailing_zeros().min(ROW_ELEMENTS.ilog2()));
    let rest = count / words;
    words * (1..=ROW_ELEMENTS / words).rev().find(|n| rest.is_multiple_of(*n)).unwrap_or(1)
}

impl NcclComm {
    /// Block `rank` of `send`, summed over the ranks; `middle`: more of the collective follows.
    pub(in crate::nccl) fn sum_blocks(
        &mut self,
        subject: CollectiveInfo,
        middle: bool,
        send: TensorRef<'_, Cuda>,
        recv: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        let (size, dtype, count) = (self.session.comm_handle.size, recv.dtype(), recv.count());
        match join_method(ReduceOp::Sum, dtype) {
            JoinMethod::Kernel => {
                let parts = Tensor::empty(&self.cuda, dtype, &[size, count]);
                let mut parts = self.session.check_begun(subject, parts)?;
                let bytes = vec![count * dtype.size(); size];
                self.scatter_pieces(subject, send.data(), &bytes, parts.view_mut().into_data(), &bytes)?;
                let added = self.add(&parts, recv);
                // Where another call follows, the others wait in it.
                if middle { self.session.check_begun(subject, added) } else { added }
            }
            JoinMethod::Library(_) => {
                let (from, to) = (send.data().address(), recv.into_data().address());
                // SAFETY: `send` has as many blocks of `recv`'s size as there are ranks; both are given back in the
                // stream's order.
                self.enqueue(subject, |comm_stream| unsafe { comm_stream.reduce_scatter(from, to, count, dtype) })
            }
            JoinMethod::Host => {
                let block = count * dtype.size();
                let parts = self.gathered(subject, send)?;
                let own = self.session.comm_handle.rank * block..(self.session.comm_handle.rank + 1) * block;
                let parts: Vec<&[u8]> = parts.chunks_exact(size * block).map(|p| &p[own.clone()]).collect();
                self.joined(ReduceOp::Sum, &parts, recv)
            }
        }
    }

    /// The buffer joined over the ranks, on all of them.
    pub(in crate::nccl) fn join_all(
        &mut self,
        subject: CollectiveInfo,
        op: ReduceOp,
        mut buffer: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        let (size, dtype, count) = (self.session.comm_handle.size, buffer.dtype(), buffer.count());
        let bytes = count * dtype.size();
        match join_method(op, dtype) {
            JoinMethod::Library(reduction) => {
                let address = buffer.into_data().address();
                // SAFETY: the view has that many elements and is given back in the stream's order.
                self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_reduce(address, count, dtype, reduction) })
            }
            JoinMethod::Host => {
                let parts = self.gathered(subject, buffer.as_ref())?;
                let parts: Vec<&[u8]> = parts.chunks_exact(bytes).collect();
                self.joined(op, &parts, buffer)
            }
            JoinMethod::Kernel if bytes <= ONE_EXCHANGE_BYTES || !count.is_multiple_of(size) => {
                let parts = self.gather(subject, buffer.as_ref())?.reshape(&[size, count])?;
                self.add(&parts, buffer)
            }
            JoinMethod::Kernel => {
                let block = count / size;
                let own = Tensor::empty(&self.cuda, dtype, &[block]);
                let mut own = self.session.check_begun(subject, own)?;
                self.sum_blocks(subject, true, buffer.as_ref(), own.view_mut())?;
                let (from, to) = (own.view().data().address(), buffer.reborrow().into_data().address());
                // SAFETY: the buffer has `size` times the block's bytes; both are given back in the stream's order.
                self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_gather(from, to, block * dtype.size()) })
            }
        }
    }

    /// Every rank's `send`, in rank order.
    fn gather(&mut self, subject: CollectiveInfo, send: TensorRef<'_, Cuda>) -> Result<Tensor<Cuda>> {
        let bytes = Cuda::len(send.data());
        let parts = Tensor::empty(&self.cuda, send.dtype(), &[self.session.comm_handle.size * send.count()]);
        let mut parts = self.session.check_begun(subject, parts)?;
        let (from, to) = (send.data().address(), parts.view_mut().into_data().address());
        // SAFETY: `parts` has as many times the bytes of `send` as there are ranks; both are given back in the stream's
        // order.
        self.enqueue(subject, |comm_stream| unsafe { comm_stream.all_gather(from, to, bytes) })?;
        Ok(parts)
    }

    /// The same on the host.
    fn gathered(&mut self, subject: CollectiveInfo, send: TensorRef<'_, Cuda>) -> Result<Vec<u8>> {
        let parts = self.gather(subject, send)?;
        self.cuda.download(parts.view())
    }

    fn joined(&self, op: ReduceOp, parts: &[&[u8]], out: TensorMut<'_, Cuda>) -> Result<()> {
        let mut bytes = vec![0; out.count() * out.dtype().size()];
        sum_ranks(op, out.dtype(), parts, &mut bytes);
        self.cuda.upload(&bytes, out)
    }

    /// Adds the ranks' parts `[size, count]`, in rank order, in f32.
    fn add(&mut self, parts: &Tensor<Cuda>, mut out: TensorMut<'_, Cuda>) -> Result<()> {
        let (size, count) = (self.session.comm_handle.size, out.count());
        let width = row(count);
        let rows = count / width;
        if i32::try_from(size * rows).is_err() {
            let expected = format!("at most {} rows of a divisor of theirs up to {ROW_ELEMENTS}", i32::MAX);
            return Err(Error::invalid("sum", "elements", expected, count));
        }
        if !self.sums.maps.contains_key(&rows) {
            let map: Vec<i32> = (0..rows).flat_map(|row| (0..size).map(move |p| (p * rows + row) as i32)).collect();
            let map = Tensor::from_vec(map, &[rows, size])?.to(&self.cuda)?;
            if self.sums.maps.len() >= MOST_MAPS {
                self.sums.maps.clear();
            }
            self.sums.maps.insert(rows, map);
        }
        let Some(map) = self.sums.maps.get(&rows) else { return Ok(()) };
        let call = ReduceRows {
            source: parts.view().reshape(&[size * rows, width])?,
            map: map.view(),
            origin: Origin::default(),
            out: out.reborrow().reshape(&[rows, width])?,
        };
        self.cuda.reduce_rows(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_divide_and_begin_at_words() {
        for (count, width) in [(1, 1), (7, 7), (2048, 2048), (6144, 2048), (3000, 1000), (4099 * 3, 3), (12 * 4099, 12)]
        {
            assert_eq!(row(count), width, "{count}");
        }
        for count in 1..20_000 {
            let width = row(count);
            assert!(count.is_multiple_of(width) && width <= ROW_ELEMENTS, "{count}: {width}");
            assert!(width.is_multiple_of(8) || !count.is_multiple_of(8), "{count}: {width}");
        }
    }
}
