//! The rotary positions of a `config.json`, in the form of transformers 4 or of transformers 5.

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Map, Value};

use super::fields::{Fields, positive, shortened};

/// How the positions of a longer context are brought into the range that was learned.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// All wavelengths are stretched alike.
    Linear {
        /// By how much.
        factor: f64,
    },
    /// Long wavelengths are stretched, short ones are not (Llama 3).
    Llama3 {
        /// By how much wavelengths are stretched.
        factor: f64,
        /// Wavelengths longer than the learned context divided by this are stretched by the whole factor.
        low_freq_factor: f64,
        /// Those shorter than the learned context divided by this are not stretched.
        high_freq_factor: f64,
        /// The learned context.
        original_max_position_embeddings: usize,
    },
}

/// The base of the wavelengths, and how they are stretched.
pub(super) type Rope = (f64, Option<RopeScaling>);

/// The kinds, and the fields that each has.
const KINDS: [(&str, &[&str]); 3] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
];

/// Fields that each kind may have in addition to its own.
const COMMON: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// What the fields say.
///
/// # Errors
/// If they do not say the base, say two things, or something that is not known; the field is named.
pub(super) fn read(fields: &Fields) -> Result<Rope> {
    let forms: Vec<(&str, &Map<String, Value>)> = ["rope_parameters", "rope_scaling"]
        .into_iter()
        .filter_map(|name| Some((name, fields.get(name)?)))
        // Families with two kinds of layers have two of them.
        .map(|(name, value)| (name, value.get("full_attention").filter(|_| fields.has_local_rope()).unwrap_or(value)))
        .map(|(name, value)| {
            let object = value.as_object();
            Ok((name, object.with_context(|| format!("{name} is {}; expected an object", shortened(value)))?))
        })
        .collect::<Result<_>>()?;

    let inside = forms.iter().filter_map(|(name, form)| Some((format!("{name}.rope_theta"), form.get("rope_theta")?)));
    let outside = fields.get("rope_theta").map(|theta| ("rope_theta".to_owned(), theta));
    let bases: Vec<(String, f64)> = inside
        .chain(outside)
        .map(|(name, theta)| Ok((name.clone(), positive(&name, theta)?)))
        .collect::<Result<_>>()?;
    let Some((first, base)) = bases.first() else {
        bail!(
            "there is no rope_theta and no rope_parameters.rope_theta, the base of the rotary positions: write the one that the model was trained with (10000 for Llama 1 and 2)"
        );
    };
    if let Some((other, unlike)) = bases.iter().find(|(_, theta)| theta != base) {
        bail!("{first} is {base} and {other} is {unlike}; leave the right one");
    }

    let scalings = forms.iter().map(|(name, form)| scaling(form).with_context(|| (*name).to_owned()));
    let scalings: Vec<Option<RopeScaling>> = scalings.collect::<Result<_>>()?;
    if let [new, old] = scalings[..] {
        ensure!(new == old, "rope_parameters and rope_scaling say unlike things; leave the right one");
    }
    Ok((*base, scalings.first().copied().flatten()))
}

/// The scaling that one of the two forms describes.
fn scaling(form: &Map<String, Value>) -> Result<Option<RopeScaling>> {
    let kinds: Vec<&Value> = ["rope_type", "type"].iter().filter_map(|name| form.get(*name)).collect();
    if let [kind, unlike] = kinds[..] {
        ensure!(kind == unlike, "rope_type is {kind} and type is {unlike}; leave the right one");
    }
    let default = Value::from("default");
    let kind = kinds.first().copied().unwrap_or(&default);
    let rule = KINDS.iter().find(|(name, _)| kind == name);
    let known = KINDS.map(|(name, _)| name).join(", ");
    let (kind, own) =
        rule.with_context(|| format!("rope_type {} is not supported; supported: {known}", shortened(kind)))?;
    for (name, value) in form.iter().filter(|(_, value)| !value.is_null()) {
        ensure!(
            own.contains(&name.as_str()) || COMMON.contains(&name.as_str()),
            "{name} ({}) is a field that is not known for rope_type {kind:?}",
            shortened(value)
        );
    }
    if let Some(share) = form.get("partial_rotary_factor").filter(|share| !share.is_null()) {
        ensure!(share.as_f64() == Some(1.0), "partial_rotary_factor is {share}, and only 1 is supported");
    }
    let number = |name: &str| {
        let value = form.get(name).filter(|value| !value.is_null());
        positive(name, value.with_context(|| format!("there is no {name}, which rope_type {kind:?} has"))?)
    };
    Ok(match *kind {
        "linear" => Some(RopeScaling::Linear { factor: number("factor")? }),
        "llama3" => {
            let [factor, low, high] = ["factor", "low_freq_factor", "high_freq_factor"].map(number);
            let (factor, low_freq_factor, high_freq_factor) = (factor?, low?, high?);
            ensure!(
                low_freq_factor < high_freq_factor,
                "low_freq_factor {low_freq_factor} is not less than high_freq_factor {high_freq_factor}"
            );
            let learned = number("original_max_position_embeddings")?;
            ensure!(
                learned.fract() == 0.0 && learned <= super::MOST as f64,
                "original_max_position_embeddings is {learned}; expected a whole number from 1 to {}",
                super::MOST
            );
            let original_max_position_embeddings = learned as usize;
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings })
        }
        _ => None,
    })
}
