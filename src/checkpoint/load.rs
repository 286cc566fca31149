//! Reads a rank's share of a block: all names, shapes and types are checked before anything is allocated.

use std::collections::HashSet;
use std::ops::Range;

use super::layout::{BlockLayout, DiskMatrix, DiskRows};
use super::matrix::{MatrixLayout, ShardMemory, read_matrix, read_window};
use super::open::Checkpoint;
use super::options::{BlockShards, LoadOptions, Progress, ShardOptions};
use super::params::{Block, BlockParams};
use super::stored::{Form, Scratch, Stored};
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{CheckpointError, Error, Result};
use crate::etp::Shards;
use crate::layer::{ParamKind, PerParam};
use crate::tensor::Tensor;

/// Results of checking a block.
#[derive(Debug)]
pub(super) struct CheckedBlock {
    /// Type of each parameter as stored, or that de-quantized weights get.
    pub natural: PerParam<Option<DType>>,
    /// Form of the routed experts.
    pub form: Form,
    /// Whether any of its tensors is quantized.
    pub quantized: bool,
    /// Every tensor that belongs to the block.
    pub names: HashSet<String>,
    /// Bytes on disk of the routed experts, and of the rest.
    pub disk: [u64; 2],
}

/// The rows of a parameter that a rank's shard of its lines lies in.
struct ShardWindow {
    /// Of the parameter's own width.
    rows: Range<usize>,
    /// Rows of one expert.
    rows_of_one: usize,
    width: usize,
    /// Elements before the shard's first.
    before: usize,
    count: usize,
    shard_dims: [usize; 2],
}

impl ShardWindow {
    /// Of a parameter of so many experts with rows of `width` elements.
    fn new((shards, rank): (Shards, usize), width: usize, experts: usize) -> Self {
        let ([lines, line], own) = (
            [shards.dims()[0..shards.dims().len() - 1].iter().product::<usize>(), shards.shard_dims()[1]],
            shards.rows_of(rank),
        );
        let elements = own.start * line..own.end * line;
        let rows = elements.start / width..elements.end.div_ceil(width);
        Self {
            rows_of_one: lines * line / width / experts,
            width,
            before: elements.start - rows.start * width,
            count: elements.len(),
            shard_dims: shards.shard_dims(),
            rows,
        }
    }

    /// Whether lines are rows.
    fn is_shard(&self) -> bool {
        self.shard_dims[1] == self.width
    }

    /// Memory to read the rows to.
    fn memory(&self, dtype: DType) -> Result<Tensor<Cpu>> {
        let dims = if self.is_shard() { self.shard_dims } else { [self.rows.len(), self.width] };
        Tensor::zeros(&Cpu::new(), dtype, &dims)
    }

    /// Makes the shard of the rows.
    fn trim(&self, rows: &mut Tensor<Cpu>) -> Result<()> {
        if self.is_shard() {
            return Ok(());
        }
        let size = rows.dtype().size();
        let mut shard = Tensor::zeros(&Cpu::new(), rows.dtype(), &self.shard_dims)?;
        let (from, len) = (self.before * size, self.count * size);
        shard.as_bytes_mut()[..len].copy_from_slice(&rows.as_bytes()[from..from + len]);
        *rows = shard;
        Ok(())
    }
}

impl LoadOptions {
    /// This rank's experts, of options that make sense.
    pub(super) fn experts(&self, call: &'static str, experts: usize) -> Result<std::ops::Range<usize>> {
        if let Some(dtype) = self.dtype.filter(|dtype| !dtype.is_float()) {
            return Err(Error::invalid(call, "dtype", "a floating-point type", dtype));
        }
        if self.ranks == 0 || !experts.is_multiple_of(self.ranks) {
            return Err(Error::invalid(call, "ranks", format!("a divisor of {experts} experts"), self.ranks));
        }
        if self.rank >= self.ranks {
            return Err(Error::invalid(call, "rank", format!("0..{}", self.ranks), self.rank));
        }
        let local = experts / self.ranks;
        Ok(self.rank * local..(self.rank + 1) * local)
    }
}

impl Checkpoint {
    /// Type that a tensor of this form gets where none is asked for.
    pub(super) fn natural(&self, form: Form) -> DType {
        match (form, self.model.dtype) {
            (Form::Plain(dtype), _) => dtype,
            (_, Some(dtype @ (DType::BF16 | DType::F16))) => dtype,
            _ => DType::F32,
        }
    }

    pub(super) fn missing(&self, part: &DiskMatrix) -> CheckpointError {
        CheckpointError::Missing {
            path: self.files.dir().display().to_string(),
            tensor: part.name.clone(),
            expected: format!("shape {:?}", part.dims),
        }
    }

    /// Checks every tensor of a block, of all ranks: a damaged checkpoint fails on all of them alike.
    pub(super) fn check_block(&self, layout: &BlockLayout<'_>, uniform: bool) -> Result<CheckedBlock> {
        let mut checked = CheckedBlock {
            natural: PerParam::default(),
            form: Form::Plain(DType::F32),
            quantized: false,
            names: HashSet::new(),
            disk: [0; 2],
        };
        for part in layout.replicated() {
            self.check_part(&part, uniform, &mut checked)?;
        }
        for e in 0..layout.config.router.num_experts {
            for part in layout.expert(e) {
                self.check_part(&part, uniform, &mut checked)?;
            }
        }
        for prefix in layout.prefixes() {
            for (name, entry) in self.files.with_prefix(&prefix) {
                if !checked.names.contains(name) {
                    return Err(CheckpointError::Unexpected {
                        path: self.files.path_of(entry),
                        tensor: name.to_string(),
                        found: format!("{} {:?}", entry.dtype, entry.shape),
                        family: self.model.model_type.clone(),
                    }
                    .into());
                }
            }
        }
        self.declared.check(&layout.prefixes()[0], checked.form)?;
        Ok(checked)
    }

    fn check_part(&self, part: &DiskMatrix, uniform: bool, checked: &mut CheckedBlock) -> Result<()> {
        // The slices of one tensor come as parts of its name.
        if part.slice > 0 && checked.names.contains(&part.name) {
            return Ok(());
        }
        let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(part))?;
        if stored.dims != part.dims {
            return Err(stored.mismatch(format!("shape {:?}", part.dims), format!("shape {:?}", stored.dims)).into());
        }
        if let Form::Plain(dtype) = stored.form
            && !dtype.is_float()
        {
            let found = stored.entry().dtype;
            return Err(stored.mismatch("a floating-point type or a quantized form", found).into());
        }
        let natural = self.natural(stored.form);
        let first = *checked.natural[part.kind].get_or_insert(natural);
        if uniform && first != natural {
            return Err(stored.mismatch(format!("{first}, as the tensors before it"), natural).into());
        }
        checked.quantized |= stored.form.is_quantized();
        let routed = !part.kind.is_replicated();
        if part.kind == ParamKind::Down {
            checked.form = stored.form;
        }
        checked.disk[usize::from(!routed)] += stored.bytes();
        checked.names.extend(stored.names().map(str::to_string));
        // Quantized tensors need not hold the name itself.
        checked.names.insert(part.name.clone());
        Ok(())
    }

    /// Loads a block; with a cut, this rank's shards only.
    pub(super) fn load(
        &self,
        layer: usize,
        (options, cut): (LoadOptions, Option<&BlockShards>),
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Block> {
        const CALL: &str = "Checkpoint::load_block";
        let config = self.block_config(layer)?;
        let experts = options.experts(CALL, config.router.num_experts)?;
        let layout = self.layout(layer, &config);
        let checked = self.check_block(&layout, options.dtype.is_none())?;
        let mut tensors: PerParam<Option<Tensor<Cpu>>> = PerParam::default();
        let mut cuts: PerParam<Option<ShardWindow>> = PerParam::default();
        let parts = layout.replicated().into_iter().chain(layout.expert(experts.start));
        let widths: PerParam<Option<usize>> = parts.map(|part| (part.kind, part.inn)).collect();
        for (kind, natural) in checked.natural.into_present() {
            let dtype = self.param_dtype(kind, natural, options.dtype);
            let dims = kind.dims(&config, experts.len()).unwrap_or_default();
            let shard = cut.map(|cut| cut.of(kind, &dims)).transpose()?.flatten();
            let tensor = match shard {
                None => Tensor::<Cpu>::empty(&Cpu::new(), dtype, &dims)?,
                Some(shard) => {
                    let local = if kind.is_replicated() { 1 } else { experts.len() };
                    let window = ShardWindow::new(shard, widths[kind].unwrap_or(1), local);
                    let tensor = window.memory(dtype)?;
                    cuts[kind] = Some(window);
                    tensor
                }
            };
            tensors[kind] = Some(tensor);
        }
        let total = tensors.present().map(|(_, t)| t.bytes() as u64).sum();
        let mut done = 0;
        let mut scratch = Scratch::default();
        let shared = layout.replicated().into_iter().map(|part| (0, part));
        let routed = experts.clone().flat_map(|e| layout.expert(e).into_iter().map(move |part| (e, part)));
        for (e, part) in shared.chain(routed) {
            let Some(tensor) = &mut tensors[part.kind] else { continue };
            let dtype = tensor.dtype();
            if let Some(window) = cuts.get(part.kind) {
                let first = if part.kind.is_replicated() { 0 } else { (e - experts.start) * window.rows_of_one };
                let find = || self.stored(&part.name)?.ok_or_else(|| self.missing(&part).into());
                let shard = ShardMemory { first, rows: window.rows.clone(), bytes: tensor.as_bytes_mut(), dtype };
                done += read_window(&find, &MatrixLayout::of(&part), shard, &mut scratch)? as u64;
                progress(Progress { layer, tensor: &part.name, done, total });
                continue;
            }
            let matrix = match part.kind.is_replicated() {
                false => {
                    let bytes = tensor.as_bytes_mut();
                    let one = bytes.len() / experts.len();
                    &mut bytes[(e - experts.start) * one..][..one]
                }
                true => tensor.as_bytes_mut(),
            };
            let stored = self.stored(&part.name)?.ok_or_else(|| self.missing(&part))?;
            read_matrix(&stored, &MatrixLayout::of(&part), matrix, dtype, &mut scratch)?;
            done += (part.out * part.inn * dtype.size()) as u64;
            progress(Progress { layer, tensor: &part.name, done, total });
        }
        for (kind, window) in cuts.present() {
            if let Some(tensor) = &mut tensors[kind] {
                window.trim(tensor)?;
            }
        }
        Ok(Block { params: BlockParams::of(CALL, tensors)?, config })
    }

    /// Any tensor, or the error that there is none of this name.
    pub(super) fn find_tensor(&self, name: &str) -> Result<Stored<'_>> {
        self.stored(name)?.ok_or_else(|| {
            let (path, tensor) = (self.files.dir().display().to_string(), name.to_string());
            CheckpointError::Missing { path, tensor, expected: "one of this name".to_string() }.into()
        })
    }

    /// A rank's shard of the lines of any tensor.
    pub(super) fn load_tensor_shard(&self, name: &str, dtype: Option<DType>, cut: ShardOptions) -> Result<Tensor<Cpu>> {
        let find = || self.find_tensor(name);
        let stored = find()?;
        let natural = self.natural(stored.form);
        let dtype = dtype.unwrap_or(natural);
        if !dtype.is_float() || !natural.is_float() {
            return Err(stored.mismatch(format!("{dtype}, or another floating type"), natural).into());
        }
        let lines = cut.shards(&Shards::lines(&stored.dims))?;
        let (rows, inn) = match stored.dims.as_slice() {
            [rows] => (*rows, 1),
            [rows, columns] => (*rows, *columns),
            // Several matrices behind one another, which may be quantized each by itself.
            _ => {
                let whole = self.load_tensor(name, Some(dtype))?.reshape(lines.dims())?;
                return lines.cut(&Cpu::new(), whole.view(), cut.rank);
            }
        };
        let window = ShardWindow::new((lines, cut.rank), inn, 1);
        let mut tensor = window.memory(dtype)?;
        let matrix = MatrixLayout { slice: 0, out: rows, inn, transposed: false, rows: DiskRows::From(0) };
        let shard = ShardMemory { first: 0, rows: window.rows.clone(), bytes: tensor.as_bytes_mut(), dtype };
        read_window(&find, &matrix, shard, &mut Scratch::default())?;
        window.trim(&mut tensor)?;
        Ok(tensor)
    }

    /// The type a parameter gets: what decides routing keeps its precision.
    pub(super) fn param_dtype(&self, kind: ParamKind, natural: DType, wanted: Option<DType>) -> DType {
        match (kind, wanted) {
            (_, None) => natural,
            (ParamKind::SelectionBias, Some(dtype)) => dtype.accumulator(),
            (ParamKind::Router | ParamKind::RouterBias, Some(dtype)) if self.model.family.router_f32 => {
                dtype.accumulator()
            }
            (_, Some(dtype)) => dtype,
        }
    }

    pub(super) fn load_tensor(&self, name: &str, dtype: Option<DType>) -> Result<Tensor<Cpu>> {
        let stored = self.find_tensor(name)?;
        let natural = self.natural(stored.form);
        let dtype = dtype.unwrap_or(natural);
        if let Form::Plain(found) = stored.form
            && found == dtype
        {
            let mut tensor = Tensor::empty(&Cpu::new(), dtype, &stored.dims)?;
            stored.read_plain(0, tensor.as_bytes_mut())?;
            return Ok(tensor);
        }
        if !dtype.is_float() || !natural.is_float() {
            return Err(stored.mismatch(dtype, natural).into());
        }
        let mut tensor = Tensor::empty(&Cpu::new(), dtype, &stored.dims)?;
        let (matrix, inn) = match stored.dims.as_slice() {
            [.., rows, columns] => (rows * columns, *columns),
            [rows] => (*rows, 1),
            [] => (1, 1),
        };
        let mut scratch = Scratch::default();
        if matrix == 0 {
            return Ok(tensor);
        }
        for (slice, bytes) in tensor.as_bytes_mut().chunks_exact_mut(matrix * dtype.size()).enumerate() {
            let part = MatrixLayout { slice, out: matrix / inn, inn, transposed: false, rows: DiskRows::From(0) };
            read_matrix(&stored, &part, bytes, dtype, &mut scratch)?;
        }
        Ok(tensor)
    }
}
