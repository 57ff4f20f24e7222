//! Sums of products in Einstein's notation.
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use candle_dist::empty;
use itertools::Itertools;

const SUM: Placement = Placement::PARTIAL_SUM;

/// An index of an equation. Dims that an ellipsis stands for have numbers behind all characters.
type Subscript = u32;

impl DTensor {
    /// The sum of products that an equation such as `"bqhd,bkhd->bhqk"` describes, as in NumPy and PyTorch.
    ///
    /// Indices are letters. Those that are not in the result are summed. Without an arrow, the result has the indices that occur
    /// once, in alphabetical order. `...` stands for any dims, counted from the last one. Sums are from left to right.
    /// An index stays sharded if one of its dims is, or leaves partial sums if it is summed. Dims of one index have one
    /// size: no dim is broadcast.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, Replicate, Result, Shard};
    ///
    /// World::threads(2).run(|ctx| -> Result<()> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let x = Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?;
    ///     let [x, w] = [Shard(1), Shard(0)].map(|at| DTensor::distribute(&x, &mesh, &[at]));
    ///     let y = DTensor::einsum("ik,jk->ij", &[&x?, &w?])?; // w moves to Shard(1)
    ///     assert_eq!(y.full_tensor()?.to_vec2::<f32>()?, [[5., 14.], [14., 50.]]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the equation does not fit the operands, an operand has an index twice, or dtypes differ or are no floats.
    #[track_caller]
    pub fn einsum(equation: &str, operands: &[&Self]) -> Result<Self> {
        let ranks: Vec<usize> = operands.iter().map(|x| x.rank()).collect();
        let parsed = Equation::parse(equation, &ranks);
        let Equation { inputs, output } =
            parsed.or_else(|reason| Error::op("einsum", format!("{equation:?}: {reason}")))?;
        let signature = || {
            let mut sizes: Vec<(Subscript, usize)> = Vec::new();
            for (x, indices) in operands.iter().zip(&inputs) {
                x.check_float("einsum")?;
                if x.dtype() != operands[0].dtype() {
                    let (a, b) = (operands[0].spec(), x.spec());
                    return Error::op(
                        "einsum",
                        format!("{equation}: {a} and {b}: convert one with to_dtype"),
                    );
                }
                for (&index, &size) in indices.iter().zip(x.dims()) {
                    match sizes.iter().find(|(known, _)| *known == index) {
                        Some(&(_, other)) if other != size => {
                            let name = shown(index);
                            let reason = format!(
                                "{equation}: index {name} has size {other}, and {size} in {}",
                                x.spec()
                            );
                            return Error::op("einsum", reason);
                        }
                        Some(_) => {}
                        None => sizes.push((index, size)),
                    }
                }
            }
            let place = |indices: &[Subscript], index| indices.iter().position(|&other| other == index);
            let lies = |indices: &Vec<Subscript>, index| place(indices, index).map_or(Replicate, Shard);
            let of_index = |&(index, _): &(Subscript, usize)| ShardingRule {
                out: place(&output, index).map_or(SUM, Shard),
                ins: inputs.iter().map(|indices| lies(indices, index)).collect(),
            };
            // It is linear in each operand.
            let of_operand = |at: usize| ShardingRule {
                out: SUM,
                ins: (0..inputs.len()).map(|i| if i == at { SUM } else { Replicate }).collect(),
            };
            let rows: ShardingRules =
                sizes.iter().map(of_index).chain((0..inputs.len()).map(of_operand)).collect();
            let size = |index: &Subscript| {
                sizes.iter().find(|(known, _)| known == index).map_or(1, |(_, size)| *size)
            };
            let shape: Vec<usize> = output.iter().map(size).collect();
            Ok(Signature::new(rows, &shape, operands[0].dtype()))
        };
        let attributes: Vec<usize> = equation.bytes().map(usize::from).collect();
        rules::run("einsum", &attributes, operands, signature, |x, out| {
            let local: Vec<&Tensor> = x.iter().map(|x| x.to_local()).collect();
            if local.iter().any(|x| x.elem_count() == 0) {
                return Ok(empty::zeros_of(&local, out.local_shape().as_slice(), out.dtype())?);
            }
            Ok(sum_of_products(&local, &inputs, &output)?)
        })
    }
}

/// The indices of each operand and of the result.
struct Equation {
    inputs: Vec<Vec<Subscript>>,
    output: Vec<Subscript>,
}

impl Equation {
    /// Returns the equation for operands of these ranks; or what is wrong with it.
    fn parse(equation: &str, ranks: &[usize]) -> std::result::Result<Self, String> {
        let spaceless: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match spaceless.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (&*spaceless, None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        if terms.len() != ranks.len() || ranks.is_empty() {
            return Err(format!("{} terms for {} operands; give one for each", terms.len(), ranks.len()));
        }
        let letters = |term: &str| term.replacen("...", "", 1).chars().count();
        let dims_of = |(term, rank): (&&str, &usize)| {
            let is_open = term.contains("...");
            rank.checked_sub(letters(term)).filter(|left| is_open || *left == 0)
        };
        let mut wide = 0;
        for (at, pair) in terms.iter().zip(ranks).enumerate() {
            match dims_of(pair) {
                Some(dims) => wide = wide.max(dims),
                None => return Err(format!("the term {:?} for operand {at} of {} dims", pair.0, pair.1)),
            }
        }
        let mut inputs = Vec::new();
        for pair in terms.iter().zip(ranks) {
            inputs.push(indices(pair.0, dims_of(pair).unwrap_or(0))?);
        }
        let output = match right {
            Some(right) => indices(right, wide)?,
            None => {
                let once = inputs
                    .iter()
                    .flatten()
                    .counts()
                    .into_iter()
                    .filter(|(index, n)| **index < OPEN && *n == 1);
                let once = once.map(|(index, _)| *index).sorted();
                (0..wide).rev().map(|dim| OPEN + dim as Subscript).chain(once).collect()
            }
        };
        if let Some(&index) = output.iter().find(|index| !inputs.iter().any(|of| of.contains(index))) {
            return Err(format!("index {} of the result is in no operand", shown(index)));
        }
        Ok(Self { inputs, output })
    }
}

/// The first number of dims of an ellipsis; they count from the last one.
const OPEN: Subscript = char::MAX as Subscript + 1;

/// Returns the indices of a term whose ellipsis stands for so many dims; or why there are none.
fn indices(term: &str, open: usize) -> std::result::Result<Vec<Subscript>, String> {
    let mut all = Vec::new();
    let mut rest = term;
    while let Some(first) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("...") {
            all.extend((0..open).rev().map(|dim| OPEN + dim as Subscript));
            rest = after;
        } else if first.is_alphabetic() {
            all.push(first as Subscript);
            rest = &rest[first.len_utf8()..];
        } else {
            return Err(format!("{first:?} in the term {term:?}; an index is a letter"));
        }
    }
    match all.iter().duplicates().next() {
        Some(&index) => {
            Err(format!("index {} is twice in the term {term:?}; take a diagonal before", shown(index)))
        }
        None => Ok(all),
    }
}

fn shown(index: Subscript) -> String {
    char::from_u32(index).map_or_else(|| "of an ellipsis".to_string(), |c| format!("{c:?}"))
}

/// Multiplies and sums operands with elements, from left to right.
fn sum_of_products(
    operands: &[&Tensor],
    inputs: &[Vec<Subscript>],
    output: &[Subscript],
) -> candle_core::Result<Tensor> {
    let is_needed = |from: usize, index: &Subscript| {
        output.contains(index) || inputs[from..].iter().any(|indices| indices.contains(index))
    };
    let mut made = summed(operands[0].copy()?, &inputs[0], |index| is_needed(1, index))?;
    for (at, (x, indices)) in operands.iter().zip(inputs).enumerate().skip(1) {
        let x = summed((*x).clone(), indices, |index| made.1.contains(index) || is_needed(at + 1, index))?;
        made = product(made, x, |index| is_needed(at + 1, index))?;
    }
    let (x, indices) = made;
    arranged(&x, &indices, output)
}

type LabeledTensor = (Tensor, Vec<Subscript>);

/// Sums over the indices that are not kept.
fn summed(
    x: Tensor,
    indices: &[Subscript],
    is_kept: impl Fn(&Subscript) -> bool,
) -> candle_core::Result<LabeledTensor> {
    let gone: Vec<usize> = indices.iter().positions(|index| !is_kept(index)).collect();
    if gone.is_empty() {
        return Ok((x, indices.to_vec()));
    }
    let dtype = x.dtype();
    let x = match dtype {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32)?.sum(gone)?.to_dtype(dtype)?,
        _ => x.sum(gone)?,
    };
    Ok((x, indices.iter().copied().filter(is_kept).collect()))
}

/// Returns the dims of `x` in the order of `to`, which are all of its indices.
fn arranged(x: &Tensor, indices: &[Subscript], to: &[Subscript]) -> candle_core::Result<Tensor> {
    if indices == to {
        return Ok(x.clone());
    }
    let order: Vec<usize> =
        to.iter().filter_map(|index| indices.iter().position(|other| other == index)).collect();
    x.permute(order)?.contiguous()
}

/// Multiplies two operands as batches of matrices. Indices of both that are not kept are summed.
fn product(
    (a, of_a): LabeledTensor,
    (b, of_b): LabeledTensor,
    is_kept: impl Fn(&Subscript) -> bool,
) -> candle_core::Result<LabeledTensor> {
    let (shared, rows): (Vec<Subscript>, Vec<Subscript>) =
        of_a.iter().partition(|index| of_b.contains(index));
    let columns: Vec<Subscript> = of_b.iter().copied().filter(|index| !shared.contains(index)).collect();
    let (batch, inner): (Vec<Subscript>, Vec<Subscript>) =
        shared.into_iter().partition(|index| is_kept(index));
    let size = |index: &Subscript| {
        let at = |indices: &[Subscript], x: &Tensor| {
            Some(x.dims()[indices.iter().position(|other| other == index)?])
        };
        at(&of_a, &a).or_else(|| at(&of_b, &b)).unwrap_or(1)
    };
    let sizes = |indices: &[Subscript]| indices.iter().map(size).collect::<Vec<usize>>();
    let count = |indices: &[Subscript]| sizes(indices).into_iter().product::<usize>();
    let matrices = (count(&batch), count(&rows), count(&inner), count(&columns));
    let left = arranged(&a, &of_a, &[&batch[..], &rows, &inner].concat())?;
    let right = arranged(&b, &of_b, &[&batch[..], &inner, &columns].concat())?;
    let left = left.contiguous()?.reshape((matrices.0, matrices.1, matrices.2))?;
    let right = right.contiguous()?.reshape((matrices.0, matrices.2, matrices.3))?;
    let indices = [batch, rows, columns].concat();
    Ok((left.matmul(&right)?.reshape(sizes(&indices))?, indices))
}
