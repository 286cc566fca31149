//! Backwards on several ranks: against candle's own, and where a rank fails in one.

use super::*;

fn main_gradients_are_candles_on_any_number_of_ranks() -> AnyResult<()> {
    for count in [1, 2, 4] {
        for dtype in [DType::F32, DType::F64] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, dtype, &[])?;
                let x = tokens(&group, 0, dtype)?;
                let expected = model.loss(&x, Fault::Nowhere)?.backward()?;
                let mut main = MainGradients::new();
                main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                // Each variable has one term: the same bits, but for 0 and −0.
                assert_eq!(model.values(main.store())?, model.values(&expected)?);
                assert_eq!(flat(main.get(&x)?)?, flat(expected.get(&x).ok_or("no gradient of x")?)?);
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

/// Microbatches summed here, against a store each that is summed afterwards in the same order and type.
fn microbatches_of_ranks_are_summed_as_candles() -> AnyResult<()> {
    for count in [1, 2, 4] {
        for shared in [&[][..], &[ParamKind::Up, ParamKind::Router][..]] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, DType::F32, shared)?;
                let mut main = MainGradients::new();
                let mut sums: Option<Vec<Vec<f32>>> = None;
                for microbatch in 0..3 {
                    let x = tokens(&group, microbatch, DType::F32)?;
                    main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                    let own = model.values(&model.loss(&x, Fault::Nowhere)?.backward()?)?;
                    sums = Some(match sums {
                        None => own,
                        Some(sums) => {
                            let add = |(a, b): (Vec<f32>, Vec<f32>)| a.iter().zip(&b).map(|(a, b)| a + b).collect();
                            sums.into_iter().zip(own).map(add).collect()
                        }
                    });
                }
                let (found, sums) = (model.values(main.store())?, sums.ok_or("no microbatch")?);
                for (found, expected) in found.iter().zip(&sums) {
                    match shared.is_empty() {
                        true => assert_eq!(found, expected),
                        // Six terms of a shared variable, in two orders: of each sum 5 roundings of 2⁻²⁴ of what is
                        // added up, which is at most the terms' absolute values; `close` allows 1e-5 of the norm.
                        false => crate::support::close("a shared variable", found, expected),
                    }
                }
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

fn a_backward_that_fails_before_a_layer_is_told() -> AnyResult<()> {
    for (count, fault) in [2, 4].into_iter().flat_map(|n| [(n, Fault::BeforeAnyLayer), (n, Fault::BetweenLayers)]) {
        ranks(count, TIMEOUT, |group| {
            let model = Model::new(&group, DType::F32, &[])?;
            let [x, next] = [tokens(&group, 0, DType::F32)?, tokens(&group, 1, DType::F32)?];
            let mut twice = MainGradients::new();
            for x in [&x, &next] {
                twice.backward(&model.loss(x, Fault::Nowhere)?)?;
            }
            let expected = model.values(twice.store())?;

            let own = if group.rank() == CULPRIT { fault } else { Fault::Nowhere };
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Fault::Nowhere)?)?;
            let once = model.values(main.store())?;
            let failed = model.loss(&next, own)?;
            check_errors(&group, &main.backward(&failed).expect_err("a backward that fails"));
            match fault {
                // Nothing had been written: the step goes on where it was.
                Fault::BeforeAnyLayer => assert_eq!(model.values(main.store())?, once),
                // The second layer had added its gradients: on every rank the step begins anew.
                _ => {
                    assert!(main.get(&model.vars()[0]).is_err());
                    main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                }
            }
            main.backward(&model.loss(&next, Fault::Nowhere)?)?;
            assert_eq!(model.values(main.store())?, expected);

            // The same of one backward alone, and of candle's own, whose failure the rank tells itself.
            check_errors(&group, &backward(&model.loss(&next, own)?).expect_err("a backward that fails"));
            let loss = model.loss(&next, own)?;
            let error = loss.backward().expect_err("a backward that fails");
            refuse_backward(&loss, &error.to_string());
            check_errors(&group, &error);
            // A model that has no loss to give.
            let loss = model.loss(&next, Fault::Nowhere)?;
            match group.rank() == CULPRIT {
                true => model.layers[1].refuse_backward("a loss of the user's own"),
                false => check_errors(&group, &loss.backward().expect_err("a backward that fails")),
            }
            backward(&model.loss(&next, Fault::Nowhere)?)?;
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// Memory that was to be written first by the backward that fails holds nothing afterwards.
fn a_first_backward_that_fails_leaves_no_gradient() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let model = Model::new(&group, DType::F32, &[])?;
        let x = tokens(&group, 0, DType::F32)?;
        let expected = model.values(&backward(&model.loss(&x, Fault::Nowhere)?)?)?;
        let fault = if group.rank() == CULPRIT { Fault::BeforeAnyLayer } else { Fault::Nowhere };
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, fault)?).expect_err("a backward that fails");
        assert!(model.vars().iter().all(|var| main.get(var).is_err()));
        main.backward(&model.loss(&x, Fault::Nowhere)?)?;
        assert_eq!(model.values(main.store())?, expected);
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

/// Experts of the user's own that fail in backward, between combine and dispatch.
fn experts_of_ones_own_that_fail_in_backward() -> AnyResult<()> {
    for count in [2, 4] {
        ranks(count, TIMEOUT, |group| {
            let moe = DispatchCombine::new(config(), &group)?;
            let x = tokens(&group, 0, DType::F32)?;
            let logits = x.narrow(1, 0, EXPERTS)?;
            let loss = |fails: bool| -> AnyResult<Tensor> {
                let routed = moe.route(&logits, None)?;
                let received = moe.dispatch(&x, &routed.ids, &routed.weights)?;
                let y = received.combine(&received.rows.apply_op1(Failing(fails))?)?;
                Ok(y.sqr()?.sum_all()?)
            };
            let error = backward(&loss(group.rank() == CULPRIT)?).expect_err("experts that fail");
            check_errors(&group, &error);
            backward(&loss(false)?)?;
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// One rank goes on with a microbatch where the others sum over the ranks.
fn a_rank_with_one_microbatch_more() -> AnyResult<()> {
    for count in [2, 4] {
        // The rank has one forward and backward more, or one backward of forwards that all have run.
        for all_forward in [false, true] {
            ranks(count, TIMEOUT, |group| {
                let model = Model::new(&group, DType::F32, &[])?;
                let [x, next] = [tokens(&group, 0, DType::F32)?, tokens(&group, 1, DType::F32)?];
                let mut main = MainGradients::new();
                main.backward(&model.loss(&x, Fault::Nowhere)?)?;
                let before = model.values(main.store())?;
                let kept = all_forward.then(|| model.loss(&next, Fault::Nowhere)).transpose()?;
                let error = match (group.rank() == CULPRIT, &kept) {
                    (false, _) => model.layers[0].reduce_gradients(main.store_mut()).expect_err("another count").into(),
                    (true, Some(loss)) => main.backward(loss).expect_err("another count").into(),
                    (true, None) => model.loss(&next, Fault::Nowhere).err().ok_or("a forward among sums")?,
                };
                let own = error_of(&*error);
                let named = |peer: &usize| (*peer == CULPRIT) != (group.rank() == CULPRIT);
                assert!(
                    matches!(own, Some(Error::Comm(CommError::TagMismatch { peer, .. })) if named(peer)),
                    "rank {}: {error}",
                    group.rank()
                );
                assert_eq!(model.values(main.store())?, before);
                Ok(())
            })
            .into_iter()
            .collect::<AnyResult<Vec<_>>>()?;
        }
    }
    Ok(())
}

/// A mistake that every rank of a program makes alike costs no collective, which may end a communicator.
fn a_backward_behind_lent_sums_communicates_nothing() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let model = Model::new(&group, DType::F32, &[])?;
        let x = tokens(&group, 0, DType::F32)?;
        let mut main = MainGradients::new();
        main.backward(&model.loss(&x, Fault::Nowhere)?)?;
        main.store_mut();
        let (loss, before) = (model.loss(&x, Fault::Nowhere)?, model.values(main.store())?);
        let calls = || group.lock().dispatcher().communicator().calls();
        let first = calls();
        let error = main.backward(&loss).expect_err("a backward behind lent sums");
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
        assert_eq!(calls(), first);
        // The forward is still good.
        main.reset();
        main.backward(&loss)?;
        assert_eq!(model.values(main.store())?, before);
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

fn a_main_gradient_of_a_frozen_weight() -> AnyResult<()> {
    ranks(2, TIMEOUT, |group| {
        let whole = of_type(group.clone(), full(), DType::F32)?;
        let tensors = whole.params().into_iter().map(|(name, t)| {
            let frozen = name == ParamKind::Up.name() || name == ParamKind::UpBias.name();
            (name.to_string(), if frozen { t.detach() } else { t.clone() })
        });
        let vb = VarBuilder::from_tensors(tensors.collect(), DType::F32, &Device::Cpu);
        let moe = ExpertParallelMoE::new(Layer::new(full(), 5)?, group.clone(), vb)?;
        let mut main = MainGradients::new();
        let x = tokens(&group, 0, DType::F32)?;
        main.backward(&moe.forward(&x)?.sqr()?.sum_all()?)?;
        assert!(main.get(moe.param(ParamKind::Down).ok_or("down")?).is_ok());
        let error = main.get(moe.param(ParamKind::Up).ok_or("up")?).expect_err("frozen");
        match error_of(&error) {
            Some(Error::Invalid { found, .. }) => assert!(found.contains("frozen"), "{found}"),
            other => panic!("{other:?}"),
        }
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    main_gradients_are_candles_on_any_number_of_ranks,
    microbatches_of_ranks_are_summed_as_candles,
    a_backward_that_fails_before_a_layer_is_told,
    a_first_backward_that_fails_leaves_no_gradient,
    experts_of_ones_own_that_fail_in_backward,
    a_rank_with_one_microbatch_more,
    a_backward_behind_lent_sums_communicates_nothing,
    a_main_gradient_of_a_frozen_weight,
}
