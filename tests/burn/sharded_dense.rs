//! A model whose dense weights are shards beside the same model of whole ones: whole training steps.

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, Linear, RmsNorm, RmsNormConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
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

/// AdamW's divisor is at least so much. Where burn's products round their factors, it is large against what that makes of
/// a gradient that should be zero, as a step in that direction would be as long as any other.
fn epsilon<S: Subject>() -> f32 {
    if S::ROUNDING > 0.0 { 0.1 } else { 1e-5 }
}

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

    /// Parameters that are this rank's own.
    fn own(&self) -> Vec<ParamId> {
        let dense = [Some(&self.embed), Some(&self.proj), self.norm.as_ref(), Some(&self.head)];
        let dense = dense.into_iter().flatten().flat_map(|dense| dense.shards.iter().map(|shard| shard.id));
        dense.chain(self.moe.expert_ids()).collect()
    }
}

/// Losses, and weights at the end: of embedding, linear layer (`[output, input]`), its bias, `up`, `down`, output layer
/// (likewise) and norm, and of the router.
type Trained = (Vec<f32>, Vec<Vec<f32>>, Vec<f32>);

fn train_whole<S: Meshed>(place: Place<S>, norm: bool) -> Trained {
    let mut model = Whole::<Autodiff<S>>::new(&place, norm);
    let (mut world, mut losses) = (place.world, Vec::new());
    let device = S::device_of(&world);
    let mut adam = AdamWConfig::new().with_epsilon(epsilon::<S>()).init();
    for step in 0..STEPS {
        let loss = model.loss(ids(place.rank, step));
        losses.extend(floats(loss.clone()));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        reduce_gradients_over(&mut *world, &device, &model, ReduceOptions::except(&[]), &mut gradients).unwrap();
        model = adam.step(1e-2, model, gradients);
    }
    let mut weights = vec![
        floats(model.embed.weight.val()),
        floats(model.proj.weight.val().transpose()),
        floats(model.proj.bias.unwrap().val()),
        floats(model.moe.experts.up.val()),
        floats(model.moe.experts.down.val()),
        floats(model.head.weight.val().transpose()),
    ];
    weights.extend(model.norm.map(|norm| floats(norm.gamma.val())));
    (losses, weights, floats(model.moe.router.weight.val()))
}

fn train_sharded<S: Meshed>(place: Place<S>, norm: bool) -> Trained {
    let model = Whole::<Autodiff<S>>::new(&place, norm);
    let Place { rank, shards, mut world, .. } = place;
    let device = S::device_of(&world);
    let mut model = model.sharded(&shards).unwrap();
    let (mut adam, mut losses) = (AdamWConfig::new().with_epsilon(epsilon::<S>()).init(), Vec::new());
    for step in 0..STEPS {
        shards.begin(Phase::Forward, model.holders()).unwrap();
        let loss = model.loss(ids(rank, step)).unwrap();
        shards.end().unwrap();
        losses.extend(floats(loss.clone()));
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
        model = adam.step(1e-2, model, gradients);
    }
    let of =
        |dense: &ShardedDense<Autodiff<S>>| dense.shards.iter().map(|shard| floats(shard.val())).collect::<Vec<_>>();
    let experts = [&model.moe.experts.up, &model.moe.experts.down].map(|shard| floats(shard.val()));
    let mut weights = [of(&model.embed), of(&model.proj), experts.to_vec(), of(&model.head)].concat();
    weights.extend(model.norm.iter().flat_map(of));
    (losses, weights, floats(model.moe.router.weight.val()))
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

/// Three steps of burn's AdamW leave what they leave of whole weights, to the bit on a CPU; a norm's backward, whose
/// operations are in another order than burn's, leaves it within rounding.
pub fn three_steps<S: Meshed>(ranks: &[usize]) {
    for (ranks, norm) in ranks.iter().flat_map(|ranks| [(*ranks, false), (*ranks, true)]) {
        let mesh = Mesh { world: ranks, ep: 1 };
        let whole = on_mesh::<S, _>(mesh, true, |place| train_whole(place, norm));
        let found = on_mesh::<S, _>(mesh, true, |place| train_sharded(place, norm));
        for (rank, (found, whole)) in found.iter().zip(&whole).enumerate() {
            let at = format!("rank {rank} of {ranks}, norm {norm}");
            assert_eq!(found.1.len(), 6 + usize::from(norm), "{at}");
            let pairs = found.1.iter().zip(whole.1.iter().zip(sizes()));
            let pairs = pairs.map(|(found, (whole, dims))| (found, cut(whole, &dims, ranks, rank)));
            if norm || S::ROUNDING > 0.0 {
                // AdamW divides by the root of its second moment: an element's step is at most the rate of 0.01, and
                // differs with the sign of a gradient that is all rounding. Few elements have such. Where burn chooses
                // among kernels that round factors, a step differs by what these do to a gradient, over the divisor: of
                // weights that are 30 times as large and more, less than a rounding.
                let tolerance = 1e-4 + S::ROUNDING;
                pairs.for_each(|(found, whole)| close(&at, found, &whole, tolerance));
                close(&at, &found.0, &whole.0, tolerance + 4.0 * S::ROUNDING);
            } else {
                pairs.for_each(|(found, whole)| assert_eq!(*found, whole, "{at}"));
                assert_eq!((&found.0, &found.2), (&whole.0, &whole.2), "{at}");
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
