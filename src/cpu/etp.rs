//! Sharded weights on the CPU.

use crate::error::Result;
use crate::etp::{ShardDevice, Shares};
use crate::tensor::TensorMut;

use super::{Cpu, add_pairwise};

impl ShardDevice for Cpu {
    fn add_shares(&self, shares: Shares<'_, Cpu>, main: TensorMut<'_, Cpu>) -> Result<()> {
        shares.parts(&main)?;
        let (dtype, scale) = (shares.own.dtype(), shares.scale);
        let mut parts: Vec<&[u8]> = shares.others.data().chunks_exact(main.count() * dtype.size()).collect();
        parts.insert(shares.rank, shares.own.data());
        add_pairwise(dtype, &parts, scale, shares.first, main.into_data());
        Ok(())
    }
}
