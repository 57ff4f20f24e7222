//! Results of ranks that processes send to each other.
use crate::sweep::Outcomes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::any::Any;

/// How results of a type are sent.
pub(super) struct Codec<T> {
    pub(super) encode: fn(&T) -> Vec<u8>,
    pub(super) decode: fn(&[u8]) -> Result<T, String>,
}

/// Returns how results of `T` are sent; `None` if they are not. Rust cannot ask whether a type implements serde's traits,
/// so this knows those of the tests.
pub(super) fn codec<T: 'static>() -> Option<Codec<T>> {
    macro_rules! known {
        ($($Type:ty),+ $(,)?) => { None$(.or_else(of::<T, $Type>))+ };
    }
    known!(
        (),
        bool,
        usize,
        u64,
        f32,
        f64,
        String,
        Option<f64>,
        [usize; 2],
        [usize; 3],
        [String; 3],
        Vec<bool>,
        Vec<usize>,
        Vec<u8>,
        Vec<u32>,
        Vec<u64>,
        Vec<f32>,
        Vec<f64>,
        Vec<String>,
        Vec<Vec<usize>>,
        Vec<Vec<u32>>,
        Vec<Vec<u64>>,
        Vec<Vec<f32>>,
        Vec<Vec<f64>>,
        Option<Vec<f32>>,
        Option<Vec<f64>>,
        (usize, usize),
        (usize, isize),
        (usize, f64),
        (usize, String),
        (usize, Vec<String>),
        (String, usize),
        (f32, f32),
        (f64, f64),
        (f32, f32, usize),
        (f64, Vec<f64>),
        (f32, Vec<f32>),
        (Vec<f32>, Vec<f32>),
        (Vec<f64>, usize),
        (Vec<f64>, Vec<f64>),
        (Vec<f64>, Vec<f64>, Vec<f64>),
        (Vec<String>, usize),
        (Vec<String>, Vec<String>),
        Outcomes,
    )
}

fn of<T: 'static, Known: Serialize + DeserializeOwned + 'static>() -> Option<Codec<T>> {
    fn same<A: 'static, B: 'static>(value: A) -> Option<B> {
        (Box::new(value) as Box<dyn Any>).downcast::<B>().ok().map(|value| *value)
    }
    let encode = |value: &T| {
        let bytes = (value as &dyn Any).downcast_ref::<Known>().map(postcard::to_stdvec);
        bytes.and_then(Result::ok).unwrap_or_default()
    };
    let decode = |bytes: &[u8]| {
        let value: Known =
            postcard::from_bytes(bytes).map_err(|error| format!("a result that cannot be read: {error}"))?;
        same(value).ok_or_else(|| "a result of another type".to_string())
    };
    let is_it = std::any::TypeId::of::<T>() == std::any::TypeId::of::<Known>();
    is_it.then_some(Codec { encode, decode })
}
