//! Rotary positions.

use std::f64::consts::PI;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_shard::kernels::RopePairs;
use candle_shard::nn::MeshVarBuilder;
use candle_shard::{DTensor, Documents, Error, Placements, Replicate, Result, TokenOrder};
use parking_lot::Mutex;

use crate::config::parts::AttentionTemperature;
use crate::config::{Config, RopeScaling};

/// Where tokens of a text are in it: the first position, and how many they are.
pub(crate) type TokenPositions = [usize; 2];

/// The position of a token that belongs to no document.
pub(crate) const PADDING: u32 = u32::MAX;

/// The cosines and sines of positions, which every rank has.
#[derive(Clone, Debug)]
pub(crate) struct Angles {
    all: RopeTables,
    /// Those of layers with a window, if they are others.
    local: Option<RopeTables>,
    pairs: RopePairs,
    positions: usize,
    /// The documents that rows are packed of, if not each row is one.
    packed: Option<PackedRows>,
}

/// What the rows of a batch are packed of.
#[derive(Clone, Debug)]
pub(crate) struct PackedRows {
    /// Where documents end.
    documents: Documents,
    /// Where the tokens of all rows are in their documents, row by row.
    places: Vec<TokenPositions>,
    rows: usize,
}

impl PackedRows {
    /// Reads the positions `[own rows, parts, tokens]` of all rows of a batch, of which each of `parts` ranks has its own: those of a part
    /// follow those of the part before. A document begins at each 0, and behind the last one there may be [`PADDING`].
    pub(crate) fn read(positions: &Tensor) -> candle_core::Result<Self> {
        let positions = positions.transpose(0, 1)?.flatten_to(1)?.to_vec2::<u32>()?;
        let (mut documents, mut places) = (Vec::with_capacity(positions.len()), Vec::new());
        for row in &positions {
            let end = row.iter().position(|&position| position == PADDING).unwrap_or(row.len());
            let starts = (0..end).filter(|&at| row[at] == 0);
            let ends: Vec<usize> = starts.chain([end]).collect();
            places.extend(ends.windows(2).map(|pair| [0, pair[1] - pair[0]]));
            if end < row.len() {
                places.push([0, row.len() - end]);
            }
            documents.push(ends);
        }
        Ok(Self { documents: Documents::of_each(documents), places, rows: positions.len() })
    }
}

impl Angles {
    /// Those of so many positions.
    pub(crate) fn new(config: &Config, positions: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let temperature = config.parts.temperature;
        let turns = |theta, scaling: Option<&RopeScaling>, width: usize| {
            let frequencies = Frequencies { theta, scaling: scaling.cloned(), width, temperature };
            RopeTables::new(frequencies, positions, vb)
        };
        let local = config
            .parts
            .local_rope
            .as_ref()
            .map(|(theta, scaling)| turns(*theta, scaling.as_ref(), config.local_rotary_width()));
        let all = turns(config.rope_theta, config.rope_scaling.as_ref(), config.rotary_width())?;
        let (pairs, packed) = (config.parts.pairs, None);
        Ok(Self { all, local: local.transpose()?, pairs, positions, packed })
    }

    /// Turns the tokens of sequences that have all positions, and lie in an order.
    pub(crate) fn in_order(mut self, order: TokenOrder) -> Self {
        for turns in [Some(&mut self.all), self.local.as_mut()].into_iter().flatten() {
            turns.order = Some(order.clone());
            turns.rows = Arc::default();
        }
        self
    }

    /// Turns the tokens of rows that are packed of documents.
    pub(crate) fn of_packed(&self, packed: PackedRows) -> Self {
        Self { packed: Some(packed), ..self.clone() }
    }

    /// The documents of the rows, if not each row is one.
    pub(crate) fn documents(&self) -> Option<&Documents> {
        self.packed.as_ref().map(|packed| &packed.documents)
    }

    /// Where the tokens of whole rows are, each of so many tokens.
    pub(crate) fn rows_of(&self, tokens: usize) -> Vec<TokenPositions> {
        self.packed.as_ref().map_or_else(|| vec![[0, tokens]], |packed| packed.places.clone())
    }

    /// The order of the tokens, if it is not that of their positions.
    pub(crate) fn order(&self) -> Option<&TokenOrder> {
        self.all.order.as_ref()
    }

    /// How many positions these are.
    pub(crate) fn positions(&self) -> usize {
        self.positions
    }

    /// Queries or keys `[batch, heads, tokens, dim]`, turned by their positions; for a layer with a window if it
    /// `is_local`. The tokens are those of texts, one behind another.
    ///
    /// # Errors
    /// If a text becomes so long that the positions before its tokens would be turned otherwise.
    pub(crate) fn turn(&self, x: &DTensor, texts: &[TokenPositions], is_local: bool) -> Result<DTensor> {
        let turns = self.local.as_ref().filter(|_| is_local).unwrap_or(&self.all);
        let tables = self.of_texts(turns, texts)?;
        let [cos, sin, ..] = &tables[..] else { return Ok(x.clone()) };
        let (first, rest) = split(x, turns.frequencies.width)?;
        joined(first.rope(cos, sin, 0, self.pairs)?, rest)
    }

    /// Like [`turn`](Self::turn) for queries and keys of the same tokens, at once.
    pub(crate) fn turn_both(
        &self,
        [q, k]: [&DTensor; 2],
        texts: &[TokenPositions],
        is_local: bool,
    ) -> Result<[DTensor; 2]> {
        let turns = self.local.as_ref().filter(|_| is_local).unwrap_or(&self.all);
        let tables = self.of_texts(turns, texts)?;
        let [cos, sin, ..] = &tables[..] else { return Ok([q.clone(), k.clone()]) };
        let (first_q, rest_q) = split(q, turns.frequencies.width)?;
        let (first_k, rest_k) = split(k, turns.frequencies.width)?;
        let [q, k] = first_q.rope_both(&first_k, cos, sin, 0, self.pairs)?;
        Ok([joined(q, rest_q)?, joined(k, rest_k)?])
    }

    /// Queries `[batch, heads, tokens, dim]` times the factors of their positions, if there are some. The tokens are those of texts.
    pub(crate) fn scale_queries(&self, x: DTensor, texts: &[TokenPositions]) -> Result<DTensor> {
        let tables = self.of_texts(&self.all, texts)?;
        let [_, _, factors] = &tables[..] else { return Ok(x) };
        // A dim for heads.
        let factors = if factors.dims().len() > 2 { factors.unsqueeze(1)? } else { factors.clone() };
        x.to_dtype(factors.dtype())?.mul(&factors)?.to_dtype(x.dtype())
    }

    fn of_texts(&self, tables: &RopeTables, texts: &[TokenPositions]) -> Result<Arc<[DTensor]>> {
        tables.of_texts(texts, self.packed.as_ref().map(|packed| packed.rows))
    }
}

/// The elements of heads that turn, and the others if there are some.
fn split(x: &DTensor, width: usize) -> Result<(DTensor, Option<DTensor>)> {
    match x.dims()[3] {
        dim if dim == width => Ok((x.clone(), None)),
        dim => Ok((x.narrow(3, 0, width)?, Some(x.narrow(3, width, dim - width)?))),
    }
}

fn joined(turned: DTensor, rest: Option<DTensor>) -> Result<DTensor> {
    rest.map_or(Ok(turned.clone()), |rest| DTensor::cat(&[turned, rest], 3))
}

/// The places of the tokens of a step, the rows that they fill, and the angles that they take.
type RopeStep = (Vec<TokenPositions>, Option<usize>, Option<Arc<[DTensor]>>);

/// The tables of one kind of layers.
#[derive(Clone, Debug)]
struct RopeTables {
    frequencies: Frequencies,
    /// The tables of the last length, and what of the length they depend on.
    tables: Arc<Mutex<(usize, Vec<Tensor>)>>,
    /// The rows of the tokens of the last step, which all layers turn alike.
    rows: Arc<Mutex<RopeStep>>,
    positions: usize,
    /// The order of the tokens of a sequence, if it is not that of the positions.
    order: Option<TokenOrder>,
    mesh: DeviceMesh,
    dtype: DType,
    device: Device,
}

impl RopeTables {
    fn new(frequencies: Frequencies, positions: usize, vb: &MeshVarBuilder) -> Result<Self> {
        let (mesh, dtype, device) = (vb.mesh(), vb.dtype(), vb.device());
        let key = frequencies.key(1);
        let tables = tables(&frequencies, key, positions, dtype, device)?;
        let tables = Arc::new(Mutex::new((key, tables)));
        let rows = Arc::default();
        Ok(Self {
            frequencies,
            tables,
            rows,
            positions,
            order: None,
            mesh: mesh.clone(),
            dtype,
            device: device.clone(),
        })
    }

    /// The tables that depend on a length by this key.
    fn made(&self, key: usize) -> Result<(usize, Vec<Tensor>)> {
        let Self { frequencies, positions, dtype, device, .. } = self;
        Ok((key, tables(frequencies, key, *positions, *dtype, device)?))
    }

    /// The cosines and sines `[tokens, pairs]` of the tokens of texts, one text behind another, and the factors of their queries
    /// `[tokens, 1]`, if there are some; `[rows, tokens, ..]` if the texts fill so many `rows`.
    fn of_texts(&self, texts: &[TokenPositions], rows: Option<usize>) -> Result<Arc<[DTensor]>> {
        let mut held = self.rows.lock();
        if let (places, filled, Some(angles)) = &*held
            && (places.as_slice(), *filled) == (texts, rows)
        {
            return Ok(angles.clone());
        }
        let of_text = |&[start, tokens]: &TokenPositions| {
            let tables = self.tables(start, start + tokens)?;
            tables.iter().map(|table| Ok(table.narrow(0, start, tokens)?)).collect::<Result<Vec<_>>>()
        };
        let parts = texts.iter().map(of_text).collect::<Result<Vec<_>>>()?;
        let everywhere = Placements::from_elem(Replicate, self.mesh.ndim());
        let joined = |nth: usize| {
            let parts: Vec<&Tensor> = parts.iter().map(|tables| &tables[nth]).collect();
            let mut table = if let [one] = parts[..] { one.clone() } else { Tensor::cat(&parts, 0)? };
            if let Some(rows) = rows {
                let (tokens, pairs) = table.dims2()?;
                table = table.reshape((rows, tokens / rows.max(1), pairs))?;
            }
            if let Some(order) = &self.order {
                table = order.apply(&table, table.rank() - 2)?;
            }
            let shape = table.shape().clone();
            DTensor::from_local(table, &self.mesh, &everywhere, shape)
        };
        let angles: Arc<[DTensor]> =
            (0..parts.first().map_or(0, Vec::len)).map(joined).collect::<Result<_>>()?;
        *held = (texts.to_vec(), rows, Some(angles.clone()));
        Ok(angles)
    }

    /// The tables for tokens from `start` of a sequence of `length` tokens.
    fn tables(&self, start: usize, length: usize) -> Result<Vec<Tensor>> {
        if let Some(learned) = self.frequencies.scaling.as_ref().and_then(RopeScaling::turns_anew_after)
            && (1..=learned).contains(&start)
            && length > learned
        {
            return Err(Error::Layout(format!(
                "positions are turned otherwise in sequences longer than {learned} tokens: compute the {start} cached tokens again"
            )));
        }
        let key = self.frequencies.key(length);
        let mut held = self.tables.lock();
        if held.0 != key {
            *held = self.made(key)?;
        }
        Ok(held.1.clone())
    }
}

fn tables(
    frequencies: &Frequencies,
    key: usize,
    positions: usize,
    dtype: DType,
    device: &Device,
) -> Result<Vec<Tensor>> {
    let (values, scale) = frequencies.of(key);
    let values: Vec<f32> = values.into_iter().map(|frequency| frequency as f32).collect();
    let count = values.len();
    let values = Tensor::from_vec(values, (1, count), device)?;
    let places = Tensor::arange(0u32, positions as u32, device)?.to_dtype(DType::F32)?;
    let angles = places.unsqueeze(1)?.matmul(&values)?;
    let whole = |table: Tensor| table.affine(scale, 0.0)?.to_dtype(dtype);
    let mut made = vec![whole(angles.cos()?)?, whole(angles.sin()?)?];
    if let Some(temperature) = &frequencies.temperature {
        let factors: Vec<f32> = (0..positions).map(|position| temperature.at(position) as f32).collect();
        let factors = Tensor::from_vec(factors, (positions, 1), device)?;
        // As in transformers: those of layers without rotary positions are not rounded, what they multiply is.
        made.push(if temperature.is_of_rotary { factors.to_dtype(dtype)? } else { factors });
    }
    Ok(made)
}

/// The frequencies of the pairs of a head.
#[derive(Clone, Debug)]
struct Frequencies {
    theta: f64,
    scaling: Option<RopeScaling>,
    /// The elements of a head that are turned: the first ones.
    width: usize,
    /// Of queries.
    temperature: Option<AttentionTemperature>,
}

impl Frequencies {
    /// What of the length of a sequence the frequencies depend on.
    fn key(&self, length: usize) -> usize {
        match &self.scaling {
            Some(RopeScaling::Dynamic { learned, .. }) => length.max(*learned),
            Some(RopeScaling::Longrope { original_max_position_embeddings: learned, .. }) => {
                usize::from(length > *learned)
            }
            _ => 0,
        }
    }

    /// The frequencies, and the factor of cosines and sines.
    fn of(&self, key: usize) -> (Vec<f64>, f64) {
        let Self { theta, scaling, width, .. } = self;
        let width = *width as f64;
        let of_base = |base: f64| (0..self.width / 2).map(move |i| base.powf(-(2.0 * i as f64) / width));
        let plain = || of_base(*theta);
        let divided =
            |factors: &[f64]| plain().zip(factors).map(|(frequency, factor)| frequency / factor).collect();
        match scaling {
            None => (plain().collect(), 1.0),
            Some(RopeScaling::Linear { factor }) => {
                (plain().map(|frequency| frequency / factor).collect(), 1.0)
            }
            Some(RopeScaling::Factors(factors)) => (divided(factors), 1.0),
            Some(RopeScaling::Longrope { short_factor, long_factor, attention_factor, .. }) => {
                (divided(if key == 0 { short_factor } else { long_factor }), *attention_factor)
            }
            Some(RopeScaling::Dynamic { factor, learned }) => {
                let stretch = factor * key as f64 / *learned as f64 - (factor - 1.0);
                (of_base(theta * stretch.powf(width / (width - 2.0))).collect(), 1.0)
            }
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: learned,
            }) => {
                // How often the pair turns in the learned context: rare turns are stretched, frequent ones are not.
                let scaled = |frequency: f64| {
                    let turns = *learned as f64 * frequency / (2.0 * PI);
                    let span = high_freq_factor - low_freq_factor;
                    let kept = match span > 0.0 {
                        true => ((turns - low_freq_factor) / span).clamp(0.0, 1.0),
                        // Nothing is between both.
                        false => f64::from(u8::from(turns >= *low_freq_factor)),
                    };
                    frequency * (kept + (1.0 - kept) / factor)
                };
                (plain().map(scaled).collect(), 1.0)
            }
            Some(RopeScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position_embeddings: learned,
            }) => {
                // The pair that turns so often in the learned context, as a fraction between pairs.
                let pair =
                    |turns: f64| width * (*learned as f64 / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
                let (low, high) = (pair(*beta_fast), pair(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(width - 1.0));
                let span = if low == high { 0.001 } else { high - low };
                let scaled = |(i, frequency): (usize, f64)| {
                    let stretched = ((i as f64 - low) / span).clamp(0.0, 1.0);
                    frequency * (1.0 - stretched) + frequency / factor * stretched
                };
                (plain().enumerate().map(scaled).collect(), *attention_factor)
            }
        }
    }
}
