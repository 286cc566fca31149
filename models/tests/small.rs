//! The small model that ships with the repository, and the program that runs it where no folder is given.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use moebius_models::generate::Tokenizer;
use moebius_models::{LoadOptions, Model};

#[path = "support/program.rs"]
mod program;

use program::{run, run_example, text};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("small")
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| !word.is_empty())
}

#[test]
fn a_folder_of_four_megabytes_at_most() {
    let files = std::fs::read_dir(folder()).expect("the folder").map(|entry| entry.expect("an entry"));
    let bytes: u64 = files.map(|file| file.metadata().expect("its size").len()).sum();
    assert!(bytes <= 4_000_000, "{bytes} bytes");
}

/// No argument, no download: text, each time the same, in words of the documents that the model has read.
#[test]
fn the_program_without_arguments_writes_words_of_the_documents() {
    let first = text(&run(&[]));
    assert_eq!(text(&run(&[])), first, "the seed is 0 where none is given");
    assert_ne!(text(&run(&["--seed", "1"])), first, "the folder's own settings sample");
    // Those of the texts that it was trained on: today's documents are others.
    let read = std::fs::read_to_string(folder().join("words.txt")).expect("the words that it has read");
    let known: HashSet<&str> = read.lines().collect();
    let (unknown, all): (Vec<&str>, Vec<&str>) =
        (words(&first).filter(|word| !known.contains(*word)).collect(), words(&first).collect());
    assert!(all.len() >= 40, "{} words: {first}", all.len());
    // Tokens are parts of words; a model that has not learned to spell makes up every second one.
    assert!(unknown.len() * 20 <= all.len(), "made up: {unknown:?} in {first}");
}

/// Greedy text knows no seed. Ranks that share the experts add the same numbers in the same order.
#[test]
fn greedy_text_is_the_same_at_any_number_of_ranks() {
    let greedy = |more: &[&str]| {
        let prompt = ["--prompt", "The experts of a rank", "--temperature", "0", "--max-tokens", "48", "--ignore-eos"];
        text(&run(&[&prompt[..], more].concat()))
    };
    let one = greedy(&["--seed", "3"]);
    assert!(words(&one).count() >= 10, "{one}");
    assert_eq!(greedy(&["--seed", "4"]), one);
    for ranks in ["2", "4", "8"] {
        assert_eq!(greedy(&["--ranks", ranks]), one, "{ranks} ranks");
    }
}

/// A folder that holds something is refused before anything is read or written; with `--force` the next argument is
/// looked at, which is a text that there is not.
#[test]
fn training_replaces_no_folder_unasked() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("tokenizer.json");
    std::fs::write(&file, "mine").expect("a file");
    let out = dir.path().to_str().expect("a path");
    for (force, status, problem) in [
        (None, 2, "holds files; expected a folder that is new or empty, or --force"),
        (Some("--force"), 1, "no-such-text.md: "),
    ] {
        let mut arguments = vec!["--out", out, "no-such-text.md"];
        arguments.extend(force);
        let output = run_example("train_small", &arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{error}");
        assert!(error.starts_with("error: ") && error.contains(problem), "{error}");
        assert_eq!(std::fs::read_to_string(&file).expect("the file"), "mine");
    }
}

/// Mean loss of a text, in nats a token.
fn loss(model: &Model, tokenizer: &Tokenizer, text: &str) -> f64 {
    let ids = tokenizer.encode(text).expect("ids");
    let ids = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).expect("a tensor");
    let loss = model.loss(&ids).expect("a loss").mean().and_then(|loss| loss.to_dtype(DType::F64)?.to_scalar());
    loss.expect("a number")
}

/// Sentences of the documents' kind that stand in none of them. A model that knows nothing loses ln V a token.
#[test]
fn sentences_that_it_has_not_read_cost_much_less_than_chance() {
    let options = LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() };
    let model = Model::load(folder(), &Device::Cpu, options).expect("the model");
    let tokenizer = Tokenizer::from_folder(folder()).expect("its tokenizer");
    let text = "A rank that holds no tokens still takes part in every collective, so that the other ranks do not wait \
                for it until the timeout. The experts of a layer are divided over the ranks, and the gradients of \
                their weights are sums over the tokens of all of them.";
    let read = loss(&model, &tokenizer, text);
    let chance = (model.vocabulary() as f64).ln();
    assert!(read < 0.7 * chance, "{read} nats a token, by chance {chance}");
    // And it is the order of the words that it knows.
    let reversed: Vec<&str> = text.split(' ').rev().collect();
    let reversed = loss(&model, &tokenizer, &reversed.join(" "));
    assert!(read + 0.5 < reversed, "{read} nats a token, {reversed} the other way around");
}
