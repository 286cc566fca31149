//! Sharded weights on the CPU.

use crate::cpu::{Cpu, add_pairwise};
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::ShardDevice;

impl ShardDevice for Cpu {
    fn add_shares(&self, (): &(), shares: TensorRef<'_, Cpu>, main: TensorMut<'_, Cpu>, scale: f64) -> Result<()> {
        const CALL: &str = "add_shares";
        let dtype = shares.dtype();
        Error::check_dtype(CALL, "main", dtype.accumulator(), main.dtype())?;
        let each = main.count() * dtype.size();
        if !dtype.is_float() || each == 0 || !shares.data().len().is_multiple_of(each) {
            let found = format!("{dtype} {:?} for {:?}", shares.dims(), main.dims());
            return Err(Error::invalid(CALL, "shares", "floating blocks of main's size", found));
        }
        let parts: Vec<&[u8]> = shares.data().chunks_exact(each).collect();
        add_pairwise(dtype, &parts, scale, main.into_data());
        Ok(())
    }

    fn own_stream(&self) {}
}
