//! Values of a configuration's fields as text, for the errors of ranks that differ in them.

use std::fmt;

/// The values in the order of the fields, as far as there is room: one that has none is left out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FieldValues {
    bytes: [u8; Self::BYTES],
    len: usize,
}

impl FieldValues {
    /// Of the values together, each with its end.
    pub const BYTES: usize = 304;

    /// Appends the value of the next field.
    pub fn push(&mut self, value: &str) {
        let value = if self.len + value.len() < Self::BYTES { value } else { "" };
        // Of JSON or a type's name, neither of which has a line's end.
        for byte in value.bytes().chain([b'\n']).take(Self::BYTES - self.len) {
            self.bytes[self.len] = byte;
            self.len += 1;
        }
    }

    /// The value of a field, where it is known.
    pub fn get(&self, field: usize) -> Option<&str> {
        self.text().split('\n').nth(field).filter(|value| !value.is_empty())
    }

    /// As it travels.
    pub fn text(&self) -> &str {
        str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }

    /// Values that have traveled, as far as there is room for them.
    pub fn from_text(text: &str) -> Self {
        let len = text.floor_char_boundary(Self::BYTES);
        let mut values = Self { len, ..Self::default() };
        values.bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        values
    }
}

impl Default for FieldValues {
    fn default() -> Self {
        Self { bytes: [0; Self::BYTES], len: 0 }
    }
}

impl fmt::Debug for FieldValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_is_left_out_and_moves_nothing() {
        let mut values = FieldValues::default();
        values.push("64");
        values.push(&"x".repeat(FieldValues::BYTES));
        values.push("silu");
        assert_eq!([0, 1, 2, 3].map(|i| values.get(i)), [Some("64"), None, Some("silu"), None]);
        assert_eq!(FieldValues::from_text(values.text()), values);
        (0..2 * FieldValues::BYTES).for_each(|_| values.push(""));
        values.push("late");
        assert_eq!((values.get(2), values.get(2 * FieldValues::BYTES + 3)), (Some("silu"), None));
        assert_eq!(FieldValues::from_text(&"é".repeat(FieldValues::BYTES)).text().len(), FieldValues::BYTES);
        assert_eq!(
            FieldValues::from_text(&format!("x{}", "é".repeat(FieldValues::BYTES))).text().len(),
            FieldValues::BYTES - 1
        );
    }
}
