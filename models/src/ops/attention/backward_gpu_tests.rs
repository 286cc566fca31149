//! The kernels of attention's backward on a GPU: closed forms, and a matrix of all scores in f64 of the same inputs.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::super::tests::relative;
use super::backward::BackwardOutput;
use super::backward_cuda::{backward, write_gradients};
use super::cases::{Case, KEYS, dense};
use super::forward_cuda::{self, AttentionCall};
use super::*;
use crate::testing::random;

const DIMS: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];
/// 16-bit types, and by how much of itself each rounds a number at most.
const TYPES: [(DType, f64); 2] = [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)];

/// Lengths below, at and above those of all blocks and steps, more keys than queries, and 1, 2 and 8 query heads of a
/// key head.
fn cases() -> Vec<((usize, usize), Case)> {
    let mut all = Vec::new();
    let lengths = [(1, 5, 8), (16, 0, 2), (63, 1, 2), (64, 0, 8), (65, 70, 1), (129, 0, 2), (200, 0, 8), (300, 37, 1)];
    for dims in DIMS {
        for (queries, past, groups) in lengths {
            for (window, chunk) in [(None, None), (Some(7), None), (Some(100), None), (None, Some(48))] {
                let sinks = (queries + past) % 2 == 0;
                all.push((dims, Case { queries, past, groups, window, chunk, sinks }));
            }
        }
    }
    all
}

/// Values of f64 as `dtype` has them, on the CPU, and on the GPU in one of two layouts that rows of heads come in:
/// heads of a position side by side, or rows in the midst of longer ones of a longer sequence.
fn strided(exact: &Tensor, dtype: DType, device: &Device, number: usize) -> Result<(Tensor, Var)> {
    let t = exact.to_dtype(dtype)?;
    let exact = Var::from_tensor(&t.to_dtype(DType::F64)?)?;
    let t = t.to_device(device)?;
    let strided = if number.is_multiple_of(2) {
        t.transpose(1, 2)?.contiguous()?.transpose(1, 2)?
    } else {
        let nan = |dims: &[usize]| Tensor::ones(dims, dtype, device)? * f64::NAN;
        let (b, h, s, d) = t.dims4()?;
        let wider = Tensor::cat(&[&nan(&[b, h, s, 8])?, &t, &nan(&[b, h, s, 16])?], 3)?;
        let longer = Tensor::cat(&[&nan(&[b, h, 3, d + 24])?, &wider, &nan(&[b, h, 1, d + 24])?], 2)?;
        longer.narrow(2, 3, s)?.narrow(3, 8, d)?
    };
    Ok((strided, exact))
}

/// Memory for a call's results, full of NaN.
fn poisoned([q, k, v]: [&Tensor; 3]) -> Result<BackwardOutput> {
    let nan = |dims: &[usize], dtype| (Tensor::ones(dims, dtype, q.device())? * f64::NAN)?.force_contiguous();
    let like = |t: &Tensor| nan(t.dims(), t.dtype());
    Ok(BackwardOutput { d_q: like(q)?, d_k: like(k)?, d_v: like(v)?, dots: nan(&q.dims()[..3], DType::F32)? })
}

fn bits(t: &Tensor) -> Result<Vec<u32>> {
    let values = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// A call, and what the forward's kernel makes of it, however few the queries are.
struct Forward {
    call: AttentionCall,
    y: Tensor,
    log_sums: Tensor,
}

impl Forward {
    fn of(operands: [&Tensor; 3], options: &AttentionOptions<'_>) -> Result<Self> {
        let missing = || candle_core::Error::msg(format!("no kernel for {options:?}"));
        let call = AttentionCall::of(operands, options)?.ok_or_else(missing)?;
        let Output { y, log_sums } = forward_cuda::run(&call, operands, options.sinks, true)?;
        Ok(Self { call, y, log_sums: log_sums.ok_or_else(missing)? })
    }
}

/// The backward's kernels into memory full of NaN, twice: each number is written, and has the same bits.
fn twice(forward: &Forward, operands: [&Tensor; 3], of: &Tensor, name: &str) -> Result<BackwardOutput> {
    let run = || -> Result<BackwardOutput> {
        let output = poisoned(operands)?;
        write_gradients(&forward.call, operands, [&forward.y, of, &forward.log_sums], &output)?;
        Ok(output)
    };
    let (first, second) = (run()?, run()?);
    let of = |output: &BackwardOutput| [&output.d_q, &output.d_k, &output.d_v, &output.dots].map(Clone::clone);
    for (what, (a, b)) in ["q", "k", "v", "rows' products"].into_iter().zip(of(&first).iter().zip(&of(&second))) {
        assert!(bits(a)? == bits(b)?, "{what} of {name}: other bits in a second run");
        let all = a.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        assert!(all.iter().all(|x| x.is_finite()), "{what} of {name}: not all is written");
    }
    Ok(first)
}

/// The gradients that `found` has of q, k and v.
fn same(found: &BackwardOutput, expected: [Option<&Tensor>; 3], tolerance: f64, name: &str) -> Result<()> {
    for (what, (found, expected)) in
        ["q", "k", "v"].into_iter().zip([&found.d_q, &found.d_k, &found.d_v].into_iter().zip(expected))
    {
        let expected = expected.ok_or_else(|| candle_core::Error::msg(format!("no gradient of {what}")))?;
        assert_eq!(found.dims(), expected.dims(), "{what} of {name}");
        let error = relative(found, expected)?;
        assert!(error <= tolerance, "gradient of {what} of {name}: {error:e} over {tolerance:e}");
    }
    Ok(())
}

/// Of what a gradient is made, three are rounded to 16 bits, each by at most ε of itself: the result that is in D, P or
/// dS, and the gradient: 3 ε. The products of rows are of a result that was rounded twice, by its P and itself.
#[test]
#[ignore = "needs a GPU"]
fn kernels_equal_gradients_of_all_scores() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (number, ((dim, value), case)) in cases().into_iter().enumerate() {
        for (dtype, eps) in TYPES {
            let name = format!("{case:?} of heads of {dim} and {value} in {dtype:?}");
            let random = |seed: u64, dims: &[usize]| random(seed + 10 * number as u64, dims);
            let [q, k, v, sinks] = case.shapes(dim, value);
            let of = |seed: u64, dims: &[usize], other: usize| {
                strided(&random(seed, dims), dtype, &device, number / 4 + other)
            };
            let ((q, exact_q), (k, exact_k), (v, exact_v)) = (of(1, &q, 0)?, of(2, &k, 1)?, of(3, &v, 0)?);
            let sinks = (random(4, &sinks) * 3.0)?.to_dtype(dtype)?;
            let exact_sinks = Var::from_tensor(&sinks.to_dtype(DType::F64)?)?;
            let sinks = Var::from_tensor(&sinks.to_device(&device)?)?;
            let (masks, scale) = (MaskCache::default(), 1.0 / (dim as f64).sqrt());
            let options = case.options(&sinks, scale, &masks);
            let forward = Forward::of([&q, &k, &v], &options)?;
            let expected = dense([&exact_q, &exact_k, &exact_v], &case.options(&exact_sinks, scale, &masks))?;
            let (of, exact_of) = of(5, forward.y.dims(), 1)?;
            let gradients = (&expected * exact_of.as_detached_tensor())?.sum_all()?.backward()?;

            let found = twice(&forward, [&q, &k, &v], &of, &name)?;
            same(&found, [&exact_q, &exact_k, &exact_v].map(|exact| gradients.get(exact)), 3.0 * eps, &name)?;
            let dots = (expected.detach() * exact_of.as_detached_tensor())?.sum(3)?.transpose(1, 2)?;
            let error = relative(&found.dots, &dots)?;
            assert!(error <= 2.0 * eps, "products of rows of {name}: {error:e}");
        }
    }
    Ok(())
}

/// A position that sees itself alone has its value for a result: its gradient is the value's to the bit, and there is
/// none of query and key but for what f32 rounds of two sums of as many products, each below 1.
#[test]
#[ignore = "needs a GPU"]
fn positions_alone_hand_gradients_to_their_values() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (dim, value) in DIMS {
        for (dtype, _) in TYPES {
            for (queries, window) in [(1, None), (1, Some(1)), (70, Some(1))] {
                let of = |seed, dims: &[usize]| random(seed, dims).to_dtype(dtype)?.to_device(&device);
                let (q, k) = (of(1, &[2, KEYS, queries, dim])?, of(2, &[2, KEYS, queries, dim])?);
                let (v, d_y) = (of(3, &[2, KEYS, queries, value])?, of(4, &[2, queries, KEYS, value])?);
                let masks = MaskCache::default();
                let options =
                    AttentionOptions { first: 0, window, chunk: None, sinks: None, scale: 0.1, masks: &masks };
                let forward = Forward::of([&q, &k, &v], &options)?;
                let name = format!("{queries} queries of heads of {dim} in {dtype:?}, window {window:?}");
                let found = twice(&forward, [&q, &k, &v], &d_y, &name)?;
                // P differs from 1 by what f32 rounds of scores below 26, and becomes 1 in 16 bits.
                assert!(bits(&found.d_v)? == bits(&d_y.transpose(1, 2)?)?, "values of {name}");
                let bound = 2.0 * (value as f64) * f64::from(f32::EPSILON);
                for (what, t) in [("q", &found.d_q), ("k", &found.d_k)] {
                    let most = t.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
                    assert!(f64::from(most) <= bound, "{what} of {name}: {most:e} over {bound:e}");
                }
            }
        }
    }
    Ok(())
}

/// Queries of zeros see all keys before them alike: 1 / (i + 1) of each by query i. With gradients of ones a value's is
/// the sum of these over the queries that see it, and no key has any.
#[test]
#[ignore = "needs a GPU"]
fn queries_of_zeros_share_gradients_alike() -> Result<()> {
    const TOKENS: usize = 200;
    let device = Device::new_cuda_with_stream(0)?;
    for (dim, value) in DIMS {
        for (dtype, eps) in TYPES {
            let ones = |dims: &[usize]| Tensor::ones(dims, dtype, &device);
            let q = ones(&[1, 2 * KEYS, TOKENS, dim])?.zeros_like()?;
            let k = random(1, &[1, KEYS, TOKENS, dim]).to_dtype(dtype)?.to_device(&device)?;
            let v = random(2, &[1, KEYS, TOKENS, value]).to_dtype(dtype)?.to_device(&device)?;
            let masks = MaskCache::default();
            let options =
                AttentionOptions { first: 0, window: None, chunk: None, sinks: None, scale: 0.1, masks: &masks };
            let forward = Forward::of([&q, &k, &v], &options)?;
            let name = format!("heads of {dim} and {value} in {dtype:?}");
            let found = twice(&forward, [&q, &k, &v], &ones(forward.y.dims())?, &name)?;
            let mut expected = vec![0.0; TOKENS * value];
            for (key, row) in expected.chunks_mut(value).enumerate() {
                // Of both query heads of a key head.
                row.fill(2.0 * (key..TOKENS).map(|query| 1.0 / (query + 1) as f64).sum::<f64>());
            }
            let expected = Tensor::from_vec(expected, (1, 1, TOKENS, value), &Device::Cpu)?;
            let error = relative(&found.d_v, &expected.repeat((1, KEYS, 1, 1))?)?;
            // P and the gradient are rounded.
            assert!(error <= 2.0 * eps, "values of {name}: {error:e}");
            assert!(bits(&found.d_k)?.iter().all(|bits| bits << 1 == 0), "keys of {name}");
        }
    }
    Ok(())
}

/// Calls that no kernel serves are left to candle's operations.
#[test]
#[ignore = "needs a GPU"]
fn kernels_serve_what_the_forward_s_do_alone() -> Result<()> {
    let device = Device::new_cuda_with_stream(0)?;
    for (dtype, dim, queries) in [(DType::F32, 64, 20), (DType::BF16, 32, 20), (DType::BF16, 64, 15)] {
        let t = Tensor::ones((1, 2, queries, dim), dtype, &device)?;
        let (y, log_sums) = (t.transpose(1, 2)?.contiguous()?, Tensor::ones((1, 2, queries), DType::F32, &device)?);
        let masks = MaskCache::default();
        let options = AttentionOptions { first: 0, window: None, chunk: None, sinks: None, scale: 1.0, masks: &masks };
        assert!(backward([&t, &t, &t], [&y, &y, &log_sums], &options)?.is_none(), "{dtype:?}, {dim}, {queries}");
    }
    Ok(())
}
