//! Which variables are summed: of layers, of maps, computed, with other uses, or without gradients.

use super::*;

/// An expert's weight has another use of which the reducer does not know.
fn an_expert_with_another_use_is_named() -> AnyResult<()> {
    for mesh in [[2, 1], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let down = model.layers[1].param(ParamKind::Down).ok_or("a weight")?;
            let loss = || -> AnyResult<Tensor> { Ok((model.loss(&x, Nothing)? + down.sqr()?.sum_all()?)?) };
            let mut main = MainGradients::new();
            let error = main.backward_reduced(&loss()?, &reducer).expect_err("sums that have begun too soon");
            match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) => {
                    assert!(name == "variable" && expected.contains("with_late_vars"), "{error}");
                }
                Some(Error::Comm(CommError::Refused { reason, .. })) => {
                    assert!(reason.contains("with_late_vars"), "{reason}")
                }
                other => panic!("{other:?} {error}"),
            }
            main.reset();
            let reducer = reducer.with_late_vars(&[Var::from_tensor(down)?]);
            let mut after = MainGradients::new();
            for microbatch in 0..2 {
                match microbatch {
                    1 => main.backward_reduced(&loss()?, &reducer)?,
                    _ => main.backward(&loss()?)?,
                }
                after.backward(&loss()?)?;
            }
            after.reduce(&reducer)?;
            assert_eq!(model.values(&main)?, model.values(&after)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// Experts that are computed and of which nothing is summed need no name, and what is left out is each rank's own.
fn what_no_rank_sums_needs_no_name() -> AnyResult<()> {
    places([1, 2], |place| {
        let Place { replica, group, comms, .. } = place;
        let whole = of_type(group.clone(), full(), DType::F32)?;
        let tensors = whole.params().into_iter().map(|(name, t)| Ok((name.to_string(), (t * 1.0)?)));
        let tensors = tensors.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let computed = ExpertParallelMoE::new(Layer::new(full(), 3)?, group.clone(), vb)?;
        let kinds = ParamKind::ALL.into_iter().filter(|kind| kind.is_replicated());
        let replicated = kinds.filter_map(|kind| whole.param(kind)).filter(|t| t.is_variable()).map(Var::from_tensor);
        let replicated = replicated.collect::<candle_core::Result<Vec<Var>>>()?;
        let vars = VarMap::new();
        let shard = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).get(3, "shard")?;
        let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&computed).with_vars(&replicated);
        let reducer = reducer.without(&vars.all_vars()).with_var_map(&vars);
        let x = tokens((replica, &group), 0, DType::F32)?;
        let factor = (1 + group.rank()) as f64;
        let mut main = MainGradients::new();
        main.backward(&(computed.forward(&x)?.sqr()?.sum_all()? + (shard.sum_all()? * factor)?)?)?;
        main.reduce(&reducer)?;
        assert_eq!(flat(main.get(&shard)?)?, [factor as f32; 3]);
        Ok(())
    })?;
    Ok(())
}

/// The layers' own variables given once more: experts stay each rank's, whichever call comes first.
fn all_variables_of_a_model() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 2]] {
        let results = places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let others: Vec<Var> = model.layers.iter().flat_map(ExpertParallelMoE::vars).collect();
            let x = tokens((replica, &group), 0, DType::F32)?;
            let mut main = MainGradients::new();
            main.backward(&model.loss(&x, Nothing)?)?;
            let own = model.own_values(&main)?;
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&others[..others.len() / 2]);
            let reducer = model.layers.iter().fold(reducer, GradientReducer::with_layer);
            main.reduce(&reducer.with_vars(&others).with_vars(&model.own))?;
            let kinds: Vec<_> = model.vars().into_iter().map(|(kind, _)| kind).collect();
            Ok((kinds, own, model.values(&main)?))
        });
        check_sums(mesh, &results?);
    }
    Ok(())
}

/// A step's gradients over the weights' f32 variables, each of whose elements is multiplied by 1: sums are those of a layer
/// of these variables themselves.
fn computed_parameters() -> AnyResult<()> {
    for (mesh, beside) in [[1, 2], [2, 1], [2, 2]].into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let whole = of_type(group.clone(), full(), DType::F32)?;
            let tensors = whole.params().into_iter().map(|(name, t)| Ok((name.to_string(), (t * 1.0)?)));
            let tensors = tensors.collect::<candle_core::Result<_>>()?;
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
            let computed = ExpertParallelMoE::new(Layer::new(full(), 3)?, group.clone(), vb)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            let loss = |moe: &ExpertParallelMoE| -> AnyResult<Tensor> { Ok(moe.forward(&x)?.sqr()?.sum_all()?) };
            let vars = whole.vars();
            let kinds = ParamKind::ALL.into_iter().filter(|kind| !kind.is_replicated());
            let experts = kinds.filter_map(|kind| whole.param(kind)).map(Var::from_tensor);
            let experts = experts.collect::<candle_core::Result<Vec<Var>>>()?;
            let mut main = MainGradients::new();
            // Nothing is summed of a layer of which some gradients would not be.
            let named = |error: candle_core::Error, kind: ParamKind, by: &str| match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) => {
                    assert!(name.contains("layer 3") && name.contains(kind.name()), "{error}");
                    assert!(expected.contains(by), "{error}");
                }
                other => panic!("{other:?} {error}"),
            };
            if mesh[1] > 1 {
                let error = computed.reduce_gradients(&mut loss(&computed)?.backward()?).expect_err("computed ones");
                named(error, ParamKind::Router, "candle::reduce_gradients");
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_layer(&computed);
            let error = main.backward_reduced(&loss(&computed)?, &reducer).expect_err("computed ones");
            named(error, ParamKind::Router, "with_vars");
            main.backward(&loss(&computed)?)?;
            let reducer = reducer.with_vars(&vars);
            named(main.reduce(&reducer).expect_err("computed experts"), ParamKind::Up, "with_experts");
            assert_eq!(main.microbatches(), 1);
            let reducer = reducer.with_experts(&experts);
            main.reduce(&reducer)?;
            let found: Vec<_> = vars.iter().map(|var| flat(main.get(var)?)).collect::<AnyResult<_>>()?;
            let reducer = reducer.with_layer(&whole);
            let mut expected = MainGradients::new();
            match beside {
                true => expected.backward_reduced(&loss(&whole)?, &reducer)?,
                false => {
                    expected.backward(&loss(&whole)?)?;
                    expected.reduce(&reducer)?;
                }
            }
            for (var, found) in vars.iter().zip(&found) {
                assert_eq!(flat(expected.get(var)?)?, *found, "{mesh:?} {:?}", var.dims());
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Each rank's own, of the same sizes: over replicas they are summed, over the group they are not.
fn experts_of_the_users_own() -> AnyResult<()> {
    for mesh in [[1, 2], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let var = |seed| -> AnyResult<Var> { Ok(Var::from_tensor(&normal(seed, 5, DType::F32, &Device::Cpu)?)?) };
            let (expert, norm) = (var(group.rank() as u64)?, var(9)?);
            let all = [expert.clone(), norm.clone()];
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&all);
            let reducer = reducer.with_experts(std::slice::from_ref(&expert)).with_vars(&all);
            let factor = |replica: usize, rank: usize| (1 + 10 * replica + rank) as f64;
            let mut main = MainGradients::new();
            main.backward(&((expert.as_tensor() + norm.as_tensor())? * factor(replica, group.rank()))?.sum_all()?)?;
            main.reduce(&reducer)?;
            // Small whole numbers.
            let of_rank = |rank| (0..mesh[0]).map(|replica| factor(replica, rank)).sum::<f64>() as f32;
            assert_eq!(flat(main.get(&expert)?)?, [of_rank(group.rank()); 5]);
            assert_eq!(flat(main.get(&norm)?)?, [(0..mesh[1]).map(of_rank).sum::<f32>(); 5]);
            Ok(())
        })?;
    }
    Ok(())
}

/// Variables of the same sizes in maps, each of which has an order of its own.
fn variables_of_a_map() -> AnyResult<()> {
    for other_name in [false, true] {
        places([1, 2], |place| {
            let Place { group, comms, .. } = place;
            let names: Vec<String> = (0..16).map(|i| format!("layer.{i}")).collect();
            let vars = VarMap::new();
            let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let get = |name: &String| vb.get(3, name);
            let all = names.iter().map(get).collect::<candle_core::Result<Vec<_>>>()?;
            if other_name && group.rank() == CULPRIT {
                vb.get(3, "layer")?;
            } else if other_name {
                vb.get(3, "norm")?;
            }
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
            for (i, t) in all.iter().enumerate() {
                loss = (loss + (t.sum_all()? * (i + 1) as f64)?)?;
            }
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_var_map(&vars);
            if other_name {
                return refused(&reducer, &loss, "variables");
            }
            let mut main = MainGradients::new();
            main.backward(&loss)?;
            main.reduce(&reducer)?;
            for (i, t) in all.iter().enumerate() {
                assert_eq!(flat(main.get(t)?)?, [2.0 * (i + 1) as f32; 3]);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// A layer's parameter has another use of which the reducer does not know, on ranks with tokens and without.
fn a_variable_with_another_use_is_named() -> AnyResult<()> {
    for mesh in [[1, 2], [1, 4], [2, 2]] {
        places(mesh, |place| {
            let Place { replica, group, comms, .. } = place;
            let model = Model::new(&group, DType::F32)?;
            let reducer = model.reducer_of_layers(comms)?;
            let x = tokens((replica, &group), 0, DType::F32)?;
            // A rank without tokens has no gradient of it, as candle forgets what stands on the right of an empty tensor.
            let loss = || -> AnyResult<Tensor> {
                let (penalty, y) = (model.penalized()?.sqr()?.sum_all()?, model.layers[0].forward(&x)?);
                Ok(if x.dims()[0] == 0 { y.sum_all()? } else { (y.sum_all()? + penalty)? })
            };
            let mut main = MainGradients::new();
            let error = main.backward_reduced(&loss()?, &reducer).expect_err("sums that have begun too soon");
            match error_of(&error) {
                Some(Error::Invalid { name, expected, .. }) if x.dims()[0] > 0 => {
                    assert!(name == "variable" && expected.contains("with_late_vars"), "{error}");
                }
                Some(Error::Comm(CommError::Refused { reason, .. })) => {
                    assert!(reason.contains("with_late_vars"), "{reason}")
                }
                other => panic!("{other:?} {error}"),
            }
            main.reset();
            let reducer = reducer.with_late_vars(&[Var::from_tensor(model.penalized()?)?]);
            main.backward_reduced(&loss()?, &reducer)?;
            let mut after = MainGradients::new();
            after.backward(&loss()?)?;
            after.reduce(&reducer)?;
            assert_eq!(flat(main.get(model.penalized()?)?)?, flat(after.get(model.penalized()?)?)?);
            // All experts after backward: the same bits, and no name is needed but the router's.
            let reducer = reducer.with_late_experts();
            let mut late = MainGradients::new();
            late.backward_reduced(&loss()?, &reducer)?;
            assert_eq!(flat(late.get(model.penalized()?)?)?, flat(after.get(model.penalized()?)?)?);
            Ok(())
        })?;
    }
    Ok(())
}

/// A parameter of which no rank has a gradient stays without one; if one rank has it, all get it.
fn variables_without_gradients() -> AnyResult<()> {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        places([2, 2], |place| {
            let Place { replica, group, comms, .. } = place;
            let of = |seed| normal(seed, 5, dtype, &Device::Cpu).and_then(|t| Ok(Var::from_tensor(&t)?));
            let (nobodys, somebodys) = (of(1)?, of(2)?);
            let reducer = GradientReducer::new(&Cpu::new(), comms)?.with_vars(&[nobodys.clone(), somebodys.clone()]);
            let mut main = MainGradients::in_f32();
            let of = if (replica, group.rank()) == (1, 0) {
                somebodys.sqr()?
            } else {
                Tensor::zeros(1, dtype, &Device::Cpu)?
            };
            main.backward(&of.sum_all()?)?;
            main.reduce(&reducer)?;
            assert!(main.store().get(&nobodys).is_none());
            let expected =
                (somebodys.as_tensor() * 2.0)?.to_dtype(if dtype == DType::F64 { dtype } else { DType::F32 })?;
            let found = main.get(&somebodys)?;
            assert_eq!((found.dtype(), flat(found)?), (expected.dtype(), flat(&expected)?));
            Ok(())
        })?;
    }
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    a_variable_with_another_use_is_named,
    variables_without_gradients,
    an_expert_with_another_use_is_named,
    what_no_rank_sums_needs_no_name,
    all_variables_of_a_model,
    computed_parameters,
    experts_of_the_users_own,
    variables_of_a_map,
}
