//! Handles in a pool: taken, given back, and used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::nccl_ep::low_latency::LowLatencyHandle;

/// A value of a pool.
pub(super) trait Poolable {
    /// Choices of a token that it is for.
    fn wide(&self) -> usize;
    /// Whether a call has not come to its end: then it is not used again.
    fn incomplete(&self) -> bool;
}

impl Poolable for LowLatencyHandle {
    fn wide(&self) -> usize {
        self.top_k()
    }

    fn incomplete(&self) -> bool {
        self.is_incomplete()
    }
}

#[derive(Debug)]
struct PoolState<H> {
    /// Nobody uses them now.
    free: Vec<H>,
    /// Graphs use them, at any time.
    captured: Vec<H>,
    /// Most choices of a token that a handle was made for.
    widest: usize,
}

/// A group's handles. Clones are the same pool.
#[derive(Debug)]
pub(super) struct HandlePool<H>(Arc<Mutex<PoolState<H>>>);

impl<H> Clone for HandlePool<H> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<H> Default for HandlePool<H> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(PoolState { free: Vec::new(), captured: Vec::new(), widest: 0 })))
    }
}

impl<H> HandlePool<H> {
    fn lock(&self) -> MutexGuard<'_, PoolState<H>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no handle was made for so many choices yet; the same on all ranks, unlike what is free.
    pub(super) fn grows(&self, wide: usize) -> bool {
        wide > self.lock().widest
    }

    /// All ranks have made a handle for so many choices.
    pub(super) fn grown(&self, wide: usize) {
        let mut handles = self.lock();
        handles.widest = handles.widest.max(wide);
    }
}

impl<H: Poolable> HandlePool<H> {
    /// Takes a free one for so many choices.
    pub(super) fn take(&self, wide: usize) -> Option<H> {
        let mut handles = self.lock();
        let at = handles.free.iter().position(|handle| handle.wide() == wide)?;
        Some(handles.free.swap_remove(at))
    }

    /// A handle that comes back here in the end; `captured`: a graph that is being captured will use it.
    pub(super) fn pooled(&self, handle: H, captured: bool) -> PooledHandle<H> {
        PooledHandle { handle: Some(handle), pool: self.clone(), captured }
    }
}

/// A handle that goes back to its pool.
#[derive(Debug)]
pub(super) struct PooledHandle<H: Poolable> {
    /// `None` only while it goes.
    handle: Option<H>,
    pool: HandlePool<H>,
    captured: bool,
}

impl<H: Poolable> PooledHandle<H> {
    pub(super) fn get(&mut self) -> Option<&mut H> {
        self.handle.as_mut()
    }
}

impl<H: Poolable> Drop for PooledHandle<H> {
    fn drop(&mut self) {
        let mut handles = self.pool.lock();
        match self.captured {
            true => handles.captured.extend(self.handle.take()),
            false => handles.free.extend(self.handle.take().filter(|handle| !handle.incomplete())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Fake {
        name: &'static str,
        wide: usize,
        incomplete: bool,
    }

    impl Poolable for Fake {
        fn wide(&self) -> usize {
            self.wide
        }

        fn incomplete(&self) -> bool {
            self.incomplete
        }
    }

    fn fake(name: &'static str, wide: usize) -> Fake {
        Fake { name, wide, incomplete: false }
    }

    fn names(pool: &HandlePool<Fake>) -> [Vec<&'static str>; 2] {
        let handles = pool.lock();
        [&handles.free, &handles.captured].map(|all| all.iter().map(|handle| handle.name).collect())
    }

    #[test]
    fn a_handle_comes_back_and_is_taken_for_its_width_only() {
        let pool = HandlePool::default();
        let (a, b) = (pool.pooled(fake("a", 3), false), pool.pooled(fake("b", 5), false));
        assert_eq!(pool.take(3), None);
        drop(a);
        drop(b);
        assert_eq!(names(&pool), [vec!["a", "b"], vec![]]);
        assert_eq!(pool.take(4), None);
        assert_eq!(pool.take(5), Some(fake("b", 5)));
        assert_eq!(pool.take(5), None);
        assert_eq!(pool.clone().take(3), Some(fake("a", 3)));
    }

    #[test]
    fn what_a_graph_uses_or_a_panic_has_torn_is_lent_no_more() {
        let pool = HandlePool::default();
        drop(pool.pooled(fake("captured", 3), true));
        let mut incomplete = pool.pooled(fake("torn", 3), false);
        incomplete.get().expect("a handle").incomplete = true;
        drop(incomplete);
        assert_eq!(names(&pool), [vec![], vec!["captured"]]);
        assert_eq!(pool.take(3), None);
    }

    /// Ranks whose free handles differ must still agree on when making one is a collective.
    #[test]
    fn what_is_lent_does_not_change_whether_buffers_grow() {
        let [one, other] = [HandlePool::default(), HandlePool::default()];
        for pool in [&one, &other] {
            assert!(pool.grows(3));
            pool.grown(3);
        }
        drop(one.pooled(fake("free", 3), false));
        let kept = other.pooled(fake("kept", 3), false);
        for pool in [&one, &other] {
            assert_eq!([2, 3, 4].map(|wide| pool.grows(wide)), [false, false, true]);
            pool.grown(2);
            assert!(!pool.grows(3), "narrower handles take nothing back");
        }
        assert_ne!(one.take(3), other.take(3));
        drop(kept);
        assert_eq!(names(&other), [vec!["kept"], vec![]]);
    }
}
