//! Configuration of a layer: sizes, routing formula, activation. Plain values, checked once by [`MoeConfig::validate`].

mod build;
mod field_values;
mod fingerprint;

use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, U32Deserializer};
use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::quant::{MX_BLOCK, NVFP4_BLOCK, fp8_block_scale_dims};
use crate::tensor::Shape;

pub(crate) use field_values::FieldValues;
pub use fingerprint::Fingerprint;

/// A Mixture-of-Experts block, independent of ranks, device and framework.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MoeConfig {
    /// Hidden size H of a token.
    pub hidden: usize,
    /// Inner size I of a routed expert.
    pub intermediate: usize,
    /// Routing.
    pub router: RouterConfig,
    /// Activation between up and down.
    pub activation: Activation,
    /// Where the routing weight is applied.
    pub weight_at: WeightAt,
    /// Experts have biases (`up_bias [E, G·I]`, `down_bias [E, H]`).
    pub expert_bias: bool,
    /// An expert that every token visits.
    pub shared: Option<SharedConfig>,
    /// Auxiliary losses added to the training loss by the caller.
    pub aux: AuxConfig,
    /// Keep received rows only and recompute pre-activations in backward.
    pub recompute: bool,
    /// In which form tokens travel to the routed experts. Quantized, each row by itself, they are brought back where
    /// they arrive, and the experts multiply what their codes stand for, on one rank as on many. Router and shared
    /// expert read the tokens as they are; outputs and gradients travel as they are too, so the gradient passes as if
    /// nothing had been rounded, and the experts' own is that of the rows they have read.
    #[serde(default)]
    pub payload: Payload,
}

impl MoeConfig {
    /// A silu-GLU block with softmax routing, renormalized over the top-k, without biases or shared expert.
    pub fn new(hidden: usize, intermediate: usize, num_experts: usize, top_k: usize) -> Self {
        Self {
            hidden,
            intermediate,
            router: RouterConfig::new(num_experts, top_k),
            activation: Activation::SiluGlu,
            weight_at: WeightAt::Activation,
            expert_bias: false,
            shared: None,
            aux: AuxConfig::default(),
            recompute: false,
            payload: Payload::Plain,
        }
    }

    /// Rows G·I of the up projection.
    pub fn up_rows(&self) -> usize {
        self.activation.gate_factor().saturating_mul(self.intermediate)
    }

    /// Checks every field against the others.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, its bound and its value.
    pub fn validate(&self) -> Result<()> {
        const CALL: &str = "MoeConfig::validate";
        let width = |name: &str, v: usize| match v {
            1..=MAX_WIDTH => Ok(()),
            _ => Err(Error::invalid(CALL, name, format!("1..={MAX_WIDTH}"), v)),
        };
        width("hidden", self.hidden)?;
        width("intermediate", self.intermediate)?;
        if let Some(shared) = &self.shared {
            width("shared.intermediate", shared.intermediate)?;
        }
        if let Activation::ClampedGlu { alpha, limit } = self.activation
            && !(alpha.is_finite() && limit.is_finite() && limit > 0.0)
        {
            return Err(Error::invalid(
                CALL,
                "activation",
                "finite alpha and positive limit",
                format!("{alpha}, {limit}"),
            ));
        }
        if self.payload != Payload::Plain && !self.hidden.is_multiple_of(PAYLOAD_COLUMNS) {
            let expected = format!("a multiple of {PAYLOAD_COLUMNS} (payload {:?})", self.payload);
            return Err(Error::invalid(CALL, "hidden", expected, self.hidden));
        }
        self.router.validate()?;
        let largest = [self.router.num_experts, self.up_rows(), self.hidden];
        if Shape::new(&largest).is_err() {
            let name = "num_experts, intermediate, hidden";
            return Err(Error::invalid(CALL, name, "experts.up to fit the address space", format!("{largest:?}")));
        }
        self.aux.validate()
    }
}

/// In which form rows travel between ranks: tokens to experts ([`MoeConfig::payload`]), or shards of a weight
/// ([`WeightSpec::payload`](crate::etp::WeightSpec::payload)). NVFP4 and MXFP8 have recipe `te` of `docs/quantization.md`;
/// all are rounded to nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Payload {
    /// As they are.
    #[default]
    Plain,
    /// In NVFP4, blocks of 1×16, 0.5625 bytes an element; tokens with an amax a row.
    Nvfp4,
    /// In MXFP8, blocks of 1×32, scales rounded up, 1.03125 bytes an element.
    Mxfp8,
    /// In fp8 blocks of 1×128 with an f32 scale each, as DeepSeek-V3 and DeepEP send tokens, 1.03125 bytes an element;
    /// [`QuantizeFp8Block`](crate::quant::QuantizeFp8Block) has scales and codes. A last block of a row may be short.
    Fp8Block,
}

/// Rows that travel quantized are whole blocks (fp8 blocks: but for the last), and codes that are whole words of 16 bytes.
const PAYLOAD_COLUMNS: usize = 32;
/// Bytes of a row's amax.
const AMAX: usize = size_of::<f32>();

impl Payload {
    /// The number by which ranks compare it.
    pub(crate) fn number(self) -> u64 {
        self as u64
    }

    /// The payload of a [number](Self::number), if there is one. Deserialized, as serde numbers every variant in the order
    /// of the enum: there is no list to keep.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        let number: U32Deserializer<ValueError> = u32::try_from(number).ok()?.into_deserializer();
        Self::deserialize(number).ok()
    }

    /// Bytes that a token of `hidden` elements takes on its way to an expert's rank, of codes and of scales (NVFP4:
    /// with the row's amax), each filled up to 16; `None`: as many as its elements have.
    pub fn row_bytes(self, hidden: usize) -> Option<[usize; 2]> {
        let words = |bytes: usize| bytes.div_ceil(16).saturating_mul(16);
        match self {
            Payload::Plain => None,
            Payload::Nvfp4 => Some([words(hidden / 2), words(hidden / NVFP4_BLOCK + AMAX)]),
            Payload::Mxfp8 => Some([words(hidden), words(hidden / MX_BLOCK)]),
            Payload::Fp8Block => Some([words(hidden), words(fp8_block_scale_dims([1, hidden])[1])]),
        }
    }

    /// Whether it has a form for elements of this type.
    pub(crate) fn takes(self, dtype: DType) -> bool {
        match self {
            Payload::Plain => true,
            Payload::Nvfp4 | Payload::Mxfp8 | Payload::Fp8Block => {
                matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
            }
        }
    }
}

/// How logits become expert ids and weights. One pipeline, each step optional:
/// score → bias → group limit → top-k → renormalize → scale. Sources and formulas: `docs/routing.md`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RouterConfig {
    /// Number of experts E over all ranks.
    pub num_experts: usize,
    /// Experts per token K.
    pub top_k: usize,
    /// Scores from logits.
    pub score: Score,
    /// Logits have a learned bias (`router_bias [E]`).
    pub logit_bias: bool,
    /// Scores get a bias for choosing only (`selection_bias [E]`; no gradient).
    pub selection_bias: bool,
    /// Choose among the best groups of experts only.
    pub groups: Option<GroupLimit>,
    /// Divide the chosen weights by their norm.
    pub renorm: Option<Renorm>,
    /// Multiply the weights, after renormalizing.
    pub scale: f64,
    /// Multiplicative noise on logits while training: l·(1 + ε(2r − 1)), ε here; 0 for none.
    pub jitter: f64,
    /// Limit on tokens per expert over the group of ranks.
    pub expert_capacity: Option<ExpertCapacity>,
}

impl RouterConfig {
    /// Softmax over all experts, top-k, renormalized (Mixtral's).
    pub fn new(num_experts: usize, top_k: usize) -> Self {
        Self {
            num_experts,
            top_k,
            score: Score::Softmax,
            logit_bias: false,
            selection_bias: false,
            groups: None,
            renorm: Some(Renorm { p: 1.0, epsilon: 0.0, floor: 0.0 }),
            scale: 1.0,
            jitter: 0.0,
            expert_capacity: None,
        }
    }

    /// Checks every field against the others.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, its bound and its value.
    pub fn validate(&self) -> Result<()> {
        const CALL: &str = "RouterConfig::validate";
        let (e, k) = (self.num_experts, self.top_k);
        if e == 0 || e > MAX_EXPERTS {
            return Err(Error::invalid(CALL, "num_experts", format!("1..={MAX_EXPERTS}"), e));
        }
        if k == 0 || k > e {
            return Err(Error::invalid(CALL, "top_k", format!("1..={e} (num_experts)"), k));
        }
        if let Some(g) = &self.groups {
            if g.groups == 0 || !e.is_multiple_of(g.groups) {
                return Err(Error::invalid(CALL, "groups.groups", format!("a divisor of num_experts = {e}"), g.groups));
            }
            if g.keep == 0 || g.keep > g.groups {
                return Err(Error::invalid(CALL, "groups.keep", format!("1..={}", g.groups), g.keep));
            }
            if g.keep * (e / g.groups) < k {
                return Err(Error::invalid(CALL, "groups.keep", format!("enough groups for top_k = {k}"), g.keep));
            }
        }
        if let Score::SparseMixer { epsilon } = self.score {
            if k != 2 {
                return Err(Error::invalid(CALL, "top_k", "2 (sparsemixer)", k));
            }
            if self.selection_bias || self.groups.is_some() {
                let found = format!("selection_bias {}, groups {:?}", self.selection_bias, self.groups);
                return Err(Error::invalid(CALL, "score", "neither selection_bias nor groups (sparsemixer)", found));
            }
            if !(epsilon.is_finite() && epsilon >= 0.0) {
                return Err(Error::invalid(CALL, "score.epsilon", "a finite number >= 0", epsilon));
            }
        }
        if let Some(n) = &self.renorm
            && !(n.p > 0.0 && n.epsilon >= 0.0 && n.floor >= 0.0 && (n.p + n.epsilon + n.floor).is_finite())
        {
            return Err(Error::invalid(CALL, "renorm", "finite p > 0, epsilon >= 0, floor >= 0", format!("{n:?}")));
        }
        if !(self.scale as f32).is_finite() {
            return Err(Error::invalid(CALL, "scale", "a finite number in f32", self.scale));
        }
        if !(0.0..1.0).contains(&self.jitter) {
            return Err(Error::invalid(CALL, "jitter", "0 <= jitter < 1", self.jitter));
        }
        if let Some(c) = &self.expert_capacity
            && !(c.factor.is_finite() && c.factor > 0.0)
        {
            return Err(Error::invalid(CALL, "expert_capacity.factor", "a finite number > 0", c.factor));
        }
        Ok(())
    }
}

/// Upper bound on experts: far above any published model, low enough that E² work cannot stall a reader of
/// untrusted configurations.
pub const MAX_EXPERTS: usize = 1 << 16;

/// Upper bound on hidden and inner sizes: far above any published model, and no product of two of them overflows.
pub const MAX_WIDTH: usize = 1 << 24;

/// Scores from logits, in the accumulator type (`f32`; `f64` for `f64` tokens).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Score {
    /// Softmax over all experts; weights are the chosen scores (Mixtral, Qwen, OLMoE, DeepSeek-V2).
    Softmax,
    /// Sigmoid of each logit; weights are the chosen scores, without the selection bias (DeepSeek-V3, MiniMax-M2).
    Sigmoid,
    /// Choose by logit, weights are the softmax over the chosen logits (Granite, gpt-oss).
    TopkSoftmax,
    /// Choose by logit, weights are the sigmoid of the chosen logits (Llama-4).
    TopkSigmoid,
    /// PhiMoE's SparseMixer at evaluation, top-2 (arXiv 2409.12136).
    SparseMixer {
        /// `router_jitter_noise`: logits further than 2·epsilon (relative) below the maximum are masked.
        epsilon: f64,
    },
}

/// Restricts the choice to the best groups of experts (DeepSeek).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GroupLimit {
    /// Number of equal groups.
    pub groups: usize,
    /// Groups kept per token.
    pub keep: usize,
    /// How a group is ranked.
    pub rank_by: GroupScore,
}

/// How a group of experts is ranked, from the scores with selection bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GroupScore {
    /// Its largest score; experts of other groups count as score 0 (DeepSeek-V2).
    Max,
    /// The sum of its two largest; experts of other groups cannot be chosen (DeepSeek-V3).
    Top2Sum,
}

/// Divides the chosen weights by `max((Σ wᵖ)^(1/p) + epsilon, floor)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Renorm {
    /// Power of the norm: 1 but in DBRX.
    pub p: f64,
    /// Added to the norm.
    pub epsilon: f64,
    /// Least divisor (Ernie's `moe_norm_min`).
    pub floor: f64,
}

/// At most `C = ceil(factor · T · K / E)` tokens an expert, T over all ranks; the rest are dropped
/// (id −1, weight 0, kept weights unchanged unless `renormalize`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ExpertCapacity {
    /// Capacity factor f.
    pub factor: f64,
    /// Who is kept.
    pub order: CapacityOrder,
    /// Scale a token's kept weights so that their sum stays what it was before dropping.
    pub renormalize: bool,
}

impl ExpertCapacity {
    /// Choices that each of E experts keeps, C = ceil(f·T·K / E); T·K counts dropped choices too.
    pub fn limit(&self, choices: usize, num_experts: usize) -> usize {
        (self.factor * choices as f64 / num_experts as f64).ceil() as usize
    }
}

/// Who is kept where an expert has too many candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CapacityOrder {
    /// First come by (source rank, token, k).
    Position,
    /// Largest weight first, ties by position.
    Probability,
}

/// Activation between the up and down projections. G is the number of rows of up per inner unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Activation {
    /// silu(gate)·up (G = 2).
    SiluGlu,
    /// gelu(gate)·up with the tanh approximation (G = 2).
    GeluGlu,
    /// gpt-oss: g = min(gate, limit), u = clamp(up, ±limit), (u + 1)·g·sigmoid(alpha·g) (G = 2).
    ClampedGlu {
        /// Slope of the sigmoid (1.702).
        alpha: f64,
        /// Clamp (7).
        limit: f64,
    },
    /// relu(up)², no gate (G = 1; Nemotron-H).
    Relu2,
}

impl Activation {
    /// 2 with a gate, 1 without.
    pub const fn gate_factor(self) -> usize {
        match self {
            Activation::Relu2 => 1,
            _ => 2,
        }
    }
}

/// Where the routing weight w meets the expert f(x) = down(act(up(x))).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WeightAt {
    /// down(w·act(up x)): fused into up's epilogue; a down bias is weighted too.
    Activation,
    /// w·down(act(up x)): fused into down's epilogue.
    Output,
    /// down(act(up(w·x))): fused into up's epilogue before its bias (Llama-4).
    Input,
}

/// An expert that every token visits, added to the routed output. Same activation as the routed experts'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedConfig {
    /// Its inner size.
    pub intermediate: usize,
    /// Its output is multiplied by sigmoid(x·`shared_gate`) (Qwen2-MoE).
    pub gated: bool,
    /// Its two matrices have biases (Ernie 4.5's and DeepSeek-V2's `use_bias` and `mlp_bias`).
    #[serde(default)]
    pub bias: bool,
}

/// Auxiliary losses. Values are returned beside the output; the caller adds them to the loss.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuxConfig {
    /// Load-balancing loss (Switch Transformer, arXiv 2101.03961): coefficient, 0 for none.
    pub balance: f64,
    /// Which load-balancing loss.
    pub balance_kind: BalanceKind,
    /// z-loss (ST-MoE, arXiv 2202.08906): coefficient, 0 for none.
    pub z: f64,
    /// Sums over all ranks (one more collective in forward; refused beside
    /// [`GroupConfig::patience`](crate::ep::GroupConfig::patience)), or each rank's own.
    pub over_ranks: bool,
}

impl AuxConfig {
    /// True where no auxiliary loss is asked for.
    pub fn is_off(&self) -> bool {
        self.balance == 0.0 && self.z == 0.0
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field, its bound and its value.
    pub fn validate(&self) -> Result<()> {
        const CALL: &str = "AuxConfig::validate";
        for (name, v) in [("aux.balance", self.balance), ("aux.z", self.z)] {
            if !v.is_finite() {
                return Err(Error::invalid(CALL, name, "a finite number", v));
            }
        }
        if self.balance_kind == (BalanceKind::Sequence { length: 0 }) {
            return Err(Error::invalid(CALL, "aux.balance_kind.length", "at least 1", 0));
        }
        Ok(())
    }
}

/// Forms of the load-balancing loss `coefficient · E · Σ_e f_e·P_e`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BalanceKind {
    /// f_e = choices of e / (T·K) (GShard, Switch).
    #[default]
    Switch,
    /// f_e = choices of e / T, top-k by softmax (Hugging Face transformers).
    HuggingFace,
    /// `Switch` over each sequence of `length` tokens, averaged (DeepSeek-V2, V3). A last, shorter sequence
    /// counts as one.
    Sequence {
        /// Tokens per sequence.
        length: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_payload_has_a_number_that_gives_it() {
        let all: Vec<Payload> = (0..).map_while(Payload::of_number).collect();
        assert!(all.starts_with(&[Payload::Plain, Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block]));
        for (number, payload) in all.iter().enumerate() {
            assert_eq!(payload.number(), number as u64, "{payload:?}");
        }
        assert_eq!(Payload::of_number(u64::MAX), None);
    }
}
