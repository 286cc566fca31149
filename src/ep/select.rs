//! Which dispatcher a group takes, and why.

use std::any::type_name;
use std::ffi::OsStr;

use crate::error::{Error, NcclEpError, Result};
use crate::kernels::Kernels;

use super::dispatcher_state::DispatcherState;
use super::{AllGather, AllToAll, DispatcherKind, GroupConfig, Hierarchical, Local, TokenDispatcher};

/// Names the dispatcher of groups that leave it to `Auto`: `auto`, `local`, `all_to_all`, `hierarchical`, `all_gather`,
/// `nccl_ep`, `nccl_ep_ll` (low latency), `nvlink` or `nvlink_ll`; `-` counts as `_`. What cannot be had is an error then,
/// as it is where the configuration names it. All ranks need the same value.
pub const DISPATCHER_VARIABLE: &str = "MOEBIUS_EP";

const CALL: &str = "Group::new";

/// The requested dispatcher: the configuration's choice, or where that is `Auto` the variable's.
pub(super) fn named(config: DispatcherKind, variable: Option<&OsStr>) -> Result<DispatcherKind> {
    let value = variable.filter(|v| config == DispatcherKind::Auto && !v.is_empty());
    let Some(value) = value else { return Ok(config) };
    let text = value.to_string_lossy();
    text.parse().map_err(|error| match error {
        Error::Invalid { expected, found, .. } => Error::invalid(CALL, DISPATCHER_VARIABLE, expected, found),
        other => other,
    })
}

/// A dispatcher, and why it is that one.
pub(super) type SelectedDispatcher<D> = (Box<dyn TokenDispatcher<D>>, String);

/// The dispatcher that the group's configuration asks for.
/// `source`: what has asked, the field or the variable.
pub(super) fn dispatcher<D: LibraryDispatchers>(
    core: DispatcherState<D>,
    source: &'static str,
) -> Result<SelectedDispatcher<D>> {
    match (core.config.dispatcher, core.ranks()) {
        (DispatcherKind::Auto, 1) => Ok((Box::new(Local { core }), "one rank".to_string())),
        (DispatcherKind::Auto, _) => automatic(core, source),
        (kind, _) => match of_kind(kind, core, source)? {
            Ok(dispatcher) => Ok((dispatcher, "asked for".to_string())),
            Err(refused) => Err(refused.1),
        },
    }
}

/// The dispatcher of a kind, or the state it was to have and the reason why not, the same on all ranks. `Auto` is no
/// kind of its own, and gets what any group of several ranks can have.
pub(super) fn of_kind<D: LibraryDispatchers>(
    kind: DispatcherKind,
    core: DispatcherState<D>,
    source: &'static str,
) -> Result<DispatcherOrReason<D>> {
    Ok(Ok(match kind {
        DispatcherKind::Local => Box::new(Local { core }),
        DispatcherKind::AllGather => Box::new(AllGather { core }),
        DispatcherKind::Hierarchical => Box::new(Hierarchical::join(core)?),
        DispatcherKind::NcclEp
        | DispatcherKind::NcclEpLowLatency
        | DispatcherKind::NvLink
        | DispatcherKind::NvLinkLowLatency => {
            return D::library_dispatcher(kind, core, source);
        }
        DispatcherKind::AllToAll | DispatcherKind::Auto => Box::new(AllToAll { core }),
    }))
}

/// The first of the device's preferred dispatchers that every rank can have.
pub(super) fn automatic<D: LibraryDispatchers>(
    mut core: DispatcherState<D>,
    source: &'static str,
) -> Result<SelectedDispatcher<D>> {
    let (ranks, tokens) = (core.ranks(), core.config.max_tokens_per_rank);
    let table = format!("preferred for {ranks} ranks of up to {tokens} tokens");
    let mut refusal: Option<(DispatcherKind, Error)> = None;
    for kind in &candidates(D::preferred_dispatchers(&core.config, ranks), core.config.in_k_order) {
        match of_kind(*kind, core, source)? {
            Ok(dispatcher) => {
                let reason = match (refusal, kind) {
                    (Some((better, refusal)), _) => format!("next to {better}, which cannot be had: {refusal}"),
                    (None, DispatcherKind::NcclEp | DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency) => {
                        format!("{table}, and its checks pass on every rank")
                    }
                    (None, _) => table,
                };
                return Ok((dispatcher, reason));
            }
            Err(refused) => {
                let error;
                (core, error) = *refused;
                refusal = Some((*kind, error));
            }
        }
    }
    // No table ends with a library's.
    Ok((Box::new(AllToAll { core }), table))
}

/// Those of a device's dispatchers whose sums are in the order that the group asks for.
pub(super) fn candidates(of_device: &[DispatcherKind], in_k_order: bool) -> Vec<DispatcherKind> {
    of_device.iter().copied().filter(|kind| !in_k_order || kind.may_sum_in_k_order()).collect()
}

/// A library's dispatcher, or the state it was to have and the reason why not, the same on all ranks.
pub type DispatcherOrReason<D> = std::result::Result<Box<dyn TokenDispatcher<D>>, Box<(DispatcherState<D>, Error)>>;

/// A device's dispatchers: which `Auto` takes, and those that not every device has: NVLink's and, where it is built in, NCCL
/// EP's for GPUs.
pub trait LibraryDispatchers: Kernels {
    /// The dispatchers that [`DispatcherKind::Auto`] takes the first of that can be had, for two ranks or more. The same on
    /// all ranks, as it depends on what they have compared.
    #[doc(hidden)]
    fn preferred_dispatchers(_config: &GroupConfig, _ranks: usize) -> &'static [DispatcherKind] {
        &[DispatcherKind::AllToAll]
    }

    /// The one of this kind; a device without any gives the reason, which names `source`: what
    /// has asked, the field or the variable.
    ///
    /// # Errors
    /// The ranks could not be asked.
    #[doc(hidden)]
    fn library_dispatcher(
        kind: DispatcherKind,
        core: DispatcherState<Self>,
        source: &'static str,
    ) -> Result<DispatcherOrReason<Self>> {
        let reason = no_library(type_name::<Self>(), kind, source);
        Ok(Err(Box::new((core, reason))))
    }
}

/// Why a device has no library's dispatcher.
fn no_library(device: &str, kind: DispatcherKind, source: &'static str) -> Error {
    let device = device.rsplit("::").next().unwrap_or_default();
    if matches!(kind, DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency) {
        let expected = format!("one that this group can have ({kind} is for ranks on GPUs)");
        return Error::invalid(CALL, source, expected, format!("{kind} on the device {device}"));
    }
    if source != DISPATCHER_VARIABLE {
        return NcclEpError::Communicator { found: format!("one of the device {device}") }.into();
    }
    let expected = "one that this group can have (NCCL EP needs the feature nccl-ep and NCCL's communicator)";
    Error::invalid(CALL, source, expected, format!("NCCL EP on the device {device}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_library_names_what_has_asked() {
        let text = |kind| no_library("moebius::cpu::Cpu", kind, DISPATCHER_VARIABLE).to_string();
        for (kind, needs) in [(DispatcherKind::NcclEp, "nccl-ep"), (DispatcherKind::NvLink, "GPUs")] {
            let text = text(kind);
            assert!(text.contains("MOEBIUS_EP") && text.contains(needs) && text.contains("device Cpu"), "{text}");
        }
    }

    #[test]
    fn nvlink_is_named_by_the_variable_too_where_sums_return_quantized() {
        let quantized = |kind: DispatcherKind| crate::ep::ReturnFormat::Mxfp8.check(CALL, kind, false).is_ok();
        let by_variable = named(DispatcherKind::Auto, Some(OsStr::new("nvlink")));
        assert!(by_variable.is_ok_and(quantized));
        assert!(!quantized(DispatcherKind::Auto));
    }

    #[test]
    fn auto_takes_what_adds_in_the_order_that_is_asked_for() {
        use DispatcherKind::{AllGather, AllToAll, NcclEp, NvLink, NvLinkLowLatency};
        for all in [&[NvLinkLowLatency, NvLink, AllGather][..], &[NcclEp, AllToAll], &[AllGather]] {
            assert_eq!(candidates(all, false), all);
        }
        assert_eq!(candidates(&[NvLinkLowLatency, NvLink, AllGather], true), [NvLink]);
        assert_eq!(candidates(&[NcclEp, AllToAll], true), [AllToAll]);
        assert_eq!(candidates(&[NcclEp, AllGather], true), [], "all-to-all, which any group can have");
    }

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
