//! stub
use crate::kernels::Kernels;
/// stub
#[derive(Debug)]
pub struct Local<D: Kernels>(std::marker::PhantomData<D>);
