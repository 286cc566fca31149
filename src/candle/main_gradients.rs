//! Gradients that stay in one place over a step's microbatches, and that kernels add to.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, TensorId};

use crate::error::Error;
use crate::layer::{ParamKind, PerParam};

use super::device::{CandleDevice, dtype_of, into_candle, location};
use super::error::refusal_reason;
use super::pending::{OutputGradient, operation_of, refuse_backward};

const CALL: &str = "MainGradients::backward";

/// Parameters of the routed experts: those whose gradients the layer's kernels write where they are told to.
pub(super) const EXPERTS: [ParamKind; 4] = [ParamKind::Up, ParamKind::UpBias, ParamKind::Down, ParamKind::DownBias];

/// The gradients of a step's variables, summed over its microbatches.
///
/// candle's own [`Tensor::backward`] fills each gradient with zeros and adds to them, and sums over microbatches are one
/// more pass. Here the experts' gradients, nearly all of a layer's bytes, are written by the layer's kernels into memory
/// that stays: the first [`backward`](Self::backward) after [`reset`](Self::reset) overwrites it, the following ones
/// add. Every other variable of the loss is summed as well; a weight that is computed (a cast, a sum of two) takes
/// candle's way to its variables.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
/// use moebius::MoeConfig;
/// use moebius::candle::{self, MainGradients};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let moe = candle::moe(MoeConfig::new(16, 32, 8, 2), VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let mut adam = AdamW::new(moe.vars(), ParamsAdamW::default())?;
/// let mut gradients = MainGradients::new();
/// for _step in 0..3 {
///     for _microbatch in 0..4 {
///         let x = Tensor::arange(0f32, 1024., &Device::Cpu)?.sin()?.reshape((64, 16))?;
///         gradients.backward(&(moe.forward(&x)? - x)?.sqr()?.mean_all()?)?;
///     }
///     adam.step(gradients.store())?;
///     gradients.reset();
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct MainGradients {
    experts: ExpertMemory,
    sums: GradStore,
    /// The caller may have changed `sums`: they are no more what the kernels would add to.
    changed: bool,
    /// They are sums over the ranks.
    reduced: bool,
    /// Backwards that `sums` holds.
    microbatches: u64,
}

/// Memory of the experts' gradients, by their variables.
#[derive(Debug, Default)]
struct ExpertMemory {
    /// Whether gradients of 16-bit variables are in f32.
    wide: bool,
    of: HashMap<TensorId, ExpertSum>,
    /// The backward that runs has begun to write to this memory.
    written: bool,
}

#[derive(Debug)]
struct ExpertSum {
    tensor: Tensor,
    /// Whether a backward has written it since the last reset.
    holds: bool,
    /// Whether it is the sum that `sums` shows.
    shown: bool,
}

impl MainGradients {
    /// Gradients in their variables' types.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gradients of 16-bit variables in f32, so that sums over many microbatches keep what 16 bits would lose: for an
    /// optimizer that takes a gradient of another type than its variable's: [`AdamW`](super::AdamW) does, candle-nn's do
    /// not.
    pub fn in_f32() -> Self {
        let experts = ExpertMemory { wide: true, ..Default::default() };
        Self { experts, ..Self::default() }
    }

    /// Adds the gradients of `loss`, as [`Tensor::backward`] gives them.
    ///
    /// The backward runs on this thread, and every expert layer in its graph, of whatever group, adds to these.
    ///
    /// # Errors
    /// Errors of candle and of the layers. The ranks that wait in a layer which this one does not reach are told
    /// ([`refuse_backward`]) and fail as well; those of whose layers none is left go on, and hear of it where they next
    /// meet this rank ([`GradientReducer::refuse`](super::GradientReducer::refuse)). Where a layer had begun to write, or
    /// gradients to be added, the sums before are lost on this rank: [`reset`](Self::reset) has been done, and the step
    /// begins anew. Else they are as they were. A backward behind [`store_mut`](Self::store_mut), of which no rank is
    /// told, as all of a program make it alike.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.run(loss, |_| Ok(()))
    }

    /// The same; `complete` adds gradients that layers have left elsewhere.
    pub(super) fn run(&mut self, loss: &Tensor, complete: impl FnOnce(&mut GradStore) -> Result<()>) -> Result<()> {
        // A mistake that all ranks of a program make alike, so that none is told.
        self.check_unchanged(CALL)?;
        let made = MemoryScope::run(&mut self.experts, || loss.backward());
        let made = made.inspect_err(|error| refuse_backward(loss, &refusal_reason(error)));
        let mut adding = false;
        let done = made.and_then(|mut gradients| {
            complete(&mut gradients)?;
            adding = true;
            self.add(loss, gradients)
        });
        match &done {
            Ok(()) => self.microbatches += 1,
            Err(_) => self.fail(adding),
        }
        self.experts.written = false;
        done
    }

    /// Refuses to add to sums that `store_mut` has given, and to sum them over the ranks.
    pub(super) fn check_unchanged(&self, call: &'static str) -> crate::Result<()> {
        match self.changed {
            false => Ok(()),
            true => {
                let expected = "a reset after `store_mut` has given the sums";
                Err(Error::invalid(call, "gradients", expected, "those that it gave"))
            }
        }
    }

    /// Refuses to sum over the ranks what has been: on every rank of a program alike.
    pub(super) fn check_not_reduced(&self) -> Result<()> {
        match self.reduced {
            false => Ok(()),
            true => {
                let expected = "a reset after they have been summed over the ranks";
                Err(Error::invalid("MainGradients::reduce", "gradients", expected, "those sums").into())
            }
        }
    }

    /// They are sums over the ranks from here on: no backward adds to them, and nobody sums them again.
    pub(super) fn set_reduced(&mut self) {
        (self.changed, self.reduced) = (true, true);
    }

    /// Leaves what was before a failed backward, where that is whole: not where some variables' sums have its gradients
    /// (`adding`) or a layer has written to them.
    fn fail(&mut self, adding: bool) {
        if adding || self.experts.written {
            return self.reset();
        }
        // Memory that it was to write first.
        self.experts.of.values_mut().filter(|main| !main.shown).for_each(|main| main.holds = false);
    }

    /// Adds the gradients of Σ y ∘ d_y: of an output whose gradient is known, without a loss.
    ///
    /// # Errors
    /// A `d_y` of another shape, type or device than y's; a y that no variable leads to; as
    /// [`backward`](Self::backward).
    pub fn backward_with(&mut self, y: &Tensor, d_y: &Tensor) -> Result<()> {
        let inner_product = inner_product(y, d_y).inspect_err(|error| refuse_backward(y, &refusal_reason(error)));
        self.backward(&inner_product?)
    }

    /// The sums since the last reset, by variable, as optimizers take them. Those of experts change in place with the
    /// next [`backward`](Self::backward).
    pub fn store(&self) -> &GradStore {
        &self.sums
    }

    /// The same to be changed: for sums over ranks
    /// ([`reduce_gradients`](super::ExpertParallelMoE::reduce_gradients)), clipping and the like, behind the step's last
    /// backward: the next, and [`reduce`](Self::reduce), are refused until a [`reset`](Self::reset), so that nothing is
    /// counted twice.
    pub fn store_mut(&mut self) -> &mut GradStore {
        self.changed = true;
        &mut self.sums
    }

    /// Backwards that they are the sums of.
    pub fn microbatches(&self) -> u64 {
        self.microbatches
    }

    /// The sums, for those who see to it themselves that the next backward does not add to what they leave.
    pub(super) fn sums_mut(&mut self) -> &mut GradStore {
        &mut self.sums
    }

    /// The type of a sum of gradients of some type.
    pub(super) fn type_of(&self) -> fn(DType) -> DType {
        if self.experts.wide { widened } else { |own| own }
    }

    /// Whether the sums of 16-bit variables are in f32.
    pub(super) fn is_in_f32(&self) -> bool {
        self.experts.wide
    }

    /// Whether a variable's sum so far lies in no memory that kernels add to.
    pub(super) fn is_elsewhere(&self, of: &Tensor) -> bool {
        self.sums.get(of).is_some() && !self.experts.of.get(&of.id()).is_some_and(|main| main.shown)
    }

    /// The sums alone.
    pub fn into_store(self) -> GradStore {
        self.sums
    }

    /// A parameter's sum.
    ///
    /// # Errors
    /// A frozen parameter; a variable that no backward since the last reset has reached, or whose gradient is elsewhere, as
    /// that of a shard is with its chain.
    pub fn get(&self, parameter: &Tensor) -> Result<&Tensor> {
        let missing = || {
            let found = if parameter.is_variable() { "one that none has reached" } else { "a frozen or computed one" };
            Error::invalid("MainGradients::get", "parameter", "a variable that a backward has reached", found)
        };
        Ok(self.sums.get(parameter).ok_or_else(missing)?)
    }

    /// Begins a step: no gradients. The memory of the last step's stays for those to come.
    pub fn reset(&mut self) {
        (self.sums, self.microbatches) = (GradStore::default(), 0);
        (self.changed, self.reduced) = (false, false);
        // Gradients that the last step has not used belong to variables that may be gone.
        self.experts.of.retain(|_, main| main.holds);
        for main in self.experts.of.values_mut() {
            (main.holds, main.shown) = (false, false);
        }
    }

    /// Adds one backward's gradients, those of its variables alone. Where that fails, some may have been added.
    fn add(&mut self, loss: &Tensor, mut gradients: GradStore) -> Result<()> {
        for (id, main) in self.experts.of.iter_mut().filter(|(_, main)| main.holds) {
            if !main.shown {
                // In an earlier microbatch another way has led to it.
                if let Some(before) = self.sums.get_id(*id) {
                    main.tensor = (&main.tensor + before)?.detach();
                }
                main.shown = true;
            }
            self.sums.insert_id(*id, main.tensor.clone());
        }
        for var in loss.sorted_nodes().into_iter().filter(|node| node.is_variable()) {
            let Some(new) = gradients.remove(var) else { continue };
            let sum = added(self.sums.get(var), &new, self.type_of())?;
            if let Some(main) = self.experts.of.get_mut(&var.id()).filter(|main| main.holds) {
                main.tensor = sum.clone();
            }
            self.sums.insert(var, sum);
        }
        Ok(())
    }
}

/// The sum of a variable's gradients with one more.
pub(super) fn added(before: Option<&Tensor>, new: &Tensor, type_of: fn(DType) -> DType) -> Result<Tensor> {
    let new = new.to_dtype(type_of(new.dtype()))?;
    match before {
        Some(before) => Ok((before + new)?.detach()),
        None => Ok(new.detach()),
    }
}

fn widened(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        own => own,
    }
}

/// [`Tensor::backward`] at the core's cost: experts' gradients are written once, by the layer's kernels, with no zeros
/// and no sum before. [`MainGradients`] does the same over several microbatches.
///
/// # Errors
/// As [`Tensor::backward`].
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    let mut gradients = MainGradients::new();
    gradients.backward(loss)?;
    Ok(gradients.into_store())
}

thread_local! {
    /// Memory for the backward that runs on this thread. candle calls operations' backwards on the thread of
    /// `Tensor::backward` and hands them nothing of the caller's, so this is the way from there to here.
    static EXPERT_MEMORY: RefCell<Option<ExpertMemory>> = const { RefCell::new(None) };
}

/// The backward that runs on this thread has begun to write the experts' gradients.
pub(super) fn writes_experts() {
    EXPERT_MEMORY.with_borrow_mut(|memory| {
        if let Some(memory) = memory {
            memory.written = true;
        }
    });
}

/// The sum of an expert's gradient that the layers' kernels have made, in the backward that runs on this thread.
pub(super) fn expert_sum(of: &Tensor) -> Option<Tensor> {
    EXPERT_MEMORY.with_borrow(|memory| {
        let main = memory.as_ref()?.of.get(&of.id())?;
        main.holds.then(|| main.tensor.clone())
    })
}

/// Lends memory to the backward that runs on this thread.
struct MemoryScope<'a> {
    owner: &'a mut ExpertMemory,
    /// That of a backward around this one.
    outer: Option<ExpertMemory>,
}

impl<'a> MemoryScope<'a> {
    fn run<T>(owner: &'a mut ExpertMemory, work: impl FnOnce() -> T) -> T {
        let outer = EXPERT_MEMORY.replace(Some(std::mem::take(owner)));
        let _scope = Self { owner, outer };
        work()
    }
}

impl Drop for MemoryScope<'_> {
    fn drop(&mut self) {
        if let Some(memory) = EXPERT_MEMORY.replace(self.outer.take()) {
            *self.owner = memory;
        }
    }
}

/// Where one layer's experts leave their gradients.
#[derive(Debug)]
pub(super) struct ExpertGradients {
    pub(super) tensors: PerParam<Option<Tensor>>,
    /// Add to what they hold.
    pub(super) accumulate: bool,
}

/// Memory for the gradients of a layer's experts, if the backward that runs on this thread has any and all experts that
/// are trained are variables.
pub(super) fn expert_gradients<D: CandleDevice>(
    device: &D,
    on: &Device,
    params: &PerParam<Option<Tensor>>,
) -> crate::Result<Option<ExpertGradients>> {
    EXPERT_MEMORY.with_borrow_mut(|memory| match memory {
        Some(memory) => memory.of_layer(device, on, params),
        None => Ok(None),
    })
}

impl ExpertMemory {
    fn of_layer<D: CandleDevice>(
        &mut self,
        device: &D,
        on: &Device,
        params: &PerParam<Option<Tensor>>,
    ) -> crate::Result<Option<ExpertGradients>> {
        let tracked = |kind: ParamKind| params.get(kind).filter(|t| t.track_op());
        let trained = || EXPERTS.into_iter().filter_map(|kind| Some((kind, tracked(kind)?)));
        // A layer gives the gradient of a bias beside its weight's only.
        let alone = |bias, weight| tracked(bias).is_some() && tracked(weight).is_none();
        let plain = alone(ParamKind::UpBias, ParamKind::Up) || alone(ParamKind::DownBias, ParamKind::Down);
        // One memory for two parameters would be borrowed twice.
        let twice = trained().any(|(kind, t)| trained().any(|(other, u)| other != kind && u.id() == t.id()));
        if plain || twice || trained().next().is_none() || trained().any(|(_, t)| !t.is_variable()) {
            return Ok(None);
        }
        let accumulate = trained().any(|(_, t)| self.of.get(&t.id()).is_some_and(|main| main.holds));
        let mut tensors = PerParam::none();
        for (kind, t) in trained() {
            let dtype = dtype_of("MainGradients", kind.name(), if self.wide { widened(t.dtype()) } else { t.dtype() })?;
            let main = match self.of.remove(&t.id()) {
                Some(main) if main.holds || !accumulate => ExpertSum { holds: true, ..main },
                _ => {
                    // Where others of the layer hold a sum: the kernels add to all or to none.
                    let make = if accumulate { crate::Tensor::zeros } else { crate::Tensor::empty };
                    let tensor = into_candle(make(device, dtype, t.dims())?, t.dims(), on)?;
                    ExpertSum { tensor, holds: true, shown: false }
                }
            };
            tensors[kind] = Some(main.tensor.clone());
            self.of.insert(t.id(), main);
        }
        Ok(Some(ExpertGradients { tensors, accumulate }))
    }
}

/// Σ y ∘ d_y, for its gradient.
fn inner_product(y: &Tensor, d_y: &Tensor) -> Result<Tensor> {
    const CALL: &str = "MainGradients::backward_with";
    Error::check_shape(CALL, "d_y", y.dims(), d_y.dims())?;
    if y.dtype() != d_y.dtype() {
        return Err(Error::invalid(CALL, "d_y", y.dtype().as_str(), d_y.dtype().as_str()).into());
    }
    if !y.device().same_device(d_y.device()) {
        return Err(Error::invalid(CALL, "d_y", location(y.device()), location(d_y.device())).into());
    }
    if !y.track_op() {
        return Err(Error::invalid(CALL, "y", "an output of variables", "a constant").into());
    }
    let d_y = d_y.detach();
    match operation_of(y) {
        Some((node, operation)) => node.apply_op1(InnerProductOp { d_y, operation: Some(operation) }),
        None => y.apply_op1(InnerProductOp { d_y, operation: None }),
    }
}

/// Σ y ∘ d_y, of which only the gradient is wanted: the value is 0.
struct InnerProductOp {
    d_y: Tensor,
    /// Of a layer's output: hangs from the layer's node in place of y, whose gradient candle would fill with zeros
    /// before it adds d_y.
    operation: Option<Arc<dyn OutputGradient>>,
}

impl CustomOp1 for InnerProductOp {
    fn name(&self) -> &'static str {
        "moebius-inner-product"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, y: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let scalar = Shape::from(());
        Ok((y.device().zeros_impl(&scalar, DType::F32)?, scalar))
    }

    fn bwd(&self, node: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        let Some(operation) = &self.operation else { return Ok(Some(self.d_y.clone())) };
        operation.set_y_cotangent(&self.d_y)?;
        Ok(Some(node.zeros_like()?))
    }
}
