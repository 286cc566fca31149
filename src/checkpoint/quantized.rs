//! A block whose routed experts stay quantized, as they are on disk.

use super::layout::{DiskMatrix, DiskRows};
use super::matrix::{MatrixLayout, read_matrix};
use super::open::Checkpoint;
use super::options::{LoadOptions, Progress};
use super::stored::{Scratch, Stored};
use crate::config::MoeConfig;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::layer::{ParamKind, Params, PerParam};
use crate::quant::{Quantized, QuantizedTensors, WeightFormat};
use crate::tensor::{Tensor, TensorRef};

const CALL: &str = "Checkpoint::load_quantized";

/// One rank's share of a block with quantized routed experts. These are frozen: backward makes no gradient of them, but
/// all others.
#[derive(Debug)]
pub struct QuantizedBlock<D: Kernels> {
    /// Sizes and formulas, of all ranks.
    pub config: MoeConfig,
    /// `[L, G·I, H]`.
    pub up: Quantized<D>,
    /// `[L, H, I]`.
    pub down: Quantized<D>,
    /// Every other parameter.
    others: PerParam<Option<Tensor<D>>>,
}

impl<D: Kernels> QuantizedBlock<D> {
    /// A block of `up` `[L, G·I, H]` and `down` `[L, H, I]` of a rank's L experts, and in `others` every other parameter
    /// that `config` has.
    ///
    /// # Errors
    /// A parameter that is missing or too many; shapes that are not those of `config`.
    pub fn new(
        config: MoeConfig,
        up: Quantized<D>,
        down: Quantized<D>,
        others: PerParam<Option<Tensor<D>>>,
    ) -> Result<Self> {
        const CALL: &str = "QuantizedBlock::new";
        let local = up.dims()[0];
        for kind in ParamKind::ALL {
            let other = others.get(kind).map(Tensor::dims);
            let found = match (kind, other) {
                (ParamKind::Up | ParamKind::Down, Some(_)) => {
                    return Err(Error::invalid(CALL, kind.name(), "nothing beside the quantized one", "a tensor"));
                }
                (ParamKind::Up, None) => Some(&up.dims()[..]),
                (ParamKind::Down, None) => Some(&down.dims()[..]),
                (_, other) => other,
            };
            match (kind.dims(&config, local), found) {
                (Some(expected), Some(found)) => Error::check_shape(CALL, kind.name(), &expected, found)?,
                (Some(_), None) => return Err(Error::invalid(CALL, kind.name(), "a tensor", "nothing")),
                (None, Some(_)) => return Err(Error::invalid(CALL, kind.name(), "nothing", "a tensor")),
                (None, None) => {}
            }
        }
        Ok(Self { config, up, down, others })
    }

    /// One of the parameters that are not quantized.
    pub fn get(&self, kind: ParamKind) -> Option<TensorRef<'_, D>> {
        self.others.get(kind).map(Tensor::view)
    }

    /// `up`, `down`, and every other parameter.
    pub fn into_parts(self) -> (Quantized<D>, Quantized<D>, PerParam<Option<Tensor<D>>>) {
        (self.up, self.down, self.others)
    }

    /// The parameters as a layer takes them.
    ///
    /// # Errors
    /// No router, which loading has made sure of.
    pub fn params(&self) -> Result<Params<'_, D>> {
        let router =
            self.get(ParamKind::Router).ok_or_else(|| Error::invalid(CALL, "router", "a tensor", "nothing"))?;
        Ok(Params { router, up: &self.up, down: &self.down, others: PerParam::from_fn(|kind| self.get(kind)) })
    }
}

impl QuantizedBlock<Cpu> {
    /// The same block on another device.
    ///
    /// # Errors
    /// Where there is no memory, or a driver's error.
    pub fn to<D: Kernels>(&self, device: &D) -> Result<QuantizedBlock<D>> {
        Ok(QuantizedBlock {
            config: self.config.clone(),
            up: self.up.to(device)?,
            down: self.down.to(device)?,
            others: self.others.as_ref().try_map(|_, t| t.as_ref().map(|t| t.to(device)).transpose())?,
        })
    }
}

/// One matrix on disk, with what is known of it before any is read.
struct PartToRead {
    /// Among the experts that are read; 0 for what all ranks hold.
    expert: usize,
    part: DiskMatrix,
    /// Of the parameter that it is a part of.
    dims: Vec<usize>,
    /// As it is kept.
    bytes: u64,
}

/// Where a matrix belongs in a stack.
struct StackPlace {
    /// Among the experts that are read.
    expert: usize,
    /// Of the stack, `[L, out, in]`.
    dims: [usize; 3],
    /// Matrices that each of its own is made of, as gate and up.
    parts: usize,
}

/// A stack under way.
struct QuantizedStack {
    format: WeightFormat,
    dims: [usize; 3],
    parts: usize,
    codes: Tensor<Cpu>,
    scales: Tensor<Cpu>,
    factors: Option<Tensor<Cpu>>,
}

impl QuantizedStack {
    fn new(format: WeightFormat, dims: [usize; 3], parts: usize) -> Result<Self> {
        let cpu = Cpu::new();
        let (dtype, scales) = format.scales(dims, parts);
        let factors = match format {
            WeightFormat::Nvfp4 => Some(Tensor::zeros(&cpu, DType::F32, &[dims[0], parts])?),
            WeightFormat::Mxfp4 | WeightFormat::Fp8Block => None,
        };
        let codes = Tensor::empty(&cpu, DType::U8, &format.code_dims(dims))?;
        Ok(Self { format, dims, parts, codes, scales: Tensor::empty(&cpu, dtype, &scales)?, factors })
    }

    fn finish(self) -> Result<Quantized<Cpu>> {
        let Self { format, dims, parts, codes, scales, factors } = self;
        Quantized::new(QuantizedTensors { format, dims, parts, codes, scales, factors })
    }
}

impl Checkpoint {
    pub(super) fn load_as_stored(
        &self,
        layer: usize,
        options: LoadOptions,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<QuantizedBlock<Cpu>> {
        let config = self.block_config(layer)?;
        let experts = options.experts(CALL, config.router.num_experts)?;
        let layout = self.layout(layer, &config);
        let checked = self.check_block(&layout, false)?;
        let mut stacks: PerParam<Option<QuantizedStack>> = PerParam::default();
        let mut others: PerParam<Option<Tensor<Cpu>>> = PerParam::default();
        let mut scratch = Scratch::default();
        let replicated = layout.replicated().into_iter().map(|part| (0, part));
        let routed = experts.clone().flat_map(|e| {
            let parts = layout.expert(e).into_iter();
            parts.map(move |part| (e - experts.start, part))
        });
        let dtype_of = |kind: ParamKind| {
            let natural = checked.natural[kind].unwrap_or(DType::F32);
            self.param_dtype(kind, natural, options.dtype)
        };
        let bytes_of = |part: &DiskMatrix| -> Result<u64> {
            Ok(match part.kind {
                ParamKind::Up | ParamKind::Down => self.stored_bytes(part)?,
                kind => (part.out * part.inn * dtype_of(kind).size()) as u64,
            })
        };
        let mut to_read = Vec::new();
        for (expert, part) in replicated.chain(routed) {
            // None: the configuration has no such parameter.
            let Some(dims) = part.kind.dims(&config, experts.len()) else { continue };
            to_read.push(PartToRead { expert, bytes: bytes_of(&part)?, part, dims });
        }
        let total = to_read.iter().map(|part| part.bytes).sum();
        let mut bytes_read = 0;
        for PartToRead { expert: e, part, dims, bytes } in to_read {
            bytes_read += bytes;
            let read = Progress { layer, tensor: &part.name, done: bytes_read, total };
            if matches!(part.kind, ParamKind::Up | ParamKind::Down) {
                let parts = layout.expert(0).iter().filter(|p| p.kind == part.kind).count();
                let place = StackPlace { expert: e, dims: [dims[0], dims[1], dims[2]], parts };
                self.read_stored(&part, place, &mut stacks, &mut scratch)?;
                progress(read);
                continue;
            }
            let dtype = dtype_of(part.kind);
            let tensor = get_or_make(&mut others[part.kind], || Tensor::empty(&Cpu::new(), dtype, &dims))?;
            let bytes = tensor.as_bytes_mut();
            let one = if part.kind.is_replicated() { bytes.len() } else { bytes.len() / experts.len() };
            let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(&part))?;
            read_matrix(&stored, &MatrixLayout::of(&part), &mut bytes[e * one..(e + 1) * one], dtype, &mut scratch)?;
            progress(read);
        }
        let mut take = |kind: ParamKind| {
            let missing = || Error::invalid(CALL, kind.name(), "a tensor", "nothing");
            stacks[kind].take().ok_or_else(missing)?.finish()
        };
        Ok(QuantizedBlock { up: take(ParamKind::Up)?, down: take(ParamKind::Down)?, config, others })
    }

    /// Bytes that a matrix of routed experts takes as it is stored: codes, block scales, and its factor. 0 of a form that
    /// is not kept, which reading refuses.
    fn stored_bytes(&self, part: &DiskMatrix) -> Result<u64> {
        let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(part))?;
        let Some(format) = stored.weight_format() else { return Ok(0) };
        let dims = [1, part.out, part.inn];
        let (dtype, scales) = format.scales(dims, 1);
        let factor = if format == WeightFormat::Nvfp4 { DType::F32.size() } else { 0 };
        let codes: usize = format.code_dims(dims).iter().product();
        Ok((codes + scales.iter().product::<usize>() * dtype.size() + factor) as u64)
    }

    /// Whether [`load_quantized`](Self::load_quantized) keeps a block's routed experts: all of them, so that all ranks
    /// find the same.
    pub(super) fn keeps_all(&self, layer: usize) -> Result<bool> {
        let config = self.block_config(layer)?;
        let layout = self.layout(layer, &config);
        if !self.check_block(&layout, false)?.form.is_quantized() {
            return Ok(false);
        }
        let mut formats: PerParam<Option<WeightFormat>> = PerParam::default();
        for part in (0..config.router.num_experts).flat_map(|e| layout.expert(e)) {
            if !matches!(part.kind, ParamKind::Up | ParamKind::Down) {
                continue;
            }
            let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(&part))?;
            let Some(format) = kept_format(&stored, &part) else { return Ok(false) };
            if *get_or_make(&mut formats[part.kind], || Ok(format))? != format {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads one of an expert's matrices to its place.
    fn read_stored(
        &self,
        part: &DiskMatrix,
        StackPlace { expert: e, dims, parts }: StackPlace,
        stacks: &mut PerParam<Option<QuantizedStack>>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(part))?;
        let refuse = |found: String| {
            let expected = "NVFP4, MXFP4 or fp8 in blocks of 128x128, a row an output (load_block de-quantizes any)";
            Error::invalid(CALL, &part.name, expected, found)
        };
        let format = kept_format(&stored, part).ok_or_else(|| match (stored.weight_format(), part.rows) {
            (Some(WeightFormat::Fp8Block), rows) if !matches!(rows, DiskRows::From(_)) => {
                refuse("blocks of gate and up rows in turn".to_string())
            }
            _ => refuse(format!("{:?}", stored.form)),
        })?;
        let stack = get_or_make(&mut stacks[part.kind], || QuantizedStack::new(format, dims, parts))?;
        if stack.format != format {
            return Err(refuse(format!("{:?} beside {:?}", format, stack.format)));
        }
        // Rows of the matrix and of its scales, in the order on disk.
        let code_row = stack.codes.bytes() / (dims[0] * dims[1]);
        place(
            &mut stack.codes.as_bytes_mut()[e * dims[1] * code_row..][..dims[1] * code_row],
            part.rows,
            part.out,
            code_row,
            |bytes| Ok(stored.read_codes(part.slice * part.out * code_row, bytes)?),
        )?;
        let [_, scale_rows, blocks] = format.scales(dims, parts).1;
        let scale_row = blocks * if format == WeightFormat::Fp8Block { 4 } else { 1 };
        let (rows, count) = match (format, part.rows) {
            (WeightFormat::Fp8Block, DiskRows::From(first)) => {
                let count = scale_rows / parts;
                (DiskRows::From(if first == 0 { 0 } else { count }), count)
            }
            (_, rows) => (rows, part.out),
        };
        place(
            &mut stack.scales.as_bytes_mut()[e * scale_rows * scale_row..][..scale_rows * scale_row],
            rows,
            count,
            scale_row,
            |bytes| Ok(stored.read_block_scales(part.slice * count * blocks, bytes, scratch)?),
        )?;
        if let (Some(factors), Some(factor)) = (&mut stack.factors, stored.factor()?) {
            let part = part.rows.map(0) / (dims[1] / parts);
            factors.view_mut().into_slice::<f32>()?[e * parts + part] = factor;
        }
        Ok(())
    }
}

/// The format in which a matrix is kept as it is stored, rows being outputs; `None` where it is not.
fn kept_format(stored: &Stored<'_>, part: &DiskMatrix) -> Option<WeightFormat> {
    // Rows are outputs on disk where a transposed matrix was flipped, or one was neither.
    let format = stored.weight_format().filter(|_| part.transposed == stored.flipped)?;
    // Blocks of rows that are gate and up in turn belong to both.
    let in_turn = !matches!(part.rows, DiskRows::From(_));
    (format != WeightFormat::Fp8Block || !in_turn).then_some(format)
}

/// What is there; made where there is nothing yet.
fn get_or_make<T>(place: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&mut T> {
    let made = match place.take() {
        Some(made) => made,
        None => make()?,
    };
    Ok(place.insert(made))
}

/// Reads `count` rows of `width` bytes each, and puts them where they belong.
fn place(
    to: &mut [u8],
    rows: DiskRows,
    count: usize,
    width: usize,
    read: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    if let DiskRows::From(first) = rows {
        return read(&mut to[first * width..(first + count) * width]);
    }
    let mut bytes = vec![0; count * width];
    read(&mut bytes)?;
    for (row, from) in bytes.chunks_exact(width).enumerate() {
        let at = rows.map(row) * width;
        to[at..at + width].copy_from_slice(from);
    }
    Ok(())
}
