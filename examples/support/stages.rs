//! Time of each stage of the layer, from its `tracing` spans.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Adds up how long each thread is inside each span. A stage's time includes waiting for other ranks.
#[derive(Clone, Default)]
pub struct Stages(Arc<Inner>);

#[derive(Default)]
struct Inner {
    next: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    names: HashMap<u64, &'static str>,
    entered: HashMap<(u64, ThreadId), Instant>,
    /// In the order in which stages are first met.
    times: Vec<(&'static str, HashMap<ThreadId, Duration>)>,
}

impl Stages {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Each stage's time on the rank where it took longest.
    pub fn slowest(&self) -> Vec<(&'static str, Duration)> {
        let longest = |ranks: &HashMap<ThreadId, Duration>| ranks.values().max().copied().unwrap_or_default();
        self.state().times.iter().map(|(name, ranks)| (*name, longest(ranks))).collect()
    }
}

impl Subscriber for Stages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target().starts_with("moebius::layer")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let id = self.0.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.state().names.insert(id, span.metadata().name());
        Id::from_u64(id)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, span: &Id) {
        self.state().entered.insert((span.into_u64(), std::thread::current().id()), Instant::now());
    }

    fn exit(&self, span: &Id) {
        let (now, thread) = (Instant::now(), std::thread::current().id());
        let mut state = self.state();
        let (Some(start), Some(name)) =
            (state.entered.remove(&(span.into_u64(), thread)), state.names.remove(&span.into_u64()))
        else {
            return;
        };
        let at = state.times.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            state.times.push((name, HashMap::new()));
            state.times.len() - 1
        });
        *state.times[at].1.entry(thread).or_default() += now - start;
    }
}
