//! burn's ranks, on its CPU back end: beside the dense reference model and candle's ranks, and in two parts.

use burn::backend::Flex;
use moebius::etp::Payload;

use super::resume_tests::in_two_parts;
use super::{bits, settings, train};
use crate::burn::{Rank, communicators};
use crate::corpus::Corpus;
use crate::lm::{Settings, Step, Tolerances, initial};
use crate::mesh::Mesh;
use crate::{device, process, state};

fn train_burn(settings: &Settings) -> Vec<Step> {
    let corpus = Corpus::load(None).unwrap();
    let mut steps = Vec::new();
    let on_step = |step: Step| {
        if let Some(twin) = &step.twin {
            assert!(twin.error <= Tolerances::F32.gradient, "step {}: {} at {}", step.step, twin.error, twin.worst);
        }
        steps.push(step);
        Ok(())
    };
    crate::burn::train(settings, (device::Place::Cpu, 1), &corpus, on_step).unwrap();
    steps
}

fn of_ranks(ranks: usize) -> Settings {
    Settings { mesh: Mesh { ranks, ep: ranks, etp: None, engines: false }, ..settings(ranks, None) }
}

/// Each step beside the dense reference model, on threads that report to one and on threads that tell each other, as
/// processes do.
#[test]
fn ranks_as_threads_and_as_processes() {
    let corpus = Corpus::load(None).unwrap();
    let sharded = Settings { clip: Some(0.5), microbatches: 2, ..settings(2, Some(2)) };
    for settings in [of_ranks(1), of_ranks(2), of_ranks(4), sharded] {
        let expected = train_burn(&settings);
        assert!(expected.windows(2).all(|w| bits(w)[0][2] != bits(w)[1][2]), "weights move");
        let params = initial(&settings);
        let mut found = Vec::new();
        std::thread::scope(|scope| {
            let run = |(number, place)| {
                let (settings, corpus, params) = (&settings, &corpus, &params);
                scope.spawn(move || {
                    let at = (place, &Default::default());
                    let (rank, mut steps) = (Rank::<Flex>::new(settings, params, at, number).unwrap(), Vec::new());
                    let on_step = |step| {
                        steps.push(step);
                        Ok(())
                    };
                    process::train(settings, (rank, number), (corpus, 1), params, on_step).unwrap();
                    steps
                })
            };
            let threads: Vec<_> =
                communicators::on_cpu(settings.mesh).unwrap().into_iter().enumerate().map(run).collect();
            found.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        });
        assert_eq!(bits(&found[0]), bits(&expected), "{:?}", settings.mesh);
        assert!(found[0].iter().zip(&expected).all(|(a, b)| a.load == b.load && a.costs == b.costs));
    }
}

/// The frameworks' own operations round differently: losses and norms are as far apart as those of ranks that add in
/// another order, `several_microbatches_and_whole_weights` says why. What a chain holds and moves is the same.
#[test]
fn losses_and_norms_are_candles() {
    let two = |s: Settings| Settings { microbatches: 2, clip: Some(0.5), ..s };
    let payloads = Settings { token_payload: Payload::Nvfp4, shard_payload: Payload::Mxfp8, ..settings(2, Some(2)) };
    let runs = [
        two(settings(4, None)),
        two(settings(1, Some(4))),
        two(settings(2, Some(2))),
        two(settings(1, Some(1))),
        Settings { hidden: 32, ..payloads },
    ];
    for settings in runs {
        let (burn, candle) = (train_burn(&settings), train(&settings));
        assert_eq!(burn.len(), candle.len());
        for (a, b) in burn.iter().zip(&candle) {
            assert!((a.loss - b.loss).abs() <= 2e-5, "{:?}, step {}: {} and {}", settings.mesh, a.step, a.loss, b.loss);
            if let (Some(a), Some(b)) = (a.norm, b.norm) {
                assert!((a / b - 1.0).abs() <= 1e-5, "{a} and {b}");
            }
            assert_eq!((&a.load, &a.costs), (&b.load, &b.costs), "{:?}, step {}", settings.mesh, a.step);
        }
        assert_eq!(burn[0].norm.is_some(), settings.clip.is_some());
    }
}

/// Losses, norms and weights do not depend on the number of shards.
#[test]
fn the_number_of_shards_decides_no_bit() {
    let run = |n| bits(&train_burn(&Settings { clip: Some(0.5), ..settings(1, Some(n)) }));
    let one = run(1);
    for n in [2, 4] {
        assert_eq!(run(n), one, "ETP {n}");
    }
}

/// Losses, norms and weights are those of the unbroken run to the bit, at another number of shards too; at another number
/// of ranks they are as far apart as those that add in another order.
#[test]
fn a_resumed_run_is_the_unbroken_one() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let with_clip = |s: Settings| Settings { clip: Some(0.5), microbatches: 2, ..s };
    for (number, settings) in [of_ranks(1), of_ranks(2), settings(2, Some(2))].into_iter().enumerate() {
        let settings = with_clip(settings);
        let found = in_two_parts(train_burn, (&settings, settings.mesh), &dir.join(number.to_string()));
        assert_eq!(bits(&found), bits(&train_burn(&settings)), "{:?}", settings.mesh);
    }
    let settings = Settings { clip: Some(0.5), ..settings(1, Some(4)) };
    let expected = bits(&train_burn(&settings));
    for etp in [1, 2] {
        let then = Mesh { etp: Some(etp), ..settings.mesh };
        assert_eq!(bits(&in_two_parts(train_burn, (&settings, then), &dir.join(format!("etp {etp}")))), expected);
    }
    for (saved, then) in [(1, 2), (2, 1)] {
        let settings = Settings { balance: 0.0, ..with_clip(of_ranks(saved)) };
        let expected = train_burn(&settings);
        let found =
            in_two_parts(train_burn, (&settings, of_ranks(then).mesh), &dir.join(format!("{saved} then {then}")));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found.loss - expected.loss).abs() <= 2e-5, "{} and {}", found.loss, expected.loss);
        }
    }
}

/// The state is the same in both frameworks: burn goes on from candle's.
#[test]
fn burn_goes_on_from_candles_state() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_path_buf();
    let settings = Settings { clip: Some(0.5), ..settings(2, Some(2)) };
    let expected = train(&settings);
    train(&Settings { range: 0..2, save: Some(dir.clone()), ..settings.clone() });
    let found = train_burn(&Settings { range: 2..4, resume: Some(dir), ..settings });
    for (found, expected) in found.iter().zip(&expected[2..]) {
        assert!((found.loss - expected.loss).abs() <= 2e-5, "{} and {}", found.loss, expected.loss);
    }
    // The weights are candle's to the bit before the first step.
    assert_eq!(bits(&found)[0][2], bits(&expected[2..])[0][2]);
}

/// Main weights are in the optimizer's state, and the loss of f16 layers is scaled.
#[test]
fn a_resumed_run_in_16_bits_is_the_unbroken_one() {
    let folder = tempfile::tempdir().unwrap();
    for (number, dtype) in [candle_core::DType::BF16, candle_core::DType::F16].into_iter().enumerate() {
        for settings in [of_ranks(2), settings(2, Some(2))] {
            let settings = Settings { layer_dtype: dtype, clip: Some(0.5), microbatches: 2, ..settings };
            let losses =
                |steps: &[Step]| -> Vec<_> { steps.iter().map(|s| (s.loss.to_bits(), s.norm, s.scale)).collect() };
            let expected = train_burn(&settings);
            assert!(expected.iter().all(|s| s.loss.is_finite() && s.scale.is_some() == (number == 1)));
            assert!(expected.windows(2).all(|w| w[0].loss != w[1].loss));
            let dir = folder.path().join(format!("{number} {}", settings.mesh.ranks));
            let mut found = train_burn(&Settings { range: 0..2, save: Some(dir.clone()), ..settings.clone() });
            found.extend(train_burn(&Settings { range: 2..4, resume: Some(dir), ..settings.clone() }));
            assert_eq!(losses(&found), losses(&expected), "{dtype:?}");
        }
    }
}

/// As candle's, on every rank: weights of one step beside an optimizer of another.
#[test]
fn a_state_of_two_steps_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    let settings = Settings { layers: 1, ..of_ranks(2) };
    train_burn(&Settings { range: 0..1, save: Some(first.clone()), ..settings.clone() });
    train_burn(&Settings { range: 0..2, save: Some(second.clone()), ..settings.clone() });
    for file in std::fs::read_dir(second.join("state-0/optimizer")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), first.join("state-0/optimizer").join(file.file_name())).unwrap();
    }
    let resumed = Settings { range: 1..4, resume: Some(first), ..settings };
    let params = state::params(&resumed).unwrap();
    std::thread::scope(|scope| {
        let start = |(number, place)| {
            let (settings, params) = (&resumed, &params);
            scope.spawn(move || {
                let at = (place, &Default::default());
                Rank::<Flex>::new(settings, params, at, number).map(drop).unwrap_err().to_string()
            })
        };
        let threads: Vec<_> = communicators::on_cpu(resumed.mesh).unwrap().into_iter().enumerate().map(start).collect();
        for thread in threads {
            let error = thread.join().unwrap();
            assert!(error.contains("weights after step 1, but an optimizer after step 2"), "{error}");
        }
    });
}
