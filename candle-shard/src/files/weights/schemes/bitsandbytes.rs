//! Matrices of bitsandbytes, which say how they are quantized in tensors of their own.
use super::super::{StoredTensor, Weights};
use super::{NestedScales, Scheme};
use crate::{Error, Result};
use candle_core::Device;
use serde_json::Value;

/// The most bytes of a `quant_state`, which is a short text.
const MOST_STATE: usize = 1 << 20;

impl Weights {
    /// Adds the weights of bitsandbytes, in 8 bits and in 4.
    pub(super) fn bitsandbytes(&mut self) -> Result<()> {
        for module in self.modules(".SCB") {
            // Other formats have the columns in an order of GPUs.
            if let Some(format) = self.take(&module, ".weight_format")
                && format.line_of(self)?.iter().any(|&format| format != 0)
            {
                return Err(self.wrong(
                    &module,
                    &format,
                    "as weight_format; only rows one behind the other can be read",
                ));
            }
            let (codes, scales) = (self.need(&module, ".weight")?, self.need(&module, ".SCB")?);
            let (&[rows, columns], "I8") = (&codes.shape[..], &*codes.dtype) else {
                return Err(self.wrong(&module, &codes, "beside SCB; expected a matrix of I8"));
            };
            if scales.shape != [rows] {
                return Err(self.wrong(&module, &scales, &format!("as scales of {:?}", codes.shape)));
            }
            let block = [1, columns.max(1)];
            self.give(
                &module,
                [rows, columns],
                Scheme::Scaled { codes, is_float: false, scales, block, factor: 1.0 / 127.0, index: None },
            )?;
        }
        for kind in ["nf4", "fp4"] {
            let state = format!(".weight.quant_state.bitsandbytes__{kind}");
            for module in self.modules(&state) {
                self.four(&module, &state)?;
            }
        }
        Ok(())
    }

    /// Takes a table of `N` floats.
    fn table<const N: usize>(&mut self, module: &str, name: &str) -> Result<[f32; N]> {
        let table = self.need(module, name)?;
        let values = if table.shape == [N] { table.floats(self, &table.within(0..N))? } else { Vec::new() };
        values
            .try_into()
            .map_err(|_| self.wrong(module, &table, &format!("as a table; expected {N} numbers")))
    }

    /// Adds a weight of bitsandbytes in 4 bits.
    fn four(&mut self, module: &str, state: &str) -> Result<()> {
        let name = format!("{module}{state}");
        let all = |stored: &StoredTensor| stored.shape.iter().map(|&size| 0..size).collect::<Vec<_>>();
        let block = all(self.stored(&name)?);
        if block.iter().fold(1usize, |count, range| count.saturating_mul(range.len())) > MOST_STATE {
            return Err(Error::file(&self.source, format!("{name:?} has more than {MOST_STATE} bytes")));
        }
        let text = self.read_block(&name, &block, &Device::Cpu)?.flatten_all()?.to_vec1::<u8>()?;
        self.tensors.remove(&name);
        let state: Value = serde_json::from_slice(&text)
            .map_err(|error| Error::file(&self.source, format!("{name:?} is no JSON text ({error})")))?;
        let shape: Option<[usize; 2]> = serde_json::from_value(state["shape"].clone()).ok();
        let number =
            |field: &str| state[field].as_u64().map(|number| number as usize).filter(|&number| number > 0);
        let (Some([rows, columns]), Some(block)) = (shape, number("blocksize")) else {
            return Err(Error::file(
                &self.source,
                format!("{name:?} lacks the shape of a matrix or a blocksize"),
            ));
        };
        let codes = self.need(module, ".weight")?;
        let table = self.table::<16>(module, ".weight.quant_map")?;
        let scales = self.need(module, ".weight.absmax")?;
        let nested = match self.take(module, ".weight.nested_absmax") {
            None => None,
            Some(of_scales) => {
                let table = self.table::<256>(module, ".weight.nested_quant_map")?.to_vec();
                let Some(block) = number("nested_blocksize") else {
                    return Err(Error::file(&self.source, format!("{name:?} lacks a nested_blocksize")));
                };
                let offset = state["nested_offset"].as_f64().unwrap_or(0.0) as f32;
                Some(NestedScales { table, scales: of_scales, block, offset })
            }
        };
        let blocks = rows.saturating_mul(columns).div_ceil(block);
        // One behind the other, also where their dims are [n, 1].
        let is_line = |stored: &StoredTensor| stored.shape.iter().skip(1).all(|&size| size == 1);
        let of_scales = match &nested {
            None => scales.dtype != "U8",
            Some(nested) => scales.dtype == "U8" && nested.scales.shape == [blocks.div_ceil(nested.block)],
        };
        let has = codes.shape.iter().product::<usize>();
        if !of_scales
            || !is_line(&codes)
            || codes.dtype != "U8"
            || has != rows.saturating_mul(columns).div_ceil(2)
            || scales.shape != [blocks]
        {
            return Err(self.wrong(
                module,
                &codes,
                &format!("as codes of [{rows}, {columns}] with scales {:?}", scales.shape),
            ));
        }
        self.give(module, [rows, columns], Scheme::Four { codes, table, scales, block, nested, columns })
    }
}

impl StoredTensor {
    /// Returns the bytes of a small tensor.
    fn line_of(&self, weights: &Weights) -> Result<Vec<u8>> {
        match (&*self.dtype, self.shape.iter().product::<usize>()) {
            ("U8" | "I8", ..=1) => self.small(weights),
            _ => Err(Error::file(
                &weights.source,
                format!("has a weight_format {}{:?}", self.dtype, self.shape),
            )),
        }
    }
}
