//! The element types of GGUF files.
use super::codes::Code;
use candle_core::DType;
use candle_core::quantized::GgmlDType;
use itertools::Itertools;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::files::weights) enum Storage {
    /// One after the other.
    Plain(DType),
    /// In blocks of a row, which share scales.
    Blocks(GgmlDType),
    /// In blocks of a row that candle has no products of.
    Codes(Code),
}

/// The types that can be read: their numbers in files, their names, and how their elements are stored.
const TYPES: [(u32, &str, Storage); 34] = {
    use Storage::{Blocks, Codes, Plain};
    [
        (0, "F32", Plain(DType::F32)),
        (1, "F16", Plain(DType::F16)),
        (2, "Q4_0", Blocks(GgmlDType::Q4_0)),
        (3, "Q4_1", Blocks(GgmlDType::Q4_1)),
        (6, "Q5_0", Blocks(GgmlDType::Q5_0)),
        (7, "Q5_1", Blocks(GgmlDType::Q5_1)),
        (8, "Q8_0", Blocks(GgmlDType::Q8_0)),
        (9, "Q8_1", Blocks(GgmlDType::Q8_1)),
        (10, "Q2_K", Blocks(GgmlDType::Q2K)),
        (11, "Q3_K", Blocks(GgmlDType::Q3K)),
        (12, "Q4_K", Blocks(GgmlDType::Q4K)),
        (13, "Q5_K", Blocks(GgmlDType::Q5K)),
        (14, "Q6_K", Blocks(GgmlDType::Q6K)),
        (15, "Q8_K", Blocks(GgmlDType::Q8K)),
        (16, "IQ2_XXS", Codes(Code::Iq2Xxs)),
        (17, "IQ2_XS", Codes(Code::Iq2Xs)),
        (18, "IQ3_XXS", Codes(Code::Iq3Xxs)),
        (19, "IQ1_S", Codes(Code::Iq1S)),
        (20, "IQ4_NL", Codes(Code::Iq4Nl)),
        (21, "IQ3_S", Codes(Code::Iq3S)),
        (22, "IQ2_S", Codes(Code::Iq2S)),
        (23, "IQ4_XS", Codes(Code::Iq4Xs)),
        (25, "I16", Plain(DType::I16)),
        (26, "I32", Plain(DType::I32)),
        (27, "I64", Plain(DType::I64)),
        (28, "F64", Plain(DType::F64)),
        (29, "IQ1_M", Codes(Code::Iq1M)),
        (30, "BF16", Plain(DType::BF16)),
        (34, "TQ1_0", Codes(Code::Tq1)),
        (35, "TQ2_0", Codes(Code::Tq2)),
        (39, "MXFP4", Codes(Code::Mxfp4)),
        (40, "NVFP4", Codes(Code::Nvfp4)),
        (41, "Q1_0", Codes(Code::Q1)),
        (42, "Q2_0", Codes(Code::Q2)),
    ]
};

/// Names of types that exist and cannot be read, for messages.
const OTHERS: [(u32, &str); 2] = [(4, "Q4_2"), (24, "I8")];

/// Returns the name and the storage of the type with this number.
pub(super) fn numbered(number: u32) -> Result<(&'static str, Storage), String> {
    if let Some(&(_, name, storage)) = TYPES.iter().find(|(id, ..)| *id == number) {
        return Ok((name, storage));
    }
    let name = OTHERS.iter().find(|(id, _)| *id == number).map_or("unknown", |(_, name)| name);
    let known = TYPES.iter().map(|(_, name, _)| name).join(", ");
    Err(format!("has the type {number} ({name}), which cannot be read; convert the file to one of {known}"))
}

/// Returns how the type with this name is stored, if it is in blocks.
pub(in crate::files::weights) fn quantized(name: &str) -> Option<Storage> {
    let found = TYPES.iter().find_map(|&(_, known, storage)| (known == name).then_some(storage));
    found.filter(|storage| !matches!(storage, Storage::Plain(_)))
}

impl Storage {
    /// Returns the elements and the bytes of what is stored together.
    pub(in crate::files::weights) fn block(self) -> (usize, usize) {
        match self {
            Self::Plain(dtype) => (1, dtype.size_in_bytes()),
            Self::Blocks(blocks) => (blocks.block_size(), blocks.type_size()),
            Self::Codes(code) => code.block(),
        }
    }
}
