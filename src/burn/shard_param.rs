//! Parameters of modules that are shards of a chain: as burn has them, and as the chain reads them.

use std::fmt::{self, Debug};
use std::sync::{Arc, PoisonError, RwLock};

use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorMetadata, TensorPrimitive};

use crate::checkpoint::RankPart;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::etp::{Chain, ShardSource};
use crate::optim::ParamShard;
use crate::tensor::TensorRef;

use super::backend::{CoreDevice, MoeBackend, Named, NativeBackend, NativeMemory, ResultSpec, between, core_dtype};

/// A floating parameter of a module, whatever the number of its dimensions.
pub trait FloatParam<B: MoeBackend>: Debug {
    /// Its id.
    fn id(&self) -> ParamId;

    /// Its sizes.
    fn dims(&self) -> Vec<usize>;

    /// Its element type.
    fn dtype(&self) -> burn::tensor::DType;

    /// Whether gradients are tracked of it.
    fn is_tracked(&self) -> bool;

    /// Its value, in the memory that the core works on.
    fn native(&self) -> FloatTensor<B::Native>;

    /// Sizes of a shard `[S, C]` in as many dimensions as the parameter has.
    fn shard_dims(&self, shard: [usize; 2]) -> Vec<usize>;

    /// Makes the parameter another value, under its id.
    fn set(&mut self, value: FloatTensor<B::Native>);

    /// Gives an optimizer its gradient, in the parameter's type unless `as_summed`.
    fn register(&self, gradient: FloatTensor<B::Native>, as_summed: bool, gradients: &mut GradientsParams)
    where
        B: AutodiffBackend;
}

impl<B: MoeBackend, const D: usize> FloatParam<B> for Param<Tensor<B, D>> {
    fn id(&self) -> ParamId {
        self.id
    }

    fn dims(&self) -> Vec<usize> {
        self.shape().to_vec()
    }

    fn dtype(&self) -> burn::tensor::DType {
        self.val().dtype()
    }

    fn is_tracked(&self) -> bool {
        self.is_require_grad()
    }

    fn native(&self) -> FloatTensor<B::Native> {
        B::to_native(self.val().into_primitive().tensor())
    }

    fn shard_dims(&self, [rows, width]: [usize; 2]) -> Vec<usize> {
        match D {
            1 => vec![rows * width],
            _ => [vec![1; D.saturating_sub(2)], vec![rows, width]].concat(),
        }
    }

    fn set(&mut self, value: FloatTensor<B::Native>) {
        let tensor = tensor::<B, D>(value).set_require_grad(self.is_require_grad());
        *self = Self::initialized(self.id, tensor);
    }

    fn register(&self, gradient: FloatTensor<B::Native>, as_summed: bool, gradients: &mut GradientsParams)
    where
        B: AutodiffBackend,
    {
        let (gradient, dtype) = (tensor::<B, D>(gradient).inner(), FloatParam::dtype(self));
        let gradient = if as_summed || gradient.dtype() == dtype { gradient } else { gradient.cast(dtype) };
        gradients.register::<B::InnerBackend, D>(self.id, gradient);
    }
}

/// This rank's shard of a weight, as the last [`ShardedParams::begin`](super::ShardedParams::begin) found it.
pub(super) struct ParamSource<B: NativeMemory> {
    device: B::Core,
    pub(super) dtype: DType,
    /// `[S, C]`.
    dims: [usize; 2],
    tensor: RwLock<B::Shared>,
}

impl<B: NativeMemory> fmt::Debug for ParamSource<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ParamSource{:?}", self.dims)
    }
}

impl<B: NativeMemory> ShardSource<B::Core> for ParamSource<B> {
    fn read(&self, visit: &mut dyn FnMut(TensorRef<'_, B::Core>) -> Result<()>) -> Result<()> {
        let tensor = self.tensor.read().unwrap_or_else(PoisonError::into_inner);
        visit(B::view_shared(&self.device, &tensor)?.reshape(&self.dims)?)
    }
}

impl<B: NativeMemory> ParamSource<B> {
    /// Of a parameter that is a shard `[S, C]`.
    pub(super) fn of<M: MoeBackend<Native = B>>(
        device: &B::Core,
        name: &str,
        param: &dyn FloatParam<M>,
        dims: [usize; 2],
    ) -> Result<Arc<Self>> {
        let tensor = B::contiguous(param.native());
        let named = || Named { name, tensor: &tensor };
        let view = B::view(device, named())?;
        Error::check_shape("ShardedParams", name, &param.shard_dims(dims), view.dims())?;
        let dtype = view.dtype();
        let tensor = RwLock::new(B::share(device, named())?);
        Ok(Arc::new(Self { device: device.clone(), dtype, dims, tensor }))
    }

    /// Refuses a parameter of another shape or type than the shard's.
    pub(super) fn check<M: MoeBackend<Native = B>>(&self, call: &'static str, param: &dyn FloatParam<M>) -> Result<()> {
        Error::check_shape(call, "shard", &param.shard_dims(self.dims), &param.dims())?;
        Error::check_dtype(call, "shard", self.dtype, core_dtype(call, "shard", param.dtype())?)
    }

    /// Takes another tensor; gives back the one before.
    pub(super) fn replace(&self, tensor: B::Shared) -> B::Shared {
        std::mem::replace(&mut *self.tensor.write().unwrap_or_else(PoisonError::into_inner), tensor)
    }
}

/// Makes a whole parameter this rank's shard of a weight of sizes `dims`, which has as many elements.
pub(super) fn cut<B: MoeBackend>(
    chain: &Chain<CoreDevice<B>>,
    name: &str,
    param: &mut dyn FloatParam<B>,
    dims: &[usize],
) -> Result<Arc<ParamSource<B::Native>>> {
    let (device, whole) = (chain.device(), B::Native::contiguous(param.native()));
    let shards = chain.shards(dims)?;
    let view = B::Native::view(device, Named { name, tensor: &whole })?.reshape(dims)?;
    let spec = ResultSpec { dtype: view.dtype(), dims: &param.shard_dims(shards.shard_dims()) };
    let mut output = B::Native::output(device, &whole, spec)?;
    let cut = || {
        let shard = shards.cut(device, view, chain.rank())?;
        device.copy(shard.view().data(), B::Native::view_mut(&mut output)?.into_data())?;
        Ok(shard)
    };
    drop(between::<B::Native, _>(device, |_| (), cut)?);
    param.set(B::Native::float(output)?);
    ParamSource::of(device, name, &*param, shards.shard_dims())
}

/// A rank's part of a parameter, for a save that reads it piece by piece.
pub(super) fn part_of<B: NativeBackend>(
    name: &str,
    tensor: FloatTensor<B>,
    shard: ParamShard,
) -> Result<RankPart<'static>> {
    let dtype = core_dtype("Checkpoint::save_parts", name, tensor.dtype())?;
    let count = tensor.shape().num_elements();
    let read = move |range: std::ops::Range<usize>| {
        let flat = B::float_reshape(tensor.clone(), Shape::new([count]));
        let piece = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat)).slice([range]);
        Ok(piece.into_data().as_bytes().to_vec())
    };
    Ok(RankPart::new(dtype, shard, read))
}

pub(super) fn tensor<B: MoeBackend, const D: usize>(native: FloatTensor<B::Native>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::from_native(native)))
}
