//! candle's sharded modules and dense weights from a checkpoint, and back, at other numbers of ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candle_nn::Init;
use moebius::candle::{
    DeviceGroup, EpGroup, ExpertParallelMoE, LoadAs, NewWeight, Parameters, ShardedIn, ShardedWeights,
};
use moebius::checkpoint::{Checkpoint, LoadOptions, RankBlock, RankModel, RankPart, RankTensor, SaveOptions};
use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Payload};
use moebius::layer::ParamKind;
use moebius::optim::ParamShard;

use super::test_ranks::MINUTE;
use super::world::mesh;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const DENSE: [&str; 3] = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// One of `ep` · `n` ranks.
struct Rank {
    w: usize,
    group: DeviceGroup,
    /// Over the ranks with the same experts.
    experts: Arc<Chain<Cpu>>,
    /// Over all.
    all: Arc<Chain<Cpu>>,
    world: Box<dyn Communicator<Cpu>>,
}

fn ranks<R: Send>(
    [ep, n]: [usize; 2],
    experts: usize,
    run: impl Fn(Rank) -> Result<R, Failure> + Sync,
) -> Vec<Result<R, Failure>> {
    let count = ep * n;
    let groups = mesh(&Cpu::new(), (count, ""), |w| (w / ep, w % ep), MINUTE).into_iter();
    let same = || mesh(&Cpu::new(), (count, ""), |w| (w % ep, w / ep), MINUTE).into_iter();
    let world = || mesh(&Cpu::new(), (count, ""), |w| (0, w), MINUTE).into_iter();
    let comms = groups.zip(same().zip(same())).zip(world().zip(world())).zip(world());
    std::thread::scope(|scope| {
        let threads = comms.enumerate().map(|(w, (((group, same), all), world))| {
            let run = &run;
            scope.spawn(move || {
                let chain = |(gather, reduce)| -> Result<_, Failure> {
                    let comms = Comms { gather, reduce };
                    Ok(Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?))
                };
                let group = EpGroup::new(Group::new(Cpu::new(), group, GroupConfig::new(experts, 64))?).into();
                let (experts, all) = (chain(same)?, chain(all)?);
                run(Rank { w, group, experts, all, world })
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// A model's shards on a rank, read of a checkpoint.
struct Model<'a> {
    layers: Vec<ExpertParallelMoE>,
    weights: ShardedWeights<'a>,
}

impl<'a> Model<'a> {
    fn load(rank: &Rank, source: &'a Checkpoint, dense: bool) -> Result<Self, Failure> {
        let weights = ShardedWeights::from_checkpoint(&rank.all, source, &Device::Cpu, Parameters::Trainable, None)?;
        for name in DENSE.into_iter().filter(|name| source.has(name)) {
            let dims = source.tensor(name, None)?.dims().to_vec();
            let take = |x: &Tensor, _: &[Tensor]| Ok(x.clone());
            let module = weights.function(&[NewWeight::new(name, &dims, Init::Const(0.0))], take)?;
            assert!(format!("{module:?}").contains(name));
        }
        let layer = |layer: &usize| -> Result<_, Failure> {
            let layer_weights = weights.pp(source.block_prefix(*layer)?.trim_end_matches('.'));
            let weights = dense.then_some(&layer_weights);
            let shards = ShardedIn { chain: &rank.experts, payload: Payload::Plain, weights };
            let load = LoadAs::new(Parameters::Trainable);
            Ok(ExpertParallelMoE::from_checkpoint_sharded(source, *layer, &rank.group, shards, load)?)
        };
        let layers = source.moe_layers().iter().map(layer).collect::<Result<_, _>>()?;
        Ok(Self { layers, weights })
    }

    fn parts(&self) -> Result<(Vec<RankBlock<'static>>, Vec<RankTensor<'static>>), Failure> {
        let blocks = self.layers.iter().map(ExpertParallelMoE::to_parts).collect::<Result<_, _>>()?;
        Ok((blocks, self.weights.to_parts()?))
    }
}

/// Several files.
fn in_files() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.max_shard_bytes = 50_000;
    options
}

fn save(rank: &mut Rank, source: &Checkpoint, model: &Model<'_>, to: &Path) -> Result<(), Failure> {
    let (blocks, tensors) = model.parts()?;
    let model = RankModel { blocks: &blocks, tensors: &tensors };
    Ok(source.save_parts(to, model, &Cpu::new(), &mut *rank.world, in_files())?)
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut all: Vec<String> = std::fs::read_dir(dir).unwrap().map(name).collect();
    all.sort();
    all.into_iter().map(|name| (name.clone(), std::fs::read(dir.join(&name)).unwrap())).collect()
}

/// Every form of experts, with biases, shared experts, quantized or not; over EP by ETP, loaded again at another size.
#[test]
fn what_is_saved_at_one_size_is_loaded_at_another() {
    let sizes = [[1, 2], [1, 4], [2, 2], [2, 1], [1, 1]];
    for family in ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3_fp8", "dbrx", "granitemoe", "qwen3_moe_bf16"] {
        let source = Checkpoint::open(fixture(family)).unwrap();
        let experts = source.block_config(source.moe_layers()[0]).unwrap().router.num_experts;
        let expected = tempfile::tempdir().unwrap();
        let whole = LoadOptions { rank: 0, ranks: 1, dtype: None };
        let blocks: Vec<_> =
            source.moe_layers().iter().map(|l| (*l, source.load_block(*l, whole).unwrap().params)).collect();
        let borrowed: Vec<_> = blocks.iter().map(|(layer, params)| params.at_layer(*layer)).collect();
        source.save_with(expected.path(), &borrowed, in_files()).unwrap();
        let expected = files(expected.path());
        let mut from = (None, source);
        for (i, size) in sizes.into_iter().enumerate() {
            let to = tempfile::tempdir().unwrap();
            let saved = ranks(size, experts, |mut rank| {
                let model = Model::load(&rank, &from.1, i % 2 == 0)?;
                let alone = DENSE.into_iter().filter(|name| from.1.has(name)).count();
                assert_eq!(model.weights.shards().len() > alone, i % 2 == 0, "routers");
                save(&mut rank, &from.1, &model, to.path())
            });
            saved.into_iter().for_each(|r| r.unwrap_or_else(|e| panic!("{family} at {size:?}: {e}")));
            let found = files(to.path());
            let names = |files: &[(String, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&found), names(&expected), "{family} at {size:?}");
            for ((name, found), (_, expected)) in found.iter().zip(&expected) {
                assert!(found == expected, "{family} at {size:?}: {name}");
            }
            let opened = Checkpoint::open(to.path()).unwrap();
            from = (Some(to), opened);
        }
        drop(from.0);
    }
}

/// Shards hold what the whole holds, and zeros behind it.
#[test]
fn shards_of_any_tensor_join_to_it() {
    use moebius::checkpoint::ShardOptions;
    use moebius::etp::Shards;

    for family in ["qwen3_moe", "qwen3_moe_bf16", "deepseek_v3_fp8", "gpt_oss"] {
        let source = Checkpoint::open(fixture(family)).unwrap();
        let mut met = 0;
        for name in source.names().map(str::to_string).collect::<Vec<_>>() {
            let Ok(whole) = source.tensor(&name, Some(moebius::DType::F32)) else { continue };
            for (ranks, pad) in [(1, 16), (2, 16), (4, 1), (3, 1)] {
                let lines = Shards::lines(whole.dims());
                let cut = Shards::new(&lines, ranks, pad).unwrap();
                let mut joined = Vec::new();
                for rank in 0..ranks {
                    let shard = ShardOptions { rank, ranks, pad };
                    let shard = source.tensor_shard(&name, Some(moebius::DType::F32), shard).unwrap();
                    assert_eq!(shard.dims(), cut.shard_dims(), "{family}: {name}");
                    joined.extend_from_slice(shard.as_bytes());
                }
                let (found, tail) = joined.split_at(whole.bytes());
                assert!(found == whole.as_bytes(), "{family}: {name} over {ranks}");
                assert!(tail.iter().all(|byte| *byte == 0), "{family}: {name} over {ranks}");
                met += 1;
            }
        }
        assert!(met > 40, "{family}: {met}");
    }
}

/// Parts that do not make a model are an error on every rank, and nothing is written.
#[test]
fn parts_that_do_not_fit_are_refused_on_every_rank() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let parent = tempfile::tempdir().unwrap();
    let to = parent.path().join("model");
    let errors = ranks([1, 2], 8, |mut rank| {
        let model = Model::load(&rank, &source, true)?;
        let (blocks, tensors) = model.parts()?;
        let mut refused = |blocks: &[RankBlock<'_>], tensors: &[RankTensor<'_>]| {
            let model = RankModel { blocks, tensors };
            let saved = source.save_parts(&to, model, &Cpu::new(), &mut *rank.world, SaveOptions::default());
            saved.unwrap_err().to_string()
        };
        let part = |count: usize, first: usize, all: usize| {
            let shard = ParamShard::whole(&[all, 1])
                .shard(&moebius::etp::Shards::new(&[all, 1], all / count, 1).unwrap(), first / count);
            RankPart::new(moebius::DType::F32, shard.unwrap(), move |range| Ok(vec![0; 4 * range.len()]))
        };
        let tensor = |name: &str, dims: &[usize], part| RankTensor { name: name.into(), dims: dims.into(), part };
        let mut errors = Vec::new();
        // Both ranks hold the first half.
        errors.push(refused(&[], &[tensor("model.norm.weight", &[64], part(32, 0, 64))]));
        // One rank has another tensor.
        let own = if rank.w == 0 { &tensors[..] } else { &tensors[1..] };
        errors.push(refused(&blocks, own));
        // One has none of this name, of this size, and one twice.
        let own = |wrong: RankTensor<'static>| if rank.w == 0 { tensors.clone() } else { vec![wrong] };
        errors.push(refused(&[], &own(tensor("model.norm.bias", &[64], part(64, 0, 64)))));
        errors.push(refused(&[], &own(tensor("model.norm.weight", &[32], part(32, 0, 32)))));
        errors.push(refused(&[], &own(tensor("model.norm.weight", &[64], part(32, 0, 32)))));
        let twice = vec![tensors[2].clone(), tensors[2].clone()];
        errors.push(refused(&[], if rank.w == 0 { &twice } else { &tensors }));
        // One has a block without its router.
        let mut without = blocks.clone();
        without[0].params[ParamKind::Router] = None;
        errors.push(refused(if rank.w == 1 { &without } else { &blocks }, &tensors));
        // One cannot read.
        let broken = RankPart::new(moebius::DType::F32, ParamShard::whole(&[64]), |_| {
            Err(moebius::Error::Framework { call: "test", framework: "candle", message: "out of luck".into() })
        });
        errors.push(refused(&[], &[tensor("model.norm.weight", &[64], broken)]));
        // One reads less than it holds, or more.
        for bytes in [4 * 64 - 4, 4 * 64 + 4] {
            let odd = RankPart::new(moebius::DType::F32, ParamShard::whole(&[64]), move |_| Ok(vec![0; bytes]));
            errors.push(refused(&[], &[tensor("model.norm.weight", &[64], odd)]));
        }
        Ok(errors)
    });
    let errors: Vec<Vec<String>> = errors.into_iter().map(|r| r.unwrap()).collect();
    let expected = [
        "none that holds element 32 of 64",
        "the same layers",
        "model.norm.bias",
        "model.norm.weight",
        "64 floating elements",
        "given once",
        "Router",
        "out of luck",
        "256 bytes for elements 0..64, found 252",
        "256 bytes for elements 0..64, found 260",
    ];
    for (i, text) in expected.into_iter().enumerate() {
        assert!(errors.iter().all(|errors| errors[i].contains(text)), "{text}: {} | {}", errors[0][i], errors[1][i]);
    }
    assert!(!to.exists());
}
