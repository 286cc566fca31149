//! What the program refuses: a line each.

use super::*;

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
