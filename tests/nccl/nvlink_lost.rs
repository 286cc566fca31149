//! Ranks that are lost at each call of the NVLink dispatcher: processes that die before it, in it and behind it, threads
//! that panic or come late, and ranks that do not replay it. The others have a typed error in time, and a GPU that works.

use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::cuda::Cuda;
use moebius::ep::{
    ArrivingRows, Capacity, DispatchGrads, DispatchInputs, DispatchOutputs, DispatchSpec, Group, GroupConfig, Reporting,
};
use moebius::kernels::{Kernels, RowSource};
use moebius::nccl::NcclComm;
use moebius::{CommError, DType, Error, Result, Tensor};

use crate::conformance::gpus;
use crate::launched::{AT_ONCE, Said, join, start, succeed, tag};
use crate::limits::Countdown;
use crate::nvlink_graphs::told_of_the_lost;
use crate::overlap_waits::{LAYER, Product, SIZES, TOKENS, TOP_K, group_config, up};
use crate::several::{Body, numbers};

/// A call of all ranks.
type Call = fn(&mut Calls) -> Result<()>;

/// Every call whose kernels wait for other ranks, and whether it can be captured.
const CALLS: [(&str, Call, bool); 9] = [
    ("prepare", Calls::prepare, true),
    ("prepare_by_hosts", Calls::prepare_by_hosts, false),
    ("dispatch", Calls::dispatch, true),
    ("overlapped_dispatch", Calls::overlapped_dispatch, true),
    ("combine", Calls::combine, true),
    ("combine_bwd", Calls::combine_bwd, true),
    ("overlapped_combine_bwd", Calls::overlapped_combine_bwd, true),
    ("dispatch_bwd", Calls::dispatch_bwd, true),
    ("overlapped_dispatch_bwd", Calls::overlapped_dispatch_bwd, true),
];

/// The cases of so many ranks.
pub fn cases(ranks: usize) -> Vec<(String, Body)> {
    let mut all: Vec<(String, Body)> = Vec::new();
    let mut put = |name: String, run: Box<dyn Fn() + Send>| {
        let body: Body = Box::new(move |_| {
            run();
            None
        });
        all.push((name, body));
    };
    for start in Start::ALL {
        put(format!("a_process_dies_before_the_{}", start.name()), Box::new(move || dies_at(ranks, start)));
    }
    for (name, call, captured) in CALLS {
        for moment in Moment::ALL.into_iter().filter(|moment| captured || *moment != Moment::InReplays) {
            let run = move || process_dies(ranks, moment, name);
            put(format!("a_process_dies_{}_{name}", moment.name()), Box::new(run));
        }
        put(format!("a_rank_panics_before_{name}"), Box::new(move || panics(ranks, name, call)));
        put(format!("a_rank_is_late_to_{name}"), Box::new(move || is_late(ranks, name, call)));
        if captured {
            put(format!("a_rank_does_not_replay_{name}"), Box::new(move || does_not_replay(ranks, call)));
        }
    }
    all
}

/// When a process dies.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    /// The others are in a call to which it does not come.
    Before,
    /// All make one call behind the other, and none of the hosts knows which ones run.
    In,
    /// The same of a graph's replays.
    InReplays,
    /// All have had a call's results.
    Behind,
}

impl Moment {
    const ALL: [Self; 4] = [Self::Before, Self::In, Self::InReplays, Self::Behind];

    fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::In => "in",
            Self::InReplays => "in_replays_of",
            Self::Behind => "behind",
        }
    }
}

/// What ranks make together before a first call's kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Start {
    /// A group, with its control words.
    Group,
    /// Memory that rows arrive in.
    Zones,
}

impl Start {
    const ALL: [Self; 2] = [Self::Group, Self::Zones];

    fn name(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Zones => "first_dispatch",
        }
    }
}

/// A rank, and what its calls read and write.
struct Calls {
    product: Product,
    /// Rows of slots that go back.
    slots: Tensor<Cuda>,
    /// Rows that have come, in slots.
    arrived: Tensor<Cuda>,
    /// What comes back of them.
    y: Tensor<Cuda>,
    d_weights: Tensor<Cuda>,
    /// The first token's row for every slot.
    map: Tensor<Cuda>,
    /// The product of these rows.
    own: Vec<u8>,
}

impl Calls {
    fn new(comm: NcclComm) -> Result<Self> {
        let (cuda, ranks) = (comm.cuda().clone(), comm.size());
        // For the static capacity of a prepare that can be captured.
        let config = GroupConfig { max_rows: ranks * TOKENS * TOP_K, ..group_config(ranks) };
        let product = Product::new(cuda.clone(), comm, config)?;
        let (rows, hidden) = (product.handle.rows(), SIZES[0]);
        let put = |seed, rows: usize| cuda.write(&numbers(seed, rows * hidden, 1.0), DType::BF16, &[rows, hidden]);
        let map = Tensor::from_vec(vec![0_i32; rows], &[rows])?.to(&cuda)?;
        let d_weights = Tensor::zeros(&cuda, DType::F32, &[TOKENS, TOP_K])?;
        let (slots, arrived, y) = (put(21, rows)?, put(22, rows)?, put(23, TOKENS)?);
        let mut calls = Self { product, slots, arrived, y, d_weights, map, own: Vec::new() };
        calls.own_product()?;
        calls.own = calls.product.cuda.download(calls.product.out.view())?;
        Ok(calls)
    }

    /// One of each call, whose memory and kernels are there from then on; all ranks have met behind them.
    fn each_once(&mut self) -> Result<()> {
        CALLS.iter().try_for_each(|(_, call, _)| call(self))?;
        self.product.group.dispatcher().check()?;
        self.product.group.dispatcher().communicator().barrier(tag(1))
    }

    fn prepared(&mut self, reporting: Reporting, capacity: Capacity) -> Result<()> {
        let Product { group, handle, ids, .. } = &mut self.product;
        let spec = DispatchSpec { reporting, capacity, ..*handle.spec() };
        group.dispatcher().prepare(ids.view(), None, &spec).map(drop)
    }

    fn prepare(&mut self) -> Result<()> {
        let all = self.product.group.config().max_rows;
        self.prepared(Reporting::Deferred, Capacity::Static(all))
    }

    fn prepare_by_hosts(&mut self) -> Result<()> {
        self.prepared(Reporting::Immediate, Capacity::Eager)
    }

    fn dispatch(&mut self) -> Result<()> {
        let Product { group, handle, x, .. } = &mut self.product;
        let inputs = DispatchInputs { tokens: x.view(), weights: None, scales: None };
        let outputs = DispatchOutputs { tokens: self.arrived.view_mut(), weights: None, scales: None };
        group.dispatcher().dispatch(handle, inputs, outputs)
    }

    fn overlapped_dispatch(&mut self) -> Result<()> {
        self.product.overlapped(None)
    }

    fn combine(&mut self) -> Result<()> {
        let Product { group, handle, .. } = &mut self.product;
        group.dispatcher().combine(handle, self.slots.view(), self.y.view_mut())
    }

    fn combine_bwd(&mut self) -> Result<()> {
        let Product { group, handle, x, .. } = &mut self.product;
        group.dispatcher().combine_bwd(handle, x.view(), self.arrived.view_mut())
    }

    fn overlapped_combine_bwd(&mut self) -> Result<()> {
        let Product { cuda, group, handle, x, weight, out, .. } = &mut self.product;
        let mut done = Ok(());
        let mut start = |arriving: ArrivingRows<'_, Cuda>| {
            done = up(cuda, (arriving.rows.borrow(), handle), weight, out);
        };
        group.dispatcher().combine_bwd_rows_with_product(handle, x.view(), &mut start)?;
        done
    }

    fn dispatch_bwd(&mut self) -> Result<()> {
        let Self { product: Product { group, handle, .. }, slots, y, d_weights, .. } = self;
        group.dispatcher().dispatch_bwd(handle, grads(slots, y, d_weights))
    }

    fn overlapped_dispatch_bwd(&mut self) -> Result<()> {
        let Self { product, slots, y, d_weights, map, .. } = self;
        let Product { cuda, group, handle, x, weight, out, .. } = product;
        let mut done = Ok(());
        let mut work = |_| done = up(cuda, (RowSource::mapped(x.view(), map.view()), handle), weight, out);
        group.dispatcher().dispatch_bwd_with_products(handle, grads(slots, y, d_weights), &mut work)?;
        done
    }

    /// A product of rows that are here.
    fn own_product(&mut self) -> Result<()> {
        let Product { cuda, handle, x, weight, out, .. } = &mut self.product;
        up(cuda, (RowSource::mapped(x.view(), self.map.view()), handle), weight, out)
    }

    /// Without its group the GPU waits for nobody, and computes what it has before.
    fn works_without_group(self) {
        let Self { product: Product { cuda, group, handle, x, weight, mut out, .. }, map, own, .. } = self;
        drop(group);
        cuda.check().expect("without the group the GPU works");
        let product = up(&cuda, (RowSource::mapped(x.view(), map.view()), &handle), &weight, &mut out);
        product.expect("a product");
        assert!(cuda.download(out.view()).expect("its result") == own, "another product than before");
    }
}

fn grads<'a>(
    slots: &'a Tensor<Cuda>,
    d_tokens: &'a mut Tensor<Cuda>,
    d_weights: &'a mut Tensor<Cuda>,
) -> DispatchGrads<'a, Cuda> {
    let (d_tokens, d_weights) = (d_tokens.view_mut(), Some(d_weights.view_mut()));
    DispatchGrads { rows: slots.view(), weights: None, d_tokens, d_weights }
}

/// The child's call and its moment.
const CALL: &str = "MOEBIUS_TEST_CALL";
const MOMENT: &str = "MOEBIUS_TEST_MOMENT";

fn process_dies(ranks: usize, moment: Moment, name: &str) {
    lose_the_last(&start("dies_at_a_call", ranks, &[(CALL, name), (MOMENT, moment.name())]));
}

fn dies_at(ranks: usize, point: Start) {
    lose_the_last(&start("dies_at_the_start", ranks, &[(MOMENT, point.name())]));
}

/// All but the last process have ended well.
fn lose_the_last(said: &[Said]) {
    let Some((last, others)) = said.split_last() else { panic!("no process") };
    succeed(others);
    assert!(!last.ok && !last.killed, "the last was to die by itself: {}", last.text);
}

/// When the others wait for it.
fn die_late() -> ! {
    thread::sleep(Duration::from_millis(300));
    std::process::abort();
}

/// Work of a child.
pub fn dies_at_the_start() {
    let point = std::env::var(MOMENT).expect("a case");
    let point = Start::ALL.into_iter().find(|own| own.name() == point).expect("a point");
    let comm = join(0);
    let (cuda, ranks, dies) = (comm.cuda().clone(), comm.size(), comm.rank() + 1 == comm.size());
    let began = Instant::now();
    let told = match point {
        Start::Group if dies => die_late(),
        Start::Group => Group::new(cuda.clone(), Box::new(comm), group_config(ranks)).map(drop),
        Start::Zones => {
            let mut product = Product::new(cuda.clone(), comm, group_config(ranks)).expect("a rank");
            product.group.dispatcher().communicator().barrier(tag(1)).expect("a barrier");
            if dies {
                die_late();
            }
            product.overlapped(None).and_then(|()| cuda.check())
        }
    };
    assert!(matches!(told, Err(Error::Comm(CommError::PeerGone { .. }))), "{told:?}");
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    cuda.check().expect("without the group the GPU works");
    let values = [1.5, -2.0];
    let put = cuda.write(&values, DType::F32, &[2]).expect("a tensor");
    assert_eq!(cuda.read(put.view()).expect("a read"), values);
}

/// Work of a child.
pub fn dies_at_a_call() {
    let variable = |name| std::env::var(name).expect("a case");
    let (name, moment) = (variable(CALL), variable(MOMENT));
    let (_, call, _) = *CALLS.iter().find(|(own, ..)| *own == name).expect("a call");
    let moment = Moment::ALL.into_iter().find(|own| own.name() == moment).expect("a moment");
    let comm = join(0);
    let dies = comm.rank() + 1 == comm.size();
    let mut calls = Calls::new(comm).expect("a rank");
    calls.each_once().expect("calls of all");
    if moment == Moment::Behind {
        call(&mut calls).and_then(|()| calls.product.cuda.check()).expect("a call of all");
    }
    let began = Instant::now();
    let first = match moment {
        Moment::In => {
            let cuda = calls.product.cuda.clone();
            until_it_fails(&cuda, dies, || call(&mut calls))
        }
        Moment::InReplays => {
            let cuda = calls.product.cuda.clone();
            let mut graph = cuda.capture(|| call(&mut calls)).expect("a graph");
            until_it_fails(&cuda, dies, || graph.replay())
        }
        Moment::Before | Moment::Behind if !dies => call(&mut calls).and_then(|()| calls.product.cuda.check()),
        Moment::Before => die_late(),
        Moment::Behind => std::process::abort(),
    };
    told_of_the_dead(calls, first, began);
}

/// Calls right behind each other; a rank that dies does so from a thread of its own, whatever the calls are at.
fn until_it_fails(cuda: &Cuda, dies: bool, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    const ROUND: usize = 50;
    let mut round = || (0..ROUND).try_for_each(|_| call()).and_then(|()| cuda.check());
    let began = Instant::now();
    // All ranks are at it behind the first of them.
    round()?;
    if dies {
        thread::spawn(|| {
            thread::sleep(Duration::from_millis(50));
            std::process::abort();
        });
    }
    loop {
        round()?;
        assert!(began.elapsed() < AT_ONCE, "the last rank is not missed");
    }
}

/// The call that the others were in or came to, every later one and every wait say at once who is gone.
fn told_of_the_dead(mut calls: Calls, first: Result<()>, began: Instant) {
    let ranks = calls.product.group.ranks();
    let is_gone = |told: Result<()>, what: &str| match told {
        // Of several that end, one may hear of another that has before it.
        Err(Error::Comm(CommError::PeerGone { peer, .. })) => assert!(ranks > 2 || peer == 1, "{what}: {peer}"),
        other => panic!("{what}: {other:?}"),
    };
    is_gone(first, "the call");
    for (name, call, _) in CALLS {
        is_gone(call(&mut calls), name);
    }
    is_gone(calls.product.cuda.check(), "a wait");
    is_gone(calls.product.group.dispatcher().communicator().barrier(tag(2)), "a barrier");
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    calls.works_without_group();
}

/// Every rank's calls on a thread, which have been made once each; whether each has ended without a panic.
fn on_threads(ranks: usize, limit: Duration, body: impl Fn(Calls) + Sync) -> Vec<bool> {
    let body = &body;
    thread::scope(|scope| {
        let spawn = |comm: NcclComm| {
            scope.spawn(move || {
                let mut calls = Calls::new(comm).expect("a rank");
                calls.each_once().expect("calls of all");
                body(calls);
            })
        };
        let threads: Vec<_> = gpus::communicators(ranks, limit).into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join().is_ok()).collect()
    })
}

/// Between threads the hosts meet before a call: the others are told there, at once.
fn panics(ranks: usize, name: &str, call: Call) {
    const LIMIT: Duration = Duration::from_secs(30);
    let (last, others) = (ranks - 1, Countdown::new(ranks - 1));
    let well = on_threads(ranks, LIMIT, |mut calls| {
        if calls.product.group.rank() == last {
            // Unwinds without the hook's noise.
            std::panic::resume_unwind(Box::new("a rank's own trouble"));
        }
        let (counted, began) = (others.counted(), Instant::now());
        for _again in 0..2 {
            let told = call(&mut calls);
            let gone = matches!(told, Err(Error::Comm(CommError::PeerGone { peer, .. })) if peer == last);
            assert!(gone, "{name}: {told:?}");
        }
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        // None of the others leaves before they all know of the last.
        drop(counted);
        others.wait();
        calls.works_without_group();
    });
    assert!(well.iter().enumerate().all(|(rank, well)| *well == (rank != last)), "{name}: {well:?}");
}

/// The same of a rank that comes when the others have given it up; it is told so too.
fn is_late(ranks: usize, name: &str, call: Call) {
    const LIMIT: Duration = Duration::from_secs(2);
    let last = ranks - 1;
    let [begun, all] = [(); 2].map(|()| Countdown::new(ranks));
    let others = Countdown::new(last);
    let well = on_threads(ranks, LIMIT, |mut calls| {
        let in_time = (calls.product.group.rank() != last).then(|| others.counted());
        let done = all.counted();
        drop(begun.counted());
        begun.wait();
        if in_time.is_some() {
            let began = Instant::now();
            match call(&mut calls) {
                Err(Error::Comm(CommError::Timeout { missing, .. })) => assert_eq!(missing, [last], "{name}"),
                other => panic!("{name}: {other:?}"),
            }
            assert!(began.elapsed() < LIMIT + Duration::from_secs(3), "{:?}", began.elapsed());
        }
        drop(in_time);
        others.wait();
        let told = call(&mut calls);
        assert!(matches!(&told, Err(Error::Comm(CommError::Poisoned { .. }))), "{name}: {told:?}");
        drop(done);
        all.wait();
        calls.works_without_group();
    });
    assert!(well.iter().all(|well| *well), "{name}: {well:?}");
}

/// Graphs run without their hosts: the call's own kernels end the wait, and tell of it.
fn does_not_replay(ranks: usize, call: Call) {
    const LIMIT: Duration = Duration::from_secs(2);
    let last = ranks - 1;
    let [begun, all] = [(); 2].map(|()| Countdown::new(ranks));
    let others = Countdown::new(last);
    let well = on_threads(ranks, LIMIT, |mut calls| {
        let (cuda, rank) = (calls.product.cuda.clone(), calls.product.group.rank());
        let (replayed, replays) = (begun.counted(), (rank != last).then(|| others.counted()));
        let done = all.counted();
        let mut graph = cuda.capture(|| call(&mut calls)).expect("a graph");
        graph.replay().and_then(|()| cuda.check()).expect("a replay of all");
        drop(replayed);
        begun.wait();
        // The last does not come. Of several that wait for it the first gives up, and the others hear that it has.
        if replays.is_some() {
            thread::sleep(Duration::from_millis(300) * rank as u32);
            let began = Instant::now();
            graph.replay().expect("it is enqueued");
            match cuda.check() {
                Err(Error::LatePeer { rank: own, layer: LAYER, .. }) => assert_eq!(own, rank),
                other => panic!("{other:?}"),
            }
            assert!(began.elapsed() < LIMIT + Duration::from_secs(3), "{:?}", began.elapsed());
        }
        drop(replays);
        others.wait();
        told_of_the_lost(&mut graph, &cuda, (rank, ranks), LAYER);
        drop(done);
        all.wait();
        drop(graph);
        calls.works_without_group();
    });
    assert!(well.iter().all(|well| *well), "{well:?}");
}
