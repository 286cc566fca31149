//! Experts and dense weights in chains of different ranks: a failure anywhere, and one recovery of both.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Result as CandleResult, Var};
use moebius::candle::{DeviceGroup, EpGroup, ExpertParallelMoE, GradientType, ShardedWeights, finish_sharded};
use moebius::cpu::Cpu;
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, Payload, Phase};
use moebius::layer::{Layer, ParamKind};

use super::dense_model::{
    EXPERTS, Failure, H, PAIRS, Rank, WORLD, bits, builder, config, flat, ranks, shard, values, whole,
};
use super::test_ranks::MINUTE;
use super::world::mesh;

/// A layer of two ranks of experts by two with the same.
struct Layered {
    dense: Arc<Chain<Cpu>>,
    experts: Arc<Chain<Cpu>>,
    weights: ShardedWeights<'static>,
    moe: ExpertParallelMoE,
}

impl Layered {
    fn new(dense: &Arc<Chain<Cpu>>, group: DeviceGroup, comms: Comms<Cpu>) -> Result<Self, Failure> {
        let experts = Arc::new(Chain::new(Cpu::poisoning(), comms, PAIRS)?);
        let local = EXPERTS / 2;
        let mut own = HashMap::new();
        for kind in ParamKind::ALL {
            let name = format!("moe.{}", kind.name());
            let Some(t) = whole().remove(&name) else { continue };
            let (chain, t) = match kind.is_replicated() {
                true => (dense, t),
                false => (&experts, t.narrow(0, group.rank() * local, local)?.force_contiguous()?),
            };
            own.insert(kind.name().to_string(), shard(chain, &name, &t)?);
        }
        let weights = ShardedWeights::new(dense, builder(own));
        let layer = Layer::new(config(), 1)?;
        let moe = ExpertParallelMoE::all_sharded(layer, &group, &experts, Payload::Plain, &weights)?;
        Ok(Self { dense: Arc::clone(dense), experts, weights, moe })
    }

    fn passes(&self, phase: Phase) -> moebius::Result<()> {
        [&self.dense, &self.experts].iter().try_for_each(|chain| chain.begin(phase))
    }

    fn end(&self) -> moebius::Result<()> {
        [&self.dense, &self.experts].iter().try_for_each(|chain| chain.end())
    }

    /// Bits of all gradients of a step over rows of a width.
    fn step(&self, w: usize, width: usize) -> CandleResult<Vec<Vec<u32>>> {
        let x = Var::from_vec(values(w as u64, 5 * width), (5, width), &Device::Cpu)?;
        self.passes(Phase::Forward)?;
        let out = self.moe.forward_full(&x, None)?;
        let loss = (out.y.sqr()?.sum_all()? + out.aux)?;
        self.end()?;
        self.passes(Phase::Backward)?;
        let mut found = loss.backward()?;
        self.end()?;
        finish_sharded(&self.dense, None, &self.weights.shards(), &mut found, GradientType::AsSummed)?;
        finish_sharded(&self.experts, None, &self.moe.shards(), &mut found, GradientType::AsSummed)?;
        let vars = self.weights.shards().into_iter().chain(self.moe.shards());
        Ok(vars.map(|shard| bits(&flat(found.get(&shard.var).unwrap()))).collect())
    }
}

/// One rank's x is none that the layer takes: it stops behind the router's gather. Its peer in the group hears of it
/// there; the other group's ranks are in the experts' gather by then, where they wait for these two. All recover both
/// chains, whichever each has first, and the next step is what it was.
#[test]
fn one_recovery_of_chains_of_different_ranks() {
    let pairs = || mesh(&Cpu::new(), (WORLD, ""), |w| (w % 2, w / 2), MINUTE).into_iter();
    let groups = mesh(&Cpu::new(), (WORLD, ""), |w| (w / 2, w % 2), MINUTE).into_iter();
    let comms = Mutex::new(groups.zip(pairs().zip(pairs())).map(Some).collect::<Vec<_>>());
    let results = ranks(WORLD, PAIRS, |Rank { w, chain, .. }| {
        let (group, (gather, reduce)) = comms.lock().unwrap()[w].take().ok_or("taken")?;
        let group = EpGroup::new(Group::new(Cpu::poisoning(), group, GroupConfig::new(EXPERTS, 64))?);
        let layered = Layered::new(&chain, group.into(), Comms { gather, reduce })?;
        let expected = layered.step(w, H)?;
        for _failure in 0..3 {
            let error = layered.step(w, if w == 1 { H + 1 } else { H }).unwrap_err().to_string();
            let reason = moebius::Error::Framework { call: "step", framework: "candle", message: error.clone() };
            let mut chains: [&Chain<Cpu>; 3] = [&layered.dense, &layered.experts, &layered.dense];
            chains.rotate_left(w % 3);
            Chain::recover_all(&chains, Some(&reason))?;
            assert_eq!(layered.step(w, H)?, expected);
            if w != 1 {
                assert!(error.contains("failed"), "rank {w}: {error}");
            }
        }
        Ok(())
    });
    results.into_iter().for_each(|r| r.unwrap());
}

#[test]
fn a_chain_that_is_given_twice_recovers_once() {
    let results = ranks(2, PAIRS, |Rank { chain, .. }| {
        chain.begin(Phase::Forward)?;
        Chain::recover_all(&[&chain, &chain], None)?;
        assert!(chain.end().is_err(), "the pass is given up");
        Ok(Chain::<Cpu>::recover_all(&[], None)?)
    });
    results.into_iter().for_each(|r| r.unwrap());
}
