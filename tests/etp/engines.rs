//! Communicators that have memory of their own for collectives, as copy engines want it: every body again, and what can go
//! wrong with the memory.

use moebius::cpu::Cpu;
use moebius::etp::{Comms, Phase};
use moebius::{CommError, Error};

use super::changed::Changed;
use super::rig::{MINUTE, ON, Place, ranks};
use super::{bodies, with_memory};

#[test]
fn every_body_with_memory_of_the_communicators() {
    for (file, _, name, run) in bodies::<Cpu>() {
        println!("{file}::{name}");
        with_memory(|| run(&Cpu::new()));
    }
}

/// Lanes with memory, of which `scarce` first requests fail on the gathers' lane.
fn place(place: Place<Cpu>, scarce: usize) -> Place<Cpu> {
    let with = |comm, scarce| Box::new(Changed { memory: Some(place.device), scarce, ..Changed::new(comm) });
    let Comms { gather, reduce } = place.comms;
    Place { comms: Comms { gather: with(gather, scarce), reduce: with(reduce, 0) }, ..place }
}

#[test]
fn a_rank_without_memory_is_told_to_the_others_and_all_recover() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let rig = place(own, usize::from(rank == 1)).rig(ON, 2, false).unwrap();
        assert!(rig.chain.copies_beside());
        let found = rig.pass(Phase::Forward, &[0, 1]).unwrap_err();
        match rank {
            0 => assert!(matches!(&found, Error::Comm(CommError::Refused { peer: 1, .. })), "{found:?}"),
            _ => assert!(matches!(&found, Error::Device { call: "memory", .. }), "{found:?}"),
        }
        rig.chain.recover(None).unwrap();
        rig.pass(Phase::Forward, &[0, 1]).unwrap();
    });
}

#[test]
fn memory_stays_when_a_chain_is_cleared() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let rig = place(own, 0).rig(ON, 2, false).unwrap();
        // The second runs ahead, and needs one buffer more.
        for _ in 0..2 {
            rig.pass(Phase::Forward, &[0, 1]).unwrap();
        }
        let before = (rig.chain.memory().gathered, rig.chain.traffic().allocations);
        if rank == 0 {
            rig.chain.clear();
        }
        rig.pass(Phase::Forward, &[0, 1]).unwrap();
        assert_eq!((rig.chain.memory().gathered, rig.chain.traffic().allocations), before);
    });
}

#[test]
fn ranks_whose_lanes_differ_are_refused() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let own = if rank == 0 { place(own, 0) } else { own };
        let found = own.rig(ON, 1, false).map(drop).unwrap_err();
        assert!(matches!(&found, Error::ConfigMismatch { field, .. } if field == "copies_beside"), "{found:?}");
    });
}
