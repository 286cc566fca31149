//! Chains whose passes are recorded (CUDA graphs), and run again without the host.
//!
//! In a recording the helper threads enqueue as ever: the event that a collective waits for is of the recording, and so is its
//! stream from there on; the event that the computation takes its result behind joins the streams again. Hence a recording
//! begins with nothing under way and ends so, has no buffer that is not there before, and decides nothing that a later run might
//! have to decide otherwise: sums are added to what is there, and each forward casts.

use std::sync::MutexGuard;

use crate::error::{Error, Result};

use super::chain::{Chain, Inner};
use super::reduce::Main;
use super::{Reduction, ShardDevice};

impl<D: ShardDevice> Chain<D> {
    /// Makes the chain ready for recordings of its passes (`Cuda::capture`), between passes and after an eager step that has
    /// used every buffer (on every rank). A recording has whole passes: gradients that are handed in between a backward's `begin`
    /// and its `end` have reached their main gradients at that `end`, others at once; [`finish`](Self::finish) may be
    /// part of it, or follow its run. Where shards travel quantised, each forward of a recording casts them.
    ///
    /// Recordings are dropped before the chain. Before an eager pass that follows runs of one, [`changed`](Self::changed) says that
    /// shards have changed.
    ///
    /// # Errors
    /// A pass that runs, no forward yet; [`Reduction::Native`], whose sums take memory of another stream; a recording
    /// under way; those of the gradients under way.
    pub fn prepare_recording(&self) -> Result<()> {
        const CALL: &str = "Chain::prepare_recording";
        let mut inner = self.not_recorded(CALL)?;
        if inner.active.is_some() || !inner.is_linked() {
            return Err(inner.trouble("(chain)", "a linked chain between passes, to be recorded", "another"));
        }
        if self.options.reduction == Reduction::Native {
            return Err(Error::invalid(
                CALL,
                "reduction",
                "Pairwise",
                "Native, whose sums take another stream's memory",
            ));
        }
        inner.drop_gathers().and(inner.settle(self))?;
        for Main { sums, first } in inner.weights.iter_mut().filter_map(|weight| weight.main.as_mut()) {
            if *first {
                self.device.zero(sums.view_mut().into_data())?;
                *first = false;
            }
        }
        inner.recorded = true;
        Ok(())
    }

    /// Whether calls are recorded.
    pub(super) fn recording(&self) -> bool {
        #[cfg(test)]
        if self.pretended.load(std::sync::atomic::Ordering::SeqCst) {
            return true;
        }
        self.device.recording()
    }

    /// The chain's state, for a call that may be part of a recording.
    pub(super) fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, Inner<D>>> {
        let (mut inner, recording) = (self.lock(), self.recording());
        inner.tickets.fixed = recording;
        match recording && !inner.recorded {
            false => Ok(inner),
            true => Err(refused(call, "use a chain that is not ready for it (Chain::prepare_recording)")),
        }
    }

    /// The same for a call that may not.
    pub(super) fn not_recorded(&self, call: &'static str) -> Result<MutexGuard<'_, Inner<D>>> {
        match self.recording() {
            false => self.enter(call),
            true => Err(refused(call, "wait for collectives that other threads have begun")),
        }
    }
}

/// What a recording cannot have.
pub(super) fn refused(call: &'static str, operation: &str) -> Error {
    Error::NotCapturable { call, operation: operation.to_string() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::Duration;

    use crate::comm::ThreadWorld;
    use crate::cpu::Cpu;
    use crate::dtype::DType;
    use crate::error::{Error, Result};
    use crate::etp::{Comms, EtpOptions, Payload, Phase, Shard, WeightId, WeightSpec};
    use crate::tensor::Tensor;
    use crate::weights::WeightSource;

    use super::*;

    const DIMS: [usize; 3] = [2, 6, 8];
    const COUNT: usize = 2 * 6 * 8;
    const WEIGHTS: usize = 3;

    struct Rank {
        chain: Chain<Cpu>,
        ids: Vec<WeightId>,
        shards: Vec<Arc<Shard<Cpu>>>,
    }

    fn value(weight: usize, at: usize) -> f32 {
        ((weight * 31 + at * 7) % 23) as f32 / 4.0 - 2.0
    }

    impl Rank {
        fn new(comms: Comms<Cpu>, options: EtpOptions, payload: Payload) -> Result<Self> {
            let chain = Chain::new(Cpu::poisoning(), (), comms, options)?;
            let (mut ids, mut shards) = (Vec::new(), Vec::new());
            for i in 0..WEIGHTS {
                let whole = Tensor::from_vec((0..COUNT).map(|at| value(i, at)).collect::<Vec<f32>>(), &DIMS)?;
                let shard = chain.shards(&DIMS)?.cut(&Cpu::poisoning(), whole.view(), chain.rank())?;
                shards.push(Arc::new(Shard::new(shard)));
                let spec = WeightSpec { payload, ..WeightSpec::new(format!("w{i}"), i as u32, &DIMS, DType::F32) };
                ids.push(chain.add(spec, Arc::clone(&shards[i]) as Arc<_>)?);
            }
            Ok(Self { chain, ids, shards })
        }

        /// A forward and a backward; what weights have been.
        fn passes(&self, step: usize) -> Result<Vec<Vec<u8>>> {
            let mut seen = Vec::new();
            for phase in [Phase::Forward, Phase::Backward] {
                self.chain.begin(phase)?;
                for at in 0..WEIGHTS {
                    let i = if phase == Phase::Forward { at } else { WEIGHTS - 1 - at };
                    let source = self.chain.source(self.ids[i])?;
                    seen.push(source.acquire(&())?.tensor()?.data().to_vec());
                    if phase == Phase::Backward {
                        self.gradient(i, step)?;
                    }
                }
                self.chain.end()?;
            }
            Ok(seen)
        }

        fn gradient(&self, i: usize, step: usize) -> Result<()> {
            let mut room = self.chain.room(self.ids[i])?;
            let values: Vec<f32> = (0..COUNT).map(|at| value(step + self.chain.rank(), at + i)).collect();
            room.view_mut()?.into_data().copy_from_slice(bytemuck::cast_slice(&values));
            self.chain.submit(room)
        }

        /// The gradients; shards move by them.
        fn finish(&self) -> Result<Vec<Vec<u8>>> {
            let mut found = Vec::new();
            self.chain.finish(None, |id, gradient| {
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

        fn record(&self, on: bool) {
            self.chain.pretended.store(on, Ordering::SeqCst);
        }

        /// A recording ends with nothing under way.
        fn is_at_rest(&self) -> bool {
            let inner = self.chain.lock();
            inner.reducing.is_empty() && inner.nodes.iter().all(|node| node.flight.is_none() && node.kept.is_none())
        }
    }

    fn ranks<R: Send>(n: usize, run: impl Fn(Comms<Cpu>) -> R + Sync) -> Vec<R> {
        let lane = || ThreadWorld::create(n, Duration::from_secs(60));
        thread::scope(|scope| {
            let start = |(gather, reduce)| {
                let run = &run;
                scope.spawn(move || run(Comms { gather: Box::new(gather), reduce: Box::new(reduce) }))
            };
            let threads: Vec<_> = lane().into_iter().zip(lane()).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn options(ahead: usize, prefetch: bool) -> EtpOptions {
        EtpOptions { pad: 4, ahead, prefetch, reduction: Reduction::Pairwise, ..EtpOptions::default() }
    }

    type Values = Vec<Vec<u8>>;

    /// Steps of eager passes, and of passes as a recording would have them: the same bits of weights and gradients, no
    /// allocation, nothing under way at the end of any, and the same decisions in each.
    #[test]
    fn recorded_passes_have_the_bits_of_eager_ones() {
        for payload in [Payload::Plain, Payload::Nvfp4, Payload::Mxfp8] {
            for (ahead, prefetch) in [(1, true), (2, true), (1, false)] {
                let run = |recorded: bool| {
                    ranks(2, |comms| -> Result<Vec<[Values; 2]>> {
                        let rank = Rank::new(comms, options(ahead, prefetch), payload)?;
                        let mut found = Vec::new();
                        for step in 0..5 {
                            // An eager step first, and one between.
                            let recording = recorded && step != 0 && step != 3;
                            if recorded && step == 1 {
                                rank.chain.prepare_recording()?;
                            }
                            let before = rank.chain.traffic();
                            rank.record(recording);
                            let mut seen = rank.passes(step)?;
                            seen.extend(rank.passes(step + 7)?);
                            assert!(!recording || rank.is_at_rest());
                            let gradients = rank.finish()?;
                            rank.record(false);
                            let after = rank.chain.traffic();
                            if recording {
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
                let [eager, recorded] =
                    [false, true].map(|recorded| run(recorded).into_iter().collect::<Result<Vec<_>>>().unwrap());
                assert!(eager[0].windows(2).all(|w| w[0] != w[1]), "steps differ");
                assert!(eager == recorded, "{payload:?}, {ahead} ahead, {prefetch}");
            }
        }
    }

    /// What is handed in between a recording's passes has arrived when the call returns.
    #[test]
    fn gradients_between_passes_are_not_left_under_way() {
        ranks(2, |comms| {
            let rank = Rank::new(comms, options(1, true), Payload::Plain).unwrap();
            rank.passes(0).unwrap();
            rank.finish().unwrap();
            rank.chain.prepare_recording().unwrap();
            rank.record(true);
            rank.gradient(1, 4).unwrap();
            assert!(rank.is_at_rest());
            rank.chain.drain().unwrap();
            rank.finish().unwrap();
        });
    }

    #[test]
    fn what_cannot_be_recorded_says_so() {
        ranks(1, |comms| {
            let rank = Rank::new(comms, options(1, true), Payload::Nvfp4).unwrap();
            let refused = |result: Result<()>, what: &str| match result {
                Err(Error::NotCapturable { operation, .. }) => assert!(operation.contains(what), "{operation}"),
                other => panic!("{other:?}"),
            };
            let recorded = |call: &dyn Fn() -> Result<()>, what: &str| {
                rank.record(true);
                let result = call();
                rank.record(false);
                refused(result, what);
            };
            assert!(rank.chain.prepare_recording().unwrap_err().to_string().contains("linked"));
            rank.passes(0).unwrap();
            let not_ready = "not ready";
            recorded(&|| rank.chain.begin(Phase::Forward), not_ready);
            recorded(&|| rank.chain.room(rank.ids[0]).map(drop), not_ready);
            recorded(&|| rank.chain.finish(None, |_, _| Ok(())), not_ready);
            recorded(&|| rank.chain.drain(), not_ready);
            recorded(&|| rank.chain.prepare_recording(), "other threads");
            rank.chain.prepare_recording().unwrap();
            recorded(&|| rank.chain.whole(rank.ids[0]).map(drop), "other threads");
            recorded(&|| rank.chain.recover(None), "other threads");
            recorded(&|| rank.chain.relink(), "other threads");
            // Gradients of before the recording.
            rank.gradient(0, 1).unwrap();
            recorded(&|| rank.chain.begin(Phase::Forward), "under way");
            rank.chain.drain().unwrap();
            // Buffers that are gone are not made anew inside.
            rank.chain.clear();
            recorded(&|| rank.passes(0).map(drop), "first use");
            rank.chain.recover(None).unwrap();
            rank.passes(0).unwrap();
            rank.chain.drain().unwrap();
            rank.record(true);
            rank.passes(1).unwrap();
            rank.finish().unwrap();
        });
        ranks(1, |comms| {
            let native = EtpOptions { reduction: Reduction::Native, ..options(1, true) };
            let rank = Rank::new(comms, native, Payload::Plain).unwrap();
            rank.passes(0).unwrap();
            assert!(rank.chain.prepare_recording().unwrap_err().to_string().contains("Pairwise"));
        });
    }

    /// Main gradients stay where they are, whatever becomes of a step: a recording has their addresses.
    #[test]
    fn recovery_keeps_what_recordings_refer_to() {
        ranks(1, |comms| {
            let rank = Rank::new(comms, options(1, true), Payload::Plain).unwrap();
            rank.passes(0).unwrap();
            rank.chain.prepare_recording().unwrap();
            let addresses = || -> Vec<usize> {
                let inner = rank.chain.lock();
                let main =
                    |w: &super::super::chain::Weight<Cpu>| w.main.as_ref().map(|main| main.sums.as_bytes().as_ptr());
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
}
