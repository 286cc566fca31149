//! Entry points for the fuzz targets: the bootstrap's messages, on bytes. Not part of the interface.

use super::message::{Hello, Reply};

/// Reads bytes that a stranger may send to rank 0; true if they are a hello.
pub fn hello(bytes: &[u8]) -> bool {
    let Ok(hello) = Hello::parse(bytes) else { return false };
    // One form for each message.
    assert_eq!(hello.encode(), bytes, "{hello:?}");
    true
}

/// Reads bytes that a stranger may answer to a rank; true if they are a reply.
pub fn reply(bytes: &[u8]) -> bool {
    let Ok(reply) = Reply::parse(bytes) else { return false };
    assert_eq!(reply.encode(), bytes, "{reply:?}");
    if let Reply::GaveUp { missing, .. } = &reply {
        assert!(Reply::ranks(missing).len() <= 1024);
    }
    true
}
