//! Variables that are shards: those that there are, or new ones with the initial values of their place.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use candle_nn::init::{Init, NormalOrUniform};

use crate::etp::{Distribution, Shards, initial_values};

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
        match distribution(self.init, self.dims) {
            Some(of) if !there && t.is_variable() => Var::from_tensor(&t)?.set(&self.draw(of, &t)?)?,
            _ => {}
        }
        Ok(t)
    }

    fn draw(&self, of: Distribution, like: &Tensor) -> Result<Tensor> {
        let ([_, width], rows) = (self.cut.shard_dims(), self.cut.rows_of(self.rank));
        let elements = self.before + rows.start * width..self.before + rows.end * width;
        let values = initial_values(self.seed, &self.full_name, of, elements);
        let (count, dims) = (like.elem_count(), like.dims());
        let padded = values.chain(std::iter::repeat(0.0)).take(count);
        let t = match self.dtype {
            DType::F64 => Tensor::from_vec(padded.collect::<Vec<f64>>(), dims, &Device::Cpu)?,
            _ => Tensor::from_vec(padded.map(|v| v as f32).collect::<Vec<f32>>(), dims, &Device::Cpu)?,
        };
        t.to_dtype(like.dtype())?.to_device(like.device())
    }
}

/// A weight's name behind a builder's path.
pub(super) fn full_name(vb: &VarBuilder<'_>, name: &str) -> String {
    let prefix = vb.prefix();
    if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") }
}

/// The distribution that candle draws a weight of these sizes from; none of constants.
fn distribution(init: Init, dims: &[usize]) -> Option<Distribution> {
    let uniform = |low, high| Some(Distribution::Uniform { low, high });
    match init {
        Init::Const(_) => None,
        Init::Uniform { lo, up } => uniform(lo, up),
        Init::Randn { mean, stdev } => Some(Distribution::Normal { mean, deviation: stdev }),
        Init::Kaiming { dist, fan, non_linearity } => {
            let deviation = non_linearity.gain() / (fan.for_shape(&dims.into()) as f64).sqrt();
            match dist {
                NormalOrUniform::Uniform => uniform(-3f64.sqrt() * deviation, 3f64.sqrt() * deviation),
                NormalOrUniform::Normal => Some(Distribution::Normal { mean: 0.0, deviation }),
            }
        }
    }
}
