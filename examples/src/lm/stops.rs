//! Texts that end what is written.

/// Text that is shown until one of some texts comes, which is not shown.
///
/// What may be the beginning of such a text waits until it is clear.
///
/// ```
/// use examples::lm::stops::Stops;
///
/// let mut stops = Stops::new(vec!["\nUser:".into()]);
/// assert_eq!(stops.next("Hi.\nU"), ("Hi.".to_owned(), false));
/// assert_eq!(stops.next("ser"), (String::new(), false));
/// assert_eq!(stops.next("s too"), ("\nUsers too".to_owned(), false));
/// assert_eq!(stops.next("!\nUser: no"), ("!".to_owned(), true));
/// ```
#[derive(Clone, Debug)]
pub struct Stops {
    texts: Vec<String>,
    waiting: String,
}

impl Stops {
    /// Nothing came yet; empty texts end nothing.
    pub fn new(texts: Vec<String>) -> Self {
        Self { texts: texts.into_iter().filter(|text| !text.is_empty()).collect(), waiting: String::new() }
    }

    /// What can be shown now that `more` has come, and whether it is the end.
    pub fn next(&mut self, more: &str) -> (String, bool) {
        self.waiting.push_str(more);
        if let Some(at) = self.texts.iter().filter_map(|text| self.waiting.find(text)).min() {
            self.waiting.truncate(at);
            return (std::mem::take(&mut self.waiting), true);
        }
        let begins = |&at: &usize| {
            let rest = &self.waiting[at..];
            self.texts.iter().any(|text| text.starts_with(rest))
        };
        let starts = self.waiting.char_indices().map(|(at, _)| at);
        let clear = starts.into_iter().find(begins).unwrap_or(self.waiting.len());
        let rest = self.waiting.split_off(clear);
        (std::mem::replace(&mut self.waiting, rest), false)
    }

    /// What still waits, when nothing follows.
    pub fn finish(self) -> String {
        self.waiting
    }
}
