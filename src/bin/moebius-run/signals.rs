//! Signals as events: blocked, and picked up where the launcher waits, so that there are no handlers.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// Passed to the ranks.
const PASSED: [i32; 6] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// Those of them that ask a job to end.
pub const ENDS: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

pub struct Signals {
    waited_for: libc::sigset_t,
    before: libc::sigset_t,
}

pub enum WakeReason {
    /// To be passed on.
    Signal(i32),
    /// A child may have ended, or the time is over.
    Look,
}

impl Signals {
    /// Blocks them in this thread and those it starts. What this process was started to ignore (`nohup`) stays so.
    pub fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: plain calls on memory of the right type; `sigemptyset` and `pthread_sigmask` fill the sets before
        // they are read. SIGCHLD's default disposition is no handler; it keeps children to be waited for.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            for signal in PASSED {
                let mut action = MaybeUninit::<libc::sigaction>::zeroed();
                libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
                if action.assume_init().sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(set.as_mut_ptr(), signal);
                }
            }
            match libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr()) {
                0 => Ok(Self { waited_for: set.assume_init(), before: before.assume_init() }),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// The mask from before: a child's.
    pub fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// Waits for the next event.
    pub fn next(&self, timeout: Duration) -> WakeReason {
        let time = libc::timespec {
            tv_sec: timeout.as_secs().min(3600) as libc::time_t,
            tv_nsec: timeout.subsec_nanos() as libc::c_long,
        };
        // SAFETY: both point to initialized values that outlive the call; no information is asked for.
        let signal = unsafe { libc::sigtimedwait(&self.waited_for, std::ptr::null_mut(), &time) };
        if PASSED.contains(&signal) { WakeReason::Signal(signal) } else { WakeReason::Look }
    }
}
