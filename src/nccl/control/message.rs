//! The message between processes, of one fixed size, little-endian, unused bytes zero:
//!
//! ```text
//! magic 8 | kind 4 | rank 4 | communicator 8 | number 8 | text 160          = 192 bytes
//! ```

use crate::nccl::control::call_descriptor::{CallDescriptor, TEXT, get, put};

pub(in crate::nccl) const BYTES: usize = 192;
/// The last byte is the version.
const MAGIC: [u8; 8] = *b"mb-note\x02";

/// Message of one rank to the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nccl) struct ControlMessage {
    /// Whom it is about, a rank of the world.
    pub(in crate::nccl) rank: u32,
    pub(in crate::nccl) kind: MessageKind,
}

/// About which communicator, and the number of its collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nccl) struct CollectiveId {
    pub(in crate::nccl) communicator: u64,
    pub(in crate::nccl) number: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nccl) enum MessageKind {
    /// Whether it compares every collective with the others before it.
    Checked(bool),
    /// Is about to make this collective.
    Call(CollectiveId, CallDescriptor),
    /// Fails in this collective.
    Refused(CollectiveId, String),
    /// Takes part in none after this.
    Left(CollectiveId),
    /// The same, and has aborted the communicator.
    Aborted(CollectiveId),
    /// Is gone, without a word.
    Lost,
    /// Closes its connection, in order.
    Bye,
}

impl ControlMessage {
    pub(in crate::nccl) fn encode(&self) -> [u8; BYTES] {
        let none = CollectiveId { communicator: 0, number: 0 };
        let mut text = [0; TEXT];
        let (code, of) = match &self.kind {
            MessageKind::Refused(of, reason) => {
                put(&mut text, reason);
                (1, *of)
            }
            MessageKind::Left(of) => (2, *of),
            MessageKind::Aborted(of) => (3, *of),
            MessageKind::Lost => (4, none),
            MessageKind::Bye => (5, none),
            MessageKind::Checked(checked) => (6, CollectiveId { number: u64::from(*checked), ..none }),
            MessageKind::Call(of, call) => {
                text = call.encode();
                (7, *of)
            }
        };
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(code));
        bytes[12..16].copy_from_slice(&self.rank.to_le_bytes());
        bytes[16..24].copy_from_slice(&of.communicator.to_le_bytes());
        bytes[24..32].copy_from_slice(&of.number.to_le_bytes());
        bytes[32..].copy_from_slice(&text);
        bytes
    }

    pub(in crate::nccl) fn parse(bytes: &[u8; BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let of = CollectiveId { communicator: word(16), number: word(24) };
        let text = &bytes[32..];
        let kind = match word(8) as u32 {
            1 => MessageKind::Refused(of, get(text)?),
            2 => MessageKind::Left(of),
            3 => MessageKind::Aborted(of),
            4 => MessageKind::Lost,
            5 => MessageKind::Bye,
            6 => MessageKind::Checked(of.number != 0),
            7 => MessageKind::Call(of, CallDescriptor::parse(text.try_into().ok()?)?),
            _ => return None,
        };
        let message = Self { rank: (word(8) >> 32) as u32, kind };
        // One form for each message: anything else set shows a peer that is not ours.
        (message.encode() == *bytes).then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_return() {
        let of = CollectiveId { communicator: 0x0102_0304_0506_0708, number: u64::MAX };
        for kind in [
            MessageKind::Refused(of, "no".into()),
            MessageKind::Left(of),
            MessageKind::Aborted(of),
            MessageKind::Lost,
            MessageKind::Bye,
        ] {
            let message = ControlMessage { rank: 0xa1b2_c3d4, kind };
            assert_eq!(ControlMessage::parse(&message.encode()), Some(message));
        }
        let long = ControlMessage { rank: 1, kind: MessageKind::Refused(of, "é".repeat(100)) };
        let Some(ControlMessage { kind: MessageKind::Refused(_, text), .. }) = ControlMessage::parse(&long.encode())
        else {
            panic!()
        };
        assert_eq!(text, "é".repeat(80));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: proptest::test_runner::RngSeed::Fixed(7),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        /// Whatever comes is refused or means what it says.
        #[test]
        fn any_bytes(mut bytes in prop::collection::vec(any::<u8>(), BYTES), real in any::<bool>(), kind in 0..9u8) {
            if real {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..12].copy_from_slice(&[kind, 0, 0, 0]);
                // A call has small numbers, and texts; the others have zeros here.
                bytes[if kind == 7 { 56 } else { 32 }..].fill(0);
                bytes[32..40].iter_mut().for_each(|byte| *byte %= 8);
                bytes[39] = 0;
            }
            let bytes: [u8; BYTES] = bytes.try_into().unwrap();
            if let Some(message) = ControlMessage::parse(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
