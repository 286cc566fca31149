//! `config.json` to sizes and formulas.

use std::path::Path;

use serde_json::Value;

use super::config_defaults;
use super::declared::Declared;
use super::family::{self, Act, Family, Formula, LayerRule, Normalize, SharedWidth};
use super::fields::{Fields, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, clip, short};
use super::json::parse_value;
use crate::config::{
    Activation, GroupLimit, GroupScore, MAX_EXPERTS, MoeConfig, Renorm, RouterConfig, Score, SharedConfig, WeightAt,
};
use crate::dtype::DType;
use crate::error::{CheckpointError, CheckpointResult};

/// Description of the blocks in a `config.json`.
#[derive(Debug)]
pub(super) struct Model {
    pub json: Value,
    /// Its text.
    pub text: Vec<u8>,
    pub family: &'static Family,
    /// The `model_type` that named the family.
    pub model_type: String,
    pub layers: usize,
    /// Layers with a block, and the block.
    pub blocks: Vec<(usize, MoeConfig)>,
    pub dtype: Option<DType>,
    /// How the weights are quantized, as it says.
    pub declared: Declared,
}

impl Model {
    /// Parses and checks a configuration.
    pub fn parse(json: &[u8], path: &Path) -> CheckpointResult<Self> {
        let mut root = parse_value(json, path)?;
        config_defaults::fill(&mut root);
        let name = path.display().to_string();
        // Multimodal wrappers keep the text model's keys in an object of their own.
        let text = root.get("text_config").filter(|text| text.is_object()).unwrap_or(&root);
        let outer = Fields::new(&name, &root, None);
        let inner = Fields::new(&name, text, None);
        let types = [inner.word("model_type")?, outer.word("model_type")?];
        if let Some((word, lacking)) = types.into_iter().flatten().find_map(|word| Some((word, family::lacking(word)?)))
        {
            return Err(CheckpointError::UnsupportedFamily { path: name.clone(), found: word.to_string(), lacking });
        }
        let found = types.into_iter().flatten().find_map(|word| Some((word, family::find(word)?)));
        let Some((model_type, family)) = found else {
            return match outer.word("model_type")? {
                Some(word) => {
                    Err(CheckpointError::UnknownFamily { path: name.clone(), found: clip(word), known: known() })
                }
                None => Err(outer.error("model_type", format!("one of {}", known()), "nothing")),
            };
        };
        let nested = matches!(family.formula, Formula::SoftmaxPower).then_some("ffn_config");
        let fields = Fields::new(&name, text, nested);
        let layers = inner.size(&["num_hidden_layers", "n_layers"], MAX_LAYERS)?;
        let mut blocks = Vec::new();
        for layer in moe_layers(family.layers, &fields, layers)? {
            blocks.push((layer, block(family, &fields, layer)?));
        }
        let dtype = dtype(&fields)?.or(dtype(&outer)?);
        let quantized = if inner.get("quantization_config").is_some() { &inner } else { &outer };
        let declared = Declared::of_config(&name, quantized.get("quantization_config"))?;
        let (model_type, text) = (model_type.to_string(), json.to_vec());
        Ok(Self { family, model_type, layers, blocks, dtype, declared, text, json: root })
    }
}

/// All known `model_type`s.
pub(super) fn known() -> String {
    let names: Vec<&str> = family::FAMILIES.iter().flat_map(|family| family.types).copied().collect();
    names.join(", ")
}

fn dtype(fields: &Fields<'_>) -> CheckpointResult<Option<DType>> {
    let word = match fields.word("dtype")? {
        Some(word) => Some(word),
        None => fields.word("torch_dtype")?,
    };
    Ok(word.and_then(|word| match word.trim_start_matches("torch.") {
        "float64" => Some(DType::F64),
        "float32" => Some(DType::F32),
        "float16" => Some(DType::F16),
        "bfloat16" => Some(DType::BF16),
        _ => None,
    }))
}

fn moe_layers(rule: LayerRule, fields: &Fields<'_>, layers: usize) -> CheckpointResult<Vec<usize>> {
    let all = 0..layers;
    // transformers 5 writes the rule's result for some families.
    if let Some(kinds) = fields.words("mlp_layer_types")? {
        if kinds.len() < layers {
            return Err(fields.error("mlp_layer_types", format!("{layers} entries"), kinds.len()));
        }
        return Ok(all.filter(|l| kinds[*l] == "sparse").collect());
    }
    let positive = |key: &'static str, default: usize| match fields.size_or(&[key], MAX_LAYERS)? {
        Some(0) => Err(fields.error(key, format!("an integer in 1..={MAX_LAYERS}"), 0)),
        value => Ok(value.unwrap_or(default)),
    };
    let size = |key, default| fields.size_or(&[key], MAX_LAYERS).map(|value| value.unwrap_or(default));
    Ok(match rule {
        LayerRule::All => all.collect(),
        LayerRule::Step => {
            let step = positive("decoder_sparse_step", 1)?;
            let dense = fields.list("mlp_only_layers", MAX_LAYERS)?.unwrap_or_default();
            let dense: std::collections::HashSet<usize> = dense.into_iter().collect();
            all.filter(|l| (l + 1) % step == 0 && !dense.contains(l)).collect()
        }
        LayerRule::FirstDense => {
            let first = size("first_k_dense_replace", 0)?;
            if fields.get("moe_layer_freq").is_some_and(Value::is_array) {
                let freq = fields.list("moe_layer_freq", MAX_LAYERS)?.unwrap_or_default();
                if freq.len() < layers {
                    return Err(fields.error("moe_layer_freq", format!("{layers} entries"), freq.len()));
                }
                return Ok(all.filter(|l| freq[*l] != 0).collect());
            }
            let freq = positive("moe_layer_freq", 1)?;
            all.filter(|l| *l >= first && l % freq == 0).collect()
        }
        LayerRule::Interleave => match fields.list("moe_layers", MAX_LAYERS)? {
            Some(mut list) => {
                list.sort_unstable();
                list.dedup();
                if list.last().is_some_and(|last| *last >= layers) {
                    return Err(fields.error("moe_layers", format!("layers in 0..{layers}"), format!("{list:?}")));
                }
                list
            }
            None => {
                let step = positive("interleave_moe_layer_step", 1)?;
                all.filter(|l| (l + 1) % step == 0).collect()
            }
        },
        LayerRule::Range => {
            let interval = positive("moe_layer_interval", 1)?;
            let start = size("moe_layer_start_index", 0)?;
            let end = match fields.get("moe_layer_end_index").and_then(Value::as_i64) {
                Some(-1) => layers - 1,
                _ => size("moe_layer_end_index", layers - 1)?,
            };
            all.filter(|l| (l + 1) % interval == 0 && (start..=end).contains(l)).collect()
        }
        LayerRule::Period => {
            let period = positive("expert_layer_period", 1)?;
            let offset = size("expert_layer_offset", 0)?;
            // Jamba's one-expert layers are dense.
            let one = fields.size_or(family::EXPERTS, MAX_EXPERTS)? == Some(1);
            all.filter(|l| !one && l % period == offset).collect()
        }
        LayerRule::NumDense => {
            let dense = size("num_dense_layers", 0)?;
            all.filter(|l| *l >= dense).collect()
        }
        LayerRule::Pattern => pattern(fields, layers)?,
    })
}

/// Nemotron-H: one letter a layer, E for a block, or one word a layer.
fn pattern(fields: &Fields<'_>, layers: usize) -> CheckpointResult<Vec<usize>> {
    let moe: Vec<bool> = match (fields.words("layers_block_type")?, fields.word("hybrid_override_pattern")?) {
        (Some(words), _) => words.iter().map(|word| *word == "moe").collect(),
        (None, Some(letters)) => letters.chars().take(MAX_LAYERS).map(|letter| letter == 'E').collect(),
        (None, None) => {
            return Err(fields.error("layers_block_type / hybrid_override_pattern", "one entry a layer", "nothing"));
        }
    };
    if moe.len() != layers {
        return Err(fields.error("hybrid_override_pattern", format!("{layers} entries"), moe.len()));
    }
    Ok((0..layers).filter(|l| moe[*l]).collect())
}

fn block(family: &Family, fields: &Fields<'_>, layer: usize) -> CheckpointResult<MoeConfig> {
    let hidden = fields.root().size(&["hidden_size", "d_model"], MAX_HIDDEN)?;
    let experts = fields.size(family::EXPERTS, MAX_EXPERTS)?;
    let required = |keys: &[&'static str], value: Option<usize>, max: usize| match value {
        Some(value) if value > 0 => Ok(value),
        _ => fields.size(keys, max),
    };
    let top_k = required(family::TOP_K, fields.layered(family::TOP_K, layer, experts)?, experts)?;
    let width = &[family.width];
    let intermediate = required(width, fields.layered(width, layer, MAX_INTERMEDIATE)?, MAX_INTERMEDIATE)?;
    // Nemotron-H's experts may work in another space than the tokens; nothing here does.
    if let Some(latent) = fields.size_or(&["moe_latent_size"], MAX_HIDDEN)? {
        return Err(fields.error("moe_latent_size", "nothing (experts work on the hidden size)", latent));
    }
    let mut config = MoeConfig::new(hidden, intermediate, experts, top_k);
    config.activation = activation(family.activation, fields)?;
    config.weight_at = WeightAt::Output;
    config.expert_bias = matches!(family.activation, Act::Clamped);
    config.shared = shared(family, fields, layer, intermediate)?;
    router(family, fields, &mut config)?;
    config.validate().map_err(|e| fields.error("(router)", "a routing formula that fits its sizes", e))?;
    Ok(config)
}

/// Names of silu.
const SILU: &[&str] = &["silu", "swish"];

fn activation(act: Act, fields: &Fields<'_>) -> CheckpointResult<Activation> {
    match act {
        Act::Silu(key) => {
            // DBRX nests the name: `ffn_act_fn: {"name": "silu"}`.
            match fields.get(key).filter(|value| value.is_object() && key == "ffn_act_fn") {
                None => fields.only(key, SILU)?,
                Some(value) if value.get("name").and_then(Value::as_str).is_some_and(|name| SILU.contains(&name)) => {}
                Some(value) => {
                    let expected = format!("an object whose name is {}", SILU.join(" or "));
                    return Err(fields.error(key, expected, short(value)));
                }
            }
            Ok(Activation::SiluGlu)
        }
        Act::Clamped => {
            fields.only("hidden_act", SILU)?;
            Ok(Activation::ClampedGlu { alpha: 1.702, limit: fields.number("swiglu_limit", 7.0)? })
        }
        Act::Relu2(key) => {
            fields.only(key, &["relu2"])?;
            Ok(Activation::Relu2)
        }
    }
}

fn shared(family: &Family, fields: &Fields<'_>, layer: usize, routed: usize) -> CheckpointResult<Option<SharedConfig>> {
    let Some(shared) = &family.shared else { return Ok(None) };
    let times = |count: Option<usize>| match count {
        Some(count) => routed.checked_mul(count).filter(|size| *size <= MAX_INTERMEDIATE),
        None => Some(0),
    };
    let (key, intermediate) = match shared.width {
        SharedWidth::Key(key) => match fields.size_or(&[key], MAX_INTERMEDIATE)? {
            Some(size) => (key, Some(size)),
            None => return Err(fields.error(key, format!("an integer in 0..={MAX_INTERMEDIATE}"), "nothing")),
        },
        SharedWidth::Optional(key) => (key, Some(fields.size_or(&[key], MAX_INTERMEDIATE)?.unwrap_or(0))),
        SharedWidth::Count(key) => (key, times(fields.size_or(&[key], MAX_INTERMEDIATE)?)),
        SharedWidth::Routed(None) => ("", Some(routed)),
        SharedWidth::Routed(Some(key)) => {
            (key, times(Some(fields.layered(&[key], layer, MAX_INTERMEDIATE)?.unwrap_or(1))))
        }
    };
    let bound = format!("a count whose product with the inner size {routed} is at most {MAX_INTERMEDIATE}");
    let intermediate = intermediate.ok_or_else(|| fields.error(key, bound, "more"))?;
    let bias = shared.bias.map_or(Ok(false), |key| fields.flag(key, false))?;
    Ok((intermediate > 0).then_some(SharedConfig { intermediate, gated: shared.gate.is_some(), bias }))
}

fn router(family: &Family, fields: &Fields<'_>, config: &mut MoeConfig) -> CheckpointResult<()> {
    let router = &mut config.router;
    let sum = |epsilon, floor| Some(Renorm { p: 1.0, epsilon, floor });
    router.renorm = None;
    router.selection_bias = match family.selection_bias.first().map(|bias| bias.key) {
        None => false,
        Some(None) => true,
        Some(Some(key)) => fields.flag(key, true)?,
    };
    match family.formula {
        Formula::Softmax(normalize) => {
            router.renorm = normalized(normalize, fields)?.then(|| sum(0.0, 0.0)).flatten();
        }
        Formula::SoftmaxPower => {
            // Absent means the default of 1, null means none.
            let key = "moe_normalize_expert_weights";
            if !fields.raw(key).is_some_and(Value::is_null) {
                router.renorm = Some(Renorm { p: fields.number(key, 1.0)?, epsilon: 0.0, floor: 0.0 });
            }
        }
        Formula::SoftmaxGrouped => {
            fields.only("scoring_func", &["softmax"])?;
            fields.only("topk_method", &["greedy", "group_limited_greedy"])?;
            // `norm_topk_prob` is ignored, as transformers does; it is false in the published models.
            router.scale = fields.number("routed_scaling_factor", 1.0)?;
            if fields.word("topk_method")? == Some("group_limited_greedy") {
                router.groups = groups(fields, GroupScore::Max, router)?;
            }
        }
        Formula::SoftmaxBiased => router.renorm = sum(0.0, fields.number("moe_norm_min", 1e-12)?),
        Formula::TopkSoftmax { logit_bias } => {
            router.score = Score::TopkSoftmax;
            router.logit_bias = logit_bias;
        }
        Formula::TopkSigmoid => {
            router.score = Score::TopkSigmoid;
            config.weight_at = WeightAt::Input;
        }
        Formula::Sigmoid { normalize, epsilon, scale } => {
            fields.only("scoring_func", &["sigmoid"])?;
            fields.only("moe_router_activation_func", &["sigmoid"])?;
            fields.only("topk_method", &["noaux_tc"])?;
            router.score = Score::Sigmoid;
            router.renorm = normalized(normalize, fields)?.then(|| sum(epsilon, 0.0)).flatten();
            if let Some(key) = scale {
                router.scale = fields.number(key, 1.0)?;
                router.groups = groups(fields, GroupScore::Top2Sum, router)?;
            }
        }
        Formula::SparseMixer => {
            router.score = Score::SparseMixer { epsilon: fields.number("router_jitter_noise", 0.01)? };
        }
    }
    Ok(())
}

fn normalized(normalize: Normalize, fields: &Fields<'_>) -> CheckpointResult<bool> {
    match normalize {
        Normalize::Always => Ok(true),
        Normalize::Never => Ok(false),
        Normalize::Key(key, default) => fields.flag(key, default),
    }
}

fn groups(fields: &Fields<'_>, rank_by: GroupScore, router: &RouterConfig) -> CheckpointResult<Option<GroupLimit>> {
    let count = fields.size_or(&["n_group", "num_expert_group"], MAX_EXPERTS)?.unwrap_or(1);
    if count <= 1 {
        return Ok(None);
    }
    let keep = fields.size(&["topk_group"], count)?;
    // The sum of a group's two best needs two.
    if rank_by == GroupScore::Top2Sum && router.num_experts / count < 2 {
        return Err(fields.error("n_group", format!("at most {} groups", router.num_experts / 2), count));
    }
    Ok(Some(GroupLimit { groups: count, keep, rank_by }))
}
