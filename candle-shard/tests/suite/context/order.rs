//! The work of each rank.
use candle_shard::{Attention, Documents, Result, TokenOrder};

/// The most work of a rank, divided by the mean.
fn spread(options: &Attention, sizes: &[usize]) -> Result<f64> {
    let work = options.work(sizes)?;
    let mean = work.iter().sum::<usize>() as f64 / work.len() as f64;
    Ok(*work.iter().max().unwrap_or(&0) as f64 / mean)
}

#[test]
fn the_slowest_rank_has_the_mean_work_in_zigzag_order() -> Result<()> {
    let causal = Attention::default().causal(true);
    for ranks in 1..=8 {
        // Fewer tokens cannot be cut so evenly.
        for len in [320, 321, 359, 500, 1003] {
            let order = TokenOrder::zigzag(len, ranks);
            let sizes = order.sizes().clone();
            let by_order = causal.clone().order(order);
            assert!(spread(&by_order, &sizes)? <= 1.05, "{len} on {ranks}: {}", spread(&by_order, &sizes)?);
        }
        let even = vec![128; ranks];
        let plain = 2.0 - 1.0 / ranks as f64;
        assert!((spread(&causal, &even)? - plain).abs() < 0.01, "{ranks}: {}", spread(&causal, &even)?);
    }
    Ok(())
}

#[test]
fn packed_documents_have_even_work_in_their_own_zigzag_order() -> Result<()> {
    let ends = vec![0, 40, 44, 300, 301, 430, 512];
    let documents = Some(Documents::new(ends.clone()));
    let causal = Attention::default().causal(true).documents(documents);
    for ranks in 1..=5 {
        let spread_of = |order: TokenOrder| {
            let sizes = order.sizes().clone();
            spread(&causal.clone().order(order), &sizes)
        };
        let own = spread_of(TokenOrder::zigzag_of_documents(512, &ends, ranks)?)?;
        assert!(own <= 1.05, "{ranks}: {own}");
        let of_whole = spread_of(TokenOrder::zigzag(512, ranks))?;
        assert!(ranks == 1 || of_whole > 1.1, "{ranks}: {of_whole}");
    }
    Ok(())
}
