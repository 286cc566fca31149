//! The sums themselves, and which parameters are summed.

use super::*;

/// Over 1, 2 and 4 ranks and 1 and 2 replicas: the sums beside backward, those after it, and those of every rank's
/// gradients added up here.
fn sums_beside_backward_are_those_after_it() {
    for (mesh, dtype) in [
        ([1, 1], DType::F32),
        ([1, 2], DType::F32),
        ([1, 4], DType::F32),
        ([2, 1], DType::F32),
        ([2, 2], DType::F32),
        ([1, 2], DType::BF16),
        ([2, 2], DType::BF16),
    ] {
        let [replicas, ranks] = mesh;
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, dtype);
            let mut reducer = model.reducer(comms);
            let loss = |microbatch| model.loss(tokens((replica, &group), microbatch, dtype), Doing::nothing()).unwrap();
            let own = model.own_values(3, loss);
            for microbatch in 0..3 {
                reducer.backward(loss(microbatch), &model).unwrap();
            }
            let after = model.values(&reducer.reduce(&model).unwrap());
            for microbatch in 0..2 {
                reducer.backward(loss(microbatch), &model).unwrap();
            }
            assert_eq!(reducer.microbatches(), 2);
            let beside = model.values(&reducer.backward_reduced(loss(2), &model).unwrap());
            assert_eq!(beside, after);
            assert_eq!(reducer.microbatches(), 0);
            (own, beside)
        });
        // In rank order, first over the group, in f32, and rounded once.
        let of = |gradient: &Gradient| match &gradient.values {
            Some((_, values)) => values.clone(),
            None => vec![0.0; gradient.count],
        };
        let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
        for at in 0..results[0].0.len() {
            let Gradient { name, expert, .. } = results[0].0[at].clone();
            for rank in 0..ranks {
                let of_replica = |replica: usize| {
                    let own = &results[replica * ranks..(replica + 1) * ranks];
                    match expert {
                        false => own[1..].iter().fold(of(&own[0].0[at]), |sum, one| add(sum, of(&one.0[at]))),
                        true => of(&own[rank].0[at]),
                    }
                };
                let sum = (1..replicas).fold(of_replica(0), |sum, replica| add(sum, of_replica(replica)));
                let expected: Vec<f32> = match dtype {
                    DType::F32 => sum,
                    _ => sum.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
                };
                for replica in 0..replicas {
                    let found = &results[replica * ranks + rank].1[at];
                    let (found_type, values) = found.values.clone().unwrap_or((dtype, vec![0.0; found.count]));
                    assert_eq!((found_type, values), (dtype, expected.clone()), "{mesh:?} {name} of rank {rank}");
                }
            }
        }
    }
}

/// Sums of the second layer are over before the first layer's backward begins, its experts' over replicas among them;
/// microbatches before communicate nothing.
fn sums_of_a_layer_begin_while_backward_runs() {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, of_layers, of_sums, of_replicas } = place;
            let model = Model::new(&group, DType::F32);
            // A layer's experts in one collective.
            let mut reducer = model.reducer(comms).with_bucket_bytes(1 << 20);
            let x = || tokens((replica, &group), 0, DType::F32);
            let count = |entered: &Entered| -> usize {
                entered.lock().unwrap().iter().filter(|op| **op == Op::GradReduce).count()
            };
            reducer.backward(model.loss(x(), Doing::nothing()).unwrap(), &model).unwrap();
            assert_eq!((count(&of_sums), count(&of_replicas), count(&of_layers)), (0, 0, 0));
            let seen = Arc::new(Mutex::new(0));
            // The comparison of microbatches and the sum, and of the replicas the experts' sum.
            let (own, expected) = if mesh[0] > 1 { (of_replicas.clone(), 3) } else { (of_sums.clone(), 2) };
            let (entered, seen_there) = (own.clone(), seen.clone());
            let wait = Doing::new(move || {
                let limit = Instant::now() + LONG;
                while count(&entered) < expected && Instant::now() < limit {
                    thread::sleep(Duration::from_millis(1));
                }
                *seen_there.lock().unwrap() = count(&entered);
            });
            reducer.backward_reduced(model.loss(x(), wait).unwrap(), &model).unwrap();
            let seen = *seen.lock().unwrap();
            assert!(seen == expected && count(&own) > expected + 1, "{mesh:?}: {seen} of {}", count(&own));
            assert_eq!(count(&of_layers), 0);
        });
    }
}

/// A forward whose backward does not come has its layer's sums wait for the end of backward, on every rank, also where
/// one rank alone has made away with it.
fn a_forward_without_a_backward_has_its_sums_follow() {
    for forgets in [None, Some(0)] {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let mut reducer = model.reducer(comms);
            let loss = || model.loss(tokens((replica, &group), 0, DType::F32), Doing::nothing()).unwrap();
            let expected = model.values(&reducer.backward_reduced(loss(), &model).unwrap());
            let evaluated = model.second.forward(tokens((replica, &group), 1, DType::F32)).unwrap();
            let kept = (forgets != Some(group.rank())).then_some(evaluated);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), expected);
            drop(kept);
        });
    }
}

/// Optimizer's steps make new modules of new tensors: the reducer knows their layers.
fn layers_stay_known_behind_a_step() {
    places([2, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let [mut after, mut beside] = [(); 2].map(|()| Model::new(&group, DType::F32));
        let mut reducer = after.reducer(comms).with_layer(&beside.first).with_layer(&beside.second);
        reducer = reducer.with_late_params(&[beside.penalized().id]);
        let mut sgd = [(); 2].map(|()| SgdConfig::new().init());
        for step in 0..3 {
            let x = || tokens((replica, &group), step, DType::F32);
            reducer.backward(after.loss(x(), Doing::nothing()).unwrap(), &after).unwrap();
            let gradients = reducer.reduce(&after).unwrap();
            let values = after.values(&gradients);
            after = sgd[0].step(1e-3, after, gradients);
            let gradients = reducer.backward_reduced(beside.loss(x(), Doing::nothing()).unwrap(), &beside).unwrap();
            assert_eq!(beside.values(&gradients), values, "step {step}");
            beside = sgd[1].step(1e-3, beside, gradients);
        }
    });
}

/// A layer's parameter, replicated or an expert's, has another use of which the reducer does not know, on ranks with
/// tokens and without.
fn a_parameter_with_another_use_is_named() {
    let meshes = [([1, 2], false), ([1, 4], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)];
    for ((mesh, of_expert), in_place) in meshes.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32);
            let down = &model.first.experts.down;
            let id = if of_expert { down.id } else { model.penalized().id };
            let reducer = model.reducer_of_layers(comms);
            let mut reducer = if in_place { reducer.with_main_gradients() } else { reducer };
            let loss = || {
                let y = model.first.forward(tokens((replica, &group), 0, DType::F32)).unwrap().sum();
                match of_expert {
                    true => y + down.val().powi_scalar(2).sum(),
                    false => y + model.penalized().val().powi_scalar(2).sum(),
                }
            };
            match reducer.backward_reduced(loss(), &model).expect_err("a sum that has begun too soon") {
                Error::Invalid { name, expected, .. } => {
                    assert!(name == "variable" && expected.contains("with_late_params"), "{expected}");
                }
                error => assert!(is_refused(&error, "with_late_params"), "{error:?}"),
            }
            // What kernels had added to was dropped, and nothing of the failed microbatch is left.
            assert_eq!(reducer.microbatches(), 0);
            reducer.backward(loss(), &model).unwrap();
            let after = model.values(&reducer.reduce(&model).unwrap());
            // Named, or all experts after backward: the same bits.
            let mut reducer = reducer.with_late_params(&[id]);
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), after);
            let mut reducer = reducer.with_late_experts();
            assert_eq!(model.values(&reducer.backward_reduced(loss(), &model).unwrap()), after);
        });
    }
}

/// A parameter of which no rank has a gradient stays without one; if one rank has it, all get it; what is left out stays
/// each rank's own.
fn parameters_without_gradients() {
    #[derive(Module, Debug)]
    struct Own<B: Backend> {
        nobodys: Param<Tensor<B, 1>>,
        somebodys: Param<Tensor<B, 1>>,
        left_out: Param<Tensor<B, 1>>,
    }
    let types = [(DType::F32, false), (DType::BF16, false), (DType::BF16, true), (DType::F64, false)];
    for (dtype, in_f32) in types {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let model: Own<B> = Own { nobodys: own(1, dtype), somebodys: own(2, dtype), left_out: own(3, dtype) };
            let reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().without(&[model.left_out.id]);
            let mut reducer = if in_f32 { reducer.with_main_gradients_in_f32() } else { reducer };
            let has = (replica, group.rank()) == (1, 0);
            let factor = 1.0 + (2 * replica + group.rank()) as f64;
            let own = model.left_out.val().mul_scalar(factor).sum();
            let loss = if has { own + model.somebodys.val().powi_scalar(2).sum() } else { own };
            reducer.backward(loss, &model).unwrap();
            let gradients = reducer.reduce(&model).unwrap();
            assert!(gradients.get::<Flex, 1>(model.nobodys.id).is_none());
            let somebodys = gradients.get::<Flex, 1>(model.somebodys.id).unwrap();
            // The same on all ranks.
            assert_eq!(somebodys.dtype(), if in_f32 { DType::F32 } else { dtype });
            assert_eq!(floats(somebodys), floats(model.somebodys.val().mul_scalar(2.0)));
            assert_eq!(floats(gradients.get::<Flex, 1>(model.left_out.id).unwrap()), vec![factor as f32; H]);
        });
    }
}

/// Each rank's own, of the same sizes: over replicas they are summed, over the group they are not. Ranks whose sums have
/// other types are told so.
fn experts_of_the_users_own() {
    #[derive(Module, Debug)]
    struct Own<B: Backend> {
        expert: Param<Tensor<B, 1>>,
        norm: Param<Tensor<B, 1>>,
    }
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Own { expert: own(group.rank() as u64, DType::F32), norm: own(9, DType::F32) };
            let mut reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_experts(&[model.expert.id]);
            let factor = |replica: usize, rank: usize| (1 + 10 * replica + rank) as f32;
            let loss = || (model.expert.val() + model.norm.val()).mul_scalar(factor(replica, group.rank())).sum();
            reducer.backward(loss(), &model).unwrap();
            let sums = reducer.reduce(&model).unwrap();
            let sum = |of: &Param<Tensor<B, 1>>| floats(sums.get::<Flex, 1>(of.id).unwrap());
            // Small whole numbers.
            let of_rank = |rank| (0..mesh[0]).map(|replica| factor(replica, rank)).sum::<f32>();
            assert_eq!(sum(&model.expert), [of_rank(group.rank()); H]);
            assert_eq!(sum(&model.norm), [(0..mesh[1]).map(of_rank).sum::<f32>(); H]);
            let is_culprit = (replica, group.rank()) == (mesh[0] - 1, mesh[1] - 1);
            let mut reducer = if is_culprit { reducer.with_main_gradients_in_f32() } else { reducer };
            reducer.backward(loss(), &model).unwrap();
            match reducer.reduce(&model).expect_err("another type") {
                Error::Invalid { name, found, .. } => {
                    assert_eq!((&name[..], found.contains("in f32")), ("gradients", is_culprit));
                }
                error => panic!("{error:?}"),
            }
            assert_eq!(reducer.microbatches(), 1);
        });
    }
}

tests! {
    fn();
    experts_of_the_users_own,
    sums_beside_backward_are_those_after_it,
    sums_of_a_layer_begin_while_backward_runs,
    a_forward_without_a_backward_has_its_sums_follow,
    layers_stay_known_behind_a_step,
    a_parameter_with_another_use_is_named,
    parameters_without_gradients,
}
