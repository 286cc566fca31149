//! Errors of the driver.

use cudarc::driver::DriverError;

use crate::error::Error;

/// A driver error as this crate's.
pub(super) fn driver(call: &'static str, operation: &str) -> impl FnOnce(DriverError) -> Error {
    let operation = operation.to_string();
    move |e| Error::Device { call, operation, message: format!("{e:?}") }
}
