//! A backend for these tests only, which sends tensors through rank 0's store.
use candle_core::{Device, Tensor};
use candle_dist::backend::{Backend, Call, Form, Fresh, Results, StartedCall, Tensors, fill};
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
    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        if call.collective.is_message() || call.form != Form::New {
            return Err(self.unsupported("messages, calls in place and monitored ones"));
        }
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
        let results = tensors
            .iter()
            .map(|tensor| Ok(Fresh::copy_of(&Tensor::from_vec(sum.clone(), tensor.shape(), &Device::Cpu)?)?));
        fill(&outputs, results.collect::<Result<_>>()?)
    }

    fn start(&self, _: Call, _: Tensors, _: Tensors) -> Result<Box<dyn StartedCall>> {
        Err(self.unsupported("started calls"))
    }

    fn recv(&self, _: Call, _: Option<&Tensor>) -> Result<(usize, Tensor)> {
        Err(self.unsupported("messages"))
    }

    fn finish(&self) -> Result<()> {
        (self.finish)(&self.control)
    }

    fn subgroup(&self, _: &[usize]) -> Result<Arc<dyn Backend>> {
        Err(self.unsupported("subgroups"))
    }

    fn stop(&self, cause: Cause) {
        self.control.fail(cause);
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.control.failure()
    }
}
