//! Parts of tensors, by rows and by bytes.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{GatherRows, Kernels, Origin, ReduceRows};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::DispatchInputs;
use super::handle::Handle;

/// Some rows of a tensor, as rows of bytes.
pub(super) fn byte_rows<'a, D: Kernels>(t: TensorRef<'a, D>, rows: Range<usize>) -> Result<TensorRef<'a, D>> {
    let (row, bytes) = (t.row_bytes(), rows.start * t.row_bytes()..rows.end * t.row_bytes());
    check("rows", &bytes, D::len(t.data()))?;
    TensorRef::new(D::slice(t.data(), bytes), DType::U8, &[rows.len(), row])
}

/// Some rows of a tensor, as rows of bytes, exclusively.
pub(crate) fn byte_rows_mut<'a, D: Kernels>(t: TensorMut<'a, D>, rows: Range<usize>) -> Result<TensorMut<'a, D>> {
    let row = t.row_bytes();
    part_mut(t, rows.start * row, rows.len(), row)
}

/// Rows of bytes from byte `at` on, exclusively.
pub(super) fn part_mut<D: Kernels>(
    t: TensorMut<'_, D>,
    at: usize,
    rows: usize,
    row: usize,
) -> Result<TensorMut<'_, D>> {
    let bytes = at..at + rows * row;
    let data = t.into_data();
    check("bytes", &bytes, D::len_mut(&data))?;
    TensorMut::new(D::slice_mut(data, bytes), DType::U8, &[rows, row])
}

/// Some entries of a list.
pub(crate) fn entries<'a, D: Kernels>(list: TensorRef<'a, D>, range: Range<usize>) -> Result<TensorRef<'a, D>> {
    let size = list.dtype().size();
    let bytes = range.start * size..range.end * size;
    check("entries", &bytes, D::len(list.data()))?;
    TensorRef::new(D::slice(list.data(), bytes), list.dtype(), &[range.len()])
}

/// A tensor as one string of bytes.
pub(super) fn flat<D: Kernels>(t: TensorRef<'_, D>) -> Result<TensorRef<'_, D>> {
    TensorRef::new(t.data(), DType::U8, &[D::len(t.data())])
}

/// A tensor as one string of bytes, exclusively.
pub(super) fn flat_mut<D: Kernels>(t: TensorMut<'_, D>) -> Result<TensorMut<'_, D>> {
    let data = t.into_data();
    let bytes = D::len_mut(&data);
    TensorMut::new(data, DType::U8, &[bytes])
}

fn check(name: &str, range: &Range<usize>, len: usize) -> Result<()> {
    if range.start <= range.end && range.end <= len {
        return Ok(());
    }
    Err(Error::invalid("token dispatcher", name, format!("a range within {len} bytes"), format!("{range:?}")))
}

/// Moves rows as the maps of a routing say.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowMover<'a, D: Kernels> {
    device: &'a D,
    /// Whose routing, for errors.
    origin: Origin,
}

impl<'a, D: Kernels> RowMover<'a, D> {
    /// Of this routing's rows.
    pub fn of(device: &'a D, handle: &Handle<D>) -> Self {
        Self { device, origin: handle.origin() }
    }

    /// Gathers rows of bytes.
    pub fn gather(&self, source: TensorRef<'_, D>, map: TensorRef<'_, D>, mut out: TensorMut<'_, D>) -> Result<()> {
        let (n, origin) = (out.rows(), self.origin);
        let source = byte_rows(source.borrow(), 0..source.rows())?;
        let map = map.borrow().reshape(&[map.count()])?;
        self.device.gather_rows(GatherRows { source, map, origin, out: byte_rows_mut(out.reborrow(), 0..n)? })
    }

    /// Gathers the elements of a list: one an entry of the map, in any shape.
    pub fn gather_elements(
        &self,
        source: TensorRef<'_, D>,
        map: TensorRef<'_, D>,
        out: TensorMut<'_, D>,
    ) -> Result<()> {
        let n = out.count();
        self.gather(source, map, out.reshape(&[n])?)
    }

    /// Sums rows of each token: as many entries of the map a row of `out`.
    pub fn reduce(&self, source: TensorRef<'_, D>, map: TensorRef<'_, D>, mut out: TensorMut<'_, D>) -> Result<()> {
        let (source, map, origin) = (source.borrow(), map.borrow(), self.origin);
        self.device.reduce_rows(ReduceRows { source, map, origin, out: out.reborrow() })
    }
}

/// A tensor's elements as a list.
pub(super) fn elements<D: Kernels>(t: TensorRef<'_, D>) -> Result<TensorRef<'_, D>> {
    t.reshape(&[t.count()])
}

/// Bytes of one row, one entry of weights (a weight, or all K of a token) and one row of scales; 0 where a message has none.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowParts {
    pub row: usize,
    pub weight: usize,
    pub scale: usize,
}

/// A peer's message in a buffer: rows, then weights, then scales, each from a multiple of 16 bytes on.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerMessage {
    pub start: usize,
    pub weights: usize,
    pub scales: usize,
    pub bytes: usize,
}

impl RowParts {
    pub fn of<D: Kernels>(inputs: &DispatchInputs<'_, D>) -> Self {
        Self {
            row: inputs.tokens.row_bytes(),
            weight: inputs.weights.map_or(0, |w| w.dtype().size()),
            scale: inputs.scales.map_or(0, |s| s.row_bytes()),
        }
    }

    /// Nothing but rows: messages are rows of a tensor.
    pub fn rows_only(self) -> bool {
        self.weight == 0 && self.scale == 0
    }

    /// Messages of so many rows and choices, back to back.
    pub fn messages(self, rows: &[usize], choices: &[usize]) -> Vec<PeerMessage> {
        let mut start = 0;
        let message = |(rows, choices): (&usize, &usize)| {
            let rows_end = start + rows * self.row;
            let weights = rows_end.next_multiple_of(16);
            let scales = (weights + choices * self.weight).next_multiple_of(16);
            let end = if self.rows_only() { rows_end } else { (scales + rows * self.scale).next_multiple_of(16) };
            let m = PeerMessage { start, weights, scales, bytes: end - start };
            start = end;
            m
        };
        rows.iter().zip(choices).map(message).collect()
    }
}

/// Total bytes of messages.
pub(super) fn total(messages: &[PeerMessage]) -> usize {
    messages.iter().map(|m| m.bytes).sum()
}

/// Rows as they arrived; `None` where they are the caller's own.
#[derive(Debug)]
pub(crate) struct ReceivedRows<D: Kernels> {
    pub rows: Option<Tensor<D>>,
    pub weights: Option<Tensor<D>>,
    pub scales: Option<Tensor<D>>,
}

/// Dtypes and row length of what messages hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct MessageTypes {
    pub dtype: DType,
    pub width: usize,
    pub weight_dtype: DType,
}

/// Takes messages apart: `rows[p]` rows and `choices[p]` entries of weights of each, which become one list.
pub(super) fn unpack<D: Kernels>(
    device: &D,
    buffer: TensorRef<'_, D>,
    messages: &[PeerMessage],
    (rows, choices): (&[usize], &[usize]),
    parts: RowParts,
    content: MessageTypes,
) -> Result<ReceivedRows<D>> {
    let n: usize = rows.iter().sum();
    let collect = |t: &mut Tensor<D>, counts: &[usize], size: usize, at: &dyn Fn(&PeerMessage) -> usize| {
        let mut filled = 0;
        for (message, count) in messages.iter().zip(counts) {
            let bytes = count * size;
            let to = part_mut(t.view_mut(), filled, 1, bytes)?;
            let from = entries(flat(buffer)?, at(message)..at(message) + bytes)?;
            device.copy(from.data(), to.into_data())?;
            filled += bytes;
        }
        Ok::<_, Error>(())
    };
    let mut all = Tensor::empty(device, content.dtype, &[n, content.width])?;
    collect(&mut all, rows, parts.row, &|m| m.start)?;
    let mut weights = None;
    if parts.weight > 0 {
        let each = parts.weight / content.weight_dtype.size();
        let dims = [choices.iter().sum::<usize>() * each];
        let t = weights.insert(Tensor::empty(device, content.weight_dtype, &dims)?);
        collect(t, choices, parts.weight, &|m| m.weights)?;
    }
    let mut scales = None;
    if parts.scale > 0 {
        let t = scales.insert(Tensor::empty(device, DType::U8, &[n, parts.scale])?);
        collect(t, rows, parts.scale, &|m| m.scales)?;
    }
    Ok(ReceivedRows { rows: Some(all), weights, scales })
}
