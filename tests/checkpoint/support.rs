//! Plain, independent reading and writing of safetensors for the checkpoint tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moebius::DType;
use moebius::checkpoint::{BlockParams, Checkpoint, LoadOptions};
use moebius::cpu::Cpu;
use moebius::layer::ParamKind;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::seed;

pub fn options(rank: usize, ranks: usize, dtype: Option<DType>) -> LoadOptions {
    LoadOptions { rank, ranks, dtype }
}

/// A shipped folder.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// All shipped folders.
pub fn golden() -> Vec<PathBuf> {
    let root = fixture("");
    let folders: Vec<PathBuf> =
        files(&root).into_iter().map(|name| root.join(name)).filter(|path| path.join("config.json").exists()).collect();
    assert!(folders.len() >= 14, "shipped folders in {}: {}", root.display(), folders.len());
    folders
}

/// Sorted names in a folder.
pub fn files(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = std::fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Tensors of a file.
pub type Tensors = BTreeMap<String, Raw>;

/// A tensor's bytes as they lie on disk.
#[derive(Debug, Clone, PartialEq)]
pub struct Raw {
    /// Lower-case name of the type.
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// All tensors of a file.
pub fn raw(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let convert = |(name, view): (String, TensorView<'_>)| {
        let dtype = view.dtype().to_string().to_lowercase();
        (name, Raw { dtype, shape: view.shape().to_vec(), data: view.data().to_vec() })
    };
    file.tensors().into_iter().map(convert).collect()
}

impl Raw {
    pub fn new(dtype: &str, shape: &[usize], data: Vec<u8>) -> Self {
        Self { dtype: dtype.to_string(), shape: shape.to_vec(), data }
    }

    pub fn f32(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let data: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(data.len(), 4 * shape.iter().product::<usize>());
        Self::new("f32", shape, data)
    }

    pub fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, "f32");
        self.data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

/// Writes a file.
pub fn write(path: &Path, tensors: &Tensors) {
    let dtype = |name: &str| match name {
        "f64" => Dtype::F64,
        "f32" => Dtype::F32,
        "f16" => Dtype::F16,
        "bf16" => Dtype::BF16,
        "i64" => Dtype::I64,
        "u8" => Dtype::U8,
        "f8_e4m3" => Dtype::F8_E4M3,
        "f8_e8m0" => Dtype::F8_E8M0,
        other => panic!("{other}"),
    };
    let view = |raw: &Raw| (dtype(&raw.dtype), raw.shape.clone());
    let views = tensors.iter().map(|(name, raw)| {
        let (dtype, shape) = view(raw);
        (name.as_str(), TensorView::new(dtype, shape, &raw.data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A folder with one file of tensors.
pub fn folder(config: &serde_json::Value, tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    write(&dir.path().join("model.safetensors"), tensors);
    dir
}

/// A fixture's configuration.
pub fn config(name: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap()
}

/// Pseudo-random words (SplitMix64) of a place's own number.
pub fn random(own: u64) -> impl FnMut() -> u64 {
    let mut state = seed::seed(own);
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Two blocks' parameters are the same bits.
pub fn assert_same(a: &BlockParams, b: &BlockParams, what: &str) {
    let same = |name: &str, a: Option<&moebius::Tensor<Cpu>>, b: Option<&moebius::Tensor<Cpu>>| match (a, b) {
        (None, None) => {}
        (Some(a), Some(b)) => {
            assert_eq!((a.dtype(), a.dims()), (b.dtype(), b.dims()), "{what}: {name}");
            assert!(a.as_bytes() == b.as_bytes(), "{what}: {name} differs");
        }
        _ => panic!("{what}: {name} is there on one side only"),
    };
    ParamKind::ALL.into_iter().for_each(|kind| same(kind.name(), a.get(kind), b.get(kind)));
}

/// E4M3 from its definition.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match exponent {
        0 => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code >> 7 == 1 { -size } else { size }
}

/// E2M1 from its definition.
pub fn e2m1(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
    let size = match exponent {
        0 => mantissa * 0.5,
        _ => (1.0 + mantissa * 0.5) * 2f32.powi(exponent - 1),
    };
    if code >> 3 == 1 { -size } else { size }
}

/// Random bytes without the two NaNs of E4M3.
pub fn codes(next: &mut impl FnMut() -> u64, count: usize) -> Vec<u8> {
    (0..count).map(|_| next() as u8).map(|b| if b & 127 == 127 { 0 } else { b }).collect()
}

/// Random scales in E4M3: what a quantizer writes is not negative.
pub fn scales(next: &mut impl FnMut() -> u64, count: usize) -> Vec<u8> {
    codes(next, count).into_iter().map(|b| b & 127).collect()
}

/// Holds a tensor's elements against `value(matrix, row, column)`, bit for bit.
pub fn expect(checkpoint: &Checkpoint, name: &str, dims: &[usize], value: impl Fn(usize, usize, usize) -> f32) {
    let tensor = checkpoint.tensor(name, Some(DType::F32)).unwrap();
    assert_eq!(tensor.dims(), dims, "{name}");
    let [rows, columns] = [dims[dims.len() - 2], dims[dims.len() - 1]];
    for (i, found) in tensor.as_slice::<f32>().unwrap().iter().enumerate() {
        let expected = value(i / (rows * columns), i / columns % rows, i % columns);
        assert_eq!(found.to_bits(), expected.to_bits(), "{name}[{i}]: {found} {expected}");
    }
}
