//! Pictures show every block once, with the ranks that hold it.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::{SUM, mesh, on_axes};
use candle_core::DType;
use candle_shard::{Replicate, Result, Shard, Spec, visualize_sharding, visualize_sharding_svg};
use std::collections::BTreeSet;
use test_utils::on_ranks;

#[test]
fn text_shows_slices_replicas_and_ranks_without_a_piece() {
    let pictures = on_ranks(6, "text", |ctx| -> Result<[String; 3]> {
        let mesh = mesh(ctx, &[3, 2])?;
        let shown = |placements, shape: &[usize]| {
            visualize_sharding(&Spec::new(&mesh, placements, shape, DType::F32)?)
        };
        Ok([
            shown(&[Shard(0), Shard(2)], &[4, 2, 6])?,
            shown(&[Replicate, Shard(0)], &[5])?,
            shown(&[Shard(1), SUM], &[2, 2])?,
        ])
    });
    let slices = "\
f32[4@a, 2, 6@b]
[0..2]
       0..3     3..6
0..2 | rank 0 | rank 1 |
[2..4]
       0..3     3..6
0..2 | rank 2 | rank 3 |
nothing on ranks 4, 5
";
    let replicas = "\
f32[5@b]
       0..3            3..5
0..1 | ranks 0, 2, 4 | ranks 1, 3, 5 |
";
    let partial = "\
f32[2, 2@a] P(sum)@b
       0..1         1..2
0..2 | ranks 0, 1 | ranks 2, 3 |
nothing on ranks 4, 5
";
    for picture in pictures {
        assert_eq!(picture, [slices, replicas, partial]);
    }
}

/// The parts of `text` between two marks.
fn between<'a>(text: &'a str, start: &'a str, end: &'a str) -> Vec<&'a str> {
    text.split(start).skip(1).map(|rest| rest.split(end).next().unwrap()).collect()
}

#[test]
fn svg_has_a_group_for_each_block_and_a_band_for_each_of_its_ranks() {
    for shape in [&[1][..], &[3], &[2, 2], &[3, 2]] {
        on_ranks(shape.iter().product(), "svg", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            for dims in [&[5][..], &[4, 6], &[1, 7], &[2, 3, 4], &[0, 3]] {
                let choices: Vec<_> = (0..dims.len()).map(Shard).chain([Replicate]).collect();
                for placements in on_axes(&choices, mesh.ndim()) {
                    let spec = Spec::new(&mesh, &placements, dims, DType::F32)?;
                    let svg = visualize_sharding_svg(&spec)?;
                    let blocks = |rank: &usize| spec.block_at(&mesh.coordinate_of(*rank).unwrap());
                    let holders: Vec<usize> = (0..mesh.size())
                        .filter(|r| blocks(r).iter().all(|range| !range.is_empty()))
                        .collect();
                    let titles = between(&svg, "<title>", "</title>");
                    let distinct: BTreeSet<String> =
                        holders.iter().map(|r| format!("{:?}", blocks(r))).collect();
                    let named: BTreeSet<String> =
                        titles.iter().map(|title| title.split(": ").next().unwrap().to_string()).collect();
                    assert_eq!((titles.len(), named), (distinct.len(), distinct), "{svg}");
                    let mut bands: Vec<usize> = between(&svg, "class=\"rank-", "\"")
                        .iter()
                        .map(|rank| rank.parse().unwrap())
                        .collect();
                    bands.sort_unstable();
                    assert_eq!(bands, holders, "{svg}");
                    for tag in ["svg", "g", "text", "title"] {
                        let opened = svg.matches(&format!("<{tag} ")).count()
                            + svg.matches(&format!("<{tag}>")).count();
                        assert_eq!(opened, svg.matches(&format!("</{tag}>")).count(), "{tag} in {svg}");
                    }
                    assert_eq!(svg.contains("nothing on"), holders.len() < mesh.size());
                    assert!(svg.contains(&format!(">{spec}</text>")) && !svg.contains("href"));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn svg_draws_blocks_to_scale_in_a_color_for_each_rank_and_escapes_names() {
    let pictures = on_ranks(2, "scale", |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("<t&p>", 2)])?;
        let spec = Spec::new(&mesh, &[Shard(1)], (4, 8), DType::F32)?.with_sizes(0, Some([2, 6].into()))?;
        visualize_sharding_svg(&spec)
    });
    let bands = |rank: usize| {
        format!(
            "<rect class=\"rank-{rank}\" x=\"{}\" y=\"56.0\" width=\"{}\" height=\"160.0\" fill=\"hsl({}, 70%, 78%)\"/>",
            ["56.0", "136.0"][rank],
            ["80.0", "240.0"][rank],
            [0, 180][rank]
        )
    };
    for rank in 0..2 {
        assert!(pictures[0].contains(&bands(rank)), "{}", pictures[0]);
    }
    assert!(pictures[0].contains("f32[4, 8@&lt;t&amp;p&gt;(2+6)]"), "{}", pictures[0]);
    // Columns begin and end at 0, 2 and 8, rows at 0 and 4.
    let edges =
        [("56.0", "50.0", "middle", 0), ("136.0", "50.0", "middle", 2), ("376.0", "50.0", "middle", 8)];
    let rows = [("50.0", "60.0", "end", 0), ("50.0", "220.0", "end", 4)];
    for (x, y, anchor, index) in edges.into_iter().chain(rows) {
        let mark = format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{index}</text>");
        assert!(pictures[0].contains(&mark), "{mark} in {}", pictures[0]);
    }
}

#[test]
fn tensors_without_dims_or_with_four_are_refused() {
    on_ranks(1, "refused", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[1])?;
        for shape in [&[][..], &[1, 2, 3, 4]] {
            let spec = Spec::new(&mesh, &[Replicate], shape, DType::F32)?;
            for error in [visualize_sharding(&spec), visualize_sharding_svg(&spec)] {
                assert!(error.unwrap_err().to_string().contains("expected 1, 2 or 3"));
            }
        }
        Ok(())
    });
}
