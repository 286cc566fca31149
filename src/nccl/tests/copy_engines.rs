//! Copy engines: what fails as they are tried, and as they copy.

use std::cell::RefCell;

use super::*;
use crate::comm::Communicator;
use crate::comm::agree::{CollectiveCall, Detail};
use crate::cpu::{Cpu, ThreadComm, ThreadWorld};
use crate::dtype::DType;
use crate::nccl::NcclWindow;
use crate::nccl::comm::copy_engines::{ProbeDevice, check_moved, probe_on, run_in_lockstep};
use crate::nccl::comm::one_sided::BlockExchange;
use crate::nccl::comm::session::Session;
use crate::nccl::comm::symmetric::Registering;
use crate::nccl::control::plane::{ControlPlane, ThreadRendezvous};
use crate::tensor::{TensorMut, TensorRef};

/// Work of a GPU that has failed.
struct Broken;

impl Work for Broken {
    fn ended(&self) -> Result<bool, String> {
        Err("an illegal address".to_string())
    }
}

/// Where the copies of a rank fail.
#[derive(Debug, Clone, Copy)]
enum At {
    /// As they are enqueued.
    Call,
    /// As their end is marked.
    Event,
    /// On the GPU.
    Gpu,
}

/// A rank's exchange by copy engines, and what it and everything after it come to.
fn exchange(rank: usize, rendezvous: &Arc<ThreadRendezvous>, fails: Option<At>) -> [Option<Error>; 2] {
    let (comm_handle, fake) = comm_handle_of(rank, 2);
    let mut session =
        Session::new(Arc::clone(&comm_handle), ControlPlane::ThreadRendezvous(Arc::clone(rendezvous)), LONG)
            .expect("a thread");
    fake.put.store(if matches!(fails, Some(At::Call)) { 1 } else { 0 }, SeqCst);
    let call = || {
        let tag = Tag { layer: 3, op: Op::GradReduce, sequence: 7 };
        CollectiveCall { operation: "exchange_blocks", tag, dtype: DType::U8, detail: Detail::Plain, bytes: 8 }
    };
    let subject = session.begin(call()).expect("both come");
    let calls = |comm_handle: &CommHandle| {
        let comm_stream = CommStream { comm_handle, stream: std::ptr::null_mut() };
        let blocks = BlockExchange { from: 0, bytes: 8, window: std::ptr::null_mut(), offset: 0 };
        // SAFETY: nothing is read or written by these functions.
        let done = unsafe { OneSided::of(comm_handle.library()).expect("a fake's").exchange(&comm_stream, blocks) };
        // `None`: the other's failure has ended the communicator before this call.
        match done {
            Err(None) => None,
            Err(Some(refused)) => Some(Err(refused.into())),
            Ok(()) => Some(Ok(())),
        }
    };
    let own = session.run(subject, calls, || match fails {
        Some(At::Event) => {
            let (operation, message) = ("cuEventRecord".to_string(), "an illegal address".to_string());
            Err(Error::Device { call: "record", operation, message })
        }
        Some(At::Gpu) => Ok(Some(Box::new(Broken))),
        // The other rank's part does not come.
        _ => Ok(Some(Box::new(FlaggedWork(Arc::new(AtomicBool::new(false)))))),
    });
    until("told", || comm_handle.failure().is_some());
    [own.err(), session.begin(call()).err()]
}

/// Copies that fail on one rank, wherever they do, are told to the rank that waits for them, with what went wrong and
/// long before time is up; both communicators have ended.
#[test]
fn a_rank_whose_copies_fail_is_told_to_the_others() {
    for at in [At::Call, At::Event, At::Gpu] {
        let (rendezvous, start) = (ThreadRendezvous::new(2), Instant::now());
        let [waiting, failing] = thread::scope(|scope| {
            let ranks = [None, Some(at)].into_iter().enumerate();
            let run = |(rank, fails)| {
                let rendezvous = &rendezvous;
                scope.spawn(move || exchange(rank, rendezvous, fails))
            };
            let threads: Vec<_> = ranks.map(run).collect();
            <[_; 2]>::try_from(threads.into_iter().map(|t| t.join().expect("no panic")).collect::<Vec<_>>()).unwrap()
        });
        assert!(start.elapsed() < TIMEOUT);
        let what = if matches!(at, At::Call) { "ncclPutSignal" } else { "an illegal address" };
        let [own, Some(Error::Comm(CommError::Refused { rank: 0, peer: 1, reason, .. }))] = &waiting else {
            panic!("{at:?}: {waiting:?}")
        };
        assert!(reason.contains(what), "{at:?}: {reason}");
        // It may hear of it before its own call.
        assert!(matches!(own, None | Some(Error::Comm(CommError::Refused { peer: 1, .. }))), "{at:?}: {own:?}");
        let [own, Some(Error::Comm(CommError::Transport { rank: 1, reason, .. }))] = &failing else {
            panic!("{at:?}: {failing:?}")
        };
        assert!(reason.contains(what), "{at:?}: {reason}");
        match (at, own) {
            (At::Call, Some(Error::Nccl(NcclError::Call { function: "ncclPutSignal", .. }))) => {}
            (At::Event, Some(Error::Device { .. })) | (At::Gpu, None) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// A window that cannot be had is an error, however the library says so.
#[test]
fn windows_that_cannot_be_had() {
    let (library, (_, fake)) = (library(), comm_handle());
    let comm = (&raw const *fake).cast_mut().cast();
    let registering = Registering::of(&library).unwrap();
    let memory = registering.allocate(5).unwrap();
    let refused = |what: &str| {
        let error = registering.register(comm, memory, 5).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Nccl(NcclError::Call { .. })), "{error:?}");
        assert!(error.to_string().contains(what), "{error}");
    };
    assert_eq!(registering.register(comm, memory, 5).unwrap().bytes(), 5);
    fake.no_window.store(true, SeqCst);
    refused("ncclCommWindowRegister");
    fake.register.store(Status::REMOTE_ERROR.0, SeqCst);
    refused("remote error");
    let without = |change: fn(&mut Functions)| {
        let mut functions = functions();
        change(&mut functions);
        NcclLibrary::of(functions, "a fake".to_string(), "a test").unwrap()
    };
    let poor = without(|functions| functions.mem_alloc = Some(no_memory));
    assert!(Registering::of(&poor).unwrap().allocate(5).unwrap_err().to_string().contains("ncclMemAlloc"));
    let old = without(|functions| functions.window_register = None);
    assert!(matches!(Registering::of(&old).map(drop), Err(Error::Nccl(NcclError::Missing { .. }))));
}

/// Every rank's trouble over threads, as GPUs tell it over plain memory.
fn gather_errors(comm: &mut ThreadComm, own: &str) -> crate::Result<Vec<String>> {
    let mut bytes = own.as_bytes().to_vec();
    bytes.resize(32, 0);
    let ranks = Communicator::<Cpu>::size(comm);
    let mut all = vec![0u8; 32 * ranks];
    let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
    let send = TensorRef::<Cpu>::from_slice(&bytes[..], &[32])?;
    comm.all_gather(tag, send, TensorMut::<Cpu>::from_slice(&mut all[..], &[ranks, 32])?)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string();
    Ok(all.chunks(32).map(text).collect())
}

/// Whichever step fails on a rank, all ranks end there, and all with that rank and its reason.
#[test]
fn what_ranks_probe_together_fails_on_all_alike() {
    for fails in [None, Some(0), Some(1), Some(2)] {
        let run = |(rank, mut comm): (usize, ThreadComm)| {
            let mut taken = [0; 3];
            let [a, b, c] = &mut taken;
            let step = |number: usize, count: &mut i32| {
                *count += 1;
                let trouble = Error::invalid("test", "memory", "some", "none");
                if rank == 1 && fails == Some(number) { Err(trouble) } else { Ok(()) }
            };
            let (mut a, mut b, mut c) = (|| step(0, a), || step(1, b), || step(2, c));
            let outcome = run_in_lockstep(rank, &mut [&mut a, &mut b, &mut c], |own| gather_errors(&mut comm, own));
            (outcome, taken.iter().sum::<i32>())
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let sessions = ThreadWorld::create(3, TIMEOUT).into_iter().enumerate();
            let threads: Vec<_> = sessions.map(|session| scope.spawn(move || run(session))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        });
        for (own, (outcome, taken)) in outcomes.into_iter().enumerate() {
            assert_eq!(taken, fails.map_or(3, |number| number as i32 + 1), "rank {own}, step {fails:?}");
            match (fails, outcome) {
                (None, Ok(())) => {}
                (Some(_), Err(Error::Nccl(NcclError::Engines { rank, peer: 1, reason }))) => {
                    assert!(rank == own && reason.contains("memory"), "{reason}");
                }
                other => panic!("rank {own}: {other:?}"),
            }
        }
    }
}

/// Where a rank fails as copy engines are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProbeStep {
    Register,
    Keep,
    Write,
    Exchange,
    Read,
    Check,
}

/// A rank's GPU, whose memory is what copy engines should have left there.
struct Fails {
    rank: usize,
    comm: RefCell<ThreadComm>,
    at: Option<ProbeStep>,
}

impl Fails {
    fn reach(&self, step: ProbeStep) -> crate::Result<()> {
        match self.at == Some(step) {
            true => Err(Error::invalid("test", "GPU", "one that works", format!("{step:?}"))),
            false => Ok(()),
        }
    }
}

impl ProbeDevice for Fails {
    fn adopt_memory(&self, _: u64, _: usize) {}

    fn adopt_window(&self, _: NcclWindow) -> crate::Result<()> {
        self.reach(ProbeStep::Keep)
    }

    fn write(&self, _: &[u8]) -> crate::Result<()> {
        self.reach(ProbeStep::Write)
    }

    fn read(&self, bytes: usize) -> crate::Result<Vec<u8>> {
        self.reach(ProbeStep::Read)?;
        let gathered: Vec<u8> = (1..=bytes as u8 / 2).collect();
        let own = &gathered[self.rank * 16..][..16];
        Ok(match self.at {
            Some(ProbeStep::Check) => vec![0; bytes],
            _ => [&gathered[..], &own.repeat(gathered.len() / 16)].concat(),
        })
    }

    fn gather_errors(&self, trouble: &str) -> crate::Result<Vec<String>> {
        gather_errors(&mut self.comm.borrow_mut(), trouble)
    }
}

/// Whatever a rank cannot do as its copy engines are tried, all ranks hear of it; where that is its own part, before
/// any of them is in a collective that would wait for it.
#[test]
fn a_probe_that_fails_on_a_rank_fails_on_all() {
    use ProbeStep::*;
    for at in [None, Some(Register), Some(Keep), Some(Write), Some(Exchange), Some(Read), Some(Check)] {
        let run = |(rank, comm): (usize, ThreadComm)| {
            let (comm_handle, fake) = comm_handle_of(rank, 3);
            let at = at.filter(|_| rank == 1);
            fake.register.store(i32::from(at == Some(Register)), SeqCst);
            fake.put.store(i32::from(at == Some(Exchange)), SeqCst);
            let comm_stream = CommStream { comm_handle: &comm_handle, stream: std::ptr::null_mut() };
            let outcome = probe_on(&comm_stream, &Fails { rank, comm: RefCell::new(comm), at });
            (outcome, fake.inside.load(SeqCst))
        };
        let outcomes: Vec<_> = thread::scope(|scope| {
            let sessions = ThreadWorld::create(3, TIMEOUT).into_iter().enumerate();
            let threads: Vec<_> = sessions.map(|session| scope.spawn(move || run(session))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        });
        for (own, (outcome, inside)) in outcomes.into_iter().enumerate() {
            let begun = !matches!(at, Some(Register | Keep | Write));
            assert_eq!(inside, begun, "rank {own}, {at:?}: in a collective");
            match (at, outcome) {
                (None, Ok(())) => {}
                (Some(_), Err(Error::Nccl(NcclError::Engines { rank, peer: 1, .. }))) => {
                    assert_eq!(rank, own, "{at:?}")
                }
                other => panic!("rank {own}: {other:?}"),
            }
        }
    }
}

/// Blocks that an attempt of three ranks leaves with rank 1, and the effect of a copy that went astray.
#[test]
fn blocks_that_copy_engines_should_have_moved() {
    let gathered: Vec<u8> = (1..=48).collect();
    let found = [&gathered[..], &gathered[16..32].repeat(3)].concat();
    check_moved(1, &found).unwrap();
    for at in [0, 20, 47, 48, 70, 79] {
        let mut wrong = found.clone();
        wrong[at] = 0;
        assert!(check_moved(1, &wrong).is_err(), "byte {at}");
    }
    // Its own block has no place there.
    check_moved(1, &[&found[..80], &[0; 16]].concat()).unwrap();
}
