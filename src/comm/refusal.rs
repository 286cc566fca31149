//! Refusals: what fails on one rank is told to the others, which wait for it in a collective.

use std::fmt::Display;

use crate::comm::{Communicator, Tag};
use crate::device::Device;

/// Meets the other ranks as a failure, for this reason. The rank goes on to return its own error, whatever becomes of the
/// refusal; a rank alone has nobody to tell.
pub(crate) fn refuse<D: Device, C: Communicator<D> + ?Sized>(comm: &mut C, tag: Tag, reason: &dyn Display) {
    if comm.size() > 1 {
        let _ = comm.refuse(tag, &reason.to_string());
    }
}

/// Passes `result` on. An error is first told to the other ranks, which are in the collective of this tag or on their way
/// to it.
pub(crate) fn refuse_on_error<D: Device, C: Communicator<D> + ?Sized, T, E: Display>(
    comm: &mut C,
    tag: Tag,
    result: Result<T, E>,
) -> Result<T, E> {
    result.inspect_err(|error| refuse(comm, tag, error))
}
