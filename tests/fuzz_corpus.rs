//! Replays the fuzz targets' committed corpora with the ordinary toolchain.

use std::path::Path;

use moebius::checkpoint::fuzzing;
use moebius::ranks::fuzzing as messages;

fn replay(target: &str, parse: fn(&[u8]) -> bool) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let (mut accepted, mut refused) = (0, 0);
    for path in &files {
        let bytes = std::fs::read(path).unwrap();
        let ok = parse(&bytes);
        *(if ok { &mut accepted } else { &mut refused }) += 1;
        let name = path.file_name().unwrap().to_string_lossy();
        if name.starts_with("ok-") || name.starts_with("bad-") {
            assert_eq!(ok, name.starts_with("ok-"), "{}", path.display());
        }
        // What a torn write leaves: no prefix may panic either.
        for cut in (0..bytes.len()).step_by(bytes.len() / 64 + 1) {
            parse(&bytes[..cut]);
        }
    }
    println!("{target}: {} files, {accepted} accepted, {refused} refused", files.len());
    assert!(accepted >= 3 && refused >= 8, "{target}: {accepted} accepted, {refused} refused");
}

#[test]
fn header() {
    replay("header", fuzzing::header);
}

#[test]
fn index() {
    replay("index", fuzzing::index);
}

#[test]
fn config() {
    replay("config", fuzzing::config);
}

#[test]
fn hello() {
    replay("hello", messages::hello);
}

#[test]
fn reply() {
    replay("reply", messages::reply);
}
