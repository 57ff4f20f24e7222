//! One op at one size: its input, the timed call, and the expected result.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Collective, Cut, ProcessGroup, ReduceOp};

use super::args::{ELEMENT_BYTES, OpName};

/// An op with this rank's input, which can be called repeatedly.
#[derive(Debug)]
pub struct Case<'a> {
    op: OpName,
    group: &'a ProcessGroup,
    /// One row, so that pieces of it are contiguous and an all_to_all has a second dim to join them along.
    input: Tensor,
    /// The input of calls in place. Repeating their reduction does not change the result.
    place: Var,
    /// The result of calls that are given memory. Nothing for the others.
    output: Tensor,
    /// The elements of each rank's piece; they differ by one at most.
    pieces: Vec<usize>,
}

impl<'a> Case<'a> {
    /// Creates the case of `op` with `bytes` of f32 on each rank.
    ///
    /// # Errors
    /// candle's errors.
    pub fn new(op: OpName, bytes: usize, group: &'a ProcessGroup) -> Result<Self> {
        let (len, n) = (bytes / ELEMENT_BYTES, group.size());
        let input =
            Tensor::from_iter((0..len).map(|i| element(group.rank(), i)), &Device::Cpu)?.reshape((1, len))?;
        let pieces: Vec<usize> = (0..n).map(|rank| (rank + 1) * len / n - rank * len / n).collect();
        let place = Var::from_tensor(&input)?;
        let output = match op {
            OpName::AllGatherInto => (n, len),
            OpName::ReduceScatterInto => (1, pieces[group.rank()]),
            OpName::AllToAllInto => (n * pieces[group.rank()], 1),
            OpName::RecvInto => (1, len),
            _ => (0, 0),
        };
        let output = Tensor::zeros(output, DType::F32, &Device::Cpu)?;
        Ok(Self { op, group, input, place, output, pieces })
    }

    /// Runs the op; returns `None` on ranks that take no part in a message.
    ///
    /// # Errors
    /// The group's.
    pub fn call(&self) -> candle_dist::Result<Option<Tensor>> {
        let Self { op, group, input, output, pieces, .. } = self;
        let given = || output.clone();
        let recv = |from| group.recv(input.shape(), DType::F32, from);
        match op {
            OpName::AllReduce => group.all_reduce(input, ReduceOp::Sum),
            OpName::AllReduceInPlace => group
                .call(Collective::AllReduce(ReduceOp::Max))
                .in_place(&self.place)
                .map(|()| self.place.as_detached_tensor()),
            OpName::AllGather => group.all_gather(input, 0),
            OpName::ReduceScatter => {
                group.call(Collective::reduce_scatter(Cut::new(1, pieces), ReduceOp::Sum)).run(input)
            }
            OpName::AllToAll => group
                .call(Collective::AllToAll {
                    split: Cut::new(1, pieces),
                    concat: Cut::new(0, &vec![1; pieces.len()]),
                })
                .run(input),
            OpName::Broadcast => group.broadcast(input, 0),
            OpName::AllGatherInto => group
                .call(Collective::all_gather(Cut::even(0, input.dims()[0], group.size())))
                .into(output)
                .run(input)
                .map(drop)
                .map(|()| given()),
            OpName::ReduceScatterInto => group
                .call(Collective::reduce_scatter(Cut::new(1, pieces), ReduceOp::Sum))
                .into(output)
                .run(input)
                .map(drop)
                .map(|()| given()),
            OpName::AllToAllInto => {
                let column = input.reshape((input.elem_count(), 1))?;
                group
                    .call(Collective::all_to_all_single(&vec![&pieces[..]; pieces.len()]))
                    .into(output)
                    .run(&column)
                    .map(drop)
                    .map(|()| given())
            }
            OpName::SendRecv => return self.ping_pong(|to| group.send(input, to), recv),
            OpName::SendOwned => {
                return self.ping_pong(
                    |to| {
                        group
                            .call(Collective::Send { to, tag: 0 })
                            .owned()
                            .run_all(std::slice::from_ref(input))
                            .map(drop)
                    },
                    recv,
                );
            }
            OpName::RecvInto => {
                let recv_into = |from| {
                    group
                        .call(Collective::Recv { from: Some(from), tag: 0 })
                        .into(output)
                        .run(None)
                        .map(drop)
                        .map(|()| given())
                };
                return self.ping_pong(|to| group.send(input, to), recv_into);
            }
        }
        .map(Some)
    }

    /// Rank 0 sends to rank 1, which answers with its own tensor.
    fn ping_pong(
        &self,
        send: impl Fn(usize) -> candle_dist::Result<()>,
        recv: impl Fn(usize) -> candle_dist::Result<Tensor>,
    ) -> candle_dist::Result<Option<Tensor>> {
        match self.group.rank() {
            0 => send(1).and_then(|()| recv(1)).map(Some),
            1 => {
                let ping = recv(0)?;
                send(0).map(|()| Some(ping))
            }
            _ => Ok(None),
        }
    }

    /// Compares each element of a result with the definition of the op. The test data makes sums exact.
    ///
    /// # Errors
    /// If one differs.
    pub fn check(&self, result: Option<&Tensor>) -> Result<()> {
        let (rank, n, len) = (self.group.rank(), self.group.size(), self.input.elem_count());
        let (start, piece) = (self.pieces[..rank].iter().sum::<usize>(), self.pieces[rank]);
        let sum = |i| (0..n).map(|rank| element(rank, i)).sum();
        match self.op {
            OpName::AllReduce => self.compare(result, len, sum),
            OpName::AllReduceInPlace => self.compare(result, len, |i| element(n - 1, i)),
            OpName::AllGather | OpName::AllGatherInto => {
                self.compare(result, n * len, |i| element(i / len, i % len))
            }
            OpName::ReduceScatter | OpName::ReduceScatterInto => {
                self.compare(result, piece, |i| sum(start + i))
            }
            OpName::AllToAll | OpName::AllToAllInto => {
                self.compare(result, n * piece, |i| element(i / piece, start + i % piece))
            }
            OpName::Broadcast => self.compare(result, len, |i| element(0, i)),
            OpName::SendRecv | OpName::SendOwned | OpName::RecvInto => match rank {
                0 | 1 => self.compare(result, len, |i| element(1 - rank, i)),
                _ => Ok(()),
            },
        }
    }

    fn compare(&self, result: Option<&Tensor>, len: usize, expected: impl Fn(usize) -> f32) -> Result<()> {
        let got =
            result.map(|tensor| tensor.flatten_all()?.to_vec1::<f32>()).transpose()?.unwrap_or_default();
        let op = self.op;
        if got.len() != len {
            bail!("{op} gave {} elements instead of {len}", got.len());
        }
        match got.iter().enumerate().find(|&(i, &value)| value != expected(i)) {
            Some((i, value)) => bail!("{op} gave {value} instead of {} at element {i} of {len}", expected(i)),
            None => Ok(()),
        }
    }
}

/// Returns element `i` of `rank`'s input: a small integer that differs between ranks and between neighbors.
fn element(rank: usize, i: usize) -> f32 {
    ((i % 251 + 1) * (rank + 1)) as f32
}
