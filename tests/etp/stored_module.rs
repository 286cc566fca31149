//! candle's module over experts that stay quantized, sharded: what it computes is what the layer does of the whole block.

use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Result as CandleResult, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::Error;
use moebius::candle::{EpGroup, ExpertParallelMoE, LoadAs, Parameters, ShardedIn, ShardedWeights, error_of};
use moebius::checkpoint::{Checkpoint, LoadOptions, Progress};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{EtpOptions, Payload, Phase};
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind};

use super::random::Random;
use super::test_ranks::{MINUTE, ranks};
use super::world::Tensor as Own;

const TOKENS: usize = 6;

fn bits(t: &Tensor) -> Vec<u32> {
    t.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect()
}

fn own_bits(t: &Own) -> Vec<u32> {
    t.as_slice::<f32>().unwrap().iter().map(|v| v.to_bits()).collect()
}

#[test]
fn a_module_of_quantized_shards_is_the_layer_of_the_block() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for family in ["qwen3_moe_nvfp4_modelopt", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let checkpoint = Checkpoint::open(root.join(family)).unwrap();
        let number = checkpoint.moe_layers()[0];
        let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(moebius::DType::F32) };
        let block = checkpoint.load_quantized(number, options).unwrap();
        let (experts, hidden) = (block.config.router.num_experts, block.config.hidden);
        let mut random = Random::new(super::devices::seed::seed(8));
        let mut values = || (0..TOKENS * hidden).map(|_| random.normal() as f32).collect::<Vec<f32>>();
        let (x, d_y) = (values(), values());
        let expected = {
            let own = |values: &[f32]| Own::from_vec(values.to_vec(), &[TOKENS, hidden]).unwrap();
            let (x, d_y, params) = (own(&x), own(&d_y), block.params().unwrap());
            let mut group = Group::single(GroupConfig::new(experts, TOKENS)).unwrap();
            let layer = Layer::new(block.config.clone(), number as u32).unwrap();
            let mode = Mode { backward: true, noise: None };
            let forward = layer.forward(&mut group, mode, x.view(), &params).unwrap();
            let inputs = Inputs { x: x.view(), params: &params };
            let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
            let wanted = GradientMask { experts: false, ..GradientMask::ALL };
            let context = forward.context.unwrap();
            let found = layer.backward(&mut group, context, inputs, cotangents, wanted).unwrap();
            [own_bits(&forward.y), own_bits(found.x.as_ref().unwrap()), own_bits(found.router.as_ref().unwrap())]
        };
        for (n, prefetch) in [(1, true), (2, true), (4, true), (4, false)] {
            ranks(&Cpu::poisoning(), n, MINUTE, |rank, place| {
                let chain = place.chain(EtpOptions { pad: 1, prefetch, ..EtpOptions::default() }).unwrap();
                let chain = Arc::new(chain);
                let group = EpGroup::new(Group::single(GroupConfig::new(experts, TOKENS)).unwrap());
                let mut seen = Vec::new();
                let mut progress = |p: Progress<'_>| seen.push((p.done, p.total));
                let load = LoadAs::new(Parameters::Trainable).dtype(candle_core::DType::F32).quantized();
                let load = load.progress(&mut progress);
                let shards = ShardedIn { chain: &chain, payload: Payload::Plain, weights: None };
                let moe = ExpertParallelMoE::from_checkpoint_sharded(&checkpoint, number, group, shards, load).unwrap();
                assert!(seen.len() > experts && seen.last().is_some_and(|(done, total)| done == total), "{seen:?}");
                let x = Var::from_slice(&x, (TOKENS, hidden), &Device::Cpu).unwrap();
                let d_y = Tensor::from_slice(&d_y, (TOKENS, hidden), &Device::Cpu).unwrap();
                let step = || -> CandleResult<[Vec<u32>; 3]> {
                    chain.begin(Phase::Forward)?;
                    let y = moe.forward_full(&x, None)?.y;
                    chain.end()?;
                    chain.begin(Phase::Backward)?;
                    let found = (&y * &d_y)?.sum_all()?.backward()?;
                    chain.end()?;
                    let router = moe.param(ParamKind::Router).and_then(|router| found.get(router));
                    Ok([bits(&y), bits(found.get(&x).unwrap()), bits(router.unwrap())])
                };
                for step in (0..2).map(|_| step().unwrap()) {
                    assert!(step == expected, "{family} over {n}, rank {rank}");
                }
                // Nothing of the experts is trained, nor a tensor; without gradients they are read all the same.
                assert!(moe.param(ParamKind::Up).is_none() && moe.shards().is_empty());
                assert_eq!((chain.memory().main, chain.memory().gradients, chain.traffic().reductions), (0, 0, 0));
                chain.begin(Phase::Forward).unwrap();
                let y = moe.detached().forward_full(&x.as_detached_tensor(), None).unwrap().y;
                chain.end().unwrap();
                assert_eq!(bits(&y), expected[0]);
                assert!(moe.to_block().is_err());
                // Experts on the host are those of one rank.
                if n > 1 {
                    let shards = ShardedIn { chain: &chain, payload: Payload::Plain, weights: None };
                    let load = LoadAs::new(Parameters::Frozen).quantized().experts_on_host();
                    let made =
                        ExpertParallelMoE::from_checkpoint_sharded(&checkpoint, number, moe.group(), shards, load);
                    let error = made.unwrap_err();
                    assert!(matches!(error_of(&error), Some(Error::Shard { .. })), "{error}");
                }
                // Router and shared expert are whole beside such experts.
                let weights = ShardedWeights::new(&chain, VarBuilder::zeros(candle_core::DType::F32, &Device::Cpu));
                let shards = ShardedIn { chain: &chain, payload: Payload::Plain, weights: Some(&weights) };
                let load = LoadAs::new(Parameters::Frozen).quantized();
                let made = ExpertParallelMoE::from_checkpoint_sharded(&checkpoint, number, moe.group(), shards, load);
                let error = made.unwrap_err();
                assert!(matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "weights"), "{error}");
            });
        }
    }
}
