//! The order of the weights in both directions, and which of them must not share memory.

use crate::etp::Phase;

/// One use of a weight in a forward, as the first forward met it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::etp) struct WeightUse {
    pub weight: usize,
    /// `None`: it belongs to no layer, and is in use by itself.
    pub layer: Option<u32>,
    pub recompute: bool,
    /// It is in use until the layer's last weight is let go, in both directions.
    pub resident: bool,
    /// A backward uses it too.
    pub backward: bool,
}

/// One acquisition in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::etp) struct Acquisition {
    /// Which use.
    pub node: usize,
    /// It is gathered for this; else it is still there.
    pub fetch: bool,
    /// It stays after this, for a later step of the pass.
    pub keep: bool,
}

/// Runs of uses of one call of a layer: one that is called again has its weights again.
fn layers(uses: &[WeightUse]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    for (i, used) in uses.iter().enumerate() {
        match runs.last_mut() {
            Some(run)
                if used.layer.is_some()
                    && uses[run.start].layer == used.layer
                    && uses[run.clone()].iter().all(|before| before.weight != used.weight) =>
            {
                run.end = i + 1
            }
            _ => runs.push(i..i + 1),
        }
    }
    runs
}

/// The acquisitions of a pass, in order.
pub(in crate::etp) fn schedule(uses: &[WeightUse], phase: Phase) -> Vec<Acquisition> {
    match phase {
        Phase::Forward => (0..uses.len()).map(|node| Acquisition { node, fetch: true, keep: false }).collect(),
        Phase::Backward => backward(uses).into_iter().filter(|step| uses[step.node].backward).collect(),
    }
}

/// Those of a backward that uses all weights.
fn backward(uses: &[WeightUse]) -> Vec<Acquisition> {
    let mut steps = Vec::new();
    for run in layers(uses).into_iter().rev() {
        let resident = run.clone().filter(|node| uses[*node].resident);
        steps.extend(resident.map(|node| Acquisition { node, fetch: true, keep: false }));
        let recomputed = run.clone().filter(|node| uses[*node].recompute && !uses[*node].resident);
        steps.extend(recomputed.map(|node| Acquisition { node, fetch: true, keep: true }));
        let rest = run.rev().filter(|node| !uses[*node].resident);
        steps.extend(rest.map(|node| Acquisition { node, fetch: !uses[node].recompute, keep: false }));
    }
    steps
}

/// Pairs of uses that are in memory at the same time: what is in use, what is kept or resident, and what comes next,
/// `ahead` steps of it.
fn together(uses: &[WeightUse], schedules: &[Vec<Acquisition>], ahead: usize) -> Vec<(usize, usize)> {
    let mut run_of = vec![0; uses.len()];
    for (number, run) in layers(uses).into_iter().enumerate() {
        run.for_each(|node| run_of[node] = number);
    }
    let mut pairs = Vec::new();
    for steps in schedules {
        let (mut kept, mut resident): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for (i, step) in steps.iter().enumerate() {
            resident.retain(|node| run_of[*node] == run_of[step.node]);
            let mut live: Vec<usize> = kept.iter().chain(&resident).copied().collect();
            live.push(step.node);
            if uses[step.node].resident {
                resident.push(step.node);
            }
            live.extend(steps[i + 1..].iter().take(ahead).filter(|next| next.fetch).map(|next| next.node));
            for a in &live {
                pairs.extend(live.iter().filter(|b| a != *b).map(|b| (*a, *b)));
            }
            if step.keep {
                kept.push(step.node);
            } else {
                kept.retain(|node| *node != step.node);
            }
        }
    }
    pairs
}

/// The least number for each of `count` things that differs from those of its partners before it.
fn parities(count: usize, pairs: &[(usize, usize)], same: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let mut parities: Vec<usize> = Vec::with_capacity(count);
    for i in 0..count {
        let before = |(a, b): &&(usize, usize)| *a == i && *b < i && same(i, *b);
        let taken: Vec<usize> = pairs.iter().filter(before).map(|(_, b)| parities[*b]).collect();
        parities.push((0..).find(|p| !taken.contains(p)).unwrap_or(i));
    }
    parities
}

/// Parity of each use's gathered buffer; `same` tells whether two uses' buffers are of one size and type.
pub(in crate::etp) fn gather_parities(
    uses: &[WeightUse],
    ahead: usize,
    same: impl Fn(usize, usize) -> bool,
) -> Vec<usize> {
    // What has no backward in the first forward may have one in a later.
    let schedules = [schedule(uses, Phase::Forward), schedule(uses, Phase::Backward), backward(uses)];
    parities(uses.len(), &together(uses, &schedules, ahead), same)
}

/// Parity of each use's buffer for what arrives, which is free once the use's turn comes.
pub(in crate::etp) fn arrival_parities(
    uses: &[WeightUse],
    ahead: usize,
    same: impl Fn(usize, usize) -> bool,
) -> Vec<usize> {
    let mut pairs = Vec::new();
    for steps in [schedule(uses, Phase::Forward), schedule(uses, Phase::Backward), backward(uses)] {
        let fetched: Vec<usize> = steps.iter().filter(|s| s.fetch).map(|s| s.node).collect();
        for (i, a) in fetched.iter().enumerate() {
            for b in fetched[i + 1..].iter().take(ahead.saturating_sub(1)) {
                pairs.extend([(*a, *b), (*b, *a)]);
            }
        }
    }
    parities(uses.len(), &pairs, same)
}

/// Parity of each use's unsharded gradient: a layer's gradients are made together, while that of the following
/// layer's first weight, the last to be handed in, is under way; or `all` of that layer's, where nobody waits for them.
pub(in crate::etp) fn gradient_parities(
    uses: &[WeightUse],
    all: bool,
    same: impl Fn(usize, usize) -> bool,
) -> Vec<usize> {
    let runs = layers(uses);
    let mut pairs = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let next = runs.get(i + 1).map_or(0..0, |next| if all { next.clone() } else { next.start..next.start + 1 });
        for a in run.clone() {
            for b in run.clone().filter(|b| *b != a).chain(next.clone()) {
                pairs.extend([(a, b), (b, a)]);
            }
        }
    }
    parities(uses.len(), &pairs, same)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(layers: u32, recompute: bool) -> Vec<WeightUse> {
        let two = |l| {
            let up = WeightUse { weight: 2 * l as usize, layer: Some(l), recompute, resident: false, backward: true };
            let down = WeightUse { weight: up.weight + 1, recompute: false, ..up };
            [up, down]
        };
        (0..layers).flat_map(two).collect()
    }

    fn order(uses: &[WeightUse], phase: Phase) -> Vec<(usize, bool, bool)> {
        schedule(uses, phase).iter().map(|s| (s.node, s.fetch, s.keep)).collect()
    }

    #[test]
    fn backward_mirrors_forward() {
        let plain = model(2, false);
        assert_eq!(order(&plain, Phase::Forward), [0, 1, 2, 3].map(|n| (n, true, false)));
        assert_eq!(order(&plain, Phase::Backward), [3, 2, 1, 0].map(|n| (n, true, false)));
        let recomputed = order(&model(2, true), Phase::Backward);
        let layer = |up, down| [(up, true, true), (down, true, false), (up, false, false)];
        assert_eq!(recomputed, [layer(2, 3), layer(0, 1)].concat());
    }

    /// A router, `up` and `down`, a linear of no layer before and behind.
    fn with_dense(recompute: bool) -> Vec<WeightUse> {
        let of = |weight, layer, resident| {
            let recompute = recompute && weight == 2;
            WeightUse { weight, layer, recompute, resident, backward: true }
        };
        vec![of(0, None, false), of(1, Some(7), true), of(2, Some(7), false), of(3, Some(7), false), of(4, None, false)]
    }

    #[test]
    fn resident_weights_come_first_in_both_directions() {
        let uses = with_dense(true);
        assert_eq!(order(&uses, Phase::Forward), [0, 1, 2, 3, 4].map(|n| (n, true, false)));
        let layer = [(1, true, false), (2, true, true), (3, true, false), (2, false, false)];
        let expected = [&[(4, true, false)][..], &layer, &[(0, true, false)]].concat();
        assert_eq!(order(&uses, Phase::Backward), expected);
        // Weights of no layer are no layer of their own together.
        let dense = [0, 1].map(|weight| WeightUse { layer: None, resident: true, ..with_dense(false)[weight] });
        assert_eq!(order(&dense, Phase::Backward), [1, 0].map(|n| (n, true, false)));
    }

    /// Two calls of one layer, nothing between: each backward has the order of one.
    #[test]
    fn a_layer_that_is_called_twice_in_a_row_has_two_backwards() {
        let call = with_dense(true)[1..4].to_vec();
        let uses = [call.clone(), call].concat();
        assert_eq!(order(&uses, Phase::Forward), [0, 1, 2, 3, 4, 5].map(|n| (n, true, false)));
        let backward = |n| [(n, true, false), (n + 1, true, true), (n + 2, true, false), (n + 1, false, false)];
        assert_eq!(order(&uses, Phase::Backward), [backward(3), backward(0)].concat());
        // The first call's router is in use while the second's is gathered.
        let parity = gather_parities(&uses, 1, |_, _| true);
        assert_ne!(parity[0], parity[3], "{parity:?}");
    }

    #[test]
    fn what_has_no_backward_is_left_out_of_it() {
        let mut uses = with_dense(true);
        uses[0].backward = false;
        let layer = [(1, true, false), (2, true, true), (3, true, false), (2, false, false)];
        assert_eq!(order(&uses, Phase::Backward), [&[(4, true, false)][..], &layer].concat());
        uses[1..4].iter_mut().for_each(|used| used.backward = false);
        assert_eq!(order(&uses, Phase::Backward), [(4, true, false)]);
        assert_eq!(order(&uses, Phase::Forward), [0, 1, 2, 3, 4].map(|n| (n, true, false)));
        // Memory is that of a backward of all, which may follow.
        assert_eq!(gather_parities(&uses, 1, |_, _| true), gather_parities(&with_dense(true), 1, |_, _| true));
    }

    /// A resident weight shares memory with no other of its layer, nor with one that is gathered ahead for the next.
    #[test]
    fn a_resident_weight_has_memory_of_its_own() {
        for recompute in [false, true] {
            let uses = with_dense(recompute);
            let parity = gather_parities(&uses, 1, |_, _| true);
            for other in [0, 2, 3, 4] {
                assert_ne!(parity[1], parity[other], "{recompute}: {parity:?}");
            }
            // The present one, the next, or one that is kept, and the resident one.
            assert_eq!(parity.iter().max(), Some(&2), "{parity:?}");
        }
    }

    #[test]
    fn uses_in_memory_together_differ_in_parity() {
        for recompute in [false, true] {
            for same_shape in [false, true] {
                let uses = model(5, recompute);
                let same = |a: usize, b: usize| same_shape || a % 2 == b % 2;
                let parity = gather_parities(&uses, 1, same);
                let schedules = [Phase::Forward, Phase::Backward].map(|phase| schedule(&uses, phase));
                for (a, b) in together(&uses, &schedules, 1) {
                    assert!(!same(a, b) || parity[a] != parity[b], "{a} and {b}: {parity:?}");
                }
                // Two buffers serve where all are of one shape, and one of each shape where neighbors differ.
                let expected = if recompute { 1 + usize::from(same_shape) } else { usize::from(same_shape) };
                assert_eq!(parity.iter().max(), Some(&expected), "{recompute} {same_shape}: {parity:?}");
            }
        }
    }

    #[test]
    fn two_steps_ahead_a_layer_and_the_next_are_in_memory() {
        let uses = model(5, false);
        let parity = gather_parities(&uses, 2, |a, b| a % 2 == b % 2);
        assert_eq!(parity, [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]);
        // Of one shape: the present one and two more.
        let parity = gather_parities(&uses, 2, |_, _| true);
        assert_eq!(parity, [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn arrivals_under_way_together_differ_in_parity() {
        let uses = model(4, false);
        assert_eq!(arrival_parities(&uses, 1, |_, _| true), [0; 8]);
        assert_eq!(arrival_parities(&uses, 2, |_, _| true), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(arrival_parities(&uses, 2, |a, b| a % 2 == b % 2), [0; 8]);
    }

    #[test]
    fn gradients_in_memory_together_differ_in_parity() {
        // Ups alternate, as the following layer's is under way; downs need one buffer.
        let uses = model(4, false);
        let parity = gradient_parities(&uses, false, |a, b| a % 2 == b % 2);
        assert!([0, 2, 4].iter().all(|up| parity[*up] != parity[*up + 2]), "{parity:?}");
        assert!([1, 3, 5, 7].iter().all(|down| parity[*down] == 0), "{parity:?}");
        let parity = gradient_parities(&uses, false, |_, _| true);
        for l in 0..3 {
            let (up, down, next) = (parity[2 * l], parity[2 * l + 1], parity[2 * l + 2]);
            assert!(up != down && up != next && down != next, "{parity:?}");
        }
        // Two buffers of each.
        let parity = gradient_parities(&uses, true, |a, b| a % 2 == b % 2);
        assert_eq!(parity, [0, 0, 1, 1, 0, 0, 1, 1]);
    }
}
