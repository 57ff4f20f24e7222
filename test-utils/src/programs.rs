//! What tests of programs have in common.

use std::process::Output;

/// Returns what a program wrote.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// Checks that each of these flags is answered by one sentence on stderr that has all of the mentions, before any work, and by status 2.
pub fn refuses(program: impl Fn(&[&str]) -> Output, cases: &[(&[&str], &[&str])]) {
    for (flags, mentions) in cases {
        let output = program(flags);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
        assert!(output.stdout.is_empty(), "{flags:?} began to work");
        assert!(said.starts_with("error: ") && said.lines().count() == 1, "{flags:?}: {said}");
        for mention in *mentions {
            assert!(said.contains(mention), "{flags:?} should mention {mention:?}: {said}");
        }
    }
}
