//! The router of few tokens in one launch: everything that it makes has the bits of the separate kernels'.

use moebius::config::{GroupLimit, GroupScore, Renorm, RouterConfig, Score};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchSpec, PlanRequest, Reporting, RowOrder};
use moebius::kernels::{GatherRows, Kernels, Linear, Origin, Route, RouteAndPlan, Up};
use moebius::kernels::{RowDest, RowSource};
use moebius::{DType, Error, MoeConfig, Result, Tensor};

use crate::harness::{Case, Data, Random, on_gpu, tests};

tests!(
    one_launch_has_the_bits_of_separate_ones,
    equal_logits_have_them_too,
    logits_that_are_no_numbers_are_told_alike,
    what_it_is_not_for_is_left_to_separate_ones,
    layers_have_the_bits_of_separate_ones
);

const LAYER: u32 = 5;

/// A router of a rank's tokens.
#[derive(Debug, Clone)]
struct Setting {
    config: RouterConfig,
    dtype: DType,
    tokens: usize,
    hidden: usize,
    bias: bool,
    spec: DispatchSpec,
}

impl Setting {
    fn new([experts, top_k, hidden, tokens]: [usize; 4]) -> Self {
        let spec = DispatchSpec { reporting: Reporting::Deferred, ..DispatchSpec::new(LAYER, top_k) };
        let config = RouterConfig::new(experts, top_k);
        Self { config, dtype: DType::BF16, tokens, hidden, bias: false, spec }
    }
}

/// Inputs on the GPU.
struct Inputs {
    x: Tensor<Cuda>,
    weight: Tensor<Cuda>,
    bias: Option<Tensor<Cuda>>,
}

impl Inputs {
    fn new(cuda: &Cuda, s: &Setting, scale: f64) -> Result<Self> {
        let mut random = Random::new(18);
        let (experts, width) = (s.config.num_experts, s.hidden);
        let x = random.tensor(&[s.tokens, width], s.dtype, scale)?.to(cuda)?;
        let weight = random.tensor(&[experts, width], s.dtype, 2.0 * (width as f64).powf(-0.5))?.to(cuda)?;
        let bias = random.tensor(&[experts], s.dtype, scale)?.to(cuda)?;
        Ok(Self { x, weight, bias: s.bias.then_some(bias) })
    }
}

/// Everything that routing and planning make, by name; `None`: not at once.
type Made = Option<Vec<(&'static str, Vec<u8>)>>;

fn made(cuda: &Cuda, s: &Setting, inputs: &Inputs, at_once: bool) -> Result<Made> {
    let (t, e, k) = (s.tokens, s.config.num_experts, s.config.top_k);
    let mut logits = Tensor::empty(cuda, DType::F32, &[t, e])?;
    let mut ids = Tensor::empty(cuda, DType::I32, &[t, k])?;
    let mut weights = Tensor::empty(cuda, DType::F32, &[t, k])?;
    let bias = inputs.bias.as_ref().map(Tensor::view);
    let linear = Linear { x: inputs.x.view(), weight: inputs.weight.view(), bias, out: logits.view_mut() };
    let (plan, slot_weights) = if at_once {
        let call = RouteAndPlan {
            linear,
            config: &s.config,
            selection_bias: None,
            jitter: None,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
            spec: &s.spec,
        };
        let Some(routed) = cuda.route_and_plan(call)? else { return Ok(None) };
        (routed.plan, routed.slot_weights)
    } else {
        cuda.linear(linear)?;
        cuda.route(Route {
            config: &s.config,
            logits: logits.view(),
            selection_bias: None,
            jitter: None,
            origin: Origin { rank: 0, layer: LAYER },
            reporting: Reporting::Deferred,
            ids: ids.view_mut(),
            weights: weights.view_mut(),
        })?;
        let request = PlanRequest {
            rank: 0,
            ranks: 1,
            num_experts: e,
            ids: ids.view(),
            weights: None,
            tokens: &[t],
            spec: &s.spec,
            row_order: RowOrder::Local,
        };
        let Some(plan) = cuda.plan_on_device(request)? else { panic!("no plan of {s:?}") };
        let rows = plan.segments.rows;
        let mut slot_weights = Tensor::empty(cuda, DType::F32, &[rows, 1])?;
        cuda.gather_rows(GatherRows {
            source: weights.view().reshape(&[t * k, 1])?,
            map: plan.weight_map.view(),
            origin: Origin { rank: 0, layer: LAYER },
            out: slot_weights.view_mut(),
        })?;
        (plan, slot_weights)
    };
    // What lists the tiles are seen by is a product over them.
    let width = 64;
    let rows = plan.segments.rows;
    let experts = Random::new(7).tensor(&[e, 2 * width, s.hidden], s.dtype, 0.1)?.to(cuda)?;
    let mut hidden = Tensor::zeros(cuda, s.dtype, &[rows, width])?;
    cuda.up(Up {
        rows: RowSource::mapped(inputs.x.view(), plan.row_map.view()),
        segments: &plan.segments,
        weight: experts.view().into(),
        bias: None,
        slot_weights: None,
        activation: moebius::config::Activation::SiluGlu,
        pre: None,
        out: RowDest::direct(hidden.view_mut()),
        movement_sms: None,
    })?;
    let bytes = |t: &Tensor<Cuda>| cuda.download(t.view());
    let stats = plan.stats.get()?;
    let counts = stats.expert_load.iter().chain(&stats.padded_counts).chain([&stats.needed_rows, &stats.dropped]);
    Ok(Some(vec![
        ("logits", bytes(&logits)?),
        ("ids", bytes(&ids)?),
        ("weights", bytes(&weights)?),
        ("offsets", bytes(&plan.segments.offsets)?),
        ("counts", bytes(&plan.segments.counts)?),
        ("kept ids", bytes(&plan.kept_ids)?),
        ("row map", bytes(&plan.row_map)?),
        ("weight map", bytes(&plan.weight_map)?),
        ("return map", bytes(&plan.return_map)?),
        ("slots' weights", bytes(&slot_weights)?),
        ("up", bytes(&hidden)?),
        ("statistics", counts.flat_map(|n| n.to_le_bytes()).collect()),
    ]))
}

/// Forward and backward of whole layers of one rank. Where a layer is told at once what is wrong, its router is three
/// launches; where later, it is one for up to 8 tokens. Everything else is the same, so that all results have the same bits.
fn layers_have_the_bits_of_separate_ones(cuda: &Cuda) -> Result<()> {
    for [experts, top_k, hidden, tokens] in SIZES {
        let plain = MoeConfig::new(hidden, 16, experts, top_k);
        let mut other = plain.clone();
        (other.router.logit_bias, other.aux.balance, other.aux.z) = (true, 0.1, 0.01);
        other.router.renorm = Some(Renorm { p: 1.0, epsilon: 1e-20, floor: 0.5 });
        for (config, dtype) in [(plain, DType::BF16), (other, DType::F16)] {
            // One token, as many as the size has, and one more than the one launch serves.
            for tokens in [1, tokens, 9] {
                let case = Case { seed: 19, ..Case::new(config.clone(), tokens, dtype) };
                let data = Data::new(&case)?;
                let told = |reporting| {
                    let mut case = case.clone();
                    case.dispatch.reporting = Some(reporting);
                    on_gpu(&case, &data, cuda)
                };
                let separate = told(Reporting::Immediate)?;
                let at_once = told(Reporting::Deferred)?;
                assert_eq!(at_once.len(), separate.len());
                for ((name, one), (_, theirs)) in at_once.iter().zip(&separate) {
                    let same = one.iter().zip(theirs).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(
                        same && one.len() == theirs.len(),
                        "{name} of {experts}, {top_k}, {hidden}, {tokens}, {dtype:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

fn is_hopper(cuda: &Cuda) -> bool {
    cuda.stream().context().compute_capability().is_ok_and(|(major, _)| major == 9)
}

fn compare(cuda: &Cuda, s: &Setting, scale: f64) -> Result<()> {
    let inputs = Inputs::new(cuda, s, scale)?;
    let separate = made(cuda, s, &inputs, false)?.unwrap_or_default();
    for _again in 0..3 {
        let at_once = made(cuda, s, &inputs, true)?;
        // Other GPUs have the separate kernels alone.
        let Some(at_once) = at_once else {
            assert!(!is_hopper(cuda), "not at once: {s:?}");
            return Ok(());
        };
        for ((name, one), (_, other)) in at_once.iter().zip(&separate) {
            assert!(one == other, "{name} of {s:?}");
        }
        assert_eq!(at_once.len(), separate.len());
    }
    Ok(())
}

/// Experts, choices a token, width, tokens: whole steps and parts of k, one warp of a block that multiplies and two, blocks
/// without experts, most choices.
const SIZES: [[usize; 4]; 9] = [
    [128, 8, 2048, 1],
    [128, 8, 2048, 8],
    [128, 8, 4096, 3],
    [64, 8, 2048, 5],
    [8, 2, 4096, 8],
    [60, 4, 136, 7],
    [256, 8, 512, 6],
    [256, 32, 8, 8],
    [3, 3, 72, 2],
];

fn one_launch_has_the_bits_of_separate_ones(cuda: &Cuda) -> Result<()> {
    for size in SIZES {
        let plain = Setting::new(size);
        compare(cuda, &plain, 1.0)?;
        let mut other = Setting { dtype: DType::F16, bias: true, ..plain.clone() };
        other.config.renorm = Some(Renorm { p: 1.0, epsilon: 1e-20, floor: 0.5 });
        other.config.scale = 2.5;
        // Padding, where the layout still has the tiles of few rows, and more rows than any choice needs.
        let (e, choices) = (size[0], size[1] * size[3]);
        other.spec.alignment = if choices.min(e) * 16 + choices <= 5 * e { 16 } else { 1 };
        other.spec.capacity = Capacity::Static(6 * e);
        compare(cuda, &other, 1.0)?;
        other.config.renorm = None;
        compare(cuda, &other, 30.0)?;
    }
    Ok(())
}

/// All logits zero: the first experts are chosen, by every token.
fn equal_logits_have_them_too(cuda: &Cuda) -> Result<()> {
    for size in SIZES {
        compare(cuda, &Setting::new(size), 0.0)?;
    }
    Ok(())
}

fn logits_that_are_no_numbers_are_told_alike(cuda: &Cuda) -> Result<()> {
    let s = Setting { bias: true, ..Setting::new([128, 8, 256, 4]) };
    let mut inputs = Inputs::new(cuda, &s, 1.0)?;
    let bias: Vec<f64> = (0..128).map(|e| if e == 77 { f64::NAN } else { 0.0 }).collect();
    inputs.bias = Some(cuda.write(&bias, DType::BF16, &[128])?);
    let told = |at_once| match made(cuda, &s, &inputs, at_once) {
        Err(error @ Error::NanLogits { .. }) => error.to_string(),
        Ok(None) => "not at once".to_string(),
        other => panic!("{other:?}"),
    };
    let (separate, at_once) = (told(false), told(true));
    assert!(separate.contains("77"), "{separate}");
    if is_hopper(cuda) {
        assert_eq!(at_once, separate);
    }
    cuda.check()
}

fn what_it_is_not_for_is_left_to_separate_ones(cuda: &Cuda) -> Result<()> {
    let plain = Setting::new([128, 8, 256, 4]);
    let with = |change: &dyn Fn(&mut Setting)| {
        let mut changed = plain.clone();
        change(&mut changed);
        changed
    };
    let others = [
        with(&|s| s.tokens = 9),
        with(&|s| s.tokens = 0),
        with(&|s| s.hidden = 252),
        with(&|s| s.hidden = 16384),
        with(&|s| s.config.num_experts = 512),
        with(&|s| s.config.score = Score::Sigmoid),
        with(&|s| s.config.groups = Some(GroupLimit { groups: 8, keep: 2, rank_by: GroupScore::Max })),
        with(&|s| s.spec.capacity = Capacity::Static(31)),
        with(&|s| s.spec.alignment = 128),
        with(&|s| s.spec.reporting = Reporting::Immediate),
        with(&|s| s.dtype = DType::F32),
    ];
    for s in others {
        let inputs = Inputs::new(cuda, &s, 1.0)?;
        assert!(made(cuda, &s, &inputs, true)?.is_none(), "{s:?}");
    }
    let inputs = Inputs::new(cuda, &plain, 1.0)?;
    assert!(made(&cuda.portable(), &plain, &inputs, true)?.is_none());
    Ok(())
}
