//! What a generation is asked for, and what comes of it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::sampling::Sampling;

/// A prompt, and how it is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Ids of the prompt; one at least.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens to generate; one at least.
    pub max_tokens: usize,
    /// Tokens that end the text and are no part of it, such as [`Tokenizer::eos`](super::Tokenizer::eos).
    pub stop_tokens: Vec<u32>,
    /// Texts that end the text and are no part of it. They need a tokenizer. Where one is the text of a special
    /// token, which a text leaves out, that token ends it too.
    pub stop_strings: Vec<String>,
}

impl Request {
    /// Greedy, of at most `max_tokens` tokens; nothing else ends it.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self { prompt, sampling: Sampling::default(), max_tokens, stop_tokens: Vec::new(), stop_strings: Vec::new() }
    }

    /// The checks of a request that [`Generator::run`](super::Generator::run) makes before anything runs, for callers
    /// that know a decoder's vocabulary and context before it is loaded. `index` is what errors name it by.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::PromptTooLong`], [`Error::IdPastEmbedding`], [`Error::Parameter`].
    pub fn check(&self, index: usize, vocabulary: usize, context: usize) -> Result<()> {
        let (request, tokens, rows) = (index, self.prompt.len(), vocabulary);
        if self.prompt.is_empty() {
            return Err(Error::EmptyPrompt { request });
        }
        if tokens >= context {
            return Err(Error::PromptTooLong { request, tokens, context });
        }
        if let Some(position) = self.prompt.iter().position(|id| *id as usize >= rows) {
            return Err(Error::IdPastEmbedding { request, position, id: self.prompt[position], rows });
        }
        if self.max_tokens == 0 {
            return Err(Error::Parameter { name: "max_tokens", expected: "1 at least", found: "0".into() });
        }
        self.sampling.check()
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// With this token.
    Token(u32),
    /// With this text, whose tokens are among the output's. Where a longer stop string that begins before it was possible, the
    /// tokens until it was not are too, whatever has ended them.
    Text(String),
    /// It has as many tokens as were asked for.
    MaxTokens,
    /// Prompt and text fill the decoder's context.
    Context,
    /// The caller's function said so.
    Caller,
}

/// What ends where the caller's function of [`Generator::run`](super::Generator::run) breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOf {
    /// The request whose token it was told of; the others go on.
    Request,
    /// All of the run.
    Run,
}

/// One more token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Index of the request.
    pub request: usize,
    /// The token.
    pub token: u32,
    /// Text that is certain with it: whole characters, and no beginning of a stop string. Empty without a tokenizer.
    pub text: &'a str,
    /// Set with a sequence's last token.
    pub finish: Option<&'a Finish>,
}

/// A request's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Generated ids, the one that ended it included.
    pub tokens: Vec<u32>,
    /// Their text without special tokens, stop tokens and what follows a stop string, of the messages that
    /// [`Generator::channels`](super::Generator::channels) says. Empty without a tokenizer.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// The text ends with U+FFFD in place of a character that the tokens are not all of.
    pub incomplete: bool,
}

impl Output {
    /// The text, for callers to whom a part of a character is a fault; `request` is the index to name.
    ///
    /// # Errors
    /// [`Error::IncompleteCharacter`].
    pub fn complete_text(&self, request: usize) -> Result<&str> {
        match self.incomplete {
            true => Err(Error::IncompleteCharacter { request, tokens: self.tokens.len() }),
            false => Ok(&self.text),
        }
    }
}

/// How many tokens a run had, and how long it took them, on this rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Tokens that were generated.
    pub generated_tokens: usize,
    /// Prompts' tokens that batches began with, in one step or several. The rest of longer prompts came a token a step,
    /// beside others' decoding.
    pub prefill_tokens: usize,
    /// Time of these first steps, with the making of caches and the choice of the first tokens.
    pub prefill: Duration,
    /// Steps after these, but for those that were [captured](super::Decoder::captures).
    pub decode_steps: usize,
    /// Tokens that were generated in these.
    pub decode_tokens: usize,
    /// Their time, with the choice of tokens and the caller's function.
    pub decode: Duration,
    /// Steps after the first ones that were captured into a graph, which the others replay: on a GPU one a batch, and one
    /// whenever its cache has moved to other memory. Their tokens count as generated, and in no rate.
    pub capture_steps: usize,
    /// Their time.
    pub capture: Duration,
}

impl Stats {
    /// Tokens of prompts a second; 0 where there were none.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prefill_tokens, self.prefill)
    }

    /// Generated tokens a second, of all sequences together; 0 where there were none.
    pub fn decode_rate(&self) -> f64 {
        rate(self.decode_tokens, self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) }
}
