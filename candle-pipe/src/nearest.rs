//! The name that was probably meant.

/// ` (did you mean "..."?)` with the name of `known` that is nearest to `wanted`, or nothing where none is near.
pub(crate) fn suggestion<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let near = known.into_iter().map(|name| (distance(wanted, name), name)).min();
    match near {
        Some((steps, name)) if steps <= wanted.chars().count().div_ceil(2).max(2) => {
            format!(" (did you mean {name:?}?)")
        }
        _ => String::new(),
    }
}

/// The least number of characters to insert, delete or replace that makes `b` of `a` (Levenshtein 1966).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, &y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested() {
        assert_eq!(suggestion("layers.22", ["layers.2", "head"]), " (did you mean \"layers.2\"?)");
        assert_eq!(suggestion("embedding", ["x"]), "");
        assert_eq!((distance("kitten", "sitting"), distance("", "ab"), distance("ab", "")), (3, 2, 2));
    }
}
