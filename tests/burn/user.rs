//! Conduct that a user of burn expects of any module: derives, records, optimizers, accumulation, devices, threads.

use std::thread;

use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams, Optimizer, SgdConfig};
use burn::record::{BinFileRecorder, HalfPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use moebius::burn::{EpGroup, ExpertParallelMoE, LoadAs, MoeBackend};
use moebius::checkpoint::Checkpoint;
use moebius::ep::GroupConfig;
use moebius::layer::{Layer, ParamKind};

use super::support::*;
use crate::goldens::golden_of;
use crate::trials::tests;

/// A user's model: generic over back ends, with layers in a list and one that may be absent.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    first: Linear<B>,
    layers: Vec<ExpertParallelMoE<B>>,
    last: Option<ExpertParallelMoE<B>>,
}

impl<B: MoeBackend> Model<B> {
    /// Its layers share one group.
    fn new(group: &EpGroup) -> Self {
        let config = biased();
        let mut first = LinearConfig::new(H, H).with_bias(false).init(&Default::default());
        first.weight = Param::from_tensor(tensor(values(5, H * H, 0.5), [H, H]));
        Self { first, layers: vec![module(&config, group), module(&config, group)], last: Some(module(&config, group)) }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let mut x = self.first.forward(x);
        let mut aux = Tensor::zeros([1], &x.device());
        for layer in self.layers.iter().chain(&self.last) {
            let out = layer.forward_full(x.clone(), None).unwrap();
            x = out.y + x;
            aux = aux + out.aux;
        }
        x.powi_scalar(2).sum() + aux
    }
}

fn rows(from: usize, count: usize) -> Vec<f32> {
    values(9, 12 * H, 1.0)[from * H..(from + count) * H].to_vec()
}

fn params<Bk: Backend>(model: &ExpertParallelMoE<Bk>) -> Vec<(ParamKind, Vec<f32>)> {
    let params = model.to_block().unwrap().params.into_params();
    params.map(|(kind, t)| (kind, t.as_slice::<f32>().unwrap().to_vec())).collect()
}

fn a_module_among_others() {
    fn anywhere<T: Send + Sync + Clone + 'static>(_: &T) {}
    let model = Model::<B>::new(&single());
    anywhere(&model);
    let layer = &model.layers[0];
    let count = |kind: ParamKind| kind.dims(layer.layer().config(), E).unwrap().iter().product::<usize>();
    let of_layer: usize = ParamKind::ALL.into_iter().map(count).sum();
    assert_eq!(model.num_params(), H * H + 3 * of_layer);
    assert!(format!("{model}").contains("ExpertParallelMoE"), "{model}");
    assert_eq!(model.devices(), [device()]);
    let x = tensor::<B, 2>(rows(0, 12), [12, H]);
    let expected = floats(model.loss(x.clone()));
    assert_eq!(floats(model.clone().to_device(&device()).loss(x.clone())), expected);
    assert_eq!(floats(model.clone().fork(&device()).loss(x.clone())), expected);
    assert_eq!(floats(model.valid().loss(x.clone().inner())), expected);
    assert_eq!(floats(thread::spawn(move || model.loss(x)).join().unwrap()), expected);
}

/// Through evaluation and back, frozen and not, in every part.
fn gradients_are_tracked_where_the_user_says() {
    let model = Model::<B>::new(&single());
    let x = tensor::<B, 2>(rows(0, 12), [12, H]);
    let tracked = |model: &Model<B>| {
        let gradients = GradientsParams::from_grads(model.loss(x.clone()).backward(), model);
        let layer = &model.layers[1];
        [
            gradients.get::<Flex, 2>(layer.router.weight.id).is_some(),
            gradients.get::<Flex, 3>(layer.experts.up.id).is_some(),
            gradients.get::<Flex, 2>(layer.shared.as_ref().unwrap().down.id).is_some(),
            gradients.get::<Flex, 1>(layer.router.selection_bias.as_ref().unwrap().id).is_some(),
        ]
    };
    assert_eq!(tracked(&model), [true, true, true, false]);
    let back = Model::<B>::from_inner(model.valid());
    assert_eq!(tracked(&back), [true, true, true, false]);
    let mut part = model.clone();
    part.layers[1].experts = part.layers[1].experts.clone().no_grad();
    assert_eq!(tracked(&part), [true, false, true, false]);
    part.layers[1].router = part.layers[1].router.clone().no_grad();
    assert_eq!(tracked(&part), [false, false, true, false]);
}

/// An optimizer moves what has a gradient; weight decay too. The selection bias has none, tracked or not.
fn an_optimizer_leaves_the_selection_bias_alone() {
    let config = biased();
    let group = single();
    for track in [false, true] {
        let mut model = module::<B>(&config, &group);
        let bias = model.router.selection_bias.take().unwrap();
        model.router.selection_bias = Some(bias.map(|bias| bias.set_require_grad(track)));
        let before = params(&model);
        let mut adam = AdamWConfig::new().with_weight_decay(0.5).init::<B, ExpertParallelMoE<B>>();
        let out = model.forward_full(tensor::<B, 2>(rows(0, 12), [12, H]), None).unwrap();
        let gradients = GradientsParams::from_grads(out.y.powi_scalar(2).sum().backward(), &model);
        model = adam.step(0.1, model, gradients);
        for ((kind, now), (_, before)) in params(&model).iter().zip(&before) {
            assert_eq!(now == before, *kind == ParamKind::SelectionBias, "{kind:?}, {track}");
        }
        // The load moves it.
        let load = out.load.get().unwrap();
        model.update_selection_bias(load, 0.25).unwrap();
        let mut expected = before[2].1.clone();
        moebius::balance::update_selection_bias(&mut expected, &load.tokens_per_expert, 0.25).unwrap();
        assert_eq!(params(&model)[2], (ParamKind::SelectionBias, expected));
        assert!(!model.router.selection_bias.as_ref().unwrap().is_require_grad());
    }
    let load = moebius::metrics::Load::new(vec![1; E], 0);
    let plain = super::support::config();
    let error = module::<B>(&plain, &group).update_selection_bias(&load, 0.25).unwrap_err();
    assert!(error.to_string().contains("router.selection_bias"), "{error}");
}

/// Of microbatches with a backward each, and of two forwards before one backward.
fn gradients_accumulate() {
    let model = Model::<B>::new(&single());
    // A sum over tokens, so that halves add up; losses over the tokens of one call do not.
    let loss = |from: usize, count: usize| {
        let x = tensor::<B, 2>(rows(from, count), [count, H]);
        model.layers[0].forward(model.first.forward(x)).unwrap().powi_scalar(2).sum()
    };
    let of = |mut gradients: GradientsParams| -> [Vec<f32>; 2] {
        let mut of = |id| floats(gradients.remove::<Flex, 2>(id).unwrap());
        [of(model.first.weight.id), of(model.layers[0].router.weight.id)]
    };
    let grads = |loss: Tensor<B, 1>| GradientsParams::from_grads(loss.backward(), &model);
    let whole = of(grads(loss(0, 12)));
    let mut accumulator = GradientsAccumulator::new();
    accumulator.accumulate(&model, grads(loss(0, 5)));
    accumulator.accumulate(&model, grads(loss(5, 7)));
    let (apart, together) = (of(accumulator.grads()), of(grads(loss(0, 5) + loss(5, 7))));
    for i in 0..2 {
        close("two backwards", &apart[i], &whole[i], BACKWARD);
        close("one backward", &together[i], &whole[i], BACKWARD);
    }
}

/// Several layers under the strategy that recomputes what is cheap: the same bits.
fn a_deep_model_recomputes_to_the_same_bits() {
    fn run<C: CheckpointStrategy>() -> Vec<Vec<f32>> {
        type A<C> = Autodiff<Flex, C>;
        let model = Model::<A<C>>::new(&single());
        let gradients = model.loss(tensor::<A<C>, 2>(rows(0, 12), [12, H])).backward();
        let first = floats(model.first.weight.grad(&gradients).unwrap());
        let layers = model.layers.iter().chain(&model.last);
        layers.flat_map(|l| gradients_of(l, &gradients)).map(|(_, g)| g).chain([first]).collect()
    }
    assert_eq!(run::<BalancedCheckpointing>(), run::<NoCheckpointing>());
}

/// A record written for inference, in half precision, goes into a model that trains on.
fn records_of_inference_and_of_half_precision() {
    let (group, x) = (single(), tensor::<B, 2>(rows(0, 12), [12, H]));
    let model = Model::<B>::new(&group);
    let bytes = NamedMpkBytesRecorder::<burn::record::FullPrecisionSettings>::default();
    let written = bytes.record(model.valid().into_record(), ()).unwrap();
    let mut trained = Model::<B>::new(&group);
    let gradients = GradientsParams::from_grads(trained.loss(x.clone()).backward(), &trained);
    trained = SgdConfig::new().init::<B, Model<B>>().step(1e-3, trained, gradients);
    assert_ne!(floats(trained.loss(x.clone())), floats(model.loss(x.clone())));
    let loaded = trained.load_record(bytes.load(written, &device()).unwrap());
    assert_eq!(floats(loaded.loss(x.clone())), floats(model.loss(x.clone())));
    assert!(loaded.layers[0].experts.up.grad(&loaded.loss(x.clone()).backward()).is_some());

    let folder = tempfile::tempdir().unwrap();
    let recorder = BinFileRecorder::<HalfPrecisionSettings>::default();
    model.clone().save_file(folder.path().join("half"), &recorder).unwrap();
    let half = Model::<Flex>::new(&group).load_file(folder.path().join("half"), &recorder, &device()).unwrap();
    // Weights below 1 in f16: 2⁻¹² each, through three layers.
    close("loss", &floats(half.loss(x.clone().inner())), &floats(model.loss(x)), 1e-2);
}

fn a_cast_module_runs_in_its_type() {
    struct Cast(DType);
    impl<Bk: Backend> burn::module::ModuleMapper<Bk> for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Bk, D>>) -> Param<Tensor<Bk, D>> {
            param.map(|t| t.cast(self.0).detach().require_grad())
        }
    }
    let config = config();
    let model = module::<B>(&config, &single()).map(&mut Cast(DType::BF16));
    let x = tensor::<B, 2>(rows(0, 12), [12, H]);
    let out = model.forward_full(x.clone().cast(DType::BF16), None).unwrap();
    assert_eq!((out.y.dtype(), out.aux.dtype()), (DType::BF16, DType::F32));
    let gradients = (out.y.sum() + out.aux.cast(DType::BF16)).backward();
    let up = model.experts.up.grad(&gradients).unwrap();
    assert_eq!(up.dtype(), DType::BF16);
    let error = model.forward(x).unwrap_err().to_string().to_lowercase();
    assert!(error.contains("bf16") && error.contains("f32"), "{error}");
}

/// Other options for the same parameters, as for evaluation without capacities.
fn another_layer_over_the_same_parameters() {
    let config = config();
    let model = module::<B>(&config, &single());
    let id = model.experts.up.id;
    let mut plain = config;
    plain.aux = Default::default();
    let other = model.with_layer(Layer::new(plain, 3).unwrap());
    assert_eq!(other.experts.up.id, id);
    let out = other.forward_full(tensor::<B, 2>(rows(0, 2), [2, H]), None).unwrap();
    assert_eq!(floats(out.aux), [0.0]);
}

fn a_trained_checkpoint_is_saved_under_its_published_names() {
    fn step<A: AutodiffBackend + MoeBackend>(moe: ExpertParallelMoE<A>, x: Tensor<A, 2>) -> ExpertParallelMoE<A> {
        let gradients = moe.forward(x).unwrap().powi_scalar(2).sum().backward();
        let gradients = GradientsParams::from_grads(gradients, &moe);
        SgdConfig::new().init::<A, ExpertParallelMoE<A>>().step(0.5, moe, gradients)
    }
    let dir = &golden_of("qwen3_moe_bf16");
    let group = EpGroup::single(GroupConfig::new(E, 64)).unwrap();
    let moe = ExpertParallelMoE::<B>::from_checkpoint(
        &Checkpoint::open(dir).unwrap(),
        0,
        &group,
        LoadAs::default(),
        &device(),
    )
    .unwrap();
    let hidden = moe.layer().config().hidden;
    let x = tensor::<B, 2>(values(1, 3 * hidden, 1.0), [3, hidden]).cast(DType::BF16);
    let before = floats(moe.forward(x.clone()).unwrap());
    let moe = step(moe, x.clone());
    let expected = floats(moe.forward(x.clone()).unwrap());
    assert_ne!(before, expected);
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::open(dir).unwrap().save(folder.path(), &[moe.to_block().unwrap().params.at_layer(0)]).unwrap();
    let again = ExpertParallelMoE::<Flex>::from_checkpoint(
        &Checkpoint::open(folder.path()).unwrap(),
        0,
        &group,
        LoadAs::default(),
        &device(),
    )
    .unwrap();
    assert_eq!(again.experts.up.dtype(), DType::BF16);
    assert_eq!(floats(again.forward(x.inner()).unwrap()), expected);
}

/// At its end a backward forgets graphs of the whole process of which no tensor is alive: not one that waits in a
/// forward for its peer.
fn a_graph_outlives_other_threads_backwards_while_its_forward_waits() {
    let config = config();
    let found = on_ranks(2, LONG, |rank, group| {
        let model = module::<B>(&config, &group);
        let leaf = tensor::<B, 2>(inputs(rank).0, [token_counts()[rank], H]).require_grad();
        let x = leaf.clone().mul_scalar(2.0);
        // A first backward takes the leaf out of burn's graph, and leaves `x` alone in it.
        x.clone().sum().backward();
        let x = leaf.clone().mul_scalar(2.0);
        if rank == 1 {
            // Rank 0 is in its forward meanwhile.
            thread::sleep(std::time::Duration::from_millis(300));
            tensor::<B, 1>(vec![1.0], [1]).require_grad().mul_scalar(2.0).backward();
        }
        let gradients = model.forward(x).unwrap().powi_scalar(2).sum().backward();
        leaf.grad(&gradients).map(floats)
    });
    let missing: Vec<_> = (0..2).filter(|&rank| found[rank].is_none()).collect();
    assert!(missing.is_empty(), "ranks without a gradient: {missing:?}");
}

tests! {
    fn();
    a_graph_outlives_other_threads_backwards_while_its_forward_waits,
    a_module_among_others,
    gradients_are_tracked_where_the_user_says,
    an_optimizer_leaves_the_selection_bias_alone,
    gradients_accumulate,
    a_deep_model_recomputes_to_the_same_bits,
    records_of_inference_and_of_half_precision,
    a_cast_module_runs_in_its_type,
    another_layer_over_the_same_parameters,
    a_trained_checkpoint_is_saved_under_its_published_names,
}
