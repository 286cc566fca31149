//! The dense twin: the whole batch on one rank, every expert on every token, by plain candle operations, whatever
//! framework the ranks run in.

use std::borrow::Cow;

use candle_core::{Device, Tensor};

use crate::Failure;
use crate::dense::{DenseExperts, Loss, Model};
use crate::lm::{Param, Settings, TwinCheck, is_share};
use crate::ranks::{Check, Values};

/// The twin's model.
pub struct Twin {
    settings: Settings,
    model: Model,
}

impl Twin {
    pub fn new(settings: &Settings, params: &[Param]) -> Result<Self, Failure> {
        Ok(Self { settings: settings.clone(), model: Model::new(settings, params, (0, 1), &Device::Cpu)? })
    }

    /// Computes a step from the ranks' weights, and compares the gradients.
    pub fn compare(&self, bytes: &[u8], ranks: &[Check]) -> Result<TwinCheck, Failure> {
        for (name, var) in self.model.vars() {
            let weight = whole(ranks, name, |v| &v.weight)?;
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
            };
            let ids: Vec<Vec<u32>> = ranks.iter().flat_map(|r| r.ids[layer].iter().cloned()).collect();
            experts.forward(x, &ids)
        })?;
        let mean = (sum / (settings.batch * settings.context) as f64)?;
        let grads = (&mean + aux)?.backward()?;
        let mut result = TwinCheck { loss: f64::from(mean.to_scalar::<f32>()?), error: 0.0, worst: String::new() };
        for (name, var) in self.model.vars() {
            let expected = grads.get(var).ok_or_else(|| format!("the twin has no gradient of {name}"))?;
            let expected = expected.flatten_all()?.to_vec1::<f32>()?;
            let error = relative_error(&whole(ranks, name, |v| &v.gradient)?, &expected);
            // A NaN is the worst of all.
            if error > result.error || error.is_nan() {
                (result.error, result.worst) = (error, name.clone());
            }
        }
        Ok(result)
    }
}

/// The ranks' shares of a parameter joined, or what all ranks must hold alike.
fn whole<'a>(ranks: &'a [Check], name: &str, pick: fn(&Values) -> &Vec<f32>) -> Result<Cow<'a, [f32]>, Failure> {
    let of = |check: &'a Check| {
        check.params.get(name).map(pick).ok_or_else(|| Failure::from(format!("a rank has no parameter {name}")))
    };
    let parts = ranks.iter().map(of).collect::<Result<Vec<_>, _>>()?;
    if is_share(name) {
        return Ok(parts.into_iter().flatten().copied().collect());
    }
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    if parts.iter().any(|p| bits(p) != bits(parts[0])) {
        return Err(format!("{name} or its gradient is not the same on all ranks").into());
    }
    Ok(Cow::Borrowed(parts[0]))
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
