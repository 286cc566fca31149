//! Ranks as threads, for tests beside the code.

use std::thread;
use std::time::Duration;

use crate::cpu::{Cpu, ThreadWorld};

use crate::etp::Comms;

/// Results of `run` for each of `n` ranks, which have two collective threads, in rank order.
pub(in crate::etp) fn ranks<R: Send>(n: usize, run: impl Fn(Comms<Cpu>) -> R + Sync) -> Vec<R> {
    let comms = || ThreadWorld::create(n, Duration::from_secs(60));
    thread::scope(|scope| {
        let start = |(gather, reduce)| {
            let run = &run;
            scope.spawn(move || run(Comms { gather: Box::new(gather), reduce: Box::new(reduce) }))
        };
        let threads: Vec<_> = comms().into_iter().zip(comms()).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
