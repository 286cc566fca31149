//! Quantization, and products with weights that stay quantized.

use moebius::config::Activation;
use moebius::cuda::Cuda;
use moebius::kernels::*;
use moebius::quant::*;
use moebius::weights::Weight;
use moebius::{DType, Result, Tensor};

use crate::Workload;
use crate::data::{Random, slots};
use crate::dequantized::random_codes;
use crate::report::{Report, SETS};

/// A matrix of 512 MiB in bf16, larger than any cache, as 64 experts' or as one.
const ROWS: usize = 1 << 17;
const COLUMNS: usize = 1 << 11;
const MATRICES: usize = 64;
/// Columns whose last block of 128 is short, as those of gpt-oss are.
const SHORT_BLOCKS: usize = 2880;

/// Bytes of a bf16 element, and of one in NVFP4, in MXFP4 and in an fp8 block of 128 x 128 with its share of a scale.
const WIDE: f64 = 2.0;
const NARROW: f64 = 9.0 / 16.0;
const MXFP4: f64 = 17.0 / 32.0;
const FP8_BLOCK: f64 = 1.0 + 4.0 / (128.0 * 128.0);

/// Amaxes and casts: the share of the copy rate is bytes read and written by it.
pub fn codec(cuda: &Cuda, report: &Report) -> Result<()> {
    let mut random = Random(3);
    let dims = [ROWS, COLUMNS];
    let sets = (0..SETS).map(|_| random.tensor(cuda, &dims, 1.0)).collect::<Result<Vec<_>>>()?;
    let elements = (ROWS * COLUMNS) as f64;
    let line = |phase: &str, ms: f64, bytes: f64| report.bytes("512MB", phase, ms, elements * bytes);

    let mut amaxes = (0..MATRICES).map(|_| Tensor::empty(cuda, DType::F32, &[1])).collect::<Result<Vec<_>>>()?;
    let format = Nvfp4::TE;
    let ms = report.time(|set| {
        let base = sets[set].view();
        let height = ROWS / MATRICES;
        let calls = amaxes.iter_mut().enumerate().map(|(i, amax)| {
            let layout = Layout { offset: i * height * COLUMNS, dims: [height, COLUMNS], strides: [COLUMNS, 1] };
            let matrix = Matrix::strided(base, layout)?;
            Ok(Amax { format: &format, matrix, rows: Some(amax.view_mut()), columns: None })
        });
        cuda.multi_compute_amax(calls.collect::<Result<_>>()?)
    })?;
    line("multi_amax", ms, WIDE);

    let mut back = Tensor::empty(cuda, DType::BF16, &dims)?;
    let random_bits = moebius::quant::Random { seed: 1, ..Default::default() };
    let formats = [
        ("te", Nvfp4::TE),
        ("te-stochastic", Nvfp4::TE.stochastic(random_bits)),
        ("modelopt", Nvfp4::MODELOPT),
        ("te-tiled", Nvfp4::TE.tiled()),
    ];
    for (name, format) in formats {
        let mut rows = Nvfp4Tensors::empty(cuda, &format, dims, Direction::Rows)?;
        let mut columns = Nvfp4Tensors::empty(cuda, &format, dims, Direction::Columns)?;
        let ms = report.time(|set| {
            let matrix = Matrix::new(sets[set].view())?;
            cuda.quantize(Quantize { format: &format, matrix, rows: Some(rows.view_mut()), columns: None })
        })?;
        line(&format!("quantize-{name}"), ms, 2.0 * WIDE + NARROW);
        let ms = report.time(|set| {
            let (matrix, rows) = (Matrix::new(sets[set].view())?, Some(rows.view_mut()));
            cuda.quantize_cast_only(Quantize { format: &format, matrix, rows, columns: None })
        })?;
        line(&format!("cast-{name}"), ms, WIDE + NARROW);
        if name == "modelopt" {
            continue;
        }
        let (own, across) = (Some(rows.amax.view_mut()), Some(columns.amax.view_mut()));
        let matrix = Matrix::new(sets[0].view())?;
        cuda.compute_amax(Amax { format: &format, matrix, rows: own, columns: across })?;
        let ms = report.time(|set| {
            let (rows, columns) = (Some(rows.view_mut()), Some(columns.view_mut()));
            cuda.quantize_cast_only(Quantize { format: &format, matrix: Matrix::new(sets[set].view())?, rows, columns })
        })?;
        line(&format!("cast-both-{name}"), ms, WIDE + 2.0 * NARROW);
        if name == "te" {
            let ms = report.time(|_| cuda.dequantize(rows.dequantize(&format, back.view_mut())))?;
            line("back-te", ms, WIDE + NARROW);
        }
    }
    let mut made = Mxfp8Tensors::empty(cuda, dims, Direction::Rows)?;
    let ms = report.time(|set| {
        let matrix = Matrix::new(sets[set].view())?;
        let call = QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows: Some(made.view_mut()), columns: None };
        cuda.quantize_mxfp8(call)
    })?;
    line("cast-mxfp8", ms, WIDE + 33.0 / 32.0);
    let ms = report.time(|_| {
        let (codes, scales) = (made.codes.view(), made.scales.view());
        cuda.dequantize_mxfp8(DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: back.view_mut() })
    })?;
    line("back-mxfp8", ms, WIDE + 33.0 / 32.0);
    fp8_blocks(cuda, report, &sets, COLUMNS)?;
    fp8_blocks(cuda, report, &sets, SHORT_BLOCKS)?;
    cuda.check()
}

/// Rows of so many columns, in the same memory, to fp8 blocks and back.
fn fp8_blocks(cuda: &Cuda, report: &Report, sets: &[Tensor<Cuda>], columns: usize) -> Result<()> {
    let dims = [ROWS * COLUMNS / columns, columns];
    let bytes = (dims[0] * (columns * 3 + columns.div_ceil(128) * 4)) as f64;
    let line = |phase: &str, ms: f64| {
        let width = if columns == COLUMNS { String::new() } else { format!("-{columns}") };
        report.bytes("512MB", &format!("{phase}-fp8-block{width}"), ms, bytes);
    };
    let mut made = Fp8BlockTensors::empty(cuda, dims)?;
    let layout = Layout { offset: 0, dims, strides: [columns, 1] };
    let ms = report.time(|set| {
        let matrix = Matrix::strided(sets[set].view(), layout)?;
        cuda.quantize_fp8_block(QuantizeFp8Block { matrix, rows: made.view_mut() })
    })?;
    line("cast", ms);
    let mut back = Tensor::empty(cuda, DType::BF16, &dims)?;
    let ms = report.time(|_| cuda.dequantize_fp8_block(made.dequantize(back.view_mut())))?;
    line("back", ms);
    Ok(())
}

/// A stack in NVFP4 by the codec, one factor for all.
pub fn quantized(cuda: &Cuda, dense: &Tensor<Cuda>) -> Result<Quantized<Cuda>> {
    let dims = dense.dims();
    let (stack, rows, columns) = (dims[0], dims[1], dims[2]);
    let matrix = Matrix::new(dense.view())?;
    let mut made = Nvfp4Tensors::empty(cuda, &Nvfp4::MODELOPT, matrix.dims(), Direction::Rows)?;
    let call = Quantize { format: &Nvfp4::MODELOPT, matrix, rows: Some(made.view_mut()), columns: None };
    cuda.quantize(call)?;
    let factor = Nvfp4::second_scale(cuda.read(made.amax.view())?[0] as f32);
    let factors = Tensor::from_vec(vec![factor; stack], &[stack, 1])?.to(cuda)?;
    Quantized::new(QuantizedTensors {
        format: WeightFormat::Nvfp4,
        dims: [stack, rows, columns],
        parts: 1,
        codes: made.codes.reshape(&[stack, rows, columns / 2])?,
        scales: made.scales.reshape(&[stack, rows, columns / 16])?,
        factors: Some(factors),
    })
}

fn weights(stacks: &[Quantized<Cuda>; 2]) -> [Weight<'_, Cuda>; 2] {
    stacks.each_ref().map(|stack| Weight::Quantized(stack.view()))
}

/// The two products of a forward with weights in bf16 and in each quantized format, and of NVFP4 and fp8 blocks by one kernel
/// for all numbers of rows. Sets of weights take turns where they would fit a cache.
pub fn products(cuda: &Cuda, report: &Report, w: &Workload) -> Result<()> {
    let mut random = Random(1);
    let n = w.slots();
    let up = random.tensor(cuda, &[w.experts, 2 * w.inner, w.hidden], (w.hidden as f64).powf(-0.5))?;
    let down = random.tensor(cuda, &[w.experts, w.hidden, w.inner], (w.inner as f64).powf(-0.5))?;
    let nvfp4 = [quantized(cuda, &up)?, quantized(cuda, &down)?];
    let [up_dims, down_dims] = [[w.experts, 2 * w.inner, w.hidden], [w.experts, w.hidden, w.inner]];
    let mut codes_of = |format: WeightFormat| -> Result<[Quantized<Cuda>; 2]> {
        Ok([random_codes(cuda, &mut random, format, up_dims)?, random_codes(cuda, &mut random, format, down_dims)?])
    };
    let (mxfp4, fp8) = (codes_of(WeightFormat::Mxfp4)?, codes_of(WeightFormat::Fp8Block)?);
    let ids = random.experts(w);
    let used = (0..w.experts as i32).filter(|e| ids.contains(e)).count();
    let (segments, map) = slots(cuda, w, &ids)?;
    let xs = (0..SETS).map(|_| random.tensor(cuda, &[w.tokens, w.hidden], 1.0)).collect::<Result<Vec<_>>>()?;
    let mut hidden = Tensor::empty(cuda, DType::BF16, &[n, w.inner])?;
    let mut out = Tensor::empty(cuda, DType::BF16, &[n, w.hidden])?;
    let bytes = (used * w.hidden * w.inner) as f64;
    let invariant = cuda.batch_invariant();

    for (suffix, cuda, [up, down], each) in [
        ("", cuda, [Weight::Dense(up.view()), Weight::Dense(down.view())], WIDE),
        ("-w4a16", cuda, weights(&nvfp4), NARROW),
        ("-w4a16-invariant", &invariant, weights(&nvfp4), NARROW),
        ("-w4a16-mxfp4", cuda, weights(&mxfp4), MXFP4),
        ("-fp8", cuda, weights(&fp8), FP8_BLOCK),
        ("-fp8-invariant", &invariant, weights(&fp8), FP8_BLOCK),
    ] {
        let mut first = |set: usize| {
            let call = Up {
                rows: RowSource::mapped(xs[set].view(), map.view()),
                segments: &segments,
                weight: up.borrow(),
                bias: None,
                slot_weights: None,
                activation: Activation::SiluGlu,
                pre: None,
                out: RowDest::direct(hidden.view_mut()),
                movement_sms: None,
            };
            cuda.up(call)
        };
        let ms = report.time(&mut first)?;
        report.bytes(w.name, &format!("up{suffix}"), ms, 2.0 * bytes * each);
        let mut second = |_| {
            let call = Down {
                rows: RowSource::direct(hidden.view()),
                segments: &segments,
                weight: down.borrow(),
                bias: None,
                slot_weights: None,
                out: RowDest::direct(out.view_mut()),
            };
            cuda.down(call)
        };
        let ms = report.time(&mut second)?;
        report.bytes(w.name, &format!("down{suffix}"), ms, bytes * each);
    }
    cuda.check()
}
