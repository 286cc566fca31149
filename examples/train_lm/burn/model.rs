//! The language model as burn modules.

use burn::module::{Module, Param as BurnParam};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moebius::burn::{DeviceGroup, ExpertParallelMoE, ExpertParallelMoEConfig, MoeBackend};
use moebius::metrics::Load;

use crate::Failure;
use crate::lm::{Settings, VOCABULARY};
use crate::ranks::moe_config;

/// A decoder of pre-norm attention and expert layers over bytes, with learned positions. Parameters' paths are their
/// names.
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    embedding: BurnParam<Tensor<B, 2>>,
    positions: BurnParam<Tensor<B, 2>>,
    pub layers: Vec<DecoderLayer<B>>,
    norm: BurnParam<Tensor<B, 1>>,
    head: BurnParam<Tensor<B, 2>>,
}

#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    attention_norm: BurnParam<Tensor<B, 1>>,
    qkv: BurnParam<Tensor<B, 2>>,
    out: BurnParam<Tensor<B, 2>>,
    moe_norm: BurnParam<Tensor<B, 1>>,
    pub moe: ExpertParallelMoE<B>,
}

/// Loss of some sequences, and how they were routed.
pub struct Loss<B: Backend> {
    /// Sum over positions of the cross-entropy of the next byte.
    pub sum: Tensor<B, 1>,
    /// Sum over layers of the auxiliary losses.
    pub aux: Tensor<B, 1>,
    pub load: Vec<moebius::Lazy<Load>>,
    /// Choices `[T, K]` by layer.
    pub ids: Vec<Tensor<B, 2, Int>>,
    /// The layers' tokens `[T, H]`.
    pub tokens: Vec<Tensor<B, 2>>,
}

impl<B: MoeBackend> Model<B> {
    /// A model of zeros, but for what the layers start from.
    pub fn new(settings: &Settings, group: &DeviceGroup, device: &B::Device) -> Result<Self, Failure> {
        let h = settings.hidden;
        let matrix = |rows, columns| BurnParam::from_tensor(Tensor::zeros([rows, columns], device));
        let vector = || BurnParam::from_tensor(Tensor::zeros([h], device));
        let config = ExpertParallelMoEConfig::from(&moe_config(settings));
        let layer = |number| -> Result<_, Failure> {
            Ok(DecoderLayer {
                attention_norm: vector(),
                qkv: matrix(3 * h, h),
                out: matrix(h, h),
                moe_norm: vector(),
                moe: config.clone().with_number(Some(number as u32)).init_on(group, device)?,
            })
        };
        Ok(Self {
            embedding: matrix(VOCABULARY, h),
            positions: matrix(settings.context, h),
            layers: (0..settings.layers).map(layer).collect::<Result<_, _>>()?,
            norm: vector(),
            head: matrix(VOCABULARY, h),
        })
    }

    /// Of `rows` sequences of context + 1 bytes.
    pub fn loss(&self, settings: &Settings, bytes: &[u8], rows: usize) -> Result<Loss<B>, Failure> {
        let (s, h, device) = (settings.context, settings.hidden, self.embedding.device());
        let ids: Vec<i32> = bytes.iter().map(|b| i32::from(*b)).collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, s + 1]), &device);
        let input = ids.clone().slice([0..rows, 0..s]).reshape([rows * s]);
        let next = ids.slice([0..rows, 1..s + 1]).reshape([rows * s, 1]);
        let x = self.embedding.val().select(0, input).reshape([rows, s, h]);
        let mut x = (x + self.positions.val().unsqueeze::<3>()).reshape([rows * s, h]);
        let mut aux = Tensor::zeros([1], &device);
        let (mut load, mut ids, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        let dtype = dtype(settings.layer_dtype);
        for layer in &self.layers {
            x = x.clone() + layer.attention(settings, x, rows);
            let normed = norm(x.clone(), &layer.moe_norm);
            let out = layer.moe.forward_full(normed.clone().cast(dtype), None)?;
            x = x + out.y.cast(DType::F32);
            aux = aux + out.aux;
            load.push(out.load);
            ids.push(out.ids);
            tokens.push(normed);
        }
        let logits = norm(x, &self.norm).matmul(self.head.val().transpose());
        let sum = log_softmax(logits, 1).gather(1, next).sum().neg();
        Ok(Loss { sum, aux, load, ids, tokens })
    }
}

impl<B: Backend> DecoderLayer<B> {
    fn attention(&self, settings: &Settings, x: Tensor<B, 2>, rows: usize) -> Tensor<B, 2> {
        let (s, h, heads) = (settings.context, settings.hidden, settings.heads);
        let qkv = norm(x, &self.attention_norm).matmul(self.qkv.val().transpose());
        let qkv = qkv.reshape([rows, s, 3, heads, h / heads]).permute([2, 0, 3, 1, 4]);
        let part = |i: usize| {
            qkv.clone().slice([i..i + 1, 0..rows, 0..heads, 0..s, 0..h / heads]).reshape([rows, heads, s, h / heads])
        };
        let scores = part(0).matmul(part(1).transpose()).mul_scalar(((h / heads) as f32).powf(-0.5));
        // True where it masks: above the diagonal.
        let above = Tensor::<B, 2, burn::tensor::Bool>::tril_mask([s, s], 0, &scores.device());
        let p = softmax(scores.mask_fill(above.unsqueeze::<4>().expand([rows, heads, s, s]), f32::NEG_INFINITY), 3);
        p.matmul(part(2)).swap_dims(1, 2).reshape([rows * s, h]).matmul(self.out.val().transpose())
    }
}

fn norm<B: Backend>(x: Tensor<B, 2>, weight: &BurnParam<Tensor<B, 1>>) -> Tensor<B, 2> {
    let mean = x.clone().powi_scalar(2).mean_dim(1);
    x / (mean + 1e-6).sqrt() * weight.val().unsqueeze::<2>()
}

/// burn's name of a type.
pub fn dtype(of: candle_core::DType) -> DType {
    match of {
        candle_core::DType::BF16 => DType::BF16,
        candle_core::DType::F16 => DType::F16,
        _ => DType::F32,
    }
}
