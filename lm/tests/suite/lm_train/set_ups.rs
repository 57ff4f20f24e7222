//! Random trainings of models of all families on random meshes against one rank, with adapters, records, preferences, parts of a batch,
//! recomputed layers and checkpoints as they fall.
//!
//! `CANDLE_LM_SET_UPS` is how many are run, and `CANDLE_LM_SET_UP` the first one.

use std::env;
use std::fs;

use candle_lm::files::Files;
use serde_json::{Map, json};
use test_utils::Dice;

use crate::lm_train::families::{cases, has_experts, is_recurrent, place_of};
use crate::lm_train::support::{Place, assert_close};

/// What is learned, the same on every mesh. Adapters may change experts if `has_targets`.
fn recipe(dice: &mut Dice, has_targets: bool) -> String {
    let adapter = match dice.below(8) {
        0 | 1 if has_targets => " --lora r=2,alpha=4,targets=o_proj+experts.gate_up_proj+experts.down_proj",
        0 | 1 => " --lora r=2,alpha=4",
        2 if dice.once_in(2) => " --lora r=3,alpha=4,dora,targets=embed_tokens+o_proj",
        2 => " --lora r=3,alpha=4,dora",
        3 => " --lora r=2,rslora,dropout=0.3",
        4 => " --lora r=2,alpha=4,layers=0",
        _ => "",
    };
    let plus = if !adapter.is_empty() && dice.once_in(2) { " --lora-plus 4" } else { "" };
    let learns_preferences = !adapter.is_empty() && dice.once_in(3);
    let data = match dice.below(4) {
        _ if learns_preferences => " --data @pairs.jsonl --dpo 0.2 --seq-len 24",
        0 => " --data @records.jsonl --seq-len 13",
        1 => " --data @records.jsonl --seq-len 11 --no-packing --too-long cut",
        _ => " --seq-len 9",
    };
    let clip = if dice.once_in(2) { " --clip-norm 0.01" } else { "" };
    let decay = dice.pick(&["", " --decay linear", " --decay wsd", " --weight-decay 0"]);
    let batch = dice.pick(&[2, 4, 6]);
    format!(
        "--seed {} --steps 3 --warmup 1 --lr 0.003 --batch {batch}{adapter}{plus}{data}{clip}{decay}",
        dice.below(99)
    )
}

/// A mesh of at most eight ranks that a recipe fits, and how its ranks work.
fn mesh(dice: &mut Dice, place: &Place, recipe: &str) -> String {
    let batch: usize =
        recipe.split("--batch ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap();
    let (apart, dora) = (recipe.contains("--local-steps"), recipe.contains("dora"));
    let config = Files::open(&place.path("model")).unwrap().config;
    let key_heads = config.num_key_value_heads.unwrap_or(config.num_attention_heads);
    loop {
        let tp = dice.pick(&[1, 1, 2, 3]);
        // Ranks that have a key head in common refuse magnitudes.
        if dora && tp > key_heads {
            continue;
        }
        let (pp, dp) = (dice.pick(&[1, 1, 2]), if apart { 2 } else { dice.pick(&[1, 1, 2]) });
        let cp = if is_recurrent(place) { 1 } else { dice.pick(&[1, 1, 2]) };
        let ep = if has_experts(place) { dice.pick(&[1, 2]) } else { 1 };
        let accumulate = dice.pick(&[1, 1, 2]);
        let rows = batch / (dp * ep * accumulate);
        if tp * pp * dp * cp * ep > 8 || rows * dp * ep * accumulate != batch {
            continue;
        }
        let mut flags = format!("--tp {tp}");
        if tp > 1 && dice.once_in(2) {
            let shares: Vec<String> = (0..tp).map(|_| dice.below(4).to_string()).collect();
            if shares.iter().all(|share| share == "0") {
                continue;
            }
            flags += &format!(" --shares {}", shares.join(":"));
        }
        for (flag, ranks) in
            [("--pp", pp), ("--dp", dp), ("--cp", cp), ("--ep", ep), ("--accumulate", accumulate)]
        {
            if ranks > 1 {
                flags += &format!(" {flag} {ranks}");
            }
        }
        if dp > 1 && !apart && dice.once_in(2) {
            flags += " --fsdp";
        }
        if pp > 1 {
            flags += dice.pick(&["", " --schedule gpipe", " --schedule zb-h1"]);
            if rows.is_multiple_of(2) && dice.once_in(2) {
                flags += " --microbatches 2";
            }
        }
        if dice.once_in(2) {
            flags += " --recompute";
        }
        return flags;
    }
}

/// Runs a random training on one rank and on two meshes, of which the second goes on with a checkpoint of the first.
fn run(seed: usize) {
    let mut dice = Dice::new(seed as u64);
    let case = dice.pick(&cases());
    let place = place_of(&case, &Map::new());
    let pair = |i: usize| json!({"prompt": format!("{i} 3 5"), "chosen": format!("{} 7 2", i + 1), "rejected": format!("{} 8", i + 2)});
    let pairs: String = (0..20).map(|i| format!("{}\n", pair(i))).collect();
    fs::write(place.path("pairs.jsonl"), pairs).unwrap();
    let record = |i: usize| match i % 3 {
        0 => json!({"prompt": format!("{i} 4"), "completion": format!("{} 9 {i}", i + 1)}),
        1 => json!({"text": format!("{i} 1 2 {i} 6 5 4")}),
        _ => json!({"prompt": "", "completion": format!("{i} {i}")}),
    };
    let records: String = (0..30).map(|i| format!("{}\n", record(i))).collect();
    fs::write(place.path("records.jsonl"), records).unwrap();
    // Mixtures whose experts have the usual names in transformers.
    let names = ["mixtral", "qwen", "glm4 moe", "olmoe", "deepseek v3 mixture", "gpt oss"];
    let apart = dice.once_in(6);
    let recipe = recipe(&mut dice, has_experts(&place) && names.iter().any(|name| case.starts_with(name)))
        + if apart { " --local-steps 2 --fragments 2" } else { "" };
    let [first, second] = [(); 2].map(|()| mesh(&mut dice, &place, &recipe));
    let what = format!("set-up {seed}: {case}, {recipe}");
    println!("{what} on {first}, then {second}");
    let want = place.losses(&format!("{recipe} --tp 1{}", if apart { " --dp 2" } else { "" }));
    let got = place.losses(&format!("{recipe} {first} --save @saved --save-every 2"));
    assert_close(&got, &want, 2e-4, &format!("{what} on {first}"));
    fs::remove_dir_all(place.path("saved").join("step-00000003")).unwrap();
    // What is said of records is not kept.
    let is_of_data =
        |flag: &&str| ["data", "no-packing", "too-long"].iter().any(|name| flag.starts_with(name));
    let data: String = recipe.split("--").filter(is_of_data).map(|flag| format!("--{flag} ")).collect();
    let last = place.losses(&format!("--resume @saved {data}{second}"));
    assert_close(&last, &want[2..], 2e-4, &format!("{what} on {first}, then {second}"));
}

#[test]
fn random_trainings_of_all_families_are_those_of_one_rank() {
    let number = |name: &str, default: usize| env::var(name).map_or(default, |text| text.parse().unwrap());
    let first = number("CANDLE_LM_SET_UP", 0);
    (first..first + number("CANDLE_LM_SET_UPS", 12)).for_each(run);
}
