//! The two on-disk forms of every family, sharded folders, element types, and the quantized forms without a fixture.

use half::{bf16, f16};
use moebius::DType;
use moebius::checkpoint::{Checkpoint, Form, OpenOptions, SaveOptions};
use serde_json::json;

use crate::support::*;

/// Rows of a matrix.
fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns * rows).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// The per-expert tensors of a block, removed: gate, up, down of each expert.
fn take_experts(tensors: &mut Tensors, block: &str, names: [&str; 3]) -> Vec<[Raw; 3]> {
    (0..)
        .map_while(|e| {
            let mut take = |name: &str| tensors.remove(&format!("{block}.experts.{e}.{name}.weight"));
            Some([take(names[0])?, take(names[1])?, take(names[2])?])
        })
        .collect()
}

/// Per-expert fixtures rewritten with the fused tensors of transformers 5 load the same.
#[test]
fn fused_form_of_per_expert_families() {
    let proj = ["gate_proj", "up_proj", "down_proj"];
    let cases = [
        ("mixtral", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("phimoe", "block_sparse_moe", ["w1", "w3", "w2"]),
        ("qwen2_moe", "mlp", proj),
        ("qwen3_moe", "mlp", proj),
        ("deepseek_v2", "mlp", proj),
        ("deepseek_v3", "mlp", proj),
        ("olmoe", "mlp", proj),
    ];
    for (family, published, names) in cases {
        let original = Checkpoint::open(fixture(family)).unwrap();
        let mut tensors = raw(&fixture(family).join("model.safetensors"));
        for layer in original.moe_layers() {
            let (from, to) = (format!("model.layers.{layer}.{published}"), format!("model.layers.{layer}.mlp"));
            let experts = take_experts(&mut tensors, &from, names);
            assert_eq!(experts.len(), original.block_config(*layer).unwrap().router.num_experts);
            let (i, h) = (experts[0][0].shape[0], experts[0][0].shape[1]);
            let up = experts.iter().flat_map(|[gate, up, _]| [gate.values(), up.values()].concat());
            let up = Raw::f32(&[experts.len(), 2 * i, h], up);
            let down = Raw::f32(&[experts.len(), h, i], experts.iter().flat_map(|[_, _, down]| down.values()));
            tensors.insert(format!("{to}.experts.gate_up_proj"), up);
            tensors.insert(format!("{to}.experts.down_proj"), down);
            // transformers 5 calls every such block `mlp`.
            if from != to {
                let gate = tensors.remove(&format!("{from}.gate.weight")).unwrap();
                let name = if family == "phimoe" { "router" } else { "gate" };
                tensors.insert(format!("{to}.{name}.weight"), gate);
            }
        }
        let dir = folder(&config(family), &tensors);
        let fused = Checkpoint::open(dir.path()).unwrap();
        for &layer in original.moe_layers() {
            let a = original.load_block(layer, options(1, 2, None)).unwrap().params;
            let b = fused.load_block(layer, options(1, 2, None)).unwrap().params;
            assert_same(&a, &b, family);
            // Back on disk in the form that it came in.
            let whole = fused.load_block(layer, options(0, 1, None)).unwrap().params;
            for (name, tensor) in fused.disk_tensors(layer, &whole, 0, 1).unwrap() {
                assert!(tensor.as_bytes() == tensors[&name].data, "{family}: {name}");
            }
            let refused = fused.disk_tensors(layer, &b, 1, 2).unwrap_err().to_string();
            assert!(refused.contains("gather_blocks"), "{refused}");
        }
    }
}

/// Fused fixtures rewritten with a tensor per expert load the same.
#[test]
fn per_expert_form_of_fused_families() {
    for (family, block, up_name, down_name) in [
        ("llama4_top2", "feed_forward", "experts.gate_up_proj", "experts.down_proj"),
        ("granitemoe", "block_sparse_moe", "input_linear.weight", "output_linear.weight"),
    ] {
        let original = Checkpoint::open(fixture(family)).unwrap();
        let mut tensors = raw(&fixture(family).join("model.safetensors"));
        for layer in original.moe_layers() {
            let block = format!("model.layers.{layer}.{block}");
            let config = original.block_config(*layer).unwrap();
            let (e, i, h) = (config.router.num_experts, config.intermediate, config.hidden);
            let up = tensors.remove(&format!("{block}.{up_name}")).unwrap().values();
            let down = tensors.remove(&format!("{block}.{down_name}")).unwrap().values();
            let flipped = family == "llama4_top2";
            if !flipped {
                // The other fused form this family is accepted in.
                tensors.insert(format!("{block}.experts.gate_up_proj"), Raw::f32(&[e, 2 * i, h], up));
                tensors.insert(format!("{block}.experts.down_proj"), Raw::f32(&[e, h, i], down));
                continue;
            }
            for x in 0..e {
                let up = transpose(&up[x * 2 * i * h..][..2 * i * h], h, 2 * i);
                let down = transpose(&down[x * i * h..][..i * h], i, h);
                let mut put = |name: &str, shape: [usize; 2], values: &[f32]| {
                    let name = format!("{block}.experts.{x}.{name}.weight");
                    tensors.insert(name, Raw::f32(&shape, values.iter().copied()));
                };
                put("gate_proj", [i, h], &up[..i * h]);
                put("up_proj", [i, h], &up[i * h..]);
                put("down_proj", [h, i], &down);
            }
        }
        let dir = folder(&config(family), &tensors);
        let other = Checkpoint::open(dir.path()).unwrap();
        for &layer in original.moe_layers() {
            let load = |c: &Checkpoint| c.load_block(layer, options(2, 4, None)).unwrap().params;
            assert_same(&load(&original), &load(&other), family);
        }
    }
}

/// Splits a fixture over three files.
fn shard(family: &str) -> (tempfile::TempDir, Tensors) {
    let tensors = raw(&fixture(family).join("model.safetensors"));
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture(family).join("config.json"), dir.path().join("config.json")).unwrap();
    let mut shards = vec![Tensors::new(); 3];
    let mut map = serde_json::Map::new();
    for (n, (name, tensor)) in tensors.iter().enumerate() {
        shards[n % 3].insert(name.clone(), tensor.clone());
        map.insert(name.clone(), format!("model-{}-of-3.safetensors", n % 3).into());
    }
    for (n, shard) in shards.iter().enumerate() {
        write(&dir.path().join(format!("model-{n}-of-3.safetensors")), shard);
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    (dir, tensors)
}

#[test]
fn sharded_folders_load_and_save() {
    for family in ["mixtral", "gpt_oss_mxfp4", "deepseek_v3_fp8"] {
        let (dir, tensors) = shard(family);
        let (whole, sharded) = (Checkpoint::open(fixture(family)).unwrap(), Checkpoint::open(dir.path()).unwrap());
        assert!(sharded.names().eq(tensors.keys()));
        let layer = sharded.moe_layers()[0];
        let load = |c: &Checkpoint| c.load_block(layer, options(1, 4, None)).unwrap().params;
        assert_same(&load(&whole), &load(&sharded), family);
        // Saved over itself, it is one file; index and shards go.
        let block = sharded.load_block(layer, options(0, 1, None)).unwrap().params;
        let mut replace = SaveOptions::default();
        replace.replace_source = true;
        sharded.save_with(dir.path(), &[block.at_layer(layer)], replace).unwrap();
        assert_eq!(files(dir.path()), ["config.json", "model.safetensors"]);
        let again = Checkpoint::open(dir.path()).unwrap();
        assert_same(&block, &again.load_block(layer, options(0, 1, None)).unwrap().params, family);
    }
}

/// A folder of links, as the Hugging Face cache is, opens where its reader asks for it.
#[cfg(unix)]
#[test]
fn links_are_followed_on_request() {
    let (dir, _) = shard("mixtral");
    let cache = tempfile::tempdir().unwrap();
    for name in files(dir.path()) {
        std::os::unix::fs::symlink(dir.path().join(&name), cache.path().join(&name)).unwrap();
    }
    assert!(Checkpoint::open(cache.path()).is_err());
    let mut follow = OpenOptions::default();
    follow.follow_links = true;
    assert!(Checkpoint::open_with(cache.path(), follow).is_ok());
}

/// The cache of the Hugging Face hub: a snapshot's files are links to blobs, config.json and a single file too.
#[cfg(unix)]
#[test]
fn the_hugging_face_cache() {
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/0123abcd"));
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::create_dir_all(&snapshot).unwrap();
    for (n, name) in ["config.json", "model.safetensors"].into_iter().enumerate() {
        std::fs::copy(fixture("qwen3_moe").join(name), blobs.join(n.to_string())).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{n}"), snapshot.join(name)).unwrap();
    }
    let error = Checkpoint::open(&snapshot).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("OpenOptions::follow_links"), "{error}");
    let mut follow = OpenOptions::default();
    follow.follow_links = true;
    let (linked, plain) =
        (Checkpoint::open_with(&snapshot, follow).unwrap(), Checkpoint::open(fixture("qwen3_moe")).unwrap());
    let load = |c: &Checkpoint| c.load_block(0, options(0, 1, None)).unwrap().params;
    assert_same(&load(&linked), &load(&plain), "a snapshot");
    // A save beside it is of files.
    let target = tempfile::tempdir().unwrap();
    linked.save(target.path(), &[]).unwrap();
    assert_same(&load(&Checkpoint::open(target.path()).unwrap()), &load(&plain), "saved");
}

/// Conversions round once, to nearest even; equal types keep every bit.
#[test]
fn element_types_convert() {
    let mut next = random(7);
    // Finite values of every size and sign that every type can hold, and a NaN with a payload.
    let mut values: Vec<f32> = (0..2 * 8 * 4).map(|_| (next() as i32 >> 8) as f32 * 2f32.powi(-16)).collect();
    values[0] = f32::from_bits(0x7FA0_1234);
    let mut tensors = raw(&fixture("qwen3_moe").join("model.safetensors"));
    tensors.retain(|name, _| !name.contains("layers"));
    let config = json!({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 4, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 4});
    let block = "model.layers.0.mlp";
    for (dtype, bytes) in [
        ("f64", values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect::<Vec<u8>>()),
        ("f32", values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ("f16", values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()),
        ("bf16", values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()),
    ] {
        let size = bytes.len() / values.len();
        tensors.insert(format!("{block}.gate.weight"), Raw::new(dtype, &[2, 4], bytes[..8 * size].to_vec()));
        for e in 0..2 {
            for name in ["gate_proj", "up_proj", "down_proj"] {
                let matrix = bytes[e * 16 * size..][..16 * size].to_vec();
                tensors.insert(format!("{block}.experts.{e}.{name}.weight"), Raw::new(dtype, &[4, 4], matrix));
            }
        }
        let dir = folder(&config, &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let load = |to| checkpoint.load_block(0, options(0, 1, to)).unwrap().params.down;
        assert!(load(None).as_bytes() == &bytes[..2 * 16 * size], "{dtype} to itself");
        let stored = load(None).to_f64();
        for (to, round) in [
            (DType::F64, (|v| v) as fn(f64) -> f64),
            (DType::F32, |v| f64::from(v as f32)),
            (DType::F16, |v| f64::from(f16::from_f32(v as f32))),
            (DType::BF16, |v| f64::from(bf16::from_f32(v as f32))),
        ] {
            let tensor = load(Some(to));
            assert_eq!(tensor.dtype(), to);
            for (found, stored) in tensor.to_f64().into_iter().zip(&stored) {
                let expected = round(*stored);
                assert!(found == expected || (found.is_nan() && expected.is_nan()), "{dtype} to {to}: {stored}");
            }
        }
    }
}

const QWEN: &str = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 160, "num_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 144, "torch_dtype": "bfloat16"}"#;

/// FP8 in blocks, fused, with scales of every type; blocks are ragged at the edges and restart with each expert.
#[test]
fn fp8_block_fused() {
    let (e, i, h) = (2, 144, 160);
    let forms = [("f32", "scale_inv"), ("bf16", "scale_inv"), ("u8", "scale_inv"), ("f8_e8m0", "scale_inv")];
    for (scale, end) in forms.into_iter().chain([("f32", "scale"), ("bf16", "scale")]) {
        let mut next = random(3);
        let mut tensors = Tensors::new();
        let block = "model.layers.0.mlp";
        tensors.insert(format!("{block}.gate.weight"), Raw::f32(&[e, h], (0..e * h).map(|v| v as f32)));
        let mut put = |name: &str, rows: usize, columns: usize| {
            let (grid_rows, grid_columns) = (rows.div_ceil(128), columns.div_ceil(128));
            let name = format!("{block}.experts.{name}");
            let q = codes(&mut next, e * rows * columns);
            let bytes = codes(&mut next, e * grid_rows * grid_columns);
            let exponent = |b: u8| 2f32.powi(i32::from(b % 32 + 110) - 127);
            let exact = |b: u8| 1.0 + f32::from(b) / 256.0;
            let (data, scales): (Vec<u8>, Vec<f32>) = match scale {
                "f32" => (
                    bytes.iter().flat_map(|b| (exact(*b) / 3.0).to_le_bytes()).collect(),
                    bytes.iter().map(|b| exact(*b) / 3.0).collect(),
                ),
                "bf16" => {
                    let round = |b: &u8| bf16::from_f32(exact(*b));
                    (
                        bytes.iter().flat_map(|b| round(b).to_le_bytes()).collect(),
                        bytes.iter().map(|b| round(b).to_f32()).collect(),
                    )
                }
                _ => (bytes.iter().map(|b| b % 32 + 110).collect(), bytes.iter().map(|b| exponent(*b)).collect()),
            };
            tensors.insert(name.clone(), Raw::new("f8_e4m3", &[e, rows, columns], q.clone()));
            tensors.insert(format!("{name}_{end}"), Raw::new(scale, &[e, grid_rows, grid_columns], data));
            let value = move |x: usize, r: usize, c: usize| {
                let scale = scales[(x * grid_rows + r / 128) * grid_columns + c / 128];
                e4m3(q[(x * rows + r) * columns + c]) * scale
            };
            (name, vec![e, rows, columns], value)
        };
        let (up, down) = (put("gate_up_proj", 2 * i, h), put("down_proj", h, i));
        let dir = folder(&serde_json::from_str(QWEN).unwrap(), &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.block_form(0).unwrap(), Form::Fp8Block);
        expect(&checkpoint, &up.0, &up.1, &up.2);
        expect(&checkpoint, &down.0, &down.1, &down.2);
        // The block is the tensors' values, in the model's type where none is asked for.
        let block = checkpoint.load_block(0, options(1, 2, Some(DType::F32))).unwrap().params;
        assert!(block.up.as_slice::<f32>().unwrap().iter().enumerate().all(|(n, v)| *v == up.2(1, n / h, n % h)));
        assert!(block.down.as_slice::<f32>().unwrap().iter().enumerate().all(|(n, v)| *v == down.2(1, n / i, n % i)));
        assert_eq!(checkpoint.load_block(0, options(0, 1, None)).unwrap().params.up.dtype(), DType::BF16);
    }
}

/// ModelOpt's FP8 (a scale a tensor) and compressed-tensors' NVFP4, one tensor an expert.
#[test]
fn per_tensor_fp8_and_compressed_tensors_nvfp4() {
    let (e, i, h) = (2, 144, 160);
    for nvfp4 in [false, true] {
        let mut next = random(11);
        let mut tensors = Tensors::new();
        let block = "model.layers.0.mlp";
        tensors.insert(format!("{block}.gate.weight"), Raw::f32(&[e, h], (0..e * h).map(|v| v as f32)));
        let mut values = Vec::new();
        for x in 0..e {
            for (name, rows, columns) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
                let name = format!("{block}.experts.{x}.{name}");
                let factor = 1.0 + (next() % 1000) as f32 / 777.0;
                if nvfp4 {
                    let q: Vec<u8> = (0..rows * columns / 2).map(|_| next() as u8).collect();
                    let s = scales(&mut next, rows * columns / 16);
                    let value = |n: usize| {
                        let code = if n.is_multiple_of(2) { q[n / 2] & 15 } else { q[n / 2] >> 4 };
                        e2m1(code) * (e4m3(s[n / 16]) / factor)
                    };
                    values.push((
                        format!("{name}.weight"),
                        rows,
                        columns,
                        (0..rows * columns).map(value).collect::<Vec<f32>>(),
                    ));
                    tensors.insert(format!("{name}.weight_packed"), Raw::new("u8", &[rows, columns / 2], q));
                    tensors.insert(format!("{name}.weight_scale"), Raw::new("f8_e4m3", &[rows, columns / 16], s));
                    tensors.insert(format!("{name}.weight_global_scale"), Raw::f32(&[1], [factor]));
                    tensors.insert(format!("{name}.input_global_scale"), Raw::f32(&[1], [400.0]));
                } else {
                    let q = codes(&mut next, rows * columns);
                    let value = q.iter().map(|code| e4m3(*code) * factor).collect();
                    values.push((format!("{name}.weight"), rows, columns, value));
                    tensors.insert(format!("{name}.weight"), Raw::new("f8_e4m3", &[rows, columns], q));
                    tensors.insert(format!("{name}.weight_scale"), Raw::f32(&[], [factor]));
                    tensors.insert(format!("{name}.input_scale"), Raw::f32(&[], [0.5]));
                }
            }
        }
        let dir = folder(&serde_json::from_str(QWEN).unwrap(), &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let form = if nvfp4 { Form::Nvfp4CompressedTensors } else { Form::Fp8Scaled };
        assert_eq!(checkpoint.block_form(0).unwrap(), form);
        assert_eq!(checkpoint.keeps_quantized(0).unwrap(), nvfp4);
        assert_eq!(checkpoint.load_quantized(0, options(0, 1, None)).is_ok(), nvfp4);
        for (name, rows, columns, values) in &values {
            expect(&checkpoint, name, &[*rows, *columns], |_, r, c| values[r * columns + c]);
        }
        let block = checkpoint.load_block(0, options(1, 2, Some(DType::F32))).unwrap().params;
        assert_eq!(block.up.as_slice::<f32>().unwrap(), [values[3].3.clone(), values[4].3.clone()].concat());
        assert_eq!(block.down.as_slice::<f32>().unwrap(), values[5].3);
    }
}

/// ModelOpt's NVFP4 of Llama-4: fused (in, out), packed along in.
#[test]
fn nvfp4_fused_along_in() {
    let (e, i, h) = (2, 16, 32);
    let mut next = random(5);
    let mut tensors = Tensors::new();
    let block = "model.layers.0.feed_forward";
    let matrix = |rows: usize, columns: usize| Raw::f32(&[rows, columns], (0..rows * columns).map(|v| v as f32));
    tensors.insert(format!("{block}.router.weight"), matrix(e, h));
    for (name, rows, columns) in [("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)] {
        tensors.insert(format!("{block}.shared_expert.{name}.weight"), matrix(rows, columns));
    }
    let mut put = |name: &str, inn: usize, out: usize, factor: f32| {
        let name = format!("{block}.experts.{name}");
        let q: Vec<u8> = (0..e * inn / 2 * out).map(|_| next() as u8).collect();
        let s = scales(&mut next, e * inn / 16 * out);
        tensors.insert(name.clone(), Raw::new("u8", &[e, inn / 2, out], q.clone()));
        tensors.insert(format!("{name}_weight_scale"), Raw::new("f8_e4m3", &[e, inn / 16, out], s.clone()));
        tensors.insert(format!("{name}_weight_scale_2"), Raw::f32(&[], [factor]));
        tensors.insert(format!("{name}_input_scale"), Raw::f32(&[], [0.5]));
        let value = move |x: usize, r: usize, c: usize| {
            let byte = q[(x * inn / 2 + r / 2) * out + c];
            e2m1(if r.is_multiple_of(2) { byte & 15 } else { byte >> 4 })
                * (e4m3(s[(x * inn / 16 + r / 16) * out + c]) * factor)
        };
        (name, [e, inn, out], value)
    };
    let (up, down) = (put("gate_up_proj", h, 2 * i, 0.3), put("down_proj", i, h, 1.7));
    let config = json!({"model_type": "llama4_text", "num_hidden_layers": 1, "hidden_size": h, "num_local_experts": e,
        "num_experts_per_tok": 1, "intermediate_size": i, "interleave_moe_layer_step": 1});
    let dir = folder(&config, &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.block_form(0).unwrap(), Form::Nvfp4ModelOpt);
    assert!(!checkpoint.keeps_quantized(0).unwrap());
    checkpoint.load_quantized(0, options(0, 1, None)).unwrap_err();
    expect(&checkpoint, &up.0, &up.1, &up.2);
    expect(&checkpoint, &down.0, &down.1, &down.2);
    let block = checkpoint.load_block(0, options(1, 2, None)).unwrap().params;
    let found = block.up.as_slice::<f32>().unwrap();
    assert!(found.iter().enumerate().all(|(n, v)| v.to_bits() == up.2(1, n % h, n / h).to_bits()));
    let found = block.down.as_slice::<f32>().unwrap();
    assert!(found.iter().enumerate().all(|(n, v)| v.to_bits() == down.2(1, n % i, n / i).to_bits()));
}
