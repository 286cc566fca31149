//! Every number of rows gives a row the same bits, and the product is right.

use num_traits::AsPrimitive;

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

fn rows_have_the_same_bits_in_every_product<A: Lanes + AsPrimitive<f64>>(unit: f64)
where
    f64: AsPrimitive<A>,
{
    // Numbers of rows at which another tile, another copy or another loop begins: at, below and above tiles of up to 6
    // rows, COPY_ROWS (12), COPY_TILES (4) tiles of them, NARROW_DOT_BLOCK_ROWS (128) and BLOCK_ROWS (256).
    let counts =
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 25, 63, 64, 65, 127, 128, 129, 131, 255, 256, 257, 261];
    // [n, k], around COPY_COLUMNS (16), AXPY_CHUNK (256), and DOT_REGISTERS (128) of 8 and of 16 lanes.
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
        // A weight that no near cache holds, of either type: more than STREAM_BYTES and STREAM_MIN_COLUMNS.
        [520, 1100],
        // The same, and wider than STREAM_COLUMNS (8192).
        [8200, 70],
    ];
    for (at, [n, k]) in sizes.into_iter().enumerate() {
        let rows = if n * k < 100_000 { 261 } else { 13 };
        let of = |seed, count| numbers(seed, count).into_iter().map(f64::as_).collect::<Vec<A>>();
        let (x, w) = (of(at as u64, rows * k), of(at as u64 + 100, n * k));
        for (layout, arch) in machines().into_iter().flat_map(|a| [(WeightLayout::Rows, a), (WeightLayout::Columns, a)])
        {
            let whole = product(arch, layout, &x, &w, [n, k]);
            for (row, found) in whole.chunks(n).enumerate() {
                for (column, found) in found.iter().enumerate().step_by(7) {
                    let term = |i: usize| {
                        let w = if layout == WeightLayout::Rows { w[column * k + i] } else { w[i * n + column] };
                        x[row * k + i].as_() * w.as_()
                    };
                    let exact: f64 = (0..k).map(term).sum();
                    // A sum of k terms, each rounded once and added in any order: at most k units of Σ|term|.
                    let bound = k as f64 * unit * (0..k).map(|i| term(i).abs()).sum::<f64>();
                    assert!((found.as_() - exact).abs() <= bound, "{layout:?}, {n} x {k}, row {row}");
                }
            }
            for count in counts.into_iter().filter(|count| *count <= rows) {
                for first in [0, (rows - count) / 2, rows - count] {
                    let part = product(arch, layout, &x[first * k..(first + count) * k], &w, [n, k]);
                    let same =
                        part.iter().zip(&whole[first * n..]).all(|(a, b)| a.as_().to_bits() == b.as_().to_bits());
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
