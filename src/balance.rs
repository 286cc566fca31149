//! Load balancing without a loss.

use std::cmp::Ordering;

use crate::error::{Error, Result};

/// Moves the bias with which experts are chosen towards an even load (DeepSeek-V3, arXiv 2412.19437, section 2.1.2;
/// arXiv 2408.15664): `bias_e += u·sign(mean(c) − c_e)`.
///
/// `bias` is the router's `selection_bias [E]`, c is `tokens_per_expert [E]`, the load over all ranks
/// ([`Load::tokens_per_expert`](crate::metrics::Load)), u the step (DeepSeek-V3: 0.001). Call it after each training
/// step, outside of autograd. The mean is compared exactly, in integers: with equal arguments the result is the same
/// on all ranks to the bit. An expert at the mean keeps its bias; so do all when there are no tokens.
///
/// # Errors
/// [`Error::Invalid`] where the lengths differ or `u` is not finite; `bias` is unchanged then.
///
/// ```
/// let mut bias = [0.0, 0.0, 0.0];
/// moebius::balance::update_selection_bias(&mut bias, &[9, 3, 6], 0.5)?;
/// assert_eq!(bias, [-0.5, 0.5, 0.0]);
/// # Ok::<(), moebius::Error>(())
/// ```
pub fn update_selection_bias(bias: &mut [f32], tokens_per_expert: &[usize], u: f32) -> Result<()> {
    const CALL: &str = "update_selection_bias";
    if bias.len() != tokens_per_expert.len() {
        let expected = format!("{} values (the length of bias)", bias.len());
        return Err(Error::invalid(CALL, "tokens_per_expert", expected, tokens_per_expert.len()));
    }
    if !u.is_finite() {
        return Err(Error::invalid(CALL, "u", "a finite number", u));
    }
    let total: u128 = tokens_per_expert.iter().map(|&c| c as u128).sum();
    for (b, &c) in bias.iter_mut().zip(tokens_per_expert) {
        match (c as u128 * tokens_per_expert.len() as u128).cmp(&total) {
            Ordering::Less => *b += u,
            Ordering::Greater => *b -= u,
            Ordering::Equal => {}
        }
    }
    Ok(())
}
