//! Small numbers and texts from rank to rank: heads of messages, and acknowledgements.
//!
//! By default they are messages of the group. A backend for GPUs sends host tensors through the device, after all
//! kernels that were launched before. Ranks on GPUs can put notes into the world's store instead, which rank 0 holds
//! for processes.
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::{Collective, ProcessGroup, Store};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The notes of a pipeline in a store, under names that no other pipeline uses.
#[derive(Debug)]
pub(super) struct NoteBoard {
    store: Store,
    prefix: String,
    steps: AtomicU64,
}

impl NoteBoard {
    /// Creates the board. Every rank of the group calls it.
    pub(super) fn new(group: &ProcessGroup, store: &Store) -> Result<Self> {
        let number = if group.rank() == 0 { store.add("candle-pipe/pipelines", 1)? } else { 0 };
        let number = group.broadcast(&Tensor::new(&[number], &Device::Cpu)?, 0)?.to_vec1::<i64>()?[0];
        Ok(Self { store: store.clone(), prefix: format!("candle-pipe/{number}"), steps: AtomicU64::new(0) })
    }

    /// Returns the notes of the next step. All ranks begin the same step.
    pub(super) fn next_step(&self) -> Notes {
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        let (sent, taken) = Default::default();
        Notes::Stored(StoreNotes {
            store: self.store.clone(),
            prefix: format!("{}/{step}", self.prefix),
            sent,
            taken,
        })
    }
}

/// The notes that one rank sends and receives in a step.
#[derive(Debug, Clone, Default)]
pub(super) enum Notes {
    /// As messages of the group.
    #[default]
    Messages,
    /// In the store.
    Stored(StoreNotes),
}

/// Notes in a store.
#[derive(Debug, Clone)]
pub(super) struct StoreNotes {
    store: Store,
    prefix: String,
    /// The number of notes per rank and tag that were sent and received.
    sent: HashMap<(usize, u32), u64>,
    taken: HashMap<(usize, u32), u64>,
}

impl Notes {
    /// Sends a rank some numbers and a text, without waiting for it.
    #[track_caller]
    pub(super) fn send(
        &mut self,
        group: &ProcessGroup,
        to: usize,
        tag: u32,
        numbers: &[i64],
        text: Vec<u8>,
    ) -> Result<()> {
        let numbers = [numbers, &[text.len() as i64]].concat();
        match self {
            Self::Messages => {
                let count = numbers.len();
                drop(group.call(Collective::Send { to, tag }).owned().start_all(&[Tensor::from_vec(
                    numbers,
                    count,
                    &Device::Cpu,
                )?])?);
                if !text.is_empty() {
                    let count = text.len();
                    drop(group.call(Collective::Send { to, tag }).owned().start_all(&[Tensor::from_vec(
                        text,
                        count,
                        &Device::Cpu,
                    )?])?);
                }
            }
            Self::Stored(stored) => {
                let bytes: Vec<u8> = numbers.into_iter().flat_map(i64::to_le_bytes).chain(text).collect();
                let number = StoreNotes::next(&mut stored.sent, to, tag);
                stored.store.set(&stored.name(group.rank(), to, tag, number), &bytes)?;
            }
        }
        Ok(())
    }

    /// Receives the next note from rank `from` with this tag, which has `count` numbers.
    #[track_caller]
    pub(super) fn receive(
        &mut self,
        group: &ProcessGroup,
        from: usize,
        tag: u32,
        count: usize,
    ) -> Result<(Vec<i64>, Vec<u8>)> {
        let (mut numbers, text) = match self {
            Self::Messages => {
                let take = |count: usize, dtype| -> Result<Tensor> {
                    let receive = candle_dist::P2pOp::Recv { shape: Shape::from(count), dtype, from, tag };
                    let nothing = || Error::Pipe(format!("rank {from} gave no note"));
                    group.batch_send_recv(&[receive])?.pop().ok_or_else(nothing)
                };
                let numbers = group.to_host(&take(count + 1, DType::I64)?)?.to_vec1::<i64>()?;
                let text = match numbers[count] {
                    0 => Vec::new(),
                    len => group.to_host(&take(len as usize, DType::U8)?)?.to_vec1::<u8>()?,
                };
                (numbers, text)
            }
            Self::Stored(stored) => {
                let number = StoreNotes::next(&mut stored.taken, from, tag);
                let name = stored.name(from, group.rank(), tag, number);
                let bytes = stored.store.get(&name)?;
                stored.store.delete(&name)?;
                let unlike = || Error::Pipe(format!("a note of {} bytes from rank {from}", bytes.len()));
                let (numbers, text) =
                    bytes.split_at_checked((count + 1) * size_of::<i64>()).ok_or_else(unlike)?;
                let (numbers, _) = numbers.as_chunks();
                (numbers.iter().copied().map(i64::from_le_bytes).collect(), text.to_vec())
            }
        };
        numbers.truncate(count);
        Ok((numbers, text))
    }
}

impl StoreNotes {
    fn name(&self, from: usize, to: usize, tag: u32, number: u64) -> String {
        format!("{}/{from}>{to}/{tag}/{number}", self.prefix)
    }

    /// Counts one more.
    fn next(counts: &mut HashMap<(usize, u32), u64>, other: usize, tag: u32) -> u64 {
        let count = counts.entry((other, tag)).or_default();
        *count += 1;
        *count
    }
}
