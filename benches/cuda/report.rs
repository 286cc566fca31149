//! Timing, and its lines.

use std::cell::Cell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use moebius::cuda::Cuda;
use moebius::cuda::cudarc::driver::sys::CUevent_flags;
use moebius::{Error, Result};

use crate::Workload;
use crate::energy::Meter;
use crate::output::{complain, say};

/// Idle time before each phase, so that none starts at the lower clocks that another's heat has left.
const PAUSE: Duration = Duration::from_millis(400);
/// Calls of a phase, queued in one burst: those before the first that counts, in which every input set is seen, and
/// those that count.
#[derive(Debug, Clone, Copy)]
pub struct Burst {
    warm_up: usize,
    repeats: usize,
}

/// Of a forward, or of one product.
pub const CALLS: Burst = Burst { warm_up: 5, repeats: 20 };
/// Of a forward and backward: as many as the peers'. A chip reaches its power limit after some
/// 100 ms and then clocks lower, so that a burst's length is part of what is measured.
pub const STEPS: Burst = Burst { warm_up: 3, repeats: 10 };
/// A burst for measurements at the power limit.
pub const LONG: Burst = Burst { warm_up: 60, repeats: 20 };
/// Input sets, taken in turn.
pub const SETS: usize = 3;

/// How long a loop lasts whose energy is taken: many moves of the GPU's counter.
const LOOP: Duration = Duration::from_millis(1200);

pub struct Report {
    cuda: Cuda,
    gpu: String,
    date: String,
    meter: Option<Meter>,
    /// Whether phases are repeated for their energy.
    energy: bool,
    /// SMs that the measured products leave, as their lines say where there are any.
    reserved_sms: Cell<usize>,
    /// What was measured beside the time of the phase that was timed last, as ends of its line.
    beside: Cell<Beside>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Beside {
    sm_mhz: Option<u32>,
    /// Milliseconds and millijoules of a call in a loop of `LOOP`.
    of_loop: Option<(f64, f64)>,
}

impl Report {
    pub fn new(cuda: &Cuda, energy: bool) -> Result<Self> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let meter = Meter::new(cuda).map_err(|e| complain(format_args!("no clocks and no energy: {e}"))).ok();
        let (gpu, date) = (cuda.name()?, date(seconds / 86_400));
        let reserved_sms = Cell::default();
        Ok(Self { cuda: cuda.clone(), gpu, date, energy, reserved_sms, meter, beside: Cell::default() })
    }

    /// What is measured from here on leaves so many SMs.
    pub fn reserving(&self, sms: usize) {
        self.reserved_sms.set(sms);
    }

    /// Median milliseconds of a call, which is given the number of its input set. Calls are queued one behind the
    /// other, each between two events, and waited for at the end.
    pub fn time(&self, call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        self.time_burst(CALLS, call)
    }

    /// The same for so many calls.
    pub fn time_burst(&self, burst: Burst, mut call: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        let failed = |e| Error::Device { call: "bench", operation: "event".into(), message: format!("{e:?}") };
        let event = || self.cuda.stream().record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
        self.cuda.check()?;
        std::thread::sleep(PAUSE);
        for repeat in 0..burst.warm_up {
            call(repeat % SETS)?;
        }
        let mut spans = Vec::new();
        for repeat in 0..burst.repeats {
            let start = event()?;
            call(repeat % SETS)?;
            spans.push((start, event()?));
        }
        // While the last quarter runs: all is queued, so that nothing waits for this thread.
        if let Some((_, end)) = spans.get(spans.len() * 3 / 4) {
            end.synchronize().map_err(failed)?;
        }
        let sm_mhz = self.meter.as_ref().and_then(Meter::sm_mhz);
        self.cuda.check()?;
        let mut times: Vec<f32> =
            spans.iter().map(|(start, end)| start.elapsed_ms(end).map_err(failed)).collect::<Result<_>>()?;
        times.sort_by(f32::total_cmp);
        let ms = f64::from(times[times.len() / 2]);
        let of_loop = if self.energy { self.time_loop(ms, &mut call)? } else { None };
        self.beside.set(Beside { sm_mhz, of_loop });
        Ok(ms)
    }

    /// Milliseconds and millijoules of a call in a long loop, of calls that take about `ms`.
    fn time_loop(&self, ms: f64, call: &mut impl FnMut(usize) -> Result<()>) -> Result<Option<(f64, f64)>> {
        let Some(meter) = &self.meter else { return Ok(None) };
        // Queued in parts, so that the host does not run a second ahead.
        let part = (50.0 / ms).ceil() as usize;
        let (ms, watts) = meter.watts_of(|| -> Result<f64> {
            let (start, mut calls) = (Instant::now(), 0);
            while start.elapsed() < LOOP {
                for _ in 0..part {
                    call(calls % SETS)?;
                    calls += 1;
                }
                self.cuda.check()?;
            }
            Ok(start.elapsed().as_secs_f64() * 1e3 / calls as f64)
        });
        let ms = ms?;
        Ok(watts.map(|watts| (ms, watts * ms)))
    }

    pub fn line(&self, workload: &Workload, phase: &str, ms: f64, flop: f64) {
        self.print("moebius", workload.name, phase, ms, &format!("\"tflops\":{:.1}", flop / ms / 1e9));
    }

    /// A line of products that others were measured beside: the share of these's time.
    pub fn ratio(&self, workload: &Workload, phase: &str, ms: f64, base: f64) {
        self.print("moebius", workload.name, phase, ms, &format!("\"of_bf16\":{:.3}", ms / base));
    }

    /// A line of a phase that reads each used expert's weights: how many bytes.
    pub fn reading(&self, workload: &Workload, phase: &str, ms: f64, bytes: usize) {
        let tflops = workload.flop() / ms / 1e9;
        self.print("moebius", workload.name, phase, ms, &format!("\"tflops\":{tflops:.1},\"bytes\":{bytes}"));
    }

    /// A line of a phase that moves so many bytes.
    pub fn bytes(&self, workload: &str, phase: &str, ms: f64, bytes: f64) {
        let rate = bytes / ms / 1e6;
        self.print("moebius", workload, phase, ms, &format!("\"gb_s\":{rate:.0},\"bytes\":{bytes:.0}"));
    }

    pub fn copy(&self, ms: f64, bytes: usize) {
        self.print("copy", "copy", "copy", ms, &format!("\"gb_s\":{:.0}", bytes as f64 / ms / 1e6));
    }

    fn print(&self, name: &str, workload: &str, phase: &str, ms: f64, rest: &str) {
        let Self { gpu, date, .. } = self;
        let Beside { sm_mhz, of_loop } = self.beside.take();
        let clock = sm_mhz.map_or(String::new(), |mhz| format!("\"sm_mhz\":{mhz},"));
        let reserved = match self.reserved_sms.get() {
            0 => String::new(),
            sms => format!("\"reserved_sms\":{sms},"),
        };
        let energy = of_loop.map_or(String::new(), |(ms, mj)| format!("\"loop_ms\":{ms:.4},\"mj\":{mj:.1},"));
        say(format_args!(
            "{{\"impl\":\"{name}\",\"workload\":\"{workload}\",\"phase\":\"{phase}\",\"ms\":{ms:.4},{rest},\
             {reserved}{clock}{energy}\"gpu\":\"{gpu}\",\"date\":\"{date}\"}}"
        ));
    }
}

/// Year, month and day of a number of days since 1970.
fn date(days: u64) -> String {
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while left >= months[month] {
        left -= months[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, left + 1)
}
