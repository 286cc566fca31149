//! What a program that converses brings: tokenizers, templates, requests, and logits that cannot be sampled.

use std::path::Path;

use candle_core::{Device, Tensor};
use moebius_models::generate::Request;

use crate::case::{Case, EVERYWHERE_OR_ON_ONE};
use crate::chat_folder::tokenizer_json;
use crate::folders::change_tensors;
use crate::jobs::{Link, Outcome, converses};

fn template(dir: &Path, text: &str) {
    std::fs::write(dir.join("chat_template.jinja"), text).expect("a template");
}

fn asks(dir: &Path, link: Link, wrong: bool, ask: impl FnOnce(&mut Request)) -> Outcome {
    converses(dir, link, |prompt| {
        let mut request = Request::new(prompt, 4);
        if wrong {
            ask(&mut request);
        }
        request
    })
}

#[test]
fn texts_that_cannot_be() {
    const END: &str = "{{ messages[0].content }}";
    for case in [
        Case::of_texts(
            "a tokenizer whose ids exceed the embedding",
            |dir| std::fs::write(dir.join("tokenizer.json"), tokenizer_json(true)).expect("a file"),
            "token \"ab\" has id 97; the embedding has 97 rows",
        ),
        Case::of_texts(
            "a tokenizer that is none",
            |dir| std::fs::write(dir.join("tokenizer.json"), "{}").expect("a file"),
            "tokenizer.json",
        ),
        Case::of_texts(
            "no tokenizer",
            |dir| std::fs::remove_file(dir.join("tokenizer.json")).expect("gone"),
            "tokenizer.json",
        ),
        Case::of_texts("a template that does not compile", |dir| template(dir, "{% if"), "chat template"),
        Case::of_texts("a template that fails", |dir| template(dir, "{{ nobody.name }}"), "chat template"),
        Case::of_texts("a template that refuses", |dir| template(dir, "{{ raise_exception('not so') }}"), "not so"),
        Case::of_texts(
            "a template without end",
            |dir| {
                template(dir, "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}")
            },
            "chat template",
        ),
        Case::of_texts(
            "a template of nothing",
            |dir| template(dir, "{% if false %}x{% endif %}"),
            "the prompt has no token",
        ),
        Case::of_texts(
            "a template that fills the context",
            |dir| template(dir, &"x".repeat(256)),
            "the prompt has 256 tokens, the decoder's context 256",
        ),
        Case::of_call(
            "an id past the embedding",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.prompt = vec![3, 97]),
            "id 97 at position 1 of the prompt",
        ),
        Case::of_call(
            "no token of a prompt",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.prompt.clear()),
            "the prompt has no token",
        ),
        Case::of_call(
            "no token to generate",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.max_tokens = 0),
            "max_tokens: expected 1 at least",
        ),
        Case::of_call(
            "a temperature below 0",
            |dir, link, wrong| asks(dir, link, wrong, |request| request.sampling.temperature = -1.0),
            "temperature",
        ),
        Case::of_texts(
            "logits that are no numbers",
            |dir| {
                template(dir, END);
                change_tensors(dir, |t| {
                    let nan = Tensor::full(f32::NAN, (97, 64), &Device::Cpu).expect("a matrix");
                    t.insert("lm_head.weight".into(), nan);
                });
            },
            "logits of a step",
        ),
    ] {
        EVERYWHERE_OR_ON_ONE.iter().for_each(|wrong| case.hold(*wrong));
    }
}
