//! How a module's parameters are loaded.

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};

use crate::adapter;
use crate::checkpoint::{LoadOptions, ShardOptions};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::etp::Chain;

use super::device::{CandleDevice, into_candle};
use super::group::DeviceGroup;

/// Kind of a module's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Parameters {
    /// Constants, for inference: nothing is kept for a backward on their account.
    #[default]
    Frozen,
    /// Variables, for an optimizer.
    Trainable,
}

/// How [`ExpertParallelMoE::from_checkpoint`](super::ExpertParallelMoE::from_checkpoint) loads. [`Parameters`] convert
/// into it: those, in the types that are stored.
///
/// ```
/// use candle_core::DType;
/// use moebius::candle::{LoadAs, Parameters};
///
/// let mut report = |p: moebius::checkpoint::Progress| eprintln!("{}: {} of {} bytes", p.tensor, p.done, p.total);
/// let options = LoadAs::new(Parameters::Trainable).dtype(DType::F32).progress(&mut report);
/// ```
pub type LoadAs<'a> = adapter::LoadAs<'a, DType, Parameters>;

impl From<Parameters> for LoadAs<'_> {
    fn from(params: Parameters) -> Self {
        Self::new(params)
    }
}

impl LoadAs<'_> {
    /// In the types that are stored.
    pub fn new(params: Parameters) -> Self {
        Self::of(params)
    }

    /// Routed experts stay in NVFP4, MXFP4 or fp8 blocks, as they are stored, and products take them so; they are frozen
    /// then. See [`ExpertParallelMoE::from_quantized`](super::ExpertParallelMoE::from_quantized).
    pub fn quantized(self) -> Self {
        self.keep_quantized()
    }

    /// Routed experts are frozen shards in page-locked memory of the host, and come to the device a layer ahead of their
    /// use: for [`ExpertParallelMoE::from_checkpoint_sharded`](super::ExpertParallelMoE::from_checkpoint_sharded) over a
    /// chain of this rank alone, quantized or in a floating type. [`HostExperts`](super::HostExperts) makes such a chain.
    pub fn experts_on_host(self) -> Self {
        self.keep_on_host()
    }

    /// The same for a rank of a group.
    pub(super) fn options(&self, group: &DeviceGroup) -> Result<LoadOptions> {
        let dtype = self.dtype.map(own_dtype).transpose()?;
        Ok(LoadOptions { rank: group.rank(), ranks: group.ranks(), dtype })
    }
}

fn own_dtype(dtype: DType) -> Result<crate::DType> {
    match dtype {
        DType::F64 => Ok(crate::DType::F64),
        DType::F32 => Ok(crate::DType::F32),
        DType::F16 => Ok(crate::DType::F16),
        DType::BF16 => Ok(crate::DType::BF16),
        other => Err(Error::invalid("LoadAs", "dtype", "f64, f32, f16 or bf16", other.as_str())),
    }
}

/// A tensor from a checkpoint as candle's.
pub(super) fn tensor(t: crate::Tensor<Cpu>, device: &Device, params: Parameters) -> CandleResult<Tensor> {
    let dims = t.dims().to_vec();
    let t = into_candle(t, &dims, &Device::Cpu)?.to_device(device)?;
    match params {
        Parameters::Trainable => Ok(Var::from_tensor(&t)?.into_inner()),
        Parameters::Frozen => Ok(t),
    }
}

/// This rank's place in a chain, as a checkpoint cuts for it.
pub(super) fn place_in<D: CandleDevice>(chain: &Chain<D>) -> ShardOptions {
    ShardOptions { rank: chain.rank(), ranks: chain.ranks(), pad: chain.options().pad }
}
