//! Sums of gradients over ranks, many parameters to a collective.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

use crate::adapter::{
    BUCKET_BYTES, GradientReduction, NO_LAYER, REDUCE_GRADIENTS, Summand, TypeNumber, match_device, number_of_type,
    type_of_number,
};
use crate::comm::Communicator;
use crate::ep::EpGroup;
use crate::error::{Error, Result};

use super::device::CandleDevice;
use super::error::framework;
use super::group::DeviceGroup;
use super::views_mut::with_views_mut;

const CALL: &str = REDUCE_GRADIENTS;

/// Sums the gradients of variables that every rank of the group holds, such as those of a model around its expert
/// layers, over the ranks: in f32 (f64 for f64) whatever their types, in buckets of [`BUCKET_BYTES`], in rank order. A
/// gradient that is absent on some ranks counts as zeros there; one that is absent on all stays so, and an optimizer leaves
/// the variable alone. A gradient keeps its type, and one that was absent gets the other ranks'.
///
/// Expert weights are not among them: each rank has its own. Call it on every rank with the same variables in the same
/// order, after a step's last backward, so that microbatches before it communicate nothing. Nothing to do for one rank.
/// Ranks first compare sizes, types and order of the variables, and the presence and types of their gradients: the host
/// waits for these numbers, and on a GPU for the work before them, once a call, and once more where a gradient is absent
/// or has another type on some ranks. In a capture nothing is compared. Of two variables that are alike it cannot tell
/// which is which: the order of [`VarMap::all_vars`](candle_nn::VarMap::all_vars) is another in each process, and experts
/// are among them. [`GradientReducer::with_var_map`](super::GradientReducer::with_var_map) goes by names. A variable that is
/// named twice counts once.
///
/// # Errors
/// On every rank, with all gradients as they were: variables of other sizes or types than another rank's, or in another
/// order; a gradient of which ranks have other types, as f32 and the variable's 16 bits; one of another shape than its
/// variable's. In a capture, a gradient that is absent; a capture that was not told of the group. On every rank, with the
/// gradients of the buckets before as sums and the others as they were, so that the step begins anew: no memory for a
/// bucket, a communicator's error.
pub fn reduce_gradients(group: &DeviceGroup, vars: &[Var], gradients: &mut GradStore) -> candle_core::Result<()> {
    let of = distinct(vars);
    Ok(match_device!(group.erased(), group => sum_on(group, of_vars(NO_LAYER, &of, BUCKET_BYTES), gradients))?)
}

/// The same over the ranks of any communicator, for example of data-parallel replicas, whose expert weights are among the
/// variables: `device` is the communicator's, and the variables lie on it. Buckets take `bucket_bytes`.
///
/// # Errors
/// As [`reduce_gradients`]; on every rank, other `bucket_bytes` than another rank's.
pub fn reduce_gradients_over<D: CandleDevice>(
    comm: &mut dyn Communicator<D>,
    device: &D,
    vars: &[Var],
    bucket_bytes: usize,
    gradients: &mut GradStore,
) -> candle_core::Result<()> {
    let of = distinct(vars);
    Ok(sum(comm, device, of_vars(NO_LAYER, &of, bucket_bytes), gradients)?)
}

/// Sums over the ranks of a group, of a layer's parameters.
pub(super) fn of_layer(group: &DeviceGroup, layer: u32, params: &[&Tensor], gradients: &mut GradStore) -> Result<()> {
    match_device!(group.erased(), group => sum_on(group, of_vars(layer, params, BUCKET_BYTES), gradients))
}

/// Each variable once, where it is named first: what several modules share is summed as one.
fn distinct(vars: &[Var]) -> Vec<&Tensor> {
    let mut seen = HashSet::new();
    vars.iter().map(Var::as_tensor).filter(|var| seen.insert(var.id())).collect()
}

fn of_vars<'a, 't>(layer: u32, params: &'a [&'t Tensor], bucket_bytes: usize) -> GradientReduction<'a, &'t Tensor> {
    GradientReduction { layer, params, summand, described, bucket_bytes }
}

/// Sizes and type of a variable, which ranks compare.
pub(super) fn described(of: &&Tensor) -> String {
    format!("{:?} {}", of.dims(), of.dtype().as_str())
}

fn sum_on<D: CandleDevice>(
    group: &EpGroup<D>,
    reduction: GradientReduction<'_, &Tensor>,
    gradients: &mut GradStore,
) -> Result<()> {
    let mut group = group.lock();
    let device = group.device().clone();
    sum(group.dispatcher().communicator(), &device, reduction, gradients)
}

fn sum<D: CandleDevice>(
    comm: &mut dyn Communicator<D>,
    device: &D,
    reduction: GradientReduction<'_, &Tensor>,
    gradients: &mut GradStore,
) -> Result<()> {
    let own = reduction.params.iter().map(|of| gradient_type(of, gradients)).collect();
    reduction.run(comm, device, own, |params, types, all_reduce| {
        let bucket = BucketParams(params);
        let sums = bucket.flat(&|of| gradients.get(of).cloned())?;
        with_views_mut(device, CALL, &[("gradients", &sums)], |views| views.into_iter().try_for_each(all_reduce))?;
        let absent = |number: usize| Ok(type_of_number(&TYPES, types[number]));
        let all = bucket.split(&sums, gradients, &absent).map_err(framework(CALL))?;
        for (of, sum) in params.iter().zip(all) {
            if let Some(sum) = sum {
                gradients.insert(of, sum);
            }
        }
        Ok(())
    })
}

/// Types of gradients, by the order of their numbers.
const TYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// The type of a variable's gradient, which is of its shape.
fn gradient_type(of: &Tensor, gradients: &GradStore) -> Result<TypeNumber> {
    let Some(gradient) = gradients.get(of) else { return Ok(0) };
    Error::check_shape(CALL, "gradient", of.dims(), gradient.dims())?;
    number_of_type(&TYPES, &gradient.dtype(), |dtype| dtype.as_str().to_string())
}

/// The type of a parameter's sum.
fn wide(of: &Tensor) -> DType {
    if of.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

pub(super) fn summand(of: &&Tensor) -> Summand {
    Summand { count: of.elem_count(), double: wide(of) == DType::F64 }
}

/// Parameters whose gradients are summed at once.
pub(super) struct BucketParams<'a>(pub(super) &'a [&'a Tensor]);

impl BucketParams<'_> {
    /// The gradients, one behind the other, in memory of their own; behind them, for each variable, a 1 where there is a
    /// gradient here, and then, for each, a 1 where that is wider than the variable.
    pub(super) fn flat(&self, gradient: &dyn Fn(&Tensor) -> Option<Tensor>) -> Result<Tensor> {
        let Some(first) = self.0.first() else {
            return Err(Error::invalid(CALL, "variables", "at least one", "none"));
        };
        let (mut parts, mut present, mut wider) = (Vec::new(), Vec::new(), Vec::new());
        for of in self.0 {
            let gradient = gradient(of);
            present.push(f64::from(u8::from(gradient.is_some())));
            wider.push(f64::from(u8::from(gradient.as_ref().is_some_and(|gradient| gradient.dtype() != of.dtype()))));
            let part = match gradient {
                Some(gradient) => {
                    Error::check_shape(CALL, "gradient", of.dims(), gradient.dims())?;
                    gradient.to_dtype(wide(of)).and_then(|t| t.flatten_all())
                }
                None => Tensor::zeros(of.elem_count(), wide(of), of.device()),
            };
            parts.push(part.map_err(framework(CALL))?);
        }
        let flags =
            Tensor::new([present, wider].concat(), first.device()).and_then(|flags| flags.to_dtype(wide(first)));
        parts.push(flags.map_err(framework(CALL))?);
        Tensor::cat(&parts, 0).map_err(framework(CALL))
    }

    /// The type of a gradient that this rank does not have, by the flags of [`flat`](Self::flat) and not by a comparison:
    /// reads a number or two of the device.
    pub(super) fn flagged_type(&self, sums: &Tensor, number: usize) -> candle_core::Result<Option<DType>> {
        let count = self.0.len();
        let flags = self.0.iter().map(|of| of.elem_count()).sum::<usize>();
        let flag = |at: usize| {
            Ok::<_, candle_core::Error>(sums.get(flags + at)?.to_dtype(DType::F32)?.to_scalar::<f32>()? > 0.0)
        };
        let of = self.0[number];
        Ok(match flag(number)? {
            false => None,
            true if flag(count + number)? => Some(wide(of)),
            true => Some(of.dtype()),
        })
    }

    /// Takes the sums apart, each in its gradient's type, which `absent` gives of those that this rank does not have; `None`
    /// for one that no rank has.
    pub(super) fn split(
        &self,
        sums: &Tensor,
        gradients: &GradStore,
        absent: &dyn Fn(usize) -> candle_core::Result<Option<DType>>,
    ) -> candle_core::Result<Vec<Option<Tensor>>> {
        let mut start = 0;
        let split = self.0.iter().enumerate().map(|(number, of)| {
            let part = start..start + of.elem_count();
            start = part.end;
            let dtype = match gradients.get(of) {
                Some(gradient) => Some(gradient.dtype()),
                None => absent(number)?,
            };
            let Some(dtype) = dtype else { return Ok(None) };
            Ok(Some(sums.narrow(0, part.start, part.len())?.reshape(of.dims())?.to_dtype(dtype)?))
        });
        split.collect()
    }
}
