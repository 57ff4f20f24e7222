//! JsonValues of JSON texts: variables that a user gives. Their texts are the user's, as those of messages are.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::text::Text;
use super::value::Value;
use super::work::{Fail, StepOutput, Work, fail};

/// Parses a JSON text, with the keys of objects in their order.
pub(super) fn parse(json: &str, work: &Work) -> StepOutput<Value> {
    let mut source = serde_json::Deserializer::from_str(json);
    let parsed = JsonValues(work).deserialize(&mut source).and_then(|value| source.end().map(|()| value));
    parsed.or_else(|error| fail(error.to_string()))
}

/// Makes values of what a text has.
#[derive(Clone, Copy)]
struct JsonValues<'w>(&'w Work);

impl JsonValues<'_> {
    fn made<E: Error>(value: StepOutput<Value>) -> Result<Value, E> {
        value.map_err(|Fail { why, .. }| E::custom(why))
    }
}

impl<'de> DeserializeSeed<'de> for JsonValues<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonValues<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::None)
    }

    fn visit_bool<E: Error>(self, is: bool) -> Result<Value, E> {
        Ok(Value::Bool(is))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        i64::try_from(number).map(Value::Int).map_err(|_| E::custom(format!("{number} is too large")))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Float(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Self::made(self.0.text(Text::foreign(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Self::made(self.0.list(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries: Vec<(Value, Value)> = Vec::new();
        // The last of equal keys counts, as in Python.
        let mut places = std::collections::HashMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            match places.get(&key) {
                Some(&at) => {
                    let (_, old): &mut (Value, Value) = &mut entries[at];
                    *old = value;
                }
                None => {
                    entries.push((Self::made(self.0.text(Text::foreign(key.as_str())))?, value));
                    places.insert(key, entries.len() - 1);
                }
            }
        }
        Self::made(self.0.map(entries))
    }
}
