//! How far two tensors are apart.

use candle_core::{DType, Result, Tensor, bail};

/// Distance of a tensor from its reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Difference {
    /// Largest |a − b|.
    pub max_abs: f64,
    /// ‖a − b‖ / ‖b‖; for b = 0: 0 if a = 0, else infinite.
    pub relative: f64,
}

impl Difference {
    /// Exactly equal.
    pub const NONE: Self = Self { max_abs: 0.0, relative: 0.0 };

    /// True at or under the tolerance; false where a NaN is involved.
    pub fn within(&self, tolerance: f64) -> bool {
        self.relative <= tolerance && self.max_abs.is_finite()
    }

    /// The larger of each error; NaN wins.
    pub fn worst(self, other: Self) -> Self {
        let max = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
        Self { max_abs: max(self.max_abs, other.max_abs), relative: max(self.relative, other.relative) }
    }
}

/// Distance of `found` from `reference`, computed in f64.
///
/// # Errors
/// Different shapes.
pub fn difference(found: &Tensor, reference: &Tensor) -> Result<Difference> {
    if found.dims() != reference.dims() {
        bail!("shapes differ: found {:?}, reference {:?}", found.dims(), reference.dims());
    }
    Ok(difference_of(&values(found)?, &values(reference)?))
}

/// [`difference`] of plain values.
pub fn difference_of(found: &[f64], reference: &[f64]) -> Difference {
    let (mut max_abs, mut error, mut norm) = (0.0f64, 0.0f64, 0.0f64);
    for (a, b) in found.iter().zip(reference) {
        let d = (a - b).abs();
        // `f64::max` would lose a NaN.
        max_abs = if d.is_nan() || d > max_abs { d } else { max_abs };
        error += d * d;
        norm += b * b;
    }
    let relative = match (norm, error) {
        (0.0, 0.0) => 0.0,
        (0.0, _) => f64::INFINITY,
        _ => (error / norm).sqrt(),
    };
    Difference { max_abs, relative }
}

/// All elements as f64, row-major.
pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.detach().to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}
