//! Conduct that a user of candle expects of any module: names, files, clones, optimizers, threads.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap};
use moebius::MoeConfig;
use moebius::candle::{ExpertParallelMoE, Parameters};
use moebius::checkpoint::{BlockParams, Checkpoint, LoadOptions};
use moebius::config::SharedConfig;
use moebius::ep::GroupConfig;
use moebius::layer::{Layer, ParamKind};

use crate::goldens::golden_of;
use crate::support::{AnyResult, close, config, flat, group, normal, redraw, seeded, single, tokens};
use crate::trials::tests;

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(SharedConfig { intermediate: 8, gated: true, bias: true });
    (full.expert_bias, full.router.logit_bias, full.router.selection_bias) = (true, true, true);
    full
}

fn in_map(config: MoeConfig, own: u64, device: &Device) -> AnyResult<(VarMap, ExpertParallelMoE)> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device).pp("layers.0");
    let moe = ExpertParallelMoE::new(Layer::new(config, 0)?, group(device)?, vb.pp("moe"))?;
    redraw(&vars, own)?;
    Ok((vars, moe))
}

fn variables_go_through_a_file_and_back(device: &Device) -> AnyResult<()> {
    let x = tokens(0..9, device)?;
    let (vars, moe) = in_map(full(), 32, device)?;
    let expected = flat(&moe.forward(&x)?)?;
    let mut names: Vec<String> = vars.data().lock().map_err(|e| e.to_string())?.keys().cloned().collect();
    names.sort();
    let mut wanted = ParamKind::ALL.map(|kind| format!("layers.0.moe.{}", kind.name()));
    wanted.sort();
    assert_eq!(names, wanted);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    vars.save(&file)?;

    // Into the variables of a module that lives already: it sees them.
    let (mut others, other) = in_map(full(), 33, device)?;
    assert!(flat(&other.forward(&x)?)? != expected);
    others.load(&file)?;
    assert_eq!(flat(&other.forward(&x)?)?, expected);
    // As constants: for inference, which keeps nothing.
    let bytes = std::fs::read(&file)?;
    let vb = VarBuilder::from_buffered_safetensors(bytes, DType::F32, device)?.pp("layers.0.moe");
    let frozen = ExpertParallelMoE::new(Layer::new(full(), 0)?, group(device)?, vb)?;
    let y = frozen.forward(&x.detach())?;
    assert_eq!(flat(&y)?, expected);
    assert!(!y.track_op() && frozen.vars().is_empty());
    Ok(())
}

fn a_variable_that_is_missing_or_mis_shaped_is_named(device: &Device) -> AnyResult<()> {
    let (vars, _) = in_map(full(), 32, device)?;
    let all = || -> AnyResult<HashMap<String, Tensor>> {
        let vars = vars.data().lock().map_err(|e| e.to_string())?;
        Ok(vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect())
    };
    let error = |tensors| -> AnyResult<String> {
        let vb = VarBuilder::from_tensors(tensors, DType::F32, device).pp("layers.0.moe");
        let made = ExpertParallelMoE::new(Layer::new(full(), 0)?, group(device)?, vb);
        Ok(made.err().map(|e| e.to_string()).unwrap_or_default())
    };
    let mut missing = all()?;
    missing.remove("layers.0.moe.shared.gate");
    let text = error(missing)?;
    assert!(text.contains("layers.0.moe.shared.gate"), "{text}");
    let mut turned = all()?;
    let up = turned["layers.0.moe.experts.up"].t()?.contiguous()?;
    turned.insert("layers.0.moe.experts.up".to_string(), up);
    let text = error(turned)?;
    assert!(text.contains("layers.0.moe.experts.up") && text.contains("48"), "{text}");
    Ok(())
}

fn a_clone_shares_its_variables_and_stands_where_modules_stand(device: &Device) -> AnyResult<()> {
    fn anywhere<T: Send + Sync + Clone + std::fmt::Debug + 'static>(_: &T) {}
    let moe = seeded(group(device)?, config())?;
    anywhere(&moe);
    anywhere(&moe.forward_full(tokens(0..2, device)?.as_tensor(), None)?);
    let x = tokens(0..9, device)?;
    let expected = flat(&moe.forward(&moe.forward(&x)?)?)?;
    let stack = candle_nn::seq().add(moe.clone()).add_fn(|x| Ok(x.clone())).add(moe.clone());
    assert_eq!(flat(&stack.forward(&x)?)?, expected);
    let boxed: Box<dyn Module> = Box::new(moe.clone());
    assert_eq!(flat(&boxed.forward(&x)?.apply(&moe)?)?, expected);
    // A step on the one is a step on the other.
    let mut sgd = SGD::new(moe.clone().vars(), 0.1)?;
    sgd.backward_step(&moe.forward(&x)?.sqr()?.mean_all()?)?;
    assert!(flat(&stack.forward(&x)?)? != expected);
    assert_eq!(flat(&stack.forward(&x)?)?, flat(&moe.forward(&moe.forward(&x)?)?)?);
    Ok(())
}

/// Weight decay moves whatever has a gradient, be it of zeros.
fn an_optimizer_leaves_the_selection_bias_alone(device: &Device) -> AnyResult<()> {
    let (vars, moe) = in_map(full(), 32, device)?;
    let bias = moe.param(ParamKind::SelectionBias).ok_or("no selection bias")?.clone();
    let given = Tensor::arange(0f32, 8., device)?;
    Var::from_tensor(&bias)?.set(&given)?;
    let before: Vec<_> = moe.vars().iter().map(|v| flat(v)).collect::<AnyResult<_>>()?;
    assert_eq!(before.len(), ParamKind::ALL.len() - 1);
    let mut adam = AdamW::new(vars.all_vars(), ParamsAdamW { lr: 0.1, weight_decay: 0.5, ..Default::default() })?;
    let x = tokens(0..40, device)?;
    let out = moe.forward_full(&x, None)?;
    let gradients = out.y.sqr()?.mean_all()?.backward()?;
    assert!(gradients.get(&bias).is_none());
    adam.step(&gradients)?;
    assert_eq!(flat(&bias)?, flat(&given)?);
    for (var, before) in moe.vars().iter().zip(&before) {
        assert!(flat(var)? != *before, "{:?} stayed", var.dims());
    }
    // The load moves it: up where an expert had fewer tokens than the mean.
    let load = out.load.get()?;
    moe.update_selection_bias(load, 0.25)?;
    let mean = load.total() as f32 / 8.0;
    for (expert, (bias, &tokens)) in flat(&bias)?.into_iter().zip(&load.tokens_per_expert).enumerate() {
        let step = if tokens as f32 == mean { 0.0 } else { 0.25 * (mean - tokens as f32).signum() };
        assert_eq!(bias, expert as f32 + step);
    }
    let text = seeded(group(device)?, config())?.update_selection_bias(load, 0.25).err().map(|e| e.to_string());
    assert!(text.as_ref().is_some_and(|t| t.contains("router.selection_bias")), "{text:?}");
    let text = moe.detached().update_selection_bias(load, 0.25).err().map(|e| e.to_string());
    assert!(text.as_ref().is_some_and(|t| t.contains("a variable")), "{text:?}");
    Ok(())
}

fn evaluation_keeps_nothing_and_sees_the_optimizers_steps(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, full())?;
    let (evaluated, x) = (moe.detached(), tokens(0..9, device)?);
    let mut sgd = SGD::new(moe.vars(), 0.1)?;
    for _ in 0..2 {
        let y = moe.forward(&x)?;
        let still = evaluated.forward(&x.detach())?;
        assert!(y.track_op() && !still.track_op());
        assert_eq!(flat(&still)?, flat(&y)?, "the same bits");
        sgd.backward_step(&y.sqr()?.mean_all()?)?;
    }
    assert!(evaluated.vars().is_empty());
    // Tokens alone are tracked: gradients go through.
    let gradients = evaluated.forward(&x)?.sqr()?.sum_all()?.backward()?;
    let expected = moe.forward(&x)?.sqr()?.sum_all()?.backward()?;
    let of = |g: &candle_core::backprop::GradStore| flat(g.get(&x).ok_or("no gradient of x")?);
    assert_eq!(of(&gradients)?, of(&expected)?);
    Ok(())
}

fn a_part_of_the_parameters_is_trained(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, full())?;
    let x = tokens(0..9, device)?.detach();
    let whole = moe.forward(&x)?.sqr()?.sum_all()?.backward()?;
    for kept in [ParamKind::Router, ParamKind::DownBias, ParamKind::SharedGate] {
        let of = |kind: ParamKind| {
            let t = moe.param(kind).ok_or("a parameter")?;
            Ok((kind.name().to_string(), if kind == kept { t.clone() } else { t.detach() }))
        };
        let tensors = ParamKind::ALL.into_iter().map(of).collect::<AnyResult<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
        let part = ExpertParallelMoE::new(moe.layer().clone(), moe.group(), vb)?;
        let gradients = part.forward(&x)?.sqr()?.sum_all()?.backward()?;
        assert_eq!(part.vars().len(), 1);
        for kind in ParamKind::ALL {
            let found = gradients.get(part.param(kind).ok_or("a parameter")?);
            assert_eq!(found.is_some(), kind == kept, "{kind:?}");
        }
        let of = |g: &candle_core::backprop::GradStore| flat(g.get(&part.vars()[0]).ok_or("no gradient")?);
        assert_eq!(of(&gradients)?, of(&whole)?, "{kept:?}");
    }
    Ok(())
}

/// Two halves of a batch, each with a backward of its own or both behind one, add up to the whole.
fn gradients_accumulate_over_microbatches(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let half = |rows| -> AnyResult<Tensor> { Ok(moe.forward(&tokens(rows, device)?.detach())?.sqr()?.sum_all()?) };
    let of = |g: &candle_core::backprop::GradStore| -> AnyResult<Vec<Vec<f32>>> {
        moe.vars().iter().map(|v| flat(g.get(v).ok_or("no gradient")?)).collect()
    };
    let whole = of(&half(0..12)?.backward()?)?;
    // Both forwards first: each has its own context.
    let (first, second) = (half(0..6)?, half(6..12)?);
    let (late, early) = (of(&second.backward()?)?, of(&first.backward()?)?);
    let both = of(&(half(0..6)? + half(6..12)?)?.backward()?)?;
    for (i, whole) in whole.iter().enumerate() {
        let sum: Vec<f32> = early[i].iter().zip(&late[i]).map(|(a, b)| a + b).collect();
        close("two backwards", &sum, whole);
        close("one backward", &both[i], whole);
    }
    Ok(())
}

fn half_types_and_the_loss_beside_them(device: &Device) -> AnyResult<()> {
    let mut config = config();
    config.aux.balance = 0.5;
    let moe = single(config, DType::BF16, device)?;
    let x = tokens(0..9, device)?.to_dtype(DType::BF16)?;
    let router = |loss: Tensor| -> AnyResult<Vec<f32>> {
        flat(loss.backward()?.get(moe.param(ParamKind::Router).ok_or("a router")?).ok_or("no gradient")?)
    };
    let out = || moe.forward_full(&x, None);
    assert_eq!(out()?.aux.dtype(), DType::F32);
    // The gradient reaches the loss through casts and through shapes.
    let plain = router((out()?.aux * 0.5)?)?;
    assert!(plain.iter().any(|v| *v != 0.0));
    assert_eq!(router((out()?.aux.to_dtype(DType::BF16)? * 0.5)?)?, plain, "0.5 is exact in both");
    assert_eq!(router((out()?.aux.reshape((1, 1))? * 0.5)?.sum_all()?)?, plain);
    assert_eq!(router(out()?.aux.broadcast_as(4)?.contiguous()?.mean_all()?.affine(0.5, 0.0)?)?, plain);
    // Tokens of another type than the parameters' are refused with both named.
    let text = moe.forward(tokens(0..9, device)?.as_tensor()).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(text.to_lowercase().contains("f32") && text.to_lowercase().contains("bf16"), "{text}");
    Ok(())
}

fn layers_share_a_group_and_threads_share_a_layer(device: &Device) -> AnyResult<()> {
    let shared = group(device)?;
    let layers = |groups: [&moebius::candle::DeviceGroup; 2]| -> AnyResult<Vec<ExpertParallelMoE>> {
        groups.into_iter().map(|g| seeded(g, full())).collect()
    };
    let x = tokens(0..12, device)?;
    let run = |layers: &[ExpertParallelMoE]| -> AnyResult<[Vec<f32>; 2]> {
        let y = layers[1].forward(&(layers[0].forward(&x)? + x.as_tensor())?)?;
        let gradients = y.sqr()?.sum_all()?.backward()?;
        Ok([flat(&y)?, flat(gradients.get(&x).ok_or("no gradient of x")?)?])
    };
    let expected = run(&layers([&group(device)?, &group(device)?])?)?;
    let together = layers([&shared, &shared])?;
    assert_eq!(run(&together)?, expected);
    std::thread::scope(|scope| -> AnyResult<()> {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| run(&together))).collect();
        for thread in threads {
            assert_eq!(thread.join().expect("a thread")?, expected);
        }
        Ok(())
    })?;
    // Forward here, backward there.
    let loss = together[0].forward(&x)?.sqr()?.sum_all()?;
    let gradients = std::thread::scope(|scope| scope.spawn(|| loss.backward()).join().expect("a thread"))?;
    assert!(gradients.get(&x).is_some());
    Ok(())
}

fn one_output_in_two_losses(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let x = tokens(0..9, device)?;
    let y = moe.forward(&x)?;
    let (first, second) = (y.sqr()?.sum_all()?, y.sum_all()?);
    first.backward()?;
    let text = second.backward().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(text.contains("consumed"), "{text}");
    // Summed they go.
    let y = moe.forward(&x)?;
    (y.sqr()?.sum_all()? + y.sum_all()?)?.backward()?;
    Ok(())
}

fn a_trained_checkpoint_is_saved_under_its_published_names(device: &Device) -> AnyResult<()> {
    let published = Checkpoint::open(golden_of("qwen3_moe"))?;
    let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
    let block = published.load_block(0, options)?;
    let (experts, hidden) = (block.config.router.num_experts, block.config.hidden);
    let group = || moebius::candle::DeviceGroup::single(GroupConfig::new(experts, 64), device);
    let moe = ExpertParallelMoE::from_block(block, 0, group()?, Parameters::Trainable)?;
    let x = normal(31, (5, hidden), DType::F32, device)?;
    let before = flat(&moe.forward(&x)?)?;
    SGD::new(moe.vars(), 0.5)?.backward_step(&moe.forward(&x)?.sqr()?.sum_all()?)?;
    let expected = flat(&moe.forward(&x)?)?;
    assert!(before != expected);
    let folder = tempfile::tempdir()?;
    published.save(folder.path(), &[moe.to_block()?.params.at_layer(0)])?;
    let again = ExpertParallelMoE::from_checkpoint(&Checkpoint::open(folder.path())?, 0, group()?, Parameters::Frozen)?;
    assert_eq!(flat(&again.forward(&x)?)?, expected);
    Ok(())
}

fn a_loaded_selection_bias_moves_if_the_block_trains(device: &Device) -> AnyResult<()> {
    let (_, moe) = in_map(full(), 32, device)?;
    let load = moebius::metrics::Load::new(vec![8, 0, 0, 0, 0, 0, 0, 0], 0);
    let trained = ExpertParallelMoE::from_block(moe.to_block()?, 0, group(device)?, Parameters::Trainable)?;
    assert_eq!(trained.vars().len(), ParamKind::ALL.len() - 1);
    let bias = || -> AnyResult<_> { flat(trained.param(ParamKind::SelectionBias).ok_or("no selection bias")?) };
    let before = bias()?;
    trained.update_selection_bias(&load, 0.25)?;
    let moved: Vec<_> = before.iter().enumerate().map(|(e, b)| b + if e == 0 { -0.25 } else { 0.25 }).collect();
    assert_eq!(bias()?, moved);
    let frozen = ExpertParallelMoE::from_block(moe.to_block()?, 0, group(device)?, Parameters::Frozen)?;
    assert!(frozen.vars().is_empty() && frozen.update_selection_bias(&load, 0.25).is_err());
    Ok(())
}

/// Steps far below the last place of 16 bits at 1 add up: the bias of a 16-bit module is in f32.
fn a_selection_bias_of_a_16_bit_module_keeps_small_steps(device: &Device) -> AnyResult<()> {
    let load = moebius::metrics::Load::new(vec![8, 0, 0, 0, 0, 0, 0, 0], 0);
    for dtype in [DType::BF16, DType::F16] {
        let vb = VarBuilder::from_varmap(&VarMap::new(), dtype, device);
        let moe = ExpertParallelMoE::new(full(), group(device)?, vb)?;
        for _ in 0..3000 {
            moe.update_selection_bias(&load, 0.001)?;
        }
        let bias = moe.param(ParamKind::SelectionBias).ok_or("no selection bias")?;
        assert_eq!(bias.dtype(), DType::F32);
        for (expert, bias) in flat(bias)?.into_iter().enumerate() {
            // 3000 sums in f32 of up to 3: 3000 · 3 · 2^-24 at most.
            let expected = if expert == 0 { -3.0 } else { 3.0 };
            assert!((bias - expected).abs() <= 6e-4, "{bias} of expert {expert} in {dtype:?}");
        }
        let x = tokens(0..40, device)?.to_dtype(dtype)?;
        assert_eq!(moe.forward(&x)?.dtype(), dtype);
    }
    Ok(())
}

fn text<T>(result: candle_core::Result<T>) -> String {
    result.err().map(|e| e.to_string()).unwrap_or_default()
}

/// A block and a group when the module is made, tokens before any work.
fn what_does_not_fit_is_named_at_once(device: &Device) -> AnyResult<()> {
    let (_, moe) = in_map(full(), 32, device)?;
    let few = || moebius::candle::DeviceGroup::single(GroupConfig::new(4, 64), device);
    let spoilt = |spoil: fn(&mut BlockParams)| -> AnyResult<String> {
        let mut block = moe.to_block()?;
        spoil(&mut block.params);
        Ok(text(ExpertParallelMoE::from_block(block, 0, group(device)?, Parameters::Trainable)))
    };
    let bad = [
        (spoilt(|p| p.others.up_bias = None)?, "experts.up_bias"),
        (spoilt(|p| std::mem::swap(&mut p.up, &mut p.down))?, "experts.up"),
        (text(ExpertParallelMoE::from_block(moe.to_block()?, 0, few()?, Parameters::Trainable)), "num_experts"),
        (
            text(ExpertParallelMoE::new(
                Layer::new(full(), 0)?,
                few()?,
                VarBuilder::from_varmap(&VarMap::new(), DType::F32, device),
            )),
            "num_experts",
        ),
        (text(moe.forward(&tokens(0..2, device)?.to_dtype(DType::F64)?)), "tensor x: expected f32, found f64"),
    ];
    for (text, words) in bad {
        assert!(text.contains(words), "{words}: {text}");
    }
    let mut plain = moe.to_block()?;
    plain.config.router.logit_bias = false;
    let text = text(ExpertParallelMoE::from_block(plain, 0, group(device)?, Parameters::Trainable));
    assert!(text.contains("router.bias") && text.contains("none"), "{text}");
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    variables_go_through_a_file_and_back,
    a_variable_that_is_missing_or_mis_shaped_is_named,
    a_clone_shares_its_variables_and_stands_where_modules_stand,
    an_optimizer_leaves_the_selection_bias_alone,
    evaluation_keeps_nothing_and_sees_the_optimizers_steps,
    a_part_of_the_parameters_is_trained,
    gradients_accumulate_over_microbatches,
    half_types_and_the_loss_beside_them,
    layers_share_a_group_and_threads_share_a_layer,
    one_output_in_two_losses,
    a_trained_checkpoint_is_saved_under_its_published_names,
    a_loaded_selection_bias_moves_if_the_block_trains,
    a_selection_bias_of_a_16_bit_module_keeps_small_steps,
    what_does_not_fit_is_named_at_once,
}
