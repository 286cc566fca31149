//! Tensors of a block, and their scales.

use super::*;

#[test]
fn tensors_of_a_block() {
    type Change = fn(&mut Tensors);
    fn name(last: &str) -> String {
        format!("model.layers.0.mlp.{last}")
    }
    fn edit(tensors: &mut Tensors, last: &str, change: impl FnOnce(&mut Raw)) {
        change(tensors.get_mut(&name(last)).unwrap());
    }
    const DOWN: &str = "experts.7.down_proj.weight";
    const V3: &str = "model.layers.1.mlp.experts.3.down_proj.weight";
    let cases: Vec<(&str, &str, Change, Kind, &str)> = vec![
        ("no router", "qwen3_moe", |t| drop(t.remove(&name("gate.weight"))), Kind::Missing, "mlp.gate.weight"),
        // Expert 0 belongs to the other rank: every rank refuses alike.
        ("no expert 0", "qwen3_moe", |t| t.retain(|n, _| !n.contains("0.mlp.experts.0.")), Kind::Missing, "experts.0."),
        ("no last expert", "qwen3_moe", |t| drop(t.remove(&name(DOWN))), Kind::Missing, "experts.7.down_proj"),
        (
            "one expert too many",
            "qwen3_moe",
            |t| drop(t.insert(name("experts.8.up_proj.weight"), Raw::f32(&[1], [0.0]))),
            Kind::Unexpected,
            "experts.8.up_proj",
        ),
        (
            "a bias",
            "qwen3_moe",
            |t| drop(t.insert(name("gate.bias"), Raw::f32(&[8], [0.0; 8]))),
            Kind::Unexpected,
            "gate.bias",
        ),
        (
            "both forms",
            "qwen3_moe",
            |t| drop(t.insert(name("experts.down_proj"), Raw::f32(&[8, 64, 32], vec![0.0; 8 * 64 * 32]))),
            Kind::Unexpected,
            "experts.down_proj",
        ),
        ("transposed", "qwen3_moe", |t| edit(t, DOWN, |r| r.shape.reverse()), Kind::Tensor, "[64, 32]"),
        ("flat", "qwen3_moe", |t| edit(t, DOWN, |r| r.shape = vec![64 * 32]), Kind::Tensor, "[2048]"),
        ("too small", "qwen3_moe", |t| edit(t, DOWN, |r| *r = Raw::f32(&[1, 1], [0.0])), Kind::Tensor, "[1, 1]"),
        (
            "an integer type",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("i64", &[64, 32], vec![0; 64 * 32 * 8])),
            Kind::Tensor,
            "I64",
        ),
        (
            "bytes without scales",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("u8", &[64, 32], vec![0; 64 * 32])),
            Kind::Tensor,
            "U8",
        ),
        (
            "another type than the rest",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("bf16", &[64, 32], vec![0; 64 * 32 * 2])),
            Kind::Tensor,
            "bf16",
        ),
        (
            "FP8 without scales",
            "qwen3_moe",
            |t| edit(t, DOWN, |r| *r = Raw::new("f8_e4m3", &[64, 32], vec![0; 64 * 32])),
            Kind::Missing,
            "weight_scale_inv",
        ),
        (
            "scales missing",
            "deepseek_v3_fp8",
            |t| drop(t.remove(&format!("{V3}_scale_inv"))),
            Kind::Missing,
            "scale_inv",
        ),
        (
            "scales of other blocks",
            "deepseek_v3_fp8",
            |t| drop(t.insert(format!("{V3}_scale_inv"), Raw::f32(&[2, 1], [1.0; 2]))),
            Kind::Tensor,
            "[2, 2]",
        ),
        (
            "scales of integers",
            "deepseek_v3_fp8",
            |t| drop(t.insert(format!("{V3}_scale_inv"), Raw::new("i64", &[2, 2], vec![0; 32]))),
            Kind::Tensor,
            "I64",
        ),
        (
            "codes of another type",
            "gpt_oss_mxfp4",
            |t| edit(t, "experts.down_proj_blocks", |r| (r.dtype, r.shape) = ("bf16".to_string(), vec![8, 64, 2, 8])),
            Kind::Tensor,
            "down_proj_blocks",
        ),
        (
            "blocks of 8 bytes",
            "gpt_oss_mxfp4",
            |t| edit(t, "experts.down_proj_blocks", |r| r.shape = vec![8, 64, 4, 8]),
            Kind::Tensor,
            "16",
        ),
        (
            "no MXFP4 scales",
            "gpt_oss_mxfp4",
            |t| drop(t.remove(&name("experts.down_proj_scales"))),
            Kind::Missing,
            "experts.down_proj_scales is missing",
        ),
        (
            "no bias",
            "gpt_oss_mxfp4",
            |t| drop(t.remove(&name("experts.down_proj_bias"))),
            Kind::Missing,
            "down_proj_bias",
        ),
        (
            "NVFP4 without its block scales",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.remove(&name("experts.7.down_proj.weight_scale"))),
            Kind::Missing,
            "weight_scale",
        ),
        (
            "NVFP4 without its factor",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.remove(&name("experts.7.down_proj.weight_scale_2"))),
            Kind::Missing,
            "experts.7.down_proj.weight_scale_2 is missing",
        ),
        (
            "NVFP4 scales of other blocks",
            "qwen3_moe_nvfp4_modelopt",
            |t| edit(t, "experts.7.down_proj.weight_scale", |r| r.shape = vec![32, 4]),
            Kind::Tensor,
            "one scale",
        ),
        (
            "a scaled input of another method",
            "qwen3_moe_nvfp4_modelopt",
            |t| drop(t.insert(name("experts.7.down_proj.pre_quant_scale"), Raw::f32(&[32], [1.0; 32]))),
            Kind::Unexpected,
            "pre_quant_scale",
        ),
    ];
    for (what, family, change, expected, words) in cases {
        let mut tensors = raw(&fixture(family).join("model.safetensors"));
        change(&mut tensors);
        let dir = folder(&config(family), &tensors);
        refuse(what, dir.path(), expected, words);
    }
}

/// Scales that no quantizer writes would make other weights without a word: those of blocks, in each form, and of matrices.
#[test]
fn scales_that_are_no_scales() {
    const MODELOPT: &str = "model.layers.0.mlp.experts.7.down_proj";
    const COMPRESSED: &str = "model.layers.0.mlp.experts.7.down_proj";
    const V3: &str = "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv";
    const OSS: &str = "model.layers.0.mlp.experts.down_proj_scales";
    let f32s = [f32::NAN, f32::INFINITY, -1.0].map(|value| value.to_le_bytes().to_vec());
    let e4m3 = [0x7f, 0xff, 0xb8].map(|byte| vec![byte]);
    let cases: [(&str, String, &[Vec<u8>]); 6] = [
        ("qwen3_moe_nvfp4_modelopt", format!("{MODELOPT}.weight_scale_2"), &f32s),
        ("qwen3_moe_nvfp4_modelopt", format!("{MODELOPT}.weight_scale"), &e4m3),
        ("qwen3_moe_nvfp4_ct", format!("{COMPRESSED}.weight_global_scale"), &f32s),
        ("qwen3_moe_nvfp4_ct", format!("{COMPRESSED}.weight_scale"), &e4m3),
        ("deepseek_v3_fp8", V3.into(), &f32s),
        ("gpt_oss_mxfp4", OSS.into(), &[vec![0xff]]),
    ];
    for (family, name, values) in cases {
        for value in values {
            let mut tensors = raw(&fixture(family).join("model.safetensors"));
            let data = &mut tensors.get_mut(&name).unwrap_or_else(|| panic!("{family}: no {name}")).data;
            // The last rank's, which loads.
            let at = data.len() - value.len();
            data[at..].copy_from_slice(value);
            let dir = folder(&config(family), &tensors);
            let what = format!("{family}, {value:?}");
            refuse(&what, dir.path(), Kind::Tensor, &name);
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let layer = checkpoint.moe_layers()[0];
            let error = checkpoint.load_quantized(layer, options(1, 2, None)).expect_err(&what);
            assert!(kind(&error) == Kind::Tensor && error.to_string().contains(&name), "{what}: {error}");
        }
    }
}
