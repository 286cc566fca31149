//! Sums that return quantized over NVLink ([`ReturnFormat::Mxfp8`]): to the bit what the CPU's quantization makes of each
//! rank's sum, whatever the routing; gradients as ever; graphs; and what is refused.

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{
    Capacity, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle, Overflow, Reporting, ReturnFormat,
};
use moebius::kernels::Kernels;
use moebius::quant::{Codec, DequantizeMxfp8, Direction, Matrix, Mxfp8, Mxfp8Tensors, QuantizeMxfp8};
use moebius::{DType, Device, Error, Result, Tensor, TensorMut, TensorRef};

use crate::Run;
use crate::conformance::{Setup, gpus, over, seed};
use crate::nvlink::{MINUTE, MOST, in_groups};
use crate::nvlink_graphs::{self, KINDS};
use crate::several::numbers;

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("bits_are_those_of_quantized_sums", same_bits),
        ("rows_of_any_number_of_blocks", widths),
        ("ragged_routings", ragged_routings),
        ("dropped_choices", dropped_choices),
        ("one_token", one_token),
        ("sums_that_are_not_finite", not_finite),
        ("rows_that_begin_anywhere", begin_anywhere),
        ("kernels_of_few_blocks_do_the_same", few_blocks),
        ("gradients_are_of_the_tokens_type", gradients),
        ("graphs_replay_the_bits_of_eager_steps", graphs_replay),
        ("what_it_does_not_do_is_refused", refused),
    ]
}

const LOCAL_EXPERTS: usize = 8;
const K: usize = 4;
const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// What ranks bring.
#[derive(Debug, Clone, Copy)]
enum Routing {
    /// Spread, some choices of none.
    Spread,
    /// Every token chooses one expert, and nothing else.
    OneExpert,
    /// All choices are of one rank's experts.
    OneRank,
    /// Some tokens have no choice at all.
    NoneOfSome,
    /// The first rank has no tokens.
    NoTokensOfFirst,
    /// Only the last rank has tokens.
    TokensOfLast,
    /// Nobody has a choice.
    Nothing,
}

/// Which numbers experts return.
#[derive(Debug, Clone, Copy)]
enum Numbers {
    /// Some bits of many magnitudes, some blocks of zeros.
    Finite,
    /// NaN, infinities, and the largest and the least magnitudes among them.
    NotFinite,
}

#[derive(Debug, Clone, Copy)]
struct Problem {
    dtype: DType,
    hidden: usize,
    /// Of the rank that has the most.
    tokens: usize,
    routing: Routing,
    numbers: Numbers,
    /// Rows that a rank has room for; choices past them are dropped. `None`: all.
    capacity: Option<usize>,
}

/// A number that all of these decide.
fn mixed(what: [usize; 4]) -> usize {
    let seed = what.iter().fold(seed::seed(0x2545_f491_4f6c_dd1d), |s, v| {
        let s = (s ^ *v as u64).wrapping_mul(0x5851_f42d_4c95_7f2d);
        s ^ s >> 29
    });
    (seed >> 24) as usize
}

impl Problem {
    fn new(dtype: DType, hidden: usize, tokens: usize) -> Self {
        Self { dtype, hidden, tokens, routing: Routing::Spread, numbers: Numbers::Finite, capacity: None }
    }

    fn tokens_of(&self, rank: usize, ranks: usize) -> usize {
        match self.routing {
            Routing::NoTokensOfFirst if rank == 0 => 0,
            Routing::TokensOfLast if rank + 1 != ranks => 0,
            // A rank brings fewer tokens than the one before it.
            _ => self.tokens.saturating_sub(5 * rank).max(1),
        }
    }

    fn ids(&self, rank: usize, ranks: usize) -> Vec<i64> {
        let (tokens, experts) = (self.tokens_of(rank, ranks), LOCAL_EXPERTS * ranks);
        let spread = crate::nvlink::choices(rank, tokens, K, experts);
        let choice = |(i, id): (usize, i64)| match self.routing {
            Routing::Spread | Routing::NoTokensOfFirst | Routing::TokensOfLast => id,
            Routing::OneExpert if i % K == 1 => 3,
            Routing::OneRank => (LOCAL_EXPERTS * (ranks - 1) + (i / K + i % K) % LOCAL_EXPERTS) as i64,
            Routing::NoneOfSome if !(i / K).is_multiple_of(3) => id,
            Routing::OneExpert | Routing::NoneOfSome | Routing::Nothing => -1,
        };
        spread.into_iter().enumerate().map(choice).collect()
    }

    /// What an expert returns of a rank's token: numbers that all types hold.
    fn output(&self, [rank, token, expert]: [usize; 3]) -> Vec<f64> {
        let element = |column: usize| {
            let block = mixed([rank, token, expert, 1_000_000 + column / 32]);
            let own = mixed([rank, token, expert, column]);
            if block.is_multiple_of(16) {
                return 0.0;
            }
            let finite = ((own % 255) as f64 - 127.0) * 2f64.powi((block / 16 % 16) as i32 - 15);
            match (self.numbers, own / 255 % 64) {
                (Numbers::NotFinite, 0) => f64::NAN,
                (Numbers::NotFinite, 1) => f64::INFINITY,
                (Numbers::NotFinite, 2) => f64::NEG_INFINITY,
                // What the type has of these: in f16 infinities and zeros.
                (Numbers::NotFinite, 3) => finite * 2f64.powi(118),
                (Numbers::NotFinite, 4) => 2f64.powi(-130),
                _ if matches!(self.numbers, Numbers::NotFinite) && (block / 256).is_multiple_of(8) => {
                    finite * 2f64.powi(-122)
                }
                _ => finite,
            }
        };
        (0..self.hidden).map(element).map(|v| f64::from(self.rounded(v as f32))).collect()
    }

    /// Rounded to the rows' type.
    fn rounded(&self, value: f32) -> f32 {
        match self.dtype {
            DType::BF16 => bf16::from_f32(value).to_f32(),
            DType::F16 => f16::from_f32(value).to_f32(),
            _ => value,
        }
    }

    /// What a rank is to get, from the choices of its tokens that were kept.
    fn expected(&self, rank: usize, ranks: usize, ids: &[i64]) -> Vec<f64> {
        let (tokens, hidden) = (self.tokens_of(rank, ranks), self.hidden);
        let (mut shares, mut sums) = (Vec::new(), vec![0.0f32; tokens * hidden]);
        let mut owners = Vec::new();
        for (token, choices) in ids.chunks(K).enumerate() {
            for at in 0..ranks {
                let here = choices.iter().map(|id| *id as usize).filter(|id| id / LOCAL_EXPERTS == at);
                let outputs: Vec<_> = here.map(|expert| self.output([rank, token, expert])).collect();
                if outputs.is_empty() {
                    continue;
                }
                owners.push(token);
                shares.extend((0..hidden).map(|i| outputs.iter().fold(0.0f32, |sum, row| sum + row[i] as f32)));
            }
        }
        let shares = through_mxfp8(shares, hidden).expect("quantized");
        for (token, share) in owners.into_iter().zip(shares.chunks(hidden)) {
            sums[token * hidden..][..hidden].iter_mut().zip(share).for_each(|(sum, share)| *sum += share);
        }
        sums.into_iter().map(|sum| f64::from(self.rounded(sum))).collect()
    }

    fn config(&self, ranks: usize) -> GroupConfig {
        let new = GroupConfig::new(LOCAL_EXPERTS * ranks, self.tokens);
        GroupConfig { return_format: ReturnFormat::Mxfp8, max_rows: self.capacity.unwrap_or(0), ..new }
    }

    /// Runs a step in groups of this configuration and compares what each rank gets. Rows and sums begin `shift` elements
    /// behind the start of their memory.
    fn check(&self, cuda: &Cuda, ranks: usize, config: GroupConfig, shift: usize) {
        let found = over(cuda, DispatcherKind::NvLink, ranks, "return_format").run(config, |r| {
            let rows = crate::conformance::rows(self.dtype, self.hidden);
            let (ids, tokens) = (self.ids(r.rank, ranks), self.tokens_of(r.rank, ranks));
            let spec = DispatchSpec { alignment: 4, ..DispatchSpec::new(3, K) };
            let spec = match self.capacity {
                Some(rows) => DispatchSpec { capacity: Capacity::Static(rows), overflow: Overflow::Drop, ..spec },
                None => spec,
            };
            let handle = r.prepare(&ids, &spec).expect("prepare");
            let kept = r.kept(&handle);
            assert_eq!(kept == ids, self.capacity.is_none(), "choices are dropped where there is no room");
            // Rows say whose they are, in numbers that all types hold.
            let mut x = vec![0.0; tokens * self.hidden];
            x.chunks_mut(self.hidden).enumerate().for_each(|(token, row)| {
                (row[0], row[1]) = (r.rank as f64, token as f64);
            });
            let slots = r.dispatch(&handle, rows, &x, None).expect("dispatch").rows;
            let mut outputs = vec![f64::NAN; handle.rows() * self.hidden];
            for (expert, (first, count)) in r.segments(&handle).into_iter().enumerate() {
                for slot in first..first + count {
                    let row = slot * self.hidden..(slot + 1) * self.hidden;
                    let [rank, token] = [slots[row.start] as usize, slots[row.start + 1] as usize];
                    outputs[row].copy_from_slice(&self.output([rank, token, r.rank * LOCAL_EXPERTS + expert]));
                }
            }
            let sums = match shift {
                0 => r.combine(&handle, rows, &outputs).expect("combine"),
                _ => self.combine_shifted(&mut r.group, &handle, &outputs, shift).expect("combine"),
            };
            (kept, sums)
        });
        for (rank, (kept, found)) in found.iter().enumerate() {
            let expected = self.expected(rank, ranks, kept);
            assert_eq!(found.len(), expected.len());
            let differs = found.iter().zip(&expected).position(|(a, b)| !same(*a, *b));
            if let Some(i) = differs {
                let (token, column) = (i / self.hidden, i % self.hidden);
                let (a, b) = (found[i], expected[i]);
                panic!("{self:?}: rank {rank}, token {token}, column {column}: {a:e}, expected {b:e}");
            }
        }
    }

    fn combine_shifted(
        &self,
        group: &mut Group<Cuda>,
        handle: &Handle<Cuda>,
        outputs: &[f64],
        shift: usize,
    ) -> Result<Vec<f64>> {
        let (cuda, dtype, hidden) = (group.device().clone(), self.dtype, self.hidden);
        let whole = [vec![0.0; shift], outputs.to_vec()].concat();
        let rows = cuda.write(&whole, dtype, &[whole.len()])?;
        let mut out: Tensor<Cuda> = Tensor::empty(&cuda, dtype, &[shift + handle.tokens() * hidden])?;
        let (bytes, size) = (shift * dtype.size(), out.bytes());
        let rows = TensorRef::new(
            Cuda::slice(rows.view().data(), bytes..whole.len() * dtype.size()),
            dtype,
            &[handle.rows(), hidden],
        )?;
        let part = Cuda::slice_mut(out.view_mut().into_data(), bytes..size);
        group.dispatcher().combine(handle, rows, TensorMut::new(part, dtype, &[handle.tokens(), hidden])?)?;
        Ok(cuda.read(out.view())?.split_off(shift))
    }
}

fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Quantized on the CPU, and back.
fn through_mxfp8(values: Vec<f32>, columns: usize) -> Result<Vec<f32>> {
    let (cpu, dims) = (Cpu::new(), [values.len() / columns, columns]);
    if dims[0] == 0 {
        return Ok(values);
    }
    let matrix = Tensor::<Cpu>::from_vec(values, &dims)?;
    let mut to = Mxfp8Tensors::empty(&cpu, dims, Direction::Rows)?;
    let call = QuantizeMxfp8 {
        format: Mxfp8::TE,
        matrix: Matrix::new(matrix.view())?,
        rows: Some(to.view_mut()),
        columns: None,
    };
    cpu.quantize_mxfp8(call)?;
    let mut back = Tensor::<Cpu>::empty(&cpu, DType::F32, &dims)?;
    let (codes, scales) = (to.codes.view(), to.scales.view());
    cpu.dequantize_mxfp8(DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: back.view_mut() })?;
    Ok(cpu.read(back.view())?.into_iter().map(|value| value as f32).collect())
}

fn same_bits(cuda: &Cuda, ranks: usize) {
    for dtype in FLOATS {
        for (hidden, tokens) in [(32, 60), (96, 60), (2048, 40), (7168, 24)] {
            let problem = Problem::new(dtype, hidden, tokens);
            problem.check(cuda, ranks, problem.config(ranks), 0);
        }
    }
}

/// Rows that end in the midst of what a warp takes, and those of more steps than a warp keeps the scales of.
fn widths(cuda: &Cuda, ranks: usize) {
    for dtype in FLOATS {
        for hidden in [64, 128, 160, 256, 288, 480, 512, 544, 736, 1024, 1056, 1536, 4064] {
            let problem = Problem::new(dtype, hidden, 12);
            problem.check(cuda, ranks, problem.config(ranks), 0);
        }
        for hidden in [16_384, 16_416, 32_768, 33_312, 66_080] {
            let problem = Problem::new(dtype, hidden, 3);
            problem.check(cuda, ranks, problem.config(ranks), 0);
        }
    }
}

fn ragged_routings(cuda: &Cuda, ranks: usize) {
    let routings = [
        Routing::OneExpert,
        Routing::OneRank,
        Routing::NoneOfSome,
        Routing::NoTokensOfFirst,
        Routing::TokensOfLast,
        Routing::Nothing,
    ];
    for routing in routings {
        for (dtype, hidden) in [(DType::BF16, 544), (DType::F32, 96), (DType::F16, 2048)] {
            let problem = Problem { routing, ..Problem::new(dtype, hidden, 45) };
            problem.check(cuda, ranks, problem.config(ranks), 0);
        }
    }
}

/// Some of a rank's slots are dropped, and of some rows all.
fn dropped_choices(cuda: &Cuda, ranks: usize) {
    for routing in [Routing::Spread, Routing::OneExpert] {
        for (dtype, hidden) in [(DType::BF16, 544), (DType::F32, 96), (DType::F16, 2048)] {
            let problem = Problem { routing, capacity: Some(40), ..Problem::new(dtype, hidden, 45) };
            problem.check(cuda, ranks, problem.config(ranks), 0);
        }
    }
}

fn one_token(cuda: &Cuda, ranks: usize) {
    for (dtype, hidden) in [(DType::BF16, 7168), (DType::F32, 32)] {
        let problem = Problem::new(dtype, hidden, 1);
        problem.check(cuda, ranks, problem.config(ranks), 0);
    }
}

fn not_finite(cuda: &Cuda, ranks: usize) {
    for dtype in FLOATS {
        for shift in [0, 1] {
            let problem = Problem { numbers: Numbers::NotFinite, ..Problem::new(dtype, 1056, 40) };
            problem.check(cuda, ranks, problem.config(ranks), shift);
        }
    }
}

fn begin_anywhere(cuda: &Cuda, ranks: usize) {
    for dtype in FLOATS {
        for hidden in [32, 96, 2048] {
            let problem = Problem::new(dtype, hidden, 30);
            problem.check(cuda, ranks, problem.config(ranks), 1);
        }
    }
}

fn few_blocks(cuda: &Cuda, ranks: usize) {
    for max_sms in [1, 3] {
        let problem = Problem::new(DType::BF16, 544, 100);
        problem.check(cuda, ranks, GroupConfig { max_sms, ..problem.config(ranks) }, 0);
    }
}

/// The way back of gradients has the bits of groups whose sums return in the tokens' type, and so has dispatch.
fn gradients(cuda: &Cuda, ranks: usize) {
    const TOKENS: usize = 50;
    for (dtype, hidden) in [(DType::BF16, 96), (DType::F32, 64), (DType::F16, 2048)] {
        let [quantized, plain] = [ReturnFormat::Mxfp8, ReturnFormat::Tokens].map(|return_format| {
            let config = GroupConfig { return_format, ..GroupConfig::new(LOCAL_EXPERTS * ranks, TOKENS) };
            over(cuda, DispatcherKind::NvLink, ranks, "return_format").run(config, |r| {
                let tokens = TOKENS - 6 * r.rank;
                let rows = crate::conformance::rows(dtype, hidden);
                let spec = DispatchSpec { backward: true, alignment: 8, ..DispatchSpec::new(3, K) };
                let ids = crate::nvlink::choices(r.rank, tokens, K, LOCAL_EXPERTS * ranks);
                let handle = r.prepare(&ids, &spec).expect("prepare");
                let seed = 10 * r.rank as u64;
                let (x, weights) = (numbers(seed, tokens * hidden, 8.0), numbers(seed + 1, tokens * K, 1.0));
                let slots = r.dispatch(&handle, rows, &x, Some(&weights)).expect("dispatch");
                let outputs = numbers(seed + 2, handle.rows() * hidden, 8.0);
                let y = r.combine(&handle, rows, &outputs).expect("combine");
                let back = r.combine_bwd(&handle, rows, &x).expect("combine_bwd");
                let grads = r.dispatch_bwd(&handle, rows, &outputs, Some(&slots.weights)).expect("dispatch_bwd");
                ((slots.rows, slots.weights, back, grads.tokens, grads.weights), y)
            })
        });
        for (rank, (quantized, plain)) in quantized.into_iter().zip(plain).enumerate() {
            assert!(quantized.0 == plain.0, "{dtype}, {hidden}, rank {rank}");
            assert!(quantized.1 != plain.1, "{dtype}, {hidden}, rank {rank}: sums are quantized");
        }
    }
}

/// Whole steps whose choices and rows change between replays, each against the CPU's quantization of the sums.
fn graphs_replay(_: &Cuda, ranks: usize) {
    const REPLAYS: usize = 300;
    const HIDDEN: usize = crate::nvlink::HIDDEN;
    let config = GroupConfig { return_format: ReturnFormat::Mxfp8, ..crate::nvlink::config(ranks) };
    in_groups(gpus::communicators(ranks, MINUTE), &config, |mut group, cuda, together| {
        let rank = group.rank();
        let choices = |kind| nvlink_graphs::choices(kind, rank, ranks);
        let ids = |kind| Tensor::from_vec(choices(kind), &[MOST, nvlink_graphs::K])?.to(cuda);
        let all_ids: Vec<Tensor<Cuda>> = (0..KINDS).map(ids).collect::<Result<_>>()?;
        let x = |seed: usize| cuda.write(&numbers(seed as u64, MOST * HIDDEN, 4.0), DType::BF16, &[MOST, HIDDEN]);
        let xs: [Tensor<Cuda>; 2] = [x(100 + rank)?, x(200 + rank)?];
        // Experts return the rows that they get, so a rank's sum is a row as often as the token has chosen its experts.
        let expected = |kind: usize, x: &Tensor<Cuda>| -> Result<Vec<f64>> {
            let (x, ids) = (cuda.read(x.view())?, choices(kind));
            let mut sums = vec![0.0f32; MOST * HIDDEN];
            for (token, ids) in ids.chunks(nvlink_graphs::K).enumerate() {
                for at in 0..ranks {
                    let here = ids.iter().filter(|id| **id >= 0 && **id as usize / 4 == at).count();
                    let row = &x[token * HIDDEN..][..HIDDEN];
                    let share = row.iter().map(|v| (0..here).fold(0.0f32, |sum, _| sum + *v as f32)).collect();
                    let share = through_mxfp8(share, HIDDEN)?;
                    sums[token * HIDDEN..][..HIDDEN].iter_mut().zip(share).for_each(|(sum, share)| *sum += share);
                }
            }
            Ok(sums.into_iter().map(|sum| f64::from(bf16::from_f32(sum).to_f32())).collect())
        };
        let all_expected: Vec<_> =
            (0..KINDS * xs.len()).map(|at| expected(at % KINDS, &xs[at / KINDS])).collect::<Result<_>>()?;
        let (mut own_ids, mut own_x) = (ids(0)?, x(0)?);
        // What a first step makes cannot be captured.
        nvlink_graphs::step(&mut group, cuda, (&own_ids, &own_x), Reporting::Deferred)?;
        let mut graph =
            cuda.capture(|| nvlink_graphs::step(&mut group, cuda, (&own_ids, &own_x), Reporting::Deferred))?;
        for replay in 0..REPLAYS {
            let at = replay * 7 % (KINDS * xs.len());
            cuda.copy(all_ids[at % KINDS].view().data(), own_ids.view_mut().into_data())?;
            cuda.copy(xs[at / KINDS].view().data(), own_x.view_mut().into_data())?;
            graph.replay()?;
            let found = cuda.read(graph.output()[1].view())?;
            let differs = found.iter().zip(&all_expected[at]).position(|(a, b)| !same(*a, *b));
            assert_eq!(differs, None, "rank {rank}, replay {replay}, choices {}", at % KINDS);
        }
        together.wait();
        drop(graph);
        group.dispatcher().check()
    });
}

/// A setup whose groups are to be refused, by the name of what is.
fn is_refused(setup: &Setup<Cuda>, config: &GroupConfig, field: &str) {
    std::thread::scope(|threads| {
        for comm in gpus::communicators(setup.ranks, MINUTE) {
            let config = GroupConfig { dispatcher: setup.kind, ..config.clone() };
            threads.spawn(move || match Group::new(comm.cuda().clone(), Box::new(comm), config) {
                Err(Error::Invalid { name, .. }) => assert_eq!(name, field),
                other => panic!("{:?}", other.map(|_| "a group")),
            });
        }
    });
}

fn refused(cuda: &Cuda, ranks: usize) {
    let config = GroupConfig { return_format: ReturnFormat::Mxfp8, ..GroupConfig::new(LOCAL_EXPERTS * ranks, 8) };
    for kind in [DispatcherKind::Auto, DispatcherKind::AllGather, DispatcherKind::NvLinkLowLatency] {
        is_refused(&over(cuda, kind, ranks, "return_format"), &config, "return_format");
    }
    let nvlink = over(cuda, DispatcherKind::NvLink, ranks, "return_format");
    is_refused(&nvlink, &GroupConfig { in_k_order: true, ..config.clone() }, "return_format");
    // Rows that are no whole blocks travel to their experts, and do not return.
    nvlink.run(config, |r| {
        let rows = crate::conformance::rows(DType::BF16, 48);
        let handle = r.prepare(&[0, 1], &DispatchSpec::new(3, 1)).expect("prepare");
        let slots = r.dispatch(&handle, rows, &[1.0; 2 * 48], None).expect("dispatch");
        match r.combine(&handle, rows, &slots.rows) {
            Err(Error::Invalid { call, name, expected, found }) => {
                assert_eq!((call, &name[..], &found[..]), ("combine", "tensor expert_out", "48"));
                assert!(expected.contains("multiple of 32") && expected.contains("return_format"), "{expected}");
            }
            other => panic!("{other:?}"),
        }
    });
}
