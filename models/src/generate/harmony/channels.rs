//! The text of an answer that comes in channels.

use super::{CHANNEL, CONSTRAIN, TOKENS};
use crate::generate::error::Result;
use crate::generate::stream::{TextEnd, TextStream};
use crate::generate::tokenizer::Tokenizer;

/// What is shown of an answer in which each message names its channel, as gpt-oss writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Channels {
    /// The messages of the channel `final`, and text that belongs to no message.
    #[default]
    Final,
    /// All messages, each behind a line with its channel, and with the tool that it calls.
    All,
    /// The text of all tokens but the special ones, channels' names among it.
    Raw,
}

/// Ids of the tokens that divide a text into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::generate) struct Marks {
    start: u32,
    channel: u32,
    message: u32,
    /// In headers, before a content's form.
    constrain: Option<u32>,
    /// Those that end one.
    ends: [u32; 3],
}

impl Marks {
    /// `None` where one of them is no token. A tokenizer may have none that ends the last message.
    pub fn of(id: impl Fn(&str) -> Option<u32>) -> Option<Self> {
        let [start, channel, message, end, call] = TOKENS.map(&id);
        let (end, call) = (end?, call?);
        let ends = [end, call, id("<|return|>").unwrap_or(end)];
        let constrain = id(CONSTRAIN);
        Some(Self { start: start?, channel: channel?, message: message?, constrain, ends })
    }
}

/// Where in a message a text is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// In what comes before its content: role, recipient, channel, with the text of the channel's token before that.
    Header(String),
    /// In its content, which is shown or not.
    Content { shown: bool },
    /// Behind its end.
    Between,
}

/// Turns ids into the text that is shown of them.
#[derive(Debug, Clone)]
pub(in crate::generate) struct ChannelStream<'a> {
    tokenizer: &'a Tokenizer,
    stream: TextStream<'a>,
    marks: Option<Marks>,
    channels: Channels,
    place: Place,
    /// Something has been shown.
    began: bool,
}

impl<'a> ChannelStream<'a> {
    /// Without marks all text is shown.
    pub fn new(tokenizer: &'a Tokenizer, marks: Option<Marks>, channels: Channels, prompt: &[u32]) -> Self {
        let stream = tokenizer.stream(prompt);
        let mut this = Self { tokenizer, stream, marks, channels, place: Place::Content { shown: true }, began: false };
        let is_mark = |marks: Marks, id: u32| id == marks.start || id == marks.channel || id == marks.message;
        let ends = |marks: Marks, id: u32| marks.ends.contains(&id);
        let Some(marks) = marks else { return this };
        // What the prompt leaves open goes on.
        let last = prompt.iter().rposition(|id| is_mark(marks, *id) || ends(marks, *id));
        let open = last.filter(|at| is_mark(marks, prompt[*at]));
        let Some(open) = open else {
            if last.is_some() {
                this.place = Place::Between;
            }
            return this;
        };
        let start = prompt[..=open].iter().rposition(|id| *id == marks.start).unwrap_or(open);
        let mut message = Self { place: Place::Between, ..this.clone() };
        for id in &prompt[start..=open] {
            _ = message.push(*id);
        }
        this.place = match message.place {
            // Ids behind the last mark are part of the header.
            Place::Header(text) => {
                Place::Header(text + &tokenizer.decode(&prompt[open + 1..], true).unwrap_or_default())
            }
            place => place,
        };
        this
    }

    /// Takes the next id and gives the text that is shown with it, which may be none.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::generate::Error::Tokenizer).
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(marks) = self.marks else { return self.stream.push(id) };
        if ![marks.start, marks.channel, marks.message].contains(&id) && !marks.ends.contains(&id) {
            let mut text = self.stream.push(id)?;
            // It ends the word before it.
            if let (Place::Header(_), true) = (&self.place, marks.constrain == Some(id)) {
                text.push(' ');
            }
            return Ok(self.take(text));
        }
        // A message ends with its characters.
        let stream = std::mem::replace(&mut self.stream, self.tokenizer.stream(&[]));
        let rest = stream.finish()?.text;
        let mut out = self.take(rest);
        let header = match &self.place {
            Place::Header(header) => header.clone(),
            Place::Content { .. } | Place::Between => String::new(),
        };
        self.place = match id {
            id if id == marks.start => Place::Header(String::new()),
            id if id == marks.channel => Place::Header(header + CHANNEL),
            id if id == marks.message => {
                let (heading, is_final) = heading(&header);
                let shown = self.channels == Channels::All || is_final;
                if self.channels == Channels::All {
                    out.push_str(if self.began { "\n\n" } else { "" });
                    out.push_str(&heading);
                    self.began = true;
                } else if shown && self.began {
                    out.push('\n');
                }
                Place::Content { shown }
            }
            _ => Place::Between,
        };
        Ok(out)
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::generate::Error::Tokenizer).
    pub fn finish(mut self) -> Result<TextEnd> {
        let stream = std::mem::replace(&mut self.stream, self.tokenizer.stream(&[]));
        let end = stream.finish()?;
        let text = self.take(end.text);
        Ok(TextEnd { incomplete: end.incomplete && !text.is_empty(), text })
    }

    /// The part of a text that is shown where it stands.
    fn take(&mut self, text: String) -> String {
        match &mut self.place {
            Place::Header(header) => header.push_str(&text),
            Place::Content { shown: true } => {
                self.began |= !text.is_empty();
                return text;
            }
            Place::Content { shown: false } | Place::Between => {}
        }
        String::new()
    }
}

/// A line for a header's channel and recipient, and whether a message of it is shown in any case: one of the channel
/// `final`, or without a channel, to nobody in particular.
fn heading(header: &str) -> (String, bool) {
    let (before, after) = header.split_once(CHANNEL).unwrap_or((header, ""));
    let channel = after.split_whitespace().next().filter(|word| !word.starts_with("to=")).unwrap_or("");
    let recipient = before.split_whitespace().chain(after.split_whitespace()).find_map(|word| word.strip_prefix("to="));
    let is_final = recipient.is_none() && (channel == "final" || channel.is_empty());
    let mut line = if channel.is_empty() { "message".to_string() } else { channel.to_string() };
    if let Some(recipient) = recipient {
        line += &format!(" to {recipient}");
    }
    (format!("[{line}]\n"), is_final)
}
