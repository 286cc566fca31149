//! candle's tensors as memory that this crate's kernels write.

use std::cell::RefCell;

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};

use crate::error::{Error, Result};
use crate::tensor::TensorMut;

use super::error::framework;
use super::host::{Host, StorageMut, StorageSliceMut};

type Visit<'a> = Box<dyn FnOnce(StorageMut<'_>, &Layout) -> candle_core::Result<()> + 'a>;

/// Lends a tensor's storage to a closure: the way that candle has for writing in place.
struct ViewMutOp<'a>(RefCell<Option<Visit<'a>>>);

impl ViewMutOp<'_> {
    fn run(&self, storage: StorageMut<'_>, layout: &Layout) -> candle_core::Result<()> {
        match self.0.take() {
            Some(visit) => visit(storage, layout),
            None => Err(candle_core::Error::msg("a tensor's memory was borrowed twice")),
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

/// Runs `f` with views of named tensors that it may write, in their order; nobody else reads or writes their storages
/// meanwhile. Each tensor has a storage of its own.
pub(super) fn with_views_mut<D: Host, R>(
    device: &D,
    call: &'static str,
    tensors: &[(&str, &Tensor)],
    f: impl FnOnce(Vec<TensorMut<'_, D>>) -> Result<R>,
) -> Result<R> {
    let (mut f, mut made) = (Some(f), None);
    visit_views(device, call, tensors, Vec::new(), &mut |views| {
        if let Some(f) = f.take() {
            made = Some(f(views)?);
        }
        Ok(())
    })?;
    made.ok_or_else(|| Error::invalid(call, "tensors", "views of them", "nothing"))
}

/// Variables viewed at once: as many as one of an optimizer's launches takes, and few enough for a thread's stack.
const AT_ONCE: usize = 48;

/// Gives `change` the memory of variables, none of which is there twice, as vectors, some at a time, with the number of
/// the first of them.
pub(super) fn with_vars_mut<D: Host>(
    device: &D,
    call: &'static str,
    vars: &[&Tensor],
    mut change: impl FnMut(usize, Vec<TensorMut<'_, D>>) -> Result<()>,
) -> Result<()> {
    for (at, vars) in vars.chunks(AT_ONCE).enumerate() {
        let first = at * AT_ONCE;
        let names: Vec<String> = (first..).take(vars.len()).map(|number| format!("variable {number}")).collect();
        let named: Vec<(&str, &Tensor)> = names.iter().map(String::as_str).zip(vars.iter().copied()).collect();
        with_views_mut(device, call, &named, |views| {
            change(first, views.into_iter().map(vector).collect::<Result<_>>()?)
        })?;
    }
    Ok(())
}

/// A tensor's elements as a vector.
fn vector<D: Host>(view: TensorMut<'_, D>) -> Result<TensorMut<'_, D>> {
    let count = view.count();
    view.reshape(&[count])
}

/// Borrows the first of `tensors` and, inside, the others; then runs `f` with the views of all.
fn visit_views<D: Host>(
    device: &D,
    call: &'static str,
    tensors: &[(&str, &Tensor)],
    mut views: Vec<TensorMut<'_, D>>,
    f: &mut dyn FnMut(Vec<TensorMut<'_, D>>) -> Result<()>,
) -> Result<()> {
    let Some(((name, tensor), rest)) = tensors.split_first() else { return f(views) };
    let visit = |storage: StorageMut<'_>, layout: &Layout| {
        let Some((start, _)) = layout.contiguous_offsets() else {
            let found = format!("{layout:?}");
            return Err(Error::invalid(call, format!("tensor {name}"), "contiguous memory", found).into());
        };
        let (mut view, hold) = device.view_mut(StorageSliceMut { call, name, storage, start, dims: layout.dims() })?;
        let mut views: Vec<_> = views.iter_mut().map(TensorMut::reborrow).collect();
        views.push(view.reborrow());
        let done = visit_views(device, call, rest, views, f);
        drop(hold);
        Ok(done?)
    };
    tensor.inplace_op1(&ViewMutOp(RefCell::new(Some(Box::new(visit))))).map_err(framework(call))
}
