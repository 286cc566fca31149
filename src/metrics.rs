//! Load of the experts, as data.

/// How evenly the tokens of one forward fell on the experts, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// Tokens that chose each expert, `[E]`, before any drop.
    pub tokens_per_expert: Vec<usize>,
    /// Choices of this rank's tokens that a capacity dropped.
    pub dropped: usize,
}
