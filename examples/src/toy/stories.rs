//! The text that is learned by default: short stories in plain English, made by a few rules.
//!
//! A story keeps its names and things, so a model that looks back predicts it better than one that does not. The text is the
//! same on every machine and in every version, and so are the losses that it gives.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The least size of the text. The default run draws 77 kB from it.
const BYTES: usize = 200_000;
const SEED: u64 = 1;

const WHO: [(&str, &str); 8] = [
    ("Anna", "she"),
    ("Ben", "he"),
    ("Clara", "she"),
    ("David", "he"),
    ("Emma", "she"),
    ("Frank", "he"),
    ("Grace", "she"),
    ("Henry", "he"),
];
const ANIMALS: [&str; 8] = ["fox", "bear", "owl", "hare", "goose", "mouse", "toad", "cat"];
const KINDS: [&str; 8] = ["small", "old", "quiet", "clever", "hungry", "brave", "sleepy", "young"];
const PLACES: [&str; 8] = ["river", "mill", "market", "orchard", "lake", "bridge", "forest", "harbor"];
const THINGS: [&str; 8] =
    ["silver bell", "warm coat", "long rope", "red lantern", "loaf of bread", "wooden boat", "key", "map"];
const TIMES: [&str; 4] = ["One morning", "On a cold day", "After the rain", "Late in summer"];

/// What may happen between the first and the last sentence of a story.
const MIDDLES: [&str; 8] = [
    "On the way {he} met {friend}, the {kind2} {animal2}.",
    "\"Have you seen a {thing}?\" asked {name}. \"Not today,\" said {friend}.",
    "The road to the {place} was long, and {name} was tired.",
    "At the {place} {he} looked behind every stone, but there was no {thing}.",
    "{friend} had a {thing}, and gave it to {name}.",
    "Then {he} sat down and thought about the {thing}.",
    "\"Come with me to the {place},\" said {friend} to {name}.",
    "It was getting dark, so {friend} held {name} by the hand.",
];
const ENDS: [&str; 4] = [
    "In the evening {name} came home with the {thing}, and {friend} was glad.",
    "They found the {thing} at last, and walked home from the {place} together.",
    "So the {kind} {animal} never found the {thing}, but {he} had found a friend.",
    "{name} thanked {friend}, and they were friends from that day on.",
];

/// The text.
pub fn text() -> String {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let mut text = String::with_capacity(BYTES + 1000);
    while text.len() < BYTES {
        text.push_str(&story(&mut rng));
    }
    text
}

fn story(rng: &mut ChaCha8Rng) -> String {
    let [name, friend] = two(rng).map(|place| WHO[place]);
    let ([animal, animal2], [kind, kind2]) = (two(rng).map(|place| ANIMALS[place]), two(rng).map(|place| KINDS[place]));
    let (place, thing, time) = (pick(rng, &PLACES), pick(rng, &THINGS), pick(rng, &TIMES));
    let first = "{time}, {name}, the {kind} {animal}, went to the {place} to look for a {thing}.";
    let [one, other] = two(rng).map(|place| MIDDLES[place]);
    let end = pick(rng, &ENDS);
    let words = [
        ("{time}", time),
        ("{name}", name.0),
        ("{he}", name.1),
        ("{friend}", friend.0),
        ("{animal2}", animal2),
        ("{animal}", animal),
        ("{kind2}", kind2),
        ("{kind}", kind),
        ("{place}", place),
        ("{thing}", thing),
    ];
    let story = format!("{first} {one} {other}\n{end}\n\n");
    words.iter().fold(story, |story, (from, to)| story.replace(from, to))
}

/// A place below `count`.
fn below(rng: &mut ChaCha8Rng, count: usize) -> usize {
    ((u64::from(rng.next_u32()) * count as u64) >> 32) as usize
}

fn pick<'a>(rng: &mut ChaCha8Rng, from: &[&'a str]) -> &'a str {
    from[below(rng, from.len())]
}

/// Two places of a table of eight, which are not the same.
fn two(rng: &mut ChaCha8Rng) -> [usize; 2] {
    let first = below(rng, 8);
    [first, (first + 1 + below(rng, 7)) % 8]
}
