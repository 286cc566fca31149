//! Rows of fp8 blocks: blocks by hand, how far values move, many at once, and bytes that lie anywhere. (`random` has the
//! codes of random, extreme and strided matrices.)

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor, TensorMut, TensorRef};
use rand::Rng;
use rand_distr::StandardNormal;

use super::devices::{Target, cases};
use super::support::{CpuTensor, bits, one_nan, quantize_fp8_block, same, tensor, there};

cases!(blocks_by_hand, fp8_block_round_trip, many_fp8_blocks_at_once, bytes_of_any_address, no_fp8_blocks);

/// The least scale, 2⁻¹²⁶, and that of a block with an infinity, 2¹²⁷.
const SCALES: [f32; 2] = [f32::MIN_POSITIVE, f32::from_bits(254 << 23)];

fn power(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

fn normal(dims: [usize; 2], seed: u64, dtype: DType) -> CpuTensor {
    let mut rng = super::devices::seed::generator(seed);
    tensor(&(0..dims[0] * dims[1]).map(|_| rng.sample(StandardNormal)).collect::<Vec<f32>>(), dtype, &dims)
}

/// Values of a device's codes and scales, in `dtype`.
fn back<D: Target>(device: &D, codes: &[u8], scales: &[u32], dims: [usize; 2], dtype: DType) -> Vec<f64> {
    let bytes: Vec<u8> = scales.iter().flat_map(|b| b.to_ne_bytes()).collect();
    let scale_dims = fp8_block_scale_dims(dims);
    let [codes, scales] = [(codes, dims), (&bytes[..], scale_dims)]
        .map(|(data, dims)| there(device, TensorRef::<Cpu>::from_slice(data, &dims).unwrap()));
    let mut out = Tensor::empty(device, dtype, &dims).unwrap();
    let call = DequantizeFp8Block { codes: codes.view(), scales: scales.view(), out: out.view_mut() };
    device.dequantize_fp8_block(call).unwrap();
    device.values(out.view())
}

/// A block of 128 with ties, the least codes, a NaN and both zeros; one with infinities; one whose `amax / 448` would be
/// subnormal; one of the largest number. Behind each a short block.
fn blocks_by_hand<D: Target>(device: &D) {
    let nan = f32::NAN;
    // Beginnings of rows, their codes and the scale; the rest is zeros. Then the last three columns, their codes and
    // scale.
    type Block<'a> = (&'a [f32], &'a [u8], f32);
    let rows: [[Block<'_>; 2]; 4] = [
        [
            (
                &[-896.0, 2.0, 2.125, 2.375, power(-8), power(-9), 3.0 * power(-9), nan, -0.0],
                &[0xFE, 0x38, 0x38, 0x3A, 0x01, 0x00, 0x02, 0x7F, 0x80],
                2.0,
            ),
            (&[0.0, -0.0, 0.0], &[0x00, 0x80, 0x00], SCALES[0]),
        ],
        [
            (&[f32::INFINITY, -f32::INFINITY, 1.75 * power(127), 1.0], &[0x7E, 0xFE, 0x3E, 0x00], SCALES[1]),
            (&[nan, nan, nan], &[0x7F, 0x7F, 0x7F], SCALES[0]),
        ],
        [
            (&[power(-130), power(-149), -power(-135)], &[0x18, 0x00, 0x81], SCALES[0]),
            (&[448.0 * power(-126), power(-126), 0.0], &[0x7E, 0x38, 0x00], SCALES[0]),
        ],
        [(&[f32::MAX, -1.0], &[0x7E, 0x80], f32::MAX / 448.0), (&[448.0, 1.0, -448.0], &[0x7E, 0x38, 0xFE], 1.0)],
    ];
    let widths = [128, 3];
    let (mut values, mut codes, mut scales) = (vec![], vec![], vec![]);
    for ((first, first_codes, scale), width) in rows.iter().flat_map(|row| row.iter().zip(widths)) {
        values.extend(first.iter().copied().chain(vec![0.0; width - first.len()]));
        codes.extend(first_codes.iter().copied().chain(vec![0; width - first.len()]));
        scales.push(scale.to_bits());
    }
    let x = tensor(&values, DType::F32, &[4, 131]);
    let found = quantize_fp8_block(device, Matrix::new(x.view()).unwrap());
    same(&found.1, &scales, "scales");
    same(&found.0, &codes, "codes");
    let values = back(device, &codes, &scales, [4, 131], DType::F32);
    let expected = [
        (0, vec![-896.0, 2.0, 2.0, 2.5, power(-8), 0.0, power(-7), nan, -0.0, 0.0]),
        (131, vec![f32::INFINITY, -f32::INFINITY, 1.75 * power(127), 0.0]),
        (131 + 128, vec![nan; 3]),
        (2 * 131, vec![power(-130), 0.0, -power(-135)]),
        (3 * 131 + 128, vec![448.0, 1.0, -448.0]),
    ];
    for (at, expected) in expected {
        let found: Vec<u32> = values[at..at + expected.len()].iter().map(|v| bits(*v as f32)).collect();
        same(&found, &expected.into_iter().map(bits).collect::<Vec<_>>(), format!("values from {at} on"));
    }
}

/// There and back: within half a step of E4M3, which is a sixteenth of a value's power of two, or 2⁻¹⁰ of the scale for
/// codes below the least normal one, 2⁻⁶. Quotient and product are rounded to f32 besides: twice 2⁻²⁴ of the value.
fn fp8_block_round_trip<D: Target>(device: &D) {
    let dims = [70, 300];
    let x = normal(dims, 6, DType::F32);
    let (codes, scales) = quantize_fp8_block(device, Matrix::new(x.view()).unwrap());
    let values = back(device, &codes, &scales, dims, DType::F32);
    for (i, (x, y)) in x.to_f64().into_iter().zip(values).enumerate() {
        let scale = f64::from(f32::from_bits(scales[i / dims[1] * 3 + i % dims[1] / 128]));
        let half_step = (x / scale).abs().max(2f64.powi(-6)).log2().floor().exp2() * scale / 16.0;
        assert!((x - y).abs() <= half_step + x.abs() * 2f64.powi(-23), "{x} {y}, scale {scale}");
        assert!((x - y).abs() <= (x.abs() / 16.0).max(scale * 2f64.powi(-10)) * (1.0 + 1e-6), "{x} {y}");
    }
}

/// Many calls bring back what the formula makes of each, in every type of output, of rows of whole blocks, of whole words
/// with a short last block, and others; more than a device may take in one launch.
fn many_fp8_blocks_at_once<D: Target>(device: &D) {
    let width = |i: usize| match i % 4 {
        3 => 8 * i + 2,
        2 => 16 * (1 + i),
        _ => 128 * (1 + i * 5 % 18),
    };
    let dims = |i: usize| [1 + i * 7 % 40, width(i)];
    let dtype = |i: usize| [DType::BF16, DType::F32, DType::F16][i / 3 % 3];
    let mut cast = Vec::new();
    for i in 0..45 {
        let own = there(device, normal(dims(i), i as u64, DType::F32).view());
        let mut made = Fp8BlockTensors::empty(device, dims(i)).unwrap();
        let matrix = Matrix::new(own.view()).unwrap();
        device.quantize_fp8_block(QuantizeFp8Block { matrix, rows: made.view_mut() }).unwrap();
        cast.push(made);
    }
    let mut outs: Vec<_> = (0..45).map(|i| Tensor::empty(device, dtype(i), &dims(i)).unwrap()).collect();
    let calls = cast.iter().zip(&mut outs).map(|(made, out)| made.dequantize(out.view_mut()));
    device.multi_dequantize_fp8_block(calls.collect()).unwrap();
    for (i, (made, out)) in cast.iter().zip(&outs).enumerate() {
        let [codes, scales] = [&made.codes, &made.scales].map(|t| device.to_cpu(t));
        let (width, scales) = (dims(i)[1], scales.as_bytes().as_chunks::<4>().0.to_vec());
        let scale = |k: usize| f32::from_ne_bytes(scales[k / width * width.div_ceil(128) + k % width / 128]);
        let value = |(k, code): (usize, &u8)| match (E4M3[usize::from(*code)] * scale(k), dtype(i)) {
            (v, DType::BF16) => bf16::from_f32(v).to_f64(),
            (v, DType::F16) => f16::from_f32(v).to_f64(),
            (v, _) => f64::from(v),
        };
        // -0 is not +0.
        let signed = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect::<Vec<u64>>();
        let expected = codes.as_bytes().iter().enumerate().map(value).collect();
        same(&signed(device.values(out.view())), &signed(expected), format!("matrix {i}"));
    }
}

/// Codes and scales that begin at odd addresses, as those behind a shard's codes may.
fn bytes_of_any_address<D: Target>(device: &D) {
    let dims = [3, 256];
    let scale_dims = fp8_block_scale_dims(dims);
    let x = normal(dims, 8, DType::BF16);
    let expected = quantize_fp8_block(device, Matrix::new(x.view()).unwrap());
    let own = there(device, x.view());
    let sizes = [dims, scale_dims].map(|dims| dims[0] * dims[1]);
    // Codes and scales each by themselves: whole words of one do not make those of the other.
    for (at, scales_at) in [(1, 1), (2, 2), (4, 4), (0, 1), (8, 2), (0, 3), (1, 0), (4, 8)] {
        let [mut codes, mut scales] = [(sizes[0], at), (sizes[1], scales_at)]
            .map(|(len, at)| Tensor::empty(device, DType::U8, &[len + at]).unwrap());
        let [to, beside] = [(&mut codes, dims, at), (&mut scales, scale_dims, scales_at)].map(|(t, dims, at)| {
            let data = D::slice_mut(t.view_mut().into_data(), at..at + dims[0] * dims[1]);
            TensorMut::new(data, DType::U8, &dims).unwrap()
        });
        let rows = Fp8BlockMut { codes: to, scales: beside };
        device.quantize_fp8_block(QuantizeFp8Block { matrix: Matrix::new(own.view()).unwrap(), rows }).unwrap();
        let found: Vec<u8> = device.to_cpu(&codes).as_bytes()[at..].iter().map(|b| one_nan(*b)).collect();
        same(&found, &expected.0, format!("codes at {at}"));
        let bytes: Vec<u8> = expected.1.iter().flat_map(|b| b.to_ne_bytes()).collect();
        same(&device.to_cpu(&scales).as_bytes()[scales_at..], &bytes, format!("scales at {scales_at}"));
        let [from, beside] = [(&codes, dims, at), (&scales, scale_dims, scales_at)].map(|(t, dims, at)| {
            let data = D::slice(t.view().data(), at..at + dims[0] * dims[1]);
            TensorRef::new(data, DType::U8, &dims).unwrap()
        });
        let mut out = Tensor::empty(device, DType::F32, &dims).unwrap();
        device.dequantize_fp8_block(DequantizeFp8Block { codes: from, scales: beside, out: out.view_mut() }).unwrap();
        assert_eq!(
            device.values(out.view()),
            back(device, &expected.0, &expected.1, dims, DType::F32),
            "at {at}, {scales_at}"
        );
    }
}

fn no_fp8_blocks<D: Target>(device: &D) {
    for dims in [[0, 128], [128, 0]] {
        let x = Tensor::<Cpu>::from_vec(Vec::<f32>::new(), &dims).unwrap();
        assert_eq!(quantize_fp8_block(device, Matrix::new(x.view()).unwrap()), (vec![], vec![]));
    }
    assert_eq!(back(device, &[], &[], [0, 128], DType::F32), Vec::<f64>::new());
}
