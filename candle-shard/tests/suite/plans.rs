//! Plans that do not fit the mesh or the model are refused while it is built, with one text on all ranks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::DType;
use candle_dist::{DeviceMesh, ReduceOp, comm};
use candle_shard::nn::{Embedding, FusedQkv, Heads, Init, LayerNorm, Linear, MeshVarBuilder, Width};
use candle_shard::parallel::{
    ColwiseParallel, Plan, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput,
    RowwiseParallel, SequenceParallel, Shares, Style,
};
use candle_shard::{Partial, Replicate, Result, Shard};
use test_utils::{device, on_ranks};

fn colwise() -> ColwiseParallel {
    ColwiseParallel::default()
}

fn rowwise() -> RowwiseParallel {
    RowwiseParallel::default()
}

fn sequence() -> SequenceParallel {
    SequenceParallel::default()
}

/// A model with a layer of each kind: a table that the head shares, a block, and a head.
fn build(mesh: &DeviceMesh, plan: Plan, heads: Heads) -> Result<()> {
    let vb = MeshVarBuilder::fresh(1, mesh, plan, DType::F32, &device())?;
    let table = Embedding::new(7, 6, 1.0, &vb.pp("table"))?;
    let block = vb.pp("blocks").pp(0);
    block.module_style()?;
    LayerNorm::new(6, 1e-5, &block.pp("norm"))?;
    let qkv = FusedQkv::new(6, heads, true, &block.pp("qkv"))?;
    Linear::new(qkv.width(), 6, true, &block.pp("out"))?;
    Linear::tied(table.weight(), &vb.pp("head"))?;
    vb.finish().map(drop)
}

const HEADS: Heads = Heads { query: 6, key_value: 3, dim: 2 };

/// A plan that fits the model.
fn fits(axis: &str) -> Plan {
    Plan::new(axis)
        .with("table", rowwise())
        .with("blocks.*", PrepareModuleInput::new([Replicate]))
        .with("blocks.*.norm", sequence())
        .with("blocks.*.qkv", colwise())
        .with("blocks.*.out", rowwise())
        .with("head", colwise())
}

/// The text of an error, and nothing communicated for it.
fn refused(world: usize, plan: Plan, heads: Heads) -> String {
    let texts = on_ranks(world, "refused", move |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("dp", 1), ("tp", world)])?;
        let (built, counts) = comm::record(|| build(&mesh, plan.clone(), heads));
        assert_eq!(counts.total(), 0, "{counts}");
        Ok(built.unwrap_err().to_string())
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts[0].clone()
}

#[test]
fn a_plan_that_fits_is_taken() {
    for world in 1..=4 {
        on_ranks(world, "fits", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", 1), ("tp", world)])?;
            let (built, counts) = comm::record(|| build(&mesh, fits("tp"), HEADS));
            built?;
            assert_eq!(counts.total(), 0, "{counts}");
            Ok(())
        });
    }
}

#[test]
fn shares_cut_units_by_largest_remainders() {
    for shares in [&[3, 1][..], &[1, 0, 2], &[5, 5, 5], &[1], &[7, 1, 1, 1, 1], &[u32::MAX, 1, u32::MAX]] {
        let total: f64 = shares.iter().map(|&share| f64::from(share)).sum();
        for units in [0, 1, 2, 9, 32, 1000] {
            let sizes = Shares::new(shares).unwrap().cut(Width::new(units, 8));
            assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (shares.len(), units * 8));
            for (&size, &share) in sizes.iter().zip(shares) {
                let exact = (units * 8) as f64 * f64::from(share) / total;
                assert!(
                    (size as f64 - exact).abs() < 8.0 && size % 8 == 0,
                    "{shares:?} of {units}: {sizes:?}"
                );
                assert!(share > 0 || size == 0, "{shares:?} of {units}: {sizes:?}");
            }
        }
    }
}

#[test]
fn shares_for_another_number_of_ranks() {
    for world in [1, 2, 4] {
        let shares: Shares = "3:1:1".parse().unwrap();
        let said = refused(world, fits("tp").with_shares(shares), HEADS);
        let want = format!("the shares 3:1:1 are for 3 ranks, and axis \"tp\" has {world}");
        assert!(said.contains(&want), "{said}");
    }
    for wrong in ["", "3:", "1:x", "-1:2", "0:0", "4294967296:1"] {
        assert!(wrong.parse::<Shares>().is_err(), "{wrong:?}");
    }
}

#[test]
fn an_axis_that_is_not_there() {
    let text = refused(2, fits("model"), HEADS);
    assert!(
        text.contains("no axis \"model\"") && text.contains("\"dp\"") && text.contains("\"tp\""),
        "{text}"
    );
}

#[test]
fn a_dotted_name_of_a_child_is_a_path() {
    on_ranks(2, "dotted", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let plan = Plan::new("tp").with("model.layers.*.up", colwise());
        let vb = MeshVarBuilder::fresh(1, &mesh, plan, DType::F32, &device())?;
        let up = Linear::new(4, 6, false, &vb.pp("model.layers").pp("0.up"))?;
        assert_eq!(up.weight().placements(), [Shard(0)]);
        assert_eq!(
            vb.finish()?.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(),
            ["model.layers.0.up.weight"]
        );
        Ok(())
    });
}

#[test]
fn patterns_that_match_nothing() {
    let plan = fits("tp").with("blocks.*.mlp", colwise()).with("blocks", colwise()).with("", colwise());
    assert_eq!(
        refused(2, plan, HEADS),
        "plan: \"blocks.*.mlp\", \"blocks\", \"\" on axis \"tp\" matched no module of the model; check the paths \
         against its parameter names"
    );
}

#[test]
fn styles_that_do_not_apply_to_a_layer() {
    let both = || {
        PrepareModuleInputOutput::new(
            PrepareModuleInput::new([Replicate]),
            PrepareModuleOutput::new([Replicate]),
        )
    };
    let cases: [(&str, Style, &str); 9] = [
        (
            "table",
            PrepareModuleInput::new([Replicate]).into(),
            "ColwiseParallel, RowwiseParallel or SequenceParallel",
        ),
        ("table", both().into(), "ColwiseParallel, RowwiseParallel or SequenceParallel"),
        ("blocks.0.norm", colwise().into(), "SequenceParallel"),
        ("blocks.0.norm", rowwise().into(), "SequenceParallel"),
        ("blocks.0.qkv", rowwise().into(), "ColwiseParallel"),
        ("blocks.0.qkv", both().into(), "ColwiseParallel"),
        ("blocks.0.out", sequence().into(), "ColwiseParallel or RowwiseParallel"),
        ("blocks.0", colwise().into(), "a PrepareModule style, or name its layers"),
        ("blocks.0", sequence().into(), "a PrepareModule style, or name its layers"),
    ];
    for (path, style, fix) in cases {
        let text = refused(2, fits("tp").with(path, style.clone()), HEADS);
        assert!(
            text.starts_with(&format!("plan: module {path:?} has the style {style:?}, which ")),
            "{text}"
        );
        assert!(
            text.contains("does not apply to a ") && text.ends_with(&format!("; give it {fix}")),
            "{text}"
        );
    }
}

#[test]
fn layouts_that_only_ops_make() {
    let max = Partial(ReduceOp::Max);
    let styles: [Style; 5] = [
        ColwiseParallel::default().output(max).into(),
        RowwiseParallel::default().output(max).into(),
        PrepareModuleInput::new([None, Some(max)]).into(),
        PrepareModuleOutput::new([max]).into(),
        PrepareModuleInputOutput::new(PrepareModuleInput::new([Shard(0)]), PrepareModuleOutput::new([max]))
            .into(),
    ];
    for style in styles {
        let text = refused(2, fits("tp").with("blocks.?.out", style), HEADS);
        assert!(
            text.ends_with(
                "for \"blocks.?.out\" asks for P(max), which only ops make; ask for S(dim), R or P(sum)"
            ),
            "{text}"
        );
    }
}

#[test]
fn heads_that_cannot_be_cut() {
    assert_eq!(
        refused(3, fits("tp"), Heads { query: 6, key_value: 4, dim: 2 }),
        "plan: module \"blocks.0.qkv\" has 6 query heads and 4 key heads of 2 on axis \"tp\" of 3 ranks; expected positive \
         numbers, and query heads a multiple of the key heads"
    );
    let text = refused(2, fits("tp"), Heads { dim: 0, ..HEADS });
    assert!(
        text.contains("\"blocks.0.qkv\"") && text.contains("6 query heads and 3 key heads of 0"),
        "{text}"
    );
}

#[test]
fn styles_of_a_shared_weight_that_disagree() {
    for (plan, has, want) in [
        (fits("tp").with("table", colwise()), "f32[7, 6@tp], S(1)", "S(0)"),
        (fits("tp").with("head", rowwise()), "f32[7@tp, 6], S(0)", "S(1)"),
        (Plan::new("tp").with("head", colwise()), "f32[7, 6], R", "S(0)"),
    ] {
        let text = refused(2, plan, HEADS);
        let start = format!("plan: module \"head\" shares a weight {has} on axis \"tp\", ");
        assert!(text.starts_with(&start), "{text}");
        assert!(text.ends_with(&format!("but its style expects {want}; choose styles that agree")), "{text}");
    }
}

#[test]
fn a_parameter_that_is_built_twice() {
    on_ranks(2, "twice", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &device())?;
        Linear::new(2, 2, false, &vb.pp("up"))?;
        let text = Linear::new(2, 2, false, &vb.pp("up")).unwrap_err().to_string();
        assert_eq!(
            text,
            "plan: parameter up.weight is built twice; give each layer a path of its own with vb.pp(..), or share the layer"
        );
        Ok(())
    });
}

#[test]
fn a_parameter_whose_gradient_is_partial_in_one_model_only() {
    on_ranks(2, "unlike gradients", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        for first in [false, true] {
            let vb = MeshVarBuilder::fresh(1, &mesh, Plan::new("tp"), DType::F32, &device())?;
            let get =
                |vb: &MeshVarBuilder, varying| vb.get((2, 2), "scale", Init::Const(1.0), Replicate, varying);
            get(&vb, first)?;
            get(&vb.again(), first)?;
            let text = get(&vb.again(), !first).unwrap_err().to_string();
            assert!(text.contains("the gradient of parameter scale is left partial on the axes"), "{text}");
            get(&vb.again().frozen(), !first)?;
        }
        Ok(())
    });
}
