//! Meshes: coordinates, groups along axes, equality, and errors.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{Device, Tensor};
use candle_dist::{DeviceMesh, Error, ReduceOp, Result};
use test_utils::{Ranks, on_ranks};

const SHAPES: [&[usize]; 8] = [&[1], &[5], &[2, 2], &[2, 3], &[3, 2], &[1, 4], &[2, 1, 2], &[2, 2, 2]];
const NAMES: [&str; 3] = ["pp", "dp", "tp"];

fn axes(shape: &[usize]) -> Vec<(&'static str, usize)> {
    NAMES.into_iter().zip(shape.iter().copied()).collect()
}

#[test]
fn coordinates_count_the_last_axis_fastest() {
    for shape in SHAPES {
        let ranks: usize = shape.iter().product();
        let coordinates = on_ranks(ranks, "coordinates", move |ctx| -> Result<Vec<usize>> {
            let mesh = ctx.mesh(&axes(shape))?;
            assert_eq!((mesh.ndim(), mesh.shape(), mesh.size()), (shape.len(), shape, ranks));
            assert_eq!(mesh.names(), &NAMES[..shape.len()]);
            assert_eq!(mesh.coordinate(), mesh.coordinate_of(ctx.rank())?);
            assert_eq!(mesh.group()?.rank(), ctx.rank());
            Ok(mesh.coordinate().to_vec())
        });
        for (rank, coordinate) in coordinates.iter().enumerate() {
            let place = coordinate.iter().zip(shape).fold(0, |place, (c, size)| place * size + c);
            assert!(
                place == rank && coordinate.iter().zip(shape).all(|(c, size)| c < size),
                "{shape:?} {coordinate:?}"
            );
        }
    }
}

#[test]
fn an_axis_group_holds_the_ranks_that_differ_on_that_axis_only() {
    for shape in SHAPES {
        on_ranks(shape.iter().product(), "axis groups", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&axes(shape))?;
            // Any order of first use, and a second use, return the same groups.
            for axis in (0..shape.len()).rev().chain(0..shape.len()) {
                let group = mesh.axis_group(axis)?;
                assert_eq!((group.size(), group.rank()), (shape[axis], mesh.coordinate()[axis]));
                for (at, &rank) in group.ranks().iter().enumerate() {
                    let mut place = mesh.coordinate().to_vec();
                    place[axis] = at;
                    assert_eq!(mesh.coordinate_of(rank)?, place);
                }
                let sum = group.all_reduce(&Tensor::new(ctx.rank() as i64, &Device::Cpu)?, ReduceOp::Sum)?;
                assert_eq!(sum.to_scalar::<i64>()?, group.ranks().iter().sum::<usize>() as i64);
                let line = mesh.axis(NAMES[axis])?;
                assert_eq!(
                    (line.ndim(), line.shape(), line.coordinate()),
                    (1, &[shape[axis]][..], &[group.rank()][..])
                );
                assert_eq!(line.ranks(), group.ranks());
            }
            Ok(())
        });
    }
}

#[test]
fn meshes_are_equal_if_they_arrange_the_same_ranks_alike() {
    on_ranks(4, "equality", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("a", 2), ("b", 2)])?;
        assert_eq!(mesh, mesh.clone());
        assert_eq!(mesh, ctx.mesh(&[("a", 2), ("b", 2)])?);
        assert_ne!(mesh, ctx.mesh(&[("a", 2), ("c", 2)])?);
        assert_ne!(mesh, ctx.mesh(&[("a", 4)])?);
        assert_ne!(mesh, ctx.mesh(&[("a", 1), ("b", 4)])?);
        let turned = DeviceMesh::new(&ctx.group().subgroup(&[3, 2, 1, 0])?, &[("a", 2), ("b", 2)])?;
        assert_ne!(mesh, turned);
        assert_eq!(turned.coordinate_of(0)?, [0, 0]);
        assert_eq!(turned.coordinate(), mesh.coordinate_of(3 - ctx.rank())?);
        assert_eq!(mesh.to_string(), "DeviceMesh(a=2, b=2)");
        assert_eq!(format!("{mesh:?}"), format!("DeviceMesh(a=2, b=2) at {:?}", mesh.coordinate()));
        Ok(())
    });
}

#[test]
fn what_is_no_mesh_is_refused_alike_everywhere() {
    let texts = on_ranks(4, "refused", |ctx| -> Result<Vec<String>> {
        let refused = |axes: &[(&str, usize)]| match ctx.mesh(axes).unwrap_err() {
            Error::Mesh(text) => text,
            other => panic!("{other}"),
        };
        let mesh = ctx.mesh(&[("a", 2), ("b", 2)])?;
        let texts = vec![
            refused(&[]),
            refused(&[("a", 2), ("a", 2)]),
            refused(&[("a", 2), ("", 2)]),
            refused(&[("a", 2), ("b", 3)]),
            refused(&[("a", 0)]),
            mesh.axis_group(2).unwrap_err().to_string(),
            mesh.axis_index("c").unwrap_err().to_string(),
            mesh.axis("c").unwrap_err().to_string(),
        ];
        ctx.group().barrier()?;
        Ok(texts)
    });
    assert!(texts.iter().all(|t| t == &texts[0]));
    let parts = [
        "at least one axis",
        "axis name \"a\" occurs twice in (a=2, a=2)",
        "an axis of (a=2, =2) has no name",
        "(a=2, b=3) has 6 places for a group of 4 ranks",
        "(a=0) has 0 places",
        "axis 2 of a mesh with 2 axes",
        "no axis \"c\"; the axes are \"a\", \"b\"",
        "no axis \"c\"",
    ];
    for (text, part) in texts[0].iter().zip(parts) {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
}

#[test]
fn a_mesh_that_one_rank_describes_differently_is_an_error_on_every_rank() {
    for (mine, others) in [
        (vec![("a", 2), ("b", 2)], vec![("a", 4), ("b", 1)]),
        (vec![("a", 2), ("b", 2)], vec![("b", 2), ("a", 2)]),
        (vec![("a", 4)], vec![("z", 4)]),
    ] {
        for culprit in 0..4 {
            let (mine, others) = (mine.clone(), others.clone());
            let texts = Ranks::new(4, "disagree").run(move |ctx| -> Result<String> {
                let axes = if ctx.rank() == culprit { &mine } else { &others };
                Ok(ctx.mesh(axes).unwrap_err().to_string())
            });
            let texts = texts.unwrap();
            let first_line = |text: &String| text.lines().next().unwrap().to_string();
            assert!(texts.iter().all(|t| first_line(t) == first_line(&texts[0])), "{texts:#?}");
            assert!(
                texts.iter().all(|t| t.contains("description differs") && t.contains("DeviceMesh(")),
                "{texts:#?}"
            );
        }
    }
}
