//! The router that a GPU holds in registers (softmax, at most 256 experts, at most 32 choices), where it is special:
//! logits that lanes share, ties across lanes and within one, and both its borders. A selection bias of zeros changes
//! no choice and is for the general kernel, whose bits are expected. The CPU has one formula, which must keep to this
//! as well.

use moebius::cpu::Cpu;

use super::devices::cases;
use super::*;

cases!(
    choices_and_weights,
    gradients,
    a_nan_is_named_wherever_it_lies,
    a_nan_that_is_told_later_leaves_distinct_choices,
);

const INF: f64 = f64::INFINITY;

/// Ragged and full rows of 32, and the first number past the registers.
const EXPERTS: [usize; 12] = [5, 32, 33, 60, 64, 65, 96, 128, 130, 255, 256, 257];

/// No multiple of a block's eight warps.
const TOKENS: usize = 27;

/// Choices a token, 33 being the first number past the registers; every expert where they are few.
fn choices(experts: usize) -> Vec<usize> {
    let mut all = vec![1, 2, 8, 9, 32, 33];
    all.retain(|k| *k < experts);
    all.extend([experts].into_iter().filter(|e| *e <= 60));
    all
}

fn formulas(experts: usize, top_k: usize) -> Vec<RouterConfig> {
    let with = |renorm, scale| {
        let mut c = router(experts, top_k, Score::Softmax);
        (c.renorm, c.scale) = (renorm, scale);
        c
    };
    vec![
        with(None, 1.0),
        with(None, 1.7),
        with(renorm(1e-20), 1.0),
        with(Some(Renorm { p: 1.0, epsilon: 0.25, floor: 0.9 }), 2.5),
    ]
}

/// The same formula for the general kernel.
fn general(c: &RouterConfig) -> RouterConfig {
    let mut c = c.clone();
    c.selection_bias = true;
    c
}

/// Logits that are equal or apart by 1/8, so that scores are equal or apart in every type.
fn rows(experts: usize, n: &mut Numbers) -> Vec<f64> {
    type Row = fn(usize, usize) -> f64;
    let special: [Row; 10] = [
        // Zeros of both signs are a tie of all.
        |i, _| if i % 3 == 0 { -0.0 } else { 0.0 },
        // Ties of one lane.
        |i, _| f64::from(i % 32 == 5),
        // Ties of neighbors, in the last of what a lane holds.
        |i, e| f64::from(i + 12 >= e),
        |i, _| i as f64 / 8.0,
        |i, e| (e - i) as f64 / 8.0,
        |i, e| if i == e / 2 || i == e - 1 { 0.5 } else { -INF },
        |_, _| -INF,
        |i, e| if i == 0 || i == e - 1 { INF } else { (i % 5) as f64 },
        |_, _| INF,
        |i, e| if i == e - 1 { INF } else { -INF },
    ];
    let mut all: Vec<f64> = special.iter().flat_map(|row| (0..experts).map(move |i| row(i, experts))).collect();
    all.extend((special.len() * experts..TOKENS * experts).map(|_| (n.unit() * 32.0).round() / 8.0));
    all
}

/// Experts by falling score, the lower first among equals.
fn order(logits: &[f64]) -> Vec<i32> {
    let max = logits.iter().copied().fold(-INF, f64::max);
    let score = |l: f64| if l == max { 1.0 } else { (l - max).exp() };
    let mut order: Vec<i32> = (0..logits.len() as i32).collect();
    order.sort_by(|&a, &b| score(logits[b as usize]).total_cmp(&score(logits[a as usize])));
    order
}

/// Equal to the bit, one NaN like another.
fn same(name: &str, a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "{name}: length");
    let differs = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
    if let Some(i) = differs {
        panic!("{name}[{i}]: {:e} and the general kernel's {:e}", a[i], b[i]);
    }
}

/// Every formula over every size, with logits.
fn each(seed: u64, check: impl Fn(&str, &RouterConfig, &[f64], &mut Numbers)) {
    let mut n = Numbers::new(seed);
    for experts in EXPERTS {
        for k in choices(experts) {
            for (i, c) in formulas(experts, k).iter().enumerate() {
                let logits = rows(experts, &mut n);
                check(&format!("E {experts} K {k} formula {i}"), c, &logits, &mut n);
            }
        }
    }
}

fn choices_and_weights<D: Target>(device: &D) {
    let (d, exact) = (On::f32(device), On::wide(&Cpu::poisoning()));
    each(21, |name, c, logits, _| {
        let (e, k) = (c.num_experts, c.top_k);
        let (ids, weights) = d.route(c, logits, None, None).unwrap();
        for (t, row) in logits.chunks(e).enumerate() {
            assert_eq!(ids[t * k..][..k], order(row)[..k], "{name}: ids of token {t}");
        }
        let (general_ids, general_weights) = d.route(&general(c), logits, Some(&vec![0.0; e]), None).unwrap();
        assert_eq!(ids, general_ids, "{name}: the general kernel's ids");
        same(&format!("{name}: weights"), &weights, &general_weights);
        let (cpu_ids, cpu_weights) = exact.route(c, logits, None, None).unwrap();
        assert_eq!(ids, cpu_ids, "{name}: the CPU's ids");
        // An exponential to 2 ulp and a quotient, five roundings of 2⁻²⁴; so is the norm, and two more at the end; of
        // values up to the scale.
        close(&format!("{name}: weights"), &weights, &cpu_weights, 12.0 * 2f64.powi(-24) * c.scale);
    });
}

/// Distinct experts of any score.
fn any_ids(experts: usize, k: usize, n: &mut Numbers) -> Vec<i32> {
    let mut of_token = || {
        let mut all: Vec<i32> = (0..experts as i32).collect();
        (0..k).for_each(|j| all.swap(j, j + n.below(experts - j)));
        all.truncate(k);
        all
    };
    (0..TOKENS).flat_map(|_| of_token()).collect()
}

fn gradients<D: Target>(device: &D) {
    let (d, exact) = (On::f32(device), On::wide(&Cpu::poisoning()));
    each(22, |name, c, logits, n| {
        let (e, k) = (c.num_experts, c.top_k);
        let routed = d.route(c, logits, None, None).unwrap().0;
        let d_weights: Vec<f64> = routed.iter().map(|_| f64::from(n.unit() as f32)).collect();
        for (chosen, ids) in [("best", routed), ("any", any_ids(e, k, n))] {
            let name = format!("{name}, {chosen}");
            let run = |c: &RouterConfig| d.route_bwd(c, logits, &ids, &d_weights, None, None).unwrap();
            let found = run(c);
            same(&name, &found, &run(&general(c)));
            // A gradient is a product of up to four quotients of weights, each off by the five roundings of 2⁻²⁴ of a
            // score, and two such are subtracted; a norm divides by weights that multiply again.
            let want = exact.route_bwd(c, logits, &ids, &d_weights, None, None).unwrap();
            close(&name, &found, &want, 40.0 * 2f64.powi(-24) * c.scale);
        }
    });
}

/// Sizes, and an expert in the last part of what a lane holds.
const LATE: [(usize, usize); 7] = [(33, 32), (60, 40), (64, 63), (96, 70), (130, 129), (256, 255), (257, 256)];

fn a_nan_is_named_wherever_it_lies<D: Target>(device: &D) {
    let d = On::f32(device);
    for (experts, at) in LATE {
        let mut logits = rows(experts, &mut Numbers::new(1));
        for place in [11 * experts + at, 11 * experts + experts - 1, 26 * experts] {
            logits[place] = f64::NAN;
        }
        match d.route(&router(experts, 8, Score::Softmax), &logits, None, None) {
            Err(Error::NanLogits { call: "route", rank: 3, layer: 7, token: 11, expert }) if expert == at => {}
            other => panic!("E {experts}: {other:?}"),
        }
    }
}

/// Whoever reads the choices before the error is told gets K experts that differ, weights that say NaN where nothing
/// divides them away, and all other tokens' as ever. A CPU tells at once.
fn a_nan_that_is_told_later_leaves_distinct_choices<D: Target>(device: &D) {
    let d = On::f32(device);
    let bad = [2, 11, 26];
    for (experts, at) in LATE {
        for k in [1, 2, 8, 32] {
            for c in formulas(experts, k) {
                let name = format!("E {experts} K {k} {:?}", c.renorm);
                let clean = rows(experts, &mut Numbers::new(2));
                let mut logits = clean.clone();
                bad.iter().for_each(|t| logits[t * experts + at] = f64::NAN);
                let deferred = |c: &RouterConfig, bias: Option<&[f64]>| {
                    let routed = d.routed(c, &logits, (bias, None), Reporting::Deferred).expect("tensors");
                    match routed.settled {
                        Err(Error::NanLogits { call: "route", rank: 3, layer: 7, token: 2, expert })
                            if expert == at => {}
                        other => panic!("{name}: {other:?}"),
                    }
                    routed.returned.then_some((routed.ids, routed.weights))
                };
                let Some((ids, weights)) = deferred(&c, None) else { return };
                let zeros = vec![0.0; experts];
                let (general_ids, general_weights) = deferred(&general(&c), Some(&zeros)).expect("as before");
                assert_eq!(ids, general_ids, "{name}: the general kernel's ids");
                same(&name, &weights, &general_weights);
                let (clean_ids, clean_weights) = d.route(&c, &clean, None, None).unwrap();
                for t in 0..TOKENS {
                    let (ids, weights) = (&ids[t * k..][..k], &weights[t * k..][..k]);
                    if bad.contains(&t) {
                        assert_eq!(ids, (0..k as i32).collect::<Vec<_>>(), "{name}: ids of token {t}");
                        // A norm that is no number divides to 0.
                        let left = |w: &f64| if c.renorm.is_some() { *w == 0.0 } else { w.is_nan() };
                        assert!(weights.iter().all(left), "{name}: {weights:?} of token {t}");
                    } else {
                        assert_eq!((ids, weights), (&clean_ids[t * k..][..k], &clean_weights[t * k..][..k]), "{name}");
                    }
                }
            }
        }
    }
}
