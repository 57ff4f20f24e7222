//! The tokens of each vocabulary that llama.cpp ships, against its own. The folder comes from `scripts/llama-vocabularies.sh`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use candle_lm::tokens;
use test_utils::skip;

/// The variable with the folder of the vocabularies.
const FOLDER: &str = "CANDLE_LLAMA_VOCABULARIES";

/// The vocabulary of an encoder, which the program does not run.
const ENCODER: &str = "ggml-vocab-bert-bge.gguf";

/// The line between two texts.
const BETWEEN: &str = "\n__ggml_vocab_test__\n";

#[test]
fn tokens_are_those_of_llama_cpp() {
    let Some(folder) = std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()).map(PathBuf::from) else {
        return skip(&format!("{FOLDER} names no folder of vocabularies"));
    };
    let (mut wrong, mut count) = (BTreeMap::new(), 0);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "gguf"));
    files.sort();
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let beside = |end: &str| fs::read_to_string(path.with_file_name(format!("{name}.{end}")));
        let (Ok(texts), Ok(want)) = (beside("inp"), beside("out")) else { continue };
        let tokenizer = match tokens::read(&path) {
            Ok(tokenizer) => tokenizer,
            Err(error) if name == ENCODER => {
                assert!(error.root_cause().to_string().contains("tokenizer.ggml.model"), "{error:#}");
                continue;
            }
            Err(error) => {
                wrong.insert(name, format!("{error:#}"));
                continue;
            }
        };
        // Most files have the line behind the last text too.
        let texts: Vec<&str> = texts.strip_suffix(BETWEEN).unwrap_or(&texts).split(BETWEEN).collect();
        let want: Vec<Vec<u32>> = want
            .lines()
            .map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect())
            .collect();
        assert_eq!(texts.len(), want.len(), "{name}");
        for (text, want) in texts.iter().zip(&want) {
            let got = tokenizer.encode(*text, false).unwrap().get_ids().to_vec();
            if got != *want {
                let what = wrong.entry(name.clone()).or_insert_with(String::new);
                *what += &format!("{text:?}: {got:?}, want {want:?}\n");
            }
        }
        println!("{name}: {} texts", want.len());
        count += 1;
    }
    assert_eq!(count, 14, "vocabularies with texts");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
