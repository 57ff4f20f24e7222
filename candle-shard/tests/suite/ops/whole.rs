use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::{DType, Device::Cpu, Tensor};
use candle_shard::{DTensor, Result, Shard};
use test_utils::on_ranks;

/// An op that no rule knows: the eigenvalue of a matrix after one step of the power method.
fn power_step(x: &[Tensor]) -> candle_core::Result<Tensor> {
    // candle multiplies no matrix of any strides on a GPU.
    let a = x[0].contiguous()?;
    let y = a.matmul(&x[1].contiguous()?)?;
    (&y * a.matmul(&y.tanh()?)?)?.sum_keepdim(0)
}

#[test]
fn ops_without_a_rule_run_on_whole_tensors() {
    let shapes: [[&[usize]; 2]; 3] = [[&[4, 4], &[4, 6]], [&[5, 5], &[5, 3]], [&[1, 1], &[1, 7]]];
    let case = |[a, b]: [&'static [usize]; 2]| {
        let inputs: [Input; 2] = [(a, Float), (b, Float)];
        let distributed = move |x: &[DTensor]| {
            DTensor::on_whole("power", &[&x[0], &x[1]], (&[1, b[1]], x[0].dtype()), power_step)
        };
        Case::new("on_whole", &inputs, distributed, power_step)
    };
    sweep("on whole tensors", shapes.map(case).to_vec());
}

/// A result that has elements where a whole input has none: candle drops such an input from the graph.
#[test]
fn an_input_without_elements_gets_a_gradient() {
    on_ranks(2, "an input without elements", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let x = test_utils::distribute(&Tensor::zeros((0, 3), DType::F32, &Cpu)?, &mesh, &[Shard(1)])?;
        let (x, var) = x.to_var()?;
        let sums = |x: &[Tensor]| x[0].sum(0)? + 1.0;
        let y = DTensor::on_whole("sums", &[&x], (&[3], DType::F32), sums)?;
        assert_eq!(y.to_vec1::<f32>()?, [1.0; 3]);
        let grads = y.sum_all()?.backward()?;
        assert_eq!(grads.get(&var).map(|grad| grad.dims().to_vec()), Some(var.dims().to_vec()));
        Ok(())
    });
}
