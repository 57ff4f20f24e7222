//! Conversions of Rust types to values.
use super::Value;
use candle_core::Tensor;

macro_rules! leaf {
    ($($type:ty: $value:ident => $made:expr;)*) => {$(
        impl From<$type> for Value {
            fn from($value: $type) -> Self {
                $made
            }
        }
    )*};
}

leaf! {
    Tensor: tensor => Self::Tensor(tensor);
    &Tensor: tensor => Self::Tensor(tensor.clone());
    i64: n => Self::Int(n);
    i32: n => Self::Int(n.into());
    i16: n => Self::Int(n.into());
    i8: n => Self::Int(n.into());
    u32: n => Self::Int(n.into());
    u16: n => Self::Int(n.into());
    u8: n => Self::Int(n.into());
    // A size counts something in memory, so it fits.
    usize: n => Self::Int(i64::try_from(n).unwrap_or(i64::MAX));
    f64: x => Self::Float(x);
    f32: x => Self::Float(x.into());
    bool: b => Self::Bool(b);
    &str: text => Self::Text(text.to_owned());
    String: text => Self::Text(text);
    (): _nothing => Self::None;
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::None, Into::into)
    }
}

/// Conversions from Rust's containers into a tree with lists, tuples and maps.
macro_rules! containers {
    ($tree:ident) => {
        impl<T: Into<$tree>> From<Vec<T>> for $tree {
            fn from(items: Vec<T>) -> Self {
                Self::List(items.into_iter().map(Into::into).collect())
            }
        }

        impl<T: Into<$tree>, const N: usize> From<[T; N]> for $tree {
            fn from(items: [T; N]) -> Self {
                Self::List(items.into_iter().map(Into::into).collect())
            }
        }

        impl<K: Into<String>, T: Into<$tree>> From<std::collections::BTreeMap<K, T>> for $tree {
            fn from(map: std::collections::BTreeMap<K, T>) -> Self {
                Self::Map(map.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
            }
        }

        impl<K: Into<String>, T: Into<$tree>, S> From<std::collections::HashMap<K, T, S>> for $tree {
            fn from(map: std::collections::HashMap<K, T, S>) -> Self {
                Self::Map(map.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
            }
        }

        $crate::value::containers!($tree: A.0);
        $crate::value::containers!($tree: A.0, B.1);
        $crate::value::containers!($tree: A.0, B.1, C.2);
        $crate::value::containers!($tree: A.0, B.1, C.2, D.3);
        $crate::value::containers!($tree: A.0, B.1, C.2, D.3, E.4);
        $crate::value::containers!($tree: A.0, B.1, C.2, D.3, E.4, F.5);
        $crate::value::containers!($tree: A.0, B.1, C.2, D.3, E.4, F.5, G.6);
        $crate::value::containers!($tree: A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7);
    };
    ($tree:ident: $($t:ident . $i:tt),+) => {
        impl<$($t: Into<$tree>),+> From<($($t,)+)> for $tree {
            fn from(tuple: ($($t,)+)) -> Self {
                Self::Tuple(vec![$(tuple.$i.into()),+])
            }
        }
    };
}

pub(crate) use containers;

containers!(Value);
