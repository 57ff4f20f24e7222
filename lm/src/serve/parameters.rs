//! How texts are written: the fields that chats and completions have in common.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use candle_lm::sample::Sampling;
use candle_lm::serve::ServeRequest;
use candle_lm::stops;
use serde_json::Value;

use super::access::Client;
use super::api_error::{ApiError, ApiResult};
use super::fields::{self, Fields, wrong};
use super::model::ServedModel;

/// What a server allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeLimits {
    /// The most bytes of a body.
    pub body: usize,
    /// The most texts of a request: prompts × `n`.
    pub texts: usize,
    /// The most time of a request, from its arrival to its last token.
    pub time: Duration,
}

impl Default for ServeLimits {
    /// 16 MiB, 16 texts, 10 minutes.
    fn default() -> Self {
        Self { body: 16 << 20, texts: 16, time: Duration::from_secs(600) }
    }
}

/// The most texts that end a text.
const MOST_STOPS: usize = 16;
/// The most characters of each.
const LONGEST_STOP: usize = 1000;
/// The most tokens with a bias.
const MOST_BIASES: usize = 4096;
/// The most log-probabilities of all texts of a request.
const MOST_LOGPROBS: usize = 1 << 17;

/// Fields of other servers for texts of a form.
const GRAMMARS: [&str; 10] = [
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "regex",
    "structured_outputs",
    "use_beam_search",
];
/// Fields of other servers that change a text, and what each may say here: that it changes nothing.
const UNDONE: [(&str, &[Neutral]); 28] = [
    ("add_generation_prompt", &[Neutral::True]),
    ("allowed_token_ids", &[Neutral::Empty]),
    ("bad_words", &[Neutral::Empty]),
    ("continue_final_message", &[Neutral::Empty]),
    ("custom_logit_processor", &[Neutral::Empty]),
    ("documents", &[Neutral::Empty]),
    ("dry_multiplier", &[Neutral::Number(0.0)]),
    ("dynatemp_range", &[Neutral::Number(0.0)]),
    ("include_stop_str_in_output", &[Neutral::Empty]),
    ("length_penalty", &[Neutral::Number(1.0)]),
    ("logits_processors", &[Neutral::Empty]),
    ("lora", &[Neutral::Empty]),
    ("lora_path", &[Neutral::Empty]),
    ("min_new_tokens", &[Neutral::Number(0.0)]),
    ("min_tokens", &[Neutral::Number(0.0)]),
    ("mirostat", &[Neutral::Number(0.0)]),
    ("n_predict", &[Neutral::Number(-1.0)]),
    ("no_repeat_ngram_size", &[Neutral::Number(0.0)]),
    ("prompt_logprobs", &[Neutral::Empty]),
    ("repeat_penalty", &[Neutral::Number(1.0)]),
    ("skip_special_tokens", &[Neutral::True]),
    ("stop_regex", &[Neutral::Empty]),
    ("tfs_z", &[Neutral::Number(1.0)]),
    ("top_n_sigma", &[Neutral::Number(-1.0), Neutral::Number(0.0)]),
    ("truncate_prompt_tokens", &[Neutral::Empty]),
    ("typ_p", &[Neutral::Number(1.0)]),
    ("typical_p", &[Neutral::Number(1.0)]),
    ("xtc_probability", &[Neutral::Number(0.0)]),
];

/// A value that asks for nothing.
pub(super) enum Neutral {
    /// False, or an empty list, text or object.
    Empty,
    True,
    Number(f64),
}

impl Neutral {
    fn is(&self, value: &Value) -> bool {
        match *self {
            Self::Empty => fields::is_empty(value),
            Self::True => *value == Value::Bool(true),
            Self::Number(number) => value.as_f64() == Some(number),
        }
    }
}

/// Refuses what would change `what`, and is not done here: fields that say something else than their neutral values.
pub(super) fn refuse_undone(
    fields: &Fields,
    what: &str,
    undone: &[(&'static str, &[Neutral])],
) -> ApiResult<()> {
    for (name, neutral) in undone {
        let is_neutral = |value: &Value| neutral.iter().any(|neutral| neutral.is(value));
        if fields.get(name).is_some_and(|value| !is_neutral(value)) {
            let why = format!("`{name}` is not supported, and would change {what}: leave it out.");
            return Err(ApiError::invalid(*name, why));
        }
    }
    Ok(())
}

/// What a request says of all its texts.
pub(super) struct Parameters {
    sampling: Sampling,
    logit_bias: BTreeMap<u32, f32>,
    pub(super) stops: Vec<String>,
    stop_tokens: BTreeSet<u32>,
    ignore_eos: bool,
    deadline: Instant,
    salt: u64,
    adapter: Option<usize>,
    client: u64,
    /// The texts for each prompt.
    pub(super) count: usize,
    /// The most tokens, if the request says so.
    pub(super) most: Option<usize>,
    pub(super) streams: bool,
    pub(super) includes_usage: bool,
    pub(super) logprobs: Option<usize>,
}

impl Parameters {
    /// Reads the fields. The most tokens are the first of `most` that is there.
    pub(super) fn read(
        fields: &Fields,
        most: &[&'static str],
        logprobs: Option<usize>,
        (model, limits, client, arrival): (&ServedModel, &ServeLimits, &Client, Instant),
    ) -> ApiResult<Self> {
        let adapter = check_model(fields, model)?;
        if model.embedding.is_some() {
            let why = format!(
                "The model {:?} is an encoder, which writes no text: use /v1/embeddings.",
                model.name
            );
            return Err(ApiError::invalid("model", why));
        }
        fields.refuse(&["chat_template"], "templates are the model's")?;
        fields.refuse(&GRAMMARS, "use `response_format`")?;
        refuse_undone(fields, "the text", &UNDONE)?;
        let count = fields.count("n", 1, limits.texts as u64)?.unwrap_or(1) as usize;
        let seed = match fields.seed("seed")? {
            Some(seed) => seed,
            None => random(),
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
            top_p: fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0),
            top_k: top_k(fields)?,
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
            repetition_penalty: fields.number("repetition_penalty", 0.01, 100.0)?.unwrap_or(1.0),
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            seed,
        };
        let (stops, stop_tokens) = stops_of(fields, model)?;
        let mut limit = None;
        for name in most {
            limit = limit.or(fields.count(name, 0, u64::from(u32::MAX))?.map(|most| most as usize));
        }
        const OPTIONS: &str = "stream_options";
        let told = fields.object(OPTIONS)?.and_then(|options| options.get("include_usage"));
        let tells_usage = match told {
            None | Some(Value::Null) => false,
            Some(value) => {
                value.as_bool().ok_or_else(|| wrong(OPTIONS, value, "a boolean `include_usage`"))?
            }
        };
        let streams = fields.flag("stream")?.unwrap_or(false);
        Ok(Self {
            sampling,
            logit_bias: biases(fields, model)?,
            stops,
            stop_tokens,
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            deadline: arrival + limits.time,
            salt: client.salt ^ cache_salt(fields)?,
            adapter,
            client: client.salt,
            count,
            most: limit,
            streams,
            includes_usage: streams && tells_usage,
            logprobs,
        })
    }

    /// The most tokens of each of so many texts whose log-probabilities are told.
    pub(super) fn most_told(&self, texts: usize) -> usize {
        let each = |top: usize| MOST_LOGPROBS / (top + 1).saturating_mul(texts.max(1));
        self.logprobs.map_or(usize::MAX, each).max(1)
    }

    /// Refuses a request whose texts together have too many `tokens` for their log-probabilities.
    pub(super) fn check_told(&self, tokens: usize) -> ApiResult<()> {
        let told = self.logprobs.map_or(0, |top| (top + 1).saturating_mul(tokens));
        if told <= MOST_LOGPROBS {
            return Ok(());
        }
        Err(ApiError::invalid(
            "logprobs",
            format!(
                "The request asks for {told} log-probabilities, and at most {MOST_LOGPROBS} are told: ask for fewer tokens, texts or top ones."
            ),
        ))
    }

    /// The request for one text, the `place`-th of all texts, which has at most so many tokens.
    pub(super) fn request(&self, prompt: Vec<u32>, most: usize, place: usize) -> ServeRequest {
        ServeRequest {
            sampling: Sampling { seed: self.sampling.seed.wrapping_add(place as u64), ..self.sampling },
            logit_bias: self.logit_bias.clone(),
            stop_tokens: self.stop_tokens.clone(),
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
            deadline: Some(self.deadline),
            cache_salt: self.salt,
            adapter: self.adapter,
            client: self.client,
            ..ServeRequest::new(prompt, most)
        }
    }
}

/// The adapter that a request asks for by the name of its model. A request that names none means the model itself.
pub(super) fn check_model(fields: &Fields, model: &ServedModel) -> ApiResult<Option<usize>> {
    let Some(wanted) = fields.text("model")?.filter(|wanted| *wanted != model.name) else { return Ok(None) };
    let adapter = model.adapters.iter().position(|name| name == wanted);
    adapter.map(Some).ok_or_else(|| ApiError::no_model(wanted, model.names()))
}

/// A seed for who does not give one.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Without random numbers all such texts have one seed.
    getrandom::fill(&mut bytes).ok();
    u64::from_ne_bytes(bytes)
}

/// Other servers take -1 for all.
fn top_k(fields: &Fields) -> ApiResult<usize> {
    match fields.get("top_k").and_then(Value::as_i64) {
        Some(-1) => Ok(0),
        _ => Ok(fields.count("top_k", 0, u64::from(u32::MAX))?.unwrap_or(0) as usize),
    }
}

/// A salt of the client's own.
fn cache_salt(fields: &Fields) -> ApiResult<u64> {
    use sha2::{Digest, Sha256};
    let digest = fields.text("cache_salt")?.map(|salt| Sha256::digest(salt.as_bytes()));
    Ok(digest.map_or(0, |digest| digest.iter().take(8).fold(0, |salt, &byte| salt << 8 | u64::from(byte))))
}

fn stops_of(fields: &Fields, model: &ServedModel) -> ApiResult<(Vec<String>, BTreeSet<u32>)> {
    let wanted = "a string, or a list of up to 16 strings of 1 to 1000 characters";
    let texts: Vec<String> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(value @ Value::Array(list)) => {
            let texts = list.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
            texts.ok_or_else(|| wrong("stop", value, wanted))?
        }
        Some(value) => return Err(wrong("stop", value, wanted)),
    };
    let fits = |text: &String| !text.is_empty() && text.chars().count() <= LONGEST_STOP;
    if texts.len() > MOST_STOPS || !texts.iter().all(fits) {
        return Err(ApiError::invalid(
            "stop",
            format!("`stop` has too many texts, or an empty or a long one: give {wanted}."),
        ));
    }
    // A special token and other text, which some clients send, never match together: it stays a text that ends nothing.
    let (mut stops, mut tokens) = (Vec::new(), BTreeSet::new());
    for text in texts {
        match stops::split(std::slice::from_ref(&text), &model.tokenizer) {
            Ok((texts, special)) => {
                stops.extend(texts);
                tokens.extend(special);
            }
            Err(_) => stops.push(text),
        }
    }
    for token in fields.list("stop_token_ids")?.into_iter().flatten() {
        tokens.insert(
            fields::token(token, model.vocab_size).ok_or_else(|| unknown("stop_token_ids", token, model))?,
        );
    }
    Ok((stops, tokens))
}

fn unknown(name: &'static str, token: &Value, model: &ServedModel) -> ApiError {
    wrong(name, token, &format!("tokens from 0 to {}", model.vocab_size.saturating_sub(1)))
}

fn biases(fields: &Fields, model: &ServedModel) -> ApiResult<BTreeMap<u32, f32>> {
    const NAME: &str = "logit_bias";
    let Some(given) = fields.object(NAME)? else { return Ok(BTreeMap::new()) };
    if given.len() > MOST_BIASES {
        return Err(ApiError::invalid(NAME, format!("`{NAME}` has more than {MOST_BIASES} tokens.")));
    }
    let one = |(token, bias): (&String, &Value)| {
        // A number has no sign.
        let digits = Some(token).filter(|token| token.bytes().all(|byte| byte.is_ascii_digit()));
        let number = digits.and_then(|token| token.parse::<u64>().ok()).map_or(Value::Null, Value::from);
        let token = fields::token(&number, model.vocab_size)
            .ok_or_else(|| unknown(NAME, &Value::from(token.as_str()), model))?;
        let value = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        Ok((token, value.ok_or_else(|| wrong(NAME, bias, "numbers from -100 to 100"))? as f32))
    };
    given.iter().map(one).collect()
}

/// The tokens of a prompt that are read again to know how the next one looks.
pub(super) fn tail(prompt: &[u32]) -> Vec<u32> {
    prompt[prompt.len().saturating_sub(8)..].to_vec()
}
