//! Runs of the program `generate`.

use super::*;

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

/// Prompts that are read together begin with as many tokens as the shortest has; the others are read apart.
#[test]
fn the_program_batches_as_it_is_told() {
    let prompts = ["--prompt-ids", "5,17,3", "--prompt-ids", "8,1,2,3,4,5,6,7,8", "--prompt-ids", "9,9,9"];
    let run = |more: &[&str]| {
        let options = ["--max-tokens", "5", "--ignore-eos"];
        let output = run(&golden_folder(), &[&prompts[..], &options, more].concat());
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        let prefill = report.lines().find_map(|line| line.strip_prefix("prefill: ")).expect("a count").to_string();
        (text(&output), prefill.split(' ').next().and_then(|n| n.parse::<usize>().ok()).expect("a number"))
    };
    let (together, read) = run(&[]);
    assert_eq!(read, 3 * 3);
    for (more, expected) in [
        (&["--spread", "6"][..], 9),
        (&["--spread", "5"], 15),
        (&["--batch", "1"], 15),
        (&["--batch", "2"], 15),
        (&["--batch", "2", "--ranks", "2"], 15),
    ] {
        let (shown, read) = run(more);
        assert_eq!((shown, read), (together.clone(), expected), "{more:?}");
    }
    let refused = self::run(&golden_folder(), &[&prompts[..], &["--batch", "0"]].concat());
    assert_eq!(refused.status.code(), Some(2));
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
