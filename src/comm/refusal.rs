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

/// The same where a rank that is alone may have no communicator.
pub(crate) fn refuse_on_error_if_any<D: Device, T, E: Display>(
    comm: Option<&mut (dyn Communicator<D> + 'static)>,
    tag: Tag,
    result: Result<T, E>,
) -> Result<T, E> {
    match comm {
        Some(comm) => refuse_on_error(comm, tag, result),
        None => result,
    }
}

/// Runs `work`, which enters one collective, of this tag: what fails before is told to the other ranks.
pub(crate) fn refuse_unless_entered<D: Device, T, E: Display>(
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    work: impl FnOnce(&mut Entry<'_, D>) -> Result<T, E>,
) -> Result<T, E> {
    let mut entry = Entry { comm, entered: false };
    let result = work(&mut entry);
    let Entry { comm, entered } = entry;
    if entered { result } else { refuse_on_error(comm, tag, result) }
}

/// A collective that is about to be entered.
pub(crate) struct Entry<'a, D: Device> {
    comm: &'a mut dyn Communicator<D>,
    entered: bool,
}

impl<D: Device> Entry<'_, D> {
    /// The communicator's device.
    #[cfg_attr(not(any(feature = "candle", feature = "burn")), allow(dead_code, reason = "adapters alone ask for it"))]
    pub(crate) fn device(&self) -> Option<&D> {
        self.comm.device()
    }

    /// The communicator, for the collective's call, which tells its own errors.
    pub(crate) fn enter(&mut self) -> &mut dyn Communicator<D> {
        self.entered = true;
        self.comm
    }
}
