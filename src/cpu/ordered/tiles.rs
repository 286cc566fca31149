//! Tiles: sums of a few rows by a few columns, each in a register of its own.

use pulp::Simd;

use super::lanes::{Lanes, lanes};

/// Rows of a matrix, `depth` elements of each.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a, A> {
    pub data: &'a [A],
    pub first: usize,
    pub stride: usize,
    pub depth: usize,
}

impl<'a, A> Strided<'a, A> {
    #[inline(always)]
    pub(super) fn rows<const N: usize>(&self, first: usize) -> [&'a [A]; N] {
        std::array::from_fn(|i| self.row(first + i))
    }

    #[inline(always)]
    pub(super) fn row(&self, at: usize) -> &'a [A] {
        &self.data[at * self.stride + self.first..][..self.depth]
    }

    /// From another row on.
    #[inline(always)]
    pub(super) fn skip(self, rows: usize) -> Self {
        Self { data: &self.data[rows * self.stride..], ..self }
    }
}

/// A chunk of `x · wᵀ`.
pub(super) struct Dots<'a, A, S> {
    pub simd: S,
    pub out: &'a mut [A],
    pub n: usize,
    pub rows: Strided<'a, A>,
    pub begins: bool,
}

impl<A: Lanes, S: Simd> Dots<'_, A, S> {
    /// Adds the chunk's part to C columns of m rows: those of the weight's first rows.
    #[inline(always)]
    pub(super) fn columns<const R: usize, const C: usize>(&mut self, m: usize, weight: Strided<'_, A>, column: usize) {
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
pub(super) fn axpy<A: Lanes, S: Simd, const D: usize>(simd: S, sums: &mut [A], x: [A; D], w: [&[A]; D]) {
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
pub(super) struct Panel<'a, A> {
    pub data: &'a [A],
    /// Elements from a row to the next.
    pub stride: usize,
}

/// A chunk of `x · w`.
pub(super) struct ProductChunk<'a, A, S> {
    pub simd: S,
    pub out: &'a mut [A],
    pub n: usize,
    pub x: Strided<'a, A>,
    pub begins: bool,
}

impl<A: Lanes, S: Simd> ProductChunk<'_, A, S> {
    /// Adds the chunk's part to `count` columns from `left` on of m rows.
    #[inline(always)]
    pub(super) fn columns<const R: usize, const C: usize>(
        &mut self,
        m: usize,
        panel: Panel<'_, A>,
        left: usize,
        count: usize,
    ) {
        let mut row = 0;
        while row < m {
            // The last rows, if more than one tile, go to two tiles that keep the multipliers busy, rather than to one
            // that does and one that does not.
            let rest = m - row;
            let rows = if rest > R && rest < 2 * R { rest.div_ceil(2) } else { rest.min(R) };
            match rows {
                1 => self.read::<1, C>(row, panel, left, count),
                2 if R > 2 => self.read::<2, C>(row, panel, left, count),
                3 if R > 3 => self.read::<3, C>(row, panel, left, count),
                4 if R > 4 => self.read::<4, C>(row, panel, left, count),
                5 if R > 5 => self.read::<5, C>(row, panel, left, count),
                _ => self.read::<R, C>(row, panel, left, count),
            }
            row += rows;
        }
    }

    /// One tile, the rows of the panel where they are.
    #[inline(always)]
    fn read<const R: usize, const C: usize>(&mut self, row: usize, panel: Panel<'_, A>, left: usize, count: usize) {
        let width = C * lanes::<A, S>();
        // Of few registers the compiler would keep some in memory in this loop.
        if panel.stride == width && S::REGISTER_COUNT >= 32 {
            // One run, read without a test in each step.
            let (w, _) = A::regs::<S>(panel.data).0.as_chunks::<C>();
            return self.tile::<R, C>(row, w.iter(), left, count);
        }
        let w =
            (0..self.x.depth).map(|i| &A::regs::<S>(&panel.data[i * panel.stride..][..width]).0.as_chunks::<C>().0[0]);
        self.tile::<R, C>(row, w, left, count);
    }

    #[inline(always)]
    fn tile<'w, const R: usize, const C: usize>(
        &mut self,
        row: usize,
        w: impl Iterator<Item = &'w [A::Reg<S>; C]>,
        left: usize,
        count: usize,
    ) where
        A::Reg<S>: 'w,
    {
        let (simd, begins, depth) = (self.simd, self.begins, self.x.depth);
        let x = self.x.rows::<R>(row).map(|x| &x[..depth]);
        let zero = A::splat(simd, A::default());
        let mut sums = [[zero; C]; R];
        for (i, w) in (0..depth).zip(w) {
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
