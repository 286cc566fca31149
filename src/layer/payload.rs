//! Tokens that travel quantized: packed before they leave, brought back where they arrive.
//!
//! Each row is quantized by itself, so what it becomes depends on no other row and on no rank, and nothing has to be
//! agreed on before. Codes are the rows of a dispatch, opaque; beside each travel its block scales, in NVFP4 with the
//! row's amax behind them.

use tracing::trace_span;

use crate::config::{Fingerprint, MoeConfig, Payload};
use crate::dtype::DType;
use crate::ep::{DispatchInputs, DispatchOutputs, Received};
use crate::error::{Error, Result};
use crate::kernels::{ConcatRows, Kernels, SplitRows};
use crate::quant::{
    Dequantize, DequantizeFp8Block, DequantizeMxfp8, Direction, Fp8BlockMut, Matrix, Mxfp8, Mxfp8Mut, Nvfp4, Nvfp4Mut,
    Quantize, QuantizeFp8Block, QuantizeMxfp8, fp8_block_scale_dims,
};
use crate::tensor::{Tensor, TensorMut, TensorRef};

const NVFP4: Nvfp4 = Nvfp4::TE.row_scaled();
const MXFP8: Mxfp8 = Mxfp8::TE;
const ROWS: Direction = Direction::Rows;

/// Refuses tokens that the payload has no form for.
pub(super) fn check(call: &'static str, payload: Payload, dtype: DType) -> Result<()> {
    match payload.takes(dtype) {
        true => Ok(()),
        false => Err(Error::invalid(call, "tensor x", format!("f32, bf16 or f16 (payload {payload:?})"), dtype)),
    }
}

/// Rows that return, where others leave.
pub(super) fn returns(config: &MoeConfig, dtype: DType) -> Option<(DType, usize)> {
    (config.payload != Payload::Plain).then_some((dtype, config.hidden))
}

/// Fingerprint on which ranks must agree: codes do not show of which type they were made, and its rows come back.
pub(super) fn formula(fingerprint: Fingerprint, payload: Payload, dtype: DType) -> Fingerprint {
    match payload {
        Payload::Plain => fingerprint,
        Payload::Nvfp4 | Payload::Mxfp8 | Payload::Fp8Block => fingerprint.with_tokens(dtype),
    }
}

/// A rank's tokens as they travel.
#[derive(Debug)]
pub(super) struct EncodedTokens<D: Kernels> {
    payload: Payload,
    hidden: usize,
    dtype: DType,
    /// `U8 [T, bytes]`.
    codes: Tensor<D>,
    /// `U8 [T, bytes]`.
    scales: Tensor<D>,
}

impl<D: Kernels> EncodedTokens<D> {
    /// None of tokens that travel as they are.
    pub fn new(config: &MoeConfig, device: &D, x: TensorRef<'_, D>) -> Result<Option<Self>> {
        let (payload, hidden, dtype, tokens) = (config.payload, config.hidden, x.dtype(), x.rows());
        let Some([code_bytes, scale_bytes]) = payload.row_bytes(hidden) else { return Ok(None) };
        let _span = trace_span!("pack").entered();
        let bytes = |width| Tensor::empty(device, DType::U8, &[tokens, width]);
        let matrix = Matrix::new(x.borrow())?;
        let (mut codes, mut blocks) = (bytes(code_bytes)?, bytes(block_scales(payload, hidden)?)?);
        let amax = match payload {
            Payload::Plain => None,
            Payload::Nvfp4 => {
                let mut amax = Tensor::empty(device, DType::F32, &[tokens])?;
                let rows = Nvfp4Mut { codes: codes.view_mut(), scales: blocks.view_mut(), amax: amax.view_mut() };
                device.quantize(Quantize { format: &NVFP4, matrix, rows: Some(rows), columns: None })?;
                Some(amax)
            }
            Payload::Mxfp8 => {
                let rows = Mxfp8Mut { codes: codes.view_mut(), scales: blocks.view_mut() };
                device.quantize_mxfp8(QuantizeMxfp8 { format: MXFP8, matrix, rows: Some(rows), columns: None })?;
                None
            }
            Payload::Fp8Block => {
                let rows = Fp8BlockMut { codes: codes.view_mut(), scales: blocks.view_mut() };
                device.quantize_fp8_block(QuantizeFp8Block { matrix, rows })?;
                None
            }
        };
        let scales = match blocks.dims()[1] == scale_bytes {
            true => blocks,
            false => {
                let mut scales = bytes(scale_bytes)?;
                let right = amax.as_ref().map(|t| as_bytes(t.view())).transpose()?;
                device.concat_rows(ConcatRows { left: blocks.view(), right, out: scales.view_mut() })?;
                scales
            }
        };
        Ok(Some(Self { payload, hidden, dtype, codes, scales }))
    }

    /// Inputs of dispatch.
    pub fn inputs<'a>(&'a self, weights: TensorRef<'a, D>) -> DispatchInputs<'a, D> {
        DispatchInputs { tokens: self.codes.view(), weights: Some(weights), scales: Some(self.scales.view()) }
    }

    /// Rows as the experts read them, of what arrived, where it arrived; of these tokens where they stayed.
    pub fn unpack(self, device: &D, received: Received<D>) -> Result<Received<D>> {
        let Received { rows, weights, scales, map } = received;
        let codes = rows.as_ref().unwrap_or(&self.codes);
        let scales = scales.as_ref().unwrap_or(&self.scales);
        let mut out = Tensor::empty(device, self.dtype, &[codes.view().rows(), self.hidden])?;
        self.decode(device, codes, scales, out.view_mut())?;
        Ok(Received { rows: Some(out), weights, scales: None, map })
    }

    /// Memory for codes in slots.
    pub fn in_slots(&self, device: &D, slots: usize) -> Result<EncodedSlots<D>> {
        let like = |t: &Tensor<D>| Tensor::empty(device, DType::U8, &[slots, t.dims()[1]]);
        Ok(EncodedSlots { codes: like(&self.codes)?, scales: like(&self.scales)? })
    }

    /// Rows in slots, `[N, H]`, as the experts read them.
    pub fn unpack_slots(&self, device: &D, slots: &EncodedSlots<D>, out: TensorMut<'_, D>) -> Result<()> {
        self.decode(device, &slots.codes, &slots.scales, out)
    }

    /// Values that codes of this form stand for.
    fn decode(&self, device: &D, codes: &Tensor<D>, scales: &Tensor<D>, mut out: TensorMut<'_, D>) -> Result<()> {
        let _span = trace_span!("unpack").entered();
        let [blocks, amax] = self.split_scales(device, scales.view())?;
        let (codes, scales) = (codes.view(), blocks.as_ref().unwrap_or(scales).view());
        let out = out.reborrow();
        match (self.payload, &amax) {
            (Payload::Nvfp4, Some(amax)) => {
                device.dequantize(Dequantize { format: &NVFP4, codes, scales, amax: amax.view(), out })
            }
            (Payload::Mxfp8, _) => device.dequantize_mxfp8(DequantizeMxfp8 { direction: ROWS, codes, scales, out }),
            (Payload::Fp8Block, _) => device.dequantize_fp8_block(DequantizeFp8Block { codes, scales, out }),
            (Payload::Nvfp4, None) | (Payload::Plain, _) => {
                let found = format!("{:?}", self.payload);
                Err(Error::invalid("unpack", "payload", "NVFP4 with amaxes, MXFP8 or fp8 blocks", found))
            }
        }
    }

    /// Block scales and amaxes that rows of `scales` hold: no block scales where there is nothing beside them.
    fn split_scales(&self, device: &D, scales: TensorRef<'_, D>) -> Result<[Option<Tensor<D>>; 2]> {
        let (n, width) = (scales.rows(), block_scales(self.payload, self.hidden)?);
        let mut amax = match self.payload {
            Payload::Nvfp4 => Some(Tensor::empty(device, DType::F32, &[n])?),
            Payload::Plain | Payload::Mxfp8 | Payload::Fp8Block => None,
        };
        if amax.is_none() && scales.dims()[1] == width {
            return Ok([None, None]);
        }
        let mut blocks = Tensor::empty(device, DType::U8, &[n, width])?;
        let right = amax.as_mut().map(|t| as_bytes_mut(t.view_mut())).transpose()?;
        device.split_rows(SplitRows { source: scales.borrow(), left: blocks.view_mut(), right })?;
        Ok([Some(blocks), amax])
    }
}

/// Codes that dispatch brings into slots.
#[derive(Debug)]
pub(super) struct EncodedSlots<D: Kernels> {
    /// `U8 [N, bytes]`.
    codes: Tensor<D>,
    /// `U8 [N, bytes]`.
    scales: Tensor<D>,
}

impl<D: Kernels> EncodedSlots<D> {
    /// Outputs of dispatch.
    pub fn outputs<'a>(&'a mut self, weights: TensorMut<'a, D>) -> DispatchOutputs<'a, D> {
        let (tokens, scales) = (self.codes.view_mut(), Some(self.scales.view_mut()));
        DispatchOutputs { tokens, weights: Some(weights), scales }
    }
}

/// Bytes of a row's block scales.
fn block_scales(payload: Payload, hidden: usize) -> Result<usize> {
    match payload {
        Payload::Nvfp4 => Ok(NVFP4.sizes([1, hidden], ROWS)?.scales[1]),
        Payload::Plain => Ok(0),
        Payload::Mxfp8 => Ok(Mxfp8::scale_dims([1, hidden], ROWS)[1]),
        Payload::Fp8Block => Ok(fp8_block_scale_dims([1, hidden])[1]),
    }
}

/// Numbers as rows of bytes.
fn as_bytes<D: Kernels>(t: TensorRef<'_, D>) -> Result<TensorRef<'_, D>> {
    TensorRef::new(t.data(), DType::U8, &[t.rows(), t.row_bytes()])
}

fn as_bytes_mut<D: Kernels>(t: TensorMut<'_, D>) -> Result<TensorMut<'_, D>> {
    let dims = [t.rows(), t.row_bytes()];
    TensorMut::new(t.into_data(), DType::U8, &dims)
}
