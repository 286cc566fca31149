//! Every checkpoint folder with a golden: each tensor of `golden.safetensors` against the layer's, on the CPU over 1,
//! 2, 4 and 8 ranks. `MOEBIUS_GOLDEN` names another folder of such folders than the shipped one.

mod common;

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Result, Tensor};
use common::devices::{self, Target, cases};
use common::support::compare::{Difference, difference, difference_of, values};
use common::support::dense::Params;
use common::support::folder::{Folder, tokens};
use common::support::job::{AnyError, Job, uneven, whole_block};
use common::support::names;
#[cfg(feature = "burn")]
use common::support::run_burn;
#[cfg(feature = "candle")]
use common::support::run_candle;
use common::{Cotangent, Outcome, Setup};
#[cfg(feature = "nccl")]
#[allow(unused_imports, reason = "for suites over several GPUs")]
pub use devices::gpus;
use moebius::checkpoint::{BlockParams, Checkpoint, LoadOptions};
use moebius::config::{Activation, BalanceKind, MoeConfig};
use moebius::cpu::Cpu;
use moebius::ep::DispatcherKind;

cases!(every_folder_matches_its_golden, bf16_is_near_f64, a_clamp_that_roundings_cross);

/// Dispatchers between CPU ranks.
const KINDS: [DispatcherKind; 3] = [DispatcherKind::AllToAll, DispatcherKind::Hierarchical, DispatcherKind::AllGather];
/// Tensors that a block alone cannot give.
const WHOLE_MODEL: [&str; 3] = ["input_ids", "logits", "loss"];

/// One tensor of a golden, compared.
#[derive(Debug)]
struct Line {
    name: String,
    found: Difference,
    tolerance: f64,
}

impl Line {
    fn ok(&self) -> bool {
        self.found.within(self.tolerance)
    }
}

/// A folder and its first Mixture-of-Experts block.
struct Suite {
    folder: Folder,
    golden: Params,
    checkpoint: Checkpoint,
    layer: usize,
    config: MoeConfig,
}

type AnyResult<T> = std::result::Result<T, AnyError>;

impl Suite {
    fn open(dir: &Path) -> AnyResult<Self> {
        let folder = Folder::open(dir)?;
        let golden = folder.golden.clone().ok_or("no golden.safetensors")?;
        let checkpoint = Checkpoint::open(dir)?;
        let layer = *checkpoint.moe_layers().first().ok_or("no Mixture-of-Experts layer")?;
        let config = checkpoint.block_config(layer)?;
        Ok(Self { folder, golden, checkpoint, layer, config })
    }

    fn input(&self) -> AnyResult<Tensor> {
        Ok(tokens(self.golden.get("moe_input").ok_or("golden has no moe_input")?)?)
    }

    fn output_gradient(&self) -> AnyResult<Option<Tensor>> {
        Ok(self.golden.get("grad_moe_output").map(tokens).transpose()?)
    }

    fn shares(&self, ranks: usize, dtype: moebius::DType) -> AnyResult<Vec<BlockParams>> {
        let load = |rank| {
            let options = LoadOptions { rank, ranks, dtype: Some(dtype) };
            Ok(self.checkpoint.load_block(self.layer, options)?.params)
        };
        (0..ranks).map(load).collect()
    }

    /// Runs the block as the golden ran it, twice, and its auxiliary loss where the golden has one.
    fn run<D: Target>(
        &self,
        device: &D,
        ranks: usize,
        dispatcher: DispatcherKind,
    ) -> AnyResult<(Outcome, Option<Outcome>)> {
        let (x, dy) = (self.input()?, self.output_gradient()?);
        let params = self.shares(ranks, self.folder.dtype)?;
        let mut setup = Setup::new(&self.config, &uneven(x.dim(0)?, ranks));
        setup.dispatcher = dispatcher;
        let cotangent = dy.as_ref().map(|dy| Cotangent { y: Some(dy), aux: 0.0 });
        let main = common::run_on(device, &setup, &params, &x, self.folder.dtype, cotangent)?;
        let again = common::run_on(device, &setup, &params, &x, self.folder.dtype, cotangent)?;
        if main.bits() != again.bits() {
            return Err(format!("R = {ranks}: two runs differ in their bits").into());
        }
        if !self.golden.contains_key("aux_loss") {
            return Ok((main, None));
        }
        setup.config.aux.balance = 1.0;
        setup.config.aux.balance_kind = BalanceKind::HuggingFace;
        setup.config.aux.over_ranks = true;
        let cotangent = Some(Cotangent { y: None, aux: 1.0 });
        Ok((main, Some(common::run_on(device, &setup, &params, &x, self.folder.dtype, cotangent)?)))
    }

    /// Compares every tensor of `golden` but the whole model's.
    fn compare(&self, golden: &Params, main: &Outcome, aux: Option<&Outcome>) -> AnyResult<Vec<Line>> {
        let mut lines = Vec::new();
        for (name, reference) in golden {
            if WHOLE_MODEL.contains(&name.as_str()) {
                continue;
            }
            let backward = name.contains("grad");
            let tolerance = match () {
                _ if name.starts_with("dequant.") || name == "topk_ids" => 0.0,
                _ if backward => self.folder.backward_tolerance(),
                _ => self.folder.forward_tolerance(),
            };
            let found = self
                .compare_one(name, reference, golden, main, aux)
                .map_err(|e| format!("{name}: {e}"))?
                .ok_or_else(|| format!("golden tensor {name} is not compared"))?;
            lines.push(Line { name: name.clone(), found, tolerance });
        }
        Ok(lines)
    }

    fn compare_one(
        &self,
        name: &str,
        reference: &Tensor,
        golden: &Params,
        main: &Outcome,
        aux: Option<&Outcome>,
    ) -> AnyResult<Option<Difference>> {
        let gradient = |name: &str| main.grads.get(name).ok_or("backward gave no such gradient");
        let ids = || golden.get("topk_ids").ok_or("golden has no topk_ids");
        Ok(Some(match name {
            // The run's inputs.
            "moe_input" => difference(&self.input()?, &tokens(reference)?)?,
            "grad_moe_output" => difference(&self.output_gradient()?.ok_or("absent")?, &tokens(reference)?)?,
            "moe_output" => difference(&main.y, &tokens(reference)?)?,
            "router_logits" => difference(&main.logits, reference)?,
            "topk_ids" => same_sets(&main.ids, reference)?,
            "topk_weights" => difference(&by_id(&main.weights, &main.ids, ids()?)?, reference)?,
            "routing_dense" => difference(&scatter(&main.weights, &main.ids, reference.dim(1)?)?, reference)?,
            "grad_moe_input" => difference(gradient("x")?, &tokens(reference)?)?,
            "grad_router_logits" => difference(gradient("logits")?, reference)?,
            "grad_topk_weights" => difference(&by_id(gradient("weights")?, &main.ids, ids()?)?, reference)?,
            "aux_loss" => {
                let aux = &aux.ok_or("no auxiliary loss was computed")?.aux;
                let reference = values(reference)?;
                aux.iter().map(|&a| difference_of(&[a], &reference)).fold(Difference::NONE, Difference::worst)
            }
            "aux_grad_router_logits" => {
                let aux = aux.ok_or("no auxiliary loss was computed")?;
                difference(aux.grads.get("logits").ok_or("no gradient of the logits")?, reference)?
            }
            _ => match (name.strip_prefix("grad."), name.strip_prefix("dequant.")) {
                (Some(disk), _) => match names::on_disk(disk, &self.folder.model_type, &self.gradients(main)?)? {
                    Some(found) => difference(&found, reference)?,
                    None => return Ok(None),
                },
                (_, Some(disk)) => self.dequantized(disk, reference)?,
                _ => return Ok(None),
            },
        }))
    }

    /// Gradients by name, with the zeros that a selection bias has by definition.
    fn gradients(&self, main: &Outcome) -> Result<Params> {
        let mut grads = main.grads.clone();
        if self.config.router.selection_bias {
            let zeros = Tensor::zeros(self.config.router.num_experts, DType::F64, &Device::Cpu)?;
            grads.insert("router.selection_bias".to_string(), zeros);
        }
        Ok(grads)
    }

    /// A de-quantized weight, as the layer got it.
    fn dequantized(&self, disk: &str, reference: &Tensor) -> AnyResult<Difference> {
        let layer = disk.split('.').find_map(|p| p.parse().ok()).unwrap_or(self.layer);
        if self.checkpoint.moe_layers().contains(&layer) {
            let job = self.job(layer, &[0], reference, reference);
            let (_, block) = whole_block(&job, false)?;
            if let Some(found) = names::on_disk(disk, &self.folder.model_type, &block)? {
                return Ok(difference(&found, reference)?);
            }
        }
        let found = self.checkpoint.tensor(disk, Some(moebius::DType::F32))?;
        Ok(difference(&common::framework(&found), reference)?)
    }

    fn job(&self, layer: usize, split: &[usize], x: &Tensor, dy: &Tensor) -> Job {
        Job {
            dir: self.folder.dir.clone(),
            open: moebius::checkpoint::OpenOptions::default(),
            layer,
            dtype: self.folder.dtype,
            token_payload: moebius::etp::Payload::Plain,
            split: split.to_vec(),
            x: x.clone(),
            dy: dy.clone(),
            timeout: std::time::Duration::from_secs(60),
        }
    }

    /// The same through a framework's autograd: output and the gradients that a user gets.
    #[cfg(any(feature = "candle", feature = "burn"))]
    fn compare_framework(
        &self,
        framework: &str,
        run: fn(&Job) -> AnyResult<common::support::job::Outcome>,
        ranks: usize,
    ) -> AnyResult<Vec<Line>> {
        let x = self.input()?;
        let dy = self.output_gradient()?;
        let cotangent = dy.clone().map_or_else(|| x.zeros_like(), Ok)?;
        let found = run(&self.job(self.layer, &uneven(x.dim(0)?, ranks), &x, &cotangent))?;
        let mut lines = Vec::new();
        let mut line = |name: &str, found: Difference, tolerance: f64| {
            lines.push(Line { name: format!("{framework}: {name}"), found, tolerance });
        };
        let output = tokens(self.golden.get("moe_output").ok_or("golden has no moe_output")?)?;
        line("moe_output", difference(&found.y, &output)?, self.folder.forward_tolerance());
        if let Some(reference) = self.golden.get("grad_moe_input").filter(|_| dy.is_some()) {
            let reference = tokens(reference)?;
            line("grad_moe_input", difference(&found.dx, &reference)?, self.folder.backward_tolerance());
        }
        for (name, reference) in &self.golden {
            if let Some(disk) = name.strip_prefix("grad.") {
                let found = names::on_disk(disk, &self.folder.model_type, &found.grads)?
                    .ok_or_else(|| format!("golden tensor {name} is not compared"))?;
                line(name, difference(&found, reference)?, self.folder.backward_tolerance());
            }
        }
        Ok(lines)
    }
}

/// Zero where each token has the same experts, in any order.
fn same_sets(found: &[Vec<usize>], reference: &Tensor) -> Result<Difference> {
    let flat = |ids: &mut dyn Iterator<Item = Vec<usize>>| -> Vec<f64> {
        ids.flat_map(|mut row| {
            row.sort_unstable();
            row.into_iter().map(|id| id as f64)
        })
        .collect()
    };
    let found = flat(&mut found.iter().cloned());
    let reference = flat(&mut ids_of(reference)?.into_iter());
    if found.len() != reference.len() {
        return Ok(Difference { max_abs: f64::INFINITY, relative: f64::INFINITY });
    }
    Ok(difference_of(&found, &reference))
}

/// `[T, K]` reordered within each token as the golden's ids are; NaN where an id is missing.
fn by_id(values: &Tensor, ids: &[Vec<usize>], order: &Tensor) -> Result<Tensor> {
    let rows: Vec<Vec<f64>> = values.to_vec2()?;
    let mut out = Vec::with_capacity(values.elem_count());
    for ((row, ids), wanted) in rows.iter().zip(ids).zip(ids_of(order)?) {
        out.extend(wanted.iter().map(|id| ids.iter().position(|i| i == id).map_or(f64::NAN, |k| row[k])));
    }
    Tensor::from_vec(out, values.dims(), &Device::Cpu)
}

/// `[T, K]` as `[T, E]`.
fn scatter(values: &Tensor, ids: &[Vec<usize>], experts: usize) -> Result<Tensor> {
    let rows: Vec<Vec<f64>> = values.to_vec2()?;
    let mut out = vec![0.0; rows.len() * experts];
    for (t, (row, ids)) in rows.iter().zip(ids).enumerate() {
        for (w, id) in row.iter().zip(ids) {
            out[t * experts + id] = *w;
        }
    }
    Tensor::from_vec(out, (rows.len(), experts), &Device::Cpu)
}

fn ids_of(t: &Tensor) -> Result<Vec<Vec<usize>>> {
    let rows: Vec<Vec<i64>> = t.to_dtype(DType::I64)?.to_vec2()?;
    Ok(rows.into_iter().map(|row| row.into_iter().map(|id| id as usize).collect()).collect())
}

/// Folders with a `config.json`, in order of name.
///
/// # Errors
/// There are none.
pub fn find_folders() -> std::result::Result<Vec<PathBuf>, String> {
    let root = devices::golden();
    let entries = std::fs::read_dir(&root).map_err(|e| format!("{}: {e}", root.display()))?;
    let all: std::io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut found = all.map_err(|e| format!("{}: {e}", root.display()))?;
    found.retain(|dir| dir.join("config.json").is_file());
    found.sort();
    if found.is_empty() {
        return Err(format!("{}: no folder with a config.json", root.display()));
    }
    Ok(found)
}

/// What a check of a folder has found.
struct Found {
    forward: Difference,
    backward: Difference,
    /// Errors beyond the tolerance.
    wrong: Vec<String>,
    /// Tensors of the last comparison.
    compared: usize,
}

impl Found {
    fn nothing() -> Self {
        Self { forward: Difference::NONE, backward: Difference::NONE, wrong: Vec::new(), compared: 0 }
    }

    fn take(&mut self, at: &str, lines: &[Line]) {
        for line in lines {
            let worst = if line.name.contains("grad") { &mut self.backward } else { &mut self.forward };
            *worst = worst.worst(line.found);
            if !line.ok() {
                let Difference { max_abs, relative } = line.found;
                let (name, tolerance) = (&line.name, line.tolerance);
                let wrong = format!("{at}: {name}: relative {relative:.2e} > {tolerance:.0e}, max {max_abs:.2e}");
                self.wrong.push(wrong);
            }
        }
    }

    /// Runs a folder's block over these ranks, and takes what differs from its golden.
    fn check<D: Target>(
        &mut self,
        suite: &Suite,
        device: &D,
        ranks: usize,
        dispatcher: DispatcherKind,
    ) -> AnyResult<()> {
        let (main, aux) = suite.run(device, ranks, dispatcher)?;
        let lines = suite.compare(&suite.golden, &main, aux.as_ref())?;
        self.compared = lines.len();
        self.take(&format!("R = {ranks}, {dispatcher:?}"), &lines);
        Ok(())
    }
}

/// Holds one folder's block over these ranks to its golden. Returns why it cannot be over so many, if it cannot.
pub fn hold_over<D: Target>(device: &D, dir: &Path, ranks: usize, dispatcher: DispatcherKind) -> Option<String> {
    let suite = Suite::open(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let experts = suite.config.router.num_experts;
    if !experts.is_multiple_of(ranks) {
        return Some(format!("{experts} experts over {ranks} ranks"));
    }
    let mut found = Found::nothing();
    found.check(&suite, device, ranks, dispatcher).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let Found { forward, backward, wrong, compared } = found;
    assert!(wrong.is_empty(), "{} failures:\n{}", wrong.len(), wrong.join("\n"));
    assert!(compared > 0, "{}: nothing to compare with", dir.display());
    println!("{compared} tensors, forward {:.1e}, gradients {:.1e}", forward.relative, backward.relative);
    None
}

/// Checks one folder and describes what was found in a line; the errors are in the second part.
fn check_folder<D: Target>(device: &D, dir: &Path) -> AnyResult<(String, Vec<String>)> {
    let suite = Suite::open(dir)?;
    let (e, k) = (suite.config.router.num_experts, suite.config.router.top_k);
    let mut found = Found::nothing();
    let on_cpu = D::has_f64();
    let ranks: Vec<usize> = [1, 2, 4, 8].into_iter().filter(|r| *r == 1 || (on_cpu && e.is_multiple_of(*r))).collect();
    for &r in &ranks {
        let dispatchers: &[_] = if r == 1 { &[DispatcherKind::Local] } else { &KINDS };
        for &dispatcher in dispatchers {
            found.check(&suite, device, r, dispatcher)?;
        }
    }
    #[cfg(any(feature = "candle", feature = "burn"))]
    if on_cpu {
        let r = ranks.iter().copied().find(|r| *r == 2).unwrap_or(1);
        #[cfg(feature = "candle")]
        found.take(&format!("R = {r}"), &suite.compare_framework("candle", run_candle::run, r)?);
        #[cfg(feature = "burn")]
        found.take(&format!("R = {r}"), &suite.compare_framework("burn", run_burn::run, r)?);
    }
    let Found { forward, backward, wrong, compared } = found;
    let whole: Vec<&str> = WHOLE_MODEL.into_iter().filter(|n| suite.golden.contains_key(*n)).collect();
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let backward = if suite.golden.contains_key("grad_moe_output") {
        format!("backward {:.1e}", backward.relative)
    } else {
        "forward only".to_string()
    };
    let line = format!(
        "{name:26} {:4} layer {} E {e:<3} K {k}  R {ranks:?}: {compared} tensors, forward {:.1e}, {backward}; \
         whole model: in models/: {}",
        suite.folder.dtype.name(),
        suite.layer,
        forward.relative,
        whole.join(" "),
    );
    Ok((line, wrong))
}

/// Prints past the test harness, which keeps the output of tests that pass to itself.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{line}");
}

fn every_folder_matches_its_golden<D: Target>(device: &D) {
    every_folder(|dir| check_folder(device, dir));
}

/// Everything in bf16 but sums, against f64 from the same bf16 weights and inputs. A rounding is 2⁻⁹ at most: up to
/// four of them (pre-activation, inner, expert's, result) make √4·2⁻⁹ = 3.9e-3, and the nine of a gradient's longest
/// chain √9·2⁻⁹ = 5.9e-3.
///
/// That is without the jumps of a derivative. A clamped activation's is 1 up to its limit and 0 beyond; a
/// pre-activation that rounding carries over the limit gets the other one, an error as large as its whole part of the
/// gradient. The stored pre-activation is rounded by half a unit, 2⁻⁹ of the limit at most (2⁻⁸ below a power of two),
/// so what can cross lies within 2⁻⁸·limit of it. With the limit moved by 2⁻⁸ of itself down and up, all of these cross
/// and nothing else changes by more than 2⁻⁸ of a clamped value: the distance of the two gradients bounds what the
/// jumps add. It is 0 without a clamp, and where no pre-activation is near.
const BF16_FORWARD: f64 = 4e-3;
const BF16_BACKWARD: f64 = 6e-3;

/// As [`BF16_BACKWARD`] says: a configuration whose clamp, if it has one, is moved by this part of itself.
fn moved_clamp(config: &MoeConfig, by: f64) -> MoeConfig {
    let mut config = config.clone();
    if let Activation::ClampedGlu { limit, .. } = &mut config.activation {
        *limit *= 1.0 + by;
    }
    config
}

fn bf16_is_near_f64<D: Target>(device: &D) {
    every_folder(|dir| bf16_against_f64(device, dir, Suite::open(dir)?));
}

/// A clamp among many pre-activations: some are carried over it.
fn a_clamp_that_roundings_cross<D: Target>(device: &D) {
    let dir = devices::golden_of("gpt_oss");
    for limit in [0.5, 0.25, 0.0625] {
        let mut suite = Suite::open(&dir).unwrap();
        let Activation::ClampedGlu { alpha, .. } = suite.config.activation else { panic!("gpt_oss has a clamp") };
        suite.config.activation = Activation::ClampedGlu { alpha, limit };
        let (line, wrong) = bf16_against_f64(device, &dir, suite).unwrap();
        say(&format!("clamp {limit}: {line}"));
        assert!(wrong.is_empty(), "clamp {limit}: {}", wrong.join("\n"));
    }
}

fn bf16_against_f64<D: Target>(device: &D, dir: &Path, suite: Suite) -> AnyResult<(String, Vec<String>)> {
    let bf16 = moebius::DType::BF16;
    let rounded = |t: &Tensor| common::framework(&common::core(t, bf16));
    let (x, dy) = (rounded(&suite.input()?), suite.output_gradient()?.as_ref().map(rounded));
    let setup = Setup::new(&suite.config, &[x.dim(0)?]);
    let cotangent = dy.as_ref().map(|dy| Cotangent { y: Some(dy), aux: 0.0 });
    let params = suite.shares(1, bf16)?;
    let found = common::run_on(device, &setup, &params, &x, bf16, cotangent)?;
    let exact: Vec<BlockParams> = params.iter().map(in_f64).collect();
    let reference = common::run(&setup, &exact, &x, moebius::DType::F64, cotangent)?;
    let moved = |by| {
        let setup = Setup { config: moved_clamp(&suite.config, by), ..setup.clone() };
        common::run(&setup, &exact, &x, moebius::DType::F64, cotangent)
    };
    let (below, above) = (moved(-1.0 / 256.0)?, moved(1.0 / 256.0)?);
    let (mut worst, mut wrong) = (Difference::NONE, Vec::new());
    if found.ids != reference.ids {
        wrong.push("experts differ".to_string());
    }
    let own = [("y", &found.y, &reference.y), ("weights", &found.weights, &reference.weights)];
    let own = own.map(|(name, a, b)| (name, a, b, BF16_FORWARD));
    let mut grads = Vec::new();
    for (name, t) in &found.grads {
        let jumps = difference(&below.grads[name], &above.grads[name])?.relative;
        grads.push((&name[..], t, &reference.grads[name], BF16_BACKWARD + jumps));
    }
    for (name, found, reference, tolerance) in own.into_iter().chain(grads) {
        let d = difference(found, reference)?;
        worst = worst.worst(d);
        if !d.within(tolerance) {
            wrong.push(format!("{name}: relative {:.2e} > {tolerance:.0e}, max {:.2e}", d.relative, d.max_abs));
        }
    }
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    Ok((format!("{name:26} bf16 against f64: {:.1e}", worst.relative), wrong))
}

/// The same values in f64.
fn in_f64(params: &BlockParams) -> BlockParams {
    let wide = |t: &common::CoreTensor| common::CoreTensor::from_vec(t.to_f64(), t.dims()).expect("the same shape");
    BlockParams::new(params.per_param().map(|_, t| t.map(wide))).expect("the same parameters")
}

/// Prints a line a folder and fails for all of them at the end.
fn every_folder(check: impl Fn(&Path) -> AnyResult<(String, Vec<String>)>) {
    let mut failures = Vec::new();
    for dir in find_folders().unwrap_or_else(|e| panic!("{e}")) {
        match check(&dir) {
            Ok((line, wrong)) => {
                say(&format!("{line}  {}", if wrong.is_empty() { "ok" } else { "FAIL" }));
                failures.extend(wrong.into_iter().map(|w| format!("{}: {w}", dir.display())));
            }
            Err(e) => {
                say(&format!("{:26} FAIL: {e}", dir.file_name().unwrap_or_default().to_string_lossy()));
                failures.push(format!("{}: {e}", dir.display()));
            }
        }
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// The suite can fail: a golden that is wrong by three tolerances in any one tensor is found, and so is a tensor that
/// nothing is compared with.
#[test]
fn a_wrong_golden_is_found() {
    for name in ["qwen3_moe", "gpt_oss", "deepseek_v3_fp8"] {
        let suite = Suite::open(&devices::golden_of(name)).unwrap();
        let (main, aux) = suite.run(&Cpu::poisoning(), 1, DispatcherKind::Local).unwrap();
        for (tensor, value) in &suite.golden {
            if WHOLE_MODEL.contains(&tensor.as_str()) {
                continue;
            }
            let wrong = match value.dtype() {
                // Expert 0 becomes 1 where it is not there, and the other way round.
                DType::I64 => (value.ones_like().unwrap() - value).unwrap().abs().unwrap(),
                _ => value.affine(1.0 + 3.0 * suite.folder.backward_tolerance(), 0.0).unwrap(),
            };
            let mut golden = suite.golden.clone();
            golden.insert(tensor.clone(), wrong);
            let lines = suite.compare(&golden, &main, aux.as_ref()).unwrap();
            assert!(lines.iter().any(|l| l.name == *tensor && !l.ok()), "{name}: a wrong {tensor} was not found");
        }
        for unknown in ["something", "grad.model.layers.0.mlp.something.weight"] {
            let mut golden = suite.golden.clone();
            golden.insert(unknown.to_string(), suite.golden["moe_output"].clone());
            assert!(suite.compare(&golden, &main, aux.as_ref()).is_err(), "{name}: {unknown} was passed over");
        }
    }
}

/// A folder over ranks by itself, as suites over several GPUs take it: one whose golden is wrong fails, and one whose experts
/// cannot be over so many ranks says so.
#[test]
fn one_folder_over_ranks() {
    let (cpu, from) = (Cpu::poisoning(), devices::golden_of("qwen3_moe"));
    for dispatcher in [DispatcherKind::AllToAll, DispatcherKind::AllGather] {
        assert_eq!(hold_over(&cpu, &from, 2, dispatcher), None);
    }
    assert!(hold_over(&cpu, &from, 3, DispatcherKind::AllToAll).is_some_and(|reason| reason.contains("over 3 ranks")));
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let file = "golden.safetensors";
    let mut wrong = candle_core::safetensors::load(from.join(file), &Device::Cpu).unwrap();
    let moved = wrong["grad_moe_input"].affine(1.0 + 1e-4, 0.0).unwrap();
    wrong.insert("grad_moe_input".to_string(), moved);
    candle_core::safetensors::save(&wrong, dir.path().join(file)).unwrap();
    let held = std::panic::catch_unwind(|| hold_over(&cpu, dir.path(), 2, DispatcherKind::AllGather));
    let said = *held.unwrap_err().downcast::<String>().unwrap();
    assert!(said.contains("1 failures") && said.contains("grad_moe_input"), "{said}");
}
