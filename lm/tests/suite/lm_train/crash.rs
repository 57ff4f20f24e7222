//! A save that does not come to its end leaves the checkpoint before it.

use std::fs;

use candle_core::Tensor;
use candle_lm::train::trainer::Trainer;
use test_utils::on_ranks;

use crate::lm_train::support::{Place, assert_close, config};

#[test]
fn a_save_that_fails_is_an_error_on_all_ranks_and_harms_nothing() {
    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1 --save @saved --save-every 3");
    fs::remove_dir_all(place.path("saved/step-00000006")).unwrap();
    for mesh in ["--tp 2", "--pp 2 --tp 1 --dp 2"] {
        let job = place.open(&format!("{mesh} --resume @saved --save @saved")).unwrap();
        // A file where the folder of the next save is to be, which comes when the training has begun.
        let taken = place.path("saved/step-00000006");
        let said = on_ranks(job.pipeline.world(), mesh, move |ctx| -> anyhow::Result<String> {
            let mut trainer = Trainer::new(ctx, &job)?;
            if ctx.rank() == 0 {
                fs::write(&taken, "in the way")?;
            }
            Ok(format!("{:#}", trainer.save(6).unwrap_err()))
        });
        assert!(said.iter().all(|one| one == &said[0] && one.contains("rank 0 on ")), "{said:?}");
        assert!(said[0].contains("step-00000006"), "{said:?}");
        assert_eq!(fs::read_to_string(place.path("saved/step-00000006")).unwrap(), "in the way");
        assert_eq!(fs::read_dir(place.path("saved")).unwrap().count(), 2, "nothing half written is left");
        fs::remove_file(place.path("saved/step-00000006")).unwrap();
        assert_close(&place.losses(&format!("{mesh} --resume @saved")), &want[3..], 1e-5, mesh);
    }
}

/// Kills the program while it writes: the system ends a process whose files grow beyond a limit.
#[cfg(unix)]
#[test]
fn a_program_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before() {
    use std::process::Command;

    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1 --save @saved --save-every 3");
    fs::remove_dir_all(place.path("saved/step-00000006")).unwrap();
    let bytes = fs::metadata(place.path("saved/step-00000003/model.safetensors")).unwrap().len();
    let (program, text, saved) = (env!("CARGO_BIN_EXE_lm"), place.path("text"), place.path("saved"));
    // In blocks of 512 bytes, so that no file gets beyond the half of the model.
    let line = format!("ulimit -f {}; exec \"$0\" \"$@\"", bytes / 1024);
    let killed = Command::new("sh")
        .args(["-c", &line, program, "--tp", "2", "--train"])
        .arg(&text)
        .arg("--resume")
        .arg(&saved)
        .arg("--save")
        .arg(&saved)
        .output()
        .unwrap();
    assert!(!killed.status.success(), "it was to be killed");
    let names = || fs::read_dir(&saved).unwrap().map(|entry| entry.unwrap().path());
    let half = names().find(|path| path.extension().is_some_and(|extension| extension == "partial"));
    assert!(half.is_some(), "it was killed before it saved: {}", String::from_utf8_lossy(&killed.stderr));
    assert!(!saved.join("step-00000006").exists());
    assert_close(
        &place.losses("--pp 2 --tp 1 --resume @saved --save @saved"),
        &want[3..],
        1e-5,
        "after the crash",
    );
    assert!(!half.unwrap().exists(), "what a killed save has left goes with the next");
    let whole = candle_core::safetensors::load(
        saved.join("step-00000006/model-00001-of-00002.safetensors"),
        &candle_core::Device::Cpu,
    );
    assert!(whole.unwrap().values().all(|tensor: &Tensor| tensor.elem_count() > 0));
}
