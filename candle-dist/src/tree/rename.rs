//! Renames the keys of maps.
use crate::{Error, Result};
use std::collections::HashSet;

/// Replaces the prefix `old` of keys by `new`, and returns the number of renamed keys.
///
/// The prefix is literal. All keys change at once, so a key may take a name that another key gives up. Works for
/// `BTreeMap` and `HashMap` with `String` keys, and for similar maps.
///
/// # Errors
/// [`Error::Invalid`] if the prefixes are equal, or if two entries would get the same key; the map is then unchanged.
///
/// ```
/// use candle_dist::replace_by_prefix;
/// use std::collections::BTreeMap;
///
/// let mut state = BTreeMap::from(["module.w", "module.b", "head"].map(|name| (name.to_string(), name.len())));
/// assert_eq!(replace_by_prefix(&mut state, "module.", "")?, 2);
/// assert_eq!(state.into_iter().collect::<Vec<_>>(), [("b".into(), 8), ("head".into(), 4), ("w".into(), 8)]);
/// # Ok::<(), candle_dist::Error>(())
/// ```
pub fn replace_by_prefix<M, T>(state: &mut M, old: &str, new: &str) -> Result<usize>
where
    M: Default + IntoIterator<Item = (String, T)> + FromIterator<(String, T)>,
    for<'a> &'a M: IntoIterator<Item = (&'a String, &'a T)>,
{
    let invalid = |reason: String| Err(Error::Invalid { op: "replace_by_prefix", reason });
    if old == new {
        return invalid(format!("the old and the new prefix are both {old:?}; name two different ones"));
    }
    let renamed = |key: &str| key.strip_prefix(old).map(|rest| format!("{new}{rest}"));
    let (mut taken, mut count) = (HashSet::new(), 0);
    for (key, _) in &*state {
        let name = renamed(key).inspect(|_| count += 1).unwrap_or_else(|| key.clone());
        if let Some(name) = taken.replace(name) {
            return invalid(format!("{old:?} to {new:?} would give two entries the key {name:?}"));
        }
    }
    let entries = std::mem::take(state).into_iter();
    *state = entries.map(|(key, value)| (renamed(&key).unwrap_or(key), value)).collect();
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, HashMap};

    fn map<M: FromIterator<(String, usize)>>(keys: &[&str]) -> M {
        keys.iter().enumerate().map(|(i, key)| (key.to_string(), i)).collect()
    }

    #[test]
    fn only_literal_prefixes_are_renamed() {
        let mut state: HashMap<_, _> = map(&["a.w", "a.", "axw", "b.a.w", ""]);
        assert_eq!(replace_by_prefix(&mut state, "a.", "c").unwrap(), 2);
        let want = [("cw", 0), ("c", 1), ("axw", 2), ("b.a.w", 3), ("", 4)];
        assert_eq!(state, want.map(|(key, value)| (key.to_string(), value)).into());
    }

    #[test]
    fn a_key_may_take_the_name_that_another_leaves() {
        let mut state: BTreeMap<_, _> = map(&["a", "aa", "aaa"]);
        assert_eq!(replace_by_prefix(&mut state, "", "a").unwrap(), 3);
        assert_eq!(state, map::<BTreeMap<_, _>>(&["aa", "aaa", "aaaa"]));
        assert_eq!(replace_by_prefix(&mut state, "aa", "a").unwrap(), 3);
        assert_eq!(state, map::<BTreeMap<_, _>>(&["a", "aa", "aaa"]));
    }

    #[test]
    fn a_clash_or_equal_prefixes_change_nothing() {
        let before: BTreeMap<_, _> = map(&["a.w", "b.v", "b.w"]);
        for (old, new, says) in [("b", "a", "\"a.w\""), ("a", "a", "both \"a\""), ("", "", "both \"\"")] {
            let mut state = before.clone();
            let error = replace_by_prefix(&mut state, old, new).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(state, before);
        }
    }
}
