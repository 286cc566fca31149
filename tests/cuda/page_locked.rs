//! Page-locked memory of the host as tensors of a GPU: copied both ways, counted, and freed behind what reads it.

use std::sync::atomic::{AtomicBool, Ordering};

use moebius::cuda::Cuda;
use moebius::etp::ShardDevice;
use moebius::kernels::Kernels;
use moebius::{DType, Device, Error, Result, Tensor};

use crate::harness::tests;

fn pattern(len: usize, own: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(own * 97) >> 7) as u8).collect()
}

fn locked(cuda: &Cuda, bytes: &[u8]) -> Result<Tensor<Cuda>> {
    cuda.page_locked(DType::U8, &[bytes.len()], &mut |to| to.copy_from_slice(bytes))
}

fn copy_of(cuda: &Cuda, from: &Tensor<Cuda>) -> Result<Tensor<Cuda>> {
    let mut to = Tensor::empty(cuda, from.dtype(), from.dims())?;
    cuda.copy(from.view().data(), to.view_mut().into_data())?;
    Ok(to)
}

/// Host to GPU and back, between two tensors of the host, in part, and read by a kernel where it lies.
fn copies_keep_every_byte(cuda: &Cuda) -> Result<()> {
    for len in [1, 255, 4096, 3 << 20] {
        let bytes = pattern(len, 1);
        let host = locked(cuda, &bytes)?;
        assert_eq!((host.dims(), host.bytes()), (&[len][..], len));
        let on_gpu = copy_of(cuda, &host)?;
        assert!(cuda.download(on_gpu.view())? == bytes, "{len} bytes to the GPU");
        let mut back = cuda.page_locked(DType::U8, &[len], &mut |_| {})?;
        assert!(cuda.download(copy_of(cuda, &back)?.view())?.iter().all(|byte| *byte == 0), "zeros at first");
        cuda.copy(on_gpu.view().data(), back.view_mut().into_data())?;
        assert!(cuda.download(copy_of(cuda, &back)?.view())? == bytes, "{len} bytes back");
        let mut beside = cuda.page_locked(DType::U8, &[len], &mut |_| {})?;
        cuda.copy(back.view().data(), beside.view_mut().into_data())?;
        assert!(cuda.download(copy_of(cuda, &beside)?.view())? == bytes, "{len} bytes on the host");
        // The views that a chain cuts are the host's too.
        let (from, mut to) = (len / 3, Tensor::zeros(cuda, DType::U8, &[len - len / 3])?);
        cuda.copy(Cuda::slice(host.view().data(), from..len), to.view_mut().into_data())?;
        assert!(cuda.download(to.view())? == bytes[from..], "a part of {len} bytes");
        // The host reads and writes it as it does the GPU's memory.
        assert!(cuda.download(host.view())? == bytes, "{len} bytes downloaded");
        cuda.upload(&pattern(len, 2), back.view_mut())?;
        assert!(cuda.download(copy_of(cuda, &back)?.view())? == pattern(len, 2), "{len} bytes uploaded");
    }
    cuda.check()
}

fn it_is_counted_apart(cuda: &Cuda) -> Result<()> {
    let before = cuda.memory();
    let one = locked(cuda, &pattern(1 << 20, 1))?;
    let other = cuda.page_locked(DType::F32, &[3, 5], &mut |_| {})?;
    let now = cuda.memory();
    assert_eq!(now.page_locked - before.page_locked, (1 << 20) + 60);
    assert_eq!((now.in_use, now.reserved, now.allocations), (before.in_use, before.reserved, before.allocations));
    drop(one);
    assert_eq!(cuda.memory().page_locked - before.page_locked, 60);
    drop(other);
    assert_eq!(cuda.memory().page_locked, before.page_locked);
    Ok(())
}

/// Dropped with copies of it under way on another stream, behind work that takes a while: they bring what was there.
/// Memory that is asked for meanwhile is filled with something else.
fn it_is_freed_behind_what_reads_it(cuda: &Cuda) -> Result<()> {
    const BYTES: usize = 64 << 20;
    let beside = cuda.with_new_stream()?;
    for round in 0..4 {
        let bytes = pattern(BYTES, round);
        let host = locked(cuda, &bytes)?;
        let mut to: Vec<Tensor<Cuda>> =
            (0..3).map(|_| Tensor::empty(cuda, DType::U8, &[BYTES])).collect::<Result<_>>()?;
        beside.wait(Some(&cuda.record()?))?;
        for to in &mut to {
            // Of the same bytes, again and again: milliseconds each.
            for _again in 0..4 {
                beside.copy(host.view().data(), to.view_mut().into_data())?;
            }
        }
        drop(host);
        let other = cuda.page_locked(DType::U8, &[BYTES], &mut |to| to.fill(0xA5))?;
        cuda.wait(Some(&beside.record()?))?;
        for to in &to {
            assert!(cuda.download(to.view())? == bytes, "round {round}");
        }
        drop(other);
    }
    Ok(())
}

/// Copies of it leave the kernels' stream alone: the host is not held up by any.
fn a_copy_is_enqueued_and_no_more(cuda: &Cuda) -> Result<()> {
    const BYTES: usize = 256 << 20;
    let (beside, host) = (cuda.with_new_stream()?, cuda.page_locked(DType::U8, &[BYTES], &mut |_| {})?);
    let mut to = Tensor::empty(cuda, DType::U8, &[BYTES])?;
    beside.wait(Some(&cuda.record()?))?;
    for _copy in 0..8 {
        beside.copy(host.view().data(), to.view_mut().into_data())?;
    }
    // Two gigabytes need tens of milliseconds on any link, and these lines none.
    assert!(!beside.record()?.is_done()?, "the copies have run before the call returned");
    cuda.wait(Some(&beside.record()?))?;
    cuda.download(to.view()).map(drop)
}

fn what_cannot_be_is_refused(cuda: &Cuda) -> Result<()> {
    let before = cuda.memory();
    let called = AtomicBool::new(false);
    let error = cuda.page_locked(DType::U8, &[1 << 50], &mut |_| called.store(true, Ordering::SeqCst)).err();
    let named =
        matches!(&error, Some(Error::OutOfMemory { call: "Cuda::page_locked", bytes, .. }) if *bytes == 1 << 50);
    assert!(named || matches!(&error, Some(Error::Device { call: "Cuda::page_locked", .. })), "{error:?}");
    assert!(!called.load(Ordering::SeqCst) && cuda.memory() == before);
    let wide = cuda.page_locked(DType::F32, &[2; 5], &mut |_| {}).err();
    assert!(matches!(&wide, Some(Error::Invalid { name, .. }) if name == "dims"), "{wide:?}");
    Ok(())
}

tests! {
    copies_keep_every_byte,
    it_is_counted_apart,
    it_is_freed_behind_what_reads_it,
    a_copy_is_enqueued_and_no_more,
    what_cannot_be_is_refused,
}
