//! Gradients of experts that the layers' kernels write, and add to, in one place over a step's microbatches.

use std::collections::HashMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::module::ParamId;

use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::Result;
use crate::layer::{GradientsMut, ParamKind, PerParam};
use crate::tensor::Tensor;

use super::backend::NativeMemory;
#[cfg(feature = "burn-cuda")]
use super::cuda_output::CudaOutput;

/// Parameters of the routed experts.
const EXPERTS: [ParamKind; 4] = [ParamKind::Up, ParamKind::UpBias, ParamKind::Down, ParamKind::DownBias];

/// A step's sums of experts' gradients, in memory of the back end's that a later optimizer gets.
pub struct ExpertSums<M> {
    /// Whether those of 16-bit parameters are in f32.
    in_f32: bool,
    /// Parameters of the backward that runs, by their leaves.
    leaves: HashMap<NodeId, ParamId>,
    sums: HashMap<ParamId, M>,
    /// The backward that runs has begun to write.
    written: bool,
}

/// The same, while a backward runs.
pub type SharedExpertSums<M> = Arc<Mutex<ExpertSums<M>>>;

/// The same of a back end that is not named.
#[derive(Debug, Clone)]
pub enum ErasedExpertSums {
    /// Of burn's CPU back end.
    Cpu(SharedExpertSums<Tensor<Cpu>>),
    /// Of its CUDA back end.
    #[cfg(feature = "burn-cuda")]
    Cuda(SharedExpertSums<CudaOutput>),
}

impl<M> Debug for ExpertSums<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertSums").field("in_f32", &self.in_f32).finish_non_exhaustive()
    }
}

/// Takes the lock.
pub(super) fn locked<M>(sums: &SharedExpertSums<M>) -> MutexGuard<'_, ExpertSums<M>> {
    // Every holder leaves it whole.
    sums.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M> ExpertSums<M> {
    pub(super) fn new(in_f32: bool) -> SharedExpertSums<M> {
        let (leaves, sums) = Default::default();
        Arc::new(Mutex::new(Self { in_f32, leaves, sums, written: false }))
    }

    /// A backward begins, whose leaves these parameters are.
    pub(super) fn begin(&mut self, leaves: HashMap<NodeId, ParamId>) {
        (self.leaves, self.written) = (leaves, false);
    }

    /// Whether the backward has begun to write: what was there before it is lost.
    pub(super) fn is_written(&self) -> bool {
        self.written
    }

    /// Whether there is a sum of a parameter.
    pub(super) fn has(&self, id: ParamId) -> bool {
        self.sums.contains_key(&id)
    }

    /// Forgets all sums.
    pub(super) fn clear(&mut self) {
        self.sums.clear();
    }

    /// Takes all sums.
    pub(super) fn take(&mut self) -> Vec<(ParamId, M)> {
        self.sums.drain().collect()
    }

    /// Takes the sum of a leaf's parameter.
    pub(super) fn take_leaf(&mut self, leaf: NodeId) -> Option<M> {
        self.leaves.get(&leaf).and_then(|id| self.sums.remove(id))
    }

    /// Lends memory to the backward of a layer, if all experts that it trains have theirs here: what they hold is added
    /// to, or, where none holds any, written. `None`: the layer's gradients go through burn's graph, and are added
    /// behind it.
    pub(super) fn lend(
        &mut self,
        leaves: &PerParam<Option<NodeId>>,
        trained: &PerParam<bool>,
    ) -> Option<LentExpertSums<M>> {
        // A layer gives the gradient of a bias beside its weight's only.
        let alone = |bias: ParamKind, weight: ParamKind| trained[bias] && !trained[weight];
        if alone(ParamKind::UpBias, ParamKind::Up) || alone(ParamKind::DownBias, ParamKind::Down) {
            return None;
        }
        let mut ids = PerParam::none();
        for kind in EXPERTS.into_iter().filter(|kind| trained[*kind]) {
            let id = *self.leaves.get(&leaves[kind]?)?;
            // One memory for two parameters would be borrowed twice.
            if ids.present().any(|(_, other)| *other == id) {
                return None;
            }
            ids[kind] = Some(id);
        }
        let holding = ids.present().filter(|(_, id)| self.sums.contains_key(*id)).count();
        let all = ids.present().count();
        // The kernels add to all or to none.
        if all == 0 || (holding > 0 && holding < all) {
            return None;
        }
        let memory = ids.as_ref().map(|_, id| id.as_ref().and_then(|id| self.sums.remove(id)));
        Some(LentExpertSums { ids, memory, accumulate: holding > 0, in_f32: self.in_f32 })
    }

    /// Takes lent memory back; `written`: a backward has begun to write there, which has ended well if `whole`.
    pub(super) fn give_back(&mut self, lent: LentExpertSums<M>, written: bool, whole: bool) {
        self.written |= written;
        if whole || (lent.accumulate && !written) {
            let ids = lent.ids;
            let memory = lent.memory.into_present().filter_map(|(kind, memory)| Some((ids[kind]?, memory)));
            self.sums.extend(memory);
        }
    }
}

/// Memory that a layer's backward writes or adds to.
pub(super) struct LentExpertSums<M> {
    ids: PerParam<Option<ParamId>>,
    memory: PerParam<Option<M>>,
    accumulate: bool,
    in_f32: bool,
}

impl<M> LentExpertSums<M> {
    /// Whether a parameter's gradient goes there.
    pub(super) fn has(&self, kind: ParamKind) -> bool {
        self.ids[kind].is_some()
    }

    /// Makes the memory that there is not yet, as `output` does of a parameter and a type.
    pub(super) fn allocate(
        &mut self,
        of: impl Fn(ParamKind) -> Option<DType>,
        output: impl Fn(ParamKind, DType) -> Result<Option<M>>,
    ) -> Result<()> {
        for (kind, _) in self.ids.present() {
            let Some(dtype) = of(kind).filter(|_| self.memory[kind].is_none()) else { continue };
            self.memory[kind] = output(kind, if self.in_f32 { dtype.accumulator() } else { dtype })?;
        }
        Ok(())
    }

    /// Has a backward write or add there.
    pub(super) fn view_in<'a, B: NativeMemory<Output = M>>(
        &'a mut self,
        into: &mut GradientsMut<'a, B::Core>,
    ) -> Result<()> {
        into.accumulate = self.accumulate;
        for (kind, memory) in self.memory.as_mut() {
            if let Some(memory) = memory {
                into.set(kind, B::view_mut(memory)?);
            }
        }
        Ok(())
    }
}
