//! One suite over every dispatcher: closed forms, edge cases, faults, then random cases against straight-line
//! arithmetic. Every device poisons what it allocates (NaN), so memory that is read before it is written shows.

mod closed_forms;
mod communicator;
mod deferred_reporting;
#[path = "../devices/mod.rs"]
mod devices;
mod edges;
mod faults;
#[path = "../common/faulty_comm.rs"]
mod faulty_comm;
mod forward_alone;
mod group_options;
mod harness;
#[path = "../common/limits.rs"]
mod limits;
mod lost_ranks;
mod payload;
mod random;
mod reference;
mod routing;
mod symmetric;

use std::io::Write;

use devices::Target;
#[cfg(feature = "nccl")]
pub use devices::gpus;
#[cfg(feature = "cuda")]
pub use devices::seed;
use forward_alone::{COME_TO_BACKWARD, ends_at_backward};
pub use forward_alone::{NOT_FOR_FORWARD_ALONE, ends_at_backward_as_known};
use harness::Case;
pub(crate) use harness::Setup;
use moebius::cpu::Cpu;
use moebius::ep::DispatcherKind;

/// Every case, with the name of its file.
pub fn cases<D: Target>() -> Vec<(&'static str, Case<D>)> {
    let files = [
        ("closed_forms", closed_forms::cases()),
        ("routing", routing::cases()),
        ("edges", edges::cases()),
        ("faults", faults::cases()),
        ("lost_ranks", lost_ranks::cases()),
        ("random", random::cases()),
        ("deferred_reporting", deferred_reporting::cases()),
        ("payload", payload::cases()),
        ("group_options", group_options::cases()),
    ];
    files.into_iter().flat_map(|(file, cases)| cases.into_iter().map(move |c| (file, c))).collect()
}

/// The communicator's own bodies.
pub fn communicator_bodies<D: Target>() -> Vec<communicator::Body<D>> {
    communicator::bodies()
}

/// A body for the windows of a communicator's rank.
#[cfg(feature = "nccl")]
pub fn windows<D: Target, C: moebius::comm::SymmetricMemory<D>>(comm: C, device: &D) {
    symmetric::ring(comm, device);
}

/// A dispatcher over some ranks.
pub fn over<D: Target>(device: &D, kind: DispatcherKind, ranks: usize, name: &'static str) -> Setup<D> {
    let forward_only = matches!(kind, DispatcherKind::NcclEpLowLatency | DispatcherKind::NvLinkLowLatency);
    Setup { device: device.clone(), kind, ranks, name, later: false, forward_only, ranks_per_host: 0 }
}

/// The same with errors asked for after prepare.
pub fn later<D: Target>(device: &D, kind: DispatcherKind, ranks: usize, name: &'static str) -> Setup<D> {
    Setup { later: true, ..over(device, kind, ranks, name) }
}

/// Rows of a type and length.
#[cfg(feature = "nccl")]
pub fn rows(dtype: moebius::DType, hidden: usize) -> harness::Rows {
    harness::Rows { dtype, hidden }
}

/// A device's own dispatcher, alone.
pub fn alone<D: Target>(device: &D, name: &'static str) -> Setup<D> {
    over(device, DispatcherKind::Local, 1, name)
}

/// Runs every case that applies at every number of ranks.
fn suite(kind: DispatcherKind, ranks: &[usize], later: bool) {
    suite_over_hosts(kind, &ranks.iter().map(|ranks| (*ranks, 0)).collect::<Vec<_>>(), later);
}

/// The same with so many ranks on each imitated host.
fn suite_over_hosts(kind: DispatcherKind, ranks: &[(usize, usize)], later: bool) {
    let cases: Vec<Case<Cpu>> = cases().into_iter().map(|(_, case)| case).collect();
    let (mut runs, most) = (0, ranks.iter().map(|(ranks, _)| *ranks).max().unwrap_or(1));
    let applicable = cases.iter().filter(|c| c.is_for(kind, most)).count();
    for &(ranks, ranks_per_host) in ranks {
        for case in cases.iter().filter(|c| c.is_for(kind, ranks)) {
            let setup = Setup { later, ranks_per_host, ..over(&Cpu::poisoning(), kind, ranks, case.name) };
            (case.run)(&setup);
            runs += 1;
        }
    }
    // Straight to stderr: the count is to be seen without --nocapture.
    let reporting = if later { ", errors later" } else { "" };
    let over = ranks.iter().map(|(ranks, each)| match each {
        0 => ranks.to_string(),
        each => format!("{ranks} by {each}"),
    });
    let over = over.collect::<Vec<_>>().join(", ");
    let line = format!("conformance {kind:?}{reporting}: {applicable} cases, {runs} runs at R = [{over}]\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr");
}

#[test]
fn random_steps_keep_the_rules_of_the_library() {
    random::keep_the_rules(&Cpu::new());
}

#[test]
fn local() {
    suite(DispatcherKind::Local, &[1], false);
}

#[test]
fn all_to_all() {
    suite(DispatcherKind::AllToAll, &[1, 2, 4, 8], false);
}

#[test]
fn all_gather() {
    suite(DispatcherKind::AllGather, &[1, 2, 4, 8], false);
}

/// One host, hosts of one rank, and both hops.
#[test]
fn hierarchical() {
    let ranks = [(1, 1), (2, 0), (2, 1), (4, 2), (8, 2), (8, 4)];
    suite_over_hosts(DispatcherKind::Hierarchical, &ranks, false);
}

#[test]
fn hierarchical_errors_later() {
    suite_over_hosts(DispatcherKind::Hierarchical, &[(2, 2), (4, 2)], true);
}

#[test]
fn all_to_all_errors_later() {
    suite(DispatcherKind::AllToAll, &[1, 2, 4], true);
}

#[test]
fn all_gather_errors_later() {
    suite(DispatcherKind::AllGather, &[1, 2, 4, 8], true);
}

/// Ranks that ask for forward alone, as over a dispatcher that has no backward: the cases that come to it are those that
/// are known to, at every number of ranks, and all ranks are refused there.
#[test]
fn forward_alone() {
    let (mut runs, mut came) = (0, Vec::new());
    for (_, case) in cases::<Cpu>() {
        for ranks in [1, 2, 4] {
            if NOT_FOR_FORWARD_ALONE.contains(&case.name) || !case.is_for(DispatcherKind::AllToAll, ranks) {
                continue;
            }
            let over = over(&Cpu::poisoning(), DispatcherKind::AllToAll, ranks, case.name);
            let comes = ends_at_backward(&case, &Setup { forward_only: true, ..over });
            came.push((case.name, comes));
            runs += 1;
        }
    }
    came.dedup();
    let all: Vec<_> = came.iter().filter(|(_, comes)| *comes).map(|(name, _)| *name).collect();
    let line = format!("conformance, forward alone: {runs} runs, {} cases come to backward\n", all.len());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr");
    assert_eq!(all, COME_TO_BACKWARD);
    let both: Vec<_> = came.windows(2).filter(|two| two[0].0 == two[1].0).collect();
    assert!(both.is_empty(), "they come to it at some numbers of ranks alone: {both:?}");
}

/// In processes of their own: this one's environment is all threads'.
#[test]
fn a_variable_that_names_a_dispatcher_leaves_nothing_to_time() {
    for kind in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
        let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
        child.args(["--exact", "--ignored", "--nocapture", "a_group_of_the_environment"]);
        let done = child.env("MOEBIUS_EP", kind.name()).output().expect("a child");
        let text = String::from_utf8_lossy(&done.stdout);
        // One collective, which compares the configurations.
        let expected = format!("{:?}", vec![(kind, 1); 2]);
        assert!(done.status.success() && text.contains(&expected), "{kind}: {done:?}");
    }
}

#[test]
#[ignore = "a process of the test above"]
fn a_group_of_the_environment() {
    println!("{:?}", group_options::joined(&over(&Cpu::poisoning(), DispatcherKind::AllToAll, 2, "variable")));
}
