//! What `quantization_config` says of the codes of a model, without a look at its tensors.
use super::mlx::MlxMode;
use crate::{Error, Result, Weights};
use itertools::Itertools;
use serde_json::Value;

/// How the weights of a model are stored, as far as its config says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// Numbers of 8 bits, with a scale for each block of this shape, or for each tensor or row.
    Fp8 { block: Option<[usize; 2]> },
    /// `bits` and `group` are those of packed weights.
    Compressed { bits: usize, group: Option<usize>, block: Option<[usize; 2]> },
    /// What is stored as a zero is `more` less than it. Without a `group` there is one of all columns.
    Gptq { bits: usize, group: Option<usize>, more: i32 },
    /// Codes of 4 bits.
    Awq { group: Option<usize> },
    /// The tensors say the rest.
    BitsAndBytes,
    /// Blocks of 32 codes of 4 bits with a power of 2 for each.
    Mxfp4,
    /// Numbers of 8 bits, or of 4 bits with a scale for each 16 and one for all.
    ModelOpt,
    /// Codes in groups of so many columns; some modules have others, and another mode.
    Mlx { group: usize, mode: MlxMode },
}

impl Weights {
    /// The values of `quant_method` that [`dequantize`](Self::dequantize) reads.
    pub const QUANT_METHODS: [&str; 9] = [
        "fp8",
        "fbgemm_fp8",
        "compressed-tensors",
        "gptq",
        "awq",
        "bitsandbytes",
        "mxfp4",
        "modelopt",
        "mlx",
    ];

    /// Checks that [`dequantize`](Self::dequantize) reads what a `quantization_config` describes, before there are tensors.
    ///
    /// # Errors
    /// [`Error::File`] of `config.json`, if it does not.
    pub fn check_quantization(config: &Value) -> Result<()> {
        let parsed = Method::parse(config).map(drop);
        parsed.map_err(|reason| Error::file("config.json", format!("quantization_config {reason}")))
    }
}

impl Method {
    pub(super) fn parse(config: &Value) -> Result<Self, String> {
        // Some files of ModelOpt name the program alone.
        let name =
            config["quant_method"].as_str().or(config["producer"]["name"].as_str()).unwrap_or_default();
        match name {
            "fbgemm_fp8" => Ok(Self::Fp8 { block: None }),
            "modelopt" => modelopt(config),
            // Files of MLX name no method.
            "mlx" => mlx(config),
            "" if config["bits"].is_u64() && config["group_size"].is_u64() => mlx(config),
            "fp8" => Ok(Self::Fp8 { block: block(&config["weight_block_size"])? }),
            "compressed-tensors" => compressed(config),
            "gptq" => gptq(config),
            "awq" => awq(config),
            "bitsandbytes" => Ok(Self::BitsAndBytes),
            "mxfp4" => Ok(Self::Mxfp4),
            _ => Err(format!(
                "has quant_method {name:?}; {} can be read",
                Weights::QUANT_METHODS.iter().join(", ")
            )),
        }
    }
}

/// Returns the shape of a block: `[128, 128]` or `"128x128"`.
fn block(value: &Value) -> Result<Option<[usize; 2]>, String> {
    let sides: Option<Vec<usize>> = match value {
        Value::Null => return Ok(None),
        Value::String(text) => text.split('x').map(|side| side.trim().parse().ok()).collect(),
        value => serde_json::from_value(value.clone()).ok(),
    };
    match sides.as_deref() {
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some([rows, columns])),
        _ => Err(format!("has blocks of {value}; expected rows and columns")),
    }
}

/// Returns the columns of a group; -1 stands for all of them.
fn group(value: &Value) -> Result<Option<usize>, String> {
    match (value, value.as_i64()) {
        (Value::Null, _) | (_, Some(-1)) => Ok(None),
        (_, Some(size @ 1..)) => Ok(Some(size as usize)),
        _ => Err(format!("has group_size {value}; expected a number of columns, or -1")),
    }
}

fn compressed(config: &Value) -> Result<Method, String> {
    const KNOWN: [&str; 7] = [
        "float-quantized",
        "naive-quantized",
        "int-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "dense",
    ];
    let groups: Vec<&Value> =
        config["config_groups"].as_object().into_iter().flat_map(|groups| groups.values()).collect();
    let mut formats =
        groups.iter().map(|group| &group["format"]).chain([&config["format"]]).filter_map(Value::as_str);
    if let Some(format) = formats.find(|format| !KNOWN.contains(format)) {
        return Err(format!("has the format {format:?}; {} can be read", KNOWN[..6].join(", ")));
    }
    if config["sparsity_config"]["format"].as_str().is_some_and(|format| format != "dense") {
        return Err("has sparse weights, which cannot be read".into());
    }
    // What all groups say of their weights.
    let said = |field: &str| -> Result<&Value, String> {
        let mut values = groups.iter().map(|group| &group["weights"][field]).filter(|value| !value.is_null());
        let first = values.next().unwrap_or(&Value::Null);
        match values.find(|value| *value != first) {
            None => Ok(first),
            Some(other) => Err(format!("has groups with {field} {first} and {other}, which cannot be read")),
        }
    };
    let bits = said("num_bits")?;
    let Some(bits @ (4 | 8)) = bits.as_u64() else {
        return Err(format!("has weights of num_bits {bits}; 4 and 8 can be read"));
    };
    // Groups of unlike sizes follow from the shapes of scales.
    let (group, block) =
        (group(said("group_size").unwrap_or(&Value::Null))?, block(said("block_structure")?)?);
    Ok(Method::Compressed { bits: bits as usize, group, block })
}

fn modelopt(config: &Value) -> Result<Method, String> {
    const KNOWN: [&str; 4] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION"];
    let algo = &config["quant_algo"];
    match KNOWN.iter().any(|known| algo == known) {
        true => Ok(Method::ModelOpt),
        false => Err(format!("has quant_algo {algo}; {} can be read", KNOWN.iter().join(", "))),
    }
}

fn mlx(config: &Value) -> Result<Method, String> {
    let mode = MlxMode::of(config)?;
    let mut modules = config.as_object().into_iter().flat_map(|fields| fields.values());
    modules.try_for_each(|said| MlxMode::of(said).map(drop))?;
    let size = group(&config["group_size"])?;
    size.map(|group| Method::Mlx { group, mode }).ok_or_else(|| "has no group_size".into())
}

fn gptq(config: &Value) -> Result<Method, String> {
    let more = match config["checkpoint_format"].as_str() {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => return Err(format!("has checkpoint_format {other:?}; gptq and gptq_v2 can be read")),
    };
    let Some(bits @ (2 | 4 | 8)) = config["bits"].as_u64() else {
        return Err(format!("has bits {}; 2, 4 and 8 can be read", config["bits"]));
    };
    Ok(Method::Gptq { bits: bits as usize, group: group(&config["group_size"])?, more })
}

fn awq(config: &Value) -> Result<Method, String> {
    let version = config["version"].as_str().unwrap_or("gemm").to_lowercase();
    let bits = config["bits"].as_u64().or(config["w_bit"].as_u64()).unwrap_or(4);
    if version != "gemm" || bits != 4 {
        return Err(format!(
            "has version {version:?} and {bits} bits; version \"gemm\" of 4 bits can be read"
        ));
    }
    let size = if config["group_size"].is_null() { &config["q_group_size"] } else { &config["group_size"] };
    Ok(Method::Awq { group: group(size)? })
}
