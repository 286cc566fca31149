//! Helpers of unit tests.

use candle_core::{Device, Tensor, Var};
use rand::Rng;

#[path = "../tests/support/seed.rs"]
mod seed;

/// Values uniform in ±1, in f64, from a seed of the place.
pub fn random(own: u64, dims: &[usize]) -> Tensor {
    let mut rng = seed::generator(own);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).expect("a tensor")
}

pub fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().and_then(|t| t.to_vec1()).expect("values in f64")
}

/// Largest difference.
pub fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// Compares gradients of `Σ f(inputs)²` with central differences, at some entries of each input. A step h has an error
/// of h² ≈ 1e-10 times third derivatives, and one of 1e-16 / h ≈ 1e-11 of rounding.
pub fn check_gradients(inputs: &[Tensor], f: &dyn Fn(&[Tensor]) -> Tensor) {
    let vars: Vec<Var> = inputs.iter().map(|t| Var::from_tensor(t).expect("a variable")).collect();
    let of = |inputs: &[Tensor]| f(inputs).sqr().and_then(|t| t.sum_all()).expect("a sum");
    let tracked: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let grads = of(&tracked).backward().expect("gradients");
    let step = 1e-5;
    for (index, (input, var)) in inputs.iter().zip(&vars).enumerate() {
        let grad = values(grads.get(var).expect("a gradient"));
        let scale = grad.iter().fold(1.0, |m: f64, g| m.max(g.abs()));
        for entry in (0..input.elem_count()).step_by(input.elem_count().div_ceil(7)) {
            let moved = |by: f64| {
                let mut changed = values(input);
                changed[entry] += by;
                let mut inputs = inputs.to_vec();
                inputs[index] = Tensor::from_vec(changed, input.dims(), &Device::Cpu).expect("a tensor");
                of(&inputs).to_scalar::<f64>().expect("a scalar")
            };
            let expected = (moved(step) - moved(-step)) / (2.0 * step);
            let error = (grad[entry] - expected).abs() / scale;
            assert!(error < 1e-7, "input {index}, entry {entry}: gradient {}, difference {expected}", grad[entry]);
        }
    }
}
