//! Bad input: a typed error on every rank, never a hang, and a group that works again.

use std::time::{Duration, Instant};

use moebius::comm::Op;
use moebius::config::{CapacityOrder, ExpertCapacity};
use moebius::ep::{Capacity, DispatchSpec, DispatcherKind, GroupConfig, Handle, Overlap, Reporting};
use moebius::{CommError, DType, Error, IdProblem, Result, Tensor};

use super::harness::*;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(bad_ids_are_named_on_every_rank),
        case!(deferred_ids_are_masked_and_reported),
        case!(too_many_tokens),
        case!(bad_specs),
        case!(specs_that_differ, 2),
        case!(configurations_that_differ, 2),
        case!(impossible_configurations),
        case!(backward_that_was_not_agreed),
        case!(handle_of_another_group),
        case!(bad_shape_on_one_rank),
        case!(tags_that_differ, 2),
        case!(widths_and_dtypes_that_differ, 2),
    ]
}

pub const T: usize = 4;
pub const H: usize = 4;

/// A failure is heard of at once: well within this, where [`TIMEOUT`] is the collectives' limit.
pub const AT_ONCE: Duration = Duration::from_secs(10);

fn bad_ids_are_named_on_every_rank<D: Target>(s: &Setup<D>) {
    let (k, experts) = (3, s.experts(4));
    let culprit = s.ranks - 1;
    for (id, first) in [(experts as i64, None), (-2, None), (i64::MIN, None), (i64::MAX, None), (1, Some(0))] {
        s.run(GroupConfig::new(experts, T), |r| {
            let mut ids = [1, 2, 3].repeat(T);
            if r.rank == culprit {
                // Two of them: the first is reported.
                ids[2 * k + 2] = id;
                ids[3 * k + 1] = experts as i64 + 7;
            }
            match r.prepare(&ids, &training(0, k)) {
                Err(Error::ExpertId { rank, layer, token, k, id: found, problem, .. }) => {
                    assert_eq!((rank, layer, token, k, found), (culprit, training(0, k).layer, 2, 2, id));
                    let expected = match first {
                        Some(first) => IdProblem::Duplicate { first },
                        None => IdProblem::OutOfRange { num_experts: experts },
                    };
                    assert_eq!(problem, expected);
                }
                other => panic!("{other:?}"),
            }
            r.works();
        });
    }
}

/// The entry counts as −1; every rank can ask for the error, once, or gets it from the next prepare.
fn deferred_ids_are_masked_and_reported<D: Target>(s: &Setup<D>) {
    let spec = DispatchSpec { reporting: Reporting::Deferred, layer: 5, ..training(0, 2) };
    let is_it = |result: Result<()>| match result {
        Err(Error::ExpertId { rank: 0, layer: 5, token: 1, k: 1, id: 1, problem, .. }) => {
            assert_eq!(problem, IdProblem::Duplicate { first: 0 });
        }
        // Where GPUs make the plan, the others hear it as what a peer says.
        Err(Error::Peer { peer: 0, reason, .. }) if s.is_nccl_ep() => {
            assert!(reason.contains("on rank 0, layer 5: topk_ids[1, 1] = 1: "), "{reason}");
        }
        other => panic!("{other:?}"),
    };
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let mut ids = [0, 1].repeat(T);
        if r.rank == 0 {
            (ids[2], ids[3]) = (1, 1);
            ids[5] = 1000;
        }
        let h = r.prepare(&ids, &spec).expect("masked");
        // A device behind the host tells whoever waits for it first, so this comes before any read.
        is_it(r.group.dispatcher().check());
        r.group.dispatcher().check().expect("told once");
        if r.rank == 0 {
            assert_eq!(r.kept(&h), [0, 1, 1, -1, 0, -1, 0, 1]);
        }
        let recv = r.dispatch(&h, F32(1), &[1.0; T], None).expect("dispatch");
        let out = r.combine(&h, F32(1), &recv.rows).expect("combine");
        assert_eq!(out, if r.rank == 0 { [2.0, 1.0, 1.0, 2.0] } else { [2.0; T] });
        r.works();

        r.prepare(&ids, &spec).expect("masked");
        r.group.device().wait_for_news();
        is_it(r.prepare(&[0, 1], &spec).map(drop));
        r.works();
    });
}

/// An error that rank 0 alone meets: its own there, [`Error::Peer`] elsewhere, all at once, and all goes on.
fn fails_on_rank_zero<D: Target, T: std::fmt::Debug>(
    r: &mut Rank<D>,
    reason: &str,
    call: impl FnOnce(&mut Rank<D>) -> Result<T>,
) {
    let start = Instant::now();
    let result = call(r);
    if r.rank == 0 {
        match result {
            Err(error @ (Error::Invalid { .. } | Error::Shape { .. } | Error::DType { .. })) => {
                assert!(error.to_string().contains(reason), "{error} does not name {reason:?}");
            }
            other => panic!("{other:?}"),
        }
    } else {
        assert_peer(result, 0, reason);
    }
    assert!(start.elapsed() < AT_ONCE);
    r.works();
}

fn too_many_tokens<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let tokens = if r.rank == 0 { T + 1 } else { T };
        if s.kind == DispatcherKind::Local {
            // Nothing travels, so nothing is reserved.
            let handle = r.prepare(&vec![0; 100 * T], &training(0, 1)).expect("any number of tokens");
            assert_eq!(handle.tokens(), 100 * T);
            return;
        }
        fails_on_rank_zero(r, "max_tokens_per_rank", |r| r.prepare(&vec![0; tokens], &training(0, 1)));
        // More than the call's own bound.
        let bounded = DispatchSpec { max_tokens: Some(1), ..training(0, 1) };
        let tokens = if r.rank == 0 { 2 } else { 1 };
        fails_on_rank_zero(r, "spec.max_tokens", |r| r.prepare(&vec![0; tokens], &bounded));
    });
}

fn bad_specs<D: Target>(s: &Setup<D>) {
    let bad = |factor| Some(ExpertCapacity { factor, order: CapacityOrder::Position, renormalize: false });
    let good = training(0, 2);
    let specs = [
        ("spec.alignment", DispatchSpec { alignment: 3, ..good }),
        ("spec.alignment", DispatchSpec { alignment: 0, ..good }),
        ("spec.capacity", DispatchSpec { capacity: Capacity::Static(1000), ..good }),
        ("spec.expert_capacity.factor", DispatchSpec { expert_capacity: bad(f64::NAN), ..good }),
        ("spec.expert_capacity.factor", DispatchSpec { expert_capacity: bad(0.0), ..good }),
        ("spec.top_k", DispatchSpec { top_k: 100, ..good }),
        ("topk_ids", DispatchSpec { top_k: 1, ..good }),
    ];
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        for (name, spec) in &specs {
            let spec = if r.rank == 0 || *name == "topk_ids" { *spec } else { good };
            // The ids have two columns whatever the spec says.
            let ids = r.ids(&[0, 1], 2).expect("ids");
            let prepare = |r: &mut Rank<D>| r.prepare_with(&ids, None, &spec);
            if *name == "topk_ids" {
                assert!(matches!(prepare(r), Err(Error::Invalid { name, .. }) if name == "tensor topk_ids"));
                r.works();
            } else {
                fails_on_rank_zero(r, name, prepare);
            }
        }
        // Weights are checked where nothing reads them, too.
        for (dtype, dims) in [(DType::F32, [1, 3]), (DType::F32, [2, 2]), (DType::I32, [1, 2])] {
            let weights = Tensor::zeros(r.group.device(), dtype, &dims).expect("weights");
            let weights = (r.rank == 0).then_some(weights);
            let ids = r.ids(&[0, 1], 2).expect("ids");
            fails_on_rank_zero(r, "topk_weights", |r| r.prepare_with(&ids, weights.as_ref(), &good));
        }
        // No columns at all.
        let none = r.ids(&[], 0).expect("ids");
        let spec = DispatchSpec { top_k: 0, ..good };
        let error = r.prepare_with(&none, None, &spec);
        assert!(matches!(error, Err(Error::Invalid { name, .. }) if name == "spec.top_k"));
        r.works();
    });
}

fn specs_that_differ<D: Target>(s: &Setup<D>) {
    let good = training(0, 2);
    let limit = |order| Some(ExpertCapacity { factor: 1.0, order, renormalize: false });
    let specs = [
        ("spec.top_k, spec.max_tokens or spec.expert_capacity", DispatchSpec { top_k: 1, ..good }),
        ("spec.top_k, spec.max_tokens or spec.expert_capacity", DispatchSpec { max_tokens: Some(2), ..good }),
        ("spec.alignment", DispatchSpec { alignment: 2, ..good }),
        ("spec.capacity", DispatchSpec { capacity: Capacity::Static(64), ..good }),
        ("spec.overflow", DispatchSpec { overflow: moebius::ep::Overflow::Drop, ..good }),
        ("spec.reporting", DispatchSpec { reporting: Reporting::Deferred, ..good }),
        ("spec.expert_capacity.factor", DispatchSpec { expert_capacity: limit(CapacityOrder::Position), ..good }),
        ("spec.formula", DispatchSpec { formula: 7.into(), ..good }),
    ];
    let config = GroupConfig { max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    s.run(config, |r| {
        for (name, spec) in &specs {
            if s.later && *name == "spec.reporting" {
                continue;
            }
            let odd = s.ranks - 1;
            let spec = if r.rank == odd { *spec } else { good };
            match r.prepare(&round_robin(0, 2, spec.top_k, s.experts(2)), &spec) {
                Err(Error::ConfigMismatch { call, field, rank, peer, value, peer_value }) => {
                    assert_eq!((call, &field[..], rank), ("prepare", *name, r.rank));
                    assert_eq!(peer, if r.rank == odd { 0 } else { odd });
                    assert_ne!(value, peer_value);
                }
                other => panic!("{other:?}"),
            }
            r.works();
        }
    });
}

fn configurations_that_differ<D: Target>(s: &Setup<D>) {
    let good = GroupConfig { dispatcher: s.kind, ..GroupConfig::new(s.experts(2), T) };
    let configs = [
        ("num_experts", GroupConfig { num_experts: s.experts(4), ..good.clone() }),
        ("max_tokens_per_rank", GroupConfig { max_tokens_per_rank: T + 1, ..good.clone() }),
        ("max_rows", GroupConfig { max_rows: 5, ..good.clone() }),
        ("windows", GroupConfig { windows: 2, ..good.clone() }),
        ("max_sms", GroupConfig { max_sms: 8, ..good.clone() }),
        ("overlap", GroupConfig { overlap: Overlap::Off, ..good.clone() }),
        ("ranks_per_host", GroupConfig { ranks_per_host: 1, ..good.clone() }),
        ("dispatcher", GroupConfig { dispatcher: DispatcherKind::Auto, ..good.clone() }),
    ];
    for (name, odd_one) in &configs {
        let results = s.on_threads(TIMEOUT, |endpoint| {
            let rank = endpoint.comm.rank();
            let config = if rank == 1 { odd_one } else { &good };
            match endpoint.join(config.clone()) {
                Err(Error::ConfigMismatch { call, field, rank: found, peer, value, peer_value }) => {
                    assert_eq!((call, &field[..], found), ("Group::new", *name, rank));
                    assert_eq!(peer, if rank == 1 { 0 } else { 1 });
                    assert_ne!(value, peer_value);
                }
                other => panic!("{other:?}"),
            }
        });
        assert!(results.iter().all(|r| r.is_ok()), "{name}");
    }
}

fn impossible_configurations<D: Target>(s: &Setup<D>) {
    let good = GroupConfig { dispatcher: s.kind, ..GroupConfig::new(s.experts(2), T) };
    let mut configs = vec![
        ("num_experts", GroupConfig { num_experts: 0, ..good.clone() }),
        ("num_experts", GroupConfig { num_experts: 1 << 17, ..good.clone() }),
        ("max_tokens_per_rank", GroupConfig { max_tokens_per_rank: 0, ..good.clone() }),
        ("max_tokens_per_rank", GroupConfig { max_tokens_per_rank: usize::MAX, ..good.clone() }),
        ("max_rows", GroupConfig { max_rows: usize::MAX, ..good.clone() }),
        ("overlap", GroupConfig { overlap: Overlap::Sms(0), ..good.clone() }),
        ("overlap", GroupConfig { overlap: Overlap::Sms(7), ..good.clone() }),
        ("overlap", GroupConfig { overlap: Overlap::Sms(18), ..good.clone() }),
    ];
    if s.ranks > 1 {
        configs.push(("num_experts", GroupConfig { num_experts: s.ranks + 1, ..good.clone() }));
        configs.push(("dispatcher", GroupConfig { dispatcher: DispatcherKind::Local, ..good.clone() }));
    }
    if s.kind == DispatcherKind::Hierarchical {
        configs.push(("ranks_per_host", GroupConfig { ranks_per_host: s.ranks + 1, ..good.clone() }));
    }
    for (name, config) in &configs {
        let results = s.on_threads(TIMEOUT, |endpoint| {
            let error = endpoint.join(config.clone());
            assert!(matches!(error, Err(Error::Invalid { name: found, .. }) if found == *name));
        });
        assert!(results.iter().all(|r| r.is_ok()), "{name}");
    }
}

/// Rank 0 does not track: nobody's backward starts, and nobody waits.
fn backward_that_was_not_agreed<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let spec = DispatchSpec { backward: r.rank != 0, ..DispatchSpec::new(0, 1) };
        let h = r.prepare(&[0; T], &spec).expect("prepare");
        assert_eq!(h.agreement().absent, [0]);
        let before = r.calls();
        if r.rank != 0 || s.ranks == 1 {
            let (n, grad) = (h.rows() * H, vec![0.0; T * H]);
            let errors = [
                r.combine_bwd(&h, F32(H), &grad).map(drop),
                r.combine_bwd_rows(&h, F32(H), &grad).map(drop),
                r.dispatch_bwd(&h, F32(H), &vec![0.0; n], None).map(drop),
            ];
            for error in errors {
                assert!(matches!(error, Err(Error::BackwardNotAgreed { absent, .. }) if absent == [0]));
            }
        }
        assert_eq!(r.calls(), before, "no collective");
        r.works();
    });
}

fn handle_of_another_group<D: Target>(s: &Setup<D>) {
    let foreign = |device: &D| {
        let group = device.alone(GroupConfig::new(2, T)).expect("group");
        let mut rank = Rank { rank: 0, group, columns: 1, forward_only: false, later: false };
        rank.prepare(&[0; T], &training(0, 1)).expect("prepare")
    };
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let own = r.prepare(&[0; T], &training(0, 1)).expect("prepare");
        let h = if r.rank == 0 { foreign(r.group.device()) } else { own };
        let rows = vec![0.0; h.rows() * H];
        fails_on_rank_zero(r, "handle", |r| r.dispatch(&h, F32(H), &[0.0; T * H], None));
        fails_on_rank_zero(r, "handle", |r| r.combine(&h, F32(H), &rows));
        if r.forward_only {
            return;
        }
        fails_on_rank_zero(r, "handle", |r| r.combine_bwd(&h, F32(H), &[0.0; T * H]));
        fails_on_rank_zero(r, "handle", |r| r.dispatch_bwd(&h, F32(H), &rows, None));
    });
}

/// Raw calls with one wrong size on rank 0.
fn bad_shape_on_one_rank<D: Target>(s: &Setup<D>) {
    use moebius::DType::{BF16, F32 as Single};
    use moebius::ep::{DispatchGrads, DispatchInputs, DispatchOutputs};
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let device = r.group.device().clone();
        let make = |dtype, dims: &[usize]| device.put(dtype, &vec![0.0; dims.iter().product()], dims);
        let h = r.prepare(&[0; T], &training(0, 1)).expect("prepare");
        // What rank 0 gets wrong in turn; the others get everything right.
        let n = h.rows();
        for fault in 0..8 {
            let here = |i: usize| r.rank == 0 && fault == i;
            let t_in = if here(0) { T + 1 } else { T };
            let tokens = make(Single, &[t_in, H]);
            let weights = make(if here(1) { BF16 } else { Single }, &[T, 1]);
            let mut recv = make(Single, &[if here(2) { n + 1 } else { n }, H]);
            let inputs = DispatchInputs { tokens: tokens.view(), weights: Some(weights.view()), scales: None };
            let outputs = DispatchOutputs { tokens: recv.view_mut(), weights: None, scales: None };
            let names = ["tokens", "weights", "recv tokens"];
            if fault < 3 {
                fails_on_rank_zero(r, names[fault], |r| r.group.dispatcher().dispatch(&h, inputs, outputs));
                continue;
            }
            let eo = make(Single, &[if here(3) { n + 1 } else { n }, H]);
            let mut out = make(Single, &[T, if here(4) { H + 1 } else { H }]);
            if fault < 5 {
                let names = ["expert_out", "out"];
                fails_on_rank_zero(r, names[fault - 3], |r| {
                    r.group.dispatcher().combine(&h, eo.view(), out.view_mut())
                });
                continue;
            }
            if r.forward_only {
                break;
            }
            let grad = make(Single, &[T, H]);
            let mut d_eo = make(if here(5) { BF16 } else { Single }, &[n, H]);
            if fault == 5 {
                fails_on_rank_zero(r, "grad_expert_out", |r| {
                    r.group.dispatcher().combine_bwd(&h, grad.view(), d_eo.view_mut())
                });
                continue;
            }
            let g_weights = make(Single, &[if here(6) { n + 2 } else { n }]);
            let mut d_tokens = make(Single, &[if here(7) { T + 1 } else { T }, H]);
            let names = ["grad weights", "d_tokens"];
            let grads = DispatchGrads {
                rows: d_eo.view(),
                weights: Some(g_weights.view()),
                d_tokens: d_tokens.view_mut(),
                d_weights: None,
            };
            fails_on_rank_zero(r, names[fault - 6], |r| r.group.dispatcher().dispatch_bwd(&h, grads));
        }
    });
}

/// Ranks that meet with different handles or different calls exchange nothing and learn it at once.
fn tags_that_differ<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let handles: Vec<Handle<D>> =
            (0..2).map(|layer| r.prepare(&[0; T], &training(layer, 1)).expect("prepare")).collect();
        let rows = vec![1.0; handles[0].rows() * H];
        let me = r.rank;
        let is_mismatch = |result: Result<()>, ops: [Op; 2]| match result {
            Err(Error::Comm(CommError::TagMismatch { rank, tag, peer_tag, peer, .. })) => {
                assert_eq!(rank, me);
                let odd = usize::from(rank != 0);
                assert_eq!((tag.op, peer_tag.op), (ops[odd], ops[1 - odd]));
                assert!((peer == 0) != (rank == 0));
                assert_ne!(tag, peer_tag);
            }
            other => panic!("{other:?}"),
        };
        let h = &handles[usize::from(r.rank == 0)];
        let ops = [Op::Combine, Op::Dispatch];
        let same = r.combine(h, F32(H), &rows).map(drop);
        let mixed = match me {
            0 => r.combine(&handles[0], F32(H), &rows).map(drop),
            _ => r.dispatch(&handles[0], F32(H), &[1.0; T * H], None).map(drop),
        };
        is_mismatch(same, [Op::Combine; 2]);
        is_mismatch(mixed, ops);
        r.works();
    });
}

/// Hidden sizes or dtypes that differ between ranks, each fine by itself.
fn widths_and_dtypes_that_differ<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        // A token for every rank: whoever differs, somebody notices.
        let ids: Vec<i64> = (0..s.ranks as i64).map(|rank| rank * 2).collect();
        let h = r.prepare(&ids, &training(0, s.ranks)).expect("prepare");
        // Twice what the harness widens narrow rows to, so that widths differ on the wire too.
        let (wide, h8) = (r.rank == 0, 2 * H.max(r.columns));
        let hidden = if wide { 2 * h8 } else { h8 };
        let error = r.dispatch(&h, F32(hidden), &vec![0.0; hidden], None);
        assert!(matches!(error, Err(Error::Comm(CommError::SizeMismatch { .. }))), "{error:?}");
        r.works();
        // Equal bytes, other type.
        let rows = match wide {
            true => Rows { dtype: moebius::DType::F32, hidden: h8 },
            false => Rows { dtype: moebius::DType::BF16, hidden: 2 * h8 },
        };
        let error = r.dispatch(&h, rows, &vec![0.0; rows.hidden], None);
        assert!(matches!(error, Err(Error::Comm(CommError::ArgumentMismatch { .. }))), "{error:?}");
        r.works();
    });
}
