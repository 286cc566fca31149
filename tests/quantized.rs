//! Expert weights that stay quantized: each product against the same in f64 with the weights de-quantized, in every
//! format; and every quantized checkpoint folder run so, against its de-quantized golden.

mod common;

use std::path::Path;

use common::devices::{self, Target, cases};
use common::stacks::{self, FORMATS};
use common::support::compare::{difference, values};
use common::support::folder::{Folder, tokens};
use half::bf16;
use moebius::checkpoint::{Checkpoint, Form, LoadOptions, QuantizedBlock};
use moebius::config::{Activation, WeightAt};
use moebius::cpu::Cpu;
use moebius::ep::GroupConfig;
use moebius::kernels::*;
use moebius::layer::{Cotangents, GradientMask, Inputs, Layer, Mode, PerParam};
use moebius::quant::*;
use moebius::weights::Weight;
use moebius::{DType, MoeConfig, Tensor};

cases!(
    products_are_those_of_the_values,
    few_and_many_rows_and_ragged_sizes,
    a_row_has_the_same_bits_among_any_others,
    quantized_folders_match_their_goldens,
    quantized_weights_have_no_gradient,
    weights_that_do_not_fit_are_errors,
    a_block_is_what_its_config_says,
);

/// SplitMix64.
struct Random(u64);

impl Random {
    /// Numbers of a place's own number.
    fn new(own: u64) -> Self {
        Self(devices::seed::seed(own))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn values(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).collect()
    }

    fn weight(&mut self, format: WeightFormat, dims: [usize; 3], parts: usize) -> Quantized<Cpu> {
        stacks::random(&mut || self.next(), format, dims, parts)
    }
}

/// The stack's values.
fn exact(weight: &Quantized<Cpu>) -> Tensor<Cpu> {
    let values = (0..weight.dims()[0]).flat_map(|e| weight.view().dequantize(e).unwrap());
    Tensor::from_vec(values.map(f64::from).collect(), weight.dims()).unwrap()
}

/// A layer's products: sizes, and filled slots of each expert, segments padded to a multiple of 8.
struct Case {
    format: WeightFormat,
    hidden: usize,
    inner: usize,
    counts: [i64; 3],
    activation: Activation,
}

/// Outputs of one device for a case.
type ForwardInfo = Vec<(&'static str, Vec<f64>)>;

impl Case {
    fn slots(&self) -> usize {
        self.counts.iter().map(|c| (*c as usize).next_multiple_of(8)).sum()
    }

    fn segments<D: Target>(&self, device: &D) -> Segments<D> {
        let mut at = 0;
        let offsets = self.counts.map(|c| {
            at += (c as usize).next_multiple_of(8) as i64;
            at - (c as usize).next_multiple_of(8) as i64
        });
        let put = |v: [i64; 3]| device.host(&Tensor::from_vec(v.to_vec(), &[3]).unwrap());
        Segments::new(put(offsets), put(self.counts), self.slots())
    }

    fn filled(&self) -> Vec<usize> {
        let mut slots = Vec::new();
        let mut at = 0;
        for count in self.counts {
            slots.extend(at..at + count as usize);
            at += (count as usize).next_multiple_of(8);
        }
        slots
    }

    /// Every product with these weights; the rows of filled slots.
    fn run<D: Target>(&self, device: &D, dtype: DType, [up, down]: [Weight<'_, D>; 2]) -> ForwardInfo {
        let mut random = Random::new(7);
        let (n, h, i) = (self.slots(), self.hidden, self.inner);
        let wide = i * self.activation.gate_factor();
        let segments = self.segments(device);
        // Rounded to the type that is tested, whatever this device computes in.
        let mut put = |dims: &[usize], scale: f64| {
            let values = random.values(dims.iter().product());
            let round = |v: f64| f64::from(bf16::from_f64(v * scale).to_f32());
            device.put(dtype, &values.into_iter().map(round).collect::<Vec<_>>(), dims)
        };
        let x = put(&[40, h], 1.0);
        let (bias, down_bias) = (put(&[3, wide], 0.5), put(&[3, h], 0.5));
        let (d_y, rows, pre_given) = (put(&[n, h], 1.0), put(&[n, i], 1.0), put(&[n, wide], 2.0));
        let (d_pre_given, mut y) = (put(&[n, wide], 1.0), put(&[n, h], 4.0));
        let weights =
            device.put(dtype.accumulator(), &(0..n).map(|s| 0.5 + (s % 5) as f64 / 4.0).collect::<Vec<_>>(), &[n]);
        let map: Vec<i32> = (0..n as i32).map(|s| (s * 7) % 40).collect();
        let map = device.host(&Tensor::from_vec(map, &[n]).unwrap());
        let filled = self.filled();
        let slot_weights = |at| Some(SlotWeights { values: weights.view(), map: None, at });
        let empty = |dims: &[usize]| Tensor::empty(device, dtype, dims).unwrap();
        let (mut pre, mut hidden) = (empty(&[n, wide]), empty(&[n, i]));
        let (mut d_pre, mut again, mut d_x) = (empty(&[n, wide]), empty(&[n, i]), empty(&[n, h]));
        let mut d_weights = Tensor::empty(device, dtype.accumulator(), &[n]).unwrap();
        let call = Up {
            rows: RowSource::mapped(x.view(), map.view()),
            segments: &segments,
            weight: up.borrow(),
            bias: Some(bias.view()),
            slot_weights: slot_weights(WeightAt::Activation),
            activation: self.activation,
            pre: Some(pre.view_mut()),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        };
        device.up(call).unwrap();
        let call = Down {
            rows: RowSource::direct(rows.view()),
            segments: &segments,
            weight: down.borrow(),
            bias: Some(down_bias.view()),
            slot_weights: slot_weights(WeightAt::Output),
            // To what is there.
            out: RowDest::adding(y.view_mut()),
        };
        device.down(call).unwrap();
        let call = DownBwd {
            grad: RowSource::direct(d_y.view()),
            segments: &segments,
            weight: down.borrow(),
            bias: None,
            pre: pre_given.view(),
            slot_weights: slot_weights(WeightAt::Output),
            activation: self.activation,
            d_pre: d_pre.view_mut(),
            hidden: Some(again.view_mut()),
            d_slot_weights: Some(d_weights.view_mut()),
        };
        device.down_bwd(call).unwrap();
        let call = UpDgrad {
            d_pre: d_pre_given.view(),
            segments: &segments,
            weight: up.borrow(),
            input_weight: None,
            out: RowDest::direct(d_x.view_mut()),
        };
        device.up_dgrad(call).unwrap();
        let rows = |t: &Tensor<D>| {
            let all = device.values(t.view());
            filled.iter().flat_map(|s| all[s * all.len() / n..(s + 1) * all.len() / n].to_vec()).collect()
        };
        let all = [("pre", &pre), ("hidden", &hidden), ("d_pre", &d_pre), ("d_weights", &d_weights), ("d_x", &d_x)];
        let mut made = all.map(|(name, t)| (name, rows(t))).to_vec();
        made.push(("y", device.values(y.view())));
        made
    }

    fn compare<D: Target>(&self, device: &D, dtype: DType) {
        let (h, i, factor) = (self.hidden, self.inner, self.activation.gate_factor());
        let mut random = Random::new(3);
        let up = random.weight(self.format, [3, factor * i, h], factor);
        let down = random.weight(self.format, [3, h, i], 1);
        let [up_values, down_values] = [exact(&up), exact(&down)];
        let expected = self.run(&Cpu::poisoning(), DType::F64, [up_values.view().into(), down_values.view().into()]);
        let (up, down) = (up.to(device).unwrap(), down.to(device).unwrap());
        let found = self.run(device, dtype, [up.view().into(), down.view().into()]);
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
            let error = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied());
            // A rounding of the result, and one of each weight where its factor does not leave the sums: 2^-9 in bf16
            // and 2^-12 in f16 at most each. Sums in f32 of some hundred terms: a few 2^-24 times their root.
            let tolerance = match dtype {
                DType::BF16 => 4e-3,
                DType::F16 => 5e-4,
                DType::F32 => 2e-6,
                _ => 1e-12,
            };
            let Self { format, hidden, inner, counts, .. } = self;
            assert!(error < tolerance, "{format:?} {hidden} x {inner} {counts:?} {dtype} {name}: {error:.2e}");
        }
    }
}

fn products_are_those_of_the_values<D: Target>(device: &D) {
    for format in FORMATS {
        for dtype in D::FLOATS {
            for activation in [Activation::SiluGlu, Activation::Relu2] {
                Case { format, hidden: 256, inner: 128, counts: [5, 0, 11], activation }.compare(device, *dtype);
            }
        }
    }
}

/// Sizes at which the ways of multiplying differ: few rows and many, a last step of a row that is not full, columns
/// that are no multiple of a tile, blocks that end with gate and begin anew with up.
fn few_and_many_rows_and_ragged_sizes<D: Target>(device: &D) {
    let clamped = Activation::ClampedGlu { alpha: 1.7, limit: 7.0 };
    for format in FORMATS {
        for (hidden, inner, counts) in [
            (512, 128, [2, 0, 7]),
            (320, 96, [1, 17, 0]),
            (192, 320, [40, 3, 8]),
            (320, 192, [130, 0, 9]),
            (64, 32, [33, 65, 1]),
            (576, 192, [300, 70, 190]),
        ] {
            Case { format, hidden, inner, counts, activation: clamped }.compare(device, *D::FLOATS.last().unwrap());
        }
    }
}

/// Rows of one product, of which any may be multiplied together.
struct Rows {
    hidden: usize,
    inner: usize,
    weights: [Quantized<Cpu>; 2],
}

impl Rows {
    /// Rows in all: on average more an expert than the kernels for few rows serve.
    const COUNT: usize = 300;

    /// Bits of y and d x of these rows, each of which goes to the expert of its number modulo 3.
    fn run<D: Target>(&self, device: &D, rows: &[usize]) -> Vec<Vec<u64>> {
        let dtype = *D::FLOATS.last().unwrap();
        let (h, i) = (self.hidden, self.inner);
        let [up, down] = self.weights.each_ref().map(|w| w.to(device).unwrap());
        let slots: Vec<usize> = (0..3).flat_map(|e| rows.iter().copied().filter(move |row| row % 3 == e)).collect();
        let n = slots.len();
        let counts = [0, 1, 2].map(|e| rows.iter().filter(|row| *row % 3 == e).count() as i64);
        let starts = [0, counts[0], counts[0] + counts[1]];
        let put = |v: [i64; 3]| device.host(&Tensor::from_vec(v.to_vec(), &[3]).unwrap());
        let segments = Segments::new(put(starts), put(counts), n);
        // A row's values are those of its number alone.
        let values = |width: usize, stream: u64| {
            let of = |row: &usize| Random::new(stream + *row as u64).values(width);
            device.put(dtype, &slots.iter().flat_map(of).collect::<Vec<_>>(), &[n, width])
        };
        let (x, d_y) = (values(h, 1 << 20), values(h, 2 << 20));
        let empty = |width: usize| Tensor::empty(device, dtype, &[n, width]).unwrap();
        let (mut pre, mut hidden, mut y) = (empty(2 * i), empty(i), empty(h));
        let (mut d_pre, mut d_x) = (empty(2 * i), empty(h));
        let call = Up {
            rows: RowSource::direct(x.view()),
            segments: &segments,
            weight: Weight::Quantized(up.view()),
            bias: None,
            slot_weights: None,
            activation: Activation::SiluGlu,
            pre: Some(pre.view_mut()),
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        };
        device.up(call).unwrap();
        let call = Down {
            rows: RowSource::direct(hidden.view()),
            segments: &segments,
            weight: Weight::Quantized(down.view()),
            bias: None,
            slot_weights: None,
            out: RowDest::direct(y.view_mut()),
        };
        device.down(call).unwrap();
        let call = DownBwd {
            grad: RowSource::direct(d_y.view()),
            segments: &segments,
            weight: Weight::Quantized(down.view()),
            bias: None,
            pre: pre.view(),
            slot_weights: None,
            activation: Activation::SiluGlu,
            d_pre: d_pre.view_mut(),
            hidden: None,
            d_slot_weights: None,
        };
        device.down_bwd(call).unwrap();
        let call = UpDgrad {
            d_pre: d_pre.view(),
            segments: &segments,
            weight: Weight::Quantized(up.view()),
            input_weight: None,
            out: RowDest::direct(d_x.view_mut()),
        };
        device.up_dgrad(call).unwrap();
        let (y, d_x) = (device.values(y.view()), device.values(d_x.view()));
        let bits = |row: &usize| {
            let slot = slots.iter().position(|s| s == row).unwrap();
            y[slot * h..][..h].iter().chain(&d_x[slot * h..][..h]).map(|v| v.to_bits()).collect()
        };
        rows.iter().map(bits).collect()
    }
}

/// Single rows, and batches of sizes at which another kernel would take over: 6 and 32 rows an expert, tiles of 8,
/// 16, 64 and 128.
fn a_row_has_the_same_bits_among_any_others<D: Target>(device: &D) {
    let device = &device.batch_invariant();
    let all: Vec<usize> = (0..Rows::COUNT).collect();
    for format in FORMATS {
        for (hidden, inner) in [(256, 128), (320, 192), (192, 448)] {
            let mut random = Random::new(11);
            let up = random.weight(format, [3, 2 * inner, hidden], 2);
            let down = random.weight(format, [3, hidden, inner], 1);
            let rows = Rows { hidden, inner, weights: [up, down] };
            let expected = rows.run(device, &all);
            let check = |batch: &[usize]| {
                for (found, row) in rows.run(device, batch).iter().zip(batch) {
                    let count = batch.len();
                    assert!(*found == expected[*row], "{format:?} {hidden} x {inner}: row {row} among {count}");
                }
            };
            all.chunks(1).step_by(7).for_each(check);
            for size in [2, 3, 15, 18, 19, 21, 24, 48, 95, 96, 97, 99, 128, 150, 192, 299] {
                let from = random.next() as usize % (Rows::COUNT - size);
                let mut batch = all[from..from + size].to_vec();
                batch.reverse();
                check(&batch);
            }
        }
    }
}

/// Runs a folder's first block with its experts as they are on disk.
fn run_folder<D: Target>(device: &D, dir: &Path) -> usize {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let layer = *checkpoint.moe_layers().first().unwrap();
    if matches!(checkpoint.block_form(layer).unwrap(), Form::Plain(_)) {
        return 0;
    }
    let name = dir.file_name().unwrap().to_string_lossy();
    let folder = Folder::open(dir).unwrap();
    let golden = folder.golden.as_ref().unwrap();
    let dtype = folder.dtype;
    let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(dtype) };
    let block = checkpoint.load_quantized(layer, options).unwrap().to(device).unwrap();
    let plain = checkpoint.block_bytes(layer, options).unwrap().experts as usize;
    assert!(block.up.bytes() + block.down.bytes() <= plain * 4 / 13, "{name}: {plain} bytes de-quantized");
    let x = values(&tokens(&golden["moe_input"]).unwrap()).unwrap();
    let rows = x.len() / block.config.hidden;
    let x = device.put(dtype, &x, &[rows, block.config.hidden]);
    let mut group = device.alone(GroupConfig::new(block.config.router.num_experts, rows)).unwrap();
    let moe = Layer::new(block.config.clone(), 0).unwrap();
    let params = block.params().unwrap();
    let mode = Mode { backward: true, noise: None };
    let forward = moe.forward(&mut group, mode, x.view(), &params).unwrap();
    let shown = |t: &Tensor<D>| common::framework(&device.to_cpu(t));
    let y = difference(&shown(&forward.y), &tokens(&golden["moe_output"]).unwrap()).unwrap();
    assert!(y.within(folder.forward_tolerance()), "{name}: output {:.2e}", y.relative);
    let Some(d_y) = golden.get("grad_moe_output") else { return 1 };
    let d_y = values(&tokens(d_y).unwrap()).unwrap();
    let d_y = device.put(dtype, &d_y, &[rows, block.config.hidden]);
    let inputs = Inputs { x: x.view(), params: &params };
    let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
    let wanted = GradientMask { experts: false, ..GradientMask::ALL };
    let gradients = moe.backward(&mut group, forward.context.unwrap(), inputs, cotangents, wanted).unwrap();
    let d_x = shown(gradients.x.as_ref().unwrap());
    let d_x = difference(&d_x, &tokens(&golden["grad_moe_input"]).unwrap()).unwrap();
    assert!(d_x.within(folder.backward_tolerance()), "{name}: gradient of the input {:.2e}", d_x.relative);
    1
}

fn quantized_folders_match_their_goldens<D: Target>(device: &D) {
    let entries = std::fs::read_dir(devices::golden()).unwrap().map(|e| e.unwrap().path());
    let folders: Vec<_> = entries.filter(|dir| dir.join("config.json").is_file()).collect();
    let run: usize = folders.iter().map(|dir| run_folder(device, dir)).sum();
    // DeepSeek's fp8, gpt-oss' MXFP4, Qwen's NVFP4 by ModelOpt and by compressed-tensors.
    assert!(run >= 4 || std::env::var_os("MOEBIUS_GOLDEN").is_some(), "{run} folders");
}

fn quantized_weights_have_no_gradient<D: Target>(device: &D) {
    let dir = devices::golden_of("qwen3_moe_nvfp4_modelopt");
    let checkpoint = Checkpoint::open(dir).unwrap();
    let layer = checkpoint.moe_layers()[0];
    let options = LoadOptions { rank: 0, ranks: 1, dtype: Some(DType::F32) };
    let block = checkpoint.load_quantized(layer, options).unwrap().to(device).unwrap();
    let x = device.put(DType::F32, &vec![0.5; 3 * block.config.hidden], &[3, block.config.hidden]);
    let mut group = device.alone(GroupConfig::new(block.config.router.num_experts, 3)).unwrap();
    let moe = Layer::new(block.config.clone(), 0).unwrap();
    let params = block.params().unwrap();
    let forward = moe.forward(&mut group, Mode { backward: true, noise: None }, x.view(), &params).unwrap();
    let inputs = Inputs { x: x.view(), params: &params };
    let cotangents = Cotangents { y: Some(x.view()), aux: 0.0 };
    let error = moe.backward(&mut group, forward.context.unwrap(), inputs, cotangents, GradientMask::ALL).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("gradient of experts.up: expected none, as the weight is quantized"), "{text}");
}

fn weights_that_do_not_fit_are_errors<D: Target>(device: &D) {
    let whole = Random::new(1).weight(WeightFormat::Nvfp4, [2, 32, 64], 2).to(device).unwrap();
    let view = whole.view();
    let message = |weight: QuantizedRef<'_, D>| weight.check("up").unwrap_err().to_string();
    let wrong = [
        (QuantizedRef { dims: [2, 32, 72], ..view }, "up: weight: expected [L, out, in], in a multiple of 16"),
        (QuantizedRef { parts: 3, ..view }, "up: weight.parts: expected a divisor of 32, found 3"),
        (QuantizedRef { dims: [2, 16, 64], ..view }, "up: tensor weight.codes: expected shape [2, 16, 32]"),
        (QuantizedRef { format: WeightFormat::Mxfp4, ..view }, "up: tensor weight.scales: expected shape [2, 32, 2]"),
        (QuantizedRef { parts: 1, ..view }, "up: tensor weight.factors: expected shape [2, 1], found [2, 2]"),
        (QuantizedRef { codes: view.scales, ..view }, "up: tensor weight.codes: expected shape"),
        (QuantizedRef { scales: view.factors.unwrap(), ..view }, "up: tensor weight.scales: expected u8, found f32"),
    ];
    for (weight, expected) in wrong {
        let found = message(weight);
        assert!(found.starts_with(expected), "{found}");
    }
}

/// A block of experts that were quantized elsewhere has what a layer of its config reads, and nothing else.
fn a_block_is_what_its_config_says<D: Target>(device: &D) {
    let block = |hidden: usize, others: &[(&str, [usize; 2])]| {
        let mut random = Random::new(2);
        let up = random.weight(WeightFormat::Fp8Block, [2, 64, 128], 2).to(device).unwrap();
        let down = random.weight(WeightFormat::Fp8Block, [2, 128, 32], 1).to(device).unwrap();
        let given = |name: &str| {
            let (_, dims) = others.iter().find(|(other, _)| *other == name)?;
            Some(Tensor::zeros(device, DType::F32, dims).unwrap())
        };
        let others =
            PerParam { router: given("router"), selection_bias: given("bias"), up: given("up"), ..PerParam::default() };
        QuantizedBlock::new(MoeConfig::new(hidden, 32, 2, 1), up, down, others)
    };
    let made = block(128, &[("router", [2, 128])]).unwrap();
    assert_eq!((made.params().unwrap().router.dims(), made.up.dims()), (&[2, 128][..], &[2, 64, 128]));
    for (hidden, others, expected) in [
        (128, &[][..], "router.weight: expected a tensor, found nothing"),
        (128, &[("router", [2, 64])], "expected shape [2, 128], found [2, 64]"),
        (64, &[("router", [2, 64])], "expected shape [2, 64, 64], found [2, 64, 128]"),
        (128, &[("router", [2, 128]), ("bias", [2, 1])], "expected nothing, found a tensor"),
        (128, &[("router", [2, 128]), ("up", [64, 128])], "expected nothing beside the quantized one, found a tensor"),
    ] {
        let text = block(hidden, others).unwrap_err().to_string();
        assert!(text.starts_with("QuantizedBlock::new: ") && text.contains(expected), "{text}");
    }
}
