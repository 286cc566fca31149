//! Modules of shards from checkpoints over ranks on the CPU and over several GPUs: whole models that are saved and loaded
//! at another number of ranks, and experts that stay quantized.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Init;
use moebius::candle::{
    CandleDevice, DeviceGroup, ExpertParallelMoE, LoadAs, NewWeight, Parameters, ShardedIn, ShardedWeights, WeightVar,
};
use moebius::checkpoint::{Checkpoint, LoadOptions, RankModel, SaveOptions};
use moebius::comm::{Communicator, Solo};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::GroupConfig;
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase};
use moebius::layer::ParamKind;

use crate::goldens::golden_of;
#[cfg(feature = "nccl")]
use crate::gpus::{RankComms, on_ranks_with_comms};
use crate::support::{AnyResult, flat, normal};

/// A case's name, and its test over so many ranks.
type Case = (&'static str, fn(usize) -> AnyResult<()>);

pub fn cases() -> [Case; 2] {
    [
        ("what_some_ranks_save_others_load", what_some_ranks_save_others_load::<Cpu>),
        ("quantized_shards_are_the_module_as_stored", quantized_shards_are_the_module_as_stored::<Cpu>),
    ]
}

/// The same on so many GPUs.
#[cfg(feature = "nccl")]
pub fn gpus_cases() -> [Case; 2] {
    use moebius::cuda::Cuda;
    [
        ("what_some_ranks_save_others_load", what_some_ranks_save_others_load::<Cuda>),
        ("quantized_shards_are_the_module_as_stored", quantized_shards_are_the_module_as_stored::<Cuda>),
    ]
}

const DENSE: [&str; 3] = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"];
const TOKENS: usize = 7;

type Comm<D> = Box<dyn Communicator<D>>;

/// A rank that has all experts, sharded with the others.
struct Place<'a, D: CandleDevice> {
    rank: usize,
    core: D,
    device: &'a Device,
    chain: Arc<Chain<D>>,
    world: Comm<D>,
}

/// A device whose ranks share weights.
trait Ranked: CandleDevice {
    /// Runs a closure on each rank.
    fn on_ranks(ranks: usize, run: impl Fn(Place<'_, Self>) -> AnyResult<()> + Sync) -> AnyResult<()>;

    /// A communicator of a rank alone, beside the computation.
    fn solo(&self) -> AnyResult<Comm<Self>>;
}

impl Ranked for Cpu {
    fn on_ranks(ranks: usize, run: impl Fn(Place<'_, Self>) -> AnyResult<()> + Sync) -> AnyResult<()> {
        let comms = || ThreadWorld::create(ranks, Duration::from_secs(60)).into_iter();
        std::thread::scope(|scope| {
            let threads = comms().zip(comms()).zip(comms()).enumerate().map(|(rank, ((gather, reduce), world))| {
                let run = &run;
                let comms = [gather, reduce, world].map(|comm| Box::new(comm) as Comm<Cpu>);
                scope.spawn(move || run(Place::new((rank, &Device::Cpu), &Cpu::poisoning(), comms)?))
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("a rank panicked"))
        })
    }

    fn solo(&self) -> AnyResult<Comm<Self>> {
        Ok(Box::new(Solo::new(*self)))
    }
}

#[cfg(feature = "nccl")]
impl Ranked for moebius::cuda::Cuda {
    fn on_ranks(ranks: usize, run: impl Fn(Place<'_, Self>) -> AnyResult<()> + Sync) -> AnyResult<()> {
        on_ranks_with_comms(ranks, &GroupConfig::new(ranks, 64), |of_ranks, beside| {
            let RankComms { cuda, comms: [gather, reduce], world } = beside;
            let comms = [gather, reduce, world].map(|comm| Box::new(comm) as Comm<Self>);
            run(Place::new((of_ranks.rank(), of_ranks.device()), &cuda, comms)?)
        })?;
        Ok(())
    }

    fn solo(&self) -> AnyResult<Comm<Self>> {
        Ok(Box::new(Solo::new(self.with_new_stream()?)))
    }
}

impl<'a, D: Ranked> Place<'a, D> {
    fn new((rank, device): (usize, &'a Device), core: &D, [gather, reduce, world]: [Comm<D>; 3]) -> AnyResult<Self> {
        let chain = Arc::new(Chain::new(core.clone(), Comms { gather, reduce }, EtpOptions::default())?);
        Ok(Self { rank, core: core.clone(), device, chain, world })
    }

    /// The same without the others.
    fn alone(&self) -> AnyResult<Self> {
        let comms = [self.core.solo()?, self.core.solo()?, self.core.solo()?];
        Self::new((self.rank, self.device), &self.core, comms)
    }

    fn group(&self, source: &Checkpoint) -> AnyResult<DeviceGroup> {
        let experts = source.block_config(source.moe_layers()[0])?.router.num_experts;
        Ok(DeviceGroup::single(GroupConfig::new(experts, 64), self.device)?)
    }
}

/// y and the gradients of x and the router, in the passes of a chain if there is one.
fn pass<D: Ranked>(moe: &ExpertParallelMoE, x: &Var, chain: Option<&Chain<D>>) -> AnyResult<[Vec<f32>; 3]> {
    let begin = |phase| chain.map_or(Ok(()), |chain| chain.begin(phase));
    let end = || chain.map_or(Ok(()), Chain::end);
    begin(Phase::Forward)?;
    let y = moe.forward_full(x, None)?.y;
    end()?;
    let loss = y.to_dtype(DType::F32)?.sqr()?.sum_all()?;
    begin(Phase::Backward)?;
    let found = loss.backward()?;
    end()?;
    // Of shards the chain has it.
    let router = moe.param(ParamKind::Router).and_then(|router| found.get(router)).map(flat).transpose()?;
    Ok([flat(&y)?, flat(found.get(x).ok_or("no gradient of x")?)?, router.unwrap_or_default()])
}

/// Several files.
fn in_files() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.max_shard_bytes = 50_000;
    options
}

fn files(dir: &Path) -> AnyResult<Vec<(String, Vec<u8>)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        all.push((entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path())?));
    }
    all.sort();
    Ok(all)
}

/// Loads all of a model as shards, runs a layer beside the whole one, and saves what it has loaded.
fn load_and_save<D: Ranked>(place: &mut Place<'_, D>, source: &Checkpoint, to: &Path) -> AnyResult<()> {
    let group = place.group(source)?;
    let weights = ShardedWeights::from_checkpoint(&place.chain, source, place.device, Parameters::Trainable, None)?;
    for name in DENSE.into_iter().filter(|name| source.has(name)) {
        let dims = source.tensor(name, None)?.dims().to_vec();
        weights.function(&[NewWeight::new(name, &dims, Init::Const(0.0))], |x: &Tensor, _: &[Tensor]| Ok(x.clone()))?;
    }
    let mut layers = Vec::new();
    for &layer in source.moe_layers() {
        let of_layer = weights.pp(source.block_prefix(layer)?.trim_end_matches('.'));
        let shards = ShardedIn { chain: &place.chain, payload: Payload::Plain, weights: Some(&of_layer) };
        let load = LoadAs::new(Parameters::Trainable);
        layers.push(ExpertParallelMoE::from_checkpoint_sharded(source, layer, &group, shards, load)?);
    }
    let (blocks, tensors) =
        (layers.iter().map(ExpertParallelMoE::to_parts).collect::<Result<Vec<_>, _>>()?, weights.to_parts()?);
    let model = RankModel { blocks: &blocks, tensors: &tensors };
    source.save_parts(to, model, &place.core, &mut *place.world, in_files())?;
    // Each layer in passes of its own.
    let whole = |layer| ExpertParallelMoE::from_checkpoint(source, layer, &group, LoadAs::new(Parameters::Trainable));
    let hidden = source.block_config(source.moe_layers()[0])?.hidden;
    for (number, (&layer, moe)) in source.moe_layers().iter().zip(&layers).enumerate() {
        let whole = whole(layer)?;
        let dtype = whole.param(ParamKind::Up).ok_or("up")?.dtype();
        let x = Var::from_tensor(&normal(800 + number as u64, (TOKENS, hidden), dtype, place.device)?)?;
        place.chain.reset_order()?;
        let [y, d_x, _] = pass(moe, &x, Some(&place.chain))?;
        let [expected, d_x_expected, _] = pass::<D>(&whole, &x, None)?;
        assert_eq!(y, expected, "y of layer {layer}");
        assert_eq!(d_x, d_x_expected, "gradient of x of layer {layer}");
    }
    // Every weight's gradient has arrived, and is a shard's.
    let shards: Vec<WeightVar> = layers.iter().flat_map(ExpertParallelMoE::shards).chain(weights.shards()).collect();
    let mut sums = candle_core::backprop::GradStore::default();
    let as_summed = moebius::candle::GradientType::AsSummed;
    moebius::candle::finish_sharded(&place.chain, None, &shards, &mut sums, as_summed)?;
    let found = shards.iter().filter(|shard| sums.get(&shard.var).is_some()).count();
    assert!(found >= 3 * layers.len(), "{found} of {} shards have gradients", shards.len());
    Ok(())
}

fn what_some_ranks_save_others_load<D: Ranked>(ranks: usize) -> AnyResult<()> {
    for family in ["qwen3_moe", "qwen2_moe", "gpt_oss", "qwen3_moe_bf16"] {
        let source = Checkpoint::open(golden_of(family))?;
        let expected = tempfile::tempdir()?;
        let whole = LoadOptions { rank: 0, ranks: 1, dtype: None };
        let mut blocks = Vec::new();
        for &layer in source.moe_layers() {
            blocks.push((layer, source.load_block(layer, whole)?.params));
        }
        let borrowed: Vec<_> = blocks.iter().map(|(layer, params)| params.at_layer(*layer)).collect();
        source.save_with(expected.path(), &borrowed, in_files())?;
        let expected = files(expected.path())?;
        let [of_ranks, of_one] = [tempfile::tempdir()?, tempfile::tempdir()?];
        D::on_ranks(ranks, |mut place| {
            load_and_save(&mut place, &source, of_ranks.path())?;
            // The first rank has written it, and loads it alone.
            if place.rank == 0 {
                let saved = Checkpoint::open(of_ranks.path())?;
                load_and_save(&mut place.alone()?, &saved, of_one.path())?;
            }
            Ok(())
        })?;
        for saved in [&of_ranks, &of_one] {
            let found = files(saved.path())?;
            assert_eq!(found.len(), expected.len(), "{family}");
            for ((name, found), (expected_name, expected)) in found.iter().zip(&expected) {
                assert!(name == expected_name && found == expected, "{family} over {ranks}: {name}");
            }
        }
    }
    Ok(())
}

/// Frozen experts in a chain have the bits of the module that holds them whole, and a rank its part of them.
fn quantized_shards_are_the_module_as_stored<D: Ranked>(ranks: usize) -> AnyResult<()> {
    for family in ["qwen3_moe_nvfp4_modelopt", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let source = Checkpoint::open(golden_of(family))?;
        let layer = source.moe_layers()[0];
        let hidden = source.block_config(layer)?.hidden;
        D::on_ranks(ranks, |place| {
            let group = place.group(&source)?;
            for dtype in [DType::BF16, DType::F32] {
                // A chain takes weights before it has an order.
                place.chain.reset_order()?;
                let load = || LoadAs::new(Parameters::Trainable).dtype(dtype).quantized();
                let whole = ExpertParallelMoE::from_checkpoint(&source, layer, &group, load())?;
                let shards = ShardedIn { chain: &place.chain, payload: Payload::Plain, weights: None };
                let moe = ExpertParallelMoE::from_checkpoint_sharded(&source, layer, &group, shards, load())?;
                let x = Var::from_tensor(&normal(820, (TOKENS, hidden), dtype, place.device)?)?;
                let expected = pass::<D>(&whole, &x, None)?;
                for step in 0..2 {
                    let found = pass(&moe, &x, Some(&place.chain))?;
                    assert!(!found[2].is_empty() && found == expected, "{family} {dtype:?}, step {step}");
                }
                let memory = place.chain.memory();
                assert_eq!((memory.main, memory.gradients, place.chain.traffic().reductions), (0, 0, 0));
            }
            Ok(())
        })?;
    }
    Ok(())
}
