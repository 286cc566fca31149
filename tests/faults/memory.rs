//! Sizes that nothing has memory for are typed errors on every rank: no allocation aborts the process. A child process
//! tries them within an address space of its size and 1 GiB more.
#![cfg(target_os = "linux")]

use std::process::Command;
use std::thread;

use moebius::cpu::Cpu;
use moebius::cpu::ThreadWorld;
use moebius::ep::{Capacity, DispatchSpec, Group, GroupConfig, Reporting};
use moebius::{Error, Result, Tensor};

use super::support::{AT_ONCE, KINDS};

const NAME: &str = "memory::sizes_without_memory_are_errors_and_not_aborts";
const CHILD: &str = "MOEBIUS_FAULTS_MEMORY";
const RANKS: usize = 2;
const ROOM: u64 = 1 << 30;

/// Bytes of address space that this process has taken.
fn taken() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

fn limit_address_space() {
    let limit = libc::rlimit { rlim_cur: taken() + ROOM, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the argument is an initialized structure that outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// Results of prepare of three tokens a rank, by rank, in a group of this size.
fn prepared(config: &GroupConfig, spec: DispatchSpec) -> Vec<Result<usize>> {
    thread::scope(|threads| {
        let ranks: Vec<_> = ThreadWorld::create(RANKS, AT_ONCE)
            .into_iter()
            .map(|comm| {
                threads.spawn(move || {
                    let mut group = Group::new(Cpu::new(), Box::new(comm), config.clone())?;
                    let ids = Tensor::from_vec(vec![0, 1, 2, 3, 4, 5], &[3, 2])?;
                    let handle = group.dispatcher().prepare(ids.view(), None, &spec)?;
                    Ok(handle.tokens())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    })
}

fn child() {
    limit_address_space();
    let config = |tokens, dispatcher| GroupConfig { dispatcher, max_rows: 64, ..GroupConfig::new(8, tokens) };
    let spec = DispatchSpec::new(0, 2);
    let specs = [
        spec,
        DispatchSpec { reporting: Reporting::Deferred, ..spec },
        DispatchSpec { reporting: Reporting::Deferred, capacity: Capacity::Static(64), ..spec },
    ];
    for (kind, spec) in KINDS.into_iter().flat_map(|kind| specs.map(|spec| (kind, spec))) {
        // More choices than an i32 counts: every rank refuses them.
        for tokens in [1_073_741_823, 536_870_911] {
            for (rank, result) in prepared(&config(tokens, kind), spec).into_iter().enumerate() {
                let named = matches!(&result, Err(Error::Invalid { name, .. }) if name == "spec.top_k");
                assert!(named, "{kind:?}, rank {rank} of {tokens} tokens: {result:?}");
            }
        }
        // Fewer, but no memory: for one record, for those of both ranks.
        for tokens in [400_000_000, 80_000_000] {
            let results = prepared(&config(tokens, kind), spec);
            let none = |r: &Result<usize>| matches!(r, Err(Error::OutOfMemory { .. }));
            let told = |r: &Result<usize>| matches!(r, Err(Error::Peer { .. }));
            let all = results.iter().all(|r| none(r) || told(r));
            assert!(all && results.iter().any(none), "{kind:?}, {tokens} tokens: {results:?}");
        }
        let results = prepared(&config(8, kind), spec);
        assert!(results.iter().all(Result::is_ok), "{kind:?}: {results:?}");
    }
}

#[test]
fn sizes_without_memory_are_errors_and_not_aborts() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture"])
        .env(CHILD, "1")
        .env_remove("MOEBIUS_EP")
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}
