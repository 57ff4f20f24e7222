//! Values: what they are made of, walked, compared and listed.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Result, Tensor};
use candle_dist::TensorTree;
use candle_pipe::{Value, ValuePath};
use std::collections::BTreeMap;

fn tensor(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

fn nested() -> Value {
    let mask = BTreeMap::from([("keep", Value::from([true, false])), ("rows", tensor(&[4]).into())]);
    (tensor(&[2, 3]), (0.5,), mask, (), "a \"b\"").into()
}

#[test]
fn listing_leaves_and_paths() {
    let value = nested();
    let listing = r#"(f32[2, 3], (0.5,), {keep: [true, false], rows: f32[4]}, none, "a \"b\"")"#;
    assert_eq!(value.to_string(), listing);
    let paths: Vec<_> =
        value.leaves(&ValuePath::new("args")).into_iter().map(|(path, _)| path.to_string()).collect();
    let expected = ["[0]", "[1][0]", "[2].keep[0]", "[2].keep[1]", "[2].rows", "[3]", "[4]"];
    assert_eq!(paths, expected.map(|path| format!("args{path}")));
}

#[test]
fn accessors_say_what_is_there() {
    let value = nested();
    let error = |result: candle_pipe::Result<&Value>| result.unwrap_err().to_string();
    assert_eq!(value.at(4).unwrap().text().unwrap(), "a \"b\"");
    assert_eq!(value.at(1).unwrap().at(0).unwrap().float().unwrap(), 0.5);
    assert_eq!(error(value.at(1).unwrap().at(1)), "value: no place 1 in (0.5,), which has 1 values");
    assert_eq!(error(value.at(2).unwrap().get("mask")), "value: no \"mask\" among [keep, rows]");
    let text = "value: expected a list or tuple, got none: none";
    assert_eq!(error(value.at(3).unwrap().at(0)), text);
    assert_eq!(
        value.at(0).unwrap().bool().unwrap_err().to_string(),
        "value: expected a bool, got a tensor: f32[2, 3]"
    );
}

#[test]
fn is_a_tree_of_tensors() -> Result<()> {
    let value = nested();
    assert_eq!(value.tensors().iter().map(|t| t.dims().to_vec()).collect::<Vec<_>>(), [vec![2, 3], vec![4]]);
    let shifted = value.map_tensors(|t| t + 1.)?;
    assert_eq!(shifted.to_string(), value.to_string());
    assert_eq!(
        shifted.fold_tensors(0., |sum, t| sum + t.sum_all().unwrap().to_scalar::<f32>().unwrap()),
        10.
    );
    assert_eq!(value.cast_floats(DType::F64)?.at(0)?.tensor()?.dtype(), DType::F64);
    Ok(())
}

#[test]
fn the_same_is_the_same_bits_in_the_same_structure() -> candle_pipe::Result<()> {
    let of = |list: &[f32]| Value::from(Tensor::new(list, &Device::Cpu).unwrap());
    let ints = |list: &[i64]| Value::from(Tensor::new(list, &Device::Cpu).unwrap());
    let map = |key: &str| Value::from(BTreeMap::from([(key, 1)]));
    // ((1 << 53) + 1) is no f64.
    let large = 1 << 53;
    let table = [
        (of(&[1., f32::NAN]), of(&[1., f32::NAN]), true),
        (of(&[0.]), of(&[-0.]), false),
        (of(&[]), of(&[]), true),
        (of(&[1.]), of(&[1., 1.]), false),
        (of(&[1.]), ints(&[1]), false),
        (ints(&[large]), ints(&[large + 1]), false),
        (f64::NAN.into(), f64::NAN.into(), true),
        (1.into(), 1.0.into(), false),
        ((1, 2).into(), (1, 2).into(), true),
        ((1, 2).into(), [1, 2].into(), false),
        ([1, 2].into(), vec![1].into(), false),
        (map("a"), map("a"), true),
        (map("a"), map("b"), false),
        (().into(), None::<i64>.into(), true),
        ("a".into(), "b".to_owned().into(), false),
        (true.into(), true.into(), true),
    ];
    for (a, b, same) in &table {
        assert_eq!((a.same(b)?, b.same(a)?, a.same(a)?), (*same, *same, true), "{a} and {b}");
    }
    Ok(())
}
