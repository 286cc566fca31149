//! Main gradients on several ranks: against candle's own, and where a rank fails or does something else.

mod backward;
mod optimizer;
mod sums;

use std::time::Duration;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Module, Shape, Tensor, Var};
use candle_nn::Optimizer;
use candle_nn::VarBuilder;
use moebius::candle::{
    AdamW, AdamWParam, DispatchCombine, EpGroup, ExpertParallelMoE, MainGradients, backward, error_of,
    reduce_gradients, reduce_gradients_over, refuse_backward,
};
use moebius::comm::Communicator;
use moebius::config::SharedConfig;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::layer::{Layer, ParamKind};
use moebius::optim::{AdamWOptions, GroupOptions, ParamShard};
use moebius::{CommError, Error, MoeConfig};

use crate::ranks::ranks;
use crate::support::{AnyResult, EXPERTS, H, config, flat, of_type, wide_tokens};
use crate::trials::tests;

/// The rank that fails.
const CULPRIT: usize = 1;
/// Long enough for a loaded machine; no test waits for it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Tokens of the ranks, by their number: the last has none.
const CUTS: [&[usize]; 3] = [&[0, 13], &[0, 5, 13], &[0, 6, 7, 13, 13]];

fn full() -> MoeConfig {
    let mut full = config();
    full.shared = Some(SharedConfig { intermediate: 8, gated: true, bias: true });
    (full.expert_bias, full.router.logit_bias) = (true, true);
    full
}

/// The same values, whose backward fails where it is told to.
struct Failing(bool);

impl CustomOp1 for Failing {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((candle_core::backend::BackendStorage::try_clone(x, layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        if self.0 { candle_core::bail!("an operation of the user's own") } else { Ok(Some(gradient.clone())) }
    }
}

/// Where a rank's backward fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Nowhere,
    BeforeAnyLayer,
    BetweenLayers,
}

/// Two layers, the second of which shares what `shared` names with the first, among ordinary operations.
struct Model {
    layers: [ExpertParallelMoE; 2],
}

impl Model {
    fn new(group: &EpGroup, dtype: DType, shared: &[ParamKind]) -> AnyResult<Self> {
        let first = of_type(group.clone(), full(), dtype)?;
        let tensors = first.params().into_iter().map(|(name, t)| {
            let is_shared = shared.iter().any(|kind| kind.name() == name);
            let own = if is_shared { t.clone() } else { Var::from_tensor(&(t * 0.5)?)?.into_inner() };
            Ok((name.to_string(), own))
        });
        let vb = VarBuilder::from_tensors(tensors.collect::<AnyResult<_>>()?, dtype, &Device::Cpu);
        let second = ExpertParallelMoE::new(Layer::new(full(), 4)?, group.clone(), vb)?;
        Ok(Self { layers: [first, second] })
    }

    fn loss(&self, x: &Tensor, fault: Fault) -> AnyResult<Tensor> {
        let [first, second] = &self.layers;
        let hidden = (first.forward(x)? + x)?.apply_op1(Failing(fault == Fault::BetweenLayers))?;
        let y = (second.forward(&hidden)? + hidden)?.apply_op1(Failing(fault == Fault::BeforeAnyLayer))?;
        Ok(y.to_dtype(DType::F32)?.sqr()?.sum_all()?)
    }

    /// Variables of both layers, each once.
    fn vars(&self) -> Vec<Var> {
        let mut all: Vec<Var> = Vec::new();
        for var in self.layers.iter().flat_map(ExpertParallelMoE::vars) {
            if !all.iter().any(|other| other.id() == var.id()) {
                all.push(var);
            }
        }
        all
    }

    fn values(&self, gradients: &GradStore) -> AnyResult<Vec<Vec<f32>>> {
        let of = |var: &Var| flat(gradients.get(var).ok_or("no gradient")?);
        self.vars().iter().map(of).collect()
    }
}

/// A rank's tokens of a microbatch.
fn tokens(group: &EpGroup, microbatch: usize, dtype: DType) -> AnyResult<Var> {
    let cuts = CUTS[group.ranks() / 2];
    let (rank, start) = (group.rank(), 20 * microbatch);
    wide_tokens(start + cuts[rank]..start + cuts[rank + 1], H, dtype, &Device::Cpu)
}

/// The culprit's own error, and the others', which name it.
fn check_errors(group: &EpGroup, error: &candle_core::Error) {
    match (group.rank() == CULPRIT, error_of(error)) {
        (true, found) => assert!(found.is_none() && error.to_string().contains("of the user's own"), "{error}"),
        (false, Some(Error::Peer { peer: CULPRIT, rank, reason, .. })) => {
            assert_eq!(*rank, group.rank());
            assert!(reason.contains("of the user's own"), "{reason}");
        }
        (false, found) => panic!("rank {}: {found:?}, {error}", group.rank()),
    }
}

/// A test by name.
type Case = (&'static str, fn() -> AnyResult<()>);

/// All of them.
pub fn cases() -> Vec<Case> {
    [backward::cases(), sums::cases(), optimizer::cases()].concat()
}
