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
    /// Has a drop of what the calls go through, on whichever thread, wait for the [`exit`](Self::exit). Waits for nothing.
    /// False: it is being dropped, and no replay may pass.
    fn enter(&self) -> bool;

    /// Ends what an [`enter`](Self::enter) that was true has begun.
    fn exit(&self);

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

/// Gates of a graph, each once, in an order that all graphs of the process have: threads that hold some and wait for others
/// never wait for each other.
#[derive(Default)]
pub(super) struct Gates(Vec<Weak<dyn ReplayGate>>);

impl Gates {
    pub(super) fn new(gates: impl IntoIterator<Item = Weak<dyn ReplayGate>>) -> Self {
        let mut gates: Vec<_> = gates.into_iter().collect();
        // No other gate gets the place of one that is gone while something names it.
        let place = |gate: &Weak<dyn ReplayGate>| gate.as_ptr().cast::<()>();
        gates.sort_by_key(place);
        gates.dedup_by_key(|gate| place(gate));
        Self(gates)
    }

    /// All of them, for a replay; `None` where one has been dropped or is being so.
    pub(super) fn enter(&self) -> Option<EnteredGates> {
        let mut entered = EnteredGates(Vec::with_capacity(self.0.len()));
        for gate in &self.0 {
            let gate = gate.upgrade().filter(|gate| gate.enter())?;
            entered.0.push(gate);
        }
        Some(entered)
    }
}

/// Gates that a replay has entered, in their order, until this is dropped.
pub(super) struct EnteredGates(Vec<Arc<dyn ReplayGate>>);

impl EnteredGates {
    /// Enqueues the replay while all gates are held, and has each watch it.
    ///
    /// # Errors
    /// The first of the gates', of `launch` or of the watches; where a watch fails the others have begun.
    pub(super) fn pass(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        pass_all(&self.0, launch)?;
        self.0.iter().map(|gate| gate.replayed()).fold(Ok(()), Result::and)
    }
}

impl Drop for EnteredGates {
    fn drop(&mut self) {
        self.0.iter().for_each(|gate| gate.exit());
    }
}

/// Runs `launch` while each of the gates is held.
fn pass_all(gates: &[Arc<dyn ReplayGate>], launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    match gates {
        [] => launch(),
        [first, others @ ..] => first.pass(&mut || pass_all(others, launch)),
    }
}

/// One of a stream's sources.
#[derive(Clone)]
struct Source {
    source: Weak<dyn FailureSource>,
    /// It is another stream's, whose faults its end clears, and not this one's.
    adopted: bool,
    /// It had failed as it went. All streams that have the source share this.
    ended_failed: Arc<AtomicBool>,
}

impl Source {
    fn lives(&self) -> bool {
        self.source.strong_count() > 0
    }

    /// It is gone, had failed, and what this stream's kernels found meanwhile has not been forgotten yet.
    fn left_faults(&self) -> bool {
        self.adopted && !self.lives() && self.ended_failed.load(Ordering::SeqCst)
    }
}

/// The sources that one stream's work depends on.
#[derive(Default)]
pub(super) struct FailureSources {
    sources: Mutex<Vec<Source>>,
    /// One of the stream's own that went had failed, and faults of before could not be cleared.
    uncleared: AtomicBool,
}

impl FailureSources {
    fn lock(&self) -> MutexGuard<'_, Vec<Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of the stream's own goes, and has failed: streams that have adopted it are to know. Called before it is gone.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn note_end_of_failed(&self) {
        let has_failed = |known: &&Source| known.source.upgrade().is_some_and(|source| source.failure().is_some());
        let sources = self.lock();
        sources.iter().filter(has_failed).for_each(|known| known.ended_failed.store(true, Ordering::SeqCst));
    }

    /// Faults of before the end of a source of the stream's own could not be cleared.
    #[cfg(feature = "nccl")]
    pub(super) fn note_uncleared(&self) {
        self.uncleared.store(true, Ordering::SeqCst);
    }

    /// Whether what kernels have found by now may have been in memory that nobody has written: once for each adopted source
    /// that is gone and had failed, waited for or not, and for one of the stream's own whose end could not clear it. What
    /// this stream's work behind that end has found before this is asked cannot be told from the rest.
    pub(super) fn take_failed(&self) -> bool {
        let mut sources = self.lock();
        let before = sources.len();
        sources.retain(|known| !known.left_faults());
        self.uncleared.swap(false, Ordering::SeqCst) || sources.len() < before
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// One more, for as long as it lives.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn add(&self, source: &Arc<dyn FailureSource>) {
        let mut sources = self.lock();
        sources.retain(|known| known.lives() || known.left_faults());
        sources.push(Source { source: Arc::downgrade(source), adopted: false, ended_failed: Arc::default() });
    }

    /// Those of another stream too, whose results this one's work takes.
    pub(super) fn adopt(&self, other: &Self) {
        if !std::ptr::eq(self, other) {
            let theirs = other.lock().clone();
            let mut own = self.lock();
            own.retain(|known| known.lives() || known.left_faults());
            // What a failed one has left there may be read here.
            for source in theirs.into_iter().filter(|theirs| theirs.lives() || theirs.left_faults()) {
                if !own.iter().any(|known| known.source.ptr_eq(&source.source)) {
                    own.push(Source { adopted: true, ..source });
                }
            }
        }
    }

    /// # Errors
    /// The error of the first source that has failed.
    pub(super) fn check(&self) -> Result<()> {
        self.lock().iter().find_map(|known| known.source.upgrade()?.failure()).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    struct Failed;

    impl FailureSource for Failed {
        fn failure(&self) -> Option<Error> {
            Some(Error::invalid("a test", "peer", "one that is there", "none"))
        }
    }

    /// One that works.
    struct Sound;

    impl FailureSource for Sound {
        fn failure(&self) -> Option<Error> {
            None
        }
    }

    /// As a communicator that is dropped.
    fn end(source: Arc<dyn FailureSource>, own: &FailureSources) {
        own.note_end_of_failed();
        drop(source);
    }

    /// A stream, and two that have adopted its sources, the second from the first.
    fn streams<const N: usize>(sources: [&Arc<dyn FailureSource>; N]) -> [FailureSources; 3] {
        let streams: [FailureSources; 3] = Default::default();
        sources.iter().for_each(|source| streams[0].add(source));
        streams[1].adopt(&streams[0]);
        streams[2].adopt(&streams[1]);
        streams
    }

    #[test]
    fn a_failure_is_kept_while_its_source_lives() {
        let source: Arc<dyn FailureSource> = Arc::new(Failed);
        let all = streams([&source]);
        assert!(all.iter().all(|stream| stream.check().is_err() && !stream.take_failed()));
        end(source, &all[0]);
        assert!(all.iter().all(|stream| stream.check().is_ok()));
        assert!(!all[0].take_failed(), "its end clears what it has raised");
    }

    /// Whether they have waited while it lived or not, and how often, the streams that had adopted it forget once what was
    /// found.
    #[test]
    fn faults_of_before_the_end_of_a_failed_source_are_forgotten_once_where_it_was_adopted() {
        for waits in [0, 1, 3] {
            let source: Arc<dyn FailureSource> = Arc::new(Failed);
            let all = streams([&source]);
            (0..waits).for_each(|_| assert!(all[1].check().is_err()));
            end(source, &all[0]);
            // What is added or adopted in its place takes nothing of it away.
            let next: Arc<dyn FailureSource> = Arc::new(Sound);
            all[1].add(&next);
            all[2].adopt(&all[0]);
            for stream in &all[1..] {
                assert_eq!([stream.take_failed(), stream.take_failed()], [true, false], "{waits} waits");
            }
        }
    }

    /// A failed one among the stream's own does not hide one that was adopted, nor the other way round.
    #[test]
    fn each_failed_source_is_known_by_itself() {
        let [first, second]: [Arc<dyn FailureSource>; 2] = [Arc::new(Failed), Arc::new(Failed)];
        let (one, other) = (FailureSources::default(), FailureSources::default());
        one.add(&first);
        other.add(&second);
        one.adopt(&other);
        assert!(one.check().is_err());
        end(second, &other);
        assert!(one.check().is_err(), "its own");
        end(first, &one);
        assert_eq!([one.take_failed(), one.take_failed()], [true, false]);
        assert!(!other.take_failed());
    }

    #[test]
    fn a_source_that_goes_without_a_failure_leaves_no_faults_untold() {
        let [sound, failed]: [Arc<dyn FailureSource>; 2] = [Arc::new(Sound), Arc::new(Failed)];
        let all = streams([&sound]);
        end(sound, &all[0]);
        assert!(!all.iter().any(FailureSources::take_failed));
        // Nor has a stream that adopts when all is over read what the failed one left.
        all[0].add(&failed);
        end(failed, &all[0]);
        all[1].adopt(&all[0]);
        assert!(!all[1].take_failed());
    }

    #[derive(Default)]
    struct Gate {
        ended: bool,
        held: AtomicBool,
        lock: Mutex<()>,
        closed: AtomicBool,
        entered: AtomicUsize,
        watched: AtomicUsize,
    }

    impl ReplayGate for Gate {
        fn enter(&self) -> bool {
            let open = !self.closed.load(Ordering::SeqCst);
            self.entered.fetch_add(usize::from(open), Ordering::SeqCst);
            open
        }

        fn exit(&self) {
            self.entered.fetch_sub(1, Ordering::SeqCst);
        }

        fn pass(&self, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
            if self.ended {
                return Err(Error::invalid("replay", "gate", "one that has not ended", "one that has"));
            }
            let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.held.store(true, Ordering::SeqCst);
            let launched = launch();
            self.held.store(false, Ordering::SeqCst);
            launched
        }

        fn replayed(&self) -> Result<()> {
            self.watched.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    }

    fn weak(gate: &Arc<Gate>) -> Weak<dyn ReplayGate> {
        let gate: Weak<Gate> = Arc::downgrade(gate);
        gate
    }

    fn gates<'a>(gates: impl IntoIterator<Item = &'a Arc<Gate>>) -> Gates {
        Gates::new(gates.into_iter().map(weak))
    }

    fn count(gates: &[Arc<Gate>], of: impl Fn(&Gate) -> &AtomicUsize) -> Vec<usize> {
        gates.iter().map(|gate| of(gate).load(Ordering::SeqCst)).collect()
    }

    #[test]
    fn a_replay_is_launched_while_all_gates_are_held() {
        let open: Vec<Arc<Gate>> = (0..3).map(|_| Arc::default()).collect();
        let mut launches = 0;
        let mut launch = || {
            launches += 1;
            assert!(open.iter().all(|gate| gate.held.load(Ordering::SeqCst)));
            Ok(())
        };
        // One that is named twice is passed once: it would wait for itself.
        let entered = gates(open.iter().chain(&open)).enter().expect("open gates");
        assert_eq!(count(&open, |gate| &gate.entered), [1; 3]);
        assert!(entered.pass(&mut launch).is_ok());
        drop(entered);
        assert_eq!(count(&open, |gate| &gate.watched), [1; 3]);
        // One that has ended lets nothing through, and what is not launched nobody watches.
        let ended = Arc::new(Gate { ended: true, ..Gate::default() });
        let entered = gates(open.iter().chain([&ended])).enter().expect("gates that are not dropped");
        assert!(entered.pass(&mut launch).is_err_and(|e| e.to_string().contains("has not ended")));
        drop(entered);
        assert_eq!((launches, count(&open, |gate| &gate.watched)), (1, vec![1; 3]));
        assert!(open.iter().all(|gate| !gate.held.load(Ordering::SeqCst)));
        assert_eq!(count(&open, |gate| &gate.entered), [0; 3]);
    }

    #[test]
    fn nothing_passes_a_gate_that_is_dropped() {
        let open: Vec<Arc<Gate>> = (0..3).map(|_| Arc::default()).collect();
        for at in 0..3 {
            open[at].closed.store(true, Ordering::SeqCst);
            assert!(gates(&open).enter().is_none());
            open[at].closed.store(false, Ordering::SeqCst);
        }
        let gone = gates(open.iter().chain([&Arc::default()]));
        assert!(gone.enter().is_none());
        // What was entered before is left again.
        assert_eq!(count(&open, |gate| &gate.entered), [0; 3]);
    }

    /// Two graphs whose captures have met the gates in opposite orders, replayed by two threads. In these orders each
    /// thread would hold its first gate and wait for the other's before long.
    #[test]
    fn threads_take_gates_in_one_order() {
        const REPLAYS: usize = 2000;
        let both: [Arc<Gate>; 2] = Default::default();
        let graphs = [gates(&both), gates(both.iter().rev())];
        let (send, done) = mpsc::channel();
        for graph in graphs {
            let (both, send) = (both.clone(), send.clone());
            thread::spawn(move || {
                for _replay in 0..REPLAYS {
                    let entered = graph.enter().expect("open gates");
                    let mut launch = || {
                        thread::yield_now();
                        Ok(())
                    };
                    entered.pass(&mut launch).expect("a launch");
                }
                drop(both);
                send.send(()).expect("a listener");
            });
        }
        for _thread in 0..2 {
            done.recv_timeout(Duration::from_secs(60)).expect("neither thread waits for the other");
        }
        assert_eq!(count(&both, |gate| &gate.watched), [2 * REPLAYS; 2]);
    }
}
