//! Small trainings.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use candle_lm::config::Config;
use candle_lm::config::experts::{Experts, QWEN};
use candle_lm::config::parts::QkNorm;
use candle_lm::random_model;
use candle_lm::train::job::Job;
use candle_lm::train::trainer::{Trainer, train};
use candle_shard::strict;
use clap::Parser;
use lm::args::Args;
use serde_json::{Value, json};
use tempfile::TempDir;
use test_utils::on_ranks;

/// What trainings here say unless they go on with another or say otherwise: uneven parts on most meshes.
const TINY: [(&str, &str); 6] = [
    ("--steps", "6"),
    ("--batch", "5"),
    ("--seq-len", "7"),
    ("--lr", "0.01"),
    ("--warmup", "2"),
    ("--clip-norm", "0.5"),
];

/// A small model with so many query and key heads.
pub(crate) fn config(query: usize, key_value: usize) -> Config {
    Config {
        hidden_size: query * 8,
        intermediate_size: 44,
        num_hidden_layers: 2,
        num_attention_heads: query,
        num_key_value_heads: Some(key_value),
        max_position_embeddings: 32,
        ..random_model::config()
    }
}

/// A small mixture of so many experts, of which each token uses some.
pub(crate) fn mixture(count: usize, chosen: usize) -> Config {
    let mut parts = random_model::mixture().parts;
    let experts = parts.experts.take().unwrap();
    parts.experts = Some(Experts { count, chosen, hidden: 44, ..experts });
    Config { parts, family: "mixtral", ..config(4, 2) }
}

/// A small mixture of Qwen: norms of heads, a layer without experts, and perhaps weights that are not normalized.
pub(crate) fn qwen_mixture(normalize: bool) -> Config {
    let mut made = mixture(5, 2);
    let experts = made.parts.experts.take().unwrap();
    made.parts.experts = Some(Experts { normalize, names: &QWEN, layers: vec![false, true], ..experts });
    (made.parts.qk_norm, made.parts.windows) = (QkNorm::Head, vec![None; made.num_hidden_layers]);
    Config { family: "qwen3_moe", ..made }
}

/// Writes what files say of a mixture of Qwen.
fn describe_qwen(path: &Path, config: &Config) {
    let experts = config.parts.experts.as_ref().unwrap();
    let mut fields: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let all = fields.as_object_mut().unwrap();
    let dense: Vec<usize> = (0..config.num_hidden_layers).filter(|&layer| !experts.are_in(layer)).collect();
    for (name, value) in [
        ("model_type", json!(config.family)),
        ("architectures", json!(["Qwen3MoeForCausalLM"])),
        ("head_dim", json!(config.heads().dim)),
        ("num_local_experts", json!(experts.count)),
        ("num_experts_per_tok", json!(experts.chosen)),
        ("moe_intermediate_size", json!(experts.hidden)),
        ("norm_topk_prob", json!(experts.normalize)),
        ("mlp_only_layers", json!(dense)),
        ("decoder_sparse_step", json!(1)),
    ] {
        all.insert(name.into(), value);
    }
    fs::write(path, fields.to_string()).unwrap();
    assert_eq!(Config::parse(&fields.to_string()).unwrap().parts, config.parts);
}

/// A folder with a model, a text, and room for checkpoints.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    /// A folder without a model.
    pub(crate) fn empty() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn new(config: &Config) -> Self {
        let folder = tempfile::tempdir().unwrap();
        random_model::write(&folder.path().join("model"), config, 7, DType::F32).unwrap();
        if config.family == "qwen3_moe" {
            describe_qwen(&folder.path().join("model/config.json"), config);
        }
        let text: String = (0..60).map(|i| format!("{i} sheep jump over {} fences. ", i * i % 17)).collect();
        fs::write(folder.path().join("text"), text).unwrap();
        fs::write(folder.path().join("records.jsonl"), records()).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The training that the flags describe, on the model or from the checkpoint that they name.
    pub(crate) fn open(&self, flags: &str) -> anyhow::Result<Arc<Job>> {
        let at = self.folder.path().display();
        let mut start: Vec<String> = Vec::new();
        if !flags.contains("--data") {
            start.push(format!("--train {at}/text"));
        }
        if !flags.contains("--resume") {
            let unsaid = TINY.iter().filter(|(flag, _)| !flags.contains(flag));
            start.extend(unsaid.map(|(flag, value)| format!("{flag} {value}")));
            if !flags.contains("--model") {
                start.push(format!("--model {at}/model"));
            }
        }
        let flags = flags.replace("@", &format!("{at}/"));
        let line = format!("llama {} {flags}", start.join(" "));
        let args = Args::try_parse_from(line.split_whitespace())?;
        args.validate()?;
        Ok(Arc::new(lm::train::job::open(&args, &self.path("scratch"))?))
    }

    /// The losses that the flags lead to.
    pub(crate) fn losses(&self, flags: &str) -> Vec<f64> {
        let job = self.open(flags).unwrap();
        // No op may communicate unasked.
        let trained =
            on_ranks(job.pipeline.world(), flags, move |ctx| strict(|| train(ctx, &job, |_| Ok(()))));
        assert!(
            trained.iter().all(|rank| rank.losses == trained[0].losses),
            "{flags}: ranks have different losses"
        );
        trained.into_iter().next().unwrap().losses
    }

    /// The gradients of the first step by parameter, each whole.
    pub(crate) fn first_gradients(&self, flags: &str) -> BTreeMap<String, Vec<f32>> {
        let job = self.open(flags).unwrap();
        let ranks = on_ranks(job.pipeline.world(), flags, move |ctx| -> anyhow::Result<_> {
            let trainer = Trainer::new(ctx, &job)?;
            let (_, grads) = trainer.gradients(0)?;
            let mut whole = Vec::new();
            for parameter in trainer.parameters().iter().filter(|parameter| !parameter.is_frozen()) {
                let grad = parameter.grad(&grads)?.expect("every parameter takes part");
                whole.push((parameter.name.clone(), grad.full_tensor()?.flatten_all()?.to_vec1::<f32>()?));
            }
            Ok(whole)
        });
        ranks.into_iter().flatten().collect()
    }
}

/// Records of many lengths, of which more or less is learned.
fn records() -> String {
    let record = |i: usize| {
        let (sheep, fences) = ("sheep ".repeat(i % 3), i * i % 17);
        match i % 4 {
            0 => json!({"prompt": format!("{i} {sheep}over"), "completion": format!(" {fences}.")}),
            1 => json!({"prompt": "", "completion": format!("{sheep}{i}.")}),
            _ => json!({"text": format!("{i} {sheep}{fences}")}),
        }
    };
    (0..40).map(|i| record(i).to_string() + "\n").collect()
}

/// Copies a folder of files.
pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

pub(crate) fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(off < tolerance, "{what}: off by {off}\n got {got:?}\nwant {want:?}");
}
