//! The loop: prompts in, tokens and text out.

use std::ops::ControlFlow;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::decoder::{CacheKind, CacheRequest, Decoder, StepPlan};
use super::error::{Error, Result};
use super::harmony::{ChannelStream, Channels};
use super::request::{EndOf, Event, Finish, Output, Request, Stats};
use super::sampling::{Sampler, choose_all};
use super::stop::StopStrings;
use super::tokenizer::Tokenizer;

/// Most tokens of a forward that reads prompts, where nothing else is asked for
/// ([`Generator::prefill_tokens`]).
pub const PREFILL_TOKENS: usize = 16_384;

/// Generates with a decoder.
#[derive(Debug)]
pub struct Generator<'a, D> {
    decoder: D,
    tokenizer: Option<&'a Tokenizer>,
    max_sequences: usize,
    spread: usize,
    prefill_tokens: usize,
    cache: CacheKind,
    channels: Channels,
}

impl<'a, D: Decoder> Generator<'a, D> {
    /// Without a tokenizer there are ids alone.
    ///
    /// # Errors
    /// [`Error::TokenPastEmbedding`].
    pub fn new(decoder: D, tokenizer: Option<&'a Tokenizer>) -> Result<Self> {
        if let Some(tokenizer) = tokenizer {
            tokenizer.check_embedding(decoder.vocabulary())?;
        }
        Ok(Self {
            decoder,
            tokenizer,
            max_sequences: 64,
            spread: 32,
            prefill_tokens: PREFILL_TOKENS,
            cache: CacheKind::default(),
            channels: Channels::default(),
        })
    }

    /// Most sequences in a batch, 64 if this is not called; 0 counts as 1.
    pub fn max_sequences(mut self, sequences: usize) -> Self {
        self.max_sequences = sequences.max(1);
        self
    }

    /// Most tokens by which prompts of a batch differ in length, 32 if this is not called. All sequences of a batch
    /// have one length in the decoder's cache: it begins with as many tokens as the shortest prompt has, and longer
    /// prompts go on a token a step while shorter ones are already continued. Prompts that differ by more come in
    /// batches of their own, one after another.
    pub fn spread(mut self, tokens: usize) -> Self {
        self.spread = tokens;
        self
    }

    /// Most tokens of a forward that reads prompts, those of all sequences of the batch together, [`PREFILL_TOKENS`] if this
    /// is not called: longer prompts come in pieces, each a step of the decoder, so that the memory of a forward does not
    /// grow with them. A piece has a token of each sequence at least. It changes no token, up to how the decoder rounds,
    /// and to rotations that change with a sequence's length.
    pub fn prefill_tokens(mut self, tokens: usize) -> Self {
        self.prefill_tokens = tokens;
        self
    }

    /// The kind of the decoder's caches, [`CacheKind::Static`] if this is not called. It changes no token, up to how the
    /// decoder rounds.
    pub fn cache(mut self, kind: CacheKind) -> Self {
        self.cache = kind;
        self
    }

    /// Which messages of an answer are its text, [`Channels::Final`] if this is not called. It counts for tokenizers that
    /// [have channels](Tokenizer::has_channels).
    pub fn channels(mut self, channels: Channels) -> Self {
        self.channels = channels;
        self
    }

    /// Continues all prompts; outputs are in the requests' order. `each` sees every token as it comes, and ends that
    /// request or the run with `Break`: what has not ended then ends with [`Finish::Caller`]. A sequence's tokens come from its
    /// request alone, up to how the decoder rounds in a batch, and to rotations that change with the length of a batch's
    /// sequences. Collective where the decoder is: each rank runs requests of its own, or none.
    ///
    /// # Errors
    /// A request that cannot be, before anything runs; the tokenizer's, logits that are no numbers, the decoder's. The
    /// other ranks are told.
    pub fn run(
        &self,
        requests: &[Request],
        mut each: impl FnMut(Event<'_>) -> ControlFlow<EndOf>,
    ) -> Result<(Vec<Output>, Stats)> {
        let mut run = Run {
            generator: self,
            stats: Stats { prompt_tokens: requests.iter().map(|r| r.prompt.len()).sum(), ..Stats::default() },
            broken: false,
            meeting: false,
        };
        let outputs = run.all(requests, &mut each);
        if let (Err(error), false) = (&outputs, run.meeting) {
            self.decoder.refuse(&error.refusal_reason());
        }
        Ok((outputs?, run.stats))
    }

    fn check(&self, index: usize, request: &Request) -> Result<()> {
        request.check(index, self.decoder.vocabulary(), self.decoder.context())?;
        if self.tokenizer.is_none() && !request.stop_strings.is_empty() {
            let found = format!("{:?}", request.stop_strings);
            return Err(Error::Parameter { name: "stop_strings", expected: "none without a tokenizer", found });
        }
        Ok(())
    }

    /// An empty cache for a batch. The last token of a sequence takes no place in it.
    fn cache_of(&self, rows: &[Sequence<'_>]) -> Result<D::Cache<'_>> {
        if rows.is_empty() {
            let (prompt_tokens, max_tokens, kind) = (1, self.decoder.context(), self.cache);
            return Ok(self.decoder.cache(CacheRequest { sequences: 0, prompt_tokens, max_tokens, kind })?);
        }
        let longest = |length: &dyn Fn(&Sequence<'_>) -> usize| rows.iter().map(length).max().unwrap_or(1);
        let prompt_tokens = longest(&|row| row.prompt.len());
        let max_tokens = longest(&|row| row.prompt.len().saturating_add(row.max_tokens - 1));
        let max_tokens = max_tokens.min(self.decoder.context());
        let (sequences, kind) = (rows.len(), self.cache);
        Ok(self.decoder.cache(CacheRequest { sequences, prompt_tokens, max_tokens, kind })?)
    }

    /// Requests that share a cache: in order of length, so that those of a batch differ by as little as can be.
    fn batches(&self, requests: &[Request]) -> Vec<Vec<usize>> {
        let length = |i: usize| requests[i].prompt.len();
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|i| length(*i));
        let mut batches: Vec<Vec<usize>> = Vec::new();
        for i in order {
            match batches.last_mut() {
                Some(batch) if batch.len() < self.max_sequences && length(i) - length(batch[0]) <= self.spread => {
                    batch.push(i);
                }
                _ => batches.push(vec![i]),
            }
        }
        batches
    }
}

/// A call of [`Generator::run`].
struct Run<'g, 'a, D> {
    generator: &'g Generator<'a, D>,
    stats: Stats,
    /// The caller's function has ended the run.
    broken: bool,
    /// Within [`Decoder::agree`], whose failures every rank has, or behind the last one. All others may be this rank's
    /// alone: those of a step behind its last collective, of sampling, of a tokenizer.
    meeting: bool,
}

/// What tokens are chosen from.
enum Candidates {
    /// The token of each row's largest logit.
    Likeliest(Vec<u32>),
    /// All rows' logits, `[B · V]`.
    Logits(Vec<f32>),
}

/// One request on its way.
struct Sequence<'a> {
    request: usize,
    prompt: &'a [u32],
    max_tokens: usize,
    stop_tokens: Vec<u32>,
    sampler: Sampler,
    stream: Option<ChannelStream<'a>>,
    stops: StopStrings,
    tokens: Vec<u32>,
    text: String,
    incomplete: bool,
    finish: Option<Finish>,
}

impl<'g, D: Decoder> Run<'g, '_, D> {
    fn all(
        &mut self,
        requests: &[Request],
        each: &mut impl FnMut(Event<'_>) -> ControlFlow<EndOf>,
    ) -> Result<Vec<Output>> {
        let mut sequences = Vec::with_capacity(requests.len());
        for (i, request) in requests.iter().enumerate() {
            self.generator.check(i, request)?;
            sequences.push(Some(Sequence::new(i, request, self.generator.tokenizer, self.generator.channels)?));
        }
        let mut done: Vec<Option<Sequence<'_>>> = (0..requests.len()).map(|_| None).collect();
        for batch in self.generator.batches(requests) {
            let mut members: Vec<Sequence<'_>> = batch.iter().filter_map(|i| sequences[*i].take()).collect();
            if !self.broken {
                self.batch(&mut members, &mut done, each)?;
            }
            members.into_iter().for_each(|s| file(s, &mut done));
        }
        // Other ranks may go on; their experts' tokens pass through this one.
        let mut cache = self.generator.cache_of(&[])?;
        loop {
            let own = StepPlan { goes_on: false, ..self.decoder().plan(1, &cache) };
            let plan = self.agree(own)?;
            if !plan.goes_on {
                break;
            }
            self.decoder().set_plan(plan, &mut cache);
            self.step(&[], 1, &mut cache)?;
        }
        // All ranks end: a failure from here on meets nobody.
        self.meeting = true;
        done.into_iter().flatten().map(Sequence::output).collect()
    }

    fn decoder(&self) -> &'g D {
        &self.generator.decoder
    }

    fn agree(&mut self, own: StepPlan) -> Result<StepPlan> {
        self.meeting = true;
        let plan = self.decoder().agree(own)?;
        self.meeting = false;
        Ok(plan)
    }

    /// Logits `[B, V]` of the last of so many ids a sequence.
    fn step(&mut self, ids: &[u32], len: usize, cache: &mut D::Cache<'g>) -> Result<Tensor> {
        let (sequences, vocabulary) = (ids.len() / len, self.decoder().vocabulary());
        let tokens = Tensor::from_slice(ids, (sequences, len), &Device::Cpu)?;
        let logits = self.decoder().step(&tokens, cache)?;
        if logits.dims() != [sequences, vocabulary] {
            return Err(Error::Model(crate::Error::Shape {
                call: "Decoder::step",
                tensor: "logits".into(),
                expected: format!("[{sequences}, {vocabulary}]"),
                found: logits.dims().to_vec(),
            }));
        }
        Ok(logits)
    }

    /// What the rows' next tokens are chosen from: the device's own choice where none of the rows asks for more, without
    /// a copy of the logits.
    fn candidates(&self, rows: &[&Sequence<'_>], logits: &Tensor, cache: &D::Cache<'g>) -> Result<Candidates> {
        if rows.is_empty() {
            // A piece of a prompt: nothing waits for the device.
            return Ok(Candidates::Likeliest(Vec::new()));
        }
        let logits = logits.to_dtype(DType::F32)?;
        if rows.iter().all(|row| row.sampler.is_plain())
            && let Some(ids) = self.decoder().likeliest(cache)?
            // A sum that is no number has one among its terms, or is too large: then the logits are looked at one by one.
            && logits.sum(1)?.to_vec1::<f32>()?.iter().all(|sum| sum.is_finite())
        {
            if ids.len() != logits.dim(0)? {
                return Err(Error::Model(crate::Error::Shape {
                    call: "Decoder::likeliest",
                    tensor: "ids".into(),
                    expected: format!("[{}]", logits.dim(0)?),
                    found: vec![ids.len()],
                }));
            }
            return Ok(Candidates::Likeliest(ids));
        }
        let logits = logits.flatten_all()?.to_vec1()?;
        self.decoder().check(cache)?;
        Ok(Candidates::Logits(logits))
    }

    /// Runs one batch until all of it has ended. Rows whose sequence has ended leave it where the decoder can do that.
    fn batch<'s>(
        &mut self,
        rows: &mut Vec<Sequence<'s>>,
        done: &mut [Option<Sequence<'s>>],
        each: &mut impl FnMut(Event<'_>) -> ControlFlow<EndOf>,
    ) -> Result<()> {
        let vocabulary = self.decoder().vocabulary();
        let start = Instant::now();
        let mut cache = self.generator.cache_of(rows)?;
        self.stats.prefill += start.elapsed();
        let first = rows.iter().map(|row| row.prompt.len()).min().unwrap_or(0);
        let piece = (self.generator.prefill_tokens / rows.len().max(1)).max(1);
        let (mut len, mut next) = (0, first.min(piece));
        while !self.broken && rows.iter().any(|row| row.finish.is_none()) {
            let plan = self.agree(StepPlan { goes_on: true, ..self.decoder().plan(next, &cache) })?;
            self.decoder().set_plan(plan, &mut cache);
            let (start, captures) = (Instant::now(), self.decoder().captures(&cache));
            let ids: Vec<u32> = rows.iter().flat_map(|row| (len..len + next).map(|at| row.input(at))).collect();
            let logits = self.step(&ids, next, &mut cache)?;
            let is_prefill = len < first;
            len += next;
            next = first.saturating_sub(len).clamp(1, piece);
            let chooses = |row: &Sequence<'_>| row.finish.is_none() && len >= row.prompt.len();
            let choosing: Vec<&Sequence<'_>> = rows.iter().filter(|row| chooses(row)).collect();
            let candidates = self.candidates(&choosing, &logits, &cache)?;
            let mut choosing: Vec<(usize, &mut Sequence<'_>)> =
                rows.iter_mut().enumerate().filter(|(_, row)| chooses(row)).collect();
            let tokens = choose(&mut choosing, candidates, vocabulary)?;
            let mut chosen = 0;
            for ((_, row), token) in choosing.into_iter().zip(tokens) {
                if self.broken {
                    break;
                }
                chosen += 1;
                self.broken = row.advance(token, len >= self.decoder().context(), each)?.is_break();
            }
            self.stats.generated_tokens += chosen;
            if is_prefill {
                self.stats.prefill_tokens += ids.len();
                self.stats.prefill += start.elapsed();
            } else if self.decoder().captures(&cache) > captures {
                self.stats.capture_steps += 1;
                self.stats.capture += start.elapsed();
            } else {
                self.stats.decode_steps += 1;
                self.stats.decode_tokens += chosen;
                self.stats.decode += start.elapsed();
            }
            self.leave(rows, done, &mut cache)?;
        }
        Ok(())
    }

    fn leave<'s>(
        &self,
        rows: &mut Vec<Sequence<'s>>,
        done: &mut [Option<Sequence<'s>>],
        cache: &mut D::Cache<'g>,
    ) -> Result<()> {
        let stay: Vec<usize> = (0..rows.len()).filter(|i| rows[*i].finish.is_none()).collect();
        if stay.is_empty() || stay.len() == rows.len() || !self.decoder().keep(&stay, cache)? {
            return Ok(());
        }
        let (going, gone): (Vec<_>, Vec<_>) = rows.drain(..).partition(|row| row.finish.is_none());
        *rows = going;
        gone.into_iter().for_each(|row| file(row, done));
        Ok(())
    }
}

/// The next token of each of these rows, which are a batch's with their places in it.
fn choose(rows: &mut [(usize, &mut Sequence<'_>)], candidates: Candidates, vocabulary: usize) -> Result<Vec<u32>> {
    let mut logits = match candidates {
        Candidates::Likeliest(ids) => return Ok(rows.iter().map(|(at, _)| ids[*at]).collect()),
        Candidates::Logits(logits) => logits,
    };
    let mut of_rows: Vec<Option<&mut [f32]>> = logits.chunks_mut(vocabulary.max(1)).map(Some).collect();
    let requests: Vec<usize> = rows.iter().map(|(_, row)| row.request).collect();
    let work = rows.iter_mut().filter_map(|(at, row)| Some((&mut row.sampler, of_rows.get_mut(*at)?.take()?)));
    let of_request = |(token, request): (Result<u32>, usize)| {
        token.map_err(|error| match error {
            Error::Logits { problem } => Error::Logits { problem: format!("{problem}, in request {request}") },
            other => other,
        })
    };
    choose_all(work.collect()).into_iter().zip(requests).map(of_request).collect()
}

/// Puts a sequence in its request's place.
fn file<'s>(sequence: Sequence<'s>, done: &mut [Option<Sequence<'s>>]) {
    let request = sequence.request;
    done[request] = Some(sequence);
}

impl<'a> Sequence<'a> {
    fn new(request: usize, r: &'a Request, tokenizer: Option<&'a Tokenizer>, channels: Channels) -> Result<Self> {
        // Special tokens are left out of the text; spelled by other tokens it is found there.
        let special = |text: &String| tokenizer.and_then(|t| t.id(text).filter(|id| t.is_special(*id)));
        let stop_tokens = r.stop_tokens.iter().copied().chain(r.stop_strings.iter().filter_map(special)).collect();
        Ok(Self {
            request,
            prompt: &r.prompt,
            max_tokens: r.max_tokens,
            stop_tokens,
            sampler: Sampler::new(r.sampling, &r.prompt)?,
            stream: tokenizer.map(|t| t.channel_stream(&r.prompt, channels)),
            stops: StopStrings::new(&r.stop_strings),
            tokens: Vec::new(),
            text: String::new(),
            incomplete: false,
            finish: None,
        })
    }

    /// The id at a position; behind the last one, where a sequence has ended but its row has not left, that one again.
    fn input(&self, at: usize) -> u32 {
        let generated = || self.tokens.get(at - self.prompt.len()).or(self.tokens.last());
        self.prompt.get(at).or_else(generated).copied().unwrap_or(0)
    }

    /// Takes the next token and tells the caller.
    fn advance(
        &mut self,
        token: u32,
        is_full: bool,
        each: &mut impl FnMut(Event<'_>) -> ControlFlow<EndOf>,
    ) -> Result<ControlFlow<EndOf>> {
        self.tokens.push(token);
        let mut text = String::new();
        if self.stop_tokens.contains(&token) {
            self.finish = Some(Finish::Token(token));
        } else {
            if let Some(stream) = &mut self.stream {
                let piece = stream.push(token)?;
                self.show(&piece, &mut text);
            }
            if self.finish.is_none() && self.tokens.len() >= self.max_tokens {
                self.finish = Some(Finish::MaxTokens);
            } else if self.finish.is_none() && is_full {
                self.finish = Some(Finish::Context);
            }
        }
        if self.finish.is_some() {
            self.end(&mut text)?;
        }
        self.text.push_str(&text);
        let event = Event { request: self.request, token, text: &text, finish: self.finish.as_ref() };
        let flow = each(event);
        if flow == ControlFlow::Break(EndOf::Request) {
            self.end_for_caller()?;
            return Ok(ControlFlow::Continue(()));
        }
        Ok(flow)
    }

    /// Ends a sequence that has not ended; what is held back joins its text.
    fn end_for_caller(&mut self) -> Result<()> {
        if self.finish.is_none() {
            let mut text = String::new();
            self.finish = Some(Finish::Caller);
            self.end(&mut text)?;
            self.text.push_str(&text);
        }
        Ok(())
    }

    /// Appends what of a piece belongs to no stop string.
    fn show(&mut self, piece: &str, text: &mut String) {
        let (shown, stop) = self.stops.push(piece);
        text.push_str(&shown);
        if let Some(stop) = stop {
            self.finish = Some(Finish::Text(stop));
        }
    }

    /// Appends what stream and stop strings held back.
    fn end(&mut self, text: &mut String) -> Result<()> {
        let Some(stream) = self.stream.take() else { return Ok(()) };
        if matches!(self.finish, Some(Finish::Text(_))) {
            return Ok(());
        }
        let end = stream.finish()?;
        self.show(&end.text, text);
        if !matches!(self.finish, Some(Finish::Text(_))) {
            self.incomplete = end.incomplete;
            let (rest, stop) = self.stops.finish();
            text.push_str(&rest);
            if let Some(stop) = stop {
                self.finish = Some(Finish::Text(stop));
            }
        }
        Ok(())
    }

    fn output(mut self) -> Result<Output> {
        self.end_for_caller()?;
        let finish = self.finish.unwrap_or(Finish::Caller);
        Ok(Output { tokens: self.tokens, text: self.text, finish, incomplete: self.incomplete })
    }
}

#[cfg(test)]
#[path = "generator_tests/mod.rs"]
mod tests;
