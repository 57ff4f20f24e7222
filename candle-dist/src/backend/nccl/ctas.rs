//! How many thread blocks (CTAs) a communicator's kernels may have, each of which takes a multiprocessor while it waits for other ranks.
use crate::{Error, Result};

/// The blocks of a message's kernels: enough for the speed of a link, and few enough for dozens of lanes at once.
const OF_LANE: u32 = 2;
/// The blocks of a collective's kernels, of all ranks that share a GPU. NCCL's documents ask for a limit then, because blocks that
/// find no room wait for blocks that never end.
const OF_SHARED_GPU: u32 = 16;
/// The most that NCCL takes.
const MOST: u32 = 64;

/// The limits of a rank's communicators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CtaLimits {
    /// The limit of a group; `None` leaves it to NCCL.
    pub(super) group: Option<u32>,
    /// The limit of a lane.
    pub(super) lane: u32,
}

impl CtaLimits {
    /// Returns the limits where `sharing` ranks share a GPU, unless the user has set one for groups.
    ///
    /// # Errors
    /// If the number is 0 or more than NCCL takes.
    pub(crate) fn new(wanted: Option<u32>, sharing: usize) -> Result<Self> {
        if let Some(wanted) = wanted.filter(|wanted| !(1..=MOST).contains(wanted)) {
            return Err(Error::Unsupported(format!(
                "communicators of {wanted} thread blocks (max_ctas); NCCL takes 1 to {MOST}"
            )));
        }
        let sharing = u32::try_from(sharing).unwrap_or(u32::MAX);
        let group = wanted.or_else(|| (sharing > 1).then(|| (OF_SHARED_GPU / sharing).max(1)));
        let lane = if sharing > 1 { 1 } else { OF_LANE };
        Ok(Self { group, lane: group.map_or(lane, |group| lane.min(group)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_have_few_blocks_each_and_lanes_always() {
        let of = |wanted, sharing| {
            let CtaLimits { group, lane } = CtaLimits::new(wanted, sharing).expect("a limit");
            (group, lane)
        };
        assert_eq!(of(None, 1), (None, 2));
        assert_eq!([of(None, 2), of(None, 4), of(None, 100)], [(Some(8), 1), (Some(4), 1), (Some(1), 1)]);
        assert_eq!([of(Some(32), 4), of(Some(1), 1)], [(Some(32), 1), (Some(1), 1)], "the user's counts");
        for wrong in [0, 65] {
            let text = CtaLimits::new(Some(wrong), 1).expect_err("no limit").to_string();
            assert!(text.contains("1 to 64"), "{text}");
        }
    }
}
