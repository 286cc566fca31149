//! Tensors as the library is told of them.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::Cuda;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::{NcclEpError, sys};

/// A window of NCCL's, by its addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct WindowRange {
    pub(super) base: u64,
    pub(super) bytes: usize,
    pub(super) window: crate::nccl::sys::WindowPtr,
}

// SAFETY: a window is a handle that NCCL lets any thread pass to its calls.
unsafe impl Send for WindowRange {}

/// The windows that rows may lie in; they outlive the calls that look here.
#[derive(Debug, Clone, Default)]
pub(super) struct WindowRanges(Arc<Mutex<Vec<WindowRange>>>);

impl WindowRanges {
    pub(super) fn add(&self, place: WindowRange) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(place);
    }

    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn of(&self, address: u64) -> Option<WindowRange> {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.iter().find(|p| (p.base..p.base + p.bytes as u64).contains(&address)).copied()
    }
}

/// A tensor's description, for one call.
pub(super) struct TensorDescriptor<'a> {
    raw: sys::ncclEpTensor_t,
    sizes: [usize; 3],
    memory: PhantomData<&'a ()>,
}

fn number(call: &'static str, dtype: DType) -> Result<sys::ncclDataType_t> {
    Ok(match dtype {
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::U8 => sys::ncclDataType_t::ncclUint8,
        DType::I32 => sys::ncclDataType_t::ncclInt32,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        other => return Err(Error::invalid(call, "dtype", "one that NCCL EP moves", other)),
    })
}

impl<'a> TensorDescriptor<'a> {
    fn new(call: &'static str, dtype: DType, dims: &[usize], address: u64) -> Result<Self> {
        let mut sizes = [1; 3];
        if dims.len() > sizes.len() {
            return Err(Error::invalid(call, "tensor", "at most 3 dimensions", dims.len()));
        }
        sizes[..dims.len()].copy_from_slice(dims);
        let raw = sys::ncclEpTensor_t {
            size: size_of::<sys::ncclEpTensor_t>() as u32,
            magic: sys::NCCL_EP_TENSOR_MAGIC,
            ndim: dims.len() as u32,
            datatype: number(call, dtype)?,
            data: address as *mut _,
            win_hdl: std::ptr::null_mut(),
            win_offset: 0,
            sizes: std::ptr::null_mut(),
        };
        Ok(Self { raw, sizes, memory: PhantomData })
    }

    pub(super) fn of(call: &'static str, t: TensorRef<'a, Cuda>) -> Result<Self> {
        Self::new(call, t.dtype(), t.dims(), t.data().address())
    }

    pub(super) fn of_mut(call: &'static str, t: TensorMut<'a, Cuda>) -> Result<Self> {
        let (dtype, dims) = (t.dtype(), t.dims().to_vec());
        Self::new(call, dtype, &dims, t.into_data().address())
    }

    /// The same memory by its window, where the group wants that.
    pub(super) fn in_window(mut self, call: &'static str, places: Option<&WindowRanges>) -> Result<Self> {
        let Some(places) = places else { return Ok(self) };
        let address = self.raw.data as u64;
        let place = places.of(address).ok_or(NcclEpError::NoWindow { call })?;
        self.raw.win_hdl = place.window.cast();
        self.raw.win_offset = address - place.base;
        Ok(self)
    }

    /// The same memory as another type: opaque rows travel as one that the library moves.
    pub(super) fn retyped(mut self, datatype: sys::ncclDataType_t, width: usize) -> Self {
        self.raw.datatype = datatype;
        self.sizes[self.raw.ndim as usize - 1] = width;
        self
    }

    /// The description, which must not move while the library looks at it.
    pub(super) fn pointer(&mut self) -> *mut sys::ncclEpTensor_t {
        self.raw.sizes = self.sizes.as_mut_ptr();
        &raw mut self.raw
    }
}

/// A pointer to an optional description.
pub(super) fn pointer(t: &mut Option<TensorDescriptor<'_>>) -> *mut sys::ncclEpTensor_t {
    t.as_mut().map_or(std::ptr::null_mut(), TensorDescriptor::pointer)
}

/// Rows as the library moves them: bytes with scales are what it calls fp8, without it moves them as 16-bit elements.
pub(super) fn as_moved<'a>(
    t: TensorDescriptor<'a>,
    (dtype, bytes, scale): (DType, usize, usize),
) -> TensorDescriptor<'a> {
    match (dtype, scale) {
        (DType::U8, 0) => t.retyped(sys::ncclDataType_t::ncclBfloat16, bytes / 2),
        (DType::U8, _) => t.retyped(sys::ncclDataType_t::ncclFloat8e4m3, bytes),
        _ => t,
    }
}

/// Scales travel beside opaque rows, from so many rows to so many.
pub(super) fn check_scales(
    call: &'static str,
    rows: DType,
    from: &Option<TensorRef<'_, Cuda>>,
    t: usize,
    to: &Option<TensorMut<'_, Cuda>>,
    n: usize,
) -> Result<()> {
    match (from, to) {
        (None, None) => Ok(()),
        (Some(from), Some(to)) => {
            let bytes = from.row_bytes();
            Error::check_dtype(call, "tokens beside scales", DType::U8, rows)?;
            check(call, "scales", (DType::U8, &[t, bytes]), (from.dtype(), from.dims()))?;
            check(call, "out_scales", (DType::U8, &[n, bytes]), (to.dtype(), to.dims()))
        }
        _ => Err(Error::invalid(call, "scales", "on both sides or on none", "on one")),
    }
}

pub(super) fn check(
    call: &'static str,
    name: &str,
    expected: (DType, &[usize]),
    found: (DType, &[usize]),
) -> Result<()> {
    Error::check_dtype(call, name, expected.0, found.0)?;
    Error::check_shape(call, name, expected.1, found.1)
}
