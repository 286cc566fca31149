//! What a rendering may still spend, asked before a filter or a method makes anything: the engine charges for results when
//! they are there.

use std::fmt::{self, Write};

use minijinja::{Error, ErrorKind, State, Value};

/// Bytes of text that count as one step.
const BYTES: usize = 64;

/// The steps that a rendering has left.
#[derive(Clone, Copy)]
pub(super) struct Budget<'a>(Option<&'a State<'a, 'a>>);

impl<'a> Budget<'a> {
    pub fn of(state: &'a State<'_, '_>) -> Self {
        Self(Some(state))
    }

    /// Without a bound: for what no template makes.
    pub fn none() -> Self {
        Self(None)
    }

    /// Takes steps.
    pub fn spend(self, steps: u64) -> Result<(), Error> {
        self.0.map_or(Ok(()), |state| state.consume_fuel(steps))
    }

    /// Bytes that the steps pay for.
    fn bytes(self) -> usize {
        let left = self.0.and_then(|state| state.fuel_levels()).map(|(_, left)| left);
        left.map_or(usize::MAX, |steps| usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(BYTES))
    }

    /// Fails where a result of so many bytes could not be paid for; it is charged when it is there.
    pub fn ensure(self, bytes: usize) -> Result<(), Error> {
        if bytes < self.bytes() { Ok(()) } else { Err(Error::from(ErrorKind::OutOfFuel)) }
    }
}

/// A text that grows as far as the steps pay for.
pub(super) struct BoundedText<'a> {
    pub budget: Budget<'a>,
    pub text: String,
    /// Bytes that are not yet charged.
    open: usize,
}

impl<'a> BoundedText<'a> {
    pub fn new(budget: Budget<'a>) -> Self {
        Self { budget, text: String::new(), open: 0 }
    }

    pub fn push(&mut self, part: &str) -> Result<(), Error> {
        self.charge(part.len())?;
        self.text.push_str(part);
        Ok(())
    }

    pub fn push_char(&mut self, c: char) -> Result<(), Error> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        self.open += bytes;
        let steps = self.open / BYTES;
        self.open %= BYTES;
        if steps > 0 { self.budget.spend(steps as u64) } else { Ok(()) }
    }
}

/// A byte of a text that is written of another value than a text counts as so many, as with the engine.
const WRITTEN: usize = 17;

/// Text of values, made or counted, as far as the steps pay for it.
struct Writer<'a> {
    budget: Budget<'a>,
    text: Option<String>,
    bytes: usize,
}

impl Writer<'_> {
    fn write(mut self, text: fmt::Arguments<'_>) -> Result<Self, Error> {
        self.write_fmt(text).map_err(|_| Error::from(ErrorKind::OutOfFuel))?;
        self.budget.spend((self.bytes.saturating_mul(WRITTEN) / BYTES) as u64)?;
        Ok(self)
    }
}

impl Write for Writer<'_> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.bytes += part.len();
        self.budget.ensure(self.bytes.saturating_mul(WRITTEN)).map_err(|_| fmt::Error)?;
        if let Some(text) = &mut self.text {
            text.push_str(part);
        }
        Ok(())
    }
}

/// The text of a value that is none, where the steps pay for it: `{value}`, or in another form.
pub(super) fn written(text: fmt::Arguments<'_>, budget: Budget<'_>) -> Result<String, Error> {
    let writer = Writer { budget, text: Some(String::new()), bytes: 0 };
    Ok(writer.write(text)?.text.unwrap_or_default())
}

/// Bytes of a value as `str` writes it, where the steps pay for them; nothing is made. Of what is no text yet they are
/// charged.
pub(super) fn shown(value: &Value, budget: Budget<'_>) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        budget.ensure(text.len())?;
        return Ok(text.len());
    }
    let writer = Writer { budget, text: None, bytes: 0 };
    Ok(writer.write(format_args!("{value}"))?.bytes)
}
