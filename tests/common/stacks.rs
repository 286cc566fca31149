//! Random quantized weights.

use moebius::Tensor;
use moebius::cpu::{Cpu, Element};
use moebius::quant::{Quantized, QuantizedTensors, WeightFormat};

/// Every format of a weight.
pub const FORMATS: [WeightFormat; 3] = [WeightFormat::Nvfp4, WeightFormat::Mxfp4, WeightFormat::Fp8Block];

/// Any codes, scales of some binades, small enough for f16, and factors, made of random bits.
pub fn random(next: &mut impl FnMut() -> u64, format: WeightFormat, dims: [usize; 3], parts: usize) -> Quantized<Cpu> {
    let codes = match format {
        WeightFormat::Fp8Block => |r: u64| if r as u8 & 0x7f == 0x7f { 0 } else { r as u8 },
        _ => |r: u64| r as u8,
    };
    let codes = tensor(next, &format.code_dims(dims), codes);
    let uniform = |r: u64| ((r >> 11) as f64 / (1u64 << 52) as f64 - 1.0) as f32;
    let (_, scale_dims) = format.scales(dims, parts);
    let scales = match format {
        // A subnormal now and then, and zero.
        WeightFormat::Nvfp4 => {
            tensor(next, &scale_dims, |r| if r % 16 == 0 { r as u8 >> 5 } else { 0x08 + (r % 0x28) as u8 })
        }
        WeightFormat::Mxfp4 => tensor(next, &scale_dims, |r| 119 + (r % 6) as u8),
        WeightFormat::Fp8Block => tensor(next, &scale_dims, |r| uniform(r) / 256.0),
    };
    let factors = (format == WeightFormat::Nvfp4).then(|| tensor(next, &[dims[0], parts], |r| uniform(r) + 1.5));
    Quantized::new(QuantizedTensors { format, dims, parts, codes, scales, factors }).expect("a stack")
}

fn tensor<T: Element>(next: &mut impl FnMut() -> u64, dims: &[usize], of: impl Fn(u64) -> T) -> Tensor<Cpu> {
    let values = (0..dims.iter().product()).map(|_| of(next())).collect();
    Tensor::from_vec(values, dims).expect("numbers of a stack")
}
