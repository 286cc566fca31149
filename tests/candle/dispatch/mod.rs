//! Dispatch and combine with experts of the user's own between them: closed forms, against the module, in f64 against
//! finite differences, several in flight, and used wrongly. Over ranks that are threads on the CPU, over one GPU, and over
//! several.

mod memory;
mod refused;
mod values;

use std::ops::Range;
use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Module, Tensor, Var};
use moebius::candle::{
    DeviceGroup, DispatchCombine, Dispatched, DispatchedRowsMut, EpGroup, ExpertParallelMoE, error_of,
};
use moebius::config::{CapacityOrder, ExpertCapacity, Payload};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Capacity, Group, GroupConfig};
use moebius::layer::{DispatchOptions, Layer, ParamKind};
use moebius::{Error, MoeConfig};

use crate::support::{AnyResult, EXPERTS, H, close, config, flat, normal, of_type, wide_tokens};
use crate::trials::tests;

/// Rows of a static capacity: 13 tokens of 2 choices, each expert's rounded up to 4.
const CAPACITY: usize = 64;
const LONG: Duration = Duration::from_secs(60);
/// Tokens of each rank, by number of ranks; the last of four has none.
const CUTS: [&[usize]; 5] =
    [&[0, 13], &[0, 5, 13], &[0, 6, 7, 13, 13], &[0, 6, 7, 10, 13], &[0, 2, 3, 5, 7, 8, 10, 12, 13]];

/// Where a test's ranks are.
pub enum Place {
    /// Threads, of every number in [`CUTS`].
    Cpu,
    /// One rank on this device.
    #[cfg(feature = "cuda")]
    Gpu(Device),
    /// So many ranks, a GPU each.
    #[cfg(feature = "nccl")]
    Gpus(usize),
}

impl Place {
    fn is_cpu(&self) -> bool {
        matches!(self, Place::Cpu)
    }

    /// The divisions of 13 tokens over ranks that it can have.
    fn cuts(&self) -> Vec<&'static [usize]> {
        let all = CUTS.into_iter();
        match self {
            Place::Cpu => all.collect(),
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => vec![CUTS[0]],
            #[cfg(feature = "nccl")]
            Place::Gpus(count) => {
                // A GPU has no tensor of no elements in candle.
                let is_full = |cuts: &&[usize]| cuts.windows(2).all(|cut| cut[0] < cut[1]);
                all.filter(|cuts| cuts.len() == count + 1).filter(is_full).collect()
            }
        }
    }

    /// A number of ranks that it can have, two on the CPU.
    pub fn count(&self) -> usize {
        match self {
            Place::Cpu => 2,
            #[cfg(feature = "cuda")]
            Place::Gpu(_) => 1,
            #[cfg(feature = "nccl")]
            Place::Gpus(count) => *count,
        }
    }
}

/// Runs a closure on each rank; results in rank order.
pub fn on_ranks<R: Send>(
    place: &Place,
    count: usize,
    run: impl Fn(&DeviceGroup) -> AnyResult<R> + Sync,
) -> AnyResult<Vec<R>> {
    let group = GroupConfig { max_rows: CAPACITY, ..GroupConfig::new(EXPERTS, 64) };
    match place {
        Place::Cpu => {}
        #[cfg(feature = "cuda")]
        Place::Gpu(device) => return Ok(vec![run(&DeviceGroup::single(group, device)?)?]),
        #[cfg(feature = "nccl")]
        Place::Gpus(_) => return crate::gpus::on_ranks(count, &group, run),
    }
    std::thread::scope(|scope| {
        let threads = ThreadWorld::create(count, LONG).into_iter().map(|comm| {
            let (run, group) = (&run, group.clone());
            scope.spawn(move || run(&EpGroup::new(Group::new(Cpu::poisoning(), Box::new(comm), group)?).into()))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

/// Two distinct experts for each of 13 tokens, of all ranks.
fn choices(rows: Range<usize>, device: &Device) -> AnyResult<Tensor> {
    let of = |t: usize| [(t * 5 + 1) % EXPERTS, (t * 5 + 1 + (t % 3 + 1) * 2) % EXPERTS];
    let ids: Vec<u32> = rows.clone().flat_map(of).map(|id| id as u32).collect();
    Ok(Tensor::from_vec(ids, (rows.len(), 2), device)?)
}

/// Numbers of this test that are the same however tokens are divided: rows of a table of 13.
fn table(own: u64, rows: &Range<usize>, width: usize, dtype: DType, device: &Device) -> AnyResult<Tensor> {
    Ok(normal(own, (13, width), dtype, &Device::Cpu)?.narrow(0, rows.start, rows.len())?.to_device(device)?)
}

fn variable(t: &Tensor) -> AnyResult<Var> {
    Ok(Var::from_tensor(t)?)
}

fn weighted(outputs: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
    outputs.broadcast_mul(&weights.unsqueeze(D::Minus1)?.to_dtype(outputs.dtype())?)
}

fn gradient(gradients: &GradStore, of: &Tensor) -> AnyResult<Vec<f32>> {
    flat(gradients.get(of).ok_or("no gradient")?)
}

/// Σ y·c: its gradient of y is c.
fn loss(y: &Tensor, c: &Tensor) -> candle_core::Result<Tensor> {
    // On the left: of empty tensors candle keeps that operand alone.
    (y * c)?.sum_all()
}

/// A test of CPU ranks by name.
type CpuCase = (&'static str, fn() -> AnyResult<()>);

/// Tests of CPU ranks: in f64, or of a failure that is met before a device matters.
pub fn cpu_cases() -> [CpuCase; 4] {
    [
        ("gradients_are_those_of_finite_differences", values::gradients_are_those_of_finite_differences),
        (
            "a_rank_that_fails_among_its_experts_tells_the_others",
            refused::a_rank_that_fails_among_its_experts_tells_the_others,
        ),
        ("experts_that_give_other_rows_are_typed_errors", refused::experts_that_give_other_rows_are_typed_errors),
        ("a_router_that_fails_tells_the_others", refused::a_router_that_fails_tells_the_others),
    ]
}

/// A test by name.
type Case = (&'static str, fn(&Place) -> AnyResult<()>);

/// All of them.
pub fn cases() -> Vec<Case> {
    [values::cases(), memory::cases(), refused::cases()].concat()
}
