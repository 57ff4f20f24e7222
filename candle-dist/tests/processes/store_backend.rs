//! A backend for these tests only, which sends tensors through rank 0's store.
use candle_core::{Device, Tensor};
use candle_dist::backend::{Backend, Call, Fresh, Results, StartedCall, Tensors};
use candle_dist::control::{Control, group_id};
use candle_dist::{Cause, Error, GroupFailure, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct StoreBackend {
    control: Arc<Control>,
    ranks: Vec<usize>,
    group: u64,
    round: AtomicU64,
    finish: fn(&Control) -> Result<()>,
}

impl StoreBackend {
    pub(crate) fn start(control: &Arc<Control>, finish: fn(&Control) -> Result<()>) -> Arc<dyn Backend> {
        let ranks: Vec<usize> = (0..control.size()).collect();
        let (group, round) = (group_id(&ranks, 0), AtomicU64::new(0));
        Arc::new(Self { control: control.clone(), group, ranks, round, finish })
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::Unsupported(format!("{what} through the store"))
    }
}

impl Backend for StoreBackend {
    fn name(&self) -> &'static str {
        "store"
    }

    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Supports sums of f32 and barriers.
    fn run(&self, call: Call, tensors: Tensors) -> Result<Results> {
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let _entered = self.control.enter(self.group, &self.ranks, round, &call)?;
        let mine: Vec<f32> = match tensors.first() {
            Some(tensor) => tensor.flatten_all()?.to_vec1()?,
            None => Vec::new(),
        };
        let bytes: Vec<u8> = mine.iter().flat_map(|x| x.to_le_bytes()).collect();
        let key = |rank| format!("{} {round} {rank}", self.group);
        self.control.set(&key(self.rank()), &bytes)?;
        let mut sum = vec![0f32; mine.len()];
        for &rank in &self.ranks {
            let theirs = self.control.get(&key(rank))?;
            for (sum, x) in sum.iter_mut().zip(theirs.chunks_exact(4)) {
                *sum += f32::from_le_bytes(x.try_into().unwrap());
            }
        }
        let results =
            tensors.iter().map(|tensor| Fresh::copy_of(&Tensor::from_vec(sum.clone(), tensor.shape(), &Device::Cpu)?));
        results.collect()
    }

    fn run_in_place(&self, _: Call, _: &Tensor) -> Result<()> {
        Err(self.unsupported("calls in place"))
    }

    fn start(&self, _: Call, _: Tensors) -> Result<Box<dyn StartedCall>> {
        Err(self.unsupported("started calls"))
    }

    fn send(&self, _: Call, _: Tensor) -> Result<()> {
        Err(self.unsupported("messages"))
    }

    fn recv(&self, _: Call) -> Result<Tensor> {
        Err(self.unsupported("messages"))
    }

    fn finish(&self) -> Result<()> {
        (self.finish)(&self.control)
    }

    fn subgroup(&self, _: &[usize]) -> Result<Arc<dyn Backend>> {
        Err(self.unsupported("subgroups"))
    }

    fn fail(&self, message: &str) {
        self.control.fail(Cause::Failed { rank: self.rank(), message: message.to_string() });
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.control.failure()
    }
}
