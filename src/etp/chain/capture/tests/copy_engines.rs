//! Captures over communicators that have memory of their own, as copy engines' have.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::comm::{Exchange, ReduceOp, Tag};
use crate::cpu::ThreadComm;
use crate::tensor::{TensorMut, TensorRef};

/// Threads' communicator with memory, whose requests are counted.
#[derive(Debug)]
struct WithMemory(ThreadComm, Arc<AtomicUsize>);

impl WithMemory {
    fn inner(&mut self) -> &mut dyn Communicator<Cpu> {
        &mut self.0
    }
}

impl Communicator<Cpu> for WithMemory {
    fn rank(&self) -> usize {
        Communicator::<Cpu>::rank(&self.0)
    }
    fn size(&self) -> usize {
        Communicator::<Cpu>::size(&self.0)
    }
    fn calls(&self) -> u64 {
        Communicator::<Cpu>::calls(&self.0)
    }
    fn uses_copy_engines(&self) -> bool {
        true
    }
    fn memory(&mut self, tag: Tag, dtype: DType, dims: &[usize]) -> Result<Option<Tensor<Cpu>>> {
        self.1.fetch_add(1, Ordering::SeqCst);
        self.inner().barrier(tag)?;
        Tensor::empty(&Cpu::poisoning(), dtype, dims).map(Some)
    }
    fn all_gather(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        self.inner().all_gather(tag, send, recv)
    }
    fn gather_in_place(&mut self, tag: Tag, mut buffer: TensorMut<'_, Cpu>) -> Result<()> {
        let bytes = buffer.count() * buffer.dtype().size() / Communicator::<Cpu>::size(self);
        let at = Communicator::<Cpu>::rank(self) * bytes;
        let own = Tensor::from_vec(buffer.reborrow().into_data()[at..at + bytes].to_vec(), &[bytes])?;
        let all = TensorMut::new(buffer.into_data(), DType::U8, &[bytes * Communicator::<Cpu>::size(self)])?;
        self.all_gather(tag, own.view(), all)
    }
    fn reduce_scatter(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        self.inner().reduce_scatter(tag, send, recv)
    }
    fn all_reduce(&mut self, tag: Tag, op: ReduceOp, buffer: TensorMut<'_, Cpu>) -> Result<()> {
        self.inner().all_reduce(tag, op, buffer)
    }
    fn all_to_all_v(&mut self, tag: Tag, exchange: Exchange<'_, Cpu>) -> Result<()> {
        self.inner().all_to_all_v(tag, exchange)
    }
    fn exchange_blocks(&mut self, tag: Tag, send: TensorRef<'_, Cpu>, recv: TensorMut<'_, Cpu>) -> Result<()> {
        self.inner().exchange_blocks(tag, send, recv)
    }
    fn broadcast(&mut self, tag: Tag, root: usize, buffer: TensorMut<'_, Cpu>) -> Result<()> {
        self.inner().broadcast(tag, root, buffer)
    }
    fn barrier(&mut self, tag: Tag) -> Result<()> {
        self.inner().barrier(tag)
    }
    fn refuse(&mut self, tag: Tag, reason: &str) -> Result<()> {
        self.inner().refuse(tag, reason)
    }
}

/// Ranks whose collective threads have memory, and how often each rank's have been asked for it.
fn ranks<R: Send>(n: usize, run: impl Fn(Comms<Cpu>, &AtomicUsize) -> R + Sync) -> Vec<R> {
    let comms = || ThreadWorld::create(n, Duration::from_secs(60));
    thread::scope(|scope| {
        let start = |(gather, reduce)| {
            let run = &run;
            scope.spawn(move || {
                let asked = Arc::<AtomicUsize>::default();
                let with = |comm| Box::new(WithMemory(comm, Arc::clone(&asked)));
                run(Comms { gather: with(gather), reduce: with(reduce) }, &asked)
            })
        };
        let threads: Vec<_> = comms().into_iter().zip(comms()).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Passes of a capture over copy engines: the bits of eager ones, in windows that are there before it.
#[test]
fn captures_over_copy_engines_have_the_bits_of_eager_passes() {
    for (payload, in_turn) in [(Payload::Plain, false), (Payload::Plain, true), (Payload::Nvfp4, true)] {
        let run = |captured: bool| {
            ranks(2, |comms, asked| {
                let rank = Rank::new(comms, EtpOptions { in_turn, ..options(2, true) }, payload).unwrap();
                assert!(rank.chain.uses_copy_engines());
                let mut found = vec![(rank.passes(0).unwrap(), rank.finish().unwrap())];
                rank.forward().unwrap();
                if captured {
                    rank.chain.prepare_capture().unwrap();
                }
                let before = asked.load(Ordering::SeqCst);
                for step in 1..5 {
                    // An eager step between.
                    let capture = captured && step != 3;
                    rank.set_capturing(capture);
                    found.push((rank.passes(step).unwrap(), rank.finish().unwrap()));
                    assert!(!capture || rank.is_at_rest());
                    rank.set_capturing(false);
                }
                assert!(before > 0 && asked.load(Ordering::SeqCst) == before, "no window more");
                found
            })
        };
        let (eager, captured) = (run(false), run(true));
        assert!(eager[0].windows(2).all(|w| w[0] != w[1]), "steps differ");
        assert!(eager == captured, "{payload:?}, in turn {in_turn}");
    }
}
