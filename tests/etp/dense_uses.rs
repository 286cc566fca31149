//! Dense weights that a step uses in another way: not in its backward, twice in a row, and with initial values.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap};
use moebius::candle::{EpGroup, ExpertParallelMoE, GradientType, NewWeight, ShardedWeights, WeightVar, finish_sharded};
use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::etp::{Chain, EtpOptions, Payload, Phase};
use moebius::layer::{Layer, ParamKind};

use super::dense_model::{
    Failure, H, PAIRS, Rank, Sharded, VOCABULARY, Whole, bits, builder, config, flat, ids, norm, ranks, shard,
    shards_of, sum_over, values, whole,
};

/// Variables of these names, constants of the others.
fn partly(tensors: HashMap<String, Tensor>, trained: &[&str]) -> VarBuilder<'static> {
    let of = |(name, t): (String, Tensor)| {
        let var = trained.iter().any(|part| name.starts_with(part));
        let t = if var { Var::from_tensor(&t).unwrap().into_inner() } else { t };
        (name, t)
    };
    VarBuilder::from_tensors(tensors.into_iter().map(of).collect(), DType::F32, &Device::Cpu)
}

fn cut_all(chain: &Chain<Cpu>) -> Result<HashMap<String, Tensor>, Failure> {
    whole().into_iter().map(|(name, t)| Ok((name.clone(), shard(chain, &name, &t)?))).collect()
}

/// A model whose first layers are frozen: nothing before the first trained weight has a backward, and those behind it
/// have theirs. Its first forward may be an evaluation, and another may come between steps.
#[test]
fn frozen_first_layers_have_no_backward() {
    let cases: [&[&str]; 4] = [&["head"], &["moe"], &["moe.router", "head"], &["proj", "head"]];
    for (n, trained) in [1, 2, 4].into_iter().flat_map(|n| cases.map(|trained| (n, trained))) {
        for options in [PAIRS, EtpOptions { prefetch: false, ..PAIRS }, EtpOptions { ahead: 2, ..PAIRS }] {
            let results = ranks(n, options, |mut rank| {
                let sharded = Sharded::new(&rank.chain, partly(cut_all(&rank.chain)?, trained))?;
                let plain = Whole::new(partly(whole(), trained))?;
                let evaluate = || -> CandleResult<u32> {
                    rank.chain.begin(Phase::Forward)?;
                    let loss = sharded.model().loss(ids(9, rank.w))?.to_scalar::<f32>()?;
                    rank.chain.end()?;
                    Ok(loss.to_bits())
                };
                let expected = plain.model().loss(ids(9, rank.w))?.to_scalar::<f32>()?.to_bits();
                assert_eq!(evaluate()?, expected);
                for step in 0..2 {
                    let expected = plain.model().loss(ids(step, rank.w))?.backward()?;
                    let replicas = rank.replicas.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<Cpu>);
                    let (_, found) = sharded.step(ids(step, rank.w), replicas)?;
                    for (name, var) in plain.vars() {
                        let sum = sum_over(&mut *rank.world, &flat(expected.get(&var).unwrap()))?;
                        let sum = shard(&rank.chain, &name, &Tensor::from_vec(sum, var.dims(), &Device::Cpu)?)?;
                        let own = sharded.var(&name).ok_or("no variable")?;
                        assert_eq!(bits(&flat(found.get(&own).unwrap())), bits(&flat(&sum)), "{name}, N = {n}");
                    }
                    evaluate()?;
                }
                Ok(sharded.shards().len())
            });
            assert!(results.into_iter().all(|trained| trained.unwrap() > 0));
        }
    }
}

/// A layer twice in a row, its router's second use right behind the first: values and gradients are those of two layers
/// with the same weights.
#[test]
fn a_layer_may_be_called_twice_in_a_row() {
    for (recompute, ahead) in [(false, 1), (true, 1), (true, 2)] {
        let results = ranks(4, EtpOptions { ahead, ..PAIRS }, |mut rank| {
            let mut config = config();
            config.recompute = recompute;
            let group = || EpGroup::single(&config);
            let tensors =
                || whole().into_iter().filter(|(name, _)| name.starts_with("moe.")).collect::<HashMap<_, _>>();
            let plain =
                || ExpertParallelMoE::new(Layer::new(config.clone(), 0)?, group()?, builder(tensors()).pp("moe"));
            let [first, second] = [plain()?, plain()?];
            let chain = &rank.chain;
            let weights = ShardedWeights::new(chain, shards_of(chain)?).pp("moe");
            let layer = Layer::new(config.clone(), 0)?;
            let moe = ExpertParallelMoE::all_sharded(layer, group()?, chain, Payload::Plain, &weights)?;
            let x = Var::from_vec(values(rank.w as u64, 5 * H), (5, H), &Device::Cpu)?;
            let loss = |first: &ExpertParallelMoE, second: &ExpertParallelMoE| -> CandleResult<Tensor> {
                let one = first.forward_full(&x, None)?;
                let two = second.forward_full(&one.y, None)?;
                (two.y.sqr()?.sum_all()? + two.aux)? + one.aux
            };
            let expected = loss(&first, &second)?.backward()?;
            for _step in 0..2 {
                chain.begin(Phase::Forward)?;
                let y = loss(&moe, &moe)?;
                chain.end()?;
                chain.begin(Phase::Backward)?;
                let mut found = y.backward()?;
                chain.end()?;
                let all = [weights.shards(), moe.shards()].concat();
                finish_sharded(chain, None, &all, &mut found, GradientType::AsSummed)?;
                assert_eq!(bits(&flat(found.get(&x).unwrap())), bits(&flat(expected.get(&x).unwrap())));
                for kind in ParamKind::ALL {
                    let (Some(one), Some(two)) = (first.param(kind), second.param(kind)) else { continue };
                    // The second use's sum over the ranks comes first, as its backward does.
                    let mut sums = Vec::new();
                    for of in [two, one] {
                        sums.push(sum_over(&mut *rank.world, &flat(expected.get(of).unwrap()))?);
                    }
                    let sum = sums[0].iter().zip(&sums[1]).map(|(a, b)| a + b).collect::<Vec<_>>();
                    let name = format!("moe.{}", kind.name());
                    let sum = shard(chain, &name, &Tensor::from_vec(sum, one.dims(), &Device::Cpu)?)?;
                    let found = found.get(moe.param(kind).unwrap()).unwrap();
                    assert_eq!(bits(&flat(found)), bits(&flat(&sum)), "{kind:?}, recompute {recompute}");
                }
            }
            Ok(())
        });
        results.into_iter().for_each(|r| r.unwrap());
    }
}

/// Shards that are drawn: replicas have the same, and any number of ranks has the same whole weights.
#[test]
fn drawn_weights_are_the_same_on_replicas_and_at_every_number_of_ranks() {
    let drawn = |n: usize| -> Vec<HashMap<String, Vec<f32>>> {
        let results = ranks(n, EtpOptions { pad: 1, ..PAIRS }, |Rank { chain, .. }| {
            let vars = VarMap::new();
            let sharded = Sharded::new(&chain, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
            let mut found = HashMap::new();
            for WeightVar { id, var } in sharded.shards() {
                let all = vars.data().lock().unwrap();
                let name = all.iter().find(|(_, other)| other.id() == var.id()).map(|(name, _)| name.clone());
                let whole = chain.whole(id)?;
                found.insert(name.ok_or("no name")?, whole.as_slice::<f32>()?.to_vec());
            }
            Ok(found)
        });
        results.into_iter().map(|found| found.unwrap()).collect()
    };
    let alone = drawn(1);
    for (n, found) in [1, 2, 4].map(|n| (n, drawn(n))) {
        for (w, found) in found.iter().enumerate() {
            assert_eq!(found, &alone[0], "rank {w}, N = {n}");
        }
    }
    let of = |name: &str| &alone[0][name];
    assert!(of("norm.weight").iter().all(|v| *v == 1.0) && of("moe.router.bias").iter().all(|v| *v == 0.0));
    let bound = 1.0 / (H as f32).sqrt();
    for name in ["proj.weight", "proj.bias", "head.weight", "moe.router.weight", "moe.experts.up"] {
        let values = of(name);
        assert!(values.iter().all(|v| v.abs() <= bound) && values.iter().any(|v| *v != values[0]), "{name}");
    }
    assert_eq!(of("embed.weight").len(), VOCABULARY * H);
    assert_ne!(of("head.weight")[..8], of("proj.weight")[..8]);
}

/// What is there already is not drawn.
#[test]
fn weights_that_are_there_stay() {
    let results = ranks(2, PAIRS, |Rank { chain, .. }| {
        let vars = VarMap::new();
        let vb = || VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let own = ShardedWeights::new(&chain, vb()).pp("head").linear_no_bias(H, VOCABULARY)?;
        let set = |value: f32| -> CandleResult<()> {
            vars.all_vars().iter().try_for_each(|var| var.set(&Tensor::full(value, var.shape(), &Device::Cpu)?))
        };
        set(3.0)?;
        drop(own);
        let weights = ShardedWeights::new(&chain, vb());
        weights.pp("head").linear_no_bias(H, VOCABULARY)?;
        weights.pp("norm").function(&[NewWeight::new("weight", &[H], Init::Const(2.0))], norm)?;
        let all: Vec<Vec<f32>> = weights.shards().iter().map(|shard| flat(&shard.var)).collect();
        assert!(all[0].iter().all(|v| *v == 3.0) && all[1].iter().all(|v| *v == 2.0));
        Ok(Arc::strong_count(&chain))
    });
    assert!(results.into_iter().all(|count| count.is_ok()));
}
