use super::{LargestNumber, RowBasis, RowCandidates, Sampler, Sampling, TokenBasis, checked, sort_most};
use candle_core::{Device, Tensor};
use std::collections::BTreeSet;

fn drawn(temperature: f64, top_p: f64) -> Vec<u32> {
    let logits = Tensor::new(&[0f32, 2.0, 1.0, f32::NEG_INFINITY], &Device::Cpu).unwrap();
    let mut sampler = Sampler::new(Sampling { temperature, top_p, seed: 1, ..Sampling::default() });
    (0..2000).map(|_| sampler.next(&logits).unwrap()).collect()
}

#[test]
fn logits_that_are_no_numbers_are_an_error_and_no_token() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let cases = [
        ([0.0, nan, 1.0], "the logit of token 1 is NaN"),
        ([0.0, 1.0, inf], "the logit of token 2 is inf"),
        ([-inf; 3], "none of the logits"),
    ];
    for temperature in [0.0, 1.0] {
        for (logits, want) in &cases {
            let logits = Tensor::new(logits, &Device::Cpu).unwrap();
            let mut sampler =
                Sampler::new(Sampling { temperature, top_p: 0.9, seed: 1, ..Sampling::default() });
            let said = sampler.next(&logits).unwrap_err().to_string();
            assert!(said.contains(want), "{said}");
            let row = logits.unsqueeze(0).unwrap();
            let keys = RowCandidates::keys(&row, &[0.5]).unwrap();
            let read = RowCandidates::of_keys(&keys, &[0.5]).unwrap();
            let read = RowBasis::Candidates(&read[0]);
            assert!(sampler.is_decided_by(read));
            assert_eq!(sampler.choose_by(read).unwrap_err().to_string(), said);
            let keys = LargestNumber::keys(&row).unwrap();
            let largest = LargestNumber::of_keys(&keys).unwrap()[0];
            assert_eq!(checked(largest).unwrap_err().to_string(), said);
        }
    }
}

#[test]
fn few_tokens_likely_ones_and_new_ones_are_drawn() {
    let drawn = |sampling: Sampling, seen: &[u32]| {
        let logits = Tensor::new(&[0f32, 2.0, 1.0, 1.0, -1.0], &Device::Cpu).unwrap();
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, seed: 3, ..sampling });
        sampler.see(seen);
        (0..500).map(|_| sampler.next(&logits).unwrap()).collect::<BTreeSet<u32>>()
    };
    let base = Sampling::default();
    assert_eq!(drawn(base, &[]).len(), 5);
    assert_eq!(drawn(Sampling { top_k: 1, ..base }, &[]), [1].into());
    // The third is as likely as the second.
    assert_eq!(drawn(Sampling { top_k: 2, ..base }, &[]), [1, 2, 3].into());
    assert_eq!(drawn(Sampling { top_k: 9, ..base }, &[]).len(), 5);
    // e⁻¹ is 0.37 of the likeliest, and e⁻² 0.14.
    assert_eq!(drawn(Sampling { min_p: 0.3, ..base }, &[]), [1, 2, 3].into());
    assert_eq!(drawn(Sampling { min_p: 0.1, ..base }, &[]), [0, 1, 2, 3].into());
    let penalty = Sampling { repetition_penalty: 1000.0, top_k: 1, ..base };
    assert_eq!(drawn(penalty, &[1]), [2, 3].into());
    // A negative logit becomes smaller.
    assert_eq!(drawn(Sampling { top_k: 4, ..penalty }, &[4]), [0, 1, 2, 3].into());
}

#[test]
fn tokens_that_were_written_lose_by_their_number() {
    let logits = Tensor::new(&[0f32, 2.0, 1.4, 1.0], &Device::Cpu).unwrap();
    let base = Sampling { presence_penalty: 0.5, ..Sampling::default() };
    let written = |sampling: Sampling| {
        let mut sampler = Sampler::new(sampling);
        sampler.see(&[1, 2]); // a prompt does not count
        let mut next = || {
            let token = sampler.next(&logits).unwrap();
            sampler.wrote(token);
            token
        };
        [next(), next(), next(), next()]
    };
    assert_eq!(written(Sampling::default()), [1, 1, 1, 1]);
    assert_eq!(written(base), [1, 1, 1, 1]);
    assert_eq!(written(Sampling { presence_penalty: 0.8, ..base }), [1, 2, 1, 1]);
    let frequency = Sampling { presence_penalty: 0.0, frequency_penalty: 0.5, ..base };
    // 2, 1.5, then 1.4 and 1, then 0.9.
    assert_eq!(written(frequency), [1, 1, 2, 1]);
    assert_eq!(written(Sampling { frequency_penalty: -1.0, ..frequency }), [1, 1, 1, 1]);
}

#[test]
fn the_likeliest_tokens_are_found_among_very_many() {
    let of = |i: usize| -((i * 7919 % 5003) as f64) / 50.0;
    let weights: Vec<(u32, f64)> = (0..5003).map(|i| (i as u32, of(i).exp())).collect();
    let mut sorted = weights.clone();
    sorted.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    for count in [1, 10, 400, 4000, 5003, 6000] {
        let mut most = weights.clone();
        sort_most(&mut most, |most| most.len() >= count);
        assert!(most.len() >= count.min(5003) && most[..] == sorted[..most.len()], "{count}");
        assert!(count > 10 || most.len() < 1000, "{count}: {}", most.len());
    }
}

#[test]
fn a_top_k_above_the_tokens_that_may_follow_takes_all_of_them_and_no_other() {
    let mut logits = vec![f32::NEG_INFINITY; 300_000];
    (0..3).for_each(|i| logits[i * 100_000] = i as f32);
    let logits = Tensor::new(logits, &Device::Cpu).unwrap();
    for top_k in [3, 50, 300_000, usize::MAX] {
        let sampling = Sampling { temperature: 1.0, top_k, seed: 1, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling);
        let drawn: BTreeSet<u32> = (0..50).map(|_| sampler.next(&logits).unwrap()).collect();
        assert_eq!(drawn, [0, 100_000, 200_000].into(), "{top_k}");
    }
}

/// Logits of a vocabulary, some alike; those of `steep` fall fast.
fn logits(width: usize, seed: usize, steep: f32) -> Vec<f32> {
    let even = |at: usize| ((at * 7919 + seed * 104_729) % 6007) as f32 / 6007.0;
    (0..width).map(|at| ((even(at) + 1e-6).ln() * steep * -64.0).round() / 64.0).collect()
}

#[test]
fn candidates_choose_the_tokens_that_all_logits_choose() {
    let base = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
    let samplings = [
        Sampling { temperature: 0.0, ..base },
        Sampling { top_k: 1, ..base },
        Sampling { top_k: 40, ..base },
        Sampling { top_k: 40, top_p: 0.9, temperature: 0.6, min_p: 0.05, ..base },
        Sampling { top_k: 500, temperature: 1e6, ..base },
        Sampling { top_p: 0.0, ..base },
        Sampling { top_p: 0.5, temperature: 0.3, ..base },
        Sampling { top_p: 0.95, ..base },
        Sampling { top_p: 0.9, min_p: 0.1, temperature: 1.5, ..base },
        Sampling { min_p: 0.1, ..base },
        Sampling { min_p: 1e-9, temperature: 2.0, ..base },
    ];
    let (mut decided, mut left) = (0, 0);
    for (width, steep) in [(3, 1.0), (64, 1.0), (300, 0.1), (5000, 1.0), (20_000, 3.0), (20_000, 0.01)] {
        for sampling in samplings {
            let [mut of_all, mut of_few] = [Sampler::new(sampling), Sampler::new(sampling)];
            let temperature = match of_few.basis() {
                TokenBasis::Candidates(temperature) => temperature,
                TokenBasis::Largest => 0.0,
                TokenBasis::All => panic!("{sampling:?} reads all"),
            };
            for seed in 0..8 {
                let logits = logits(width, seed, steep);
                let x = Tensor::from_slice(&logits, (1, width), &Device::Cpu).unwrap();
                let keys = RowCandidates::keys(&x, &[temperature]).unwrap();
                let rows = RowCandidates::of_keys(&keys, &[temperature]).unwrap();
                let few = RowBasis::Candidates(&rows[0]);
                let want = of_all.choose(logits.clone()).unwrap();
                let is_decided = of_few.is_decided_by(few);
                *(if is_decided { &mut decided } else { &mut left }) += 1;
                let read = if is_decided { few } else { RowBasis::All(&logits) };
                assert_eq!(of_few.choose_by(read).unwrap(), want, "{width} {steep} {sampling:?}");
                assert!(is_decided || of_few.choose_by(few).is_err());
            }
        }
    }
    assert!(decided > 300 && left > 30, "{decided} decided, {left} left");
}

#[test]
fn what_does_not_follow_from_the_likeliest_tokens_reads_all_logits() {
    let basis = |sampling: Sampling| Sampler::new(sampling).basis();
    let base = Sampling { temperature: 0.7, ..Sampling::default() };
    for sampling in [
        base,
        Sampling { repetition_penalty: 1.1, top_k: 5, ..base },
        Sampling { presence_penalty: 0.1, temperature: 0.0, ..base },
        Sampling { frequency_penalty: 0.1, top_p: 0.5, ..base },
        Sampling { top_k: 100_000, ..base },
    ] {
        assert_eq!(basis(sampling), TokenBasis::All, "{sampling:?}");
    }
    assert_eq!(basis(Sampling { top_p: 0.5, ..base }), TokenBasis::Candidates(0.7));
    assert_eq!(basis(Sampling { top_k: 9, top_p: 0.5, ..base }), TokenBasis::Candidates(0.0));
    assert_eq!(basis(Sampling::default()), TokenBasis::Largest);
}

#[test]
fn without_temperature_the_most_likely_token_is_taken() {
    assert!(drawn(0.0, 1.0).iter().all(|&token| token == 1));
    assert!(drawn(1.0, 0.0).iter().all(|&token| token == 1));
}

#[test]
fn tokens_come_as_often_as_they_are_likely() {
    let share = |tokens: &[u32], of: u32| tokens.iter().filter(|&&token| token == of).count() as f64 / 2000.0;
    let all = drawn(1.0, 1.0);
    for (token, probability) in [(0, 0.090), (1, 0.665), (2, 0.245), (3, 0.0)] {
        assert!((share(&all, token) - probability).abs() < 0.04, "{token}");
    }
    // The two most likely have nine tenths.
    let most = drawn(1.0, 0.9);
    assert_eq!(share(&most, 0), 0.0);
    assert!((share(&most, 2) - 0.269).abs() < 0.04);
}
