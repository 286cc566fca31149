//! Norms and softmax of rows: closed forms, differences, and candle's plain operations in f64 of the same inputs.

use candle_core::{D, DType, Device, Result, Tensor, Var};

use super::tests::{close, relative};
use super::*;
use crate::testing::{check_gradients, difference, random, values};

/// Types, and by how much of itself each rounds a number at most.
const TYPES: [(DType, f64); 3] =
    [(DType::F32, 1.0 / (1 << 24) as f64), (DType::F16, 1.0 / 2048.0), (DType::BF16, 1.0 / 256.0)];

/// Of f32's sums of up to some ten thousand terms below ten, and of exponentials of up to 18.
const SUMS: f64 = 4e-6;

/// A norm, and which weights it has: none, a weight, a weight and a bias.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub options: NormOptions,
    pub weights: usize,
}

/// Root mean square norms with weights w and 1 + w and without, layer norms with and without biases.
pub(super) fn kinds() -> [Kind; 5] {
    let rms = NormOptions::rms(1e-3);
    let layer = NormOptions { centered: true, ..rms };
    [
        Kind { options: rms, weights: 1 },
        Kind { options: NormOptions { weight_offset: 1.0, ..rms }, weights: 1 },
        Kind { options: rms, weights: 0 },
        Kind { options: layer, weights: 1 },
        Kind { options: layer, weights: 2 },
    ]
}

/// Rows that a warp has and that blocks have, whose sizes are whole accesses of a kernel and are not, one that is longer
/// than kernels keep, and so many that several blocks add up columns.
pub(super) const SHAPES: [&[usize]; 11] = [
    &[7, 12],
    &[2, 3, 33],
    &[300, 64],
    &[5, 128],
    &[2, 1024],
    &[3, 1032],
    &[3, 1027],
    &[4, 2, 2048],
    &[2, 4104],
    &[2, 4099],
    &[2, 12_104],
];

/// A norm of x, weight and bias, where they are there.
pub(super) fn of_kind(inputs: &[Tensor], kind: Kind) -> Result<Tensor> {
    let weights = inputs.get(1).map(|weight| NormWeights { weight, bias: inputs.get(2) });
    norm(&inputs[0], weights, kind.options)
}

/// Variables as what depends on them takes them.
fn tracked(vars: &[Var]) -> Vec<Tensor> {
    vars.iter().map(|var| var.as_tensor().clone()).collect()
}

/// The same by candle's operations.
fn plain(inputs: &[Var], Kind { options, weights }: Kind) -> Result<Tensor> {
    let x = inputs[0].as_tensor().clone();
    let x = if options.centered { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x };
    let mut y = x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + options.eps)?.sqrt()?)?;
    if weights > 0 {
        y = y.broadcast_mul(&(inputs[1].as_tensor() + options.weight_offset)?)?;
    }
    if weights > 1 {
        y = y.broadcast_add(&inputs[2])?;
    }
    Ok(y)
}

/// Rows that are not around zero, weight and bias, in f64.
pub(super) fn inputs(dims: &[usize], kind: Kind) -> Result<Vec<Tensor>> {
    let size = dims[dims.len() - 1];
    let mut all = vec![(random(1, dims) + 0.7)?];
    all.extend((0..kind.weights as u64).map(|number| random(2 + number, &[size])));
    Ok(all)
}

/// Inputs in `dtype` on `device`, and the same in f64 on the CPU.
fn variables(inputs: &[Tensor], dtype: DType, device: &Device) -> Result<[Vec<Var>; 2]> {
    let rounded: Vec<Tensor> = inputs.iter().map(|t| t.to_dtype(dtype)).collect::<Result<_>>()?;
    let own = rounded.iter().map(|t| Var::from_tensor(&t.to_device(device)?)).collect::<Result<_>>()?;
    Ok([own, rounded.iter().map(|t| Var::from_tensor(&t.to_dtype(DType::F64)?)).collect::<Result<_>>()?])
}

/// Results and gradients of Σ y ∘ g, g of the result's type, which each differ by their own tolerance at most.
fn compare(
    name: &str,
    [found, expected]: [&Tensor; 2],
    [own, exact]: &[Vec<Var>; 2],
    [forward, backward]: [f64; 2],
) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let error = relative(found, expected)?;
    assert!(error <= forward, "{name}: {error:e} over {forward:e}");
    let g = random(99, found.dims()).to_dtype(found.dtype())?;
    let exact_g = g.to_dtype(DType::F64)?;
    let found = (found * g.to_device(found.device())?)?.sum_all()?.backward()?;
    let expected = (expected * exact_g)?.sum_all()?.backward()?;
    for (number, (own, exact)) in own.iter().zip(exact).enumerate() {
        let missing = || candle_core::Error::msg(format!("{name}: no gradient of input {number}"));
        let (found, expected) = (found.get(own).ok_or_else(missing)?, expected.get(exact).ok_or_else(missing)?);
        assert_eq!((found.dims(), found.dtype()), (own.dims(), own.dtype()), "{name}: input {number}");
        let error = relative(found, expected)?;
        assert!(error <= backward, "{name}: gradient of input {number}: {error:e} over {backward:e}");
    }
    Ok(())
}

/// All norms in all types. Results are rounded twice at most, gradients once.
pub(super) fn check_norms(device: &Device) -> Result<()> {
    for kind in kinds() {
        for dims in SHAPES {
            for (dtype, eps) in TYPES {
                let vars = variables(&inputs(dims, kind)?, dtype, device)?;
                let both = [&of_kind(&tracked(&vars[0]), kind)?, &plain(&vars[1], kind)?];
                let name = format!("{kind:?} of {dims:?} in {dtype:?}");
                compare(&name, both, &vars, [2.0 * eps + SUMS, eps + SUMS])?;
            }
        }
    }
    Ok(())
}

/// Softmax of rows in all types, in which entries are −∞. Results are rounded once; gradients, which are made of these,
/// and of sums of them, three times.
pub(super) fn check_softmax(device: &Device) -> Result<()> {
    for dims in SHAPES {
        let size = dims[dims.len() - 1];
        let x = (random(1, dims) * 9.0)?;
        // Of three rows none, every second and every third entry.
        let is_masked = |i: usize| match i / size % 3 {
            0 => false,
            row => (i % size).is_multiple_of(row + 1),
        };
        let masked = values(&x).into_iter().enumerate().map(|(i, x)| if is_masked(i) { f64::NEG_INFINITY } else { x });
        let x = Tensor::from_vec(masked.collect::<Vec<_>>(), dims, &Device::Cpu)?;
        for (dtype, eps) in TYPES {
            let vars = variables(std::slice::from_ref(&x), dtype, device)?;
            let exact = vars[1][0].as_tensor();
            let exp = exact.broadcast_sub(&exact.detach().max_keepdim(D::Minus1)?)?.exp()?;
            let plain = exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?;
            let both = [&softmax(&vars[0][0])?, &plain];
            compare(&format!("{dims:?} in {dtype:?}"), both, &vars, [eps + SUMS, 3.0 * eps + SUMS])?;
        }
    }
    Ok(())
}

/// What is no number in a row reaches all of it, and no other row; what is −∞ has no probability.
pub(super) fn check_special_values(device: &Device) -> Result<()> {
    for (dtype, _) in TYPES {
        for size in [9, 64, 2048] {
            let mut rows = vec![0f32; 4 * size];
            rows[..size].fill(f32::NEG_INFINITY);
            (rows[size + 3], rows[2 * size + 7], rows[3 * size + 1]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
            let x = Tensor::from_vec(rows, (4, size), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?;
            let y = softmax(&x)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
            for (row, entries) in y[..3].iter().enumerate() {
                assert!(entries.iter().all(|p| p.is_nan()), "row {row} of {size} in {dtype:?}");
            }
            let zeros: Vec<usize> = (0..size).filter(|i| y[3][*i] == 0.0).collect();
            assert_eq!(zeros, [1], "{size} in {dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn norms_equal_plain_operations() -> Result<()> {
    check_norms(&Device::Cpu)
}

#[test]
fn softmax_equals_plain_operations() -> Result<()> {
    check_softmax(&Device::Cpu)
}

#[test]
fn rows_without_numbers() -> Result<()> {
    check_special_values(&Device::Cpu)
}

#[test]
fn gradients_of_norms_by_differences() {
    for kind in kinds() {
        let inputs = inputs(&[3, 6], kind).expect("inputs");
        check_gradients(&inputs, &|t| of_kind(t, kind).expect("a norm"));
    }
}

#[test]
fn gradients_of_softmax_by_differences() {
    let weights = random(2, &[3, 6]);
    check_gradients(&[random(1, &[3, 6])], &|t| (softmax(&t[0]).expect("rows") * &weights).expect("a product"));
}

/// In f64: sums of at most 12 terms below 10.
const F64: f64 = 1e-13;

/// Two numbers are their mean and their distance from it; a layer norm leaves the sign of that, and a root mean square
/// norm the sign of a constant. Weights of zero are ones where one is added.
#[test]
fn norms_of_rows_that_are_known() -> Result<()> {
    let two = Tensor::new(&[[2.0, 8.0], [7.0, -1.0]], &Device::Cpu)?;
    let (weight, bias) = (Tensor::new(&[3.0, 5.0], &Device::Cpu)?, Tensor::new(&[0.5, 0.25], &Device::Cpu)?);
    let layer = NormOptions { centered: true, ..NormOptions::rms(0.0) };
    let y = norm(&two, Some(NormWeights { weight: &weight, bias: Some(&bias) }), layer)?;
    close(&y, &Tensor::new(&[[-2.5, 5.25], [3.5, -4.75]], &Device::Cpu)?, F64, "layer norm")?;
    let constant = Tensor::new(&[[4.0, 4.0], [-0.3, -0.3]], &Device::Cpu)?;
    let ones = Tensor::new(&[[1.0, 1.0], [-1.0, -1.0]], &Device::Cpu)?;
    let zeros = NormWeights { weight: &Tensor::zeros(2, DType::F64, &Device::Cpu)?, bias: None };
    let plus_one = NormOptions { weight_offset: 1.0, ..NormOptions::rms(0.0) };
    close(&norm(&constant, Some(zeros), plus_one)?, &ones, F64, "1 + w")?;
    close(&norm(&constant, None, NormOptions::rms(0.0))?, &ones, F64, "no weight")?;
    close(&norm(&two, Some(zeros), layer)?, &Tensor::zeros((2, 2), DType::F64, &Device::Cpu)?, F64, "w = 0")
}

/// A row that grows, and where the mean is subtracted one that is moved, has the same norm: its gradient lies across.
#[test]
fn gradients_lie_across_what_norms_take_away() -> Result<()> {
    let x = Var::from_tensor(&(random(1, &[5, 12]) + 0.3)?)?;
    for centered in [false, true] {
        let y = norm(&x, None, NormOptions { centered, ..NormOptions::rms(0.0) })?;
        let gradients = (y * random(2, &[5, 12]))?.sum_all()?.backward()?;
        let d_x = gradients.get(&x).ok_or_else(|| candle_core::Error::msg("no gradient"))?;
        let zeros = Tensor::zeros((5, 1), DType::F64, &Device::Cpu)?;
        let along = (d_x * x.as_tensor())?.sum_keepdim(D::Minus1)?.detach();
        assert!(difference(&along, &zeros) < F64, "along the row, centered: {centered}");
        let moved = d_x.sum_keepdim(D::Minus1)?;
        assert_eq!(difference(&moved, &zeros) < F64, centered, "along ones, centered: {centered}");
    }
    Ok(())
}

/// Equal entries share one; a distance of ln 3 is a factor of 3. All of a row's probabilities are one together, whatever
/// the row: the gradient of their sum is zero.
#[test]
fn softmax_of_rows_that_are_known() -> Result<()> {
    let x = Tensor::new(&[[5.0, 5.0 + 3f64.ln()], [-700.0, -700.0]], &Device::Cpu)?;
    close(&softmax(&x)?, &Tensor::new(&[[0.25, 0.75], [0.5, 0.5]], &Device::Cpu)?, F64, "rows of two")?;
    let x = Var::from_tensor(&random(1, &[4, 9]))?;
    let gradients = softmax(&x)?.sum_all()?.backward()?;
    let d_x = gradients.get(&x).ok_or_else(|| candle_core::Error::msg("no gradient"))?;
    assert!(difference(d_x, &d_x.zeros_like()?) < F64);
    Ok(())
}

/// A softmax of columns, of no rows, and of what has none.
#[test]
fn softmax_of_other_layouts() -> Result<()> {
    let x = random(1, &[4, 6]);
    let (columns, rows) = (softmax(&x.t()?)?, softmax(&x.t()?.contiguous()?)?);
    assert_eq!(values(&columns), values(&rows));
    let none = Var::from_tensor(&Tensor::zeros((0, 6), DType::F32, &Device::Cpu)?)?;
    assert_eq!(softmax(&none)?.dims(), [0, 6]);
    for wrong in [Tensor::new(1f32, &Device::Cpu)?, Tensor::new(&[1u32], &Device::Cpu)?] {
        let error = softmax(&wrong).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("softmax: expected rows of f64, f32, bf16 or f16"), "{error}");
    }
    Ok(())
}

/// On the CPU in bf16: norms of 1 + w and layer norms are those of f64 rounded once, norms with weights as they are also
/// before their product with these. f32's sums lie so near to f64's that they round apart in less than one of a hundred.
#[test]
fn norms_round_as_transformers_does() -> Result<()> {
    for kind in kinds() {
        let [own, exact] = variables(&inputs(&[64, 48], kind)?, DType::BF16, &Device::Cpu)?;
        let expected = match kind {
            Kind { options, weights: 1 } if options.is_plain_rms() => {
                let unit = plain(&exact, Kind { weights: 0, ..kind })?.to_dtype(DType::BF16)?.to_dtype(DType::F64)?;
                unit.broadcast_mul(&exact[1])?
            }
            _ => plain(&exact, kind)?,
        };
        let expected = values(&expected.to_dtype(DType::BF16)?.to_dtype(DType::F64)?);
        let found = values(&of_kind(&tracked(&own), kind)?.to_dtype(DType::F64)?);
        let apart = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
        assert!(apart * 100 < found.len(), "{kind:?}: {apart} of {}", found.len());
    }
    Ok(())
}
