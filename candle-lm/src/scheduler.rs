//! Which texts have slots of the cache, and what the next pass computes.

use candle_shard::nn::RowAdapters;

use crate::cache::Cache;
use crate::config::Config;
use crate::step::{DecodeStep, SlotPast};

/// The most tokens of prompts in a pass of which all logits are wanted: rank 0 reads the logits of each.
const MOST_SCORED: usize = 32;

/// The slots of the cache, and the texts in them, which carry a `T` each.
///
/// A text is admitted into a free slot, its prompt is read in chunks, and then it grows token by token. What
/// a text leaves in its slot stays there until the slot or its memory is needed. A later text begins with the
/// tokens that it has in common with any slot.
///
/// If a text grows and there is no memory, what was left longest ago goes, and then the text that was
/// admitted last: it waits for a slot again, before all new texts, and is computed again. The first text
/// never goes, so all end.
#[derive(Debug)]
pub(crate) struct Scheduler<T> {
    slots: Vec<CacheSlot<T>>,
    /// The texts that had a slot and wait for one again, the first admitted first.
    preempted: Vec<SlotText<T>>,
    memory: CacheBudget,
    config: Config,
    /// The most tokens of prompts in a pass.
    chunk: usize,
    /// Whether a cache can be cut back to any of its tokens.
    can_be_cut: bool,
    /// How many texts were admitted or have ended so far: a clock.
    turn: u64,
    /// How many texts have lost their slots so far.
    preemptions: u64,
}

/// The bytes of the cache, of which texts take as many as their tokens need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheBudget {
    /// The most tokens of a text.
    pub(crate) room: usize,
    /// The tokens for which a text takes memory at a time.
    pub(crate) block: usize,
    /// The bytes of a text in its first block, with those that it takes whatever its length.
    pub(crate) first: usize,
    /// The bytes of each block more.
    pub(crate) next: usize,
    /// The bytes of all texts.
    pub(crate) most: usize,
}

impl CacheBudget {
    /// Memory for all that slots have room for.
    const ALL: Self = Self { room: usize::MAX, block: usize::MAX, first: 0, next: 0, most: 0 };

    /// The bytes of a text of so many tokens.
    pub(crate) fn of_text(&self, tokens: usize) -> usize {
        match tokens.div_ceil(self.block).checked_sub(1) {
            Some(more) => self.first.saturating_add(more.saturating_mul(self.next)),
            None => 0,
        }
    }
}

/// A slot of the cache.
#[derive(Debug)]
struct CacheSlot<T> {
    /// The tokens that the cache has.
    cached: Vec<u32>,
    /// The longest text by whose length their positions were turned.
    length: usize,
    salt: u64,
    adapters: RowAdapters,
    /// When its last text ended.
    last_used: u64,
    /// Whether the ranks have yet to forget what it had.
    is_stale: bool,
    text: Option<SlotText<T>>,
}

/// A text that is being read or written.
#[derive(Debug)]
pub(crate) struct SlotText<T> {
    /// The prompt, which is not empty, and what was written: as many tokens as fit into a slot.
    tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub(crate) prompt: usize,
    /// Texts of unlike salts share nothing.
    pub(crate) salt: u64,
    /// Nor do those of unlike adapters, whose keys and values differ.
    pub(crate) adapters: RowAdapters,
    /// Whether the logits of all of the prompt's tokens are wanted.
    pub(crate) wants_all: bool,
    /// The tokens of the prompt that were not computed; `None` until the first of the others are.
    reused: Option<usize>,
    /// When it was admitted.
    admitted: u64,
    pub(crate) carried: T,
}

impl<T> SlotText<T> {
    /// A text that begins with a prompt, and shares it with all others.
    pub(crate) fn new(mut prompt: Vec<u32>, carried: T) -> Self {
        prompt.shrink_to_fit();
        Self {
            prompt: prompt.len(),
            tokens: prompt,
            salt: 0,
            adapters: RowAdapters::All,
            wants_all: false,
            reused: None,
            admitted: 0,
            carried,
        }
    }
}

/// What a pass computes.
#[derive(Debug, Default)]
pub(crate) struct PassPlan {
    pub(crate) step: DecodeStep,
    /// Where each text of which logits are wanted has them, in the order of slots.
    pub(crate) rows: Vec<PassRows>,
    /// How many tokens of prompts it has.
    pub(crate) prompt: usize,
}

/// The logits of a text in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassRows {
    pub(crate) slot: usize,
    /// The first row.
    pub(crate) first: usize,
    /// How many there are.
    pub(crate) rows: usize,
    /// The place in the text of the token that the first one follows.
    pub(crate) start: usize,
    /// Whether the last row says what follows the text so far.
    pub(crate) is_next: bool,
}

impl<T> Scheduler<T> {
    /// Free slots for texts of up to `room` tokens of a model, of which up to `chunk` tokens of prompts are
    /// computed in a pass.
    pub(crate) fn new(config: &Config, slots: usize, room: usize, chunk: usize) -> Self {
        let empty = |_| CacheSlot {
            cached: Vec::new(),
            length: 0,
            salt: 0,
            adapters: RowAdapters::All,
            last_used: 0,
            is_stale: false,
            text: None,
        };
        Self {
            slots: (0..slots).map(empty).collect(),
            preempted: Vec::new(),
            memory: CacheBudget::ALL,
            config: config.clone(),
            chunk: chunk.max(1),
            can_be_cut: Cache::of(config, room).can_be_cut(),
            turn: 0,
            preemptions: 0,
        }
    }

    /// Keeps the slots within a budget, which has room for the longest text.
    pub(crate) fn within(self, memory: CacheBudget) -> Self {
        Self { memory, ..self }
    }

    /// Whether a text with a prompt of so many tokens can be admitted.
    pub(crate) fn has_room(&self, prompt: usize) -> bool {
        self.preempted.is_empty() && self.slots.iter().any(|slot| slot.text.is_none()) && self.fits(prompt)
    }

    /// Whether there is memory for one text more of so many tokens if nothing is kept of ended ones, and each
    /// can grow once.
    fn fits(&self, tokens: usize) -> bool {
        let memory = &self.memory;
        let grown = |slot: &CacheSlot<T>| {
            memory.of_text(Self::needed(slot).saturating_add(memory.block).min(memory.room))
        };
        let texts = self.slots.iter().filter(|slot| slot.text.is_some()).map(grown);
        texts.fold(memory.of_text(tokens), usize::saturating_add) <= memory.most
    }

    /// The tokens that a slot has, or needs to have room for.
    fn needed(slot: &CacheSlot<T>) -> usize {
        slot.cached.len().max(slot.text.as_ref().map_or(0, |text| text.tokens.len()))
    }

    /// The bytes that a slot has, or needs to go on.
    fn taken(&self, slot: &CacheSlot<T>) -> usize {
        self.memory.of_text(Self::needed(slot))
    }

    /// The bytes that slots have.
    pub(crate) fn used_bytes(&self) -> usize {
        self.slots.iter().map(|slot| self.memory.of_text(slot.cached.len())).fold(0, usize::saturating_add)
    }

    /// The bytes of all slots, with those that texts need to go on.
    fn bytes(&self) -> usize {
        self.slots.iter().map(|slot| self.taken(slot)).fold(0, usize::saturating_add)
    }

    /// The texts that wait for a slot again, and how many have lost theirs so far.
    pub(crate) fn preempted(&self) -> (usize, u64) {
        (self.preempted.len(), self.preemptions)
    }

    /// The tokens of texts that are still to be computed: those of a text that has its slot just now, and all
    /// of one that waits for a slot again.
    pub(crate) fn unread(&self) -> usize {
        let left = |slot: &CacheSlot<T>| {
            let text = slot.text.as_ref()?;
            let read = if text.reused.is_some() { slot.cached.len() } else { 0 };
            Some(text.tokens.len().saturating_sub(read))
        };
        let waiting = self.preempted.iter().map(|text| text.tokens.len());
        self.slots.iter().filter_map(left).chain(waiting).sum()
    }

    /// The tokens of all texts with this one, but for those of its prompt that a slot has.
    pub(crate) fn load_with(&self, new: &SlotText<T>) -> usize {
        let known = self.slots.iter().map(|slot| self.common(slot, slot.cached.len(), new, false));
        let texts = self.slots.iter().filter_map(|slot| Some(slot.text.as_ref()?.tokens.len()));
        texts.sum::<usize>() + new.prompt - known.max().unwrap_or(0)
    }

    /// What the text in a slot carries.
    pub(crate) fn carried(&self, slot: usize) -> Option<&T> {
        self.slots.get(slot)?.text.as_ref().map(|text| &text.carried)
    }

    /// What the text in a slot carries, and how many tokens of its prompt were not computed.
    pub(crate) fn text(&mut self, slot: usize) -> Option<(&mut T, usize)> {
        let text = self.slots.get_mut(slot)?.text.as_mut()?;
        Some((&mut text.carried, text.reused.unwrap_or(0)))
    }

    /// Gives a text a free slot, if there is [room](Self::has_room).
    pub(crate) fn admit(&mut self, mut text: SlotText<T>) {
        text.admitted = self.turn;
        self.turn += 1;
        self.place(text);
    }

    fn place(&mut self, text: SlotText<T>) {
        let free = |slot: &&CacheSlot<T>| slot.text.is_none();
        // A slot is taken for what it has if the text begins with most of that. Otherwise the one that was
        // used longest ago is, so that what others have stays; the tokens in common are copied.
        let shared = |(at, slot): (usize, &CacheSlot<T>)| {
            let common = self.common(slot, slot.cached.len(), &text, true);
            (common > 0 && 2 * common >= slot.cached.len()).then_some((common, at))
        };
        let all = || self.slots.iter().enumerate().filter(|(_, slot)| free(slot));
        let best = all().filter_map(shared).max_by_key(|&(common, at)| (common, usize::MAX - at));
        let oldest = || all().min_by_key(|(_, slot)| (!slot.cached.is_empty(), slot.last_used));
        let Some(at) = best.map(|(_, at)| at).or_else(|| oldest().map(|(at, _)| at)) else { return };
        let there = self.slots[at].cached.len();
        if there > text.tokens.len() && !self.fits(there) {
            self.forget(at);
        }
        self.slots[at].text = Some(text);
    }

    /// Makes room for what texts have become, and gives slots to those that have lost theirs.
    fn make_room(&mut self) {
        self.shrink();
        while let Some(text) = self.preempted.first()
            && self.slots.iter().any(|slot| slot.text.is_none())
            && self.fits(text.tokens.len())
        {
            let text = self.preempted.remove(0);
            self.place(text);
        }
        self.shrink();
    }

    /// Frees memory until there is enough: what ended texts have left, and then what the text has that was
    /// admitted last.
    fn shrink(&mut self) {
        while self.bytes() > self.memory.most {
            let all = || self.slots.iter().enumerate();
            let left = all().filter(|(_, slot)| slot.text.is_none() && !slot.cached.is_empty());
            if let Some((at, _)) = left.min_by_key(|(_, slot)| slot.last_used) {
                self.forget(at);
                continue;
            }
            let texts = all().filter_map(|(at, slot)| Some((slot.text.as_ref()?.admitted, at)));
            match texts.clone().max() {
                Some((_, last)) if texts.count() > 1 => self.preempt(last),
                _ => return,
            }
        }
    }

    /// Takes the text out of a slot. It keeps all but what was computed.
    fn preempt(&mut self, at: usize) {
        self.slots[at].last_used = self.turn;
        let Some(mut text) = self.slots[at].text.take() else { return };
        text.reused = None;
        let place = self.preempted.partition_point(|other| other.admitted < text.admitted);
        self.preempted.insert(place, text);
        self.preemptions += 1;
    }

    /// Empties a slot.
    fn forget(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.is_stale |= !slot.cached.is_empty();
        slot.cached = Vec::new();
    }

    /// Adds the token that follows the text in a slot.
    pub(crate) fn write(&mut self, slot: usize, token: u32) {
        if let Some(text) = self.slots.get_mut(slot).and_then(|slot| slot.text.as_mut()) {
            text.tokens.push(token);
        }
    }

    /// Ends the text in a slot, and leaves what the cache has of it to later texts, if they may begin with
    /// that.
    pub(crate) fn end(&mut self, at: usize, is_sound: bool) -> Option<T> {
        let slot = self.slots.get_mut(at)?;
        let text = slot.text.take()?;
        if text.reused.is_some() {
            slot.last_used = self.turn;
            self.turn += 1;
            if !is_sound {
                self.forget(at);
            }
        }
        Some(text.carried)
    }

    /// Ends the texts for which `ends` says so, and returns how many there were.
    pub(crate) fn end_where(&mut self, is_sound: bool, ends: impl Fn(&T) -> bool) -> usize {
        let ended = |slot: &CacheSlot<T>| slot.text.as_ref().is_some_and(|text| ends(&text.carried));
        let ended: Vec<usize> = (0..self.slots.len()).filter(|&at| ended(&self.slots[at])).collect();
        let waited = self.preempted.len();
        self.preempted.retain(|text| !ends(&text.carried));
        ended.into_iter().filter_map(|at| self.end(at, is_sound)).count() + waited - self.preempted.len()
    }

    /// How many of a text's first tokens the cache of a slot has as the text needs them, among its first
    /// `kept` ones: all but one at most.
    fn common(&self, slot: &CacheSlot<T>, kept: usize, text: &SlotText<T>, is_own: bool) -> usize {
        let (length, most) = (text.tokens.len(), text.tokens.len().saturating_sub(1));
        let [shorter, longer] = [length.min(slot.length), length.max(slot.length)];
        let turns = self.config.turns_by_length(longer) || self.config.turns_anew(shorter, longer);
        let is_alike = (slot.salt, slot.adapters) == (text.salt, text.adapters);
        if !is_alike || text.wants_all || turns {
            return 0;
        }
        let both = slot.cached.iter().take(kept).zip(text.tokens.iter().take(most));
        let common = both.take_while(|(cached, token)| cached == token).count();
        let is_whole = is_own && common == slot.cached.len();
        let fits = (self.can_be_cut || is_whole) && !self.config.turns_anew(common, length);
        if fits { common } else { 0 }
    }

    /// The next pass: the next token of each text whose prompt is read, and a chunk of the prompts, the
    /// oldest text first.
    ///
    /// A prompt is computed at once where its positions depend on its length, and up to the length behind
    /// which they do not.
    pub(crate) fn plan(&mut self) -> PassPlan {
        self.make_room();
        // What copies can have: the tokens that are there before the pass.
        let mut kept: Vec<usize> = self.slots.iter().map(|slot| slot.cached.len()).collect();
        let mut spans: Vec<Option<(SlotPast, usize)>> = vec![None; self.slots.len()];
        let mut reading = Vec::new();
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let Some(text) = &slot.text else { continue };
            let (read, length) = (slot.cached.len(), text.tokens.len());
            if text.reused.is_some() && self.config.turns_anew(read, length) {
                // Where positions turn otherwise in a longer text, its keys are computed again.
                slot.cached.clear();
                kept[at] = 0;
            }
            if text.reused.is_some() && slot.cached.len() >= text.prompt && slot.cached.len() + 1 == length {
                spans[at] = Some((SlotPast::All, 1));
            } else {
                reading.push((text.admitted, at));
            }
        }
        reading.sort_unstable();
        let (mut left, mut scored) = (self.chunk, MOST_SCORED);
        for (_, at) in reading {
            if left == 0 {
                break;
            }
            let is_scored = |text: &SlotText<T>| text.wants_all && text.tokens.len() == text.prompt;
            let is_scored = self.slots[at].text.as_ref().is_some_and(is_scored);
            if is_scored && scored == 0 {
                continue;
            }
            let past = self.begin(at, &mut kept);
            let CacheSlot { cached, text: Some(text), .. } = &self.slots[at] else { continue };
            let (read, length) = (cached.len(), text.tokens.len());
            let mut count = (length - read).min(left).min(if is_scored { scored } else { left });
            if self.config.turns_by_length(text.prompt) {
                count = length - read;
            }
            while self.config.turns_anew(read + count, length) {
                count += 1;
            }
            left = left.saturating_sub(count);
            if is_scored {
                scored = scored.saturating_sub(count);
            }
            spans[at] = Some((past, count));
        }
        self.planned(&spans, self.chunk - left)
    }

    /// What is before the next tokens of the text in a slot. If these are its first ones, it takes the slot.
    fn begin(&mut self, at: usize, kept: &mut [usize]) -> SlotPast {
        let slot = &self.slots[at];
        let Some(text) = &slot.text else { return SlotPast::All };
        if text.reused.is_some() {
            return if slot.cached.is_empty() { SlotPast::Nothing } else { SlotPast::All };
        }
        let own = self.common(slot, kept[at], text, true);
        let of_slot = |(from, slot): (usize, &CacheSlot<T>)| {
            (self.common(slot, kept[from], text, from == at), usize::MAX - from)
        };
        let (most, from) = self.slots.iter().enumerate().map(of_slot).max().unwrap_or((0, 0));
        let (common, from) = if most > own { (most, usize::MAX - from) } else { (own, at) };
        let length = if common == 0 { 0 } else { self.slots[from].length };
        if common > 0 {
            self.slots[from].last_used = self.turn;
        }
        kept[at] = 0;
        let slot = &mut self.slots[at];
        if let Some(text) = &mut slot.text {
            text.reused = Some(common);
            slot.cached.clear();
            slot.cached.extend(&text.tokens[..common]);
            (slot.length, slot.salt, slot.adapters) = (length, text.salt, text.adapters);
        }
        match common {
            0 => SlotPast::Nothing,
            _ => SlotPast::Prefix { slot: from, tokens: common },
        }
    }

    /// The pass of so many tokens of each slot, which takes note that the cache has them.
    fn planned(&mut self, spans: &[Option<(SlotPast, usize)>], prompt: usize) -> PassPlan {
        let mut plan = PassPlan { prompt, ..PassPlan::default() };
        let computes = spans.iter().any(Option::is_some);
        let mut first = 0;
        for (at, (slot, span)) in self.slots.iter_mut().zip(spans).enumerate() {
            let (Some((past, count)), Some(text)) = (*span, &slot.text) else {
                if computes && std::mem::take(&mut slot.is_stale) {
                    plan.step.push_empty(at);
                }
                continue;
            };
            slot.is_stale = false;
            let read = slot.cached.len();
            let new = &text.tokens[read..read + count];
            let is_next = read + count == text.tokens.len();
            let rows = match text.wants_all && text.tokens.len() == text.prompt {
                true => count,
                false => usize::from(is_next),
            };
            plan.step.push_behind(at, past, new, rows, text.adapters);
            if rows > 0 {
                plan.rows.push(PassRows { slot: at, first, rows, start: read + count - rows, is_next });
            }
            first += rows;
            slot.cached.extend(new);
            slot.length = slot.length.max(text.tokens.len());
        }
        plan
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
