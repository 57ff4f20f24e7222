//! Meshes from any ranks and derived meshes: correct groups, none created twice, the same errors on every rank.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, Error, ProcessGroup, RankContext, ReduceOp, Result, comm};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use test_utils::{Ranks, on_ranks};

const AXES: [(&str, usize); 3] = [("dp", 2), ("cp", 2), ("tp", 2)];

type Axes = &'static [(&'static str, usize)];

/// Runs `f` and checks that it communicates nothing.
fn silently<R>(f: impl FnOnce() -> Result<R>) -> Result<R> {
    let (result, counts) = comm::record(f);
    assert_eq!(counts.total(), 0, "{counts}");
    result
}

/// Checks a group's members and that they communicate.
fn assert_group(group: &ProcessGroup, ctx: &RankContext, want: &[usize]) -> Result<()> {
    assert_eq!(group.ranks(), want);
    assert_eq!(group.ranks()[group.rank()], ctx.rank());
    let sum = group.all_reduce(&Tensor::new(1u32 << ctx.rank(), &Device::Cpu)?, ReduceOp::Sum)?;
    assert_eq!(sum.to_scalar::<u32>()?, want.iter().map(|rank| 1u32 << rank).sum::<u32>());
    Ok(())
}

/// Returns the members of `ranks`, arranged in `shape`, that differ from `ranks[at]` only on `axes`. Tries all ranks.
fn line(ranks: &[usize], shape: &[usize], at: usize, axes: &[usize]) -> Vec<usize> {
    let digit = |place: usize, axis: usize| place / shape[axis + 1..].iter().product::<usize>() % shape[axis];
    let others: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
    let same = |place: &usize| others.iter().all(|&axis| digit(*place, axis) == digit(at, axis));
    (0..ranks.len()).filter(same).map(|place| ranks[place]).collect()
}

#[test]
fn any_ranks_in_any_order_form_a_mesh() {
    let cases: [(usize, &[usize], Axes); 9] = [
        (1, &[0], &[("a", 1)]),
        (2, &[1], &[("a", 1), ("b", 1)]),
        (3, &[2, 0], &[("a", 2)]),
        (4, &[3, 1, 2, 0], &[("a", 2), ("b", 2)]),
        (6, &[0, 1, 4, 5], &[("a", 2), ("b", 2)]),
        (6, &[5, 3, 1, 0, 2, 4], &[("a", 3), ("b", 1), ("c", 2)]),
        (7, &[6, 2, 4], &[("a", 1), ("b", 3)]),
        (8, &[0, 1, 2, 3, 4, 5, 6, 7], &[("a", 2), ("b", 2), ("c", 2)]),
        (8, &[7, 0, 6, 1, 5, 2], &[("a", 3), ("b", 2)]),
    ];
    for (world, ranks, axes) in cases {
        on_ranks(world, "from_ranks", move |ctx| -> Result<()> {
            let mesh = DeviceMesh::from_ranks(ctx.group(), ranks, axes)?;
            let place = ranks.iter().position(|&rank| rank == ctx.rank());
            assert_eq!(mesh.is_some(), place.is_some());
            let (Some(mesh), Some(place)) = (mesh, place) else { return Ok(()) };
            let shape: Vec<usize> = axes.iter().map(|(_, size)| *size).collect();
            assert_eq!((mesh.ranks(), mesh.shape(), mesh.size()), (ranks, &shape[..], ranks.len()));
            assert_eq!(mesh.coordinate(), mesh.coordinate_of(place)?);
            assert_group(mesh.group()?, ctx, ranks)?;
            for (axis, (name, size)) in axes.iter().enumerate() {
                assert_eq!(
                    (mesh.axis_index(*name)?, mesh.size_of(*name)?, mesh.size_of(axis)?),
                    (axis, *size, *size)
                );
                assert_eq!(mesh.local_rank(*name)?, mesh.coordinate()[axis]);
                assert_eq!(mesh.axis_group(*name)?.rank(), mesh.local_rank(axis)?);
                assert_group(mesh.axis_group(axis)?, ctx, &line(ranks, &shape, place, &[axis]))?;
            }
            let groups: Vec<_> = mesh.all_groups()?.iter().map(|group| group.ranks().to_vec()).collect();
            let want: Vec<_> = (0..shape.len()).map(|axis| line(ranks, &shape, place, &[axis])).collect();
            assert_eq!(groups, want);
            Ok(())
        });
    }
}

#[test]
fn every_choice_of_axes_is_a_mesh() {
    on_ranks(8, "axes", |ctx| -> Result<()> {
        let ranks = [4, 0, 7, 3, 1, 5, 2, 6];
        let mesh = DeviceMesh::from_ranks(ctx.group(), &ranks, &AXES)?.unwrap();
        let place = ranks.iter().position(|&rank| rank == ctx.rank()).unwrap();
        for choice in 1..8usize {
            let axes: Vec<usize> = (0..3).filter(|axis| choice & (1 << axis) != 0).collect();
            let names: Vec<&str> = axes.iter().map(|&axis| AXES[axis].0).collect();
            let part = silently(|| mesh.axes(&names))?;
            let want = line(&ranks, &[2, 2, 2], place, &axes);
            let at: Vec<usize> = axes.iter().map(|&axis| mesh.coordinate()[axis]).collect();
            assert_eq!((part.ranks(), part.coordinate()), (&want[..], &at[..]));
            assert_eq!(part.names(), names);
            assert_group(part.group()?, ctx, &want)?;
            for &name in &names {
                assert!(part.axis_group(name)?.is_same(mesh.axis_group(name)?));
                assert_eq!(part.axis(name)?, mesh.axis(name)?);
            }
            if let [name] = names[..] {
                assert_eq!(part, mesh.axis(name)?);
                assert!(part.group()?.is_same(mesh.axis_group(name)?));
            }
            // The selection of a selection is a selection of the whole.
            let inner = part.axes(&names[1..]).ok().filter(|_| names.len() > 1);
            assert_eq!(inner, (names.len() > 1).then(|| mesh.axes(&names[1..])).transpose()?);
        }
        assert_eq!(mesh.axes(&["dp", "cp", "tp"])?, mesh);
        Ok(())
    });
}

#[test]
fn the_same_part_asked_twice_makes_no_new_group() {
    on_ranks(8, "no group twice", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&AXES)?;
        assert!(!mesh.group()?.is_same(ctx.group()), "another thread may use that one");
        let part = mesh.axes(&["dp", "tp"])?;
        for other in [mesh.axes(&["dp", "tp"])?, mesh.clone().axes(&["dp", "tp"])?] {
            assert_eq!(other, part);
            assert!(other.group()?.is_same(part.group()?));
            assert!(other.axis_group("dp")?.is_same(part.axis_group("dp")?));
        }
        assert!(part.axis_group("tp")?.is_same(mesh.axis("tp")?.group()?));
        let flat = mesh.flatten(&["dp", "tp"], "both")?;
        assert!(flat.group()?.is_same(part.group()?) && flat.axis_group("both")?.is_same(part.group()?));
        let again = silently(|| mesh.flatten(&["dp", "tp"], "both"))?;
        assert_eq!(again, flat);
        // The same ranks in another way: all of them, or an axis of one rank together with another axis.
        assert!(mesh.flatten(&["dp", "cp", "tp"], "all")?.group()?.is_same(mesh.group()?));
        let cut = mesh.unflatten("cp", &[("cp", 2), ("one", 1)])?;
        assert!(cut.axis_group("cp")?.is_same(mesh.axis_group("cp")?));
        assert!(cut.axes(&["cp", "one"])?.group()?.is_same(mesh.axis_group("cp")?));
        silently(|| mesh.unflatten("cp", &[("cp", 2), ("one", 1)]))?;
        // Another mesh is independent.
        assert!(!ctx.mesh(&AXES)?.axis_group("dp")?.is_same(mesh.axis_group("dp")?));
        Ok(())
    });
}

#[test]
fn axes_flatten_in_order_and_come_apart_again() {
    on_ranks(8, "flatten", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&AXES)?;
        let (dp, cp, tp) = (mesh.coordinate()[0], mesh.coordinate()[1], mesh.coordinate()[2]);
        let flat = mesh.flatten(&["dp", "tp"], "dp_tp")?;
        assert_eq!(flat.to_string(), "DeviceMesh(dp_tp=4)");
        assert_eq!(flat.coordinate(), [2 * dp + tp]);
        let want = [0, 1, 4, 5].map(|rank| rank + 2 * cp);
        assert_group(flat.axis_group("dp_tp")?, ctx, &want)?;
        // The names may be used again for the same ranks.
        let back = flat.unflatten("dp_tp", &[("dp", 2), ("tp", 2)])?;
        assert_eq!(back, mesh.axes(&["dp", "tp"])?);
        assert_eq!(mesh.flatten(&["dp"], "dp")?, mesh.axis("dp")?);

        let cut = ctx.mesh(&[("dp", 4), ("tp", 2)])?.unflatten(0, &[("pod", 2), ("host", 2)])?;
        assert_eq!(cut.to_string(), "DeviceMesh(pod=2, host=2, tp=2)");
        assert_eq!(cut.coordinate(), mesh.coordinate());
        assert_group(cut.axis_group("host")?, ctx, &[4 * dp + tp, 4 * dp + 2 + tp])?;
        Ok(())
    });
}

#[test]
fn groups_that_exist_form_a_mesh() {
    on_ranks(6, "from groups", |ctx| -> Result<()> {
        let world = ctx.group();
        let line = DeviceMesh::from_group(world, "tp")?;
        assert_eq!(line, ctx.mesh(&[("tp", 6)])?);
        assert!(line.axis_group("tp")?.is_same(world), "this group was meant");
        assert!(!ctx.mesh(&[("tp", 6)])?.axis_group("tp")?.is_same(world));

        // Rows [5, 3, 1] and [0, 4, 2] from the last rank to the first, columns by position in the row.
        let rows = [[5, 3, 1], [0, 4, 2]];
        let row = rows.iter().position(|row| row.contains(&ctx.rank())).unwrap();
        let column = rows[row].iter().position(|&rank| rank == ctx.rank()).unwrap();
        let tp = world.subgroup(&rows[row])?;
        let dp = world.subgroup(&[rows[0][column], rows[1][column]])?;
        let mesh = DeviceMesh::from_groups(world, &[("dp", &dp), ("tp", &tp)])?;
        assert_eq!((mesh.ranks(), mesh.coordinate()), (&[5, 3, 1, 0, 4, 2][..], &[row, column][..]));
        assert!(mesh.axis_group("dp")?.is_same(&dp) && mesh.axis("tp")?.group()?.is_same(&tp));
        assert_group(mesh.group()?, ctx, &[5, 3, 1, 0, 4, 2])?;
        assert_eq!(Some(mesh), DeviceMesh::from_ranks(world, &[5, 3, 1, 0, 4, 2], &[("dp", 2), ("tp", 3)])?);
        Ok(())
    });
}

#[test]
fn equal_meshes_hash_and_print_alike() {
    on_ranks(4, "equality", |ctx| -> Result<()> {
        let hash = |mesh: &DeviceMesh| {
            let mut hasher = DefaultHasher::new();
            mesh.hash(&mut hasher);
            hasher.finish()
        };
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let same = DeviceMesh::from_ranks(ctx.group(), &[0, 1, 2, 3], &[("dp", 2), ("tp", 2)])?.unwrap();
        assert_eq!((&mesh, hash(&mesh)), (&same, hash(&same)));
        assert_eq!(mesh.to_string(), "DeviceMesh(dp=2, tp=2)");
        let others = [
            DeviceMesh::from_ranks(ctx.group(), &[0, 2, 1, 3], &[("dp", 2), ("tp", 2)])?.unwrap(),
            ctx.mesh(&[("tp", 2), ("dp", 2)])?,
            ctx.mesh(&[("dp", 4), ("tp", 1)])?,
            mesh.axis("dp")?,
        ];
        assert!(others.iter().all(|other| *other != mesh));
        #[allow(clippy::mutable_key_type)] // groups made lazily: neither equality nor hash reads them
        let distinct: HashSet<DeviceMesh> = others.into_iter().chain([mesh, same]).collect();
        assert_eq!(distinct.len(), 5);
        Ok(())
    });
}

#[test]
fn one_rank_needs_no_communication() {
    on_ranks(1, "alone", |ctx| -> Result<()> {
        let mesh = silently(|| {
            let mesh = ctx.mesh(&[("dp", 1), ("tp", 1)])?;
            mesh.flatten(&["dp", "tp"], "all")?.unflatten("all", &[("x", 1), ("y", 1), ("z", 1)])?;
            DeviceMesh::from_groups(ctx.group(), &[("dp", ctx.group()), ("tp", mesh.axis_group("tp")?)])?;
            DeviceMesh::from_ranks(ctx.group(), &[0], &[("tp", 1)])?;
            mesh.group()?.all_reduce(&Tensor::new(1f32, &Device::Cpu)?, ReduceOp::Sum)?;
            Ok(mesh)
        })?;
        assert_eq!((mesh.coordinate(), mesh.size()), (&[0, 0][..], 1));
        Ok(())
    });
    // Axes of size one in a larger world.
    on_ranks(2, "ones", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("pp", 1), ("dp", 2), ("tp", 1)])?;
        silently(|| {
            let x = Tensor::new(ctx.rank() as f32, &Device::Cpu)?;
            for name in ["pp", "tp"] {
                let group = mesh.axis_group(name)?;
                assert_eq!((group.size(), group.ranks()), (1, &[ctx.rank()][..]));
                assert_eq!(group.all_reduce(&x, ReduceOp::Sum)?.to_scalar::<f32>()?, ctx.rank() as f32);
            }
            mesh.axes(&["pp", "tp"])?.flatten(&["pp", "tp"], "pp_tp").map(drop)
        })
    });
}

/// Checks the texts of errors that are equal on every rank, and that the world is still usable.
fn refused<T>(
    world: usize,
    what: &'static str,
    parts: &[&str],
    f: impl Fn(&RankContext) -> Result<T> + Send + Sync + 'static,
) {
    let texts = on_ranks(world, what, move |ctx| -> Result<String> {
        let text = match f(ctx).err() {
            Some(Error::Mesh(text)) => text,
            other => panic!("{what}: {other:?}"),
        };
        ctx.group().barrier()?;
        Ok(text)
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
    for part in parts {
        assert!(texts[0].contains(part), "{what}: {:?} lacks {part:?}", texts[0]);
    }
}

#[test]
fn what_is_no_mesh_is_refused_by_name_size_and_remedy() {
    fn of(ranks: &'static [usize], axes: Axes) -> impl Fn(&RankContext) -> Result<()> {
        move |ctx| DeviceMesh::from_ranks(ctx.group(), ranks, axes).map(drop)
    }
    refused(
        3,
        "too few",
        &["(a=2, b=2) has 4 places", "3 ranks are given"],
        of(&[0, 1, 2], &[("a", 2), ("b", 2)]),
    );
    refused(3, "none", &["0 ranks", "at least one"], of(&[], &[("a", 0)]));
    refused(3, "outside", &["rank 3 in [0, 3]", "(a=2)", "0 to 2"], of(&[0, 3], &[("a", 2)]));
    refused(3, "twice", &["rank 2 occurs twice in [2, 1, 2]", "each rank once"], of(&[2, 1, 2], &[("a", 3)]));
    refused(
        3,
        "names",
        &["axis name \"a\" occurs twice in (a=1, a=3)"],
        of(&[0, 1, 2], &[("a", 1), ("a", 3)]),
    );
    refused(2, "nameless", &["an axis of (=2) has no name"], |ctx| DeviceMesh::from_group(ctx.group(), ""));
    refused(2, "no axes", &["at least one axis"], |ctx| ctx.mesh(&[]));
    refused(2, "bigger", &["(a=4, b=2) has 8 places for a group of 2 ranks"], |ctx| {
        ctx.mesh(&[("a", 4), ("b", 2)])
    });
    refused(2, "overflow", &["overflow; give the number of ranks"], |ctx| {
        ctx.mesh(&[("a", usize::MAX), ("b", 2)])
    });
}

#[test]
fn wrong_axes_of_a_mesh_are_refused_by_name_size_and_remedy() {
    fn with<T>(f: impl Fn(DeviceMesh) -> Result<T>) -> impl Fn(&RankContext) -> Result<()> {
        move |ctx| f(ctx.mesh(&AXES)?).map(drop)
    }
    let known = "the axes are \"dp\", \"cp\", \"tp\"";
    refused(8, "unknown", &["no axis \"pp\"", known], with(|m| m.axes(&["dp", "pp"])));
    refused(8, "unknown size", &["no axis \"pp\"", known], with(|m| m.size_of("pp")));
    refused(8, "unknown index", &["axis 3 of a mesh with 3 axes"], with(|m| m.axis_group(3).map(drop)));
    refused(8, "twice", &["axis \"cp\" occurs twice", "once"], with(|m| m.axes(&["cp", "cp"])));
    refused(
        8,
        "nothing",
        &["no axes of DeviceMesh(dp=2, cp=2, tp=2)", "at least one"],
        with(|m| m.axes(&[])),
    );
    refused(
        8,
        "order",
        &["[\"tp\", \"dp\"] are not in the order of DeviceMesh(dp=2, cp=2, tp=2)", "write [\"dp\", \"tp\"]"],
        with(|m| m.axes(&["tp", "dp"])),
    );
    refused(8, "flatten order", &["write [\"dp\", \"tp\"]"], with(|m| m.flatten(&["tp", "dp"], "x")));
    refused(8, "flatten nameless", &["(=4) has no name"], with(|m| m.flatten(&["dp", "tp"], "")));
    let taken = "already stands for other ranks";
    refused(8, "axis name", &["\"cp\"", taken, "choose another"], with(|m| m.flatten(&["dp", "tp"], "cp")));
    refused(8, "own name", &["\"dp\"", taken], with(|m| m.flatten(&["dp", "tp"], "dp")));
    refused(
        8,
        "root's name",
        &["\"cp\"", taken],
        with(|m| m.axes(&["dp", "tp"])?.flatten(&["dp", "tp"], "cp")),
    );
    refused(
        8,
        "taken name",
        &["\"x\"", taken],
        with(|m| {
            m.flatten(&["dp", "cp"], "x")?;
            m.flatten(&["dp", "tp"], "x")
        }),
    );
    refused(
        8,
        "unflatten size",
        &["axis \"dp\" has 2 ranks and (x=2, y=2) 4 places", "multiply to 2"],
        with(|m| m.unflatten("dp", &[("x", 2), ("y", 2)])),
    );
    refused(8, "unflatten axis", &["axis 5 of a mesh with 3"], with(|m| m.unflatten(5, &[("x", 2)])));
    refused(
        8,
        "unflatten name",
        &["\"tp\" occurs twice"],
        with(|m| m.unflatten("dp", &[("x", 2), ("tp", 1)])),
    );
    refused(
        8,
        "unflatten twice",
        &["\"x\" occurs twice"],
        with(|m| m.unflatten("dp", &[("x", 2), ("x", 1)])),
    );
    refused(8, "unflatten nothing", &["at least one axis"], with(|m| m.unflatten("dp", &[])));
}

#[test]
fn groups_that_form_no_grid_are_refused_alike() {
    refused(4, "size", &["(a=2) make 2 places for a group of 4"], |ctx| {
        let pair = ctx.group().subgroup(if ctx.rank() < 2 { &[0, 1] } else { &[2, 3] })?;
        DeviceMesh::from_groups(ctx.group(), &[("a", &pair)])
    });
    refused(4, "same place", &["ranks 0 and 2 are both at [0, 0] of (a=2, b=2)", "form a grid"], |ctx| {
        let pair = ctx.group().subgroup(if ctx.rank() < 2 { &[0, 1] } else { &[2, 3] })?;
        DeviceMesh::from_groups(ctx.group(), &[("a", &pair), ("b", &pair)])
    });
    // The places fit, but the groups of the first axis are crossed.
    refused(4, "crossed", &["axis \"a\" of (a=2, b=2): rank 0", "[0, 3]", "[0, 2]"], |ctx| {
        let rows = [[0, 1], [2, 3]];
        let tp = ctx.group().subgroup(&rows[ctx.rank() / 2])?;
        let dp = ctx.group().subgroup(if ctx.rank() % 3 == 0 { &[0, 3] } else { &[1, 2] })?;
        let mesh = DeviceMesh::from_groups(ctx.group(), &[("a", &dp), ("b", &tp)]);
        assert_eq!((dp.rank(), tp.rank()), (ctx.rank() / 2, ctx.rank() % 2));
        mesh
    });
}

/// What a rank does with a mesh.
type Doing = fn(&RankContext) -> Result<()>;

#[test]
fn a_mesh_that_one_rank_describes_differently_is_one_error_on_all_ranks() {
    let cases: [(Doing, Doing); 5] = [
        (|ctx| ctx.mesh(&[("a", 4)]).map(drop), |ctx| ctx.mesh(&[("a", 2), ("b", 2)]).map(drop)),
        // A description that is itself wrong is first reported as different.
        (|ctx| ctx.mesh(&[("a", 4)]).map(drop), |ctx| ctx.mesh(&[("a", 3)]).map(drop)),
        (
            |ctx| DeviceMesh::from_ranks(ctx.group(), &[0, 1], &[("a", 2)]).map(drop),
            |ctx| DeviceMesh::from_ranks(ctx.group(), &[1, 0], &[("a", 2)]).map(drop),
        ),
        (
            |ctx| ctx.mesh(&[("a", 2), ("b", 2)])?.flatten(&["a", "b"], "x").map(drop),
            |ctx| ctx.mesh(&[("a", 2), ("b", 2)])?.flatten(&["a", "b"], "y").map(drop),
        ),
        (
            |ctx| ctx.mesh(&[("a", 4)])?.unflatten("a", &[("x", 4), ("y", 1)]).map(drop),
            |ctx| ctx.mesh(&[("a", 4)])?.unflatten("a", &[("x", 2), ("y", 2)]).map(drop),
        ),
    ];
    for (common, different) in cases {
        for culprit in 0..4 {
            let texts = Ranks::new(4, "different meshes").run(move |ctx| -> Result<String> {
                let error = if ctx.rank() == culprit { different(ctx) } else { common(ctx) };
                match error {
                    Err(Error::Group(failure)) => Ok(failure.cause.to_string()),
                    other => panic!("{other:?}"),
                }
            });
            let texts = texts.unwrap();
            assert!(texts.iter().all(|text| *text == texts[0]), "{texts:#?}");
            assert!(texts[0].contains("description differs"), "{texts:#?}");
        }
    }
}

#[test]
fn a_name_that_some_ranks_used_otherwise_is_refused_by_all() {
    let texts = Ranks::new(4, "names").run(|ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2), ("cp", 2), ("tp", 1)])?;
        if ctx.rank() < 2 {
            mesh.axes(&["cp", "tp"])?.flatten(&["cp", "tp"], "x")?; // ranks 0 and 1 among themselves
        }
        mesh.flatten(&["dp", "cp"], "x").map(drop)
    });
    assert!(texts.unwrap_err().to_string().contains("a name in use for other ranks"));
}

#[test]
fn ranks_outside_a_mesh_have_no_coordinate() {
    on_ranks(2, "outside", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 2)])?;
        assert_eq!(mesh.coordinates().collect::<Vec<_>>(), [[0], [1]]);
        let text = mesh.coordinate_of(2).unwrap_err().to_string();
        assert!(text.ends_with("no rank 2 in DeviceMesh(dp=2); its ranks are counted from 0 to 1"), "{text}");
        Ok(())
    });
}

#[test]
fn an_axis_of_all_ranks_does_not_disturb_a_thread_that_uses_the_group_it_was_made_from() {
    on_ranks(3, "two threads", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("dp", 3)])?;
        let groups = [ctx.group(), mesh.axis_group("dp")?];
        // Different calls, which a single group would report as a mismatch.
        let sums = std::thread::scope(|scope| {
            let threads = [3usize, 5].map(|len| {
                let group = groups[usize::from(len == 5)];
                scope.spawn(move || -> Result<f32> {
                    let x = Tensor::ones(len, DType::F32, &Device::Cpu)?;
                    let mut sum = 0.0;
                    for _ in 0..200 {
                        sum += group.all_reduce(&x, ReduceOp::Sum)?.sum_all()?.to_scalar::<f32>()?;
                    }
                    Ok(sum)
                })
            });
            threads.map(|thread| thread.join().expect("no panic"))
        });
        let [first, second] = sums;
        assert_eq!((first?, second?), (1800.0, 3000.0));
        Ok(())
    });
}
