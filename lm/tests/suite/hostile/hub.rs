//! Servers that are no Hub, or one that somebody else holds, and caches that somebody wrote into.

use std::fs;
use std::path::Path;
use std::thread;

use test_utils::Attacks;

use super::output;
use crate::lm::hub::server::{COMMITS, Manner, Server};
use crate::lm::hub::{files, program};

/// What `lm info` of a model says on stdout, or its only sentence on stderr. It has to end by itself.
fn info(server: &Server, home: &Path, model: &str) -> Result<Result<String, String>, String> {
    let mut command = program(&server.address, home, &[("HF_HUB_DOWNLOAD_TIMEOUT", "2")]);
    let output = output(command.args(["info", "--model", model]))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return Ok(Ok(String::from_utf8_lossy(&output.stdout).into_owned()));
    }
    if said.lines().count() != 1 || !output.stdout.is_empty() {
        return Err(format!("says {said}"));
    }
    Ok(Err(said))
}

const SMALL: &str = "someone/small";

/// A field of the config, and another one that is as long.
const LONGEST: [&str; 2] = ["\"max_position_embeddings\": 64", "\"max_position_embeddings\": 32"];

#[test]
fn what_is_not_the_file_is_refused_and_the_next_run_is_whole() {
    let mut attacks = Attacks::new("a server");
    let folder = tempfile::tempdir().unwrap();
    let served = files(folder.path(), 7);
    let manners = [
        Manner::Endless,
        Manner::Drips,
        Manner::Loops,
        Manner::Damaged(20),
        Manner::Cut(20),
        Manner::Sized(1 << 40),
        Manner::Sized(5),
        Manner::Unsized(20),
        Manner::Stops(20),
        Manner::Gone,
        Manner::Called("../../x"),
        Manner::Called("/etc/passwd"),
        Manner::Called(".."),
        Manner::Called(""),
        Manner::Called("0123456789abcdef0123456789abcdef01234567"),
        Manner::Called("0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"),
    ];
    let tried = |server: &Server, file: &str, manner: Manner, want: &str| -> Result<(), String> {
        let home = tempfile::tempdir().map_err(|error| error.to_string())?;
        server.manner(file, Some(manner));
        let said = info(server, home.path(), SMALL);
        server.manner(file, None);
        match said? {
            Ok(said) => return Err(format!("runs: {said}")),
            Err(said) if !said.contains(file) => return Err(format!("names no file: {said}")),
            Err(_) => {}
        }
        let got = info(server, home.path(), SMALL)??;
        if got == want { Ok(()) } else { Err(format!("then {got}")) }
    };
    // A server for each file: programs wait for most of their time.
    let on_file = |file: &'static str| {
        let server = Server::start(served.clone());
        let clean = tempfile::tempdir().unwrap();
        let want = info(&server, clean.path(), SMALL).unwrap().unwrap();
        // The name of weights is what their first answer says.
        let is_for = |manner: &Manner| file != "model.safetensors" || !matches!(manner, Manner::Called(_));
        let manners = manners.into_iter().filter(is_for);
        manners.map(|manner| (manner, tried(&server, file, manner, &want))).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let names = ["config.json", "tokenizer.json", "model.safetensors"];
        for (file, outcomes) in names.map(|file| (file, scope.spawn(move || on_file(file)))) {
            for (manner, outcome) in outcomes.join().unwrap() {
                attacks.attack(format!("{manner:?} for {file}"), || outcome);
            }
        }
    });
    attacks.assert();
}

#[test]
fn bytes_that_are_not_of_the_file_are_never_used() {
    let mut attacks = Attacks::new("a cache");
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(files(folder.path(), 7));
    let clean = tempfile::tempdir().unwrap();
    let want = info(&server, clean.path(), SMALL).unwrap().unwrap();
    let root = |home: &Path| home.join("hub/models--someone--small");
    let blob = |home: &Path, file: &str| {
        fs::canonicalize(root(home).join("snapshots").join(COMMITS[0]).join(file)).unwrap()
    };
    for file in ["config.json", "tokenizer.json"] {
        let name = blob(clean.path(), file).file_name().unwrap().to_owned();
        let whole = fs::read(blob(clean.path(), file)).unwrap();
        // Another model, of the same length.
        let other = String::from_utf8(whole.clone())
            .unwrap()
            .replacen(LONGEST[0], LONGEST[1], 1)
            .replacen("\"type\"", "\"epyt\"", 1);
        assert_ne!(other.as_bytes(), whole);
        let stale = other.as_bytes()[..other.len() - 2].to_vec();
        for (what, bytes) in [
            ("another file", other.as_bytes()),
            ("the start of another", &stale),
            ("a cut one", &whole[..9]),
            ("nothing", b""),
        ] {
            attacks.attack(format!("{what} as {file}, incomplete"), || -> Result<(), String> {
                let home = tempfile::tempdir().map_err(|error| error.to_string())?;
                fs::create_dir_all(root(home.path()).join("blobs")).map_err(|error| error.to_string())?;
                let mut part = name.clone();
                part.push(".incomplete");
                fs::write(root(home.path()).join("blobs").join(part), bytes)
                    .map_err(|error| error.to_string())?;
                for _ in 0..2 {
                    match info(&server, home.path(), SMALL)? {
                        Ok(got) if got == want => {}
                        Ok(got) => return Err(format!("runs as {got}")),
                        Err(said) if said.contains("damaged") && said.contains(file) => {}
                        Err(said) => return Err(said),
                    }
                }
                if info(&server, home.path(), SMALL)?? == want { Ok(()) } else { Err("another model".into()) }
            });
            attacks.attack(format!("{what} as {file}, complete"), || -> Result<(), String> {
                let home = tempfile::tempdir().map_err(|error| error.to_string())?;
                info(&server, home.path(), SMALL)??;
                fs::write(blob(home.path(), file), bytes).map_err(|error| error.to_string())?;
                let offline = program(&server.address, home.path(), &[("HF_HUB_OFFLINE", "1")])
                    .args(["info", "--model", SMALL])
                    .output();
                let offline = offline.map_err(|error| error.to_string())?;
                if offline.status.success() {
                    return Err("runs offline".into());
                }
                if info(&server, home.path(), SMALL)?? == want { Ok(()) } else { Err("another model".into()) }
            });
        }
    }
    attacks.attack("one name for all files, and for those of the next commit", || -> Result<(), String> {
        let (old, new) = (
            tempfile::tempdir().map_err(|error| error.to_string())?,
            tempfile::tempdir().map_err(|error| error.to_string())?,
        );
        let mut other = files(new.path(), 7);
        let config = other.get_mut("someone/small/config.json").ok_or("no config")?;
        *config = String::from_utf8_lossy(config).replacen(LONGEST[0], LONGEST[1], 1).into_bytes();
        let server = Server::with_commits(vec![files(old.path(), 7), other.clone()]);
        let alone = Server::start(other);
        let (first, second) = (info(&server, clean.path(), SMALL)??, info(&alone, new.path(), SMALL)??);
        for file in ["config.json", "tokenizer.json"] {
            server.manner(file, Some(Manner::Called("same")));
        }
        if first == second {
            return Err("the commits do not differ".into());
        }
        let home = tempfile::tempdir().map_err(|error| error.to_string())?;
        for (want, commit) in [(&first, COMMITS[0]), (&second, COMMITS[1]), (&first, COMMITS[0])] {
            let got = info(&server, home.path(), &format!("{SMALL}@{commit}"))??;
            if got != *want {
                return Err(format!("{commit} runs as {got}"));
            }
        }
        Ok(())
    });
    attacks.attack("an index cut short", || -> Result<(), String> {
        let home = tempfile::tempdir().map_err(|error| error.to_string())?;
        let want = info(&server, home.path(), "someone/sharded")??;
        let snapshot = home.path().join("hub/models--someone--sharded/snapshots").join(COMMITS[0]);
        let index = fs::canonicalize(snapshot.join("model.safetensors.index.json"))
            .map_err(|error| error.to_string())?;
        fs::write(&index, "{\"weight_map\": {").map_err(|error| error.to_string())?;
        if info(&server, home.path(), "someone/sharded")?? == want {
            Ok(())
        } else {
            Err("another model".into())
        }
    });
    attacks.attack("all bytes, incomplete", || -> Result<(), String> {
        let home = tempfile::tempdir().map_err(|error| error.to_string())?;
        fs::create_dir_all(root(home.path()).join("blobs")).map_err(|error| error.to_string())?;
        let whole = blob(clean.path(), "tokenizer.json");
        let mut part = whole.file_name().unwrap_or_default().to_owned();
        part.push(".incomplete");
        fs::copy(&whole, root(home.path()).join("blobs").join(part)).map_err(|error| error.to_string())?;
        if info(&server, home.path(), SMALL)?? == want { Ok(()) } else { Err("another model".into()) }
    });
    for (what, place) in itertools::iproduct!(["a pipe", "a folder", "a link"], ["incomplete", "lock"]) {
        attacks.attack(format!("{what} as the file with .{place}"), || -> Result<(), String> {
            let home = tempfile::tempdir().map_err(|error| error.to_string())?;
            let folder = match place {
                "lock" => home.path().join("hub/.locks/models--someone--small"),
                _ => root(home.path()).join("blobs"),
            };
            fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
            let mut part = blob(clean.path(), "config.json").file_name().unwrap_or_default().to_owned();
            part.push(format!(".{place}"));
            let (part, aim) = (folder.join(part), home.path().join("aim"));
            fs::write(&aim, "mine").map_err(|error| error.to_string())?;
            match what {
                "a pipe" => std::process::Command::new("mkfifo").arg(&part).status().map(drop),
                "a folder" => fs::create_dir(&part),
                _ => std::os::unix::fs::symlink(&aim, &part),
            }
            .map_err(|error| error.to_string())?;
            let said = info(&server, home.path(), SMALL)?;
            let kept = fs::read(&aim).map_err(|error| error.to_string())?;
            if said.is_err() && kept == b"mine" { Ok(()) } else { Err(format!("{said:?}")) }
        });
    }
    attacks.assert();
}

#[test]
fn a_gguf_file_that_cannot_be_run_is_refused_by_its_first_bytes() {
    let mut attacks = Attacks::new("GGUF files of strangers");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let model =
        crate::lm::families::families().models.into_iter().find(|model| model.case == "qwen3").unwrap();
    crate::lm::gguf::write(&path, &model.config, candle_core::quantized::GgmlDType::F32);
    // Longer than its header by far.
    let mut whole = fs::read(&path).unwrap();
    whole.resize(20 << 20, 0);
    let spoiled = |from: &str, to: &str| -> Vec<u8> {
        let at = whole.windows(from.len()).position(|part| part == from.as_bytes()).unwrap();
        [&whole[..at], to.as_bytes(), &whole[at + to.len()..]].concat()
    };
    // Longer than what is looked at first, by a multiple of the alignment.
    let text = vec![b'x'; (17 << 20) + 25];
    let name = "general.description";
    let mut long = whole[..24].to_vec();
    long[16] += 1;
    long.extend((name.len() as u64).to_le_bytes().iter().chain(name.as_bytes()).chain(&8u32.to_le_bytes()));
    long.extend((text.len() as u64).to_le_bytes().iter().chain(&text).chain(&whole[24..]));
    for (what, bytes, runs) in [
        ("a good file", whole.clone(), true),
        ("a long header", long, true),
        ("another architecture", spoiled("qwen3", "qwenX"), false),
        ("another tensor", spoiled("output_norm.weight", "output_mron.weight"), false),
        ("no GGUF", vec![7; 20 << 20], false),
    ] {
        attacks.attack(what, || -> Result<(), String> {
            let server = Server::start([("someone/quantized/x.gguf".to_owned(), bytes)].into());
            let home = tempfile::tempdir().map_err(|error| error.to_string())?;
            let said = info(&server, home.path(), "someone/quantized/x.gguf")?;
            let sent = server.sent();
            if said.is_ok() == runs && sent.is_empty() != runs {
                Ok(())
            } else {
                Err(format!("{said:?} {sent:?}"))
            }
        });
    }
    attacks.assert();
}

/// Models that cannot be run, and what is downloaded of them.
#[test]
fn a_model_that_cannot_be_run_is_refused_before_its_weights() {
    let mut attacks = Attacks::new("models of strangers");
    let folder = tempfile::tempdir().unwrap();
    let whole = files(folder.path(), 7);
    let config =
        || -> serde_json::Value { serde_json::from_slice(&whole["someone/small/config.json"]).unwrap() };
    let weights = &whole["someone/small/model.safetensors"];
    let length = 8 + u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
    let with = |field: &str, value: serde_json::Value| {
        let mut config = config();
        config[field] = value;
        ("config.json", config.to_string().into_bytes())
    };
    let renamed =
        String::from_utf8_lossy(&weights[8..length]).replacen("model.norm.weight", "model.mron.weight", 1);
    let renamed = [&weights[..8], renamed.as_bytes(), &weights[length..]].concat();
    let long = [&u64::MAX.to_le_bytes()[..], &weights[8..]].concat();
    for (what, (file, bytes), last) in [
        ("another kind of model", with("model_type", "mamba".into()), "config.json"),
        ("no JSON", ("config.json", b"{".to_vec()), "config.json"),
        ("a field that is not known", with("surprise", 1.into()), "config.json"),
        ("another size", with("intermediate_size", 45.into()), "tokenizer.json"),
        ("more layers", with("num_hidden_layers", 3.into()), "tokenizer.json"),
        ("another tensor", ("model.safetensors", renamed), "tokenizer.json"),
        ("a header without an end", ("model.safetensors", long), "tokenizer.json"),
        ("no header", ("model.safetensors", vec![1; 4000]), "tokenizer.json"),
        ("a few bytes", ("model.safetensors", vec![1; 4]), "tokenizer.json"),
    ] {
        attacks.attack(what, || -> Result<(), String> {
            let mut other = whole.clone();
            other.insert(format!("someone/small/{file}"), bytes);
            let (server, home) =
                (Server::start(other), tempfile::tempdir().map_err(|error| error.to_string())?);
            let said = info(&server, home.path(), SMALL)?;
            let sent = server.sent();
            match said {
                Ok(said) => Err(format!("runs: {said}")),
                Err(_) if sent.last().is_none_or(|sent| sent != last) => {
                    Err(format!("{sent:?} are downloaded"))
                }
                Err(said) if said.contains("/tmp") && !said.contains("hub/models") => Err(said),
                Err(_) => Ok(()),
            }
        });
    }
    attacks.assert();
}
