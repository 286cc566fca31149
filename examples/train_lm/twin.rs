//! The dense reference model: the whole batch on one rank, every expert on every token, by plain candle operations,
//! whatever framework the ranks run in.

use std::borrow::Cow;
use std::collections::BTreeMap;

use candle_core::{Device, Tensor, Var};

use moebius::DType;
use moebius::etp::Payload;
use moebius::quant::Nvfp4;

use crate::Failure;
use crate::dense::{DenseExperts, Loss, Model};
use crate::lm::{Param, Settings, TwinCheck, fingerprint, is_share};
use crate::quantized_payload::{TOKENS, through};
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
                true => traveled(self.settings.shard_payload, weight.into_owned(), var.dims())?,
                false => weight.into_owned(),
            };
            var.set(&Tensor::from_slice(&weight, var.shape(), &Device::Cpu)?)?;
        }
        let settings = &self.settings;
        let Loss { sum, aux } = self.model.loss(bytes, settings.batch, |layer, x| {
            let get = |part: &str| self.model.get(&format!("layers.{layer}.moe.{part}"));
            let experts = DenseExperts {
                read: self.read(layer, x, ranks)?,
                router: get("router.weight")?,
                up: get("experts.up")?,
                down: get("experts.down")?,
                balance: settings.balance,
                blocks: &self.blocks,
                near: settings.tolerances.logit,
            };
            let ids: Vec<Vec<u32>> = ranks.iter().flat_map(|r| r.ids[layer].iter().cloned()).collect();
            experts.forward(x, &ids)
        })?;
        let mean = (sum / (settings.batch * settings.context) as f64)?;
        let grads = (&mean + aux)?.backward()?;
        let (loss, weights) = (f64::from(mean.to_scalar::<f32>()?), fingerprint(hashes.into_iter()));
        let mut result = TwinCheck { loss, weights, error: 0.0, worst: String::new() };
        for (name, var) in self.model.vars() {
            let expected =
                grads.get(var).ok_or_else(|| format!("the dense reference model has no gradient of {name}"))?;
            let expected = expected.flatten_all()?.to_vec1::<f32>()?;
            let error = relative_error(&self.whole(ranks, (name, var), |v| &v.gradient)?, &expected);
            // A NaN is the worst of all.
            if error > result.error || error.is_nan() {
                (result.error, result.worst) = (error, name.clone());
            }
        }
        Ok(result)
    }

    /// Tokens `x` as a layer's experts read them where they travel quantized: the ranks' own, as these come back. The
    /// twin's differ from them by rounding, which a code may turn into a step of its grid; so they are compared as they
    /// are, and what is computed with is what the ranks have sent.
    fn read(&self, layer: usize, x: &Tensor, ranks: &[Check]) -> candle_core::Result<Option<Tensor>> {
        if self.settings.token_payload == Payload::Plain {
            return Ok(None);
        }
        let sent: Vec<f32> = ranks.iter().flat_map(|rank| rank.tokens[layer].iter().copied()).collect();
        let error = relative_error(&sent, &x.flatten_all()?.to_vec1::<f32>()?);
        if error.is_nan() || error > self.settings.tolerances.gradient {
            candle_core::bail!("layer {layer}: the ranks' tokens differ from the dense reference model's by {error:e}");
        }
        let (values, dims) = (sent.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), x.dims2()?);
        let back = through((self.settings.token_payload, TOKENS), (DType::F32, &values), dims.into());
        let back = back.map_err(candle_core::Error::wrap)?;
        let back: Vec<f32> = back.into_iter().map(|v| v as f32).collect();
        Ok(Some(Tensor::from_vec(back, dims, x.device())?))
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

/// A stack of experts as the ranks' layers see it: each expert as it comes out of the form in which shards travel.
fn traveled(payload: Payload, values: Vec<f32>, dims: &[usize]) -> Result<Vec<f32>, Failure> {
    let mut back = Vec::with_capacity(values.len());
    for expert in values.chunks(dims[1] * dims[2]) {
        let own: Vec<f64> = expert.iter().map(|v| f64::from(*v)).collect();
        let own = through((payload, Nvfp4::TE), (DType::F32, &own), [dims[1], dims[2]])?;
        back.extend(own.into_iter().map(|v| v as f32));
    }
    Ok(back)
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
