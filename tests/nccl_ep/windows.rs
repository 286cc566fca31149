//! Rows that arrive in windows and leave from windows: the same bits as with the library's own staging, eager and
//! replayed; copies are counted where the caller's memory is none, and a window that is not free is told on every rank.

use moebius::DType;
use moebius::config::{MoeConfig, Payload};
use moebius::ep::{
    Capacity, DispatchInputs, DispatchOutputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Overflow,
};
use moebius::kernels::Kernels;
use moebius::{Device, Error, Tensor};

use crate::graph::fixed;
use crate::steps::{Shape, Steps, each};

pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("layers_have_the_bits_of_staged_rows", layers_have_the_bits_of_staged_rows),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay_the_bits_of_eager_steps),
        ("tokens_that_are_sent_quantized_have_the_bits_of_staged_rows", quantized),
        ("plain_memory_is_copied_and_a_full_ring_is_told", plain_memory_is_copied_and_a_full_ring_is_told),
    ]
}

fn shape(windows: usize) -> Shape {
    let config = MoeConfig::new(128, 64, 16, 4);
    Shape {
        kind: DispatcherKind::NcclEp,
        config,
        tokens: 96,
        fewer: 0,
        backward: true,
        windows,
        overlap: Default::default(),
    }
}

fn layers_have_the_bits_of_staged_rows(ranks: usize) {
    staged_and_not(ranks, Payload::Plain);
}

/// Codes and scales arrive in windows, and are read from there once; outputs leave from others.
fn quantized(ranks: usize) {
    staged_and_not(ranks, Payload::Nvfp4);
    staged_and_not(ranks, Payload::Mxfp8);
    staged_and_not(ranks, Payload::Fp8Block);
}

fn staged_and_not(ranks: usize, payload: Payload) {
    let shape = |windows| {
        let mut shape = shape(windows);
        shape.config.payload = payload;
        shape
    };
    for alignment in [1, 16] {
        let options = fixed(&shape(0), ranks, alignment);
        let results = std::sync::Mutex::new(vec![Vec::new(); ranks]);
        for windows in [0, 3] {
            each(ranks, |comm, _| {
                let rank = moebius::comm::Communicator::rank(&comm);
                let mut steps = Steps::new(comm, (shape(windows), options))?;
                for step in 0..6 {
                    steps.step()?;
                    let found = steps.results()?;
                    let mut all = results.lock().expect("results");
                    match windows {
                        0 => all[rank] = found,
                        _ => assert!(all[rank] == found, "alignment {alignment}, step {step}: other bits, {payload:?}"),
                    }
                }
                steps.cuda.check()
            });
        }
    }
}

fn graphs_replay_the_bits_of_eager_steps(ranks: usize) {
    crate::graph::replays(ranks, (shape(3), fixed(&shape(3), ranks, 16)));
}

const T: usize = 16;
const H: usize = 64;

/// A step of the dispatcher by itself: each token to two experts, sums twice the tokens.
fn plain_memory_is_copied_and_a_full_ring_is_told(ranks: usize) {
    each(ranks, |comm, barrier| {
        let cuda = comm.cuda().clone();
        let rank = moebius::comm::Communicator::rank(&comm);
        let rows = ranks * T * 2;
        let config = GroupConfig {
            dispatcher: DispatcherKind::NcclEp,
            max_rows: rows,
            windows: 2,
            ..GroupConfig::new(4 * ranks, T)
        };
        let mut group = Group::new(cuda.clone(), Box::new(comm), config)?;
        let dispatcher = group.dispatcher();
        let ids: Vec<i32> = (0..2 * T).map(|i| ((rank + i) % (4 * ranks)) as i32).collect();
        let ids = Tensor::from_vec(ids, &[T, 2])?.to(&cuda)?;
        let spec =
            DispatchSpec { capacity: Capacity::Static(rows), overflow: Overflow::Error, ..DispatchSpec::new(0, 2) };
        let values: Vec<f64> = (0..T * H).map(|i| ((rank * 7 + i) % 100) as f64).collect();
        let twice: Vec<f64> = values.iter().map(|v| 2.0 * v).collect();
        let x = cuda.write(&values, DType::BF16, &[T, H])?;
        let inputs = || DispatchInputs { tokens: x.view(), weights: None, scales: None };
        let mut y = Tensor::zeros(&cuda, DType::BF16, &[T, H])?;
        for _ in 0..5 {
            // Into and from plain memory.
            let handle = dispatcher.prepare(ids.view(), None, &spec)?;
            let mut plain = Tensor::zeros(&cuda, DType::BF16, &[rows, H])?;
            let outputs = DispatchOutputs { tokens: plain.view_mut(), weights: None, scales: None };
            dispatcher.dispatch(&handle, inputs(), outputs)?;
            dispatcher.combine(&handle, plain.view(), y.view_mut())?;
            assert_eq!(cuda.read(y.view())?, twice);
            // From where they arrived to where they leave from.
            let received = dispatcher.dispatch_rows(&handle, inputs())?;
            let arrived = received.rows.expect("rows");
            let mut place = dispatcher.place_for_return(&handle, DType::BF16, H)?.expect("a window");
            cuda.copy(arrived.view().data(), place.view_mut().into_data())?;
            dispatcher.combine(&handle, place.view(), y.view_mut())?;
            assert_eq!(cuda.read(y.view())?, twice);
        }
        // Every other dispatch and combine.
        assert_eq!(dispatcher.copies(), 10);
        // Two windows, both kept: no third dispatch, and all goes on when they are given back.
        let handle = dispatcher.prepare(ids.view(), None, &spec)?;
        let kept = [dispatcher.dispatch_rows(&handle, inputs())?, dispatcher.dispatch_rows(&handle, inputs())?];
        let third = dispatcher.dispatch_rows(&handle, inputs()).map(drop);
        let told = |e: &Error| e.to_string().contains("GroupConfig::windows");
        assert!(third.as_ref().is_err_and(told), "{third:?}");
        drop(kept);
        let received = dispatcher.dispatch_rows(&handle, inputs())?;
        dispatcher.combine(&handle, received.rows.expect("rows").view(), y.view_mut())?;
        assert_eq!(cuda.read(y.view())?, twice);
        barrier.wait();
        Ok(())
    });
}
