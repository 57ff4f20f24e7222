//! The largest numbers of each row and their places: what a token is drawn from.
use super::call::{FusedCall, KernelText, Scalar};
use super::largest::LargestNumber;
use super::run::{made, would_compute};
use candle_core::{D, DType, Device, Result, Shape, Tensor, bail};

/// The numbers of a part of a row.
const EACH: usize = 4096;
/// The largest ones of a part that are told.
const COUNT: usize = 64;
/// The integers of a part: the bits of a sum, and the keys.
const WIDTH: usize = 1 + COUNT;

/// The largest numbers of a row, and what is known of the others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowCandidates {
    /// The largest numbers, the largest first, and of equal ones the earlier: all numbers of the row that stand before the last of these.
    pub numbers: Vec<LargestNumber>,
    /// What none of the other numbers exceeds; `None` if there are no others.
    pub rest: Option<f32>,
    /// The sum of e^((number - largest) / temperature) over all numbers of the row, up to a relative error of 10⁻¹²; 0 if the row has no
    /// temperature above 0, or no finite largest number.
    pub sum: f64,
}

impl RowCandidates {
    /// How many numbers are told at least, of a row that has so many.
    pub const LEAST: usize = COUNT;

    /// Makes the integers `[rows, parts]` of whole rows, for [`of_keys`](Self::of_keys).
    ///
    /// # Errors
    /// Those of [`candidate_keys`].
    pub fn keys(x: &Tensor, temperatures: &[f64]) -> Result<Tensor> {
        let all = x.dim(D::Minus1)?;
        candidate_keys(x, temperatures, &RowPiece { first: 0, before: 0, parts: parts_of_pieces(all, 1) })
    }

    /// Reads the rows of integers, on any device, that were made with these temperatures.
    ///
    /// # Errors
    /// If there are not as many as rows, or candle fails.
    pub fn of_keys(keys: &Tensor, temperatures: &[f64]) -> Result<Vec<Self>> {
        let rows = keys.to_vec2::<i64>()?;
        if temperatures.len() != rows.len() {
            bail!("{} temperatures of {} rows", temperatures.len(), rows.len());
        }
        Ok(rows.iter().zip(temperatures).map(|(row, &temperature)| Self::of_row(row, temperature)).collect())
    }

    fn of_row(row: &[i64], temperature: f64) -> Self {
        let parts = || row.chunks_exact(WIDTH).filter(|part| part[1] > i64::MIN);
        let most = parts().map(|part| part[1]).max();
        // A part whose last place is taken may have more numbers, which are smaller.
        let bound = parts().map(|part| part[COUNT]).max().filter(|&bound| bound > i64::MIN);
        let told = parts().flat_map(|part| &part[1..]).copied();
        let mut told: Vec<i64> = told.filter(|&key| key >= bound.unwrap_or(i64::MIN + 1)).collect();
        told.sort_unstable_by(|a, b| b.cmp(a));
        let value = |key: i64| f64::from(LargestNumber::of_key(key).value);
        let share = |part: &[i64]| match part[0] {
            0 => 0.0,
            bits => {
                let away = (value(part[1]) - most.map_or(0.0, value)) / temperature;
                f64::from_bits(bits as u64) * away.exp()
            }
        };
        Self {
            numbers: told.into_iter().map(LargestNumber::of_key).collect(),
            rest: bound.map(|bound| LargestNumber::of_key(bound).value),
            sum: parts().map(share).sum(),
        }
    }
}

/// Which columns of its row a piece has, and which parts of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowPiece {
    /// The place of its first column.
    pub first: usize,
    /// The parts of the pieces before it.
    pub before: usize,
    /// The parts of all pieces: those of each, rounded up.
    pub parts: usize,
}

impl RowPiece {
    /// The piece from the column `first` on, the one with the number `nth` of `count`, of a row of `all` numbers.
    pub fn new(first: usize, [nth, count]: [usize; 2], all: usize) -> Self {
        Self { first, before: first / EACH + nth, parts: parts_of_pieces(all, count) }
    }

    /// The number of integers of a row.
    pub fn width(&self) -> usize {
        self.parts * WIDTH
    }
}

/// The parts of a row of `all` numbers, which is cut into `count` pieces of any sizes.
fn parts_of_pieces(all: usize, count: usize) -> usize {
    all / EACH + count
}

/// Integers for the largest numbers of the rows of a piece `[rows, columns]`, and for sums with the temperatures of the rows, of which none is
/// above 0 where sums are not needed. The maximum of the integers of all pieces is that of whole rows.
///
/// # Errors
/// If `x` is no matrix of floats, there are not as many temperatures as rows, or 2^31 columns or more.
pub fn candidate_keys(x: &Tensor, temperatures: &[f64], piece: &RowPiece) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let RowPiece { first, before, parts } = *piece;
    if !x.dtype().is_float() || first + columns > i32::MAX as usize || temperatures.len() != rows {
        let (dtype, given) = (x.dtype().as_str(), temperatures.len());
        bail!(
            "candidates of {rows} rows of {columns} {dtype} numbers from {first}, and {given} temperatures: \
             expected floats, fewer than 2^31 columns and a temperature for each row"
        );
    }
    let shape = Shape::from((rows, piece.width()));
    let x = x.detach().contiguous()?;
    if rows * columns > 0 && would_compute(&[&x]) {
        let is_summed = temperatures.iter().any(|&temperature| temperature > 0.0);
        let given = is_summed.then(|| Tensor::new(temperatures, x.device())).transpose()?;
        let [keys] = made(&FusedCall {
            text: KernelText::Largest,
            op: "candidates",
            dtype: x.dtype(),
            grid: [parts, rows],
            block: [256, 1],
            inputs: &[Some(&x), given.as_ref()],
            outputs: &[Some((shape, DType::I64))],
            numbers: &[columns, first, before, COUNT].map(Scalar::Count),
        })?;
        return Ok(keys.into_tensor());
    }
    let mut keys = vec![i64::MIN; shape.elem_count()];
    let numbers = match rows * columns {
        0 => Vec::new(),
        _ => x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
    };
    for (row, (keys, temperature)) in keys.chunks_mut(piece.width()).zip(temperatures).enumerate() {
        keys.iter_mut().step_by(WIDTH).for_each(|sum| *sum = 0);
        let row = &numbers[row * columns..][..columns];
        let own = &mut keys[before * WIDTH..];
        for ((part, keys), nth) in row.chunks(EACH).zip(own.chunks_mut(WIDTH)).zip(0..) {
            of_part(part, first + nth * EACH, *temperature, keys);
        }
    }
    Tensor::from_vec(keys, shape, x.device())
}

/// The integers of a part, whose first number has the place `first`, as `largest.cu` makes them.
fn of_part(part: &[f32], first: usize, temperature: f64, to: &mut [i64]) {
    let places = part.iter().zip(first as u32..);
    let mut keys: Vec<i64> = places.map(|(&value, place)| LargestNumber { place, value }.key()).collect();
    if keys.len() > COUNT {
        keys.select_nth_unstable_by(COUNT - 1, |a, b| b.cmp(a));
        keys.truncate(COUNT);
    }
    keys.sort_unstable_by(|a, b| b.cmp(a));
    let most = keys.first().map_or(f32::NAN, |&key| LargestNumber::of_key(key).value);
    if temperature > 0.0 && most.is_finite() {
        let weight = |&number: &f32| ((f64::from(number) - f64::from(most)) / temperature).exp();
        to[0] = part.iter().map(weight).sum::<f64>().to_bits() as i64;
    }
    to[1..=keys.len()].copy_from_slice(&keys);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn numbers(width: usize) -> Vec<f32> {
        (0..width).map(|at| (at * 7919 % 613) as f32 / 9.0 - 30.0).collect()
    }

    #[test]
    fn what_is_told_are_the_largest_numbers_in_their_order_and_the_sum_of_all() {
        for (width, cuts) in [(5, vec![]), (64, vec![]), (700, vec![123]), (9000, vec![0, 4000, 8191])] {
            let (all, temperatures) = (numbers(width), [0.7, 0.0]);
            let x = Tensor::from_vec([&all[..], &all[..]].concat(), (2, width), &Device::Cpu).unwrap();
            let ends: Vec<usize> = [&[0], &cuts[..], &[width]].concat();
            let pieces = ends.windows(2).enumerate().map(|(nth, ends)| {
                let piece = RowPiece::new(ends[0], [nth, cuts.len() + 1], width);
                let empty = || Tensor::zeros((2, 0), DType::F32, &Device::Cpu);
                let len = ends[1] - ends[0];
                let x = if len == 0 { empty() } else { x.narrow(1, ends[0], len) };
                candidate_keys(&x.unwrap(), &temperatures, &piece).unwrap()
            });
            let keys = pieces.reduce(|a, b| a.maximum(&b).unwrap()).unwrap();
            let mut want: Vec<(u32, f32)> = (0..).zip(all.iter().copied()).collect();
            want.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
            for (row, temperature) in
                RowCandidates::of_keys(&keys, &temperatures).unwrap().iter().zip(temperatures)
            {
                let told: Vec<(u32, f32)> =
                    row.numbers.iter().map(|number| (number.place, number.value)).collect();
                assert!(
                    told.len() >= COUNT.min(width) && told[..] == want[..told.len()],
                    "{width}: {}",
                    told.len()
                );
                let rest = want.get(told.len());
                assert!(rest.is_none_or(|rest| row.rest.is_some_and(|bound| rest.1 <= bound)), "{width}");
                assert_eq!(row.rest.is_none(), width < COUNT, "{width}");
                let most = f64::from(want[0].1);
                let sum: f64 = all.iter().map(|&x| ((f64::from(x) - most) / 0.7).exp()).sum();
                let sum = if temperature > 0.0 { sum } else { 0.0 };
                assert!((row.sum - sum).abs() <= 1e-12 * sum, "{width}: {} {sum}", row.sum);
            }
        }
        assert!(
            RowCandidates::keys(&Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap(), &[1.0]).is_err()
        );
    }
}
