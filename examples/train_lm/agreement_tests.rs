//! What ranks compare: options as they begin, and failures of a save.

use std::collections::BTreeMap;
use std::path::Path;

use moebius::comm::{Communicator, Op, Tag};
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};

use super::settings;
use crate::options::{OtherOption, compare};
use crate::rank_results::gather_over;
use crate::ranks::{Peer, Report, TIMEOUT, Worker};
use crate::save::{SavedRank, save};
use crate::{Failure, Framework};

/// Runs a closure a rank, of three.
fn on_ranks<R: Send>(run: impl Fn(ThreadComm) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = &run;
        let start = |comm| scope.spawn(move || run(comm));
        let threads: Vec<_> = ThreadWorld::create(3, TIMEOUT).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn options_that_differ_are_named_on_every_rank() {
    // One rank has each of these alone; `None`: they agree.
    for other in [None, Some("clip"), Some("--framework"), Some("--check-every"), Some("--save"), Some("--ep")] {
        let errors = on_ranks(|mut comm| {
            let (mut own, mut framework, mut check_every) = (settings(1, None), Framework::Candle, 1);
            match other.filter(|_| comm.rank() == 2) {
                Some("clip") => own.clip = Some(0.5),
                Some("--framework") => framework = Framework::Burn,
                Some("--check-every") => check_every = 7,
                Some("--save") => own.save = Some("state".into()),
                Some("--ep") => own.mesh.ep = 2,
                _ => own.save = None,
            }
            compare(&own, (framework, check_every), |tag, own| gather_over(&Cpu::new(), &mut comm, tag, own)).err()
        });
        for error in errors {
            let found = error.as_ref().and_then(|error| error.downcast_ref::<OtherOption>());
            assert_eq!(found.map(|found| (found.option.as_str(), found.ranks)), other.map(|other| (other, [0, 2])));
        }
    }
}

/// Rank 1 is of a build with an option more, or less.
#[test]
fn options_of_another_build_are_named() {
    for more in [0, 1] {
        let gather = |_: Tag, own: &[u8]| {
            let mut all = vec![own.to_vec(); 2];
            all[more].extend(b"--other\t3\n");
            Ok(all)
        };
        let error = compare(&settings(1, None), (Framework::Candle, 1), gather).unwrap_err();
        let found = error.downcast_ref::<OtherOption>().unwrap();
        assert_eq!((found.option.as_str(), found.ranks), ("--other", [0, 1]));
        assert_eq!((found.values[more].as_str(), found.values[1 - more].as_str()), ("3", "no such option"));
    }
}

/// A rank that has nothing but weights, or not even these.
struct Saving {
    comm: ThreadComm,
    fails: bool,
}

impl Worker for Saving {
    fn step(&mut self, _: usize, _: &[u8], _: usize, _: bool) -> Result<Report, Failure> {
        Err("no step".into())
    }

    fn save(&mut self, _: &Path, _: usize) -> Result<(), Failure> {
        Err("no save".into())
    }
}

impl Peer for Saving {
    fn gather(&mut self, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        gather_over(&Cpu::new(), &mut self.comm, tag, own)
    }
}

impl SavedRank for Saving {
    fn weights(&self) -> Result<BTreeMap<String, Vec<f32>>, Failure> {
        if self.fails { Err("weights that cannot be read".into()) } else { Ok(BTreeMap::new()) }
    }

    fn save_optimizer(&mut self, _: &Path) -> Result<(), Failure> {
        Err("not to be reached".into())
    }
}

/// The ranks are in the same collective behind it.
#[test]
fn weights_that_one_rank_cannot_read_fail_a_save_on_all() {
    let dir = tempfile::tempdir().unwrap();
    let results = on_ranks(|comm| {
        let (number, settings) = (comm.rank(), settings(1, None));
        let mut rank = Saving { comm, fails: number == 1 };
        let error = save(&mut rank, (&settings, number), &dir.path().join("state"), 4).unwrap_err().to_string();
        let tag = Tag { layer: 0, op: Op::User, sequence: 1 };
        (error, rank.gather(tag, &[number as u8]).unwrap())
    });
    for (error, gathered) in results {
        assert!(error.contains("weights that cannot be read"), "{error}");
        assert_eq!(gathered, [[0], [1], [2]]);
    }
}
