//! How a host framework's module is told which layer it is.

use crate::config::MoeConfig;
use crate::error::Result;

use super::definition::Layer;

/// The layer of a module: a configuration, which gets the next number of the module's group, or a [`Layer`], which has
/// a number (a checkpoint's, say) and dispatch options of its own. Both convert into it.
///
/// Numbers tell the layers of a group apart, in tags and errors. All ranks make the same layers in the same order.
#[derive(Debug, Clone)]
pub struct LayerSpec(SpecKind);

#[derive(Debug, Clone)]
enum SpecKind {
    Config(Box<MoeConfig>),
    Layer(Box<Layer>),
}

impl From<MoeConfig> for LayerSpec {
    fn from(config: MoeConfig) -> Self {
        Self(SpecKind::Config(Box::new(config)))
    }
}

impl From<&MoeConfig> for LayerSpec {
    fn from(config: &MoeConfig) -> Self {
        config.clone().into()
    }
}

impl From<Layer> for LayerSpec {
    fn from(layer: Layer) -> Self {
        Self(SpecKind::Layer(Box::new(layer)))
    }
}

impl LayerSpec {
    /// Sizes and formulas.
    pub fn config(&self) -> &MoeConfig {
        match &self.0 {
            SpecKind::Config(config) => config,
            SpecKind::Layer(layer) => layer.config(),
        }
    }

    /// The number that the layer has already.
    pub fn number(&self) -> Option<u32> {
        match &self.0 {
            SpecKind::Config(_) => None,
            SpecKind::Layer(layer) => Some(layer.number()),
        }
    }

    /// The layer, of this number if it has none of its own.
    ///
    /// # Errors
    /// As [`Layer::new`].
    pub fn layer(self, number: u32) -> Result<Layer> {
        match self.0 {
            SpecKind::Config(config) => Layer::new(*config, number),
            SpecKind::Layer(layer) => Ok(*layer),
        }
    }
}
