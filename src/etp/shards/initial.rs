//! Initial values of weights that are shards. An element is drawn by seed, the weight's name and its place in the whole
//! weight, so that every rank that holds it has the same, at any number of ranks.

use std::ops::Range;

use crate::fnv1a::fnv1a;
use crate::quant::philox::{key, philox4x32};

/// The distribution that elements are drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Distribution {
    /// Between two bounds.
    Uniform {
        /// The lower one.
        low: f64,
        /// The upper one.
        high: f64,
    },
    /// Gaussian.
    Normal {
        /// Its mean.
        mean: f64,
        /// Its standard deviation.
        deviation: f64,
    },
}

/// Elements of a weight of that name, counted in row-major order of the whole.
pub(crate) fn initial_values(
    seed: u64,
    name: &str,
    of: Distribution,
    elements: Range<usize>,
) -> impl Iterator<Item = f64> {
    let (key, name) = (key(seed), fnv1a(name));
    elements.map(move |element| {
        let element = element as u64;
        let counter = [element as u32, (element >> 32) as u32, name as u32, (name >> 32) as u32];
        let [a, b, c, d] = philox4x32(counter, key);
        let (one, other) = (unit(a, b), unit(c, d));
        match of {
            Distribution::Uniform { low, high } => low + (high - low) * one,
            // Box and Muller's transform.
            Distribution::Normal { mean, deviation } => {
                mean + deviation * (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * other).cos()
            }
        }
    })
}

/// Strictly between 0 and 1, of 52 random bits.
fn unit(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 12;
    (bits as f64 + 0.5) / (1u64 << 52) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFORM: Distribution = Distribution::Uniform { low: -2.0, high: 3.0 };
    const NORMAL: Distribution = Distribution::Normal { mean: 1.0, deviation: 2.0 };

    /// Parts are parts of the whole; another seed, another name and another place have other values.
    #[test]
    fn values_are_of_seed_name_and_place() {
        let draw =
            |seed, name: &str, range: Range<usize>| initial_values(seed, name, NORMAL, range).collect::<Vec<_>>();
        let whole = draw(7, "w", 0..100);
        assert_eq!([draw(7, "w", 0..33), draw(7, "w", 33..100)].concat(), whole);
        for other in [draw(8, "w", 0..100), draw(7, "v", 0..100), draw(7, "w", 100..200)] {
            assert!(other.iter().zip(&whole).all(|(a, b)| a != b));
        }
    }

    /// Means and deviations within five standard errors: of n values with deviation s, s/√n of the mean, and of the mean
    /// square √(m₄ − s⁴)/√n, where m₄ is s⁴·9/5 of a uniform and 3·s⁴ of a normal distribution.
    #[test]
    fn moments() {
        let n = 40_000;
        for (of, mean, deviation, fourth) in [(UNIFORM, 0.5, 5.0 / 12f64.sqrt(), 1.8), (NORMAL, 1.0, 2.0, 3.0)] {
            let values: Vec<f64> = initial_values(1, "w", of, 0..n).collect();
            let found = values.iter().sum::<f64>() / n as f64;
            let square = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
            let (root, variance) = ((n as f64).sqrt(), deviation * deviation);
            assert!((found - mean).abs() < 5.0 * deviation / root, "{of:?}: mean {found}");
            assert!((square - variance).abs() < 5.0 * variance * (fourth - 1f64).sqrt() / root, "{of:?}: {square}");
            if of == UNIFORM {
                assert!(values.iter().all(|v| (-2.0..3.0).contains(v)));
            }
        }
    }
}
