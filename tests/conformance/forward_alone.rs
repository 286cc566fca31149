//! Cases over dispatchers that have no backward. Those that come to it end there, and only those: every rank is refused,
//! since none has asked for backward, and each rank of the case ends at that call.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use moebius::comm::{Op, Tag};
use moebius::{Error, Result};

use super::harness::{Case, Rank, Setup, Target};

/// Cases about backward itself, which are not for such dispatchers.
pub const NOT_FOR_FORWARD_ALONE: [&str; 2] = ["backward_that_was_not_agreed", "backward_that_never_comes"];

/// Cases that come to backward, in their order.
pub const COME_TO_BACKWARD: [&str; 23] = [
    "identity_with_equal_weights",
    "square_of_received",
    "constant_gradient",
    "weight_gradients_per_k",
    "absent_weight_gradients_are_zeros",
    "payload_dtypes",
    "same_bits_for_any_number_of_ranks",
    "same_bits_in_repeated_runs",
    "overflow_drops_and_counts",
    "aligned_drop_leaves_canaries",
    "a_bound_on_tokens_is_per_call",
    "minus_one",
    "ranks_that_receive_nothing",
    "fewer_tokens_after_more",
    "one_f_one_b_with_three_handles",
    "layers_with_other_k_and_alignment",
    "padding_is_never_read",
    "uneven_and_zero_tokens",
    "no_tokens_anywhere",
    "collectives_are_counted",
    "a_step_is_the_same",
    "a_timed_group_is_the_one_of_its_kind",
    "a_bound_of_sms_changes_no_value",
];

/// How a rank leaves its case.
struct EndsAtBackward;

/// Runs a case over ranks for forward alone; true where it came to backward.
///
/// # Panics
/// A case that fails.
pub fn ends_at_backward<D: Target>(case: &Case<D>, setup: &Setup<D>) -> bool {
    assert!(setup.forward_only, "{setup:?}");
    match catch_unwind(AssertUnwindSafe(|| (case.run)(setup))) {
        Ok(()) => false,
        Err(panic) if panic.is::<EndsAtBackward>() => true,
        Err(panic) => resume_unwind(panic),
    }
}

/// The same of a case that is known to come to backward, or not to.
///
/// # Panics
/// A case that fails, that comes to backward without being one of [`COME_TO_BACKWARD`], or that is one and does not.
pub fn ends_at_backward_as_known<D: Target>(case: &Case<D>, setup: &Setup<D>) -> bool {
    let (comes, expected) = (ends_at_backward(case, setup), COME_TO_BACKWARD.contains(&case.name));
    assert_eq!(comes, expected, "case {}: whether it comes to backward, {setup:?}", case.name);
    comes
}

impl<D: Target> Rank<D> {
    /// Ends the case where a backward was refused that nobody has asked for.
    pub fn unless_forward_alone<T>(&mut self, result: Result<T>) -> Result<T> {
        if !self.forward_only {
            return result;
        }
        let ranks = self.group.ranks();
        match &result {
            Err(Error::BackwardNotAgreed { rank, absent, .. }) => {
                // A prepare that does not wait for the others' records knows of its own rank alone.
                let known = absent.iter().copied().eq(0..ranks) || *absent == [self.rank];
                assert!(*rank == self.rank && known, "rank {}: of rank {rank}, absent {absent:?}", self.rank);
            }
            // What else a call may be refused for is the case's.
            Err(_) => return result,
            Ok(_) => panic!("rank {}: a backward that no rank has asked for went through", self.rank),
        }
        // The others have what they still wait for of this rank, and come here too.
        let tag = Tag { layer: u32::MAX, op: Op::User, sequence: u64::MAX };
        self.group.dispatcher().communicator().barrier(tag).expect("every rank comes to the refusal");
        resume_unwind(Box::new(EndsAtBackward))
    }
}

/// Where ranks have ended at backward, the case does; all of them must have.
pub fn end_together<T>(results: Vec<thread::Result<T>>) -> Vec<thread::Result<T>> {
    let ends = |result: &thread::Result<T>| {
        result.as_ref().err().is_some_and(|panic: &Box<dyn Any + Send>| panic.is::<EndsAtBackward>())
    };
    let ended = results.iter().filter(|result| ends(result)).count();
    if ended == 0 {
        return results;
    }
    assert_eq!(ended, results.len(), "ranks that ended at backward, of all");
    resume_unwind(Box::new(EndsAtBackward))
}
