//! stub
use super::Cpu;
use crate::error::Result;
use crate::kernels::*;
pub(super) fn up(_call: Up<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn down(_call: Down<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn down_bwd(_call: DownBwd<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn up_dgrad(_call: UpDgrad<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn wgrad(_call: Wgrad<'_, Cpu>) -> Result<()> {
    todo!()
}
