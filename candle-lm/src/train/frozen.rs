//! Parts of a model that do not learn.

use std::fmt;

use serde::{Deserialize, Serialize};
use wildmatch::WildMatch;

use crate::config::Config;
use crate::error::{InputResult, require};

/// Names of modules whose parameters do not learn, such as `embed_tokens`, `layers.0` or `layers.*.mlp`.
///
/// A name has parts of paths, one behind another, in which `*` and `?` stand for any characters. It names each module whose path ends with
/// them, with all that is in it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FrozenModules(Vec<String>);

impl FrozenModules {
    /// The modules of these names.
    pub fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self(names.into_iter().collect())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the parameter of this full name is in one of them.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|module| is_in(name, module))
    }

    /// Checks that the model has modules of all these names, and others.
    ///
    /// # Errors
    /// A sentence that names what it does not have.
    pub fn check(&self, config: &Config) -> InputResult {
        let tensors = config.tensors();
        for module in &self.0 {
            require!(
                tensors.iter().any(|(name, _)| is_in(name, module)),
                "--freeze {module} names no module of the model: give parts of paths such as {}, with * and ? for any characters.",
                tensors.first().map_or("embed_tokens", |(name, _)| name.trim_end_matches(".weight"))
            );
        }
        require!(
            config.learned().iter().any(|(name, _)| !self.contains(name)),
            "--freeze {self} names all modules of the model: nothing is left to learn."
        );
        Ok(())
    }
}

impl fmt::Display for FrozenModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("+"))
    }
}

/// Whether a parameter is in a module whose path ends with the parts of `module`.
fn is_in(name: &str, module: &str) -> bool {
    let (path, parts): (Vec<&str>, Vec<WildMatch>) =
        (name.split('.').collect(), module.split('.').map(WildMatch::new).collect());
    // The last part of a name is that of the parameter itself.
    let modules = &path[..path.len() - 1];
    modules
        .windows(parts.len())
        .any(|window| window.iter().zip(&parts).all(|(name, part)| part.matches(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_the_paths_of_modules() {
        let name = "model.layers.12.self_attn.q_proj.weight";
        for module in ["q_proj", "layers.12", "layers.1?", "layers.*.self_attn", "model", "*_proj", "12"] {
            assert!(FrozenModules::new(["absent".into(), module.into()]).contains(name), "{module}");
        }
        for module in ["proj", "layers.1", "self_attn.k_proj", "weight", "layers.self_attn", "layers.*.*.*.*"]
        {
            assert!(!FrozenModules::new([module.to_owned()]).contains(name), "{module}");
        }
        assert!(!FrozenModules::default().contains(name));
    }
}
