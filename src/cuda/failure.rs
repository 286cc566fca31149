//! Failures from outside that keep a stream from its end, or spoil the work on it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Error, Result};

/// Whether a stream of a context waits for what will not come. Then whatever waits for the device waits for ever, as
/// much of what frees memory or unloads modules does, and so what belongs to the context stays as it is dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct StuckFlag(Arc<AtomicBool>);

impl StuckFlag {
    pub(crate) fn is(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    #[cfg(feature = "nccl")]
    pub(crate) fn set(&self, stuck: bool) {
        #[cfg(all(target_os = "linux", target_env = "gnu"))]
        if stuck && !self.is() {
            super::exit::at_exit_of(&self.0);
        }
        self.0.store(stuck, Ordering::SeqCst);
    }
}

/// Something outside the stream that its work depends on, a peer for instance. When it has failed, the stream goes on
/// with memory that nobody has written.
pub(crate) trait FailureSource: Send + Sync {
    /// Why what the stream computes is worth nothing.
    fn failure(&self) -> Option<Error>;
}

/// What a graph's calls go through and others take part in, which may end before the graph does: a communicator. Every
/// replay passes it, and is watched.
pub(crate) trait ReplayGate: Send + Sync {
    /// Runs `launch`, which enqueues a replay, while nobody can end what the calls go through.
    ///
    /// # Errors
    /// It has ended, and nothing was launched; those of `launch`.
    fn pass(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()>;

    /// A replay has been enqueued, of which nothing is behind yet: sees to it that it ends.
    ///
    /// # Errors
    /// A driver's: the end of the replay cannot be seen.
    fn replayed(&self) -> Result<()>;
}

/// Enqueues a replay through all of its gates, each of which is held until it is.
pub(super) fn pass_all(gates: &[Arc<dyn ReplayGate>], launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    match gates {
        [] => launch(),
        [first, others @ ..] => first.pass(&mut || pass_all(others, launch)),
    }
}

/// The sources that one stream's work depends on.
#[derive(Default)]
pub(super) struct FailureSources(Mutex<Vec<Weak<dyn FailureSource>>>);

impl FailureSources {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn FailureSource>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// One more, for as long as it lives.
    #[cfg(feature = "nccl")]
    pub(super) fn add(&self, source: &Arc<dyn FailureSource>) {
        let mut sources = self.lock();
        sources.retain(|source| source.strong_count() > 0);
        sources.push(Arc::downgrade(source));
    }

    /// Those of another stream too, whose results this one's work takes.
    pub(super) fn adopt(&self, other: &Self) {
        if !std::ptr::eq(self, other) {
            let theirs = other.lock().clone();
            let mut own = self.lock();
            own.retain(|source| source.strong_count() > 0 && !theirs.iter().any(|other| source.ptr_eq(other)));
            own.extend(theirs);
        }
    }

    /// # Errors
    /// The error of the first source that has failed.
    pub(super) fn check(&self) -> Result<()> {
        let failure = self.lock().iter().filter_map(Weak::upgrade).find_map(|source| source.failure());
        failure.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it has ended, and whether it is held.
    #[derive(Default)]
    struct Gate {
        ended: bool,
        held: AtomicBool,
    }

    impl ReplayGate for Gate {
        fn pass(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
            if self.ended {
                return Err(Error::invalid("replay", "gate", "one that has not ended", "one that has"));
            }
            self.held.store(true, Ordering::SeqCst);
            let launched = launch();
            self.held.store(false, Ordering::SeqCst);
            launched
        }

        fn replayed(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_replay_is_launched_while_all_gates_are_held() {
        let open: Vec<Arc<Gate>> = (0..3).map(|_| Arc::default()).collect();
        let gates: Vec<Arc<dyn ReplayGate>> = open.iter().map(|gate| Arc::clone(gate) as _).collect();
        let mut launches = 0;
        let mut launch = || {
            launches += 1;
            assert!(open.iter().all(|gate| gate.held.load(Ordering::SeqCst)));
            Ok(())
        };
        assert!(pass_all(&gates, &mut launch).is_ok());
        // One that has ended lets nothing through, wherever it stands.
        for at in 0..=gates.len() {
            let mut gates = gates.clone();
            gates.insert(at, Arc::new(Gate { ended: true, ..Gate::default() }));
            assert!(pass_all(&gates, &mut launch).is_err_and(|e| e.to_string().contains("has not ended")));
        }
        assert_eq!(launches, 1);
        assert!(open.iter().all(|gate| !gate.held.load(Ordering::SeqCst)));
    }
}
