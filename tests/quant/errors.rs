//! Every wrong argument is a typed error that names it, and nothing is written.

use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Error, Result, Tensor};

use super::support::{CpuTensor, tensor};

fn zeros(dtype: DType, dims: &[usize]) -> CpuTensor {
    Tensor::zeros(&Cpu::new(), dtype, dims).unwrap()
}

fn message(result: Result<()>) -> String {
    match result {
        Err(error @ (Error::Invalid { .. } | Error::Shape { .. } | Error::DType { .. })) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Both sides of a matrix of `dtype`.
fn quantize_both(format: Nvfp4, dtype: DType, dims: [usize; 2]) -> Result<()> {
    let cpu = Cpu::new();
    let x = zeros(dtype, &dims);
    let mut rows = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows)?;
    let mut columns = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Columns)?;
    let (rows, columns) = (Some(rows.view_mut()), Some(columns.view_mut()));
    cpu.quantize(Quantize { format: &format, matrix: Matrix::new(x.view())?, rows, columns })
}

#[test]
fn formats_that_no_recipe_defines() {
    let (random, te, modelopt) = (Random::default(), Nvfp4::TE, Nvfp4::MODELOPT);
    for (format, found) in [
        (modelopt.tiled(), "16x16 blocks"),
        (modelopt.row_scaled(), "an amax a row"),
        (modelopt.stochastic(random), "stochastic rounding"),
        (modelopt.hadamard(Hadamard::TE), "a Hadamard transform"),
        (te.tiled().stochastic(random), "16x16 blocks and stochastic rounding"),
        (te.tiled().row_scaled(), "16x16 blocks and an amax a row"),
        (te.row_scaled().hadamard(Hadamard::TE), "an amax a row and a Hadamard transform"),
    ] {
        let message = message(quantize_both(format, DType::BF16, [32, 48]));
        assert!(message.starts_with("quantize: format: expected ") && message.ends_with(found), "{message}");
    }
    let unknown = Nvfp4::named("nvfp5").unwrap_err().to_string();
    assert_eq!(unknown, "Nvfp4::named: name: expected te or modelopt, found \"nvfp5\"");
    assert_eq!((Nvfp4::named("te").unwrap(), Nvfp4::named("modelopt").unwrap()), (te, modelopt));
}

#[test]
fn sizes_and_types() {
    let odd = message(quantize_both(Nvfp4::TE, DType::F32, [32, 47]));
    assert_eq!(odd, "Nvfp4::sizes: columns of the matrix: expected an even number, found 47");
    let odd = message(quantize_both(Nvfp4::TE, DType::F32, [31, 48]));
    assert_eq!(odd, "Nvfp4::sizes: rows of the matrix: expected an even number, found 31");
    quantize_both(Nvfp4::MODELOPT, DType::F32, [31, 47]).unwrap();
    let transform = Nvfp4::TE.hadamard(Hadamard::TE);
    let partial = message(quantize_both(transform, DType::BF16, [24, 48]));
    assert!(partial.contains("rows of the matrix: expected a multiple of 16"), "{partial}");
    let wide = message(quantize_both(transform, DType::F32, [32, 48]));
    assert!(wide.contains("matrix of a Hadamard transform: expected bf16, found f32"), "{wide}");
    let double = message(quantize_both(Nvfp4::TE, DType::F64, [32, 48]));
    assert_eq!(double, "Matrix::strided: tensor: expected f32, bf16 or f16, found f64");
    let flat = zeros(DType::F32, &[32]);
    assert!(message(Matrix::new(flat.view()).map(|_| ())).contains("at least two dimensions"));
}

/// Sizes that no memory holds are errors, also ones that no type holds.
#[test]
fn sizes_that_overflow() {
    let lines = |dims, direction| Nvfp4::MODELOPT.sizes(dims, direction).map(drop);
    assert!(message(lines([1, usize::MAX], Direction::Rows)).contains("columns of the matrix"));
    assert!(message(lines([usize::MAX, 1], Direction::Columns)).contains("rows of the matrix"));
    assert_eq!(swizzled_len(usize::MAX, 1), usize::MAX);
    assert_eq!(swizzled_len(129, 5), 2 * 2 * 512);
    let [_, scales, _] = WeightFormat::Fp8Block.scales([1, 129, 128], 0).1;
    assert_eq!(scales, 2);
}

#[test]
fn random_places() {
    let stochastic = |first_row| Nvfp4::TE.stochastic(Random { first_row, ..Random::default() });
    let between = message(quantize_both(stochastic(8), DType::F32, [32, 48]));
    assert!(between.contains("first_row: expected a multiple of 16"), "{between}");
    for far in [1 << 32, usize::MAX, usize::MAX - 15] {
        let far = message(quantize_both(stochastic(far), DType::F32, [32, 48]));
        assert!(far.contains("first_row: expected fewer than 2^32"), "{far}");
    }
    quantize_both(stochastic((1 << 32) - 32), DType::F32, [32, 48]).unwrap();
}

#[test]
fn layouts_that_leave_the_tensor() {
    let x = zeros(DType::F32, &[100]);
    let layout = |offset, dims, strides| Layout { offset, dims, strides };
    for wrong in [
        layout(0, [10, 11], [10, 1]),
        layout(1, [10, 10], [10, 1]),
        layout(0, [2, 2], [usize::MAX, 1]),
        layout(usize::MAX, [2, 2], [1, 1]),
        layout(0, [usize::MAX, 1], [0, 1]),
        layout(0, [usize::MAX, 0], [0, 1]),
        layout(0, [usize::MAX, usize::MAX], [0, 0]),
        // All within the tensor, and more than any memory holds.
        layout(0, [1, 1 << 55], [1, 0]),
        layout(99, [1 << 28, 1 << 27], [0, 0]),
        layout(0, [10, 11], [0, 1]),
    ] {
        assert!(message(Matrix::strided(x.view(), wrong).map(|_| ())).contains("layout"), "{wrong:?}");
    }
    for right in [
        layout(0, [10, 10], [1, 10]),
        layout(99, [1, 1], [7, 7]),
        layout(500, [0, 4], [9, 9]),
        layout(0, [10, 10], [0, 1]),
    ] {
        Matrix::strided(x.view(), right).unwrap();
    }
}

/// However many lines an empty matrix has, nobody goes through them, nor makes room for one however long.
#[test]
fn lines_of_nothing() {
    let (cpu, x, format) = (Cpu::new(), zeros(DType::F32, &[1]), Nvfp4::TE);
    for dims in [[1 << 56, 0], [0, 1 << 56]] {
        let matrix = || Matrix::strided(x.view(), Layout { offset: 0, dims, strides: [0, 0] }).unwrap();
        assert_eq!(cpu.first_non_finite(matrix()).unwrap(), None);
        let [mut rows, mut columns] = [1.0; 2].map(|value| tensor(&[value], DType::F32, &[1]));
        let (rows_to, columns_to) = (Some(rows.view_mut()), Some(columns.view_mut()));
        let call = Amax { format: &format, matrix: matrix(), rows: rows_to, columns: columns_to };
        cpu.compute_amax(call).unwrap();
        for amax in [rows, columns] {
            assert_eq!(amax.as_slice::<f32>().unwrap(), [0.0]);
        }
    }
    for dims in [[1 << 20, 0], [0, 1 << 56]] {
        let mut made = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows).unwrap();
        let matrix = Matrix::strided(x.view(), Layout { offset: 0, dims, strides: [0, 0] }).unwrap();
        cpu.quantize(Quantize { format: &format, matrix, rows: Some(made.view_mut()), columns: None }).unwrap();
        if dims[1] == 0 {
            continue;
        }
        let mut out = zeros(DType::F32, &dims);
        let (codes, scales, amax) = (made.codes.view(), made.scales.view(), made.amax.view());
        cpu.dequantize(Dequantize { format: &format, codes, scales, amax, out: out.view_mut() }).unwrap();
    }
}

/// One wrong tensor among those of a call, by name.
#[test]
fn tensors_of_a_call() {
    let cpu = Cpu::new();
    let x = tensor(&[1.0; 512], DType::F32, &[16, 32]);
    let format = Nvfp4::TE;
    let parts = [("codes", DType::U8, [16, 16]), ("scales", DType::U8, [16, 2])];
    for (wrong, change_type) in [(0, false), (1, false), (2, false), (0, true), (1, true), (2, true)] {
        let dims = |part: usize| match (part == wrong && !change_type, part) {
            (true, 2) => vec![2],
            (false, 2) => vec![1],
            (true, _) => vec![16, 9],
            (false, _) => parts[part].2.to_vec(),
        };
        let dtype = |part: usize| match (part == wrong && change_type, part) {
            (true, _) => DType::I32,
            (false, 2) => DType::F32,
            (false, _) => parts[part].1,
        };
        let [mut codes, mut scales, mut amax] = [0, 1, 2].map(|part| zeros(dtype(part), &dims(part)));
        let name = ["codes", "scales", "amax"][wrong];
        let side = Nvfp4Mut { codes: codes.view_mut(), scales: scales.view_mut(), amax: amax.view_mut() };
        let matrix = Matrix::new(x.view()).unwrap();
        let call = Quantize { format: &format, matrix, rows: Some(side), columns: None };
        let found = message(cpu.quantize_cast_only(call));
        assert!(found.starts_with(&format!("quantize_cast_only: tensor rows.{name}: expected ")), "{found}");
        assert!(codes.as_bytes().iter().chain(scales.as_bytes()).all(|b| *b == 0));

        let mut out = zeros(DType::F32, &[16, 32]);
        let (codes, scales, amax) = (codes.view(), scales.view(), amax.view());
        let found = message(cpu.dequantize(Dequantize { format: &format, codes, scales, amax, out: out.view_mut() }));
        assert!(found.starts_with(&format!("dequantize: tensor {name}: expected ")), "{found}");
    }
    let (codes, scales, amax) = (zeros(DType::U8, &[16, 16]), zeros(DType::U8, &[16, 2]), zeros(DType::F32, &[1]));
    let mut out = zeros(DType::F64, &[16, 32]);
    let (codes, scales, amax) = (codes.view(), scales.view(), amax.view());
    let found = message(cpu.dequantize(Dequantize { format: &format, codes, scales, amax, out: out.view_mut() }));
    assert_eq!(found, "dequantize: tensor out: expected f32, bf16 or f16, found f64");
}

/// Of many amaxes none is computed if one is refused.
#[test]
fn many_amaxes_all_or_none() {
    let cpu = Cpu::new();
    let x = tensor(&[1.0; 512], DType::F32, &[16, 32]);
    let (mut good, mut bad) = (zeros(DType::F32, &[1]), zeros(DType::F32, &[16]));
    let format = Nvfp4::TE;
    let matrix = || Matrix::new(x.view()).unwrap();
    let calls = vec![
        Amax { format: &format, matrix: matrix(), rows: Some(good.view_mut()), columns: None },
        Amax { format: &format, matrix: matrix(), rows: None, columns: Some(bad.view_mut()) },
    ];
    let found = message(cpu.multi_compute_amax(calls));
    assert_eq!(found, "multi_compute_amax: tensor columns.amax: expected shape [1], found [16]");
    assert_eq!(good.to_f64(), [0.0]);
}

/// Of many matrices none is brought back if one is refused.
#[test]
fn many_back_all_or_none() {
    let cpu = Cpu::new();
    let (format, [codes, scales]) = (Nvfp4::TE, [[16, 16], [16, 2]].map(|dims| zeros(DType::U8, &dims)));
    let (amaxes, mut outs) =
        ([1, 2].map(|n| zeros(DType::F32, &[n])), [0; 2].map(|_| tensor(&[1.0; 512], DType::F32, &[16, 32])));
    let calls = amaxes.iter().zip(&mut outs).map(|(amax, out)| {
        let (codes, scales, amax) = (codes.view(), scales.view(), amax.view());
        Dequantize { format: &format, codes, scales, amax, out: out.view_mut() }
    });
    let found = message(cpu.multi_dequantize(calls.collect()));
    assert_eq!(found, "multi_dequantize: tensor amax: expected shape [1], found [2]");
    let (codes, scales) = (zeros(DType::U8, &[16, 32]), [1, 2].map(|n| zeros(DType::U8, &[16, n])));
    let calls = scales.iter().zip(&mut outs).map(|(scales, out)| {
        let (codes, scales) = (codes.view(), scales.view());
        DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: out.view_mut() }
    });
    let found = message(cpu.multi_dequantize_mxfp8(calls.collect()));
    assert_eq!(found, "multi_dequantize_mxfp8: tensor scales: expected shape [16, 1], found [16, 2]");
    assert!(outs.iter().all(|out| out.to_f64().iter().all(|v| *v == 1.0)));
}

#[test]
fn fp8_blocks() {
    let cpu = Cpu::new();
    let x = tensor(&[1.0; 2 * 130], DType::F32, &[2, 130]);
    let quantize = |codes: (DType, [usize; 2]), scales: (DType, [usize; 2])| {
        let [mut codes, mut scales] = [codes, scales].map(|(dtype, dims)| zeros(dtype, &dims));
        let rows = Fp8BlockMut { codes: codes.view_mut(), scales: scales.view_mut() };
        cpu.quantize_fp8_block(QuantizeFp8Block { matrix: Matrix::new(x.view()).unwrap(), rows })
    };
    let (right, bytes) = ((DType::U8, [2, 130]), (DType::U8, [2, 8]));
    quantize(right, bytes).unwrap();
    let found = message(quantize((DType::U8, [2, 128]), bytes));
    assert_eq!(found, "quantize_fp8_block: tensor rows.codes: expected shape [2, 130], found [2, 128]");
    let found = message(quantize(right, (DType::U8, [2, 2])));
    assert_eq!(found, "quantize_fp8_block: tensor rows.scales: expected shape [2, 8], found [2, 2]");
    let found = message(quantize(right, (DType::F32, [2, 2])));
    assert_eq!(found, "quantize_fp8_block: tensor rows.scales: expected u8, found f32");

    // Of many none is brought back if one is refused.
    let made = Fp8BlockTensors::empty(&cpu, [2, 130]).unwrap();
    let [mut good, mut bad] = [DType::F32, DType::F64].map(|dtype| zeros(dtype, &[2, 130]));
    let calls = vec![made.dequantize(good.view_mut()), made.dequantize(bad.view_mut())];
    let found = message(cpu.multi_dequantize_fp8_block(calls));
    assert_eq!(found, "multi_dequantize_fp8_block: tensor out: expected f32, bf16 or f16, found f64");
    let mut wide = zeros(DType::F32, &[2, 300]);
    let found = message(cpu.dequantize_fp8_block(made.dequantize(wide.view_mut())));
    assert_eq!(found, "dequantize_fp8_block: tensor codes: expected shape [2, 300], found [2, 130]");
    assert!(good.to_f64().iter().all(|v| *v == 0.0));
    assert_eq!(fp8_block_scale_dims([1, usize::MAX]), [1, usize::MAX.div_ceil(128) * 4]);
}

#[test]
fn mxfp8_and_swizzle() {
    let cpu = Cpu::new();
    let x = tensor(&[1.0; 512], DType::F32, &[16, 32]);
    let mut made = Mxfp8Tensors::empty(&cpu, [16, 32], Direction::Columns).unwrap();
    let matrix = Matrix::new(x.view()).unwrap();
    // Column-wise tensors for rows.
    let call = QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows: Some(made.view_mut()), columns: None };
    let found = message(cpu.quantize_mxfp8(call));
    assert_eq!(found, "quantize_mxfp8: tensor rows.scales: expected shape [16, 1], found [1, 32]");
    let mut out = zeros(DType::F32, &[16, 32]);
    let (codes, scales) = (made.codes.view(), made.scales.view());
    let call = DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: out.view_mut() };
    let found = message(cpu.dequantize_mxfp8(call));
    assert_eq!(found, "dequantize_mxfp8: tensor scales: expected shape [16, 1], found [1, 32]");

    let (plain, mut tiled) = (zeros(DType::U8, &[16, 3]), zeros(DType::U8, &[256]));
    let found = message(cpu.swizzle(Swizzle { from: plain.view(), to: tiled.view_mut() }));
    assert_eq!(found, "swizzle: tensor to: expected shape [512], found [256]");
    let mut back = zeros(DType::U8, &[16, 3]);
    let found = message(cpu.unswizzle(Swizzle { from: tiled.view(), to: back.view_mut() }));
    assert_eq!(found, "unswizzle: tensor from: expected shape [512], found [256]");
}
