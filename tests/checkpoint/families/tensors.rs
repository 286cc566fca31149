//! Tensors whose elements say where they belong.

use super::*;

pub(super) const E: usize = 4;
pub(super) const H: usize = 6;
pub(super) const I: usize = 5;
pub(super) const S: usize = 3;

/// Value of an element, as a number that F32 holds exactly.
pub(super) fn element(kind: usize, expert: usize, row: usize, column: usize) -> f32 {
    (((kind * 8 + expert) * 32 + row) * 32 + column) as f32
}

pub(super) const GATE: usize = 1;
pub(super) const UP: usize = 2;
pub(super) const DOWN: usize = 3;
pub(super) const ROUTER: usize = 4;
pub(super) const BIAS: usize = 5;
pub(super) const SHARED_GATE: usize = 6;
pub(super) const SHARED_UP: usize = 7;
pub(super) const SHARED_DOWN: usize = 8;
pub(super) const SHARED_SCALE: usize = 9;
pub(super) const SHARED_BIASES: [usize; 3] = [10, 11, 12];

pub(super) fn matrix(kind: usize, expert: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| element(kind, expert, i / columns, i % columns)).collect()
}

pub(super) fn flipped(kind: usize, expert: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| element(kind, expert, i % rows, i / rows)).collect()
}

/// How the routed experts are written.
pub(super) enum Style {
    Each(&'static str, &'static str, &'static str),
    Fused,
    FusedNames(&'static str, &'static str),
    FusedInOut,
    Stacked,
    UpDown,
}

pub(super) struct Case {
    pub(super) config: Value,
    /// Everything before the layer's number.
    pub(super) root: &'static str,
    pub(super) block: &'static str,
    pub(super) router: &'static str,
    pub(super) bias: Option<(&'static str, &'static [usize])>,
    pub(super) style: Style,
    /// Name in the layer and inner size.
    pub(super) shared: Option<(&'static str, usize)>,
    pub(super) layers: &'static [usize],
    pub(super) check: fn(&MoeConfig),
}

impl Case {
    /// The shared expert's matrices have biases.
    pub(super) fn biased(&self) -> bool {
        ["use_bias", "mlp_bias"].iter().any(|key| self.config[*key] == true)
    }
}

pub(super) fn tensors(case: &Case) -> Tensors {
    let mut tensors = Tensors::new();
    for layer in case.layers {
        let layer = format!("{}{layer}", case.root);
        let block = format!("{layer}.{}", case.block);
        let mut put = |name: String, shape: &[usize], values: Vec<f32>| {
            tensors.insert(name, Raw::f32(shape, values));
        };
        put(format!("{block}.{}", case.router), &[E, H], matrix(ROUTER, 0, E, H));
        if let Some((name, shape)) = case.bias {
            put(format!("{block}.{name}"), shape, matrix(BIAS, 0, E, 1));
        }
        if let Some((name, s)) = case.shared {
            let name = format!("{layer}.{name}");
            if name.ends_with("shared_mlp") && case.block == "block_sparse_moe" {
                let up = [matrix(SHARED_GATE, 0, s, H), matrix(SHARED_UP, 0, s, H)].concat();
                put(format!("{name}.input_linear.weight"), &[2 * s, H], up);
                put(format!("{name}.output_linear.weight"), &[H, s], matrix(SHARED_DOWN, 0, H, s));
            } else {
                if !matches!(case.style, Style::UpDown) {
                    put(format!("{name}.gate_proj.weight"), &[s, H], matrix(SHARED_GATE, 0, s, H));
                }
                put(format!("{name}.up_proj.weight"), &[s, H], matrix(SHARED_UP, 0, s, H));
                put(format!("{name}.down_proj.weight"), &[H, s], matrix(SHARED_DOWN, 0, H, s));
                let [gate, up, down] = SHARED_BIASES;
                for (part, kind, rows) in [("gate_proj", gate, s), ("up_proj", up, s), ("down_proj", down, H)] {
                    if case.biased() {
                        put(format!("{name}.{part}.bias"), &[rows], matrix(kind, 0, rows, 1));
                    }
                }
            }
            if name.ends_with("shared_expert") && case.block == "mlp" {
                put(format!("{name}_gate.weight"), &[1, H], matrix(SHARED_SCALE, 0, 1, H));
            }
        }
        let all = |one: &dyn Fn(usize) -> Vec<f32>| (0..E).flat_map(one).collect::<Vec<f32>>();
        let gate_up = |e| [matrix(GATE, e, I, H), matrix(UP, e, I, H)].concat();
        match case.style {
            Style::Each(gate, up, down) => {
                for e in 0..E {
                    let name = |name: &str| format!("{block}.experts.{e}.{name}.weight");
                    put(name(gate), &[I, H], matrix(GATE, e, I, H));
                    put(name(up), &[I, H], matrix(UP, e, I, H));
                    put(name(down), &[H, I], matrix(DOWN, e, H, I));
                }
            }
            Style::UpDown => {
                for e in 0..E {
                    let name = |name: &str| format!("{block}.experts.{e}.{name}.weight");
                    put(name("up_proj"), &[I, H], matrix(UP, e, I, H));
                    put(name("down_proj"), &[H, I], matrix(DOWN, e, H, I));
                }
            }
            Style::Fused | Style::FusedNames(..) => {
                let (up, down) = match case.style {
                    Style::FusedNames(up, down) => (up, down),
                    _ => ("experts.gate_up_proj", "experts.down_proj"),
                };
                put(format!("{block}.{up}"), &[E, 2 * I, H], all(&gate_up));
                put(format!("{block}.{down}"), &[E, H, I], all(&|e| matrix(DOWN, e, H, I)));
            }
            Style::FusedInOut => {
                let up = |e: usize| {
                    let (gate, up) = (flipped(GATE, e, I, H), flipped(UP, e, I, H));
                    gate.chunks(I).zip(up.chunks(I)).flat_map(|(g, u)| [g, u].concat()).collect()
                };
                put(format!("{block}.experts.gate_up_proj"), &[E, H, 2 * I], all(&up));
                put(format!("{block}.experts.down_proj"), &[E, I, H], all(&|e| flipped(DOWN, e, H, I)));
            }
            Style::Stacked => {
                put(format!("{block}.experts.mlp.w1"), &[E * I, H], all(&|e| matrix(GATE, e, I, H)));
                put(format!("{block}.experts.mlp.v1"), &[E * I, H], all(&|e| matrix(UP, e, I, H)));
                put(format!("{block}.experts.mlp.w2"), &[E * I, H], all(&|e| flipped(DOWN, e, H, I)));
            }
        }
    }
    tensors
}
