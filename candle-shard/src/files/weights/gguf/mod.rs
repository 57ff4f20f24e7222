//! The header of a GGUF file: metadata, and where each tensor lies.
//!
//! Counts, lengths, types and offsets are checked against the length of the file before memory is taken for them.
//!
#![doc = include_str!("README.md")]

mod bytes;
pub(super) mod codes;
pub(super) mod scaled;
pub(super) mod split;
pub(super) mod types;

use super::entry::{Entry, elements};
use bytes::Bytes;
use candle_core::quantized::gguf_file::Value;
use std::collections::BTreeMap;
use std::fs::File;

/// The first bytes of a GGUF file.
pub(super) const MAGIC: [u8; 4] = *b"GGUF";

/// The named values of a GGUF file.
pub(super) type GgufMetadata = BTreeMap<String, Value>;

/// Where tensors begin, unless `general.alignment` has another value.
const ALIGNMENT: u64 = 32;
const MOST_DIMS: u32 = 4;
/// The largest dim that is accepted, so that no product of dims and bytes overflows before it is checked.
const LONGEST_DIM: u64 = 1 << 48;

/// A tensor as the header describes it; its offset counts from the first byte of data.
struct GgufEntry {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    offset: u64,
    bytes: u64,
}

/// Returns whether the header goes on behind the first `length` bytes of a file.
pub(super) fn goes_on(file: File, length: u64) -> bool {
    let mut bytes = Bytes::new(file, length);
    header(&mut bytes).is_err() && bytes.is_cut
}

/// Reads the header of a file with this many bytes.
pub(super) fn read(file: File, length: u64) -> Result<(GgufMetadata, BTreeMap<String, Entry>), String> {
    let mut bytes = Bytes::new(file, length);
    let (metadata, alignment, described) = header(&mut bytes)?;
    let data = bytes.at.next_multiple_of(alignment);
    let has = length.saturating_sub(data);
    let mut entries = BTreeMap::new();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for GgufEntry { name, dtype, shape, offset, bytes } in described {
        let end = offset.checked_add(bytes).filter(|&end| end <= has);
        let Some(end) = end else {
            return Err(format!("{name:?} has {bytes} bytes at {offset} of the data, which has only {has}"));
        };
        taken.extend((bytes > 0).then_some((offset, end)));
        let entry = Entry { dtype: dtype.into(), shape, at: data + offset };
        if entries.insert(name.clone(), entry).is_some() {
            return Err(format!("has the tensor {name:?} twice"));
        }
    }
    taken.sort_unstable();
    match taken.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        None => Ok((metadata, entries)),
        Some(pair) => Err(format!("has two tensors that overlap at {} of the data", pair[1].0)),
    }
}

/// Reads what the header says: the metadata, the alignment of tensors, and these.
fn header(bytes: &mut Bytes) -> Result<(GgufMetadata, u64, Vec<GgufEntry>), String> {
    let magic = bytes.array::<4>()?;
    if magic != MAGIC {
        return Err(format!("begins with {magic:02x?} instead of GGUF"));
    }
    let version = bytes.u32()?;
    if !(2..=3).contains(&version) {
        let hint = if version.swap_bytes() == 3 { ", so the file is big-endian" } else { "" };
        return Err(format!(
            "has version {version}{hint}; versions 2 and 3 in little-endian order can be read"
        ));
    }
    let tensors = bytes.count("tensors", 24)?;
    let pairs = bytes.count("metadata values", 13)?;
    let mut metadata = GgufMetadata::new();
    for _ in 0..pairs {
        let name = bytes.text()?;
        let kind = bytes.u32()?;
        let value = bytes.value(kind, 0).map_err(|why| format!("{why} (metadata {name:?})"))?;
        if metadata.insert(name.clone(), value).is_some() {
            return Err(format!("has the metadata {name:?} twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => ALIGNMENT,
        Some(value) => whole(value)
            .filter(|n| n.is_power_of_two() && *n <= 1 << 20)
            .ok_or_else(|| format!("has the alignment {value:?}; want a power of two up to 1048576"))?,
    };
    let described = (0..tensors).map(|_| describe(bytes, alignment)).collect::<Result<_, _>>()?;
    Ok((metadata, alignment, described))
}

/// Reads what the header says of the next tensor.
fn describe(bytes: &mut Bytes, alignment: u64) -> Result<GgufEntry, String> {
    let name = bytes.text()?;
    let wrong = |why: String| format!("{name:?} {why}");
    let dims = bytes.u32().map_err(wrong)?;
    if dims > MOST_DIMS {
        return Err(wrong(format!("has {dims} dims; want at most {MOST_DIMS}")));
    }
    // Files list the innermost dim first.
    let mut shape = vec![0; dims as usize];
    for size in shape.iter_mut().rev() {
        let n = bytes.u64().map_err(wrong)?;
        let fits = usize::try_from(n).ok().filter(|_| n <= LONGEST_DIM);
        *size = fits.ok_or_else(|| wrong(format!("has a dim of {n}")))?;
    }
    let (number, offset) = (bytes.u32().map_err(wrong)?, bytes.u64().map_err(wrong)?);
    let (dtype, storage) = types::numbered(number).map_err(wrong)?;
    if !offset.is_multiple_of(alignment) {
        return Err(wrong(format!("begins at {offset}, which is no multiple of the alignment {alignment}")));
    }
    let (block, size) = storage.block();
    if !shape.last().unwrap_or(&1).is_multiple_of(block) {
        return Err(wrong(format!(
            "is {dtype}{shape:?}, and blocks of {dtype} have {block} elements of a row"
        )));
    }
    let count = elements(&shape).map(|n| n / block).and_then(|n| n.checked_mul(size));
    let count = count.ok_or_else(|| wrong(format!("is {dtype}{shape:?}, more than memory can hold")))?;
    Ok(GgufEntry { name, dtype, shape, offset, bytes: count as u64 })
}

/// Returns a whole number of any type.
fn whole(value: &Value) -> Option<u64> {
    match *value {
        Value::U8(n) => Some(n.into()),
        Value::U16(n) => Some(n.into()),
        Value::U32(n) => Some(n.into()),
        Value::U64(n) => Some(n),
        Value::I8(n) => n.try_into().ok(),
        Value::I16(n) => n.try_into().ok(),
        Value::I32(n) => n.try_into().ok(),
        Value::I64(n) => n.try_into().ok(),
        _ => None,
    }
}
