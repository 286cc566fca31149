//! Shards that are sent quantized: what they cost, and when they are cast.

use std::sync::Arc;

use moebius::comm::ReduceOp;
use moebius::etp::{Comms, EtpOptions, Payload, Phase, Shard, ShardSource, WeightSpec};
use moebius::weights::WeightSource;

use super::faulty_comm::FaultyComm;
use super::test_ranks::{Chained, DIMS, MINUTE, ON, Place, bodies, cut, ranks, tensor, value};

bodies! {
    2 bytes_an_element_in_bf16,
    2 one_cast_a_step,
    2 one_all_reduce_of_amaxes_a_step,
    2 changed_within_a_pass,
    2 draining_what_has_arrived,
    2 added_after_the_first_steps,
    2 shards_of_odd_bytes,
}

/// Three rows of 48 are 81 bytes in NVFP4, 150 in MXFP8 and 156 in fp8 blocks, so without more behind them the second rank's codes would
/// lie where no word of them can be read.
fn shards_of_odd_bytes<D: Chained>(device: &D) {
    const DIMS: [usize; 3] = [1, 6, 48];
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        ranks(device, 2, MINUTE, |_, place| {
            let own = place.device.clone();
            let chain = place.chain(EtpOptions { pad: 1, ..ON }).unwrap();
            let values = (0..288).map(|at| (at * 37 % 101) as f32 - 50.0).collect();
            let whole = moebius::Tensor::from_vec(values, &DIMS).unwrap();
            let cut = chain.shards(&DIMS).unwrap();
            let shard = cut.cut(&own, own.host(&whole).view(), chain.rank()).unwrap();
            let mut spec = WeightSpec::new("w", 0, &DIMS, moebius::DType::F32);
            spec.payload = payload;
            let id = chain.add(spec, Arc::new(Shard::new(shard))).unwrap();
            chain.begin(Phase::Forward).unwrap();
            let source = chain.source(id).unwrap();
            let guard = source.acquire().unwrap();
            let expected = super::world::through(payload, &whole);
            assert_eq!(own.bytes(guard.tensor().unwrap()), expected.as_bytes(), "{payload:?}");
            drop(guard);
            chain.end().unwrap();
            // 81, 150 or 156 bytes of each rank, and what fills them up to 16.
            let each = if payload == Payload::Nvfp4 { 96 } else { 160 };
            assert_eq!(chain.traffic().gathered_bytes, 2 * each, "{payload:?}");
        });
    }
}

/// A weight that is added to a chain whose amaxes are joined: they are joined anew, its own among them.
fn added_after_the_first_steps<D: Chained>(device: &D) {
    for (prefetch, in_turn) in [(true, false), (false, false), (true, true)] {
        ranks(device, 2, MINUTE, |_, place| {
            let own = place.device.clone();
            let chain = place.chain(EtpOptions { prefetch, in_turn, ..ON }).unwrap();
            let mut ids = Vec::new();
            for i in 0..3 {
                let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, moebius::DType::F32);
                spec.payload = Payload::Nvfp4;
                ids.push(chain.add(spec, Arc::new(Shard::new(cut(&own, &chain, value(i))))).unwrap());
                for _ in 0..2 {
                    chain.begin(Phase::Forward).unwrap();
                    for (i, id) in ids.iter().enumerate() {
                        let source = chain.source(*id).unwrap();
                        let guard = source.acquire().unwrap();
                        let expected = super::world::through(Payload::Nvfp4, &tensor(value(i)));
                        assert_eq!(own.bytes(guard.tensor().unwrap()), expected.as_bytes(), "weight {i}");
                    }
                    chain.end().unwrap();
                }
                chain.reset_order().unwrap();
            }
        });
    }
}

/// A weight gathered two steps ahead is given up as it came: no weight's buffer is free for it while one is in use.
fn draining_what_has_arrived<D: Chained>(device: &D) {
    ranks(device, 2, MINUTE, |_, place| {
        let own = place.device.clone();
        let chain = place.chain(EtpOptions { ahead: 2, ..ON }).unwrap();
        let add = |i: usize| {
            let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, moebius::DType::F32);
            spec.payload = Payload::Nvfp4;
            chain.add(spec, Arc::new(Shard::new(cut(&own, &chain, value(i))))).unwrap()
        };
        let ids: Vec<_> = (0..4).map(add).collect();
        let read = |i: usize| {
            let source = chain.source(ids[i]).unwrap();
            let guard = source.acquire().unwrap();
            let expected = super::world::through(Payload::Nvfp4, &tensor(value(i)));
            assert_eq!(own.bytes(guard.tensor().unwrap()), expected.as_bytes(), "weight {i}");
        };
        for _ in 0..2 {
            chain.begin(Phase::Forward).unwrap();
            (0..4).for_each(read);
            chain.end().unwrap();
        }
        chain.begin(Phase::Forward).unwrap();
        let source = chain.source(ids[0]).unwrap();
        let guard = source.acquire().unwrap();
        chain.drain().unwrap();
        drop(guard);
        (1..4).for_each(read);
        chain.end().unwrap();
    });
}

/// A step in bf16 moves 2 bytes of each element in forward, 2 in backward, and 2 of its gradient. Quantized, forward
/// and backward move half a byte and a 16th, or a byte and a 32nd, of each (fp8 blocks: 4 bytes for 128).
fn bytes_an_element_in_bf16<D: Chained>(device: &D) {
    const DIMS: [usize; 3] = [2, 32, 128];
    const COUNT: u64 = 2 * 32 * 128;
    for (payload, expected) in
        [(Payload::Plain, 6.0), (Payload::Nvfp4, 3.125), (Payload::Mxfp8, 4.0625), (Payload::Fp8Block, 4.0625)]
    {
        ranks(device, 2, MINUTE, |_, place| {
            let own = place.device.clone();
            let chain = place.chain(EtpOptions { pad: 0, ..ON }).unwrap();
            let cut = chain.shards(&DIMS).unwrap();
            let shard = moebius::Tensor::zeros(&own, moebius::DType::BF16, &cut.shard_dims()).unwrap();
            let mut spec = WeightSpec::new("w", 0, &DIMS, moebius::DType::BF16);
            spec.payload = payload;
            let id = chain.add(spec, Arc::new(Shard::new(shard))).unwrap();
            for phase in [Phase::Forward, Phase::Backward] {
                chain.begin(phase).unwrap();
                drop(chain.source(id).unwrap().acquire().unwrap());
                chain.end().unwrap();
            }
            let mut buffer = chain.gradient_buffer(id).unwrap();
            own.zero(buffer.view_mut().unwrap().into_data()).unwrap();
            chain.submit(buffer).unwrap();
            chain.drain().unwrap();
            let traffic = chain.traffic();
            let moved = traffic.gathered_bytes + traffic.reduced_bytes;
            assert_eq!(moved as f64 / COUNT as f64, expected, "{payload:?}");
        });
    }
}

/// A shard is cast when it has changed, and at no other time; in NVFP4 behind one all-reduce
/// for all experts of the chain.
fn one_cast_a_step<D: Chained>(device: &D) {
    for payload in [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block] {
        ranks(device, 2, MINUTE, |_, place| {
            let own = place.device.clone();
            let gather = FaultyComm::new(place.comms.gather);
            let joined = Arc::clone(&gather.reduced);
            let gather = Box::new(gather);
            let place = Place { comms: Comms { gather, ..place.comms }, ..place };
            let chain = place.chain(ON).unwrap();
            let shard = |sign: f32| {
                let values = value(0).iter().map(|v| sign * v).collect();
                cut(&own, &chain, values)
            };
            let held = Arc::new(Shard::new(shard(1.0)));
            let mut spec = WeightSpec::new("w", 0, &DIMS, moebius::DType::F32);
            spec.payload = payload;
            let id = chain.add(spec, Arc::clone(&held) as Arc<dyn ShardSource<D>>).unwrap();
            let pass = |phase, sign: f32| {
                chain.begin(phase).unwrap();
                let source = chain.source(id).unwrap();
                let guard = source.acquire().unwrap();
                let found = own.bytes(guard.tensor().unwrap());
                let whole = tensor(value(0).iter().map(|v| sign * v).collect());
                assert_eq!(found, super::world::through(payload, &whole).as_bytes());
                assert_ne!(found, whole.as_bytes());
                drop(guard);
                chain.end().unwrap();
            };
            assert_eq!((chain.traffic().casts, chain.memory().quantized), (0, 0));
            for _ in 0..2 {
                pass(Phase::Forward, 1.0);
                pass(Phase::Backward, 1.0);
            }
            assert_eq!(chain.traffic().casts, 1, "microbatches share it");
            let change = |sign: f32| {
                let new = |t: &mut moebius::Tensor<D>| {
                    *t = shard(sign);
                    Ok(())
                };
                held.update(new).unwrap();
            };
            change(-1.0);
            chain.finish(None, |_, _| Ok(())).unwrap();
            pass(Phase::Forward, -1.0);
            pass(Phase::Backward, -1.0);
            assert_eq!(chain.traffic().casts, 2);
            change(1.0);
            pass(Phase::Forward, -1.0);
            chain.invalidate_casts();
            pass(Phase::Forward, 1.0);
            assert_eq!(chain.traffic().casts, 3);
            // What is saved is the weight itself.
            assert_eq!(own.floats(chain.whole(id).unwrap().view()), value(0));
            assert_eq!(chain.traffic().casts, 3);
            let expected = if payload == Payload::Nvfp4 { 3 } else { 0 };
            // The amaxes of all experts.
            assert_eq!(*joined.lock().unwrap(), vec![(ReduceOp::Max, vec![DIMS[0]]); expected], "{payload:?}");
            assert!(chain.memory().quantized > 0 && chain.memory().arrived > 0);
            chain.clear();
            // Copy engines' memory stays.
            assert_eq!(chain.memory().arrived == 0, !chain.uses_copy_engines());
        });
    }
}

/// However many weights are sent in NVFP4, beside others and whichever is used first.
fn one_all_reduce_of_amaxes_a_step<D: Chained>(device: &D) {
    for (prefetch, ahead) in [(true, 1), (true, 2), (false, 1)] {
        ranks(device, 2, MINUTE, |_, place| {
            let own = place.device.clone();
            let gather = FaultyComm::new(place.comms.gather);
            let joined = Arc::clone(&gather.reduced);
            let place = Place { comms: Comms { gather: Box::new(gather), ..place.comms }, ..place };
            let chain = place.chain(EtpOptions { prefetch, ahead, ..ON }).unwrap();
            let payloads = [Payload::Plain, Payload::Nvfp4, Payload::Mxfp8, Payload::Nvfp4];
            let add = |i: usize| {
                let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, moebius::DType::F32);
                spec.payload = payloads[i];
                chain.add(spec, Arc::new(Shard::new(cut(&own, &chain, value(i))))).unwrap()
            };
            let ids: Vec<_> = (0..4).map(add).collect();
            let pass = |phase, order: [usize; 4]| {
                chain.begin(phase).unwrap();
                for i in order {
                    let source = chain.source(ids[i]).unwrap();
                    let guard = source.acquire().unwrap();
                    let expected = super::world::through(payloads[i], &tensor(value(i)));
                    assert_eq!(own.bytes(guard.tensor().unwrap()), expected.as_bytes(), "weight {i}");
                }
                chain.end().unwrap();
            };
            let order = [3, 0, 2, 1];
            for step in 1..4 {
                for _ in 0..2 {
                    pass(Phase::Forward, order);
                    pass(Phase::Backward, [1, 2, 0, 3]);
                }
                // 3 experts of each of the two.
                assert_eq!(*joined.lock().unwrap(), vec![(ReduceOp::Max, vec![6]); step]);
                assert_eq!(chain.traffic().casts, 3 * step as u64);
                chain.finish(None, |_, _| Ok(())).unwrap();
            }
            let codes = |row: usize| 16 / 2 * row;
            // Rows of two: a byte of codes and one scale, or two of codes and one scale; and 6 amaxes.
            // Each weight's are filled up to 16 bytes.
            assert_eq!(chain.memory().quantized, 2 * codes(2) + codes(4) + 6 * 4);
        });
    }
}

/// Ranks that say it at different points of one pass mean the same: that pass goes on with the casts it began with, on
/// every rank, and the next makes new ones.
fn changed_within_a_pass<D: Chained>(device: &D) {
    for prefetch in [true, false] {
        ranks(device, 2, MINUTE, |rank, place| {
            let own = place.device.clone();
            let chain = place.chain(EtpOptions { prefetch, ..ON }).unwrap();
            let add = |i: usize| {
                let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, moebius::DType::F32);
                spec.payload = Payload::Nvfp4;
                chain.add(spec, Arc::new(Shard::new(cut(&own, &chain, value(i))))).unwrap()
            };
            let ids: Vec<_> = (0..3).map(add).collect();
            // Its casts so far, after a pass in which shards are said to have changed before the read of this number.
            let pass = |changed: Option<usize>| {
                chain.begin(Phase::Forward).unwrap();
                for (i, id) in ids.iter().enumerate() {
                    if changed == Some(i) {
                        chain.invalidate_casts();
                    }
                    let source = chain.source(*id).unwrap();
                    let guard = source.acquire().unwrap();
                    let expected = super::world::through(Payload::Nvfp4, &tensor(value(i)));
                    assert_eq!(own.bytes(guard.tensor().unwrap()), expected.as_bytes(), "weight {i}");
                }
                chain.end().unwrap();
                chain.traffic().casts
            };
            assert_eq!(pass(None), 3);
            assert_eq!(pass(Some(rank)), 3);
            assert_eq!([pass(None), pass(None)], [6, 6]);
        });
    }
}
