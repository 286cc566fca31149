//! How fast memory of the host comes to a device: what a model with experts on the host cannot be faster than.

use std::time::Instant;

use moebius::candle::DeviceGroup;
use moebius::cpu::Cpu;
use moebius::etp::ShardDevice;
use moebius::{DType, Result, Tensor};

/// Copies of a run.
const COPIES: usize = 8;

/// Bytes a second of plain copies of so many bytes each, from page-locked memory to the group's device: the best of
/// four runs of a few copies.
pub fn bytes_per_second(group: &DeviceGroup, bytes: usize) -> Result<f64> {
    #[cfg(feature = "cuda")]
    if let Some(group) = group.on::<moebius::cuda::Cuda>() {
        let device = group.lock().device().clone();
        let speed = measured(&device, bytes);
        // Not among what the phases take.
        device.trim();
        return speed;
    }
    match group.on::<Cpu>() {
        Some(group) => measured(group.lock().device(), bytes),
        None => Ok(0.0),
    }
}

fn measured<D: ShardDevice>(device: &D, bytes: usize) -> Result<f64> {
    let host = device.page_locked(DType::U8, &[bytes], &mut |to| to.fill(0x5A))?;
    let mut to = Tensor::empty(device, DType::U8, &[bytes])?;
    let word = Tensor::zeros(device, DType::U8, &[1])?;
    let mut best = 0f64;
    for _run in 0..4 {
        device.download(word.view())?;
        let start = Instant::now();
        for _copy in 0..COPIES {
            device.copy(host.view().data(), to.view_mut().into_data())?;
        }
        // Behind the copies.
        device.download(word.view())?;
        best = best.max((COPIES * bytes) as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}
