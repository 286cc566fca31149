//! AdamW over ranks that are threads: the same bits for every division of the parameters, states that any number of
//! ranks goes on from, and what ranks that disagree are told.

#[path = "../devices/mod.rs"]
mod devices;
#[path = "../common/faulty_comm.rs"]
mod faulty_comm;
mod state;
mod steps;

use std::path::Path;
use std::thread;
use std::time::Duration;

use moebius::comm::Communicator;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::etp::Shards;
use moebius::optim::{AdamW, AdamWOptions, GroupOptions, LossScaling, ParamShard, ParamSpec, StepTensor};
use moebius::{CheckpointError, CommError, DType, Error, Result, Tensor};

use devices::seed;
use faulty_comm::FaultyComm;

const LIMIT: Duration = Duration::from_secs(60);
/// Sizes of the whole experts: 4 experts of 5 rows, so that no cut of 2 or 4 ranks falls on a power of two.
const UP: [usize; 3] = [4, 5, 4100];
/// Many rows, of which no cut is a multiple of four: an order of sums that followed the cut would show.
const DOWN: [usize; 3] = [4, 301, 8];
const ROUTER: [usize; 2] = [4, 37];

fn all_dims() -> [(&'static str, Vec<usize>, DType, usize); 3] {
    [
        ("experts.up", UP.to_vec(), DType::BF16, 0),
        ("router.weight", ROUTER.to_vec(), DType::F32, 1),
        ("experts.down", DOWN.to_vec(), DType::F16, 0),
    ]
}

/// Ranks that share the experts, those that share a shard of them, and copies of it all.
#[derive(Debug, Clone, Copy)]
struct Mesh {
    ep: usize,
    etp: usize,
    replicas: usize,
    pad: usize,
}

impl Mesh {
    fn new(ep: usize, etp: usize) -> Self {
        Self { ep, etp, replicas: 1, pad: 0 }
    }

    fn ranks(self) -> usize {
        self.ep * self.etp * self.replicas
    }

    /// The part of an expert weight that a rank holds, and the rows of its tensor, padding included.
    fn shard(self, dims: &[usize], rank: usize) -> (ParamShard, usize) {
        let (ep, etp) = (rank % self.ep, rank / self.ep % self.etp);
        let local = [&[dims[0] / self.ep], &dims[1..]].concat();
        let shards = Shards::new(&local, self.etp, self.pad).unwrap();
        let shard = ParamShard::of_experts(&local, ep, self.ep).unwrap().shard(&shards, etp).unwrap();
        (shard, shards.shard_dims()[0])
    }
}

fn options(moments: DType) -> (AdamWOptions, [GroupOptions; 2]) {
    let options = AdamWOptions {
        max_norm: Some(0.5),
        loss_scaling: Some(LossScaling { initial: 64.0, interval: 2, ..Default::default() }),
        moments,
        seed: 3,
        ..Default::default()
    };
    let experts = GroupOptions { lr: 0.01, ..Default::default() };
    (options, [experts, GroupOptions { lr: 0.002, weight_decay: 0.0, ..experts }])
}

/// A rank's optimizer and parameters.
struct Rank {
    adam: AdamW<Cpu>,
    params: Vec<Tensor<Cpu>>,
    /// Rows of each tensor.
    rows: Vec<usize>,
    /// Bits of each step's norm.
    norms: Vec<u64>,
}

fn tensor(dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<Cpu> {
    use devices::Target;
    Cpu::new().put(dtype, values, dims)
}

/// The rows of a whole tensor that a part has, and NaN as padding.
fn cut(shard: &ParamShard, rows: usize, whole: &[f64]) -> Vec<f64> {
    let width = shard.width();
    let mut own = whole[shard.rows().start * width..shard.rows().end * width].to_vec();
    own.resize(rows * width, f64::NAN);
    own
}

impl Rank {
    fn new(mesh: Mesh, comm: impl Communicator<Cpu> + 'static, moments: DType) -> Result<Self> {
        let rank = comm.rank();
        let (options, groups) = options(moments);
        let (mut specs, mut params, mut all_rows) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (name, dims, dtype, group)) in all_dims().into_iter().enumerate() {
            let (shard, rows) = match name.starts_with("experts") {
                true => mesh.shard(&dims, rank),
                false => (ParamShard::whole(&dims), dims[0]),
            };
            let whole = seed::normal(70 + i as u64, dims.iter().product());
            params.push(tensor(dtype, &cut(&shard, rows, &whole), &[rows, shard.width()]));
            specs.push(ParamSpec { name: name.into(), shard, dtype, group });
            all_rows.push(rows);
        }
        let comm: Option<Box<dyn Communicator<Cpu>>> = if comm.size() > 1 { Some(Box::new(comm)) } else { None };
        let mut adam = AdamW::new(&Cpu::poisoning(), options, &groups, specs, comm)?;
        for (i, param) in params.iter().enumerate() {
            adam.read_param(i, param.view())?;
        }
        Ok(Self { adam, params, rows: all_rows, norms: Vec::new() })
    }

    fn step(&mut self, step: u64) -> Result<()> {
        let specs = self.adam.specs().to_vec();
        let gradients: Vec<_> = specs
            .iter()
            .zip(&self.rows)
            .enumerate()
            .map(|(i, (spec, rows))| {
                let count: usize = spec.shard.dims().iter().product();
                let mut whole: Vec<f64> =
                    seed::normal(1000 * (step + 1) + i as u64, count).iter().map(|g| 64.0 * g).collect();
                if step == 3 {
                    // In the last expert's last row, on one rank.
                    whole[count - 1] = f64::INFINITY;
                }
                // Squares of f32 fill a number of f64, so that every other order of their sums shows.
                let dtype = if i != 1 { DType::F32 } else { spec.dtype };
                tensor(dtype, &cut(&spec.shard, *rows, &whole), &[*rows, spec.shard.width()])
            })
            .collect();
        self.adam.begin(&gradients.iter().map(|g| Some(g.view())).collect::<Vec<_>>())?;
        let tensors = self.params.iter_mut().zip(&gradients).enumerate();
        let tensors =
            tensors.map(|(index, (param, g))| StepTensor { index, param: param.view_mut(), gradient: g.view() });
        self.adam.update(tensors.collect())?;
        self.norms.push(self.adam.stats()?.norm.to_bits());
        Ok(())
    }

    /// Bytes of each parameter's rows, without padding, with the first one's number, and of the figures of the step.
    fn outcome(&self) -> Outcome {
        let held = self.params.iter().zip(self.adam.specs());
        let held = held.map(|(param, spec)| {
            let bytes = spec.shard.count() * spec.dtype.size();
            (spec.shard.rows().start, param.as_bytes()[..bytes].to_vec())
        });
        let stats = self.adam.stats().unwrap();
        let figures = [stats.norm, stats.factor, stats.loss_scale, stats.steps as f64, stats.skipped as f64];
        (held.collect(), figures.map(f64::to_bits), self.norms.clone())
    }
}

type Outcome = (Vec<(usize, Vec<u8>)>, [u64; 5], Vec<u64>);
/// The same of the whole parameters.
type Whole = (Vec<Vec<u8>>, [u64; 5], Vec<u64>);

fn ranks<R: Send>(count: usize, run: impl Fn(ThreadComm) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let comms = ThreadWorld::create(count, LIMIT);
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let run = &run;
                scope.spawn(move || run(comm))
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// The whole parameters of all ranks; copies must be equal.
fn whole(outcomes: &[Outcome]) -> Whole {
    let params = (0..all_dims().len()).map(|p| {
        let mut parts: Vec<_> =
            outcomes.iter().map(|(held, ..)| held[p].clone()).filter(|(_, b)| !b.is_empty()).collect();
        parts.sort();
        parts.dedup();
        let starts: std::collections::HashSet<_> = parts.iter().map(|(start, _)| *start).collect();
        assert_eq!(starts.len(), parts.len(), "copies differ");
        parts.into_iter().flat_map(|(_, bytes)| bytes).collect()
    });
    assert!(outcomes.iter().all(|other| (other.1, &other.2) == (outcomes[0].1, &outcomes[0].2)), "figures differ");
    (params.collect(), outcomes[0].1, outcomes[0].2.clone())
}

fn train(mesh: Mesh, moments: DType, steps: std::ops::Range<u64>) -> Whole {
    let outcomes = ranks(mesh.ranks(), |comm| {
        let mut rank = Rank::new(mesh, comm, moments).unwrap();
        steps.clone().for_each(|step| rank.step(step).unwrap());
        rank.outcome()
    });
    whole(&outcomes)
}

fn meshes() -> Vec<Mesh> {
    let mut all: Vec<_> = [(1, 2), (1, 4), (2, 1), (4, 1), (2, 2), (1, 3)].map(|(ep, etp)| Mesh::new(ep, etp)).into();
    // 5 rows of an expert do not divide; padding makes them, and leaves a rank without rows.
    all.iter_mut().for_each(|mesh| mesh.pad = if mesh.etp > 1 { 1 } else { 0 });
    all.push(Mesh { pad: 16, ..Mesh::new(1, 4) });
    all.push(Mesh { pad: 16, ..Mesh::new(2, 2) });
    all.push(Mesh { replicas: 2, ..Mesh::new(2, 1) });
    all
}

/// A communicator that a refusal ends, as between processes.
fn ending(comm: ThreadComm) -> FaultyComm<Cpu> {
    FaultyComm { ends_with_failure: true, ..FaultyComm::new(Box::new(comm)) }
}

fn train_and_save(dir: &Path) {
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    rank.step(0).unwrap();
    rank.adam.save(dir).unwrap();
}
