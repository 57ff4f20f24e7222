//! Keys and values of one rank in one memory, so that one launch writes new ones of both.
use super::CacheStorage;
use crate::kernels;
use candle_core::{Result, Tensor, bail};

/// Values begin at a multiple of so many elements, where kernels can read many bytes at once.
const ALIGNED: usize = 64;

/// Keys and values of all tokens, the new ones behind the old ones.
#[derive(Debug)]
pub(super) struct PairStorage {
    dim: usize,
    /// The tokens that there is room for.
    room: usize,
    len: usize,
    /// Keys and values with room for all tokens.
    memory: Option<[Tensor; 2]>,
}

impl PairStorage {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// Returns the tokens of keys, or of values.
    fn held(&self, which: usize) -> Result<Option<Tensor>> {
        let memory = self.memory.as_ref().map(|memory| &memory[which]);
        memory.map(|memory| memory.narrow(self.dim, 0, self.len)).transpose()
    }
}

impl CacheStorage for PairStorage {
    const NAME: &'static str = "KvCache";

    fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { dim, room: max_seq_len, len: 0, memory: None }
    }

    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let tokens = k.dim(self.dim)?;
        if self.len + tokens > self.room {
            bail!("{}: {tokens} tokens behind {}, with room for {}", Self::NAME, self.len, self.room);
        }
        let memory = match &self.memory {
            Some(memory) => memory,
            None => self.memory.insert(allocated([k, v], self.dim, self.room)?),
        };
        kernels::set_both(memory.each_ref(), [k, v], self.dim, self.len)?;
        let [all_k, all_v] = memory.each_ref().map(|memory| memory.narrow(self.dim, 0, self.len + tokens));
        let all = (all_k?, all_v?);
        self.len += tokens;
        Ok(all)
    }

    fn k(&self) -> Result<Option<Tensor>> {
        self.held(0)
    }

    fn v(&self) -> Result<Option<Tensor>> {
        self.held(1)
    }

    fn filled(&self) -> Option<[usize; 2]> {
        Some([self.len, self.room])
    }
}

/// Returns memory for keys and values like these, with room for so many tokens.
fn allocated([k, v]: [&Tensor; 2], dim: usize, room: usize) -> Result<[Tensor; 2]> {
    let shape = |x: &Tensor| {
        let mut shape = x.dims().to_vec();
        shape[dim] = room;
        shape
    };
    let (of_k, of_v) = (shape(k), shape(v));
    if k.dtype() != v.dtype() || !k.device().same_device(v.device()) {
        return Ok([
            Tensor::zeros(of_k, k.dtype(), k.device())?,
            Tensor::zeros(of_v, v.dtype(), v.device())?,
        ]);
    }
    let [count_k, count_v] = [&of_k, &of_v].map(|shape| shape.iter().product::<usize>());
    let start = count_k.next_multiple_of(ALIGNED);
    let all = Tensor::zeros(start + count_v, k.dtype(), k.device())?;
    Ok([all.narrow(0, 0, count_k)?.reshape(of_k)?, all.narrow(0, start, count_v)?.reshape(of_v)?])
}
