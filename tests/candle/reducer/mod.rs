//! Sums of main gradients over ranks beside backward: against those after it, over replicas, and where a rank fails.

mod refused;
mod sums;
mod variables;

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

/// A test by name.
type Case = (&'static str, fn() -> AnyResult<()>);

/// All of them.
pub fn cases() -> Vec<Case> {
    [sums::cases(), variables::cases(), refused::cases()].concat()
}
