//! Saving with the routed experts in NVFP4, in ModelOpt's form.

use moebius::checkpoint::{Checkpoint, Form};
use moebius::cpu::Cpu;
use moebius::quant::*;
use moebius::{DType, Tensor};

use crate::support::{config, files, fixture, folder, options, raw};

fn second_scale(tensors: &crate::support::Tensors, name: &str) -> f32 {
    f32::from_le_bytes(tensors[&format!("{name}.weight_scale_2")].data[..].try_into().unwrap())
}

/// The save writes what the codec gives, gate and up under one amax; reading it back gives the de-quantized form;
/// everything else is as it was.
#[test]
fn experts_become_nvfp4() {
    for folder in ["qwen3_moe", "qwen3_moe_bf16", "mixtral", "deepseek_v3"] {
        let source = Checkpoint::open(fixture(folder)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let report = source.save_nvfp4(dir.path()).unwrap();
        assert_eq!(files(dir.path()), ["config.json", "hf_quant_config.json", "model.safetensors"]);
        let (before, after) =
            (raw(&fixture(folder).join("model.safetensors")), raw(&dir.path().join("model.safetensors")));
        let saved = Checkpoint::open(dir.path()).unwrap();
        let cpu = Cpu::new();
        let mut quantized = 0;
        for (name, was) in &before {
            let Some(module) = name.strip_suffix(".weight").filter(|name| name.contains(".experts.")) else {
                assert_eq!(&after[name], was, "{name}");
                continue;
            };
            quantized += 1;
            let line = report.iter().find(|line| line.name == *name).unwrap();
            let weight = source.tensor(name, Some(DType::F32)).unwrap();
            let own = weight.to_f64().into_iter().fold(0.0f64, |max, v| max.max(v.abs())) as f32;
            let partner = module.replace("gate_proj", "up_proj").replace("w1", "w3");
            assert_eq!(second_scale(&after, module), second_scale(&after, &partner), "{name}");
            assert_eq!(second_scale(&after, module), line.amax / 2688.0, "{name}");
            assert!(own <= line.amax && (own == line.amax || !name.contains("down")), "{name}");

            let dims = [was.shape[0], was.shape[1]];
            let mut made = Nvfp4Tensors::empty(&cpu, &Nvfp4::MODELOPT, dims, Direction::Rows).unwrap();
            made.amax = Tensor::from_vec(vec![line.amax], &[1]).unwrap();
            let matrix = Matrix::new(weight.view()).unwrap();
            let call = Quantize { format: &Nvfp4::MODELOPT, matrix, rows: Some(made.view_mut()), columns: None };
            cpu.quantize_cast_only(call).unwrap();
            assert_eq!(after[name].data, made.codes.as_bytes(), "{name}");
            assert_eq!(after[&format!("{name}_scale")].data, made.scales.as_bytes(), "{name}");

            let mut back = Tensor::empty(&cpu, DType::F32, &dims).unwrap();
            cpu.dequantize(made.dequantize(&Nvfp4::MODELOPT, back.view_mut())).unwrap();
            let read = saved.tensor(name, Some(DType::F32)).unwrap();
            assert_eq!(read.to_f64(), back.to_f64(), "{name}");
            // A normal block's error: E2M1's steps are ½ to 2 of a block's largest 6.
            assert!(line.error > 0.02 && line.error < 0.15, "{name}: {}", line.error);
        }
        assert_eq!((quantized, after.len()), (report.len(), before.len() + 2 * quantized), "{folder}");
        for &layer in saved.moe_layers() {
            assert_eq!(saved.block_form(layer).unwrap(), Form::Nvfp4ModelOpt);
            saved.load_block(layer, options(0, 1, None)).unwrap();
        }
    }
}

/// The shipped ModelOpt folder was made of the shipped bf16 folder by ModelOpt itself: all its bytes, but for the
/// scales of activations, which are not written here. It joins gate and up in every other expert only; where it does
/// not, the lesser of the two has an amax of its own.
#[test]
fn bytes_are_those_of_modelopt() {
    let dir = tempfile::tempdir().unwrap();
    let source = Checkpoint::open(fixture("qwen3_moe_bf16")).unwrap();
    let matrices = source.save_nvfp4(dir.path()).unwrap();
    let mut expected = raw(&fixture("qwen3_moe_nvfp4_modelopt").join("model.safetensors"));
    expected.retain(|name, _| !name.ends_with(".input_scale"));
    let mut found = raw(&dir.path().join("model.safetensors"));
    assert!(found.keys().eq(expected.keys()));
    let mut alone = 0;
    for name in matrices.into_iter().map(|matrix| matrix.name) {
        let second = format!("{name}_scale_2");
        if found[&second] != expected[&second] {
            let weight = source.tensor(&name, None).unwrap();
            let matrix = Matrix::new(weight.view()).unwrap();
            let mut made = Nvfp4Tensors::empty(&Cpu::new(), &Nvfp4::MODELOPT, matrix.dims(), Direction::Rows).unwrap();
            let call = Quantize { format: &Nvfp4::MODELOPT, matrix, rows: Some(made.view_mut()), columns: None };
            Cpu::new().quantize(call).unwrap();
            let amax = made.amax.as_slice::<f32>().unwrap()[0];
            let own = [
                (second, Nvfp4::second_scale(amax).to_le_bytes().to_vec()),
                (format!("{name}_scale"), made.scales.as_bytes().to_vec()),
                (name, made.codes.as_bytes().to_vec()),
            ];
            for (name, data) in own {
                found.get_mut(&name).unwrap().data = data;
            }
            alone += 1;
        }
    }
    assert_eq!(alone, 8);
    for (name, tensor) in expected {
        assert!(found[&name] == tensor, "{name}");
    }
}

#[test]
fn configuration_names_what_is_left() {
    let source = Checkpoint::open(fixture("qwen3_moe")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    source.save_nvfp4(dir.path()).unwrap();
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(dir.path().join(name)).unwrap()).unwrap()
    };
    let (config, sidecar) = (read("config.json"), read("hf_quant_config.json"));
    assert_eq!(config["quantization_config"]["quant_method"], "modelopt");
    assert_eq!(config["quantization_config"]["quant_algo"], "W4A16_NVFP4");
    assert_eq!(config["hidden_size"], source.config()["hidden_size"]);
    let left = &sidecar["quantization"]["exclude_modules"];
    assert_eq!(left, &config["quantization_config"]["ignore"]);
    let left: Vec<&str> = left.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect();
    assert!(left.contains(&"lm_head") && left.contains(&"model.layers.*.mlp.gate"), "{left:?}");
    assert!(!left.iter().any(|name| name.contains("experts")), "{left:?}");
}

#[test]
fn refuses_what_it_cannot_write() {
    for (folder, reason) in [
        ("gpt_oss", "expected a matrix an expert on disk, found all experts in experts.gate_up_proj"),
        ("qwen3_moe_nvfp4_modelopt", "expected experts in f32, bf16 or f16"),
        ("deepseek_v3_fp8", "expected experts in f32, bf16 or f16"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let error = Checkpoint::open(fixture(folder)).unwrap().save_nvfp4(dir.path()).unwrap_err().to_string();
        assert!(error.starts_with("Checkpoint::save_nvfp4: layer ") && error.contains(reason), "{error}");
        assert_eq!(files(dir.path()), [""; 0], "{folder}");
    }
}

/// An expert of zeros stays one, though the formulas would make NaN of it; one with an infinity is refused by name.
#[test]
fn zeros_and_infinities() {
    let mut tensors = raw(&fixture("qwen3_moe").join("model.safetensors"));
    let name = "model.layers.1.mlp.experts.3.down_proj.weight";
    tensors.get_mut(name).unwrap().data.fill(0);
    let source = folder(&config("qwen3_moe"), &tensors);
    let dir = tempfile::tempdir().unwrap();
    let report = Checkpoint::open(source.path()).unwrap().save_nvfp4(dir.path()).unwrap();
    assert_eq!(report.iter().find(|line| line.name == name).unwrap().error, 0.0);
    let read = Checkpoint::open(dir.path()).unwrap().tensor(name, Some(DType::F32)).unwrap();
    assert!(read.to_f64().iter().all(|v| *v == 0.0));

    // Row 2, column 5 of 32.
    tensors.get_mut(name).unwrap().data[(2 * 32 + 5) * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let source = folder(&config("qwen3_moe"), &tensors);
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(source.path()).unwrap().save_nvfp4(dir.path()).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("Checkpoint::save_nvfp4: {name}: expected finite weights, found NaN or infinity at [2, 5]")
    );
    assert_eq!(files(dir.path()), [""; 0]);
}
