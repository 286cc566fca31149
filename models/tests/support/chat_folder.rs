//! A folder that converses: the tiny checkpoint of Qwen3-MoE with a tokenizer and a chat template.

use std::path::{Path, PathBuf};

/// The golden folder of the checkpoint.
pub fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qwen3_moe")
}

/// A `tokenizer.json` of the 97 ids that the folder's embedding has: 95 printable characters and the line end, in the letters
/// that byte-level tokenizers write them with, and a special token. With `more`, one too many.
pub fn tokenizer_json(more: bool) -> String {
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
pub fn chat_folder(tokenizer: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden_folder().join(name), dir.path().join(name)).expect("a copy");
    }
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).expect("a file");
    let config = r#"{"chat_template": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).expect("a file");
    dir
}
