//! What a model computes in one pass: new tokens of some texts.

use candle_core::{Device, Tensor};
use candle_shard::nn::{ActiveAdapters, RowAdapters};
use candle_shard::{DTensor, Result};

/// What is before the new tokens of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotPast {
    /// Nothing: the text begins with them. What the slot had before is forgotten.
    Nothing,
    /// All that the slot has.
    All,
    /// The first `tokens` tokens in a slot, from 1 on. Its own are cut back to them, and those of another
    /// slot are copied.
    Prefix {
        /// The slot.
        slot: usize,
        /// How many of its tokens.
        tokens: usize,
    },
}

/// The new tokens of a text, which has a slot of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotTokens {
    /// The slot of the cache that the tokens go to.
    pub slot: usize,
    /// How many new tokens there are; with none and nothing before them, what the slot has is forgotten.
    pub tokens: usize,
    /// What is before them.
    pub past: SlotPast,
    /// For how many of them, the last ones, logits of what follows are wanted.
    pub rows: usize,
    /// The adapters of the text.
    pub adapters: RowAdapters,
}

/// The former name of [`SlotTokens`].
#[deprecated(since = "0.1.0", note = "renamed to SlotTokens")]
pub type Span = SlotTokens;

/// The former name of [`DecodeStep`].
#[deprecated(since = "0.1.0", note = "renamed to DecodeStep")]
pub type Step = DecodeStep;

/// The new tokens of some texts, one text behind another, in ascending order of their slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodeStep {
    tokens: Vec<u32>,
    spans: Vec<SlotTokens>,
}

/// The numbers of a span in a tensor.
const FIELDS: usize = 6;

impl SlotTokens {
    /// The span as numbers. Of the past, they have the slot and the tokens: 0 for nothing, and the most for
    /// all.
    fn fields(&self) -> [u32; FIELDS] {
        let [from, kept] = match self.past {
            SlotPast::Nothing => [self.slot as u32, 0],
            SlotPast::All => [self.slot as u32, u32::MAX],
            SlotPast::Prefix { slot, tokens } => [slot as u32, tokens as u32],
        };
        let adapters = match self.adapters {
            RowAdapters::All => 0,
            RowAdapters::Model => 1,
            RowAdapters::One(number) => 2 + number as u32,
        };
        [self.slot as u32, self.tokens as u32, self.rows as u32, from, kept, adapters]
    }

    fn of_fields(fields: &[u32; FIELDS]) -> Self {
        let [slot, tokens, rows, from, kept, adapters] = fields.map(|field| field as usize);
        let past = match fields[4] {
            0 => SlotPast::Nothing,
            u32::MAX => SlotPast::All,
            _ => SlotPast::Prefix { slot: from, tokens: kept },
        };
        let adapters = match adapters {
            0 => RowAdapters::All,
            1 => RowAdapters::Model,
            number => RowAdapters::One(number - 2),
        };
        Self { slot, tokens, past, rows, adapters }
    }
}

impl DecodeStep {
    /// Adds the new tokens of the text in a slot, which comes after those of all texts that were added.
    /// Logits are wanted of what follows the last one.
    pub fn push(&mut self, slot: usize, tokens: &[u32], is_first: bool) {
        let past = if is_first { SlotPast::Nothing } else { SlotPast::All };
        self.push_behind(slot, past, tokens, 1, RowAdapters::All);
    }

    /// Adds the new tokens of the text in a slot, which has these adapters, behind a past. Logits are wanted
    /// of what follows the last `rows` of them.
    pub fn push_behind(
        &mut self,
        slot: usize,
        past: SlotPast,
        tokens: &[u32],
        rows: usize,
        adapters: RowAdapters,
    ) {
        self.tokens.extend(tokens);
        let rows = rows.min(tokens.len());
        self.spans.push(SlotTokens { slot, tokens: tokens.len(), past, rows, adapters });
    }

    /// Empties a slot, which comes after those of all texts that were added.
    pub(crate) fn push_empty(&mut self, slot: usize) {
        self.push_behind(slot, SlotPast::Nothing, &[], 0, RowAdapters::All);
    }

    /// Cuts the step into up to `most` parts of about as many tokens each, and at least `least`, which do the
    /// same one after another. Texts may be cut. The first part has what is before the tokens of all texts.
    pub(crate) fn parts(&self, most: usize, least: usize) -> Vec<Self> {
        let count = (self.len() / least.max(1)).clamp(1, most.max(1));
        let mut parts = vec![Self::default(); count];
        let mut start = 0;
        for span in &self.spans {
            let (end, mut past) = (start + span.tokens, span.past);
            for (nth, part) in parts.iter_mut().enumerate() {
                let [first, behind] = [nth, nth + 1].map(|nth| self.len() * nth / count);
                let (from, to) = (start.max(first), end.min(behind));
                let tokens = self.tokens.get(from..to).unwrap_or_default();
                let begins = nth == 0 && past != SlotPast::All;
                if tokens.is_empty() && !begins {
                    continue;
                }
                // Logits are wanted of the last tokens of a text.
                let rows = to.saturating_sub(from.max(end - span.rows));
                part.push_behind(span.slot, past, tokens, rows, span.adapters);
                past = SlotPast::All;
            }
            start = end;
        }
        parts
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Where each text has its tokens.
    pub fn spans(&self) -> &[SlotTokens] {
        &self.spans
    }

    /// The adapters of the tokens.
    pub(crate) fn adapters(&self) -> ActiveAdapters {
        of_rows(computed(&self.spans).map(|span| (span.tokens, span.adapters)))
    }

    /// The tokens `[1, tokens]`.
    pub(crate) fn tokens(&self, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::from_slice(&self.tokens, (1, self.tokens.len()), device)
    }

    /// The rows of logits that are wanted.
    pub(crate) fn wanted(&self) -> usize {
        self.spans.iter().map(|span| span.rows).sum()
    }

    /// The rows of logits: those that are wanted, or one if none is.
    pub fn rows(&self) -> usize {
        rows(&self.spans)
    }

    /// The spans in a tensor of one row, as stages get them.
    pub(crate) fn packed(&self, device: &Device) -> candle_core::Result<Tensor> {
        let packed: Vec<u32> = self.spans.iter().flat_map(SlotTokens::fields).collect();
        Tensor::from_vec(packed, (1, self.spans.len() * FIELDS), device)
    }

    /// The step as numbers: how many spans there are, the spans, and the tokens.
    pub(crate) fn words(&self) -> Vec<u32> {
        let spans = self.spans.iter().flat_map(SlotTokens::fields);
        std::iter::once(self.spans.len() as u32).chain(spans).chain(self.tokens.iter().copied()).collect()
    }

    /// The step of [`words`](Self::words); `None` if they are none.
    pub(crate) fn of_words(words: &[u32]) -> Option<Self> {
        let (&spans, rest) = words.split_first()?;
        let (spans, tokens) = rest.split_at_checked((spans as usize).checked_mul(FIELDS)?)?;
        let (spans, _) = spans.as_chunks::<FIELDS>();
        let spans: Vec<SlotTokens> = spans.iter().map(SlotTokens::of_fields).collect();
        let known: usize = spans.iter().map(|span| span.tokens).sum();
        (known == tokens.len()).then(|| Self { tokens: tokens.to_vec(), spans })
    }
}

/// The spans that have tokens.
fn computed(spans: &[SlotTokens]) -> impl DoubleEndedIterator<Item = &SlotTokens> + Clone {
    spans.iter().filter(|span| span.tokens > 0)
}

/// The adapters of so many rows each. Where all texts have all of them, rows may lie along any dim.
fn of_rows(rows: impl Iterator<Item = (usize, RowAdapters)> + Clone) -> ActiveAdapters {
    match rows.clone().all(|(_, adapters)| adapters == RowAdapters::All) {
        true => ActiveAdapters::all(),
        false => ActiveAdapters::of_rows(rows),
    }
}

/// The adapters of the rows of [`wanted_rows`].
pub(crate) fn wanted_adapters(spans: &[SlotTokens]) -> ActiveAdapters {
    let wanted = computed(spans).map(|span| (span.rows, span.adapters));
    match computed(spans).next_back() {
        Some(last) if wanted.clone().all(|(rows, _)| rows == 0) => of_rows([(1, last.adapters)].into_iter()),
        _ => of_rows(wanted),
    }
}

fn rows(spans: &[SlotTokens]) -> usize {
    spans.iter().map(|span| span.rows).sum::<usize>().max(1)
}

/// Returns the spans that [`DecodeStep::packed`] packed; none if there is nothing that was packed.
pub(crate) fn unpack(packed: Option<&Tensor>) -> candle_core::Result<Vec<SlotTokens>> {
    let Some(packed) = packed else { return Ok(Vec::new()) };
    let packed = packed.flatten_all()?.to_vec1::<u32>()?;
    let (spans, _) = packed.as_chunks::<FIELDS>();
    Ok(spans.iter().map(SlotTokens::of_fields).collect())
}

/// Returns the rows of `x` `[1, tokens, ..]` of which logits are wanted: the last ones of each text. If none
/// is wanted, it is the very last one, since layers compute no empty tensors.
pub(crate) fn wanted_rows(x: &DTensor, spans: &[SlotTokens]) -> Result<DTensor> {
    let tokens = x.dims()[1];
    if rows(spans) == tokens {
        return Ok(x.clone()); // a token of each text
    }
    let (mut end, mut parts) = (0, Vec::with_capacity(spans.len()));
    for span in spans {
        end += span.tokens;
        if span.rows > 0 {
            parts.push(x.narrow(1, end - span.rows, span.rows)?);
        }
    }
    match &parts[..] {
        [] => x.narrow(1, tokens.saturating_sub(1), 1),
        [part] => Ok(part.clone()),
        parts => DTensor::cat(parts, 1),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::{DecodeStep, SlotPast, unpack};
    use candle_core::Device;
    use candle_shard::nn::RowAdapters;

    #[test]
    fn parts_of_a_step_have_its_tokens_and_rows_in_order() {
        let mut step = DecodeStep::default();
        let copied = SlotPast::Prefix { slot: 0, tokens: 5 };
        step.push_behind(0, SlotPast::All, &[1], 1, RowAdapters::All);
        step.push_behind(1, SlotPast::Nothing, &[2, 3, 4, 5, 6], 3, RowAdapters::All);
        step.push_empty(2);
        step.push_behind(3, copied, &[7, 8, 9], 1, RowAdapters::All);
        step.push_behind(4, SlotPast::All, &[10], 0, RowAdapters::All);
        assert_eq!(step.parts(1, 1), [step.clone()]);
        assert_eq!(step.parts(9, 6), [step.clone()], "each part has so many at least");
        let told = |part: &DecodeStep| -> Vec<_> {
            part.spans().iter().map(|span| (span.slot, span.tokens, span.past, span.rows)).collect()
        };
        let parts = step.parts(2, 5);
        let begins = [
            (0, 1, SlotPast::All, 1),
            (1, 4, SlotPast::Nothing, 2),
            (2, 0, SlotPast::Nothing, 0),
            (3, 0, copied, 0),
        ];
        assert_eq!(told(&parts[0]), begins);
        let goes_on = [(1, 1, SlotPast::All, 1), (3, 3, SlotPast::All, 1), (4, 1, SlotPast::All, 0)];
        assert_eq!(told(&parts[1]), goes_on);
        for most in 1..=10 {
            let parts = step.parts(most, 1);
            assert_eq!(parts.len(), most);
            let tokens: Vec<u32> = parts.iter().flat_map(|part| part.tokens.clone()).collect();
            assert_eq!(tokens, step.tokens);
            assert_eq!(parts.iter().map(DecodeStep::wanted).sum::<usize>(), step.wanted());
            assert!(parts.iter().all(|part| part.len() >= 10 / most));
        }
    }

    #[test]
    fn a_step_is_the_same_behind_words_and_packed_spans() {
        let mut step = DecodeStep::default();
        step.push(0, &[7], false);
        step.push_behind(2, SlotPast::Nothing, &[1, 2, 3], 0, RowAdapters::Model);
        step.push_behind(3, SlotPast::Prefix { slot: 0, tokens: 5 }, &[4, 5], 9, RowAdapters::One(3));
        assert_eq!(step.rows(), 3);
        let words = step.words();
        assert_eq!(DecodeStep::of_words(&words), Some(step.clone()));
        assert_eq!(unpack(Some(&step.packed(&Device::Cpu).unwrap())).unwrap(), step.spans());
        for len in 0..words.len() {
            assert_eq!(DecodeStep::of_words(&words[..len]), None, "{len}");
        }
    }
}
