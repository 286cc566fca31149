//! Sums over replicas that begin beside the step's last backward.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::{Communicator, Op};
use moebius::cpu::Cpu;
use moebius::etp::{Comms, EtpOptions, Phase, Reduction};
use moebius::{CommError, Error, Result};

use super::faulty_comm::{Entered, FaultyComm};
use super::test_ranks::{COUNT, Chained, MINUTE, ON, Place, TestChain, bodies};
use super::world::mesh;

bodies! {
    2 sums_beside_backward_have_the_same_bits,
    2 other_numbers_of_microbatches_lose_nothing_between_replicas,
    2 a_rank_that_fails_in_the_last_backward,
    2 a_second_finish_gives_the_same_sums,
}

const WEIGHTS: usize = 3;
const REPLICAS: usize = 2;

/// A rank of chains of `n` ranks each, beside each other as replicas.
struct Rank<D: Chained> {
    w: usize,
    n: usize,
    test: TestChain<D>,
    /// Where the caller has the replicas' communicator, and not the chain.
    caller: Option<Box<dyn Communicator<D>>>,
    /// Collectives of the replicas' communicator so far.
    entered: Entered,
}

/// How ranks are made.
#[derive(Clone, Copy)]
struct Setup {
    /// Ranks of a chain.
    n: usize,
    options: EtpOptions,
    /// The chain has the replicas' communicator.
    own: bool,
}

impl Setup {
    fn own(n: usize) -> Self {
        Self { n, options: ON, own: true }
    }
}

/// Runs `run` on each rank of two replicas.
fn ranks<D: Chained, R: Send>(device: &D, setup: Setup, run: impl Fn(Rank<D>) -> R + Sync) -> Vec<R> {
    let Setup { n, options, own } = setup;
    let world = REPLICAS * n;
    let comms = |purpose| mesh(device, (world, purpose), |w| (w / n, w % n), MINUTE);
    let replicas = mesh(device, (world, "replicas"), |w| (w % n, w / n), MINUTE);
    let all = comms("gather").into_iter().zip(comms("reduce")).zip(replicas).enumerate();
    thread::scope(|scope| {
        let start = |(w, ((gather, reduce), replicas))| {
            let (run, device) = (&run, device.of_rank(w));
            scope.spawn(move || {
                let options = EtpOptions { replicas: REPLICAS, ..options };
                let place = Place { device: device.clone(), comms: Comms { gather, reduce } };
                let replicas = FaultyComm::<D>::new(replicas);
                let entered = Arc::clone(&replicas.entered);
                let (chain, replicas) = (place.chain(options).unwrap(), Box::new(replicas));
                let (chain, caller) = match own {
                    true => (chain.with_replicas(replicas).unwrap(), None),
                    false => (chain, Some(replicas as Box<dyn Communicator<D>>)),
                };
                let mut test = TestChain { device, chain: Arc::new(chain), ids: Vec::new(), shards: Vec::new() };
                (0..WEIGHTS).for_each(|_| test.add(false).unwrap());
                run(Rank { w, n, test, caller, entered })
            })
        };
        let threads: Vec<_> = all.map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Backward's order; the first weight is used twice.
const FORWARD: [usize; 4] = [0, 1, 2, 0];

impl<D: Chained> Rank<D> {
    /// A gradient of weight `i`, whose sums in another order have other bits.
    fn gradient(&self, i: usize, what: usize) -> Result<()> {
        let mut buffer = self.test.chain.gradient_buffer(self.test.ids[i])?;
        let value = |at: usize| {
            let mixed = (at * 7919 + self.w * 104_729 + i * 1_299_709 + what * 15_485_863 + 11) % 100_003;
            (mixed as f32 / 7.0 - 7000.0) * 10f32.powi((mixed % 5) as i32 - 2)
        };
        let values: Vec<f32> = (0..COUNT).map(value).collect();
        self.test.device.upload(bytemuck::cast_slice(&values), buffer.view_mut()?)?;
        self.test.chain.submit(buffer)
    }

    fn forward(&self) -> Result<()> {
        self.test.pass(Phase::Forward, &FORWARD)
    }

    /// A backward, with `before` called ahead of each use.
    fn backward(&self, what: usize, before: impl Fn(usize) -> Result<()>) -> Result<()> {
        self.test.chain.begin(Phase::Backward)?;
        for (at, i) in FORWARD.into_iter().rev().enumerate() {
            before(at)?;
            self.test.read(i)?;
            self.gradient(i, 10 * what + at)?;
        }
        self.test.chain.end()
    }

    /// Passes of a step, the last of which is announced where the chain has the replicas' communicator.
    fn microbatches(&self, microbatches: usize, before: impl Fn(usize) -> Result<()>) -> Result<()> {
        for m in 0..microbatches {
            self.forward()?;
            let last = m + 1 == microbatches;
            if last && self.caller.is_none() {
                self.test.chain.last_backward()?;
            }
            self.backward(m, |at| if last { before(at) } else { Ok(()) })?;
        }
        Ok(())
    }

    /// Bits of each weight's gradient.
    fn finish(&mut self) -> Result<Vec<Vec<u32>>> {
        let (mut found, device) = (Vec::new(), self.test.device.clone());
        let replicas = self.caller.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<D>);
        self.test.chain.finish(replicas, |_, gradient| {
            found.push(device.floats(gradient).into_iter().map(f32::to_bits).collect());
            Ok(())
        })?;
        Ok(found)
    }

    /// A whole step.
    fn step(&mut self, microbatches: usize) -> Result<Vec<Vec<u32>>> {
        self.microbatches(microbatches, |_| Ok(()))?;
        self.finish()
    }

    /// Collectives of gradients over the replicas so far.
    fn sums(&self) -> usize {
        self.entered.lock().unwrap().iter().filter(|op| **op == Op::GradReduce).count()
    }
}

fn nothing(_: usize) -> Result<()> {
    Ok(())
}

fn is_count(error: &Error) -> bool {
    matches!(error, Error::Invalid { name, .. } if name == "microbatches")
}

fn out_of_luck() -> Error {
    Error::Framework { call: "test", framework: "test", message: "out of luck".into() }
}

/// Those of `finish` with the caller's communicator, at every size, and of `finish` without a word of the last backward.
fn sums_beside_backward_have_the_same_bits<D: Chained>(device: &D) {
    for n in [1, 2, 4].into_iter().filter(|n| REPLICAS * n <= device.most()) {
        for (reduction, microbatches) in
            [(Reduction::Native, 1), (Reduction::Native, 3), (Reduction::Pairwise, 1), (Reduction::Pairwise, 3)]
        {
            for (prefetch, in_turn) in [(true, false), (true, true), (false, false)] {
                let options = EtpOptions { reduction, prefetch, in_turn, ..ON };
                let steps = |own| {
                    ranks(device, Setup { n, options, own }, |mut rank| {
                        let mut all = Vec::new();
                        for _ in 0..2 {
                            all.extend(rank.step(microbatches).unwrap());
                        }
                        let traffic = rank.test.chain.traffic();
                        let sums = if own { 2 * WEIGHTS as u64 } else { 0 };
                        assert_eq!(traffic.sums, sums);
                        // All that are not the pass's last.
                        assert!(traffic.sums_beside > 0 || !own, "{traffic:?}");
                        if own {
                            rank.forward().unwrap();
                            rank.backward(0, nothing).unwrap();
                            rank.finish().unwrap();
                            assert_eq!(rank.test.chain.traffic().sums_beside, traffic.sums_beside, "not announced");
                        }
                        all
                    })
                };
                assert_eq!(steps(true), steps(false), "N = {n}, {options:?}, {microbatches} microbatches");
            }
        }
    }
}

/// The sums of the weights whose gradients have been handed in have begun when the first weight's second use comes;
/// microbatches before communicate nothing.
#[test]
fn sums_begin_while_backward_runs() {
    for (n, reduction) in [(1, Reduction::Native), (2, Reduction::Pairwise), (2, Reduction::Native)] {
        let options = EtpOptions { reduction, ..ON };
        ranks(&Cpu::poisoning(), Setup { options, ..Setup::own(n) }, |mut rank| {
            rank.forward().unwrap();
            rank.backward(0, nothing).unwrap();
            assert_eq!(rank.sums(), 0);
            rank.forward().unwrap();
            rank.test.chain.last_backward().unwrap();
            assert_eq!(rank.sums(), 1, "the comparison");
            let before = |at| {
                // Of weights 0, 2 and 1 the gradients are handed in; 0 gets another, and 1 is still under way.
                let limit = Instant::now() + MINUTE;
                while at == 3 && rank.sums() < 2 && Instant::now() < limit {
                    thread::sleep(Duration::from_millis(1));
                }
                assert_eq!(rank.sums(), if at == 3 { 2 } else { 1 }, "use {at}");
                Ok(())
            };
            rank.backward(1, before).unwrap();
            let memory = rank.test.chain.memory().main;
            rank.finish().unwrap();
            // And the meeting behind them.
            assert_eq!((rank.sums(), rank.test.chain.memory().main), (2 + WEIGHTS, memory));
        });
    }
}

/// A replica that is behind: every rank hears of it, no sum begins, the one that is behind does what it has left out,
/// and all finish with the sums of a step that went well.
fn other_numbers_of_microbatches_lose_nothing_between_replicas<D: Chained>(device: &D) {
    for n in [1, 2].into_iter().filter(|n| REPLICAS * n <= device.most()) {
        let expected = ranks(device, Setup::own(n), |mut rank| rank.step(3).unwrap());
        let found = ranks(device, Setup::own(n), |mut rank| {
            let behind = rank.w < rank.n;
            for m in 0..if behind { 1 } else { 2 } {
                rank.forward().unwrap();
                rank.backward(m, nothing).unwrap();
            }
            let error = rank.test.chain.last_backward().unwrap_err();
            assert!(is_count(&error), "{error}");
            let found = if behind { "expected 3, as on rank 1, found 2" } else { "expected 2, as on rank 0, found 3" };
            assert!(error.to_string().contains(found), "{error}");
            if behind {
                rank.forward().unwrap();
                rank.backward(1, nothing).unwrap();
            }
            rank.forward().unwrap();
            rank.test.chain.last_backward().unwrap();
            // Again, which compares nothing.
            rank.test.chain.last_backward().unwrap();
            rank.backward(2, nothing).unwrap();
            rank.finish().unwrap()
        });
        assert_eq!(found, expected);
        // One announces its last backward, the other ends its step: both are told, and both can go on.
        let found = ranks(device, Setup::own(n), |mut rank| {
            rank.forward().unwrap();
            rank.backward(0, nothing).unwrap();
            let ends = rank.w < rank.n;
            let error = if ends { rank.finish().unwrap_err() } else { rank.test.chain.last_backward().unwrap_err() };
            assert!(is_count(&error), "{error}");
            rank.forward().unwrap();
            rank.backward(1, nothing).unwrap();
            rank.forward().unwrap();
            rank.test.chain.last_backward().unwrap();
            rank.backward(2, nothing).unwrap();
            rank.finish().unwrap()
        });
        assert_eq!(found, expected);
    }
}

/// One rank of a chain announces its last backward while the other begins a further pass: every rank of the chain and of
/// the replicas is told, and after recovery the next step works.
#[test]
fn other_numbers_of_microbatches_in_a_chain() {
    for (prefetch, in_turn) in [(true, false), (false, false), (true, true)] {
        let setup = Setup { options: EtpOptions { prefetch, in_turn, ..ON }, ..Setup::own(2) };
        let device = Cpu::poisoning();
        let expected = ranks(&device, setup, |mut rank| rank.step(2).unwrap());
        let found = ranks(&device, setup, |mut rank| {
            let error = rank.microbatches(if rank.w == 0 { 1 } else { 2 }, nothing).unwrap_err();
            match &error {
                // The replica's ranks agree with each other; the ranks of the chain that does not tell theirs.
                Error::Comm(CommError::Refused { .. }) if rank.w > 1 => {}
                error => assert!(is_count(error), "rank {}: {error}", rank.w),
            }
            rank.test.chain.recover(Some(&error)).unwrap();
            rank.step(2).unwrap()
        });
        assert_eq!(found, expected, "{prefetch} {in_turn}");
    }
}

/// The others, in the passes, in a sum or in `finish`, are told in time; after recovery nothing of the step is left.
fn a_rank_that_fails_in_the_last_backward<D: Chained>(device: &D) {
    for n in [1, 2].into_iter().filter(|n| REPLICAS * n <= device.most()) {
        let expected = ranks(device, Setup::own(n), |mut rank| rank.step(1).unwrap());
        // Before its first sum, behind it, and behind all but those of `finish`.
        for fails_at in [0, 2, 3, 4] {
            let found = ranks(device, Setup::own(n), |mut rank| {
                rank.step(1).unwrap();
                let failing = rank.w == 0;
                let started = Instant::now();
                let fails = |at| if failing && at == fails_at { Err(out_of_luck()) } else { Ok(()) };
                let outcome = rank.microbatches(2, fails).and_then(|()| fails(4)).and_then(|()| rank.finish());
                let error = outcome.unwrap_err();
                match &error {
                    Error::Framework { .. } if failing => {}
                    // Ranks of other communicators than the failing rank's hear of it by what their own peers have heard.
                    Error::Comm(CommError::Refused { reason, .. }) if !failing => {
                        assert!(n > 1 || reason.contains("out of luck"), "{reason}");
                    }
                    // A rank may also learn it from a peer that is on its way to recovery.
                    Error::Comm(CommError::TagMismatch { .. }) if !failing => {}
                    other => panic!("rank {} of {n}, at {fails_at}: {other:?}", rank.w),
                }
                assert!(started.elapsed() < MINUTE / 2, "told in time");
                rank.test.chain.recover(Some(&error)).unwrap();
                rank.step(1).unwrap()
            });
            assert_eq!(found, expected, "N = {n}, at {fails_at}");
        }
    }
}

/// A rank whose `enqueue` fails: the others have their sums, and a second call of its own has them too. One that gives a
/// communicator beside the chain's: all are told, and a second call of all has them.
fn a_second_finish_gives_the_same_sums<D: Chained>(device: &D) {
    for n in [1, 2].into_iter().filter(|n| REPLICAS * n <= device.most()) {
        let expected = ranks(device, Setup::own(n), |mut rank| rank.step(2).unwrap());
        for given in [false, true] {
            let found = ranks(device, Setup::own(n), |mut rank| {
                rank.microbatches(2, nothing).unwrap();
                let what = if given { "Chain::with_replicas" } else { "out of luck" };
                if rank.w == 0 {
                    let mut two = FaultyComm { size: Some(REPLICAS), ..solo(&rank.test.device) };
                    let replicas = if given { Some(&mut two as &mut dyn Communicator<D>) } else { None };
                    let text = rank.test.chain.finish(replicas, |_, _| Err(out_of_luck())).unwrap_err().to_string();
                    assert!(text.contains(what), "{text}");
                    for error in [rank.gradient(1, 0), rank.test.chain.last_backward()].map(Result::unwrap_err) {
                        assert!(error.to_string().contains("Chain::finish"), "{error}");
                    }
                } else if given {
                    let error = rank.finish().unwrap_err();
                    let Error::Comm(CommError::Refused { reason, .. }) = &error else { panic!("{error:?}") };
                    assert!(reason.contains(what), "{reason}");
                }
                let sums = rank.finish().unwrap();
                assert_eq!(rank.test.chain.traffic().sums, WEIGHTS as u64);
                sums
            });
            assert_eq!(found, expected, "N = {n}");
        }
    }
}

fn solo<D: Chained>(device: &D) -> FaultyComm<D> {
    FaultyComm::new(Box::new(moebius::comm::Solo::new(device.clone())))
}

/// What cannot hold is refused, and the step goes on.
#[test]
fn what_is_refused_loses_nothing() {
    let expected = ranks(&Cpu::poisoning(), Setup::own(1), |mut rank| rank.step(1).unwrap());
    let found = ranks(&Cpu::poisoning(), Setup::own(1), |mut rank| {
        let chain = Arc::clone(&rank.test.chain);
        let refused = |outcome: Result<()>, what: &str| {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        chain.begin(Phase::Forward).unwrap();
        refused(chain.last_backward(), "no pass");
        FORWARD.iter().for_each(|i| rank.test.read(*i).unwrap());
        chain.end().unwrap();
        chain.last_backward().unwrap();
        rank.backward(0, nothing).unwrap();
        // A gradient more than the weight has uses, and a pass more than was said.
        refused(rank.gradient(2, 0), "has begun with (Chain::last_backward)");
        refused(chain.begin(Phase::Backward), "behind the step's last");
        refused(chain.last_backward(), "Chain::finish");
        let sums = rank.finish().unwrap();
        // What is announced and does not come is compared and summed as ever.
        rank.forward().unwrap();
        rank.backward(0, nothing).unwrap();
        chain.last_backward().unwrap();
        assert_eq!(rank.finish().unwrap(), sums);
        // Drained, they are the replicas' and wait to be given.
        rank.microbatches(1, nothing).unwrap();
        chain.drain().unwrap();
        refused(rank.gradient(2, 0), "Chain::finish again");
        assert_eq!(rank.finish().unwrap(), sums);
        sums
    });
    assert_eq!(found, expected);
}

/// A `finish` in the middle of the announced pass: the replica is told, and both recover.
#[test]
fn a_finish_within_the_last_backward() {
    ranks(&Cpu::poisoning(), Setup::own(1), |mut rank| {
        rank.forward().unwrap();
        rank.test.chain.last_backward().unwrap();
        if rank.w == 0 {
            rank.test.chain.begin(Phase::Backward).unwrap();
        } else {
            rank.backward(0, nothing).unwrap();
        }
        let error = rank.finish().unwrap_err();
        assert!(error.to_string().contains("the end of the step's last backward"), "{error}");
        if rank.w == 1 {
            let again = rank.finish().unwrap_err().to_string();
            assert!(again.contains("Chain::recover"), "{again}");
        }
        rank.test.chain.recover(None).unwrap();
        rank.step(1).unwrap();
    });
}

/// A chain without the replicas' communicator, or with one of another size, and one without replicas.
#[test]
fn chains_without_replicas_of_their_own() {
    let device = Cpu::poisoning();
    ranks(&device, Setup { own: false, ..Setup::own(2) }, |rank| {
        let error = rank.test.chain.last_backward().unwrap_err();
        assert!(error.to_string().contains("Chain::with_replicas"), "{error}");
    });
    super::test_ranks::ranks(&device, 1, MINUTE, |_, place| {
        let test = place.test_chain(ON, 1, false).unwrap();
        test.chain.last_backward().unwrap();
        test.pass(Phase::Forward, &[0]).unwrap();
        test.gradient(0, 3.0).unwrap();
        test.finish(&[3.0]).unwrap();
    });
    super::test_ranks::ranks(&device, 1, MINUTE, |_, place| {
        let chain = place.chain(ON).unwrap();
        let error = chain.with_replicas(Box::new(FaultyComm { size: Some(2), ..solo(&device) })).unwrap_err();
        assert!(error.to_string().contains("expected 1, found 2"), "{error}");
    });
    super::test_ranks::ranks(&device, 1, MINUTE, |_, place| {
        let chain = place.chain(ON).unwrap().with_replicas(Box::new(solo(&device))).unwrap();
        chain.last_backward().unwrap();
    });
}
