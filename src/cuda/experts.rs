//! Grouped GEMMs of the experts: up, down, and the gradients with respect to rows.
//!
//! Every call lists the row tiles of its layout on the device and launches as many blocks as there can be; those
//! without a tile return at once. No count is read back.

use crate::config::WeightAt;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{Down, DownBwd, RowSource, Segments, SlotWeights, Up, UpDgrad};
use crate::tensor::{Tensor, dims3};
use crate::weights::Weight;

use super::context_kernels::Kernel;
use super::dequantized::{DequantizedLaunch, Dequantizing, dequantizing};
use super::device::Cuda;
use super::fault_site::MappedCall;
use super::heuristics::{ORDER_ROWS_COLUMNS, ORDER_WGRAD_COLUMNS};
use super::kernel_table::Product;
use super::launch::Grid;
use super::layout::{
    SourceRows, TileListSpec, TileOrder, Tiles, aligned, check_segments, input, list_planned, optional,
    optional_output, output, row_dest,
};
use super::params::{self, activation_code, type_code};
use super::permute::gather_to_slots;
use super::sm90_decode;
use super::sm90_grouped_gemm::{self, Sm90Launch};
use super::tile_config::{MMA_SYNC, SIMT, SM90_DECODE, SM90_GROUPED_GEMM, TileConfig};
use super::w4a16::{QuantizedLaunch, QuantizedOperand, TunedKernel};

/// Tiles of the portable kernels for a type.
pub(super) fn portable_shape(call: &'static str, tensor: &str, dtype: DType) -> Result<TileConfig> {
    type_code(call, tensor, dtype)?;
    Ok(if matches!(dtype, DType::BF16 | DType::F16) { MMA_SYNC } else { SIMT })
}

/// Weight that applies at one of `places`, checked.
fn applies(
    call: &'static str,
    weights: &Option<SlotWeights<'_, Cuda>>,
    places: &[WeightAt],
    slots: usize,
) -> Result<u64> {
    match weights.as_ref().filter(|w| places.contains(&w.at)) {
        Some(w) => input(call, "slot_weights", &w.values, DType::F32, &[slots]),
        None => Ok(0),
    }
}

/// A product of a layout's rows, before its epilogue is described.
struct GroupedGemm<'a> {
    call: &'static str,
    device: &'a Cuda,
    dtype: DType,
    shape: TileConfig,
    segments: &'a Segments<Cuda>,
    slots: usize,
    /// The call, as a fault's detail has it.
    site: i64,
    quantized: Option<QuantizedOperand>,
}

/// The kernels that make a product, and the tiles that they walk through.
struct KernelChoice<'a> {
    /// Hopper's kernel, and what its operands' layout depends on.
    sm90: Option<(Product, &'a Kernel)>,
    /// With quantized weights, which that kernel takes de-quantized.
    dequantizing: Option<Dequantizing<'a>>,
    /// That for few rows.
    decode: Option<&'a Kernel>,
    tiles: Tiles,
    /// With quantized weights: a kernel that serves these best.
    tuned: Option<TunedKernel<'a>>,
    /// Hopper's, where it starts early: SMs of the kernel that brings its rows, or others.
    movement_sms: Option<usize>,
}

impl<'a> GroupedGemm<'a> {
    fn new(
        mapped: MappedCall,
        device: &'a Cuda,
        segments: &'a Segments<Cuda>,
        experts: usize,
        dtype: DType,
    ) -> Result<Self> {
        let call = mapped.name();
        let shape = portable_shape(call, "rows", dtype)?;
        check_segments(call, segments, experts)?;
        let site = device.site(mapped, segments.origin, params::OPERAND_FIRST)?;
        Ok(Self { call, device, dtype, shape, segments, slots: segments.rows, site, quantized: None })
    }

    /// With these weights.
    fn of(self, weight: &Weight<'_, Cuda>) -> Result<Self> {
        let quantized = match weight {
            Weight::Dense(_) => None,
            Weight::Quantized(weight) => Some(QuantizedOperand::new(self.call, weight)?),
        };
        Ok(Self { quantized, ..self })
    }

    fn source(&self, name: &str, source: &RowSource<'_, Cuda>, width: usize) -> Result<SourceRows> {
        SourceRows::new(self.call, name, source, self.dtype, width, (self.slots, self.site))
    }

    /// Brings rows behind a map into slot order where so many columns are made of them that TMA, which
    /// follows no map, makes up for it. The tensor is to live until the product has been launched.
    fn in_order(&self, p: &mut params::GemmParams) -> Result<Option<Tensor<Cuda>>> {
        if p.a_map == 0 || (p.n as usize) < ORDER_ROWS_COLUMNS {
            return Ok(None);
        }
        let rows = SourceRows { base: p.a, map: p.a_map, rows: p.a_rows, vector: true, site: p.site };
        let rows = gather_to_slots(self.device, self.call, &rows, self.slots, p.k as usize, self.dtype)?;
        (p.a, p.a_map, p.a_rows) = (rows.view().data().ptr, 0, self.slots as i64);
        Ok(Some(rows))
    }

    /// Operands of a product of `n` columns.
    fn params(&self, a: &SourceRows, weight: Weight<'_, Cuda>, (n, k): (usize, usize)) -> Result<params::GemmParams> {
        let code = type_code(self.call, "rows", self.dtype)?;
        let groups = weight.dims().first().copied().unwrap_or(0) as i64;
        let (b, vector_b) = match weight {
            Weight::Dense(b) => {
                Error::check_dtype(self.call, "weight", self.dtype, b.dtype())?;
                (b.data().ptr, aligned(b, b.dims().last().copied().unwrap_or(1)))
            }
            // Of columns in eights, where they are made 16-bit.
            Weight::Quantized(_) => (0, true),
        };
        Ok(params::GemmParams {
            a: a.base,
            a_map: a.map,
            a_rows: a.rows,
            a_type: code,
            b,
            b_type: code,
            m: self.slots as i64,
            n: n as i64,
            k: k as i64,
            groups,
            bias_type: code,
            out_type: code,
            fault: self.device.inner.status,
            site: self.site,
            vector_a: i64::from(a.vector),
            vector_b: i64::from(vector_b),
            split: 1,
            ..Default::default()
        })
    }

    fn tiles(&self, list: TileListSpec) -> Result<Tiles> {
        Tiles::new(self.call, self.device, self.segments, self.site, list)
    }

    /// Chooses the kernels, Hopper's for `product` where they can serve, and lists the tiles. A tile's columns are
    /// divided by `factor`.
    fn choose(&self, p: &mut params::GemmParams, product: Option<Product>, factor: usize) -> Result<KernelChoice<'a>> {
        let quantized = self.quantized.as_ref();
        if let Some(kernel) = quantized.and_then(|q| q.tuned(self.device, self.dtype, p, product, factor)) {
            let tiles = self.tiles(TileListSpec { tile: kernel.rows, order: TileOrder::Slots, chunk: None })?;
            (p.tiles, p.tile_count, p.m_tiles) = (tiles.list(), tiles.count(), tiles.most as i64);
            p.n_tiles = (p.n as usize).div_ceil(kernel.columns) as i64;
            return Ok(KernelChoice {
                sm90: None,
                dequantizing: None,
                decode: None,
                tiles,
                tuned: Some(kernel),
                movement_sms: None,
            });
        }
        let dense = self.quantized.is_none();
        if let Some(kernel) = sm90_decode::expert_kernel(self.device, self.dtype, p, product).filter(|_| dense) {
            let tiles = self.tiles(TileListSpec { tile: SM90_DECODE.tile, order: TileOrder::Slots, chunk: None })?;
            (p.tiles, p.tile_count, p.m_tiles) = (tiles.list(), tiles.count(), tiles.most as i64);
            p.n_tiles = (p.n as usize).div_ceil(sm90_decode::COLUMNS / factor) as i64;
            return Ok(KernelChoice {
                sm90: None,
                dequantizing: None,
                decode: Some(kernel),
                tiles,
                tuned: None,
                movement_sms: None,
            });
        }
        let dequantizing =
            quantized.zip(product).and_then(|(q, product)| dequantizing(self.device, self.dtype, q, product, p));
        let serves = (dense || dequantizing.is_some()) && sm90_grouped_gemm::serves(self.device, self.dtype, p);
        let kernels = self.device.sm90_kernels().filter(|_| serves);
        let sm90 = product.zip(kernels).and_then(|(product, kernels)| {
            let (of_types, columns) = product.kernels(self.device, kernels, p);
            Some((product, of_types.of(self.dtype)?, columns))
        });
        let dequantizing = dequantizing.filter(|_| sm90.is_some());
        let (tile, order, columns) = match sm90 {
            Some((_, _, columns)) => (SM90_GROUPED_GEMM.tile, TileOrder::Pairs, columns),
            None => (self.shape.tile, TileOrder::Slots, self.shape.tile),
        };
        let tiles = self.tiles(TileListSpec { tile, order, chunk: dequantizing.map(|d| d.chunks.each) })?;
        (p.tiles, p.tile_count, p.m_tiles) = (tiles.list(), tiles.count(), tiles.most as i64);
        p.ticket = tiles.ticket();
        p.n_tiles = (p.n as usize).div_ceil(columns / factor) as i64;
        let sm90 = sm90.map(|(product, kernel, _)| (product, kernel));
        Ok(KernelChoice { sm90, dequantizing, decode: None, tiles, tuned: None, movement_sms: None })
    }

    fn launch(&self, product: Product, choice: &KernelChoice<'_>, p: &params::GemmParams) -> Result<()> {
        let blocks = (p.m_tiles as usize).saturating_mul(p.n_tiles as usize);
        let dequantizing = self.quantized.as_ref().zip(choice.sm90).zip(choice.dequantizing);
        if let Some(((weight, (product, kernel)), dequantizing)) = dequantizing {
            let counts = self.segments.counts.view().data().ptr;
            let (call, device, dtype, tiles) = (self.call, self.device, self.dtype, &choice.tiles);
            let launch =
                DequantizedLaunch { call, device, product, dtype, kernel, weight, dequantizing, tiles, counts };
            return launch.run(p);
        }
        if let Some(weight) = &self.quantized {
            let grid = Grid { shared: self.shape.shared, ..Grid::new(blocks, self.shape.threads) };
            let launch = QuantizedLaunch { call: self.call, product, dtype: self.dtype, grid, tuned: choice.tuned };
            return weight.launch(self.device, launch, p);
        }
        // SAFETY, all: callers have checked every tensor in `p` against the sizes in `p`; maps and segments, which
        // only the device knows, are checked by the kernel.
        if let Some(kernel) = choice.decode {
            // SAFETY: as above.
            return unsafe { self.device.launch(self.call, kernel, sm90_decode::grid(blocks), p) };
        }
        match choice.sm90 {
            // SAFETY: as above.
            Some((product, kernel)) => unsafe {
                let launch = Sm90Launch {
                    call: self.call,
                    kernel,
                    product,
                    dtype: self.dtype,
                    blocks,
                    movement_sms: choice.movement_sms,
                };
                sm90_grouped_gemm::launch(self.device, launch, p)
            },
            None => {
                let grid = Grid { shared: self.shape.shared, ..Grid::new(blocks, self.shape.threads) };
                let kernel = self.device.kernels().grouped_gemm.of(product).of(self.dtype);
                // SAFETY: as above.
                unsafe { self.device.launch(self.call, kernel, grid, p) }
            }
        }
    }

    /// Has the kernel start early and wait for rows that are still coming, where it is Hopper's and nothing else has been
    /// enqueued for the product. Every other kernel runs behind what brings them.
    fn wait_in_kernel(
        &self,
        choice: &mut KernelChoice<'_>,
        rows: &RowSource<'_, Cuda>,
        p: &mut params::GemmParams,
    ) -> Result<()> {
        let Some(arrivals) = &rows.arrivals else { return Ok(()) };
        let groups = input(self.call, "arrivals.groups", &arrivals.groups, DType::I64, &[1])?;
        if choice.sm90.is_some() && choice.dequantizing.is_none() && choice.tiles.is_planned() && p.a_map != 0 {
            (p.arrived, p.arrived_experts) = (groups, arrivals.experts.max(1) as i64);
            choice.movement_sms = Some(arrivals.movement_sms);
        }
        Ok(())
    }

    /// Has the kernel start beside the movement that was enqueued last, where it is Hopper's and nothing else has been
    /// enqueued for the product.
    fn start_early(&self, choice: &mut KernelChoice<'_>, movement_sms: Option<usize>) {
        if choice.sm90.is_some() && choice.dequantizing.is_none() && choice.tiles.is_planned() {
            choice.movement_sms = choice.movement_sms.or(movement_sms);
        }
    }

    /// Describes weights on the activation that lie behind a map; false: they do not.
    fn mapped_weights(&self, weights: &Option<SlotWeights<'_, Cuda>>, p: &mut params::GemmParams) -> Result<bool> {
        let Some(SlotWeights { values, map: Some(map), at }) = weights else { return Ok(false) };
        if *at != WeightAt::Activation {
            let found = format!("{at:?}");
            return Err(Error::invalid(self.call, "slot_weights.map", "weights at the activation", found));
        }
        p.out_scale = input(self.call, "slot_weights", values, DType::F32, values.dims())?;
        p.out_scale_map = input(self.call, "slot_weights.map", map, DType::I32, &[self.slots])?;
        p.out_scales = values.count() as i64;
        Ok(true)
    }

    /// Brings those into slot order for kernels that follow no map. The tensor is to live until the product has been
    /// launched.
    fn weights_in_slots(&self, p: &mut params::GemmParams) -> Result<Tensor<Cuda>> {
        let Self { site, slots, .. } = *self;
        let source = SourceRows { base: p.out_scale, map: p.out_scale_map, rows: p.out_scales, vector: false, site };
        let weights = gather_to_slots(self.device, self.call, &source, slots, 1, DType::F32)?;
        (p.out_scale, p.out_scale_map, p.out_scales) = (weights.view().data().ptr, 0, 0);
        Ok(weights)
    }

    /// Room for one dot a slot and column tile.
    fn partial(&self, n_tiles: i64) -> Result<Tensor<Cuda>> {
        Tensor::empty(self.device, DType::F32, &[self.slots, n_tiles as usize])
    }

    /// Sums those dots, and adds the gradient's dot with a bias.
    fn slot_dots(
        &self,
        partial: &Tensor<Cuda>,
        tiles: &Tiles,
        out: u64,
        bias: Option<(u64, &SourceRows, usize)>,
    ) -> Result<()> {
        // The kernel walks through one list, and numbers biases by all experts.
        let whole = (!tiles.is_whole())
            .then(|| self.tiles(TileListSpec { tile: SM90_GROUPED_GEMM.tile, order: TileOrder::Pairs, chunk: None }))
            .transpose()?;
        let tiles = whole.as_ref().unwrap_or(tiles);
        let mut p = params::SlotDotsParams {
            partial: partial.view().data().ptr,
            parts: partial.dims()[1] as i64,
            type_: type_code(self.call, "rows", self.dtype)?,
            tiles: tiles.list(),
            tile_count: tiles.count(),
            out,
            fault: self.device.inner.status,
            site: self.site,
            ..Default::default()
        };
        if let Some((bias, grad, width)) = bias {
            (p.bias, p.width) = (bias, width as i64);
            (p.grad, p.grad_map, p.grad_rows) = (grad.base, grad.map, grad.rows);
        }
        // SAFETY: `out` has a value for each slot, `partial` the parts of each; bias and gradient were checked.
        unsafe {
            self.device.launch(
                self.call,
                &self.device.kernels().permute.slot_dots,
                Grid::new(tiles.most, params::PERMUTE_THREADS),
                &p,
            )
        }
    }
}

/// Whether up and down's gradient of gated experts start early where their rows are still coming, and up's weight gradient
/// where the rows' gradient travels: not where rows are brought into slot order before.
pub(super) fn products_wait(device: &Cuda, dtype: DType, [hidden, intermediate]: [usize; 2]) -> bool {
    device.sm90()
        && matches!(dtype, DType::BF16 | DType::F16)
        && intermediate < ORDER_ROWS_COLUMNS
        && 2 * intermediate < ORDER_WGRAD_COLUMNS
        && [hidden, intermediate].iter().all(|elements| elements.is_multiple_of(8))
}

pub(super) fn list_tiles(device: &Cuda, segments: &Segments<Cuda>) -> Result<()> {
    const MAPPED: MappedCall = MappedCall::Up;
    let experts = segments.offsets.dims().first().copied().unwrap_or(0);
    check_segments(MAPPED.name(), segments, experts)?;
    let site = device.site(MAPPED, segments.origin, params::OPERAND_FIRST)?;
    list_planned(MAPPED.name(), device, segments, site)
}

pub(super) fn up(device: &Cuda, call: Up<'_, Cuda>) -> Result<()> {
    const MAPPED: MappedCall = MappedCall::Up;
    const CALL: &str = MAPPED.name();
    let [experts, wide, h] = dims3(CALL, "weight", call.weight.dims())?;
    let factor = call.activation.gate_factor();
    if wide % factor != 0 {
        return Err(Error::invalid(CALL, "weight", "an even number of rows for a gated activation", wide));
    }
    let (inner, dtype) = (wide / factor, call.rows.base.dtype());
    let gemm = GroupedGemm::new(MAPPED, device, call.segments, experts, dtype)?.of(&call.weight)?;
    let rows = gemm.source("rows", &call.rows, h)?;
    let mut p = gemm.params(&rows, call.weight, (inner, h))?;
    p.bias = optional(CALL, "bias", &call.bias, dtype, &[experts, wide])?;
    p.scale = applies(CALL, &call.slot_weights, &[WeightAt::Input], gemm.slots)?;
    let behind_map = gemm.mapped_weights(&call.slot_weights, &mut p)?;
    if !behind_map {
        p.out_scale = applies(CALL, &call.slot_weights, &[WeightAt::Activation], gemm.slots)?;
    }
    p.pre_out = optional_output(CALL, "pre", call.pre, dtype, &[gemm.slots, wide])?;
    (p.out, p.accumulate) = row_dest(CALL, call.out, dtype, &[gemm.slots, inner])?;
    (p.activation, p.alpha, p.limit) = activation_code(call.activation);
    let mut choice = gemm.choose(&mut p, (factor == 2).then_some(Product::Up), factor)?;
    let in_order = if choice.sm90.is_some() { gemm.in_order(&mut p)? } else { None };
    gemm.wait_in_kernel(&mut choice, &call.rows, &mut p)?;
    gemm.start_early(&mut choice, call.movement_sms);
    let in_slots = if behind_map && choice.sm90.is_none() { Some(gemm.weights_in_slots(&mut p)?) } else { None };
    gemm.launch(Product::Up, &choice, &p)?;
    drop((in_order, in_slots));
    Ok(())
}

pub(super) fn down(device: &Cuda, call: Down<'_, Cuda>) -> Result<()> {
    const MAPPED: MappedCall = MappedCall::Down;
    const CALL: &str = MAPPED.name();
    let [experts, h, inner] = dims3(CALL, "weight", call.weight.dims())?;
    let dtype = call.rows.base.dtype();
    let gemm = GroupedGemm::new(MAPPED, device, call.segments, experts, dtype)?.of(&call.weight)?;
    let rows = gemm.source("rows", &call.rows, inner)?;
    let mut p = gemm.params(&rows, call.weight, (h, inner))?;
    p.bias = optional(CALL, "bias", &call.bias, dtype, &[experts, h])?;
    p.scale = applies(CALL, &call.slot_weights, &[WeightAt::Output], gemm.slots)?;
    p.bias_scale = applies(CALL, &call.slot_weights, &[WeightAt::Output, WeightAt::Activation], gemm.slots)?;
    (p.out, p.accumulate) = row_dest(CALL, call.out, dtype, &[gemm.slots, h])?;
    let choice = gemm.choose(&mut p, Some(Product::Down), 1)?;
    gemm.launch(Product::Down, &choice, &p)
}

pub(super) fn down_bwd(device: &Cuda, call: DownBwd<'_, Cuda>) -> Result<()> {
    const MAPPED: MappedCall = MappedCall::DownBwd;
    const CALL: &str = MAPPED.name();
    let [experts, h, inner] = dims3(CALL, "weight", call.weight.dims())?;
    let (wide, dtype) = (inner * call.activation.gate_factor(), call.grad.base.dtype());
    let gemm = GroupedGemm::new(MAPPED, device, call.segments, experts, dtype)?.of(&call.weight)?;
    let grad = gemm.source("grad", &call.grad, h)?;
    let mut p = gemm.params(&grad, call.weight, (inner, h))?;
    let bias = optional(CALL, "bias", &call.bias, dtype, &[experts, h])?;
    p.pre = input(CALL, "pre", &call.pre, dtype, &[gemm.slots, wide])?;
    p.scale = applies(CALL, &call.slot_weights, &[WeightAt::Output, WeightAt::Activation], gemm.slots)?;
    p.out = output(CALL, "d_pre", call.d_pre, dtype, &[gemm.slots, wide])?;
    p.hidden = optional_output(CALL, "hidden", call.hidden, dtype, &[gemm.slots, inner])?;
    (p.activation, p.alpha, p.limit) = activation_code(call.activation);
    let mut choice = gemm.choose(&mut p, (call.activation.gate_factor() == 2).then_some(Product::DownBwd), 1)?;
    let in_order = if choice.sm90.is_some() { gemm.in_order(&mut p)? } else { None };
    let d_weights = call.d_slot_weights.filter(|_| p.scale != 0);
    let d_weights = optional_output(CALL, "d_slot_weights", d_weights, DType::F32, &[gemm.slots])?;
    if d_weights == 0 {
        gemm.wait_in_kernel(&mut choice, &call.grad, &mut p)?;
        return gemm.launch(Product::DownBwd, &choice, &p);
    }
    // Nothing may be enqueued before a product that starts while its rows come.
    let filled = if call.grad.arrivals.is_some() { &device.without_poison() } else { device };
    let partial = Tensor::empty(filled, DType::F32, &[gemm.slots, p.n_tiles as usize])?;
    p.partial = partial.view().data().ptr;
    gemm.wait_in_kernel(&mut choice, &call.grad, &mut p)?;
    gemm.launch(Product::DownBwd, &choice, &p)?;
    drop(in_order);
    gemm.slot_dots(&partial, &choice.tiles, d_weights, (bias != 0).then_some((bias, &grad, h)))
}

pub(super) fn up_dgrad(device: &Cuda, call: UpDgrad<'_, Cuda>) -> Result<()> {
    const MAPPED: MappedCall = MappedCall::UpDgrad;
    const CALL: &str = MAPPED.name();
    let [experts, wide, h] = dims3(CALL, "weight", call.weight.dims())?;
    let dtype = call.d_pre.dtype();
    let gemm = GroupedGemm::new(MAPPED, device, call.segments, experts, dtype)?.of(&call.weight)?;
    let d_pre = gemm.source("d_pre", &RowSource::direct(call.d_pre), wide)?;
    let mut p = gemm.params(&d_pre, call.weight, (h, wide))?;
    (p.out, p.accumulate) = row_dest(CALL, call.out, dtype, &[gemm.slots, h])?;
    let Some(at_input) = call.input_weight else {
        let choice = gemm.choose(&mut p, Some(Product::Dgrad), 1)?;
        return gemm.launch(Product::Dgrad, &choice, &p);
    };
    p.scale = input(CALL, "slot_weights", &at_input.values, DType::F32, &[gemm.slots])?;
    let x = gemm.source("input_weight.rows", &at_input.rows, h)?;
    (p.x, p.x_map, p.x_rows) = (x.base, x.map, x.rows);
    let d_weights = optional_output(CALL, "d_slot_weights", at_input.d_slot_weights, DType::F32, &[gemm.slots])?;
    let choice = gemm.choose(&mut p, None, 1)?;
    if d_weights == 0 {
        return gemm.launch(Product::Dgrad, &choice, &p);
    }
    let partial = gemm.partial(p.n_tiles)?;
    p.partial = partial.view().data().ptr;
    gemm.launch(Product::Dgrad, &choice, &p)?;
    gemm.slot_dots(&partial, &choice.tiles, d_weights, None)
}
