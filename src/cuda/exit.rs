//! The end of a process that leaves a GPU stuck.
//!
//! NCCL has a CUDA runtime of its own, which unloads its kernels as the process exits; where NCCL was loaded after the
//! driver, that is before the driver's own end, and waits for the GPU: such a process would never end. So when one of
//! its GPUs is stuck it leaves without the handlers that were there before, with its output flushed and its own status.
//! By then everything has been done that Rust does at the end of `main`.

use std::ffi::{c_int, c_void};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

unsafe extern "C" {
    /// glibc's `atexit` that tells the status; the last that is registered is called first.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn ftrylockfile(stream: *mut libc::FILE) -> c_int;
    fn fflush_unlocked(stream: *mut libc::FILE) -> c_int;
    static mut stdout: *mut libc::FILE;
}

/// State that the handler asks for: whose GPU it is, and whether it is stuck.
struct Owned {
    process: u32,
    stuck: Arc<AtomicBool>,
}

/// Has the process's exit end it at once where `stuck` is set by then.
pub(super) fn at_exit_of(stuck: &Arc<AtomicBool>) {
    let owned = Owned { process: process::id(), stuck: Arc::clone(stuck) };
    // Kept for the exit; where nothing can be registered, it is lost memory and no more.
    let argument = Box::into_raw(Box::new(owned)).cast();
    // SAFETY: the function takes what is given here, which stays.
    unsafe { on_exit(exit_if_stuck, argument) };
}

extern "C" fn exit_if_stuck(status: c_int, argument: *mut c_void) {
    // SAFETY: `at_exit_of` gave it away.
    let owned = unsafe { &*argument.cast_const().cast::<Owned>() };
    // A process that was forked off has no part in the GPU, and ends as ever.
    if owned.process == process::id() && owned.stuck.load(Ordering::SeqCst) {
        // SAFETY: C's own stream, used under its lock: a thread that holds it may wait for ever. The last call does not
        // return.
        unsafe {
            let out = stdout;
            if ftrylockfile(out) == 0 {
                fflush_unlocked(out);
            }
            libc::_exit(status)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in a child, and whether its GPU is to be stuck.
    const CHILD: &str = "MOEBIUS_TEST_LEAVES_STUCK";

    extern "C" fn of_a_library() {
        // SAFETY: it does not return. A library that waits for the GPU would not either.
        unsafe { libc::_exit(99) }
    }

    /// The child's status is its own where a GPU is stuck, and nothing else of its end is changed where none is.
    #[test]
    fn a_process_leaves_what_is_stuck() {
        if let Ok(stuck) = std::env::var(CHILD) {
            // SAFETY: a function without arguments.
            unsafe { libc::atexit(of_a_library) };
            let flag = Arc::new(AtomicBool::new(true));
            at_exit_of(&flag);
            flag.store(stuck == "yes", Ordering::SeqCst);
            std::process::exit(7);
        }
        let me = std::env::current_exe().unwrap();
        for (stuck, expected) in [("yes", 7), ("no", 99)] {
            let name = "cuda::exit::tests::a_process_leaves_what_is_stuck";
            let status = Command::new(&me).args(["--exact", name]).env(CHILD, stuck).output().unwrap().status;
            assert_eq!(status.code(), Some(expected), "stuck: {stuck}");
        }
    }
}
