//! Five tokens, four experts, two ranks: one forward and one backward through the public interface, and every number on
//! the way.

use std::thread;
use std::time::Duration;

use moebius::config::Activation;
use moebius::cpu::Cpu;
use moebius::cpu::{ThreadComm, ThreadWorld};
use moebius::ep::{DispatchGrads, DispatchInputs, DispatchOutputs, Group, GroupConfig};
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, Params, PerParam};
use moebius::{DType, MoeConfig, Result, Tensor};

/// Ranks of the run.
pub const RANKS: usize = 2;
/// Experts of each rank.
pub const LOCAL: usize = 2;
/// Hidden size.
pub const H: usize = 4;
const EXPERTS: usize = RANKS * LOCAL;
const TOP_K: usize = 2;
const INNER: usize = 2;

/// Tokens of each rank.
const TOKENS: [&[[f32; H]]; RANKS] = [
    &[[1.0, 0.5, 0.0, 0.25], [0.0, 0.75, 0.25, 1.0], [0.25, 0.0, 1.0, 0.5]],
    &[[0.0, 0.5, 0.25, 1.0], [1.0, 0.0, 0.75, 0.25]],
];

/// A token by its rank and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenId {
    pub rank: usize,
    pub token: usize,
}

/// The token that the guide follows.
pub const FOLLOWED: TokenId = TokenId { rank: 0, token: 1 };

/// A slot of a rank's expert-major layout.
#[derive(Debug, Clone)]
pub struct Slot {
    pub expert: usize,
    /// Row of the received rows that the expert reads.
    pub received_row: usize,
    pub from: TokenId,
    pub weight: f32,
    /// Output of the expert, the routing weight in it.
    pub output: Vec<f32>,
    /// Gradient of the row that the expert has read.
    pub d_row: Vec<f32>,
    /// Gradient of the weight.
    pub d_weight: f32,
}

/// A rank's numbers.
#[derive(Debug, Clone)]
pub struct Trace {
    pub tokens: Vec<Vec<f32>>,
    pub logits: Vec<Vec<f32>>,
    pub ids: Vec<Vec<i32>>,
    pub weights: Vec<Vec<f32>>,
    /// Tokens as they arrived.
    pub received: Vec<TokenId>,
    pub slots: Vec<Slot>,
    /// Choices of each expert over all ranks.
    pub load: Vec<usize>,
    pub y: Vec<Vec<f32>>,
    /// Gradient of the tokens that comes back from the experts.
    pub d_tokens: Vec<Vec<f32>>,
    pub d_weights: Vec<Vec<f32>>,
    pub d_logits: Vec<Vec<f32>>,
    /// Gradient of the tokens, the router's part included.
    pub d_x: Vec<Vec<f32>>,
}

/// Runs the ranks, each a thread.
pub fn run() -> Result<Vec<Trace>> {
    let ranks = ThreadWorld::create(RANKS, Duration::from_secs(60)).into_iter();
    let ranks: Vec<_> = ranks.map(|comm| thread::spawn(|| rank(comm))).collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}

/// Weights of an expert: its inner row 0 reads element e of a token and returns to it, its inner row 1 reads half of
/// the token's sum and returns half of the result to element 0. The activation squares what is positive.
struct Expert {
    up: [[f32; H]; INNER],
    down: [[f32; INNER]; H],
}

impl Expert {
    fn new(e: usize) -> Self {
        let mut expert = Self { up: [[0.0; H], [0.5; H]], down: [[0.0; INNER]; H] };
        expert.up[0][e] = 1.0;
        expert.down[e][0] = 1.0;
        expert.down[0][1] = 0.5;
        expert
    }

    fn activations(&self, row: &[f32]) -> [f32; INNER] {
        self.up.map(|up| dot(&up, row).max(0.0).powi(2))
    }

    /// down(w · relu(up x)²).
    fn forward(&self, row: &[f32], weight: f32) -> Vec<f32> {
        let a = self.activations(row).map(|a| weight * a);
        self.down.iter().map(|down| dot(down, &a)).collect()
    }

    /// Gradients of the row and of the weight.
    fn backward(&self, row: &[f32], weight: f32, d_out: &[f32]) -> (Vec<f32>, f32) {
        let d_a: [f32; INNER] = std::array::from_fn(|i| (0..H).map(|h| self.down[h][i] * d_out[h]).sum());
        let d_weight = dot(&d_a, &self.activations(row));
        let d_up: [f32; INNER] = std::array::from_fn(|i| weight * d_a[i] * 2.0 * dot(&self.up[i], row).max(0.0));
        ((0..H).map(|h| (0..INNER).map(|i| self.up[i][h] * d_up[i]).sum()).collect(), d_weight)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn tensor(values: Vec<f32>, dims: &[usize]) -> Result<Tensor<Cpu>> {
    Tensor::from_vec(values, dims)
}

fn rows(t: &Tensor<Cpu>) -> Result<Vec<Vec<f32>>> {
    let width = t.dims().last().copied().unwrap_or(1);
    Ok(t.as_slice::<f32>()?.chunks(width).map(<[f32]>::to_vec).collect())
}

/// Which token a row is: no two are equal.
fn origin(row: &[f32]) -> TokenId {
    let all = TOKENS.iter().enumerate().flat_map(|(rank, t)| (0..t.len()).map(move |token| TokenId { rank, token }));
    all.into_iter().find(|id| TOKENS[id.rank][id.token] == row).expect("a row that is a token")
}

fn rank(comm: ThreadComm) -> Result<Trace> {
    let mut config = MoeConfig::new(H, INNER, EXPERTS, TOP_K);
    config.activation = Activation::Relu2;
    let layer = Layer::new(config, 0)?;
    let mut group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(EXPERTS, 4))?;
    let mine = TOKENS[group.rank()];
    let x = tensor(mine.concat(), &[mine.len(), H])?;

    // The router's weight is twice the identity: logit e is twice element e of a token.
    let router = (0..EXPERTS * H).map(|i| if i % (H + 1) == 0 { 2.0 } else { 0.0 }).collect();
    let router = tensor(router, &[EXPERTS, H])?;
    let first = group.rank() * LOCAL;
    let experts: Vec<Expert> = (first..first + LOCAL).map(Expert::new).collect();
    let up = tensor(experts.iter().flat_map(|e| e.up.concat()).collect(), &[LOCAL, INNER, H])?;
    let down = tensor(experts.iter().flat_map(|e| e.down.concat()).collect(), &[LOCAL, H, INNER])?;
    let params = Params { router: router.view(), up: &up.view(), down: &down.view(), others: PerParam::none() };
    let forward = layer.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let context = forward.context.expect("a context, as backward was asked for");
    let handle = context.handle();

    // The layer's dispatch once more: into slots, and as rows arrive.
    let inputs = || DispatchInputs { tokens: x.view(), weights: Some(forward.routing.weights.view()), scales: None };
    let received = group.dispatcher().dispatch_rows(handle, inputs())?;
    let mut in_slots = Tensor::zeros(&Cpu::new(), DType::F32, &[handle.rows(), H])?;
    let mut slot_weights = Tensor::zeros(&Cpu::new(), DType::F32, &[handle.rows()])?;
    let outputs = DispatchOutputs { tokens: in_slots.view_mut(), weights: Some(slot_weights.view_mut()), scales: None };
    group.dispatcher().dispatch(handle, inputs(), outputs)?;
    let (in_slots, slot_weights) = (rows(&in_slots)?, slot_weights.as_slice::<f32>()?.to_vec());
    let row_map = handle.row_map().as_slice::<i32>()?.to_vec();
    let counts = handle.segments().counts.as_slice::<i64>()?.to_vec();
    let expert_of: Vec<usize> = (0..LOCAL).flat_map(|e| vec![e; counts[e] as usize]).collect();

    // The experts by hand, then combine: the layer's own y.
    let out = |s: usize| experts[expert_of[s]].forward(&in_slots[s], slot_weights[s]);
    let outputs: Vec<Vec<f32>> = (0..expert_of.len()).map(out).collect();
    let mut y = Tensor::zeros(&Cpu::new(), DType::F32, &[mine.len(), H])?;
    let expert_out = tensor(outputs.concat(), &[outputs.len(), H])?;
    group.dispatcher().combine(handle, expert_out.view(), y.view_mut())?;
    assert_close("y", &rows(&forward.y)?, &rows(&y)?);

    // The loss is the sum of y, so its gradient is 1 everywhere. Back by hand, then by the layer.
    let ones = tensor(vec![1.0; mine.len() * H], &[mine.len(), H])?;
    let mut d_out = Tensor::zeros(&Cpu::new(), DType::F32, &[handle.rows(), H])?;
    group.dispatcher().combine_bwd(handle, ones.view(), d_out.view_mut())?;
    let d_out = rows(&d_out)?;
    let back = |s: usize| experts[expert_of[s]].backward(&in_slots[s], slot_weights[s], &d_out[s]);
    let (d_rows, d_slot_weights): (Vec<Vec<f32>>, Vec<f32>) = (0..expert_of.len()).map(back).unzip();
    let mut d_tokens = Tensor::zeros(&Cpu::new(), DType::F32, &[mine.len(), H])?;
    let mut d_weights = Tensor::zeros(&Cpu::new(), DType::F32, &[mine.len(), TOP_K])?;
    let grad_rows = tensor(d_rows.concat(), &[d_rows.len(), H])?;
    let grad_weights = tensor(d_slot_weights.clone(), &[d_rows.len()])?;
    let grads = DispatchGrads {
        rows: grad_rows.view(),
        weights: Some(grad_weights.view()),
        d_tokens: d_tokens.view_mut(),
        d_weights: Some(d_weights.view_mut()),
    };
    group.dispatcher().dispatch_bwd(handle, grads)?;
    let load = handle.stats()?.expert_load.clone();

    let cotangents = Cotangents { y: Some(ones.view()), aux: 0.0 };
    let inputs = Inputs { x: x.view(), params: &params };
    let gradients = layer.backward(&mut group, context, inputs, cotangents, GradientMask::ALL)?;
    let d_logits = rows(&gradients.logits)?;
    let d_x = rows(&gradients.x.expect("the gradient of x"))?;
    assert_close("gradient of the weights", &rows(&gradients.weights)?, &rows(&d_weights)?);
    let by_hand: Vec<Vec<f32>> = rows(&d_tokens)?
        .iter()
        .zip(&d_logits)
        .map(|(d, l)| d.iter().zip(l).map(|(d, l)| d + 2.0 * l).collect())
        .collect();
    assert_close("gradient of x", &d_x, &by_hand);

    let slot = |s: usize| Slot {
        expert: first + expert_of[s],
        received_row: row_map[s] as usize,
        from: origin(&in_slots[s]),
        weight: slot_weights[s],
        output: outputs[s].clone(),
        d_row: d_rows[s].clone(),
        d_weight: d_slot_weights[s],
    };
    Ok(Trace {
        tokens: rows(&x)?,
        logits: rows(&forward.routing.logits)?,
        ids: forward.routing.ids.as_slice::<i32>()?.chunks(TOP_K).map(<[i32]>::to_vec).collect(),
        weights: rows(&forward.routing.weights)?,
        received: rows(&received.rows.expect("rows that have come over the communicator"))?
            .iter()
            .map(|row| origin(row))
            .collect(),
        slots: (0..expert_of.len()).map(slot).collect(),
        load,
        y: rows(&forward.y)?,
        d_tokens: rows(&d_tokens)?,
        d_weights: rows(&d_weights)?,
        d_logits,
        d_x,
    })
}

/// f32, and values of a few units: what the same sums in another order differ by is far below this.
fn assert_close(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (a, b) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((a - b).abs() < 1e-5, "{what}: {a} in place of {b}");
    }
}
