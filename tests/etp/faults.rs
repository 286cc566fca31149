//! Ranks that fail, disagree or leave.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moebius::etp::{EtpOptions, NewShard, Payload, Phase, Reduction, Shard, ShardSource, WeightSpec};
use moebius::weights::WeightSource;
use moebius::{CommError, DType, Error, Result, Tensor, TensorRef};

use super::limits::{Countdown, in_time};
use super::test_ranks::{Chained, DIMS, MINUTE, ON, bodies, cut, has_memory, ranks, value};

bodies! {
    2 one_rank_fails_and_all_recover,
    2 a_rank_that_leaves,
    2 a_rank_that_never_comes,
    2 shards_that_cannot_be_cast,
    2 shards_of_wrong_size,
    2 weights_that_differ_between_ranks,
    2 payloads_that_differ_between_ranks,
    2 options_that_differ_between_ranks,
    2 a_shard_that_panics,
    2 weights_of_a_layer_are_taken_together,
}

fn broken() -> Error {
    Error::Framework { call: "test", framework: "test", message: "out of luck".into() }
}

/// A rank that fails tells the others, wherever they are, and all go on afterwards.
fn one_rank_fails_and_all_recover<D: Chained>(device: &D) {
    for (prefetch, in_turn) in [(true, false), (false, false), (true, true), (false, true)] {
        // Rank 1 stops before its n-th weight of a forward, or its n-th gradient of a backward.
        for (phase, at) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)] {
            let outcomes = ranks(device, device.up_to(3), MINUTE, |rank, place| -> Result<()> {
                let test = place.test_chain(EtpOptions { prefetch, in_turn, ..ON }, 3, false)?;
                if phase > 0 {
                    test.pass(Phase::Forward, &[0, 1, 2])?;
                }
                let failing = |n: usize| if rank == 1 && n == at { Err(broken()) } else { Ok(()) };
                let step = || -> Result<()> {
                    test.chain.begin(if phase == 2 { Phase::Backward } else { Phase::Forward })?;
                    let order = if phase == 2 { [2, 1, 0] } else { [0, 1, 2] };
                    for (n, i) in order.into_iter().enumerate() {
                        failing(n)?;
                        test.read(i)?;
                        if phase == 2 {
                            test.gradient(i, 1.0)?;
                        }
                    }
                    test.chain.end()?;
                    // In backward the failing rank owes at least one gradient.
                    if phase == 2 { test.finish(&[test.sum(1.0); 3]) } else { Ok(()) }
                };
                match step() {
                    Err(Error::Framework { .. }) if rank == 1 => {}
                    Err(Error::Comm(CommError::Refused { peer: 1, reason, .. })) => {
                        assert!(reason.contains("out of luck"), "{reason}");
                    }
                    // A rank may also learn it from a peer that is on its way to recovery.
                    Err(Error::Comm(CommError::TagMismatch { .. })) if rank != 1 => {}
                    // Its last gather was under way when it failed.
                    Ok(()) if rank != 1 && prefetch && (phase, at) == (1, 2) => {}
                    other => panic!("rank {rank}, phase {phase}, at {at}: {other:?}"),
                }
                test.chain.recover((rank == 1).then(broken).as_ref().map(|reason| reason as _))?;
                test.pass(Phase::Forward, &[0, 1, 2])?;
                test.chain.begin(Phase::Backward)?;
                for i in [2, 1, 0] {
                    test.read(i)?;
                    test.gradient(i, i as f32)?;
                }
                test.chain.end()?;
                // Nothing is left of the failed step.
                test.finish(&[0.0, 1.0, 2.0].map(|what| test.sum(what)))
            });
            outcomes.into_iter().for_each(|outcome| outcome.unwrap());
        }
    }
}

fn a_rank_that_leaves<D: Chained>(device: &D) {
    let last = device.up_to(3) - 1;
    for submit in [false, true] {
        let outcomes = ranks(device, device.up_to(3), MINUTE, |rank, place| -> Result<()> {
            let test = place.test_chain(EtpOptions::default(), 3, false)?;
            test.pass(Phase::Forward, &[0, 1, 2])?;
            test.chain.begin(Phase::Backward)?;
            test.read(2)?;
            if submit {
                test.gradient(2, 0.0)?;
            }
            if rank == last {
                return Ok(());
            }
            let rest = || {
                test.read(1)?;
                test.gradient(1, 0.0)?;
                test.read(0)?;
                test.finish(&[])
            };
            let outcome = rest();
            // Which does not bring the rank back, and says so.
            let recovered = test.chain.recover(outcome.as_ref().err().map(|error| error as _));
            let Err(Error::Comm(CommError::Poisoned { reason, .. })) = recovered else { panic!("{recovered:?}") };
            assert!(reason.contains("has left the group; a new chain"), "{reason}");
            outcome
        });
        assert!(outcomes[last].is_ok());
        for outcome in &outcomes[..last] {
            let gone = matches!(outcome, Err(Error::Comm(CommError::PeerGone { peer, .. })) if *peer == last);
            assert!(gone, "{outcome:?}");
        }
    }
}

fn a_rank_that_never_comes<D: Chained>(device: &D) {
    let error = in_time(Duration::from_millis(200), |limit| {
        let over = Countdown::new(1);
        let mut outcomes = ranks(device, 2, limit, |rank, place| -> Option<Result<()>> {
            let counted = (rank == 0).then(|| over.counted());
            // Both ranks have a chain, or neither: a rank may be late for its making.
            let test = match place.test_chain(EtpOptions::default(), 2, false) {
                Ok(test) => test,
                Err(Error::Comm(CommError::Timeout { .. } | CommError::Poisoned { .. })) => return None,
                Err(error) => return Some(Err(error)),
            };
            let read = (rank == 0).then(|| test.pass(Phase::Forward, &[0]));
            drop(counted);
            // The other's chain lives until this one has given up.
            over.wait();
            read
        });
        outcomes.swap_remove(0)
    });
    let lost = matches!(&error, Err(Error::Comm(CommError::Timeout { missing, .. })) if missing == &[1]);
    assert!(lost, "{error:?}");
}

/// A shard that changes its size behind the chain's back.
#[derive(Debug)]
struct Shrinking<D: Chained> {
    whole: Tensor<D>,
    small: Tensor<D>,
    shrunk: AtomicBool,
}

impl<D: Chained> ShardSource<D> for Shrinking<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        visit(if self.shrunk.load(Ordering::SeqCst) { self.small.view() } else { self.whole.view() })
    }
}

/// A chain that cannot send one of a layer's weights takes none of them, whichever it is, and trains other layers as a
/// chain that was never asked.
fn weights_of_a_layer_are_taken_together<D: Chained>(device: &D) {
    let run = |asked: bool| {
        let outcomes = ranks(device, 2, MINUTE, |rank, place| -> Result<_> {
            let own = place.device.clone();
            let mut test = place.test_chain(ON, 0, false)?;
            let new = |name: &str, dims: [usize; 3], dtype, payload| -> Result<NewShard<D>> {
                let shard = Tensor::zeros(&own, dtype, &test.chain.shards(&dims)?.shard_dims())?;
                let mut spec = WeightSpec::new(name, 0, &dims, dtype);
                spec.payload = payload;
                Ok(NewShard::new(spec, Arc::new(Shard::new(shard))))
            };
            let even = || new("up", [3, 4, 2], DType::F32, Payload::Nvfp4);
            let wide = "rows of an even number of elements, to be sent in NVFP4";
            let odd = [
                (new("down", [3, 2, 5], DType::F32, Payload::Nvfp4)?, wide, "5 elements"),
                (new("down", [3, 2, 4], DType::F64, Payload::Nvfp4)?, "f32, bf16 or f16, to be sent quantized", "f64"),
                (new("down", [3, 2, 4], DType::F64, Payload::Mxfp8)?, "f32, bf16 or f16, to be sent quantized", "f64"),
                (new("down", [3, 2, 4], DType::I32, Payload::Plain)?, "a floating type", "i32"),
            ];
            for (down, needs, has) in odd.into_iter().filter(|_| asked) {
                let tries = [
                    test.chain.check(&[even()?, down.clone()]),
                    test.chain.add_all([even()?, down.clone()]).map(drop),
                    test.chain.add_all([down, even()?]).map(drop),
                ];
                for error in tries.map(|tried| tried.unwrap_err()) {
                    let Error::Shard { call, rank: at, weight, expected, found } = &error else { panic!("{error:?}") };
                    assert_eq!((*call, *at, &weight[..]), ("Chain::add", rank, "down"), "{error}");
                    assert_eq!((&expected[..], &found[..]), (needs, has), "{error}");
                }
            }
            (0..2).try_for_each(|_| test.add(false))?;
            for step in [1.0, 2.0] {
                test.pass(Phase::Forward, &[0, 1])?;
                test.chain.begin(Phase::Backward)?;
                for i in [1, 0] {
                    test.read(i)?;
                    test.gradient(i, step)?;
                }
                test.chain.end()?;
                test.finish(&[test.sum(step); 2])?;
            }
            Ok((test.ids.clone(), test.chain.order(), test.chain.memory()))
        });
        outcomes.into_iter().map(|outcome| outcome.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(format!("{:?}", run(true)), format!("{:?}", run(false)));
}

/// A rank that cannot cast a shard, the first or one that is gathered ahead, tells the others, in the amaxes'
/// all-reduce or in the gather.
fn shards_that_cannot_be_cast<D: Chained>(device: &D) {
    let payloads = [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block];
    for (payload, odd) in payloads.into_iter().flat_map(|payload| [(payload, 0), (payload, 1)]) {
        let outcomes = ranks(device, 2, MINUTE, |rank, place| -> Result<()> {
            let device = place.device.clone();
            let chain = place.chain(EtpOptions::default())?;
            let (mut ids, mut shards) = (Vec::new(), Vec::new());
            for i in 0..2 {
                let whole = cut(&device, &chain, value(i));
                let small = Tensor::zeros(&device, DType::F32, &[1, 2])?;
                let shard = Arc::new(Shrinking { whole, small, shrunk: AtomicBool::new(false) });
                let mut spec = WeightSpec::new(format!("w{i}"), i as u32, &DIMS, DType::F32);
                spec.payload = payload;
                ids.push(chain.add(spec, Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?);
                shards.push(shard);
            }
            let pass = || -> Result<Vec<Vec<u8>>> {
                chain.begin(Phase::Forward)?;
                let mut seen = Vec::new();
                for id in &ids {
                    let source = chain.source(*id)?;
                    seen.push(device.bytes(source.acquire()?.tensor()?));
                }
                chain.end()?;
                Ok(seen)
            };
            let before = pass()?;
            chain.invalidate_casts();
            shards[odd].shrunk.store(rank == 1, Ordering::SeqCst);
            let error = pass().unwrap_err();
            match (&error, rank) {
                (Error::Shape { .. }, 1) | (Error::Comm(CommError::Refused { peer: 1, .. }), 0) => {}
                other => panic!("{other:?}"),
            }
            shards[odd].shrunk.store(false, Ordering::SeqCst);
            chain.recover(Some(&error))?;
            assert_eq!(pass()?, before);
            Ok(())
        });
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
    }
}

fn shards_of_wrong_size<D: Chained>(device: &D) {
    let outcomes = ranks(device, 2, MINUTE, |rank, place| -> Result<String> {
        let test = place.test_chain(EtpOptions::default(), 1, false)?;
        let whole = cut(&test.device, &test.chain, value(0));
        let small = Tensor::zeros(&test.device, DType::F32, &[1, 2])?;
        let shard = Arc::new(Shrinking { whole, small, shrunk: AtomicBool::new(false) });
        test.chain.replace(test.ids[0], Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?;
        test.pass(Phase::Forward, &[0])?;
        shard.shrunk.store(rank == 1, Ordering::SeqCst);
        let error = test.pass(Phase::Forward, &[0]).unwrap_err();
        match (&error, rank) {
            (Error::Shape { .. }, 1) | (Error::Comm(CommError::Refused { peer: 1, .. }), 0) => {}
            other => panic!("{other:?}"),
        }
        shard.shrunk.store(false, Ordering::SeqCst);
        test.chain.recover(None)?;
        test.pass(Phase::Forward, &[0])?;
        Ok(error.to_string())
    });
    for outcome in outcomes {
        let text = outcome.unwrap();
        assert!(text.contains("[16, 2]") && text.contains("[1, 2]"), "{text}");
    }
}

/// Ranks whose weights are of different sizes: nobody's fault alone, so all hear of both sizes.
fn weights_that_differ_between_ranks<D: Chained>(device: &D) {
    let outcomes = ranks(device, 2, MINUTE, |rank, place| -> Result<()> {
        let own = place.device.clone();
        let chain = place.chain(EtpOptions::default())?;
        let dims = [4, 2 + rank];
        let shard = Shard::new(Tensor::zeros(&own, DType::F32, &[16, 2 + rank])?);
        let id = chain.add(WeightSpec::new("w", 0, &dims, DType::F32), Arc::new(shard))?;
        chain.whole(id).map(drop)
    });
    for outcome in outcomes {
        assert!(matches!(outcome, Err(Error::Comm(CommError::SizeMismatch { .. }))), "{outcome:?}");
    }
}

/// Rank 1 sends a weight's shards otherwise than the others, or acquires another weight: each rank hears of both and gathers
/// nothing of them. Rows of 128 elements have as many bytes in MXFP8 as in fp8 blocks, and both weights are of one layer, so
/// no gather would find sizes or tags that differ.
fn payloads_that_differ_between_ranks<D: Chained>(device: &D) {
    use Payload::{Fp8Block, Mxfp8, Nvfp4, Plain};
    for (payload, odd) in [(Mxfp8, Fp8Block), (Fp8Block, Mxfp8), (Mxfp8, Nvfp4), (Plain, Mxfp8)] {
        let other = FirstForward { payloads: [payload, odd], order: [0, 1] };
        let all = FirstForward { payloads: [payload; 2], ..other };
        differ_in(device, all, other, "payload of down", [payload, odd].map(|payload| format!("{payload:?}")), 1);
    }
    // The turns of different weights, whose payloads may be the same, or differ without being one weight's.
    for payloads in [[Plain; 2], [Mxfp8; 2], [Mxfp8, Fp8Block]] {
        let all = FirstForward { payloads, order: [0, 1] };
        let other = FirstForward { order: [1, 0], ..all };
        differ_in(device, all, other, "weight whose turn it is", ["up", "down"].map(str::to_string), 0);
    }
}

/// What a rank has of two weights, of one layer and as large as each other, and in which order it acquires them.
#[derive(Debug, Clone, Copy)]
struct FirstForward {
    payloads: [Payload; 2],
    order: [usize; 2],
}

/// Rank 1 does a first forward other than all others': each rank is told of the field, after so many gathers.
fn differ_in<D: Chained>(
    device: &D,
    all: FirstForward,
    other: FirstForward,
    field: &str,
    [value, odd]: [String; 2],
    gathers: u64,
) {
    const DIMS: [usize; 3] = [2, 6, 128];
    let outcomes = ranks(device, device.up_to(3), MINUTE, |rank, place| -> Result<()> {
        let own = place.device.clone();
        let chain = place.chain(ON)?;
        let FirstForward { payloads, order } = if rank == 1 { other } else { all };
        let add = |name: &str, payload| {
            let shard = Tensor::zeros(&own, DType::F32, &chain.shards(&DIMS)?.shard_dims())?;
            let mut spec = WeightSpec::new(name, 0, &DIMS, DType::F32);
            spec.payload = payload;
            chain.add(spec, Arc::new(Shard::new(shard)) as Arc<dyn ShardSource<D>>)
        };
        let ids = [add("up", payloads[0])?, add("down", payloads[1])?];
        chain.begin(Phase::Forward)?;
        let outcome = order.into_iter().try_for_each(|i| chain.source(ids[i])?.acquire().map(drop));
        assert_eq!(chain.traffic().gathers, gathers, "{outcome:?}");
        // All meet there, as after any failed step.
        chain.recover(outcome.as_ref().err().map(|error| error as _))?;
        outcome
    });
    for (at, outcome) in outcomes.into_iter().enumerate() {
        let Err(Error::ConfigMismatch { field: found, rank, value: own, peer, peer_value, .. }) = outcome else {
            panic!("{all:?}, {other:?}: rank {at}: {outcome:?}")
        };
        let values = if at == 1 { [&odd, &value] } else { [&value, &odd] };
        assert_eq!((&found[..], [&own, &peer_value]), (field, values));
        assert_eq!((rank, peer), (at, usize::from(at != 1)));
    }
}

fn options_that_differ_between_ranks<D: Chained>(device: &D) {
    let others = [
        ("pad", EtpOptions { pad: 32, ..EtpOptions::default() }),
        ("reduction", EtpOptions { reduction: Reduction::Pairwise, ..EtpOptions::default() }),
        ("scale", EtpOptions { scale: moebius::etp::Scale::Mean, ..EtpOptions::default() }),
        ("replicas", EtpOptions { replicas: 2, ..EtpOptions::default() }),
        ("in_turn", EtpOptions { in_turn: true, ..EtpOptions::default() }),
        ("prefetch", EtpOptions { prefetch: false, ..EtpOptions::default() }),
        ("ahead", EtpOptions { ahead: 2, ..EtpOptions::default() }),
        ("seed", EtpOptions { seed: 1, ..EtpOptions::default() }),
    ];
    for (name, other) in others {
        let outcomes = ranks(device, 2, MINUTE, |rank, place| {
            let options = if rank == 1 { other } else { EtpOptions::default() };
            place.chain(options).map(drop)
        });
        for outcome in outcomes {
            let Err(Error::ConfigMismatch { call: "Chain::new", field, value, peer_value, .. }) = &outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(field, name);
            let mut values = [&value[..], peer_value];
            values.sort_unstable();
            match name {
                "reduction" => assert_eq!(values, ["Native", "Pairwise"]),
                "scale" => assert_eq!(values, ["Mean", "Sum"]),
                "in_turn" | "prefetch" => assert_eq!(values, ["false", "true"]),
                _ => {}
            }
        }
    }
}

/// A shard whose reading panics takes its helper thread along: an error here, a rank that has left there. With memory
/// of the communicators' it is read by whoever asks for the weight, and the panic is theirs.
#[derive(Debug)]
struct Panicking<D: Chained>(AtomicBool, Shard<D>);

impl<D: Chained> ShardSource<D> for Panicking<D> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, D>) -> Result<()>) -> Result<()> {
        if self.0.load(Ordering::SeqCst) {
            // Unwinds without the hook's noise.
            std::panic::resume_unwind(Box::new("a shard's own error"));
        }
        self.1.read(visit)
    }
}

fn a_shard_that_panics<D: Chained>(device: &D) {
    let outcomes = ranks(device, 2, MINUTE, |rank, place| -> Result<()> {
        let test = place.test_chain(EtpOptions::default(), 1, false)?;
        let shard = cut(&test.device, &test.chain, value(0));
        let shard = Arc::new(Panicking(AtomicBool::new(false), Shard::new(shard)));
        test.chain.replace(test.ids[0], Arc::clone(&shard) as Arc<dyn ShardSource<D>>)?;
        shard.0.store(rank == 1, Ordering::SeqCst);
        let passed = catch_unwind(AssertUnwindSafe(|| test.pass(Phase::Forward, &[0])));
        passed.unwrap_or_else(|panic| {
            let message = panic.downcast_ref::<&str>().expect("the shard's own").to_string();
            Err(Error::Device { call: "test", operation: "read a shard".into(), message })
        })
    });
    assert!(matches!(outcomes[0], Err(Error::Comm(CommError::PeerGone { peer: 1, .. }))), "{:?}", outcomes[0]);
    let text = outcomes[1].as_ref().unwrap_err().to_string();
    let ended = text.contains("gather collective thread") && text.contains("has ended");
    assert!(if has_memory() { text.contains("a shard's own error") } else { ended }, "{text}");
}
