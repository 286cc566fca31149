//! The public operations against candle's plain ones, whose gradients are candle's own, and what they refuse.

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::rotary_emb::{rope_i_slow, rope_slow};
use moebius_models::Error;
use moebius_models::ops::{
    CausalOptions, CrossEntropyOptions, RopeLayout, attention, cross_entropy, layer_norm, rms_norm, rope,
};
use rand::Rng;

#[path = "support/seed.rs"]
mod seed;

/// Values uniform in ±1, in f64.
fn random(own: u64, dims: &[usize]) -> Tensor {
    let mut rng = seed::generator(own);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).expect("a tensor")
}

fn var(own: u64, dims: &[usize], dtype: DType) -> Result<Var> {
    Var::from_tensor(&random(own, dims).to_dtype(dtype)?)
}

/// The same type and shape, and ‖found − expected‖ / ‖expected‖ of at most `tolerance`.
fn close(found: &Tensor, expected: &Tensor, tolerance: f64, name: &str) -> Result<()> {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()), "{name}");
    let norm = |t: &Tensor| t.to_dtype(DType::F64)?.sqr()?.sum_all()?.sqrt()?.to_scalar::<f64>();
    let error = norm(&(found - expected)?)? / norm(expected)?.max(f64::MIN_POSITIVE);
    assert!(error <= tolerance, "{name}: {error:e} over {tolerance:e}");
    Ok(())
}

/// Results, and gradients of Σ y ∘ weights for every variable.
fn compare(name: &str, [found, expected]: [&Tensor; 2], vars: &[&Var], tolerance: f64) -> Result<()> {
    close(found, expected, tolerance, name)?;
    let weights = random(99, found.dims()).to_dtype(found.dtype())?;
    let gradients = |y: &Tensor| (y * &weights)?.sum_all()?.backward();
    let of = |gradients: &GradStore, var: &Var| gradients.get(var).expect("a gradient").clone();
    let (found, expected) = (gradients(found)?, gradients(expected)?);
    for (number, var) in vars.iter().enumerate() {
        close(&of(&found, var), &of(&expected, var), tolerance, &format!("{name}: gradient of input {number}"))?;
    }
    Ok(())
}

/// Sums of at most 12 terms, in f64 and f32; of rows that lie apart, and of tensors of one to four dimensions.
#[test]
fn norms_are_their_formulas() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-5)] {
        for dims in [&[12][..], &[5, 12], &[2, 3, 12], &[2, 2, 3, 12]] {
            let (x, w, b) = (var(1, dims, dtype)?, var(2, &[12], dtype)?, var(3, &[12], dtype)?);
            let unit = |x: &Tensor| x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-3)?.sqrt()?);
            let centered = |x: &Tensor| unit(&x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?);
            let rms = unit(&x)?.broadcast_mul(&w)?;
            compare("rms_norm", [&rms_norm(&x, &w, 1e-3)?, &rms], &[&x, &w], tolerance)?;
            let layer = centered(&x)?.broadcast_mul(&w)?;
            compare("layer_norm", [&layer_norm(&x, &w, None, 1e-3)?, &layer], &[&x, &w], tolerance)?;
            let layer = layer.broadcast_add(&b)?;
            let found = layer_norm(&x, &w, Some(&b), 1e-3)?;
            compare("layer_norm with a bias", [&found, &layer], &[&x, &w, &b], tolerance)?;
        }
        let (x, w) = (var(4, &[12, 7], dtype)?, var(5, &[12], dtype)?);
        let found = rms_norm(&x.t()?, &w, 1e-3)?;
        compare("rows apart", [&found, &rms_norm(&x.t()?.contiguous()?, &w, 1e-3)?], &[&x, &w], 0.0)?;
    }
    Ok(())
}

#[test]
fn rope_turns_pairs_of_either_layout() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-15), (DType::F32, 1e-6)] {
        let x = var(1, &[2, 3, 5, 8], dtype)?;
        let angles = random(2, &[5, 4]);
        let (cos, sin) = (angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?);
        let halves = rope(&x, [&cos, &sin], RopeLayout::Halves)?;
        compare("halves", [&halves, &rope_slow(&x, &cos, &sin)?], &[&x], tolerance)?;
        let pairs = rope(&x, [&cos, &sin], RopeLayout::Interleaved)?;
        compare("pairs", [&pairs, &rope_i_slow(&x, &cos, &sin)?], &[&x], tolerance)?;
    }
    assert_eq!(RopeLayout::default(), RopeLayout::Halves);
    Ok(())
}

/// Less than a block of tokens and several, whose sums have up to 1100 terms; targets of every type of integers.
#[test]
fn cross_entropy_is_that_of_all_logits() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
        for (tokens, integers) in [(1, DType::U8), (5, DType::I64), (1100, DType::U32)] {
            let (x, w, b) = (var(1, &[tokens, 6], dtype)?, var(2, &[11, 6], dtype)?, var(3, &[11], dtype)?);
            let targets: Vec<u32> = (0..tokens as u32).map(|t| t * 7 % 11).collect();
            let targets = Tensor::new(targets, &Device::Cpu)?;
            let of_logits = |logits: Tensor| {
                let chosen = logits.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
                (logits.log_sum_exp(D::Minus1)? - chosen)?.sum_all()
            };
            let ids = targets.to_dtype(integers)?;
            let found = cross_entropy(&x, &w, &ids, CrossEntropyOptions::default())?;
            compare("cross_entropy", [&found, &of_logits(x.matmul(&w.t()?)?)?], &[&x, &w], tolerance)?;
            let options = CrossEntropyOptions::default().with_bias(&b).with_scale(0.3);
            let logits = (x.matmul(&w.t()?)?.broadcast_add(&b)? * 0.3)?;
            let found = cross_entropy(&x, &w, &ids, options)?;
            compare("with a bias and a scale", [&found, &of_logits(logits)?], &[&x, &w, &b], tolerance)?;
        }
    }
    Ok(())
}

/// With a matrix of all scores.
fn dense([q, k, v]: [&Tensor; 3], sees: impl Fn(usize, usize) -> bool, sinks: Option<&Tensor>) -> Result<Tensor> {
    let (b, heads, s, d) = q.dims4()?;
    let (_, keys, n, _) = k.dims4()?;
    let spread = |t: &Tensor| {
        t.unsqueeze(2)?.repeat((1, 1, heads / keys, 1, 1))?.reshape((b, heads, n, t.dim(3)?))?.contiguous()
    };
    let scores = (q.matmul(&spread(k)?.transpose(2, 3)?.contiguous()?)? / (d as f64).sqrt())?;
    let places = (n - s..n).flat_map(|query| (0..n).map(move |key| (query, key)));
    let mask = places.map(|(query, key)| if key <= query && sees(query, key) { 0.0 } else { f64::NEG_INFINITY });
    let mask = Tensor::from_vec(mask.collect::<Vec<f64>>(), (s, n), q.device())?.to_dtype(q.dtype())?;
    let scores = scores.broadcast_add(&mask)?;
    let scores = match sinks {
        Some(sinks) => Tensor::cat(&[scores, sinks.reshape((1, heads, 1, 1))?.broadcast_as((b, heads, s, 1))?], 3)?,
        None => scores,
    };
    let p = candle_nn::ops::softmax(&scores, D::Minus1)?.narrow(3, 0, n)?.contiguous()?;
    p.matmul(&spread(v)?)?.transpose(1, 2)
}

/// Groups of one to three query heads, positions before the queries, and every option, of lengths below and above a block
/// of queries. Sums have up to 140 terms.
#[test]
fn attention_is_that_of_all_scores() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
        for (queries, past, groups) in [(2, 0, 1), (1, 9, 2), (7, 5, 3), (130, 10, 2)] {
            let (heads, positions) = (2 * groups, queries + past);
            let q = var(1, &[2, heads, queries, 6], dtype)?;
            let (k, v) = (var(2, &[2, 2, positions, 6], dtype)?, var(3, &[2, 2, positions, 4], dtype)?);
            let sinks = var(4, &[heads], dtype)?;
            let plain = CausalOptions::default();
            let all = |_: usize, _: usize| true;
            let expected = dense([&q, &k, &v], all, None)?;
            compare("attention", [&attention(&q, &k, &v, plain)?, &expected], &[&q, &k, &v], tolerance)?;
            let found = attention(&q, &k, &v, plain.with_scale(6f64.powf(-0.5)))?;
            compare("a scale", [&found, &expected], &[&q, &k, &v], tolerance)?;
            let found = attention(&q, &k, &v, plain.with_window(4))?;
            let expected = dense([&q, &k, &v], |query, key| query - key < 4, None)?;
            compare("a window", [&found, &expected], &[&q, &k, &v], tolerance)?;
            let found = attention(&q, &k, &v, plain.with_chunk(6))?;
            let expected = dense([&q, &k, &v], |query, key| query / 6 == key / 6, None)?;
            compare("chunks", [&found, &expected], &[&q, &k, &v], tolerance)?;
            let found = attention(&q, &k, &v, plain.with_sinks(&sinks))?;
            let expected = dense([&q, &k, &v], all, Some(&sinks))?;
            compare("sinks", [&found, &expected], &[&q, &k, &v, &sinks], tolerance)?;
        }
    }
    Ok(())
}

/// Of no rows, tokens or queries results are none or 0, and backward goes on to what they were made of.
#[test]
fn empty_inputs_have_gradients_of_zeros() -> Result<()> {
    let check = |name: &str, y: moebius_models::Result<Tensor>, dims: &[usize], vars: &[&Var]| -> Result<()> {
        let y = y.expect(name);
        assert_eq!((y.dims(), y.dtype()), (dims, DType::F32), "{name}");
        assert_eq!(y.sum_all()?.to_scalar::<f32>()?, 0.0, "{name}");
        let gradients = y.sum_all()?.backward()?;
        for (number, var) in vars.iter().enumerate() {
            let gradient = gradients.get(var).unwrap_or_else(|| panic!("{name}: no gradient of input {number}"));
            assert_eq!(gradient.dims(), var.dims(), "{name}");
            assert_eq!(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?, 0.0, "{name}");
        }
        Ok(())
    };
    let of = |dims: &[usize]| var(1, dims, DType::F32);
    let (rows, w, b) = (of(&[0, 4])?, of(&[4])?, of(&[4])?);
    check("rms_norm", rms_norm(&rows, &w, 1e-6), &[0, 4], &[&rows, &w])?;
    check("layer_norm", layer_norm(&rows, &w, Some(&b), 1e-6), &[0, 4], &[&rows, &w, &b])?;
    let (x, angles) = (of(&[1, 2, 0, 4])?, of(&[0, 2])?);
    check("rope", rope(&x, [&angles, &angles], RopeLayout::Halves), &[1, 2, 0, 4], &[&x])?;
    let (head, none) = (of(&[3, 4])?, Tensor::zeros(0, DType::U32, &Device::Cpu)?);
    let bias = of(&[3])?;
    let options = CrossEntropyOptions::default().with_bias(&bias);
    check("cross_entropy", cross_entropy(&rows, &head, &none, options), &[], &[&rows, &head, &bias])?;
    let (q, k) = (of(&[2, 4, 0, 6])?, of(&[2, 2, 3, 6])?);
    let found = attention(&q, &k, &k, CausalOptions::default());
    check("attention without queries", found, &[2, 0, 4, 6], &[&q, &k])?;
    let (q, k) = (of(&[0, 4, 3, 6])?, of(&[0, 2, 3, 6])?);
    let found = attention(&q, &k, &k, CausalOptions::default());
    check("attention without sequences", found, &[0, 3, 4, 6], &[&q, &k])
}

/// In 16 bits too, results have their inputs' type.
#[test]
fn operations_run_in_16_bits() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let (x, w) = (var(1, &[2, 2, 5, 8], dtype)?, var(2, &[8], dtype)?);
        let angles = var(3, &[5, 4], dtype)?;
        let results = [
            rms_norm(&x, &w, 1e-6),
            layer_norm(&x, &w, Some(&w), 1e-6),
            rope(&x, [&angles, &angles], RopeLayout::Interleaved),
            attention(&x, &x, &x, CausalOptions::default()),
        ];
        for y in results {
            let y = y.expect("a result");
            assert_eq!(y.dtype(), dtype);
            assert!(y.sum_all()?.backward()?.get(&x).is_some_and(|gradient| gradient.dtype() == dtype));
        }
        let (hidden, targets) = (x.reshape((20, 8))?, Tensor::zeros(20, DType::U32, &Device::Cpu)?);
        let head = var(4, &[3, 8], dtype)?;
        let loss = cross_entropy(&hidden, &head, &targets, CrossEntropyOptions::default()).expect("a loss");
        assert_eq!(loss.dtype(), DType::F32);
    }
    Ok(())
}

fn zeros(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).expect("a tensor")
}

fn wide(dims: &[usize]) -> Tensor {
    Tensor::zeros(dims, DType::F64, &Device::Cpu).expect("a tensor")
}

/// The error names the call and the tensor.
fn shape(result: moebius_models::Result<Tensor>, named: (&str, &str)) {
    let error = result.expect_err(named.1);
    let found = matches!(&error, Error::Shape { call, tensor, .. } if (*call, &tensor[..]) == named);
    assert!(found, "{named:?}: {error:?}");
}

/// The error names the call, and says these words.
fn usage(result: moebius_models::Result<Tensor>, name: &str, words: &[&str]) {
    let error = result.expect_err(words[0]);
    let Error::Usage { call, problem } = &error else { panic!("{words:?}: {error:?}") };
    assert_eq!(*call, name);
    assert!(words.iter().all(|word| problem.contains(word)), "{words:?}: {problem}");
}

#[test]
fn norms_and_rope_refuse_what_does_not_fit() {
    const RMS: &str = "ops::rms_norm";
    const LAYER: &str = "ops::layer_norm";
    const ROPE: &str = "ops::rope";
    let (x, w) = (zeros(&[3, 4]), zeros(&[4]));
    let norm = |x: &Tensor, w: &Tensor| rms_norm(x, w, 1e-6);
    shape(norm(&x, &zeros(&[5])), (RMS, "weight"));
    shape(norm(&x, &zeros(&[1, 4])), (RMS, "weight"));
    shape(norm(&zeros(&[]), &w), (RMS, "x"));
    shape(norm(&zeros(&[3, 0]), &zeros(&[0])), (RMS, "x"));
    usage(norm(&x, &wide(&[4])), RMS, &["weight", "F32", "F64"]);
    usage(norm(&x.to_dtype(DType::U32).expect("integers"), &w), RMS, &["x", "U32"]);
    usage(rms_norm(&x, &w, -1.0), RMS, &["eps", "-1"]);
    usage(rms_norm(&x, &w, f64::NAN), RMS, &["eps", "NaN"]);
    shape(layer_norm(&x, &w, Some(&zeros(&[3])), 1e-6), (LAYER, "bias"));
    usage(layer_norm(&x, &w, Some(&wide(&[4])), 1e-6), LAYER, &["bias", "F64"]);

    let turn = |x: &Tensor, cos: &Tensor, sin: &Tensor| rope(x, [cos, sin], RopeLayout::Halves);
    let (x, angles) = (zeros(&[1, 2, 3, 4]), zeros(&[3, 2]));
    shape(turn(&zeros(&[2, 3, 4]), &angles, &angles), (ROPE, "x"));
    shape(turn(&zeros(&[1, 2, 3, 5]), &angles, &angles), (ROPE, "x"));
    shape(turn(&zeros(&[1, 2, 3, 0]), &zeros(&[3, 0]), &zeros(&[3, 0])), (ROPE, "x"));
    shape(turn(&x, &zeros(&[3, 4]), &angles), (ROPE, "cos"));
    shape(turn(&x, &angles, &zeros(&[2, 2])), (ROPE, "sin"));
    usage(turn(&x, &angles, &wide(&[3, 2])), ROPE, &["sin", "F64"]);
}

#[test]
fn cross_entropy_refuses_what_does_not_fit() {
    const NAME: &str = "ops::cross_entropy";
    let (x, w) = (zeros(&[3, 4]), zeros(&[5, 4]));
    let ids = Tensor::new(&[0u32, 4, 2], &Device::Cpu).expect("ids");
    let plain = CrossEntropyOptions::default();
    let loss = |x: &Tensor, w: &Tensor, ids: &Tensor| cross_entropy(x, w, ids, CrossEntropyOptions::default());
    loss(&x, &w, &ids).expect("a loss");
    shape(loss(&zeros(&[1, 3, 4]), &w, &ids), (NAME, "hidden"));
    shape(loss(&x, &zeros(&[5, 3]), &ids), (NAME, "weight"));
    shape(loss(&x, &zeros(&[0, 4]), &ids), (NAME, "weight"));
    shape(loss(&zeros(&[3, 0]), &zeros(&[5, 0]), &ids), (NAME, "weight"));
    shape(loss(&x, &w, &ids.narrow(0, 0, 2).expect("two")), (NAME, "targets"));
    usage(loss(&x, &wide(&[5, 4]), &ids), NAME, &["weight", "F64"]);
    usage(loss(&x, &w, &zeros(&[3])), NAME, &["targets", "integers", "F32"]);
    shape(cross_entropy(&x, &w, &ids, plain.with_bias(&zeros(&[4]))), (NAME, "bias"));
    usage(cross_entropy(&x, &w, &ids, plain.with_bias(&wide(&[5]))), NAME, &["bias", "F64"]);
    usage(cross_entropy(&x, &w, &ids, plain.with_scale(f64::INFINITY)), NAME, &["scale", "inf"]);
    for id in [5i64, -1, i64::MAX] {
        let ids = Tensor::new(&[0, 1, id], &Device::Cpu).expect("ids");
        let error = loss(&x, &w, &ids).expect_err("outside");
        let named =
            matches!(error, Error::TokenId { call: NAME, position: 2, id: found, vocabulary: 5, .. } if found == id);
        assert!(named, "{error:?}");
    }
}

#[test]
fn attention_refuses_what_does_not_fit() {
    const NAME: &str = "ops::attention";
    let (q, k, v) = (zeros(&[2, 4, 3, 6]), zeros(&[2, 2, 5, 6]), zeros(&[2, 2, 5, 8]));
    let plain = CausalOptions::default();
    let run = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, CausalOptions::default());
    run(&q, &k, &v).expect("a result");
    shape(run(&zeros(&[4, 3, 6]), &k, &v), (NAME, "q"));
    shape(run(&zeros(&[2, 0, 3, 6]), &k, &v), (NAME, "q"));
    shape(run(&zeros(&[2, 4, 3, 0]), &k, &v), (NAME, "q"));
    for dims in [[1, 2, 5, 6], [2, 2, 5, 7], [2, 3, 5, 6], [2, 0, 5, 6], [2, 2, 2, 6]] {
        shape(run(&q, &zeros(&dims), &v), (NAME, "k"));
    }
    for dims in [[1, 2, 5, 8], [2, 1, 5, 8], [2, 2, 4, 8], [2, 2, 5, 0]] {
        shape(run(&q, &k, &zeros(&dims)), (NAME, "v"));
    }
    shape(run(&zeros(&[2, 4, 0, 6]), &zeros(&[2, 2, 0, 6]), &zeros(&[2, 2, 0, 6])), (NAME, "k"));
    usage(run(&q, &wide(&[2, 2, 5, 6]), &v), NAME, &["k", "F64"]);
    usage(run(&q, &k, &wide(&[2, 2, 5, 8])), NAME, &["v", "F64"]);
    shape(attention(&q, &k, &v, plain.with_sinks(&zeros(&[2]))), (NAME, "sinks"));
    usage(attention(&q, &k, &v, plain.with_sinks(&wide(&[4]))), NAME, &["sinks", "F64"]);
    usage(attention(&q, &k, &v, plain.with_window(0)), NAME, &["window", "0"]);
    usage(attention(&q, &k, &v, plain.with_chunk(0)), NAME, &["chunk", "0"]);
    usage(attention(&q, &k, &v, plain.with_scale(f64::NAN)), NAME, &["scale", "NaN"]);
    // Wider than every sequence, as published configurations have it.
    attention(&q, &k, &v, plain.with_window(usize::MAX).with_chunk(usize::MAX)).expect("a result");
}
