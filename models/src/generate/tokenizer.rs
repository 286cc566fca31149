//! Texts as ids, and back: a folder's `tokenizer.json`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use moebius::checkpoint::{Checkpoint, OpenOptions};
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer};

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
    /// The text of a special token in a message (`<|im_end|>` that a user types) becomes that token, as it does in
    /// transformers: a template's rendering does not tell the two apart. With [`ChatTemplate::harmony`] it stays text, and
    /// each part of a message is encoded by itself, as openai-harmony does.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], and [`Error::Tokenizer`], also for a tokenizer without harmony's special tokens.
    pub fn encode_chat(&self, template: &ChatTemplate, chat: &Chat) -> Result<Vec<u32>> {
        match template.harmony_pieces(chat)? {
            Some(pieces) => pieces.ids(self),
            None => self.encode(&template.render(chat)?),
        }
    }

    /// Ids of a text without special or added tokens: what looks like one is text.
    pub(super) fn encode_ordinary(&self, text: &str) -> Result<Vec<u32>> {
        guarded("Tokenizer::encode_chat", || {
            let mut normalized = NormalizedString::from(text);
            if let Some(normalizer) = self.inner.get_normalizer() {
                normalizer.normalize(&mut normalized)?;
            }
            let mut splits = PreTokenizedString::from(normalized);
            if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut splits)?;
            }
            let model = self.inner.get_model();
            splits.tokenize(|split| model.tokenize(split.get()))?;
            Ok(splits.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        })
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
#[path = "tokenizer_tests.rs"]
pub(super) mod tests;
