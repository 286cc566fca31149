//! A model under loom of a dispatch by groups of experts and the product that runs beside it
//! (`kernels/sm90_nvlink_groups.cu`; `Arrivals` of `kernels/sm90/grouped_gemm_mainloop.cuh`): each block of the sender
//! stores the rows of a group and posts a mark behind them (`post_marks`), a warp of the receiver watches the marks of
//! all blocks and tells how many groups have come (`watch_marks`, `tell_arrived`), and the product on the same GPU
//! waits for that number before it reads a group's rows.
//!
//! One rank sends and one receives. The end of a call is in `nvlink_loom_tests`; here the word that a zone is free
//! keeps calls apart, as it comes when the receiver's kernel and product have ended. A warp is a thread, or the warps
//! of a block are where only what they do together counts.

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU32, fence};

use super::nvlink_loom_tests::{expect, explore_threads, notices, poll, write};

/// What an order of the call depends on, left out.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// The sender stores into a zone that a product may still be reading.
    Ready,
    /// A mark is posted unordered behind the rows.
    FenceBeforeMark,
    /// A mark is posted before the block's warps have sent the group.
    WarpsBeforeMark,
    /// A warp that has sent a group does not release it to the one that posts.
    ReleaseOfSent,
    /// Nor does that one acquire.
    AcquireOfSent,
    /// Who watches does not acquire what the marks stand for,
    FenceBehindMarks,
    /// or one lane alone does.
    FenceOfEachLane,
    /// The lanes do not meet behind their fences.
    MeetingOfLanes,
    /// A group is told to have come with the first block's mark.
    MarksOfAll,
    /// A mark of the call before counts.
    EpochOfMark,
    /// What the watcher has acquired is not released with the number of groups,
    ReleaseOfArrived,
    /// and the product does not acquire it.
    AcquireOfArrived,
    /// The number of the call before stays,
    Clear,
    /// or is cleared when the product may have started,
    ClearBeforeLaunch,
    /// or unordered before that.
    FenceBehindClear,
}

/// The words of both ranks, and the receiver's zone.
struct Call {
    /// At the sender: the zone is free.
    ready: AtomicU32,
    marks: [AtomicU32; 2],
    arrived: AtomicU32,
    /// The product of this call may start, and has ended.
    launched: AtomicU32,
    ended: AtomicU32,
    zone: [[UnsafeCell<u32>; 2]; 2],
    /// Within a block: warps that have sent the group; and within a warp: lanes that have come to their meeting.
    sent: AtomicU32,
    lanes: AtomicU32,
    /// Blocks that send, and groups.
    blocks: usize,
    groups: u32,
    without: Without,
}

fn mark(epoch: u32, groups: u32) -> u32 {
    epoch << 8 | groups
}

impl Call {
    fn new(blocks: usize, groups: u32, without: Without) -> Self {
        let word = || AtomicU32::new(0);
        Self {
            ready: word(),
            marks: [word(), word()],
            arrived: word(),
            launched: word(),
            ended: word(),
            zone: [(); 2].map(|()| [(); 2].map(|()| UnsafeCell::new(0))),
            sent: word(),
            lanes: word(),
            blocks,
            groups,
            without,
        }
    }

    fn has(&self, order: Without) -> bool {
        self.without != order
    }

    /// An order of memory, or none where it is left out.
    fn order(&self, order: Ordering, without: Without) -> Ordering {
        if self.has(without) { order } else { Relaxed }
    }

    fn fence(&self, without: Without) {
        if self.has(without) {
            fence(AcqRel);
        }
    }

    fn post_mark(&self, block: usize, epoch: u32, groups: u32) {
        self.fence(Without::FenceBeforeMark);
        self.marks[block].store(mark(epoch, groups), Relaxed);
    }

    /// A block of the sender.
    fn send(&self, block: usize, epoch: u32) -> Option<()> {
        if self.has(Without::Ready) {
            poll(|| self.ready.load(Acquire) == epoch)?;
        }
        for group in 0..self.groups {
            write(&self.zone[block][group as usize], epoch);
            self.post_mark(block, epoch, group + 1);
        }
        Some(())
    }

    /// Groups that a block has sent.
    fn groups_of(&self, block: usize, epoch: u32) -> u32 {
        let word = self.marks[block].load(Relaxed);
        if word >> 8 == epoch || !self.has(Without::EpochOfMark) { word & 0xff } else { 0 }
    }

    /// Groups that all blocks have sent.
    fn groups_of_all(&self, epoch: u32) -> u32 {
        let sent = (0..self.blocks).map(|block| self.groups_of(block, epoch));
        let all = if self.has(Without::MarksOfAll) { sent.min() } else { sent.max() };
        all.unwrap()
    }

    fn watch_marks(&self, epoch: u32) -> Option<()> {
        let mut told = 0;
        while told < self.groups {
            let mut all = 0;
            poll(|| {
                all = self.groups_of_all(epoch);
                all > told
            })?;
            told = all;
            self.fence(Without::FenceBehindMarks);
            self.tell_arrived(told);
        }
        Some(())
    }

    fn tell_arrived(&self, groups: u32) {
        self.arrived.store(groups, self.order(Release, Without::ReleaseOfArrived));
    }

    /// What the receiver's kernel begins with. What `griddepcontrol.launch_dependents` orders for a kernel that starts
    /// by it and does not wait is not said anywhere: here it is a plain word that the start acquires, so what is not
    /// fenced before may be seen later.
    fn launch_product(&self, epoch: u32) {
        if !self.has(Without::ClearBeforeLaunch) {
            self.launched.store(epoch, Relaxed);
        }
        if self.has(Without::Clear) {
            self.tell_arrived(0);
            self.fence(Without::FenceBehindClear);
        }
        if self.has(Without::ClearBeforeLaunch) {
            self.launched.store(epoch, Relaxed);
        }
    }

    /// The receiver's kernel, and the end of its product.
    fn receive(&self, epoch: u32) -> Option<()> {
        self.launch_product(epoch);
        self.ready.store(epoch, Relaxed);
        self.watch_marks(epoch)?;
        poll(|| self.ended.load(Relaxed) == epoch)?;
        // The end of both kernels, for the next on the stream.
        fence(AcqRel);
        Some(())
    }

    /// `Arrivals::wait`, and what reads the group's rows behind it.
    fn take_group(&self, group: u32, epoch: u32, seen: &mut u32) -> Option<()> {
        if *seen <= group {
            poll(|| {
                *seen = self.arrived.load(self.order(Acquire, Without::AcquireOfArrived));
                *seen > group
            })?;
        }
        for rows in &self.zone[..self.blocks] {
            expect(&rows[group as usize], epoch);
        }
        Some(())
    }

    /// The product.
    fn multiply(&self, epoch: u32) -> Option<()> {
        poll(|| self.launched.load(Acquire) == epoch)?;
        let mut seen = 0;
        for group in 0..self.groups {
            self.take_group(group, epoch, &mut seen)?;
        }
        fence(AcqRel);
        self.ended.store(epoch, Relaxed);
        Some(())
    }
}

/// All orders of these threads, of so many blocks and groups.
fn explore(
    preemptions: usize,
    [blocks, groups]: [u32; 2],
    without: Without,
    threads: &'static [fn(&Call) -> Option<()>],
) -> bool {
    explore_threads(preemptions, move || Call::new(blocks as usize, groups, without), threads)
}

/// Two blocks and two groups in one call.
fn explore_groups(without: Without) -> bool {
    explore(
        1,
        [2, 2],
        without,
        &[|call| call.receive(1), |call| call.multiply(1), |call| call.send(0, 1), |call| call.send(1, 1)],
    )
}

#[test]
fn a_groups_rows_are_read_when_all_blocks_have_marked_it() {
    assert!(explore_groups(Without::Nothing));
    for without in [Without::FenceBeforeMark, Without::FenceBehindMarks, Without::MarksOfAll, Without::AcquireOfArrived]
    {
        assert!(notices(|| explore_groups(without)), "{without:?}");
    }
}

/// Two calls, of one block.
fn explore_calls(without: Without) -> bool {
    explore(
        2,
        [1, 2],
        without,
        &[
            |call| (1..=2).try_for_each(|epoch| call.receive(epoch)),
            |call| (1..=2).try_for_each(|epoch| call.multiply(epoch)),
            |call| (1..=2).try_for_each(|epoch| call.send(0, epoch)),
        ],
    )
}

#[test]
fn a_products_rows_are_those_of_its_call() {
    assert!(explore_calls(Without::Nothing));
    for without in [
        Without::Ready,
        Without::FenceBeforeMark,
        Without::FenceBehindMarks,
        Without::EpochOfMark,
        Without::AcquireOfArrived,
        Without::Clear,
        Without::ClearBeforeLaunch,
        Without::FenceBehindClear,
    ] {
        assert!(notices(|| explore_calls(without)), "{without:?}");
    }
}

/// Two calls, of two blocks and one group.
fn explore_calls_of_blocks(without: Without) -> bool {
    explore(
        1,
        [2, 1],
        without,
        &[
            |call| (1..=2).try_for_each(|epoch| call.receive(epoch)),
            |call| (1..=2).try_for_each(|epoch| call.multiply(epoch)),
            |call| (1..=2).try_for_each(|epoch| call.send(0, epoch)),
            |call| (1..=2).try_for_each(|epoch| call.send(1, epoch)),
        ],
    )
}

#[test]
fn marks_of_all_blocks_are_those_of_the_call() {
    assert!(explore_calls_of_blocks(Without::Nothing));
    for without in [Without::Ready, Without::MarksOfAll, Without::EpochOfMark, Without::Clear] {
        assert!(notices(|| explore_calls_of_blocks(without)), "{without:?}");
    }
}

/// A block of two warps that send and one that posts, and a product that is told by its marks. Each warp stores its
/// share of the group's rows; `sent` is the barrier in shared memory at which they arrive.
fn explore_warps(without: Without) -> bool {
    fn send(call: &Call, warp: usize) -> Option<()> {
        write(&call.zone[warp][0], 1);
        call.sent.fetch_add(1, call.order(Release, Without::ReleaseOfSent));
        Some(())
    }
    fn post(call: &Call) -> Option<()> {
        if call.has(Without::WarpsBeforeMark) {
            poll(|| call.sent.load(call.order(Acquire, Without::AcquireOfSent)) == 2)?;
        }
        call.post_mark(0, 1, 1);
        Some(())
    }
    fn take(call: &Call) -> Option<()> {
        poll(|| call.groups_of(0, 1) == 1)?;
        fence(AcqRel);
        (0..2).for_each(|warp| expect(&call.zone[warp][0], 1));
        Some(())
    }
    explore(2, [2, 1], without, &[|call| send(call, 0), |call| send(call, 1), post, take])
}

#[test]
fn a_mark_stands_for_the_rows_of_all_warps() {
    assert!(explore_warps(Without::Nothing));
    for without in [Without::WarpsBeforeMark, Without::ReleaseOfSent, Without::FenceBeforeMark] {
        assert!(notices(|| explore_warps(without)), "{without:?}");
    }
}

/// The poster's fence stands between its wait and the mark, and acquires too.
#[test]
fn the_posters_fence_covers_the_acquire_of_its_wait() {
    assert!(explore_warps(Without::AcquireOfSent));
}

/// Two lanes of the warp that watches, each with a block's mark, of which the first tells of both. Lanes' numbers are
/// exchanged before, which orders nothing.
fn explore_lanes(without: Without) -> bool {
    fn send(call: &Call) -> Option<()> {
        for block in 0..2 {
            write(&call.zone[block][0], 1);
            call.post_mark(block, 1, 1);
        }
        Some(())
    }
    fn first(call: &Call) -> Option<()> {
        poll(|| call.groups_of(0, 1) == 1)?;
        fence(AcqRel);
        poll(|| call.lanes.load(call.order(Acquire, Without::MeetingOfLanes)) == 1)?;
        call.tell_arrived(1);
        Some(())
    }
    fn second(call: &Call) -> Option<()> {
        poll(|| call.groups_of(1, 1) == 1)?;
        call.fence(Without::FenceOfEachLane);
        call.lanes.store(1, call.order(Release, Without::MeetingOfLanes));
        Some(())
    }
    explore(2, [2, 1], without, &[send, first, second, |call| call.take_group(0, 1, &mut 0)])
}

#[test]
fn one_lane_hands_on_what_all_have_acquired() {
    assert!(explore_lanes(Without::Nothing));
    for without in [Without::FenceOfEachLane, Without::MeetingOfLanes, Without::ReleaseOfArrived] {
        assert!(notices(|| explore_lanes(without)), "{without:?}");
    }
}
