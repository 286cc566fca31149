//! Host memory.

use std::ops::Range;

use half::{bf16, f16};

use crate::device::{Device, sealed::Sealed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host_memory;
use crate::kernels::Kernels;
use crate::tensor::Tensor;

/// Host memory and the machine's cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cpu {
    poison: bool,
}

impl Cpu {
    /// A CPU device.
    pub fn new() -> Self {
        Self::default()
    }

    /// A CPU device that fills every buffer it allocates with the byte 0xFF: NaN in all floating types, −1 in the
    /// integer types. For tests: whatever reads memory that nobody wrote shows it.
    pub fn poisoning() -> Self {
        Self { poison: true }
    }
}

/// Owned host memory, a vector of its dtype, so that host frameworks can take it over without a copy.
#[derive(Debug)]
pub enum HostBuffer {
    /// Of [`DType::F64`].
    F64(Vec<f64>),
    /// Of [`DType::F32`].
    F32(Vec<f32>),
    /// Of [`DType::F16`].
    F16(Vec<f16>),
    /// Of [`DType::BF16`].
    BF16(Vec<bf16>),
    /// Of [`DType::I64`].
    I64(Vec<i64>),
    /// Of [`DType::I32`].
    I32(Vec<i32>),
    /// Of [`DType::U8`].
    U8(Vec<u8>),
}

impl HostBuffer {
    fn bytes(&self) -> &[u8] {
        match self {
            HostBuffer::F64(v) => bytemuck::cast_slice(v),
            HostBuffer::F32(v) => bytemuck::cast_slice(v),
            HostBuffer::F16(v) => bytemuck::cast_slice(v),
            HostBuffer::BF16(v) => bytemuck::cast_slice(v),
            HostBuffer::I64(v) => bytemuck::cast_slice(v),
            HostBuffer::I32(v) => bytemuck::cast_slice(v),
            HostBuffer::U8(v) => v,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostBuffer::F64(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::F32(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::F16(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::BF16(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::I64(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::I32(v) => bytemuck::cast_slice_mut(v),
            HostBuffer::U8(v) => v,
        }
    }
}

impl Sealed for Cpu {}

impl Device for Cpu {
    type Buffer = HostBuffer;
    type Ref<'a> = &'a [u8];
    type Mut<'a> = &'a mut [u8];
    type Event = ();

    fn alloc(&self, dtype: DType, count: usize) -> Result<HostBuffer> {
        fn zeroed<T: bytemuck::Zeroable>(count: usize) -> Result<Vec<T>> {
            host_memory::zeroed("Cpu::alloc", "a tensor", count)
        }
        let mut buffer = match dtype {
            DType::F64 => HostBuffer::F64(zeroed(count)?),
            DType::F32 => HostBuffer::F32(zeroed(count)?),
            DType::F16 => HostBuffer::F16(zeroed(count)?),
            DType::BF16 => HostBuffer::BF16(zeroed(count)?),
            DType::I64 => HostBuffer::I64(zeroed(count)?),
            DType::I32 => HostBuffer::I32(zeroed(count)?),
            DType::U8 => HostBuffer::U8(zeroed(count)?),
        };
        if self.poison {
            buffer.bytes_mut().fill(0xFF);
        }
        Ok(buffer)
    }

    fn view(buffer: &HostBuffer) -> &[u8] {
        buffer.bytes()
    }

    fn view_mut(buffer: &mut HostBuffer) -> &mut [u8] {
        buffer.bytes_mut()
    }

    fn len(view: &[u8]) -> usize {
        view.len()
    }

    fn len_mut(view: &&mut [u8]) -> usize {
        view.len()
    }

    fn slice<'a>(view: Self::Ref<'a>, range: Range<usize>) -> Self::Ref<'a> {
        &view[range]
    }

    fn slice_mut<'a>(view: Self::Mut<'a>, range: Range<usize>) -> Self::Mut<'a> {
        &mut view[range]
    }

    fn split_mut<'a>(view: Self::Mut<'a>, at: usize) -> (Self::Mut<'a>, Self::Mut<'a>) {
        view.split_at_mut(at)
    }

    fn shorten<'s, 'l: 's>(view: Self::Ref<'l>) -> Self::Ref<'s> {
        view
    }

    fn reborrow<'s>(view: &'s mut &mut [u8]) -> &'s mut [u8] {
        view
    }

    fn downgrade<'s>(view: &'s &mut [u8]) -> &'s [u8] {
        view
    }

    fn zero(&self, view: &mut [u8]) -> Result<()> {
        view.fill(0);
        Ok(())
    }

    fn copy(&self, from: &[u8], to: &mut [u8]) -> Result<()> {
        if from.len() != to.len() {
            return Err(Error::invalid("Cpu::copy", "to", format!("{} bytes", from.len()), to.len()));
        }
        to.copy_from_slice(from);
        Ok(())
    }
}

impl Tensor<Cpu> {
    /// The same tensor on another device.
    ///
    /// # Errors
    /// Where there is no memory, or a driver's error.
    pub fn to<D: Kernels>(&self, device: &D) -> Result<Tensor<D>> {
        let mut to = Tensor::empty(device, self.dtype(), self.dims())?;
        device.upload(self.as_bytes(), to.view_mut())?;
        Ok(to)
    }
}
