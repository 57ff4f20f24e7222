//! Matrices and stacks of MLX, whose headers say how they are quantized.
use super::super::{StoredTensor, Weights};
use super::Scheme;
use super::decode::{MatrixPart, WORD, of_matrix};
use super::layers::is_word;
use crate::{Error, Result};
use itertools::Itertools;
use serde_json::Value;

/// How codes of MLX stand for numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MlxMode {
    /// Whole numbers times the scale of a group, plus its bias.
    Affine,
    /// Floats of so many bits, in groups of so many columns. Their scales are floats of 8 bits for 16 columns, and powers of 2 for 32.
    Floats { bits: usize, size: usize },
}

impl MlxMode {
    /// Returns what a config, or its object for a module, says.
    pub(super) fn of(said: &Value) -> Result<Self, String> {
        let mode = said.get("mode").filter(|mode| !mode.is_null());
        match mode.map(|mode| mode.as_str().unwrap_or_default()) {
            None | Some("affine") => Ok(Self::Affine),
            Some("mxfp4") => Ok(Self::Floats { bits: 4, size: 32 }),
            Some("mxfp8") => Ok(Self::Floats { bits: 8, size: 32 }),
            Some("nvfp4") => Ok(Self::Floats { bits: 4, size: 16 }),
            Some(_) => Err(format!("has mode {}; affine, mxfp4, mxfp8 and nvfp4 can be read", said["mode"])),
        }
    }
}

impl Weights {
    /// Finds matrices of MLX's codes, and stacks of them, whose numbers of bits follow from the shapes; `config` names modules with other
    /// groups than `group`, or another mode.
    pub(super) fn mlx(&mut self, config: &Value, group: usize, mode: MlxMode) -> Result<()> {
        for module in self.modules(".scales") {
            let (codes, scales) = (self.need(&module, ".weight")?, self.need(&module, ".scales")?);
            let own = of_module(config, &module);
            // The object of a module says all of it.
            let mode = match own.is_object() {
                true => MlxMode::of(own).map_err(|reason| Error::file(&self.source, reason))?,
                false => mode,
            };
            let (size, known) = match mode {
                MlxMode::Affine => {
                    (own["group_size"].as_u64().map_or(group, |size| size as usize), &[2, 3, 4, 5, 6, 8][..])
                }
                MlxMode::Floats { bits: 4, size } => (size, &[4][..]),
                MlxMode::Floats { size, .. } => (size, &[8][..]),
            };
            let (front, last) = codes.shape.split_at(codes.shape.len().saturating_sub(1));
            let found = match (last, scales.shape.split_last()) {
                (&[words], Some((&groups, of))) if front == of && groups > 0 => groups
                    .checked_mul(size)
                    .zip(words.checked_mul(32))
                    .filter(|(columns, bits)| *columns > 0 && bits.is_multiple_of(*columns))
                    .map(|(columns, bits)| (columns, bits / columns)),
                _ => None,
            };
            let found = found.filter(|(_, bits)| known.contains(bits));
            let stack = match *front {
                [rows] => Some((None, rows)),
                [count, rows] => Some((Some(count), rows)),
                _ => None,
            };
            let (Some((columns, bits)), Some((count, rows)), true) = (found, stack, is_word(&codes)) else {
                let bits = known.iter().join(" or ");
                let why =
                    format!("as codes of {bits} bits with scales {:?} of groups of {size}", scales.shape);
                return Err(self.wrong(&module, &codes, &why));
            };
            let biases = match mode {
                MlxMode::Affine => Some(self.need(&module, ".biases")?),
                MlxMode::Floats { .. } => None,
            };
            if let Some(biases) = biases.as_ref().filter(|biases| biases.shape != scales.shape) {
                let why = format!("as biases beside scales {:?}", scales.shape);
                return Err(self.wrong(&module, biases, &why));
            }
            if biases.is_none() && scales.dtype != "U8" {
                return Err(self.wrong(&module, &scales, "as scales of floats; expected U8"));
            }
            let scheme = |index: Option<usize>| {
                let (codes, scales) = (codes.clone(), scales.clone());
                match biases.clone() {
                    Some(biases) => Scheme::Affine { codes, scales, biases, bits, size, index },
                    None => Scheme::Floats { codes, scales, bits, size, index },
                }
            };
            let shape = [rows, columns];
            match count {
                None => self.give(&module, shape, scheme(None))?,
                Some(count) => {
                    let made = StoredTensor::of_matrices(count, shape, |at| scheme(Some(at)));
                    self.tensors.insert(format!("{module}.weight"), made);
                }
            }
        }
        Ok(())
    }
}

impl MatrixPart {
    pub(super) fn affine(
        &self,
        weights: &Weights,
        [codes, scales, biases]: [&StoredTensor; 3],
        (bits, size): (usize, usize),
        index: Option<usize>,
    ) -> Result<Vec<f32>> {
        let (held, (group_of, of_columns)) = (self.run(weights, codes, bits, index)?, self.groups(size));
        let of_groups = of_matrix(index, [self.rows.clone(), of_columns.clone()]);
        let (scale, bias) = (scales.floats(weights, &of_groups)?, biases.floats(weights, &of_groups)?);
        Ok(self.filled(|row| {
            let at_row = row - self.rows.start;
            let (scale, bias) = (&scale[at_row * of_columns.len()..], &bias[at_row * of_columns.len()..]);
            let (group_of, held) = (&group_of, &held);
            move |at| {
                let group = group_of[at];
                scale[group] * held.code(at_row, at) as f32 + bias[group]
            }
        }))
    }

    /// Returns the codes of a matrix whose rows are one run of bits each.
    fn run(
        &self,
        weights: &Weights,
        codes: &StoredTensor,
        bits: usize,
        index: Option<usize>,
    ) -> Result<CodeRun> {
        let wide = if codes.dtype == "U8" { 8 } else { WORD };
        let words = self.columns.start * bits / wide..(self.columns.end * bits).div_ceil(wide);
        let part = of_matrix(index, [self.rows.clone(), words.clone()]);
        let mut held = match wide {
            WORD => codes.words(weights, &part)?,
            _ => codes.bytes(weights, &part, 1)?.into_iter().map(u32::from).collect(),
        };
        // The last code is read with the word behind it, of which it has nothing.
        held.push(0);
        let places = self.columns.clone().map(|column| column * bits - words.start * wide);
        let places = places.map(|bit| (bit / wide, bit % wide)).collect();
        Ok(CodeRun { held, wide, words: words.len(), places, mask: (1 << bits) - 1 })
    }
}

/// Codes of rows and columns, the first one in the lowest bits of the first word. A code may go on in the next word.
struct CodeRun {
    held: Vec<u32>,
    /// The bits of a word.
    wide: usize,
    /// The words of a row.
    words: usize,
    /// Where the code of each column begins: the word of its row, and the bit.
    places: Vec<(usize, usize)>,
    mask: u64,
}

impl CodeRun {
    fn code(&self, row: usize, column: usize) -> u32 {
        let (word, bit) = self.places[column];
        let at = row * self.words + word;
        let both = u64::from(self.held[at + 1]) << self.wide | u64::from(self.held[at]);
        (both >> bit & self.mask) as u32
    }
}

/// Returns what a config says of a module, by its name or by that in a larger model of which this one is a part.
fn of_module<'a>(config: &'a Value, module: &str) -> &'a Value {
    let is_it = |name: &str| {
        name.strip_suffix(module).is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let mut named = config.as_object().into_iter().flatten();
    named.find(|(name, _)| is_it(name)).map_or(&Value::Null, |(_, said)| said)
}
