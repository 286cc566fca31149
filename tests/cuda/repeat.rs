//! The same bits in every run.

use moebius::DType;
use moebius::config::{MoeConfig, SharedConfig};

use crate::harness::{Case, Data, gpu, on_gpu};

#[test]
fn steps_are_bit_identical() {
    let Some(cuda) = gpu() else { return };
    let mut config = MoeConfig::new(136, 104, 16, 4);
    config.shared = Some(SharedConfig { intermediate: 72, gated: true });
    config.expert_bias = true;
    (config.aux.balance, config.aux.z) = (0.1, 0.01);
    for dtype in [DType::BF16, DType::F32] {
        let case = Case::new(config.clone(), 300, dtype);
        let data = Data::new(&case).expect("inputs");
        let bits = || -> Vec<(String, Vec<u64>)> {
            let results = on_gpu(&case, &data, &cuda).expect("a run");
            results.into_iter().map(|(n, v)| (n, v.into_iter().map(f64::to_bits).collect())).collect()
        };
        let first = bits();
        for step in 1..500 {
            assert!(bits() == first, "step {step} differs in {dtype:?}");
        }
    }
}
