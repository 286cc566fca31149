//! Sharded weights on the CPU.

use crate::dtype::DType;
use crate::error::Result;
use crate::etp::{ShardDevice, Shares};
use crate::tensor::{Tensor, TensorMut};

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

    fn page_locked(&self, dtype: DType, dims: &[usize], fill: &mut dyn FnMut(&mut [u8])) -> Result<Tensor<Self>> {
        let mut tensor = Tensor::zeros(self, dtype, dims)?;
        fill(tensor.as_bytes_mut());
        Ok(tensor)
    }
}
