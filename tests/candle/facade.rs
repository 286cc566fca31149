//! First steps of a user of candle-nn: one call, numbers without being asked, training, ids, checkpoints, errors.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, ModuleT, Tensor};
use candle_nn::{VarBuilder, VarMap};
use moebius::candle::{
    DeviceGroup, EpGroup, ExpertParallelMoE, LoadAs, Parameters, ShardedIn, ShardedWeights, error_of, moe, routing_ids,
};
use moebius::checkpoint::{Checkpoint, LoadOptions};
use moebius::comm::Solo;
use moebius::config::AuxConfig;
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Payload};
use moebius::layer::{Layer, Noise, ParamKind};
use moebius::{Error, MoeConfig};

use crate::goldens::golden_of;
use crate::support::{AnyResult, EXPERTS, H, config, flat, group, seeded, tokens};
use crate::trials::tests;

/// The parameters of another module, in one that `moe` makes.
fn alone(like: &ExpertParallelMoE, device: &Device) -> AnyResult<ExpertParallelMoE> {
    let tensors = like.params().into_iter().map(|(name, t)| (name.to_string(), t.clone())).collect();
    Ok(moe(like.layer().config(), VarBuilder::from_tensors(tensors, DType::F32, device))?)
}

/// Gradients of the parameters and of x, in order.
fn gradients(moe: &ExpertParallelMoE, x: &Tensor, store: &GradStore) -> AnyResult<Vec<Vec<f32>>> {
    let all = moe.vars();
    let tensors = all.iter().map(|v| v.as_tensor()).chain([x]);
    tensors.map(|t| flat(store.get(t).ok_or("no gradient")?)).collect()
}

fn one_call_makes_a_layer_of_any_number_of_tokens(device: &Device) -> AnyResult<()> {
    let grouped = seeded(group(device)?, config())?;
    let alone = alone(&grouped, device)?;
    assert_eq!((alone.group().ranks(), alone.layer().number()), (1, 0));
    let x = tokens(0..9, device)?;
    assert_eq!(flat(&alone.forward(&x)?)?, flat(&grouped.forward(&x)?)?);
    // The group of `grouped` takes 1024 tokens, which one rank has no use for.
    let many = tokens(0..5000, device)?;
    let gradients = alone.forward(&many)?.sqr()?.mean_all()?.backward()?;
    assert!(gradients.get(&many).is_some());
    Ok(())
}

/// A configuration bounds what travels: of one rank alone nothing does, unless its dispatcher is named or a call says so.
fn a_rank_alone_has_no_bound_of_tokens(device: &Device) -> AnyResult<()> {
    let of = |most: usize, dispatcher: DispatcherKind| -> AnyResult<ExpertParallelMoE> {
        let group = GroupConfig { dispatcher, ..GroupConfig::new(EXPERTS, most) };
        seeded(DeviceGroup::single(group, device)?, config())
    };
    let x = tokens(0..9, device)?;
    let expected = flat(&of(9, DispatcherKind::AllToAll)?.forward(&x)?)?;
    for dispatcher in [DispatcherKind::Auto, DispatcherKind::Local] {
        assert_eq!(flat(&of(4, dispatcher)?.forward(&x)?)?, expected, "{dispatcher:?}");
    }
    for dispatcher in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
        let error = of(4, dispatcher)?.forward(&x).expect_err("refused");
        let Some(Error::Invalid { expected, found, .. }) = error_of(&error) else { return Err(error.into()) };
        assert_eq!((&expected[..], &found[..]), ("at most 4 tokens (the group's max_tokens_per_rank)", "9"));
    }
    Ok(())
}

fn layers_are_numbered_in_the_order_of_their_making(device: &Device) -> AnyResult<()> {
    let shared = group(device)?;
    let vb = || VarBuilder::from_varmap(&VarMap::new(), DType::F32, device);
    let number = |made: candle_core::Result<ExpertParallelMoE>| made.map(|moe| moe.layer().number());
    assert_eq!(number(ExpertParallelMoE::new(config(), &shared, vb()))?, 0);
    assert_eq!(number(ExpertParallelMoE::new(config(), &shared, vb()))?, 1);
    assert_eq!(number(ExpertParallelMoE::new(Layer::new(config(), 7)?, &shared, vb()))?, 7);
    assert_eq!(number(ExpertParallelMoE::new(config(), &shared, vb()))?, 8);
    let checkpoint = Checkpoint::open(golden_of("qwen3_moe"))?;
    let own = moebius::candle::DeviceGroup::single(&checkpoint.block_config(0)?, device)?;
    let load = || ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &own, Parameters::Frozen);
    assert_eq!((number(load())?, number(load())?), (0, 0), "a checkpoint's layers have their own");
    let block = load()?.to_block()?;
    assert_eq!(number(ExpertParallelMoE::from_block(block, None, &own, Parameters::Frozen))?, 1);
    Ok(())
}

fn a_path_numbers_the_layer_of_one_call(device: &Device) -> AnyResult<()> {
    let config = || {
        let mut config = config();
        config.router.jitter = 0.5;
        config
    };
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    for (path, expected) in [("", 0), ("model.layers.3.mlp", 3), ("stack.2.layers.11", 11), ("layers.-1.moe", 0)] {
        assert_eq!(moe(config(), vb.pp(path))?.layer().number(), expected, "{path}");
    }
    assert_eq!(moe(Layer::new(config(), 7)?, vb.pp("layers.3"))?.layer().number(), 7, "its own");
    // The same weights draw other noise as another layer.
    let first = seeded(group(device)?, config())?;
    let tensors: HashMap<String, Tensor> =
        first.params().into_iter().map(|(name, t)| (name.to_string(), t.clone())).collect();
    let x = tokens(0..12, device)?;
    let trained = |number: u32| -> AnyResult<Vec<f32>> {
        let named = tensors.iter().map(|(name, t)| (format!("layers.{number}.{name}"), t.clone())).collect();
        let vb = VarBuilder::from_tensors(named, DType::F32, device);
        flat(&moe(config(), vb.pp(format!("layers.{number}")))?.forward_t(&x, true)?)
    };
    assert_eq!(trained(1)?, trained(1)?);
    assert_ne!(trained(1)?, trained(2)?);
    Ok(())
}

fn with_losses() -> MoeConfig {
    config().with_aux(AuxConfig::default().with_balance(0.5).with_z(0.25))
}

fn training_has_the_losses_gradient_behind_y(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, with_losses())?;
    let x = tokens(0..12, device)?;
    assert!(matches!(error_of(&moe.last_aux().err().ok_or("a loss")?), Some(Error::Invalid { .. })));
    // 1 and 0.5 are exact in every type, so that the gradient is the same number from the host and from a tensor.
    for scale in [1.0, 0.5] {
        let trained = moe.clone().with_aux_scale(scale);
        let y = trained.forward_t(&x, true)?;
        let full = moe.forward_full(&x, None)?;
        assert_eq!(flat(&y)?, flat(&full.y)?, "y's value is as it is");
        assert_eq!(trained.last_aux()?.get()?, full.losses.get()?);
        assert_eq!(trained.last_load()?.get()?, full.load.get()?);
        let found = gradients(&moe, &x, &y.sqr()?.sum_all()?.backward()?)?;
        let plain = full.y.sqr()?.sum_all()?;
        let expected = gradients(&moe, &x, &(plain + (full.aux * scale)?)?.backward()?)?;
        assert_eq!(found, expected, "scale {scale}");
        // Not in evaluation, nor through `Module` and candle's `ModuleT` of it.
        let without = gradients(&moe, &x, &moe.forward(&x)?.sqr()?.sum_all()?.backward()?)?;
        assert_ne!(without, expected);
        let evaluated = [moe.forward_t(&x, false)?, ModuleT::forward_t(&moe, &x, true)?];
        for y in evaluated {
            assert_eq!(gradients(&moe, &x, &y.sqr()?.sum_all()?.backward()?)?, without);
        }
    }
    Ok(())
}

fn training_takes_a_step_of_jitter_each_time(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config().with_router(|router| router.with_jitter(0.5)))?;
    let x = tokens(0..40, device)?;
    let of = |noise: Option<Noise>| -> AnyResult<Vec<f32>> { flat(&moe.forward_full(&x, noise)?.y) };
    let plain = of(None)?;
    for (seed, first) in [(0, 0), (3, 5)] {
        let moe = moe.clone().with_noise(Noise { seed, step: first });
        for step in first..first + 2 {
            let expected = of(Some(Noise { seed, step }))?;
            assert_eq!(flat(&moe.forward_t(&x, true)?)?, expected);
            assert_ne!(expected, plain);
            assert_eq!(flat(&moe.forward_t(&x, false)?)?, plain, "no jitter, and no step");
        }
    }
    Ok(())
}

fn ids_are_of_candles_index_type_and_back(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let out = moe.forward_full(tokens(0..9, device)?.as_tensor(), None)?;
    assert_eq!((out.ids.dtype(), out.ids.dims()), (DType::U32, &[9, 2][..]));
    // They index without a cast: each choice's own logit.
    let chosen = flat(&out.logits.gather(&out.ids, 1)?)?;
    assert!(chosen.iter().all(|logit| logit.is_finite()));
    let ids = out.ids.to_device(&Device::Cpu)?;
    let expected: Vec<f64> = ids.flatten_all()?.to_vec1::<u32>()?.into_iter().map(f64::from).collect();
    let wide = ids.to_dtype(DType::I64)?;
    // A part of a larger storage, too.
    for given in [&ids, &wide, &Tensor::cat(&[&wide, &wide], 0)?.narrow(0, 9, 9)?] {
        let own = routing_ids(&Cpu::new(), given)?;
        assert_eq!((own.dims(), own.to_f64()), (&[9, 2][..], expected.clone()));
    }
    let dropped = routing_ids(&Cpu::new(), &Tensor::new(&[[u32::MAX, 1]], &Device::Cpu)?)?;
    assert_eq!(dropped.to_f64(), [-1.0, 1.0]);
    let refused = routing_ids(&Cpu::new(), &ids.to_dtype(DType::F32)?).err().map(|e| e.to_string());
    assert!(refused.as_ref().is_some_and(|e| e.contains("u32 or i64") && e.contains("f32")), "{refused:?}");
    Ok(())
}

fn a_checkpoint_is_opened_once_and_loaded_as_told(device: &Device) -> AnyResult<()> {
    let folder = tempfile::tempdir()?;
    for entry in std::fs::read_dir(golden_of("qwen3_moe"))? {
        let entry = entry?;
        std::fs::copy(entry.path(), folder.path().join(entry.file_name()))?;
    }
    let checkpoint = Checkpoint::open(folder.path())?;
    let group = moebius::candle::DeviceGroup::single(&checkpoint.block_config(0)?, device)?;
    // Not read again.
    std::fs::remove_file(folder.path().join("config.json"))?;
    let mut seen = Vec::new();
    let mut progress = |p: moebius::checkpoint::Progress<'_>| seen.push((p.layer, p.done, p.total));
    let load = LoadAs::new(Parameters::Trainable).dtype(DType::BF16).progress(&mut progress);
    let trained = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, load)?;
    assert!(seen.len() > EXPERTS && seen.is_sorted_by(|a, b| a.1 < b.1), "{seen:?}");
    assert!(seen.last().is_some_and(|(layer, done, total)| *layer == 0 && done == total), "{seen:?}");
    assert_eq!(trained.param(ParamKind::Up).map(Tensor::dtype), Some(DType::BF16));
    assert!(!trained.vars().is_empty());
    let frozen = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, Parameters::Frozen)?;
    assert!(frozen.vars().is_empty());
    let refused = ExpertParallelMoE::from_checkpoint(&checkpoint, 0, &group, LoadAs::default().dtype(DType::U8));
    assert!(refused.as_ref().is_err_and(|e| e.to_string().contains("u8")), "{refused:?}");
    Ok(())
}

fn errors_are_this_crates_own(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let wide = Tensor::zeros((4, H + 1), DType::F32, device)?;
    let error = moe.forward(&wide).err().ok_or("an error")?;
    assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    // As a user's function hands it on.
    let boxed: Box<dyn std::error::Error> = error.context("in layer 3").into();
    assert!(matches!(error_of(&*boxed), Some(Error::Invalid { .. })), "{boxed}");
    let x = tokens(0..3, device)?;
    let loss = moe.forward(&x)?.sqr()?.sum_all()?;
    loss.backward()?;
    let error = loss.backward().err().ok_or("an error")?;
    assert!(matches!(error_of(&error), Some(Error::ContextConsumed { rank: 0, .. })), "{error}");
    let made = moebius::candle::moe(MoeConfig::new(H, 4, 4, 5), VarBuilder::zeros(DType::F32, device));
    let error = made.err().ok_or("an error")?;
    assert!(matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "top_k"), "{error}");
    Ok(())
}

/// Every way to a module, of a group for another number of experts: the error has the name of the call that was made.
fn an_error_of_making_a_module_names_the_call(_: &Device) -> AnyResult<()> {
    let solo = || Box::new(Solo::new(Cpu::new()));
    let comms = Comms::<Cpu> { gather: solo(), reduce: solo() };
    let chain = Arc::new(Chain::new(Cpu::new(), comms, EtpOptions::default())?);
    let group = EpGroup::single(&MoeConfig::new(H, 8, EXPERTS + 1, 2))?;
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let weights = ShardedWeights::new(&chain, vb.clone());
    let (plain, stored) =
        (Checkpoint::open(golden_of("qwen3_moe"))?, Checkpoint::open(golden_of("qwen3_moe_nvfp4_modelopt"))?);
    let load = || LoadAs::new(Parameters::Frozen);
    let shards = || ShardedIn { chain: &chain, payload: Payload::Plain, weights: None };
    let of_shards = |load| ExpertParallelMoE::from_checkpoint_sharded(&stored, 0, &group, shards(), load);
    let made = [
        ("new", ExpertParallelMoE::new(config(), &group, vb.clone())),
        ("sharded", ExpertParallelMoE::sharded(config(), &group, &chain, Payload::Plain, vb)),
        ("all_sharded", ExpertParallelMoE::all_sharded(config(), &group, &chain, Payload::Plain, &weights)),
        ("from_checkpoint", ExpertParallelMoE::from_checkpoint(&plain, 0, &group, load())),
        ("from_checkpoint", ExpertParallelMoE::from_checkpoint(&stored, 0, &group, load().quantized())),
        ("from_checkpoint_sharded", of_shards(load())),
        ("from_checkpoint_sharded", of_shards(load().quantized())),
        (
            "from_block",
            ExpertParallelMoE::from_block(
                plain.load_block(0, LoadOptions { rank: 0, ranks: 1, dtype: None })?,
                0,
                &group,
                Parameters::Frozen,
            ),
        ),
    ];
    for (expected, made) in made {
        let error = made.err().ok_or(expected)?;
        let Some(Error::Invalid { call, name, .. }) = error_of(&error) else { return Err(error.into()) };
        assert_eq!((*call, name.as_str()), (format!("ExpertParallelMoE::{expected}").as_str(), "num_experts"));
    }
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    one_call_makes_a_layer_of_any_number_of_tokens,
    a_rank_alone_has_no_bound_of_tokens,
    layers_are_numbered_in_the_order_of_their_making,
    a_path_numbers_the_layer_of_one_call,
    training_has_the_losses_gradient_behind_y,
    training_takes_a_step_of_jitter_each_time,
    ids_are_of_candles_index_type_and_back,
    a_checkpoint_is_opened_once_and_loaded_as_told,
    errors_are_this_crates_own,
    an_error_of_making_a_module_names_the_call,
}
