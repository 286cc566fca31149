//! The dense twin: the whole batch on one rank, every expert on every token, by plain candle operations, whatever
//! framework the ranks run in.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};

use moebius::TensorMut;
use moebius::cpu::Cpu;
use moebius::etp::Payload;
use moebius::quant::{
    Codec, DequantizeMxfp8, Direction, Matrix, Mxfp8, Mxfp8Tensors, Nvfp4, Nvfp4Tensors, Quantize, QuantizeMxfp8,
};

use crate::Failure;
use crate::dense::{DenseExperts, Loss, Model};
use crate::lm::{Param, Settings, TwinCheck, fingerprint, is_share};
use crate::ranks::{Check, Values};

/// The twin's model.
pub struct Twin {
    settings: Settings,
    model: Model,
    /// Tokens that are balanced among themselves.
    blocks: Vec<Vec<u32>>,
}

impl Twin {
    pub fn new(settings: &Settings, params: &[Param]) -> Result<Self, Failure> {
        let mut vars = BTreeMap::new();
        for param in params {
            let whole = Tensor::from_slice(&param.values, &param.dims[..], &Device::Cpu)?;
            vars.insert(param.name.clone(), Var::from_tensor(&whole)?);
        }
        let model = Model::new(settings, vars, &Device::Cpu)?;
        Ok(Self { settings: settings.clone(), model, blocks: settings.balanced() })
    }

    /// Computes a step from the ranks' weights, and compares the gradients.
    pub fn compare(&self, bytes: &[u8], ranks: &[Check]) -> Result<TwinCheck, Failure> {
        let mut hashes = Vec::new();
        for (name, var) in self.model.vars() {
            let weight = self.whole(ranks, (name, var), |v| &v.weight)?;
            hashes.push(fingerprint(weight.iter().map(|v| u64::from(v.to_bits()))));
            let weight = match is_share(name) {
                true => travelled(self.settings.payload, weight.into_owned(), var.dims())?,
                false => weight.into_owned(),
            };
            var.set(&Tensor::from_slice(&weight, var.shape(), &Device::Cpu)?)?;
        }
        let settings = &self.settings;
        let Loss { sum, aux } = self.model.loss(bytes, settings.batch, |layer, x| {
            let get = |part: &str| self.model.get(&format!("layers.{layer}.moe.{part}"));
            let experts = DenseExperts {
                router: get("router.weight")?,
                up: get("experts.up")?,
                down: get("experts.down")?,
                balance: settings.balance,
                blocks: &self.blocks,
            };
            let ids: Vec<Vec<u32>> = ranks.iter().flat_map(|r| r.ids[layer].iter().cloned()).collect();
            experts.forward(x, &ids)
        })?;
        let mean = (sum / (settings.batch * settings.context) as f64)?;
        let grads = (&mean + aux)?.backward()?;
        let (loss, weights) = (f64::from(mean.to_scalar::<f32>()?), fingerprint(hashes.into_iter()));
        let mut result = TwinCheck { loss, weights, error: 0.0, worst: String::new() };
        for (name, var) in self.model.vars() {
            let expected = grads.get(var).ok_or_else(|| format!("the twin has no gradient of {name}"))?;
            let expected = expected.flatten_all()?.to_vec1::<f32>()?;
            let error = relative_error(&self.whole(ranks, (name, var), |v| &v.gradient)?, &expected);
            // A NaN is the worst of all.
            if error > result.error || error.is_nan() {
                (result.error, result.worst) = (error, name.clone());
            }
        }
        Ok(result)
    }

    /// The ranks' shares of a parameter joined, or what all ranks must hold alike.
    fn whole<'a>(
        &self,
        ranks: &'a [Check],
        (name, var): (&str, &Var),
        pick: fn(&Values) -> &Vec<f32>,
    ) -> Result<Cow<'a, [f32]>, Failure> {
        let of = |check: &'a Check| {
            check.params.get(name).map(pick).ok_or_else(|| Failure::from(format!("a rank has no parameter {name}")))
        };
        let parts = ranks.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let same = |a: usize, b: usize| match bits(parts[a]) == bits(parts[b]) {
            true => Ok(()),
            false => Err(Failure::from(format!("{name} or its gradient differs between ranks {a} and {b}"))),
        };
        let mesh = self.settings.mesh;
        if !is_share(name) {
            (1..parts.len()).try_for_each(|rank| same(0, rank))?;
            return Ok(Cow::Borrowed(parts[0]));
        }
        let mut whole = Vec::with_capacity(var.elem_count());
        for p in 0..mesh.ep {
            for n in 0..mesh.shards() {
                (1..mesh.replicas()).try_for_each(|r| same(mesh.rank(p, n, 0), mesh.rank(p, n, r)))?;
                whole.extend_from_slice(parts[mesh.rank(p, n, 0)]);
            }
            // Padding is at the end of what the ranks hold.
            whole.truncate((p + 1) * var.elem_count() / mesh.ep);
        }
        Ok(Cow::Owned(whole))
    }
}

/// What the ranks' layers see of a stack of experts: each expert as it comes out of the form in which shards travel.
fn travelled(payload: Payload, mut values: Vec<f32>, dims: &[usize]) -> Result<Vec<f32>, Failure> {
    let (cpu, dims) = (Cpu::new(), [dims[1], dims[2]]);
    for expert in values.chunks_mut(dims[0] * dims[1]) {
        let own = moebius::Tensor::<Cpu>::from_vec(expert.to_vec(), &dims)?;
        let (matrix, out) = (Matrix::new(own.view())?, TensorMut::from_slice(expert, &dims)?);
        match payload {
            Payload::Nvfp4 => {
                let format = Nvfp4::TE;
                let mut form = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows)?;
                let call = Quantize { format: &format, matrix, rows: Some(form.view_mut()), columns: None };
                cpu.quantize(&(), call)?;
                cpu.dequantize(&(), form.dequantize(&format, out))?;
            }
            Payload::Mxfp8 => {
                let mut form = Mxfp8Tensors::empty(&cpu, dims, Direction::Rows)?;
                let rows = Some(form.view_mut());
                cpu.quantize_mxfp8(&(), QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows, columns: None })?;
                let (codes, scales) = (form.codes.view(), form.scales.view());
                cpu.dequantize_mxfp8(&(), DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out })?;
            }
            _ => {}
        }
    }
    Ok(values)
}

/// ‖a − b‖ / ‖b‖ in f64.
fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::NAN;
    }
    let (mut error, mut norm) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b))) {
        error += (a - b) * (a - b);
        norm += b * b;
    }
    (error / norm).sqrt()
}
