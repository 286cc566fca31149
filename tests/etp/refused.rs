//! Modules that a chain refuses: none of their shards is in it afterwards, and it trains other layers as before.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use moebius::candle::{EpGroup, ExpertParallelMoE, GradientType, NewWeight, ShardedWeights, error_of, finish_sharded};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{EtpOptions, Payload, Phase, Shard, WeightSpec};
use moebius::layer::Layer;
use moebius::{Error, MoeConfig};

use super::dense_model::{Failure, bits, flat, norm, values};
use super::test_ranks::{MINUTE, ranks};

const H: usize = 8;
const EXPERTS: usize = 4;
const TOKENS: usize = 5;

fn layer(number: u32, intermediate: usize) -> Layer {
    let mut config = MoeConfig::new(H, intermediate, EXPERTS, 2);
    config.expert_bias = true;
    config.router.logit_bias = true;
    Layer::new(config, number).unwrap()
}

/// `experts.down` of an odd inner size cannot be sent in NVFP4, while `experts.up` and all else of the layer can.
#[test]
fn a_layer_that_is_refused_leaves_nothing_in_its_chain() {
    let run = |asked: bool| {
        let results = ranks(&Cpu::poisoning(), 2, MINUTE, |rank, place| -> Result<_, Failure> {
            let chain = Arc::new(place.chain(EtpOptions::default())?);
            let group = EpGroup::new(Group::single(GroupConfig::new(EXPERTS, 64))?);
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let weights = ShardedWeights::new(&chain, vb.clone());
            if asked {
                let (odd, nvfp4) = (layer(3, 5), Payload::Nvfp4);
                let refused = [
                    ExpertParallelMoE::sharded(odd.clone(), &group, &chain, nvfp4, vb.pp("one")).map(drop),
                    ExpertParallelMoE::all_sharded(odd, &group, &chain, nvfp4, &weights.pp("other")).map(drop),
                ];
                for error in refused.map(|made| made.unwrap_err()) {
                    let Some(Error::Shard { call, rank: at, weight, expected, found }) = error_of(&error) else {
                        panic!("{error:?}")
                    };
                    assert_eq!((*call, *at, &weight[..]), ("Chain::add", rank, "layer 3 experts.down"), "{error}");
                    assert!(expected.contains("even number") && found.contains('5'), "{error}");
                }
                // A module of two weights, the second of which is none.
                let init = Init::Const(1.0);
                let new = [NewWeight::new("weight", &[H], init), NewWeight::new("bias", &[0], init)];
                assert!(weights.pp("third").function(&new, norm).is_err());
                assert!(weights.shards().is_empty() && weights.optimizer_params().is_empty());
            }
            let scale = weights.pp("norm").function(&[NewWeight::new("weight", &[H], Init::Const(1.0))], norm)?;
            let moe = ExpertParallelMoE::all_sharded(layer(0, 6), &group, &chain, Payload::Nvfp4, &weights.pp("moe"))?;
            let x = Tensor::from_vec(values(rank as u64, TOKENS * H), (TOKENS, H), &Device::Cpu)?;
            let mut found = Vec::new();
            for _step in 0..2 {
                chain.begin(Phase::Forward)?;
                let y = moe.forward(&scale.forward(&x)?)?;
                chain.end()?;
                chain.begin(Phase::Backward)?;
                let mut gradients = y.sqr()?.sum_all()?.backward()?;
                chain.end()?;
                let shards = [moe.shards(), weights.shards()].concat();
                finish_sharded(&chain, None, &shards, &mut gradients, GradientType::AsSummed)?;
                found.push(bits(&flat(&y)));
                found.extend(shards.iter().map(|shard| bits(&flat(gradients.get(&shard.var).unwrap()))));
            }
            assert!(found.iter().flatten().any(|v| *v != 0));
            Ok((found, chain.order(), chain.memory()))
        });
        results.into_iter().map(|result| result.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(format!("{:?}", run(true)), format!("{:?}", run(false)));
}

/// A shard on the host is one of a chain of one rank, as it is, and stays as it is.
#[test]
fn a_shard_on_the_host_of_several_ranks() {
    for (n, payload) in [(1, Payload::Plain), (1, Payload::Mxfp8), (2, Payload::Plain)] {
        ranks(&Cpu::poisoning(), n, MINUTE, |rank, place| {
            let chain = place.chain(EtpOptions::default()).unwrap();
            let dims = chain.shards(&[64, 32]).unwrap().shard_dims();
            let values: Vec<f32> = (0..dims[0] * dims[1]).map(|i| i as f32).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            let short = Shard::on_host(&Cpu::new(), moebius::DType::F32, dims, &bytes[1..]);
            assert!(matches!(short, Err(Error::Invalid { call: "Shard::on_host", .. })), "{short:?}");
            let shard = Arc::new(Shard::on_host(&Cpu::new(), moebius::DType::F32, dims, &bytes).unwrap());
            assert!(matches!(shard.update(|_| Ok(())), Err(Error::Invalid { call: "Shard::update", .. })));
            let spec = WeightSpec { payload, ..WeightSpec::new("w", 0, &[64, 32], moebius::DType::F32) };
            let added = chain.add(spec, shard);
            match (n, payload) {
                (1, Payload::Plain) => {
                    let id = added.unwrap();
                    assert_eq!(chain.bytes_on_host(), bytes.len());
                    assert_eq!(chain.whole(id).unwrap().as_slice::<f32>().unwrap(), values);
                }
                _ => {
                    let error = added.unwrap_err();
                    let named = matches!(&error, Error::Shard { rank: at, weight, .. } if *at == rank && weight == "w");
                    assert!(named && error.to_string().contains("one rank"), "{error}");
                    assert_eq!(chain.bytes_on_host(), 0);
                }
            }
        });
    }
}
