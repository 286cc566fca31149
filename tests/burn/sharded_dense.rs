//! A model whose dense weights are shards beside the same model of whole ones: whole training steps.

use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, Param, ParamId};
use burn::nn::{Embedding, Linear, RmsNorm, RmsNormConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Int, Tensor};
use moebius::Error;
use moebius::MoeConfig;
use moebius::burn::{
    ExpertParallelMoE, MoeBackend, ReduceOptions, ShardHolder, ShardedDense, ShardedParams, reduce_gradients_over,
};
use moebius::config::Payload;
use moebius::cpu::Cpu;
use moebius::etp::{EtpOptions, Phase, Shards};

use super::sharded::{Mesh, Meshed, Place, on_mesh};
use super::support::*;
use super::token_model::{Around, VOCABULARY, ids, param};
use crate::trials::tests;

const STEPS: usize = 3;

/// Learning rate of the steps where burn's products round their factors.
const RATE: f64 = 5e-3;

/// Where burn's products round their factors, tokens go to every expert: a choice among scores that lie as close as what
/// rounds would go one way with whole weights and another with shards.
fn routed<S: Subject>() -> MoeConfig {
    let mut config = config();
    if S::ROUNDING > 0.0 {
        config.router.top_k = E;
    }
    config
}

#[derive(Module, Debug)]
struct Whole<B: MoeBackend> {
    embed: Embedding<B>,
    proj: Linear<B>,
    norm: Option<RmsNorm<B>>,
    moe: ExpertParallelMoE<B>,
    head: Linear<B>,
}

#[derive(Module, Debug)]
struct Sharded<B: MoeBackend> {
    embed: ShardedDense<B>,
    proj: ShardedDense<B>,
    norm: Option<ShardedDense<B>>,
    moe: ExpertParallelMoE<B>,
    head: ShardedDense<B>,
}

impl<Bk: MoeBackend> Whole<Bk> {
    fn new<S: Meshed>(place: &Place<S>, norm: bool) -> Self {
        let device = here::<Bk>();
        let Around { embed, proj, head } = Around::new();
        let norm = norm.then(|| {
            let mut norm: RmsNorm<Bk> = RmsNormConfig::new(H).init(&device);
            norm.gamma = param(4, [H]);
            norm
        });
        Self { embed, proj, norm, moe: module(&routed::<S>(), &place.group), head }
    }

    fn sharded(self, shards: &ShardedParams<Bk::Native>) -> moebius::Result<Sharded<Bk>> {
        Ok(Sharded {
            embed: shards.embedding("embed", self.embed)?,
            proj: shards.linear("proj", self.proj)?,
            norm: self.norm.map(|norm| shards.rms_norm("norm", norm)).transpose()?,
            moe: self.moe.into_sharded(shards, Payload::Plain)?,
            head: shards.linear("head", self.head)?,
        })
    }

    fn loss(&self, ids: Tensor<Bk, 2, Int>) -> Tensor<Bk, 1> {
        let x = self.embed.forward(ids);
        let x = self.proj.forward(x.clone()) + x;
        let x = self.norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
        let out = self.moe.forward_full(x, None).unwrap();
        self.head.forward(out.y).powi_scalar(2).sum() + out.aux
    }
}

impl<Bk: MoeBackend> Sharded<Bk> {
    fn holders(&self) -> Vec<&dyn ShardHolder<Backend = Bk>> {
        let norm = self.norm.iter().map(|norm| norm as _);
        let rest: [&dyn ShardHolder<Backend = Bk>; 4] = [&self.embed, &self.proj, &self.moe, &self.head];
        rest.into_iter().chain(norm).collect()
    }

    fn loss(&self, ids: Tensor<Bk, 2, Int>) -> moebius::Result<Tensor<Bk, 1>> {
        let x = self.embed.embed(ids)?;
        let x = self.proj.forward(x.clone())? + x;
        let x = match &self.norm {
            Some(norm) => norm.forward(x)?,
            None => x,
        };
        let out = self.moe.forward_full(x, None)?;
        Ok(self.head.forward(out.y)?.powi_scalar(2).sum() + out.aux)
    }

    /// In the order of whole weights.
    fn shards(&self) -> impl Iterator<Item = &Param<Tensor<Bk, 3>>> {
        let before = [&self.embed, &self.proj].into_iter().flat_map(|dense| &dense.shards);
        let behind = [Some(&self.head), self.norm.as_ref()].into_iter().flatten().flat_map(|dense| &dense.shards);
        before.chain([&self.moe.experts.up, &self.moe.experts.down]).chain(behind)
    }

    /// Parameters that are this rank's own.
    fn own(&self) -> Vec<ParamId> {
        self.shards().map(|shard| shard.id).chain(self.moe.expert_ids()).collect()
    }
}

/// What a training leaves. Weights, and their gradients, are those of embedding, linear layer (`[output, input]`), its bias,
/// `up`, `down`, output layer (likewise) and norm.
#[derive(Default)]
struct Trained {
    losses: Vec<f32>,
    /// Of each step.
    gradients: Vec<Vec<Vec<f32>>>,
    weights: Vec<Vec<f32>>,
    router: Vec<f32>,
}

/// A step of an optimizer of burn's: a model of its gradients.
type Step<M> = Box<dyn FnMut(M, GradientsParams) -> M>;

/// AdamW, where burn's products are exact to the bit. Where they round their factors a gradient that should be near zero has
/// either sign, and AdamW's step has its sign: there gradients are followed as they are.
fn optimizer<S: Meshed, M: AutodiffModule<Autodiff<S>> + 'static>() -> Step<M> {
    if S::ROUNDING > 0.0 {
        let mut sgd = SgdConfig::new().init();
        Box::new(move |model, gradients| sgd.step(RATE, model, gradients))
    } else {
        let mut adam = AdamWConfig::new().init();
        Box::new(move |model, gradients| adam.step(1e-2, model, gradients))
    }
}

fn gradient<S: Meshed, const D: usize>(all: &GradientsParams, id: ParamId) -> Tensor<S, D> {
    all.get::<S, D>(id).unwrap()
}

fn train_whole<S: Meshed>(place: Place<S>, norm: bool) -> Trained {
    let mut model = Whole::<Autodiff<S>>::new(&place, norm);
    let (mut world, mut trained) = (place.world, Trained::default());
    let device = S::device_of(&world);
    let mut step_of = optimizer::<S, Whole<Autodiff<S>>>();
    for step in 0..STEPS {
        let loss = model.loss(ids(place.rank, step));
        trained.losses.extend(floats(loss.clone()));
        let mut all = GradientsParams::from_grads(loss.backward(), &model);
        reduce_gradients_over(&mut *world, &device, &model, ReduceOptions::except(&[]), &mut all).unwrap();
        let bias = model.proj.bias.as_ref().unwrap().id;
        let mut gradients = vec![
            floats(gradient::<S, 2>(&all, model.embed.weight.id)),
            floats(gradient::<S, 2>(&all, model.proj.weight.id).transpose()),
            floats(gradient::<S, 1>(&all, bias)),
            floats(gradient::<S, 3>(&all, model.moe.experts.up.id)),
            floats(gradient::<S, 3>(&all, model.moe.experts.down.id)),
            floats(gradient::<S, 2>(&all, model.head.weight.id).transpose()),
        ];
        gradients.extend(model.norm.as_ref().map(|norm| floats(gradient::<S, 1>(&all, norm.gamma.id))));
        trained.gradients.push(gradients);
        model = step_of(model, all);
    }
    trained.weights = vec![
        floats(model.embed.weight.val()),
        floats(model.proj.weight.val().transpose()),
        floats(model.proj.bias.unwrap().val()),
        floats(model.moe.experts.up.val()),
        floats(model.moe.experts.down.val()),
        floats(model.head.weight.val().transpose()),
    ];
    trained.weights.extend(model.norm.map(|norm| floats(norm.gamma.val())));
    Trained { router: floats(model.moe.router.weight.val()), ..trained }
}

fn train_sharded<S: Meshed>(place: Place<S>, norm: bool) -> Trained {
    let model = Whole::<Autodiff<S>>::new(&place, norm);
    let Place { rank, shards, mut world, .. } = place;
    let device = S::device_of(&world);
    let mut model = model.sharded(&shards).unwrap();
    let (mut step_of, mut trained) = (optimizer::<S, Sharded<Autodiff<S>>>(), Trained::default());
    for step in 0..STEPS {
        shards.begin(Phase::Forward, model.holders()).unwrap();
        let loss = model.loss(ids(rank, step)).unwrap();
        shards.end().unwrap();
        trained.losses.extend(floats(loss.clone()));
        shards.begin(Phase::Backward, model.holders()).unwrap();
        let all = loss.backward();
        shards.end().unwrap();
        let mut gradients = GradientsParams::from_grads(all, &model);
        let own = model.own();
        reduce_gradients_over(&mut *world, &device, &model, ReduceOptions::except(&own), &mut gradients).unwrap();
        // With all experts on every rank, the ranks of the world hold the same.
        let biases = model.moe.expert_bias_ids();
        reduce_gradients_over(&mut *world, &device, &model, ReduceOptions::only(&biases), &mut gradients).unwrap();
        shards.finish(None, model.holders(), &mut gradients).unwrap();
        let of_shards = model.shards().map(|shard| floats(gradient::<S, 3>(&gradients, shard.id)));
        trained.gradients.push(of_shards.collect());
        model = step_of(model, gradients);
    }
    trained.weights = model.shards().map(|shard| floats(shard.val())).collect();
    Trained { router: floats(model.moe.router.weight.val()), ..trained }
}

/// A rank's shard of a whole weight, a dense one cut into lines.
fn cut(whole: &[f32], dims: &[usize], ranks: usize, rank: usize) -> Vec<f32> {
    let dims = if dims.len() == 3 { dims.to_vec() } else { Shards::lines(dims).to_vec() };
    let whole = CoreTensor::from_vec(whole.to_vec(), &dims).unwrap();
    let shards = Shards::new(&dims, ranks, EtpOptions::default().pad).unwrap();
    shards.cut(&Cpu::new(), whole.view(), rank).unwrap().as_slice::<f32>().unwrap().to_vec()
}

fn sizes() -> Vec<Vec<usize>> {
    vec![vec![VOCABULARY, H], vec![H, H], vec![H], vec![E, 2 * I, H], vec![E, H, I], vec![VOCABULARY, H], vec![H]]
}

fn three_steps_are_those_of_whole_weights() {
    three_steps::<Flex>(&RANKS);
}

/// Three steps leave what they leave of whole weights, to the bit on a CPU; a norm's backward, whose operations are in
/// another order than burn's, leaves it within rounding.
pub fn three_steps<S: Meshed>(ranks: &[usize]) {
    for (ranks, norm) in ranks.iter().flat_map(|ranks| [(*ranks, false), (*ranks, true)]) {
        let mesh = Mesh { world: ranks, ep: 1 };
        let whole = on_mesh::<S, _>(mesh, true, |place| train_whole(place, norm));
        let found = on_mesh::<S, _>(mesh, true, |place| train_sharded(place, norm));
        for (rank, (found, whole)) in found.iter().zip(&whole).enumerate() {
            let at = format!("rank {rank} of {ranks}, norm {norm}");
            assert_eq!(found.weights.len(), 6 + usize::from(norm), "{at}");
            let of_rank = |all: &[Vec<f32>]| -> Vec<_> {
                all.iter().zip(sizes()).map(|(whole, dims)| cut(whole, &dims, ranks, rank)).collect()
            };
            let weights = of_rank(&whole.weights);
            if norm || S::ROUNDING > 0.0 {
                // On a CPU some roundings of f32, and what AdamW's quotients make of them. Where burn chooses among kernels
                // that round factors, a gradient comes of four products of burn's (two layers, forward and backward) of two
                // factors each. A weight is off by less, as all steps change it by less than its own size.
                let tolerance = 1e-4 + 8.0 * S::ROUNDING;
                for (step, (found, whole)) in found.gradients.iter().zip(&whole.gradients).enumerate() {
                    for (weight, (found, whole)) in found.iter().zip(of_rank(whole)).enumerate() {
                        close(&format!("{at}, gradient {weight} of step {step}"), found, &whole, tolerance);
                    }
                }
                for (weight, (found, whole)) in found.weights.iter().zip(&weights).enumerate() {
                    close(&format!("{at}, weight {weight}"), found, whole, tolerance);
                }
                close(&at, &found.losses, &whole.losses, tolerance);
            } else {
                for (found, whole) in found.gradients.iter().zip(&whole.gradients) {
                    assert_eq!(*found, of_rank(whole), "{at}");
                }
                assert_eq!(found.weights, weights, "{at}");
                assert_eq!((&found.losses, &found.router), (&whole.losses, &whole.router), "{at}");
            }
        }
    }
}

fn a_norm_has_the_gradients_of_burns() {
    norm_alone::<Flex>();
}

/// A norm by itself: values of burn's, and gradients within the rounding of their terms. An element of x's gradient is a
/// sum of H + 1 products of factors below 4, one of γ's of one a row, each of a few roundings of 2⁻²⁴; a GPU's roots and
/// quotients are off by a few more.
pub fn norm_alone<S: Meshed>() {
    let tolerance = if S::ROUNDING > 0.0 { 1e-5 } else { 2e-6 };
    on_mesh::<S, _>(Mesh { world: 2, ep: 1 }, true, |place| {
        let (rows, rank) = (3 + place.rank, place.rank as u64);
        let x = || tensor::<Autodiff<S>, 2>(values(20 + rank, rows * H, 1.0), [rows, H]).require_grad();
        let d_y = || tensor::<Autodiff<S>, 2>(values(30 + rank, rows * H, 1.0), [rows, H]);
        let mut own: RmsNorm<Autodiff<S>> = RmsNormConfig::new(H).init(&here::<Autodiff<S>>());
        own.gamma = param(4, [H]);
        let (whole_x, y) = (x(), own.forward(x()));
        let y_of = own.forward(whole_x.clone());
        let expected = (y_of * d_y()).sum().backward();
        let shards = &place.shards;
        let norm = shards.rms_norm("norm", own.clone()).unwrap();
        let found_x = x();
        shards.begin(Phase::Forward, [&norm]).unwrap();
        let found = norm.forward(found_x.clone()).unwrap();
        shards.end().unwrap();
        close("y", &floats(found.clone()), &floats(y), if S::ROUNDING > 0.0 { tolerance } else { 0.0 });
        shards.begin(Phase::Backward, [&norm]).unwrap();
        let all = (found * d_y()).sum().backward();
        shards.end().unwrap();
        close("x", &floats(found_x.grad(&all).unwrap()), &floats(whole_x.grad(&expected).unwrap()), tolerance);
        let mut gradients = GradientsParams::new();
        shards.finish(None, [&norm], &mut gradients).unwrap();
        let own_gamma = floats(own.gamma.grad(&expected).unwrap());
        let summed = gradients.get::<S, 3>(norm.shards[0].id).unwrap();
        (own_gamma, floats(summed))
    })
    .chunks(2)
    .for_each(|ranks| {
        let sum: Vec<f32> = ranks[0].0.iter().zip(&ranks[1].0).map(|(a, b)| a + b).collect();
        for (rank, (_, summed)) in ranks.iter().enumerate() {
            close("gamma", summed, &cut(&sum, &[H], 2, rank), tolerance);
        }
    });
}

/// The two uses of a tied weight as two parameters.
#[derive(Module, Debug)]
struct Untied<B: Backend> {
    embed: Param<Tensor<B, 2>>,
    output: Param<Tensor<B, 2>>,
}

fn a_tied_weight_has_the_sum_of_its_gradients() {
    tied::<Flex>(&RANKS);
}

/// An embedding whose weight is the output layer's too: gathered once for each use, and the sum of both uses' gradients
/// is its shards', over two microbatches.
pub fn tied<S: Meshed>(ranks: &[usize]) {
    for &ranks in ranks {
        on_mesh::<S, _>(Mesh { world: ranks, ep: 1 }, true, |place| {
            let Place { rank, shards, mut world, .. } = place;
            let device = S::device_of(&world);
            let untied = Untied::<Autodiff<S>> { embed: param(1, [VOCABULARY, H]), output: param(1, [VOCABULARY, H]) };
            let tied = shards.embedding("embed", Around::<Autodiff<S>>::new().embed).unwrap();
            let loss = |y: Tensor<Autodiff<S>, 3>| y.powi_scalar(2).sum();
            let mut sum = vec![0.0; VOCABULARY * H];
            for microbatch in 0..2 {
                let x = embedding(untied.embed.val(), ids(rank, microbatch));
                let whole = loss(linear(x, untied.output.val().transpose(), None));
                let mut of_uses = GradientsParams::from_grads(whole.clone().backward(), &untied);
                reduce_gradients_over(&mut *world, &device, &untied, ReduceOptions::default(), &mut of_uses).unwrap();
                shards.begin(Phase::Forward, [&tied]).unwrap();
                let found = loss(tied.tied_output(tied.embed(ids(rank, microbatch)).unwrap()).unwrap());
                shards.end().unwrap();
                close("loss", &floats(found.clone()), &floats(whole), 4.0 * S::ROUNDING);
                shards.begin(Phase::Backward, [&tied]).unwrap();
                found.backward();
                shards.end().unwrap();
                // Each use's gradients are added over the ranks, the output layer's first, and then to those before.
                for id in [untied.output.id, untied.embed.id] {
                    let of_use = floats(of_uses.get::<S, 2>(id).unwrap());
                    sum.iter_mut().zip(of_use).for_each(|(sum, own)| *sum += own);
                }
            }
            let mut gradients = GradientsParams::new();
            shards.finish(None, [&tied], &mut gradients).unwrap();
            let found = floats(gradients.get::<S, 3>(tied.shards[0].id).unwrap());
            let expected = cut(&sum, &[VOCABULARY, H], ranks, rank);
            close(&format!("rank {rank} of {ranks}"), &found, &expected, 8.0 * S::ROUNDING);
        });
    }
}

/// Nothing but an embedding has an output layer that shares its weight; the pass goes on.
fn another_module_has_no_tied_output() {
    on_mesh::<Flex, _>(Mesh { world: 1, ep: 1 }, true, |place| {
        let linear = place.shards.linear("proj", Around::<B>::new().proj).unwrap();
        place.shards.begin(Phase::Forward, [&linear]).unwrap();
        let x = || tensor::<B, 2>(values(20, H, 1.0), [1, H]);
        let error = linear.tied_output(x()).expect_err("a linear layer");
        assert!(matches!(&error, Error::Invalid { expected, .. } if expected == "an embedding"), "{error:?}");
        linear.forward(x()).unwrap();
        place.shards.end().unwrap();
    });
}

fn frozen_first_layers_have_no_backward() {
    frozen_first::<Flex>();
}

/// Frozen layers before the first that is trained have no backward, and the pass ends all the same.
pub fn frozen_first<S: Meshed>() {
    on_mesh::<S, _>(Mesh { world: 2, ep: 1 }, true, |place| {
        let whole = Whole::<Autodiff<S>>::new(&place, true);
        let head = whole.head.clone();
        let mut whole = whole.no_grad();
        whole.head = head;
        let shards = &place.shards;
        let model = whole.sharded(shards).unwrap();
        for step in 0..2 {
            shards.begin(Phase::Forward, model.holders()).unwrap();
            let loss = model.loss(ids(place.rank, step)).unwrap();
            shards.end().unwrap();
            shards.begin(Phase::Backward, model.holders()).unwrap();
            let all = loss.backward();
            shards.end().unwrap();
            let mut gradients = GradientsParams::from_grads(all, &model);
            shards.finish(None, model.holders(), &mut gradients).unwrap();
            assert!(gradients.get::<S, 3>(model.head.shards[0].id).is_some());
            assert_eq!(gradients.len(), 1);
        }
    });
}

tests! {
    fn();
    three_steps_are_those_of_whole_weights,
    a_norm_has_the_gradients_of_burns,
    a_tied_weight_has_the_sum_of_its_gradients,
    another_module_has_no_tied_output,
    frozen_first_layers_have_no_backward,
}
