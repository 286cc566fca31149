//! The router of few tokens in one launch (`kernels/sm90_route_plan.cu`): logits, choices, layout.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{Linear, Origin, Route, RouteAndPlan, RoutedPlan};
use crate::plan::{Capacity, DispatchSpec, PlanRequest, Reporting, RowOrder};
use crate::tensor::{Tensor, TensorRef, dims2};

use super::context_kernels::Kernel;
use super::device::Cuda;
use super::heuristics::few_rows;
use super::launch::{Grid, argument};
use super::layout::{aligned, at, output};
use super::linear::any;
use super::params::{self, ROUTE_PLAN_BLOCKS, ROUTE_PLAN_THREADS};
use super::plan::{LocalLayout, earlier_faults, with_stats};
use super::router::{fits_registers, route_params};
use super::tile_config::ROUTE_PLAN_SMEM;

const CALL: &str = "route_and_plan";
const TOKENS: usize = params::ROUTE_PLAN_TOKENS as usize;
/// Experts that the cluster's warps have where one of each block multiplies.
const EXPERTS: usize = (ROUTE_PLAN_BLOCKS * params::ROUTE_PLAN_WARP_EXPERTS) as usize;
const WARPS: usize = params::ROUTE_PLAN_WARPS as usize;
/// Elements of k in a step, as in the kernel.
const STEP: usize = 64;

pub(super) fn route_and_plan(device: &Cuda, call: RouteAndPlan<'_, Cuda>) -> Result<Option<RoutedPlan<Cuda>>> {
    let RouteAndPlan { linear, config, selection_bias, jitter, mut ids, mut weights, spec } = call;
    let [t, _] = dims2(CALL, "x", linear.x.dims())?;
    let experts = config.num_experts;
    let with_room = has_room(spec, t, experts) && config.top_k == spec.top_k && spec.reporting == Reporting::Deferred;
    let Some((kernel, grid)) = kernel(device, &linear, experts).filter(|_| with_room) else { return Ok(None) };
    let origin = Origin { rank: 0, layer: spec.layer };
    let routing = route_params(
        device,
        Route {
            config,
            logits: linear.out.as_ref(),
            selection_bias: selection_bias.as_ref().map(TensorRef::borrow),
            jitter,
            origin,
            reporting: spec.reporting,
            ids: ids.reborrow(),
            weights: weights.reborrow(),
        },
    )?;
    if !fits_registers(&routing) {
        return Ok(None);
    }
    earlier_faults(device)?;
    let request = PlanRequest {
        rank: origin.rank,
        ranks: 1,
        num_experts: experts,
        ids: ids.as_ref(),
        weights: None,
        tokens: &[t],
        spec,
        row_order: RowOrder::Local,
    };
    let Some(mut layout) = LocalLayout::new(device, &request)? else { return Ok(None) };
    let mut slot_weights = Tensor::empty(device, DType::F32, &[layout.params.rows as usize])?;
    layout.params.slot_weights = at(&mut slot_weights);
    let product = product(linear, experts)?;
    let mut arguments = [argument(&product), argument(&routing), argument(&layout.params)];
    // SAFETY: every tensor has the size that `params.h` states for it, with room for all choices of as many tokens and
    // experts as the kernel takes.
    unsafe { device.launch_with(CALL, kernel, grid, &mut arguments) }?;
    let plan = with_stats(device, layout.into_plan(), experts);
    Ok(Some(RoutedPlan { plan, slot_weights }))
}

/// The kernel, and its grid, where it makes the logits that [`linear`](super::linear::linear) would.
fn kernel<'a>(device: &'a Cuda, linear: &Linear<'_, Cuda>, experts: usize) -> Option<(&'a Kernel, Grid)> {
    let (dtype, t) = (linear.x.dtype(), linear.x.rows());
    let h = *linear.x.dims().last()?;
    let few = (1..=TOKENS).contains(&t) && experts <= WARPS * EXPERTS && dtype == linear.weight.dtype();
    let whole = few && aligned(linear.x, h) && aligned(linear.weight, h);
    let tiles = if experts > EXPERTS { WARPS } else { 1 };
    let step = params::ROUTE_PLAN_ROW_BYTES as usize + tiles * params::ROUTE_PLAN_WEIGHT_BYTES as usize;
    let shared = h.div_ceil(STEP) * step;
    let kernel = device.sm90_kernels().filter(|_| whole && shared <= ROUTE_PLAN_SMEM as usize)?.route_plan.of(dtype)?;
    let grid = Grid::new(ROUTE_PLAN_BLOCKS as usize, ROUTE_PLAN_THREADS);
    Some((kernel, Grid { shared: shared as u32, ..grid }))
}

/// Whether no choice can be dropped, and the layout has the tiles of few rows.
fn has_room(spec: &DispatchSpec, tokens: usize, experts: usize) -> bool {
    let choices = tokens.saturating_mul(spec.top_k);
    let most = choices.saturating_add(choices.min(experts).saturating_mul(spec.alignment.saturating_sub(1)));
    let rows = match spec.capacity {
        Capacity::Static(rows) => rows,
        Capacity::Eager => most,
    };
    let rows_are_few = i64::try_from(rows).is_ok_and(|rows| few_rows(rows, experts as i64));
    most <= rows && rows_are_few && spec.expert_capacity.is_none()
}

fn product(linear: Linear<'_, Cuda>, experts: usize) -> Result<params::GemmParams> {
    let [t, h] = dims2(CALL, "x", linear.x.dims())?;
    let (a, a_type) = any(CALL, "x", linear.x, &[t, h])?;
    let (b, b_type) = any(CALL, "weight", linear.weight, &[experts, h])?;
    let (bias, bias_type) = linear.bias.map_or(Ok((0, 0)), |bias| any(CALL, "bias", bias, &[experts]))?;
    Ok(params::GemmParams {
        a,
        a_type,
        b,
        b_type,
        bias,
        bias_type,
        m: t as i64,
        n: experts as i64,
        k: h as i64,
        out: output(CALL, "out", linear.out, DType::F32, &[t, experts])?,
        ..Default::default()
    })
}
