//! A rank that is lost in a captured step over two GPUs, or late: each rank hears of a lost one by a typed error within the
//! timeout, and has no tokens of that step; one that is late and comes is waited for.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use moebius::candle::{DeviceGroup, EpGroup};
use moebius::checkpoint::Checkpoint;
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::nccl::{NcclComm, NcclLibrary};
use moebius_models::{LoadOptions, Model, Stepper};

use crate::Result;

/// Within which a collective ends, and a replayed step. Joining takes some of it.
const TIMEOUT: Duration = Duration::from_secs(8);
/// What a failure may take beside it: the others are told, and streams come to an end.
const LATE: Duration = Duration::from_secs(8);
/// Longest wait of a rank for the other, which may have failed on its way: the model is loaded and captured before.
const MEETING: Duration = Duration::from_secs(60);
/// How long a rank is waited for that the others go on without.
const PATIENCE: Duration = Duration::from_secs(2);
/// How late a rank is that is waited for.
const DELAY: Duration = Duration::from_millis(500);
/// Replayed steps before.
const STEPS: usize = 3;

/// What becomes of the second rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lost {
    /// It fails between two steps, drops what it has and leaves.
    Leaves,
    /// It is there, and does not step.
    StaysAway,
    /// It steps late, and is not lost.
    ComesLate,
    /// It leaves, and the first goes on without it.
    IsGoneOnWithout,
}

impl Lost {
    /// What the error of the rank that is left names, one of these, over this dispatcher.
    fn reasons(self, dispatcher: DispatcherKind) -> &'static [&'static str] {
        match (self, dispatcher) {
            (Self::Leaves, _) => &["has left the group"],
            // Kernels of its own wait there, which tell for whom. How far the last replay of the rank has come decides which
            // of its words is missed first.
            (_, DispatcherKind::NvLink | DispatcherKind::NvLinkLowLatency) => {
                &["rank 1 did not come to the call in time", "rank 1 did not end the call in time"]
            }
            _ => &["did not arrive within"],
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

/// The first rank replays steps behind the second's last, over the dispatcher.
pub fn lost_in_a_replay(how: Lost, dispatcher: DispatcherKind) -> Result<()> {
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
                let work = move || rank((i, how), device, (comm, dispatcher), meetings);
                scope.spawn(move || work().map_err(|e| format!("rank {i}: {e}")))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a rank panicked".into()))).collect()
    });
    let outcomes: Vec<std::result::Result<(), String>> = outcomes;
    outcomes.into_iter().try_for_each(|outcome| outcome.map_err(Into::into))
}

fn rank(
    (rank, how): (usize, Lost),
    device: &Device,
    (comm, dispatcher): (NcclComm, DispatcherKind),
    meetings: &[Meeting; 2],
) -> Result<()> {
    let checkpoint = Checkpoint::open(concat!(env!("CARGO_MANIFEST_DIR"), "/small"))?;
    let patience = (how == Lost::IsGoneOnWithout).then_some(PATIENCE);
    let config = GroupConfig { max_rows: 512, dispatcher, patience, ..GroupConfig::new(8, 256) };
    let group = Group::new(comm.cuda().clone(), Box::new(comm), config)?;
    let reasons = how.reasons(group.dispatcher_kind());
    let group = DeviceGroup::new(EpGroup::new(group), device)?;
    let model = Model::load_on(&checkpoint, group.clone(), LoadOptions::default())?;
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
        (_, Lost::ComesLate) => late_step(&mut stepper, rank, &meetings[1]),
        (0, Lost::IsGoneOnWithout) => steps_without(&mut stepper, &group),
        (_, Lost::IsGoneOnWithout) => Ok(()),
        (0, _) => {
            let outcome = error_of_a_step(&mut stepper, reasons);
            if how == Lost::StaysAway {
                meetings[1].wait()?;
            }
            outcome?;
            computes(device)
        }
        (_, Lost::Leaves) => Ok(()),
        // Then this rank's own step fails too.
        (_, Lost::StaysAway) => {
            meetings[1].wait()?;
            error_of_a_step(&mut stepper, &["replay"])?;
            computes(device)
        }
    }
}

/// A step that the second rank is late to: the tokens are those of a step that nobody is late to.
fn late_step(stepper: &mut Stepper<'_>, rank: usize, meeting: &Meeting) -> Result<()> {
    let mut steps = Vec::new();
    for late in [false, true] {
        stepper.clear()?;
        stepper.feed(&Tensor::new(&[[5u32 + rank as u32, 92, 65]], &Device::Cpu)?)?;
        if late {
            meeting.wait()?;
            if rank == 1 {
                std::thread::sleep(DELAY);
            }
        }
        stepper.step()?;
        steps.push(stepper.next_ids()?);
    }
    if !stepper.is_captured() || steps[0] != steps[1] {
        return Err(format!("captured: {}; {steps:?}", stepper.is_captured()).into());
    }
    Ok(())
}

/// Replayed steps of a rank that the other has left: each has its ids, and the group tells once whom it goes on without.
fn steps_without(stepper: &mut Stepper<'_>, group: &DeviceGroup) -> Result<()> {
    let group = group.on::<moebius::cuda::Cuda>().ok_or("a group on another device")?;
    for round in 0..2 {
        for _ in 0..STEPS {
            stepper.step()?;
            stepper.next_ids()?;
        }
        match (round, group.lock().dispatcher().check()) {
            (0, Err(moebius::Error::LateRanks { late, .. })) if late == [1] => {}
            (1, Ok(())) => {}
            (_, told) => return Err(format!("round {round}: {told:?}").into()),
        }
    }
    if stepper.is_captured() { Ok(()) } else { Err("steps are not captured any more".into()) }
}

/// The GPU works on.
fn computes(device: &Device) -> Result<()> {
    let sum = Tensor::ones((64, 64), DType::F32, device)?.sum_all()?.to_scalar::<f32>()?;
    if sum == 4096.0 { Ok(()) } else { Err(format!("a sum of 4096 ones: {sum}").into()) }
}

/// A step's ids are an error that names the replay and why it has failed, and comes in time; so is the step behind it.
fn error_of_a_step(stepper: &mut Stepper<'_>, reasons: &[&str]) -> Result<()> {
    let start = Instant::now();
    let error = match stepper.step().map(drop).and_then(|()| stepper.next_ids()) {
        Ok(ids) => return Err(format!("a step without the other rank gave {ids:?}").into()),
        Err(error) => error.to_string(),
    };
    if start.elapsed() > TIMEOUT + LATE {
        return Err(format!("{:?} until: {error}", start.elapsed()).into());
    }
    if !error.contains("replay") || !reasons.iter().any(|reason| error.contains(reason)) {
        return Err(format!("expected an error of the replay with one of {reasons:?}, found: {error}").into());
    }
    match stepper.step() {
        Ok(_) => Err("a step behind the one that failed was run".into()),
        Err(_) => Ok(()),
    }
}
