//! Tokens that travel quantized, on CPU ranks: the same bits for any number of ranks, against a dense reference over
//! rows that the codec has rounded, how far results move, how many bytes go where, and what is kept.
//! (`conformance::payload` has every dispatcher and device.)

mod common;
#[path = "common/faulty_comm.rs"]
mod faulty_comm;
#[path = "common/received_rows.rs"]
mod received_rows;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{Tensor, Var};
use common::support::compare::{difference, values};
use common::support::dense::{Dense, Params};
use common::support::quantized_payload::{TOKENS as FORMAT, through};
use common::support::random::Random;
use common::{CoreTensor, Cotangent, Outcome, Setup};
use faulty_comm::FaultyComm;
use moebius::comm::{Communicator, Op};
use moebius::config::{AuxConfig, Payload};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, ParamKind, ParamViews, StepSizes};
use moebius::{DType, MoeConfig};

const PAYLOADS: [Payload; 3] = [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block];
const HIDDEN: usize = 64;
const EXPERTS: usize = 8;
const TOKENS: usize = 13;

fn config(payload: Payload) -> MoeConfig {
    let mut config = MoeConfig::new(HIDDEN, 20, EXPERTS, 3);
    (config.payload, config.expert_bias) = (payload, true);
    config
}

/// Parameters, tokens and the gradient of the output.
fn problem(config: &MoeConfig) -> (Params, Tensor, Tensor) {
    let mut random = Random::new(common::devices::seed::seed(21));
    let of = |kind: ParamKind| Some((kind.name().to_string(), kind.dims(config, EXPERTS)?));
    let dims: Vec<(String, Vec<usize>)> = ParamKind::ALL.into_iter().filter_map(of).collect();
    let params = dims.into_iter().map(|(name, dims)| (name, random.tensor(&dims, 0.2).unwrap())).collect();
    let dims = [TOKENS, config.hidden];
    (params, random.tensor(&dims, 1.0).unwrap(), random.tensor(&dims, 1.0).unwrap())
}

fn run(config: &MoeConfig, split: &[usize], dtype: DType, (params, x, d_y): (&Params, &Tensor, &Tensor)) -> Outcome {
    let shares: Vec<_> = (0..split.len()).map(|rank| common::shard(params, rank, split.len(), dtype)).collect();
    let mut setup = Setup::new(config, split);
    setup.dispatcher = if split.len() == 1 { DispatcherKind::Local } else { DispatcherKind::AllToAll };
    common::run(&setup, &shares, x, dtype, Some(Cotangent { y: Some(d_y), aux: 0.0 })).unwrap()
}

/// Rows there and back as the codec has it, by values of `dtype`.
fn rounded(payload: Payload, x: &Tensor, dtype: DType) -> Tensor {
    let values = common::support::compare::values(x).unwrap();
    let back = through((payload, FORMAT), (dtype, &values), [x.dims()[0], x.dims()[1]]).unwrap();
    Tensor::from_vec(back, x.dims(), x.device()).unwrap()
}

#[test]
fn the_same_bits_on_any_number_of_ranks() {
    for payload in PAYLOADS {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let config = config(payload);
            let (params, x, d_y) = problem(&config);
            let of = |split: &[usize]| run(&config, split, dtype, (&params, &x, &d_y));
            let one = of(&[TOKENS]);
            for split in [vec![6, 7], vec![TOKENS, 0], vec![4, 0, 8, 1], vec![3, 3, 3, 4]] {
                let many = of(&split);
                assert!(values(&one.y).unwrap() == values(&many.y).unwrap(), "y, {split:?}");
                assert_eq!(one.ids, many.ids);
                for (name, t) in &one.grads {
                    // The router's product adds in another order for another number of rows: it is in these by
                    // rounding.
                    match name.as_str() {
                        "x" | "logits" | "router.weight" => {
                            let d = difference(&many.grads[name], t).unwrap();
                            assert!(d.within(rounding(dtype)), "{name}, {split:?}: {d:?}");
                        }
                        _ => assert!(values(t).unwrap() == values(&many.grads[name]).unwrap(), "{name}, {split:?}"),
                    }
                }
            }
        }
    }
}

/// Roundings of stores of a type, of which a few add up.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        _ => 1e-6,
    }
}

/// Experts read the rounded rows, forward and for their own gradients; the gradient of the tokens is that of the
/// rounded ones (straight through); the router reads the tokens. Straight-line arithmetic in f64 on one side, f32 on
/// the other: a chain of some ten products and sums of up to 64 terms, each a rounding of 2⁻²⁴ of values that cancel to
/// a tenth at most: 10·64·6e-8/√(10·64)·10 ≈ 1.5e-5.
#[test]
fn as_a_dense_layer_over_rounded_rows() {
    const TOLERANCE: f64 = 2e-5;
    for payload in PAYLOADS {
        for recompute in [false, true] {
            let mut config = config(payload);
            config.recompute = recompute;
            let (params, x, d_y) = problem(&config);
            let found = run(&config, &[5, 8], DType::F32, (&params, &x, &d_y));
            // What each side makes of the same f32 numbers.
            let as_f32 = |t: &Tensor| common::framework(&common::core(t, DType::F32));
            let var = |t: &Tensor| Var::from_tensor(&as_f32(t)).unwrap().into_inner();
            let params: Params = params.iter().map(|(name, t)| (name.clone(), var(t))).collect();
            let (tokens, rows) = (var(&x), var(&rounded(payload, &x, DType::F32)));
            let dense = Dense { config: &config, params: &params };
            // Two blocks that differ in the tokens: one gives the weights, one the experts' outputs for these weights.
            let chosen = dense.forward(&tokens, None).unwrap();
            assert_eq!(found.ids, chosen.ids);
            let mut y = rows.zeros_like().unwrap();
            for e in 0..EXPERTS {
                let of = |name: &str| params[name].get(e).unwrap();
                let pre = rows.matmul(&of("experts.up").t().unwrap()).unwrap().broadcast_add(&of("experts.up_bias"));
                let pre = pre.unwrap();
                let (gate, up) = (pre.narrow(1, 0, 20).unwrap(), pre.narrow(1, 20, 20).unwrap());
                let weight = chosen.weights.narrow(1, e, 1).unwrap();
                let h = (gate.silu().unwrap() * up).unwrap().broadcast_mul(&weight).unwrap();
                let out = h.matmul(&of("experts.down").t().unwrap()).unwrap();
                let bias = weight.broadcast_mul(&of("experts.down_bias").unsqueeze(0).unwrap()).unwrap();
                y = ((y + out).unwrap() + bias).unwrap();
            }
            let d = difference(&found.y, &y).unwrap();
            assert!(d.within(TOLERANCE), "{payload:?}: y {d:?}");
            let grads = (y * as_f32(&d_y)).unwrap().sum_all().unwrap().backward().unwrap();
            let d_tokens = (grads.get(&tokens).unwrap() + grads.get(&rows).unwrap()).unwrap();
            let d = difference(&found.grads["x"], &d_tokens).unwrap();
            assert!(d.within(TOLERANCE), "{payload:?}: d x {d:?}");
            for (name, t) in &params {
                let d = difference(&found.grads[name], grads.get(t).unwrap()).unwrap();
                assert!(d.within(TOLERANCE), "{payload:?}: d {name} {d:?}");
            }
        }
    }
}

/// An element moves by half a step of its format at most, 1/6 (E2M1, 5 to 4 or 6, with scales of 1/16 at most off) or
/// 1/16 (E4M3) of the larger values; normal numbers by a tenth and a fortieth of their norm. An output is a product of
/// two such sums, silu's slope at most 1.1: three times as far.
#[test]
fn results_move_no_further_than_the_formats_steps() {
    for (payload, least, most) in
        [(Payload::Nvfp4, 0.05, 0.15), (Payload::Mxfp8, 0.01, 0.0625), (Payload::Fp8Block, 0.01, 0.0625)]
    {
        let (params, x, d_y) = problem(&config(payload));
        let moved = difference(&rounded(payload, &x, DType::F32), &x).unwrap().relative;
        assert!((least..most).contains(&moved), "{payload:?}: rows move by {moved}");
        let of = |payload| run(&config(payload), &[TOKENS], DType::F32, (&params, &x, &d_y));
        let (found, plain) = (of(payload), of(Payload::Plain));
        for (name, t) in [("y", &found.y)].into_iter().chain(found.grads.iter().map(|(name, t)| (&name[..], t))) {
            let reference = if name == "y" { &plain.y } else { &plain.grads[name] };
            let d = difference(t, reference).unwrap();
            assert!(d.max_abs.is_finite() && d.relative < 6.0 * moved, "{payload:?}: {name} moves by {d:?}");
        }
        let d = difference(&found.y, &plain.y).unwrap();
        assert!(d.relative > 0.0 && d.relative < 3.0 * moved, "{payload:?}: y moves by {d:?}");
        assert_eq!(found.ids, plain.ids, "the router reads the tokens");
        assert!(values(&found.logits).unwrap() == values(&plain.logits).unwrap());
    }
}

/// Rows of zeros, of one large element, of the largest and the least numbers of bf16: nothing becomes a NaN or an
/// infinity that was none.
#[test]
fn extreme_rows_stay_finite() {
    let mut rows = vec![vec![0.0; HIDDEN]; 5];
    rows[1][3] = 1000.0;
    rows[2] = (0..HIDDEN).map(|i| if i % 2 == 0 { 1e-30 } else { -1e-38 }).collect();
    rows[3] = vec![-1e18; HIDDEN];
    rows[4][HIDDEN - 1] = -0.0;
    let x = Tensor::from_vec(rows.concat(), (5, HIDDEN), &candle_core::Device::Cpu).unwrap();
    for payload in PAYLOADS {
        for dtype in [DType::F32, DType::BF16] {
            let back = values(&rounded(payload, &x, dtype)).unwrap();
            assert!(back.iter().all(|v| v.is_finite()), "{payload:?}");
            // A layer whose router and experts are linear enough to keep them finite: weights of 1e-12.
            let config = config(payload);
            let (params, _, _) = problem(&config);
            let params = params.into_iter().map(|(n, t)| (n, (t * 1e-12).unwrap())).collect();
            let d_y = Tensor::ones_like(&x).unwrap();
            let out = run(&config, &[2, 3], dtype, (&params, &x, &d_y));
            for (name, t) in [("y", &out.y)].into_iter().chain(out.grads.iter().map(|(name, t)| (&name[..], t))) {
                assert!(values(t).unwrap().iter().all(|v| v.is_finite()), "{payload:?}: {name}");
            }
        }
    }
}

/// Bytes that one step of a layer sends from each of two ranks, the experts that its tokens chose, and bytes that it
/// keeps.
struct Counted {
    sent: Vec<(Op, Vec<usize>)>,
    ids: Vec<usize>,
    kept: usize,
    sizes: StepSizes,
}

fn counted(config: &MoeConfig, (ranks, kind): (usize, DispatcherKind), dtype: DType, tokens: usize) -> Vec<Counted> {
    let one = |comm: moebius::cpu::ThreadComm| {
        let (rank, comm, cpu) = (Communicator::<Cpu>::rank(&comm), FaultyComm::new(Box::new(comm)), Cpu::poisoning());
        let sent = Arc::clone(&comm.sent);
        let limits = GroupConfig { dispatcher: kind, ..GroupConfig::new(config.router.num_experts, tokens) };
        let mut group = Group::new(cpu, Box::new(comm), limits).unwrap();
        let mut random = Random::new(common::devices::seed::seed(3));
        let mut put = |dims: &[usize]| common::core(&random.tensor(dims, 0.3).unwrap(), dtype);
        let local = group.local_experts();
        let params: Vec<(ParamKind, CoreTensor)> =
            ParamKind::ALL.into_iter().filter_map(|kind| Some((kind, put(&kind.dims(config, local)?)))).collect();
        // Other tokens on every rank.
        (0..=rank).for_each(|_| drop(put(&[1])));
        let (x, d_y) = (put(&[tokens, config.hidden]), put(&[tokens, config.hidden]));
        let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())));
        let views = views.unwrap();
        let params = views.params();
        let layer = Layer::new(config.clone(), 0).unwrap();
        sent.lock().unwrap().clear();
        let mode = Mode { backward: true, noise: None };
        let forward = layer.forward(&mut group, mode, x.view(), &params).unwrap();
        let context = forward.context.unwrap();
        let handle = context.handle();
        // Rows are counted when all ranks' choices are known.
        let (kept, sizes) = (context.bytes(), StepSizes { tokens, slots: handle.rows(), rows: 0, ranks, dtype, kind });
        let inputs = Inputs { x: x.view(), params: &params };
        let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
        layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL).unwrap();
        let ids = cpu.read(forward.routing.ids.view()).unwrap();
        let sent = sent.lock().unwrap().clone();
        Counted { sent, ids: ids.iter().map(|id| *id as usize).collect(), kept, sizes }
    };
    thread::scope(|scope| {
        let comms = ThreadWorld::create(ranks, Duration::from_secs(60));
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| one(comm))).collect();
        let mut counted: Vec<Counted> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        let ids: Vec<Vec<usize>> = counted.iter().map(|c| c.ids.clone()).collect();
        let rows = received_rows::received_rows(kind, &ids, config.router.top_k, config.router.num_experts);
        counted.iter_mut().zip(rows).for_each(|(c, rows)| c.sizes.rows = rows);
        counted
    })
}

/// With one choice a token, a message's rows are the choices of the rank's experts. Beside them travel 4 bytes of
/// weight a choice; rows, weights and scales begin at multiples of 16.
#[test]
fn bytes_a_token_and_rank() {
    assert_eq!(Payload::Plain.row_bytes(7168), None);
    assert_eq!(Payload::Nvfp4.row_bytes(7168), Some([3584, 464]));
    assert_eq!(Payload::Mxfp8.row_bytes(7168), Some([7168, 224]));
    assert_eq!(Payload::Fp8Block.row_bytes(7168), Some([7168, 224]));
    const T: usize = 64;
    for hidden in [96, 512, 2880] {
        let config = |payload| {
            let mut config = MoeConfig::new(hidden, 8, EXPERTS, 1);
            config.payload = payload;
            config
        };
        let of = |payload| counted(&config(payload), (2, DispatcherKind::AllToAll), DType::BF16, T);
        let plain = of(Payload::Plain);
        for payload in [Payload::Plain, Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
            let [row, scale] = match payload {
                Payload::Plain => [2 * hidden, 0],
                // By hand: codes of half a byte, a byte for 16, 4 for the row; codes of a byte, a byte for 32, or 4 for 128.
                Payload::Nvfp4 => [hidden / 2, (hidden / 16 + 4).div_ceil(16) * 16],
                Payload::Fp8Block => [hidden, (hidden.div_ceil(128) * 4).div_ceil(16) * 16],
                _ => [hidden, (hidden / 32).div_ceil(16) * 16],
            };
            for (found, plain) in of(payload).iter().zip(&plain) {
                let to = |rank: usize| found.ids.iter().filter(|id| **id / (EXPERTS / 2) == rank).count();
                assert!(to(0) > 0 && to(1) > 0, "both ranks are chosen");
                let words = |bytes: usize| bytes.div_ceil(16) * 16;
                let message = |rows: usize| words(words(rows * row) + 4 * rows) + words(rows * scale);
                let dispatched = found.sent.iter().find(|(op, _)| *op == Op::Dispatch).unwrap();
                assert_eq!(dispatched.1, [message(to(0)), message(to(1))], "{payload:?}, hidden {hidden}");
                // Everything else goes as it would.
                let others =
                    |c: &Counted| c.sent.iter().filter(|(op, _)| *op != Op::Dispatch).cloned().collect::<Vec<_>>();
                assert_eq!(others(found), others(plain));
            }
        }
    }
}

/// Every rank's message of an all-gather likewise, of all its rows.
#[test]
fn bytes_of_an_all_gather() {
    let mut config = MoeConfig::new(512, 8, EXPERTS, 2);
    config.payload = Payload::Nvfp4;
    for found in counted(&config, (2, DispatcherKind::AllGather), DType::BF16, 32) {
        let dispatched = found.sent.iter().find(|(op, _)| *op == Op::Dispatch).unwrap();
        assert_eq!(dispatched.1, [32 * (256 + 48) + 32 * 2 * 4]);
    }
}

#[test]
fn what_is_kept_is_known_before() {
    for payload in [Payload::Plain, Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        for (ranks, kind) in [(1, DispatcherKind::Local), (2, DispatcherKind::AllToAll), (4, DispatcherKind::AllGather)]
        {
            for recompute in [false, true] {
                let mut config = config(payload);
                config.recompute = recompute;
                for found in counted(&config, (ranks, kind), DType::BF16, 9) {
                    let memory = found.sizes.memory(&config);
                    assert_eq!(memory.saved, found.kept, "{payload:?}, {ranks} ranks, recompute {recompute}");
                }
            }
        }
    }
}

/// Configurations that were written before there was a payload have none.
#[test]
fn configurations_without_a_payload_are_plain() {
    let mut quantized = config(Payload::Nvfp4);
    quantized.aux = AuxConfig::default();
    let text = serde_json::to_string(&quantized).unwrap();
    assert_eq!(serde_json::from_str::<MoeConfig>(&text).unwrap(), quantized);
    let mut older: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(older.as_object_mut().unwrap().remove("payload"), Some("Nvfp4".into()));
    assert_eq!(serde_json::from_value::<MoeConfig>(older).unwrap(), config(Payload::Plain));
}
