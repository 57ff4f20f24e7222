use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, MetalStorage, Result, Shape, Tensor};
use candle_dist_base::{Fresh, Ready};

/// The quotient of two tensors that broadcast, with gradients that are finite where they can be.
///
/// candle's backward step squares the divisor, which overflows in f16 from 256 on.
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let made = a.detach().broadcast_div(&b.detach())?;
    if !a.track_op() && !b.track_op() {
        return Ok(made);
    }
    let [a, b] = [a, b].map(|x| x.broadcast_as(made.shape()));
    a?.apply_op2(&b?, Quotient(Ready::new(Fresh::copy_of(&made)?)))
}

struct Quotient(Ready);

impl CustomOp2 for Quotient {
    fn name(&self) -> &'static str {
        "div"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.0.cuda()
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.0.metal()
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        made: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let of_a = (grad / b)?;
        let of_b = b.track_op().then(|| (&of_a * made.detach())?.neg()).transpose()?;
        Ok((a.track_op().then_some(of_a), of_b))
    }
}
