//! AdamW with main weights, over the parameters of burn modules.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;

use crate::adapter::param_shard;
use crate::comm::refusal::refuse_on_error_if_any;
use crate::comm::{Communicator, Op, Tag};
use crate::device::Device;
use crate::error::Result;
use crate::layer::ParamKind;
use crate::optim::{self, AdamWOptions, GroupOptions, StepStats, StepTensor};

use super::adamw_param::AdamWParam;
use super::backend::{CoreDevice, MoeBackend, Named, NativeMemory, ResultSpec, between, primitive, tensor_of};
use super::module::ExpertParallelMoE;
use super::param_values::{LendParams, LentParam, Values, count_fields, find, missing, new_value, values, with_values};
use super::reduce::native;

impl<B: MoeBackend> ExpertParallelMoE<B> {
    /// Says of the layer's parameters among these which parts they are: experts this rank's part of all experts, and
    /// shards their part of these.
    ///
    /// # Errors
    /// None for a module that was built.
    pub fn place_shards(&self, params: &mut [AdamWParam]) -> Result<()> {
        let group = self.group().membership();
        for kind in ParamKind::ALL {
            let Some(own) = self.float_param(kind) else { continue };
            if let Some(param) = params.iter_mut().find(|param| param.id() == own.id()) {
                param.set_shard(param_shard(self.layer(), group, self.sharded.as_ref(), kind)?);
            }
        }
        Ok(())
    }
}

/// AdamW with main weights in f32, for parameters in f32, bf16 and f16: what `candle::AdamW` does, over burn's modules.
///
/// burn's parameters are values, so a step takes the module and gives it back, as burn's optimizers do. Gradients may be
/// in f32 beside parameters of 16 bits
/// ([`GradientReducer::with_main_gradients_in_f32`](super::GradientReducer::with_main_gradients_in_f32)).
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::{DType, Distribution, Tensor};
/// use moebius::MoeConfig;
/// use moebius::burn::{AdamW, ExpertParallelMoEConfig, GradientReducer};
/// use moebius::cpu::Cpu;
/// use moebius::optim::{AdamWOptions, GroupOptions};
/// # use burn::module::{Module, ModuleMapper, Param};
/// # struct InBf16;
/// # impl ModuleMapper<B> for InBf16 {
/// #     fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
/// #         let (id, t, mapper) = param.consume();
/// #         let bf16 = Tensor::from_inner(t.inner().cast(DType::BF16)).require_grad();
/// #         Param::from_mapped_value(id, bf16, mapper)
/// #     }
/// # }
///
/// type B = Autodiff<Flex>;
///
/// # fn main() -> moebius::Result<()> {
/// let device = Default::default();
/// # <Flex as burn::tensor::backend::Backend>::seed(&device, 1);
/// let moe = ExpertParallelMoEConfig::new(MoeConfig::new(16, 32, 8, 2)).init::<B>(&device)?;
/// # let moe = moe.map(&mut InBf16); // of bf16 parameters
/// let mut moe = moe;
/// let mut reducer = GradientReducer::<B>::alone(&Cpu::new())?.with_layer(&moe).with_main_gradients_in_f32();
/// let group = GroupOptions { lr: 0.01, ..Default::default() };
/// let mut adam = AdamW::<B>::new(&Cpu::new(), &moe, AdamWOptions { group, max_norm: Some(1.0), ..Default::default() })?;
/// for _step in 0..3 {
///     for _microbatch in 0..4 {
///         let x = Tensor::<B, 2>::random([64, 16], Distribution::Default, &device).cast(DType::BF16);
///         let loss = (moe.forward(x.clone())? - x).powi_scalar(2).mean();
///         reducer.backward(loss, &moe)?; // experts' gradients added in f32 by the layer's kernels
///     }
///     let gradients = reducer.reduce(&moe)?;
///     moe = adam.step(moe, gradients)?;
/// }
/// println!("norm before clipping {}", adam.stats()?.norm);
/// # Ok(()) }
/// ```
///
/// A parameter without a gradient in a step stays as it is. Nothing of a step waits for a GPU, but for the first of several
/// ranks with a norm, which compare who has gradients. On a GPU a step writes in
/// place the parameters that its module alone holds; one that somebody else holds too (a clone of the module, a graph, a
/// chain) gets new memory of burn's, as those of the CPU do, and what else holds it is as it was.
#[derive(Debug)]
pub struct AdamW<B: AutodiffBackend + MoeBackend> {
    optimizer: optim::AdamW<CoreDevice<B>>,
    params: Vec<AdamWParam>,
}

impl<B: AutodiffBackend + MoeBackend> AdamW<B> {
    /// An optimizer of one rank, and of one group, over a module's trainable parameters; `device` is that of its layers.
    ///
    /// # Errors
    /// Errors of [`optim::AdamW::new`].
    pub fn new<M: Module<B>>(device: &CoreDevice<B>, module: &M, options: AdamWOptions) -> Result<Self> {
        Self::on(device, None, module, (AdamWParam::of_module::<B, M>(module), options, &[options.group]))
    }

    /// The same of some parameters, with options for each group, or without any for the one of [`AdamWOptions::group`].
    ///
    /// # Errors
    /// As [`new`](Self::new); a parameter that the module has not.
    pub fn with_groups<M: Module<B>>(
        device: &CoreDevice<B>,
        module: &M,
        params: Vec<AdamWParam>,
        options: AdamWOptions,
        groups: &[GroupOptions],
    ) -> Result<Self> {
        Self::on(device, None, module, (params, options, groups))
    }

    /// The same over ranks: `comm` is of all ranks that hold parts of the parameters, each rank once (collective). It
    /// carries the norm's sums alone: gradients that several ranks hold are summed before.
    ///
    /// # Errors
    /// As [`with_groups`](Self::with_groups).
    pub fn over_ranks<M: Module<B>>(
        device: &CoreDevice<B>,
        comm: Box<dyn Communicator<CoreDevice<B>>>,
        module: &M,
        params: Vec<AdamWParam>,
        options: AdamWOptions,
        groups: &[GroupOptions],
    ) -> Result<Self> {
        Self::on(device, Some(comm), module, (params, options, groups))
    }

    fn on<M: Module<B>>(
        device: &CoreDevice<B>,
        mut comm: Option<Box<dyn Communicator<CoreDevice<B>>>>,
        module: &M,
        (params, options, groups): (Vec<AdamWParam>, AdamWOptions, &[GroupOptions]),
    ) -> Result<Self> {
        let values = values::<B, M>(module);
        let checked = params.iter().map(|param| {
            find::<B>(&values, param)?;
            param.spec()
        });
        // The others wait to compare theirs.
        let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
        let specs = refuse_on_error_if_any(comm.as_deref_mut(), tag, checked.collect::<Result<Vec<_>>>())?;
        let optimizer = optim::AdamW::new(device, options, groups, specs, comm)?;
        let mut made = Self { optimizer, params };
        made.read_params(module)?;
        Ok(made)
    }

    /// Takes the module's values as main weights: after somebody else has changed them.
    ///
    /// # Errors
    /// A parameter that the module has not, or of another type; the device's.
    pub fn read_params<M: Module<B>>(&mut self, module: &M) -> Result<()> {
        let (device, values) = (self.optimizer.device().clone(), values::<B, M>(module));
        let values = self.params.iter().map(|param| find::<B>(&values, param)).collect::<Result<Vec<_>>>()?;
        let (params, optimizer) = (&self.params, &mut self.optimizer);
        let all = params.iter().zip(&values);
        let views = all.map(|(param, tensor)| B::Native::view(&device, Named { name: param.name(), tensor }));
        let views = views.collect::<Result<Vec<_>>>()?;
        between::<B::Native, _>(
            &device,
            |_| (),
            || views.into_iter().enumerate().try_for_each(|(index, view)| optimizer.read_param(index, view)),
        )
    }

    /// A step: the module with its new values. Every rank calls it, with gradients that have been summed over the ranks.
    /// What fails on one rank before the norm is told to the others.
    ///
    /// On an error the module is gone, with its parameters as they were or, where the step itself has failed, some of
    /// them new. A clone of it, for who goes on behind an error, shares its memory and stays as it was; what a step
    /// changes then gets new memory and is never written in place.
    ///
    /// # Errors
    /// As [`optim::AdamW::begin`]; a gradient of other dimensions than its parameter's; a parameter that the module has not.
    pub fn step<M: Module<B>>(&mut self, module: M, gradients: GradientsParams) -> Result<M> {
        let begun = self.optimizer.begun();
        let result = self.take_step(module, gradients);
        if let (Err(error), true) = (&result, self.optimizer.begun() == begun) {
            self.optimizer.refuse(error);
        }
        result
    }

    fn take_step<M: Module<B>>(&mut self, module: M, mut gradients: GradientsParams) -> Result<M> {
        let device = self.optimizer.device().clone();
        let fields = count_fields::<B, M>(&module);
        let absent = self.params.iter().find(|param| !fields.contains_key(&param.id()));
        absent.map_or(Ok(()), |param| Err(missing(param)))?;
        let given = self.params.iter().enumerate().filter_map(|(index, param)| {
            // burn keeps the tensor as its back end does, whatever number of dimensions is named here.
            let gradient = gradients.remove::<B::InnerBackend, 1>(param.id())?;
            Some((param.id(), (index, B::Native::contiguous(native::<B>(primitive(gradient))))))
        });
        let given: HashMap<_, _> = given.collect();
        let mut lend = LendParams::<B> { device: &device, params: &self.params, fields, given, lent: Ok(Vec::new()) };
        let module = module.map(&mut lend);
        let mut lent = lend.lent?;
        let (optimizer, params) = (&mut self.optimizer, &self.params);
        {
            let views = lent.iter().map(|LentParam { index, gradient, .. }| {
                B::Native::view(&device, Named { name: params[*index].name(), tensor: gradient })
            });
            let views = views.collect::<Result<Vec<_>>>()?;
            let mut all: Vec<_> = params.iter().map(|_| None).collect();
            for (LentParam { index, .. }, view) in lent.iter().zip(&views) {
                all[*index] = Some(view.borrow());
            }
            between::<B::Native, _>(&device, |_| (), || optimizer.begin(&all))?;
        }
        between::<B::Native, _>(
            &device,
            |_| (),
            || {
                let mut tensors = Vec::with_capacity(lent.len());
                for LentParam { index, gradient, output, before } in &mut lent {
                    let (index, name) = (*index, params[*index].name());
                    let mut into = B::Native::view_mut(output)?;
                    if let Some(before) = before {
                        // A step may be skipped, and leaves rows of padding.
                        let before = B::Native::view(&device, Named { name, tensor: before })?;
                        device.copy(before.data(), into.reborrow().into_data())?;
                    }
                    let gradient = B::Native::view(&device, Named { name, tensor: gradient })?;
                    tensors.push(StepTensor { index, param: into, gradient });
                }
                optimizer.update(tensors)
            },
        )?;
        let new = lent.into_iter().filter(|lent| lent.before.is_some());
        let new = new.map(|LentParam { index, output, .. }| Ok((params[index].id(), B::Native::float(output)?)));
        Ok(with_values::<B, M>(module, new.collect::<Result<Values<B::Native>>>()?))
    }

    /// Names the model whose state this is: saved states carry it, and one of another identity, or of none, is not
    /// loaded ([`optim::AdamW::set_identity`](crate::optim::AdamW::set_identity)). The same on all ranks, which a save
    /// compares.
    pub fn with_identity(mut self, identity: impl Into<String>) -> Self {
        self.optimizer.set_identity(identity);
        self
    }

    /// The loss, times the factor of [loss scaling](AdamWOptions::loss_scaling), in f32: its gradients are what `step`
    /// takes. The loss itself where there is none.
    ///
    /// # Errors
    /// The device's.
    pub fn scale_loss(&self, loss: Tensor<B, 1>) -> Result<Tensor<B, 1>> {
        if self.optimizer.options().loss_scaling.is_none() {
            return Ok(loss);
        }
        let (device, scale) = (self.optimizer.device(), self.optimizer.loss_scale()?);
        let like = B::to_native(primitive(loss.clone()));
        let mut output = B::Native::output(device, &like, ResultSpec { dtype: scale.dtype(), dims: &[1] })?;
        let copy = || device.copy(scale.view().data(), B::Native::view_mut(&mut output)?.into_data());
        between::<B::Native, _>(device, |_| (), copy)?;
        let scale: Tensor<B, 1> = tensor_of(B::from_native(B::Native::float(output)?));
        Ok(loss.cast(burn::tensor::DType::F32) * scale)
    }

    /// Norm, counts and factors of the last step. Waits for the device.
    ///
    /// # Errors
    /// The device's.
    pub fn stats(&self) -> Result<StepStats> {
        self.optimizer.stats()
    }

    /// Options of the groups.
    pub fn groups(&self) -> &[GroupOptions] {
        self.optimizer.groups()
    }

    /// Changes a group's options, from the next step on.
    ///
    /// # Errors
    /// A group that there is not; options out of range.
    pub fn set_group(&mut self, group: usize, options: GroupOptions) -> Result<()> {
        self.optimizer.set_group(group, options)
    }

    /// Writes the state to a folder of its own, as one step: [`optim::AdamW::save`](crate::optim::AdamW::save). Every
    /// rank calls it with the same folder, which ranks do not compare.
    ///
    /// # Errors
    /// As there.
    pub fn save(&mut self, dir: impl AsRef<Path>) -> Result<()> {
        self.optimizer.save(dir)
    }

    /// Goes on from a saved state, which any number of ranks may have written, candle's too: the module with bf16 and
    /// f16 parameters of the saved main weights, rounded; f32 ones are to be loaded with the model. `steps`: those that
    /// the model has taken, where it is known. Every rank calls it.
    ///
    /// # Errors
    /// As [`optim::AdamW::load_at`](crate::optim::AdamW::load_at); a parameter that the module has not. The module is gone
    /// then: load into one that can be made again, or into a clone.
    pub fn load<M: Module<B>>(&mut self, dir: impl AsRef<Path>, steps: impl Into<Option<u64>>, module: M) -> Result<M> {
        let (device, values) = (self.optimizer.device().clone(), values::<B, M>(&module));
        let absent = self.params.iter().find(|param| !values.contains_key(&param.id()));
        let able = absent.map_or(Ok(()), |param| Err(missing(param)));
        self.optimizer.load_state(dir.as_ref(), steps.into(), able)?;
        let mut new = Values::<B::Native>::new();
        for (index, param) in self.params.iter().enumerate() {
            let value = find::<B>(&values, param)?;
            let mut output = new_value::<B>(&device, param, &value)?;
            let write = || {
                let mut into = B::Native::view_mut(&mut output)?;
                let before = B::Native::view(&device, Named { name: param.name(), tensor: &value })?;
                device.copy(before.data(), into.reborrow().into_data())?;
                self.optimizer.write_param(index, into)
            };
            between::<B::Native, _>(&device, |_| (), write)?;
            new.insert(param.id(), B::Native::float(output)?);
        }
        Ok(with_values::<B, M>(module, new))
    }

    /// In place of a step, where this rank cannot come to it: the others, which wait there for the norm where there is
    /// one, get the reason.
    pub fn refuse(&mut self, reason: impl Display) {
        self.optimizer.refuse(reason);
    }
}
