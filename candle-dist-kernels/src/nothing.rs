//! What the forms off the host make of nothing: a result in the graph of all inputs, whose gradients are zeros. candle returns
//! the left side of an operation without elements, and forgets the right one.
use crate::{grouped_linear, layer_norm, linear, masked_softmax, rms_norm, silu_gate};
use candle_core::{DType, Device::Cpu, Result, Tensor, Var};

type Form = fn(&[&Tensor]) -> Result<Tensor>;

#[test]
fn forms_off_the_host_keep_all_inputs_where_there_is_nothing() -> Result<()> {
    let forms: [(&str, &[&[usize]], Form); 10] = [
        ("silu_gate", &[&[0, 3], &[0, 3]], |x| silu_gate::composed(x[0], x[1])),
        ("layer_norm", &[&[0, 3], &[3], &[3]], |x| layer_norm::composed(x[0], x[1], x[2], 1e-5)),
        ("rms_norm", &[&[2, 0], &[0]], |x| rms_norm::composed(x[0], x[1], 1e-5)),
        ("masked_softmax", &[&[0, 2, 3], &[2, 3]], |x| masked_softmax::composed(x[0], x[1], 1.0)),
        ("linear without rows", &[&[0, 3], &[2, 3], &[2]], |x| linear::composed(x[0], x[1], Some(x[2]))),
        ("linear without columns", &[&[4, 0], &[2, 0], &[2]], |x| linear::composed(x[0], x[1], Some(x[2]))),
        ("linear without results", &[&[4, 3], &[0, 3]], |x| linear::composed(x[0], x[1], None)),
        ("grouped_linear without groups", &[&[0, 3], &[0, 2, 3]], |x| {
            grouped_linear::composed(x[0], x[1], &[])
        }),
        ("grouped_linear without rows", &[&[0, 3], &[2, 2, 3]], |x| {
            grouped_linear::composed(x[0], x[1], &[0, 0])
        }),
        ("grouped_linear without columns", &[&[5, 0], &[2, 2, 0]], |x| {
            grouped_linear::composed(x[0], x[1], &[2, 3])
        }),
    ];
    for (name, shapes, form) in forms {
        let vars =
            shapes.iter().map(|&shape| Var::ones(shape, DType::F64, &Cpu)).collect::<Result<Vec<_>>>()?;
        let inputs: Vec<&Tensor> = vars.iter().map(|var| var.as_tensor()).collect();
        let grads = form(&inputs)?.sum_all()?.backward()?;
        for (at, var) in vars.iter().enumerate() {
            assert_eq!(grads.get(var).map(|grad| grad.dims()), Some(var.dims()), "{name}: input {at}");
        }
    }
    Ok(())
}
