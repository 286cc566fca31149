//! Connections that are no ranks, on either side. The messages are written by hand, from the layout in
//! `src/ranks/message.rs`.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use moebius::ranks::{Bootstrap, JobToken, RankError};

use super::bootstrap::{ID, Job, LONG, SHORT, failure, spawn, tried};
use super::limits::in_time;

fn hello(token: &JobToken, round: u32, world: u32, rank: u32) -> Vec<u8> {
    let hex = token.to_hex();
    let token = (0..32).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap());
    let mut bytes = b"moebius\x01".to_vec();
    bytes.extend(token);
    for word in [round, world, rank, 0, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Sends bytes; what comes back until the other side closes.
fn talk(job: &Job, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(job.address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // A reset after the answer is as good as its end.
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// Status and detail of a reply.
fn refused(answer: &[u8]) -> (u32, u32) {
    assert_eq!(answer.len(), 144, "{answer:?}");
    assert_eq!(answer[..8], *b"moebius\x01");
    assert!(answer[16..].iter().all(|byte| *byte == 0), "a refusal carries nothing");
    let word = |at: usize| u32::from_le_bytes(answer[at..at + 4].try_into().unwrap());
    (word(8), word(12))
}

#[test]
fn each_refusal() {
    let mut job = Job::new(2, LONG);
    let root = job.serve();
    let token = job.template.token.clone();
    let good = hello(&token, 0, 2, 1);
    let mut other_version = good.clone();
    other_version[7] = 2;
    let mut trailing = good.clone();
    trailing[63] = 1;
    for (bytes, expected) in [
        (vec![b'x'; 64], (1, 0)),
        (other_version, (1, 0)),
        (trailing, (1, 0)),
        (hello(&JobToken::random().unwrap(), 0, 2, 1), (2, 0)),
        // The token is looked at before anything that would tell about the job.
        (hello(&JobToken::random().unwrap(), 9, 9, 9), (2, 0)),
        (hello(&token, 7, 2, 1), (3, 0)),
        (hello(&token, 0, 3, 1), (4, 2)),
        (hello(&token, 0, 2, 2), (5, 2)),
        (hello(&token, 0, 2, u32::MAX), (5, u32::MAX)),
        (hello(&token, 0, 2, 0), (6, 0)),
    ] {
        assert_eq!(refused(&talk(&job, &bytes)), expected, "{bytes:?}");
    }
    // The hand-written hello is a rank's, so it is not refused for its form.
    let answer = talk(&job, &good);
    assert_eq!((&answer[8..16], &answer[16..]), (&[0; 8][..], &ID[..]));
    assert_eq!(root.join().unwrap().unwrap(), ID);
}

#[test]
fn refusals_are_told_of_on_timeout() {
    in_time(SHORT, |short| {
        let mut job = Job::new(2, short);
        let address = job.template.address.clone();
        let root = job.serve();
        let stranger = Bootstrap { rank: 1, token: JobToken::random().unwrap(), ..job.template.clone() };
        let stranger = failure(spawn(stranger));
        let RankError::Missing { missing, refused, .. } = failure(root) else { panic!() };
        assert_eq!(missing, [1]);
        match stranger {
            RankError::Refused { .. } => {}
            // It came when rank 0 had given up.
            RankError::Unreachable { .. } => return None,
            other => panic!("{other}"),
        }
        assert_eq!(refused.len(), 1);
        assert!(refused[0].starts_with("127.0.0.1:") && refused[0].ends_with(": wrong token"), "{refused:?} {address}");
        Some(())
    });
}

/// More silent connections than rank 0 keeps, some of them with half a hello; those that talk too much; and ranks.
#[test]
fn silent_and_loud_ones_hold_up_nobody() {
    let mut job = Job::new(3, LONG);
    let root = job.serve();
    let token = job.template.token.clone();
    let half = &hello(&token, 0, 3, 1)[..63];
    let silent: Vec<TcpStream> = (0..150)
        .map(|i| {
            let mut stream = TcpStream::connect(job.address).unwrap();
            if i % 2 == 0 {
                let _ = stream.write_all(half);
            }
            stream
        })
        .collect();
    let mut loud = TcpStream::connect(job.address).unwrap();
    loud.set_write_timeout(Some(LONG)).unwrap();
    // Rank 0 reads 64 bytes of it at most, then closes.
    let _ = loud.write_all(&vec![7; 4 << 20]);
    let ranks = [job.join(1), job.join(2)];
    for rank in ranks {
        assert_eq!(rank.join().unwrap().unwrap(), ID);
    }
    assert_eq!(root.join().unwrap().unwrap(), ID);
    drop(silent);
}

/// A rank that dies while it waits leaves its place to its successor; one that says more than there is to say loses it.
#[test]
fn a_place_is_freed() {
    let mut job = Job::new(3, LONG);
    let root = job.serve();
    let bytes = hello(&job.template.token, 0, 3, 1);
    for more in [&[][..], b"and more"] {
        let mut first = TcpStream::connect(job.address).unwrap();
        first.write_all(&bytes).unwrap();
        first.write_all(more).unwrap();
        if !more.is_empty() {
            let mut answer = Vec::new();
            first.set_read_timeout(Some(LONG)).unwrap();
            let _ = first.read_to_end(&mut answer);
            assert!(answer.is_empty(), "{answer:?}");
        }
        // Ended for good, whoever else holds it: a process that another test is about to start.
        let _ = first.shutdown(Shutdown::Both);
    }
    let rank = job.join(1);
    assert_eq!(job.join(2).join().unwrap().unwrap(), ID);
    assert_eq!(rank.join().unwrap().unwrap(), ID);
    assert_eq!(root.join().unwrap().unwrap(), ID);
}

/// Answers every connection with `answer`, for as long as the test runs.
fn impostor(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.read_exact(&mut [0; 64]);
            let _ = stream.write_all(answer);
        }
    });
    address
}

#[test]
fn not_rank_0() {
    static NOISE: [u8; 144] = [b'H'; 144];
    let template = Job::new(2, LONG).template;
    let error = failure(spawn(Bootstrap { rank: 1, address: impostor(&NOISE), ..template }));
    assert!(matches!(error, RankError::Message { problem: "no magic number", .. }), "{error}");
    // Closes early, again and again: tried until the time is over.
    let closing = impostor(&NOISE[..99]);
    in_time(SHORT, |short| {
        let template = Job::new(2, short).template;
        let error = failure(spawn(Bootstrap { rank: 1, address: closing.clone(), ..template }));
        let RankError::Unreachable { last, .. } = &error else { panic!("{error}") };
        let in_time = tried(last).filter(|()| !last.contains("not answered"));
        in_time.map(|()| assert!(last.contains("closed without an answer"), "{error}"))
    });
}

/// The listener takes the connection and never says anything.
#[test]
fn silent_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    in_time(SHORT, |short| {
        let job = Bootstrap { rank: 1, address: address.clone(), ..Job::new(2, short).template };
        let error = failure(spawn(job));
        let RankError::Unreachable { last, .. } = &error else { panic!("{error}") };
        tried(last).map(|()| assert!(last.contains("not answered"), "{error}"))
    });
}
