//! Processors without the instruction for pairs of bf16.
use super::matrix::LeftOperand;

/// The instruction, of which there is none.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pairs {}

impl Pairs {
    pub(super) fn new() -> Option<Self> {
        None
    }

    pub(super) fn tile(
        self,
        _: usize,
        _: LeftOperand<'_, [u16; 2]>,
        _: &[[u16; 2]],
        _: (&mut [f32], [usize; 2]),
        _: bool,
    ) {
        match self {}
    }
}
