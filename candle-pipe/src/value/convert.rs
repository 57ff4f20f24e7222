//! Values from the types of Rust.
use super::{Kwargs, Value};
use candle_core::Tensor;
use std::collections::BTreeMap;

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
    f64: x => Self::Float(x);
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

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Self {
        Self::List(items.into_iter().map(Into::into).collect())
    }
}

impl<T: Into<Value>, const N: usize> From<[T; N]> for Value {
    fn from(items: [T; N]) -> Self {
        Self::List(items.into_iter().map(Into::into).collect())
    }
}

impl<K: Into<String>, T: Into<Value>> From<BTreeMap<K, T>> for Value {
    fn from(map: BTreeMap<K, T>) -> Self {
        Self::Map(map.into_iter().map(|(key, value)| (key.into(), value.into())).collect::<Kwargs>())
    }
}

macro_rules! tuple {
    ($($t:ident . $i:tt),+) => {
        impl<$($t: Into<Value>),+> From<($($t,)+)> for Value {
            fn from(tuple: ($($t,)+)) -> Self {
                Self::Tuple(vec![$(tuple.$i.into()),+])
            }
        }
    };
}

tuple!(A.0);
tuple!(A.0, B.1);
tuple!(A.0, B.1, C.2);
tuple!(A.0, B.1, C.2, D.3);
tuple!(A.0, B.1, C.2, D.3, E.4);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5, G.6);
tuple!(A.0, B.1, C.2, D.3, E.4, F.5, G.6, H.7);
