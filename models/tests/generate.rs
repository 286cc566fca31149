//! Generation with the decoder of the golden folder, as a library and as the program of `examples/generate`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread;
use std::time::Duration;

use candle_core::{Device, IndexOp, Tensor};
use moebius::candle::EpGroup;
use moebius::checkpoint::Checkpoint;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius_models::generate::{Event, Generator, OverRanks, Request};
use moebius_models::{LoadOptions, Model};

#[path = "support/program.rs"]
mod program;

use program::text;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3_moe")
}

fn load(group: EpGroup) -> Model {
    let checkpoint = Checkpoint::open(golden()).expect("a checkpoint");
    Model::load_on(&checkpoint, group, LoadOptions::default()).expect("a model")
}

/// Prompts of several lengths within the vocabulary of 97.
fn requests() -> Vec<Request> {
    [3usize, 9, 1, 5, 9]
        .into_iter()
        .enumerate()
        .map(|(i, len)| Request::new((0..len as u32).map(|at| (at * 13 + 7 * i as u32) % 97).collect(), 4 + 3 * i))
        .collect()
}

/// Greedy continuation by whole forwards, without a cache. A step's best logit is ahead of the second by more than two
/// ways to sum the same numbers can differ: logits are of size 1, and agree to a few 1e-6 (`tests/golden.rs`).
fn expected(model: &Model, request: &Request) -> Vec<u32> {
    let mut ids = request.prompt.clone();
    for _ in 0..request.max_tokens {
        let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).expect("ids");
        let logits = model.forward(&input).expect("logits").i((0, ids.len() - 1)).expect("the last row");
        let logits = logits.to_vec1::<f32>().expect("values");
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        assert!(logits[order[0]] - logits[order[1]] > 5e-5, "a tie, which any rounding decides: choose other prompts");
        ids.push(order[0] as u32);
    }
    ids.split_off(request.prompt.len())
}

fn go(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Requests are dealt to the ranks in turn, so that of four ranks some end long before others.
#[test]
fn tokens_equal_whole_forwards_at_any_number_of_ranks() {
    let requests = requests();
    let alone = load(EpGroup::single(GroupConfig::new(8, 64)).expect("a group"));
    let expected: Vec<_> = requests.iter().map(|request| expected(&alone, request)).collect();
    for (ranks, spread) in [(1, 0), (1, 32), (2, 32), (4, 0)] {
        let worlds = || ThreadWorld::create(ranks, Duration::from_secs(60));
        let outputs: Vec<Vec<Vec<u32>>> = thread::scope(|scope| {
            let threads: Vec<_> = worlds()
                .into_iter()
                .zip(worlds())
                .enumerate()
                .map(|(rank, (experts, steps))| {
                    let requests = &requests;
                    scope.spawn(move || {
                        let config = GroupConfig::new(8, 64);
                        let group = Group::new(Cpu::new(), Box::new(experts), config).expect("a group");
                        let decoder = OverRanks::new(load(EpGroup::new(group)), Box::new(steps));
                        let generator = Generator::new(decoder, None).expect("a generator").spread(spread);
                        let own: Vec<Request> = requests.iter().skip(rank).step_by(ranks).cloned().collect();
                        let (outputs, _) = generator.run(&own, go).expect("outputs");
                        outputs.into_iter().map(|output| output.tokens).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect()
        });
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(&outputs[i % ranks][i / ranks], expected, "request {i} over {ranks} ranks, spread {spread}");
        }
    }
}

#[test]
fn a_context_that_is_full_ends_a_text() {
    let model = load(EpGroup::single(GroupConfig::new(8, 256)).expect("a group"));
    let generator = Generator::new(&model, None).expect("a generator");
    let (outputs, _) = generator.run(&[Request::new(vec![1; 250], 100)], go).expect("outputs");
    assert_eq!(outputs[0].tokens.len(), 7, "256 positions, and one token that takes none");
    let message = generator.run(&[Request::new(vec![1; 256], 1)], go).expect_err("refused").to_string();
    assert!(message.contains("256 tokens, the decoder's context 256"), "{message}");
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    program::run(&[&[folder.to_str().expect("a path")], arguments].concat())
}

fn error(status: i32, output: &Output) -> String {
    assert_eq!(output.status.code(), Some(status), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert!(text.starts_with("error: ") && text.lines().count() == 1, "{text}");
    text
}

/// A tokenizer of the 97 ids that the folder's embedding has: 95 printable characters and the line end, in the letters
/// that byte-level tokenizers write them with, and a special token. With `more`, one too many.
fn tokenizer(more: bool) -> String {
    let letter = |b: u8| if b == b' ' { 'Ġ' } else { char::from(b) };
    let vocab: serde_json::Map<_, _> = (b' '..=b'~').map(|b| (letter(b).to_string(), (b - b' ').into())).collect();
    let mut vocab = serde_json::Value::Object(vocab);
    vocab["Ċ"] = 95.into();
    if more {
        vocab["ab"] = 97.into();
    }
    let level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    serde_json::json!({
        "version": "1.0", "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": if more { vec![["a", "b"]] } else { vec![] }},
        "added_tokens": [{"id": 96, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
    })
    .to_string()
}

/// The golden folder with a tokenizer and a chat template.
fn folder(tokenizer: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden().join(name), dir.path().join(name)).expect("a copy");
    }
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).expect("a file");
    let config = r#"{"chat_template": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).expect("a file");
    dir
}

fn ids(text: &str) -> String {
    let id = |b: u8| if b == b'\n' { 95 } else { u32::from(b - b' ') };
    text.bytes().map(|b| id(b).to_string()).collect::<Vec<_>>().join(",")
}

/// Text of ids as the program prints them.
fn said(ids: &str) -> String {
    let letter = |id: &str| match id.parse::<u8>().expect("an id") {
        95 => "\n".into(),
        96 => String::new(),
        id => char::from(id + b' ').to_string(),
    };
    ids.split_whitespace().map(letter).collect()
}

#[test]
fn the_program_prints_ids_without_a_tokenizer() {
    let output = run(&golden(), &["--prompt-ids", "5,17,3", "--max-tokens", "8", "--ignore-eos"]);
    let model = load(EpGroup::single(GroupConfig::new(8, 64)).expect("a group"));
    let expected: Vec<_> = expected(&model, &Request::new(vec![5, 17, 3], 8)).iter().map(u32::to_string).collect();
    assert_eq!(text(&output).split_whitespace().collect::<Vec<_>>(), expected);
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    for words in ["prompt 0: 8 tokens, ended by max tokens", "prefill: 3 tokens, ", "decode: 7 tokens, ", " tokens/s"] {
        assert!(report.contains(words), "{words}: {report}");
    }
    assert!(!report.contains("layer 0"), "nobody asked: {report}");
    if cfg!(target_os = "linux") {
        assert!(report.contains("memory: ") && report.contains(" MiB of this process at most"), "{report}");
    }
}

#[test]
fn the_program_samples_the_same_at_any_number_of_ranks() {
    let prompts =
        ["--prompt-ids", "5,17,3", "--prompt-ids", "8", "--prompt-ids", "1,2,3,4,5,6,7", "--max-tokens", "12"];
    let sampled = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "11", "--ignore-eos"];
    let run = |more: &[&str]| text(&run(&golden(), &[&prompts[..], more].concat()));
    let one = run(&sampled);
    assert_eq!(one.lines().count(), 6, "{one}");
    for ranks in ["2", "4"] {
        assert_eq!(run(&[&sampled[..], &["--ranks", ranks]].concat()), one, "{ranks} ranks");
    }
    assert_ne!(run(&[&sampled[..], &["--repetition-penalty", "1.5"]].concat()), one);
    // A prompt alone gives what it gives among others.
    let alone = ["--prompt-ids", "8", "--max-tokens", "12"];
    let alone = text(&self::run(&golden(), &[&alone[..], &sampled].concat()));
    assert_eq!(one.lines().nth(3), Some(alone.trim()), "{one}");
}

#[test]
fn the_program_takes_either_kind_of_cache() {
    let prompts = ["--prompt-ids", "5,17,3", "--prompt-ids", "8", "--max-tokens", "12", "--ignore-eos"];
    let run = |more: &[&str]| text(&run(&golden(), &[&prompts[..], more].concat()));
    for sampling in [&["--temperature", "0"][..], &["--temperature", "0.9", "--seed", "3"]] {
        let [default, fixed, growing] =
            [&[][..], &["--cache", "static"], &["--cache", "growing"]].map(|cache| run(&[sampling, cache].concat()));
        assert_eq!(default, fixed);
        assert_eq!(fixed, growing);
    }
}

/// A launcher's variables as rank `rank` of `world`.
fn launched<'a>(rank: &'a str, world: &'a str) -> Vec<(&'a str, &'a str)> {
    const TOKEN: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    let address = ("MOEBIUS_ADDRESS", "127.0.0.1:9");
    vec![
        ("MOEBIUS_RANK", rank),
        ("MOEBIUS_WORLD", world),
        ("MOEBIUS_LOCAL_RANK", rank),
        address,
        ("MOEBIUS_TOKEN", TOKEN),
    ]
}

/// This suite's program has no NCCL: every rank ends at once, and says which it is.
#[test]
fn a_launched_process_that_cannot_reach_the_others_names_its_rank() {
    let golden = golden();
    let run = |rank: &str, world: &str, more: &[&str]| {
        let arguments =
            [&[golden.to_str().expect("a path"), "--prompt-ids", "5,17,3", "--max-tokens", "2"], more].concat();
        program::run_with(&launched(rank, world), &arguments)
    };
    for rank in ["0", "1"] {
        let message = error(1, &run(rank, "2", &[]));
        assert!(message.starts_with(&format!("error: rank {rank} of 2: ")), "{message}");
        assert!(message.contains("build with --features nccl"), "{message}");
    }
    for (world, more, words) in [
        ("2", &["--ranks", "4"][..], "rank 1 of 2: --ranks: the launcher has started 2"),
        ("2", &["--device", "cpu"], "rank 1 of 2: --device cpu: ranks that are processes have a GPU each"),
        ("3", &[], "rank 1 of 3: --ranks: expected a divisor of 8 experts, found 3"),
    ] {
        let message = error(2, &run("1", world, more));
        assert!(message.contains(words), "{message}");
    }
    // One process alone is like any other, and so is one with a part of a launcher's variables.
    let alone = text(&run("0", "1", &[]));
    assert_eq!(alone.split_whitespace().count(), 2, "{alone}");
    let part = [golden.to_str().expect("a path"), "--prompt-ids", "5,17,3", "--max-tokens", "2"];
    assert_eq!(text(&program::run_with(&[("SLURM_PROCID", "0")], &part)), alone);
}

/// The layers of the report, as numbers: the choices, and the rest of the line.
fn loads(output: &Output) -> Vec<(usize, String)> {
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    let layers = report.lines().filter_map(|line| line.strip_prefix("layer ")?.split_once(": "));
    layers
        .map(|(_, rest)| {
            let (choices, rest) = rest.split_once(" choices of ").expect("choices");
            (choices.parse().expect("a number"), rest.to_string())
        })
        .collect()
}

#[test]
fn the_program_counts_choices_of_experts() {
    let prompts = ["--prompt-ids", "5,17,3", "--prompt-ids", "8,1", "--max-tokens", "4", "--ignore-eos"];
    let count = |ranks: &str| {
        let output = run(&golden(), &[&prompts[..], &["--expert-load", "--ranks", ranks]].concat());
        text(&output);
        loads(&output)
    };
    let one = count("1");
    let config = std::fs::read_to_string(golden().join("config.json")).expect("a config");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    let of = |key: &str| config[key].as_u64().expect("a number") as usize;
    // A model of layers with experts alone. Each prompt's tokens and all generated ones but the last, which is of no
    // further use, and K choices of each.
    assert_eq!(one.len(), of("num_hidden_layers"));
    for (choices, rest) in &one {
        assert_eq!(*choices, (3 + 2 + 2 * 3) * of("num_experts_per_tok"));
        assert!(rest.contains("experts, most of expert ") && rest.contains(" largest over mean "), "{rest}");
    }
    // The same tokens choose the same experts, whichever rank they are on.
    assert_eq!(count("2"), one);
}

#[test]
fn the_program_takes_texts_conversations_and_files() {
    let dir = folder(&tokenizer(false));
    let options = ["--max-tokens", "12", "--ignore-eos"];
    let by_ids = |prompt: &str| said(&text(&run(&golden(), &[&["--prompt-ids", &ids(prompt)], &options[..]].concat())));
    let by_text = |arguments: &[&str]| text(&run(dir.path(), &[arguments, &options[..]].concat()));
    let whole = by_ids("Hello");
    assert_eq!(by_text(&["--prompt", "Hello"]), whole.clone() + "\n");
    assert_eq!(by_text(&["--chat", "Hello"]), by_ids("[user] Hello\n[me]") + "\n");
    let stop = &whole[4..7];
    let at = whole.find(stop).expect("it is there");
    assert_eq!(by_text(&["--prompt", "Hello", "--stop", stop]), format!("{}\n", &whole[..at]));
    let file = dir.path().join("prompts.txt");
    std::fs::write(&file, "Hello\n\nabc\n").expect("a file");
    let both = format!("== 0\n{whole}\n== 1\n{}\n", by_ids("abc"));
    assert_eq!(by_text(&["--prompts-file", &file.display().to_string(), "--ranks", "2"]), both);
    let file = dir.path().join("chats.jsonl");
    std::fs::write(&file, r#"[{"role": "user", "content": "Hello"}]"#).expect("a file");
    assert_eq!(by_text(&["--prompts-file", &file.display().to_string()]), by_ids("[user] Hello\n[me]") + "\n");
    std::fs::write(&file, r#"[{"role": "system", "content": "Hello"}]"#).expect("a file");
    let refused = error(1, &run(dir.path(), &["--prompts-file", &file.display().to_string()]));
    assert!(refused.contains("refuses the conversation: no system"), "{refused}");
}

/// Special tokens are in no text: one that is to end a text does so by its id.
#[test]
fn the_program_stops_at_special_tokens() {
    let options = ["--max-tokens", "12", "--ignore-eos"];
    let output = text(&run(&golden(), &[&["--prompt-ids", &ids("Hello")], &options[..]].concat()));
    let made: Vec<u32> = output.split_whitespace().map(|id| id.parse().expect("an id")).collect();
    let prompt: Vec<u32> = ids("Hello").split(',').map(|id| id.parse().expect("an id")).collect();
    // One that comes behind others and is a letter of neither these nor the prompt, made a special token.
    let at = (2..12).find(|at| made[*at] < 95 && !made[..*at].contains(&made[*at]) && !prompt.contains(&made[*at]));
    let at = at.expect("another prompt is needed");
    let mut file: serde_json::Value = serde_json::from_str(&tokenizer(false)).expect("JSON");
    let vocab = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocab.retain(|_, id| *id != made[at]);
    let added = file["added_tokens"].as_array_mut().expect("a list");
    let mut token = added[0].clone();
    (token["id"], token["content"]) = (made[at].into(), "<|stop|>".into());
    added.push(token);
    let dir = folder(&file.to_string());
    let shown = text(&run(dir.path(), &[&["--prompt", "Hello", "--stop", "<|stop|>"], &options[..]].concat()));
    let before: Vec<String> = made[..at].iter().map(u32::to_string).collect();
    assert_eq!(shown, said(&before.join(" ")) + "\n");
}

/// As a hub's cache has folders: links to files elsewhere.
#[cfg(unix)]
#[test]
fn the_program_takes_a_folder_of_links() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(golden().join(name), dir.path().join(name)).expect("a link");
    }
    let arguments = ["--prompt-ids", "5,17,3", "--max-tokens", "3"];
    assert_eq!(text(&run(dir.path(), &arguments)), text(&run(&golden(), &arguments)));
}

#[test]
fn what_cannot_be_is_one_line_of_error() {
    let golden = golden();
    for (status, arguments, words) in [
        (2, &["--prompt", "hi"][..], "no tokenizer.json"),
        (2, &["--prompt-ids", ""], "--prompt-ids: expected ids with commas between them, found \"\""),
        (2, &["--prompt-ids", "1,,2"], "--prompt-ids: \"\": cannot parse integer"),
        (2, &["--prompt-ids", "1", "--temperature", "nan"], "temperature: expected 0, or a number above 0, found NaN"),
        (2, &["--prompt-ids", "1", "--temperature", "-1"], "temperature: expected 0, or a number above 0, found -1"),
        (2, &["--prompt-ids", "1", "--min-p", "2"], "min_p: expected a number of 0 to 1, found 2"),
        (
            2,
            &["--prompt-ids", "1", "--repetition-penalty", "0"],
            "repetition_penalty: expected a number above 0, found 0",
        ),
        (2, &["--prompt-ids", "1", "--stop", ""], "--stop: expected a text, found an empty one"),
        (2, &["--prompt-ids", "1", "--ranks", "3"], "expected a divisor of 8 experts, found 3"),
        (2, &["--prompt-ids", "1", "--ranks", "0"], "expected a divisor of 8 experts, found 0"),
        (2, &["--prompt-ids", "1", "--top-p", "3"], "top_p: expected a number of 0 to 1, found 3"),
        (2, &["--prompt-ids", "1", "--max-tokens", "0"], "max_tokens: expected 1 at least"),
        (2, &["--prompt-ids", "1", "--stop", "x"], "--stop: expected none"),
        (2, &[], "expected one of --prompt, --chat, --prompts-file, --prompt-ids"),
        (1, &["--prompt-ids", "5,97"], "id 97 at position 1 of the prompt; the embedding has 97 rows"),
        (1, &["--prompt-ids", "1", "--prompt-ids", "2,98", "--ranks", "2"], "request 1: id 98 at position 1"),
    ] {
        let message = error(status, &run(&golden, arguments));
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
    let dir = folder(&tokenizer(true));
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("a file");
    std::fs::create_dir(dir.path().join("tokenizer.json")).expect("a folder");
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(message.contains("tokenizer.json: not a regular file"), "{message}");
    let dir = folder(&tokenizer(true));
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(message.contains("token \"ab\" has id 97; the embedding has 97 rows"), "{message}");
    let message = error(1, &run(&dir.path().join("none"), &["--prompt", "hi"]));
    assert!(message.contains("no checkpoint folder"), "{message}");
    let dir = folder(&tokenizer(false));
    let message = error(1, &run(dir.path(), &["--prompt", ""]));
    assert!(message.contains("the prompt has no token"), "{message}");
    let of_file = |name: &str, text: &[u8]| {
        let file = dir.path().join(name);
        std::fs::write(&file, text).expect("a file");
        error(1, &run(dir.path(), &["--prompts-file", &file.display().to_string()]))
    };
    for (name, text, words) in [
        ("prompts.txt", &b" \n\n"[..], "prompts.txt: no prompt"),
        ("prompts.txt", b"abc\n\nd\xffe\n", "prompts.txt: line 3: invalid utf-8 sequence of 1 bytes from index 1"),
        ("chats.jsonl", b"[]\n", "chats.jsonl: line 1: conversation: there is no message"),
        ("chats.jsonl", b"\n{\"messages\": 5}\n", "chats.jsonl: line 2: conversation: messages: expected a list"),
        ("chats.jsonl", b"nope\n", "chats.jsonl: line 1: conversation: expected ident"),
    ] {
        let message = of_file(name, text);
        assert!(message.contains(words), "{message}");
    }
    // A prompt of the context's length leaves no room for a token, on every rank.
    let full = vec!["1"; 256].join(",");
    for ranks in ["1", "2"] {
        let message = error(1, &run(&golden, &["--prompt-ids", "1", "--prompt-ids", &full, "--ranks", ranks]));
        assert!(message.contains("request 1: the prompt has 256 tokens, the decoder's context 256"), "{message}");
    }
}
