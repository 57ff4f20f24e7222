//! Random programs of ops and changes of layout against one device: the loss and the gradient of every leaf.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod moves;

use crate::common::*;
use candle_core::{D, DType, Device, Tensor, Var};
use candle_dist::DeviceMesh;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use test_utils::on_ranks;

/// The choices of a program: the same on every rank.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

/// A value of a program on the mesh and on one device.
#[derive(Clone)]
struct Value {
    here: DTensor,
    plain: Tensor,
}

struct Program {
    dice: Dice,
    mesh: DeviceMesh,
    leaves: Vec<(Leaf, Var)>,
    values: Vec<Value>,
    /// What was done, one line a step, for the message of a failure.
    text: Vec<String>,
}

impl Program {
    fn new(seed: u64, mesh: &DeviceMesh) -> Result<Self> {
        let dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut program =
            Self { dice, mesh: mesh.clone(), leaves: Vec::new(), values: Vec::new(), text: vec![format!("{mesh}")] };
        let [a, b, c] = [(); 3].map(|()| 1 + program.dice.below(5));
        for shape in [&[a, b][..], &[b, c], &[a, b], &[b], &[2, a, b]] {
            program.leaf(shape)?;
        }
        Ok(program)
    }

    fn leaf(&mut self, shape: &[usize]) -> Result<()> {
        let whole = values(shape, self.leaves.len() as u64, DType::F64);
        let choices = [lays(shape.len()), vec![Lay::VaryingPartial]].concat();
        let lays = (0..self.mesh.ndim()).map(|_| self.dice.pick(&choices)).collect_vec();
        let at = lays.iter().map(|lay| lay.placement()).collect_vec();
        let first = at.iter().position(|p| p.shard_dim().is_some()).filter(|_| self.dice.below(3) == 0);
        let leaf = match first.filter(|_| at.iter().all(|p| !p.is_partial())) {
            Some(axis) => {
                let dim = at[axis].shard_dim().unwrap();
                let mut sizes = vec![0; self.mesh.shape()[axis]];
                (0..shape[dim]).for_each(|_| sizes[self.dice.below(self.mesh.shape()[axis])] += 1);
                let spec = Spec::new(&self.mesh, &at, shape, DType::F64)?.with_sizes(axis, Some(sizes.into()))?;
                Leaf::with_spec(&whole, spec, &lays)?
            }
            None => Leaf::new(&whole, &self.mesh, &lays)?,
        };
        self.text.push(format!("leaf {} as ({})", leaf.tensor.spec(), lays.iter().join(", ")));
        let var = Var::from_tensor(&whole)?;
        self.values.push(Value { here: leaf.tensor.clone(), plain: var.as_tensor().clone() });
        self.leaves.push((leaf, var));
        Ok(())
    }

    /// Makes a new value from earlier ones, or does nothing where the shapes do not fit the drawn op.
    fn step(&mut self) -> Result<()> {
        let (i, j) = (self.dice.below(self.values.len()), self.dice.below(self.values.len()));
        let (x, y) = (self.values[i].clone(), self.values[j].clone());
        let (a, b) = (x.here.dims().to_vec(), y.here.dims().to_vec());
        let dim = self.dice.below(a.len().max(1));
        let made = match self.dice.below(15 + moves::KINDS) {
            0 => Some(("tanh", x.here.tanh()?, x.plain.tanh()?)),
            1 => Some(("affine", x.here.affine(-0.7, 0.0)?, x.plain.affine(-0.7, 0.0)?)),
            2 | 3 => {
                let at = self.placements(a.len());
                self.text.push(format!("to ({}):", at.iter().join(", ")));
                Some(("redistribute", x.here.redistribute(&at)?, x.plain.clone()))
            }
            4 if x.plain.shape().broadcast_shape_binary_op(y.plain.shape(), "add").is_ok() => {
                Some(("add", x.here.add(&y.here)?, x.plain.broadcast_add(&y.plain)?))
            }
            5 if x.plain.shape().broadcast_shape_binary_op(y.plain.shape(), "mul").is_ok() => {
                Some(("mul", x.here.mul(&y.here)?.tanh()?, x.plain.broadcast_mul(&y.plain)?.tanh()?))
            }
            6 if a.len() >= 2 && b.len() >= 2 && a[a.len() - 1] == b[b.len() - 2] => {
                let batches = (&a[..a.len() - 2], &b[..b.len() - 2]);
                let fits = batches.0.is_empty() || batches.1.is_empty() || batches.0 == batches.1;
                let product = || x.here.matmul(&y.here)?.tanh();
                let plain = || x.plain.broadcast_matmul(&y.plain)?.tanh();
                if fits { Some(("matmul", product()?, plain()?)) } else { None }
            }
            7 if !a.is_empty() && b.len() == 2 && a[a.len() - 1] == b[1] => {
                let rows: usize = a[..a.len() - 1].iter().product();
                let plain = x.plain.reshape((rows, b[1]))?.matmul(&y.plain.t()?)?.tanh()?;
                let shape = [&a[..a.len() - 1], &b[..1]].concat();
                Some(("linear", x.here.linear(&y.here, None)?.tanh()?, plain.reshape(shape)?))
            }
            8 if a.len() >= 2 => Some(("transpose", x.here.transpose(0, dim)?, x.plain.transpose(0, dim)?)),
            9 if !a.is_empty() => {
                Some(("softmax", x.here.softmax_last_dim()?, candle_nn::ops::softmax(&x.plain, D::Minus1)?))
            }
            10 if !a.is_empty() => Some(("sum_keepdim", x.here.sum_keepdim(dim)?, x.plain.sum_keepdim(dim)?)),
            11 if !a.is_empty() => {
                let mut merged = a.clone();
                let last = merged.pop().unwrap();
                match merged.last_mut() {
                    Some(before) if self.dice.below(2) == 0 => *before *= last,
                    _ => merged.extend([1, last]),
                }
                Some(("reshape", x.here.reshape(&merged[..])?, x.plain.reshape(&merged[..])?))
            }
            12 if b.len() == 2 => {
                let ids: Vec<u32> = (0..3).map(|_| self.dice.below(b[0]) as u32).collect();
                let ids = Tensor::new(ids, &Device::Cpu)?;
                let at = (0..self.mesh.ndim()).map(|_| self.dice.pick(&[Replicate, Shard(0)])).collect_vec();
                let here = y.here.embedding(&DTensor::distribute(&ids, &self.mesh, &at)?)?;
                Some(("embedding of the second", here, y.plain.contiguous()?.index_select(&ids, 0)?))
            }
            13 if !a.is_empty() => {
                let plain = x.plain.log_sum_exp(dim)?;
                Some((
                    "softmax and more",
                    x.here.softmax(dim)?.mul(&x.here)?.add(x.here.log_sum_exp(dim)?.sum_all()?)?,
                    (candle_nn::ops::softmax(&x.plain, dim)? * &x.plain)?.broadcast_add(&plain.sum_all()?)?,
                ))
            }
            14 if !a.is_empty() => Some(("cumsum", x.here.cumsum(dim)?.tanh()?, running_sum(&x.plain, dim)?.tanh()?)),
            kind => match kind.checked_sub(15) {
                Some(kind) => self.moved(kind, &x, &y, dim)?,
                None => None,
            },
        };
        if let Some((name, here, plain)) = made {
            let of = [&x.here, &y.here].map(|x| x.spec().to_string()).join(" and ");
            self.text.push(format!("{}: {name} of {i} and {j}, {of}: {}", self.values.len(), here.spec()));
            self.values.push(Value { here, plain });
        }
        Ok(())
    }

    fn placements(&mut self, rank: usize) -> Vec<Placement> {
        let choices = (0..rank).map(Shard).chain([Replicate, SUM]).collect_vec();
        (0..self.mesh.ndim()).map(|_| self.dice.pick(&choices)).collect()
    }

    /// The largest error of a value or gradient, where the loss weighs some of the values.
    fn check(&mut self) -> Result<f64> {
        let mut error = 0f64;
        let mut loss: Option<Value> = None;
        for (i, value) in self.values.clone().into_iter().enumerate() {
            error = error.max(value_error(&value.here, &value.plain)?);
            if i + 1 < self.values.len() && self.dice.below(2) == 0 {
                continue;
            }
            let weights = values(value.plain.dims(), 50 + i as u64, DType::F64);
            let at =
                self.placements(value.plain.rank()).into_iter().map(|p| if p.is_partial() { Replicate } else { p });
            let here = DTensor::distribute(&weights, &self.mesh, &at.collect_vec())?;
            let term = Value { here: value.here.mul(&here)?.sum_all()?, plain: (value.plain * weights)?.sum_all()? };
            loss = Some(match loss {
                Some(sum) => Value { here: sum.here.add(&term.here)?, plain: (sum.plain + term.plain)? },
                None => term,
            });
        }
        let loss = loss.unwrap();
        self.text.push(format!("loss {}", loss.here.spec()));
        let (grads, plain) = (loss.here.backward()?, loss.plain.backward()?);
        for (i, (leaf, var)) in self.leaves.iter().enumerate() {
            let want = plain.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
            let wrong = leaf.gradient_error(&grads, &want)?;
            self.text.push(format!("gradient of {i}: error {wrong:e}"));
            error = error.max(wrong);
        }
        Ok(error)
    }
}

/// Programs on each mesh.
const PROGRAMS: u64 = 300;

#[test]
fn random_programs_equal_one_device() {
    for shape in [&[2][..], &[3], &[4], &[2, 2], &[3, 2], &[2, 1, 2], &[2, 2, 2]] {
        on_ranks(shape.iter().product(), "programs", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for seed in 0..PROGRAMS {
                let mut program = Program::new(seed, &mesh)?;
                let ran = (0..28).try_for_each(|_| program.step()).and_then(|()| program.check());
                let show = || format!("program {seed}:\n{}", program.text.join("\n"));
                let error = ran.map_err(|e| candle_core::Error::Msg(format!("{}\n{e}", show())))?;
                assert!(error <= 1e-10, "{}", show());
            }
            Ok(())
        });
    }
}

/// The running sum along a dim; candle's own refuses strided dims before the last.
fn running_sum(x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    let last = x.rank() - 1;
    x.transpose(dim, last)?.contiguous()?.cumsum(last)?.transpose(dim, last)
}

/// Some of a dim; candle panics on empty parts that begin behind the last element.
fn narrow(x: &Tensor, dim: usize, start: usize, len: usize) -> candle_core::Result<Tensor> {
    x.narrow(dim, if len == 0 { 0 } else { start }, len)
}
