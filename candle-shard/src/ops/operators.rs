//! `+ - * /` on values, references and results, with tensors, plain tensors and numbers, as in candle.
use super::operand::Operand;
use crate::{DTensor, Result};
use candle_core::Tensor;
use std::borrow::Borrow;
use std::ops::{Add, Div, Mul, Sub};

macro_rules! operator {
    ($trait:ident, $method:ident) => {
        impl<O: Operand> $trait<O> for &DTensor {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, rhs: O) -> Result<DTensor> {
                DTensor::$method(self, rhs)
            }
        }

        impl<O: Operand> $trait<O> for DTensor {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, rhs: O) -> Result<DTensor> {
                DTensor::$method(&self, rhs)
            }
        }

        operator!($trait, $method, DTensor);
        operator!($trait, $method, &DTensor);
    };
    // For left operands of foreign types.
    ($trait:ident, $method:ident, $rhs:ty) => {
        impl<B: Borrow<DTensor>> $trait<$rhs> for Result<B> {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, rhs: $rhs) -> Result<DTensor> {
                DTensor::$method(self?.borrow(), rhs)
            }
        }

        impl $trait<$rhs> for &Tensor {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, rhs: $rhs) -> Result<DTensor> {
                DTensor::$method(&DTensor::replicated(self, rhs.mesh())?, rhs)
            }
        }

        impl $trait<$rhs> for Tensor {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, rhs: $rhs) -> Result<DTensor> {
                $trait::$method(&self, rhs)
            }
        }
    };
}
operator!(Add, add);
operator!(Sub, sub);
operator!(Mul, mul);
operator!(Div, div);

macro_rules! number_on_the_left {
    ($($trait:ident, $method:ident, |$number:ident, $x:ident| $made:expr;)*) => {
        $(number_on_the_left!($trait, $method, DTensor, |$number, $x| $made);
        number_on_the_left!($trait, $method, &DTensor, |$number, $x| $made);)*
    };
    ($trait:ident, $method:ident, $rhs:ty, |$number:ident, $x:ident| $made:expr) => {
        impl $trait<$rhs> for f64 {
            type Output = Result<DTensor>;
            #[track_caller]
            fn $method(self, $x: $rhs) -> Result<DTensor> {
                let $number = self;
                $made
            }
        }
    };
}
number_on_the_left! {
    Add, add, |number, x| x.affine(1.0, number);
    Sub, sub, |number, x| x.affine(-1.0, number);
    Mul, mul, |number, x| x.affine(number, 0.0);
    Div, div, |number, x| x.recip()?.affine(number, 0.0);
}
