//! Runs that go on from another's state.

use super::*;
use crate::state::{self, StateError};

/// A run in two parts, the second from the first's state, by what trains.
pub fn in_two_parts(
    train: fn(&Settings) -> Vec<Step>,
    (settings, then): (&Settings, Mesh),
    dir: &std::path::Path,
) -> Vec<Step> {
    let mut steps = train(&Settings { range: 0..2, save: Some(dir.to_path_buf()), ..settings.clone() });
    let resumed = Settings { range: 2..4, resume: Some(dir.to_path_buf()), mesh: then, ..settings.clone() };
    assert_eq!(state::saved(dir, &resumed).unwrap().steps, 2);
    steps.extend(train(&resumed));
    steps
}

/// Losses, norms and weights are those of the unbroken run to the bit; at another number of ranks where these decide no
/// bit.
#[test]
fn a_resumed_run_is_the_unbroken_one() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let with_clip = |ep, etp| Settings { clip: Some(0.5), ..settings(ep, etp) };
    for (number, settings) in [with_clip(4, None), with_clip(2, Some(2)), with_clip(1, Some(4))].into_iter().enumerate()
    {
        let expected = train(&settings);
        assert_eq!(
            bits(&in_two_parts(train, (&settings, settings.mesh), &dir.join(number.to_string()))),
            bits(&expected)
        );
    }
    // Other numbers of shards, and none.
    let settings = with_clip(1, Some(4));
    let expected = bits(&train(&settings));
    for etp in [1, 2] {
        let then = Mesh { etp: Some(etp), ..settings.mesh };
        assert_eq!(bits(&in_two_parts(train, (&settings, then), &dir.join(format!("etp {etp}")))), expected);
    }
    // Another number of ranks sums in another order: as far apart as in `several_microbatches_and_whole_weights`.
    let then = Mesh { ranks: 2, ep: 2, etp: None, engines: false };
    let one_balance = Settings { balance: 0.0, ..settings };
    let expected = train(&one_balance);
    for (found, expected) in in_two_parts(train, (&one_balance, then), &dir.join("whole")).iter().zip(&expected) {
        assert!((found.loss - expected.loss).abs() <= 2e-5, "{} and {}", found.loss, expected.loss);
    }
}

/// The dispatcher that was the quickest stays that of the run, which times nothing when it goes on: its bits are those
/// of a run whose dispatcher is named from the start.
#[test]
fn a_measured_dispatcher_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let all = Settings { measure_dispatcher: true, ..settings(4, None) };
    let mut found = train(&Settings { range: 0..2, save: Some(dir.to_path_buf()), ..all.clone() });
    let kind = state::saved(dir, &all).unwrap().dispatcher.unwrap();
    assert!(matches!(kind, DispatcherKind::AllToAll | DispatcherKind::AllGather), "{kind}");

    let resumed = resumed(Settings { resume: Some(dir.to_path_buf()), ..all.clone() }).unwrap();
    assert_eq!((resumed.range.clone(), resumed.dispatcher, resumed.measure_dispatcher), (2..4, Some(kind), false));
    let config = ranks::group_config(&resumed);
    assert_eq!((config.dispatcher, config.measure), (kind, None));
    let again = dir.join("again");
    found.extend(train(&Settings { save: Some(again.clone()), ..resumed }));
    let named = Settings { dispatcher: Some(kind), measure_dispatcher: false, ..all.clone() };
    assert_eq!(bits(&found), bits(&train(&named)), "{kind}");
    assert_eq!(state::saved(&again, &all).unwrap().dispatcher, Some(kind));

    // What the command line names goes before.
    let other = [DispatcherKind::AllToAll, DispatcherKind::AllGather].into_iter().find(|other| *other != kind);
    let renamed = Settings { dispatcher: other, resume: Some(dir.to_path_buf()), ..named.clone() };
    assert_eq!(super::resumed(renamed).unwrap().dispatcher, other);
}

/// As states are where no dispatcher was measured or named: the group chooses, or measures.
#[test]
fn a_state_need_not_have_a_dispatcher() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let plain = Settings { layers: 1, ..settings(4, None) };
    train(&Settings { range: 0..1, save: Some(dir.to_path_buf()), ..plain.clone() });
    let run = dir.join("training.json");
    let text = std::fs::read_to_string(&run).unwrap();
    assert!(!text.contains("dispatcher"), "{text}");
    for measure_dispatcher in [false, true] {
        let settings = Settings { resume: Some(dir.to_path_buf()), measure_dispatcher, ..plain.clone() };
        let resumed = resumed(settings).unwrap();
        assert_eq!((resumed.dispatcher, resumed.measure_dispatcher), (None, measure_dispatcher));
        assert_eq!(ranks::group_config(&resumed).measure.is_some(), measure_dispatcher);
    }
    // One that no dispatcher has.
    std::fs::write(&run, text.replacen('{', "{\n  \"dispatcher\": \"by_hand\",", 1)).unwrap();
    let error = state::saved(dir, &plain).unwrap_err();
    assert!(matches!(&error, StateError::Damaged { reason, .. } if reason.contains("by_hand")), "{error}");
    // One rank alone has nothing to choose, whatever several have taken.
    let alone = Settings { mesh: Mesh { ranks: 1, ep: 1, etp: None, engines: false }, ..plain };
    let named = Settings { dispatcher: Some(DispatcherKind::AllGather), ..alone };
    assert_eq!(ranks::group_config(&named).dispatcher, DispatcherKind::Auto);
}

#[test]
fn options_of_the_dispatcher_that_exclude_each_other_are_refused() {
    let refused = |more: &[&str]| {
        Args::try_parse_from(["train_lm"].iter().chain(more)).map(drop).map_err(|error| error.to_string())
    };
    for (more, wanted) in [
        (&["--dispatcher", "by_hand"][..], "all_gather"),
        (&["--dispatcher", "all_gather", "--measure-dispatcher"], "--measure-dispatcher"),
        (&["--etp", "2", "--measure-dispatcher"], "--etp"),
    ] {
        let error = refused(more);
        assert!(error.as_ref().is_err_and(|text| text.contains(wanted)), "{more:?}: {error:?}");
    }
    assert_eq!(refused(&["--dispatcher", "all-gather"]), Ok(()));
}

/// Main weights are in the optimizer's state: a run in 16 bits goes on with those, not with what they were rounded to.
#[test]
fn a_resumed_run_in_16_bits_is_the_unbroken_one() {
    let folder = tempfile::tempdir().unwrap();
    for (number, dtype) in [candle_core::DType::BF16, candle_core::DType::F16].into_iter().enumerate() {
        for (ep, etp) in [(4, None), (2, Some(2))] {
            let settings = Settings { layer_dtype: dtype, clip: Some(0.5), ..settings(ep, etp) };
            let losses =
                |steps: &[Step]| -> Vec<_> { steps.iter().map(|s| (s.loss.to_bits(), s.norm, s.scale)).collect() };
            let expected = unchecked(&settings);
            assert!(expected.iter().all(|s| s.loss.is_finite() && s.scale.is_some() == (number == 1)));
            let dir = folder.path().join(format!("{number} {ep}"));
            let mut found = unchecked(&Settings { range: 0..2, save: Some(dir.clone()), ..settings.clone() });
            found.extend(unchecked(&Settings { range: 2..4, resume: Some(dir), ..settings.clone() }));
            assert_eq!(losses(&found), losses(&expected), "{dtype:?}");
        }
    }
}

/// Trains without a dense reference model.
fn unchecked(settings: &Settings) -> Vec<Step> {
    let corpus = Corpus::load(None).unwrap();
    let mut steps = Vec::new();
    let places = mesh::places(settings.mesh, &vec![Device::Cpu; settings.mesh.ranks], ranks::TIMEOUT).unwrap();
    let make = |params: &[_], place, rank| candle::Rank::new(settings, params, (place, rank));
    let on_step = |step: Step| {
        assert!(step.twin.is_none());
        steps.push(step);
        Ok(())
    };
    ranks::train(settings, (places, 1), &corpus, make, on_step).unwrap();
    steps
}

#[test]
fn a_rank_that_cannot_save_fails_the_run_on_all() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("training.json")).unwrap();
    let settings = Settings { range: 0..1, layers: 1, save: Some(folder.path().to_path_buf()), ..settings(4, None) };
    let places = mesh::places(settings.mesh, &vec![Device::Cpu; settings.mesh.ranks], ranks::TIMEOUT).unwrap();
    let make = |params: &[_], place, rank| candle::Rank::new(&settings, params, (place, rank));
    let done = ranks::train(&settings, (places, 1), &Corpus::load(None).unwrap(), make, |_| Ok(()));
    let error = done.unwrap_err().to_string();
    assert!(error.contains("rank 0: ") && error.contains("training.json"), "{error}");
    for rank in 1..4 {
        assert!(error.contains(&format!("rank {rank}: rank 0: ")), "{error}");
    }
}

/// A save that ends at any of its steps, as where its process is killed, leaves the state before or the new one: a run
/// goes on from it to the bit. The next save leaves nothing of that one.
#[test]
fn a_save_that_ends_anywhere_leaves_a_whole_state() {
    let corpus = Corpus::load(None).unwrap();
    let settings =
        Settings { layers: 1, mesh: Mesh { ranks: 1, ep: 1, etp: None, engines: false }, ..settings(1, None) };
    // Losses of some steps, and the save behind them.
    let run = |range: std::ops::Range<usize>, resume: Option<&Path>, save: &Path| {
        let settings = Settings { range: range.clone(), resume: resume.map(Path::to_path_buf), ..settings.clone() };
        let place = mesh::places(settings.mesh, &[Device::Cpu], ranks::TIMEOUT).unwrap().remove(0);
        let mut rank = candle::Rank::new(&settings, &state::params(&settings).unwrap(), (place, 0)).unwrap();
        let mut step = |step| ranks::own_step(&mut rank, &settings, (&corpus, 1), 0, step).unwrap().loss.to_bits();
        let losses: Vec<u64> = range.clone().map(&mut step).collect();
        (losses, rank.save(save, range.end))
    };
    let names = |dir: &Path| -> Vec<_> {
        let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let elsewhere = tempfile::tempdir().unwrap();
    let (unbroken, saved) = run(0..3, None, &elsewhere.path().join("unbroken"));
    saved.unwrap();
    let mut seen = [0; 2];
    for at in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let dir = &folder.path().join("state");
        run(0..1, None, dir).1.unwrap();
        state::POINTS_LEFT.set(at);
        let (_, saved) = run(1..2, Some(dir), dir);
        let killed = state::POINTS_LEFT.replace(usize::MAX) == 0;
        assert_eq!(saved.is_err(), killed, "{saved:?}");
        let made = state::saved(dir, &settings).unwrap().steps;
        seen[made - 1] += 1;
        let (losses, saved) = run(made..3, Some(dir), dir);
        saved.unwrap();
        assert_eq!(losses, unbroken[made..], "point {at}: {made} steps");
        assert_eq!(state::saved(dir, &settings).unwrap().steps, 3);
        let state = names(dir).remove(0);
        assert_eq!(names(dir), [state.clone(), "training.json".into()], "point {at}");
        assert_eq!(names(&dir.join(state)), ["optimizer", "weights.safetensors"], "point {at}");
        if !killed {
            break;
        }
    }
    assert!(seen[0] >= 5 && seen[1] >= 2, "{seen:?}");
}

#[test]
fn states_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    let settings = Settings { layers: 1, ..settings(4, None) };
    train(&Settings { range: 0..1, save: Some(first.clone()), ..settings.clone() });
    train(&Settings { range: 0..2, save: Some(second.clone()), ..settings.clone() });
    // Of another model, and of another training.
    let refused = |settings: Settings| match state::saved(&first, &settings) {
        Err(StateError::OtherRun { field, expected, found, .. }) => (field, expected, found),
        other => panic!("{other:?}"),
    };
    let hidden = refused(Settings { hidden: 32, ..settings.clone() });
    assert_eq!(hidden, ("hidden", "32".to_string(), "16".to_string()));
    assert_eq!(refused(Settings { seed: 4, ..settings.clone() }).0, "seed");
    assert_eq!(refused(Settings { text: 1, ..settings.clone() }).0, "text");
    assert_eq!(refused(Settings { microbatches: 2, ..settings.clone() }).0, "microbatches");
    assert_eq!(refused(Settings { token_payload: Payload::Mxfp8, ..settings.clone() }).0, "token_payload");
    assert_eq!(refused(Settings { shard_payload: Payload::Mxfp8, ..settings.clone() }).0, "shard_payload");
    assert_eq!(refused(Settings { layer_dtype: candle_core::DType::BF16, ..settings.clone() }).0, "layer_dtype");
    // None, and one that is cut off.
    let nowhere = state::saved(&folder.path().join("nowhere"), &settings);
    assert!(matches!(nowhere, Err(StateError::Io { .. })), "{nowhere:?}");
    let resumed = Settings { range: 1..4, resume: Some(first.clone()), ..settings.clone() };
    assert!(state::params(&resumed).is_ok());
    let weights = first.join("state-0/weights.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(state::params(&resumed), Err(StateError::Damaged { .. })));
    std::fs::write(&weights, &whole).unwrap();
    // Weights of one step with the optimizer of another, on every rank.
    for file in std::fs::read_dir(second.join("state-0/optimizer")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), first.join("state-0/optimizer").join(file.file_name())).unwrap();
    }
    let places = mesh::places(resumed.mesh, &vec![Device::Cpu; 4], ranks::TIMEOUT).unwrap();
    let params = state::params(&resumed).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = places
            .into_iter()
            .enumerate()
            .map(|(rank, place)| {
                let (settings, params) = (&resumed, &params);
                scope.spawn(move || candle::Rank::new(settings, params, (place, rank)).map(drop).unwrap_err())
            })
            .collect();
        for thread in threads {
            let error = thread.join().unwrap();
            let own = error.downcast_ref::<StateError>();
            assert!(matches!(own, Some(StateError::OtherStep { weights: 1, optimizer: 2, .. })), "{error}");
        }
    });
}
