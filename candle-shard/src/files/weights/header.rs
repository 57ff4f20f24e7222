//! The header of a safetensors file, which tells where each tensor lies.
use super::dtypes;
use super::entry::Entry;
use super::gguf::types;
use crate::files::digests::Digests;
use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::value::Error as Unknown;
use serde::de::{Error as _, IntoDeserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// What a header says.
pub(super) struct Header {
    pub(super) entries: BTreeMap<String, Entry>,
    pub(super) digests: Option<Digests>,
}

/// The fields of a header in their order, before they are checked.
#[derive(Default)]
struct HeaderFields {
    metadata: Option<HashMap<String, String>>,
    tensors: Vec<(String, HeaderEntry)>,
}

/// A tensor as the header describes it; offsets count from the end of the header.
#[derive(Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl Header {
    /// Reads the bytes of a header that begins its data at `data_at` of a file, which has `length` bytes of data.
    ///
    /// The reference crate judges where the tensors lie: one behind the other, without gaps.
    pub(super) fn read(header: &[u8], data_at: u64, length: u64) -> Result<Self, String> {
        let fields: HeaderFields =
            serde_json::from_slice(header).map_err(|error| format!("has a damaged header ({error})"))?;
        let mut tensors = Vec::with_capacity(fields.tensors.len());
        for (name, HeaderEntry { dtype, shape, data_offsets }) in fields.tensors {
            if types::quantized(&dtype).is_some() {
                return Err(format!("{name:?} is {dtype}, blocks that only GGUF files have"));
            }
            let known: Result<Dtype, Unknown> = Dtype::deserialize(dtype.as_str().into_deserializer());
            let dtype = known.map_err(|error| format!("describes {name:?} in an unknown form ({error})"))?;
            let tensor = TensorInfo { dtype, shape, data_offsets };
            check(&tensor, length).map_err(|why| format!("{name:?} {why}"))?;
            tensors.push((name, tensor));
        }
        let digests = Digests::of(header, fields.metadata.as_ref(), length)?;
        tensors.sort_by_key(|(_, tensor)| tensor.data_offsets);
        let metadata = Metadata::new(None, tensors.clone()).map_err(|error| refused(&error))?;
        if metadata.data_len() as u64 != length {
            return Err(format!("has {length} bytes of data, and tensors of {}", metadata.data_len()));
        }
        let entry = |(name, tensor): (String, TensorInfo)| {
            let (dtype, at) = (tensor.dtype.to_string(), data_at + tensor.data_offsets.0 as u64);
            (name, Entry { dtype, shape: tensor.shape, at })
        };
        Ok(Self { entries: tensors.into_iter().map(entry).collect(), digests })
    }
}

fn refused(error: &SafeTensorError) -> String {
    match error {
        SafeTensorError::InvalidOffset(name) => {
            format!("{name:?} does not begin where the tensor before it ends: they overlap, or leave a gap")
        }
        error => format!("has a damaged header ({error})"),
    }
}

/// Checks one tensor by itself, in words that name its bytes.
fn check(tensor: &TensorInfo, has: u64) -> Result<(), String> {
    let (start, end) = tensor.data_offsets;
    if start > end || end as u64 > has {
        return Err(format!("lies at bytes {start} to {end} of the data, which has only {has}"));
    }
    let bits = tensor.shape.iter().try_fold(tensor.dtype.bitsize(), |n, &size| n.checked_mul(size));
    // A dim of 0 may stand behind a product that overflows; the reference crate decides.
    if bits.is_some_and(|bits| Some(bits) != (end - start).checked_mul(8)) {
        return Err(format!("is {}{:?} and has {} bytes", tensor.dtype, tensor.shape, end - start));
    }
    match dtypes::named(&tensor.dtype.to_string()) {
        Some(_) if bits.is_none() && !tensor.shape.contains(&0) => {
            Err(format!("is {}{:?} and has {} bytes", tensor.dtype, tensor.shape, end - start))
        }
        _ => Ok(()),
    }
}

impl<'de> Deserialize<'de> for HeaderFields {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = HeaderFields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderFields, A::Error> {
                let (mut fields, mut known) = (HeaderFields::default(), HashSet::new());
                while let Some(name) = map.next_key::<String>()? {
                    if !known.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name:?} comes twice")));
                    }
                    match &*name {
                        "__metadata__" => fields.metadata = map.next_value()?,
                        _ => match map.next_value() {
                            Ok(described) => fields.tensors.push((name, described)),
                            Err(error) => {
                                return Err(A::Error::custom(format!(
                                    "describes {name:?} in an unknown form: {error}"
                                )));
                            }
                        },
                    }
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Read)
    }
}
