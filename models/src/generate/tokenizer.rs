//! Texts as ids, and back: a folder's `tokenizer.json`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use moebius::checkpoint::{Checkpoint, OpenOptions};
use serde::Deserialize;
use serde_json::Value;

use super::chat::{Chat, ChatTemplate};
use super::error::{Error, Result};
use super::folder;
use super::harmony::{ChannelStream, Channels, Marks};
use super::stream::TextStream;

/// The tokenizer of a published folder.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The token that begins a text, where `tokenizer_config.json` says that one is added.
    bos: Option<u32>,
    eos: Vec<u32>,
    /// Of a tokenizer that has them all.
    marks: Option<Marks>,
}

impl Tokenizer {
    /// From a folder with `tokenizer.json`; its padding and truncation are not applied.
    ///
    /// The tokens that end a text are those of [`eos_ids`], and where the configurations name none,
    /// `tokenizer_config.json`'s `eos_token`; of gpt-oss's harmony format also the end of an answer and that of a call.
    ///
    /// # Errors
    /// Unreadable files, among them what is no regular file or is far larger than a published one; ids of special
    /// tokens that are no numbers; an `eos_token` that the tokenizer does not have.
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        const FILE: &str = "tokenizer.json";
        let dir = dir.as_ref();
        let Some(text) = folder::text(dir, FILE, folder::MAX_TOKENIZER)? else {
            let problem = "there is no such file; a sentencepiece or tiktoken model must be converted to one";
            return Err(folder::problem(dir, FILE, problem));
        };
        let mut this = Self::from_json(&text).map_err(|e| folder::problem(dir, FILE, &e.to_string()))?;
        let config = folder::json(dir, "tokenizer_config.json")?;
        let id = |name: &str| -> Result<Option<u32>> {
            let Some(token) = config.get(name).and_then(folder::token_text) else { return Ok(None) };
            let problem = || folder::problem(dir, "tokenizer_config.json", &format!("{name}: {token:?} is no token"));
            this.inner.token_to_id(token).map(Some).ok_or_else(problem)
        };
        let bos = if config["add_bos_token"] == true { id("bos_token")? } else { None };
        let mut eos = eos_ids(dir)?;
        if eos.is_empty() {
            eos.extend(id("eos_token")?);
        }
        if this.has_channels() {
            // What ends a message of harmony's assistant for whoever is to act on it: its answer, and a call of a tool.
            let ends = ["<|return|>", "<|call|>"].into_iter().filter_map(|token| this.inner.token_to_id(token));
            let missing: Vec<u32> = ends.filter(|id| !eos.contains(id)).collect();
            eos.extend(missing);
        }
        (this.bos, this.eos) = (bos, eos);
        Ok(this)
    }

    /// From the text of a `tokenizer.json`; no token ends a text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn from_json(text: &str) -> Result<Self> {
        check_parts(text).map_err(|problem| Error::Tokenizer { call: "Tokenizer::from_json", problem })?;
        let inner = guarded("Tokenizer::from_json", || {
            let mut inner = tokenizers::Tokenizer::from_bytes(text)?;
            inner.with_padding(None);
            inner.with_truncation(None)?;
            Ok(inner)
        })?;
        let marks = Marks::of(|token| inner.token_to_id(token));
        Ok(Self { inner, bos: None, eos: Vec::new(), marks })
    }

    /// Ids of the tokens that end a text, in the order of the configuration.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Ids of a text in which special tokens stand already, as a chat template's.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    /// Ids of a plain text, with the special tokens that the tokenizer puts around one.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.ids(text, true)?;
        // tokenizer.json may leave this to the class that transformers reads it with.
        if let Some(bos) = self.bos.filter(|bos| ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Ids of a conversation as the template renders it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and [`Error::Tokenizer`].
    pub fn encode_chat(&self, template: &ChatTemplate, chat: &Chat) -> Result<Vec<u32>> {
        self.encode(&template.render(chat)?)
    }

    /// Text of ids; bytes that are no characters appear as U+FFFD. Ids that the tokenizer does not have are left out,
    /// and so are special tokens where asked.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guarded("Tokenizer::decode", || self.inner.decode(ids, skip_special))
    }

    /// Text of ids that come one at a time, as continuation of a prompt's.
    pub fn stream(&self, prompt: &[u32]) -> TextStream<'_> {
        TextStream::new(self, prompt)
    }

    /// Text of ids that come one at a time, as an answer to a prompt: of the messages in `channels` where the tokenizer
    /// divides a text into channels, else all of it.
    pub(super) fn channel_stream(&self, prompt: &[u32], channels: Channels) -> ChannelStream<'_> {
        ChannelStream::new(self, self.marks.filter(|_| channels != Channels::Raw), channels, prompt)
    }

    /// True of a tokenizer with the special tokens of openai-harmony, whose texts are messages in [`Channels`].
    pub fn has_channels(&self) -> bool {
        self.marks.is_some()
    }

    /// Bytes of a token's text; none of a special token's.
    pub(super) fn bytes(&self, id: u32) -> Vec<u8> {
        if self.is_special(id) {
            return Vec::new();
        }
        let token = self.inner.id_to_token(id).unwrap_or_default();
        // A byte by its number, of tokenizers that fall back on these.
        let number = token.strip_prefix("<0x").and_then(|hex| hex.strip_suffix('>'));
        if let Some(byte) = number.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            return vec![byte];
        }
        // Letters for bytes, of tokenizers whose tokens are bytes; others have characters beyond these.
        let bytes: Option<Vec<u8>> = token.chars().map(byte_of_letter).collect();
        bytes.unwrap_or_else(|| token.into_bytes())
    }

    /// True of a token that is left out of texts, such as one that ends a turn.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// Id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Refuses a tokenizer that gives ids for which an embedding of `rows` rows has none.
    ///
    /// # Errors
    /// [`Error::TokenPastEmbedding`], naming the token of the largest id.
    pub fn check_embedding(&self, rows: usize) -> Result<()> {
        // Of two of one id always the same.
        let order = |(token, id): &(String, u32)| (*id, token.clone());
        let largest = self.inner.get_vocab(true).into_iter().max_by_key(order);
        match largest {
            Some((token, id)) if id as usize >= rows => Err(Error::TokenPastEmbedding { token, id, rows }),
            _ => Ok(()),
        }
    }

    fn ids(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        guarded("Tokenizer::encode", || Ok(self.inner.encode_fast(text, add_special)?.get_ids().to_vec()))
    }
}

/// A call of the tokenizers' library, which panics over some files that it takes.
fn guarded<T>(call: &'static str, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    let fail = |problem: String| Error::Tokenizer { call, problem };
    // What the call has left half made is not used again, or was only read.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|e| fail(e.to_string())),
        Err(panic) => {
            let texts = [panic.downcast_ref::<String>().map(String::as_str), panic.downcast_ref::<&str>().copied()];
            let text = texts.into_iter().flatten().next().unwrap_or("without a text");
            Err(fail(format!("the tokenizers' library panicked: {text}")))
        }
    }
}

/// Refuses the parts of a `tokenizer.json` that are known to have the library panic as it encodes. What is no JSON is its own
/// to refuse.
fn check_parts(text: &str) -> std::result::Result<(), String> {
    fn check(part: &Value) -> std::result::Result<(), String> {
        let (parts, kind) = match part {
            Value::Object(parts) => (parts.values().collect::<Vec<_>>(), part["type"].as_str()),
            Value::Array(parts) => (parts.iter().collect(), None),
            _ => return Ok(()),
        };
        match kind {
            Some("Replace") if part["pattern"]["String"] == "" => {
                return Err("Replace: an empty pattern".into());
            }
            Some("TemplateProcessing") => {
                let pieces = ["single", "pair"].into_iter().filter_map(|name| part[name].as_array()).flatten();
                let mut tokens = pieces.filter_map(|piece| piece["SpecialToken"]["id"].as_str());
                if let Some(unknown) = tokens.find(|token| part["special_tokens"].get(token).is_none()) {
                    return Err(format!("TemplateProcessing: {unknown:?} is none of its special_tokens"));
                }
            }
            _ => {}
        }
        parts.into_iter().try_for_each(check)
    }
    let Ok(file) = serde_json::from_str::<Parts>(text) else { return Ok(()) };
    [file.normalizer, file.pre_tokenizer, file.post_processor, file.decoder].iter().try_for_each(check)
}

/// The parts of a `tokenizer.json` beside its vocabulary.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

/// The byte that a letter of GPT-2's alphabet stands for: those that print stand for themselves, the others for the
/// letters from U+0100 on in order.
fn byte_of_letter(letter: char) -> Option<u8> {
    let prints = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = u32::from(letter);
    match u8::try_from(code) {
        Ok(byte) => Some(byte).filter(prints),
        Err(_) => (0..=u8::MAX).filter(|b| !prints(b)).nth(code.checked_sub(256)? as usize),
    }
}

/// Ids that end a text according to a folder: `eos_token_id`, a number or a list, of `generation_config.json`, else of
/// `config.json` or the `text_config` in it. Empty where they have none, or there are no such files. `config.json` is
/// the checkpoint's as [`Checkpoint::read_config`] finds it, also after a save that was killed; it may be a link, as
/// the folder's other files may.
///
/// # Errors
/// [`Error::File`]: unreadable files, ids that are no numbers of 32 bits. [`Error::Model`]: a `config.json` that the
/// checkpoint's reader refuses, for a key that comes twice among others.
pub fn eos_ids(dir: impl AsRef<Path>) -> Result<Vec<u32>> {
    const CONFIG: &str = "config.json";
    let dir = dir.as_ref();
    for name in ["generation_config.json", CONFIG] {
        let file = match name {
            CONFIG => config(dir)?,
            name => folder::json(dir, name)?,
        };
        let field = [file.get("eos_token_id"), file.get("text_config").and_then(|c| c.get("eos_token_id"))];
        let Some(field) = field.into_iter().flatten().find(|v| !v.is_null()) else { continue };
        let list = field.as_array().map_or(std::slice::from_ref(field), Vec::as_slice);
        let ids: Option<Vec<u32>> = list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
        let problem = || folder::problem(dir, name, &format!("eos_token_id: expected ids, found {field}"));
        return ids.ok_or_else(problem);
    }
    Ok(Vec::new())
}

/// `config.json` of a checkpoint; null where there is none.
pub(super) fn config(dir: &Path) -> Result<serde_json::Value> {
    let mut options = OpenOptions::default();
    options.follow_links = true;
    let config = Checkpoint::read_config(dir, options).map_err(crate::Error::from)?;
    Ok(config.unwrap_or_default())
}

#[cfg(test)]
pub(super) mod tests {
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
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
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
}
