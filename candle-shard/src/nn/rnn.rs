//! candle's recurrent layers, with the batch or the hidden units sharded.
use crate::layout::{Placement, Placements, Replicate, RowsOf, Shard, Spec, StoredName, Width};
use crate::nn::MeshVarBuilder;
use crate::nn::init::init_of;
use crate::parallel::{LayerKind, ModuleStyle};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_nn::rnn::{Direction, GRUConfig, LSTMConfig};

/// A recurrent network: candle's `RNN` for a mesh.
pub trait RNN {
    /// The state that a step passes to the next one.
    type State: Clone;

    /// Returns the state of zeros before the first step, for inputs laid out like `like`, whose dim 0 is the batch.
    fn zero_state(&self, like: &DTensor) -> Result<Self::State>;

    /// Returns the state after a step with the input `[batch, features]`.
    #[track_caller]
    fn step(&self, input: &DTensor, state: &Self::State) -> Result<Self::State>;

    /// Returns the states after each step with the input `[batch, steps, features]`, starting from zeros.
    #[track_caller]
    fn seq(&self, input: &DTensor) -> Result<Vec<Self::State>> {
        self.seq_init(input, &self.zero_state(input)?)
    }

    /// Returns the states after each step with the input `[batch, steps, features]`, starting from `state`.
    ///
    /// The batch may be sharded; a sharded step dim is gathered once.
    #[track_caller]
    fn seq_init(&self, input: &DTensor, state: &Self::State) -> Result<Vec<Self::State>> {
        let (_, steps, _) = input.dims3()?;
        let input = input.placed(|_, placement| if placement == Shard(1) { Replicate } else { placement })?;
        let mut states: Vec<Self::State> = Vec::with_capacity(steps);
        for step in 0..steps {
            states.push(self.step(&input.get_on_dim(1, step)?, states.last().unwrap_or(state))?);
        }
        Ok(states)
    }

    /// Joins the outputs of states to one tensor: `[batch, steps, hidden]` for an [`LSTM`], `[batch, steps · hidden]`
    /// for a [`GRU`], as in candle.
    fn states_to_tensor(&self, states: &[Self::State]) -> Result<DTensor>;
}

/// The parameters of all gates, or of one.
#[derive(Debug, Clone)]
struct GateParams {
    w_ih: DTensor,
    w_hh: DTensor,
    b_ih: Option<DTensor>,
    b_hh: Option<DTensor>,
}

/// The parameters of a layer with `N` gates.
#[derive(Debug, Clone)]
struct Gates<const N: usize> {
    /// All gates in one, or each by itself if a plan shards the hidden units: a shard has the same units of each gate.
    projections: Vec<GateParams>,
    features: usize,
    hidden: usize,
    /// The placement of the weights on the plan's axis.
    at: Placement,
    style: ModuleStyle,
}

/// Initial values of the two weights, and of the two biases if there are any.
type Inits = ([candle_nn::Init; 2], [Option<candle_nn::Init>; 2]);

impl<const N: usize> Gates<N> {
    /// Parameters with names that end in `suffix`; those of a gate by itself also in its name.
    fn new(
        names: [&str; N],
        [features, hidden]: [usize; 2],
        (weights, biases): Inits,
        suffix: &str,
        vb: &MeshVarBuilder,
    ) -> Result<Self> {
        let style = vb.style();
        let at = style.layout(LayerKind::Recurrent)?.weight;
        // A parameter of all gates, or the rows of one gate in it.
        let get = |gate: Option<usize>, columns: Option<usize>, name: &str, init| {
            let whole: Vec<usize> = [N * hidden].into_iter().chain(columns).collect();
            let (init, of) = (init_of(init, &whole), format!("{name}_{suffix}"));
            let Some(gate) = gate else { return vb.get(whole, &of, init, at, false) };
            let dims: Vec<Width> = [hidden].into_iter().chain(columns).map(Width::from).collect();
            let name = format!("{of}.{}", names[gate]);
            let within = Some(RowsOf { of, rows: N * hidden, start: gate * hidden });
            vb.part(&dims, StoredName { name, within }, init, at, false)
        };
        let projection = |gate| {
            let bias = |name, init: Option<_>| init.map(|init| get(gate, None, name, init)).transpose();
            Ok(GateParams {
                w_ih: get(gate, Some(features), "weight_ih", weights[0])?,
                w_hh: get(gate, Some(hidden), "weight_hh", weights[1])?,
                b_ih: bias("bias_ih", biases[0])?,
                b_hh: bias("bias_hh", biases[1])?,
            })
        };
        let projections = match at {
            Replicate => vec![projection(None)?],
            _ => (0..N).map(|gate| projection(Some(gate))).collect::<Result<_>>()?,
        };
        Ok(Self { projections, features, hidden, at, style })
    }

    /// Returns what `f` makes of the contributions of the input and of the hidden state, by gate.
    #[track_caller]
    fn of<const M: usize>(
        &self,
        op: &'static str,
        input: &DTensor,
        h: &DTensor,
        f: impl Fn(DTensor, DTensor) -> Result<[DTensor; M]>,
    ) -> Result<[[DTensor; N]; M]> {
        self.style.layer(|| {
            if input.rank() != 2
                || input.dims()[1] != self.features
                || h.dims() != [input.dims()[0], self.hidden]
            {
                let reason = format!("an input {} with a state {}", input.spec(), h.spec());
                let (features, hidden) = (self.features, self.hidden);
                return Error::op(
                    op,
                    format!("{reason}: expected [batch, {features}] and [batch, {hidden}]"),
                );
            }
            // Units of the state are gathered once for all gates.
            let [h] = if self.at == Replicate { [h.clone()] } else { self.style.inputs([h])? };
            let mut made: [Vec<DTensor>; M] = std::array::from_fn(|_| Vec::with_capacity(N));
            for gate in &self.projections {
                let of_input = input.linear(&gate.w_ih, gate.b_ih.as_ref())?;
                let of_state = h.linear(&gate.w_hh, gate.b_hh.as_ref())?;
                for (list, x) in made.iter_mut().zip(f(of_input, of_state)?) {
                    list.push(x);
                }
            }
            let by_gate = made.into_iter().map(|list| match &list[..] {
                [all] => parts(all),
                _ => array(list),
            });
            array(by_gate.collect::<Result<_>>()?)
        })
    }

    fn zeros(&self, like: &DTensor) -> Result<DTensor> {
        let Some(&batch) = like.dims().first() else {
            return Error::op("zero_state", format!("{}: expected [batch, ..]", like.spec()));
        };
        let cuts_units = |axis: usize| self.at != Replicate && axis == self.style.axis;
        let placement = |(axis, &like): (usize, &Placement)| match like {
            _ if cuts_units(axis) => Shard(1),
            Shard(0) => like,
            _ => Replicate,
        };
        let placements: Placements = like.placements().iter().enumerate().map(placement).collect();
        // A unit may compute in another dtype than its parameters are stored in.
        let dtype = self.projections.first().map_or(like.dtype(), |gate| gate.w_hh.dtype());
        let mut spec = Spec::new(like.mesh(), &placements, (batch, self.hidden), dtype)?;
        // The batch may have explicit sizes.
        for (axis, like) in like.targets().into_iter().enumerate() {
            if like.placement == Shard(0) && !cuts_units(axis) {
                spec = spec.with_sizes(axis, like.sizes)?;
            }
        }
        let zeros = Tensor::zeros(spec.local_shape().as_slice(), spec.dtype(), like.device())?;
        DTensor::from_local_with_spec(zeros, spec)
    }
}

/// The state of an [`LSTM`].
#[derive(Debug, Clone)]
pub struct LSTMState {
    /// The hidden state `[batch, hidden]`, which is also the output.
    pub h: DTensor,
    /// The state of the cells `[batch, hidden]`.
    pub c: DTensor,
}

/// Long short-term memory (Hochreiter & Schmidhuber 1997), with candle's options, names and initial values.
///
/// The batch may be sharded; the weights are replicated. One all_reduce sums all their gradients of a backward pass.
///
/// Under a plan the hidden units may be sharded instead (colwise), with their weights and biases, the state and the
/// output. Each step then gathers the hidden state once. Each gate is a parameter of its own, such as
/// `weight_ih_l0.i`, which is read from the rows of `weight_ih_l0` in files.
#[derive(Debug, Clone)]
pub struct LSTM {
    gates: Gates<4>,
    config: LSTMConfig,
}

impl LSTM {
    /// Builds a layer at the builder's path.
    ///
    /// # Errors
    /// If the plan has a style here that shards parameters in another way.
    pub fn new(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: &MeshVarBuilder) -> Result<Self> {
        let reverse = if matches!(config.direction, Direction::Backward) { "_reverse" } else { "" };
        let inits = ([config.w_ih_init, config.w_hh_init], [config.b_ih_init, config.b_hh_init]);
        let suffix = format!("l{}{reverse}", config.layer_idx);
        Ok(Self {
            gates: Gates::new(["i", "f", "g", "o"], [in_dim, hidden_dim], inits, &suffix, vb)?,
            config,
        })
    }

    /// Returns the options.
    pub fn config(&self) -> &LSTMConfig {
        &self.config
    }
}

/// Builds an [`LSTM`] at the builder's path.
pub fn lstm(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: &MeshVarBuilder) -> Result<LSTM> {
    LSTM::new(in_dim, hidden_dim, config, vb)
}

impl RNN for LSTM {
    type State = LSTMState;

    fn zero_state(&self, like: &DTensor) -> Result<LSTMState> {
        let zeros = self.gates.zeros(like)?;
        Ok(LSTMState { h: zeros.clone(), c: zeros })
    }

    #[track_caller]
    fn step(&self, input: &DTensor, state: &LSTMState) -> Result<LSTMState> {
        let [input] = self.gates.style.inputs([input])?;
        let [[entry, forget, cell, exit]] =
            self.gates.of("lstm", &input, &state.h, |of_input, of_state| Ok([of_input.add(&of_state)?]))?;
        let c = forget.sigmoid()?.mul(&state.c)?.add(entry.sigmoid()?.mul(&cell.tanh()?)?)?;
        let [h] = self.gates.style.outputs([&exit.sigmoid()?.mul(&c.tanh()?)?])?;
        Ok(LSTMState { h, c })
    }

    fn states_to_tensor(&self, states: &[LSTMState]) -> Result<DTensor> {
        DTensor::stack(&states.iter().map(|state| &state.h).collect::<Vec<_>>(), 1)
    }
}

/// The state of a [`GRU`].
#[derive(Debug, Clone)]
pub struct GRUState {
    /// The hidden state `[batch, hidden]`, which is also the output.
    pub h: DTensor,
}

/// Gated recurrent units (Cho et al. 2014), with candle's options, names and initial values.
///
/// See [`LSTM`] for what may be sharded.
#[derive(Debug, Clone)]
pub struct GRU {
    gates: Gates<3>,
    config: GRUConfig,
}

impl GRU {
    /// Builds a layer at the builder's path.
    ///
    /// # Errors
    /// If the plan has a style here that shards parameters in another way.
    pub fn new(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: &MeshVarBuilder) -> Result<Self> {
        let inits = ([config.w_ih_init, config.w_hh_init], [config.b_ih_init, config.b_hh_init]);
        Ok(Self { gates: Gates::new(["r", "z", "n"], [in_dim, hidden_dim], inits, "l0", vb)?, config })
    }

    /// Returns the options.
    pub fn config(&self) -> &GRUConfig {
        &self.config
    }
}

/// Builds a [`GRU`] at the builder's path.
pub fn gru(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: &MeshVarBuilder) -> Result<GRU> {
    GRU::new(in_dim, hidden_dim, config, vb)
}

impl RNN for GRU {
    type State = GRUState;

    fn zero_state(&self, like: &DTensor) -> Result<GRUState> {
        Ok(GRUState { h: self.gates.zeros(like)? })
    }

    #[track_caller]
    fn step(&self, input: &DTensor, state: &GRUState) -> Result<GRUState> {
        let [input] = self.gates.style.inputs([input])?;
        let [[reset, update, new], [by_reset, by_update, by_new]] =
            self.gates.of("gru", &input, &state.h, |of_input, of_state| Ok([of_input, of_state]))?;
        let reset = reset.add(&by_reset)?.sigmoid()?;
        let update = update.add(&by_update)?.sigmoid()?;
        let new = new.add(reset.mul(&by_new)?)?.tanh()?;
        let h = update.mul(&state.h)?.sub(update.sub(1.0)?.mul(&new)?)?;
        let [h] = self.gates.style.outputs([&h])?;
        Ok(GRUState { h })
    }

    fn states_to_tensor(&self, states: &[GRUState]) -> Result<DTensor> {
        DTensor::cat(&states.iter().map(|state| &state.h).collect::<Vec<_>>(), 1)
    }
}

/// Splits the columns into those of `N` gates.
fn parts<const N: usize>(x: &DTensor) -> Result<[DTensor; N]> {
    let width = x.dims()[1] / N;
    let mut parts = Vec::with_capacity(N);
    for gate in 0..N {
        parts.push(x.narrow(1, gate * width, width)?);
    }
    array(parts)
}

fn array<T, const N: usize>(list: Vec<T>) -> Result<[T; N]> {
    list.try_into().or_else(|_| Error::op("gates", "the gates are not as many as the layer has"))
}
