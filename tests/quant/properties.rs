//! What must hold of any input: phases, shards, sharing of tiles, stochastic rounding, de-quantisation.

use half::bf16;
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor, TensorMut, TensorRef};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use super::support::{CpuTensor, Side, bits, dequantize, quantize, quantize_mxfp8, side, tensor};

const RANDOM: Random = Random { seed: 11, stream: 3, first_row: 0 };

fn normal(dims: [usize; 2], seed: u64, dtype: DType) -> CpuTensor {
    let mut rng = StdRng::seed_from_u64(seed);
    let values: Vec<f32> = (0..dims[0] * dims[1]).map(|_| rng.sample(StandardNormal)).collect();
    tensor(&values, dtype, &dims)
}

fn formats() -> Vec<Nvfp4> {
    vec![
        Nvfp4::TE,
        Nvfp4::TE.tiled(),
        Nvfp4::TE.row_scaled(),
        Nvfp4::TE.stochastic(RANDOM),
        Nvfp4::TE.hadamard(Hadamard::TE),
        Nvfp4::TE.hadamard(Hadamard::TE).stochastic(RANDOM),
        Nvfp4::MODELOPT,
    ]
}

/// Both directions of a matrix by the phases; `reduce` sees each amax between them.
fn phases(format: &Nvfp4, x: &CpuTensor, reduce: impl Fn(Direction, &mut [f32])) -> [Side; 2] {
    let cpu = Cpu::poisoning();
    let dims = [x.dims()[0], x.dims()[1]];
    let mut made = [Direction::Rows, Direction::Columns].map(|d| Nvfp4Tensors::empty(&cpu, format, dims, d).unwrap());
    let [rows, columns] = &mut made;
    let (rows_amax, columns_amax) = (Some(rows.amax.view_mut()), Some(columns.amax.view_mut()));
    cpu.compute_amax(
        &(),
        Amax { format, matrix: Matrix::new(x.view()).unwrap(), rows: rows_amax, columns: columns_amax },
    )
    .unwrap();
    for (side, direction) in [(&mut *rows, Direction::Rows), (&mut *columns, Direction::Columns)] {
        reduce(direction, side.amax.view_mut().into_slice().unwrap());
    }
    let (rows, columns) = (Some(rows.view_mut()), Some(columns.view_mut()));
    cpu.quantize_cast_only(&(), Quantize { format, matrix: Matrix::new(x.view()).unwrap(), rows, columns }).unwrap();
    made.map(side)
}

#[test]
fn one_call_is_the_phases() {
    for dims in [[32, 48], [16, 70], [160, 32]] {
        let x = normal(dims, 1, DType::BF16);
        for format in formats() {
            let matrix = Matrix::new(x.view()).unwrap();
            let [rows, columns] = phases(&format, &x, |_, _| {});
            assert_eq!(rows, quantize(&format, matrix, Direction::Rows), "{format:?}");
            assert_eq!(columns, quantize(&format, matrix, Direction::Columns), "{format:?}");
        }
    }
}

/// Row shards, their amaxes joined by the maximum, make the whole matrix: what a gather of quantised shards relies
/// on. Rows concatenate; columns (and their scales) interleave by shard.
#[test]
fn shards_are_parts_of_the_whole() {
    let (rows, columns, shards) = (96, 80, 3);
    let x = normal([rows, columns], 2, DType::BF16);
    let height = rows / shards;
    for format in formats() {
        if format.scope() == AmaxScope::Line {
            continue;
        }
        let whole = phases(&format, &x, |_, _| {});
        let parts: Vec<[Side; 2]> = (0..shards)
            .map(|shard| {
                let format = match format.rounding() {
                    Rounding::Nearest => format,
                    Rounding::Stochastic(random) => format.stochastic(Random { first_row: shard * height, ..random }),
                };
                let bytes = height * columns * 2;
                let data = &x.as_bytes()[shard * bytes..(shard + 1) * bytes];
                let values: Vec<bf16> = data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
                let part = Tensor::from_vec(values, &[height, columns]).unwrap();
                // The maximum over the ranks is the whole's.
                phases(&format, &part, |direction, amax| {
                    let whole = f32::from_bits(whole[usize::from(direction == Direction::Columns)].amax[0]);
                    assert!(amax[0] <= whole);
                    amax[0] = whole;
                })
            })
            .collect();
        let codes: Vec<u8> = parts.iter().flat_map(|part| part[0].codes.clone()).collect();
        let scales: Vec<u8> = parts.iter().flat_map(|part| part[0].scales.clone()).collect();
        assert_eq!((codes, scales), (whole[0].codes.clone(), whole[0].scales.clone()), "{format:?}");
        let interleaved = |of: fn(&Side) -> &[u8], width: usize| -> Vec<u8> {
            let line =
                |line: usize| parts.iter().flat_map(move |p| of(&p[1])[line * width..(line + 1) * width].to_vec());
            (0..columns).flat_map(line).collect()
        };
        assert_eq!(interleaved(|s| &s.codes, height / 2), whole[1].codes, "{format:?}");
        assert_eq!(interleaved(|s| &s.scales, height / 16), whole[1].scales, "{format:?}");
    }
}

#[test]
fn many_amaxes_at_once() {
    let cpu = Cpu::poisoning();
    let tensors: Vec<CpuTensor> = (1..6).map(|i| normal([16 * i, 8 * i + 2], i as u64, DType::F32)).collect();
    let format = Nvfp4::TE;
    let mut found = vec![[f32::NAN; 2]; tensors.len()];
    let calls = tensors.iter().zip(&mut found).map(|(x, out)| {
        let [rows, columns] = out;
        let view = |v| Some(TensorMut::from_slice(std::slice::from_mut(v), &[1]).unwrap());
        Amax { format: &format, matrix: Matrix::new(x.view()).unwrap(), rows: view(rows), columns: view(columns) }
    });
    cpu.multi_compute_amax(&(), calls.collect()).unwrap();
    for (x, found) in tensors.iter().zip(found) {
        let expected = x.to_f64().into_iter().fold(0.0f64, |m, v| m.max(v.abs())) as f32;
        assert_eq!(found, [expected; 2]);
    }
}

/// Blocks of 16x16 hold the same values in both directions.
#[test]
fn tiles_are_their_transpose() {
    for dims in [[48, 64], [22, 36]] {
        let x = normal(dims, 3, DType::F32);
        let matrix = Matrix::new(x.view()).unwrap();
        let format = Nvfp4::TE.tiled();
        let rows = quantize(&format, matrix, Direction::Rows);
        let columns = quantize(&format, matrix, Direction::Columns);
        let rows = dequantize(&format, &rows, dims);
        let columns = dequantize(&format, &columns, [dims[1], dims[0]]);
        for (i, value) in rows.iter().enumerate() {
            let (row, column) = (i / dims[1], i % dims[1]);
            assert_eq!(value.to_bits(), columns[column * dims[0] + row].to_bits());
        }
    }
}

fn error(values: &[f64], x: &[f64]) -> f64 {
    values.iter().zip(x).map(|(v, x)| (v - x).powi(2)).sum::<f64>().sqrt()
}

/// Rounding errors of 50 stochastic quantisations average out, in both directions, with and without a transform.
///
/// Over values spread evenly in their steps, RN's error is √(1/12) of a step in the mean square, one stochastic
/// rounding's √(1/6), the mean of 50's √(1/300), and 8 random bits leave a bias of 1/512 on average: a ratio of 0.2,
/// with 0.1 for what is not spread evenly. Random bits that repeated over the 50 would leave it at √2.
#[test]
fn mean_of_stochastic_roundings() {
    let dims = [64, 96];
    let x = normal(dims, 4, DType::BF16);
    let matrix = Matrix::new(x.view()).unwrap();
    for direction in [Direction::Rows, Direction::Columns] {
        for format in [Nvfp4::TE, Nvfp4::TE.hadamard(Hadamard::TE)] {
            let lines = match direction {
                Direction::Rows => dims,
                Direction::Columns => [dims[1], dims[0]],
            };
            // What is quantised: the matrix, its transpose, or the transpose transformed.
            let mut exact: Vec<f64> = (0..lines[0] * lines[1])
                .map(|i| match direction {
                    Direction::Rows => i,
                    Direction::Columns => i % lines[1] * dims[1] + i / lines[1],
                })
                .map(|i| x.to_f64()[i])
                .collect();
            if format.transform().is_some() && direction == Direction::Columns {
                let line = |line: &[f64]| line.iter().map(|v| *v as f32).collect::<Vec<_>>();
                let all = exact.chunks(lines[1]).flat_map(|l| super::reference::hadamard(&line(l), Hadamard::TE.signs));
                exact = all.map(f64::from).collect();
            }
            let back = |format: &Nvfp4| -> Vec<f64> {
                let side = quantize(format, matrix, direction);
                dequantize(format, &side, lines).into_iter().map(f64::from).collect()
            };
            let nearest = error(&back(&format), &exact);
            let mut mean = vec![0.0; exact.len()];
            for stream in 0..50 {
                let once = back(&format.stochastic(Random { stream, ..RANDOM }));
                mean.iter_mut().zip(once).for_each(|(m, v)| *m += v / 50.0);
            }
            let ratio = error(&mean, &exact) / nearest;
            assert!(ratio < 0.3, "{direction:?} {format:?}: {ratio}");
        }
    }
}

/// Bits come from seed, stream and place, and from nothing else.
#[test]
fn stochastic_rounding_is_seeded() {
    let x = normal([32, 32], 5, DType::F32);
    let matrix = Matrix::new(x.view()).unwrap();
    let codes = |random| quantize(&Nvfp4::TE.stochastic(random), matrix, Direction::Rows).codes;
    assert_eq!(codes(RANDOM), codes(RANDOM));
    let others = [
        Random { seed: RANDOM.seed + 1, ..RANDOM },
        Random { seed: RANDOM.seed | 1 << 40, ..RANDOM },
        Random { stream: 4, ..RANDOM },
        Random { first_row: 16, ..RANDOM },
    ];
    for other in others {
        assert_ne!(codes(other), codes(RANDOM), "{other:?}");
    }
    // A symmetric matrix, too, has other bits column-wise.
    let symmetric: Vec<f32> = (0..1024).map(|i| ((i / 32 + i % 32) as f32).sin()).collect();
    let x = tensor(&symmetric, DType::F32, &[32, 32]);
    let matrix = Matrix::new(x.view()).unwrap();
    let format = Nvfp4::TE.stochastic(RANDOM);
    assert_ne!(quantize(&format, matrix, Direction::Rows), quantize(&format, matrix, Direction::Columns));
}

/// Values that the format holds come back exactly, in every output type that holds them.
#[test]
fn exact_values_survive() {
    // An amax of 2688 makes the second-level factor 1; every block has its 6·448.
    let values: Vec<f32> = (0..64).map(|i| E2M1[i * 5 % 16] * if i % 16 == 0 { 0.0 } else { 448.0 }).collect();
    let values: Vec<f32> = values.iter().enumerate().map(|(i, v)| if i % 16 == 0 { 2688.0 } else { *v }).collect();
    let cpu = Cpu::poisoning();
    for format in [Nvfp4::TE, Nvfp4::MODELOPT, Nvfp4::TE.row_scaled()] {
        let x = tensor(&values, DType::F32, &[2, 32]);
        let mut made = Nvfp4Tensors::empty(&cpu, &format, [2, 32], Direction::Rows).unwrap();
        let matrix = Matrix::new(x.view()).unwrap();
        cpu.quantize(&(), Quantize { format: &format, matrix, rows: Some(made.view_mut()), columns: None }).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut out = Tensor::empty(&cpu, dtype, &[2, 32]).unwrap();
            cpu.dequantize(&(), made.dequantize(&format, out.view_mut())).unwrap();
            let expected: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
            assert_eq!(out.to_f64(), expected, "{format:?} {dtype}");
        }
    }
}

/// MXFP8 there and back: within half a step of E4M3 of every value, a step being 2⁻³ of its power of two (or of
/// 2⁻⁶ of the block's scale), and equal for values that it holds. Scales rounded up saturate nothing.
#[test]
fn mxfp8_round_trip() {
    let dims = [70, 90];
    let x = normal(dims, 6, DType::F32);
    let cpu = Cpu::poisoning();
    for blocks in [Blocks::Line, Blocks::Tile] {
        for direction in [Direction::Rows, Direction::Columns] {
            let format = Mxfp8 { scale: MxScale::Ceil, blocks };
            let (codes, scales) = quantize_mxfp8(format, Matrix::new(x.view()).unwrap(), direction);
            let scale_dims = Mxfp8::scale_dims(dims, direction);
            let codes = Tensor::<Cpu>::from_vec(codes, &dims).unwrap();
            let scales = Tensor::<Cpu>::from_vec(scales, &scale_dims).unwrap();
            let mut out = Tensor::empty(&cpu, DType::F32, &dims).unwrap();
            let call = DequantizeMxfp8 { direction, codes: codes.view(), scales: scales.view(), out: out.view_mut() };
            cpu.dequantize_mxfp8(&(), call).unwrap();
            let place = |i: usize| match direction {
                Direction::Rows => i / dims[1] * scale_dims[1] + i % dims[1] / 32,
                Direction::Columns => i / dims[1] / 32 * scale_dims[1] + i % dims[1],
            };
            for (i, (x, y)) in x.to_f64().into_iter().zip(out.to_f64()).enumerate() {
                let least = 2f64.powi(-6) * f64::from(e8m0(scales.as_bytes()[place(i)]));
                let half_step = x.abs().max(least).log2().floor().exp2() / 16.0;
                assert!((x - y).abs() <= half_step, "{x} {y}");
            }
        }
    }
}

/// Codes that were cropped and codes of whole blocks de-quantise alike.
#[test]
fn cropped_or_whole_blocks() {
    let x = normal([3, 24], 7, DType::F32);
    let cropped = quantize(&Nvfp4::TE, Matrix::new(x.view()).unwrap(), Direction::Rows);
    assert_eq!((cropped.codes.len(), cropped.scales.len()), (3 * 12, 3 * 2));
    let mut whole = cropped.clone();
    whole.codes = cropped.codes.chunks(12).flat_map(|row| [row, &[0; 4]].concat()).collect();
    let back = dequantize(&Nvfp4::TE, &cropped, [3, 24]);
    assert_eq!(back, dequantize(&Nvfp4::TE, &whole, [3, 24]));
    let largest = x.to_f64().into_iter().fold(0.0f64, |m, v| m.max(v.abs())) as f32;
    // Half the widest step of a code times the largest block scale, and an E4M3 rounding of that scale.
    let bound = largest / 6.0 * (1.0 + 1.0 / 8.0);
    assert!(back.iter().zip(x.as_slice::<f32>().unwrap()).all(|(b, x)| (b - x).abs() <= bound));
}

#[test]
fn empty_matrices() {
    let cpu = Cpu::poisoning();
    for dims in [[0, 32], [32, 0]] {
        let x = Tensor::<Cpu>::from_vec(Vec::<f32>::new(), &dims).unwrap();
        let matrix = Matrix::new(x.view()).unwrap();
        for direction in [Direction::Rows, Direction::Columns] {
            let found = quantize(&Nvfp4::TE, matrix, direction);
            assert_eq!(found, Side { codes: vec![], scales: vec![], amax: vec![bits(0.0)] });
            quantize_mxfp8(Mxfp8::TE, matrix, direction);
        }
        assert_eq!(cpu.first_non_finite(&(), matrix).unwrap(), None);
    }
}

#[test]
fn finds_what_is_not_finite() {
    let mut values = vec![1.0f32; 6 * 40];
    let cpu = Cpu::new();
    let find = |values: &[f32]| {
        let matrix = Matrix::new(TensorRef::from_slice(values, &[6, 40]).unwrap()).unwrap();
        [matrix, matrix.transposed()].map(|m| cpu.first_non_finite(&(), m).unwrap())
    };
    assert_eq!(find(&values), [None; 2]);
    values[3 * 40 + 7] = f32::NAN;
    values[4 * 40 + 2] = f32::NEG_INFINITY;
    assert_eq!(find(&values), [Some([3, 7]), Some([2, 4])]);
}
