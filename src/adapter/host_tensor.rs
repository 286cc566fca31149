//! Collectives over tensors of the host, for a framework whose memory the device need not share.

use crate::comm::Op;
use crate::dtype::DType;
use crate::ep::EpGroup;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::collectives::{broadcast, refuse};
use super::group::{ErasedGroup, match_device};

/// A tensor of the host.
#[derive(Debug)]
pub(crate) struct HostTensor<'a> {
    pub(crate) bytes: &'a mut [u8],
    pub(crate) dtype: DType,
    pub(crate) dims: &'a [usize],
}

impl HostTensor<'_> {
    /// Makes it rank 0's, over the ranks of a layer's group.
    pub(crate) fn broadcast(self, group: &ErasedGroup, layer: u32) -> Result<()> {
        match_device!(group, group => self.broadcast_on(group, layer))
    }

    fn broadcast_on<D: Kernels>(self, group: &EpGroup<D>, layer: u32) -> Result<()> {
        let Self { bytes, dtype, dims } = self;
        let made = broadcast(group, layer, |device| {
            let mut values = Tensor::empty(device, dtype, dims)?;
            device.upload(bytes, values.view_mut())?;
            Ok(values)
        })?;
        let device = group.lock().device().clone();
        let downloaded = device.download(made.view());
        // The others are on their way to the next tensor's broadcast.
        let downloaded = downloaded.inspect_err(|error| refuse(group, layer, Op::Weights, &error.to_string()))?;
        bytes.copy_from_slice(&downloaded);
        Ok(())
    }
}
