//! Trained models as their folders are published: what several ranks write, one reads again.

mod support;

use candle_core::{Tensor, Var};
use moebius::candle::Parameters;
use moebius::checkpoint::{Checkpoint, SaveOptions};
use moebius_models::{LoadOptions, Model};

use support::{Golden, on_ranks, relative, tolerance};

/// Every parameter of the rank, experts and others.
fn vars(model: &Model) -> Vec<Var> {
    let experts = (0..model.num_layers()).filter_map(|layer| model.moe(layer)).flat_map(|moe| moe.vars());
    model.vars().iter().map(|(_, var)| var.clone()).chain(experts).collect()
}

fn logits(golden: &Golden, model: &Model) -> Tensor {
    model.forward(golden.ids()).expect("logits")
}

#[test]
fn a_trained_model_is_read_again() {
    let mut count = 0;
    for golden in Golden::all() {
        // Their experts are trained as what they are de-quantized to, in every type but that on disk.
        let is_quantized = golden.checkpoint.block_form(golden.layer()).expect("a form").is_quantized();
        let dir = tempfile::tempdir().expect("a folder");
        let out = dir.path().join("trained");
        let options = LoadOptions { parameters: Parameters::Trainable, ..golden.options() };
        let trained = on_ranks(golden.ranks(2), &golden, |_, group| {
            let model = golden.load(&group, options);
            // A router's weight may be among both.
            let mut changed = std::collections::HashSet::new();
            for var in vars(&model).iter().filter(|var| changed.insert(var.id())) {
                // Exact in every type: a step of training for the purpose of this test.
                var.set(&(var.as_tensor() * 0.5).expect("a half")).expect("a value");
            }
            model.save(&golden.checkpoint, &out, SaveOptions::default()).expect("a saved model");
            logits(&golden, &model)
        });
        let again = on_ranks(1, &golden, |_, group| {
            let checkpoint = Checkpoint::open(&out).expect("a folder as it is published");
            logits(&golden, &Model::load_on(&checkpoint, &group, golden.options()).expect("a model"))
        });
        if is_quantized {
            let config = std::fs::read_to_string(out.join("config.json")).expect("a config");
            assert!(!config.contains("quantization_config"), "{}: written plain", golden.name);
        }
        let (error, change) = (relative(&again[0], &trained[0]), relative(&trained[0], &golden.tensors["logits"]));
        assert!(error <= tolerance(&golden), "{}: read again, logits differ by {error:e}", golden.name);
        assert!(change > 0.1, "{}: half of all weights change logits by {change:e}", golden.name);
        count += 1;
    }
    assert!(count > 0);
}

#[test]
fn what_has_not_been_trained_is_not_saved() {
    let golden = Golden::named("qwen3_moe");
    let dir = tempfile::tempdir().expect("a folder");
    let out = dir.path().join("trained");
    on_ranks(2, &golden, |rank, group| {
        // One rank's mistake, of which the other hears.
        let parameters = if rank == 0 { Parameters::Trainable } else { Parameters::Frozen };
        let model = golden.load(&group, LoadOptions { parameters, ..golden.options() });
        let text = model.save(&golden.checkpoint, &out, SaveOptions::default()).expect_err("refused").to_string();
        assert!(text.contains("trainable"), "{text}");
    });
    assert!(!out.exists());
}
