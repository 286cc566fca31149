//! AdamW over candle's variables.

mod on_device;
mod param;

use std::fmt::Display;
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use crate::comm::refusal::refuse_on_error_if_any;
use crate::comm::{Communicator, Op, Tag};
use crate::cpu::Cpu;
use crate::error::Error;
use crate::optim::{self, AdamWOptions, GroupOptions, ParamSpec, StepStats};

use super::device::{CandleDevice, location};
use super::error::reason_of;

use on_device::{AdamWOnDevice, DeviceAdamW};
use param::CALL;

pub use param::AdamWParam;

/// AdamW with main weights in f32, for variables in f32, bf16 and f16: an [`Optimizer`] as candle-nn's own, whose
/// state is saved by the parameters' names.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{Optimizer, VarBuilder, VarMap};
/// use moebius::optim::{AdamWOptions, GroupOptions};
/// use moebius::{MoeConfig, candle};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::BF16, &Device::Cpu);
/// let moe = candle::moe(MoeConfig::new(16, 32, 8, 2), vb)?;
/// let group = GroupOptions { lr: 0.01, ..Default::default() };
/// let options = AdamWOptions { group, max_norm: Some(1.0), ..Default::default() };
/// let mut adam = candle::AdamW::of_var_map(&vars, options)?;
/// for _step in 0..3 {
///     let x = Tensor::arange(0f32, 1024., &Device::Cpu)?.sin()?.reshape((64, 16))?.to_dtype(DType::BF16)?;
///     let loss = (moe.forward(&x)? - x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
///     adam.backward_step(&loss)?;
/// }
/// println!("norm before clipping {}", adam.stats()?.norm);
/// # Ok(()) }
/// ```
///
/// With [`AdamWOptions::loss_scaling`] the gradients given to `step` are those of the [scaled](Self::scale_loss) loss,
/// which `backward_step` sees to itself. Auxiliary losses are to be part of that loss: add `aux` of
/// [`forward_full`](super::ExpertParallelMoE::forward_full), which is scaled with it, as the factor changes on the
/// device.
///
/// A variable that has no gradient in a step stays as it is in that step, as candle-nn's optimizers leave it. Nothing of
/// a step waits for a GPU, but for the first of several ranks with a norm, which compare who has gradients.
#[derive(Debug)]
pub struct AdamW {
    inner: Box<dyn DeviceAdamW>,
    /// Options that the next step begins with.
    groups: Vec<GroupOptions>,
    /// Whether the parameters have names, by which a saved state is read.
    named: bool,
}

impl AdamW {
    /// An optimizer of one rank and one group, of a map's variables ([`AdamWParam::of_var_map`]).
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn of_var_map(vars: &VarMap, options: AdamWOptions) -> Result<Self> {
        Self::with_groups(AdamWParam::of_var_map(vars), options, &[])
    }

    /// An optimizer of one rank, on the variables' device, with options for each group, or without any for the one of
    /// [`AdamWOptions::group`].
    ///
    /// # Errors
    /// Errors of [`optim::AdamW::new`]; a device that this build does not serve.
    pub fn with_groups(params: Vec<AdamWParam>, options: AdamWOptions, groups: &[GroupOptions]) -> Result<Self> {
        let device = params.first().map_or(Device::Cpu, |p| p.var.device().clone());
        match &device {
            Device::Cpu => Self::on(&Cpu::new(), None, params, options, groups),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Self::on(&super::cuda(&device)?, None, params, options, groups),
            other => {
                let expected = if cfg!(feature = "cuda") { "the CPU or a GPU" } else { "the CPU (no `cuda` feature)" };
                Err(Error::invalid(CALL, "device", expected, location(other)).into())
            }
        }
    }

    /// An optimizer over ranks: `comm` is of all ranks that hold parts of the parameters, each rank once
    /// (collective). It carries the norm's sums alone: gradients that all ranks hold are summed by
    /// [`reduce_gradients`](super::ExpertParallelMoE::reduce_gradients) before, those of shards by
    /// [`finish_sharded`](super::finish_sharded).
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn over_ranks<D: CandleDevice>(
        device: &D,
        comm: Box<dyn Communicator<D>>,
        params: Vec<AdamWParam>,
        options: AdamWOptions,
        groups: &[GroupOptions],
    ) -> Result<Self> {
        Self::on(device, Some(comm), params, options, groups)
    }

    fn on<D: CandleDevice>(
        device: &D,
        comm: Option<Box<dyn Communicator<D>>>,
        params: Vec<AdamWParam>,
        options: AdamWOptions,
        groups: &[GroupOptions],
    ) -> Result<Self> {
        let mut comm = comm;
        // The others wait to compare theirs.
        let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
        let specs = refuse_on_error_if_any(comm.as_deref_mut(), tag, specs(&params))?;
        let optimizer = optim::AdamW::new(device, options, groups, specs, comm)?;
        let home = params.first().map_or(Device::Cpu, |p| p.var.device().clone());
        let groups = optimizer.groups().to_vec();
        let mut on = AdamWOnDevice { optimizer, params, device: home };
        on.read_params()?;
        Ok(Self { inner: Box::new(on), groups, named: true })
    }

    /// Names the model whose state this is: saved states carry it, and one of another identity, or of none, is not
    /// loaded ([`optim::AdamW::set_identity`](crate::optim::AdamW::set_identity)). The same on all ranks, which a save
    /// compares.
    pub fn with_identity(mut self, identity: impl Into<String>) -> Self {
        self.inner.set_identity(identity.into());
        self
    }

    /// The loss, times the factor of [loss scaling](AdamWOptions::loss_scaling), in f32: its gradients are what `step`
    /// takes. The loss itself where there is none.
    ///
    /// # Errors
    /// The device's.
    pub fn scale_loss(&self, loss: &Tensor) -> Result<Tensor> {
        match self.inner.options().loss_scaling {
            None => Ok(loss.clone()),
            Some(_) => loss.to_dtype(candle_core::DType::F32)?.broadcast_mul(&self.inner.loss_scale()?),
        }
    }

    /// Norm, counts and factors of the last step. Waits for the device.
    ///
    /// # Errors
    /// The device's.
    pub fn stats(&self) -> Result<StepStats> {
        Ok(self.inner.stats()?)
    }

    /// Options of the groups.
    pub fn groups(&self) -> &[GroupOptions] {
        &self.groups
    }

    /// Changes a group's options, from the next step on.
    ///
    /// # Errors
    /// A group that there is not.
    pub fn set_group(&mut self, group: usize, options: GroupOptions) -> Result<()> {
        let count = self.groups.len();
        let own = self.groups.get_mut(group);
        *own.ok_or_else(|| Error::invalid(CALL, "group", format!("one of {count}"), group))? = options;
        Ok(())
    }

    /// Has the device read the groups' options as they are now, which [`step`](Optimizer::step) does itself: for a
    /// captured step, which reads them there at each replay.
    ///
    /// # Errors
    /// Options out of range; the device's.
    pub fn write_options(&mut self) -> Result<()> {
        for (group, options) in self.groups.iter().enumerate() {
            self.inner.set_group(group, *options)?;
        }
        Ok(())
    }

    /// The device, if it is a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self) -> Option<crate::cuda::Cuda> {
        self.inner.cuda()
    }

    /// Takes the variables' values as main weights: after somebody else has changed them.
    ///
    /// # Errors
    /// The device's.
    pub fn read_params(&mut self) -> Result<()> {
        self.inner.read_params()
    }

    /// Writes the state to a folder of its own, as one step: [`optim::AdamW::save`](crate::optim::AdamW::save). Every
    /// rank calls it with the same folder, which ranks do not compare.
    ///
    /// # Errors
    /// As there; an optimizer whose parameters have no names ([`Optimizer::new`]).
    pub fn save(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        self.check_named()?;
        Ok(self.inner.save(dir.as_ref())?)
    }

    /// Goes on from a saved state, which any number of ranks may have written; bf16 and f16 variables become the saved
    /// main weights, rounded, and f32 ones are to be loaded with the model. Gives the number of steps taken. Every rank
    /// calls it.
    ///
    /// # Errors
    /// As [`optim::AdamW::load`](crate::optim::AdamW::load); an optimizer whose parameters have no names
    /// ([`Optimizer::new`]).
    pub fn load(&mut self, dir: impl AsRef<Path>) -> Result<u64> {
        self.check_named()?;
        self.inner.load(dir.as_ref(), None)
    }

    /// The same of the state of a model that has taken `steps` steps, as whoever saved both has written down.
    ///
    /// # Errors
    /// As [`optim::AdamW::load_at`](crate::optim::AdamW::load_at), and [`load`](Self::load).
    pub fn load_at(&mut self, dir: impl AsRef<Path>, steps: u64) -> Result<u64> {
        self.check_named()?;
        self.inner.load(dir.as_ref(), Some(steps))
    }

    /// Refuses a state of parameters that are known by their places alone: in another process these may be others'.
    fn check_named(&self) -> Result<()> {
        match self.named {
            true => Ok(()),
            false => {
                let expected = "with names: `AdamW::of_var_map`, or `AdamW::with_groups` of `optimizer_params`";
                Err(Error::invalid(CALL, "parameters", expected, "of `AdamW::new`, without").into())
            }
        }
    }

    /// In place of a step, where this rank cannot come to it: the others, which wait there for the norm where there is
    /// one, get the reason.
    pub fn refuse(&mut self, reason: impl Display) {
        self.inner.refuse(&reason);
    }
}

impl Optimizer for AdamW {
    type Config = AdamWOptions;

    /// Of one rank and one group; variables of other than floating types are left out. They have no names, so no state of
    /// them is saved or loaded: [`of_var_map`](Self::of_var_map) has. `VarMap::all_vars` gives them in another order in
    /// every process, which moves the last bits of a norm.
    fn new(vars: Vec<Var>, options: AdamWOptions) -> Result<Self> {
        let vars = vars.into_iter().filter(|var| var.dtype().is_float()).enumerate();
        let params = vars.map(|(i, var)| AdamWParam::new(i.to_string(), &var)).collect();
        Ok(Self { named: false, ..Self::with_groups(params, options, &[])? })
    }

    /// Every rank calls it, with gradients that have been summed over the ranks, each of its variable's dimensions. What fails
    /// on one rank before the norm is told to the others.
    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        if let Err(error) = self.write_options() {
            self.inner.refuse(&reason_of(CALL, &error));
            return Err(error);
        }
        self.inner.step(gradients)
    }

    /// The first group's.
    fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0.0, |group| group.lr)
    }

    /// Of all groups, from the next step on.
    fn set_learning_rate(&mut self, lr: f64) {
        self.groups.iter_mut().for_each(|group| group.lr = lr);
    }

    /// Of one rank. Over several it is an error on each, as their gradients have to be summed between backward and step.
    fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        let ranks = self.inner.ranks();
        if ranks > 1 {
            let expected = "one rank; over several, backward, the gradients' sums and step";
            let error = Error::invalid("AdamW::backward_step", "ranks", expected, ranks);
            self.refuse(&error);
            return Err(error.into());
        }
        let loss = self.scale_loss(loss)?;
        self.step(&super::backward(&loss)?)
    }
}

/// The parameters' descriptions.
fn specs(params: &[AdamWParam]) -> Result<Vec<ParamSpec>> {
    let mut seen = std::collections::HashSet::new();
    if let Some(twice) = params.iter().find(|param| !seen.insert(param.var.id())) {
        let name = format!("parameter {}", twice.name);
        return Err(Error::invalid(CALL, name, "a variable of its own", "another parameter's").into());
    }
    params.iter().map(AdamWParam::spec).collect()
}
