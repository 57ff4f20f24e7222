//! The element types of device memory.
use half::{bf16, f16};

/// A type of elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Type {
    U8,
    I8,
    U32,
    I32,
    I64,
    U64,
    I16,
    Bf16,
    F16,
    F32,
    F64,
}

impl Type {
    /// Returns the type that a kernel's name spells this way.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "u8" => Self::U8,
            "u32" => Self::U32,
            "i16" => Self::I16,
            "i32" => Self::I32,
            "i64" => Self::I64,
            "bf16" => Self::Bf16,
            "f16" => Self::F16,
            "f32" => Self::F32,
            "f64" => Self::F64,
            _ => return None,
        })
    }

    /// Returns the type of one of NCCL's codes (nccl.h, `ncclDataType_t`).
    pub(crate) fn of_nccl(code: i32) -> Option<Self> {
        let all =
            [Self::I8, Self::U8, Self::I32, Self::U32, Self::I64, Self::U64, Self::F16, Self::F32, Self::F64];
        match code {
            9 => Some(Self::Bf16),
            code => all.get(usize::try_from(code).ok()?).copied(),
        }
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::Bf16 | Self::F16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// An element. Integers wrap; 16-bit floats compute in f32 and round once.
pub(crate) trait Element: Copy + PartialOrd {
    const SIZE: usize;
    fn from_bytes(bytes: &[u8]) -> Self;
    fn push(self, bytes: &mut Vec<u8>);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn most(self, other: Self) -> Self;
    /// Converts as a cast to `T` does.
    fn to<T: Element>(self) -> T;
    fn from_int(value: i128) -> Self;
    fn from_float(value: f64) -> Self;
    fn float(self) -> f64;
}

macro_rules! int {
    ($($t:ty),*) => {$(impl Element for $t {
        const SIZE: usize = size_of::<$t>();
        fn from_bytes(bytes: &[u8]) -> Self {
            Self::from_le_bytes(bytes.try_into().unwrap_or_default())
        }
        fn push(self, bytes: &mut Vec<u8>) {
            bytes.extend(self.to_le_bytes());
        }
        fn add(self, other: Self) -> Self {
            self.wrapping_add(other)
        }
        fn sub(self, other: Self) -> Self {
            self.wrapping_sub(other)
        }
        fn mul(self, other: Self) -> Self {
            self.wrapping_mul(other)
        }
        fn div(self, other: Self) -> Self {
            self.checked_div(other).unwrap_or(Self::MAX)
        }
        fn least(self, other: Self) -> Self {
            self.min(other)
        }
        fn most(self, other: Self) -> Self {
            self.max(other)
        }
        fn to<T: Element>(self) -> T {
            T::from_int(i128::from(self))
        }
        fn from_int(value: i128) -> Self {
            value as Self
        }
        fn from_float(value: f64) -> Self {
            value as Self
        }
        fn float(self) -> f64 {
            self as f64
        }
    })*};
}
int!(u8, i8, u32, i32, i64, u64, i16);

macro_rules! float {
    ($($t:ty, $wide:ty, $into:expr, $from:expr;)*) => {$(impl Element for $t {
        const SIZE: usize = size_of::<$t>();
        fn from_bytes(bytes: &[u8]) -> Self {
            Self::from_le_bytes(bytes.try_into().unwrap_or_default())
        }
        fn push(self, bytes: &mut Vec<u8>) {
            bytes.extend(self.to_le_bytes());
        }
        fn add(self, other: Self) -> Self {
            $from($into(self) + $into(other))
        }
        fn sub(self, other: Self) -> Self {
            $from($into(self) - $into(other))
        }
        fn mul(self, other: Self) -> Self {
            $from($into(self) * $into(other))
        }
        fn div(self, other: Self) -> Self {
            $from($into(self) / $into(other))
        }
        fn least(self, other: Self) -> Self {
            $from($into(self).min($into(other)))
        }
        fn most(self, other: Self) -> Self {
            $from($into(self).max($into(other)))
        }
        fn to<T: Element>(self) -> T {
            T::from_float(self.float())
        }
        fn from_int(value: i128) -> Self {
            $from(value as $wide)
        }
        fn from_float(value: f64) -> Self {
            $from(value as $wide)
        }
        fn float(self) -> f64 {
            f64::from($into(self))
        }
    })*};
}
float! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
}

/// Returns the elements of some bytes.
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(T::SIZE).map(T::from_bytes).collect()
}

/// Returns the bytes of some elements.
pub(crate) fn bytes<T: Element>(elements: impl IntoIterator<Item = T>) -> Vec<u8> {
    let mut bytes = Vec::new();
    elements.into_iter().for_each(|element| element.push(&mut bytes));
    bytes
}

/// Evaluates an expression with the alias `$t` for the type `$ty`.
macro_rules! with_type {
    ($ty:expr, $t:ident => $body:expr) => {
        $crate::number::with_type!(@ $ty, $t => $body;
            U8 u8, I8 i8, U32 u32, I32 i32, I64 i64, U64 u64, I16 i16, Bf16 half::bf16, F16 half::f16, F32 f32, F64 f64)
    };
    (@ $ty:expr, $t:ident => $body:expr; $($name:ident $real:ty),*) => {
        match $ty {
            $($crate::number::Type::$name => {
                type $t = $real;
                $body
            })*
        }
    };
}
pub(crate) use with_type;
