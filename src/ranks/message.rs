//! The two messages of the bootstrap, each of one fixed size, little-endian, unused bytes zero.
//!
//! ```text
//! hello, to rank 0:  magic 8 | token 32 | round 4 | world 4 | rank 4 | zero 12          = 64 bytes
//! reply, from it:    magic 8 | status 4 | detail 4 | body 128                           = 144 bytes
//! ```
//!
//! The body is the id, or what a failure has to say: a bit for each missing rank below 1024, or text.

use super::token::{JobToken, TOKEN_BYTES};
use crate::error::Refusal;

/// Id that a communicator is made from (NCCL's `ncclUniqueId`); opaque here.
pub type UniqueId = [u8; 128];

pub(super) const HELLO_BYTES: usize = 64;
pub(super) const REPLY_BYTES: usize = 144;
/// The last byte is the version.
const MAGIC: [u8; 8] = *b"moebius\x01";

/// First and only message of a rank to rank 0.
#[derive(Debug, Clone)]
pub(super) struct Hello {
    pub token: JobToken,
    pub round: u32,
    pub world: u32,
    pub rank: u32,
}

impl Hello {
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..40].copy_from_slice(self.token.bytes());
        bytes[40..44].copy_from_slice(&self.round.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.world.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.rank.to_le_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().map_err(|_| "not 64 bytes")?;
        check_magic(bytes)?;
        let mut token = [0; TOKEN_BYTES];
        token.copy_from_slice(&bytes[8..40]);
        if bytes[52..].iter().any(|byte| *byte != 0) {
            return Err("unused bytes are not zero");
        }
        let token = JobToken::from_bytes(token);
        Ok(Self { token, round: word(bytes, 40), world: word(bytes, 44), rank: word(bytes, 48) })
    }
}

/// Rank 0's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// All ranks are there; the id.
    Id(UniqueId),
    Refused(Refusal),
    /// Ranks did not come: how many, and a bit for each of the first 1024.
    GaveUp {
        count: u32,
        missing: [u8; 128],
    },
    /// Rank 0 failed: the start of its error, UTF-8.
    Failed(String),
}

impl Reply {
    pub fn gave_up(missing: &[usize]) -> Self {
        let mut bits = [0; 128];
        for rank in missing.iter().filter(|rank| **rank < 1024) {
            bits[rank / 8] |= 1 << (rank % 8);
        }
        Reply::GaveUp { count: missing.len() as u32, missing: bits }
    }

    pub fn failed(reason: &str) -> Self {
        // The mark of the body's end cannot be in its text.
        let mut text = reason.replace('\0', " ");
        while text.len() > 128 {
            text.pop();
        }
        Reply::Failed(text)
    }

    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        let (status, detail) = match self {
            Reply::Id(id) => {
                bytes[16..].copy_from_slice(id);
                (0, 0)
            }
            Reply::Refused(Refusal::Malformed) => (1, 0),
            Reply::Refused(Refusal::JobToken) => (2, 0),
            Reply::Refused(Refusal::Round(round)) => (3, *round),
            Reply::Refused(Refusal::World(world)) => (4, *world),
            Reply::Refused(Refusal::OutOfRange(rank)) => (5, *rank),
            Reply::Refused(Refusal::Duplicate(rank)) => (6, *rank),
            Reply::GaveUp { count, missing } => {
                bytes[16..].copy_from_slice(missing);
                (7, *count)
            }
            Reply::Failed(reason) => {
                bytes[16..16 + reason.len()].copy_from_slice(reason.as_bytes());
                (8, 0)
            }
        };
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(status));
        bytes[12..16].copy_from_slice(&detail.to_le_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; REPLY_BYTES] = bytes.try_into().map_err(|_| "not 144 bytes")?;
        check_magic(bytes)?;
        let detail = word(bytes, 12);
        let mut body = [0; 128];
        body.copy_from_slice(&bytes[16..]);
        let reply = match word(bytes, 8) {
            0 => Reply::Id(body),
            1 => Reply::Refused(Refusal::Malformed),
            2 => Reply::Refused(Refusal::JobToken),
            3 => Reply::Refused(Refusal::Round(detail)),
            4 => Reply::Refused(Refusal::World(detail)),
            5 => Reply::Refused(Refusal::OutOfRange(detail)),
            6 => Reply::Refused(Refusal::Duplicate(detail)),
            7 => Reply::GaveUp { count: detail, missing: body },
            8 => {
                let length = body.iter().position(|byte| *byte == 0).unwrap_or(body.len());
                let text = str::from_utf8(&body[..length]).map_err(|_| "its reason is not UTF-8")?;
                Reply::Failed(text.to_string())
            }
            _ => return Err("unknown status"),
        };
        // One form for each message: whatever else is set in an unused place shows a peer that is not ours.
        if reply.encode() == *bytes { Ok(reply) } else { Err("unused bytes are not zero") }
    }

    /// The ranks whose bit is set.
    pub fn ranks(bits: &[u8; 128]) -> Vec<usize> {
        (0..1024).filter(|rank| bits[rank / 8] >> (rank % 8) & 1 == 1).collect()
    }
}

fn check_magic(bytes: &[u8]) -> Result<(), &'static str> {
    match bytes.get(..8) {
        Some(magic) if magic == MAGIC => Ok(()),
        Some(magic) if magic[..7] == MAGIC[..7] => Err("another version"),
        _ => Err("no magic number"),
    }
}

/// The `u32` at `at`, which every caller has inside the fixed size.
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_returns() {
        let token = JobToken::random().unwrap();
        let hello = Hello { token: token.clone(), round: 1, world: 0x0102_0304, rank: u32::MAX };
        let bytes = hello.encode();
        let back = Hello::parse(&bytes).unwrap();
        assert!(back.token.matches(&token));
        assert_eq!((back.round, back.world, back.rank), (1, 0x0102_0304, u32::MAX));
        assert_eq!(Hello::parse(&bytes[..63]).unwrap_err(), "not 64 bytes");
        for at in (0..8).chain(52..64) {
            let mut bad = bytes;
            bad[at] ^= 0x40;
            assert!(Hello::parse(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn replies_return() {
        let all = [
            Reply::Id([0xa5; 128]),
            Reply::Refused(Refusal::Malformed),
            Reply::Refused(Refusal::JobToken),
            Reply::Refused(Refusal::Round(7)),
            Reply::Refused(Refusal::World(8)),
            Reply::Refused(Refusal::OutOfRange(9)),
            Reply::Refused(Refusal::Duplicate(10)),
            Reply::gave_up(&[1, 9, 1023, 1024]),
            Reply::failed("nothing to load"),
            Reply::failed(""),
        ];
        for reply in &all {
            assert_eq!(Reply::parse(&reply.encode()).as_ref(), Ok(reply));
        }
        let Reply::GaveUp { count, missing } = &all[7] else { panic!() };
        assert_eq!((*count, Reply::ranks(missing)), (4, vec![1, 9, 1023]));
        // Cut at a character, not inside it; the text's end is never taken for more.
        assert_eq!(Reply::failed(&"é".repeat(100)), Reply::Failed("é".repeat(64)));
        assert_eq!(Reply::failed(&format!("{}é", "x".repeat(127))), Reply::Failed("x".repeat(127)));
        assert_eq!(Reply::failed("a\0b"), Reply::Failed("a b".to_string()));
        let mut bad = all[2].encode();
        bad[20] = 1;
        assert_eq!(Reply::parse(&bad), Err("unused bytes are not zero"));
    }
}
