//! Trainings whose disk gets full: the step before stays, and the next training goes on from it.

use std::fs;
use std::process::{Command, Output};

use test_utils::{Attacks, skip};

use crate::lm_train::support::{Place, config, copy};

/// Trains on a disk of its own, of which some bytes are left, and goes on when there is room again.
const SCRIPT: &str = r#"
    disk="$1" saved="$2" left="$3" program="$4" text="$5"
    mount -t tmpfs -o size=4m none "$disk" && cp -r "$saved" "$disk/saved" || exit 3
    head -c 8M /dev/zero >"$disk/filler" 2>/dev/null
    truncate -s "$(($(stat -c %s "$disk/filler") - left))" "$disk/filler"
    "$program" --train "$text" --tp 2 --resume "$disk/saved" --save "$disk/saved"
    echo "status $?"
    ls "$disk/saved"
    rm "$disk/filler"
    "$program" --train "$text" --tp 2 --resume "$disk/saved" --save "$disk/saved" && echo "goes on"
    ls "$disk/saved"
"#;

#[test]
#[cfg(target_os = "linux")]
fn a_training_whose_disk_is_full_goes_on_when_there_is_room() {
    let place = Place::new(&config(4, 2));
    place.losses("--tp 1 --save @saved --save-every 3");
    fs::create_dir(place.path("disk")).unwrap();
    copy(&place.path("saved/step-00000003"), &place.path("first/step-00000003"));
    let bytes: u64 = ["model.safetensors", "optimizer/optimizer.safetensors", "tokenizer.json"]
        .iter()
        .map(|name| fs::metadata(place.path("first/step-00000003").join(name)).unwrap().len())
        .sum();
    let run = |left: u64| -> Output {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", SCRIPT, "sh"]).arg(place.path("disk")).arg(place.path("first"));
        command.arg(left.to_string()).arg(env!("CARGO_BIN_EXE_lm")).arg(place.path("text"));
        command.output().unwrap()
    };
    let mut a = Attacks::new("trainings on full disks");
    for part in 0..8 {
        let left = bytes * part / 8;
        let Output { stdout, stderr, status } = run(left);
        if status.code() != Some(0) && !String::from_utf8_lossy(&stdout).contains("status") {
            return skip("no disk of its own can be mounted here");
        }
        a.attack(format!("{left} of {bytes} bytes left"), || {
            let (out, said) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
            let full = said.contains("No space left on device") && said.contains("saved");
            let (first, then) = out.split_once("goes on").unwrap_or((&out, ""));
            let first = first.split_once("status ").map(|(_, rest)| rest).unwrap_or_default();
            // The status, and then what is in the folder.
            let is_clean = first.lines().next() == Some("1") && first.lines().nth(1) == Some("step-00000003");
            let goes_on = then.contains("step-00000003") && then.contains("step-00000006");
            let leaves = then
                .lines()
                .chain(first.lines())
                .any(|name| name.contains("partial") || name.contains("lock"));
            if full && is_clean && goes_on && !leaves { Ok(()) } else { Err(format!("{out}\n{said}")) }
        });
    }
    a.assert();
}
