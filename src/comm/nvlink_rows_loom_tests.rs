//! A model under loom of how rows are told to be there by a block that returns them (`combine` of
//! `kernels/common/nvlink_sums.cuh`): a group's workers store a row, meet its planner at a barrier of theirs, the
//! planner puts the row's word into shared memory (`put_word`), and one warp of the block stores the words of all
//! groups at the peer, behind one fence (`tell_of_rows`). The peer's planner waits for a word, and meets the workers
//! that read the row.
//!
//! A warp is a thread. The lanes of the telling warp are one thread, though each has a group of its own: that orders
//! more than the kernel does, but nothing that a row needs, as a lane's fence stands before its own group's words.

use std::array::from_fn;

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU32, fence};
use loom::thread;

use super::nvlink_loom_tests::{BROKEN, expect, explore_threads, notices, poll, read, write};

/// What an order of the block depends on, left out.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// The planner puts a row's word before it has met the workers.
    MeetingBeforeWord,
    /// What a group puts is not released with its number.
    ReleaseOfPut,
    /// Nor acquired with it.
    AcquireOfPut,
    /// Words are stored unordered behind their rows.
    FenceBeforeWords,
    /// The fence stands before the look at what has been put.
    LookBeforeFence,
    /// That a place is free again is not released, and
    ReleaseOfTold,
    /// not acquired.
    AcquireOfTold,
    /// The end is looked at behind what has been put.
    EndBeforePut,
    /// The end is seen without what was put before it.
    AcquireOfEnd,
    /// The one that waits does not acquire.
    AcquireOfWait,
    /// It acquires only where the word is there at once.
    AcquireBehindPolls,
    /// The peer's workers read a row before they meet the planner that has waited for it.
    MeetingBeforeRead,
}

/// Where the two of a group meet: a named barrier, here of as many steps as meetings.
struct Meeting(AtomicU32);

impl Meeting {
    /// The meeting of number `n`, from 1 on.
    fn meet(&self, n: u32) -> Option<()> {
        self.0.fetch_add(1, AcqRel);
        poll(|| self.0.load(Acquire) >= 2 * n)
    }
}

/// `RowWords`, with one place, so that it is used again.
struct RowWords {
    place: UnsafeCell<u32>,
    put: AtomicU32,
    told: AtomicU32,
    ended: AtomicU32,
}

struct Group {
    words: RowWords,
    meeting: Meeting,
    /// At the peer: rows, their words, and where it meets.
    zone: [UnsafeCell<u32>; 2],
    arrived: [AtomicU32; 2],
    peers_meeting: Meeting,
}

impl Group {
    fn new() -> Self {
        let word = || AtomicU32::new(0);
        Self {
            words: RowWords { place: UnsafeCell::new(0), put: word(), told: word(), ended: word() },
            meeting: Meeting(word()),
            zone: from_fn(|_| UnsafeCell::new(0)),
            arrived: from_fn(|_| word()),
            peers_meeting: Meeting(word()),
        }
    }
}

/// The groups of a block, of so many rows each.
struct Rows {
    groups: Vec<Group>,
    rows: u32,
    without: Without,
}

const EPOCH: u32 = 1;

impl Rows {
    fn new(groups: u32, rows: u32, without: Without) -> Self {
        Self { groups: (0..groups).map(|_| Group::new()).collect(), rows, without }
    }

    /// An order of memory, or none where it is left out.
    fn order(&self, order: Ordering, without: Without) -> Ordering {
        if self.without == without { Relaxed } else { order }
    }

    /// A group's workers.
    fn work(&self, group: usize) -> Option<()> {
        let group = &self.groups[group];
        for row in 0..self.rows {
            write(&group.zone[row as usize], EPOCH);
            group.meeting.meet(row + 1)?;
        }
        Some(())
    }

    fn put_word(&self, words: &RowWords, row: u32) -> Option<()> {
        poll(|| row == words.told.load(self.order(Acquire, Without::AcquireOfTold)))?;
        write(&words.place, row);
        words.put.store(row + 1, self.order(Release, Without::ReleaseOfPut));
        Some(())
    }

    /// A group's planner.
    fn plan(&self, group: usize) -> Option<()> {
        let group = &self.groups[group];
        for row in 0..self.rows {
            if self.without == Without::MeetingBeforeWord {
                self.put_word(&group.words, row)?;
                group.meeting.meet(row + 1)?;
            } else {
                group.meeting.meet(row + 1)?;
                self.put_word(&group.words, row)?;
            }
        }
        group.words.ended.store(1, Release);
        Some(())
    }

    /// What a group has put, and whether it has ended.
    fn look(&self, words: &RowWords) -> (u32, bool) {
        let put = || words.put.load(self.order(Acquire, Without::AcquireOfPut));
        let ended = || words.ended.load(self.order(Acquire, Without::AcquireOfEnd)) != 0;
        if self.without == Without::EndBeforePut {
            let put = put();
            return (put, ended());
        }
        let ended = ended();
        (put(), ended)
    }

    /// The telling warp. A word that it left untold a peer would wait for until its time is up.
    fn tell(&self) -> Option<()> {
        let mut told = vec![0; self.groups.len()];
        let mut looks_left = 0..3;
        loop {
            if self.without == Without::LookBeforeFence {
                fence(AcqRel);
            }
            let looks: Vec<_> = self.groups.iter().map(|group| self.look(&group.words)).collect();
            if looks.iter().zip(&told).all(|((put, _), told)| put == told) {
                if looks.iter().all(|(_, ended)| *ended) {
                    assert!(told.iter().all(|told| *told == self.rows), "{BROKEN}: words that were put are not told");
                    return Some(());
                }
                looks_left.next()?;
                thread::yield_now();
                continue;
            }
            if ![Without::FenceBeforeWords, Without::LookBeforeFence].contains(&self.without) {
                fence(AcqRel);
            }
            for ((group, (put, _)), told) in self.groups.iter().zip(looks).zip(&mut told) {
                for _ in *told..put {
                    group.arrived[read(&group.words.place) as usize].store(EPOCH, Relaxed);
                }
                *told = put;
                group.words.told.store(put, self.order(Release, Without::ReleaseOfTold));
            }
        }
    }

    /// `wait_for` of the kernels.
    fn wait_for(&self, word: &AtomicU32) -> Option<()> {
        let acquire = self.order(Acquire, Without::AcquireOfWait);
        if word.load(acquire) == EPOCH {
            return Some(());
        }
        poll(|| word.load(Relaxed) == EPOCH)?;
        if self.without != Without::AcquireBehindPolls {
            word.load(acquire);
        }
        Some(())
    }

    /// The peer's planner.
    fn wait(&self, group: usize) -> Option<()> {
        for (row, arrived) in (1..=self.rows).zip(&self.groups[group].arrived) {
            self.wait_for(arrived)?;
            self.groups[group].peers_meeting.meet(row)?;
        }
        Some(())
    }

    /// The peer's workers.
    fn add(&self, group: usize) -> Option<()> {
        let group = &self.groups[group];
        for (row, at) in (1..=self.rows).zip(&group.zone) {
            if self.without != Without::MeetingBeforeRead {
                group.peers_meeting.meet(row)?;
            }
            expect(at, EPOCH);
        }
        Some(())
    }

    /// Both in one thread, of all groups.
    fn wait_and_add(&self) -> Option<()> {
        for group in &self.groups {
            for (at, arrived) in group.zone.iter().zip(&group.arrived).take(self.rows as usize) {
                self.wait_for(arrived)?;
                expect(at, EPOCH);
            }
        }
        Some(())
    }
}

/// All orders of these warps, each a thread.
fn explore(groups: u32, rows: u32, without: Without, warps: &'static [fn(&Rows) -> Option<()>]) -> bool {
    explore_threads(1, move || Rows::new(groups, rows, without), warps)
}

/// A group of workers and a planner, whose words take turns in one place.
fn explore_group(without: Without) -> bool {
    explore(1, 2, without, &[|block| block.work(0), |block| block.plan(0), Rows::tell, Rows::wait_and_add])
}

#[test]
fn a_row_is_told_behind_the_meeting_with_its_workers() {
    assert!(explore_group(Without::Nothing));
    for without in [
        Without::MeetingBeforeWord,
        Without::ReleaseOfPut,
        Without::FenceBeforeWords,
        Without::LookBeforeFence,
        Without::ReleaseOfTold,
        Without::AcquireOfTold,
        Without::EndBeforePut,
        Without::AcquireOfEnd,
        Without::AcquireOfWait,
        Without::AcquireBehindPolls,
    ] {
        assert!(notices(|| explore_group(without)), "{without:?}");
    }
}

/// The fence behind the look acquires too, and what was put is read behind it.
#[test]
fn the_fence_covers_the_acquire_of_what_was_put() {
    assert!(explore_group(Without::AcquireOfPut));
}

/// One fence for the words of two groups, of which each is a thread here.
fn explore_groups(without: Without) -> bool {
    fn group(block: &Rows, group: usize) -> Option<()> {
        let own = &block.groups[group];
        write(&own.zone[0], EPOCH);
        block.put_word(&own.words, 0)?;
        own.words.ended.store(1, Release);
        Some(())
    }
    explore(2, 1, without, &[|block| group(block, 0), |block| group(block, 1), Rows::tell, Rows::wait_and_add])
}

#[test]
fn one_fence_orders_the_rows_of_two_groups() {
    assert!(explore_groups(Without::Nothing));
    for without in [Without::FenceBeforeWords, Without::LookBeforeFence, Without::EndBeforePut, Without::AcquireOfWait]
    {
        assert!(notices(|| explore_groups(without)), "{without:?}");
    }
}

/// The peer's planner and workers; a thread does what the block that sends does.
fn explore_peer(without: Without) -> bool {
    fn send(block: &Rows) -> Option<()> {
        for (at, arrived) in block.groups[0].zone.iter().zip(&block.groups[0].arrived) {
            write(at, EPOCH);
            fence(AcqRel);
            arrived.store(EPOCH, Relaxed);
        }
        Some(())
    }
    explore(1, 2, without, &[send, |block| block.wait(0), |block| block.add(0)])
}

#[test]
fn workers_read_what_their_planner_has_waited_for() {
    assert!(explore_peer(Without::Nothing));
    for without in [Without::MeetingBeforeRead, Without::AcquireOfWait, Without::AcquireBehindPolls] {
        assert!(notices(|| explore_peer(without)), "{without:?}");
    }
}
