//! Finding NCCL: what is asked for is what is tried, and errors name it. Needs no GPU.

use std::process::Command;

use moebius::Error;
use moebius::nccl::{LIBRARY_VARIABLE, NcclError, NcclLibrary};

pub fn cases() -> Vec<(&'static str, fn())> {
    vec![
        ("a_missing_file_is_named", a_missing_file_is_named),
        ("another_library_is_refused", another_library_is_refused),
        ("a_wrong_path_in_the_environment_is_final", a_wrong_path_in_the_environment_is_final),
    ]
}

fn error(opened: moebius::Result<NcclLibrary>) -> NcclError {
    match opened {
        Err(Error::Nccl(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn a_missing_file_is_named() {
    match error(NcclLibrary::at("/nowhere/libnccl.so.2")) {
        NcclError::Load { path, message, .. } => {
            assert_eq!(path, "/nowhere/libnccl.so.2");
            assert!(message.contains("No such file"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

fn another_library_is_refused() {
    match error(NcclLibrary::at("libm.so.6")) {
        NcclError::Symbol { path, symbol, .. } => assert_eq!((&path[..], symbol), ("libm.so.6", "ncclGetVersion")),
        other => panic!("{other:?}"),
    }
}

/// In a process of its own: this one's environment is all threads'.
fn a_wrong_path_in_the_environment_is_final() {
    let me = std::env::current_exe().expect("this program");
    let out = Command::new(me).env(LIBRARY_VARIABLE, "/nowhere/nccl").env(CHILD, "1").output().expect("a child");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("/nowhere/nccl (MOEBIUS_NCCL) cannot be loaded"), "{text}");
}

/// Set in children that only open the library and say what came of it.
pub const CHILD: &str = "MOEBIUS_TEST_OPENS_NCCL";

/// Work of such a child.
pub fn child() {
    match NcclLibrary::open() {
        Ok(library) => println!("{} {}", library.path(), library.version()),
        Err(error) => println!("{error}"),
    }
}
