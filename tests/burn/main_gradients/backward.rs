//! Sums of backwards.

use super::*;

/// Sums in f32 are those of each microbatch's f32 gradients, which round to burn's own; in the parameters' type they have
/// that type.
pub fn added_up<S: Subject + MoeBackend<Native = S>>() {
    for dtype in [DType::F32, DType::BF16] {
        let group = S::alone();
        let device = core::<S>(&group);
        let moe = cast::<S, _>(module::<Autodiff<S>>(&config(), group), dtype);
        let reducer = || GradientReducer::<Autodiff<S>>::alone(&device).unwrap().with_layer(&moe);
        let run = |mut reducer: GradientReducer<Autodiff<S>>, which: std::ops::Range<usize>| {
            for microbatch in which.clone() {
                reducer.backward(loss::<S>(&moe, microbatch, dtype), &moe).unwrap();
            }
            assert_eq!(reducer.microbatches(), which.len() as u64);
            let found = read::<S>(&moe, &reducer.reduce(&moe).unwrap());
            assert_eq!(reducer.microbatches(), 0);
            found
        };
        let each: Vec<Found> =
            (0..MICROBATCHES).map(|m| run(reducer().with_main_gradients_in_f32(), m..m + 1)).collect();
        for (microbatch, wide) in each.iter().enumerate() {
            let own = run(reducer(), microbatch..microbatch + 1);
            let in_place = run(reducer().with_main_gradients(), microbatch..microbatch + 1);
            assert_eq!(in_place, own, "{dtype:?}");
            for ((name, wide_type, wide), (_, own_type, own)) in wide.iter().zip(&own) {
                assert_eq!((*wide_type, *own_type), (DType::F32, dtype), "{name}");
                let rounded: Vec<f32> = match dtype {
                    DType::F32 => wide.clone(),
                    _ => wide.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect(),
                };
                assert_eq!(&rounded, own, "{name} in {dtype:?}");
                let holds_more = rounded != *wide;
                // Experts' gradients come as the kernels make them; burn's others are of the parameter's type.
                assert_eq!(holds_more, dtype != DType::F32 && name.starts_with("experts"), "{name} in {dtype:?}");
            }
        }
        let all = run(reducer().with_main_gradients_in_f32(), 0..MICROBATCHES);
        for (at, (name, found_type, found)) in all.iter().enumerate() {
            let sum = |i: usize| each[1..].iter().fold(each[0][at].2[i], |sum, one| sum + one[at].2[i]);
            let sums: Vec<f32> = (0..found.len()).map(sum).collect();
            assert_eq!((*found_type, found), (DType::F32, &sums), "{name} in {dtype:?}");
        }
        let narrow = run(reducer().with_main_gradients(), 0..MICROBATCHES);
        assert!(narrow.iter().all(|(_, found_type, _)| *found_type == dtype));
        for ((name, _, narrow), (_, _, wide)) in narrow.iter().zip(&all) {
            // A rounding of 2⁻⁹ a microbatch of sums no larger than the microbatches' magnitudes.
            let at = all.iter().position(|(other, ..)| other == name).unwrap();
            for (i, (a, b)) in narrow.iter().zip(wide).enumerate() {
                let size: f32 = each.iter().map(|one| one[at].2[i].abs()).sum();
                let bound = if dtype == DType::F32 { 0.0 } else { 2.0 * MICROBATCHES as f32 * size / 512.0 };
                assert!((a - b).abs() <= bound, "{name}: {a}, {b} in f32");
            }
        }
    }
}

fn sums_in_f32_are_those_of_each_microbatch() {
    added_up::<Flex>();
}

/// Over ranks and replicas: sums beside backward have the bits of those behind it, of a layer that is called twice too.
fn sums_over_ranks_beside_backward_are_those_behind_it() {
    for (mesh, dtype, wide) in [
        ([1, 2], DType::F32, true),
        ([2, 2], DType::F32, false),
        ([1, 2], DType::BF16, true),
        ([2, 1], DType::BF16, true),
        ([2, 2], DType::BF16, true),
        ([2, 2], DType::BF16, false),
    ] {
        for late in [false, true] {
            places(mesh, |place| {
                let Place { replica, group, comms, .. } = place;
                let model = Model::new(&group, dtype);
                let reducer = if late { model.reducer(comms).with_late_experts() } else { model.reducer(comms) };
                let mut reducer = match wide {
                    true => reducer.with_main_gradients_in_f32(),
                    false => reducer.with_main_gradients(),
                };
                let loss =
                    |microbatch| model.loss(tokens((replica, &group), microbatch, dtype), Doing::nothing()).unwrap();
                (0..3).for_each(|microbatch| reducer.backward(loss(microbatch), &model).unwrap());
                let behind = model.values(&reducer.reduce(&model).unwrap());
                (0..2).for_each(|microbatch| reducer.backward(loss(microbatch), &model).unwrap());
                let beside = model.values(&reducer.backward_reduced(loss(2), &model).unwrap());
                assert!(beside == behind, "{mesh:?} {dtype:?}");
                let expected = if wide { DType::F32 } else { dtype };
                let types = beside.iter().filter_map(|gradient| gradient.values.as_ref().map(|(dtype, _)| *dtype));
                assert!(types.into_iter().all(|found| found == expected));
            });
        }
    }
}

/// An expert's weight whose gradient the kernels have added up, and that comes through burn's graph in the microbatch that
/// begins the sums: refused with what to do, and not as another operation's; named as late it is summed.
fn an_expert_that_goes_burns_way_once() {
    let run = |late: bool| {
        places([2, 1], |place| {
            let Place { replica, group, comms, .. } = place;
            let moe = module::<B>(&config(), moebius::burn::DeviceGroup::from(&group));
            // One weight is the result of an operation, and the others are leaves still: all go burn's way.
            let computed = || {
                let (mut computed, down) = (moe.clone(), &moe.experts.down);
                computed.experts.down = Param::initialized(down.id, down.val().mul_scalar(2.0));
                computed
            };
            let reducer = GradientReducer::<B>::new(&Cpu::new(), comms).unwrap().with_layer(&moe);
            let reducer = reducer.with_main_gradients_in_f32();
            let mut reducer = if late { reducer.with_late_params(&moe.expert_ids()) } else { reducer };
            let loss = |moe: &ExpertParallelMoE<B>, microbatch: usize| {
                loss::<Flex>(moe, microbatch, DType::F32).mul_scalar(1.0 + replica as f32)
            };
            reducer.backward(loss(&moe, 0), &moe).unwrap();
            if !late {
                return reducer
                    .backward_reduced(loss(&computed(), 1), &moe)
                    .map(drop)
                    .map_err(|error| error.to_string());
            }
            let beside = reducer.backward_reduced(loss(&computed(), 1), &moe).unwrap();
            reducer.backward(loss(&moe, 0), &moe).unwrap();
            reducer.backward(loss(&computed(), 1), &moe).unwrap();
            let behind = reducer.reduce(&moe).unwrap();
            for ((name, _, beside), (_, _, behind)) in
                read::<Flex>(&moe, &beside).iter().zip(&read::<Flex>(&moe, &behind))
            {
                assert!(beside == behind, "{name}: {:?} and {:?}", &beside[..2], &behind[..2]);
            }
            Ok(())
        })
    };
    assert_eq!(run(true), [Ok(()), Ok(())]);
    for error in run(false) {
        let error = error.unwrap_err();
        assert!(error.contains("burn's graph") && error.contains("with_late_params"), "{error}");
        assert!(!error.contains("another operation"), "{error}");
    }
}

/// A given gradient of y is that of the loss Σ y·c.
fn a_given_gradient_is_a_losses() {
    let moe = module::<B>(&config(), single());
    let mut reducer = GradientReducer::<B>::alone(&Cpu::new()).unwrap().with_layer(&moe).with_main_gradients_in_f32();
    (0..2).for_each(|microbatch| reducer.backward(loss::<Flex>(&moe, microbatch, DType::F32), &moe).unwrap());
    let expected = read::<Flex>(&moe, &reducer.reduce(&moe).unwrap());
    for microbatch in 0..2 {
        let ((x, c), dims) = (inputs(microbatch), [token_counts()[microbatch], H]);
        let x = tensor::<B, 2>(x, dims).mul_scalar(1.0 + microbatch as f32);
        reducer.backward_with(moe.forward(x).unwrap(), tensor::<Flex, 2>(c, dims), &moe).unwrap();
    }
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), expected);
    let constant = tensor::<B, 2>(vec![0.0; H], [1, H]);
    let error = reducer.backward_with(constant, tensor::<Flex, 2>(vec![0.0; H], [1, H]), &moe);
    assert!(matches!(error, Err(Error::Invalid { .. })) && reducer.microbatches() == 0, "{error:?}");
}

/// Where a layer has begun to write, the step's sums are lost and the reducer begins anew; before that they are as they
/// were.
fn a_backward_that_fails() {
    let group = single();
    let moe = module::<B>(&config(), group);
    let mut reducer = GradientReducer::<B>::alone(&Cpu::new()).unwrap().with_layer(&moe).with_main_gradients_in_f32();
    let loss = |microbatch| loss::<Flex>(&moe, microbatch, DType::F32);
    let mut expected = |which: &[usize]| {
        which.iter().for_each(|m| reducer.backward(loss(*m), &moe).unwrap());
        read::<Flex>(&moe, &reducer.reduce(&moe).unwrap())
    };
    let (two, one) = (expected(&[0, 1]), expected(&[1]));
    let fails = || Doing::new(|| panic!("an operation of the user's own"));
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
    let run = |reducer: &mut GradientReducer<B>, loss| {
        let done = catch_unwind(AssertUnwindSafe(|| reducer.backward(loss, &moe)));
        assert!(done.is_err(), "it unwinds");
    };
    reducer.backward(loss(0), &moe).unwrap();
    // Before the layer's backward.
    run(&mut reducer, fails().apply(moe.forward(x()).unwrap()).sum());
    assert_eq!(reducer.microbatches(), 1);
    reducer.backward(loss(1), &moe).unwrap();
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), two);
    // Behind it.
    reducer.backward(loss(0), &moe).unwrap();
    run(&mut reducer, moe.forward(fails().apply(x().require_grad())).unwrap().sum());
    assert_eq!(reducer.microbatches(), 0);
    reducer.backward(loss(1), &moe).unwrap();
    assert_eq!(read::<Flex>(&moe, &reducer.reduce(&moe).unwrap()), one);
}

tests! {
    fn();
    sums_in_f32_are_those_of_each_microbatch,
    sums_over_ranks_beside_backward_are_those_behind_it,
    an_expert_that_goes_burns_way_once,
    a_given_gradient_is_a_losses,
    a_backward_that_fails,
}
