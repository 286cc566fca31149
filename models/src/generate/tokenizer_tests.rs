use super::*;

/// A byte-level tokenizer: ids 0..256 are the bytes, 256 and 257 special tokens `<s>` and `</s>`, 258 `</think>`.
pub(in crate::generate) fn bytes() -> Tokenizer {
    Tokenizer::from_json(&bytes_json()).expect("a tokenizer")
}

/// GPT-2's letters for bytes: those that print stand for themselves, the others follow 255 in order.
pub(in crate::generate) fn bytes_json() -> String {
    let prints = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let vocab: serde_json::Map<String, serde_json::Value> = (0..256u32)
        .map(|b| {
            let letter = if prints(b) { b } else { next };
            next += u32::from(!prints(b));
            (char::from_u32(letter).expect("a letter").to_string(), b.into())
        })
        .collect();
    let added = |id: u32, content: &str, special: bool| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special})
    };
    let level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [added(256, "<s>", true), added(257, "</s>", true), added(258, "</think>", false)],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "!"},
    })
    .to_string()
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("tokenizer.json"), bytes_json()).expect("a file");
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).expect("a file");
    }
    dir
}

#[test]
fn bytes_are_ids_and_special_tokens_are_found_in_text() {
    let tokenizer = bytes();
    assert_eq!(tokenizer.encode("<s>é!").expect("ids"), [256, 0xc3, 0xa9, 33], "and no padding to 64");
    assert_eq!(tokenizer.decode(&[256, 0xc3, 0xa9, 33, 258], true).expect("text"), "é!</think>");
    assert_eq!(tokenizer.decode(&[256, 33, 9999], false).expect("text"), "<s>!", "9999 is left out");
    assert_eq!(tokenizer.encode("").expect("ids"), [0u32; 0]);
}

#[test]
fn the_first_file_that_names_an_end_has_it() {
    let config = ("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}}"#);
    let model = ("config.json", r#"{"eos_token_id": null, "text_config": {"eos_token_id": 7}}"#);
    let generation = ("generation_config.json", r#"{"eos_token_id": [5, 6]}"#);
    for (files, expected) in [
        (vec![config, model, generation], vec![5, 6]),
        (vec![config, model], vec![7]),
        (vec![config], vec![257]),
        (vec![], vec![]),
    ] {
        let dir = folder(&files);
        assert_eq!(Tokenizer::from_folder(dir.path()).expect("a tokenizer").eos(), expected, "{files:?}");
    }
}

/// What a killed save leaves: the new config.json lies beside the manifest that says so, none in its own place.
#[test]
fn a_killed_saves_configuration_is_found() {
    let dir = tempfile::tempdir().expect("a folder");
    let staging = dir.path().join(".moebius-save");
    std::fs::create_dir(&staging).expect("a folder");
    std::fs::write(staging.join("config.json"), r#"{"eos_token_id": 8}"#).expect("a file");
    assert_eq!(eos_ids(dir.path()).expect("ids"), [0u32; 0], "a save that is not complete does not count");
    std::fs::write(staging.join("commit.json"), r#"{"files": ["config.json"], "stale": []}"#).expect("a file");
    assert_eq!(eos_ids(dir.path()).expect("ids"), [8]);
}

#[test]
fn a_text_begins_with_bos_where_the_folder_says_so() {
    let ids = |config: &str| {
        let dir = folder(&[("tokenizer_config.json", config)]);
        let tokenizer = Tokenizer::from_folder(dir.path()).expect("a tokenizer");
        assert_eq!(tokenizer.encode("!").expect("ids"), [33], "not to a rendered conversation");
        tokenizer.encode_prompt("!").expect("ids")
    };
    assert_eq!(ids(r#"{"bos_token": "<s>", "add_bos_token": true}"#), [256, 33]);
    assert_eq!(ids(r#"{"bos_token": "<s>", "add_bos_token": false}"#), [33]);
    assert_eq!(ids(r#"{"bos_token": "<s>"}"#), [33]);
}

#[test]
fn what_a_folder_lacks_or_has_wrong_is_named() {
    let error = |files: &[(&str, &str)]| {
        let dir = folder(files);
        Tokenizer::from_folder(dir.path()).expect_err("refused").to_string()
    };
    let message = error(&[("tokenizer_config.json", r#"{"eos_token": "<end>"}"#)]);
    assert!(message.contains("tokenizer_config.json: eos_token: \"<end>\" is no token"), "{message}");
    let message = error(&[("generation_config.json", r#"{"eos_token_id": -1}"#)]);
    assert!(message.contains("generation_config.json: eos_token_id: expected ids, found -1"), "{message}");
    let message = error(&[("config.json", "{")]);
    assert!(message.contains("config.json: "), "{message}");
    let message = error(&[("config.json", r#"{"eos_token_id": 5, "eos_token_id": 6}"#)]);
    assert!(message.contains("config.json: ") && message.contains("comes twice"), "{message}");
    let message = error(&[("tokenizer.json", "{}")]);
    assert!(message.contains("tokenizer.json: "), "{message}");
    let empty = tempfile::tempdir().expect("a folder");
    let message = Tokenizer::from_folder(empty.path()).expect_err("refused").to_string();
    assert!(message.contains("there is no such file"), "{message}");
}

/// Files over which the library panics, as it reads them or as it encodes.
#[test]
fn what_the_library_panics_over_is_an_error() {
    let with = |part: &str, value: serde_json::Value| {
        let mut file: serde_json::Value = serde_json::from_str(&bytes_json()).expect("JSON");
        file[part] = value;
        file.to_string()
    };
    let pieces = serde_json::json!([{"SpecialToken": {"id": "<x>", "type_id": 0}}]);
    let template =
        serde_json::json!({"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}});
    let empty = serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "abc"});
    let sequence = serde_json::json!({"type": "Sequence", "normalizers": [empty]});
    let map = serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    for (part, value, words) in [
        ("post_processor", template, "\"<x>\" is none of its special_tokens"),
        ("normalizer", empty, "an empty pattern"),
        ("normalizer", sequence, "an empty pattern"),
        ("normalizer", map, "Tokenizer::from_json: "),
    ] {
        let message = Tokenizer::from_json(&with(part, value)).expect_err("refused").to_string();
        assert!(message.contains(words), "{message}");
    }
    // Splits into characters.
    let split =
        serde_json::json!({"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": false});
    let split = Tokenizer::from_json(&with("pre_tokenizer", split)).expect("a tokenizer");
    split.encode("ab").expect("ids");
    let panics = guarded::<()>("Tokenizer::encode", || panic!("by {}", "design")).expect_err("a panic").to_string();
    assert_eq!(panics, "Tokenizer::encode: the tokenizers' library panicked: by design");
}

#[test]
fn ids_past_the_embedding_are_refused() {
    let tokenizer = bytes();
    tokenizer.check_embedding(259).expect("258 is the last row");
    let message = tokenizer.check_embedding(258).expect_err("refused").to_string();
    assert_eq!(message, "tokenizer: token \"</think>\" has id 258; the embedding has 258 rows");
}
