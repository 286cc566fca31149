//! Products of token rows with a weight, each in one order of sums: an element of the result has the same bits whatever
//! other rows the product has and wherever its row stands among them.
//!
//! The order is fixed by the element's own two vectors, never by how many rows there are. Which elements are computed
//! together (the tiles below) follows the number of rows and is free: a tile keeps a sum for each of its elements and
//! never adds two of them.
//! - [`WeightLayout::Rows`], `x · wᵀ`: k in chunks of [`DOT_REGISTERS`] registers. In a chunk, SIMD lane l sums the terms
//!   k ≡ l modulo the number of lanes, by fused multiply-adds; the lanes are then added in a fixed tree, the chunks in
//!   sequence.
//! - [`WeightLayout::Columns`], `x · w`: k in chunks of [`AXPY_CHUNK`]. In a chunk the terms are summed in sequence, by fused
//!   multiply-adds; then the chunks in sequence.
//!
//! Where a machine has no fused multiply-add, each is a multiplication and an addition. The lanes are those of the
//! widest SIMD registers that the machine has, so that bits may differ between machines.

mod copies;
mod lanes;
#[cfg(test)]
mod tests;
mod tiles;

use pulp::{Arch, Simd, WithSimd};

use super::heuristics::{
    AXPY_CHUNK, BLOCK_ROWS, COPY_COLUMNS, COPY_ROWS, COPY_TILES, DOT_REGISTERS, NARROW_DOT_BLOCK_ROWS, STREAM_BYTES,
    STREAM_COLUMNS, STREAM_DEPTH, STREAM_MIN_COLUMNS,
};
use copies::{ALIGN, Aligned, Copied};
pub(crate) use lanes::Lanes;
use lanes::lanes;
use tiles::{Dots, Panel, ProductChunk, Strided, axpy};

/// How a weight of k terms and n results is stored, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WeightLayout {
    /// `[n, k]`.
    Rows,
    /// `[k, n]`.
    Columns,
}

/// A product of rows with a weight.
pub(super) struct OrderedProduct<'a, A> {
    /// `[m, n]`, overwritten.
    pub out: &'a mut [A],
    /// `[m, k]`.
    pub x: &'a [A],
    pub weight: &'a [A],
    pub layout: WeightLayout,
    /// Terms of a sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
}

impl<A: Lanes> OrderedProduct<'_, A> {
    /// Computes it, on this thread.
    ///
    /// # Panics
    /// Where a length is not what the sizes say.
    pub(super) fn run(self) {
        self.run_on(Arch::new());
    }

    pub(super) fn run_on(self, arch: Arch) {
        if self.n == 0 {
            return;
        }
        let m = self.out.len() / self.n;
        assert!(
            self.out.len() == m * self.n && self.x.len() == m * self.k && self.weight.len() == self.n * self.k,
            "product of {} = {} x {} (k = {}, n = {})",
            self.out.len(),
            self.x.len(),
            self.weight.len(),
            self.k,
            self.n
        );
        match self.k {
            0 => self.out.fill(A::default()),
            _ if m > 0 => arch.dispatch(self),
            _ => {}
        }
    }
}

impl<A: Lanes> WithSimd for OrderedProduct<'_, A> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Either layout has the same elements then.
        if self.k == 1 {
            return self.scaled(simd);
        }
        // The sums of a tile, its operands and nothing else are in registers.
        match (self.layout, S::REGISTER_COUNT >= 32) {
            (WeightLayout::Rows, _) if self.out.len() == self.n => self.row_by_rows::<S, 4>(simd),
            (WeightLayout::Rows, true) => self.by_rows::<S, 4, 6>(simd),
            (WeightLayout::Rows, false) => self.by_rows::<S, 3, 4>(simd),
            (WeightLayout::Columns, _) if self.streams() => self.streamed(simd),
            (WeightLayout::Columns, true) => match self.out.len() / self.n {
                1 => self.by_columns::<S, 1, 8>(simd),
                2 | 3 => self.by_columns::<S, 3, 6>(simd),
                _ => self.by_columns::<S, 6, 4>(simd),
            },
            (WeightLayout::Columns, false) => match self.out.len() / self.n {
                1 => self.by_columns::<S, 1, 8>(simd),
                2 => self.by_columns::<S, 2, 4>(simd),
                5 | 6 => self.by_columns::<S, 6, 2>(simd),
                _ => self.by_columns::<S, 4, 3>(simd),
            },
        }
    }
}

impl<A: Lanes> OrderedProduct<'_, A> {
    fn streams(&self) -> bool {
        self.out.len() == self.n && size_of_val(self.weight) >= STREAM_BYTES && self.n >= STREAM_MIN_COLUMNS
    }

    /// `x · wᵀ` of one row, C columns at a time: their rows of the weight are read from end to end.
    #[inline(always)]
    fn row_by_rows<S: Simd, const C: usize>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let chunk = DOT_REGISTERS * lanes::<A, S>();
        let mut column = 0;
        while column < n {
            let whole = column + C <= n;
            for first in (0..k).step_by(chunk) {
                let part = |data| Strided { data, first, stride: k, depth: chunk.min(k - first) };
                let mut dots = Dots { simd, out: &mut *out, n, rows: part(x), begins: first == 0 };
                match whole {
                    true => dots.columns::<1, C>(1, part(weight).skip(column), column),
                    false => dots.columns::<1, 1>(1, part(weight).skip(column), column),
                }
            }
            column += if whole { C } else { 1 };
        }
    }

    /// `x · wᵀ` in tiles of R rows and C columns.
    #[inline(always)]
    fn by_rows<S: Simd, const R: usize, const C: usize>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let block = if S::REGISTER_COUNT >= 32 { BLOCK_ROWS } else { NARROW_DOT_BLOCK_ROWS };
        let chunk = DOT_REGISTERS * lanes::<A, S>();
        let copies = x.len() >= COPY_ROWS * k && n >= COPY_COLUMNS;
        // Rows a power of two apart would share places in a cache, those of x with those of the weight.
        let gap = ALIGN / size_of::<A>();
        let row = if copies { chunk.min(k) + gap } else { 0 };
        let (mut x_copy, mut w_copy) = (Copied::new(block.min(x.len() / k) * row), Copied::new(C * row));
        for (out, x) in out.chunks_mut(block * n).zip(x.chunks(block * k)) {
            let m = out.len() / n;
            for first in (0..k).step_by(chunk) {
                let part = |data| Strided { data, first, stride: k, depth: chunk.min(k - first) };
                let (mut rows, weight) = (part(x), part(weight));
                if copies {
                    rows = x_copy.fill_with_gaps(rows, 0..m, gap);
                }
                let mut dots = Dots { simd, out: &mut *out, n, rows, begins: first == 0 };
                let mut column = 0;
                while column + C <= n {
                    let columns = match copies {
                        true => w_copy.fill_with_gaps(weight, column..column + C, gap),
                        false => weight.skip(column),
                    };
                    dots.columns::<R, C>(m, columns, column);
                    column += C;
                }
                while column + 2 <= n {
                    dots.columns::<R, 2>(m, weight.skip(column), column);
                    column += 2;
                }
                if column < n {
                    dots.columns::<R, 1>(m, weight.skip(column), column);
                }
            }
        }
    }

    /// `x · w` of one row: w is read in long runs.
    #[inline(always)]
    fn streamed<S: Simd>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let mut sums = Aligned::new(STREAM_COLUMNS.min(n));
        for (left, out) in (0..n).step_by(STREAM_COLUMNS).zip(out.chunks_mut(STREAM_COLUMNS)) {
            let width = out.len();
            let sums = &mut sums.get()[..width];
            for first in (0..k).step_by(AXPY_CHUNK) {
                let end = k.min(first + AXPY_CHUNK);
                sums.fill(A::default());
                let line = |at: usize| &weight[at * n + left..][..width];
                let mut at = first;
                while at + STREAM_DEPTH <= end {
                    let (x, lines) = (|i| x[at + i], |i| line(at + i));
                    axpy::<A, S, STREAM_DEPTH>(simd, sums, std::array::from_fn(x), std::array::from_fn(lines));
                    at += STREAM_DEPTH;
                }
                (at..end).for_each(|at| axpy::<A, S, 1>(simd, sums, [x[at]], [line(at)]));
                match first {
                    0 => out.copy_from_slice(sums),
                    _ => out.iter_mut().zip(sums.iter()).for_each(|(o, s)| *o += *s),
                }
            }
        }
    }

    /// `x · w` in tiles of R rows and C registers of columns, then of fewer registers.
    #[inline(always)]
    fn by_columns<S: Simd, const R: usize, const C: usize>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let lanes = lanes::<A, S>();
        let (width, m) = (C * lanes, out.len() / n);
        // One row of tiles reads the weight once, and a few read it from a cache near the core where it fits there: a
        // copy would not pay.
        let copies = m > R && n > width && (m > COPY_TILES * R || size_of_val(weight) >= STREAM_BYTES);
        let depth = AXPY_CHUNK.min(k);
        let (mut w_copy, mut x_copy) = (
            Copied::new(if copies { width * depth } else { 0 }),
            Copied::new(if m >= COPY_ROWS { BLOCK_ROWS.min(m) * depth } else { 0 }),
        );
        let mut last = Aligned::new(if n % lanes > 0 { lanes * depth } else { 0 });
        for (out, x) in out.chunks_mut(BLOCK_ROWS * n).zip(x.chunks(BLOCK_ROWS * k)) {
            let m = out.len() / n;
            for first in (0..k).step_by(AXPY_CHUNK) {
                let depth = AXPY_CHUNK.min(k - first);
                let rows = &weight[first * n..(first + depth) * n];
                let mut x = Strided { data: x, first, stride: k, depth };
                if m >= COPY_ROWS {
                    x = x_copy.fill(x, 0..m);
                }
                let mut chunk = ProductChunk { simd, out: &mut *out, n, x, begins: first == 0 };
                let mut left = 0;
                while left + width <= n {
                    let mut panel = Panel { data: &rows[left..], stride: n };
                    if copies {
                        let from = Strided { data: weight, first: left, stride: n, depth: width };
                        panel = Panel { data: w_copy.fill(from, first..first + depth).data, stride: width };
                    }
                    chunk.columns::<R, C>(m, panel, left, width);
                    left += width;
                }
                while C > 4 && left + 4 * lanes <= n {
                    chunk.columns::<R, 4>(m, Panel { data: &rows[left..], stride: n }, left, 4 * lanes);
                    left += 4 * lanes;
                }
                while C > 2 && left + 2 * lanes <= n {
                    chunk.columns::<R, 2>(m, Panel { data: &rows[left..], stride: n }, left, 2 * lanes);
                    left += 2 * lanes;
                }
                while left + lanes <= n {
                    chunk.columns::<R, 1>(m, Panel { data: &rows[left..], stride: n }, left, lanes);
                    left += lanes;
                }
                if left < n {
                    let to = &mut last.get()[..lanes * depth];
                    for (to, row) in to.chunks_exact_mut(lanes).zip(rows.chunks_exact(n)) {
                        to[..n - left].copy_from_slice(&row[left..]);
                    }
                    chunk.columns::<R, 1>(m, Panel { data: to, stride: lanes }, left, n - left);
                }
            }
        }
    }

    /// A product of one term: no sum at all.
    #[inline(always)]
    fn scaled<S: Simd>(self, simd: S) {
        let (w, w_tail) = A::regs::<S>(self.weight);
        let zero = A::splat(simd, A::default());
        for (out, x) in self.out.chunks_exact_mut(self.n).zip(self.x) {
            let x = A::splat(simd, *x);
            let (out, out_tail) = A::regs_mut::<S>(out);
            for (out, w) in out.iter_mut().zip(w) {
                *out = A::mul_add(simd, x, *w, zero);
            }
            if !w_tail.is_empty() {
                A::store(simd, out_tail, A::mul_add(simd, x, A::load(simd, w_tail), zero));
            }
        }
    }
}
