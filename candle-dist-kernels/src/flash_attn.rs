use candle_core::{D, Result, Tensor, bail};
use candle_dist_base::empty;

use super::attention::{AttentionSizes, KeyBlock, Scale, Visible, attend, attend_off_host};
use super::{check_dtype, compute_dtype, convert::to_dtype};

/// Attention: `softmax(query · keyᵀ · scale) · value` for each head, without the score matrix in memory.
///
/// The query is `[batch, q, heads, d]`, the key `[batch, k, kv_heads, d]` and the value `[batch, k, kv_heads, v]`; the
/// result is `[batch, q, heads, v]`. `kv_heads` divides `heads`: each key head serves `heads / kv_heads` consecutive
/// query heads. With `causal`, query `i` sees key `j` iff `j ≤ i + (k - q)`, and a query without a visible key yields
/// zeros. The backward pass recomputes the scores block by block (Dao et al. 2022). Fails if shapes or dtypes do not
/// match. Without dims (`d = 0`) all scores are 0, so the result is the mean of the visible values.
///
/// Sums are of f32 at least. With bf16 inputs, processors that multiply pairs of bf16 also round the weights and the
/// gradients of the scores to bf16.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device::Cpu, Tensor};
/// let ones = Tensor::ones((1, 2, 1, 4), DType::F32, &Cpu)?;
/// let value = Tensor::new(&[[[[1f32]], [[3.]]]], &Cpu)?;
/// let y = candle_dist_kernels::flash_attn(&ones, &ones, &value, 0.5, true)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub fn flash_attn(query: &Tensor, key: &Tensor, value: &Tensor, scale: f64, causal: bool) -> Result<Tensor> {
    compute_dtype("flash_attn", query)?;
    if AttentionSizes::of(query.dims(), key.dims(), value.dims()).is_none() {
        let (q, k, v) = (query.shape(), key.shape(), value.shape());
        bail!(
            "flash_attn: query {q:?}, key {k:?}, value {v:?}: expected [b, q, h, d], [b, k, g, d], [b, k, g, v], g | h"
        );
    }
    check_dtype("flash_attn", query, key)?;
    check_dtype("flash_attn", query, value)?;
    let (queries, keys) = (query.dim(1)?, key.dim(1)?);
    flash_attn_of_blocks(
        [query, key, value],
        scale.into(),
        vec![KeyBlock { rows: 0..keys, visible: Visible::plain(queries, keys, causal) }],
        false,
    )
}

/// Attention over blocks of keys that follow each other and are all rows. The shapes fit each other.
///
/// With `log_sums` a row has one number more behind its values: the logarithm of the sum of the exponentials of its scores, -∞ without a
/// visible key. Then the result has the dtype of the computation, f32 at least.
pub fn flash_attn_of_blocks(
    [query, key, value]: [&Tensor; 3],
    scale: Scale,
    blocks: Vec<KeyBlock>,
    log_sums: bool,
) -> Result<Tensor> {
    let dtype = compute_dtype("flash_attn", query)?;
    if query.dim(D::Minus1)? == 0 {
        // All scores are 0 whatever their factor, as those of one dim of zeros.
        let zeros = |x: &Tensor| empty::zeros_of(&[x], [&x.dims()[..3], &[1]].concat(), x.dtype());
        return flash_attn_of_blocks(
            [&zeros(query)?, &zeros(key)?, value],
            Scale { factor: 1.0, ..scale },
            blocks,
            log_sums,
        );
    }
    if !query.device().is_cpu() {
        return attend_off_host([query, key, value], scale, &blocks, log_sums);
    }
    let made = attend([query, key, value], scale, blocks, log_sums)?;
    to_dtype(&made, if log_sums { dtype } else { query.dtype() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device::Cpu};

    #[test]
    fn where_there_is_nothing_the_result_is_zeros_in_the_graph_of_all_inputs() {
        let full = [2, 3, 5, 4, 2, 4, 3];
        let names = ["batch", "queries", "keys", "heads", "key heads", "", "width"];
        for (at, name) in names.into_iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let mut sizes = full;
            sizes[at] = 0;
            if sizes[3] * sizes[4] == 0 {
                (sizes[3], sizes[4]) = (0, 0);
            }
            let [batch, queries, keys, heads, kv_heads, dim, width] = sizes;
            let var = |dims: [usize; 4]| candle_core::Var::zeros(&dims, DType::F32, &Cpu).unwrap();
            let q = var([batch, queries, heads, dim]);
            let [k, v] = [dim, width].map(|width| var([batch, keys, kv_heads, width]));
            let blocks = || vec![KeyBlock { rows: 0..keys, visible: Visible::plain(queries, keys, true) }];
            let got = attend_off_host([&q, &k, &v], 0.5.into(), &blocks(), false).unwrap();
            let want = flash_attn_of_blocks([&q, &k, &v], 0.5.into(), blocks(), false).unwrap();
            assert_eq!(got.dims(), want.dims(), "no {name}");
            let elements = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(elements(&got), elements(&want), "no {name}");
            let grads = got.sum_all().unwrap().backward().unwrap();
            for var in [&q, &k, &v] {
                let grad = grads.get(var).unwrap();
                assert_eq!(
                    (grad.dims(), elements(grad)),
                    (var.dims(), vec![0.0; var.elem_count()]),
                    "no {name}"
                );
            }
        }
    }

    #[test]
    fn without_dims_the_result_is_the_mean_of_the_visible_values() -> Result<()> {
        let var = |dims: [usize; 4]| candle_core::Var::ones(&dims, DType::F64, &Cpu);
        let (q, k) = (var([2, 3, 4, 0])?, var([2, 3, 2, 0])?);
        let v = candle_core::Var::from_tensor(&Tensor::arange(0f64, 36., &Cpu)?.reshape((2, 3, 2, 3))?)?;
        for scale in [1.0, f64::INFINITY] {
            let all = flash_attn(&q, &k, &v, scale, false)?;
            let mean = v.mean_keepdim(1)?.broadcast_as((2, 3, 2, 3))?;
            for head in 0..4 {
                let error = (all.narrow(2, head, 1)? - mean.narrow(2, head / 2, 1)?)?.abs()?.max_all()?;
                assert!(error.to_scalar::<f64>()? < 1e-12, "{scale}, head {head}: {error}");
            }
            let seen =
                flash_attn(&q, &k, &v, scale, true)?.narrow(1, 1, 1)?.narrow(2, 0, 1)?.flatten_all()?;
            let want = (v.narrow(1, 0, 2)?.mean(1)?.narrow(1, 0, 1)?).flatten_all()?;
            assert_eq!(seen.to_vec1::<f64>()?, want.to_vec1::<f64>()?);
            let grads = all.sum_all()?.backward()?;
            let of_v = grads.get(&v).unwrap().flatten_all()?.to_vec1::<f64>()?;
            assert!(of_v.iter().all(|grad| (grad - 2.0).abs() < 1e-12), "{of_v:?}");
            assert_eq!(grads.get(&q).map(|grad| grad.dims()), Some(q.dims()));
        }
        Ok(())
    }

    /// Compares value and gradients with those of the host, NaN included.
    fn compare(inputs: [&Tensor; 3], (scale, log_sums): (Scale, bool), blocks: &[KeyBlock], what: &str) {
        let vars = inputs.map(|x| candle_core::Var::from_tensor(x).unwrap());
        let each = vars.each_ref().map(|var| var.as_tensor());
        let (batch, queries, heads, _) = inputs[0].dims4().unwrap();
        let width = inputs[2].dim(3).unwrap();
        let bound = 2e-15 * (50 + queries + inputs[1].dim(1).unwrap()) as f64;
        let weights = randn([batch, queries, heads, width + usize::from(log_sums)]);
        let [got, want] = [
            attend_off_host(each, scale, blocks, log_sums).unwrap(),
            flash_attn_of_blocks(each, scale, blocks.to_vec(), log_sums).unwrap(),
        ]
        .map(|out| {
            let grads = (&out * &weights).unwrap().sum_all().unwrap().backward().unwrap();
            let of_var = |var: &candle_core::Var| grads.get(var).unwrap().clone();
            [vec![out.detach()], vars.iter().map(of_var).collect()].concat()
        });
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.dims(), want.dims(), "{what}, {at}");
            let elements = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            for (got, want) in elements(got).into_iter().zip(elements(want)) {
                let is_equal = got == want || (got - want).abs() < bound || (got.is_nan() && want.is_nan());
                assert!(is_equal, "{what}, {at}: {got} instead of {want}");
            }
        }
    }

    fn randn(dims: [usize; 4]) -> Tensor {
        Tensor::randn(0f64, 1.0, &dims, &Cpu).unwrap()
    }

    #[test]
    fn the_form_off_the_host_equals_the_fused_one() {
        for (causal, [queries, keys, heads, kv_heads]) in
            [(false, [3, 5, 4, 2]), (true, [4, 4, 2, 2]), (true, [5, 3, 3, 1])]
        {
            let (q, k, v) =
                (randn([2, queries, heads, 4]), randn([2, keys, kv_heads, 4]), randn([2, keys, kv_heads, 3]));
            let visible = Visible::plain(queries, keys, causal);
            for (cap, log_sums) in [(None, false), (Some(1.5), false), (None, true), (Some(1.5), true)] {
                let blocks = vec![KeyBlock { rows: 0..keys, visible: visible.clone() }];
                let what = format!("{queries} queries, {keys} keys, cap {cap:?}, log sums {log_sums}");
                compare([&q, &k, &v], (Scale { factor: 0.7, cap }, log_sums), &blocks, &what);
            }
        }
    }

    /// Ranges of a window that ends at the query, over more keys than a tile has.
    fn window(queries: usize, keys: usize, width: usize) -> Visible {
        let end = |i: usize| i + 1 + keys - queries;
        Visible::new(vec![(0..queries).map(|i| end(i).saturating_sub(width)..end(i)).collect()])
    }

    #[test]
    fn several_tiles_of_keys_and_pieces_of_queries_give_what_the_form_off_the_host_gives() {
        let [q, k, v] = [randn([2, 520, 4, 7]), randn([2, 700, 2, 7]), randn([2, 700, 2, 19])];
        for visible in
            [Visible::plain(520, 700, true), window(520, 700, 100), Visible::plain(520, 700, false)]
        {
            let blocks = [KeyBlock { rows: 0..700, visible }];
            for cap in [None, Some(1.5)] {
                let what = format!("cap {cap:?}, {} pairs", blocks[0].visible.pairs());
                compare([&q, &k, &v], (Scale { factor: 0.7, cap }, cap.is_some()), &blocks, &what);
            }
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_other_queries() {
        for dtype in [DType::F32, DType::BF16] {
            let single = |dims| randn(dims).to_dtype(dtype).unwrap();
            let [q, k, v] = [single([1, 600, 6, 40]), single([1, 600, 2, 40]), single([1, 600, 2, 24])];
            for visible in [Visible::plain(600, 600, true), window(600, 600, 70)] {
                let whole = bits(&with_gradients([&q, &k, &v], visible.clone()));
                for threads in 1..5 {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let made = pool.install(|| with_gradients([&q, &k, &v], visible.clone()));
                    assert_eq!(bits(&made), whole, "{threads} threads, {dtype:?}");
                }
                // Some queries alone: the same rows, and the same gradients of these queries.
                for rows in [0..1, 63..65, 250..519] {
                    let some = Visible::new(vec![visible.of(0)[rows.clone()].to_vec()]);
                    let made = with_gradients([&q.narrow(1, rows.start, rows.len()).unwrap(), &k, &v], some);
                    for (made, (whole, width)) in bits(&made).iter().zip(whole.iter().zip([6 * 24, 6 * 40])) {
                        let whole = &whole[rows.start * width..rows.end * width];
                        assert_eq!(made, whole, "{rows:?}, {dtype:?}");
                    }
                }
            }
        }
    }

    fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
        all.iter().map(|x| x.iter().map(|x| x.to_bits()).collect()).collect()
    }

    /// The result and the gradients of its sum of squares, as f32.
    fn with_gradients(inputs: [&Tensor; 3], visible: Visible) -> Vec<Vec<f32>> {
        // The heads of the inputs are not behind each other.
        let turned = |x: &Tensor| x.transpose(1, 2).unwrap();
        let vars =
            inputs.map(|x| candle_core::Var::from_tensor(&turned(x).force_contiguous().unwrap()).unwrap());
        let views = vars.each_ref().map(|var| turned(var));
        let blocks = vec![KeyBlock { rows: 0..inputs[1].dim(1).unwrap(), visible }];
        let out = flash_attn_of_blocks(views.each_ref(), 0.2.into(), blocks, false).unwrap();
        let grads = out.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        let made = [vec![out.detach()], vars.iter().map(|var| turned(grads.get(var).unwrap())).collect()];
        let elements = |x: &Tensor| x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
        made.concat().iter().map(elements).collect()
    }

    /// Results of 16-bit inputs are those of the same numbers as f32, as far as a few roundings go, with views, odd sizes and rows that are
    /// not numbers.
    #[test]
    fn results_of_16_bits_are_those_of_wide_inputs() {
        for (dtype, bound) in [(DType::BF16, 1.0 / 64.0), (DType::F16, 1.0 / 512.0)] {
            for (sizes, at, nan) in [
                ([2, 1, 1, 2, 1, 3, 5], 3, 0),
                ([1, 70, 131, 4, 2, 33, 7], 5, 40),
                ([2, 65, 300, 2, 2, 64, 80], 300, 9),
            ] {
                let [batch, queries, keys, heads, kv_heads, dim, width] = sizes;
                let drawn = |dims: [usize; 4]| randn(dims).to_dtype(dtype).unwrap();
                let keys_of = |width: usize| drawn([batch, keys, kv_heads, width]);
                let inputs = [drawn([batch, queries, heads, dim]), keys_of(dim), keys_of(width)];
                for visible in [
                    Visible::plain(queries, keys, true),
                    Visible::plain(queries, keys, false),
                    window(queries, keys, at),
                    Visible::new(vec![vec![1..at.min(keys); queries]; batch]),
                ] {
                    for poisoned in [None, Some(nan)] {
                        let mut inputs = inputs.clone();
                        if let Some(row) = poisoned {
                            let bad = Tensor::full(f32::NAN, (1, 1, 1, width), &Cpu).unwrap();
                            let place = [0..1, row..row + 1, 0..1, 0..width];
                            inputs[2] =
                                inputs[2].slice_assign(&place, &bad.to_dtype(dtype).unwrap()).unwrap();
                        }
                        let wide = inputs.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
                        let [got, want] =
                            [&inputs, &wide].map(|x| with_gradients(x.each_ref(), visible.clone()));
                        for (part, (got, want)) in got.iter().zip(&want).enumerate() {
                            let norm = |x: &mut dyn Iterator<Item = f32>| {
                                x.filter(|x| !x.is_nan()).map(|x| x * x).sum::<f32>().sqrt()
                            };
                            let off = norm(&mut got.iter().zip(want).map(|(a, b)| a - b));
                            let all = norm(&mut want.iter().copied());
                            assert!(off <= bound * all, "part {part}: {off} of {all}, {sizes:?}, {dtype:?}");
                            let lost = got.iter().zip(want).position(|(a, b)| a.is_nan() != b.is_nan());
                            assert_eq!(lost, None, "part {part}, {sizes:?}, {dtype:?}, {poisoned:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn off_the_host_a_row_of_nan_reaches_only_those_that_see_it() {
        // Blocks of keys with holes, and of two elements of the batch.
        let lists = [[0..2, 1..3, 0..0, 2..3, 0..3], [0..0, 0..1, 1..2, 0..3, 1..1]].map(Vec::from);
        let one = |list: &[std::ops::Range<usize>]| Visible::new(vec![list.to_vec()]);
        let of_one = vec![
            KeyBlock { rows: 0..3, visible: one(&lists[0]) },
            KeyBlock { rows: 3..6, visible: one(&lists[1]) },
        ];
        let of_two = vec![
            KeyBlock { rows: 0..3, visible: Visible::new(lists.to_vec()) },
            KeyBlock { rows: 3..6, visible: Visible::new([&lists[1..], &lists[..1]].concat()) },
        ];
        // The block of later keys first.
        let of_both = vec![of_two[1].clone(), of_one[0].clone()];
        let inputs = [randn([2, 5, 4, 4]), randn([2, 6, 2, 4]), randn([2, 6, 2, 3])];
        for blocks in [of_one, of_two, of_both] {
            for at in 0..3 {
                for row in 0..inputs[at].dim(1).unwrap() {
                    let mut inputs = inputs.clone();
                    let x = &inputs[at];
                    let [batch, _, heads, width] = *x.dims() else { panic!() };
                    let nan = Tensor::full(f64::NAN, (1, 1, 1, width), &Cpu).unwrap();
                    let (b, h) = (row % batch, row % heads);
                    inputs[at] = x.slice_assign(&[b..b + 1, row..row + 1, h..h + 1, 0..width], &nan).unwrap();
                    for cap in [None, Some(1.5)] {
                        let what = format!("row {row} of input {at} is NaN, cap {cap:?}");
                        compare(inputs.each_ref(), (Scale { factor: 0.7, cap }, false), &blocks, &what);
                    }
                }
            }
        }
    }

    #[test]
    fn scores_of_16_bit_floats_are_wide_off_the_host() {
        let [q, k, v] = [randn([2, 3, 4, 16]), randn([2, 300, 2, 16]), randn([2, 300, 2, 3])];
        let blocks = [KeyBlock { rows: 0..300, visible: Visible::plain(3, 300, true) }];
        let half = [&q, &k, &v].map(|x| x.to_dtype(DType::BF16).unwrap());
        let got = attend_off_host(half.each_ref(), 0.25.into(), &blocks, false).unwrap();
        let wide = half.each_ref().map(|x| x.to_dtype(DType::F32).unwrap());
        let want = flash_attn_of_blocks(wide.each_ref(), 0.25.into(), blocks.to_vec(), false).unwrap();
        let diff = (got.to_dtype(DType::F32).unwrap() - want).unwrap().abs().unwrap();
        let diff = diff.max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(diff < 4e-3, "{diff}");
    }
}
