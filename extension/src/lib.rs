//! Extensions of the candle distributed stack from another crate, with public items only.
//!
//! `docs/extending.md` has the recipes. Each module follows one of them, with its test.
pub mod backend;
pub mod layer;
pub mod op;
pub mod schedule;

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn the_recipes_link_to_files_that_exist() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let text = std::fs::read_to_string(docs.join("extending.md")).unwrap_or_else(|e| panic!("{e}"));
        let links: Vec<&str> = text.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
        assert!(links.len() > 15, "{links:?}");
        let broken: Vec<&&str> = links.iter().filter(|link| !docs.join(link).exists()).collect();
        assert!(broken.is_empty(), "{broken:?}");
    }
}
