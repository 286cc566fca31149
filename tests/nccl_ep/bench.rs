//! Times of the library's calls: through this crate's safe layer, which uses the expert-major layout; raw on the same
//! handle (`raw`); and raw of the flat layout (`raw-flat`), which this crate does not use, on a group and a handle of
//! its own. All in the same process, in turns, of the same tokens. JSON lines on stdout. Bytes are counted once per
//! (token, rank) and once per (token, expert), a rank's own apart.
//!
//! Static capacities are those of the layout: flat's is all ranks' tokens. Every call of the flat layout is checked
//! once before it is timed.
//!
//! Words behind `bench` choose steps by workload and tokens, each with an eager capacity:
//! `nccl_ep bench dsv3:4096 qwen3-30b-a3b:8192`.

use std::ffi::c_void;
use std::sync::Barrier;
use std::time::Instant;

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;
use half::bf16;
use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::cuda::{Cuda, cudarc};
use moebius::nccl_ep::{
    CombineArgs, DispatchArgs, HandleOptions, HighThroughputGroup, HighThroughputHandle, HighThroughputOptions,
    PassDirection, UpdateCounters, sys,
};
use moebius::{DType, Error, Result, Tensor};

use crate::conformance::seed;
use crate::flat::Flat;
use crate::raw::{Endpoint, each};

const WARM: usize = 5;
const ROUNDS: usize = 40;

/// A layer's sizes.
#[derive(Clone, Copy)]
pub struct Shape {
    name: &'static str,
    pub hidden: usize,
    pub experts: usize,
    pub k: usize,
}

const DSV3: Shape = Shape { name: "dsv3", hidden: 7168, experts: 256, k: 8 };
const QWEN3: Shape = Shape { name: "qwen3-30b-a3b", hidden: 2048, experts: 128, k: 8 };

#[derive(Clone, Copy)]
pub struct Run {
    pub shape: Shape,
    pub tokens: usize,
    zipf: bool,
    /// Whether receive buffers have a static capacity.
    pub fixed: bool,
}

/// Runs what the words choose, or all without words.
pub fn run(available: usize, words: &[String]) -> std::result::Result<(), String> {
    let runs = if words.is_empty() {
        all_runs()
    } else {
        words.iter().map(|w| chosen(w)).collect::<std::result::Result<_, _>>()?
    };
    // The other ranks would wait without end for one that panicked.
    let told = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        told(info);
        std::process::abort();
    }));
    for ranks in [2, 4, 8].into_iter().filter(|r| *r <= available) {
        for run in &runs {
            each(ranks, |endpoint| {
                let (rank, done) = (endpoint.comm.rank(), measure(endpoint, run));
                assert!(done.is_ok(), "rank {rank}: {done:?}");
                done
            });
        }
    }
    Ok(())
}

fn plain(shape: Shape, tokens: usize) -> Run {
    Run { shape, tokens, zipf: false, fixed: true }
}

fn all_runs() -> Vec<Run> {
    let mut runs: Vec<Run> = [128, 2048, 4096, 8192].map(|t| plain(DSV3, t)).to_vec();
    runs.push(Run { fixed: false, ..plain(DSV3, 4096) });
    runs.push(Run { zipf: true, ..plain(DSV3, 4096) });
    runs.push(plain(QWEN3, 4096));
    runs.push(Run { fixed: false, ..plain(QWEN3, 8192) });
    runs
}

/// The eager run of a word, which is a workload and tokens.
fn chosen(word: &str) -> std::result::Result<Run, String> {
    let found = word.split_once(':').and_then(|(name, tokens)| {
        let shape = [DSV3, QWEN3].into_iter().find(|shape| shape.name == name)?;
        Some(Run { fixed: false, ..plain(shape, tokens.parse().ok()?) })
    });
    found.ok_or_else(|| format!("{word}: expected {}:TOKENS or {}:TOKENS", DSV3.name, QWEN3.name))
}

/// A token's row: whole numbers that bf16 has, as it has their sum over 8 ranks.
pub fn value(rank: usize, token: usize, column: usize) -> f64 {
    ((rank * 37 + token * 5 + column) % 61) as f64 - 30.0
}

/// A rank's rows and weights. Each weight is the number of its choice over all ranks, from 1, which f32 has exactly.
fn sent(cuda: &Cuda, run: &Run, rank: usize) -> Result<[Tensor<Cuda>; 2]> {
    let (t, h, k) = (run.tokens, run.shape.hidden, run.shape.k);
    let x = (0..t * h).map(|i| bf16::from_f64(value(rank, i / h, i % h))).collect::<Vec<_>>();
    let w = (0..t * k).map(|i| (rank * t * k + i + 1) as f32).collect::<Vec<_>>();
    Ok([Tensor::<Cpu>::from_vec(x, &[t, h])?.to(cuda)?, Tensor::<Cpu>::from_vec(w, &[t, k])?.to(cuda)?])
}

/// Seeded choices; with `zipf`, expert e is chosen in proportion to 1 / (e + 1).
fn ids(run: &Run, rank: usize) -> Vec<i64> {
    let mut state = seed::seed(rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let e = run.shape.experts;
    let weight = |i: usize| if run.zipf { 1.0 / (i + 1) as f64 } else { 1.0 };
    let mut ids = Vec::with_capacity(run.tokens * run.shape.k);
    for _ in 0..run.tokens {
        // The largest of u^(1/w) are a sample without replacement in proportion to w.
        let mut keys: Vec<(f64, usize)> = (0..e).map(|i| (next().ln() / weight(i), i)).collect();
        keys.select_nth_unstable_by(run.shape.k - 1, |a, b| b.0.total_cmp(&a.0));
        ids.extend(keys[..run.shape.k].iter().map(|(_, i)| *i as i64));
    }
    ids
}

/// Tensors of a step.
pub struct Step {
    pub ids: Tensor<Cuda>,
    counters: [Tensor<Cuda>; 3],
    pub x: Tensor<Cuda>,
    pub w: Tensor<Cuda>,
    rows: Tensor<Cuda>,
    rows_w: Tensor<Cuda>,
    y: Tensor<Cuda>,
    d_w: Tensor<Cuda>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Phase {
    Prepare,
    Dispatch,
    Combine,
    CombineBwd,
    DispatchBwd,
}

const PHASES: [(Phase, &str); 5] = [
    (Phase::Prepare, "prepare"),
    (Phase::Dispatch, "dispatch"),
    (Phase::Combine, "combine"),
    (Phase::CombineBwd, "combine_bwd"),
    (Phase::DispatchBwd, "dispatch_bwd"),
];

impl Step {
    fn safe(&mut self, phase: Phase, handle: &mut HighThroughputHandle) -> Result<()> {
        let [counts, offsets, total] = &mut self.counters;
        match phase {
            Phase::Prepare => {
                let counters =
                    UpdateCounters { counts: counts.view_mut(), offsets: offsets.view_mut(), total: total.view_mut() };
                handle.update(self.ids.view(), counters)
            }
            Phase::Dispatch | Phase::CombineBwd => {
                let forward = phase == Phase::Dispatch;
                let rows = DispatchArgs {
                    tokens: self.x.view(),
                    weights: forward.then(|| self.w.view()),
                    scales: None,
                    out: self.rows.view_mut(),
                    out_weights: forward.then(|| self.rows_w.view_mut()),
                    out_scales: None,
                };
                handle.dispatch(if forward { PassDirection::Forward } else { PassDirection::Backward }, rows)
            }
            Phase::Combine | Phase::DispatchBwd => {
                let backward = phase == Phase::DispatchBwd;
                let rows = CombineArgs {
                    rows: self.rows.view(),
                    weights: backward.then(|| self.rows_w.view()),
                    out: self.y.view_mut(),
                    out_weights: backward.then(|| self.d_w.view_mut()),
                };
                handle.combine(if backward { PassDirection::Backward } else { PassDirection::Forward }, rows)
            }
        }
    }

    /// The same call as a C program would make it.
    fn raw(&mut self, phase: Phase, handle: &HighThroughputHandle, stream: sys::cudaStream_t) {
        let library = handle.group().library().functions();
        let (t, k, n) = (self.x.dims()[0], self.w.dims()[1], self.rows.dims()[0]);
        let (h, l) = (self.x.dims()[1], self.counters[0].dims()[0]);
        let mut sizes = [[t, h, 0], [t, k, 0], [n, h, 0], [n, 0, 0], [l, 0, 0], [1, 0, 0]];
        let mut of = |i: usize, ndim: u32, datatype, data: u64| sys::ncclEpTensor_t {
            size: size_of::<sys::ncclEpTensor_t>() as u32,
            magic: sys::NCCL_EP_TENSOR_MAGIC,
            ndim,
            datatype,
            data: data as *mut c_void,
            win_hdl: std::ptr::null_mut(),
            win_offset: 0,
            sizes: sizes[i].as_mut_ptr(),
        };
        let (bf16, f32, i64) =
            (sys::ncclDataType_t::ncclBfloat16, sys::ncclDataType_t::ncclFloat32, sys::ncclDataType_t::ncclInt64);
        let mut x = of(0, 2, bf16, self.x.view().data().address());
        let mut w = of(1, 2, f32, self.w.view().data().address());
        let mut rows = of(2, 2, bf16, self.rows.view().data().address());
        let mut rows_w = of(3, 1, f32, self.rows_w.view().data().address());
        let mut y = of(0, 2, bf16, self.y.view().data().address());
        let mut d_w = of(1, 2, f32, self.d_w.view().data().address());
        let mut ids = of(1, 2, i64, self.ids.view().data().address());
        let counters = &self.counters;
        let mut counter = |i: usize| of(if i == 2 { 5 } else { 4 }, 1, i64, counters[i].view().data().address());
        let (mut counts, mut offsets, mut total) = (counter(0), counter(1), counter(2));
        let null = std::ptr::null_mut;
        let magic = sys::NCCL_EP_MAGIC;
        let direction = match phase {
            Phase::CombineBwd | Phase::DispatchBwd => sys::ncclEpPassDir_t::NCCL_EP_BWD_PASS,
            _ => sys::ncclEpPassDir_t::NCCL_EP_FWD_PASS,
        };
        let raw = handle.raw();
        // SAFETY: the handle lives; tensors have the sizes that the library documents and outlive the stream's work.
        let status = unsafe {
            match phase {
                Phase::Prepare => {
                    let info = sys::ncclEpLayoutInfo_t {
                        size: size_of::<sys::ncclEpLayoutInfo_t>() as u32,
                        magic,
                        expert_counters: &raw mut counts,
                        src_rank_counters: null(),
                        expert_offsets: &raw mut offsets,
                        recv_total_counter: &raw mut total,
                        recv_topk_idx_kind: sys::ncclEpExpertIdKind_t(0),
                        padding_v2: [0; 4],
                    };
                    library.ncclEpUpdateHandle(raw, &raw mut ids, &info, stream)
                }
                Phase::Dispatch | Phase::CombineBwd => {
                    let forward = phase == Phase::Dispatch;
                    let inputs = sys::ncclEpDispatchInputs_t {
                        size: size_of::<sys::ncclEpDispatchInputs_t>() as u32,
                        magic,
                        tokens: &raw mut x,
                        topk_weights: if forward { &raw mut w } else { null() },
                        scales: null(),
                    };
                    let outputs = sys::ncclEpDispatchOutputs_t {
                        size: size_of::<sys::ncclEpDispatchOutputs_t>() as u32,
                        magic,
                        tokens: &raw mut rows,
                        topk_weights: if forward { &raw mut rows_w } else { null() },
                        scales: null(),
                        topk_idx: null(),
                    };
                    let config = sys::ncclEpDispatchConfig_t {
                        size: size_of::<sys::ncclEpDispatchConfig_t>() as u32,
                        magic,
                        send_only: 0,
                        round_scales: 0,
                        pass_direction: direction,
                        quant_recipe: sys::ncclEpDispQuant_t(0),
                    };
                    library.ncclEpDispatch(raw, &inputs, &outputs, std::ptr::null(), &config, stream)
                }
                Phase::Combine | Phase::DispatchBwd => {
                    let backward = phase == Phase::DispatchBwd;
                    let inputs = sys::ncclEpCombineInputs_t {
                        size: size_of::<sys::ncclEpCombineInputs_t>() as u32,
                        magic,
                        tokens: &raw mut rows,
                        topk_weights: if backward { &raw mut rows_w } else { null() },
                        scales: null(),
                    };
                    let outputs = sys::ncclEpCombineOutputs_t {
                        size: size_of::<sys::ncclEpCombineOutputs_t>() as u32,
                        magic,
                        tokens: &raw mut y,
                        topk_weights: if backward { &raw mut d_w } else { null() },
                    };
                    let config = sys::ncclEpCombineConfig_t {
                        size: size_of::<sys::ncclEpCombineConfig_t>() as u32,
                        magic,
                        send_only: 0,
                        pass_direction: direction,
                        quant_recipe: sys::ncclEpCombQuant_t(0),
                    };
                    library.ncclEpCombine(raw, &inputs, &outputs, &config, stream)
                }
            }
        };
        assert_eq!(status, sys::ncclResult_t::ncclSuccess, "{phase:?}");
    }
}

/// Microseconds on the GPU and on the host, sorted.
#[derive(Default)]
struct Times {
    gpu: Vec<f64>,
    host: Vec<f64>,
}

impl Times {
    fn of(&mut self, (cuda, together): (&Cuda, &Barrier), call: impl FnOnce() -> Result<()>) -> Result<()> {
        // All ranks stand before the call with idle GPUs.
        together.wait();
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            cuda.stream().record_event(flags).map_err(|e| problem(&e.to_string()))
        };
        let before: CudaEvent = event()?;
        let began = Instant::now();
        call()?;
        let host = began.elapsed().as_secs_f64() * 1e6;
        let after = event()?;
        cuda.check()?;
        let ms = before.elapsed_ms(&after).map_err(|e| problem(&e.to_string()))?;
        self.gpu.push(f64::from(ms) * 1e3);
        self.host.push(host);
        Ok(())
    }

    fn at(list: &[f64], share: f64) -> f64 {
        let mut list = list[WARM..].to_vec();
        list.sort_by(f64::total_cmp);
        list[((list.len() - 1) as f64 * share).round() as usize]
    }
}

fn problem(message: &str) -> Error {
    Error::Device { call: "bench", operation: "event".into(), message: message.into() }
}

/// Free bytes of the GPU's memory.
pub fn free(cuda: &Cuda) -> Result<usize> {
    cuda.stream().context().mem_get_info().map(|(free, _)| free).map_err(|e| problem(&e.to_string()))
}

/// Rows by (token, rank) and (token, expert), to all ranks and to this one.
fn traffic(run: &Run, rank: usize, ranks: usize) -> [usize; 4] {
    let local = run.shape.experts / ranks;
    let [mut rows, mut own, mut choices, mut own_choices] = [0; 4];
    for token in ids(run, rank).chunks(run.shape.k) {
        let at = |r: usize| token.iter().filter(|id| **id as usize / local == r).count();
        rows += (0..ranks).filter(|r| at(*r) > 0).count();
        own += usize::from(at(rank) > 0);
        choices += token.len();
        own_choices += at(rank);
    }
    [rows, own, choices, own_choices]
}

fn measure(endpoint: &mut Endpoint<'_>, run: &Run) -> Result<()> {
    let (rank, ranks) = (endpoint.comm.rank(), endpoint.comm.size());
    let Shape { name, hidden, experts, k } = run.shape;
    let (cuda, together) = (endpoint.cuda().clone(), endpoint.together);
    let before = free(&cuda)?;
    let most = if run.zipf { ranks * run.tokens * k } else { ranks * run.tokens * k * 3 / 2 / ranks };
    let options = HighThroughputOptions {
        num_experts: experts,
        max_tokens: run.tokens,
        capacity: run.fixed.then_some(most),
        max_row_bytes: 2 * hidden,
        max_top_k: k,
        trap: false,
        max_sms: 0,
    };
    let group = HighThroughputGroup::new(&endpoint.library, &endpoint.comm, options)?;
    let mut handle = HighThroughputHandle::new(&group, HandleOptions { top_k: k, alignment: 1 })?;
    let held = before.saturating_sub(free(&cuda)?);
    let of = |dtype, dims: &[usize]| Tensor::<Cuda>::empty(&cuda, dtype, dims);
    let local = experts / ranks;
    let all: Vec<Vec<i64>> = (0..ranks).map(|r| ids(run, r)).collect();
    let [x, w] = sent(&cuda, run, rank)?;
    let mut step = Step {
        ids: endpoint.ids(DType::I64, &all[rank], k)?,
        counters: [of(DType::I64, &[local])?, of(DType::I64, &[local])?, of(DType::I64, &[1])?],
        x,
        w,
        rows: of(DType::BF16, &[0, hidden])?,
        rows_w: of(DType::F32, &[0])?,
        y: of(DType::BF16, &[run.tokens, hidden])?,
        d_w: of(DType::F32, &[run.tokens, k])?,
    };
    step.safe(Phase::Prepare, &mut handle)?;
    let total = endpoint.get(&step.counters[2])?[0] as usize;
    let n = if run.fixed { most } else { total };
    assert!(total <= n, "{total} rows of {n}");
    (step.rows, step.rows_w) = (of(DType::BF16, &[n, hidden])?, of(DType::F32, &[n])?);
    let stream: sys::cudaStream_t = cuda.stream().cu_stream().cast();
    let mut flat = Flat::new(endpoint, run, &step, &all)?;
    flat.check(endpoint, &step, &all)?;
    let [rows, own_rows, choices, own_choices] = traffic(run, rank, ranks);
    for (phase, phase_name) in PHASES {
        let mut times = [Times::default(), Times::default(), Times::default()];
        for round in 0..3 * (WARM + ROUNDS) {
            // In turns, so that a drift is shared.
            match round % 3 {
                0 => times[0].of((&cuda, together), || step.safe(phase, &mut handle))?,
                1 => times[1].of((&cuda, together), || {
                    step.raw(phase, &handle, stream);
                    Ok(())
                })?,
                _ => times[2].of((&cuda, together), || flat.call(phase, &step))?,
            }
        }
        if rank > 0 {
            continue;
        }
        let held = [("moebius", held), ("raw", held), ("raw-flat", flat.held)];
        for (times, (who, held)) in times.iter().zip(held) {
            let (us, p99) = (Times::at(&times.gpu, 0.5), Times::at(&times.gpu, 0.99));
            let row = if phase == Phase::Prepare { 0 } else { 2 * hidden };
            println!(
                "{{\"impl\": \"{who}\", \"workload\": \"{name}\", \"phase\": \"{phase_name}\", \"ranks\": {ranks}, \
                 \"dispatcher\": \"nccl_ep\", \"mode\": \"ht {}\", \"routing\": \"{}\", \"tokens\": {}, \"us\": {us:.1}, \
                 \"us_p99\": {p99:.1}, \"host_us\": {:.1}, \"mb_token_rank\": {:.1}, \"mb_token_rank_own\": {:.1}, \
                 \"mb_token_expert\": {:.1}, \"mb_token_expert_own\": {:.1}, \"device_mb\": {:.0}}}",
                if run.fixed { "static" } else { "eager" },
                if run.zipf { "zipf" } else { "uniform" },
                run.tokens,
                Times::at(&times.host, 0.5),
                (rows * row) as f64 / 1e6,
                (own_rows * row) as f64 / 1e6,
                (choices * row) as f64 / 1e6,
                (own_choices * row) as f64 / 1e6,
                held as f64 / 1e6,
            );
        }
    }
    // A peer may still read what this rank has finished with.
    together.wait();
    Ok(())
}
