//! A routing's plan: the choices that it is made of, the slots and messages that follow from them, and the records that
//! ranks exchange to make it. Descriptions alone: devices make plans ([`Kernels`](crate::kernels::Kernels)),
//! dispatchers move rows by them (`moebius::ep`, where these types are public).

pub(crate) mod deferred_errors;
mod request;
pub(crate) mod routing_record;
mod segments;
mod spec;
mod stats;

pub(crate) use request::waits;
pub use request::{
    DevicePlan, HostCounts, HostPlanRequest, MessageMaps, Plan, PlanFor, PlanIds, PlanRecords, PlanRequest, RecordIds,
    RowOrder, ZoneMaps,
};
pub use segments::Segments;
pub use spec::{Capacity, DispatchSpec, Origin, Overflow, Reporting};
pub use stats::Stats;
