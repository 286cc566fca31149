//! Shapes and dtypes of a layer's inputs, checked before any work.

use crate::ep::Group;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::{TensorMut, TensorRef};

use super::{GradientsMut, Inputs, Layer, Params, Role, payload};

const CALL: &str = "Layer::forward";

/// Checks x and the parameters against the configuration; returns T.
pub(super) fn inputs<D: Kernels>(
    layer: &Layer,
    group: &Group<D>,
    x: TensorRef<'_, D>,
    params: &Params<'_, D>,
) -> Result<usize> {
    let c = layer.config();
    let tokens = layer.check_x(CALL, x)?;
    payload::check(CALL, c.payload, x.dtype())?;
    if c.router.num_experts != group.config().num_experts {
        return Err(Error::invalid(CALL, "group.num_experts", c.router.num_experts, group.config().num_experts));
    }
    let (e, l, h, i) = (c.router.num_experts, group.local_experts(), c.hidden, c.intermediate);
    let up_rows = c.up_rows();
    let sized = |name: &str, wanted: bool, dims: &[usize], t: Option<TensorRef<'_, D>>| match (wanted, t) {
        (true, Some(t)) => Error::check_shape(CALL, name, dims, t.dims()),
        (false, None) => Ok(()),
        (true, None) => Err(Error::invalid(CALL, format!("tensor {name}"), format!("{dims:?}"), "none")),
        (false, Some(_)) => Err(Error::invalid(CALL, format!("tensor {name}"), "none, by the configuration", "one")),
    };
    let typed = |name: &str, t: Option<TensorRef<'_, D>>| {
        t.map_or(Ok(()), |t| Error::check_dtype(CALL, name, x.dtype(), t.dtype()))
    };
    sized("router", true, &[e, h], Some(params.router))?;
    sized("router_bias", c.router.logit_bias, &[e], params.router_bias)?;
    sized("selection_bias", c.router.selection_bias, &[e], params.selection_bias)?;
    Error::check_shape(CALL, "up", &[l, up_rows, h], params.up.dims())?;
    Error::check_shape(CALL, "down", &[l, h, i], params.down.dims())?;
    sized("up_bias", c.expert_bias, &[l, up_rows], params.up_bias)?;
    sized("down_bias", c.expert_bias, &[l, h], params.down_bias)?;
    let s = c.shared.map_or(0, |s| s.intermediate);
    sized("shared_up", c.shared.is_some(), &[c.activation.gate_factor() * s, h], params.shared_up)?;
    sized("shared_down", c.shared.is_some(), &[h, s], params.shared_down)?;
    sized("shared_gate", c.shared.is_some_and(|s| s.gated), &[1, h], params.shared_gate)?;
    typed("up_bias", params.up_bias)?;
    typed("down_bias", params.down_bias)?;
    typed("shared_up", params.shared_up)?;
    typed("shared_down", params.shared_down)?;
    Ok(tokens)
}

/// Checks memory for y.
pub(super) fn output<D: Kernels>(
    layer: &Layer,
    x: TensorRef<'_, D>,
    tokens: usize,
    y: &TensorMut<'_, D>,
) -> Result<()> {
    Error::check_shape(CALL, "y", &[tokens, layer.config().hidden], y.dims())?;
    Error::check_dtype(CALL, "y", x.dtype(), y.dtype())
}

/// Checks memory for gradients: each of its parameter's shape. Types of the routed experts' are the device's to check,
/// which may add to wider ones.
pub(super) fn gradients<D: Kernels>(
    call: &'static str,
    layer: &Layer,
    group: &Group<D>,
    inputs: &Inputs<'_, D>,
    into: &GradientsMut<'_, D>,
) -> Result<()> {
    if let Some(x) = &into.x {
        Error::check_shape(call, "gradient of x", inputs.x.dims(), x.dims())?;
        Error::check_dtype(call, "gradient of x", inputs.x.dtype(), x.dtype())?;
    }
    for role in Role::ALL {
        let Some(out) = into.get(role) else { continue };
        let name = format!("gradient of {}", role.name());
        match role.dims(layer.config(), group.local_experts()) {
            Some(dims) => Error::check_shape(call, &name, &dims, out.dims())?,
            None => return Err(Error::invalid(call, name, "none, by the configuration", "one")),
        }
    }
    let params = inputs.params;
    for (out, source, role) in [(&into.up, params.up, Role::Up), (&into.down, params.down, Role::Down)] {
        if out.is_some() && source.frozen() {
            let name = format!("gradient of {}", role.name());
            return Err(Error::invalid(call, name, "none, as the weight is quantised", "one"));
        }
    }
    let alone = |bias: &Option<TensorMut<'_, D>>, weight: &Option<TensorMut<'_, D>>| bias.is_some() && weight.is_none();
    if alone(&into.up_bias, &into.up) || alone(&into.down_bias, &into.down) {
        return Err(Error::invalid(call, "gradients", "a bias with its weight", "a bias alone"));
    }
    Ok(())
}
