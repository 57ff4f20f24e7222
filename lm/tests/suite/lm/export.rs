//! GGUF files that are written: the models that they were made of.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, gguf_file};
use candle_lm::files::Files;
use candle_lm::tokens;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::families::{Families, families, greedy, logits, write};
use crate::lm::{config, llama};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}";

/// Writes a tokenizer of so many tokens into a folder: bytes, two merges, and one that ends texts.
pub(crate) fn tokenizer(folder: &Path, count: usize, cut: Value) {
    let mut tokenizer: Value =
        serde_json::from_str(&tokens::of_bytes().unwrap().to_string(false).unwrap()).unwrap();
    let letters = ('A'..='~').chain('!'..='@').chain(['Ġ', 'Ċ', '¡', '¢']).map(String::from).take(count - 3);
    let all = letters.chain(["AB", "ABa"].map(String::from));
    let vocab: serde_json::Map<String, Value> = all.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    tokenizer["model"]["vocab"] = Value::Object(vocab);
    tokenizer["model"]["merges"] = json!([["A", "B"], ["AB", "a"]]);
    tokenizer["pre_tokenizer"] = cut;
    tokenizer["added_tokens"] = json!([{
        "id": count - 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
    }]);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let special = json!({"eos_token": "</s>", "bos_token": "</s>", "chat_template": TEMPLATE});
    fs::write(folder.join("tokenizer_config.json"), special.to_string()).unwrap();
}

pub(crate) fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}

fn rows(path: &Path, prompt: &[u32], ranks: usize) -> Vec<Vec<f32>> {
    let (path, prompt) = (path.to_owned(), prompt.to_vec());
    on_ranks(ranks, "exported", move |ctx| logits(ctx, &path, &prompt, false)).swap_remove(0)
}

fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn exported_files_compute_what_their_folders_compute() {
    let Families { prompt, models } = families();
    // The others have windows that llama.cpp does not have.
    let supported = [
        "llama with biases",
        "mistral with wide heads",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
        "olmo2",
        "granite",
        "mixtral",
        "qwen3 moe",
        "glm4 moe",
        "glm4 moe with norms and groups",
        "minimax m2",
        "olmo3",
        "seed oss",
        "exaone4 without windows",
        "hunyuan",
        "ernie",
        "glm",
        "glm4",
        "glm4 without biases",
        "ministral3",
        "cohere",
        "cohere2",
        "nemotron",
        "lfm2",
        "lfm2 with more taps",
        "arcee",
        "gemma",
        "stablelm",
        "stablelm with one norm",
        "qwen2 moe",
        "olmoe",
        "lfm2 moe",
        "granite moe",
        "granite moe with a shared network",
        "starcoder2",
        "llama4 of llama.cpp",
        "hunyuan moe",
        "ernie moe",
        "granite hybrid",
        "granite hybrid with experts",
        "mamba2",
        "nemotron h",
        "nemotron h with experts",
        "nemotron h with latents",
        "falcon h1",
        "falcon h1 with a norm behind gates",
        "exaone moe of llama.cpp",
    ];
    let mut done = Vec::new();
    for mut model in models {
        for (case, field, value) in AS_LLAMA_CPP {
            if model.case == case {
                model.config[field] = serde_json::from_str(value).unwrap();
            }
        }
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &model.config);
        tokenizer(folder.path(), 37, byte_level());
        let files = Files::open(folder.path()).unwrap();
        let out = |name: &str| folder.path().join(format!("{name}.gguf"));
        let exported = files.export_gguf(&out("f32"), GgmlDType::F32, |_, _| {});
        if let Err(error) = exported {
            let said = format!("{error:#}");
            assert!(!supported.contains(&model.case.as_str()), "{}: {said}", model.case);
            assert!(
                said.contains("are not written")
                    || said.contains("llama.cpp has not")
                    || said.contains("would be"),
                "{said}"
            );
            assert!(!out("f32").exists());
            continue;
        }
        assert!(supported.contains(&model.case.as_str()), "{}", model.case);
        let want = rows(folder.path(), &prompt, 1);
        for ranks in [1, 2, 3] {
            let off = difference(&rows(&out("f32"), &prompt, ranks), &want);
            assert!(off < 2e-5, "{} on {ranks}: {off}", model.case);
        }
        let written = |path: &Path| greedy(path, &prompt, model.tokens.len(), [1, 1]);
        assert_eq!(written(&out("f32")), written(folder.path()), "{}", model.case);
        files.export_gguf(&out("q8_0"), GgmlDType::Q8_0, |_, _| {}).unwrap();
        let off = difference(&rows(&out("q8_0"), &prompt, 1), &want);
        // A router may choose another expert, and convolutions multiply three products.
        let most = match (files.config.parts.experts.is_some(), files.config.is_recurrent()) {
            (true, _) => 2.0,
            (_, true) => 0.5,
            _ => 0.3,
        };
        assert!(off > 0.0 && off < most, "{}: {off}", model.case);
        // From one file to another.
        let again = Files::open(&out("f32")).unwrap();
        again.export_gguf(&out("again"), GgmlDType::F32, |_, _| {}).unwrap();
        assert_eq!(
            difference(&rows(&out("again"), &prompt, 1), &rows(&out("f32"), &prompt, 1)),
            0.0,
            "{}",
            model.case
        );
        done.push(model.case);
    }
    assert_eq!(done.len(), supported.len(), "{done:?}");
}

/// Fields of small models that llama.cpp computes otherwise, and what it computes.
const AS_LLAMA_CPP: [(&str, &str, &str); 6] = [
    ("olmoe", "num_key_value_heads", "4"),
    // A router would choose other experts for what blocks round off.
    ("olmoe", "num_experts_per_tok", "6"),
    ("qwen3 moe", "mlp_only_layers", "[]"),
    ("gemma2", "query_pre_attn_scalar", "16"),
    ("gemma3", "layer_types", r#"["sliding_attention", "sliding_attention"]"#),
    ("cohere2", "layer_types", r#"["sliding_attention", "sliding_attention"]"#),
];

/// Changes a tokenizer of SentencePiece that has all bytes, some letters, and two merges of which one needs the other.
fn pieces(folder: &Path, change: &dyn Fn(&mut Value)) {
    let special = |id: u32, content: &str, rstrip: bool| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": rstrip, "normalized": false,
            "special": true,
        })
    };
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let letters = ('a'..='z').map(String::from).chain(["▁", "▁a", "▁an", "an", "▁and"].map(String::from));
    let all = ["<unk>", "<s>", "</s>", "<|end|>"].map(String::from).into_iter().chain(bytes).chain(letters);
    let vocab: serde_json::Map<String, Value> = all.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let replaced = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let around = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "pre_tokenizer": null, "decoder": null,
        "added_tokens": [
            special(0, "<unk>", false), special(1, "<s>", false), special(2, "</s>", false), special(3, "<|end|>", false),
        ],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]},
        "post_processor": {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, around("A")],
            "pair": [around("A"), around("B")], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocab,
            "merges": [["a", "n"], ["▁", "a"], ["▁", "an"], ["▁a", "n"], ["▁an", "d"]],
        },
    });
    change(&mut tokenizer);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let special =
        json!({"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "chat_template": TEMPLATE});
    fs::write(folder.join("tokenizer_config.json"), special.to_string()).unwrap();
}

/// Spaces as they are, and cut as Gemma's tokenizers say.
fn as_gemma(tokenizer: &mut Value) {
    tokenizer["normalizer"] = tokenizer["normalizer"]["normalizers"][1].clone();
    tokenizer["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
}

/// Tokens that take the white space behind them.
fn as_phi3(tokenizer: &mut Value) {
    for at in [2, 3] {
        tokenizer["added_tokens"][at]["rstrip"] = json!(true);
    }
}

#[test]
fn vocabularies_of_sentencepiece_are_written() {
    let Families { prompt, models } = families();
    type Change = fn(&mut Value);
    let kinds: [(&str, &str, Change); 4] = [
        ("mistral with wide heads", "llama", |_| ()),
        ("phi3", "phi3", as_phi3),
        ("gemma2", "gemma2", as_gemma),
        ("gemma3", "gemma3", as_gemma),
    ];
    let mut place = None;
    for (case, architecture, change) in kinds {
        let mut config = models.iter().find(|model| model.case == case).unwrap().config.clone();
        for (_, field, value) in AS_LLAMA_CPP.into_iter().filter(|(of, ..)| *of == case) {
            config[field] = serde_json::from_str(value).unwrap();
        }
        (config["vocab_size"], config["eos_token_id"]) = (json!(294), json!([2, 3]));
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        pieces(folder.path(), &change);
        let files = Files::open(folder.path()).unwrap();
        let out = folder.path().join("x.gguf");
        files.export_gguf(&out, GgmlDType::F32, |_, _| {}).unwrap();
        let off = difference(&rows(&out, &prompt, 2), &rows(folder.path(), &prompt, 1));
        assert!(off < 2e-5, "{case}: {off}");
        let content = gguf_file::Content::read(&mut fs::File::open(&out).unwrap()).unwrap();
        let field = |key: &str| content.metadata[&format!("tokenizer.ggml.{key}")].clone();
        assert_eq!(content.metadata["general.architecture"].to_string().unwrap(), architecture);
        assert_eq!(field("model").to_string().unwrap(), "llama");
        assert_eq!(field("add_space_prefix").to_bool().unwrap(), !architecture.starts_with("gemma"));
        let kinds: Vec<i32> =
            field("token_type").to_vec().unwrap().iter().map(|kind| kind.to_i32().unwrap()).collect();
        assert_eq!((&kinds[..5], kinds[260], kinds[293]), (&[2, 3, 3, 3, 6][..], 1, 5), "{case}");
        let scores = field("scores");
        let score = |id: usize| scores.to_vec().unwrap()[id].to_f32().unwrap();
        // "an", "▁a", "▁an" and "▁and".
        assert_eq!([289, 287, 288, 290].map(score), [0.0, -1.0, -2.0, -3.0], "{case}");
        // The reader joins pairs by these scores; the texts are those of llama.cpp's own tests, and more.
        let [was, is] = [folder.path(), &out].map(|path| tokens::read(path).unwrap());
        for text in ["", " and", "and  and", "an and\n</s> and<|end|>\n\nhi <s>a", "naïve 你好\t\u{1F642}"]
        {
            let ids =
                |tokenizer: &tokenizers::Tokenizer| tokenizer.encode(text, true).unwrap().get_ids().to_vec();
            assert_eq!(ids(&is), ids(&was), "{case}: {text:?}");
        }
        // From one file to another.
        let again = folder.path().join("again.gguf");
        Files::open(&out).unwrap().export_gguf(&again, GgmlDType::F32, |_, _| {}).unwrap();
        assert_eq!(difference(&rows(&again, &prompt, 1), &rows(&out, &prompt, 1)), 0.0, "{case}");
        place.get_or_insert(folder);
    }

    // What llama.cpp would cut otherwise is refused.
    let folder = place.unwrap();
    let refused = |change: &dyn Fn(&mut Value), want: &str| {
        pieces(folder.path(), change);
        let files = Files::open(folder.path()).unwrap();
        let out = folder.path().join("no.gguf");
        let said = format!("{:#}", files.export_gguf(&out, GgmlDType::F16, |_, _| {}).unwrap_err());
        assert!(said.contains(want) && !out.exists(), "{said}: {want}");
    };
    refused(&as_phi3, "\"</s>\" takes white space");
    refused(&|tokenizer| tokenizer["model"]["merges"] = json!([["a", "n"]]), "which llama.cpp would do");
    refused(
        &|tokenizer| tokenizer["model"]["merges"].as_array_mut().unwrap().swap(3, 4),
        "one behind another",
    );
    refused(
        &|tokenizer| {
            tokenizer["model"]["vocab"].as_object_mut().unwrap().remove("<0x0A>");
        },
        "no token <0x0A>",
    );
    for (scheme, want) in [("first", "behind special tokens too"), ("always", "otherwise than llama.cpp")] {
        let change = |tokenizer: &mut Value| {
            tokenizer["normalizer"] = Value::Null;
            tokenizer["pre_tokenizer"] =
                json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
        };
        refused(&change, want);
    }
    refused(&|tokenizer| tokenizer["normalizer"] = json!({"type": "NFKC"}), "\"NFKC\"");
}

#[test]
fn files_say_what_llama_cpp_reads() {
    let mut model = families().models.into_iter().find(|model| model.case == "llama with biases").unwrap();
    let prompt = families().prompt;
    model.config["rope_parameters"] = json!({
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    });
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &model.config);
    tokenizer(folder.path(), 37, byte_level());
    let files = Files::open(folder.path()).unwrap();
    let path = folder.path().join("small.gguf");
    files.export_gguf(&path, GgmlDType::F16, |_, _| {}).unwrap();
    // The factors of each frequency are in a tensor, and their formula is in the config of the folder.
    let exact = folder.path().join("exact.gguf");
    files.export_gguf(&exact, GgmlDType::F32, |_, _| {}).unwrap();
    let off = difference(&rows(&exact, &prompt, 2), &rows(folder.path(), &prompt, 1));
    assert!(off < 2e-5, "{off}");
    let content = gguf_file::Content::read(&mut fs::File::open(&path).unwrap()).unwrap();
    let text = |key: &str| content.metadata[key].to_string().unwrap().clone();
    let number = |key: &str| content.metadata[key].to_u32().unwrap();
    assert_eq!([text("general.architecture"), text("general.name")], ["llama", "small"]);
    assert_eq!([text("tokenizer.ggml.model"), text("tokenizer.ggml.pre")], ["gpt2", "gpt-2"]);
    assert_eq!(text("tokenizer.chat_template"), TEMPLATE);
    for (key, want) in [
        ("general.file_type", 1),
        ("llama.block_count", 2),
        ("llama.embedding_length", 32),
        ("llama.attention.head_count_kv", 2),
        ("tokenizer.ggml.bos_token_id", 36),
        ("tokenizer.ggml.eos_token_id", 36),
    ] {
        assert_eq!(number(key), want, "{key}");
    }
    assert_eq!(content.metadata["llama.rope.freq_base"].to_f32().unwrap(), 10_000.0);
    assert_eq!(content.metadata["tokenizer.ggml.token_type"].to_vec().unwrap()[36].to_i32().unwrap(), 3);
    let merges = content.metadata["tokenizer.ggml.merges"].to_vec().unwrap();
    assert_eq!(
        merges.iter().map(|merge| merge.to_string().unwrap().as_str()).collect::<Vec<_>>(),
        ["A B", "AB a"]
    );
    let stored = |name: &str| {
        (content.tensor_infos[name].ggml_dtype, content.tensor_infos[name].shape.dims().to_vec())
    };
    assert_eq!(stored("blk.1.ffn_down.weight"), (GgmlDType::F16, vec![32, 44]));
    assert_eq!(stored("blk.0.attn_q.bias"), (GgmlDType::F32, vec![32]));
    assert_eq!(stored("rope_freqs.weight"), (GgmlDType::F32, vec![4]));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), mode(&plain));
    }

    // Files have numbers of 32 bits, and this base is none.
    let mut config = model.config.clone();
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 283_461_213.0});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let files = Files::open(folder.path()).unwrap();
    files.export_gguf(&folder.path().join("base.gguf"), GgmlDType::F16, |_, _| {}).unwrap();
    fs::write(folder.path().join("config.json"), model.config.to_string()).unwrap();

    // What llama.cpp would read otherwise is refused.
    let refused = |change: &dyn Fn(&Path), want: &str| {
        tokenizer(folder.path(), 37, byte_level());
        change(folder.path());
        let files = Files::open(folder.path()).unwrap();
        let said = format!(
            "{:#}",
            files.export_gguf(&folder.path().join("no.gguf"), GgmlDType::F16, |_, _| {}).unwrap_err()
        );
        assert!(said.contains(want) && !folder.path().join("no.gguf").exists(), "{said}: {want}");
    };
    let changed = |folder: &Path, change: &dyn Fn(&mut Value)| {
        let path = folder.join("tokenizer.json");
        let mut fields: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut fields);
        fs::write(path, fields.to_string()).unwrap();
    };
    refused(&|folder| changed(folder, &|fields| fields["model"]["merges"] = json!([])), "merges nothing");
    refused(
        &|folder| changed(folder, &|fields| fields["added_tokens"][0]["rstrip"] = json!(true)),
        "white space",
    );
    refused(
        &|folder| {
            changed(folder, &|fields| {
                let split = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": false});
                fields["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, byte_level()]});
            });
        },
        "which files do not say",
    );
    refused(
        &|folder| fs::write(folder.join("chat_template.jinja"), "{% for").unwrap(),
        "chat_template.jinja",
    );
    let special =
        |bos: Value| json!({"eos_token": "</s>", "bos_token": bos, "chat_template": TEMPLATE}).to_string();
    let without = special(Value::Null);
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let mut config = model.config.clone();
    config["bos_token_id"] = Value::Null;
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    refused(&|folder| fs::write(folder.join("tokenizer_config.json"), &without).unwrap(), "bos_token");
}

#[test]
fn the_program_writes_gguf_files_and_never_over_others() {
    let folder = tempfile::tempdir().unwrap();
    let config = candle_lm::config::Config { vocab_size: 99, ..config(4, 2) };
    candle_lm::random_model::write(folder.path(), &config, 3, candle_core::DType::F32).unwrap();
    let digits = json!({"type": "Digits", "individual_digits": true});
    tokenizer(folder.path(), 99, json!({"type": "Sequence", "pretokenizers": [digits, byte_level()]}));
    let model = folder.path().to_str().unwrap();
    let out = folder.path().join("x.gguf");
    let run = |more: &[&str]| {
        llama(&[&["export", "--model", model, "--out", out.to_str().unwrap()][..], more].concat())
    };
    let written = run(&["--gguf", "q4_0", "--json", "-"]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    let told: Value = serde_json::from_slice(&written.stdout).unwrap();
    assert_eq!(told["bytes"].as_u64().unwrap(), fs::metadata(&out).unwrap().len());
    let before = fs::read(&out).unwrap();
    let text = llama(&[
        "generate",
        "--model",
        out.to_str().unwrap(),
        "--prompt",
        "Hi",
        "--max-tokens",
        "3",
        "--tp",
        "2",
    ]);
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
    let again = run(&[]);
    assert_eq!((again.status.code(), fs::read(&out).unwrap() == before), (Some(2), true));
    assert!(String::from_utf8_lossy(&again.stderr).contains("exists"));
    for (args, status, want) in [
        (&["export", "--model", model][..], 2, "--out"),
        (&["export", "--out", "y.gguf"], 2, "--model"),
        (&["export", "--model", model, "--out", "/no/such/folder/x.gguf"], 1, "/no/such/folder"),
        (&["export", "--model", model, "--out", "y.gguf", "--tp", "2"], 2, "--tp has no effect with export"),
        (&["info", "--model", model, "--gguf", "f16"], 2, "--gguf has no effect with info"),
    ] {
        let output = llama(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(status) && said.contains(want), "{args:?}: {said}");
    }
    // A tokenizer that cuts texts in no known way.
    tokenizer(
        folder.path(),
        99,
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
    );
    let other: PathBuf = folder.path().join("other.gguf");
    let files = Arc::new(Files::open(folder.path()).unwrap());
    let said = format!("{:#}", files.export_gguf(&other, GgmlDType::F16, |_, _| {}).unwrap_err());
    assert!(said.contains("no name for how the tokenizer cuts texts") && !other.exists(), "{said}");
}
