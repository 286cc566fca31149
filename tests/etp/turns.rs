//! States, order of use, what is in memory when, and errors of one rank's own.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use moebius::comm::{Communicator, Solo};
use moebius::etp::{Chain, CollectiveState, Comms, EtpOptions, Phase, Shard, ShardSource, WeightSpec};
use moebius::weights::WeightSource;
use moebius::{Error, Result, TensorRef};

use super::faulty_comm::FaultyComm;
use super::test_ranks::{COUNT, Chained, DIMS, MINUTE, ON, Place, bodies, cut, holds, ranks, value};

bodies! {
    2 gathers_run_one_step_ahead_in_both_directions,
    2 a_gather_needs_no_help_of_the_thread_that_computes,
    2 without_prefetch_every_gather_is_waited_for,
    2 a_gradient_arrives_one_step_late,
    2 only_what_others_need_is_moved,
    2 draining_in_every_state,
    2 a_finish_that_fails_keeps_every_gradient,
    2 a_recomputed_weight_is_gathered_once_a_backward,
    2 a_weight_used_twice_in_a_pass,
    2 a_step_of_the_optimizer_shows_in_the_next_pass,
    2 what_was_gathered_for_another_pass_is_not_read,
    1 weights_out_of_turn_are_errors,
    1 gradient_buffers,
    1 wrong_arguments,
}

const OFF: EtpOptions = EtpOptions { prefetch: false, ..ON };

fn text(error: Error) -> String {
    assert!(matches!(error, Error::WeightState { .. }), "{error}");
    error.to_string()
}

fn gathers_run_one_step_ahead_in_both_directions<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 3, false).unwrap();
        let gather = |i: usize| test.chain.states(test.ids[i]).0;
        // The first forward knows no order.
        test.pass(Phase::Forward, &[0, 1, 2]).unwrap();
        assert_eq!((test.chain.traffic().gathers, test.chain.traffic().ahead), (3, 0));
        assert_eq!(test.chain.order(), test.ids);
        for (phase, order) in [(Phase::Forward, [0, 1, 2]), (Phase::Backward, [2, 1, 0])] {
            test.chain.begin(phase).unwrap();
            assert_eq!(gather(order[0]), CollectiveState::AsyncWait, "{phase:?}: begun with the pass");
            for (at, i) in order.into_iter().enumerate() {
                let source = test.chain.source(test.ids[i]).unwrap();
                let guard = source.acquire().unwrap();
                holds(&test.device, &guard, &value(i));
                assert_eq!(gather(i), CollectiveState::DataReady, "{phase:?} {i}");
                if let Some(next) = order.get(at + 1) {
                    assert_eq!(gather(*next), CollectiveState::AsyncWait, "{phase:?} {next}");
                }
                drop(guard);
                assert_eq!(gather(i), CollectiveState::None, "{phase:?} {i} after use");
            }
            test.chain.end().unwrap();
        }
        let traffic = test.chain.traffic();
        assert_eq!((traffic.gathers, traffic.ahead), (9, 6));
        // Three weights of one shape, two in memory: as many buffers, of 2 · 8 rows each.
        assert_eq!((traffic.allocations, test.chain.memory().gathered), (2, 2 * 16 * 2 * 4));
        assert_eq!(traffic.gathered_bytes, 9 * 16 * 2 * 4);
    });
}

/// Tells when it is read, and only then lets the reader go on.
#[derive(Debug)]
struct Telling<D: Chained>(Shard<D>, Mutex<Sender<()>>);

impl<D: Chained> ShardSource<D> for Telling<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        let read = self.0.read(visit);
        self.1.lock().unwrap().send(()).unwrap();
        read
    }
}

/// The next weight arrives while the rank's own thread is busy with the present one: nobody waits for it yet.
fn a_gather_needs_no_help_of_the_thread_that_computes<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 2, false).unwrap();
        let (sender, read) = channel();
        let shard = cut(&test.device, &test.chain, value(1));
        test.chain.replace(test.ids[1], Arc::new(Telling(Shard::new(shard), Mutex::new(sender)))).unwrap();
        while read.try_recv().is_ok() {}
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        read.recv_timeout(MINUTE).unwrap();
        test.chain.begin(Phase::Forward).unwrap();
        let source = test.chain.source(test.ids[0]).unwrap();
        let guard = source.acquire().unwrap();
        read.recv_timeout(MINUTE).expect("the gather of w1 is done");
        assert_eq!(test.chain.states(test.ids[1]).0, CollectiveState::AsyncWait);
        drop(guard);
        test.read(1).unwrap();
        test.chain.end().unwrap();
    });
}

fn without_prefetch_every_gather_is_waited_for<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(OFF, 3, false).unwrap();
        for _ in 0..3 {
            test.pass(Phase::Forward, &[0, 1, 2]).unwrap();
        }
        assert_eq!(test.chain.traffic().ahead, 0);
        test.chain.begin(Phase::Backward).unwrap();
        let source = test.chain.source(test.ids[2]).unwrap();
        let guard = source.acquire().unwrap();
        assert_eq!(test.chain.states(test.ids[2]).0, CollectiveState::DataReadySync);
        assert_eq!(test.chain.states(test.ids[1]).0, CollectiveState::None);
        drop(guard);
        test.gradient(2, 1.0).unwrap();
        assert_eq!(test.chain.states(test.ids[2]).1, CollectiveState::None, "nothing is under way");
        test.finish(&[102.0]).unwrap();
    });
}

fn a_gradient_arrives_one_step_late<D: Chained>(device: &D) {
    let n = device.up_to(4);
    ranks(device, n, MINUTE, |_, place| {
        let test = place.test_chain(ON, 3, false).unwrap();
        let reduce = |i: usize| test.chain.states(test.ids[i]).1;
        test.pass(Phase::Forward, &[0, 1, 2]).unwrap();
        test.gradient(2, 2.0).unwrap();
        assert_eq!((reduce(2), reduce(1)), (CollectiveState::AsyncWait, CollectiveState::None));
        assert_eq!(test.chain.memory().main, 0, "nothing has arrived");
        test.gradient(1, 1.0).unwrap();
        assert_eq!((reduce(2), reduce(1)), (CollectiveState::None, CollectiveState::AsyncWait));
        assert_eq!(test.chain.memory().main, 16 / n * 2 * 4, "one weight's shard");
        test.gradient(1, 5.0).unwrap();
        // 0 + 100 + … of the ranks, and each one's own. Weight 0 has had none.
        test.finish(&[test.sum(1.0) + test.sum(5.0), test.sum(2.0)]).unwrap();
        assert_eq!(reduce(1), CollectiveState::None);
        // The next step's start from zero.
        test.gradient(0, 0.0).unwrap();
        test.finish(&[test.sum(0.0), 0.0, 0.0]).unwrap();
    });
}

/// A rank's own share stays where the gradient was made, and the first sum after a step does not read what is there:
/// what it finds decides no bit, not even the sign of a zero.
fn only_what_others_need_is_moved<D: Chained>(device: &D) {
    let n = device.up_to(4);
    for prefetch in [true, false] {
        ranks(device, n, MINUTE, |_, place| {
            let reduce = FaultyComm::new(place.comms.reduce);
            let moved = Arc::clone(&reduce.moved);
            let place = Place { comms: Comms { reduce: Box::new(reduce), ..place.comms }, ..place };
            let test = place.test_chain(EtpOptions { prefetch, ..ON }, 2, false).unwrap();
            test.pass(Phase::Forward, &[0, 1]).unwrap();
            for what in [1.0, f32::INFINITY, -3.0] {
                test.gradient(1, what).unwrap();
                test.finish(&[test.sum(what)]).unwrap();
            }
            let mut buffer = test.chain.gradient_buffer(test.ids[1]).unwrap();
            let zeros = [-0.0f32; COUNT];
            test.device.upload(bytemuck::cast_slice(&zeros), buffer.view_mut().unwrap()).unwrap();
            test.chain.submit(buffer).unwrap();
            let mut found = Vec::new();
            let give = |_, gradient: TensorRef<'_, D>| {
                found.extend(test.device.floats(gradient));
                Ok(())
            };
            test.chain.finish(None, give).unwrap();
            assert!(found.iter().all(|v| v.to_bits() == 0), "{found:?}");
            // Without a gradient it is zeros.
            test.gradient(1, 2.0).unwrap();
            test.gradient(1, 3.0).unwrap();
            test.finish(&[test.sum(2.0) + test.sum(3.0)]).unwrap();
            test.finish(&[0.0]).unwrap();
            test.gradient(0, 5.0).unwrap();
            test.finish(&[test.sum(5.0), 0.0]).unwrap();
            // 12 rows of two, padded to 16, of which a rank's own stay.
            let rows = 16 - 16 / n;
            assert_eq!(*moved.lock().unwrap(), vec![(vec![16, 2], vec![rows, 2]); 7]);
            assert_eq!(test.chain.memory().reduced, rows * 2 * 4);
        });
    }
}

/// Gradients that a rank's finish could not give its next one gives, with the replicas' in them once; in between none can
/// be added. The other replica goes on meanwhile.
fn a_finish_that_fails_keeps_every_gradient<D: Chained>(device: &D) {
    let replicas = device.among(&[0, 1], "replicas", MINUTE).into_iter().map(Some).collect::<Vec<_>>();
    let replicas = Mutex::new(replicas);
    ranks(device, 2, MINUTE, |rank, mut place| {
        let mut comm = replicas.lock().unwrap()[rank].take().unwrap();
        let own = |name| device.among(&[rank], name, MINUTE).remove(0);
        place.comms = Comms { gather: own("gather"), reduce: own("reduce") };
        let test = place.test_chain(EtpOptions { replicas: 2, ..ON }, 2, false).unwrap();
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        let finish = |comm: &mut dyn Communicator<D>, fails: bool| -> Result<Vec<Vec<f32>>> {
            let mut found = Vec::new();
            test.chain.finish(Some(comm), |id, gradient| {
                if fails && id == test.ids[1] {
                    let (operation, message) = ("copy".to_string(), "as told".to_string());
                    return Err(Error::Device { call: "test", operation, message });
                }
                found.push(test.device.floats(gradient));
                Ok(())
            })?;
            Ok(found)
        };
        for step in 0..2 {
            let of = |rank: usize, weight: usize| (10 * step + rank + 3 * weight + 1) as f32;
            test.gradient(1, of(rank, 1)).unwrap();
            test.gradient(0, of(rank, 0)).unwrap();
            if rank == 1 {
                let error = finish(&mut *comm, true).unwrap_err();
                assert!(error.to_string().contains("as told"), "{error}");
                let error = text(test.gradient(0, 5.0).unwrap_err());
                assert!(error.contains("Chain::finish again"), "{error}");
            }
            let found = finish(&mut *comm, false).unwrap();
            let expected = [0, 1].map(|weight| vec![of(0, weight) + of(1, weight); COUNT]);
            assert_eq!(found, expected, "rank {rank}, step {step}");
        }
        // Nothing is left of them.
        assert_eq!(finish(&mut *comm, false).unwrap(), [vec![0.0; COUNT], vec![0.0; COUNT]]);
        // Given up as a whole.
        test.gradient(1, 1.0).unwrap();
        assert!(finish(&mut *comm, true).is_err());
        test.chain.recover(None).unwrap();
        test.gradient(1, 4.0).unwrap();
        let found = finish(&mut *comm, false).unwrap();
        assert_eq!(found, [vec![8.0; COUNT]]);
    });
}

fn draining_in_every_state<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 4, true).unwrap();
        let states = |i: usize| test.chain.states(test.ids[i]);
        test.chain.drain().unwrap();
        test.pass(Phase::Forward, &[0, 1, 2, 3]).unwrap();
        test.chain.drain().unwrap();
        test.chain.begin(Phase::Forward).unwrap();
        test.read(0).unwrap();
        assert_eq!(states(1).0, CollectiveState::AsyncWait);
        test.chain.drain().unwrap();
        assert_eq!(states(1).0, CollectiveState::None);
        // Gathered anew; and while it is in use, with the next under way.
        let source = test.chain.source(test.ids[1]).unwrap();
        let guard = source.acquire().unwrap();
        assert_eq!((states(1).0, states(2).0), (CollectiveState::DataReadySync, CollectiveState::AsyncWait));
        test.chain.drain().unwrap();
        holds(&test.device, &guard, &value(1));
        drop(guard);
        let source = test.chain.source(test.ids[2]).unwrap();
        drop(source.acquire().unwrap());
        let source = test.chain.source(test.ids[3]).unwrap();
        let guard = source.acquire().unwrap();
        assert_eq!(states(3).0, CollectiveState::DataReady);
        test.chain.drain().unwrap();
        holds(&test.device, &guard, &value(3));
        drop(guard);
        test.chain.end().unwrap();
        // A weight that is kept from its recomputation on is gathered again.
        test.chain.begin(Phase::Backward).unwrap();
        test.read(2).unwrap();
        assert_ne!(states(2).0, CollectiveState::None, "kept");
        test.chain.drain().unwrap();
        assert_eq!(states(2).0, CollectiveState::None);
        for i in [3, 2, 0, 1, 0] {
            test.read(i).unwrap();
        }
        test.chain.end().unwrap();
        test.gradient(3, 0.0).unwrap();
        assert_eq!(states(3).1, CollectiveState::AsyncWait);
        test.chain.drain().unwrap();
        assert_eq!((states(3).1, test.chain.memory().main), (CollectiveState::None, 8 * 2 * 4));
        test.chain.drain().unwrap();
        test.finish(&[100.0]).unwrap();
        // The cache forgets its memory, but copy engines', not its buffer ids.
        test.chain.clear();
        assert_eq!(test.chain.memory().gathered == 0, !test.chain.uses_copy_engines());
        test.pass(Phase::Forward, &[0, 1, 2, 3]).unwrap();
    });
}

fn a_recomputed_weight_is_gathered_once_a_backward<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 4, true).unwrap();
        test.pass(Phase::Forward, &[0, 1, 2, 3]).unwrap();
        let before = test.chain.traffic().gathers;
        test.pass(Phase::Backward, &[2, 3, 2, 0, 1, 0]).unwrap();
        assert_eq!(test.chain.traffic().gathers - before, 4);
    });
}

fn a_weight_used_twice_in_a_pass<D: Chained>(device: &D) {
    for options in [ON, OFF] {
        ranks(device, 2, MINUTE, |_, place| {
            let test = place.test_chain(options, 3, false).unwrap();
            let order = [0, 1, 0, 0, 2];
            test.pass(Phase::Forward, &order).unwrap();
            for _ in 0..2 {
                test.pass(Phase::Forward, &order).unwrap();
                test.pass(Phase::Backward, &[2, 0, 0, 1, 0]).unwrap();
                for i in [2, 0, 0, 1, 0] {
                    test.gradient(i, 1.0).unwrap();
                }
            }
            test.finish(&[6.0 * 102.0, 2.0 * 102.0, 2.0 * 102.0]).unwrap();
        });
    }
}

fn a_step_of_the_optimizer_shows_in_the_next_pass<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 2, false).unwrap();
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        let changed: Vec<f32> = value(1).iter().map(|v| -v).collect();
        let shard = cut(&test.device, &test.chain, changed.clone());
        test.shards[1]
            .update(|t| {
                *t = shard;
                Ok(())
            })
            .unwrap();
        test.chain.begin(Phase::Forward).unwrap();
        test.read(0).unwrap();
        let source = test.chain.source(test.ids[1]).unwrap();
        holds(&test.device, &source.acquire().unwrap(), &changed);
        test.chain.end().unwrap();
        assert_eq!(test.device.floats(test.chain.whole(test.ids[1]).unwrap().view()), changed);
        // Another object in its place.
        let shard = cut(&test.device, &test.chain, value(7));
        test.chain.replace(test.ids[1], Arc::new(Shard::new(shard))).unwrap();
        test.chain.begin(Phase::Backward).unwrap();
        holds(&test.device, &source.acquire().unwrap(), &value(7));
        test.read(0).unwrap();
        test.chain.end().unwrap();
    });
}

fn what_was_gathered_for_another_pass_is_not_read<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let test = place.test_chain(ON, 2, false).unwrap();
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        test.chain.begin(Phase::Forward).unwrap();
        test.read(0).unwrap();
        let source = test.chain.source(test.ids[1]).unwrap();
        let guard = source.acquire().unwrap();
        holds(&test.device, &guard, &value(1));
        test.chain.end().unwrap();
        let error = text(guard.tensor().unwrap_err());
        assert!(error.contains("w1") && error.contains("pass 2"), "{error}");
        // Nor is its memory gathered over while somebody holds it.
        test.chain.begin(Phase::Backward).unwrap();
        assert!(text(guard.tensor().unwrap_err()).contains("in pass 3"));
        assert!(text(source.acquire().unwrap_err()).contains("DataReady"));
        drop(guard);
        test.read(1).unwrap();
        test.read(0).unwrap();
        test.chain.end().unwrap();
    });
}

fn weights_out_of_turn_are_errors<D: Chained>(device: &D) {
    ranks(device, 1, MINUTE, |_, place| {
        let test = place.test_chain(ON, 3, false).unwrap();
        let read = |i: usize| text(test.read(i).unwrap_err());
        assert!(read(0).contains("expected a pass, found none"));
        assert!(text(test.chain.end().unwrap_err()).contains("expected a pass"));
        assert!(text(test.chain.begin(Phase::Backward).unwrap_err()).contains("a forward before a backward"));
        assert!(text(test.gradient(0, 0.0).unwrap_err()).contains("a forward before its gradient"));
        test.pass(Phase::Forward, &[0, 1, 2]).unwrap();
        test.chain.begin(Phase::Forward).unwrap();
        assert!(text(test.chain.begin(Phase::Forward).unwrap_err()).contains("not ended"));
        test.read(0).unwrap();
        let error = read(2);
        assert!(error.contains("w2") && error.contains("w1 next"), "{error}");
        assert!(text(test.chain.end().unwrap_err()).contains("1 of 3"));
        assert!(text(test.chain.whole(test.ids[0]).unwrap_err()).contains("between passes"));
        assert!(text(test.chain.reset_order().unwrap_err()).contains("one that runs"));
        test.read(1).unwrap();
        test.read(2).unwrap();
        assert!(read(0).contains("the end of the pass next"));
        test.chain.end().unwrap();
        let shard = Arc::new(Shard::new(moebius::Tensor::zeros(&test.device, moebius::DType::F32, &[12, 2]).unwrap()));
        let spec = WeightSpec::new("late", 0, &DIMS, moebius::DType::F32);
        assert!(text(test.chain.add(spec, shard).unwrap_err()).contains("before the first forward"));
        // A changed model sets another order.
        test.chain.reset_order().unwrap();
        test.pass(Phase::Forward, &[2, 0]).unwrap();
        test.pass(Phase::Backward, &[0, 2]).unwrap();
        assert_eq!(test.chain.order(), [test.ids[2], test.ids[0]]);
    });
}

fn gradient_buffers<D: Chained>(device: &D) {
    ranks(device, 1, MINUTE, |_, place| {
        let test = place.test_chain(ON, 2, false).unwrap();
        test.pass(Phase::Forward, &[0, 1]).unwrap();
        let buffer = test.chain.gradient_buffer(test.ids[0]).unwrap();
        assert!(test.chain.gradient_buffer(test.ids[0]).is_err(), "its buffer is out");
        drop(buffer);
        let buffer = test.chain.gradient_buffer(test.ids[0]).unwrap();
        // Two models of one process do not meet.
        let solo = || Box::new(Solo::new(test.device.clone()));
        let comms = Comms { gather: solo(), reduce: solo() };
        let place = Place { device: test.device.clone(), comms };
        let other = place.test_chain(ON, 2, false).unwrap();
        assert!(text(other.chain.submit(buffer).unwrap_err()).contains("another chain's"));
        other.pass(Phase::Forward, &[1, 0]).unwrap();
        other.gradient(1, 3.0).unwrap();
        test.gradient(0, 4.0).unwrap();
        other.finish(&[3.0]).unwrap();
        test.finish(&[4.0]).unwrap();
        assert_eq!((other.chain.order()[0], test.chain.order()[0]), (other.ids[1], test.ids[0]));
    });
}

fn wrong_arguments<D: Chained>(device: &D) {
    ranks(device, 1, MINUTE, |_, place| {
        let own = place.device.clone();
        let chain: Chain<D> = place.chain(ON).unwrap();
        let shard = |dims: &[usize]| -> Arc<dyn ShardSource<D>> {
            Arc::new(Shard::new(moebius::Tensor::zeros(&own, moebius::DType::F32, dims).unwrap()))
        };
        let spec = |dims: &[usize], dtype| WeightSpec::new("w", 0, dims, dtype);
        let float = moebius::DType::F32;
        assert!(matches!(chain.add(spec(&DIMS, float), shard(&[11, 2])), Err(Error::Shape { .. })));
        assert!(matches!(chain.add(spec(&DIMS, moebius::DType::BF16), shard(&[12, 2])), Err(Error::DType { .. })));
        assert!(chain.add(spec(&DIMS, moebius::DType::I32), shard(&[12, 2])).is_err());
        assert!(chain.add(spec(&[24], float), shard(&[12, 2])).is_err());
        let id = chain.add(spec(&DIMS, float), shard(&[12, 2])).unwrap();
        assert!(matches!(chain.replace(id, shard(&[13, 2])), Err(Error::Shape { .. })));
        let mut odd = spec(&[2, 4, 3], float);
        odd.payload = moebius::etp::Payload::Nvfp4;
        assert!(chain.add(odd, shard(&[8, 3])).unwrap_err().to_string().contains("even"));
        let mut two = FaultyComm { size: Some(2), ..FaultyComm::new(Box::new(Solo::new(own.clone()))) };
        let error = chain.finish(Some(&mut two), |_, _| Ok(())).unwrap_err().to_string();
        assert!(error.contains("replicas") && error.contains("expected 1, found 2"), "{error}");
    });
}
