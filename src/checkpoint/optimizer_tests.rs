use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use safetensors::SafeTensors;

use super::*;
use crate::comm::Communicator;
use crate::cpu::{Cpu, ThreadWorld};
use crate::optim::{AdamWOptions, ParamShard, ParamSpec};

/// A file that loses its end between the check and the reading.
#[test]
fn nobody_uses_a_state_that_was_read_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let (options, shard) = (AdamWOptions::default(), ParamShard::whole(&[4, 64]));
    let spec = ParamSpec { name: "w".into(), shard, dtype: DType::BF16, group: 0 };
    let mut adam = AdamW::new(&Cpu::new(), options, &[options.group], vec![spec], None).unwrap();
    adam.save(dir.path()).unwrap();
    let saved = Saved::open(dir.path()).unwrap();
    let items = saved.check(&adam).unwrap();
    let path = dir.path().join(SINGLE);
    let whole = std::fs::read(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole.len() as u64 - 100).unwrap();
    adam.read_state(&saved, &items).unwrap_err();
    let refused = |error: Error| assert!(error.to_string().contains("loaded whole"), "{error}");
    refused(adam.begin(&[None]).unwrap_err());
    let mut param = Tensor::zeros(&Cpu::new(), DType::BF16, &[4, 64]).unwrap();
    refused(adam.write_param(0, param.view_mut()).unwrap_err());
    // Neither there nor anywhere else.
    let other = tempfile::tempdir().unwrap();
    for dir in [dir.path(), other.path()] {
        refused(adam.save(dir).unwrap_err());
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), whole.len() as u64 - 100);
    assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 0);
    std::fs::write(&path, whole).unwrap();
    assert_eq!(adam.load(dir.path()).unwrap(), 0);
    adam.begin(&[None]).unwrap();
    adam.save(dir.path()).unwrap();
}

/// Parameters of two ranks: both hold `norm`, each two of the four rows of `w`.
fn on_rank(rank: usize, moments: DType, comm: Option<Box<dyn Communicator<Cpu>>>) -> AdamW<Cpu> {
    let options = AdamWOptions { moments, ..Default::default() };
    let spec = |name: &str, shard, dtype| ParamSpec { name: name.into(), shard, dtype, group: 0 };
    let w = match comm {
        Some(_) => ParamShard::of_experts(&[2, 6], rank, 2).unwrap(),
        None => ParamShard::whole(&[4, 6]),
    };
    let specs = vec![spec("w", w, DType::BF16), spec("norm", ParamShard::whole(&[5]), DType::F32)];
    AdamW::new(&Cpu::new(), options, &[options.group], specs, comm).unwrap()
}

/// A state of zeros, but for one element of one tensor.
fn state_with(moments: DType, tensor: &str, element: usize, value: f32) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    on_rank(0, moments, None).save(dir.path()).unwrap();
    let path: PathBuf = dir.path().join(SINGLE);
    let mut bytes = std::fs::read(&path).unwrap();
    let (header, info) = SafeTensors::read_metadata(&bytes).unwrap();
    let info = info.info(tensor).unwrap();
    let raw = value.to_le_bytes();
    let raw = if info.dtype == Dtype::BF16 { &raw[2..] } else { &raw[..] };
    let at = 8 + header + info.data_offsets.0 + element * raw.len();
    bytes[at..at + raw.len()].copy_from_slice(raw);
    std::fs::write(path, bytes).unwrap();
    dir
}

/// Each kind of tensor, in each type it is stored in; what is refused leaves an optimizer that takes no step until it has
/// loaded another.
#[test]
fn states_with_values_that_no_step_makes_are_refused() {
    let good = state_with(DType::F32, "w.exp_avg", 7, -1.5);
    for (moments, tensor, element, value, words) in [
        (DType::F32, "w.main", 13, f32::NAN, "w.main: expected finite numbers, found NaN at [2, 1]"),
        (DType::F32, "w.main", 0, f32::INFINITY, "expected finite numbers, found inf at [0, 0]"),
        (DType::F32, "w.exp_avg", 23, f32::NEG_INFINITY, "w.exp_avg: expected finite numbers, found -inf at [3, 5]"),
        (DType::F32, "norm.exp_avg_sq", 4, -1.0, "norm.exp_avg_sq: expected finite numbers from 0 on, found -1 at [4]"),
        (DType::BF16, "norm.exp_avg", 3, f32::NAN, "norm.exp_avg: expected finite numbers, found NaN at [3]"),
        (DType::BF16, "w.exp_avg_sq", 6, f32::INFINITY, "found inf at [1, 0]"),
    ] {
        let dir = state_with(moments, tensor, element, value);
        // Moments in bf16 are widened where these are in f32.
        for own in [DType::F32, moments] {
            let mut adam = on_rank(0, own, None);
            let error = adam.load(dir.path()).unwrap_err();
            let is_typed =
                matches!(&error, Error::Checkpoint(CheckpointError::Tensor { tensor: named, .. }) if named == tensor);
            assert!(is_typed && error.to_string().contains(words), "{error}");
            assert!(adam.begin(&[None, None]).unwrap_err().to_string().contains("loaded whole"));
            if own == DType::F32 {
                adam.load(good.path()).unwrap();
                adam.begin(&[None, None]).unwrap();
            }
        }
    }
    for (tensor, value) in [("w.exp_avg_sq", -0.0), ("w.main", f32::MIN), ("w.exp_avg", 1e-45)] {
        on_rank(0, DType::F32, None).load(state_with(DType::F32, tensor, 2, value).path()).unwrap();
    }
}

/// Whoever's rows they are in: a rank that has not read them is told.
#[test]
fn such_states_are_refused_on_every_rank() {
    for (tensor, element, finds) in [("w.main", 20, [false, true]), ("norm.exp_avg", 1, [true, true])] {
        let dir = state_with(DType::F32, tensor, element, f32::NAN);
        let good = state_with(DType::F32, "w.main", 0, 0.0);
        let errors: Vec<Error> = thread::scope(|scope| {
            let worlds = ThreadWorld::create(2, Duration::from_secs(60)).into_iter().enumerate();
            let load = |rank, comm| {
                let mut adam = on_rank(rank, DType::F32, Some(Box::new(comm)));
                let error = adam.load(dir.path()).unwrap_err();
                // The communicator works on.
                adam.load(good.path()).unwrap();
                error
            };
            let threads: Vec<_> = worlds.map(|(rank, comm)| scope.spawn(move || load(rank, comm))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (error, finds) in errors.iter().zip(finds) {
            assert_eq!(matches!(error, Error::Checkpoint(CheckpointError::Tensor { .. })), finds, "{error}");
            assert!(
                error.to_string().contains(&format!("tensor {tensor}: expected finite numbers, found NaN")),
                "{error}"
            );
        }
    }
}
