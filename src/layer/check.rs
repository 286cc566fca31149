//! Shapes and dtypes of a layer's inputs, checked before any work.

use std::time::Duration;

use crate::config::AuxConfig;
use crate::dtype::DType;
use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{TensorMut, TensorRef};

use super::definition::Layer;
use super::gradients::GradientsMut;
use super::param_kind::ParamKind;
use super::params::{Inputs, Params};
use super::payload;

/// Checks x and the parameters against the configuration; returns T.
pub(super) fn inputs<D: Kernels>(
    call: &'static str,
    layer: &Layer,
    group: &Group<D>,
    x: TensorRef<'_, D>,
    params: &Params<'_, D>,
) -> Result<usize> {
    let config = layer.config();
    let tokens = layer.check_x(call, x)?;
    payload::check(call, config.payload, x.dtype())?;
    if config.router.num_experts != group.config().num_experts {
        let found = group.config().num_experts;
        return Err(Error::invalid(call, "group.num_experts", config.router.num_experts, found));
    }
    if let Some(dtype) = common_type(params) {
        Error::check_dtype(call, "x", dtype, x.dtype())?;
    }
    for kind in ParamKind::ALL {
        let name = kind.name();
        let tensor = params.tensor(kind);
        let found = match kind {
            ParamKind::Up => Some((params.up.dims(), params.up.dtype())),
            ParamKind::Down => Some((params.down.dims(), params.down.dtype())),
            _ => tensor.as_ref().map(|t| (t.dims(), Some(t.dtype()))),
        };
        let wrong =
            |expected: String, found: &str| Err(Error::invalid(call, format!("tensor {name}"), expected, found));
        match (kind.dims(config, group.local_experts()), found) {
            (Some(expected), Some((dims, dtype))) => {
                Error::check_shape(call, name, &expected, dims)?;
                match dtype {
                    Some(dtype) if !kind.any_float() => Error::check_dtype(call, name, x.dtype(), dtype)?,
                    Some(dtype) if !dtype.is_float() => return wrong("a floating type".to_string(), dtype.name()),
                    _ => {}
                }
            }
            (Some(expected), None) => return wrong(format!("{expected:?}"), "none"),
            (None, Some(_)) => return wrong("none, by the configuration".to_string(), "one"),
            (None, None) => {}
        }
    }
    Ok(tokens)
}

/// Refuses what needs all ranks in a forward, beside a group's patience: ranks do not make each other's calls alike there, and
/// a collective would wait for one that is away, in a replayed graph without an end.
pub(super) fn patience(call: &'static str, aux: &AuxConfig, patience: Option<Duration>, jitters: bool) -> Result<()> {
    const NONE: &str = "beside GroupConfig::patience";
    if patience.is_none() {
        return Ok(());
    }
    if aux.over_ranks && !aux.is_off() {
        return Err(Error::invalid(call, "aux.over_ranks", format!("false {NONE}"), "true"));
    }
    if jitters {
        return Err(Error::invalid(call, "noise", format!("none {NONE}"), "some"));
    }
    Ok(())
}

/// The type that all parameters have which must have the tokens': where they agree, it is x that is of another.
fn common_type<D: Kernels>(params: &Params<'_, D>) -> Option<DType> {
    let mut typed = ParamKind::ALL.into_iter().filter(|kind| !kind.any_float()).filter_map(|kind| match kind {
        ParamKind::Up => params.up.dtype(),
        ParamKind::Down => params.down.dtype(),
        _ => params.tensor(kind).map(|tensor| tensor.dtype()),
    });
    let agreed = |first: Option<DType>, dtype| first.is_none_or(|first| first == dtype).then_some(Some(dtype));
    typed.try_fold(None, agreed).flatten().filter(|dtype| dtype.is_float())
}

/// Checks memory for y.
pub(super) fn output<D: Kernels>(
    call: &'static str,
    layer: &Layer,
    x: TensorRef<'_, D>,
    tokens: usize,
    y: &TensorMut<'_, D>,
) -> Result<()> {
    Error::check_shape(call, "y", &[tokens, layer.config().hidden], y.dims())?;
    Error::check_dtype(call, "y", x.dtype(), y.dtype())
}

/// Checks memory for gradients: each of its parameter's shape. Types of the routed experts' are the device's to check,
/// which may add to wider ones.
pub(super) fn gradients<D: Kernels>(
    call: &'static str,
    layer: &Layer,
    group: &Group<D>,
    inputs: &Inputs<'_, '_, D>,
    into: &GradientsMut<'_, D>,
) -> Result<()> {
    if let Some(x) = &into.x {
        Error::check_shape(call, "gradient of x", inputs.x.dims(), x.dims())?;
        Error::check_dtype(call, "gradient of x", inputs.x.dtype(), x.dtype())?;
    }
    for kind in ParamKind::ALL {
        let Some(out) = into.get(kind) else { continue };
        let name = format!("gradient of {}", kind.name());
        match kind.dims(layer.config(), group.local_experts()) {
            Some(dims) => Error::check_shape(call, &name, &dims, out.dims())?,
            None => return Err(Error::invalid(call, name, "none, by the configuration", "one")),
        }
    }
    let params = inputs.params;
    for (source, kind) in [(params.up, ParamKind::Up), (params.down, ParamKind::Down)] {
        if into.get(kind).is_some() && source.frozen() {
            let name = format!("gradient of {}", kind.name());
            return Err(Error::invalid(call, name, "none, as the weight is quantized", "one"));
        }
    }
    let alone = |bias: ParamKind, weight: ParamKind| into.get(bias).is_some() && into.get(weight).is_none();
    let biases = [
        (ParamKind::UpBias, ParamKind::Up),
        (ParamKind::DownBias, ParamKind::Down),
        (ParamKind::SharedUpBias, ParamKind::SharedUp),
        (ParamKind::SharedDownBias, ParamKind::SharedDown),
    ];
    if biases.into_iter().any(|(bias, weight)| alone(bias, weight)) {
        return Err(Error::invalid(call, "gradients", "a bias with its weight", "a bias alone"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_needs_all_ranks_beside_patience() {
        let some = Some(Duration::from_millis(1));
        let own = AuxConfig { balance: 0.1, ..Default::default() };
        let over = AuxConfig { over_ranks: true, ..own };
        let off = AuxConfig { balance: 0.0, ..over };
        let cases = [
            (own, some, false, None),
            (off, some, false, None),
            (over, None, true, None),
            (over, some, false, Some("aux.over_ranks")),
            (AuxConfig { z: 0.1, ..off }, some, false, Some("aux.over_ranks")),
            (own, some, true, Some("noise")),
        ];
        for (aux, patience, jitters, expected) in cases {
            let refused = super::patience("forward", &aux, patience, jitters);
            match (&refused, expected) {
                (Ok(()), None) => {}
                (Err(Error::Invalid { call: "forward", name, .. }), Some(expected)) if name == expected => {}
                other => panic!("{aux:?}, {patience:?}, {jitters}: {other:?}"),
            }
        }
    }
}
