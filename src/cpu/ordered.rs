//! Products of token rows with a weight, each in one order of sums: an element of the result has the same bits whatever
//! other rows the product has and wherever its row stands among them.
//!
//! The order is fixed by the element's own two vectors, never by how many rows there are. Which elements are computed
//! together (the tiles below) follows the number of rows and is free: a tile keeps a sum for each of its elements and
//! never adds two of them.
//! - [`WeightLayout::Rows`], `x · wᵀ`: k in chunks of [`DOT_CHUNK`]. In a chunk, SIMD lane l sums the terms k ≡ l modulo the
//!   number of lanes, by fused multiply-adds; the lanes are then added in a fixed tree, the chunks in sequence.
//! - [`WeightLayout::Columns`], `x · w`: k in chunks of [`AXPY_CHUNK`]. In a chunk the terms are summed in sequence, by fused
//!   multiply-adds; then the chunks in sequence.
//!
//! Where a machine has no fused multiply-add, each is a multiplication and an addition. The lanes are those of the
//! widest SIMD registers that the machine has, so that bits may differ between machines.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

/// Terms between two additions to an element of `x · wᵀ`: as long as four rows of a weight stay in a cache of 32 KiB.
const DOT_CHUNK: usize = 1024;
/// Terms between two additions to an element of `x · w`.
const AXPY_CHUNK: usize = 256;
/// Rows of x that pass over a chunk of the weight together: what stays in a cache of 1 MiB beside it.
const ROW_BLOCK: usize = 128;
/// Rows and columns from which on `x · wᵀ` copies what it reads again and again: registers are then loaded from whole
/// lines of a cache, and rows a power of two apart do not share places in it.
const COPY_ROWS: usize = 12;
const COPY_LEAST: usize = 16;
/// Up to so many rows, `x · w` streams the weight; above, it multiplies by tiles of it copied aside.
const STREAM_ROWS: usize = 8;
/// Columns of w that are copied together, in runs of that many.
const PACK_COLUMNS: usize = 64;
/// Columns of `x · w` that few rows sum at a time: what stays in a cache of 32 KiB for [`STREAM_ROWS`] rows.
const STREAM_COLUMNS: usize = 1024;
/// Bytes of a weight from which on that pays: what no cache near the core holds.
const STREAM_BYTES: usize = 2 << 20;
/// Columns from which on that pays.
const STREAM_LEAST: usize = 512;
/// Rows of w that few rows multiply by at a time.
const STREAM_DEPTH: usize = 8;
/// Bytes that copies are aligned to: the longest SIMD register.
const ALIGN: usize = 64;

/// How a weight of k terms and n results is stored, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WeightLayout {
    /// `[n, k]`.
    Rows,
    /// `[k, n]`.
    Columns,
}

/// Floating types that SIMD registers hold.
pub(crate) trait Lanes: Copy + Default + std::ops::Add<Output = Self> + std::ops::AddAssign + 'static {
    /// A register of them.
    type Reg<S: Simd>: Copy;
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Reg<S>;
    /// a·b + c, rounded once where the machine can.
    fn mul_add<S: Simd>(simd: S, a: Self::Reg<S>, b: Self::Reg<S>, c: Self::Reg<S>) -> Self::Reg<S>;
    /// The lanes' sum, in a fixed tree.
    fn sum<S: Simd>(simd: S, a: Self::Reg<S>) -> Self;
    /// The lanes of registers.
    fn lanes<S: Simd>(regs: &[Self::Reg<S>]) -> &[Self];
    /// Whole registers, and what is left.
    fn regs<S: Simd>(values: &[Self]) -> (&[Self::Reg<S>], &[Self]);
    fn regs_mut<S: Simd>(values: &mut [Self]) -> (&mut [Self::Reg<S>], &mut [Self]);
    /// Fewer values than a register holds, and zeros.
    fn load<S: Simd>(simd: S, values: &[Self]) -> Self::Reg<S>;
    /// The first lanes, as many as `out` takes.
    fn store<S: Simd>(simd: S, out: &mut [Self], reg: Self::Reg<S>);
}

macro_rules! lanes {
    ($($float:ty, $reg:ident: $splat:ident, $mul_add:ident, $sum:ident, $regs:ident, $regs_mut:ident,
        $load:ident, $store:ident);*) => {$(
        impl Lanes for $float {
            type Reg<S: Simd> = S::$reg;
            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$reg {
                simd.$splat(value)
            }
            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$reg, b: S::$reg, c: S::$reg) -> S::$reg {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, a: S::$reg) -> Self {
                simd.$sum(a)
            }
            #[inline(always)]
            fn lanes<S: Simd>(regs: &[S::$reg]) -> &[Self] {
                bytemuck::cast_slice(regs)
            }
            #[inline(always)]
            fn regs<S: Simd>(values: &[Self]) -> (&[S::$reg], &[Self]) {
                S::$regs(values)
            }
            #[inline(always)]
            fn regs_mut<S: Simd>(values: &mut [Self]) -> (&mut [S::$reg], &mut [Self]) {
                S::$regs_mut(values)
            }
            #[inline(always)]
            fn load<S: Simd>(simd: S, values: &[Self]) -> S::$reg {
                simd.$load(values)
            }
            #[inline(always)]
            fn store<S: Simd>(simd: S, out: &mut [Self], reg: S::$reg) {
                simd.$store(out, reg);
            }
        }
    )*};
}
lanes!(
    f32, f32s: splat_f32s, mul_add_e_f32s, reduce_sum_f32s, as_simd_f32s, as_mut_simd_f32s,
        partial_load_f32s, partial_store_f32s;
    f64, f64s: splat_f64s, mul_add_e_f64s, reduce_sum_f64s, as_simd_f64s, as_mut_simd_f64s,
        partial_load_f64s, partial_store_f64s
);

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

    fn run_on(self, arch: Arch) {
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
        // The sums of a tile, its operands and nothing else are in registers.
        match (self.layout, S::REGISTER_COUNT >= 32) {
            (WeightLayout::Rows, true) => self.by_rows::<S, 4, 6, 8>(simd),
            (WeightLayout::Rows, false) => self.by_rows::<S, 3, 4, 8>(simd),
            (WeightLayout::Columns, _) if self.streams() => self.streamed(simd),
            (WeightLayout::Columns, true) if self.out.len() <= 3 * self.n => self.by_columns::<S, 3, 6>(simd),
            (WeightLayout::Columns, true) => self.by_columns::<S, 8, 3>(simd),
            (WeightLayout::Columns, false) if self.out.len() <= 3 * self.n => self.by_columns::<S, 3, 3>(simd),
            (WeightLayout::Columns, false) => self.by_columns::<S, 6, 2>(simd),
        }
    }
}

impl<A: Lanes> OrderedProduct<'_, A> {
    fn streams(&self) -> bool {
        self.out.len() <= STREAM_ROWS * self.n && size_of_val(self.weight) >= STREAM_BYTES && self.n >= STREAM_LEAST
    }

    /// `x · wᵀ` in tiles of R rows and C columns, of one row and ONE columns where there is only one row.
    #[inline(always)]
    fn by_rows<S: Simd, const R: usize, const C: usize, const ONE: usize>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let copies = x.len() >= COPY_ROWS * k && n >= COPY_LEAST;
        let depth = if copies { DOT_CHUNK.min(k) } else { 0 };
        let (mut x_copy, mut w_copy) = (Copied::new(ROW_BLOCK.min(x.len() / k) * depth), Copied::new(C * depth));
        for (out, x) in out.chunks_mut(ROW_BLOCK * n).zip(x.chunks(ROW_BLOCK * k)) {
            let m = out.len() / n;
            for first in (0..k).step_by(DOT_CHUNK) {
                let depth = DOT_CHUNK.min(k - first);
                let mut rows = Strided { data: x, first, stride: k, depth };
                let weight = Strided { data: weight, first, stride: k, depth };
                if copies {
                    rows = x_copy.fill(rows, 0..m);
                }
                let mut dots = Dots { simd, out: &mut *out, n, rows, begins: first == 0 };
                let mut column = 0;
                while m > 1 && column + C <= n {
                    let columns = match copies {
                        true => w_copy.fill(weight, column..column + C),
                        false => weight.skip(column),
                    };
                    dots.columns::<R, C>(m, columns, column);
                    column += C;
                }
                while column + ONE <= n {
                    dots.columns::<1, ONE>(m, weight.skip(column), column);
                    column += ONE;
                }
                while column < n {
                    dots.columns::<R, 1>(m, weight.skip(column), column);
                    column += 1;
                }
            }
        }
    }

    /// `x · w` for few rows: w is read once, in long runs.
    #[inline(always)]
    fn streamed<S: Simd>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let m = out.len() / n;
        let mut sums = Aligned::new(m * STREAM_COLUMNS.min(n));
        let sums = sums.get();
        for left in (0..n).step_by(STREAM_COLUMNS) {
            let width = STREAM_COLUMNS.min(n - left);
            for first in (0..k).step_by(AXPY_CHUNK) {
                let end = k.min(first + AXPY_CHUNK);
                sums.fill(A::default());
                let line = |at: usize| &weight[at * n + left..][..width];
                let mut at = first;
                while at < end {
                    let deep = at + STREAM_DEPTH <= end;
                    for (sums, x) in sums.chunks_exact_mut(width).zip(x.chunks_exact(k)) {
                        match deep {
                            true => axpy::<A, S, STREAM_DEPTH>(
                                simd,
                                sums,
                                std::array::from_fn(|i| x[at + i]),
                                std::array::from_fn(|i| line(at + i)),
                            ),
                            false => axpy::<A, S, 1>(simd, sums, [x[at]], [line(at)]),
                        }
                    }
                    at += if deep { STREAM_DEPTH } else { 1 };
                }
                for (out, sums) in out.chunks_exact_mut(n).zip(sums.chunks_exact(width)) {
                    let out = &mut out[left..left + width];
                    match first {
                        0 => out.copy_from_slice(sums),
                        _ => out.iter_mut().zip(sums).for_each(|(o, s)| *o += *s),
                    }
                }
            }
        }
    }

    /// `x · w` in tiles of R rows and C registers of columns, then of one register.
    #[inline(always)]
    fn by_columns<S: Simd, const R: usize, const C: usize>(self, simd: S) {
        let Self { out, x, weight, k, n, .. } = self;
        let lanes = size_of::<A::Reg<S>>() / size_of::<A>();
        let (wide, m) = (n - n % (C * lanes), out.len() / n);
        // One row of tiles reads the weight once: a copy would not pay.
        let copies = m > R;
        let mut copy = Aligned::new(match copies {
            true => wide.min(PACK_COLUMNS.next_multiple_of(C * lanes)).max(lanes) * AXPY_CHUNK.min(k),
            false => lanes * AXPY_CHUNK.min(k),
        });
        for first in (0..k).step_by(AXPY_CHUNK) {
            let depth = AXPY_CHUNK.min(k - first);
            let rows = &weight[first * n..(first + depth) * n];
            let mut chunk = ProductChunk { simd, out: &mut *out, n, x: Strided { data: x, first, stride: k, depth } };
            let mut left = 0;
            while copies && left < wide {
                let columns = PACK_COLUMNS.next_multiple_of(C * lanes).min(wide - left);
                let panels = &mut copy.get()[..columns * depth];
                for (at, row) in rows.chunks_exact(n).enumerate() {
                    let row = row[left..left + columns].chunks_exact(C * lanes);
                    for (panel, row) in panels.chunks_exact_mut(C * lanes * depth).zip(row) {
                        panel[at * C * lanes..][..C * lanes].copy_from_slice(row);
                    }
                }
                for panel in panels.chunks_exact(C * lanes * depth) {
                    chunk.columns::<R, C>(m, Panel { data: panel, stride: C * lanes }, left, C * lanes);
                    left += C * lanes;
                }
            }
            while left < wide {
                chunk.columns::<R, C>(m, Panel { data: &rows[left..], stride: n }, left, C * lanes);
                left += C * lanes;
            }
            while left + lanes <= n {
                chunk.columns::<R, 1>(m, Panel { data: &rows[left..], stride: n }, left, lanes);
                left += lanes;
            }
            if left < n {
                let panel = &mut copy.get()[..lanes * depth];
                for (to, row) in panel.chunks_exact_mut(lanes).zip(rows.chunks_exact(n)) {
                    to.fill(A::default());
                    to[..n - left].copy_from_slice(&row[left..]);
                }
                chunk.columns::<R, 1>(m, Panel { data: panel, stride: lanes }, left, n - left);
            }
        }
    }
}

/// Rows of a matrix, `depth` elements of each.
#[derive(Clone, Copy)]
struct Strided<'a, A> {
    data: &'a [A],
    first: usize,
    stride: usize,
    depth: usize,
}

impl<'a, A> Strided<'a, A> {
    #[inline(always)]
    fn rows<const N: usize>(&self, first: usize) -> [&'a [A]; N] {
        std::array::from_fn(|i| self.row(first + i))
    }

    #[inline(always)]
    fn row(&self, at: usize) -> &'a [A] {
        &self.data[at * self.stride + self.first..][..self.depth]
    }

    /// From another row on.
    #[inline(always)]
    fn skip(self, rows: usize) -> Self {
        Self { data: &self.data[rows * self.stride..], ..self }
    }
}

/// A chunk of `x · wᵀ`.
struct Dots<'a, A, S> {
    simd: S,
    out: &'a mut [A],
    n: usize,
    rows: Strided<'a, A>,
    begins: bool,
}

impl<A: Lanes, S: Simd> Dots<'_, A, S> {
    /// Adds the chunk's part to C columns of m rows: those of the weight's first rows.
    #[inline(always)]
    fn columns<const R: usize, const C: usize>(&mut self, m: usize, weight: Strided<'_, A>, column: usize) {
        let weight = weight.rows::<C>(0);
        let mut row = 0;
        while row + R <= m {
            self.tile::<R, C>(row, weight, column);
            row += R;
        }
        if R > 3 && row + 3 == m {
            self.tile::<3, C>(row, weight, column);
        } else if R > 2 && row + 2 == m {
            self.tile::<2, C>(row, weight, column);
        } else if row < m {
            self.tile::<1, C>(row, weight, column);
        }
    }

    #[inline(always)]
    fn tile<const R: usize, const C: usize>(&mut self, row: usize, weight: [&[A]; C], column: usize) {
        let (simd, begins) = (self.simd, self.begins);
        let x = self.rows.rows::<R>(row).map(|v| A::regs::<S>(v));
        let w = weight.map(|v| A::regs::<S>(v));
        let (len, tail) = (x[0].0.len(), x[0].1.len());
        let (x_regs, w_regs) = (x.map(|v| &v.0[..len]), w.map(|v| &v.0[..len]));
        let zero = A::splat(simd, A::default());
        let mut sums = [[zero; C]; R];
        let mut x_reg = [zero; R];
        for i in 0..len {
            for r in 0..R {
                x_reg[r] = x_regs[r][i];
            }
            for c in 0..C {
                let w = w_regs[c][i];
                for r in 0..R {
                    sums[r][c] = A::mul_add(simd, x_reg[r], w, sums[r][c]);
                }
            }
        }
        if tail > 0 {
            for r in 0..R {
                x_reg[r] = A::load(simd, x[r].1);
            }
            for c in 0..C {
                let w = A::load(simd, w[c].1);
                for r in 0..R {
                    sums[r][c] = A::mul_add(simd, x_reg[r], w, sums[r][c]);
                }
            }
        }
        // Copied, so that the loops above may keep them in registers.
        let done = sums;
        for (r, sums) in done.iter().enumerate() {
            let out = &mut self.out[(row + r) * self.n + column..][..C];
            for (out, sum) in out.iter_mut().zip(sums) {
                let sum = A::sum(simd, *sum);
                *out = if begins { sum } else { *out + sum };
            }
        }
    }
}

/// `sums += Σ x[i]·w[i]`, in sequence.
#[inline(always)]
fn axpy<A: Lanes, S: Simd, const D: usize>(simd: S, sums: &mut [A], x: [A; D], w: [&[A]; D]) {
    let mut x_reg = [A::splat(simd, A::default()); D];
    for d in 0..D {
        x_reg[d] = A::splat(simd, x[d]);
    }
    let (sums, sums_tail) = A::regs_mut::<S>(sums);
    let w = w.map(|w| A::regs::<S>(w));
    let len = sums.len();
    let regs = w.map(|w| &w.0[..len]);
    for i in 0..len {
        let mut sum = sums[i];
        for d in 0..D {
            sum = A::mul_add(simd, x_reg[d], regs[d][i], sum);
        }
        sums[i] = sum;
    }
    if !sums_tail.is_empty() {
        let mut sum = A::load(simd, sums_tail);
        for d in 0..D {
            sum = A::mul_add(simd, x_reg[d], A::load(simd, w[d].1), sum);
        }
        A::store(simd, sums_tail, sum);
    }
}

/// Columns of w, whole registers of them.
#[derive(Clone, Copy)]
struct Panel<'a, A> {
    data: &'a [A],
    /// Elements from a row to the next.
    stride: usize,
}

/// A chunk of `x · w`.
struct ProductChunk<'a, A, S> {
    simd: S,
    out: &'a mut [A],
    n: usize,
    x: Strided<'a, A>,
}

impl<A: Lanes, S: Simd> ProductChunk<'_, A, S> {
    /// Adds the chunk's part to `count` columns from `left` on of m rows.
    #[inline(always)]
    fn columns<const R: usize, const C: usize>(&mut self, m: usize, panel: Panel<'_, A>, left: usize, count: usize) {
        let mut row = 0;
        while row + R <= m {
            self.tile::<R, C>(row, panel, left, count);
            row += R;
        }
        if R > 4 && row + 4 <= m {
            self.tile::<4, C>(row, panel, left, count);
            row += 4;
        }
        match m - row {
            0 => {}
            1 => self.tile::<1, C>(row, panel, left, count),
            2 => self.tile::<2, C>(row, panel, left, count),
            _ => self.tile::<3, C>(row, panel, left, count),
        }
    }

    #[inline(always)]
    fn tile<const R: usize, const C: usize>(&mut self, row: usize, panel: Panel<'_, A>, left: usize, count: usize) {
        let simd = self.simd;
        let (depth, begins) = (self.x.depth, self.x.first == 0);
        let lanes = size_of::<A::Reg<S>>() / size_of::<A>();
        let x = self.x.rows::<R>(row);
        let zero = A::splat(simd, A::default());
        let mut sums = [[zero; C]; R];
        let mut w = [zero; C];
        for i in 0..depth {
            w.copy_from_slice(&A::regs::<S>(&panel.data[i * panel.stride..][..C * lanes]).0[..C]);
            for r in 0..R {
                let x = A::splat(simd, x[r][i]);
                for c in 0..C {
                    sums[r][c] = A::mul_add(simd, x, w[c], sums[r][c]);
                }
            }
        }
        // Copied, so that the loops above may keep them in registers.
        let done = sums;
        for (r, sums) in done.iter().enumerate() {
            let out = &mut self.out[(row + r) * self.n + left..][..count];
            let sums = A::lanes::<S>(sums);
            match begins {
                true => out.copy_from_slice(&sums[..count]),
                false => out.iter_mut().zip(sums).for_each(|(o, s)| *o += *s),
            }
        }
    }
}

/// Memory at a multiple of [`ALIGN`] bytes.
struct Aligned<A> {
    data: Vec<A>,
    len: usize,
}

impl<A: Copy + Default> Aligned<A> {
    fn new(len: usize) -> Self {
        Self { data: vec![A::default(); len + ALIGN / size_of::<A>()], len }
    }

    fn get(&mut self) -> &mut [A] {
        let first = self.data.as_ptr().align_offset(ALIGN).min(ALIGN / size_of::<A>());
        &mut self.data[first..first + self.len]
    }
}

/// Rows of a chunk, one after the other at a multiple of [`ALIGN`] bytes.
struct Copied<A> {
    data: Vec<A>,
    skip: usize,
}

impl<A: Copy + Default> Copied<A> {
    fn new(len: usize) -> Self {
        let data = Vec::<A>::with_capacity(len + ALIGN / size_of::<A>());
        let skip = data.as_ptr().align_offset(ALIGN).min(ALIGN / size_of::<A>());
        Self { data, skip }
    }

    /// At most as many elements as there is room for.
    fn fill(&mut self, from: Strided<'_, A>, rows: Range<usize>) -> Strided<'_, A> {
        self.data.clear();
        self.data.resize(self.skip, A::default());
        rows.for_each(|row| self.data.extend_from_slice(from.row(row)));
        Strided { data: &self.data[self.skip..], first: 0, stride: from.depth, depth: from.depth }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in ±1/2 (the high bits of a linear congruence).
    fn numbers(seed: u64, count: usize) -> Vec<f64> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
        };
        (0..count).map(|_| next()).collect()
    }

    /// Every kind of registers that this machine has.
    fn machines() -> Vec<Arch> {
        #[allow(unused_mut, reason = "not on every machine")]
        let mut all = vec![Arch::Scalar, Arch::new()];
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        all.extend(pulp::x86::V3::try_new().map(Arch::V3));
        all
    }

    fn product<A: Lanes>(arch: Arch, layout: WeightLayout, x: &[A], weight: &[A], [n, k]: [usize; 2]) -> Vec<A> {
        let mut out = vec![A::default(); x.len() / k * n];
        OrderedProduct { out: &mut out, x, weight, layout, k, n }.run_on(arch);
        out
    }

    fn rows_have_the_same_bits_in_every_product<A: super::super::element::Acc>(unit: f64) {
        // Numbers of rows at which another tile, another copy or another kernel begins.
        let counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 63, 64, 65, 127, 128, 129, 131];
        let sizes = [
            [1, 1],
            [1, 300],
            [5, 7],
            [15, 64],
            [17, 255],
            [48, 256],
            [97, 257],
            [20, 1023],
            [13, 1025],
            [33, 2100],
            // A weight that no near cache holds, of either type.
            [520, 1100],
        ];
        for (at, [n, k]) in sizes.into_iter().enumerate() {
            let rows = if n * k < 100_000 { 131 } else { 13 };
            let of = |seed, count| numbers(seed, count).into_iter().map(A::of).collect::<Vec<A>>();
            let (x, w) = (of(at as u64, rows * k), of(at as u64 + 100, n * k));
            for (layout, arch) in
                machines().into_iter().flat_map(|a| [(WeightLayout::Rows, a), (WeightLayout::Columns, a)])
            {
                let whole = product(arch, layout, &x, &w, [n, k]);
                for (row, found) in whole.chunks(n).enumerate() {
                    for (column, found) in found.iter().enumerate().step_by(7) {
                        let term = |i: usize| {
                            let w = if layout == WeightLayout::Rows { w[column * k + i] } else { w[i * n + column] };
                            x[row * k + i].as_f64() * w.as_f64()
                        };
                        let exact: f64 = (0..k).map(term).sum();
                        // A sum of k terms, each rounded once and added in any order: at most k units of Σ|term|.
                        let bound = k as f64 * unit * (0..k).map(|i| term(i).abs()).sum::<f64>();
                        assert!((found.as_f64() - exact).abs() <= bound, "{layout:?}, {n} x {k}, row {row}");
                    }
                }
                for count in counts.into_iter().filter(|count| *count <= rows) {
                    for first in [0, (rows - count) / 2, rows - count] {
                        let part = product(arch, layout, &x[first * k..(first + count) * k], &w, [n, k]);
                        let same = part
                            .iter()
                            .zip(&whole[first * n..])
                            .all(|(a, b)| a.as_f64().to_bits() == b.as_f64().to_bits());
                        assert!(same, "{layout:?}, {n} x {k}: rows {first} + {count} differ");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_f32() {
        rows_have_the_same_bits_in_every_product::<f32>(2f64.powi(-24));
    }

    #[test]
    fn rows_of_f64() {
        // The reference is rounded as often.
        rows_have_the_same_bits_in_every_product::<f64>(2.0 * 2f64.powi(-53));
    }
}
