//! A rank's training in candle.

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::{DeviceGroup, ExpertParallelMoE};
use moebius::cpu::Cpu;
use moebius::layer::{Layer, Mode};

use crate::Failure;
use crate::dense::{Loss, Model};
use crate::device::Seat;
use crate::lm::{Param, Settings, is_share};
use crate::ranks::{Check, Report, Values, Worker, group_config, moe_config, sum_over_ranks};

/// A rank: the model of plain operations, with the experts' layers in it.
pub struct Rank {
    settings: Settings,
    group: DeviceGroup,
    model: Model,
    layers: Vec<ExpertParallelMoE>,
    optimiser: AdamW,
}

impl Rank {
    /// Joins the group of all ranks, on the rank's thread.
    pub fn new(settings: &Settings, params: &[Param], (seat, rank): (Seat, usize)) -> Result<Self, Failure> {
        let group = seat.join(group_config(settings))?;
        let device = &group.device().clone();
        let model = Model::new(settings, params, (rank, settings.ranks), device)?;
        // The layers find their parameters under their own names, and share them with the model.
        let map = VarMap::new();
        map.data().lock().map_err(|e| e.to_string())?.extend(model.vars().clone());
        let vb = VarBuilder::from_varmap(&map, DType::F32, device);
        let mut layers = Vec::new();
        for number in 0..settings.layers {
            let layer = Layer::new(moe_config(settings), number as u32)?;
            layers.push(ExpertParallelMoE::new(layer, &group, vb.pp(format!("layers.{number}.moe")))?);
        }
        let vars = model.vars().values().cloned().collect();
        let optimiser = AdamW::new(vars, ParamsAdamW { lr: settings.learning_rate, ..ParamsAdamW::default() })?;
        Ok(Self { settings: settings.clone(), group, model, layers, optimiser })
    }

    fn replicated(&self) -> impl Iterator<Item = &Var> {
        self.model.vars().iter().filter(|(name, _)| !is_share(name)).map(|(_, var)| var)
    }

    /// Sums the gradients of parameters that all ranks hold, in one collective.
    fn reduce(&self, step: usize, grads: &mut GradStore) -> Result<(), Failure> {
        if self.group.ranks() == 1 {
            return Ok(());
        }
        let mut flat = Vec::new();
        for var in self.replicated() {
            match grads.get(var) {
                Some(grad) => flat.extend(grad.flatten_all()?.to_vec1::<f32>()?),
                None => flat.resize(flat.len() + var.elem_count(), 0.0),
            }
        }
        self.sum(step, &mut flat)?;
        let mut rest = &flat[..];
        for var in self.replicated() {
            let (own, others) = rest.split_at(var.elem_count());
            grads.insert(var, Tensor::from_slice(own, var.shape(), var.device())?);
            rest = others;
        }
        Ok(())
    }

    /// Sums values over the ranks, where the group works.
    fn sum(&self, step: usize, flat: &mut [f32]) -> Result<(), Failure> {
        if let Some(group) = self.group.on::<Cpu>() {
            return sum_over_ranks(group, step, flat);
        }
        #[cfg(feature = "nccl")]
        if let Some(group) = self.group.on::<moebius::cuda::Cuda>() {
            let mut group = group.lock();
            let (cuda, count) = (group.device().clone(), flat.len());
            let mut values = cuda.tensor(&moebius::Tensor::from_vec(flat.to_vec(), &[count])?)?;
            let sum = moebius::comm::ReduceOp::Sum;
            group.dispatcher().communicator().all_reduce(crate::ranks::gradients(step), sum, values.view_mut())?;
            flat.copy_from_slice(cuda.to_host(values.view())?.as_slice::<f32>()?);
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

impl Worker for Rank {
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let (mut load, mut ids) = (Vec::new(), Vec::new());
        let Loss { sum, aux } = self.model.loss(bytes, rows, |layer, x| {
            let out = self.layers[layer].forward_full(x, Mode::default())?;
            load.push(out.load.get()?.tokens_per_expert.clone());
            if check {
                ids.push(out.ids.to_device(&Device::Cpu)?.to_dtype(DType::U32)?.to_vec2::<u32>()?);
            }
            Ok((out.y, out.aux))
        })?;
        // The mean is over all ranks' tokens, and so is the balance loss: backward gives this rank's part of the
        // gradient of both.
        let mean = (sum / (self.settings.batch * self.settings.context) as f64)?;
        let mut grads = (&mean + aux)?.backward()?;
        self.reduce(step, &mut grads)?;
        let check = if check { Some(Check { params: self.snapshot(&grads)?, ids }) } else { None };
        self.optimiser.set_learning_rate(self.settings.learning_rate_at(step));
        self.optimiser.step(&grads)?;
        Ok(Report { loss: f64::from(mean.to_scalar::<f32>()?), load, check })
    }
}
