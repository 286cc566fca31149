//! A rank's training in burn, on its CPU back end or on its CUDA back end. Every module of a rank is made on
//! that rank's thread, so that ranks share no leaf, and a rank begins a backward only when all have left the last one:
//! more, burn's graph lock does not allow between threads.

pub mod communicators;
mod model;
mod params;
mod sharded;

use std::collections::BTreeMap;
use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use moebius::burn::{
    AdamW, AdamWParam, CoreDevice, DeviceGroup, GradientReducer, MoeBackend, NativeBackend, ReduceComms,
};
use moebius::comm::{Communicator, Op, Tag};
use moebius::ep::{Group, LibraryDispatchers};
use moebius::etp::{Payload, Phase};

use self::communicators::RankComms;
use self::model::{Loss, Model, dtype};
use self::params::{Fill, Snapshot};
use self::sharded::Sharded;
use crate::Failure;
use crate::corpus::Corpus;
use crate::device;
use crate::lm::{Param, Scale, Settings, Step};
use crate::rank_results;
use crate::ranks::{self, Check, Peer, Report, Worker, group_config, optimizer_options};
use crate::save::{self, SavedRank};
use crate::state;

/// The model of a back end, with gradients.
type Trained<Bk> = Model<Autodiff<Bk>>;

/// A rank, on a back end.
pub struct Rank<Bk: MoeBackend<Native = Bk> + NativeBackend> {
    settings: Settings,
    device: CoreDevice<Autodiff<Bk>>,
    /// All ranks.
    world: Box<dyn Communicator<CoreDevice<Autodiff<Bk>>>>,
    /// Taken while the optimizer has it.
    model: Option<Trained<Bk>>,
    sharded: Option<Sharded<Bk>>,
    /// Sums over a step's microbatches and the ranks, in f32.
    reducer: GradientReducer<Autodiff<Bk>>,
    optimizer: AdamW<Autodiff<Bk>>,
    number: usize,
    /// Backwards so far, for the tags of their beginnings.
    calls: u64,
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> Rank<Bk>
where
    CoreDevice<Autodiff<Bk>>: LibraryDispatchers,
{
    /// Joins the other ranks, on the rank's thread.
    pub fn new(
        settings: &Settings,
        params: &[Param],
        (comms, device): (RankComms<CoreDevice<Autodiff<Bk>>>, &Bk::Device),
        number: usize,
    ) -> Result<Self, Failure> {
        let RankComms { device: core, experts, world, optimizer, sums, sharded } = comms;
        let mesh = settings.mesh;
        let group: DeviceGroup = Group::new(core.clone(), experts, group_config(settings))?.into();
        let measured = settings.measure_dispatcher.then(|| group.dispatcher_kind());
        let settings = &Settings { dispatcher: settings.dispatcher.or(measured), ..settings.clone() };
        let mut fill = Fill::new(params, (number % mesh.ep, mesh.ep), dtype(settings.layer_dtype));
        let mut model = Trained::<Bk>::new(settings, &group, device)?.map(&mut fill);
        if !fill.missing.is_empty() {
            return Err(format!("no first values for {:?}", fill.missing).into());
        }
        let mut sharded = sharded.map(|comms| Sharded::<Bk>::new(mesh, &core, comms)).transpose()?;
        if let Some(sharded) = &mut sharded {
            model = sharded.shard(model, settings.shard_payload)?;
        }
        let comms = ReduceComms { group: sums, replicas: None };
        let mut reducer = GradientReducer::new(&core, comms)?.with_main_gradients_in_f32();
        let mut named = AdamWParam::of_module(&model);
        for layer in &model.layers {
            reducer = reducer.with_layer(&layer.moe);
            layer.moe.place_shards(&mut named)?;
        }
        let options = optimizer_options(settings);
        let groups = [options.group];
        let made = match optimizer {
            None => AdamW::with_groups(&core, &model, named, options, &groups)?,
            Some(comm) => AdamW::over_ranks(&core, comm, &model, named, options, &groups)?,
        };
        let mut optimizer = made.with_identity(state::identity(settings));
        if let Some(dir) = &settings.resume {
            model = optimizer.load(state::optimizer(dir)?, None, model)?;
            let stats = optimizer.stats()?;
            state::check_step(dir, settings.range.start, stats.steps + stats.skipped)?;
        }
        let (settings, model) = (settings.clone(), Some(model));
        Ok(Self { settings, device: core, world, model, sharded, reducer, optimizer, number, calls: 0 })
    }
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> Rank<Bk> {
    /// Forward and backward of a part of a step's sequences; the gradients of all of them behind the last.
    fn microbatch(
        &mut self,
        model: &Trained<Bk>,
        (bytes, rows, last): (&[u8], usize, bool),
        seen: &mut Seen<Bk>,
    ) -> Result<Option<GradientsParams>, Failure> {
        let settings = self.settings.clone();
        let forward = || model.loss(&settings, bytes, rows);
        let Loss { sum, aux, load, ids, tokens } = match &self.sharded {
            Some(sharded) => sharded.pass(Phase::Forward, model, forward)?,
            None => forward()?,
        };
        // The mean is over all ranks' tokens, and so is the balance loss: backward gives this rank's part of the
        // gradient of both.
        let mean = sum.div_scalar((settings.batch * settings.context) as f32);
        seen.loss.push(mean.clone().inner());
        seen.load.push(load);
        if let Some(check) = &mut seen.check {
            for (layer, (ids, tokens)) in ids.into_iter().zip(tokens).enumerate() {
                check.ids[layer].extend(rows_of(ids));
                if settings.token_payload != Payload::Plain {
                    check.tokens[layer].extend(tokens.inner().into_data().iter::<f32>());
                }
            }
        }
        let total = self.optimizer.scale_loss(mean + aux.div_scalar(settings.microbatches as f32))?;
        // No rank is in its last backward any more.
        self.calls += 1;
        self.gather(Tag { layer: 0, op: Op::User, sequence: self.calls }, &[])?;
        let reducer = &mut self.reducer;
        let backward = || match last {
            true => Ok(Some(reducer.backward_reduced(total, model)?)),
            false => Ok(reducer.backward(total, model).map(|()| None)?),
        };
        match &self.sharded {
            Some(sharded) => sharded.pass(Phase::Backward, model, backward),
            None => backward(),
        }
    }
}

/// Figures of the microbatches of a step.
struct Seen<Bk: Backend> {
    loss: Vec<Tensor<Bk, 1>>,
    /// By microbatch and layer.
    load: Vec<Vec<moebius::Lazy<moebius::metrics::Load>>>,
    /// Where the twin is told.
    check: Option<Check>,
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> Worker for Rank<Bk> {
    fn step(&mut self, step: usize, bytes: &[u8], rows: usize, check: bool) -> Result<Report, Failure> {
        let settings = self.settings.clone();
        let model = self.model.take().ok_or("an earlier step failed")?;
        let length = settings.context + 1;
        let (ids, tokens) = (vec![Vec::new(); settings.layers], vec![Vec::new(); settings.layers]);
        let check = check.then(|| Check { params: BTreeMap::new(), ids, tokens });
        let mut seen = Seen { loss: Vec::new(), load: Vec::new(), check };
        let mut gradients = None;
        for number in 0..settings.microbatches {
            let (first, rows) = settings.microbatch(rows, number);
            let last = number + 1 == settings.microbatches;
            if let (Some(sharded), true) = (&self.sharded, last) {
                sharded.last_backward()?;
            }
            let bytes = &bytes[first * length..(first + rows) * length];
            gradients = self.microbatch(&model, (bytes, rows, last), &mut seen)?;
        }
        let mut gradients = gradients.ok_or("a step without microbatches")?;
        if let Some(sharded) = &self.sharded {
            sharded.finish(&model, &mut gradients)?;
        }
        if let Some(check) = &mut seen.check {
            let mut snapshot = Snapshot::new(Some(&gradients));
            model.visit(&mut snapshot);
            check.params = snapshot.params;
        }
        let group = optimizer_options(&settings).group;
        self.optimizer.set_group(0, moebius::optim::GroupOptions { lr: settings.learning_rate_at(step), ..group })?;
        self.model = Some(self.optimizer.step(model, gradients)?);
        // Read last: on a GPU the host has nothing left to enqueue.
        let loss = seen.loss.into_iter().map(|loss| loss.into_data().iter::<f64>().sum::<f64>()).sum();
        let mut load = vec![vec![0; settings.experts]; settings.layers];
        for of_microbatch in seen.load {
            for (sums, own) in load.iter_mut().zip(of_microbatch) {
                sums.iter_mut().zip(&own.get()?.tokens_per_expert).for_each(|(sum, tokens)| *sum += tokens);
            }
        }
        let stats = self.optimizer.stats()?;
        let scaled = optimizer_options(&settings).loss_scaling.is_some();
        let passes = (step + 1 - settings.range.start) * settings.microbatches;
        Ok(Report {
            loss,
            load,
            norm: settings.clip.map(|_| stats.norm),
            scale: scaled.then_some(Scale { factor: stats.loss_scale, skipped: stats.skipped }),
            cost: self.sharded.as_ref().map(|sharded| sharded.cost(passes)),
            check: seen.check,
        })
    }

    fn save(&mut self, dir: &Path, steps: usize) -> Result<(), Failure> {
        let (settings, number) = (self.settings.clone(), self.number);
        save::save(self, (&settings, number), dir, steps)
    }
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> SavedRank for Rank<Bk> {
    fn weights(&self) -> Result<BTreeMap<String, Vec<f32>>, Failure> {
        let mut snapshot = Snapshot::new(None);
        self.model.as_ref().ok_or("an earlier step failed")?.visit(&mut snapshot);
        Ok(snapshot.params.into_iter().map(|(name, values)| (name, values.weight)).collect())
    }

    fn save_optimizer(&mut self, dir: &Path) -> Result<(), Failure> {
        Ok(self.optimizer.save(dir)?)
    }
}

fn rows_of<B: Backend>(ids: Tensor<B, 2, Int>) -> Vec<Vec<u32>> {
    let k = ids.dims()[1];
    let flat: Vec<u32> = ids.into_data().iter::<i64>().map(|id| id as u32).collect();
    flat.chunks(k).map(<[u32]>::to_vec).collect()
}

impl<Bk: MoeBackend<Native = Bk> + NativeBackend> Peer for Rank<Bk> {
    fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        rank_results::gather_over(&self.device, &mut *self.world, tag, own)
    }
}

/// Trains, with `on_step` after each step.
pub fn train(
    settings: &Settings,
    (place, check_every): (device::Place, usize),
    corpus: &Corpus,
    on_step: impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match place {
        device::Place::Cpu => {
            let make =
                |params: &[_], comms, number| Rank::<Flex>::new(settings, params, (comms, &Default::default()), number);
            ranks::train(settings, (communicators::on_cpu(settings.mesh)?, check_every), corpus, make, on_step)
        }
        #[cfg(feature = "burn-cuda")]
        device::Place::Cuda => {
            let make = |params: &[_], (device, comms), number| {
                Rank::<communicators::Gpu>::new(settings, params, (comms, &device), number)
            };
            ranks::train(settings, (communicators::on_gpus(settings.mesh)?, check_every), corpus, make, on_step)
        }
        #[cfg(not(feature = "burn-cuda"))]
        device::Place::Cuda => Err("this build has no burn on CUDA".into()),
    }
}
