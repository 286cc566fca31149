//! Memory of a step, before anything runs.

use crate::aux_loss::Sums;
use crate::config::MoeConfig;
use crate::dtype::DType;
use crate::ep::DispatcherKind;

/// Sizes of a step on a rank. Numbers too large for their type are the largest of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSizes {
    /// Tokens T of this rank.
    pub tokens: usize,
    /// Rows N of this rank's experts: choices of all ranks' tokens that fall on them, and segments' padding.
    pub slots: usize,
    /// Rows that traveled here: each token that chose one of the experts once ([`DispatcherKind::AllToAll`],
    /// [`DispatcherKind::Hierarchical`]), all ranks' tokens ([`DispatcherKind::AllGather`]), room for them
    /// ([`DispatcherKind::NvLink`]), none where the tokens are the rank's own.
    pub rows: usize,
    /// Ranks R.
    pub ranks: usize,
    /// Type of the tokens.
    pub dtype: DType,
    /// How tokens travel.
    pub kind: DispatcherKind,
}

/// Bytes of a step on one rank, beside parameters, their gradients, the input and the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepMemory {
    /// Held from forward to backward, for each layer: [`Context::bytes`](super::Context::bytes).
    pub saved: usize,
    /// Most that a forward holds beside that at once, for all layers together: activations, expert outputs, and the
    /// rows that return.
    pub transient: usize,
    /// Bytes that prepare gathers from all ranks: 4 bytes a choice of every rank's tokens.
    pub routing: usize,
}

impl StepSizes {
    /// Even routing: every rank has `tokens` tokens and its experts an equal share of the choices.
    pub fn even(config: &MoeConfig, tokens: usize, ranks: usize, dtype: DType, kind: DispatcherKind) -> Self {
        let (experts, k) = (config.router.num_experts, config.router.top_k);
        let local = experts / ranks.max(1);
        // That none of K different experts is among a rank's.
        let elsewhere: f64 = (0..k)
            .map(|i| experts.saturating_sub(local + i) as f64 / experts.saturating_sub(i).max(1) as f64)
            .product();
        let visits = ranks as f64 * tokens as f64 * (1.0 - elsewhere);
        let rows = transported_rows(tokens, ranks, kind, visits.ceil() as usize);
        Self { tokens, slots: product(&[tokens, k]), rows, ranks, dtype, kind }
    }

    /// The most that can reach a rank: every token of every rank chooses as many of its experts as it can.
    pub fn worst(config: &MoeConfig, tokens: usize, ranks: usize, dtype: DType, kind: DispatcherKind) -> Self {
        let local = config.router.num_experts / ranks.max(1);
        let slots = product(&[ranks, tokens, config.router.top_k.min(local)]);
        let rows = transported_rows(tokens, ranks, kind, product(&[ranks, tokens]));
        Self { tokens, slots, rows, ranks, dtype, kind }
    }

    /// Bytes that a layer takes.
    pub fn memory(&self, config: &MoeConfig) -> StepMemory {
        let Self { tokens, slots, rows, ranks, dtype, kind } = *self;
        let (b, a) = (dtype.size(), dtype.accumulator().size());
        let (experts, k, gate) = (config.router.num_experts, config.router.top_k, config.activation.gate_factor());
        let pre = |rows: usize, inner: usize| if config.recompute { 0 } else { product(&[rows, gate, inner, b]) };
        let router = sum(&[product(&[tokens, experts, a]), product(&[tokens, k, 4 + a])]);
        let aux = if config.aux.is_off() { 0 } else { Sums::len(experts) * a };
        let gates = |gated: bool| product(&[usize::from(gated), tokens, a]);
        let shared = config.shared.map_or(0, |s| sum(&[pre(tokens, s.intermediate), gates(s.gated)]));
        // Brought back from codes, tokens are rows of their own also where they have stayed.
        let packet = config.payload.row_bytes(config.hidden).map_or(0, |bytes| sum(&bytes));
        let read = if packet > 0 && ranks <= 1 { tokens } else { rows };
        let received = sum(&[product(&[read, config.hidden, b]), product(&[slots, a])]);
        // This rank's packets, those that leave, those that arrive, and these taken apart; between hosts beside those that
        // are passed on.
        let passed_on = if kind == DispatcherKind::Hierarchical { rows } else { 0 };
        let packets = if ranks > 1 { sum(&[tokens, passed_on, rows, rows, rows]) } else { tokens };
        let products = product(&[slots, sum(&[config.intermediate, config.hidden]), b]);
        let returning = match kind {
            _ if ranks <= 1 => 0,
            // Partial sums of all ranks' tokens, and as many received.
            DispatcherKind::AllGather => sum(&[slots, rows, rows]),
            // Outputs of this host's ranks, packed and passed on; their sums, and those of this rank's tokens.
            DispatcherKind::Hierarchical => sum(&[slots, slots, rows, rows]),
            // A sum of each rank for each token.
            DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency => sum(&[slots, rows]),
            // Packed at the experts' rank, and received at the tokens'.
            _ => sum(&[slots, slots, product(&[tokens, k])]),
        };
        StepMemory {
            saved: sum(&[router, aux, shared, received, pre(slots, config.intermediate)]),
            transient: products.max(product(&[returning, config.hidden, b])).max(product(&[packets, packet])),
            routing: if ranks > 1 { product(&[ranks, tokens, k, 4]) } else { 0 },
        }
    }
}

fn product(factors: &[usize]) -> usize {
    factors.iter().fold(1, |all: usize, n| all.saturating_mul(*n))
}

fn sum(terms: &[usize]) -> usize {
    terms.iter().fold(0, |all: usize, n| all.saturating_add(*n))
}

/// Rows that travel, of which all-to-all brings `visits`.
fn transported_rows(tokens: usize, ranks: usize, kind: DispatcherKind, visits: usize) -> usize {
    match kind {
        _ if ranks <= 1 => 0,
        DispatcherKind::AllGather | DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency => {
            product(&[ranks, tokens])
        }
        _ => visits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_too_large_are_the_largest() {
        let config = MoeConfig::new(1 << 24, 1 << 24, 1 << 16, 8);
        for kind in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
            let sizes = StepSizes::worst(&config, 1 << 40, 1 << 16, DType::F32, kind);
            // As many rows as there are choices of this rank's only expert.
            assert_eq!((sizes.slots, sizes.rows), (1 << 56, 1 << 56));
            let StepMemory { saved, transient, routing } = sizes.memory(&config);
            assert_eq!((saved, transient, routing), (usize::MAX, usize::MAX, 1 << 61));
            let most = StepSizes::even(&config, usize::MAX, 1 << 16, DType::F32, kind);
            assert_eq!((most.slots, most.rows), (usize::MAX, usize::MAX));
        }
    }

    /// `docs/nccl.md`, "Memory", in its words: bf16, so 2 bytes.
    fn formula(config: &MoeConfig, sizes: &StepSizes, kind: DispatcherKind) -> (usize, usize) {
        let (h, i, e, k) = (config.hidden, config.intermediate, config.router.num_experts, config.router.top_k);
        let StepSizes { tokens: t, slots, rows, ranks: r, .. } = *sizes;
        let received = match kind {
            DispatcherKind::AllGather => 2 * h * r * t,
            _ => 2 * h * rows,
        };
        let saved = received + (4 + 4 * i) * slots + 4 * t * e + 8 * t * k;
        let out = 2 * h * slots;
        let returned = match kind {
            DispatcherKind::AllGather => 2 * (2 * h * r * t),
            _ => 2 * h * slots + 2 * h * t * k,
        };
        (saved, (2 * i * slots + out).max(out + returned))
    }

    #[test]
    fn the_calculator_has_the_guides_formula() {
        for (config, t) in [(MoeConfig::new(7168, 2048, 256, 8), 4096), (MoeConfig::new(2048, 768, 128, 8), 128)] {
            for ranks in [2, 8, 64] {
                for kind in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
                    for of in [StepSizes::even, StepSizes::worst] {
                        let sizes = of(&config, t, ranks, DType::BF16, kind);
                        let memory = sizes.memory(&config);
                        let (saved, transient) = formula(&config, &sizes, kind);
                        assert_eq!(
                            (memory.saved, memory.transient),
                            (saved, transient),
                            "{ranks} ranks, {kind:?}, {sizes:?}"
                        );
                        assert_eq!(memory.routing, 4 * ranks * t * 8);
                    }
                }
            }
        }
    }

    /// The figures of its example are the calculator's.
    #[test]
    fn the_guides_example() {
        let config = MoeConfig::new(7168, 2048, 256, 8);
        let guide = include_str!("../../docs/nccl.md");
        for (name, kind) in [("all-to-all", DispatcherKind::AllToAll), ("all-gather", DispatcherKind::AllGather)] {
            let of = |sizes: StepSizes| {
                let StepMemory { saved, transient, .. } = sizes.memory(&config);
                let gib = |bytes: usize| format!("{:.2}", bytes as f64 / (1 << 30) as f64);
                format!("{} + {}", gib(saved), gib(transient))
            };
            let (even, worst) = (
                of(StepSizes::even(&config, 4096, 8, DType::BF16, kind)),
                of(StepSizes::worst(&config, 4096, 8, DType::BF16, kind)),
            );
            let row = format!("| {name} | {even} | {worst} |");
            assert!(guide.contains(&row), "docs/nccl.md has no row {row}");
        }
    }
}
