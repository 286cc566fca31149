//! Sums of main gradients over ranks beside backward: against those after it, over replicas, and where a rank fails.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use moebius::candle::{EpGroup, ExpertParallelMoE, GradientReducer, MainGradients, ReduceComms, error_of};
use moebius::comm::Op;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, ParamKind};
use moebius::{CommError, Error, MoeConfig};

use crate::faulty_comm::{Changed, Entered};
use crate::support::{AnyResult, EXPERTS, H, config, flat, normal, of_type, wide_tokens};
use crate::trials::tests;

/// The rank that fails.
const CULPRIT: usize = 1;
/// Long enough for a loaded machine; no test waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(moebius::config::SharedConfig { intermediate: 8, gated: true });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    full
}

/// A rank's place: of `replicas` groups of `ranks` ranks each.
struct Place {
    replica: usize,
    group: EpGroup,
    comms: ReduceComms<Cpu>,
    /// Collectives of its sums over the group.
    entered: Entered,
}

/// Runs a closure a rank, replica by replica.
fn places<R: Send>([replicas, ranks]: [usize; 2], run: impl Fn(Place) -> AnyResult<R> + Sync) -> AnyResult<Vec<R>> {
    let mut of_rank: Vec<_> = (0..ranks).map(|_| ThreadWorld::create(replicas, PATIENCE).into_iter()).collect();
    let mut all: Vec<(usize, ThreadComm, ThreadComm, ThreadComm)> = Vec::new();
    for replica in 0..replicas {
        let [layers, sums] = [(); 2].map(|()| ThreadWorld::create(ranks, PATIENCE));
        for ((layers, sums), across) in layers.into_iter().zip(sums).zip(&mut of_rank) {
            all.push((replica, layers, sums, across.next().ok_or("a communicator of the replicas")?));
        }
    }
    std::thread::scope(|scope| {
        let run = &run;
        let threads = all.into_iter().map(|(replica, layers, sums, across)| {
            scope.spawn(move || {
                let group = Group::new(Cpu::new(), Box::new(layers), GroupConfig::new(EXPERTS, 1024))?;
                let sums = Changed::<Cpu>::new(Box::new(sums));
                let entered = sums.entered.clone();
                let replicas = (replicas > 1).then(|| Box::new(across) as Box<_>);
                let comms = ReduceComms { group: Box::new(sums), replicas };
                run(Place { replica, group: EpGroup::new(group), comms, entered })
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
        // Another use of a layer's parameter.
        let penalty = first.param(ParamKind::RouterBias).ok_or("a bias")?.to_dtype(DType::F32)?.sqr()?.sum_all()?;
        Ok((h.to_dtype(DType::F32)?.sqr()?.sum_all()? + penalty)?)
    }

    fn reducer(&self, comms: ReduceComms<Cpu>) -> AnyResult<GradientReducer<Cpu>> {
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&self.own).with_bucket_bytes(300);
        Ok(self.layers.iter().fold(reducer, GradientReducer::with_layer))
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

    fn values(&self, main: &MainGradients) -> AnyResult<Vec<Vec<f32>>> {
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
        let [replicas, ranks] = mesh;
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
            Ok((kinds, model.values(&own)?, found))
        })?;
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
                    assert_eq!(*found, expected, "{mesh:?} {:?} of rank {rank}", results[0].0[at]);
                }
            }
        }
    }
    Ok(())
}

/// Sums of the second layer are over before the first layer's backward begins; microbatches before communicate nothing.
fn sums_of_a_layer_begin_while_backward_runs() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { replica, group, comms, entered } = place;
        let model = Model::new(&group, DType::F32)?;
        let reducer = model.reducer(comms)?;
        let x = tokens((replica, &group), 0, DType::F32)?;
        let count = |entered: &Entered| -> usize {
            let entered = entered.lock().expect("what was entered");
            entered.iter().filter(|op| **op == Op::GradReduce).count()
        };
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, Nothing)?)?;
        assert_eq!(count(&entered), 0);
        let seen = Arc::new(Mutex::new(0));
        let (own, seen_there) = (entered.clone(), seen.clone());
        let wait = move || {
            let limit = Instant::now() + PATIENCE;
            while count(&own) == 0 && Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(1));
            }
            *seen_there.lock().expect("a count") = count(&own);
            Ok(())
        };
        main.backward_reduced(&model.loss(&x, Doing(wait))?, &reducer)?;
        let seen = *seen.lock().expect("a count");
        assert!(seen == 1 && count(&entered) > 2, "{seen} of {}", count(&entered));
        Ok(())
    })?;
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

/// A rank of another replica does not come to the sums: it has no layer in common with these.
fn a_rank_that_does_not_come_to_sums() -> AnyResult<()> {
    places([2, 1], |place| {
        let Place { replica, group, comms, .. } = place;
        let model = Model::new(&group, DType::F32)?;
        let reducer = model.reducer(comms)?;
        let x = tokens((replica, &group), 0, DType::F32)?;
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, Nothing)?)?;
        let before = model.values(&main)?;
        match replica {
            0 => reducer.refuse("a loss of the user's own")?,
            _ => {
                let error = main.reduce(&reducer).expect_err("a rank that does not come");
                match error_of(&error) {
                    Some(Error::Comm(CommError::Refused { peer: 0, rank: 1, reason, .. })) => {
                        assert!(reason.contains("the user's own"), "{reason}");
                    }
                    other => panic!("{other:?} {error}"),
                }
            }
        }
        assert_eq!(model.values(&main)?, before);
        main.reduce(&reducer)?;
        assert_ne!(model.values(&main)?, before);
        Ok(())
    })?;
    Ok(())
}

/// One rank sums after one microbatch more, or less.
fn another_number_of_microbatches_is_an_error_on_every_rank() -> AnyResult<()> {
    for (ranks, beside) in [2, 4].into_iter().flat_map(|ranks| [(ranks, false), (ranks, true)]) {
        places([1, ranks], |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            if group.rank() == CULPRIT {
                // Of a loss without a layer, of which nobody else knows.
                main.backward(&model.own[0].sqr()?.sum_all()?)?;
            }
            let before = model.values(&main)?;
            let loss = model.loss(&x, Nothing)?;
            let done = if beside { main.backward_reduced(&loss, &reducer) } else { main.reduce(&reducer) };
            let error = done.expect_err("another number");
            let own = 1 + u64::from(group.rank() == CULPRIT) + u64::from(beside);
            match error_of(&error) {
                Some(Error::Invalid { name, expected, found, .. }) => {
                    assert_eq!((&name[..], found.clone()), ("microbatches", own.to_string()));
                    assert!(group.rank() == CULPRIT || expected.contains(&format!("rank {CULPRIT}")), "{expected}");
                }
                other => panic!("rank {}: {other:?} {error}", group.rank()),
            }
            // Nothing is lost, and nothing stands in the way of the missing microbatch.
            assert_eq!(model.values(&main)?, before);
            if group.rank() != CULPRIT {
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

tests! {
    fn() -> AnyResult<()>;
    sums_beside_backward_are_those_after_it,
    sums_of_a_layer_begin_while_backward_runs,
    a_rank_that_fails_among_sums,
    a_rank_that_does_not_come_to_sums,
    another_number_of_microbatches_is_an_error_on_every_rank,
}
