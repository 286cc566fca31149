//! Saved states: of other numbers of ranks, steps, parameters and models, and what is no target.

use super::*;

/// Trains, saves, and goes on at another division.
fn saved(from: Mesh, to: Mesh, moments: DType, dir: &Path) -> Whole {
    let before = ranks(from.ranks(), |comm| {
        let mut rank = Rank::new(from, comm, moments).unwrap();
        (0..4).for_each(|step| rank.step(step).unwrap());
        rank.adam.save(dir).unwrap();
        rank.outcome()
    });
    let (values, ..) = whole(&before);
    let outcomes = ranks(to.ranks(), |comm| {
        let mut rank = Rank::new(to, comm, moments).unwrap();
        // The F32 parameter is loaded with the model.
        let router = rank.params[1].as_bytes_mut();
        router.copy_from_slice(&values[1]);
        assert_eq!(rank.adam.load(dir).unwrap(), 3, "one step was skipped");
        for (i, param) in rank.params.iter_mut().enumerate() {
            rank.adam.write_param(i, param.view_mut()).unwrap();
        }
        (4..6).for_each(|step| rank.step(step).unwrap());
        rank.outcome()
    });
    whole(&outcomes)
}

#[test]
fn a_state_goes_on_at_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for moments in [DType::F32, DType::BF16] {
        let uninterrupted = train(Mesh::new(1, 1), moments, 0..6);
        let [one, ep, etp] = [Mesh::new(1, 1), Mesh::new(2, 2), Mesh { pad: 16, ..Mesh::new(1, 4) }];
        let ep = Mesh { pad: 1, ..ep };
        for (from, to) in [(one, one), (one, ep), (ep, etp), (etp, one)] {
            let found = saved(from, to, moments, dir.path());
            let last = &uninterrupted.2[4..];
            let same = (&found.0, found.1, &found.2[..]) == (&uninterrupted.0, uninterrupted.1, last);
            assert!(same, "{from:?} to {to:?}, moments in {moments}");
        }
    }
}

#[test]
fn moments_are_widened_but_not_narrowed() {
    let dir = tempfile::tempdir().unwrap();
    let one = Mesh::new(1, 1);
    let alone = |moments| Rank::new(one, ThreadWorld::create(1, LIMIT).remove(0), moments).unwrap();
    let mut narrow = alone(DType::BF16);
    narrow.step(0).unwrap();
    narrow.adam.save(dir.path()).unwrap();
    assert_eq!(alone(DType::F32).adam.load(dir.path()).unwrap(), 1);
    let mut wide = alone(DType::F32);
    wide.step(0).unwrap();
    wide.adam.save(dir.path()).unwrap();
    let error = alone(DType::BF16).adam.load(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::Checkpoint(CheckpointError::Tensor { .. })), "{error}");
}

/// The first rank alone writes; where it cannot, no rank has saved, and what was there stays.
#[test]
fn a_save_that_fails_fails_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    std::fs::write(&config, "{\"model_type\": \"qwen3_moe\"}").unwrap();
    let results = ranks(2, |comm| {
        let mut rank = Rank::new(Mesh::new(2, 1), ending(comm), DType::F32)?;
        let refused = rank.adam.save(dir.path());
        // The communicator works on.
        let other = tempfile::tempdir().unwrap();
        rank.adam.save(other.path())?;
        refused
    });
    let [own, told] = <[_; 2]>::try_from(results).unwrap();
    assert!(own.as_ref().is_err_and(|e| e.to_string().contains("qwen3_moe")), "{own:?}");
    assert!(matches!(&told, Err(Error::Comm(CommError::Refused { peer: 0, .. }))), "{told:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(std::fs::read_to_string(config).unwrap().contains("qwen3_moe"));
}

/// A state is of a step, and so is a model.
#[test]
fn the_state_of_another_step_is_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let results = ranks(2, |comm| {
        let own = comm.rank();
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        rank.step(0)?;
        let before = rank.outcome();
        let refused = rank.adam.load_at(dir.path(), 2 + own as u64).map(drop);
        assert!(rank.outcome() == before, "nothing has changed");
        assert_eq!(rank.adam.load_at(dir.path(), 1)?, 1);
        refused
    });
    for result in results {
        match result {
            Err(Error::Checkpoint(CheckpointError::Config { field, found, .. })) => {
                assert_eq!((field.as_str(), found.as_str()), ("steps", "1"));
            }
            Err(Error::Comm(CommError::Refused { reason, .. })) => assert!(reason.contains("steps"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn states_of_other_parameters_and_folders_of_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let spec = |name: &str, dims: &[usize], dtype| ParamSpec {
        name: name.into(),
        shard: ParamShard::whole(dims),
        dtype,
        group: 0,
    };
    let load = |specs: Vec<ParamSpec>| {
        let options = AdamWOptions::default();
        AdamW::new(&Cpu::new(), options, &[options.group], specs, None).unwrap().load(dir.path()).unwrap_err()
    };
    let same =
        || -> Vec<ParamSpec> { all_dims().iter().map(|(name, dims, dtype, _)| spec(name, dims, *dtype)).collect() };
    let mut fewer = same();
    fewer.pop();
    assert!(matches!(load(fewer), Error::Checkpoint(CheckpointError::Unexpected { .. })));
    let mut renamed = same();
    renamed[0].name = "other".into();
    assert!(matches!(load(renamed), Error::Checkpoint(CheckpointError::Missing { .. })));
    let mut reshaped = same();
    reshaped[1] = spec("router.weight", &[37, 4], DType::F32);
    assert!(matches!(load(reshaped), Error::Checkpoint(CheckpointError::Tensor { .. })));

    let model = tempfile::tempdir().unwrap();
    std::fs::write(model.path().join("config.json"), "{\"model_type\": \"qwen3_moe\"}").unwrap();
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    let error = rank.adam.save(model.path()).unwrap_err().to_string();
    assert!(error.contains("model_type") && error.contains("qwen3_moe"), "{error}");
    let kept = std::fs::read_to_string(model.path().join("config.json")).unwrap();
    assert!(kept.contains("qwen3_moe"));
    let error = rank.adam.load(model.path()).unwrap_err().to_string();
    assert!(error.contains("model_type"), "{error}");
}

/// Every file of a folder, through links.
fn contents(dir: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut all: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read_to_string(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

/// Refused as a target, with what is in it as it was.
fn refused_target(dir: &Path, words: &[&str]) {
    let before = contents(dir);
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    let error = rank.adam.save(dir).unwrap_err();
    assert!(matches!(&error, Error::Checkpoint(CheckpointError::Config { .. })), "{error}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(contents(dir), before);
}

/// A snapshot of a model in a cache whose files are links into a folder of blobs.
#[cfg(unix)]
#[test]
fn a_snapshot_of_links_is_no_target() {
    let cache = tempfile::tempdir().unwrap();
    let [blobs, snapshot] = ["blobs", "snapshot"].map(|name| cache.path().join(name));
    [&blobs, &snapshot].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let files = [("config.json", "{\"model_type\": \"qwen3_moe\"}"), ("model.safetensors", "weights")];
    for (name, text) in files {
        std::fs::write(blobs.join(name), text).unwrap();
        std::os::unix::fs::symlink(blobs.join(name), snapshot.join(name)).unwrap();
    }
    refused_target(&snapshot, &["model_type", "qwen3_moe", "moebius_adamw"]);
    assert!(snapshot.join("config.json").is_symlink());
    // A link to nothing says nothing of what is there.
    std::fs::remove_file(blobs.join("config.json")).unwrap();
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    assert!(rank.adam.save(&snapshot).is_err());
    assert!(snapshot.join("config.json").is_symlink());
    assert_eq!(std::fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
}

/// Weights alone are a checkpoint too: an index's shards would go with it.
#[test]
fn weights_without_a_config_are_no_target() {
    let index = "{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\"}}";
    let folders = [
        vec![("model.safetensors", "weights")],
        vec![("model.safetensors.index.json", index), ("model-00001-of-00002.safetensors", "weights")],
        vec![("hf_quant_config.json", "{}")],
    ];
    for files in folders {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in &files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        refused_target(dir.path(), &[files[0].0, "without config.json", "moebius_adamw"]);
    }
    // Other files do not stand in the way.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("README.md"), "mine").unwrap();
    train_and_save(dir.path());
    train_and_save(dir.path());
    assert_eq!(std::fs::read_to_string(dir.path().join("README.md")).unwrap(), "mine");
}

/// A state says whose it is, where the optimizer that saved it did: one of another model with the same parameters is
/// refused on every rank, before anything has changed.
#[test]
fn the_state_of_another_model_is_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let refused = |identity: &'static str, dir: &Path| {
        let results = ranks(2, |comm| {
            let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
            rank.adam.set_identity(identity);
            rank.step(0)?;
            let before = rank.outcome();
            let refused = rank.adam.load(dir).map(drop);
            assert!(refused.is_ok() || rank.outcome() == before, "nothing has changed");
            refused
        });
        let text = |result: Result<()>| match result {
            Err(Error::Checkpoint(CheckpointError::Config { field, expected, found, .. })) => {
                assert_eq!(field, "identity");
                format!("{expected}: {found}")
            }
            other => format!("{other:?}"),
        };
        results.into_iter().map(text).collect::<Vec<_>>()
    };
    // One that does not say whose it is.
    assert_eq!(refused("one", dir.path()), ["\"one\", the optimizer's: none"; 2]);
    let saved = ranks(2, |comm| {
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        rank.adam.set_identity("one");
        assert_eq!(rank.adam.identity(), Some("one"));
        rank.step(0)?;
        rank.adam.save(dir.path())
    });
    saved.into_iter().for_each(|saved| saved.unwrap());
    assert_eq!(refused("another", dir.path()), ["\"another\", the optimizer's: \"one\""; 2]);
    assert_eq!(refused("one", dir.path()), ["Ok(())"; 2]);
    // Who does not ask takes any.
    let loaded = ranks(2, |comm| Rank::new(Mesh::new(2, 1), comm, DType::F32)?.adam.load(dir.path()));
    loaded.into_iter().for_each(|steps| assert_eq!(steps.unwrap(), 1));
}

/// Ranks that say of one state that it is different models' write none of it, and each says what the other takes it for.
#[test]
fn ranks_with_other_identities_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (identities, texts) in [
        ([Some("one"), Some("another, longer than one word")], ["\"one\"", "\"another, longer than one word\""]),
        ([Some("one"), None], ["\"one\"", "none"]),
    ] {
        let results = ranks(2, |comm| {
            let own = comm.rank();
            let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
            if let Some(identity) = identities[own] {
                rank.adam.set_identity(identity);
            }
            rank.step(0)?;
            match rank.adam.save(dir.path()) {
                Err(Error::ConfigMismatch { call: "AdamW", field, rank, value, peer, peer_value }) => {
                    assert_eq!((field.as_str(), rank, peer), ("identity", own, 1 - own));
                    assert_eq!([value.as_str(), &peer_value], [texts[own], texts[1 - own]]);
                }
                other => panic!("rank {own}: {other:?}"),
            }
            // The optimizer works on.
            rank.step(1)
        });
        results.into_iter().for_each(|result| result.unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
