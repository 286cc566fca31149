//! Texts that ranks tell each other of themselves.

use crate::comm::{Op, Tag};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::dispatcher_state::DispatcherState;

/// Most bytes of a reason that ranks tell each other.
const REASON: usize = 512;

/// What each rank has found, as one outcome of all: this rank's own, or the first error of another.
pub(crate) fn agree_on_found<D: Kernels, T>(
    core: &mut DispatcherState<D>,
    call: &'static str,
    found: Result<T>,
) -> Result<Result<T>> {
    let reason = found.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let reports = gather_reports(core, &reason)?;
    Ok(found.and_then(|found| match reports.into_iter().enumerate().find(|(_, reason)| !reason.is_empty()) {
        Some((peer, reason)) => Err(Error::Peer { call, rank: core.rank(), peer, reason }),
        None => Ok(found),
    }))
}

/// The text of every rank.
pub(crate) fn gather_reports<D: Kernels>(core: &mut DispatcherState<D>, text: &str) -> Result<Vec<String>> {
    let mut bytes = [0; REASON];
    let end = (0..=text.len().min(REASON)).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
    let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
    let buffers = || {
        let mut send = Tensor::empty(&core.device, DType::U8, &[REASON])?;
        core.device.upload(&bytes, send.view_mut())?;
        Ok((send, Tensor::empty(&core.device, DType::U8, &[core.ranks(), REASON])?))
    };
    let buffers = buffers();
    let (send, mut recv) = core.check_or_refuse(tag, buffers)?;
    core.comm.all_gather(tag, send.view(), recv.view_mut())?;
    let all = core.device.download(recv.view());
    let all = core.check_or_refuse(tag, all)?;
    let one = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
    Ok(all.chunks_exact(REASON).map(one).collect())
}
