//! Matrices in, plain vectors out.

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor, TensorRef};

pub type CpuTensor = Tensor<Cpu>;

/// One direction of a quantised matrix.
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

/// Quantises in one direction.
pub fn quantize(format: &Nvfp4, matrix: Matrix<'_, Cpu>, direction: Direction) -> Side {
    let cpu = Cpu::poisoning();
    let mut tensors = Nvfp4Tensors::empty(&cpu, format, matrix.dims(), direction).unwrap();
    let (rows, columns) = match direction {
        Direction::Rows => (Some(tensors.view_mut()), None),
        Direction::Columns => (None, Some(tensors.view_mut())),
    };
    cpu.quantize(&(), Quantize { format, matrix: matrix.borrow(), rows, columns }).unwrap();
    side(tensors)
}

/// Quantises to MXFP8 in one direction: codes and scales.
pub fn quantize_mxfp8(format: Mxfp8, matrix: Matrix<'_, Cpu>, direction: Direction) -> (Vec<u8>, Vec<u8>) {
    let cpu = Cpu::poisoning();
    let mut tensors = Mxfp8Tensors::empty(&cpu, matrix.dims(), direction).unwrap();
    let (rows, columns) = match direction {
        Direction::Rows => (Some(tensors.view_mut()), None),
        Direction::Columns => (None, Some(tensors.view_mut())),
    };
    cpu.quantize_mxfp8(&(), QuantizeMxfp8 { format, matrix: matrix.borrow(), rows, columns }).unwrap();
    let codes = tensors.codes.as_bytes().iter().map(|b| one_nan(*b)).collect();
    (codes, tensors.scales.as_bytes().to_vec())
}

/// De-quantises to F32 `[lines, len]`.
pub fn dequantize(format: &Nvfp4, side: &Side, [lines, len]: [usize; 2]) -> Vec<f32> {
    let cpu = Cpu::poisoning();
    let amax: Vec<f32> = side.amax.iter().map(|b| f32::from_bits(*b)).collect();
    let bytes = |data: &[u8]| Tensor::<Cpu>::from_vec(data.to_vec(), &[lines, data.len() / lines]).unwrap();
    let (codes, scales) = (bytes(&side.codes), bytes(&side.scales));
    let mut out = Tensor::empty(&cpu, DType::F32, &[lines, len]).unwrap();
    let amax = TensorRef::from_slice(&amax, &[amax.len()]).unwrap();
    let call = Dequantize { format, codes: codes.view(), scales: scales.view(), amax, out: out.view_mut() };
    cpu.dequantize(&(), call).unwrap();
    out.into_vec().unwrap()
}

/// Equal vectors, or a panic that says where they first differ.
pub fn same<T: PartialEq + std::fmt::Debug>(found: &[T], expected: &[T], name: impl std::fmt::Display) {
    assert_eq!(found.len(), expected.len(), "{name}");
    if let Some(i) = (0..found.len()).find(|i| found[*i] != expected[*i]) {
        panic!("{name}: element {i} is {:?}, expected {:?}", found[i], expected[i]);
    }
}
