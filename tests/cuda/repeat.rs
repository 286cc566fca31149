//! The same bits in every run.

use moebius::DType;
use moebius::config::{MoeConfig, SharedConfig};
use moebius::cuda::Cuda;

use crate::harness::{Case, Data, on_gpu, tests};

tests!(steps_are_bit_identical);

/// Forward and backward, from the same inputs each time.
pub fn repeat(cuda: &Cuda, steps: usize) {
    let mut config = MoeConfig::new(136, 104, 16, 4);
    config.shared = Some(SharedConfig { intermediate: 72, gated: true, bias: false });
    config.expert_bias = true;
    (config.aux.balance, config.aux.z) = (0.1, 0.01);
    for dtype in [DType::BF16, DType::F32] {
        let case = Case::new(config.clone(), 300, dtype);
        let data = Data::new(&case).expect("inputs");
        let bits = || -> Vec<(String, Vec<u64>)> {
            let results = on_gpu(&case, &data, cuda).expect("a run");
            results.into_iter().map(|(n, v)| (n, v.into_iter().map(f64::to_bits).collect())).collect()
        };
        let first = bits();
        for step in 1..steps {
            assert!(bits() == first, "step {step} differs in {dtype:?}");
        }
    }
}

fn steps_are_bit_identical(cuda: &Cuda) {
    repeat(cuda, 3);
}
