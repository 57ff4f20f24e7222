//! The circumstances of a training run: mesh, dtypes, batch, schedule.
use super::REPLICAS;
use super::setups::has_schedule;
use candle_core::DType;
use candle_pipe::Keep;
use candle_pipe::microbatch::microbatch_sizes;
use candle_pipe::schedule::ScheduleKind;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The circumstances in which a model trains: the sizes of the mesh axes, dtypes, rows of the batch, and what cuts it.
///
/// It prints as a text that [`Proof::only`](super::Proof::only) reads, such as `dp=2 tp=2 f32 batch=5 passes=2`. Axes of
/// one rank are not printed.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// The axes of the mesh, outermost first.
    pub axes: Vec<(String, usize)>,
    /// The dtype of the parameters and of float inputs.
    pub dtype: DType,
    /// The dtype in which fully sharded units compute, if it is another one.
    pub compute: Option<DType>,
    /// The number of rows of the batch; the first ones of the inputs.
    pub batch: usize,
    /// The number of rows of every second batch, if it is another one.
    pub second: Option<usize>,
    /// The number of backward passes into which each rank cuts its rows.
    pub passes: usize,
    /// The index of the plan.
    pub plan: usize,
    /// Whether implicit communication is refused.
    pub strict: bool,
    /// The schedule, its microbatches, and what stages keep, of a pipeline. More stages than values take them in turns.
    pub schedule: Option<(ScheduleKind, usize, &'static [Keep])>,
    /// The sizes of the mesh axes on which the training is resumed from a checkpoint.
    pub resume: Option<Vec<usize>>,
    /// The dtype in which weights are drawn and inputs are rounded, if it is another one than `dtype`.
    pub(super) rounded: Option<DType>,
}

/// The texts of what stages keep. The first is the default.
pub(super) const KEEPS: [(&str, &[Keep]); 3] = [
    ("activations", &[Keep::Activations]),
    ("inputs", &[Keep::Inputs]),
    ("inputs,activations", &[Keep::Inputs, Keep::Activations]),
];

/// What stages keep if nothing else is said.
pub(super) const KEEP: &[Keep] = KEEPS[0].1;

/// The dtypes of parameters.
pub(super) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

impl Setup {
    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// Returns the size of an axis; 1 if there is none.
    pub fn size_of(&self, axis: &str) -> usize {
        self.axes.iter().find(|(name, _)| name == axis).map_or(1, |(_, size)| *size)
    }

    /// Returns the number of rows of the batch of a step.
    pub(super) fn batch(&self, step: u64) -> usize {
        self.second.filter(|_| step % 2 == 1).unwrap_or(self.batch)
    }

    /// Returns the rows of a replica in the batch of a step.
    pub(super) fn rows(&self, step: u64, replica: usize) -> Range<usize> {
        let sizes = microbatch_sizes(self.batch(step), self.size_of(REPLICAS));
        let first = sizes[..replica].iter().sum();
        first..first + sizes[replica]
    }

    /// Returns the same run on one device, in one pass.
    pub(super) fn alone(&self) -> Self {
        let axes = self.axes.iter().map(|(name, _)| (name.clone(), 1)).collect();
        let schedule = self.schedule.map(|_| (ScheduleKind::GPipe, 1, KEEP));
        Self { axes, passes: 1, plan: 0, strict: false, schedule, resume: None, ..self.clone() }
    }

    /// Returns whether parameters or units have a dtype of 16 bits.
    pub(super) fn has_16_bits(&self) -> bool {
        [Some(self.dtype), self.compute]
            .iter()
            .flatten()
            .any(|dtype| matches!(dtype, DType::F16 | DType::BF16))
    }

    /// Returns the same run on one device in f64, with the weights and inputs of this dtype.
    pub(super) fn exact(&self) -> Self {
        let rounded = Some(self.dtype).filter(|dtype| *dtype != DType::F64);
        Self { dtype: DType::F64, compute: None, rounded, ..self.alone() }
    }

    /// Returns the run that resumes this one, if one does. It runs GPipe on a mesh that the schedule does not support.
    pub(super) fn resumed(&self) -> Option<Self> {
        let sizes = self.resume.as_ref()?;
        let axes = self.axes.iter().zip(sizes).map(|((name, _), &size)| (name.clone(), size)).collect();
        let mut next = Self { axes, resume: None, ..self.clone() };
        if !has_schedule(&next) {
            next.schedule =
                self.schedule.map(|(_, microbatches, keep)| (ScheduleKind::GPipe, microbatches, keep));
        }
        Some(next)
    }

    /// Returns smaller set-ups, the smallest first: one thing less in each.
    pub(super) fn smaller(&self) -> Vec<Self> {
        let mut all: Vec<Self> = self.resumed().into_iter().collect();
        for (at, &(_, size)) in self.axes.iter().enumerate().filter(|(_, (_, size))| *size > 1) {
            for less in [1, size - 1] {
                let mut small = self.clone();
                small.axes[at].1 = less;
                all.push(small);
            }
        }
        let mut with = |change: &dyn Fn(&mut Self)| {
            let mut small = self.clone();
            change(&mut small);
            all.push(small);
        };
        with(&|small| small.resume = None);
        with(&|small| small.compute = None);
        with(&|small| small.dtype = DType::F64);
        with(&|small| small.second = None);
        with(&|small| small.passes = 1);
        with(&|small| small.plan = 0);
        with(&|small| small.strict = false);
        if let Some((kind, microbatches, keep)) = self.schedule {
            with(&|small| small.schedule = Some((kind, microbatches, KEEP)));
            with(&|small| small.schedule = Some((kind, microbatches, &keep[..1])));
            with(&|small| small.schedule = Some((ScheduleKind::GPipe, microbatches, keep)));
            with(&|small| small.schedule = Some((kind, 1.max(microbatches / 2), keep)));
        }
        for rows in [self.batch / 2, self.batch - 1] {
            with(&|small| small.batch = rows.max(1));
        }
        all.retain(|small| small != self && small.has_rows());
        all.dedup();
        all
    }

    /// Returns whether each replica and each pass has rows.
    pub(super) fn has_rows(&self) -> bool {
        let resumed = self.resumed().is_none_or(|next| next.has_rows());
        let least = self.second.map_or(self.batch, |second| second.min(self.batch));
        resumed && least / self.size_of(REPLICAS) >= self.passes.max(1)
    }

    /// Reads a text that a set-up printed, for the axes of `like`, whose other values are the defaults.
    pub(super) fn read(text: &str, like: &Self) -> Result<Self, String> {
        let mut setup = like.clone();
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let number = |value: &str| value.parse::<usize>().map_err(|_| format!("{word:?}: no number"));
            match word.split_once('=') {
                Some(("batch", value)) => {
                    let (first, second) =
                        value.split_once(',').map_or((value, None), |(first, second)| (first, Some(second)));
                    (setup.batch, setup.second) = (number(first)?, second.map(number).transpose()?);
                }
                Some(("passes", value)) => setup.passes = number(value)?,
                Some(("plan", value)) => setup.plan = number(value)?,
                Some(("compute", value)) => setup.compute = Some(dtype(value)?),
                Some(("microbatches", value)) => {
                    let (kind, _, keep) = setup.schedule.unwrap_or((ScheduleKind::GPipe, 1, KEEP));
                    setup.schedule = Some((kind, number(value)?, keep));
                }
                Some(("keep", value)) => {
                    let found = KEEPS.iter().find(|(name, _)| *name == value);
                    let known = || KEEPS.map(|(name, _)| format!("keep={name}")).join(" or ");
                    let (_, keep) = found.ok_or_else(|| format!("{word:?}: expected {}", known()))?;
                    let (kind, microbatches, _) = setup.schedule.unwrap_or((ScheduleKind::GPipe, 1, keep));
                    setup.schedule = Some((kind, microbatches, keep));
                }
                Some((axis, value)) => *size_in(&mut setup.axes, axis)? = number(value)?,
                None if word == "strict" => setup.strict = true,
                None if word == "->" => {
                    let mut axes: Vec<(String, usize)> =
                        like.axes.iter().map(|(name, _)| (name.clone(), 1)).collect();
                    for word in words.by_ref() {
                        let (axis, size) = word.split_once('=').unwrap_or((word, ""));
                        let size =
                            size.parse().map_err(|_| format!("{word:?}: expected an axis and its size"))?;
                        *size_in(&mut axes, axis)? = size;
                    }
                    setup.resume = Some(axes.into_iter().map(|(_, size)| size).collect());
                }
                None => match (dtype(word), ScheduleKind::from_str(word)) {
                    (Ok(dtype), _) => setup.dtype = dtype,
                    (_, Ok(kind)) => {
                        let (_, microbatches, keep) = setup.schedule.unwrap_or((kind, 1, KEEP));
                        setup.schedule = Some((kind, microbatches, keep));
                    }
                    _ => return Err(format!("{word:?} is neither a dtype, a schedule nor a setting")),
                },
            }
        }
        Ok(setup)
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    DTYPES
        .into_iter()
        .find(|dtype| dtype.as_str() == text)
        .ok_or_else(|| format!("{text:?} is no dtype of parameters"))
}

fn size_in<'a>(axes: &'a mut [(String, usize)], axis: &str) -> Result<&'a mut usize, String> {
    let names: Vec<String> = axes.iter().map(|(name, _)| name.clone()).collect();
    let found = axes.iter_mut().find(|(name, _)| name == axis);
    found
        .map(|(_, size)| size)
        .ok_or_else(|| format!("{axis:?} is neither an axis of {names:?} nor a setting"))
}

/// Prints the axes of more than one rank.
fn write_axes<'a>(f: &mut fmt::Formatter<'_>, axes: impl Iterator<Item = (&'a str, usize)>) -> fmt::Result {
    axes.filter(|(_, size)| *size > 1).try_for_each(|(name, size)| write!(f, "{name}={size} "))
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_axes(f, self.axes.iter().map(|(name, size)| (name.as_str(), *size)))?;
        f.write_str(self.dtype.as_str())?;
        if let Some(compute) = self.compute {
            write!(f, " compute={}", compute.as_str())?;
        }
        write!(f, " batch={}", self.batch)?;
        self.second.map_or(Ok(()), |second| write!(f, ",{second}"))?;
        for (name, value, usual) in [("passes", self.passes, 1), ("plan", self.plan, 0)] {
            if value != usual {
                write!(f, " {name}={value}")?;
            }
        }
        if self.strict {
            f.write_str(" strict")?;
        }
        if let Some((kind, microbatches, keep)) = self.schedule {
            write!(f, " {} microbatches={microbatches}", kind.name())?;
            if let Some((name, _)) = KEEPS.iter().skip(1).find(|(_, other)| *other == keep) {
                write!(f, " keep={name}")?;
            }
        }
        if let Some(sizes) = &self.resume {
            f.write_str(" -> ")?;
            write_axes(f, self.axes.iter().zip(sizes).map(|((name, _), &size)| (name.as_str(), size)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_reads_what_it_prints() {
        let axes = [("pp", 2), ("dp", 1), ("tp", 3)].map(|(name, size)| (name.to_string(), size)).to_vec();
        let full = Setup {
            axes,
            dtype: DType::F32,
            compute: Some(DType::BF16),
            batch: 7,
            second: Some(5),
            passes: 2,
            plan: 1,
            strict: true,
            schedule: Some((ScheduleKind::ZbH1, 3, KEEPS[2].1)),
            resume: Some(vec![1, 2, 1]),
            rounded: None,
        };
        let text = full.to_string();
        assert_eq!(
            text.trim_end(),
            "pp=2 tp=3 f32 compute=bf16 batch=7,5 passes=2 plan=1 strict zb-h1 microbatches=3 keep=inputs,activations -> dp=2"
        );
        let plain = Setup {
            axes: full.alone().axes,
            dtype: DType::F64,
            compute: None,
            batch: 1,
            second: None,
            passes: 1,
            plan: 0,
            strict: false,
            schedule: None,
            resume: None,
            rounded: None,
        };
        assert_eq!(Setup::read(&text, &plain), Ok(full));
        for (wrong, why) in
            [("ep=2", "\"ep\""), ("f8", "\"f8\""), ("keep=all", "keep"), ("batch=x", "no number")]
        {
            assert!(Setup::read(wrong, &plain).is_err_and(|error| error.contains(why)), "{wrong}");
        }
    }
}
