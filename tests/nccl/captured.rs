//! Passes of a chain in CUDA graphs, over several GPUs, with copy engines and without: the bits of eager passes, and what
//! becomes of captures that fail.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use moebius::comm::{Communicator, Solo};
use moebius::cuda::{Captured, Cuda};
use moebius::etp::{Chain, Comms, EtpOptions, Payload, Phase, Reduction, Shard, ShardSource, WeightId, WeightSpec};
use moebius::kernels::Kernels;
use moebius::nccl::NcclComm;
use moebius::weights::WeightSource;
use moebius::{DType, Device, Error, Result, Tensor, TensorRef};

use crate::Run;
use crate::conformance::seed;
use crate::etp::gpus;
use crate::streams::{MINUTE, ranks};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("a_step_has_eager_bits", a_step_has_eager_bits),
        ("passes_apart_have_eager_bits", passes_apart_have_eager_bits),
        ("replicas_in_a_capture", replicas_in_a_capture),
        ("a_capture_that_never_runs_leaves_nothing", a_capture_that_never_runs_leaves_nothing),
        ("a_capture_that_fails_is_given_up", a_capture_that_fails_is_given_up),
        ("what_a_capture_cannot_have", what_a_capture_cannot_have),
    ]
}

const WEIGHTS: usize = 4;
/// Large enough that a gather takes long beside a call's start.
const DIMS: [usize; 3] = [4, 256, 1024];
const ROWS: usize = 4 * 256;
const WIDTH: usize = 1024;

/// A number that all of these decide.
fn mixed(what: [usize; 4]) -> usize {
    let seed =
        what.iter().fold(seed::seed(0x9e37_79b9_7f4a_7c15), |s, v| (s ^ *v as u64).wrapping_mul(0x5851_f42d_4c95_7f2d));
    (seed >> 40) as usize
}

/// Elements of a row of weight `i` at step `number`: a power of two up to 8, which is itself in every form.
fn weight(number: usize, i: usize, row: usize) -> f32 {
    f32::from(1u8 << (mixed([number, i, row, 0]) % 4))
}

/// The same of a rank's gradient: sums over ranks are exact.
fn gradient(number: usize, i: usize, row: usize, rank: usize) -> f32 {
    (mixed([number, i, row, 1 + rank]) % 16) as f32
}

/// Rows of bf16, each of one number.
fn rows(range: Range<usize>, value: impl Fn(usize) -> f32) -> Vec<u8> {
    range.flat_map(|row| half::bf16::from_f32(value(row)).to_ne_bytes().repeat(WIDTH)).collect()
}

/// One rank, its weights, and what its steps have seen.
struct Rank {
    number: usize,
    of: usize,
    cuda: Cuda,
    chain: Chain<Cuda>,
    ids: Vec<WeightId>,
    shards: Vec<Arc<Shard<Cuda>>>,
    /// Of every weight.
    own: Range<usize>,
    /// Weights in a forward, and in a backward.
    seen: Vec<Tensor<Cuda>>,
    sums: Vec<Tensor<Cuda>>,
    handed: Vec<Tensor<Cuda>>,
    replicas: Option<NcclComm>,
}

fn on(payload: Payload, ahead: usize) -> (Payload, EtpOptions) {
    (payload, EtpOptions { reduction: Reduction::Pairwise, ahead, ..EtpOptions::default() })
}

impl Rank {
    fn new((number, of): (usize, usize), comms: Comms<Cuda>, (payload, options): (Payload, EtpOptions)) -> Self {
        let cuda = gpus::first(number + 1).1.swap_remove(number);
        let chain = Chain::new(cuda.clone(), comms, options).unwrap();
        let cut = chain.shards(&DIMS).unwrap();
        let empty = |dims: &[usize], dtype| Tensor::empty(&cuda, dtype, dims).unwrap();
        let (mut ids, mut shards) = (Vec::new(), Vec::new());
        for i in 0..WEIGHTS {
            let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, DType::BF16);
            spec.payload = payload;
            shards.push(Arc::new(Shard::new(empty(&cut.shard_dims(), DType::BF16))));
            ids.push(chain.add(spec, Arc::clone(&shards[i]) as Arc<dyn ShardSource<Cuda>>).unwrap());
        }
        let all = |count, dims: &[usize], dtype| (0..count).map(|_| empty(dims, dtype)).collect::<Vec<_>>();
        let (seen, handed) = (all(2 * WEIGHTS, &DIMS, DType::BF16), all(WEIGHTS, &DIMS, DType::BF16));
        let sums = all(WEIGHTS, &cut.shard_dims(), DType::F32);
        let own = cut.rows_of(chain.rank());
        assert_eq!(own.len(), cut.shard_dims()[0], "no padding");
        Self { number, of, cuda, chain, ids, shards, own, seen, sums, handed, replicas: None }
    }

    /// Weights and gradients of another step.
    fn change(&mut self, step: usize) {
        for i in 0..WEIGHTS {
            let shard = rows(self.own.clone(), |row| weight(step, i, row));
            self.shards[i].update(|to| self.cuda.upload(&shard, to.view_mut())).unwrap();
            let handed = rows(0..ROWS, |row| gradient(step, i, row, self.number));
            self.cuda.upload(&handed, self.handed[i].view_mut()).unwrap();
        }
    }

    fn see(&mut self, i: usize, slot: usize) -> Result<()> {
        let source = self.chain.source(self.ids[i])?;
        let guard = source.acquire()?;
        self.cuda.copy(guard.tensor()?.data(), self.seen[slot].view_mut().into_data())
    }

    fn hand(&self, i: usize) -> Result<()> {
        let mut buffer = self.chain.gradient_buffer(self.ids[i])?;
        self.cuda.copy(self.handed[i].view().data(), buffer.view_mut()?.into_data())?;
        self.chain.submit(buffer)
    }

    /// So many weights of a pass.
    fn uses(&mut self, phase: Phase, count: usize) -> Result<()> {
        self.chain.begin(phase)?;
        for at in 0..count {
            match phase {
                Phase::Forward => self.see(at, at)?,
                Phase::Backward => {
                    let i = WEIGHTS - 1 - at;
                    self.see(i, WEIGHTS + i)?;
                    self.hand(i)?;
                }
            }
        }
        Ok(())
    }

    fn pass(&mut self, phase: Phase) -> Result<()> {
        self.uses(phase, WEIGHTS)?;
        self.chain.end()
    }

    fn finish(&mut self) -> Result<()> {
        let mut to = self.sums.iter_mut();
        let give = |_: WeightId, gradient: TensorRef<'_, Cuda>| match to.next() {
            Some(to) => self.cuda.copy(gradient.data(), to.view_mut().into_data()),
            None => Ok(()),
        };
        self.chain.finish(self.replicas.as_mut().map(|comm| comm as &mut dyn Communicator<Cuda>), give)
    }

    fn step(&mut self) -> Result<()> {
        self.pass(Phase::Forward)?;
        self.pass(Phase::Backward)?;
        self.finish()
    }

    /// Whether the last step was this one's.
    fn check(&self, step: usize, what: &str) {
        for (slot, seen) in self.seen.iter().enumerate() {
            let expected = rows(0..ROWS, |row| weight(step, slot % WEIGHTS, row));
            assert!(self.cuda.download(seen.view()).unwrap() == expected, "{what}: use {slot} of step {step}");
        }
        for (i, sum) in self.sums.iter().enumerate() {
            let of_row = |row| (0..self.of).map(|rank| gradient(step, i, row, rank)).sum::<f32>();
            let expected: Vec<u8> = self.own.clone().flat_map(|row| of_row(row).to_ne_bytes().repeat(WIDTH)).collect();
            assert!(self.cuda.download(sum.view()).unwrap() == expected, "{what}: sum {i} of step {step}");
        }
        self.cuda.check().unwrap();
    }

    fn eager(&mut self, step: usize, what: &str) {
        self.change(step);
        self.step().unwrap();
        self.check(step, what);
    }

    fn capture(&mut self, calls: impl FnOnce(&mut Self) -> Result<()>) -> Result<Captured<()>> {
        let cuda = self.cuda.clone();
        cuda.capture(|| calls(self))
    }

    /// Eager steps, and then replays with an eager step between; what of a step is not captured follows.
    fn replays(&mut self, captured: &[fn(&mut Self) -> Result<()>], after: fn(&mut Self) -> Result<()>, what: &str) {
        (0..2).for_each(|step| self.eager(step, what));
        self.chain.prepare_capture().unwrap();
        let before = (self.chain.traffic().allocations, self.cuda.memory().in_use);
        let mut graphs: Vec<_> = captured.iter().map(|calls| self.capture(calls).unwrap()).collect();
        assert_eq!((self.chain.traffic().allocations, self.cuda.memory().in_use), before, "{what}");
        for step in 2..8 {
            if step == 5 {
                self.eager(step, what);
                continue;
            }
            self.change(step);
            graphs.iter_mut().for_each(|graph| graph.replay().unwrap());
            after(self).unwrap();
            self.check(step, what);
        }
        // The graphs end before the communicators that they call, on all ranks.
    }
}

/// Whole steps from a graph: each weight holds what its shards hold at that replay, and each gradient what was handed
/// in, whatever ran before.
fn a_step_has_eager_bits(_: &Cuda, n: usize) {
    let plain = on(Payload::Plain, 1);
    let without = |(payload, options)| (payload, EtpOptions { prefetch: false, ..options });
    let in_turn = |(payload, options)| (payload, EtpOptions { in_turn: true, ..options });
    for how in [
        plain,
        on(Payload::Plain, 2),
        on(Payload::Nvfp4, 1),
        on(Payload::Nvfp4, 2),
        on(Payload::Mxfp8, 1),
        on(Payload::Fp8Block, 1),
        in_turn(plain),
        in_turn(on(Payload::Nvfp4, 2)),
        without(on(Payload::Nvfp4, 1)),
    ] {
        ranks(n, MINUTE, |rank, comms| {
            Rank::new((rank, n), comms, how).replays(&[Rank::step], |_| Ok(()), &format!("{how:?}"));
        });
    }
}

/// A graph a pass; `finish` follows their runs.
fn passes_apart_have_eager_bits(_: &Cuda, n: usize) {
    for how in [on(Payload::Plain, 1), on(Payload::Nvfp4, 2)] {
        ranks(n, MINUTE, |rank, comms| {
            let passes: [fn(&mut Rank) -> Result<()>; 2] =
                [|rank| rank.pass(Phase::Forward), |rank| rank.pass(Phase::Backward)];
            Rank::new((rank, n), comms, how).replays(&passes, Rank::finish, &format!("{how:?}"));
        });
    }
}

/// Each rank a group of its own, and all of them replicas.
fn replicas_in_a_capture(_: &Cuda, n: usize) {
    let all: Vec<usize> = (0..n).collect();
    let (payload, options) = on(Payload::Plain, 1);
    thread::scope(|scope| {
        for (rank, replicas) in gpus::among(&all, "replicas", MINUTE).into_iter().enumerate() {
            scope.spawn(move || {
                let (_, gpus) = gpus::first(rank + 1);
                let lone = || Box::new(Solo::new(gpus[rank].with_new_stream().unwrap()));
                let comms = Comms::<Cuda> { gather: lone(), reduce: lone() };
                let mut rank = Rank::new((rank, n), comms, (payload, EtpOptions { replicas: n, ..options }));
                rank.replicas = Some(replicas);
                rank.replays(&[Rank::step], |_| Ok(()), "replicas");
            });
        }
    });
}

/// A capture that never ran has cast nothing.
fn a_capture_that_never_runs_leaves_nothing(_: &Cuda, n: usize) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        ranks(n, MINUTE, |rank, comms| {
            let mut rank = Rank::new((rank, n), comms, on(payload, 1));
            rank.eager(0, "before");
            rank.chain.prepare_capture().unwrap();
            let passes = |rank: &mut Rank| rank.pass(Phase::Forward).and_then(|()| rank.pass(Phase::Backward));
            let graph = rank.capture(passes).unwrap();
            rank.eager(1, "after");
            // Nor has one that has run since, of other shards.
            let mut again = rank.capture(passes).unwrap();
            again.replay().unwrap();
            rank.finish().unwrap();
            rank.eager(2, "after a run");
            drop((graph, again));
        });
    }
}

/// How a capture ends within a pass.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ends {
    /// On every rank, with an error of the caller's.
    All,
    /// On the first; the others go on until they hear of it.
    First,
    /// On every rank, without an error.
    Silently,
}

/// A capture that ends with collectives under way: none of them runs, recovery gives the chain back as it was, an
/// eager step has its bits, and capturing works.
fn a_capture_that_fails_is_given_up(_: &Cuda, n: usize) {
    use Phase::{Backward, Forward};
    let ends = [(Forward, Ends::All), (Backward, Ends::All), (Forward, Ends::First), (Backward, Ends::First)];
    let ends = ends.into_iter().chain([(Forward, Ends::Silently), (Backward, Ends::Silently)]);
    for how in [on(Payload::Plain, 1), on(Payload::Plain, 2), on(Payload::Nvfp4, 2)] {
        ranks(n, MINUTE, |rank, comms| {
            let mut rank = Rank::new((rank, n), comms, how);
            rank.eager(0, "before");
            rank.chain.prepare_capture().unwrap();
            let allocations = rank.chain.traffic().allocations;
            for (round, (within, end)) in ends.clone().enumerate() {
                let what = format!("{how:?}, {within:?}, {end:?}");
                let error = fails(&mut rank, within, end);
                let left = rank.chain.begin(Forward).unwrap_err();
                assert!(left.to_string().contains("Chain::recover"), "{what}: {left}");
                rank.chain.recover((end == Ends::First && rank.number == 0).then_some(&error)).unwrap();
                let step = 1 + 2 * round;
                if round % 2 == 0 {
                    rank.eager(step, &what);
                }
                let mut graph = rank.capture(Rank::step).unwrap();
                rank.change(step + 1);
                graph.replay().unwrap();
                rank.check(step + 1, &what);
                assert_eq!(rank.chain.traffic().allocations, allocations, "{what}: every buffer came back");
            }
        });
    }
}

/// A capture that fails in this way; why.
fn fails(rank: &mut Rank, within: Phase, end: Ends) -> Error {
    let goes_on = end == Ends::First && rank.number != 0;
    let error = rank.capture(|rank| {
        if within == Phase::Backward {
            rank.pass(Phase::Forward)?;
        }
        if goes_on {
            return rank.pass(within);
        }
        rank.uses(within, 1)?;
        match end {
            Ends::Silently => Ok(()),
            _ => {
                let [name, expected, found] = ["capture", "to go on", "an error of the caller's"].map(String::from);
                Err(Error::Invalid { call: "test", name, expected, found })
            }
        }
    });
    let error = error.err().unwrap_or_else(|| panic!("{within:?}, {end:?}: a graph"));
    let expected = match (end, goes_on) {
        (Ends::Silently, _) => matches!(error, Error::NotCapturable { call: "Cuda::capture", .. }),
        (_, true) => matches!(error, Error::Comm(_)),
        (_, false) => matches!(error, Error::Invalid { .. }),
    };
    assert!(expected, "{within:?}, {end:?}: {error:?}");
    error
}

fn what_a_capture_cannot_have(_: &Cuda, n: usize) {
    ranks(n, MINUTE, |rank, comms| {
        let mut rank = Rank::new((rank, n), comms, on(Payload::Plain, 1));
        let refused = |result: Result<Captured<()>>, what: &str| match result.map(drop) {
            Err(Error::NotCapturable { operation, .. }) => assert!(operation.contains(what), "{operation}"),
            other => panic!("{other:?}"),
        };
        rank.eager(0, "before");
        let first = rank.ids[0];
        let not_ready = "not ready";
        refused(rank.capture(Rank::step), not_ready);
        refused(rank.capture(|rank| rank.chain.gradient_buffer(first).map(drop)), not_ready);
        refused(rank.capture(Rank::finish), not_ready);
        refused(rank.capture(|rank| rank.chain.whole(first).map(drop)), "other threads");
        // Nothing of it is left.
        rank.eager(1, "after");
        rank.chain.prepare_capture().unwrap();
        // A pass under way is not lost.
        rank.change(2);
        rank.pass(Phase::Forward).unwrap();
        rank.uses(Phase::Backward, 2).unwrap();
        let within: [fn(&mut Rank) -> Result<()>; 3] = [Rank::finish, |rank| rank.hand(0), |rank| rank.see(1, 0)];
        for calls in within {
            refused(rank.capture(calls), "under way");
        }
        for i in [1, 0] {
            rank.see(i, WEIGHTS + i).unwrap();
            rank.hand(i).unwrap();
        }
        rank.chain.end().unwrap();
        refused(rank.capture(Rank::finish), "under way");
        refused(rank.capture(|rank| rank.pass(Phase::Forward)), "under way");
        rank.finish().unwrap();
        rank.check(2, "after refusals");
        let mut graph = rank.capture(Rank::step).unwrap();
        rank.change(3);
        graph.replay().unwrap();
        rank.check(3, "captured after refusals");
    });
}
