//! Unlike shares of the ranks of an axis.
use crate::layout::Width;
use crate::{Error, Result};
use candle_dist::backend::Dims;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The shares of the ranks of an axis, for example 3:1 if the first rank has three times the memory of the second.
///
/// Dims are cut in these proportions, as nearly as their units allow: the units that remain after rounding down go to the
/// ranks with the largest remainders, and to the first of them if they are equal.
///
/// ```
/// use candle_shard::nn::Width;
/// use candle_shard::parallel::Shares;
///
/// let shares: Shares = "3:1".parse()?;
/// assert_eq!(shares.cut(Width::new(9, 64)).as_slice(), [7 * 64, 2 * 64]); // 6.75 and 2.25 heads
/// assert!("3:x".parse::<Shares>().is_err() && "0:0".parse::<Shares>().is_err());
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares(Arc<[u32]>);

impl Shares {
    /// Creates the shares of as many ranks. A rank with a share of 0 gets nothing.
    ///
    /// # Errors
    /// If there are none, or all are 0.
    pub fn new(shares: &[u32]) -> Result<Self> {
        match shares.iter().any(|&share| share > 0) {
            true => Ok(Self(shares.into())),
            false => Err(Error::Plan(format!(
                "shares {shares:?} are all 0; give at least one rank a positive share"
            ))),
        }
    }

    /// Returns the shares of a dim of `units` units, of which each adds `weight`, that make the largest sum on a rank least: ranks have as
    /// much as `loads` says before. A dim of so many units is cut into just these shares.
    ///
    /// ```
    /// use candle_shard::nn::Width;
    /// use candle_shard::parallel::Shares;
    ///
    /// // The first of two ranks has two of three heads of 100 numbers, and 12 units of 40 numbers follow.
    /// let shares = Shares::beside(&[200, 100], 12, 40)?;
    /// assert_eq!(shares.cut(Width::new(12, 8)).as_slice(), [5 * 8, 7 * 8]); // 400 and 380 numbers
    /// # Ok::<(), candle_shard::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there are no ranks, or no units.
    pub fn beside(loads: &[usize], units: usize, weight: usize) -> Result<Self> {
        let mut shares = vec![0; loads.len()];
        let sum = |shares: &[u32], rank: usize| {
            loads[rank].saturating_add((shares[rank] as usize).saturating_mul(weight))
        };
        for _ in 0..units {
            let least = (0..loads.len()).min_by_key(|&rank| sum(&shares, rank));
            least.into_iter().for_each(|rank| shares[rank] += 1);
        }
        Self::new(&shares)
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.len()
    }

    /// Returns the sizes of the shards of a dim, one for each rank.
    pub fn cut(&self, width: Width) -> Dims {
        let (units, total) =
            (width.units as u128, self.0.iter().map(|&share| u128::from(share)).sum::<u128>());
        let parts: Vec<u128> = self.0.iter().map(|&share| units * u128::from(share)).collect();
        let mut made: Vec<u128> = parts.iter().map(|part| part / total).collect();
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(|&rank| std::cmp::Reverse(parts[rank] % total));
        let rest = units - made.iter().sum::<u128>();
        order.into_iter().take(rest as usize).for_each(|rank| made[rank] += 1);
        made.into_iter().map(|units| units as usize * width.unit).collect()
    }
}

/// Returns the sizes of the shards of a dim: in shares, or evenly without.
pub(super) fn cut(shares: Option<&Shares>, width: Width, ranks: usize) -> Dims {
    match shares {
        Some(shares) if ranks > 1 => shares.cut(width),
        _ => width.cut(ranks),
    }
}

impl FromStr for Shares {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let shares: Option<Vec<u32>> = text.split(':').map(|share| share.trim().parse().ok()).collect();
        match shares {
            Some(shares) => Self::new(&shares),
            None => Err(Error::Plan(format!(
                "shares {text:?} are no numbers with colons between them; write 3:1"
            ))),
        }
    }
}

impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&shares.join(":"))
    }
}
