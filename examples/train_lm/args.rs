//! The command line.

use std::path::PathBuf;

use candle_core::DType;
use clap::{Parser, ValueEnum};
use moebius::ep::DispatcherKind;
use moebius::etp::Payload;

use crate::device::Place;
use crate::lm::{Settings, Tolerances};
use crate::mesh::Mesh;
use crate::output::Usage;

/// Bound that the loss is below after so many steps, with every other option at its default.
pub const MAX_LOSS: f64 = 2.4;
pub const MAX_LOSS_STEPS: usize = 500;
/// More would take gigabytes.
const MOST_EXPERTS: usize = 1024;

/// Trains a small byte-level Mixture-of-Experts language model over ranks in one process.
///
/// Fails where a gradient differs from the dense reference model's by more than 1e-5 (burn on CUDA, whose products round
/// to TF32: 5e-3), the loss does not fall below
/// --max-loss, or an expert ends with less than 1 % of the load.
///
/// Exit code: 0 where all of that holds, 1 where something does not or the run failed, 2 for a wrong command line.
#[derive(Debug, Clone, Parser)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Host framework.
    #[arg(long, value_enum, default_value = "candle")]
    pub framework: Framework,
    /// Ranks, one thread each; without --etp a divisor of --experts [default: 2, or 4 with --etp; on GPUs 1, or as many
    /// as --etp and --ep need].
    #[arg(long)]
    pub ranks: Option<usize>,
    /// Ranks that share the shards of each expert weight; ranks with the same shard are replicas. Losses and weights
    /// are the same to the bit for each of 1, 2, 4 with one microbatch a step.
    #[arg(long)]
    pub etp: Option<usize>,
    /// Ranks among which the experts are divided [default: 1 with --etp, else --ranks].
    #[arg(long, requires = "etp")]
    pub ep: Option<usize>,
    /// In what form shards travel; weights that the layers see are then what it stands for, in the dense reference model
    /// too.
    #[arg(long, value_enum, default_value = "plain", requires = "etp")]
    pub shard_payload: PayloadArg,
    /// The GPUs' copy engines carry shards and their gradients, over NCCL 2.29 or later: with --device cuda, and --etp
    /// above 1.
    #[arg(long, requires = "etp")]
    pub copy_engines: bool,
    /// In what form tokens travel to their experts, which read what it stands for, in the dense reference model too.
    #[arg(long, value_enum, default_value = "plain")]
    pub token_payload: PayloadArg,
    /// Forwards and backwards a step; a rank's sequences are divided among them.
    #[arg(long, default_value_t = 1)]
    pub microbatches: usize,
    /// Largest norm of the gradients of all parameters of all ranks [default: no clipping].
    #[arg(long)]
    pub clip: Option<f64>,
    /// Be one rank of several that a launcher has started as processes, one GPU each (docs/ranks.md); rank 0 speaks.
    #[arg(long)]
    pub processes: bool,
    /// Where the ranks train; the dense reference model stays on the CPU.
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Place,
    /// Training steps.
    #[arg(long, default_value_t = MAX_LOSS_STEPS)]
    pub steps: usize,
    /// Folder of a run's state (--save) to go on from, with other numbers of ranks if need be, and from the other
    /// framework's.
    #[arg(long)]
    pub resume: Option<PathBuf>,
    /// Folder to leave the run's state in, when it ends.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// How tokens travel between ranks: all_to_all, all_gather, nccl_ep, or auto, what the crate's table says or
    /// MOEBIUS_EP [default: that of the state that the run goes on from, where this or --measure-dispatcher was given to
    /// it; else auto].
    #[arg(long, conflicts_with = "measure_dispatcher")]
    pub dispatcher: Option<DispatcherKind>,
    /// Time each dispatcher in steps of the layers' sizes before the first, and take the quickest; --save stores it. A
    /// run that goes on from there keeps it and times nothing. Not with --etp, where each group of ranks that share the
    /// experts would choose for itself.
    #[arg(long, conflicts_with = "etp")]
    pub measure_dispatcher: bool,
    /// End after so many of the --steps, those of the resumed run counted: learning rates are those of --steps.
    #[arg(long)]
    pub until: Option<usize>,
    /// Type of router and experts, whose optimizer has main weights in f32; f16 has its loss scaled. Not compared with
    /// the dense reference model but in f32.
    #[arg(long, value_enum, default_value = "f32")]
    pub layer_dtype: LayerType,
    /// File for the losses, one line a step, to the last bit.
    #[arg(long)]
    pub losses: Option<PathBuf>,
    /// Text to train on [default: this crate's own sources].
    #[arg(long)]
    pub text: Option<PathBuf>,
    /// Folder for loss.png and expert-load.png.
    #[arg(long, default_value = "target/train_lm")]
    pub out: PathBuf,
    /// Seed of the first weights and of the batches.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// The mean loss of the last 20 steps must be below this (nats per byte; a uniform guess has 5.55) [default: 2.4
    /// from 500 steps on; a shorter run's loss is not checked].
    #[arg(long)]
    pub max_loss: Option<f64>,
    /// Steps from one comparison with the dense reference model to the next.
    #[arg(long, default_value_t = 1)]
    pub check_every: usize,
    /// Experts of each layer, over all ranks.
    #[arg(long, default_value_t = 8)]
    pub experts: usize,
    /// Sequences of a step, over all ranks.
    #[arg(long, default_value_t = 8)]
    pub batch: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Framework {
    /// candle
    Candle,
    /// burn (a build with --features burn; on a GPU burn-cuda); the dense reference model stays in candle
    Burn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PayloadArg {
    /// as they are
    Plain,
    /// quantized, 0.5625 bytes an element
    Nvfp4,
    /// quantized, 1.03125 bytes an element
    Mxfp8,
    /// quantized in blocks of 128, 1.03125 bytes an element
    Fp8Block,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LayerType {
    F32,
    Bf16,
    F16,
}

impl LayerType {
    fn dtype(self) -> DType {
        match self {
            LayerType::F32 => DType::F32,
            LayerType::Bf16 => DType::BF16,
            LayerType::F16 => DType::F16,
        }
    }
}

impl PayloadArg {
    fn payload(self) -> Payload {
        match self {
            PayloadArg::Plain => Payload::Plain,
            PayloadArg::Nvfp4 => Payload::Nvfp4,
            PayloadArg::Mxfp8 => Payload::Mxfp8,
            PayloadArg::Fp8Block => Payload::Fp8Block,
        }
    }
}

impl Args {
    /// Bound that the loss must be below at the end, where that can be asked of a run of this length.
    pub fn loss_bound(&self) -> Option<f64> {
        let ends = self.until.is_none_or(|until| until >= self.steps);
        self.max_loss.or((self.steps >= MAX_LOSS_STEPS && ends).then_some(MAX_LOSS))
    }

    fn mesh(&self) -> Result<Mesh, Usage> {
        let default = match (self.device, self.etp) {
            (Place::Cpu, None) => 2,
            (Place::Cpu, Some(_)) => 4,
            (_, Some(etp)) => etp.max(1).saturating_mul(self.ep.unwrap_or(1)),
            _ => 1,
        };
        let ranks = self.ranks.unwrap_or(default);
        let ep = self.ep.unwrap_or(if self.etp.is_some() { 1 } else { ranks });
        for (name, value) in [("--ranks", ranks), ("--ep", ep), ("--etp", self.etp.unwrap_or(1))] {
            if value == 0 {
                return Err(format!("{name}: expected at least 1, found 0").into());
            }
        }
        let given = match self.ranks {
            Some(_) if self.processes => format!("the {ranks} ranks that the launcher has started"),
            Some(_) => format!("--ranks {ranks}"),
            None => format!("the {ranks} ranks that are the default (give --ranks)"),
        };
        if !self.experts.is_multiple_of(ep) {
            // Without --etp all ranks share the experts.
            let parts = if self.ep.is_some() { format!("--ep {ep}") } else { given };
            return Err(format!("--experts {}: expected a multiple of {parts}", self.experts).into());
        }
        let etp = self.etp.unwrap_or(1);
        if !ep.checked_mul(etp).is_some_and(|each| ranks.is_multiple_of(each)) {
            let each = if self.ep.is_some() { format!("--ep {ep} times --etp {etp}") } else { format!("--etp {etp}") };
            return Err(format!("{each} does not divide {given}").into());
        }
        Ok(Mesh { ranks, ep, etp: self.etp, engines: self.copy_engines })
    }

    pub fn settings(&self) -> Result<Settings, Usage> {
        let mesh = self.mesh()?;
        if self.microbatches == 0 {
            return Err("--microbatches: expected at least 1, found 0".into());
        }
        if self.batch / mesh.ranks < self.microbatches {
            let least = mesh.ranks.saturating_mul(self.microbatches);
            let each = format!("one for each of {} ranks and {} microbatches", mesh.ranks, self.microbatches);
            return Err(format!("--batch {}: expected at least {least} sequences, {each}", self.batch).into());
        }
        if self.until.is_some_and(|until| !(1..=self.steps).contains(&until)) {
            return Err(format!("--until: expected a step in 1..={}", self.steps).into());
        }
        if self.framework == Framework::Burn {
            let (on_gpu, ranks) = (self.device == Place::Cuda, mesh.ranks);
            match (cfg!(feature = "burn"), cfg!(feature = "burn-cuda")) {
                (false, _) => return Err("--framework burn: build with --features burn".into()),
                (_, false) if on_gpu => {
                    return Err("--framework burn --device cuda: build with --features burn-cuda".into());
                }
                _ if on_gpu && ranks != 1 && !cfg!(feature = "nccl") => {
                    let text = "--framework burn --device cuda: several GPUs want a build with --features nccl";
                    return Err(format!("{text}, or give --ranks 1 instead of {ranks}").into());
                }
                _ => {}
            }
        }
        if self.etp.is_some() && self.device != Place::Cpu && !cfg!(feature = "nccl") {
            return Err("--etp: give --device cpu, or build with --features nccl".into());
        }
        if self.copy_engines && (self.device == Place::Cpu || !cfg!(feature = "nccl")) {
            return Err("--copy-engines: give --device cuda, in a build with --features nccl".into());
        }
        if self.copy_engines && mesh.shards() < 2 {
            return Err("--copy-engines: a rank alone gathers nothing; give --etp 2 or more".into());
        }
        if self.clip.is_some_and(|norm| norm.is_nan() || norm <= 0.0) {
            return Err("--clip must be above 0".into());
        }
        if !(2..=MOST_EXPERTS).contains(&self.experts) || self.check_every == 0 || self.steps == 0 {
            let experts = format!("--experts must be in 2..={MOST_EXPERTS}");
            return Err(format!("{experts}, --check-every and --steps at least 1").into());
        }
        Ok(Settings {
            mesh,
            shard_payload: self.shard_payload.payload(),
            token_payload: self.token_payload.payload(),
            microbatches: self.microbatches,
            clip: self.clip,
            steps: self.steps,
            range: 0..self.until.unwrap_or(self.steps),
            resume: self.resume.clone(),
            save: self.save.clone(),
            dispatcher: self.dispatcher,
            measure_dispatcher: self.measure_dispatcher,
            layer_dtype: self.layer_dtype.dtype(),
            seed: self.seed,
            text: 0,
            batch: self.batch,
            context: 64,
            hidden: 64,
            heads: 4,
            layers: 2,
            experts: self.experts,
            top_k: 2,
            intermediate: 64,
            balance: 0.01,
            learning_rate: 4e-3,
            // burn's own products in f32 are tensor cores' on CUDA.
            tolerances: match (self.framework, self.device) {
                (Framework::Burn, Place::Cuda) => Tolerances::TF32,
                _ => Tolerances::F32,
            },
        })
    }
}
