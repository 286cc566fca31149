//! What the models of tests with sharded weights have around their layer: embedding, linear layer, output layer.

use burn::module::Param;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Int, Tensor, TensorData};
use moebius::burn::MoeBackend;

use super::support::*;

pub const VOCABULARY: usize = 20;

/// A parameter of known values, as a module's initializer would make it.
pub fn param<Bk: MoeBackend, const D: usize>(seed: u64, dims: [usize; D]) -> Param<Tensor<Bk, D>> {
    Param::from_tensor(tensor(values(seed, dims.iter().product(), 0.5), dims))
}

/// Ids of a rank's tokens, of which it has one at least.
pub fn ids<Bk: MoeBackend>(rank: usize, step: usize) -> Tensor<Bk, 2, Int> {
    let count = 2 + rank;
    let ids: Vec<i64> = (0..count).map(|t| ((7 * t + 5 * rank + 3 * step) % VOCABULARY) as i64).collect();
    Tensor::from_data(TensorData::new(ids, [1, count]), &here::<Bk>())
}

/// Modules around a layer, of known weights.
pub struct Around<Bk: MoeBackend> {
    pub embed: Embedding<Bk>,
    pub proj: Linear<Bk>,
    pub head: Linear<Bk>,
}

impl<Bk: MoeBackend> Around<Bk> {
    pub fn new() -> Self {
        let device = here::<Bk>();
        let mut embed: Embedding<Bk> = EmbeddingConfig::new(VOCABULARY, H).init(&device);
        embed.weight = param(1, [VOCABULARY, H]);
        let mut proj: Linear<Bk> = LinearConfig::new(H, H).init(&device);
        (proj.weight, proj.bias) = (param(2, [H, H]), Some(param(3, [H])));
        let mut head: Linear<Bk> = LinearConfig::new(H, VOCABULARY).with_bias(false).init(&device);
        head.weight = param(5, [H, VOCABULARY]);
        Self { embed, proj, head }
    }
}
