//! Imports point down: the modules of a folder are *rooms* on floors, and a room imports only rooms of lower floors.
//!
//! A crate gets its table in `tables.rs`. What a folder's own file (`mod.rs`) holds is the room `mod`; what it only passes on
//! by `pub use` counts for nothing in its own folder. Comments and items for tests do not count.
mod graph;
mod source;
mod tables;

use graph::Imports;
use itertools::Itertools;
use source::{Place, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tables::{FLOORS, Floors, RINGS};

/// The source of a crate of this workspace.
fn source_of(name: &str) -> Source {
    Source::of_crate(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src"))
}

/// What is wrong with the floors of one folder.
fn faults(source: &Source, folder: &[String], floors: &Floors) -> Vec<String> {
    let imports = Imports::of(source, folder);
    let place = |folder: &[String]| ["crate"].into_iter().chain(folder.iter().map(String::as_str)).join("::");
    let floor: BTreeMap<&str, usize> =
        floors.iter().enumerate().flat_map(|(floor, rooms)| rooms.iter().map(move |room| (*room, floor))).collect();
    let listed = floors.iter().flat_map(|rooms| rooms.iter().copied());
    let twice = listed.clone().duplicates().map(|room| format!("{room} is on two floors"));
    let gone = listed.filter(|room| !imports.rooms.contains(*room)).map(|room| format!("there is no room {room}"));
    let unlisted = imports.rooms.iter().filter(|room| !floor.contains_key(room.as_str()));
    let unlisted = unlisted.map(|room| format!("{room} is on no floor"));
    let up = imports.arrows.iter().filter_map(|((from, to), module)| {
        let (high, low) = (floor.get(from.as_str())?, floor.get(to.as_str())?);
        (low >= high).then(|| format!("{from} (floor {high}) imports {to} (floor {low}) in {}", place(module)))
    });
    twice.chain(gone).chain(unlisted).chain(up).map(|fault| format!("{}: {fault}", place(folder))).collect()
}

/// The names on a path of folders.
fn place(folder: &str) -> Place {
    folder.split('/').filter(|name| !name.is_empty()).map(String::from).collect()
}

#[test]
fn imports_point_down() {
    let of_crate = |(name, folders): &(&str, &[(&str, &Floors)])| {
        let source = source_of(name);
        let of_folder = |(folder, floors): &(&str, &Floors)| faults(&source, &place(folder), floors);
        folders.iter().flat_map(of_folder).map(|fault| format!("{name}: {fault}")).collect_vec()
    };
    let faults = FLOORS.iter().flat_map(of_crate).collect_vec();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Run with `--nocapture`, it prints what there is.
#[test]
fn rings_in_folders_without_floors_do_not_grow() {
    for (name, folders) in RINGS {
        let source = source_of(name);
        for (folder, most) in folders {
            let imports = Imports::of(&source, &place(folder));
            let rings = imports.rings();
            let inside = imports.arrows.keys().filter(|(from, to)| {
                let both = |ring: &BTreeSet<&str>| ring.contains(&from[..]) && ring.contains(&to[..]);
                rings.iter().any(both)
            });
            let (rooms, arrows) = (imports.rooms.len(), imports.arrows.len());
            let (ringed, inside): (usize, usize) = (rings.iter().map(BTreeSet::len).sum(), inside.count());
            println!("{name}/{folder}: {rooms} rooms, {arrows} arrows; {ringed} rooms, {inside} arrows in {rings:?}");
            assert!(ringed <= *most, "{name}/{folder} had {most} rooms in rings and has {ringed} now: {rings:?}");
        }
    }
}

/// A crate of three rooms, with `middle.rs` as given.
fn made_up(middle: &str) -> Source {
    let files = BTreeMap::from([
        ("lib.rs", "mod ground; mod middle; mod upper; pub use upper::{Top, Other as Renamed}; pub use ground::Low;"),
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

const THREE: &Floors = &[&["ground"], &["middle"], &["upper"]];

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
        let faults = faults(&made_up(way), &[], THREE);
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
        assert_eq!(faults(&made_up(way), &[], THREE), Vec::<String>::new(), "{way}");
    }
}

#[test]
fn a_list_of_floors_names_every_room_once() {
    let says = |floors: &Floors| faults(&made_up(""), &[], floors).join("; ");
    assert!(says(&[&["ground", "middle"], &["upper", "ground"]]).contains("ground is on two floors"));
    assert!(says(&[&["ground", "attic"], &["middle"], &["upper"]]).contains("there is no room attic"));
    assert!(says(&[&["ground"], &["upper"]]).contains("middle is on no floor"));
    assert!(says(&[&["ground", "middle", "upper"]]).contains("upper (floor 0) imports ground (floor 0)"));
}

#[test]
fn inside_a_folder_its_own_file_is_a_room() {
    let source = made_up("mod inner { use super::Own; } mod other { pub struct A; } pub use other::A; struct Own;");
    let folder = ["middle".to_string()];
    assert_eq!(faults(&source, &folder, &[&["mod", "other"], &["inner"]]), Vec::<String>::new());
    let faults = faults(&source, &folder, &[&["inner", "other"], &["mod"]]);
    assert_eq!(faults, ["crate::middle: inner (floor 0) imports mod (floor 1) in crate::middle::inner"]);
}

#[test]
fn rooms_that_import_each_other_are_a_ring() {
    let rings = |source: &Source| Imports::of(source, &[]).rings().iter().map(|ring| ring.iter().join(" ")).join("; ");
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
