//! Families without a shipped folder: small synthetic ones whose every element says where it belongs.

mod cases;
mod tensors;

use moebius::checkpoint::Checkpoint;
use moebius::config::{Activation, GroupLimit, GroupScore, MoeConfig, Renorm, Score, SharedConfig, WeightAt};
use serde_json::{Value, json};

use crate::support::*;
use cases::{sigmoid_cases, softmax_cases, topk_cases};
use tensors::*;

/// Every element of every parameter is the one that its name on disk says.
#[test]
fn names_map_to_positions() {
    let cases: Vec<Case> = softmax_cases().into_iter().chain(sigmoid_cases()).chain(topk_cases()).collect();
    assert_eq!(cases.len(), 25);
    for case in &cases {
        let tensors = tensors(case);
        let dir = folder(&case.config, &tensors);
        let what = case.config.to_string();
        let checkpoint = Checkpoint::open(dir.path()).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(checkpoint.moe_layers(), case.layers, "{what}");
        assert_eq!(checkpoint.num_layers(), 3);
        for &layer in case.layers {
            let block = checkpoint.load_block(layer, options(1, 2, None)).unwrap_or_else(|e| panic!("{what}: {e}"));
            (case.check)(&block.config);
            assert_eq!(block.config.weight_at == WeightAt::Input, block.config.router.score == Score::TopkSigmoid);
            let p = &block.params;
            let gates = block.config.activation.gate_factor();
            let up = |e| match gates {
                2 => [matrix(GATE, e, I, H), matrix(UP, e, I, H)].concat(),
                _ => matrix(UP, e, I, H),
            };
            // Rank 1 of 2 has experts 2 and 3.
            assert_eq!(p.up.dims(), [2, gates * I, H], "{what}");
            assert_eq!(p.up.as_slice::<f32>().unwrap(), [up(2), up(3)].concat(), "{what}: up");
            let down = [matrix(DOWN, 2, H, I), matrix(DOWN, 3, H, I)].concat();
            assert_eq!(p.down.as_slice::<f32>().unwrap(), down, "{what}: down");
            assert_eq!(p.router.as_slice::<f32>().unwrap(), matrix(ROUTER, 0, E, H), "{what}: router");
            let bias =
                p.others.selection_bias.as_ref().map(|t| (t.dims().to_vec(), t.as_slice::<f32>().unwrap().to_vec()));
            assert_eq!(bias, case.bias.map(|_| (vec![E], matrix(BIAS, 0, E, 1))), "{what}: bias");
            let shared = p.others.shared_up.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec());
            let expected = case.shared.map(|(_, s)| match gates {
                2 => [matrix(SHARED_GATE, 0, s, H), matrix(SHARED_UP, 0, s, H)].concat(),
                _ => matrix(SHARED_UP, 0, s, H),
            });
            assert_eq!(shared, expected, "{what}: shared up");
            let shared = p.others.shared_down.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec());
            assert_eq!(shared, case.shared.map(|(_, s)| matrix(SHARED_DOWN, 0, H, s)), "{what}: shared down");
            let [gate, up, down] = SHARED_BIASES;
            let biases = [&p.others.shared_up_bias, &p.others.shared_down_bias]
                .map(|t| t.as_ref().map(|t| t.as_slice::<f32>().unwrap().to_vec()));
            let expected = case
                .shared
                .filter(|_| case.biased())
                .map(|(_, s)| [[matrix(gate, 0, s, 1), matrix(up, 0, s, 1)].concat(), matrix(down, 0, H, 1)]);
            assert_eq!(biases, expected.map_or([None, None], |biases| biases.map(Some)), "{what}: shared biases");
            assert_eq!(p.others.shared_gate.is_some(), block.config.shared.is_some_and(|s| s.gated), "{what}");
            if let Some(gate) = &p.others.shared_gate {
                assert_eq!(gate.as_slice::<f32>().unwrap(), matrix(SHARED_SCALE, 0, 1, H), "{what}: shared gate");
            }
            // And back.
            let whole = checkpoint.load_block(layer, options(0, 1, None)).unwrap().params;
            let back = checkpoint.disk_tensors(layer, &whole, 0, 1).unwrap();
            let prefix = checkpoint.layer_prefix(layer);
            assert!(back.iter().map(|(name, _)| name).eq(tensors.keys().filter(|n| n.starts_with(&prefix))), "{what}");
            assert!(back.iter().all(|(name, tensor)| tensor.as_bytes() == tensors[name].data), "{what}");
        }
    }
}

/// The golden suite's own reading of names gives what lies on disk, in every family: it could not compare otherwise.
#[test]
fn golden_suite_knows_the_names() {
    use crate::reference::{compare, dense::Params, names};
    for case in softmax_cases().into_iter().chain(sigmoid_cases()).chain(topk_cases()) {
        let tensors = tensors(&case);
        let dir = folder(&case.config, &tensors);
        let model_type = names::model_type(dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let layer = case.layers[0];
        let block = checkpoint.load_block(layer, options(0, 1, None)).unwrap();
        let framework = |t: &moebius::Tensor<moebius::cpu::Cpu>| {
            candle_core::Tensor::from_vec(t.to_f64(), t.dims(), &candle_core::Device::Cpu).unwrap()
        };
        let params: Params =
            block.params.into_params().map(|(kind, t)| (kind.name().to_string(), framework(&t))).collect();
        let prefix = format!("{}{layer}.", case.root);
        for (name, raw) in tensors.iter().filter(|(name, _)| name.starts_with(&prefix)) {
            let found =
                names::on_disk(name, &model_type, &params).unwrap_or_else(|e| panic!("{model_type}: {name}: {e}"));
            let found = found.unwrap_or_else(|| panic!("{model_type}: {name} is not known"));
            assert_eq!(found.dims(), raw.shape, "{model_type}: {name}");
            let expected: Vec<f64> = raw.values().into_iter().map(f64::from).collect();
            assert_eq!(compare::values(&found).unwrap(), expected, "{model_type}: {name}");
        }
    }
}

/// The known list names every family that is documented and no other, and each of them opens.
#[test]
fn known_families() {
    let known: Vec<&str> = Checkpoint::families().collect();
    let guide = include_str!("../../../docs/checkpoints.md");
    let table = guide.split("| family (`model_type`)").nth(1).unwrap().split("\n\n").next().unwrap();
    let rows = table.lines().skip(2).map(|row| row.split('|').nth(1).unwrap());
    let mut documented: Vec<&str> = rows.flat_map(|row| row.split(',')).map(str::trim).collect();
    documented.sort_unstable();
    // Text models of wrappers have the wrappers' names.
    let mut named: Vec<&str> = known.iter().copied().filter(|family| !family.ends_with("_text")).collect();
    named.sort_unstable();
    assert_eq!(documented, named, "the table of docs/checkpoints.md");
    for family in [
        "mixtral",
        "minimax_m2",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "olmoe",
        "granitemoe",
        "gpt_oss",
        "llama4",
        "ernie4_5_moe",
        "hunyuan_v1_moe",
        "dbrx",
        "jamba",
    ] {
        assert!(known.contains(&family), "{family}");
    }
    let mut unique = known.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), known.len(), "a model_type names one family");
}

/// gpt-oss, whose gate and up rows alternate: the layer has them one after the other, biases too.
#[test]
fn gpt_oss_rows_are_separated() {
    let tensors = raw(&fixture("gpt_oss").join("model.safetensors"));
    let checkpoint = Checkpoint::open(fixture("gpt_oss")).unwrap();
    let block = checkpoint.load_block(1, options(1, 2, None)).unwrap();
    let (h, i) = (block.config.hidden, block.config.intermediate);
    assert!(block.config.expert_bias && block.config.router.logit_bias);
    let disk = |name: &str| tensors[&format!("model.layers.1.mlp.{name}")].values();
    let (up, down) = (disk("experts.gate_up_proj"), disk("experts.down_proj"));
    let (up_bias, down_bias) = (disk("experts.gate_up_proj_bias"), disk("experts.down_proj_bias"));
    let local = block.config.router.num_experts / 2;
    let p = &block.params;
    for (n, found) in p.up.as_slice::<f32>().unwrap().iter().enumerate() {
        let (e, row, column) = (local + n / (2 * i * h), n / h % (2 * i), n % h);
        // Gate rows are the even ones on disk, up rows the odd ones; disk is (in, out).
        let out = if row < i { 2 * row } else { 2 * (row - i) + 1 };
        assert_eq!(*found, up[(e * h + column) * 2 * i + out], "up[{n}]");
        assert_eq!(p.others.up_bias.as_ref().unwrap().as_slice::<f32>().unwrap()[n / h], up_bias[e * 2 * i + out]);
    }
    for (n, found) in p.down.as_slice::<f32>().unwrap().iter().enumerate() {
        let (e, row, column) = (local + n / (h * i), n / i % h, n % i);
        assert_eq!(*found, down[(e * i + column) * h + row], "down[{n}]");
    }
    assert_eq!(p.others.down_bias.as_ref().unwrap().as_slice::<f32>().unwrap(), &down_bias[local * h..]);
    assert_eq!(p.others.router_bias.as_ref().unwrap().as_slice::<f32>().unwrap(), disk("router.bias"));
}
