//! Decisions of the host in captures, which are pretended: what is captured runs, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::comm::Communicator;
use crate::cpu::{Cpu, ThreadWorld};
use crate::dtype::DType;
use crate::error::{CommError, Error, Result};
use crate::etp::test_ranks::ranks;
use crate::etp::{Comms, EtpOptions, Payload, Phase, Shard, WeightId, WeightSpec};
use crate::tensor::Tensor;
use crate::weights::WeightSource;

use super::*;

mod copy_engines;
mod sums_beside;

const DIMS: [usize; 3] = [2, 6, 8];
const COUNT: usize = 2 * 6 * 8;
const WEIGHTS: usize = 3;

struct Rank {
    chain: Chain<Cpu>,
    ids: Vec<WeightId>,
    shards: Vec<Arc<Shard<Cpu>>>,
    /// Captures so far.
    captures: AtomicU64,
}

fn value(weight: usize, at: usize) -> f32 {
    ((weight * 31 + at * 7) % 23) as f32 / 4.0 - 2.0
}

impl Rank {
    fn new(comms: Comms<Cpu>, options: EtpOptions, payload: Payload) -> Result<Self> {
        let chain = Chain::new(Cpu::poisoning(), comms, options)?;
        let (mut ids, mut shards) = (Vec::new(), Vec::new());
        for i in 0..WEIGHTS {
            let whole = Tensor::from_vec((0..COUNT).map(|at| value(i, at)).collect::<Vec<f32>>(), &DIMS)?;
            let shard = chain.shards(&DIMS)?.cut(&Cpu::poisoning(), whole.view(), chain.rank())?;
            shards.push(Arc::new(Shard::new(shard)));
            let spec = WeightSpec { payload, ..WeightSpec::new(format!("w{i}"), i as u32, &DIMS, DType::F32) };
            ids.push(chain.add(spec, Arc::clone(&shards[i]) as Arc<_>)?);
        }
        Ok(Self { chain, ids, shards, captures: AtomicU64::new(0) })
    }

    /// A forward and a backward; what weights have been.
    fn passes(&self, step: usize) -> Result<Vec<Vec<u8>>> {
        let mut seen = Vec::new();
        for phase in [Phase::Forward, Phase::Backward] {
            self.chain.begin(phase)?;
            for at in 0..WEIGHTS {
                let i = if phase == Phase::Forward { at } else { WEIGHTS - 1 - at };
                seen.push(self.weight(i)?);
                if phase == Phase::Backward {
                    self.gradient(i, step)?;
                }
            }
            self.chain.end()?;
        }
        Ok(seen)
    }

    fn weight(&self, i: usize) -> Result<Vec<u8>> {
        Ok(self.chain.source(self.ids[i])?.acquire()?.tensor()?.data().to_vec())
    }

    fn forward(&self) -> Result<Vec<Vec<u8>>> {
        self.chain.begin(Phase::Forward)?;
        let seen = (0..WEIGHTS).map(|i| self.weight(i)).collect::<Result<_>>()?;
        self.chain.end().map(|()| seen)
    }

    /// Shards move otherwise than after a `finish`, by powers of two, which every form has.
    fn double(&self) {
        for shard in &self.shards {
            let twice = |shard: &mut Tensor<Cpu>| {
                let twice: Vec<f32> = shard.as_slice::<f32>()?.iter().map(|w| 2.0 * w).collect();
                shard.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(&twice));
                Ok(())
            };
            shard.update(twice).unwrap();
        }
    }

    fn gradient(&self, i: usize, step: usize) -> Result<()> {
        let mut buffer = self.chain.gradient_buffer(self.ids[i])?;
        let values: Vec<f32> = (0..COUNT).map(|at| value(step + self.chain.rank(), at + i)).collect();
        buffer.view_mut()?.into_data().copy_from_slice(bytemuck::cast_slice(&values));
        self.chain.submit(buffer)
    }

    /// The gradients; shards move by them.
    fn finish(&self) -> Result<Vec<Vec<u8>>> {
        self.finish_over(None)
    }

    fn finish_over(&self, replicas: Option<&mut dyn Communicator<Cpu>>) -> Result<Vec<Vec<u8>>> {
        let mut found = Vec::new();
        self.chain.finish(replicas, |id, gradient| {
            found.push(gradient.data().to_vec());
            self.shards[id.0].update(|shard| {
                let moved = shard.as_slice::<f32>()?.iter().zip(gradient.as_slice::<f32>()?);
                let moved: Vec<f32> = moved.map(|(w, g)| w - g / 8.0).collect();
                shard.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(&moved));
                Ok(())
            })
        })?;
        Ok(found)
    }

    /// A capture begins, or ends.
    fn set_capturing(&self, on: bool) {
        let number = if on { self.captures.fetch_add(1, Ordering::SeqCst) + 1 } else { 0 };
        self.chain.test_capture.store(number, Ordering::SeqCst);
    }

    /// A capture of one call.
    fn captured<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.set_capturing(true);
        let result = call();
        self.set_capturing(false);
        result
    }

    /// A rank that is ready.
    fn prepared(comms: Comms<Cpu>, options: EtpOptions, payload: Payload) -> Self {
        let rank = Self::new(comms, options, payload).unwrap();
        rank.passes(0).unwrap();
        rank.finish().unwrap();
        rank.chain.prepare_capture().unwrap();
        rank
    }

    /// A capture ends with nothing under way.
    fn is_at_rest(&self) -> bool {
        let inner = self.chain.lock();
        inner.pending_reductions.is_empty()
            && inner.uses.iter().all(|node| node.pending_gather.is_none() && node.kept.is_none())
    }
}

fn options(ahead: usize, prefetch: bool) -> EtpOptions {
    EtpOptions { pad: 4, ahead, prefetch, reduction: Reduction::Pairwise, ..EtpOptions::default() }
}

/// Asserts that a capture cannot have an operation.
fn not_capturable<T: std::fmt::Debug>(result: Result<T>, what: &str) {
    match result {
        Err(Error::NotCapturable { operation, .. }) => assert!(operation.contains(what), "{operation}"),
        other => panic!("{other:?}"),
    }
}

type Values = Vec<Vec<u8>>;

/// Steps of eager passes, and of passes as a capture would have them: the same bits of weights and gradients, no
/// allocation, nothing under way at the end of any, and the same decisions in each.
#[test]
fn captured_passes_have_the_bits_of_eager_ones() {
    for payload in [Payload::Plain, Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        for (ahead, prefetch) in [(1, true), (2, true), (1, false)] {
            let run = |captured: bool| {
                ranks(2, |comms| -> Result<Vec<[Values; 2]>> {
                    let rank = Rank::new(comms, options(ahead, prefetch), payload)?;
                    let mut found = Vec::new();
                    for step in 0..5 {
                        // An eager step first, and one between.
                        let capture = captured && step != 0 && step != 3;
                        if captured && step == 1 {
                            rank.chain.prepare_capture()?;
                        }
                        let before = rank.chain.traffic();
                        rank.set_capturing(capture);
                        let mut seen = rank.passes(step)?;
                        seen.extend(rank.passes(step + 7)?);
                        assert!(!capture || rank.is_at_rest());
                        let gradients = rank.finish()?;
                        rank.set_capturing(false);
                        let after = rank.chain.traffic();
                        if capture {
                            assert_eq!(after.allocations, before.allocations);
                            let casts = if payload == Payload::Plain { 0 } else { 2 * WEIGHTS as u64 };
                            assert_eq!(after.casts - before.casts, casts, "each forward");
                            let inner = rank.chain.lock();
                            assert!(inner.weights.iter().all(|w| w.main.as_ref().is_some_and(|main| !main.first)));
                        }
                        found.push([seen, gradients]);
                    }
                    Ok(found)
                })
            };
            let [eager, captured] =
                [false, true].map(|captured| run(captured).into_iter().collect::<Result<Vec<_>>>().unwrap());
            assert!(eager[0].windows(2).all(|w| w[0] != w[1]), "steps differ");
            assert!(eager == captured, "{payload:?}, {ahead} ahead, {prefetch}");
        }
    }
}

/// Gradients handed in between a capture's passes have arrived when the call returns.
#[test]
fn gradients_between_passes_are_not_left_under_way() {
    ranks(2, |comms| {
        let rank = Rank::prepared(comms, options(1, true), Payload::Plain);
        rank.set_capturing(true);
        rank.gradient(1, 4).unwrap();
        assert!(rank.is_at_rest());
        rank.chain.drain().unwrap();
        rank.finish().unwrap();
    });
}

#[test]
fn what_cannot_be_captured_says_so() {
    ranks(1, |comms| {
        let rank = Rank::new(comms, options(1, true), Payload::Nvfp4).unwrap();
        let captured = |call: &dyn Fn() -> Result<()>, what: &str| not_capturable(rank.captured(call), what);
        assert!(rank.chain.prepare_capture().unwrap_err().to_string().contains("ordered"));
        rank.passes(0).unwrap();
        let not_ready = "not ready";
        captured(&|| rank.chain.begin(Phase::Forward), not_ready);
        captured(&|| rank.chain.gradient_buffer(rank.ids[0]).map(drop), not_ready);
        captured(&|| rank.chain.finish(None, |_, _| Ok(())), not_ready);
        captured(&|| rank.chain.drain(), not_ready);
        captured(&|| rank.chain.prepare_capture(), "other threads");
        rank.chain.prepare_capture().unwrap();
        captured(&|| rank.chain.whole(rank.ids[0]).map(drop), "other threads");
        captured(&|| rank.chain.recover(None), "other threads");
        captured(&|| rank.chain.reset_order(), "other threads");
        // Buffers that are gone are not made anew inside.
        rank.chain.clear();
        captured(&|| rank.passes(0).map(drop), "first use");
        rank.chain.recover(None).unwrap();
        rank.passes(0).unwrap();
        rank.chain.drain().unwrap();
        rank.set_capturing(true);
        rank.passes(1).unwrap();
        rank.finish().unwrap();
    });
    ranks(1, |comms| {
        let native = EtpOptions { reduction: Reduction::Native, ..options(1, true) };
        let rank = Rank::new(comms, native, Payload::Plain).unwrap();
        rank.passes(0).unwrap();
        assert!(rank.chain.prepare_capture().unwrap_err().to_string().contains("Pairwise"));
    });
}

/// Main gradients stay where they are, whatever becomes of a step: a capture has their addresses.
#[test]
fn recovery_keeps_what_captures_refer_to() {
    ranks(1, |comms| {
        let rank = Rank::new(comms, options(1, true), Payload::Plain).unwrap();
        rank.passes(0).unwrap();
        rank.chain.prepare_capture().unwrap();
        let addresses = || -> Vec<usize> {
            let inner = rank.chain.lock();
            let main =
                |w: &crate::etp::chain::ChainWeight<Cpu>| w.main.as_ref().map(|main| main.sums.as_bytes().as_ptr());
            inner.weights.iter().filter_map(main).map(|at| at as usize).collect()
        };
        let before = addresses();
        assert_eq!(before.len(), WEIGHTS);
        rank.chain.recover(None).unwrap();
        assert_eq!(addresses(), before);
        let zeros = rank.finish().unwrap();
        assert!(zeros.iter().flatten().all(|byte| *byte == 0), "given up");
    });
}

/// Whatever meets gradients of before the capture leaves them as they are.
#[test]
fn gradients_of_before_are_refused_and_not_lost() {
    let given = |refused: bool| {
        ranks(2, |comms| {
            let rank = Rank::prepared(comms, options(1, true), Payload::Plain);
            let allocations = rank.chain.traffic().allocations;
            for i in 0..2 {
                let buffer = rank.chain.gradient_buffer(rank.ids[1 - i]).unwrap();
                rank.gradient(i, 3).unwrap();
                if refused {
                    assert!(!rank.is_at_rest());
                    let chain = &rank.chain;
                    not_capturable(rank.captured(|| chain.begin(Phase::Forward)), "under way");
                    not_capturable(rank.captured(|| rank.finish()), "under way");
                    not_capturable(rank.captured(|| chain.drain()), "under way");
                    not_capturable(rank.captured(|| chain.gradient_buffer(rank.ids[0]).map(drop)), "under way");
                    not_capturable(rank.captured(|| chain.submit(buffer)), "under way");
                    assert!(!rank.is_at_rest());
                }
            }
            let sums = rank.finish().unwrap();
            assert_eq!(rank.chain.traffic().allocations, allocations);
            sums
        })
    };
    let sums = given(true);
    assert!(sums[0].iter().take(2).all(|sum| sum.iter().any(|byte| *byte != 0)), "there are some");
    assert!(sums == given(false));
}

/// An eager pass goes on where a capture within it was refused.
#[test]
fn a_capture_within_an_eager_pass_is_refused() {
    ranks(2, |comms| {
        let rank = Rank::prepared(comms, options(1, true), Payload::Nvfp4);
        let expected = rank.forward().unwrap();
        rank.chain.begin(Phase::Forward).unwrap();
        let mut seen = vec![rank.weight(0).unwrap()];
        not_capturable(rank.captured(|| rank.weight(1)), "under way");
        not_capturable(rank.captured(|| rank.chain.end()), "under way");
        not_capturable(rank.captured(|| rank.finish()), "under way");
        seen.extend((1..WEIGHTS).map(|i| rank.weight(i).unwrap()));
        rank.chain.end().unwrap();
        assert!(seen == expected);
    });
}

/// A capture that ends within a pass leaves one that nothing goes on with. Recovery gives it up and keeps all buffers,
/// so that the next capture can follow at once.
#[test]
fn a_capture_that_fails_within_a_pass_is_given_up() {
    for (payload, within) in
        [Payload::Plain, Payload::Nvfp4].into_iter().flat_map(|p| [(p, Phase::Forward), (p, Phase::Backward)])
    {
        ranks(2, |comms| {
            let rank = Rank::prepared(comms, options(2, true), payload);
            let expected = rank.passes(4).unwrap();
            rank.finish().unwrap();
            rank.chain.drain().unwrap();
            let allocations = rank.chain.traffic().allocations;
            let failed: Result<()> = rank.captured(|| {
                if within == Phase::Backward {
                    rank.forward()?;
                }
                rank.chain.begin(within)?;
                let first = if within == Phase::Forward { 0 } else { WEIGHTS - 1 };
                rank.weight(first)?;
                if within == Phase::Backward {
                    rank.gradient(first, 9)?;
                }
                Err(Error::invalid("test", "step", "to end", "an error"))
            });
            assert!(failed.unwrap_err().to_string().contains("an error"));
            let left = |result: Result<()>| {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::WeightState { .. }), "{error:?}");
                assert!(error.to_string().contains("Chain::recover"), "{error}");
            };
            left(rank.chain.begin(Phase::Forward));
            left(rank.weight(1).map(drop));
            left(rank.chain.end());
            left(rank.chain.drain());
            left(rank.finish().map(drop));
            left(rank.chain.whole(rank.ids[0]).map(drop));
            not_capturable(rank.captured(|| rank.chain.begin(Phase::Forward)), "under way");
            rank.chain.recover(None).unwrap();
            let (again, sums) = rank.captured(|| Ok((rank.passes(5)?, rank.finish()?))).unwrap();
            assert!(again != expected, "shards have moved");
            assert!(sums.iter().all(|sum| sum.iter().any(|byte| *byte != 0)));
            assert_eq!(rank.chain.traffic().allocations, allocations);
        });
    }
}

/// A gather that one rank cannot start ahead has its turn all the same: in a capture ranks meet in every collective
/// thread's collectives in one order, and a rank that waited in this one would keep the others waiting in a reduction.
#[test]
fn a_buffer_that_one_rank_lacks_is_reported_in_its_turn() {
    let errors = ranks(2, |comms| {
        let rank = Rank::prepared(comms, options(2, true), Payload::Plain);
        let failed = rank.captured(|| {
            rank.forward()?;
            if rank.chain.rank() == 1 {
                let mut inner = rank.chain.lock();
                let buffer_id = inner.uses.iter().find(|node| node.weight == 0).unwrap().buffer_id;
                drop(inner.cache.take(buffer_id)?);
                inner.cache.forget(buffer_id);
            }
            rank.chain.begin(Phase::Backward)?;
            for i in (0..WEIGHTS).rev() {
                rank.weight(i)?;
                rank.gradient(i, 1)?;
            }
            rank.chain.end()
        });
        rank.chain.recover(None).unwrap();
        rank.passes(2).unwrap();
        failed
    });
    let [refused, own] = <[_; 2]>::try_from(errors).unwrap();
    assert!(matches!(refused, Err(Error::Comm(CommError::Refused { peer: 1, .. }))), "{refused:?}");
    not_capturable(own, "allocate");
}

/// Casts of a capture are made anew by the eager pass that follows: nobody says whether it has run.
#[test]
fn an_eager_pass_takes_nothing_of_a_captures_casts() {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        ranks(2, |comms| {
            let rank = Rank::prepared(comms, options(1, true), payload);
            let whole = |seen: &[Vec<u8>]| -> Vec<f32> { bytemuck::pod_collect_to_vec(&seen.concat()) };
            let before = whole(&rank.captured(|| rank.forward()).unwrap());
            let scaled = |after: &[Vec<u8>], scale: f32| {
                let same = whole(after).iter().zip(&before).all(|(after, before)| *after == scale * before);
                assert!(same, "{payload:?}, {scale} times");
            };
            for scale in [2.0, 4.0] {
                // Of a capture that has not run, or not since.
                rank.double();
                scaled(&rank.forward().unwrap(), scale);
            }
            // A backward too has no other's casts.
            rank.captured(|| rank.forward()).unwrap();
            rank.double();
            rank.chain.begin(Phase::Backward).unwrap();
            let seen: Vec<_> = (0..WEIGHTS).rev().map(|i| rank.weight(i).unwrap()).collect();
            rank.chain.end().unwrap();
            scaled(&seen.into_iter().rev().collect::<Vec<_>>(), 8.0);
        });
    }
}

/// Not even a chain that was ready learns an order in a capture.
#[test]
fn a_capture_needs_an_ordered_chain() {
    ranks(1, |comms| {
        let rank = Rank::prepared(comms, options(1, true), Payload::Plain);
        rank.chain.reset_order().unwrap();
        not_capturable(rank.captured(|| rank.forward()), "not ready");
        rank.passes(1).unwrap();
        rank.finish().unwrap();
        let seen = rank.captured(|| rank.passes(2)).unwrap();
        assert!(seen == rank.passes(2).unwrap());
    });
}

/// Sums over replicas, whose shares are memory of the capture.
#[test]
fn replicas_in_a_capture() {
    let run = |captured: bool| {
        let lone = || ThreadWorld::create(1, Duration::from_secs(60)).remove(0);
        thread::scope(|scope| {
            let start = |mut replicas| {
                let comms = Comms { gather: Box::new(lone()), reduce: Box::new(lone()) };
                scope.spawn(move || {
                    let rank =
                        Rank::new(comms, EtpOptions { replicas: 2, ..options(1, true) }, Payload::Plain).unwrap();
                    let mut found = Vec::new();
                    for step in 0..4 {
                        if captured && step == 1 {
                            rank.chain.prepare_capture().unwrap();
                        }
                        rank.set_capturing(captured && step != 0);
                        found.push((rank.passes(step).unwrap(), rank.finish_over(Some(&mut replicas)).unwrap()));
                        rank.set_capturing(false);
                    }
                    found
                })
            };
            let threads: Vec<_> = ThreadWorld::create(2, Duration::from_secs(60)).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let (eager, captured) = (run(false), run(true));
    assert!(eager[0] == eager[1] && eager[0].windows(2).all(|w| w[0] != w[1]));
    assert!(eager == captured);
}
