//! Values of a module's parameters as an optimizer reads and writes them.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata};

use crate::error::{Error, Result};

use super::adamw_param::{AdamWParam, CALL};
use super::backend::{CoreDevice, LayerBackend, MoeBackend, Named, NativeMemory, ResultSpec, core_dtype, primitive};
use super::shard_param::tensor;

/// A module's values by parameter.
pub(super) type Values<B> = HashMap<ParamId, FloatTensor<B>>;
/// Memory for a parameter's new value.
type NewValue<B> = <<B as LayerBackend>::Native as NativeMemory>::Output;

/// Memory of a parameter's sizes.
pub(super) fn new_value<B: MoeBackend>(
    device: &CoreDevice<B>,
    param: &AdamWParam,
    value: &FloatTensor<B::Native>,
) -> Result<NewValue<B>> {
    let dtype = core_dtype(CALL, param.name(), value.dtype())?;
    B::Native::output(device, value, ResultSpec { dtype, dims: &value.shape() })
}

pub(super) fn missing(param: &AdamWParam) -> Error {
    Error::invalid(CALL, format!("parameter {}", param.name()), "one of the module", "none of this id")
}

/// A module's value of a parameter, contiguous.
pub(super) fn find<B: MoeBackend>(values: &Values<B::Native>, param: &AdamWParam) -> Result<FloatTensor<B::Native>> {
    values.get(&param.id()).cloned().map(B::Native::contiguous).ok_or_else(|| missing(param))
}

/// A parameter that a step changes.
pub(super) struct LentParam<B: NativeMemory> {
    pub(super) index: usize,
    pub(super) gradient: FloatTensor<B>,
    /// Memory for its new value.
    pub(super) output: B::Output,
    /// The value before, where the new one gets other memory.
    pub(super) before: Option<FloatTensor<B>>,
}

/// Lends the parameters of a module for which there are gradients: in place where the module alone holds the tensor, in
/// one field.
pub(super) struct LendParams<'a, B: MoeBackend> {
    pub(super) device: &'a CoreDevice<B>,
    pub(super) params: &'a [AdamWParam],
    /// The module's fields of each id.
    pub(super) fields: HashMap<ParamId, usize>,
    /// Index and gradient of those to come.
    pub(super) given: HashMap<ParamId, (usize, FloatTensor<B::Native>)>,
    pub(super) lent: Result<Vec<LentParam<B::Native>>>,
}

impl<B: AutodiffBackend + MoeBackend> LendParams<'_, B> {
    fn lend(
        &self,
        (index, gradient): (usize, FloatTensor<B::Native>),
        value: &FloatTensor<B::Native>,
    ) -> Result<LentParam<B::Native>> {
        let param = &self.params[index];
        Error::check_shape(CALL, &format!("gradient of {}", param.name()), &value.shape(), &gradient.shape())?;
        let named = Named { name: param.name(), tensor: value };
        // Other fields of the id, which may have memory of their own, get the new value behind the step.
        let one_field = self.fields.get(&param.id()) == Some(&1);
        let own = if one_field { B::Native::in_place(self.device, named)? } else { None };
        let (output, before) = match own {
            Some(own) => (own, None),
            None => (new_value::<B>(self.device, param, value)?, Some(value.clone())),
        };
        Ok(LentParam { index, gradient, output, before })
    }
}

impl<B: AutodiffBackend + MoeBackend> ModuleMapper<B> for LendParams<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(given) = self.given.remove(&param.id) else { return param };
        let (id, value, mapper) = param.consume();
        let tracked = value.is_require_grad();
        // The only holder from here on, if there was none but the module.
        let value = B::Native::contiguous(B::to_native(primitive(value)));
        let lent = self.lend(given, &value);
        match (&mut self.lent, lent) {
            (Ok(all), Ok(lent)) => all.push(lent),
            (all @ Ok(_), Err(error)) => *all = Err(error),
            (Err(_), _) => {}
        }
        Param::from_mapped_value(id, tensor::<B, D>(value).set_require_grad(tracked), mapper)
    }
}

pub(super) fn values<B: AutodiffBackend + MoeBackend, M: Module<B>>(module: &M) -> Values<B::Native> {
    let mut collect = CollectValues::<B>(HashMap::new());
    module.visit(&mut collect);
    collect.0
}

struct CollectValues<B: MoeBackend>(Values<B::Native>);

impl<B: AutodiffBackend + MoeBackend> ModuleVisitor<B> for CollectValues<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.insert(param.id, B::to_native(primitive(param.val())));
    }
}

/// Fields of a module by the id of their parameter.
pub(super) fn count_fields<B: AutodiffBackend + MoeBackend, M: Module<B>>(module: &M) -> HashMap<ParamId, usize> {
    let mut count = CountFields(HashMap::new());
    module.visit(&mut count);
    count.0
}

struct CountFields(HashMap<ParamId, usize>);

impl<B: MoeBackend> ModuleVisitor<B> for CountFields {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        *self.0.entry(param.id).or_default() += 1;
    }
}

pub(super) fn with_values<B: AutodiffBackend + MoeBackend, M: Module<B>>(module: M, values: Values<B::Native>) -> M {
    module.map(&mut SetValues::<B>(values))
}

struct SetValues<B: MoeBackend>(Values<B::Native>);

impl<B: AutodiffBackend + MoeBackend> ModuleMapper<B> for SetValues<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(value) = self.0.get(&param.id).cloned() else { return param };
        let (id, before, mapper) = param.consume();
        let value = tensor::<B, D>(value).set_require_grad(before.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }
}
