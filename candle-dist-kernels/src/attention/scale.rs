//! What makes scores of products of queries and keys.
use crate::real::Real;

/// The factor of products of queries and keys, and the cap of the scores that it makes.
///
/// With a cap `c`, the score of a product `p` is `c · tanh(factor · p / c)`, as in Gemma 2.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    /// The factor.
    pub factor: f64,
    /// The cap, if there is one.
    pub cap: Option<f64>,
}

impl From<f64> for Scale {
    fn from(factor: f64) -> Self {
        Self { factor, cap: None }
    }
}

impl Scale {
    /// The factor of what [`cap`](Self::cap_row) leaves: capped products are scores already.
    pub(super) fn rest<T: Real>(&self) -> T {
        if self.cap.is_some() { T::one() } else { T::from_f64(self.factor) }
    }

    /// Returns the factor and the cap, 0 for none, as the kernels of CUDA devices get them. `None` if f32 does not hold them.
    #[cfg(any(test, feature = "cuda"))]
    pub(super) fn in_f32(&self) -> Option<[f32; 2]> {
        let (factor, cap) = (self.factor as f32, self.cap.map(|cap| cap as f32));
        let fits = factor.is_finite() && cap.is_none_or(|cap| cap.is_finite() && cap > 0.0);
        fits.then_some([factor, cap.unwrap_or(0.0)])
    }

    /// Replaces a row of products by capped scores, if there is a cap.
    pub(super) fn cap_row<T: Real>(&self, row: &mut [T]) {
        let Some(cap) = self.cap else { return };
        for v in row {
            *v = T::from_f64(cap * (v.to_f64() * self.factor / cap).tanh());
        }
    }

    /// Replaces a product by the score that [`cap_row`](Self::cap_row) makes of it, and returns the derivative of the score by what was
    /// capped, `factor · p`.
    ///
    /// The derivative follows from the product: a score near the cap has few digits that tell its distance from the cap.
    pub(super) fn cap_with_slope<T: Real>(&self, value: &mut T, cap: f64) -> T {
        let share = value.to_f64() * self.factor / cap;
        *value = T::from_f64(cap * share.tanh());
        let e = (-2.0 * share.abs()).exp();
        T::from_f64(4.0 * e / ((1.0 + e) * (1.0 + e)))
    }
}
