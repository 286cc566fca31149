//! Outputs that carry gradients, of the layer and of a dispatch, and the cotangents that a framework's backward brings
//! of them.

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

/// An output of a dispatch that carries gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DispatchedPart {
    /// The received rows.
    Rows,
    /// Their routing weights.
    Weights,
}

/// Cotangents of the outputs of a dispatch that a loss reaches, as tensors of a framework.
#[derive(Debug)]
pub(crate) struct DispatchedCotangents<T> {
    pub(crate) rows: Option<T>,
    pub(crate) weights: Option<T>,
}

impl<T> Default for DispatchedCotangents<T> {
    fn default() -> Self {
        Self { rows: None, weights: None }
    }
}

impl<T> DispatchedCotangents<T> {
    /// Takes the cotangent of an output.
    pub(crate) fn set(&mut self, part: DispatchedPart, cotangent: T) {
        match part {
            DispatchedPart::Rows => self.rows = Some(cotangent),
            DispatchedPart::Weights => self.weights = Some(cotangent),
        }
    }
}
