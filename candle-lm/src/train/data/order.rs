//! The order of an epoch.

/// A permutation of the numbers below `count` that follows from a seed and an epoch. Each place is computed by itself, so no list of them is
/// kept, and a training goes on in the middle of an epoch without the numbers before.
///
/// It is a Feistel network over the next power of 4, walked until it is back below `count` (Black and Rogaway 2002).
#[derive(Clone, Copy, Debug)]
pub(super) struct EpochOrder {
    count: u64,
    /// The bits of each half.
    half: u32,
    key: u64,
}

const ROUNDS: u64 = 8;

impl EpochOrder {
    pub(super) fn new(seed: u64, epoch: u64, count: usize) -> Self {
        let count = count as u64;
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { count, half: bits.div_ceil(2).max(1), key: mixed(mixed(seed) ^ epoch) }
    }

    /// The number at a place below `count`.
    pub(super) fn at(self, place: usize) -> usize {
        let mut number = place as u64;
        loop {
            number = self.turned(number);
            if number < self.count {
                return number as usize;
            }
        }
    }

    fn turned(self, number: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (number >> self.half, number & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mixed(mixed(self.key ^ round) ^ right) & mask));
        }
        left << self.half | right
    }
}

/// A step of splitmix64.
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::EpochOrder;

    #[test]
    fn each_epoch_has_each_number_once_in_an_order_of_its_own() {
        for count in (1..70).chain([255, 256, 257, 1000]) {
            let all: Vec<usize> = (0..count).collect();
            let orders: Vec<Vec<usize>> = [(1, 0), (1, 1), (2, 0)]
                .map(|(seed, epoch)| {
                    let order = EpochOrder::new(seed, epoch, count);
                    all.iter().map(|&place| order.at(place)).collect()
                })
                .into();
            for order in &orders {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, all, "{count}");
            }
            if count > 20 {
                assert!(
                    orders[0] != orders[1] && orders[0] != orders[2] && orders[1] != orders[2],
                    "{count}"
                );
            }
        }
    }

    #[test]
    fn each_number_is_about_equally_often_at_each_place() {
        let (count, epochs) = (10, 4000);
        let mut seen = vec![vec![0; count]; count];
        for epoch in 0..epochs {
            let order = EpochOrder::new(7, epoch, count);
            (0..count).for_each(|place| seen[place][order.at(place)] += 1);
        }
        let (least, most) = (seen.iter().flatten().min(), seen.iter().flatten().max());
        // 400 are expected, with a deviation of 19.
        assert!(least > Some(&300) && most < Some(&500), "{least:?} {most:?}");
    }
}
