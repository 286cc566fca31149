//! The ranks as processes of one group.
//!
//! A [`Guard`] leads the group. Neither it nor a rank is reaped before all have ended: until then neither the group's
//! number nor a rank's can come to belong to another process, so a signal never reaches a stranger.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use super::guard::Guard;

pub struct RankGroup {
    ranks: Vec<RankProcess>,
    /// Until the group has been killed.
    guard: Option<Guard>,
}

pub struct RankProcess {
    pub rank: usize,
    pub child: Child,
    ended: Option<Ended>,
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Status(i32),
    Signal(i32),
}

impl Ended {
    /// As a shell reports it.
    pub fn status(self) -> u8 {
        match self {
            Ended::Status(status) => status as u8,
            Ended::Signal(signal) => (128 + signal) as u8,
        }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Status(status) => write!(f, "ended with status {status}"),
            Ended::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

impl RankGroup {
    /// Starts `count` ranks; `command` makes each one's. If one cannot start, none is left. This process has no other
    /// thread yet.
    pub fn start(
        first: usize,
        count: usize,
        mask: libc::sigset_t,
        command: impl Fn(usize) -> Command,
    ) -> io::Result<Self> {
        let guard = Guard::start()?;
        let number = guard.group();
        let mut group = RankGroup { ranks: Vec::with_capacity(count), guard: Some(guard) };
        for rank in first..first + count {
            let mut command = command(rank);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(number);
            let parent = std::process::id() as libc::pid_t;
            // SAFETY: runs between fork and exec, where only async-signal-safe calls are allowed: these are, and
            // nothing allocates.
            unsafe { command.pre_exec(move || prepare(parent, &mask)) };
            match command.spawn() {
                Ok(child) => group.ranks.push(RankProcess { rank, child, ended: None }),
                Err(error) => {
                    group.finish();
                    return Err(error);
                }
            }
        }
        Ok(group)
    }

    pub fn ranks(&mut self) -> impl Iterator<Item = &mut RankProcess> {
        self.ranks.iter_mut()
    }

    /// Sends a signal to every process of the group, and to the ranks that have left it (`setsid`): nothing is over
    /// before they have ended.
    pub fn signal(&self, signal: i32) {
        let Some(guard) = &self.guard else { return };
        // SAFETY: no memory is involved; the group's number and the ranks' are still their own, see above.
        unsafe {
            libc::kill(-guard.group(), signal);
            for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
                let pid = rank.child.id() as libc::pid_t;
                // One in the group has got it. Asked after the group was signaled: who leaves in between gets two, not
                // none.
                if libc::getpgid(pid) != guard.group() {
                    libc::kill(pid, signal);
                }
            }
        }
    }

    /// Ranks that have ended since the last call.
    pub fn newly_ended(&mut self) -> Vec<(usize, Ended)> {
        let mut newly = Vec::new();
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.ended = look(rank.child.id());
            newly.extend(rank.ended.map(|ended| (rank.rank, ended)));
        }
        newly
    }

    pub fn all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    /// Kills what is left of the group and reaps the ranks.
    pub fn finish(&mut self) {
        self.signal(libc::SIGKILL);
        for rank in &mut self.ranks {
            let _ = rank.child.wait();
        }
        self.ranks.clear();
        if let Some(guard) = self.guard.take() {
            guard.reap();
        }
    }
}

/// In the child: this program's blocked signals are not its own, and it does not outlive this program.
fn prepare(parent: libc::pid_t, mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: plain calls; `mask` is an initialized set.
    unsafe {
        if libc::sigprocmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) != 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
        {
            return Err(io::Error::last_os_error());
        }
        // The parent went before this could be told.
        if libc::getppid() != parent {
            return Err(io::Error::from_raw_os_error(libc::ECHILD));
        }
    }
    Ok(())
}

/// How a child ended, if it has; leaves it to be reaped.
fn look(pid: u32) -> Option<Ended> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is memory of the right type; zeroed is a valid value, which the call leaves or overwrites. The
    // fields are those of a SIGCHLD, which is what waitid fills in.
    unsafe {
        if libc::waitid(libc::P_PID, pid, info.as_mut_ptr(), options) != 0 {
            // Not our child any more, which nothing here does; better a failure than to wait for ever.
            return Some(Ended::Status(255));
        }
        let info = info.assume_init();
        match (info.si_pid(), info.si_code) {
            (0, _) => None,
            (_, libc::CLD_EXITED) => Some(Ended::Status(info.si_status())),
            _ => Some(Ended::Signal(info.si_status())),
        }
    }
}
