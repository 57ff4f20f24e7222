//! Which checkpoints stay, and when a training ends early.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use candle_lm::files::Files;
use candle_lm::train::trainer::{TrainEnd, TrainOutput, train};
use test_utils::on_ranks;

use crate::lm_train::support::{Place, assert_close, config};

/// What a training did on rank 0; all ranks agree on it.
fn trained(place: &Place, flags: &str) -> TrainOutput {
    let job = place.open(flags).unwrap();
    let ranks = on_ranks(job.pipeline.world(), flags, move |ctx| train(ctx, &job, |_| Ok(())));
    let what = |rank: &TrainOutput| (rank.end, rank.best, rank.valid.clone(), rank.losses.clone());
    assert!(ranks.iter().all(|rank| what(rank) == what(&ranks[0])), "{flags}");
    ranks.into_iter().next().unwrap()
}

fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

/// A text that a model which learns of sheep gets worse at.
fn other_text(place: &Place) -> PathBuf {
    let path = place.path("other");
    fs::write(&path, "QXZ@#%&~^|QZXJKVW{}[]<>".repeat(4)).unwrap();
    path
}

#[test]
fn the_last_checkpoints_stay_and_so_does_what_is_not_ours_to_remove() {
    let place = Place::new(&config(4, 2));
    let saved = place.path("saved");
    // Names that are similar, and a folder of the right name that is no checkpoint.
    for other in ["step-1", "step-00000001.mine", "step-00000001.partial", "step-00000000", "best.partial"] {
        fs::create_dir_all(saved.join(other)).unwrap();
        fs::write(saved.join(other).join("note"), "mine").unwrap();
    }
    fs::create_dir(place.path("elsewhere")).unwrap();
    fs::write(place.path("elsewhere/training.json"), "{}").unwrap();
    #[cfg(unix)]
    {
        fs::remove_dir_all(saved.join("step-00000000")).unwrap();
        std::os::unix::fs::symlink(place.path("elsewhere"), saved.join("step-00000000")).unwrap();
    }
    let others = names(&saved);
    for mesh in ["--tp 1", "--pp 2 --tp 1 --dp 2"] {
        place.losses(&format!("{mesh} --save @saved --save-every 1 --keep 2"));
        let mine: BTreeSet<String> = names(&saved).difference(&others).cloned().collect();
        assert_eq!(mine, set(&["step-00000005", "step-00000006"]), "{mesh}");
        assert!(others.is_subset(&names(&saved)), "{mesh}");
        assert!(place.path("elsewhere/training.json").exists());
        for name in ["step-00000005", "step-00000006"] {
            fs::remove_dir_all(saved.join(name)).unwrap();
        }
    }
}

#[test]
fn the_checkpoint_that_a_training_goes_on_from_stays() {
    let place = Place::new(&config(4, 2));
    let want = place.losses("--tp 1 --save @saved --save-every 2");
    for name in ["step-00000004", "step-00000006"] {
        fs::remove_dir_all(place.path("saved").join(name)).unwrap();
    }
    let more = place.losses("--tp 2 --resume @saved --save @saved --save-every 1 --keep 1");
    assert_close(&more, &want[2..], 1e-5, "goes on");
    assert_eq!(names(&place.path("saved")), set(&["step-00000002", "step-00000006"]));
    // The next one goes on from another.
    place.losses("--tp 1 --resume @saved --save @saved --save-every 1 --keep 1 --steps 8");
    assert_eq!(names(&place.path("saved")), set(&["step-00000006", "step-00000008"]));
}

#[cfg(unix)]
#[test]
fn the_best_checkpoint_has_a_name_and_stays() {
    let place = Place::new(&config(4, 2));
    let other = other_text(&place);
    let flags = format!("--steps 10 --valid {} --valid-every 2 --save-every 5", other.display());
    for (at, mesh) in ["--tp 1", "--tp 2 --dp 2", "--pp 2 --tp 1"].into_iter().enumerate() {
        let saved = place.path(&format!("saved-{at}"));
        let made =
            trained(&place, &format!("{mesh} {flags} --keep-best --keep 1 --save {}", saved.display()));
        let (best, loss) = made.valid.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let found = made.best.unwrap();
        assert_eq!((found.steps, found.loss), (best, loss), "{mesh}: {:?}", made.valid);
        assert!(best < 10, "{mesh}: the loss was to rise: {:?}", made.valid);
        let named = format!("step-{best:08}");
        assert_eq!(fs::read_link(saved.join("best")).unwrap(), Path::new(&named), "{mesh}");
        assert_eq!(names(&saved), set(&["best", &named, "step-00000010"]), "{mesh}");
        assert_eq!(Files::open(&saved.join("best")).unwrap().config, config(4, 2), "{mesh}");
        // It is the model that had that loss.
        let again = trained(
            &place,
            &format!(
                "--tp 1 --model {}/best --steps 1 --lr 1e-30 --valid {}",
                saved.display(),
                other.display()
            ),
        );
        assert_close(&[again.valid[0].1], &[loss], 1e-5, mesh);
        // A training that goes on knows it, and leaves it.
        let more = trained(
            &place,
            &format!(
                "{mesh} --resume {0} --save {0} --steps 12 --valid {1} --valid-every 1 --keep-best --keep 1",
                saved.display(),
                other.display()
            ),
        );
        assert_eq!(more.best, made.best, "{mesh}: {:?}", more.valid);
        assert_eq!(fs::read_link(saved.join("best")).unwrap(), Path::new(&named), "{mesh}");
        assert!(saved.join("best/training.json").is_file(), "{mesh}");
    }
}

#[cfg(unix)]
#[test]
fn a_name_of_the_best_that_a_killed_training_left_is_made_right() {
    let place = Place::new(&config(4, 2));
    let valid = place.path("text").display().to_string();
    let flags = format!("--valid {valid} --save @saved --save-every 2 --keep-best");
    let made = trained(&place, &format!("--tp 1 {flags}"));
    assert_eq!(made.best.unwrap().steps, 6, "{:?}", made.valid);
    let link = place.path("saved/best");
    // It was killed between the last checkpoint and its name.
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("step-00000004", &link).unwrap();
    trained(&place, &format!("--tp 1 --resume @saved --steps 7 --lr 1e-30 {flags}"));
    assert_eq!(fs::read_link(&link).unwrap(), Path::new("step-00000006"));
    // A link to nothing goes, also where no best one is to be kept.
    fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("step-00000005", &link).unwrap();
    trained(&place, "--tp 1 --resume @saved --steps 8 --save @saved");
    assert!(fs::symlink_metadata(&link).is_err());
    // What is no link to a checkpoint here is somebody's.
    let refused = || {
        let said = format!("{:#}", place.open(&format!("--resume @saved --steps 9 {flags}")).unwrap_err());
        assert!(said.contains("something named best"), "{said}");
    };
    std::os::unix::fs::symlink("../model", &link).unwrap();
    refused();
    fs::remove_file(&link).unwrap();
    fs::write(&link, "mine").unwrap();
    refused();
    assert_eq!(fs::read_to_string(&link).unwrap(), "mine");
}

#[test]
fn a_training_whose_validation_gets_no_better_ends_early_and_so_does_one_that_was_resumed() {
    let place = Place::new(&config(4, 2));
    let other = other_text(&place);
    let valid = format!("--valid {} --valid-every 1", other.display());
    let whole = trained(&place, &format!("--tp 1 --steps 12 {valid}"));
    assert_eq!(whole.end, TrainEnd::Steps);
    let mut least = f64::INFINITY;
    let mut stale = 0;
    let last = whole.valid.iter().find(|(_, loss)| {
        stale = if *loss < least { 0 } else { stale + 1 };
        least = least.min(*loss);
        stale == 2
    });
    let last = last.expect("the loss was to rise").0;
    for (at, mesh) in ["--tp 1", "--tp 2", "--pp 2 --dp 2 --tp 1"].into_iter().enumerate() {
        let saved = format!("@saved-{at}");
        let made = trained(
            &place,
            &format!("{mesh} --steps 12 {valid} --patience 2 --save {saved} --save-every {}", last - 1),
        );
        assert_eq!((made.end, made.losses.len()), (TrainEnd::Patience, last), "{mesh}");
        assert_close(&made.losses, &whole.losses[..last], 1e-5, mesh);
        let folder = place.path(&saved[1..]);
        assert!(folder.join(format!("step-{last:08}/training.json")).is_file(), "{:?}", names(&folder));
        // The count of losses that were no lower is in the checkpoint.
        fs::remove_dir_all(folder.join(format!("step-{last:08}"))).unwrap();
        let more = trained(&place, &format!("--tp 1 --resume {saved} {valid} --patience 2"));
        assert_eq!((more.end, more.losses.len()), (TrainEnd::Patience, 1), "{mesh}");
    }
}
