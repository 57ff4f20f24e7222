//! The largest number of each row and its place, as an integer that ranks compare.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{made, would_compute};
use candle_core::{D, DType, Device, Result, Shape, Tensor, bail};

/// The numbers of a row that a block reads.
const EACH: usize = 4096;
const MOST_PARTS: usize = 64;

/// The largest number of a row, as f32, and the first place where it is: if there is a NaN or +∞, the first of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LargestNumber {
    /// The column.
    pub place: u32,
    /// The number; -∞ for a row without numbers.
    pub value: f32,
}

impl LargestNumber {
    /// The integer of a number: the larger one has the larger number, or of equal ones the earlier. See `largest.cu`.
    pub(super) fn key(self) -> i64 {
        let Self { place, value } = self;
        let bits = (value + 0.0).to_bits() as i32;
        let order = match bits {
            _ if value.is_nan() || value == f32::INFINITY => i32::MAX,
            bits if bits < 0 => bits ^ i32::MAX,
            bits => bits,
        };
        i64::from(order) << 32 | i64::from((i32::MAX as u32 - place) << 1 | u32::from(value.is_nan()))
    }

    /// The number that has this integer.
    pub(super) fn of_key(key: i64) -> Self {
        if key == i64::MIN {
            return Self { place: 0, value: f32::NEG_INFINITY };
        }
        let (order, rest) = ((key >> 32) as i32, key as u32);
        let value = match order {
            i32::MAX if rest & 1 == 1 => f32::NAN,
            i32::MAX => f32::INFINITY,
            order if order < 0 => f32::from_bits((order ^ i32::MAX) as u32),
            order => f32::from_bits(order as u32),
        };
        Self { place: i32::MAX as u32 - (rest >> 1), value }
    }

    /// Makes the integers `[rows, parts]` of whole rows, for [`of_keys`](Self::of_keys).
    ///
    /// # Errors
    /// If `x` is no matrix of floats, or has 2^31 columns or more.
    pub fn keys(x: &Tensor) -> Result<Tensor> {
        largest_keys(x, 0, x.dim(D::Minus1)?)
    }

    /// Reads the rows of integers `[rows, parts]`, on any device: their largest ones.
    ///
    /// # Errors
    /// If candle fails.
    pub fn of_keys(keys: &Tensor) -> Result<Vec<Self>> {
        let rows = keys.to_vec2::<i64>()?;
        Ok(rows.iter().map(|parts| Self::of_key(parts.iter().copied().max().unwrap_or(i64::MIN))).collect())
    }
}

/// The number of integers that [`largest_keys`] makes of a row of `all` numbers.
pub fn parts_of_row(all: usize) -> usize {
    all.div_ceil(EACH).clamp(1, MOST_PARTS)
}

/// Integers `[rows, parts]` for the largest numbers of the rows of `x` `[rows, columns]`, whose first column has the place `first` among
/// `all` of the row; see [`parts_of_row`]. The maximum of the integers of all pieces of a row is that of the row.
///
/// # Errors
/// If `x` is no matrix of floats, or there are 2^31 columns or more.
pub fn largest_keys(x: &Tensor, first: usize, all: usize) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    if !x.dtype().is_float() || all > i32::MAX as usize || first + columns > all {
        let dtype = x.dtype().as_str();
        bail!(
            "the largest of {columns} {dtype} numbers from {first} of {all}: expected floats and fewer than 2^31"
        );
    }
    let parts = parts_of_row(all);
    let x = x.detach().contiguous()?;
    if rows * columns > 0 && would_compute(&[&x]) {
        let [keys] = made(&FusedCall {
            text: KernelText::Largest,
            op: "largest",
            dtype: x.dtype(),
            grid: [parts, rows],
            block: [256, 1],
            inputs: &[Some(&x)],
            outputs: &[Some((Shape::from((rows, parts)), DType::I64))],
            numbers: &[columns, first].map(Scalar::Count),
        })?;
        return Ok(keys.into_tensor());
    }
    let numbers = x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let mut keys = vec![i64::MIN; rows * parts];
    if columns > 0 {
        let numbers = numbers.flatten_all()?.to_vec1::<f32>()?;
        let rows = numbers.chunks(columns).map(|row| of_row(row, first).key());
        keys.chunks_mut(parts).zip(rows).for_each(|(keys, key)| keys[0] = key);
    }
    Tensor::from_vec(keys, (rows, parts), x.device())
}

/// The largest of some numbers.
fn of_row(row: &[f32], first: usize) -> LargestNumber {
    // Sixteen at a time, as the processor's vectors have them.
    let (chunks, rest) = row.as_chunks::<16>();
    let (mut most, mut is_odd) = ([f32::NEG_INFINITY; 16], [false; 16]);
    for chunk in chunks {
        for ((most, is_odd), &number) in most.iter_mut().zip(&mut is_odd).zip(chunk) {
            *most = if number > *most { number } else { *most };
            *is_odd |= number.is_nan() | (number == f32::INFINITY);
        }
    }
    let odd = |number: f32| number.is_nan() || number == f32::INFINITY;
    let has_odd = is_odd.contains(&true) || rest.iter().copied().any(odd);
    let value = most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &number| most.max(number));
    let is_it = |&number: &f32| if has_odd { odd(number) } else { number == value };
    let place = row.iter().position(is_it).unwrap_or(0);
    LargestNumber { place: (first + place) as u32, value: row[place] }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn integers_are_in_the_order_of_numbers_and_then_of_places() {
        let inf = f32::INFINITY;
        let values = [-inf, f32::MIN, -1.5, -1e-45, 0.0, 1e-45, 2.0, f32::MAX];
        let of = |place, value| LargestNumber { place, value };
        for (at, &low) in values.iter().enumerate() {
            assert_eq!(LargestNumber::of_key(of(7, low).key()), of(7, low));
            assert!(of(3, low).key() > of(4, low).key());
            for &high in values[at + 1..].iter().chain(&[inf, f32::NAN]) {
                assert!(of(9, high).key() > of(0, low).key(), "{high} {low}");
            }
        }
        assert_eq!(of(5, -0.0).key(), of(5, 0.0).key());
        assert!(of(1, inf).key() > of(2, f32::NAN).key() && of(1, f32::NAN).key() > of(2, inf).key());
        assert!(LargestNumber::of_key(of(8, f32::NAN).key()).value.is_nan());
        assert!(of(u32::MAX >> 1, -inf).key() > i64::MIN);
        assert_eq!(LargestNumber::of_key(i64::MIN).value, -inf);
    }

    #[test]
    fn pieces_of_rows_join_to_the_first_largest_number() {
        let row = |at: usize| ((at * 7919 % 613) as f32 / 3.0 - 90.0, at);
        for (width, cut) in [(1, 0), (5, 5), (700, 123), (9000, 8191)] {
            let mut numbers: Vec<f32> = (0..2 * width).map(|at| row(at).0).collect();
            numbers[width] = f32::NEG_INFINITY;
            let x = Tensor::from_vec(numbers.clone(), (2, width), &Device::Cpu).unwrap();
            let piece = |start: usize, len: usize| {
                let piece = if len == 0 {
                    Tensor::zeros((2, 0), DType::F32, &Device::Cpu).unwrap()
                } else {
                    x.narrow(1, start, len).unwrap()
                };
                largest_keys(&piece, start, width).unwrap()
            };
            let both = piece(0, cut).maximum(&piece(cut, width - cut)).unwrap();
            let found = LargestNumber::of_keys(&both).unwrap();
            for (found, row) in found.iter().zip(numbers.chunks(width)) {
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let place = row.iter().position(|&number| number == most).unwrap();
                assert_eq!(*found, LargestNumber { place: place as u32, value: most }, "{width} {cut}");
            }
        }
        assert!(largest_keys(&Tensor::zeros((2, 3), DType::U32, &Device::Cpu).unwrap(), 0, 3).is_err());
        assert!(largest_keys(&Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap(), 1, 3).is_err());
    }
}
