//! Whether some or all elements are not 0.
use super::extreme::Extreme::{self, Max, Min};
use super::reduce::without;
use crate::{DTensor, Result};
use candle_core::Shape;
use candle_core::shape::Dim;

macro_rules! truths {
    ($($which:ident, $name:ident, $keepdim:ident, $all:ident, $text:literal, $nothing:literal;)*) => {
        impl DTensor {
            $(#[doc = concat!("1 (u8) where ", $text, " over a dim, which stays with size 1, are not 0, else 0.")]
            ///
            #[doc = concat!("Over a dim without elements it is ", $nothing, ". NaN is not 0.")]
            #[track_caller]
            pub fn $keepdim(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($keepdim))?;
                self.truth($which, &[dim])
            }

            #[doc = concat!("1 (u8) where ", $text, " over a dim, which goes away, are not 0, else 0.")]
            ///
            #[doc = concat!("Over a dim without elements it is ", $nothing, ". NaN is not 0.")]
            #[track_caller]
            pub fn $name(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($name))?;
                self.truth($which, &[dim])?.reshape(without(self.dims(), &[dim]))
            }

            #[doc = concat!("1 (u8) if ", $text, " of the tensor are not 0, else 0; a scalar.")]
            ///
            #[doc = concat!("Without elements it is ", $nothing, ". NaN is not 0.")]
            #[track_caller]
            pub fn $all(&self) -> Result<Self> {
                let dims: Vec<usize> = (0..self.rank()).collect();
                self.truth($which, &dims)?.reshape(())
            })*
        }
    };
}

truths! {
    Max, any, any_keepdim, any_all, "some elements", "0";
    Min, all, all_keepdim, all_all, "all elements", "1";
}

impl DTensor {
    #[track_caller]
    fn truth(&self, which: Extreme, dims: &[usize]) -> Result<Self> {
        let is_set = self.detach().ne(0.0)?;
        if dims.iter().all(|&dim| self.dims()[dim] > 0) {
            return is_set.extreme(which, dims);
        }
        // The sum over nothing is 0.
        let nothing = is_set.sum_keepdim(dims)?.resolve_partial()?;
        if which == Max { nothing.ne(0.0) } else { nothing.eq(0.0) }
    }
}
