//! A rank's training in candle.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::ExpertParallelMoE;
use moebius::etp::{Payload, Phase};
use moebius::layer::Layer;

use crate::Failure;
use crate::clip::Gradients;
use crate::dense::{Loss, Model};
use crate::lm::{Param, Settings, is_share};
use crate::mesh::Place;
use crate::ranks::{Check, Report, Values, Worker, group_config, moe_config};
use crate::sharded::{Experts, Parts, pass};
use crate::world::World;

/// A rank: the model of plain operations, with the experts' layers in it.
pub struct Rank {
    settings: Settings,
    world: World,
    model: Model,
    layers: Vec<ExpertParallelMoE>,
    sharded: Option<Box<dyn Experts>>,
    optimizer: AdamW,
}

impl Rank {
    /// Joins the other ranks, on the rank's thread.
    pub fn new(settings: &Settings, params: &[Param], (place, rank): (Place, usize)) -> Result<Self, Failure> {
        let mesh = settings.mesh;
        let group = place.experts.join(group_config(settings))?;
        let device = &group.device().clone();
        let (world, mut sharded) = match place.sharded {
            Some(comms) => {
                let (world, experts) = comms.join(mesh)?;
                (world, Some(experts))
            }
            None => (World::Group(group.clone()), None),
        };
        let mut vars = BTreeMap::new();
        for param in params {
            let (dims, values) = param.share(rank % mesh.ep, mesh.ep);
            let mut own = (dims, values.to_vec());
            if let Some(sharded) = &mut sharded {
                own = sharded.cut(param, own)?;
            }
            let tensor = Tensor::from_vec(own.1, own.0, device)?;
            vars.insert(param.name.clone(), Var::from_tensor(&tensor)?);
        }
        let model = Model::new(settings, vars, device)?;
        // The layers find their parameters under their own names, and share them with the model.
        let map = VarMap::new();
        map.data().lock().map_err(|e| e.to_string())?.extend(model.vars().clone());
        let vb = VarBuilder::from_varmap(&map, DType::F32, device);
        let mut layers = Vec::new();
        for number in 0..settings.layers {
            let layer = Layer::new(moe_config(settings), number as u32)?;
            let vb = vb.pp(format!("layers.{number}.moe"));
            layers.push(match &sharded {
                Some(sharded) => sharded.module(layer, Parts { group: &group, vb, payload: settings.shard_payload })?,
                None => ExpertParallelMoE::new(layer, &group, vb)?,
            });
        }
        if let Some(sharded) = &mut sharded {
            sharded.adopt(&layers);
        }
        let vars = model.vars().values().cloned().collect();
        let optimizer = AdamW::new(vars, ParamsAdamW { lr: settings.learning_rate, ..ParamsAdamW::default() })?;
        Ok(Self { settings: settings.clone(), world, model, layers, sharded, optimizer })
    }

    /// All ranks.
    pub fn world(&mut self) -> &mut World {
        &mut self.world
    }

    /// Forward and backward of a part of a step's sequences.
    fn microbatch(&self, bytes: &[u8], rows: usize, seen: &mut Seen) -> Result<GradStore, Failure> {
        let mut forward = || -> Result<Loss, Failure> {
            Ok(self.model.loss(bytes, rows, |layer, x| {
                let out = self.layers[layer].forward_full(x, None)?;
                for (sum, tokens) in seen.load[layer].iter_mut().zip(&out.load.get()?.tokens_per_expert) {
                    *sum += tokens;
                }
                if seen.ids.is_some() && self.settings.token_payload != Payload::Plain {
                    seen.tokens[layer].extend(x.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?);
                }
                if let Some(ids) = &mut seen.ids {
                    ids[layer].extend(out.ids.to_device(&Device::Cpu)?.to_vec2::<u32>()?);
                }
                Ok((out.y, out.aux))
            })?)
        };
        let Loss { sum, aux } = match &self.sharded {
            Some(sharded) => pass(&**sharded, Phase::Forward, forward)?,
            None => forward()?,
        };
        // The mean is over all ranks' tokens, and so is the balance loss: backward gives this rank's part of the
        // gradient of both.
        let mean = (sum / (self.settings.batch * self.settings.context) as f64)?;
        seen.loss += f64::from(mean.to_scalar::<f32>()?);
        let total = (mean + (aux / self.settings.microbatches as f64)?)?;
        match &self.sharded {
            Some(sharded) => pass(&**sharded, Phase::Backward, || Ok(total.backward()?)),
            None => Ok(total.backward()?),
        }
    }

    /// Adds a microbatch's gradients to those before it.
    fn add(&self, sum: Option<GradStore>, gradients: GradStore) -> Result<GradStore, Failure> {
        let Some(mut sum) = sum else { return Ok(gradients) };
        for var in self.model.vars().values() {
            if let (Some(a), Some(b)) = (sum.get(var), gradients.get(var)) {
                let both = (a + b)?;
                sum.insert(var, both);
            }
        }
        Ok(sum)
    }

    /// Sums the gradients over the ranks: those of parameters that all ranks hold in one collective.
    fn reduce(&mut self, step: usize, grads: &mut GradStore) -> Result<(), Failure> {
        if let Some(sharded) = &mut self.sharded {
            sharded.finish(grads)?;
        }
        if self.settings.mesh.ranks == 1 {
            return Ok(());
        }
        let replicated = || self.model.vars().iter().filter(|(name, _)| !is_share(name)).map(|(_, var)| var);
        let mut flat = Vec::new();
        for var in replicated() {
            match grads.get(var) {
                Some(grad) => flat.extend(grad.flatten_all()?.to_vec1::<f32>()?),
                None => flat.resize(flat.len() + var.elem_count(), 0.0),
            }
        }
        let flat = self.world.sum(step, flat)?;
        let mut rest = &flat[..];
        for var in replicated() {
            let (own, others) = rest.split_at(var.elem_count());
            grads.insert(var, Tensor::from_slice(own, var.shape(), var.device())?);
            rest = others;
        }
        Ok(())
    }

    /// Clips by the norm of all ranks' gradients, and returns it.
    fn clip(&mut self, step: usize, most: f64, store: &mut GradStore) -> Result<f64, Failure> {
        let (shares, replicated): (Vec<_>, Vec<_>) = self.model.vars().iter().partition(|(name, _)| is_share(name));
        let vars = |named: Vec<(_, _)>| named.into_iter().map(|(_, var)| var).collect();
        let mut gradients = Gradients { replicated: vars(replicated), shares: vars(shares), store };
        let norm = gradients.norm(&mut self.world, self.settings.mesh, step)?;
        gradients.clip(norm, most)?;
        Ok(norm)
    }

    fn snapshot(&self, grads: &GradStore) -> Result<BTreeMap<String, Values>, Failure> {
        let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
        let mut params = BTreeMap::new();
        for (name, var) in self.model.vars() {
            let grad = grads.get(var).ok_or_else(|| format!("no gradient of {name}"))?;
            params.insert(name.clone(), Values { weight: flat(var)?, gradient: flat(grad)? });
        }
        Ok(params)
    }
}

/// Figures of the microbatches of a step.
struct Seen {
    loss: f64,
    load: Vec<Vec<usize>>,
    /// Choices by layer and token, where they are asked for.
    ids: Option<Vec<Vec<Vec<u32>>>>,
    /// Tokens by layer, where these are asked for and travel quantized.
    tokens: Vec<Vec<f32>>,
}

impl Worker for Rank {
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let settings = self.settings.clone();
        let length = settings.context + 1;
        let ids = check.then(|| vec![Vec::new(); settings.layers]);
        let (load, tokens) = (vec![vec![0; settings.experts]; settings.layers], vec![Vec::new(); settings.layers]);
        let mut seen = Seen { loss: 0.0, load, ids, tokens };
        let mut sum = None;
        for number in 0..settings.microbatches {
            let (first, rows) = settings.microbatch(rows, number);
            let gradients = self.microbatch(&bytes[first * length..(first + rows) * length], rows, &mut seen)?;
            sum = Some(self.add(sum, gradients)?);
        }
        let mut grads = sum.ok_or("a step without microbatches")?;
        self.reduce(step, &mut grads)?;
        let check = match seen.ids {
            Some(ids) => Some(Check { params: self.snapshot(&grads)?, ids, tokens: seen.tokens }),
            None => None,
        };
        let norm = settings.clip.map(|most| self.clip(step, most, &mut grads)).transpose()?;
        self.optimizer.set_learning_rate(settings.learning_rate_at(step));
        self.optimizer.step(&grads)?;
        let passes = (step + 1) * settings.microbatches;
        let cost = self.sharded.as_ref().map(|sharded| sharded.cost(passes));
        Ok(Report { loss: seen.loss, load: seen.load, norm, cost, check })
    }
}
