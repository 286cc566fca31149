//! stub
use crate::kernels::Kernels;
/// stub
#[derive(Debug)]
pub struct AllGather<D: Kernels>(std::marker::PhantomData<D>);
