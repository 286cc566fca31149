//! The optimizer on its device, behind a trait that names none.

use std::fmt::{Debug, Display};
use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor};

use crate::error::Error;
use crate::optim::{self, AdamWOptions, GroupOptions, StepStats, StepTensor};

use crate::candle::device::{CandleDevice, into_candle, storage_place, with_views};
use crate::candle::error::reason_of;
use crate::candle::views_mut::with_vars_mut;

use super::param::{AdamWParam, CALL};

/// An optimizer, whatever its device.
pub(super) trait DeviceAdamW: Debug + Send {
    fn options(&self) -> AdamWOptions;
    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<crate::cuda::Cuda>;
    fn set_group(&mut self, group: usize, options: GroupOptions) -> crate::Result<()>;
    fn read_params(&mut self) -> Result<()>;
    fn step(&mut self, gradients: &GradStore) -> Result<()>;
    fn loss_scale(&self) -> Result<Tensor>;
    fn stats(&self) -> crate::Result<StepStats>;
    fn save(&mut self, dir: &Path) -> crate::Result<()>;
    fn load(&mut self, dir: &Path, steps: Option<u64>) -> Result<u64>;
    fn refuse(&mut self, reason: &dyn Display);
    /// Ranks that hold parts of the parameters.
    fn ranks(&self) -> usize;
    fn set_identity(&mut self, identity: String);
}

/// An optimizer and its variables.
#[derive(Debug)]
pub(super) struct AdamWOnDevice<D: CandleDevice> {
    pub(super) optimizer: optim::AdamW<D>,
    pub(super) params: Vec<AdamWParam>,
    pub(super) device: Device,
}

impl<D: CandleDevice> AdamWOnDevice<D> {
    fn take_step(&mut self, gradients: &GradStore) -> Result<()> {
        let device = self.optimizer.device().clone();
        let given = self.params.iter().enumerate();
        let given = given.filter_map(|(i, param)| Some((i, param, gradients.get(&param.var)?)));
        let given = given.map(|(i, param, gradient)| {
            Error::check_shape(CALL, &format!("gradient of {}", param.name), param.var.dims(), gradient.dims())?;
            Ok((i, param, apart(&param.var, gradient)?))
        });
        let given = given.collect::<Result<Vec<(usize, &AdamWParam, Tensor)>>>()?;
        let named: Vec<(&str, &Tensor)> = given.iter().map(|(_, p, gradient)| (p.name.as_str(), gradient)).collect();
        let vars: Vec<&Tensor> = given.iter().map(|(_, param, _)| param.var.as_tensor()).collect();
        let (optimizer, count) = (&mut self.optimizer, self.params.len());
        with_views(&device, CALL, &named, |views| {
            let mut all: Vec<_> = (0..count).map(|_| None).collect();
            for ((i, ..), view) in given.iter().zip(views) {
                all[*i] = Some(view.borrow());
            }
            optimizer.begin(&all)?;
            with_vars_mut(&device, CALL, &vars, |first, mut params| {
                let tensors = params.iter_mut().zip(&given[first..]).zip(&views[first..]);
                let tensors = tensors.map(|((param, (index, ..)), view)| {
                    let (index, param, gradient) = (*index, param.reborrow(), view.borrow());
                    StepTensor { index, param, gradient }
                });
                optimizer.update(tensors.collect())
            })
        })?;
        Ok(())
    }
}

impl<D: CandleDevice> DeviceAdamW for AdamWOnDevice<D> {
    fn options(&self) -> AdamWOptions {
        *self.optimizer.options()
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self) -> Option<crate::cuda::Cuda> {
        self.optimizer.device().cuda()
    }

    fn set_group(&mut self, group: usize, options: GroupOptions) -> crate::Result<()> {
        self.optimizer.set_group(group, options)
    }

    fn read_params(&mut self) -> Result<()> {
        let device = self.optimizer.device().clone();
        for (index, param) in self.params.iter().enumerate() {
            let var: &Tensor = &param.var;
            with_views(&device, CALL, &[(&param.name, var)], |views| {
                self.optimizer.read_param(index, views[0].borrow())
            })?;
        }
        Ok(())
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let begun = self.optimizer.begun();
        let result = self.take_step(gradients);
        if let (Err(error), true) = (&result, self.optimizer.begun() == begun) {
            self.optimizer.refuse(reason_of(CALL, error));
        }
        result
    }

    fn loss_scale(&self) -> Result<Tensor> {
        Ok(into_candle(self.optimizer.loss_scale()?, &[], &self.device)?)
    }

    fn stats(&self) -> crate::Result<StepStats> {
        self.optimizer.stats()
    }

    fn save(&mut self, dir: &Path) -> crate::Result<()> {
        self.optimizer.save(dir)
    }

    fn refuse(&mut self, reason: &dyn Display) {
        self.optimizer.refuse(reason);
    }

    fn ranks(&self) -> usize {
        self.optimizer.ranks()
    }

    fn set_identity(&mut self, identity: String) {
        self.optimizer.set_identity(identity);
    }

    fn load(&mut self, dir: &Path, steps: Option<u64>) -> Result<u64> {
        let steps = self.optimizer.load_state(dir, steps, Ok(()))?;
        let device = self.optimizer.device().clone();
        let vars: Vec<&Tensor> = self.params.iter().map(|param| param.var.as_tensor()).collect();
        let optimizer = &self.optimizer;
        with_vars_mut(&device, CALL, &vars, |first, params| {
            params.into_iter().enumerate().try_for_each(|(i, param)| optimizer.write_param(first + i, param))
        })?;
        Ok(steps)
    }
}

/// The gradient in contiguous memory that is not the variable's own: reading it must not keep the variable from being
/// written.
fn apart(var: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let gradient = gradient.contiguous()?;
    if storage_place(var) == storage_place(&gradient) { gradient.copy() } else { Ok(gradient) }
}
