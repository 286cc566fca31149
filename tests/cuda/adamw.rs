//! AdamW on a GPU beside what `optimizer` checks of any device: more parameters than a launch takes, addresses that do
//! not allow whole words, and steps that are captured.

use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::optim::{AdamW, AdamWOptions, GroupOptions, LossScaling, ParamShard, ParamSpec, StepDevice, StepTensor};
use moebius::{DType, Device, Result, Tensor, TensorMut, TensorRef};

use crate::harness::tests;
use crate::optimizer::{Target, seed};

tests!(many_parameters_at_odd_addresses, a_captured_step_replays_eager_bits, nothing_waits_for_the_gpu);

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn options(moments: DType) -> AdamWOptions {
    let loss_scaling = Some(LossScaling { interval: 2, ..LossScaling::default() });
    let group = GroupOptions { lr: 0.01, ..GroupOptions::default() };
    AdamWOptions { group, max_norm: Some(1.0), loss_scaling, moments, seed: 11 }
}

/// Parameters of one group, `shift` elements into their memory.
struct Params<D: StepDevice> {
    adam: AdamW<D>,
    params: Vec<Tensor<D>>,
    gradients: Vec<Tensor<D>>,
    sizes: Vec<usize>,
    shift: usize,
}

impl<D: Target> Params<D> {
    fn new(device: &D, moments: DType, sizes: &[usize], shift: usize) -> Self {
        let spec = |(i, size): (usize, &usize)| ParamSpec {
            name: i.to_string(),
            shard: ParamShard::whole(&[*size]),
            dtype: TYPES[i % 3],
            group: 0,
        };
        let options = options(moments);
        let specs = sizes.iter().enumerate().map(spec).collect();
        let adam = AdamW::new(device, options, &[options.group], specs, None).expect("an optimizer");
        let draw = |i: usize, of: usize, own: u64| {
            let count = sizes[i] + shift;
            device.put(TYPES[of % 3], &seed::normal(own + i as u64, count), &[count])
        };
        let params = (0..sizes.len()).map(|i| draw(i, i, 500)).collect();
        let gradients = (0..sizes.len()).map(|i| draw(i, i / 3, 900)).collect();
        let mut made = Self { adam, params, gradients, sizes: sizes.to_vec(), shift };
        for i in 0..sizes.len() {
            let param = part(&made.params[i], made.shift, made.sizes[i]);
            made.adam.read_param(i, param).expect("main weights");
        }
        made
    }

    fn step(&mut self) -> Result<()> {
        let Self { adam, params, gradients, sizes, shift } = self;
        let views: Vec<_> = gradients.iter().zip(&*sizes).map(|(g, n)| part(g, *shift, *n)).collect();
        let all: Vec<_> = views.iter().map(|v| Some(v.borrow())).collect();
        adam.begin(&all)?;
        let tensors = params.iter_mut().zip(&views).zip(&*sizes).enumerate();
        let tensors = tensors.map(|(index, ((param, gradient), size))| {
            let dtype = param.dtype();
            let bytes = *shift * dtype.size()..(*shift + *size) * dtype.size();
            let data = D::slice_mut(param.view_mut().into_data(), bytes);
            Ok(StepTensor { index, param: TensorMut::new(data, dtype, &[*size])?, gradient: gradient.borrow() })
        });
        adam.update(tensors.collect::<Result<_>>()?)
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        let stats = self.adam.stats().expect("figures");
        let figures = [stats.norm, stats.factor, stats.loss_scale, stats.steps as f64, stats.skipped as f64];
        let params = self.params.iter().map(|p| self.adam.device().download(p.view()).expect("a download"));
        params.chain([figures.iter().flat_map(|f| f.to_le_bytes()).collect()]).collect()
    }
}

/// Elements of a tensor from `shift` on.
fn part<D: Device>(t: &Tensor<D>, shift: usize, count: usize) -> TensorRef<'_, D> {
    let size = t.dtype().size();
    let data = D::slice(t.view().data(), shift * size..(shift + count) * size);
    TensorRef::new(data, t.dtype(), &[count]).expect("a part")
}

/// Several launches of each kernel; first elements that lie on 16 bytes, and that do not.
fn many_parameters_at_odd_addresses(cuda: &Cuda) {
    let sizes: Vec<usize> = (0..101).map(|i| [1, 8191, 8192, 8193, 40, 4097, 123_457][i % 7]).collect();
    [0, 1, 2].into_iter().for_each(|shift| gives_the_cpus_bits(cuda, &sizes, shift));
}

/// Steps over parameters of these sizes, `shift` elements into their memory.
pub fn gives_the_cpus_bits(cuda: &Cuda, sizes: &[usize], shift: usize) {
    for moments in [DType::F32, DType::BF16] {
        let (mut found, mut expected) =
            (Params::new(cuda, moments, sizes, shift), Params::new(&Cpu::new(), moments, sizes, shift));
        for _ in 0..3 {
            found.step().expect("a step");
            expected.step().expect("a step");
        }
        assert!(found.bytes() == expected.bytes(), "moments in {moments}, {shift} elements in");
    }
}

/// Counts, bias corrections and the loss's factor live on the device, so a replay goes on where the last one ended; a
/// learning rate that is changed between replays counts from the next one on.
fn a_captured_step_replays_eager_bits(cuda: &Cuda) -> Result<()> {
    let sizes = [70_000, 33, 8192, 5];
    for moments in [DType::F32, DType::BF16] {
        let (mut eager, mut replayed) = (Params::new(cuda, moments, &sizes, 0), Params::new(cuda, moments, &sizes, 0));
        eager.step()?;
        replayed.step()?;
        let mut graph = cuda.capture(|| replayed.step())?;
        for replay in 0..20 {
            if replay == 10 {
                let halved = GroupOptions { lr: 0.005, ..eager.adam.groups()[0] };
                eager.adam.set_group(0, halved)?;
                replayed.adam.set_group(0, halved)?;
            }
            eager.step()?;
            graph.replay()?;
        }
        assert!(replayed.bytes() == eager.bytes(), "moments in {moments}");
    }
    Ok(())
}

/// A capture refuses whatever waits for the GPU or copies from the host.
fn nothing_waits_for_the_gpu(cuda: &Cuda) -> Result<()> {
    let mut params = Params::new(cuda, DType::F32, &[70_000, 33], 0);
    params.step()?;
    let graph = cuda.capture(|| (0..3).try_for_each(|_| params.step()))?;
    drop(graph);
    Ok(())
}
