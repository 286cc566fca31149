//! Frequencies against their closed forms, and what configurations refuse.

use std::f64::consts::TAU;

use serde_json::json;

use super::*;
use crate::error::Error;
use crate::testing::{difference, random};

const DIM: usize = 8;
const THETA: f64 = 100.0;

fn rotary(parameters: serde_json::Value) -> Result<Rotary> {
    let parameters: RopeParameters = serde_json::from_value(parameters).expect("parameters");
    let original = parameters.original_max_position_embeddings;
    let config = RotaryConfig { parameters, dim: DIM, theta: THETA, max_positions: 64, original };
    Rotary::new(&ConfigFile("config.json".into()), config)
}

fn inverse(parameters: serde_json::Value, len: usize) -> Vec<f64> {
    let frequencies = rotary(parameters).expect("a rotary embedding").frequencies(len);
    frequencies.inverse.into_iter().map(f64::from).collect()
}

#[track_caller]
fn near(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found}, expected {expected}");
    }
}

/// `100^(-2i/8)`.
fn plain() -> [f64; 4] {
    [0, 1, 2, 3].map(|i| 10f64.powf(-0.5 * f64::from(i)))
}

#[test]
fn frequencies_are_the_closed_forms() {
    near(&inverse(json!({}), 1), &plain());
    near(&inverse(json!({"type": "linear", "factor": 4.0}), 1), &plain().map(|f| f / 4.0));
    // Without a band between, a pair is either kept or divided: turns over 64 positions are 10.2, 3.2, 1.02, 0.32.
    let step = json!({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0,
        "original_max_position_embeddings": 64});
    near(&inverse(step, 1), &[plain()[0], plain()[1], plain()[2] / 4.0, plain()[3] / 4.0]);
    // Below the original length nothing changes; at twice of it theta grows by (2·2 − 1)^(8/6).
    let dynamic = json!({"rope_type": "dynamic", "factor": 2.0});
    near(&inverse(dynamic.clone(), 64), &plain());
    let grown = THETA * 3f64.powf(8.0 / 6.0);
    near(&inverse(dynamic, 128), &[0, 1, 2, 3].map(|i| grown.powf(-f64::from(i) / 4.0)));
    let alpha = json!({"rope_type": "dynamic", "alpha": 5.0, "factor": 1.0});
    let grown = THETA * 5f64.powf(8.0 / 6.0);
    near(&inverse(alpha, 128), &[0, 1, 2, 3].map(|i| grown.powf(-f64::from(i) / 4.0)));
    let long = json!({"rope_type": "longrope", "original_max_position_embeddings": 32,
        "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 2.0, 2.0, 2.0]});
    near(&inverse(long.clone(), 32), &[0, 1, 2, 3].map(|i| plain()[i] / (i + 1) as f64));
    near(&inverse(long.clone(), 33), &plain().map(|f| f / 2.0));
    // √(1 + ln 2 / ln 32) = √1.2.
    let scale = rotary(long).expect("a rotary embedding").frequencies(1).scale;
    assert!((scale - 1.2f64.sqrt()).abs() < 1e-12);
}

/// Other factors of cosines and sines beyond the original length, the same frequencies.
#[test]
fn phi_changes_the_factor_alone() {
    let phi = |parameters: serde_json::Value| {
        let parameters: RopeParameters = serde_json::from_value(parameters).expect("parameters");
        let original = parameters.original_max_position_embeddings;
        let config = RotaryConfig { parameters, dim: DIM, theta: THETA, max_positions: 64, original };
        Rotary::phimoe(&ConfigFile("config.json".into()), config).expect("a rotary embedding")
    };
    let long = json!({"rope_type": "longrope", "original_max_position_embeddings": 32, "short_mscale": 1.5,
        "long_mscale": 2.5, "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 2.0, 2.0, 2.0]});
    let linear = json!({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 32,
        "short_mscale": 1.5, "long_mscale": 2.5});
    for parameters in [long, linear] {
        let rotary = phi(parameters.clone());
        let [short, beyond] = [32, 33].map(|len| rotary.frequencies(len));
        assert_eq!((short.scale, beyond.scale), (1.5, 2.5), "{parameters}");
        assert_eq!(short.inverse, beyond.inverse, "{parameters}");
        assert!(rotary.depends_on_length());
    }
    assert!(!phi(json!({"short_mscale": 1.5, "long_mscale": 2.5})).depends_on_length());
}

/// Fast pairs stay, slow ones are divided by the factor, and between them frequencies fall.
#[test]
fn bands_end_where_they_should() {
    for parameters in [
        json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
            "beta_slow": 0.5}),
        json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
            "low_freq_factor": 0.5, "high_freq_factor": 4.0}),
    ] {
        let found = inverse(parameters, 1);
        // Turns over 64 positions: 10.2, 3.2, 1.02, 0.32.
        near(&[found[0], found[3]], &[plain()[0], plain()[3] / 8.0]);
        for i in [1, 2] {
            assert!(found[i] > plain()[i] / 8.0 && found[i] <= plain()[i], "{found:?}");
        }
    }
    let llama = json!({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 0.5, "high_freq_factor": 4.0});
    let kept = (64.0 * plain()[1] / TAU - 0.5) / 3.5;
    near(&inverse(llama, 1)[1..2], &[plain()[1] * (kept + (1.0 - kept) / 8.0)]);
}

#[test]
fn contexts_are_as_long_as_the_scaling_says() {
    let context = |parameters| rotary(parameters).expect("a rotary embedding").context();
    assert_eq!(context(json!({})), 64);
    assert_eq!(context(json!({"rope_type": "linear", "factor": 4.0})), 256);
    assert_eq!(context(json!({"rope_type": "dynamic", "factor": 2.0})), 128);
    // The configuration's own length has the factor in it.
    assert_eq!(context(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16})), 64);
}

#[test]
fn what_is_missing_is_named() {
    for (parameters, field) in [
        (json!({"rope_type": "linear"}), "rope_parameters.factor"),
        (json!({"rope_type": "linear", "factor": 0.0}), "rope_parameters.factor"),
        (json!({"rope_type": "llama3", "factor": 8.0}), "rope_parameters.low_freq_factor"),
        (json!({"rope_type": "longrope", "short_factor": [1.0]}), "rope_parameters.short_factor"),
        (json!({"rope_type": "spiral"}), "rope_parameters.rope_type"),
    ] {
        let error = rotary(parameters).expect_err("a refusal");
        assert!(matches!(error, Error::Config { field: found, .. } if found == field), "{error:?}");
    }
}

/// Interleaved pairs are halves of permuted entries, and entries beyond the rotated ones stay.
#[test]
fn pairs_of_neighbors_are_halves_in_another_order() {
    let rotary = rotary(json!({})).expect("a rotary embedding");
    let angles = |rotary: &Rotary| rotary.angles(5..8, DType::F64, &Device::Cpu).expect("angles");
    let x = random(1, &[2, 3, 3, DIM + 4]);
    let y = angles(&rotary.clone().interleaved()).apply(&x).expect("a rotation");
    let order: Vec<u32> = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11].to_vec();
    let order = Tensor::new(order, &Device::Cpu).expect("an order");
    let permuted = |t: &Tensor| t.contiguous().and_then(|t| t.index_select(&order, 3)).expect("a permutation");
    let halves = angles(&rotary).apply(&permuted(&x)).expect("a rotation");
    assert!(difference(&permuted(&y), &halves) < 1e-15);
    let (rest, same) = (y.narrow(3, DIM, 4).expect("rest"), x.narrow(3, DIM, 4).expect("rest"));
    assert!(difference(&rest, &same) == 0.0 && difference(&y, &x) > 0.1);
}
