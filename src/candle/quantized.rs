//! Modules whose routed experts stay quantized: loaded as they are stored, or quantized where they lie.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};

use crate::adapter::{ErasedQuantizedExperts, QuantizedExperts, match_device};
use crate::checkpoint::QuantizedBlock;
use crate::cpu::Cpu;
use crate::error::Error;
use crate::layer::{ParamKind, PerParam};
use crate::quant::{
    Amax, Layout, Matrix, NVFP4_BLOCK, Nvfp4, Nvfp4Mut, Quantize, Quantized, QuantizedTensors, WeightFormat,
};
use crate::tensor::TensorMut;

use super::device::{CandleDevice, copy_of, into_candle, with_views};
use super::error::framework;
use super::group::DeviceGroup;
use super::module::ExpertParallelMoE;
use super::options::{Parameters, tensor};

const NVFP4: &Nvfp4 = &Nvfp4::MODELOPT;

impl ExpertParallelMoE {
    /// From a loaded block whose routed experts are quantized; `number` as in [`from_block`](Self::from_block). The
    /// experts, their biases included, are frozen: gradients flow through them to the tokens, the router and a shared
    /// expert, which are variables where `params` says so.
    ///
    /// # Errors
    /// As [`from_block`](Self::from_block); a device's, where there is no memory.
    pub fn from_quantized(
        block: QuantizedBlock<Cpu>,
        number: impl Into<Option<u32>>,
        group: impl Into<DeviceGroup>,
        params: Parameters,
    ) -> Result<Self> {
        Self::of_quantized("ExpertParallelMoE::from_quantized", block, number.into(), group.into(), params)
    }

    pub(super) fn of_quantized(
        call: &'static str,
        block: QuantizedBlock<Cpu>,
        number: Option<u32>,
        group: DeviceGroup,
        params: Parameters,
    ) -> Result<Self> {
        let layer = group.erased().layer(call, (&block.config).into(), number)?;
        let (experts, params) = unpack(call, block, &group, params)?;
        let quantized = Some(ErasedQuantizedExperts::on_device_of(group.erased(), experts)?);
        Ok(Self { quantized, ..Self::of(layer, group, params) })
    }

    /// The same module with its routed experts in NVFP4 (ModelOpt's recipe, an amax an expert and weight), quantized on
    /// their device. They are frozen then, their biases included; see [`from_quantized`](Self::from_quantized). Weights
    /// in bf16 take 3.6 times the memory.
    ///
    /// # Errors
    /// Experts that are quantized already, or shards; f64 weights; rows of no multiple of 16 entries; weights that are
    /// not finite.
    pub fn to_nvfp4(&self) -> Result<Self> {
        let quantized = match_device!(self.group.erased(), group => self.nvfp4_on(group.lock().device()))?;
        let detached = |kind: ParamKind, t: &Option<Tensor>| match kind {
            ParamKind::Up | ParamKind::Down => None,
            ParamKind::UpBias | ParamKind::DownBias => t.as_ref().map(Tensor::detach),
            _ => t.clone(),
        };
        let params = PerParam::from_fn(|kind| detached(kind, &self.params[kind]));
        Ok(Self { params, quantized: Some(quantized), ..self.clone() })
    }

    fn nvfp4_on<D: CandleDevice>(&self, device: &D) -> Result<ErasedQuantizedExperts> {
        let stack = |kind: ParamKind| match (self.param(kind), &self.sharded) {
            (Some(t), None) => Ok(nvfp4(device, kind.name(), t)?),
            _ => Err(Error::invalid(CALL, kind.name(), "a whole weight of floating type", "another")),
        };
        let experts = QuantizedExperts { up: stack(ParamKind::Up)?, down: stack(ParamKind::Down)? };
        Ok(D::erase(Arc::new(experts)))
    }

    /// Bytes of the routed experts' weights that are quantized, and their format; `None` where they are not.
    pub fn quantized(&self) -> Option<(WeightFormat, usize)> {
        self.quantized.as_ref().map(|experts| (experts.format(), experts.bytes()))
    }
}

const CALL: &str = "ExpertParallelMoE::to_nvfp4";

/// The experts of a block that are quantized, on the host, and its other parameters as candle's: variables where
/// `params` says so, but for the experts' biases, which are frozen with them.
pub(super) fn unpack(
    call: &'static str,
    block: QuantizedBlock<Cpu>,
    group: &DeviceGroup,
    params: Parameters,
) -> Result<(QuantizedExperts<Cpu>, PerParam<Option<Tensor>>)> {
    let (config, local) = (block.config.clone(), group.local_experts());
    let (up, down, mut others) = block.into_parts();
    let params = PerParam::try_from_fn(|kind| -> Result<Option<Tensor>> {
        let Some(expected) = kind.dims(&config, local) else { return Ok(None) };
        let check = |found: &[usize]| Error::check_shape(call, kind.name(), &expected, found);
        let params = match kind {
            ParamKind::Up => return Ok(check(up.dims()).map(|()| None)?),
            ParamKind::Down => return Ok(check(down.dims()).map(|()| None)?),
            ParamKind::UpBias | ParamKind::DownBias => Parameters::Frozen,
            _ => params,
        };
        let missing = || Error::invalid(call, format!("tensor {}", kind.name()), "a tensor", "none");
        let t = others[kind].take().ok_or_else(missing)?;
        check(t.dims())?;
        tensor(t, group.device(), params).map(Some)
    })?;
    Ok((QuantizedExperts { up, down }, params))
}

/// A stack `[L, out, in]` in NVFP4, with an amax a matrix.
fn nvfp4<D: CandleDevice>(device: &D, name: &str, weight: &Tensor) -> crate::Result<Quantized<D>> {
    let candle = framework(CALL);
    let (stack, rows, columns) = weight.dims3().map_err(&candle)?;
    let dims = [stack, rows, columns];
    if !columns.is_multiple_of(NVFP4_BLOCK) {
        return Err(Error::invalid(CALL, name, "rows of a multiple of 16 entries", format!("{dims:?}")));
    }
    let weight = weight.detach().contiguous().map_err(&candle)?;
    with_views(device, CALL, &[(name, &weight)], |views| {
        let matrix = |e: usize| {
            let layout = Layout { offset: e * rows * columns, dims: [rows, columns], strides: [columns, 1] };
            Matrix::strided(views[0].borrow(), layout)
        };
        let mut amaxes = crate::Tensor::zeros(device, crate::DType::F32, &[stack])?;
        for e in 0..stack {
            let (matrix, rows) = (matrix(e)?, Some(entry(amaxes.view_mut(), e)?));
            device.compute_amax(Amax { format: NVFP4, matrix: matrix.borrow(), rows, columns: None })?;
        }
        let (mut amaxes, factors) = second_level(device, name, (amaxes, weight.device()))?;
        let format = WeightFormat::Nvfp4;
        let (dtype, scale_dims) = format.scales(dims, 1);
        let mut codes = crate::Tensor::empty(device, crate::DType::U8, &format.code_dims(dims))?;
        let mut scales = crate::Tensor::empty(device, dtype, &scale_dims)?;
        for e in 0..stack {
            let (codes, scales) = (slice(codes.view_mut(), e)?, slice(scales.view_mut(), e)?);
            let rows = Some(Nvfp4Mut { codes, scales, amax: entry(amaxes.view_mut(), e)? });
            let matrix = matrix(e)?;
            device.quantize_cast_only(Quantize { format: NVFP4, matrix: matrix.borrow(), rows, columns: None })?;
        }
        Quantized::new(QuantizedTensors { format, dims, parts: 1, codes, scales, factors: Some(factors) })
    })
}

/// Amaxes as the cast takes them, and the factors `[L, 1]` that belong to them. Reads the amaxes to the host.
fn second_level<D: CandleDevice>(
    device: &D,
    name: &str,
    (amaxes, on): (crate::Tensor<D>, &Device),
) -> crate::Result<(crate::Tensor<D>, crate::Tensor<D>)> {
    let candle = framework(CALL);
    let stack = amaxes.dims()[0];
    let values = into_candle(amaxes, &[stack], on)?.to_vec1::<f32>().map_err(candle)?;
    if let Some(e) = values.iter().position(|amax| !amax.is_finite()) {
        return Err(Error::invalid(CALL, name, "finite weights", format!("NaN or infinity in expert {e}")));
    }
    // Of zeros alone the formulas make NaN; under any other amax they stay zeros.
    let amaxes: Vec<f32> = values.into_iter().map(|amax| if amax > 0.0 { amax } else { 1.0 }).collect();
    let factors: Vec<f32> = amaxes.iter().map(|amax| Nvfp4::second_scale(*amax)).collect();
    let put = |values: Vec<f32>, dims: &[usize]| {
        let t = Tensor::from_vec(values, dims, on).and_then(|t| t.to_dtype(DType::F32)).map_err(framework(CALL))?;
        with_views(device, CALL, &[(name, &t)], |views| copy_of(device, views[0]))
    };
    Ok((put(amaxes, &[stack])?, put(factors, &[stack, 1])?))
}

/// One number of `F32 [L]`, as `[1]`.
fn entry<D: CandleDevice>(of: TensorMut<'_, D>, index: usize) -> crate::Result<TensorMut<'_, D>> {
    TensorMut::new(D::slice_mut(of.into_data(), index * 4..index * 4 + 4), crate::DType::F32, &[1])
}

/// Matrix `index` of a stack of bytes `[L, rows, bytes]`.
fn slice<D: CandleDevice>(of: TensorMut<'_, D>, index: usize) -> crate::Result<TensorMut<'_, D>> {
    let dims = [of.dims()[1], of.dims()[2]];
    let bytes = dims[0] * dims[1];
    TensorMut::new(D::slice_mut(of.into_data(), index * bytes..(index + 1) * bytes), crate::DType::U8, &dims)
}
