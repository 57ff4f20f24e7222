//! The rotary positions of a `config.json`, in the form of transformers 4 or of transformers 5.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::fields::{FieldRule, Fields, positive, shortened};
use super::parts::AttentionTemperature;
use super::scaling::RopeScaling;

/// The base of the wavelengths, and how they are stretched.
pub(super) type RopeSettings = (f64, Option<RopeScaling>);

/// A kind, the fields that it must have, and those that it may have.
type RopeKind = (&'static str, &'static [&'static str], &'static [&'static str]);

const LEARNED: &str = "original_max_position_embeddings";

const KINDS: [RopeKind; 9] = [
    ("default", &[], &[]),
    ("linear", &["factor"], &[]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor"], &[LEARNED]),
    ("dynamic", &["factor"], &[]),
    (
        "yarn",
        &[],
        &[
            "factor",
            LEARNED,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
    ),
    ("longrope", LISTS, &["factor", LEARNED, "attention_factor"]),
    (PROPORTIONAL, &[], &["factor"]),
    (BASE_STRETCH, &["alpha"], &["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]),
    // Older names of the same.
    ("su", LISTS, &["factor", LEARNED, "attention_factor"]),
];

/// The scaling of HunYuan, which its files call dynamic: a base that is stretched by `alpha`, whatever the length. The other numbers
/// beside it have no effect.
pub(super) const BASE_STRETCH: &str = "dynamic with alpha";

/// The kind of Gemma 4: a share of a head's pairs is turned, of wavelengths that are those of the whole head.
pub(super) const PROPORTIONAL: &str = "proportional";

/// A factor of wavelengths that keeps a pair from being turned, as files of llama.cpp have it.
const STILL: f64 = 1e30;

/// Fields of YaRN that transformers does not read, though released files have them: a factor that vLLM takes for `attention_factor`
/// times its own, and whether a model learned with its scaling.
const UNREAD: [&str; 2] = ["attn_factor", "finetuned"];

const LISTS: &[&str] = &["short_factor", "long_factor"];

/// Fields that each kind may have in addition to its own.
const COMMON: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// The layers with a window, in `rope_parameters` of families with two kinds of layers.
const SLIDING: &str = "sliding_attention";

/// What the fields say, and notes on what they do not say and on what is not used.
///
/// # Errors
/// If they say two things, or something that is not known; the field is named.
pub(super) fn read(fields: &Fields) -> Result<(RopeSettings, Vec<String>)> {
    let forms = forms(fields, "full_attention")?;
    let inside =
        forms.iter().filter_map(|(name, form)| Some((format!("{name}.rope_theta"), form.get("rope_theta")?)));
    let outside = fields.get("rope_theta").map(|theta| ("rope_theta".to_owned(), theta));
    let bases: Vec<(String, f64)> = inside
        .chain(outside)
        .map(|(name, theta)| Ok((name.clone(), positive(&name, theta)?)))
        .collect::<Result<_>>()?;
    let absent = fields.family.absent.rope_theta;
    let note = bases
        .is_empty()
        .then(|| format!("there is no rope_theta: it is {absent}, as without it in transformers"));
    let of_form = |(name, form): &(&str, &Map<String, Value>)| {
        let found = UNREAD.iter().filter_map(|unread| Some((unread, form.get(*unread)?)));
        found
            .map(|(unread, said)| format!("{name}: {unread} {said} is not used, as in transformers"))
            .collect()
    };
    let unread: Vec<Vec<String>> = forms.iter().map(of_form).collect();
    let notes = note.into_iter().chain(unread.into_iter().flatten()).collect();
    let (first, base) = bases.first().map_or(("", absent), |(name, base)| (name.as_str(), *base));
    if let Some((other, unlike)) = bases.iter().find(|(_, theta)| *theta != base) {
        bail!("{first} is {base} and {other} is {unlike}; leave the right one");
    }

    let scalings = forms.iter().map(|(name, form)| scaling(fields, form).with_context(|| (*name).to_owned()));
    let mut scalings: Vec<Option<RopeScaling>> = scalings.collect::<Result<_>>()?;
    if let [new, old] = &scalings[..] {
        ensure!(new == old, "rope_parameters and rope_scaling say unlike things; leave the right one");
    }
    let alphas = forms.iter().filter_map(|(_, form)| form.get("alpha").filter(|alpha| !alpha.is_null()));
    let base = match alphas.map(|alpha| positive("alpha", alpha)).next().transpose()? {
        None => base,
        Some(alpha) => {
            let width = head_width(fields)?;
            ensure!(width > 2, "heads are {width} wide, and alpha needs more than 2");
            base * alpha.powf(width as f64 / (width - 2) as f64)
        }
    };
    Ok(((base, scalings.pop().flatten()), notes))
}

/// The width of a head.
fn head_width(fields: &Fields) -> Result<usize> {
    let absent = || {
        let heads = fields.size("num_attention_heads", super::MOST)?;
        Ok(fields.size("hidden_size", super::MOST)? / heads)
    };
    fields.optional_size("head_dim", super::MOST)?.or(fields.family.absent.head_dim).map_or_else(absent, Ok)
}

/// The rotary positions of layers with a window, if `rope_parameters` has some of their own for them; `absent` is the
/// base without one.
///
/// # Errors
/// Those of [`read`].
pub(super) fn read_local(fields: &Fields, absent: f64) -> Result<Option<RopeSettings>> {
    let Some(sliding) = fields.get("rope_parameters").and_then(|rope| rope.get(SLIDING)) else {
        return Ok(None);
    };
    let name = format!("rope_parameters.{SLIDING}");
    let form = sliding
        .as_object()
        .with_context(|| format!("{name} is {}; expected an object", shortened(sliding)))?;
    let theta =
        form.get("rope_theta").map(|theta| positive(&format!("{name}.rope_theta"), theta)).transpose()?;
    Ok(Some((theta.unwrap_or(absent), scaling(fields, form).with_context(|| name)?)))
}

/// The factor of scores, which YaRN has for some families: that of cosines and sines by `mscale_all_dim`, for queries and for keys.
///
/// # Errors
/// If it is no number.
pub(super) fn scores_factor(fields: &Fields) -> Result<f64> {
    let Some((_, form)) = forms(fields, "full_attention")?.pop() else { return Ok(1.0) };
    let fields = RopeFields { fields, form, kind: "yarn" };
    match fields.share("mscale_all_dim")? {
        None => Ok(1.0),
        Some(share) => Ok(yarn_scale(fields.factor()?, share).powi(2)),
    }
}

/// The factor of cosines and sines, for a share of it.
fn yarn_scale(factor: f64, share: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * share * factor.ln() + 1.0 }
}

/// How queries grow with their positions, which some files say beside the rotary positions.
///
/// # Errors
/// If nothing says so, or it is not known from where on.
pub(super) fn temperature(fields: &Fields) -> Result<Option<AttentionTemperature>> {
    let forms = forms(fields, "full_attention")?;
    let get = |name: &str| {
        let value = forms.iter().find_map(|(_, form)| form.get(name).filter(|value| !value.is_null()));
        value.with_context(|| format!("there is no {name} in rope_parameters"))
    };
    let scale = "llama_4_scaling_beta";
    if get(scale)?.as_f64() == Some(0.0) {
        return Ok(None);
    }
    let length = positive(LEARNED, get(LEARNED)?)?;
    ensure!(length.fract() == 0.0, "{LEARNED} is {length}; expected a whole number");
    let (scale, length) = (positive(scale, get(scale)?)?, length as usize);
    Ok(Some(AttentionTemperature { scale, length, first: 0, is_of_rotary: true }))
}

/// The share of each head that is turned.
///
/// # Errors
/// If it is no share, or two fields say unlike things.
pub(super) fn share(fields: &Fields) -> Result<f64> {
    let name = "partial_rotary_factor";
    let forms = forms(fields, "full_attention")?;
    // All pairs of a head have wavelengths, those that are not turned too.
    if forms.iter().any(|(_, form)| form.get("rope_type").is_some_and(|kind| kind == PROPORTIONAL)) {
        return Ok(1.0);
    }
    let inside = forms.into_iter().filter_map(|(_, form)| form.get(name));
    let said: Vec<&Value> = inside.chain(fields.get(name)).filter(|share| !share.is_null()).collect();
    let Some(&first) = said.first() else { return absent_share(fields) };
    if let Some(unlike) = said.iter().find(|share| share.as_f64() != first.as_f64()) {
        bail!("{name} is {first} and {unlike}; leave the right one");
    }
    let share = first.as_f64().filter(|&share| share > 0.0 && share <= 1.0);
    let share = share
        .with_context(|| format!("{name} is {}; expected more than 0 and at most 1", shortened(first)))?;
    ensure!(
        share == 1.0 || fields.turns_a_share(),
        "{name} is {share}, and only 1 is supported for model_type {:?}",
        fields.family.model_type
    );
    Ok(share)
}

/// The share without the field: that of the family, or what `rotary_dim` says.
fn absent_share(fields: &Fields) -> Result<f64> {
    let absent = fields.family.absent;
    let Some(width) = fields.optional_size("rotary_dim", super::MOST)? else {
        return Ok(absent.rotary_share);
    };
    let dim = match fields.optional_size("head_dim", super::MOST)?.or(absent.head_dim) {
        Some(dim) => dim,
        None => fields.size("hidden_size", super::MOST)? / fields.size("num_attention_heads", super::MOST)?,
    };
    ensure!(width <= dim, "rotary_dim is {width}, and heads are {dim} wide");
    Ok(width as f64 / dim as f64)
}

/// The objects that describe rotary positions; where there are two kinds of layers, those of `layers`.
fn forms<'a>(fields: &'a Fields, layers: &str) -> Result<Vec<(&'static str, &'a Map<String, Value>)>> {
    let found =
        ["rope_parameters", "rope_scaling"].into_iter().filter_map(|name| Some((name, fields.get(name)?)));
    found
        .map(|(name, value)| {
            (name, value.get(layers).filter(|_| fields.family.has_local_rope()).unwrap_or(value))
        })
        .map(|(name, value)| {
            let object = value.as_object();
            Ok((name, object.with_context(|| format!("{name} is {}; expected an object", shortened(value)))?))
        })
        .collect()
}

/// The scaling that one of the two forms describes.
fn scaling(fields: &Fields, form: &Map<String, Value>) -> Result<Option<RopeScaling>> {
    let kinds: Vec<&Value> = ["rope_type", "type"].iter().filter_map(|name| form.get(*name)).collect();
    if let [kind, unlike] = kinds[..] {
        ensure!(kind == unlike, "rope_type is {kind} and type is {unlike}; leave the right one");
    }
    let default = Value::from("default");
    let kind = kinds.first().copied().unwrap_or(&default);
    let stretch = Value::from(BASE_STRETCH);
    let has_alpha = form.get("alpha").is_some_and(|alpha| !alpha.is_null());
    let is_stretched = kind == "dynamic" && has_alpha && fields.family.scales_by(BASE_STRETCH);
    let kind = if is_stretched { &stretch } else { kind };
    let rule =
        KINDS.iter().find(|(name, ..)| kind == name).filter(|(name, ..)| fields.family.scales_by(name));
    let known: Vec<&str> =
        KINDS.map(|(name, ..)| name).into_iter().filter(|name| fields.family.scales_by(name)).collect();
    let (kind, own, optional) = rule.with_context(|| {
        format!("rope_type {} is not supported; supported: {}", shortened(kind), known.join(", "))
    })?;
    for (name, value) in form.iter().filter(|(_, value)| !value.is_null()) {
        ensure!(
            own.iter()
                .chain(*optional)
                .chain(&COMMON)
                .chain(fields.family.of_rope())
                .any(|known| known == name)
                || (*kind == "yarn" && UNREAD.contains(&name.as_str()))
                || matches!(fields.family.rule(name), Some(FieldRule::Harmless)),
            "{name} ({}) is a field that is not known for rope_type {kind:?}",
            shortened(value)
        );
    }
    RopeFields { fields, form, kind }.scaling()
}

/// The fields of one kind.
struct RopeFields<'a> {
    fields: &'a Fields,
    form: &'a Map<String, Value>,
    kind: &'static str,
}

impl RopeFields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.form.get(name).filter(|value| !value.is_null())
    }

    fn optional(&self, name: &str) -> Result<Option<f64>> {
        self.get(name).map(|value| positive(name, value)).transpose()
    }

    /// A share of the factor of scores. transformers takes 0 as if it were not there.
    fn share(&self, name: &str) -> Result<Option<f64>> {
        match self.get(name).and_then(Value::as_f64) {
            Some(0.0) => Ok(None),
            _ => self.optional(name),
        }
    }

    fn number(&self, name: &str) -> Result<f64> {
        self.optional(name)?
            .with_context(|| format!("there is no {name}, which rope_type {:?} has", self.kind))
    }

    /// The learned context: Phi-3 has it outside, others may leave it out.
    fn learned(&self) -> Result<usize> {
        let longest = self.fields.size("max_position_embeddings", super::MOST)?;
        if self.fields.family.has(LEARNED) {
            return Ok(self.fields.optional_size(LEARNED, super::MOST)?.unwrap_or(4096));
        }
        let Some(learned) = self.optional(LEARNED)? else { return Ok(longest) };
        ensure!(
            learned.fract() == 0.0 && learned <= super::MOST as f64,
            "{LEARNED} is {learned}; expected a whole number from 1 to {}",
            super::MOST
        );
        Ok(learned as usize)
    }

    /// The factor, or by how much the context is longer than the learned one.
    fn factor(&self) -> Result<f64> {
        let longest = self.fields.size("max_position_embeddings", super::MOST)?;
        Ok(self.optional("factor")?.unwrap_or(longest as f64 / self.learned()? as f64))
    }

    fn list(&self, name: &str) -> Result<Vec<f64>> {
        let list = self
            .get(name)
            .with_context(|| format!("there is no {name}, which rope_type {:?} has", self.kind))?;
        let numbers =
            list.as_array().with_context(|| format!("{name} is {}; expected a list", shortened(list)))?;
        numbers.iter().map(|value| positive(name, value)).collect()
    }

    fn scaling(&self) -> Result<Option<RopeScaling>> {
        Ok(Some(match self.kind {
            "linear" => RopeScaling::Linear { factor: self.number("factor")? },
            "llama3" => {
                let [factor, low, high] =
                    ["factor", "low_freq_factor", "high_freq_factor"].map(|name| self.number(name));
                let (factor, low_freq_factor, high_freq_factor) = (factor?, low?, high?);
                ensure!(
                    low_freq_factor <= high_freq_factor,
                    "low_freq_factor {low_freq_factor} is more than high_freq_factor {high_freq_factor}"
                );
                let original_max_position_embeddings = self.learned()?;
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings,
                }
            }
            "dynamic" => RopeScaling::Dynamic {
                factor: self.number("factor")?,
                learned: self.fields.size("max_position_embeddings", super::MOST)?,
            },
            "yarn" => self.yarn()?,
            PROPORTIONAL => self.proportional()?,
            "longrope" | "su" => self.longrope()?,
            _ => return Ok(None),
        }))
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let factor = self.factor()?;
        let scale = |share: f64| yarn_scale(factor, share);
        let attention_factor = match (
            self.optional("attention_factor")?,
            self.share("mscale")?,
            self.share("mscale_all_dim")?,
        ) {
            (Some(factor), ..) => factor,
            (None, Some(one), Some(all)) => scale(one) / scale(all),
            _ => scale(1.0),
        };
        let truncate = self.get("truncate").map_or(Some(true), Value::as_bool);
        let (beta_fast, beta_slow) =
            (self.optional("beta_fast")?.unwrap_or(32.0), self.optional("beta_slow")?.unwrap_or(1.0));
        ensure!(beta_slow <= beta_fast, "beta_slow {beta_slow} is more than beta_fast {beta_fast}");
        Ok(RopeScaling::Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            truncate: truncate.context("truncate is neither true nor false")?,
            original_max_position_embeddings: self.learned()?,
        })
    }

    /// A factor for each pair of a head of layers without a window: that of all for those that are turned.
    fn proportional(&self) -> Result<RopeScaling> {
        let width = match self.fields.optional_size("global_head_dim", super::MOST)? {
            Some(width) => width,
            None => head_width(self.fields)?,
        };
        let share = self.optional("partial_rotary_factor")?.unwrap_or(1.0);
        ensure!(share <= 1.0, "partial_rotary_factor is {share}; expected more than 0 and at most 1");
        let (turned, factor) = ((share * width as f64) as usize / 2, self.optional("factor")?.unwrap_or(1.0));
        let of_pair = |pair: usize| if pair < turned { factor } else { STILL };
        Ok(RopeScaling::Factors((0..width / 2).map(of_pair).collect()))
    }

    fn longrope(&self) -> Result<RopeScaling> {
        let learned = self.learned()?;
        Ok(RopeScaling::Longrope {
            short_factor: self.list("short_factor")?,
            long_factor: self.list("long_factor")?,
            attention_factor: self.optional("attention_factor")?.map_or_else(
                || Ok::<_, anyhow::Error>(RopeScaling::longrope_attention(self.factor()?, learned)),
                Ok,
            )?,
            original_max_position_embeddings: learned,
        })
    }
}
