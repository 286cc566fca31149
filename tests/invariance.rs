//! Batch invariance: a token's output and its gradient of x have the same bits whatever other tokens the call holds and
//! wherever it stands among them, its rank included, at a fixed dispatcher and number of ranks. `docs/invariance.md`
//! says for which settings.

mod common;

use candle_core::{Device, Tensor};
use common::devices::{Target, cases, seed};
use common::support::dense::Params;
use common::support::random::Random;
use common::{Cotangent, Setup};
use moebius::checkpoint::BlockParams;
use moebius::config::{Activation, SharedConfig, WeightAt};
use moebius::ep::DispatcherKind;
use moebius::layer::ParamKind;
use moebius::{DType, MoeConfig};

cases!(any_batch_gives_a_token_the_same_bits);

/// Tokens of all batches. More than two tiles of rows on one expert.
const TOKENS: usize = 600;
const EXPERTS: usize = 4;
/// Random batches, over all settings.
const BATCHES: usize = 1000;
/// Numbers of tokens, and one below and above, at which something else takes over: few rows, tiles of 3, 4, 6 and 8
/// rows, copies of rows, tasks of the router, blocks and tasks of rows, and all.
const SIZES: [usize; 12] = [1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256, TOKENS - 1];

/// A layer over some ranks, and what all tokens at once give.
struct Subject<'a, D: Target> {
    device: &'a D,
    name: String,
    config: MoeConfig,
    kind: DispatcherKind,
    dtype: DType,
    params: Vec<BlockParams>,
    /// `[T, H]`, as `d_y`.
    x: Tensor,
    d_y: Tensor,
}

impl<D: Target> Subject<'_, D> {
    /// Bits of y and d x, row by row, of these tokens in this order, so many on each rank.
    fn run(&self, tokens: &[usize], split: &[usize]) -> Vec<Vec<u64>> {
        let index: Vec<u32> = tokens.iter().map(|t| *t as u32).collect();
        let index = Tensor::from_vec(index, tokens.len(), &Device::Cpu).expect("an index");
        let rows = |t: &Tensor| t.index_select(&index, 0).expect("rows");
        let (x, d_y) = (rows(&self.x), rows(&self.d_y));
        let mut setup = Setup::new(&self.config, split);
        setup.dispatcher = self.kind;
        let cotangent = Some(Cotangent { y: Some(&d_y), aux: 0.0 });
        let found = common::run_on(self.device, &setup, &self.params, &x, self.dtype, cotangent).expect("a step");
        let rows = |t: &Tensor| t.to_vec2::<f64>().expect("rows");
        let pairs = rows(&found.y).into_iter().zip(rows(&found.grads["x"]));
        pairs.map(|(y, d_x)| y.into_iter().chain(d_x).map(f64::to_bits).collect()).collect()
    }
}

fn config(at: usize) -> MoeConfig {
    // Sizes that are no multiple of a register, and a sum longer than a chunk of each product.
    let mut config = MoeConfig::new([40, 72][at % 2], [36, 300][at / 2 % 2], EXPERTS, 2);
    config.shared = Some(SharedConfig { intermediate: 20, gated: true });
    config.weight_at = [WeightAt::Output, WeightAt::Input, WeightAt::Activation][at % 3];
    if at % 4 == 3 {
        config.activation = Activation::ClampedGlu { alpha: 1.702, limit: 1.0 };
        config.expert_bias = true;
    }
    config.recompute = at % 5 == 4;
    config
}

fn subject<D: Target>(device: &D, at: usize, dtype: DType, (ranks, kind): (usize, DispatcherKind)) -> Subject<'_, D> {
    let config = config(at);
    let mut random = Random::new(seed::seed(600 + at as u64));
    let mut params = Params::new();
    for role in ParamKind::ALL {
        if let Some(dims) = role.dims(&config, EXPERTS) {
            let std = (dims[dims.len() - 1] as f64).powf(-0.5);
            params.insert(role.name().to_string(), random.tensor(&dims, std).expect("a parameter"));
        }
    }
    let mut tokens = || random.tensor(&[TOKENS, config.hidden], 1.0).expect("tokens");
    let (x, d_y) = (tokens(), tokens());
    let name = format!("{dtype}, {kind:?} over {ranks}, H {}, I {}", config.hidden, config.intermediate);
    let params = (0..ranks).map(|rank| common::shard(&params, rank, ranks, dtype)).collect();
    Subject { device, name, config, kind, dtype, params, x, d_y }
}

/// Random cuts of a number into parts, empty ones among them.
fn split(random: &mut Random, tokens: usize, ranks: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (1..ranks).map(|_| random.bits() as usize % (tokens + 1)).collect();
    cuts.extend([0, tokens]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn any_batch_gives_a_token_the_same_bits<D: Target>(device: &D) {
    let mut over = vec![(1, DispatcherKind::Local)];
    if D::has_f64() {
        let several = [2, 4].into_iter().flat_map(|r| [(r, DispatcherKind::AllToAll), (r, DispatcherKind::AllGather)]);
        over.extend(several);
    }
    let settings: Vec<_> =
        over.into_iter().flat_map(|over| D::FLOATS.iter().map(move |dtype| (over, *dtype))).collect();
    for (at, &(over, dtype)) in settings.iter().enumerate() {
        let subject = subject(device, at, dtype, over);
        let random = &mut Random::new(seed::seed(700 + at as u64));
        let all: Vec<usize> = (0..TOKENS).collect();
        let even = vec![TOKENS / over.0; over.0];
        let expected = subject.run(&all, &even);
        let check = |tokens: &[usize], random: &mut Random| {
            let split = split(random, tokens.len(), over.0);
            for (found, token) in subject.run(tokens, &split).iter().zip(tokens) {
                let (name, count) = (&subject.name, tokens.len());
                assert!(*found == expected[*token], "{name}: token {token} differs in a batch of {count}, {split:?}");
            }
        };
        check(&all[..TOKENS / 2], random);
        check(&all[TOKENS / 2..], random);
        let batches = BATCHES / settings.len();
        for batch in 2..batches {
            let mut order = all.clone();
            for i in (1..TOKENS).rev() {
                order.swap(i, random.bits() as usize % (i + 1));
            }
            // Half of the batches are of one token or of two, the large ones are rare.
            let size = match batch % 4 {
                0 => 1,
                1 => 2,
                2 => SIZES[random.bits() as usize % 9],
                _ => SIZES[(random.bits() % SIZES.len() as u64) as usize],
            };
            let size = (size + random.bits() as usize % 3).saturating_sub(1).clamp(1, TOKENS);
            check(&order[..if batch == 2 { TOKENS } else { size }], random);
        }
    }
}
