//! Collectives over tensors of the host, for a framework whose memory the device need not share.

use crate::dtype::DType;
use crate::ep::EpGroup;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::collectives::{ParamCollective, exchange};
use super::group::AnyGroup;

/// A tensor of the host.
#[derive(Debug)]
pub(crate) struct HostTensor<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) dtype: DType,
    pub(crate) dims: &'a [usize],
}

impl HostTensor<'_> {
    /// Runs a collective of a layer over it, in place.
    pub(crate) fn exchange(self, group: &AnyGroup, layer: u32, collective: ParamCollective) -> Result<()> {
        match group {
            AnyGroup::Cpu(group) => self.exchange_on(group, layer, collective),
            #[cfg(feature = "cuda")]
            AnyGroup::Cuda(group) => self.exchange_on(group, layer, collective),
        }
    }

    fn exchange_on<D: Kernels>(self, group: &EpGroup<D>, layer: u32, collective: ParamCollective) -> Result<()> {
        let Self { bytes, dtype, dims } = self;
        let made = exchange(group, layer, collective, |device| {
            let mut values = Tensor::empty(device, dtype, dims)?;
            device.upload(bytes, values.view_mut())?;
            Ok(values)
        })?;
        let device = group.lock().device().clone();
        bytes.copy_from_slice(&device.download(made.view())?);
        Ok(())
    }
}
