//! Bytes that ranks give each other beside the layers' own collectives.
#![allow(dead_code, reason = "every program takes a part")]

use std::error::Error;

use moebius::candle::DeviceGroup;
use moebius::comm::{Communicator, Tag};
use moebius::cpu::Cpu;
use moebius::ep::EpGroup;
use moebius::kernels::Kernels;
use moebius::{DType, Tensor};

type AnyError = Box<dyn Error + Send + Sync>;

/// Every rank's results, in rank order.
///
/// # Errors
/// A collective's.
pub fn gather(group: &DeviceGroup, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, AnyError> {
    if let Some(group) = group.on::<Cpu>() {
        return gather_on(group, tag, own);
    }
    #[cfg(feature = "cuda")]
    if let Some(group) = group.on::<moebius::cuda::Cuda>() {
        return gather_on(group, tag, own);
    }
    Err("a group on a device that the examples do not know".into())
}

fn gather_on<D: Kernels>(group: &EpGroup<D>, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, AnyError> {
    let mut group = group.lock();
    let device = group.device().clone();
    gather_over(&device, group.dispatcher().communicator(), tag, own)
}

/// The same over a communicator.
///
/// # Errors
/// The collective's.
pub fn gather_over<D: Kernels>(
    device: &D,
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, AnyError> {
    let ranks = comm.size();
    let mut exchange = |bytes: &[u8]| -> moebius::Result<Vec<u8>> {
        let mut send = Tensor::empty(device, DType::U8, &[bytes.len()])?;
        device.upload(bytes, send.view_mut())?;
        let mut recv = Tensor::empty(device, DType::U8, &[ranks, bytes.len()])?;
        comm.all_gather(tag, send.view(), recv.view_mut())?;
        device.download(recv.view())
    };
    let lengths = exchange(&(own.len() as u64).to_le_bytes())?;
    let lengths = || lengths.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n) as usize);
    let most = lengths().max().unwrap_or(0).max(1);
    let mut padded = own.to_vec();
    padded.resize(most, 0);
    let all = exchange(&padded)?;
    Ok(all.chunks_exact(most).zip(lengths()).map(|(bytes, length)| bytes[..length].to_vec()).collect())
}
