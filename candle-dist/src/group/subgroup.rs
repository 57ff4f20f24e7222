//! Groups of some members of a group, and what they have of it.
use super::ProcessGroup;
use crate::Result;
use crate::switch::Switches;
use candle_core::{Device, Tensor};
use std::panic::Location;

impl ProcessGroup {
    /// Creates the group of `members`, ranks of this group in the order of the new group. Only members call it.
    #[track_caller]
    pub fn subgroup(&self, members: &[usize]) -> Result<Self> {
        for (i, &member) in members.iter().enumerate() {
            self.check_rank_named("subgroup", member)?;
            if members[..i].contains(&member) {
                return Err(
                    self.invalid_named("subgroup", format!("rank {member} occurs twice in {members:?}"))
                );
            }
        }
        let site = Location::caller();
        let _entered =
            self.under_way.enter_creation(members, site).map_err(|other| self.overlap(other, site))?;
        let made = Self::new(self.backend.subgroup(members)?);
        Ok(Self { timeout: self.timeout, switches: self.switches, ..made })
    }

    /// Splits the group by `color`. Within a color, ranks are ordered by `key`, then by their rank here.
    ///
    /// Every rank calls it; ranks that give `None` get no group.
    #[track_caller]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let mine = Tensor::new(&[[color.map_or(-1, i64::from), key]], &Device::Cpu)?;
        let all = self.all_gather(&mine, 0)?.to_vec2::<i64>()?;
        let Some(color) = color else { return Ok(None) };
        let mut members: Vec<usize> = (0..all.len()).filter(|&r| all[r][0] == i64::from(color)).collect();
        members.sort_by_key(|&r| (all[r][1], r));
        self.subgroup(&members).map(Some)
    }

    /// Returns this group with the switches of its world.
    pub(crate) fn with_switches(self, switches: Switches) -> Self {
        Self { switches, ..self }
    }
}
