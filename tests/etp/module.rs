//! candle's module over a chain beside the module of whole weights, on a mesh of EP by ETP.

use std::sync::Arc;
use std::thread;

use candle_core::{Device, Result as CandleResult, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::candle::{DeviceGroup, EpGroup, ExpertParallelMoE, GradientType, WeightVar, finish_sharded};
use moebius::comm::{Communicator, Op, Tag};
use moebius::config::SharedConfig;
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase, Reduction};
use moebius::layer::{Layer, ParamKind};
use moebius::{Error, MoeConfig, TensorMut, TensorRef};

use super::random::Random;
use super::test_ranks::MINUTE;
use super::world::mesh;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const H: usize = 8;
const EXPERTS: usize = 4;
const LAYERS: usize = 2;
const WORLD: usize = 4;

fn config(recompute: bool) -> MoeConfig {
    let mut config = MoeConfig::new(H, 6, EXPERTS, 2);
    config.shared = Some(SharedConfig { intermediate: 4, gated: true, bias: false });
    config.expert_bias = true;
    config.aux.balance = 0.1;
    config.aux.over_ranks = true;
    config.recompute = recompute;
    config
}

fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(super::devices::seed::seed(seed));
    (0..count).map(|_| (0.5 * random.normal()) as f32).collect()
}

fn flat(t: &Tensor) -> Vec<f32> {
    t.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A layer of EP rank `p` with its values, the experts' cut by a chain if there is one.
fn module(
    config: &MoeConfig,
    number: u32,
    group: &DeviceGroup,
    chain: Option<&Arc<Chain<Cpu>>>,
) -> Result<ExpertParallelMoE, Failure> {
    let local = group.local_experts();
    let mut tensors = std::collections::HashMap::new();
    for kind in ParamKind::ALL {
        let Some(dims) = kind.dims(config, local) else { continue };
        let place = if kind.is_replicated() { 9 } else { group.rank() as u64 };
        let seed = (u64::from(number) * 100 + kind as u64) * 10 + place;
        let whole = moebius::Tensor::<Cpu>::from_vec(values(seed, dims.iter().product()), &dims)?;
        let t = match chain.filter(|_| matches!(kind, ParamKind::Up | ParamKind::Down)) {
            Some(chain) => {
                let cut = chain.shards(&dims)?;
                cut.cut(&Cpu::new(), whole.view(), chain.rank())?
            }
            None => whole,
        };
        let var = Var::from_slice(t.as_slice::<f32>()?, t.dims(), &Device::Cpu)?;
        tensors.insert(kind.name().to_string(), var.into_inner());
    }
    let vb = VarBuilder::from_tensors(tensors, candle_core::DType::F32, &Device::Cpu);
    let layer = Layer::new(config.clone(), number)?;
    Ok(match chain {
        Some(chain) => ExpertParallelMoE::sharded(layer, group, chain, Payload::Plain, vb)?,
        None => ExpertParallelMoE::new(layer, group, vb)?,
    })
}

/// The loss of a stack of layers: outputs weighted, and the auxiliary losses.
fn loss(layers: &[ExpertParallelMoE], x: &Tensor) -> CandleResult<(Tensor, Tensor)> {
    let (mut x, mut aux) = (x.clone(), Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?);
    for layer in layers {
        let out = layer.forward_full(&x, None)?;
        x = (out.y + x)?;
        aux = (aux + out.aux)?;
    }
    Ok(((x.sqr()?.sum_all()? + aux)?, x))
}

/// ((0 + 1) + (2 + 3)) of the ranks' values.
fn sum_over(comm: &mut dyn Communicator<Cpu>, own: &[f32]) -> Result<Vec<f32>, Failure> {
    let n = comm.size();
    let mut all = vec![0f32; own.len() * n];
    let dims = [all.len()];
    let recv = TensorMut::<Cpu>::from_slice(&mut all, &dims)?;
    comm.all_gather(Tag { layer: 0, op: Op::User, sequence: 0 }, TensorRef::from_slice(own, &[own.len()])?, recv)?;
    let parts: Vec<&[f32]> = all.chunks(own.len()).collect();
    Ok((0..own.len())
        .map(|at| match parts.iter().map(|p| p[at]).collect::<Vec<_>>()[..] {
            [a, b] => a + b,
            [a, b, c, d] => (a + b) + (c + d),
            ref other => panic!("{} ranks", other.len()),
        })
        .collect())
}

/// State of each rank of a mesh of `ep` by WORLD / ep.
struct Rank {
    w: usize,
    group: DeviceGroup,
    chain: Arc<Chain<Cpu>>,
    /// Ranks with the same experts.
    data: Box<dyn Communicator<Cpu>>,
    /// All ranks: two optimizers', and one more.
    world: [Box<dyn Communicator<Cpu>>; 3],
}

fn ranks<R: Send>(
    ep: usize,
    prefetch: bool,
    run: impl Fn(Rank) -> Result<R, Failure> + Sync,
) -> Vec<Result<R, Failure>> {
    let groups = mesh(&Cpu::new(), (WORLD, ""), |w| (w / ep, w % ep), MINUTE);
    let data = || mesh(&Cpu::new(), (WORLD, ""), |w| (w % ep, w / ep), MINUTE);
    let comms = groups.into_iter().zip(data()).zip(data().into_iter().zip(data()));
    let world = || mesh(&Cpu::new(), (WORLD, ""), |w| (0, w), MINUTE);
    let worlds = world().into_iter().zip(world()).zip(world()).map(|((a, b), c)| [a, b, c]);
    thread::scope(|scope| {
        let threads: Vec<_> = comms
            .zip(worlds)
            .enumerate()
            .map(|(w, (((group, data), (gather, reduce)), world))| {
                let run = &run;
                scope.spawn(move || {
                    let group = Group::new(Cpu::poisoning(), group, GroupConfig::new(EXPERTS, 64))?;
                    let comms = Comms { gather, reduce };
                    let options = EtpOptions { reduction: Reduction::Pairwise, prefetch, ..EtpOptions::default() };
                    let chain = Arc::new(Chain::new(Cpu::poisoning(), comms, options)?);
                    run(Rank { w, group: EpGroup::new(group).into(), chain, data, world })
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

#[test]
fn the_module_gives_what_whole_weights_give() {
    for (ep, recompute, prefetch) in [(1, false, true), (2, false, true), (2, true, true), (1, true, false)] {
        let results = ranks(ep, prefetch, |mut rank| {
            let config = config(recompute);
            let build = |chain: Option<&Arc<Chain<Cpu>>>| -> Result<Vec<_>, Failure> {
                (0..LAYERS as u32).map(|l| module(&config, l, &rank.group, chain)).collect()
            };
            let (whole, sharded) = (build(None)?, build(Some(&rank.chain))?);
            let tokens = 3 + rank.w;
            for step in 0..3 {
                let x = values(1000 + 10 * step + rank.w as u64, tokens * H);
                let x = Var::from_slice(&x, (tokens, H), &Device::Cpu)?;
                let (expected, y_expected) = loss(&whole, &x)?;
                let expected = expected.backward()?;
                rank.chain.begin(Phase::Forward)?;
                let (found, y) = loss(&sharded, &x)?;
                rank.chain.end()?;
                rank.chain.begin(Phase::Backward)?;
                let mut found = found.backward()?;
                rank.chain.end()?;
                assert_eq!(bits(&flat(&y)), bits(&flat(&y_expected)), "y");
                let same = |what: &str, a: &Tensor, b: &Tensor| {
                    assert_eq!(bits(&flat(found.get(a).unwrap())), bits(&flat(expected.get(b).unwrap())), "{what}");
                };
                same("x", &x, &x);
                for (s, w) in sharded.iter().zip(&whole) {
                    assert_eq!(s.vars().len(), w.vars().len());
                    for ((name, s), (_, w)) in s.params().into_iter().zip(w.params()) {
                        match name {
                            "experts.up" | "experts.down" => assert!(found.get(s).is_none(), "{name} comes later"),
                            _ => same(name, s, w),
                        }
                    }
                }
                let shards: Vec<_> = sharded.iter().flat_map(ExpertParallelMoE::shards).collect();
                assert_eq!(shards.len(), 2 * LAYERS);
                finish_sharded(&rank.chain, None, &shards, &mut found, GradientType::InVariableType)?;
                let weights =
                    whole.iter().flat_map(|w| [ParamKind::Up, ParamKind::Down].map(|kind| w.param(kind).unwrap()));
                for (weight, WeightVar { var: shard, .. }) in weights.zip(&shards) {
                    let sum = sum_over(&mut *rank.data, &flat(expected.get(weight).unwrap()))?;
                    assert!(sum.iter().any(|v| *v != 0.0));
                    let sum = moebius::Tensor::<Cpu>::from_vec(sum, weight.dims())?;
                    let cut = rank.chain.shards(weight.dims())?;
                    let own = cut.cut(&Cpu::new(), sum.view(), rank.chain.rank())?;
                    assert_eq!(bits(&flat(found.get(shard).unwrap())), bits(own.as_slice::<f32>()?), "step {step}");
                }
            }
            Ok(())
        });
        results.into_iter().for_each(|r| r.unwrap_or_else(|e| panic!("ep {ep}, recompute {recompute}: {e}")));
    }
}

/// AdamW on shards, with clipping, leaves what it leaves of whole weights, to the bit.
#[test]
fn adamw_on_shards_is_adamw_on_whole_weights() {
    use candle_nn::Optimizer;
    use moebius::candle::AdamW;
    use moebius::optim::{AdamWOptions, GroupOptions};

    for ep in [1, 2] {
        let results = ranks(ep, true, |rank| {
            let Rank { w, group, chain, mut data, world: [one, other, mut world] } = rank;
            let config = config(false);
            let build = |chain: Option<&Arc<Chain<Cpu>>>| -> Result<Vec<_>, Failure> {
                (0..LAYERS as u32).map(|l| module(&config, l, &group, chain)).collect()
            };
            let (whole, sharded) = (build(None)?, build(Some(&chain))?);
            let options = AdamWOptions {
                group: GroupOptions { lr: 0.01, ..GroupOptions::default() },
                max_norm: Some(1.0),
                ..AdamWOptions::default()
            };
            let adam = |layers: &[ExpertParallelMoE], comm| -> Result<AdamW, Failure> {
                let mut params = Vec::new();
                for (l, layer) in layers.iter().enumerate() {
                    params.extend(layer.optimizer_params(&format!("layers.{l}"))?);
                }
                Ok(AdamW::over_ranks(&Cpu::new(), comm, params, options, &[options.group])?)
            };
            let (mut of_whole, mut of_shards) = (adam(&whole, one)?, adam(&sharded, other)?);
            for step in 0..3 {
                let x = values(1000 + 10 * step + w as u64, (3 + w) * H);
                let x = Var::from_slice(&x, (3 + w, H), &Device::Cpu)?;
                let mut expected = loss(&whole, &x)?.0.backward()?;
                chain.begin(Phase::Forward)?;
                let (found, _) = loss(&sharded, &x)?;
                chain.end()?;
                chain.begin(Phase::Backward)?;
                let mut found = found.backward()?;
                chain.end()?;
                let shards: Vec<_> = sharded.iter().flat_map(ExpertParallelMoE::shards).collect();
                finish_sharded(&chain, None, &shards, &mut found, GradientType::InVariableType)?;
                for (w, s) in whole.iter().zip(&sharded) {
                    for ((name, w), (_, s)) in w.params().into_iter().zip(s.params()) {
                        let own = flat(expected.get(w).unwrap());
                        let sharded = matches!(name, "experts.up" | "experts.down");
                        let replicated = !name.starts_with("experts");
                        let comm = if replicated { &mut world } else { &mut data };
                        let sum = Tensor::from_vec(sum_over(&mut **comm, &own)?, w.dims(), &Device::Cpu)?;
                        if !sharded {
                            found.insert(s, sum.clone());
                        }
                        expected.insert(w, sum);
                    }
                }
                of_whole.step(&expected)?;
                of_shards.step(&found)?;
                let (a, b) = (of_whole.stats()?, of_shards.stats()?);
                assert_eq!(a, b);
                assert!(a.factor < 1.0 && a.steps == step + 1, "{a:?}");
                for (w, s) in whole.iter().zip(&sharded) {
                    for ((name, w), (_, s)) in w.params().into_iter().zip(s.params()) {
                        let mut expected = flat(w);
                        if matches!(name, "experts.up" | "experts.down") {
                            let w = moebius::Tensor::<Cpu>::from_vec(expected, w.dims())?;
                            let own = chain.shards(w.dims())?.cut(&Cpu::new(), w.view(), chain.rank())?;
                            expected = own.as_slice::<f32>()?.to_vec();
                        }
                        assert_eq!(bits(&flat(s)), bits(&expected), "{name}, step {step}");
                    }
                }
            }
            Ok(())
        });
        results.into_iter().for_each(|r| r.unwrap_or_else(|e| panic!("ep {ep}: {e}")));
    }
}

/// Constant shards are frozen: nothing is reduced. The chain's own errors come through candle.
#[test]
fn frozen_shards_and_passes() {
    let results = ranks(2, true, |rank| {
        let trained = module(&config(false), 0, &rank.group, Some(&rank.chain))?;
        let constants = trained.params().into_iter().map(|(n, t)| (n.to_string(), t.detach())).collect();
        let vb = VarBuilder::from_tensors(constants, candle_core::DType::F32, &Device::Cpu);
        let chain = &rank.chain;
        let layer = Layer::new(config(false), 1)?;
        let moe = ExpertParallelMoE::sharded(layer, &rank.group, chain, Payload::Plain, vb)?;
        assert!(moe.shards().is_empty() && moe.vars().is_empty());
        let x = Var::from_slice(&values(rank.w as u64, 2 * H), (2, H), &Device::Cpu)?;
        let error = moe.forward_full(&x, None).unwrap_err().to_string();
        assert!(error.contains("expected a pass, found none"), "{error}");
        chain.begin(Phase::Forward)?;
        let (loss, _) = loss(std::slice::from_ref(&moe), &x)?;
        chain.end()?;
        chain.begin(Phase::Backward)?;
        assert!(loss.backward()?.get(&x).is_some());
        chain.end()?;
        assert_eq!(chain.traffic().reductions, 0);
        // The other layer was not used in the first forward, so it is not ordered.
        assert_eq!(chain.order().len(), 2);
        Ok(())
    });
    results.into_iter().for_each(|r| r.unwrap());
}

/// Where rank 1 fails in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Layer 1 gets tokens of another width.
    Forward,
    /// The gradient of a weight of layer 0 has no buffer.
    GradientBuffer,
    /// Its backward is not announced to the chain.
    Pass,
}

/// A rank that fails in the middle of a step tells the others, and all go on after `recover`.
#[test]
fn all_ranks_hear_of_one_ranks_error_and_recover() {
    for fault in [Fault::Forward, Fault::GradientBuffer, Fault::Pass] {
        let results = ranks(2, true, |rank| {
            let config = config(false);
            let layer = |l| module(&config, l, &rank.group, Some(&rank.chain));
            let layers: Vec<_> = (0..LAYERS as u32).map(layer).collect::<Result<_, _>>()?;
            let shards: Vec<_> = layers.iter().flat_map(ExpertParallelMoE::shards).collect();
            let step = |fault: Option<Fault>| -> CandleResult<Vec<u32>> {
                let x = Var::from_slice(&values(rank.w as u64, 2 * H), (2, H), &Device::Cpu)?;
                rank.chain.begin(Phase::Forward)?;
                let once = layers[0].forward_full(&x, None)?;
                let x = if fault == Some(Fault::Forward) { once.y.narrow(1, 0, 3)? } else { once.y };
                let y = layers[1].forward_full(&x, None)?.y;
                rank.chain.end()?;
                if fault != Some(Fault::Pass) {
                    rank.chain.begin(Phase::Backward)?;
                }
                let taken = if fault == Some(Fault::GradientBuffer) {
                    Some(rank.chain.gradient_buffer(shards[0].id)?)
                } else {
                    None
                };
                let mut gradients = y.sqr()?.sum_all()?.backward()?;
                drop(taken);
                rank.chain.end()?;
                finish_sharded(&rank.chain, None, &shards, &mut gradients, GradientType::InVariableType)?;
                Ok(shards.iter().flat_map(|of| bits(&flat(gradients.get(&of.var).unwrap()))).collect())
            };
            let expected = step(None)?;
            let error = step((rank.w == 1).then_some(fault)).unwrap_err();
            let reason = Error::Framework { call: "step", framework: "candle", message: error.to_string() };
            rank.chain.recover(Some(&reason))?;
            assert_eq!(step(None)?, expected, "{fault:?}: nothing is left of the failed step");
            Ok(error.to_string())
        });
        let errors: Vec<String> = results.into_iter().map(|r| r.unwrap()).collect();
        let own = match fault {
            Fault::Forward => "tensor x",
            Fault::GradientBuffer => "not in use",
            Fault::Pass => "expected a pass",
        };
        // Rank 0 shares rank 1's tokens.
        assert!(errors[1].contains(own), "{fault:?}: {errors:?}");
        assert!(errors[0].contains("rank 1") && errors[0].contains(own), "{fault:?}: {errors:?}");
    }
}
