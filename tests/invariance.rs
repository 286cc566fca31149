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
use moebius::config::{Activation, SharedConfig, WeightAt};
use moebius::ep::DispatcherKind;
use moebius::layer::ParamKind;
use moebius::quant::WeightFormat;
use moebius::{DType, MoeConfig};

cases!(dense_experts, dense_experts_of_long_sums, nvfp4_experts, mxfp4_experts, fp8_block_experts);

/// Tokens of all batches. Half of them choose an expert on average: more than one task of rows.
const TOKENS: usize = 600;
const EXPERTS: usize = 4;
/// Random batches of each kind of experts, over all settings.
const RANDOM_BATCHES: usize = 250;
/// Rows of a product at which something else takes over. On the CPU: tiles of 2 to 6 rows, the streamed weight (8),
/// copies of rows (12) and of the weight (24), blocks of rows (128), tasks (256). On a GPU: kernels for few rows (6 and
/// 32), tiles of 8 to 256.
const THRESHOLDS: [usize; 13] = [1, 2, 3, 4, 5, 6, 8, 12, 24, 32, 64, 128, 256];

/// Experts under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Experts {
    /// Dense, of sizes that are no multiple of a register.
    Dense,
    /// Dense, of sizes whose sums are cut into parts on the CPU, and that Hopper's kernels serve: see
    /// [`long_sums`].
    DenseOfLongSums,
    /// In codes, multiplied as they are.
    Quantized(WeightFormat),
}

impl Experts {
    fn format(self) -> Option<WeightFormat> {
        match self {
            Experts::Dense | Experts::DenseOfLongSums => None,
            Experts::Quantized(format) => Some(format),
        }
    }
}

/// Of the batches of experts of long sums, whose weights take longest, one in so many.
pub const LONG_SUMS_SHARE: usize = 8;

fn dense_experts<D: Target>(device: &D) {
    hold(device, Experts::Dense, 1);
}

fn dense_experts_of_long_sums<D: Target>(device: &D) {
    hold(device, Experts::DenseOfLongSums, LONG_SUMS_SHARE);
}

fn nvfp4_experts<D: Target>(device: &D) {
    hold(device, Experts::Quantized(WeightFormat::Nvfp4), 1);
}

fn mxfp4_experts<D: Target>(device: &D) {
    hold(device, Experts::Quantized(WeightFormat::Mxfp4), 1);
}

fn fp8_block_experts<D: Target>(device: &D) {
    hold(device, Experts::Quantized(WeightFormat::Fp8Block), 1);
}

/// Holds the promise for experts of one kind, in every type and over every number of ranks, with one in `share` of the
/// batches.
fn hold<D: Target>(device: &D, experts: Experts, share: usize) {
    // On a GPU quantized experts keep a token's bits only where that is asked for.
    let device = &if experts.format().is_some() { device.batch_invariant() } else { device.clone() };
    let mut over = vec![(1, DispatcherKind::Local)];
    // Rank threads are the CPU's; several GPUs have a suite of their own.
    if D::has_f64() {
        let several = [2, 4].into_iter().flat_map(|r| [(r, DispatcherKind::AllToAll), (r, DispatcherKind::AllGather)]);
        over.extend(several);
    } else if experts == Experts::DenseOfLongSums {
        // Every type meets both sizes.
        over.push((1, DispatcherKind::Local));
    }
    hold_over(device, experts, &over, share);
}

/// The same over these numbers of ranks and dispatchers, with one in `share` of the batches.
pub fn hold_over<D: Target>(device: &D, experts: Experts, over: &[(usize, DispatcherKind)], share: usize) {
    let settings: Vec<_> = over.iter().flat_map(|over| D::FLOATS.iter().map(move |dtype| (*over, *dtype))).collect();
    for (at, &(over, dtype)) in settings.iter().enumerate() {
        let layer = LayerUnderTest::new(device, at, experts, dtype, over);
        let mut random = Random::new(seed::seed(700 + at as u64));
        let expected = layer.run(&Batch::even(over.0));
        assert!(expected.iter().flatten().all(|bits| f64::from_bits(*bits).is_finite()), "{}: overflow", layer.name);
        for batch in batches(&mut random, over.0, (at, settings.len() * share)) {
            let found = layer.run(&batch);
            for (found, token) in found.iter().zip(&batch.tokens) {
                let (count, split) = (batch.tokens.len(), &batch.split);
                assert!(*found == expected[*token], "{}: token {token} among {count}, {split:?} a rank", layer.name);
            }
        }
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
    for number in (at..RANDOM_BATCHES).step_by(settings) {
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
    fn new(device: &'a D, at: usize, experts: Experts, dtype: DType, (ranks, kind): (usize, DispatcherKind)) -> Self {
        // Another turn of sizes for each number of ranks, so that every type meets every size.
        let config = config(at + at / D::FLOATS.len(), sizes::<D>(at, experts));
        let mut random = Random::new(seed::seed(600 + at as u64));
        let mut params = Params::new();
        for kind in ParamKind::ALL {
            if let Some(dims) = kind.dims(&config, EXPERTS) {
                let std = (dims[dims.len() - 1] as f64).powf(-0.5);
                params.insert(kind.name().to_string(), random.tensor(&dims, std).expect("a parameter"));
            }
        }
        // Quantized weights are not scaled to their sums' lengths: smaller tokens keep those in the range of f16.
        let std = if experts.format().is_some() { 0.25 } else { 1.0 };
        let mut tokens = || random.tensor(&[TOKENS, config.hidden], std).expect("tokens");
        let (x, d_y) = (tokens(), tokens());
        let (h, i, rows) = (config.hidden, config.intermediate, config.up_rows());
        let mut setup = Setup::new(&config, &[]);
        setup.dispatcher = kind;
        setup.quantized = experts.format().map(|format| {
            let mut stack = |[rows, columns]: [usize; 2], parts| {
                stacks::random(&mut || random.bits(), format, [EXPERTS / ranks, rows, columns], parts)
            };
            Arc::new((0..ranks).map(|_| [stack([rows, h], rows / i), stack([h, i], 1)]).collect())
        });
        let params = (0..ranks).map(|rank| common::shard(&params, rank, ranks, dtype)).collect();
        let name = format!("{experts:?}, {dtype}, {kind:?} over {ranks}, H {h}, I {i}");
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

/// Hidden and intermediate size of setting `at`.
fn sizes<D: Target>(at: usize, experts: Experts) -> (usize, usize) {
    let over = at / D::FLOATS.len();
    let at = at + over;
    match experts {
        // Sizes that are no multiple of a register, and for x·w sums longer than a chunk (256). Those of x·wᵀ stay
        // within one (1024).
        Experts::Dense => ([40, 72][at % 2], [36, 300][at / 2 % 2]),
        Experts::DenseOfLongSums => long_sums(over, D::has_f64()),
        // Whole blocks of 32, for fp8 one block and several, the last not full.
        Experts::Quantized(_) => ([64, 320][at % 2], [96, 192][at / 2 % 2]),
    }
}

/// On the CPU x·wᵀ with sums of three chunks (1024), of the hidden size (the router and up) or of the intermediate one
/// (down), the last chunk not full.
///
/// On a GPU whole words of 16 bytes, so that in 16 bits Hopper's kernels serve all products of experts; once with sums
/// and columns from which down and the rows' gradient have wider tiles, and rows behind a map are first brought into
/// the order of slots (`WIDE_SUM` and `ORDER_ROWS_COLUMNS` in `src/cuda/heuristics.rs`: 8192 both).
fn long_sums(over: usize, on_cpu: bool) -> (usize, usize) {
    match on_cpu {
        true => [(2 * 1024 + 40, 36), (40, 2 * 1024 + 40)][over % 2],
        false => [(64, 8192), (128, 72)][over % 2],
    }
}

fn config(at: usize, (hidden, inner): (usize, usize)) -> MoeConfig {
    let mut config = MoeConfig::new(hidden, inner, EXPERTS, 2);
    config.shared = Some(SharedConfig { intermediate: 20, gated: true });
    config.weight_at = [WeightAt::Output, WeightAt::Input, WeightAt::Activation][at % 3];
    if at % 4 == 3 {
        config.activation = Activation::ClampedGlu { alpha: 1.702, limit: 1.0 };
        config.expert_bias = true;
    }
    config.recompute = at % 5 == 4;
    config
}
