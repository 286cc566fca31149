//! Sharded training beside whole weights, to the bit.

use std::path::Path;

use candle_core::Device;
use clap::Parser;
use moebius::ep::DispatcherKind;
use moebius::etp::Payload;

use crate::corpus::Corpus;
use crate::lm::{Settings, Step, Tolerances, initial};
use crate::mesh::{self, Mesh};
use crate::ranks::Worker;
use crate::{Args, candle, process, ranks, resumed};

#[path = "agreement_tests.rs"]
mod agreement_tests;
#[cfg(feature = "burn")]
#[path = "burn_tests.rs"]
mod burn_tests;
#[path = "resume_tests.rs"]
mod resume_tests;

fn settings(ep: usize, etp: Option<usize>) -> Settings {
    Settings {
        mesh: Mesh { ranks: 4, ep, etp, engines: false },
        shard_payload: Payload::Plain,
        token_payload: Payload::Plain,
        microbatches: 1,
        clip: None,
        steps: 4,
        range: 0..4,
        resume: None,
        save: None,
        dispatcher: None,
        measure_dispatcher: false,
        layer_dtype: candle_core::DType::F32,
        seed: 3,
        text: 0,
        batch: 8,
        context: 16,
        hidden: 16,
        heads: 2,
        layers: 2,
        experts: 4,
        top_k: 2,
        // 160 rows of `up`, which four shards pad to 192, and 64 of `down`.
        intermediate: 20,
        balance: 0.01,
        learning_rate: 4e-3,
        tolerances: Tolerances::F32,
    }
}

/// Trains a few steps, each compared with the dense reference model.
fn train(settings: &Settings) -> Vec<Step> {
    let corpus = Corpus::load(None).unwrap();
    let mut steps = Vec::new();
    let places = mesh::places(settings.mesh, &vec![Device::Cpu; settings.mesh.ranks], ranks::TIMEOUT).unwrap();
    let make = |params: &[_], place, rank| candle::Rank::new(settings, params, (place, rank));
    let on_step = |step: Step| {
        let twin = step.twin.as_ref().unwrap();
        assert!(twin.error <= Tolerances::F32.gradient, "step {}: {} at {}", step.step, twin.error, twin.worst);
        steps.push(step);
        Ok(())
    };
    ranks::train(settings, (places, 1), &corpus, make, on_step).unwrap();
    steps
}

/// Losses, norms and weights, as bits.
fn bits(steps: &[Step]) -> Vec<[u64; 3]> {
    let of = |s: &Step| [s.loss.to_bits(), s.norm.unwrap_or(0.0).to_bits(), s.twin.as_ref().unwrap().weights];
    steps.iter().map(of).collect()
}

#[test]
fn losses_and_weights_do_not_depend_on_the_number_of_shards() {
    for clip in [None, Some(0.5)] {
        let run = |ep, n| train(&Settings { clip, ..settings(ep, Some(n)) });
        let one = run(1, 1);
        assert!(one.windows(2).all(|w| bits(w)[0][2] != bits(w)[1][2]), "weights move");
        for n in [2, 4] {
            assert_eq!(bits(&run(1, n)), bits(&one), "ETP {n}, clip {clip:?}");
        }
        assert_eq!(bits(&run(2, 2)), bits(&run(2, 1)), "EP 2, clip {clip:?}");
        if clip.is_some() {
            assert!(one.iter().any(|s| s.norm > clip), "clipped somewhere");
        }
    }
}

/// The twin computes with experts that were quantized whole.
#[test]
fn shards_that_are_sent_quantized() {
    for (payload, [up, down]) in
        [(Payload::Nvfp4, [9.0, 12.0]), (Payload::Mxfp8, [17.0, 21.0]), (Payload::Fp8Block, [20.0, 24.0])]
    {
        let runs = [1, 2, 4].map(|n| train(&Settings { shard_payload: payload, ..settings(1, Some(n)) }));
        assert_eq!(bits(&runs[0]), bits(&runs[1]), "{payload:?}");
        assert_eq!(bits(&runs[0]), bits(&runs[2]), "{payload:?}");
        assert_ne!(bits(&runs[0]), bits(&train(&settings(1, Some(1)))), "{payload:?}");
        // Bytes of a row of `up` (16 elements) and of `down` (20) twice, and four bytes an element of the gradient.
        let moved = 4.0 + 2.0 * (160.0 * up + 64.0 * down) / (160.0 * 16.0 + 64.0 * 20.0);
        let last = runs[0].last().unwrap();
        assert!(last.costs.iter().all(|cost| (cost.moved - moved).abs() < 1e-12), "{payload:?}: {:?}", last.costs);
    }
}

/// The twin's experts read what the ranks' tokens are where they arrive. How ranks share the experts decides no bit of
/// that, nor does the form in which shards travel beside.
#[test]
fn tokens_that_are_sent_quantized() {
    for tokens in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let run = |mesh: Settings| train(&Settings { token_payload: tokens, hidden: 32, ..mesh });
        let one = run(settings(1, Some(1)));
        for n in [2, 4] {
            assert_eq!(bits(&run(settings(1, Some(n)))), bits(&one), "{tokens:?}, ETP {n}");
        }
        assert_eq!(bits(&run(settings(2, Some(2)))), bits(&run(settings(2, Some(1)))), "{tokens:?}, EP 2");
        let plain = train(&Settings { hidden: 32, ..settings(1, Some(1)) });
        assert_ne!(bits(&one), bits(&plain), "{tokens:?}");
        // In parts, over whole weights, and with shards in a form of their own.
        run(Settings { microbatches: 2, ..settings(4, None) });
        run(Settings { shard_payload: Payload::Nvfp4, ..settings(2, Some(2)) });
    }
}

/// The comparison can fail: a twin whose experts read the tokens themselves is further off than any rounding.
#[test]
fn a_twin_that_reads_other_tokens_is_found() {
    // A second layer would choose other experts, which is found before.
    let settings =
        Settings { token_payload: Payload::Nvfp4, hidden: 32, range: 0..1, layers: 1, ..settings(1, Some(1)) };
    let corpus = Corpus::load(None).unwrap();
    let plain = Settings { token_payload: Payload::Plain, ..settings.clone() };
    let places = mesh::places(settings.mesh, &vec![Device::Cpu; 4], ranks::TIMEOUT).unwrap();
    let make = |params: &[_], place, rank| candle::Rank::new(&settings, params, (place, rank));
    let mut errors = Vec::new();
    let on_step = |step: Step| {
        errors.push(step.twin.unwrap().error);
        Ok(())
    };
    ranks::train(&plain, (places, 1), &corpus, make, on_step).unwrap();
    assert!(errors.len() == 1 && errors[0] > 100.0 * Tolerances::F32.gradient, "{errors:?}");
}

/// Copy engines are refused where there are none, whoever asks.
#[test]
fn copy_engines_without_gpus() {
    let mesh = Mesh { engines: true, ..settings(1, Some(4)).mesh };
    let error = mesh::places(mesh, &vec![Device::Cpu; 4], ranks::TIMEOUT).map(drop).unwrap_err();
    assert!(error.to_string().contains("over NCCL"), "{error}");
    #[cfg(feature = "nccl")]
    {
        let args = ["train_lm", "--copy-engines", "--etp", "1", "--device", "cuda"];
        assert!(Args::parse_from(args).settings().unwrap_err().0.contains("--etp 2 or more"));
    }
}

/// Whole weights over four EP ranks and sharded ones add gradients in other orders: their losses agree to rounding, and
/// each agrees with the twin.
#[test]
fn several_microbatches_and_whole_weights() {
    let runs = [settings(4, None), settings(1, Some(4)), settings(2, Some(2)), settings(1, Some(1))];
    let runs = runs.map(|s| train(&Settings { microbatches: 2, clip: Some(0.5), balance: 0.0, ..s }));
    for run in &runs[1..] {
        for (a, b) in run.iter().zip(&runs[0]) {
            // Mean over 128 tokens of f32 log-probabilities near 5.5, from weights that differ by rounding: 4 steps'
            // updates of 4e-3 / 5 times a relative error of 1e-5 in gradients, AdamW's steps being relative.
            assert!((a.loss - b.loss).abs() <= 2e-5, "step {}: {} and {}", a.step, a.loss, b.loss);
            assert!((a.norm.unwrap() / b.norm.unwrap() - 1.0).abs() <= 1e-5, "{:?} and {:?}", a.norm, b.norm);
        }
    }
}

/// Shards, main gradients and moments fall as 1/N (padding counted), the others are one layer's.
#[test]
fn memory_and_traffic() {
    for n in [1, 2, 4] {
        let settings = Settings { microbatches: 2, ..settings(1, Some(n)) };
        let last = train(&settings).pop().unwrap();
        assert_eq!(last.costs.len(), 4);
        // Rows of `up` and `down` of a layer, and their widths.
        let pad = |rows: usize| if n == 1 { rows } else { rows.next_multiple_of(16 * n) };
        let (up, down) = (pad(160) * 16, pad(64) * 20);
        for cost in &last.costs {
            let m = cost.memory;
            assert_eq!((cost.shards, m.main), (2 * (up + down) * 4 / n, 2 * (up + down) * 4 / n));
            assert_eq!((m.gathered, m.gradients), ((up + down) * 4, (2 * up + down) * 4));
            // Four bytes of each element in forward, in backward and of its gradient, padding included.
            let moved = 12.0 * (up + down) as f64 / (160.0 * 16.0 + 64.0 * 20.0);
            assert!((cost.moved - moved).abs() < 1e-12, "{} and {moved}", cost.moved);
        }
    }
}

#[test]
fn arguments_that_cannot_be() {
    let refused = |arguments: &[&str]| {
        let all = ["train_lm"].iter().chain(arguments);
        let parsed = Args::try_parse_from(all).map_err(|e| e.to_string());
        parsed.and_then(|args| args.settings().map_err(|e| e.0)).map(drop).unwrap_err()
    };
    for (arguments, word) in [
        (&["--experts", "1000000", "--ranks", "1"][..], "--experts must be in 2..=1024"),
        (&["--experts", "0"], "--experts"),
        (&["--steps", "0"], "--steps"),
        (&["--ranks", "3"], "--experts 8: expected a multiple of --ranks 3"),
        (&["--experts", "7"], "--experts 7: expected a multiple of the 2 ranks that are the default"),
        (&["--ranks", "0"], "--ranks: expected at least 1, found 0"),
        (&["--etp", "3"], "--etp 3 does not divide the 4 ranks that are the default (give --ranks)"),
        (&["--etp", "2", "--ep", "4"], "--ep 4 times --etp 2 does not divide the 4 ranks"),
        (&["--etp", "2", "--ep", "3", "--ranks", "6"], "--experts 8: expected a multiple of --ep 3"),
        (&["--batch", "1"], "--batch 1: expected at least 2 sequences, one for each of 2 ranks and 1 microbatches"),
        (&["--microbatches", "0"], "--microbatches: expected at least 1, found 0"),
        (&["--etp", "0"], "--etp: expected at least 1, found 0"),
        (&["--clip", "NaN"], "--clip"),
        (&["--until", "501"], "--until: expected a step in 1..=500"),
        (&["--layer-dtype", "f64"], "--layer-dtype"),
        (&["--copy-engines"], "--etp"),
        (&["--copy-engines", "--etp", "2"], "--copy-engines: give --device cuda"),
        (&["--token-payload", "fp4"], "--token-payload"),
        (&["--shard-payload", "nvfp4"], "--etp"),
    ] {
        let text = refused(arguments);
        assert!(text.contains(word), "{arguments:?}: {text}");
    }
}

/// Outputs that cannot be written are found before training, which would take days here.
#[test]
fn outputs_are_checked_first() {
    let folder = tempfile::tempdir().unwrap();
    let (file, plots) = (folder.path().join("file"), folder.path().join("plots"));
    std::fs::write(&file, "").unwrap();
    std::fs::create_dir_all(plots.join("expert-load.png")).unwrap();
    let mut cases = vec![(file.to_str().unwrap(), "file"), (plots.to_str().unwrap(), "expert-load.png")];
    if cfg!(target_os = "linux") {
        cases.push(("/proc/x", "/proc/x"));
    }
    for (out, word) in cases {
        let args = Args::parse_from(["train_lm", "--steps", "100000000", "--out", out]);
        let error = crate::run(&args).unwrap_err().to_string();
        assert!(error.contains("--out") && error.contains(word), "{error}");
    }
}

/// A run too short to learn fails nothing for its loss; whoever names a bound is judged by it.
#[test]
fn three_steps_are_not_judged_by_their_loss() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["train_lm", "--steps", "3", "--batch", "4", "--out", folder.path().to_str().unwrap()];
    assert!(crate::run(&Args::parse_from(arguments)).unwrap());
    assert!(folder.path().join("loss.png").exists() && folder.path().join("expert-load.png").exists());
    let bounded = arguments.into_iter().chain(["--max-loss", "0.1"]);
    assert!(!crate::run(&Args::parse_from(bounded)).unwrap());
}

/// Ranks that tell each other of each step, as processes do, train to the bits of ranks that report to one thread.
#[test]
fn ranks_as_processes_train_alike() {
    let tokens = Settings { token_payload: Payload::Nvfp4, hidden: 32, ..settings(2, Some(2)) };
    for settings in
        [settings(4, None), Settings { clip: Some(0.5), ..settings(2, Some(2)) }, settings(1, Some(4)), tokens]
    {
        let expected = train(&settings);
        let (corpus, params) = (Corpus::load(None).unwrap(), initial(&settings));
        let places = mesh::places(settings.mesh, &vec![Device::Cpu; 4], ranks::TIMEOUT).unwrap();
        let mut found = Vec::new();
        std::thread::scope(|scope| {
            let run = |(number, place)| {
                let (settings, corpus, params) = (&settings, &corpus, &params);
                scope.spawn(move || {
                    let (rank, mut steps) = (candle::Rank::new(settings, params, (place, number)).unwrap(), Vec::new());
                    let on_step = |step| {
                        steps.push(step);
                        Ok(())
                    };
                    process::train(settings, (rank, number), (corpus, 1), params, on_step).unwrap();
                    steps
                })
            };
            let threads: Vec<_> = places.into_iter().enumerate().map(run).collect();
            found.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
        });
        assert_eq!(bits(&found[0]), bits(&expected));
        assert!(found[0].iter().zip(&expected).all(|(a, b)| a.load == b.load && a.costs == b.costs));
        assert_eq!(expected[0].costs.len(), settings.mesh.etp.map_or(0, |_| 4));
        assert!(found[1..].iter().all(Vec::is_empty), "rank 0 alone speaks");
    }
}

/// Command lines that a process refuses before it looks for others, and those for which it has no way to them.
#[test]
fn processes_that_cannot_be() {
    use clap::Parser;
    let refused = |args: &[&str]| {
        let args = crate::Args::parse_from([&["train_lm", "--processes", "--etp", "2"], args].concat());
        crate::run(&args).unwrap_err().to_string()
    };
    assert!(refused(&[]).contains("--device cuda"));
    #[cfg(not(all(feature = "burn-cuda", feature = "nccl")))]
    assert!(refused(&["--device", "cuda", "--framework", "burn"]).contains("--features burn-cuda,nccl"));
    #[cfg(not(feature = "nccl"))]
    assert!(refused(&["--device", "cuda"]).contains("--features candle,nccl"));
    // Sizes are found wrong on every rank alike, whatever its place.
    let sizes = crate::Args::parse_from(["train_lm", "--processes", "--etp", "2", "--ranks", "3", "--device", "cuda"]);
    assert!(
        sizes.settings().unwrap_err().0.contains("--etp 2 does not divide the 3 ranks that the launcher has started")
    );
    let alone = |etp| Mesh { ranks: 1, ep: 1, etp, engines: false };
    let whole = mesh::places(alone(None), &[Device::Cpu], ranks::TIMEOUT).unwrap().remove(0);
    let error = mesh::of_process(alone(Some(1)), 0, whole.experts).map(drop).unwrap_err();
    assert!(error.to_string().contains("over NCCL"), "{error}");
}

/// Before anything is opened, and saying what to give instead.
#[test]
fn what_burn_cannot_do_is_refused() {
    use clap::Parser;
    let refused = |more: &[&str]| {
        let args = ["train_lm", "--framework", "burn"].iter().chain(more);
        crate::Args::try_parse_from(args).unwrap().settings().err().map(|e| e.0).unwrap_or_default()
    };
    let text = refused(&["--device", "cuda", "--ranks", "2"]);
    let wanted = match (cfg!(feature = "burn"), cfg!(feature = "burn-cuda"), cfg!(feature = "nccl")) {
        (false, ..) => Some("--features burn"),
        (_, false, _) => Some("--features burn-cuda"),
        (.., false) => Some("--ranks 1 instead of 2"),
        _ => None,
    };
    assert!(wanted.map_or(text.is_empty(), |wanted| text.contains(wanted)), "{text}");
    for all in [&["--ranks", "2"][..], &["--etp", "2", "--microbatches", "2", "--clip", "1", "--save", "state"]] {
        let text = refused(all);
        assert_eq!(text.contains("--features burn"), !cfg!(feature = "burn"), "{text}");
        assert_eq!(text.is_empty(), cfg!(feature = "burn"), "{text}");
    }
}
