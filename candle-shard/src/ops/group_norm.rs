//! Group norm.
use crate::agreement::Frequency;
use crate::{DTensor, Error, Result};
use candle_dist::empty;

impl DTensor {
    /// Group norm of `[batch, channels, ..]`: normalizes each group of consecutive channels of each batch element to
    /// mean 0 and variance 1, then scales channels by `weight` and adds `bias`, both `[channels]` (Wu & He 2018).
    ///
    /// The batch and the channels may be sharded. Shards that cut through a group are resized first.
    ///
    /// # Errors
    /// If the groups do not divide the channels, or shapes or dtypes do not agree.
    #[track_caller]
    pub fn group_norm(&self, groups: usize, weight: &Self, bias: &Self, eps: f64) -> Result<Self> {
        let op = "group_norm";
        self.check_float(op)?;
        let &[batch, channels, ref spatial @ ..] = self.dims() else {
            return Error::op(op, format!("{}: expected [batch, channels, ..]", self.spec()));
        };
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Error::op(
                op,
                format!("{groups} groups do not divide the {channels} channels of {}", self.spec()),
            );
        }
        if let Some(p) =
            [weight, bias].into_iter().find(|p| p.dims() != [channels] || p.dtype() != self.dtype())
        {
            let reason =
                format!("a parameter {} for an input {}: expected [{channels}]", p.spec(), self.spec());
            return Error::op(op, format!("{reason} of its dtype"));
        }
        let width = channels / groups * spatial.iter().product::<usize>();
        let constant = |value: f64| {
            let whole = empty::full(value, width, self.dtype(), self.device())?;
            Self::everywhere(&whole, self.mesh(), Frequency::OnDemand)
        };
        let rows = self.reshape((batch, groups, width))?;
        let normal = rows.layer_norm(&constant(1.0)?, &constant(0.0)?, eps)?.reshape(self.dims())?;
        let per_channel: Vec<usize> = [channels].into_iter().chain(spatial.iter().map(|_| 1)).collect();
        normal.mul(&weight.reshape(&per_channel[..])?)?.add(&bias.reshape(&per_channel[..])?)
    }
}
