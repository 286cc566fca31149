//! A rank that fails, does not come, or has something else than the others.

use super::*;

fn a_rank_that_fails_among_sums() -> AnyResult<()> {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut expected = MainGradients::new();
            expected.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;

            // Between two layers, when the sums of the second have begun.
            let mut main = MainGradients::new();
            let fail = move || match is_culprit {
                true => candle_core::bail!("an operation of the user's own"),
                false => Ok(()),
            };
            let error = main.backward_reduced(&model.loss(&x, Doing(fail))?, &reducer).expect_err("a backward fails");
            match (is_culprit, replica, error_of(&error)) {
                (true, ..) => assert!(error.to_string().contains("the user's own"), "{error}"),
                (false, 0, Some(Error::Peer { peer: CULPRIT, .. })) => {}
                // Of the other replica, which hears of it in a sum.
                (false, 1, Some(Error::Comm(CommError::Refused { reason, .. }))) => {
                    assert!(reason.contains("the user's own") || reason.contains("failed"), "{reason}");
                }
                (.., other) => panic!("{other:?} {error}"),
            }
            // The group and the reducer work on.
            main.reset();
            main.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;
            assert_eq!(model.values(&main)?, model.values(&expected)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// A rank does not come to the sums: the others hear of it at once, those of another replica too.
fn a_rank_that_does_not_come_to_sums() -> AnyResult<()> {
    let meshes = [[2, 1], [1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            let before = model.own_values(&main)?;
            let last = model.loss(&x, Nothing)?;
            let reduce = |main: &mut MainGradients| match beside {
                true => main.backward_reduced(&last, &reducer),
                false => main.reduce(&reducer),
            };
            match (replica, group.rank()) == (0, mesh[1] - 1) {
                true => reducer.refuse("a loss of the user's own")?,
                false => {
                    let error = reduce(&mut main).expect_err("a rank that does not come");
                    match error_of(&error) {
                        Some(Error::Comm(CommError::Refused { reason, .. })) => {
                            assert!(reason.contains("the user's own"), "{reason}");
                        }
                        other => panic!("{other:?} {error}"),
                    }
                }
            }
            assert_eq!(model.own_values(&main)?, before);
            reduce(&mut main)?;
            assert_ne!(model.values(&main)?, before);
            Ok(())
        })?;
    }
    Ok(())
}

/// Gradients that were lent on one rank alone: the others hear of it at once, and nothing is summed.
fn gradients_lent_on_one_rank_are_told() -> AnyResult<()> {
    for (mesh, beside) in [([1, 2], false), ([1, 2], true), ([2, 2], false)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            if is_culprit {
                main.store_mut();
            }
            let (before, loss) = (model.own_values(&main)?, model.loss(&x, Nothing)?);
            let done = if beside { main.backward_reduced(&loss, &reducer) } else { main.reduce(&reducer) };
            let error = done.expect_err("gradients that were lent");
            match (is_culprit, error_of(&error)) {
                (true, Some(Error::Invalid { name, .. })) => assert_eq!(name, "gradients"),
                (false, Some(Error::Comm(CommError::Refused { reason, .. }))) => {
                    assert!(reason.contains("store_mut"), "{reason}");
                }
                (_, other) => panic!("{other:?} {error}"),
            }
            assert_eq!(model.own_values(&main)?, before);
            // The reducer works on.
            main.reset();
            main.backward_reduced(&model.loss(&x, Nothing)?, &reducer)?;
            Ok(())
        })?;
    }
    Ok(())
}

/// Sums in buckets of other sizes would be of other gradients.
fn buckets_of_another_size_are_an_error_on_every_rank() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |Place { replica, group, comms, of_sums, of_replicas, .. }| {
            let is_culprit = (replica, group.rank()) == (0, 0);
            let var = Var::ones(3, DType::F32, &Device::Cpu)?;
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(std::slice::from_ref(&var));
            let other = if is_culprit { 4 } else { 8 };
            refused(&reducer.with_bucket_bytes(other), &var.sum_all()?, "bucket_bytes")?;
            // Each rank has found so by itself, behind one comparison with each of its peers.
            for entered in [of_sums, of_replicas] {
                let tags = entered.lock().unwrap().len();
                assert!(tags <= 1, "{tags} calls");
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Of layers with frozen routers replicas sum the experts alone, which are of the same sizes.
fn experts_in_another_order_are_an_error_on_every_replica() -> AnyResult<()> {
    places([2, 1], |place| {
        let Place { replica, group, comms, .. } = place;
        let layer = |number| -> AnyResult<ExpertParallelMoE> {
            let moe = of_type(group.clone(), config(), DType::F32)?;
            let tensors = moe.params().into_iter().map(|(name, t)| {
                let is_router = name == ParamKind::Router.name();
                (name.to_string(), if is_router { t.detach() } else { t.clone() })
            });
            let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
            Ok(ExpertParallelMoE::new(Layer::new(config(), number)?, group.clone(), vb)?)
        };
        let mut layers = [layer(3)?, layer(4)?];
        let x = tokens((replica, &group), 0, DType::F32)?;
        let loss = layers[1].forward(&layers[0].forward(&x)?)?.sum_all()?;
        if replica == CULPRIT {
            layers.reverse();
        }
        let reducer = layers.iter().fold(GradientReducer::new(&Cpu::new(), comms)?, GradientReducer::with_layer);
        refused(&reducer, &loss, "experts")
    })?;
    Ok(())
}

/// One rank has its sums in f32, the others in bf16.
fn gradients_of_another_type_are_an_error_on_every_rank() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let model = Model::new(&group, DType::BF16)?;
        let reducer = model.reducer(comms)?;
        let x = tokens((replica, &group), 0, DType::BF16)?;
        let is_culprit = group.rank() == CULPRIT;
        let mut main = if is_culprit { MainGradients::in_f32() } else { MainGradients::new() };
        main.backward(&model.loss(&x, Nothing)?)?;
        let before = model.own_values(&main)?;
        let error = main.reduce(&reducer).expect_err("another type");
        match error_of(&error) {
            Some(Error::Invalid { name, found, .. }) => {
                assert_eq!((&name[..], found.contains("f32")), ("gradients", is_culprit), "{error}");
            }
            other => panic!("{other:?} {error}"),
        }
        assert_eq!(model.own_values(&main)?, before);
        Ok(())
    })?;
    Ok(())
}

/// Sums of as many bytes, which would be mixed.
fn variables_in_another_order_are_an_error_on_every_rank() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { group, comms, .. } = place;
        let var = |n: usize| Var::ones(n, DType::F32, &Device::Cpu);
        let mut vars = vec![var(3)?, var(4)?];
        let loss = (vars[0].sum_all()? + vars[1].sum_all()?)?;
        if group.rank() == CULPRIT {
            vars.reverse();
        }
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&vars);
        refused(&reducer, &loss, "variables")
    })?;
    Ok(())
}

/// Layers have parameters of the same sizes, of which their numbers tell which is which.
fn layers_in_another_order_are_an_error_on_every_rank() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let mut layers = Model::new(&group, DType::F32)?.layers;
            let x = wide_tokens(0..7, H, DType::F32, &Device::Cpu)?;
            let loss = layers[1].forward(&layers[0].forward(&x)?)?.sqr()?.sum_all()?;
            if replica * mesh[1] + group.rank() == CULPRIT {
                layers.reverse();
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&layers[0]).with_layer(&layers[1]);
            let mut main = MainGradients::new();
            main.backward(&loss)?;
            let error = main.reduce(&reducer).expect_err("another order");
            // In another group than the culprit's it is the replicas who tell.
            let own = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "variables");
            let told = matches!(error_of(&error), Some(Error::Comm(CommError::Refused { .. })));
            assert!(own || (mesh == [2, 2] && told), "{mesh:?}: {error}");
            Ok(())
        })?;
    }
    Ok(())
}

/// One rank sums after one microbatch more, or less.
fn another_number_of_microbatches_is_an_error_on_every_rank() -> AnyResult<()> {
    let meshes = [[1, 2], [1, 4], [2, 2]];
    for (mesh, beside) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let is_culprit = (replica, group.rank()) == (0, CULPRIT);
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(ending(comms))?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            if is_culprit {
                // Of a loss without a layer, of which nobody else knows.
                main.backward(&model.own[0].sqr()?.sum_all()?)?;
            }
            let before = model.own_values(&main)?;
            let loss = model.loss(&x, Nothing)?;
            let done = if beside { main.backward_reduced(&loss, &reducer) } else { main.reduce(&reducer) };
            let error = done.expect_err("another number");
            let own = 1 + u64::from(is_culprit) + u64::from(beside);
            match (replica, error_of(&error)) {
                (0, Some(Error::Invalid { name, expected, found, .. })) => {
                    assert_eq!((&name[..], found.clone()), ("microbatches", own.to_string()));
                    assert!(is_culprit || expected.contains(&format!("rank {CULPRIT}")), "{expected}");
                }
                // Of the other replica, whose ranks all find the same.
                (1, Some(Error::Invalid { name, expected, found, .. })) => {
                    let at_culprit = group.rank() == CULPRIT;
                    let named = if at_culprit { (expected, "as on replica 0") } else { (found, "a replica of rank 1") };
                    assert!(name == "microbatches" && named.0.contains(named.1), "{error}");
                }
                (_, other) => panic!("replica {replica}, rank {}: {other:?} {error}", group.rank()),
            }
            // Nothing is lost, and nothing stands in the way of the missing microbatch.
            assert_eq!(model.own_values(&main)?, before);
            if !is_culprit {
                main.backward(&model.own[0].sqr()?.sum_all()?)?;
            }
            match beside {
                true => main.backward_reduced(&loss, &reducer)?,
                false => main.reduce(&reducer)?,
            }
            Ok(())
        })?;
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    a_rank_that_fails_among_sums,
    a_rank_that_does_not_come_to_sums,
    gradients_lent_on_one_rank_are_told,
    experts_in_another_order_are_an_error_on_every_replica,
    gradients_of_another_type_are_an_error_on_every_rank,
    variables_in_another_order_are_an_error_on_every_rank,
    layers_in_another_order_are_an_error_on_every_rank,
    another_number_of_microbatches_is_an_error_on_every_rank,
    buckets_of_another_size_are_an_error_on_every_rank,
}
