//! Quantized weights that Hopper's dense kernels take de-quantized, some experts at a time.

use moebius::config::{Activation, WeightAt};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::*;
use moebius::quant::{Quantized, WeightFormat};
use moebius::weights::Weight;
use moebius::{DType, Error, Result, Tensor};

use crate::harness::{Random, tests};
use crate::stacks::{FORMATS, random};

tests!(
    a_weight_is_its_value_rounded_once,
    chunks_of_experts_do_not_show,
    captured_products_are_replayed,
    a_gradient_has_the_same_bits_among_few_and_many,
    a_segment_of_a_later_chunk_is_told,
);

/// Rows of each expert: more than a tile, none, one, and on average so many that fp8 blocks' forward is made so too.
const MANY: [usize; 8] = [130, 0, 1, 17, 300, 0, 5, 64];
const FEW: [usize; 8] = [1, 0, 1, 0, 3, 0, 0, 2];

/// Sizes of experts, all of whose weights are random.
#[derive(Debug, Clone, Copy)]
struct Experts {
    format: WeightFormat,
    dtype: DType,
    hidden: usize,
    inner: usize,
}

impl Experts {
    fn weights(&self) -> [Quantized<Cpu>; 2] {
        let mut numbers = Random::new(5);
        let (h, i) = (self.hidden, self.inner);
        let mut make = |dims, parts| random(&mut || numbers.next(), self.format, dims, parts);
        [make([8, 2 * i, h], 2), make([8, h, i], 1)]
    }
}

/// Values of a stack, in f32 as the format defines them, then rounded to a type.
fn rounded(cuda: &Cuda, weight: &Quantized<Cpu>, dtype: DType) -> Result<Tensor<Cuda>> {
    let mut values = Vec::new();
    for expert in 0..weight.dims()[0] {
        values.extend(weight.view().dequantize(expert)?.into_iter().map(f64::from));
    }
    cuda.write(&values, dtype, weight.dims())
}

/// All products' operands and results, of the last rows of each expert's many.
struct Products {
    segments: Segments<Cuda>,
    x: Tensor<Cuda>,
    map: Tensor<Cuda>,
    slot_weights: Tensor<Cuda>,
    biases: [Tensor<Cuda>; 2],
    d_y: Tensor<Cuda>,
    pre_given: Tensor<Cuda>,
    hidden_given: Tensor<Cuda>,
    forward: [Tensor<Cuda>; 3],
    backward: [Tensor<Cuda>; 4],
}

/// Names of the results, those of forward first.
const RESULTS: [&str; 7] = ["pre", "hidden", "y", "d_pre", "hidden again", "d_weights", "d_x"];

impl Products {
    fn new(cuda: &Cuda, experts: Experts, counts: [usize; 8]) -> Result<Self> {
        let Experts { dtype, hidden: h, inner: i, .. } = experts;
        let mut random = Random::new(17);
        let starts = MANY.iter().scan(0, |sum, many| Some(std::mem::replace(sum, *sum + many)));
        let of = |((start, many), count): ((usize, usize), usize)| start + many - count..start + many;
        let slots: Vec<usize> = starts.zip(MANY).zip(counts).flat_map(of).collect();
        let (n, all) = (slots.len(), MANY.iter().sum::<usize>());
        let offsets = counts.iter().scan(0, |sum, count| Some(std::mem::replace(sum, *sum + *count as i64)));
        let put = |values: Vec<i64>| Tensor::from_vec(values, &[8])?.to(cuda);
        let segments =
            Segments::new(put(offsets.collect())?, put(counts.iter().map(|count| *count as i64).collect())?, n);
        let mut rows = |width: usize, dtype: DType, scale: f64| -> Result<Tensor<Cuda>> {
            let values = random.tensor(&[all, width], dtype, scale)?.to_f64();
            let taken: Vec<f64> = slots.iter().flat_map(|s| values[s * width..][..width].iter().copied()).collect();
            cuda.write(&taken, dtype, &[n, width])
        };
        let (x, d_y) = (rows(h, dtype, 1.0)?, rows(h, dtype, 1.0)?);
        let (pre_given, hidden_given) = (rows(2 * i, dtype, 1.0)?, rows(i, dtype, 1.0)?);
        let slot_weights = rows(1, DType::F32, 1.0)?.reshape(&[n])?;
        let map = Tensor::from_vec((0..n as i32).collect(), &[n])?.to(cuda)?;
        let biases = [random.tensor(&[8, 2 * i], dtype, 1.0)?.to(cuda)?, random.tensor(&[8, h], dtype, 1.0)?.to(cuda)?];
        let empty = |width: usize| Tensor::empty(cuda, dtype, &[n, width]);
        let forward = [empty(2 * i)?, empty(i)?, empty(h)?];
        let backward = [empty(2 * i)?, empty(i)?, Tensor::empty(cuda, DType::F32, &[n])?, empty(h)?];
        Ok(Self { segments, x, map, slot_weights, biases, d_y, pre_given, hidden_given, forward, backward })
    }

    fn run(&mut self, cuda: &Cuda, [up, down]: [Weight<'_, Cuda>; 2]) -> Result<()> {
        let (segments, map, biases) = (&self.segments, &self.map, &self.biases);
        let ([pre, hidden, y], [d_pre, again, d_weights, d_x]) = (&mut self.forward, &mut self.backward);
        let weights = |at| Some(SlotWeights { values: self.slot_weights.view(), map: None, at });
        cuda.up(Up {
            rows: RowSource::mapped(self.x.view(), map.view()),
            segments,
            weight: up.borrow(),
            bias: Some(biases[0].view()),
            slot_weights: weights(WeightAt::Output),
            activation: Activation::SiluGlu,
            pre: Some(pre.view_mut()),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        })?;
        cuda.down(Down {
            rows: RowSource::direct(self.hidden_given.view()),
            segments,
            weight: down.borrow(),
            bias: Some(biases[1].view()),
            slot_weights: weights(WeightAt::Output),
            out: RowDest::direct(y.view_mut()),
        })?;
        cuda.down_bwd(DownBwd {
            grad: RowSource::mapped(self.d_y.view(), map.view()),
            segments,
            weight: down.borrow(),
            bias: Some(biases[1].view()),
            pre: self.pre_given.view(),
            slot_weights: weights(WeightAt::Output),
            activation: Activation::SiluGlu,
            d_pre: d_pre.view_mut(),
            hidden: Some(again.view_mut()),
            d_slot_weights: Some(d_weights.view_mut()),
        })?;
        cuda.up_dgrad(UpDgrad {
            d_pre: d_pre.view(),
            segments,
            weight: up.borrow(),
            input_weight: None,
            out: RowDest::direct(d_x.view_mut()),
        })
    }

    /// The results, in the order of their names.
    fn results(&self, cuda: &Cuda) -> Result<Vec<Vec<f64>>> {
        self.forward.iter().chain(&self.backward).map(|t| cuda.read(t.view())).collect()
    }

    /// Those of a run.
    fn made(&mut self, cuda: &Cuda, weights: &[Quantized<Cuda>; 2]) -> Result<Vec<Vec<f64>>> {
        // What an earlier run has left would pass for this one's.
        for t in self.forward.iter_mut().chain(&mut self.backward) {
            let nan = vec![0xff; t.bytes()];
            cuda.upload(&nan, t.view_mut())?;
        }
        self.run(cuda, weights.each_ref().map(|w| Weight::Quantized(w.view())))?;
        self.results(cuda)
    }
}

fn equal(found: &[Vec<f64>], expected: &[Vec<f64>], from: usize, what: &str) {
    for ((name, found), expected) in RESULTS.iter().zip(found).zip(expected).skip(from) {
        assert!(found.iter().all(|v| v.is_finite()), "{what}: {name} is not finite");
        let differ = found.iter().zip(expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differ, 0, "{what}: {name}: {differ} of {} elements", expected.len());
    }
}

fn on_device(cuda: &Cuda, weights: &[Quantized<Cpu>; 2]) -> Result<[Quantized<Cuda>; 2]> {
    let [up, down] = weights;
    Ok([up.to(cuda)?, down.to(cuda)?])
}

/// Whole tiles and ragged ones, blocks that begin anew with up, gathered rows and rows brought into order, long sums.
fn sizes(format: WeightFormat) -> Vec<(usize, usize)> {
    let mut sizes = vec![(256, 192), (320, 160), (32, 8224)];
    if format == WeightFormat::Fp8Block {
        sizes.push((264, 200));
    }
    sizes
}

/// The same kernel with the values themselves makes the same bits, so these are the values. Forward too with fp8 blocks.
fn a_weight_is_its_value_rounded_once(cuda: &Cuda) -> Result<()> {
    if !format!("{cuda:?}").contains("sm_90") {
        println!("skipped: other GPUs de-quantize in their products");
        return Ok(());
    }
    for format in FORMATS {
        for dtype in [DType::BF16, DType::F16] {
            for (hidden, inner) in sizes(format) {
                let experts = Experts { format, dtype, hidden, inner };
                let weights = experts.weights();
                let mut products = Products::new(cuda, experts, MANY)?;
                let found = products.made(cuda, &on_device(cuda, &weights)?)?;
                let [up, down] = [rounded(cuda, &weights[0], dtype)?, rounded(cuda, &weights[1], dtype)?];
                products.run(cuda, [up.view().into(), down.view().into()])?;
                let from = if format == WeightFormat::Fp8Block { 0 } else { 3 };
                equal(&found, &products.results(cuda)?, from, &format!("{experts:?}"));
            }
        }
    }
    Ok(())
}

/// An expert at a time, two or three, all of them: the same bits, and so again.
fn chunks_of_experts_do_not_show(cuda: &Cuda) -> Result<()> {
    for format in FORMATS {
        for dtype in [DType::BF16, DType::F16] {
            for (hidden, inner) in sizes(format) {
                let experts = Experts { format, dtype, hidden, inner };
                let weights = on_device(cuda, &experts.weights())?;
                let mut products = Products::new(cuda, experts, MANY)?;
                let expected = products.made(cuda, &weights)?;
                let one = 2 * 2 * inner * hidden;
                for bytes in [0, 2 * one, 3 * one, usize::MAX] {
                    let found = products.made(&cuda.limiting_weight_scratch(bytes), &weights)?;
                    equal(&found, &expected, 0, &format!("{experts:?}, {bytes} bytes"));
                }
            }
        }
    }
    Ok(())
}

/// The scratch is the graph's own, and other work between replays does not reach it.
fn captured_products_are_replayed(cuda: &Cuda) -> Result<()> {
    let cuda = &cuda.limiting_weight_scratch(0);
    for format in FORMATS {
        let experts = Experts { format, dtype: DType::BF16, hidden: 320, inner: 160 };
        let weights = on_device(cuda, &experts.weights())?;
        let mut products = Products::new(cuda, experts, MANY)?;
        let n = MANY.iter().sum::<usize>();
        let mut random = Random::new(23);
        let inputs = (0..3).map(|_| random.tensor(&[n, experts.hidden], experts.dtype, 1.0));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let mut eager = Vec::new();
        for input in &inputs {
            for t in [&mut products.x, &mut products.d_y] {
                cuda.upload(input.as_bytes(), t.view_mut())?;
            }
            eager.push(products.made(cuda, &weights)?);
        }
        let d_x = RESULTS.len() - 1;
        assert!(eager.windows(2).all(|w| w[0][d_x] != w[1][d_x]), "inputs differ, so results do");
        let views = || weights.each_ref().map(|w| Weight::Quantized(w.view()));
        let mut graph = cuda.capture(|| products.run(cuda, views()))?;
        for (input, expected) in inputs.iter().zip(&eager).rev() {
            for t in [&mut products.x, &mut products.d_y] {
                cuda.upload(input.as_bytes(), t.view_mut())?;
            }
            let others: Vec<_> = (0..4).map(|_| Tensor::zeros(cuda, DType::U8, &[1 << 20])).collect::<Result<_>>()?;
            graph.replay()?;
            equal(&products.results(cuda)?, expected, 0, &format!("{experts:?}, a replay"));
            for t in &others {
                assert!(cuda.download(t.view())?.iter().all(|b| *b == 0), "a replay wrote into another tensor");
            }
        }
    }
    Ok(())
}

/// Also on a device that was not asked for it: one kernel makes rows' gradients, whatever their number.
fn a_gradient_has_the_same_bits_among_few_and_many(cuda: &Cuda) -> Result<()> {
    for format in FORMATS {
        let experts = Experts { format, dtype: DType::BF16, hidden: 320, inner: 160 };
        let weights = on_device(cuda, &experts.weights())?;
        let all = Products::new(cuda, experts, MANY)?.made(cuda, &weights)?;
        let some = Products::new(cuda, experts, FEW)?.made(cuda, &weights)?;
        let ends = MANY.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        let slots: Vec<usize> = ends.zip(FEW).flat_map(|(end, few)| end - few..end).collect();
        for (name, (all, some)) in RESULTS.iter().zip(all.iter().zip(&some)).skip(3) {
            let width = some.len() / slots.len();
            let expected: Vec<f64> = slots.iter().flat_map(|s| all[s * width..][..width].to_vec()).collect();
            assert!(some.iter().all(|v| v.is_finite()), "{experts:?}: {name}");
            assert!(some.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{experts:?}: {name}");
        }
    }
    Ok(())
}

/// By its own number: one that does not fit its layout, and one that overlaps another chunk's.
fn a_segment_of_a_later_chunk_is_told(cuda: &Cuda) -> Result<()> {
    let cuda = &cuda.limiting_weight_scratch(0);
    let experts = Experts { format: WeightFormat::Nvfp4, dtype: DType::BF16, hidden: 64, inner: 32 };
    let [up, _] = on_device(cuda, &experts.weights())?;
    let d_pre = Tensor::zeros(cuda, DType::BF16, &[24, 64])?;
    for (segment, offset, count) in [(5, 20i64, 5i64), (5, -1, 2), (1, 4, 4)] {
        let (mut offsets, mut counts) = (vec![0i64; 8], vec![0i64; 8]);
        counts[0] = 8;
        (offsets[segment], counts[segment]) = (offset, count);
        let put = |values: Vec<i64>| Tensor::from_vec(values, &[8])?.to(cuda);
        let origin = Origin { rank: 2, layer: 9 };
        let segments = Segments::new(put(offsets)?, put(counts)?, 24).with_origin(origin);
        let mut out = Tensor::empty(cuda, DType::BF16, &[24, 64])?;
        cuda.up_dgrad(UpDgrad {
            d_pre: d_pre.view(),
            segments: &segments,
            weight: Weight::Quantized(up.view()),
            input_weight: None,
            out: RowDest::direct(out.view_mut()),
        })?;
        let found = Some((offset, count));
        let expected = Error::Segment { call: "up_dgrad", rank: 2, layer: 9, segment, found }.to_string();
        assert_eq!(cuda.check().err().map(|e| e.to_string()), Some(expected));
        // The segment that fits is served.
        assert!(cuda.read(out.view())?[..8 * 64].iter().all(|v| *v == 0.0), "segment {segment}");
    }
    Ok(())
}
