//! Matrices and stacks of MLX, whose headers say how they are quantized.
use super::super::{StoredTensor, Weights};
use super::Scheme;
use super::layers::is_word;
use crate::Result;
use serde_json::Value;

impl Weights {
    /// Finds matrices of MLX's codes, and stacks of them, whose numbers of bits follow from the shapes; `config` names modules with other
    /// groups than `group`.
    pub(super) fn mlx(&mut self, config: &Value, group: usize) -> Result<()> {
        for module in self.modules(".scales") {
            let (codes, scales) = (self.need(&module, ".weight")?, self.need(&module, ".scales")?);
            let biases = self.need(&module, ".biases")?;
            let size = of_module(config, &module)["group_size"].as_u64().map_or(group, |size| size as usize);
            let (front, last) = codes.shape.split_at(codes.shape.len().saturating_sub(1));
            let found = match (last, scales.shape.split_last()) {
                (&[words], Some((&groups, of))) if front == of && groups > 0 => groups
                    .checked_mul(size)
                    .zip(words.checked_mul(32))
                    .filter(|(columns, bits)| *columns > 0 && bits.is_multiple_of(*columns))
                    .map(|(columns, bits)| (columns, bits / columns)),
                _ => None,
            };
            let stack = match *front {
                [rows] => Some((None, rows)),
                [count, rows] => Some((Some(count), rows)),
                _ => None,
            };
            let (Some((columns, bits @ (2 | 4 | 8))), Some((count, rows)), true) =
                (found, stack, is_word(&codes))
            else {
                let why =
                    format!("as codes of 2, 4 or 8 bits with scales {:?} of groups of {size}", scales.shape);
                return Err(self.wrong(&module, &codes, &why));
            };
            if biases.shape != scales.shape {
                return Err(self.wrong(
                    &module,
                    &biases,
                    &format!("as biases beside scales {:?}", scales.shape),
                ));
            }
            let shape = [rows, columns];
            let Some(count) = count else {
                self.give(&module, shape, Scheme::Affine { codes, scales, biases, bits, size, index: None })?;
                continue;
            };
            let made = StoredTensor::of_matrices(count, shape, |at| {
                let (codes, scales, biases) = (codes.clone(), scales.clone(), biases.clone());
                Scheme::Affine { codes, scales, biases, bits, size, index: Some(at) }
            });
            self.tensors.insert(format!("{module}.weight"), made);
        }
        Ok(())
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
