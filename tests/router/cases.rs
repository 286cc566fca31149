//! Closed forms, ties, edges, noise, errors.

use moebius::Error;
use moebius::balance::update_selection_bias;
use moebius::metrics::Load;

use super::devices::cases;
use super::*;

cases!(
    softmax_with_and_without_renorm,
    topk_softmax,
    sigmoid_with_bias,
    topk_sigmoid,
    group_limit,
    masked_groups_count_as_zero,
    sparse_mixer,
    ties_go_to_the_lower_id,
    one_expert_and_all_experts,
    no_tokens,
    infinite_logits,
    nan_is_an_error_naming_the_first,
    tokens_are_independent,
    jitter_multiplies_logits,
    jitter_does_not_depend_on_ranks,
    kept_sum,
    wrong_arguments,
    bias_balances_a_skewed_router,
);

/// ln of each: logits whose softmax is the numbers over their sum.
fn ln(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v.ln()).collect()
}

/// Logits whose sigmoids are these.
fn logit(values: &[f64]) -> Vec<f64> {
    values.iter().map(|s| (s / (1.0 - s)).ln()).collect()
}

/// ln, exp and a few operations in f64.
const EXACT: f64 = 4e-15;

/// A few roundings of 2⁻²⁴ of values up to 1.
const EXACT_F32: f64 = 1e-6;

fn check<D: Target>(d: &On<D>, c: &RouterConfig, logits: &[f64], bias: Option<&[f64]>, ids: &[i32], weights: &[f64]) {
    let most = weights.iter().copied().fold(1.0, f64::max);
    for (d, exact) in [(d, D::bound(EXACT, EXACT_F32 * most)), (&On::f32(&d.device), EXACT_F32 * most)] {
        let (got_ids, got) = d.route(c, logits, bias, None).unwrap();
        assert_eq!(got_ids, ids);
        close("weights", &got, weights, exact);
    }
}

fn softmax_with_and_without_renorm<D: Target>(device: &D) {
    let d = On::wide(device);
    let l = ln(&[1.0, 4.0, 2.0, 3.0]);
    let mut c = router(4, 2, Score::Softmax);
    check(&d, &c, &l, None, &[1, 3], &[0.4, 0.3]);
    c.renorm = renorm(0.0);
    check(&d, &c, &l, None, &[1, 3], &[4.0 / 7.0, 3.0 / 7.0]);
    c.renorm = renorm(0.3); // 0.7 + 0.3
    check(&d, &c, &l, None, &[1, 3], &[0.4, 0.3]);
    c.renorm = Some(Renorm { p: 2.0, epsilon: 0.0, floor: 0.0 }); // √(0.16 + 0.09) = 0.5
    check(&d, &c, &l, None, &[1, 3], &[0.8, 0.6]);
    c.renorm = Some(Renorm { p: 1.0, epsilon: 0.0, floor: 2.0 });
    check(&d, &c, &l, None, &[1, 3], &[0.2, 0.15]);
    (c.renorm, c.scale) = (renorm(0.0), 7.0); // scaled after renormalizing
    check(&d, &c, &l, None, &[1, 3], &[4.0, 3.0]);
}

fn topk_softmax<D: Target>(device: &D) {
    let d = On::wide(device);
    check(&d, &router(4, 2, Score::TopkSoftmax), &ln(&[1.0, 4.0, 2.0, 6.0]), None, &[3, 1], &[0.6, 0.4]);
}

fn sigmoid_with_bias<D: Target>(device: &D) {
    let d = On::wide(device);
    let l = logit(&[0.5, 0.25, 0.75, 0.2]);
    let mut c = router(4, 2, Score::Sigmoid);
    check(&d, &c, &l, None, &[2, 0], &[0.75, 0.5]);
    // The bias chooses 3 before 1; weights are without it.
    c.selection_bias = true;
    check(&d, &c, &l, Some(&[0.0, 1.0, 0.0, 2.0]), &[3, 1], &[0.2, 0.25]);
    (c.renorm, c.scale) = (renorm(1e-20), 9.0);
    check(&d, &c, &l, Some(&[0.0, 1.0, 0.0, 2.0]), &[3, 1], &[4.0, 5.0]);
    // A bias of −∞ forbids an expert.
    let forbid = [f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY, 0.0];
    check(&d, &c, &l, Some(&forbid), &[1, 3], &[5.0, 4.0]);
}

fn topk_sigmoid<D: Target>(device: &D) {
    let d = On::wide(device);
    check(&d, &router(3, 2, Score::TopkSigmoid), &logit(&[0.5, 0.25, 0.75]), None, &[2, 0], &[0.75, 0.5]);
    check(&d, &router(3, 1, Score::TopkSigmoid), &[-1e4, -2e4, -3e4], None, &[0], &[0.0]);
}

/// Groups of two: (7, 1), (6, 5), (4, 3), in 26ths.
fn group_limit<D: Target>(device: &D) {
    let d = On::wide(device);
    let l = ln(&[7.0, 1.0, 6.0, 5.0, 4.0, 3.0]);
    let mut c = router(6, 2, Score::Softmax);
    // By its largest, group 0 is first; by its two largest, group 1.
    c.groups = groups(3, 1, GroupScore::Max);
    check(&d, &c, &l, None, &[0, 1], &[7.0 / 26.0, 1.0 / 26.0]);
    c.groups = groups(3, 1, GroupScore::Top2Sum);
    check(&d, &c, &l, None, &[2, 3], &[6.0 / 26.0, 5.0 / 26.0]);
    c.groups = groups(3, 2, GroupScore::Max);
    check(&d, &c, &l, None, &[0, 2], &[7.0 / 26.0, 6.0 / 26.0]);
    c.groups = groups(3, 2, GroupScore::Top2Sum); // 11, 8 (first of the ties), 7
    check(&d, &c, &l, None, &[0, 2], &[7.0 / 26.0, 6.0 / 26.0]);
    // The bias takes part in the ranking: group 2 is 7 + 26, and its experts follow their biased scores.
    c.groups = groups(3, 1, GroupScore::Top2Sum);
    c.selection_bias = true;
    let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
    check(&d, &c, &l, Some(&bias), &[5, 4], &[3.0 / 26.0, 4.0 / 26.0]);
}

/// Where the kept group has no score left above 0, the masked others count as 0 and the lower id goes first.
fn masked_groups_count_as_zero<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(4, 2, Score::Softmax);
    c.groups = groups(2, 1, GroupScore::Max);
    let l = [0.0, 0.0, 1.0, f64::NEG_INFINITY];
    let (ids, w) = d.route(&c, &l, None, None).unwrap();
    assert_eq!(ids, [2, 0]);
    let total = 2.0 + 1f64.exp();
    let exact = D::bound(EXACT, EXACT_F32);
    close("weights", &w, &[1f64.exp() / total, 0.0], exact);
    // The masked choice passes no gradient of its own; the other's is that of a plain softmax over all four.
    let p = [1.0 / total, 1.0 / total, 1f64.exp() / total, 0.0];
    let want: Vec<f64> = (0..4).map(|e| p[2] * (f64::from(e == 2) - p[e as usize])).collect();
    close("d", &d.route_bwd(&c, &l, &ids, &[1.0, 5.0], None, None).unwrap(), &want, exact);
    // Where others cannot be chosen, the second is of the same group.
    c.groups = groups(2, 1, GroupScore::Top2Sum);
    c.score = Score::Sigmoid;
    assert_eq!(d.route(&c, &[0.0, 0.0, 9.0, -9.0], None, None).unwrap().0, [0, 1]);
}

/// max 4: logits below 4 − 0.2·4 = 3.2 are masked (ε = 0.1). Second: max 3.5, those below 2.8.
fn sparse_mixer<D: Target>(device: &D) {
    let d = On::wide(device);
    let c = router(5, 2, Score::SparseMixer { epsilon: 0.1 });
    let l = [3.0, 4.0, 1.0, 3.5, -4.0];
    let first = 1.0 / (1.0 + (-0.5f64).exp());
    let second = 1.0 / (1.0 + (-0.5f64).exp());
    check(&d, &c, &l, None, &[1, 3], &[first, second]);
    // Negative logits are relative to themselves: (−1 + 1.5)/1.5 = 1/3 > 0.2 is masked.
    check(&d, &c, &[-1.0, -1.5, -9.0, -1.1, -9.0], None, &[0, 3], &[1.0 / (1.0 + (-0.1f64).exp()), 1.0]);
    // All zero: 0/0 masks nothing; five equal, then four.
    check(&d, &c, &[0.0; 5], None, &[0, 1], &[0.2, 0.25]);
}

fn ties_go_to_the_lower_id<D: Target>(device: &D) {
    let d = On::wide(device);
    let scores = [Score::Softmax, Score::Sigmoid, Score::TopkSoftmax, Score::TopkSigmoid];
    for score in scores {
        for k in [1, 3, 6] {
            let (ids, _) = d.route(&router(6, k, score), &[0.25; 6], None, None).unwrap();
            assert_eq!(ids, (0..k as i32).collect::<Vec<_>>());
        }
        let (ids, _) = d.route(&router(6, 3, score), &[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], None, None).unwrap();
        assert_eq!(ids, [1, 3, 0]);
        // Zeros of both signs are equal.
        assert_eq!(d.route(&router(3, 2, score), &[-0.0, 0.0, -0.0], None, None).unwrap().0, [0, 1]);
    }
    let mut c = router(6, 2, Score::Sigmoid);
    for by in [GroupScore::Max, GroupScore::Top2Sum] {
        c.groups = groups(3, 1, by);
        assert_eq!(d.route(&c, &[0.5; 6], None, None).unwrap().0, [0, 1]);
        assert_eq!(d.route(&c, &[0.1, 0.2, 0.5, 0.6, 0.6, 0.5], None, None).unwrap().0, [3, 2]);
    }
}

fn one_expert_and_all_experts<D: Target>(device: &D) {
    let d = On::wide(device);
    let c = router(1, 1, Score::Softmax);
    let (ids, w) = d.route(&c, &[3.0, -8.0], None, None).unwrap();
    assert_eq!((ids, w), (vec![0, 0], vec![1.0, 1.0]));
    assert_eq!(d.route_bwd(&c, &[3.0, -8.0], &[0, 0], &[2.0, 5.0], None, None).unwrap(), [0.0, 0.0]);
    // K = E: all, in order; renormalizing a softmax changes nothing.
    let mut c = router(4, 4, Score::Softmax);
    c.renorm = renorm(0.0);
    check(&d, &c, &ln(&[1.0, 4.0, 2.0, 3.0]), None, &[1, 3, 2, 0], &[0.4, 0.3, 0.2, 0.1]);
}

fn no_tokens<D: Target>(device: &D) {
    let d = On::wide(device);
    let (ids, w) = d.route(&router(4, 2, Score::Softmax), &[], None, None).unwrap();
    assert!(ids.is_empty() && w.is_empty());
    assert!(d.route_bwd(&router(4, 2, Score::Softmax), &[], &[], &[], None, None).unwrap().is_empty());
    assert!(d.renormalize_kept(2, &[], &[], None).unwrap().is_empty());
}

/// Every formula gives finite weights and gradients on infinite logits, as the limit would.
fn infinite_logits<D: Target>(device: &D) {
    let d = On::wide(device);
    const INF: f64 = f64::INFINITY;
    let rows = [[-INF; 4], [INF; 4], [-INF, 0.0, INF, 1.0], [-INF, 2.0, -INF, -INF], [INF, -INF, INF, 0.0]];
    let scores =
        [Score::Softmax, Score::Sigmoid, Score::TopkSoftmax, Score::TopkSigmoid, Score::SparseMixer { epsilon: 0.1 }];
    for score in scores {
        for norm in [None, renorm(0.0)] {
            for row in rows {
                let mut c = router(4, 2, score);
                c.renorm = norm;
                let (ids, w) = d.route(&c, &row, None, None).unwrap();
                assert_ne!(ids[0], ids[1]);
                assert!(w.iter().all(|w| w.is_finite() && *w >= 0.0), "{score:?} {row:?}: {w:?}");
                let grad = d.route_bwd(&c, &row, &ids, &[1.0, -2.0], None, None).unwrap();
                assert!(grad.iter().all(|g| g.is_finite()), "{score:?} {row:?}: {grad:?}");
                let aux = balance(BalanceKind::Switch, 1.0, 0.0);
                let sums = d.aux_sums(&c, &aux, &row, &ids).unwrap();
                assert!(sums[..9].iter().all(|s| s.is_finite()), "{score:?} {row:?}: {sums:?}");
            }
        }
    }
    let c = router(4, 2, Score::Softmax);
    check(&d, &c, &[-INF, 0.0, INF, 1.0], None, &[2, 0], &[1.0, 0.0]);
    check(&d, &c, &[INF, -INF, INF, 0.0], None, &[0, 2], &[0.5, 0.5]);
    check(&d, &c, &[-INF; 4], None, &[0, 1], &[0.25, 0.25]);
}

fn nan_is_an_error_naming_the_first<D: Target>(device: &D) {
    let d = On::wide(device);
    for tokens in [3, 1000] {
        for score in [Score::Softmax, Score::TopkSigmoid, Score::SparseMixer { epsilon: 0.0 }] {
            let mut logits = vec![0.5; tokens * 4];
            logits[2 * 4 + 1] = f64::NAN;
            logits[2 * 4 + 3] = f64::NAN;
            logits[tokens * 4 - 1] = f64::NAN;
            match d.route(&router(4, 2, score), &logits, None, None) {
                Err(Error::NanLogits { call: "route", rank: 3, layer: 7, token: 2, expert: 1 }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Blocks and threads change nothing: a large batch is its tokens one by one.
fn tokens_are_independent<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(8, 3, Score::Sigmoid);
    (c.groups, c.renorm, c.jitter) = (groups(4, 2, GroupScore::Top2Sum), renorm(0.0), 0.1);
    let mut n = Numbers::new(8);
    let (logits, d_weights) = (n.logits(1000 * 8), n.logits(1000 * 3));
    let jitter = |first_token| Some(Jitter { seed: 1, step: 2, layer: 3, first_token });
    let (ids, w) = d.route(&c, &logits, None, jitter(7)).unwrap();
    let d_logits = d.route_bwd(&c, &logits, &ids, &d_weights, jitter(7), None).unwrap();
    for t in 0..1000 {
        let row = &logits[t * 8..][..8];
        let at = jitter(7 + t as u64);
        let one = d.route(&c, row, None, at).unwrap();
        assert_eq!((&ids[t * 3..][..3], &w[t * 3..][..3]), (&one.0[..], &one.1[..]));
        assert_eq!(d_logits[t * 8..][..8], d.route_bwd(&c, row, &one.0, &d_weights[t * 3..][..3], at, None).unwrap());
    }
}

/// The generator, written out again.
fn factor(epsilon: f64, words: [u64; 5]) -> f64 {
    let mut h = 0u64;
    for word in words {
        h = (h ^ word).wrapping_add(0x9e3779b97f4a7c15);
        h = (h ^ (h >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        h = (h ^ (h >> 27)).wrapping_mul(0x94d049bb133111eb);
        h ^= h >> 31;
    }
    1.0 + epsilon * (2.0 * ((h >> 40) as f64 / 16777216.0) - 1.0)
}

fn jitter_multiplies_logits<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(8, 3, Score::Softmax);
    c.jitter = 0.25;
    let logits = Numbers::new(2).logits(200 * 8);
    let jitter = Jitter { seed: 11, step: 22, layer: 33, first_token: 44 };
    let factors: Vec<f64> = (0..1600).map(|i| factor(0.25, [11, 22, 33, 44 + i as u64 / 8, i as u64 % 8])).collect();
    let noisy: Vec<f64> = logits.iter().zip(&factors).map(|(l, f)| l * f).collect();
    let mut plain = c.clone();
    plain.jitter = 0.0;
    let want = d.route(&plain, &noisy, None, None).unwrap();
    let got = d.route(&c, &logits, None, Some(jitter)).unwrap();
    assert_eq!(got.0, want.0);
    // In f32, the product of two rounded numbers.
    close("noisy weights", &got.1, &want.1, D::bound(0.0, EXACT_F32));
    // Without a key there is no noise, and without an ε neither.
    let quiet = d.route(&plain, &logits, None, None).unwrap();
    assert_eq!(d.route(&c, &logits, None, None).unwrap(), quiet);
    assert_eq!(d.route(&plain, &logits, None, Some(jitter)).unwrap(), quiet);
    assert_ne!(quiet, want);
    // Uniform in 1 ± ε: mean within 4 σ = 4·0.25/√(3·1600) ≈ 0.0145, and both ends reached.
    assert!(factors.iter().all(|f| (0.75..1.25).contains(f)));
    assert!((factors.iter().sum::<f64>() / 1600.0 - 1.0).abs() < 0.0145);
    assert!(factors.iter().any(|f| *f < 0.76) && factors.iter().any(|f| *f > 1.24));
    // Each word of the key matters.
    let changed = [
        Jitter { seed: 12, ..jitter },
        Jitter { step: 23, ..jitter },
        Jitter { layer: 34, ..jitter },
        Jitter { first_token: 45, ..jitter },
    ];
    for other in changed {
        assert_ne!(d.route(&c, &logits, None, Some(other)).unwrap(), got);
    }
}

fn jitter_does_not_depend_on_ranks<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(8, 2, Score::Softmax);
    c.jitter = 0.5;
    let logits = Numbers::new(6).logits(240 * 8);
    let at = |first_token| Some(Jitter { seed: 3, step: 4, layer: 5, first_token });
    let whole = d.route(&c, &logits, None, at(0)).unwrap();
    for split in [[0usize, 240], [100, 140], [1, 239], [80, 160]] {
        let (mut first, mut ids, mut weights) = (0, vec![], vec![]);
        for tokens in split {
            let (i, w) = d.route(&c, &logits[first * 8..(first + tokens) * 8], None, at(first as u64)).unwrap();
            ids.extend(i);
            weights.extend(w);
            first += tokens;
        }
        assert_eq!((ids, weights), whole);
    }
}

fn kept_sum<D: Target>(device: &D) {
    let d = On::wide(device);
    let w = [0.5, 0.25, 0.25, 0.5, 0.25, 0.25, 0.5, 0.3, 0.2, 0.0, 0.0, 1.0];
    let kept = [3, -1, 1, -1, -1, -1, 0, 1, 2, 0, 1, -1];
    // 1/0.75 of the kept; nothing left; nothing dropped; nothing to scale.
    let want = [0.5 / 0.75, 0.0, 0.25 / 0.75, 0.0, 0.0, 0.0, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0];
    close("kept", &d.renormalize_kept(3, &w, &kept, None).unwrap(), &want, D::bound(1e-15, EXACT_F32));
    let grad: Vec<f64> = (1..=12).map(f64::from).collect();
    let got = d.renormalize_kept(3, &w, &kept, Some(&grad)).unwrap();
    // Token 0: D = 3/4, S = 1, Σ g·w = 0.5 + 0.75 = 1.25. All get 1.25/D = 5/3; the kept also g·S/D − 1.25·S/D².
    let first = [5.0 / 3.0 + 4.0 / 3.0 - 20.0 / 9.0, 5.0 / 3.0, 5.0 / 3.0 + 4.0 - 20.0 / 9.0];
    close("first", &got[..3], &first, D::bound(4e-15, 4.0 * EXACT_F32));
    assert_eq!(got[3..6], [0.0; 3]);
    close("nothing dropped", &got[6..9], &[7.0, 8.0, 9.0], D::bound(0.0, 9.0 * EXACT_F32));
    close("nothing to scale", &got[9..], &[10.0, 11.0, 0.0], D::bound(0.0, 11.0 * EXACT_F32));
}

/// Each wrong argument is refused by an error that names it.
fn wrong_arguments<D: Target>(device: &D) {
    let d = On::wide(device);
    let names = |r: Result<(Vec<i32>, Vec<f64>)>, name: &str| {
        let text = r.expect_err(name).to_string();
        assert!(text.contains(name), "{text:?} does not name {name}");
    };
    let mut c = router(4, 2, Score::Sigmoid);
    let l = [0.0; 8];
    names(d.route(&c, &l, Some(&[0.0; 4]), None), "selection_bias");
    c.selection_bias = true;
    names(d.route(&c, &l, None, None), "selection_bias");
    names(d.route(&c, &l, Some(&[0.0; 3]), None), "selection_bias");
    if D::has_f64() {
        // On a GPU the bias is nowhere on the host.
        names(d.route(&c, &l, Some(&[0.0, 0.0, f64::NAN, 0.0]), None), "selection_bias[2]");
    }
    c.selection_bias = false;
    c.top_k = 5;
    names(d.route(&c, &l, None, None), "top_k");
    c = router(4, 2, Score::SparseMixer { epsilon: 0.1 });
    c.groups = groups(2, 1, GroupScore::Max);
    names(d.route(&c, &l, None, None), "sparsemixer");

    let c = router(4, 2, Score::Sigmoid);
    let ids = [0, 1, 2, 4];
    let text = d.route_bwd(&c, &l, &ids, &[0.0; 4], None, None).unwrap_err().to_string();
    assert_eq!(
        text,
        "route_bwd on rank 3, layer 7: topk_ids[1, 1] = 4: expected an expert in 0..4, as `route` gave it"
    );
    let ids = [0, -1, 2, 3];
    let text = d.route_bwd(&c, &l, &ids, &[0.0; 4], None, None).unwrap_err().to_string();
    assert_eq!(
        text,
        "route_bwd on rank 3, layer 7: topk_ids[0, 1] = -1: expected an expert in 0..4, as `route` gave it"
    );
    let aux = balance(BalanceKind::Switch, 1.0, 0.0);
    let no_tokens = [0.0; 12];
    let r = d.route_bwd(&c, &l, &[0, 1, 2, 3], &[0.0; 4], None, Some((&aux, &no_tokens, 1.0)));
    assert!(matches!(r, Err(Error::EmptySums { call: "route_bwd", rank: 3, layer: 7 })), "{r:?}");
    let no_sequences = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 2.0, 1.0, 0.0, 0.0];
    let sequences = balance(BalanceKind::Sequence { length: 2 }, 1.0, 0.0);
    let r = d.route_bwd(&c, &l, &[0, 1, 2, 3], &[0.0; 4], None, Some((&sequences, &no_sequences, 1.0)));
    assert!(matches!(r, Err(Error::EmptySums { call: "route_bwd", rank: 3, layer: 7 })), "{r:?}");
    let r = d.route_bwd(&c, &l, &[0, 1, 2, 3], &[0.0; 4], None, Some((&aux, &no_tokens[1..], 1.0)));
    assert!(r.unwrap_err().to_string().contains("aux.sums"));

    let l = device.put(D::wide(), &l, &[2, 4]);
    let run = |ids: &[usize], weights: DType| {
        let mut ids = Tensor::empty(device, DType::I32, ids).unwrap();
        let mut weights = Tensor::empty(device, weights, &[2, 2]).unwrap();
        let call = Route {
            config: &c,
            logits: l.view(),
            selection_bias: None,
            jitter: None,
            origin: ORIGIN,
            reporting: Reporting::Immediate,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
        };
        device.route(call)
    };
    assert!(matches!(run(&[4, 1], D::wide()), Err(Error::Shape { .. })));
    assert!(matches!(run(&[2, 2], DType::BF16), Err(Error::DType { .. })));
}

#[test]
fn load_metrics() {
    let load = Load::from_ids(&[0, 1, 1, -1, 3, 1, 0, 1], 4).unwrap();
    assert_eq!(load, Load::new(vec![2, 4, 0, 1], 1));
    assert_eq!(load.total(), 7);
    assert_eq!(load.max_over_mean(), 16.0 / 7.0);
    let q = |c: f64| -(c / 7.0) * (c / 7.0).ln();
    assert!((load.entropy() - (q(2.0) + q(4.0) + q(1.0)) / 4f64.ln()).abs() < 1e-15);
    for (counts, ratio, entropy) in [
        (vec![5, 5, 5], 1.0, 1.0),
        (vec![0, 9, 0, 0], 4.0, 0.0),
        (vec![0, 0], 1.0, 1.0),
        (vec![7], 1.0, 1.0),
        (vec![0], 1.0, 1.0),
        (vec![], 1.0, 1.0),
    ] {
        let load = Load::new(counts, 0);
        assert_eq!(load.max_over_mean(), ratio, "{load:?}");
        assert!((load.entropy() - entropy).abs() < 1e-15, "{load:?}: {}", load.entropy());
    }
    assert!(Load::from_ids(&[0, 4], 4).unwrap_err().to_string().contains("ids[1]"));
}

#[test]
fn bias_moves_towards_an_even_load() {
    let mut bias = [0.5f32, 0.0, -1.0, 0.0];
    update_selection_bias(&mut bias, &[10, 2, 4, 0], 0.25).unwrap();
    assert_eq!(bias, [0.25, 0.25, -1.0, 0.25]);
    update_selection_bias(&mut bias, &[0, 0, 0, 0], 0.25).unwrap();
    assert_eq!(bias, [0.25, 0.25, -1.0, 0.25]);
    // The mean 4/3 is not a whole number.
    let mut bias = [0.0f32; 3];
    update_selection_bias(&mut bias, &[1, 1, 2], 1.0).unwrap();
    assert_eq!(bias, [1.0, 1.0, -1.0]);
    // Counts whose sum overflows 64 bits.
    update_selection_bias(&mut bias, &[usize::MAX, usize::MAX, 0], 1.0).unwrap();
    assert_eq!(bias, [0.0, 0.0, 0.0]);
    assert!(update_selection_bias(&mut bias, &[1, 2], 1.0).unwrap_err().to_string().contains("tokens_per_expert"));
    assert!(update_selection_bias(&mut bias, &[1, 2, 3], f32::NAN).unwrap_err().to_string().contains("u:"));
    assert_eq!(bias, [0.0, 0.0, 0.0]);
}

/// A router whose scores are uneven becomes even by its bias alone.
fn bias_balances_a_skewed_router<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(8, 2, Score::Sigmoid);
    c.selection_bias = true;
    let mut n = Numbers::new(12);
    let logits: Vec<f64> = (0..500 * 8).map(|i| n.unit() + (i % 8) as f64 * 0.3).collect();
    let mut bias = [0.0f32; 8];
    let load = |bias: &[f32]| {
        let bias: Vec<f64> = bias.iter().map(|&b| f64::from(b)).collect();
        Load::from_ids(&d.route(&c, &logits, Some(&bias), None).unwrap().0, 8).unwrap()
    };
    let before = load(&bias);
    for _ in 0..400 {
        let counts = load(&bias).tokens_per_expert;
        update_selection_bias(&mut bias, &counts, 0.002).unwrap();
    }
    let after = load(&bias);
    assert!(before.max_over_mean() > 2.0, "{before:?}");
    assert!(after.max_over_mean() < 1.15 && after.entropy() > 0.99, "{after:?}");
}
