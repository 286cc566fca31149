//! A chain of small weights with known values, and no layers.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use moebius::comm::ThreadWorld;
use moebius::cpu::Cpu;
use moebius::etp::{Chain, Comms, EtpOptions, Phase, Reduction, Scale, Shard, ShardSource, WeightId, WeightSpec};
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{DType, Result};

use crate::world::Tensor;

/// Sizes of every weight of the rig: 12 rows of two, which two ranks and four pad to 16.
pub const DIMS: [usize; 3] = [3, 4, 2];
pub const COUNT: usize = 24;

/// Whole weight number `i`.
pub fn value(i: usize) -> Vec<f32> {
    (0..COUNT).map(|at| (1000 * (i + 1) + at) as f32).collect()
}

pub fn tensor(values: Vec<f32>) -> Tensor {
    Tensor::from_vec(values, &DIMS).unwrap()
}

/// One rank's chain.
pub struct Rig {
    pub chain: Arc<Chain<Cpu>>,
    pub ids: Vec<WeightId>,
    pub shards: Vec<Arc<Shard<Cpu>>>,
}

impl Rig {
    /// `weights` weights, each a layer of its own, or two a layer with the first recomputed.
    pub fn new(comms: Comms<Cpu>, options: EtpOptions, weights: usize, recompute: bool) -> Result<Self> {
        let chain = Chain::new(Cpu::poisoning(), (), comms, options)?;
        let mut rig = Self { chain: Arc::new(chain), ids: Vec::new(), shards: Vec::new() };
        for i in 0..weights {
            let cut = rig.chain.shards(&DIMS)?;
            let shard = cut.cut(&Cpu::poisoning(), tensor(value(i)).view(), rig.chain.rank())?;
            let shard = Arc::new(Shard::new(shard));
            let layer = if recompute { i / 2 } else { i };
            let mut spec = WeightSpec::new(format!("w{i}"), layer as u32, &DIMS, DType::F32);
            spec.recompute = recompute && i % 2 == 0;
            rig.ids.push(rig.chain.add(spec, Arc::clone(&shard) as Arc<dyn ShardSource<Cpu>>)?);
            rig.shards.push(shard);
        }
        Ok(rig)
    }

    /// Acquires weight `i`, checks its values, and lets go of it.
    pub fn read(&self, i: usize) -> Result<()> {
        let source = self.chain.source(self.ids[i])?;
        let guard = source.acquire(&())?;
        holds(&guard, &value(i));
        Ok(())
    }

    /// A whole pass.
    pub fn pass(&self, phase: Phase, order: &[usize]) -> Result<()> {
        self.chain.begin(phase)?;
        order.iter().try_for_each(|i| self.read(*i))?;
        self.chain.end()
    }

    /// Submits rank · 100 + `what` in every element, as weight `i`'s gradient.
    pub fn gradient(&self, i: usize, what: f32) -> Result<()> {
        let mut room = self.chain.room(self.ids[i])?;
        let values = vec![self.chain.rank() as f32 * 100.0 + what; COUNT];
        room.view_mut()?.into_data().copy_from_slice(bytemuck::cast_slice(&values));
        self.chain.submit(room)
    }

    /// Ends the step, whose gradients must be `expected`, one value for all elements of a weight.
    pub fn finish(&self, expected: &[f32]) -> Result<()> {
        let cut = self.chain.shards(&DIMS)?;
        let (filled, all) = (cut.rows_of(self.chain.rank()).len() * 2, cut.shard_dims()[0] * 2);
        let mut found = Vec::new();
        self.chain.finish(None, |_, gradient| {
            found.push(gradient.as_slice::<f32>()?.to_vec());
            Ok(())
        })?;
        let shard = |value: &f32| [vec![*value; filled], vec![0.0; all - filled]].concat();
        assert_eq!(found, expected.iter().map(shard).collect::<Vec<_>>(), "rank {}", self.chain.rank());
        Ok(())
    }
}

pub fn holds(guard: &WeightGuard<'_, Cpu>, expected: &[f32]) {
    let tensor = guard.tensor().unwrap();
    assert_eq!((tensor.dims(), tensor.as_slice::<f32>().unwrap()), (&DIMS[..], expected));
}

/// Runs `f` on each of `n` ranks with communicators of the chain's; gives what each returned.
pub fn ranks<R: Send>(n: usize, limit: Duration, f: impl Fn(usize, Comms<Cpu>) -> R + Sync) -> Vec<R> {
    let comms = ThreadWorld::create(n, limit).into_iter().zip(ThreadWorld::create(n, limit));
    thread::scope(|scope| {
        let start = |(rank, (gather, reduce))| {
            let f = &f;
            scope.spawn(move || f(rank, Comms { gather: Box::new(gather), reduce: Box::new(reduce) }))
        };
        let threads: Vec<_> = comms.enumerate().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Everything on, padding to 4 N rows.
pub const ON: EtpOptions =
    EtpOptions { pad: 4, prefetch: true, reduction: Reduction::Pairwise, scale: Scale::Sum, replicas: 1 };

pub const MINUTE: Duration = Duration::from_secs(60);
