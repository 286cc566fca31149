//! candle-transformers' decoder of the same shape, with random weights that are drawn as it asks for them.

use candle_core::{D, DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use candle_transformers::models::qwen3_moe;

use crate::shape::Sizes;

/// Most tokens that its fused kernels take in a call: they sort the choices in 48 KiB of shared memory.
const FUSED_MOST: usize = 1024;

/// What this build of candle-transformers does with its experts.
pub const NAME: &str = if cfg!(feature = "fused") { "candle-transformers, fused" } else { "candle-transformers" };

/// Draws a weight whenever it is asked for, so that none is in memory twice.
struct RandomBackend;

impl SimpleBackend for RandomBackend {
    fn get(&self, shape: Shape, _: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match *shape.dims() {
            [n] => Tensor::ones(n, dtype, device),
            [.., fan_in] => Tensor::randn(0f32, (fan_in as f32).powf(-0.5), shape, device)?.to_dtype(dtype),
            [] => Tensor::ones(shape, dtype, device),
        }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name}: a weight without a shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        name.ends_with("weight")
    }
}

/// The decoder, and the tokens that it holds of each sequence.
pub struct Theirs {
    model: qwen3_moe::ModelForCausalLM,
    len: usize,
    next: Tensor,
}

impl Theirs {
    pub fn new(sizes: &Sizes, dtype: DType, device: &Device) -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let config: qwen3_moe::Config = serde_json::from_value(sizes.config(dtype))?;
        let weights = VarBuilder::from_backend(Box::new(RandomBackend), dtype, device.clone());
        let next = Tensor::zeros((1, 1), DType::U32, device)?;
        Ok(Self { model: qwen3_moe::ModelForCausalLM::new(&config, weights)?, len: 0, next })
    }

    /// Forgets what it holds, and continues sequences `[B, S]`, in as few calls as it takes.
    pub fn start(&mut self, ids: &Tensor) -> Result<()> {
        self.model.clear_kv_cache();
        self.len = 0;
        let (sequences, tokens) = ids.dims2()?;
        let most = if cfg!(feature = "fused") { FUSED_MOST } else { 8192 } / sequences;
        for start in (0..tokens).step_by(most.max(1)) {
            let piece = ids.narrow(1, start, most.max(1).min(tokens - start))?.contiguous()?;
            let logits = self.model.forward(&piece, self.len)?;
            self.len += piece.dim(1)?;
            self.next = logits.squeeze(1)?.argmax_keepdim(D::Minus1)?;
        }
        Ok(())
    }

    /// Continues each sequence by its likeliest token.
    pub fn step(&mut self) -> Result<()> {
        let logits = self.model.forward(&self.next, self.len)?;
        self.len += 1;
        self.next = logits.squeeze(1)?.argmax_keepdim(D::Minus1)?;
        Ok(())
    }
}
