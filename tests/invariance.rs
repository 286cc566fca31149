//! Batch invariance: a token's output and its gradient of x have the same bits whatever other tokens the call holds and
//! wherever it stands among them, its rank included, at a fixed dispatcher and number of ranks. `docs/invariance.md`
//! says for which settings.

mod common;

use std::sync::Arc;

use candle_core::{Device, Tensor};
use common::devices::{Target, cases, seed};
use common::support::dense::Params;
use common::support::random::Random;
use common::{Cotangent, Setup, stacks};
use moebius::checkpoint::BlockParams;
use moebius::config::{
    Activation, GroupLimit, GroupScore, Payload, Renorm, RouterConfig, Score, SharedConfig, WeightAt,
};
use moebius::ep::DispatcherKind;
use moebius::layer::ParamKind;
use moebius::quant::WeightFormat;
use moebius::{DType, MoeConfig};

cases!(
    dense_experts,
    dense_experts_of_long_sums,
    nvfp4_experts,
    mxfp4_experts,
    fp8_block_experts,
    group_limited_routers,
    sigmoid_routers,
    routers_with_a_selection_bias,
    routers_that_choose_by_logit,
    nvfp4_payload,
    mxfp8_payload,
    fp8_block_payload,
);

/// Tokens of all batches. Half of them choose an expert on average: more than one task of rows (`ROW_TILE`).
const TOKENS: usize = 600;
/// Dispatchers between CPU ranks.
const KINDS: [DispatcherKind; 3] = [DispatcherKind::AllToAll, DispatcherKind::Hierarchical, DispatcherKind::AllGather];
/// Random batches of each kind of layer, over all settings, unless [`BATCHES_VARIABLE`] says another number.
const RANDOM_BATCHES: usize = 1000;
/// Environment variable of that number.
const BATCHES_VARIABLE: &str = "MOEBIUS_INVARIANCE_BATCHES";
/// Environment variable that has every setting run all batches, tokens alone and pairs, in place of its share.
const ALL_VARIABLE: &str = "MOEBIUS_INVARIANCE_ALL";
/// Rounds over which every type meets what comes every second, third, fourth or fifth time: see [`Place::turn`].
const TURNS: usize = 5;
/// Rows of a product at which something else takes over. They stand for constants that are private to the crate: who
/// changes one changes it here.
///
/// On the CPU (`src/cpu/heuristics.rs`): one row, copies of rows (12, `COPY_ROWS`) and of the weight (24: `COPY_TILES`
/// of 6 rows), blocks of rows (128 and 256, `NARROW_DOT_BLOCK_ROWS` and `BLOCK_ROWS`),
/// tasks (256, `ROW_TILE`); and tiles of 1 to 6 rows (`OrderedProduct::with_simd` in `src/cpu/ordered/mod.rs`).
///
/// On a GPU (`src/cuda/heuristics.rs`): kernels for few rows (6, `DECODE_EIGHT_ROWS`; 32, `DECODE_ROWS`; the router's
/// up to 64, `DECODE_LINEAR_ROWS`), and tiles of 8 to 256 rows (`kernels/common/shapes.h`).
const THRESHOLDS: [usize; 13] = [1, 2, 3, 4, 5, 6, 8, 12, 24, 32, 64, 128, 256];

/// Layers under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Dense experts, on the CPU of sizes that are no multiple of a register: see [`dense`].
    Dense,
    /// Dense experts, of sizes whose sums are cut into parts on the CPU, and that Hopper's kernels serve: see
    /// [`long_sums`].
    DenseOfLongSums,
    /// Experts in codes, multiplied as they are.
    Quantized(WeightFormat),
    /// As `Dense`, behind a router with more than softmax and top-k.
    Routed(RouterKind),
    /// Dense experts, to which tokens travel quantized.
    Payload(Payload),
}

/// What a router has beside softmax and top-k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterKind {
    /// Chooses among the best groups of experts.
    GroupLimited,
    /// Scores by sigmoid.
    Sigmoid,
    /// Chooses with a bias that the weights leave out.
    SelectionBias,
    /// Chooses by logit, and scores what it has chosen.
    ByLogit,
}

impl LayerKind {
    /// Format of experts in codes.
    fn format(self) -> Option<WeightFormat> {
        match self {
            LayerKind::Quantized(format) => Some(format),
            _ => None,
        }
    }

    /// Whether there is such a layer of this type.
    fn takes(self, dtype: DType) -> bool {
        !(matches!(self, LayerKind::Payload(_)) && dtype == DType::F64)
    }

    /// Settings of every type that it takes for each to meet all of its sizes or routers and, on a GPU, [`TURNS`]. The
    /// CPU has more settings of each anyway, by its numbers of ranks and dispatchers, which the sizes of `Dense` go by.
    pub fn rounds(self, on_cpu: bool) -> usize {
        let choices = match self {
            LayerKind::Dense if !on_cpu => DENSE_ON_GPU.len(),
            LayerKind::DenseOfLongSums => long_sums(on_cpu).len(),
            LayerKind::Routed(kind) => routers(kind).len(),
            LayerKind::Dense | LayerKind::Quantized(_) | LayerKind::Payload(_) => 1,
        };
        if on_cpu { choices } else { TURNS.next_multiple_of(choices) }
    }

    /// Of the random batches, and of tokens alone and in pairs, one in so many: the weights of long sums take longest.
    fn share(self) -> usize {
        if self == LayerKind::DenseOfLongSums { 8 } else { 1 }
    }
}

fn dense_experts<D: Target>(device: &D) {
    hold(device, LayerKind::Dense);
}

fn dense_experts_of_long_sums<D: Target>(device: &D) {
    hold(device, LayerKind::DenseOfLongSums);
}

fn nvfp4_experts<D: Target>(device: &D) {
    hold(device, LayerKind::Quantized(WeightFormat::Nvfp4));
}

fn mxfp4_experts<D: Target>(device: &D) {
    hold(device, LayerKind::Quantized(WeightFormat::Mxfp4));
}

fn fp8_block_experts<D: Target>(device: &D) {
    hold(device, LayerKind::Quantized(WeightFormat::Fp8Block));
}

fn group_limited_routers<D: Target>(device: &D) {
    hold(device, LayerKind::Routed(RouterKind::GroupLimited));
}

fn sigmoid_routers<D: Target>(device: &D) {
    hold(device, LayerKind::Routed(RouterKind::Sigmoid));
}

fn routers_with_a_selection_bias<D: Target>(device: &D) {
    hold(device, LayerKind::Routed(RouterKind::SelectionBias));
}

fn routers_that_choose_by_logit<D: Target>(device: &D) {
    hold(device, LayerKind::Routed(RouterKind::ByLogit));
}

fn nvfp4_payload<D: Target>(device: &D) {
    hold(device, LayerKind::Payload(Payload::Nvfp4));
}

fn mxfp8_payload<D: Target>(device: &D) {
    hold(device, LayerKind::Payload(Payload::Mxfp8));
}

fn fp8_block_payload<D: Target>(device: &D) {
    hold(device, LayerKind::Payload(Payload::Fp8Block));
}

/// Holds the promise for layers of one kind, in every type and over every number of ranks.
fn hold<D: Target>(device: &D, kind: LayerKind) {
    let mut over = vec![(1, DispatcherKind::Local)];
    // Rank threads are the CPU's, up to 4 as 8 of each dispatcher take much time; several GPUs, up to 8, have suites of
    // their own.
    if D::has_f64() {
        let several = [2, 4].into_iter().flat_map(|r| KINDS.map(|kind| (r, kind)));
        over.extend(several);
    }
    // Each setting meets all of the kind's sizes or routers.
    let over: Vec<_> = over.into_iter().flat_map(|over| vec![over; kind.rounds(D::has_f64())]).collect();
    hold_over(device, kind, &over, 1);
}

/// The same over these numbers of ranks and dispatchers, with one in `share` of the batches.
pub fn hold_over<D: Target>(device: &D, kind: LayerKind, over: &[(usize, DispatcherKind)], share: usize) {
    let dtypes = D::FLOATS.iter().copied().filter(|dtype| kind.takes(*dtype));
    let settings: Vec<_> = over.iter().flat_map(|over| dtypes.clone().map(move |dtype| (*over, dtype))).collect();
    let stride = match std::env::var_os(ALL_VARIABLE) {
        Some(_) => 1,
        None => settings.len() * share * kind.share(),
    };
    for (at, &(over, dtype)) in settings.iter().enumerate() {
        let types = dtypes.clone().count();
        let place = Place { at, round: at / types, of_type: at % types };
        let layer = LayerUnderTest::new(device, place, kind, dtype, over);
        let mut random = Random::new(seed::seed(700 + at as u64));
        let expected = layer.run(&Batch::even(over.0));
        assert!(expected.iter().flatten().all(|bits| f64::from_bits(*bits).is_finite()), "{}: overflow", layer.name);
        for batch in batches(&mut random, over.0, (at % stride, stride)) {
            let found = layer.run(&batch);
            for (found, token) in found.iter().zip(&batch.tokens) {
                let (count, split) = (batch.tokens.len(), &batch.split);
                assert!(*found == expected[*token], "{}: token {token} among {count}, {split:?} a rank", layer.name);
            }
        }
    }
}

/// Where a setting stands among all.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Its number.
    at: usize,
    /// Settings of every type before it: another number of ranks, or another dispatcher.
    round: usize,
    /// Number of its type.
    of_type: usize,
}

impl Place {
    /// Another turn for each type of a round, and the next one for each in the next round: so over [`TURNS`] rounds every
    /// type meets what comes every second, third, fourth or fifth time, however many types there are. Over NCCL EP there
    /// is one round, whose types have turns 0 to 2.
    fn turn(self) -> usize {
        self.round + self.of_type
    }
}

/// Random batches to run.
fn random_batches() -> usize {
    match std::env::var(BATCHES_VARIABLE) {
        Ok(text) => text.parse().unwrap_or_else(|e| panic!("{BATCHES_VARIABLE} = {text}: {e}")),
        Err(_) => RANDOM_BATCHES,
    }
}

/// Tokens of a call.
struct Batch {
    /// Their numbers, those of rank 0 first.
    tokens: Vec<usize>,
    /// How many are each rank's.
    split: Vec<usize>,
}

impl Batch {
    /// All tokens, as many on each rank.
    fn even(ranks: usize) -> Self {
        Self { tokens: (0..TOKENS).collect(), split: vec![TOKENS / ranks; ranks] }
    }

    /// These tokens, cut into ranks anywhere, so that a rank may have none.
    fn cut(tokens: &[usize], random: &mut Random, ranks: usize) -> Self {
        let mut cuts: Vec<usize> = (1..ranks).map(|_| random.bits() as usize % (tokens.len() + 1)).collect();
        cuts.extend([0, tokens.len()]);
        cuts.sort_unstable();
        Self { tokens: tokens.to_vec(), split: cuts.windows(2).map(|pair| pair[1] - pair[0]).collect() }
    }
}

/// Batches of setting `at` of `settings`: halves, all tokens in another order, and its share of every token alone, of
/// every token in a pair, and of random batches of sizes around the thresholds.
fn batches(random: &mut Random, ranks: usize, (at, settings): (usize, usize)) -> Vec<Batch> {
    let all: Vec<usize> = (0..TOKENS).collect();
    let mut permuted = || {
        let mut order = all.clone();
        (1..TOKENS).rev().for_each(|i| order.swap(i, random.bits() as usize % (i + 1)));
        order
    };
    let mut sets = vec![all[..TOKENS / 2].to_vec(), all[TOKENS / 2..].to_vec(), permuted()];
    let pairs = permuted();
    sets.extend(all.chunks(1).chain(pairs.chunks(2)).skip(at).step_by(settings).map(<[usize]>::to_vec));
    for number in (at..random_batches()).step_by(settings) {
        let mut order = permuted();
        // The router has all tokens' rows, an expert half as many on average. Every threshold has its turn as either.
        let rows = THRESHOLDS[number % THRESHOLDS.len()] << (number / THRESHOLDS.len() % 2);
        order.truncate((rows + number / 2 % 3).saturating_sub(1).max(1));
        sets.push(order);
    }
    sets.into_iter().map(|tokens| Batch::cut(&tokens, random, ranks)).collect()
}

/// A layer over some ranks, and all tokens.
struct LayerUnderTest<'a, D: Target> {
    device: &'a D,
    name: String,
    setup: Setup,
    dtype: DType,
    params: Vec<BlockParams>,
    /// `[T, H]`, as `d_y`.
    x: Tensor,
    d_y: Tensor,
}

impl<'a, D: Target> LayerUnderTest<'a, D> {
    fn new(
        device: &'a D,
        place: Place,
        kind: LayerKind,
        dtype: DType,
        (ranks, dispatcher): (usize, DispatcherKind),
    ) -> Self {
        let config = config(place, kind, sizes::<D>(place, kind));
        let experts = config.router.num_experts;
        let mut random = Random::new(seed::seed(600 + place.at as u64));
        let mut params = Params::new();
        for kind in ParamKind::ALL {
            if let Some(dims) = kind.dims(&config, experts) {
                let std = (dims[dims.len() - 1] as f64).powf(-0.5);
                params.insert(kind.name().to_string(), random.tensor(&dims, std).expect("a parameter"));
            }
        }
        // Quantized weights are not scaled to their sums' lengths: smaller tokens keep those in the range of f16.
        let std = if kind.format().is_some() { 0.25 } else { 1.0 };
        let mut tokens = || random.tensor(&[TOKENS, config.hidden], std).expect("tokens");
        let (x, d_y) = (tokens(), tokens());
        let (h, i, rows) = (config.hidden, config.intermediate, config.up_rows());
        let mut setup = Setup::new(&config, &[]);
        setup.dispatcher = dispatcher;
        // On a GPU experts in codes keep a token's bits only where that is asked for.
        setup.batch_invariant = kind.format().is_some();
        // NCCL EP compiles its kernels for a number of tokens, which one group has for all batches.
        setup.max_tokens_per_rank = (dispatcher == DispatcherKind::NcclEp).then_some(TOKENS);
        setup.quantized = kind.format().map(|format| {
            let mut stack = |[rows, columns]: [usize; 2], parts| {
                stacks::random(&mut || random.bits(), format, [experts / ranks, rows, columns], parts)
            };
            Arc::new((0..ranks).map(|_| [stack([rows, h], rows / i), stack([h, i], 1)]).collect())
        });
        let params = (0..ranks).map(|rank| common::shard(&params, rank, ranks, dtype)).collect();
        let name = format!("{kind:?}, {dtype}, {dispatcher:?} over {ranks}, H {h}, I {i}, {:?}", config.router);
        Self { device, name, setup, dtype, params, x, d_y }
    }

    /// Bits of y and d x, a vector for each token of the batch.
    fn run(&self, batch: &Batch) -> Vec<Vec<u64>> {
        let index: Vec<u32> = batch.tokens.iter().map(|t| *t as u32).collect();
        let index = Tensor::from_vec(index, batch.tokens.len(), &Device::Cpu).expect("an index");
        let rows = |t: &Tensor| t.index_select(&index, 0).expect("rows");
        let (x, d_y) = (rows(&self.x), rows(&self.d_y));
        let setup = Setup { split: batch.split.clone(), ..self.setup.clone() };
        let cotangent = Some(Cotangent { y: Some(&d_y), aux: 0.0 });
        let found = common::run_on(self.device, &setup, &self.params, &x, self.dtype, cotangent).expect("a step");
        let rows = |t: &Tensor| t.to_vec2::<f64>().expect("rows");
        let pairs = rows(&found.y).into_iter().zip(rows(&found.grads["x"]));
        pairs.map(|(y, d_x)| y.into_iter().chain(d_x).map(f64::to_bits).collect()).collect()
    }
}

/// Hidden and intermediate size.
fn sizes<D: Target>(place: Place, kind: LayerKind) -> (usize, usize) {
    let (at, on_cpu) = (place.turn(), D::has_f64());
    match kind {
        LayerKind::Dense => dense(at, on_cpu),
        LayerKind::Routed(_) => ([40, 72][at % 2], 36),
        LayerKind::DenseOfLongSums => {
            let sizes = long_sums(on_cpu);
            sizes[place.round % sizes.len()]
        }
        // Whole blocks of 32, for fp8 one block and several, the last not full.
        LayerKind::Quantized(_) | LayerKind::Payload(_) => ([64, 320][at % 2], [96, 192][at / 2 % 2]),
    }
}

/// On the CPU sizes that are no multiple of a register, and for x·w sums longer than a chunk (256, `AXPY_CHUNK`). Those
/// of x·wᵀ stay within one (`DOT_REGISTERS`).
fn dense(turn: usize, on_cpu: bool) -> (usize, usize) {
    match on_cpu {
        true => ([40, 72][turn % 2], [36, 300][turn / 2 % 2]),
        false => DENSE_ON_GPU[turn % DENSE_ON_GPU.len()],
    }
}

/// On a GPU whole words of 16 bytes, so that in 16 bits Hopper's kernels serve the products of experts: sums shorter than
/// a step of 64, and of several with a part of one; columns of part of a tile, and of one and part of the next. With 200
/// of them down's gradient has square tiles on every GPU, with 72 where L2 is small (`SQUARE_SUM` in
/// `src/cuda/heuristics.rs`). Of the last size, whose intermediate one is no whole words, the rows' gradient alone is
/// Hopper's.
const DENSE_ON_GPU: [(usize, usize); 5] = [(264, 72), (40, 72), (264, 200), (40, 200), (72, 300)];

/// On the CPU x·wᵀ with sums of several chunks, of the hidden size (the router and up) or of the intermediate one (down),
/// the last chunk not full. A chunk has 128 registers (`DOT_REGISTERS` in `src/cpu/heuristics.rs`), which hold 1024 f64
/// at most.
///
/// On a GPU whole words of 16 bytes, so that in 16 bits Hopper's kernels serve all products of experts. First sums
/// and columns from which down and the rows' gradient have wider tiles, and rows behind a map are first brought into
/// the order of slots (`WIDE_SUM` and `ORDER_ROWS_COLUMNS` in `src/cuda/heuristics.rs`: 8192 both). Then short ones. Last
/// a hidden size from which down's gradient has no square tiles and gathers its rows another way (`SQUARE_SUM`, and
/// `LONG_SUM` in `kernels/sm90/grouped_gemm_kernel.cuh`: 4096 both), and the portable kernels cut logits into parts
/// (`SPLIT_PARTS` of `SPLIT_HIDDEN`).
fn long_sums(on_cpu: bool) -> &'static [(usize, usize)] {
    match on_cpu {
        true => &[(2 * 1024 + 40, 36), (40, 2 * 1024 + 40)],
        false => &[(64, 8192), (128, 72), (4104, 72)],
    }
}

fn config(place: Place, kind: LayerKind, (hidden, inner): (usize, usize)) -> MoeConfig {
    let at = place.turn();
    let mut config = MoeConfig::new(hidden, inner, 4, 2);
    config.shared = Some(SharedConfig { intermediate: 20, gated: true, bias: false });
    config.weight_at = [WeightAt::Output, WeightAt::Input, WeightAt::Activation][at % 3];
    if at % 4 == 3 {
        config.activation = Activation::ClampedGlu { alpha: 1.702, limit: 1.0 };
        config.expert_bias = true;
    }
    config.recompute = at % 5 == 4;
    match kind {
        LayerKind::Routed(kind) => {
            let mut routers = routers(kind);
            config.router = routers.swap_remove(place.round % routers.len());
        }
        LayerKind::Payload(payload) => config.payload = payload,
        LayerKind::Dense | LayerKind::DenseOfLongSums | LayerKind::Quantized(_) => {}
    }
    config
}

/// A kind's routers. As many rows reach an expert as with 4 experts and top-2.
fn routers(kind: RouterKind) -> Vec<RouterConfig> {
    let of = || RouterConfig::new(8, 4);
    let limited = |rank_by| of().with_groups(GroupLimit { groups: 4, keep: 2, rank_by });
    let renorm = Renorm { p: 1.0, epsilon: 1e-20, floor: 0.0 };
    match kind {
        // DeepSeek-V2's and V3's.
        RouterKind::GroupLimited => {
            let scores = limited(GroupScore::Top2Sum).with_score(Score::Sigmoid).with_selection_bias(true);
            vec![
                limited(GroupScore::Max).with_renorm(None).with_scale(16.0),
                scores.with_renorm(renorm).with_scale(2.5),
            ]
        }
        RouterKind::Sigmoid => {
            let of = || of().with_score(Score::Sigmoid);
            vec![of().with_renorm(renorm), of().with_renorm(None).with_logit_bias(true)]
        }
        RouterKind::SelectionBias => {
            let of = || of().with_selection_bias(true);
            vec![of().with_score(Score::Sigmoid), of().with_logit_bias(true)]
        }
        RouterKind::ByLogit => vec![
            of().with_score(Score::TopkSoftmax).with_logit_bias(true),
            of().with_score(Score::TopkSigmoid).with_renorm(None),
            RouterConfig::new(4, 2).with_score(Score::SparseMixer { epsilon: 0.01 }).with_renorm(None),
        ],
    }
}
