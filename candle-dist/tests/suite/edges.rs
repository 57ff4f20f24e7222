//! Nodes whose gradients do not pass through candle's `GradStore`.
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, DType, Device::Cpu, Layout, Result, Shape, Tensor, Var,
    bail,
};
use candle_dist::backend::Fresh;
use candle_dist::edges::{self, apply1, apply2, contiguous, forget_pass, keep, permute, reshape};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The product of two tensors of one shape.
struct Product;

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "product"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_l: &Layout,
        b: &CpuStorage,
        b_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (Some((a_from, a_to)), Some((b_from, b_to))) =
            (a_l.contiguous_offsets(), b_l.contiguous_offsets())
        else {
            bail!("expected contiguous tensors")
        };
        let (a, b) = (&a.as_slice::<f64>()?[a_from..a_to], &b.as_slice::<f64>()?[b_from..b_to]);
        Ok((CpuStorage::F64(a.iter().zip(b).map(|(a, b)| a * b).collect()), a_l.shape().clone()))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        assert!(grad.is_contiguous());
        Ok((Some((grad * b.detach())?), Some((grad * a.detach())?)))
    }
}

/// The exponential, whose gradient is read from the result. Fails in the backward pass while the flag is set.
struct Exp(Arc<AtomicBool>);

impl CustomOp1 for Exp {
    fn name(&self) -> &'static str {
        "exp"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((from, to)) = layout.contiguous_offsets() else { bail!("expected a contiguous tensor") };
        let x = &x.as_slice::<f64>()?[from..to];
        Ok((CpuStorage::F64(x.iter().map(|x| x.exp()).collect()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, result: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if self.0.load(Ordering::Relaxed) {
            bail!("asked to fail");
        }
        Ok(Some((grad * result)?))
    }
}

/// A copy of its input, with this backward step.
struct Same<B>(B);

impl<B: Fn(&Tensor, &Tensor) -> Result<Option<Tensor>> + Send + Sync> CustomOp1 for Same<B> {
    fn name(&self) -> &'static str {
        "same"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        (self.0)(x, grad)
    }
}

fn product(a: &Tensor, b: &Tensor) -> Tensor {
    apply2(a, b, Product).unwrap()
}

fn exp(x: &Tensor) -> Tensor {
    apply1(x, Exp(Arc::default())).unwrap()
}

fn var(values: &[f64]) -> Var {
    Var::new(values, &Cpu).unwrap()
}

/// A graph in which results are used several times, by these nodes and by candle's, and reshaped.
fn graph(x: &Tensor, y: &Tensor, is_candle: bool) -> Tensor {
    let product = |a: &Tensor, b: &Tensor| if is_candle { (a * b).unwrap() } else { product(a, b) };
    let exp = |x: &Tensor| if is_candle { x.exp().unwrap() } else { exp(x) };
    let reshape =
        |x: &Tensor, dims: &[usize]| if is_candle { x.reshape(dims) } else { reshape(x, dims) }.unwrap();
    let a = product(x, y);
    let b = exp(&(&a * 0.25).unwrap());
    let turned = reshape(&a, &[2, 2]).t().unwrap().contiguous().unwrap();
    let c = product(&reshape(&turned, &[4]), &b);
    let d = product(&reshape(&reshape(&a, &[2, 2]), &[4]), &product(&a, &a));
    let e = (product(&c, &d) + exp(&reshape(&b, &[4]))).unwrap();
    (product(&e, x).sum_all().unwrap() + b.narrow(0, 1, 2).unwrap().sum_all().unwrap()).unwrap()
}

/// Twice the input, in any strides.
struct Doubled;

impl CustomOp1 for Doubled {
    fn name(&self) -> &'static str {
        "doubled"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.affine(layout, 2.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        assert!(grad.is_contiguous());
        Ok(Some((grad * 2.0)?))
    }
}

/// Each element times a weight of its place.
fn weighed(x: &Tensor, factor: f64) -> Result<Tensor> {
    let weights = (0..x.elem_count()).map(|at| factor + at as f64);
    x * Tensor::from_iter(weights, &Cpu)?.reshape(x.shape())?
}

/// A graph of views whose dims are in another order, some of views, of copies and of reshaped ones, used by these nodes and by candle's.
fn graph_of_views(x: &Tensor, y: &Tensor, is_candle: bool) -> Result<Tensor> {
    let product = |a: &Tensor, b: &Tensor| if is_candle { a * b } else { Ok(product(a, b)) };
    let reshape = |x: &Tensor, dims: &[usize]| if is_candle { x.reshape(dims) } else { reshape(x, dims) };
    let permute = |x: &Tensor, dims: &[usize]| if is_candle { x.permute(dims) } else { permute(x, dims) };
    let contiguous = |x: &Tensor| if is_candle { x.contiguous() } else { contiguous(x) };
    let doubled = |x: &Tensor| if is_candle { x * 2.0 } else { apply1(x, Doubled) };
    let a = product(x, y)?; // [2, 3, 4]
    let turned = permute(&a, &[2, 0, 1])?; // [4, 2, 3]
    let twice = permute(&turned, &[1, 2, 0])?; // [2, 3, 4] again
    let other = permute(&turned, &[2, 1, 0])?; // [3, 2, 4]
    let flat = reshape(&turned, &[8, 3])?;
    let of_flat = contiguous(&permute(&flat, &[1, 0])?)?; // [3, 8]
    let b = product(&twice, &product(&a, x)?)?;
    let c = product(&contiguous(&other)?, &reshape(&of_flat, &[3, 2, 4])?)?;
    let d = (contiguous(&turned)?.sqr()?.sum_all()? + turned.narrow(0, 1, 2)?.sum_all()?)?;
    let e = product(&reshape(&permute(&c, &[1, 0, 2])?, &[24])?, &reshape(&b, &[24])?)?;
    // Nodes take views as they are, some several times, and each use has a gradient of its own.
    let uses = [&turned, &twice, &permute(&flat, &[1, 0])?, &turned];
    let uses = uses.into_iter().zip([1.0, 2.0, 5.0, 11.0]);
    let f = uses.map(|(x, factor)| weighed(&doubled(x)?, factor)?.sqr()?.sum_all()?.sqr());
    let by_candle = (other.exp()?.sum_all()? + turned.sqr()?.sqr()?.sum_all()?)?;
    f.fold((e.sum_all()? + d)? + by_candle, |all, f| all? + f?)
}

#[test]
fn views_in_another_order_have_the_gradients_of_candle() -> Result<()> {
    let numbers = |factor: f64| (Tensor::arange(0f64, 24., &Cpu)? * factor)?.sin()?.reshape((2, 3, 4));
    let (x, y) = (Var::from_tensor(&numbers(0.7)?)?, Var::from_tensor(&numbers(1.3)?)?);
    let want = graph_of_views(&x, &y, true)?.backward()?;
    for _ in 0..2 {
        let grads = graph_of_views(&x, &y, false)?.backward()?;
        for var in [&x, &y] {
            near(grads.get(var).unwrap(), want.get(var).unwrap());
        }
    }
    // Nothing is kept in the graph of candle for these: the only sums in it are scalars.
    let a = product(&x, &y);
    let loss = product(&contiguous(&permute(&a, &[2, 1, 0])?)?, &permute(&y, &[2, 1, 0])?.contiguous()?);
    let (nodes, loss) = (loss.sum_all()?, loss);
    let is_copy = |node: &&Tensor| node.dims() == [4, 3, 2] && node.id() != loss.id();
    // Of the view of a variable alone.
    assert_eq!(nodes.sorted_nodes().iter().filter(|node| is_copy(node)).count(), 2);
    assert!(permute(&a, &[0, 1]).is_err());
    Ok(())
}

fn near(got: &Tensor, want: &Tensor) {
    let (got, want) = (
        got.flatten_all().unwrap().to_vec1::<f64>().unwrap(),
        want.flatten_all().unwrap().to_vec1::<f64>().unwrap(),
    );
    assert_eq!(got.len(), want.len());
    assert!(
        got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-12 * b.abs().max(1.0)),
        "{got:?} for {want:?}"
    );
}

#[test]
fn gradients_are_those_of_candle_when_results_are_used_often_and_by_other_ops() {
    let (x, y) = (var(&[0.3, -0.7, 1.1, 0.2]), var(&[1.5, 0.4, -0.6, 0.9]));
    let want = graph(&x, &y, true);
    let got = graph(&x, &y, false);
    near(&got, &want);
    let (got, want) = (got.backward().unwrap(), want.backward().unwrap());
    for var in [&x, &y] {
        near(got.get(var).unwrap(), want.get(var).unwrap());
    }
    assert_eq!(got.get_ids().count(), 2, "only variables have gradients");
}

#[test]
fn a_kept_graph_gives_the_same_gradients_again_and_two_losses_may_share_one() {
    let (x, y) = (var(&[0.3, -0.7, 1.1, 0.2]), var(&[1.5, 0.4, -0.6, 0.9]));
    let shared = exp(&product(&x, &y));
    let (one, two) = (shared.sum_all().unwrap(), product(&shared, &x).sum_all().unwrap());
    let of = |loss: &Tensor, var: &Var| loss.backward().unwrap().get(var).unwrap().to_vec1::<f64>().unwrap();
    let first = [of(&one, &x), of(&two, &y)];
    assert_eq!([of(&one, &x), of(&two, &y)], first);
    let sum = product(&x, &y).exp().unwrap();
    near(
        &Tensor::new(&first[0][..], &Cpu).unwrap(),
        sum.sum_all().unwrap().backward().unwrap().get(&x).unwrap(),
    );
}

#[test]
fn a_pass_after_one_that_failed_gives_right_gradients_or_an_error() {
    let fails = Arc::new(AtomicBool::new(true));
    let x = var(&[0.5, 2.0]);
    let base = product(&x, &x);
    // The gradient of the first use is in the slot of `base` when the second use fails.
    let loss = (apply1(&base, Exp(fails.clone())).unwrap() + exp(&base)).unwrap().sum_all().unwrap();
    assert!(loss.backward().unwrap_err().to_string().contains("asked to fail"));
    fails.store(false, Ordering::Relaxed);
    let got = loss.backward().unwrap().get(&x).unwrap().clone();
    let want = (x.sqr().unwrap().exp().unwrap() * 2.0).unwrap().sum_all().unwrap().backward().unwrap();
    near(&got, want.get(&x).unwrap());

    // A node of candle's fails, which this module does not see.
    for is_told in [false, true] {
        let fails = Arc::new(AtomicBool::new(true));
        let base = product(&x, &x);
        let flag = fails.clone();
        let op = Same(move |_: &Tensor, grad: &Tensor| match flag.load(Ordering::Relaxed) {
            true => bail!("asked to fail"),
            false => Ok(Some(grad.clone())),
        });
        let loss = (base.apply_op1(op).unwrap() + exp(&base)).unwrap().sum_all().unwrap();
        assert!(loss.backward().is_err());
        fails.store(false, Ordering::Relaxed);
        if is_told {
            forget_pass();
        }
        // Either the failed pass left nothing, or the next pass says that it did; the one after it is right.
        let again = loss.backward().or_else(|error| {
            assert!(
                !is_told && error.to_string().contains("an earlier pass over the same graph failed"),
                "{error}"
            );
            loss.backward()
        });
        let want = (x.sqr().unwrap().exp().unwrap() + x.sqr().unwrap())
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .unwrap();
        near(again.unwrap().get(&x).unwrap(), want.get(&x).unwrap());
    }
}

#[test]
fn a_sum_of_gradients_does_not_change_gradients_that_others_hold() {
    // Both branches of the sum get the same gradient, and each adds others to it.
    let x = var(&[1.0, 2.0]);
    let (a, b) = (exp(&x), product(&x, &x));
    let both = |x: &Tensor| {
        candle_dist::edges::record(
            "twice",
            &[x],
            Fresh::host(CpuStorage::F64(x.to_vec1().unwrap()), x.shape()),
            |grad| Ok([Some(grad.clone()), None, None]),
        )
    };
    let loss = |a: &Tensor, b: &Tensor| {
        let uses = [a, b, a, b, a, a, b].map(|t| t.sum_all().unwrap());
        uses.into_iter().reduce(|a, b| (a + b).unwrap()).unwrap()
    };
    let got = loss(&both(&a).unwrap(), &both(&b).unwrap()).backward().unwrap();
    let want = loss(&x.exp().unwrap(), &x.sqr().unwrap()).backward().unwrap();
    near(got.get(&x).unwrap(), want.get(&x).unwrap());
}

#[test]
fn a_deep_graph_is_dropped_without_a_deep_stack() {
    let made = std::thread::Builder::new().stack_size(256 << 10).spawn(|| {
        let (x, one) = (var(&[1.0]), Tensor::new(&[1f64], &Cpu).unwrap());
        let mut y = exp(&x);
        for _ in 0..20_000 {
            y = product(&y, &one);
        }
        y.to_vec1::<f64>().unwrap()
    });
    assert_eq!(made.unwrap().join().unwrap(), [1f64.exp()]);
}

#[test]
fn graphs_without_a_backward_pass_leave_nothing_behind() {
    let x = var(&[1.0; 1024]);
    let before = Arc::new(());
    for _ in 0..5000 {
        let held = before.clone();
        let op = Same(move |_: &Tensor, _: &Tensor| bail!("no pass runs here: {held:?}"));
        let y = apply1(&x, op).unwrap();
        drop(exp(&y));
    }
    assert_eq!(Arc::strong_count(&before), 1);
}

#[test]
fn gradients_of_an_empty_result_add_up() {
    let x = var(&[]);
    let y = product(&x, &x);
    let uses = (0..4).map(|_| exp(&y).sum_all().unwrap());
    let loss = uses.reduce(|a, b| (a + b).unwrap()).unwrap();
    assert!(loss.backward().unwrap().get(&x).is_none_or(|grad| grad.dims() == [0]));
    let z = product(&y, &product(&y, &product(&y, &y)));
    assert_eq!(product(&z, &y).backward().unwrap().get(&x).unwrap().dims(), [0]);
}

/// The product of two tensors, and the square of the first one, by one node. Fails in the backward pass while the flag is set.
fn product_and_square(a: &Tensor, b: &Tensor, fails: &Arc<AtomicBool>) -> [Tensor; 2] {
    let made = [(a * b).unwrap(), a.sqr().unwrap()]
        .map(|made| Fresh::host(CpuStorage::F64(made.to_vec1().unwrap()), made.shape()));
    let (inputs, fails) = ([a, b].map(Tensor::detach), fails.clone());
    let both = edges::record_both("product and square", &[a, b], made, move |grads| {
        if fails.load(Ordering::Relaxed) {
            bail!("asked to fail");
        }
        let [a, b] = &inputs;
        let [of_product, of_square] = grads;
        let mut of_a = a.zeros_like()?;
        if let Some(grad) = of_product {
            of_a = (of_a + (grad * b)?)?;
        }
        if let Some(grad) = of_square {
            of_a = (of_a + ((grad * a)? * 2.0)?)?;
        }
        let of_b = of_product.map_or_else(|| b.zeros_like(), |grad| grad * a)?;
        Ok([Some(of_a), Some(of_b), None])
    });
    both.unwrap()
}

#[test]
fn two_results_of_a_node_get_their_gradients_together() {
    let (x, y, fails) = (var(&[0.5, -2.0]), var(&[0.3, 0.4]), Arc::new(AtomicBool::new(false)));
    let graph = |is_candle: bool, uses: [bool; 2]| {
        let base = product(&x, &y);
        let [product, square] = match is_candle {
            true => [(&base * y.as_tensor()).unwrap(), base.sqr().unwrap()],
            false => product_and_square(&base, &y, &fails),
        };
        let mut loss = exp(&base).sum_all().unwrap();
        // Each result is used by a node, by candle's ops, and again by the node of the other one.
        if uses[0] {
            loss = (loss + exp(&product).sum_all().unwrap() + product.sum_all().unwrap()).unwrap();
        }
        if uses[1] {
            loss = (loss + exp(&(&square * 0.5).unwrap()).sum_all().unwrap()).unwrap();
        }
        if uses == [true; 2] {
            loss = (loss + self::product(&product, &square).sum_all().unwrap()).unwrap();
        }
        loss
    };
    for uses in [[true, true], [true, false], [false, true], [false, false]] {
        let want = graph(true, uses).backward().unwrap();
        let loss = graph(false, uses);
        for _ in 0..2 {
            let got = loss.backward().unwrap();
            for var in [&x, &y] {
                near(got.get(var).unwrap(), want.get(var).unwrap());
            }
        }
        if uses[0] || uses[1] {
            fails.store(true, Ordering::Relaxed);
            assert!(loss.backward().unwrap_err().to_string().contains("asked to fail"));
            fails.store(false, Ordering::Relaxed);
            near(loss.backward().unwrap().get(&x).unwrap(), want.get(&x).unwrap());
        }
    }
    // Nothing is left of many of them, on a small stack.
    let made = std::thread::Builder::new().stack_size(256 << 10).spawn(|| {
        let (one, fails) = (var(&[1.0]), Arc::new(AtomicBool::new(false)));
        let mut y = one.as_tensor().clone();
        for _ in 0..5000 {
            let [product, square] = product_and_square(&y, &one, &fails);
            y = self::product(&product, &square);
        }
        drop(y);
        Arc::strong_count(&fails)
    });
    assert_eq!(made.unwrap().join().unwrap(), 1);
}

/// A node that runs a backward pass over a segment again, which has captured a tensor of the outer graph.
fn again(x: &Tensor, captured: Tensor) -> Tensor {
    let backward = move |x: &Tensor, grad: &Tensor| {
        let inner = Var::from_tensor(&x.detach())?;
        let made = exp(&(product(&inner, &captured) * 0.5)?);
        let grads = made.mul(grad)?.sum_all()?.backward()?;
        Ok(grads.get(&inner).cloned())
    };
    apply1(x, Same(backward)).unwrap()
}

#[test]
fn a_pass_inside_a_node_may_reach_tensors_of_the_outer_pass() {
    let (x, y) = (var(&[0.5, 2.0]), var(&[0.3, -0.4]));
    let captured = product(&y, &y);
    // The outer pass puts a gradient into the slot of `captured` before the inner one reaches it.
    let made = again(&product(&x, &x), captured.detach());
    let apart = (made + exp(&captured)).unwrap().sum_all().unwrap().backward().unwrap();
    for _ in 0..2 {
        let made = again(&product(&x, &x), captured.clone());
        let first = product(&made, &exp(&captured));
        let _ = first.sum_all().unwrap().backward().unwrap();
        let made = again(&product(&x, &x), captured.clone());
        let grads = (made + exp(&captured)).unwrap().sum_all().unwrap().backward().unwrap();
        for var in [&x, &y] {
            near(grads.get(var).unwrap(), apart.get(var).unwrap());
        }
    }
}

#[test]
fn passes_of_two_threads_over_one_tensor_keep_their_gradients_apart() {
    let x = var(&[0.5, 2.0]);
    let shared = exp(&product(&x, &x));
    let want = product(&shared, &shared).sum_all().unwrap().backward().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let got = product(&shared, &shared).sum_all().unwrap().backward().unwrap();
                    near(got.get(&x).unwrap(), want.get(&x).unwrap());
                }
            });
        }
    });
}

/// Like [`Product`], with gradients that the pass may keep; counts those that it kept.
struct Keeping(Arc<AtomicUsize>);

impl CustomOp2 for Keeping {
    fn name(&self) -> &'static str {
        "keeping"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_l: &Layout,
        b: &CpuStorage,
        b_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Product.cpu_fwd(a, a_l, b, b_l)
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (da, db) = (keep(a, (grad * b.detach())?)?, keep(b, (grad * a.detach())?)?);
        self.0.fetch_add([&da, &db].iter().filter(|grad| grad.is_none()).count(), Ordering::Relaxed);
        Ok((da, db))
    }
}

#[test]
fn gradients_that_a_pass_keeps_join_those_of_candle() {
    let (x, y) = (var(&[0.3, -0.7, 1.1, 0.2]), var(&[1.5, 0.4, -0.6, 0.9]));
    let kept = Arc::new(AtomicUsize::new(0));
    let loss = |product: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
        let a = product(&x, &y);
        let b = product(&product(&a, &x), &x); // `a` is no variable
        // Candle's own op uses both variables too.
        (product(&b, &y) + (x.as_tensor() * y.as_tensor()).unwrap()).unwrap().sum_all().unwrap()
    };
    let want = loss(&|a, b| (a * b).unwrap()).backward().unwrap();
    let loss = loss(&|a, b| apply2(a, b, Keeping(kept.clone())).unwrap());
    for (of, count) in [(edges::backward as fn(&Tensor) -> _, 5), (Tensor::backward, 0), (edges::backward, 5)]
    {
        kept.store(0, Ordering::Relaxed);
        let got = of(&loss).unwrap();
        for var in [&x, &y] {
            near(got.get(var).unwrap(), want.get(var).unwrap());
        }
        assert_eq!((got.get_ids().count(), kept.load(Ordering::Relaxed)), (2, count));
    }
}

/// [`edges::backward`] or candle's own.
type Pass = fn(&Tensor) -> Result<candle_core::backprop::GradStore>;

#[test]
fn a_pass_inside_a_node_keeps_its_gradients_to_itself() {
    let (x, y) = (var(&[0.5, 2.0]), var(&[0.3, -0.4]));
    let passes: [(bool, Pass); 2] = [(false, edges::backward), (true, Tensor::backward)];
    for (is_candles, (is_plain, pass)) in itertools::iproduct!([false, true], passes) {
        for is_captured in [false, true] {
            let a = apply2(&x, &y, Keeping(Arc::default())).unwrap();
            let captured = if is_captured { a.clone() } else { a.detach() };
            // The gradient of the square, in a roundabout way.
            let op = Same(move |x: &Tensor, grad: &Tensor| {
                let inner = Var::from_tensor(&x.detach())?;
                let square = apply2(&inner, &inner, Keeping(Arc::default()))?;
                let grads = pass(&((square * grad)?.sum_all()? + captured.sum_all()?)?)?;
                Ok(grads.get(&inner).cloned())
            });
            let b = if is_candles { a.apply_op1(op) } else { apply1(&a, op) }.unwrap();
            // The slot of `a` has a gradient of the outer pass before the inner one begins.
            let made =
                edges::backward(&(b + product(&a, &a.ones_like().unwrap())).unwrap().sum_all().unwrap());
            let is_mixed = is_candles && is_captured && is_plain;
            match made {
                // Only this case cannot be told apart.
                Err(error) => assert!(is_mixed && error.to_string().contains("backward pass"), "{error}"),
                Ok(grads) => {
                    assert!(!is_mixed);
                    let a = (x.as_tensor() * y.as_tensor()).unwrap();
                    let of_a = ((a * 2.0).unwrap() + 1.0).unwrap();
                    near(grads.get(&x).unwrap(), &(&of_a * y.as_tensor()).unwrap());
                    near(grads.get(&y).unwrap(), &(&of_a * x.as_tensor()).unwrap());
                }
            }
            // Nothing is left behind.
            let grads = edges::backward(&product(&x, &x).sum_all().unwrap()).unwrap();
            near(grads.get(&x).unwrap(), &(x.as_tensor() * 2.0).unwrap());
        }
    }
}

#[test]
fn a_kept_gradient_of_another_shape_or_dtype_is_an_error() {
    let x = var(&[0.5, 2.0]);
    let wrong: [fn(&Tensor) -> Result<Tensor>; 3] = [
        |grad| grad.narrow(0, 0, 1),
        |grad| grad.unsqueeze(0),
        |grad| grad.to_dtype(candle_core::DType::F32),
    ];
    for wrong in wrong {
        let op = Same(move |x: &Tensor, grad: &Tensor| keep(x, wrong(grad)?));
        let error = edges::backward(&apply1(&x, op).unwrap().sum_all().unwrap()).unwrap_err();
        assert!(error.to_string().contains("a variable f64[2] got a gradient"), "{error}");
    }
}

/// A multiple of its input on any device. Fails in the backward pass while the flag is set.
struct Multiple(f64, Arc<AtomicBool>);

impl CustomOp1 for Multiple {
    fn name(&self) -> &'static str {
        "multiple"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((x.affine(layout, self.0, 0.0)?, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((x.affine(layout, self.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if self.1.load(Ordering::Relaxed) {
            bail!("asked to fail");
        }
        (grad * self.0).map(Some)
    }
}

/// On the device of the tests, which may be a GPU: there a ticket counts its gradients by their order.
#[test]
fn results_on_any_device_receive_each_gradient_once_also_after_a_pass_that_failed() {
    let run = |ctx: &candle_dist::RankContext| -> Result<()> {
        let x = Var::from_tensor(&Tensor::new(&[0.5f32, -2.0], &Cpu)?.to_device(ctx.device())?)?;
        let (never, fails) = (Arc::<AtomicBool>::default(), Arc::new(AtomicBool::new(true)));
        let times = |x: &Tensor, by: f64| apply1(x, Multiple(by, never.clone()));
        let sum = |a: &Tensor, b: &Tensor| {
            let made = Fresh::copy_of(&(a.detach() + b.detach())?)?;
            edges::record("sum", &[a, b], made, |grad| Ok([Some(grad.clone()), Some(grad.clone()), None]))
        };
        let of = |loss: &Tensor| -> Result<Vec<f32>> {
            let grads = loss.backward()?;
            grads.get(&x).map_or_else(|| bail!("no gradient"), |grad| grad.to_device(&Cpu)?.to_vec1())
        };
        let a = times(&x, 3.0)?;
        // Both inputs are one tensor; others are used by these nodes, by candle's, reshaped, and in another dtype.
        let b = sum(&a, &a)?;
        let c = sum(&times(&reshape(&b, (2, 1))?, 5.0)?, &reshape(&times(&a, 7.0)?, (2, 1))?)?;
        let wide = a.to_dtype(DType::F64)?.to_dtype(DType::F32)?;
        let all = ((c.sum_all()? + b.sqr()?.sum_all()?)? + (wide.sum_all()? * 11.0)?)?;
        // 3 (10 + 7 + 11) + 2 · 36 x
        assert_eq!(of(&all)?, [84.0 + 36.0, 84.0 - 144.0]);
        assert_eq!(of(&all)?, [84.0 + 36.0, 84.0 - 144.0]);
        let kept = edges::backward(&all)?;
        assert_eq!(
            kept.get(&x).map(|grad| grad.to_device(&Cpu)?.to_vec1::<f32>()).transpose()?.unwrap(),
            [120.0, -60.0]
        );
        // A node of candle's fails, which this module does not see: what the pass has left in the slot of `a` is not added to
        // another pass. That may be over another graph with the same tensor.
        for is_same in [true, false] {
            fails.store(true, Ordering::Relaxed);
            let first = (a.apply_op1(Multiple(2.0, fails.clone()))? + times(&a, 13.0)?)?.sum_all()?;
            let other = times(&a, 17.0)?.sum_all()?;
            assert!(first.backward().is_err());
            fails.store(false, Ordering::Relaxed);
            let (loss, want) = if is_same { (&first, 45.0) } else { (&other, 51.0) };
            let got = of(loss).or_else(|error| {
                assert!(error.to_string().contains("an earlier pass over the same graph failed"), "{error}");
                of(loss)
            });
            assert_eq!(got?, [want; 2], "the same graph: {is_same}");
        }
        Ok(())
    };
    let run = move |ctx: &_| {
        run(ctx).unwrap();
        Ok::<_, candle_dist::Error>(())
    };
    test_utils::world(1).run(run).unwrap();
}
