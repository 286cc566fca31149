//! The layer on one rank against one dense chain of matrix products of the same FLOPs through candle.
//!
//! The chain gets what the experts get in sum: T·K rows through up and gate [H → I each], silu-GLU, and down [I → H].
//! It has no router, no permutation and no sum over a token's experts: its rate is the bound for any such layer built
//! on the same products.

#[path = "../examples/support/output.rs"]
mod output;
#[path = "support/pair.rs"]
mod pair;

use std::hint::black_box;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap};
use criterion::Criterion;
use moebius::MoeConfig;
use moebius::candle::{EpGroup, ExpertParallelMoE};
use moebius::ep::GroupConfig;
use moebius::layer::Layer;

use output::say;
use pair::{Case, Subject, compare};

const TOKENS: usize = 2048;
const HIDDEN: usize = 1024;
const INNER: usize = 512;
const EXPERTS: usize = 32;
const TOP_K: usize = 4;
const BAR: f64 = 0.8;

/// Gate, up and down of every row.
const FORWARD_FLOPS: f64 = (2 * TOKENS * TOP_K * 3 * HIDDEN * INNER) as f64;

fn layer(vb: VarBuilder<'_>) -> Result<ExpertParallelMoE> {
    let config = MoeConfig::new(HIDDEN, INNER, EXPERTS, TOP_K);
    let layer = Layer::new(config, 0).map_err(candle_core::Error::wrap)?;
    ExpertParallelMoE::new(layer, EpGroup::single(GroupConfig::new(EXPERTS, TOKENS))?, vb)
}

/// Three weights, rows of T·K.
struct Chain {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Chain {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let get = |name: &str, dims| vb.get_with_hints(dims, name, Init::Uniform { lo: -0.03, up: 0.03 });
        Ok(Self {
            gate: get("gate", (INNER, HIDDEN))?,
            up: get("up", (INNER, HIDDEN))?,
            down: get("down", (HIDDEN, INNER))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = x.matmul(&self.gate.t()?)?.silu()?;
        (gate * x.matmul(&self.up.t()?)?)?.matmul(&self.down.t()?)
    }
}

fn forward(c: &mut Criterion) -> Result<Option<String>> {
    let map = VarMap::new();
    let variables = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    layer(variables.pp("layer"))?;
    Chain::new(variables.pp("chain"))?;
    // Plain tensors of the same values: nothing tracks, as in inference.
    let map = map.data().lock().map_err(|e| candle_core::Error::Msg(e.to_string()))?;
    let plain = map.iter().map(|(name, var)| (name.clone(), var.as_tensor().detach())).collect();
    let vb = VarBuilder::from_tensors(plain, DType::F32, &Device::Cpu);
    let (moe, chain) = (layer(vb.pp("layer"))?, Chain::new(vb.pp("chain"))?);
    let x = Tensor::randn(0f32, 1.0, (TOKENS, HIDDEN), &Device::Cpu)?;
    let rows = Tensor::randn(0f32, 1.0, (TOKENS * TOP_K, HIDDEN), &Device::Cpu)?;
    let mut ours = || drop(black_box(moe.forward_full(&x, None).expect("a forward")));
    let mut theirs = || drop(black_box(chain.forward(&rows).expect("a forward")));
    Ok(compare(
        c,
        Case { name: "forward", flops: FORWARD_FLOPS, bar: BAR },
        Subject { name: "layer", run: &mut ours },
        Subject { name: "dense chain", run: &mut theirs },
    ))
}

fn forward_backward(c: &mut Criterion) -> Result<Option<String>> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let (moe, chain) = (layer(vb.pp("layer"))?, Chain::new(vb.pp("chain"))?);
    let x = Var::randn(0f32, 1.0, (TOKENS, HIDDEN), &Device::Cpu)?;
    let rows = Var::randn(0f32, 1.0, (TOKENS * TOP_K, HIDDEN), &Device::Cpu)?;
    let mut ours = || {
        let y = moe.forward_full(&x, None).expect("a forward").y;
        drop(black_box(y.sum_all().and_then(|s| s.backward()).expect("gradients")));
    };
    let mut theirs = || {
        let y = chain.forward(&rows).expect("a forward");
        drop(black_box(y.sum_all().and_then(|s| s.backward()).expect("gradients")));
    };
    Ok(compare(
        c,
        // Backward multiplies twice for each product of forward.
        Case { name: "forward and backward", flops: 3.0 * FORWARD_FLOPS, bar: BAR },
        Subject { name: "layer", run: &mut ours },
        Subject { name: "dense chain", run: &mut theirs },
    ))
}

fn main() -> Result<()> {
    let mut c = Criterion::default().configure_from_args();
    let rows = [forward(&mut c)?, forward_backward(&mut c)?];
    say(format_args!("\nT={TOKENS}, H={HIDDEN}, I={INNER}, E={EXPERTS}, K={TOP_K}, f32, R=1\n\n{}", pair::HEADER));
    rows.into_iter().flatten().for_each(|row| say(format_args!("{row}")));
    c.final_summary();
    Ok(())
}
