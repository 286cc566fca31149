//! compressed-tensors' fp8 in blocks and MXFP4: what is stored against closed forms, de-quantized and kept as it is;
//! shapes of scales that could be read in several ways; and what is refused.

use half::{bf16, f16};
use moebius::checkpoint::{Checkpoint, Form};
use moebius::cpu::Cpu;
use moebius::quant::{Quantized, WeightFormat};
use moebius::{CheckpointError, DType, Error};
use serde_json::{Value, json};

use crate::support::*;

const BLOCK: &str = "model.layers.0.mlp";
const EXPERTS: usize = 4;

/// A quantized matrix as it is stored, by the ends of its tensors' names, and the values that it stands for.
struct Matrix {
    tensors: Vec<(&'static str, Raw)>,
    values: Vec<f32>,
}

impl Matrix {
    fn put(&self, name: &str, tensors: &mut Tensors) {
        tensors.extend(self.tensors.iter().map(|(end, raw)| (format!("{name}.{end}"), raw.clone())));
    }
}

/// E4M3 with a scale a block of `size`, ragged at the edges; scales of type `scale`.
fn fp8(next: &mut impl FnMut() -> u64, [rows, columns]: [usize; 2], size: [usize; 2], scale: &str) -> Matrix {
    let grid = [rows.div_ceil(size[0]), columns.div_ceil(size[1])];
    let q = codes(next, rows * columns);
    let exact: Vec<f32> = (0..grid[0] * grid[1]).map(|_| (1.0 + (next() % 1000) as f32 / 777.0) / 64.0).collect();
    let (data, scales): (Vec<u8>, Vec<f32>) = match scale {
        "f32" => (exact.iter().flat_map(|s| s.to_le_bytes()).collect(), exact),
        "bf16" => {
            let rounded: Vec<bf16> = exact.into_iter().map(bf16::from_f32).collect();
            (rounded.iter().flat_map(|s| s.to_le_bytes()).collect(), rounded.iter().map(|s| s.to_f32()).collect())
        }
        "f16" => {
            let rounded: Vec<f16> = exact.into_iter().map(f16::from_f32).collect();
            (rounded.iter().flat_map(|s| s.to_le_bytes()).collect(), rounded.iter().map(|s| s.to_f32()).collect())
        }
        other => panic!("{other}"),
    };
    let value = |n: usize| e4m3(q[n]) * scales[n / columns / size[0] * grid[1] + n % columns / size[1]];
    let values = (0..rows * columns).map(value).collect();
    let tensors =
        vec![("weight", Raw::new("f8_e4m3", &[rows, columns], q)), ("weight_scale", Raw::new(scale, &grid, data))];
    Matrix { tensors, values }
}

/// E2M1 with a power of two for 32 of a row.
fn mxfp4(next: &mut impl FnMut() -> u64, [rows, columns]: [usize; 2], scale: &str) -> Matrix {
    let q: Vec<u8> = (0..rows * columns / 2).map(|_| next() as u8).collect();
    let exponents: Vec<u8> = (0..rows * columns / 32).map(|_| (next() % 32 + 110) as u8).collect();
    let value = |n: usize| {
        let code = if n.is_multiple_of(2) { q[n / 2] & 15 } else { q[n / 2] >> 4 };
        e2m1(code) * 2f32.powi(i32::from(exponents[n / 32]) - 127)
    };
    let values = (0..rows * columns).map(value).collect();
    let tensors = vec![
        ("weight_packed", Raw::new("u8", &[rows, columns / 2], q)),
        ("weight_scale", Raw::new(scale, &[rows, columns / 32], exponents)),
    ];
    Matrix { tensors, values }
}

fn qwen_config([inner, hidden]: [usize; 2], quantization: Value) -> Value {
    json!({"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": hidden, "num_experts": EXPERTS,
        "num_experts_per_tok": 1, "moe_intermediate_size": inner, "torch_dtype": "bfloat16",
        "quantization_config": quantization})
}

/// As llm-compressor writes it.
fn fp8_config(block: Value) -> Value {
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block,
        "symmetric": true, "dynamic": false});
    let inputs = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": true});
    json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}})
}

fn mxfp4_config() -> Value {
    let weights = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8", "block_structure": null, "symmetric": true, "dynamic": false});
    json!({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}}})
}

/// Gate, up and down of all experts.
type Experts = Vec<[Matrix; 3]>;

const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn experts([inner, hidden]: [usize; 2], mut make: impl FnMut([usize; 2]) -> Matrix) -> (Tensors, Experts) {
    let mut tensors = Tensors::new();
    let router = (0..EXPERTS * hidden).map(|v| v as f32);
    tensors.insert(format!("{BLOCK}.gate.weight"), Raw::f32(&[EXPERTS, hidden], router));
    let experts = (0..EXPERTS).map(|e| {
        let expert = [make([inner, hidden]), make([inner, hidden]), make([hidden, inner])];
        for (name, matrix) in NAMES.iter().zip(&expert) {
            matrix.put(&format!("{BLOCK}.experts.{e}.{name}"), &mut tensors);
        }
        expert
    });
    let experts = experts.collect();
    (tensors, experts)
}

/// Holds every matrix, and both ranks' shares of the block, against the values.
fn check_dequantized(checkpoint: &Checkpoint, [inner, hidden]: [usize; 2], experts: &Experts) {
    for (e, expert) in experts.iter().enumerate() {
        for ((name, matrix), dims) in NAMES.iter().zip(expert).zip([[inner, hidden], [inner, hidden], [hidden, inner]])
        {
            let name = format!("{BLOCK}.experts.{e}.{name}.weight");
            expect(checkpoint, &name, &dims, |_, r, c| matrix.values[r * dims[1] + c]);
        }
    }
    for rank in 0..2 {
        let block = checkpoint.load_block(0, options(rank, 2, Some(DType::F32))).unwrap().params;
        let [up, down] = share(experts, rank);
        assert!(block.up.as_slice::<f32>().unwrap() == up.concat(), "up of rank {rank}");
        assert!(block.down.as_slice::<f32>().unwrap() == down.concat(), "down of rank {rank}");
    }
}

/// Holds both ranks' shares, kept as they are stored, against the values.
fn check_kept(checkpoint: &Checkpoint, format: WeightFormat, experts: &Experts) {
    assert!(checkpoint.keeps_quantized(0).unwrap());
    for rank in 0..2 {
        let block = checkpoint.load_quantized(0, options(rank, 2, None)).unwrap();
        let check = |name: &str, kept: &Quantized<Cpu>, values: &[Vec<f32>]| {
            assert_eq!(kept.format(), format);
            for (e, values) in values.iter().enumerate() {
                let found = kept.view().dequantize(e).unwrap();
                assert!(found == *values, "{name} of rank {rank}, expert {e}");
            }
        };
        let [up, down] = share(experts, rank);
        check("up", &block.up, &up);
        check("down", &block.down, &down);
    }
}

/// A rank's up and down, of two ranks.
fn share(experts: &Experts, rank: usize) -> [Vec<Vec<f32>>; 2] {
    let own = &experts[rank * EXPERTS / 2..(rank + 1) * EXPERTS / 2];
    let up = own.iter().map(|[gate, up, _]| [gate.values.clone(), up.values.clone()].concat()).collect();
    [up, own.iter().map(|[_, _, down]| down.values.clone()).collect()]
}

/// Blocks of 128x128, ragged at the edges, are kept; the scales multiply, in every type that they have.
#[test]
fn fp8_in_blocks() {
    let sizes = [200, 300];
    for (block, scale) in
        [(json!([128, 128]), "f32"), (json!([128, 128]), "bf16"), (json!("128x128"), "f16"), (json!(null), "bf16")]
    {
        let mut next = random(21);
        let (mut tensors, experts) = experts(sizes, |dims| fp8(&mut next, dims, [128, 128], scale));
        let dense = fp8(&mut next, [260, 300], [128, 128], scale);
        dense.put("model.layers.0.self_attn.q_proj", &mut tensors);
        let dir = folder(&qwen_config(sizes, fp8_config(block)), &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.block_form(0).unwrap(), Form::Fp8Block);
        check_dequantized(&checkpoint, sizes, &experts);
        check_kept(&checkpoint, WeightFormat::Fp8Block, &experts);
        let name = "model.layers.0.self_attn.q_proj.weight";
        expect(&checkpoint, name, &[260, 300], |_, r, c| dense.values[r * 300 + c]);
    }
}

/// The configuration's size of blocks, which products do not read, of experts that are smaller than a usual block too.
#[test]
fn fp8_in_blocks_of_another_size() {
    for sizes in [[200, 300], [96, 64]] {
        let mut next = random(22);
        let (tensors, experts) = experts(sizes, |dims| fp8(&mut next, dims, [64, 32], "f32"));
        let dir = folder(&qwen_config(sizes, fp8_config(json!([64, 32]))), &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.block_form(0).unwrap(), Form::Fp8Block);
        check_dequantized(&checkpoint, sizes, &experts);
        assert!(!checkpoint.keeps_quantized(0).unwrap());
        checkpoint.load_quantized(0, options(0, 2, None)).unwrap_err();
        // By the usual blocks they would have other shapes.
        let dir = folder(&qwen_config(sizes, json!(null)), &tensors);
        let error = Checkpoint::open(dir.path()).unwrap().block_form(0).unwrap_err().to_string();
        assert!(error.contains("gate_proj.weight_scale") && error.contains("blocks of 128x128"), "{error}");
    }
}

/// One block is one scale: kept where the configuration says that it is a block, of a matrix where it says nothing.
#[test]
fn fp8_in_one_block() {
    let sizes = [96, 128];
    let mut next = random(23);
    let (tensors, experts) = experts(sizes, |dims| fp8(&mut next, dims, [128, 128], "bf16"));
    let named = folder(&qwen_config(sizes, fp8_config(json!([128, 128]))), &tensors);
    let named = Checkpoint::open(named.path()).unwrap();
    assert_eq!(named.block_form(0).unwrap(), Form::Fp8Block);
    check_dequantized(&named, sizes, &experts);
    check_kept(&named, WeightFormat::Fp8Block, &experts);
    let unnamed = folder(&qwen_config(sizes, json!(null)), &tensors);
    let unnamed = Checkpoint::open(unnamed.path()).unwrap();
    assert_eq!(unnamed.block_form(0).unwrap(), Form::Fp8Scaled);
    check_dequantized(&unnamed, sizes, &experts);
}

/// Which scale multiplies a row and a column, by the shapes of both and the sizes of blocks that are named.
#[test]
fn shapes_of_fp8_scales() {
    let usual = || json!([[128, 128]]);
    let two = || json!([[128, 128], [96, 64]]);
    type Index = fn(usize, usize) -> usize;
    let read: [([usize; 2], &[usize], Value, Index); 13] = [
        // As many scales down as blocks, as rows, or one.
        ([200, 64], &[2, 1], json!([]), |r, _| r / 128),
        ([200, 64], &[2, 1], usual(), |r, _| r / 128),
        ([200, 64], &[200, 1], usual(), |r, _| r),
        ([200, 64], &[200], json!([]), |r, _| r),
        ([2, 64], &[2, 1], usual(), |r, _| r),
        ([200, 300], &[1, 1], usual(), |_, _| 0),
        ([200, 300], &[], usual(), |_, _| 0),
        ([1, 300], &[1, 3], usual(), |_, c| c / 128),
        ([200, 64], &[200, 1], json!([[1, 64]]), |r, _| r),
        // The shape tells which of two sizes it is, or both mean the same.
        ([192, 300], &[2, 3], two(), |r, c| r / 128 * 3 + c / 128),
        ([192, 300], &[2, 5], two(), |r, c| r / 96 * 5 + c / 64),
        ([90, 60], &[1, 1], two(), |_, _| 0),
        ([192, 64], &[192, 1], two(), |r, _| r),
    ];
    for (dims, scales, blocks, index) in read {
        let (checkpoint, _dir) = one_matrix(dims, Raw::f32(scales, scale_values(scales)), &blocks);
        expect(&checkpoint, "x.weight", &dims, |_, r, c| 1.0 + index(r, c) as f32);
    }
    let refused: [([usize; 2], &[usize], Value, &str); 7] = [
        ([200, 64], &[2], usual(), "one a row (shape [200, 1]) or shape [2, 1] (blocks of 128x128)"),
        ([200, 300], &[3, 2], usual(), "shape [2, 3]"),
        ([200, 300], &[1, 3], usual(), "shape [2, 3]"),
        // A scale for 128 of a row.
        ([200, 300], &[200, 3], usual(), "shape [2, 3]"),
        ([200, 300], &[2, 3, 1], json!([]), "shape [2, 3]"),
        ([200, 300], &[2, 3], json!([[64, 128]]), "shape [4, 3] (blocks of 64x128)"),
        // Rows 96 to 128 have either scale.
        ([192, 64], &[2, 1], two(), "not both blocks of 128x128 and of 96x64"),
    ];
    for (dims, scales, blocks, words) in refused {
        let (checkpoint, _dir) = one_matrix(dims, Raw::f32(scales, scale_values(scales)), &blocks);
        refuse(checkpoint.tensor("x.weight", None).unwrap_err(), "x.weight_scale", words);
    }
    // MXFP8: a power of two for 32 of a row.
    let (checkpoint, _dir) = one_matrix([1, 32], Raw::new("u8", &[1, 1], vec![127]), &json!([]));
    refuse(checkpoint.tensor("x.weight", None).unwrap_err(), "x.weight_scale", "F32 or BF16 or F16");
}

fn scale_values(shape: &[usize]) -> Vec<f32> {
    (0..shape.iter().product::<usize>()).map(|n| 1.0 + n as f32).collect()
}

/// A matrix of ones beside a block, with these scales; a group for each size of blocks.
fn one_matrix(dims: [usize; 2], scales: Raw, blocks: &Value) -> (Checkpoint, tempfile::TempDir) {
    let mut next = random(24);
    let (mut tensors, _) = experts([32, 32], |dims| mxfp4(&mut next, dims, "u8"));
    tensors.insert("x.weight".into(), Raw::new("f8_e4m3", &dims, vec![0x38; dims[0] * dims[1]]));
    tensors.insert("x.weight_scale".into(), scales);
    let groups = blocks.as_array().unwrap().iter().enumerate();
    let group = |block: &Value| json!({"weights": {"strategy": "block", "block_structure": block}});
    let groups: serde_json::Map<String, Value> = groups.map(|(n, block)| (n.to_string(), group(block))).collect();
    let dir = folder(&qwen_config([32, 32], json!({"config_groups": groups})), &tensors);
    (Checkpoint::open(dir.path()).unwrap(), dir)
}

fn refuse(error: Error, name: &str, words: &str) {
    let Error::Checkpoint(CheckpointError::Tensor { tensor, .. }) = &error else { panic!("{error}") };
    assert!(tensor.ends_with(name) && error.to_string().contains(words), "{error} does not say {name} and {words:?}");
}

/// Sizes of blocks that are none.
#[test]
fn damaged_sizes_of_blocks() {
    let (tensors, _) = experts([32, 32], |dims| fp8(&mut random(25), dims, [128, 128], "f32"));
    for (block, words) in [
        (json!([128]), "expected two integers, found a list of 1"),
        (json!([128, 128, 128]), "expected two integers"),
        (json!([128, 0]), "expected two integers in 1..=65536, found [128, 0]"),
        (json!([128, 1 << 20]), "65536"),
        (json!("128"), "expected two integers, found \"128\""),
        (json!("128x-1"), "expected two integers"),
        (json!("128x99999999"), "65536"),
        (json!(128), "a list of integers"),
    ] {
        let dir = folder(&qwen_config([32, 32], fp8_config(block)), &tensors);
        let error = Checkpoint::open(dir.path()).unwrap_err();
        let Error::Checkpoint(CheckpointError::Config { field, .. }) = &error else { panic!("{error}") };
        assert!(field == "block_structure" && error.to_string().contains(words), "{error} does not say {words:?}");
    }
    let group = |n: usize| (n.to_string(), json!({"weights": {"block_structure": [n + 1, 128]}}));
    let groups: serde_json::Map<String, Value> = (0..9).map(group).collect();
    let dir = folder(&qwen_config([32, 32], json!({"config_groups": groups})), &tensors);
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("at most 8 sizes of blocks"), "{error}");
}

/// Sizes that are no multiple of 128, kept and de-quantized; saved, they are plain.
#[test]
fn mxfp4_per_expert() {
    let sizes = [96, 160];
    for scale in ["u8", "f8_e8m0"] {
        let mut next = random(26);
        let (mut tensors, experts) = experts(sizes, |dims| mxfp4(&mut next, dims, scale));
        let dense = mxfp4(&mut next, [40, 64], scale);
        dense.put("model.layers.0.self_attn.q_proj", &mut tensors);
        let dir = folder(&qwen_config(sizes, mxfp4_config()), &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.block_form(0).unwrap(), Form::Mxfp4CompressedTensors);
        check_dequantized(&checkpoint, sizes, &experts);
        check_kept(&checkpoint, WeightFormat::Mxfp4, &experts);
        let name = "model.layers.0.self_attn.q_proj.weight";
        expect(&checkpoint, name, &[40, 64], |_, r, c| dense.values[r * 64 + c]);
        // Codes and scales are the bytes on disk.
        let kept = checkpoint.load_quantized(0, options(1, 4, None)).unwrap();
        let stored = |end: &str| {
            let of = |name: &str| tensors[&format!("{BLOCK}.experts.1.{name}.{end}")].data.clone();
            [of("gate_proj"), of("up_proj")].concat()
        };
        let view = kept.up.view();
        assert!(view.codes.as_slice::<u8>().unwrap() == stored("weight_packed"));
        assert!(view.scales.as_slice::<u8>().unwrap() == stored("weight_scale"));
        assert!(view.factors.is_none());
        let target = tempfile::tempdir().unwrap();
        let block = checkpoint.load_block(0, options(0, 1, Some(DType::F32))).unwrap().params;
        checkpoint.save(target.path(), &[block.at_layer(0)]).unwrap();
        let saved = Checkpoint::open(target.path()).unwrap();
        assert!(!saved.names().any(|name| name.contains("packed") || name.contains("scale")));
        assert!(saved.config().get("quantization_config").is_none());
        assert_same(&block, &saved.load_block(0, options(0, 1, None)).unwrap().params, "saved");
    }
}

/// What is not MXFP4 says what it should be.
#[test]
fn damaged_mxfp4() {
    let sizes = [96, 160];
    let down = format!("{BLOCK}.experts.3.down_proj");
    let (scale, packed) = (format!("{down}.weight_scale"), format!("{down}.weight_packed"));
    let with = |change: &dyn Fn(&mut Tensors, &mut Value)| {
        let mut next = random(27);
        let (mut tensors, _) = experts(sizes, |dims| mxfp4(&mut next, dims, "u8"));
        let mut config = qwen_config(sizes, mxfp4_config());
        change(&mut tensors, &mut config);
        let dir = folder(&config, &tensors);
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let kept = checkpoint.load_quantized(0, options(1, 2, None)).unwrap_err();
        let error = checkpoint.load_block(0, options(1, 2, None)).unwrap_err();
        assert_eq!(kept.to_string(), error.to_string());
        error
    };
    type Change<'a> = &'a dyn Fn(&mut Tensors);
    let put = |name: &str, raw: Raw| {
        let name = name.to_string();
        move |t: &mut Tensors| drop(t.insert(name.clone(), raw.clone()))
    };
    let cases: [(&str, Change<'_>, &str); 7] = [
        // As many as NVFP4 has.
        ("weight_scale", &put(&scale, Raw::new("u8", &[160, 6], vec![127; 960])), "expected shape [160, 3]"),
        ("weight_scale", &put(&scale, Raw::new("u8", &[3, 160], vec![127; 480])), "expected shape [160, 3]"),
        ("weight_scale", &put(&scale, Raw::f32(&[160, 3], [1.0; 480])), "F8_E4M3 (NVFP4), or U8 or F8_E8M0 (MXFP4)"),
        ("weight_global_scale", &put(&format!("{down}.weight_global_scale"), Raw::f32(&[1], [1.0])), "nothing"),
        ("weight_packed", &put(&packed, Raw::new("f8_e4m3", &[160, 48], vec![0; 7680])), "expected U8"),
        ("weight_packed", &put(&packed, Raw::new("u8", &[160, 40], vec![0; 6400])), "a multiple of 16 bytes"),
        // The exponent that is NaN.
        ("weight_scale", &put(&scale, Raw::new("u8", &[160, 3], vec![0xff; 480])), "finite and not negative"),
    ];
    for (name, change, words) in cases {
        refuse(with(&|tensors, _| change(tensors)), name, words);
    }
    let error = with(&|tensors, _| drop(tensors.remove(&scale)));
    assert!(
        matches!(&error, Error::Checkpoint(CheckpointError::Missing { tensor, .. }) if *tensor == scale),
        "{error}"
    );
    // E4M3 scales are NVFP4's, which has a second level.
    let e4m3 = put(&scale, Raw::new("f8_e4m3", &[160, 6], vec![0x38; 960]));
    let error = with(&|tensors, _| e4m3(tensors));
    assert!(error.to_string().contains("weight_global_scale is missing"), "{error}");
    for (path, value, words) in [
        ("/quantization_config/quant_method", json!("mxfp4"), "expected compressed-tensors"),
        ("/quantization_config/config_groups/group_0/weights/group_size", json!(16), "expected 32"),
    ] {
        let error = with(&|_, config| *config.pointer_mut(path).unwrap() = value.clone());
        assert!(matches!(&error, Error::Checkpoint(CheckpointError::Declaration { .. })), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}
