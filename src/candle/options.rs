//! How a module's parameters are loaded.

use std::fmt;

use candle_core::DType;

use crate::checkpoint::{LoadOptions, Progress};
use crate::error::{Error, Result};

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
#[derive(Default)]
pub struct LoadAs<'a> {
    pub(super) params: Parameters,
    dtype: Option<DType>,
    pub(super) progress: Option<&'a mut dyn FnMut(Progress<'_>)>,
}

impl fmt::Debug for LoadAs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadAs").field("params", &self.params).field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

impl From<Parameters> for LoadAs<'_> {
    fn from(params: Parameters) -> Self {
        Self::new(params)
    }
}

impl<'a> LoadAs<'a> {
    /// In the types that are stored.
    pub fn new(params: Parameters) -> Self {
        Self { params, ..Self::default() }
    }

    /// In this floating type, as [`LoadOptions::dtype`] says.
    pub fn dtype(self, dtype: DType) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Tells after each tensor how far it has come.
    pub fn progress(self, progress: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self { progress: Some(progress), ..self }
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
