//! A stack of layers trained over a mesh of rank threads, with whole weights and with a chain of sharded ones.

mod rank;
mod run;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moebius::comm::{Communicator, Op, Tag};
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::etp::{
    Chain, Comms, EtpOptions, Payload, Phase, Reduction, Scale, Shard, ShardSource, Shards, WeightId, WeightSpec,
};
use moebius::layer::{Context, Cotangents, GradientsMut, Inputs, Layer, Mode, Params, PerParam};
use moebius::quant::{
    Codec, Direction, Fp8BlockTensors, Matrix, Mxfp8, Mxfp8Tensors, Nvfp4, Nvfp4Tensors, Quantize, QuantizeFp8Block,
    QuantizeMxfp8,
};
use moebius::weights::WeightSource;
use moebius::{DType, MoeConfig, Result, TensorRef};

use super::random::Random;
use super::test_ranks::{Chained, MINUTE};

use rank::{Rank, Weights};
pub use run::{Run, of_type, through};

/// On the host.
pub type Tensor = moebius::Tensor<Cpu>;
/// On the device under test.
type OnDevice<D> = moebius::Tensor<D>;

/// Results that a rank saw.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Bytes of outputs and gradients of x, per microbatch.
    pub values: Vec<Vec<u8>>,
    /// Bits of whole gradients by step and weight.
    pub gradients: Vec<Vec<u32>>,
    /// Whole weights at the end, bytes.
    pub weights: Vec<Vec<u8>>,
}

/// Communicators of ranks `0..world` to the group that `place` names, at their place in it; their work is in a
/// collective thread of this name.
pub fn mesh<D: Chained>(
    device: &D,
    (world, purpose): (usize, &'static str),
    place: impl Fn(usize) -> (usize, usize),
    timeout: Duration,
) -> Vec<Box<dyn Communicator<D>>> {
    let mut places: Vec<(usize, usize, usize)> = (0..world).map(|w| (place(w).0, place(w).1, w)).collect();
    places.sort_unstable();
    let mut all: Vec<Option<Box<dyn Communicator<D>>>> = (0..world).map(|_| None).collect();
    for group in places.chunk_by(|a, b| a.0 == b.0) {
        let members: Vec<usize> = group.iter().map(|(_, _, w)| *w).collect();
        for (w, comm) in members.iter().zip(device.among(&members, purpose, timeout)) {
            all[*w] = Some(comm);
        }
    }
    all.into_iter().flatten().collect()
}

/// ((0 + 1) + (2 + 3)), written for the three sizes that the tests have.
pub fn tree(values: &[f32]) -> f32 {
    match values {
        [a] => *a,
        [a, b] => a + b,
        [a, b, c, d] => (a + b) + (c + d),
        other => panic!("{} values", other.len()),
    }
}

/// A chain with the first weights of a run.
fn sharded<D: Chained>(device: &D, run: &Run, p: usize, comms: Comms<D>) -> Result<Weights<D>> {
    let options = EtpOptions { replicas: run.replicas(), ..run.options };
    let chain = Chain::new(device.clone(), comms, options)?;
    let (mut ids, mut shards) = (Vec::new(), Vec::new());
    for l in 0..run.layers {
        let add = |which: usize| -> Result<(WeightId, Arc<Shard<D>>)> {
            let whole = run.weight(p, l, which);
            let cut: Shards = chain.shards(whole.dims())?;
            let shard = Arc::new(Shard::new(cut.cut(device, device.host(&whole).view(), chain.rank())?));
            let name = format!("layers.{l}.{}", ["up", "down"][which]);
            let mut spec = WeightSpec::new(name, l as u32, whole.dims(), run.dtype);
            spec.recompute = run.config.recompute && which == 0;
            spec.payload = run.payload;
            Ok((chain.add(spec, Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?, shard))
        };
        let (up, down) = (add(0)?, add(1)?);
        ids.push([up.0, down.0]);
        shards.push([up.1, down.1]);
    }
    Ok(Weights::Sharded { chain: Arc::new(chain), ids, shards })
}

/// Trains on one thread a rank, with whole weights or sharded ones.
pub fn train<D: Chained>(device: &D, run: &Run, shard: bool) -> Vec<Outcome> {
    let (world, ep, n) = (run.world, run.ep, run.etp);
    let experts = mesh(device, (world, ""), |w| (w / ep, w % ep), MINUTE);
    let data = mesh(device, (world, "data"), |w| (w % ep, w / ep), MINUTE);
    // Ranks with the same experts: `etp` in a row make a shard group, those at the same place in them are replicas.
    let in_group = |w: usize| (w / ep / n * ep + w % ep, w / ep % n);
    let gathers = mesh(device, (world, "gather"), in_group, MINUTE);
    let reductions = mesh(device, (world, "reduce"), in_group, MINUTE);
    let replicas = mesh(device, (world, "replicas"), |w| (w % (ep * n), w / (ep * n)), MINUTE);
    let comms = experts.into_iter().zip(data).zip(gathers.into_iter().zip(reductions)).zip(replicas);
    thread::scope(|scope| {
        let threads: Vec<_> = comms
            .enumerate()
            .map(|(w, (((experts, data), (gather, reduce)), replicas))| {
                let device = device.of_rank(w);
                scope.spawn(move || -> Result<Outcome> {
                    let e = run.config.router.num_experts;
                    let most = run.tokens(world);
                    let group = Group::new(device.clone(), experts, run.group(most))?;
                    let weights = match shard {
                        true => sharded(&device, run, w % ep, Comms { gather, reduce })?,
                        false => {
                            let weight = |l, which| device.host(&through(run.payload, &run.weight(w % ep, l, which)));
                            Weights::Whole((0..run.layers).map(|l| [weight(l, 0), weight(l, 1)]).collect())
                        }
                    };
                    let layer = |l| Layer::new(run.config.clone(), l as u32);
                    let layers = (0..run.layers).map(layer).collect::<Result<_>>()?;
                    let router = |l| device.host(&run.tensor([0, l, 0, 0], &[e, run.config.hidden], run.deviation));
                    let routers = (0..run.layers).map(router).collect();
                    Rank { run: run.clone(), w, device, group, layers, routers, weights, data, replicas }.train()
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked").expect("a rank failed")).collect()
    })
}
