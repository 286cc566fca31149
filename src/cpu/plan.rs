//! stub
use super::Cpu;
use crate::{ep::*, error::Result};
pub(super) fn plan(_d: &Cpu, _call: PlanRequest<'_, Cpu>) -> Result<Plan<Cpu>> {
    todo!()
}
