//! A rank that is lost in a captured step over two GPUs: each rank hears of it by a typed error within the timeout.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::checkpoint::Checkpoint;
use moebius::ep::{Group, GroupConfig};
use moebius::nccl::{NcclComm, NcclLibrary};
use moebius_models::{LoadOptions, Model, Stepper};

use crate::Result;

/// Within which a collective ends, and a replayed step. Joining takes some of it.
const TIMEOUT: Duration = Duration::from_secs(8);
/// What a failure may take beside it: the others are told, and streams come to an end.
const LATE: Duration = Duration::from_secs(8);
/// Longest wait of a rank for the other, which may have failed on its way: the model is loaded and captured before.
const MEETING: Duration = Duration::from_secs(60);
/// Replayed steps before.
const STEPS: usize = 3;

/// How the second rank is lost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lost {
    /// It fails between two steps, drops what it has and leaves.
    Leaves,
    /// It is there, and does not step.
    StaysAway,
}

impl Lost {
    /// What the error of the rank that is left names.
    fn reason(self) -> &'static str {
        match self {
            Self::Leaves => "has left the group",
            Self::StaysAway => "did not arrive within",
        }
    }
}

/// Where both ranks wait for each other.
#[derive(Debug, Default)]
struct Meeting(Mutex<usize>, Condvar);

impl Meeting {
    fn wait(&self) -> Result<()> {
        let mut there = self.0.lock().map_err(|e| e.to_string())?;
        *there += 1;
        self.1.notify_all();
        let waited = self.1.wait_timeout_while(there, MEETING, |there| *there < 2).map_err(|e| e.to_string())?;
        if waited.1.timed_out() { Err("the other rank did not come".into()) } else { Ok(()) }
    }
}

/// The first rank replays steps behind the second's last.
pub fn lost_in_a_replay(how: Lost) -> Result<()> {
    let devices = (0..2).map(moebius::candle::device_for_capture).collect::<candle_core::Result<Vec<_>>>()?;
    let gpus = devices.iter().map(moebius::candle::cuda).collect::<moebius::Result<Vec<_>>>()?;
    let comms = NcclComm::threads(&NcclLibrary::open()?, &gpus, TIMEOUT)?;
    // Where both have replayed, and where the first has failed.
    let meetings = [Meeting::default(), Meeting::default()];
    let (meetings, rank) = (&meetings, &rank);
    let outcomes = std::thread::scope(|scope| {
        let places = devices.iter().zip(comms).enumerate();
        let threads: Vec<_> = places
            .map(|(i, (device, comm))| {
                scope.spawn(move || rank((i, how), device, comm, meetings).map_err(|e| format!("rank {i}: {e}")))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
    });
    let outcomes: Vec<std::result::Result<(), String>> = outcomes;
    outcomes.into_iter().try_for_each(|outcome| outcome.map_err(Into::into))
}

fn rank((rank, how): (usize, Lost), device: &Device, comm: NcclComm, meetings: &[Meeting; 2]) -> Result<()> {
    let checkpoint = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/small"))?;
    let config = GroupConfig { max_rows: 512, ..GroupConfig::new(8, 256) };
    let group = Group::new(comm.cuda().clone(), Box::new(comm), config)?;
    let group = DeviceGroup::new(EpGroup::new(group), device)?;
    let model = Model::load_on(&checkpoint, group, LoadOptions::default())?;
    let mut stepper = model.stepper(1, 64)?;
    stepper.feed(&Tensor::new(&[[3u32 + rank as u32, 14, 15]], device)?)?;
    stepper.capture_over_ranks(1)?;
    for _ in 0..=STEPS {
        stepper.step()?;
        stepper.next_ids()?;
    }
    let captured = stepper.is_captured();
    meetings[0].wait()?;
    if !captured {
        return Err(format!("steps are not captured: {:?}", stepper.capture_error()).into());
    }
    match (rank, how) {
        (0, _) => {
            let outcome = error_of_a_step(&mut stepper, how.reason());
            if how == Lost::StaysAway {
                meetings[1].wait()?;
            }
            outcome
        }
        (_, Lost::Leaves) => Ok(()),
        // Then this rank's own step fails too.
        (_, Lost::StaysAway) => {
            meetings[1].wait()?;
            error_of_a_step(&mut stepper, "replay")
        }
    }
}

/// A step's ids are an error that names the replay and why it has failed, and comes in time; so is the step behind it.
fn error_of_a_step(stepper: &mut Stepper<'_>, reason: &str) -> Result<()> {
    let start = Instant::now();
    let error = match stepper.step().map(drop).and_then(|()| stepper.next_ids()) {
        Ok(ids) => return Err(format!("a step without the other rank gave {ids:?}").into()),
        Err(error) => error.to_string(),
    };
    if start.elapsed() > TIMEOUT + LATE {
        return Err(format!("{:?} until: {error}", start.elapsed()).into());
    }
    if !error.contains("replay") || !error.contains(reason) {
        return Err(format!("expected an error of the replay with \"{reason}\", found: {error}").into());
    }
    match stepper.step() {
        Ok(_) => Err("a step behind the one that failed was run".into()),
        Err(_) => Ok(()),
    }
}
