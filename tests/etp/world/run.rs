//! What is trained, and its first values.

use super::*;

/// Model that is trained, and how it is spread. Rank w has experts of `w % ep`; of the ranks with the same, `etp` in a
/// row share a shard group.
#[derive(Debug, Clone)]
pub struct Run {
    pub world: usize,
    pub ep: usize,
    pub etp: usize,
    pub layers: usize,
    pub steps: usize,
    pub microbatches: usize,
    pub dtype: DType,
    /// Of first weights and routers.
    pub deviation: f64,
    pub config: MoeConfig,
    pub options: EtpOptions,
    pub payload: Payload,
    /// How tokens travel, and whether what returns of them is added in the order of k.
    pub dispatcher: DispatcherKind,
    pub in_k_order: bool,
}

impl Run {
    /// Over four ranks, or as many as there are.
    pub fn new<D: Chained>(device: &D, ep: usize, etp: usize) -> Self {
        let options = EtpOptions { reduction: moebius::etp::Reduction::Pairwise, ..EtpOptions::default() };
        let config = MoeConfig::new(8, 6, 4, 2);
        let (dtype, payload) = (DType::F32, Payload::Plain);
        let world = device.up_to(4);
        let (dispatcher, in_k_order) = (DispatcherKind::Auto, false);
        let (layers, steps, microbatches, deviation) = (3, 2, 1, 1.0);
        Self {
            world,
            ep,
            etp,
            layers,
            steps,
            microbatches,
            dtype,
            deviation,
            config,
            options,
            payload,
            dispatcher,
            in_k_order,
        }
    }

    /// Of a rank's group, in which a rank has so many tokens at most.
    pub fn group(&self, most: usize) -> GroupConfig {
        let Self { dispatcher, in_k_order, .. } = *self;
        // Two hosts, for dispatchers that know any.
        let ranks_per_host = self.ep.div_ceil(2);
        let new = GroupConfig::new(self.config.router.num_experts, most);
        GroupConfig { dispatcher, in_k_order, ranks_per_host, ..new }
    }

    pub fn replicas(&self) -> usize {
        self.world / self.ep / self.etp
    }

    pub fn tokens(&self, rank: usize) -> usize {
        5 + rank
    }

    /// Sizes of one layer's weights on one rank.
    pub fn dims(&self) -> [[usize; 3]; 2] {
        let (local, h, i) = (self.config.router.num_experts / self.ep, self.config.hidden, self.config.intermediate);
        [[local, self.config.up_rows(), h], [local, h, i]]
    }

    /// A tensor that depends on `what` alone.
    pub fn tensor(&self, what: [usize; 4], dims: &[usize], deviation: f64) -> Tensor {
        let seed = what.iter().fold(7u64, |s, v| s.wrapping_mul(0x1000_0000_01b3).wrapping_add(*v as u64));
        let mut random = Random::new(super::super::devices::seed::seed(seed));
        let values = (0..dims.iter().product()).map(|_| (deviation * random.normal()) as f32).collect();
        of_type(self.dtype, values, dims)
    }

    /// First values of the experts of EP rank `p`.
    pub fn weight(&self, p: usize, layer: usize, which: usize) -> Tensor {
        let dims = self.dims()[which];
        let (e, each) = (self.config.router.num_experts, dims[1] * dims[2]);
        let all = self.tensor([1, layer, which, 0], &[e, dims[1], dims[2]], self.deviation).to_f64();
        let own = &all[p * dims[0] * each..][..dims[0] * each];
        of_type(self.dtype, own.iter().map(|v| *v as f32).collect(), &dims)
    }
}

/// A whole stack of experts as it comes out of a quantized form, each expert quantized by itself.
pub fn through(payload: Payload, whole: &Tensor) -> Tensor {
    let (cpu, [l, rows, columns]) = (Cpu::poisoning(), <[usize; 3]>::try_from(whole.dims()).unwrap());
    let mut values = Vec::new();
    for expert in whole.as_bytes().chunks(rows * columns * whole.dtype().size()) {
        let matrix = Matrix::new(TensorRef::new(expert, whole.dtype(), &[rows, columns]).unwrap()).unwrap();
        let mut out = Tensor::empty(&cpu, whole.dtype(), &[rows, columns]).unwrap();
        let dims = [rows, columns];
        match payload {
            Payload::Nvfp4 => {
                let format = Nvfp4::TE;
                let mut form = Nvfp4Tensors::empty(&cpu, &format, dims, Direction::Rows).unwrap();
                let call = Quantize { format: &format, matrix, rows: Some(form.view_mut()), columns: None };
                cpu.quantize(call).unwrap();
                cpu.dequantize(form.dequantize(&format, out.view_mut())).unwrap();
            }
            Payload::Mxfp8 => {
                let mut form = Mxfp8Tensors::empty(&cpu, dims, Direction::Rows).unwrap();
                let rows = Some(form.view_mut());
                cpu.quantize_mxfp8(QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows, columns: None }).unwrap();
                let (codes, scales) = (form.codes.view(), form.scales.view());
                let (direction, out) = (Direction::Rows, out.view_mut());
                let call = moebius::quant::DequantizeMxfp8 { direction, codes, scales, out };
                cpu.dequantize_mxfp8(call).unwrap();
            }
            Payload::Fp8Block => {
                let mut form = Fp8BlockTensors::empty(&cpu, dims).unwrap();
                cpu.quantize_fp8_block(QuantizeFp8Block { matrix, rows: form.view_mut() }).unwrap();
                cpu.dequantize_fp8_block(form.dequantize(out.view_mut())).unwrap();
            }
            _ => return of_type(whole.dtype(), whole.to_f64().iter().map(|v| *v as f32).collect(), whole.dims()),
        }
        values.extend(out.to_f64().iter().map(|v| *v as f32));
    }
    of_type(whole.dtype(), values, &[l, rows, columns])
}

pub fn of_type(dtype: DType, values: Vec<f32>, dims: &[usize]) -> Tensor {
    match dtype {
        DType::F32 => Tensor::from_vec(values, dims),
        DType::BF16 => Tensor::from_vec(values.into_iter().map(half::bf16::from_f32).collect::<Vec<_>>(), dims),
        other => panic!("no test in {other}"),
    }
    .unwrap()
}
