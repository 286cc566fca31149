//! Products that de-quantize their weights first, beside the same with bf16 weights in the same run: rows' gradients in
//! every format, and forward with fp8 blocks.

use moebius::cuda::Cuda;
use moebius::quant::{Quantized, QuantizedTensors, WeightFormat};
use moebius::weights::Weight;
use moebius::{Result, Tensor};

use crate::Workload;
use crate::data::Random;
use crate::gemms::{Gemms, experts};
use crate::quant::quantized;
use crate::report::Report;

/// Random codes of one format, and scales of one number.
pub fn random_codes(
    cuda: &Cuda,
    random: &mut Random,
    format: WeightFormat,
    dims: [usize; 3],
) -> Result<Quantized<Cuda>> {
    let parts = 1;
    let (_, scale_dims) = format.scales(dims, parts);
    let count = scale_dims.iter().product();
    // E4M3 has NaN in the place of its largest magnitudes; scales bring elements to some hundredths.
    let (codes, scales) = match format {
        WeightFormat::Fp8Block => {
            let codes = random.bytes(cuda, &format.code_dims(dims), |r| r as u8 & 0xbf)?;
            (codes, Tensor::from_vec(vec![1.0f32 / 64.0; count], &scale_dims)?)
        }
        _ => {
            let codes = random.bytes(cuda, &format.code_dims(dims), |r| r as u8)?;
            (codes, Tensor::from_vec(vec![121u8; count], &scale_dims)?)
        }
    };
    let scales = scales.to(cuda)?;
    Quantized::new(QuantizedTensors { format, dims, parts, codes, scales, factors: None })
}

pub fn run(cuda: &Cuda, report: &Report, w: &Workload) -> Result<()> {
    let mut numbers = Random(1);
    let mut gemms = Gemms::new(cuda, report, w, &mut numbers)?;
    let dense = experts(cuda, w, &mut numbers)?;
    let views = || dense.each_ref().map(|t| Weight::Dense(t.view()));
    let (up, down) = ([w.experts, 2 * w.inner, w.hidden], [w.experts, w.hidden, w.inner]);
    let mut stacks = |format: WeightFormat| -> Result<[Quantized<Cuda>; 2]> {
        match format {
            WeightFormat::Nvfp4 => Ok([quantized(cuda, &dense[0])?, quantized(cuda, &dense[1])?]),
            _ => Ok([random_codes(cuda, &mut numbers, format, up)?, random_codes(cuda, &mut numbers, format, down)?]),
        }
    };
    let base = gemms.backward(cuda, views(), "")?;
    report.ratio(w, "row-gradients", base, base);
    for (format, suffix) in
        [(WeightFormat::Nvfp4, "-nvfp4"), (WeightFormat::Mxfp4, "-mxfp4"), (WeightFormat::Fp8Block, "-fp8")]
    {
        let stacks = stacks(format)?;
        let codes = || stacks.each_ref().map(|stack| Weight::Quantized(stack.view()));
        let ms = gemms.backward(cuda, codes(), suffix)?;
        report.ratio(w, &format!("row-gradients{suffix}"), ms, base);
        if format == WeightFormat::Nvfp4 {
            for (mib, suffix) in [(64, "-nvfp4-64MiB"), (256, "-nvfp4-256MiB"), (4096, "-nvfp4-4GiB")] {
                let ms = gemms.backward(&cuda.limiting_weight_scratch(mib << 20), codes(), suffix)?;
                report.ratio(w, &format!("row-gradients{suffix}"), ms, base);
            }
        }
        if format == WeightFormat::Fp8Block {
            let base = gemms.forward(cuda, views(), "")?;
            report.ratio(w, "forward", base, base);
            let ms = gemms.forward(cuda, codes(), suffix)?;
            report.ratio(w, &format!("forward{suffix}"), ms, base);
        }
    }
    // How far the clock has moved meanwhile.
    let ms = gemms.backward(cuda, views(), "-again")?;
    report.ratio(w, "row-gradients-again", ms, base);
    cuda.check()
}
