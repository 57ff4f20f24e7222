//! Trees of values, walked and rebuilt.
use super::{Path, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;

impl Value {
    /// Every leaf with its path, in the tree's order; `root` is the name of this value.
    ///
    /// ```
    /// use candle_pipe::{Path, Value};
    ///
    /// let value = Value::from((1, vec![true]));
    /// let leaves = value.leaves(&Path::new("args"));
    /// let listed: Vec<String> = leaves.iter().map(|(path, leaf)| format!("{path} = {leaf}")).collect();
    /// assert_eq!(listed, ["args[0] = 1", "args[1][0] = true"]);
    /// ```
    pub fn leaves(&self, root: &Path) -> Vec<(Path, &Self)> {
        match self {
            Self::List(items) | Self::Tuple(items) => {
                items.iter().enumerate().flat_map(|(i, item)| item.leaves(&root.index(i))).collect()
            }
            Self::Map(map) => map.iter().flat_map(|(key, value)| value.leaves(&root.key(key))).collect(),
            leaf => vec![(root.clone(), leaf)],
        }
    }

    /// The same structure with every leaf replaced by what `f` makes of it and its path, or the first error.
    ///
    /// ```
    /// use candle_pipe::{Path, Result, Value};
    ///
    /// let value = Value::from((1, vec![2, 3]));
    /// let doubled = value.map_leaves(&Path::new("args"), &mut |_, leaf| -> Result<Value> { Ok((2 * leaf.int()?).into()) })?;
    /// assert_eq!(doubled.to_string(), "(2, [4, 6])");
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn map_leaves<E>(&self, root: &Path, f: &mut dyn FnMut(&Path, &Self) -> Result<Self, E>) -> Result<Self, E> {
        let mut all = |items: &[Self]| -> Result<Vec<Self>, E> {
            items.iter().enumerate().map(|(i, item)| item.map_leaves(&root.index(i), f)).collect()
        };
        Ok(match self {
            Self::List(items) => Self::List(all(items)?),
            Self::Tuple(items) => Self::Tuple(all(items)?),
            Self::Map(map) => {
                let made = map.iter().map(|(key, value)| Ok((key.clone(), value.map_leaves(&root.key(key), f)?)));
                Self::Map(made.collect::<Result<_, E>>()?)
            }
            leaf => f(root, leaf)?,
        })
    }
}

impl TensorTree for Value {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        match self {
            Self::Tensor(tensor) => f(tensor),
            Self::List(items) | Self::Tuple(items) => items.visit(f),
            Self::Map(map) => map.visit(f),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::None => {}
        }
    }

    fn rebuild<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(match self {
            Self::Tensor(tensor) => Self::Tensor(f(tensor)?),
            Self::List(items) => Self::List(items.rebuild(f)?),
            Self::Tuple(items) => Self::Tuple(items.rebuild(f)?),
            Self::Map(map) => Self::Map(map.rebuild(f)?),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::None => self.clone(),
        })
    }
}
