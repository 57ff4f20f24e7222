//! Layers of random models whose weights stay codes beside an adapter.
use super::model::CodeKind;
use candle_core::DType;
use candle_shard::nn::{Linear, MeshVarBuilder, QuantizedLinear};
use candle_shard::{DTensor, Result, Weights};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use test_utils::Scratch;

/// Weights of several packages, of `SHAPE`: `benchmarks/scheme_facts.py`.
const FACTS: &[u8] = include_bytes!("../../../../candle-shard/tests/suite/schemes.safetensors");
const SHAPE: [usize; 2] = [32, 128];

impl CodeKind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Fp8Blocks, Self::Fp8Rows, Self::Fp8Groups, Self::Int8, Self::Mxfp4, Self::Nvfp4];

    /// The name of its tensors, and the value of `quantization_config`.
    fn scheme(self) -> (&'static str, Value) {
        let packed = |format: &str, size: usize| {
            let weights = json!({"num_bits": 4, "type": "float", "group_size": size});
            let groups = json!({"group_0": {"weights": weights}});
            json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
        };
        match self {
            Self::Fp8Blocks => ("fp8_block", json!({"quant_method": "fp8", "weight_block_size": [16, 40]})),
            Self::Fp8Rows => ("float_channel", json!({"quant_method": "fbgemm_fp8"})),
            Self::Fp8Groups => ("mlx_mxfp8", json!({"bits": 8, "group_size": 32, "mode": "mxfp8"})),
            Self::Int8 => ("int8", json!({"quant_method": "bitsandbytes"})),
            Self::Mxfp4 => ("mxfp4_packed", packed("mxfp4-pack-quantized", 32)),
            Self::Nvfp4 => ("nvfp4_packed", packed("nvfp4-pack-quantized", 16)),
        }
    }

    /// A file with the weights of these layers, and its folder.
    fn weights(self, layers: &[String]) -> Result<(Weights, Scratch)> {
        let (case, config) = self.scheme();
        let facts = SafeTensors::deserialize(FACTS).unwrap();
        let code = |(name, view)| {
            let name: String = name;
            let own = name.strip_prefix(case)?.strip_prefix('.').filter(|name| *name != "want")?;
            Some((own.to_owned(), view))
        };
        let codes: Vec<_> = facts.tensors().into_iter().filter_map(code).collect();
        let of = |layer: &String| {
            let layer = layer.clone();
            codes
                .iter()
                .map(move |(name, view)| (format!("{layer}.{name}"), view.clone()))
                .collect::<Vec<_>>()
        };
        let folder = Scratch::new("set-up-codes");
        let path = folder.path("w.safetensors");
        safetensors::serialize_to_file(layers.iter().flat_map(of), None, &path).unwrap();
        Ok((Weights::open(&path)?.dequantize(&config)?, folder))
    }
}

/// A layer whose weight stays codes, but for the floats of a run in f64.
enum CodedLinear {
    Codes(QuantizedLinear),
    Floats(Linear),
}

impl CodedLinear {
    fn new(vb: &MeshVarBuilder) -> Result<Self> {
        let [rows, columns] = SHAPE;
        Ok(match vb.dtype() {
            DType::F64 => Self::Floats(Linear::new(columns, rows, false, vb)?),
            _ => Self::Codes(QuantizedLinear::new(columns, rows, false, vb)?),
        })
    }

    /// The output of as many copies of `x` as the input has room for.
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let x = x.repeat((1, 1, SHAPE[1] / x.dims()[2]))?;
        match self {
            Self::Codes(layer) => layer.forward(&x),
            Self::Floats(layer) => layer.forward(&x),
        }
    }
}

/// Two layers of codes, whose results are added to hidden states `[rows, tokens, width]`.
pub(super) struct CodedMlp([CodedLinear; 2]);

impl CodedMlp {
    pub(super) fn new(kind: CodeKind, vb: &MeshVarBuilder) -> Result<Self> {
        let names = ["up", "down"];
        let (weights, _folder) = kind.weights(&names.map(|name| vb.full_name(name)))?;
        let vb = vb.with_weights(weights);
        let [up, down] = names.map(|name| CodedLinear::new(&vb.pp(name)));
        Ok(Self([up?, down?]))
    }

    pub(super) fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let (rows, len, width) = x.dims3()?;
        let Self([up, down]) = self;
        let hidden = up.forward(x)?.affine(0.1, 0.0)?.gelu_erf()?;
        let made = down.forward(&hidden)?.reshape((rows, len, SHAPE[0] / width, width))?;
        x.add(&made.sum(2)?.affine(0.02, 0.0)?)
    }
}
