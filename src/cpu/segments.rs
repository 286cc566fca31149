//! Expert-major layouts on the host: checked ranges, and exclusive slices of each segment.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::kernels::{Origin, RowSource, Segments};

use super::Cpu;
use super::element::Float;
use super::gemm::to_acc;

/// Filled slots of each local expert: ascending, disjoint, within the layout's rows.
pub(super) struct SegmentList {
    pub(super) filled: Vec<Range<usize>>,
    pub(super) rows: usize,
    /// Whose they are.
    pub(super) origin: Origin,
}

impl SegmentList {
    pub(super) fn new(call: &'static str, segments: &Segments<Cpu>, experts: usize) -> Result<Self> {
        let offsets = segments.offsets.as_slice::<i64>()?;
        let counts = segments.counts.as_slice::<i64>()?;
        Error::check_shape(call, "segments.offsets", &[experts], &[offsets.len()])?;
        Error::check_shape(call, "segments.counts", &[experts], &[counts.len()])?;
        let mut end = 0;
        let mut filled = Vec::with_capacity(experts);
        for (j, (&offset, &count)) in offsets.iter().zip(counts).enumerate() {
            let range = usize::try_from(offset).ok().zip(usize::try_from(count).ok());
            let range = range.and_then(|(o, c)| Some(o..o.checked_add(c)?));
            match range {
                Some(r) if r.is_empty() => filled.push(end..end),
                Some(r) if r.start >= end && r.end <= segments.rows => {
                    end = r.end;
                    filled.push(r);
                }
                _ => {
                    let Origin { rank, layer } = segments.origin;
                    return Err(Error::Segment { call, rank, layer, segment: j, found: Some((offset, count)) });
                }
            }
        }
        Ok(Self { filled, rows: segments.rows, origin: segments.origin })
    }

    /// Exclusive slices of the filled slots of every expert, of a buffer with `width` elements a slot.
    pub(super) fn split<'a, T>(&self, buffer: &'a mut [T], width: usize) -> Vec<&'a mut [T]> {
        let mut rest = buffer;
        let mut at = 0;
        let mut parts = Vec::with_capacity(self.filled.len());
        for r in &self.filled {
            let (_, tail) = rest.split_at_mut((r.start - at) * width);
            let (part, tail) = tail.split_at_mut(r.len() * width);
            parts.push(part);
            rest = tail;
            at = r.end;
        }
        parts
    }
}

/// A checked row source: rows of any slots in the accumulator type.
pub(super) struct RowView<'a, T> {
    base: &'a [T],
    map: Option<&'a [i32]>,
    width: usize,
}

impl<'a, T: Float> RowView<'a, T> {
    pub(super) fn new(
        call: &'static str,
        name: &str,
        source: RowSource<'a, Cpu>,
        width: usize,
        segments: &SegmentList,
    ) -> Result<Self> {
        let rows = match (&source.map, source.base.dims()) {
            (_, [rows, w]) if *w == width => *rows,
            (_, dims) => {
                return Err(Error::Shape {
                    call,
                    tensor: name.to_string(),
                    expected: vec![segments.rows, width],
                    found: dims.to_vec(),
                });
            }
        };
        Error::check_dtype(call, name, T::DTYPE, source.base.dtype())?;
        let base = source.base.as_slice::<T>()?;
        let map = source.map.map(|m| m.as_slice::<i32>()).transpose()?;
        match map {
            None => Error::check_shape(call, name, &[segments.rows, width], &[rows, width])?,
            Some(map) => {
                Error::check_shape(call, &format!("{name}.map"), &[segments.rows], &[map.len()])?;
                let names_none = |slot: &usize| usize::try_from(map[*slot]).map_or(true, |row| row >= rows);
                if let Some(entry) = segments.filled.iter().flat_map(Range::clone).find(names_none) {
                    let (Origin { rank, layer }, map, found) =
                        (segments.origin, format!("{name}.map"), Some(i64::from(map[entry])));
                    return Err(Error::RowMap { call, rank, layer, map, entry, found });
                }
            }
        }
        Ok(Self { base, map, width })
    }

    /// Rows of a range of filled slots, converted and gathered only where needed.
    pub(super) fn get(&self, slots: Range<usize>) -> std::borrow::Cow<'a, [T::Acc]> {
        let w = self.width;
        match self.map {
            None => to_acc(&self.base[slots.start * w..slots.end * w]),
            Some(map) => {
                let mut rows = Vec::with_capacity(slots.len() * w);
                for &m in &map[slots] {
                    let at = m as usize * w;
                    rows.extend(self.base[at..at + w].iter().map(|v| v.to_acc()));
                }
                std::borrow::Cow::Owned(rows)
            }
        }
    }
}
