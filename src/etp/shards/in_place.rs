//! A rank's shard in its place of what is gathered, for gathers by copy engines.
//!
//! Copy engines bring the other ranks' shards beside the computation. But within a GPU the driver copies with a kernel,
//! whatever it is asked for (CUDA 13.0), which finds no SM beside a kernel that fills the GPU: enqueued on the gathers'
//! stream it would wait for the end of that kernel, the gathers behind it too, and then hold up the next. So the
//! computation copies, in its own order, between two kernels.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use crate::etp::ShardDevice;
use crate::etp::shards::source::ShardSource;

const CALL: &str = "etp gather";

/// Whether `shard` is a block of `into`, which has one for each of `ranks`.
pub(in crate::etp) fn fits<D: Device>(shard: &TensorRef<'_, D>, into: &TensorMut<'_, D>, ranks: usize) -> Result<()> {
    let mut expected = into.dims().to_vec();
    if let Some(rows) = expected.first_mut() {
        *rows /= ranks.max(1);
    }
    Error::check_shape(CALL, "shard", &expected, shard.dims())?;
    Error::check_dtype(CALL, "shard", into.dtype(), shard.dtype())
}

/// Copies block `rank` of `into`.
pub(in crate::etp) fn place<D: Device>(
    device: &D,
    rank: usize,
    block: TensorRef<'_, D>,
    into: TensorMut<'_, D>,
) -> Result<()> {
    let bytes = D::len(block.data());
    let at = rank * bytes..(rank + 1) * bytes;
    let into = into.into_data();
    if at.end > D::len_mut(&into) {
        return Err(Error::invalid(CALL, "shard", "a block of what is gathered", format!("{bytes} bytes")));
    }
    device.copy(block.data(), D::slice_mut(into, at))
}

/// The same of a shard as it is, on the computation's device.
pub(in crate::etp) fn place_plain<D: ShardDevice>(
    device: &D,
    (rank, ranks): (usize, usize),
    shard: &dyn ShardSource<D>,
    mut into: TensorMut<'_, D>,
) -> Result<()> {
    shard.read(&mut |shard| {
        fits(&shard, &into, ranks)?;
        place(device, rank, shard, into.reborrow())
    })
}
