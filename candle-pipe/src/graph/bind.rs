//! Binds arguments to the inputs of a model.
use super::suggest::suggestion;
use super::{In, Input, ValueId};
use crate::{Error, Kwargs, Result, Value};
use std::collections::BTreeMap;

/// The values of a model's inputs.
pub type Inputs = BTreeMap<ValueId, Value>;

/// The inputs of a model, with their defaults.
#[derive(Debug, Clone)]
pub(crate) struct GraphSignature {
    inputs: Vec<Input>,
    defaults: BTreeMap<ValueId, Value>,
}

impl GraphSignature {
    pub(crate) fn new(inputs: &[Input], defaults: BTreeMap<ValueId, Value>) -> Self {
        Self { inputs: inputs.to_vec(), defaults }
    }

    /// Binds `args` by position, `kwargs` by name, and the other inputs by default.
    pub(crate) fn bind(&self, args: &[Value], kwargs: &Kwargs) -> Result<Inputs> {
        self.bind_for(args, kwargs, |_| true)
    }

    /// Like [`bind`](Self::bind), for a caller that needs only some inputs: the others may be missing.
    pub(crate) fn bind_for(
        &self,
        args: &[Value],
        kwargs: &Kwargs,
        needs: impl Fn(ValueId) -> bool,
    ) -> Result<Inputs> {
        let mut inputs = self.places(args, kwargs, |left| Value::List(left.to_vec()))?;
        for input in self.inputs.iter().filter(|input| needs(input.value)) {
            if inputs.contains_key(&input.value) {
                continue;
            }
            if input.kind == In::Args {
                inputs.insert(input.value, Value::List(Vec::new()));
                continue;
            }
            let Some(default) = self.defaults.get(&input.value) else {
                let how = if input.kind == In::Arg { "by place or by name" } else { "by name" };
                return Err(Error::Pipe(format!("input {:?} is missing; give it {how}", input.name)));
            };
            inputs.insert(input.value, default.clone());
        }
        Ok(inputs)
    }

    /// Returns the argument of each input, from `args` by position and `kwargs` by name; `join` makes one of several.
    pub(crate) fn places<T: Clone>(
        &self,
        args: &[T],
        kwargs: &BTreeMap<String, T>,
        join: impl Fn(&[T]) -> T,
    ) -> Result<BTreeMap<ValueId, T>> {
        let wrong = |reason: String| Err(Error::Pipe(reason));
        let named = |name: &str| self.inputs.iter().find(|input| input.name == name);
        let by_place: Vec<&Input> = self.inputs.iter().filter(|input| input.kind == In::Arg).collect();
        let mut inputs: BTreeMap<ValueId, T> =
            by_place.iter().zip(args).map(|(input, value)| (input.value, value.clone())).collect();
        if let Some(left) = args.get(by_place.len()..).filter(|left| !left.is_empty()) {
            let Some(all) = self.inputs.iter().find(|input| input.kind == In::Args) else {
                return wrong(format!(
                    "{} arguments by place, the model takes {}",
                    args.len(),
                    by_place.len()
                ));
            };
            inputs.insert(all.value, join(left));
        }
        for (name, value) in kwargs {
            let Some(input) = named(name) else {
                let known = self.inputs.iter().map(|input| input.name.as_str());
                return wrong(format!("the model has no input {name:?}{}", suggestion(name, known)));
            };
            if inputs.insert(input.value, value.clone()).is_some() {
                return wrong(format!("input {name:?} is given by place and by name"));
            }
        }
        Ok(inputs)
    }

    /// Returns names and values of the inputs, in the order of declaration.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = (&str, ValueId)> {
        self.inputs.iter().map(|input| (input.name.as_str(), input.value))
    }
}
