//! Ranks without room for what they gather.

use super::*;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{CommError, Error};
use crate::etp::buffers::cache::BufferKey;
use crate::etp::test_ranks::ranks;
use crate::etp::{EtpOptions, Payload, Shard, ShardSource, WeightSpec};

const DIMS: [usize; 2] = [4, 16];

/// Results of both ranks' next gather where rank 1 has no room for a usage of its buffers.
fn without_memory(payload: Payload, usage: BufferUsage, in_turn: bool) -> Vec<[Result<()>; 2]> {
    ranks(2, |comms| {
        let options = EtpOptions { pad: 0, in_turn, ..EtpOptions::default() };
        let chain = Chain::new(Cpu::new(), comms, options).unwrap();
        let shard = Shard::new(Tensor::zeros(&Cpu::new(), DType::F32, &[2, 16]).unwrap());
        let mut spec = WeightSpec::new("w", 0, &DIMS, DType::F32);
        spec.payload = payload;
        let id = chain.add(spec, Arc::new(shard) as Arc<dyn ShardSource<Cpu>>).unwrap();
        chain.begin(Phase::Forward).unwrap();
        let mut inner = chain.lock();
        let active = inner.active.unwrap();
        let node = inner.add_use(id.0, active).unwrap();
        let key = match usage {
            BufferUsage::Amaxes => BufferKey { dims: vec![1], dtype: DType::F32, usage, parity: 0 },
            BufferUsage::Arrived => inner.arrived_key(id.0, 0).unwrap(),
            usage => inner.key(id.0, usage, 0),
        };
        let buffer_id = inner.cache.reserve(key);
        let held = (chain.rank() == 1).then(|| inner.cache.take(buffer_id).unwrap());
        let gather = |inner: &mut ChainState<Cpu>| {
            let pending_gather = inner.begin(node, active, false)?;
            let buffer = inner.finish_gather(pending_gather)?;
            inner.cache.put(buffer);
            Ok(())
        };
        let first = gather(&mut inner);
        held.into_iter().for_each(|buffer| inner.cache.put(buffer));
        [first, gather(&mut inner)]
    })
}

/// The others are told in the gather's turn, so that the collective threads' next collectives meet.
#[test]
fn a_rank_without_memory_refuses_in_its_turn() {
    let cases = [
        (Payload::Plain, BufferUsage::GatheredWeight),
        (Payload::Mxfp8, BufferUsage::Arrived),
        (Payload::Fp8Block, BufferUsage::Arrived),
        (Payload::Nvfp4, BufferUsage::Arrived),
        (Payload::Nvfp4, BufferUsage::Amaxes),
    ];
    for ((payload, usage), in_turn) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        let case = format!("{payload:?} {usage:?}, in turn: {in_turn}");
        let [[refused, met], [own, after]] = <[_; 2]>::try_from(without_memory(payload, usage, in_turn)).unwrap();
        assert!(matches!(refused, Err(Error::Comm(CommError::Refused { peer: 1, .. }))), "{case}: {refused:?}");
        assert!(own.as_ref().is_err_and(|e| e.to_string().contains("in use")), "{case}: {own:?}");
        assert!(met.is_ok() && after.is_ok(), "{case}: {met:?} {after:?}");
    }
}
