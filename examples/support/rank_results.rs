//! Results that ranks exchange beside the layers' own collectives.

use std::collections::BTreeMap;
use std::error::Error;

#[path = "gather.rs"]
mod gather;

#[allow(unused_imports, reason = "every program takes a part")]
pub use gather::{gather, gather_over};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

type AnyError = Box<dyn Error + Send + Sync>;

/// Named arrays; integers up to 2⁵³ and f32 are exact.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct RankResults(BTreeMap<String, (Vec<usize>, Vec<f64>)>);

impl RankResults {
    /// Adds an array of `dims`.
    pub fn put(&mut self, name: impl Into<String>, dims: &[usize], values: impl IntoIterator<Item = f64>) {
        self.0.insert(name.into(), (dims.to_vec(), values.into_iter().collect()));
    }

    /// Dims and values of an array.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn get(&self, name: &str) -> Result<(&[usize], &[f64]), AnyError> {
        self.find(name).ok_or_else(|| format!("a rank has told nothing of {name}").into())
    }

    /// The same where it may be absent.
    pub fn find(&self, name: &str) -> Option<(&[usize], &[f64])> {
        self.0.get(name).map(|(dims, values)| (&dims[..], &values[..]))
    }

    /// Arrays whose name begins so, with the rest of the name.
    pub fn starting<'a>(&'a self, start: &'a str) -> impl Iterator<Item = (&'a str, &'a [usize], &'a [f64])> {
        self.0
            .iter()
            .filter_map(move |(name, (dims, values))| Some((name.strip_prefix(start)?, &dims[..], &values[..])))
    }

    /// As bytes to send.
    ///
    /// # Errors
    /// Dims that do not fit the values.
    pub fn pack(&self) -> Result<Vec<u8>, AnyError> {
        let view = |(name, (dims, values)): (&String, &(Vec<usize>, Vec<f64>))| -> Result<_, AnyError> {
            Ok((name.clone(), (dims.clone(), bytemuck::cast_slice::<f64, u8>(values).to_vec())))
        };
        let whole = self.0.iter().map(view).collect::<Result<Vec<_>, _>>()?;
        let views =
            whole.iter().map(|(name, (dims, bytes))| Ok((name, TensorView::new(Dtype::F64, dims.clone(), bytes)?)));
        Ok(safetensors::serialize(views.collect::<Result<Vec<_>, AnyError>>()?, None)?)
    }

    /// Reads the bytes of [`RankResults::pack`].
    ///
    /// # Errors
    /// Bytes that are none of its.
    pub fn unpack(bytes: &[u8]) -> Result<Self, AnyError> {
        let found = SafeTensors::deserialize(bytes)?;
        let array = |view: &TensorView<'_>| {
            let values = view.data().as_chunks().0.iter().map(|v| f64::from_ne_bytes(*v)).collect();
            (view.shape().to_vec(), values)
        };
        Ok(Self(found.iter().map(|(name, view)| (name.to_string(), array(&view))).collect()))
    }
}
