//! What the operations that others call refuse.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// A call of such an operation, by its name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call(pub &'static str);

impl Call {
    /// [`Error::Usage`].
    pub fn refuse<T>(self, problem: String) -> Result<T> {
        Err(Error::Usage { call: self.0, problem })
    }

    /// [`Error::Shape`].
    pub fn refuse_shape<T>(self, tensor: &str, found: &Tensor, expected: impl Into<String>) -> Result<T> {
        let (tensor, expected, found) = (tensor.to_string(), expected.into(), found.dims().to_vec());
        Err(Error::Shape { call: self.0, tensor, expected, found })
    }

    /// Refuses a tensor of other sizes.
    pub fn shape(self, tensor: &str, found: &Tensor, expected: &[usize]) -> Result<()> {
        if found.dims() == expected { Ok(()) } else { self.refuse_shape(tensor, found, format!("{expected:?}")) }
    }

    /// Refuses what is no floating type that the operations have.
    pub fn float(self, tensor: &str, t: &Tensor) -> Result<()> {
        match t.dtype() {
            DType::F64 | DType::F32 | DType::BF16 | DType::F16 => Ok(()),
            found => self.refuse(format!("tensor {tensor}: expected f64, f32, bf16 or f16, found {found:?}")),
        }
    }

    /// Refuses a tensor of another type or device than the first one.
    pub fn same_dtype_and_device(self, (first, like): (&str, &Tensor), tensor: &str, t: &Tensor) -> Result<()> {
        let kind = |t: &Tensor| (t.dtype(), t.device().location());
        let (expected, found) = (kind(like), kind(t));
        if expected.0 == found.0 && like.device().same_device(t.device()) {
            return Ok(());
        }
        self.refuse(format!("tensor {tensor}: expected {expected:?}, as {first} has it, found {found:?}"))
    }

    /// Refuses an option that is not finite.
    pub fn finite(self, option: &str, value: f64) -> Result<()> {
        if value.is_finite() {
            Ok(())
        } else {
            self.refuse(format!("{option}: expected a finite number, found {value}"))
        }
    }

    /// Refuses an ε of a norm that is negative or not finite.
    pub fn eps(self, eps: f64) -> Result<()> {
        self.finite("eps", eps)?;
        if eps >= 0.0 { Ok(()) } else { self.refuse(format!("eps: expected a number >= 0, found {eps}")) }
    }

    /// Refuses a number of positions of 0.
    pub fn span(self, option: &str, span: Option<usize>) -> Result<()> {
        match span {
            Some(0) => self.refuse(format!("{option}: expected a number of positions from 1 on, found 0")),
            _ => Ok(()),
        }
    }
}
