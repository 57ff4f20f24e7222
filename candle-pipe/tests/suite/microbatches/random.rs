//! Random trees, sizes and dims against candle's `chunk`, which cuts by the same rule.
use crate::microbatches::counting;
use candle_dist::TensorTree;
use candle_pipe::microbatch::{ChunkSpec, Replicate, Splitter, TensorChunkSpec, merge_chunks};
use candle_pipe::{Kwargs, Value, ValuePath};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

/// A value and its spec.
type Pair = (Value, ChunkSpec);

/// A tensor that has the batch's rows in a dim, named from the front or the back.
fn cut(rows: usize) -> impl Strategy<Value = Pair> {
    (vec(0..4usize, 1..4), any::<prop::sample::Index>(), any::<bool>()).prop_map(
        move |(mut shape, dim, back)| {
            let (rank, dim) = (shape.len(), dim.index(shape.len()));
            shape[dim] = rows;
            let dim = if back { dim as i64 - rank as i64 } else { dim as i64 };
            (counting(&shape).into(), TensorChunkSpec(dim).into())
        },
    )
}

/// What every chunk has whole.
fn whole() -> impl Strategy<Value = Pair> {
    let value = prop_oneof![
        vec(0..4usize, 0..3).prop_map(|shape| counting(&shape).into()),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z]{0,3}".prop_map(Value::from),
        Just(Value::None),
        Just(Value::List(Vec::new())),
    ];
    value.prop_map(|value| (value, Replicate))
}

fn pair(rows: usize) -> impl Strategy<Value = Pair> {
    let covered = (1..3usize).prop_map(move |n| {
        let tensors: Vec<_> = (0..n).map(|n| counting(&[rows, n])).collect();
        ((tensors, 1).into(), TensorChunkSpec(0).into())
    });
    prop_oneof![3 => cut(rows), 2 => whole(), 1 => covered].prop_recursive(3, 12, 3, |inner| {
        let list = vec(inner.clone(), 0..4).prop_map(|pairs| pairs.into_iter().unzip());
        let map = btree_map("[a-c]", inner, 0..3).prop_map(|pairs| {
            let split = |(key, (value, spec)): (String, Pair)| ((key.clone(), value), (key, spec));
            let (values, specs) = pairs.into_iter().map(split).unzip();
            (Value::Map(values), ChunkSpec::Map(specs))
        });
        prop_oneof![
            list.clone()
                .prop_map(|(values, specs): (Vec<_>, Vec<_>)| (Value::List(values), ChunkSpec::List(specs))),
            list.prop_map(|(values, specs): (Vec<_>, Vec<_>)| (
                Value::Tuple(values),
                ChunkSpec::Tuple(specs)
            )),
            map,
        ]
    })
}

fn batch() -> impl Strategy<Value = (usize, Vec<Pair>, Vec<(String, Pair)>)> {
    (1..9usize).prop_flat_map(|rows| {
        let kwargs = btree_map("[a-z]{1,2}", pair(rows), 0..3).prop_map(|map| map.into_iter().collect());
        (Just(rows), vec(pair(rows), 0..4), kwargs)
    })
}

/// The dim of each tensor, none for one that is not cut.
fn dims(value: &Value, spec: &ChunkSpec, found: &mut Vec<Option<usize>>) {
    match (value, spec) {
        (Value::List(values) | Value::Tuple(values), ChunkSpec::List(specs) | ChunkSpec::Tuple(specs)) => {
            values.iter().zip(specs).for_each(|(value, spec)| dims(value, spec, found));
        }
        (Value::Map(values), ChunkSpec::Map(specs)) => {
            values.iter().for_each(|(key, value)| dims(value, &specs[key], found));
        }
        (value, spec) => found.extend(value.tensors().iter().map(|tensor| match spec {
            ChunkSpec::Split(split) => Some(split.0.rem_euclid(tensor.rank() as i64) as usize),
            _ => None,
        })),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn chunks_are_candles_and_come_back((rows, args, kwargs) in batch(), chunks in 1..12usize) {
        let (args, args_spec): (Vec<_>, Vec<_>) = args.into_iter().unzip();
        let (kwargs, kwargs_spec): (Kwargs, _) =
            kwargs.into_iter().map(|(key, (value, spec))| ((key.clone(), value), (key, spec))).unzip();
        let whole = Value::from((Value::List(args.clone()), Value::Map(kwargs.clone())));
        let spec = ChunkSpec::from((ChunkSpec::List(args_spec.clone()), ChunkSpec::Map(kwargs_spec)));
        let ChunkSpec::Tuple(specs) = &spec else { unreachable!() };
        let ChunkSpec::Map(kwargs_spec) = &specs[1] else { unreachable!() };
        let mut cuts = Vec::new();
        dims(&whole, &spec, &mut cuts);
        let real = if cuts.iter().any(Option::is_some) { chunks.min(rows) } else { chunks };

        for masked in [false, true] {
            let splitter = if masked { Splitter::new(chunks).masked() } else { Splitter::new(chunks) };
            let batch = splitter.split(&args, &kwargs, Some(&args_spec), Some(kwargs_spec)).unwrap();
            prop_assert_eq!((batch.len(), batch.args.len(), batch.kwargs.len()), (real, real, real));
            let values: Vec<Value> =
                batch.iter().map(|(args, kwargs)| (args.to_vec(), Value::Map(kwargs.clone())).into()).collect();
            for (chunk, value) in values.iter().enumerate() {
                prop_assert_eq!(value.leaves(&ValuePath::new("")).len(), whole.leaves(&ValuePath::new("")).len());
                let tensors = whole.tensors().into_iter().zip(value.tensors()).zip(&cuts);
                for ((all, piece), dim) in tensors {
                    let expected = match dim {
                        Some(dim) if !masked => all.chunk(real, *dim).unwrap()[chunk].clone(),
                        Some(_) => continue,
                        None => all.clone(),
                    };
                    prop_assert!(Value::from(piece).same(&expected.into()).unwrap());
                }
            }
            let joined = batch.merge(&values, Some(&spec)).unwrap();
            prop_assert!(joined.same(&whole).unwrap(), "{} from {}", joined, whole);
            if !masked {
                prop_assert!(merge_chunks(&values, Some(&spec)).unwrap().same(&whole).unwrap());
            }
        }
    }
}
