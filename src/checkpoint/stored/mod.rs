//! How one tensor is stored: plain, or quantized with scales beside it. Finds what belongs to it and checks shapes and
//! types against each other; its elements are read in a file of their own.

mod blocks;
mod read;

use safetensors::Dtype;

use super::reader::{Files, TensorEntry};
use crate::dtype::DType;
use crate::error::{CheckpointError, CheckpointResult};
use crate::quant::{FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK, WeightFormat};

pub(super) use blocks::Fp8Blocks;
pub(super) use read::{Chunk, Scratch};

/// Types of floating-point scales.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
/// Types of scales that are powers of two.
const E8M0: [Dtype; 2] = [Dtype::U8, Dtype::F8_E8M0];

/// Form of a tensor on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Form {
    /// Not quantized.
    Plain(DType),
    /// E4M3 with a scale a block, ragged at the edges: of `weight_block_size` (DeepSeek-V3), or of `block_structure`
    /// (compressed-tensors).
    Fp8Block,
    /// E4M3 with one scale a tensor or a row (ModelOpt, compressed-tensors).
    Fp8Scaled,
    /// E2M1 in blocks of 32 with an E8M0 scale each (gpt-oss).
    Mxfp4,
    /// The same, a row an output in one tensor of bytes (compressed-tensors).
    Mxfp4CompressedTensors,
    /// E2M1 in blocks of 16 with an E4M3 scale each, and a factor (ModelOpt).
    Nvfp4ModelOpt,
    /// E2M1 in blocks of 16 with an E4M3 scale each, and a divisor (compressed-tensors).
    Nvfp4CompressedTensors,
}

impl Form {
    /// True for every form but [`Form::Plain`].
    pub fn is_quantized(self) -> bool {
        !matches!(self, Form::Plain(_))
    }
}

/// A tensor and what belongs to it.
#[derive(Debug)]
pub(super) struct Stored<'a> {
    files: &'a Files,
    pub form: Form,
    /// Name and place of the elements.
    data: (String, &'a TensorEntry),
    /// Name and place of the scales.
    scales: Option<(String, &'a TensorEntry)>,
    /// Name and place of the second-level scale.
    global: Option<(String, &'a TensorEntry)>,
    /// Names that are there besides and have no part in the weight's value.
    unused: Vec<String>,
    /// Shape, before quantization.
    pub dims: Vec<usize>,
    /// The rows that can be read are those of the transpose of the last two dimensions.
    pub flipped: bool,
    /// Codes are packed along the last dimension but one.
    packed_rows: bool,
    /// Elements along each of the last two dimensions that share a scale.
    block: [usize; 2],
}

/// Type of plain floating tensors and of the integers a tensor may have.
pub(super) fn plain(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}

/// Type on disk of a tensor of the crate's.
pub(super) fn on_disk(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
    }
}

/// `X.weight` to `X.{name}`, `X` to `X_{name}`.
pub(super) fn sibling(name: &str, suffix: &str) -> String {
    match name.strip_suffix(".weight") {
        Some(base) => format!("{base}.{suffix}"),
        None => format!("{name}_{suffix}"),
    }
}

impl<'a> Stored<'a> {
    /// Finds a tensor in whatever form it is there; `None` if there is none of this name.
    pub fn find(files: &'a Files, name: &str, blocks: &Fp8Blocks) -> CheckpointResult<Option<Self>> {
        let get = |name: String| files.get(&name).map(|entry| (name, entry));
        let packed = get(sibling(name, "weight_packed")).or_else(|| get(sibling(name, "packed")));
        let mut stored = match (get(name.to_string()), packed, get(format!("{name}_blocks"))) {
            (Some(data), ..) => Self::of_weight(files, name, data)?,
            (None, Some(data), _) => {
                let mut stored = Self::plain_of(files, data);
                if stored.data.1.dtype == Dtype::I32 {
                    let expected = "U8, two FP4 codes a byte (the INT4 weights of pack-quantized are not read)";
                    return Err(stored.wrong(&stored.data, expected));
                }
                stored.scales = get(sibling(name, "weight_scale"));
                stored.form = match &stored.scales {
                    Some((_, scales)) if E8M0.contains(&scales.dtype) => Form::Mxfp4CompressedTensors,
                    _ => Form::Nvfp4CompressedTensors,
                };
                stored.global = get(sibling(name, "weight_global_scale"));
                stored.unused = vec![sibling(name, "input_global_scale")];
                stored
            }
            (None, None, Some(data)) => {
                let mut stored = Self::plain_of(files, data);
                stored.form = Form::Mxfp4;
                stored.scales = get(format!("{name}_scales"));
                stored
            }
            (None, None, None) => return Ok(None),
        };
        stored.unused.retain(|name| files.get(name).is_some());
        stored.check(name, blocks)?;
        Ok(Some(stored))
    }

    fn plain_of(files: &'a Files, data: (String, &'a TensorEntry)) -> Self {
        let dims = data.1.shape.clone();
        let form = Form::Plain(plain(data.1.dtype).unwrap_or(DType::U8));
        Self {
            files,
            form,
            data,
            scales: None,
            global: None,
            unused: Vec::new(),
            dims,
            flipped: false,
            packed_rows: false,
            block: [1, 1],
        }
    }

    fn of_weight(files: &'a Files, name: &str, data: (String, &'a TensorEntry)) -> CheckpointResult<Self> {
        let get = |name: String| files.get(&name).map(|entry| (name, entry));
        let mut stored = Self::plain_of(files, data);
        stored.unused = vec![sibling(name, "input_scale"), sibling(name, "input_scale_inv")];
        let scale = || get(sibling(name, "weight_scale")).or_else(|| get(format!("{name}_scale")));
        match stored.data.1.dtype {
            Dtype::F8_E4M3 => {
                if let Some(scales) = get(format!("{name}_scale_inv")) {
                    (stored.form, stored.scales) = (Form::Fp8Block, Some(scales));
                } else if let Some(scales) = scale() {
                    // Or blocks, where their shape says so.
                    (stored.form, stored.scales) = (Form::Fp8Scaled, Some(scales));
                } else {
                    return Err(CheckpointError::Missing {
                        path: files.path_of(stored.data.1),
                        tensor: format!("{name}_scale_inv"),
                        expected: format!("the scales of {name}, which is F8_E4M3, here or in its weight_scale"),
                    });
                }
            }
            Dtype::U8 => {
                let second = sibling(name, "weight_scale_2");
                if let Some(global) = get(second).or_else(|| get(format!("{name}_scale_2"))) {
                    stored.form = Form::Nvfp4ModelOpt;
                    stored.scales = scale();
                    stored.global = Some(global);
                } else if scale().is_some() {
                    return Err(CheckpointError::Missing {
                        path: files.path_of(stored.data.1),
                        tensor: sibling(name, "weight_scale_2"),
                        expected: format!(
                            "the second-level scale of {name}, which is U8 and has scales (NVFP4; MXFP4 of this name is not read)"
                        ),
                    });
                }
            }
            other if plain(other).is_none() => {
                return Err(stored.wrong(&stored.data, "F32, F16, BF16, F64, I64, I32, U8 or a quantized form"));
            }
            _ => {}
        }
        Ok(stored)
    }

    fn wrong(&self, tensor: &(String, &TensorEntry), expected: impl ToString) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.files.path_of(tensor.1),
            tensor: tensor.0.clone(),
            expected: expected.to_string(),
            found: format!("{} {:?}", tensor.1.dtype, tensor.1.shape),
        }
    }

    /// Checks codes, scales and their shapes against each other, and settles `dims`.
    fn check(&mut self, name: &str, blocks: &Fp8Blocks) -> CheckpointResult<()> {
        let missing = |tensor: String| CheckpointError::Missing {
            path: self.files.path_of(self.data.1),
            tensor,
            expected: format!("the scales of {name}"),
        };
        if let Form::Plain(_) = self.form {
            return Ok(());
        }
        let scales = self.scales.clone().ok_or_else(|| match self.form {
            Form::Mxfp4 => missing(format!("{name}_scales")),
            _ => missing(sibling(name, "weight_scale")),
        })?;
        let codes = &self.data.1.shape;
        if codes.len() < 2 || codes.len() > 4 {
            return Err(self.wrong(&self.data, "2 to 4 dimensions"));
        }
        let last = codes.len() - 1;
        match self.form {
            Form::Plain(_) => {}
            Form::Fp8Block => {
                self.expect(&scales, &[FLOATS.as_slice(), &E8M0].concat())?;
                self.block =
                    blocks.of_grid(codes, &scales.1.shape).map_err(|expected| self.wrong(&scales, expected))?;
            }
            Form::Fp8Scaled => {
                self.expect(&scales, &FLOATS)?;
                (self.form, self.block) = self.scaled_form(&scales, blocks)?;
            }
            Form::Mxfp4 => {
                self.expect(&self.data, &[Dtype::U8])?;
                self.expect(&scales, &E8M0)?;
                if codes.len() < 3 || codes[last] != MXFP4_BLOCK / 2 {
                    return Err(self.wrong(&self.data, "U8 [.., rows, blocks, 16]"));
                }
                self.expect_shape(&scales, &codes[..last])?;
                let columns = self.columns(codes[last - 1], MXFP4_BLOCK)?;
                // Rows are outputs; the unquantized tensor of the same name is (in, out).
                let rows = codes[last - 2];
                let mut dims = codes[..last - 2].to_vec();
                dims.extend([columns, rows]);
                (self.dims, self.flipped, self.block) = (dims, true, [1, MXFP4_BLOCK]);
            }
            Form::Mxfp4CompressedTensors => {
                self.expect(&self.data, &[Dtype::U8])?;
                if let Some(global) = &self.global {
                    return Err(self.wrong(global, "nothing: with this NVFP4's block scales are F8_E4M3, not U8"));
                }
                if !codes[last].is_multiple_of(MXFP4_BLOCK / 2) {
                    return Err(self.wrong(&self.data, "a multiple of 16 bytes in the last dimension"));
                }
                let mut expected = codes.clone();
                expected[last] /= MXFP4_BLOCK / 2;
                self.expect_shape(&scales, &expected)?;
                self.dims[last] = self.columns(codes[last], 2)?;
                self.block = [1, MXFP4_BLOCK];
            }
            Form::Nvfp4ModelOpt | Form::Nvfp4CompressedTensors => {
                self.expect(&self.data, &[Dtype::U8])?;
                if self.form == Form::Nvfp4CompressedTensors && scales.1.dtype != Dtype::F8_E4M3 {
                    return Err(self.wrong(&scales, "F8_E4M3 (NVFP4), or U8 or F8_E8M0 (MXFP4)"));
                }
                self.expect(&scales, &[Dtype::F8_E4M3])?;
                let global = self.global.clone().ok_or_else(|| missing(sibling(name, "weight_global_scale")))?;
                self.expect(&global, &[Dtype::F32])?;
                if global.1.shape.iter().product::<usize>() != 1 {
                    return Err(self.wrong(&global, "F32 [] or [1]"));
                }
                let along = |axis: usize| {
                    let mut shape = codes.clone();
                    shape[axis] /= NVFP4_BLOCK / 2;
                    (codes[axis].is_multiple_of(NVFP4_BLOCK / 2) && scales.1.shape == shape).then_some(axis)
                };
                // ModelOpt packs the (in, out) experts of Llama-4 along in.
                let Some(axis) = along(last).or_else(|| along(last - 1)) else {
                    return Err(self.wrong(&scales, format!("one scale for 8 of the bytes {codes:?}")));
                };
                self.dims[axis] = self.columns(codes[axis], 2)?;
                self.packed_rows = axis != last;
                self.block = if self.packed_rows { [NVFP4_BLOCK, 1] } else { [1, NVFP4_BLOCK] };
            }
        }
        Ok(())
    }

    /// Form and block of codes in E4M3, by the shape of their scales. A shape that several forms have means the same in
    /// each.
    fn scaled_form(&self, scales: &(String, &TensorEntry), blocks: &Fp8Blocks) -> CheckpointResult<(Form, [usize; 2])> {
        let (codes, found) = (self.data.1.shape.as_slice(), scales.1.shape.as_slice());
        let last = codes.len() - 1;
        let mut per_row = codes.to_vec();
        per_row[last] = 1;
        let one = found.iter().product::<usize>() == 1;
        let whole = (Form::Fp8Scaled, [usize::MAX; 2]);
        // One scale is a grid where the files speak of blocks: experts of whatever size then have one form.
        if one && !blocks.are_named() {
            return Ok(whole);
        }
        match blocks.of_grid(codes, found) {
            Ok(block) => Ok((Form::Fp8Block, block)),
            Err(_) if one => Ok(whole),
            Err(_) if found == per_row || (codes.len() == 2 && found == [codes[0]]) => {
                Ok((Form::Fp8Scaled, [1, codes[last].max(1)]))
            }
            Err(grid) => Err(self.wrong(scales, format!("one scale, one a row (shape {per_row:?}) or {grid}"))),
        }
    }

    fn columns(&self, count: usize, each: usize) -> CheckpointResult<usize> {
        count.checked_mul(each).ok_or_else(|| self.wrong(&self.data, "an element count that fits the address space"))
    }

    fn expect(&self, tensor: &(String, &TensorEntry), allowed: &[Dtype]) -> CheckpointResult<()> {
        match allowed.contains(&tensor.1.dtype) {
            true => Ok(()),
            false => Err(self.wrong(tensor, allowed.iter().map(Dtype::to_string).collect::<Vec<_>>().join(" or "))),
        }
    }

    fn expect_shape(&self, tensor: &(String, &TensorEntry), shape: &[usize]) -> CheckpointResult<()> {
        match tensor.1.shape == shape {
            true => Ok(()),
            false => Err(self.wrong(tensor, format!("shape {shape:?}"))),
        }
    }

    /// Names of everything that makes up the tensor.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let sides = [Some(&self.data), self.scales.as_ref(), self.global.as_ref()];
        sides.into_iter().flatten().map(|side| side.0.as_str()).chain(self.unused.iter().map(String::as_str))
    }

    /// The tensor's own entry.
    pub fn entry(&self) -> &'a TensorEntry {
        self.data.1
    }

    /// Bytes on disk, scales included.
    pub fn bytes(&self) -> u64 {
        self.data.1.bytes
            + self.scales.as_ref().map_or(0, |s| s.1.bytes)
            + self.global.as_ref().map_or(0, |s| s.1.bytes)
    }

    /// [`CheckpointError::Tensor`] about this tensor.
    pub fn mismatch(&self, expected: impl ToString, found: impl ToString) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.files.path_of(self.data.1),
            tensor: self.data.0.clone(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// How a product can read the matrix as it is stored, rows being outputs; `None` where none can.
    pub fn weight_format(&self) -> Option<WeightFormat> {
        match self.form {
            Form::Nvfp4ModelOpt | Form::Nvfp4CompressedTensors if !self.packed_rows => Some(WeightFormat::Nvfp4),
            Form::Mxfp4 | Form::Mxfp4CompressedTensors => Some(WeightFormat::Mxfp4),
            Form::Fp8Block if self.block == [FP8_BLOCK, FP8_BLOCK] => Some(WeightFormat::Fp8Block),
            _ => None,
        }
    }
}
