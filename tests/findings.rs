//! Small tests for findings that no other suite holds; `docs/findings.md` says which.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::comm::{Communicator, Exchange, Op, ReduceOp, Tag};
use moebius::config::{AuxConfig, RouterConfig};
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{
    Capacity, DispatchInputs, DispatchSpec, DispatcherKind, Group, GroupConfig, HostPlanRequest, RowOrder,
};
use moebius::kernels::{Kernels, Linear, LinearBwd};
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, Noise, Params, PerParam};
use moebius::{DType, Error, MoeConfig, Shape, Tensor, TensorMut, TensorRef};

#[path = "common/seed.rs"]
mod seed;

const TIMEOUT: Duration = Duration::from_secs(30);

fn on_ranks<T: Send>(ranks: usize, body: impl Fn(ThreadComm) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || body(comm));
        let threads: Vec<_> = ThreadWorld::create(ranks, TIMEOUT).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join().expect("a rank panicked")).collect()
    })
}

fn group(comm: ThreadComm, config: GroupConfig) -> Group<Cpu> {
    Group::new(Cpu::poisoning(), Box::new(comm), config).expect("group")
}

fn ids(values: &[i32], k: usize) -> Tensor<Cpu> {
    Tensor::from_vec(values.to_vec(), &[values.len() / k, k]).expect("ids")
}

/// Finding 14: rows travel and are kept once a (token, rank), not once a choice.
#[test]
fn received_rows_are_unique_rows() {
    let (tokens, k, hidden) = (3, 4, 2);
    let received = on_ranks(2, |comm| {
        let mut g = group(comm, GroupConfig::new(8, tokens));
        // All choices on rank 0's four experts.
        let ids = ids(&[0, 1, 2, 3].repeat(tokens), k);
        let h = g.dispatcher().prepare(ids.view(), None, &DispatchSpec::new(0, k)).expect("prepare");
        let x = Tensor::from_vec(vec![1f32; tokens * hidden], &[tokens, hidden]).expect("x");
        let inputs = DispatchInputs { tokens: x.view(), weights: None, scales: None };
        let received = g.dispatcher().dispatch_rows(&h, inputs).expect("dispatch");
        (received.rows.expect("rows of other ranks").dims()[0], h.rows())
    });
    assert_eq!(received, [(2 * tokens, 2 * tokens * k), (0, 0)]);
}

/// Finding 22: no lock is held while a rank waits; another group of the process goes on meanwhile.
#[test]
fn a_waiting_group_does_not_hold_up_another() {
    let (waiting, over) = (Barrier::new(3), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            on_ranks(2, |comm| {
                let late = Communicator::<Cpu>::rank(&comm) == 1;
                let mut g = group(comm, GroupConfig::new(2, 1));
                waiting.wait();
                if late {
                    // Rank 0 is in prepare until the other group is done.
                    over.wait();
                }
                let h = g.dispatcher().prepare(ids(&[0], 1).view(), None, &DispatchSpec::new(0, 1));
                assert_eq!(h.expect("prepare").total_tokens(), 2);
            })
        });
        waiting.wait();
        on_ranks(2, |comm| {
            let mut g = group(comm, GroupConfig::new(2, 1));
            let h = g.dispatcher().prepare(ids(&[1], 1).view(), None, &DispatchSpec::new(0, 1));
            assert_eq!(h.expect("prepare").stats().expect("stats").expert_load, [0, 2]);
        });
        over.wait();
    });
}

/// Finding 32: the collectives of a whole layer's step, and no more.
#[test]
fn collectives_of_a_layer_are_counted() {
    let with = |change: fn(&mut MoeConfig)| {
        let mut config = MoeConfig::new(4, 4, 4, 2);
        change(&mut config);
        config
    };
    let aux = |c: &mut MoeConfig| {
        c.aux = AuxConfig::default();
        (c.aux.balance, c.aux.over_ranks) = (0.1, true);
    };
    // Forward: prepare, dispatch, combine. Backward: combine_bwd, dispatch_bwd, the latter two with all-gather.
    let cases = [
        (DispatcherKind::AllToAll, with(|_| ()), [3, 2]),
        (DispatcherKind::AllGather, with(|_| ()), [3, 3]),
        (DispatcherKind::AllToAll, with(aux), [4, 2]),
        (DispatcherKind::AllToAll, with(|c| c.router.jitter = 0.1), [4, 2]),
    ];
    for (kind, config, expected) in cases {
        let counts = on_ranks(2, |comm| {
            let mut g = group(comm, GroupConfig { dispatcher: kind, ..GroupConfig::new(4, 2) });
            let make = |dims: &[usize]| Tensor::from_vec(vec![0.5f32; dims.iter().product()], dims).expect("tensor");
            let (x, router) = (make(&[2, 4]), make(&[4, 4]));
            let (up, down) = (make(&[2, 8, 4]), make(&[2, 4, 4]));
            let (up, down) = (up.view(), down.view());
            let params = Params { router: router.view(), up: &up, down: &down, others: PerParam::none() };
            let layer = Layer::new(config.clone(), 0).expect("layer");
            let mode = Mode { backward: true, noise: Some(Noise { seed: 1, step: 1 }) };
            let start = g.dispatcher().communicator().calls();
            let forward = layer.forward(&mut g, mode, x.view(), &params).expect("forward");
            let middle = g.dispatcher().communicator().calls();
            let context = forward.context.expect("a context");
            let (inputs, cotangents) = (Inputs { x: x.view(), params: &params }, Cotangents { y: None, aux: 1.0 });
            layer.backward(&mut g, context, inputs, cotangents, GradientMask::ALL).expect("backward");
            [middle - start, g.dispatcher().communicator().calls() - middle]
        });
        assert_eq!(counts, [expected; 2], "{kind:?}");
    }
}

/// A zero among sizes does not hide that a row of them cannot be.
#[test]
fn shapes_that_overflow_beside_a_zero() {
    assert_eq!(Shape::new(&[0, 7, 3]).expect("no rows").row_len(), 21);
    for dims in [&[0, usize::MAX, 2][..], &[usize::MAX, 0, usize::MAX], &[usize::MAX], &[1 << 32, 1 << 32]] {
        assert!(matches!(Shape::new(dims), Err(Error::Invalid { .. })), "{dims:?}");
    }
}

/// Sizes of pieces that wrap to the buffer's size are refused, on both ranks; the communicator goes on.
#[test]
fn piece_sizes_that_overflow() {
    on_ranks(2, |mut comm| {
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
        let bad = Communicator::<Cpu>::rank(&comm) == 0;
        let (send, mut recv) = ([0u8; 4], [0u8; 4]);
        let sizes = if bad { [usize::MAX, 5] } else { [2, 2] };
        let exchange = Exchange::<Cpu> {
            send: TensorRef::from_slice(&send, &[4]).expect("send"),
            send_bytes: &sizes,
            recv: TensorMut::from_slice(&mut recv, &[4]).expect("recv"),
            recv_bytes: &[2, 2],
            dtype: DType::U8,
        };
        match comm.all_to_all_v(tag, exchange) {
            Err(Error::Shape { tensor, .. }) if bad => assert_eq!(tensor, "send"),
            Err(Error::Comm(_)) if !bad => {}
            other => panic!("{other:?}"),
        }
        let mut sum = Tensor::from_vec(vec![1f32], &[1]).expect("one");
        comm.all_reduce(tag, ReduceOp::Sum, sum.view_mut()).expect("all_reduce after a fault");
        assert_eq!(sum.to_f64(), [2.0]);
    });
}

#[test]
fn a_linear_without_outputs_is_an_error() {
    let make = |dims: &[usize]| Tensor::from_vec(vec![0f32; dims.iter().product()], dims).expect("tensor");
    let (x, weight, mut out) = (make(&[2, 3]), make(&[0, 3]), make(&[2, 0]));
    let call = Linear { x: x.view(), weight: weight.view(), bias: None, out: out.view_mut() };
    assert!(matches!(Cpu::new().linear(call), Err(Error::Invalid { name, .. }) if name == "tensor weight"));
    let (d_out, mut d_x) = (make(&[2, 0]), make(&[2, 3]));
    let call = LinearBwd {
        x: x.view(),
        weight: weight.view(),
        d_out: d_out.view(),
        d_x: Some(d_x.view_mut()),
        d_weight: None,
        d_bias: None,
    };
    assert!(matches!(Cpu::new().linear_bwd(call), Err(Error::Invalid { name, .. }) if name == "tensor weight"));
}

/// A plan indexes by ids and ranks: those that are none are refused, not followed.
#[test]
fn impossible_plans_are_errors() {
    struct Case {
        name: &'static str,
        ids: [i32; 4],
        rank: usize,
        ranks: usize,
        experts: usize,
        tokens: Vec<usize>,
        row_order: RowOrder,
    }
    let good = || Case {
        name: "",
        ids: [0, 1, -1, 3],
        rank: 1,
        ranks: 2,
        experts: 4,
        tokens: vec![1, 1],
        row_order: RowOrder::UniqueRows,
    };
    let cases = [
        good(),
        Case { name: "ids of all ranks", ids: [0, 1, 2, 4], ..good() },
        Case { name: "ids of all ranks", ids: [0, 1, 2, -2], ..good() },
        Case { name: "rank", rank: 2, ..good() },
        Case { name: "num_experts", experts: 5, ..good() },
        Case { name: "top_k, transport", row_order: RowOrder::Local, ..good() },
        Case { name: "tokens of each rank", tokens: vec![2], ..good() },
        Case { name: "ids of all ranks", tokens: vec![1, 2], ..good() },
    ];
    for c in cases {
        let spec = DispatchSpec { capacity: Capacity::Eager, ..DispatchSpec::new(0, 2) };
        let request = HostPlanRequest {
            rank: c.rank,
            ranks: c.ranks,
            num_experts: c.experts,
            ids: &c.ids,
            weights: None,
            tokens: &c.tokens,
            spec: &spec,
            row_order: c.row_order,
        };
        match (c.name, Cpu::new().plan(request)) {
            ("", Ok(plan)) => assert_eq!(plan.stats.get().expect("stats").needed_rows, 1),
            (name, Err(Error::Invalid { name: found, .. })) if !name.is_empty() => assert_eq!(name, found),
            (name, Err(Error::Shape { tensor, .. })) if !name.is_empty() => assert_eq!(name, tensor),
            (name, other) => panic!("{name:?}: {other:?}"),
        }
    }
    assert!(RouterConfig::new(4, 5).validate().is_err());
}

/// Finding 8: a gradient that candle hands over transposed is read as what it is.
#[cfg(feature = "candle")]
#[test]
fn a_gradient_that_is_not_contiguous_is_read_right() -> candle_core::Result<()> {
    use candle_core::{Device, Module, Tensor, Var};
    use candle_nn::{VarBuilder, VarMap};
    use moebius::candle::{EpGroup, ExpertParallelMoE};
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, candle_core::DType::F64, &Device::Cpu);
    let group = EpGroup::single(GroupConfig::new(4, 8))?;
    let moe = ExpertParallelMoE::new(Layer::new(MoeConfig::new(6, 5, 4, 2), 0)?, group, vb)?;
    for (own, var) in vars.all_vars().into_iter().enumerate() {
        let values = seed::normal(own as u64 + 2, var.elem_count());
        var.set(&Tensor::from_vec(values, var.dims(), &Device::Cpu)?)?;
    }
    let normal = |own| Tensor::from_vec(seed::normal(own, 30), (5, 6), &Device::Cpu);
    let (x, weight) = (Var::from_tensor(&normal(0)?)?, normal(1)?);
    let gradient = |loss: Tensor| -> candle_core::Result<Vec<f64>> {
        loss.backward()?.get(&x).expect("d x").flatten_all()?.to_vec1()
    };
    let straight = gradient((moe.forward(&x)? * &weight)?.sum_all()?)?;
    let turned = gradient((moe.forward(&x)?.t()? * &weight.t()?.contiguous()?)?.sum_all()?)?;
    assert_eq!(straight, turned);
    assert!(straight.iter().any(|v| *v != 0.0));
    Ok(())
}
