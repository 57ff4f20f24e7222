//! Processors without the instruction for pairs of bf16.
use super::pair_operand::Tile;

/// The instruction, of which there is none.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pairs {}

impl Pairs {
    pub(super) fn new() -> Option<Self> {
        None
    }

    pub(super) fn tile(self, _: usize, _: &Tile<'_>, _: &[[u16; 2]], _: (&mut [f32], usize)) {
        match self {}
    }
}
