//! What a proof found.
use super::compare::Comparison;
use super::faults::inject;
use super::setup::Setup;
use std::fmt;

/// What one set-up showed.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// All numbers are those of one device.
    Right,
    /// All ranks refused for this reason, or candle cannot run the set-up in 16 bits on one device.
    Refused(String),
    /// A number differs, an op of candle failed, or ranks ended in unlike ways.
    Wrong(String),
}

/// What a proof found: how many set-ups are right, which ones were refused, and the smallest that is wrong.
#[derive(Debug, Clone)]
pub struct Report {
    /// The number of set-ups whose numbers are those of one device.
    pub right: usize,
    /// The set-ups that were refused, with the reason.
    pub refused: Vec<(Setup, String)>,
    /// The set-ups that are wrong, with the reason, as they were found.
    pub wrong: Vec<(Setup, String)>,
    /// The number of faults that ended in one error on all ranks.
    pub faults: usize,
    /// The smallest set-up that is wrong, with the reason.
    pub smallest: Option<(Setup, String)>,
}

/// Judges set-ups and makes the first wrong one smaller.
pub(super) fn of(compared: &Comparison, setups: &[Setup], faults: usize) -> Report {
    let mut report = Report { right: 0, refused: Vec::new(), wrong: Vec::new(), faults: 0, smallest: None };
    for setup in setups {
        let mut verdict = compared.verdict(setup);
        if verdict == Verdict::Right && faults > 0 && setup.ranks() > 1 {
            let (injected, wrong) = inject(compared, setup, faults);
            report.faults += injected;
            verdict = wrong.unwrap_or(verdict);
        }
        match verdict {
            Verdict::Right => report.right += 1,
            Verdict::Refused(why) => report.refused.push((setup.clone(), why)),
            Verdict::Wrong(why) => report.wrong.push((setup.clone(), why)),
        }
    }
    report.smallest = report.wrong.first().cloned().map(|(setup, why)| {
        let (setup, mut why) = smaller(compared, setup, why);
        why.extend(compared.first_op(&setup).map(|first| format!("\n{first}")));
        (setup, why)
    });
    report
}

/// Returns the smallest set-up that is still wrong.
fn smaller(compared: &Comparison, mut setup: Setup, mut why: String) -> (Setup, String) {
    // Each round takes something away.
    'rounds: loop {
        for small in setup.smaller() {
            if let Verdict::Wrong(reason) = compared.verdict(&small) {
                (setup, why) = (small, reason);
                continue 'rounds;
            }
        }
        return (setup, why);
    }
}

impl Report {
    /// Checks that no set-up is wrong, and that some are right.
    ///
    /// # Panics
    /// With the report, if a set-up is wrong or none is right.
    pub fn assert(&self) {
        assert!(self.wrong.is_empty(), "{self}");
        assert!(self.right > 0, "no set-up is right\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: Vec<(&str, &Setup, usize)> = Vec::new();
        for (setup, why) in &self.refused {
            // What ranks were doing differs between set-ups.
            let first = |why: &str| why.lines().next().map(str::to_string);
            match reasons.iter_mut().find(|(known, ..)| first(known) == first(why)) {
                Some((.., times)) => *times += 1,
                None => reasons.push((why, setup, 1)),
            }
        }
        for (why, setup, times) in reasons {
            writeln!(f, "refused {times}: {setup}\n    {}", why.replace('\n', "\n    "))?;
        }
        for (setup, why) in &self.wrong {
            writeln!(f, "wrong: {setup}\n    {}", why.replace('\n', "\n    "))?;
        }
        if let Some((setup, why)) = &self.smallest {
            writeln!(f, "the smallest that is wrong: {setup}\n    {}", why.replace('\n', "\n    "))?;
            writeln!(f, "run just this one with .only({:?})", setup.to_string())?;
        }
        if self.faults > 0 {
            writeln!(f, "{} faults ended in one error on all ranks", self.faults)?;
        }
        let proved = self.right + self.refused.len() + self.wrong.len();
        write!(f, "prove {proved} wrong {} refused {}", self.wrong.len(), self.refused.len())
    }
}
