//! Order with streams that the crate does not know: another device's of the same context stands for burn's.

use moebius::cuda::{Cuda, Waited};
use moebius::kernels::Kernels;
use moebius::{DType, Device, Result, Tensor};

use super::gpu::gpu;
use crate::trials::tests;

/// Keeps a device busy for some milliseconds.
fn work(device: &Cuda, big: &mut [Tensor<Cuda>; 2]) -> Result<()> {
    for _ in 0..8 {
        let [a, b] = big;
        device.copy(a.view().data(), b.view_mut().into_data())?;
    }
    Ok(())
}

fn a_device_follows_and_leads_streams_that_it_does_not_know() -> Result<()> {
    let _alone = gpu();
    let (ours, theirs) = (Cuda::new(0)?, Cuda::new(0)?);
    let values: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let expected: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
    let source = Tensor::from_vec(values, &[1024])?.to(&theirs)?;
    let big = || Tensor::zeros(&theirs, DType::F32, &[1 << 28]);
    let mut big = [big()?, big()?];
    let mut shared = Tensor::empty(&theirs, DType::F32, &[1024])?;
    let mut own = Tensor::zeros(&ours, DType::F32, &[1024])?;
    let mut last = Tensor::empty(&theirs, DType::F32, &[1024])?;
    for _ in 0..10 {
        for t in [&mut shared, &mut last] {
            theirs.zero(t.view_mut().into_data())?;
        }
        ours.zero(own.view_mut().into_data())?;
        theirs.check()?;
        ours.check()?;

        // Written late on their stream, read on ours.
        work(&theirs, &mut big)?;
        theirs.copy(source.view().data(), shared.view_mut().into_data())?;
        let followed = ours.follow_context()?;
        ours.copy(shared.view().data(), own.view_mut().into_data())?;
        // And back; what they write next must not reach what ours still reads.
        let led = ours.lead_context()?;
        assert_eq!(led, followed);
        assert_ne!(led, Waited::Nothing);
        theirs.copy(own.view().data(), last.view_mut().into_data())?;
        theirs.zero(shared.view_mut().into_data())?;

        assert_eq!(theirs.read(last.view())?, expected);
        assert_eq!(ours.read(own.view())?, expected);
    }
    Ok(())
}

tests! {
    fn() -> Result<()>;
    a_device_follows_and_leads_streams_that_it_does_not_know,
}
