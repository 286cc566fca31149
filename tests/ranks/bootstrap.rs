//! The id reaches every rank, or every rank gets an error that says why.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use moebius::ranks::{Bootstrap, Identity, JobToken, RankError, Refusal, Root, UniqueId};
use moebius::{Error, Result};

use super::limits::in_time;

/// Long enough that only a hang reaches it.
pub const LONG: Duration = Duration::from_secs(60);
/// Reached by design, and by `in_time` made longer where threads did not start and connect within it.
pub const SHORT: Duration = Duration::from_secs(1);
pub const ID: UniqueId = [0x5a; 128];

/// A job whose rank 0 is bound to a port of the system's choice.
pub struct Job {
    pub template: Bootstrap,
    pub root: Option<Root>,
    pub address: SocketAddr,
}

impl Job {
    pub fn new(world: usize, timeout: Duration) -> Self {
        let root = Root::bind("127.0.0.1:0", timeout).unwrap();
        let address = root.address();
        let token = JobToken::random().unwrap();
        let template = Bootstrap { rank: 0, world, address: address.to_string(), token, timeout, round: 0 };
        Self { template, root: Some(root), address }
    }

    pub fn serve(&mut self) -> JoinHandle<Result<UniqueId>> {
        let (root, job) = (self.root.take().unwrap(), self.template.clone());
        thread::spawn(move || root.serve(&job, || Ok(ID)))
    }

    pub fn join(&self, rank: usize) -> JoinHandle<Result<UniqueId>> {
        spawn(Bootstrap { rank, ..self.template.clone() })
    }
}

pub fn spawn(job: Bootstrap) -> JoinHandle<Result<UniqueId>> {
    thread::spawn(move || job.exchange(|| panic!("rank {} makes no id", job.rank)))
}

pub fn failure(rank: JoinHandle<Result<UniqueId>>) -> RankError {
    match rank.join().unwrap() {
        Err(Error::Rank(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_get_the_id() {
    for world in [2, 3, 17] {
        let mut job = Job::new(world, LONG);
        // The last come first, some of them before rank 0 listens to anybody.
        let mut ranks: Vec<_> = (1..world).rev().map(|rank| job.join(rank)).collect();
        ranks.push(job.serve());
        for rank in ranks {
            assert_eq!(rank.join().unwrap().unwrap(), ID, "world {world}");
        }
    }
}

#[test]
fn one_rank_needs_no_network() {
    let me = Identity::new(0, 1, 0, None).unwrap();
    let job = Bootstrap::new(&me, JobToken::random().unwrap(), LONG).unwrap();
    assert_eq!(job.exchange(|| Ok(ID)).unwrap(), ID);
}

/// An address that nobody listens at, another each time: outside the range that the system hands out and, where it has
/// more loopback addresses than one, not on the usual one. Nothing is bound to find it: a process that another test is
/// about to start would hold it a moment longer.
pub fn free() -> SocketAddr {
    static CALLS: AtomicU16 = AtomicU16::new(0);
    let number = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_add((std::process::id() % 1000) as u16 * 10);
    let host = if cfg!(target_os = "linux") { [127, 0, 0, 2] } else { [127, 0, 0, 1] };
    SocketAddr::from((host, 20_000 + number % 10_000))
}

/// Rank 0's exchange at an address that it had before: for the same reason that may be in use for a moment.
fn again(job: &Bootstrap, id: UniqueId) -> Result<UniqueId> {
    let start = Instant::now();
    loop {
        match job.exchange(|| Ok(id)) {
            Err(Error::Rank(RankError::Network { operation: "bind", .. })) if start.elapsed() < LONG => {
                thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// Nothing where a rank came too late for what is tested.
fn only_late<T>(error: RankError) -> Option<T> {
    match error {
        RankError::Missing { .. } | RankError::GaveUp { .. } | RankError::Unreachable { .. } => None,
        other => panic!("{other}"),
    }
}

/// Groups are made again and again at one address, in one process, after failed ones too.
#[test]
fn rounds() {
    in_time(SHORT, |short| rounds_at(free(), short));
}

fn rounds_at(free: SocketAddr, short: Duration) -> Option<()> {
    let token = JobToken::random().unwrap();
    let job = |rank, round, timeout| {
        let address = free.to_string();
        Bootstrap { rank, world: 3, address, token: token.clone(), timeout, round }
    };
    for round in 0..4 {
        // In round 2 rank 2 stays away.
        let timeout = if round == 2 { short } else { LONG };
        let present = if round == 2 { 1..2 } else { 1..3 };
        let ranks: Vec<_> = present.map(|rank| spawn(job(rank, round, timeout))).collect();
        let id = [round as u8; 128];
        let root = again(&job(0, round, timeout), id);
        match root {
            Ok(found) => assert_eq!((found, round == 2), (id, false)),
            Err(Error::Rank(RankError::Missing { missing, .. })) => {
                assert_eq!(round, 2);
                if missing != [2] {
                    assert_eq!(missing, [1, 2]);
                    return None;
                }
            }
            Err(error) => panic!("{error}"),
        }
        for rank in ranks {
            match round {
                2 => {
                    assert!(matches!(failure(rank), RankError::GaveUp { count: 1, .. } | RankError::Unreachable { .. }))
                }
                _ => assert_eq!(rank.join().unwrap().unwrap(), id),
            }
        }
    }
    Some(())
}

#[test]
fn missing_ranks_are_named() {
    in_time(SHORT, |short| {
        let mut job = Job::new(5, short);
        // Waits for its answer longer than rank 0 for the ranks.
        let (two, root) = (job.join(2), job.serve());
        let (error, told) = (failure(root), failure(two));
        match &error {
            RankError::Missing { missing, .. } if missing.contains(&2) => return only_late(error),
            _ => {}
        }
        assert_eq!(error, RankError::Missing { missing: vec![1, 3, 4], timeout: short, refused: vec![] });
        let text = format!("bootstrap on rank 0: ranks [1, 3, 4] did not come within {short:?}");
        assert_eq!(error.to_string(), text);
        match told {
            RankError::GaveUp { .. } => {
                assert_eq!(told, RankError::GaveUp { rank: 2, count: 3, missing: vec![1, 3, 4] });
                Some(())
            }
            // Rank 0 answered later than two seconds after its time.
            other => only_late(other),
        }
    });
}

#[test]
fn others_hear_that_rank_0_failed() {
    let mut job = Job::new(3, LONG);
    let ranks = [job.join(1), job.join(2)];
    let root = job.root.take().unwrap();
    let error = root.serve(&job.template, || Err(Identity::new(1, 0, 0, None).unwrap_err())).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    for (rank, handle) in ranks.into_iter().enumerate() {
        let RankError::RootFailed { rank: found, reason } = failure(handle) else { panic!() };
        assert_eq!(found, rank + 1);
        assert!(reason.contains("world"), "{reason}");
    }
}

#[test]
fn wrong_token() {
    let mut job = Job::new(2, LONG);
    let root = job.serve();
    let stranger = Bootstrap { rank: 1, token: JobToken::random().unwrap(), ..job.template.clone() };
    let error = failure(spawn(stranger));
    let address = job.address.to_string();
    assert_eq!(error, RankError::Refused { rank: 1, address, reason: Refusal::JobToken });
    // And the job goes on without it.
    assert_eq!(job.join(1).join().unwrap().unwrap(), ID);
    assert_eq!(root.join().unwrap().unwrap(), ID);
}

#[test]
fn duplicate_rank() {
    let mut job = Job::new(3, LONG);
    let root = job.serve();
    let twins = [job.join(1), job.join(1)];
    // One of the two waits, the other is refused at once; nobody else can end them.
    let (refused, kept) = loop {
        match twins.iter().position(|twin| twin.is_finished()) {
            Some(at) => {
                let [a, b] = twins;
                break if at == 0 { (a, b) } else { (b, a) };
            }
            None => thread::sleep(Duration::from_millis(1)),
        }
    };
    assert!(matches!(failure(refused), RankError::Refused { reason: Refusal::Duplicate(1), .. }));
    assert_eq!(job.join(2).join().unwrap().unwrap(), ID);
    assert_eq!((kept.join().unwrap().unwrap(), root.join().unwrap().unwrap()), (ID, ID));
}

#[test]
fn another_world_or_round() {
    let mut job = Job::new(2, LONG);
    let root = job.serve();
    let error = failure(spawn(Bootstrap { rank: 1, world: 3, ..job.template.clone() }));
    assert!(matches!(error, RankError::Refused { reason: Refusal::World(2), .. }), "{error}");
    let error = failure(spawn(Bootstrap { rank: 1, round: 1, ..job.template.clone() }));
    assert!(matches!(error, RankError::Refused { reason: Refusal::Round(0), .. }), "{error}");
    job.join(1).join().unwrap().unwrap();
    root.join().unwrap().unwrap();
}

#[test]
fn nobody_at_the_address() {
    in_time(SHORT, |short| {
        let free = free();
        let job = Bootstrap { rank: 1, address: free.to_string(), ..Job::new(2, short).template };
        let RankError::Unreachable { rank: 1, address, last, .. } = failure(spawn(job)) else { panic!() };
        assert_eq!(address, free.to_string());
        tried(&last).map(|()| assert!(last.contains("connect to"), "{last}"))
    });
}

/// Nothing where a rank's time was over before its first attempt had a reason.
pub fn tried(last: &str) -> Option<()> {
    (!["no attempt", "no address"].contains(&last)).then_some(())
}

#[test]
fn address_taken() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let job = Job::new(2, SHORT).template;
    let job = Bootstrap { address: taken.local_addr().unwrap().to_string(), ..job };
    let error = job.exchange(|| Ok(ID)).unwrap_err();
    assert!(matches!(&error, Error::Rank(RankError::Network { operation: "bind", .. })), "{error}");
    assert!(error.to_string().contains(&job.address), "{error}");
}

#[test]
fn impossible_jobs() {
    let job = Job::new(2, SHORT).template;
    for (rank, world, field) in [(2, 2, "rank"), (0, 0, "world"), (0, 1 << 20, "world")] {
        let job = Bootstrap { rank, world, ..job.clone() };
        let Err(Error::Invalid { name, .. }) = job.exchange(|| Ok(ID)) else { panic!("{rank} of {world}") };
        assert_eq!(name, field);
    }
    let me = Identity::new(1, 2, 1, None).unwrap();
    let error = Bootstrap::new(&me, JobToken::random().unwrap(), SHORT).unwrap_err();
    assert!(error.to_string().contains("MOEBIUS_ADDRESS"), "{error}");
}
