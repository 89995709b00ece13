//! Stop string matching over a stream of text. Pure: text in, text out.

/// Cuts a text before its first stop string, independent of how the text is split into pieces.
///
/// The match that is completed first counts; if several are completed at the same position, the longest. Text is held
/// back only as long as it may still be the beginning of a stop string.
#[derive(Clone, Debug)]
pub struct StopStrings {
    /// The stop strings; none of them is empty.
    stops: Vec<String>,
    /// Held-back text that may be the beginning of a stop string.
    held: String,
    /// A stop string that is completed within this many leading bytes of `held` is ignored.
    passed: usize,
    /// Set by the first match. There is no output after it.
    stopped: bool,
}

/// The result of pushing a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Text that certainly precedes any stop string.
    pub text: String,
    /// The stop string that was matched. Its text is not included in `text`.
    pub stopped: Option<String>,
}

impl StopStrings {
    /// Creates a matcher for these stop strings. Empty strings are ignored.
    pub fn new(stops: Vec<String>) -> StopStrings {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        StopStrings { stops, held: String::new(), passed: 0, stopped: false }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Passed {
        if self.stopped {
            return Passed::default();
        }
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_match() {
            let stop = stop.to_owned();
            self.stopped = true;
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Passed { text, stopped: Some(stop) };
        }
        Passed { text: self.release(), stopped: None }
    }

    /// Takes the next piece of text, ignoring stop strings that are completed in it. A stop string that begins in it
    /// may still match later.
    pub fn pass(&mut self, piece: &str) -> String {
        self.held.push_str(piece);
        self.passed = self.held.len();
        self.release()
    }

    /// Releases all held text except what may be the beginning of a stop string.
    fn release(&mut self) -> String {
        let keep = self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        let text = std::mem::replace(&mut self.held, held);
        self.passed = self.passed.saturating_sub(text.len());
        text
    }

    /// Returns the held-back text when no more text follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string was matched.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn first_match(&self) -> Option<(usize, &str)> {
        self.stops
            .iter()
            .filter_map(|stop| {
                let ends_late = |start: &usize| start + stop.len() > self.passed;
                // Matches may overlap, so every position is tried.
                let starts = self.held.char_indices().map(|(start, _)| start);
                let found = |start: &usize| self.held[*start..].starts_with(stop.as_str()) && ends_late(start);
                starts.into_iter().find(found).map(|start| (start, stop.as_str()))
            })
            .min_by_key(|(start, stop)| (start + stop.len(), *start))
    }
}

/// Returns the length in bytes of the longest suffix of `text` that is a proper prefix of `stop`.
fn begun(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest)
        .rev()
        .find(|&bytes| stop.is_char_boundary(bytes) && text.as_bytes().ends_with(&stop.as_bytes()[..bytes]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut watch = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            let passed = watch.push(piece);
            text.push_str(&passed.text);
            if passed.stopped.is_some() {
                return (text, passed.stopped);
            }
        }
        (text + &watch.finish(), None)
    }

    #[test]
    fn holds_back_what_may_be_a_beginning_and_no_more() {
        let mut watch = StopStrings::new(vec!["###END".to_owned()]);
        assert_eq!(watch.push("one ##").text, "one ");
        assert_eq!(watch.push("# two").text, "### two");
        assert_eq!(watch.push(" ####E").text, " #");
        let passed = watch.push("ND three");
        assert_eq!((passed.text.as_str(), passed.stopped.as_deref()), ("", Some("###END")));
        assert_eq!(watch.push("more"), Passed::default());
        assert_eq!(watch.finish(), "");
    }

    #[test]
    fn what_was_complete_early_does_not_count_and_what_began_early_does() {
        let mut watch = StopStrings::new(vec!["abcd".to_owned(), "bc".to_owned()]);
        assert_eq!(watch.pass("x bc y abc"), "x bc y ");
        // "bc" was completed earlier and is ignored; "abcd" is completed now.
        let passed = watch.push("d");
        assert_eq!((passed.text.as_str(), passed.stopped.as_deref()), ("", Some("abcd")));
        let mut watch = StopStrings::new(vec!["abcd".to_owned(), "bc".to_owned()]);
        assert_eq!(watch.pass("abc"), "");
        assert_eq!(watch.push("x").text, "abcx");
        assert_eq!(watch.push("bc").stopped.as_deref(), Some("bc"));
        let mut watch = StopStrings::new(vec!["aa".to_owned()]);
        assert_eq!(watch.pass("aa"), "a");
        assert_eq!(watch.push("a").stopped.as_deref(), Some("aa"));
    }

    #[test]
    fn the_match_complete_first_wins_then_the_longest() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".to_owned(), Some("bc".to_owned())));
        assert_eq!(run(&["c", "abc"], &["xabc"]), ("x".to_owned(), Some("abc".to_owned())));
        assert_eq!(run(&[""], &["all of it"]), ("all of it".to_owned(), None));
        assert_eq!(run(&["€!"], &["1", "€", "!"]), ("1".to_owned(), Some("€!".to_owned())));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), Some("aab".to_owned())));
    }

    /// The reference implementation: finds the shortest prefix of the text that ends with a stop string, and returns it
    /// without that stop string.
    fn by_definition(text: &str, stops: &[String]) -> (String, Option<String>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let longest =
                stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str())).max_by_key(|s| s.len());
            if let Some(stop) = longest {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let text = pieces.concat();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let borrowed: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&borrowed, &pieces), by_definition(&text, &stops));
        }
    }
}
