//! A conversation as harmony's messages, and these as special tokens and text.

use minijinja::Value;

use super::contents::{DeveloperMessage, SystemMessage};
use super::pieces::Pieces;
use super::typescript::{field, items, list, text};
use super::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, problem};
use crate::generate::chat::Chat;
use crate::generate::error::{Error, Result};
use crate::generate::python::Dumps;
use crate::generate::python_budget::Budget;

const ANALYSIS: &str = "analysis";
const COMMENTARY: &str = "commentary";
const FINAL: &str = "final";

/// Tools that are called by their own name, where others are functions.
const BUILT_IN: [&str; 2] = ["browser", "python"];

/// One message.
#[derive(Debug, Clone, Default)]
struct Message {
    role: Role,
    name: Option<String>,
    recipient: Option<String>,
    channel: Option<String>,
    content_type: Option<String>,
    contents: Vec<Content>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Role {
    System,
    Developer,
    #[default]
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Clone)]
enum Content {
    Text(String),
    System(SystemMessage),
    Developer(DeveloperMessage),
}

/// The conversation in harmony's format.
pub(in crate::generate) fn render(chat: &Chat) -> Result<Pieces> {
    let mut reader = Reader::default();
    for (i, message) in chat.messages.iter().enumerate() {
        reader.read(i, message)?;
    }
    let mut messages = reader.messages;
    let variable = |name: &str| chat.variables.get(name).cloned();
    if !messages.iter().any(|message| message.role == Role::System) {
        let contents = vec![Content::System(SystemMessage::from_variables(variable)?)];
        messages.insert(0, Message { role: Role::System, contents, ..Message::default() });
    }
    if let Some(tools) = &chat.tools {
        add_tools(&mut messages, tools)?;
    }
    if variable("auto_drop_analysis").is_none_or(|drop| drop.is_true()) {
        drop_analysis(&mut messages);
    }
    let has_functions = messages.iter().flat_map(|message| &message.contents).any(Content::has_functions);
    let mut out = Pieces::default();
    for message in &messages {
        message.write(has_functions, &mut out)?;
    }
    if chat.generation_prompt {
        out.push_special(START);
        out.push_text(Role::Assistant.name());
    }
    Ok(out)
}

/// Puts a conversation's tools into its first developer message, or one of their own behind the system message.
fn add_tools(messages: &mut Vec<Message>, tools: &Value) -> Result<()> {
    let mut developers = messages.iter_mut().flat_map(|message| &mut message.contents);
    if let Some(developer) = developers.find_map(Content::developer) {
        return developer.add_functions(tools);
    }
    let mut developer = DeveloperMessage::default();
    developer.add_functions(tools)?;
    if developer.has_functions() {
        let at = messages.iter().position(|message| message.role != Role::System).unwrap_or(messages.len());
        let contents = vec![Content::Developer(developer)];
        messages.insert(at, Message { role: Role::Developer, contents, ..Message::default() });
    }
    Ok(())
}

/// Where the assistant has spoken last in the final channel, what it reasoned before its first final message is left
/// out: openai-harmony's rule.
fn drop_analysis(messages: &mut Vec<Message>) {
    let is_in = |message: &Message, channel: &str| message.channel.as_deref() == Some(channel);
    let last = messages.iter().rev().find(|message| message.role == Role::Assistant);
    if !last.is_some_and(|message| is_in(message, FINAL)) {
        return;
    }
    let Some(first) = messages.iter().position(|message| is_in(message, FINAL)) else { return };
    let mut at = 0;
    messages.retain(|message| {
        at += 1;
        at > first || !is_in(message, ANALYSIS)
    });
}

impl Message {
    fn write(&self, has_functions: bool, out: &mut Pieces) -> Result<()> {
        out.push_special(START);
        match (self.role, &self.name) {
            (Role::Tool, name) => out.push_text(name.as_deref().unwrap_or_default()),
            (role, None) => out.push_text(role.name()),
            (role, Some(name)) => {
                out.push_text(role.name());
                out.push_text(format!(":{name}"));
            }
        }
        if let Some(recipient) = self.recipient.as_ref().filter(|recipient| *recipient != "all") {
            out.push_text(format!(" to={recipient}"));
        }
        if let Some(channel) = &self.channel {
            out.push_special(CHANNEL);
            out.push_text(channel);
        }
        if let Some(content_type) = &self.content_type {
            // The one special token that a message's own fields may have, at this place alone.
            match content_type.strip_prefix(CONSTRAIN) {
                Some(form) => {
                    out.push_text(" ");
                    out.push_special(CONSTRAIN);
                    out.push_text(form);
                }
                None => out.push_text(format!(" {content_type}")),
            }
        }
        out.push_special(MESSAGE);
        for content in &self.contents {
            match content {
                Content::Text(text) => out.push_text(text),
                Content::System(system) => out.push_text(system.text(has_functions)?),
                Content::Developer(developer) => out.push_text(developer.text()?),
            }
        }
        let calls = self.role == Role::Assistant && self.recipient.is_some();
        out.push_special(if calls { CALL } else { END });
        Ok(())
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

impl Content {
    fn is_text(&self) -> bool {
        matches!(self, Content::Text(_))
    }

    fn has_functions(&self) -> bool {
        matches!(self, Content::Developer(developer) if developer.has_functions())
    }

    fn developer(&mut self) -> Option<&mut DeveloperMessage> {
        match self {
            Content::Developer(developer) => Some(developer),
            Content::Text(_) | Content::System(_) => None,
        }
    }
}

/// Reads a conversation's messages: of chat templates' form, where an assistant's message has `reasoning_content` and
/// `tool_calls`, or of openai-harmony's own, with `channel`, `recipient` and `content_type`.
#[derive(Default)]
struct Reader {
    messages: Vec<Message>,
    /// Calls so far: their id, and the tool's name.
    calls: Vec<(Option<String>, String)>,
}

impl Reader {
    fn read(&mut self, index: usize, value: &Value) -> Result<()> {
        let fail = |text: String| problem(format!("message {index}: {text}"));
        let role = text(value, "role").unwrap_or_default();
        let role = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool]
            .into_iter()
            .find(|known| known.name() == role)
            .ok_or_else(|| {
                fail(format!("role: expected system, developer, user, assistant or tool, found {role:?}"))
            })?;
        let contents = contents(role, value).map_err(fail)?;
        let mut message = Message {
            role,
            name: text(value, "name"),
            recipient: text(value, "recipient"),
            channel: text(value, "channel"),
            content_type: text(value, "content_type"),
            contents: contents.clone().unwrap_or_default(),
        };
        let is_own_form = [&message.recipient, &message.channel, &message.content_type].iter().any(|f| f.is_some());
        match role {
            Role::Assistant if !is_own_form => return self.assistant(message, value, contents.is_some(), fail),
            _ if contents.is_none() => return Err(fail("content: expected a text".into())),
            Role::System if message.contents.iter().all(Content::is_text) => message.role = Role::Developer,
            Role::Tool => {
                let name = message.name.take();
                let name = if is_own_form && name.is_some() { name } else { self.tool(name, value) };
                message.name = Some(name.ok_or_else(|| fail("name: expected that of a tool".into()))?);
                if !is_own_form {
                    message.recipient = Some("assistant".into());
                    message.channel = Some(COMMENTARY.into());
                }
            }
            _ => {}
        }
        if message.role == Role::Developer && message.contents.iter().all(Content::is_text) {
            message.contents = instructions(&message.contents);
        }
        self.messages.push(message);
        Ok(())
    }

    /// Reasoning, what is said, and calls: a message each.
    fn assistant(
        &mut self,
        message: Message,
        value: &Value,
        has_content: bool,
        fail: impl Fn(String) -> Error,
    ) -> Result<()> {
        let before = self.messages.len();
        let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| text(value, name));
        let calls = list(value, "tool_calls").unwrap_or_default();
        let said = |channel: &str, contents| Message { channel: Some(channel.into()), contents, ..message.clone() };
        if let Some(reasoning) = reasoning.filter(|text| !text.is_empty()) {
            self.messages.push(said(ANALYSIS, vec![Content::Text(reasoning)]));
        }
        let is_empty = |content: &Content| matches!(content, Content::Text(text) if text.is_empty());
        if calls.is_empty() && has_content {
            self.messages.push(said(FINAL, message.contents.clone()));
        } else if !message.contents.iter().all(is_empty) {
            self.messages.push(said(COMMENTARY, message.contents.clone()));
        }
        for call in &calls {
            let function = field(call, "function").unwrap_or_else(|| call.clone());
            let name = text(&function, "name").ok_or_else(|| fail(format!("tool_calls: no name in {call}")))?;
            let arguments = field(&function, "arguments").unwrap_or_default();
            let arguments = text_or_json(&arguments).map_err(&fail)?;
            self.calls.push((text(call, "id"), name.clone()));
            self.messages.push(Message {
                recipient: Some(address(&name)),
                content_type: Some(format!("{CONSTRAIN}json")),
                ..said(COMMENTARY, vec![Content::Text(arguments)])
            });
        }
        if self.messages.len() == before {
            return Err(fail("expected content, reasoning_content or tool_calls".into()));
        }
        Ok(())
    }

    /// Who a tool's message is of: its name, or that of the call it answers, which is the last one where no id says it.
    fn tool(&self, name: Option<String>, value: &Value) -> Option<String> {
        let id = text(value, "tool_call_id");
        let called = || self.calls.iter().rev().find(|(call, _)| id.is_none() || *call == id);
        let name = name.or_else(|| called().or(self.calls.last()).map(|(_, name)| name.clone()))?;
        Some(address(&name))
    }
}

/// The address of a tool.
fn address(name: &str) -> String {
    match name.contains('.') || BUILT_IN.contains(&name) {
        true => name.into(),
        false => format!("functions.{name}"),
    }
}

/// Parts of a message's content; `None` where it has none.
fn contents(role: Role, message: &Value) -> std::result::Result<Option<Vec<Content>>, String> {
    let content = field(message, "content").unwrap_or_default();
    if content.is_none() || content.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = content.as_str() {
        return Ok(Some(vec![Content::Text(text.into())]));
    }
    let Some(parts) = items(&content) else {
        return match role {
            Role::Tool => Ok(Some(vec![Content::Text(text_or_json(&content)?)])),
            _ => Err(format!("content: expected a text or a list of parts, found a {}", content.kind())),
        };
    };
    let part = |part: &Value| match text(part, "type").as_deref() {
        _ if part.as_str().is_some() => Ok(Content::Text(part.to_string())),
        Some("text") => text(part, "text").map(Content::Text).ok_or_else(|| format!("content: no text in {part}")),
        Some("system_content") if role == Role::System => {
            SystemMessage::from_content(part).map(Content::System).map_err(plain)
        }
        Some("developer_content") if matches!(role, Role::System | Role::Developer) => {
            DeveloperMessage::from_content(part).map(Content::Developer).map_err(plain)
        }
        Some(other) => {
            Err(format!("content: expected parts of type text, found {other:?} in a message of {}", role.name()))
        }
        None => Err(format!("content: no type in {part}")),
    };
    parts.iter().map(part).collect::<std::result::Result<_, _>>().map(Some)
}

/// Texts of a developer, or of a system message in chat templates' sense, as instructions.
fn instructions(texts: &[Content]) -> Vec<Content> {
    let text = |content: &Content| if let Content::Text(text) = content { text.clone() } else { String::new() };
    vec![Content::Developer(DeveloperMessage::of_instructions(texts.iter().map(text).collect()))]
}

/// A text, or another value as Python's `json.dumps` writes it.
fn text_or_json(value: &Value) -> std::result::Result<String, String> {
    match value.as_str() {
        Some(text) => Ok(text.into()),
        None if value.is_undefined() => Ok(String::new()),
        None => Dumps::default().text(value, Budget::none()).map_err(|e| e.to_string()),
    }
}

/// An error's problem, for one that says where it is.
fn plain(error: Error) -> String {
    match error {
        Error::Conversation { problem } => problem,
        other => other.to_string(),
    }
}
