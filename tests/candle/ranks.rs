//! Several ranks, one thread each, on the CPU.

use std::time::Duration;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::Error;
use moebius::candle::{DeviceGroup, EpGroup, ExpertParallelMoE, error_of, reduce_gradients, reduce_gradients_over};
use moebius::config::{CapacityOrder, ExpertCapacity};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Noise, ParamKind};

use crate::initial::fresh;
use crate::support::{AnyResult, EXPERTS, H, Part, close, config, flat, seeded, step, tokens};
use crate::trials::tests;

/// Runs one closure a rank, each on its own thread, and returns what they give in rank order.
pub fn ranks<R: Send>(
    count: usize,
    timeout: Duration,
    run: impl Fn(EpGroup) -> AnyResult<R> + Sync,
) -> Vec<AnyResult<R>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ThreadWorld::create(count, timeout)
            .into_iter()
            .map(|comm| {
                let run = &run;
                scope.spawn(move || {
                    let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(EXPERTS, 1024))?;
                    run(EpGroup::new(group))
                })
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect();
        for (rank, error) in results.iter().enumerate().filter_map(|(r, e)| Some((r, e.as_ref().err()?))) {
            eprintln!("rank {rank}: {error}");
        }
        results
    })
}

fn a_second_backward_is_an_error_before_any_collective() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let moe = seeded(group.clone(), config())?;
        let loss = moe.forward(tokens(0..3, &Device::Cpu)?.as_tensor())?.sqr()?.sum_all()?;
        loss.backward()?;
        let calls = || group.lock().dispatcher().communicator().calls();
        let before = calls();
        let error = loss.backward().err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(calls(), before);
        // The group works on.
        moe.forward(tokens(0..3, &Device::Cpu)?.as_tensor())?.sum_all()?.backward()?;
        Ok(error)
    });
    for (rank, error) in results.into_iter().enumerate() {
        let error = error?;
        assert!(error.contains("consumed") && error.contains(&format!("rank {rank}")), "{error}");
    }
    Ok(())
}

fn ranks_share_the_work_of_one() -> AnyResult<()> {
    let mut full = config();
    full.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true, bias: true });
    full.expert_bias = true;
    full.router.logit_bias = true;
    let total = 13;
    let whole = ranks(1, Duration::from_secs(20), |g| step(&seeded(g, full.clone())?, 0..total)).remove(0)?;
    // Uneven shares; the last rank of four has no tokens.
    for cuts in [vec![0, 5, 13], vec![0, 6, 7, 13, 13]] {
        let parts = ranks(cuts.len() - 1, Duration::from_secs(20), |g| {
            let rank = g.rank();
            step(&seeded(g, full.clone())?, cuts[rank]..cuts[rank + 1])
        });
        let parts = parts.into_iter().collect::<AnyResult<Vec<_>>>()?;
        let join = |f: &dyn Fn(&Part) -> &Vec<f32>| parts.iter().flat_map(|p| f(p).clone()).collect::<Vec<_>>();
        close("y", &join(&|p| &p.0), &whole.0);
        close("d x", &join(&|p| &p.1), &whole.1);
        for (i, (kind, expected)) in whole.2.iter().enumerate() {
            let found = match kind.is_replicated() {
                false => join(&|p| &p.2[i].1),
                true => (0..expected.len()).map(|j| parts.iter().map(|p| p.2[i].1[j]).sum()).collect(),
            };
            close(kind.name(), &found, expected);
        }
    }
    Ok(())
}

/// A variable of two layers that is named twice is summed once, whatever bucket its second name would be in.
fn a_variable_that_is_named_twice_is_summed_once() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let tied = Var::ones((4, 4), DType::F32, &Device::Cpu)?;
        let between = Var::ones(64, DType::F32, &Device::Cpu)?;
        let loss = (tied.sum_all()? + between.sum_all()?)?.affine(1.0 + group.rank() as f64, 0.0)?;
        let mut gradients = loss.backward()?;
        let vars = [tied.clone(), between, tied.clone()];
        let mut guard = group.lock();
        reduce_gradients_over(guard.dispatcher().communicator(), &Cpu::new(), &vars, 64, &mut gradients)?;
        Ok(gradients.get(&tied).ok_or("a gradient")?.flatten_all()?.to_vec1::<f32>()?)
    });
    for found in results {
        assert_eq!(found?, [3.0; 16]);
    }
    Ok(())
}

fn backward_is_refused_where_a_rank_does_not_track() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let rank = group.rank();
        let moe = seeded(group, config())?;
        let x = tokens(0..4, &Device::Cpu)?;
        let detached = moe.params().into_iter().map(|(n, t)| (n.to_string(), t.detach())).collect();
        let vb = VarBuilder::from_tensors(detached, DType::F32, &Device::Cpu);
        let frozen = ExpertParallelMoE::new(moe.layer().clone(), moe.group().clone(), vb)?;
        if rank == 1 {
            frozen.forward(&x.detach())?;
            return Ok(None);
        }
        let error = moe.forward(&x)?.sum_all()?.backward().err().map(|e| e.to_string());
        Ok(Some(error.unwrap_or_default()))
    });
    let errors: Vec<_> = results.into_iter().collect::<AnyResult<_>>()?;
    let error = errors[0].clone().unwrap_or_default();
    assert!(error.contains("not agreed") && error.contains("[1]"), "{error}");
    Ok(())
}

fn wrong_inputs_are_errors_on_every_rank() -> AnyResult<()> {
    for bad in ["width", "dtype", "integer", "scalar", "nan"] {
        let results = ranks(2, Duration::from_secs(20), |group| {
            let rank = group.rank();
            let moe = seeded(group, config())?;
            let good = tokens(0..4, &Device::Cpu)?;
            let x = match (rank, bad) {
                (1, "width") => Tensor::zeros((4, H + 1), DType::F32, &Device::Cpu)?,
                (1, "dtype") => good.to_dtype(DType::F64)?,
                (1, "integer") => good.to_dtype(DType::U32)?,
                (1, "scalar") => Tensor::new(1f32, &Device::Cpu)?,
                (1, "nan") => (good.as_tensor() * f64::NAN)?,
                _ => good.as_tensor().clone(),
            };
            let error = moe.forward(&x).err().map(|e| e.to_string()).unwrap_or_default();
            moe.forward(&good)?;
            Ok(error)
        });
        let errors: Vec<_> = results.into_iter().collect::<AnyResult<_>>()?;
        assert!(errors[0].contains("rank 1"), "{bad}: the peer's error names the rank: {:?}", errors[0]);
        assert!(!errors[1].is_empty(), "{bad}");
    }
    Ok(())
}

/// A rank's gradients by parameter.
type Gradients = Vec<(ParamKind, Vec<f32>)>;

/// One rank's router and shared expert see all tokens; of two ranks' each sees its own, until the gradients are
/// reduced.
fn reduced_gradients_are_those_of_one_rank() -> AnyResult<()> {
    let full = config()
        .with_router(|router| router.with_logit_bias(true).with_selection_bias(true))
        .with_shared(moebius::config::SharedConfig { intermediate: 8, gated: true, bias: true });
    let total = 13;
    let run = |cuts: &[usize], lost: bool| -> AnyResult<Vec<Gradients>> {
        let parts = ranks(cuts.len() - 1, Duration::from_secs(20), |group| {
            let rank = group.rank();
            let moe = seeded(group, full.clone())?;
            let x = tokens(cuts[rank]..cuts[rank + 1], &Device::Cpu)?;
            let mut gradients = moe.forward(&x)?.sqr()?.sum_all()?.backward()?;
            let router = moe.param(ParamKind::Router).ok_or("a router")?;
            if lost && rank == 1 {
                gradients.remove(router);
            }
            moe.reduce_gradients(&mut gradients)?;
            let block: Vec<_> = moe.to_block()?.params.into_params().collect();
            assert_eq!(block.len(), moe.params().len());
            for (kind, found) in block {
                let own = flat(moe.param(kind).ok_or("a parameter")?)?;
                assert_eq!(found.as_slice::<f32>()?, own, "{}", kind.name());
            }
            let all = ParamKind::ALL.into_iter().filter_map(|r| Some((r, gradients.get(moe.param(r)?)?)));
            all.map(|(r, t)| Ok((r, flat(t)?))).collect::<AnyResult<Vec<_>>>()
        });
        parts.into_iter().collect()
    };
    let whole = run(&[0, total], false)?.remove(0);
    let parts = run(&[0, 5, total], false)?;
    for (i, (kind, expected)) in whole.iter().enumerate() {
        match kind.is_replicated() {
            true => parts.iter().for_each(|part| close(kind.name(), &part[i].1, expected)),
            false => close(kind.name(), &[parts[0][i].1.clone(), parts[1][i].1.clone()].concat(), expected),
        }
    }
    assert_eq!(parts[0][0], parts[1][0], "the same bits on both ranks");
    // An absent gradient counts as zeros: both ranks then have rank 0's own part.
    let parts = run(&[0, 5, total], true)?;
    assert_eq!(parts[0][0], parts[1][0]);
    assert_ne!(parts[0][0], whole[0]);
    Ok(())
}

/// Jitter and auxiliary losses know of all ranks' tokens.
fn training_on_two_ranks_is_training_on_one() -> AnyResult<()> {
    use moebius::config::AuxConfig;
    let config = config()
        .with_router(|router| router.with_jitter(0.5))
        .with_aux(AuxConfig::default().with_balance(0.5).with_z(0.25).with_over_ranks(true));
    let run = |cuts: &[usize]| -> AnyResult<Vec<[Vec<f32>; 3]>> {
        let parts = ranks(cuts.len() - 1, Duration::from_secs(20), |group| {
            let rank = group.rank();
            // Each rank's backward gives its part of the gradient of all ranks' losses.
            let moe = seeded(group, config.clone())?;
            let x = tokens(cuts[rank]..cuts[rank + 1], &Device::Cpu)?;
            let y = moe.forward_t(&x, true)?;
            let loss = y.sqr()?.sum_all()?;
            let mut gradients = loss.backward()?;
            moe.reduce_gradients(&mut gradients)?;
            let of = |t: Option<&Tensor>| crate::support::flat(t.ok_or("no gradient")?);
            let losses = moe.last_aux()?.get()?.total();
            assert!(losses > 0.0);
            Ok([
                crate::support::flat(&y)?,
                of(moe.param(ParamKind::Router).and_then(|t| gradients.get(t)))?,
                vec![losses as f32],
            ])
        });
        parts.into_iter().collect()
    };
    let whole = run(&[0, 13])?.remove(0);
    let parts = run(&[0, 5, 13])?;
    close("y", &[parts[0][0].clone(), parts[1][0].clone()].concat(), &whole[0]);
    for part in &parts {
        close("the router's gradient", &part[1], &whole[1]);
        close("the losses", &part[2], &whole[2]);
    }
    Ok(())
}

/// Jitter of other seeds would move experts on each rank in its own way.
fn another_seed_of_the_jitter_is_an_error_on_both_ranks() -> AnyResult<()> {
    let config = config().with_router(|router| router.with_jitter(0.5));
    let results = ranks(2, Duration::from_secs(20), |group| {
        let rank = group.rank();
        let moe = seeded(group, config.clone())?;
        let x = tokens(0..5, &Device::Cpu)?;
        let noise = |seed| Noise { seed, step: 3 };
        let error = moe.clone().with_noise(noise(rank as u64)).forward_t(&x, true).expect_err("another seed");
        moe.with_noise(noise(7)).forward_t(&x, true)?;
        Ok(error)
    });
    for (rank, error) in results.into_iter().enumerate() {
        match error_of(&error?) {
            Some(Error::ConfigMismatch { field, value, peer_value, .. }) => {
                assert_eq!(
                    (field.as_str(), value, peer_value),
                    ("noise.seed", &rank.to_string(), &(1 - rank).to_string())
                );
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    Ok(())
}

/// Fields that a dispatch compares are named where layers are made, too.
fn other_choices_of_a_layer_are_named() -> AnyResult<()> {
    for which in 0..2 {
        let results = ranks(2, Duration::from_secs(20), |group| {
            let first = group.rank() == 0;
            let mut config = config();
            match which {
                0 => config.router.top_k = if first { 1 } else { 2 },
                _ => {
                    let factor = if first { 1.0 } else { 2.0 };
                    let order = CapacityOrder::Probability;
                    config.router.expert_capacity = Some(ExpertCapacity { factor, order, renormalize: false });
                }
            }
            Ok(seeded(group, config).expect_err("another configuration"))
        });
        for (rank, error) in results.into_iter().enumerate() {
            let error = error?;
            match (error_of(error.as_ref()), which) {
                (Some(Error::ConfigMismatch { field, value, .. }), 0) => {
                    assert_eq!((field.as_str(), value.as_str()), ("router.top_k", ["1", "2"][rank]));
                }
                (Some(Error::ConfigMismatch { field, .. }), _) => assert_eq!(field, "router.expert_capacity"),
                other => panic!("rank {rank}: {other:?}"),
            }
        }
    }
    Ok(())
}

/// A rank whose variables are wrong tells the other, and both number their next layer alike.
fn a_layer_that_one_rank_cannot_make_fails_on_both() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let rank = group.rank();
        let vb = match rank {
            1 => VarBuilder::from_tensors(Default::default(), DType::F32, &Device::Cpu),
            _ => fresh(rank),
        };
        let error = ExpertParallelMoE::new(config(), &group, vb).err().map(|e| e.to_string()).unwrap_or_default();
        let vb = fresh(rank);
        let next = ExpertParallelMoE::new(config(), &group, vb)?;
        next.forward(tokens(0..4, &Device::Cpu)?.as_tensor())?;
        Ok((error, next.layer().number()))
    });
    let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
    assert!(results.iter().all(|(error, number)| error.contains("router.weight") && *number == 1), "{results:?}");
    Ok(())
}

/// A model's own variables in several types, over buckets of any size.
fn gradients_of_a_model_are_summed_in_buckets() -> AnyResult<()> {
    let dims = [vec![3, 4], vec![5], vec![7, 2], vec![1], vec![6, 3], vec![2, 2]];
    let types = [DType::F32, DType::F32, DType::BF16, DType::F64, DType::F16, DType::F32];
    let run = |count: usize, bytes: usize| -> AnyResult<Vec<Vec<Vec<f64>>>> {
        let results = ranks(count, Duration::from_secs(20), |group| {
            let of = dims.iter().zip(types);
            let vars: Vec<Var> =
                of.map(|(dims, t)| Var::zeros(&dims[..], t, &Device::Cpu)).collect::<Result<_, _>>()?;
            let mut gradients = Tensor::zeros((), DType::F32, &Device::Cpu)?.backward()?;
            for (at, var) in vars.iter().enumerate() {
                // The last rank has none of the second.
                if at != 1 || group.rank() + 1 < count {
                    let own = (group.rank() * 10 + at) as u64;
                    let gradient = crate::support::normal(80 + own, var.dims(), var.dtype(), &Device::Cpu)?;
                    gradients.insert(var, gradient);
                }
            }
            let before = |var: &Var| -> AnyResult<Vec<f64>> {
                let zeros = || var.zeros_like();
                let own = gradients.get(var).cloned().map_or_else(zeros, Ok)?;
                Ok(own.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
            };
            let own = vars.iter().map(before).collect::<AnyResult<Vec<_>>>()?;
            let mut guard = group.lock();
            let comm = guard.dispatcher().communicator();
            reduce_gradients_over(comm, &Cpu::new(), &vars, bytes, &mut gradients)?;
            let sum = |var: &Var| -> AnyResult<Vec<f64>> {
                // One rank has nothing to do.
                let absent = (count == 1).then(|| var.zeros_like()).transpose()?;
                let sum = gradients.get(var).or(absent.as_ref()).ok_or("no gradient")?;
                assert_eq!((sum.dtype(), sum.dims()), (var.dtype(), var.dims()));
                Ok(sum.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
            };
            Ok((own, vars.iter().map(sum).collect::<AnyResult<Vec<_>>>()?))
        });
        let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
        for (at, dtype) in types.into_iter().enumerate() {
            // Sums in rank order, in f32 but for f64, rounded once to the gradient's type.
            let expected: Vec<f64> = (0..results[0].0[at].len())
                .map(|i| {
                    let terms = results.iter().map(|(own, _)| own[at][i]);
                    match dtype {
                        DType::F64 => terms.reduce(|a, b| a + b).unwrap_or(0.0),
                        _ => terms.map(|v| v as f32).reduce(|a, b| a + b).map_or(0.0, f64::from),
                    }
                })
                .collect();
            let expected = Tensor::from_vec(expected, results[0].0[at].len(), &Device::Cpu)?;
            let expected = expected.to_dtype(dtype)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            for (rank, (_, sums)) in results.iter().enumerate() {
                assert_eq!(sums[at], expected, "{dtype:?} on rank {rank} of {count}, buckets of {bytes} bytes");
            }
        }
        Ok(results.into_iter().map(|(_, sums)| sums).collect())
    };
    for count in [1, 2, 4] {
        let whole = run(count, usize::MAX)?;
        for bytes in [0, 40, 100] {
            assert_eq!(run(count, bytes)?, whole);
        }
    }
    Ok(())
}

fn gradients_that_do_not_fit_are_errors_on_every_rank() -> AnyResult<()> {
    let results = ranks(2, Duration::from_secs(20), |group| {
        let on_device = DeviceGroup::from(&group);
        let errors = |vars: &[Var], gradient: Option<&Tensor>| -> AnyResult<Option<String>> {
            let mut gradients = Tensor::zeros((), DType::F32, &Device::Cpu)?.backward()?;
            if let Some(gradient) = gradient {
                gradients.insert(&vars[0], gradient.clone());
            }
            Ok(reduce_gradients(&on_device, vars, &mut gradients).err().map(|e| e.to_string()))
        };
        let vars = |rows: usize| -> AnyResult<Vec<Var>> { Ok(vec![Var::zeros((rows, 3), DType::F32, &Device::Cpu)?]) };
        // Another size on the second rank; a gradient that is not its variable's on the first.
        let sizes = errors(&vars(2 + group.rank())?, None)?;
        let wrong = Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?;
        let shape = errors(&vars(2)?, (group.rank() == 0).then_some(&wrong))?;
        // The group works on.
        assert_eq!(errors(&vars(2)?, None)?, None);
        Ok((sizes, shape))
    });
    for result in results {
        let (sizes, shape) = result?;
        assert!(sizes.is_some(), "sizes that differ");
        let shape = shape.ok_or("a gradient of another shape")?;
        assert!(shape.contains("gradient") || shape.contains("rank 0"), "{shape}");
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    gradients_of_a_model_are_summed_in_buckets,
    gradients_that_do_not_fit_are_errors_on_every_rank,
    reduced_gradients_are_those_of_one_rank,
    training_on_two_ranks_is_training_on_one,
    another_seed_of_the_jitter_is_an_error_on_both_ranks,
    other_choices_of_a_layer_are_named,
    a_layer_that_one_rank_cannot_make_fails_on_both,
    a_second_backward_is_an_error_before_any_collective,
    ranks_share_the_work_of_one,
    a_variable_that_is_named_twice_is_summed_once,
    backward_is_refused_where_a_rank_does_not_track,
    wrong_inputs_are_errors_on_every_rank,
}
