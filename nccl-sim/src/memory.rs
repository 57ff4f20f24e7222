//! Device memory, with a record of the last accesses to every byte.
//!
//! Rules: CUDA Driver API, "Stream Ordered Memory Allocator". An access must lie after the allocation and before the
//! free in stream order. A free and an allocation therefore count as writes of the whole block.
use crate::clock::Clock;
use crate::report::{Kind, Site, fault};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

const ALIGNMENT: usize = 256;
/// The byte of fresh and freed memory: NaN in every float, out of range as an index.
pub(crate) const NOISE: u8 = 0xff;

/// One access to memory.
#[derive(Clone, Debug)]
struct Access {
    agent: usize,
    time: u64,
    site: Arc<Site>,
}

/// The last accesses to some bytes of a block.
#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    write: Access,
    /// Whether the bytes hold data, not noise.
    written: bool,
    reads: Vec<Access>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Live,
    Freed,
}

struct Block {
    device: usize,
    bytes: Box<[u8]>,
    start: usize,
    len: usize,
    state: State,
    /// The free that the program has asked for, with its stream.
    freeing: Option<(Arc<Site>, usize)>,
    segments: BTreeMap<usize, Segment>,
}

/// All device memory.
#[derive(Default)]
pub(crate) struct Memory {
    blocks: BTreeMap<u64, Block>,
    /// The blocks that are freed, by device, length and the stream of the free.
    free: HashMap<(usize, usize, usize), Vec<u64>>,
    /// The pairs of a device and another that may access its pool.
    open: HashSet<(usize, usize)>,
    /// The devices on which a kernel has accessed what it may not.
    broken: HashSet<usize>,
}

/// Who accesses memory, and what is ordered before.
pub(crate) struct Accessor<'a> {
    pub(crate) clock: &'a Clock,
    pub(crate) agent: usize,
    pub(crate) site: &'a Arc<Site>,
}

impl Accessor<'_> {
    fn access(&self) -> Access {
        Access { agent: self.agent, time: self.clock.get(self.agent), site: self.site.clone() }
    }

    fn check(&self, earlier: &Access, what: &str) {
        if self.clock.get(earlier.agent) < earlier.time {
            let key = format!("{what}: {} / {}", earlier.site.call(), self.site.call());
            fault(Kind::Race, key, format!("{what}: nothing orders {} before {}", earlier.site, self.site));
        }
    }
}

impl Block {
    fn range(&self, at: usize, len: usize) -> std::ops::Range<usize> {
        self.start + at..self.start + at + len
    }

    /// Splits the segments so that `at` is a border.
    fn split(&mut self, at: usize) {
        let Some((_, segment)) = self.segments.range_mut(..at).next_back() else { return };
        if segment.end > at {
            let tail = segment.clone();
            segment.end = at;
            self.segments.insert(at, tail);
        }
    }

    fn read(&mut self, at: usize, end: usize, who: &Accessor<'_>) {
        self.split(at);
        self.split(end);
        let mut unwritten = false;
        for (_, segment) in self.segments.range_mut(at..end) {
            who.check(&segment.write, "a read after a write");
            unwritten |= !segment.written;
            let access = who.access();
            match segment.reads.iter_mut().find(|read| read.agent == access.agent) {
                Some(read) => *read = access,
                None => segment.reads.push(access),
            }
        }
        if unwritten {
            let key = who.site.call().to_string();
            fault(Kind::Unwritten, key, format!("{} reads memory that nothing has written", who.site));
        }
    }

    fn write(&mut self, at: usize, end: usize, who: &Accessor<'_>, written: bool, what: [&str; 2]) {
        self.split(at);
        self.split(end);
        let old: Vec<usize> = self.segments.range(at..end).map(|(&start, _)| start).collect();
        for start in old {
            let Some(segment) = self.segments.remove(&start) else { continue };
            who.check(&segment.write, what[0]);
            segment.reads.iter().for_each(|read| who.check(read, what[1]));
        }
        if at < end {
            self.segments.insert(at, Segment { end, write: who.access(), written, reads: Vec::new() });
        }
    }
}

impl Memory {
    /// Reserves `len` bytes on a device at once. [`begin`](Self::begin) makes them usable in stream order.
    ///
    /// Memory freed on the same stream is reused as soon as CUDA may, so that a late reader is seen.
    pub(crate) fn reserve(&mut self, device: usize, len: usize, stream: usize) -> u64 {
        if let Some(address) = self.free.get_mut(&(device, len, stream)).and_then(Vec::pop) {
            if let Some(block) = self.blocks.get_mut(&address) {
                block.freeing = None;
            }
            return address;
        }
        let bytes = vec![NOISE; len + 2 * ALIGNMENT].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        let address = bytes.as_ptr() as u64 + start as u64;
        let block = Block {
            device,
            bytes,
            start,
            len,
            state: State::Freed,
            freeing: None,
            segments: BTreeMap::new(),
        };
        self.blocks.insert(address, block);
        address
    }

    /// The stream reaches the allocation.
    pub(crate) fn begin(&mut self, address: u64, who: &Accessor<'_>) {
        let Some(block) = self.blocks.get_mut(&address) else { return };
        block.state = State::Live;
        let range = block.range(0, block.len);
        block.bytes[range].fill(NOISE);
        block.write(0, block.len, who, false, ["memory that is allocated again after its free"; 2]);
    }

    /// The program asks for a free. Returns whether it may.
    pub(crate) fn free(&mut self, address: u64, site: &Arc<Site>, stream: usize) -> bool {
        let Some(block) = self.blocks.get_mut(&address) else {
            fault(Kind::Memory, site.call(), format!("{site} frees {address:#x}, which is no allocation"));
            return false;
        };
        if let Some((earlier, _)) = &block.freeing {
            fault(Kind::Memory, site.call(), format!("{site} frees what {earlier} has freed"));
            return false;
        }
        block.freeing = Some((site.clone(), stream));
        self.free.entry((block.device, block.len, stream)).or_default().push(address);
        true
    }

    /// The stream reaches the free.
    pub(crate) fn end(&mut self, address: u64, who: &Accessor<'_>) {
        let Some(block) = self.blocks.get_mut(&address) else { return };
        block.write(0, block.len, who, false, ["a free after a write", "a free after a read"]);
        block.state = State::Freed;
        let range = block.range(0, block.len);
        block.bytes[range].fill(NOISE);
    }

    /// Returns whether a kernel of a device has accessed what it may not.
    pub(crate) fn is_broken(&self, device: usize) -> bool {
        self.broken.contains(&device)
    }

    /// Returns the block with all these bytes, and the offset in it. Reports accesses that are not allowed, after which the device
    /// takes no more calls.
    fn find(
        &mut self,
        address: u64,
        len: usize,
        device: usize,
        who: &Accessor<'_>,
    ) -> Option<(&mut Block, usize)> {
        if !self.may_access(address, len, device, who) {
            self.broken.insert(device);
            return None;
        }
        let (&start, block) = self.blocks.range_mut(..=address).next_back()?;
        Some((block, (address - start) as usize))
    }

    /// Returns whether an access is allowed. Reports it otherwise.
    fn may_access(&self, address: u64, len: usize, device: usize, who: &Accessor<'_>) -> bool {
        let site = who.site;
        let Some((&start, block)) = self.blocks.range(..=address).next_back() else {
            fault(Kind::Memory, site.call(), format!("{site} uses {address:#x}, which is not device memory"));
            return false;
        };
        let at = (address - start) as usize;
        if at + len > block.len {
            fault(
                Kind::Memory,
                site.call(),
                format!("{site} uses {len} bytes at {at} of a block of {}", block.len),
            );
            return false;
        }
        if block.state == State::Freed {
            let freed = block
                .freeing
                .as_ref()
                .map_or("that is not allocated yet".to_string(), |(by, _)| format!("that is freed by {by}"));
            fault(Kind::Memory, site.call(), format!("{site} uses memory {freed}"));
            return false;
        }
        if block.device != device {
            // "Stream Ordered Memory Allocator": only the owning device may access memory of its default pool.
            let owner = block.device;
            fault(Kind::Memory, site.call(), format!("{site} on GPU {device} uses memory of GPU {owner}"));
            return false;
        }
        true
    }

    /// Notes a read of `len` bytes. Returns whether it is possible.
    pub(crate) fn note_read(&mut self, address: u64, len: usize, device: usize, who: &Accessor<'_>) -> bool {
        let Some((block, at)) = self.find(address, len, device, who) else { return false };
        block.read(at, at + len, who);
        true
    }

    /// Returns bytes whose reads are noted already.
    pub(crate) fn peek(
        &mut self,
        address: u64,
        len: usize,
        device: usize,
        who: &Accessor<'_>,
    ) -> Option<&[u8]> {
        let (block, at) = self.find(address, len, device, who)?;
        let range = block.range(at, len);
        Some(&block.bytes[range])
    }

    /// Writes bytes. Returns whether it is possible. `data` is `None` for noise.
    pub(crate) fn write(
        &mut self,
        address: u64,
        len: usize,
        data: Option<&[u8]>,
        device: usize,
        who: &Accessor<'_>,
    ) -> bool {
        let Some((block, at)) = self.find(address, len, device, who) else { return false };
        block.write(at, at + len, who, true, ["a write after a write", "a write after a read"]);
        let range = block.range(at, len);
        match data {
            Some(data) => block.bytes[range].copy_from_slice(data),
            None => block.bytes[range].fill(NOISE),
        }
        true
    }

    /// Lets a device access the pool of another.
    pub(crate) fn allow(&mut self, owner: usize, other: usize) {
        self.open.insert((owner, other));
    }

    /// Returns whether a device may access the pool of another.
    pub(crate) fn is_open(&self, owner: usize, other: usize) -> bool {
        owner == other || self.open.contains(&(owner, other))
    }

    /// Returns the device that owns an address.
    pub(crate) fn owner(&self, address: u64) -> Option<usize> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        ((address - start) as usize <= block.len).then_some(block.device)
    }

    /// Gives back the freed blocks of streams that are gone. A use of such a block is one of no device memory.
    pub(crate) fn give_back(&mut self, exists: impl Fn(usize) -> bool) {
        let blocks = &mut self.blocks;
        self.free.retain(|(.., stream), addresses| {
            let stays = exists(*stream);
            addresses.iter().filter(|_| !stays).for_each(|address| _ = blocks.remove(address));
            stays
        });
    }

    /// Returns how many blocks there are, freed ones included.
    #[cfg(test)]
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns how many bytes of a device are in use.
    pub(crate) fn used(&self, device: usize) -> usize {
        let live = self.blocks.values().filter(|block| block.device == device && block.freeing.is_none());
        live.map(|block| block.len.max(ALIGNMENT)).sum()
    }
}
