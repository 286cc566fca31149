//! A process that leads the ranks' group and outlives this program by one call: when this program ends without having
//! ended its ranks (`kill -9`), it kills the group, what the ranks have started included.
//!
//! It reads from a pipe whose other end this program alone holds, so the end of this program, however it comes, is the
//! end of the file. As the group's leader it keeps the group's number from belonging to another group.

use std::io::{self, PipeWriter};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

pub struct Guard {
    pid: libc::pid_t,
    /// Open as long as this program runs. Closed on exec, so that no rank holds it.
    _alive: PipeWriter,
}

impl Guard {
    /// Starts it; this process has no other thread yet.
    pub fn start() -> io::Result<Self> {
        let (read, alive) = io::pipe()?;
        // SAFETY: this process has one thread, and the child makes only async-signal-safe calls until it ends.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(io::Error::last_os_error()),
            0 => watch(read.as_raw_fd(), alive.as_raw_fd()),
            _ => {
                // Here too, as either may be first; that the other was is no error.
                // SAFETY: a plain call on a child that has not been reaped.
                unsafe { libc::setpgid(pid, pid) };
                Ok(Self { pid, _alive: alive })
            }
        }
    }

    /// The group's number, its own as long as this has not been reaped.
    pub fn group(&self) -> libc::pid_t {
        self.pid
    }

    /// Reaps it, after the group was killed.
    pub fn reap(self) {
        // SAFETY: a plain call; no status is asked for. The process is this one's child, and killed.
        while unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) } == -1
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

/// The child's part. Signals to the group are the ranks' affair; nobody must wait for a stream that this one holds
/// open.
fn watch(read: i32, alive: i32) -> ! {
    let mut all = MaybeUninit::uninit();
    let mut byte = 0u8;
    // SAFETY: plain calls on memory of the right type; `sigfillset` fills the set before it is read, and `byte` has
    // room for what is read. 0 as a group is this process's own, which `setpgid` has made the ranks'.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        let led = libc::setpgid(0, 0) == 0;
        libc::close(alive);
        (0..3).for_each(|stream| {
            libc::close(stream);
        });
        while libc::read(read, (&raw mut byte).cast(), 1) == -1 && *libc::__errno_location() == libc::EINTR {}
        if led {
            libc::kill(0, libc::SIGKILL);
        }
        libc::_exit(0)
    }
}
