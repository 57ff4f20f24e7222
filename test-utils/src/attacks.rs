use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Attacks of one kind. Each must end the way its closure checks.
///
/// Its last line is read by `scripts/hostile.sh`, which adds up the attacks of all tests.
#[derive(Debug)]
#[must_use = "attacks that broke something are reported by `assert`"]
pub struct Attacks {
    kind: &'static str,
    tried: usize,
    broke: Vec<String>,
}

impl Attacks {
    /// No attack of this kind has been tried yet.
    pub fn new(kind: &'static str) -> Self {
        Attacks { kind, tried: 0, broke: Vec::new() }
    }

    /// Tries an attack. `held` returns what broke, or panics.
    pub fn attack<E: Display>(&mut self, name: impl Display, held: impl FnOnce() -> Result<(), E>) {
        self.tried += 1;
        match catch_unwind(AssertUnwindSafe(held)) {
            Ok(Ok(())) => {}
            Ok(Err(broke)) => self.broke.push(format!("{name}: {broke}")),
            Err(_) => self.broke.push(format!("{name}: panicked")),
        }
    }

    /// Prints how many attacks broke something.
    ///
    /// # Panics
    ///
    /// Panics if an attack broke something, or if none was tried.
    pub fn assert(self) {
        println!("attacks on {}: {} broke {}", self.kind, self.tried, self.broke.len());
        assert!(self.broke.is_empty(), "attacks on {} broke:\n{}", self.kind, self.broke.join("\n"));
        assert!(self.tried > 0, "no attack on {} was tried", self.kind);
    }
}
