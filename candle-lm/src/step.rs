//! What a model computes in one pass: new tokens of some texts.

use candle_core::{Device, Tensor};
use candle_shard::{DTensor, Result};

/// The new tokens of a text, which has a slot of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotTokens {
    /// The slot of the cache that has the tokens before.
    pub slot: usize,
    /// How many new tokens there are.
    pub tokens: usize,
    /// Whether the text begins with them. What the slot had before is then forgotten.
    pub is_first: bool,
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
const FIELDS: usize = 3;

impl DecodeStep {
    /// Adds the new tokens of the text in a slot, which comes after those of all texts that were added.
    pub fn push(&mut self, slot: usize, tokens: &[u32], is_first: bool) {
        self.tokens.extend(tokens);
        self.spans.push(SlotTokens { slot, tokens: tokens.len(), is_first });
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

    /// The tokens `[1, tokens]`.
    pub(crate) fn tokens(&self, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::from_slice(&self.tokens, (1, self.tokens.len()), device)
    }

    /// The spans in a tensor of one row, as stages get them.
    pub(crate) fn packed(&self, device: &Device) -> candle_core::Result<Tensor> {
        let fields = |span: &SlotTokens| [span.slot as u32, span.tokens as u32, u32::from(span.is_first)];
        let packed: Vec<u32> = self.spans.iter().flat_map(fields).collect();
        Tensor::from_vec(packed, (1, self.spans.len() * FIELDS), device)
    }
}

/// Returns the spans that [`DecodeStep::packed`] packed; none if there is nothing that was packed.
pub(crate) fn unpack(packed: Option<&Tensor>) -> candle_core::Result<Vec<SlotTokens>> {
    let Some(packed) = packed else { return Ok(Vec::new()) };
    let packed = packed.flatten_all()?.to_vec1::<u32>()?;
    let span = |fields: &[u32]| SlotTokens {
        slot: fields[0] as usize,
        tokens: fields[1] as usize,
        is_first: fields[2] != 0,
    };
    Ok(packed.chunks_exact(FIELDS).map(span).collect())
}

/// Returns the rows of `x` `[1, tokens, ..]` for the last token of each text.
pub(crate) fn last_rows(x: &DTensor, spans: &[SlotTokens]) -> Result<DTensor> {
    if spans.len() == x.dims()[1] {
        return Ok(x.clone()); // a token of each text
    }
    let mut end = 0;
    let last = |span: &SlotTokens| {
        end += span.tokens;
        x.narrow(1, end - 1, 1)
    };
    let rows: Vec<DTensor> = spans.iter().map(last).collect::<Result<_>>()?;
    match &rows[..] {
        [row] => Ok(row.clone()),
        rows => DTensor::cat(rows, 1),
    }
}
