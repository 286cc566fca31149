//! Collectives of all ranks beside the layers' own.

use moebius::candle::DeviceGroup;
use moebius::comm::{Communicator, ReduceOp, Tag, ThreadComm};
use moebius::cpu::Cpu;
use moebius::{TensorMut, TensorRef};

use crate::Failure;
use crate::ranks::{gradients, sum_over_ranks};

/// All ranks.
pub enum World {
    /// The layers' group is of all ranks.
    Group(DeviceGroup),
    /// It is not.
    Threads(ThreadComm),
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
        };
        if let Some(group) = group.on::<Cpu>() {
            sum_over_ranks(group, step, &mut flat)?;
            return Ok(flat);
        }
        #[cfg(feature = "nccl")]
        if let Some(group) = group.on::<moebius::cuda::Cuda>() {
            let mut group = group.lock();
            let (cuda, count) = (group.device().clone(), flat.len());
            let mut values = cuda.tensor(&moebius::Tensor::from_vec(flat, &[count])?)?;
            group.dispatcher().communicator().all_reduce(gradients(step), ReduceOp::Sum, values.view_mut())?;
            return Ok(cuda.to_host(values.view())?.as_slice::<f32>()?.to_vec());
        }
        Ok(flat)
    }

    /// Every rank's values, in rank order; on the CPU, and on a GPU alone.
    pub fn gather(&mut self, tag: Tag, own: &[f64]) -> Result<Vec<f64>, Failure> {
        let ranks = match self {
            World::Group(group) => group.ranks(),
            World::Threads(comm) => Communicator::<Cpu>::size(comm),
        };
        if ranks == 1 {
            return Ok(own.to_vec());
        }
        let mut all = vec![0f64; own.len() * ranks];
        let dims = [all.len()];
        let send = TensorRef::<Cpu>::from_slice(own, &[own.len()])?;
        let recv = TensorMut::<Cpu>::from_slice(&mut all, &dims)?;
        match self {
            World::Threads(comm) => comm.all_gather(tag, send, recv)?,
            World::Group(group) => match group.on::<Cpu>() {
                Some(group) => group.lock().dispatcher().communicator().all_gather(tag, send, recv)?,
                None => return Err("values are gathered over ranks on the CPU only".into()),
            },
        }
        Ok(all)
    }
}
