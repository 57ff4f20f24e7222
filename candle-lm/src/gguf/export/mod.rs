//! GGUF files of models: the metadata and the names that llama.cpp reads.
//!
//! What is written is opened again before it gets its name, and compared with what it was made of.

mod fields;
mod pieces;
pub(crate) mod rewrite;
mod states;
mod vocabulary;

use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::quantized::gguf_file::{self, Value as Stored};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_shard::nn::Heads;
use tokenizers::Tokenizer;

use super::experts::{ERNIE, EXAONE};
use super::mamba::NEMOTRON_MIXTURE;
use super::names::{CONV, MODULES, NORMS, QK_NORMS, TENSORS};
use super::{ARCHITECTURES, llama4, tokenizer};
use crate::adapter::MergedAdapter;
use crate::config::mixers::MixerKind;
use crate::config::parts::{FUSED_GATE, FUSED_SHARED, Parts, QkNorm};
use crate::config::tensors::ROUTER;
use crate::config::{Config, RopeScaling};
use crate::files::Files;

/// Families whose weights are written as those of another one.
const AS_LLAMA: [&str; 2] = ["mistral", "mixtral"];

/// Writes a model into a GGUF file; see [`Files::export_gguf`].
///
/// # Errors
/// Those of [`Files::export_gguf`].
pub(crate) fn export(
    files: &Files,
    path: &Path,
    adapter: Option<&MergedAdapter>,
    dtype: GgmlDType,
    mut show: impl FnMut(usize, usize),
) -> Result<()> {
    ensure_absent(path)?;
    ensure!(
        !matches!(dtype, GgmlDType::Q8_1 | GgmlDType::Q8K),
        "weights are not stored as {dtype:?}, which is for products"
    );
    let config = &files.config;
    let (kind, is_permuted) = architecture(config)?;
    let tokenizer = files.tokenizer()?;
    let name = path.file_stem().map_or("model".into(), |name| name.to_string_lossy());
    let mut metadata = fields::of(&files.config, &name, kind, dtype)?;
    metadata.extend(vocabulary::of(files, &tokenizer, [kind, &name])?);
    let names = named(config, kind);
    let (mut tensors, count) = (Vec::new(), names.len());
    for (at, (name, parts)) in names.into_iter().enumerate() {
        let read = |(part, shape): &MemoryTensor| -> Result<Tensor> {
            if let Some(adapter) = adapter {
                return adapter.read(files, part, shape);
            }
            let whole: Vec<_> = shape.iter().map(|&size| 0..size).collect();
            Ok(files.weights.read_block(part, &whole, &Device::Cpu)?.to_dtype(DType::F32)?)
        };
        let read = Tensor::cat(&parts.iter().map(read).collect::<Result<Vec<_>>>()?, 0)?;
        let read = if name.ends_with(&format!(".{CONV}.weight")) { read.squeeze(1)? } else { read };
        let read = states::written(config, kind, &name, read)?;
        let shape = read.dims().to_vec();
        // llama.cpp adds nothing to the weights of norms.
        let read =
            if config.parts.norms_add_one && name.ends_with("norm.weight") { (read + 1.0)? } else { read };
        let turned = match is_permuted && !config.parts.permuted {
            true => permuted(&name, &read, config.heads())?,
            false => read,
        };
        let written = QTensor::quantize(&turned, stored_as(&name, &shape, dtype))?;
        tensors.push((renamed(&name, kind, config)?, written));
        show(at + 1, count);
    }
    for (name, factors) in fields::factors(config) {
        let factors = Tensor::new(factors, &Device::Cpu)?;
        tensors.push((name.to_owned(), QTensor::quantize(&factors, GgmlDType::F32)?));
    }
    write_new(path, &metadata, &tensors, |written| {
        check(files, &tokenizer, written)
            .with_context(|| format!("{} would be another model", path.display()))
    })
}

/// What GGUF files call a kind of model, and whether the rows of queries and keys are permuted in them.
pub(crate) fn architecture(config: &Config) -> Result<(&'static str, bool)> {
    let (family, parts) = (config.family, &config.parts);
    let family = match family {
        _ if AS_LLAMA.contains(&family) => "llama",
        "granitemoeshared" => "granitemoe",
        _ => family,
    };
    let mut found = ARCHITECTURES.iter().filter(|(_, name, _)| *name == family);
    // Hybrids of NVIDIA with experts have a kind of their own, which comes last.
    let found = match family == "nemotron_h" && parts.experts.is_some() {
        true => found.next_back(),
        false => found.next(),
    };
    let has_states = parts.mixers.iter().any(|mixer| matches!(mixer, MixerKind::DeltaNet(_)));
    let is_plain = parts.latent().is_none() && !parts.sinks && !has_states && !parts.layer_scalar;
    let found = found.filter(|_| is_plain);
    let &(kind, _, is_permuted) =
        found.with_context(|| format!("models of the family {family} are not written as GGUF"))?;
    // What llama.cpp computes whatever a file says, and the tensors that it has no place for.
    let of_llama = ["llama", "granite"].contains(&kind);
    let mut lacks = states::lacks(config, kind);
    let mut need = |has: bool, what: &'static str| lacks.extend((!has).then_some(what));
    need(windows(config) == windows_of(kind, config), "these sliding windows");
    need(!config.has_images, "the parts for images");
    let is_starcoder = kind == "starcoder2";
    need(of_llama || is_starcoder || !parts.mlp_bias, "biases of feed-forward layers");
    need(of_llama || is_starcoder || !parts.output_bias, "a bias of the output of attention");
    need(!is_starcoder || parts.mlp_bias, "layers without biases");
    need(
        of_llama
            || ["exaone4", EXAONE, "mistral3", "arcee", "llama4"].contains(&kind)
            || fields::frequencies(config).is_none(),
        "a scaling of each frequency",
    );
    need(
        !["olmo2", "stablelm"].contains(&kind) || !config.tie_word_embeddings,
        "an output layer that is the table",
    );
    need(
        !["gemma", "gemma2", "command-r", "cohere2"].contains(&kind) || config.tie_word_embeddings,
        "an output layer that is not the table",
    );
    need(kind != "gemma2" || config.rope_scaling.is_none(), "scaled positions");
    need(
        kind != "gemma3" || matches!(config.rope_scaling, None | Some(RopeScaling::Linear { .. })),
        "positions that are not scaled by one factor",
    );
    need(
        kind == "gemma2" || (parts.scores_cap, parts.logits_cap) == (None, None),
        "caps of scores or logits",
    );
    need(
        match &parts.local_rope {
            None => true,
            Some((theta, scaling)) => {
                let want = if kind == "gemma3" { 10_000.0 } else { config.rope_theta };
                *theta == want && scaling.is_none()
            }
        },
        "these positions in windows",
    );
    if let Some(experts) = &parts.experts {
        let is_leading = |layers: &[bool]| layers.is_sorted();
        let leads = leads(kind);
        need(kind != "lfm2moe" || (experts.normalize && experts.scale == 1.0), "scaled weights of experts");
        let takes_raw = ["qwen2moe", "olmoe", "llama4"].contains(&kind);
        need(
            leads || takes_raw || kind == NEMOTRON_MIXTURE || experts.normalize,
            "weights of experts that are not normalized",
        );
        need(!takes_raw || !experts.normalize, "weights of experts that are normalized");
        let heads = config.heads();
        need(kind != "olmoe" || heads.query == heads.key_value, "fewer key heads than query heads");
        need(
            !config.has_dense_layers()
                || (leads && is_leading(&experts.layers))
                || [llama4::KIND, NEMOTRON_MIXTURE].contains(&kind),
            "dense layers in a model that has layers with experts",
        );
        need(!parts.mlp_bias, "experts with biases");
        need(experts.normalize_least <= LEAST_SUM, "this least sum of the weights of experts");
    }
    if kind == llama4::KIND {
        let layers = 0..config.num_hidden_layers;
        let is_rotary = |layer: usize| !(layer + 1).is_multiple_of(llama4::PERIOD);
        let has_norms = parts.qk_norm != QkNorm::None;
        need(parts.experts.is_some(), "a model without experts");
        need(
            windows(config).into_iter().flatten().all(|chunk| chunk == llama4::CHUNK),
            "chunks of this length",
        );
        need(
            layers.clone().all(|layer| parts.is_rotary(layer) == is_rotary(layer)),
            "these layers without positions",
        );
        need(parts.temperature == Some(llama4::TEMPERATURE), "this temperature of attention");
        need(
            parts.experts.as_ref().is_none_or(|experts| has_norms == llama4::has_norms(experts.count)),
            "these norms of queries and keys with so many experts",
        );
        need(llama4::step(config).is_some(), "experts in these layers");
    }
    ensure!(lacks.is_empty(), "llama.cpp has not implemented for {kind}: {}", lacks.join(", "));
    Ok((kind, is_permuted))
}

/// What the sum of the weights of a token's experts is at least in llama.cpp.
const LEAST_SUM: f64 = 1.0 / 16_384.0;

/// Whether files of a kind say how many layers without experts come first.
fn leads(kind: &str) -> bool {
    ["glm4moe", "lfm2moe", ERNIE, EXAONE].contains(&kind)
}

/// The windows that narrow what layers see.
fn windows(config: &Config) -> Vec<Option<usize>> {
    let narrow = |layer| config.parts.window(layer).filter(|&window| window < config.max_position_embeddings);
    (0..config.num_hidden_layers).map(narrow).collect()
}

/// Whether files of a kind say which layers have a window.
fn lists_windows(kind: &str) -> bool {
    ["olmo2", "exaone4"].contains(&kind)
}

/// The windows that layers have in llama.cpp, of the width that a file says.
fn windows_of(kind: &str, config: &Config) -> Vec<Option<usize>> {
    let width = windows(config).into_iter().flatten().next();
    let is_narrow = |layer: usize| match kind {
        // In models of 64 layers alone, whatever a file says.
        "exaone4" => config.num_hidden_layers == 64 && layer % 4 < 3,
        _ if lists_windows(kind) => config.parts.window(layer).is_some(),
        "gemma2" => layer.is_multiple_of(2),
        "gemma3" => layer % 6 < 5,
        "cohere2" | EXAONE | llama4::KIND => layer % 4 < 3,
        _ => false,
    };
    (0..config.num_hidden_layers).map(|layer| width.filter(|_| is_narrow(layer))).collect()
}

/// A tensor in memory: its name and its shape.
type MemoryTensor = (String, Vec<usize>);

/// The tensors of a file by the names of the Hub, each with those in memory that it has, one behind another.
fn named(config: &Config, kind: &str) -> Vec<(String, Vec<MemoryTensor>)> {
    let mut names = Vec::new();
    let mut tensors = config.tensors();
    // Gate and up of the network that all tokens use are apart.
    let is_apart =
        |name: &str| name.contains(FUSED_SHARED) || (kind == "granitehybrid" && name.contains(FUSED_GATE));
    for (name, parts) in config.fused().into_iter().filter(|(name, _)| !is_apart(name)) {
        let is_part = |tensor: &MemoryTensor| parts.iter().any(|(part, _)| *part == tensor.0);
        names.push((name, tensors.extract_if(.., |tensor| is_part(tensor)).collect()));
    }
    names.extend(tensors.into_iter().map(|(name, shape)| (name.clone(), vec![(name, shape)])));
    names
}

/// The name that a tensor has in GGUF files.
pub(crate) fn renamed(name: &str, kind: &str, config: &Config) -> Result<String> {
    let is_other = |gguf: &str| {
        (gguf == "token_embd_norm.weight") != kind.starts_with("lfm2") && name == "model.norm.weight"
    };
    if let Some((gguf, _)) = TENSORS.iter().find(|(gguf, hub)| *hub == name && !is_other(gguf)) {
        return Ok((*gguf).to_owned());
    }
    let (layer, rest) =
        name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).unwrap_or_default();
    if let Some(name) = states::renamed(layer, rest, kind) {
        return Ok(name);
    }
    // Stacked experts are tensors by themselves.
    let (module, parameter) = match rest.rsplit_once('.') {
        Some((module, parameter @ ("weight" | "bias"))) => (module, parameter),
        _ => (rest, "weight"),
    };
    let of_all = ["shared_expert", "shared_mlp"]
        .iter()
        .fold(module.to_owned(), |module, own| module.replace(&format!(".{own}."), ".shared_experts."));
    let place = config.parts.norms.names().iter().position(|name| *name == Some(module));
    let of_heads = module.strip_prefix("self_attn.");
    let of_heads = config.parts.qk_norm.names().iter().position(|name| of_heads == Some(name));
    let module = match (place, of_heads) {
        _ if module == ROUTER && parameter == "bias" => Some("exp_probs_b"),
        (Some(2), _) if ["glm4moe", "seed_oss"].contains(&kind) => Some("post_attention_norm"),
        (Some(at), _) => Some(NORMS[at]),
        (_, Some(at)) => Some(QK_NORMS[at]),
        _ if module == FUSED_GATE => Some("ffn_up"),
        _ => MODULES.iter().find(|(_, hub)| *hub == of_all).map(|(gguf, _)| *gguf),
    };
    let module = module.with_context(|| format!("{name:?} has no name in GGUF files of {kind}"))?;
    Ok(format!("blk.{layer}.{module}.{parameter}"))
}

/// The rows of queries and keys in the order of files whose neighbors are turned together.
fn permuted(name: &str, x: &Tensor, Heads { query, key_value, dim }: Heads) -> Result<Tensor> {
    let heads = match () {
        () if name.contains(".self_attn.q_proj.") => query,
        () if name.contains(".self_attn.k_proj.") => key_value,
        () => return Ok(x.clone()),
    };
    let columns = x.elem_count() / (heads * dim);
    let turned = x.reshape((heads, 2, dim / 2, columns))?.transpose(1, 2)?.contiguous()?;
    Ok(turned.reshape(x.dims())?)
}

/// How a tensor is stored where matrices are stored as `dtype`.
fn stored_as(name: &str, shape: &[usize], dtype: GgmlDType) -> GgmlDType {
    let is_matrix =
        shape.len() > 1 && !name.contains(ROUTER) && !name.contains(CONV) && !states::is_float(name);
    let columns = shape.last().copied().unwrap_or(0);
    let fits = |dtype: GgmlDType| columns.is_multiple_of(dtype.block_size());
    match () {
        () if !is_matrix => GgmlDType::F32,
        () if fits(dtype) => dtype,
        () if fits(GgmlDType::Q8_0) => GgmlDType::Q8_0,
        () => GgmlDType::F16,
    }
}

/// Refuses to write over a file, before there is work to lose.
///
/// # Errors
/// If it exists.
pub(crate) fn ensure_absent(path: &Path) -> Result<()> {
    ensure!(!path.exists(), "{} exists: give another name, or remove it", path.display());
    Ok(())
}

/// Writes a file that must not exist. It gets its name when `check` has seen it whole.
///
/// # Errors
/// If it exists or cannot be written; those of `check`.
pub(crate) fn write_new(
    path: &Path,
    metadata: &[(String, Stored)],
    tensors: &[(String, QTensor)],
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let shown = || format!("{}", path.display());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut new = tempfile::Builder::new();
    #[cfg(unix)]
    {
        // As a file that is created by its name.
        use std::os::unix::fs::PermissionsExt;
        new.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut new = new.suffix(".gguf").tempfile_in(folder).with_context(shown)?;
    write(new.as_file_mut(), metadata, tensors).with_context(shown)?;
    check(new.path())?;
    new.persist_noclobber(path).map_err(|error| error.error).with_context(shown)?;
    Ok(())
}

fn write(file: &mut File, metadata: &[(String, Stored)], tensors: &[(String, QTensor)]) -> Result<()> {
    let metadata: Vec<(&str, &Stored)> =
        metadata.iter().map(|(name, value)| (name.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let mut out = BufWriter::with_capacity(1 << 20, &mut *file);
    gguf_file::write(&mut out, &metadata, &tensors)?;
    out.flush()?;
    drop(out);
    file.sync_all()?;
    Ok(file.rewind()?)
}

/// Checks that a file is read as the model and the tokenizer that it was made of.
fn check(files: &Files, tokenizer: &Tokenizer, path: &Path) -> Result<()> {
    let again = Files::open(path)?;
    let (was, is) = (&states::folded(&files.config), &again.config);
    // Numbers of files have 32 bits.
    let shapes = |config: &Config| {
        (config.tensors(), config.heads(), config.max_position_embeddings, config.rope_theta as f32)
    };
    ensure!(shapes(was) == shapes(is), "the sizes are not those of the config");
    let layers = |config: &Config| {
        let experts = &config.parts.experts;
        let rotary: Vec<bool> =
            (0..config.num_hidden_layers).map(|layer| config.parts.is_rotary(layer)).collect();
        let experts = experts.as_ref().map(|experts| {
            let layers: Vec<bool> =
                (0..config.num_hidden_layers).map(|layer| experts.are_in(layer)).collect();
            let choice = (experts.count, experts.chosen, experts.scores, experts.groups, experts.has_bias);
            let shared = (experts.shared, experts.shared_gate, experts.weigh_inputs);
            (choice, experts.hidden, experts.normalize, experts.scale as f32, shared, layers)
        });
        (windows(config), config.parts.chunked, rotary, experts, config.parts.mixers.clone())
    };
    ensure!(layers(was) == layers(is), "the layers are not those of the config");
    let rest = |config: &Config| {
        let Parts { embedding_scale, branch_scale, logits_divisor, rotary_share, .. } = config.parts;
        let Parts { scores_scale, scores_cap, logits_cap, .. } = config.parts;
        let rounded = |x: f64| x as f32;
        let norms =
            (config.parts.norms, config.parts.norm, config.parts.qk_norm, rounded(config.rms_norm_eps));
        let scores = [scores_scale, scores_cap, logits_cap].map(|x| x.map(rounded));
        (
            norms,
            scores,
            config.parts.temperature.map(|one| (rounded(one.scale), one.length, one.first)),
            config.parts.local_rope.clone().map(|(theta, scaling)| (rounded(theta), scaling)),
            [embedding_scale, branch_scale, logits_divisor, rotary_share].map(rounded),
        )
    };
    ensure!(rest(was) == rest(is), "the factors are not those of the config");
    ensure!(fields::scales_alike(was, is), "the rotary positions are not scaled as the config says");
    ensure!(files.ends.is_subset(&again.ends), "texts do not end as the config says");
    let tokens =
        |files: &Files| -> Result<_> { Ok(files.special_tokens()?.get("bos_token").cloned().flatten()) };
    ensure!(tokens(files)? == tokens(&again)?, "texts do not begin as the tokenizer says");
    let templates = |files: &Files| -> Result<_> {
        let template = files.find_chat_template()?;
        Ok(template
            .map(|template| (template.sources().0.to_owned(), template.sources().1.map(str::to_owned))))
    };
    ensure!(templates(files)? == templates(&again)?, "the chat template is not that of the model");
    vocabulary::check(tokenizer, &tokenizer::read(path)?)
}
