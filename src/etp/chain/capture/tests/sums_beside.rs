//! Sums over replicas on a thread of their own, and captures.

use super::*;

/// What other ranks are asked of, and sums that threads begin, are in no capture; the step goes on outside.
#[test]
fn sums_beside_backward_are_in_no_capture() {
    let comms = || ThreadWorld::create(2, Duration::from_secs(60));
    thread::scope(|scope| {
        for replicas in comms() {
            scope.spawn(move || {
                let solo = || Box::new(crate::comm::Solo::new(Cpu::poisoning()));
                let two = EtpOptions { replicas: 2, ..options(1, true) };
                let own = Comms { gather: solo(), reduce: solo() };
                let mut rank = Rank::new(own, two, Payload::Plain).unwrap();
                rank.chain = rank.chain.with_replicas(Box::new(replicas)).unwrap();
                rank.passes(0).unwrap();
                let sums = rank.finish().unwrap();
                rank.chain.prepare_capture().unwrap();
                not_capturable(rank.captured(|| rank.chain.last_backward()), "other threads");
                rank.forward().unwrap();
                rank.chain.last_backward().unwrap();
                not_capturable(rank.captured(|| rank.chain.begin(Phase::Backward)), "Chain::last_backward");
                rank.chain.begin(Phase::Backward).unwrap();
                for i in (0..WEIGHTS).rev() {
                    rank.weight(i).unwrap();
                    rank.gradient(i, 0).unwrap();
                }
                rank.chain.end().unwrap();
                not_capturable(rank.captured(|| rank.chain.begin(Phase::Forward)), "under way");
                rank.chain.drain().unwrap();
                not_capturable(rank.captured(|| rank.finish()), "other threads");
                let again = rank.finish().unwrap();
                assert_eq!(again, sums, "the gradients do not depend on the shards");
            });
        }
    });
}
