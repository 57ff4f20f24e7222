//! A GGUF file with other weights: all else stays as it is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::{self, Value as Stored};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_shard::Weights;

use super::super::{has_gates, renamed};
use super::{ensure_absent, stored_as, write_new};
use crate::adapter::MergedAdapter;
use crate::config::tensors::EXPERTS;
use crate::expert_files::GATE_UP;
use crate::files::Files;

/// Writes the model of a GGUF file with an adapter into another one, which must not exist. Tensors that the adapter changes are stored as
/// `dtype`, or as they were.
///
/// # Errors
/// If the model lies in several files, or one cannot be read or written.
pub(crate) fn rewrite(
    files: &Files,
    adapter: &MergedAdapter,
    path: &Path,
    dtype: Option<GgmlDType>,
) -> Result<()> {
    ensure_absent(path)?;
    let base = files.path();
    ensure!(
        Weights::gguf_files(base).len() < 2,
        "{} is one of several files of a model: join them with llama.cpp's gguf-split, and merge into the result",
        base.display()
    );
    let mut reader = BufReader::new(File::open(base).with_context(|| format!("{}", base.display()))?);
    let content = gguf_file::Content::read(&mut reader)?;
    let shapes: BTreeMap<String, Vec<usize>> = adapter.config(&files.config).tensors().into_iter().collect();
    let fused: BTreeMap<String, Vec<(String, usize)>> = files.config.fused().into_iter().collect();
    let latent = |name: &&String| name.ends_with(".kv_b_proj.weight") && adapter.changes(name);
    let has_parts = content.tensor_infos.contains_key("blk.0.attn_k_b.weight");
    if let Some(name) = shapes.keys().find(latent).filter(|_| has_parts) {
        bail!(
            "the adapter changes {name:?}, which the file has in two tensors of another form: merge into the folder that it was made of"
        );
    }
    if let Some(name) = shapes.keys().find(|name| name.contains(".linear_attn.") && adapter.changes(name)) {
        bail!(
            "the adapter changes {name:?}, whose heads the file has in another order: merge into the folder that it was made of"
        );
    }
    let merged = |name: &str, was: GgmlDType| -> Result<Option<QTensor>> {
        // Of all experts, an expert's ups are below its gates.
        let stack = name.strip_suffix(GATE_UP);
        let (parts, dim): (Vec<String>, usize) = match (stack, fused.get(name)) {
            (Some(layer), _) => (EXPERTS[..2].iter().map(|part| format!("{layer}{part}")).collect(), 1),
            (None, Some(parts)) => (parts.iter().map(|(part, _)| part.clone()).collect(), 0),
            (None, None) => (vec![name.to_owned()], 0),
        };
        if !parts.iter().any(|part| adapter.changes(part)) {
            return Ok(None);
        }
        let read = |part: &String| {
            let shape = shapes.get(part).with_context(|| format!("{part:?} is no tensor of the model"))?;
            adapter.read(files, part, shape)
        };
        let made = Tensor::cat(&parts.iter().map(read).collect::<Result<Vec<_>>>()?, dim)?;
        let dtype = stored_as(name, made.dims(), dtype.unwrap_or(was));
        Ok(Some(QTensor::quantize(&made, dtype)?))
    };
    let mut infos: Vec<_> = content.tensor_infos.iter().collect();
    infos.sort_by_key(|(_, info)| info.offset);
    let has_gates = has_gates(content.tensor_infos.keys().map(String::as_str));
    let mut tensors = Vec::new();
    for (name, info) in infos {
        let made = match merged(&renamed(name, &files.config, has_gates), info.ggml_dtype)? {
            Some(made) => made,
            None => content.tensor(&mut reader, name, &Device::Cpu)?,
        };
        tensors.push((name.clone(), made));
    }
    let table = content.tensor_infos.get("token_embd.weight").map(|info| info.ggml_dtype);
    let has_head = content.tensor_infos.contains_key("output.weight");
    if let (false, Some(table)) = (has_head, table)
        && shapes.contains_key("lm_head.weight")
    {
        // A table that was the output layer too is written twice.
        let made = match merged("lm_head.weight", table)? {
            Some(made) => made,
            None => content.tensor(&mut reader, "token_embd.weight", &Device::Cpu)?,
        };
        tensors.push(("output.weight".to_owned(), made));
    }
    let metadata: Vec<(String, Stored)> = content.metadata.into_iter().collect();
    write_new(path, &metadata, &tensors, |written| {
        Files::open(written).with_context(|| format!("{} would be no model", path.display())).map(drop)
    })
}
