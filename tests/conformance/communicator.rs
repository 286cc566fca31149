//! The communicator by itself: bodies for any device, each for a number of ranks.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use moebius::comm::{Communicator, Exchange, Op, ReduceOp, Tag};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::{CommError, DType, Error, Tensor};

use super::harness::{Endpoint, TIMEOUT, Target, on_threads};

/// A body, its name, and the numbers of ranks that it is for.
pub struct Body<D: Target> {
    pub name: &'static str,
    pub ranks: fn(usize) -> bool,
    pub run: fn(&D, usize),
}

pub fn bodies<D: Target>() -> Vec<Body<D>> {
    vec![
        Body { name: "closed_forms", ranks: |_| true, run: closed_forms },
        Body { name: "pieces_of_different_sizes", ranks: |_| true, run: pieces_of_different_sizes },
        Body { name: "blocks_of_the_others", ranks: |_| true, run: blocks_of_the_others },
        Body { name: "large_sums", ranks: |n| n > 1, run: large_sums },
        Body { name: "sums_in_rank_order_in_f32", ranks: |n| n > 2, run: sums_in_rank_order_in_f32 },
        Body { name: "disagreements", ranks: |n| n > 1, run: disagreements },
        Body { name: "refusals", ranks: |n| n > 1, run: refusals },
        Body { name: "lost_ranks", ranks: |n| n == 2, run: lost_ranks },
    ]
}

#[test]
fn bodies_on_the_cpu() {
    for ranks in [1, 2, 3, 4, 8] {
        for body in bodies::<Cpu>().into_iter().filter(|body| (body.ranks)(ranks)) {
            (body.run)(&Cpu::poisoning(), ranks);
        }
    }
    assert!(ThreadWorld::create(0, TIMEOUT).is_empty());
}

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

fn tag(sequence: u64) -> Tag {
    Tag { layer: 7, op: Op::User, sequence }
}

/// A rank's communicator and device.
struct Own<'a, D: Target> {
    comm: &'a mut dyn Communicator<D>,
    device: &'a D,
}

impl<D: Target> Own<'_, D> {
    fn tensor(&self, dtype: DType, values: &[f64], dims: &[usize]) -> Tensor<D> {
        self.device.put(dtype, values, dims)
    }

    fn values(&self, t: &Tensor<D>) -> Vec<f64> {
        self.device.values(t.view())
    }
}

fn each<D: Target>(device: &D, ranks: usize, body: impl Fn(Own<'_, D>, usize) + Sync) {
    let results = on_threads(device.endpoints(ranks, TIMEOUT), |mut endpoint: Endpoint<D>| {
        let rank = endpoint.comm.rank();
        body(Own { comm: &mut *endpoint.comm, device: &endpoint.device }, rank);
    });
    assert!(results.iter().all(Result::is_ok));
}

fn closed_forms<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |Own { comm: c, device }, r| {
        let tensor = |dtype, values: &[f64], dims: &[usize]| device.put(dtype, values, dims);
        let f64s = |t: &Tensor<D>| device.values(t.view());
        for dtype in FLOATS {
            let own = tensor(dtype, &[r as f64, 1.0], &[2]);
            let mut all = tensor(dtype, &vec![0.0; 2 * ranks], &[ranks, 2]);
            c.all_gather(tag(0), own.view(), all.view_mut()).expect("all_gather");
            assert_eq!(f64s(&all), (0..ranks).flat_map(|p| [p as f64, 1.0]).collect::<Vec<_>>());

            // Rank r gives p·r to rank p, which gets p·Σ r.
            let sum = (ranks * (ranks - 1) / 2) as f64;
            let blocks: Vec<f64> = (0..ranks).map(|p| (p * r) as f64).collect();
            let blocks = tensor(dtype, &blocks, &[ranks, 1]);
            let mut own = tensor(dtype, &[0.0], &[1]);
            c.reduce_scatter(tag(1), blocks.view(), own.view_mut()).expect("reduce_scatter");
            assert_eq!(f64s(&own), [r as f64 * sum]);

            let mut value = tensor(dtype, &[r as f64, -(r as f64)], &[2]);
            c.all_reduce(tag(2), ReduceOp::Sum, value.view_mut()).expect("sum");
            assert_eq!(f64s(&value), [sum, -sum]);
            let mut value = tensor(dtype, &[r as f64, if r == 0 { f64::NAN } else { 1.0 }], &[2]);
            c.all_reduce(tag(3), ReduceOp::Max, value.view_mut()).expect("max");
            assert_eq!(f64s(&value)[0], ranks as f64 - 1.0);
            assert!(f64s(&value)[1].is_nan(), "NaN wins");
        }
        let mut counts = tensor(DType::I64, &[r as f64], &[1]);
        c.all_reduce(tag(4), ReduceOp::Max, counts.view_mut()).expect("max");
        assert_eq!(f64s(&counts), [ranks as f64 - 1.0]);
        let mut value = tensor(DType::F32, &[r as f64], &[1]);
        c.broadcast(tag(5), ranks - 1, value.view_mut()).expect("broadcast");
        assert_eq!(f64s(&value), [ranks as f64 - 1.0]);
        c.barrier(tag(6)).expect("barrier");
        assert_eq!(c.calls(), 4 * 4 + 3);
    });
}

/// Rank r sends r + p bytes of value 16·r + p to rank p.
fn pieces_of_different_sizes<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |o, r| {
        let send: Vec<u8> = (0..ranks).flat_map(|p| vec![(16 * r + p) as u8; r + p]).collect();
        let n = send.len();
        let send = o.device.host(&Tensor::from_vec(send, &[n]).expect("send"));
        let sizes: Vec<usize> = (0..ranks).map(|p| r + p).collect();
        let mut recv = Tensor::empty(o.device, DType::U8, &[n]).expect("recv");
        let exchange = Exchange {
            send: send.view(),
            send_bytes: &sizes,
            recv: recv.view_mut(),
            recv_bytes: &sizes,
            dtype: DType::U8,
        };
        o.comm.all_to_all_v(tag(0), exchange).expect("all_to_all_v");
        let expected: Vec<u8> = (0..ranks).flat_map(|p| vec![(16 * p + r) as u8; r + p]).collect();
        assert_eq!(o.device.to_cpu(&recv).as_bytes(), expected);
    });
}

/// Rank r's block for rank p holds 16·r + p; what each receives of the others has no place for its own.
fn blocks_of_the_others<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |o, r| {
        for dtype in FLOATS {
            for width in [0, 1, 3] {
                let block = |from: usize, to: usize| vec![(16 * from + to) as f64; width];
                let send: Vec<f64> = (0..ranks).flat_map(|p| block(r, p)).collect();
                let send = o.tensor(dtype, &send, &[ranks, width]);
                let mut recv = o.tensor(dtype, &vec![-1.0; (ranks - 1) * width], &[ranks - 1, width]);
                o.comm.exchange_blocks(tag(0), send.view(), recv.view_mut()).expect("exchange_blocks");
                let expected: Vec<f64> = (0..ranks).filter(|p| *p != r).flat_map(|p| block(p, r)).collect();
                assert_eq!(o.values(&recv), expected, "{dtype} {width}");
            }
        }
        assert_eq!(o.comm.calls(), 4 * 3);
        let send = o.tensor(DType::F32, &vec![0.0; ranks], &[ranks]);
        let mut all = o.tensor(DType::F32, &vec![0.0; ranks], &[ranks]);
        let e = o.comm.exchange_blocks(tag(1), send.view(), all.view_mut());
        assert!(matches!(e, Err(Error::Shape { .. })), "{e:?}");
        if ranks > 1 {
            let odd = o.tensor(DType::F32, &vec![0.0; ranks + 1], &[ranks + 1]);
            let e = o.comm.exchange_blocks(tag(2), odd.view(), all.view_mut());
            assert!(e.is_err_and(|e| e.to_string().contains("equal blocks")));
        }
        o.comm.barrier(tag(3)).expect("works again");
    });
}

/// Sums of sizes that take every way there is: small and large, with and without a whole part for each rank. Terms are
/// halves below 2⁴, so that every sum is exact in every type.
fn large_sums<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |o, r| {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for count in [1, 7, ranks, 1000 * ranks, 1000 * ranks + 1, 50_000 * ranks, 65_536 * ranks] {
                let term = |p: usize, i: usize| ((p + i) % 8) as f64 / 2.0;
                let own: Vec<f64> = (0..count).map(|i| term(r, i)).collect();
                let sums: Vec<f64> = (0..count).map(|i| (0..ranks).map(|p| term(p, i)).sum()).collect();
                let mut value = o.tensor(dtype, &own, &[count]);
                o.comm.all_reduce(tag(0), ReduceOp::Sum, value.view_mut()).expect("sum");
                assert_eq!(o.values(&value), sums, "{dtype} {count}");
                if count % ranks == 0 {
                    let send = o.tensor(dtype, &own, &[count]);
                    let mut block = Tensor::empty(o.device, dtype, &[count / ranks]).expect("block");
                    o.comm.reduce_scatter(tag(1), send.view(), block.view_mut()).expect("reduce_scatter");
                    let at = count / ranks * r;
                    assert_eq!(o.values(&block), sums[at..at + count / ranks], "{dtype} {count}");
                }
            }
        }
    });
}

/// Sums run in rank order: 1 + 2⁻²⁴ is 1 in f32, so two small terms are lost behind the one, and kept before it.
fn sums_in_rank_order_in_f32<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |o, r| {
        let small = 2f64.powi(-24);
        let of = |terms: [f64; 3]| terms.get(r).copied().unwrap_or(0.0);
        let mut value = o.tensor(DType::F32, &[of([1.0, small, small]), of([small, small, 1.0])], &[2]);
        o.comm.all_reduce(tag(0), ReduceOp::Sum, value.view_mut()).expect("sum");
        assert_eq!(o.values(&value), [1.0, 1.0 + 2.0 * small]);
        // Each term is lost in bf16 (8 bits), both together are not in f32.
        let mut value = o.tensor(DType::BF16, &[of([256.0, 1.0, 1.0])], &[1]);
        o.comm.all_reduce(tag(1), ReduceOp::Sum, value.view_mut()).expect("sum");
        assert_eq!(o.values(&value), [258.0]);
    });
}

/// Each disagreement is an error on every rank, and the next call works.
fn disagreements<D: Target>(device: &D, ranks: usize) {
    each(device, ranks, |o, r| {
        let odd = r == 1;
        let mut data = o.tensor(DType::F32, &[r as f64], &[1]);
        let check = |c: &mut dyn Communicator<D>, error: moebius::Result<()>, is: fn(&CommError) -> bool| {
            match error {
                Err(Error::Comm(error)) => assert!(is(&error), "{error:?}"),
                other => panic!("{other:?}"),
            }
            c.barrier(tag(100)).expect("works again");
        };
        let mismatch = |e: &CommError| matches!(e, CommError::TagMismatch { .. });
        let argument = |e: &CommError| matches!(e, CommError::ArgumentMismatch { .. });
        let mut halves = o.tensor(DType::F16, &[0.0; 2], &[2]);
        let mut pair = o.tensor(DType::F32, &[0.0; 2], &[2]);
        let c = &mut *o.comm;

        let e = c.barrier(tag(u64::from(odd)));
        check(c, e, mismatch);
        let e = if odd { c.barrier(tag(0)) } else { c.broadcast(tag(0), 0, data.view_mut()) };
        check(c, e, mismatch);
        let e = c.broadcast(tag(0), usize::from(odd), data.view_mut());
        check(c, e, argument);
        let e = c.all_reduce(tag(0), if odd { ReduceOp::Max } else { ReduceOp::Sum }, data.view_mut());
        check(c, e, argument);
        let e = c.all_reduce(tag(0), ReduceOp::Sum, if odd { halves.view_mut() } else { data.view_mut() });
        check(c, e, argument);
        let e = c.all_reduce(tag(0), ReduceOp::Sum, if odd { pair.view_mut() } else { data.view_mut() });
        check(c, e, |e| matches!(e, CommError::SizeMismatch { .. }));
        assert_eq!(o.device.values(data.view()), [r as f64], "nothing was exchanged");
    });
}

/// A rank with bad arguments of its own: an error there, the reason on the others, at once.
fn refusals<D: Target>(device: &D, ranks: usize) {
    let culprit = ranks - 1;
    each(device, ranks, |o, r| {
        let start = Instant::now();
        let mut data = o.tensor(DType::F32, &[1.0], &[1]);
        let mut short = o.tensor(DType::F32, &vec![0.0; ranks + 1], &[ranks + 1]);
        let root = if r == culprit { ranks } else { 0 };
        match o.comm.broadcast(tag(0), root, data.view_mut()) {
            Err(Error::Invalid { name, .. }) if r == culprit => assert_eq!(name, "root"),
            Err(Error::Comm(CommError::Refused { peer, reason, .. })) if r != culprit => {
                assert_eq!(peer, culprit);
                assert!(reason.contains("root"));
            }
            other => panic!("{other:?}"),
        }
        let e = o.comm.all_gather(tag(1), data.view(), short.view_mut());
        assert!(matches!(e, Err(Error::Shape { .. })), "all refuse: {e:?}");
        assert!(start.elapsed() < TIMEOUT / 3);
        o.comm.barrier(tag(2)).expect("works again");
    });
}

fn lost_ranks<D: Target>(device: &D, _: usize) {
    // Late: named in the timeout, told when it comes.
    let met = Barrier::new(2);
    let results = on_threads(device.endpoints(2, Duration::from_millis(50)), |mut endpoint: Endpoint<D>| {
        let c = &mut *endpoint.comm;
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
    let mut endpoints = device.endpoints(2, TIMEOUT);
    let peer = endpoints.pop();
    let mut own = endpoints.pop().expect("rank 0");
    drop(peer);
    let error = own.comm.barrier(tag(0));
    assert!(matches!(error, Err(Error::Comm(CommError::PeerGone { peer: 1, .. }))));
    drop(own);
    let results = on_threads(device.endpoints(2, TIMEOUT), |mut endpoint: Endpoint<D>| {
        if endpoint.comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            return;
        }
        let start = Instant::now();
        let error = endpoint.comm.barrier(tag(0));
        assert!(matches!(error, Err(Error::Comm(CommError::PeerGone { peer: 1, .. }))));
        assert!(start.elapsed() < TIMEOUT / 3);
    });
    assert!(results.iter().all(Result::is_ok));
}
