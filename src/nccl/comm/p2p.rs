//! Calls between some of the ranks.

use crate::comm::Tag;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::tensor::{TensorMut, TensorRef};

use crate::nccl::NcclComm;
use crate::nccl::control::peer_events::CollectiveInfo;
use crate::nccl::ffi::enqueue::PeerBuffer;

impl NcclComm {
    /// Sends to one rank, which receives.
    ///
    /// # Errors
    /// As a collective's; the ranks' hosts do not meet for it.
    pub fn send(&mut self, tag: Tag, peer: usize, from: TensorRef<'_, Cuda>) -> Result<()> {
        let piece = PeerBuffer { peer, address: from.data().address(), bytes: Cuda::len(from.data()) };
        self.pair("send", tag, &[piece], &[])
    }

    /// Receives what one rank sends.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn recv(&mut self, tag: Tag, peer: usize, to: TensorMut<'_, Cuda>) -> Result<()> {
        let to = to.into_data();
        let piece = PeerBuffer { peer, address: to.address(), bytes: Cuda::len_mut(&to) };
        self.pair("recv", tag, &[], &[piece])
    }

    /// Sends to the rank `to` and receives from the rank `from` at once, as rings do.
    ///
    /// # Errors
    /// As [`NcclComm::send`].
    pub fn send_recv(
        &mut self,
        tag: Tag,
        to: usize,
        send: TensorRef<'_, Cuda>,
        from: usize,
        recv: TensorMut<'_, Cuda>,
    ) -> Result<()> {
        let recv = recv.into_data();
        let sent = PeerBuffer { peer: to, address: send.data().address(), bytes: Cuda::len(send.data()) };
        let received = PeerBuffer { peer: from, address: recv.address(), bytes: Cuda::len_mut(&recv) };
        self.pair("send_recv", tag, &[sent], &[received])
    }

    /// Calls between some of the ranks only: they count on nobody else, so they are not in the ranks' common count.
    fn pair(&mut self, operation: &'static str, tag: Tag, sends: &[PeerBuffer], receives: &[PeerBuffer]) -> Result<()> {
        let subject = self.aside(operation, tag, sends.iter().chain(receives).map(|piece| piece.peer))?;
        // SAFETY: the views have those bytes, and memory they are of is given back in the stream's order.
        self.enqueue_aside(subject, |comm_stream| unsafe { comm_stream.exchange(sends, receives) })
    }

    /// The subject of a call that concerns these peers only.
    pub(in crate::nccl) fn aside(
        &self,
        operation: &'static str,
        tag: Tag,
        mut peers: impl Iterator<Item = usize>,
    ) -> Result<CollectiveInfo> {
        let (rank, size) = (self.session.comm_handle.rank, self.session.comm_handle.size);
        if let Some(peer) = peers.find(|peer| *peer >= size) {
            return Err(Error::invalid(operation, "peer", format!("a rank below {size}"), peer));
        }
        self.session.check_alive()?;
        Ok(CollectiveInfo { rank, number: self.session.count.calls(), operation, tag })
    }
}
