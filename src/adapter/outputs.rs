//! The layer's outputs that carry gradients, and the cotangents that a framework's backward brings of them.

/// An output of the layer that carries gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerOutput {
    /// The tokens' outputs.
    Y,
    /// The auxiliary losses' sum.
    Aux,
}

/// Cotangents of the outputs that a loss reaches, as tensors of a framework.
#[derive(Debug)]
pub(crate) struct OutputCotangents<T> {
    pub(crate) d_y: Option<T>,
    pub(crate) d_aux: Option<T>,
}

impl<T> Default for OutputCotangents<T> {
    fn default() -> Self {
        Self { d_y: None, d_aux: None }
    }
}

impl<T> OutputCotangents<T> {
    /// Takes the cotangent of an output.
    pub(crate) fn set(&mut self, output: LayerOutput, cotangent: T) {
        match output {
            LayerOutput::Y => self.d_y = Some(cotangent),
            LayerOutput::Aux => self.d_aux = Some(cotangent),
        }
    }
}
