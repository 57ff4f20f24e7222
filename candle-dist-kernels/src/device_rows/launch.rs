//! What the kernels of `rows.cu` are called with.

/// The text of the kernels.
pub const SOURCE: &str = include_str!("rows.cu");

/// The threads of a launch over rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowsLaunch {
    /// The threads of a block: for columns, and for rows.
    pub block: [u32; 2],
    /// The blocks. Each has several rows in turn if there are more.
    pub blocks: u32,
}

impl RowsLaunch {
    /// The threads of a block.
    pub const THREADS: usize = 128;

    /// Divides a matrix. A block has as many threads for columns as a row needs, and the others for more rows.
    pub fn over(rows: usize, width: usize) -> Self {
        let columns = width.clamp(1, Self::THREADS).next_power_of_two();
        let at_a_time = Self::THREADS / columns;
        let blocks = rows.div_ceil(at_a_time).clamp(1, i32::MAX as usize);
        Self { block: [columns as u32, at_a_time as u32], blocks: blocks as u32 }
    }
}
