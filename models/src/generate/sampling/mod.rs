//! One token from a step's logits.
//!
//! The order of operations is transformers' (`generate` with these parameters): the repetition penalty on the logits
//! of all ids of the prompt and of the text so far; then, where sampling is on, the temperature, the `top_k` largest,
//! of these the fewest that together have a probability of `top_p`, of these those with at least `min_p` times the
//! largest probability; the rest has probability zero, and one token is drawn from a softmax of what is left. Each
//! filter sees probabilities that sum to one over what the one before left.

mod filters;
mod options;
mod sampler;
#[cfg(test)]
mod tests;

pub use options::Sampling;
pub use sampler::Sampler;
pub(super) use sampler::choose_all;
