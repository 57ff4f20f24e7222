//! JsonValues of JSON texts: variables that a user gives. Their texts are the user's, as those of messages are.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::text::Text;
use super::value::JinjaValue;
use super::work::{EvalResult, TemplateFailure, WorkBudget, fail};

/// Parses a JSON text, with the keys of objects in their order.
pub(super) fn parse(json: &str, work: &WorkBudget) -> EvalResult<JinjaValue> {
    let mut source = serde_json::Deserializer::from_str(json);
    let parsed = JsonValues(work).deserialize(&mut source).and_then(|value| source.end().map(|()| value));
    parsed.or_else(|error| fail(error.to_string()))
}

/// Makes values of what a text has.
#[derive(Clone, Copy)]
struct JsonValues<'w>(&'w WorkBudget);

impl JsonValues<'_> {
    fn made<E: Error>(value: EvalResult<JinjaValue>) -> Result<JinjaValue, E> {
        value.map_err(|TemplateFailure { why, .. }| E::custom(why))
    }
}

impl<'de> DeserializeSeed<'de> for JsonValues<'_> {
    type Value = JinjaValue;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<JinjaValue, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonValues<'_> {
    type Value = JinjaValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<JinjaValue, E> {
        Ok(JinjaValue::None)
    }

    fn visit_bool<E: Error>(self, is: bool) -> Result<JinjaValue, E> {
        Ok(JinjaValue::Bool(is))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<JinjaValue, E> {
        Ok(JinjaValue::Int(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<JinjaValue, E> {
        i64::try_from(number).map(JinjaValue::Int).map_err(|_| E::custom(format!("{number} is too large")))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<JinjaValue, E> {
        Ok(JinjaValue::Float(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<JinjaValue, E> {
        Self::made(self.0.text(Text::foreign(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<JinjaValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Self::made(self.0.list(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JinjaValue, A::Error> {
        let mut entries: Vec<(JinjaValue, JinjaValue)> = Vec::new();
        // The last of equal keys counts, as in Python.
        let mut places = std::collections::HashMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            match places.get(&key) {
                Some(&at) => {
                    let (_, old): &mut (JinjaValue, JinjaValue) = &mut entries[at];
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
