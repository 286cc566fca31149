//! What an optimizer's saved state has: its counts, and the kinds of tensors kept of a parameter.

use crate::compare::ComparedField;

/// Counts of an optimizer, for its saved state.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Counts {
    /// The loss is scaled, by `scale`; else that is 1.
    pub(crate) scaled: bool,
    pub(crate) scale: f64,
    pub(crate) good: u64,
    pub(crate) steps: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// To compare with those of other ranks.
    pub(crate) fn fields(&self) -> [ComparedField; 5] {
        let scale = ComparedField::number("optimizer.state.scale", self.scale.to_bits());
        [
            ComparedField::number("optimizer.state.steps", self.steps),
            ComparedField::number("optimizer.state.skipped", self.skipped),
            ComparedField::number("optimizer.state.good_steps", self.good),
            ComparedField {
                text: |scaled| if scaled == 1 { "scaled" } else { "not scaled" }.to_string(),
                ..ComparedField::number("optimizer.state.loss", u64::from(self.scaled))
            },
            ComparedField { text: |bits| f64::from_bits(bits).to_string(), ..scale },
        ]
    }
}

/// Kinds of state kept for a parameter, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StateKind {
    Main,
    First,
    Second,
}

impl StateKind {
    pub(crate) const ALL: [Self; 3] = [Self::Main, Self::First, Self::Second];

    /// As PyTorch calls it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::First => "exp_avg",
            Self::Second => "exp_avg_sq",
        }
    }
}
