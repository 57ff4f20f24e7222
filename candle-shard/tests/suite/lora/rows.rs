//! Rows with adapters of their own, against passes in which all rows have these.
use super::harness::{Case, WIDTH, WORDS, fill, value};
use super::quantized::{self, HEADS};
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, comm};
use candle_shard::nn::{
    ActiveAdapters, Adapter, Embedding, FusedQkv, Heads, LatentHeads, LatentProjection, Linear, LoraOptions,
    MeshVarBuilder, QuantizedEmbedding, QuantizedLinear, QuantizedQkv, RowAdapters, Width,
};
use candle_shard::parallel::{ColwiseParallel, Plan};
use candle_shard::{DTensor, Replicate, Result, Weights};
use test_utils::{Scratch, on_ranks};

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Adapters of six tokens.
const ROWS: [(usize, RowAdapters); 6] = [
    (1, RowAdapters::One(0)),
    (1, RowAdapters::Model),
    (1, RowAdapters::One(2)),
    (1, RowAdapters::One(2)),
    (1, RowAdapters::One(0)),
    (1, RowAdapters::All),
];

type Forward = Box<dyn Fn(&DTensor) -> Result<DTensor>>;

/// What a layer takes and does, and the dim of the rows in what it makes.
struct Layer(&'static str, DTensor, usize, Forward);

fn everywhere(x: &Tensor, like: &MeshVarBuilder) -> Result<DTensor> {
    DTensor::distribute(x, like.mesh(), &[Replicate])
}

fn ids() -> Tensor {
    Tensor::new(&[[3u32, 9, 0, 4, 4, 10]], &Device::Cpu).unwrap()
}

/// Layers of every kind with three adapters.
fn layers(ctx: &RankContext, case: &Case, is_frozen: bool) -> Result<Vec<Layer>> {
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let plan = case.plan().with("latent", ColwiseParallel::default());
    let vb = MeshVarBuilder::fresh(5, &mesh, plan, DType::F64, &Device::Cpu)?;
    let plain = |adapter: Adapter| adapter.with("latent", case.options.clone().bias(false).dora(false));
    let vb = vb.with_adapters(NAMES.map(|name| plain(case.adapter(name))))?;
    let vb = if is_frozen { vb.frozen() } else { vb };
    let qkv = FusedQkv::with_names(WIDTH, case.heads, 1, true, ["q", "k", "v"], &vb.pp("block"))?;
    let o = Linear::new(qkv.width(), WIDTH, false, &vb.pp("block.o"))?;
    let (up, down) =
        (Linear::new(WIDTH, 7, true, &vb.pp("up"))?, Linear::new(7, WIDTH, true, &vb.pp("down"))?);
    let (free, table) = (
        Linear::new(WIDTH, WIDTH, true, &vb.pp("free"))?,
        Embedding::new(WORDS, WIDTH, 1.0, &vb.pp("table"))?,
    );
    let head = Linear::new(WIDTH, WORDS, false, &vb.pp("head"))?;
    let latents = LatentHeads { count: 4, key: 3, value: 2 };
    let latent = LatentProjection::new(5, latents, 1, &vb.pp("latent"))?;
    fill(&vb.finish()?)?;
    let projections = qkv.clone();
    let x = everywhere(&value("x", &[1, 6, WIDTH]), &vb)?;
    let (of_latents, common) =
        (everywhere(&value("latents", &[1, 6, 5]), &vb)?, everywhere(&value("common", &[1, 1, 6, 2]), &vb)?);
    let (expanded, absorbing, valued) = (latent.clone(), latent.clone(), latent);
    let whole = |name: &str, dims: &[usize]| everywhere(&value(name, dims), &vb);
    let (query, mixed) = (whole("query", &[1, 4, 6, 3])?, whole("mixed", &[1, 6, 4, 5])?);
    let all: Vec<Layer> = vec![
        Layer("q, k and v", x.clone(), 2, Box::new(move |x| DTensor::cat(&projections.forward(x)?, 1))),
        Layer(
            "q and o",
            x.clone(),
            1,
            Box::new(move |x| {
                let [q, ..] = qkv.forward(x)?;
                o.forward(&q.transpose(1, 2)?.flatten_from(2)?)
            }),
        ),
        Layer("up and down", x.clone(), 1, Box::new(move |x| down.forward(&up.forward(x)?))),
        Layer("free", x.clone(), 1, Box::new(move |x| free.forward(x))),
        Layer("table", everywhere(&ids(), &vb)?, 1, Box::new(move |ids| table.forward(ids))),
        Layer("head", x, 1, Box::new(move |x| head.forward(x))),
        Layer("expanded", of_latents, 2, Box::new(move |x| DTensor::cat(&expanded.expand(x, &common)?, 3))),
        Layer("absorbed", query, 2, Box::new(move |x| absorbing.absorb(x))),
        Layer("values", mixed, 1, Box::new(move |x| valued.values(x))),
    ];
    Ok(all)
}

/// The same of quantized weights.
fn quantized_layers(ctx: &RankContext) -> Result<Vec<Layer>> {
    let folder = Scratch::new("rows");
    let mesh = ctx.mesh(&[("tp", ctx.world_size())])?;
    let weights = Weights::open(quantized::file(&folder))?;
    let vb = MeshVarBuilder::from_weights(weights, 3, &mesh, quantized::plan(), DType::F32, &Device::Cpu)?;
    let of = LoraOptions::new(3).alpha(5.0);
    let adapter = |name: &str| Adapter::new(name).with("*", of.clone()).with("block.*", of.clone());
    let vb = vb.with_adapters(NAMES.map(adapter))?;
    let table = QuantizedEmbedding::new(quantized::WORDS, quantized::WIDTH, &vb.pp("table"))?;
    let head = QuantizedLinear::tied(&table, &vb.pp("head"))?;
    let inner = Width::new(quantized::INNER / 32, 32);
    let qkv = QuantizedQkv::with_names(quantized::WIDTH, HEADS, 1, false, ["q", "k", "v"], &vb.pp("block"))?;
    let up = QuantizedLinear::new(quantized::WIDTH, inner, false, &vb.pp("up"))?;
    let down = QuantizedLinear::new(inner, quantized::WIDTH, false, &vb.pp("down"))?;
    fill(&vb.finish()?)?;
    let x = value("x", &[1, 6, quantized::WIDTH]).to_dtype(DType::F32)?;
    let x = everywhere(&x, &vb)?;
    Ok(vec![
        Layer("quantized qkv", x.clone(), 2, Box::new(move |x| DTensor::cat(&qkv.forward(x)?, 1))),
        Layer("quantized up and down", x.clone(), 1, Box::new(move |x| down.forward(&up.forward(x)?))),
        Layer("quantized table", everywhere(&ids(), &vb)?, 1, Box::new(move |ids| table.forward(ids))),
        Layer("quantized head", x, 1, Box::new(move |x| head.forward(x))),
    ])
}

/// Compares rows with passes in which all rows have their adapters, and the calls with those of one adapter.
fn check(layers: &[Layer], what: &str) -> Result<()> {
    for Layer(name, x, dim, forward) in layers {
        let rows = ActiveAdapters::of_rows(ROWS);
        // Magnitudes are known behind the first pass of each adapter.
        rows.run(|| forward(x))?;
        let (made, calls) = comm::record(|| rows.run(|| forward(x)));
        let made = made?.full_tensor()?.to_dtype(DType::F64)?;
        let mut parts = Vec::new();
        for (row, (_, adapters)) in ROWS.into_iter().enumerate() {
            let alike = ActiveAdapters::of_rows([(ROWS.len(), adapters)]);
            let (want, own) = comm::record(|| alike.run(|| forward(x)));
            assert_eq!(calls, own, "{what}, {name}: {adapters:?}");
            let want = want?.full_tensor()?.to_dtype(DType::F64)?.narrow(*dim, row, 1)?;
            let far = (made.narrow(*dim, row, 1)? - &want)?.abs()?.max_all()?.to_scalar::<f64>()?;
            let large = want.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(far <= 1e-5 * large.max(1e-3), "{what}, {name}: row {row} differs by {far} of {large}");
            parts.push(want.flatten_all()?.to_vec1::<f64>()?);
        }
        // A fault that leaves adapters out would be seen by nothing else.
        let none = ActiveAdapters::none().run(|| forward(x))?.full_tensor()?.to_dtype(DType::F64)?;
        for (row, (_, adapters)) in ROWS.into_iter().enumerate() {
            let none = none.narrow(*dim, row, 1)?.flatten_all()?.to_vec1::<f64>()?;
            let far = parts[row].iter().zip(&none).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert_eq!(far > 1e-6, adapters != RowAdapters::Model, "{what}, {name}: row {row}");
        }
    }
    Ok(())
}

#[test]
fn rows_have_adapters_of_their_own_and_send_as_often_as_with_one() {
    let options = LoraOptions::new(3).alpha(5.0);
    let all_heads = Heads { query: 6, key_value: 6, dim: 2 };
    let cases = [
        (Case::new(options.clone()), false),
        (Case::new(options.clone().bias(true)), false),
        (Case { by_columns: true, ..Case::new(options.clone()) }, true),
        (Case { heads: Heads { query: 4, key_value: 1, dim: 2 }, ..Case::new(options.clone()) }, true),
        (Case { heads: all_heads, ..Case::new(options.dora(true)) }, true),
    ];
    for ranks in 1..=4 {
        let cases = cases.clone();
        on_ranks(ranks, "lora rows", move |ctx| -> Result<()> {
            for (case, is_frozen) in &cases {
                check(&layers(ctx, case, *is_frozen)?, &format!("{case:?} on {ranks}"))?;
            }
            check(&quantized_layers(ctx)?, &format!("quantized on {ranks}"))
        });
    }
}

#[test]
fn rows_of_the_model_have_the_bits_that_they_have_alone() {
    for (ranks, dtype) in [(1, DType::BF16), (2, DType::BF16), (3, DType::F16)] {
        on_ranks(ranks, "rows of 16 bits", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("tp", ranks)])?;
            let plan = Plan::new("tp")
                .with("up", ColwiseParallel::default())
                .with("block", ColwiseParallel::default());
            let vb = MeshVarBuilder::fresh(5, &mesh, plan, dtype, &Device::Cpu)?;
            let of = LoraOptions::new(3).alpha(5.0);
            let adapter = |name| Adapter::new(name).with("*", of.clone()).with("block.*", of.clone());
            let vb = vb.with_adapters(["a", "b"].map(adapter))?.frozen();
            let up = Linear::new(WIDTH, 7, true, &vb.pp("up"))?;
            let heads = Heads { query: 6, key_value: 3, dim: 2 };
            let qkv = FusedQkv::with_names(WIDTH, heads, 1, true, ["q", "k", "v"], &vb.pp("block"))?;
            fill(&vb.finish()?)?;
            let x = everywhere(&value("x", &[1, 6, WIDTH]).to_dtype(dtype)?, &vb)?;
            let rows = [
                (2, RowAdapters::Model),
                (1, RowAdapters::One(0)),
                (2, RowAdapters::Model),
                (1, RowAdapters::One(1)),
            ];
            let passes: [(&str, usize, Forward); 2] = [
                ("linear", 1, Box::new(move |x| up.forward(x))),
                ("q, k and v", 2, Box::new(move |x| DTensor::cat(&qkv.forward(x)?, 1))),
            ];
            for (name, dim, forward) in passes {
                let made = ActiveAdapters::of_rows(rows).run(|| forward(&x))?.full_tensor()?;
                let alone = ActiveAdapters::none().run(|| forward(&x))?.full_tensor()?;
                for (row, is_alone) in [true, true, false, true, true, false].into_iter().enumerate() {
                    let of_row = |all: &Tensor| {
                        all.narrow(dim, row, 1)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()
                    };
                    assert_eq!(of_row(&made)? == of_row(&alone)?, is_alone, "{name}, row {row} on {ranks}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn rows_that_are_not_those_of_the_input_are_refused() {
    on_ranks(2, "lora rows refused", |ctx| -> Result<()> {
        let all = layers(ctx, &Case::new(LoraOptions::new(2)), false)?;
        for Layer(name, x, _, forward) in &all {
            let said = ActiveAdapters::of_rows([(3, RowAdapters::One(0)), (2, RowAdapters::Model)]);
            let said = said.run(|| forward(x)).unwrap_err().to_string();
            assert!(said.contains("5 rows"), "{name}: {said}");
        }
        Ok(())
    });
}

#[test]
fn gradients_of_factors_are_those_of_their_rows() {
    on_ranks(2, "lora rows learn", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let plan = || Plan::new("tp").with("up", ColwiseParallel::default().output(Replicate));
        let of = |rows: &[usize], chosen: &ActiveAdapters| -> Result<Vec<f64>> {
            let vb = MeshVarBuilder::fresh(5, &mesh, plan(), DType::F64, &Device::Cpu)?;
            let adapter = |name| Adapter::new(name).with("up", LoraOptions::new(2));
            let vb = vb.with_adapters(["a", "b"].map(adapter))?;
            let up = Linear::new(WIDTH, 7, true, &vb.pp("up"))?;
            let parameters = vb.finish()?;
            fill(&parameters)?;
            let x = value("x", &[1, 6, WIDTH]);
            let rows: Vec<Tensor> = rows.iter().map(|&row| x.narrow(1, row, 1)).collect::<Result<_, _>>()?;
            let x = everywhere(&Tensor::cat(&rows, 1)?, &vb)?;
            let loss = chosen.run(|| up.forward(&x))?.sqr()?.sum_all()?;
            let grads = parameters.backward(&loss)?;
            let a = parameters.iter().find(|parameter| parameter.name.contains("lora_A.a")).unwrap();
            Ok(a.grad(&grads)?.unwrap().full_tensor()?.flatten_all()?.to_vec1()?)
        };
        let rows = [(2, RowAdapters::One(0)), (3, RowAdapters::One(1)), (1, RowAdapters::One(0))];
        let made = of(&[0, 1, 2, 3, 4, 5], &ActiveAdapters::of_rows(rows))?;
        let want = of(&[0, 1, 5], &ActiveAdapters::of_rows([(3, RowAdapters::One(0))]))?;
        let far = made.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-9 && want.iter().any(|x| x.abs() > 1e-3), "{far}");
        Ok(())
    });
}
