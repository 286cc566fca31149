//! Failures on one rank between burn's work and the core's, on a back end that fails as told.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::flex::FlexDevice;
use burn::backend::{Autodiff, Flex};
use burn::tensor::TensorData;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::{FloatTensor, FloatTensorOps, IntTensor};

use crate::adapter::OutputCotangents;
use crate::cpu::{Cpu, ThreadWorld};
use crate::device::Waited;
use crate::ep::{EpGroup, Group, GroupConfig};
use crate::error::{CommError, Error, Result};
use crate::layer::{Layer, PerParam};
use crate::tensor::{TensorMut, TensorRef};
use crate::{MoeConfig, Tensor as CoreTensor};

use super::backend::{LayerCall, Named, NativeMemory, Operands, ResultSpec, between};
use super::expert_sums::{ErasedExpertSums, SharedExpertSums};
use super::group::DeviceGroup;
use super::run::{Tracked, Wanted, run_backward, run_forward};

/// Flex, under a name that nothing else uses.
type Failing = Autodiff<Flex, BalancedCheckpointing>;

/// Calls of a back end that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// The group is of another device.
    Group,
    Begin,
    /// The wait behind the core's work.
    End,
    /// The view of a result that comes behind so many others.
    ViewMut(usize),
}

thread_local! {
    /// The point at which the next call of this rank fails.
    static FAILS: Cell<Option<At>> = const { Cell::new(None) };
}

fn fails(at: At) -> Result<()> {
    match FAILS.get() {
        Some(failing) if failing == at => Err(Error::invalid("test", "GPU", "one that works", format!("{at:?}"))),
        Some(At::ViewMut(others)) if at == At::ViewMut(0) => {
            FAILS.set(Some(At::ViewMut(others - 1)));
            Ok(())
        }
        _ => Ok(()),
    }
}

impl NativeMemory for Failing {
    type Core = Cpu;
    type Output = CoreTensor<Cpu>;
    type Shared = FloatTensor<Self>;

    fn core_group(group: &DeviceGroup) -> Option<&EpGroup<Cpu>> {
        group.on().filter(|_| FAILS.get() != Some(At::Group))
    }

    fn contiguous(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn view<'a>(core: &Cpu, Named { name, tensor }: Named<'a, FloatTensor<Self>>) -> Result<TensorRef<'a, Cpu>> {
        Flex::view(core, Named { name, tensor: &tensor.primitive })
    }

    fn share(_: &Cpu, Named { tensor, .. }: Named<'_, FloatTensor<Self>>) -> Result<FloatTensor<Self>> {
        Ok(tensor.clone())
    }

    fn view_shared<'a>(core: &Cpu, shared: &'a FloatTensor<Self>) -> Result<TensorRef<'a, Cpu>> {
        Self::view(core, Named { name: "shard", tensor: shared })
    }

    fn contiguous_ids(tensor: IntTensor<Self>) -> IntTensor<Self> {
        Flex::contiguous_ids(tensor)
    }

    fn view_ids<'a>(core: &Cpu, ids: Named<'a, IntTensor<Self>>) -> Result<TensorRef<'a, Cpu>> {
        Flex::view_ids(core, ids)
    }

    fn output(
        core: &Cpu,
        _: &FloatTensor<Self>,
        ResultSpec { dtype, dims }: ResultSpec<'_>,
    ) -> Result<CoreTensor<Cpu>> {
        CoreTensor::empty(core, dtype, dims)
    }

    fn view_mut(output: &mut CoreTensor<Cpu>) -> Result<TensorMut<'_, Cpu>> {
        fails(At::ViewMut(0))?;
        Flex::view_mut(output)
    }

    fn float(output: CoreTensor<Cpu>) -> Result<FloatTensor<Self>> {
        Ok(Self::from_inner(Flex::float(output)?))
    }

    fn int(output: CoreTensor<Cpu>) -> Result<IntTensor<Self>> {
        Flex::int(output)
    }

    fn erase_sums(sums: SharedExpertSums<Self::Output>) -> ErasedExpertSums {
        Flex::erase_sums(sums)
    }

    fn named_sums(sums: &ErasedExpertSums) -> Option<&SharedExpertSums<Self::Output>> {
        Flex::named_sums(sums)
    }

    fn begin(_: &Cpu) -> Result<Waited> {
        fails(At::Begin)?;
        Ok(Waited::Nothing)
    }

    fn end(_: &Cpu) -> Result<Waited> {
        fails(At::End)?;
        Ok(Waited::Nothing)
    }
}

const TOKENS: usize = 3;
const HIDDEN: usize = 4;
/// A rank that is not told waits this long: the test is slow then, and fails.
const TIMEOUT: Duration = Duration::from_secs(20);

fn float(dims: &[usize]) -> FloatTensor<Failing> {
    let values: Vec<f32> = (0..dims.iter().product()).map(|at| at as f32 * 0.01).collect();
    Failing::float_from_data(TensorData::new(values, dims.to_vec()), &FlexDevice)
}

/// A forward and a backward of one rank, one of which may fail there, and then both again.
fn run(call: &LayerCall, at: Option<(At, bool)>) -> [Result<()>; 2] {
    let config = call.layer.config();
    let params = PerParam::from_fn(|kind| {
        let mut dims = kind.dims(config, config.router.num_experts)?;
        if !kind.is_replicated() {
            dims[0] /= call.group.ranks();
        }
        Some(float(&dims))
    });
    let operands = Operands { x: float(&[TOKENS, HIDDEN]), params };
    let tracked = Tracked { x: true, params: operands.params.as_ref().map(|_, t| t.is_some()) };
    let backward = |context| {
        let arrived = OutputCotangents { d_y: Some(float(&[TOKENS, HIDDEN])), d_aux: None };
        run_backward::<Failing>(call, &operands, context, arrived, Wanted { tracked, sums: None }).map(drop)
    };
    let forward = || run_forward::<Failing>(call, &operands, true).map(|(_, context)| context.expect("kept"));
    FAILS.set(at.and_then(|(at, backward)| (!backward).then_some(at)));
    let first = match forward() {
        Ok(context) => {
            FAILS.set(at.map(|(at, _)| at));
            backward(context)
        }
        Err(error) => Err(error),
    };
    FAILS.set(None);
    [first, forward().and_then(backward)]
}

/// Whatever fails on a rank before the layer is called, the others get its reason at once, and the group goes on.
#[test]
fn what_fails_before_the_layer_is_told() {
    // Results of a forward: y, logits, ids, weights, losses. Of a backward: gradients of x, router, up, down.
    let cases = [(false, 5), (true, 4)].into_iter().flat_map(|(backward, results)| {
        let all = (0..results).map(At::ViewMut).chain([At::Begin, At::Group]);
        all.map(move |at| (at, backward))
    });
    for case in cases {
        let outcomes: Vec<_> = thread::scope(|scope| {
            let comms = ThreadWorld::create(2, TIMEOUT).into_iter().enumerate();
            let rank = |(rank, comm)| {
                scope.spawn(move || {
                    let group = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(4, 8)).unwrap();
                    let layer = Arc::new(Layer::new(MoeConfig::new(HIDDEN, 2, 4, 2), 7).unwrap());
                    let call = LayerCall { details: true, ..LayerCall::new(&layer, &EpGroup::new(group).into()) };
                    run(&call, (rank == 1).then_some(case))
                })
            };
            let threads: Vec<_> = comms.map(rank).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        let [[refused, after], [own, again]] = &outcomes[..] else { panic!("two ranks") };
        match refused {
            // In prepare, and in backward's first collective.
            Err(
                Error::Peer { rank: 0, peer: 1, reason, .. }
                | Error::Comm(CommError::Refused { rank: 0, peer: 1, reason, .. }),
            ) => {
                let expected = if case.0 == At::Group { "one of the device of" } else { "one that works" };
                assert!(reason.contains(expected), "{case:?}: {reason}");
            }
            other => panic!("{case:?}: {other:?}"),
        }
        assert!(matches!(own, Err(Error::Invalid { .. })), "{case:?}: {own:?}");
        assert!(after.is_ok() && again.is_ok(), "{case:?}: {after:?}, {again:?}");
    }
}

/// A second failure does not hide the first; alone it is reported.
#[test]
fn the_first_error_is_kept() {
    let work = |outcome: Result<u32>| between::<Failing, _>(&Cpu::new(), |_| (), || outcome);
    let failed = || Err(Error::invalid("test", "outcome", "some", "none"));
    let text = |outcome: Result<u32>| outcome.err().map(|e| e.to_string()).unwrap_or_default();
    FAILS.set(Some(At::End));
    assert!(text(work(failed())).contains("outcome"));
    assert!(text(work(Ok(1))).contains("End"));
    FAILS.set(None);
    assert!(text(work(failed())).contains("outcome"));
    assert_eq!(work(Ok(1)).ok(), Some(1));
}
