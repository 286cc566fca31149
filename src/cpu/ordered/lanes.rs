//! Floating types in SIMD registers.

use pulp::Simd;

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

/// Lanes of a register.
#[inline(always)]
pub(super) const fn lanes<A: Lanes, S: Simd>() -> usize {
    size_of::<A::Reg<S>>() / size_of::<A>()
}

macro_rules! float_lanes {
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
float_lanes!(
    f32, f32s: splat_f32s, mul_add_e_f32s, reduce_sum_f32s, as_simd_f32s, as_mut_simd_f32s,
        partial_load_f32s, partial_store_f32s;
    f64, f64s: splat_f64s, mul_add_e_f64s, reduce_sum_f64s, as_simd_f64s, as_mut_simd_f64s,
        partial_load_f64s, partial_store_f64s
);
