//! Imports point down: the modules of a folder are *rooms* on floors, and a room imports only rooms of lower floors.
//!
//! Each crate has a table in `tables.rs`. The items of a folder's own file (`mod.rs`) are the room `mod`. Its
//! re-exports by `pub use` do not count in its own folder, and comments and items for tests do not count at all.
mod graph;
mod picture;
mod source;
mod tables;

use graph::Imports;
use itertools::Itertools;
use source::{Place, Source};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tables::{FLOORS, Floors, Folder};

/// The source of a crate of this workspace.
fn source_of(name: &str) -> Source {
    Source::of_crate(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"))
}

/// Returns the errors in the floors of one folder, where the imports in `known` may point up.
fn faults(source: &Source, folder: &[String], floors: &Floors, known: &[(&str, &str)]) -> Vec<String> {
    let imports = Imports::of(source, folder);
    let place = |folder: &[String]| ["crate"].into_iter().chain(folder.iter().map(String::as_str)).join("::");
    let listed = || {
        floors.iter().enumerate().flat_map(|(floor, rooms)| rooms.split(' ').map(move |room| (room, floor)))
    };
    let floor: BTreeMap<&str, usize> = listed().collect();
    let twice = listed().map(|(room, _)| room).duplicates().map(|room| format!("{room} is on two floors"));
    let gone = floor
        .keys()
        .filter(|room| !imports.rooms.contains(**room))
        .map(|room| format!("there is no room {room}"));
    let unlisted = imports.rooms.iter().filter(|room| !floor.contains_key(room.as_str()));
    let unlisted = unlisted.map(|room| format!("{room} is on no floor"));
    let up: BTreeMap<(&str, &str), String> = imports
        .arrows
        .iter()
        .filter_map(|((from, to), module)| {
            let (high, low) = (floor.get(from.as_str())?, floor.get(to.as_str())?);
            let says = format!("{from} (floor {high}) imports {to} (floor {low}) in {}", place(module));
            (low >= high).then_some(((from.as_str(), to.as_str()), says))
        })
        .collect();
    let new = up.iter().filter(|(arrow, _)| !known.contains(arrow)).map(|(_, says)| says.clone());
    let old = known.iter().filter(|arrow| !up.contains_key(*arrow));
    let old = old.map(|(from, to)| format!("{from} imports {to} no more from below; take it off the list"));
    twice
        .chain(gone)
        .chain(unlisted)
        .chain(new)
        .chain(old)
        .map(|fault| format!("{}: {fault}", place(folder)))
        .collect()
}

/// The names on a path of folders.
fn place(folder: &str) -> Place {
    folder.split('/').filter(|name| !name.is_empty()).map(String::from).collect()
}

/// Run with `--nocapture`, it prints how many rooms and arrows there are, and the rings.
#[test]
fn imports_point_down() {
    let mut all = Vec::new();
    for (name, folders) in FLOORS {
        let source = source_of(name);
        for Folder { path, floors, up } in folders {
            let folder = place(path);
            let imports = Imports::of(&source, &folder);
            let (rooms, arrows, rings) = (imports.rooms.len(), imports.arrows.len(), imports.rings());
            println!(
                "{name}/{path}: {rooms} rooms, {arrows} arrows, {} of them up, rings {rings:?}",
                up.len()
            );
            all.extend(
                faults(&source, &folder, floors, up).into_iter().map(|fault| format!("{name}: {fault}")),
            );
        }
    }
    assert!(all.is_empty(), "{}", all.join("\n"));
}

/// A crate of three rooms, with `middle.rs` as given.
fn made_up(middle: &str) -> Source {
    let files = BTreeMap::from([
        (
            "lib.rs",
            "mod ground; mod middle; mod upper; pub use upper::{Top, Other as Renamed}; pub use ground::Low;",
        ),
        ("ground.rs", "pub struct Low;"),
        ("middle.rs", middle),
        ("middle/inner.rs", "use super::super::upper::Top; fn f() -> Top { Top }"),
        ("middle/tests.rs", "use crate::upper::Top;"),
        (
            "upper/mod.rs",
            "use crate::{Low, middle}; pub struct Top; pub struct Other; #[macro_export] macro_rules! make { () => { Top } }",
        ),
    ]);
    let root = PathBuf::from("src");
    Source::read(&root, &|file| {
        let name = file.strip_prefix("src").ok()?.to_str()?;
        files.get(name).map(|text| (*text).to_string())
    })
}

const THREE: &Floors = &["ground", "middle", "upper"];

#[test]
fn an_import_that_points_up_is_found_however_it_is_written() {
    let ways = [
        "use crate::upper::Top;",
        "use crate::upper;",
        "use crate::{ground::Low, upper::{self as above, Top}};",
        "pub use crate::upper::Top;",
        "pub(crate) use super::upper::*;",
        "use crate::Top;",
        "use crate::Renamed as Mine;",
        "use crate as whole; fn f(_: whole::upper::Top) {}",
        "fn f() { g(|| crate::upper::Top) }",
        "fn f<T: From<crate::Top>>(_: T) {}",
        "pub(in crate::middle) struct A(pub(crate) super::upper::Top);",
        "macro_rules! m { () => { $crate::upper::Top } }",
        "fn f() { crate::make!() }",
        "mod inner;",
        "mod inner { use super::super::upper::Top; }",
        "#[cfg(not(test))] use crate::upper::Top;",
        "#[cfg(any(feature = \"x\", test))] mod inner;",
    ];
    for way in ways {
        let faults = faults(&made_up(way), &[], THREE, &[]);
        assert!(
            matches!(&faults[..], [fault] if fault.contains("middle (floor 1) imports upper (floor 2)")),
            "{way}: {faults:?}"
        );
    }
}

#[test]
fn comments_tests_and_imports_that_point_down_are_fine() {
    let ways = [
        "use crate::ground::Low;",
        "use crate::Low;",
        "/// See [`crate::upper::Top`]; use crate::upper::Top;\n// use crate::upper::Top;\npub struct A;",
        "const TEXT: &str = \"use crate::upper::Top;\";",
        "#[cfg(test)] mod tests;",
        "#[cfg(test)] mod tests { use crate::upper::Top; }",
        "#[cfg(all(test, unix))] use crate::upper::Top;",
        "#[test] fn f() { crate::upper::Top; }",
        "use ::upper::Top; fn f() -> ::upper::Top { upper::Top }",
    ];
    for way in ways {
        assert_eq!(faults(&made_up(way), &[], THREE, &[]), Vec::<String>::new(), "{way}");
    }
}

#[test]
fn a_list_of_floors_names_every_room_once() {
    let says = |floors: &Floors| faults(&made_up(""), &[], floors, &[]).join("; ");
    assert!(says(&["ground middle", "upper ground"]).contains("ground is on two floors"));
    assert!(says(&["ground attic", "middle", "upper"]).contains("there is no room attic"));
    assert!(says(&["ground", "upper"]).contains("middle is on no floor"));
    assert!(says(&["ground middle upper"]).contains("upper (floor 0) imports ground (floor 0)"));
}

#[test]
fn inside_a_folder_its_own_file_is_a_room() {
    let source =
        made_up("mod inner { use super::Own; } mod other { pub struct A; } pub use other::A; struct Own;");
    let folder = ["middle".to_string()];
    assert_eq!(faults(&source, &folder, &["mod other", "inner"], &[]), Vec::<String>::new());
    let faults = faults(&source, &folder, &["inner other", "mod"], &[]);
    assert_eq!(faults, ["crate::middle: inner (floor 0) imports mod (floor 1) in crate::middle::inner"]);
}

#[test]
fn rooms_that_import_each_other_are_a_ring() {
    let rings = |source: &Source| {
        Imports::of(source, &[]).rings().iter().map(|ring| ring.iter().join(" ")).join("; ")
    };
    assert_eq!(rings(&made_up("")), "");
    assert_eq!(rings(&made_up("use crate::Top;")), "middle upper");
}

#[test]
fn a_name_that_is_passed_on_counts_where_it_is_used() {
    let folder = ["middle".to_string()];
    let arrows = |text: &str| Imports::of(&made_up(text), &folder).arrows.keys().cloned().collect_vec();
    assert_eq!(arrows("mod other { pub struct A; } pub use other::A;"), []);
    let used = [("mod".to_string(), "other".to_string())];
    assert_eq!(arrows("mod other { pub struct A; } pub use other::A; struct B(A);"), used);
    assert_eq!(arrows("mod other { pub struct A; } pub(crate) use other::A as C; struct B(C);"), used);
}

#[test]
fn a_known_import_that_points_up_leaves_the_list_when_it_is_gone() {
    let source = made_up("use crate::Top;");
    let known = [("middle", "upper")];
    assert_eq!(faults(&source, &[], THREE, &known), Vec::<String>::new());
    assert_eq!(faults(&source, &[], THREE, &[]).len(), 1);
    let stale = faults(&made_up(""), &[], THREE, &known);
    assert_eq!(stale, ["crate: middle imports upper no more from below; take it off the list"]);
}
