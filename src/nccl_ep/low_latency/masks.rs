//! Ranks that were late: they are skipped, told of, and taken in again.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::nccl_ep::rules::NcclEpResult;
use crate::nccl_ep::{NcclEpError, result};
use crate::tensor::Tensor;

use super::LowLatencyGroup;

impl LowLatencyGroup {
    /// Refuses what only groups with a timeout have.
    fn masked(&self, call: &'static str) -> NcclEpResult<()> {
        match self.options.timeout {
            Some(_) => Ok(()),
            None => Err(NcclEpError::Argument {
                call,
                name: "timeout",
                expected: "some, in the group's options".to_string(),
                found: "none".to_string(),
            }),
        }
    }

    /// Whether a rank was late in a call that has ended, since [`forget_late`](Self::forget_late). Waits for nothing.
    ///
    /// # Errors
    /// The group was made without a timeout; a call of the library that failed.
    pub fn was_late(&self) -> Result<bool> {
        const CALL: &str = "LowLatencyGroup::was_late";
        self.masked(CALL)?;
        let raw = self.raw();
        // SAFETY: the group lives and has masks.
        self.raw_group().with(CALL, |library, _| unsafe { result::async_error(library, raw) }).map(|flag| flag != 0)
    }

    /// Clears what [`was_late`](Self::was_late) tells.
    ///
    /// # Errors
    /// As [`was_late`](Self::was_late).
    pub fn forget_late(&self) -> Result<()> {
        const CALL: &str = "LowLatencyGroup::forget_late";
        self.masked(CALL)?;
        let raw = self.raw();
        // SAFETY: the group lives and has masks.
        self.raw_group().with(CALL, |library, _| unsafe { result::error_clear(library, raw) })
    }

    /// Which ranks take part, as this rank has it. Waits for the stream.
    ///
    /// # Errors
    /// As [`was_late`](Self::was_late).
    pub fn active(&self) -> Result<Vec<bool>> {
        const CALL: &str = "LowLatencyGroup::active";
        self.masked(CALL)?;
        let (raw, cuda) = (self.raw(), self.cuda());
        let mut mask = Tensor::zeros(cuda, DType::I32, &[self.ranks()])?;
        let to = mask.view_mut().into_data().address() as *mut std::ffi::c_int;
        // SAFETY: the group lives and has masks; the tensor has a number a rank and is given back behind the stream.
        self.raw_group().with(CALL, |library, stream| unsafe { result::mask_query(library, raw, to, stream) })?;
        Ok(cuda.read(mask.view())?.iter().map(|v| *v != 0.0).collect())
    }

    /// Skips ranks from now on, here; every rank decides for itself.
    ///
    /// # Errors
    /// As [`was_late`](Self::was_late); not one entry a rank; a graph being captured.
    pub fn set_active(&self, active: &[bool]) -> Result<()> {
        const CALL: &str = "LowLatencyGroup::set_active";
        self.masked(CALL)?;
        Error::check_shape(CALL, "active", &[self.ranks()], &[active.len()])?;
        self.cuda().not_captured(CALL, "copy from the host")?;
        let (raw, from): (_, Vec<_>) = (self.raw(), active.iter().map(|a| i32::from(*a)).collect());
        // SAFETY: the group lives and has masks; the numbers live past the wait below.
        self.raw_group().with(CALL, |library, stream| unsafe { result::mask_update(library, raw, &from, stream) })?;
        self.cuda().check()
    }

    /// Takes every rank in again. All ranks call it within the timeout of each other, when nothing of the group runs;
    /// for ranks that were late. One that is gone needs a new communicator and a new group.
    ///
    /// # Errors
    /// As [`was_late`](Self::was_late); no handle was made yet.
    pub fn readmit(&self) -> Result<()> {
        const CALL: &str = "LowLatencyGroup::readmit";
        self.masked(CALL)?;
        let raw = self.raw();
        self.cuda().check()?;
        // SAFETY: the group lives and has masks; the stream was waited for.
        self.raw_group().with(CALL, |library, stream| unsafe { result::mask_clean(library, raw, stream) })?;
        self.cuda().check()?;
        self.forget_late()
    }
}
