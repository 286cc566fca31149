//! Values of a module's parameters, by name.

use std::collections::BTreeMap;

use burn::module::{ModuleMapper, ModuleVisitor, Param as BurnParam};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};

use crate::lm::{Param, is_of_layer};
use crate::ranks::Values;

/// Names of the parameters on the way through a module.
#[derive(Default)]
struct Path(Vec<String>);

impl Path {
    fn name(&self) -> String {
        self.0.join(".")
    }
}

/// Gives every parameter its first values.
pub struct Fill<'a> {
    path: Path,
    params: &'a [Param],
    /// Place among those that divide the experts, and their number.
    of: (usize, usize),
    /// Type of the layers' parameters.
    layer_dtype: DType,
    pub missing: Vec<String>,
}

impl<'a> Fill<'a> {
    /// Of these values, the part of rank `of.0` of `of.1`.
    pub fn new(params: &'a [Param], of: (usize, usize), layer_dtype: DType) -> Self {
        Self { path: Path::default(), params, of, layer_dtype, missing: Vec::new() }
    }
}

impl<B: Backend> ModuleMapper<B> for Fill<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.0.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.0.pop();
    }
    fn map_float<const D: usize>(&mut self, param: BurnParam<Tensor<B, D>>) -> BurnParam<Tensor<B, D>> {
        let name = self.path.name();
        let Some(first) = self.params.iter().find(|p| p.name == name) else {
            self.missing.push(name);
            return param;
        };
        let (dims, values) = first.share(self.of.0, self.of.1);
        let values = values.to_vec();
        let dtype = if is_of_layer(&name) { self.layer_dtype } else { DType::F32 };
        param.map(|old| {
            let values = Tensor::<B, D>::from_data(TensorData::new(values, dims), &old.device());
            values.cast(dtype).require_grad()
        })
    }
}

/// Copies weights, and gradients where there are some.
pub struct Snapshot<'a> {
    path: Path,
    gradients: Option<&'a GradientsParams>,
    pub params: BTreeMap<String, Values>,
}

impl<'a> Snapshot<'a> {
    pub fn new(gradients: Option<&'a GradientsParams>) -> Self {
        Self { path: Path::default(), gradients, params: BTreeMap::new() }
    }
}

impl<A: AutodiffBackend> ModuleVisitor<A> for Snapshot<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.0.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.0.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &BurnParam<Tensor<A, D>>) {
        let flat = |t: Tensor<A::InnerBackend, D>| t.into_data().iter::<f32>().collect::<Vec<_>>();
        let gradient = self.gradients.and_then(|all| all.get::<A::InnerBackend, D>(param.id));
        let gradient = gradient.map(flat).unwrap_or_default();
        self.params.insert(self.path.name(), Values { weight: flat(param.val().inner()), gradient });
    }
}
