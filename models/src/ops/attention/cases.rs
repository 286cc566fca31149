//! Cases of the tests of attention against a matrix of all scores.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::ops::softmax;

use super::super::tests::relative;
use super::*;

/// Key heads of every case.
pub const KEYS: usize = 2;

/// Two sequences, and which keys their queries see.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub queries: usize,
    /// Positions before the first query.
    pub past: usize,
    pub groups: usize,
    pub window: Option<usize>,
    pub chunk: Option<usize>,
    pub sinks: bool,
}

impl Case {
    /// Shapes of queries, keys, values and sinks, of heads of `dim` entries and values of `value`.
    pub fn shapes(&self, dim: usize, value: usize) -> [Vec<usize>; 4] {
        let (heads, positions) = (KEYS * self.groups, self.queries + self.past);
        [vec![2, heads, self.queries, dim], vec![2, KEYS, positions, dim], vec![2, KEYS, positions, value], vec![heads]]
    }

    /// Options over these sinks, if the case has any.
    pub fn options<'a>(&self, sinks: &'a Var, scale: f64, masks: &'a MaskCache) -> AttentionOptions<'a> {
        let Self { past, window, chunk, .. } = *self;
        let sinks = self.sinks.then(|| sinks.as_tensor());
        AttentionOptions { first: past, window, chunk, sinks, scale, masks }
    }

    /// Compares gradients of queries, keys, values and sinks, which have none where the case has no sinks.
    pub fn same_gradients(
        &self,
        (found, vars): (&GradStore, [&Var; 4]),
        (expected, exact): (&GradStore, [&Var; 4]),
        tolerance: f64,
    ) -> Result<()> {
        for (name, (var, exact)) in ["q", "k", "v", "sinks"].into_iter().zip(vars.into_iter().zip(exact)) {
            let (Some(found), Some(expected)) = (found.get(var), expected.get(exact)) else {
                let neither = found.get(var).is_none() && expected.get(exact).is_none();
                assert!(neither && name == "sinks" && !self.sinks, "no gradient of {name} of {self:?}");
                continue;
            };
            assert_eq!((found.dims(), found.dtype()), (var.dims(), var.dtype()), "gradient of {name} of {self:?}");
            let error = relative(found, expected)?;
            assert!(error <= tolerance, "gradient of {name} of {self:?}: {error:e} over {tolerance:e}");
        }
        Ok(())
    }
}

/// With every score at once.
pub fn dense([q, k, v]: [&Tensor; 3], options: &AttentionOptions<'_>) -> Result<Tensor> {
    let (b, heads, s, _) = q.dims4()?;
    let (_, keys, n, _) = k.dims4()?;
    let groups = heads / keys;
    let spread = |t: &Tensor| t.unsqueeze(2)?.repeat((1, 1, groups, 1, 1))?.reshape((b, heads, n, t.dim(3)?));
    let scores = (q.matmul(&spread(k)?.transpose(2, 3)?.contiguous()?)? * options.scale)?;
    let first_key = options.first + s - n;
    let mut mask = Vec::new();
    for query in options.first..options.first + s {
        let sees = |key: usize| {
            key <= query
                && options.window.is_none_or(|window| query - key < window)
                && options.chunk.is_none_or(|chunk| query / chunk == key / chunk)
        };
        mask.extend((first_key..first_key + n).map(|key| if sees(key) { 0.0 } else { f64::NEG_INFINITY }));
    }
    let mask = Tensor::from_vec(mask, (s, n), q.device())?.to_dtype(q.dtype())?;
    let scores = scores.broadcast_add(&mask)?;
    let scores = match options.sinks {
        Some(sinks) => Tensor::cat(&[scores, sinks.reshape((1, heads, 1, 1))?.broadcast_as((b, heads, s, 1))?], 3)?,
        None => scores,
    };
    let p = softmax(&scores, D::Minus1)?.narrow(3, 0, n)?.contiguous()?;
    p.matmul(&spread(v)?)?.transpose(1, 2)
}
