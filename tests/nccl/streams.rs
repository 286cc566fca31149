//! A chain's collectives on streams of their own: what goes on beside what, and who waits for whom.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::{result, sys};
use moebius::etp::{
    Chain, Comms, EtpOptions, Payload, Phase, Reduction, Shard, ShardDevice, Shares, WeightId, WeightSpec,
};
use moebius::kernels::Kernels;
use moebius::weights::WeightSource;
use moebius::{CommError, DType, Device, Error, Result, Tensor, TensorRef};

use crate::Run;
use crate::conformance::seed;
use crate::etp::faulty_comm::FaultyComm;
use crate::etp::gpus;

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("same_bits_under_load", same_bits_under_load),
        ("no_host_waits_for_a_gpu", no_host_waits_for_a_gpu),
        ("a_lost_rank_is_told_to_the_computation", a_lost_rank_is_told_to_the_computation),
        ("a_communicator_without_a_device_is_refused", a_communicator_without_a_device_is_refused),
        ("memory_comes_back", memory_comes_back),
        ("shares_add_to_the_cpus_bits", shares_add_to_the_cpus_bits),
    ]
}

pub const MINUTE: Duration = Duration::from_secs(60);
/// Weights large enough that a gather takes long beside a call's start.
const DIMS: [usize; 3] = [4, 512, 1024];
const COUNT: usize = 4 * 512 * 1024;

/// One rank with a chain of weights of `DIMS`, whose elements are 1 + the weight's number, in bf16.
struct Rank {
    rank: usize,
    cuda: Cuda,
    chain: Chain<Cuda>,
    ids: Vec<WeightId>,
}

impl Rank {
    /// Fills a tensor with a number.
    fn number(cuda: &Cuda, value: f64, dims: &[usize]) -> Tensor<Cuda> {
        let mut one = cuda.write(&vec![value; dims[dims.len() - 1]], DType::BF16, &dims[dims.len() - 1..]).unwrap();
        let mut out = Tensor::empty(cuda, DType::BF16, dims).unwrap();
        let row = one.bytes();
        let rows = out.bytes() / row;
        let mut done = 1;
        cuda.copy(one.view_mut().as_ref().data(), Cuda::slice_mut(out.view_mut().into_data(), 0..row)).unwrap();
        while done < rows {
            let more = done.min(rows - done);
            let from = Cuda::slice(out.view().data(), 0..more * row);
            // SAFETY: the rows behind those that are there; nothing else has the tensor.
            let from = unsafe { moebius::cuda::DeviceRef::from_raw(from.address(), more * row) };
            let to = Cuda::slice_mut(out.view_mut().into_data(), done * row..(done + more) * row);
            cuda.copy(from, to).unwrap();
            done += more;
        }
        out
    }

    fn new(rank: usize, comms: Comms<Cuda>, options: EtpOptions, weights: usize, payload: Payload) -> Result<Self> {
        let (_, mut all) = gpus::first(rank + 1);
        let cuda = all.swap_remove(rank);
        let chain = Chain::new(cuda.clone(), comms, options)?;
        let mut ids = Vec::new();
        for i in 0..weights {
            let cut = chain.shards(&DIMS)?;
            let shard = Self::number(&cuda, 1.0 + i as f64, &cut.shard_dims());
            let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, DType::BF16);
            spec.payload = payload;
            ids.push(chain.add(spec, Arc::new(Shard::new(shard)))?);
        }
        Ok(Self { rank, cuda, chain, ids })
    }

    /// A forward that uses each weight.
    fn pass(&self) -> Result<()> {
        self.chain.begin(Phase::Forward)?;
        for id in &self.ids {
            drop(self.chain.source(*id)?.acquire()?);
        }
        self.chain.end()
    }

    /// Keeps the computation busy for a while.
    fn load(&self, buffer: &mut Tensor<Cuda>, times: usize) {
        for _ in 0..times {
            self.cuda.zero(buffer.view_mut().into_data()).unwrap();
        }
    }
}

pub fn ranks<R: Send>(n: usize, limit: Duration, run: impl Fn(usize, Comms<Cuda>) -> R + Sync) -> Vec<R> {
    let all: Vec<usize> = (0..n).collect();
    let comms_for = |name| gpus::for_purpose(&all, (name, crate::etp::has_memory()), limit);
    let comms = comms_for("gather").into_iter().zip(comms_for("reduce"));
    thread::scope(|scope| {
        let start = |(rank, (gather, reduce))| {
            let run = &run;
            scope.spawn(move || run(rank, Comms { gather: Box::new(gather), reduce: Box::new(reduce) }))
        };
        let threads: Vec<_> = comms.enumerate().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Steps of many passes without a wait, with work between that is longer than a gather, and shorter: each weight holds
/// its own values when the computation reads it, and each gradient what was handed in.
fn same_bits_under_load(_: &Cuda, n: usize) {
    let (plain, pairs) = (Payload::Plain, Reduction::Pairwise);
    let plain = [(1, 0), (1, 3), (2, 40), (2, 3), (0, 3)].map(|(ahead, load)| (pairs, plain, ahead, load));
    let others =
        [(Reduction::Native, Payload::Plain, 2, 3), (pairs, Payload::Nvfp4, 1, 3), (pairs, Payload::Nvfp4, 2, 3)];
    for (reduction, payload, ahead, load) in plain.into_iter().chain(others) {
        ranks(n, MINUTE, |rank, comms| {
            let prefetch = ahead > 0;
            let options = EtpOptions { prefetch, ahead: ahead.max(1), reduction, ..EtpOptions::default() };
            let weights = 5;
            let rank = Rank::new(rank, comms, options, weights, payload).unwrap();
            let (cuda, chain) = (&rank.cuda, &rank.chain);
            let mut noise = Tensor::empty(cuda, DType::U8, &[1 << 28]).unwrap();
            let mut seen = Vec::new();
            for step in 0..2 {
                for phase in [Phase::Forward, Phase::Backward] {
                    chain.begin(phase).unwrap();
                    for at in 0..weights {
                        let i = if phase == Phase::Forward { at } else { weights - 1 - at };
                        let source = chain.source(rank.ids[i]).unwrap();
                        let guard = source.acquire().unwrap();
                        rank.load(&mut noise, load);
                        let copy = guard.tensor().unwrap();
                        let mut own = Tensor::empty(cuda, DType::BF16, &DIMS).unwrap();
                        cuda.copy(copy.data(), own.view_mut().into_data()).unwrap();
                        seen.push((i, own));
                        drop(guard);
                        if phase == Phase::Backward {
                            let mut buffer = chain.gradient_buffer(rank.ids[i]).unwrap();
                            let value = Rank::number(cuda, (8 * step + i + rank.rank) as f64, &DIMS);
                            cuda.copy(value.view().data(), buffer.view_mut().unwrap().into_data()).unwrap();
                            chain.submit(buffer).unwrap();
                        }
                    }
                    chain.end().unwrap();
                }
                let mut sums = Vec::new();
                let take = |_: WeightId, gradient: TensorRef<'_, Cuda>| {
                    sums.push(cuda.download(gradient)?);
                    Ok(())
                };
                chain.finish(None, take).unwrap();
                for (i, sum) in sums.iter().enumerate() {
                    // Small integers: exact in bf16 and in f32.
                    let expected = (0..n).map(|r| (8 * step + i + r) as f32).sum::<f32>().to_ne_bytes();
                    assert!(sum.chunks_exact(4).all(|v| v == expected), "gradient {i} of step {step}");
                }
            }
            for (number, (i, own)) in seen.into_iter().enumerate() {
                let expected = half::bf16::from_f32(1.0 + i as f32).to_ne_bytes();
                let values = cuda.download(own.view()).unwrap();
                assert_eq!(values.len(), 2 * COUNT);
                let same = values.chunks_exact(2).all(|v| v == expected);
                assert!(same, "use {number} of weight {i}, {ahead} ahead, load {load}, {payload:?}");
            }
            if prefetch {
                assert!(chain.traffic().ahead >= 12, "{:?}", chain.traffic());
            }
        });
    }
}

/// Keeps a GPU's stream from going on until it is opened: the stream waits for a word of the host's memory.
struct Gate(&'static AtomicU32);

impl Gate {
    fn shut(cuda: &Cuda) -> Self {
        let stream = cuda.stream();
        stream.context().bind_to_thread().unwrap();
        // SAFETY: the context is this thread's; the memory is never freed, as a stream may wait for it.
        let memory = unsafe { result::malloc_host(size_of::<u32>(), 0) }.unwrap();
        // SAFETY: page-locked memory of four bytes, aligned to far more, which nothing else has.
        let word = unsafe { &*memory.cast::<AtomicU32>() };
        word.store(0, Ordering::SeqCst);
        // SAFETY: the stream lives; page-locked memory has the same address for the GPU.
        let status = unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), memory as u64, 1, 0) };
        status.result().unwrap();
        Self(word)
    }

    fn open(&self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// Passes are enqueued while the computation has not gone on.
fn no_host_waits_for_a_gpu(_: &Cuda, n: usize) {
    ranks(n, MINUTE, |rank, comms| {
        let weights = 4;
        let rank = Rank::new(rank, comms, EtpOptions::default(), weights, Payload::Plain).unwrap();
        let (cuda, chain) = (&rank.cuda, &rank.chain);
        let pass = |phase, reversed: bool| {
            chain.begin(phase).unwrap();
            for at in 0..weights {
                let i = if reversed { weights - 1 - at } else { at };
                let source = chain.source(rank.ids[i]).unwrap();
                drop(source.acquire().unwrap());
                if reversed {
                    let mut buffer = chain.gradient_buffer(rank.ids[i]).unwrap();
                    cuda.zero(buffer.view_mut().unwrap().into_data()).unwrap();
                    chain.submit(buffer).unwrap();
                }
            }
            chain.end().unwrap();
        };
        let passes = || {
            pass(Phase::Forward, false);
            pass(Phase::Backward, true);
        };
        let finish = || chain.finish(None, |_, _| Ok(())).unwrap();
        for _ in 0..2 {
            passes();
            finish();
        }
        cuda.check().unwrap();
        let gate = &Gate::shut(cuda);
        let before = cuda.record().unwrap();
        let (enqueued, told) = mpsc::channel::<()>();
        let waited = thread::scope(|scope| {
            scope.spawn(move || {
                // A host that waits for its GPU goes on when this is over, and is found out.
                let _ = told.recv_timeout(MINUTE / 3);
                gate.open();
            });
            passes();
            let waited = before.is_done().unwrap();
            drop(enqueued);
            waited
        });
        assert!(!waited, "the host has waited");
        // It reads how many passes each rank has made, behind the gathers.
        finish();
        cuda.check().unwrap();
    });
}

/// A rank that does not come to a collective which the others have begun: who waits for the computation hears of it.
fn a_lost_rank_is_told_to_the_computation(_: &Cuda, n: usize) {
    let errors = ranks(n, Duration::from_secs(2), |rank, comms| -> Option<Error> {
        let last = rank + 1 == n;
        let rank = Rank::new(rank, comms, EtpOptions::default(), 2, Payload::Plain).unwrap();
        let pass = || rank.pass().and_then(|()| rank.cuda.check());
        pass().unwrap();
        if last { None } else { pass().err() }
    });
    for error in &errors[..n - 1] {
        let lost = matches!(error, Some(Error::Comm(CommError::PeerGone { .. })));
        assert!(lost, "{error:?}");
    }
}

fn a_communicator_without_a_device_is_refused(_: &Cuda, n: usize) {
    let all: Vec<usize> = (0..n).collect();
    let comms = gpus::among(&all, "gather", MINUTE).into_iter().zip(gpus::among(&all, "reduce", MINUTE));
    thread::scope(|scope| {
        for (rank, (gather, reduce)) in comms.enumerate() {
            scope.spawn(move || {
                let reduce = FaultyComm { hides_device: true, ..FaultyComm::new(Box::new(reduce)) };
                let comms = Comms::<Cuda> { gather: Box::new(gather), reduce: Box::new(reduce) };
                let error = Rank::new(rank, comms, EtpOptions::default(), 1, Payload::Plain).err().unwrap().to_string();
                assert!(error.contains("comms.reduce") && error.contains("device"), "{error}");
            });
        }
    });
}

/// Steps take nothing more of the driver once sizes are known, and a dropped chain gives everything back.
fn memory_comes_back(_: &Cuda, n: usize) {
    ranks(n, MINUTE, |rank, comms| {
        let (_, mut all) = gpus::first(rank + 1);
        let cuda = all.swap_remove(rank);
        let before = cuda.memory().in_use;
        {
            let rank = Rank::new(rank, comms, EtpOptions::default(), 3, Payload::Mxfp8).unwrap();
            let chain = &rank.chain;
            let mut allocations = Vec::new();
            for _ in 0..4 {
                for (phase, order) in [(Phase::Forward, [0, 1, 2]), (Phase::Backward, [2, 1, 0])] {
                    chain.begin(phase).unwrap();
                    for i in order {
                        drop(chain.source(rank.ids[i]).unwrap().acquire().unwrap());
                        if phase == Phase::Backward {
                            let mut buffer = chain.gradient_buffer(rank.ids[i]).unwrap();
                            cuda.zero(buffer.view_mut().unwrap().into_data()).unwrap();
                            chain.submit(buffer).unwrap();
                        }
                    }
                    chain.end().unwrap();
                }
                chain.finish(None, |_, _| Ok(())).unwrap();
                allocations.push((cuda.memory().allocations, chain.traffic().allocations));
            }
            assert_eq!(allocations[1..3], allocations[2..4], "{allocations:?}");
        }
        // Helper threads end a moment later.
        let until = Instant::now() + Duration::from_secs(5);
        while cuda.memory().in_use != before && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(cuda.memory().in_use, before);
        cuda.check().unwrap();
    });
}

/// The first block as this rank's own, wherever that comes among the rest.
fn apart<D: Device>(all: TensorRef<'_, D>, (rank, first): (usize, bool)) -> Shares<'_, D> {
    let count = all.dims()[1];
    Shares { rank, ..Shares::together(all, count, 0.3, first).unwrap() }
}

/// Any number of parts, of any size and at any address.
fn shares_add_to_the_cpus_bits(cuda: &Cuda, _: usize) {
    let numbers = |own: u64, count: usize| -> Vec<f64> {
        let mut state = seed::seed(own) | 1;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as f64 / (1u64 << 31) as f64 - 0.5
        };
        (0..count).map(|_| 100.0 * next()).collect()
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (parts, rank, first) in [
            (1, 0, false),
            (1, 0, true),
            (2, 1, true),
            (3, 1, false),
            (4, 2, true),
            (5, 0, true),
            (8, 7, false),
            (11, 4, true),
            (64, 63, false),
        ] {
            for (count, skip) in [(1, 0), (7, 0), (24, 0), (24, 3), (1 << 13, 0), ((1 << 13) + 4, 1)] {
                let shares = Cpu::new().write(&numbers(7, parts * count + skip), dtype, &[parts * count + skip]);
                let shares = shares.unwrap();
                let mut expected = Cpu::new().write(&numbers(9, count), DType::F32, &[count]).unwrap();
                let (on_gpu, mut main) = (shares.to(cuda).unwrap(), expected.to(cuda).unwrap());
                let bytes = skip * dtype.size()..(skip + parts * count) * dtype.size();
                let all =
                    TensorRef::<Cpu>::new(Cpu::slice(shares.view().data(), bytes.clone()), dtype, &[parts, count]);
                Cpu::new().add_shares(apart(all.unwrap(), (rank, first)), expected.view_mut()).unwrap();
                let all = TensorRef::<Cuda>::new(Cuda::slice(on_gpu.view().data(), bytes), dtype, &[parts, count]);
                cuda.add_shares(apart(all.unwrap(), (rank, first)), main.view_mut()).unwrap();
                let found = cuda.to_host(main.view()).unwrap();
                assert!(
                    found.as_bytes() == expected.as_bytes(),
                    "{dtype}: {parts} parts of {count}, from {skip}, own {rank}"
                );
            }
        }
    }
    let (mut main, shares) =
        (Tensor::zeros(cuda, DType::F32, &[4]).unwrap(), Tensor::zeros(cuda, DType::F32, &[6]).unwrap());
    let shares = Shares::together(shares.view(), 4, 1.0, false).unwrap();
    let error = cuda.add_shares(shares, main.view_mut()).unwrap_err().to_string();
    assert!(error.contains("shares") && error.contains("blocks of main's size"), "{error}");
}
