//! Whole layers whose tokens travel quantized, each against a layer of the same group whose tokens do not: over the
//! same dispatcher every sum then has the same order, so that results are compared bit for bit.
//!
//! A token's first 32 elements are `code · 2^j` with `code` an E2M1 value and 6 among each 16 of them, which both
//! formats hold exactly: the row's amax is `6 · 2^j`, its second-level scale a power of two. The router looks at these
//! alone, so it chooses the same of a token and of what is left of it.

use moebius::config::{MoeConfig, Payload, SharedConfig, WeightAt};
use moebius::ep::{Capacity, GroupConfig, Overflow, Reporting};
use moebius::layer::{Cotangents, DispatchOptions, GradientMask, Inputs, Layer, Mode, ParamKind, ParamViews};
use moebius::quant::{
    DequantizeMxfp8, Direction, Fp8BlockTensors, Matrix, Mxfp8, Mxfp8Tensors, Nvfp4, Nvfp4Tensors, Quantize,
    QuantizeFp8Block, QuantizeMxfp8,
};
use moebius::{DType, Error, Result, Tensor};

use super::devices::seed;
use super::harness::*;

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(tokens_that_the_formats_hold_pass_unchanged),
        case!(experts_read_what_codes_stand_for),
        case!(shared_experts_read_tokens_as_they_are),
        case!(static_capacities_and_alignment),
        case!(ranks_that_disagree, 2),
        case!(tokens_of_different_types, 2),
        case!(tokens_without_a_form),
    ]
}

const PAYLOADS: [Payload; 3] = [Payload::Nvfp4, Payload::Mxfp8, Payload::Fp8Block];
/// Elements that the formats hold.
const EXACT: usize = 32;
const T: usize = 7;
const CODES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Seeded numbers in ±½.
struct Random(u64);

impl Random {
    /// Numbers of a place's own number.
    fn new(own: u64) -> Self {
        Self(seed::seed(own))
    }

    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64 - 0.5
    }

    fn below(&mut self, n: usize) -> usize {
        (((self.next() + 0.5) * n as f64) as usize).min(n - 1)
    }

    fn numbers(&mut self, count: usize, scale: f64) -> Vec<f64> {
        (0..count).map(|_| scale * self.next()).collect()
    }
}

/// The largest of values that a payload's format holds, beside [`CODES`]: that of E2M1, or one of which fp8 blocks make a
/// power of two as their scale, 448 / 64.
fn largest(payload: Payload) -> f64 {
    if payload == Payload::Fp8Block { 7.0 } else { 6.0 }
}

/// Tokens whose first `exact` elements the payload's format holds; the others are smaller than their largest.
fn tokens(random: &mut Random, tokens: usize, (hidden, exact): (usize, usize), largest: f64) -> Vec<f64> {
    let mut all = Vec::with_capacity(tokens * hidden);
    for t in 0..tokens {
        let unit = [0.25, 0.5, 1.0][t % 3];
        for h in 0..hidden {
            let sign = if random.next() < 0.0 { -1.0 } else { 1.0 };
            let value = match h {
                _ if h >= exact => 11.9 * random.next(),
                _ if h % 16 == t % 16 => sign * largest,
                // Positive: −0 would come back as +0.
                _ => match CODES[random.below(8)] {
                    0.0 => 0.0,
                    code => sign * code,
                },
            };
            all.push(value * unit);
        }
    }
    all
}

/// A layer's size: `hidden` as the dispatcher allows.
fn sizes<D: Target>(r: &Rank<D>) -> &'static [usize] {
    match r.columns {
        1 => &[32, 96, 512],
        // Each size is a kernel to compile for every type and direction.
        2..=EXACT => &[96],
        _ => &[512],
    }
}

fn floats<D: Target>() -> impl Iterator<Item = DType> {
    D::FLOATS.iter().copied().filter(|t| *t != DType::F64)
}

/// A block's tensors on a rank; its router sees the first 32 elements only.
fn params<D: Target>(r: &Rank<D>, config: &MoeConfig, dtype: DType) -> Vec<(ParamKind, Tensor<D>)> {
    let local = r.group.local_experts();
    let one = |kind: ParamKind| {
        let dims = kind.dims(config, local)?;
        let seed = if kind.is_replicated() { 50 } else { 100 + r.rank as u64 };
        let mut values = Random::new(seed + kind as u64).numbers(dims.iter().product(), 0.5);
        if kind == ParamKind::Router {
            let of = |(i, v): (usize, f64)| if i % config.hidden < EXACT { v } else { 0.0 };
            values = values.into_iter().enumerate().map(of).collect();
        }
        Some((kind, r.put(dtype, &values, &dims)))
    };
    ParamKind::ALL.into_iter().filter_map(one).collect()
}

/// There and back as the formats have it.
fn rounded<D: Target>(r: &Rank<D>, payload: Payload, x: &Tensor<D>) -> Result<Tensor<D>> {
    let device = r.group.device().clone();
    let dims = [x.dims()[0], x.dims()[1]];
    let mut back = Tensor::empty(&device, x.dtype(), &dims)?;
    let matrix = Matrix::new(x.view())?;
    match payload {
        Payload::Nvfp4 => {
            let format = Nvfp4::TE.row_scaled();
            let mut cast = Nvfp4Tensors::empty(&device, &format, dims, Direction::Rows)?;
            let call = Quantize { format: &format, matrix, rows: Some(cast.view_mut()), columns: None };
            device.quantize(call)?;
            device.dequantize(cast.dequantize(&format, back.view_mut()))?;
        }
        Payload::Fp8Block => {
            let mut cast = Fp8BlockTensors::empty(&device, dims)?;
            device.quantize_fp8_block(QuantizeFp8Block { matrix, rows: cast.view_mut() })?;
            device.dequantize_fp8_block(cast.dequantize(back.view_mut()))?;
        }
        _ => {
            let mut cast = Mxfp8Tensors::empty(&device, dims, Direction::Rows)?;
            let call = QuantizeMxfp8 { format: Mxfp8::TE, matrix, rows: Some(cast.view_mut()), columns: None };
            device.quantize_mxfp8(call)?;
            let (codes, scales) = (cast.codes.view(), cast.scales.view());
            let call = DequantizeMxfp8 { direction: Direction::Rows, codes, scales, out: back.view_mut() };
            device.dequantize_mxfp8(call)?;
        }
    }
    Ok(back)
}

/// Named results of a step as bytes.
type Results = Vec<(&'static str, Vec<u8>)>;

/// A step of a layer: output, loss and, where the rank may ask for them, gradients.
fn step<D: Target>(
    r: &mut Rank<D>,
    layer: &Layer,
    params: &[(ParamKind, Tensor<D>)],
    (x, d_y): (&Tensor<D>, &Tensor<D>),
) -> Result<Results> {
    let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let device = r.group.device().clone();
    let bytes = |t: &Tensor<D>| device.download(t.view());
    let mode = Mode { backward: !r.forward_only, noise: None };
    let forward = layer.forward(&mut r.group, mode, x.view(), &params)?;
    let mut results = vec![("y", bytes(&forward.y)?), ("ids", bytes(&forward.routing.ids)?)];
    let Some(context) = forward.context else { return Ok(results) };
    let inputs = Inputs { x: x.view(), params: &params };
    let cotangents = Cotangents { y: Some(d_y.view()), aux: 0.0 };
    let mut d = layer.backward(&mut r.group, context, inputs, cotangents, GradientMask::ALL)?;
    for (name, t) in [("d x", d.x.take()), ("d weights", Some(d.weights))] {
        results.push((name, bytes(t.as_ref().expect("a gradient"))?));
    }
    for kind in
        [ParamKind::Router, ParamKind::Up, ParamKind::UpBias, ParamKind::Down, ParamKind::DownBias, ParamKind::SharedUp]
    {
        let found = d.params[kind].take();
        if let Some(t) = found {
            results.push((kind.name(), bytes(&t)?));
        }
    }
    Ok(results)
}

fn same(name: &str, found: &Results, expected: &Results) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for ((key, a), (other, b)) in found.iter().zip(expected) {
        assert_eq!(key, other, "{name}");
        assert!(a == b, "{name}: {key} differs");
    }
}

/// Parameters of a case.
#[derive(Debug, Clone, Copy)]
struct Variant {
    payload: Payload,
    hidden: usize,
    dtype: DType,
    weight_at: WeightAt,
    recompute: bool,
}

impl Variant {
    /// Every payload, size and type; places of the weight in turn.
    fn all<D: Target>(r: &Rank<D>) -> Vec<Self> {
        let places = [WeightAt::Activation, WeightAt::Input, WeightAt::Output];
        let mut all: Vec<Self> = Vec::new();
        for payload in PAYLOADS {
            for hidden in sizes(r).iter().copied() {
                for dtype in floats::<D>() {
                    let (weight_at, recompute) = (places[all.len() % 3], all.len() % 2 == 1);
                    all.push(Self { payload, hidden, dtype, weight_at, recompute });
                }
            }
        }
        all
    }

    fn config<D: Target>(&self, s: &Setup<D>) -> MoeConfig {
        let mut config = MoeConfig::new(self.hidden, 24, s.experts(4), 3);
        (config.weight_at, config.recompute) = (self.weight_at, self.recompute);
        (config.expert_bias, config.payload) = (true, self.payload);
        config
    }

    fn plain(&self, config: &MoeConfig) -> MoeConfig {
        let mut config = config.clone();
        config.payload = Payload::Plain;
        config
    }
}

fn group<D: Target>(s: &Setup<D>) -> GroupConfig {
    GroupConfig { max_rows: 4096, ..GroupConfig::new(s.experts(4), T) }
}

/// Tokens of a rank: fewer on every next one, none on the fourth.
fn count(rank: usize) -> usize {
    [T, T - 2, 3, 0][rank % 4]
}

/// This rank's tokens and its output's gradient.
fn data<D: Target>(r: &Rank<D>, v: &Variant, exact: usize) -> (Tensor<D>, Tensor<D>) {
    let (mut random, n) = (Random::new(7 + r.rank as u64), count(r.rank));
    let x = tokens(&mut random, n, (v.hidden, exact), largest(v.payload));
    let d_y = random.numbers(n * v.hidden, 1.0);
    let dims = [n, v.hidden];
    (r.put(v.dtype, &x, &dims), r.put(v.dtype, &d_y, &dims))
}

fn bits<D: Target>(r: &Rank<D>, t: &Tensor<D>) -> Vec<u8> {
    r.group.device().download(t.view()).expect("a download")
}

fn tokens_that_the_formats_hold_pass_unchanged<D: Target>(s: &Setup<D>) {
    s.run(group(s), |r| {
        for (number, v) in Variant::all(r).iter().enumerate() {
            let (config, (x, d_y)) = (v.config(s), data(r, v, v.hidden));
            let back = rounded(r, v.payload, &x).expect("there and back");
            assert!(bits(r, &back) == bits(r, &x), "{v:?}: the formats hold these tokens");
            let params = params(r, &config, v.dtype);
            let (quantized, plain) = layers((&config, &v.plain(&config)), number, told(r, DispatchOptions::default()));
            let expected = step(r, &plain, &params, (&x, &d_y)).expect("a plain step");
            let found = step(r, &quantized, &params, (&x, &d_y)).expect("a step");
            same(&format!("{v:?}"), &found, &expected);
        }
    });
}

/// With errors told when the suite wants them.
fn told<D: Target>(r: &Rank<D>, options: DispatchOptions) -> DispatchOptions {
    let reporting = if r.later { Some(Reporting::Deferred) } else { options.reporting };
    DispatchOptions { reporting, ..options }
}

/// The two layers, numbered apart.
fn layers((config, plain): (&MoeConfig, &MoeConfig), number: usize, options: DispatchOptions) -> (Layer, Layer) {
    let of = |config: &MoeConfig, number: usize| {
        Layer::new(config.clone(), number as u32).expect("a layer").with_dispatch(options)
    };
    (of(config, 2 * number), of(plain, 2 * number + 1))
}

/// Against a plain layer over rows that were rounded before: output, and gradients of the experts and (as if nothing
/// had been rounded) of the tokens. The router's is of the tokens themselves, and is left out.
fn as_rounded_before<D: Target>(s: &Setup<D>, options: DispatchOptions) {
    s.run(group(s), |r| {
        for (number, v) in Variant::all(r).iter().enumerate() {
            let (config, (x, d_y)) = (v.config(s), data(r, v, EXACT));
            let back = rounded(r, v.payload, &x).expect("there and back");
            // Where all elements are the router's, the formats hold all.
            let lossy = v.hidden > EXACT && !x.dims().contains(&0);
            assert_eq!(bits(r, &back) != bits(r, &x), lossy, "{v:?}");
            let params = params(r, &config, v.dtype);
            let (quantized, plain) = layers((&config, &v.plain(&config)), number, told(r, options));
            let expected = step(r, &plain, &params, (&back, &d_y)).expect("a plain step");
            let found = step(r, &quantized, &params, (&x, &d_y)).expect("a step");
            let others = |results: &Results| -> Results {
                results.iter().filter(|(name, _)| !name.starts_with("router")).cloned().collect()
            };
            same(&format!("{v:?}"), &others(&found), &others(&expected));
        }
    });
}

fn experts_read_what_codes_stand_for<D: Target>(s: &Setup<D>) {
    as_rounded_before(s, DispatchOptions::default());
}

fn static_capacities_and_alignment<D: Target>(s: &Setup<D>) {
    let capacity = Capacity::Static((s.ranks * T * 3 + 4 * 16).next_multiple_of(4));
    let fits = DispatchOptions { capacity, alignment: 4, ..DispatchOptions::default() };
    as_rounded_before(s, fits);
    // Room for about half of what is chosen.
    let capacity = Capacity::Static((2 * T).next_multiple_of(4));
    as_rounded_before(s, DispatchOptions { capacity, overflow: Overflow::Drop, ..fits });
}

/// Experts that give zeros leave the shared expert's output, and its gradients.
fn shared_experts_read_tokens_as_they_are<D: Target>(s: &Setup<D>) {
    s.run(group(s), |r| {
        for (number, v) in Variant::all(r).iter().enumerate() {
            let mut config = v.config(s);
            config.shared = Some(SharedConfig { intermediate: 16, gated: false, bias: false });
            let (x, d_y) = data(r, v, EXACT);
            let mut params = params(r, &config, v.dtype);
            for (kind, t) in &mut params {
                if matches!(kind, ParamKind::Down | ParamKind::DownBias) {
                    *t = r.put(v.dtype, &vec![0.0; t.dims().iter().product()], t.dims());
                }
            }
            let (quantized, plain) = layers((&config, &v.plain(&config)), number, told(r, DispatchOptions::default()));
            let expected = step(r, &plain, &params, (&x, &d_y)).expect("a plain step");
            let found = step(r, &quantized, &params, (&x, &d_y)).expect("a step");
            // Experts' gradients alone see the rows: those of `down`, and the signs of the others' zeros.
            let others = |results: &Results| -> Results {
                results.iter().filter(|(name, _)| !name.starts_with("experts.")).cloned().collect()
            };
            same(&format!("{v:?}"), &others(&found), &others(&expected));
        }
    });
}

/// One step of a layer of payload and type of this rank's own.
fn attempt<D: Target>(s: &Setup<D>, r: &mut Rank<D>, payload: Payload, dtype: DType) -> Result<Results> {
    let v = Variant { payload, hidden: 512, dtype, weight_at: WeightAt::Activation, recompute: false };
    let config = v.config(s);
    let ((x, d_y), params) = (data(r, &v, EXACT), params(r, &config, dtype));
    let layer = Layer::new(config, 5)?.with_dispatch(told(r, DispatchOptions::default()));
    step(r, &layer, &params, (&x, &d_y))
}

fn ranks_that_disagree<D: Target>(s: &Setup<D>) {
    // Rows of the last two are of as many bytes, codes and scales.
    for [first, other] in [[Payload::Nvfp4, Payload::Mxfp8], [Payload::Fp8Block, Payload::Mxfp8]] {
        let results = s.run(group(s), |r| {
            let own = if r.rank == 1 { other } else { first };
            let refused = attempt(s, r, own, D::FLOATS[1]).map(drop);
            attempt(s, r, first, D::FLOATS[1]).expect("a step after they have met");
            refused
        });
        for result in results {
            assert!(matches!(&result, Err(Error::ConfigMismatch { field, .. }) if field == "payload"), "{result:?}");
        }
    }
}

/// Codes are of one type whatever the tokens were.
fn tokens_of_different_types<D: Target>(s: &Setup<D>) {
    let types: Vec<DType> = floats::<D>().collect();
    let results = s.run(group(s), |r| {
        let refused = attempt(s, r, Payload::Nvfp4, types[usize::from(r.rank == 1)]).map(drop);
        attempt(s, r, Payload::Nvfp4, types[0]).expect("a step after they have met");
        refused
    });
    for result in results {
        assert!(
            matches!(&result, Err(Error::ConfigMismatch { field, .. }) if field == "the tokens' type"),
            "{result:?}"
        );
    }
}

/// f64 is refused, told before the first collective; so are hidden sizes of other than whole blocks and words, by any
/// layer.
fn tokens_without_a_form<D: Target>(s: &Setup<D>) {
    for payload in PAYLOADS {
        for (hidden, fits) in [(32, true), (48, false), (72, false), (1, false), (96, true), (2880, true), (7168, true)]
        {
            let mut config = MoeConfig::new(hidden, 8, 4, 2);
            config.payload = payload;
            match Layer::new(config, 0) {
                Ok(_) => assert!(fits, "{payload:?}, {hidden}"),
                Err(Error::Invalid { name, found, .. }) => {
                    assert!(!fits && name == "hidden" && found == hidden.to_string(), "{payload:?}, {hidden}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }
    if !D::has_f64() {
        return;
    }
    let results = s.run(group(s), |r| {
        let dtype = if r.rank == 0 { DType::F64 } else { DType::F32 };
        let refused = attempt(s, r, Payload::Nvfp4, dtype).map(drop);
        attempt(s, r, Payload::Nvfp4, DType::F32).expect("a step after it was refused");
        refused
    });
    for (rank, result) in results.into_iter().enumerate() {
        match (rank, result) {
            (0, Err(Error::Invalid { name, found, .. })) => assert_eq!((&name[..], &found[..]), ("tensor x", "f64")),
            (1.., peer) => assert_peer(peer, 0, "f32, bf16 or f16"),
            (_, other) => panic!("{other:?}"),
        }
    }
}
