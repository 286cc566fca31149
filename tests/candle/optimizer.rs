//! This crate's AdamW as a candle user meets it: in place of candle-nn's, in 16 bits, saved and resumed, used wrongly.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarBuilder, VarMap};
use moebius::candle::{AdamW, AdamWParam, ExpertParallelMoE, error_of};
use moebius::optim::{AdamWOptions, GroupOptions, LossScaling};
use moebius::{CheckpointError, Error};

use crate::support::{AnyResult, config, flat, normal, redraw, single};
use crate::trials::tests;

fn options(lr: f64) -> AdamWOptions {
    AdamWOptions { group: GroupOptions { lr, ..GroupOptions::default() }, ..AdamWOptions::default() }
}

/// A loss that falls as a layer learns to give its input; the auxiliary losses are part of it.
fn loss(moe: &ExpertParallelMoE, step: u64, dtype: DType, device: &Device) -> AnyResult<Tensor> {
    let x = normal(700 + step, (64, 16), dtype, device)?;
    let out = moe.forward_full(&x, None)?;
    let distance = (out.y - x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
    Ok((distance + out.aux)?)
}

fn all(moe: &ExpertParallelMoE) -> AnyResult<Vec<Vec<f32>>> {
    moe.vars().iter().map(|var| flat(var)).collect()
}

/// Gradients of a loss that has none but a variable of no account.
fn store(device: &Device) -> AnyResult<GradStore> {
    Ok(Var::zeros((), DType::F32, device)?.backward()?)
}

/// Both are within `bound` of tests/optimizer.rs of f64, and candle-nn's decay and moments take two roundings more.
fn it_steps_as_candles_own(device: &Device) -> AnyResult<()> {
    const STEPS: u64 = 5;
    let (ours, theirs) = (single(config(), DType::F32, device)?, single(config(), DType::F32, device)?);
    let lr = 0.01;
    let group = GroupOptions { lr, weight_decay: 0.1, ..GroupOptions::default() };
    let mut adam = AdamW::new(ours.vars(), AdamWOptions { group, ..options(lr) })?;
    let mut other =
        candle_nn::AdamW::new(theirs.vars(), ParamsAdamW { lr, weight_decay: 0.1, ..ParamsAdamW::default() })?;
    for step in 0..STEPS {
        // One gradient for both, so that only the optimizers differ.
        let gradients = loss(&ours, step, DType::F32, device)?.backward()?;
        let mut same = store(device)?;
        for (var, of) in theirs.vars().iter().zip(ours.vars()) {
            same.insert(var, gradients.get(&of).ok_or("no gradient")?.clone());
        }
        adam.step(&gradients)?;
        other.step(&same)?;
    }
    let (found, expected) = (all(&ours)?.concat(), all(&theirs)?.concat());
    let (t, u) = (STEPS as f64, 2f64.powi(-24));
    let largest = expected.iter().fold(0.0f64, |max, w| max.max(f64::from(w.abs())));
    let bound = 2.0 * t * (lr * (8.5 * t + 6.0) * u * (2.0 * t).sqrt() + 5.0 * u * (largest + lr * (2.0 * t).sqrt()));
    assert!(bound < 1e-3 * lr, "a bound that says something");
    for (a, b) in found.iter().zip(&expected) {
        assert!(f64::from((a - b).abs()) <= bound, "{a} and {b}, bound {bound}");
    }
    Ok(())
}

fn modules_of_16_bits_learn(device: &Device) -> AnyResult<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let moe = single(config(), dtype, device)?;
        let loss_scaling = (dtype == DType::F16).then(LossScaling::default);
        let mut adam = AdamW::new(moe.vars(), AdamWOptions { max_norm: Some(1.0), loss_scaling, ..options(0.003) })?;
        let mut losses = Vec::new();
        for step in 0..60 {
            let loss = loss(&moe, step, dtype, device)?;
            losses.push(loss.to_scalar::<f32>()?);
            adam.backward_step(&loss)?;
        }
        let mean = |part: &[f32]| part.iter().sum::<f32>() / part.len() as f32;
        let (first, last) = (mean(&losses[..10]), mean(&losses[50..]));
        assert!(last < 0.8 * first, "{dtype:?}: {first} to {last}");
        let stats = adam.stats()?;
        assert_eq!(stats.steps + stats.skipped, 60, "{stats:?}");
        assert!(stats.norm > 0.0 && stats.norm.is_finite());
    }
    Ok(())
}

fn a_scaled_loss_that_overflows_is_skipped(device: &Device) -> AnyResult<()> {
    let var = Var::from_tensor(&Tensor::new(&[1f32, 2.0], device)?.to_dtype(DType::F16)?)?;
    let scaling = LossScaling { initial: 16_777_216.0, ..LossScaling::default() };
    let mut adam = AdamW::new(vec![var.clone()], AdamWOptions { loss_scaling: Some(scaling), ..options(0.5) })?;
    let mut skipped = 0;
    while skipped < 30 {
        let before = flat(&var)?;
        adam.backward_step(&var.to_dtype(DType::F32)?.sum_all()?)?;
        let stats = adam.stats()?;
        if !stats.skipped_last {
            assert_ne!(flat(&var)?, before);
            assert_eq!(
                (stats.steps, stats.skipped, stats.loss_scale),
                (1, skipped, 16_777_216.0 / f64::powi(2.0, skipped as i32))
            );
            assert_eq!(stats.norm, 2f64.sqrt());
            return Ok(());
        }
        assert_eq!(flat(&var)?, before);
        skipped += 1;
    }
    Err("never taken".into())
}

fn learning_rates_and_groups(device: &Device) -> AnyResult<()> {
    let var = |v: f32| -> AnyResult<Var> { Ok(Var::new(&[v], device)?) };
    let (a, b) = (var(1.0)?, var(1.0)?);
    let of = |lr, weight_decay| GroupOptions { lr, betas: [0.0, 0.0], eps: 1e-30, weight_decay };
    let params = vec![AdamWParam::new("a", &a), AdamWParam::new("b", &b).in_group(1)];
    let mut adam = AdamW::with_groups(params, AdamWOptions::default(), &[of(0.5, 0.0), of(0.25, 1.0)])?;
    let step = |adam: &mut AdamW| -> AnyResult<[f32; 2]> {
        let gradients = (a.as_tensor() + b.as_tensor())?.sum_all()?.backward()?;
        adam.step(&gradients)?;
        Ok([flat(&a)?[0], flat(&b)?[0]])
    };
    assert_eq!(step(&mut adam)?, [0.5, 0.5]);
    adam.set_group(1, of(0.0, 1.0))?;
    assert_eq!(step(&mut adam)?, [0.0, 0.5]);
    adam.set_learning_rate(1.0);
    assert_eq!(adam.learning_rate(), 1.0);
    assert_eq!(step(&mut adam)?, [-1.0, -1.0]);
    // What is out of range is found by the step.
    adam.set_learning_rate(f64::NAN);
    assert!(step(&mut adam).is_err_and(|e| e.to_string().contains("lr")));
    assert!(adam.set_group(2, of(0.0, 0.0)).is_err());
    Ok(())
}

fn a_run_goes_on_from_its_saved_state(device: &Device) -> AnyResult<()> {
    let folder = tempfile::tempdir()?;
    for dtype in [DType::F32, DType::BF16] {
        let start = || -> AnyResult<_> {
            let moe = single(config(), dtype, device)?;
            let options = AdamWOptions { max_norm: Some(0.1), ..options(0.01) };
            let adam = AdamW::with_groups(moe.optimizer_params("moe")?, options, &[options.group])?;
            Ok((moe, adam))
        };
        let train = |moe: &ExpertParallelMoE, adam: &mut AdamW, steps: std::ops::Range<u64>| -> AnyResult<()> {
            for step in steps {
                adam.backward_step(&loss(moe, step, dtype, device)?)?;
            }
            Ok(())
        };
        let (moe, mut adam) = start()?;
        train(&moe, &mut adam, 0..3)?;
        adam.save(folder.path())?;
        let kept = moe.vars().iter().map(|var| var.copy()).collect::<candle_core::Result<Vec<_>>>()?;
        train(&moe, &mut adam, 3..6)?;

        let (other, mut resumed) = start()?;
        // A model's checkpoint; 16-bit variables follow from the state.
        let vars = other.vars();
        vars.iter().zip(&kept).filter(|_| dtype == DType::F32).try_for_each(|(var, t)| var.set(t))?;
        assert_eq!(resumed.load(folder.path())?, 3);
        train(&other, &mut resumed, 3..6)?;
        assert_eq!(all(&other)?, all(&moe)?, "{dtype:?}");
    }
    let var = Var::zeros(3, DType::F32, device)?;
    let params = vec![AdamWParam::new("moe.router.weight", &var)];
    let error = AdamW::with_groups(params, options(0.1), &[options(0.1).group])?.load(folder.path()).unwrap_err();
    assert!(matches!(error_of(&error), Some(Error::Checkpoint(CheckpointError::Tensor { .. }))), "{error}");
    Ok(())
}

/// Variables of the same sizes, of which every map has another order.
fn states_are_read_by_names(device: &Device) -> AnyResult<()> {
    const VARS: usize = 16;
    let folder = tempfile::tempdir()?;
    let values = |vars: &VarMap| -> AnyResult<Vec<Vec<f32>>> {
        let vars = vars.data().lock().map_err(|e| e.to_string())?;
        (0..VARS).map(|i| flat(&vars[&format!("layer.{i}")])).collect()
    };
    let start = || -> AnyResult<VarMap> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::BF16, device);
        (0..VARS).try_for_each(|i| vb.get(8, &format!("layer.{i}")).map(drop))?;
        Ok(vars)
    };
    let vars = start()?;
    redraw(&vars, 40)?;
    let all = vars.all_vars();
    let loss = || {
        all.iter().try_fold(Tensor::zeros((), DType::F32, device)?, |sum, var| {
            sum + var.to_dtype(DType::F32)?.sqr()?.sum_all()?
        })
    };
    let mut adam = AdamW::of_var_map(&vars, options(0.1))?;
    adam.backward_step(&loss()?)?;
    adam.save(folder.path())?;
    for _ in 0..4 {
        let other = start()?;
        AdamW::of_var_map(&other, options(0.1))?.load(folder.path())?;
        assert_eq!(values(&other)?, values(&vars)?);
    }
    // Of variables that are known by their places.
    let mut unnamed = AdamW::new(vars.all_vars(), options(0.1))?;
    unnamed.backward_step(&loss()?)?;
    let kept = values(&vars)?;
    let save = unnamed.save(folder.path());
    for error in [save, unnamed.load(folder.path()).map(drop), unnamed.load_at(folder.path(), 1).map(drop)] {
        let error = error.unwrap_err();
        let named =
            matches!(error_of(&error), Some(Error::Invalid { expected, .. }) if expected.contains("of_var_map"));
        assert!(named, "{error}");
    }
    assert_eq!(values(&vars)?, kept);
    Ok(())
}

/// A run that has diverged does not spoil the one that would go on from its state.
fn a_state_that_is_not_finite_is_refused(device: &Device) -> AnyResult<()> {
    let folder = tempfile::tempdir()?;
    let of = |value: f32| -> AnyResult<(Var, AdamW)> {
        let var = Var::from_tensor(&Tensor::new(&[1f32, value], device)?.to_dtype(DType::BF16)?)?;
        let params = vec![AdamWParam::new("w", &var)];
        let adam = AdamW::with_groups(params, options(0.1), &[options(0.1).group])?;
        Ok((var, adam))
    };
    for (value, found) in [(f32::NAN, "NaN at [1]"), (f32::NEG_INFINITY, "-inf at [1]")] {
        of(value)?.1.save(folder.path())?;
        let (var, mut adam) = of(2.0)?;
        let error = adam.load(folder.path()).expect_err("refused");
        let Some(Error::Checkpoint(CheckpointError::Tensor { tensor, found: is, .. })) = error_of(&error) else {
            return Err(error.into());
        };
        assert_eq!((&tensor[..], &is[..]), ("w.main", found));
        assert_eq!(flat(&var)?, [1.0, 2.0]);
    }
    Ok(())
}

fn variables_changed_by_others_are_read_again(device: &Device) -> AnyResult<()> {
    let var = Var::zeros(4, DType::BF16, device)?;
    let mut adam = AdamW::new(vec![var.clone()], options(0.0))?;
    var.set(&Tensor::ones(4, DType::BF16, device)?)?;
    adam.read_params()?;
    adam.backward_step(&var.to_dtype(DType::F32)?.sum_all()?)?;
    assert_eq!(flat(&var)?, [1.0; 4]);
    Ok(())
}

fn odd_gradients_and_variables(device: &Device) -> AnyResult<()> {
    // A gradient that is the variable's own memory, one that is turned, and none.
    let values = normal(1, (3, 5), DType::F32, device)?;
    let of = || -> AnyResult<Var> { Ok(Var::from_tensor(&values)?) };
    let (own, turned, none) = (of()?, of()?, of()?);
    let mut adam = AdamW::new(vec![own.clone(), turned.clone(), none.clone()], options(0.1))?;
    let mut gradients = store(device)?;
    gradients.insert(&own, own.as_detached_tensor());
    gradients.insert(&turned, values.t()?.contiguous()?.t()?);
    adam.step(&gradients)?;
    assert_eq!(flat(&own)?, flat(&turned)?);
    assert_ne!(flat(&own)?, flat(&values)?);
    assert_eq!(flat(&none)?, flat(&values)?);
    // Of as many elements, or of more.
    for dims in [(5, 3), (4, 5), (1, 15)] {
        gradients.insert(&none, Tensor::zeros(dims, DType::F32, device)?);
        let (before, error) = (flat(&own)?, adam.step(&gradients).unwrap_err());
        let named =
            matches!(error_of(&error), Some(Error::Shape { .. })) && error.to_string().contains("gradient of 2");
        assert!(named, "{error}");
        assert_eq!(flat(&own)?, before);
    }
    // Integers are left out, as candle-nn does; f64 is refused by name.
    let mut adam = AdamW::new(vec![Var::zeros(2, DType::U32, device)?], options(0.1))?;
    adam.step(&gradients)?;
    let wide = Var::zeros(2, DType::F64, device)?;
    let error =
        AdamW::with_groups(vec![AdamWParam::new("wide", &wide)], options(0.1), &[options(0.1).group]).unwrap_err();
    assert!(matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "parameter wide"), "{error}");
    let twice = vec![AdamWParam::new("a", &own), AdamWParam::new("b", &own)];
    let error = AdamW::with_groups(twice, options(0.1), &[options(0.1).group]).unwrap_err();
    assert!(matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "parameter b"), "{error}");
    Ok(())
}

tests!(
    fn(&Device) -> AnyResult<()>;
    it_steps_as_candles_own,
    modules_of_16_bits_learn,
    a_scaled_loss_that_overflows_is_skipped,
    learning_rates_and_groups,
    a_run_goes_on_from_its_saved_state,
    states_are_read_by_names,
    a_state_that_is_not_finite_is_refused,
    variables_changed_by_others_are_read_again,
    odd_gradients_and_variables,
);
