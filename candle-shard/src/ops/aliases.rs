//! Aliases for candle's other names of ops, and reads of whole tensors as lists.
use crate::kernels::Pool;
use crate::{DTensor, Operand, Result};
use candle_core::{ToUsize2, WithDType};

macro_rules! aliases {
    ($($alias:ident, $name:ident;)*) => {
        impl DTensor {
            $(#[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), "), under candle's other name.")]
            #[track_caller]
            pub fn $alias(&self, rhs: impl Operand) -> Result<Self> {
                self.$name(rhs)
            })*
        }
    };
}

aliases! {
    broadcast_add, add;
    broadcast_sub, sub;
    broadcast_mul, mul;
    broadcast_div, div;
    broadcast_maximum, maximum;
    broadcast_minimum, minimum;
    broadcast_pow, pow;
    broadcast_eq, eq;
    broadcast_ne, ne;
    broadcast_lt, lt;
    broadcast_le, le;
    broadcast_gt, gt;
    broadcast_ge, ge;
}

impl DTensor {
    /// [`matmul`](Self::matmul), under candle's other name.
    #[track_caller]
    pub fn broadcast_matmul(&self, rhs: &Self) -> Result<Self> {
        self.matmul(rhs)
    }

    /// [`slice_scatter`](Self::slice_scatter) along dim 0.
    #[track_caller]
    pub fn slice_scatter0(&self, src: &Self, start: usize) -> Result<Self> {
        self.slice_scatter(src, 0, start)
    }

    /// [`upsample_nearest1d`](Self::upsample_nearest1d), under candle's other name.
    #[track_caller]
    pub fn interpolate1d(&self, target_size: usize) -> Result<Self> {
        self.upsample_nearest1d(target_size)
    }

    /// [`upsample_nearest2d`](Self::upsample_nearest2d), under candle's other name.
    #[track_caller]
    pub fn interpolate2d(&self, target_h: usize, target_w: usize) -> Result<Self> {
        self.upsample_nearest2d([target_h, target_w])
    }

    /// [`avg_pool2d`](Self::avg_pool2d) with candle's arguments.
    #[track_caller]
    pub fn avg_pool2d_with_stride(&self, size: impl ToUsize2, stride: impl ToUsize2) -> Result<Self> {
        self.avg_pool2d(pool(size, stride))
    }

    /// [`max_pool2d`](Self::max_pool2d) with candle's arguments.
    #[track_caller]
    pub fn max_pool2d_with_stride(&self, size: impl ToUsize2, stride: impl ToUsize2) -> Result<Self> {
        self.max_pool2d(pool(size, stride))
    }

    /// Returns the element of a scalar, on every rank.
    pub fn to_vec0<S: WithDType>(&self) -> Result<S> {
        Ok(self.whole_on_host()?.to_vec0()?)
    }

    /// Returns all elements of a tensor with one dim, on every rank.
    pub fn to_vec1<S: WithDType>(&self) -> Result<Vec<S>> {
        Ok(self.whole_on_host()?.to_vec1()?)
    }

    /// Returns all elements of a tensor with two dims, on every rank.
    pub fn to_vec2<S: WithDType>(&self) -> Result<Vec<Vec<S>>> {
        Ok(self.whole_on_host()?.to_vec2()?)
    }

    /// Returns all elements of a tensor with three dims, on every rank.
    pub fn to_vec3<S: WithDType>(&self) -> Result<Vec<Vec<Vec<S>>>> {
        Ok(self.whole_on_host()?.to_vec3()?)
    }
}

fn pool(size: impl ToUsize2, stride: impl ToUsize2) -> Pool {
    Pool { size: size.to_usize2().into(), stride: stride.to_usize2().into() }
}
