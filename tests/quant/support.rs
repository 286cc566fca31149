//! Matrices in, plain vectors out.

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor, TensorRef};

use super::devices::Target;

pub type CpuTensor = Tensor<Cpu>;

/// One direction of a quantized matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    /// Bits; every NaN the same.
    pub amax: Vec<u32>,
}

/// Bits with one NaN, since which NaN arithmetic leaves is the machine's.
pub fn bits(v: f32) -> u32 {
    if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }
}

/// An E4M3 byte with one NaN.
pub fn one_nan(byte: u8) -> u8 {
    if byte & 0x7F == 0x7F { 0x7F } else { byte }
}

pub fn side(tensors: Nvfp4Tensors<Cpu>) -> Side {
    let amax = tensors.amax.as_slice::<f32>().unwrap().iter().map(|v| bits(*v)).collect();
    let scales = tensors.scales.as_bytes().iter().map(|b| one_nan(*b)).collect();
    Side { codes: tensors.codes.as_bytes().to_vec(), scales, amax }
}

/// A tensor of `dtype` from binary32 values.
pub fn tensor(values: &[f32], dtype: DType, dims: &[usize]) -> CpuTensor {
    match dtype {
        DType::BF16 => Tensor::from_vec(values.iter().map(|v| bf16::from_f32(*v)).collect(), dims),
        DType::F16 => Tensor::from_vec(values.iter().map(|v| f16::from_f32(*v)).collect(), dims),
        _ => Tensor::from_vec(values.to_vec(), dims),
    }
    .unwrap()
}

/// A view of the host as a tensor of the device.
pub fn there<D: Target>(device: &D, t: TensorRef<'_, Cpu>) -> Tensor<D> {
    let mut to = Tensor::empty(device, t.dtype(), t.dims()).unwrap();
    device.upload(t.data(), to.view_mut()).unwrap();
    to
}

/// A matrix of the host's elements on the device, laid out as it is.
pub fn matrix<'a, D: Target>(base: &'a Tensor<D>, from: Matrix<'_, Cpu>) -> Matrix<'a, D> {
    Matrix::strided(base.view(), from.layout()).unwrap()
}

/// One direction of a device's on the host.
pub fn here<D: Target>(device: &D, tensors: &Nvfp4Tensors<D>) -> Side {
    let [codes, scales, amax] = [&tensors.codes, &tensors.scales, &tensors.amax].map(|t| device.to_cpu(t));
    side(Nvfp4Tensors { codes, scales, amax })
}

/// Quantizes in one direction.
pub fn quantize<D: Target>(device: &D, format: &Nvfp4, from: Matrix<'_, Cpu>, direction: Direction) -> Side {
    let base = there(device, from.base());
    let matrix = matrix(&base, from);
    let mut tensors = Nvfp4Tensors::empty(device, format, matrix.dims(), direction).unwrap();
    let (rows, columns) = match direction {
        Direction::Rows => (Some(tensors.view_mut()), None),
        Direction::Columns => (None, Some(tensors.view_mut())),
    };
    device.quantize(Quantize { format, matrix, rows, columns }).unwrap();
    here(device, &tensors)
}

/// Quantizes to MXFP8 in one direction: codes and scales.
pub fn quantize_mxfp8<D: Target>(
    device: &D,
    format: Mxfp8,
    from: Matrix<'_, Cpu>,
    direction: Direction,
) -> (Vec<u8>, Vec<u8>) {
    let base = there(device, from.base());
    let matrix = matrix(&base, from);
    let mut tensors = Mxfp8Tensors::empty(device, matrix.dims(), direction).unwrap();
    let (rows, columns) = match direction {
        Direction::Rows => (Some(tensors.view_mut()), None),
        Direction::Columns => (None, Some(tensors.view_mut())),
    };
    device.quantize_mxfp8(QuantizeMxfp8 { format, matrix, rows, columns }).unwrap();
    let codes = device.to_cpu(&tensors.codes).as_bytes().iter().map(|b| one_nan(*b)).collect();
    (codes, device.to_cpu(&tensors.scales).as_bytes().to_vec())
}

/// Rows to fp8 blocks: codes, and the bits of scales.
pub fn quantize_fp8_block<D: Target>(device: &D, from: Matrix<'_, Cpu>) -> (Vec<u8>, Vec<u32>) {
    let base = there(device, from.base());
    let matrix = matrix(&base, from);
    let mut tensors = Fp8BlockTensors::empty(device, matrix.dims()).unwrap();
    device.quantize_fp8_block(QuantizeFp8Block { matrix, rows: tensors.view_mut() }).unwrap();
    let codes = device.to_cpu(&tensors.codes).as_bytes().iter().map(|b| one_nan(*b)).collect();
    let scales = device.to_cpu(&tensors.scales);
    let bits = |b: &[u8]| u32::from_ne_bytes(b.try_into().unwrap());
    (codes, scales.as_bytes().chunks(4).map(bits).collect())
}

/// De-quantizes to F32 `[lines, len]`.
pub fn dequantize<D: Target>(device: &D, format: &Nvfp4, side: &Side, [lines, len]: [usize; 2]) -> Vec<f32> {
    let amax: Vec<f32> = side.amax.iter().map(|b| f32::from_bits(*b)).collect();
    let bytes = |data: &[u8]| Tensor::<Cpu>::from_vec(data.to_vec(), &[lines, data.len() / lines]).unwrap();
    let (codes, scales) = (there(device, bytes(&side.codes).view()), there(device, bytes(&side.scales).view()));
    let amax = there(device, TensorRef::from_slice(&amax, &[amax.len()]).unwrap());
    let mut out = Tensor::empty(device, DType::F32, &[lines, len]).unwrap();
    let (codes, scales, amax) = (codes.view(), scales.view(), amax.view());
    device.dequantize(Dequantize { format, codes, scales, amax, out: out.view_mut() }).unwrap();
    device.to_cpu(&out).into_vec().unwrap()
}

/// Equal vectors, or a panic that says where they first differ.
pub fn same<T: PartialEq + std::fmt::Debug>(found: &[T], expected: &[T], name: impl std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{name}");
    if let Some(i) = (0..found.len()).find(|i| found[*i] != expected[*i]) {
        panic!("{name}: element {i} is {:?}, expected {:?}", found[i], expected[i]);
    }
}
