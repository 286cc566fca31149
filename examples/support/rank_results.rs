//! Results that ranks exchange beside the layers' own collectives.

use std::collections::BTreeMap;
use std::error::Error;

use moebius::candle::DeviceGroup;
use moebius::comm::{Communicator, Tag};
use moebius::cpu::Cpu;
use moebius::ep::EpGroup;
use moebius::kernels::Kernels;
use moebius::{DType, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

type AnyError = Box<dyn Error + Send + Sync>;

/// Every rank's results, in rank order.
///
/// # Errors
/// A collective's.
pub fn gather(group: &DeviceGroup, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, AnyError> {
    if let Some(group) = group.on::<Cpu>() {
        return gather_on(group, tag, own);
    }
    #[cfg(feature = "cuda")]
    if let Some(group) = group.on::<moebius::cuda::Cuda>() {
        return gather_on(group, tag, own);
    }
    Err("a group on a device that the examples do not know".into())
}

fn gather_on<D: Kernels>(group: &EpGroup<D>, tag: Tag, own: &[u8]) -> Result<Vec<Vec<u8>>, AnyError> {
    let mut group = group.lock();
    let device = group.device().clone();
    gather_over(&device, group.dispatcher().communicator(), tag, own)
}

/// The same over a communicator.
///
/// # Errors
/// The collective's.
pub fn gather_over<D: Kernels>(
    device: &D,
    comm: &mut dyn Communicator<D>,
    tag: Tag,
    own: &[u8],
) -> Result<Vec<Vec<u8>>, AnyError> {
    let ranks = comm.size();
    let mut exchange = |bytes: &[u8]| -> moebius::Result<Vec<u8>> {
        let mut send = Tensor::empty(device, DType::U8, &[bytes.len()])?;
        device.upload(bytes, send.view_mut())?;
        let mut recv = Tensor::empty(device, DType::U8, &[ranks, bytes.len()])?;
        comm.all_gather(tag, send.view(), recv.view_mut())?;
        device.download(recv.view())
    };
    let lengths = exchange(&(own.len() as u64).to_le_bytes())?;
    let lengths = || lengths.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n) as usize);
    let most = lengths().max().unwrap_or(0).max(1);
    let mut padded = own.to_vec();
    padded.resize(most, 0);
    let all = exchange(&padded)?;
    Ok(all.chunks_exact(most).zip(lengths()).map(|(bytes, length)| bytes[..length].to_vec()).collect())
}

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
