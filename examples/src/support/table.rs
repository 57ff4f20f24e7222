//! Tables for people.

use std::fmt::Display;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};

/// Creates an empty table with columns of text, followed by columns of numbers.
pub fn table(texts: &[&str], numbers: &[&str]) -> Table {
    let mut table = Table::new();
    let header = texts.iter().map(Cell::new).chain(numbers.iter().map(number));
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    table
}

/// Creates a cell for a number, aligned to the right.
pub fn number(value: impl Display) -> Cell {
    Cell::new(value).set_alignment(CellAlignment::Right)
}

/// Formats `1234567` as `1,234,567`.
pub fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}
