//! Auxiliary losses: their sums, and the losses written out.

use super::devices::cases;
use super::*;

cases!(sums_by_hand, totals_by_hand, totals_are_refused, ranks_add_up, extremes, no_tokens, the_same_bits_every_time,);

/// The formulas over the logits of all ranks, token by token.
pub fn loss(c: &RouterConfig, aux: &AuxConfig, ranks: &[Vec<f64>]) -> f64 {
    let (e, k) = (c.num_experts, c.top_k);
    let exp_sum = |l: &[f64]| l.iter().map(|l| l.exp()).sum::<f64>();
    let softmax = |l: &[f64]| -> Vec<f64> { l.iter().map(|x| x.exp() / exp_sum(l)).collect() };
    let sigmoids = |l: &[f64]| -> Vec<f64> {
        let s: Vec<f64> = l.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
        s.iter().map(|x| x / s.iter().sum::<f64>()).collect()
    };
    let of_sigmoid = matches!(c.score, Score::Sigmoid | Score::TopkSigmoid);
    // E·Σ f·P over some tokens; all formulas used here choose the largest logits.
    let over = |l: &[f64], scores: &dyn Fn(&[f64]) -> Vec<f64>, per_token: f64| -> f64 {
        let t = (l.len() / e) as f64;
        let (mut f, mut p) = (vec![0.0; e], vec![0.0; e]);
        for row in l.chunks(e) {
            let mut order: Vec<usize> = (0..e).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            order[..k].iter().for_each(|&e| f[e] += 1.0 / (t * per_token));
            scores(row).iter().zip(&mut p).for_each(|(s, p)| *p += s / t);
        }
        e as f64 * f.iter().zip(&p).map(|(f, p)| f * p).sum::<f64>()
    };
    let scores: &dyn Fn(&[f64]) -> Vec<f64> = if of_sigmoid { &sigmoids } else { &softmax };
    let all = ranks.concat();
    let balance = match aux.balance_kind {
        BalanceKind::Switch => over(&all, scores, k as f64),
        BalanceKind::HuggingFace => over(&all, &softmax, 1.0),
        BalanceKind::Sequence { length } => {
            let each: Vec<f64> =
                ranks.iter().flat_map(|l| l.chunks(length * e)).map(|l| over(l, scores, k as f64)).collect();
            each.iter().sum::<f64>() / each.len() as f64
        }
        other => panic!("{other:?} has no formula here"),
    };
    let rows = all.chunks(e).map(|l| exp_sum(l).ln().powi(2));
    aux.balance * balance + aux.z * rows.sum::<f64>() / (all.len() / e) as f64
}

/// By hand: two tokens, E = 2, K = 1, logits (0, ln 3) and (0, 0).
fn sums_by_hand<D: Target>(device: &D) {
    let d = On::wide(device);
    let logits = [0.0, 3f64.ln(), 0.0, 0.0];
    // Two or three roundings of values up to 2.4.
    let exact = D::bound(1e-15, 5e-7);
    let z = 4f64.ln().powi(2) + 2f64.ln().powi(2);
    for score in [Score::Softmax, Score::TopkSoftmax] {
        let c = router(2, 1, score);
        let (ids, _) = d.route(&c, &logits, None, None).unwrap();
        assert_eq!(ids, [1, 0]);
        let sums = d.aux_sums(&c, &balance(BalanceKind::Switch, 1.0, 1.0), &logits, &ids).unwrap();
        close("switch", &sums, &[1.0, 1.0, 0.75, 1.25, 2.0, z, 0.0, 0.0], exact);
    }
    // Sigmoids (1/2, 3/4), (1/2, 1/2) over their sums: (2/5, 3/5), (1/2, 1/2).
    let c = router(2, 1, Score::Sigmoid);
    let sums = d.aux_sums(&c, &balance(BalanceKind::Switch, 1.0, 1.0), &logits, &[1, 0]).unwrap();
    close("sigmoid", &sums, &[1.0, 1.0, 0.9, 1.1, 2.0, z, 0.0, 0.0], exact);
    // One token a sequence: 2·(3/5) and 2·(1/2).
    let kind = BalanceKind::Sequence { length: 1 };
    let sums = d.aux_sums(&c, &balance(kind, 1.0, 1.0), &logits, &[1, 0]).unwrap();
    close("sequence", &sums, &[1.0, 1.0, 0.9, 1.1, 2.0, z, 2.2, 2.0], exact);
    // Hugging Face's takes softmax, whatever was chosen.
    let kind = BalanceKind::HuggingFace;
    let sums = d.aux_sums(&c, &balance(kind, 1.0, 1.0), &logits, &[0, 0]).unwrap();
    close("hugging face", &sums, &[1.0, 1.0, 0.75, 1.25, 2.0, z, 0.0, 0.0], exact);
}

/// By hand, from sums whose losses every type holds exactly: E = 2, two tokens, one choice each.
fn totals_by_hand<D: Target>(device: &D) {
    let d = On::wide(device);
    let sums = [1.0, 1.0, 0.75, 1.25, 2.0, 10.0, 2.25, 2.0];
    let of = |kind, k, b, z| d.aux_total(&router(2, k, Score::Softmax), &balance(kind, b, z), &sums).unwrap();
    // E·Σ f·P = 2·(1/2·3/8 + 1/2·5/8) = 1, z = 10/2.
    assert_eq!(of(BalanceKind::Switch, 1, 0.5, 0.125), 0.5 + 0.625);
    assert_eq!(of(BalanceKind::Switch, 2, 0.5, 0.0), 0.25);
    assert_eq!(of(BalanceKind::HuggingFace, 2, 0.5, 0.0), 0.5);
    assert_eq!(of(BalanceKind::Sequence { length: 1 }, 1, 2.0, 0.0), 2.25);
    assert_eq!(of(BalanceKind::Switch, 1, 0.0, 0.125), 0.625);
    // A loss that is not asked for stays out where it is infinite.
    let mut infinite = sums;
    infinite[5] = f64::INFINITY;
    let c = router(2, 1, Score::Softmax);
    assert_eq!(d.aux_total(&c, &balance(BalanceKind::Switch, 0.5, 0.0), &infinite).unwrap(), 0.5);
    assert_eq!(d.aux_total(&c, &balance(BalanceKind::Switch, 0.5, 0.5), &infinite).unwrap(), f64::INFINITY);
    // The host's own arithmetic in the device's type, to the bit, where numbers round.
    for kind in [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 50 }] {
        for (experts, seed) in [(8, 1), (96, 2), (520, 3)] {
            let (c, aux) = (router(experts, 3, Score::Softmax), balance(kind, 0.013, 0.0007));
            let logits = Numbers::new(seed).logits(300 * experts);
            let (ids, _) = d.route(&c, &logits, None, None).unwrap();
            let s = d.aux_sums(&c, &aux, &logits, &ids).unwrap();
            let dot: f64 = (0..experts).map(|e| s[e] * s[experts + e]).sum();
            let tail = &s[2 * experts..];
            let picks = if kind == BalanceKind::HuggingFace { tail[0] } else { tail[0] * 3.0 };
            let loss = match kind {
                BalanceKind::Sequence { .. } => tail[2] / tail[3],
                _ => experts as f64 * dot / picks / tail[0],
            };
            let want = 0.013 * loss + 0.0007 * (tail[1] / tail[0]);
            let want = if d.dtype == DType::F64 { want } else { f64::from(want as f32) };
            let found = d.aux_total(&c, &aux, &s).unwrap();
            assert_eq!(found.to_bits(), want.to_bits(), "{kind:?}, {experts} experts: {found} and {want}");
        }
    }
}

fn totals_are_refused<D: Target>(device: &D) {
    let d = On::wide(device);
    let (c, aux) = (router(2, 1, Score::Softmax), balance(BalanceKind::Switch, 1.0, 1.0));
    let wrong = |sums: usize, out: (DType, &[usize])| {
        let sums = d.put(&vec![1.0; sums], &[sums]).unwrap();
        let mut out = Tensor::empty(&d.device, out.0, out.1).unwrap();
        let call = AuxTotal { config: &c, aux: &aux, sums: sums.view(), out: out.view_mut() };
        d.device.aux_total(call)
    };
    assert!(wrong(8, (d.dtype, &[1])).is_ok());
    let error = wrong(7, (d.dtype, &[1]));
    assert!(matches!(error, Err(Error::Shape { ref tensor, .. }) if tensor == "sums"), "{error:?}");
    let error = wrong(8, (d.dtype, &[2]));
    assert!(matches!(error, Err(Error::Shape { ref tensor, .. }) if tensor == "out"), "{error:?}");
    let error = wrong(8, (DType::I32, &[1]));
    assert!(matches!(error, Err(Error::DType { ref tensor, .. }) if tensor == "out"), "{error:?}");
}

/// The sums of ranks add up to those of one rank, for every kind (sequences do not cross ranks).
fn ranks_add_up<D: Target>(device: &D) {
    let d = On::wide(device);
    for kind in [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 50 }] {
        let c = router(8, 3, Score::Softmax);
        let aux = balance(kind, 1.0, 1.0);
        let logits = Numbers::new(1).logits(300 * 8);
        let (ids, _) = d.route(&c, &logits, None, None).unwrap();
        let whole = d.aux_sums(&c, &aux, &logits, &ids).unwrap();
        let mut parts = vec![0.0; whole.len()];
        for (l, ids) in logits.chunks(100 * 8).zip(ids.chunks(100 * 3)) {
            d.aux_sums(&c, &aux, l, ids).unwrap().iter().zip(&mut parts).for_each(|(s, p)| *p += s);
        }
        // Sums of 300 terms of about 1: 300²/2 roundings of at most 2⁻⁵³, or of 2⁻²⁴ in random directions.
        close("parts", &parts, &whole, D::bound(1e-11, 1e-3));
        let from_sums = match kind {
            BalanceKind::Sequence { .. } => whole[18] / whole[19],
            _ => {
                let per_token = if kind == BalanceKind::Switch { 3.0 } else { 1.0 };
                8.0 * (0..8).map(|e| whole[e] * whole[8 + e]).sum::<f64>() / (300.0 * 300.0 * per_token)
            }
        };
        let without_z = balance(kind, 1.0, 0.0);
        close("loss", &[from_sums], &[loss(&c, &without_z, &[logits])], D::bound(1e-13, 1e-5));
    }
}

/// An even load has the loss 1 (Switch) or K (Hugging Face), everything on one expert up to E.
fn extremes<D: Target>(device: &D) {
    let d = On::wide(device);
    let even = [5.0, 0.0, 0.0, 5.0];
    let c = router(2, 1, Score::Softmax);
    assert!((loss(&c, &balance(BalanceKind::Switch, 1.0, 0.0), &[even.to_vec()]) - 1.0).abs() < 1e-15);
    let one = [40.0, 0.0, 40.0, 0.0];
    let sums = d.aux_sums(&c, &balance(BalanceKind::Switch, 1.0, 0.0), &one, &[0, 0]).unwrap();
    close("one expert", &sums[..5], &[2.0, 0.0, 2.0, 0.0, 2.0], 1e-15);
}

fn no_tokens<D: Target>(device: &D) {
    let d = On::wide(device);
    for kind in [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 4 }] {
        let (c, aux) = (router(4, 2, Score::Softmax), balance(kind, 1.0, 1.0));
        let sums = d.aux_sums(&c, &aux, &[], &[]).unwrap();
        assert_eq!(sums, [0.0; 12]);
        assert_eq!(d.aux_total(&c, &aux, &sums).unwrap(), 0.0);
        assert!(d.route_bwd(&c, &[], &[], &[], None, Some((&aux, &sums, 1.0))).unwrap().is_empty());
    }
}

fn the_same_bits_every_time<D: Target>(device: &D) {
    let d = On::f32(device);
    let c = router(16, 4, Score::Sigmoid);
    let logits = Numbers::new(3).logits(5000 * 16);
    let (ids, _) = d.route(&c, &logits, None, None).unwrap();
    let aux = balance(BalanceKind::Switch, 1.0, 1.0);
    let bits = || d.aux_sums(&c, &aux, &logits, &ids).unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let first = bits();
    for _ in 0..20 {
        assert_eq!(bits(), first);
    }
    assert_eq!(f64::from_bits(first[32]), 5000.0);
}
