//! Bad input is a typed error, on every rank.

mod support;

use candle_core::{DType, Device, Tensor};
use moebius::candle::{Parameters, error_of};
use moebius_models::{Error, ExpertWeights, LoadOptions, Model};

use support::{Golden, on_ranks, shipped};

/// A rank that fails before its layers with experts, or in one, tells the others, which would wait for it there; all go
/// on.
#[test]
fn what_fails_on_a_rank_is_told_to_the_others() {
    let golden = Golden::named("qwen3_moe");
    let ids = |value: u32, dims: &[usize]| Tensor::full(value, dims, &Device::Cpu).expect("ids");
    for (wrong, word) in [
        (ids(0, &[1, 300]), "300"),
        (ids(0, &[300]), "[300]"),
        (ids(97, &[1, 1]), "97"),
        (ids(0, &[1, 0]), "empty prompt"),
        // Of this the layer itself tells.
        (ids(0, &[20, 250]), "5000"),
    ] {
        on_ranks(2, &golden, |rank, group| {
            let model = golden.load(&group, golden.options());
            let token = ids(0, &[1, 1]);
            let error = model.forward(if rank == 1 { &wrong } else { &token }).expect_err("a failure on rank 1");
            assert!(error.to_string().contains(word), "rank {rank}: {error}");
            if rank == 0 {
                let Error::Candle(theirs) = &error else { panic!("{error:?}") };
                let own = error_of(theirs);
                assert!(matches!(own, Some(moebius::Error::Peer { rank: 0, peer: 1, .. })), "{error:?}");
            }
            model.forward(&token).expect("logits");
            // A cache that holds two sequences continues two.
            let mut cache = model.cache();
            model.decode(&ids(0, &[2, 3]), &mut cache).expect("logits");
            let next = ids(0, if rank == 1 { &[1, 1] } else { &[2, 1] });
            model.decode(&next, &mut cache).expect_err("a failure on rank 1");
            cache.clear();
            model.decode(&next, &mut cache).expect("logits");
        });
    }
}

#[test]
fn bad_calls_are_typed_errors() {
    let golden = Golden::named("qwen3_moe");
    on_ranks(1, &golden, |_, group| {
        let model = golden.load(&group, LoadOptions { parameters: Parameters::Trainable, ..golden.options() });
        let ids = Tensor::zeros((1, 300), DType::U32, &Device::Cpu).expect("ids");
        let message = model.forward(&ids).expect_err("too long").to_string();
        assert!(message.contains("300") && message.contains("256"), "{message}");
        let message = model.forward(&ids.flatten_all().expect("flat")).expect_err("one dimension").to_string();
        assert!(message.contains("[B, S]") && message.contains("[300]"), "{message}");
        let token = ids.narrow(1, 0, 1).expect("a token");
        let message = model.decode(&token, &mut model.cache()).expect_err("trainable").to_string();
        assert!(message.contains("trainable"), "{message}");
        for id in [97i64, -1, i64::MAX] {
            let unknown = Tensor::full(id, (2, 3), &Device::Cpu).expect("ids");
            let error = model.loss(&unknown).expect_err("not in the vocabulary");
            let named =
                matches!(error, Error::TokenId { row: 0, position: 0, id: found, vocabulary: 97, .. } if found == id);
            assert!(named, "{error:?}");
        }
        let floats = Tensor::zeros((1, 2), DType::F32, &Device::Cpu).expect("floats");
        let error = model.forward(&floats).expect_err("no integers");
        assert!(matches!(&error, Error::Usage { problem, .. } if problem.contains("integers")), "{error:?}");
        let integer = LoadOptions { dtype: Some(DType::U8), ..LoadOptions::default() };
        let message = Model::load_on(&golden.checkpoint, &group, integer).expect_err("no float").to_string();
        assert!(message.contains("U8"), "{message}");
        let wide = LoadOptions { dtype: Some(DType::F64), experts: ExpertWeights::Nvfp4, ..LoadOptions::default() };
        let message = Model::load_on(&golden.checkpoint, &group, wide).expect_err("no NVFP4 of f64").to_string();
        assert!(message.contains("dtype") && message.contains("Nvfp4") && message.contains("f64"), "{message}");
        // Of the same sizes, even of the same folder: its keys are another model's.
        let [one, other] = [(), ()].map(|()| golden.load(&group, golden.options()));
        let mut cache = one.cache();
        one.decode(&token, &mut cache).expect("logits");
        let error = other.decode(&token, &mut cache).expect_err("another model's cache");
        assert!(matches!(&error, Error::Usage { problem, .. } if problem.contains("another model")), "{error:?}");
        one.decode(&token, &mut cache.clone()).expect("logits");
        cache.clear();
        other.decode(&token, &mut cache).expect_err("another model's cache, though empty");
    });
}

/// Each rank looks at all ranks' tensors, and finds what one of them would lack.
#[test]
fn a_folder_without_a_tensor_fails_on_every_rank() {
    for name in ["model.layers.0.mlp.experts.7.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"] {
        let dir = changed("qwen3_moe", |_| {});
        let file = dir.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
        tensors.remove(name).expect("a tensor of this name");
        candle_core::safetensors::save(&tensors, file).expect("weights");
        let checkpoint = moebius::checkpoint::Checkpoint::open(dir.path()).expect("a folder");
        on_ranks(2, &Golden::named("qwen3_moe"), |rank, group| {
            let error = Model::load_on(&checkpoint, &group, LoadOptions::default()).expect_err("a tensor is missing");
            assert!(error.to_string().contains(name), "rank {rank}: {error}");
        });
    }
}

/// Integers where the decoder's own weights are to be would be read as numbers of another size.
#[test]
fn weights_of_integers_are_refused() {
    for name in ["model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"] {
        let dir = changed("qwen3_moe", |_| {});
        let file = dir.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
        let dims = tensors[name].dims().to_vec();
        tensors.insert(name.into(), Tensor::ones(dims, DType::I64, &Device::Cpu).expect("a tensor"));
        candle_core::safetensors::save(&tensors, file).expect("weights");
        for dtype in [None, Some(DType::F32)] {
            let options = LoadOptions { dtype, ..LoadOptions::default() };
            let message = Model::load(dir.path(), &Device::Cpu, options).expect_err(name).to_string();
            assert!(message.contains(name) && message.to_lowercase().contains("i64"), "{message}");
        }
    }
}

/// A copy of a shipped folder with another configuration.
fn changed(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> tempfile::TempDir {
    let (from, to) = (shipped().join(name), tempfile::tempdir().expect("a folder"));
    let text = std::fs::read(from.join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    change(&mut config);
    std::fs::write(to.path().join("config.json"), config.to_string()).expect("a config");
    std::fs::copy(from.join("model.safetensors"), to.path().join("model.safetensors")).expect("weights");
    to
}

fn refused(dir: &std::path::Path) -> Error {
    Model::load(dir, &Device::Cpu, LoadOptions::default()).expect_err("a refusal")
}

/// A bias that is on disk while the configuration says that there is none would be left out of the logits.
#[test]
fn tensors_of_a_layer_that_nothing_reads_are_refused() {
    let load = |name: &str, more: &[&str]| {
        let dir = changed(name, |_| {});
        let file = dir.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
        for name in more {
            tensors.insert(name.to_string(), Tensor::zeros(3, DType::F32, &Device::Cpu).expect("a tensor"));
        }
        candle_core::safetensors::save(&tensors, file).expect("weights");
        Model::load(dir.path(), &Device::Cpu, LoadOptions::default())
    };
    for (folder, name) in [
        ("mixtral", "model.layers.1.self_attn.q_proj.bias"),
        ("mixtral", "model.layers.0.self_attn.q_norm.weight"),
        ("deepseek_v2", "model.layers.0.mlp.down_proj.bias"),
        ("mixtral", "lm_head.bias"),
    ] {
        let error = load(folder, &[name]).expect_err(name);
        assert!(matches!(&error, Error::Unread { tensor, .. } if tensor == name), "{error:?}");
        assert!(error.to_string().contains(name) && error.to_string().contains("config.json"), "{error}");
    }
    // Frequencies and scales of what is computed in a floating type, and what is of no layer that the decoder has.
    load(
        "mixtral",
        &[
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "model.layers.0.self_attn.k_proj.k_scale",
            "model.layers.0.self_attn.q_proj.input_scale",
            "model.layers.2.self_attn.q_proj.bias",
            "vision_tower.layers.0.mlp.bias",
        ],
    )
    .expect("a model");
}

/// Scales of an attention that is quantized, those of its inputs and of its cache among them, belong to what is read.
#[test]
fn scales_of_a_quantized_attention_are_no_unread_tensors() {
    const NAME: &str = "model.layers.0.self_attn.q_proj";
    let load = |weight: &[(&str, DType, &[usize])], scales: &[&str]| {
        let dir = changed("mixtral", |_| {});
        let file = dir.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
        let dims = tensors.remove(&format!("{NAME}.weight")).expect("a weight").dims().to_vec();
        let scales = scales.iter().map(|name| (*name, DType::F32, &[1, 1][..1]));
        for (name, dtype, divided) in weight.iter().copied().chain(scales) {
            let dims: Vec<usize> = match divided {
                [rows, columns] => vec![dims[0].div_ceil(*rows), dims[1].div_ceil(*columns)],
                other => other.to_vec(),
            };
            let ones = Tensor::ones(dims, DType::F32, &Device::Cpu).and_then(|ones| ones.to_dtype(dtype));
            tensors.insert(format!("{NAME}.{name}"), ones.expect("a tensor"));
        }
        candle_core::safetensors::save(&tensors, file).expect("weights");
        Model::load(dir.path(), &Device::Cpu, LoadOptions::default())
    };
    let (codes, fp8, f32) = (DType::U8, DType::F8E4M3, DType::F32);
    let packed: [(&str, DType, &[usize]); 3] =
        [("weight_packed", codes, &[1, 2]), ("weight_scale", fp8, &[1, 16]), ("weight_global_scale", f32, &[1])];
    let model_opt: [(&str, DType, &[usize]); 3] =
        [("weight", codes, &[1, 2]), ("weight_scale", fp8, &[1, 16]), ("weight_scale_2", f32, &[1])];
    let blocks: [(&str, DType, &[usize]); 2] = [("weight", fp8, &[1, 1]), ("weight_scale_inv", f32, &[128, 128])];
    let grid: [(&str, DType, &[usize]); 2] = [("weight", fp8, &[1, 1]), ("weight_scale", f32, &[128, 128])];
    let powers: [(&str, DType, &[usize]); 2] = [("weight_packed", codes, &[1, 2]), ("weight_scale", codes, &[1, 32])];
    let scaled: [(&str, DType, &[usize]); 2] = [("weight", fp8, &[1, 1]), ("weight_scale", f32, &[1])];
    let cache = ["k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale"];
    for (weight, scales) in [
        (&packed[..], &["input_global_scale"][..]),
        (&model_opt, &["input_scale"]),
        (&blocks, &["input_scale_inv"]),
        (&grid, &["input_scale"]),
        (&powers, &[]),
        (&scaled, &["input_scale", "input_scale_ub", "input_zero_point"]),
        (&scaled, &cache),
    ] {
        load(weight, scales).unwrap_or_else(|error| panic!("{weight:?}, {scales:?}: {error}"));
    }
    // A scale of a weight that is not there is one that nothing reads.
    let error = load(&scaled, &["part.input_scale"]).expect_err("a scale alone");
    assert!(matches!(&error, Error::Unread { tensor, .. } if tensor.ends_with("part.input_scale")), "{error:?}");
}

/// A matrix of another type than the others is named when it is read, not in the first forward.
#[test]
fn matrices_of_two_types_are_refused_where_nothing_converts_them() {
    let dir = changed("mixtral", |_| {});
    let file = dir.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &Device::Cpu).expect("weights");
    let head = tensors.get_mut("lm_head.weight").expect("an output layer");
    *head = head.to_dtype(DType::BF16).expect("a tensor");
    candle_core::safetensors::save(&tensors, file).expect("weights");
    let load = |options| Model::load(dir.path(), &Device::Cpu, options);
    let error = load(LoadOptions::default()).expect_err("two types").to_string();
    assert!(error.contains("lm_head.weight") && error.contains("LoadOptions::dtype"), "{error}");
    load(LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() }).expect("one type");
}

#[test]
fn bad_folders_are_typed_errors() {
    let error = refused(&shipped().join("jamba"));
    assert!(matches!(&error, Error::Family { found, .. } if found == "jamba"), "{error:?}");
    let dir = changed("mixtral", |c| c["model_type"] = "nobody".into());
    let error = refused(dir.path());
    assert!(matches!(&error, Error::Moebius(_)) && error.to_string().contains("nobody"), "{error:?}");
    let error = refused(std::path::Path::new("/nowhere/at/all"));
    assert!(matches!(error, Error::Moebius(_)), "{error:?}");

    // Sizes that the tensors do not have.
    let dir = changed("mixtral", |c| c["num_key_value_heads"] = 4.into());
    let error = refused(dir.path());
    assert!(matches!(&error, Error::Shape { tensor, .. } if tensor.contains("k_proj")), "{error:?}");
    // Layers that are not there.
    let dir = changed("mixtral", |c| c["num_hidden_layers"] = 3.into());
    let error = refused(dir.path());
    assert!(error.to_string().contains("layers.2."), "{error:?}");

    type Change = (&'static str, fn(&mut serde_json::Value), &'static str);
    let changes: [Change; 24] = [
        ("mixtral", |c| c["vocab_size"] = 0.into(), "vocab_size"),
        ("mixtral", |c| c["num_attention_heads"] = 0.into(), "num_attention_heads"),
        ("mixtral", |c| c["num_key_value_heads"] = 3.into(), "num_key_value_heads"),
        ("mixtral", |c| c["head_dim"] = 15.into(), "head_dim"),
        ("mixtral", |c| c["hidden_size"] = "many".into(), "hidden_size"),
        ("qwen3_moe", |c| c["attention_bias"] = (-1).into(), "in attention_bias"),
        ("mixtral", |c| c["tie_word_embeddings"] = 3.into(), "in tie_word_embeddings"),
        ("mixtral", |c| c["rope_parameters"]["factor"] = "two".into(), "in rope_parameters"),
        ("mixtral", |c| c["rope_parameters"]["rope_type"] = "spiral".into(), "rope_type"),
        ("mixtral", |c| c["rope_parameters"]["rope_theta"] = (-1.0).into(), "rope_theta"),
        ("mixtral", |c| c["rope_parameters"]["rope_type"] = "linear".into(), "factor"),
        ("qwen2_moe", |c| c["layer_types"] = serde_json::json!(["full_attention"]), "layer_types"),
        ("gpt_oss", |c| c["layer_types"][0] = "chunked_attention".into(), "layer_types"),
        ("mixtral", |c| c["rope_scaling"] = serde_json::json!({"rope_type": "spiral"}), "rope_type"),
        ("mixtral", |c| c["rope_scaling"] = serde_json::json!({"type": "yarn", "factor": 2, "rope_theta": 1}), "theta"),
        (
            "mixtral",
            |c| c["rope_scaling"] = serde_json::json!({"type": "yarn", "factor": 2, "attention_factor": -1}),
            "attention_factor",
        ),
        (
            "gpt_oss",
            |c| {
                c["rope_parameters"] =
                    serde_json::json!({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}})
            },
            "rope_parameters.full_attention",
        ),
        (
            "gpt_oss",
            |c| c["rope_parameters"] = serde_json::json!({"full_attention": {}, "sliding_attention": null}),
            "rope_parameters.sliding_attention",
        ),
        (
            "gpt_oss",
            |c| {
                let two = serde_json::json!({"factor": "two"});
                c["rope_parameters"] = serde_json::json!({"full_attention": two, "sliding_attention": two})
            },
            "rope_parameters.",
        ),
        // transformers has plain rotations then.
        (
            "mixtral",
            |c| c["rope_parameters"] = serde_json::json!({"full_attention": {"rope_type": "linear", "factor": 4}}),
            "layer_types",
        ),
        (
            "mixtral",
            |c| c["rope_parameters"] = serde_json::json!({"full_attention": {}, "rope_type": "yarn", "factor": 2}),
            "beside the parameters of types",
        ),
        ("mixtral", |c| c["rope_parameters"]["every_attention"] = serde_json::json!({}), "every_attention"),
        // transformers takes the family's base, 1e4, then.
        (
            "qwen3_moe",
            |c| {
                c["rope_parameters"]["rope_theta"] = 2e4.into();
                c["rope_scaling"] = serde_json::json!({"type": "linear", "factor": 2});
            },
            "rope_scaling.rope_theta",
        ),
        (
            "gpt_oss",
            |c| {
                let flat = c["rope_parameters"].clone();
                c["rope_parameters"] = serde_json::json!({"full_attention": flat, "sliding_attention": flat});
                c["rope_theta"] = 1e4.into();
                c["rope_scaling"] = serde_json::json!({"type": "linear", "factor": 2});
            },
            "rope_scaling.rope_theta",
        ),
    ];
    for (name, change, field) in changes {
        let error = refused(changed(name, change).path());
        let typed = matches!(error, Error::Config { .. } | Error::Moebius(_));
        assert!(typed && error.to_string().contains(field), "{field}: {error:?}");
    }
}

/// A folder of a configuration alone.
fn config_alone(config: &serde_json::Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a config");
    dir
}

fn random(config: &serde_json::Value) -> moebius_models::Result<Model> {
    let options = LoadOptions { random: Some(1), ..LoadOptions::default() };
    Model::load(config_alone(config).path(), &Device::Cpu, options)
}

fn config_of(folder: &std::path::Path) -> serde_json::Value {
    let text = std::fs::read(folder.join("config.json")).expect("a config");
    serde_json::from_slice(&text).expect("JSON")
}

/// Nothing but `config.json` says how large random weights are. Each number of every family's, at 0 and far above what
/// memory has, is an error that names its key, or none where the number is no size or may be any.
#[test]
fn numbers_of_random_models_are_checked_by_name() {
    let folders =
        std::fs::read_dir(shipped()).expect("the folder of folders").map(|entry| entry.expect("an entry").path());
    let (mut families, mut refused, mut wrong) = (std::collections::HashSet::new(), 0, Vec::new());
    for folder in folders.filter(|folder| folder.join("config.json").is_file()) {
        let config = config_of(&folder);
        let family = config["model_type"].as_str().unwrap_or_default().to_string();
        if !moebius_models::families().any(|known| known == family) || !families.insert(family.clone()) {
            continue;
        }
        random(&config).unwrap_or_else(|error| panic!("{family}: {error}"));
        let inner = if config["text_config"].is_object() { &config["text_config"] } else { &config };
        let numbers = inner.as_object().expect("an object").iter().filter(|(_, value)| value.is_u64());
        for key in numbers.map(|(key, _)| key) {
            for value in [0u64, 1 << 62] {
                let mut changed = config.clone();
                let of = if config["text_config"].is_object() { &mut changed["text_config"] } else { &mut changed };
                of[key] = value.into();
                if let Err(error) = random(&changed) {
                    let typed = matches!(error, Error::Config { .. } | Error::Moebius(_));
                    if !(typed && error.to_string().contains(key)) {
                        wrong.push(format!("{family}, {key} {value}: {error:?}"));
                    }
                    refused += 1;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(families.len() > 10 && refused > 10 * families.len(), "{refused} of {families:?}");
}

/// Sizes that are each within bounds, of tensors that no memory holds: no allocation ends the process.
#[test]
fn random_weights_beyond_memory_are_refused_by_name() {
    let cases: [(&[(&str, usize)], &str); 2] = [
        (&[("vocab_size", 1 << 28), ("hidden_size", 1 << 20)], "embed_tokens"),
        (&[("moe_intermediate_size", 1 << 22), ("num_experts", 1 << 16)], "experts"),
    ];
    for (sizes, tensor) in cases {
        let mut config = config_of(&shipped().join("qwen3_moe"));
        sizes.iter().for_each(|(key, size)| config[*key] = (*size).into());
        let error = random(&config).expect_err(tensor);
        let Error::Usage { call: "Model::load", problem } = &error else { panic!("{error:?}") };
        let named = sizes.iter().all(|(key, size)| problem.contains(&format!("{key} {size}")));
        assert!(named && problem.contains(tensor), "{problem}");
    }
}
