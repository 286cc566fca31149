//! Shards from checkpoints, and back at another number of ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moebius::DType;
use moebius::checkpoint::{BlockParams, Checkpoint, LoadOptions, QuantizedBlock, ShardOptions, gather_blocks};
use moebius::cpu::Cpu;
use moebius::etp::{EtpOptions, Shard, Shards, WeightSpec};
use moebius::layer::ParamKind;

use super::devices::golden_of;
use super::test_ranks::{Chained, MINUTE, bodies, ranks};
use super::world::Tensor;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut all: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.join("config.json").exists());
    all.sort();
    assert!(all.len() >= 14);
    all
}

/// Every family and form: per expert and fused, (out, in) and (in, out), plain and quantized.
#[test]
fn shards_join_to_the_block() {
    for dir in folders() {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let layer = checkpoint.moe_layers()[0];
        for (ep, n, pad, dtype) in [(1, 1, 16, None), (2, 2, 16, None), (1, 4, 0, Some(DType::F32)), (1, 3, 1, None)] {
            let options = LoadOptions { rank: ep - 1, ranks: ep, dtype };
            let whole = checkpoint.load_block(layer, options).unwrap().params;
            let load =
                |rank| checkpoint.load_shard(layer, options, ShardOptions { rank, ranks: n, pad }).unwrap().params;
            let parts: Vec<BlockParams> = (0..n).map(load).collect();
            for kind in ParamKind::ALL {
                let Some(expected) = whole.get(kind) else { continue };
                if !matches!(kind, ParamKind::Up | ParamKind::Down) {
                    assert!(parts.iter().all(|p| p.get(kind).unwrap().as_bytes() == expected.as_bytes()), "{kind:?}");
                    continue;
                }
                let cut = Shards::new(expected.dims(), n, pad).unwrap();
                let joined: Vec<u8> = parts.iter().flat_map(|p| p.get(kind).unwrap().as_bytes().to_vec()).collect();
                let (found, tail) = joined.split_at(expected.bytes());
                let what = format!("{} {kind:?}, EP {ep}, ETP {n}", dir.display());
                assert!(found == expected.as_bytes(), "{what}");
                assert_eq!(tail.len(), cut.padding() * cut.shard_dims()[1] * expected.dtype().size(), "{what}");
                assert!(tail.iter().all(|byte| *byte == 0), "{what}");
            }
        }
    }
}

#[test]
fn a_shard_that_there_is_not() {
    let checkpoint = Checkpoint::open(&folders()[0]).unwrap();
    let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
    for (rank, ranks) in [(2, 2), (0, 0)] {
        let shard = ShardOptions { rank, ranks, pad: 16 };
        assert!(checkpoint.load_shard(checkpoint.moe_layers()[0], options, shard).is_err());
    }
}

bodies!(1 saved_at_one_size_and_loaded_at_another, 1 quantized_weights_stay_so_in_a_chain);

/// Loaded over four ranks, saved, loaded over two, saved: the same file.
fn saved_at_one_size_and_loaded_at_another<D: Chained>(device: &D) {
    let source = golden_of("qwen3_moe");
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (from, n, to) in [(source.as_path(), 4, first.path()), (first.path(), 2, second.path())] {
        let checkpoint = Checkpoint::open(from).unwrap();
        let n = device.up_to(n);
        let saved = ranks(device, n, MINUTE, |rank, place| {
            let device = place.device.clone();
            let chain = place.chain(EtpOptions::default()).unwrap();
            let mut blocks = Vec::new();
            for &layer in checkpoint.moe_layers() {
                let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
                let shard = ShardOptions { rank, ranks: n, pad: chain.options().pad };
                let block = checkpoint.load_shard(layer, options, shard).unwrap();
                let mut params = block.params;
                for (kind, part) in [(ParamKind::Up, &mut params.up), (ParamKind::Down, &mut params.down)] {
                    let dims = kind.dims(&block.config, block.config.router.num_experts).unwrap();
                    let dtype = part.dtype();
                    let own = std::mem::replace(part, Tensor::zeros(&Cpu::new(), dtype, &[0]).unwrap());
                    let spec = WeightSpec::new(kind.name(), layer as u32, &dims, dtype);
                    let id = chain.add(spec, Arc::new(Shard::new(device.host(&own)))).unwrap();
                    *part = device.to_cpu(&chain.whole(id).unwrap());
                }
                blocks.push((layer, gather_blocks(vec![params]).unwrap()));
            }
            if rank == 0 {
                let blocks: Vec<_> = blocks.iter().map(|(layer, params)| params.at_layer(*layer)).collect();
                checkpoint.save(to, &blocks).unwrap();
            }
            blocks.len()
        });
        assert!(saved[0] > 0);
    }
    let file = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(file(first.path()) == file(second.path()));
    let (before, after) = (Checkpoint::open(&source).unwrap(), Checkpoint::open(second.path()).unwrap());
    for name in before.names() {
        let tensor = |c: &Checkpoint| c.tensor(name, None).unwrap().as_bytes().to_vec();
        assert!(tensor(&before) == tensor(&after), "{name}");
    }
}

/// `up` and `down` of a chain.
type Gathered<'a, D> = ([&'a dyn moebius::weights::WeightSource<D>; 2], &'a moebius::etp::Chain<D>);

/// Experts that stay as they are stored, sharded: forward and the gradient of the rows are those of the whole block, to
/// the bit, and a rank keeps its part of the bytes.
fn quantized_weights_stay_so_in_a_chain<D: Chained>(device: &D) {
    use moebius::Tensor as Any;
    use moebius::ep::GroupConfig;
    use moebius::etp::Phase;
    use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, Params, PerParam};
    use moebius::weights::WeightSource;

    for family in ["qwen3_moe_nvfp4_modelopt", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let checkpoint = Checkpoint::open(golden_of(family)).unwrap();
        let number = checkpoint.moe_layers()[0];
        let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(DType::F32) };
        let on_host = checkpoint.load_quantized(number, options).unwrap();
        let (experts, hidden) = (on_host.config.router.num_experts, on_host.config.hidden);
        let mut random = super::random::Random::new(super::devices::seed::seed(7));
        let mut values = || -> Tensor {
            let values: Vec<f32> = (0..6 * hidden).map(|_| random.normal() as f32).collect();
            Any::from_vec(values, &[6, hidden]).unwrap()
        };
        let (x, d_y) = (values(), values());
        // y and the gradient of x; a chain's passes around them.
        let run = |block: &QuantizedBlock<D>, experts_of: Option<Gathered<'_, D>>, device: &D| {
            let (x, d_y) = (device.host(&x), device.host(&d_y));
            let whole: [&dyn WeightSource<D>; 2] = [&block.up, &block.down];
            let ([up, down], chain) = experts_of.map_or((whole, None), |(experts, chain)| (experts, Some(chain)));
            let mut group = device.alone(GroupConfig::new(experts, 6)).unwrap();
            let moe = Layer::new(block.config.clone(), 0).unwrap();
            let others = PerParam::from_fn(|kind| block.get(kind));
            let params = Params { router: block.get(ParamKind::Router).unwrap(), up, down, others };
            let pass = |phase| chain.map_or(Ok(()), |chain| chain.begin(phase)).unwrap();
            let end = || chain.map_or(Ok(()), moebius::etp::Chain::end).unwrap();
            pass(Phase::Forward);
            let mode = Mode { backward: true, noise: None };
            let forward = moe.forward(&mut group, mode, x.view(), &params).unwrap();
            end();
            pass(Phase::Backward);
            let inputs = Inputs { x: x.view(), params: &params };
            let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
            let wanted = GradientMask { experts: false, ..GradientMask::ALL };
            let context = forward.context.unwrap();
            let gradients = moe.backward(&mut group, context, inputs, cotangents, wanted).unwrap();
            end();
            [device.bytes(forward.y.view()), device.bytes(gradients.x.as_ref().unwrap().view())]
        };
        let bytes = [&on_host.up, &on_host.down].map(|weight| weight.bytes());
        for (n, prefetch, from_host) in
            [(1, true, false), (2, true, false), (4, true, false), (4, false, false), (1, true, true), (1, false, true)]
        {
            let n = device.up_to(n);
            ranks(device, n, MINUTE, |rank, place| {
                let device = place.device.clone();
                let block = on_host.to(&device).unwrap();
                let expected = run(&block, None, &device);
                let chain = place.chain(EtpOptions { pad: 1, prefetch, ..EtpOptions::default() }).unwrap();
                let add = |name, weight| match from_host {
                    false => chain.add_quantized(name, 0, block.config.recompute, weight).unwrap(),
                    true => chain.add_quantized_on_host(name, 0, block.config.recompute, weight).unwrap(),
                };
                let [up, down] = [add("up", &block.up), add("down", &block.down)];
                for pass in 0..2 {
                    let [up, down] = [&up, &down].map(|weight| chain.quantized_source(weight).unwrap());
                    let found = run(&block, Some(([&up, &down], &chain)), &device);
                    assert!(found == expected, "{family} over {n}, rank {rank}, pass {pass}");
                }
                let memory = chain.memory();
                // A buffer for each, or one for both; nothing is de-quantized, nothing has a gradient.
                let padding = 2 * (3 * 256 + 256 * n);
                assert!(memory.gathered <= bytes.iter().sum::<usize>() + padding, "{family}: {memory:?}");
                assert_eq!((memory.main, memory.gradients, memory.quantized), (0, 0, 0));
                let (traffic, sum) = (chain.traffic(), bytes.iter().sum::<usize>());
                assert_eq!(traffic.reductions, 0);
                // Each rank sends the N-th part of these.
                let passes = 4 * sum..=4 * (sum + padding);
                assert!(passes.contains(&(traffic.gathered_bytes as usize)), "{family}: {traffic:?}, {bytes:?}");
            });
        }
    }
}
