//! Downloads beside other programs, from servers that change or do not answer, and on hosts of their own.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use candle_dist::World;
use candle_lm::hub::Hub;
use candle_lm::{Generation, Lm};
use clap::Parser;
use examples::launch::{Patience, Ranks};
use lm::args::Args;
use lm::located::located;

use super::server::{COMMITS, Manner, Server};
use super::{files, lm, program, tokens};

/// A server with two commits, whose models have other weights, and the folders of the models.
fn commits() -> (Server, [tempfile::TempDir; 2]) {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let files = [7, 8].into_iter().zip(&folders).map(|(seed, folder)| files(folder.path(), seed)).collect();
    (Server::with_commits(files), folders)
}

fn text(server: &Server, home: &Path, model: &Path) -> serde_json::Value {
    tokens(&lm(&server.address, home, model.to_str().unwrap(), &[]))
}

#[test]
fn all_files_are_of_the_commit_that_the_first_answer_named() {
    let (server, [old, new]) = commits();
    let home = tempfile::tempdir().unwrap();
    let [of_old, of_new] = [&old, &new].map(|folder| text(&server, home.path(), folder.path()));
    assert_ne!(of_old, of_new);
    let run = |home: &Path, model: &str| tokens(&lm(&server.address, home, model, &[]));
    server.moves();
    assert_eq!(run(home.path(), "someone/small"), of_old);
    server.sent();
    assert_eq!(run(home.path(), "someone/small"), of_old, "what the cache has stays");
    assert_eq!(server.sent(), Vec::<String>::new());
    // A commit by its name.
    assert_eq!(run(home.path(), &format!("someone/small@{}", COMMITS[1])), of_new);
    assert_eq!(run(tempfile::tempdir().unwrap().path(), &format!("someone/small@{}", COMMITS[0])), of_old);
}

#[test]
fn a_part_of_an_older_commit_in_the_cache_is_not_mixed_with_a_newer_one() {
    let (server, [old, new]) = commits();
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("hub/models--someone--small");
    fs::create_dir_all(root.join("refs")).unwrap();
    fs::write(root.join("refs/main"), COMMITS[0]).unwrap();
    let snapshot = root.join("snapshots").join(COMMITS[0]);
    fs::create_dir_all(&snapshot).unwrap();
    fs::copy(old.path().join("config.json"), snapshot.join("config.json")).unwrap();
    server.moved();
    let got = tokens(&lm(&server.address, home.path(), "someone/small", &[]));
    assert_eq!(got, text(&server, home.path(), new.path()));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMITS[1]);
}

#[test]
fn programs_that_download_at_once_wait_for_the_first() {
    let (server, [folder, _]) = commits();
    let home = tempfile::tempdir().unwrap();
    // Longer than the locks of other programs wait.
    server.manner("model.safetensors", Some(Manner::Late(Duration::from_secs(6))));
    let start = || {
        let mut command = program(&server.address, home.path(), &[]);
        command.args(["info", "--model", "someone/small"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut waited = 0;
    for child in [start(), start()] {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        waited += usize::from(said.contains("another program downloads model.safetensors"));
    }
    assert_eq!(waited, 1, "one of them downloads");
    server.manner("model.safetensors", None);
    assert_eq!(
        tokens(&lm(&server.address, home.path(), "someone/small", &[])),
        text(&server, home.path(), folder.path())
    );
}

/// The error of a run that ends by itself within seconds.
fn refused(server: &Server, home: &Path, more: &[(&str, &str)]) -> String {
    let began = Instant::now();
    let mut child = program(&server.address, home, more)
        .args(["info", "--model", "someone/small"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(30) {
            child.kill().unwrap();
            panic!("the program hangs");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
    assert!(said.lines().filter(|line| !line.starts_with("note: ")).count() == 1, "{said}");
    said
}

const SHORT: [(&str, &str); 1] = [("HF_HUB_DOWNLOAD_TIMEOUT", "1")];

#[test]
fn a_server_that_does_not_answer_is_an_error_and_the_next_run_goes_on() {
    let (server, [folder, _]) = commits();
    let home = tempfile::tempdir().unwrap();
    for (file, manner) in [
        ("config.json", Manner::Silent),
        ("tokenizer.json", Manner::Stops(9)),
        ("model.safetensors", Manner::Silent),
    ] {
        server.manner(file, Some(manner));
        let said = refused(&server, home.path(), &SHORT);
        let wanted = [file, "nothing came for 1 s", "HF_HUB_DOWNLOAD_TIMEOUT"];
        assert!(wanted.iter().all(|want| said.contains(want)), "{said}");
        server.manner(file, None);
    }
    server.manner("model.safetensors", Some(Manner::Stops(1000)));
    let said = refused(&server, home.path(), &SHORT);
    assert!(said.contains("has 1000 of") && said.contains("try again"), "{said}");
    server.manner("model.safetensors", None);
    server.sent();
    let got = tokens(&lm(&server.address, home.path(), "someone/small", &[]));
    assert_eq!(got, text(&server, home.path(), folder.path()));
    assert!(server.sent().contains(&"model.safetensors from 1000".to_owned()));
    for wrong in ["0", "x", "-1", "1e9"] {
        let said = refused(&server, home.path(), &[("HF_HUB_DOWNLOAD_TIMEOUT", wrong)]);
        assert!(said.contains("HF_HUB_DOWNLOAD_TIMEOUT is"), "{said}");
    }
}

#[test]
fn a_damaged_file_is_one_error_on_all_ranks_and_is_not_kept() {
    let (server, [folder, _]) = commits();
    let home = tempfile::tempdir().unwrap();
    server.manner("model.safetensors", Some(Manner::Damaged(5000)));
    let output = lm(&server.address, home.path(), "someone/small", &[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    let bytes = fs::read(folder.path().join("model.safetensors")).unwrap();
    let digest = ring::digest::digest(&ring::digest::SHA256, &bytes);
    let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let wanted = ["model.safetensors came damaged: its SHA-256 is", &format!("says {digest}; try again")];
    assert!(wanted.iter().all(|want| said.contains(want)), "{said}");
    let blobs = || fs::read_dir(home.path().join("hub/models--someone--small/blobs")).unwrap();
    assert!(blobs().all(|blob| blob.unwrap().metadata().unwrap().len() < bytes.len() as u64));
    // The rest of a file whose first bytes were damaged on the disk.
    server.manner("model.safetensors", Some(Manner::Stops(1000)));
    refused(&server, home.path(), &SHORT);
    server.manner("model.safetensors", None);
    let part = blobs().map(|blob| blob.unwrap().path()).find(|path| path.extension().is_some()).unwrap();
    let mut first = fs::read(&part).unwrap();
    first[17] ^= 1;
    fs::write(&part, first).unwrap();
    let said = refused(&server, home.path(), &[]);
    assert!(said.contains("came damaged"), "{said}");
    let got = tokens(&lm(&server.address, home.path(), "someone/small", &[]));
    assert_eq!(got, text(&server, home.path(), folder.path()));
}

#[test]
fn a_file_that_is_missing_for_a_moment_is_there_in_the_next_run() {
    let (server, [folder, _]) = commits();
    let want = text(&server, tempfile::tempdir().unwrap().path(), folder.path());
    for (model, file, wanted) in [
        ("someone/small", "config.json", "there is no config.json"),
        ("someone/small", "tokenizer.json", "there is no tokenizer.json"),
        ("someone/small", "model.safetensors", "model.safetensors lies has no such file (status 404)"),
        ("someone/sharded", "model.safetensors.index.json", "there is no model.safetensors"),
        ("someone/sharded", "model-00002-of-00002.safetensors", "lies has no such file (status 404)"),
    ] {
        let home = tempfile::tempdir().unwrap();
        server.manner(file, Some(Manner::Gone));
        let said = String::from_utf8(lm(&server.address, home.path(), model, &[]).stderr).unwrap();
        assert!(said.contains(wanted), "{file}: {said}");
        server.manner(file, None);
        assert_eq!(tokens(&lm(&server.address, home.path(), model, &[])), want, "{file}");
    }
}

#[test]
fn what_the_hub_calls_absent_is_asked_for_once_and_a_needed_file_always() {
    let (server, [folder, _]) = commits();
    let home = tempfile::tempdir().unwrap();
    let want = text(&server, home.path(), folder.path());
    assert_eq!(tokens(&lm(&server.address, home.path(), "someone/small", &[])), want);
    let root = home.path().join("hub/models--someone--small");
    let absent = root.join(".no_exist").join(COMMITS[0]);
    assert!(
        absent.join("model.safetensors.index.json").exists() && absent.join("chat_template.jinja").exists()
    );
    // Another program noted what is there.
    fs::write(absent.join("tokenizer.json"), "").unwrap();
    fs::remove_file(root.join("snapshots").join(COMMITS[0]).join("tokenizer.json")).unwrap();
    assert_eq!(tokens(&lm(&server.address, home.path(), "someone/small", &[])), want);
}

#[test]
fn an_answer_that_does_not_say_where_it_ends_is_no_file() {
    let (server, [folder, _]) = commits();
    let home = tempfile::tempdir().unwrap();
    for (file, wanted) in
        [("tokenizer.json", "does not say how many bytes"), ("model.safetensors", "has 100 of")]
    {
        server.manner(file, Some(Manner::Unsized(100)));
        let said = refused(&server, home.path(), &[]);
        assert!(said.contains(wanted), "{file}: {said}");
        server.manner(file, None);
    }
    let got = tokens(&lm(&server.address, home.path(), "someone/small", &[]));
    assert_eq!(got, text(&server, home.path(), folder.path()));
}

#[test]
fn a_program_that_holds_a_lock_and_does_nothing_is_named() {
    let (server, _folders) = commits();
    let home = tempfile::tempdir().unwrap();
    // The first file is there, the second one is not.
    server.manner("tokenizer.json", Some(Manner::Stops(9)));
    refused(&server, home.path(), &SHORT);
    server.manner("tokenizer.json", None);
    let part = fs::read_dir(home.path().join("hub/models--someone--small/blobs")).unwrap();
    let part = part.map(|entry| entry.unwrap().path()).find(|path| path.extension().is_some()).unwrap();
    let name = part.file_stem().unwrap().to_str().unwrap().to_owned();
    let lock = home.path().join("hub/.locks/models--someone--small").join(format!("{name}.lock"));
    let held = File::create(&lock).unwrap();
    held.lock().unwrap();
    let said = refused(&server, home.path(), &SHORT);
    assert!(said.contains("another program holds") && said.contains(lock.to_str().unwrap()), "{said}");
    drop(held);
    assert!(lm(&server.address, home.path(), "someone/small", &[]).status.success());
}

#[test]
fn what_a_server_says_never_leads_out_of_the_cache() {
    let (server, _folders) = commits();
    for commit in ["../../../x", "/x", "..", "a b"] {
        let home = tempfile::tempdir().unwrap();
        server.call(commit);
        let said = refused(&server, home.path(), &[]);
        assert!(said.contains("X-Repo-Commit") && said.contains("cannot name a file"), "{said}");
        assert!(!home.path().join("hub").exists());
    }
}

#[test]
fn hosts_download_the_commit_of_rank_0_for_longer_than_a_call_may_take() {
    let (server, [old, _]) = commits();
    server.manner("model.safetensors", Some(Manner::Late(Duration::from_secs(3))));
    server.moves();
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let args = Args::try_parse_from(["lm", "generate", "--model", "someone/small"]).unwrap();
    let world = World::threads(2).timeout(Duration::from_secs(1));
    let paths = world.run(|ctx| {
        let (cache, ranks) = (homes[ctx.rank()].path(), Ranks::Process(ctx, Patience::seconds(1)));
        let hub = || Ok(Hub::new(cache.into(), &server.address, None, Duration::from_secs(10)));
        located(&args, &ranks, hub).map(|args| args.model)
    });
    for (rank, path) in paths.unwrap().into_iter().map(Option::unwrap).enumerate() {
        // Both see one machine, where the files of rank 0 are enough for the others; each has its own all the same.
        assert!(path.starts_with(homes[rank].path()) && path.ends_with(COMMITS[0]), "{}", path.display());
        let read = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert_eq!(read(&path), read(old.path()));
    }
}

#[test]
fn a_model_that_is_opened_by_its_name_is_of_one_commit_on_all_hosts() {
    let (server, [old, _]) = commits();
    server.moves();
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let made = World::threads(2).run(|ctx| -> candle_lm::Result<_> {
        let hub = Hub::new(homes[ctx.rank()].path().into(), &server.address, None, Duration::from_secs(10));
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let text = |lm: Lm| lm.generate("Hi", &Generation::default())?.collect::<candle_lm::Result<String>>();
        let by_name = text(Lm::options().hub(hub.clone()).open("someone/small", &mesh)?)?;
        let missing = Lm::options().hub(hub).open("someone/missing", &mesh).unwrap_err().to_string();
        Ok((by_name, text(Lm::open(old.path(), &mesh)?)?, missing))
    });
    let made = made.unwrap();
    assert_eq!(made[0], made[1]);
    let (by_name, _, missing) = &made[0];
    assert!(
        !by_name.is_empty() && missing.contains("someone/missing@main: there is no config.json"),
        "{missing}"
    );
    // Which commit rank 0 has seen first depends on who was faster.
    let reference = |home: &Path| fs::read_to_string(home.join("models--someone--small/refs/main")).unwrap();
    let snapshots =
        |home: &Path, commit: &str| home.join("models--someone--small/snapshots").join(commit).exists();
    let commit = reference(homes[0].path());
    assert!(homes.iter().all(|home| snapshots(home.path(), &commit)), "{commit}");
}

#[test]
fn only_rank_0_needs_the_files_that_it_reads() {
    let folder = tempfile::tempdir().unwrap();
    let (here, nowhere) = (folder.path().join("text"), folder.path().join("nothing"));
    fs::write(&here, "Once").unwrap();
    for (command, flag) in [("generate", "--prompts"), ("score", "--text")] {
        for [first, second] in [[&here, &nowhere], [&nowhere, &here]] {
            let said = World::threads(2).run(|ctx| {
                let path = [first, second][ctx.rank()].to_str().unwrap();
                let args = Args::try_parse_from(["lm", command, flag, path]).unwrap();
                args.validate().unwrap();
                let checked = args.check_inputs(&Ranks::Process(ctx, Patience::default()));
                Ok::<_, String>(checked.err().map(|error| error.to_string()))
            });
            for said in said.unwrap() {
                let is_right = said
                    .as_ref()
                    .is_some_and(|said| said.contains(flag) && said.contains("nothing is no file"));
                assert_eq!(is_right, first == &nowhere, "{said:?}");
            }
        }
    }
}
