//! The router's gradients against sums in f64: Hopper's kernels, which take 16, 32, 64, 128 and 256 experts in one pass, and
//! the portable ones, which take what is more, or not whole words.

use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::{Kernels, LinearBwd};
use moebius::{DType, Result, Tensor};

use crate::harness::{Random, tests};

tests!(gradients_are_sums_over_experts_and_over_tokens, those_of_a_large_model_too);

/// DeepSeek-V3's router.
fn those_of_a_large_model_too(cuda: &Cuda) -> Result<()> {
    check(cuda, [4096, 256, 7168])?;
    check(&cuda.portable(), [4096, 256, 7168])
}

fn gradients_are_sums_over_experts_and_over_tokens(cuda: &Cuda) -> Result<()> {
    let cuda = cuda.poisoning();
    // Few experts, the ends of each pass and what is past them; columns of less than a block, of a block and a few more.
    for (experts, hidden) in [
        (4, 8),
        (16, 136),
        (20, 520),
        (32, 512),
        (64, 1032),
        (68, 256),
        (128, 648),
        (132, 264),
        (144, 392),
        (160, 8),
        (200, 512),
        (256, 776),
        (260, 264),
        (300, 512),
        (6, 20),
    ] {
        for tokens in [1, 63, 200] {
            check(&cuda, [tokens, experts, hidden])?;
        }
        check(&cuda.portable(), [70, experts, hidden])?;
        check(&cuda.reserving_sms(130), [700, experts, hidden])?;
    }
    cuda.check()
}

fn check(cuda: &Cuda, [tokens, experts, hidden]: [usize; 3]) -> Result<()> {
    let mut random = Random::new((tokens * 1000 + experts * 10 + hidden) as u64);
    let x = random.tensor(&[tokens, hidden], DType::BF16, 1.0)?;
    let weight = random.tensor(&[experts, hidden], DType::BF16, 0.5)?;
    let d_out = random.tensor(&[tokens, experts], DType::F32, 1.0)?;
    let before = random.tensor(&[tokens, hidden], DType::BF16, 1.0)?;
    let mut d_x = before.to(cuda)?;
    let mut d_weight = Tensor::empty(cuda, DType::F32, &[experts, hidden])?;
    cuda.linear_bwd(LinearBwd {
        x: x.to(cuda)?.view(),
        weight: weight.to(cuda)?.view(),
        d_out: d_out.to(cuda)?.view(),
        d_x: Some(d_x.view_mut()),
        d_weight: Some(d_weight.view_mut()),
        d_bias: None,
    })?;
    // A logit's gradient loses at most 2⁻¹¹ of itself where it is multiplied as TF32, and less as two bf16 numbers; each
    // of a sum's additions 2⁻²⁴ of the sum of magnitudes.
    let loss = |terms: usize| 2f64.powi(-11) + terms as f64 * 2f64.powi(-24);
    let [x, weight, d_out, before] = [&x, &weight, &d_out, &before].map(Tensor::<Cpu>::to_f64);
    let what = format!("{tokens} tokens, {experts} experts, {hidden} columns");
    // Of large ones a part is looked at, in every row.
    let stride = if tokens * experts * hidden > 1 << 30 { 997 } else { 1 };
    for (i, got) in cuda.read(d_x.view())?.into_iter().enumerate().step_by(stride) {
        let (t, c) = (i / hidden, i % hidden);
        let terms = (0..experts).map(|e| d_out[t * experts + e] * weight[e * hidden + c]);
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), v| (s + v, m + v.abs()));
        let want = before[i] + sum;
        // The result is rounded to the 8 bits of bf16: half a unit of the last is 2⁻⁸ of it at most.
        let bound = loss(experts) * magnitude + 2f64.powi(-8) * (want.abs() + loss(experts) * magnitude);
        assert!((got - want).abs() <= bound, "{what}: d_x[{t}, {c}] is {got}, not {want} within {bound}");
    }
    for (i, got) in cuda.read(d_weight.view())?.into_iter().enumerate().step_by(stride) {
        let (e, c) = (i / hidden, i % hidden);
        let terms = (0..tokens).map(|t| d_out[t * experts + e] * x[t * hidden + c]);
        let (want, magnitude) = terms.fold((0.0, 0.0), |(s, m), v| (s + v, m + v.abs()));
        let bound = loss(tokens) * magnitude;
        assert!((got - want).abs() <= bound, "{what}: d_weight[{e}, {c}] is {got}, not {want} within {bound}");
    }
    Ok(())
}
