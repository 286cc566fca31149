//! Calls between some of the ranks.

use crate::comm::Tag;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use super::NcclComm;
use super::lane::Piece;
use super::notices::Subject;

impl NcclComm {
    /// Sends to one rank, which receives.
    ///
    /// # Errors
    /// As a collective's; the ranks' hosts do not meet for it.
    pub fn send(&mut self, tag: Tag, peer: usize, from: TensorRef<'_, Cuda>) -> Result<()> {
        let piece = Piece { peer, address: from.data().address(), bytes: Cuda::len(from.data()) };
        self.pair("send", tag, &[piece], &[])
    }

    /// Receives what one rank sends.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn recv(&mut self, tag: Tag, peer: usize, to: TensorMut<'_, Cuda>) -> Result<()> {
        let to = to.into_data();
        let piece = Piece { peer, address: to.address(), bytes: Cuda::len_mut(&to) };
        self.pair("recv", tag, &[], &[piece])
    }

    /// Sends to one rank and receives from another at once, as rings do.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn send_recv(
        &mut self,
        tag: Tag,
        (to, from): (usize, usize),
        (send, recv): (TensorRef<'_, Cuda>, TensorMut<'_, Cuda>),
    ) -> Result<()> {
        let recv = recv.into_data();
        let sent = Piece { peer: to, address: send.data().address(), bytes: Cuda::len(send.data()) };
        let received = Piece { peer: from, address: recv.address(), bytes: Cuda::len_mut(&recv) };
        self.pair("send_recv", tag, &[sent], &[received])
    }

    /// Calls between some of the ranks only: they count on nobody else, so they are not in the ranks' common count.
    fn pair(&mut self, operation: &'static str, tag: Tag, sends: &[Piece], receives: &[Piece]) -> Result<()> {
        let subject = self.aside(operation, tag, sends.iter().chain(receives).map(|piece| piece.peer))?;
        // SAFETY: the views have those bytes, and memory they are of is given back in the stream's order.
        self.enqueue(subject, |lane| unsafe { lane.exchange(sends, receives) })
    }

    /// The subject of a call that concerns these peers only.
    pub(super) fn aside(
        &self,
        operation: &'static str,
        tag: Tag,
        mut peers: impl Iterator<Item = usize>,
    ) -> Result<Subject> {
        let (rank, size) = (self.seat.link.rank, self.seat.link.size);
        if let Some(peer) = peers.find(|peer| *peer >= size) {
            return Err(Error::invalid(operation, "peer", format!("a rank below {size}"), peer));
        }
        self.seat.alive()?;
        Ok(Subject { rank, number: self.seat.calls, operation, tag })
    }
}
