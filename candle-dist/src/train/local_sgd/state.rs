//! What of local SGD a checkpoint has.
use super::{Flight, LocalSgd, Means, OP};
use crate::bits::digest;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;

/// The name of the counts: the inner steps, and for each fragment whether replicas may differ in it.
const PROGRESS: &str = "local_sgd.progress";

/// The name of the value after the last outer step.
const VALUE: &str = "value";
/// The name of the momentum.
const MOMENTUM: &str = "momentum";
/// The name of the mean that an outer step is yet to be made by.
const MEAN: &str = "mean";

fn name_of(which: &str, parameter: &str) -> String {
    format!("local_sgd.{which}.{parameter}")
}

fn refused<T>(reason: String) -> Result<T> {
    Err(Error::Invalid { op: OP, reason })
}

impl LocalSgd {
    /// Returns the state of the outer optimizer by name, which is equal on all replicas. Every rank calls it.
    ///
    /// For each parameter it has `local_sgd.value.NAME`, the value after the last outer step, and with a momentum
    /// `local_sgd.momentum.NAME`, both of the parameter's shape and f32 for 16-bit floats. While a reduction is under way, which is
    /// waited for, it has `local_sgd.mean.NAME`. `local_sgd.progress` has the counts.
    ///
    /// The parameters and the state of the inner optimizer are each replica's own: save them for each replica.
    ///
    /// # Errors
    /// If ranks have made different numbers of steps, the world stops; those of a reduction.
    #[track_caller]
    pub fn state(&mut self) -> Result<Vec<(String, Tensor)>> {
        self.agree()?;
        let counts = std::iter::once(self.steps as i64);
        let counts = counts.chain(self.fragments.iter().map(|fragment| i64::from(fragment.is_apart)));
        let mut state = vec![(PROGRESS.to_string(), Tensor::from_iter(counts, &Device::Cpu)?)];
        for fragment in &mut self.fragments {
            let means = match fragment.flight.take() {
                None => Vec::new(),
                Some(Flight { due, means }) => {
                    let means = means.wait()?;
                    fragment.flight = Some(Flight { due, means: Means::Known(means.clone()) });
                    means
                }
            };
            for parameter in &fragment.parameters {
                state.push((name_of(VALUE, &parameter.name), parameter.value.clone()));
                let momentum = parameter.momentum.iter();
                state.extend(momentum.map(|momentum| (name_of(MOMENTUM, &parameter.name), momentum.clone())));
            }
            let of_means = fragment.filled().zip(means);
            state.extend(of_means.map(|(parameter, mean)| (name_of(MEAN, &parameter.name), mean)));
        }
        Ok(state)
    }

    /// Takes up the [`state`](Self::state) of one with the same parameters, fragments and periods. Every rank calls it.
    ///
    /// Together with the parameters and the inner optimizer of each replica, the training goes on exactly. The parameters stay as they
    /// are. The learning rate and the momentum are those of the options.
    ///
    /// # Errors
    /// On all ranks alike, and nothing has changed: if a part is missing or has another shape, if it was saved with another number of
    /// fragments, or if replicas load different states.
    #[track_caller]
    pub fn load<N: AsRef<str>>(&mut self, state: &[(N, Tensor)]) -> Result<()> {
        let state: HashMap<&str, &Tensor> =
            state.iter().map(|(name, tensor)| (name.as_ref(), tensor)).collect();
        let read = self.read(&state);
        if let Err(error @ Error::Group(_)) = read {
            return Err(error);
        }
        let reason = read.as_ref().err().map_or_else(String::new, Error::to_string);
        let texts = self.group.with_checks().all_gather_text(&reason)?;
        if let Some((rank, reason)) = self.group.ranks().iter().zip(texts).find(|(_, text)| !text.is_empty())
        {
            return Err(Error::InvalidArgument { rank: *rank, op: "LocalSgd::load", reason });
        }
        let read = read?;
        if let Some(texts) = self.group.compare(&read.digest()?)? {
            let at = texts.iter().position(|text| *text != texts[0]).unwrap_or_default();
            let first = self.group.ranks()[0];
            let reason = format!("the state is not that of rank {first}; give all replicas the same");
            return Err(Error::InvalidArgument {
                rank: self.group.ranks()[at],
                op: "LocalSgd::load",
                reason,
            });
        }
        (self.steps, self.fragments) = (read.steps, read.fragments);
        Ok(())
    }

    /// Returns what this will be with a state.
    fn read(&self, state: &HashMap<&str, &Tensor>) -> Result<Self> {
        let Some(progress) = state.get(PROGRESS) else {
            return refused(format!("there is no {PROGRESS}; give the state that LocalSgd::state returned"));
        };
        let counts =
            progress.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let (steps, apart) = match counts.split_first() {
            Some((&steps, apart)) if apart.len() == self.fragments.len() => (steps as usize, apart),
            _ => {
                let (saved, now) = (counts.len().saturating_sub(1), self.fragments.len());
                return refused(format!(
                    "it was saved with {saved} fragments, and this has {now}; give as many"
                ));
            }
        };
        let get = |which, name: &str, like: &Tensor, dtype: DType| -> Result<Option<Tensor>> {
            let name = name_of(which, name);
            let Some(&saved) = state.get(name.as_str()) else { return Ok(None) };
            if saved.dims() != like.dims() || saved.dtype() != dtype {
                let show = |dims: &[usize], dtype: DType| format!("{}{dims:?}", dtype.as_str());
                let (saved, now) = (show(saved.dims(), saved.dtype()), show(like.dims(), dtype));
                return refused(format!(
                    "{name} was saved as {saved}, and is {now}; give that of this model"
                ));
            }
            Ok(Some(saved.to_device(like.device())?))
        };
        let missing = |which, name: &str| {
            refused(format!("there is no {}; was it saved with other options?", name_of(which, name)))
        };
        let mut read =
            Self { group: self.group.clone(), options: self.options.clone(), steps, fragments: Vec::new() };
        for ((nth, fragment), &apart) in self.fragments.iter().enumerate().zip(apart) {
            let mut parameters = fragment.parameters.clone();
            let mut means = Vec::new();
            for parameter in &mut parameters {
                let (name, wide) = (parameter.name.as_str(), parameter.value.dtype());
                let value =
                    get(VALUE, name, &parameter.value, wide)?.map_or_else(|| missing(VALUE, name), Ok)?;
                if parameter.momentum.is_some() {
                    let momentum = get(MOMENTUM, name, &parameter.value, wide)?;
                    parameter.momentum = Some(momentum.map_or_else(|| missing(MOMENTUM, name), Ok)?);
                }
                let mean = get(MEAN, name, &parameter.value, parameter.wire_dtype(&self.options))?;
                means.extend(mean.filter(|_| !parameter.is_empty()));
                parameter.value = value;
            }
            let mut made = super::Fragment { parameters, is_apart: apart != 0, flight: None };
            if !means.is_empty() {
                if means.len() != made.filled().count() {
                    return refused(format!("means of some parameters of fragment {nth} are missing"));
                }
                let due = self.options.last_sent(nth, steps) + self.options.delay;
                made.flight = Some(Flight { due, means: Means::Known(means) });
            }
            read.fragments.push(made);
        }
        Ok(read)
    }

    /// Returns a text that two states have in common only if they are equal.
    fn digest(&self) -> Result<String> {
        let mut text = format!("{} steps", self.steps);
        for fragment in &self.fragments {
            text += &format!("; {}", fragment.is_apart);
            let means = match fragment.flight.as_ref().map(|flight| &flight.means) {
                Some(Means::Known(means)) => &means[..],
                Some(Means::Pending(_)) | None => &[],
            };
            let outer = fragment
                .parameters
                .iter()
                .flat_map(|parameter| std::iter::once(&parameter.value).chain(&parameter.momentum));
            for tensor in outer.chain(means) {
                text += &format!(" {:x}", digest(tensor)?);
            }
        }
        Ok(text)
    }
}
