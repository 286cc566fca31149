//! Forward and gradients against a model that runs every expert on every token.

use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use burn::tensor::activation::{sigmoid, silu, softmax};
use moebius::MoeConfig;
use moebius::layer::ParamKind;

use super::support::*;
use crate::trials::tests;

/// The same of a model that runs every expert on every token with burn's operations and shares no code with the
/// crate: one entry per rank, parameter gradients summed over the ranks' losses.
fn dense(config: &MoeConfig, ranks: usize) -> (Vec<Found>, Vec<(&'static str, Vec<f32>)>) {
    let param = |kind| whole(kind, config).unwrap();
    fn leaf<const D: usize>((values, dims): (Vec<f32>, Vec<usize>)) -> Tensor<B, D> {
        tensor(values, dims.try_into().unwrap()).require_grad()
    }
    let (router, router_bias) = (leaf::<2>(param(ParamKind::Router)), leaf::<1>(param(ParamKind::RouterBias)));
    let (up, up_bias) = (leaf::<3>(param(ParamKind::Up)), leaf::<2>(param(ParamKind::UpBias)));
    let (down, down_bias) = (leaf::<3>(param(ParamKind::Down)), leaf::<2>(param(ParamKind::DownBias)));
    let (s_up, s_down) = (leaf::<2>(param(ParamKind::SharedUp)), leaf::<2>(param(ParamKind::SharedDown)));
    let s_up_bias = leaf::<1>(param(ParamKind::SharedUpBias));
    let s_down_bias = leaf::<1>(param(ParamKind::SharedDownBias));
    let s_gate = leaf::<2>(param(ParamKind::SharedGate));
    let glu = |h: Tensor<B, 2>| {
        let [t, n] = h.dims();
        let (gate, value) = (h.clone().slice([0..t, 0..n / 2]), h.slice([0..t, n / 2..n]));
        silu(gate) * value
    };
    let (mut found, mut losses) = (vec![], vec![]);
    let mut xs = vec![];
    for (rank, &t) in token_counts().iter().enumerate().take(ranks) {
        if t == 0 {
            xs.push(None);
            found.push(Found { y: vec![], aux: 0.0, dx: vec![], params: vec![] });
            continue;
        }
        let (x, c) = inputs(rank);
        let x = tensor::<B, 2>(x, [t, H]).require_grad();
        let logits = x.clone().matmul(router.clone().transpose()) + router_bias.clone().unsqueeze();
        let scores = softmax(logits.clone(), 1);
        let chosen = scores.clone().topk_with_indices(K, 1).1;
        let mask = Tensor::<B, 2>::zeros([t, E], &device()).scatter(
            1,
            chosen.clone(),
            Tensor::ones([t, K], &device()),
            burn::tensor::IndexingUpdateOp::Add,
        );
        let kept = scores.clone() * mask.clone();
        let weights = kept.clone() / kept.sum_dim(1);
        let mut y = Tensor::<B, 2>::zeros([t, H], &device());
        for e in 0..E {
            let of = |w: &Tensor<B, 3>| w.clone().narrow(0, e, 1).squeeze_dim::<2>(0);
            let bias = |b: &Tensor<B, 2>| b.clone().narrow(0, e, 1);
            let inner = glu(x.clone().matmul(of(&up).transpose()) + bias(&up_bias));
            let w = weights.clone().slice([0..t, e..e + 1]);
            // WeightAt::Activation weighs what enters down, and its bias.
            y = y + (inner.matmul(of(&down).transpose()) + bias(&down_bias)) * w;
        }
        let inner = glu(x.clone().matmul(s_up.clone().transpose()) + s_up_bias.clone().unsqueeze());
        let shared = inner.matmul(s_down.clone().transpose()) + s_down_bias.clone().unsqueeze();
        let y = y + shared * sigmoid(x.clone().matmul(s_gate.clone().transpose()));
        // Switch: coefficient · E · Σ (choices / (T·K)) · mean score.
        let f = mask.sum_dim(0).mul_scalar(1.0 / (t * K) as f64).detach();
        let p = scores.mean_dim(0);
        let balance = (f * p).sum().mul_scalar(config.aux.balance * E as f64);
        let log_z = logits.exp().sum_dim(1).log();
        let aux = balance + log_z.powi_scalar(2).mean().mul_scalar(config.aux.z);
        found.push(Found { y: floats(y.clone()), aux: floats(aux.clone())[0], dx: vec![], params: vec![] });
        losses.push((y * tensor::<B, 2>(c, [t, H])).sum() + aux);
        xs.push(Some(x));
    }
    let gradients = losses.into_iter().reduce(|a, b| a + b).unwrap().backward();
    for (rank, x) in found.iter_mut().zip(&xs) {
        rank.dx = x.as_ref().map_or(vec![], |x| floats(x.grad(&gradients).unwrap()));
    }
    let params = vec![
        (ParamKind::Router.name(), floats(router.grad(&gradients).unwrap())),
        (ParamKind::RouterBias.name(), floats(router_bias.grad(&gradients).unwrap())),
        (ParamKind::Up.name(), floats(up.grad(&gradients).unwrap())),
        (ParamKind::UpBias.name(), floats(up_bias.grad(&gradients).unwrap())),
        (ParamKind::Down.name(), floats(down.grad(&gradients).unwrap())),
        (ParamKind::DownBias.name(), floats(down_bias.grad(&gradients).unwrap())),
        (ParamKind::SharedUp.name(), floats(s_up.grad(&gradients).unwrap())),
        (ParamKind::SharedUpBias.name(), floats(s_up_bias.grad(&gradients).unwrap())),
        (ParamKind::SharedDownBias.name(), floats(s_down_bias.grad(&gradients).unwrap())),
        (ParamKind::SharedDown.name(), floats(s_down.grad(&gradients).unwrap())),
        (ParamKind::SharedGate.name(), floats(s_gate.grad(&gradients).unwrap())),
    ];
    (found, params)
}

/// Sums replicated gradients over the ranks, joins those of experts.
fn joined(found: &[Found], name: &str) -> Vec<f32> {
    let of = |rank: &Found| rank.params.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name}")).1.clone();
    if name.starts_with("experts") {
        return found.iter().flat_map(of).collect();
    }
    found.iter().map(of).reduce(|a, b| a.iter().zip(&b).map(|(x, y)| x + y).collect()).unwrap()
}

pub fn matches_a_dense_model<S: Subject>(numbers: &[usize]) {
    let config = config();
    for &ranks in numbers {
        // Rank 2 of 4 brings no token, where it can be.
        let found = S::on_ranks(ranks, |rank, group| run_rank::<S>(&module(&config, &group), rank));
        let (reference, params) = dense(&config, ranks);
        for (rank, (a, b)) in found.iter().zip(&reference).enumerate() {
            close(&format!("y, rank {rank} of {ranks}"), &a.y, &b.y, FORWARD);
            close(&format!("aux, rank {rank} of {ranks}"), &[a.aux], &[b.aux], FORWARD);
            close(&format!("dx, rank {rank} of {ranks}"), &a.dx, &b.dx, BACKWARD);
            assert_eq!(a.params.len(), params.len(), "a gradient for every parameter");
        }
        for (name, gradient) in &params {
            close(&format!("d {name}, R = {ranks}"), &joined(&found, name), gradient, BACKWARD);
        }
    }
}

fn forward_and_gradients_match_a_dense_model_over_1_2_and_4_ranks() {
    matches_a_dense_model::<Flex>(&RANKS);
}

pub fn each_output_alone<S: Subject>(ranks: usize) {
    let config = config();
    let parts = |with_y: bool, with_aux: bool| {
        S::on_ranks(ranks, |rank, group| {
            let model = module::<Autodiff<S>>(&config, &group);
            let (x, c) = inputs(rank);
            let x = tensor::<Autodiff<S>, 2>(x, [token_counts()[rank], H]).require_grad();
            let out = model.forward_full(x.clone(), None).unwrap();
            let y = (out.y * tensor(c, [token_counts()[rank], H])).sum();
            let loss = match (with_y, with_aux) {
                (true, true) => y + out.aux,
                (true, false) => y,
                _ => out.aux,
            };
            let gradients = loss.backward();
            let mut all = floats(x.grad(&gradients).unwrap());
            all.extend(gradients_of(&model, &gradients).into_iter().flat_map(|(_, g)| g));
            all
        })
    };
    let (y, aux, both) = (parts(true, false), parts(false, true), parts(true, true));
    for rank in 0..ranks {
        let sum: Vec<f32> = y[rank].iter().zip(&aux[rank]).map(|(a, b)| a + b).collect();
        assert!(aux[rank].iter().any(|&g| g != 0.0));
        close("gradients of both outputs", &both[rank], &sum, BACKWARD);
    }
}

fn each_output_alone_gives_its_part_of_the_gradients() {
    each_output_alone::<Flex>(2);
}

tests! {
    fn();
    forward_and_gradients_match_a_dense_model_over_1_2_and_4_ranks,
    each_output_alone_gives_its_part_of_the_gradients,
}
