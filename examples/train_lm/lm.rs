//! Parts common to the frameworks' language models: sizes, first weights, the report of a step.

use std::ops::Range;
use std::path::PathBuf;

use candle_core::DType;
use moebius::ep::DispatcherKind;
use moebius::etp::Payload;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

use crate::mesh::Mesh;
use crate::sharded::Cost;

/// Tokens are bytes.
pub const VOCABULARY: usize = 256;

/// Sizes of the model and its training.
#[derive(Debug, Clone)]
pub struct Settings {
    pub mesh: Mesh,
    /// How shards travel.
    pub shard_payload: Payload,
    /// How tokens travel to their experts.
    pub token_payload: Payload,
    /// Parts of a rank's sequences, one forward and backward each, whose gradients are added.
    pub microbatches: usize,
    /// Largest norm of all gradients.
    pub clip: Option<f64>,
    pub steps: usize,
    /// Steps that are behind this run, and the step that it ends before.
    pub range: Range<usize>,
    /// Folder of the state that it goes on from.
    pub resume: Option<PathBuf>,
    /// Folder that its state is left in.
    pub save: Option<PathBuf>,
    /// How tokens travel between ranks; `None`: as the group chooses.
    pub dispatcher: Option<DispatcherKind>,
    /// The group times its dispatchers, where none is named, and takes the quickest.
    pub measure_dispatcher: bool,
    /// Type of the layers' parameters and tokens; the model around them is in f32.
    pub layer_dtype: DType,
    pub seed: u64,
    /// Fingerprint of the text.
    pub text: u64,
    /// Sequences of a step, over all ranks.
    pub batch: usize,
    /// Tokens of a sequence.
    pub context: usize,
    pub hidden: usize,
    pub heads: usize,
    pub layers: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Inner size of an expert.
    pub intermediate: usize,
    /// Coefficient of the load-balancing loss.
    pub balance: f64,
    pub learning_rate: f64,
    pub tolerances: Tolerances,
}

/// How near the ranks' numbers are to the dense reference model's, which are f32's.
#[derive(Debug, Clone, Copy)]
pub struct Tolerances {
    /// Largest relative difference between the gradients of a parameter.
    pub gradient: f64,
    /// Largest difference of a router's logits, and with them the choice between experts that are as good as equal: the
    /// reference follows the ranks' choice where it is one of the best by this much.
    pub logit: f32,
}

impl Tolerances {
    /// Rounding in f32 over a backward pass of some ten layers, whose sums are over up to 1024 tokens in different orders
    /// (√1024 · 2⁻²⁴ ≈ 2e-6 each).
    pub const F32: Self = Self { gradient: 1e-5, logit: 1e-4 };
    /// Products whose operands are rounded to TF32, to 2⁻¹² of themselves: some twenty one after another, forward and
    /// backward, of two operands each (√40 · 2⁻¹² ≈ 1.5e-3), and thrice that. Logits are of the size of 1.
    #[cfg_attr(not(feature = "burn-cuda"), allow(dead_code, reason = "burn's on CUDA"))]
    pub const TF32: Self = Self { gradient: 5e-3, logit: 5e-3 };
}

impl Settings {
    /// First sequence and number of sequences of a rank; counts differ by at most one.
    pub fn rows_of(&self, rank: usize) -> (usize, usize) {
        part(self.batch, self.mesh.ranks, rank)
    }

    /// First sequence of a microbatch among a rank's `rows`, and their number.
    pub fn microbatch(&self, rows: usize, number: usize) -> (usize, usize) {
        part(rows, self.microbatches, number)
    }

    /// Most tokens of a rank in a call.
    pub fn most_tokens(&self) -> usize {
        self.microbatch(self.rows_of(0).1, 0).1 * self.context
    }

    /// Tokens among which the load is balanced: those of an EP group in one microbatch. Numbers of tokens in the whole
    /// batch.
    pub fn balanced(&self) -> Vec<Vec<u32>> {
        let token = |row: usize| (row * self.context) as u32..((row + 1) * self.context) as u32;
        let ep = self.mesh.ep;
        let of_rank = |rank: usize, number: usize| {
            let (first, rows) = self.rows_of(rank);
            let (start, count) = self.microbatch(rows, number);
            (first + start..first + start + count).flat_map(token)
        };
        let blocks = (0..self.mesh.groups()).flat_map(|g| (0..self.microbatches).map(move |m| (g, m)));
        blocks.map(|(g, m)| (g * ep..(g + 1) * ep).flat_map(|rank| of_rank(rank, m)).collect()).collect()
    }

    /// Rises over the first steps, then falls to a tenth along half a cosine.
    pub fn learning_rate_at(&self, step: usize) -> f64 {
        let warm = ((step + 1) as f64 / 20.0).min(1.0);
        let done = step as f64 / self.steps.max(1) as f64;
        self.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()))
    }
}

/// Start and length of part `i` of `parts` of `all` things; lengths differ by at most one.
fn part(all: usize, parts: usize, i: usize) -> (usize, usize) {
    let (each, more) = (all / parts, all % parts);
    (i * each + i.min(more), each + usize::from(i < more))
}

/// One parameter of the whole model, as it starts.
#[derive(Debug, Clone)]
pub struct Param {
    pub name: String,
    pub dims: Vec<usize>,
    pub values: Vec<f32>,
}

/// Whether a parameter is a layer's: router and experts.
pub fn is_of_layer(name: &str) -> bool {
    name.contains(".moe.")
}

/// Whether a parameter's first dimension counts experts: each rank holds its share only, and has the whole gradient of
/// it. Of all others every rank holds the whole, and has a share of the gradient.
pub fn is_share(name: &str) -> bool {
    name.contains(".experts.")
}

impl Param {
    /// The share of a rank.
    pub fn share(&self, rank: usize, ranks: usize) -> (Vec<usize>, &[f32]) {
        if !is_share(&self.name) {
            return (self.dims.clone(), &self.values);
        }
        let local = self.dims[0] / ranks;
        let row = self.values.len() / self.dims[0];
        let mut dims = self.dims.clone();
        dims[0] = local;
        (dims, &self.values[rank * local * row..(rank + 1) * local * row])
    }
}

/// The parameters of the whole model. Weights are `[out, in]`; those of the experts have the names and shapes of
/// the layer's own parameters behind `layers.{l}.moe.`.
pub fn initial(s: &Settings) -> Vec<Param> {
    let mut rng = StdRng::seed_from_u64(s.seed);
    let mut params = Vec::new();
    let (h, i, e) = (s.hidden, s.intermediate, s.experts);
    // None: ones.
    let mut add = |name: String, dims: &[usize], deviation: Option<f64>| {
        let count = dims.iter().product();
        let values = match deviation.and_then(|d| Normal::new(0.0, d).ok()) {
            Some(normal) => normal.sample_iter(&mut rng).take(count).map(|v| v as f32).collect(),
            None => vec![1.0; count],
        };
        params.push(Param { name, dims: dims.to_vec(), values });
    };
    let by = |inputs: usize| Some((inputs as f64).powf(-0.5));
    add("embedding".into(), &[VOCABULARY, h], Some(0.5));
    add("positions".into(), &[s.context, h], Some(0.1));
    for l in 0..s.layers {
        let name = |part: &str| format!("layers.{l}.{part}");
        add(name("attention_norm"), &[h], None);
        add(name("qkv"), &[3 * h, h], by(h));
        add(name("out"), &[h, h], by(h));
        add(name("moe_norm"), &[h], None);
        add(name("moe.router.weight"), &[e, h], by(h));
        add(name("moe.experts.up"), &[e, 2 * i, h], by(h));
        add(name("moe.experts.down"), &[e, h, i], by(i));
    }
    add("norm".into(), &[h], None);
    add("head".into(), &[VOCABULARY, h], by(h));
    params
}

/// Loss scaling after a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// Factor of the next step's loss.
    pub factor: f64,
    /// Steps skipped so far.
    pub skipped: u64,
}

/// Report of one step.
#[derive(Debug, Clone)]
pub struct Step {
    pub step: usize,
    /// Mean cross-entropy of the next byte, in nats, over all ranks.
    pub loss: f64,
    /// Tokens per expert over all ranks, by layer.
    pub load: Vec<Vec<usize>>,
    /// Norm of all gradients, where they are clipped.
    pub norm: Option<f64>,
    /// Where the loss is scaled.
    pub scale: Option<Scale>,
    /// Of each rank, where experts are sharded.
    pub costs: Vec<Cost>,
    /// Comparison with the dense reference model, at the steps that make one.
    pub twin: Option<TwinCheck>,
}

/// The dense reference model's step from equal weights, against the ranks'.
#[derive(Debug, Clone)]
pub struct TwinCheck {
    pub loss: f64,
    /// Of the bits of all weights before the step.
    pub weights: u64,
    /// Largest ‖a − b‖ / ‖b‖ over the gradients of all parameters, b the twin's.
    pub error: f64,
    /// The parameter it occurred at.
    pub worst: String,
}

/// FNV-1a over the numbers' bytes.
pub fn fingerprint(bits: impl Iterator<Item = u64>) -> u64 {
    let byte = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bits.fold(0xcbf2_9ce4_8422_2325, |hash, bits| bits.to_le_bytes().into_iter().fold(hash, byte))
}

/// Shares of the experts in one step or several, by layer.
pub fn shares(steps: &[Step], layer: usize) -> Vec<f64> {
    let experts = steps.first().map_or(0, |s| s.load[layer].len());
    let mut sums = vec![0usize; experts];
    for step in steps {
        for (sum, n) in sums.iter_mut().zip(&step.load[layer]) {
            *sum += n;
        }
    }
    let total = sums.iter().sum::<usize>().max(1) as f64;
    sums.iter().map(|n| *n as f64 / total).collect()
}
