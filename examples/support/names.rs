//! From a block's parameters (or their gradients) in this crate's layout to the tensors of the published checkpoints.
//! Written from the families' published layouts, not from the crate's own table, so that each checks the other.

use std::path::Path;

use candle_core::{Result, Tensor, bail};

use moebius::MoeConfig;

use super::dense::Params;

/// Families whose fused expert tensors lie as (E, in, out).
const TRANSPOSED: [&str; 5] = ["gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"];

/// The tensor that a checkpoint of `model_type` holds under `name`, from a block's parameters as in [`Params`];
/// `None` where the name is none of a block's.
pub fn on_disk(name: &str, model_type: &str, block: &Params) -> Result<Option<Tensor>> {
    let get = |field: &str| match block.get(field) {
        Some(t) => Ok(t),
        None => bail!("{name}: the block has no {field}"),
    };
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    let last = stem.rsplit('.').next().unwrap_or(stem);
    let has = |part: &str| stem.split('.').any(|p| p == part);
    if last == "e_score_correction_bias" || last == "expert_bias" {
        let bias = get("router.selection_bias")?;
        // Ernie's has a row for each modality.
        return if has("moe_statics") { bias.unsqueeze(0) } else { Ok(bias.clone()) }.map(Some);
    }
    if has("shared_experts") && last == "bias" {
        let (up, down) = (get("shared.up_bias")?, get("shared.down_bias")?);
        let half = up.dim(0)? / 2;
        return match () {
            () if has("gate_proj") => up.narrow(0, 0, half),
            () if has("up_proj") => up.narrow(0, half, half),
            () => Ok(down.clone()),
        }
        .map(Some);
    }
    if has("shared_expert") || has("shared_experts") || has("shared_mlp") {
        return shared(last, get("shared.up")?, get("shared.down")?).map(Some);
    }
    if last == "shared_expert_gate" {
        return get("shared.gate").cloned().map(Some);
    }
    if has("experts") || matches!(last, "input_linear" | "output_linear") {
        let expert = stem.split('.').skip_while(|p| *p != "experts").nth(1).and_then(|p| p.parse::<usize>().ok());
        return match expert {
            Some(e) => one_expert(last, &get("experts.up")?.get(e)?, &get("experts.down")?.get(e)?).map(Some),
            None => fused(last, model_type, &get).map(Some),
        };
    }
    match last {
        "bias" => get("router.bias").cloned().map(Some),
        "gate" | "router" | "layer" | "wg" => get("router.weight").cloned().map(Some),
        _ => Ok(None),
    }
}

fn one_expert(last: &str, up: &Tensor, down: &Tensor) -> Result<Tensor> {
    let inner = down.dim(1)?;
    match last {
        "gate_proj" | "w1" => up.narrow(0, 0, inner),
        // Without a gate the up rows are the only ones.
        "up_proj" | "w3" => up.narrow(0, up.dim(0)? - inner, inner),
        "down_proj" | "w2" => Ok(down.clone()),
        _ => bail!("unknown expert tensor {last}"),
    }
}

fn shared(last: &str, up: &Tensor, down: &Tensor) -> Result<Tensor> {
    match last {
        "input_linear" => Ok(up.clone()),
        "output_linear" => Ok(down.clone()),
        _ => one_expert(last, up, down),
    }
}

fn fused<'a>(last: &str, model_type: &str, get: &dyn Fn(&str) -> Result<&'a Tensor>) -> Result<Tensor> {
    let interleaved = model_type == "gpt_oss";
    let orient = |t: Tensor| if TRANSPOSED.contains(&model_type) { t.transpose(1, 2)?.contiguous() } else { Ok(t) };
    let halves = |t: &Tensor| if interleaved { interleave(t) } else { Ok(t.clone()) };
    let inner = || get("experts.down")?.dim(2);
    match last {
        "gate_up_proj" | "input_linear" => orient(halves(get("experts.up")?)?),
        "gate_up_proj_bias" => halves(get("experts.up_bias")?),
        "down_proj" | "output_linear" => orient(get("experts.down")?.clone()),
        "down_proj_bias" => get("experts.down_bias").cloned(),
        // DBRX: all experts below one another, (E·I, H) each; down is used untransposed.
        "w1" => get("experts.up")?.narrow(1, 0, inner()?)?.contiguous()?.flatten(0, 1),
        "v1" => get("experts.up")?.narrow(1, inner()?, inner()?)?.contiguous()?.flatten(0, 1),
        "w2" => get("experts.down")?.transpose(1, 2)?.contiguous()?.flatten(0, 1),
        _ => bail!("unknown fused expert tensor {last}"),
    }
}

/// Rows g₀ g₁ … u₀ u₁ … of dimension 1 as g₀ u₀ g₁ u₁ …
fn interleave(t: &Tensor) -> Result<Tensor> {
    let dims = t.dims().to_vec();
    let rest: usize = dims[2..].iter().product();
    t.reshape((dims[0], 2, dims[1] / 2, rest))?.transpose(1, 2)?.contiguous()?.reshape(dims)
}

/// True where `name` is a router's weight.
pub fn is_router(name: &str) -> bool {
    let stem = name.strip_suffix(".weight").unwrap_or(name);
    matches!(stem.rsplit('.').next(), Some("gate" | "router" | "layer" | "wg"))
}

/// `model_type` of a checkpoint folder, the text model's where there are several.
pub fn model_type(dir: &Path) -> Result<String> {
    let config = config_json(dir)?;
    let text = config.get("text_config").unwrap_or(&config);
    match text.get("model_type").or_else(|| config.get("model_type")).and_then(|v| v.as_str()) {
        Some(name) => Ok(name.to_string()),
        None => bail!("{}: config.json has no model_type", dir.display()),
    }
}

/// `config.json` of a checkpoint folder.
pub fn config_json(dir: &Path) -> Result<serde_json::Value> {
    let path = dir.join("config.json");
    let text =
        std::fs::read_to_string(&path).map_err(|e| candle_core::Error::msg(format!("{}: {e}", path.display())))?;
    serde_json::from_str(&text).map_err(|e| candle_core::Error::msg(format!("{}: {e}", path.display())))
}

/// Names of a block's parameters one by one, each expert's matrices apart: `experts.3.gate`, `experts.3.up`, …
pub fn pieces(config: &MoeConfig) -> Vec<String> {
    let mut names = vec!["router.weight".to_string()];
    let mut add = |wanted: bool, name: &str| names.extend(wanted.then(|| name.to_string()));
    let gated = config.activation.gate_factor() == 2;
    add(config.router.logit_bias, "router.bias");
    for expert in 0..config.router.num_experts {
        add(gated, &format!("experts.{expert}.gate"));
        add(true, &format!("experts.{expert}.up"));
        add(true, &format!("experts.{expert}.down"));
    }
    add(config.expert_bias, "experts.up_bias");
    add(config.expert_bias, "experts.down_bias");
    add(config.shared.is_some_and(|_| gated), "shared.gate_proj");
    add(config.shared.is_some(), "shared.up_proj");
    add(config.shared.is_some(), "shared.down_proj");
    add(config.shared.is_some_and(|s| s.bias), "shared.up_bias");
    add(config.shared.is_some_and(|s| s.bias), "shared.down_bias");
    add(config.shared.is_some_and(|s| s.gated), "shared.gate");
    names
}

/// The parameter (or gradient) behind a name of [`pieces`].
pub fn piece(name: &str, block: &Params) -> Result<Tensor> {
    let get = |field: &str| match block.get(field) {
        Some(t) => Ok(t),
        None => bail!("{name}: the block has no {field}"),
    };
    let parts: Vec<&str> = name.split('.').collect();
    match parts.as_slice() {
        ["experts", expert, matrix] => {
            let e: usize = expert.parse().map_err(|_| candle_core::Error::msg(format!("{name}: no such expert")))?;
            one_expert(&format!("{matrix}_proj"), &get("experts.up")?.get(e)?, &get("experts.down")?.get(e)?)
        }
        ["shared", matrix] if matrix.ends_with("_proj") => one_expert(matrix, get("shared.up")?, get("shared.down")?),
        _ => get(name).cloned(),
    }
}
