//! What the members of a group send each other in a collective.
//!
//! A collective is one stage, or two where that moves less: first every rank reduces, or gets, one piece of the tensor,
//! then the pieces are shared. What is sent and how large it is follows from the [`Call`] alone, so nothing has to be
//! asked. Results are made by the arithmetic of the local engine, in rank order.
use crate::backend::reduce::reduce;
use crate::backend::regions::{Piece, concat};
use crate::backend::{Call, Dims, Form, Fresh, Op, ReduceOp, bytes};
use crate::{Error, Result};
use candle_core::{CpuStorage, DType, Device, Shape, Tensor};
use smallvec::smallvec;

/// Reductions and broadcasts go in two stages if a rank would have to send this many bytes in one: the second costs a
/// message's latency, and saves each rank from sending it all to everybody and from reducing all of it.
const PIECEWISE: usize = 1 << 20;

/// A member of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Member {
    /// The others, beginning behind this one, so that not all send to the same one first.
    pub(super) fn others(self) -> impl Iterator<Item = usize> {
        (1..self.size).map(move |step| (self.rank + step) % self.size)
    }
}

/// What a member sends and awaits before it can go on.
#[derive(Default)]
pub(super) struct Stage {
    /// Data, and the members it goes to.
    pub(super) sends: Vec<(Vec<usize>, CpuStorage)>,
    /// By member: what is here.
    pub(super) held: Vec<Option<Tensor>>,
    /// By member: the shape of what it sends to this one, if it does.
    pub(super) awaited: Vec<Option<Dims>>,
}

/// What comes after a stage.
pub(super) enum Next {
    Stage(Stage),
    /// The result, on members that get one.
    Done(Option<Fresh>),
}

/// One tensor of a collective, as one member sees it.
pub(super) struct Exchange<'a> {
    pub(super) call: &'a Call,
    /// Which of the call's tensors.
    pub(super) nth: usize,
    pub(super) me: Member,
    /// What this member gives, if it gives something.
    pub(super) input: Option<&'a Tensor>,
}

impl Exchange<'_> {
    /// What happens first.
    pub(super) fn first(&self) -> Result<Stage> {
        let Self { call, me, .. } = *self;
        match call.op {
            Op::Barrier => {
                let nothing = Tensor::zeros(0, DType::U8, &Device::Cpu)?;
                self.share(&nothing, me.others().collect(), |_| Some(smallvec![0]))
            }
            Op::AllReduce | Op::Reduce | Op::Broadcast if self.is_piecewise()? => self.first_pieces(),
            Op::AllReduce => self.share_input(me.others().collect()),
            Op::Reduce => self.share_input(self.to_root()),
            Op::Broadcast => {
                let to = if self.is_root() { me.others().collect() } else { Vec::new() };
                let shape = Dims::from_slice(self.input()?.dims());
                let mut stage =
                    self.share(self.input()?, to, |from| (Some(from) == call.peer).then(|| shape.clone()))?;
                if !self.is_root() {
                    stage.held[me.rank] = None; // what this member gives is not what it gets
                }
                Ok(stage)
            }
            Op::AllGather => self.share_input(me.others().collect()),
            Op::Gather => self.share_input(self.to_root()),
            Op::ReduceScatter => self.scatter(self.input, call.dims[self.nth], &call.sizes[self.nth], None),
            Op::Scatter => self.scatter(self.input, call.dims[0], &call.sizes[0], Some(&call.shape)),
            Op::AllToAll if call.is_routed() => self.scatter(self.input, 0, &call.sizes[me.rank], None),
            Op::AllToAll => self.scatter(self.input, call.dims[0], &call.sizes[0], None),
            op @ (Op::Send | Op::Recv) => Err(Error::Unsupported(format!("{op} as a collective"))),
        }
    }

    /// What follows when everything of the `stage`-th stage is here.
    pub(super) fn after(&self, stage: u32, held: Vec<Option<Tensor>>) -> Result<Next> {
        let Self { call, me, .. } = *self;
        let held: Vec<&Tensor> = held.iter().flatten().collect();
        if call.op == Op::Barrier {
            return Ok(Next::Done(None));
        }
        let piecewise = matches!(call.op, Op::AllReduce | Op::Reduce | Op::Broadcast) && self.is_piecewise()?;
        if piecewise && stage == 0 {
            return self.second_pieces(&held).map(Next::Stage);
        }
        // In place, the root has its result already.
        if call.gives_nothing(me.rank) || (call.op, call.form, self.is_root()) == (Op::Broadcast, Form::InPlace, true) {
            return Ok(Next::Done(None));
        }
        let storage = match call.op {
            Op::Broadcast if self.is_root() => Fresh::copy_of(self.input()?)?.into_cpu()?.0,
            _ if piecewise => concat(&held, None, 0)?,
            Op::AllReduce | Op::Reduce | Op::ReduceScatter => reduce(&held, self.reduction()?, None)?,
            Op::AllGather | Op::Gather => concat(&held, None, call.dims[self.nth])?,
            Op::AllToAll if !call.is_routed() => concat(&held, None, call.dims[1])?,
            _ => concat(&held, None, 0)?,
        };
        let mine = self.input.map_or(&call.shape[..], Tensor::dims);
        let shape = Shape::from(call.result_shape(me.rank, self.nth, mine).as_slice());
        Ok(Next::Done(Some(Fresh::host(storage, shape))))
    }

    fn input(&self) -> Result<&Tensor> {
        self.input.ok_or_else(|| Error::Unsupported(format!("{} without a tensor", self.call.op)))
    }

    fn reduction(&self) -> Result<ReduceOp> {
        self.call.reduce.ok_or_else(|| Error::Unsupported(format!("{} without a reduction", self.call.op)))
    }

    fn is_root(&self) -> bool {
        self.call.peer == Some(self.me.rank)
    }

    /// The root, unless this is it.
    fn to_root(&self) -> Vec<usize> {
        self.call.peer.into_iter().filter(|_| !self.is_root()).collect()
    }

    /// The shape of what member `from` sends here of its input.
    fn shape_from(&self, from: usize) -> Result<Dims> {
        let Self { call, me, .. } = *self;
        let mut shape = Dims::from_slice(self.input.map_or(&call.shape[..], Tensor::dims));
        match call.op {
            Op::AllGather | Op::Gather => shape[call.dims[self.nth]] = call.sizes[self.nth][from],
            Op::ReduceScatter | Op::Scatter => shape[call.dims[self.nth]] = call.sizes[self.nth][me.rank],
            Op::AllToAll if call.is_routed() => shape[0] = call.sizes[from][me.rank],
            Op::AllToAll => {
                shape[call.dims[0]] = call.sizes[0][me.rank];
                shape[call.dims[1]] = call.sizes[1][from];
            }
            _ => {}
        }
        Ok(shape)
    }

    /// Sends the input to some; awaits everybody's where the call gives this member a result.
    fn share_input(&self, to: Vec<usize>) -> Result<Stage> {
        let awaits = !self.call.gives_nothing(self.me.rank);
        let shapes = (0..self.me.size).map(|from| self.shape_from(from)).collect::<Result<Vec<_>>>()?;
        self.share(self.input()?, to, |from| awaits.then(|| shapes[from].clone()))
    }

    /// Sends one tensor to some, and keeps it; awaits what `from` tells.
    fn share(&self, tensor: &Tensor, to: Vec<usize>, from: impl Fn(usize) -> Option<Dims>) -> Result<Stage> {
        let Member { rank, size } = self.me;
        let sends = if to.is_empty() { Vec::new() } else { vec![(to, Fresh::copy_of(tensor)?.into_cpu()?.0)] };
        let held = (0..size).map(|member| (member == rank).then(|| tensor.clone())).collect();
        let awaited = (0..size).map(|member| if member == rank { None } else { from(member) }).collect();
        Ok(Stage { sends, held, awaited })
    }

    /// Sends each member its piece of the tensor, if this one has it, and awaits those of the members that have it.
    ///
    /// With a root's `shape` the root alone has it.
    fn scatter(&self, tensor: Option<&Tensor>, dim: usize, sizes: &[usize], shape: Option<&[usize]>) -> Result<Stage> {
        let Member { rank, size } = self.me;
        let has = |member: usize| shape.is_none() || self.call.peer == Some(member);
        let mut stage = Stage { held: vec![None; size], awaited: vec![None; size], ..Stage::default() };
        let piece = |member: usize| Piece { dim, start: sizes[..member].iter().sum(), len: sizes[member] };
        if let Some(tensor) = tensor.filter(|_| has(rank)) {
            for to in self.me.others() {
                stage.sends.push((vec![to], concat(&[tensor], Some(piece(to)), 0)?));
            }
            let Piece { dim, start, len } = piece(rank);
            stage.held[rank] = Some(tensor.narrow(dim, start, len)?.contiguous()?);
        }
        for from in self.me.others().filter(|&from| has(from)) {
            stage.awaited[from] = Some(self.shape_from(from)?);
        }
        Ok(stage)
    }

    /// Whether the tensor is worth two stages.
    fn is_piecewise(&self) -> Result<bool> {
        Ok(bytes(self.input()?).saturating_mul(self.me.size - 1) >= PIECEWISE)
    }

    /// The sizes of equal pieces of the flat tensor, but for the last ones.
    fn piece_lens(&self) -> Result<Dims> {
        let (len, size) = (self.input()?.elem_count(), self.me.size);
        let chunk = len.div_ceil(size);
        Ok((0..size).map(|member| chunk.min(len.saturating_sub(member * chunk))).collect())
    }

    /// Each member gets its piece: the root's, or everybody's for a reduction.
    fn first_pieces(&self) -> Result<Stage> {
        let (flat, lens) = (self.input()?.flatten_all()?, self.piece_lens()?);
        let root = [flat.elem_count()];
        let mut stage = match self.call.op {
            Op::Broadcast if self.is_root() => self.scatter(Some(&flat), 0, &lens, Some(&root))?,
            Op::Broadcast => self.scatter(None, 0, &lens, Some(&root))?,
            _ => self.scatter(Some(&flat), 0, &lens, None)?,
        };
        for shape in stage.awaited.iter_mut().flatten() {
            *shape = smallvec![lens[self.me.rank]];
        }
        Ok(stage)
    }

    /// Each member sends its piece to those that get the result.
    fn second_pieces(&self, held: &[&Tensor]) -> Result<Stage> {
        let (me, lens) = (self.me, self.piece_lens()?);
        let mine = match self.call.op {
            Op::Broadcast => held[0].clone(),
            _ => {
                let storage = reduce(held, self.reduction()?, None)?;
                Fresh::host(storage, lens[me.rank]).into_tensor()
            }
        };
        let to = match self.call.op {
            Op::AllReduce => me.others().collect(),
            Op::Reduce => self.to_root(),
            _ => me.others().filter(|&other| Some(other) != self.call.peer).collect(),
        };
        let awaits = match self.call.op {
            Op::AllReduce => true,
            Op::Reduce => self.is_root(),
            _ => !self.is_root(),
        };
        self.share(&mine, to, |from| awaits.then(|| smallvec![lens[from]]))
    }
}
