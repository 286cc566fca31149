//! A rank that fails, does not come, or has something else than the others.

use super::*;

fn a_rank_that_fails_among_sums() {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = |before| model.loss(tokens((replica, &group), 0, DType::F32), before).unwrap();
            reducer.backward(loss(Doing::nothing()), &model).unwrap();
            let expected = model.values(&reducer.backward_reduced(loss(Doing::nothing()), &model).unwrap());
            reducer.backward(loss(Doing::nothing()), &model).unwrap();

            // Between two layers, when the sums of the second have begun.
            let fail = Doing::new(move || assert!(!is_culprit, "an operation of the user's own"));
            let failing = loss(fail);
            let done = catch_unwind(AssertUnwindSafe(|| reducer.backward_reduced(failing, &model).map(drop)));
            match (is_culprit, replica, done) {
                (true, _, Err(panic)) => {
                    let text = panic.downcast_ref::<String>().map_or("", String::as_str);
                    let text = panic.downcast_ref::<&str>().copied().unwrap_or(text);
                    assert!(text.contains("the user's own"), "{text}");
                }
                (false, 0, Ok(Err(Error::Peer { peer: CULPRIT, reason, .. }))) => {
                    assert!(reason.contains("the user's own"), "{reason}");
                }
                // Of the other replica, which hears of it in a sum.
                (false, 1, Ok(Err(Error::Comm(CommError::Refused { reason, .. })))) => {
                    assert!(reason.contains("the user's own") || reason.contains("failed"), "{reason}");
                }
                (.., other) => panic!("replica {replica}, rank {}: {other:?}", group.rank()),
            }
            // The other replica's backward was whole.
            assert_eq!(reducer.microbatches(), 1 + replica as u64);
            // The group and the reducer work on.
            reducer.reset();
            reducer.backward(loss(Doing::nothing()), &model).unwrap();
            assert_eq!(model.values(&reducer.backward_reduced(loss(Doing::nothing()), &model).unwrap()), expected);
        });
    }
}

/// A rank does not come to the sums: the others hear of it at once, those of another replica too.
fn a_rank_that_does_not_come_to_sums() {
    for mesh in [[2, 1], [1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            reducer.backward(loss(), &model).unwrap();
            let last = loss();
            let comes = (replica, group.rank()) != (0, mesh[1] - 1);
            match comes {
                false => reducer.refuse("a loss of the user's own").unwrap(),
                true => {
                    let error = reducer.reduce(&model).expect_err("a rank that does not come");
                    assert!(is_refused(&error, "the user's own"), "{error:?}");
                }
            }
            assert_eq!(reducer.microbatches(), 1);
            let sums = model.values(&reducer.reduce(&model).unwrap());
            // The same of one that does not come to the last backward, whose layers it does not enter.
            match comes {
                false => reducer.refuse("a loss of the user's own").unwrap(),
                true => {
                    let error = reducer.backward_reduced(last, &model).expect_err("a rank that does not come");
                    assert!(is_refused(&error, "the user's own"), "{error:?}");
                }
            }
            assert_eq!(reducer.microbatches(), 0);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), sums);
        });
    }
}

/// A gradient that is not its parameter's, on one rank: of what all ranks hold nothing changes, and of experts, whose sums
/// have begun, nothing is left, on any rank.
fn a_rank_whose_parameters_have_other_sizes() {
    for (mesh, is_expert) in [([1, 2], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            reducer.backward(loss(), &model).unwrap();
            let is_culprit = (replica, group.rank()) == (0, 0);
            let mut other = model.clone();
            if is_culprit {
                match is_expert {
                    true => {
                        let id = other.second.experts.down.id;
                        other.second.experts.down =
                            Param::initialized(id, tensor::<B, 3>(vec![0.0; 3], [1, 1, 3]).require_grad());
                    }
                    false => {
                        other.behind =
                            Param::initialized(other.behind.id, tensor::<B, 1>(vec![0.0; 3], [3]).require_grad())
                    }
                }
            }
            let error = reducer.reduce(&other).expect_err("parameters of other sizes");
            // Also where the culprit is in none of the rank's communicators.
            let named = if is_expert { "experts" } else { "variables" };
            assert!(matches!(&error, Error::Invalid { name, .. } if name == named), "{error:?}");
            // Nothing is lost.
            assert_eq!(reducer.microbatches(), 1);
            reducer.reset();
            reducer.backward_reduced(loss(), &model).unwrap();
        });
    }
}

/// One rank sums after one microbatch more.
fn another_number_of_microbatches_is_an_error_on_every_rank() {
    let meshes = [[1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            // Of a loss without a layer, of which nobody else knows.
            let more = |reducer: &mut GradientReducer<B>| {
                reducer.backward(model.before.val().powi_scalar(2).sum(), &model).unwrap();
            };
            reducer.backward(loss(), &model).unwrap();
            let last = loss();
            if is_culprit {
                more(&mut reducer);
            }
            let done = match beside {
                true => reducer.backward_reduced(last, &model),
                false => reducer.reduce(&model),
            };
            let own = 1 + u64::from(is_culprit);
            let counted = own + u64::from(beside);
            match (replica, done.expect_err("another number")) {
                (0, Error::Invalid { name, expected, found, .. }) => {
                    assert_eq!((&name[..], found), ("microbatches", counted.to_string()));
                    assert!(is_culprit || expected.contains(&format!("rank {CULPRIT}")), "{expected}");
                }
                // Of the other replica, whose ranks all find the same.
                (1, Error::Invalid { name, expected, found, .. }) => {
                    let at_culprit = group.rank() == CULPRIT;
                    let named = if at_culprit { (expected, "as on replica 0") } else { (found, "a replica of rank 1") };
                    assert!(name == "microbatches" && named.0.contains(named.1), "{named:?}");
                }
                (_, error) => panic!("replica {replica}, rank {}: {error:?}", group.rank()),
            }
            // Nothing is lost, and nothing stands in the way of the missing microbatch.
            assert_eq!(reducer.microbatches(), own);
            if !is_culprit {
                more(&mut reducer);
            }
            match beside {
                true => drop(reducer.backward_reduced(loss(), &model).unwrap()),
                false => drop(reducer.reduce(&model).unwrap()),
            }
        });
    }
}

/// An expert of the user's own fails in backward on one rank, between combine and dispatch: the others, which wait in the
/// dispatch's backward, hear of it at once, and the group works on. A failure of the calls' own comes typed.
fn a_backward_that_fails_among_the_users_experts() {
    for ranks in [2, 4] {
        places([1, ranks], |Place { group, comms, .. }| {
            let rank = group.rank();
            let moe = DispatchCombine::new(config(), group).unwrap();
            let scale = own(3, DType::F32);
            let mut reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_dispatch(&moe);
            let loss = |doing: Doing| {
                let tokens = 4 + rank;
                let x = tensor::<B, 2>(values(rank as u64, tokens * H, 1.0), [tokens, H]) * scale.val().unsqueeze();
                let ids: Vec<i32> = (0..tokens * K).map(|at| ((at % K) * (E / K) + at / K % (E / K)) as i32).collect();
                let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [tokens, K]), &device());
                let received = moe.dispatch(x, ids, Tensor::ones([tokens, K], &device())).unwrap();
                let outputs = received.map_experts(|_, rows, _| Ok(doing.clone().apply(rows.mul_scalar(2.0)))).unwrap();
                received.combine(outputs).unwrap().powi_scalar(2).sum()
            };
            reducer.backward(loss(Doing::nothing()), &scale).unwrap();
            let expected = floats(reducer.reduce(&scale).unwrap().get::<Flex, 1>(scale.id).unwrap());
            let begun = Instant::now();
            let fail = Doing::new(move || assert!(rank != CULPRIT, "an expert of the user's own"));
            let failing = loss(fail);
            let done = catch_unwind(AssertUnwindSafe(|| reducer.backward(failing, &scale)));
            match (rank, done) {
                (CULPRIT, Err(panic)) => {
                    let text = panic.downcast_ref::<String>().map_or("", String::as_str);
                    let text = panic.downcast_ref::<&str>().copied().unwrap_or(text);
                    assert!(text.contains("the user's own"), "{text}");
                }
                (_, Ok(Err(Error::Peer { peer: CULPRIT, reason, .. }))) if rank != CULPRIT => {
                    assert!(reason.contains("the user's own"), "{reason}");
                }
                (_, other) => panic!("rank {rank}: {other:?}"),
            }
            assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
            reducer.reset();
            reducer.backward(loss(Doing::nothing()), &scale).unwrap();
            assert_eq!(floats(reducer.reduce(&scale).unwrap().get::<Flex, 1>(scale.id).unwrap()), expected);
        });
    }
}

tests! {
    fn();
    a_backward_that_fails_among_the_users_experts,
    a_rank_that_fails_among_sums,
    a_rank_that_does_not_come_to_sums,
    a_rank_whose_parameters_have_other_sizes,
    another_number_of_microbatches_is_an_error_on_every_rank,
}
