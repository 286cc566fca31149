//! The communicator between threads by itself.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use moebius::comm::{Communicator, Exchange, Op, ReduceOp, Tag, ThreadComm, ThreadWorld};
use moebius::cpu::Cpu;
use moebius::{CommError, DType, Error, Tensor};

use super::harness::{PATIENCE, Target, on_threads};

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

fn tensor(dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<Cpu> {
    Cpu::new().put(dtype, values, dims)
}

fn tag(sequence: u64) -> Tag {
    Tag { layer: 7, op: Op::User, sequence }
}

fn each(ranks: usize, body: impl Fn(&mut dyn Communicator<Cpu>, usize) + Sync) {
    let results = on_threads(ranks, PATIENCE, |mut comm: ThreadComm| {
        let rank = Communicator::<Cpu>::rank(&comm);
        body(&mut comm, rank);
    });
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn closed_forms() {
    for ranks in [1, 2, 3, 8] {
        each(ranks, |c, r| {
            for dtype in FLOATS {
                let own = tensor(dtype, &[r as f64, 1.0], &[2]);
                let mut all = tensor(dtype, &vec![0.0; 2 * ranks], &[ranks, 2]);
                c.all_gather(tag(0), own.view(), all.view_mut()).expect("all_gather");
                assert_eq!(all.to_f64(), (0..ranks).flat_map(|p| [p as f64, 1.0]).collect::<Vec<_>>());

                // Rank r gives p·r to rank p, which gets p·Σ r.
                let sum = (ranks * (ranks - 1) / 2) as f64;
                let blocks: Vec<f64> = (0..ranks).map(|p| (p * r) as f64).collect();
                let blocks = tensor(dtype, &blocks, &[ranks, 1]);
                let mut own = tensor(dtype, &[0.0], &[1]);
                c.reduce_scatter(tag(1), blocks.view(), own.view_mut()).expect("reduce_scatter");
                assert_eq!(own.to_f64(), [r as f64 * sum]);

                let mut value = tensor(dtype, &[r as f64, -(r as f64)], &[2]);
                c.all_reduce(tag(2), ReduceOp::Sum, value.view_mut()).expect("sum");
                assert_eq!(value.to_f64(), [sum, -sum]);
                let mut value = tensor(dtype, &[r as f64, if r == 0 { f64::NAN } else { 1.0 }], &[2]);
                c.all_reduce(tag(3), ReduceOp::Max, value.view_mut()).expect("max");
                assert_eq!(value.to_f64()[0], ranks as f64 - 1.0);
                assert!(value.to_f64()[1].is_nan(), "NaN wins");
            }
            let mut counts = tensor(DType::I64, &[r as f64], &[1]);
            c.all_reduce(tag(4), ReduceOp::Max, counts.view_mut()).expect("max");
            assert_eq!(counts.as_slice::<i64>().expect("i64"), [ranks as i64 - 1]);
            let mut value = tensor(DType::F32, &[r as f64], &[1]);
            c.broadcast(tag(5), ranks - 1, value.view_mut()).expect("broadcast");
            assert_eq!(value.to_f64(), [ranks as f64 - 1.0]);
            c.barrier(tag(6)).expect("barrier");
            assert_eq!(c.calls(), 4 * 4 + 3);
        });
    }
}

/// Rank r sends r + p bytes of value 16·r + p to rank p.
#[test]
fn pieces_of_different_sizes() {
    each(4, |c, r| {
        let send: Vec<u8> = (0..4).flat_map(|p| vec![(16 * r + p) as u8; r + p]).collect();
        let n = send.len();
        let send = Tensor::from_vec(send, &[n]).expect("send");
        let sizes: Vec<usize> = (0..4).map(|p| r + p).collect();
        let mut recv = Tensor::empty(&Cpu::poisoning(), DType::U8, &[n]).expect("recv");
        let exchange = Exchange {
            send: send.view(),
            send_bytes: &sizes,
            recv: recv.view_mut(),
            recv_bytes: &sizes,
            payload: DType::U8,
        };
        c.all_to_all_v(tag(0), exchange).expect("all_to_all_v");
        assert_eq!(recv.as_bytes(), (0..4).flat_map(|p| vec![(16 * p + r) as u8; r + p]).collect::<Vec<_>>());
    });
}

/// Sums run in rank order: 1 + 2⁻²⁴ is 1 in f32, so 2²⁴ terms of one order differ from the other.
#[test]
fn sums_in_rank_order_in_f32() {
    each(3, |c, r| {
        let small = 2f64.powi(-24);
        let mut value = tensor(DType::F32, &[[1.0, small, small][r], [small, small, 1.0][r]], &[2]);
        c.all_reduce(tag(0), ReduceOp::Sum, value.view_mut()).expect("sum");
        assert_eq!(value.to_f64(), [1.0, 1.0 + 2.0 * small]);
        // Each term is lost in bf16 (8 bits), both together are not in f32.
        let mut value = tensor(DType::BF16, &[[256.0, 1.0, 1.0][r]], &[1]);
        c.all_reduce(tag(1), ReduceOp::Sum, value.view_mut()).expect("sum");
        assert_eq!(value.to_f64(), [258.0]);
    });
}

/// Each disagreement is an error on every rank, and the next call works.
#[test]
fn disagreements() {
    each(3, |c, r| {
        let odd = r == 1;
        let mut data = tensor(DType::F32, &[r as f64], &[1]);
        let check = |c: &mut dyn Communicator<Cpu>, error: moebius::Result<()>, is: fn(&CommError) -> bool| {
            match error {
                Err(Error::Comm(error)) => assert!(is(&error), "{error:?}"),
                other => panic!("{other:?}"),
            }
            c.barrier(tag(100)).expect("works again");
        };
        let mismatch = |e: &CommError| matches!(e, CommError::TagMismatch { .. });
        let argument = |e: &CommError| matches!(e, CommError::ArgumentMismatch { .. });

        let e = c.barrier(tag(u64::from(odd)));
        check(c, e, mismatch);
        let e = if odd { c.barrier(tag(0)) } else { c.broadcast(tag(0), 0, data.view_mut()) };
        check(c, e, mismatch);
        let e = c.broadcast(tag(0), usize::from(odd), data.view_mut());
        check(c, e, argument);
        let e = c.all_reduce(tag(0), if odd { ReduceOp::Max } else { ReduceOp::Sum }, data.view_mut());
        check(c, e, argument);
        let mut halves = tensor(DType::F16, &[0.0; 2], &[2]);
        let e = c.all_reduce(tag(0), ReduceOp::Sum, if odd { halves.view_mut() } else { data.view_mut() });
        check(c, e, argument);
        let mut pair = tensor(DType::F32, &[0.0; 2], &[2]);
        let e = c.all_reduce(tag(0), ReduceOp::Sum, if odd { pair.view_mut() } else { data.view_mut() });
        check(c, e, |e| matches!(e, CommError::SizeMismatch { .. }));
        assert_eq!(data.to_f64(), [r as f64], "nothing was exchanged");
    });
}

/// A rank with bad arguments of its own: an error there, the reason on the others, at once.
#[test]
fn refusals() {
    each(3, |c, r| {
        let start = Instant::now();
        let mut data = tensor(DType::F32, &[1.0], &[1]);
        let root = if r == 2 { 3 } else { 0 };
        match c.broadcast(tag(0), root, data.view_mut()) {
            Err(Error::Invalid { name, .. }) if r == 2 => assert_eq!(name, "root"),
            Err(Error::Comm(CommError::Refused { peer: 2, reason, .. })) if r != 2 => assert!(reason.contains("root")),
            other => panic!("{other:?}"),
        }
        let mut short = tensor(DType::F32, &[0.0; 2], &[2]);
        let e = c.all_gather(tag(1), data.view(), short.view_mut());
        assert!(matches!(e, Err(Error::Shape { .. })), "all three refuse: {e:?}");
        assert!(start.elapsed() < PATIENCE / 3);
        c.barrier(tag(2)).expect("works again");
    });
}

#[test]
fn lost_ranks() {
    // Late: named in the timeout, told when it comes.
    let met = Barrier::new(2);
    let results = on_threads(2, Duration::from_millis(50), |mut comm| {
        let c: &mut dyn Communicator<Cpu> = &mut comm;
        if c.rank() == 0 {
            let error = c.barrier(tag(0));
            assert!(matches!(error, Err(Error::Comm(CommError::Timeout { missing, .. })) if missing == [1]));
            met.wait();
        } else {
            met.wait();
            let error = c.barrier(tag(0));
            assert!(matches!(error, Err(Error::Comm(CommError::Poisoned { .. }))));
        }
    });
    assert!(results.iter().all(Result::is_ok));

    // Gone before, and gone while waiting.
    let mut world = ThreadWorld::create(2, PATIENCE);
    let peer = world.pop();
    let mut own = world.pop().expect("rank 0");
    drop(peer);
    let error = Communicator::<Cpu>::barrier(&mut own, tag(0));
    assert!(matches!(error, Err(Error::Comm(CommError::PeerGone { peer: 1, .. }))));
    let results = on_threads(2, PATIENCE, |mut comm| {
        if Communicator::<Cpu>::rank(&comm) == 1 {
            std::thread::sleep(Duration::from_millis(50));
            return;
        }
        let start = Instant::now();
        let error = Communicator::<Cpu>::barrier(&mut comm, tag(0));
        assert!(matches!(error, Err(Error::Comm(CommError::PeerGone { peer: 1, .. }))));
        assert!(start.elapsed() < PATIENCE / 3);
    });
    assert!(results.iter().all(Result::is_ok));
    assert!(ThreadWorld::create(0, PATIENCE).is_empty());
}
