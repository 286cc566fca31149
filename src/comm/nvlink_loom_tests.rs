//! A model of the protocol of `kernels/common/nvlink.cuh` under loom: two ranks that call each other over windows, in
//! every order of their steps. The kernels themselves run on no CPU; the orders of memory here are theirs, and what
//! must not be left out is left out in turn, each of which the model must notice.
//!
//! A block is a thread; `nvlink_rows_loom_tests` has the warps of a block that returns rows,
//! `nvlink_overlap_loom_tests` the marks of groups. What a stream's next kernel sees of the one before, its end
//! provides: a fence here. Rows and records are cells of which loom tells when they are read and written unordered.
//!
//! loom knows no scopes: it does not notice a fence of a block where one of the system is needed. And a thread's steps
//! are made in their order, so it shows what is seen late but no store that is made early.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use loom::sync::atomic::{AtomicU32, fence};
use loom::thread;

/// What an order of the protocol depends on, left out.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// Ranks store into zones that their owner may still be reading.
    Ready,
    /// A rank's last word is not ordered behind the rows of its other blocks.
    FenceBeforeDone,
    /// The one that waits does not acquire.
    AcquireOfWait,
    /// It acquires only where the word is there at once, not behind polls.
    AcquireBehindPolls,
    /// A block counts itself before its rows are ordered.
    FenceBeforeCount,
    /// The word behind a row is not ordered behind it.
    FenceBeforeRowsWord,
    /// All records go to one bank.
    SecondBank,
    /// A rank that gives up tells nobody.
    Abort,
}

/// What one call moves.
#[derive(Clone, Copy, PartialEq)]
enum Call {
    /// Rows to the peer's zone, read by the next kernel.
    Dispatch,
    /// A row with a word of its own, read by this kernel.
    Combine,
    /// A record to the bank of the epoch's parity.
    Records,
}

/// A rank's words, and the memory that its peer writes to. Words hold epochs.
struct Window {
    ready: AtomicU32,
    done: AtomicU32,
    row: AtomicU32,
    records: [AtomicU32; 2],
    abort: AtomicU32,
    blocks: AtomicU32,
    zone: [UnsafeCell<u32>; 2],
    banks: [UnsafeCell<u32>; 2],
}

impl Window {
    fn new() -> Self {
        let word = || AtomicU32::new(0);
        let cells = || [UnsafeCell::new(0), UnsafeCell::new(0)];
        Self {
            ready: word(),
            done: word(),
            row: word(),
            records: [word(), word()],
            abort: word(),
            blocks: word(),
            zone: cells(),
            banks: cells(),
        }
    }
}

pub(super) fn write(cell: &UnsafeCell<u32>, value: u32) {
    // SAFETY: loom panics where another thread reads or writes it unordered.
    cell.with_mut(|at| unsafe { *at = value });
}

pub(super) fn read(cell: &UnsafeCell<u32>) -> u32 {
    // SAFETY: as above.
    cell.with(|at| unsafe { *at })
}

/// What the models' own asserts begin with.
pub(super) const BROKEN: &str = "the protocol is broken";

/// Reads what must have come by now.
pub(super) fn expect(cell: &UnsafeCell<u32>, expected: u32) {
    let found = read(cell);
    assert!(found == expected, "{BROKEN}: {found} was read in place of {expected}");
}

/// `next_epoch` of the kernels: 0 is what words hold that were never written, and banks take turns by parity.
fn next_epoch(epoch: u32) -> u32 {
    if epoch == u32::MAX { 2 } else { epoch + 1 }
}

/// A block of a rank's kernel.
#[derive(Clone)]
struct Block {
    windows: Arc<[Window; 2]>,
    rank: usize,
    /// Which of so many blocks of the rank.
    block: usize,
    blocks: u32,
    without: Without,
    /// Polls after which it gives up.
    patience: Option<u32>,
}

impl Block {
    fn own(&self) -> &Window {
        &self.windows[self.rank]
    }

    fn peer(&self) -> &Window {
        &self.windows[1 - self.rank]
    }

    /// False: given up.
    fn wait_for(&self, word: &AtomicU32, epoch: u32) -> bool {
        let acquire = if self.without == Without::AcquireOfWait { Relaxed } else { Acquire };
        if word.load(acquire) == epoch {
            return true;
        }
        let there = self.keep_waiting(word, epoch);
        if there && self.without != Without::AcquireBehindPolls {
            word.load(acquire);
        }
        there
    }

    /// Polls, which acquires nothing.
    fn keep_waiting(&self, word: &AtomicU32, epoch: u32) -> bool {
        let mut polls = 0;
        while word.load(Relaxed) != epoch {
            if self.own().abort.load(Relaxed) != 0 {
                return false;
            }
            if self.patience.is_some_and(|patience| polls >= patience) {
                self.own().abort.store(1, Relaxed);
                if self.without != Without::Abort {
                    self.peer().abort.store(1, Relaxed);
                }
                return false;
            }
            polls += 1;
            thread::yield_now();
        }
        true
    }

    fn start(&self, epoch: u32) -> bool {
        if self.own().abort.load(Relaxed) != 0 {
            return false;
        }
        if self.block == 0 {
            self.peer().ready.store(epoch, Relaxed);
        }
        self.without == Without::Ready || self.wait_for(&self.own().ready, epoch)
    }

    /// Whether this was the rank's last block, which has met the peer's.
    fn end(&self, epoch: u32) -> Option<bool> {
        if self.without != Without::FenceBeforeCount {
            fence(AcqRel);
        }
        if self.own().blocks.fetch_add(1, Relaxed) + 1 < self.blocks {
            return None;
        }
        if self.own().abort.load(Relaxed) == 0 {
            if self.without != Without::FenceBeforeDone {
                fence(AcqRel);
            }
            self.peer().done.store(epoch, Relaxed);
        }
        let met = self.wait_for(&self.own().done, epoch);
        self.own().blocks.store(0, Relaxed);
        Some(met)
    }

    /// One kernel, and what reads its result. False: given up.
    fn call(&self, call: Call, epoch: u32) -> bool {
        let value = epoch.wrapping_mul(2).wrapping_add(self.rank as u32);
        let expected = epoch.wrapping_mul(2).wrapping_add(1 - self.rank as u32);
        if call == Call::Records {
            let bank = if self.without == Without::SecondBank { 0 } else { epoch as usize % 2 };
            write(&self.peer().banks[bank], value);
            fence(AcqRel);
            self.peer().records[bank].store(epoch, Relaxed);
            if !self.wait_for(&self.own().records[bank], epoch) {
                return false;
            }
            expect(&self.own().banks[bank], expected);
            fence(AcqRel);
            return true;
        }
        if !self.start(epoch) {
            return false;
        }
        write(&self.peer().zone[self.block], value);
        if call == Call::Combine {
            if self.without != Without::FenceBeforeRowsWord {
                fence(AcqRel);
            }
            self.peer().row.store(epoch, Relaxed);
            if !self.wait_for(&self.own().row, epoch) {
                return false;
            }
            expect(&self.own().zone[0], expected);
        }
        match self.end(epoch) {
            Some(true) if call == Call::Dispatch => {
                expect(&self.own().zone[0], expected);
                // The kernel's end.
                fence(AcqRel);
                true
            }
            Some(met) => met,
            None => true,
        }
    }
}

fn block(windows: &Arc<[Window; 2]>, rank: usize, without: Without) -> Block {
    Block { windows: Arc::clone(windows), rank, block: 0, blocks: 1, without, patience: None }
}

/// All orders of two ranks that make these calls, the first behind `epoch`.
fn explore(calls: &'static [Call], epoch: u32, without: Without) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let windows = Arc::new([Window::new(), Window::new()]);
        let run = move |at: Block| {
            let mut epoch = epoch;
            for call in calls {
                epoch = next_epoch(epoch);
                assert!(at.call(*call, epoch));
            }
        };
        let peer = block(&windows, 1, without);
        let peer = thread::spawn(move || run(peer));
        run(block(&windows, 0, without));
        peer.join().unwrap();
    });
}

/// Waits. Where more than two threads do, loom would follow two of them that poll by turns for ever. So a thread lets
/// others go on once, and then leaves that order of steps: None. What is behind a wait is seen in the orders in which
/// its word has come by then.
pub(super) fn poll(mut there: impl FnMut() -> bool) -> Option<()> {
    if there() {
        return Some(());
    }
    thread::yield_now();
    there().then_some(())
}

/// All orders of these threads in which they are interrupted so often at most, but where they wait. Whether some led
/// all of them to their ends.
pub(super) fn explore_threads<S: 'static>(
    preemptions: usize,
    state: impl Fn() -> S + Send + Sync + 'static,
    threads: &'static [fn(&S) -> Option<()>],
) -> bool {
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = std::sync::Arc::clone(&ended);
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let state = Arc::new(state());
        let (first, others) = threads.split_first().unwrap();
        let spawn = |run: &fn(&S) -> Option<()>| {
            let (run, state) = (*run, Arc::clone(&state));
            thread::spawn(move || run(&state))
        };
        let others: Vec<_> = others.iter().map(spawn).collect();
        let mut all = first(&state).is_some();
        for other in others {
            all &= other.join().unwrap().is_some();
        }
        told.fetch_or(all, std::sync::atomic::Ordering::Relaxed);
    });
    ended.load(std::sync::atomic::Ordering::Relaxed)
}

/// Whether the model notices: an assert of its own fails, or loom tells of accesses that nothing orders.
pub(super) fn notices<T>(explore: impl Fn() -> T) -> bool {
    panics_with(&[BROKEN, "Causality violation"], explore)
}

/// Whether a wait has no end, as loom tells it.
fn waits_for_ever<T>(explore: impl Fn() -> T) -> bool {
    panics_with(&["Model exceeded maximum number of branches"], explore)
}

/// Whether there is a panic that begins so. Any other is an error of the model itself, and is passed on.
fn panics_with<T>(beginnings: &[&str], explore: impl Fn() -> T) -> bool {
    let Err(panic) = catch_unwind(AssertUnwindSafe(explore)) else { return false };
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or_default().trim_start();
    if beginnings.iter().any(|beginning| text.starts_with(beginning)) { true } else { resume_unwind(panic) }
}

const MIXED: [Call; 3] = [Call::Dispatch, Call::Records, Call::Combine];

#[test]
fn rows_are_read_when_all_have_come() {
    explore(&[Call::Dispatch; 2], 0, Without::Nothing);
    for without in [Without::Ready, Without::AcquireOfWait, Without::AcquireBehindPolls] {
        assert!(notices(|| explore(&[Call::Dispatch; 2], 0, without)), "{without:?}");
    }
}

/// Sums are read before the rank's last word, for which the peer waits: here nothing depends on `Ready`.
#[test]
fn a_row_is_read_behind_its_word() {
    explore(&[Call::Combine; 2], 0, Without::Nothing);
    for without in [Without::FenceBeforeRowsWord, Without::AcquireOfWait, Without::AcquireBehindPolls] {
        assert!(notices(|| explore(&[Call::Combine; 2], 0, without)), "{without:?}");
    }
}

#[test]
fn records_take_turns_in_two_banks() {
    explore(&[Call::Records; 3], 0, Without::Nothing);
    assert!(notices(|| explore(&[Call::Records; 3], 0, Without::SecondBank)));
}

/// The number of the call passes 0, and banks still take turns.
#[test]
fn calls_of_all_kinds_follow_each_other_where_epochs_wrap() {
    explore(&MIXED, u32::MAX - 1, Without::Nothing);
    explore(&[Call::Records; 3], u32::MAX - 1, Without::Nothing);
}

/// Rank 0 has two blocks, of which the last tells the peer that all rows of both are there.
fn explore_blocks(without: Without) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let windows = Arc::new([Window::new(), Window::new()]);
        // The peer's rows are there.
        windows[0].done.store(1, Relaxed);
        let blocks = [0, 1].map(|at| {
            let at = Block { block: at, blocks: 2, ..block(&windows, 0, without) };
            thread::spawn(move || {
                write(&at.peer().zone[at.block], 7);
                at.end(1) != Some(false)
            })
        });
        let peer = block(&windows, 1, without);
        assert!(peer.wait_for(&peer.own().done, 1));
        peer.own().zone.iter().for_each(|rows| expect(rows, 7));
        assert!(blocks.map(|block| block.join().unwrap()).iter().all(|met| *met));
    });
}

#[test]
fn the_last_block_tells_of_the_rows_of_all() {
    explore_blocks(Without::Nothing);
    for without in [Without::FenceBeforeCount, Without::FenceBeforeDone, Without::AcquireOfWait] {
        assert!(notices(|| explore_blocks(without)), "{without:?}");
    }
}

/// A rank that gives up early ends a peer that would wait for ever, wherever that is, and neither reads rows.
fn explore_giving_up(without: Without) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 500;
    model.check(move || {
        let windows = Arc::new([Window::new(), Window::new()]);
        let late = block(&windows, 1, without);
        let late = thread::spawn(move || late.call(Call::Dispatch, 1));
        let hasty = Block { patience: Some(0), ..block(&windows, 0, without) };
        let done = hasty.call(Call::Dispatch, 1);
        let both = late.join().unwrap();
        // Who gave up has told the other, which then gave up too or had met it already.
        let told = windows.iter().map(|w| w.abort.load(Relaxed)).collect::<Vec<_>>();
        assert!(done == both || told == [1, 1], "{BROKEN}: {done} {both} {told:?}");
    });
}

#[test]
fn who_gives_up_ends_the_peers_waits() {
    explore_giving_up(Without::Nothing);
    assert!(waits_for_ever(|| explore_giving_up(Without::Abort)));
}
