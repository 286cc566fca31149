//! The same through candle's module.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::candle::{EpGroup, ExpertParallelMoE};
use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadComm};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Layer, ParamKind};

use super::limits::{Countdown, in_time};
use super::support::{
    AT_ONCE, CULPRIT, EXPERTS, HIDDEN, RANKS, SHORT, SLACK, TIMEOUT, TOKENS, all_well, config, on_ranks, values,
};

fn joined(comm: ThreadComm) -> candle_core::Result<EpGroup> {
    let group = Group::new(Cpu::poisoning(), Box::new(comm), GroupConfig::new(EXPERTS, 64));
    Ok(EpGroup::new(group?))
}

fn group(comm: ThreadComm) -> EpGroup {
    joined(comm).expect("group")
}

fn module(group: EpGroup, up_rows: usize) -> candle_core::Result<ExpertParallelMoE> {
    let layer = Layer::new(config(), 5)?;
    let mut tensors = HashMap::new();
    for (seed, kind) in [ParamKind::Router, ParamKind::Up, ParamKind::Down].into_iter().enumerate() {
        let mut dims = kind.dims(&config(), EXPERTS / RANKS).expect("a parameter");
        if kind == ParamKind::Up {
            dims[1] += up_rows;
        }
        let count: usize = dims.iter().product();
        let t = Tensor::from_vec(values(seed + 1, 0..count), dims, &Device::Cpu)?;
        tensors.insert(kind.name().to_string(), Var::from_tensor(&t)?.into_inner());
    }
    ExpertParallelMoE::new(layer, group, VarBuilder::from_tensors(tensors, DType::F64, &Device::Cpu))
}

fn tokens(rank: usize) -> candle_core::Result<Tensor> {
    let count = TOKENS * HIDDEN;
    Tensor::from_vec(values(4, rank * count..(rank + 1) * count), (TOKENS, HIDDEN), &Device::Cpu)
}

/// Bits of y and of the router's gradient.
fn step(moe: &ExpertParallelMoE) -> candle_core::Result<Vec<u64>> {
    let y = moe.forward(&tokens(moe.group().rank())?)?;
    let gradients = y.sqr()?.sum_all()?.backward()?;
    let router = moe.param(ParamKind::Router).expect("router");
    let gradient = gradients.get(router).expect("its gradient");
    let all = [y.flatten_all()?.to_vec1::<f64>()?, gradient.flatten_all()?.to_vec1::<f64>()?].concat();
    assert!(all.iter().all(|v| v.is_finite()) && all.iter().any(|v| *v != 0.0));
    Ok(all.into_iter().map(f64::to_bits).collect())
}

/// Says that an error names the call, this rank, and the culprit.
fn names(error: &str, rank: usize, call: &str) {
    assert!(error.contains(call) && error.contains(&format!("rank {rank}")), "{error}");
    assert!(error.contains(&format!("rank {CULPRIT}")) || error.contains(&format!("[{CULPRIT}")), "{error}");
}

#[test]
fn a_rank_that_returns_or_panics_before_forward_or_backward() {
    for (panics, between) in [(false, false), (false, true), (true, false), (true, true)] {
        let results = on_ranks(TIMEOUT, |comm| {
            let moe = module(group(comm), 0).expect("module");
            let rank = moe.group().rank();
            let leave = || {
                if panics {
                    std::panic::resume_unwind(Box::new("a rank's own trouble"))
                }
            };
            if rank == CULPRIT && !between {
                return leave();
            }
            let start = Instant::now();
            let x = tokens(rank).expect("tokens");
            let (error, call) = match between {
                false => (moe.forward(&x).expect_err("rank lost"), "prepare"),
                true => {
                    let loss = moe.forward(&x).and_then(|y| y.sum_all()).expect("forward");
                    if rank == CULPRIT {
                        return leave();
                    }
                    (loss.backward().expect_err("rank lost"), "combine_bwd")
                }
            };
            names(&error.to_string(), rank, call);
            assert!(error.to_string().contains("has left the group"), "{error}");
            assert!(start.elapsed() < AT_ONCE);
        });
        for (rank, result) in results.iter().enumerate().filter(|(rank, _)| *rank != CULPRIT) {
            assert!(result.is_ok(), "rank {rank}, panics {panics}, between {between}");
        }
    }
}

/// Nothing where a rank came after the others had given it up; any other error is wrong.
fn too_late<T>(error: impl std::fmt::Display) -> Option<T> {
    let error = error.to_string();
    assert!(error.contains("did not arrive"), "{error}");
    None
}

#[test]
fn a_backward_that_never_comes() {
    in_time(SHORT, |limit| {
        let others = Countdown::new(RANKS - 1);
        let results = on_ranks(limit, |comm| {
            let counted = (Communicator::rank(&comm) != CULPRIT).then(|| others.counted());
            let ready = joined(comm).and_then(|group| {
                let moe = module(group, 0)?;
                let loss = moe.forward(&tokens(moe.group().rank())?)?.sum_all()?;
                Ok((moe, loss))
            });
            let (moe, loss) = match ready {
                Ok(ready) => ready,
                Err(error) => return too_late(error),
            };
            let (rank, start) = (moe.group().rank(), Instant::now());
            let error = (rank != CULPRIT).then(|| loss.backward().expect_err("never comes").to_string());
            let took = start.elapsed();
            drop(counted);
            others.wait();
            let Some(error) = error else { return Some(()) };
            if !error.contains(&format!("[{CULPRIT}]")) {
                return too_late(error);
            }
            names(&error, rank, "combine_bwd");
            assert!(error.contains("did not arrive"), "{error}");
            (took < limit + SLACK).then_some(())
        });
        all_well("never arrives", results).into_iter().collect::<Option<Vec<_>>>()
    });
}

#[test]
fn bad_input_on_one_rank_leaves_the_group_usable() {
    type Spoil = fn(Tensor) -> candle_core::Result<Tensor>;
    let bad: [(&str, Spoil); 4] = [
        ("NaN", |x| x * f64::NAN),
        ("tensor x", |x| x.narrow(1, 0, HIDDEN - 1)?.contiguous()),
        ("u32", |x| x.to_dtype(DType::U32)),
        ("max_tokens_per_rank", |_| Tensor::zeros((65, HIDDEN), DType::F64, &Device::Cpu)),
    ];
    let results = on_ranks(TIMEOUT, |comm| {
        let moe = module(group(comm), 0).expect("module");
        let rank = moe.group().rank();
        let before = step(&moe).expect("a step");
        for (name, spoil) in bad {
            let x = tokens(rank).expect("tokens");
            let x = if rank == CULPRIT { spoil(x).expect("x") } else { x };
            let error = moe.forward(&x).expect_err(name).to_string();
            assert!(error.to_lowercase().contains(&name.to_lowercase()), "{name}: {error}");
            if rank != CULPRIT {
                names(&error, rank, "prepare");
            }
            assert_eq!(step(&moe).expect("a step after a fault"), before, "{name}");
        }
    });
    all_well("bad input", results);
}

/// Building a module is a collective: a variable of a wrong shape on one rank is everybody's error.
#[test]
fn a_module_that_one_rank_cannot_build() {
    let results = on_ranks(TIMEOUT, |comm| {
        let group = group(comm);
        let rank = group.rank();
        let start = Instant::now();
        let error = module(group.clone(), usize::from(rank == CULPRIT)).expect_err("a wrong shape").to_string();
        if rank != CULPRIT {
            names(&error, rank, "all_gather");
        }
        assert!(start.elapsed() < AT_ONCE);
        step(&module(group, 0).expect("module")).expect("a step after a fault");
    });
    all_well("a module", results);
}
