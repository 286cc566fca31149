//! Sums of main gradients over ranks beside backward: against those after it, over replicas, and where a rank fails.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::{EpGroup, ExpertParallelMoE, GradientReducer, MainGradients, ReduceComms, error_of};
use moebius::comm::Op;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, ParamKind};
use moebius::{CommError, Error, MoeConfig};

use crate::faulty_comm::{Entered, FaultyComm};
use crate::support::{AnyResult, EXPERTS, H, config, flat, normal, of_type, wide_tokens};
use crate::trials::tests;

/// The rank that fails.
const CULPRIT: usize = 1;
/// Long enough for a loaded machine; no test waits for it.
const TIMEOUT: Duration = Duration::from_secs(60);

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true, bias: true });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    full
}

/// A rank's place: of `replicas` groups of `ranks` ranks each.
struct Place {
    replica: usize,
    group: EpGroup,
    comms: ReduceComms<Cpu>,
    /// Collectives of its layers.
    of_layers: Entered,
    /// Collectives of its sums over the group, and over the replicas.
    of_sums: Entered,
    of_replicas: Entered,
}

/// Communicators that a refusal ends, as between processes.
fn ending(comms: ReduceComms<Cpu>) -> ReduceComms<Cpu> {
    let of = |inner| Box::new(FaultyComm { ends_with_failure: true, ..FaultyComm::new(inner) }) as Box<_>;
    ReduceComms { group: of(comms.group), replicas: comms.replicas.map(of) }
}

/// Sums of a loss's gradients are refused, on every rank, for this argument.
fn refused(reducer: &GradientReducer<Cpu>, loss: &Tensor, argument: &str) -> AnyResult<()> {
    let mut main = MainGradients::new();
    main.backward(loss)?;
    let error = main.reduce(reducer).expect_err(argument);
    let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == argument);
    assert!(named, "{error}");
    Ok(())
}

/// Runs a closure a rank, replica by replica.
fn places<R: Send>([replicas, ranks]: [usize; 2], run: impl Fn(Place) -> AnyResult<R> + Sync) -> AnyResult<Vec<R>> {
    let mut of_rank: Vec<_> = (0..ranks).map(|_| ThreadWorld::create(replicas, TIMEOUT).into_iter()).collect();
    let mut all: Vec<(usize, ThreadComm, ThreadComm, ThreadComm)> = Vec::new();
    for replica in 0..replicas {
        let [layers, sums] = [(); 2].map(|()| ThreadWorld::create(ranks, TIMEOUT));
        for ((layers, sums), across) in layers.into_iter().zip(sums).zip(&mut of_rank) {
            all.push((replica, layers, sums, across.next().ok_or("a communicator of the replicas")?));
        }
    }
    std::thread::scope(|scope| {
        let run = &run;
        let threads = all.into_iter().map(|(replica, layers, sums, across)| {
            scope.spawn(move || {
                let [layers, sums, across] = [layers, sums, across].map(|comm| FaultyComm::<Cpu>::new(Box::new(comm)));
                let [of_layers, of_sums, of_replicas] = [&layers, &sums, &across].map(|comm| comm.entered.clone());
                let group = Group::new(Cpu::new(), Box::new(layers), GroupConfig::new(EXPERTS, 1024))?;
                let replicas = (replicas > 1).then(|| Box::new(across) as Box<_>);
                let comms = ReduceComms { group: Box::new(sums), replicas };
                run(Place { replica, group: EpGroup::new(group), comms, of_layers, of_sums, of_replicas })
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// Two layers, the first of which is called twice, between variables of the model's own.
struct Model {
    layers: [ExpertParallelMoE; 2],
    own: [Var; 2],
}

impl Model {
    fn new(group: &EpGroup, dtype: DType) -> AnyResult<Self> {
        let first = of_type(group.clone(), full(), dtype)?;
        let second = of_type(group.clone(), full(), dtype)?.with_layer(Layer::new(full(), 4)?);
        let own = |seed| -> AnyResult<Var> { Ok(Var::from_tensor(&normal(seed, H, dtype, &Device::Cpu)?)?) };
        Ok(Self { layers: [first, second], own: [own(90)?, own(91)?] })
    }

    /// `before`: runs backwards just before the first layer has, when all others have.
    fn loss(&self, x: &Tensor, before: impl CustomOp1 + Send + Sync + 'static) -> AnyResult<Tensor> {
        let [first, second] = &self.layers;
        let h = x.broadcast_mul(&self.own[0])?;
        let h = (first.forward(&h)? + h)?.apply_op1(before)?;
        let h = (second.forward(&h)? + h)?;
        let h = (second.forward(&h)? + h)?.broadcast_mul(&self.own[1])?;
        let penalty = self.penalized()?.to_dtype(DType::F32)?.sqr()?.sum_all()?;
        Ok((h.to_dtype(DType::F32)?.sqr()?.sum_all()? + penalty)?)
    }

    /// A layer's parameter that has another use.
    fn penalized(&self) -> AnyResult<&Tensor> {
        Ok(self.layers[0].param(ParamKind::RouterBias).ok_or("a bias")?)
    }

    /// Which does not know of that use.
    fn reducer_of_layers(&self, comms: ReduceComms<Cpu>) -> AnyResult<GradientReducer<Cpu>> {
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&self.own).with_bucket_bytes(300);
        Ok(self.layers.iter().fold(reducer, GradientReducer::with_layer))
    }

    fn reducer(&self, comms: ReduceComms<Cpu>) -> AnyResult<GradientReducer<Cpu>> {
        let reducer = self.reducer_of_layers(comms)?;
        Ok(reducer.with_late_vars(&[Var::from_tensor(self.penalized()?)?]))
    }

    /// Every variable with its parameter, if it is a layer's.
    fn vars(&self) -> Vec<(Option<ParamKind>, Tensor)> {
        let of_layer = |moe: &ExpertParallelMoE| {
            let all = ParamKind::ALL.into_iter().filter_map(|kind| Some((Some(kind), moe.param(kind)?.clone())));
            all.filter(|(_, t)| t.is_variable()).collect::<Vec<_>>()
        };
        let own = self.own.iter().map(|var| (None, var.as_tensor().clone()));
        self.layers.iter().flat_map(of_layer).chain(own).collect()
    }

    /// Sums over the ranks.
    fn values(&self, main: &MainGradients) -> AnyResult<Vec<Vec<f32>>> {
        self.vars().iter().map(|(_, t)| flat(main.get(t)?)).collect()
    }

    /// A rank's own.
    fn own_values(&self, main: &MainGradients) -> AnyResult<Vec<Vec<f32>>> {
        // candle forgets a variable that stands on the right of an empty tensor: a rank without tokens has none of it.
        let of = |t: &Tensor| main.get(t).cloned().or_else(|_| t.zeros_like());
        self.vars().iter().map(|(_, t)| flat(&of(t)?)).collect()
    }
}

/// The same values.
struct Nothing;

/// The same values, whose backward does something before.
struct Doing<F>(F);

fn same(x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
    Ok((candle_core::backend::BackendStorage::try_clone(x, layout)?, layout.shape().clone()))
}

impl CustomOp1 for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        same(x, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(gradient.clone()))
    }
}

impl<F: Fn() -> candle_core::Result<()> + Send + Sync> CustomOp1 for Doing<F> {
    fn name(&self) -> &'static str {
        "doing"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        same(x, layout)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)().map(|()| Some(gradient.clone()))
    }
}

/// Tokens of a rank; the last of four has none.
fn tokens(place: (usize, &EpGroup), microbatch: usize, dtype: DType) -> AnyResult<Var> {
    let (replica, group) = place;
    let cuts: &[usize] = [&[0, 13][..], &[0, 5, 13], &[0, 6, 7, 13, 13]][group.ranks() / 2];
    let (rank, start) = (group.rank(), 20 * (microbatch * 3 + replica));
    wide_tokens(start + cuts[rank]..start + cuts[rank + 1], H, dtype, &Device::Cpu)
}

/// Over 1, 2 and 4 ranks and 1 and 2 replicas: the sums beside backward, those after it, and those of every rank's
/// gradients added up here.
fn sums_beside_backward_are_those_after_it() -> AnyResult<()> {
    for (mesh, dtype) in [
        ([1, 1], DType::F32),
        ([1, 2], DType::F32),
        ([1, 4], DType::F32),
        ([2, 1], DType::F32),
        ([2, 2], DType::F32),
        ([1, 2], DType::BF16),
        ([2, 2], DType::BF16),
    ] {
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, dtype)?;
            let reducer = model.reducer(comms)?;
            let loss = |microbatch| -> AnyResult<Tensor> {
                let x = tokens((replica, &group), microbatch, dtype)?;
                model.loss(&x, Nothing)
            };
            let new = || if dtype == DType::F32 { MainGradients::new() } else { MainGradients::in_f32() };
            let (mut own, mut after, mut beside) = (new(), new(), new());
            for microbatch in 0..3 {
                own.backward(&loss(microbatch)?)?;
                after.backward(&loss(microbatch)?)?;
                match microbatch {
                    2 => beside.backward_reduced(&loss(microbatch)?, &reducer)?,
                    _ => beside.backward(&loss(microbatch)?)?,
                }
            }
            after.reduce(&reducer)?;
            let found = model.values(&beside)?;
            assert_eq!(found, model.values(&after)?);
            // What was summed is not added to.
            let error = beside.backward(&loss(0)?).expect_err("a backward behind a sum");
            assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
            beside.reset();
            assert_eq!(beside.microbatches(), 0);
            let kinds: Vec<_> = model.vars().into_iter().map(|(kind, _)| kind).collect();
            Ok((kinds, model.own_values(&own)?, found))
        })?;
        check_sums(mesh, &results);
    }
    Ok(())
}

/// What a rank has: its variables' kinds, its own gradients, and the sums that it was given.
type RankSums = (Vec<Option<ParamKind>>, Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Compares the sums with those of every rank's gradients, added up here.
fn check_sums([replicas, ranks]: [usize; 2], results: &[RankSums]) {
    // In rank order, first over the group, in f32.
    let add = |a: Vec<f32>, b: &Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
    for at in 0..results[0].0.len() {
        let replicated = results[0].0[at].is_none_or(ParamKind::is_replicated);
        for rank in 0..ranks {
            let of_replica = |replica: usize| {
                let own = &results[replica * ranks..(replica + 1) * ranks];
                match replicated {
                    true => own[1..].iter().fold(own[0].1[at].clone(), |sum, one| add(sum, &one.1[at])),
                    false => own[rank].1[at].clone(),
                }
            };
            let expected = (1..replicas).fold(of_replica(0), |sum, replica| add(sum, &of_replica(replica)));
            for replica in 0..replicas {
                let found = &results[replica * ranks + rank].2[at];
                assert_eq!(*found, expected, "[{replicas}, {ranks}] {:?} of rank {rank}", results[0].0[at]);
            }
        }
    }
}

/// Sums of the second layer are over before the first layer's backward begins, its experts' over replicas among them;
/// microbatches before communicate nothing.
fn sums_of_a_layer_begin_while_backward_runs() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, of_layers, of_sums, of_replicas } = place;
            let model = Model::new(&group, DType::F32)?;
            // A layer's experts in one collective.
            let reducer = model.reducer(comms)?.with_bucket_bytes(1 << 20);
            let x = tokens((replica, &group), 0, DType::F32)?;
            let count = |entered: &Entered| -> usize {
                let entered = entered.lock().expect("what was entered");
                entered.iter().filter(|op| **op == Op::GradReduce).count()
            };
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            assert_eq!((count(&of_sums), count(&of_replicas), count(&of_layers)), (0, 0, 0));
            let seen = Arc::new(Mutex::new(0));
            // The comparison of microbatches and the sum, and of the replicas the experts' sum.
            let (own, expected) = if mesh[0] > 1 { (of_replicas.clone(), 3) } else { (of_sums.clone(), 2) };
            let (entered, seen_there) = (own.clone(), seen.clone());
            let wait = move || {
                let limit = Instant::now() + TIMEOUT;
                while count(&entered) < expected && Instant::now() < limit {
                    std::thread::sleep(Duration::from_millis(1));
                }
                *seen_there.lock().expect("a count") = count(&entered);
                Ok(())
            };
            main.backward_reduced(&model.loss(&x, Doing(wait))?, &reducer)?;
            let seen = *seen.lock().expect("a count");
            assert!(seen == expected && count(&own) > expected + 1, "{mesh:?}: {seen} of {}", count(&own));
            assert_eq!(count(&of_layers), 0);
            Ok(())
        })?;
    }
    Ok(())
}

/// An expert's weight has another use of which the reducer does not know.
fn an_expert_with_another_use_is_named() -> AnyResult<()> {
    for mesh in [[2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let down = model.layers[1].param(ParamKind::Down).ok_or("a weight")?;
            let loss = || -> AnyResult<Tensor> { Ok((model.loss(&x, Nothing)? + down.sqr()?.sum_all()?)?) };
            let mut main = MainGradients::new();
            let error = main.backward_reduced(&loss()?, &reducer).expect_err("sums that have begun too soon");
            match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) => {
                    assert!(name == "variable" && expected.contains("with_late_vars"), "{error}");
                }
                Some(Error::Comm(CommError::Refused { reason, .. })) => {
                    assert!(reason.contains("with_late_vars"), "{reason}")
                }
                other => panic!("{other:?} {error}"),
            }
            main.reset();
            let reducer = reducer.with_late_vars(&[Var::from_tensor(down)?]);
            let mut after = MainGradients::new();
            for microbatch in 0..2 {
                match microbatch {
                    1 => main.backward_reduced(&loss()?, &reducer)?,
                    _ => main.backward(&loss()?)?,
                }
                after.backward(&loss()?)?;
            }
            after.reduce(&reducer)?;
            assert_eq!(model.values(&main)?, model.values(&after)?);
            Ok(())
        })?;
    }
    Ok(())
}

fn a_rank_that_fails_among_sums() -> AnyResult<()> {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut expected = MainGradients::new();
            expected.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;

            // Between two layers, when the sums of the second have begun.
            let mut main = MainGradients::new();
            let fail = move || match is_culprit {
                true => candle_core::bail!("an operation of the user's own"),
                false => Ok(()),
            };
            let error = main.backward_reduced(&model.loss(&x, Doing(fail))?, &reducer).expect_err("a backward fails");
            match (is_culprit, replica, error_of(&error)) {
                (true, ..) => assert!(error.to_string().contains("the user's own"), "{error}"),
                (false, 0, Some(Error::Peer { peer: CULPRIT, .. })) => {}
                // Of the other replica, which hears of it in a sum.
                (false, 1, Some(Error::Comm(CommError::Refused { reason, .. }))) => {
                    assert!(reason.contains("the user's own") || reason.contains("failed"), "{reason}");
                }
                (.., other) => panic!("{other:?} {error}"),
            }
            // The group and the reducer work on.
            main.reset();
            main.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;
            assert_eq!(model.values(&main)?, model.values(&expected)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// A rank does not come to the sums: the others hear of it at once, those of another replica too.
fn a_rank_that_does_not_come_to_sums() -> AnyResult<()> {
    let meshes = [[2, 1], [1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            let before = model.own_values(&main)?;
            let last = model.loss(&x, Nothing)?;
            let reduce = |main: &mut MainGradients| match beside {
                true => main.backward_reduced(&last, &reducer),
                false => main.reduce(&reducer),
            };
            match (replica, group.rank()) == (0, mesh[1] - 1) {
                true => reducer.refuse("a loss of the user's own")?,
                false => {
                    let error = reduce(&mut main).expect_err("a rank that does not come");
                    match error_of(&error) {
                        Some(Error::Comm(CommError::Refused { reason, .. })) => {
                            assert!(reason.contains("the user's own"), "{reason}");
                        }
                        other => panic!("{other:?} {error}"),
                    }
                }
            }
            assert_eq!(model.own_values(&main)?, before);
            reduce(&mut main)?;
            assert_ne!(model.values(&main)?, before);
            Ok(())
        })?;
    }
    Ok(())
}

/// Gradients that have been summed are not summed again.
fn sums_are_summed_once() -> AnyResult<()> {
    for (mesh, beside) in [([1, 1], false), ([1, 2], false), ([1, 2], true), ([2, 1], false)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let loss = model.loss(&x, Nothing)?;
            let mut main = MainGradients::new();
            match beside {
                true => main.backward_reduced(&loss, &reducer)?,
                false => {
                    main.backward(&loss)?;
                    main.reduce(&reducer)?;
                }
            }
            let sums = model.values(&main)?;
            for _ in 0..2 {
                let error = main.reduce(&reducer).expect_err("a second sum");
                assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
                assert_eq!(model.values(&main)?, sums);
            }
            main.reset();
            main.backward(&model.loss(&x, Nothing)?)?;
            // The caller may have summed what it was lent.
            main.store_mut();
            let before = model.own_values(&main)?;
            let error = main.reduce(&reducer).expect_err("a sum behind a change");
            assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
            assert_eq!(model.own_values(&main)?, before);
            Ok(())
        })?;
    }
    Ok(())
}

/// Gradients that were lent on one rank alone: the others hear of it at once, and nothing is summed.
fn gradients_lent_on_one_rank_are_told() -> AnyResult<()> {
    for (mesh, beside) in [([1, 2], false), ([1, 2], true), ([2, 2], false)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            if is_culprit {
                main.store_mut();
            }
            let (before, loss) = (model.own_values(&main)?, model.loss(&x, Nothing)?);
            let done = if beside { main.backward_reduced(&loss, &reducer) } else { main.reduce(&reducer) };
            let error = done.expect_err("gradients that were lent");
            match (is_culprit, error_of(&error)) {
                (true, Some(Error::Invalid { name, .. })) => assert_eq!(name, "gradients"),
                (false, Some(Error::Comm(CommError::Refused { reason, .. }))) => {
                    assert!(reason.contains("store_mut"), "{reason}");
                }
                (_, other) => panic!("{other:?} {error}"),
            }
            assert_eq!(model.own_values(&main)?, before);
            // The reducer works on.
            main.reset();
            main.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;
            Ok(())
        })?;
    }
    Ok(())
}

/// Experts that are computed and of which nothing is summed need no name, and what is left out is each rank's own.
fn what_no_rank_sums_needs_no_name() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let whole = of_type(group.clone(), full(), DType::F32)?;
        let tensors = whole.params().into_iter().map(|(name, t)| Ok((name.to_string(), (t * 1.0)?)));
        let tensors = tensors.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let computed = ExpertParallelMoE::new(Layer::new(full(), 3)?, group.clone(), vb)?;
        let kinds = ParamKind::ALL.into_iter().filter(|kind| kind.is_replicated());
        let replicated = kinds.filter_map(|kind| whole.param(kind)).filter(|t| t.is_variable()).map(Var::from_tensor);
        let replicated = replicated.collect::<candle_core::Result<Vec<Var>>>()?;
        let vars = VarMap::new();
        let shard = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).get(3, "shard")?;
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&computed).with_vars(&replicated);
        let reducer = reducer.without(&vars.all_vars()).with_var_map(&vars);
        let x = tokens((replica, &group), 0, DType::F32)?;
        let factor = (1 + group.rank()) as f64;
        let mut main = MainGradients::new();
        main.backward(&(computed.forward(&x)?.sqr()?.sum_all()? + (shard.sum_all()? * factor)?)?)?;
        main.reduce(&reducer)?;
        assert_eq!(flat(main.get(&shard)?)?, [factor as f32; 3]);
        Ok(())
    })?;
    Ok(())
}

/// The layers' own variables given once more: experts stay each rank's, whichever call comes first.
fn all_variables_of_a_model() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 2]] {
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let others: Vec<Var> = model.layers.iter().flat_map(ExpertParallelMoE::vars).collect();
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            let own = model.own_values(&main)?;
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&others[..others.len() / 2]);
            let reducer = model.layers.iter().fold(reducer, GradientReducer::with_layer);
            main.reduce(&reducer.with_vars(&others).with_vars(&model.own))?;
            let kinds: Vec<_> = model.vars().into_iter().map(|(kind, _)| kind).collect();
            Ok((kinds, own, model.values(&main)?))
        });
        check_sums(mesh, &results?);
    }
    Ok(())
}

/// A step's gradients over the weights' f32 variables, each of whose elements is multiplied by 1: sums are those of a layer
/// of these variables themselves.
fn computed_parameters() -> AnyResult<()> {
    for (mesh, beside) in [[1, 2], [2, 1], [2, 2]].into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let whole = of_type(group.clone(), full(), DType::F32)?;
            let tensors = whole.params().into_iter().map(|(name, t)| Ok((name.to_string(), (t * 1.0)?)));
            let tensors = tensors.collect::<candle_core::Result<_>>()?;
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
            let computed = ExpertParallelMoE::new(Layer::new(full(), 3)?, group.clone(), vb)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let loss = |moe: &ExpertParallelMoE| -> AnyResult<Tensor> { Ok(moe.forward(&x)?.sqr()?.sum_all()?) };
            let vars = whole.vars();
            let kinds = ParamKind::ALL.into_iter().filter(|kind| !kind.is_replicated());
            let experts = kinds.filter_map(|kind| whole.param(kind)).map(Var::from_tensor);
            let experts = experts.collect::<candle_core::Result<Vec<Var>>>()?;
            let mut main = MainGradients::new();
            // Nothing is summed of a layer of which some gradients would not be.
            let named = |error: candle_core::Error, kind: ParamKind, by: &str| match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) => {
                    assert!(name.contains("layer 3") && name.contains(kind.name()), "{error}");
                    assert!(expected.contains(by), "{error}");
                }
                other => panic!("{other:?} {error}"),
            };
            if mesh[1] > 1 {
                let error = computed.reduce_gradients(&mut loss(&computed)?.backward()?).expect_err("computed ones");
                named(error, ParamKind::Router, "candle::reduce_gradients");
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&computed);
            let error = main.backward_reduced(&loss(&computed)?, &reducer).expect_err("computed ones");
            named(error, ParamKind::Router, "with_vars");
            main.backward(&loss(&computed)?)?;
            let reducer = reducer.with_vars(&vars);
            named(main.reduce(&reducer).expect_err("computed experts"), ParamKind::Up, "with_experts");
            assert_eq!(main.microbatches(), 1);
            let reducer = reducer.with_experts(&experts);
            main.reduce(&reducer)?;
            let found: Vec<_> = vars.iter().map(|var| flat(main.get(var)?)).collect::<AnyResult<_>>()?;
            let reducer = reducer.with_layer(&whole);
            let mut expected = MainGradients::new();
            match beside {
                true => expected.backward_reduced(&loss(&whole)?, &reducer)?,
                false => {
                    expected.backward(&loss(&whole)?)?;
                    expected.reduce(&reducer)?;
                }
            }
            for (var, found) in vars.iter().zip(&found) {
                assert_eq!(flat(expected.get(var)?)?, *found, "{mesh:?} {:?}", var.dims());
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Each rank's own, of the same sizes: over replicas they are summed, over the group they are not.
fn experts_of_the_users_own() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let var = |seed| -> AnyResult<Var> { Ok(Var::from_tensor(&normal(seed, 5, DType::F32, &Device::Cpu)?)?) };
            let (expert, norm) = (var(group.rank() as u64)?, var(9)?);
            let all = [expert.clone(), norm.clone()];
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&all);
            let reducer = reducer.with_experts(std::slice::from_ref(&expert)).with_vars(&all);
            let factor = |replica: usize, rank: usize| (1 + 10 * replica + rank) as f64;
            let mut main = MainGradients::new();
            main.backward(&((expert.as_tensor() + norm.as_tensor())? * factor(replica, group.rank()))?.sum_all()?)?;
            main.reduce(&reducer)?;
            // Small whole numbers.
            let of_rank = |rank| (0..mesh[0]).map(|replica| factor(replica, rank)).sum::<f64>() as f32;
            assert_eq!(flat(main.get(&expert)?)?, [of_rank(group.rank()); 5]);
            assert_eq!(flat(main.get(&norm)?)?, [(0..mesh[1]).map(of_rank).sum::<f32>(); 5]);
            Ok(())
        })?;
    }
    Ok(())
}

/// Sums in buckets of other sizes would be of other gradients.
fn buckets_of_another_size_are_an_error_on_every_rank() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |Place { replica, group, comms, of_sums, of_replicas, .. }| {
            let is_culprit = (replica, group.rank()) == (0, 0);
            let var = Var::ones(3, DType::F32, &Device::Cpu)?;
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(std::slice::from_ref(&var));
            let other = if is_culprit { 4 } else { 8 };
            refused(&reducer.with_bucket_bytes(other), &var.sum_all()?, "bucket_bytes")?;
            // Each rank has found so by itself, behind one comparison with each of its peers.
            for entered in [of_sums, of_replicas] {
                let tags = entered.lock().unwrap().len();
                assert!(tags <= 1, "{tags} calls");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Of layers with frozen routers replicas sum the experts alone, which are of the same sizes.
fn experts_in_another_order_are_an_error_on_every_replica() -> AnyResult<()> {
    places([2, 1], |place| {
        let Place { replica, group, comms, .. } = place;
        let layer = |number| -> AnyResult<ExpertParallelMoE> {
            let moe = of_type(group.clone(), config(), DType::F32)?;
            let tensors = moe.params().into_iter().map(|(name, t)| {
                let is_router = name == ParamKind::Router.name();
                (name.to_string(), if is_router { t.detach() } else { t.clone() })
            });
            let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
            Ok(ExpertParallelMoE::new(Layer::new(config(), number)?, group.clone(), vb)?)
        };
        let mut layers = [layer(3)?, layer(4)?];
        let x = tokens((replica, &group), 0, DType::F32)?;
        let loss = layers[1].forward(&layers[0].forward(&x)?)?.sum_all()?;
        if replica == CULPRIT {
            layers.reverse();
        }
        let reducer = layers.iter().fold(GradientReducer::new(&Cpu::new(), comms)?, GradientReducer::with_layer);
        refused(&reducer, &loss, "experts")
    })?;
    Ok(())
}

/// Variables of the same sizes in maps, each of which has an order of its own.
fn variables_of_a_map() -> AnyResult<()> {
    for other_name in [false, true] {
        places([1, 2], |place| {
            let Place { group, comms, .. } = place;
            let names: Vec<String> = (0..16).map(|i| format!("layer.{i}")).collect();
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let get = |name: &String| vb.get(3, name);
            let all = names.iter().map(get).collect::<candle_core::Result<Vec<_>>>()?;
            if other_name && group.rank() == CULPRIT {
                vb.get(3, "layer")?;
            } else if other_name {
                vb.get(3, "norm")?;
            }
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
            for (i, t) in all.iter().enumerate() {
                loss = (loss + (t.sum_all()? * (i + 1) as f64)?)?;
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_var_map(&vars);
            if other_name {
                return refused(&reducer, &loss, "variables");
            }
            let mut main = MainGradients::new();
            main.backward(&loss)?;
            main.reduce(&reducer)?;
            for (i, t) in all.iter().enumerate() {
                assert_eq!(flat(main.get(t)?)?, [2.0 * (i + 1) as f32; 3]);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// One rank has its sums in f32, the others in bf16.
fn gradients_of_another_type_are_an_error_on_every_rank() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let model = Model::new(&group, DType::BF16)?;
        let reducer = model.reducer(comms)?;
        let x = tokens((replica, &group), 0, DType::BF16)?;
        let is_culprit = group.rank() == CULPRIT;
        let mut main = if is_culprit { MainGradients::in_f32() } else { MainGradients::new() };
        main.backward(&model.loss(&x, Nothing)?)?;
        let before = model.own_values(&main)?;
        let error = main.reduce(&reducer).expect_err("another type");
        match error_of(&error) {
            Some(Error::Invalid { name, found, .. }) => {
                assert_eq!((&name[..], found.contains("f32")), ("gradients", is_culprit), "{error}");
            }
            other => panic!("{other:?} {error}"),
        }
        assert_eq!(model.own_values(&main)?, before);
        Ok(())
    })?;
    Ok(())
}

/// Whichever call names the experts, and wherever it stands.
fn late_experts_in_any_order_of_calls() -> AnyResult<()> {
    places([2, 1], |place| {
        let Place { replica, group, comms, .. } = place;
        let moe = of_type(group.clone(), config(), DType::F32)?;
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_late_experts().with_layer(&moe);
        let x = tokens((replica, &group), 0, DType::F32)?;
        let down = moe.param(ParamKind::Down).ok_or("a weight")?;
        // Which would be too late for a sum that has begun.
        let loss = (moe.forward(&x)?.sum_all()? + down.sqr()?.sum_all()?)?;
        MainGradients::new().backward_reduced(&loss, &reducer)?;
        Ok(())
    })?;
    Ok(())
}

/// Sums of as many bytes, which would be mixed.
fn variables_in_another_order_are_an_error_on_every_rank() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { group, comms, .. } = place;
        let var = |n: usize| Var::ones(n, DType::F32, &Device::Cpu);
        let mut vars = vec![var(3)?, var(4)?];
        let loss = (vars[0].sum_all()? + vars[1].sum_all()?)?;
        if group.rank() == CULPRIT {
            vars.reverse();
        }
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&vars);
        refused(&reducer, &loss, "variables")
    })?;
    Ok(())
}

/// Layers have parameters of the same sizes, of which their numbers tell which is which.
fn layers_in_another_order_are_an_error_on_every_rank() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let mut layers = Model::new(&group, DType::F32)?.layers;
            let x = wide_tokens(0..7, H, DType::F32, &Device::Cpu)?;
            let loss = layers[1].forward(&layers[0].forward(&x)?)?.sqr()?.sum_all()?;
            if replica * mesh[1] + group.rank() == CULPRIT {
                layers.reverse();
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&layers[0]).with_layer(&layers[1]);
            let mut main = MainGradients::new();
            main.backward(&loss)?;
            let error = main.reduce(&reducer).expect_err("another order");
            // In another group than the culprit's it is the replicas who tell.
            let own = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "variables");
            let told = matches!(error_of(&error), Some(Error::Comm(CommError::Refused { .. })));
            assert!(own || (mesh == [2, 2] && told), "{mesh:?}: {error}");
            Ok(())
        })?;
    }
    Ok(())
}

/// One rank sums after one microbatch more, or less.
fn another_number_of_microbatches_is_an_error_on_every_rank() -> AnyResult<()> {
    let meshes = [[1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(ending(comms))?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            if is_culprit {
                // Of a loss without a layer, of which nobody else knows.
                main.backward(&model.own[0].sqr()?.sum_all()?)?;
            }
            let before = model.own_values(&main)?;
            let loss = model.loss(&x, Nothing)?;
            let done = if beside { main.backward_reduced(&loss, &reducer) } else { main.reduce(&reducer) };
            let error = done.expect_err("another number");
            let own = 1 + u64::from(is_culprit) + u64::from(beside);
            match (replica, error_of(&error)) {
                (0, Some(Error::Invalid { name, expected, found, .. })) => {
                    assert_eq!((&name[..], found.clone()), ("microbatches", own.to_string()));
                    assert!(is_culprit || expected.contains(&format!("rank {CULPRIT}")), "{expected}");
                }
                // Of the other replica, whose ranks all find the same.
                (1, Some(Error::Invalid { name, expected, found, .. })) => {
                    let at_culprit = group.rank() == CULPRIT;
                    let named = if at_culprit { (expected, "as on replica 0") } else { (found, "a replica of rank 1") };
                    assert!(name == "microbatches" && named.0.contains(named.1), "{error}");
                }
                (_, other) => panic!("replica {replica}, rank {}: {other:?} {error}", group.rank()),
            }
            // Nothing is lost, and nothing stands in the way of the missing microbatch.
            assert_eq!(model.own_values(&main)?, before);
            if !is_culprit {
                main.backward(&model.own[0].sqr()?.sum_all()?)?;
            }
            match beside {
                true => main.backward_reduced(&loss, &reducer)?,
                false => main.reduce(&reducer)?,
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// A layer's parameter has another use of which the reducer does not know, on ranks with tokens and without.
fn a_variable_with_another_use_is_named() -> AnyResult<()> {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer_of_layers(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            // A rank without tokens has no gradient of it, as candle forgets what stands on the right of an empty tensor.
            let loss = || -> AnyResult<Tensor> {
                let (penalty, y) = (model.penalized()?.sqr()?.sum_all()?, model.layers[0].forward(&x)?);
                Ok(if x.dims()[0] == 0 { y.sum_all()? } else { (y.sum_all()? + penalty)? })
            };
            let mut main = MainGradients::new();
            let error = main.backward_reduced(&loss()?, &reducer).expect_err("sums that have begun too soon");
            match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) if x.dims()[0] > 0 => {
                    assert!(name == "variable" && expected.contains("with_late_vars"), "{error}");
                }
                Some(Error::Comm(CommError::Refused { reason, .. })) => {
                    assert!(reason.contains("with_late_vars"), "{reason}")
                }
                other => panic!("{other:?} {error}"),
            }
            main.reset();
            let reducer = reducer.with_late_vars(&[Var::from_tensor(model.penalized()?)?]);
            main.backward_reduced(&loss()?, &reducer)?;
            let mut after = MainGradients::new();
            after.backward(&loss()?)?;
            after.reduce(&reducer)?;
            assert_eq!(flat(main.get(model.penalized()?)?)?, flat(after.get(model.penalized()?)?)?);
            // All experts after backward: the same bits, and no name is needed but the router's.
            let reducer = reducer.with_late_experts();
            let mut late = MainGradients::new();
            late.backward_reduced(&loss()?, &reducer)?;
            assert_eq!(flat(late.get(model.penalized()?)?)?, flat(after.get(model.penalized()?)?)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// A parameter of which no rank has a gradient stays without one; if one rank has it, all get it.
fn variables_without_gradients() -> AnyResult<()> {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let of = |seed| normal(seed, 5, dtype, &Device::Cpu).and_then(|t| Ok(Var::from_tensor(&t)?));
            let (nobodys, somebodys) = (of(1)?, of(2)?);
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&[nobodys.clone(), somebodys.clone()]);
            let mut main = MainGradients::in_f32();
            let of = if (replica, group.rank()) == (1, 0) {
                somebodys.sqr()?
            } else {
                Tensor::zeros(1, dtype, &Device::Cpu)?
            };
            main.backward(&of.sum_all()?)?;
            main.reduce(&reducer)?;
            assert!(main.store().get(&nobodys).is_none());
            let expected =
                (somebodys.as_tensor() * 2.0)?.to_dtype(if dtype == DType::F64 { dtype } else { DType::F32 })?;
            let found = main.get(&somebodys)?;
            assert_eq!((found.dtype(), flat(found)?), (expected.dtype(), flat(&expected)?));
            Ok(())
        })?;
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    a_variable_with_another_use_is_named,
    variables_without_gradients,
    sums_beside_backward_are_those_after_it,
    sums_of_a_layer_begin_while_backward_runs,
    an_expert_with_another_use_is_named,
    a_rank_that_fails_among_sums,
    a_rank_that_does_not_come_to_sums,
    sums_are_summed_once,
    gradients_lent_on_one_rank_are_told,
    what_no_rank_sums_needs_no_name,
    all_variables_of_a_model,
    computed_parameters,
    experts_of_the_users_own,
    variables_of_a_map,
    experts_in_another_order_are_an_error_on_every_replica,
    gradients_of_another_type_are_an_error_on_every_rank,
    late_experts_in_any_order_of_calls,
    variables_in_another_order_are_an_error_on_every_rank,
    layers_in_another_order_are_an_error_on_every_rank,
    another_number_of_microbatches_is_an_error_on_every_rank,
    buckets_of_another_size_are_an_error_on_every_rank,
}
