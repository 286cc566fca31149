//! Chat templates: a conversation as the text that a model was trained to continue.
//!
//! A folder's template is a Jinja program. It runs as in Python's transformers (5.17, `apply_chat_template`): blocks'
//! line ends and indentation are trimmed, `tojson` is `json.dumps` without ASCII escapes and with keys in the order
//! given, `raise_exception`, `strftime_now`, `break` and `continue`, `{% generation %}`, methods of Python's strings and
//! dictionaries. A template that does not end, or makes texts without bound, is an error: by its steps, and by its time
//! where it has the engine compare what it has nested. One that has it write what it has nested ends by its steps before
//! anything is written, beside `~` and before `in` too, whose operands go through a filter that counts.
//!
//! Known differences: a loop over `none` is empty where Python fails,
//! there is no `%` between a text and values, and a field of `format` is at most 4096 wide.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, Value, escape_formatter};
use serde::Serialize;

use super::error::{Error, Result};
use super::folder;
use super::harmony;
use super::python;
use super::python_budget::{Budget, shown, written};
use super::python_filters;
use super::template_files::{self, DEFAULT};
use super::template_operands;

/// Steps that a rendering may take; 64 bytes of text count as one. A published template takes some hundreds for a turn.
const FUEL: u64 = 2_500_000;

/// Longest time of a rendering. [`FUEL`] is some seconds of steps on a slow processor. The engine counts no steps where it
/// compares values or seeks them in a dictionary, and goes through a list that holds another one twice, and so on forty
/// times, once for each of 2⁴⁰ ways.
const TIME: Duration = Duration::from_secs(20);

/// Stack of a rendering. A template can nest a list in itself at some seven steps a level, and the engine writes,
/// compares and frees a value recursively, with at most 640 bytes of stack a level (measured): 230 MB for [`FUEL`]. The
/// system gives pages of a stack as they are touched.
const STACK: usize = 256 << 20;

/// Most bytes of a template: published ones have some 20 KiB.
const LONGEST: usize = 128 << 10;

/// Special tokens that templates know by name.
const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A conversation, and what else a template is told.
#[derive(Debug, Clone, Default)]
pub struct Chat {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Value>,
    documents: Option<Value>,
    pub(super) generation_prompt: bool,
    pub(super) variables: BTreeMap<String, Value>,
    template: Option<String>,
}

impl Chat {
    /// No message yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a message of `role` (`system`, `user`, `assistant`, `tool`, ...) and text `content`.
    pub fn say(mut self, role: &str, content: &str) -> Self {
        self.messages.push(Value::from_pairs([("role", role), ("content", content)]));
        self
    }

    /// Adds a message with any fields: what serializes as an object. Its keys keep their order where the type's
    /// serialization does.
    pub fn message(mut self, message: impl Serialize) -> Self {
        self.messages.push(Value::from(Serde(message)));
        self
    }

    /// Tools that the model may call: a list of JSON schemas.
    pub fn tools(mut self, tools: impl Serialize) -> Self {
        self.tools = Some(Value::from(Serde(tools)));
        self
    }

    /// Documents to answer from: a list of objects.
    pub fn documents(mut self, documents: impl Serialize) -> Self {
        self.documents = Some(Value::from(Serde(documents)));
        self
    }

    /// Ends the text with the beginning of an assistant's turn, which the model then writes.
    pub fn generation_prompt(mut self, add: bool) -> Self {
        self.generation_prompt = add;
        self
    }

    /// Asks templates that know of it for a turn with or without reasoning.
    pub fn enable_thinking(self, enable: bool) -> Self {
        self.variable("enable_thinking", enable)
    }

    /// Sets any other variable of a template; one with a special token's name takes that token's place.
    pub fn variable(mut self, name: &str, value: impl Serialize) -> Self {
        self.variables.insert(name.into(), Value::from(Serde(value)));
        self
    }

    /// Uses the folder's template of this name. Otherwise it is `tool_use` where there are tools and a template of
    /// that name, else `default`.
    pub fn template(mut self, name: &str) -> Self {
        self.template = Some(name.into());
        self
    }

    /// From JSON text: a list of messages, or an object with `messages` and, at will, `tools`, `documents`,
    /// `add_generation_prompt`; its other fields are variables.
    ///
    /// # Errors
    /// [`Error::Conversation`].
    pub fn from_json(text: &str) -> Result<Self> {
        let fail = |problem: &str| Error::Conversation { problem: problem.into() };
        let value: Value = serde_json::from_str(text).map_err(|e| fail(&e.to_string()))?;
        let list = |value: &Value, name: &str| -> Result<Vec<Value>> {
            let is_list = value.kind() == ValueKind::Seq;
            let items = is_list.then(|| value.try_iter().ok()).flatten();
            Ok(items.ok_or_else(|| fail(&format!("{name}: expected a list, found a {}", value.kind())))?.collect())
        };
        let mut chat = Self::new();
        if value.kind() != ValueKind::Map {
            chat.messages = list(&value, "messages")?;
            return Ok(chat);
        }
        for key in value.try_iter().map_err(|e| fail(&e.to_string()))? {
            let field = value.get_item(&key).map_err(|e| fail(&e.to_string()))?;
            match key.as_str().unwrap_or_default() {
                "messages" => chat.messages = list(&field, "messages")?,
                "tools" => chat.tools = Some(field).filter(|v| !v.is_none()),
                "documents" => chat.documents = Some(field).filter(|v| !v.is_none()),
                "add_generation_prompt" => chat.generation_prompt = field.is_true(),
                name => _ = chat.variables.insert(name.into(), field),
            }
        }
        Ok(chat)
    }

    fn check(&self) -> Result<()> {
        let fail = |problem: String| Err(Error::Conversation { problem });
        if self.messages.is_empty() {
            return fail("there is no message".into());
        }
        for (i, message) in self.messages.iter().enumerate() {
            if message.kind() != ValueKind::Map {
                return fail(format!("message {i}: expected an object, found a {}", message.kind()));
            }
        }
        Ok(())
    }
}

/// The chat templates of a folder, compiled; or the format of gpt-oss, which needs none.
pub struct ChatTemplate {
    /// Conversations are rendered as openai-harmony does.
    is_harmony: bool,
    environment: Arc<Environment<'static>>,
    time: Duration,
    names: Vec<String>,
    special: Vec<(&'static str, Value)>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("names", &self.names)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// From a published folder: `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, or where there is
    /// none of these, `chat_template` of `tokenizer_config.json`, a text or a list of named ones. Special tokens are
    /// those of `tokenizer_config.json`, and of `special_tokens_map.json` where the former lacks one.
    ///
    /// A folder of gpt-oss without a template (one whose `config.json` says so, or whose tokenizer has harmony's tokens)
    /// gives [`harmony`](Self::harmony).
    ///
    /// # Errors
    /// [`Error::NoTemplate`] where the folder has none, [`Error::Template`] for one that does not compile, unreadable
    /// files.
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let config = folder::json(dir, "tokenizer_config.json")?;
        let map = folder::json(dir, "special_tokens_map.json")?;
        let mut sources = template_files::files(dir)?;
        if sources.is_empty() {
            sources = template_files::named(dir, config.get("chat_template"))?;
        }
        if sources.is_empty() && harmony::is_of(dir)? {
            return Ok(Self::harmony());
        }
        if sources.is_empty() {
            let problem = format!("{}: neither chat_template.jinja nor one in tokenizer_config.json", dir.display());
            return Err(Error::NoTemplate { problem });
        }
        let mut this = Self::empty();
        for (name, source) in &sources {
            this.add(name, source)?;
        }
        for name in SPECIAL {
            let token = [&config, &map].into_iter().find_map(|file| folder::token_text(file.get(name)?));
            this.special.extend(token.map(|token| (name, Value::from(token))));
        }
        Ok(this)
    }

    /// The format of gpt-oss, as openai-harmony 0.0.8 renders it. Beside what it takes of openai-harmony's own form (a
    /// message's `channel`, `recipient` and `content_type`, contents of type `system_content` and `developer_content`),
    /// messages are those of chat templates:
    ///
    /// - The system message is made of the variables `model_identity`, `knowledge_cutoff` (2024-06), `current_date` (none
    ///   if it is not given), `reasoning_effort` (`low`, `medium` or `high`) and `valid_channels`; none (`null`) leaves one
    ///   out.
    /// - A message of `system` or `developer` is the developer's instructions; the tools stand behind the first one's.
    /// - `reasoning_content` of an assistant goes to the channel `analysis`, `content` to `final`, or to `commentary`
    ///   beside `tool_calls`. Reasoning before the first final message is left out where the last message of an assistant
    ///   is final, unless `auto_drop_analysis` is false.
    /// - A message of `tool` is named by `name`, or by the call it answers.
    ///
    /// [`Tokenizer::encode_chat`](super::Tokenizer::encode_chat) gives openai-harmony's ids.
    pub fn harmony() -> Self {
        Self { is_harmony: true, names: vec![DEFAULT.into()], ..Self::empty() }
    }

    /// One template, without special tokens.
    ///
    /// # Errors
    /// [`Error::Template`] where it does not compile.
    pub fn from_source(source: &str) -> Result<Self> {
        let mut this = Self::empty();
        this.add(DEFAULT, source)?;
        Ok(this)
    }

    /// Replaces the clock of `strftime_now`, which is the local time: `strftime` gets the format and gives the text.
    pub fn with_strftime(mut self, strftime: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.environment).add_function("strftime_now", move |format: &str| strftime(format));
        self
    }

    /// Bounds a rendering to about so many steps; 64 bytes of text count as one. 2.5 million if this is not called, which
    /// is what the stack of a rendering suffices for whatever a template does: allow more to templates that are trusted.
    pub fn with_fuel(mut self, steps: u64) -> Self {
        Arc::make_mut(&mut self.environment).set_fuel(Some(steps));
        self
    }

    /// Bounds the time of a rendering, which is 20 s if this is not called. The thread of one that takes longer is left
    /// behind: nothing can end it but its steps, or the end of the process.
    pub fn with_time(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    /// Names of the templates.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The conversation as text. It begins with the special tokens that the template writes: encode it without adding
    /// any. Of harmony's format [`Tokenizer::encode_chat`](super::Tokenizer::encode_chat) gives the ids; the text does not
    /// say where a special token is meant and where a message has its text.
    ///
    /// # Errors
    /// [`Error::Conversation`], [`Error::NoTemplate`], [`Error::Refused`] where the template calls `raise_exception`,
    /// and [`Error::Template`] where it fails otherwise, takes too many steps or too much time.
    pub fn render(&self, chat: &Chat) -> Result<String> {
        if let Some(pieces) = self.harmony_pieces(chat)? {
            return Ok(pieces.text());
        }
        chat.check()?;
        let name = self.choose(chat)?.to_string();
        let mut context: BTreeMap<String, Value> =
            self.special.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
        context.extend(chat.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        // These are there, and none, also where they are not given.
        context.insert("messages".into(), Value::from(chat.messages.clone()));
        context.insert("tools".into(), chat.tools.clone().unwrap_or(Value::from(())));
        context.insert("documents".into(), chat.documents.clone().unwrap_or(Value::from(())));
        context.insert("add_generation_prompt".into(), Value::from(chat.generation_prompt));
        let problem = |problem: String| Error::Template { name: name.clone(), problem };
        let (result, rendered) = sync_channel(1);
        let (environment, of) = (Arc::clone(&self.environment), name.clone());
        let render = move || {
            let template = environment.get_template(&of);
            let text = template.and_then(|template| template.render(context)).map_err(|e| failure(&of, &e));
            // Nobody waits any more where the time was over.
            let _ = result.send(text);
        };
        let thread = std::thread::Builder::new().stack_size(STACK).spawn(render);
        thread.map_err(|e| problem(format!("no thread to render on: {e}")))?;
        rendered.recv_timeout(self.time).unwrap_or_else(|e| match e {
            RecvTimeoutError::Disconnected => Err(problem("the engine panicked".into())),
            RecvTimeoutError::Timeout => Err(problem(format!("it takes longer than {:?}; it may not end", self.time))),
        })
    }

    /// The conversation in harmony's format; `None` where a template renders it.
    pub(super) fn harmony_pieces(&self, chat: &Chat) -> Result<Option<harmony::Pieces>> {
        if !self.is_harmony {
            return Ok(None);
        }
        chat.check()?;
        self.choose(chat)?;
        harmony::render(chat).map(Some)
    }

    fn choose<'a>(&'a self, chat: &'a Chat) -> Result<&'a str> {
        let has = |name: &str| self.names.iter().any(|n| n == name);
        let named = chat.template.as_deref();
        let by_use = || if chat.tools.is_some() && has("tool_use") { "tool_use" } else { DEFAULT };
        let name = named.unwrap_or_else(by_use);
        if has(name) {
            return Ok(name);
        }
        Err(Error::NoTemplate { problem: format!("none of name {name:?}; there are {:?}", self.names) })
    }

    fn empty() -> Self {
        let mut environment = Environment::new();
        let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
        // The delimiters are the usual ones, which no builder refuses.
        environment.set_syntax(syntax.unwrap_or_default());
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        // Errors keep no values, which would outlive the rendering's stack.
        environment.set_debug(false);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(|out, state, value| {
            if value.as_object().is_some() {
                shown(value, Budget::of(state))?;
            }
            match value.as_object().is_none() && value.is_number() {
                true if !value.is_integer() => {
                    let x = f64::try_from(value.clone())?;
                    out.write_str(&python::float(x)).map_err(|_| minijinja::Error::from(ErrorKind::WriteFailure))
                }
                _ => escape_formatter(out, state, value),
            }
        });
        python_filters::add(&mut environment);
        template_operands::add(&mut environment);
        environment.add_filter("tojson", python::tojson);
        environment.add_filter("int", python::int);
        environment.add_filter("float", python::to_float);
        environment.add_test("sequence", python::is_sequence);
        environment.add_function("cycler", minijinja_contrib::globals::cycler);
        environment.add_function("joiner", minijinja_contrib::globals::joiner);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        Self {
            is_harmony: false,
            environment: Arc::new(environment),
            time: TIME,
            names: Vec::new(),
            special: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, source: &str) -> Result<()> {
        // Jinja reads every kind of line end as one.
        let source = without_generation_tags(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let problem = |problem: String| Error::Template { name: name.into(), problem };
        if source.len() > LONGEST {
            return Err(problem(format!("expected at most {LONGEST} bytes, found {}", source.len())));
        }
        let source = template_operands::with_counted_operands(&source).map_err(problem)?;
        // The engine's compiler goes as deep as the template.
        let environment = Arc::make_mut(&mut self.environment);
        std::thread::scope(|scope| {
            let add = || environment.add_template_owned(name.to_string(), source).map_err(|e| failure(name, &e));
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, add);
            let thread = thread.map_err(|e| problem(format!("no thread to compile on: {e}")))?;
            thread.join().unwrap_or_else(|_| Err(problem("the engine panicked".into())))
        })?;
        self.names.push(name.into());
        Ok(())
    }
}

/// The argument of `raise_exception`, on its way through the engine's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(state: &State, message: Value) -> std::result::Result<Value, minijinja::Error> {
    let raised = Raised(match message.as_str() {
        Some(text) => text.into(),
        None => written(format_args!("{message}"), Budget::of(state))?,
    });
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(raised))
}

fn failure(name: &str, error: &minijinja::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = cause {
        if let Some(Raised(message)) = e.downcast_ref() {
            return Error::Refused { name: name.into(), message: message.clone() };
        }
        cause = e.source();
    }
    let mut problem = error.to_string();
    if error.kind() == ErrorKind::OutOfFuel {
        problem.push_str("; it may not end, or take more steps than a rendering may, or make more than these pay for");
    }
    Error::Template { name: name.into(), problem }
}

fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

/// transformers' block `generation` marks what an assistant said and writes it as it is; names set in it stay in it.
/// The engine has no such block, but `with` is one that does the same.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(close) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(close + 2);
        let inner = &tag[2..close];
        let trimmed = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        match trimmed {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
