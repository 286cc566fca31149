//! Communicators that have memory of their own for collectives, as copy engines want it: every body again, and what can
//! go wrong with the memory.

use moebius::cpu::Cpu;
use moebius::etp::{Comms, Phase};
use moebius::weights::WeightSource;
use moebius::{CommError, Error, Result};

use super::faulty_comm::FaultyComm;
use super::test_ranks::{MINUTE, ON, Place, holds, ranks, value};
use super::{bodies, with_memory};

#[test]
fn every_body_with_memory_of_the_communicators() {
    for (file, _, name, run) in bodies::<Cpu>() {
        println!("{file}::{name}");
        with_memory(|| run(&Cpu::new()));
    }
}

/// Communicators with memory, of which the `failing_requests` first requests fail on the gathers' collective thread.
fn place(place: Place<Cpu>, failing_requests: usize) -> Place<Cpu> {
    let with = |comm, failing_requests| {
        Box::new(FaultyComm { memory: Some(place.device), failing_requests, ..FaultyComm::new(comm) })
    };
    let Comms { gather, reduce } = place.comms;
    Place { comms: Comms { gather: with(gather, failing_requests), reduce: with(reduce, 0) }, ..place }
}

#[test]
fn a_rank_without_memory_is_told_to_the_others_and_all_recover() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let test = place(own, usize::from(rank == 1)).test_chain(ON, 2, false).unwrap();
        assert!(test.chain.uses_copy_engines());
        let found = test.pass(Phase::Forward, &[0, 1]).unwrap_err();
        match rank {
            0 => assert!(matches!(&found, Error::Comm(CommError::Refused { peer: 1, .. })), "{found:?}"),
            _ => assert!(matches!(&found, Error::Device { call: "memory", .. }), "{found:?}"),
        }
        test.chain.recover(None).unwrap();
        test.pass(Phase::Forward, &[0, 1]).unwrap();
    });
}

/// Copies that fail on a rank, in any of a step's collectives, end the communicators on all: each rank has an error
/// that names it, and recovery says that there is nothing to go on with.
#[test]
fn copies_that_fail_end_the_chain_on_every_rank() {
    // Comparison of options; for each of two weights of the first forward comparisons of payload and buffer, memory and a
    // gather.
    for (purpose, at) in [("gather", 4), ("gather", 7), ("gather", 8), ("gather", 9), ("reduce", 2), ("reduce", 4)] {
        ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
            let with = |comm, name: &str| {
                let fails_from = Some(at).filter(|_| rank == 1 && name == purpose);
                Box::new(FaultyComm {
                    memory: Some(own.device),
                    ends_with_failure: true,
                    fails_from,
                    ..FaultyComm::new(comm)
                })
            };
            let Comms { gather, reduce } = own.comms;
            let comms = Comms { gather: with(gather, "gather"), reduce: with(reduce, "reduce") };
            let test = Place { comms, ..own }.test_chain(ON, 2, false).unwrap();
            let steps = || -> Result<()> {
                for _ in 0..2 {
                    test.pass(Phase::Forward, &[0, 1])?;
                    test.chain.begin(Phase::Backward)?;
                    for i in [1, 0] {
                        test.read(i)?;
                        test.gradient(i, 1.0)?;
                    }
                    test.chain.end()?;
                    test.finish(&[test.sum(1.0); 2])?;
                }
                Ok(())
            };
            let failure = steps().unwrap_err();
            match (rank, &failure) {
                (0, Error::Comm(CommError::Refused { peer: 1, reason, .. }))
                | (1, Error::Comm(CommError::Transport { rank: 1, reason, .. })) => {
                    assert!(reason.contains("an illegal address"), "{reason}");
                }
                other => panic!("{purpose} {at}: {other:?}"),
            }
            let recovered = test.chain.recover(Some(&failure));
            let Err(Error::Comm(CommError::Poisoned { reason, .. })) = &recovered else { panic!("{recovered:?}") };
            assert!(reason.contains("rank 1") && reason.contains("a new chain over new communicators"), "{reason}");
            assert!(steps().is_err(), "{purpose} {at}");
        });
    }
}

#[test]
fn memory_stays_when_a_chain_is_cleared() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let test = place(own, 0).test_chain(ON, 2, false).unwrap();
        // The second runs ahead, and needs one buffer more.
        for _ in 0..2 {
            test.pass(Phase::Forward, &[0, 1]).unwrap();
        }
        let before = (test.chain.memory().gathered, test.chain.traffic().allocations);
        if rank == 0 {
            test.chain.clear();
        }
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        assert_eq!((test.chain.memory().gathered, test.chain.traffic().allocations), before);
    });
}

#[test]
fn ranks_whose_copy_engines_differ_are_refused() {
    ranks(&Cpu::new(), 2, MINUTE, |rank, own| {
        let own = if rank == 0 { place(own, 0) } else { own };
        let found = own.test_chain(ON, 1, false).map(drop).unwrap_err();
        assert!(
            matches!(&found, Error::ConfigMismatch { field, .. } if field == "gather.uses_copy_engines"),
            "{found:?}"
        );
    });
}

/// Which buffers are free in a first forward each rank's own guards decide. Ranks that write each other's memory take
/// the same all the same: also after one that failed, whose weights a rank still holds, and whose order is not the next
/// one's.
#[test]
fn ranks_agree_on_the_buffers_of_a_first_forward() {
    for fails in [false, true] {
        with_memory(|| {
            ranks(&Cpu::new(), 3, MINUTE, |rank, own| {
                let test = own.test_chain(ON, 4, false).unwrap();
                let sources: Vec<_> = test.ids.iter().map(|id| test.chain.source(*id).unwrap()).collect();
                let mut held = Vec::new();
                // Rank 1 holds what it has been given, rank 2 the second.
                let keeps = |n: usize| rank == 1 || rank == 2 && n == 1;
                if fails {
                    test.chain.begin(Phase::Forward).unwrap();
                    for (n, source) in sources[..2].iter().enumerate() {
                        let guard = source.acquire().unwrap();
                        held.extend(keeps(n).then_some(guard));
                    }
                    let broken = Error::Framework { call: "test", framework: "test", message: "an error".into() };
                    if rank != 0 {
                        assert!(sources[2].acquire().is_err());
                    }
                    test.chain.recover((rank == 0).then_some(&broken)).unwrap();
                }
                let order = [3, 1, 0, 2];
                test.chain.begin(Phase::Forward).unwrap();
                for (n, i) in order.into_iter().enumerate() {
                    let guard = sources[i].acquire().unwrap();
                    holds(&test.device, &guard, &value(i));
                    held.extend(keeps(n).then_some(guard));
                }
                test.chain.end().unwrap();
                held.clear();
                for _ in 0..2 {
                    test.pass(Phase::Forward, &order).unwrap();
                    test.pass(Phase::Backward, &[2, 0, 1, 3]).unwrap();
                    for i in [2, 0, 1, 3] {
                        test.gradient(i, i as f32).unwrap();
                    }
                    test.finish(&[0.0, 1.0, 2.0, 3.0].map(|what| test.sum(what))).unwrap();
                }
            });
        });
    }
}
