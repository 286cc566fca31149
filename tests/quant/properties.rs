//! Properties that hold of any input: phases, shards, sharing of tiles, stochastic rounding, de-quantization.

use half::bf16;
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor, TensorRef};
use rand::Rng;
use rand_distr::StandardNormal;

use super::devices::{Target, cases};
use super::support::{CpuTensor, Side, bits, dequantize, here, matrix, quantize, quantize_mxfp8, same, tensor, there};

cases!(
    one_call_is_the_phases,
    shards_are_parts_of_the_whole,
    many_amaxes_at_once,
    many_back_at_once,
    tiles_are_their_transpose,
    mean_of_stochastic_roundings,
    stochastic_rounding_is_seeded,
    exact_values_survive,
    mxfp8_round_trip,
    cropped_or_whole_blocks,
    empty_matrices,
    no_direction_is_nothing_to_do,
    each_direction_has_its_own_amax,
    finds_what_is_not_finite
);

const RANDOM: Random = Random { seed: 11, stream: 3, first_row: 0 };

fn normal(dims: [usize; 2], seed: u64, dtype: DType) -> CpuTensor {
    let mut rng = super::devices::seed::generator(seed);
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
fn phases<D: Target>(
    device: &D,
    (format, x): (&Nvfp4, &CpuTensor),
    reduce: impl Fn(Direction, &mut [f32]),
) -> [Side; 2] {
    let base = there(device, x.view());
    let whole = Matrix::new(x.view()).unwrap();
    let whole = matrix(&base, whole);
    let dims = [x.dims()[0], x.dims()[1]];
    let mut made = [Direction::Rows, Direction::Columns].map(|d| Nvfp4Tensors::empty(device, format, dims, d).unwrap());
    let [rows, columns] = &mut made;
    let (rows_amax, columns_amax) = (Some(rows.amax.view_mut()), Some(columns.amax.view_mut()));
    device.compute_amax(Amax { format, matrix: whole.borrow(), rows: rows_amax, columns: columns_amax }).unwrap();
    for (side, direction) in [(&mut *rows, Direction::Rows), (&mut *columns, Direction::Columns)] {
        let mut amax = device.to_cpu(&side.amax);
        reduce(direction, amax.view_mut().into_slice().unwrap());
        device.upload(amax.as_bytes(), side.amax.view_mut()).unwrap();
    }
    let (rows, columns) = (Some(rows.view_mut()), Some(columns.view_mut()));
    device.quantize_cast_only(Quantize { format, matrix: whole.borrow(), rows, columns }).unwrap();
    made.map(|tensors| here(device, &tensors))
}

fn one_call_is_the_phases<D: Target>(device: &D) {
    // The last two are whole panels: of one block of them, and of parts of blocks in more rows of blocks than go
    // together.
    for dims in [[32, 48], [16, 70], [160, 32], [256, 512], [1152, 640]] {
        let x = normal(dims, 1, DType::BF16);
        for format in formats() {
            let matrix = Matrix::new(x.view()).unwrap();
            let [rows, columns] = phases(device, (&format, &x), |_, _| {});
            assert_eq!(rows, quantize(device, &format, matrix, Direction::Rows), "{format:?}");
            assert_eq!(columns, quantize(device, &format, matrix, Direction::Columns), "{format:?}");
        }
    }
}

/// An amax of its own for each direction, of a matrix of whole panels.
fn each_direction_has_its_own_amax<D: Target>(device: &D) {
    let x = normal([256, 384], 9, DType::BF16);
    for format in [Nvfp4::TE, Nvfp4::TE.tiled(), Nvfp4::TE.stochastic(RANDOM)] {
        let run = |rows: f32, columns: f32| {
            phases(device, (&format, &x), |direction, amax| {
                amax[0] *= if direction == Direction::Rows { rows } else { columns };
            })
        };
        let ([plain, _], [_, doubled], mixed) = (run(1.0, 1.0), run(2.0, 2.0), run(1.0, 2.0));
        assert_eq!(mixed, [plain, doubled], "{format:?}");
    }
}

/// Row shards, their amaxes joined by the maximum, make the whole matrix: what a gather of quantized shards relies
/// on. Rows concatenate; columns (and their scales) interleave by shard.
fn shards_are_parts_of_the_whole<D: Target>(device: &D) {
    let (rows, columns, shards) = (96, 80, 3);
    let x = normal([rows, columns], 2, DType::BF16);
    let height = rows / shards;
    for format in formats() {
        if format.scope() == AmaxScope::Line {
            continue;
        }
        let whole = phases(device, (&format, &x), |_, _| {});
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
                phases(device, (&format, &part), |direction, amax| {
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

fn many_amaxes_at_once<D: Target>(device: &D) {
    // More than a device may take in one launch, of all types, some unaligned.
    let dtype = |i: usize| [DType::F32, DType::BF16, DType::F16][i % 3];
    let tensors: Vec<CpuTensor> = (1..50).map(|i| normal([16 * i, 8 * i + 2 * (i % 5)], i as u64, dtype(i))).collect();
    let format = Nvfp4::TE;
    let own: Vec<Tensor<D>> = tensors.iter().map(|x| there(device, x.view())).collect();
    let mut found: Vec<[Tensor<D>; 2]> =
        own.iter().map(|_| [0, 1].map(|_| Tensor::empty(device, DType::F32, &[1]).unwrap())).collect();
    let calls = own.iter().zip(&mut found).map(|(x, [rows, columns])| {
        let [rows, columns] = [rows, columns].map(|t| Some(t.view_mut()));
        Amax { format: &format, matrix: Matrix::new(x.view()).unwrap(), rows, columns }
    });
    device.multi_compute_amax(calls.collect()).unwrap();
    for (x, found) in tensors.iter().zip(found) {
        let expected = x.to_f64().into_iter().fold(0.0f64, |m, v| m.max(v.abs()));
        assert_eq!(found.map(|t| device.values(t.view())), [[expected]; 2]);
    }
}

/// One matrix of many that are brought back at once.
struct Quantized {
    format: Nvfp4,
    side: Side,
    mxfp8: (Vec<u8>, Vec<u8>),
    dims: [usize; 2],
    dtype: DType,
}

/// Many calls bring back what the formulas make of each: of both recipes, with an amax a matrix and a row, of sizes
/// of whole words and others, in every type of output; more than a device may take in one launch.
fn many_back_at_once<D: Target>(device: &D) {
    let formats = [Nvfp4::TE, Nvfp4::MODELOPT, Nvfp4::TE.row_scaled()];
    let matrices: Vec<Quantized> = (0..45)
        .map(|i| {
            // Most have rows of whole blocks; some are of several thousand eights. Odd multiples of 16 are whole words of
            // which MXFP8's last block is short.
            let width = match i % 4 {
                3 => 8 * i + 2,
                2 => 16 * (1 + i),
                _ => 32 * (1 + i * 5 % 70),
            };
            let dims = [1 + i * 7 % 40, width];
            let (format, x) = (formats[i % 3], normal(dims, i as u64, DType::F32));
            let matrix = Matrix::new(x.view()).unwrap();
            let side = quantize(device, &format, matrix, Direction::Rows);
            let mxfp8 = quantize_mxfp8(device, Mxfp8::TE, matrix, Direction::Rows);
            Quantized { format, side, mxfp8, dims, dtype: [DType::BF16, DType::F32, DType::F16][i / 3 % 3] }
        })
        .collect();
    let bytes = |data: &[u8], rows: usize| {
        there(device, Tensor::<Cpu>::from_vec(data.to_vec(), &[rows, data.len() / rows]).unwrap().view())
    };
    let floats = |data: &[u32]| {
        let data: Vec<f32> = data.iter().map(|b| f32::from_bits(*b)).collect();
        there(device, TensorRef::from_slice(&data, &[data.len()]).unwrap())
    };
    let outputs =
        || -> Vec<Tensor<D>> { matrices.iter().map(|m| Tensor::empty(device, m.dtype, &m.dims).unwrap()).collect() };
    // -0 is not +0.
    let signed = |values: Vec<f64>| -> Vec<u64> { values.into_iter().map(f64::to_bits).collect() };
    let narrow = |m: &Quantized, values: Vec<f32>| tensor(&values, m.dtype, &m.dims).to_f64();

    let sides: Vec<[Tensor<D>; 3]> = matrices
        .iter()
        .map(|m| [bytes(&m.side.codes, m.dims[0]), bytes(&m.side.scales, m.dims[0]), floats(&m.side.amax)])
        .collect();
    let mut found = outputs();
    let calls = matrices.iter().zip(&sides).zip(&mut found).map(|((m, [codes, scales, amax]), out)| {
        let (codes, scales, amax) = (codes.view(), scales.view(), amax.view());
        Dequantize { format: &m.format, codes, scales, amax, out: out.view_mut() }
    });
    device.multi_dequantize(calls.collect()).unwrap();
    for (i, (m, found)) in matrices.iter().zip(&found).enumerate() {
        let expected = narrow(m, {
            let amax: Vec<f32> = m.side.amax.iter().map(|b| f32::from_bits(*b)).collect();
            let shape = (m.dims[1], m.format.recipe() == Recipe::ModelOpt);
            super::reference::back(&m.side.codes, &m.side.scales, &amax, shape)
        });
        same(&signed(device.values(found.view())), &signed(expected), format!("NVFP4, matrix {i}"));
    }

    let sides: Vec<[Tensor<D>; 2]> =
        matrices.iter().map(|m| [&m.mxfp8.0, &m.mxfp8.1].map(|data| bytes(data, m.dims[0]))).collect();
    let mut found = outputs();
    let calls = sides.iter().zip(&mut found).map(|([codes, scales], out)| {
        let (codes, scales) = (codes.view(), scales.view());
        DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: out.view_mut() }
    });
    device.multi_dequantize_mxfp8(calls.collect()).unwrap();
    for (i, (m, found)) in matrices.iter().zip(&found).enumerate() {
        let (codes, scales) = &m.mxfp8;
        let width = m.dims[1].div_ceil(32);
        let value = |(k, code): (usize, &u8)| {
            E4M3[usize::from(*code)] * e8m0(scales[k / m.dims[1] * width + k % m.dims[1] / 32])
        };
        let expected = narrow(m, codes.iter().enumerate().map(value).collect());
        same(&signed(device.values(found.view())), &signed(expected), format!("MXFP8, matrix {i}"));
    }
}

/// Blocks of 16x16 hold the same values in both directions.
fn tiles_are_their_transpose<D: Target>(device: &D) {
    for dims in [[48, 64], [22, 36]] {
        let x = normal(dims, 3, DType::F32);
        let matrix = Matrix::new(x.view()).unwrap();
        let format = Nvfp4::TE.tiled();
        let rows = quantize(device, &format, matrix, Direction::Rows);
        let columns = quantize(device, &format, matrix, Direction::Columns);
        let rows = dequantize(device, &format, &rows, dims);
        let columns = dequantize(device, &format, &columns, [dims[1], dims[0]]);
        for (i, value) in rows.iter().enumerate() {
            let (row, column) = (i / dims[1], i % dims[1]);
            assert_eq!(value.to_bits(), columns[column * dims[0] + row].to_bits());
        }
    }
}

fn error(values: &[f64], x: &[f64]) -> f64 {
    values.iter().zip(x).map(|(v, x)| (v - x).powi(2)).sum::<f64>().sqrt()
}

/// Rounding errors of 50 stochastic quantizations average out, in both directions, with and without a transform.
///
/// Over values spread evenly in their steps, RN's error is √(1/12) of a step in the mean square, one stochastic
/// rounding's √(1/6), the mean of 50's √(1/300), and 8 random bits leave a bias of 1/512 on average: a ratio of 0.2,
/// with 0.1 for what is not spread evenly. Random bits that repeated over the 50 would leave it at √2.
fn mean_of_stochastic_roundings<D: Target>(device: &D) {
    let dims = [64, 96];
    let x = normal(dims, 4, DType::BF16);
    let matrix = Matrix::new(x.view()).unwrap();
    for direction in [Direction::Rows, Direction::Columns] {
        for format in [Nvfp4::TE, Nvfp4::TE.hadamard(Hadamard::TE)] {
            let lines = match direction {
                Direction::Rows => dims,
                Direction::Columns => [dims[1], dims[0]],
            };
            // What is quantized: the matrix, its transpose, or the transpose transformed.
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
                let side = quantize(device, format, matrix, direction);
                dequantize(device, format, &side, lines).into_iter().map(f64::from).collect()
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
fn stochastic_rounding_is_seeded<D: Target>(device: &D) {
    let x = normal([32, 32], 5, DType::F32);
    let matrix = Matrix::new(x.view()).unwrap();
    let codes = |random| quantize(device, &Nvfp4::TE.stochastic(random), matrix, Direction::Rows).codes;
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
    assert_ne!(
        quantize(device, &format, matrix, Direction::Rows),
        quantize(device, &format, matrix, Direction::Columns)
    );
}

/// Values that the format holds come back exactly, in every output type that holds them.
fn exact_values_survive<D: Target>(device: &D) {
    // An amax of 2688 makes the second-level factor 1; every block has its 6·448.
    let values: Vec<f32> = (0..64).map(|i| E2M1[i * 5 % 16] * if i % 16 == 0 { 0.0 } else { 448.0 }).collect();
    let values: Vec<f32> = values.iter().enumerate().map(|(i, v)| if i % 16 == 0 { 2688.0 } else { *v }).collect();
    for format in [Nvfp4::TE, Nvfp4::MODELOPT, Nvfp4::TE.row_scaled()] {
        let x = there(device, tensor(&values, DType::F32, &[2, 32]).view());
        let mut made = Nvfp4Tensors::empty(device, &format, [2, 32], Direction::Rows).unwrap();
        let matrix = Matrix::new(x.view()).unwrap();
        let call = Quantize { format: &format, matrix, rows: Some(made.view_mut()), columns: None };
        device.quantize(call).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut out = Tensor::empty(device, dtype, &[2, 32]).unwrap();
            device.dequantize(made.dequantize(&format, out.view_mut())).unwrap();
            let expected: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
            assert_eq!(device.values(out.view()), expected, "{format:?} {dtype}");
        }
    }
}

/// MXFP8 there and back: within half a step of E4M3 of every value, a step being 2⁻³ of its power of two (or of
/// 2⁻⁶ of the block's scale), and equal for values that it holds. Scales rounded up saturate nothing.
fn mxfp8_round_trip<D: Target>(device: &D) {
    let dims = [70, 90];
    let x = normal(dims, 6, DType::F32);
    for blocks in [Blocks::Line, Blocks::Tile] {
        for direction in [Direction::Rows, Direction::Columns] {
            let format = Mxfp8 { scale: MxScale::Ceil, blocks };
            let (codes, scales) = quantize_mxfp8(device, format, Matrix::new(x.view()).unwrap(), direction);
            let scale_dims = Mxfp8::scale_dims(dims, direction);
            let codes = there(device, Tensor::<Cpu>::from_vec(codes, &dims).unwrap().view());
            let own = there(device, Tensor::<Cpu>::from_vec(scales.clone(), &scale_dims).unwrap().view());
            let mut out = Tensor::empty(device, DType::F32, &dims).unwrap();
            let call = DequantizeMxfp8 { direction, codes: codes.view(), scales: own.view(), out: out.view_mut() };
            device.dequantize_mxfp8(call).unwrap();
            let place = |i: usize| match direction {
                Direction::Rows => i / dims[1] * scale_dims[1] + i % dims[1] / 32,
                Direction::Columns => i / dims[1] / 32 * scale_dims[1] + i % dims[1],
            };
            for (i, (x, y)) in x.to_f64().into_iter().zip(device.values(out.view())).enumerate() {
                let least = 2f64.powi(-6) * f64::from(e8m0(scales[place(i)]));
                let half_step = x.abs().max(least).log2().floor().exp2() / 16.0;
                assert!((x - y).abs() <= half_step, "{x} {y}");
            }
        }
    }
}

/// Codes that were cropped and codes of whole blocks de-quantize alike.
fn cropped_or_whole_blocks<D: Target>(device: &D) {
    let x = normal([3, 24], 7, DType::F32);
    let cropped = quantize(device, &Nvfp4::TE, Matrix::new(x.view()).unwrap(), Direction::Rows);
    assert_eq!((cropped.codes.len(), cropped.scales.len()), (3 * 12, 3 * 2));
    let mut whole = cropped.clone();
    whole.codes = cropped.codes.chunks(12).flat_map(|row| [row, &[0; 4]].concat()).collect();
    let back = dequantize(device, &Nvfp4::TE, &cropped, [3, 24]);
    assert_eq!(back, dequantize(device, &Nvfp4::TE, &whole, [3, 24]));
    let largest = x.to_f64().into_iter().fold(0.0f64, |m, v| m.max(v.abs())) as f32;
    // Half the widest step of a code times the largest block scale, and an E4M3 rounding of that scale.
    let bound = largest / 6.0 * (1.0 + 1.0 / 8.0);
    assert!(back.iter().zip(x.as_slice::<f32>().unwrap()).all(|(b, x)| (b - x).abs() <= bound));
}

fn empty_matrices<D: Target>(device: &D) {
    for dims in [[0, 32], [32, 0]] {
        let x = Tensor::<Cpu>::from_vec(Vec::<f32>::new(), &dims).unwrap();
        let matrix = Matrix::new(x.view()).unwrap();
        for direction in [Direction::Rows, Direction::Columns] {
            let found = quantize(device, &Nvfp4::TE, matrix, direction);
            assert_eq!(found, Side { codes: vec![], scales: vec![], amax: vec![bits(0.0)] });
            quantize_mxfp8(device, Mxfp8::TE, matrix, direction);
        }
        let own = there(device, x.view());
        assert_eq!(device.first_non_finite(Matrix::new(own.view()).unwrap()).unwrap(), None);
    }
}

fn no_direction_is_nothing_to_do<D: Target>(device: &D) {
    let own = there(device, normal([16, 32], 3, DType::BF16).view());
    let matrix = Matrix::new(own.view()).unwrap();
    for format in formats() {
        let call = Quantize { format: &format, matrix: matrix.borrow(), rows: None, columns: None };
        device.quantize_cast_only(call).unwrap();
    }
    let call = QuantizeMxfp8 { format: Mxfp8::TE, matrix: matrix.borrow(), rows: None, columns: None };
    device.quantize_mxfp8(call).unwrap();
    assert_eq!(device.first_non_finite(matrix).unwrap(), None);
}

fn finds_what_is_not_finite<D: Target>(device: &D) {
    let mut values = vec![1.0f32; 6 * 40];
    let find = |values: &[f32]| {
        let own = there(device, TensorRef::from_slice(values, &[6, 40]).unwrap());
        let matrix = Matrix::new(own.view()).unwrap();
        [matrix, matrix.transposed()].map(|m| device.first_non_finite(m).unwrap())
    };
    assert_eq!(find(&values), [None; 2]);
    values[3 * 40 + 7] = f32::NAN;
    values[4 * 40 + 2] = f32::NEG_INFINITY;
    assert_eq!(find(&values), [Some([3, 7]), Some([2, 4])]);
}
