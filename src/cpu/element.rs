//! Rust types of the floating dtypes.

use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::device::{Cpu, HostBuffer};

/// A Rust type that a CPU tensor can hold.
pub trait Element: bytemuck::Pod + Default + Send + Sync + 'static {
    /// Its run-time name.
    const DTYPE: DType;
    /// Wraps a vector as a buffer, without a copy.
    fn wrap(values: Vec<Self>) -> HostBuffer;
    /// Takes the vector out of a buffer, without a copy; `None` if it holds another type.
    fn unwrap(buffer: HostBuffer) -> Option<Vec<Self>>;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
            fn wrap(values: Vec<Self>) -> HostBuffer {
                HostBuffer::$dtype(values)
            }
            fn unwrap(buffer: HostBuffer) -> Option<Vec<Self>> {
                match buffer {
                    HostBuffer::$dtype(values) => Some(values),
                    _ => None,
                }
            }
        }
    )*};
}
element!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, u8 => U8);

/// Floating types, with the type in which their sums are kept.
pub(crate) trait Float: Element {
    /// `f64` for `f64`, else `f32`.
    type Acc: Acc;
    fn to_acc(self) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self;
}

/// The two accumulator types.
pub(crate) trait Acc:
    Float<Acc = Self> + super::ordered::Lanes + num_traits::Float + num_traits::NumAssign + std::iter::Sum
{
    fn of(value: f64) -> Self;
    fn as_f64(self) -> f64;
}

macro_rules! float {
    ($($rust:ty, $acc:ty, $to:expr, $from:expr);*) => {$(
        impl Float for $rust {
            type Acc = $acc;
            fn to_acc(self) -> $acc {
                $to(self)
            }
            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }
        }
    )*};
}
float!(f64, f64, |v| v, |v| v; f32, f32, |v| v, |v| v; f16, f32, f16::to_f32, f16::from_f32; bf16, f32, bf16::to_f32, bf16::from_f32);

impl Acc for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }
    fn as_f64(self) -> f64 {
        self as f64
    }
}
impl Acc for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn as_f64(self) -> f64 {
        self
    }
}

impl<'a> TensorRef<'a, Cpu> {
    /// Borrows a slice as a tensor.
    ///
    /// # Errors
    /// A slice whose length is not the shape's.
    pub fn from_slice<T: Element>(values: &'a [T], dims: &[usize]) -> Result<Self> {
        Self::new(bytemuck::cast_slice(values), T::DTYPE, dims)
    }

    /// The elements.
    ///
    /// # Errors
    /// Another element type, or memory not aligned for it.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        Error::check_dtype("TensorRef::as_slice", "self", T::DTYPE, self.dtype())?;
        bytemuck::try_cast_slice(self.data())
            .map_err(|e| Error::invalid("TensorRef::as_slice", "self", "memory aligned for its type", e))
    }
}

impl<'a> TensorMut<'a, Cpu> {
    /// Borrows a slice as a tensor, exclusively.
    ///
    /// # Errors
    /// A slice whose length is not the shape's.
    pub fn from_slice<T: Element>(values: &'a mut [T], dims: &[usize]) -> Result<Self> {
        Self::new(bytemuck::cast_slice_mut(values), T::DTYPE, dims)
    }

    /// The elements.
    ///
    /// # Errors
    /// Another element type, or memory not aligned for it.
    pub fn into_slice<T: Element>(self) -> Result<&'a mut [T]> {
        Error::check_dtype("TensorMut::into_slice", "self", T::DTYPE, self.dtype())?;
        bytemuck::try_cast_slice_mut(self.into_data())
            .map_err(|e| Error::invalid("TensorMut::into_slice", "self", "memory aligned for its type", e))
    }
}

impl Tensor<Cpu> {
    /// Takes over a vector, without a copy.
    ///
    /// # Errors
    /// A vector whose length is not the shape's.
    pub fn from_vec<T: Element>(values: Vec<T>, dims: &[usize]) -> Result<Self> {
        Self::from_buffer(T::wrap(values), T::DTYPE, dims)
    }

    /// Gives the vector back, without a copy.
    ///
    /// # Errors
    /// Another element type.
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>> {
        let found = self.dtype();
        T::unwrap(self.into_buffer()).ok_or(Error::DType {
            call: "Tensor::into_vec",
            tensor: "self".to_string(),
            expected: T::DTYPE,
            found,
        })
    }

    /// The elements.
    ///
    /// # Errors
    /// Another element type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.view().as_slice()
    }

    /// The bytes, row-major, in the machine's byte order.
    pub fn as_bytes(&self) -> &[u8] {
        self.view().data()
    }

    /// The bytes, exclusively.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.view_mut().into_data()
    }

    /// The elements as `f64`, exact for every floating type.
    pub fn to_f64(&self) -> Vec<f64> {
        to_f64(self.view())
    }
}

/// Elements of any dtype as `f64` (integers up to 2⁵³ exactly).
pub(crate) fn to_f64(t: TensorRef<'_, Cpu>) -> Vec<f64> {
    fn map<T: bytemuck::Pod>(bytes: &[u8], f: impl Fn(T) -> f64) -> Vec<f64> {
        bytes.chunks_exact(size_of::<T>()).map(|c| f(bytemuck::pod_read_unaligned(c))).collect()
    }
    let bytes = t.data();
    match t.dtype() {
        DType::F64 => map::<f64>(bytes, |v| v),
        DType::F32 => map::<f32>(bytes, f64::from),
        DType::F16 => map::<f16>(bytes, f64::from),
        DType::BF16 => map::<bf16>(bytes, f64::from),
        DType::I64 => map::<i64>(bytes, |v| v as f64),
        DType::I32 => map::<i32>(bytes, f64::from),
        DType::U8 => map::<u8>(bytes, f64::from),
    }
}

/// Rounds to odd: what lies between two numbers becomes the one with an odd last bit, so that rounding the result to 16
/// bits is as one rounding. (`from_f64` of `half` leaves out the last 32 bits before it rounds.)
fn to_odd(v: f64) -> f32 {
    let nearest = v as f32;
    let back = f64::from(nearest);
    if back == v || !nearest.is_finite() {
        return nearest;
    }
    // Towards zero, then the last bit set.
    let down = if back.abs() > v.abs() { nearest.to_bits() - 1 } else { nearest.to_bits() };
    f32::from_bits(down | 1)
}

/// A tensor of any dtype from `f64` values, rounded to the nearest (integers truncated).
pub(crate) fn from_f64(values: &[f64], dtype: DType, dims: &[usize]) -> Result<Tensor<Cpu>> {
    fn make<T: Element>(values: &[f64], dims: &[usize], f: impl Fn(f64) -> T) -> Result<Tensor<Cpu>> {
        Tensor::from_vec(values.iter().map(|&v| f(v)).collect::<Vec<T>>(), dims)
    }
    match dtype {
        DType::F64 => make(values, dims, |v| v),
        DType::F32 => make(values, dims, |v| v as f32),
        DType::F16 => make(values, dims, |v| f16::from_f32(to_odd(v))),
        DType::BF16 => make(values, dims, |v| bf16::from_f32(to_odd(v))),
        DType::I64 => make(values, dims, |v| v as i64),
        DType::I32 => make(values, dims, |v| v as i32),
        DType::U8 => make(values, dims, |v| v as u8),
    }
}

/// Runs a generic body with the Rust type of a floating dtype.
macro_rules! with_float {
    ($call:expr, $name:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::dtype::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => Err($crate::error::Error::invalid($call, $name, "a floating-point dtype", other)),
        }
    };
}
/// Runs a generic body with the Rust type of an accumulator dtype.
macro_rules! with_acc {
    ($call:expr, $name:expr, $dtype:expr, $A:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $A = f64;
                $body
            }
            $crate::dtype::DType::F32 => {
                type $A = f32;
                $body
            }
            other => Err($crate::error::Error::invalid($call, $name, "f32 or f64", other)),
        }
    };
}
pub(crate) use {with_acc, with_float};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_rounded_once() -> Result<()> {
        let (tie, hair) = (1.0 + 2f64.powi(-8), 2f64.powi(-40));
        for (v, expected) in [
            (tie, 1.0),
            (tie + hair, 1.0 + 2f64.powi(-7)),
            (tie - hair, 1.0),
            (-tie - hair, -1.0 - 2f64.powi(-7)),
            (1.0 + 3.0 * 2f64.powi(-8), 1.0 + 2f64.powi(-6)),
            (1.0 + 3.0 * 2f64.powi(-8) - hair, 1.0 + 2f64.powi(-7)),
            (2f64.powi(-150), 0.0),
            (1e300, f64::INFINITY),
            (0.0, 0.0),
        ] {
            assert_eq!(to_f64(from_f64(&[v], DType::BF16, &[1])?.view()), [expected], "{v:e}");
        }
        let (tie, hair) = (1.0 + 2f64.powi(-11), 2f64.powi(-45));
        for (v, expected) in [(tie, 1.0), (tie + hair, 1.0 + 2f64.powi(-10)), (-70000.0, f64::NEG_INFINITY)] {
            assert_eq!(to_f64(from_f64(&[v], DType::F16, &[1])?.view()), [expected], "{v:e}");
        }
        assert!(to_f64(from_f64(&[f64::NAN], DType::BF16, &[1])?.view())[0].is_nan());
        Ok(())
    }
}
