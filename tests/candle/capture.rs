//! Steps of whole small models, captured with candle's own operations among them, against the same steps run eagerly.
//! Each body makes its own device, with candle's event tracking off.

use std::cell::RefCell;

use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, Var};
use candle_nn::{Embedding, Linear, Optimizer, RmsNorm, VarBuilder, VarMap, ops};
use moebius::MoeConfig;
use moebius::candle::{
    AdamW, Capture, DeviceGroup, DispatchCombine, DispatchedRowsMut, ExpertParallelMoE, MainGradients, backward,
    device_for_capture, error_of,
};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, GroupConfig};
use moebius::layer::{DispatchOptions, Layer};
use moebius::optim::{AdamWOptions, GroupOptions, LossScaling};

use crate::support::{AnyResult, EXPERTS, H, config, flat, group, normal, redraw, seeded, tokens};
use crate::trials::tests;

const VOCABULARY: usize = 32;
const TOKENS: usize = 12;

/// A decoder of one block: embedding, attention over the tokens given, experts, output.
struct Model {
    embedding: Embedding,
    norms: [RmsNorm; 2],
    query: Linear,
    moe: ExpertParallelMoE,
    output: Linear,
}

impl Model {
    fn new(group: &DeviceGroup, vb: VarBuilder<'_>) -> Result<Self> {
        let norm = |name: &str| candle_nn::rms_norm(H, 1e-6, vb.pp(name));
        Ok(Self {
            embedding: candle_nn::embedding(VOCABULARY, H, vb.pp("embedding"))?,
            norms: [norm("first")?, norm("second")?],
            query: candle_nn::linear_no_bias(H, H, vb.pp("query"))?,
            moe: ExpertParallelMoE::new(MoeConfig::new(H, 24, EXPERTS, 2), group, vb.pp("moe"))?,
            output: candle_nn::linear(H, VOCABULARY, vb.pp("output"))?,
        })
    }

    /// Logits `[T, VOCABULARY]` of ids `[T]`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(ids)?;
        let h = self.norms[0].forward_diff(&x)?;
        let scores = (self.query.forward(&h)?.matmul(&h.t()?)? * (H as f64).powf(-0.5))?;
        let x = (x + ops::softmax(&scores, D::Minus1)?.matmul(&h)?)?;
        let x = (self.moe.forward(&self.norms[1].forward_diff(&x)?)? + x)?;
        self.output.forward(&x)
    }
}

/// A model with weights that depend on the seed alone.
fn model(device: &Device, dtype: DType) -> AnyResult<(Model, VarMap)> {
    let vars = VarMap::new();
    let group = DeviceGroup::single(GroupConfig::new(EXPERTS, TOKENS), device)?;
    let model = Model::new(&group, VarBuilder::from_varmap(&vars, dtype, device))?;
    redraw(&vars, 77)?;
    Ok((model, vars))
}

/// Ids of step `at`.
fn ids(at: usize, device: &Device) -> AnyResult<Tensor> {
    let ids = (0..TOKENS).map(|i| ((at * 131 + i * i * 17 + i * 7 + 3) % VOCABULARY) as u32);
    Ok(Tensor::from_iter(ids, &Device::Cpu)?.to_device(device)?)
}

fn bits(t: &Tensor) -> AnyResult<Vec<u32>> {
    Ok(flat(t)?.into_iter().map(f32::to_bits).collect())
}

/// 10,000 replays of a decode step, each with other tokens and so another routing, against as many eager results.
fn replayed_decode_steps_have_the_eager_ones_bits(_: &Device) -> AnyResult<()> {
    let device = device_for_capture(0)?;
    for dtype in [DType::F32, DType::BF16] {
        let (model, _) = model(&device, dtype)?;
        let inputs = (0..VOCABULARY).map(|at| ids(at, &device)).collect::<AnyResult<Vec<_>>>()?;
        let expected = inputs.iter().map(|ids| bits(&model.forward(ids)?)).collect::<AnyResult<Vec<_>>>()?;
        assert!(expected.windows(2).all(|pair| pair[0] != pair[1]), "inputs differ");
        let current = inputs[0].copy()?;
        let capture = Capture::new(&device)?.group(model.moe.group())?;
        // SAFETY: nothing replaces the model's tensors or `current`.
        let mut step = unsafe { capture.run(|| Ok(vec![model.forward(&current)?])) }?;
        for replay in 0..10_000 {
            let at = replay * 7 % inputs.len();
            current.slice_set(&inputs[at], 0, 0)?;
            step.replay()?;
            if replay % 997 == 0 {
                // Eager work between replays takes nothing of the graph's.
                assert_eq!(bits(&model.forward(&inputs[at])?)?, expected[at], "eager beside the graph");
            }
            assert_eq!(bits(&step.outputs()[0])?, expected[at], "{dtype:?}, replay {replay}");
        }
    }
    Ok(())
}

/// A layer whose result is memory of the caller's, which each replay writes with the bits of a forward.
fn a_forward_into_given_memory_is_replayed(_: &Device) -> AnyResult<()> {
    let device = device_for_capture(0)?;
    let moe = seeded(group(&device)?, config())?.detached();
    let x = tokens(0..TOKENS, &device)?.as_detached_tensor();
    let y = x.zeros_like()?;
    let capture = Capture::new(&device)?.group(moe.group())?;
    // SAFETY: nothing replaces the layer's weights, x or y.
    let mut step = unsafe { capture.run(|| moe.forward_into(&x, &y).map(|()| Vec::new())) }?;
    for at in 1..9 {
        let next = tokens(at..at + TOKENS, &device)?.as_detached_tensor();
        let expected = bits(&moe.forward(&next)?)?;
        x.slice_set(&next, 0, 0)?;
        step.replay()?;
        assert_eq!(bits(&y)?, expected);
    }
    Ok(())
}

/// A model in training: forward, backward and the optimizer's step.
struct Training {
    model: Model,
    vars: VarMap,
    state: RefCell<(MainGradients, AdamW)>,
    input: Tensor,
    target: Tensor,
}

impl Training {
    fn new(device: &Device, dtype: DType, loss_scaling: Option<LossScaling>) -> AnyResult<Self> {
        let (model, vars) = model(device, dtype)?;
        let group = GroupOptions { lr: 0.01, ..Default::default() };
        let options = AdamWOptions { group, max_norm: Some(1.0), loss_scaling, ..Default::default() };
        let adam = AdamW::of_var_map(&vars, options)?;
        let (input, target) = (ids(0, device)?, ids(1, device)?);
        Ok(Self { model, vars, state: RefCell::new((MainGradients::new(), adam)), input, target })
    }

    fn step(&self) -> Result<Tensor> {
        let (gradients, adam) = &mut *self.state.borrow_mut();
        let logits = self.model.forward(&self.input)?.to_dtype(DType::F32)?;
        let loss = candle_nn::loss::cross_entropy(&logits, &self.target)?;
        gradients.backward(&adam.scale_loss(&loss)?)?;
        adam.step(gradients.store())?;
        gradients.reset();
        Ok(loss.detach())
    }

    fn give(&self, at: usize) -> AnyResult<()> {
        self.input.slice_set(&ids(at, self.input.device())?, 0, 0)?;
        self.target.slice_set(&ids(at + 1, self.input.device())?, 0, 0)?;
        Ok(())
    }

    fn weights(&self) -> AnyResult<Vec<(String, Vec<u32>)>> {
        let vars = self.vars.data().lock().map_err(|e| e.to_string())?;
        let mut all = vars.iter().map(|(n, v)| Ok((n.clone(), bits(v)?))).collect::<AnyResult<Vec<_>>>()?;
        all.sort();
        Ok(all)
    }
}

/// 10,000 replayed steps give the bits of as many eager ones: every loss, and the weights at the end; the learning rate
/// changes on the way.
fn replayed_training_steps_have_the_eager_ones_bits(_: &Device) -> AnyResult<()> {
    let device = device_for_capture(0)?;
    const STEPS: usize = 10_000;
    for dtype in [DType::F32, DType::BF16] {
        let (eager, captured) = (Training::new(&device, dtype, None)?, Training::new(&device, dtype, None)?);
        let expected = bits(&eager.step()?)?;
        let capture = Capture::new(&device)?.group(captured.model.moe.group())?;
        let capture = capture.optimizer(&captured.state.borrow().1)?;
        // The first run is a step.
        // SAFETY: nothing replaces what `captured` has, and its gradients are reset by the step alone.
        let mut graph = unsafe { capture.run(|| Ok(vec![captured.step()?])) }?;
        assert_eq!(bits(&graph.outputs()[0])?, expected, "{dtype:?}, the first step");
        for at in 1..STEPS {
            eager.give(at)?;
            captured.give(at)?;
            if at % 100 == 0 {
                for training in [&eager, &captured] {
                    let adam = &mut training.state.borrow_mut().1;
                    adam.set_learning_rate(0.01 / (at / 100) as f64);
                    adam.write_options()?;
                }
            }
            let expected = bits(&eager.step()?)?;
            graph.replay()?;
            assert_eq!(bits(&graph.outputs()[0])?, expected, "{dtype:?}, step {at}");
        }
        assert_eq!(captured.weights()?, eager.weights()?, "{dtype:?}");
        let counted = |training: &Training| Ok::<_, candle_core::Error>(training.state.borrow().1.stats()?.steps);
        assert_eq!((counted(&captured)?, counted(&eager)?), (STEPS as u64, STEPS as u64));
    }
    Ok(())
}

/// Steps in f16 with a loss whose factor is the device's own: of replays as of eager steps some are skipped, and the factor
/// falls and rises with them.
fn replayed_f16_steps_scale_the_loss_as_eager_ones(_: &Device) -> AnyResult<()> {
    let device = device_for_capture(0)?;
    // The logits' gradients are up to a twelfth of the factor, so that the first ones overflow f16 and later ones do again.
    let scaling = LossScaling { initial: 4_194_304.0, interval: 5, ..LossScaling::default() };
    let train = || Training::new(&device, DType::F16, Some(scaling));
    let (eager, captured) = (train()?, train()?);
    let expected = bits(&eager.step()?)?;
    let capture = Capture::new(&device)?.group(captured.model.moe.group())?;
    let capture = capture.optimizer(&captured.state.borrow().1)?;
    // SAFETY: nothing replaces what `captured` has, and its gradients are reset by the step alone.
    let mut graph = unsafe { capture.run(|| Ok(vec![captured.step()?])) }?;
    assert_eq!(bits(&graph.outputs()[0])?, expected, "the first step");
    let figures = |training: &Training| -> AnyResult<_> {
        let stats = training.state.borrow().1.stats()?;
        // The norm of a step that is skipped is inf or NaN.
        Ok((stats.steps, stats.skipped, stats.loss_scale, stats.norm.to_bits(), stats.factor.to_bits()))
    };
    let mut all = Vec::new();
    for at in 1..300 {
        eager.give(at)?;
        captured.give(at)?;
        let expected = bits(&eager.step()?)?;
        graph.replay()?;
        assert_eq!(bits(&graph.outputs()[0])?, expected, "step {at}");
        all.push(figures(&captured)?);
        assert_eq!(all.last(), Some(&figures(&eager)?), "step {at}");
    }
    assert_eq!(captured.weights()?, eager.weights()?);
    let (_, skipped, scale, ..) = all[0];
    assert_eq!((skipped, scale), (2, scaling.initial / 4.0), "both first steps are skipped");
    let rises = |pair: &[(u64, u64, f64, u64, u64)]| pair[0].2 < pair[1].2;
    let first_rise = all.windows(2).position(rises).ok_or("the factor never rises")?;
    let last = all.last().ok_or("no step")?;
    assert!(last.0 > 200 && last.1 > all[first_rise].1, "skipped again behind a rise: {all:?}");
    Ok(())
}

/// Dispatch and combine around candle's operations: a forward into memory that stays, and a forward with its backward.
fn replayed_dispatch_and_combine_have_the_eager_ones_bits(_: &Device) -> AnyResult<()> {
    const ROWS: usize = 64;
    let device = device_for_capture(0)?;
    let config = GroupConfig { max_rows: ROWS, ..GroupConfig::new(EXPERTS, TOKENS) };
    let group = DeviceGroup::single(config, &device)?;
    let options = DispatchOptions { capacity: Capacity::Static(ROWS), ..Default::default() };
    let layer = Layer::new(self::config(), 0)?.with_dispatch(options);
    let moe = DispatchCombine::new(layer, &group)?;
    let detached = moe.detached();
    let of = |seed: u64, dims: (usize, usize)| normal(seed, dims, DType::F32, &device);
    let (x, expert) = (Var::from_tensor(&of(1, (TOKENS, H))?)?, Var::from_tensor(&of(2, (H, H))?)?);
    let (weights, d_y) = (of(3, (TOKENS, 2))?, of(4, (TOKENS, H))?);
    let chosen = |seed: usize| -> AnyResult<Tensor> {
        let id = |i: usize| ((seed + i / 2 * 3 + i % 2 * (1 + seed % 3)) % EXPERTS) as u32;
        Ok(Tensor::from_vec((0..2 * TOKENS).map(id).collect::<Vec<_>>(), (TOKENS, 2), &device)?)
    };
    let ids = chosen(0)?;
    let (rows, of_rows) = (of(5, (ROWS, H))?, of(6, (ROWS, 1))?.flatten_all()?);
    let experts = |rows: &Tensor, weights: &Tensor| rows.matmul(&expert)?.broadcast_mul(&weights.unsqueeze(1)?);
    let forward = || -> Result<Vec<Tensor>> {
        let into = DispatchedRowsMut { rows: &rows, weights: &of_rows };
        let received = detached.dispatch_into(&x, &ids, &weights, into)?;
        let y = received.combine(&experts(&received.rows, &received.weights)?.detach())?;
        Ok(vec![y, received.offsets()?, received.counts()?])
    };
    let step = || -> Result<Vec<Tensor>> {
        let received = moe.dispatch(&x, &ids, &weights)?;
        let y = received.combine(&experts(&received.rows, &received.weights)?)?;
        let gradients = backward(&(&y * &d_y)?.sum_all()?)?;
        let of = |t: &Tensor| gradients.get(t).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"));
        Ok(vec![y.detach(), of(&x)?, of(&expert)?])
    };
    for training in [false, true] {
        let calls: &dyn Fn() -> Result<Vec<Tensor>> = if training { &step } else { &forward };
        // SAFETY: nothing replaces the tensors that the calls read and write.
        let mut captured = unsafe { Capture::new(&device)?.group(&group)?.run(calls) }?;
        for replay in 0..50 {
            x.as_tensor().detach().slice_set(&of(100 + replay, (TOKENS, H))?, 0, 0)?;
            ids.slice_set(&chosen(replay as usize)?, 0, 0)?;
            captured.replay()?;
            let found = captured.outputs().iter().map(|t| t.copy()).collect::<Result<Vec<_>>>()?;
            for (number, (found, expected)) in found.iter().zip(calls()?).enumerate() {
                let same = match found.dtype() {
                    DType::F32 => bits(found)? == bits(&expected)?,
                    _ => found.to_vec1::<i64>()? == expected.to_vec1::<i64>()?,
                };
                assert!(same, "output {number} of replay {replay}, training: {training}");
            }
        }
    }
    Ok(())
}

/// An operation that a capture cannot hold is refused with the one to use instead, and everything works on afterwards.
fn refusals_say_what_to_do(_: &Device) -> AnyResult<()> {
    let tracked = Device::new_cuda_with_stream(0)?;
    for wrong in [&tracked, &Device::Cpu] {
        let error = Capture::new(wrong).map(drop).expect_err("a device that tracks");
        assert!(error_of(&error).is_some() && error.to_string().contains("device_for_capture"), "{error}");
    }
    let device = device_for_capture(0)?;
    let moe = seeded(group(&device)?, config())?;
    let x = tokens(0..4, &device)?;
    let expected = flat(&moe.forward(&x)?)?;
    let elsewhere = seeded(group(&tracked)?, config())?;
    for other in [elsewhere.group(), &group(&Device::Cpu)?] {
        let error = Capture::new(&device)?.group(other).map(drop).expect_err("a group elsewhere");
        assert!(error.to_string().contains("capture's device"), "{error}");
    }
    let works = |what: &str| -> AnyResult<()> {
        assert_eq!(flat(&moe.forward(&x)?)?, expected, "eagerly, after {what}");
        // SAFETY: nothing replaces the layer's weights or x.
        let mut step = unsafe { Capture::new(&device)?.group(moe.group())?.run(|| Ok(vec![moe.forward(&x)?])) }?;
        step.replay()?;
        assert_eq!(flat(&step.outputs()[0])?, expected, "replayed, after {what}");
        Ok(())
    };
    let refused = |what: &str, capture: Capture, calls: &mut dyn FnMut() -> Result<Vec<Tensor>>| -> AnyResult<String> {
        // SAFETY: it is not captured.
        let error = unsafe { capture.run(calls) }.map(drop).expect_err(what);
        works(what)?;
        Ok(error.to_string())
    };
    let all = || Capture::new(&device)?.group(moe.group());
    let text = refused("a group that is not named", Capture::new(&device)?, &mut || Ok(vec![moe.forward(&x)?]))?;
    assert!(text.contains("candle::Capture"), "{text}");
    let text = refused("a wait", all()?, &mut || {
        let y = moe.forward(&x)?;
        y.i((0, 0))?.to_scalar::<f32>()?;
        Ok(vec![y])
    })?;
    assert!(text.contains("capture"), "{text}");
    let mut large = 0f32;
    let text = refused("a large copy from the host", all()?, &mut || {
        large += 1.0;
        moe.forward(&x)?.broadcast_add(&Tensor::new(vec![large; 4096], &device)?.narrow(0, 0, H)?).map(|y| vec![y])
    })?;
    assert!(text.contains("host data") && text.contains("slice_set"), "{text}");
    let mut jitter = config();
    jitter.router.jitter = 0.1;
    let jittered = seeded(moe.group().clone(), jitter)?;
    let text = refused("jitter", all()?, &mut || Ok(vec![jittered.forward_t(&x, true)?]))?;
    assert!(text.contains("forward_full"), "{text}");
    let kept = RefCell::new(Vec::new());
    let text = refused("a tensor that stays", all()?, &mut || {
        kept.borrow_mut().push(moe.forward(&x)?);
        Ok(vec![])
    })?;
    assert!(text.contains("outlives"), "{text}");
    // What the capture left has no memory, which the driver says at its drop, and candle at its next call.
    kept.borrow_mut().truncate(1);
    assert!(device.as_cuda_device()?.cuda_stream().context().check_err().is_err());
    assert_eq!(flat(&kept.borrow()[0])?, expected);
    let mut sizes = [4usize, 5].into_iter();
    let text = refused("another size", all()?, &mut || {
        let rows = sizes.next().unwrap_or(1);
        Ok(vec![moe.forward(&Tensor::zeros((rows, H), DType::F32, &device)?)?])
    })?;
    assert!(text.contains("an output"), "{text}");
    Ok(())
}

/// A capture of the core's alone cannot hold candle's tensors.
fn the_cores_own_capture_is_refused(device: &Device) -> AnyResult<()> {
    let moe = seeded(group(device)?, config())?;
    let x = tokens(0..4, device)?;
    let expected = flat(&moe.forward(&x)?)?;
    let own = moe.group().on::<Cuda>().ok_or("no GPU")?.lock().device().clone();
    let failed = |e: candle_core::Error| moebius::Error::Device {
        call: "test",
        operation: "forward".to_string(),
        message: e.to_string(),
    };
    let text = own.capture(|| moe.forward(&x).map(drop).map_err(failed)).map(drop).expect_err("a capture").to_string();
    assert!(text.contains("candle::Capture"), "{text}");
    assert!(flat(&moe.forward(&x)?)? == expected, "and the layer works on");
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    replayed_decode_steps_have_the_eager_ones_bits,
    a_forward_into_given_memory_is_replayed,
    replayed_training_steps_have_the_eager_ones_bits,
    replayed_f16_steps_scale_the_loss_as_eager_ones,
    replayed_dispatch_and_combine_have_the_eager_ones_bits,
    refusals_say_what_to_do,
    the_cores_own_capture_is_refused,
}
