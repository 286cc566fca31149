//! Steps of an optimizer over ranks.

use super::*;

/// A gradient that one rank alone has of what all hold: nobody steps, and all work on. Any text refuses a step.
fn a_gradient_on_one_rank_alone_steps_nothing() -> AnyResult<()> {
    for count in [2, 4] {
        let comms = ThreadWorld::create(count, TIMEOUT);
        std::thread::scope(|scope| {
            let run = |comm: ThreadComm| -> AnyResult<()> {
                let rank = comm.rank();
                let [router, other] = [[1f32, 2.], [3., 4.]].map(|values| Var::new(&values, &Device::Cpu));
                let (router, other) = (router?, other?);
                let group = GroupOptions { lr: 0.5, ..GroupOptions::default() };
                let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
                let params = vec![AdamWParam::new("router", &router), AdamWParam::new("other", &other)];
                let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
                let all = || (router.sqr()?.sum_all()? + other.sqr()?.sum_all()?)?.backward();
                let one = if rank == CULPRIT { other.sqr()?.sum_all()?.backward()? } else { all()? };
                match error_of(&adam.step(&one).expect_err("a gradient on other ranks alone")) {
                    Some(Error::Invalid { name, found, .. }) => {
                        assert_eq!(name, "gradient of router");
                        assert_eq!(found, "one on rank 0, none on rank 1");
                    }
                    other => panic!("rank {rank}: {other:?}"),
                }
                assert_eq!((router.to_vec1::<f32>()?, other.to_vec1::<f32>()?), (vec![1., 2.], vec![3., 4.]));
                assert_eq!(adam.stats()?.steps, 0);
                // One that no rank has is no error.
                adam.step(&other.sqr()?.sum_all()?.backward()?)?;
                if rank == CULPRIT {
                    adam.refuse("a loss of no number");
                } else {
                    let error = adam.step(&all()?).expect_err("a refusal");
                    assert!(error.to_string().contains("a loss of no number"), "{error}");
                }
                adam.step(&all()?)?;
                assert_eq!(adam.stats()?.steps, 2);
                Ok(())
            };
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
            threads.into_iter().try_for_each(|t| t.join().expect("a rank panicked"))
        })?;
    }
    Ok(())
}

/// Ranks that name different models save nothing, and each is told.
fn ranks_with_other_identities_save_nothing() -> AnyResult<()> {
    let folder = tempfile::tempdir()?;
    std::thread::scope(|scope| {
        let save = |comm: ThreadComm| -> AnyResult<()> {
            let (rank, var) = (comm.rank(), Var::new(&[1f32, 2.], &Device::Cpu)?);
            let (params, options) = (vec![AdamWParam::new("w", &var)], AdamWOptions::default());
            let adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[options.group])?;
            match error_of(&adam.with_identity(format!("model {rank}")).save(folder.path()).unwrap_err()) {
                Some(Error::ConfigMismatch { field, peer_value, .. }) => {
                    assert_eq!((field.as_str(), peer_value), ("identity", &format!("\"model {}\"", 1 - rank)));
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            Ok(())
        };
        let start = |comm| scope.spawn(move || save(comm));
        let threads: Vec<_> = ThreadWorld::create(2, TIMEOUT).into_iter().map(start).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
    Ok(())
}

/// Experts that are not named as parts have other moments on every rank: a save would keep the first rank's for all.
fn experts_that_are_named_as_whole_are_not_saved() -> AnyResult<()> {
    /// The rank whose gradients are others.
    const LAST: usize = 2;
    let folder = tempfile::tempdir()?;
    std::thread::scope(|scope| {
        let save = |comm: ThreadComm| -> AnyResult<()> {
            let rank = comm.rank();
            let [norm, expert] = [1f32, 2.].map(|value| Var::new(&[value, value], &Device::Cpu));
            let (norm, expert) = (norm?, expert?);
            let params = vec![AdamWParam::new("norm", &norm), AdamWParam::new("experts.up", &expert)];
            let options = AdamWOptions::default();
            let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[options.group])?;
            let own = expert.as_tensor().affine(if rank == LAST { 2.0 } else { 1.0 }, 0.0)?.sum_all()?;
            let loss = |expert: &Tensor| (norm.as_tensor().sum_all()? + expert)?.backward();
            // The same on all ranks, and then the last one's own.
            adam.step(&loss(&expert.as_tensor().sum_all()?)?)?;
            adam.save(folder.path().join("alike"))?;
            adam.step(&loss(&own)?)?;
            match error_of(&adam.save(folder.path().join("others")).unwrap_err()) {
                Some(Error::ConfigMismatch { field, peer, .. }) if field.contains("experts.up") => {
                    assert_eq!(*peer, if rank == LAST { 0 } else { LAST });
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            adam.step(&loss(&own)?)?;
            Ok(())
        };
        let start = |comm| scope.spawn(move || save(comm));
        let threads: Vec<_> = ThreadWorld::create(LAST + 1, TIMEOUT).into_iter().map(start).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    assert!(!folder.path().join("others").exists());
    Ok(())
}

/// Experts of the user's own, of one name on every rank, are parts of one parameter: norm, steps and saved state are those
/// of a single rank that has all of them, a bias among them.
fn own_experts_step_as_parts_of_one_parameter() -> AnyResult<()> {
    const RANKS: usize = 2;
    let group = GroupOptions { lr: 0.25, ..GroupOptions::default() };
    let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
    let values = |rank: usize, dims: &[usize]| -> AnyResult<Var> {
        let count = dims.iter().product::<usize>();
        let of = (0..count).map(|i| ((rank * 7 + i * 3) % 11) as f32 - 5.0).collect::<Vec<_>>();
        Ok(Var::from_vec(of, dims, &Device::Cpu)?)
    };
    let gradients = |vars: [&Var; 2]| (vars[0].sqr()?.sum_all()? + vars[1].sqr()?.sum_all()?)?.backward();
    let folder = tempfile::tempdir()?;
    // The same as one rank has it: ranks' rows behind each other.
    let whole = [[3, 4], [1, 3]].map(|dims| -> AnyResult<Var> {
        let parts =
            (0..RANKS).map(|rank| Ok(values(rank, &dims)?.as_detached_tensor())).collect::<AnyResult<Vec<_>>>()?;
        Ok(Var::from_tensor(&Tensor::cat(&parts, 0)?)?)
    });
    let [weight, bias] = whole;
    let (weight, bias) = (weight?, bias?);
    let named = vec![AdamWParam::new("expert.weight", &weight), AdamWParam::new("expert.bias", &bias)];
    let mut one = AdamW::with_groups(named, options, &[group])?;
    let mut norms = Vec::new();
    for _ in 0..2 {
        one.step(&gradients([&weight, &bias])?)?;
        norms.push(one.stats()?.norm);
    }
    let at_two = [flat(&weight)?, flat(&bias)?];
    let run = |comm: ThreadComm| -> AnyResult<()> {
        let rank = comm.rank();
        let (weight, bias) = (values(rank, &[3, 4])?, values(rank, &[3])?);
        let part = |name: &str, var: &Var| -> AnyResult<AdamWParam> {
            Ok(AdamWParam::new(name, var).with_shard(ParamShard::of_experts(var.dims(), rank, RANKS)?))
        };
        let params = vec![part("expert.weight", &weight)?, part("expert.bias", &bias)?];
        let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
        for norm in &norms {
            adam.step(&gradients([&weight, &bias])?)?;
            assert_eq!(adam.stats()?.norm, *norm, "rank {rank}");
        }
        assert_eq!(flat(&weight)?, at_two[0][rank * 12..(rank + 1) * 12]);
        assert_eq!(flat(&bias)?, at_two[1][rank * 3..(rank + 1) * 3]);
        Ok(adam.save(folder.path().join("state"))?)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            ThreadWorld::create(RANKS, TIMEOUT).into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().try_for_each(|t| t.join().expect("a rank panicked"))
    })?;
    // What two ranks have saved goes on on one, with both ranks' moments.
    let resumed = [weight.as_detached_tensor(), bias.as_detached_tensor()].map(|t| Var::from_tensor(&t));
    let [first, second] = resumed;
    let (first, second) = (first?, second?);
    let named = vec![AdamWParam::new("expert.weight", &first), AdamWParam::new("expert.bias", &second)];
    let mut loaded = AdamW::with_groups(named, options, &[group])?;
    assert_eq!(loaded.load(folder.path().join("state"))?, 2);
    one.step(&gradients([&weight, &bias])?)?;
    loaded.step(&gradients([&first, &second])?)?;
    assert_eq!([flat(&first)?, flat(&second)?], [flat(&weight)?, flat(&bias)?]);
    Ok(())
}

/// What fails in an optimizer's step before its norm is told to the ranks that wait there, and all go on.
fn a_step_that_fails_before_the_norm_is_told() -> AnyResult<()> {
    for fault in ["lr", "a gradient's size", "the loss", "gradients that are not summed"] {
        let comms = ThreadWorld::create(2, TIMEOUT);
        let results = std::thread::scope(|scope| {
            let step = |comm: ThreadComm| -> AnyResult<candle_core::Result<()>> {
                let fails = comm.rank() == CULPRIT;
                let var = Var::new(&[1f32, 2.], &Device::Cpu)?;
                let group = GroupOptions { lr: 0.5, ..GroupOptions::default() };
                let options = AdamWOptions { group, max_norm: Some(1.0), ..AdamWOptions::default() };
                let params = vec![AdamWParam::new("w", &var)];
                let mut adam = AdamW::over_ranks(&Cpu::new(), Box::new(comm), params, options, &[group])?;
                let gradients = || var.as_tensor().sqr()?.sum_all()?.backward();
                let failed = match fault {
                    "lr" if fails => {
                        adam.set_learning_rate(f64::NAN);
                        let failed = adam.step(&gradients()?);
                        adam.set_learning_rate(0.5);
                        failed
                    }
                    "a gradient's size" if fails => {
                        let mut gradients = gradients()?;
                        gradients.insert(&var, Tensor::new(&[1f32], &Device::Cpu)?);
                        adam.step(&gradients)
                    }
                    "the loss" if fails => {
                        let loss = var.as_tensor().sqr()?.sum_all()?.apply_op1(Failing(true))?;
                        let failed = loss.backward().map(drop);
                        adam.refuse(failed.as_ref().expect_err("a loss that fails"));
                        failed
                    }
                    "gradients that are not summed" if fails => adam.backward_step(&var.as_tensor().sqr()?.sum_all()?),
                    _ => adam.step(&gradients()?),
                };
                adam.step(&gradients()?)?;
                assert_eq!(adam.stats()?.steps, 1, "{fault}");
                Ok(failed)
            };
            let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || step(comm))).collect();
            threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect::<AnyResult<Vec<_>>>()
        })?;
        for (rank, result) in results.into_iter().enumerate() {
            let error = result.expect_err(fault);
            let told = matches!(error_of(&error), Some(Error::Comm(CommError::Refused { peer: CULPRIT, .. })));
            assert_eq!(told, rank != CULPRIT, "{fault}: {error}");
        }
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    ranks_with_other_identities_save_nothing,
    experts_that_are_named_as_whole_are_not_saved,
    a_gradient_on_one_rank_alone_steps_nothing,
    a_step_that_fails_before_the_norm_is_told,
    own_experts_step_as_parts_of_one_parameter,
}
