//! Every field of `tests/golden-quant`, made with third-party references.

use std::collections::BTreeSet;

use half::bf16;
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor};
use safetensors::{Dtype, SafeTensors};

use super::devices::{Target, cases, golden_quant};
use super::support::{CpuTensor, bits, dequantize, one_nan, quantize, quantize_mxfp8, there};

cases!(te_nvfp4, modelopt_nvfp4, mxfp8, swizzle);

/// A file of vectors, and which of its fields have not been compared yet.
struct Vectors<'a> {
    tensors: SafeTensors<'a>,
    cases: serde_json::Value,
    left: BTreeSet<String>,
    compared: usize,
}

fn read(file: &str) -> Vec<u8> {
    std::fs::read(golden_quant().join(file)).unwrap()
}

impl<'a> Vectors<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let metadata = SafeTensors::read_metadata(bytes).unwrap().1.metadata().clone().unwrap();
        let info: serde_json::Value = serde_json::from_str(&metadata["info"]).unwrap();
        let is_input = |name: &str| name.ends_with(".input") || (name.ends_with(".scales") && !name.contains("weight"));
        let left = tensors.names().into_iter().filter(|n| !is_input(n)).map(str::to_string).collect();
        Self { tensors, cases: info["cases"].clone(), left, compared: 0 }
    }

    fn names(&self) -> Vec<String> {
        self.cases.as_array().unwrap().iter().map(|case| case.as_str().unwrap().to_string()).collect()
    }

    /// Bytes of a field that is there, which then counts as compared.
    fn take(&mut self, name: &str) -> Option<Vec<u8>> {
        let data = self.tensors.tensor(name).ok()?.data().to_vec();
        assert!(self.left.remove(name), "{name} twice");
        self.compared += 1;
        Some(data)
    }

    fn floats(&mut self, name: &str) -> Option<Vec<u32>> {
        let data = self.take(name)?;
        Some(data.as_chunks().0.iter().map(|b| bits(f32::from_le_bytes(*b))).collect())
    }

    fn e4m3(&mut self, name: &str) -> Option<Vec<u8>> {
        Some(self.take(name)?.into_iter().map(one_nan).collect())
    }

    fn input(&self, case: &str) -> CpuTensor {
        let Ok(view) = self.tensors.tensor(&format!("{case}.input")) else { return hashed(case) };
        let shape = view.shape();
        let data = view.data();
        match view.dtype() {
            Dtype::BF16 => {
                let values = data.as_chunks().0.iter().map(|b| bf16::from_bits(u16::from_le_bytes(*b)));
                Tensor::from_vec(values.collect(), shape).unwrap()
            }
            _ => {
                let values: Vec<f32> = data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                Tensor::from_vec(values, shape).unwrap()
            }
        }
    }

    fn finish(self, expected: usize) {
        assert_eq!(self.left, BTreeSet::new(), "not compared");
        assert_eq!(self.compared, expected);
    }
}

/// The input that is not stored but computed, `…_MxN`; the README of the folder has its formula.
fn hashed(case: &str) -> CpuTensor {
    let (_, dims) = case.rsplit_once('_').unwrap();
    let (rows, columns) = dims.split_once('x').unwrap();
    let (rows, columns): (usize, usize) = (rows.parse().unwrap(), columns.parse().unwrap());
    let value = |i: usize| {
        let mut h = (i as u32).wrapping_mul(2_654_435_761);
        h ^= h >> 15;
        h = h.wrapping_mul(2_246_822_519);
        h ^= h >> 13;
        let a = (h.to_le_bytes().iter().map(|b| i32::from(*b)).sum::<i32>() - 510) >> 1;
        bf16::from_f32(a as f32 * 2f32.powi((i / columns * 7 % 5) as i32 - 9))
    };
    Tensor::from_vec((0..rows * columns).map(value).collect(), &[rows, columns]).unwrap()
}

fn te_nvfp4<D: Target>(device: &D) {
    let file = read("te_nvfp4.safetensors");
    let mut vectors = Vectors::new(&file);
    let cases: Vec<(String, String)> = serde_json::from_value(vectors.cases.clone()).unwrap();
    for (case, variant) in &cases {
        let format = match variant.as_str() {
            "1d" => Nvfp4::TE,
            "2d" => Nvfp4::TE.tiled(),
            "rowscaled" => Nvfp4::TE.row_scaled(),
            "rht" => Nvfp4::TE.hadamard(Hadamard::TE),
            "rht_nosign" => Nvfp4::TE.hadamard(Hadamard::PLAIN),
            other => panic!("variant {other}"),
        };
        let input = vectors.input(case);
        let matrix = Matrix::new(input.view()).unwrap();
        for (prefix, direction) in [("row", Direction::Rows), ("col", Direction::Columns)] {
            let field = |name: &str| format!("{case}.{variant}.{prefix}_{name}");
            let Some(codes) = vectors.take(&field("codes")) else { continue };
            let found = quantize(device, &format, matrix, direction);
            assert_eq!(Some(&found.scales), vectors.e4m3(&field("scales")).as_ref(), "{case} {variant} {prefix}");
            let amax = vectors.floats(&format!("{case}.{variant}.amax_{prefix}"));
            assert_eq!(Some(&found.amax), amax.as_ref(), "{case} {variant} {prefix}");
            assert_eq!(found.codes, codes, "{case} {variant} {prefix}");
            if let Some(values) = vectors.floats(&format!("{case}.{variant}.dequant_{prefix}")) {
                let back = dequantize(device, &format, &found, matrix.dims());
                assert_eq!(back.into_iter().map(bits).collect::<Vec<_>>(), values, "{case} {variant}");
            }
        }
    }
    assert_eq!(cases.len(), 126);
    vectors.finish(780);
}

fn modelopt_nvfp4<D: Target>(device: &D) {
    let file = read("modelopt_nvfp4.safetensors");
    let mut vectors = Vectors::new(&file);
    for case in vectors.names() {
        let input = vectors.input(&case);
        let matrix = Matrix::new(input.view()).unwrap();
        let found = quantize(device, &Nvfp4::MODELOPT, matrix, Direction::Rows);
        let field = |name: &str| format!("{case}.{name}");
        assert_eq!(Some(&found.scales), vectors.e4m3(&field("weight_scale")).as_ref(), "{case}");
        let second = found.amax.iter().map(|amax| bits(Nvfp4::second_scale(f32::from_bits(*amax)))).collect();
        assert_eq!(Some(second), vectors.floats(&field("weight_scale_2")), "{case}");
        assert_eq!(Some(&found.codes), vectors.take(&field("weight")).as_ref(), "{case}");
        if let Some(values) = vectors.floats(&field("dequant")) {
            // The reference leaves the padding of a last, partial block in place.
            let [rows, columns] = matrix.dims();
            let back = dequantize(device, &Nvfp4::MODELOPT, &found, [rows, columns.next_multiple_of(NVFP4_BLOCK)]);
            assert_eq!(back.into_iter().map(bits).collect::<Vec<_>>(), values, "{case}");
        }
    }
    vectors.finish(155);
}

fn mxfp8<D: Target>(device: &D) {
    let file = read("mxfp8.safetensors");
    let mut vectors = Vectors::new(&file);
    for case in vectors.names() {
        let input = vectors.input(&case);
        let matrix = Matrix::new(input.view()).unwrap();
        for (variant, scale, blocks) in [
            ("te_1d", MxScale::Ceil, Blocks::Line),
            ("te_2d", MxScale::Ceil, Blocks::Tile),
            ("ao_floor", MxScale::Floor, Blocks::Line),
        ] {
            for (prefix, direction) in [("row", Direction::Rows), ("col", Direction::Columns)] {
                let field = |name: &str| format!("{case}.{variant}.{prefix}_{name}");
                let Some(scales) = vectors.take(&field("scales")) else { continue };
                let found = quantize_mxfp8(device, Mxfp8 { scale, blocks }, matrix, direction);
                assert_eq!(found.1, scales, "{case} {variant} {prefix}");
                // In 32x32 blocks one set of codes serves both directions; it is stored once.
                let codes = match vectors.e4m3(&field("codes")) {
                    Some(codes) => codes,
                    None => quantize_mxfp8(device, Mxfp8 { scale, blocks }, matrix, Direction::Rows).0,
                };
                assert_eq!(found.0, codes, "{case} {variant} {prefix}");
            }
        }
    }
    vectors.finish(279);
}

fn swizzle<D: Target>(device: &D) {
    let file = read("swizzle.safetensors");
    let mut vectors = Vectors::new(&file);
    for case in vectors.names() {
        let view = vectors.tensors.tensor(&format!("{case}.scales")).unwrap();
        let (rows, columns) = (view.shape()[0], view.shape()[1]);
        // MXFP8's column scales are swizzled as their transpose.
        let (scales, dims) = match case.starts_with("mxcol") {
            false => (view.data().to_vec(), [rows, columns]),
            true => {
                let transposed = (0..columns * rows).map(|i| view.data()[i % rows * columns + i / rows]);
                (transposed.collect(), [columns, rows])
            }
        };
        let plain = Tensor::<Cpu>::from_vec(scales, &dims).unwrap();
        let own = there(device, plain.view());
        let mut tiled = Tensor::empty(device, DType::U8, &[swizzled_len(dims[0], dims[1])]).unwrap();
        device.swizzle(Swizzle { from: own.view(), to: tiled.view_mut() }).unwrap();
        let expected = vectors.take(&format!("{case}.swizzled"));
        assert_eq!(Some(device.to_cpu(&tiled).as_bytes()), expected.as_deref(), "{case}");
        let mut back = Tensor::empty(device, DType::U8, &dims).unwrap();
        device.unswizzle(Swizzle { from: tiled.view(), to: back.view_mut() }).unwrap();
        assert_eq!(device.to_cpu(&back).as_bytes(), plain.as_bytes(), "{case}");
    }
    vectors.finish(14);
}
