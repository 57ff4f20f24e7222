//! The heads of a layer of Mamba 2, and its tensors.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::MOST;
use super::fields::FieldRule::{self, Harmless, Used};
use super::fields::{Fields, shortened};

/// The fields from which [`Fields::mamba_heads`] reads heads, but for those of biases of projections.
pub(super) const MAMBA_FIELDS: [(&str, FieldRule); 9] = [
    // How many tokens are computed together.
    ("mamba_chunk_size", Harmless),
    ("mamba_conv_bias", Used),
    ("mamba_d_conv", Used),
    ("mamba_d_head", Used),
    ("mamba_d_state", Used),
    ("mamba_expand", Used),
    ("mamba_n_groups", Used),
    ("mamba_n_heads", Used),
    ("time_step_limit", Used),
];

/// The heads of a layer of Mamba 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaHeads {
    /// How many there are.
    pub count: usize,
    /// The inputs of a head.
    pub width: usize,
    /// The groups of heads. Those of one write and read states alike, and are normalized together.
    pub groups: usize,
    /// The numbers that a state has for each input.
    pub state: usize,
    /// The inputs that a token sees of each channel, its own included.
    pub taps: usize,
    /// Whether convolutions have biases.
    pub conv_bias: bool,
    /// Whether projections have biases.
    pub proj_bias: bool,
    /// Where what heads read is normalized.
    pub norm: StateNorm,
}

/// Where what the heads of a layer of Mamba 2 read is normalized, group by group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateNorm {
    /// Behind the gates.
    BehindGate,
    /// Before the gates.
    BeforeGate,
    /// Nowhere.
    None,
}

/// A tensor of the layer and its shape.
type MambaTensor = (String, Vec<usize>);

impl MambaHeads {
    /// The inputs of all heads.
    pub fn inner(self) -> usize {
        self.count * self.width
    }

    /// What ranks have some of, and the heads of each: groups, or the heads of a model with one group.
    pub fn units(self) -> [usize; 2] {
        if self.has_one_group() { [self.count, 1] } else { [self.groups, self.count / self.groups.max(1)] }
    }

    /// Whether all ranks have what the heads write and read states with.
    pub fn has_one_group(self) -> bool {
        self.groups == 1
    }

    /// How many of the units stay together on a rank, so that the columns of their heads are a multiple of `granule`, if that is possible.
    pub fn together(self, granule: usize) -> usize {
        let [units, heads] = self.units();
        let fits = |n: &usize| units.is_multiple_of(*n) && (n * heads * self.width).is_multiple_of(granule);
        (1..=units).find(fits).unwrap_or(1)
    }

    /// The channels of convolutions: inputs, what writes states, and what reads them.
    pub fn channels(self) -> [(&'static str, usize); 3] {
        let of_groups = self.groups * self.state;
        [("x", self.inner()), ("b", of_groups), ("c", of_groups)]
    }

    /// The rows of the projections of hidden states, as files have them one below the other: gates, the channels, and steps.
    pub fn inputs(self) -> [(&'static str, usize); 5] {
        let [x, b, c] = self.channels();
        [("z", self.inner()), x, b, c, ("dt", self.count)]
    }

    /// The numbers of the state of a text, on all `tp` ranks together.
    pub fn state_size(self, tp: usize) -> usize {
        let [(_, x), (_, b), (_, c)] = self.channels();
        let copies = if self.has_one_group() { tp.max(1) } else { 1 };
        let inputs = (b + c).saturating_mul(copies).saturating_add(x);
        inputs
            .saturating_mul(self.taps.saturating_sub(1))
            .saturating_add(self.inner().saturating_mul(self.state))
    }

    /// The tensors of the layer, in a model of this width.
    pub(super) fn tensors(self, hidden: usize) -> Vec<MambaTensor> {
        let mut tensors = Vec::new();
        let mut add = |module: String, shape: Vec<usize>, has_bias: bool| {
            tensors.extend(has_bias.then(|| (format!("{module}.bias"), vec![shape[0]])));
            tensors.push((format!("{module}.weight"), shape));
        };
        for (part, rows) in self.inputs() {
            add(format!("mamba.in_proj_{part}"), vec![rows, hidden], self.proj_bias);
        }
        add("mamba.out_proj".into(), vec![hidden, self.inner()], self.proj_bias);
        for (part, rows) in self.channels() {
            add(format!("mamba.conv1d_{part}"), vec![rows, 1, self.taps], self.conv_bias);
        }
        if self.norm != StateNorm::None {
            add("mamba.norm".into(), vec![self.inner()], false);
        }
        tensors.extend(["A_log", "D", "dt_bias"].map(|name| (format!("mamba.{name}"), vec![self.count])));
        tensors
    }

    /// The tensors that files have in one: the name of each, and the names and rows of its parts.
    pub(super) fn fused(self) -> Vec<(String, Vec<(String, usize)>)> {
        let all = |module: &str, parameter: &str, parts: &[(&str, usize)]| {
            let part = |(part, rows): &(&str, usize)| (format!("mamba.{module}_{part}.{parameter}"), *rows);
            (format!("mamba.{module}.{parameter}"), parts.iter().map(part).collect())
        };
        let (inputs, channels) = (self.inputs(), self.channels());
        let mut fused = vec![all("in_proj", "weight", &inputs), all("conv1d", "weight", &channels)];
        fused.extend(self.proj_bias.then(|| all("in_proj", "bias", &inputs)));
        fused.extend(self.conv_bias.then(|| all("conv1d", "bias", &channels)));
        fused
    }

    /// Whether each rank has all of a tensor of the layer.
    pub(crate) fn is_whole(self, tensor: &str) -> bool {
        let of_groups = ["in_proj_b.", "in_proj_c.", "conv1d_b.", "conv1d_c."];
        let is_of_group = of_groups.iter().any(|part| tensor.contains(part)) && self.has_one_group();
        is_of_group || tensor.ends_with("out_proj.bias")
    }

    /// Checks that groups have as many heads each, and that there are not too many channels.
    pub(super) fn checked(self) -> Result<Self> {
        let Self { count, width, groups, state, .. } = self;
        let most = [count.saturating_mul(width), groups.saturating_mul(state)];
        ensure!(
            count.is_multiple_of(groups.max(1)) && most.iter().all(|channels| *channels <= MOST),
            "{groups} groups do not divide the {count} heads of states, or heads are too many"
        );
        Ok(self)
    }
}

impl Fields {
    /// The heads that the fields describe, which are `inner` wide together, as `origin` says, and whose norm is behind the gates.
    pub(super) fn mamba_heads(&self, inner: usize, origin: &str) -> Result<MambaHeads> {
        let size =
            |name, absent| Ok::<_, anyhow::Error>(self.optional_size(name, 1 << 16)?.unwrap_or(absent));
        let count = size("mamba_n_heads", 128)?;
        let width = match self.get("mamba_d_head") {
            Some(width) if *width != "auto" => size("mamba_d_head", 1)?,
            _ => inner / count,
        };
        ensure!(
            count.saturating_mul(width) == inner,
            "mamba_n_heads is {count} and mamba_d_head is {width}; together they are not {origin}"
        );
        self.steps_without_limits()?;
        MambaHeads {
            count,
            width,
            groups: size("mamba_n_groups", 1)?,
            state: size("mamba_d_state", 256)?,
            taps: size("mamba_d_conv", 4)?,
            conv_bias: self.switch_or("mamba_conv_bias", true)?,
            proj_bias: self.switch("mamba_proj_bias")?,
            norm: StateNorm::BehindGate,
        }
        .checked()
    }

    /// Checks that steps have no other limits than 0 and infinity.
    pub(super) fn steps_without_limits(&self) -> Result<()> {
        let Some(limits) = self.get("time_step_limit") else { return Ok(()) };
        // Some files have the largest number there is, in 64 bits.
        let is_largest = |value: &Value| value.as_f64().is_some_and(|number| number >= f64::from(f32::MAX));
        let is_infinite = |value: &Value| value["__float__"] == "Infinity" || is_largest(value);
        let is_plain = match limits.as_array().map(Vec::as_slice) {
            Some([low, high]) => low.as_f64() == Some(0.0) && is_infinite(high),
            _ => false,
        };
        ensure!(is_plain, "time_step_limit is {}, and only [0.0, Infinity] is supported", shortened(limits));
        Ok(())
    }
}
