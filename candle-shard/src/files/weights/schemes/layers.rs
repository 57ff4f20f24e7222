//! Finds the layers of a model whose weights are codes.
use super::super::{StoredTensor, Weights};
use super::decode::{MX_BLOCK, NV_BLOCK};
use super::method::Method;
use super::{Scheme, SchemePiece};
use crate::{Error, Result};
use serde_json::Value;

/// Scales of activations, outputs and caches, which say nothing of weights.
const OF_OTHERS: [&str; 10] = [
    ".input_scale",
    ".input_scale_ub",
    ".input_scale_inv",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    "_proj_activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
];

impl Weights {
    /// Replaces the tensors of quantized layers by the weights that they stand for, which are read as floats. Each rank reads the codes
    /// and scales of its own block.
    ///
    /// `config` is the value of `quantization_config` in `config.json`. Scales of activations and caches are left out.
    ///
    /// | `quant_method` | formats |
    /// |---|---|
    /// | `fp8`, `fbgemm_fp8` | F8_E4M3 with a scale for each tensor, row or block, also of stacked experts |
    /// | `compressed-tensors` | `float-quantized`, `naive-quantized`, `int-quantized`, `pack-quantized` with 4 or 8 bits, `nvfp4-pack-quantized` and `mxfp4-pack-quantized` |
    /// | `gptq` | 2, 4 or 8 bits, also with `desc_act`, of either `checkpoint_format` |
    /// | `awq` | 4 bits, version `gemm` |
    /// | `bitsandbytes` | `nf4` and `fp4`, also with nested scales; 8 bits |
    /// | none, or `mlx` | MLX's `affine` codes of 2 to 6 or 8 bits, and its `mxfp4`, `mxfp8` and `nvfp4`, also of stacked experts |
    /// | `modelopt` | `FP8`, `NVFP4` and `MIXED_PRECISION` of both |
    /// | `mxfp4` | the `_blocks` and `_scales` of gpt-oss, as the transposed matrices of files without codes |
    ///
    /// ```no_run
    /// use candle_shard::Weights;
    ///
    /// let config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
    /// let weights = Weights::open("model")?.dequantize(&config["quantization_config"])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] if the method or a format is another one, or the tensors of a weight do not fit each other.
    pub fn dequantize(mut self, config: &Value) -> Result<Self> {
        let unread = |reason| Error::file(&self.source, format!("quantization_config {reason}"));
        match Method::parse(config).map_err(unread)? {
            Method::Fp8 { block } => {
                self.scaled(block)?;
                self.scaled_stacks(block)?;
            }
            Method::Compressed { bits, group, block } => self.compressed(bits, group, block)?,
            Method::Gptq { bits, group, more } => self.gptq(bits, group, more)?,
            Method::Awq { group } => self.awq(group)?,
            Method::BitsAndBytes => self.bitsandbytes()?,
            Method::Mxfp4 => self.mxfp4()?,
            Method::Mlx { group, mode } => self.mlx(config, group, mode)?,
            Method::ModelOpt => {
                for module in self.modules(".weight_scale_2") {
                    let factor = self.scalar(&module, ".weight_scale_2")?;
                    self.nvfp4(&module, ".weight", factor)?;
                }
                self.scaled(None)?;
            }
        }
        self.tensors.retain(|name, _| !OF_OTHERS.iter().any(|suffix| name.ends_with(suffix)));
        Ok(self)
    }

    /// Replaces the keys `[heads, latent, key]` and the values `[heads, value, latent]` of latent attention, as GGUF files have them, by the
    /// weight `[heads · (key + value), latent]` of the module `to`: see [`LatentProjection`](crate::nn::LatentProjection). It is read as
    /// floats, and each rank reads the blocks of its heads.
    ///
    /// # Errors
    /// If one of the two is not there, they do not fit each other, or the module has a weight.
    pub fn join_latent(mut self, keys: &str, values: &str, to: &str) -> Result<Self> {
        let [of_keys, of_values] = [self.stored(keys)?.clone(), self.stored(values)?.clone()];
        let shape = match (&of_keys.shape[..], &of_values.shape[..]) {
            (&[heads, latent, key], &[of, value, width]) if (heads, latent) == (of, width) => {
                key.checked_add(value).and_then(|rows| rows.checked_mul(heads)).map(|rows| [rows, latent])
            }
            _ => None,
        };
        let Some(shape) = shape.filter(|shape| !shape.contains(&0)) else {
            let why = format!(
                "and the values {values:?} {:?}; expected [heads, latent, key] and [heads, value, latent]",
                of_values.shape
            );
            return Err(self.wrong(keys, &of_keys, &why));
        };
        self.tensors.remove(keys);
        self.tensors.remove(values);
        self.give(to, shape, Scheme::Latent { keys: of_keys, values: of_values })?;
        Ok(self)
    }

    /// Returns the modules that have a tensor of this name.
    pub(super) fn modules(&self, suffix: &str) -> Vec<String> {
        self.tensors.keys().filter_map(|name| name.strip_suffix(suffix)).map(str::to_owned).collect()
    }

    pub(super) fn take(&mut self, module: &str, name: &str) -> Option<StoredTensor> {
        self.tensors.remove(&format!("{module}{name}"))
    }

    pub(super) fn need(&mut self, module: &str, name: &str) -> Result<StoredTensor> {
        let found = self.take(module, name);
        found.ok_or_else(|| {
            Error::file(
                &self.source,
                format!("lacks {:?}, which {module:?} needs", format!("{module}{name}")),
            )
        })
    }

    /// Adds the weight of a module.
    pub(super) fn give(&mut self, module: &str, shape: [usize; 2], scheme: Scheme) -> Result<()> {
        let pieces = vec![SchemePiece::whole(scheme, shape)];
        let stored =
            StoredTensor { shape: shape.to_vec(), dtype: "F32".into(), pieces: Vec::new(), schemes: pieces };
        match self.tensors.insert(format!("{module}.weight"), stored) {
            None => Ok(()),
            Some(_) => {
                Err(Error::file(&self.source, format!("has {module:?} both in parts and as a weight")))
            }
        }
    }

    pub(super) fn wrong(&self, module: &str, of: &StoredTensor, why: &str) -> Error {
        Error::file(&self.source, format!("{module:?} has {}{:?}, {why}", of.dtype, of.shape))
    }

    /// Finds matrices of 8 bits with scales beside them; `block` is the shape of a scale's block, if there is one for all.
    fn scaled(&mut self, block: Option<[usize; 2]>) -> Result<()> {
        for suffix in [".weight_scale_inv", ".weight_scale"] {
            for module in self.modules(suffix) {
                if self.tensors.contains_key(&format!("{module}.weight_packed")) {
                    continue;
                }
                let (codes, scales) = (self.need(&module, ".weight")?, self.need(&module, suffix)?);
                let is_float = match &*codes.dtype {
                    "F8_E4M3" => true,
                    "I8" => false,
                    _ => {
                        return Err(self.wrong(
                            &module,
                            &codes,
                            "and scales beside it; expected F8_E4M3 or I8",
                        ));
                    }
                };
                let &[rows, columns] = &codes.shape[..] else {
                    return Err(self.wrong(&module, &codes, "which is quantized; expected a matrix"));
                };
                if self.take(&module, ".weight_g_idx").is_some() {
                    return Err(self.wrong(
                        &module,
                        &codes,
                        "with groups in an order of their own (weight_g_idx), which cannot be read",
                    ));
                }
                if self.take(&module, ".weight_zero_point").is_some() {
                    return Err(self.wrong(&module, &codes, "with zero points, which cannot be read"));
                }
                let fits = |[height, width]: [usize; 2], scales: &[usize]| {
                    scales == [rows.div_ceil(height.max(1)), columns.div_ceil(width.max(1))]
                };
                let block = match (block, &scales.shape[..]) {
                    (_, [] | [1] | [1, 1]) => [rows, columns],
                    (_, &[n] | &[n, 1]) if n == rows => [1, columns],
                    (Some(block), shape) if fits(block, shape) => block,
                    (None, &[n, groups]) if n == rows && groups > 0 && columns.is_multiple_of(groups) => {
                        [1, columns / groups]
                    }
                    _ => {
                        return Err(self.wrong(&module, &scales, &format!("as scales of {:?}", codes.shape)));
                    }
                };
                let block = block.map(|size| size.max(1));
                self.give(
                    &module,
                    [rows, columns],
                    Scheme::Scaled { codes, is_float, scales, block, factor: 1.0, index: None },
                )?;
            }
        }
        Ok(())
    }

    /// Finds stacks of matrices of 8 bits, with a scale for each, for each of their halves, or for each block of them.
    fn scaled_stacks(&mut self, block: Option<[usize; 2]>) -> Result<()> {
        for suffix in ["_scale_inv", "_scale"] {
            for name in self.modules(suffix) {
                let stacked = self.tensors.get(&name).filter(|codes| codes.dtype == "F8_E4M3").cloned();
                let Some(codes) = stacked else { continue };
                let &[count, rows, columns] = &codes.shape[..] else { continue };
                let scales = self.need(&name, suffix)?;
                let blocks = |[height, width]: [usize; 2]| [rows.div_ceil(height), columns.div_ceil(width)];
                let block = match (block, &scales.shape[..]) {
                    (_, [] | [1]) => [rows, columns],
                    (_, &[n] | &[n, 1] | &[n, 1, 1]) if n == count => [rows, columns],
                    (Some(block), &[n, of_rows, of_columns])
                        if n == count && blocks(block) == [of_rows, of_columns] =>
                    {
                        block
                    }
                    // Gates and ups have scales of their own, however small they are.
                    (_, &[n, 2, of_columns])
                        if n == count
                            && rows.is_multiple_of(2)
                            && columns.div_ceil(block.map_or(columns, |block| block[1]).max(1))
                                == of_columns =>
                    {
                        [rows / 2, block.map_or(columns, |block| block[1])]
                    }
                    _ => return Err(self.wrong(&name, &scales, &format!("as scales of {:?}", codes.shape))),
                };
                let block = block.map(|size| size.max(1));
                let made = StoredTensor::of_matrices(count, [rows, columns], |at| {
                    let (codes, scales, index) = (codes.clone(), scales.clone(), Some(at));
                    Scheme::Scaled { codes, is_float: true, scales, block, factor: 1.0, index }
                });
                self.tensors.insert(name, made);
            }
        }
        Ok(())
    }

    fn compressed(&mut self, bits: usize, group: Option<usize>, block: Option<[usize; 2]>) -> Result<()> {
        self.scaled(block)?;
        for module in self.modules(".weight_global_scale") {
            let divisor = self.scalar(&module, ".weight_global_scale")?;
            self.nvfp4(&module, ".weight_packed", 1.0 / divisor)?;
        }
        for module in self.modules(".weight_packed") {
            let (codes, scales) =
                (self.need(&module, ".weight_packed")?, self.need(&module, ".weight_scale")?);
            if scales.dtype == "U8" {
                self.packed_floats(&module, codes, scales)?;
                continue;
            }
            let shape = self.need(&module, ".weight_shape")?;
            let shape = shape.shape_of(self)?;
            let &[rows, columns] = &shape[..] else {
                return Err(self.wrong(&module, &codes, "whose weight_shape is not that of a matrix"));
            };
            if !is_word(&codes) || codes.shape != [rows, columns.div_ceil(32 / bits)] {
                return Err(self.wrong(&module, &codes, &format!("as codes of {bits} bits of {shape:?}")));
            }
            let size = match &scales.shape[..] {
                &[n, groups] if n == rows && groups > 0 && columns.is_multiple_of(groups) => columns / groups,
                _ => return Err(self.wrong(&module, &scales, &format!("as scales of {shape:?}"))),
            };
            if let Some(said) = group.filter(|&said| said != size && scales.shape[1] > 1) {
                let why = format!("which are groups of {size}, and the config says {said}");
                return Err(self.wrong(&module, &scales, &why));
            }
            if self.take(&module, ".weight_g_idx").is_some() {
                return Err(self.wrong(
                    &module,
                    &codes,
                    "with groups in an order of their own (weight_g_idx), which cannot be read",
                ));
            }
            let zeros = self.take(&module, ".weight_zero_point");
            if let Some(zeros) = &zeros
                && (!is_word(zeros) || zeros.shape != [rows.div_ceil(32 / bits), scales.shape[1]])
            {
                return Err(self.wrong(&module, zeros, "as zero points, which are not packed by rows"));
            }
            let scheme = Scheme::Packed { codes, scales, zeros, bits, size: size.max(1) };
            self.give(&module, [rows, columns], scheme)?;
        }
        Ok(())
    }

    /// Adds a weight of MXFP4, whose scales are powers of 2.
    fn packed_floats(&mut self, module: &str, codes: StoredTensor, scales: StoredTensor) -> Result<()> {
        let shape = match (&codes.shape[..], &scales.shape[..]) {
            (&[rows, bytes], &[of, groups]) if codes.dtype == "U8" && rows == of => {
                groups.checked_mul(MX_BLOCK).filter(|&columns| columns == bytes.saturating_mul(2))
            }
            _ => None,
        };
        let Some(columns) = shape else {
            let why = format!("as codes of MXFP4 with scales {:?} of {MX_BLOCK} each", scales.shape);
            return Err(self.wrong(module, &codes, &why));
        };
        let shape = [codes.shape[0], columns];
        self.give(module, shape, Scheme::Floats { codes, scales, bits: 4, size: MX_BLOCK, index: None })
    }

    /// Takes a tensor of one number.
    fn scalar(&mut self, module: &str, name: &str) -> Result<f32> {
        let of = self.need(module, name)?;
        let all: Vec<_> = of.shape.iter().map(|&size| 0..size).collect();
        let one = if of.shape.iter().all(|&size| size == 1) { of.floats(self, &all)? } else { Vec::new() };
        one.first().copied().ok_or_else(|| self.wrong(module, &of, "as a scale; expected one number"))
    }

    /// Adds a weight of NVFP4.
    fn nvfp4(&mut self, module: &str, name: &str, factor: f32) -> Result<()> {
        let (codes, scales) = (self.need(module, name)?, self.need(module, ".weight_scale")?);
        let shape = match codes.shape[..] {
            [rows, bytes] if codes.dtype == "U8" => bytes.checked_mul(2).map(|columns| [rows, columns]),
            _ => None,
        };
        let Some([rows, columns]) = shape else {
            return Err(self.wrong(module, &codes, "as codes of NVFP4; expected a matrix of U8"));
        };
        if scales.dtype != "F8_E4M3" || scales.shape != [rows, columns.div_ceil(NV_BLOCK)] {
            return Err(self.wrong(module, &scales, &format!("as scales of [{rows}, {columns}]")));
        }
        self.give(module, [rows, columns], Scheme::Nvfp4 { codes, scales, factor })
    }

    fn gptq(&mut self, bits: usize, group: Option<usize>, more: i32) -> Result<()> {
        for module in self.modules(".qweight") {
            let codes = self.need(&module, ".qweight")?;
            let (zeros, scales) = (self.need(&module, ".qzeros")?, self.need(&module, ".scales")?);
            let order = self.take(&module, ".g_idx");
            let &[packed, rows] = &codes.shape[..] else {
                return Err(self.wrong(&module, &codes, "as codes; expected a matrix"));
            };
            let columns = packed.saturating_mul(32 / bits);
            let size = group.unwrap_or(columns).max(1);
            let groups = columns.div_ceil(size);
            let is_order =
                |order: &StoredTensor| order.shape == [columns] && ["I32", "I64"].contains(&&*order.dtype);
            let fits = [&codes, &zeros].into_iter().all(is_word) && order.as_ref().is_none_or(is_order);
            if !fits || scales.shape != [groups, rows] || zeros.shape != [groups, rows.div_ceil(32 / bits)] {
                let why =
                    format!("with zeros {:?} and codes {:?} in groups of {size}", zeros.shape, codes.shape);
                return Err(self.wrong(&module, &scales, &why));
            }
            self.give(
                &module,
                [rows, columns],
                Scheme::Gptq { codes, zeros, scales, groups: order, bits, size, more },
            )?;
        }
        Ok(())
    }

    fn awq(&mut self, group: Option<usize>) -> Result<()> {
        for module in self.modules(".qweight") {
            let codes = self.need(&module, ".qweight")?;
            let (zeros, scales) = (self.need(&module, ".qzeros")?, self.need(&module, ".scales")?);
            let &[columns, packed] = &codes.shape[..] else {
                return Err(self.wrong(&module, &codes, "as codes; expected a matrix"));
            };
            let rows = packed.saturating_mul(8);
            let size = group.unwrap_or(columns).max(1);
            let groups = columns.div_ceil(size);
            let fits = [&codes, &zeros].into_iter().all(is_word);
            if !fits || scales.shape != [groups, rows] || zeros.shape != [groups, packed] {
                let why =
                    format!("with zeros {:?} and codes {:?} in groups of {size}", zeros.shape, codes.shape);
                return Err(self.wrong(&module, &scales, &why));
            }
            self.give(&module, [rows, columns], Scheme::Awq { codes, zeros, scales, size })?;
        }
        Ok(())
    }

    /// Finds stacked matrices whose rows are blocks of 32 codes.
    fn mxfp4(&mut self) -> Result<()> {
        for name in self.modules("_blocks") {
            let (codes, scales) = (self.need(&name, "_blocks")?, self.need(&name, "_scales")?);
            let &[count, columns, blocks, width] = &codes.shape[..] else {
                return Err(self.wrong(&name, &codes, "as blocks; expected [matrices, rows, blocks, 16]"));
            };
            let is_bytes = [&codes, &scales].into_iter().all(|stored| stored.dtype == "U8");
            if !is_bytes || width != MX_BLOCK / 2 || scales.shape != [count, columns, blocks] {
                return Err(self.wrong(&name, &scales, &format!("as scales of {:?}", codes.shape)));
            }
            let shape = [blocks.saturating_mul(MX_BLOCK), columns];
            let stored = StoredTensor::of_matrices(count, shape, |index| {
                let (codes, scales) = (codes.clone(), scales.clone());
                Scheme::Mxfp4 { codes, scales, index }
            });
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(Error::file(&self.source, format!("has {name:?} both in parts and as a weight")));
            }
        }
        Ok(())
    }
}

impl StoredTensor {
    /// Returns the numbers of a tensor of a shape.
    fn shape_of(&self, weights: &Weights) -> Result<Vec<usize>> {
        if self.shape != [2] || !["I32", "I64"].contains(&&*self.dtype) {
            let reason = format!("has a weight_shape {}{:?}; expected two numbers", self.dtype, self.shape);
            return Err(Error::file(&weights.source, reason));
        }
        self.numbers(weights, 0..2)
    }
}

/// Returns whether a tensor has words of 32 bits.
pub(super) fn is_word(stored: &StoredTensor) -> bool {
    ["I32", "U32"].contains(&&*stored.dtype)
}
