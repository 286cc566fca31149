//! Kernels that are left few SMs: each cluster then walks over many tiles, in which whatever is counted from tile to tile
//! (stages, turns, tickets, boxes on their way out) must come round as it does on a whole GPU.

use moebius::cuda::Cuda;
use moebius::{DType, MoeConfig, Result};

use crate::harness::{Case, Data, on_gpu, tests};

tests!(few_sms_change_no_bit);

fn few_sms_change_no_bit(cuda: &Cuda) -> Result<()> {
    // Tiles of up, of down and the gradients; sums of 8192 and more; square tiles of down's gradient everywhere; experts
    // with many tiles of rows and a hot one.
    for (hidden, inner, tokens, hot) in [(256, 128, 1500, 0.0), (136, 8200, 500, 0.0), (328, 200, 900, 4.0)] {
        let mut config = MoeConfig::new(hidden, inner, 8, 2);
        config.router.logit_bias = true;
        let case = Case { hot, ..Case::new(config, tokens, DType::BF16) };
        let data = Data::new(&case)?;
        let whole = on_gpu(&case, &data, cuda)?;
        for reserved in [1, 16, 40, 131, 10_000] {
            let few = on_gpu(&case, &data, &cuda.reserving_sms(reserved))?;
            for ((name, few), (_, whole)) in few.iter().zip(&whole) {
                assert!(few == whole, "{hidden} to {inner}, {reserved} SMs reserved: other bits of {name}");
            }
        }
    }
    cuda.check()
}
