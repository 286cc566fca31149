//! Collectives of all ranks beside the layers' own.

use moebius::TensorMut;
use moebius::candle::DeviceGroup;
use moebius::comm::{Communicator, ReduceOp, Tag};
use moebius::cpu::{Cpu, ThreadComm};

use crate::Failure;
use crate::rank_results;
use crate::ranks::{gradients, sum_over_ranks};

/// All ranks.
pub enum World {
    /// The layers' group is of all ranks.
    Group(DeviceGroup),
    /// It is not.
    Threads(ThreadComm),
    /// Nor is it on GPUs.
    #[cfg(feature = "nccl")]
    Gpus(moebius::nccl::NcclComm),
}

impl World {
    /// Sums values over the ranks, in rank order, so that all ranks get the same bits.
    pub fn sum(&mut self, step: usize, mut flat: Vec<f32>) -> Result<Vec<f32>, Failure> {
        let group = match self {
            World::Group(group) => group,
            World::Threads(comm) => {
                let dims = [flat.len()];
                let values = TensorMut::<Cpu>::from_slice(&mut flat, &dims)?;
                comm.all_reduce(gradients(step), ReduceOp::Sum, values)?;
                return Ok(flat);
            }
            #[cfg(feature = "nccl")]
            World::Gpus(comm) => return gpus::sum(&comm.cuda().clone(), comm, step, flat),
        };
        if let Some(group) = group.on::<Cpu>() {
            sum_over_ranks(group, step, &mut flat)?;
            return Ok(flat);
        }
        #[cfg(feature = "nccl")]
        if let Some(group) = group.on::<moebius::cuda::Cuda>() {
            let mut group = group.lock();
            let cuda = group.device().clone();
            return gpus::sum(&cuda, group.dispatcher().communicator(), step, flat);
        }
        Ok(flat)
    }

    /// Bytes that every rank tells, in rank order.
    pub fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        match self {
            World::Group(group) => rank_results::gather(group, tag, own),
            World::Threads(comm) => rank_results::gather_over(&Cpu::new(), comm, tag, own),
            #[cfg(feature = "nccl")]
            World::Gpus(comm) => {
                let cuda = comm.cuda().clone();
                rank_results::gather_over(&cuda, comm, tag, own)
            }
        }
    }
}

#[cfg(feature = "nccl")]
mod gpus {
    use moebius::Tensor;
    use moebius::comm::{Communicator, ReduceOp};
    use moebius::cuda::Cuda;

    use crate::Failure;
    use crate::ranks::gradients;

    pub fn sum(
        cuda: &Cuda,
        comm: &mut dyn Communicator<Cuda>,
        step: usize,
        flat: Vec<f32>,
    ) -> Result<Vec<f32>, Failure> {
        let count = flat.len();
        let mut values = Tensor::from_vec(flat, &[count])?.to(cuda)?;
        comm.all_reduce(gradients(step), ReduceOp::Sum, values.view_mut())?;
        Ok(cuda.to_host(values.view())?.as_slice::<f32>()?.to_vec())
    }
}
