//! Two subjects timed by turns, so that whatever else the machine does falls on both.

use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode};

/// Something to time.
pub struct Subject<'a> {
    pub name: &'a str,
    pub run: &'a mut dyn FnMut(),
}

/// Subject of a comparison.
pub struct Case<'a> {
    pub name: &'a str,
    /// Floating-point operations that either subject does at least.
    pub flops: f64,
    /// Least ratio of rates wanted.
    pub bar: f64,
}

pub const HEADER: &str = "| case | ours | theirs | ours / theirs | bar |\n|---|---|---|---|---|";

/// Benchmarks both, and gives a table row with medians over all turns.
pub fn compare(c: &mut Criterion, case: Case<'_>, ours: Subject<'_>, theirs: Subject<'_>) -> Option<String> {
    let mut turns: Vec<(Duration, Duration)> = Vec::new();
    let mut group = c.benchmark_group(case.name);
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    for (name, first) in [(ours.name, true), (theirs.name, false)] {
        group.bench_function(name, |b| {
            b.iter_custom(|n| {
                let before = turns.len();
                for _ in 0..n {
                    turns.push((time(ours.run), time(theirs.run)));
                }
                turns[before..].iter().map(|(a, b)| if first { *a } else { *b }).sum()
            });
        });
    }
    group.finish();
    if turns.is_empty() {
        return None;
    }
    let median = |of: &dyn Fn(&(Duration, Duration)) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let (a, b) = (median(&|t| t.0.as_secs_f64()), median(&|t| t.1.as_secs_f64()));
    let ratio = median(&|t| t.1.as_secs_f64() / t.0.as_secs_f64());
    let shown = |name: &str, s: f64| format!("{name}: {:.1} ms, {:.1} GFLOP/s", s * 1e3, case.flops / s / 1e9);
    let (a, b) = (shown(ours.name, a), shown(theirs.name, b));
    Some(format!("| {} | {a} | {b} | {ratio:.2} | {:.1} |", case.name, case.bar))
}

fn time(run: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}
