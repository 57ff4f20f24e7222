//! Passes that fail.
use super::*;

/// A node whose backward pass panics.
struct Panics;

impl CustomOp1 for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((x.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        panic!("on purpose")
    }
}

#[test]
fn a_pass_that_panics_leaves_nothing_to_later_passes() {
    on_ranks(2, "after a panic", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let (input, weight) = (values(&[4, 3], 1, DType::F64), values(&[3, 3], 2, DType::F64));
        let x = Leaf::new(&input, &mesh, &[Lay::At(Shard(0))])?;
        let w = Leaf::new(&weight, &mesh, &[Lay::At(Replicate)])?;
        let plain = plain_grads(&[&input, &weight], |v| v[0].matmul(&v[1].t()?)?.tanh());
        let run = || x.tensor.linear(&w.tensor, None)?.tanh()?.sum_all();
        let broken = run()?.to_local().apply_op1(Panics)?;
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backward(&broken))).unwrap_err();
        // At the end of candle's own pass nobody collects what several uses share.
        close(w.gradient_error(&run()?.full_tensor()?.backward()?, &plain[1])?, "candle's own pass");
        close(w.gradient_error(&run()?.backward()?, &plain[1])?, "the next pass");
        Ok(())
    });
}
