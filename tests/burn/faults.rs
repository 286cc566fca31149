//! Refusals, and how failures inside burn's backward end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::tensor::{DType, Tensor};
use moebius::burn::{ExpertParallelMoE, ExpertParallelMoEConfig};
use moebius::comm::Op;
use moebius::{CommError, Error, MoeConfig};

use super::support::*;
use crate::limits::{Countdown, in_time};
use crate::trials::tests;

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap()
}

fn backward_against_a_rank_that_tracks_nothing_is_refused_before_any_collective() {
    untracked_peer::<Flex>();
}

pub fn untracked_peer<S: Subject>() {
    let config = config();
    S::on_ranks(2, |rank, group| {
        let model = module::<Autodiff<S>>(&config, group.clone());
        let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]);
        if rank == 0 {
            model.clone().no_grad().forward(x.clone()).unwrap();
        } else {
            let out = model.forward_full(x.clone(), None).unwrap();
            let loss = out.y.sum();
            let panic = catch_unwind(AssertUnwindSafe(|| loss.backward())).err().unwrap();
            assert!(message(panic).contains("not agreed"), "the error's text");
            let failure = group.take_failure();
            assert!(
                matches!(failure, Some(Error::BackwardNotAgreed { ref absent, .. }) if *absent == [0]),
                "{failure:?}"
            );
        }
        // The group still works.
        model.forward(x).unwrap();
    });
}

fn a_second_backward_is_refused_before_any_collective() {
    second_backward_of_a_rank::<Flex>();
}

pub fn second_backward_of_a_rank<S: Subject>() {
    let config = config();
    S::on_ranks(2, |rank, group| {
        let model = module::<Autodiff<S>>(&config, group.clone());
        let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]);
        let out = model.forward_full(x.clone(), None).unwrap();
        let loss = out.y.sum();
        loss.backward();
        // burn itself refuses the same loss, and what else hangs on the nodes it consumed. Only on one rank: a
        // collective would wait for the other.
        if rank == 0 {
            for again in [loss, out.aux] {
                let panic = catch_unwind(AssertUnwindSafe(|| again.backward())).err().unwrap();
                assert!(message(panic).contains("step registered"));
            }
            assert!(group.take_failure().is_none());
        }
        model.forward(x).unwrap();
    });
}

pub fn second_backward<S: Subject>() {
    let config = config();
    let model = module::<Autodiff<S>>(&config, S::alone());
    let out = model.forward_full(tensor::<Autodiff<S>, 2>(inputs(0).0, [token_counts()[0], H]), None).unwrap();
    let loss = out.y.sum();
    loss.backward();
    for again in [loss, out.aux] {
        let panic = catch_unwind(AssertUnwindSafe(|| again.backward())).err().unwrap();
        assert!(message(panic).contains("step registered"));
    }
}

fn a_second_backward_of_one_rank_is_refused() {
    second_backward::<Flex>();
}

/// First limit of what is to reach its limit: `in_time` gives ranks that were late more.
const SHORT: Duration = Duration::from_secs(6);

/// A rank that waits in its backward keeps its graph locked, and burn's table of graphs with it once another thread
/// joins a graph to that one: tests that let a rank wait for `SHORT` would delay each other by as much.
fn waiting() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn a_backward_that_never_comes_is_a_typed_timeout() {
    let _alone = waiting();
    let config = config();
    let failure = in_time(SHORT, |limit| {
        let finished = Countdown::new(1);
        let found = on_ranks(2, limit, |rank, group| {
            let counted = (rank == 0).then(|| finished.counted());
            let model = module::<B>(&config, &group);
            // A rank that came late has failed here.
            let y = model.forward(tensor::<B, 2>(inputs(rank).0, [token_counts()[rank], H])).ok();
            if let (0, Some(y)) = (rank, &y) {
                assert!(catch_unwind(AssertUnwindSafe(|| y.clone().sum().backward())).is_err());
            }
            drop(counted);
            finished.wait();
            y.map(|_| group.take_failure())
        });
        found.into_iter().collect::<Option<Vec<_>>>().map(|mut failures| failures.remove(0))
    });
    assert!(matches!(failure, Some(Error::Comm(CommError::Timeout { .. }))), "{failure:?}");
}

/// Each rank's error of its backward; `before` is what rank 1 does meanwhile.
fn locked_out(shared: bool, before: fn()) {
    let _alone = waiting();
    let config = config();
    let failures = in_time(SHORT, |limit| {
        let (done, finished) = mpsc::channel();
        let config = config.clone();
        thread::spawn(move || {
            let (about_to, joining, late) = (Barrier::new(2), Mutex::new(()), AtomicBool::new(false));
            let leaf = tensor::<B, 1>(vec![1.5], [1]).require_grad();
            let failures = on_watched_ranks(2, limit, |rank, group, entered| {
                let model = module::<B>(&config, &group);
                let y = model.forward(tensor::<B, 2>(inputs(rank).0, [token_counts()[rank], H]));
                late.fetch_or(y.is_err(), Ordering::SeqCst);
                let loss = y.ok().map(|y| y.sum());
                let loss = loss.map(|loss| match shared {
                    true => {
                        // One behind the other: burn loses a node that is registered while another thread joins its
                        // graph to a third.
                        let _turn = joining.lock().unwrap();
                        loss + leaf.clone()
                    }
                    false => loss,
                });
                about_to.wait();
                let loss = loss.filter(|_| !late.load(Ordering::SeqCst))?;
                if rank == 1 {
                    // Until rank 0 is inside its backward, where it waits for this rank.
                    while !entered[0].lock().unwrap().contains(&Op::CombineBwd) {
                        thread::sleep(Duration::from_millis(1));
                    }
                    before();
                }
                let result = catch_unwind(AssertUnwindSafe(|| loss.backward()));
                Some((result.is_err(), group.take_failure()))
            });
            // Nobody listens any more behind a hang.
            let _ = done.send(failures);
        });
        finished.recv_timeout(limit * 10).expect("a hang").into_iter().collect::<Option<Vec<_>>>()
    });
    for (unwound, failure) in failures {
        assert!(unwound && matches!(failure, Some(Error::Comm(_))), "{failure:?}");
    }
}

/// The module's documentation forbids this: the end of rank 1's own backward waits for rank 0's graph, and rank 0 for
/// rank 1 in a collective.
fn an_independent_backward_beside_a_peers_ends_in_typed_errors_and_not_in_a_hang() {
    locked_out(false, || {
        let other = tensor::<B, 1>(vec![1.0], [1]).require_grad();
        other.mul_scalar(2.0).backward();
    });
}

/// The other: one graph of both ranks, whose lock rank 0 holds.
fn a_leaf_shared_between_ranks_ends_in_typed_errors_and_not_in_a_hang() {
    locked_out(true, || {});
}

fn a_model_that_fails_around_the_layer_tells_the_other_rank() {
    refused_around::<Flex>();
}

pub fn refused_around<S: Subject>() {
    let config = config();
    S::on_ranks(2, |rank, group| {
        let model = module::<Autodiff<S>>(&config, group.clone());
        let x = tensor::<Autodiff<S>, 2>(inputs(rank).0, [token_counts()[rank], H]);
        let told = |error: Option<Error>, word: &str| {
            let of_rank_0 = matches!(&error, Some(Error::Peer { peer: 0, reason, .. }) if reason.contains(word));
            assert!(of_rank_0, "{error:?}");
        };
        match rank {
            0 => model.refuse_forward("no embedding"),
            _ => told(model.forward(x.clone()).err(), "no embedding"),
        }
        let loss = model.forward(x.clone()).unwrap().sum();
        match rank {
            0 => model.refuse_backward("no loss"),
            _ => {
                assert!(catch_unwind(AssertUnwindSafe(|| loss.backward())).is_err());
                told(group.take_failure(), "no loss");
            }
        }
        // The group still works.
        model.forward(x).unwrap();
    });
}

fn bad_input_is_a_typed_error() {
    let config = config();
    let group = single();
    let other = ExpertParallelMoEConfig::new(MoeConfig::new(H, I, E * 2, K)).init_on::<Flex>(&group, &device());
    assert!(matches!(other, Err(Error::Invalid { ref name, .. }) if name == "num_experts"), "{other:?}");
    let too_many = ExpertParallelMoEConfig::new(MoeConfig::new(H, I, E, E + 1)).init_on::<Flex>(&group, &device());
    assert!(matches!(too_many, Err(Error::Invalid { ref name, .. }) if name == "top_k"), "{too_many:?}");

    let config = config.clone();
    let mut missing = block(&config, 0, 1);
    missing.params.others.shared_down = None;
    let found = ExpertParallelMoE::<Flex>::from_block(missing, 0, &group, &device());
    assert!(found.is_err_and(|e| e.to_string().contains("shared.down")));
    let mut extra = block(&config, 0, 1);
    extra.params.others.selection_bias = Some(CoreTensor::from_vec(vec![0f32; E], &[E]).unwrap());
    let found = ExpertParallelMoE::<Flex>::from_block(extra, 0, &group, &device());
    assert!(found.is_err_and(|e| e.to_string().contains("selection_bias")));
    let mut shape = block(&config, 0, 1);
    shape.params.down = CoreTensor::from_vec(vec![0f32; E * I * H], &[E, I, H]).unwrap();
    let found = ExpertParallelMoE::<Flex>::from_block(shape, 0, &group, &device());
    assert!(matches!(found, Err(Error::Shape { .. })));
    let mut integers = block(&config, 0, 1);
    integers.params.up =
        CoreTensor::from_vec(vec![0i32; integers.params.up.to_f64().len()], integers.params.up.dims()).unwrap();
    let found = ExpertParallelMoE::<Flex>::from_block(integers, 0, &group, &device());
    assert!(found.is_err_and(|e| e.to_string().contains("experts.up")));

    let model = module::<Flex>(&config, &group);
    let nan = tensor::<Flex, 2>(vec![f32::NAN; H], [1, H]);
    assert!(matches!(model.forward(nan), Err(Error::NanLogits { .. })));
    bad_tokens::<Flex>();
}

pub fn bad_tokens<S: Subject>() {
    let config = config();
    let device = Default::default();
    let model = module::<S>(&config, S::alone());
    let found = model.forward(Tensor::<S, 2>::zeros([4, H + 1], &device));
    assert!(found.is_err_and(|e| e.to_string().contains("tensor x")));
    let mixed = Tensor::<S, 2>::zeros([4, H], &device).cast(DType::F16);
    assert!(model.forward(mixed).is_err());
    // And the layer works on.
    model.forward(Tensor::<S, 2>::zeros([4, H], &device)).unwrap();
}

tests! {
    fn();
    backward_against_a_rank_that_tracks_nothing_is_refused_before_any_collective,
    a_second_backward_is_refused_before_any_collective,
    a_second_backward_of_one_rank_is_refused,
    a_backward_that_never_comes_is_a_typed_timeout,
    an_independent_backward_beside_a_peers_ends_in_typed_errors_and_not_in_a_hang,
    a_leaf_shared_between_ranks_ends_in_typed_errors_and_not_in_a_hang,
    a_model_that_fails_around_the_layer_tells_the_other_rank,
    bad_input_is_a_typed_error,
}
