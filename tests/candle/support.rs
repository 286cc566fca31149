//! Devices, layers and tokens.

use std::ops::Range;

use candle_core::{DType, Device, Module, Shape, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use moebius::MoeConfig;
use moebius::candle::{DeviceGroup, ExpertParallelMoE};
use moebius::ep::GroupConfig;
use moebius::layer::{Layer, ParamKind};

use crate::trials::seed;

pub type AnyError = Box<dyn std::error::Error + Send + Sync>;
pub type AnyResult<T> = Result<T, AnyError>;

pub const H: usize = 16;
pub const EXPERTS: usize = 8;

pub fn config() -> MoeConfig {
    MoeConfig::new(H, 24, EXPERTS, 2)
}

pub fn group(device: &Device) -> AnyResult<DeviceGroup> {
    Ok(DeviceGroup::single(GroupConfig::new(EXPERTS, 1024), device)?)
}

/// A layer of random weights.
pub fn single(config: MoeConfig, dtype: DType, device: &Device) -> AnyResult<ExpertParallelMoE> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, dtype, device);
    let moe = ExpertParallelMoE::new(Layer::new(config, 0)?, group(device)?, vb)?;
    redraw(&vars, 30)?;
    Ok(moe)
}

/// Draws variables anew, as candle's generator of the CPU takes no seed: of variance 1 / (the last size).
pub fn redraw(vars: &VarMap, own: u64) -> AnyResult<()> {
    let vars = vars.data().lock().map_err(|e| e.to_string())?;
    let mut names: Vec<&String> = vars.keys().collect();
    names.sort();
    for (at, name) in names.into_iter().enumerate() {
        let var = &vars[name];
        let inputs = var.dims().last().copied().unwrap_or(1);
        let values = normal(own * 100 + at as u64, var.dims(), DType::F64, &Device::Cpu)?;
        let values = (values * (inputs as f64).powf(-0.5))?.to_dtype(var.dtype())?;
        var.set(&values.to_device(var.device())?)?;
    }
    Ok(())
}

/// Numbers of mean 0 and variance 1, drawn from the suite's seed.
pub fn normal(own: u64, dims: impl Into<Shape>, dtype: DType, device: &Device) -> AnyResult<Tensor> {
    let dims = dims.into();
    let values = seed::normal(own, dims.elem_count());
    Ok(Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

/// A layer of a rank with the same weights whatever the number of ranks: expert e's are filled from e.
pub fn seeded(group: impl Into<DeviceGroup>, config: MoeConfig) -> AnyResult<ExpertParallelMoE> {
    of_type(group, config, DType::F32)
}

/// [`seeded`] in another type.
pub fn of_type(group: impl Into<DeviceGroup>, config: MoeConfig, dtype: DType) -> AnyResult<ExpertParallelMoE> {
    let group = group.into();
    let experts = config.router.num_experts;
    let local = experts / group.ranks();
    let first = group.rank() * local;
    let layer = Layer::new(config, 3)?;
    let tensors = ParamKind::ALL
        .into_iter()
        .filter_map(|kind| {
            let dims = kind.dims(layer.config(), local)?;
            let count: usize = dims.iter().product();
            let start = if kind.is_replicated() { 0 } else { first * count / local };
            let values: Vec<f32> =
                (start..start + count).map(|i| ((i * 7919 + 13) % 101) as f32 / 250.0 - 0.2).collect();
            let of = |values| Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(group.device());
            Some(of(values).map(|t| (kind.name().to_string(), t)))
        })
        .collect::<candle_core::Result<std::collections::HashMap<_, _>>>()?;
    let tensors = tensors.into_iter().map(|(n, t)| Ok((n, Var::from_tensor(&t)?.into_inner())));
    let tensors = tensors.collect::<candle_core::Result<_>>()?;
    let vb = VarBuilder::from_tensors(tensors, dtype, group.device());
    Ok(ExpertParallelMoE::new(layer, group, vb)?)
}

/// The same tokens whatever their rank.
pub fn tokens(rows: Range<usize>, device: &Device) -> AnyResult<Var> {
    wide_tokens(rows, H, DType::F32, device)
}

/// Tokens of another size and type.
pub fn wide_tokens(rows: Range<usize>, hidden: usize, dtype: DType, device: &Device) -> AnyResult<Var> {
    let (start, count) = (rows.start * hidden, rows.len() * hidden);
    let values: Vec<f32> = (start..start + count).map(|i| ((i * 104729 + 7) % 211) as f32 / 100.0 - 1.05).collect();
    let t = Tensor::from_vec(values, (rows.len(), hidden), &Device::Cpu)?.to_dtype(dtype)?;
    Ok(Var::from_tensor(&t.to_device(device)?)?)
}

/// A tensor's values, row-major.
pub fn flat(t: &Tensor) -> AnyResult<Vec<f32>> {
    Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Results of one rank's part of a step: its y, d x, and (kind, gradient).
pub type Part = (Vec<f32>, Vec<f32>, Vec<(ParamKind, Vec<f32>)>);

/// Forward and backward of two calls of the layer in one graph, among ordinary operations.
pub fn step(moe: &ExpertParallelMoE, rows: Range<usize>) -> AnyResult<Part> {
    let x = tokens(rows, moe.group().device())?;
    // Ordinary operations before and after, and the layer twice in one graph. The layer's output stands on the
    // left of a sum: on the rank without tokens candle keeps the left operand only.
    let h = (x.as_tensor() * 0.5)?;
    let once = moe.forward(&h)?;
    let y = (moe.forward(&(&once + &h)?)? + once)?;
    let gradients = y.sqr()?.sum_all()?.backward()?;
    let of = |t: &Tensor| -> AnyResult<Vec<f32>> {
        match gradients.get(t) {
            Some(g) => flat(g),
            None => Ok(vec![0.0; t.elem_count()]),
        }
    };
    let params = ParamKind::ALL.into_iter().filter_map(|r| moe.param(r).map(|t| (r, t)));
    let params = params.map(|(r, t)| Ok((r, of(t)?))).collect::<AnyResult<_>>()?;
    Ok((flat(&y)?, of(&x)?, params))
}

/// ‖a − b‖ / ‖b‖; ‖a‖ where b is zero. NaN counts as infinite.
pub fn distance(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut found.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    let scale = norm(&mut expected.iter().map(|v| f64::from(*v)));
    let relative = if scale > 0.0 { error / scale } else { error };
    if relative.is_nan() { f64::INFINITY } else { relative }
}

/// Relative error at most 1e-5: products of up to 24 terms through five chained sums, each within a few ulp
/// (6e-8), with gradients summed over 13 tokens in another order.
pub fn close(name: &str, found: &[f32], expected: &[f32]) {
    let error = distance(found, expected);
    assert!(error <= 1e-5, "{name}: {error}");
}
