//! Lines.

use std::time::{SystemTime, UNIX_EPOCH};

use moebius::Result;
use moebius::cuda::Cuda;
use moebius::nccl::NcclLibrary;

use crate::output::say;
use crate::{Dispatcher, Workload};

pub struct Report {
    gpu: String,
    date: String,
    ranks: usize,
    nccl: String,
}

/// Subject of a line.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub workload: Workload,
    pub dispatcher: Dispatcher,
    pub routing: &'a str,
}

/// Median and 99th percentile of the slowest ranks' times.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    pub median: f64,
    pub p99: f64,
}

/// `of[rank][repeat]`.
pub fn spread(of: &[Vec<f64>]) -> Spread {
    let repeats = of.first().map_or(0, Vec::len);
    let mut slowest: Vec<f64> = (0..repeats).map(|i| of.iter().map(|r| r[i]).fold(0.0, f64::max)).collect();
    slowest.sort_by(f64::total_cmp);
    let at = |share: f64| slowest.get(((repeats as f64 - 1.0) * share).round() as usize).copied().unwrap_or(f64::NAN);
    Spread { median: at(0.5), p99: at(0.99) }
}

impl Report {
    pub fn new(cuda: &Cuda, ranks: usize, library: &NcclLibrary) -> Result<Self> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Ok(Self { gpu: cuda.name()?, date: date(seconds / 86_400), ranks, nccl: library.version() })
    }

    /// A line; `rest` are further members, each with a comma before it.
    pub fn line(&self, subject: Subject<'_>, phase: &str, time: Spread, rest: &str) {
        let Subject { workload: w, dispatcher: d, routing } = subject;
        let Self { gpu, date, ranks, nccl } = self;
        let sms = if d.max_sms == 0 { String::new() } else { format!(",\"max_sms\":{}", d.max_sms) };
        say(format_args!(
            "{{\"impl\":\"moebius\",\"workload\":\"{}-t{}-{routing}\",\"phase\":\"{phase}\",\"ms\":{:.4},\"p99_ms\":{:.4},\
             \"ranks\":{ranks},\"dispatcher\":\"{}\",\"mode\":\"{}\",\"tokens\":{},\"hidden\":{},\"experts\":{},\
             \"top_k\":{}{sms}{rest},\"nccl\":\"{nccl}\",\"gpu\":\"{gpu}\",\"date\":\"{date}\"}}",
            w.name, w.tokens, time.median, time.p99, d.name, d.mode, w.tokens, w.hidden, w.experts, w.top_k
        ));
    }

    /// A line about sharded weights; `rest` are further members.
    pub fn etp(&self, w: &Workload, phase: &str, ms: f64, rest: &str) {
        let Self { gpu, date, ranks, nccl } = self;
        say(format_args!(
            "{{\"impl\":\"moebius\",\"workload\":\"{}-t{}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},{rest},\"ranks\":{ranks},\
             \"tokens\":{},\"hidden\":{},\"inner\":{},\"experts\":{},\"top_k\":{},\"nccl\":\"{nccl}\",\"gpu\":\"{gpu}\",\
             \"date\":\"{date}\"}}",
            w.name, w.tokens, w.tokens, w.hidden, w.inner, w.experts, w.top_k
        ));
    }

    /// Memory of a GPU that a communicator takes.
    pub fn memory(&self, of: &str, bytes: usize) {
        let Self { gpu, date, ranks, nccl } = self;
        say(format_args!(
            "{{\"impl\":\"{of}\",\"phase\":\"memory\",\"bytes\":{bytes},\"ranks\":{ranks},\"nccl\":\"{nccl}\",\
             \"gpu\":\"{gpu}\",\"date\":\"{date}\"}}"
        ));
    }
}

/// Year, month and day of a number of days since 1970 (Howard Hinnant's algorithm).
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    format!("{}-{month:02}-{day:02}", yoe + era * 400 + u64::from(month <= 2))
}
