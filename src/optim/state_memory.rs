//! Memory of an optimizer's state, made before its first step.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::optimizer::{COEFFICIENTS, GROUP_STATE, SETTINGS, STATE_NUMBERS};
use crate::tensor::Tensor;

use super::{AdamWOptions, GroupOptions, ParamSpec, StepDevice};

/// State kept for a parameter.
#[derive(Debug)]
pub(super) struct ParamState<D: StepDevice> {
    /// None where the parameter itself is F32.
    pub(super) main: Option<Tensor<D>>,
    pub(super) first: Tensor<D>,
    pub(super) second: Tensor<D>,
}

/// What an optimizer has on the device beside its plan of the norm.
#[derive(Debug)]
pub(super) struct StateMemory<D: StepDevice> {
    /// One a parameter, of zeros.
    pub(super) params: Vec<ParamState<D>>,
    /// The groups' options.
    pub(super) settings: Tensor<D>,
    pub(super) state: Tensor<D>,
    pub(super) coefficients: Tensor<D>,
}

impl<D: StepDevice> StateMemory<D> {
    pub(super) fn new(
        device: &D,
        options: &AdamWOptions,
        groups: &[GroupOptions],
        specs: &[ParamSpec],
    ) -> Result<Self> {
        let params = specs.iter().map(|spec| {
            let dims = [spec.shard.count()];
            let main = (spec.dtype != DType::F32).then(|| Tensor::zeros(device, DType::F32, &dims)).transpose()?;
            let moment = || Tensor::zeros(device, options.moments, &dims);
            Ok(ParamState { main, first: moment()?, second: moment()? })
        });
        Ok(Self {
            params: params.collect::<Result<_>>()?,
            settings: settings(device, groups)?,
            state: Tensor::zeros(device, DType::F64, &[STATE_NUMBERS + GROUP_STATE * groups.len()])?,
            coefficients: Tensor::zeros(device, DType::F64, &[groups.len(), COEFFICIENTS])?,
        })
    }
}

/// The groups' options as kernels read them.
pub(super) fn settings<D: StepDevice>(device: &D, groups: &[GroupOptions]) -> Result<Tensor<D>> {
    let rows = groups.iter().flat_map(|g| [g.lr, g.betas[0], g.betas[1], g.eps, g.weight_decay]);
    device.write(&rows.collect::<Vec<_>>(), DType::F64, &[groups.len(), SETTINGS])
}

/// The product of so many factors, as steps make it.
pub(super) fn power(beta: f64, steps: u64) -> f64 {
    let mut power = 1.0;
    for _ in 0..steps {
        let next = power * beta;
        // Near 0 a product rounds back to itself, and stays.
        if next == power {
            break;
        }
        power = next;
    }
    power
}
