//! Random, extreme and strided matrices of many sizes, both directions, against the straight-line reference.

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor};
use rand::Rng;
use rand::rngs::StdRng;

use super::devices::{Target, cases};
use super::reference::{self, Bits, Expected, Kind};
use super::support::{CpuTensor, Side, bits, one_nan, quantize, quantize_fp8_block, quantize_mxfp8, same, tensor};

cases!(
    nvfp4_to_nearest,
    nvfp4_stochastic,
    nvfp4_transformed,
    blocks_of_panels,
    mxfp8,
    fp8_blocks,
    fp8_blocks_of_every_scale,
    leading_dimensions_are_rows
);

/// How a matrix's values are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    Ordinary,
    /// Any exponent, subnormals included.
    AnyBits,
    /// Any bits, NaN and infinities included.
    Special,
    Zeros,
    /// Zero but for a few blocks.
    Sparse,
    /// ±0, the largest and the least values of the type.
    Extremes,
    /// Multiples of a quarter up to 12: many ties.
    Ties,
}

const VALUES: [Values; 7] =
    [Values::Ordinary, Values::AnyBits, Values::Special, Values::Zeros, Values::Sparse, Values::Extremes, Values::Ties];

fn draw(values: Values, dtype: DType, rng: &mut StdRng) -> f32 {
    let any = |rng: &mut StdRng| match dtype {
        DType::BF16 => bf16::from_bits(rng.random()).to_f32(),
        DType::F16 => f16::from_bits(rng.random()).to_f32(),
        _ => f32::from_bits(rng.random()),
    };
    match values {
        Values::Ordinary => rng.random_range(-1.0f32..1.0) * rng.random_range(0.0f32..4.0),
        Values::AnyBits => Some(any(rng)).filter(|v| v.is_finite()).unwrap_or(1.5),
        Values::Special if rng.random_bool(0.01) => [f32::NAN, f32::INFINITY, -f32::INFINITY][rng.random_range(0..3)],
        Values::Special => rng.random_range(-3.0..3.0),
        Values::Zeros => 0.0,
        Values::Sparse => {
            if rng.random_bool(0.02) {
                rng.random_range(-9.0..9.0)
            } else {
                0.0
            }
        }
        Values::Extremes => {
            let (max, min) = match dtype {
                DType::BF16 => (bf16::MAX.to_f32(), bf16::from_bits(1).to_f32()),
                DType::F16 => (f16::MAX.to_f32(), f16::from_bits(1).to_f32()),
                _ => (f32::MAX, f32::from_bits(1)),
            };
            [0.0, -0.0, max, -max, min, -min, 1.0][rng.random_range(0..7)]
        }
        Values::Ties => f32::from(rng.random_range(-48i8..=48)) / 4.0,
    }
}

/// A tensor, a matrix's place in it, and the matrix's values.
struct Case {
    base: CpuTensor,
    layout: Layout,
    rows: Vec<Vec<f32>>,
}

impl Case {
    fn new(values: Values, dtype: DType, dims: [usize; 2], (form, rng): (usize, &mut StdRng)) -> Self {
        Self::of(dtype, dims, form, |_, _| draw(values, dtype, rng))
    }

    /// `form`: 0 dense, 1 a part of wider rows, 2 a transpose, 3 every third element of every second row, 4 a part of rows
    /// wider by whole words of 16 bytes, 5 dense at an odd place.
    fn of(dtype: DType, dims: [usize; 2], form: usize, mut value: impl FnMut(usize, usize) -> f32) -> Self {
        let [m, n] = dims;
        let (offset, strides) = match form {
            0 => (0, [n, 1]),
            1 => (3, [n + 5, 1]),
            2 => (0, [1, m]),
            3 => (7, [6 * n, 3]),
            4 => (0, [n + 16, 1]),
            _ => (1, [n, 1]),
        };
        let layout = Layout { offset, dims, strides };
        let count = offset + (m - 1) * strides[0] + (n - 1) * strides[1] + 1;
        // What is not the matrix's is NaN, which would show.
        let mut all = vec![f32::NAN; count];
        let place = |i: usize, j: usize| offset + i * strides[0] + j * strides[1];
        for i in 0..m {
            for j in 0..n {
                all[place(i, j)] = value(i, j);
            }
        }
        let base = tensor(&all, dtype, &[count]);
        let stored: Vec<f32> = base.to_f64().into_iter().map(|v| v as f32).collect();
        let rows = (0..m).map(|i| (0..n).map(|j| stored[place(i, j)]).collect()).collect();
        Self { base, layout, rows }
    }

    fn matrix(&self) -> Matrix<'_, Cpu> {
        Matrix::strided(self.base.view(), self.layout).unwrap()
    }

    fn lines(&self, direction: Direction) -> Vec<Vec<f32>> {
        match direction {
            Direction::Rows => self.rows.clone(),
            Direction::Columns => (0..self.layout.dims[1]).map(|j| self.rows.iter().map(|r| r[j]).collect()).collect(),
        }
    }
}

/// Sizes with and without partial blocks and panels; the last two of whole blocks and tiles, and of whole panels.
const DIMS: [[usize; 2]; 8] = [[1, 2], [2, 16], [16, 16], [5, 18], [33, 70], [48, 130], [64, 192], [128, 256]];
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const DIRECTIONS: [Direction; 2] = [Direction::Rows, Direction::Columns];

fn each_case(seed: u64, mut visit: impl FnMut(&Case, &str)) {
    let mut rng = super::devices::seed::generator(seed);
    for dims in DIMS {
        for dtype in DTYPES {
            for values in VALUES {
                for form in 0..4 {
                    let case = Case::new(values, dtype, dims, (form, &mut rng));
                    visit(&case, &format!("{dims:?} {dtype} {values:?} form {form}"));
                }
            }
        }
    }
}

fn compare(found: Side, expected: Expected, name: &str) {
    let amax: Vec<u32> = expected.amax.iter().map(|v| bits(*v)).collect();
    let scales: Vec<u8> = expected.scales.iter().map(|b| one_nan(*b)).collect();
    same(&found.amax, &amax, format!("{name} amax"));
    same(&found.scales, &scales, format!("{name} scales"));
    same(&found.codes, &expected.codes, format!("{name} codes"));
}

fn nvfp4_to_nearest<D: Target>(device: &D) {
    let mut compared = 0;
    each_case(1, |case, name| {
        for (format, kind) in [
            (Nvfp4::TE, Kind::Te),
            (Nvfp4::TE.tiled(), Kind::Tiled),
            (Nvfp4::TE.row_scaled(), Kind::RowScaled),
            (Nvfp4::MODELOPT, Kind::ModelOpt),
        ] {
            for direction in DIRECTIONS {
                let lines = case.lines(direction);
                if kind != Kind::ModelOpt && lines[0].len() % 2 == 1 {
                    continue;
                }
                let expected = reference::nvfp4(&lines, kind, None);
                compare(
                    quantize(device, &format, case.matrix(), direction),
                    expected,
                    &format!("{name} {kind:?} {direction:?}"),
                );
                compared += 1;
            }
        }
    });
    // 672 matrices, four formats, two directions, but for the columns of three odd heights where that is refused.
    assert_eq!(compared, 672 * 8 - 3 * 84 * 3);
}

fn nvfp4_stochastic<D: Target>(device: &D) {
    let random = Random { seed: 0x0123_4567_89ab_cdef, stream: 77, first_row: 48 };
    each_case(2, |case, name| {
        for direction in DIRECTIONS {
            let lines = case.lines(direction);
            if lines[0].len() % 2 == 1 {
                continue;
            }
            let columns = direction == Direction::Columns;
            let expected = reference::nvfp4(&lines, Kind::Te, Some(Bits { random, columns }));
            let format = Nvfp4::TE.stochastic(random);
            compare(quantize(device, &format, case.matrix(), direction), expected, &format!("{name} {direction:?}"));
        }
    });
}

/// Sizes of which a kernel's blocks take whole panels, several and parts of them: a block that is right beside one that
/// is not finite, columns too, and the zeros between them.
fn blocks_of_panels<D: Target>(device: &D) {
    let random = Random { seed: 11, stream: 3, first_row: 16 };
    let mut rng = super::devices::seed::generator(5);
    let dims = [384, 640];
    for dtype in [DType::BF16, DType::F16] {
        for infinite in [false, true] {
            let values = if infinite { Values::Ties } else { Values::Ordinary };
            let drawn = Case::new(values, dtype, dims, (0, &mut rng));
            let place = |(i, row): (usize, Vec<f32>)| {
                let change = move |(j, v): (usize, f32)| match (infinite, j % 4) {
                    (true, 0) if i % 16 == j % 16 => f32::INFINITY,
                    (true, 1) => 0.0,
                    _ => v,
                };
                row.into_iter().enumerate().map(change).collect::<Vec<f32>>()
            };
            let rows: Vec<Vec<f32>> = drawn.rows.into_iter().enumerate().map(place).collect();
            let case = Case { base: tensor(&rows.concat(), dtype, &[dims[0] * dims[1]]), rows, ..drawn };
            for direction in DIRECTIONS {
                let lines = case.lines(direction);
                for (format, kind, stochastic) in [
                    (Nvfp4::TE, Kind::Te, false),
                    (Nvfp4::TE.tiled(), Kind::Tiled, false),
                    (Nvfp4::TE.stochastic(random), Kind::Te, true),
                ] {
                    let bits = stochastic.then_some(Bits { random, columns: direction == Direction::Columns });
                    let name = format!("{dtype} infinite {infinite} {kind:?} {stochastic} {direction:?}");
                    let found = quantize(device, &format, case.matrix(), direction);
                    compare(found, reference::nvfp4(&lines, kind, bits), &name);
                }
            }
        }
    }
}

fn nvfp4_transformed<D: Target>(device: &D) {
    let mut compared = 0;
    let random = Random { seed: 5, stream: 6, first_row: 0 };
    each_case(3, |case, name| {
        if case.base.dtype() != DType::BF16 || !case.rows.len().is_multiple_of(16) {
            return;
        }
        for transform in [Hadamard::TE, Hadamard::PLAIN, Hadamard { signs: 0x1234 }] {
            let lines: Vec<Vec<f32>> = case.lines(Direction::Columns);
            let lines: Vec<_> = lines.iter().map(|line| reference::hadamard(line, transform.signs)).collect();
            let format = Nvfp4::TE.hadamard(transform);
            let expected = reference::nvfp4(&lines, Kind::Te, None);
            compare(quantize(device, &format, case.matrix(), Direction::Columns), expected, name);
            let expected = reference::nvfp4(&lines, Kind::Te, Some(Bits { random, columns: true }));
            compare(quantize(device, &format.stochastic(random), case.matrix(), Direction::Columns), expected, name);
            // Rows are not transformed.
            let plain = quantize(device, &Nvfp4::TE, case.matrix(), Direction::Rows);
            assert_eq!(quantize(device, &format, case.matrix(), Direction::Rows), plain, "{name}");
            compared += 1;
        }
    });
    assert_eq!(compared, 4 * 7 * 4 * 3);
}

fn mxfp8<D: Target>(device: &D) {
    each_case(4, |case, name| {
        let [m, n] = case.layout.dims;
        for scale in [MxScale::Ceil, MxScale::Floor] {
            for (blocks, direction) in
                [Blocks::Line, Blocks::Tile].into_iter().flat_map(|b| DIRECTIONS.map(|direction| (b, direction)))
            {
                let found = quantize_mxfp8(device, Mxfp8 { scale, blocks }, case.matrix(), direction);
                let (mut codes, mut scales) = (vec![0; m * n], vec![0; found.1.len()]);
                let [high, wide] = match (blocks, direction) {
                    (Blocks::Tile, _) => [32, 32],
                    (_, Direction::Rows) => [1, 32],
                    (_, Direction::Columns) => [32, 1],
                };
                for (top, left) in
                    (0..m).step_by(high).flat_map(|top| (0..n).step_by(wide).map(move |left| (top, left)))
                {
                    let rows = top..m.min(top + high);
                    let places: Vec<_> = rows.flat_map(|i| (left..n.min(left + wide)).map(move |j| (i, j))).collect();
                    let block: Vec<f32> = places.iter().map(|(i, j)| case.rows[*i][*j]).collect();
                    let (expected, byte) = reference::mxfp8(&block, scale == MxScale::Floor);
                    for ((i, j), code) in places.into_iter().zip(expected) {
                        codes[i * n + j] = code;
                        match direction {
                            Direction::Rows => scales[i * n.div_ceil(32) + j / 32] = byte,
                            Direction::Columns => scales[i / 32 * n + j] = byte,
                        }
                    }
                }
                same(&found.1, &scales, format!("{name} {scale:?} {blocks:?} {direction:?} scales"));
                same(&found.0, &codes, format!("{name} {scale:?} {blocks:?} {direction:?} codes"));
            }
        }
    });
}

fn compare_fp8_blocks<D: Target>(device: &D, case: &Case, name: &str) {
    let (codes, scales) = quantize_fp8_block(device, case.matrix());
    let expected: Vec<_> = case.rows.iter().flat_map(|row| row.chunks(128)).map(reference::fp8_block).collect();
    let expected_scales: Vec<u32> = expected.iter().map(|(_, scale)| scale.to_bits()).collect();
    same(&scales, &expected_scales, format!("{name} scales"));
    let expected_codes: Vec<u8> = expected.into_iter().flat_map(|(codes, _)| codes).collect();
    same(&codes, &expected_codes, format!("{name} codes"));
}

fn fp8_blocks<D: Target>(device: &D) {
    each_case(6, |case, name| compare_fp8_blocks(device, case, name));
}

/// Blocks of any largest magnitude, zero and infinity too, whose elements are beside the middles between two codes times
/// the scale: a quotient that is not rounded right has another code there. Rows of whole blocks and others.
fn fp8_blocks_of_every_scale<D: Target>(device: &D) {
    let mut rng = super::devices::seed::generator(7);
    for dtype in DTYPES {
        // From the least subnormal to the largest power of two.
        let exponents = if dtype == DType::F16 { -24..=15 } else { -149..=127 };
        for (dims, form) in
            [[37usize, 384], [40, 130]].into_iter().flat_map(|dims| (0..6).map(move |form| (dims, form)))
        {
            let wide = dims[1].div_ceil(128);
            let amaxes: Vec<f32> = (0..dims[0] * wide)
                .map(|i| match i % 16 {
                    0 => 0.0,
                    1 => f32::INFINITY,
                    _ => (rng.random_range(1.0..2.0) * 2f64.powi(rng.random_range(exponents.clone()))) as f32,
                })
                .collect();
            let amaxes = tensor(&amaxes, dtype, &[amaxes.len()]).to_f64();
            let case = Case::of(dtype, dims, form, |i, j| {
                let amax = amaxes[i * wide + j / 128] as f32;
                let scale = (amax / 448.0).clamp(f32::MIN_POSITIVE, f32::from_bits(254 << 23));
                let code = rng.random_range(0..0x7E);
                let middle = (E4M3[code] + E4M3[code + 1]) / 2.0 * scale;
                let v = match rng.random_range(0..16) {
                    0 => amax,
                    1 => 0.0,
                    2 => f32::from_bits(1),
                    3 => f32::NAN,
                    // Up to two floats off.
                    _ => f32::from_bits((middle.to_bits() + rng.random_range(0..5)).saturating_sub(2)).min(amax),
                };
                if rng.random() { -v } else { v }
            });
            compare_fp8_blocks(device, &case, &format!("{dims:?} {dtype} every scale form {form}"));
        }
    }
}

/// A leading dimension more is the same matrix.
fn leading_dimensions_are_rows<D: Target>(device: &D) {
    let values: Vec<f32> = (0..2 * 8 * 32).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
    let three = Tensor::<Cpu>::from_vec(values.clone(), &[2, 8, 32]).unwrap();
    let two = Tensor::<Cpu>::from_vec(values, &[16, 32]).unwrap();
    let (three, two) = (Matrix::new(three.view()).unwrap(), Matrix::new(two.view()).unwrap());
    for direction in DIRECTIONS {
        assert_eq!(quantize(device, &Nvfp4::TE, three, direction), quantize(device, &Nvfp4::TE, two, direction));
    }
}
