//! Finding NCCL EP: what is asked for is what is tried, and errors name it. Needs no GPU, but NCCL where a case says
//! so.

use std::process::Command;

use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::nccl::NcclLibrary;
use moebius::nccl_ep::{NCCL_EP_LIBRARY_VARIABLE, NcclEpLibrary};

pub fn cases() -> Vec<(&'static str, fn())> {
    vec![
        ("a_wrong_path_in_the_environment_is_final", a_wrong_path_in_the_environment_is_final),
        ("another_device_is_refused", another_device_is_refused),
    ]
}

/// Set in children that only open the library and say what came of it.
pub const CHILD: &str = "MOEBIUS_TEST_OPENS_NCCL_EP";

/// Work of such a child.
pub fn child() {
    match NcclLibrary::open().map(|nccl| NcclEpLibrary::open(&nccl)) {
        Ok(Ok(library)) => println!("{} {}", library.path(), library.version()),
        Ok(Err(error)) => println!("{error}"),
        Err(error) => println!("{error}"),
    }
}

/// In a process of its own: this one's environment is all threads'. Without NCCL its absence is the error.
fn a_wrong_path_in_the_environment_is_final() {
    let me = std::env::current_exe().expect("this program");
    let out = Command::new(me).env(NCCL_EP_LIBRARY_VARIABLE, "/nowhere/ep").env(CHILD, "1").output().expect("a child");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let named = text.contains("/nowhere/ep (MOEBIUS_NCCL_EP) cannot be loaded");
    let old = text.contains("needs NCCL 2.30.4") || text.contains("libnccl.so.2");
    assert!(named || old, "{text}");
}

fn another_device_is_refused() {
    let config = GroupConfig { dispatcher: DispatcherKind::NcclEp, ..GroupConfig::new(4, 8) };
    let error = Group::single(config).map(|_| ()).map_err(|e| e.to_string());
    assert!(error.as_ref().is_err_and(|e| e.contains("needs a communicator of NCCL on GPUs")), "{error:?}");
}
