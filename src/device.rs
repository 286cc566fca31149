//! Where memory lives. The device is a type: both host frameworks choose it before they call this crate, so
//! generic code needs neither matches nor back-ends that answer "not supported".

use std::fmt::Debug;
use std::ops::Range;

use crate::dtype::DType;
use crate::error::Result;

pub(crate) mod sealed {
    /// Keeps [`super::Device`] closed: its contracts are this crate's own.
    pub trait Sealed {}
}

/// How an order between the work of two streams came about.
#[cfg(any(feature = "burn", feature = "cuda"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// Nothing had to wait.
    Nothing,
    /// The GPU will wait; the host went on.
    Device,
    /// The host waited for the GPU.
    Host,
}

/// A hook that a device calls before a capture ends, with whether the captured calls have failed; an error of its own is
/// the capture's.
pub type CaptureHook = dyn Fn(bool) -> Result<()> + Send + Sync;

/// A kind of memory and the order of work on it: a device is also its stream, and a second stream of the same memory is
/// a second device. Sealed: [`Cpu`](crate::cpu::Cpu) now, CUDA beside it.
///
/// Buffers and views are untyped bytes; [`TensorRef`](crate::TensorRef) and [`TensorMut`](crate::TensorMut) give
/// them a dtype and a shape.
pub trait Device: sealed::Sealed + Clone + Debug + Send + Sync + 'static {
    /// Owned memory of one dtype.
    type Buffer: Debug + Send + Sync + 'static;
    /// Read-only view of bytes.
    type Ref<'a>: Copy + Debug + Send + Sync;
    /// Exclusive view of bytes.
    type Mut<'a>: Debug + Send;
    /// Completion of work enqueued earlier (`()` where every call runs to its end).
    type Event: Debug + Send + Sync;

    /// Allocates `count` elements of unspecified content.
    ///
    /// # Errors
    /// A size that does not fit the address space or that there is no memory for; a driver's.
    fn alloc(&self, dtype: DType, count: usize) -> Result<Self::Buffer>;
    /// Views an owned buffer's bytes.
    fn view(buffer: &Self::Buffer) -> Self::Ref<'_>;
    /// Views an owned buffer's bytes, exclusively.
    fn view_mut(buffer: &mut Self::Buffer) -> Self::Mut<'_>;
    /// Length of a view in bytes.
    fn len(view: Self::Ref<'_>) -> usize;
    /// Length of an exclusive view in bytes.
    fn len_mut(view: &Self::Mut<'_>) -> usize;
    /// Sub-range of a view; the caller has checked the bounds.
    fn slice<'a>(view: Self::Ref<'a>, range: Range<usize>) -> Self::Ref<'a>;
    /// Sub-range of an exclusive view; the caller has checked the bounds.
    fn slice_mut<'a>(view: Self::Mut<'a>, range: Range<usize>) -> Self::Mut<'a>;
    /// Both parts of an exclusive view; the caller has checked the bounds.
    fn split_mut<'a>(view: Self::Mut<'a>, at: usize) -> (Self::Mut<'a>, Self::Mut<'a>);
    /// Shorter borrow of a view (generic code cannot see that views are covariant).
    fn shorten<'s, 'l: 's>(view: Self::Ref<'l>) -> Self::Ref<'s>;
    /// Shorter exclusive borrow of an exclusive view.
    fn reborrow<'s>(view: &'s mut Self::Mut<'_>) -> Self::Mut<'s>;
    /// Shared borrow of an exclusive view.
    fn downgrade<'s>(view: &'s Self::Mut<'_>) -> Self::Ref<'s>;
    /// Sets every byte to zero.
    ///
    /// # Errors
    /// A driver's; none on the CPU.
    fn zero(&self, view: Self::Mut<'_>) -> Result<()>;
    /// Copies bytes between views of equal length.
    ///
    /// # Errors
    /// Views of different lengths; a driver's.
    fn copy(&self, from: Self::Ref<'_>, to: Self::Mut<'_>) -> Result<()>;
}
