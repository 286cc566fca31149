//! Against the core's own results, bit for bit, and what is kept for backward.

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module};
use burn::tensor::{DType, Tensor, TensorData};
use moebius::MoeConfig;
use moebius::burn::{ExpertParallelMoE, ExpertParallelMoEConfig};
use moebius::checkpoint::BlockParams;
use moebius::config::Payload;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode};

use super::support::*;
use crate::trials::tests;

fn results_are_the_cores_bit_for_bit() {
    let config = config();
    for dtype in [moebius::DType::F32, moebius::DType::BF16, moebius::DType::F16, moebius::DType::F64] {
        as_the_core(&config, dtype);
    }
}

fn tokens_that_are_sent_quantized_are_the_cores() {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        let mut wide = config().with_payload(payload);
        wide.hidden = 32;
        for dtype in [moebius::DType::F32, moebius::DType::BF16] {
            as_the_core(&wide, dtype);
        }
        let narrow = ExpertParallelMoEConfig::new(config().with_payload(payload)).init_on::<B>(&single(), &device());
        let error = narrow.err().map(|e| e.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains("hidden") && e.contains("multiple of 32")), "{error:?}");
    }
}

fn as_the_core(config: &MoeConfig, dtype: moebius::DType) {
    let h = config.hidden;
    on_ranks(2, LONG, |rank, group| {
        let cast = |t: CoreTensor| cast(&t, dtype);
        let mut given = block(config, rank, 2);
        given.params = cast_params(given.params, &cast);
        let mut kept = block(config, rank, 2);
        kept.params = cast_params(kept.params, &cast);
        let (t, (x, c)) = (token_counts()[rank], inputs_of(rank, h));
        let (x, c) = (cast(CoreTensor::from_vec(x, &[t, h]).unwrap()), cast(CoreTensor::from_vec(c, &[t, h]).unwrap()));

        let layer = Layer::new(config.clone(), 3).unwrap();
        let views = kept.params.views().unwrap();
        let params = views.params();
        let mode = Mode { backward: true, noise: None };
        let (core, core_grads) = {
            let mut group = group.lock();
            let mut out = layer.forward(&mut group, mode, x.view(), &params).unwrap();
            let inputs = Inputs { x: x.view(), params: &params };
            let cotangents = Cotangents { y: Some(c.view()), aux: 1.0 };
            let context = out.context.take().unwrap();
            let grads = layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL).unwrap();
            (out, grads)
        };

        let model = ExpertParallelMoE::<B>::from_block(given, 3, &group, &device()).unwrap();
        let leaf = |t: &CoreTensor| burn_tensor::<2>(t);
        let bx = leaf(&x).require_grad();
        let out = model.forward_full(bx.clone(), None).unwrap();
        assert_eq!(out.y.to_data().as_bytes(), core.y.as_bytes());
        assert_eq!(out.logits.into_data().as_bytes(), core.routing.logits.as_bytes());
        assert_eq!(out.weights.into_data().as_bytes(), core.routing.weights.as_bytes());
        assert_eq!(out.ids.into_data().as_bytes(), core.routing.ids.as_bytes());
        assert_eq!(out.load.get().unwrap(), core.routing.load.get().unwrap());
        let accumulator = if dtype == moebius::DType::F64 { DType::F64 } else { DType::F32 };
        assert_eq!(out.aux.dtype(), accumulator);
        // The aux loss is f32 beside bf16 tokens: the user's loss is too.
        let loss = (out.y.cast(accumulator) * leaf(&c).cast(accumulator)).sum() + out.aux.clone();
        let aux = floats(out.aux.clone());
        let gradients = loss.backward();
        assert!(out.losses.known().is_none(), "neither forward nor backward has read them");
        assert_eq!(out.losses.get().unwrap(), core.aux.get().unwrap());
        assert_eq!(aux[0].to_bits(), (core.aux.get().unwrap().total() as f32).to_bits());
        assert_eq!(bx.grad(&gradients).unwrap().into_data().as_bytes(), core_grads.x.as_ref().unwrap().as_bytes());
        let up = model.experts.up.grad(&gradients).unwrap().into_data();
        assert_eq!(up.as_bytes(), core_grads.up.as_ref().unwrap().as_bytes());
        let router = model.router.weight.grad(&gradients).unwrap().into_data();
        assert_eq!(router.as_bytes(), core_grads.router.as_ref().unwrap().as_bytes());
        let gate = model.shared.unwrap().gate.unwrap().grad(&gradients).unwrap().into_data();
        assert_eq!(gate.as_bytes(), core_grads.shared_gate.as_ref().unwrap().as_bytes());
    });
}

fn cast(t: &CoreTensor, dtype: moebius::DType) -> CoreTensor {
    let (v, dims) = (t.as_slice::<f32>().unwrap(), t.dims());
    match dtype {
        moebius::DType::F32 => CoreTensor::from_vec(v.to_vec(), dims),
        moebius::DType::F64 => CoreTensor::from_vec(v.iter().map(|&v| f64::from(v)).collect(), dims),
        moebius::DType::F16 => CoreTensor::from_vec(v.iter().map(|&v| half::f16::from_f32(v)).collect(), dims),
        _ => CoreTensor::from_vec(v.iter().map(|&v| half::bf16::from_f32(v)).collect(), dims),
    }
    .unwrap()
}

fn cast_params(p: BlockParams, f: &impl Fn(CoreTensor) -> CoreTensor) -> BlockParams {
    BlockParams::new(p.into_per_param().map(|_, tensor| tensor.map(f))).unwrap()
}

fn burn_tensor<const D: usize>(t: &CoreTensor) -> Tensor<B, D> {
    let dtype = match t.dtype() {
        moebius::DType::F64 => DType::F64,
        moebius::DType::F16 => DType::F16,
        moebius::DType::BF16 => DType::BF16,
        _ => DType::F32,
    };
    let data = TensorData::from_bytes_vec(t.as_bytes().to_vec(), t.dims().to_vec(), dtype);
    Tensor::from_data(data, (&device(), dtype))
}

pub fn leading_dimensions_and_strides<S: Subject>() {
    let config = config();
    let group = S::alone();
    let model = module::<S>(&config, &group);
    let x = tensor::<S, 2>(values(1, 6 * H, 1.0), [6, H]);
    let y = floats(model.forward(x.clone()).unwrap());
    let cube = model.forward(x.clone().reshape([2, 3, H])).unwrap();
    assert_eq!(cube.dims(), [2, 3, H]);
    assert_eq!(floats(cube), y);
    // The same values under other strides, and as the middle of a larger tensor.
    let transposed = tensor::<S, 2>(floats(x.clone().transpose()), [H, 6]).transpose();
    assert_eq!(floats(model.forward(transposed).unwrap()), y);
    let wide = Tensor::cat(vec![x.clone(), x.clone(), x.clone()], 0);
    assert_eq!(floats(model.forward(wide.narrow(0, 6, 6)).unwrap()), y);
    no_tokens(&model, [0, H]);
}

/// y has the dimensions of x where there is no token.
fn no_tokens<S: Subject, const D: usize>(model: &ExpertParallelMoE<S>, dims: [usize; D]) {
    // Not `zeros`: burn's CUDA back end launches its fill over no block, which the driver refuses.
    let nothing = Tensor::<S, D>::empty(dims, &here::<S>());
    assert_eq!(model.forward(nothing).unwrap().dims(), dims);
}

fn any_leading_dimensions_and_strides() {
    leading_dimensions_and_strides::<Flex>();
    // burn's CUDA back end reshapes rows of nothing by a launch over no block too.
    let model = module::<Flex>(&config(), Flex::alone());
    no_tokens(&model, [0, 3, H]);
    no_tokens(&model, [2, 0, H]);
}

pub fn strided_gradient<S: Subject>() {
    let config = config();
    let group = S::alone();
    let model = module::<Autodiff<S>>(&config, &group);
    let run = |transpose: bool| {
        let x = tensor::<Autodiff<S>, 2>(values(1, 6 * H, 1.0), [6, H]).require_grad();
        let y = model.forward(x.clone()).unwrap();
        let c = tensor::<Autodiff<S>, 2>(values(2, 6 * H, 1.0), [6, H]);
        let loss = if transpose { (y.transpose() * c.transpose()).sum() } else { (y * c).sum() };
        floats(x.grad(&loss.backward()).unwrap())
    };
    assert_eq!(run(true), run(false));
}

fn a_gradient_that_is_not_contiguous_is_read_right() {
    strided_gradient::<Flex>();
}

pub fn recomputed_input<S: Subject>() {
    fn run<S: Subject, C: CheckpointStrategy>(config: &MoeConfig) -> Vec<f32> {
        let model = module::<Autodiff<S, C>>(config, S::alone());
        let leaf = tensor::<Autodiff<S, C>, 2>(values(1, 6 * H, 1.0), [6, H]).require_grad();
        // Memory-bound operations, which burn recomputes under this strategy.
        let x = leaf.clone().mul_scalar(2.0).add_scalar(0.5);
        let y = model.forward(x.clone()).unwrap() + x;
        floats(leaf.grad(&y.powi_scalar(2).sum().backward()).unwrap())
    }
    let config = config();
    let plain = run::<S, NoCheckpointing>(&config);
    assert_eq!(run::<S, BalancedCheckpointing>(&config), plain);
}

fn recomputed_input_gives_the_same_gradients() {
    recomputed_input::<Flex>();
}

fn nothing_is_kept_where_nothing_tracks() {
    let config = config();
    let group = single();
    // Whatever keeps x shares its memory.
    let shared_after = |model: &ExpertParallelMoE<B>| {
        let x = tensor::<B, 2>(values(1, 6 * H, 1.0), [6, H]);
        let y = model.forward(x.clone()).unwrap();
        let unique = x.into_primitive().tensor().primitive.is_unique();
        drop(y);
        !unique
    };
    let tracking = module::<B>(&config, &group);
    assert!(shared_after(&tracking), "a tracking layer keeps x");
    let frozen = tracking.clone().no_grad();
    assert!(!shared_after(&frozen), "a layer of constants keeps nothing");

    let valid = tracking.valid();
    let x = tensor::<Flex, 2>(values(1, 6 * H, 1.0), [6, H]);
    let y = valid.forward(x.clone()).unwrap();
    let tracked = tracking.forward(Tensor::from_inner(x)).unwrap();
    assert_eq!(floats(tracked), floats(y), "with and without autodiff, the same bits");
}

tests! {
    fn();
    results_are_the_cores_bit_for_bit,
    tokens_that_are_sent_quantized_are_the_cores,
    any_leading_dimensions_and_strides,
    a_gradient_that_is_not_contiguous_is_read_right,
    recomputed_input_gives_the_same_gradients,
    nothing_is_kept_where_nothing_tracks,
}
