//! The picture of the imports between the rooms of each crate, and their counts, as `docs/imports.md` and SVGs.
use super::graph::Imports;
use super::tables::{FLOORS, Floors, Folder};
use super::{place, source_of};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The distance between floors, and the height of a box, in pixels.
const FLOOR: usize = 74;
const BOX: usize = 24;
/// The width of a letter, and the space around a name.
const LETTER: usize = 8;
const SPACE: usize = 18;

/// The counts of one folder.
fn counts(imports: &Imports, up: usize) -> String {
    let rings = imports.rings();
    let rings = match rings.is_empty() {
        true => "none".to_string(),
        false => rings.iter().map(|ring| format!("one of {}", ring.len())).join(", "),
    };
    format!("{} | {} | {up} | {rings}", imports.rooms.len(), imports.arrows.len())
}

/// Boxes on floors, the ground floor below, and a line from each room to each room that it imports.
fn drawing(floors: &Floors, imports: &Imports) -> String {
    let width_of = |room: &str| room.len() * LETTER + SPACE;
    let row = |rooms: &str| rooms.split(' ').map(|room| width_of(room) + SPACE).sum::<usize>();
    let (width, height) =
        (floors.iter().map(|rooms| row(rooms)).max().unwrap_or(0) + SPACE, floors.len() * FLOOR);
    let mut boxes: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
    for (floor, rooms) in floors.iter().enumerate() {
        let mut x = SPACE + (width - SPACE - row(rooms)) / 2;
        for room in rooms.split(' ') {
            boxes.insert(room, (x, height - (floor + 1) * FLOOR + (FLOOR - BOX) / 2));
            x += width_of(room) + SPACE;
        }
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"monospace\" font-size=\"13\">\n\
         <style>text {{ fill: #1b1f24 }} rect {{ fill: #eef2f7; stroke: #57606a }} line {{ stroke: #8c959f; opacity: .6 }} \
         line.up {{ stroke: #cf222e; opacity: 1 }} @media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} rect {{ \
         fill: #21262d; stroke: #8b949e }} }}</style>\n"
    );
    for (from, to) in imports.arrows.keys() {
        let (Some(&(x, y)), Some(&(to_x, to_y))) = (boxes.get(from.as_str()), boxes.get(to.as_str())) else {
            continue;
        };
        let (x, to_x) = (x + width_of(from) / 2, to_x + width_of(to) / 2);
        let (class, y, to_y) = if y < to_y { ("down", y + BOX, to_y) } else { ("up", y, to_y + BOX) };
        let _ = writeln!(svg, "<line class=\"{class}\" x1=\"{x}\" y1=\"{y}\" x2=\"{to_x}\" y2=\"{to_y}\"/>");
    }
    for (room, (x, y)) in &boxes {
        let (width, middle, base) = (width_of(room), x + width_of(room) / 2, y + BOX - 8);
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{BOX}\" rx=\"4\"/><text x=\"{middle}\" y=\"{base}\" \
             text-anchor=\"middle\">{room}</text>"
        );
    }
    svg + "</svg>\n"
}

/// The page and the drawings, with their paths in `docs`.
fn pages() -> Vec<(String, String)> {
    let mut page = String::from(
        "# Imports inside the crates\n\n\
         `scripts/imports.sh` writes this page and its pictures from the code and the tables of floors that the test of floors\n\
         checks (`test-utils/tests/suite/floors`). A room is a module at the root of a crate or of a folder. An arrow is an\n\
         import between two rooms; it points up if the imported room is on the same floor or a higher one.\n",
    );
    let (mut drawings, mut folders_table, mut pictures) = (Vec::new(), String::new(), String::new());
    for (name, folders) in FLOORS {
        let source = source_of(name);
        for Folder { path, floors, up } in folders {
            let imports = Imports::of(&source, &place(path));
            let counts = counts(&imports, up.len());
            if path.is_empty() {
                drawings.push((format!("imports/{name}.svg"), drawing(floors, &imports)));
                let _ = writeln!(
                    pictures,
                    "\n## {name}\n\n![The rooms of {name} and their imports](imports/{name}.svg)"
                );
            }
            let folder = if path.is_empty() { "the root" } else { path };
            let _ = writeln!(folders_table, "| {name} | {folder} | {counts} |");
        }
    }
    page += "\nAll folders with a table of floors. A ring that stays has its reason in the table.\n\n\
             | crate | folder | rooms | arrows | up | rings |\n|---|---|---|---|---|---|\n";
    page = page + &folders_table + &pictures;
    drawings.push(("imports.md".into(), page));
    drawings
}

/// With `WRITE_IMPORTS` it writes the page and the pictures into `docs`.
#[test]
fn every_room_and_every_import_is_in_the_picture() {
    let pages = pages();
    for (name, folders) in FLOORS {
        let (_, svg) =
            pages.iter().find(|(path, _)| *path == format!("imports/{name}.svg")).expect("a picture");
        let imports = Imports::of(&source_of(name), &[]);
        assert_eq!(svg.matches("<rect ").count(), imports.rooms.len(), "{name}");
        assert_eq!(svg.matches("<line ").count(), imports.arrows.len(), "{name}");
        let up = folders.iter().find(|folder| folder.path.is_empty()).map_or(0, |folder| folder.up.len());
        assert_eq!(svg.matches("class=\"up\"").count(), up, "{name}");
    }
    if std::env::var_os("WRITE_IMPORTS").is_some() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        std::fs::create_dir_all(docs.join("imports")).expect("a folder");
        for (path, text) in pages {
            std::fs::write(docs.join(path), text).expect("a file");
        }
    }
}
