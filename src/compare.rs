//! Numbers of all ranks, meetings, and what ranks compare as they form something together: the first field in which they
//! differ.

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, ReduceOp, Tag};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// Numbers of every rank, in rank order, each rank's as many (one all-gather, which is waited for). What fails on a rank
/// by itself is told to the others: before the all-gather in it, behind it in their next collective.
pub(crate) fn gather_numbers<D: Kernels>(
    device: &D,
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    own: &[u64],
) -> Result<Vec<u64>> {
    let bytes: Vec<u8> = own.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffers = Tensor::empty(device, DType::U8, &[bytes.len()]).and_then(|mut send| {
        device.upload(&bytes, send.view_mut())?;
        Ok((send, Tensor::empty(device, DType::U8, &[comm.size(), bytes.len()])?))
    });
    let (send, mut recv) = refuse_on_error(comm, tag, buffers)?;
    comm.all_gather(tag, send.view(), recv.view_mut())?;
    let all = refuse_on_error(comm, tag, device.download(recv.view()))?;
    Ok(all.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
}

/// Texts of every rank, in rank order (two all-gathers, which are waited for), as [`gather_numbers`].
pub(crate) fn gather_texts<D: Kernels>(
    device: &D,
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    own: &str,
) -> Result<Vec<String>> {
    let lengths = gather_numbers(device, comm, tag, &[own.len() as u64])?;
    let words = lengths.iter().max().map_or(0, |most| most.div_ceil(8)) as usize;
    if words == 0 {
        return Ok(vec![String::new(); lengths.len()]);
    }
    let mut padded = own.as_bytes().to_vec();
    padded.resize(8 * words, 0);
    let padded: Vec<u64> = padded.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let all = gather_numbers(device, comm, tag, &padded)?;
    let texts = all.chunks_exact(words).zip(&lengths).map(|(words, length)| {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        let bytes: Vec<u8> = bytes.take(usize::try_from(*length).unwrap_or(usize::MAX)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    });
    Ok(texts.collect())
}

/// Brings all ranks together without a wait of the host for a GPU, as a barrier has it: behind a failure of one of them it
/// fails on all.
pub(crate) fn meet<D: Kernels>(device: &D, comm: &mut dyn Communicator<D>, tag: Tag) -> Result<()> {
    let nothing = Tensor::zeros(device, DType::F32, &[1]);
    let mut nothing = refuse_on_error(comm, tag, nothing)?;
    comm.all_reduce(tag, ReduceOp::Max, nothing.view_mut())
}

/// A field that ranks must have alike, as a number that travels and as text.
pub(crate) struct ComparedField {
    pub(crate) name: &'static str,
    pub(crate) value: u64,
    /// A rank's value in words.
    pub(crate) text: fn(u64) -> String,
}

impl ComparedField {
    /// One whose number says it.
    pub(crate) fn number(name: &'static str, value: u64) -> Self {
        Self { name, value, text: |value| value.to_string() }
    }

    /// What [`gather_numbers`] takes.
    pub(crate) fn values(fields: &[Self]) -> Vec<u64> {
        fields.iter().map(|field| field.value).collect()
    }
}

/// Refuses fields of a rank other than this one's, in the first that differs; `all` has every rank's values.
pub(crate) fn compare_fields(call: &'static str, rank: usize, fields: &[ComparedField], all: &[u64]) -> Result<()> {
    for (i, ComparedField { name, value, text }) in fields.iter().enumerate() {
        let mut theirs = all.iter().skip(i).step_by(fields.len());
        if let Some(peer) = theirs.position(|other| other != value) {
            let (field, value) = ((*name).to_string(), text(*value));
            let peer_value = text(all[peer * fields.len() + i]);
            return Err(Error::ConfigMismatch { call, field, rank, value, peer, peer_value });
        }
    }
    Ok(())
}
