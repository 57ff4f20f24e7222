//! What a kernel needs of a processor: a lane for each of the sixteen rows of a tile.

use super::format::{CHUNK, ROWS};

/// Vectors of sixteen rows. A value of the type exists only where the processor has their instructions.
///
/// All kinds of lanes compute the same bits: integers exactly, and floats one operation at a time.
pub(super) trait Lanes: Copy + Sync {
    /// Four codes, from 0 to 255, of each row.
    type Codes: Copy;
    /// A sum of integers of each row, as it grows.
    type Sums: Copy;
    /// A float of each row.
    type Floats: Copy;

    /// Whether there are enough registers for the sums of eight rows of inputs.
    const HAS_MANY: bool;

    /// Runs a kernel compiled for the processor's instructions.
    fn run<K: Kernel>(self, kernel: K);

    fn zeros(self) -> Self::Floats;

    /// Widens f16.
    fn halves(self, from: &[u8; 2 * ROWS]) -> Self::Floats;

    /// Widens integers without a sign.
    fn unsigned(self, from: &[u8; ROWS]) -> Self::Floats;

    /// Widens integers with a sign.
    fn signed(self, from: &[u8; ROWS]) -> Self::Floats;

    /// Returns `chunk >> right & mask` of each byte, for `right` below 8; or `chunk << -right & mask`.
    fn bits(self, chunk: &[u8; CHUNK], right: i32, mask: u8) -> Self::Codes;

    fn or(self, a: Self::Codes, b: Self::Codes) -> Self::Codes;

    /// Returns the code of one of the four columns of each row, less `zero`.
    fn column(self, codes: Self::Codes, column: i32, zero: i32) -> Self::Floats;

    fn start(self, sum: i32) -> Self::Sums;

    /// Adds the products of four codes, none above `most`, and the four signed bytes of `word`.
    ///
    /// After as many calls as [`room`](Self::room) says, [`settle`](Self::settle) must follow.
    fn dot(self, sums: Self::Sums, codes: Self::Codes, word: i32, most: i32) -> Self::Sums;

    /// Returns how many products fit in before sums must be settled, for codes up to `most`.
    fn room(self, most: i32) -> usize;

    /// Makes room for more products.
    fn settle(self, sums: Self::Sums) -> Self::Sums;

    /// Returns the settled sums as floats.
    fn floats(self, sums: Self::Sums) -> Self::Floats;

    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn times(self, a: Self::Floats, factor: f32) -> Self::Floats;

    fn store(self, floats: Self::Floats, to: &mut [f32; ROWS]);

    /// Asks for memory that is read soon.
    fn prefetch(self, from: *const u8);
}

/// Work that any lanes can do.
pub(super) trait Kernel {
    fn run<L: Lanes>(self, lanes: L);
}
