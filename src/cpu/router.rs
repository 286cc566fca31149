//! stub
use super::Cpu;
use crate::error::Result;
use crate::kernels::*;
pub(super) fn route(_call: Route<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn route_bwd(_call: RouteBwd<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn aux_sums(_call: AuxSums<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn keep_sum(_call: KeepSum<'_, Cpu>) -> Result<()> {
    todo!()
}
