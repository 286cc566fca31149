//! Steps: the bits of one rank, and what ranks refuse before one.

use super::*;

#[test]
fn the_bits_are_those_of_one_rank() {
    for moments in [DType::F32, DType::BF16] {
        let alone = train(Mesh::new(1, 1), moments, 0..6);
        let skipped = f64::from_bits(alone.1[4]);
        assert_eq!((f64::from_bits(alone.1[3]), skipped), (5.0, 1.0), "one step has an inf");
        for mesh in meshes() {
            assert!(train(mesh, moments, 0..6) == alone, "{mesh:?}, moments in {moments}");
        }
    }
}

/// The error of each rank where one of two meets one of its own.
fn told(results: Vec<Result<()>>, own: &str) {
    let [peer, failing] = <[_; 2]>::try_from(results).unwrap();
    let failing = failing.unwrap_err().to_string();
    assert!(failing.contains(own), "{failing}");
    match peer {
        Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) => assert!(reason.contains(own), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_fails_tells_the_others() {
    let mesh = Mesh::new(2, 1);
    told(
        ranks(2, |comm| {
            let fails = comm.rank() == 1;
            let mut rank = Rank::new(mesh, comm, DType::F32)?;
            let short = tensor(DType::F32, &[1.0], &[1]);
            let whole: Vec<_> =
                rank.params.iter().map(|p| tensor(p.dtype(), &vec![0.0; p.view().count()], p.dims())).collect();
            let mut gradients: Vec<_> = whole.iter().map(|g| Some(g.view())).collect();
            if fails {
                gradients[1] = Some(short.view());
            }
            rank.adam.begin(&gradients)
        }),
        "gradient router.weight",
    );
    told(
        ranks(2, |comm| {
            let lr = if comm.rank() == 1 { f64::NAN } else { 0.1 };
            let group = GroupOptions { lr, ..Default::default() };
            AdamW::new(&Cpu::new(), AdamWOptions::default(), &[group], vec![], Some(Box::new(comm))).map(drop)
        }),
        "lr",
    );
    let dir = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    told(
        ranks(2, |comm| {
            let from = if comm.rank() == 1 { empty.path() } else { dir.path() };
            let mut rank = Rank::new(mesh, ending(comm), DType::F32)?;
            let refused = rank.adam.load(from).map(drop);
            // The communicator works on.
            rank.adam.load(dir.path())?;
            refused
        }),
        "config.json",
    );
}

#[test]
fn ranks_that_differ_are_refused() {
    let make = |comm: ThreadComm, options: AdamWOptions, specs: Vec<ParamSpec>| {
        AdamW::new(&Cpu::new(), options, &[options.group], specs, Some(Box::new(comm))).map(drop)
    };
    let spec = |name: &str, shard| ParamSpec { name: name.into(), shard, dtype: DType::F32, group: 0 };
    // Each rank names the field with its own value and the other rank's.
    let mismatch = |results: Vec<Result<()>>, wanted: &str, values: [&str; 2]| {
        for (own, result) in results.into_iter().enumerate() {
            match &result {
                Err(Error::ConfigMismatch { call: "AdamW", field, rank, value, peer, peer_value }) => {
                    assert_eq!((field.as_str(), *rank, *peer), (wanted, own, 1 - own), "{result:?}");
                    assert_eq!([value.as_str(), peer_value], [values[own], values[1 - own]], "{wanted}");
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let usual = AdamWOptions { max_norm: Some(1.5), ..Default::default() };
    let scaled = |scaling: LossScaling| AdamWOptions { loss_scaling: Some(scaling), ..usual };
    let scaling = LossScaling::default();
    let cases = [
        (AdamWOptions { max_norm: Some(2.0), ..usual }, "max_norm", ["1.5", "2"]),
        (AdamWOptions { max_norm: None, ..usual }, "max_norm", ["1.5", "none"]),
        (AdamWOptions { moments: DType::BF16, ..usual }, "moments", ["f32", "bf16"]),
        (AdamWOptions { seed: 9, ..usual }, "seed", ["0", "9"]),
        (scaled(scaling), "loss_scaling.initial", ["none", "65536"]),
    ];
    for (other, field, values) in cases {
        let results = ranks(2, |comm| {
            let options = if comm.rank() == 1 { other } else { usual };
            make(comm, options, vec![])
        });
        mismatch(results, &format!("optimizer.{field}"), values);
    }
    let results = ranks(2, |comm| {
        let interval = scaling.interval + comm.rank() as u32;
        make(comm, scaled(LossScaling { interval, ..scaling }), vec![])
    });
    mismatch(results, "optimizer.loss_scaling.interval", ["2000", "2001"]);
    let counts = ranks(2, |comm| {
        let specs = (0..comm.rank()).map(|i| spec(&i.to_string(), ParamShard::whole(&[2]))).collect();
        make(comm, usual, specs)
    });
    mismatch(counts, "optimizer.parameters", ["0", "1"]);
    let groups = ranks(2, |comm| {
        let groups = vec![usual.group; 1 + comm.rank()];
        AdamW::new(&Cpu::new(), usual, &groups, vec![], Some(Box::new(comm))).map(drop)
    });
    mismatch(groups, "optimizer.groups", ["1", "2"]);
    type OfGroup = fn(&mut GroupOptions);
    let of_groups: [(OfGroup, &str, [&str; 2]); 5] = [
        (|group| group.lr = 0.5, "lr", ["0.001", "0.5"]),
        (|group| group.betas[0] = 0.5, "betas[0]", ["0.9", "0.5"]),
        (|group| group.betas[1] = 0.5, "betas[1]", ["0.999", "0.5"]),
        (|group| group.eps = 0.5, "eps", ["0.00000001", "0.5"]),
        (|group| group.weight_decay = 0.5, "weight_decay", ["0.01", "0.5"]),
    ];
    for (change, option, values) in of_groups {
        let results = ranks(2, |comm| {
            let mut groups = [usual.group; 2];
            if comm.rank() == 1 {
                change(&mut groups[1]);
            }
            AdamW::new(&Cpu::new(), usual, &groups, vec![], Some(Box::new(comm))).map(drop)
        });
        mismatch(results, &format!("optimizer.group.{option}"), values);
    }
    let long = "é".repeat(200);
    type Change = fn(&mut ParamSpec);
    let parts: [(Change, &str, [&str; 2]); 5] = [
        (|spec| spec.name = "p1".into(), "name", ["p0", "p1"]),
        (|spec| spec.name = "é".repeat(200), "name", ["p0", &long]),
        (|spec| spec.shard = ParamShard::whole(&[3, 2]), "dims of p0", ["[2, 3]", "[3, 2]"]),
        (|spec| spec.dtype = DType::F16, "dtype of p0", ["f32", "f16"]),
        (|spec| spec.group = 1, "group of p0", ["0", "1"]),
    ];
    for (change, part, values) in parts {
        let results = ranks(2, |comm| {
            let mut other = spec("p0", ParamShard::whole(&[2, 3]));
            if comm.rank() == 1 {
                change(&mut other);
            }
            let specs = vec![spec("first", ParamShard::whole(&[2])), other];
            AdamW::new(&Cpu::new(), usual, &[usual.group; 2], specs, Some(Box::new(comm))).map(drop)
        });
        if values[1].len() <= 256 {
            mismatch(results, &format!("optimizer.parameters[1].{part}"), values);
            continue;
        }
        // What travels of a name has an end.
        let cut = "é".repeat(128);
        let found = results.into_iter().map(|result| match result {
            Err(Error::ConfigMismatch { value, peer_value, .. }) => [value, peer_value],
            other => panic!("{other:?}"),
        });
        assert_eq!(found.collect::<Vec<_>>(), [["p0", &cut], [values[1], "p0"]]);
    }
    // Nothing differs where there is nothing.
    assert!(ranks(2, |comm| make(comm, usual, vec![])).iter().all(Result::is_ok));
    // Both hold the first half.
    let holes = ranks(2, |comm| {
        let shards = Shards::new(&[4, 3], 2, 0).unwrap();
        make(comm, usual, vec![spec("cut", ParamShard::whole(&[4, 3]).shard(&shards, 0).unwrap())])
    });
    for result in holes {
        assert!(matches!(&result, Err(Error::Invalid { name, .. }) if name == "parameter cut"), "{result:?}");
    }
}

/// The loss's factor of a state is that of whoever goes on with one, and nobody else's.
#[test]
fn the_losss_factor_follows_the_options() {
    let scaling = |initial, max| Some(LossScaling { initial, max, ..LossScaling::default() });
    let cases = [
        // Saved under, loaded under, steps with inf in between that halve the factor; the factor then.
        (scaling(1024.0, 65536.0), None, 1, 1.0),
        (None, scaling(1024.0, 65536.0), 0, 1024.0),
        (scaling(1024.0, 65536.0), scaling(8.0, 65536.0), 1, 512.0),
        (scaling(1024.0, 65536.0), scaling(8.0, 256.0), 1, 256.0),
        (None, None, 0, 1.0),
    ];
    for (before, after, skipped, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let make = |loss_scaling| {
            let options = AdamWOptions { loss_scaling, ..Default::default() };
            let spec = ParamSpec { name: "w".into(), shard: ParamShard::whole(&[1, 1]), dtype: DType::F32, group: 0 };
            AdamW::new(&Cpu::new(), options, &[options.group], vec![spec], None).unwrap()
        };
        let mut adam = make(before);
        let inf = tensor(DType::F32, &[f64::INFINITY], &[1, 1]);
        for _ in 0..skipped {
            adam.begin(&[Some(inf.view())]).unwrap();
        }
        adam.save(dir.path()).unwrap();
        let mut adam = make(after);
        adam.load(dir.path()).unwrap();
        assert_eq!(adam.stats().unwrap().loss_scale, expected, "{before:?} to {after:?}");
        // Gradients of a loss that is scaled so have the norm of the loss itself.
        let mut param = tensor(DType::F32, &[0.0], &[1, 1]);
        adam.read_param(0, param.view()).unwrap();
        let gradient = tensor(DType::F32, &[3.0 * expected], &[1, 1]);
        adam.begin(&[Some(gradient.view())]).unwrap();
        adam.update(vec![StepTensor { index: 0, param: param.view_mut(), gradient: gradient.view() }]).unwrap();
        if after.is_some() {
            assert_eq!(adam.stats().unwrap().norm, 3.0);
        }
    }
}

/// A rank that does not come to a step tells the others, and all go on with the next.
#[test]
fn a_refused_step_is_told() {
    let results = ranks(2, |comm| {
        let refuses = comm.rank() == 1;
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        let first = match refuses {
            true => {
                let message = "backward failed".to_string();
                let reason = Error::Framework { call: "backward", framework: "a test", message };
                rank.adam.refuse(&reason);
                Err(reason)
            }
            false => rank.step(0),
        };
        rank.step(1)?;
        first
    });
    told(results, "backward");
}
