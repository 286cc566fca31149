//! Several handles in flight, uneven tokens, padding that nobody reads, opaque rows, counted collectives.

use moebius::ep::{DispatchInputs, DispatchOutputs, DispatchSpec, GroupConfig, Handle};
use moebius::{DType, Error, Result, Tensor};

use super::harness::*;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(fewer_tokens_after_more),
        case!(one_f_one_b_with_three_handles),
        case!(layers_with_other_k_and_alignment),
        case!(padding_is_never_read),
        case!(uneven_and_zero_tokens),
        case!(no_tokens_anywhere),
        case!(opaque_rows_with_scales),
        case!(sixteen_byte_rule),
        case!(collectives_are_counted),
        case!(one_rank_without_a_communicator_of_ones_own),
    ]
}

const H: usize = 4;

/// One forward with w = 1: the rows that came, for backward.
fn forward<D: Target>(r: &mut Rank<D>, h: &Handle<D>, x: &[f64]) -> Vec<f64> {
    let recv = r.dispatch(h, F32(H), x, None).expect("dispatch").rows;
    let out = r.combine(h, F32(H), &recv).expect("combine");
    let k = h.spec().top_k as f64;
    assert_eq!(out, x.iter().map(|v| k * v).collect::<Vec<_>>());
    recv
}

/// Loss ½‖recv‖²: dx = K·x.
fn backward<D: Target>(r: &mut Rank<D>, h: &Handle<D>, x: &[f64], recv: &[f64]) {
    let d = r.dispatch_bwd(h, F32(H), recv, None).expect("dispatch_bwd");
    let k = h.spec().top_k as f64;
    assert_eq!(d.tokens, x.iter().map(|v| k * v).collect::<Vec<_>>());
}

/// Nothing of a larger step is left in a smaller one.
fn fewer_tokens_after_more<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), 4), |r| {
        for tokens in [4, 1, 3, 0, 4] {
            let h = r.prepare(&vec![0; tokens], &training(0, 1)).expect("prepare");
            assert_eq!(h.rows(), if r.rank == 0 { tokens * s.ranks } else { 0 });
            let x = x(r.rank, tokens, H);
            let recv = forward(r, &h, &x);
            backward(r, &h, &x, &recv);
        }
    });
}

fn one_f_one_b_with_three_handles<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(4), 6), |r| {
        let me = r.rank;
        let batch = |m: usize| x(me * 8 + m, 6 - m, H);
        let ids = |m: usize| round_robin(me + m, 6 - m, 2, s.experts(4));
        let mut open = Vec::new();
        // F0 F1 B0 F2 B1 B2
        for (m, then_back) in [(0, false), (1, true), (2, true)] {
            let h = r.prepare(&ids(m), &training(0, 2)).expect("prepare");
            let recv = forward(r, &h, &batch(m));
            open.push((m, h, recv));
            if then_back {
                let (m, h, recv) = open.remove(0);
                backward(r, &h, &batch(m), &recv);
            }
        }
        let (m, h, recv) = open.remove(0);
        backward(r, &h, &batch(m), &recv);
    });
}

fn layers_with_other_k_and_alignment<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(4), 5), |r| {
        let mut open = Vec::new();
        for (layer, k, alignment) in [(0, 1, 1), (1, 4, 8), (2, 2, 16), (3, 3, 1)] {
            let spec = DispatchSpec { alignment, ..training(layer, k) };
            let h = r.prepare(&round_robin(r.rank, 5, k, s.experts(4)), &spec).expect("prepare");
            let x = x(layer as usize, 5, H);
            let recv = forward(r, &h, &x);
            open.push((h, x, recv));
        }
        let numbers: Vec<u64> = open.iter().map(|(h, ..)| h.sequence()).collect();
        assert!(numbers.windows(2).all(|n| n[0] < n[1]));
        while let Some((h, x, recv)) = open.pop() {
            backward(r, &h, &x, &recv);
        }
    });
}

/// NaN in pad rows of everything that combine and dispatch_bwd are given.
fn padding_is_never_read<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), 5), |r| {
        let spec = DispatchSpec { alignment: 8, ..training(0, 2) };
        let h = r.prepare(&round_robin(r.rank, 5, 2, s.experts(2)), &spec).expect("prepare");
        let x = x(r.rank, 5, H);
        let mut recv = r.dispatch(&h, F32(H), &x, Some(&[1.0; 10])).expect("dispatch");
        assert!(r.filled(&h).len() < h.rows(), "there is padding");
        r.poison_padding(&h, H, &mut recv.rows);
        r.poison_padding(&h, 1, &mut recv.weights);
        let twice: Vec<f64> = x.iter().map(|v| 2.0 * v).collect();
        assert_eq!(r.combine(&h, F32(H), &recv.rows).expect("combine"), twice);
        let d = r.dispatch_bwd(&h, F32(H), &recv.rows, Some(&recv.weights)).expect("dispatch_bwd");
        assert_eq!((d.tokens, d.weights), (twice, vec![1.0; 10]));
    });
}

fn uneven_and_zero_tokens<D: Target>(s: &Setup<D>) {
    // Rank 0 has none, then as many as its number; and the other way round.
    for turn in [false, true] {
        s.run(GroupConfig::new(s.experts(2), 8), |r| {
            let count = |rank: usize| if turn { s.ranks - 1 - rank } else { rank };
            let tokens = count(r.rank);
            let h = r.prepare(&round_robin(r.rank, tokens, 2, s.experts(2)), &training(0, 2)).expect("prepare");
            assert_eq!(h.first_token(), (0..r.rank).map(count).sum::<usize>());
            assert_eq!(h.total_tokens(), s.ranks * (s.ranks - 1) / 2);
            let x = x(r.rank, tokens, H);
            let recv = forward(r, &h, &x);
            backward(r, &h, &x, &recv);
        });
    }
}

fn no_tokens_anywhere<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), 8), |r| {
        let h = r.prepare(&[], &DispatchSpec { alignment: 4, ..training(0, 2) }).expect("prepare");
        assert_eq!((h.rows(), h.total_tokens()), (0, 0));
        let recv = forward(r, &h, &[]);
        backward(r, &h, &[], &recv);
        assert!(r.combine_bwd(&h, F32(H), &[]).expect("combine_bwd").is_empty());
        r.works();
    });
}

/// Dispatches bytes: rows, weights and scales of token t say whose they are.
fn dispatch_bytes<D: Target>(r: &mut Rank<D>, h: &Handle<D>, row: usize, scale: usize) -> Result<[Vec<u8>; 2]> {
    let t = h.tokens();
    let mark = |size: usize, add: usize| {
        let bytes: Vec<f64> = (0..t * size).map(|i| (r.rank * 16 + i / size + add) as f64).collect();
        r.put(DType::U8, &bytes, &[t, size])
    };
    let (tokens, scales) = (mark(row, 0), mark(scale, 128));
    let weights = r.put(DType::F32, &vec![0.5; t * h.spec().top_k], &[t, h.spec().top_k]);
    let mut recv = Tensor::empty(r.group.device(), DType::U8, &[h.rows(), row])?;
    let mut recv_weights = Tensor::empty(r.group.device(), DType::F32, &[h.rows()])?;
    let mut recv_scales = Tensor::empty(r.group.device(), DType::U8, &[h.rows(), scale])?;
    let inputs = DispatchInputs { tokens: tokens.view(), weights: Some(weights.view()), scales: Some(scales.view()) };
    let outputs = DispatchOutputs {
        tokens: recv.view_mut(),
        weights: Some(recv_weights.view_mut()),
        scales: Some(recv_scales.view_mut()),
    };
    r.group.dispatcher().dispatch(h, inputs, outputs)?;
    let weights = r.values(recv_weights.view());
    assert!(r.filled(h).iter().all(|slot| weights[*slot] == 0.5));
    let bytes = |t: &Tensor<D>| r.values(t.view()).into_iter().map(|v| v as u8).collect();
    Ok([bytes(&recv), bytes(&recv_scales)])
}

/// Scales move in lock-step with their rows, in every layout of sections.
fn opaque_rows_with_scales<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), 5), |r| {
        let spec = DispatchSpec { alignment: 4, ..DispatchSpec::new(0, 2) };
        let tokens = 5 - r.rank % 3;
        let h = r.prepare(&round_robin(r.rank, tokens, 2, s.experts(2)), &spec).expect("prepare");
        for (row, scale) in [(16, 16), (48, 16), (16, 32)] {
            let [rows, scales] = dispatch_bytes(r, &h, row, scale).expect("dispatch");
            let filled = r.filled(&h);
            for slot in 0..h.rows() {
                let (row, scale) = (&rows[slot * row..(slot + 1) * row], &scales[slot * scale..(slot + 1) * scale]);
                let (a, b) = if filled.contains(&slot) { (row[0], row[0] + 128) } else { (0, 0) };
                assert!(row.iter().all(|v| *v == a) && scale.iter().all(|v| *v == b), "slot {slot}");
            }
        }
    });
}

fn sixteen_byte_rule<D: Target>(s: &Setup<D>) {
    s.run(GroupConfig::new(s.experts(2), 5), |r| {
        let h = r.prepare(&round_robin(r.rank, 5, 2, s.experts(2)), &DispatchSpec::new(0, 2)).expect("prepare");
        for (row, scale, tensor) in [(24, 16, "tensor tokens"), (16, 8, "tensor scales")] {
            match dispatch_bytes(r, &h, row, scale) {
                Err(Error::Invalid { name, found, .. }) => {
                    assert_eq!(
                        (&name[..], found),
                        (tensor, row.max(scale).min(if row == 24 { 24 } else { 8 }).to_string())
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        r.works();
    });
}

fn collectives_are_counted<D: Target>(s: &Setup<D>) {
    let expected = s.collectives();
    s.run(GroupConfig::new(s.experts(2), 5), |r| {
        let mut last = r.calls();
        assert_eq!(last, s.joining(), "the comparison of configurations");
        let mut counts = Vec::new();
        let mut count = |r: &mut Rank<D>| {
            counts.push(r.calls() - last);
            last = r.calls();
        };
        let h = r.prepare(&round_robin(r.rank, 5, 2, s.experts(2)), &training(0, 2)).expect("prepare");
        count(r);
        let recv = r.dispatch(&h, F32(H), &[1.0; 5 * H], Some(&[1.0; 10])).expect("dispatch");
        count(r);
        r.combine(&h, F32(H), &recv.rows).expect("combine");
        count(r);
        let d = r.combine_bwd(&h, F32(H), &[1.0; 5 * H]).expect("combine_bwd");
        count(r);
        r.dispatch_bwd(&h, F32(H), &d, Some(&recv.weights)).expect("dispatch_bwd");
        count(r);
        assert_eq!(counts, expected);
        // Leaving rows where they arrived costs the same.
        r.dispatch_rows(&h, F32(H), &[1.0; 5 * H], None).expect("dispatch_rows");
        r.combine_bwd_rows(&h, F32(H), &[1.0; 5 * H]).expect("combine_bwd_rows");
        assert_eq!(r.calls() - last, expected[2] + expected[3]);
    });
}

fn one_rank_without_a_communicator_of_ones_own<D: Target>(s: &Setup<D>) {
    let group = s.device.alone(GroupConfig::new(4, 8)).expect("group");
    Rank { rank: group.rank(), group, columns: 1, forward_only: false, later: false }.works();
}
