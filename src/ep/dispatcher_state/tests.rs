//! How ranks count their prepares, over two ranks.

use std::time::Duration;

use super::*;
use crate::comm::ReduceOp;
use crate::cpu::{Cpu, ThreadComm, ThreadWorld};
use crate::ep::{DispatcherKind, HostPlanRequest};

const IDS: [i32; 4] = [0, 1, 1, 0];

fn core(comm: ThreadComm) -> DispatcherState<Cpu> {
    let config = GroupConfig { dispatcher: DispatcherKind::AllGather, ..GroupConfig::new(2, 4) };
    DispatcherState::new(Cpu::default(), Box::new(comm), config)
}

fn on_both(body: impl Fn(DispatcherState<Cpu>) + Sync) {
    std::thread::scope(|threads| {
        for comm in ThreadWorld::create(2, Duration::from_secs(20)) {
            let body = &body;
            threads.spawn(move || body(core(comm)));
        }
    });
}

/// A prepare by records, whose number is to be the same on both ranks.
fn by_records(core: &mut DispatcherState<Cpu>, expected: u64) -> Handle<Cpu> {
    let ids = Tensor::from_vec(IDS.to_vec(), &[2, 2]).expect("ids");
    let spec = DispatchSpec::new(0, 2);
    let handle = core
        .prepare(TransportRules { row_order: RowOrder::Slots, accepted: Ok(()) }, ids.view(), None, &spec)
        .expect("a handle");
    assert_eq!(handle.sequence, expected);
    assert!(core.has_compared(expected) && !core.has_compared(expected + 1));
    handle
}

/// Prepares as a dispatcher that leaves the plan to a library: loads are summed, and the rest is each rank's own.
fn by_loads(core: &mut DispatcherState<Cpu>, own: Result<()>) -> Result<Handle<Cpu>> {
    let spec = DispatchSpec::new(0, 2);
    let tag = Tag { layer: 0, op: Op::Prepare, sequence: core.next() };
    let mut loads = Tensor::from_vec(vec![2_i64, 2], &[2]).expect("loads");
    core.comm.all_reduce(tag, ReduceOp::Sum, loads.view_mut()).map_err(|e| core.as_peer_error(PREPARE, e))?;
    core.count();
    core.check_or_refuse(tag, own)?;
    let request = HostPlanRequest {
        rank: 0,
        ranks: 1,
        num_experts: 2,
        ids: &IDS,
        weights: None,
        tokens: &[2],
        spec: &spec,
        row_order: RowOrder::Local,
    };
    Ok(core.accept(&spec, core.device.plan(request)?))
}

#[test]
fn an_error_behind_the_exchange_leaves_the_ranks_counting_alike() {
    on_both(|mut core| {
        by_records(&mut core, 1);
        let failing = core.rank() == 0;
        let own = if failing { Err(Error::invalid("test", "memory", "some", "none")) } else { Ok(()) };
        match (failing, by_loads(&mut core, own)) {
            (true, Err(Error::Invalid { .. })) => {}
            (false, Ok(handle)) => {
                // Rank 0's error is met where the rows would go.
                let tag = DispatcherState::tag(&handle, Op::Dispatch);
                let met = core.comm.barrier(tag).map_err(|e| core.as_peer_error("dispatch", e));
                assert!(matches!(met, Err(Error::Peer { call: "dispatch", peer: 0, .. })), "{met:?}");
            }
            (_, other) => panic!("{other:?}"),
        }
        let handle = by_loads(&mut core, Ok(())).expect("a handle");
        assert_eq!(handle.sequence, 3);
        core.comm.barrier(DispatcherState::tag(&handle, Op::Dispatch)).expect("both are there");
        by_records(&mut core, 4);
    });
}

#[test]
fn specs_that_differ_are_not_compared_on_any_rank() {
    on_both(|mut core| {
        let ids = Tensor::from_vec(IDS.to_vec(), &[2, 2]).expect("ids");
        let spec = DispatchSpec { alignment: 1 << core.rank(), ..DispatchSpec::new(0, 2) };
        let differs =
            core.prepare(TransportRules { row_order: RowOrder::Slots, accepted: Ok(()) }, ids.view(), None, &spec);
        assert!(matches!(differs, Err(Error::ConfigMismatch { .. })), "{differs:?}");
        assert!(!core.has_compared(1));
        by_records(&mut core, 2);
    });
}
