//! The scheduler, against slots that only remember tokens.
use super::{CacheBudget, PassPlan, RowAdapters, Scheduler, SlotText};
use crate::config::{Config, RopeScaling};
use crate::random_model;
use crate::step::SlotPast;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

const ROOM: usize = 64;

/// Slots that have tokens alone, with what they were turned by, and the kind of their text.
struct Memory(Vec<Vec<(u32, bool, u64)>>, usize);

impl Memory {
    /// Does what ranks do in a pass; `is_turned` says how positions of a text are.
    fn run(&mut self, plan: &PassPlan, tokens: &dyn Fn(usize) -> (Vec<u32>, bool, u64)) {
        let before = self.0.clone();
        let mut at = 0;
        let words = plan.step.words();
        let all = &words[words.len() - plan.step.len()..];
        for span in plan.step.spans() {
            if span.tokens == 0 {
                assert!(span.past == SlotPast::Nothing && !self.0[span.slot].is_empty());
                self.0[span.slot].clear();
                continue;
            }
            let (text, is_turned, kind) = tokens(span.slot);
            let memory = &mut self.0[span.slot];
            match span.past {
                SlotPast::All => assert!(!memory.is_empty()),
                SlotPast::Nothing => memory.clear(),
                SlotPast::Prefix { slot, tokens } => *memory = before[slot][..tokens].to_vec(),
            }
            // What positions are turned by is known by the length of a text, and not of each token.
            assert!(!is_turned || !(1..=self.1).contains(&memory.len()));
            memory.extend(all[at..at + span.tokens].iter().map(|&token| (token, is_turned, kind)));
            at += span.tokens;
            assert!(memory.len() <= ROOM);
            let want: Vec<_> = text[..memory.len()].iter().map(|&token| (token, is_turned, kind)).collect();
            assert_eq!(
                *memory, want,
                "a slot has the tokens of its text, turned by its length, and of its kind"
            );
        }
    }
}

struct Texts {
    scheduler: Scheduler<usize>,
    memory: Memory,
    /// The tokens of each text that was admitted, its kind, and how long it becomes.
    texts: Vec<(Vec<u32>, u64, usize)>,
    of_slot: Vec<Option<usize>>,
    learned: usize,
    reused: usize,
}

impl Texts {
    fn new(config: &Config, slots: usize, chunk: usize, learned: usize) -> Self {
        Self {
            scheduler: Scheduler::new(config, slots, ROOM, chunk),
            memory: Memory(vec![Vec::new(); slots], learned),
            texts: Vec::new(),
            of_slot: vec![None; slots],
            learned,
            reused: 0,
        }
    }

    /// Admits a text. Those of unlike kinds share nothing: odd ones have an adapter, and two have a salt.
    fn admit(&mut self, prompt: Vec<u32>, kind: u64, length: usize) {
        let number = self.texts.len();
        self.texts.push((prompt.clone(), kind, length));
        let adapters = if kind % 2 == 1 { RowAdapters::One(0) } else { RowAdapters::Model };
        self.scheduler.admit(SlotText { salt: kind / 2, adapters, ..SlotText::new(prompt, number) });
        self.look();
    }

    /// Looks which texts slots have.
    fn look(&mut self) {
        let slots = self.scheduler.slots.iter();
        self.of_slot = slots.map(|slot| slot.text.as_ref().map(|text| text.carried)).collect();
    }

    /// The slots that have texts.
    fn texts_now(&self) -> Vec<usize> {
        (0..self.of_slot.len()).filter(|&at| self.of_slot[at].is_some()).collect()
    }

    fn pass(&mut self, next: &mut dyn FnMut() -> u32) -> PassPlan {
        let plan = self.scheduler.plan();
        self.look();
        let (texts, of_slot, learned) = (&self.texts, &self.of_slot, self.learned);
        self.memory.run(&plan, &|slot| {
            let (tokens, kind, _) = texts[of_slot[slot].unwrap()].clone();
            let is_turned = tokens.len() > learned;
            (tokens, is_turned, kind)
        });
        let memory = self.scheduler.memory;
        let taken: usize = self.memory.0.iter().map(|slot| memory.of_text(slot.len())).sum();
        assert!(taken <= memory.most && self.scheduler.bytes() <= memory.most, "{taken} bytes");
        for rows in plan.rows.clone() {
            assert!(rows.is_next);
            let number = self.of_slot[rows.slot].unwrap();
            let (text, _, length) = &mut self.texts[number];
            if text.len() == *length {
                self.reused += self.scheduler.text(rows.slot).unwrap().1;
                assert_eq!(self.scheduler.end(rows.slot, true), Some(number));
                self.of_slot[rows.slot] = None;
            } else {
                let token = next();
                text.push(token);
                self.scheduler.write(rows.slot, token);
            }
        }
        plan
    }
}

fn longrope(learned: usize) -> Config {
    let scaling = RopeScaling::Longrope {
        original_max_position_embeddings: learned,
        short_factor: vec![1.0; 16],
        long_factor: vec![2.0; 16],
        attention_factor: 1.0,
    };
    Config { rope_scaling: Some(scaling), ..random_model::config() }
}

#[test]
fn random_texts_get_what_they_would_compute_alone() {
    let (mut passes, mut texts, mut reused, mut preempted) = (0, 0, 0, 0);
    for seed in 0..400 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut below = move |most: u32| (rng.next_u32() % most) as usize;
        let (slots, chunk) = (1 + below(5), 1 + below(12));
        let budget = budget(1 + below(9), below(3), ROOM + below(2 * ROOM as u32));
        let is_bounded = seed % 2 == 0;
        let learned = if seed % 3 == 0 { 24 } else { usize::MAX };
        let config = if learned == 24 { longrope(24) } else { random_model::config() };
        let mut all = Texts::new(&config, slots, chunk, learned);
        if is_bounded {
            all.scheduler = all.scheduler.within(budget);
        }
        let mut next = ChaCha8Rng::seed_from_u64(!seed);
        let mut next = || next.next_u32() % 2;
        let mut came = 0;
        while came < 30 || !all.texts_now().is_empty() || all.scheduler.preempted().0 > 0 {
            while came < 30 && below(3) > 0 {
                // Prompts that often begin alike, or go on from what was written.
                let from = below(1 + all.texts.len() as u32);
                let mut prompt = all.texts.get(from).map_or(Vec::new(), |(text, ..)| text.clone());
                prompt.truncate(below(48));
                (0..=below(12)).for_each(|_| prompt.push(below(2) as u32));
                prompt.truncate(60);
                if !all.scheduler.has_room(prompt.len()) {
                    break;
                }
                let length =
                    prompt.len() + below((ROOM - prompt.len()) as u32 / if is_bounded { 1 } else { 2 });
                let kind = below(4) as u64;
                all.admit(prompt, kind, length);
                came += 1;
            }
            let leaves = all.texts_now().get(below(5)).copied();
            if let Some(slot) = leaves.filter(|_| below(9) == 0) {
                all.scheduler.end(slot, below(2) == 0);
                all.look();
                if below(4) == 0 {
                    // Those that wait for a slot again go too.
                    all.scheduler.end_where(true, |_| true);
                    all.look();
                    assert_eq!(all.scheduler.preempted().0, 0);
                }
                if below(2) == 0 {
                    continue;
                }
            }
            let running = all.texts_now().len() + all.scheduler.preempted().0;
            let decoding = all
                .scheduler
                .slots
                .iter()
                .filter(|slot| {
                    slot.text.as_ref().is_some_and(|text| {
                        text.reused.is_some()
                            && slot.cached.len() >= text.prompt
                            && !(slot.cached.len() <= learned && text.tokens.len() > learned)
                    })
                })
                .count();
            let plan = all.pass(&mut next);
            passes += 1;
            // Each text that decodes has its token in each pass, and prompts no more than a chunk.
            assert!(is_bounded || plan.rows.iter().filter(|rows| rows.is_next).count() >= decoding);
            assert!(
                is_bounded || plan.step.len() <= decoding + chunk || learned == 24,
                "{}",
                plan.step.len()
            );
            assert!(running == 0 || !plan.step.is_empty());
            for slot in &all.scheduler.slots {
                assert!(slot.cached.len() <= ROOM);
            }
        }
        assert!(all.scheduler.plan().step.is_empty());
        texts += came;
        reused += all.reused;
        preempted += all.scheduler.preempted().1;
    }
    assert!(reused > texts, "{reused} tokens reused in {texts} texts and {passes} passes");
    assert!(preempted > 200, "{preempted} texts were computed again");
}

/// Room for `rooms` tokens in blocks, where each text takes as many bytes as tokens, and some more.
fn budget(block: usize, more: usize, rooms: usize) -> CacheBudget {
    let budget = CacheBudget { room: ROOM, block, first: block + more, next: block, most: 0 };
    CacheBudget { most: budget.of_text(ROOM).max(rooms), ..budget }
}

#[test]
fn more_texts_have_slots_than_there_is_memory_for_whole_ones() {
    let mut all = Texts::new(&random_model::config(), 12, 100, usize::MAX);
    // A slot that is reserved for the whole length leaves memory for two.
    all.scheduler = all.scheduler.within(budget(4, 0, 2 * ROOM));
    while all.scheduler.has_room(6) {
        let first = 100 * all.texts.len() as u32;
        all.admit((first..first + 6).collect(), 0, 8);
    }
    assert_eq!(all.texts.len(), 11, "each of 11 texts has two blocks, and can get one more in turn");
    let plan = all.pass(&mut || 1);
    assert_eq!((plan.step.spans().len(), all.scheduler.preempted()), (11, (0, 0)));
}

#[test]
fn texts_that_cannot_grow_leave_their_memory_to_others() {
    let mut all = Texts::new(&random_model::config(), 3, 100, usize::MAX);
    // A block is the whole room of a text.
    all.scheduler = all.scheduler.within(budget(ROOM, 0, 2 * ROOM));
    for first in 0..2 {
        assert!(all.scheduler.has_room(ROOM));
        all.admit(vec![first; 5], 0, 9);
    }
    assert!(!all.scheduler.has_room(1));
}

#[test]
fn the_last_text_leaves_for_the_first_and_all_end() {
    let mut all = Texts::new(&random_model::config(), 4, 100, usize::MAX);
    all.scheduler = all.scheduler.within(budget(8, 0, ROOM));
    for first in 0..4 {
        all.admit(vec![first; 7], 0, ROOM);
    }
    let (mut ends, mut passes) = (Vec::new(), 0);
    while all.scheduler.bytes() > 0 && !(all.texts_now().is_empty() && all.scheduler.preempted().0 == 0) {
        let before: Vec<usize> = all.of_slot.iter().flatten().copied().collect();
        all.pass(&mut || 9);
        let now: Vec<usize> = all.of_slot.iter().flatten().copied().collect();
        let is_over = |text: &usize| all.texts[*text].0.len() == ROOM;
        ends.extend(before.into_iter().filter(|text| !now.contains(text) && is_over(text)));
        passes += 1;
        assert!(passes < 1000, "no text ends");
    }
    assert_eq!(ends, [0, 1, 2, 3], "texts end in the order in which they came");
    assert!(all.scheduler.preempted().1 >= 3);
}

#[test]
fn prompts_are_read_in_the_order_in_which_they_came() {
    let mut all = Texts::new(&random_model::config(), 3, 4, usize::MAX);
    for first in 1..=3 {
        all.admit(vec![first; 10], 0, 20);
    }
    let mut told = Vec::new();
    for _ in 0..8 {
        let plan = all.pass(&mut || 9);
        told.push(plan.step.spans().iter().map(|span| (span.slot, span.tokens)).collect::<Vec<_>>());
    }
    let want: [&[(usize, usize)]; 8] = [
        &[(0, 4)],
        &[(0, 4)],
        &[(0, 2), (1, 2)],
        &[(0, 1), (1, 4)],
        &[(0, 1), (1, 4)],
        &[(0, 1), (1, 1), (2, 4)],
        &[(0, 1), (1, 1), (2, 4)],
        &[(0, 1), (1, 1), (2, 2)],
    ];
    assert_eq!(told, want);
}

#[test]
fn few_tokens_of_prompts_are_scored_in_a_pass() {
    for (config, first, most) in [(random_model::config(), 32, 32), (longrope(40), 41, 50)] {
        let mut scheduler = Scheduler::new(&config, 3, ROOM, 100);
        for (at, wants_all) in [true, true, false].into_iter().enumerate() {
            let prompt = vec![at as u32; 50];
            scheduler.admit(SlotText { wants_all, ..SlotText::new(prompt, at) });
        }
        let mut pass = || {
            let plan = scheduler.plan();
            for rows in plan.rows.iter().filter(|rows| rows.is_next) {
                scheduler.end(rows.slot, true);
            }
            let spans = plan.step.spans().iter();
            (spans.map(|span| (span.slot, span.tokens, span.rows)).collect::<Vec<_>>(), plan.step.rows())
        };
        // One that is not scored waits for none that is.
        assert_eq!(pass(), (vec![(0, first, first), (2, 50, 1)], first + 1));
        let mut read = [first, 0];
        while read != [50, 50] {
            let (spans, rows) = pass();
            assert!(rows <= most && !spans.is_empty(), "{spans:?}");
            spans.iter().for_each(|&(slot, tokens, _)| read[slot] += tokens);
        }
    }
}

#[test]
fn texts_begin_with_what_slots_have_of_them() {
    let mut all = Texts::new(&random_model::config(), 3, 100, usize::MAX);
    let system: Vec<u32> = (0..20).collect();
    let with = |end: &[u32]| [&system[..], end].concat();
    let past = |all: &mut Texts| {
        let plan = all.pass(&mut || 50);
        plan.step.spans().iter().map(|span| (span.slot, span.past, span.tokens)).collect::<Vec<_>>()
    };
    let of = |slot, tokens| SlotPast::Prefix { slot, tokens };
    all.admit(with(&[30, 31]), 0, 24);
    assert_eq!(past(&mut all), [(0, SlotPast::Nothing, 22)]);
    // From a text that runs, and not the whole prompt even if all of it is there.
    all.admit(with(&[30]), 0, 21);
    assert_eq!(past(&mut all), [(0, SlotPast::All, 1), (1, of(0, 20), 1)]);
    // Of another salt.
    all.admit(with(&[30]), 1, 21);
    assert_eq!(past(&mut all), [(0, SlotPast::All, 1), (2, SlotPast::Nothing, 21)]);
    // All have ended. The turn of a conversation takes the slot of the one before.
    all.admit(with(&[30, 31, 50, 50, 60, 61]), 0, 26);
    assert_eq!(past(&mut all), [(0, of(0, 24), 2)]);
    // A text with little of what a slot has leaves it alone.
    all.admit(vec![0, 1, 2, 70], 0, 4);
    assert_eq!(past(&mut all), [(1, of(1, 3), 1)]);
    assert_eq!(all.scheduler.slots.iter().map(|slot| slot.cached.len()).collect::<Vec<_>>(), [26, 4, 21]);
}

#[test]
fn windows_and_states_are_continued_whole_or_not_at_all() {
    let mut config = random_model::config();
    config.parts.windows = vec![Some(8); config.num_hidden_layers];
    let mut all = Texts::new(&config, 2, 100, usize::MAX);
    let past = |all: &mut Texts| all.pass(&mut || 50).step.spans()[0].past;
    all.admit((0..20).collect(), 0, 20);
    assert_eq!(past(&mut all), SlotPast::Nothing);
    all.admit((0..21).collect(), 0, 21);
    assert_eq!(past(&mut all), SlotPast::Prefix { slot: 0, tokens: 20 });
    for prompt in [(0..21).collect(), (0..20).chain([99; 9]).collect::<Vec<u32>>()] {
        let length = prompt.len();
        all.admit(prompt, 0, length);
        assert_eq!(past(&mut all), SlotPast::Nothing);
    }
}

#[test]
fn the_load_of_a_text_is_what_it_would_add() {
    let mut all = Texts::new(&random_model::config(), 3, 100, usize::MAX);
    let new = |prompt: Vec<u32>, salt| SlotText { salt, ..SlotText::new(prompt, 0) };
    assert_eq!(all.scheduler.load_with(&new(vec![1; 9], 0)), 9);
    all.admit(vec![1; 20], 0, 20);
    all.pass(&mut || 1);
    // The text has ended; it keeps no slot, and its prompt is known to those of its kind.
    let loads = |all: &Texts| {
        [0, 1].map(|salt| {
            all.scheduler.load_with(&SlotText { adapters: RowAdapters::Model, ..new(vec![1; 12], salt) })
        })
    };
    assert_eq!(loads(&all), [1, 12]);
    all.admit(vec![7; 30], 0, 40);
    assert_eq!(loads(&all), [31, 42]);
}

#[test]
fn what_is_unread_is_what_passes_have_yet_to_compute() {
    let mut all = Texts::new(&random_model::config(), 2, 8, usize::MAX);
    all.admit(vec![1; 20], 0, 30);
    all.admit(vec![2; 10], 0, 30);
    let mut unread = vec![all.scheduler.unread()];
    for _ in 0..5 {
        all.pass(&mut || 9);
        unread.push(all.scheduler.unread());
    }
    // Each text that is written has one token that is not computed.
    assert_eq!(unread, [30, 22, 14, 7, 2, 2]);
    all.scheduler.end_where(true, |_| true);
    assert_eq!(all.scheduler.unread(), 0);
}

#[test]
fn what_a_failed_text_leaves_is_not_used() {
    let mut all = Texts::new(&random_model::config(), 1, 100, usize::MAX);
    for (is_sound, want) in [(false, SlotPast::Nothing), (true, SlotPast::Prefix { slot: 0, tokens: 4 })] {
        all.admit(vec![1; 5], 0, 9);
        all.pass(&mut || 1);
        all.scheduler.end(0, is_sound);
        all.admit(vec![1; 5], 0, 9);
        assert_eq!(all.pass(&mut || 1).step.spans()[0].past, want);
        all.scheduler.end(0, false);
    }
}
