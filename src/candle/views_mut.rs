//! candle's tensors as memory that this crate's kernels write.

use std::cell::RefCell;

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};

use crate::adapter::VARIABLES_AT_ONCE;
use crate::error::{Error, Result};
use crate::tensor::TensorMut;

use super::device::{CandleDevice, StorageMut, StorageSliceMut};
use super::error::framework;

type Visit<'a> = Box<dyn FnOnce(StorageMut<'_>, &Layout) -> candle_core::Result<()> + 'a>;

/// Lends a tensor's storage to a closure: the way that candle has for writing in place.
struct ViewMutOp<'a>(RefCell<Option<Visit<'a>>>);

impl ViewMutOp<'_> {
    fn run(&self, storage: StorageMut<'_>, layout: &Layout) -> candle_core::Result<()> {
        match self.0.take() {
            Some(visit) => visit(storage, layout),
            None => Err(candle_core::Error::wrap(refused("a tensor that is named once", "named twice"))),
        }
    }
}

impl InplaceOp1 for ViewMutOp<'_> {
    fn name(&self) -> &'static str {
        "moebius-write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        self.run(StorageMut::Cpu(storage), layout)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        self.run(StorageMut::Cuda(storage), layout)
    }
}

/// Runs `f` with the storages of several tensors and where each tensor lies in its own, in their order: what a kernel
/// that writes candle's tensors in place needs, of which candle lends one at a time. Nobody else reads or writes the
/// storages meanwhile. Each tensor has a storage of its own: candle's lock would wait for itself.
///
/// candle does not know that the tensors change: gradients do not flow through what is written.
///
/// ```
/// use candle_core::{CpuStorage, Device, Error, Result, Tensor};
/// use moebius::candle::{StorageMut, with_storages_mut};
///
/// # fn main() -> Result<()> {
/// let (a, b) = (Tensor::new(&[1f32, 2.], &Device::Cpu)?, Tensor::new(&[3f32, 4.], &Device::Cpu)?);
/// with_storages_mut(&[&a, &b], |mut storages| match &mut storages[..] {
///     [(StorageMut::Cpu(CpuStorage::F32(a)), _), (StorageMut::Cpu(CpuStorage::F32(b)), _)] => {
///         a.swap_with_slice(b);
///         Ok(())
///     }
///     _ => Err(Error::msg("expected two tensors in f32 on the CPU")),
/// })?;
/// assert_eq!(a.to_vec1::<f32>()?, [3., 4.]);
/// assert_eq!(b.to_vec1::<f32>()?, [1., 2.]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// The result of `f`; candle's error, for a tensor of a device that is neither the CPU nor a CUDA one.
pub fn with_storages_mut<R>(
    tensors: &[&Tensor],
    f: impl FnOnce(Vec<(StorageMut<'_>, &Layout)>) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (mut f, mut made) = (Some(f), None);
    visit_storages(tensors, Vec::new(), &mut |storages| {
        if let Some(f) = f.take() {
            made = Some(f(storages)?);
        }
        Ok(())
    })?;
    made.ok_or_else(|| candle_core::Error::wrap(refused("one that candle runs", "candle ran nothing")))
}

fn refused(expected: &str, found: &str) -> crate::Error {
    crate::Error::invalid("with_storages_mut", "tensors", expected, found)
}

/// Storages of tensors, and where these lie in them.
type Storages<'a> = Vec<(StorageMut<'a>, &'a Layout)>;

/// Borrows the first of `tensors` and, inside, the others; then runs `f` with the storages of all.
fn visit_storages(
    tensors: &[&Tensor],
    storages: Storages<'_>,
    f: &mut dyn FnMut(Storages<'_>) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let Some((tensor, rest)) = tensors.split_first() else { return f(storages) };
    let visit = |storage: StorageMut<'_>, layout: &Layout| {
        let mut storages: Storages<'_> = storages;
        storages.push((storage, layout));
        visit_storages(rest, storages, f)
    };
    tensor.inplace_op1(&ViewMutOp(RefCell::new(Some(Box::new(visit)))))
}

/// Runs `f` with views of named tensors that it may write, in their order; nobody else reads or writes their storages
/// meanwhile. Each tensor has a storage of its own.
pub(super) fn with_views_mut<D: CandleDevice, R>(
    device: &D,
    call: &'static str,
    tensors: &[(&str, &Tensor)],
    f: impl FnOnce(Vec<TensorMut<'_, D>>) -> Result<R>,
) -> Result<R> {
    let plain: Vec<&Tensor> = tensors.iter().map(|(_, tensor)| *tensor).collect();
    with_storages_mut(&plain, |storages| {
        let (mut views, mut guards) = (Vec::new(), Vec::new());
        for ((name, _), (storage, layout)) in tensors.iter().zip(storages) {
            let Some((start, _)) = layout.contiguous_offsets() else {
                let found = format!("{layout:?}");
                return Err(Error::invalid(call, format!("tensor {name}"), "contiguous memory", found).into());
            };
            let (view, guard) = device.view_mut(StorageSliceMut { call, name, storage, start, dims: layout.dims() })?;
            views.push(view);
            guards.push(guard);
        }
        let result = f(views);
        drop(guards);
        Ok(result?)
    })
    .map_err(framework(call))
}

/// Gives `change` the memory of variables, none of which is there twice, as vectors, some at a time, with the number of
/// the first of them.
pub(super) fn with_vars_mut<D: CandleDevice>(
    device: &D,
    call: &'static str,
    vars: &[&Tensor],
    mut change: impl FnMut(usize, Vec<TensorMut<'_, D>>) -> Result<()>,
) -> Result<()> {
    for (at, vars) in vars.chunks(VARIABLES_AT_ONCE).enumerate() {
        let first = at * VARIABLES_AT_ONCE;
        let names: Vec<String> = (first..).take(vars.len()).map(|number| format!("variable {number}")).collect();
        let named: Vec<(&str, &Tensor)> = names.iter().map(String::as_str).zip(vars.iter().copied()).collect();
        with_views_mut(device, call, &named, |views| {
            change(first, views.into_iter().map(vector).collect::<Result<_>>()?)
        })?;
    }
    Ok(())
}

/// A tensor's elements as a vector.
fn vector<D: CandleDevice>(view: TensorMut<'_, D>) -> Result<TensorMut<'_, D>> {
    let count = view.count();
    view.reshape(&[count])
}
