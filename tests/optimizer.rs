//! Steps of AdamW on one rank, on any device: closed forms, a straight-line reference in f64, the order of the norm, and
//! steps that are skipped.

mod devices;

use half::{bf16, f16};
use moebius::cpu::Cpu;
use moebius::kernels::optimizer::{LEAF, SquareSums, SquaredTensor};
use moebius::optim::{AdamW, AdamWOptions, GroupOptions, LossScaling, ParamShard, ParamSpec, StepTensor};
use moebius::{DType, Error, Tensor, TensorRef};

use devices::cases;
pub(crate) use devices::{Target, seed};

cases!(
    a_step_in_closed_form,
    steps_are_near_f64,
    every_device_gives_the_cpus_bits,
    sixteen_bit_parameters_are_the_rounded_main_weights,
    squares_are_added_in_the_stated_order,
    the_norm_clips_in_closed_form,
    groups_have_their_own_options,
    a_step_with_inf_or_nan_changes_nothing_and_is_counted,
    the_losss_factor_grows_and_shrinks,
    bf16_moments_move_on_the_average,
    padding_and_absent_gradients_stay,
    bad_input_is_refused,
);

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// An ε that is lost beside the roots of these tests, and keeps 0 / 0 away.
const LOST: f64 = 1e-30;

fn group(lr: f64, betas: [f64; 2], eps: f64, weight_decay: f64) -> GroupOptions {
    GroupOptions { lr, betas, eps, weight_decay }
}

/// Parameters on a device with their optimizer.
struct Run<D: Target> {
    device: D,
    adam: AdamW<D>,
    params: Vec<Tensor<D>>,
}

impl<D: Target> Run<D> {
    /// Of these values, all in group 0.
    fn new(device: &D, options: AdamWOptions, params: &[(DType, Vec<f64>)]) -> Self {
        Self::in_groups(device, options, &[options.group], params)
    }

    /// In groups 0, 1, … in turn.
    fn in_groups(device: &D, options: AdamWOptions, groups: &[GroupOptions], params: &[(DType, Vec<f64>)]) -> Self {
        let spec = |(i, (dtype, values)): (usize, &(DType, Vec<f64>))| ParamSpec {
            name: format!("p{i}"),
            shard: ParamShard::whole(&[values.len()]),
            dtype: *dtype,
            group: i % groups.len(),
        };
        let specs = params.iter().enumerate().map(spec).collect();
        let mut adam = AdamW::new(device, options, groups, specs, None).unwrap();
        let params: Vec<_> = params.iter().map(|(t, values)| device.put(*t, values, &[values.len()])).collect();
        for (i, param) in params.iter().enumerate() {
            adam.read_param(i, param.view()).unwrap();
        }
        Self { device: device.clone(), adam, params }
    }

    fn step(&mut self, gradients: &[Option<(DType, Vec<f64>)>]) {
        let put = |g: &(DType, Vec<f64>)| self.device.put(g.0, &g.1, &[g.1.len()]);
        let gradients: Vec<Option<Tensor<D>>> = gradients.iter().map(|g| g.as_ref().map(put)).collect();
        let views: Vec<_> = gradients.iter().map(|g| g.as_ref().map(Tensor::view)).collect();
        self.adam.begin(&views).unwrap();
        let tensors = self.params.iter_mut().zip(&gradients).enumerate();
        let tensors = tensors.filter_map(|(index, (param, gradient))| {
            let gradient = gradient.as_ref()?.view();
            Some(StepTensor { index, param: param.view_mut(), gradient })
        });
        let updated = self.adam.update(tensors.collect());
        self.device.settled(updated).unwrap();
    }

    fn values(&self, i: usize) -> Vec<f64> {
        self.device.values(self.params[i].view())
    }

    fn bytes(&self) -> Vec<Vec<u8>> {
        self.params.iter().map(|p| self.device.download(p.view()).unwrap()).collect()
    }
}

fn some(dtype: DType, values: &[f64]) -> Option<(DType, Vec<f64>)> {
    Some((dtype, values.to_vec()))
}

/// With β = 0 and ε = 0 a weight moves by lr times the gradient's sign and by its decay: powers of two are exact.
fn a_step_in_closed_form<D: Target>(device: &D) {
    for gradient in TYPES {
        let options = AdamWOptions { group: group(0.25, [0.0, 0.0], LOST, 0.5), ..Default::default() };
        let mut run = Run::new(device, options, &[(DType::F32, vec![8.0, -16.0, 1.0, 0.0, 3.0])]);
        run.step(&[some(gradient, &[4.0, 2.0, -0.5, 1.0, -64.0])]);
        assert_eq!(run.values(0), [8.0 - 1.25, -16.0 + 1.75, 1.0 + 0.125, -0.25, 3.0 - 0.125]);
        run.step(&[some(gradient, &[1.0, 1.0, 1.0, 1.0, 1.0])]);
        assert_eq!(run.values(0)[3], -0.25 - 0.25 + 0.25 * 0.5 * 0.25);
        let stats = run.adam.stats().unwrap();
        assert_eq!((stats.steps, stats.skipped, stats.factor, stats.loss_scale), (2, 0, 1.0, 1.0));
    }
}

/// AdamW as its authors write it, in f64.
struct Reference {
    w: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    t: i32,
}

impl Reference {
    fn new(w: &[f64]) -> Self {
        Self { w: w.to_vec(), m: vec![0.0; w.len()], v: vec![0.0; w.len()], t: 0 }
    }

    fn step(&mut self, o: &GroupOptions, gradient: &[f64]) {
        self.t += 1;
        let [b1, b2] = o.betas;
        for (i, g) in gradient.iter().enumerate() {
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g;
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * g * g;
            let (m, v) = (self.m[i] / (1.0 - b1.powi(self.t)), self.v[i] / (1.0 - b2.powi(self.t)));
            self.w[i] -= o.lr * o.weight_decay * self.w[i] + o.lr * m / (v.sqrt() + o.eps);
        }
    }
}

/// Of T steps with |w| ≤ W, u = 2⁻²⁴. The second moment takes five roundings a step, each within u of itself or of
/// what it grows to, so it is within 5Tu of itself. The first takes four, each within u of the largest |g| so far, G, so
/// within 4TuG; and √v̂ ≥ G·√((1 − β₂)β₂ᵀ / (1 − β₂ᵀ)), which is at least G/√(2T) while T ≤ 1/(1 − β₂). So m̂/√v̂, at
/// most √(2T) itself, is within (4T + 2.5T + 6)·u·√(2T), and the weight within T steps of lr times that, and of three
/// roundings of what it is and of what it moves by.
fn bound(steps: usize, lr: f64, largest: f64) -> f64 {
    let (t, u) = (steps as f64, 2f64.powi(-24));
    t * (lr * (6.5 * t + 6.0) * u * (2.0 * t).sqrt() + 3.0 * u * (largest + lr * (2.0 * t).sqrt()))
}

fn steps_are_near_f64<D: Target>(device: &D) {
    const STEPS: usize = 20;
    let count = 3 * LEAF + 7;
    for (n, gradient) in TYPES.into_iter().enumerate() {
        let own = group(0.01, [0.9, 0.999], 1e-8, 0.1);
        let options = AdamWOptions { group: own, ..Default::default() };
        let start: Vec<f64> = seed::normal(10 + n as u64, count).iter().map(|v| f64::from(*v as f32)).collect();
        let mut run = Run::new(device, options, &[(DType::F32, start.clone())]);
        let mut reference = Reference::new(&start);
        for step in 0..STEPS {
            let drawn = seed::normal(100 * (n as u64 + 1) + step as u64, count);
            let g = device.values(device.put(gradient, &drawn, &[count]).view());
            run.step(&[some(gradient, &g)]);
            reference.step(&own, &g);
        }
        let largest = reference.w.iter().chain(&start).fold(0.0f64, |max, w| max.max(w.abs()));
        let bound = bound(STEPS, own.lr, largest);
        assert!(bound < 0.01 * own.lr * STEPS as f64, "a bound that says something: {bound}");
        for (found, expected) in run.values(0).iter().zip(&reference.w) {
            assert!((found - expected).abs() <= bound, "{found} and {expected}, bound {bound}");
        }
    }
}

/// The options of a run with everything: clipping, scaling, two groups.
fn everything(moments: DType) -> (AdamWOptions, [GroupOptions; 2]) {
    let options = AdamWOptions {
        max_norm: Some(1.0),
        loss_scaling: Some(LossScaling { initial: 1024.0, interval: 2, ..Default::default() }),
        moments,
        seed: 7,
        ..Default::default()
    };
    (options, [group(0.01, [0.9, 0.999], 1e-8, 0.1), group(0.003, [0.8, 0.95], 1e-6, 0.0)])
}

/// A few steps over parameters of all types and odd sizes; the bits of everything.
fn bits<D: Target>(device: &D, moments: DType) -> Vec<Vec<u8>> {
    let (options, groups) = everything(moments);
    let sizes = [1, 3, 130, LEAF, 2 * LEAF + 5, 70_001];
    let start = |i: usize| (TYPES[i % 3], seed::normal(i as u64, sizes[i]));
    let params: Vec<_> = (0..sizes.len()).map(start).collect();
    let mut run = Run::in_groups(device, options, &groups, &params);
    for step in 0..4 {
        let gradient = |i: usize| {
            let drawn = seed::normal(1000 * (step + 1) + i as u64, sizes[i]);
            some(TYPES[(i + step as usize) % 3], &drawn.iter().map(|g| 1024.0 * g).collect::<Vec<_>>())
        };
        let mut gradients: Vec<_> = (0..sizes.len()).map(gradient).collect();
        gradients[step as usize] = None;
        run.step(&gradients);
    }
    let stats = run.adam.stats().unwrap();
    assert!(stats.factor < 1.0 / 1024.0, "clipped: {stats:?}");
    let mut all = run.bytes();
    all.push([stats.norm, stats.factor, stats.loss_scale].iter().flat_map(|v| v.to_le_bytes()).collect());
    all
}

fn every_device_gives_the_cpus_bits<D: Target>(device: &D) {
    for moments in [DType::F32, DType::BF16] {
        let found = bits(device, moments);
        assert_eq!(found, bits(device, moments), "runs differ, moments in {moments}");
        assert!(found == bits(&Cpu::poisoning(), moments), "devices differ, moments in {moments}");
    }
}

fn sixteen_bit_parameters_are_the_rounded_main_weights<D: Target>(device: &D) {
    const COUNT: usize = 1001;
    let options = AdamWOptions { group: group(3e-4, [0.9, 0.99], 1e-8, 0.0), ..Default::default() };
    for dtype in [DType::F16, DType::BF16] {
        // The same values in f32 train to the main weights.
        let start = device.values(device.put(dtype, &seed::normal(3, COUNT), &[COUNT]).view());
        let mut run = Run::new(device, options, &[(dtype, start.clone())]);
        let mut wide = Run::new(device, options, &[(DType::F32, start.clone())]);
        for step in 0..30 {
            let gradients = [some(DType::BF16, &seed::normal(40 + step, COUNT))];
            run.step(&gradients);
            wide.step(&gradients);
        }
        let rounded = |v: &f64| match dtype {
            DType::F16 => f64::from(f16::from_f32(*v as f32)),
            _ => f64::from(bf16::from_f32(*v as f32)),
        };
        let expected: Vec<f64> = wide.values(0).iter().map(rounded).collect();
        assert_eq!(run.values(0), expected, "{dtype}");
        // Many have moved by steps that are less than half of their last place each, so not without a main weight.
        let moved = |(a, b): &(&f64, &f64)| a != b && b.abs() > 0.5 && dtype == DType::BF16;
        assert!(dtype == DType::F16 || expected.iter().zip(&start).filter(moved).count() > COUNT / 20);
    }
}

/// The order that the documentation states, written down once more.
fn stated_norm(rows: usize, width: usize, values: &[f64]) -> f64 {
    let mut leaves = Vec::new();
    for row in values.chunks(width).take(rows) {
        for leaf in row.chunks(4096) {
            let mut p = [0.0; 128];
            for (i, x) in leaf.iter().enumerate() {
                p[i % 128] += x * x;
            }
            let mut s: Vec<f64> = p.chunks(4).map(|p| (p[0] + p[1]) + (p[2] + p[3])).collect();
            while s.len() > 1 {
                let half = s.len() / 2;
                s = (0..half).map(|l| s[l] + s[l + half]).collect();
            }
            leaves.push(s[0]);
        }
    }
    while leaves.len() > 1 {
        leaves = leaves.chunks(2).map(|pair| pair.iter().sum()).collect();
    }
    leaves[0]
}

fn squares_are_added_in_the_stated_order<D: Target>(device: &D) {
    let shapes =
        [(1, 1), (1, 127), (3, 128), (7, 129), (1, 4096), (1, 4097), (5, 10_000), (33, 64), (1000, 3), (129, 513)];
    for (n, (rows, width)) in shapes.into_iter().enumerate() {
        for dtype in TYPES {
            let padded = (rows + 2) * width;
            let gradient = device.put(dtype, &seed::normal(n as u64, padded), &[rows + 2, width]);
            let values = device.values(gradient.view());
            let leaves = rows * width.div_ceil(LEAF);
            let heights = [0, 1, 2, 3, leaves.next_power_of_two().trailing_zeros()];
            for height in heights {
                let nodes = leaves.div_ceil(1 << height);
                let mut out = device.put(DType::F64, &vec![-1.0; nodes + 3], &[nodes + 3]);
                let tensor = SquaredTensor { gradient: gradient.view(), rows, width, height, node: 2 };
                let summed = device.square_sums(SquareSums { tensors: vec![tensor], out: out.view_mut() });
                device.settled(summed).unwrap();
                let found = device.values(out.view());
                assert_eq!([found[0], found[1], found[nodes + 2]], [-1.0; 3], "what is beside them stays");
                let mut tree = found[2..nodes + 2].to_vec();
                while tree.len() > 1 {
                    tree = tree.chunks(2).map(|pair| pair.iter().sum()).collect();
                }
                let expected = stated_norm(rows, width, &values);
                assert_eq!(tree[0].to_bits(), expected.to_bits(), "[{rows}, {width}] {dtype}, height {height}");
            }
        }
    }
}

fn the_norm_clips_in_closed_form<D: Target>(device: &D) {
    // An ε that is lost beside the others, and keeps 0 / 0 away.
    let own = group(0.5, [0.0, 0.0], 2f64.powi(-100), 0.0);
    let options = AdamWOptions { group: own, max_norm: Some(2.5), ..Default::default() };
    let mut run = Run::new(device, options, &[(DType::F32, vec![0.0; 2]), (DType::F32, vec![0.0])]);
    run.step(&[some(DType::F32, &[3.0, 0.0]), some(DType::BF16, &[4.0])]);
    let stats = run.adam.stats().unwrap();
    assert_eq!((stats.norm, stats.factor), (5.0, 0.5));
    // 1.5 and 2 are the gradients, and with β₂ = 0 the root of the second moment is their magnitude.
    assert_eq!((run.values(0), run.values(1)), (vec![-0.5, 0.0], vec![-0.5]));
    run.step(&[some(DType::F32, &[0.0, 0.0]), some(DType::F32, &[2.5])]);
    let stats = run.adam.stats().unwrap();
    assert_eq!((stats.norm, stats.factor), (2.5, 1.0), "the bound itself is not clipped");
    run.step(&[None, None]);
    assert_eq!(run.adam.stats().unwrap().norm, 0.0);
}

fn groups_have_their_own_options<D: Target>(device: &D) {
    let groups = [group(0.5, [0.0, 0.0], LOST, 0.0), group(0.125, [0.0, 0.0], LOST, 2.0)];
    let params = [(DType::F32, vec![1.0]), (DType::F32, vec![1.0]), (DType::F32, vec![1.0])];
    let mut run = Run::in_groups(device, AdamWOptions::default(), &groups, &params);
    let gradients = [some(DType::F32, &[1.0]), some(DType::F32, &[1.0]), some(DType::F32, &[-1.0])];
    run.step(&gradients);
    assert_eq!([run.values(0), run.values(1), run.values(2)], [[0.5], [1.0 - 0.125 - 0.25], [1.5]]);
    run.adam.set_group(0, GroupOptions { lr: 0.25, ..groups[0] }).unwrap();
    run.step(&gradients);
    assert_eq!([run.values(0), run.values(2)], [[0.25], [1.75]]);
    let error = run.adam.set_group(2, groups[0]).unwrap_err();
    assert!(matches!(&error, Error::Invalid { name, .. } if name == "group"), "{error}");
}

fn a_step_with_inf_or_nan_changes_nothing_and_is_counted<D: Target>(device: &D) {
    let own = group(0.01, [0.9, 0.99], 1e-8, 0.1);
    let options = AdamWOptions { group: own, max_norm: Some(1.0), ..Default::default() };
    let params = [(DType::F16, seed::normal(1, 300)), (DType::F32, seed::normal(2, 5000))];
    let gradient =
        |step: u64| [some(DType::F16, &seed::normal(10 + step, 300)), some(DType::F32, &seed::normal(20 + step, 5000))];
    let (mut run, mut undisturbed) = (Run::new(device, options, &params), Run::new(device, options, &params));
    for (n, bad) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().enumerate() {
        let before = run.bytes();
        let mut gradients = gradient(n as u64);
        gradients[n % 2].as_mut().unwrap().1[299] = bad;
        run.step(&gradients);
        assert_eq!(run.bytes(), before, "{bad}");
        let stats = run.adam.stats().unwrap();
        assert!(stats.skipped_last && !stats.norm.is_finite(), "{stats:?}");
        assert_eq!((stats.steps, stats.skipped), (n as u64, n as u64 + 1));
        run.step(&gradient(n as u64));
        undisturbed.step(&gradient(n as u64));
        // Moments and bias corrections too are as if the step had not been.
        assert_eq!(run.bytes(), undisturbed.bytes());
        assert!(!run.adam.stats().unwrap().skipped_last);
    }
}

fn the_losss_factor_grows_and_shrinks<D: Target>(device: &D) {
    let scaling = LossScaling { initial: 8.0, interval: 2, min: 2.0, max: 32.0, ..Default::default() };
    let own = group(0.5, [0.0, 0.0], LOST, 0.0);
    let options = AdamWOptions { group: own, loss_scaling: Some(scaling), ..Default::default() };
    let mut run = Run::new(device, options, &[(DType::F16, vec![0.0])]);
    let mut weight = 0.0;
    let good = [(1.0, 8.0), (1.0, 16.0), (1.0, 16.0), (1.0, 32.0), (1.0, 32.0), (1.0, 32.0)];
    let bad = [(f64::INFINITY, 16.0), (f64::NAN, 8.0), (f64::NAN, 4.0), (f64::NAN, 2.0), (f64::NAN, 2.0)];
    for (gradient, next) in good.into_iter().chain(bad).chain([(1.0, 2.0), (1.0, 4.0)]) {
        let scale = run.device.values(run.adam.loss_scale().unwrap().view())[0];
        run.step(&[some(DType::F16, &[3.0 * scale * gradient])]);
        let stats = run.adam.stats().unwrap();
        if gradient == 1.0 {
            weight -= 0.5;
            assert_eq!((stats.norm, stats.factor), (3.0, 1.0 / scale));
        }
        assert_eq!((stats.loss_scale, run.values(0)[0]), (next, weight));
    }
    assert_eq!(run.adam.stats().unwrap().skipped, 5);
}

/// After one step with gradient 1 the second moment is 1 − β₂, and every step without gradient takes 1 − β₂ of it: less
/// than half a place of bf16, so rounding to nearest would leave it as it is for ever.
fn bf16_moments_move_on_the_average<D: Target>(device: &D) {
    const COUNT: usize = 40_000;
    const STEPS: usize = 200;
    let own = group(0.0, [0.5, 0.999], 1e-8, 0.0);
    let options = AdamWOptions { group: own, moments: DType::BF16, seed: seed::seed(5), ..Default::default() };
    let mut run = Run::new(device, options, &[(DType::F32, vec![1.0; COUNT])]);
    run.step(&[some(DType::F32, &[1.0; COUNT])]);
    for _ in 0..STEPS {
        run.step(&[some(DType::F32, &[0.0; COUNT])]);
    }
    // The moment shows in a step: with lr 1 and β₁ = 0 a weight moves by g / (√v̂).
    run.adam.set_group(0, group(1.0, [0.0, 0.999], LOST, 0.0)).unwrap();
    let before = run.values(0);
    run.step(&[some(DType::F32, &[1.0 / 1024.0; COUNT])]);
    let moved = before.iter().zip(run.values(0)).map(|(a, b)| a - b);
    let t = STEPS as i32 + 2;
    let corrected = |moved: f64| (1.0 / 1024.0 / moved).powi(2);
    let v: Vec<f64> = moved.map(|moved| corrected(moved) * (1.0 - 0.999f64.powi(t))).collect();
    let mean = v.iter().sum::<f64>() / COUNT as f64;
    let expected = 0.001 * 0.999f64.powi(STEPS as i32 + 1);
    // Each of the steps rounds by less than a place, 2⁻⁷ of the value, at random; the mean of the elements is within six
    // deviations of what is expected, and of the last step's own roundings.
    let deviation = expected * 2f64.powi(-7) * (STEPS as f64).sqrt() / (COUNT as f64).sqrt();
    assert!((mean - expected).abs() < 6.0 * deviation + 1e-5 * expected, "{mean} and {expected}, {deviation}");
}

fn padding_and_absent_gradients_stay<D: Target>(device: &D) {
    let specs = vec![
        ParamSpec { name: "cut".into(), shard: ParamShard::whole(&[3, 5]), dtype: DType::F16, group: 0 },
        ParamSpec { name: "absent".into(), shard: ParamShard::whole(&[2]), dtype: DType::F32, group: 0 },
        ParamSpec { name: "empty".into(), shard: ParamShard::whole(&[0, 4]), dtype: DType::F32, group: 0 },
    ];
    let own = group(0.5, [0.0, 0.0], LOST, 0.0);
    let options = AdamWOptions { group: own, max_norm: Some(1e6), ..Default::default() };
    let mut adam = AdamW::new(device, options, &[own], specs, None).unwrap();
    let mut cut = device.put(DType::F16, &[7.0; 20], &[4, 5]);
    adam.read_param(0, cut.view()).unwrap();
    let mut values = vec![1.0; 15];
    values.extend([f64::NAN; 5]);
    let gradient = device.put(DType::F32, &values, &[4, 5]);
    adam.begin(&[Some(gradient.view()), None, None]).unwrap();
    let updated = adam.update(vec![StepTensor { index: 0, param: cut.view_mut(), gradient: gradient.view() }]);
    device.settled(updated).unwrap();
    assert_eq!(adam.stats().unwrap().norm, 15f64.sqrt());
    let found = device.values(cut.view());
    assert_eq!((&found[..15], &found[15..]), (&[6.5; 15][..], &[7.0; 5][..]));
}

fn bad_input_is_refused<D: Target>(device: &D) {
    let spec = |name: &str, dtype| ParamSpec { name: name.into(), shard: ParamShard::whole(&[4]), dtype, group: 0 };
    let make =
        |options: AdamWOptions, specs: Vec<ParamSpec>| AdamW::new(device, options, &[options.group], specs, None);
    let refused = |result: moebius::Result<AdamW<D>>, wanted: &str| {
        let error = result.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(wanted), "{error:?} has no {wanted:?}");
    };
    let with = |group| AdamWOptions { group, ..Default::default() };
    let usual = AdamWOptions::default();
    refused(make(with(group(f64::NAN, [0.9, 0.9], 1e-8, 0.0)), vec![]), "lr");
    refused(make(with(group(0.1, [0.9, 1.0], 1e-8, 0.0)), vec![]), "betas[1]");
    refused(make(with(group(0.1, [0.9, 0.9], -1.0, 0.0)), vec![]), "eps");
    // Options that would be of no parameter; without groups they are all parameters'.
    let slow = with(group(3e-4, [0.9, 0.9], 1e-8, 0.0));
    let of_groups = |groups: &[GroupOptions]| AdamW::new(device, slow, groups, vec![spec("p", DType::F32)], None);
    refused(of_groups(&[usual.group]), "options.group");
    let [none, given] = [&[][..], &[usual.group, slow.group]].map(|groups| of_groups(groups).unwrap());
    assert_eq!((none.groups(), given.groups().len()), (&[slow.group][..], 2));
    refused(make(AdamWOptions { max_norm: Some(0.0), ..usual }, vec![]), "max_norm");
    refused(make(AdamWOptions { moments: DType::F16, ..usual }, vec![]), "moments");
    let scaling = LossScaling { backoff: 2.0, ..Default::default() };
    refused(make(AdamWOptions { loss_scaling: Some(scaling), ..usual }, vec![]), "loss_scaling");
    refused(make(usual, vec![spec("a", DType::F32), spec("a", DType::F32)]), "parameter a");
    refused(make(usual, vec![spec("wide", DType::F64)]), "parameter wide");
    refused(make(usual, vec![ParamSpec { group: 1, ..spec("b", DType::F32) }]), "parameter b");
    let mut adam = make(AdamWOptions { max_norm: Some(1.0), ..usual }, vec![spec("p", DType::F32)]).unwrap();
    let mut params = [DType::F32, DType::BF16].map(|dtype| device.put(dtype, &[1.0; 4], &[4]));
    let [good, short] = [4, 3].map(|n| device.put(DType::F32, &vec![1.0; n], &[n]));
    let ids = device.host(&Tensor::from_vec(vec![1i32; 4], &[4]).unwrap());
    assert!(matches!(adam.begin(&[]), Err(Error::Shape { .. })));
    let named = |e: Error| e.to_string().contains('p');
    assert!(adam.begin(&[Some(short.view())]).is_err_and(named));
    assert!(adam.begin(&[Some(ids.view())]).is_err_and(named));
    adam.begin(&[Some(good.view())]).unwrap();
    let [wide, narrow] = &mut params;
    let mut update = |index, param: &mut Tensor<D>, gradient: TensorRef<'_, D>| {
        adam.update(vec![StepTensor { index, param: param.view_mut(), gradient: gradient.borrow() }])
    };
    assert!(matches!(update(0, narrow, good.view()), Err(Error::DType { .. })));
    assert!(matches!(update(1, wide, good.view()), Err(Error::Invalid { .. })));
    update(0, wide, good.view()).unwrap();
    let [a, b] = [good.view(), good.view()];
    let (mut one, mut other) = (device.put(DType::F32, &[1.0; 4], &[4]), device.put(DType::F32, &[1.0; 4], &[4]));
    let twice = vec![
        StepTensor { index: 0, param: one.view_mut(), gradient: a },
        StepTensor { index: 0, param: other.view_mut(), gradient: b },
    ];
    assert!(matches!(adam.update(twice), Err(Error::Invalid { .. })));
}
