//! Generation with the decoder of the golden folder, as a library and as the program of `examples/generate`.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Output;
use std::thread;
use std::time::Duration;

use candle_core::{Device, IndexOp, Tensor};
use moebius::candle::EpGroup;
use moebius::checkpoint::{Checkpoint, Form};
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius_models::generate::{Chat, ChatTemplate, Event, Generator, OverRanks, Request, Tokenizer};
use moebius_models::{ExpertWeights, LoadOptions, Model};

#[path = "support/chat_folder.rs"]
mod chat_folder;
#[path = "support/program.rs"]
mod program;

use chat_folder::{chat_folder, golden_folder, tokenizer_json};
use program::text;

fn load(group: EpGroup) -> Model {
    let checkpoint = Checkpoint::open(golden_folder()).expect("a checkpoint");
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
    for (ranks, spread, prefill) in [(1, 0, 64), (1, 32, 64), (2, 32, 64), (4, 0, 64), (1, 0, 4), (2, 32, 3)] {
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
                        let generator = Generator::new(decoder, None).expect("a generator");
                        let generator = generator.spread(spread).prefill_tokens(prefill);
                        let own: Vec<Request> = requests.iter().skip(rank).step_by(ranks).cloned().collect();
                        let (outputs, _) = generator.run(&own, go).expect("outputs");
                        outputs.into_iter().map(|output| output.tokens).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect()
        });
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(
                &outputs[i % ranks][i / ranks],
                expected,
                "request {i} over {ranks} ranks, spread {spread}, pieces of {prefill}"
            );
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
    let output = run(&golden_folder(), &["--prompt-ids", "5,17,3", "--max-tokens", "8", "--ignore-eos"]);
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
    let run = |more: &[&str]| text(&run(&golden_folder(), &[&prompts[..], more].concat()));
    let one = run(&sampled);
    assert_eq!(one.lines().count(), 6, "{one}");
    for ranks in ["2", "4"] {
        assert_eq!(run(&[&sampled[..], &["--ranks", ranks]].concat()), one, "{ranks} ranks");
    }
    assert_ne!(run(&[&sampled[..], &["--repetition-penalty", "1.5"]].concat()), one);
    // A prompt alone gives what it gives among others.
    let alone = ["--prompt-ids", "8", "--max-tokens", "12"];
    let alone = text(&self::run(&golden_folder(), &[&alone[..], &sampled].concat()));
    assert_eq!(one.lines().nth(3), Some(alone.trim()), "{one}");
}

#[test]
fn the_program_takes_either_kind_of_cache() {
    let prompts = ["--prompt-ids", "5,17,3", "--prompt-ids", "8", "--max-tokens", "12", "--ignore-eos"];
    let run = |more: &[&str]| text(&run(&golden_folder(), &[&prompts[..], more].concat()));
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
    let golden = golden_folder();
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
        ("2", &["--dtype", "f64"], "rank 1 of 2: --dtype f64: a GPU has f32, bf16 and f16"),
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
        let output = run(&golden_folder(), &[&prompts[..], &["--expert-load", "--ranks", ranks]].concat());
        text(&output);
        loads(&output)
    };
    let one = count("1");
    let config = std::fs::read_to_string(golden_folder().join("config.json")).expect("a config");
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
    let dir = chat_folder(&tokenizer_json(false));
    let options = ["--max-tokens", "12", "--ignore-eos"];
    let by_ids =
        |prompt: &str| said(&text(&run(&golden_folder(), &[&["--prompt-ids", &ids(prompt)], &options[..]].concat())));
    let by_text = |arguments: &[&str]| text(&run(dir.path(), &[arguments, &options[..]].concat()));
    let whole = by_ids("Hello");
    assert_eq!(by_text(&["--prompt", "Hello"]), whole.clone() + "\n");
    assert_eq!(by_text(&["--chat", "Hello"]), by_ids("[user] Hello\n[me]") + "\n");
    let stop = &whole[4..7];
    let at = whole.find(stop).expect("it is there");
    assert_eq!(by_text(&["--prompt", "Hello", "--stop", stop]), format!("{}\n", &whole[..at]));
    let file = dir.path().join("prompts.txt");
    // A byte order mark is no part of the first.
    std::fs::write(&file, "\u{feff}Hello\n\nabc\n").expect("a file");
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
    let output = text(&run(&golden_folder(), &[&["--prompt-ids", &ids("Hello")], &options[..]].concat()));
    let made: Vec<u32> = output.split_whitespace().map(|id| id.parse().expect("an id")).collect();
    let prompt: Vec<u32> = ids("Hello").split(',').map(|id| id.parse().expect("an id")).collect();
    // One that comes behind others and is a letter of neither these nor the prompt, made a special token.
    let at = (2..12).find(|at| made[*at] < 95 && !made[..*at].contains(&made[*at]) && !prompt.contains(&made[*at]));
    let at = at.expect("another prompt is needed");
    let mut file: serde_json::Value = serde_json::from_str(&tokenizer_json(false)).expect("JSON");
    let vocab = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
    vocab.retain(|_, id| *id != made[at]);
    // Added tokens that the vocabulary has not get ids behind it, whatever the file says.
    vocab.insert("<|stop|>".into(), made[at].into());
    let added = file["added_tokens"].as_array_mut().expect("a list");
    let mut token = added[0].clone();
    (token["id"], token["content"]) = (made[at].into(), "<|stop|>".into());
    added.push(token);
    let dir = chat_folder(&file.to_string());
    let shown = text(&run(dir.path(), &[&["--prompt", "Hello", "--stop", "<|stop|>"], &options[..]].concat()));
    let before: Vec<String> = made[..at].iter().map(u32::to_string).collect();
    assert_eq!(shown, said(&before.join(" ")) + "\n");
}

/// A text that ends inside a character is the same, and the same error behind it, on any number of ranks: whichever rank
/// has the prompt, and where another has none.
#[test]
fn a_text_that_ends_inside_a_character_is_the_same_on_any_number_of_ranks() {
    let mut file: serde_json::Value = serde_json::from_str(&tokenizer_json(false)).expect("JSON");
    let vocab = file["model"]["vocab"].as_object_mut().expect("a vocabulary");
    // Every token is a printable character and the first byte of one of three, in a byte-level tokenizer's letters.
    *vocab = vocab.iter().map(|(token, id)| (format!("{token}\u{e2}"), id.clone())).collect();
    let dir = chat_folder(&file.to_string());
    let incomplete = |ranks: &str, prompts: &[&str]| {
        let prompts = prompts.iter().flat_map(|ids| ["--prompt-ids", *ids]);
        let limits = ["--max-tokens", "4", "--ignore-eos", "--ranks", ranks];
        let output = run(dir.path(), &prompts.chain(limits).collect::<Vec<_>>());
        let shown = String::from_utf8(output.stdout).expect("UTF-8");
        let report = String::from_utf8(output.stderr).expect("UTF-8");
        let error = report.lines().last().unwrap_or_default().to_string();
        (output.status.code(), shown, error)
    };
    // One that ends with a whole character is none of these: a special token has no bytes, so choose other prompts.
    for prompts in [&["5,17,3"][..], &["5,17,3", "8"], &["8", "5,17,3", "1,2"]] {
        let one = incomplete("1", prompts);
        assert_eq!(
            (one.0, &one.2[..]),
            (Some(1), "error: request 0: the text ends inside a character, after 4 tokens")
        );
        assert_eq!(one.1.matches('\u{fffd}').count(), 4 * prompts.len(), "{:?}", one.1);
        for ranks in ["2", "4"] {
            assert_eq!(incomplete(ranks, prompts), one, "{ranks} ranks");
        }
    }
}

/// As a hub's cache has folders: links to files elsewhere.
#[cfg(unix)]
#[test]
fn the_program_takes_a_folder_of_links() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(golden_folder().join(name), dir.path().join(name)).expect("a link");
    }
    let arguments = ["--prompt-ids", "5,17,3", "--max-tokens", "3"];
    assert_eq!(text(&run(dir.path(), &arguments)), text(&run(&golden_folder(), &arguments)));
}

#[test]
fn what_cannot_be_is_one_line_of_error() {
    let golden = golden_folder();
    for (status, arguments, words) in [
        (2, &["--prompt", "hi"][..], "no tokenizer.json"),
        (2, &["--prompt-ids", ""], "--prompt-ids: expected ids with commas between them, found \"\""),
        (2, &["--prompt-ids", "1,,2"], "--prompt-ids: \"\": cannot parse integer"),
        (
            2,
            &["--prompt-ids", "1", "--temperature", "nan"],
            "temperature: expected 0, or a finite number above 0, found NaN",
        ),
        (
            2,
            &["--prompt-ids", "1", "--temperature", "-1"],
            "temperature: expected 0, or a finite number above 0, found -1",
        ),
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
        (2, &["--prompt-ids", "1", "--dtype", "f64", "--device", "cuda"], "--dtype f64: a GPU has f32, bf16 and f16"),
        (2, &[], "expected one of --prompt, --chat, --prompts-file, --prompt-ids"),
        (1, &["--prompt-ids", "5,97"], "id 97 at position 1 of the prompt; the embedding has 97 rows"),
        (1, &["--prompt-ids", "1", "--prompt-ids", "2,98", "--ranks", "2"], "request 1: id 98 at position 1"),
    ] {
        let message = error(status, &run(&golden, arguments));
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
    let dir = chat_folder(&tokenizer_json(true));
    std::fs::remove_file(dir.path().join("tokenizer.json")).expect("a file");
    std::fs::create_dir(dir.path().join("tokenizer.json")).expect("a folder");
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(message.contains("tokenizer.json: not a regular file"), "{message}");
    let dir = chat_folder(&tokenizer_json(true));
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(message.contains("token \"ab\" has id 97; the embedding has 97 rows"), "{message}");
    let message = error(1, &run(&dir.path().join("none"), &["--prompt", "hi"]));
    assert!(message.contains("no checkpoint folder"), "{message}");
    let dir = chat_folder(&tokenizer_json(false));
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

/// Names of files and texts of templates may hold what steers a terminal, or looks like another line of it.
#[cfg(unix)]
#[test]
fn errors_of_the_program_have_no_control_characters() {
    let steer = "a\u{1b}]0;title\u{7}\r\nerror: \u{9b}31m";
    let shown = r"a\u{1b}]0;title\u{7}\r\nerror: \u{9b}31m";
    let refused = |output: Output| {
        let message = error(1, &output);
        assert!(message.contains(shown) && !message.trim_end().chars().any(char::is_control), "{message:?}");
    };
    let dir = chat_folder(&tokenizer_json(false));
    refused(run(&dir.path().join(steer), &["--prompt", "hi"]));
    let path = |name: &str| dir.path().join(name).display().to_string();
    refused(run(dir.path(), &["--prompts-file", &path(steer)]));
    std::fs::write(path(&format!("{steer}.txt")), "").expect("a file");
    refused(run(dir.path(), &["--prompts-file", &path(&format!("{steer}.txt"))]));
    let conversation = serde_json::json!([{"role": "user", "content": "x"}, {"role": steer}]);
    for template in ["{{ raise_exception(messages[1].role) }}", "{{ messages[0][messages[1].role]() }}"] {
        std::fs::write(path("chat_template.jinja"), template).expect("a file");
        std::fs::write(path("chats.jsonl"), conversation.to_string()).expect("a file");
        let output = run(dir.path(), &["--prompts-file", &path("chats.jsonl")]);
        let message = error(1, &output);
        assert!(!message.trim_end().chars().any(char::is_control), "{message:?}");
    }
    let mut file: serde_json::Value = serde_json::from_str(&tokenizer_json(true)).expect("JSON");
    file["pre_tokenizer"] = serde_json::json!({"type": steer});
    std::fs::write(path("tokenizer.json"), file.to_string()).expect("a file");
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(!message.trim_end().chars().any(char::is_control), "{message:?}");
}

/// What the command line and `config.json` say is refused before weights are looked for.
#[test]
fn parameters_are_refused_before_anything_is_loaded() {
    let dir = chat_folder(&tokenizer_json(false));
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("no weights");
    for (status, arguments, words) in [
        (2, &["--top-p", "3", "--temperature", "1"][..], "top_p: expected a number of 0 to 1, found 3"),
        (2, &["--top-p", "3"], "top_p: expected a number of 0 to 1, found 3"),
        (2, &["--temperature", "-1"], "temperature"),
        (2, &["--max-tokens", "0"], "max_tokens: expected 1 at least"),
        (1, &["--max-tokens", "1"], "safetensors"),
    ] {
        let message = error(status, &run(dir.path(), &[&["--prompt", "hi"], arguments].concat()));
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
    let message = error(1, &run(dir.path(), &["--prompt-ids", "5,97"]));
    assert!(message.contains("id 97 at position 1 of the prompt; the embedding has 97 rows"), "{message}");
    let long = vec!["1"; 256].join(",");
    let message = error(1, &run(dir.path(), &["--prompt-ids", &long]));
    assert!(message.contains("256 tokens, the decoder's context 256"), "{message}");
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer_json(true)).expect("a tokenizer");
    let message = error(1, &run(dir.path(), &["--prompt", "hi"]));
    assert!(message.contains("id 97; the embedding has 97 rows"), "{message}");
}

/// Nothing that was asked for is left out without a word.
#[test]
fn options_without_effect_are_named() {
    let dir = chat_folder(&tokenizer_json(false));
    let report = |arguments: &[&str]| {
        let done = run(dir.path(), &[&["--prompt", "hi", "--max-tokens", "2"], arguments].concat());
        text(&done);
        String::from_utf8(done.stderr).expect("UTF-8")
    };
    let said = report(&["--top-p", "0.5", "--seed", "3"]);
    assert!(said.contains("temperature 0 takes the likeliest tokens: no effect of --top-p, --seed\n"), "{said}");
    for arguments in [&[][..], &["--temperature", "0.5", "--top-p", "0.5"], &["--repetition-penalty", "1.1"]] {
        let said = report(arguments);
        assert!(!said.contains("no effect"), "{said}");
    }
}

/// A line says whether an answer begins behind it; one that does not say has one.
#[test]
fn a_conversation_may_go_without_an_answers_beginning() {
    let dir = chat_folder(&tokenizer_json(false));
    let template = "{{ messages[0].content }}{% if add_generation_prompt %}abcdefgh{% endif %}";
    std::fs::write(dir.path().join("chat_template.jinja"), template).expect("a file");
    let lines = dir.path().join("lines.jsonl");
    let prefill = |line: &str| {
        std::fs::write(&lines, line).expect("a file");
        let done = run(dir.path(), &["--prompts-file", &lines.display().to_string(), "--max-tokens", "1"]);
        text(&done);
        let report = String::from_utf8(done.stderr).expect("UTF-8");
        let line = report.lines().find_map(|line| line.strip_prefix("prefill: ")).expect("a count").to_string();
        line.split(' ').next().and_then(|count| count.parse::<usize>().ok()).expect("a number")
    };
    let messages = r#"[{"role": "user", "content": "hi"}]"#;
    assert_eq!(prefill(messages), 10);
    assert_eq!(prefill(&format!(r#"{{"messages": {messages}}}"#)), 10);
    assert_eq!(prefill(&format!(r#"{{"messages": {messages}, "add_generation_prompt": true}}"#)), 10);
    assert_eq!(prefill(&format!(r#"{{"messages": {messages}, "add_generation_prompt": false}}"#)), 2);
}

/// A program that loads the model says whether links are followed.
#[cfg(unix)]
#[test]
fn a_model_is_loaded_through_links_where_asked() {
    let real = chat_folder(&tokenizer_json(false));
    let snapshot = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::os::unix::fs::symlink(real.path().join(name), snapshot.path().join(name)).expect("a link");
    }
    let load = |options| Model::load(snapshot.path(), &Device::Cpu, options);
    let message = load(LoadOptions::default()).expect_err("links").to_string();
    assert!(message.contains("outside the folder") && message.contains("OpenOptions::follow_links"), "{message}");
    let follow = LoadOptions { follow_links: true, ..LoadOptions::default() };
    load(follow).expect("a model");
    load(LoadOptions { random: Some(1), ..LoadOptions::default() }).expect_err("links");
    load(LoadOptions { random: Some(1), ..follow }).expect("a random model");
}

/// A token by its id, which is no part of the text.
#[test]
fn the_program_stops_at_tokens_by_their_ids() {
    let dir = chat_folder(&tokenizer_json(false));
    let ids = text(&run(dir.path(), &["--prompt", "hi", "--max-tokens", "6", "--channels", "raw"]));
    assert_eq!(ids.trim_end_matches('\n').len(), 6, "six printable characters: choose another prompt: {ids:?}");
    let printed: Vec<u8> = ids.bytes().collect();
    let third = u32::from(printed[2] - b' ');
    let first = printed.iter().position(|b| *b == printed[2]).expect("a place");
    let stopped = run(dir.path(), &["--prompt", "hi", "--max-tokens", "6", "--stop-token", &third.to_string()]);
    let report = String::from_utf8(stopped.stderr.clone()).expect("UTF-8");
    assert_eq!(text(&stopped).trim_end_matches('\n').as_bytes(), &printed[..first]);
    assert!(report.contains(&format!("ended by token {third}")), "{report}");
}

/// Blocks of 64x64 with the scales of those of 128x128 that they are parts of: the same values in a form that is not
/// kept.
#[test]
fn experts_in_a_form_that_is_not_kept_are_dequantized() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/deepseek_v3_fp8");
    let dir = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(golden.join("config.json")).expect("a file");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["quantization_config"]["weight_block_size"] = serde_json::json!([64, 64]);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a file");
    let weights = std::fs::read(golden.join("model.safetensors")).expect("a file");
    std::fs::write(dir.path().join("model.safetensors"), with_smaller_blocks(&weights)).expect("a file");
    let ids = Tensor::new(&[[3u32, 14, 15, 92, 6]], &Device::Cpu).expect("ids");
    let logits = |folder: &Path, experts| {
        let model =
            Model::load(folder, &Device::Cpu, LoadOptions { experts, ..LoadOptions::default() }).expect("a model");
        let logits = model.forward(&ids).expect("logits").flatten_all().expect("flat");
        let logits = logits.to_dtype(candle_core::DType::F32).expect("f32").to_vec1::<f32>().expect("values");
        (logits, model.dequantized_experts().to_vec())
    };
    let (expected, none) = logits(&golden, ExpertWeights::Dequantized);
    assert!(none.is_empty());
    assert!(logits(&golden, ExpertWeights::AsStored).1.is_empty(), "blocks of 128x128 are kept");
    let (found, dequantized) = logits(dir.path(), ExpertWeights::AsStored);
    assert_eq!((found, dequantized), (expected, vec![(1, Form::Fp8Block)]));
    let done = run(dir.path(), &["--prompt-ids", "3,14,15", "--max-tokens", "4"]);
    let report = String::from_utf8(done.stderr.clone()).expect("UTF-8");
    assert_eq!(
        report.matches("no product reads the form they are stored in (Fp8Block); de-quantized").count(),
        1,
        "{report}"
    );
    assert_eq!(text(&done).split_whitespace().count(), 4);
}

/// A safetensors file in which every scale of a block of 128x128 is that of four of 64x64.
fn with_smaller_blocks(file: &[u8]) -> Vec<u8> {
    let header = u64::from_le_bytes(file[..8].try_into().expect("a length")) as usize;
    let (header, data) = file[8..].split_at(header);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).expect("JSON");
    let number = |value: &serde_json::Value| value.as_u64().expect("a number") as usize;
    let (mut out, mut entries) = (Vec::new(), serde_json::Map::new());
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let bytes = &data[number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1])];
        let (mut entry, start) = (entry.clone(), out.len());
        match name.strip_suffix("_scale_inv").map(|weight| header[weight]["shape"].clone()) {
            None => out.extend_from_slice(bytes),
            Some(shape) => {
                let [rows, columns] = [0, 1].map(|d| number(&shape[d]).div_ceil(64));
                let wide = number(&entry["shape"][1]);
                let scales = (0..rows * columns).map(|n| (n / columns / 2) * wide + n % columns / 2);
                scales.for_each(|at| out.extend_from_slice(&bytes[4 * at..4 * at + 4]));
                entry["shape"] = serde_json::json!([rows, columns]);
            }
        }
        entry["data_offsets"] = serde_json::json!([start, out.len()]);
        entries.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(entries).to_string();
    header.push_str(&" ".repeat((8 - header.len() % 8) % 8));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &out].concat()
}

/// A folder of gpt-oss has no template and answers all the same. What random weights answer nobody knows, but which part
/// of it is shown.
#[test]
fn gpt_oss_converses_without_a_template() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gpt_oss");
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), dir.path().join(name)).expect("a copy");
    }
    let mut json: serde_json::Value = serde_json::from_str(&tokenizer_json(false)).expect("JSON");
    let vocab = json["model"]["vocab"].as_object_mut().expect("tokens");
    vocab.retain(|_, id| id.as_u64().is_some_and(|id| id < 90));
    let proto = json["added_tokens"][0].clone();
    let marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"];
    let added = marks.iter().enumerate().map(|(i, mark)| {
        let mut token = proto.clone();
        (token["id"], token["content"]) = ((90 + i).into(), (*mark).into());
        token
    });
    json["added_tokens"] = added.collect();
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).expect("a file");
    let lines = dir.path().join("lines.jsonl");
    let line = r#"{"messages": [{"role": "user", "content": "hi"}], "model_identity": null, "knowledge_cutoff": null}"#;
    std::fs::write(&lines, line).expect("a file");
    let lines = lines.to_str().expect("a path");
    let said = |channels: &str| {
        let done =
            run(dir.path(), &["--prompts-file", lines, "--max-tokens", "40", "--ignore-eos", "--channels", channels]);
        text(&done)
    };
    assert!(said("raw").len() > 1 && said("final").len() < said("raw").len());
    // The program's prompt is harmony's.
    let chat = Chat::from_json(line).expect("a conversation").generation_prompt(true);
    let ids = Tokenizer::from_folder(dir.path()).and_then(|t| t.encode_chat(&ChatTemplate::harmony(), &chat));
    let done = run(dir.path(), &["--prompts-file", lines, "--max-tokens", "1"]);
    let expected = format!("prefill: {} tokens,", ids.expect("ids").len());
    let report = String::from_utf8(done.stderr).expect("UTF-8");
    assert!(report.contains(&expected), "{expected} {report}");
    // Of an answer that has begun in a channel, whose first two tokens are characters: choose another beginning if not.
    for channel in ["final", "analysis"] {
        let beginning = format!("<|start|>assistant<|channel|>{channel}<|message|>ab");
        let [last, all, raw] = ["final", "all", "raw"].map(|channels| {
            let arguments = ["--prompt", &beginning, "--max-tokens", "40", "--ignore-eos", "--channels", channels];
            text(&run(dir.path(), &arguments))
        });
        let begins = raw.get(..2).expect("two characters");
        assert!(all.starts_with(begins), "{channel}: {all:?}, {raw:?}");
        assert_eq!(last.starts_with(begins), channel == "final", "{channel}: {last:?}, {raw:?}");
        assert!(all.len() >= last.len() && all != raw, "{channel}: {all:?}, {last:?}");
    }
}
