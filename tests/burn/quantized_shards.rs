//! Experts that stay quantized, of one rank and as shards of burn's modules: what they compute is what the layer does of
//! the whole block.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use moebius::burn::{AdamWParam, CoreDevice, DeviceGroup, ExpertParallelMoE, LoadAs, ShardHolder, ShardedLoad};
use moebius::checkpoint::{Checkpoint, LoadOptions, QuantizedBlock};
use moebius::comm::Solo;
use moebius::config::Payload;
use moebius::cpu::Cpu;
use moebius::ep::GroupConfig;
use moebius::etp::Phase;
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind};
use moebius::quant::WeightFormat;
use moebius::{DType, Error, MoeConfig, Tensor as Core};

use super::sharded::{Mesh, Meshed, Place, on_mesh};
use super::support::*;
use crate::goldens::golden_of;
use crate::trials::tests;

const TOKENS: usize = 6;

/// On the device of `group`.
fn put<S: Meshed>(device: &CoreDevice<S>, values: &[f32], dims: &[usize]) -> Core<CoreDevice<S>> {
    Core::<Cpu>::from_vec(values.to_vec(), dims).unwrap().to(device).unwrap()
}

fn read<S: Meshed>(device: &CoreDevice<S>, t: &Core<CoreDevice<S>>) -> Vec<f32> {
    let bytes = device.download(t.view()).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// y and the gradients of x and the router, of the layer over the whole block.
fn whole<S: Meshed>(group: &DeviceGroup, block: &QuantizedBlock<Cpu>, x: &[f32], d_y: &[f32]) -> [Vec<f32>; 3] {
    let mut group = group.on::<CoreDevice<S>>().unwrap().lock();
    let device = group.device().clone();
    let dims = [TOKENS, block.config.hidden];
    let (x, d_y, block) = (put::<S>(&device, x, &dims), put::<S>(&device, d_y, &dims), block.to(&device).unwrap());
    let (layer, params) = (Layer::new(block.config.clone(), 0).unwrap(), block.params().unwrap());
    let mode = Mode { backward: true, noise: None };
    let forward = layer.forward(&mut group, mode, x.view(), &params).unwrap();
    let inputs = Inputs { x: x.view(), params: &params };
    let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
    let wanted = GradientMask { experts: false, ..GradientMask::ALL };
    let found = layer.backward(&mut group, forward.context.unwrap(), inputs, cotangents, wanted).unwrap();
    [&forward.y, found.x.as_ref().unwrap(), found.router.as_ref().unwrap()].map(|t| read::<S>(&device, t))
}

/// A module of frozen quantized shards over so many ranks that hold the same experts.
pub fn as_the_block<S: Meshed>(ranks: usize) {
    for family in ["qwen3_moe_nvfp4_modelopt", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let checkpoint = Checkpoint::open(golden_of(family)).unwrap();
        let layer = checkpoint.moe_layers()[0];
        let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(DType::F32) };
        let block = checkpoint.load_quantized(layer, options).unwrap();
        let (experts, hidden) = (block.config.router.num_experts, block.config.hidden);
        let (x, d_y) = (values(400, TOKENS * hidden, 1.0), values(401, TOKENS * hidden, 1.0));
        on_mesh::<S, _>(Mesh { world: ranks, ep: 1 }, true, |place| {
            let Place { rank, shards, .. } = place;
            let device = shards.chain().device().clone();
            let alone = || {
                let comm = Box::new(Solo::new(device.clone()));
                S::group_of(device.clone(), comm, GroupConfig::new(experts, 64))
            };
            let expected = whole::<S>(&alone(), &block, &x, &d_y);
            let from = ShardedLoad { checkpoint: &checkpoint, layer, dtype: Some(DType::F32), payload: Payload::Plain };
            let moe = shards.load_quantized::<Autodiff<S>>(from, alone(), &here::<S>()).unwrap();
            let c = || tensor::<Autodiff<S>, 2>(d_y.clone(), [TOKENS, hidden]);
            for step in 0..2 {
                let x = tensor::<Autodiff<S>, 2>(x.clone(), [TOKENS, hidden]).require_grad();
                shards.begin(Phase::Forward, [&moe]).unwrap();
                let y = moe.forward(x.clone()).unwrap();
                shards.end().unwrap();
                let value = floats(y.clone());
                shards.begin(Phase::Backward, [&moe]).unwrap();
                let gradients = (y * c()).sum().backward();
                shards.end().unwrap();
                let router = floats(moe.router.weight.grad(&gradients).unwrap());
                let found = [value, floats(x.grad(&gradients).unwrap()), router];
                for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let same = found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same && found.len() == expected.len(), "{family} over {ranks}, rank {rank}, {step}: {at}");
                }
                let mut params = GradientsParams::from_grads(gradients, &moe);
                shards.finish(None, [&moe], &mut params).unwrap();
                assert!(params.get::<S, 3>(moe.experts.up.id).is_none());
            }
            // Nothing of the experts is trained or a shard of a parameter; nothing is de-quantized, and nothing has a
            // gradient.
            let memory = shards.chain().memory();
            assert_eq!((memory.main, memory.gradients, shards.chain().traffic().reductions), (0, 0, 0));
            assert!(moe.shard_ids().is_empty());
            let trained = AdamWParam::of_module::<Autodiff<S>, _>(&moe);
            assert!(trained.iter().all(|param| !param.name().starts_with("experts")), "{trained:?}");
            let refused = |error: Option<Error>| {
                assert!(matches!(error, Some(Error::Invalid { ref name, .. }) if name == "experts"), "{error:?}");
            };
            refused(moe.to_block().err());
            refused(moe.to_parts().err());
            refused(shards.to_blocks([&moe]).err());
            // A forward without gradients reads the experts too.
            let inner = burn::module::AutodiffModule::valid(&moe);
            shards.begin(Phase::Forward, [&inner]).unwrap();
            let y = inner.forward(tensor::<S, 2>(x.clone(), [TOKENS, hidden])).unwrap();
            shards.end().unwrap();
            assert!(floats(y) == expected[0], "{family}: without gradients");
            assert_eq!(moe.experts.up.dims(), [1, 1, 1]);
            let up = ParamKind::Up.dims(&block.config, experts).unwrap();
            assert_eq!(block.up.dims()[..], up[..]);
            assert!(moe.num_params() < up.iter().product());
        });
    }
}

/// A module that keeps a checkpoint's experts as they are stored.
pub fn kept_as_stored<S: Meshed>() {
    for (family, bits) in [("qwen3_moe_nvfp4_modelopt", 4), ("gpt_oss_mxfp4", 4), ("deepseek_v3_fp8", 8)] {
        let checkpoint = Checkpoint::open(golden_of(family)).unwrap();
        let layer = checkpoint.moe_layers()[0];
        let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(DType::F32) };
        let block = checkpoint.load_quantized(layer, options).unwrap();
        let (experts, hidden) = (block.config.router.num_experts, block.config.hidden);
        let (x, d_y) = (values(400, TOKENS * hidden, 1.0), values(401, TOKENS * hidden, 1.0));
        on_mesh::<S, _>(Mesh { world: 1, ep: 1 }, true, |place| {
            let device = place.shards.chain().device().clone();
            let alone = || {
                let comm = Box::new(Solo::new(device.clone()));
                S::group_of(device.clone(), comm, GroupConfig::new(experts, 64))
            };
            let expected = whole::<S>(&alone(), &block, &x, &d_y);
            let load = LoadAs::default().dtype(DType::F32).quantized();
            let loaded =
                ExpertParallelMoE::<Autodiff<S>>::from_checkpoint(&checkpoint, layer, alone(), load, &here::<S>());
            let moe = loaded.unwrap();
            let tokens = tensor::<S, 2>(x.clone(), [TOKENS, hidden]);
            let x = tensor::<Autodiff<S>, 2>(x.clone(), [TOKENS, hidden]).require_grad();
            let y = moe.forward(x.clone()).unwrap();
            let c = tensor::<Autodiff<S>, 2>(d_y.clone(), [TOKENS, hidden]);
            let value = floats(y.clone());
            let gradients = (y * c).sum().backward();
            let router = floats(moe.router.weight.grad(&gradients).unwrap());
            let found = [value, floats(x.grad(&gradients).unwrap()), router];
            assert!(found == expected, "{family}");
            assert!(moe.experts.up.grad(&gradients).is_none() && moe.experts.up.dims() == [1, 1, 1]);
            let numbers: usize = [ParamKind::Up, ParamKind::Down]
                .map(|kind| kind.dims(&block.config, experts).unwrap().iter().product::<usize>())
                .iter()
                .sum();
            // Codes, and at most a scale of a byte for sixteen of them and a factor in f32 for each expert's part.
            let (_, bytes) = moe.quantized().unwrap();
            assert!(
                (numbers * bits / 8..numbers * bits / 8 + numbers / 16 + 1024).contains(&bytes),
                "{family}: {bytes}"
            );
            let trained = AdamWParam::of_module::<Autodiff<S>, _>(&moe);
            assert!(trained.iter().all(|param| !param.name().starts_with("experts")), "{trained:?}");
            let inner = burn::module::AutodiffModule::valid(&moe);
            let y = inner.forward(tokens).unwrap();
            assert!(floats(y) == expected[0], "{family}: without gradients");
            for refused in
                [moe.to_block().err(), moe.to_parts().err(), moe.into_sharded(&place.shards, Payload::Plain).err()]
            {
                assert!(matches!(refused, Some(Error::Invalid { ref name, .. }) if name == "experts"), "{refused:?}");
            }
        });
    }
    // Experts of floating type are none that could be kept.
    let checkpoint = Checkpoint::open(golden_of("qwen3_moe")).unwrap();
    let (layer, load) = (checkpoint.moe_layers()[0], LoadAs::default().quantized());
    let group = DeviceGroup::single::<S>(&checkpoint.block_config(layer).unwrap(), &here::<S>()).unwrap();
    assert!(ExpertParallelMoE::<S>::from_checkpoint(&checkpoint, layer, group, load, &here::<S>()).is_err());
}

/// Experts that are quantized where they lie: weights that NVFP4 holds exactly (codes times a power of two, the largest of
/// them in every block) stay what they are.
pub fn quantized_where_they_lie<S: Meshed>() {
    let config = MoeConfig::new(32, 48, E, K).with_expert_bias(true);
    let mut moe = module::<Autodiff<S>>(&config, S::alone());
    let of_nvfp4 = [0.0, 0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0];
    let exact = |dims: [usize; 3], sign: f32| {
        let code = |i: usize| of_nvfp4[if i.is_multiple_of(16) { 7 } else { (i * 5 + i / 16) % 8 }];
        let values = (0..dims.iter().product()).map(|i| sign * code(i) / 16.0).collect();
        Param::initialized(ParamId::new(), tensor::<Autodiff<S>, 3>(values, dims))
    };
    moe.experts.up = exact(moe.experts.up.dims(), 1.0);
    moe.experts.down = exact(moe.experts.down.dims(), -1.0);
    let kept = moe.to_nvfp4().unwrap();
    assert_eq!(kept.quantized().map(|(format, _)| format), Some(WeightFormat::Nvfp4));
    assert_eq!([kept.experts.up.dims(), kept.experts.down.dims()], [[1; 3]; 2]);
    let x = || tensor::<Autodiff<S>, 2>(values(402, 9 * config.hidden, 1.0), [9, config.hidden]).require_grad();
    let pass = |moe: &ExpertParallelMoE<Autodiff<S>>| {
        let x = x();
        let y = moe.forward(x.clone()).unwrap();
        let gradients = y.clone().powi_scalar(2).sum().backward();
        let router = moe.router.weight.grad(&gradients).unwrap();
        [floats(y), floats(x.grad(&gradients).unwrap()), floats(router)]
    };
    // Sums of up to 48 terms in f32, of which each product adds one rounding, and one of each factor where burn's do.
    let tolerance = 1e-5 + 4.0 * S::ROUNDING;
    for (name, (found, expected)) in ["y", "dx", "router"].iter().zip(pass(&kept).iter().zip(&pass(&moe))) {
        close(name, found, expected, tolerance);
    }
    let trained = AdamWParam::of_module::<Autodiff<S>, _>(&kept);
    assert!(trained.iter().all(|param| !param.name().starts_with("experts")), "{trained:?}");

    let refused = |result: moebius::Result<ExpertParallelMoE<Autodiff<S>>>, word: &str| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains(word), "{text}");
    };
    refused(kept.to_nvfp4(), "floating type");
    refused(module::<Autodiff<S>>(&MoeConfig::new(32, 24, E, K), S::alone()).to_nvfp4(), "multiple of 16");
    let nan = moe.experts.up.val().mul_scalar(f32::NAN).detach();
    moe.experts.up = Param::initialized(ParamId::new(), nan);
    refused(moe.to_nvfp4(), "expert 0");
}

fn experts_are_quantized_where_they_lie() {
    quantized_where_they_lie::<Flex>();
}

fn quantized_experts_are_kept_as_stored() {
    kept_as_stored::<Flex>();
}

fn quantized_shards_are_the_layer_of_the_block() {
    for ranks in RANKS {
        as_the_block::<Flex>(ranks);
    }
}

tests! {
    fn();
    experts_are_quantized_where_they_lie,
    quantized_experts_are_kept_as_stored,
    quantized_shards_are_the_layer_of_the_block,
}
