//! Routing, auxiliary losses, weights of partly dropped tokens.

use crate::aux_loss::Sums;
use crate::config::{AuxConfig, BalanceKind, GroupScore, RouterConfig, Score};
use crate::cpu::router::jitter;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{AuxBwd, AuxSums, AuxTotal, Jitter, RenormalizeKept, Route, RouteBwd, Scalar};
use crate::plan::Reporting;
use crate::tensor::{Tensor, TensorRef};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::ROUTER_SCRATCH_BLOCKS;
use super::launch::{Grid, whole_warps};
use super::layout::{input, output};
use super::params::{self, WARP_THREADS, type_code};
use super::tile_config::DEFAULT_SMEM;

/// Tokens that `aux_loss_chunks` sums at a time.
const CHUNK: usize = params::AUX_CHUNK as usize;
/// Threads of `aux_loss_value`, as in `kernels/aux_loss.cu`.
const TOTAL_THREADS: u32 = params::AUX_TOTAL_THREADS;
/// Warps of a block of the router at most.
const MOST_WARPS: usize = (params::ROUTER_THREADS / WARP_THREADS) as usize;
/// Shared memory that a block of the router takes at most.
const SHARED: usize = DEFAULT_SMEM as usize;
/// Experts that the place of a NaN logit has room for.
const MOST_EXPERTS: usize = 1 << params::NAN_EXPERT_BITS;
/// Rows of E words that a token works on.
const WORK_ROWS: usize = params::ROUTER_WORK_ROWS as usize;

/// T of logits `[T, E]`.
fn tokens(call: &'static str, config: &RouterConfig, logits: &TensorRef<'_, Cuda>) -> Result<usize> {
    let t = logits.rows();
    input(call, "logits", logits, DType::F32, &[t, config.num_experts])?;
    Ok(t)
}

/// A checked formula over logits `[T, E]`, and T.
fn over(
    call: &'static str,
    config: &RouterConfig,
    logits: &TensorRef<'_, Cuda>,
    jitter: Option<Jitter>,
) -> Result<(params::RoutingParams, usize)> {
    config.validate()?;
    if config.num_experts > MOST_EXPERTS {
        return Err(Error::invalid(
            call,
            "num_experts",
            format!("at most {MOST_EXPERTS} (on CUDA)"),
            config.num_experts,
        ));
    }
    let t = tokens(call, config, logits)?;
    Ok((params::RoutingParams { tokens: t as i64, logits: logits.data().ptr, ..formula(config, jitter) }, t))
}

/// The formula.
fn formula(config: &RouterConfig, jitter: Option<Jitter>) -> params::RoutingParams {
    let (score, epsilon) = match config.score {
        Score::Softmax => (params::SCORE_SOFTMAX, 0.0),
        Score::Sigmoid => (params::SCORE_SIGMOID, 0.0),
        Score::TopkSoftmax => (params::SCORE_TOPK_SOFTMAX, 0.0),
        Score::TopkSigmoid => (params::SCORE_TOPK_SIGMOID, 0.0),
        Score::SparseMixer { epsilon } => (params::SCORE_SPARSEMIXER, epsilon),
    };
    let mut p = params::RoutingParams {
        experts: config.num_experts as i64,
        top_k: config.top_k as i64,
        score,
        epsilon,
        scale: config.scale,
        ..Default::default()
    };
    if let Some(limit) = &config.groups {
        (p.groups, p.keep) = (limit.groups as i64, limit.keep as i64);
        p.rank_by = match limit.rank_by {
            GroupScore::Max => params::RANK_MAX,
            GroupScore::Top2Sum => params::RANK_TOP2,
        };
    }
    if let Some(renorm) = &config.renorm {
        (p.renorm, p.p, p.norm_epsilon, p.floor) = (1, renorm.p, renorm.epsilon, renorm.floor);
    }
    if let Some(jitter) = jitter.filter(|_| config.jitter > 0.0) {
        p.jitter = config.jitter;
        p.key = jitter::key(jitter);
        p.first_token = jitter.first_token;
    }
    p
}

/// Experts of which a warp holds a token's scores in registers.
const REGISTER_EXPERTS: i64 = params::ROUTER_REGISTER_EXPERTS as i64;

/// Whether the kernels that hold a token's scores in registers serve: softmax over few experts, no groups, bias, jitter
/// or auxiliary loss, and no norm or a sum.
pub(super) fn fits_registers(p: &params::RoutingParams) -> bool {
    let plain = p.score == 0 && p.groups == 0 && p.bias == 0 && p.jitter == 0.0;
    plain
        && p.aux_coef == 0
        && p.aux_z == 0
        && (p.renorm == 0 || p.p == 1.0)
        && p.experts <= REGISTER_EXPERTS
        && p.top_k <= 32
}

/// Launches those, or others of a warp a token.
fn launch_either(
    device: &Cuda,
    call: &'static str,
    in_registers: &Kernel,
    kernel: &Kernel,
    p: params::RoutingParams,
) -> Result<()> {
    if !fits_registers(&p) {
        return launch(device, call, kernel, p);
    }
    // SAFETY: callers have checked the tensors in `p`; a warp takes a token.
    unsafe { device.launch(call, in_registers, Grid::warps_of(p.tokens as usize, params::ROUTER_THREADS), &p) }
}

/// Launches a kernel of a warp a token, with its working rows in shared memory where they fit.
fn launch(device: &Cuda, call: &'static str, kernel: &Kernel, mut p: params::RoutingParams) -> Result<()> {
    let (t, row) = (p.tokens as usize, WORK_ROWS * 4 * p.experts as usize);
    let warps = [1, 2, 4, 8].map(|part| MOST_WARPS / part).into_iter().find(|w| w * row <= SHARED);
    let scratch;
    let grid = match warps {
        Some(warps) => Grid { shared: (warps * row) as u32, ..Grid::warps_of(t, warps as u32 * WARP_THREADS) },
        None => {
            let blocks = t.min(ROUTER_SCRATCH_BLOCKS);
            scratch = Tensor::empty(device, DType::U8, &[blocks, row])?;
            p.scratch = scratch.view().data().ptr;
            Grid::new(blocks, WARP_THREADS)
        }
    };
    // SAFETY: callers have checked the tensors in `p`; a warp has its working rows in either place.
    unsafe { device.launch(call, kernel, grid, &p) }
}

pub(super) fn route(device: &Cuda, call: Route<'_, Cuda>) -> Result<()> {
    const CALL: &str = "route";
    let reporting = call.reporting;
    let p = route_params(device, call)?;
    let kernels = &device.kernels().router;
    launch_either(device, CALL, &kernels.route_softmax, &kernels.route, p)?;
    match reporting {
        Reporting::Immediate => device.faults(CALL),
        Reporting::Deferred => Ok(()),
    }
}

/// What the kernels of a route take; shapes and types are checked.
pub(super) fn route_params(device: &Cuda, call: Route<'_, Cuda>) -> Result<params::RoutingParams> {
    const CALL: &str = "route";
    let config = call.config;
    let (mut p, t) = over(CALL, config, &call.logits, call.jitter)?;
    let (k, e) = (config.top_k, config.num_experts);
    p.ids = output(CALL, "ids", call.ids, DType::I32, &[t, k])?;
    p.weights = output(CALL, "weights", call.weights, DType::F32, &[t, k])?;
    match (config.selection_bias, call.selection_bias) {
        (false, None) => {}
        (true, Some(bias)) => {
            Error::check_shape(CALL, "selection_bias", &[e], bias.dims())?;
            p.bias = bias.data().ptr;
            p.bias_type = type_code(CALL, "selection_bias", bias.dtype())?;
        }
        (true, None) => {
            return Err(Error::invalid(CALL, "tensor selection_bias", "a tensor (the formula has it)", "none"));
        }
        (false, Some(_)) => {
            return Err(Error::invalid(CALL, "tensor selection_bias", "none (the formula has none)", "a tensor"));
        }
    }
    p.fault = device.inner.status;
    p.origin = device.origin(CALL, call.origin)?;
    Ok(p)
}

pub(super) fn route_bwd(device: &Cuda, call: RouteBwd<'_, Cuda>) -> Result<()> {
    const CALL: &str = "route_bwd";
    let config = call.config;
    let (mut p, t) = over(CALL, config, &call.logits, call.jitter)?;
    let (k, e) = (config.top_k, config.num_experts);
    p.ids = input(CALL, "ids", &call.ids, DType::I32, &[t, k])?;
    p.d_weights = input(CALL, "d_weights", &call.d_weights, DType::F32, &[t, k])?;
    p.d_logits = output(CALL, "d_logits", call.d_logits, DType::F32, &[t, e])?;
    p.fault = device.inner.status;
    p.origin = device.origin(CALL, call.origin)?;
    // Whether the groups zero scores depends on there being a selection bias, which backward does not get otherwise.
    p.bias = if config.selection_bias { p.logits } else { 0 };
    let aux = call.aux.map(|aux| AuxCoefficients::new(device, config, &aux, t, &p)).transpose()?;
    if let Some(aux) = aux.as_ref().filter(|_| t > 0) {
        p.aux_coef = aux.coef.as_ref().map_or(0, |c| c.view().data().ptr);
        p.aux_z = aux.z.view().data().ptr;
        p.sequence = aux.sequence as i64;
        p.aux_sigmoid = i64::from(aux.sigmoids);
    }
    let kernels = &device.kernels().router;
    launch_either(device, CALL, &kernels.route_softmax_bwd, &kernels.route_bwd, p)
}

/// Sizes of the sums over a rank's tokens.
struct AuxChunks {
    /// Tokens of a sequence: all of them where the loss is not over sequences.
    sequence: usize,
    sequences: usize,
    /// Chunks of a sequence.
    chunks: usize,
}

impl AuxChunks {
    fn new(kind: BalanceKind, tokens: usize) -> Self {
        let sequence = match kind {
            BalanceKind::Sequence { length } => length.min(tokens.max(1)),
            BalanceKind::Switch | BalanceKind::HuggingFace => tokens.max(1),
        };
        Self { sequence, sequences: tokens.div_ceil(sequence), chunks: sequence.div_ceil(CHUNK) }
    }
}

/// Hugging Face's loss takes the softmax whatever the router's scores are.
fn sigmoids(config: &RouterConfig, kind: BalanceKind) -> bool {
    kind != BalanceKind::HuggingFace && matches!(config.score, Score::Sigmoid | Score::TopkSigmoid)
}

fn aux_params(device: &Cuda, config: &RouterConfig, aux: &AuxConfig, t: usize) -> (params::AuxLossParams, AuxChunks) {
    let cut = AuxChunks::new(aux.balance_kind, t);
    let p = params::AuxLossParams {
        tokens: t as i64,
        experts: config.num_experts as i64,
        top_k: config.top_k as i64,
        sequence: cut.sequence as i64,
        sequences: cut.sequences as i64,
        chunks: cut.chunks as i64,
        by_sequence: i64::from(matches!(aux.balance_kind, BalanceKind::Sequence { .. })),
        hugging_face: i64::from(aux.balance_kind == BalanceKind::HuggingFace),
        sigmoids: i64::from(sigmoids(config, aux.balance_kind)),
        fault: device.inner.status,
        ..Default::default()
    };
    (p, cut)
}

/// Sums over chunks and sequences: `totals [sequences, 2 E + 1]`, kept alive with the chunks' own.
fn totals(
    device: &Cuda,
    call: &'static str,
    p: &mut params::AuxLossParams,
    cut: &AuxChunks,
) -> Result<[Tensor<Cuda>; 2]> {
    const F64_BYTES: usize = 8;
    let width = 2 * p.experts as usize + 1;
    let partial = Tensor::empty(device, DType::U8, &[cut.sequences * cut.chunks, width * F64_BYTES])?;
    let totals = Tensor::empty(device, DType::U8, &[cut.sequences, width * F64_BYTES])?;
    p.partial = partial.view().data().ptr;
    p.totals = totals.view().data().ptr;
    let threads = whole_warps(p.experts as usize, params::AUX_THREADS);
    let grid = Grid { blocks: (cut.chunks, cut.sequences), ..Grid::new(0, threads) };
    // SAFETY: sizes as allocated above; logits, ids and scratch were checked or made by the callers.
    unsafe { device.launch(call, &device.kernels().aux_loss.chunks, grid, p) }?;
    let grid = numbers_grid(width, cut.sequences);
    // SAFETY: as above.
    unsafe { device.launch(call, &device.kernels().aux_loss.totals, grid, p) }?;
    Ok([partial, totals])
}

/// A thread for each of so many numbers of a sequence.
fn numbers_grid(numbers: usize, sequences: usize) -> Grid {
    let grid = Grid::threads_of(numbers, params::AUX_NUMBERS_THREADS);
    Grid { blocks: (grid.blocks.0, sequences), ..grid }
}

pub(super) fn aux_sums(device: &Cuda, call: AuxSums<'_, Cuda>) -> Result<()> {
    const CALL: &str = "aux_sums";
    let config = call.config;
    config.validate()?;
    call.aux.validate()?;
    let (t, k, e) = (tokens(CALL, config, &call.logits)?, config.top_k, config.num_experts);
    let (mut p, cut) = aux_params(device, config, call.aux, t);
    p.logits = call.logits.data().ptr;
    p.ids = input(CALL, "ids", &call.ids, DType::I32, &[t, k])?;
    p.out = output(CALL, "out", call.out, DType::F32, &[Sums::len(e)])?;
    let scores = Tensor::empty(device, DType::F32, &[t, e])?;
    let picks = Tensor::empty(device, DType::I32, &[if p.hugging_face == 1 { t } else { 0 }, k])?;
    let z_terms = Tensor::empty(device, DType::U8, &[t, 8])?;
    p.scores = scores.view().data().ptr;
    p.picks = picks.view().data().ptr;
    p.z_terms = z_terms.view().data().ptr;
    // SAFETY: logits are `[t, e]`, the scratch was made for that.
    unsafe { device.launch(CALL, &device.kernels().aux_loss.scores, Grid::warps_of(t, params::AUX_THREADS), &p) }?;
    let scratch = totals(device, CALL, &mut p, &cut)?;
    // SAFETY: `out` has 2 E + 4 elements.
    unsafe { device.launch(CALL, &device.kernels().aux_loss.finish, Grid::new(1, params::AUX_THREADS), &p) }?;
    drop(scratch);
    Ok(())
}

pub(super) fn aux_total(device: &Cuda, call: AuxTotal<'_, Cuda>) -> Result<()> {
    const CALL: &str = "aux_total";
    call.config.validate()?;
    call.aux.validate()?;
    let (mut p, _) = aux_params(device, call.config, call.aux, 0);
    (p.balance, p.z) = (call.aux.balance, call.aux.z);
    p.sums = input(CALL, "sums", &call.sums, DType::F32, &[Sums::len(call.config.num_experts)])?;
    Scalar::Device(call.out.as_ref()).check(CALL, "out", DType::F32)?;
    p.out = call.out.into_data().ptr;
    // SAFETY: sums have 2 E + 4 elements, and `out` has one.
    unsafe { device.launch(CALL, &device.kernels().aux_loss.value, Grid::new(1, TOTAL_THREADS), &p) }
}

/// Coefficients of the losses' gradient.
struct AuxCoefficients {
    /// `[sequences, E]` of f64.
    coef: Option<Tensor<Cuda>>,
    z: Tensor<Cuda>,
    sequence: usize,
    sigmoids: bool,
}

impl AuxCoefficients {
    fn new(
        device: &Cuda,
        config: &RouterConfig,
        aux: &AuxBwd<'_, Cuda>,
        t: usize,
        of: &params::RoutingParams,
    ) -> Result<Self> {
        const CALL: &str = "route_bwd";
        aux.aux.validate()?;
        let e = config.num_experts;
        let (mut p, cut) = aux_params(device, config, aux.aux, t);
        p.sums = input(CALL, "aux.sums", &aux.sums, DType::F32, &[Sums::len(e)])?;
        (p.logits, p.ids, p.origin) = (of.logits, of.ids, of.origin);
        aux.d_loss.check(CALL, "aux.d_loss", DType::F32)?;
        (p.balance, p.z) = (aux.aux.balance, aux.aux.z);
        match aux.d_loss {
            Scalar::Host(value) => (p.balance, p.z) = (value * p.balance, value * p.z),
            Scalar::Device(tensor) => p.d_loss = tensor.data().ptr,
        }
        let z = Tensor::empty(device, DType::U8, &[8])?;
        p.z_coef = z.view().data().ptr;
        let coef = match aux.aux.balance != 0.0 {
            true => Some(Tensor::empty(device, DType::U8, &[cut.sequences, e * 8])?),
            false => None,
        };
        p.coef = coef.as_ref().map_or(0, |c| c.view().data().ptr);
        let mut scratch = None;
        if p.by_sequence == 1 && coef.is_some() {
            // Counts of this rank's own sequences, from the ids: scores and z are not needed.
            p.hugging_face = 0;
            scratch = Some(totals(device, CALL, &mut p, &cut)?);
        }
        let grid = numbers_grid(e, cut.sequences);
        // SAFETY: sums have 2 E + 4 elements, coefficients E a sequence; totals where the loss is over sequences.
        unsafe { device.launch(CALL, &device.kernels().aux_loss.coefficients, grid, &p) }?;
        drop(scratch);
        Ok(Self { coef, z, sequence: cut.sequence, sigmoids: sigmoids(config, aux.aux.balance_kind) })
    }
}

pub(super) fn renormalize_kept(device: &Cuda, call: RenormalizeKept<'_, Cuda>) -> Result<()> {
    const CALL: &str = "renormalize_kept";
    let [t, k] = match call.weights.dims() {
        [t, k] => [*t, *k],
        dims => return Err(Error::invalid(CALL, "tensor weights", "shape [T, K]", format!("{dims:?}"))),
    };
    let grad = call.grad.as_ref().map_or(Ok(0), |g| input(CALL, "grad", g, DType::F32, &[t, k]))?;
    let p = params::RenormalizeKeptParams {
        weights: input(CALL, "weights", &call.weights, DType::F32, &[t, k])?,
        kept: input(CALL, "kept", &call.kept, DType::I32, &[t, k])?,
        grad,
        out: output(CALL, "out", call.out, DType::F32, &[t, k])?,
        tokens: t as i64,
        top_k: k as i64,
    };
    let grid = Grid::threads_of(t, params::RENORMALIZE_THREADS);
    // SAFETY: all are `[t, k]`.
    unsafe { device.launch(CALL, &device.kernels().router.renormalize_kept, grid, &p) }
}
