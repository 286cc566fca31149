//! A hidden size at which the router's sums are cut into parts.

use moebius::DType;
use moebius::config::MoeConfig;
use moebius::cuda::Cuda;

use crate::harness::{Case, compare, tests};

tests!(logits_of_many_hidden_elements);

fn logits_of_many_hidden_elements(cuda: &Cuda) {
    for bias in [false, true] {
        let mut config = MoeConfig::new(4104, 16, 8, 2);
        config.router.logit_bias = bias;
        for dtype in [DType::BF16, DType::F16] {
            compare(&format!("hidden 4104, bias {bias}"), &Case::new(config.clone(), 150, dtype), cuda);
        }
    }
}
