//! stub
use crate::kernels::Kernels;
/// stub
#[derive(Debug)]
pub struct AllToAll<D: Kernels>(std::marker::PhantomData<D>);
