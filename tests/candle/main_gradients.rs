//! Gradients written by the layer's kernels against candle's own: one backward, several microbatches, weights that are
//! computed, shared or frozen.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::VarBuilder;
use moebius::candle::{ExpertParallelMoE, MainGradients, backward, error_of};
use moebius::config::{Activation, SharedConfig};
use moebius::layer::{Layer, ParamKind};
use moebius::{Error, MoeConfig};

use crate::support::{AnyResult, H, close, config, flat, group, normal, of_type};
use crate::trials::tests;

/// Every parameter.
fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(SharedConfig { intermediate: 8, gated: true, bias: false });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    (full.aux.balance, full.aux.z) = (0.1, 0.01);
    full
}

/// The loss of a microbatch: two calls of the layer among ordinary operations.
fn loss(moe: &ExpertParallelMoE, x: &Tensor) -> AnyResult<Tensor> {
    let once = moe.forward_full(x, None)?;
    let twice = (moe.forward(&(&once.y + x)?)? + once.y)?;
    Ok((twice.to_dtype(DType::F32)?.sqr()?.sum_all()? + once.aux)?)
}

fn tokens(microbatch: u64, dtype: DType, device: &Device) -> AnyResult<Var> {
    Ok(Var::from_tensor(&normal(60 + microbatch, (13, H), dtype, device)?)?)
}

/// Every variable's gradient: of the parameters by their names.
fn values(moe: &ExpertParallelMoE, gradients: &GradStore) -> AnyResult<Vec<(ParamKind, Vec<f32>)>> {
    let trained = ParamKind::ALL.into_iter().filter(|kind| *kind != ParamKind::SelectionBias);
    let found = trained.filter_map(|kind| Some((kind, gradients.get(moe.param(kind)?))));
    found.map(|(kind, t)| Ok((kind, flat(t.ok_or_else(|| format!("no gradient of {}", kind.name()))?)?))).collect()
}

/// Equal numbers: 0 and −0 are, which candle's sum with zeros does not keep apart.
fn same(found: &[(ParamKind, Vec<f32>)], expected: &[(ParamKind, Vec<f32>)]) {
    assert_eq!(found.len(), expected.len());
    for ((kind, found), (_, expected)) in found.iter().zip(expected) {
        assert!(found == expected, "{}: {found:?}, candle's {expected:?}", kind.name());
    }
}

fn one_backward_gives_candles_gradients(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, full(), DType::F32)?;
    let x = tokens(0, DType::F32, device)?;
    let expected = loss(&moe, &x)?.backward()?;
    let found = backward(&loss(&moe, &x)?)?;
    // Two calls' gradients are two terms, whose sum has no order.
    same(&values(&moe, &found)?, &values(&moe, &expected)?);
    let of_x = |g: &GradStore| -> AnyResult<Vec<f32>> { flat(g.get(&x).ok_or("no gradient of x")?) };
    assert_eq!(of_x(&found)?, of_x(&expected)?);
    // candle's own way is as it was.
    same(&values(&moe, &loss(&moe, &x)?.backward()?)?, &values(&moe, &expected)?);
    Ok(())
}

fn microbatches_add_up_in_memory_that_stays(device: &Device) -> AnyResult<()> {
    // One call a microbatch, so that both sums have the same terms in the same order.
    let simple = |moe: &ExpertParallelMoE, x: &Tensor| -> AnyResult<Tensor> {
        Ok(moe.forward(x)?.to_dtype(DType::F32)?.sqr()?.sum_all()?)
    };
    for (dtype, mut main) in [
        (DType::F32, MainGradients::new()),
        (DType::F32, MainGradients::in_f32()),
        (DType::BF16, MainGradients::in_f32()),
        (DType::F16, MainGradients::in_f32()),
    ] {
        let moe = of_type(group(device)?, full(), dtype)?;
        let mut first = None;
        for step in 0..3 {
            let mut sums: Option<Vec<(ParamKind, Vec<f32>)>> = None;
            for microbatch in 0..3 {
                let x = tokens(microbatch, dtype, device)?;
                main.backward(&simple(&moe, &x)?)?;
                // A backward alone, in the same type.
                let mut alone = MainGradients::in_f32();
                alone.backward(&simple(&moe, &x)?)?;
                let alone = values(&moe, alone.store())?;
                sums = Some(match sums {
                    None => alone,
                    Some(before) => {
                        let add = |(a, b): (&f32, &f32)| a + b;
                        let of = |(a, b): (&(ParamKind, Vec<f32>), &(_, Vec<f32>))| {
                            (a.0, a.1.iter().zip(&b.1).map(add).collect())
                        };
                        before.iter().zip(&alone).map(of).collect()
                    }
                });
            }
            let found = values(&moe, main.store())?;
            same(&found, &sums.ok_or("no microbatch")?);
            let up = moe.vars().into_iter().find(|v| moe.param(ParamKind::Up).is_some_and(|t| t.id() == v.id()));
            let up = main.get(up.ok_or("no variable")?.as_tensor())?;
            assert_eq!(up.dtype(), DType::F32);
            assert_eq!(*first.get_or_insert(up.id()), up.id(), "step {step}: other memory");
            main.reset();
        }
    }
    Ok(())
}

fn sixteen_bits_are_summed_as_such_where_asked(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, config(), DType::BF16)?;
    let mut main = MainGradients::new();
    let x = tokens(0, DType::BF16, device)?;
    for _ in 0..2 {
        main.backward(&moe.forward(&x)?.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
    }
    let once = backward(&moe.forward(&x)?.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
    let mut wide = MainGradients::in_f32();
    wide.backward(&moe.forward(&x)?.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
    for (kind, found) in values(&moe, main.store())? {
        let of = moe.param(kind).ok_or("no parameter")?;
        assert_eq!(main.store().get(of).map(Tensor::dtype), Some(DType::BF16));
        let once = flat(once.get(of).ok_or("no gradient")?)?;
        // One rounding of the same sum, 2⁻⁹ of it.
        for (wide, once) in flat(wide.store().get(of).ok_or("no gradient in f32")?)?.iter().zip(&once) {
            assert!((wide - once).abs() <= 2f32.powi(-8) * wide.abs(), "{}: {wide} as {once}", kind.name());
        }
        // The second term is in f32 where it is added, the first is rounded: g(1 ± 2⁻⁹) + g, rounded.
        for (found, once) in found.iter().zip(&once) {
            assert!((found - 2.0 * once).abs() <= 2f32.powi(-7) * once.abs(), "{}: {found}, {once}", kind.name());
        }
    }
    Ok(())
}

fn a_known_cotangent_needs_no_loss(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, full(), DType::F32)?;
    let (x, d_y) = (tokens(0, DType::F32, device)?, normal(70, (13, H), DType::F32, device)?);
    let mut main = MainGradients::new();
    main.backward_with(&moe.forward(&x)?, &d_y)?;
    let expected = (moe.forward(&x)? * &d_y)?.sum_all()?.backward()?;
    same(&values(&moe, main.store())?, &values(&moe, &expected)?);
    let of_x = |g: &GradStore, x: &Var| -> AnyResult<Vec<f32>> { flat(g.get(x).ok_or("no gradient of x")?) };
    assert_eq!(of_x(main.store(), &x)?, of_x(&expected, &x)?);
    // Of a layer behind another, and of what is no layer's output; x with more dimensions, and not contiguous.
    let x = Var::from_tensor(&normal(61, (2, H, 3), DType::F32, device)?)?;
    let d_y = normal(71, (2, 3, H), DType::F32, device)?;
    let twice = || -> AnyResult<Tensor> { Ok(moe.forward(&moe.forward(&x.transpose(1, 2)?)?)?) };
    let doubled = || -> AnyResult<Tensor> { Ok((twice()? * 2.0)?) };
    for y in [&twice as &dyn Fn() -> AnyResult<Tensor>, &doubled] {
        main.reset();
        main.backward_with(&y()?, &d_y)?;
        let expected = (y()? * &d_y)?.sum_all()?.backward()?;
        same(&values(&moe, main.store())?, &values(&moe, &expected)?);
        assert_eq!(of_x(main.store(), &x)?, of_x(&expected, &x)?);
    }
    let x = tokens(0, DType::F32, device)?;
    for wrong in [normal(70, (12, H), DType::F32, device)?, normal(70, (13, H), DType::F64, &Device::Cpu)?] {
        let error = main.backward_with(&moe.forward(&x)?, &wrong).expect_err("a wrong cotangent");
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. } | Error::Shape { .. })), "{error}");
    }
    Ok(())
}

/// A variable that a loss reaches both through the layer and through an ordinary operation, in one microbatch and in
/// different ones.
fn a_weight_with_two_ways_to_the_loss(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, config(), DType::F32)?;
    let x = tokens(0, DType::F32, device)?;
    let penalty = || -> AnyResult<Tensor> { Ok(moe.param(ParamKind::Up).ok_or("no weight")?.sqr()?.sum_all()?) };
    let through = || -> AnyResult<Tensor> { Ok(moe.forward(&x)?.sqr()?.sum_all()?) };
    let expected = (through()? + penalty()?)?.backward()?;
    let expected = values(&moe, &expected)?;
    same(&values(&moe, &backward(&(through()? + penalty()?)?)?)?, &expected);
    for order in [[false, true], [true, false]] {
        let mut main = MainGradients::new();
        for layer in order {
            main.backward(&if layer { through()? } else { penalty()? })?;
        }
        same(&values(&moe, main.store())?, &expected);
        // A third part is added by the kernels to the sum of both.
        main.backward(&through()?)?;
        let [twice, once] = [values(&moe, main.store())?, values(&moe, &through()?.backward()?)?];
        for (((_, twice), (_, once)), (_, before)) in twice.iter().zip(&once).zip(&expected) {
            let sums: Vec<f32> = once.iter().zip(before).map(|(a, b)| a + b).collect();
            assert_eq!(*twice, sums);
        }
    }
    Ok(())
}

fn computed_and_frozen_weights(device: &Device) -> AnyResult<()> {
    let whole = of_type(group(device)?, full(), DType::F32)?;
    // Half of each variable: the gradients go on to the variables.
    let halves = |frozen: &[ParamKind]| -> AnyResult<ExpertParallelMoE> {
        let part = |(name, t): (&str, &Tensor)| -> AnyResult<_> {
            let half = (t * 0.5)?;
            let kind = ParamKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or("a name")?;
            Ok((name.to_string(), if frozen.contains(&kind) { half.detach() } else { half }))
        };
        let tensors = whole.params().into_iter().map(part).collect::<AnyResult<_>>()?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
        Ok(ExpertParallelMoE::new(Layer::new(full(), 3)?, whole.group().clone(), vb)?)
    };
    let x = tokens(0, DType::F32, device)?;
    let computed = halves(&[])?;
    assert!(computed.vars().is_empty());
    let expected = loss(&computed, &x)?.backward()?;
    same(&values(&whole, &backward(&loss(&computed, &x)?)?)?, &values(&whole, &expected)?);
    // Frozen weights have none, and their biases are left to candle's way.
    let partly = halves(&[ParamKind::Up, ParamKind::Router])?;
    let mut main = MainGradients::new();
    main.backward(&loss(&partly, &x)?)?;
    let expected = loss(&partly, &x)?.backward()?;
    for kind in ParamKind::ALL.into_iter().filter(|kind| whole.param(*kind).is_some()) {
        let of = whole.param(kind).ok_or("a parameter")?;
        match (main.store().get(of), expected.get(of)) {
            (Some(found), Some(expected)) => assert_eq!(flat(found)?, flat(expected)?, "{}", kind.name()),
            (found, expected) => assert_eq!(found.is_some(), expected.is_some(), "{}", kind.name()),
        }
    }
    let error = main.get(&Tensor::zeros((2, 2), DType::F32, device)?).expect_err("of no loss");
    assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    Ok(())
}

/// One variable as two parameters of a layer, and as one of two layers.
fn shared_variables(device: &Device) -> AnyResult<()> {
    let mut square = MoeConfig::new(H, H, 8, 2);
    square.activation = Activation::Relu2;
    let both = Var::from_tensor(&(normal(71, (8, H, H), DType::F32, device)? * 0.2)?)?;
    let router = || -> AnyResult<Var> { Ok(Var::from_tensor(&normal(72, (8, H), DType::F32, device)?)?) };
    let layer = |number, up: &Var, down: &Var| -> AnyResult<ExpertParallelMoE> {
        let given = [(ParamKind::Router, router()?), (ParamKind::Up, up.clone()), (ParamKind::Down, down.clone())];
        let tensors = given.into_iter().map(|(kind, var)| (kind.name().to_string(), var.into_inner())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, device);
        Ok(ExpertParallelMoE::new(Layer::new(square.clone(), number)?, group(device)?, vb)?)
    };
    let own =
        |seed| -> AnyResult<Var> { Ok(Var::from_tensor(&(normal(seed, (8, H, H), DType::F32, device)? * 0.2)?)?) };
    let (first, second) = (own(73)?, own(74)?);
    let layers = [layer(0, &both, &both)?, layer(1, &both, &first)?, layer(2, &both, &second)?];
    let x = tokens(0, DType::F32, device)?;
    for used in [&layers[..1], &layers[1..]] {
        let loss = || -> AnyResult<Tensor> {
            let outputs =
                used.iter().map(|moe| Ok(moe.forward(&x)?.sqr()?.sum_all()?)).collect::<AnyResult<Vec<_>>>()?;
            Ok(Tensor::stack(&outputs, 0)?.sum_all()?)
        };
        let expected = loss()?.backward()?;
        let mut main = MainGradients::new();
        for _ in 0..2 {
            main.backward(&loss()?)?;
        }
        for moe in used {
            for (kind, expected) in values(moe, &expected)? {
                let found = flat(main.get(moe.param(kind).ok_or("a parameter")?)?)?;
                let twice: Vec<f32> = expected.iter().map(|g| 2.0 * g).collect();
                // Four terms at most, in two orders: three roundings of sums of their size.
                close(kind.name(), &found, &twice);
            }
        }
    }
    Ok(())
}

/// Sums that the caller may have changed are not added to.
fn lent_sums_are_not_added_to(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, config(), DType::F32)?;
    let x = tokens(0, DType::F32, device)?;
    let loss = || -> AnyResult<Tensor> { Ok(moe.forward(&x)?.sqr()?.sum_all()?) };
    let mut main = MainGradients::new();
    main.backward(&loss()?)?;
    let expected = values(&moe, main.store())?;
    moe.reduce_gradients(main.store_mut())?;
    let error = main.backward(&loss()?).expect_err("a backward behind a change");
    assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    // Refused before anything ran: the sums are there.
    same(&values(&moe, main.store())?, &expected);
    main.reset();
    main.backward(&loss()?)?;
    same(&values(&moe, main.store())?, &expected);
    // A constant has no gradient.
    let error = main.backward_with(&x.detach(), &x.detach()).expect_err("a constant");
    assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
    Ok(())
}

/// f64, which a GPU does not compute in, stays as it is where 16 bits would be widened.
fn f64_is_not_narrowed(_: &Device) -> AnyResult<()> {
    let moe = of_type(group(&Device::Cpu)?, config(), DType::F64)?;
    let x = tokens(0, DType::F64, &Device::Cpu)?;
    let loss = || -> AnyResult<Tensor> { Ok(moe.forward(&x)?.sqr()?.sum_all()?) };
    let mut main = MainGradients::in_f32();
    main.backward(&loss()?)?;
    let expected = loss()?.backward()?;
    for var in moe.vars() {
        let (found, expected) = (main.get(&var)?, expected.get(&var).ok_or("no gradient")?);
        assert_eq!(found.flatten_all()?.to_vec1::<f64>()?, expected.flatten_all()?.to_vec1::<f64>()?);
    }
    Ok(())
}

fn a_failed_backward_leaves_what_was_summed(device: &Device) -> AnyResult<()> {
    let moe = of_type(group(device)?, config(), DType::F32)?;
    let x = tokens(0, DType::F32, device)?;
    let mut main = MainGradients::new();
    let once = moe.forward(&x)?.sqr()?.sum_all()?;
    main.backward(&once)?;
    let expected = values(&moe, main.store())?;
    let error = main.backward(&once).expect_err("a second backward");
    assert!(matches!(error_of(&error), Some(Error::ContextConsumed { .. })), "{error}");
    // No layer had begun to write: the sums before are whole.
    same(&values(&moe, main.store())?, &expected);
    main.reset();
    main.backward(&moe.forward(&x)?.sqr()?.sum_all()?)?;
    same(&values(&moe, main.store())?, &expected);
    // candle's own way is not touched by what another object collects.
    same(&values(&moe, &moe.forward(&x)?.sqr()?.sum_all()?.backward()?)?, &expected);
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    one_backward_gives_candles_gradients,
    microbatches_add_up_in_memory_that_stays,
    sixteen_bits_are_summed_as_such_where_asked,
    a_known_cotangent_needs_no_loss,
    a_weight_with_two_ways_to_the_loss,
    computed_and_frozen_weights,
    shared_variables,
    lent_sums_are_not_added_to,
    f64_is_not_narrowed,
    a_failed_backward_leaves_what_was_summed,
}
