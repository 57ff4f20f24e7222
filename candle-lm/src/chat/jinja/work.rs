//! What one rendering may cost: work, memory, depth and time.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::text::Text;
use super::value::{JinjaValue, List, Map};

/// Why a template fails, and the line where.
#[derive(Debug)]
pub(super) struct TemplateFailure {
    pub(super) why: String,
    pub(super) line: Option<u16>,
}

pub(super) type EvalResult<T> = Result<T, TemplateFailure>;

pub(super) fn fail<T>(why: impl Into<String>) -> EvalResult<T> {
    Err(TemplateFailure { why: why.into(), line: None })
}

/// The most that one rendering may cost. A byte that is written or looked at costs 1.
const MOST: u64 = 1 << 28;
/// What each byte of the messages adds to it.
const EACH: u64 = 64;
/// What an instruction costs.
const STEP: u64 = 64;
/// What a place in a list costs.
pub(super) const SLOT: u64 = 64;
/// What a character costs that is looked at by itself.
const LETTER: u64 = 16;
/// The most bytes and slots of one value, with all that is in it, counted as often as it is in it.
const LARGEST: u64 = 1 << 25;
/// The most lists inside of each other.
const DEEPEST: u32 = 64;
/// The most instructions inside of each other.
const NESTED: usize = 500;
/// The most time.
const TIME: Duration = Duration::from_secs(30);

/// What is left for a rendering.
///
/// Everything that takes time or memory is charged here before it is done, and a value knows its size, also if parts of it are
/// in it many times. So a rendering ends, whatever the template says.
#[derive(Debug)]
pub(super) struct WorkBudget {
    left: Cell<u64>,
    largest: u64,
    looked: Cell<u64>,
    depth: Cell<usize>,
    ends: Instant,
}

impl WorkBudget {
    /// A rendering of messages of so many bytes, which may cost more if they are long.
    pub(super) fn new(bytes: u64) -> Self {
        let most = MOST.saturating_add(bytes.saturating_mul(EACH));
        Self {
            left: Cell::new(most),
            largest: LARGEST.saturating_add(bytes.saturating_mul(2)),
            looked: Cell::new(most),
            depth: Cell::new(0),
            ends: Instant::now() + TIME,
        }
    }

    /// Charges so many bytes.
    pub(super) fn charge(&self, bytes: impl TryInto<u64>) -> EvalResult<()> {
        let left = self.left.get().checked_sub(bytes.try_into().unwrap_or(u64::MAX));
        let Some(left) = left else {
            self.left.set(0);
            return fail(
                "it runs out of fuel: it does more work, or makes more text, than a chat template may",
            );
        };
        self.left.set(left);
        // The clock is not looked at each time.
        if self.looked.get() - left >= 1 << 16 {
            self.looked.set(left);
            if Instant::now() >= self.ends {
                return fail(format!("it takes longer than {} s", TIME.as_secs()));
            }
        }
        Ok(())
    }

    /// Charges a walk over the characters of a text.
    pub(super) fn letters(&self, text: &str) -> EvalResult<()> {
        self.charge((text.len() as u64).saturating_mul(LETTER))
    }

    /// Charges one instruction.
    pub(super) fn step(&self) -> EvalResult<()> {
        self.charge(STEP)
    }

    /// Begins an instruction inside of others.
    pub(super) fn nest(&self) -> EvalResult<()> {
        let depth = self.depth.get() + 1;
        if depth > NESTED {
            return fail(format!("it nests more than {NESTED} instructions or calls"));
        }
        self.depth.set(depth);
        Ok(())
    }

    /// Ends an instruction inside of others.
    pub(super) fn unnest(&self) {
        self.depth.set(self.depth.get().saturating_sub(1));
    }

    /// Makes a text.
    pub(super) fn text(&self, text: Text) -> EvalResult<JinjaValue> {
        self.charge(text.cost() + SLOT)?;
        Ok(JinjaValue::Text(Rc::new(text)))
    }

    pub(super) fn own(&self, text: impl Into<String>) -> EvalResult<JinjaValue> {
        self.text(Text::own(text))
    }

    /// Cuts a text.
    pub(super) fn part(&self, text: &Text, part: Range<usize>) -> EvalResult<JinjaValue> {
        self.text(text.part(part))
    }

    /// Makes a list.
    pub(super) fn list(&self, items: Vec<JinjaValue>) -> EvalResult<JinjaValue> {
        let (size, depth) = self.sizes(&items)?;
        Ok(JinjaValue::List(Rc::new(List { items, is_tuple: false, size, depth })))
    }

    /// Makes a tuple.
    pub(super) fn tuple(&self, items: Vec<JinjaValue>) -> EvalResult<JinjaValue> {
        let (size, depth) = self.sizes(&items)?;
        Ok(JinjaValue::List(Rc::new(List { items, is_tuple: true, size, depth })))
    }

    /// Makes a dict of entries without a key in common.
    pub(super) fn map(&self, entries: Vec<(JinjaValue, JinjaValue)>) -> EvalResult<JinjaValue> {
        let (keys, key_depth) = self.sizes(entries.iter().map(|(key, _)| key))?;
        let (values, depth) = self.sizes(entries.iter().map(|(_, value)| value))?;
        Ok(JinjaValue::Map(Rc::new(Map {
            entries,
            size: keys.saturating_add(values),
            depth: depth.max(key_depth),
        })))
    }

    fn sizes<'v>(&self, items: impl IntoIterator<Item = &'v JinjaValue>) -> EvalResult<(u64, u32)> {
        let (mut size, mut depth) = (SLOT, 0);
        for item in items {
            self.charge(SLOT)?;
            if matches!(item, JinjaValue::Namespace(_) | JinjaValue::Loop(_)) {
                return fail(format!("a {} cannot be in a list, a dict or a namespace", item.kind()));
            }
            size = item.size().saturating_add(SLOT).saturating_add(size);
            depth = depth.max(item.depth());
        }
        if size > self.largest {
            return fail(format!("it makes a value of more than {} bytes", self.largest));
        }
        if depth >= DEEPEST {
            return fail(format!("it makes more than {DEEPEST} lists inside of each other"));
        }
        Ok((size, depth + 1))
    }

    /// Refuses what cannot be in a namespace.
    pub(super) fn storable(&self, value: &JinjaValue) -> EvalResult<()> {
        self.sizes([value]).map(drop)
    }
}
