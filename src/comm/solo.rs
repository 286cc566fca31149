//! A group of one rank, on any device.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::{Communicator, Exchange, ReduceOp, Tag, check_blocks};

/// The communicator of a rank that is alone: what it sends is what it receives.
#[derive(Debug)]
pub struct Solo<D: Device> {
    device: D,
    calls: u64,
}

impl<D: Device> Solo<D> {
    /// A communicator of one rank.
    pub fn new(device: D) -> Self {
        Self { device, calls: 0 }
    }

    fn copy(&mut self, call: &'static str, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.calls += 1;
        Error::check_dtype(call, "recv", send.dtype(), recv.dtype())?;
        Error::check_shape(call, "recv", &[send.count()], &[recv.count()])?;
        self.device.copy(send.data(), recv.into_data())
    }
}

impl<D: Device> Communicator<D> for Solo<D> {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn calls(&self) -> u64 {
        self.calls
    }

    fn device(&self) -> Option<&D> {
        Some(&self.device)
    }

    fn all_gather(&mut self, _: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.copy("all_gather", send, recv)
    }

    fn reduce_scatter(&mut self, _: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        self.copy("reduce_scatter", send, recv)
    }

    fn all_reduce(&mut self, _: Tag, _: ReduceOp, _: TensorMut<'_, D>) -> Result<()> {
        self.calls += 1;
        Ok(())
    }

    fn all_to_all_v(&mut self, _: Tag, exchange: Exchange<'_, D>) -> Result<()> {
        exchange.check(1)?;
        self.copy("all_to_all_v", exchange.send, exchange.recv)
    }

    fn exchange_blocks(&mut self, _: Tag, send: TensorRef<'_, D>, recv: TensorMut<'_, D>) -> Result<()> {
        check_blocks(1, &send, &recv)?;
        self.calls += 1;
        Ok(())
    }

    fn broadcast(&mut self, _: Tag, root: usize, _: TensorMut<'_, D>) -> Result<()> {
        self.calls += 1;
        match root {
            0 => Ok(()),
            _ => Err(Error::invalid("broadcast", "root", "0 (the only rank)", root)),
        }
    }

    fn barrier(&mut self, _: Tag) -> Result<()> {
        self.calls += 1;
        Ok(())
    }

    fn refuse(&mut self, _: Tag, _: &str) -> Result<()> {
        self.calls += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Op;
    use super::*;
    use crate::cpu::Cpu;

    /// As between ranks: bytes alone are not enough.
    #[test]
    fn another_type_of_as_many_bytes_is_refused() -> Result<()> {
        let (tag, mut solo) = (Tag { layer: 0, op: Op::User, sequence: 0 }, Solo::new(Cpu::new()));
        let (send, mut recv) = ([1f64], [0f32; 2]);
        let refused =
            solo.all_gather(tag, TensorRef::from_slice(&send, &[1])?, TensorMut::from_slice(&mut recv, &[2])?);
        assert!(matches!(refused, Err(Error::DType { .. })), "{refused:?}");
        let mut recv = [0f64];
        solo.all_gather(tag, TensorRef::from_slice(&send, &[1])?, TensorMut::from_slice(&mut recv, &[1])?)?;
        assert_eq!(recv, send);
        Ok(())
    }
}
