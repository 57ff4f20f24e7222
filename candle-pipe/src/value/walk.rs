//! Traversals of trees of values.
use super::path::{Children, entries, items};
use super::{Value, ValuePath};
use candle_core::Tensor;
use candle_dist::TensorTree;

impl Value {
    /// Returns every leaf with its path, in the tree's order; `root` is the name of this value.
    ///
    /// ```
    /// use candle_pipe::{ValuePath, Value};
    ///
    /// let value = Value::from((1, vec![true]));
    /// let leaves = value.leaves(&ValuePath::new("args"));
    /// let listed: Vec<String> = leaves.iter().map(|(path, leaf)| format!("{path} = {leaf}")).collect();
    /// assert_eq!(listed, ["args[0] = 1", "args[1][0] = true"]);
    /// ```
    pub fn leaves(&self, root: &ValuePath) -> Vec<(ValuePath, &Self)> {
        match self.children() {
            Some(children) => {
                children.iter().flat_map(|(step, child)| child.leaves(&root.step(*step))).collect()
            }
            None => vec![(root.clone(), self)],
        }
    }

    /// Returns the same structure with every leaf replaced by the result of `f`, or the first error.
    ///
    /// ```
    /// use candle_pipe::{ValuePath, Result, Value};
    ///
    /// let value = Value::from((1, vec![2, 3]));
    /// let mut double = |_: &ValuePath, leaf: &Value| -> Result<Value> { Ok((2 * leaf.int()?).into()) };
    /// let doubled = value.map_leaves(&ValuePath::new("args"), &mut double)?;
    /// assert_eq!(doubled.to_string(), "(2, [4, 6])");
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn map_leaves<E>(
        &self,
        root: &ValuePath,
        f: &mut dyn FnMut(&ValuePath, &Self) -> Result<Self, E>,
    ) -> Result<Self, E> {
        let Some(children) = self.children() else { return f(root, self) };
        let made = children.iter().map(|(step, child)| child.map_leaves(&root.step(*step), f));
        Ok(self.with_children(made.collect::<Result<_, E>>()?))
    }

    /// Returns the values of this container; `None` for a leaf.
    pub(crate) fn children(&self) -> Option<Children<'_, Self>> {
        match self {
            Self::List(list) | Self::Tuple(list) => Some(items(list)),
            Self::Map(map) => Some(entries(map)),
            _ => None,
        }
    }

    /// Returns whether it contains a sharded tensor.
    pub(crate) fn is_sharded(&self) -> bool {
        match self.children() {
            Some(children) => children.iter().any(|(_, child)| child.is_sharded()),
            #[cfg(feature = "shard")]
            None => matches!(self, Self::DTensor(_)),
            #[cfg(not(feature = "shard"))]
            None => false,
        }
    }

    /// Returns this container with other values, in the order of its children.
    pub(crate) fn with_children(&self, children: Vec<Self>) -> Self {
        match self {
            Self::List(_) => Self::List(children),
            Self::Tuple(_) => Self::Tuple(children),
            Self::Map(map) => Self::Map(map.keys().cloned().zip(children).collect()),
            leaf => leaf.clone(),
        }
    }
}

impl TensorTree for Value {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        match self {
            Self::Tensor(tensor) => f(tensor),
            #[cfg(feature = "shard")]
            Self::DTensor(tensor) => tensor.visit(f),
            Self::List(items) | Self::Tuple(items) => items.visit(f),
            Self::Map(map) => map.visit(f),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::None => {}
        }
    }

    fn rebuild<E: From<candle_dist::Error>>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self, E> {
        Ok(match self {
            Self::Tensor(tensor) => Self::Tensor(f(tensor)?),
            #[cfg(feature = "shard")]
            Self::DTensor(tensor) => Self::DTensor(tensor.rebuild(f)?),
            Self::List(items) => Self::List(items.rebuild(f)?),
            Self::Tuple(items) => Self::Tuple(items.rebuild(f)?),
            Self::Map(map) => Self::Map(map.rebuild(f)?),
            Self::Int(_) | Self::Float(_) | Self::Bool(_) | Self::Text(_) | Self::None => self.clone(),
        })
    }
}
