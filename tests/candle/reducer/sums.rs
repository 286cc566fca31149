//! The sums themselves: beside backward and after it, once, in any order of calls.

use super::*;

/// Over 1, 2 and 4 ranks and 1 and 2 replicas: the sums beside backward, those after it, and those of every rank's
/// gradients added up here.
fn sums_beside_backward_are_those_after_it() -> AnyResult<()> {
    for (mesh, dtype) in [
        ([1, 1], DType::F32),
        ([1, 2], DType::F32),
        ([1, 4], DType::F32),
        ([2, 1], DType::F32),
        ([2, 2], DType::F32),
        ([1, 2], DType::BF16),
        ([2, 2], DType::BF16),
    ] {
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, dtype)?;
            let reducer = model.reducer(comms)?;
            let loss = |microbatch| -> AnyResult<Tensor> {
                let x = tokens((replica, &group), microbatch, dtype)?;
                model.loss(&x, Nothing)
            };
            let new = || if dtype == DType::F32 { MainGradients::new() } else { MainGradients::in_f32() };
            let (mut own, mut after, mut beside) = (new(), new(), new());
            for microbatch in 0..3 {
                own.backward(&loss(microbatch)?)?;
                after.backward(&loss(microbatch)?)?;
                match microbatch {
                    2 => beside.backward_reduced(&loss(microbatch)?, &reducer)?,
                    _ => beside.backward(&loss(microbatch)?)?,
                }
            }
            after.reduce(&reducer)?;
            let found = model.values(&beside)?;
            assert_eq!(found, model.values(&after)?);
            // What was summed is not added to.
            let error = beside.backward(&loss(0)?).expect_err("a backward behind a sum");
            assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
            beside.reset();
            assert_eq!(beside.microbatches(), 0);
            let kinds: Vec<_> = model.vars().into_iter().map(|(kind, _)| kind).collect();
            Ok((kinds, model.own_values(&own)?, found))
        })?;
        check_sums(mesh, &results);
    }
    Ok(())
}

/// Sums of the second layer are over before the first layer's backward begins, its experts' over replicas among them;
/// microbatches before communicate nothing.
fn sums_of_a_layer_begin_while_backward_runs() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, of_layers, of_sums, of_replicas } = place;
            let model = Model::new(&group, DType::F32)?;
            // A layer's experts in one collective.
            let reducer = model.reducer(comms)?.with_bucket_bytes(1 << 20);
            let x = tokens((replica, &group), 0, DType::F32)?;
            let count = |entered: &Entered| -> usize {
                let entered = entered.lock().expect("what was entered");
                entered.iter().filter(|op| **op == Op::GradReduce).count()
            };
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            assert_eq!((count(&of_sums), count(&of_replicas), count(&of_layers)), (0, 0, 0));
            let seen = Arc::new(Mutex::new(0));
            // The comparison of microbatches and the sum, and of the replicas the experts' sum.
            let (own, expected) = if mesh[0] > 1 { (of_replicas.clone(), 3) } else { (of_sums.clone(), 2) };
            let (entered, seen_there) = (own.clone(), seen.clone());
            let wait = move || {
                let limit = Instant::now() + TIMEOUT;
                while count(&entered) < expected && Instant::now() < limit {
                    std::thread::sleep(Duration::from_millis(1));
                }
                *seen_there.lock().expect("a count") = count(&entered);
                Ok(())
            };
            main.backward_reduced(&model.loss(&x, Doing(wait))?, &reducer)?;
            let seen = *seen.lock().expect("a count");
            assert!(seen == expected && count(&own) > expected + 1, "{mesh:?}: {seen} of {}", count(&own));
            assert_eq!(count(&of_layers), 0);
            Ok(())
        })?;
    }
    Ok(())
}

/// Gradients that have been summed are not summed again.
fn sums_are_summed_once() -> AnyResult<()> {
    for (mesh, beside) in [([1, 1], false), ([1, 2], false), ([1, 2], true), ([2, 1], false)] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let loss = model.loss(&x, Nothing)?;
            let mut main = MainGradients::new();
            match beside {
                true => main.backward_reduced(&loss, &reducer)?,
                false => {
                    main.backward(&loss)?;
                    main.reduce(&reducer)?;
                }
            }
            let sums = model.values(&main)?;
            for _ in 0..2 {
                let error = main.reduce(&reducer).expect_err("a second sum");
                assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
                assert_eq!(model.values(&main)?, sums);
            }
            main.reset();
            main.backward(&model.loss(&x, Nothing)?)?;
            // The caller may have summed what it was lent.
            main.store_mut();
            let before = model.own_values(&main)?;
            let error = main.reduce(&reducer).expect_err("a sum behind a change");
            assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
            assert_eq!(model.own_values(&main)?, before);
            Ok(())
        })?;
    }
    Ok(())
}

/// Whichever call names the experts, and wherever it stands.
fn late_experts_in_any_order_of_calls() -> AnyResult<()> {
    places([2, 1], |place| {
        let Place { replica, group, comms, .. } = place;
        let moe = of_type(group.clone(), config(), DType::F32)?;
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_late_experts().with_layer(&moe);
        let x = tokens((replica, &group), 0, DType::F32)?;
        let down = moe.param(ParamKind::Down).ok_or("a weight")?;
        // Which would be too late for a sum that has begun.
        let loss = (moe.forward(&x)?.sum_all()? + down.sqr()?.sum_all()?)?;
        MainGradients::new().backward_reduced(&loss, &reducer)?;
        Ok(())
    })?;
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    sums_beside_backward_are_those_after_it,
    sums_of_a_layer_begin_while_backward_runs,
    sums_are_summed_once,
    late_experts_in_any_order_of_calls,
}
