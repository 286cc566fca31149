//! Times of the layer and its grouped GEMMs on one GPU: CUDA events, warm, median, random data, uniform random
//! routing. One JSON line a measurement.
//!
//! ```text
//! cargo bench --features cuda --bench cuda -- [--portable] [WORKLOAD …]
//! ```

use moebius::config::{Activation, MoeConfig, WeightAt};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::sys::CUevent_flags;
use moebius::ep::GroupConfig;
use moebius::kernels::*;
use moebius::layer::{Cotangents, Inputs, Layer, Mode, Params, Wanted};
use moebius::{DType, Error, Result, Tensor, TensorRef};

/// Name, tokens, hidden, intermediate, experts, top-k.
const WORKLOADS: [(&str, usize, usize, usize, usize, usize); 5] = [
    ("qwen3-30b-a3b", 16384, 2048, 768, 128, 8),
    ("olmoe-7b", 16384, 2048, 1024, 64, 8),
    ("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    ("dsv3-ep8-rank", 4096, 7168, 2048, 32, 8),
    ("decode-qwen3", 64, 2048, 768, 128, 8),
];
const WARM_UP: usize = 3;
const REPEATS: usize = 15;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let cuda = match Cuda::new(0) {
        Ok(cuda) => cuda,
        Err(e) => {
            println!("skipped: no GPU ({e})");
            return Ok(());
        }
    };
    let cuda = if arguments.iter().any(|a| a == "--portable") { cuda.portable() } else { cuda };
    let wanted: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    for workload in WORKLOADS {
        if wanted.is_empty() || wanted.iter().any(|w| *w == workload.0) {
            Bench::new(&cuda, workload)?.run()?;
        }
    }
    Ok(())
}

struct Bench<'a> {
    cuda: &'a Cuda,
    name: &'static str,
    t: usize,
    h: usize,
    i: usize,
    e: usize,
    k: usize,
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl<'a> Bench<'a> {
    fn new(cuda: &'a Cuda, w: (&'static str, usize, usize, usize, usize, usize)) -> Result<Self> {
        Ok(Self { cuda, name: w.0, t: w.1, h: w.2, i: w.3, e: w.4, k: w.5 })
    }

    /// Random bf16 values; a block of them repeated, as the host is slow.
    fn random(&self, dims: &[usize], scale: f64, seed: u64) -> Result<Tensor<Cuda>> {
        const BLOCK: usize = 1 << 20;
        let mut state = seed;
        let values: Vec<f64> = (0..BLOCK)
            .map(|_| {
                let sum: f64 = (0..4).map(|_| (next(&mut state) >> 11) as f64 / (1u64 << 53) as f64).sum();
                (sum - 2.0) * 3f64.sqrt() * scale
            })
            .collect();
        let block = self.cuda.tensor(&Cpu::new().write(&(), &values, DType::BF16, &[BLOCK, 1])?)?;
        let count: usize = dims.iter().product();
        let map: Vec<i32> = (0..count.div_ceil(BLOCK)).map(|i| i as i32).collect();
        let rows: Vec<i32> = map.iter().map(|_| 0).collect();
        let rows = self.cuda.tensor(&Tensor::from_vec(rows, &[map.len()])?)?;
        let mut out = Tensor::empty(self.cuda, DType::BF16, &[map.len(), BLOCK])?;
        let source = block.view().reshape(&[1, BLOCK])?;
        self.cuda.gather_rows(&self.cuda.stream(), GatherRows { source, map: rows.view(), out: out.view_mut() })?;
        if count == map.len() * BLOCK {
            return out.reshape(dims);
        }
        let bytes = self.cuda.download(&self.cuda.stream(), out.view())?;
        let mut exact = Tensor::empty(self.cuda, DType::BF16, dims)?;
        self.cuda.upload(&self.cuda.stream(), &bytes[..count * 2], exact.view_mut())?;
        Ok(exact)
    }

    /// Median milliseconds of a call.
    fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
        let failed = |e| Error::Device { call: "bench", operation: "event".into(), message: format!("{e:?}") };
        let stream = self.cuda.stream();
        let mut times = Vec::new();
        for repeat in 0..WARM_UP + REPEATS {
            let event = || stream.raw().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
            let start = event()?;
            call()?;
            let end = event()?;
            end.synchronize().map_err(failed)?;
            if repeat >= WARM_UP {
                times.push(start.elapsed_ms(&end).map_err(failed)?);
            }
        }
        times.sort_by(f32::total_cmp);
        Ok(f64::from(times[times.len() / 2]))
    }

    fn report(&self, phase: &str, ms: f64, flop: f64) -> Result<()> {
        println!(
            "{{\"impl\":\"moebius\",\"workload\":\"{}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},\"tflops\":{:.1},\"gpu\":\"{}\"}}",
            self.name,
            flop / ms / 1e9,
            self.cuda.name()?
        );
        Ok(())
    }

    fn run(&self) -> Result<()> {
        let up = self.random(&[self.e, 2 * self.i, self.h], (self.h as f64).powf(-0.5), 1)?;
        let down = self.random(&[self.e, self.h, self.i], (self.i as f64).powf(-0.5), 2)?;
        let x = self.random(&[self.t, self.h], 1.0, 3)?;
        self.gemms(up.view(), down.view(), x.view())?;
        self.layer(&up, &down, &x)
    }

    /// Slots of uniform random choices: offsets, counts and the token of each slot.
    fn routing(&self) -> Result<(Zones<Cuda>, Tensor<Cuda>, Tensor<Cuda>)> {
        let mut state = 7;
        let mut of_expert = vec![Vec::new(); self.e];
        for t in 0..self.t {
            let mut chosen = Vec::new();
            while chosen.len() < self.k {
                let e = next(&mut state) as usize % self.e;
                if !chosen.contains(&e) {
                    chosen.push(e);
                    of_expert[e].push(t as i32);
                }
            }
        }
        let counts: Vec<i64> = of_expert.iter().map(|l| l.len() as i64).collect();
        let offsets: Vec<i64> = counts.iter().scan(0, |sum, c| Some(std::mem::replace(sum, *sum + c))).collect();
        let rows = self.t * self.k;
        let put = |v: Vec<i64>| self.cuda.tensor(&Tensor::from_vec(v, &[self.e])?);
        let zones = Zones { offsets: put(offsets)?, counts: put(counts)?, rows };
        let map = self.cuda.tensor(&Tensor::from_vec(of_expert.concat(), &[rows])?)?;
        let weights = self.cuda.tensor(&Tensor::from_vec(vec![1.0 / self.k as f32; rows], &[rows])?)?;
        Ok((zones, map, weights))
    }

    fn gemms(&self, up: TensorRef<'_, Cuda>, down: TensorRef<'_, Cuda>, x: TensorRef<'_, Cuda>) -> Result<()> {
        let (cuda, stream) = (self.cuda, self.cuda.stream());
        let (zones, map, weights) = self.routing()?;
        let n = zones.rows;
        let of = |width: usize| Tensor::empty(cuda, DType::BF16, &[n, width]);
        let (mut pre, mut hidden, mut out) = (of(2 * self.i)?, of(self.i)?, of(self.h)?);
        let (mut d_pre, mut d_hidden) = (of(2 * self.i)?, of(self.i)?);
        let mut d_weights = Tensor::empty(cuda, DType::F32, &[n])?;
        let base = 2.0 * n as f64 * self.h as f64 * self.i as f64;
        let at = WeightAt::Activation;
        for (phase, keep) in [("gemm1", false), ("gemm1+pre", true)] {
            let ms = self.time(|| {
                let call = Up {
                    rows: RowSource::mapped(x.borrow(), map.view()),
                    zones: &zones,
                    weight: up.borrow(),
                    bias: None,
                    slot_weights: Some(SlotWeights { values: weights.view(), at }),
                    activation: Activation::SiluGlu,
                    pre: keep.then(|| pre.view_mut()),
                    out: RowDest::direct(hidden.view_mut()),
                };
                cuda.up(&stream, call)
            })?;
            self.report(phase, ms, 2.0 * base)?;
        }
        let ms = self.time(|| {
            let call = Down {
                rows: RowSource::direct(hidden.view()),
                zones: &zones,
                weight: down.borrow(),
                bias: None,
                slot_weights: Some(SlotWeights { values: weights.view(), at }),
                out: RowDest::direct(out.view_mut()),
            };
            cuda.down(&stream, call)
        })?;
        self.report("gemm2", ms, base)?;
        let ms = self.time(|| {
            let call = DownBwd {
                grad: RowSource::mapped(x.borrow(), map.view()),
                zones: &zones,
                weight: down.borrow(),
                bias: None,
                pre: pre.view(),
                slot_weights: Some(SlotWeights { values: weights.view(), at }),
                activation: Activation::SiluGlu,
                d_pre: d_pre.view_mut(),
                hidden: Some(d_hidden.view_mut()),
                d_slot_weights: Some(d_weights.view_mut()),
            };
            cuda.down_bwd(&stream, call)
        })?;
        self.report("dgrad2", ms, base)?;
        let ms = self.time(|| {
            let call = UpDgrad {
                d_pre: d_pre.view(),
                zones: &zones,
                weight: up.borrow(),
                input_weight: None,
                out: RowDest::direct(out.view_mut()),
            };
            cuda.up_dgrad(&stream, call)
        })?;
        self.report("dgrad1", ms, 2.0 * base)?;
        let mut grad = Tensor::empty(cuda, DType::BF16, &[self.e, 2 * self.i, self.h])?;
        let ms = self.time(|| {
            let call = Wgrad {
                left: RowSource::direct(d_pre.view()),
                right: RowSource::mapped(x.borrow(), map.view()),
                slot_weights: None,
                zones: &zones,
                out: grad.view_mut(),
                bias: None,
                accumulate: false,
            };
            cuda.wgrad(&stream, call)
        })?;
        self.report("wgrad1", ms, 2.0 * base)?;
        let mut grad = Tensor::empty(cuda, DType::BF16, &[self.e, self.h, self.i])?;
        let ms = self.time(|| {
            let call = Wgrad {
                left: RowSource::mapped(x.borrow(), map.view()),
                right: RowSource::direct(d_hidden.view()),
                slot_weights: None,
                zones: &zones,
                out: grad.view_mut(),
                bias: None,
                accumulate: false,
            };
            cuda.wgrad(&stream, call)
        })?;
        self.report("wgrad2", ms, base)?;
        cuda.check()
    }

    fn layer(&self, up: &Tensor<Cuda>, down: &Tensor<Cuda>, x: &Tensor<Cuda>) -> Result<()> {
        let cuda = self.cuda;
        let router = self.random(&[self.e, self.h], (self.h as f64).powf(-0.5), 4)?;
        let layer = Layer::new(MoeConfig::new(self.h, self.i, self.e, self.k), 0)?;
        let mut group = cuda.group(GroupConfig::new(self.e, self.t))?;
        let (up, down) = (up.view(), down.view());
        let params = Params {
            router: router.view(),
            router_bias: None,
            selection_bias: None,
            up: &up,
            up_bias: None,
            down: &down,
            down_bias: None,
            shared_up: None,
            shared_down: None,
            shared_gate: None,
        };
        let flop = 6.0 * (self.t * self.k) as f64 * self.h as f64 * self.i as f64;
        let ms = self.time(|| layer.forward(&mut group, Mode::default(), x.view(), &params).map(drop))?;
        self.report("fwd", ms, flop)?;
        let ms = self.time(|| {
            let mode = Mode { backward: true, noise: None };
            let forward = layer.forward(&mut group, mode, x.view(), &params)?;
            let Some(context) = forward.context else { return Ok(()) };
            let inputs = Inputs { x: x.view(), params: &params };
            let cotangents = Cotangents { y: Some(x.view()), aux: 0.0 };
            layer.backward(&mut group, context, inputs, cotangents, Wanted::ALL).map(drop)
        })?;
        self.report("fwd+bwd", ms, 3.0 * flop)?;
        cuda.check()
    }
}
