//! Nested containers of tensors: order, rebuilding, and arguments packed into one list.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Error, PackedArgs, TensorTree};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use test_utils::on_ranks;

/// Returns a tensor that is identified by its number.
fn t(number: u32) -> Tensor {
    Tensor::new(number, &Device::Cpu).unwrap()
}

fn numbers(tree: &impl TensorTree) -> Vec<u32> {
    tree.tensors().iter().map(|t| t.to_scalar().unwrap()).collect()
}

/// Returns the same tree with 100 added to every number.
fn raised<T: TensorTree>(tree: &T) -> T {
    tree.map_tensors(|x| x + &t(100)).unwrap()
}

#[derive(Debug, PartialEq, Clone)]
struct NoTree(&'static str);

#[derive(TensorTree)]
struct Batch {
    masks: Vec<Option<Tensor>>,
    tokens: Tensor,
    epoch: usize,
    #[tensor_tree(keep)]
    source: NoTree,
}

#[derive(TensorTree)]
struct Empty {}

#[derive(TensorTree)]
struct Unit;

/// A tuple struct with bounds, a default and a constant. The type `K` occurs only in a kept field.
#[derive(TensorTree)]
struct Pair<T: Send, K = NoTree, const N: usize = 2>(T, #[tensor_tree(keep)] K, [Option<T>; N])
where
    T: Sync;

/// An enum with all kinds of variants, whose names are those that a macro might take for itself.
#[derive(TensorTree)]
enum Cache<E, F> {
    Empty,
    Keys { f: E, e: Vec<(F, u8)> },
    Both(E, F),
    Nested(Box<Cache<E, F>>),
}

#[derive(TensorTree)]
enum Never {}

fn batch() -> Batch {
    Batch { tokens: t(3), masks: vec![Some(t(1)), None, Some(t(2))], epoch: 9, source: NoTree("disk") }
}

/// Checks order, count, map, fold, flatten and unflatten of one tree.
#[track_caller]
fn check<T: TensorTree>(tree: &T, want: &[u32]) {
    let other = |by: u32| want.iter().map(|n| n + by).collect::<Vec<_>>();
    assert_eq!(numbers(tree), want);
    assert_eq!(numbers(&raised(tree)), other(100));
    assert_eq!(tree.fold_tensors(Vec::new(), |seen, x| [seen, vec![x.id()]].concat()).len(), want.len());

    let mut seen = Vec::new();
    let same = tree.map_tensors(|x| {
        seen.push(x.to_scalar::<u32>()?);
        candle_core::Result::Ok(x.clone())
    });
    assert_eq!(seen, want, "map and visit go in one order");
    let ids = |tree: &T| tree.tensors().iter().map(|x| x.id()).collect::<Vec<_>>();
    assert_eq!(ids(&same.unwrap()), ids(tree));

    let mut flat = tree.flatten_tensors();
    assert_eq!(numbers(&flat), want);
    assert_eq!(ids(&tree.unflatten_tensors(flat.clone()).unwrap()), ids(tree));
    assert_eq!(numbers(&tree.unflatten_tensors(other(7).into_iter().map(t)).unwrap()), other(7));

    flat.push(t(0));
    for wrong in [&flat[..], &flat[..want.len().saturating_sub(1)]] {
        if wrong.len() != want.len() {
            let error = tree.unflatten_tensors(wrong.to_vec()).err().expect("a wrong count").to_string();
            let says = format!("the structure holds {} tensors, {} were given", want.len(), wrong.len());
            assert!(error.contains(&says), "{error}");
        }
    }
}

#[test]
fn every_container_in_its_order() {
    check(&t(1), &[1]);
    check(&(), &[]);
    check(&Empty {}, &[]);
    check(&None::<Tensor>, &[]);
    check(&Some(t(4)), &[4]);
    check(&Box::new((t(1), 7usize)), &[1]);
    check(&Vec::<Tensor>::new(), &[]);
    check(&vec![t(2), t(1)], &[2, 1]);
    check(&[[t(4), t(3)], [t(2), t(1)]], &[4, 3, 2, 1]);
    check(&[(); 3], &[]);
    check(&(t(1),), &[1]);
    check(&(t(1), (t(2), "name".to_string(), 1.5f32), true), &[1, 2]);
    check(&(t(1), t(2), t(3), t(4), t(5), t(6), t(7), vec![t(8), t(9)]), &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    check(&BTreeMap::from([("b", t(2)), ("a", t(1)), ("c", t(3))]), &[1, 2, 3]);
    check(&HashMap::from([(9, t(3)), (-1, t(1)), (4, t(2))]), &[1, 2, 3]);
    check(&batch(), &[1, 2, 3]);
    check(&vec![Some(batch()), None], &[1, 2, 3]);
}

#[test]
fn tuple_structs_enums_and_generics_are_trees() {
    let pair = Pair::<_, _, 3>(t(1), NoTree("kept"), [Some(t(2)), None, Some(t(3))]);
    check(&pair, &[1, 2, 3]);
    assert_eq!(raised(&pair).1, NoTree("kept"));
    check(&Unit, &[]);
    check(&None::<Never>, &[]);
    type Both = Cache<Tensor, Option<Tensor>>;
    check(&Both::Empty, &[]);
    check(&Both::Keys { f: t(4), e: vec![(Some(t(5)), 1), (None, 2)] }, &[4, 5]);
    let nested = Both::Nested(Box::new(Both::Both(t(6), Some(t(7)))));
    check(&nested, &[6, 7]);
    let Both::Nested(inner) = raised(&nested) else { panic!("another variant") };
    assert!(matches!(*inner, Both::Both(..)));
}

#[test]
fn structure_and_plain_values_survive_a_map() {
    let made = raised(&(batch(), HashMap::from([("x".to_string(), [t(5)])]), -3i64));
    assert_eq!((made.0.epoch, made.0.source, made.2), (9, NoTree("disk"), -3));
    assert_eq!(made.0.masks.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
    assert_eq!(made.0.tokens.to_scalar::<u32>().unwrap(), 103);
    assert_eq!(numbers(&made.1["x"]), [105]);
}

#[derive(Debug, PartialEq)]
struct Other(&'static str);

impl From<Error> for Other {
    fn from(_: Error) -> Self {
        Self("a structure")
    }
}

#[test]
fn a_map_stops_at_its_first_error_of_any_type() {
    let mut calls = 0;
    let result = vec![t(1), t(2), t(3)].map_tensors(|x| {
        calls += 1;
        if calls == 2 { Err(Other("the second one")) } else { Ok(x.clone()) }
    });
    assert_eq!((result.err(), calls), (Some(Other("the second one")), 2));
}

#[test]
fn hash_maps_go_by_key_on_every_rank() {
    for world in 1..=5 {
        let seen = on_ranks(world, "hash order", |_| {
            // Every map has its own hasher, so their orders differ.
            let map: HashMap<String, Tensor> = (0..40).map(|i| (format!("{i:02}"), t(i))).collect();
            Ok::<_, Error>((numbers(&map), numbers(&map.map_tensors(|x| Ok::<_, Error>(x.clone()))?)))
        });
        let want: Vec<u32> = (0..40).collect();
        assert!(seen.iter().all(|(visited, mapped)| *visited == want && *mapped == want), "{seen:?}");
    }
}

#[test]
fn casts_touch_only_floats_of_another_dtype() {
    let all = [DType::U8, DType::U32, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64];
    let x = Tensor::new(&[1.5f32, 0.0, 3.0], &Device::Cpu).unwrap();
    let tree: Vec<Tensor> = all.iter().map(|&dtype| x.to_dtype(dtype).unwrap()).collect();
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for (before, after) in tree.iter().zip(tree.cast_floats(dtype).unwrap()) {
            let kept = before.dtype().is_int() || before.dtype() == dtype;
            assert_eq!(after.id() == before.id(), kept, "{:?} to {dtype:?}", before.dtype());
            assert_eq!(after.dtype(), if before.dtype().is_int() { before.dtype() } else { dtype });
            let values = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(values(&after), values(before));
        }
    }
}

#[test]
fn casts_stay_in_the_graph() {
    let w = Var::new(&[2f32, 3.0], &Device::Cpu).unwrap();
    let (cast, kept) = (w.as_tensor().clone(), (&*w * 2.0).unwrap()).cast_floats(DType::F64).unwrap();
    let loss = (cast + kept).unwrap().sum_all().unwrap();
    assert_eq!(loss.backward().unwrap().get(&w).unwrap().to_vec1::<f32>().unwrap(), [3.0, 3.0]);
}

#[test]
fn a_tensor_on_the_device_is_returned_itself() {
    let tree = (t(1), vec![t(2)]);
    let moved = tree.to_device(&Device::Cpu).unwrap();
    assert_eq!((moved.0.id(), moved.1[0].id()), (tree.0.id(), tree.1[0].id()));
}

#[test]
fn packed_arguments_come_back_by_place_and_name() {
    let (args, states, none) = ((t(1), [t(2)]), HashMap::from([("h", t(4)), ("c", t(3))]), None::<Tensor>);
    let packed =
        PackedArgs::new(&args).unwrap().with("states", &states).unwrap().with("none", &none).unwrap();
    let packed = packed.with("mask", &t(5)).unwrap();
    check(&packed, &[1, 2, 3, 4, 5]);
    assert_eq!(packed.keys().names().collect::<Vec<_>>(), ["states", "none", "mask"]);
    assert_eq!(packed.keys().tensor_count(), packed.as_slice().len());

    let (keys, tensors) = raised(&packed).into_parts();
    let back = PackedArgs::from_parts(keys, tensors).unwrap();
    assert_eq!(numbers(&back.args::<(Tensor, [Tensor; 1])>().unwrap()), [101, 102]);
    let states = back.get::<HashMap<&str, Tensor>>("states").unwrap();
    assert_eq!((numbers(&states["c"]), numbers(&states["h"])), (vec![103], vec![104]));
    assert!(back.get::<Option<Tensor>>("none").unwrap().is_none());
    assert_eq!(numbers(&back.get::<Tensor>("mask").unwrap()), [105]);
}

#[test]
fn packed_arguments_keep_their_plain_values() {
    let args = (t(1), 0.5, vec![(t(2), "a".to_string())], batch());
    let packed =
        PackedArgs::new(&args).unwrap().with("flags", &[true, false]).unwrap().with("step", &7u64).unwrap();
    check(&packed, &[1, 2, 1, 2, 3]);
    let (keys, tensors) = raised(&packed).into_parts();
    let back = PackedArgs::from_parts(keys, tensors).unwrap();
    let (x, scale, named, batch): (Tensor, f64, Vec<(Tensor, String)>, Batch) = back.args().unwrap();
    assert_eq!(
        (numbers(&x), scale, named[0].1.as_str(), numbers(&named[0].0)),
        (vec![101], 0.5, "a", vec![102])
    );
    assert_eq!((batch.epoch, batch.source), (9, NoTree("disk")));
    assert_eq!(back.get::<[bool; 2]>("flags").unwrap(), [true, false]);
    assert_eq!(back.get::<u64>("step").unwrap(), 7);
}

#[test]
fn packing_errors_name_what_is_missing() {
    let packed =
        PackedArgs::new(&[t(1), t(2)]).unwrap().with("a", &[t(3), t(4)]).unwrap().with("b", &t(5)).unwrap();
    let (keys, tensors) = packed.clone().into_parts();
    let joined = |n: usize| {
        let list = tensors.iter().cycle().take(n).cloned().collect();
        PackedArgs::from_parts(keys.clone(), list).err().map_or("none".to_string(), |e| e.to_string())
    };
    for (given, missing) in [
        (0, "; tensor 0 of the positional arguments is missing"),
        (1, "; tensor 1 of the positional arguments is missing"),
        (2, "; argument \"a\" is missing"),
        (3, "; argument \"a\" is missing"),
        (4, "; argument \"b\" is missing"),
        (6, ""),
    ] {
        let want = format!("PackedArgs::from_parts: {given} tensors for arguments of 5{missing}");
        assert_eq!(joined(given), want);
    }
    assert_eq!(joined(5), "none");

    let says = |result: candle_dist::Result<()>| result.unwrap_err().to_string();
    let (twice, unknown) = (packed.clone().with("a", &t(0)).map(drop), packed.get::<Tensor>("c").map(drop));
    assert_eq!(says(twice), "PackedArgs::with: argument \"a\" is given twice");
    assert_eq!(says(unknown), "PackedArgs::get: no argument \"c\"; the names are [\"a\", \"b\"]");
    let (shape, args) = (packed.get::<Tensor>("a").map(drop), packed.args::<()>().map(drop));
    let want = "Packed: argument \"a\": packed as [candle_core::tensor::Tensor; 2], requested as candle_core::tensor::Tensor";
    assert_eq!(says(shape), format!("{want}; request the packed type"));
    assert!(
        says(args).contains(
            "the positional arguments: packed as [candle_core::tensor::Tensor; 2], requested as ()"
        )
    );
}

type Random = (Vec<Option<Tensor>>, BTreeMap<u8, Vec<Tensor>>, HashMap<u8, (Tensor, bool)>);

fn random_tree() -> impl Strategy<Value = Random> {
    let leaf = || any::<u32>().prop_map(t);
    (
        prop::collection::vec(prop::option::of(leaf()), 0..5),
        prop::collection::btree_map(any::<u8>(), prop::collection::vec(leaf(), 0..3), 0..4),
        prop::collection::hash_map(any::<u8>(), (leaf(), any::<bool>()), 0..4),
    )
}

proptest! {
    #[test]
    fn unflatten_undoes_flatten(tree in random_tree()) {
        let back = tree.unflatten_tensors(tree.flatten_tensors()).unwrap();
        prop_assert_eq!(format!("{:?}", back.0), format!("{:?}", tree.0));
        prop_assert_eq!(format!("{:?}", back.1), format!("{:?}", tree.1));
        let sorted = |tree: &Random| {
            let mut all: Vec<_> = tree.2.iter().map(|(k, (x, b))| (*k, x.to_scalar::<u32>().unwrap(), *b)).collect();
            all.sort_unstable();
            all
        };
        prop_assert_eq!(sorted(&back), sorted(&tree));
    }
}
