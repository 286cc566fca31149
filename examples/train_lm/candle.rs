//! A rank's training in candle.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::optim::Optimizer;
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::{AdamW, AdamWParam, ExpertParallelMoE, MainGradients};
use moebius::comm::Tag;
use moebius::cpu::Cpu;
use moebius::etp::{Payload, Phase};
use moebius::layer::Layer;

use crate::Failure;
use crate::dense::{Loss, Model};
use crate::lm::{Param, Scale, Settings, is_of_layer, is_share};
use crate::mesh::{AllRanks, Place};
use crate::ranks::{Check, Peer, Report, Values, Worker, group_config, moe_config, optimizer_options};
use crate::save::{self, SavedRank};
use crate::sharded::{Experts, Parts, pass};
use crate::state;
use crate::world::World;

/// A rank: the model of plain operations, with the experts' layers in it.
pub struct Rank {
    settings: Settings,
    world: World,
    model: Model,
    layers: Vec<ExpertParallelMoE>,
    sharded: Option<Box<dyn Experts>>,
    optimizer: AdamW,
    /// Sums over a step's microbatches, in f32.
    gradients: MainGradients,
    number: usize,
}

impl Rank {
    /// Joins the other ranks, on the rank's thread.
    pub fn new(settings: &Settings, params: &[Param], (place, rank): (Place, usize)) -> Result<Self, Failure> {
        let mesh = settings.mesh;
        let group = place.experts.join(group_config(settings))?;
        let measured = settings.measure_dispatcher.then(|| group.dispatcher_kind());
        let settings = &Settings { dispatcher: settings.dispatcher.or(measured), ..settings.clone() };
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
            let dtype = if is_of_layer(&param.name) { settings.layer_dtype } else { DType::F32 };
            let tensor = Tensor::from_vec(own.1, own.0, device)?.to_dtype(dtype)?;
            vars.insert(param.name.clone(), Var::from_tensor(&tensor)?);
        }
        let model = Model::new(settings, vars, device)?;
        // The layers find their parameters under their own names, and share them with the model.
        let map = VarMap::new();
        map.data().lock().map_err(|e| e.to_string())?.extend(model.vars().clone());
        let vb = VarBuilder::from_varmap(&map, settings.layer_dtype, device);
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
        let others = model.vars().iter().filter(|(name, _)| !is_of_layer(name));
        let mut params: Vec<_> = others.map(|(name, var)| AdamWParam::new(name.clone(), var)).collect();
        for (number, layer) in layers.iter().enumerate() {
            params.extend(layer.optimizer_params(&format!("layers.{number}.moe"))?);
        }
        let mut optimizer = optimizer(settings, place.optimizer, params)?;
        if let Some(dir) = &settings.resume {
            let taken = optimizer.load(state::optimizer(dir)?)?;
            state::check_step(dir, settings.range.start, taken + optimizer.stats()?.skipped)?;
        }
        let (settings, gradients) = (settings.clone(), MainGradients::in_f32());
        Ok(Self { settings, world, model, layers, sharded, optimizer, gradients, number: rank })
    }

    /// Forward and backward of a part of a step's sequences.
    fn microbatch(&mut self, bytes: &[u8], rows: usize, seen: &mut Seen) -> Result<(), Failure> {
        let mut forward = || -> Result<Loss, Failure> {
            Ok(self.model.loss(bytes, rows, |layer, x| {
                let out = self.layers[layer].forward_full(&x.to_dtype(self.settings.layer_dtype)?, None)?;
                for (sum, tokens) in seen.load[layer].iter_mut().zip(&out.load.get()?.tokens_per_expert) {
                    *sum += tokens;
                }
                if seen.ids.is_some() && self.settings.token_payload != Payload::Plain {
                    seen.tokens[layer].extend(x.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?);
                }
                if let Some(ids) = &mut seen.ids {
                    ids[layer].extend(out.ids.to_device(&Device::Cpu)?.to_vec2::<u32>()?);
                }
                Ok((out.y.to_dtype(DType::F32)?, out.aux))
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
        let total = self.optimizer.scale_loss(&total)?;
        let gradients = &mut self.gradients;
        let mut backward = || Ok(gradients.backward(&total)?);
        match &self.sharded {
            Some(sharded) => pass(&**sharded, Phase::Backward, backward),
            None => backward(),
        }
    }

    /// Sums the gradients over the ranks: those of parameters that all ranks hold in one collective.
    fn reduce(&mut self, step: usize) -> Result<(), Failure> {
        let grads = self.gradients.store_mut();
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

/// The optimizer of a rank's parameters.
fn optimizer(settings: &Settings, ranks: AllRanks, params: Vec<AdamWParam>) -> Result<AdamW, Failure> {
    let options = optimizer_options(settings);
    let group = options.group;
    let made = match ranks {
        AllRanks::Alone => AdamW::with_groups(params, options, &[group])?,
        AllRanks::Cpu(comm) => AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?,
        #[cfg(feature = "nccl")]
        AllRanks::Gpus(comm) => AdamW::over_ranks(&comm.cuda().clone(), Box::new(comm), params, options, &[group])?,
    };
    Ok(made.with_identity(state::identity(settings)))
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

impl Peer for Rank {
    fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.world.gather(tag, own)
    }
}

impl Worker for Rank {
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let settings = self.settings.clone();
        let length = settings.context + 1;
        let ids = check.then(|| vec![Vec::new(); settings.layers]);
        let (load, tokens) = (vec![vec![0; settings.experts]; settings.layers], vec![Vec::new(); settings.layers]);
        let mut seen = Seen { loss: 0.0, load, ids, tokens };
        for number in 0..settings.microbatches {
            let (first, rows) = settings.microbatch(rows, number);
            if let (Some(sharded), true) = (&self.sharded, number + 1 == settings.microbatches) {
                sharded.last_backward()?;
            }
            self.microbatch(&bytes[first * length..(first + rows) * length], rows, &mut seen)?;
        }
        self.reduce(step)?;
        let check = match seen.ids {
            Some(ids) => Some(Check { params: self.snapshot(self.gradients.store())?, ids, tokens: seen.tokens }),
            None => None,
        };
        self.optimizer.set_learning_rate(settings.learning_rate_at(step));
        self.optimizer.step(self.gradients.store())?;
        self.gradients.reset();
        let stats = self.optimizer.stats()?;
        let norm = settings.clip.map(|_| stats.norm);
        let scale = optimizer_options(&settings)
            .loss_scaling
            .is_some()
            .then_some(Scale { factor: stats.loss_scale, skipped: stats.skipped });
        let passes = (step + 1 - settings.range.start) * settings.microbatches;
        let cost = self.sharded.as_ref().map(|sharded| sharded.cost(passes));
        Ok(Report { loss: seen.loss, load: seen.load, norm, scale, cost, check })
    }

    fn save(&mut self, dir: &Path, steps: usize) -> Result<(), Failure> {
        let (settings, number) = (self.settings.clone(), self.number);
        save::save(self, (&settings, number), dir, steps)
    }
}

impl SavedRank for Rank {
    fn weights(&self) -> Result<BTreeMap<String, Vec<f32>>, Failure> {
        let flat = |var: &Var| var.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        self.model.vars().iter().map(|(name, var)| Ok((name.clone(), flat(var)?))).collect()
    }

    fn save_optimizer(&mut self, dir: &Path) -> Result<(), Failure> {
        Ok(self.optimizer.save(dir)?)
    }
}
