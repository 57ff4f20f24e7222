//! The arguments of a call.

use super::value::JinjaValue;
use super::work::{EvalResult, fail};

/// Values by their places, and by names.
#[derive(Clone, Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<JinjaValue>,
    pub(super) named: Vec<(String, JinjaValue)>,
}

impl Args {
    /// Returns the values of these parameters.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
    ) -> EvalResult<[Option<JinjaValue>; N]> {
        if self.positional.len() > N {
            return fail(format!("{what} takes at most {N} arguments"));
        }
        let mut bound = [const { None }; N];
        for (place, value) in self.positional.into_iter().enumerate() {
            bound[place] = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == name) {
                Some(place) if bound[place].is_none() => bound[place] = Some(value),
                Some(_) => return fail(format!("{what} has {name} twice")),
                None => return fail(format!("{what} has no argument {name}")),
            }
        }
        Ok(bound)
    }

    /// Returns the only value, which has to be there.
    pub(super) fn one(self, what: &str) -> EvalResult<JinjaValue> {
        let [value] = self.bind(what, [""])?;
        value.map_or_else(|| fail(format!("{what} takes one argument")), Ok)
    }
}
