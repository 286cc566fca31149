//! Which dispatcher a group takes, and why.

use std::ffi::OsStr;

use crate::error::{Error, Result};
use crate::kernels::Kernels;

use super::dispatcher_state::DispatcherState;
use super::{AllGather, AllToAll, DispatcherKind, Local, TokenDispatcher};

/// Names the dispatcher of groups that leave it to `Auto`: `auto`, `local`, `all_to_all`, `all_gather`, `nccl_ep` or
/// `nccl_ep_ll` (low latency); `-` counts as `_`. What cannot be had is an error then, as it is where the
/// configuration names it. All ranks need the same value.
pub const VARIABLE: &str = "MOEBIUS_EP";

const CALL: &str = "Group::new";
const NAMES: [(&str, DispatcherKind); 6] = [
    ("auto", DispatcherKind::Auto),
    ("local", DispatcherKind::Local),
    ("all_to_all", DispatcherKind::AllToAll),
    ("all_gather", DispatcherKind::AllGather),
    ("nccl_ep", DispatcherKind::NcclEp),
    ("nccl_ep_ll", DispatcherKind::NcclEpLowLatency),
];

/// The requested dispatcher: the configuration's choice, or where that is `Auto` the variable's.
pub(super) fn named(config: DispatcherKind, variable: Option<&OsStr>) -> Result<DispatcherKind> {
    let value = variable.filter(|v| config == DispatcherKind::Auto && !v.is_empty());
    let Some(value) = value else { return Ok(config) };
    let text = value.to_string_lossy().replace('-', "_");
    let found = NAMES.iter().find(|(name, _)| text == *name);
    found.map(|(_, kind)| *kind).ok_or_else(|| {
        let counts = NAMES.map(|(name, _)| name).join(", ");
        Error::invalid(CALL, VARIABLE, format!("one of {counts}"), value.to_string_lossy())
    })
}

/// A dispatcher, and why it is that one.
type SelectedDispatcher<D> = (Box<dyn TokenDispatcher<D>>, String);

/// The dispatcher that the group's configuration asks for.
/// `source`: what has asked, the field or the variable.
pub(super) fn dispatcher<D: Kernels>(core: DispatcherState<D>, source: &'static str) -> Result<SelectedDispatcher<D>> {
    let reason = |text: &str| text.to_string();
    Ok(match (core.config.dispatcher, core.ranks()) {
        (DispatcherKind::Auto, 1) => (Box::new(Local { core }), reason("one rank")),
        (DispatcherKind::Local, _) => (Box::new(Local { core }), reason("asked for")),
        (DispatcherKind::AllToAll, _) => (Box::new(AllToAll { core }), reason("asked for")),
        (DispatcherKind::AllGather, _) => (Box::new(AllGather { core }), reason("asked for")),
        (DispatcherKind::NcclEp | DispatcherKind::NcclEpLowLatency, _) => match nccl_ep(core, source)? {
            Ok(dispatcher) => (dispatcher, reason("asked for")),
            Err(refused) => return Err(refused.1),
        },
        (DispatcherKind::Auto, _) => match nccl_ep(core, source)? {
            Ok(dispatcher) => (dispatcher, reason("NCCL EP's checks pass on every rank")),
            Err(refused) => {
                let (core, refusal) = *refused;
                (Box::new(AllToAll { core }), format!("not NCCL EP: {refusal}"))
            }
        },
    })
}

/// NCCL EP, or why not, the same on all ranks.
type NcclEpOrReason<D> = std::result::Result<Box<dyn TokenDispatcher<D>>, Box<(DispatcherState<D>, Error)>>;

#[cfg(not(feature = "nccl-ep"))]
fn nccl_ep<D: Kernels>(core: DispatcherState<D>, source: &'static str) -> Result<NcclEpOrReason<D>> {
    let refusal = Error::invalid(CALL, source, "one that this build has", "NcclEp (feature nccl-ep)");
    Ok(Err(Box::new((core, refusal))))
}

#[cfg(feature = "nccl-ep")]
fn nccl_ep<D: Kernels>(core: DispatcherState<D>, _: &'static str) -> Result<NcclEpOrReason<D>> {
    use crate::cuda::Cuda;
    use crate::nccl_ep::{EpError, NcclEp};
    use std::any::{Any, type_name};

    // Only one device has it, and the device is a type.
    let mut core = Some(core);
    let own = (&mut core as &mut dyn Any).downcast_mut::<Option<DispatcherState<Cuda>>>().and_then(Option::take);
    let Some(own) = own else {
        let found = type_name::<D>().rsplit("::").next().unwrap_or_default();
        let refusal = EpError::Communicator { found: format!("one of the device {found}") };
        return core.map(|core| Err(Box::new((core, refusal.into())))).ok_or_else(unavailable);
    };
    let mut possible: Option<NcclEpOrReason<Cuda>> = Some(match NcclEp::new(own)? {
        Ok(dispatcher) => Ok(Box::new(dispatcher)),
        Err(refused) => Err(refused),
    });
    (&mut possible as &mut dyn Any)
        .downcast_mut::<Option<NcclEpOrReason<D>>>()
        .and_then(Option::take)
        .ok_or_else(unavailable)
}

#[cfg(feature = "nccl-ep")]
fn unavailable() -> Error {
    Error::invalid(CALL, "dispatcher", "a group's state", "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_goes_before_the_variable_and_unknown_values_are_errors() {
        let kind = |config, value: &str| named(config, Some(OsStr::new(value))).map_err(|e| e.to_string());
        assert_eq!(kind(DispatcherKind::Auto, "nccl_ep"), Ok(DispatcherKind::NcclEp));
        assert_eq!(kind(DispatcherKind::AllGather, "nccl_ep"), Ok(DispatcherKind::AllGather));
        assert_eq!(kind(DispatcherKind::Auto, "nccl_ep_ll"), Ok(DispatcherKind::NcclEpLowLatency));
        assert_eq!(kind(DispatcherKind::Auto, "all-gather"), Ok(DispatcherKind::AllGather));
        assert_eq!(kind(DispatcherKind::Auto, "all_to-all"), Ok(DispatcherKind::AllToAll));
        assert_eq!(kind(DispatcherKind::Auto, ""), Ok(DispatcherKind::Auto));
        assert_eq!(named(DispatcherKind::Auto, None).ok(), Some(DispatcherKind::Auto));
        let error = kind(DispatcherKind::Auto, "ncclep");
        assert!(error.as_ref().is_err_and(|e| e.contains("MOEBIUS_EP") && e.contains("nccl_ep")), "{error:?}");
    }
}
