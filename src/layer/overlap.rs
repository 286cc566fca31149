//! Whether a layer's products run while its rows travel: decided once a forward, from what all ranks have alike.

use crate::config::{Fingerprint, Payload, WeightAt};
use crate::dtype::DType;
use crate::ep::{Group, Handle, WorkBesideRows};
use crate::kernels::Kernels;

use super::definition::Layer;
use super::params::Params;
use super::payload;

/// Columns of a shared expert from which its up lasts as long as rows travel beside it: on an H200 1133 of 16 bits, by the rates
/// of 700 TFLOP/s and 309 GB/s, and up to 1522 by what dispatch reaches on 16 SMs, whatever the tokens' number and width.
const SHARED_BESIDE_ROWS: usize = 1024;

/// Whether the shared expert begins while rows travel over this handle: the same on all ranks, as it decides how they are sent.
pub(super) fn shared_beside_rows<D: Kernels>(
    layer: &Layer,
    group: &mut Group<D>,
    handle: &Handle<D>,
    dtype: DType,
) -> bool {
    let (config, Some(shared)) = (&layer.config, layer.config.shared) else { return false };
    let sizes = [config.hidden, shared.intermediate];
    match group.dispatcher().overlaps(handle) {
        WorkBesideRows::None => false,
        WorkBesideRows::Any => true,
        // What starts early are gated products of whole words of 16 bits each.
        WorkBesideRows::EarlyProduct => {
            shared.intermediate >= SHARED_BESIDE_ROWS
                && config.activation.gate_factor() == 2
                && matches!(dtype, DType::BF16 | DType::F16)
                && sizes.iter().all(|elements| elements.is_multiple_of(8))
        }
    }
}

/// What the ranks of a forward are to have alike. Rows that are to meet a waiting product are sent in another way, so a
/// rank that decides otherwise than the rest is told so in prepare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LayerOverlap {
    /// Not in this group, whatever the layer.
    Never,
    /// In others of the group's layers, or with other weights.
    No,
    /// Where the handle's rows are enough.
    Yes,
}

impl LayerOverlap {
    /// Of tokens of this type and these weights.
    pub(super) fn of<D: Kernels>(
        layer: &Layer,
        group: &mut Group<D>,
        params: &Params<'_, D>,
        dtype: DType,
    ) -> LayerOverlap {
        let config = &layer.config;
        // Quantized weights, which have no type of their own, are multiplied by kernels that wait for no rows.
        let typed = [params.up.dtype(), params.down.dtype()].iter().all(|own| *own == Some(dtype));
        // A gather would stand between the rows and their way.
        let gathered = params.up.is_gathered() || params.down.is_gathered();
        let waits = config.weight_at != WeightAt::Input
            && config.activation.gate_factor() == 2
            && config.payload == Payload::Plain
            && typed
            && !gathered
            && group.device().products_wait(dtype, [config.hidden, config.intermediate]);
        match (group.dispatcher().may_overlap_products(), waits) {
            (false, _) => Self::Never,
            (true, false) => Self::No,
            (true, true) => Self::Yes,
        }
    }

    /// The layer's fingerprint with it.
    pub(super) fn formula(self, layer: &Layer, dtype: DType) -> Fingerprint {
        let plain = payload::formula(layer.fingerprint, layer.config.payload, dtype);
        match self {
            Self::Never => plain,
            Self::No | Self::Yes => layer.fingerprint.with_tokens(dtype).with_overlap(self == Self::Yes),
        }
    }
}
