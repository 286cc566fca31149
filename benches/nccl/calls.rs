//! Each of a dispatcher's calls by itself.

use std::time::Instant;

use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchGrads, DispatchInputs, DispatchSpec, Group, Handle, Reporting};
use moebius::nccl::NcclWorld;
use moebius::{DType, Result, Tensor};

use crate::data::Random;
use crate::report::{Report, Subject, spread};
use crate::routing::{Pairs, ROUTINGS, experts, pairs};
use crate::timed::{Spans, Timed, between, event};
use crate::{Dispatcher, Rank, Workload, on_ranks};

const WARM_UP: usize = 3;
const REPEATS: usize = 40;

/// Prepares behind each other in a graph, where it is timed so: over NVLink, whose calls leave no events of spans there.
const CAPTURED_CALLS: usize = 8;

/// Times of a phase, and those of its collectives alone, both in ms.
type Phase = (&'static str, Vec<f64>, Vec<f64>);

pub fn run(
    world: &NcclWorld,
    report: &Report,
    (workload, dispatchers): (Workload, &[Dispatcher]),
    only: Option<&String>,
) -> Result<()> {
    for routing in ROUTINGS.into_iter().filter(|r| only.is_none_or(|only| only == r)) {
        for dispatcher in dispatchers.iter().copied() {
            let parts = on_ranks(world, |rank, comm| measure(rank, Timed::new(comm), (workload, dispatcher, routing)))?;
            let subject = Subject { workload, dispatcher, routing };
            lines(report, subject, &parts);
        }
    }
    Ok(())
}

/// Measurements of one rank.
struct Part {
    phases: Vec<Phase>,
    pairs: Pairs,
    peak: usize,
}

fn lines(report: &Report, subject: Subject<'_>, parts: &[Part]) {
    let row = subject.workload.hidden * DType::BF16.size();
    let most = |of: fn(&Pairs) -> usize| parts.iter().map(|p| of(&p.pairs)).max().unwrap_or(0) * row;
    let peak = parts.iter().map(|p| p.peak).max().unwrap_or(0);
    for (i, (phase, ..)) in parts[0].phases.iter().enumerate() {
        let of =
            |f: fn(&Phase) -> &Vec<f64>| -> Vec<Vec<f64>> { parts.iter().map(|p| f(&p.phases[i]).clone()).collect() };
        let collective = spread(&of(|p| &p.2)).median;
        let mut rest = format!(",\"collective_ms\":{collective:.4},\"peak_bytes\":{peak}");
        if !phase.starts_with("prepare") {
            // Bytes per token: sent once to every rank that it has an expert on, and once to every expert.
            let (ranks, own_rank) = (most(|p| p.other_ranks), most(|p| p.own_rank));
            let (experts, own_experts) = (most(|p| p.other_experts), most(|p| p.own_experts));
            rest += &format!(
                ",\"bytes_token_rank\":{ranks},\"bytes_token_rank_own\":{own_rank},\
                 \"bytes_token_expert\":{experts},\"bytes_token_expert_own\":{own_experts}"
            );
        }
        report.line(subject, phase, spread(&of(|p| &p.1)), &rest);
    }
}

struct Bench<'a> {
    rank: &'a Rank<'a>,
    group: Group<Cuda>,
    spans: Spans,
}

impl Bench<'_> {
    /// Times of a call on this rank's GPU, or of the host where it waits for the GPU itself.
    fn time(
        &mut self,
        host: bool,
        mut call: impl FnMut(&mut Group<Cuda>) -> Result<()>,
    ) -> Result<(Vec<f64>, Vec<f64>)> {
        let (mut times, mut collectives) = (Vec::new(), Vec::new());
        for repeat in 0..WARM_UP + REPEATS {
            self.rank.meet()?;
            self.spans.take()?;
            let (start, from) = (Instant::now(), event(&self.rank.cuda)?);
            call(&mut self.group)?;
            let to = event(&self.rank.cuda)?;
            let waited = start.elapsed();
            self.rank.cuda.check()?;
            let ms = if host { waited.as_secs_f64() * 1e3 } else { between(&from, &to)? };
            if repeat >= WARM_UP {
                times.push(ms);
                collectives.push(self.spans.take()?);
            }
        }
        Ok((times, collectives))
    }
}

fn measure(rank: &Rank<'_>, comm: Timed, what: (Workload, Dispatcher, &str)) -> Result<Part> {
    let (w, dispatcher, routing) = what;
    let cuda = &rank.cuda;
    let spans = comm.about.clone();
    let mut bench = Bench { rank, group: dispatcher.make(comm, &w)?, spans };
    let chosen = experts(&w, routing, rank.rank);
    let pairs = pairs(&w, &chosen, rank.rank, rank.ranks);
    let ids = Tensor::from_vec(chosen, &[w.tokens, w.top_k])?.to(cuda)?;
    let weights = vec![1.0 / w.top_k as f32; w.slots()];
    let weights = Tensor::from_vec(weights, &[w.tokens, w.top_k])?.to(cuda)?;
    let mut random = Random(7 + rank.rank as u64);
    let x = random.tensor(cuda, &[w.tokens, w.hidden], 1.0)?;
    let waits = !dispatcher.fixed && dispatcher.decodes.is_none();
    let spec = DispatchSpec {
        backward: dispatcher.decodes.is_none(),
        capacity: dispatcher.capacity(&w, rank.ranks),
        reporting: if waits { Reporting::Immediate } else { Reporting::Deferred },
        ..DispatchSpec::new(0, w.top_k)
    };
    cuda.trim();
    cuda.reset_peak();

    let mut handle: Option<Handle<Cuda>> = None;
    let mut phases: Vec<Phase> = Vec::new();
    if !waits {
        // The first is planned by the host, and by then no row has been met; from the next on the GPUs plan.
        let first = bench.group.dispatcher().prepare(ids.view(), None, &spec)?;
        let inputs = DispatchInputs { tokens: x.view(), weights: Some(weights.view()), scales: None };
        drop(bench.group.dispatcher().dispatch_rows(&first, inputs)?);
    }
    let (times, collectives) = bench.time(waits, |group| {
        handle = Some(group.dispatcher().prepare(ids.view(), None, &spec)?);
        Ok(())
    })?;
    phases.push(("prepare", times, collectives));
    // Planned on the GPU: waiting for sizes, or for nothing; and how long the host is busy then.
    let open = DispatchSpec { reporting: Reporting::Deferred, ..spec };
    let fixed = DispatchSpec { capacity: Capacity::Static(w.most_rows(rank.ranks)), ..open };
    let later = [
        ("prepare_deferred", open, true),
        ("prepare_deferred_static", fixed, false),
        ("prepare_deferred_static_host", fixed, true),
    ];
    let behind = match dispatcher.name {
        "all_gather" => &later[..],
        "all_to_all" | "hierarchical" => &later[..1],
        "nvlink" if !dispatcher.fixed => &later[..1],
        _ => &[],
    };
    for (phase, spec, host) in behind.iter().copied() {
        let (times, collectives) =
            bench.time(host, |group| group.dispatcher().prepare(ids.view(), None, &spec).map(drop))?;
        phases.push((phase, times, collectives));
    }
    if dispatcher.name == "nvlink" {
        // As a captured layer has it: the GPU's time alone.
        let dispatchers = &mut bench.group;
        drop(dispatchers.dispatcher().prepare(ids.view(), None, &fixed)?);
        let mut graph = cuda.capture(|| {
            let prepare = |_| dispatchers.dispatcher().prepare(ids.view(), None, &fixed).map(drop);
            (0..CAPTURED_CALLS).try_for_each(prepare)
        })?;
        let (times, collectives) = bench.time(false, |_| graph.replay().map(drop))?;
        let each = times.iter().map(|ms| ms / CAPTURED_CALLS as f64).collect();
        phases.push(("prepare_captured", each, collectives));
    }
    let Some(handle) = handle else { return Ok(Part { phases, pairs, peak: 0 }) };
    let n = handle.rows();
    let slots = random.tensor(cuda, &[n, w.hidden], 1.0)?;
    let slot_weights = Tensor::<Cuda>::zeros(cuda, DType::F32, &[n])?;
    let mut out = Tensor::empty(cuda, DType::BF16, &[w.tokens, w.hidden])?;
    let mut d_weights = Tensor::empty(cuda, DType::F32, &[w.tokens, w.top_k])?;

    let (times, collectives) = bench.time(false, |group| {
        let inputs = DispatchInputs { tokens: x.view(), weights: Some(weights.view()), scales: None };
        group.dispatcher().dispatch_rows(&handle, inputs).map(drop)
    })?;
    phases.push(("dispatch", times, collectives));
    let (times, collectives) = bench.time(false, |group| {
        let place = group.dispatcher().place_for_return(&handle, DType::BF16, w.hidden)?;
        let rows = place.as_ref().unwrap_or(&slots);
        group.dispatcher().combine(&handle, rows.view(), out.view_mut())
    })?;
    phases.push(("combine", times, collectives));
    if dispatcher.decodes.is_some() || (dispatcher.name == "nvlink" && dispatcher.fixed) {
        // As a captured step has them.
        let group = &mut bench.group;
        let mut dispatches = cuda.capture(|| {
            (0..CAPTURED_CALLS).try_for_each(|_| {
                let inputs = DispatchInputs { tokens: x.view(), weights: Some(weights.view()), scales: None };
                group.dispatcher().dispatch_rows(&handle, inputs).map(drop)
            })
        })?;
        let mut combines = cuda.capture(|| {
            (0..CAPTURED_CALLS).try_for_each(|_| group.dispatcher().combine(&handle, slots.view(), out.view_mut()))
        })?;
        for (phase, graph) in [("dispatch_captured", &mut dispatches), ("combine_captured", &mut combines)] {
            let (times, collectives) = bench.time(false, |_| graph.replay().map(drop))?;
            phases.push((phase, times.iter().map(|ms| ms / CAPTURED_CALLS as f64).collect(), collectives));
        }
    }
    if dispatcher.decodes.is_some() {
        return Ok(Part { phases, pairs, peak: cuda.memory().peak });
    }
    let (times, collectives) =
        bench.time(false, |group| group.dispatcher().combine_bwd_rows(&handle, x.view()).map(drop))?;
    phases.push(("combine_bwd", times, collectives));
    let (times, collectives) = bench.time(false, |group| {
        let place = group.dispatcher().place_for_return(&handle, DType::BF16, w.hidden)?;
        let grads = DispatchGrads {
            rows: place.as_ref().unwrap_or(&slots).view(),
            weights: Some(slot_weights.view()),
            d_tokens: out.view_mut(),
            d_weights: Some(d_weights.view_mut()),
        };
        group.dispatcher().dispatch_bwd(&handle, grads)
    })?;
    phases.push(("dispatch_bwd", times, collectives));
    Ok(Part { phases, pairs, peak: cuda.memory().peak })
}
