//! Mixtures of experts, distributed over ranks: against transformers, in all layouts of files, and what travels.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_dist::comm::{self, CommCounts};
use candle_dist::{Op, RankContext};
use candle_lm::cache::Cache;
use candle_lm::config::Config;
use candle_lm::engine::ModelOptions;
use candle_lm::files::Files;
use candle_lm::generate::{Task, generate};
use candle_lm::model::Decoder;
use candle_lm::random_model;
use candle_lm::sample::Sampling;
use candle_shard::nn::MeshVarBuilder;
use lm::info::Info;
use serde_json::{Value, json};
use test_utils::on_ranks;

use crate::lm::facts::weight;
use crate::lm::families::{Families, Family, families, write};

/// The small models with experts.
fn mixtures() -> (Vec<u32>, Vec<Family>) {
    let Families { prompt, models } = families();
    let is_mixture = |model: &Family| {
        let config = Config::parse(&model.config.to_string()).unwrap();
        (0..config.num_hidden_layers).any(|layer| config.parts.experts(layer).is_some())
    };
    (prompt, models.into_iter().filter(is_mixture).collect())
}

/// This rank's part of a model on `[ep, tp]` ranks.
fn model(
    ctx: &RankContext,
    files: &Files,
    [ep, tp]: [usize; 2],
    longest: usize,
) -> anyhow::Result<(Decoder, MeshVarBuilder)> {
    let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
    let plan = Decoder::plan(&files.config, "tp");
    let vb =
        MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::F32, &Device::Cpu)?.frozen();
    let model = Decoder::new(&files.config, longest, &vb)?;
    vb.finish()?;
    Ok((model, vb))
}

/// The logits of what follows each token: of the first ones at once, and of the last two one by one.
fn logits(ctx: &RankContext, path: &Path, prompt: &[u32], mesh: [usize; 2]) -> anyhow::Result<Vec<Vec<f32>>> {
    let files = Files::open(path)?;
    let (model, _) = model(ctx, &files, mesh, prompt.len())?;
    let mut cache = Cache::of(&files.config, prompt.len());
    let mut rows = Vec::new();
    let (first, rest) = prompt.split_at(prompt.len() - 2);
    for part in [first, &rest[..1], &rest[1..]] {
        let tokens = Tensor::from_slice(part, (1, part.len()), &Device::Cpu)?;
        rows.extend(model.forward_cached(&tokens, &mut cache)?.squeeze(0)?.to_vec2::<f32>()?);
    }
    Ok(rows)
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-4, "{what}: off by {off}");
}

/// More ranks than experts too, and numbers that do not divide.
const MESHES: [[usize; 2]; 7] = [[1, 1], [2, 1], [3, 1], [2, 2], [1, 3], [2, 3], [5, 1]];

#[test]
fn distributed_experts_compute_the_logits_of_transformers() {
    let (prompt, models) = mixtures();
    assert!(models.len() >= 9);
    for Family { case, config, logits: want, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        for mesh in MESHES {
            let (path, prompt, want) = (folder.path().to_owned(), prompt.clone(), want.clone());
            let what = format!("{case} on {mesh:?}");
            on_ranks(mesh.iter().product(), &what.clone(), move |ctx| -> anyhow::Result<()> {
                let rows = logits(ctx, &path, &prompt, mesh)?;
                for (got, want) in [&rows[0], &rows[prompt.len() - 1]].into_iter().zip(&want) {
                    assert_close(got, want, &what);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn distributed_experts_write_the_tokens_of_transformers_in_stages_too() {
    let (prompt, models) = mixtures();
    for Family { case, config, tokens, .. } in models {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &config);
        let mut files = Files::open(folder.path()).unwrap();
        files.ends.clear();
        let files = Arc::new(files);
        // Ranks, stages, and ranks of experts.
        for [ranks, stages, ep] in [[2, 1, 2], [3, 1, 3], [4, 1, 2], [4, 2, 2], [6, 2, 3]] {
            let (files, prompt, want) = (files.clone(), prompt.clone(), tokens.clone());
            on_ranks(ranks, &case, move |ctx| -> anyhow::Result<()> {
                let held = ModelOptions { ep, ..ModelOptions::of(DType::F32) };
                let most = want.len();
                let sampling = Sampling::default();
                let task = Task { prompt: prompt.clone(), most, cache_tokens: None, sampling, held };
                let written = generate(ctx, stages, &files, &task, |_| Ok(true))?;
                assert_eq!(written.tokens, want, "{ranks} ranks, {stages} stages, {ep} of experts");
                Ok(())
            });
        }
    }
}

/// The tensors as transformers 5 has them in memory: experts stacked, gate and up in one.
fn as_in_memory(config: &Config) -> HashMap<String, Tensor> {
    let stack = |name: String| {
        let parts = config.unstacked(&name).unwrap();
        let shape = config.tensors().into_iter().find(|(known, _)| *known == name).unwrap().1[1..].to_vec();
        Tensor::stack(&parts.iter().map(|part| weight(part, &shape)).collect::<Vec<_>>(), 0).unwrap()
    };
    let experts = config.parts.experts.as_ref().unwrap();
    let has_gate = experts.gate.has_gate();
    let shapes: HashMap<String, Vec<usize>> = config.stored().into_iter().collect();
    // What files have in one is so in memory too.
    let fused = config.fused();
    let is_part = |name: &String| fused.iter().any(|(_, parts)| parts.iter().any(|(part, _)| part == name));
    let is_whole = |name: &String| fused.iter().any(|(whole, _)| config.stored_name(whole) == *name);
    let whole = config.stored().into_iter().filter(|(name, _)| is_whole(name));
    let mut tensors: HashMap<String, Tensor> =
        whole.map(|(name, shape)| (name.clone(), weight(&name, &shape))).collect();
    for (name, shape) in config.tensors().into_iter().filter(|(name, _)| !is_part(name)) {
        match name.split_once(".mlp.") {
            Some((layer, "experts.gate_proj")) => {
                let [gate, up] = ["gate", "up"].map(|part| stack(format!("{layer}.mlp.experts.{part}_proj")));
                let both = Tensor::cat(&[gate, up], 1).unwrap();
                tensors.insert(format!("{layer}.mlp.experts.gate_up_proj"), both);
            }
            Some((_, "experts.up_proj")) if has_gate => {}
            Some((layer, part @ ("experts.up_proj" | "experts.down_proj"))) => {
                let module = experts.names.module.trim_end_matches("experts");
                tensors.insert(format!("{layer}.{module}{part}"), stack(name.clone()));
            }
            Some((layer, "router.weight")) => {
                let router = weight(&config.stored_name(&name), &shape);
                tensors.insert(format!("{layer}.mlp.gate.weight"), router);
            }
            Some((layer, "router.bias")) => {
                let stored = config.stored_name(&name);
                let shape = &shapes[&stored];
                let module = stored.split_once(&layer[layer.find(".layers.").unwrap()..]).unwrap().1;
                let module = module.replace("block_sparse_moe", "mlp").replace("mlp.moe", "mlp.gate.moe");
                tensors.insert(format!("{layer}{module}"), weight(&stored, shape));
            }
            _ => {
                let stored = config.stored_name(&name);
                tensors.insert(stored.clone(), weight(&stored, &shape));
            }
        }
    }
    tensors
}

#[test]
fn files_with_stacked_experts_are_the_same_model() {
    let (prompt, models) = mixtures();
    let has_stacks = |model: &Family| !Config::parse(&model.config.to_string()).unwrap().stacks().is_empty();
    for Family { case, config, .. } in models.into_iter().filter(|model| !has_stacks(model)) {
        let [apart, stacked] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        write(apart.path(), &config);
        fs::write(stacked.path().join("config.json"), config.to_string()).unwrap();
        let tensors = as_in_memory(&Config::read(stacked.path(), &[]).unwrap());
        candle_core::safetensors::save(&tensors, stacked.path().join("model.safetensors")).unwrap();
        for mesh in [[1, 1], [2, 1], [2, 2]] {
            let paths = [apart.path().to_owned(), stacked.path().to_owned()];
            let (prompt, what) = (prompt.clone(), format!("{case} on {mesh:?}"));
            on_ranks(mesh.iter().product(), &what.clone(), move |ctx| -> anyhow::Result<()> {
                let [want, got] = [&paths[0], &paths[1]].map(|path| logits(ctx, path, &prompt, mesh));
                assert_eq!(got?, want?, "{what}");
                Ok(())
            });
        }
    }
}

#[test]
fn a_rank_reads_and_holds_its_experts_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mixture = Config { num_hidden_layers: 2, vocab_size: 256, ..random_model::mixture() };
    random_model::write(folder.path(), &mixture, 7, DType::F32).unwrap();
    let of_experts = |count: usize| 2 * count * 3 * mixture.hidden_size * mixture.intermediate_size * 4;
    let dense = mixture.parameters() * 4 - of_experts(8);
    let path = Arc::new(folder.path().to_owned());
    for (ep, counts) in [(2, vec![4, 4]), (3, vec![3, 3, 2]), (5, vec![2, 2, 2, 2, 0])] {
        let (path, want) =
            (path.clone(), counts.iter().map(|&count| dense + of_experts(count)).collect::<Vec<_>>());
        let told =
            Info::new(&Files::open(&path).unwrap(), ep, &ModelOptions { ep, ..ModelOptions::of(DType::F32) })
                .unwrap();
        assert_eq!(told.bytes_per_rank, want);
        let experts = told.experts.unwrap();
        assert_eq!((experts.count, experts.chosen, experts.layers, &experts.per_rank), (8, 2, 2, &counts));
        assert_eq!(experts.active_parameters * 4, dense + of_experts(2));
        // A pair of experts is on one rank or on two.
        let pairs = (0..8).flat_map(|a| (0..a).map(move |b| (a, b)));
        let rank =
            |expert: usize| (0..ep).find(|&rank| counts[..=rank].iter().sum::<usize>() > expert).unwrap();
        let ranks: usize = pairs.map(|(a, b)| if rank(a) == rank(b) { 1 } else { 2 }).sum();
        assert!((experts.ranks_per_token - ranks as f64 / 28.0).abs() < 1e-9, "{}", experts.ranks_per_token);
        on_ranks(ep, "bytes", move |ctx| -> anyhow::Result<()> {
            let files = Files::open(&path)?;
            let (_, vb) = model(ctx, &files, [ep, 1], 8)?;
            let held: usize = vb.built().iter().map(|parameter| parameter.var.elem_count() * 4).sum();
            assert_eq!((held, files.bytes_read()), (want[ctx.rank()], want[ctx.rank()] as u64));
            Ok(())
        });
    }
}

#[test]
fn only_routed_rows_travel_between_ranks_of_experts() {
    let folder = tempfile::tempdir().unwrap();
    let mixture = Config { num_hidden_layers: 1, vocab_size: 256, ..random_model::mixture() };
    random_model::write(folder.path(), &mixture, 7, DType::F32).unwrap();
    let path: PathBuf = folder.path().into();
    let width = mixture.hidden_size;
    let counts = on_ranks(4, "traffic", move |ctx| -> anyhow::Result<[CommCounts; 2]> {
        let files = Files::open(&path)?;
        let (model, _) = model(ctx, &files, [4, 1], 9)?;
        let mut cache = Cache::of(&files.config, 9);
        let tokens = |tokens: &[u32]| Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu);
        let (made, prompt) =
            comm::record(|| model.forward_cached(&tokens(&[7, 3, 90, 14, 5, 6, 77, 200])?, &mut cache));
        made?;
        let (made, one) = comm::record(|| model.forward_cached(&tokens(&[9])?, &mut cache));
        made?;
        Ok([prompt, one])
    });
    let row = width * 4;
    // A row with the weights and numbers of its two choices, there; the result back. A token goes to one or two ranks.
    let sent: usize = counts.iter().map(|[prompt, _]| prompt.get(Op::AllToAll).bytes).sum();
    let rows = sent / (2 * row + 2 * 2 * 4);
    assert_eq!(sent, rows * (2 * row + 2 * 2 * 4));
    assert!((8..=16).contains(&rows), "{rows} rows of 8 tokens");
    for [prompt, one] in &counts {
        let count = |counts: &CommCounts, op| counts.get(op).count;
        // Rows, slips and results; a table of counts, and the results of all tokens for the next layer.
        assert_eq!(
            (count(prompt, Op::AllToAll), count(prompt, Op::AllGather), prompt.total()),
            (3, 2, 5),
            "{prompt}"
        );
        // One token stays on all ranks: they use one choice of two experts, and the sum of one row joins the results.
        assert_eq!((one.get(Op::Broadcast).bytes, count(one, Op::Broadcast)), (4 * (1 + 2), 1), "{one}");
        assert_eq!((one.get(Op::AllReduce).bytes, one.total()), (row, 2), "{one}");
    }
}

#[test]
fn the_program_distributes_experts_and_refuses_to_where_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let mixture =
        Config { num_hidden_layers: 2, hidden_size: 64, vocab_size: 256, ..random_model::mixture() };
    random_model::write(folder.path(), &mixture, 7, DType::F32).unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(4)).unwrap();
    let (model, text) = (folder.path().to_str().unwrap(), text.to_str().unwrap());
    let run = |flags: &[&str]| -> Value {
        let output = crate::lm::llama(&[flags, &["--model", model, "--json", "-"]].concat());
        assert!(output.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let write = ["generate", "--prompt", "Once", "--temperature", "0", "--max-tokens", "8"];
    let score = ["score", "--text", text, "--window", "32"];
    let (one, nll) = (run(&write)["text"].clone(), run(&score)["mean_nll"].as_f64().unwrap());
    for mesh in [&["--ep", "2"][..], &["--ep", "3", "--tp", "2"], &["--ep", "2", "--pp", "2"], &["--ep", "9"]]
    {
        let report = run(&[&write[..], mesh].concat());
        assert_eq!(report["text"], one, "{mesh:?}");
        let scored = run(&[&score[..], mesh].concat())["mean_nll"].as_f64().unwrap();
        assert!((scored - nll).abs() < 1e-5, "{mesh:?}: {scored} instead of {nll}");
        if !mesh.contains(&"--pp") {
            assert_eq!(
                run(&[&["info"], mesh].concat())["bytes_per_rank"],
                report["bytes_per_rank"],
                "{mesh:?}"
            );
        }
    }
    // Without a model it is a random mixture.
    let random = crate::lm::llama(&["generate", "--ep", "2", "--prompt", "x", "--max-tokens", "2"]);
    assert!(random.status.success(), "{}", String::from_utf8_lossy(&random.stderr));

    let dense = tempfile::tempdir().unwrap();
    random_model::write(dense.path(), &crate::lm::config(4, 2), 7, DType::F32).unwrap();
    let dense = dense.path().to_str().unwrap();
    for command in [
        &["generate", "--prompt", "x"][..],
        &["score", "--text", text],
        &["info"],
        &["train", "--train", text, "--batch", "2", "--seq-len", "4"],
    ] {
        let output = crate::lm::llama(&[command, &["--model", dense, "--ep", "2"]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && said.contains("--ep 2") && said.contains("family llama"),
            "{said}"
        );
    }
}

#[test]
fn fields_and_tensors_of_mixtures_that_are_not_understood_are_refused_by_name() {
    let (_, models) = mixtures();
    let config = |case: &str| models.iter().find(|model| model.case == case).unwrap().config.clone();
    let (mixtral, qwen) = (config("mixtral"), config("qwen3 moe"));
    let (glm, minimax) = (config("glm4 moe"), config("minimax m2"));
    for (base, name, value, want) in [
        (&mixtral, "router_jitter_noise", json!(0.1), "router_jitter_noise is 0.1"),
        (&mixtral, "output_router_logits", json!("yes"), "output_router_logits is \"yes\""),
        (&mixtral, "router_aux_loss_coef", json!(-0.1), "router_aux_loss_coef is -0.1"),
        (&mixtral, "num_experts_per_tok", json!(6), "num_experts_per_tok is 6, and there are 5 experts"),
        (&mixtral, "num_experts_per_tok", json!(0), "num_experts_per_tok is 0"),
        (&mixtral, "num_local_experts", json!(1u64 << 40), "num_local_experts is 1099511627776"),
        (&mixtral, "shared_expert_intermediate_size", json!(8), "shared_expert_intermediate_size (8)"),
        (&mixtral, "norm_topk_prob", json!(false), "norm_topk_prob is false"),
        (&mixtral, "hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        (&qwen, "num_experts", json!(8), "num_local_experts is 7 and num_experts is 8"),
        (&qwen, "mlp_only_layers", json!([2]), "mlp_only_layers is [2]"),
        (&qwen, "decoder_sparse_step", json!(0), "decoder_sparse_step is 0"),
        (&qwen, "moe_intermediate_size", json!(-1), "moe_intermediate_size is -1"),
        (&qwen, "router_jitter_noise", json!(0.1), "router_jitter_noise (0.1)"),
        (&qwen, "routed_scaling_factor", json!(2.5), "routed_scaling_factor (2.5)"),
        (&glm, "n_group", json!(3), "n_group is 3 and topk_group is 1"),
        (&glm, "topk_group", json!(2), "n_group is 1 and topk_group is 2"),
        (&glm, "num_local_experts", json!(8), "num_local_experts is 8 and n_routed_experts is 7"),
        (&glm, "routed_scaling_factor", json!(-2.5), "routed_scaling_factor is -2.5"),
        (&glm, "first_k_dense_replace", json!(0.5), "first_k_dense_replace is 0.5"),
        (&glm, "mlp_layer_types", json!(["dense"]), "mlp_layer_types is [\"dense\"]"),
        (&glm, "scoring_func", json!("softmax"), "scoring_func is \"softmax\""),
        (&glm, "shared_expert_intermediate_size", json!(8), "shared_expert_intermediate_size (8)"),
        (&config("olmoe"), "clip_qkv", json!(8.0), "clip_qkv is 8.0"),
        (&minimax, "attn_type_list", json!([1, 0]), "attn_type_list is [1,0]"),
        (&minimax, "shared_intermediate_size", json!(8), "shared_intermediate_size is 8"),
        (&minimax, "use_qk_norm", json!(false), "use_qk_norm is false"),
    ] {
        let mut fields = base.clone();
        fields[name] = value;
        let said = format!("{:#}", Config::parse(&fields.to_string()).expect_err(want));
        assert!(said.contains(want), "{said}, want {want:?}");
    }
    // Two ways to say the same.
    let alike = |base: &Value, change: &dyn Fn(&mut Value)| {
        let mut fields = base.clone();
        change(&mut fields);
        assert_eq!(Config::parse(&fields.to_string()).unwrap(), Config::parse(&base.to_string()).unwrap());
    };
    alike(&glm, &|fields| fields["mlp_layer_types"] = json!(["dense", "sparse"]));
    alike(&glm, &|fields| fields["rope_parameters"] = json!({"rope_theta": 10000.0, "rope_type": "default"}));
    alike(&minimax, &|fields| {
        fields["rope_parameters"] = json!({"rope_theta": 10000.0, "rope_type": "default"});
        fields["rotary_dim"] = json!(6);
    });
    // The only number of experts in files of transformers 4.
    let mut old = qwen.clone();
    old["num_experts"] = old.as_object_mut().unwrap().remove("num_local_experts").unwrap();
    let [old, new] = [&old, &qwen].map(|fields| Config::parse(&fields.to_string()).unwrap());
    assert_eq!(old, new);

    let spoiled = |spoil: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = write(folder.path(), &mixtral);
        spoil(&mut tensors);
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
        format!("{:#}", Files::open(folder.path()).unwrap_err())
    };
    let name = |expert: usize, layer: &str| {
        format!("model.layers.1.block_sparse_moe.experts.{expert}.{layer}.weight")
    };
    let cases = [
        (spoiled(&|tensors| drop(tensors.remove(&name(4, "w3")))), name(4, "w3"), "is not there"),
        (
            spoiled(&|tensors| drop(tensors.insert(name(5, "w1"), weight("x", &[44, 32])))),
            name(5, "w1"),
            "no place",
        ),
        (
            spoiled(&|tensors| drop(tensors.insert(name(2, "w2"), weight("x", &[32, 45])))),
            name(2, "w2"),
            "[32, 45]",
        ),
        (
            spoiled(&|tensors| {
                let half = tensors[&name(1, "w1")].to_dtype(DType::F16).unwrap();
                tensors.insert(name(1, "w1"), half);
            }),
            name(1, "w1"),
            "F16",
        ),
        (
            spoiled(&|tensors| drop(tensors.remove("model.layers.0.block_sparse_moe.gate.weight"))),
            "model.layers.0.mlp.router.weight".into(),
            "is not there",
        ),
    ];
    for (said, name, want) in cases {
        assert!(said.contains(&name) && said.contains(want), "{said}, want {name} and {want:?}");
    }
    let names: BTreeSet<String> =
        Config::parse(&mixtral.to_string()).unwrap().stored().into_iter().map(|x| x.0).collect();
    assert!(names.contains(&name(4, "w3")) && !names.iter().any(|name| name.contains("mlp")));
}

#[test]
fn layers_that_predict_further_tokens_are_left_out_and_biases_of_choices_keep_their_bits() {
    let (prompt, models) = mixtures();
    let model = models.into_iter().find(|model| model.case == "glm4 moe").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = write(folder.path(), &model.config);
    let path = folder.path().join("model.safetensors");
    tensors.insert("model.layers.2.eh_proj.weight".into(), weight("eh_proj", &[32, 64]));
    tensors.insert("model.layers.2.self_attn.q_proj.weight".into(), weight("q", &[48, 32]));
    // The other tensors do not say what the bias is computed in.
    tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(DType::BF16).unwrap());
    let bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    let large = [7.0001f32, 7.0002, 6.9999, 7.0004, 6.9998, 7.0003, 7.0];
    tensors.insert(bias.into(), Tensor::new(&large, &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let files = Files::open(folder.path()).unwrap();
    assert!(files.unmet.iter().any(|note| note.contains("predict further tokens")), "{:?}", files.unmet);
    assert_eq!(files.dtype().unwrap(), DType::BF16);
    let path: PathBuf = folder.path().into();
    on_ranks(2, "bits", move |ctx| -> anyhow::Result<()> {
        let files = Files::open(&path)?;
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let plan = Decoder::plan(&files.config, "tp");
        let vb = MeshVarBuilder::from_weights(files.weights(), 0, &mesh, plan, DType::BF16, &Device::Cpu)?;
        let decoder = Decoder::new(&files.config, prompt.len(), &vb.frozen())?;
        let held = vb.finish()?;
        let held = held.iter().find(|parameter| parameter.name.ends_with("router.bias")).unwrap();
        assert_eq!(held.var.to_vec1::<f32>()?, large);
        let tokens = Tensor::from_slice(&prompt, (1, prompt.len()), &Device::Cpu)?;
        decoder.next(&tokens, &mut Cache::of(&files.config, prompt.len()))?;
        Ok(())
    });
    // A layer further behind is no part of any model.
    tensors.insert("model.layers.3.eh_proj.weight".into(), weight("eh_proj", &[32, 64]));
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    let said = format!("{:#}", Files::open(folder.path()).unwrap_err());
    assert!(said.contains("model.layers.3.eh_proj.weight") && said.contains("no place"), "{said}");
}
