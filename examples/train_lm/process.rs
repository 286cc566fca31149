//! Training where every rank is a process: each tells the others what it has done, and rank 0 runs the twin.

use std::collections::BTreeMap;

use crate::Failure;
use crate::corpus::Corpus;
use crate::lm::{Param, Scale, Settings, Step};
use crate::rank_results::RankResults;
use crate::ranks::{Check, Peer, Report, Values, joined, own_step};
use crate::sharded::Cost;
use crate::twin::Twin;

/// Trains as rank `number`, and calls `on_step` after each step on rank 0.
pub fn train(
    settings: &Settings,
    (mut rank, number): (impl Peer, usize),
    (corpus, check_every): (&Corpus, usize),
    params: &[Param],
    mut on_step: impl FnMut(Step) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let twin = (number == 0).then(|| Twin::new(settings, params)).transpose()?;
    for step in settings.range.clone() {
        let report = own_step(&mut rank, settings, (corpus, check_every), number, step)?;
        let gathered = rank.gather(crate::ranks::gradients(step), &packed(&report).pack()?)?;
        if let Some(twin) = &twin {
            let reports = gathered.iter().map(|bytes| unpacked(settings, &RankResults::unpack(bytes)?));
            let reports = reports.collect::<Result<_, Failure>>()?;
            on_step(joined(settings, corpus, twin, (step, reports))?)?;
        }
    }
    match &settings.save {
        Some(dir) => rank.save(dir, settings.range.end),
        None => Ok(()),
    }
}

/// A report as others get it.
fn packed(report: &Report) -> RankResults {
    let mut results = RankResults::default();
    results.put("loss", &[1], [report.loss]);
    for (layer, load) in report.load.iter().enumerate() {
        results.put(format!("load.{layer}"), &[load.len()], load.iter().map(|n| *n as f64));
    }
    if let Some(norm) = report.norm {
        results.put("norm", &[1], [norm]);
    }
    if let Some(Scale { factor, skipped }) = report.scale {
        results.put("scale", &[2], [factor, skipped as f64]);
    }
    if let Some(cost) = report.cost {
        let numbers = cost.numbers();
        results.put("cost", &[numbers.len()], numbers);
    }
    let Some(check) = &report.check else { return results };
    for (name, values) in &check.params {
        let mut put = |what: &str, values: &[f32]| {
            results.put(format!("{what}.{name}"), &[values.len()], values.iter().map(|v| f64::from(*v)));
        };
        put("weight", &values.weight);
        put("gradient", &values.gradient);
    }
    for (layer, ids) in check.ids.iter().enumerate() {
        let dims = [ids.len(), ids.first().map_or(0, Vec::len)];
        results.put(format!("ids.{layer}"), &dims, ids.iter().flatten().map(|id| f64::from(*id)));
    }
    for (layer, tokens) in check.tokens.iter().enumerate() {
        results.put(format!("tokens.{layer}"), &[tokens.len()], tokens.iter().map(|v| f64::from(*v)));
    }
    results
}

fn unpacked(settings: &Settings, results: &RankResults) -> Result<Report, Failure> {
    let first = |values: &[f64]| values.first().copied().unwrap_or(f64::NAN);
    let layers = || 0..settings.layers;
    let load = |layer| Ok(results.get(&format!("load.{layer}"))?.1.iter().map(|n| *n as usize).collect());
    let ids = |layer| -> Result<Vec<Vec<u32>>, Failure> {
        let (dims, values) = results.get(&format!("ids.{layer}"))?;
        Ok(values.chunks(dims[1].max(1)).map(|row| row.iter().map(|id| *id as u32).collect()).collect())
    };
    let floats = |values: &[f64]| values.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    let mut params = BTreeMap::new();
    for (name, _, weight) in results.starting("weight.") {
        let gradient = floats(results.get(&format!("gradient.{name}"))?.1);
        params.insert(name.to_string(), Values { weight: floats(weight), gradient });
    }
    let check = match params.is_empty() {
        true => None,
        false => {
            let tokens = |layer| Ok(floats(results.get(&format!("tokens.{layer}"))?.1));
            Some(Check {
                params,
                ids: layers().map(ids).collect::<Result<_, _>>()?,
                tokens: layers().map(tokens).collect::<Result<_, Failure>>()?,
            })
        }
    };
    Ok(Report {
        loss: first(results.get("loss")?.1),
        load: layers().map(load).collect::<Result<_, Failure>>()?,
        norm: results.find("norm").map(|(_, norm)| first(norm)),
        scale: results.find("scale").map(|(_, v)| Scale { factor: v[0], skipped: v[1] as u64 }),
        cost: match results.find("cost") {
            Some((_, numbers)) => Some(Cost::of(numbers.try_into()?)),
            None => None,
        },
        check,
    })
}
