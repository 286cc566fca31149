//! Collectives that an adapter runs itself, beside its layers'.

use std::collections::BTreeMap;

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Op, Tag};
use crate::compare::gather_texts;
use crate::ep::EpGroup;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::layer::Layer;
use crate::tensor::Tensor;

fn tag(layer: u32, op: Op) -> Tag {
    Tag { layer, op, sequence: 0 }
}

/// Rank 0's parameter to all, of this rank's `values`; where they cannot be had, the other ranks are told.
pub(crate) fn broadcast<D: Kernels>(
    group: &EpGroup<D>,
    layer: u32,
    values: impl FnOnce(&D) -> Result<Tensor<D>>,
) -> Result<Tensor<D>> {
    let mut group = group.lock();
    let (device, tag) = (group.device().clone(), tag(layer, Op::Weights));
    let comm = group.dispatcher().communicator();
    let mut values = refuse_on_error(comm, tag, values(&device))?;
    comm.broadcast(tag, 0, values.view_mut())?;
    Ok(values)
}

/// Compares a layer's configuration over the ranks.
pub(super) fn compare_layer<D: Kernels>(group: &EpGroup<D>, call: &'static str, layer: &Layer) -> Result<()> {
    let mut group = group.lock();
    let device = group.device().clone();
    layer.compare_over_ranks(call, &device, group.dispatcher().communicator())
}

/// Compares texts over the ranks, by their names.
pub(super) fn compare_texts<D: Kernels>(
    group: &EpGroup<D>,
    call: &'static str,
    own: &BTreeMap<String, String>,
) -> Result<()> {
    let mut group = group.lock();
    let (device, rank) = (group.device().clone(), group.rank());
    let comm = group.dispatcher().communicator();
    // No layer has this number.
    let all = gather_texts(&device, comm, tag(u32::MAX, Op::Init), &serde_json::json!(own).to_string());
    for (peer, theirs) in all.map_err(|error| error.of_call(call, rank))?.iter().enumerate() {
        let theirs: BTreeMap<String, String> = serde_json::from_str(theirs).unwrap_or_default();
        let names = own.keys().chain(theirs.keys());
        if let Some(name) = names.filter(|name| own.get(*name) != theirs.get(*name)).min() {
            let [value, peer_value] = shown([own, &theirs].map(|texts| texts.get(name).map_or("nothing", |text| text)));
            return Err(Error::ConfigMismatch { call, field: name.clone(), rank, value, peer, peer_value });
        }
    }
    Ok(())
}

/// Two texts as an error has them: of long ones the characters around the first that differs.
fn shown(texts: [&str; 2]) -> [String; 2] {
    const BEFORE: usize = 20;
    const MOST: usize = 80;
    let alike = texts[0].chars().zip(texts[1].chars()).take_while(|(a, b)| a == b).count();
    texts.map(|text| {
        let count = text.chars().count();
        if count <= MOST {
            return text.to_string();
        }
        let start = alike.saturating_sub(BEFORE);
        let part: String = text.chars().skip(start).take(MOST).collect();
        let (begun, ended) = (if start > 0 { "…" } else { "" }, if start + MOST < count { "…" } else { "" });
        format!("{begun}{part}{ended}")
    })
}

/// Meets the other ranks, which are in the collective `op` of a layer, as a failure.
pub(super) fn refuse<D: Kernels>(group: &EpGroup<D>, layer: u32, op: Op, reason: &str) {
    group.lock().refuse(tag(layer, op), &reason);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cpu::{Cpu, ThreadWorld};
    use crate::ep::{Group, GroupConfig};

    /// What the ranks find of these texts, each rank's own.
    fn compared(own: &[&[(&str, &str)]]) -> Vec<Result<()>> {
        let of =
            |texts: &[(&str, &str)]| texts.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
        std::thread::scope(|scope| {
            let comms = ThreadWorld::create(own.len(), Duration::from_secs(60)).into_iter().zip(own);
            let threads: Vec<_> = comms
                .map(|(comm, texts)| {
                    scope.spawn(move || {
                        let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(12, 8)).expect("a group");
                        compare_texts(&EpGroup::new(group), "a call", &of(texts))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
        })
    }

    #[test]
    fn the_first_text_that_differs_is_named_on_every_rank() {
        let [one, two]: [&[(&str, &str)]; 2] = [&[("a", "1"), ("b", "2")], &[("a", "1"), ("b", "3"), ("c", "4")]];
        assert!(compared(&[one, one, one]).iter().all(Result::is_ok));
        assert!(compared(&[&[], &[]]).iter().all(Result::is_ok));
        for (own, odd) in [(vec![one, one, two], 2), (vec![two, one], 0), (vec![two, one, one, one], 0)] {
            for (rank, found) in compared(&own).into_iter().enumerate() {
                let Err(Error::ConfigMismatch { field, rank: named, value, peer, peer_value, .. }) = found else {
                    panic!("rank {rank}: {found:?}");
                };
                let [own, theirs] = if rank == odd { ["3", "2"] } else { ["2", "3"] };
                assert_eq!((&field[..], named, &value[..], &peer_value[..]), ("b", rank, own, theirs));
                assert_eq!(peer == odd, rank != odd, "rank {rank} against rank {peer}");
            }
        }
        let lacks = compared(&[&[], &[("z", "1")]]);
        assert!(lacks[0].as_ref().is_err_and(|error| error.to_string().contains("z differs: rank 0 has nothing")));
    }

    /// Lists of modules that are not quantized have thousands of entries.
    #[test]
    fn of_long_texts_the_part_that_differs_is_shown() {
        let long = |end: &str| format!("{}{end}{}", "é".repeat(300), "b".repeat(300));
        let [one, two] = shown([&long("X"), &long("Y")]);
        for (text, word) in [(&one, "X"), (&two, "Y")] {
            assert!(text.contains(word) && text.chars().count() <= 82, "{text}");
            assert!(text.starts_with('…') && text.ends_with('…'), "{text}");
        }
        assert_eq!(shown(["short", &long("")])[0], "short");
    }
}
