//! AdamW: its state, and a step.

use std::fmt::Display;
use std::sync::Arc;

use crate::DType;
use crate::comm::refusal::{self, refuse_on_error_if_any};
use crate::comm::{Communicator, Op, Tag};
use crate::compare::meet;
use crate::error::{Error, Result};
use crate::etp::StreamPair;
use crate::kernels::optimizer::{AdamWTensor, AdamWUpdate, Convert, GROUP_STATE, STATE_NUMBERS, StepControl, state};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::fields::{fields, group_fields};
use super::gradient_presence::GradientPresence;
use super::norm::{NormPlan, NormStep, OptimizerFields, RankRows, exchange, owners};
use super::saved_state::{Counts, StateKind};
use super::state_memory::{ParamState, StateMemory, power, settings};
use super::{AdamWOptions, GroupOptions, ParamSpec, StepDevice, StepStats};

const CALL: &str = "AdamW";

/// AdamW over a rank's parameters, which stay the caller's: see the [module](super).
#[derive(Debug)]
pub struct AdamW<D: StepDevice> {
    device: D,
    options: AdamWOptions,
    groups: Vec<GroupOptions>,
    specs: Vec<ParamSpec>,
    params: Vec<ParamState<D>>,
    norm: Option<NormPlan<D>>,
    rank_rows: RankRows,
    comm: Option<Box<dyn Communicator<D>>>,
    /// The device, and that of the communicator's work.
    streams: Arc<StreamPair<D>>,
    settings: Tensor<D>,
    state: Tensor<D>,
    coefficients: Tensor<D>,
    /// Steps begun, for tags.
    begun: u64,
    /// The ranks have compared which parameters have gradients.
    compared: bool,
    /// Reading a saved state failed half way.
    undefined: bool,
    /// Whose state it is, as its saved states say.
    identity: Option<String>,
}

/// A parameter and its gradient, for [`AdamW::update`].
#[derive(Debug)]
pub struct StepTensor<'a, D: StepDevice> {
    /// Which parameter, as [`AdamW::new`] was given them.
    pub index: usize,
    /// Its values.
    pub param: TensorMut<'a, D>,
    /// Any of F32, F16 and BF16.
    pub gradient: TensorRef<'a, D>,
}

impl<D: StepDevice> AdamW<D> {
    /// An optimizer with moments of zero and main weights that [`read_param`](Self::read_param) fills. Without `groups` there
    /// is one, of [`AdamWOptions::group`]. `comm` is of all ranks that hold parts of these parameters, where there are
    /// several (collective: parameters, options and groups are compared over the ranks).
    ///
    /// # Errors
    /// Options out of range, [`AdamWOptions::group`] beside `groups` that it is none of, a parameter of another type, a
    /// name that occurs twice, a group that there is not; [`Error::ConfigMismatch`] on every rank; parts that do not make
    /// up a whole; no memory for the state of one rank, of which the others are told.
    pub fn new(
        device: &D,
        options: AdamWOptions,
        groups: &[GroupOptions],
        specs: Vec<ParamSpec>,
        comm: Option<Box<dyn Communicator<D>>>,
    ) -> Result<Self> {
        let mut comm = comm;
        let own = [options.group];
        let groups = if groups.is_empty() { &own } else { groups };
        let sound = options.check().and_then(|()| groups.iter().try_for_each(GroupOptions::check));
        let sound = sound.and_then(|()| options.check_group(groups));
        // The others wait to compare theirs.
        let checked = sound.and_then(|()| check_specs(&specs, groups.len()));
        refuse_on_error_if_any(comm.as_deref_mut(), Tag { layer: 0, op: Op::Init, sequence: 0 }, checked)?;
        let (fields, of_groups) = (fields(&options, groups.len(), specs.len()), group_fields(groups));
        let fields = OptimizerFields { fields: &fields, of_groups: &of_groups };
        let (rank_rows, rank): (RankRows, usize) = exchange(device, comm.as_deref_mut(), &specs, fields)?;
        let streams = StreamPair::new(device, comm.as_ref().and_then(|comm| comm.device()));
        let norm = options.has_norm().then(|| NormPlan::new(device, &specs, &rank_rows, rank)).transpose();
        let memory = norm.and_then(|norm| Ok((norm, StateMemory::new(device, &options, groups, &specs)?)));
        let tag = Tag { layer: 0, op: Op::Init, sequence: 4 };
        let (norm, memory) = refuse_on_error_if_any(comm.as_deref_mut(), tag, memory)?;
        let StateMemory { params, settings, state, coefficients } = memory;
        let mut adamw = Self {
            device: device.clone(),
            options,
            groups: groups.to_vec(),
            specs,
            params,
            norm,
            rank_rows,
            streams,
            comm,
            settings,
            state,
            coefficients,
            begun: 0,
            compared: false,
            undefined: false,
            identity: None,
        };
        let begun =
            adamw.restart(&Counts { scale: options.loss_scaling.map_or(1.0, |s| s.initial), ..Counts::default() });
        refuse_on_error_if_any(adamw.comm.as_deref_mut(), tag, begun)?;
        if let Some(comm) = adamw.comm.as_deref_mut().filter(|comm| comm.size() > 1) {
            // A rank without memory for its state is heard of here, and not in the others' first step.
            meet(&adamw.streams.transfer, comm, tag)?;
        }
        Ok(adamw)
    }

    /// Names the model whose state this is: a name of your own, or what tells a model from others of the same
    /// parameters, as its configuration written out. Saved states carry it, and one of another identity, or of none, is
    /// not loaded. The same on all ranks, which a save compares.
    pub fn set_identity(&mut self, identity: impl Into<String>) {
        self.identity = Some(identity.into());
    }

    /// The identity, if there is one.
    pub fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// Takes the parameters' values as main weights: once after [`new`](Self::new), and whenever somebody else has
    /// changed the parameters.
    ///
    /// # Errors
    /// A parameter of another type or size.
    pub fn read_param(&mut self, index: usize, param: TensorRef<'_, D>) -> Result<()> {
        let spec = self.spec(index)?;
        check_param(spec, param.dtype(), param.count())?;
        let count = spec.shard.count();
        let param = param.borrow();
        let Some(main) = self.params.get_mut(index).and_then(|p| p.main.as_mut()) else { return Ok(()) };
        let dtype = param.dtype();
        let from = TensorRef::new(D::slice(param.data(), 0..count * dtype.size()), dtype, &[count])?;
        self.device.convert(Convert { from, to: main.view_mut() })
    }

    /// Sets a parameter of 16 bits to its main weight, rounded.
    ///
    /// # Errors
    /// As [`read_param`](Self::read_param); a state that [`load`](Self::load) has left half read.
    pub fn write_param(&self, index: usize, mut param: TensorMut<'_, D>) -> Result<()> {
        self.check_defined()?;
        let spec = self.spec(index)?;
        check_param(spec, param.dtype(), param.count())?;
        let (count, dtype) = (spec.shard.count(), spec.dtype);
        let Some(main) = self.params.get(index).and_then(|p| p.main.as_ref()) else { return Ok(()) };
        let to = D::slice_mut(param.reborrow().into_data(), 0..count * dtype.size());
        self.device.convert(Convert { from: main.view(), to: TensorMut::new(to, dtype, &[count])? })
    }

    /// Begins a step: the gradients' norm over all ranks, and the numbers of the step. One gradient a parameter, in
    /// order; `None`: it has none in this step, counts nothing and is not to be updated. Every rank calls it.
    ///
    /// # Errors
    /// A gradient of another type or size; a state that [`load`](Self::load) has left half read; with a norm, on every
    /// rank and in the first step alone, a gradient that some of the ranks with the same rows of a parameter have and others
    /// not; the communicator's.
    pub fn begin(&mut self, gradients: &[Option<TensorRef<'_, D>>]) -> Result<()> {
        let tag = self.next_step();
        let sums = self.own_sums(gradients);
        // The others wait for this rank's sums, where there is a norm.
        refuse_on_error_if_any(self.comm.as_deref_mut().filter(|_| self.norm.is_some()), tag, sums)?;
        if let Some(plan) = &mut self.norm {
            // Once: the host waits for the answer.
            if let Some(comm) = self.comm.as_deref_mut().filter(|_| !self.compared) {
                let given = GradientPresence { specs: &self.specs, rank_rows: &self.rank_rows, gradients };
                self.compared = given.compare(comm, &self.streams, tag)?;
            }
            plan.gather(self.comm.as_deref_mut(), &self.streams, tag)?;
        }
        let norm = self.norm.as_mut().map(NormPlan::nodes);
        self.device.step_control(StepControl {
            norm,
            max_norm: self.options.max_norm,
            scaling: self.options.loss_scaling,
            settings: self.settings.view(),
            state: self.state.view_mut(),
            coefficients: self.coefficients.view_mut(),
        })
    }

    /// In place of [`begin`](Self::begin), where this rank cannot come to it: the others, which wait in it for the norm
    /// where there is one, get the reason, and this rank's next step is their next.
    pub fn refuse(&mut self, reason: impl Display) {
        let tag = self.next_step();
        if let Some(comm) = self.comm.as_deref_mut().filter(|_| self.norm.is_some()) {
            refusal::refuse(comm, tag, &reason);
        }
    }

    /// Steps begun or refused so far.
    #[cfg_attr(not(feature = "candle"), allow(dead_code, reason = "an adapter asks for it"))]
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// The tag of a step's collective.
    fn next_step(&mut self) -> Tag {
        let tag = Tag { layer: 0, op: Op::GradNorm, sequence: self.begun };
        self.begun += 1;
        tag
    }

    fn own_sums(&mut self, gradients: &[Option<TensorRef<'_, D>>]) -> Result<()> {
        self.check_defined()?;
        Error::check_shape(CALL, "gradients", &[self.specs.len()], &[gradients.len()])?;
        for (spec, gradient) in self.specs.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                check_gradient(spec, gradient.dtype(), gradient.count())?;
            }
        }
        match &mut self.norm {
            None => Ok(()),
            Some(plan) => plan.own_sums(&self.device, NormStep { specs: &self.specs, gradients }),
        }
    }

    /// Updates parameters, after [`begin`](Self::begin): one call of the device for each group among them.
    ///
    /// # Errors
    /// A parameter that there is not or is there twice, or of another type or size.
    pub fn update(&mut self, mut tensors: Vec<StepTensor<'_, D>>) -> Result<()> {
        let mut groups: Vec<Vec<AdamWTensor<'_, D>>> = self.groups.iter().map(|_| Vec::new()).collect();
        let mut states: Vec<Option<&mut ParamState<D>>> = self.params.iter_mut().map(Some).collect();
        for StepTensor { index, param, gradient } in &mut tensors {
            let (index, param, gradient) = (*index, param.reborrow(), gradient.borrow());
            let unknown = || Error::invalid(CALL, "parameter", "one of its own, once", index);
            let spec = self.specs.get(index).ok_or_else(unknown)?;
            check_param(spec, param.dtype(), param.count())?;
            check_gradient(spec, gradient.dtype(), gradient.count())?;
            let kept = states[index].take().ok_or_else(unknown)?;
            let (main, rounded) = match &mut kept.main {
                None => (param, None),
                Some(main) => (main.view_mut(), Some(param)),
            };
            groups[spec.group].push(AdamWTensor {
                count: spec.shard.count(),
                gradient,
                main,
                rounded,
                first: kept.first.view_mut(),
                second: kept.second.view_mut(),
                number: index as u32,
                element: spec.shard.first_element(),
            });
        }
        for (group, tensors) in groups.into_iter().enumerate().filter(|(_, tensors)| !tensors.is_empty()) {
            let (coefficients, seed) = (self.coefficients.view(), self.options.seed);
            self.device.adamw(AdamWUpdate { tensors, coefficients, group, seed })?;
        }
        Ok(())
    }

    /// Changes a group's options, from the next step on: on every rank alike, which nobody compares.
    ///
    /// # Errors
    /// A group that there is not; options out of range.
    pub fn set_group(&mut self, group: usize, options: GroupOptions) -> Result<()> {
        options.check()?;
        let count = self.groups.len();
        let own = self.groups.get(group);
        let own = *own.ok_or_else(|| Error::invalid(CALL, "group", format!("one of {count}"), group))?;
        if own != options {
            let mut groups = self.groups.clone();
            groups[group] = options;
            let fresh = settings(&self.device, &groups).map_err(between_replays)?;
            if own.betas != options.betas {
                let mut numbers = self.device.read(self.state.view())?;
                let steps = numbers[state::STEP] as u64;
                let powers = options.betas.map(|beta| power(beta, steps));
                numbers[STATE_NUMBERS + GROUP_STATE * group..][..powers.len()].copy_from_slice(&powers);
                self.write_numbers(&numbers)?;
            }
            self.device.copy(fresh.view().data(), self.settings.view_mut().into_data())?;
            // Only what the device has been given counts as set.
            self.groups = groups;
        }
        Ok(())
    }

    /// Figures of the last step. Waits for the device.
    ///
    /// # Errors
    /// The device's.
    pub fn stats(&self) -> Result<StepStats> {
        let numbers = self.device.read(self.state.view())?;
        Ok(StepStats {
            steps: numbers[state::STEP] as u64,
            skipped: numbers[state::SKIPPED] as u64,
            norm: numbers[state::NORM],
            factor: numbers[state::FACTOR],
            loss_scale: numbers[state::SCALE],
            skipped_last: numbers[state::SKIP] != 0.0,
        })
    }

    /// Factor of the next step's loss, on the device: one number in F32.
    ///
    /// # Errors
    /// The device's.
    pub fn loss_scale(&self) -> Result<Tensor<D>> {
        let mut to = Tensor::empty(&self.device, DType::F32, &[1])?;
        let at = state::SCALE * DType::F64.size();
        let scale = D::slice(self.state.view().data(), at..at + DType::F64.size());
        self.device.convert(Convert { from: TensorRef::new(scale, DType::F64, &[1])?, to: to.view_mut() })?;
        Ok(to)
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The options.
    pub fn options(&self) -> &AdamWOptions {
        &self.options
    }

    /// The groups' options.
    pub fn groups(&self) -> &[GroupOptions] {
        &self.groups
    }

    /// The parameters.
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    fn spec(&self, index: usize) -> Result<&ParamSpec> {
        let unknown = || Error::invalid(CALL, "parameter", format!("one of {}", self.specs.len()), index);
        self.specs.get(index).ok_or_else(unknown)
    }
}

impl<D: StepDevice> AdamW<D> {
    /// The counts. Waits for the device.
    pub(crate) fn counts(&self) -> Result<Counts> {
        let numbers = self.device.read(self.state.view())?;
        let count = |at: usize| numbers[at] as u64;
        let [good, steps, skipped] = [count(state::GOOD), count(state::STEP), count(state::SKIPPED)];
        let scaled = self.options.loss_scaling.is_some();
        Ok(Counts { scaled, scale: numbers[state::SCALE], good, steps, skipped })
    }

    /// The state is being read: until that has ended well, no step may use it, and no save.
    pub(crate) fn set_undefined(&mut self, undefined: bool) {
        self.undefined = undefined;
    }

    /// Refuses a state that was read in part.
    pub(crate) fn check_defined(&self) -> Result<()> {
        match self.undefined {
            false => Ok(()),
            true => Err(Error::invalid(CALL, "state", "one that was loaded whole", "one that `load` failed to read")),
        }
    }

    /// Counts of a saved state as this optimizer goes on from them: its own options say whether the loss is scaled, and
    /// within which bounds.
    pub(crate) fn adopted(&self, saved: &Counts) -> Counts {
        let (scale, good) = match self.options.loss_scaling {
            None => (1.0, 0),
            Some(scaling) if !saved.scaled => (scaling.initial, 0),
            Some(scaling) => (saved.scale.clamp(scaling.min, scaling.max), saved.good),
        };
        Counts { scale, good, scaled: self.options.loss_scaling.is_some(), ..*saved }
    }

    /// Goes on from these counts. Powers of the betas are products of as many factors as steps, as steps make them.
    pub(crate) fn restart(&mut self, counts: &Counts) -> Result<()> {
        let mut numbers = vec![0.0; STATE_NUMBERS];
        numbers[state::SCALE] = counts.scale;
        numbers[state::GOOD] = counts.good as f64;
        numbers[state::STEP] = counts.steps as f64;
        numbers[state::SKIPPED] = counts.skipped as f64;
        for group in &self.groups {
            numbers.extend(group.betas.map(|beta| power(beta, counts.steps)));
        }
        self.write_numbers(&numbers)
    }

    fn write_numbers(&mut self, numbers: &[f64]) -> Result<()> {
        let fresh = self.device.write(numbers, DType::F64, &[numbers.len()])?;
        self.device.copy(fresh.view().data(), self.state.view_mut().into_data())
    }

    /// One of the tensors kept of a parameter, if it has that.
    pub(crate) fn state_tensor(&self, param: usize, kind: StateKind) -> Option<&Tensor<D>> {
        let kept = self.params.get(param)?;
        match kind {
            StateKind::Main => kept.main.as_ref(),
            StateKind::First => Some(&kept.first),
            StateKind::Second => Some(&kept.second),
        }
    }

    /// The same, to be written.
    pub(crate) fn state_tensor_mut(&mut self, param: usize, kind: StateKind) -> Option<&mut Tensor<D>> {
        let kept = self.params.get_mut(param)?;
        match kind {
            StateKind::Main => kept.main.as_mut(),
            StateKind::First => Some(&mut kept.first),
            StateKind::Second => Some(&mut kept.second),
        }
    }

    /// The ranks that hold a parameter, with their rows, in the rows' order; each row once.
    pub(crate) fn owners(&self, param: usize) -> Result<Vec<(usize, std::ops::Range<usize>)>> {
        owners(self.spec(param)?, &self.rank_rows, param)
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.comm.as_ref().map_or(0, |comm| comm.rank())
    }

    /// The number of ranks.
    #[cfg(feature = "candle")]
    pub(crate) fn ranks(&self) -> usize {
        self.comm.as_ref().map_or(1, |comm| comm.size())
    }

    /// The order of the communicator's work beside the device's own.
    pub(crate) fn streams(&self) -> Arc<StreamPair<D>> {
        Arc::clone(&self.streams)
    }

    /// The communicator, where there are several ranks.
    pub(crate) fn comm(&mut self) -> Option<&mut (dyn Communicator<D> + 'static)> {
        self.comm.as_deref_mut()
    }
}

fn check_specs(specs: &[ParamSpec], groups: usize) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for spec in specs {
        let name = || format!("parameter {}", spec.name);
        if !seen.insert(&spec.name) {
            return Err(Error::invalid(CALL, name(), "a name of its own", "another parameter of this name"));
        }
        if !matches!(spec.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid(CALL, name(), "f32, f16 or bf16", spec.dtype));
        }
        if spec.group >= groups {
            return Err(Error::invalid(CALL, name(), format!("one of {groups} groups"), spec.group));
        }
    }
    if u32::try_from(specs.len()).is_err() {
        return Err(Error::invalid(CALL, "parameters", "fewer than 2^32", specs.len()));
    }
    Ok(())
}

/// Other options in captured calls are a copy from the host: says where to change them instead.
fn between_replays(error: Error) -> Error {
    const CHANGE: &str = "a change of a group's options, which is made between replays (AdamW::set_group; in candle \
                          AdamW::write_options behind set_learning_rate)";
    match error {
        Error::NotCapturable { .. } => Error::not_capturable(CALL, CHANGE),
        other => other,
    }
}

/// Refuses a parameter of another type, or of fewer elements than this rank's part of it.
fn check_param(spec: &ParamSpec, dtype: DType, count: usize) -> Result<()> {
    Error::check_dtype(CALL, &spec.name, spec.dtype, dtype)?;
    at_least(spec, "parameter", count)
}

fn check_gradient(spec: &ParamSpec, dtype: DType, count: usize) -> Result<()> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(Error::invalid(CALL, format!("gradient of {}", spec.name), "f32, f16 or bf16", dtype));
    }
    at_least(spec, "gradient", count)
}

fn at_least(spec: &ParamSpec, what: &str, found: usize) -> Result<()> {
    let wanted = spec.shard.count();
    match found >= wanted {
        true => Ok(()),
        false => {
            Err(Error::invalid(CALL, format!("{what} {}", spec.name), format!("{wanted} elements or more"), found))
        }
    }
}
