//! Folders that cannot be loaded, and folders that can but differ between the ranks.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

use crate::case::{Case, EVERYWHERE_OR_ON_ONE};

fn change_config(dir: &Path, change: impl FnOnce(&mut Value)) {
    let file = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).expect("a config")).expect("JSON");
    change(&mut config);
    std::fs::write(file, config.to_string()).expect("a config");
}

pub fn change_tensors(dir: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let file = dir.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
    change(&mut tensors);
    candle_core::safetensors::save(&tensors, file).expect("weights");
}

#[test]
fn folders_that_cannot_be() {
    const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";
    const EXPERT: &str = "model.layers.1.mlp.experts.6.down_proj.weight";
    for case in [
        Case::of_folder("nobody's family", |dir| change_config(dir, |c| c["model_type"] = "nobody".into()), "nobody"),
        Case::of_folder(
            "a family without a decoder",
            |dir| change_config(dir, |c| c["model_type"] = "jamba".into()),
            "",
        ),
        Case::of_folder(
            "no config.json",
            |dir| std::fs::remove_file(dir.join("config.json")).expect("gone"),
            "config.json",
        ),
        Case::of_folder("no JSON", |dir| std::fs::write(dir.join("config.json"), "{").expect("a file"), "config.json"),
        Case::of_folder(
            "no weights",
            |dir| std::fs::remove_file(dir.join("model.safetensors")).expect("gone"),
            "safetensors",
        ),
        Case::of_folder(
            "weights that are cut off",
            |dir| {
                let file = dir.join("model.safetensors");
                let bytes = std::fs::read(&file).expect("weights");
                std::fs::write(file, &bytes[..bytes.len() / 2]).expect("weights");
            },
            "model.safetensors",
        ),
        Case::of_folder("a missing matrix", |dir| change_tensors(dir, |t| drop(t.remove(Q_PROJ))), Q_PROJ),
        Case::of_folder("a missing expert", |dir| change_tensors(dir, |t| drop(t.remove(EXPERT))), EXPERT),
        Case::of_folder("a mis-shaped matrix", |dir| change_tensors(dir, |t| shorten(t, Q_PROJ)), Q_PROJ),
        Case::of_folder("a mis-shaped expert", |dir| change_tensors(dir, |t| shorten(t, EXPERT)), EXPERT),
        Case::of_folder(
            "a layer too many",
            |dir| change_config(dir, |c| c["num_hidden_layers"] = 3.into()),
            "layers.2.",
        ),
        Case::of_folder("a size that is none", |dir| change_config(dir, |c| c["head_dim"] = 0.into()), "head_dim"),
    ] {
        EVERYWHERE_OR_ON_ONE.iter().for_each(|wrong| case.hold(*wrong));
    }
}

fn shorten(tensors: &mut HashMap<String, Tensor>, name: &str) {
    let tensor = tensors.remove(name).expect("a tensor of this name");
    let rows = tensor.dim(0).expect("rows");
    tensors.insert(name.into(), tensor.narrow(0, 0, rows - 1).and_then(|t| t.contiguous()).expect("rows"));
}

/// Ranks whose folders differ would wait for layers that one of them has not, or go on to logits of two models.
#[test]
fn folders_that_are_not_each_others() {
    for case in [
        Case::of_two_folders(
            "fewer layers",
            |dir| change_config(dir, |c| c["num_hidden_layers"] = 1.into()),
            "num_hidden_layers differs",
        ),
        Case::of_two_folders(
            "other rotations",
            |dir| change_config(dir, |c| c["rope_parameters"]["rope_theta"] = json!(1e6)),
            "rope_parameters.rope_theta differs",
        ),
        Case::of_two_folders(
            "another norm",
            |dir| change_config(dir, |c| c["rms_norm_eps"] = json!(1e-5)),
            "rms_norm_eps differs",
        ),
        Case::of_two_folders(
            "a shorter context",
            |dir| change_config(dir, |c| c["max_position_embeddings"] = 128.into()),
            "max_position_embeddings differs",
        ),
        Case::of_two_folders(
            "fewer choices",
            |dir| change_config(dir, |c| c["num_experts_per_tok"] = 2.into()),
            "num_experts_per_tok differs",
        ),
        Case::of_two_folders(
            "a layer without experts",
            |dir| {
                change_config(dir, |c| c["mlp_only_layers"] = json!([1]));
                change_tensors(dir, |t| {
                    t.retain(|name, _| !name.starts_with("model.layers.1.mlp."));
                    for (name, dims) in [("gate", [56, 64]), ("up", [56, 64]), ("down", [64, 56])] {
                        let weight = Tensor::zeros(&dims, DType::F32, &Device::Cpu).expect("a weight");
                        t.insert(format!("model.layers.1.mlp.{name}_proj.weight"), weight);
                    }
                });
            },
            "mlp_only_layers differs",
        ),
        Case::of_two_folders(
            "another type",
            |dir| {
                change_tensors(dir, |t| {
                    t.values_mut().for_each(|t| *t = t.to_dtype(DType::BF16).expect("bf16"));
                });
            },
            "type of the embedding differs",
        ),
        // The group finds this one.
        Case::of_two_folders(
            "fewer experts",
            |dir| {
                change_config(dir, |c| c["num_local_experts"] = 4.into());
                change_tensors(dir, |t| {
                    t.retain(|name, _| !["4", "5", "6", "7"].iter().any(|e| name.contains(&format!(".experts.{e}."))));
                    for layer in [0, 1] {
                        let name = format!("model.layers.{layer}.mlp.gate.weight");
                        let gate = t[&name].narrow(0, 0, 4).and_then(|t| t.contiguous()).expect("four rows");
                        t.insert(name, gate);
                    }
                });
            },
            "num_experts differs",
        ),
    ] {
        EVERYWHERE_OR_ON_ONE[1..].iter().for_each(|wrong| case.hold(*wrong));
    }
}

/// Alike for all but what says where a folder came from.
#[test]
fn folders_of_another_origin_are_alike() {
    let other = |dir: &Path| {
        change_config(dir, |c| {
            c["_name_or_path"] = "elsewhere".into();
            c["transformers_version"] = "4.0".into();
        });
    };
    let case = Case::of_folder("another origin", other, "");
    assert!(case.outcomes([true, false]).iter().all(Result::is_ok));
    let case = Case::of_texts("another origin", other, "");
    assert!(case.outcomes([false, true]).iter().all(Result::is_ok));
}
