//! Measured costs of nodes.
use super::LocalPipe;
use crate::{Error, Kwargs, Result, Value};
use candle_dist::TensorTree;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The measurements of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeProfile {
    /// The node's full name.
    pub node: String,
    /// The time of its forward pass, in seconds.
    pub seconds: f64,
    /// Its outputs as dtypes and shapes.
    pub outputs: Vec<String>,
    /// The bytes of its outputs, which are sent to other stages if the model is cut behind the node.
    pub bytes: usize,
}

impl LocalPipe {
    /// Measures each node in evaluation mode, the minimum of `runs` runs, in the order in which nodes run.
    ///
    /// [`BalancedCost`](crate::BalancedCost) accepts the seconds as costs.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_pipe::{BalancedCost, In, Kwargs, LocalPipe, PipeBuilder, SplitSpec};
    ///
    /// let mut g = PipeBuilder::<()>::new();
    /// let x = g.input("x", In::Arg);
    /// let y = g.func("square", |xs, _| Ok(xs[0].tensor()?.sqr()?.into()), [x]);
    /// let z = g.func("add", |xs, _| Ok((xs[0].tensor()? + 1.0)?.into()), [y]);
    /// g.output("z", z);
    /// let local = LocalPipe::new(&g.finish(SplitSpec::declared())?, &(), &Device::Cpu)?;
    ///
    /// let x = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
    /// let profile = local.profile(&[x.into()], &Kwargs::new(), 3)?;
    /// assert_eq!((profile[0].node.as_str(), profile[0].bytes, profile[0].outputs[0].as_str()), ("square", 8, "f32[2]"));
    /// let policy = BalancedCost::new(2, profile.into_iter().map(|node| (node.node, node.seconds)));
    /// # let _ = policy;
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Pipe`] if `runs` is 0; those of [`forward`](Self::forward).
    pub fn profile(&self, args: &[Value], kwargs: &Kwargs, runs: usize) -> Result<Vec<NodeProfile>> {
        if runs == 0 {
            return Err(Error::Pipe("a profile of 0 runs; ask for 1 or more".into()));
        }
        let (mut order, mut profiles) = (Vec::new(), BTreeMap::<String, NodeProfile>::new());
        for _ in 0..runs {
            self.through(args, kwargs, |stage, inputs, ctx| {
                stage.observe(inputs, ctx, |node, seconds, outputs| {
                    let profile = profiles.entry(node.to_owned()).or_insert_with(|| {
                        order.push(node.to_owned());
                        NodeProfile {
                            node: node.to_owned(),
                            seconds,
                            outputs: outputs.iter().map(Value::to_string).collect(),
                            bytes: outputs.iter().map(bytes).sum(),
                        }
                    });
                    profile.seconds = profile.seconds.min(seconds);
                })
            })?;
        }
        Ok(order.iter().filter_map(|node| profiles.remove(node)).collect())
    }
}

fn bytes(value: &Value) -> usize {
    value.fold_tensors(0, |sum, tensor| sum + tensor.elem_count() * tensor.dtype().size_in_bytes())
}
