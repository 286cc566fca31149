//! Table that the reference comparison prints.

use super::compare::Difference;
use super::output::say;

/// One result against its references.
#[derive(Debug, Clone)]
pub struct Row {
    /// Name of the compared value.
    pub name: String,
    /// Distance from the dense reference.
    pub dense: Option<Difference>,
    /// Distance from the folder's golden.
    pub golden: Option<Difference>,
    /// Largest relative error allowed.
    pub tolerance: f64,
}

impl Row {
    /// True where every comparison is within the tolerance.
    pub fn ok(&self) -> bool {
        [self.dense, self.golden].into_iter().flatten().all(|d| d.within(self.tolerance))
    }

    /// The larger relative error.
    fn worst(&self) -> f64 {
        [self.dense, self.golden]
            .into_iter()
            .flatten()
            .map(|d| d.relative)
            .fold(0.0, |a: f64, b| if b.is_nan() || b > a { b } else { a })
    }
}

/// Prints the rows in their order. Of those after the first `always`, `limit` are shown, the best ones left out and
/// counted.
pub fn print_rows(rows: &[Row], limit: usize, always: usize) {
    let width = rows.iter().map(|r| r.name.chars().count()).max().unwrap_or(0).max(24);
    say(format_args!("{:width$}  {:^21}  {:^21}", "", "against dense", "against golden"));
    say(format_args!(
        "{:width$}  {:>10} {:>10}  {:>10} {:>10}  {:>9}",
        "", "max abs", "relative", "max abs", "relative", "tolerance"
    ));
    let always = always.min(rows.len());
    let mut by_error: Vec<usize> = (always..rows.len()).collect();
    // Failures first, then by error.
    by_error.sort_by(|&a, &b| {
        let (a, b) = (&rows[a], &rows[b]);
        a.ok().cmp(&b.ok()).then(b.worst().total_cmp(&a.worst()))
    });
    by_error.truncate(limit);
    let mut shown: Vec<usize> = (0..always).chain(by_error).collect();
    shown.sort_unstable();
    let cell = |d: Option<Difference>| match d {
        Some(d) => format!("{:>10.2e} {:>10.2e}", d.max_abs, d.relative),
        None => format!("{:>10} {:>10}", "-", "-"),
    };
    for row in shown.iter().map(|&i| &rows[i]) {
        let verdict = if row.ok() { "ok" } else { "FAIL" };
        let (dense, golden) = (cell(row.dense), cell(row.golden));
        say(format_args!("{:width$}  {dense}  {golden}  {:>9.0e}  {verdict}", row.name, row.tolerance));
    }
    if rows.len() > shown.len() {
        say(format_args!("{} smaller errors not shown (--rows {} shows all)", rows.len() - shown.len(), rows.len()));
    }
}

/// Prints tokens per expert as bars.
pub fn print_load(tokens_per_expert: &[usize]) {
    const WIDTH: usize = 40;
    let most = tokens_per_expert.iter().copied().max().unwrap_or(0).max(1);
    for (expert, &tokens) in tokens_per_expert.iter().enumerate() {
        say(format_args!("  expert {expert:>3} {tokens:>6} {}", "█".repeat((tokens * WIDTH).div_ceil(most))));
    }
    let total: usize = tokens_per_expert.iter().sum();
    let mean = total as f64 / tokens_per_expert.len().max(1) as f64;
    say(format_args!("  {total} choices, most/mean {:.2}", if mean > 0.0 { most as f64 / mean } else { 0.0 }));
}

/// Key that sorts `experts.10` after `experts.2`.
pub fn natural(name: &str) -> Vec<(u64, String)> {
    name.split('.')
        .map(|part| part.parse::<u64>().map_or((u64::MAX, part.to_string()), |n| (n, String::new())))
        .collect()
}
