//! Descriptions of communication calls. Ranks compare them, and errors and logs print them.
mod collective;
mod cut;
mod dtypes;
mod op;
mod site;

pub use candle_dist_base::{Factor, ReduceOp};
pub use collective::{Collective, Cuts};
pub(crate) use cut::total;
pub use cut::{Cut, Dims};
pub(crate) use dtypes::{CARRIED, carried};
pub use op::Op;
pub use site::{called_from, line_of};

use candle_core::{DType, DeviceLocation, Tensor};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

/// The form of a call. All ranks must use the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Form {
    /// The call blocks; its result is new memory, or memory that is not its input's.
    #[default]
    New,
    /// The result overwrites the input.
    InPlace,
    /// The caller waits for the result later.
    Started,
    /// The call names the ranks that do not come in time.
    Monitored,
}

/// Marks a dim of [`Call::shape`] whose size may differ between ranks.
pub const RAGGED: usize = usize::MAX;

/// One communication call of one rank: a [`Collective`] on tensors, in a form. Ranks compare it, and errors and logs
/// print it.
#[derive(Debug, Clone)]
pub struct Call {
    /// What is moved or reduced.
    pub collective: Collective,
    /// The dtype of the data, if there is any.
    pub dtype: Option<DType>,
    /// The device of the data.
    pub device: DeviceLocation,
    /// The shape, which must be equal on all ranks; dims of size [`RAGGED`] may differ.
    pub shape: Dims,
    /// The dtypes and shapes of the second and later tensors of a call.
    pub rest: Vec<(DType, Dims)>,
    /// The form of the call.
    pub form: Form,
    /// A text that must be equal on all ranks as well.
    pub note: Option<Arc<str>>,
    /// How long this rank may wait in the call; `None` means the timeout of the world. It may differ between ranks.
    pub timeout: Option<Duration>,
    /// The source location of the call.
    pub site: &'static Location<'static>,
}

impl Call {
    /// Creates a call without data.
    #[track_caller]
    pub fn new(collective: Collective) -> Self {
        Self {
            collective,
            dtype: None,
            device: DeviceLocation::Cpu,
            shape: Dims::new(),
            rest: Vec::new(),
            form: Form::default(),
            note: None,
            timeout: None,
            site: line_of(Location::caller()),
        }
    }

    /// Creates a call on `tensor`. Its shape must be equal on all ranks, except for a dim whose pieces are joined.
    #[track_caller]
    pub fn on(collective: Collective, tensor: &Tensor) -> Self {
        let shape = ragged(&collective, 0, tensor);
        let device = tensor.device().location();
        Self { dtype: Some(tensor.dtype()), device, shape, ..Self::new(collective) }
    }

    /// Creates a call on several tensors.
    #[track_caller]
    pub fn on_all(collective: Collective, tensors: &[Tensor]) -> Self {
        let Some((first, rest)) = tensors.split_first() else { return Self::new(collective) };
        let rest =
            rest.iter().enumerate().map(|(i, tensor)| (tensor.dtype(), ragged(&collective, i + 1, tensor)));
        Self { rest: rest.collect(), ..Self::on(collective, first) }
    }

    /// Creates a call on data of this dtype and shape that other ranks have.
    #[track_caller]
    pub fn of(collective: Collective, dtype: DType, shape: &[usize]) -> Self {
        Self { dtype: Some(dtype), shape: Dims::from_slice(shape), ..Self::new(collective) }
    }

    /// Returns the operation.
    pub const fn op(&self) -> Op {
        self.collective.op()
    }

    /// Returns the number of tensors that a rank gives or gets.
    pub fn count(&self) -> usize {
        1 + self.rest.len()
    }

    /// Returns whether two calls without a [difference](Self::difference) are also printed alike, and wait as long.
    pub(crate) fn prints_as(&self, other: &Self) -> bool {
        // All fields are named here, so that a new one is not forgotten. `difference` compares those without a name.
        let Self { collective: _, dtype: _, device, shape: _, rest: _, form: _, note: _, timeout, site } =
            self;
        let mine = (timeout, device, self.collective.tag());
        std::ptr::eq(*site, other.site) && mine == (&other.timeout, &other.device, other.collective.tag())
    }

    /// Returns the name of the first property in which two calls that meet differ, or `None`.
    ///
    /// The two sides of a message name each other, and a sender knows its device, a receiver only that of the result.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        let sides = self.op() != other.op() && self.collective.is_message() && other.collective.is_message();
        // Most calls that meet are equal, and their collectives are compared at once.
        let is_equal = self.collective == other.collective;
        let is_compared = |property: &&Property| match property.of_collective {
            true if is_equal => false,
            _ => !sides || property.of_both_sides,
        };
        let mut compared = PROPERTIES.iter().filter(is_compared);
        compared.find(|property| (property.of)(self) != (property.of)(other)).map(|property| property.name)
    }
}

/// Returns the shape of the `nth` tensor of a call, with its dim that may differ between ranks marked.
fn ragged(collective: &Collective, nth: usize, tensor: &Tensor) -> Dims {
    let mut shape = Dims::from_slice(tensor.dims());
    if let Some(len) = collective.ragged_dim(nth).and_then(|dim| shape.get_mut(dim)) {
        *len = RAGGED;
    }
    shape
}

/// A property of calls that must be equal on all ranks.
pub(crate) struct Property {
    pub(crate) name: &'static str,
    pub(crate) of: fn(&Call) -> PropertyValue<'_>,
    /// Whether a send and its receive have it in common.
    pub(crate) of_both_sides: bool,
    /// Whether it is one of the collective.
    of_collective: bool,
}

/// The value of a [`Property`].
#[derive(PartialEq, Hash)]
pub(crate) enum PropertyValue<'a> {
    Op(Op),
    DType(Option<DType>),
    Device(Discriminant<DeviceLocation>),
    Shape(&'a Dims, &'a [(DType, Dims)]),
    Reduction(Option<ReduceOp>),
    Rank(Option<usize>),
    Dims(SmallVec<[usize; 2]>),
    Sizes(SmallVec<[&'a Dims; 2]>, Option<&'a [Dims]>),
    Form(Form),
    Note(Option<&'a str>),
}

impl Property {
    const fn new(name: &'static str, of: fn(&Call) -> PropertyValue<'_>) -> Self {
        Self { name, of, of_both_sides: true, of_collective: false }
    }

    const fn of_a_side(self) -> Self {
        Self { of_both_sides: false, ..self }
    }

    const fn of_collective(self) -> Self {
        Self { of_collective: true, ..self }
    }
}

/// The name of the property of forms.
const FORM: &str = "form (into new memory, in place, started, or monitored)";

/// The properties, in the order in which a mismatch is reported.
pub(crate) const PROPERTIES: [Property; 10] = [
    Property::new("op", |call| PropertyValue::Op(call.op())).of_a_side().of_collective(),
    Property::new("dtype", |call| PropertyValue::DType(call.dtype)),
    // Each rank has its own GPU, so only the kind of device counts.
    Property::new("device", |call| PropertyValue::Device(discriminant(&call.device))).of_a_side(),
    Property::new("shape", |call| PropertyValue::Shape(&call.shape, &call.rest)),
    Property::new("reduction", |call| PropertyValue::Reduction(call.collective.reduction())).of_collective(),
    Property::new("root", |call| PropertyValue::Rank(call.collective.peer())).of_a_side().of_collective(),
    Property::new("dim", |call| {
        PropertyValue::Dims(call.collective.cuts().iter().map(|cut| cut.dim).collect())
    })
    .of_collective(),
    Property::new("sizes", |call| {
        let cuts = call.collective.cuts();
        PropertyValue::Sizes(cuts.iter().map(|cut| &cut.sizes).collect(), call.collective.counts())
    })
    .of_collective(),
    Property::new(FORM, |call| PropertyValue::Form(call.form)).of_a_side(),
    Property::new("description", |call| PropertyValue::Note(call.note.as_deref())),
];

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.op().name())?;
        let mut parts: Vec<String> = Vec::new();
        if let Some(dtype) = self.dtype {
            let dims = self.shape.iter().map(|&d| if d == RAGGED { "?".to_string() } else { d.to_string() });
            parts.push(format!("{}[{}]", dtype.as_str(), dims.into_iter().join(", ")));
        }
        if self.device != DeviceLocation::Cpu {
            parts.push(format!("on {:?}", self.device));
        }
        if !self.rest.is_empty() {
            parts.push(format!("{} more", self.rest.len()));
        }
        let collective = &self.collective;
        parts.extend(collective.reduction().map(|op| op.to_string()));
        parts.extend(collective.peer().map(|peer| match self.op() {
            Op::Send => format!("to {peer}"),
            Op::Recv => format!("from {peer}"),
            _ => format!("root {peer}"),
        }));
        parts.extend(collective.counts().map(|counts| format!("counts {counts:?}")));
        parts.extend(
            collective.cuts().iter().map(|cut| format!("dim {} sizes {:?}", cut.dim, cut.sizes.as_slice())),
        );
        if collective.tag() != 0 {
            parts.push(format!("tag {}", collective.tag()));
        }
        parts.extend(self.note.iter().map(|n| n.to_string()));
        if !parts.is_empty() {
            write!(f, "({})", parts.join(", "))?;
        }
        write!(f, " at {}:{}", self.site.file(), self.site.line())
    }
}
