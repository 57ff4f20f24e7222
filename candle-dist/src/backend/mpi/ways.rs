//! Algorithms that move blocks among members: direct exchange, Bruck's, and binomial trees.
use super::plan::{ElementRun, PlanBuffer, PlanMessage, Planner};
use smallvec::SmallVec;

/// Returns the message of these blocks, unless it is empty.
fn letter(peer: usize, blocks: impl IntoIterator<Item = ElementRun>) -> Option<PlanMessage> {
    let mut places: SmallVec<[ElementRun; 1]> = SmallVec::new();
    for block in blocks.into_iter().filter(|block| block.len > 0) {
        match places.last_mut() {
            Some(last) if last.buffer == block.buffer && last.start + last.len == block.start => {
                last.len += block.len;
            }
            _ => places.push(block),
        }
    }
    (!places.is_empty()).then_some(PlanMessage { peer, places, letter: true })
}

impl Planner {
    /// Brings the block of every member `m` to `to[m]` on all; this member's own is at `own`.
    pub(super) fn spread(&mut self, own: ElementRun, to: &[ElementRun]) {
        let me = self.me;
        let longest = to.iter().map(|place| place.len).max().unwrap_or(0);
        self.step();
        if me.size > 3 && self.is_small(longest) {
            // After the step of distance d, a member has the blocks of the 2d members from itself on.
            let block = |i: usize| if i == 0 { own } else { to[me.after(i)] };
            let mut distance = 1;
            while distance < me.size {
                let count = distance.min(me.size - distance);
                let step = self.step();
                step.sends.extend(letter(me.behind(distance), (0..count).map(block)));
                step.receives.extend(letter(me.after(distance), (distance..distance + count).map(block)));
                distance *= 2;
            }
        } else {
            let others: Vec<usize> = me.others().collect();
            self.send_all(others.iter().map(|&member| (member, own)));
            self.receive_all(others.iter().map(|&member| (member, to[member])));
        }
        if own != to[me.rank] {
            self.meanwhile(own, to[me.rank]);
        }
    }

    /// Brings the block `from[d]` of every member `s` to `to[s]` on member `d`; it has `len(s, d)` elements.
    pub(super) fn exchange(
        &mut self,
        from: &[ElementRun],
        to: &[ElementRun],
        len: impl Fn(usize, usize) -> usize,
    ) {
        let me = self.me;
        let pairs = (0..me.size).flat_map(|from| (0..me.size).map(move |to| (from, to)));
        let longest = if me.size > 3 { pairs.map(|(from, to)| len(from, to)).max().unwrap_or(0) } else { 0 };
        if me.size > 3 && self.is_small(longest) {
            self.bruck(from, to, len);
        } else {
            let others: Vec<usize> = me.others().collect();
            self.send_all(others.iter().map(|&member| (member, from[member])));
            self.receive_all(others.iter().map(|&member| (member, to[member])));
        }
        if from[me.rank] != to[me.rank] {
            self.meanwhile(from[me.rank], to[me.rank]);
        }
    }

    /// Bruck's all_to_all: a block with `i` members to go is forwarded in the steps of the bits of `i`.
    fn bruck(&mut self, from: &[ElementRun], to: &[ElementRun], len: impl Fn(usize, usize) -> usize) {
        let me = self.me;
        // The block in slot i is for the member that is i after its source.
        let mut slots: Vec<ElementRun> = (0..me.size).map(|i| from[me.after(i)]).collect();
        let mut distance = 1;
        while distance < me.size {
            let moved: Vec<usize> = (1..me.size).filter(|i| i & distance != 0).collect();
            let sent = letter(me.after(distance), moved.iter().map(|&i| slots[i]));
            for &i in &moved {
                let gone = i & (2 * distance - 1);
                let giver = me.behind(gone);
                slots[i] = match gone == i {
                    true => to[giver],
                    false => self.scratch([len(giver, (giver + i) % me.size)])[0],
                };
            }
            let received = letter(me.behind(distance), moved.iter().map(|&i| slots[i]));
            let step = self.step();
            step.sends.extend(sent);
            step.receives.extend(received);
            distance *= 2;
        }
    }

    /// Returns this member's place in a tree from `root`, and the distance to its parent: a power of two.
    fn in_tree(&self, root: usize) -> (usize, usize) {
        let place = self.me.behind(root);
        let up = if place == 0 { self.me.size.next_power_of_two() } else { 1 << place.trailing_zeros() };
        (place, up)
    }

    /// Returns the member at a place of the tree from `root`.
    fn at(&self, root: usize, place: usize) -> usize {
        (place + root) % self.me.size
    }

    /// A binomial tree down: `whole` on the root comes to `whole` on the others.
    pub(super) fn tree_broadcast(&mut self, root: usize, whole: ElementRun) {
        let (place, up) = self.in_tree(root);
        self.step();
        if place > 0 {
            let parent = self.at(root, place - up);
            self.receive_all([(parent, whole)]);
            self.step();
        }
        let mut distance = up / 2;
        while distance > 0 {
            if place + distance < self.me.size {
                let child = self.at(root, place + distance);
                self.send_all([(child, whole)]);
            }
            distance /= 2;
        }
    }

    /// A binomial tree up: the blocks of all members, of `lens`, come to `to` on the root; this member's own is at
    /// `own`.
    pub(super) fn tree_gather(&mut self, root: usize, own: ElementRun, lens: &[usize], to: &[ElementRun]) {
        let size = self.me.size;
        let (place, up) = self.in_tree(root);
        // The blocks that are here, by place in the tree: this member's block, then those below it.
        let mut held = vec![own];
        let mut distance = 1;
        while distance < up {
            let below = (place + distance).min(size)..(place + 2 * distance).min(size);
            if !below.is_empty() {
                let members: Vec<usize> = below.map(|place| self.at(root, place)).collect();
                let blocks = match place {
                    0 => members.iter().map(|&member| to[member]).collect(),
                    _ => self.scratch(members.iter().map(|&member| lens[member])),
                };
                let received = letter(members[0], blocks.iter().copied());
                self.step().receives.extend(received);
                held.extend(blocks);
            }
            distance *= 2;
        }
        let sent = if place > 0 { letter(self.at(root, place - up), held) } else { None };
        self.step().sends.extend(sent);
    }

    /// A binomial tree down: the root's blocks `from`, of `lens`, come to `to` on each member.
    pub(super) fn tree_scatter(&mut self, root: usize, from: &[ElementRun], lens: &[usize], to: ElementRun) {
        let size = self.me.size;
        let (place, up) = self.in_tree(root);
        self.step();
        // By place of the tree, the blocks of this member and those below it.
        let members: Vec<usize> = (place..(place + up).min(size)).map(|place| self.at(root, place)).collect();
        let mut blocks: Vec<ElementRun> = members.iter().map(|&member| from[member]).collect();
        if place > 0 {
            let parent = self.at(root, place - up);
            blocks = self.scratch(members[1..].iter().map(|&member| lens[member]));
            blocks.insert(0, to);
            self.step().receives.extend(letter(parent, blocks.iter().copied()));
            self.step();
        }
        let mut distance = up / 2;
        while distance > 0 {
            if distance < blocks.len() {
                let below = &blocks[distance..(2 * distance).min(blocks.len())];
                let child = self.at(root, place + distance);
                let sent = letter(child, below.iter().copied());
                self.last().sends.extend(sent);
            }
            distance /= 2;
        }
    }
}

impl PlanBuffer {
    /// The number of buffers.
    pub(super) const COUNT: usize = 3;
}
