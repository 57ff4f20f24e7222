//! The imports between the rooms of a folder, and their rings.
use super::source::{Place, Source};
use std::collections::{BTreeMap, BTreeSet};

/// The room of the items in a folder's own file.
pub(super) const OWN: &str = "mod";

/// The imports between the rooms of one folder: for each importing and imported room, a module with such an import.
#[derive(Debug, Default)]
pub(super) struct Imports {
    pub(super) rooms: BTreeSet<String>,
    pub(super) arrows: BTreeMap<(String, String), Place>,
}

impl Imports {
    /// The imports between the modules that lie directly in `folder`, and the folder's own file.
    pub(super) fn of(source: &Source, folder: &[String]) -> Self {
        let mut imports = Self { rooms: source.modules[folder].children.clone(), ..Self::default() };
        for (place, module) in source.modules.iter().filter(|(place, _)| place.starts_with(folder)) {
            let from = place.get(folder.len()).map_or(OWN, String::as_str);
            let inside =
                |path: &Place| path.starts_with(folder).then(|| path.get(folder.len()).cloned()).flatten();
            for name in module.named.iter().filter_map(inside) {
                let to = match imports.rooms.contains(&name) {
                    true => name,
                    false if source.is_passed_on(folder, &name) => continue,
                    false => OWN.to_string(),
                };
                if from != to {
                    imports.arrows.entry((from.to_string(), to)).or_insert_with(|| place.clone());
                }
            }
        }
        if imports.arrows.keys().any(|(from, to)| from == OWN || to == OWN) {
            imports.rooms.insert(OWN.to_string());
        }
        imports
    }

    fn next<'a>(&'a self, room: &'a str) -> impl Iterator<Item = &'a str> {
        self.arrows.keys().filter(move |(from, _)| from == room).map(|(_, to)| to.as_str())
    }

    fn reach<'a>(&'a self, room: &'a str) -> BTreeSet<&'a str> {
        let (mut seen, mut open) = (BTreeSet::new(), vec![room]);
        while let Some(room) = open.pop() {
            open.extend(self.next(room).filter(|next| seen.insert(*next)));
        }
        seen
    }

    /// The groups of rooms that import each other, directly or not.
    pub(super) fn rings(&self) -> BTreeSet<BTreeSet<&str>> {
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            self.rooms.iter().map(|room| (room.as_str(), self.reach(room))).collect();
        let ring =
            |room: &str| reach[room].iter().copied().filter(|other| reach[other].contains(room)).collect();
        reach.keys().map(|room| ring(room)).filter(|ring: &BTreeSet<&str>| !ring.is_empty()).collect()
    }
}
