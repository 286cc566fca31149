//! The layer's configuration as a burn `Config`.

use burn::config::Config;
use burn::nn::Initializer;

use crate::config::MoeConfig;

/// Configuration of [`ExpertParallelMoE`](super::ExpertParallelMoE), made with
/// [`init`](ExpertParallelMoEConfig::init). A [`MoeConfig`] converts into it.
///
/// ```
/// use burn::backend::Flex;
/// use moebius::MoeConfig;
/// use moebius::burn::ExpertParallelMoEConfig;
///
/// let config = ExpertParallelMoEConfig::new(MoeConfig::new(64, 32, 8, 2)); // hidden, intermediate, experts, top-k
/// let moe = config.init::<Flex>(&Default::default())?;
/// # Ok::<(), moebius::Error>(())
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct ExpertParallelMoEConfig {
    /// Sizes and formulas of the layer.
    pub moe: MoeConfig,
    /// The layer's number, in tags and errors: the same on all ranks, another for each layer of a model. `None`: the
    /// next one of its group.
    pub number: Option<u32>,
    /// Values that the weights start from; biases start from zero. The default is that of burn's `Linear`.
    #[config(default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }")]
    pub initializer: Initializer,
}

impl From<MoeConfig> for ExpertParallelMoEConfig {
    fn from(moe: MoeConfig) -> Self {
        Self::new(moe)
    }
}

impl From<&MoeConfig> for ExpertParallelMoEConfig {
    fn from(moe: &MoeConfig) -> Self {
        Self::new(moe.clone())
    }
}
