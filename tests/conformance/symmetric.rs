//! Windows by themselves: bodies for any device.

use moebius::comm::{Op, PeerSignals, Put, Span, SymmetricMemory, Tag};
use moebius::{DType, Error, Tensor};

use super::harness::Target;

fn tag(sequence: u64) -> Tag {
    Tag { layer: 8, op: Op::User, sequence }
}

const BYTES: usize = 10_000;

/// Each rank puts its bytes into the next one's window, round after round, and sees what the one before has put.
pub fn ring<D: Target, C: SymmetricMemory<D>>(mut comm: C, device: &D) {
    let (rank, ranks) = (comm.rank(), comm.size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut window = comm.allocate(tag(0), BYTES).expect("a window");
    let other = comm.allocate(tag(1), 64).expect("another");
    let team = comm.team(&window).expect("a team");
    assert!(team.contains(&rank));
    for peer in 0..ranks {
        let address = comm.address(&window, peer).expect("an address");
        assert_eq!(address.is_some(), team.contains(&peer));
    }
    let bytes = |from: usize, round: usize| -> Vec<f64> {
        (0..1000).map(|i| ((from * 101 + round * 31 + i) % 251) as f64).collect()
    };
    for round in 0..3 {
        // The first half of a window is its owner's, what peers put lies behind it.
        let own = device.put(DType::U8, &bytes(rank, round), &[1000]);
        comm.store(&mut window, 8 * round, own.view()).expect("stored");
        let span = Span { offset: 8 * round, bytes: 1000 };
        comm.put(tag(2), Put { peer: next, from: &window, span, to: &window, offset: 5000 + 1500 * round })
            .expect("put");
        comm.signal(tag(3), next).expect("a signal more");
        comm.wait(tag(4), &[PeerSignals { peer: before, count: 2 }]).expect("both");
        let mut found = Tensor::empty(device, DType::U8, &[1000]).expect("room");
        comm.load(&window, 5000 + 1500 * round, found.view_mut()).expect("loaded");
        assert_eq!(device.values(found.view()), bytes(before, round), "round {round}");
    }
    // Nothing outside a window, and no rank that is not there.
    let span = Span { offset: BYTES - 10, bytes: 11 };
    let outside = comm.put(tag(5), Put { peer: next, from: &window, span, to: &window, offset: 0 });
    assert!(matches!(outside, Err(Error::Invalid { .. })), "{outside:?}");
    let span = Span { offset: 0, bytes: 65 };
    let outside = comm.put(tag(5), Put { peer: next, from: &window, span, to: &other, offset: 0 });
    assert!(matches!(outside, Err(Error::Invalid { .. })), "{outside:?}");
    assert!(matches!(comm.signal(tag(6), ranks), Err(Error::Invalid { .. })));
    comm.release(tag(7), other).expect("released");
    comm.release(tag(8), window).expect("released");
    comm.barrier(tag(9)).expect("the communicator goes on");
}

#[test]
fn windows_between_threads() {
    use moebius::cpu::Cpu;
    for ranks in [2, 3, 8] {
        let comms = moebius::cpu::ThreadWorld::create(ranks, super::harness::TIMEOUT);
        std::thread::scope(|scope| {
            comms.into_iter().for_each(|comm| drop(scope.spawn(|| ring::<Cpu, _>(comm, &Cpu::poisoning()))));
        });
    }
    // Sizes that differ are an error on each; a signal that never comes ends in time.
    let comms = moebius::cpu::ThreadWorld::create(2, std::time::Duration::from_millis(200));
    std::thread::scope(|scope| {
        for mut comm in comms {
            scope.spawn(move || {
                let rank = moebius::comm::Communicator::<Cpu>::rank(&comm);
                assert!(matches!(comm.allocate(tag(0), 8 + rank), Err(Error::Comm(_))));
                let late = comm.wait(tag(1), &[PeerSignals { peer: 1 - rank, count: 1 }]);
                assert!(matches!(late, Err(Error::Comm(moebius::CommError::Timeout { .. }))), "{late:?}");
            });
        }
    });
}
