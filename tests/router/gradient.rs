//! A device's gradients against central differences of the CPU's forward in f64.

use moebius::cpu::Cpu;

use super::devices::cases;
use super::reference::{Case, FAMILIES};
use super::*;

cases!(
    every_formula,
    jitter_multiplies_the_gradient_too,
    other_combinations,
    kept_sum,
    dropped_choices,
    auxiliary_losses,
    weights_and_losses_together,
);

/// Step of the differences, and what they are good for: h² from the cut-off, 2⁻⁵²/h ≈ 2e-10 from rounding, on losses
/// of about 10.
const H: f64 = 1e-6;
const TOLERANCE: f64 = 1e-8;

/// Some ten roundings of 2⁻²⁴ on gradients up to about 5 are added where the device has no f64.
fn tolerance<D: Target>() -> f64 {
    D::bound(TOLERANCE, 5e-6)
}

/// Where losses are computed.
fn exact() -> On<Cpu> {
    On::wide(&Cpu::poisoning())
}

/// Central differences of a function of the logits.
fn differences(logits: &[f64], mut loss: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let mut l = logits.to_vec();
    (0..l.len())
        .map(|i| {
            let mut at = |x: f64| {
                l[i] = x;
                loss(&l)
            };
            let (above, below) = (at(logits[i] + H), at(logits[i] - H));
            l[i] = logits[i];
            (above - below) / (2.0 * H)
        })
        .collect()
}

fn bias(case: &Case) -> Option<&[f64]> {
    case.family.has_bias().then_some(&case.bias[..])
}

fn check<D: Target>(d: &On<D>, case: &Case, jitter: Option<Jitter>, seed: u64) {
    let c = &case.config;
    let (ids, _) = d.route(c, &case.logits, bias(case), jitter).unwrap();
    let mut n = Numbers::new(seed);
    let cotangent: Vec<f64> = ids.iter().map(|_| n.unit()).collect();
    let loss = |l: &[f64]| {
        let (now, w) = exact().route(c, l, bias(case), jitter).unwrap();
        assert_eq!(now, ids, "the step changed the choice");
        w.iter().zip(&cotangent).map(|(w, c)| w * c).sum()
    };
    let want = differences(&case.logits, loss);
    let got = d.route_bwd(c, &case.logits, &ids, &cotangent, jitter, None).unwrap();
    close(&format!("{case:?}"), &got, &want, tolerance::<D>());
}

fn every_formula<D: Target>(device: &D) {
    let d = On::wide(device);
    for family in FAMILIES {
        for seed in 0..12 {
            check(&d, &Case::new(family, 5, seed, false), None, seed);
        }
    }
}

fn jitter_multiplies_the_gradient_too<D: Target>(device: &D) {
    let d = On::wide(device);
    for family in FAMILIES {
        let mut case = Case::new(family, 5, 3, false);
        case.config.jitter = 0.2;
        let jitter = Jitter { seed: 1, step: 2, layer: 3, first_token: 4 };
        check(&d, &case, Some(jitter), 3);
    }
}

/// Formulas no family has, but the pipeline allows.
fn other_combinations<D: Target>(device: &D) {
    let d = On::wide(device);
    let norms = [
        Renorm { p: 1.0, epsilon: 0.1, floor: 0.0 },
        Renorm { p: 3.0, epsilon: 0.0, floor: 0.0 },
        Renorm { p: 0.5, epsilon: 0.2, floor: 0.1 },
        Renorm { p: 2.0, epsilon: 0.0, floor: 0.7 },
    ];
    let scores =
        [Score::Softmax, Score::Sigmoid, Score::TopkSoftmax, Score::TopkSigmoid, Score::SparseMixer { epsilon: 0.3 }];
    for (i, score) in scores.into_iter().enumerate() {
        for (j, norm) in norms.into_iter().enumerate() {
            for grouping in [None, groups(4, 2, GroupScore::Max), groups(4, 3, GroupScore::Top2Sum)] {
                for biased in [false, true] {
                    let mixer = matches!(score, Score::SparseMixer { .. });
                    if mixer && (biased || grouping.is_some()) {
                        continue;
                    }
                    let mut case = Case::new(FAMILIES[0], 0, 0, false);
                    let mut n = Numbers::new((i * 10 + j) as u64);
                    case.config = router(12, if mixer { 2 } else { 4 }, score);
                    (case.config.renorm, case.config.groups) = (Some(norm), grouping);
                    (case.config.selection_bias, case.config.scale) = (biased, 1.7);
                    case.logits = n.logits(4 * 12);
                    let bias: Vec<f64> = (0..12).map(|_| 0.2 * n.unit()).collect();
                    check_with_bias(&d, &case, biased.then_some(&bias[..]));
                }
            }
        }
    }
}

fn check_with_bias<D: Target>(d: &On<D>, case: &Case, bias: Option<&[f64]>) {
    let c = &case.config;
    let (ids, weights) = d.route(c, &case.logits, bias, None).unwrap();
    let loss = |l: &[f64]| {
        let (now, w) = exact().route(c, l, bias, None).unwrap();
        assert_eq!(now, ids, "the step changed the choice");
        w.iter().enumerate().map(|(i, w)| w * (i as f64).cos()).sum()
    };
    let want = differences(&case.logits, loss);
    assert!(weights.iter().all(|w| w.is_finite()));
    let cotangent: Vec<f64> = (0..ids.len()).map(|i| (i as f64).cos()).collect();
    let got = d.route_bwd(c, &case.logits, &ids, &cotangent, None, None).unwrap();
    close(&format!("{c:?}"), &got, &want, tolerance::<D>());
}

/// Weights scaled after a drop: through `renormalize_kept` and the router.
fn kept_sum<D: Target>(device: &D) {
    let d = On::wide(device);
    for family in FAMILIES {
        for seed in 20..26 {
            let case = Case::new(family, 6, seed, false);
            let (c, k) = (&case.config, case.config.top_k);
            let (ids, _) = d.route(c, &case.logits, bias(&case), None).unwrap();
            let mut n = Numbers::new(seed);
            let kept: Vec<i32> = ids.iter().map(|&id| if n.below(3) == 0 { -1 } else { id }).collect();
            let cotangent: Vec<f64> = ids.iter().map(|_| n.unit()).collect();
            let loss = |l: &[f64]| {
                let w = exact().route(c, l, bias(&case), None).unwrap().1;
                exact().renormalize_kept(k, &w, &kept, None).unwrap().iter().zip(&cotangent).map(|(w, c)| w * c).sum()
            };
            let want = differences(&case.logits, loss);
            let weights = d.route(c, &case.logits, bias(&case), None).unwrap().1;
            let d_weights = d.renormalize_kept(k, &weights, &kept, Some(&cotangent)).unwrap();
            let got = d.route_bwd(c, &case.logits, &ids, &d_weights, None, None).unwrap();
            close(&format!("{case:?}"), &got, &want, 10.0 * tolerance::<D>()); // ratios of sums enlarge the loss
        }
    }
}

/// A dropped choice has a zero gradient; the token's other choices keep theirs, through the renormalization too.
fn dropped_choices<D: Target>(device: &D) {
    let d = On::wide(device);
    let case = Case::new(FAMILIES[0], 4, 1, false);
    let c = &case.config;
    let (ids, _) = d.route(c, &case.logits, None, None).unwrap();
    let cotangent: Vec<f64> = (0..ids.len()).map(|i| if i % 2 == 0 { 0.0 } else { 1.0 + i as f64 }).collect();
    let want = differences(&case.logits, |l| {
        exact().route(c, l, None, None).unwrap().1.iter().zip(&cotangent).map(|(w, c)| w * c).sum()
    });
    close("dropped", &d.route_bwd(c, &case.logits, &ids, &cotangent, None, None).unwrap(), &want, tolerance::<D>());
}

/// Differences of the losses themselves, written out, over one rank and two.
fn auxiliary_losses<D: Target>(device: &D) {
    let d = On::wide(device);
    let kinds = [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 3 }];
    let scores = [Score::Softmax, Score::Sigmoid, Score::TopkSoftmax, Score::TopkSigmoid];
    for kind in kinds {
        for score in scores {
            for (a, z) in [(0.7, 0.0), (0.0, 0.3), (0.7, 0.3)] {
                let c = router(6, 2, score);
                let mut n = Numbers::new(9);
                let ranks = [n.logits(7 * 6), n.logits(4 * 6)];
                let mut aux = balance(kind, a, z);
                aux.over_ranks = true;
                check_aux(&d, &c, &aux, &ranks, 1.3);
                aux.over_ranks = false;
                check_aux(&d, &c, &aux, &ranks[..1], -0.4);
            }
        }
    }
}

fn check_aux<D: Target>(d: &On<D>, c: &RouterConfig, aux: &AuxConfig, ranks: &[Vec<f64>], d_loss: f64) {
    let ids: Vec<Vec<i32>> = ranks.iter().map(|l| d.route(c, l, None, None).unwrap().0).collect();
    let mut sums = vec![0.0; 2 * c.num_experts + 4];
    for (l, ids) in ranks.iter().zip(&ids) {
        d.aux_sums(c, aux, l, ids).unwrap().iter().zip(&mut sums).for_each(|(s, sum)| *sum += s);
    }
    for r in 0..ranks.len() {
        let want = differences(&ranks[r], |l| {
            let mut all = ranks.to_vec();
            all[r] = l.to_vec();
            d_loss * super::aux_losses::loss(c, aux, &all)
        });
        let zeros = vec![0.0; ids[r].len()];
        let got = d.route_bwd(c, &ranks[r], &ids[r], &zeros, None, Some((aux, &sums, d_loss))).unwrap();
        close(&format!("{aux:?} {:?} rank {r}", c.score), &got, &want, tolerance::<D>());
    }
}

/// Both gradients in one call add up, and noise acts on that of the weights alone.
fn weights_and_losses_together<D: Target>(device: &D) {
    let d = On::wide(device);
    let mut c = router(6, 2, Score::Softmax);
    (c.renorm, c.jitter) = (renorm(0.0), 0.3);
    let aux = balance(BalanceKind::Switch, 0.5, 0.1);
    let jitter = Some(Jitter { seed: 5, step: 0, layer: 1, first_token: 100 });
    let mut n = Numbers::new(4);
    let logits = n.logits(100 * 6);
    let (ids, _) = d.route(&c, &logits, None, jitter).unwrap();
    let d_weights: Vec<f64> = ids.iter().map(|_| n.unit()).collect();
    let zeros = vec![0.0; ids.len()];
    let sums = d.aux_sums(&c, &aux, &logits, &ids).unwrap();
    let of_weights = d.route_bwd(&c, &logits, &ids, &d_weights, jitter, None).unwrap();
    let of_losses = d.route_bwd(&c, &logits, &ids, &zeros, None, Some((&aux, &sums, 2.0))).unwrap();
    let both = d.route_bwd(&c, &logits, &ids, &d_weights, jitter, Some((&aux, &sums, 2.0))).unwrap();
    let want: Vec<f64> = of_weights.iter().zip(&of_losses).map(|(a, b)| a + b).collect();
    close("sum", &both, &want, D::bound(1e-15, 1e-6));
    assert!(of_losses.iter().any(|d| d.abs() > 1e-4) && of_weights.iter().any(|d| d.abs() > 1e-4));
}
