//! Sizes at which sums are cut into parts, made in wider tiles, or their rows brought into order first, and at which
//! planning changes its kernels.

use moebius::DType;
use moebius::config::MoeConfig;
use moebius::cuda::Cuda;

use crate::harness::{Case, compare, tests};

tests!(logits_of_many_hidden_elements, many_inner_elements, many_experts_of_few_tokens);

fn logits_of_many_hidden_elements(cuda: &Cuda) {
    for bias in [false, true] {
        let mut config = MoeConfig::new(4104, 16, 8, 2);
        config.router.logit_bias = bias;
        for dtype in [DType::BF16, DType::F16] {
            compare(&format!("hidden 4104, bias {bias}"), &Case::new(config.clone(), 150, dtype), cuda);
        }
    }
}

/// Down and the rows' gradient are sums of 8192 and more, and up, down's gradient and the weights' make as many
/// columns.
fn many_inner_elements(cuda: &Cuda) {
    for bias in [false, true] {
        let mut config = MoeConfig::new(136, 8200, 3, 2);
        config.expert_bias = bias;
        for dtype in [DType::BF16, DType::F16] {
            compare(&format!("inner 8200, bias {bias}"), &Case::new(config.clone(), 150, dtype), cuda);
        }
    }
}

/// One block plans up to 384 experts, whose counts then take all the shared memory that it gets unasked.
fn many_experts_of_few_tokens(cuda: &Cuda) {
    for experts in [380, 384, 385] {
        let config = MoeConfig::new(16, 8, experts, 8);
        compare(&format!("{experts} experts"), &Case::new(config, 24, DType::F32), cuda);
    }
}
