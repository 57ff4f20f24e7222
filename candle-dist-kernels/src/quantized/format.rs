//! How the blocks of each quantized type lie in tiles.

use candle_core::quantized::GgmlDType;

/// Columns of a tile, whose inputs share one scale.
pub(super) const COLUMNS: usize = 32;

/// Rows of a tile.
pub(super) const ROWS: usize = 16;

/// Bytes of a chunk: a byte for each row and each of four columns.
pub(super) const CHUNK: usize = 64;

/// Groups of four columns in a tile.
pub(super) const GROUPS: usize = COLUMNS / 4;

/// What scales a block has besides its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// None.
    Whole,
    /// An unsigned scale and an unsigned minimum for each 32 columns.
    Of32,
    /// A signed scale for each 16 columns.
    Of16,
    /// A scale and a minimum for each 16 columns, four bits each.
    Pairs,
}

/// The layout of a type: a weight is `scale · (code - zero)`, or `scale · code` plus or minus a minimum.
///
/// Sixteen rows lie together, block by block: the scales of all rows as f16, their minimums as f16 if there are any,
/// and the tiles. A tile has its scales and two planes with the low and the high bits of its codes. A plane of `b` bits
/// has `b` chunks; the bits of the group of columns `g` are in chunk `g % b`, from bit `b · (g / b)` of each byte.
#[derive(Debug, Clone, Copy)]
pub(super) struct CodeLayout {
    /// Columns of a block.
    pub(super) columns: usize,
    /// Bytes of a block in a file.
    pub(super) stored: usize,
    /// Bits of a code in the first plane.
    pub(super) low: u32,
    /// Bits of a code in the second plane, or 0.
    pub(super) high: u32,
    /// The code of the weight 0, if no minimum says it.
    pub(super) zero: i32,
    /// Whether minimums are added; those of `Of32` and `Pairs` are subtracted.
    pub(super) adds: bool,
    pub(super) scales: Scales,
}

impl CodeLayout {
    /// Whether there are minimums.
    pub(super) const fn has_minimum(self) -> bool {
        self.adds || matches!(self.scales, Scales::Of32 | Scales::Pairs)
    }

    /// The bytes in front of the tiles of a block.
    pub(super) const fn header(self) -> usize {
        2 * ROWS * (1 + self.has_minimum() as usize)
    }

    /// The bytes of the scales of a tile.
    pub(super) const fn scales_bytes(self) -> usize {
        if matches!(self.scales, Scales::Whole) { 0 } else { 2 * ROWS }
    }

    /// The bytes of a tile.
    pub(super) const fn tile(self) -> usize {
        self.scales_bytes() + (self.low + self.high) as usize * CHUNK
    }

    /// The bytes of a block of sixteen rows.
    pub(super) const fn block(self) -> usize {
        self.header() + self.columns / COLUMNS * self.tile()
    }

    /// The largest code.
    pub(super) const fn most(self) -> i32 {
        (1 << (self.low + self.high)) - 1
    }
}

/// A type with its layout, known to the compiler.
pub(super) trait Format {
    const LAYOUT: CodeLayout;
}

macro_rules! formats {
    ($($name:ident: $columns:literal columns in $stored:literal bytes, bits $low:literal + $high:literal, zero $zero:literal,
       adds $adds:literal, $scales:ident;)+) => {
        $(pub(super) struct $name;

        impl Format for $name {
            const LAYOUT: CodeLayout = CodeLayout {
                columns: $columns,
                stored: $stored,
                low: $low,
                high: $high,
                zero: $zero,
                adds: $adds,
                scales: Scales::$scales,
            };
        })+

        /// Returns the layout of a type; `None` for those that are no weights.
        pub(super) fn layout(dtype: GgmlDType) -> Option<CodeLayout> {
            match dtype {
                $(GgmlDType::$name => Some($name::LAYOUT),)+
                _ => None,
            }
        }

        /// Evaluates an expression with a name for the format of a type; `None` for a type without one.
        macro_rules! with_format {
            ($dtype:expr, $format:ident => $body:expr) => {
                match $dtype {
                    $(GgmlDType::$name => {
                        type $format = $crate::quantized::format::$name;
                        Some($body)
                    })+
                    _ => None,
                }
            };
        }
    };
}

formats! {
    Q4_0: 32 columns in 18 bytes, bits 4 + 0, zero 8, adds false, Whole;
    Q4_1: 32 columns in 20 bytes, bits 4 + 0, zero 0, adds true, Whole;
    Q5_0: 32 columns in 22 bytes, bits 4 + 1, zero 16, adds false, Whole;
    Q5_1: 32 columns in 24 bytes, bits 4 + 1, zero 0, adds true, Whole;
    Q8_0: 32 columns in 34 bytes, bits 8 + 0, zero 128, adds false, Whole;
    Q2K: 256 columns in 84 bytes, bits 2 + 0, zero 0, adds false, Pairs;
    Q3K: 256 columns in 110 bytes, bits 2 + 1, zero 4, adds false, Of16;
    Q4K: 256 columns in 144 bytes, bits 4 + 0, zero 0, adds false, Of32;
    Q5K: 256 columns in 176 bytes, bits 4 + 1, zero 0, adds false, Of32;
    Q6K: 256 columns in 210 bytes, bits 4 + 2, zero 32, adds false, Of16;
}
#[allow(clippy::single_component_path_imports)] // it makes a macro visible to other files
pub(super) use with_format;

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
pub(super) mod tests {
    use super::*;

    /// All types of weights.
    pub(in crate::quantized) const ALL: [GgmlDType; 10] = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ];

    #[test]
    fn tiles_are_no_larger_than_files_but_for_scales_of_six_bits() {
        for dtype in ALL {
            let layout = layout(dtype).unwrap();
            assert_eq!((layout.columns, layout.stored), (dtype.block_size(), dtype.type_size()), "{dtype:?}");
            let more = layout.block() - ROWS * layout.stored;
            let six_bits = matches!(dtype, GgmlDType::Q3K | GgmlDType::Q4K | GgmlDType::Q5K);
            assert_eq!(more, if six_bits { 4 * ROWS } else { 0 }, "{dtype:?}");
        }
        assert!(
            [GgmlDType::F32, GgmlDType::Q8_1, GgmlDType::Q8K]
                .into_iter()
                .all(|dtype| layout(dtype).is_none())
        );
    }
}
