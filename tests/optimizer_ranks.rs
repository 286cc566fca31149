//! AdamW over ranks that are threads: the same bits for every division of the parameters, states that any number of
//! ranks goes on from, and what ranks that disagree are told.

mod devices;
#[path = "common/faulty_comm.rs"]
mod faulty_comm;

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

#[test]
fn the_bits_are_those_of_one_rank() {
    for moments in [DType::F32, DType::BF16] {
        let alone = train(Mesh::new(1, 1), moments, 0..6);
        let skipped = f64::from_bits(alone.1[4]);
        assert_eq!((f64::from_bits(alone.1[3]), skipped), (5.0, 1.0), "one step has an inf");
        for mesh in meshes() {
            assert!(train(mesh, moments, 0..6) == alone, "{mesh:?}, moments in {moments}");
        }
    }
}

/// Trains, saves, and goes on at another division.
fn saved(from: Mesh, to: Mesh, moments: DType, dir: &Path) -> Whole {
    let before = ranks(from.ranks(), |comm| {
        let mut rank = Rank::new(from, comm, moments).unwrap();
        (0..4).for_each(|step| rank.step(step).unwrap());
        rank.adam.save(dir).unwrap();
        rank.outcome()
    });
    let (values, ..) = whole(&before);
    let outcomes = ranks(to.ranks(), |comm| {
        let mut rank = Rank::new(to, comm, moments).unwrap();
        // The F32 parameter is loaded with the model.
        let router = rank.params[1].as_bytes_mut();
        router.copy_from_slice(&values[1]);
        assert_eq!(rank.adam.load(dir).unwrap(), 3, "one step was skipped");
        for (i, param) in rank.params.iter_mut().enumerate() {
            rank.adam.write_param(i, param.view_mut()).unwrap();
        }
        (4..6).for_each(|step| rank.step(step).unwrap());
        rank.outcome()
    });
    whole(&outcomes)
}

#[test]
fn a_state_goes_on_at_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for moments in [DType::F32, DType::BF16] {
        let uninterrupted = train(Mesh::new(1, 1), moments, 0..6);
        let [one, ep, etp] = [Mesh::new(1, 1), Mesh::new(2, 2), Mesh { pad: 16, ..Mesh::new(1, 4) }];
        let ep = Mesh { pad: 1, ..ep };
        for (from, to) in [(one, one), (one, ep), (ep, etp), (etp, one)] {
            let found = saved(from, to, moments, dir.path());
            let last = &uninterrupted.2[4..];
            let same = (&found.0, found.1, &found.2[..]) == (&uninterrupted.0, uninterrupted.1, last);
            assert!(same, "{from:?} to {to:?}, moments in {moments}");
        }
    }
}

#[test]
fn moments_are_widened_but_not_narrowed() {
    let dir = tempfile::tempdir().unwrap();
    let one = Mesh::new(1, 1);
    let alone = |moments| Rank::new(one, ThreadWorld::create(1, LIMIT).remove(0), moments).unwrap();
    let mut narrow = alone(DType::BF16);
    narrow.step(0).unwrap();
    narrow.adam.save(dir.path()).unwrap();
    assert_eq!(alone(DType::F32).adam.load(dir.path()).unwrap(), 1);
    let mut wide = alone(DType::F32);
    wide.step(0).unwrap();
    wide.adam.save(dir.path()).unwrap();
    let error = alone(DType::BF16).adam.load(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::Checkpoint(CheckpointError::Tensor { .. })), "{error}");
}

/// The error of each rank where one of two meets one of its own.
fn told(results: Vec<Result<()>>, own: &str) {
    let [peer, failing] = <[_; 2]>::try_from(results).unwrap();
    let failing = failing.unwrap_err().to_string();
    assert!(failing.contains(own), "{failing}");
    match peer {
        Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) => assert!(reason.contains(own), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_fails_tells_the_others() {
    let mesh = Mesh::new(2, 1);
    told(
        ranks(2, |comm| {
            let fails = comm.rank() == 1;
            let mut rank = Rank::new(mesh, comm, DType::F32)?;
            let short = tensor(DType::F32, &[1.0], &[1]);
            let whole: Vec<_> =
                rank.params.iter().map(|p| tensor(p.dtype(), &vec![0.0; p.view().count()], p.dims())).collect();
            let mut gradients: Vec<_> = whole.iter().map(|g| Some(g.view())).collect();
            if fails {
                gradients[1] = Some(short.view());
            }
            rank.adam.begin(&gradients)
        }),
        "gradient router.weight",
    );
    told(
        ranks(2, |comm| {
            let lr = if comm.rank() == 1 { f64::NAN } else { 0.1 };
            let group = GroupOptions { lr, ..Default::default() };
            AdamW::new(&Cpu::new(), AdamWOptions::default(), &[group], vec![], Some(Box::new(comm))).map(drop)
        }),
        "lr",
    );
    let dir = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    told(
        ranks(2, |comm| {
            let from = if comm.rank() == 1 { empty.path() } else { dir.path() };
            let mut rank = Rank::new(mesh, ending(comm), DType::F32)?;
            let refused = rank.adam.load(from).map(drop);
            // The communicator works on.
            rank.adam.load(dir.path())?;
            refused
        }),
        "config.json",
    );
}

/// A communicator that a refusal ends, as between processes.
fn ending(comm: ThreadComm) -> FaultyComm<Cpu> {
    FaultyComm { ends_with_failure: true, ..FaultyComm::new(Box::new(comm)) }
}

/// The first rank alone writes; where it cannot, no rank has saved, and what was there stays.
#[test]
fn a_save_that_fails_fails_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    std::fs::write(&config, "{\"model_type\": \"qwen3_moe\"}").unwrap();
    let results = ranks(2, |comm| {
        let mut rank = Rank::new(Mesh::new(2, 1), ending(comm), DType::F32)?;
        let refused = rank.adam.save(dir.path());
        // The communicator works on.
        let other = tempfile::tempdir().unwrap();
        rank.adam.save(other.path())?;
        refused
    });
    let [own, told] = <[_; 2]>::try_from(results).unwrap();
    assert!(own.as_ref().is_err_and(|e| e.to_string().contains("qwen3_moe")), "{own:?}");
    assert!(matches!(&told, Err(Error::Comm(CommError::Refused { peer: 0, .. }))), "{told:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(std::fs::read_to_string(config).unwrap().contains("qwen3_moe"));
}

fn train_and_save(dir: &Path) {
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    rank.step(0).unwrap();
    rank.adam.save(dir).unwrap();
}

#[test]
fn ranks_that_differ_are_refused() {
    let make = |comm: ThreadComm, options: AdamWOptions, specs: Vec<ParamSpec>| {
        AdamW::new(&Cpu::new(), options, &[options.group], specs, Some(Box::new(comm))).map(drop)
    };
    let spec = |name: &str, shard| ParamSpec { name: name.into(), shard, dtype: DType::F32, group: 0 };
    // Each rank names the field with its own value and the other rank's.
    let mismatch = |results: Vec<Result<()>>, wanted: &str, values: [&str; 2]| {
        for (own, result) in results.into_iter().enumerate() {
            match &result {
                Err(Error::ConfigMismatch { call: "AdamW", field, rank, value, peer, peer_value }) => {
                    assert_eq!((field.as_str(), *rank, *peer), (wanted, own, 1 - own), "{result:?}");
                    assert_eq!([value.as_str(), peer_value], [values[own], values[1 - own]], "{wanted}");
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let usual = AdamWOptions { max_norm: Some(1.5), ..Default::default() };
    let scaled = |scaling: LossScaling| AdamWOptions { loss_scaling: Some(scaling), ..usual };
    let scaling = LossScaling::default();
    let cases = [
        (AdamWOptions { max_norm: Some(2.0), ..usual }, "max_norm", ["1.5", "2"]),
        (AdamWOptions { max_norm: None, ..usual }, "max_norm", ["1.5", "none"]),
        (AdamWOptions { moments: DType::BF16, ..usual }, "moments", ["f32", "bf16"]),
        (AdamWOptions { seed: 9, ..usual }, "seed", ["0", "9"]),
        (scaled(scaling), "loss_scaling.initial", ["none", "65536"]),
    ];
    for (other, field, values) in cases {
        let results = ranks(2, |comm| {
            let options = if comm.rank() == 1 { other } else { usual };
            make(comm, options, vec![])
        });
        mismatch(results, &format!("optimizer.{field}"), values);
    }
    let results = ranks(2, |comm| {
        let interval = scaling.interval + comm.rank() as u32;
        make(comm, scaled(LossScaling { interval, ..scaling }), vec![])
    });
    mismatch(results, "optimizer.loss_scaling.interval", ["2000", "2001"]);
    let counts = ranks(2, |comm| {
        let specs = (0..comm.rank()).map(|i| spec(&i.to_string(), ParamShard::whole(&[2]))).collect();
        make(comm, usual, specs)
    });
    mismatch(counts, "optimizer.parameters", ["0", "1"]);
    let groups = ranks(2, |comm| {
        let groups = vec![usual.group; 1 + comm.rank()];
        AdamW::new(&Cpu::new(), usual, &groups, vec![], Some(Box::new(comm))).map(drop)
    });
    mismatch(groups, "optimizer.groups", ["1", "2"]);
    type OfGroup = fn(&mut GroupOptions);
    let of_groups: [(OfGroup, &str, [&str; 2]); 5] = [
        (|group| group.lr = 0.5, "lr", ["0.001", "0.5"]),
        (|group| group.betas[0] = 0.5, "betas[0]", ["0.9", "0.5"]),
        (|group| group.betas[1] = 0.5, "betas[1]", ["0.999", "0.5"]),
        (|group| group.eps = 0.5, "eps", ["0.00000001", "0.5"]),
        (|group| group.weight_decay = 0.5, "weight_decay", ["0.01", "0.5"]),
    ];
    for (change, option, values) in of_groups {
        let results = ranks(2, |comm| {
            let mut groups = [usual.group; 2];
            if comm.rank() == 1 {
                change(&mut groups[1]);
            }
            AdamW::new(&Cpu::new(), usual, &groups, vec![], Some(Box::new(comm))).map(drop)
        });
        mismatch(results, &format!("optimizer.group.{option}"), values);
    }
    let long = "é".repeat(200);
    type Change = fn(&mut ParamSpec);
    let parts: [(Change, &str, [&str; 2]); 5] = [
        (|spec| spec.name = "p1".into(), "name", ["p0", "p1"]),
        (|spec| spec.name = "é".repeat(200), "name", ["p0", &long]),
        (|spec| spec.shard = ParamShard::whole(&[3, 2]), "dims of p0", ["[2, 3]", "[3, 2]"]),
        (|spec| spec.dtype = DType::F16, "dtype of p0", ["f32", "f16"]),
        (|spec| spec.group = 1, "group of p0", ["0", "1"]),
    ];
    for (change, part, values) in parts {
        let results = ranks(2, |comm| {
            let mut other = spec("p0", ParamShard::whole(&[2, 3]));
            if comm.rank() == 1 {
                change(&mut other);
            }
            let specs = vec![spec("first", ParamShard::whole(&[2])), other];
            AdamW::new(&Cpu::new(), usual, &[usual.group; 2], specs, Some(Box::new(comm))).map(drop)
        });
        if values[1].len() <= 256 {
            mismatch(results, &format!("optimizer.parameters[1].{part}"), values);
            continue;
        }
        // What travels of a name has an end.
        let cut = "é".repeat(128);
        let found = results.into_iter().map(|result| match result {
            Err(Error::ConfigMismatch { value, peer_value, .. }) => [value, peer_value],
            other => panic!("{other:?}"),
        });
        assert_eq!(found.collect::<Vec<_>>(), [["p0", &cut], [values[1], "p0"]]);
    }
    // Nothing differs where there is nothing.
    assert!(ranks(2, |comm| make(comm, usual, vec![])).iter().all(Result::is_ok));
    // Both hold the first half.
    let holes = ranks(2, |comm| {
        let shards = Shards::new(&[4, 3], 2, 0).unwrap();
        make(comm, usual, vec![spec("cut", ParamShard::whole(&[4, 3]).shard(&shards, 0).unwrap())])
    });
    for result in holes {
        assert!(matches!(&result, Err(Error::Invalid { name, .. }) if name == "parameter cut"), "{result:?}");
    }
}

/// The loss's factor of a state is that of whoever goes on with one, and nobody else's.
#[test]
fn the_losss_factor_follows_the_options() {
    let scaling = |initial, max| Some(LossScaling { initial, max, ..LossScaling::default() });
    let cases = [
        // Saved under, loaded under, steps with inf in between that halve the factor; the factor then.
        (scaling(1024.0, 65536.0), None, 1, 1.0),
        (None, scaling(1024.0, 65536.0), 0, 1024.0),
        (scaling(1024.0, 65536.0), scaling(8.0, 65536.0), 1, 512.0),
        (scaling(1024.0, 65536.0), scaling(8.0, 256.0), 1, 256.0),
        (None, None, 0, 1.0),
    ];
    for (before, after, skipped, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let make = |loss_scaling| {
            let options = AdamWOptions { loss_scaling, ..Default::default() };
            let spec = ParamSpec { name: "w".into(), shard: ParamShard::whole(&[1, 1]), dtype: DType::F32, group: 0 };
            AdamW::new(&Cpu::new(), options, &[options.group], vec![spec], None).unwrap()
        };
        let mut adam = make(before);
        let inf = tensor(DType::F32, &[f64::INFINITY], &[1, 1]);
        for _ in 0..skipped {
            adam.begin(&[Some(inf.view())]).unwrap();
        }
        adam.save(dir.path()).unwrap();
        let mut adam = make(after);
        adam.load(dir.path()).unwrap();
        assert_eq!(adam.stats().unwrap().loss_scale, expected, "{before:?} to {after:?}");
        // Gradients of a loss that is scaled so have the norm of the loss itself.
        let mut param = tensor(DType::F32, &[0.0], &[1, 1]);
        adam.read_param(0, param.view()).unwrap();
        let gradient = tensor(DType::F32, &[3.0 * expected], &[1, 1]);
        adam.begin(&[Some(gradient.view())]).unwrap();
        adam.update(vec![StepTensor { index: 0, param: param.view_mut(), gradient: gradient.view() }]).unwrap();
        if after.is_some() {
            assert_eq!(adam.stats().unwrap().norm, 3.0);
        }
    }
}

/// A state is of a step, and so is a model.
#[test]
fn the_state_of_another_step_is_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let results = ranks(2, |comm| {
        let own = comm.rank();
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        rank.step(0)?;
        let before = rank.outcome();
        let refused = rank.adam.load_at(dir.path(), 2 + own as u64).map(drop);
        assert!(rank.outcome() == before, "nothing has changed");
        assert_eq!(rank.adam.load_at(dir.path(), 1)?, 1);
        refused
    });
    for result in results {
        match result {
            Err(Error::Checkpoint(CheckpointError::Config { field, found, .. })) => {
                assert_eq!((field.as_str(), found.as_str()), ("steps", "1"));
            }
            Err(Error::Comm(CommError::Refused { reason, .. })) => assert!(reason.contains("steps"), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
}

/// A rank that does not come to a step tells the others, and all go on with the next.
#[test]
fn a_refused_step_is_told() {
    let results = ranks(2, |comm| {
        let refuses = comm.rank() == 1;
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        let first = match refuses {
            true => {
                let message = "backward failed".to_string();
                let reason = Error::Framework { call: "backward", framework: "a test", message };
                rank.adam.refuse(&reason);
                Err(reason)
            }
            false => rank.step(0),
        };
        rank.step(1)?;
        first
    });
    told(results, "backward");
}

#[test]
fn states_of_other_parameters_and_folders_of_models_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let spec = |name: &str, dims: &[usize], dtype| ParamSpec {
        name: name.into(),
        shard: ParamShard::whole(dims),
        dtype,
        group: 0,
    };
    let load = |specs: Vec<ParamSpec>| {
        let options = AdamWOptions::default();
        AdamW::new(&Cpu::new(), options, &[options.group], specs, None).unwrap().load(dir.path()).unwrap_err()
    };
    let same =
        || -> Vec<ParamSpec> { all_dims().iter().map(|(name, dims, dtype, _)| spec(name, dims, *dtype)).collect() };
    let mut fewer = same();
    fewer.pop();
    assert!(matches!(load(fewer), Error::Checkpoint(CheckpointError::Unexpected { .. })));
    let mut renamed = same();
    renamed[0].name = "other".into();
    assert!(matches!(load(renamed), Error::Checkpoint(CheckpointError::Missing { .. })));
    let mut reshaped = same();
    reshaped[1] = spec("router.weight", &[37, 4], DType::F32);
    assert!(matches!(load(reshaped), Error::Checkpoint(CheckpointError::Tensor { .. })));

    let model = tempfile::tempdir().unwrap();
    std::fs::write(model.path().join("config.json"), "{\"model_type\": \"qwen3_moe\"}").unwrap();
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    let error = rank.adam.save(model.path()).unwrap_err().to_string();
    assert!(error.contains("model_type") && error.contains("qwen3_moe"), "{error}");
    let kept = std::fs::read_to_string(model.path().join("config.json")).unwrap();
    assert!(kept.contains("qwen3_moe"));
    let error = rank.adam.load(model.path()).unwrap_err().to_string();
    assert!(error.contains("model_type"), "{error}");
}

/// Every file of a folder, through links.
fn contents(dir: &Path) -> Vec<(String, String)> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut all: Vec<_> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read_to_string(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

/// Refused as a target, with what is in it as it was.
fn refused_target(dir: &Path, words: &[&str]) {
    let before = contents(dir);
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    let error = rank.adam.save(dir).unwrap_err();
    assert!(matches!(&error, Error::Checkpoint(CheckpointError::Config { .. })), "{error}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
    assert_eq!(contents(dir), before);
}

/// A snapshot of a model in a cache whose files are links into a folder of blobs.
#[cfg(unix)]
#[test]
fn a_snapshot_of_links_is_no_target() {
    let cache = tempfile::tempdir().unwrap();
    let [blobs, snapshot] = ["blobs", "snapshot"].map(|name| cache.path().join(name));
    [&blobs, &snapshot].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let files = [("config.json", "{\"model_type\": \"qwen3_moe\"}"), ("model.safetensors", "weights")];
    for (name, text) in files {
        std::fs::write(blobs.join(name), text).unwrap();
        std::os::unix::fs::symlink(blobs.join(name), snapshot.join(name)).unwrap();
    }
    refused_target(&snapshot, &["model_type", "qwen3_moe", "moebius_adamw"]);
    assert!(snapshot.join("config.json").is_symlink());
    // A link to nothing says nothing of what is there.
    std::fs::remove_file(blobs.join("config.json")).unwrap();
    let mut rank = Rank::new(Mesh::new(1, 1), ThreadWorld::create(1, LIMIT).remove(0), DType::F32).unwrap();
    assert!(rank.adam.save(&snapshot).is_err());
    assert!(snapshot.join("config.json").is_symlink());
    assert_eq!(std::fs::read_to_string(snapshot.join("model.safetensors")).unwrap(), "weights");
}

/// Weights alone are a checkpoint too: an index's shards would go with it.
#[test]
fn weights_without_a_config_are_no_target() {
    let index = "{\"weight_map\": {\"a\": \"model-00001-of-00002.safetensors\"}}";
    let folders = [
        vec![("model.safetensors", "weights")],
        vec![("model.safetensors.index.json", index), ("model-00001-of-00002.safetensors", "weights")],
        vec![("hf_quant_config.json", "{}")],
    ];
    for files in folders {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in &files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        refused_target(dir.path(), &[files[0].0, "without config.json", "moebius_adamw"]);
    }
    // Other files do not stand in the way.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("README.md"), "mine").unwrap();
    train_and_save(dir.path());
    train_and_save(dir.path());
    assert_eq!(std::fs::read_to_string(dir.path().join("README.md")).unwrap(), "mine");
}

/// A state says whose it is, where the optimizer that saved it did: one of another model with the same parameters is
/// refused on every rank, before anything has changed.
#[test]
fn the_state_of_another_model_is_refused_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    train_and_save(dir.path());
    let refused = |identity: &'static str, dir: &Path| {
        let results = ranks(2, |comm| {
            let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
            rank.adam.set_identity(identity);
            rank.step(0)?;
            let before = rank.outcome();
            let refused = rank.adam.load(dir).map(drop);
            assert!(refused.is_ok() || rank.outcome() == before, "nothing has changed");
            refused
        });
        let text = |result: Result<()>| match result {
            Err(Error::Checkpoint(CheckpointError::Config { field, expected, found, .. })) => {
                assert_eq!(field, "identity");
                format!("{expected}: {found}")
            }
            other => format!("{other:?}"),
        };
        results.into_iter().map(text).collect::<Vec<_>>()
    };
    // One that does not say whose it is.
    assert_eq!(refused("one", dir.path()), ["\"one\", the optimizer's: none"; 2]);
    let saved = ranks(2, |comm| {
        let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
        rank.adam.set_identity("one");
        assert_eq!(rank.adam.identity(), Some("one"));
        rank.step(0)?;
        rank.adam.save(dir.path())
    });
    saved.into_iter().for_each(|saved| saved.unwrap());
    assert_eq!(refused("another", dir.path()), ["\"another\", the optimizer's: \"one\""; 2]);
    assert_eq!(refused("one", dir.path()), ["Ok(())"; 2]);
    // Who does not ask takes any.
    let loaded = ranks(2, |comm| Rank::new(Mesh::new(2, 1), comm, DType::F32)?.adam.load(dir.path()));
    loaded.into_iter().for_each(|steps| assert_eq!(steps.unwrap(), 1));
}

/// Ranks that say of one state that it is different models' write none of it, and each says what the other takes it for.
#[test]
fn ranks_with_other_identities_save_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for (identities, texts) in [
        ([Some("one"), Some("another, longer than one word")], ["\"one\"", "\"another, longer than one word\""]),
        ([Some("one"), None], ["\"one\"", "none"]),
    ] {
        let results = ranks(2, |comm| {
            let own = comm.rank();
            let mut rank = Rank::new(Mesh::new(2, 1), comm, DType::F32)?;
            if let Some(identity) = identities[own] {
                rank.adam.set_identity(identity);
            }
            rank.step(0)?;
            match rank.adam.save(dir.path()) {
                Err(Error::ConfigMismatch { call: "AdamW", field, rank, value, peer, peer_value }) => {
                    assert_eq!((field.as_str(), rank, peer), ("identity", own, 1 - own));
                    assert_eq!([value.as_str(), &peer_value], [texts[own], texts[1 - own]]);
                }
                other => panic!("rank {own}: {other:?}"),
            }
            // The optimizer works on.
            rank.step(1)
        });
        results.into_iter().for_each(|result| result.unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
