//! The fields of a request, each with its type and range.

use serde_json::{Map, Value};

use super::api_error::{ApiError, ApiResult};

/// The object that a client sent. `null` is the same as nothing, and fields that nobody asks for are ignored.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads the body of a request.
    pub(super) fn parse(body: &[u8]) -> ApiResult<Self> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid(None, "The body is no JSON object.")),
            Err(error) => Err(ApiError::invalid(None, format!("The body is no JSON: {error}."))),
        }
    }

    /// The fields of an object that was made here.
    pub(super) fn of(fields: Map<String, Value>) -> Self {
        Self(fields)
    }

    /// All fields but these.
    pub(super) fn into_others(mut self, names: &[&str]) -> Map<String, Value> {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
        self.0
    }

    /// The value of a field.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Takes the value of a field out.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.get_mut(name).map(Value::take).filter(|value| !value.is_null())
    }

    /// Refuses fields that ask for what is not done here, unless their value says that nothing is to be done.
    pub(super) fn refuse(&self, names: &[&'static str], why: &str) -> ApiResult<()> {
        for name in names {
            if self.get(name).is_some_and(|value| !is_empty(value)) {
                return Err(ApiError::invalid(*name, format!("`{name}` is not supported: {why}.")));
            }
        }
        Ok(())
    }

    /// A boolean.
    pub(super) fn flag(&self, name: &'static str) -> ApiResult<Option<bool>> {
        self.get(name).map(|value| value.as_bool().ok_or_else(|| wrong(name, value, "a boolean"))).transpose()
    }

    /// A text.
    pub(super) fn text(&self, name: &'static str) -> ApiResult<Option<&str>> {
        self.get(name).map(|value| value.as_str().ok_or_else(|| wrong(name, value, "a string"))).transpose()
    }

    /// A whole number from `least` to `most`.
    pub(super) fn count(&self, name: &'static str, least: u64, most: u64) -> ApiResult<Option<u64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = whole(value).and_then(|number| u64::try_from(number).ok());
        match number.filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, value, &format!("a whole number from {least} to {most}"))),
        }
    }

    /// Any whole number of 64 bits.
    pub(super) fn seed(&self, name: &'static str) -> ApiResult<Option<u64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = whole(value).and_then(|number| match number {
            number if number < 0 => i64::try_from(number).ok().map(i64::cast_unsigned),
            number => u64::try_from(number).ok(),
        });
        number.map(Some).ok_or_else(|| wrong(name, value, "a whole number of 64 bits"))
    }

    /// A number from `least` to `most`.
    pub(super) fn number(&self, name: &'static str, least: f64, most: f64) -> ApiResult<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, value, &format!("a number from {least} to {most}"))),
        }
    }

    /// An object.
    pub(super) fn object(&self, name: &'static str) -> ApiResult<Option<&Map<String, Value>>> {
        self.get(name)
            .map(|value| value.as_object().ok_or_else(|| wrong(name, value, "an object")))
            .transpose()
    }

    /// A list.
    pub(super) fn list(&self, name: &'static str) -> ApiResult<Option<&Vec<Value>>> {
        self.get(name).map(|value| value.as_array().ok_or_else(|| wrong(name, value, "a list"))).transpose()
    }
}

/// A token of a model that knows so many.
pub(super) fn token(value: &Value, known: usize) -> Option<u32> {
    let token = u32::try_from(whole(value)?).ok()?;
    ((token as usize) < known).then_some(token)
}

/// A whole number, also where it is written as 2.0.
fn whole(value: &Value) -> Option<i128> {
    let number = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    let float = || value.as_f64().filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
    number.or_else(|| float().map(|number| number as i128))
}

/// Whether a value says that nothing is to be done.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// A field has another type or range.
pub(super) fn wrong(name: &'static str, value: &Value, wanted: &str) -> ApiError {
    let mut shown = value.to_string();
    if shown.len() > 60 {
        shown = format!("{}..", shown.chars().take(60).collect::<String>());
    }
    ApiError::invalid(name, format!("`{name}` is {shown}: give {wanted}."))
}
