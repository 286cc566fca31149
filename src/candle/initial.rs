//! Variables that are shards: those that there are, or new ones with the initial values of their place.

use bytemuck::Zeroable;
use candle_core::{DType, Device, Result, Tensor, Var, WithDType};
use candle_nn::VarBuilder;
use candle_nn::init::{Init, NormalOrUniform};

use rayon::prelude::*;

use crate::etp::{Distribution, Shards, initial_values};
use crate::host_memory::zeroed;

const CALL: &str = "ExpertParallelMoE";

/// A rank's shard of a weight whose variable a builder has, or makes.
pub(super) struct ShardInit<'a> {
    /// Its name in the builder.
    pub(super) name: &'a str,
    /// The same behind the builder's path.
    pub(super) full_name: String,
    /// Sizes of the whole weight, or of this rank's experts'.
    pub(super) dims: &'a [usize],
    /// Their cut, and whose shard it is.
    pub(super) cut: Shards,
    pub(super) rank: usize,
    /// Sizes of the variable: those of the shard, or of the weight where it is whole.
    pub(super) shape: Vec<usize>,
    /// Elements of other ranks' experts before this rank's.
    pub(super) before: usize,
    pub(super) init: Init,
    pub(super) dtype: DType,
    pub(super) seed: u64,
}

impl ShardInit<'_> {
    /// The builder's tensor. One that it has to make, and that candle would draw from a generator without a seed, gets
    /// values by its place in the whole weight.
    pub(super) fn tensor(self, vb: &VarBuilder<'_>) -> Result<Tensor> {
        let there = vb.contains_tensor(self.name);
        let t = vb.get_with_hints_dtype(self.shape.clone(), self.name, self.init, self.dtype)?;
        if !there {
            self.redraw(&t)?;
        }
        Ok(t)
    }

    /// Gives a variable values by its place in the whole weight.
    pub(super) fn redraw(&self, t: &Tensor) -> Result<()> {
        match distribution(self.init, self.dims) {
            Some(of) if t.is_variable() => Var::from_tensor(t)?.set(&self.draw(of, t)?),
            _ => Ok(()),
        }
    }

    fn draw(&self, of: Distribution, like: &Tensor) -> Result<Tensor> {
        let t = match self.dtype {
            DType::F64 => self.draw_as(of, like, |value| value)?,
            _ => self.draw_as(of, like, |value| value as f32)?,
        };
        t.to_dtype(like.dtype())?.to_device(like.device())
    }

    /// The values on the host, drawn on all cores, with zeros behind them where a shard is padded.
    fn draw_as<T: WithDType + Zeroable + Send>(
        &self,
        of: Distribution,
        like: &Tensor,
        convert: impl Fn(f64) -> T + Sync,
    ) -> Result<Tensor> {
        const CHUNK: usize = 1 << 16;
        let ([_, width], rows) = (self.cut.shard_dims(), self.cut.rows_of(self.rank));
        let (first, drawn) = (self.before + rows.start * width, rows.len() * width);
        let mut all = zeroed::<T>(CALL, self.name, like.elem_count())?;
        all[..drawn].par_chunks_mut(CHUNK).enumerate().for_each(|(number, chunk)| {
            let at = first + number * CHUNK;
            let values = initial_values(self.seed, &self.full_name, of, at..at + chunk.len());
            chunk.iter_mut().zip(values).for_each(|(to, value)| *to = convert(value));
        });
        Tensor::from_vec(all, like.dims(), &Device::Cpu)
    }
}

/// Uniform in ±1/√fan-in: as candle-nn initializes a linear layer's bias, and experts their weights.
pub(super) fn uniform(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A weight's name behind a builder's path.
pub(super) fn full_name(vb: &VarBuilder<'_>, name: &str) -> String {
    let prefix = vb.prefix();
    if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") }
}

/// The distribution that candle draws a weight of these sizes from; none of constants.
fn distribution(init: Init, dims: &[usize]) -> Option<Distribution> {
    let between = |low, high| Some(Distribution::Uniform { low, high });
    match init {
        Init::Const(_) => None,
        Init::Uniform { lo, up } => between(lo, up),
        Init::Randn { mean, stdev } => Some(Distribution::Normal { mean, deviation: stdev }),
        Init::Kaiming { dist, fan, non_linearity } => {
            let deviation = non_linearity.gain() / (fan.for_shape(&dims.into()) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => between(-3f64.sqrt() * deviation, 3f64.sqrt() * deviation),
                NormalOrUniform::Normal => Some(Distribution::Normal { mean: 0.0, deviation }),
            }
        }
    }
}
