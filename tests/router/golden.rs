//! Against what Hugging Face transformers computed (`tests/golden`).

use safetensors::{Dtype, SafeTensors};

use super::devices::cases;
use super::*;

cases!(mixtral, qwen2_moe, qwen3_moe, olmoe, granitemoe, gpt_oss, deepseek_v2, deepseek_v3, llama4, phimoe,);

struct File(Vec<u8>);

impl File {
    fn open(folder: &str, name: &str) -> Self {
        let path = super::devices::golden_of(folder).join(name);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }
    fn floats(&self, name: &str) -> Option<Vec<f64>> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), Dtype::F32, "{name}");
        Some(tensor.data().as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect())
    }
    fn get(&self, name: &str) -> Vec<f64> {
        self.floats(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }
    fn ids(&self) -> Vec<i64> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor("topk_ids").unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64);
        tensor.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()
    }
}

/// Weights: a few f32 operations on each side, 2e-6 relative. Backward: 1e-5 relative.
const FORWARD: f64 = 2e-6;
const BACKWARD: f64 = 1e-5;

/// Puts the golden's `[T, K]` values in the order of `ids`.
fn in_order_of(ids: &[i32], golden_ids: &[i64], values: &[f64], k: usize) -> Vec<f64> {
    let place = |i: usize| {
        let row = &golden_ids[i / k * k..][..k];
        i / k * k + row.iter().position(|&g| g == i64::from(ids[i])).unwrap_or_else(|| panic!("ids differ at {i}"))
    };
    (0..ids.len()).map(|i| values[place(i)]).collect()
}

fn check<D: Target>(d: &On<D>, folder: &str, c: &RouterConfig, bias: Option<&str>, has_aux: bool) {
    let golden = File::open(folder, "golden.safetensors");
    let k = c.top_k;
    let (logits, golden_ids) = (golden.get("router_logits"), golden.ids());
    let bias = bias.map(|name| File::open(folder, "model.safetensors").get(name));
    let (ids, weights) = d.route(c, &logits, bias.as_deref(), None).unwrap();

    let want = in_order_of(&ids, &golden_ids, &golden.get("topk_weights"), k);
    let error = relative(&weights, &want);
    assert!(error <= FORWARD, "{folder}: weights off by {error:e}");

    let want = golden.get("grad_router_logits");
    let d_weights = match golden.floats("grad_topk_weights") {
        Some(d) => in_order_of(&ids, &golden_ids, &d, k),
        // Llama-4's golden has none (its experts take dense scores): from the gradient of the chosen logits, so that
        // what is left to compare is that no other logit has a gradient.
        None => (ids.iter().zip(&weights).enumerate())
            .map(|(i, (&id, w))| want[i / k * c.num_experts + id as usize] / (w * (1.0 - w)))
            .collect(),
    };
    let d_logits = d.route_bwd(c, &logits, &ids, &d_weights, None, None).unwrap();
    let error = relative(&d_logits, &want);
    assert!(error <= BACKWARD, "{folder}: d_logits off by {error:e}");

    assert_eq!(golden.floats("aux_loss").is_some(), has_aux, "{folder}: aux_loss");
    if has_aux {
        let aux = balance(BalanceKind::HuggingFace, 1.0, 0.0);
        let sums = d.aux_sums(c, &aux, &logits, &ids).unwrap();
        let s = &sums;
        let e = c.num_experts;
        let loss = e as f64 * (0..e).map(|i| s[i] * s[e + i]).sum::<f64>() / (s[2 * e] * s[2 * e]);
        close(&format!("{folder}: aux_loss"), &[loss], &golden.get("aux_loss"), FORWARD * loss);

        let zeros = vec![0.0; ids.len()];
        let d_logits = d.route_bwd(c, &logits, &ids, &zeros, None, Some((&aux, &sums, 1.0))).unwrap();
        let error = relative(&d_logits, &golden.get("aux_grad_router_logits"));
        assert!(error <= BACKWARD, "{folder}: gradient of aux_loss off by {error:e}");
    }
}

fn renormed(mut c: RouterConfig, epsilon: f64) -> RouterConfig {
    c.renorm = renorm(epsilon);
    c
}

fn mixtral<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "mixtral", &renormed(router(8, 2, Score::Softmax), 0.0), None, true);
}

fn qwen2_moe<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "qwen2_moe", &router(8, 4, Score::Softmax), None, true);
}

fn qwen3_moe<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "qwen3_moe", &renormed(router(8, 3, Score::Softmax), 0.0), None, true);
}

fn olmoe<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "olmoe", &router(8, 4, Score::Softmax), None, true);
}

fn granitemoe<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "granitemoe", &router(8, 3, Score::TopkSoftmax), None, true);
}

fn gpt_oss<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "gpt_oss", &router(8, 4, Score::TopkSoftmax), None, true);
}

fn deepseek_v2<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "deepseek_v2", &router(8, 3, Score::Softmax), None, false);
}

fn deepseek_v3<D: Target>(device: &D) {
    let d = On::f32(device);
    let mut c = renormed(router(16, 4, Score::Sigmoid), 1e-20);
    (c.selection_bias, c.scale) = (true, 2.5);
    c.groups = groups(4, 2, GroupScore::Top2Sum);
    check(&d, "deepseek_v3", &c, Some("model.layers.1.mlp.gate.e_score_correction_bias"), false);
}

fn llama4<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "llama4_top2", &router(8, 2, Score::TopkSigmoid), None, false);
}

fn phimoe<D: Target>(device: &D) {
    let d = On::f32(device);
    check(&d, "phimoe", &router(8, 2, Score::SparseMixer { epsilon: 0.1 }), None, true);
}
