//! Choices of random programs and models.

/// A die whose numbers depend on its seed alone.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Creates a die.
    pub fn new(seed: u64) -> Self {
        let mut dice = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        dice.below(2); // neighboring seeds start alike
        dice
    }

    /// Returns a number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    /// Returns one of these values.
    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    /// Returns true once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns the size of a small dim.
    pub fn size(&mut self) -> usize {
        1 + self.below(5)
    }
}
