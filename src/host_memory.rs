//! Host memory of a size that a caller has named: an error where there is none, not an abort of the process.

use bytemuck::Zeroable;

use crate::error::{Error, Result};

fn none<T>(call: &'static str, name: &str, count: usize) -> Error {
    Error::OutOfMemory { call, name: name.to_string(), bytes: count.saturating_mul(size_of::<T>()) }
}

/// `count` zeros. Pages are handed out untouched: they cost nothing that a later write would not.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn zeroed<T: Zeroable>(call: &'static str, name: &str, count: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(count).map_err(|()| none::<T>(call, name, count))
}

/// An empty vector with room for `count`.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn reserved<T>(call: &'static str, name: &str, count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|_| none::<T>(call, name, count))?;
    Ok(values)
}

/// `count` times the same value.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn filled<T: Clone>(call: &'static str, name: &str, value: T, count: usize) -> Result<Vec<T>> {
    let mut values = reserved(call, name, count)?;
    values.resize(count, value);
    Ok(values)
}

/// A copy.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn copied<T: Copy>(call: &'static str, name: &str, from: &[T]) -> Result<Vec<T>> {
    let mut values = reserved(call, name, from.len())?;
    values.extend_from_slice(from);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_address_space_is_an_error_that_names_the_bytes() {
        let count = isize::MAX as usize / 4;
        let errors = [
            zeroed::<u32>("prepare", "record", count + 1).map(drop),
            reserved::<u32>("prepare", "record", count).map(drop),
            filled("prepare", "record", -1i32, count).map(drop),
        ];
        for error in errors {
            let error = error.expect_err("no memory is that large");
            assert!(matches!(&error, Error::OutOfMemory { call: "prepare", bytes, .. } if *bytes / 4 >= count));
            assert!(error.to_string().contains("record"), "{error}");
        }
        assert_eq!(zeroed::<u8>("t", "t", 3).ok(), Some(vec![0; 3]));
        assert_eq!(filled("t", "t", -1i32, 2).ok(), Some(vec![-1; 2]));
        assert_eq!(copied("t", "t", &[1u8, 2]).ok(), Some(vec![1, 2]));
    }
}
