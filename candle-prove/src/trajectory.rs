//! The numbers of a training run, and their comparison.
use candle_core::{DType, Device, Tensor};
use candle_shard::{DTensor, Result};

/// The numbers of a training run by name, in the order in which they were computed.
#[derive(Debug, Clone, Default)]
pub(super) struct Trajectory(Vec<(String, Vec<f64>)>);

impl Trajectory {
    pub(super) fn number(&mut self, name: impl Into<String>, number: f64) {
        self.0.push((name.into(), vec![number]));
    }

    /// Adds the elements of a local tensor.
    pub(super) fn local(&mut self, name: impl Into<String>, tensor: &Tensor) -> Result<()> {
        self.0.push((name.into(), elements(tensor)?));
        Ok(())
    }

    /// Adds the elements of a whole tensor. Every rank of its mesh calls it.
    pub(super) fn whole(&mut self, name: impl Into<String>, tensor: &DTensor) -> Result<()> {
        self.local(name, &tensor.detach().full_tensor()?)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the numbers of a run up to the first name that differs in the other, because ops depend on layouts.
    pub(super) fn like(mut self, other: &Self) -> Self {
        let same = self.names().zip(other.names()).take_while(|(mine, theirs)| mine == theirs).count();
        self.0.truncate(same);
        self
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    fn get(&self, name: &str) -> Option<&[f64]> {
        self.0.iter().find(|(other, _)| other == name).map(|(_, numbers)| numbers.as_slice())
    }

    /// Returns the first number that is NaN or infinite, with its name.
    pub(super) fn unbounded(&self) -> Option<(&str, f64)> {
        let first = |(_, numbers): &(String, Vec<f64>)| numbers.iter().find(|x| !x.is_finite()).copied();
        self.0.iter().find_map(|each| Some((each.0.as_str(), first(each)?)))
    }

    /// Returns what differs first from `all_alone`, the run on one device in the same dtypes, and `all_exact`, the one in
    /// f64.
    ///
    /// A number may be as far from that of one device as a few times the farthest of its tensor there is from f64, and some
    /// roundings of the largest number of its tensor, or of a small part of the largest of its kind. It is never farther
    /// than half of that largest number, or, in 16 bits, than twice as far as one device is from f64.
    pub(super) fn difference(&self, all_alone: &Self, all_exact: &Self, dtype: DType) -> Option<Difference> {
        let rounding = match dtype {
            DType::F64 => 1e-10,
            DType::F32 => 1e-4,
            DType::F16 => 2e-2,
            _ => 1e-1,
        };
        for (name, numbers) in &self.0 {
            let (Some(alone), Some(exact)) = (all_alone.get(name), all_exact.get(name)) else {
                return Some(Difference {
                    name: name.clone(),
                    reason: "is there, and not on one device".into(),
                });
            };
            if numbers.len() != alone.len() {
                let reason = format!("has {} elements instead of {}", numbers.len(), alone.len());
                return Some(Difference { name: name.clone(), reason });
            }
            // Sums that cancel keep the roundings of their terms.
            let share = match dtype {
                DType::F64 => 1e-3,
                DType::F32 => 1e-2,
                _ => 0.05,
            };
            let own = size(alone).max(share * all_alone.largest_like(name));
            // More would let a number pass that is missing or counted twice.
            let most = (4.0 * distance(alone, exact) + rounding * own).min(own / 2.0);
            // Roundings of 16 bits add up in single elements, so these tensors are compared as a whole.
            if rounding > 1e-2 && alone.iter().chain(numbers).all(|x| x.is_finite()) {
                let own = spread(alone).max(share * all_alone.largest_like(name));
                let (far, of_one) = (spread(&minus(numbers, alone)), spread(&minus(alone, exact)));
                let most = (4.0 * of_one + rounding * own).min((own / 2.0).max(2.0 * of_one));
                if far > most {
                    let reason =
                        format!("differs by {far:.1e} in the root mean square, more than {most:.1e}");
                    let reason = format!(
                        "{reason}; that of one device is {:.1e}, {of_one:.1e} from f64",
                        spread(alone)
                    );
                    return Some(Difference { name: name.clone(), reason });
                }
                continue;
            }
            // NaN and infinity in the results of ops, such as masks, must be those of one device.
            let is_far = |at: &usize| {
                let (got, want) = (numbers[*at], alone[*at]);
                match want.is_finite() {
                    true => got.is_nan() || (got - want).abs() > most,
                    false => got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()),
                }
            };
            if let Some(at) = (0..numbers.len()).find(is_far) {
                let far = (0..numbers.len()).filter(is_far).count();
                let (got, want) = (numbers[at], alone[at]);
                let reason = format!(
                    "element {at} is {got:e} instead of {want:e}; {far} of {} elements differ by more than {most:.1e}",
                    numbers.len()
                );
                return Some(Difference { name: name.clone(), reason });
            }
        }
        None
    }

    /// Returns the largest number of all that have the kind of `name`, which is what comes before `" of "`.
    fn largest_like(&self, name: &str) -> f64 {
        let kind = |name: &str| name.split(" of ").next().unwrap_or_default().to_string();
        let alike = self.0.iter().filter(|(other, _)| kind(other) == kind(name));
        alike.map(|(_, numbers)| size(numbers)).fold(0.0, f64::max)
    }
}

/// The first number that differs.
#[derive(Debug, Clone)]
pub(super) struct Difference {
    pub(super) name: String,
    pub(super) reason: String,
}

/// Returns the elements of a tensor on the host.
pub(super) fn elements(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?)
}

fn size(numbers: &[f64]) -> f64 {
    numbers.iter().filter(|x| x.is_finite()).fold(0.0, |most, x| x.abs().max(most))
}

/// Returns the root mean square.
fn spread(numbers: &[f64]) -> f64 {
    (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len().max(1) as f64).sqrt()
}

fn minus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradient(numbers: &[f64]) -> Trajectory {
        Trajectory(vec![("gradient in step 0 of up".into(), numbers.to_vec())])
    }

    #[test]
    fn a_gradient_that_is_missing_or_counted_twice_differs() {
        // One device is far from the exact numbers.
        let (alone, exact) = (gradient(&[0.6, -1.0]), gradient(&[1.0, -1.0]));
        for wrong in [[0.0, 0.0], [2.0, -2.0], [1e6, -1.0]] {
            assert!(gradient(&wrong).difference(&alone, &exact, DType::BF16).is_some(), "{wrong:?}");
        }
        assert!(gradient(&[0.7, -1.1]).difference(&alone, &exact, DType::BF16).is_none());
    }

    #[test]
    fn the_first_number_without_a_bound_is_named() {
        assert!(gradient(&[1.0]).unbounded().is_none());
        let found = gradient(&[1.0, f64::NAN]);
        let (name, number) = found.unbounded().unwrap();
        assert!(name == "gradient in step 0 of up" && number.is_nan());
    }
}
