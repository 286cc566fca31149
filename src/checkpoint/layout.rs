//! Where the pieces of a block's parameters lie on disk: names, shapes, and the map between a tensor on disk and the
//! layer's own layout, used in both directions.

use super::family::{DiskExperts, Family};
use crate::config::MoeConfig;
use crate::layer::ParamKind;

/// Which of the layer's rows a matrix's rows are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskRows {
    /// Consecutive, from here on.
    From(usize),
    /// Alternately of the first and the second half; the number is half the rows.
    Alternate(usize),
}

impl DiskRows {
    /// The layer's row of row `out`.
    pub fn map(self, out: usize) -> usize {
        match self {
            DiskRows::From(first) => first + out,
            DiskRows::Alternate(half) => (out % 2) * half + out / 2,
        }
    }
}

/// A matrix on disk: a whole tensor, or one of several equal slices of it.
#[derive(Debug, Clone)]
pub(super) struct DiskMatrix {
    pub kind: ParamKind,
    /// Tensor on disk.
    pub name: String,
    /// Its shape, before quantization.
    pub dims: Vec<usize>,
    /// This matrix's place among the tensor's slices.
    pub slice: usize,
    /// Rows of the matrix, as y = W·x has them.
    pub out: usize,
    /// Columns.
    pub inn: usize,
    /// It lies (in, out) on disk.
    pub transposed: bool,
    pub rows: DiskRows,
}

impl DiskMatrix {
    fn new(kind: ParamKind, name: String, [out, inn]: [usize; 2]) -> Self {
        Self { kind, name, dims: vec![out, inn], slice: 0, out, inn, transposed: false, rows: DiskRows::From(0) }
    }

    fn dims(self, dims: &[usize]) -> Self {
        Self { dims: dims.to_vec(), ..self }
    }

    fn slice(self, slice: usize) -> Self {
        Self { slice, ..self }
    }

    fn transposed(self, transposed: bool) -> Self {
        Self { transposed, ..self }
    }

    fn rows(self, rows: DiskRows) -> Self {
        Self { rows, ..self }
    }
}

/// Names of one layer's block.
#[derive(Debug)]
pub(super) struct BlockLayout<'a> {
    pub family: &'static Family,
    pub config: &'a MoeConfig,
    /// `model.layers.3.`
    pub layer: String,
    /// `mlp`
    pub block: &'static str,
    /// `gate.weight`
    pub router: &'static str,
    pub selection_bias: usize,
    pub experts: &'static DiskExperts,
}

impl<'a> BlockLayout<'a> {
    /// The published names, or those of a re-saved model where `has` finds them.
    pub fn find(family: &'static Family, config: &'a MoeConfig, layer: String, has: &dyn Fn(&str) -> bool) -> Self {
        // Without any of a kind the published name stays: the error then asks for it.
        let block =
            family.blocks.iter().find(|block| family.routers.iter().any(|r| has(&format!("{layer}{block}.{r}"))));
        let block = block.unwrap_or(&family.blocks[0]);
        let router = family.routers.iter().find(|r| has(&format!("{layer}{block}.{r}")));
        let bias = family.selection_bias.iter().position(|bias| has(&format!("{layer}{block}.{}", bias.name)));
        let mut layout = BlockLayout {
            family,
            config,
            block,
            router: router.unwrap_or(&family.routers[0]),
            selection_bias: bias.unwrap_or(0),
            experts: &family.experts[0],
            layer,
        };
        for experts in family.experts {
            layout.experts = experts;
            if layout.expert(0).iter().any(|part| has(&part.name)) {
                return layout;
            }
        }
        layout.experts = &family.experts[0];
        layout
    }

    fn name(&self, name: &str) -> String {
        format!("{}{}.{name}", self.layer, self.block)
    }

    /// Prefixes whose every tensor belongs to the block.
    pub fn prefixes(&self) -> Vec<String> {
        let mut prefixes = vec![self.name("")];
        if let Some(shared) = &self.family.shared
            && shared.in_layer
        {
            prefixes.push(format!("{}{}.", self.layer, shared.name));
        }
        prefixes
    }

    /// Matrices of the replicated parameters.
    pub fn replicated(&self) -> Vec<DiskMatrix> {
        let (hidden, experts) = (self.config.hidden, self.config.router.num_experts);
        let mut parts = vec![DiskMatrix::new(ParamKind::Router, self.name(self.router), [experts, hidden])];
        if self.config.router.logit_bias {
            let name = self.name(&self.router.replace("weight", "bias"));
            parts.push(DiskMatrix::new(ParamKind::RouterBias, name, [experts, 1]).dims(&[experts]));
        }
        if self.config.router.selection_bias
            && let Some(bias) = self.family.selection_bias.get(self.selection_bias)
        {
            let dims: &[usize] = if bias.row { &[1, experts] } else { &[experts] };
            parts.push(DiskMatrix::new(ParamKind::SelectionBias, self.name(bias.name), [experts, 1]).dims(dims));
        }
        self.shared(&mut parts);
        parts
    }

    fn shared(&self, parts: &mut Vec<DiskMatrix>) {
        let (Some(shared), Some(config)) = (&self.family.shared, &self.config.shared) else { return };
        let (hidden, size) = (self.config.hidden, config.intermediate);
        let name = match shared.in_layer {
            true => format!("{}{}", self.layer, shared.name),
            false => self.name(shared.name),
        };
        let gates = self.config.activation.gate_factor();
        if shared.linear {
            let up = format!("{name}.input_linear.weight");
            parts.push(DiskMatrix::new(ParamKind::SharedUp, up, [gates * size, hidden]));
            parts.push(DiskMatrix::new(ParamKind::SharedDown, format!("{name}.output_linear.weight"), [hidden, size]));
        } else {
            if gates == 2 {
                parts.push(DiskMatrix::new(ParamKind::SharedUp, format!("{name}.gate_proj.weight"), [size, hidden]));
            }
            let up = DiskMatrix::new(ParamKind::SharedUp, format!("{name}.up_proj.weight"), [size, hidden]);
            parts.push(up.rows(DiskRows::From((gates - 1) * size)));
            parts.push(DiskMatrix::new(ParamKind::SharedDown, format!("{name}.down_proj.weight"), [hidden, size]));
        }
        if config.bias {
            // Where there are biases, matrices have the usual names.
            let mut vector = |kind, part: &str, rows: DiskRows, len| {
                let vector = DiskMatrix::new(kind, format!("{name}.{part}.bias"), [len, 1]).dims(&[len]);
                parts.push(vector.rows(rows));
            };
            if gates == 2 {
                vector(ParamKind::SharedUpBias, "gate_proj", DiskRows::From(0), size);
            }
            vector(ParamKind::SharedUpBias, "up_proj", DiskRows::From((gates - 1) * size), size);
            vector(ParamKind::SharedDownBias, "down_proj", DiskRows::From(0), hidden);
        }
        if let Some(gate) = shared.gate {
            parts.push(DiskMatrix::new(ParamKind::SharedGate, self.name(gate), [1, hidden]));
        }
    }

    /// Matrices of one routed expert.
    pub fn expert(&self, e: usize) -> Vec<DiskMatrix> {
        let (h, i, n) = (self.config.hidden, self.config.intermediate, self.config.router.num_experts);
        let gates = self.config.activation.gate_factor();
        let up_rows = gates * i;
        let mut parts = Vec::with_capacity(6);
        match self.experts {
            DiskExperts::Each { gate, up, down } => {
                let name = |name: &str| self.name(&format!("experts.{e}.{name}.weight"));
                if gates == 2 {
                    parts.push(DiskMatrix::new(ParamKind::Up, name(gate), [i, h]));
                }
                parts.push(DiskMatrix::new(ParamKind::Up, name(up), [i, h]).rows(DiskRows::From((gates - 1) * i)));
                parts.push(DiskMatrix::new(ParamKind::Down, name(down), [h, i]));
            }
            DiskExperts::Fused { up, down, transposed, interleaved } => {
                let rows = if *interleaved { DiskRows::Alternate(i) } else { DiskRows::From(0) };
                let dims = |out, inn| if *transposed { [n, inn, out] } else { [n, out, inn] };
                let matrix = |kind, name: &str, out, inn| {
                    let part = DiskMatrix::new(kind, self.name(name), [out, inn]).dims(&dims(out, inn));
                    part.slice(e).transposed(*transposed)
                };
                parts.push(matrix(ParamKind::Up, up, up_rows, h).rows(rows));
                parts.push(matrix(ParamKind::Down, down, h, i));
                if self.config.expert_bias {
                    let vector = |kind, name: &str, len| {
                        DiskMatrix::new(kind, self.name(&format!("{name}_bias")), [len, 1]).dims(&[n, len]).slice(e)
                    };
                    parts.push(vector(ParamKind::UpBias, up, up_rows).rows(rows));
                    parts.push(vector(ParamKind::DownBias, down, h));
                }
            }
            DiskExperts::Stacked { gate, up, down } => {
                let stacked = |kind, name: &str, matrix| {
                    DiskMatrix::new(kind, self.name(name), matrix).dims(&[n * i, h]).slice(e)
                };
                parts.push(stacked(ParamKind::Up, gate, [i, h]));
                parts.push(stacked(ParamKind::Up, up, [i, h]).rows(DiskRows::From(i)));
                parts.push(stacked(ParamKind::Down, down, [h, i]).transposed(true));
            }
        }
        parts
    }
}
