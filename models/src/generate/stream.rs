//! Text of ids as they come: whole characters only.

use super::error::Result;
use super::tokenizer::Tokenizer;

/// Ids of a prompt that a stream looks at: enough for what decoders do at a text's beginning, such as dropping a space.
const CONTEXT: usize = 8;

/// U+FFFD that may still become a character: one of four bytes lacks one, and some decoders write one for each byte.
const HELD: usize = 3;

/// Ids after which a stream gives up waiting for the end of a character. Only bytes that are no text come to that.
const MOST_PENDING_IDS: usize = 256;

const REPLACEMENT: char = '\u{fffd}';

/// Turns ids into text as they come. What it gives is valid UTF-8: the bytes of a character that is spread over several
/// ids come with the last of them. All pieces together are the text of all ids, in which bytes that are no character
/// are U+FFFD; special tokens are left out.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is out, which what follows is decoded with, and then those whose text is not all out.
    ids: Vec<u32>,
    /// How many of `ids` are the former.
    before: usize,
    /// Text of the former.
    prefix: String,
    /// Text of the latter that is out.
    out: String,
}

/// The rest of a stream at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextEnd {
    /// The rest of the text, with U+FFFD for a character that is not whole.
    pub text: String,
    /// The last character is not whole.
    pub incomplete: bool,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        let prefix = tokenizer.decode(&ids, true).unwrap_or_default();
        Self { tokenizer, before: ids.len(), ids, prefix, out: String::new() }
    }

    /// Takes the next id and gives the text that is certain with it, which may be none.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](super::Error::Tokenizer).
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.pending()?;
        let waits = self.ids.len() - self.before < MOST_PENDING_IDS;
        let certain = if waits { certain(&text) } else { &text };
        let new = certain.strip_prefix(&self.out[..]).unwrap_or_default().to_string();
        if certain.len() == text.len() {
            self.turn_page()?;
        } else {
            self.out.push_str(&new);
        }
        Ok(new)
    }

    /// Ends the stream.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](super::Error::Tokenizer).
    pub fn finish(self) -> Result<TextEnd> {
        let text = self.pending()?;
        let text = text.strip_prefix(&self.out[..]).unwrap_or_default();
        // A U+FFFD may be the text's own, or stand for bytes that begin no character.
        let bytes = || self.ids[self.before..].iter().flat_map(|id| self.tokenizer.bytes(*id)).collect::<Vec<u8>>();
        Ok(TextEnd { incomplete: text.ends_with(REPLACEMENT) && ends_inside(&bytes()), text: text.into() })
    }

    /// Text of the ids whose text is not all out.
    fn pending(&self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, true)?;
        match text.strip_prefix(&self.prefix[..]) {
            Some(text) => Ok(text.into()),
            // The ids before end inside a character, which these complete.
            None => self.tokenizer.decode(&self.ids[self.before..], true),
        }
    }

    /// All text is out: only the last ids are needed from here.
    fn turn_page(&mut self) -> Result<()> {
        self.ids.drain(..self.ids.len().saturating_sub(CONTEXT));
        self.before = self.ids.len();
        self.prefix = self.tokenizer.decode(&self.ids, true)?;
        self.out.clear();
        Ok(())
    }
}

/// True of bytes that end with the beginning of a character.
fn ends_inside(mut bytes: &[u8]) -> bool {
    while let Err(error) = std::str::from_utf8(bytes) {
        let Some(wrong) = error.error_len() else { return true };
        bytes = &bytes[error.valid_up_to() + wrong..];
    }
    false
}

/// A text without the U+FFFD at its end that further ids may make a character of.
fn certain(text: &str) -> &str {
    (0..HELD).fold(text, |text, _| text.strip_suffix(REPLACEMENT).unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::bytes;
    use super::*;

    fn pieces(ids: &[u32]) -> (Vec<String>, TextEnd) {
        let tokenizer = bytes();
        let mut stream = tokenizer.stream(&[]);
        let pieces = ids.iter().map(|id| stream.push(*id).expect("text")).collect();
        (pieces, stream.finish().expect("an end"))
    }

    #[test]
    fn characters_come_whole() {
        let (got, end) = pieces(&[0xe2, 0x82, 0xac, 65, 0xf0, 0x9f, 0x99, 0x82]);
        assert_eq!(got, ["", "", "€", "A", "", "", "", "🙂"]);
        assert_eq!(end, TextEnd { text: String::new(), incomplete: false });
    }

    #[test]
    fn a_character_that_is_not_whole_at_the_end_is_told_of() {
        let (got, end) = pieces(&[65, 0xf0, 0x9f]);
        assert_eq!(got, ["A", "", ""]);
        assert_eq!(end, TextEnd { text: "\u{fffd}".into(), incomplete: true });
    }

    #[test]
    fn what_is_no_beginning_of_a_character_is_not_told_of() {
        for ids in
            [&[65, 0xef, 0xbf, 0xbd][..], &[65, 0xff], &[0xe2, 0x82, 0xff], &[0x80, 0x80], &[0xe2, 0x82, 65, 257]]
        {
            assert!(!pieces(ids).1.incomplete, "{ids:?}");
        }
        assert!(pieces(&[0xff, 0xef, 0xbf]).1.incomplete);
        assert!(pieces(&[0xef, 0xbf, 0xbd, 0xe2, 257]).1.incomplete, "a special token has no bytes");
    }

    #[test]
    fn bytes_that_are_no_character_do_not_hold_up_what_follows() {
        let (got, end) = pieces(&[0xff, 65, 0x80, 0x80, 0x80, 0x80, 0x80, 66]);
        assert_eq!(got.concat() + &end.text, "\u{fffd}A\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}B");
        assert_eq!(got[1], "\u{fffd}A");
        assert!(!end.incomplete);
    }

    #[test]
    fn special_tokens_are_left_out_also_inside_a_character() {
        let (got, end) = pieces(&[256, 65, 257, 66, 258]);
        assert_eq!((got.concat() + &end.text).as_str(), "AB</think>");
    }

    /// The pieces together are the text of all ids, whatever these are.
    #[test]
    fn pieces_add_up_to_the_text() {
        let tokenizer = bytes();
        let mut state = 1u32;
        for round in 0..200 {
            let mut draw = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 16
            };
            let text = "aé€🙂 \u{fffd}\n日";
            let bytes: Vec<u32> = match round % 2 {
                // Characters, of which some lose their last byte; or any bytes.
                0 => (0..60)
                    .flat_map(|_| {
                        let c = text.chars().nth(draw() as usize % text.chars().count()).expect("a character");
                        let lost = usize::from(draw().is_multiple_of(8));
                        let bytes: Vec<u32> = c.to_string().bytes().map(u32::from).collect();
                        bytes[..bytes.len() - lost].to_vec()
                    })
                    .collect(),
                _ => (0..300).map(|_| draw() % 259).collect(),
            };
            let mut stream = tokenizer.stream(&[]);
            let mut got = String::new();
            for id in &bytes {
                got.push_str(&stream.push(*id).expect("text"));
            }
            got.push_str(&stream.finish().expect("an end").text);
            assert_eq!(got, tokenizer.decode(&bytes, true).expect("text"), "round {round}: {bytes:?}");
        }
    }

    /// A decoder that drops the space at a text's beginning does not drop the one after a prompt.
    #[test]
    fn a_space_after_the_prompt_stays() {
        let metaspace =
            serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
        let json = serde_json::json!({
            "version": "1.0", "pre_tokenizer": metaspace, "decoder": metaspace,
            "model": {"type": "BPE", "vocab": {"▁is": 0, "▁Paris": 1}, "merges": []},
        });
        let tokenizer = Tokenizer::from_json(&json.to_string()).expect("a tokenizer");
        assert_eq!(tokenizer.stream(&[0]).push(1).expect("text"), " Paris");
        assert_eq!(tokenizer.stream(&[]).push(1).expect("text"), "Paris", "the text itself begins here");
    }

    /// Some decoders write a U+FFFD for each byte of a run that is no character.
    #[test]
    fn bytes_as_tokens_of_a_fallback() {
        let json = serde_json::json!({
            "version": "1.0",
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "byte_fallback": true, "merges": [],
                "vocab": {"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "a": 3, "<0xF0>": 4}},
        });
        let tokenizer = Tokenizer::from_json(&json.to_string()).expect("a tokenizer");
        let run = |ids: &[u32]| {
            let mut stream = tokenizer.stream(&[]);
            let got: Vec<String> = ids.iter().map(|id| stream.push(*id).expect("text")).collect();
            (got, stream.finish().expect("an end"))
        };
        assert_eq!(run(&[3, 0, 1, 2, 3]).0, ["a", "", "", "€", "a"]);
        assert_eq!(run(&[0, 1, 2, 0, 1, 2]).0, ["", "", "€", "", "", "€"]);
        let (got, end) = run(&[3, 0, 1]);
        assert_eq!((got.concat().as_str(), end.text.as_str(), end.incomplete), ("a", "\u{fffd}\u{fffd}", true));
    }
}
