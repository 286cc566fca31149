//! Errors that several parts of a chain return.

use crate::error::Error;

/// The call that they name.
pub(in crate::etp) const CALL: &str = "etp";

/// The error of an operation that cannot be captured into a graph.
pub(in crate::etp) fn not_capturable_error(call: &'static str, operation: &str) -> Error {
    Error::NotCapturable { call, operation: operation.to_string() }
}
