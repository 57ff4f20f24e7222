//! The nearest known name to a misspelled one.

/// Returns the name that differs from `name` in the fewest letters, if these are less than half of them.
pub(crate) fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, found) = names.into_iter().map(|other| (distance(name, other), other)).min()?;
    (2 * distance < found.len().max(name.len())).then_some(found)
}

/// Returns the case-insensitive edit distance.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    // The distances of the prefix of `a` read so far to every prefix of `b`.
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[row.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::{distance, nearest};

    #[test]
    fn letters_are_counted() {
        let cases =
            [("", "abc", 3), ("abc", "abc", 0), ("ABC", "abc", 0), ("kitten", "sitting", 3), ("zb", "bz", 2)];
        for (a, b, want) in cases {
            assert_eq!((distance(a, b), distance(b, a)), (want, want), "{a} {b}");
        }
    }

    #[test]
    fn a_name_of_nothing_alike_has_no_nearest() {
        assert_eq!(nearest("layers.2", ["layers.1", "head"]), Some("layers.1"));
        assert_eq!(nearest("tail", ["layers.1", "embedding"]), None);
        assert_eq!(nearest("tail", []), None);
    }
}
