//! Output of the ranks, line by line with the rank before it.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::group::RankGroup;

/// A longer line is broken up.
const LONGEST_LINE: usize = 64 << 10;
/// How often the thread looks whether the ranks have ended, in milliseconds.
const LOOK: i32 = 100;
/// How often it is looked whether all is written.
const FINISH: Duration = Duration::from_millis(2);
/// Most bytes still read from a pipe once they have: more than a pipe holds comes from a process that left the group.
const MOST_AFTER_END: usize = 1 << 20;

pub struct OutputForwarder {
    ended: Arc<AtomicBool>,
    /// Nobody reads what this program writes any more.
    unread: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl OutputForwarder {
    /// Takes the ranks' pipes to a thread of its own.
    pub fn of(group: &mut RankGroup) -> io::Result<Self> {
        let mut streams = Vec::new();
        let unread = Arc::new(AtomicBool::new(false));
        for rank in group.ranks() {
            let pipes = [
                (rank.child.stdout.take().map(OwnedFd::from), Sink::Out),
                (rank.child.stderr.take().map(OwnedFd::from), Sink::Err),
            ];
            for (pipe, sink) in pipes {
                let Some(pipe) = pipe else { continue };
                let prefix = format!("[{}] ", rank.rank).into_bytes();
                streams.push(Stream {
                    pipe: pipe.into(),
                    sink,
                    prefix,
                    line: Vec::new(),
                    after_end: 0,
                    unread: Arc::clone(&unread),
                });
            }
        }
        let ended = Arc::new(AtomicBool::new(false));
        let ranks_ended = Arc::clone(&ended);
        let thread =
            std::thread::Builder::new().name("output".to_string()).spawn(move || pump(streams, &ranks_ended))?;
        Ok(Self { ended, unread, thread })
    }

    /// Whether the reader of this program's output or errors is gone, also where the ranks print nothing that could not
    /// be written. What they print is still taken from them.
    pub fn unread(&self) -> bool {
        self.unread.load(Ordering::Acquire) || reader_gone()
    }

    /// After the ranks have ended: returns once all they printed is written, or after `limit`; whether a line could not
    /// be, as its reader was gone.
    pub fn finish(self, limit: Option<Duration>) -> bool {
        self.ended.store(true, Ordering::Release);
        let deadline = limit.map(|limit| Instant::now() + limit);
        while !self.thread.is_finished() && deadline.is_none_or(|deadline| Instant::now() < deadline) {
            std::thread::sleep(FINISH);
        }
        self.unread.load(Ordering::Acquire)
    }
}

/// Whether a write to this program's output or errors would fail with a broken pipe. `poll` reports that where nothing
/// is asked for. Of a terminal that is gone it is HUP that ends a job, unless its user has had it ignored.
fn reader_gone() -> bool {
    let mut polled: Vec<libc::pollfd> = [libc::STDOUT_FILENO, libc::STDERR_FILENO]
        .into_iter()
        .filter(|fd| is_pipe(*fd))
        .map(|fd| libc::pollfd { fd, events: 0, revents: 0 })
        .collect();
    // SAFETY: pointer and length are those of one live vector.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
    ready > 0 && polled.iter().any(|polled| polled.revents & (libc::POLLERR | libc::POLLHUP) != 0)
}

/// Whether a descriptor is a pipe's or a socket's.
fn is_pipe(fd: i32) -> bool {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: memory of the right type, which the call fills where it returns 0.
    let mode = unsafe { if libc::fstat(fd, stat.as_mut_ptr()) == 0 { stat.assume_init().st_mode } else { 0 } };
    matches!(mode & libc::S_IFMT, libc::S_IFIFO | libc::S_IFSOCK)
}

#[derive(Clone, Copy)]
enum Sink {
    Out,
    Err,
}

struct Stream {
    pipe: std::fs::File,
    sink: Sink,
    prefix: Vec<u8>,
    /// The start of a line whose end has not come.
    line: Vec<u8>,
    after_end: usize,
    /// Set when a line cannot be written, as its reader is gone.
    unread: Arc<AtomicBool>,
}

fn pump(mut streams: Vec<Stream>, ended: &AtomicBool) {
    let mut buffer = vec![0; 64 << 10];
    while !streams.is_empty() {
        let over = ended.load(Ordering::Acquire);
        let mut polled: Vec<libc::pollfd> = streams
            .iter()
            .map(|stream| libc::pollfd { fd: stream.pipe.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        // SAFETY: pointer and length are those of one live vector; its descriptors are open.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, LOOK) };
        if ready == 0 && over {
            // A pipe that is open and empty is held by a process that has left the group.
            break;
        }
        if ready <= 0 {
            continue;
        }
        let mut polled = polled.iter();
        streams.retain_mut(|stream| {
            let readable = polled.next().is_some_and(|polled| polled.revents != 0);
            !readable || stream.read(&mut buffer, over)
        });
    }
    streams.iter_mut().for_each(Stream::end);
}

impl Stream {
    /// Reads once, which does not block; false at the end.
    fn read(&mut self, buffer: &mut [u8], over: bool) -> bool {
        match self.pipe.read(buffer) {
            Ok(0) => {}
            Ok(count) => {
                self.take(&buffer[..count]);
                self.after_end += if over { count } else { 0 };
                if self.after_end < MOST_AFTER_END {
                    return true;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(_) => {}
        }
        self.end();
        false
    }

    fn take(&mut self, bytes: &[u8]) {
        let mut text = Vec::with_capacity(bytes.len() + 16 * self.prefix.len());
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.ends_with(b"\n") || self.line.len() >= LONGEST_LINE {
                self.flush_line(&mut text);
            }
        }
        self.write(&text);
    }

    fn end(&mut self) {
        let mut text = Vec::new();
        if !self.line.is_empty() {
            self.flush_line(&mut text);
        }
        self.write(&text);
    }

    fn flush_line(&mut self, text: &mut Vec<u8>) {
        text.extend_from_slice(&self.prefix);
        text.append(&mut self.line);
        if !text.ends_with(b"\n") {
            text.push(b'\n');
        }
    }

    /// Whole lines at once. If nobody reads them any more the ranks are still drained, or they would stand still before
    /// they are told to end.
    fn write(&self, text: &[u8]) {
        let written = match self.sink {
            Sink::Out => {
                let mut out = io::stdout().lock();
                out.write_all(text).and_then(|()| out.flush())
            }
            Sink::Err => io::stderr().lock().write_all(text),
        };
        if written.is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            self.unread.store(true, Ordering::Release);
        }
    }
}
