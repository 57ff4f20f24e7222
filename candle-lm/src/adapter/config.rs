//! `adapter_config.json`, as PEFT writes it.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle_shard::nn::LoraOptions;
use candle_shard::regular;
use fancy_regex::Regex;
use serde_json::{Map, Value, json};

use super::experts;
use super::modules::LayerModule;

/// The file's name in the folder of an adapter.
pub const CONFIG: &str = "adapter_config.json";

/// What an adapter changes, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    /// The options where no pattern says otherwise.
    pub options: LoraOptions,
    /// Which modules have factors.
    pub targets: TargetModules,
    /// Modules that have none, though they are targets.
    pub excluded: Option<TargetModules>,
    /// The ranks of modules, by the end of their paths.
    pub rank_pattern: Vec<(String, usize)>,
    /// What their scales are made of.
    pub alpha_pattern: Vec<(String, f64)>,
    /// Parameters that have factors, by the ends of their paths: those of experts.
    pub target_parameters: Vec<String>,
    /// Whether each linear layer of each expert is a module that may be a target, as before transformers 5. The names of tensors say so, and the
    /// file of the config does not.
    pub expert_layers: bool,
    /// Modules that the adapter replaces.
    pub modules_to_save: Vec<String>,
    /// The layers with factors; all if there are none.
    pub layers: Option<Vec<usize>>,
    /// What the list of layers is called in paths.
    pub layers_pattern: Vec<String>,
    /// The name of the model that the adapter was made for.
    pub base: Option<String>,
}

/// Modules by their paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Those whose path is one of these, or ends with a dot and one of these.
    Suffixes(Vec<String>),
    /// Those whose path is matched by this regular expression as a whole.
    Regex(String),
    /// All linear layers but the output layer.
    AllLinear,
}

impl TargetModules {
    fn read(name: &str, value: &Value) -> Result<Self> {
        let texts = |values: &Vec<Value>| -> Option<Vec<String>> {
            values.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        };
        match value {
            Value::String(text) if text == "all-linear" => Ok(Self::AllLinear),
            Value::String(text) => {
                whole(text).with_context(|| format!("{name} {text:?}"))?;
                Ok(Self::Regex(text.clone()))
            }
            Value::Array(values) => {
                texts(values).map(Self::Suffixes).with_context(|| format!("{name} {value}"))
            }
            _ => {
                bail!("{name} is {value}; expected a list of modules, a regular expression or \"all-linear\"")
            }
        }
    }

    fn to_json(&self) -> Value {
        match self {
            Self::Suffixes(names) => json!(names),
            Self::Regex(text) => json!(text),
            Self::AllLinear => json!("all-linear"),
        }
    }

    /// Returns whether the module of this path is one of them; `is_output` is true for the output layer.
    fn matches(&self, path: &str, kind: ModuleKind) -> Result<bool> {
        Ok(match self {
            Self::AllLinear => kind == ModuleKind::Linear,
            Self::Regex(text) => whole(text)?.is_match(path)?,
            Self::Suffixes(names) => names.iter().any(|name| ends_with_module(path, name)),
        })
    }
}

/// What a module is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// A linear layer between the table and the output layer.
    Linear,
    /// The output layer.
    Output,
    /// The table of the input.
    Table,
    /// A norm, which has no factors.
    Norm,
    /// A convolution.
    Filters,
}

/// A regular expression that matches whole texts.
fn whole(text: &str) -> Result<Regex> {
    Ok(Regex::new(&format!("^(?:{text})$"))?)
}

pub(super) fn ends_with_module(path: &str, name: &str) -> bool {
    path == name || path.strip_suffix(name).is_some_and(|before| before.ends_with('.'))
}

/// Fields that change nothing of what an adapter computes.
const HARMLESS: [&str; 11] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "tokenizer_name_or_path",
];

impl AdapterConfig {
    /// An adapter with these options at these modules.
    pub fn new(options: LoraOptions, targets: TargetModules) -> Self {
        Self {
            options,
            targets,
            excluded: None,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            target_parameters: Vec::new(),
            expert_layers: false,
            modules_to_save: Vec::new(),
            layers: None,
            layers_pattern: Vec::new(),
            base: None,
        }
    }

    /// Reads the config in the folder of an adapter.
    ///
    /// # Errors
    /// If there is none, or it says something that is not known or not done: the field is named.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let parsed = || Self::parse(&regular::read_text(&path, regular::CONFIG)?);
        let config = parsed().with_context(|| format!("{}", path.display()))?;
        Ok(Self { expert_layers: experts::are_layers(folder)?, ..config })
    }

    /// Parses a config.
    ///
    /// # Errors
    /// If it is no config of a LoRA, or says something that is not known or not done: the field is named.
    pub fn parse(text: &str) -> Result<Self> {
        let mut fields: Map<String, Value> = serde_json::from_str(text)?;
        let kind = fields.remove("peft_type");
        let is_lora = kind.as_ref().and_then(Value::as_str) == Some("LORA");
        ensure!(is_lora, "peft_type is {}; expected \"LORA\"", shown(kind.as_ref()));
        let mut take = |name: &str| fields.remove(name).filter(|value| !value.is_null());
        let base = take("base_model_name_or_path").and_then(|value| value.as_str().map(str::to_owned));
        for name in HARMLESS {
            take(name);
        }
        let rank = whole_number(take("r"), "r")?.context("there is no r, the rank")?;
        let options = LoraOptions::new(rank)
            .alpha(number(take("lora_alpha"), "lora_alpha")?.unwrap_or(8.0))
            .dropout(number(take("lora_dropout"), "lora_dropout")?.unwrap_or(0.0))
            .rank_stabilized(switch(take("use_rslora"), "use_rslora")?)
            .dora(switch(take("use_dora"), "use_dora")?)
            .bias(switch(take("lora_bias"), "lora_bias")?);
        ensure!(
            !switch(take("fan_in_fan_out"), "fan_in_fan_out")?,
            "fan_in_fan_out is true: the weights of this model are [out, in]"
        );
        let init = take("init_lora_weights");
        let is_plain = match &init {
            None | Some(Value::Bool(_)) => true,
            // How fresh factors are drawn; these are read.
            Some(Value::String(text)) => ["gaussian", "eva", "orthogonal"].contains(&text.as_str()),
            Some(_) => false,
        };
        ensure!(
            is_plain,
            "init_lora_weights is {}, which changes the weights of the model when PEFT loads the adapter: convert it to a plain \
             LoRA (path_initial_model_for_weight_conversion of PEFT's save_pretrained)",
            shown(init.as_ref())
        );
        let bias = take("bias");
        let is_none = bias.as_ref().is_none_or(|bias| bias.as_str() == Some("none"));
        ensure!(
            is_none,
            "bias is {}, which trains biases of the model: that is not supported; expected \"none\"",
            shown(bias.as_ref())
        );
        let targets =
            take("target_modules").map(|value| TargetModules::read("target_modules", &value)).transpose()?;
        let excluded = take("exclude_modules")
            .map(|value| TargetModules::read("exclude_modules", &value))
            .transpose()?;
        let pattern = |value: Option<Value>, name: &str| -> Result<Vec<(String, f64)>> {
            let Some(value) = value else { return Ok(Vec::new()) };
            let map = value.as_object().with_context(|| format!("{name} is {value}; expected a map"))?;
            let entry = |(pattern, value): (&String, &Value)| {
                Regex::new(pattern).with_context(|| format!("{name} {pattern:?}"))?;
                let number = number(Some(value.clone()), name)?.unwrap_or_default();
                let is_rank = name == "rank_pattern";
                ensure!(
                    !is_rank || (number.fract() == 0.0 && number > 0.0),
                    "{name} has {number}; expected a whole number"
                );
                Ok((pattern.clone(), number))
            };
            map.iter().map(entry).collect()
        };
        let ranks = pattern(take("rank_pattern"), "rank_pattern")?;
        let config = Self {
            rank_pattern: ranks.into_iter().map(|(pattern, rank)| (pattern, rank as usize)).collect(),
            alpha_pattern: pattern(take("alpha_pattern"), "alpha_pattern")?,
            target_parameters: names(take("target_parameters"), "target_parameters")?,
            expert_layers: false,
            modules_to_save: names(take("modules_to_save"), "modules_to_save")?,
            layers: layers(take("layers_to_transform"))?,
            layers_pattern: names(take("layers_pattern"), "layers_pattern")?,
            targets: targets.unwrap_or(TargetModules::Suffixes(Vec::new())),
            excluded,
            base,
            options,
        };
        // New versions add fields; those that are off change nothing.
        let is_off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            Value::String(text) => text.is_empty(),
            _ => false,
        };
        if let Some((name, value)) = fields.iter().find(|(_, value)| !is_off(value)) {
            bail!("{name} is {value}, which is not known here and may change what the adapter computes");
        }
        Ok(config)
    }

    /// Returns the file's text, as PEFT reads it.
    pub fn to_json(&self) -> Value {
        let LoraOptions { rank, alpha, rank_stabilized, dropout, dora, bias, .. } = self.options;
        let is_whole = |alpha: f64| alpha.fract() == 0.0 && alpha.abs() < (1_i64 << 53) as f64;
        let alpha_of = |alpha: f64| if is_whole(alpha) { json!(alpha as i64) } else { json!(alpha) };
        // In their order, since the first that matches counts.
        let ranks: Map<String, Value> =
            self.rank_pattern.iter().map(|(pattern, rank)| (pattern.clone(), json!(rank))).collect();
        let alphas: Map<String, Value> =
            self.alpha_pattern.iter().map(|(pattern, alpha)| (pattern.clone(), alpha_of(*alpha))).collect();
        let or_null = |names: &Vec<String>| if names.is_empty() { Value::Null } else { json!(names) };
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "inference_mode": true,
            "r": rank,
            "lora_alpha": alpha_of(alpha),
            "lora_dropout": dropout,
            "use_rslora": rank_stabilized,
            "use_dora": dora,
            "lora_bias": bias,
            "fan_in_fan_out": false,
            "bias": "none",
            "init_lora_weights": true,
            "target_parameters": or_null(&self.target_parameters),
            "target_modules": self.targets.to_json(),
            "exclude_modules": self.excluded.as_ref().map(TargetModules::to_json),
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "modules_to_save": or_null(&self.modules_to_save),
            "layers_to_transform": self.layers,
            "layers_pattern": or_null(&self.layers_pattern),
        })
    }

    /// Returns the same config with the names of the modules that are targets, in place of a word for all linear layers: PEFT wants them
    /// beside a list of layers.
    pub(super) fn resolved(&self, modules: &[LayerModule]) -> Self {
        if self.targets != TargetModules::AllLinear {
            return self.clone();
        }
        let linear = modules.iter().filter(|module| module.kind == ModuleKind::Linear);
        let names: BTreeSet<String> =
            linear.filter_map(|module| Some(module.path.rsplit('.').next()?.to_owned())).collect();
        Self { targets: TargetModules::Suffixes(names.into_iter().collect()), ..self.clone() }
    }

    /// Returns the options of the module of this path, if it has factors.
    ///
    /// # Errors
    /// If a regular expression takes too long.
    pub fn options_of(&self, path: &str, kind: ModuleKind) -> Result<Option<LoraOptions>> {
        let is_excluded = self.excluded.as_ref().map(|excluded| excluded.matches(path, kind));
        if kind == ModuleKind::Norm || is_excluded.transpose()?.unwrap_or(false) {
            return Ok(None);
        }
        if !self.targets.matches(path, kind)? || !self.has_layer(path)? {
            return Ok(None);
        }
        self.options_at(path).map(Some)
    }

    /// The options at a path that has factors.
    pub(super) fn options_at(&self, path: &str) -> Result<LoraOptions> {
        let mut options = self.options.clone();
        if let Some(rank) = first_match(&self.rank_pattern, path)? {
            options.rank = rank;
        }
        if let Some(alpha) = first_match(&self.alpha_pattern, path)? {
            options.alpha = alpha;
        }
        Ok(options)
    }

    /// Returns whether the adapter replaces the module of this path.
    pub fn replaces(&self, path: &str) -> bool {
        let parts: Vec<&str> = path.split('.').collect();
        let mut paths = (1..=parts.len()).map(|count| parts[..count].join("."));
        paths.any(|path| self.modules_to_save.iter().any(|name| path.ends_with(name.as_str())))
    }

    /// Returns whether the module's layer is one of those with factors.
    fn has_layer(&self, path: &str) -> Result<bool> {
        // As in PEFT, a module that is named by its whole path has factors in any case.
        let is_named =
            matches!(&self.targets, TargetModules::Suffixes(names) if names.iter().any(|name| name == path));
        let Some(layers) = self.layers.as_ref().filter(|_| !is_named) else { return Ok(true) };
        let pattern = match &self.layers_pattern[..] {
            [] => r"^.*?\.[^.]*\.(\d+)\.".to_owned(),
            names => format!(r"^(?:|.*?\.)(?:{})\.(\d+)\.", names.join("|")),
        };
        let found = Regex::new(&pattern)?.captures(path)?;
        let layer = found.and_then(|found| found.get(1)?.as_str().parse::<usize>().ok());
        Ok(layer.is_some_and(|layer| layers.contains(&layer)))
    }
}

/// The value of the first pattern that matches the end of a path.
fn first_match<T: Copy>(patterns: &[(String, T)], path: &str) -> Result<Option<T>> {
    for (pattern, value) in patterns {
        if is_match(pattern, path)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// Whether a pattern of ranks or of scales is that of a path.
pub(super) fn is_match(pattern: &str, path: &str) -> Result<bool> {
    Ok(Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"))?.is_match(path)?)
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "absent".to_owned(), Value::to_string)
}

fn number(value: Option<Value>, name: &str) -> Result<Option<f64>> {
    let read = |value: Value| value.as_f64().with_context(|| format!("{name} is {value}; expected a number"));
    value.map(read).transpose()
}

fn whole_number(value: Option<Value>, name: &str) -> Result<Option<usize>> {
    let read = |value: Value| {
        let number = value.as_u64().filter(|&number| number > 0).map(|number| number as usize);
        number.with_context(|| format!("{name} is {value}; expected a whole number of at least 1"))
    };
    value.map(read).transpose()
}

fn switch(value: Option<Value>, name: &str) -> Result<bool> {
    let Some(value) = value else { return Ok(false) };
    value.as_bool().with_context(|| format!("{name} is {value}; expected true or false"))
}

fn names(value: Option<Value>, name: &str) -> Result<Vec<String>> {
    let Some(value) = value else { return Ok(Vec::new()) };
    if let Some(one) = value.as_str() {
        return Ok(vec![one.to_owned()]);
    }
    let all =
        value.as_array().and_then(|all| all.iter().map(|one| one.as_str().map(str::to_owned)).collect());
    all.with_context(|| format!("{name} is {value}; expected a list of names"))
}

fn layers(value: Option<Value>) -> Result<Option<Vec<usize>>> {
    let Some(value) = value else { return Ok(None) };
    let one = |value: &Value| value.as_u64().map(|layer| layer as usize);
    let all = match &value {
        Value::Array(all) => all.iter().map(one).collect(),
        other => one(other).map(|layer| vec![layer]),
    };
    all.map(Some).with_context(|| format!("layers_to_transform is {value}; expected numbers of layers"))
}
