//! The layers for distributed tensors: trained as on one device, with rows that are kept short in place.
use candle_core::{DType, Device, Tensor, Var};
use candle_shard::kernels::BagMode;
use candle_shard::nn::{Embedding, EmbeddingBag, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, Style};
use candle_shard::sparse::RowVar;
use candle_shard::{DTensor, EmbeddingBagOptions, EmbeddingOptions, Replicate, Result, Shard, kernels};
use test_utils::{distribute, on_ranks};

const ROWS: usize = 7;
const WIDTH: usize = 5;
const LR: f64 = 0.3;
/// Bags of ids of three steps.
const STEPS: [[[u32; 2]; 3]; 3] =
    [[[0, 6], [2, 2], [5, 1]], [[3, 0], [1, 6], [4, 4]], [[6, 6], [0, 5], [2, 1]]];

fn lookup() -> EmbeddingOptions {
    EmbeddingOptions::default().padding_idx(-1).max_norm(1.5)
}

fn modes() -> [Option<BagMode>; 4] {
    [None, Some(BagMode::Sum), Some(BagMode::Mean), Some(BagMode::Max)]
}

/// What each step makes of the rows that it finds.
fn loss(found: &Tensor) -> candle_core::Result<Tensor> {
    (found * found)?.sum_all()
}

/// Losses and the table after SGD on one device.
fn on_one_device(table: &Tensor, mode: Option<BagMode>) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let table = RowVar::new(Var::from_tensor(table)?)?;
    let mut losses = Vec::new();
    for step in STEPS {
        let ids = step.concat();
        table.renorm(&ids, 1.5, 2.0)?;
        let weight = table.var().as_tensor();
        let padding = ROWS as u32 - 1;
        let found = match mode {
            None => kernels::embedding(weight, ids, Some(padding))?,
            Some(mode) => {
                let ids: Vec<u32> =
                    ids.into_iter().map(|id| if id == padding { u32::MAX } else { id }).collect();
                kernels::embedding_bag(weight, &kernels::Bags::new(ids, [0, 2, 4, 6])?, mode, None)?
            }
        };
        let loss = loss(&found)?;
        losses.push(loss.to_scalar::<f64>()?);
        let grads = loss.backward()?;
        table.var().set(&(weight - (grads.get(weight).unwrap() * LR)?)?)?;
    }
    Ok((losses, table.var().to_vec2()?))
}

/// The layer of a mode.
enum Layer {
    Rows(Embedding),
    Bags(EmbeddingBag),
}

impl Layer {
    fn new(mode: Option<BagMode>, vb: &MeshVarBuilder) -> Result<Self> {
        Ok(match mode {
            None => Self::Rows(Embedding::with_options(ROWS, WIDTH, 1.0, lookup(), vb)?),
            Some(mode) => {
                let options = EmbeddingBagOptions::default().mode(mode).lookup(lookup());
                Self::Bags(EmbeddingBag::new(ROWS, WIDTH, 1.0, options, vb)?)
            }
        })
    }

    fn weight(&self) -> &DTensor {
        match self {
            Self::Rows(layer) => layer.weight(),
            Self::Bags(layer) => layer.weight(),
        }
    }

    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        match self {
            Self::Rows(layer) => layer.forward(ids),
            Self::Bags(layer) => layer.forward(ids, None, None),
        }
    }
}

#[test]
fn layers_train_as_on_one_device() {
    let styles: [Option<Style>; 3] =
        [None, Some(RowwiseParallel::default().into()), Some(ColwiseParallel::default().into())];
    for (mode, style, [dp, tp]) in
        itertools::iproduct!(modes(), styles, [[1, 1], [1, 2], [1, 3], [1, 5], [2, 2]])
    {
        on_ranks(dp * tp, "layers", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", dp), ("tp", tp)])?;
            let plan = match &style {
                Some(style) => Plan::new("tp").with("words", style.clone()),
                None => Plan::new("tp"),
            };
            let vb = MeshVarBuilder::fresh(3, &mesh, plan, DType::F64, ctx.device())?;
            let layer = Layer::new(mode, &vb.pp("words"))?;
            let parameters = vb.finish()?;
            let whole = layer.weight().full_tensor()?.detach();
            let whole = whole.copy()?.to_device(&Device::Cpu)?;
            assert_eq!(whole.get(ROWS - 1)?.to_vec1::<f64>()?, [0.0; WIDTH], "a fresh padding row");
            let (losses, after) = on_one_device(&whole, mode)?;
            for (step, want) in STEPS.iter().zip(losses) {
                let ids = distribute(&Tensor::new(step, &Device::Cpu)?, &mesh, &[Shard(0), Replicate])?;
                let found = layer.forward(&ids)?;
                let loss = found.mul(&found)?.sum_all()?;
                let grads = parameters.backward(&loss)?;
                let loss = loss.full_tensor()?.to_scalar::<f64>()?;
                assert!(
                    (loss - want).abs() < 1e-12 * want.max(1.0),
                    "{mode:?} {style:?}: {loss}, one device {want}"
                );
                for var in parameters.vars() {
                    var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * LR)?)?)?;
                }
            }
            let got = layer.weight().full_tensor()?.to_vec2::<f64>()?;
            let off = got
                .iter()
                .flatten()
                .zip(after.iter().flatten())
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f64::max);
            assert!(off < 1e-12, "{mode:?} {style:?} on {mesh}: the table is off by {off}");
            Ok(())
        });
    }
}
