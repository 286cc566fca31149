//! Results that are known without computing them. All values are exact in their dtype, so comparisons are too.

use moebius::ep::{DispatcherKind, GroupConfig};

use super::devices::seed;
use super::harness::*;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(identity_with_equal_weights),
        case!(unweighted_identity),
        case!(square_of_received),
        case!(constant_gradient),
        case!(weight_gradients_per_k),
        case!(absent_weight_gradients_are_zeros),
        case!(payload_dtypes),
        case!(same_bits_for_any_number_of_ranks),
        case!(same_bits_in_repeated_runs),
    ]
}

const T: usize = 6;
const H: usize = 8;

/// Identity expert with w = 1/K: out = x, and the gradient of ½‖out‖² is x.
fn identity_with_equal_weights<D: Target>(s: &Setup<D>) {
    for k in [1, 2, 4] {
        s.run(GroupConfig::new(s.experts(4), T), |r| {
            let x = x(r.rank, T, H);
            let w = vec![1.0 / k as f64; T * k];
            let h = r.prepare(&round_robin(r.rank, T, k, s.experts(4)), &training(0, k)).expect("prepare");
            let recv = r.dispatch(&h, F32(H), &x, Some(&w)).expect("dispatch");
            let scaled = |rows: &[f64]| -> Vec<f64> {
                rows.chunks(H).zip(&recv.weights).flat_map(|(row, w)| row.iter().map(move |v| v * w)).collect()
            };
            let out = r.combine(&h, F32(H), &scaled(&recv.rows)).expect("combine");
            assert_eq!(out, x);
            let d_eo = r.combine_bwd(&h, F32(H), &out).expect("combine_bwd");
            let d = r.dispatch_bwd(&h, F32(H), &scaled(&d_eo), None).expect("dispatch_bwd");
            assert_eq!(d.tokens, x);
        });
    }
}

/// Unweighted identity: out = K·x.
fn unweighted_identity<D: Target>(s: &Setup<D>) {
    for k in [1, 3, 4] {
        s.run(GroupConfig::new(s.experts(4), T), |r| {
            let x = x(r.rank, T, H);
            let h = r.prepare(&round_robin(r.rank, T, k, s.experts(4)), &training(0, k)).expect("prepare");
            let recv = r.dispatch(&h, F32(H), &x, None).expect("dispatch");
            let out = r.combine(&h, F32(H), &recv.rows).expect("combine");
            assert_eq!(out, x.iter().map(|v| k as f64 * v).collect::<Vec<_>>());
        });
    }
}

/// Loss ½‖recv‖²: dx = K·x.
fn square_of_received<D: Target>(s: &Setup<D>) {
    let k = 3;
    s.run(GroupConfig::new(s.experts(2) * 2, T), |r| {
        let x = x(r.rank, T, H);
        let h = r.prepare(&round_robin(r.rank, T, k, s.experts(2) * 2), &training(0, k)).expect("prepare");
        let recv = r.dispatch(&h, F32(H), &x, None).expect("dispatch");
        let d = r.dispatch_bwd(&h, F32(H), &recv.rows, None).expect("dispatch_bwd");
        assert_eq!(d.tokens, x.iter().map(|v| k as f64 * v).collect::<Vec<_>>());
    });
}

/// combine_bwd of a constant fills every slot with it, zeros the padding, and dispatch_bwd gives K times it.
fn constant_gradient<D: Target>(s: &Setup<D>) {
    let k = 2;
    s.run(GroupConfig::new(s.experts(4), T), |r| {
        let spec = moebius::ep::DispatchSpec { alignment: 4, ..training(0, k) };
        let h = r.prepare(&round_robin(r.rank, T, k, s.experts(4)), &spec).expect("prepare");
        let d_eo = r.combine_bwd(&h, F32(H), &[0.5; T * H]).expect("combine_bwd");
        let filled = r.filled(&h);
        for (slot, row) in d_eo.chunks(H).enumerate() {
            let expected = if filled.contains(&slot) { 0.5 } else { 0.0 };
            assert_eq!(row, [expected; H], "slot {slot}");
        }
        let d = r.dispatch_bwd(&h, F32(H), &d_eo, None).expect("dispatch_bwd");
        assert_eq!(d.tokens, [k as f64 * 0.5; T * H]);
    });
}

/// Weight gradients belong to one (t, k) each; they are never averaged over k.
fn weight_gradients_per_k<D: Target>(s: &Setup<D>) {
    let k = 2;
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let h = r.prepare(&round_robin(r.rank, T, k, s.experts(2)), &training(0, k)).expect("prepare");
        let w: Vec<f64> = (0..T * k).map(|i| (r.rank * 100 + i + 1) as f64).collect();
        let recv = r.dispatch(&h, F32(H), &[1.0; T * H], Some(&w)).expect("dispatch");
        // Each slot returns a function of its own weight, so what comes back says where it has been.
        let g: Vec<f64> = recv.weights.iter().map(|w| 3.0 * w).collect();
        let d = r.dispatch_bwd(&h, F32(H), &vec![0.0; h.rows() * H], Some(&g)).expect("dispatch_bwd");
        assert_eq!(d.weights, w.iter().map(|w| 3.0 * w).collect::<Vec<_>>());
        assert!(d.weights.chunks(k).all(|t| t[0] != t[1]));
    });
}

fn absent_weight_gradients_are_zeros<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), T), |r| {
        let h = r.prepare(&round_robin(r.rank, T, 2, s.experts(2)), &training(0, 2)).expect("prepare");
        // Present on rank 0 alone: presence may differ between ranks.
        let g = vec![0.0; h.rows()];
        let given = (r.rank == 0).then_some(&g[..]);
        let d = r.dispatch_bwd(&h, F32(H), &vec![1.0; h.rows() * H], given).expect("dispatch_bwd");
        assert_eq!(d.weights, [0.0; T * 2]);
        assert_eq!(d.tokens, [2.0; T * H]);
    });
}

fn payload_dtypes<D: Target>(s: &Setup<D>) {
    for &dtype in D::FLOATS {
        s.run(GroupConfig::new(s.experts(2), T), |r| {
            let rows = Rows { dtype, hidden: 4 };
            // Below 2⁸ in steps of 1: exact in bf16, and so are sums of two halves.
            let x: Vec<f64> = (0..T * 4).map(|i| (r.rank * 10 + i) as f64).collect();
            let h = r.prepare(&round_robin(r.rank, T, 2, s.experts(2)), &training(0, 2)).expect("prepare");
            let recv = r.dispatch(&h, rows, &x, Some(&[0.5; T * 2])).expect("dispatch");
            let halves: Vec<f64> = recv.rows.iter().map(|v| v * 0.5).collect();
            assert_eq!(r.combine(&h, rows, &halves).expect("combine"), x, "{dtype}");
            let d_eo = r.combine_bwd(&h, rows, &x).expect("combine_bwd");
            assert_eq!(d_eo, recv.rows, "{dtype}");
            let halves: Vec<f64> = d_eo.iter().map(|v| v * 0.5).collect();
            let d = r.dispatch_bwd(&h, rows, &halves, Some(&recv.weights)).expect("dispatch_bwd");
            assert_eq!((d.tokens, d.weights), (x, vec![0.5; T * 2]), "{dtype}");
        });
    }
}

/// Inexact f32 numbers without structure.
fn noise(own: u64, n: usize) -> Vec<f64> {
    let mut state = seed::seed(own).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        f64::from((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
    };
    (0..n).map(|_| next()).collect()
}

/// Forward and backward of 16 tokens over 8 experts, K = 3, spread over the ranks; in global token order.
fn step<D: Target>(s: &Setup<D>) -> Vec<f64> {
    let (total, experts, k) = (16, 8, 3);
    let t = total / s.ranks;
    let parts = s.run(GroupConfig::new(experts, total), |r| {
        let own = r.rank * t..(r.rank + 1) * t;
        let x = noise(1, total * H)[own.start * H..own.end * H].to_vec();
        let ids: Vec<i64> =
            own.clone().flat_map(|i| [i % 8, (i * 3 + 1) % 8, (i * 5 + 6) % 8].map(|e| e as i64)).collect();
        let ids: Vec<i64> = ids.chunks(k).flat_map(distinct).collect();
        let h = r.prepare(&ids, &training(0, k)).expect("prepare");
        let recv = r.dispatch(&h, F32(H), &x, None).expect("dispatch");
        let factor: Vec<f64> = r
            .segments(&h)
            .iter()
            .enumerate()
            .flat_map(|(e, (_, n))| vec![0.1 + (r.rank * 8 / s.ranks + e) as f64; *n])
            .collect();
        let eo: Vec<f64> =
            recv.rows.chunks(H).zip(&factor).flat_map(|(row, f)| row.iter().map(move |v| v * f)).collect();
        let mut out = r.combine(&h, F32(H), &eo).expect("combine");
        let d = r.dispatch_bwd(&h, F32(H), &eo, None).expect("dispatch_bwd");
        out.extend(d.tokens);
        out
    });
    let (out, dx): (Vec<_>, Vec<_>) = parts.iter().map(|p| p.split_at(t * H)).unzip();
    [out.concat(), dx.concat()].concat()
}

/// −1 in place of a repeated id.
fn distinct(ids: &[i64]) -> Vec<i64> {
    (0..ids.len()).map(|k| if ids[..k].contains(&ids[k]) { -1 } else { ids[k] }).collect()
}

/// Sums run in the order of k at the token's owner, so the number of ranks does not change a bit. All-gather, NCCL EP
/// and NVLink sum per rank first, hierarchical dispatch per host, so that one host has the bits of one rank, and hosts of one
/// rank those of all-gather: |error| <= (K + R)·2⁻²⁴·Σ|terms|, terms below 8·½, K = 3, R <= 8.
fn same_bits_for_any_number_of_ranks<D: Target>(s: &Setup<D>) {
    let of = |kind, ranks| step(&Setup { kind, ranks, forward_only: false, ranks_per_host: 0, ..s.clone() });
    let (one, many) = (of(DispatcherKind::Local, 1), step(s));
    assert!(one.iter().any(|v| *v != 0.0));
    let one_host = [0, s.ranks].contains(&s.ranks_per_host);
    match s.kind {
        DispatcherKind::Hierarchical if one_host => assert_eq!(one, many),
        DispatcherKind::AllGather
        | DispatcherKind::Hierarchical
        | DispatcherKind::NcclEp
        | DispatcherKind::NvLink
        | DispatcherKind::NvLinkLowLatency => {
            let bound = 11.0 * 2f64.powi(-24) * 3.0 * 4.05;
            assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() <= bound));
        }
        _ => assert_eq!(one, many),
    }
    if s.kind == DispatcherKind::Hierarchical && s.ranks_per_host == 1 {
        assert_eq!(of(DispatcherKind::AllGather, s.ranks), many);
    }
}

fn same_bits_in_repeated_runs<D: Target>(s: &Setup<D>) {
    let first = step(s);
    for _ in 0..4 {
        assert_eq!(step(s), first);
    }
}
