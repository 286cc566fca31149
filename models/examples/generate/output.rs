//! Output of the program: texts or ids to standard output, counts and speeds to standard error.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::mpsc::Receiver;

use indicatif::{ProgressBar, ProgressStyle};
use moebius::candle::DeviceGroup;
use moebius::checkpoint::Form;
use moebius::metrics::Load;
use moebius_models::generate::{Finish, Output};

use crate::Piece;
use crate::results::{ExpertChoices, Outcome};

/// Writes one prompt's text as it comes, or its ids where there is no text, behind `beginning`; of several prompts each
/// answer once it and all before it have ended. Gives what is not written.
pub fn show(pieces: &Receiver<Piece>, beginning: Option<&str>, has_text: bool) -> std::io::Result<Answers> {
    let (mut before, mut answers) = (beginning, Answers::new(has_text));
    for piece in pieces {
        if beginning.is_none() {
            put(&answers.add(piece))?;
            continue;
        }
        put(before.take().unwrap_or(""))?;
        match has_text {
            true => put(&piece.text)?,
            false => put(&format!("{} ", piece.token))?,
        }
    }
    Ok(answers)
}

/// Answers of several prompts, in the prompts' order.
pub struct Answers {
    has_text: bool,
    /// What has come of those that are not written, and whether that is all.
    waiting: BTreeMap<usize, (Vec<u32>, String, bool)>,
    /// Those that are written, which are the first.
    pub written: usize,
}

impl Answers {
    pub fn new(has_text: bool) -> Self {
        Self { has_text, waiting: BTreeMap::new(), written: 0 }
    }

    /// What can be written with this piece: nothing, or one answer or several.
    pub fn add(&mut self, piece: Piece) -> String {
        let (tokens, text, is_whole) = self.waiting.entry(piece.request).or_default();
        tokens.push(piece.token);
        text.push_str(&piece.text);
        *is_whole = piece.is_last;
        let mut out = String::new();
        while let Some((tokens, text, true)) = self.waiting.get(&self.written) {
            out += &answer(self.written, tokens, text, self.has_text);
            self.waiting.remove(&self.written);
            self.written += 1;
        }
        out
    }

    /// All that have ended and are not written: of a run that has failed, which makes no more of those before them.
    pub fn ended(&self) -> String {
        let ended = self.waiting.iter().filter(|(_, (.., is_whole))| *is_whole);
        ended.map(|(prompt, (tokens, text, _))| answer(*prompt, tokens, text, self.has_text)).collect()
    }
}

/// One of several prompts' text, or its ids, with a line before it.
fn answer(prompt: usize, tokens: &[u32], text: &str, has_text: bool) -> String {
    let ids = || tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let text = if has_text { text.to_string() } else { ids() };
    format!("== {prompt}\n{text}\n")
}

/// Writes to standard output.
pub fn put(text: &str) -> std::io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// What is left to write: of one prompt the end of its line, of several all answers behind the first `written`.
pub fn print(outputs: &[Output], written: usize, has_text: bool) -> std::io::Result<()> {
    if let [_] = outputs {
        return put("\n");
    }
    let rest = outputs.iter().enumerate().skip(written);
    rest.into_iter().try_for_each(|(i, output)| put(&answer(i, &output.tokens, &output.text, has_text)))
}

/// A bar of the layers loaded, on standard error; none where that is no terminal.
pub fn loading() -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template("loading {wide_bar} {pos} of {len} layers, {elapsed}");
    style.into_iter().for_each(|style| bar.set_style(style));
    bar
}

/// Says once, of all layers, that experts are not in the form they are stored in.
pub fn tell_of_dequantized(layers: &[(usize, Form)]) {
    let Some((_, form)) = layers.first() else { return };
    let text = format!(
        "experts: no product reads the form they are stored in ({form:?}); de-quantized in {} layers\n",
        layers.len()
    );
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Says which options change nothing where the likeliest token is taken.
pub fn report_unused_sampling(options: &[&str]) {
    if !options.is_empty() {
        let text = format!("temperature 0 takes the likeliest tokens: no effect of {}\n", options.join(", "));
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

/// Counts and speeds. `channels`: outputs' texts are messages in channels, of which some are not shown.
pub fn report(outcome: &Outcome, channels: bool) {
    let stats = &outcome.stats;
    let mut lines = String::new();
    for (i, output) in outcome.outputs.iter().enumerate() {
        let why = match &output.finish {
            Finish::Token(id) => format!("token {id}"),
            Finish::Text(text) => format!("stop text {text:?}"),
            Finish::MaxTokens => "max tokens".into(),
            Finish::Context => "context full".into(),
            Finish::Caller => "output closed".into(),
        };
        let cut = if output.incomplete { ", inside a character" } else { "" };
        lines += &format!("prompt {i}: {} tokens, ended by {why}{cut}\n", output.tokens.len());
        if channels && output.text.is_empty() {
            lines += &format!("prompt {i}: no text in the final channel; --channels all shows the others\n");
        }
    }
    lines += &format!("load: {:.2} s\n", outcome.loading.as_secs_f64());
    let seconds = stats.prefill.as_secs_f64();
    lines +=
        &format!("prefill: {} tokens, {seconds:.3} s, {:.1} tokens/s\n", stats.prefill_tokens, stats.prefill_rate());
    let seconds = stats.decode.as_secs_f64();
    lines += &format!("decode: {} tokens, {seconds:.3} s, {:.1} tokens/s\n", stats.decode_tokens, stats.decode_rate());
    if stats.capture_steps > 0 {
        lines += &format!("capture: {} steps, {:.3} s\n", stats.capture_steps, stats.capture.as_secs_f64());
    }
    let (mib, several) = (|bytes: u64| bytes as f64 / f64::from(1 << 20), outcome.processes > 1);
    if let Some(bytes) = outcome.host_memory {
        let whose = if several { "a rank's" } else { "this" };
        lines += &format!("memory: {:.0} MiB of {whose} process at most\n", mib(bytes));
    }
    if let Some(bytes) = outcome.gpu_memory {
        let whose = if several { " of a rank" } else { "" };
        lines += &format!("GPU memory: {:.0} MiB{whose} at most\n", mib(bytes));
    }
    let load = |choices: &ExpertChoices| Load::new(choices.tokens.clone(), choices.dropped);
    lines.extend(outcome.loads.iter().map(|(layer, choices)| format!("{}\n", experts(*layer, &load(choices)))));
    let _ = std::io::stderr().write_all(lines.as_bytes());
}

/// A layer's experts that were chosen most and least.
fn experts(layer: usize, load: &Load) -> String {
    let tokens = &load.tokens_per_expert;
    let share = |expert: usize| 100.0 * tokens[expert] as f64 / load.total().max(1) as f64;
    // The first of several.
    let most = (0..tokens.len()).rev().max_by_key(|expert| tokens[*expert]).unwrap_or(0);
    let least = (0..tokens.len()).min_by_key(|expert| tokens[*expert]).unwrap_or(0);
    format!(
        "layer {layer}: {} choices of {} experts, most of expert {most} ({:.1} %), least of expert {least} ({:.1} %), \
         largest over mean {:.2}",
        load.total(),
        tokens.len(),
        share(most),
        share(least),
        load.max_over_mean()
    )
}

/// Most memory of a GPU that tensors of the group's device have taken, in bytes, where it is one and its driver says it.
pub fn gpu_memory(group: &DeviceGroup) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Some(group) = group.on::<moebius::cuda::Cuda>() {
        let cuda = group.lock().device().clone();
        return cuda.highest_reserved().ok();
    }
    let _ = group;
    None
}

/// Most memory that this process has had, in bytes, on the host, where the system says it.
pub fn host_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}
