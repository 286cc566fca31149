//! Dispatch and combine with experts of the user's own between them: closed forms, against the module, in f64 against
//! finite differences, several in flight, and used wrongly.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;

use burn::backend::{Autodiff, Flex};
use burn::tensor::activation::silu;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moebius::burn::{DeviceGroup, DispatchCombine, Dispatched, ExpertParallelMoE};
use moebius::config::Payload;
use moebius::layer::{DispatchOptions, Layer};
use moebius::{Error, MoeConfig};

use super::support::*;
use crate::trials::tests;

/// First token of each rank among all ranks', and their end.
fn share(rank: usize) -> Range<usize> {
    let first = token_counts()[..rank].iter().sum();
    first..first + token_counts()[rank]
}

/// Two distinct experts for each token.
fn choices<Bk: Backend>(rows: Range<usize>) -> Tensor<Bk, 2, Int> {
    let of = |t: usize| [(t * 5 + 1) % E, (t * 5 + 1 + (t % 3 + 1) * 2) % E];
    let ids: Vec<i32> = rows.clone().flat_map(of).map(|id| id as i32).collect();
    Tensor::from_data(TensorData::new(ids, [rows.len(), 2]), &here::<Bk>())
}

/// Numbers that are the same however tokens are divided.
fn table<Bk: Backend>(seed: u64, rows: &Range<usize>, width: usize) -> Tensor<Bk, 2> {
    let all = values(seed, token_counts().iter().sum::<usize>() * width, 1.0);
    tensor(all[rows.start * width..rows.end * width].to_vec(), [rows.len(), width])
}

fn plain() -> MoeConfig {
    MoeConfig::new(H, I, E, 2)
}

pub fn identity_experts<S: Subject>(numbers: &[usize]) {
    for &ranks in numbers {
        S::on_ranks(ranks, |rank, group| {
            let moe = DispatchCombine::new(plain(), &group).unwrap();
            let rows = share(rank);
            let x = table::<Autodiff<S>>(300, &rows, H).require_grad();
            let c = table::<Autodiff<S>>(301, &rows, H);
            // Halves, and their sum, are exact: y is x and d x is c to the bit.
            let weights = tensor::<Autodiff<S>, 2>(vec![0.5; rows.len() * 2], [rows.len(), 2]).require_grad();
            let received = moe.dispatch(x.clone(), choices(rows.clone()), weights.clone()).unwrap();
            let segments = received.segments().unwrap();
            let of = |t: Tensor<Autodiff<S>, 1, Int>| t.into_data().iter::<i64>().collect::<Vec<_>>();
            assert_eq!(of(received.offsets().unwrap()), segments.iter().map(|s| s.start as i64).collect::<Vec<_>>());
            assert_eq!(of(received.counts().unwrap()), segments.iter().map(|s| s.len() as i64).collect::<Vec<_>>());
            let y = received.combine(received.rows.clone() * received.weights.clone().unsqueeze_dim(1)).unwrap();
            assert_eq!(floats(y.clone()), floats(x.clone()));
            let gradients = (y * c.clone()).sum().backward();
            assert_eq!(floats(x.grad(&gradients).unwrap()), floats(c.clone()));
            // d w[t, k] = x[t] · c[t], a sum of 12 products: 12 roundings of 2⁻²⁴ relative to the sum of magnitudes.
            let (x, c) = (floats(x), floats(c));
            for (at, found) in floats(weights.grad(&gradients).unwrap()).into_iter().enumerate() {
                let row = at / 2 * H..(at / 2 + 1) * H;
                let products = x[row.clone()].iter().zip(&c[row]).map(|(a, b)| f64::from(*a) * f64::from(*b));
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                assert!((f64::from(found) - sum).abs() <= 12.0 * 2f64.powi(-24) * size, "weight {at}");
            }
        });
    }
}

fn identity_experts_give_the_tokens_back() {
    identity_experts::<Flex>(&RANKS);
}

/// y, d x, d router, d up, d down.
type Found = [Vec<f32>; 5];

/// A step's results, once it has run; `y` of x.
fn step<S: Subject>(
    model: &ExpertParallelMoE<Autodiff<S>>,
    hidden: usize,
    rows: &Range<usize>,
    forward: impl FnOnce(Tensor<Autodiff<S>, 2>) -> Tensor<Autodiff<S>, 2>,
) -> Found {
    let x = table::<Autodiff<S>>(310, rows, hidden).require_grad();
    let y = forward(x.clone());
    let gradients = (y.clone() * table(311, rows, hidden)).sum().backward();
    let experts = |param: &burn::module::Param<Tensor<Autodiff<S>, 3>>| {
        // Experts without rows have none.
        param.grad(&gradients).map_or_else(|| vec![0.0; param.shape().num_elements()], floats)
    };
    let router = floats(model.router.weight.grad(&gradients).unwrap());
    [floats(y), floats(x.grad(&gradients).unwrap()), router, experts(&model.experts.up), experts(&model.experts.down)]
}

pub fn as_the_module<S: Subject>(numbers: &[usize]) {
    let wide = |payload| {
        let mut wide = plain().with_payload(payload);
        wide.hidden = 32;
        wide
    };
    let padded = DispatchOptions { alignment: 8, ..Default::default() };
    let cases = [
        ("plain", plain(), DispatchOptions::default()),
        ("padded", plain(), padded),
        ("NVFP4", wide(Payload::Nvfp4), DispatchOptions::default()),
        ("MXFP8", wide(Payload::Mxfp8), padded),
    ];
    for (name, config, options) in &cases {
        for &ranks in numbers {
            // burn's graph lock: no rank begins a backward before the others have left the last one.
            let apart = Barrier::new(ranks);
            S::on_ranks(ranks, |rank, group| {
                let model = module::<Autodiff<S>>(config, &group);
                let layer: Layer = model.layer().clone().with_dispatch(*options);
                let model = model.with_layer(layer.clone());
                let rows = share(rank);
                let expected = step::<S>(&model, config.hidden, &rows, |x| model.forward(x).unwrap());
                apart.wait();
                let own = DispatchCombine::new(layer, &group).unwrap();
                let found = step::<S>(&model, config.hidden, &rows, |x| {
                    let routed = own.route(x.clone().matmul(model.router.weight.val().transpose()), None).unwrap();
                    let received = own.dispatch(x, routed.ids, routed.weights).unwrap();
                    let outputs = received.map_experts(|e, rows, weights| {
                        let weight = |t: Tensor<Autodiff<S>, 3>| t.slice(e..e + 1).squeeze_dim::<2>(0).transpose();
                        let pre = rows.matmul(weight(model.experts.up.val()));
                        let n = pre.dims()[0];
                        let gate = silu(pre.clone().slice([0..n, 0..I]));
                        let hidden = gate * pre.slice([0..n, I..2 * I]);
                        Ok(hidden.matmul(weight(model.experts.down.val())) * weights.unsqueeze_dim(1))
                    });
                    received.combine(outputs.unwrap()).unwrap()
                });
                for (at, what) in ["y", "d x", "d router", "d up", "d down"].iter().enumerate() {
                    // Forward has two products of burn's in a chain, of two rounded factors each; backward twice as many.
                    let tolerance = if at == 0 { FORWARD + 4.0 * S::ROUNDING } else { BACKWARD + 8.0 * S::ROUNDING };
                    close(&format!("{name}, {ranks} ranks: {what}"), &found[at], &expected[at], tolerance);
                }
            });
        }
    }
}

fn the_module_and_plain_operations_agree() {
    as_the_module::<Flex>(&RANKS);
}

/// Step of the differences and what they may be off, as in `tests/candle/dispatch/values.rs`: the loss is of order 10.
const STEPS: [f64; 2] = [1e-5, 1e-6];
const TOLERANCE: f64 = 1e-5;

/// Numbers of f64.
fn double<const D: usize>(seed: u64, dims: [usize; D]) -> Tensor<B, D> {
    let numbers = values(seed, dims.iter().product(), 1.0).into_iter().map(f64::from).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, dims), (&device(), DType::F64))
}

/// Some rows of such a table. Not a slice: Flex makes one of no rows f32.
fn double_rows(seed: u64, rows: &Range<usize>) -> Tensor<B, 2> {
    let numbers = values(seed, rows.end * H, 1.0)[rows.start * H..].iter().copied().map(f64::from).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, [rows.len(), H]), (&device(), DType::F64))
}

fn number(t: Tensor<B, 1>) -> f64 {
    t.into_data().into_vec::<f64>().unwrap()[0]
}

fn gradients_are_those_of_finite_differences() {
    for ranks in [1, 2, 4] {
        let parts = on_ranks(ranks, LONG, |rank, group| {
            let moe = DispatchCombine::new(plain(), &group).unwrap();
            let rows = share(rank);
            let local = E / ranks;
            let c = double_rows(324, &rows);
            let leaves = [
                double_rows(320, &rows),
                double(321, [H, E]),
                double(322, [E * H, H]).mul_scalar(0.25).slice(rank * local * H..(rank + 1) * local * H),
            ];
            let along = [
                double_rows(325, &rows),
                double(326, [H, E]),
                double(327, [E * H, H]).slice(rank * local * H..(rank + 1) * local * H),
            ];
            let loss = |[x, router, experts]: [Tensor<B, 2>; 3]| {
                let routed = moe.route(x.clone().matmul(router), None).unwrap();
                let ids = routed.ids.clone().into_data().to_vec::<i32>().unwrap();
                let received = moe.dispatch(x, routed.ids, routed.weights).unwrap();
                let outputs = received.map_experts(|e, rows, weights| {
                    Ok(rows.matmul(experts.clone().slice(e * H..(e + 1) * H)).tanh() * weights.unsqueeze_dim(1))
                });
                ((received.combine(outputs.unwrap()).unwrap() * c.clone()).sum(), ids)
            };
            // Leaves of this rank alone.
            let tracked = leaves.clone().map(|t| Tensor::from_inner(t.inner()).require_grad());
            let (value, ids) = loss(tracked.clone());
            let gradients = value.backward();
            let slope = tracked.iter().zip(&along).map(|(leaf, along)| {
                let gradient = leaf.grad(&gradients);
                gradient.map_or(0.0, |g| number((Tensor::from_inner(g) * along.clone()).sum()))
            });
            let slope: f64 = slope.sum();
            let differences = STEPS.map(|step| {
                let [(up, first), (down, second)] = [step, -step].map(|step| {
                    let mut moved = leaves.clone();
                    for (leaf, along) in moved.iter_mut().zip(&along) {
                        *leaf = leaf.clone() + along.clone().mul_scalar(step);
                    }
                    let (value, ids) = loss(moved);
                    (number(value), ids)
                });
                ((up - down) / (2.0 * step), first == ids && second == ids)
            });
            (slope, differences)
        });
        let slope: f64 = parts.iter().map(|part| part.0).sum();
        let usable = (0..STEPS.len()).find(|at| parts.iter().all(|part| part.1[*at].1));
        let at = usable.expect("a step that leaves the routing as it is");
        let expected: f64 = parts.iter().map(|part| part.1[at].0).sum();
        let error = (slope - expected).abs() / expected.abs().max(1.0);
        assert!(error <= TOLERANCE && expected.abs() > 1e-3, "{ranks} ranks: {slope} for {expected}");
    }
}

pub fn several_in_flight<S: Subject>(numbers: &[usize]) {
    for &ranks in numbers {
        let apart = Barrier::new(ranks);
        S::on_ranks(ranks, |rank, group| {
            let moe = DispatchCombine::new(plain(), &group).unwrap();
            let rows = share(rank);
            type Microbatch<S> = (Tensor<Autodiff<S>, 1>, [Tensor<Autodiff<S>, 2>; 2]);
            let forward = |n: u64| -> Microbatch<S> {
                let x = table::<Autodiff<S>>(330 + 3 * n, &rows, H).require_grad();
                let weights = table::<Autodiff<S>>(331 + 3 * n, &rows, 2).require_grad();
                let received = moe.dispatch(x.clone(), choices(rows.clone()), weights.clone()).unwrap();
                let outputs = received.rows.clone().powi_scalar(2) * received.weights.clone().unsqueeze_dim(1);
                let y = received.combine(outputs).unwrap();
                ((y * table(332 + 3 * n, &rows, H)).sum(), [x, weights])
            };
            let backward = |(loss, leaves): Microbatch<S>| {
                apart.wait();
                let gradients = loss.backward();
                leaves.map(|leaf| floats(leaf.grad(&gradients).unwrap()))
            };
            let expected = [0, 1, 2].map(|n| backward(forward(n)));
            // 1F1B: F0 F1 B0 F2 B1 B2.
            let (f0, f1) = (forward(0), forward(1));
            let b0 = backward(f0);
            let f2 = forward(2);
            assert_eq!([b0, backward(f1), backward(f2)], expected);
        });
    }
}

fn several_in_flight_are_each_their_own() {
    several_in_flight::<Flex>(&RANKS);
}

/// All tokens go to the first expert; on other ranks nothing arrives, and nothing but the anchor is tracked there.
fn ranks_without_rows_and_without_tracking_take_part() {
    for ranks in [1, 2, 4] {
        on_ranks(ranks, LONG, |rank, group| {
            let moe = DispatchCombine::new(MoeConfig::new(H, I, E, 1), &group).unwrap();
            let rows = share(rank);
            let x = table::<B>(340, &rows, H);
            let weights = tensor::<B, 2>(vec![1.0; rows.len()], [rows.len(), 1]);
            let ids =
                Tensor::from_data(TensorData::new(vec![0i64; rows.len()], [rows.len(), 1]), (&device(), DType::I64));
            let scale = tensor::<B, 2>(vec![3.0; H], [1, H]).require_grad();
            let received = moe.dispatch(x.clone(), ids, weights).unwrap();
            let outputs = received.map_experts(|_, rows, _| Ok(rows * scale.clone())).unwrap();
            let y = received.combine(outputs).unwrap();
            assert_eq!(floats(y.clone()), floats(x.mul_scalar(3.0)));
            let gradients = y.sum().backward();
            let found = scale.grad(&gradients).map(floats);
            assert_eq!(found.is_some(), rank == 0);
            if let Some(found) = found {
                let all = share(ranks - 1).end;
                close("d scale", &found, &floats(table::<B>(340, &(0..all), H).sum_dim(0)), BACKWARD);
            }
        });
    }
}

fn good(moe: &DispatchCombine) -> moebius::Result<Dispatched<B>> {
    let ones = |width| tensor::<B, 2>(vec![1.0; 4 * width], [4, width]);
    moe.dispatch(ones(H), choices(0..4), ones(2))
}

/// Outputs that would shift the rows of experts behind, or are none of combine, are told to the ranks that wait there.
fn experts_that_give_other_rows_are_typed_errors() {
    type Made = fn(Tensor<B, 2>) -> Tensor<B, 2>;
    let others: [(Made, &str); 3] = [
        (|rows| Tensor::cat(vec![rows.clone(), rows], 0), "rows of expert"),
        (|rows| rows.slice([0..1, 0..H - 1]), "rows of expert"),
        (|rows| rows.cast(DType::F64), "type of expert"),
    ];
    for (made, expected) in others {
        on_ranks(2, LONG, |rank, group| {
            let moe = DispatchCombine::new(plain(), &group).unwrap();
            let received = good(&moe).unwrap();
            let error = match rank {
                1 => received.map_experts(|_, rows, _| Ok(made(rows))).expect_err("other rows"),
                _ => received.combine(received.rows.clone()).expect_err("the other rank's error"),
            };
            match &error {
                Error::Invalid { name, .. } if rank == 1 => assert!(name.starts_with(expected), "{error}"),
                _ => assert!(rank == 0 && error.to_string().contains(expected), "{error}"),
            }
            // The group works on.
            let received = good(&moe).unwrap();
            received.combine(received.rows.clone()).unwrap();
        });
    }
}

/// The last rank's error is typed; that of the others names the rank.
fn refused(name: &str, rank: usize, last: usize, error: &Error) {
    let as_meant = match error {
        Error::Peer { peer, .. } => rank != last && *peer == last,
        Error::ConfigMismatch { .. } => name == "x and weights of another type",
        Error::ExpertId { rank: culprit, .. } => *culprit == last,
        Error::Invalid { .. } | Error::Shape { .. } | Error::DType { .. } => rank == last,
        _ => false,
    };
    assert!(as_meant, "{name}, rank {rank}: {error:?}");
}

fn wrong_tensors_are_typed_errors_on_every_rank() {
    let bad = |moe: &DispatchCombine, name: &str| -> moebius::Result<Dispatched<B>> {
        let ones = |width| tensor::<B, 2>(vec![1.0; 4 * width], [4, width]);
        let ids = || choices::<B>(0..4);
        match name {
            "width" => moe.dispatch(ones(H + 1), ids(), ones(2)),
            "x and weights of another type" => moe.dispatch(ones(H).cast(DType::F64), ids(), ones(2).cast(DType::F64)),
            "bf16 weights" => moe.dispatch(ones(H), ids(), ones(2).cast(DType::BF16)),
            "more weights" => moe.dispatch(ones(H), ids(), ones(3)),
            "fewer ids" => moe.dispatch(ones(H), choices(0..3), ones(2)),
            "an expert too far" => moe.dispatch(ones(H), ids().add_scalar(E as i32), ones(2)),
            _ => moe.dispatch(ones(H), ids().mul_scalar(0), ones(2)),
        }
    };
    let names = [
        "width",
        "x and weights of another type",
        "bf16 weights",
        "more weights",
        "fewer ids",
        "an expert too far",
        "an expert twice",
    ];
    for ranks in [1, 2, 4] {
        let last = ranks - 1;
        on_ranks(ranks, LONG, |rank, group| {
            let moe = DispatchCombine::new(plain(), &group).unwrap();
            // After each the group works: no backward, which burn's graph lock allows once.
            let whole = || {
                let received = good(&moe).unwrap();
                received.combine(received.rows.clone()).unwrap();
            };
            // Alone, f64 tokens are as good as any.
            for name in names.into_iter().filter(|name| ranks > 1 || !name.starts_with("x and")) {
                let made = if rank == last { bad(&moe, name) } else { good(&moe) };
                refused(name, rank, last, &made.err().unwrap());
                whole();
            }
            for name in ["type", "width", "rows"] {
                let received = good(&moe).unwrap();
                let n = received.rows.dims()[0];
                let zeros = |n, width| tensor::<B, 2>(vec![0.0; n * width], [n, width]);
                let outputs = match (rank == last, name) {
                    (true, "type") => received.rows.clone().cast(DType::BF16),
                    (true, "width") => zeros(n, H - 1),
                    (true, _) => zeros(n + 1, H),
                    _ => received.rows.clone(),
                };
                refused(name, rank, last, &received.combine(outputs).err().unwrap());
                whole();
            }
        });
    }
}

fn a_rank_that_fails_among_its_experts_tells_the_others() {
    on_ranks(2, LONG, |rank, group| {
        let moe = DispatchCombine::new(plain(), &group).unwrap();
        let received = good(&moe).unwrap();
        if rank == 1 {
            moe.refuse("no adapter for expert 5");
        } else {
            let error = received.combine(received.rows.clone()).err().unwrap();
            assert!(matches!(&error, Error::Peer { peer: 1, reason, .. } if reason.contains("expert 5")), "{error}");
        }
        good(&moe).unwrap();
    });
}

/// burn forgets the nodes that a backward used: a combine of a dispatch whose backward has run would wait for others.
fn a_combine_after_its_dispatchs_backward_is_refused_in_backward() {
    let group: DeviceGroup = single().into();
    let moe = DispatchCombine::new(plain(), &group).unwrap();
    let received = good(&moe).unwrap();
    let outputs = || tensor::<B, 2>(vec![1.0; received.rows.dims()[0] * H], received.rows.dims()).require_grad();
    received.combine(outputs()).unwrap().sum().backward();
    let late = received.combine(outputs()).unwrap().sum();
    assert!(catch_unwind(AssertUnwindSafe(|| late.backward())).is_err());
    assert!(matches!(group.take_failure(), Some(Error::ContextConsumed { .. })));
    // Nothing is kept on the back end below.
    let inner = moe.dispatch(table::<Flex>(350, &(0..4), H), choices(0..4), table::<Flex>(351, &(0..4), 2)).unwrap();
    inner.combine(inner.rows.clone()).unwrap();
}

tests! {
    fn();
    identity_experts_give_the_tokens_back,
    the_module_and_plain_operations_agree,
    gradients_are_those_of_finite_differences,
    several_in_flight_are_each_their_own,
    ranks_without_rows_and_without_tracking_take_part,
    wrong_tensors_are_typed_errors_on_every_rank,
    a_rank_that_fails_among_its_experts_tells_the_others,
    a_combine_after_its_dispatchs_backward_is_refused_in_backward,
    experts_that_give_other_rows_are_typed_errors,
}
