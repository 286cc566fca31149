//! Low latency over NVLink without a GPU: the kernels' sources as C++ (`tests/low_latency/`), each thread of a grid a fiber, two
//! to four ranks beside each other, one of which is away for some calls. What each call has taken is compared with what was
//! sent in it. Stores are seen by others some time later, as memory of a GPU allows. `kernels/notes/nvlink.md` has the
//! changes of a kernel by which each test fails.

#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/low_latency");

/// Longest that a case may take. The longest takes a minute on one core.
const LIMIT: &str = "900";

/// `None`: there is no compiler.
struct Built {
    /// This process's own: others may build at the same time.
    _folder: tempfile::TempDir,
    program: PathBuf,
    kernels: PathBuf,
}

static BUILT: LazyLock<Option<Built>> = LazyLock::new(build);

fn compile(arguments: &[&str], out: &Path) -> Option<()> {
    let mut call = Command::new("c++");
    // Memory is read as numbers of several sizes, as kernels do.
    call.args(["-std=c++17", "-O2", "-fno-strict-aliasing", "-I", SOURCES, "-I", KERNELS])
        .args(arguments)
        .arg("-o")
        .arg(out);
    let Ok(Output { status, stderr, .. }) = call.current_dir(SOURCES).output() else {
        println!("skipped: no c++");
        return None;
    };
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    Some(())
}

fn build() -> Option<Built> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let (program, kernels) = (folder.path().join("program"), folder.path().join("kernels.so"));
    let built = Built { _folder: folder, program, kernels };
    // Hidden, so that each copy of the library has what it shares in a block.
    compile(&["-w", "-shared", "-fPIC", "-fvisibility=hidden", "kernels.cpp"], &built.kernels)?;
    // Fibers jump between stacks, which checked jumps refuse.
    let flags =
        ["-U_FORTIFY_SOURCE", "-rdynamic", "main.cpp", "cases.cpp", "ranks.cpp", "fibers.cpp", "stores.cpp", "-ldl"];
    compile(&flags, &built.program)?;
    Some(built)
}

fn run(name: &str) {
    let Some(built) = &*BUILT else { return };
    let mut call = Command::new("timeout");
    call.args(["--signal=KILL", LIMIT]).arg(&built.program).arg(&built.kernels).arg(name);
    let said = call.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    print!("{}", text(&said.stdout));
    assert!(said.status.success(), "{}", text(&said.stderr));
}

/// Behind 49,152 calls and more, whose tags are about to come again.
#[test]
fn a_rank_that_was_away_is_back_in_lockstep() {
    run("back_in_lockstep");
}

/// While these go on with each other, what they send each other does not keep them from the others.
#[test]
fn two_ranks_that_were_away_are_back_in_lockstep() {
    run("two_back_in_lockstep");
}

/// However long it was away, it takes no packet of before for one of now, nor do the others.
#[test]
fn a_rank_that_was_away_is_back_as_it_goes() {
    run("back_as_they_go");
}

/// What it was storing when it stalled has the tag of the call that it returns in.
#[test]
fn packets_of_a_round_before_are_not_taken() {
    run("back_behind_a_round");
}

/// It has three layers, as the others, which take longer for each.
#[test]
fn nobody_waits_in_vain_for_a_rank_that_returns() {
    run("back_among_slower");
}

/// Each of a handle's many dispatches and combines is a call.
#[test]
fn a_rank_that_was_away_is_back_among_kept_handles() {
    run("back_with_kept_handles");
}

/// Rows go every 85 steps, so that a combine receives where a dispatch of 256 calls before has left its packets.
#[test]
fn packets_are_told_apart_by_the_whole_of_their_tags() {
    run("tags_of_one_half");
}

/// Each is slower than the others for some steps.
#[test]
fn a_rank_that_is_ahead_stores_to_the_other_bank() {
    run("ranks_ahead");
}

/// In a dispatch without rows a rank waits for nothing else of those whose memory the next call stores to.
#[test]
fn a_call_without_rows_waits_for_headers() {
    run("rows_of_one_batch");
}

/// What its packets were to be stored over is cleared by the bank's next call, whichever block has counted this one.
#[test]
fn a_call_that_loses_a_rank_does_not_count() {
    run("lost_in_a_sweep");
}

/// It is in time for the next prepare.
#[test]
fn a_rank_that_is_late_to_one_call_is_noted() {
    run("late_to_one_call");
}

/// What lies behind the rows that come back is cleared, however many tokens there are.
#[test]
fn a_combine_clears_behind_the_rows_that_come_back() {
    run("few_rows_back");
}

/// It stalls while its packets are on their way.
#[test]
fn a_record_that_comes_in_part_is_not_taken() {
    run("records_in_part");
}

/// For more than half of all numbers of calls: it is not counted on, nor waited for.
#[test]
fn a_rank_that_is_gone_for_good_is_not_ahead() {
    run("gone_for_good");
}
