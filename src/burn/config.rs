//! The layer's configuration as a burn `Config`.

use burn::config::Config;
use burn::nn::Initializer;

use crate::config::{
    Activation, AuxConfig, ExpertCapacity, GroupLimit, MoeConfig, Payload, Renorm, RouterConfig, Score, SharedConfig,
    WeightAt,
};

/// Configuration of [`ExpertParallelMoE`](super::ExpertParallelMoE), made with
/// [`init`](ExpertParallelMoEConfig::init). The defaults are those of [`MoeConfig::new`].
#[derive(Config, Debug, PartialEq)]
pub struct ExpertParallelMoEConfig {
    /// Hidden size H of a token.
    pub hidden: usize,
    /// Inner size I of a routed expert.
    pub intermediate: usize,
    /// Number of experts E over all ranks.
    pub num_experts: usize,
    /// Experts per token K.
    pub top_k: usize,
    /// Scores from logits.
    #[config(default = "Score::Softmax")]
    pub score: Score,
    /// Logits have a learned bias.
    #[config(default = false)]
    pub logit_bias: bool,
    /// Scores get a bias for choosing only, without gradient.
    #[config(default = false)]
    pub selection_bias: bool,
    /// Choose among the best groups of experts only.
    pub groups: Option<GroupLimit>,
    /// Divide the chosen weights by their norm.
    #[config(default = "Some(Renorm { p: 1.0, epsilon: 0.0, floor: 0.0 })")]
    pub renorm: Option<Renorm>,
    /// Multiply the weights, after renormalizing.
    #[config(default = 1.0)]
    pub scale: f64,
    /// Multiplicative noise on logits while training.
    #[config(default = 0.0)]
    pub jitter: f64,
    /// Limit on tokens per expert over the group of ranks.
    pub expert_capacity: Option<ExpertCapacity>,
    /// What happens between up and down.
    #[config(default = "Activation::SiluGlu")]
    pub activation: Activation,
    /// Where the routing weight is applied.
    #[config(default = "WeightAt::Activation")]
    pub weight_at: WeightAt,
    /// Experts have biases.
    #[config(default = false)]
    pub expert_bias: bool,
    /// An expert that every token visits.
    pub shared: Option<SharedConfig>,
    /// Auxiliary losses.
    #[config(default = "AuxConfig::default()")]
    pub aux: AuxConfig,
    /// Keep received rows only and recompute pre-activations in backward.
    #[config(default = false)]
    pub recompute: bool,
    /// In which form tokens travel to the routed experts.
    #[config(default = "Payload::Plain")]
    pub payload: Payload,
    /// Values that the weights start from; biases start from zero. The default is that of burn's `Linear`.
    #[config(default = "Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }")]
    pub initializer: Initializer,
}

impl From<&ExpertParallelMoEConfig> for MoeConfig {
    fn from(c: &ExpertParallelMoEConfig) -> Self {
        MoeConfig {
            hidden: c.hidden,
            intermediate: c.intermediate,
            router: RouterConfig {
                num_experts: c.num_experts,
                top_k: c.top_k,
                score: c.score,
                logit_bias: c.logit_bias,
                selection_bias: c.selection_bias,
                groups: c.groups,
                renorm: c.renorm,
                scale: c.scale,
                jitter: c.jitter,
                expert_capacity: c.expert_capacity,
            },
            activation: c.activation,
            weight_at: c.weight_at,
            expert_bias: c.expert_bias,
            shared: c.shared,
            aux: c.aux,
            recompute: c.recompute,
            payload: c.payload,
        }
    }
}

impl From<&MoeConfig> for ExpertParallelMoEConfig {
    fn from(c: &MoeConfig) -> Self {
        Self::new(c.hidden, c.intermediate, c.router.num_experts, c.router.top_k)
            .with_score(c.router.score)
            .with_logit_bias(c.router.logit_bias)
            .with_selection_bias(c.router.selection_bias)
            .with_groups(c.router.groups)
            .with_renorm(c.router.renorm)
            .with_scale(c.router.scale)
            .with_jitter(c.router.jitter)
            .with_expert_capacity(c.router.expert_capacity)
            .with_activation(c.activation)
            .with_weight_at(c.weight_at)
            .with_expert_bias(c.expert_bias)
            .with_shared(c.shared)
            .with_aux(c.aux)
            .with_recompute(c.recompute)
            .with_payload(c.payload)
    }
}
