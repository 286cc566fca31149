//! Texts that end a generation.

/// Finds the first of several texts in a text that comes in pieces, and holds back what may be the beginning of one.
#[derive(Debug, Clone)]
pub(super) struct StopStrings {
    strings: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Texts that are empty stop nothing.
    pub fn new(strings: &[String]) -> Self {
        Self { strings: strings.iter().filter(|s| !s.is_empty()).cloned().collect(), held: String::new() }
    }

    /// Takes a piece. Gives the text that belongs to no stop string, and the one that was found, after which there is
    /// no more. Where several are, that which begins first, for which a later one waits; of those that begin together, which
    /// leave the same text, that which is whole first, then that which was given first.
    pub fn push(&mut self, piece: &str) -> (String, Option<String>) {
        self.held.push_str(piece);
        let first = self.first();
        let keep = self.strings.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        // One that begins before those found may still come.
        if let Some((at, stop)) = first
            && at <= self.held.len() - keep
        {
            let stop = stop.clone();
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text that was held back, at the end, and the stop string in it, behind which there is none.
    pub fn finish(&mut self) -> (String, Option<String>) {
        let first = self.first().map(|(at, stop)| (at, stop.clone()));
        let mut text = std::mem::take(&mut self.held);
        let stop = first.map(|(at, stop)| {
            text.truncate(at);
            stop
        });
        (text, stop)
    }

    /// Where the first of the stop strings begins that are in the text held, and which it is.
    fn first(&self) -> Option<(usize, &String)> {
        self.strings.iter().filter_map(|stop| Some((self.held.find(stop)?, stop))).min_by_key(|(at, _)| *at)
    }
}

/// Most bytes at the end of a text with which `stop` may begin, if it is not whole.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>, String) {
        let mut stop = StopStrings::new(&stops.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        let mut out = Vec::new();
        for piece in pieces {
            let (text, found) = stop.push(piece);
            out.push(text);
            if found.is_some() {
                return (out, found, stop.finish().0);
            }
        }
        let (rest, found) = stop.finish();
        (out, found, rest)
    }

    #[test]
    fn a_stop_over_several_pieces_is_never_shown_in_part() {
        let (out, found, rest) = run(&["<END>"], &["a<", "E", "ND", ">b"]);
        assert_eq!(
            (out, found.as_deref(), rest.as_str()),
            (vec!["a".into(), String::new(), "".into(), "".into()], Some("<END>"), "")
        );
    }

    #[test]
    fn what_only_began_like_a_stop_is_shown() {
        let (out, found, rest) = run(&["<END>"], &["a<E", "NX", "<EN"]);
        assert_eq!((out.concat().as_str(), found, rest.as_str()), ("a<ENX", None, "<EN"));
        let (out, found, _) = run(&["aab"], &["aa", "a", "b"]);
        assert_eq!((out.concat().as_str(), found.as_deref()), ("a", Some("aab")));
    }

    #[test]
    fn the_first_in_the_text_wins_then_the_first_given() {
        let (out, found, _) = run(&["yz", "x", "xy"], &["axyz"]);
        assert_eq!((out.concat().as_str(), found.as_deref()), ("a", Some("x")));
        let (out, found, _) = run(&["éb", "\u{e9}"], &["aé", "b"]);
        assert_eq!((out.concat().as_str(), found.as_deref()), ("a", Some("é")));
    }

    /// However the text is cut.
    #[test]
    fn one_that_begins_earlier_and_ends_later_wins() {
        for pieces in [&["abc"][..], &["ab", "c"], &["a", "bc"], &["a", "b", "c"]] {
            let (out, found, _) = run(&["abc", "b"], pieces);
            assert_eq!((out.concat().as_str(), found.as_deref()), ("", Some("abc")), "{pieces:?}");
        }
        for pieces in [&["abd"][..], &["ab", "d"], &["a", "b", "d"]] {
            let (out, found, _) = run(&["abc", "b"], pieces);
            assert_eq!((out.concat().as_str(), found.as_deref()), ("a", Some("b")), "{pieces:?}");
        }
        // The text ends before it is known.
        let (out, found, rest) = run(&["abc", "b"], &["ab"]);
        assert_eq!((out.concat() + &rest, found.as_deref()), ("a".into(), Some("b")));
    }

    #[test]
    fn without_stops_all_is_shown_at_once() {
        assert_eq!(run(&[""], &["a", "b"]).0, ["a", "b"]);
        assert_eq!(run(&[], &["a"]).0, ["a"]);
    }
}
