//! A list of candle's modules that can be cut.
use candle_core::{Result, Tensor};
use candle_nn::{Module, ModuleT};

/// A list of modules like candle's [`Sequential`](candle_nn::Sequential). candle's hides its modules, so it stays in
/// one stage; this one becomes nodes by [`PipeBuilder::layers`](crate::PipeBuilder::layers).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap, linear};
/// use candle_pipe::nn::seq;
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let model = seq().add(linear(2, 3, vb.pp("up"))?).add_fn(|x| x.relu()).add(linear(3, 1, vb.pp("down"))?);
/// assert_eq!(model.len(), 3);
/// let x = Tensor::ones((4, 2), DType::F32, &Device::Cpu)?;
/// assert_eq!(model.forward(&x)?.dims(), [4, 1]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn ModuleT>>,
}

/// Creates an empty list.
pub fn seq() -> Sequential {
    Sequential::default()
}

impl Sequential {
    /// Appends a module.
    #[allow(clippy::should_implement_trait)] // candle's name
    #[must_use]
    pub fn add(mut self, layer: impl ModuleT + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Appends a function.
    #[must_use]
    pub fn add_fn(self, f: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.add(candle_nn::func(f))
    }

    /// Returns the number of modules.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there are no modules.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Applies the modules to `x` in evaluation mode.
    ///
    /// # Errors
    /// Those of the modules.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_t(x, false)
    }

    pub(crate) fn into_layers(self) -> Vec<Box<dyn ModuleT>> {
        self.layers
    }
}

impl ModuleT for Sequential {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward_t(&x, train))
    }
}

impl From<Vec<Box<dyn ModuleT>>> for Sequential {
    fn from(layers: Vec<Box<dyn ModuleT>>) -> Self {
        Self { layers }
    }
}

impl From<Vec<Box<dyn Module>>> for Sequential {
    fn from(layers: Vec<Box<dyn Module>>) -> Self {
        /// A boxed module, which candle does not treat as a module.
        struct Boxed(Box<dyn Module>);

        impl Module for Boxed {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                self.0.forward(x)
            }
        }

        layers.into_iter().map(Boxed).collect()
    }
}

impl<M: ModuleT + 'static> FromIterator<M> for Sequential {
    fn from_iter<I: IntoIterator<Item = M>>(layers: I) -> Self {
        layers.into_iter().fold(seq(), Self::add)
    }
}
