//! `moebius-run` with small shell programs as ranks, and with this test itself.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use moebius::ranks::{Bootstrap, JobToken, UniqueId};

use super::bootstrap::{LONG, free};

fn launcher(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moebius-run"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a shell script as every rank.
fn shell(options: &[&str], script: &str) -> Output {
    launcher(&[options, &["sh", "-c", script]].concat()).output().unwrap()
}

/// Lines, sorted: those of different ranks come in any order.
fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8_lossy(bytes).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

/// Whether a process runs; one that nobody has reaped does not.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap().success());
}

/// The status that a launcher ends with before [`LONG`] is over.
fn status_of(child: &mut Child) -> Option<i32> {
    let mut status = None;
    until("the launcher ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

/// A launcher that is running, its output line by line.
struct Running {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Running {
    fn start(options: &[&str], script: &str) -> Self {
        Self::start_as(options, script, &[])
    }

    /// The same with arguments for the script, from `$0`.
    fn start_as(options: &[&str], script: &str, arguments: &[&str]) -> Self {
        let mut child = launcher(&[options, &["sh", "-c", script], arguments].concat()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    /// The next `count` lines, without their order.
    fn lines(&mut self, count: usize) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for _ in 0..count {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "the output ended after {found:?}");
            found.insert(line.trim_end().to_string());
        }
        found
    }

    fn end(mut self) -> (ExitStatus, Vec<String>, String) {
        let (mut rest, mut errors) = (Vec::new(), String::new());
        self.out.read_to_end(&mut rest).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap(), lines(&rest), errors)
    }
}

#[test]
fn environment_and_prefixes() {
    let script = "echo $MOEBIUS_RANK of $MOEBIUS_WORLD, $MOEBIUS_LOCAL_RANK, ${RANK-none} ${OMPI_COMM_WORLD_RANK-none}; \
                  cat; echo \"$0 $*\" >&2";
    let mut command = launcher(&["-n", "3", "sh", "-c", script, "name", "a b", "-n"]);
    let done = command.env("RANK", "9").env("OMPI_COMM_WORLD_RANK", "9").output().unwrap();
    assert_eq!(lines(&done.stdout), [0, 1, 2].map(|r| format!("[{r}] {r} of 3, {r}, none none")));
    assert_eq!(lines(&done.stderr), [0, 1, 2].map(|r| format!("[{r}] name a b -n")));
    assert_eq!(done.status.code(), Some(0));
}

#[test]
fn one_secret_a_job() {
    let script = "echo $MOEBIUS_TOKEN $MOEBIUS_ADDRESS";
    let jobs: Vec<BTreeSet<String>> = (0..2)
        .map(|_| lines(&shell(&["-n", "4"], script).stdout).iter().map(|line| line[4..].to_string()).collect())
        .collect();
    assert!(jobs.iter().all(|job| job.len() == 1), "{jobs:?}");
    assert_ne!(jobs[0], jobs[1]);
    let (token, address) = jobs[0].iter().next().unwrap().split_once(' ').unwrap();
    assert_eq!(JobToken::parse(token).unwrap().to_hex(), token);
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let printed = launcher(&["--print-token"]).output().unwrap();
    JobToken::parse(str::from_utf8(&printed.stdout).unwrap().trim_end()).unwrap();
    // A command line is for everybody to read.
    let shown = shell(&["-n", "1"], "cat /proc/$PPID/cmdline /proc/$$/cmdline | tr '\\0' ' ' | grep -c $MOEBIUS_TOKEN");
    assert_eq!(lines(&shown.stdout), ["[0] 0"]);
}

#[test]
fn status_of_the_first_to_fail() {
    // The others are told, and their leaving is not the job's status.
    let script = "trap 'echo told; exit 3' TERM; if [ $MOEBIUS_RANK = 1 ]; then exit 7; fi; sleep 600 & wait";
    let done = shell(&["-n", "3"], script);
    assert_eq!(done.status.code(), Some(7));
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(text.contains("moebius-run: rank 1 ended with status 7; ending the others"), "{text}");
    let done = shell(&["-n", "2"], "if [ $MOEBIUS_RANK = 0 ]; then kill -KILL $$; fi; sleep 600");
    assert_eq!(done.status.code(), Some(128 + 9));
    // One that ends well ends nobody.
    let done = shell(&["-n", "2"], "if [ $MOEBIUS_RANK = 1 ]; then sleep 0.5; echo still here; fi");
    assert_eq!((done.status.code(), lines(&done.stdout)), (Some(0), vec!["[1] still here".to_string()]));
}

/// One that fails ends nobody where the others are to keep going; each that does is told, and the first is the job's status.
#[test]
fn others_keep_going() {
    let script = "case $MOEBIUS_RANK in 1) kill -KILL $$;; 2) sleep 0.5; exit 3;; esac; sleep 1; echo still here";
    let done = shell(&["-n", "3", "--keep-going"], script);
    assert_eq!((done.status.code(), lines(&done.stdout)), (Some(128 + 9), vec!["[0] still here".to_string()]));
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(text.contains("rank 2 ended with status 3; the others keep going"), "{text}");
    // A signal ends them as ever.
    let mut running =
        Running::start(&["-n", "2", "--keep-going"], "echo up; if [ $MOEBIUS_RANK = 1 ]; then exit 4; fi; sleep 600");
    running.lines(2);
    send("TERM", running.child.id());
    // The second rank's status, or that of the signal, which may come before it.
    let code = running.end().0.code();
    assert!(matches!(code, Some(4 | 143)), "{code:?}");
}

/// Whoever ignores TERM is killed after the grace period, with all it has started in the group.
#[test]
fn nothing_of_the_job_stays() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = "sleep 600 & trap '' TERM; echo $! $$; \
                  if [ $MOEBIUS_RANK = 0 ]; then until [ -e \"$0\" ]; do sleep 0.05; done; exit 1; fi; \
                  while :; do sleep 600; done";
    let mut running = Running::start_as(&["--grace", "0", "-n", "3"], script, &[go.to_str().unwrap()]);
    let pids: Vec<String> =
        running.lines(3).iter().flat_map(|line| line[4..].split(' ').map(str::to_string).collect::<Vec<_>>()).collect();
    assert_eq!(pids.len(), 6);
    std::fs::write(&go, "").unwrap();
    let (status, ..) = running.end();
    assert_eq!(status.code(), Some(1));
    until("the group's processes are gone", || !pids.iter().any(|pid| runs(pid)));
    // Also where all ranks end well and leave something running that holds their output open.
    let mut running = Running::start(&["-n", "1"], "sleep 600 & echo $!");
    let left = running.lines(1).into_iter().next().unwrap();
    assert_eq!(running.end().0.code(), Some(0));
    until("the rest is gone", || !runs(&left[4..]));
}

/// A process that ends with the test, however that ends.
struct Bystander(Child);

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn signals_reach_the_group_and_no_one_else() {
    // In the launcher's own group: it would get what is sent to the wrong one.
    let mut bystander = Bystander(Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap());
    let script = "trap 'echo usr1' USR1; trap 'echo term; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(&["--grace", "600", "-n", "2"], script);
    let both = |what: &str| BTreeSet::from([format!("[0] {what}"), format!("[1] {what}")]);
    assert_eq!(running.lines(2), both("ready"));
    send("USR1", running.child.id());
    assert_eq!(running.lines(2), both("usr1"));
    send("TERM", running.child.id());
    let (status, rest, errors) = running.end();
    assert_eq!((status.code(), rest), (Some(0), both("term").into_iter().collect()));
    // The shells may tell of their sleeps; the launcher has nothing to tell.
    assert!(!errors.contains("moebius-run"), "{errors}");
    assert!(bystander.0.try_wait().unwrap().is_none(), "the bystander was signaled");
    // Ranks that do not handle it die of it, and so says the status. (Not INT, which a shell has its background jobs
    // ignore.)
    let mut running = Running::start(&["-n", "2"], "echo ready; exec sleep 600");
    running.lines(2);
    send("TERM", running.child.id());
    assert_eq!(running.end().0.code(), Some(128 + 15));
}

/// A launcher that is killed takes its ranks with it, and what these have started, whatever signals they ignore.
#[test]
fn ranks_do_not_outlive_the_launcher() {
    let script = "trap '' TERM HUP INT; sh -c 'sleep 600 & echo $!; wait' & echo $!; wait";
    let mut running = Running::start(&["-n", "2"], script);
    let pids: Vec<String> = running.lines(4).iter().map(|line| line[4..].to_string()).collect();
    assert!(pids.iter().all(|pid| runs(pid)));
    running.child.kill().unwrap();
    until("the ranks are gone", || !pids.iter().any(|pid| runs(pid)));
    running.end();
}

/// Also not one that has left the ranks' process group: the kernel ends it with the launcher.
#[test]
fn a_rank_that_has_left_the_group_does_not_outlive_the_launcher() {
    let mut running = Running::start(&["-n", "2"], "exec setsid sh -c 'echo $$; exec sleep 600'");
    let pids: Vec<String> = running.lines(2).iter().map(|line| line[4..].to_string()).collect();
    assert!(pids.iter().all(|pid| runs(pid)));
    running.child.kill().unwrap();
    until("ranks outside the group are gone", || !pids.iter().any(|pid| runs(pid)));
    running.end();
}

/// Such a rank gets the signals that the group gets: a user's TERM, the TERM after another rank failed, and the KILL
/// after the grace period.
#[test]
fn a_rank_that_has_left_the_group_gets_its_signals() {
    for (trap, grace, expected) in [("trap 'exit 5' TERM", "600", 5), ("trap '' TERM", "1", 128 + 9)] {
        let left = format!("{trap}; echo ready; while :; do sleep 0.05; done");
        let mut running = Running::start_as(&["--grace", grace, "-n", "2"], "exec setsid sh -c \"$0\"", &[&left]);
        running.lines(2);
        send("TERM", running.child.id());
        assert_eq!(status_of(&mut running.child), Some(expected), "{trap}");
        let script = "if [ $MOEBIUS_RANK = 0 ]; then echo ready; sleep 0.5; exit 7; fi; exec setsid sh -c \"$0\"";
        let mut running = Running::start_as(&["--grace", grace, "-n", "2"], script, &[&left]);
        running.lines(2);
        assert_eq!(status_of(&mut running.child), Some(7), "{trap}");
    }
    // Once: one that is in the group is not signaled by its number too.
    let script = "trap 'echo usr1' USR1; trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let mut running =
        Running::start_as(&["-n", "2"], "[ $MOEBIUS_RANK = 0 ] || exec setsid sh -c \"$0\"; eval \"$0\"", &[script]);
    running.lines(2);
    send("USR1", running.child.id());
    assert_eq!(running.lines(2), BTreeSet::from(["[0] usr1".to_string(), "[1] usr1".to_string()]));
    thread::sleep(Duration::from_millis(300));
    send("TERM", running.child.id());
    let (status, rest, _) = running.end();
    assert_eq!((status.code(), rest), (Some(0), Vec::new()));
}

#[test]
fn odd_output() {
    let script = "printf 'no end'; printf '\\377\\n' >&2";
    let done = shell(&["-n", "1"], script);
    assert_eq!((done.stdout.as_slice(), done.stderr.as_slice()), (&b"[0] no end\n"[..], &b"[0] \xff\n"[..]));
    // A line without an end is broken up, and every byte arrives.
    let done = shell(&["-n", "1"], "head -c 1000000 /dev/zero | tr '\\0' x");
    let lines = lines(&done.stdout);
    assert!(lines.len() > 1 && lines.iter().all(|line| line.starts_with("[0] x") && line.len() < 200_000));
    assert_eq!(lines.iter().map(|line| line.len() - 4).sum::<usize>(), 1_000_000);
}

/// The reader of what the ranks print is gone: they are told to end, drained until they have, and the status is what it
/// is of a program that SIGPIPE ends. One rank would print for ever, the other waits for a TERM that it ignores.
#[test]
fn output_that_nobody_reads_ends_the_job() {
    let script = "if [ $MOEBIUS_RANK = 0 ]; then trap 'seq 1000000; echo told >&2; exit 0' TERM; \
                  else trap '' TERM; fi; echo $$; while :; do echo on; sleep 0.05; done";
    let mut running = Running::start(&["--grace", "1", "-n", "2"], script);
    let mut pids = Vec::new();
    while pids.len() < 2 {
        pids.extend(running.lines(1).iter().map(|line| line[4..].to_string()).filter(|text| text != "on"));
    }
    drop(running.out);
    let mut errors = String::new();
    running.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(running.child.wait().unwrap().code(), Some(128 + 13), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    until("the ranks are gone", || !pids.iter().any(|pid| runs(pid)));
}

/// Also where no write could fail: the ranks print nothing after the reader has gone, or have closed their output.
#[test]
fn output_that_nobody_reads_ends_a_silent_job() {
    for script in ["echo $$; exec sleep 600", "echo $$; exec sleep 600 >&- 2>&-", "trap '' TERM; echo $$; sleep 600"] {
        let mut running = Running::start(&["--grace", "1", "-n", "2"], script);
        let pids: Vec<String> = running.lines(2).iter().map(|line| line[4..].to_string()).collect();
        drop(running.out);
        assert_eq!(status_of(&mut running.child), Some(128 + 13), "{script}");
        until("the ranks are gone", || !pids.iter().any(|pid| runs(pid)));
    }
}

/// A user's TERM counts from the moment it came, whatever the ranks make of it: one ends well, one ignores it.
#[test]
fn a_rank_that_ignores_a_signal_to_end_is_killed() {
    let script = "if [ $MOEBIUS_RANK = 0 ]; then trap 'exit 0' TERM; else trap '' TERM; fi; echo $$; \
                  while :; do sleep 0.05; done";
    let mut running = Running::start(&["--grace", "1", "-n", "2"], script);
    let pids: Vec<String> = running.lines(2).iter().map(|line| line[4..].to_string()).collect();
    send("TERM", running.child.id());
    assert_eq!(running.end().0.code(), Some(128 + 9));
    until("the ranks are gone", || !pids.iter().any(|pid| runs(pid)));
    // What asks for no end ends nothing: the rank outlives a grace period of no length.
    let script = "trap 'echo usr1' USR1; echo ready; while :; do sleep 0.05; done";
    let mut running = Running::start(&["--grace", "0", "-n", "1"], script);
    running.lines(1);
    for _ in 0..2 {
        send("USR1", running.child.id());
        running.lines(1);
    }
    send("TERM", running.child.id());
    assert!(running.end().0.code().is_some_and(|status| status > 128));
}

/// Who reads nothing cannot keep a launcher that was told to end.
#[test]
fn a_reader_that_stands_still_does_not_keep_the_launcher() {
    let mut running = Running::start(&["--grace", "0", "-n", "1"], "trap '' TERM; echo ready; exec yes");
    running.lines(1);
    send("TERM", running.child.id());
    assert_eq!(running.child.wait().unwrap().code(), Some(128 + 9));
}

#[test]
fn wrong_command_lines() {
    let status = |args: &[&str]| launcher(args).output().unwrap().status.code();
    assert_eq!(status(&["-n", "2", "/no/such/program"]), Some(127));
    assert_eq!(status(&["-n", "2", "/"]), Some(126));
    assert_eq!(status(&["-n", "2", "--", ""]), Some(127));
    assert_eq!(status(&["-n", "0", "true"]), Some(2));
    assert_eq!(status(&["true"]), Some(2));
    assert_eq!(status(&["-n", "1", "--address", "nowhere", "true"]), Some(1));
    // Two hosts need the same secret, which only their caller can give them.
    let two = ["-n", "1", "--world", "2", "--first-rank", "1", "--address", "127.0.0.1:1", "true"];
    let refused = launcher(&two).env_remove("MOEBIUS_TOKEN").output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("MOEBIUS_TOKEN"));
    assert_eq!(refused.status.code(), Some(1));
}

/// One rank of the jobs below: gets the id and prints its start.
#[test]
#[ignore = "a rank of `processes_exchange`"]
fn rank() {
    let job = Bootstrap::from_env(LONG).unwrap();
    let id: UniqueId = job.exchange(|| Ok([0xc3; 128])).unwrap();
    // On a line of its own: on one core the harness has begun one with the test's name.
    println!("\nrank {} of {} has {:02x}", job.rank, job.world, id[127]);
}

#[test]
fn processes_exchange() {
    let this = std::env::current_exe().unwrap();
    let this = this.to_str().unwrap();
    let rank = [this, "--exact", "launcher::rank", "--ignored", "--nocapture"];
    let has = |done: &Output, rank: usize, world: usize| {
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(text.contains(&format!("[{rank}] rank {rank} of {world} has c3")), "{text}");
        assert_eq!(done.status.code(), Some(0));
    };
    let done = launcher(&[&["-n", "4"], &rank[..]].concat()).output().unwrap();
    (0..4).for_each(|rank| has(&done, rank, 4));
    // Two hosts, both of them this one: the second launcher's ranks wait for the first's.
    let token = JobToken::random().unwrap().to_hex();
    let address = free().to_string();
    let host = |first: &str| {
        let options = ["-n", "2", "--world", "4", "--first-rank", first, "--address", &address];
        launcher(&[&options[..], &rank[..]].concat()).env("MOEBIUS_TOKEN", &token).spawn().unwrap()
    };
    for (child, first) in [(host("2"), 2), (host("0"), 0)] {
        let child = thread::spawn(move || child.wait_with_output().unwrap());
        // The first to be waited for needs the second, which `host` has started by then.
        let done = child.join().unwrap();
        (first..first + 2).for_each(|rank| has(&done, rank, 4));
    }
}
