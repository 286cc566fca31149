//! Memory that operands are copied to.

use std::ops::Range;

use super::tiles::Strided;

/// Bytes that copies are aligned to: the longest SIMD register.
pub(super) const ALIGN: usize = 64;

/// Memory at a multiple of [`ALIGN`] bytes.
pub(super) struct Aligned<A> {
    data: Vec<A>,
    len: usize,
}

impl<A: Copy + Default> Aligned<A> {
    pub(super) fn new(len: usize) -> Self {
        Self { data: vec![A::default(); len + ALIGN / size_of::<A>()], len }
    }

    pub(super) fn get(&mut self) -> &mut [A] {
        let first = self.data.as_ptr().align_offset(ALIGN).min(ALIGN / size_of::<A>());
        &mut self.data[first..first + self.len]
    }
}

/// Rows of a chunk, the first at a multiple of [`ALIGN`] bytes.
pub(super) struct Copied<A> {
    data: Vec<A>,
    skip: usize,
}

impl<A: Copy + Default> Copied<A> {
    pub(super) fn new(len: usize) -> Self {
        let data = Vec::<A>::with_capacity(len + ALIGN / size_of::<A>());
        let skip = data.as_ptr().align_offset(ALIGN).min(ALIGN / size_of::<A>());
        Self { data, skip }
    }

    /// One row after the other; at most as many elements as there is room for.
    pub(super) fn fill(&mut self, from: Strided<'_, A>, rows: Range<usize>) -> Strided<'_, A> {
        self.fill_with_gaps(from, rows, 0)
    }

    /// The same with `gap` elements behind each row.
    pub(super) fn fill_with_gaps(&mut self, from: Strided<'_, A>, rows: Range<usize>, gap: usize) -> Strided<'_, A> {
        self.data.clear();
        self.data.resize(self.skip, A::default());
        for row in rows {
            self.data.extend_from_slice(from.row(row));
            self.data.resize(self.data.len() + gap, A::default());
        }
        Strided { data: &self.data[self.skip..], first: 0, stride: from.depth + gap, depth: from.depth }
    }
}
