//! Texts from elsewhere, made safe to print.
use std::borrow::Cow;

/// Returns a text in which characters that steer a terminal or reorder the line are written as escapes.
///
/// Lines stay lines, and tabs stay tabs. Use it to print what came from another process, a file or its name, the network or
/// a template: an escape sequence there could hide an error, or rewrite what a terminal shows.
///
/// ```
/// use candle_dist::printable;
///
/// assert_eq!(printable("naïve\n"), "naïve\n");
/// assert_eq!(printable("\u{1b}[2Jgone"), "\\u{1b}[2Jgone");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 16);
    let mut rest = text.chars().peekable();
    while let Some(char) = rest.next() {
        if steers(char) && !(char == '\r' && rest.peek() == Some(&'\n')) {
            clean.extend(char.escape_unicode());
        } else {
            clean.push(char);
        }
    }
    Cow::Owned(clean)
}

/// Returns whether a character is a control, or one of those that reorder text or end a line in some programs.
fn steers(char: char) -> bool {
    // Not the marks of Arabic and Hebrew, which texts have.
    let reorders = matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    reorders || matches!(char, '\u{2028}' | '\u{2029}') || char.is_control() && !matches!(char, '\n' | '\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_is_escaped_and_what_is_text_stays() {
        let cases = [
            ("", ""),
            ("a\tb\nc\r\n", "a\tb\nc\r\n"),
            ("\r\u{7}\u{8}\u{7f}", "\\u{d}\\u{7}\\u{8}\\u{7f}"),
            // The one-character form of ESC [, and a sequence that sets the title.
            ("\u{9b}31m \u{1b}]0;x\u{7}", "\\u{9b}31m \\u{1b}]0;x\\u{7}"),
            ("user\u{202e}gpj.exe", "user\\u{202e}gpj.exe"),
            ("日本語 e\u{301} 👩‍🔬", "日本語 e\u{301} 👩‍🔬"),
            ("שלום\u{200f}!", "שלום\u{200f}!"),
        ];
        for (text, clean) in cases {
            assert_eq!(printable(text), clean, "{text:?}");
        }
    }
}
