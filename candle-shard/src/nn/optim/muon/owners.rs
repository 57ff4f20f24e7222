//! Assignment of matrices to the ranks that orthogonalize them.

/// Estimates the multiplications of the iterations on a matrix of this shape.
pub(super) fn cost(dims: &[usize], steps: usize) -> u128 {
    let short = dims.iter().copied().min().unwrap_or(0) as u128;
    let long = dims.iter().copied().max().unwrap_or(0) as u128;
    short * short * (2 * long + short) * steps as u128
}

/// Assigns a rank to each cost: the largest first, each to the rank with the least work so far (Graham 1969). No rank
/// gets more than 4/3 of the optimum.
pub(super) fn balanced(costs: &[u128], ranks: usize) -> Vec<usize> {
    let mut largest_first: Vec<usize> = (0..costs.len()).collect();
    largest_first.sort_by_key(|&i| std::cmp::Reverse(costs[i]));
    let (mut loads, mut owners) = (vec![0; ranks.max(1)], vec![0; costs.len()]);
    for i in largest_first {
        let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[owner] += costs[i];
        owners[i] = owner;
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rank_has_much_more_to_do_than_another() {
        assert_eq!(balanced(&[5, 4, 3, 3, 3], 2), [0, 1, 1, 0, 1]);
        assert_eq!(balanced(&[1, 1, 1, 1], 4), [0, 1, 2, 3]);
        assert_eq!(balanced(&[], 3), Vec::<usize>::new());
        assert_eq!(cost(&[2, 3], 5), cost(&[3, 2], 5));
        let costs: Vec<u128> = (0..40).map(|i| cost(&[8 + i % 5, 8 * (1 + i % 3)], 5)).collect();
        for ranks in 1..6 {
            let mut loads = vec![0; ranks];
            costs.iter().zip(balanced(&costs, ranks)).for_each(|(cost, owner)| loads[owner] += cost);
            let (most, least) = (loads.iter().max().unwrap(), loads.iter().min().unwrap());
            assert!(most - least <= *costs.iter().max().unwrap(), "{loads:?}");
        }
    }
}
