//! Four ranks as threads, a layer of eight experts over them, and steps of which rank 3 cannot do some.

use std::thread;
use std::time::Duration;

use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, Params, PerParam};
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{CommError, Error, MoeConfig, Result, Tensor, TensorRef};

const RANKS: usize = 4;
const EXPERTS: usize = 8;
const LOCAL: usize = EXPERTS / RANKS;
const HIDDEN: usize = 4;
const INNER: usize = 2;
const TOKENS: usize = 3;
/// The rank that every error is of.
const FAILING: usize = 3;
/// How long a rank would wait for one that says nothing.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The ranks' calls, in this order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stage {
    First,
    /// A token of rank 3 holds a NaN.
    Nan,
    AfterNan,
    /// Rank 3 cannot read a weight between dispatch and combine.
    Weight,
    AfterWeight,
    /// Rank 3 returns without a step.
    Leave,
    AfterLeave,
}

pub const STAGES: [Stage; 7] =
    [Stage::First, Stage::Nan, Stage::AfterNan, Stage::Weight, Stage::AfterWeight, Stage::Leave, Stage::AfterLeave];

impl Stage {
    pub fn title(self) -> &'static str {
        match self {
            Stage::First => "a forward and backward of all ranks",
            Stage::Nan => "token 1 of rank 3 holds a NaN",
            Stage::Weight => "rank 3 cannot read experts.down",
            Stage::AfterNan | Stage::AfterWeight => "the next step of the same group",
            Stage::Leave => "rank 3 returns, and its group is dropped",
            Stage::AfterLeave => "the next step of those that are left",
        }
    }
}

/// Each rank's report of each stage that it was in.
pub fn run() -> Result<Vec<Vec<String>>> {
    let ranks = ThreadWorld::create(RANKS, TIMEOUT).into_iter();
    let ranks: Vec<_> = ranks.map(|comm| thread::spawn(|| rank(comm))).collect();
    ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
}

/// A weight on a disk, say, that is read when it is asked for.
#[derive(Debug)]
struct OnDisk<'a> {
    whole: TensorRef<'a, Cpu>,
    damaged: bool,
}

impl WeightSource<Cpu> for OnDisk<'_> {
    fn dims(&self) -> &[usize] {
        self.whole.dims()
    }

    fn acquire(&self) -> Result<WeightGuard<'_, Cpu>> {
        if self.damaged {
            let (operation, message) = ("read experts.down".to_string(), "no such sector".to_string());
            return Err(Error::Device { call: "acquire", operation, message });
        }
        Ok(WeightGuard::borrowed(self.whole.borrow(), None))
    }
}

/// A rank's step: y and the gradient of x.
fn step(layer: &Layer, group: &mut Group<Cpu>, stage: Stage) -> Result<[Vec<f32>; 2]> {
    let (rank, failing) = (group.rank(), group.rank() == FAILING);
    let mut x = values(rank, &[TOKENS, HIDDEN])?.as_slice::<f32>()?.to_vec();
    if failing && stage == Stage::Nan {
        x[HIDDEN] = f32::NAN;
    }
    let x = Tensor::from_vec(x, &[TOKENS, HIDDEN])?;
    let router = values(10, &[EXPERTS, HIDDEN])?;
    let up = values(20 + rank, &[LOCAL, 2 * INNER, HIDDEN])?;
    let down = values(30 + rank, &[LOCAL, HIDDEN, INNER])?;
    let down = OnDisk { whole: down.view(), damaged: failing && stage == Stage::Weight };
    let params = Params { router: router.view(), up: &up.view(), down: &down, others: PerParam::none() };
    let forward = layer.forward(group, Mode { backward: true, noise: None }, x.view(), &params)?;
    let context = forward.context.expect("a context, as backward was asked for");
    let cotangents = Cotangents { y: Some(x.view()), aux: 0.0 };
    let inputs = Inputs { x: x.view(), params: &params };
    let gradients = layer.backward(group, context, inputs, cotangents, GradientMask::ALL)?;
    let d_x = gradients.x.expect("the gradient of x");
    Ok([forward.y.as_slice::<f32>()?.to_vec(), d_x.as_slice::<f32>()?.to_vec()])
}

fn rank(comm: ThreadComm) -> Result<Vec<String>> {
    let layer = Layer::new(MoeConfig::new(HIDDEN, INNER, EXPERTS, 2), 5)?;
    let mut group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(EXPERTS, TOKENS))?;
    let (mut first, mut said) = (None, Vec::new());
    for stage in STAGES {
        if stage == Stage::Leave && group.rank() == FAILING {
            said.push("Ok".to_string());
            break;
        }
        said.push(match step(&layer, &mut group, stage) {
            Ok(results) => match &first {
                None => {
                    first = Some(results);
                    "Ok".to_string()
                }
                Some(first) if *first == results => "Ok, with the bits of the first".to_string(),
                Some(_) => "Ok, with other values".to_string(),
            },
            Err(error) => format!("{}: {error}", kind(&error)),
        });
    }
    Ok(said)
}

/// The error's type.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::NanLogits { .. } => "Error::NanLogits",
        Error::Device { .. } => "Error::Device",
        Error::Peer { .. } => "Error::Peer",
        Error::Comm(CommError::Refused { .. }) => "CommError::Refused",
        Error::Comm(CommError::PeerGone { .. }) => "CommError::PeerGone",
        Error::Comm(CommError::Poisoned { .. }) => "CommError::Poisoned",
        _ => "another error",
    }
}

/// Values that depend on their number alone, in ±0.5.
fn values(seed: usize, dims: &[usize]) -> Result<Tensor<Cpu>> {
    let value = |i: usize| (((i + 1) * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
    Tensor::from_vec((0..dims.iter().product()).map(value).collect(), dims)
}
