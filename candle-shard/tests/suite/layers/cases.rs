//! Layers in both forms.
use super::*;

pub(super) const LINE: Conv1dConfig =
    Conv1dConfig { padding: 1, stride: 2, dilation: 1, groups: 1, cudnn_fwd_algo: None };
pub(super) const IMAGE: Conv2dConfig =
    Conv2dConfig { padding: 1, stride: 1, dilation: 1, groups: 1, cudnn_fwd_algo: None };
pub(super) const WIDER_LINE: ConvTranspose1dConfig =
    ConvTranspose1dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1, groups: 1 };
pub(super) const WIDER: ConvTranspose2dConfig =
    ConvTranspose2dConfig { padding: 1, output_padding: 1, stride: 2, dilation: 1 };

/// Lines as images of one row: the gradient of candle's `conv1d` is another.
fn lines(layer: candle_nn::Conv1d) -> candle_core::Result<There> {
    Ok(Box::new(move |x| {
        let padded = x.pad_with_zeros(2, LINE.padding, LINE.padding)?.unsqueeze(2)?;
        let y = padded.conv2d(&layer.weight().unsqueeze(2)?, 0, LINE.stride, LINE.dilation, 1)?.squeeze(2)?;
        let y = layer.bias().map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias.unsqueeze(1)?))?;
        assert!(distance(&y, &layer.forward(&x.detach())?) < 1e-9);
        Ok(y)
    }))
}

pub(super) fn depthwise() -> Conv2dConfig {
    Conv2dConfig { groups: 4, ..IMAGE }
}

pub(super) fn cases() -> Vec<Case> {
    let case = |name, shape, here, there, styles| Case { name, shape, here, there, styles };
    vec![
        case(
            "conv1d",
            &[3, 4, 7],
            |vb| boxed(nn::conv1d(4, 6, 3, LINE, vb)?),
            |vb| lines(candle_nn::conv1d(4, 6, 3, LINE, vb)?),
            ALL,
        ),
        case(
            "conv1d_no_bias",
            &[4, 4, 7],
            |vb| boxed(nn::conv1d_no_bias(4, 5, 3, LINE, vb)?),
            |vb| lines(candle_nn::conv1d_no_bias(4, 5, 3, LINE, vb)?),
            ALL,
        ),
        case(
            "conv2d",
            &[5, 4, 4, 3],
            |vb| boxed(nn::conv2d(4, 6, 3, IMAGE, vb)?),
            |vb| boxed_there(candle_nn::conv2d(4, 6, 3, IMAGE, vb)?),
            ALL,
        ),
        case(
            "conv2d_no_bias of channels alone",
            &[2, 4, 3, 3],
            |vb| boxed(nn::conv2d_no_bias(4, 4, 3, depthwise(), vb)?),
            |vb| boxed_there(candle_nn::conv2d_no_bias(4, 4, 3, depthwise(), vb)?),
            &[Cut::Whole],
        ),
        case(
            "conv_transpose1d",
            &[3, 4, 3],
            |vb| boxed(nn::conv_transpose1d(4, 6, 3, WIDER_LINE, vb)?),
            |vb| {
                // candle's has no gradient: lines are images of one row.
                let (lines, bias) =
                    (candle_nn::conv_transpose1d(4, 6, 3, WIDER_LINE, vb.clone())?, vb.get(6, "bias")?);
                let weight = vb.get((4, 6, 3), "weight")?;
                Ok(Box::new(move |x| {
                    let whole =
                        x.unsqueeze(2)?.conv_transpose2d(&weight.unsqueeze(2)?, 0, 0, 2, 1)?.squeeze(2)?;
                    let y = whole
                        .pad_with_zeros(2, 0, 1)?
                        .narrow(2, 1, 6)?
                        .broadcast_add(&bias.reshape((6, 1))?)?;
                    assert!(distance(&y, &lines.forward(&x.detach())?) < 1e-9);
                    Ok(y)
                }))
            },
            ALL,
        ),
        case(
            "conv_transpose2d",
            &[2, 4, 3, 2],
            |vb| boxed(nn::conv_transpose2d(4, 3, 3, WIDER, vb)?),
            |vb| boxed_there(candle_nn::conv_transpose2d(4, 3, 3, WIDER, vb)?),
            ALL,
        ),
        case(
            "conv_transpose2d_no_bias",
            &[1, 2, 3, 3],
            |vb| boxed(nn::conv_transpose2d_no_bias(2, 5, 3, WIDER, vb)?),
            |vb| boxed_there(candle_nn::conv_transpose2d_no_bias(2, 5, 3, WIDER, vb)?),
            ALL,
        ),
        case(
            "group_norm",
            &[3, 8, 2, 3],
            |vb| boxed(nn::group_norm(4, 8, 1e-3, vb)?),
            |vb| boxed_there(candle_nn::group_norm(4, 8, 1e-3, vb)?),
            BY_CHANNELS,
        ),
        case(
            "batch_norm in training",
            &[5, 6, 3],
            |vb| {
                let layer = nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| x.apply_t(&layer, true)))
            },
            |vb| {
                let layer = candle_nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| x.apply_t(&layer, true)))
            },
            BY_CHANNELS,
        ),
        case(
            "batch_norm of images, without mean and parameters",
            &[3, 5, 2, 2],
            |vb| {
                let config = BatchNormConfig { affine: false, remove_mean: false, ..Default::default() };
                let layer = nn::batch_norm(5, config, vb)?;
                Ok(Box::new(move |x| layer.forward_train(x)))
            },
            |vb| {
                let config = BatchNormConfig { affine: false, remove_mean: false, ..Default::default() };
                let layer = candle_nn::batch_norm(5, config, vb)?;
                Ok(Box::new(move |x| layer.forward_train(x)))
            },
            BY_CHANNELS,
        ),
        case(
            "batch_norm in evaluation",
            &[4, 6],
            |vb| {
                let layer = nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| layer.forward_t(x, false)))
            },
            |vb| {
                let layer = candle_nn::batch_norm(6, 1e-3, vb)?;
                Ok(Box::new(move |x| layer.forward_t(x, false)))
            },
            BY_CHANNELS,
        ),
        case(
            "layer_norm_no_bias",
            &[5, 6],
            |vb| boxed(nn::layer_norm_no_bias(6, 1e-3, vb)?),
            |vb| boxed_there(candle_nn::layer_norm_no_bias(6, 1e-3, vb)?),
            &[Cut::Whole],
        ),
        case(
            "dynamic tanh",
            &[3, 5, 6],
            |vb| boxed(nn::DynamicTanh::new(6, 0.5, vb)?),
            |vb| {
                let (alpha, weight, bias) = (vb.get(1, "alpha")?, vb.get(6, "weight")?, vb.get(6, "bias")?);
                Ok(Box::new(move |x| {
                    x.broadcast_mul(&alpha)?.tanh()?.broadcast_mul(&weight)?.broadcast_add(&bias)
                }))
            },
            BY_ROWS,
        ),
        case(
            "prelu of channels",
            &[3, 6, 2],
            |vb| boxed(nn::prelu(Some(6), vb)?),
            |vb| boxed_there(candle_nn::prelu(Some(6), vb)?),
            BY_CHANNELS,
        ),
        case(
            "prelu",
            &[5, 3],
            |vb| boxed(nn::prelu(None, vb)?),
            |vb| boxed_there(candle_nn::prelu(None, vb)?),
            &[Cut::Whole],
        ),
        case(
            "lstm",
            &[5, 3, 4],
            |vb| {
                let layer = nn::lstm(4, 3, LSTMConfig { layer_idx: 1, ..Default::default() }, vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            |vb| {
                let layer = candle_nn::lstm(4, 3, LSTMConfig { layer_idx: 1, ..Default::default() }, vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            BY_CHANNELS,
        ),
        case(
            "gru",
            &[3, 4, 2],
            |vb| {
                let layer = nn::gru(2, 5, GRUConfig::default(), vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            |vb| {
                let layer = candle_nn::gru(2, 5, GRUConfig::default(), vb)?;
                Ok(Box::new(move |x| layer.states_to_tensor(&layer.seq(x)?)))
            },
            BY_CHANNELS,
        ),
        case(
            "seq",
            &[3, 2, 5],
            |vb| {
                let (down, norm) =
                    (nn::conv1d(2, 4, 3, LINE, &vb.pp("0"))?, nn::group_norm(2, 4, 1e-3, &vb.pp("1"))?);
                boxed(nn::seq().add(down).add(norm).add(candle_nn::Activation::Silu).add_fn(DTensor::sqr))
            },
            |vb| {
                let down = lines(candle_nn::conv1d(2, 4, 3, LINE, vb.pp("0"))?)?;
                let norm = candle_nn::group_norm(2, 4, 1e-3, vb.pp("1"))?;
                boxed_there(
                    candle_nn::seq()
                        .add(move |x: &Tensor| down(x))
                        .add(norm)
                        .add(candle_nn::Activation::Silu)
                        .add_fn(|x| x.sqr()),
                )
            },
            &[Cut::Whole],
        ),
    ]
}
