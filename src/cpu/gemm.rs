//! stub
use super::Cpu;
use crate::error::Result;
use crate::kernels::*;
pub(super) fn linear(_call: Linear<'_, Cpu>) -> Result<()> {
    todo!()
}
pub(super) fn linear_bwd(_call: LinearBwd<'_, Cpu>) -> Result<()> {
    todo!()
}
