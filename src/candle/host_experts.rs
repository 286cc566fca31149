//! Experts in memory of the host that come to the device a layer ahead: a model larger than the device runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};

use crate::adapter::{ErasedChain, ErasedLayerShards, FrameworkDevice, StoredExperts, match_device};
use crate::checkpoint::Checkpoint;
use crate::comm::Solo;
use crate::error::Error;
use crate::etp::{Chain, Comms, EtpOptions, Payload, Phase, ShardPlace};
use crate::layer::ParamKind;

use super::build::{ShardedIn, is_expert_weight};
use super::device::CandleDevice;
use super::group::DeviceGroup;
use super::module::{ExpertParallelMoE, host_copy};
use super::options::LoadAs;

const CALL: &str = "HostExperts";

/// The routed experts of a model's layers in memory of the host, page-locked where the device is a GPU: a
/// [`Chain`] of this rank alone, whose gathers are copies. While a layer computes, the next layer's experts come; the
/// device has two layers' experts at a time. They are frozen, and the model is for inference; for training around such
/// experts, load with [`LoadAs::experts_on_host`] into a chain of your own.
///
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use moebius::candle::{DeviceGroup, ExpertParallelMoE, HostExperts, LoadAs, Parameters};
/// use moebius::checkpoint::Checkpoint;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe");
/// let checkpoint = Checkpoint::open(dir)?;
/// let config = checkpoint.block_config(0)?;
/// let experts = HostExperts::new(DeviceGroup::single(&config, &Device::Cpu)?)?;
/// let load = |layer: &usize| experts.load(&checkpoint, *layer, LoadAs::new(Parameters::Frozen));
/// let layers: Vec<ExpertParallelMoE> = checkpoint.moe_layers().iter().map(load).collect::<Result<_, _>>()?;
/// let x = Tensor::arange(0f32, (5 * config.hidden) as f32, &Device::Cpu)?.sin()?.reshape((5, config.hidden))?;
/// for _token in 0..3 {
///     // All layers with experts, in one order.
///     let y = experts.forward(|| layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)? + x))?;
///     assert_eq!(y.dims(), x.dims());
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct HostExperts {
    group: DeviceGroup,
    chain: ErasedChain,
    pass: Mutex<PassState>,
}

/// Where the chain's pass stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassState {
    /// None has begun.
    None,
    /// One has begun, and the first layer's experts are on their way.
    Begun,
    /// A forward runs.
    Running,
    /// One has failed: what is under way is to be given up.
    Failed,
}

impl HostExperts {
    /// None yet, for layers of this group.
    ///
    /// # Errors
    /// A device's.
    pub fn new(group: impl Into<DeviceGroup>) -> Result<Self> {
        let group = group.into();
        let chain = match_device!(group.erased(), group => chain_on(group.lock().device()))?;
        Ok(Self { group, chain, pass: Mutex::new(PassState::None) })
    }

    /// Loads a layer of an opened checkpoint: its experts to the host, without a way over the device, everything else to
    /// the device. `load` as in [`ExpertParallelMoE::from_checkpoint_sharded`].
    ///
    /// # Errors
    /// As [`ExpertParallelMoE::from_checkpoint_sharded`]; [`Error::OutOfMemory`] where the process may lock no more memory.
    pub fn load<'a>(
        &self,
        checkpoint: &Checkpoint,
        layer: usize,
        load: impl Into<LoadAs<'a>>,
    ) -> Result<ExpertParallelMoE> {
        let load = load.into().experts_on_host();
        match_device!(&self.chain, chain => {
            let shards = ShardedIn { chain, payload: Payload::Plain, weights: None };
            ExpertParallelMoE::from_checkpoint_sharded(checkpoint, layer, &self.group, shards, load)
        })
    }

    /// The same module with its experts on the host, quantized or of floating type; the device keeps them for as long as
    /// `moe` lives.
    ///
    /// # Errors
    /// Experts that are shards already, or are trained; a module of another device; [`Error::OutOfMemory`] where the
    /// process may lock no more memory; after the first forward.
    pub fn place(&self, moe: &ExpertParallelMoE) -> Result<ExpertParallelMoE> {
        match_device!(&self.chain, chain => placed(chain, moe))
    }

    /// Bytes of the experts that lie on the host.
    pub fn bytes(&self) -> usize {
        match_device!(&self.chain, chain => chain.bytes_on_host())
    }

    /// The chain, if it works on a `D`: for its figures.
    pub fn on<D: FrameworkDevice>(&self) -> Option<&Arc<Chain<D>>> {
        D::downcast(&self.chain)
    }

    /// Runs the model's layers once, all of those with experts here, in the order of the first forward. As it ends, the
    /// first layer's experts set out for the next forward. After an error, or a panic, the next forward begins anew.
    ///
    /// # Errors
    /// Those of `layers`; another forward that runs; another order of the layers.
    pub fn forward<T, E: From<Error>>(
        &self,
        layers: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let pass = self.begin()?;
        let done = layers()?;
        pass.end()?;
        Ok(done)
    }

    /// The state, also where a thread has panicked that held the lock: it is whole at every point where that can be.
    fn state(&self) -> MutexGuard<'_, PassState> {
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) -> crate::Result<HostPass<'_>> {
        let mut state = self.state();
        match *state {
            PassState::Running => {
                return Err(Error::invalid("HostExperts::forward", "forward", "one at a time", "another that runs"));
            }
            PassState::Begun => {}
            PassState::None => self.begin_chain()?,
            PassState::Failed => {
                match_device!(&self.chain, chain => chain.recover(None))?;
                self.begin_chain()?;
            }
        }
        *state = PassState::Running;
        Ok(HostPass { experts: self, left_as: PassState::Failed })
    }

    fn begin_chain(&self) -> crate::Result<()> {
        match_device!(&self.chain, chain => chain.begin(Phase::Forward))
    }
}

/// A forward that runs.
struct HostPass<'a> {
    experts: &'a HostExperts,
    left_as: PassState,
}

impl HostPass<'_> {
    fn end(mut self) -> crate::Result<()> {
        match_device!(&self.experts.chain, chain => chain.end())?;
        // Where the next pass cannot begin, it tells so itself.
        self.left_as = match self.experts.begin_chain() {
            Ok(()) => PassState::Begun,
            Err(_) => PassState::Failed,
        };
        Ok(())
    }
}

impl Drop for HostPass<'_> {
    fn drop(&mut self) {
        *self.experts.state() = self.left_as;
    }
}

/// A chain of this rank alone. One thread serves it, as nothing is reduced; each gather has the time of a layer.
fn chain_on<D: CandleDevice>(device: &D) -> crate::Result<ErasedChain> {
    let beside = device.beside()?;
    let comms = Comms { gather: Box::new(Solo::new(beside.clone())), reduce: Box::new(Solo::new(beside)) };
    let options = EtpOptions { ahead: 2, in_turn: true, ..EtpOptions::default() };
    Ok(D::erase(Arc::new(Chain::new(device.clone(), comms, options)?)))
}

fn placed<D: CandleDevice>(chain: &Arc<Chain<D>>, moe: &ExpertParallelMoE) -> Result<ExpertParallelMoE> {
    let refused = |name: &str, expected: &str, found: String| Error::invalid(CALL, name, expected, found);
    if moe.sharded.is_some() {
        return Err(refused("experts", "whole ones", "shards".into()).into());
    }
    if !chain.device().is(moe.group.device()) {
        return Err(refused("group", "one on the chain's device", D::other(moe.group.device())).into());
    }
    let sharded = match &moe.quantized {
        Some(experts) => {
            let elsewhere = || refused("experts", "quantized ones on the chain's device", "some elsewhere".into());
            let experts = D::downcast(experts).ok_or_else(elsewhere)?;
            ErasedLayerShards::stored(chain, &moe.layer, StoredExperts::Device(experts, ShardPlace::Host))?
        }
        None => {
            let tracked = |kind: &ParamKind| moe.param(*kind).is_some_and(Tensor::track_op);
            if let Some(kind) = [ParamKind::Up, ParamKind::Down].into_iter().find(tracked) {
                return Err(refused(kind.name(), "a frozen weight", "one that is trained".into()).into());
            }
            let copy = |kind: ParamKind| {
                let missing = || refused(kind.name(), "a weight", "none".into());
                host_copy(CALL, kind, moe.param(kind).ok_or_else(missing)?)
            };
            let [up, down] = [copy(ParamKind::Up)?, copy(ParamKind::Down)?];
            ErasedLayerShards::dense_on_host(chain, (&moe.layer, moe.group.local_experts()), [&up, &down])?
        }
    };
    let params = moe.params.as_ref().map(|kind, t: &Option<Tensor>| match kind {
        _ if is_expert_weight(kind) => None,
        // Frozen with the experts.
        ParamKind::UpBias | ParamKind::DownBias => t.as_ref().map(Tensor::detach),
        _ => t.clone(),
    });
    Ok(ExpertParallelMoE { params, quantized: None, sharded: Some(sharded), ..moe.clone() })
}
