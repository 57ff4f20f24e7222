use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::Tensor;
use candle_shard::DTensor;

/// An op that no rule knows: the eigenvalue of a matrix after one step of the power method.
fn power_step(x: &[Tensor]) -> candle_core::Result<Tensor> {
    let y = x[0].matmul(&x[1])?;
    (&y * x[0].matmul(&y.tanh()?)?)?.sum_keepdim(0)
}

#[test]
fn ops_without_a_rule_run_on_whole_tensors() {
    let shapes: [[&[usize]; 2]; 3] = [[&[4, 4], &[4, 6]], [&[5, 5], &[5, 3]], [&[1, 1], &[1, 7]]];
    let case = |[a, b]: [&'static [usize]; 2]| {
        let inputs: [Input; 2] = [(a, Float), (b, Float)];
        let distributed =
            move |x: &[DTensor]| DTensor::on_whole("power", &[&x[0], &x[1]], (&[1, b[1]], x[0].dtype()), power_step);
        Case::new("on_whole", &inputs, distributed, power_step)
    };
    sweep("on whole tensors", shapes.map(case).to_vec());
}
