//! Entry points for the fuzz targets: the bootstrap's messages, on bytes. Not part of the interface.

use super::message::{Hello, Reply};

/// What a stranger may send to rank 0; true if it is a hello.
pub fn hello(bytes: &[u8]) -> bool {
    let Ok(hello) = Hello::parse(bytes) else { return false };
    // One form for each message.
    assert_eq!(hello.encode(), bytes, "{hello:?}");
    true
}

/// What a stranger may answer to a rank; true if it is a reply.
pub fn reply(bytes: &[u8]) -> bool {
    let Ok(reply) = Reply::parse(bytes) else { return false };
    assert_eq!(reply.encode(), bytes, "{reply:?}");
    if let Reply::GaveUp { missing, .. } = &reply {
        assert!(Reply::ranks(missing).len() <= 1024);
    }
    true
}
