//! Plans that the GPU makes behind the host's back: the same as the CPU's, with errors told later, and a step that
//! waits for nothing and asks the driver for nothing.

use moebius::config::{BalanceKind, CapacityOrder, ExpertCapacity, Payload};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchSpec, Group, GroupConfig, Overflow, Reporting, Stats};
use moebius::kernels::Kernels;
use moebius::layer::{Cotangents, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam, Scalar};
use moebius::{DType, Error, MoeConfig, Result, Tensor, TensorRef};

use crate::harness::{Case, Data, Random, tests};

tests!(
    plans_are_the_cpus,
    bad_ids_are_masked_and_told_later,
    too_small_a_capacity_is_told_later,
    a_seen_step_asks_the_driver_for_nothing,
    graphs_replay_the_bits_of_eager_steps,
    losses_of_the_device_are_replayed_with_other_gradients,
    a_nan_that_is_told_later_goes_its_way,
    memory_that_a_graph_reads_stays_while_it_lives,
    what_waits_for_the_gpu_cannot_be_captured,
);

/// Content of a plan, as far as anybody can see.
struct Seen {
    /// Whether a bad id was told of.
    told: bool,
    stats: Stats,
    kept: Vec<f64>,
    row_map: Vec<f64>,
    offsets: Vec<f64>,
    counts: Vec<f64>,
}

fn prepare<D: Kernels>(group: &mut Group<D>, ids: TensorRef<'_, D>, spec: &DispatchSpec) -> Result<Seen> {
    let device = group.device().clone();
    let handle = group.dispatcher().prepare(ids, None, spec)?;
    let told = group.dispatcher().check().is_err();
    let read = |t: TensorRef<'_, D>| device.read(t);
    let stats = handle.stats()?.clone();
    let mut row_map = read(handle.row_map())?;
    assert!(row_map[stats.segment_end()..].iter().all(|row| *row == -1.0), "rows past the end");
    row_map.truncate(stats.segment_end());
    Ok(Seen {
        told,
        kept: read(handle.kept_ids())?,
        row_map,
        offsets: read(handle.segments().offsets.view())?,
        counts: read(handle.segments().counts.view())?,
        stats,
    })
}

fn same(name: &str, cuda: &Cuda, ids: &Tensor<Cpu>, experts: usize, spec: &DispatchSpec) {
    let spec = DispatchSpec { reporting: Reporting::Deferred, ..*spec };
    let mut config = GroupConfig::new(experts, ids.dims()[0].max(1));
    config.max_rows = 1 << 20;
    let mut host = Group::<Cpu>::single(config.clone()).expect("a group");
    let expected = prepare(&mut host, ids.view(), &spec).unwrap_or_else(|e| panic!("{name} on the CPU: {e}"));
    let mut group = cuda.group(config).expect("a group");
    let on_gpu = ids.to(cuda).expect("ids");
    let found = prepare(&mut group, on_gpu.view(), &spec).unwrap_or_else(|e| panic!("{name} on the GPU: {e}"));
    assert_eq!(found.stats, expected.stats, "{name}");
    assert_eq!(found.kept, expected.kept, "{name}: kept ids");
    assert_eq!(found.row_map, expected.row_map, "{name}: row map");
    assert_eq!((found.offsets, found.counts), (expected.offsets, expected.counts), "{name}: segments");
    assert_eq!(found.told, expected.told, "{name}: a bad id");
}

/// Random distinct experts; some choices dropped.
fn choices(random: &mut Random, (tokens, k, experts): (usize, usize, usize)) -> Vec<i64> {
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut chosen: Vec<i64> = Vec::new();
        while chosen.len() < k {
            let e = (random.next() % experts as u64) as i64;
            match random.next() % 20 {
                0 => chosen.push(-1),
                _ if !chosen.contains(&e) => chosen.push(e),
                _ => {}
            }
        }
        ids.extend(chosen);
    }
    ids
}

fn plans_are_the_cpus(cuda: &Cuda) -> Result<()> {
    let mut random = Random::new(5);
    for (tokens, k, experts) in [
        (0, 2, 4),
        (1, 1, 1),
        (7, 3, 5),
        (300, 8, 128),
        (1000, 7, 300),
        (5000, 2, 1000),
        (9000, 6, 90),
        (16_384, 8, 128),
        (70_000, 4, 64),
    ] {
        let ids = choices(&mut random, (tokens, k, experts));
        let narrow = Tensor::from_vec(ids.iter().map(|id| *id as i32).collect(), &[tokens, k])?;
        let wide = Tensor::from_vec(ids, &[tokens, k])?;
        let plain = DispatchSpec::new(0, k);
        let limit = Some(ExpertCapacity { factor: 0.7, order: CapacityOrder::Position, renormalize: false });
        let half = Capacity::Static(tokens * k / 2 + 1);
        for (name, spec) in [
            ("plain", plain),
            ("aligned", DispatchSpec { alignment: 16, ..plain }),
            ("expert capacity", DispatchSpec { expert_capacity: limit, alignment: 4, ..plain }),
            ("static", DispatchSpec { capacity: half, overflow: Overflow::Drop, alignment: 8, ..plain }),
        ] {
            let name = format!("{name}, T {tokens} K {k} E {experts}");
            same(&name, cuda, &narrow, experts, &spec);
            same(&format!("{name}, i64"), cuda, &wide, experts, &spec);
        }
    }
    Ok(())
}

fn bad_ids_are_masked_and_told_later(cuda: &Cuda) -> Result<()> {
    for bad in [vec![0i32, 1, 4, 2], vec![0, 1, -2, 3], vec![2, 2, 0, 1]] {
        let ids = Tensor::from_vec(bad, &[2, 2])?;
        same("a bad id", cuda, &ids, 4, &DispatchSpec::new(0, 2));
    }
    // Of as many choices as one cluster plans, and as several kernels do: the first of two that are wrong.
    for tokens in [6000, 70_000] {
        let mut ids = choices(&mut Random::new(6), (tokens, 2, 8));
        (ids[9001], ids[11_998]) = (8, -5);
        let ids = Tensor::from_vec(ids, &[tokens, 2])?;
        same("bad ids of many", cuda, &ids, 8, &DispatchSpec::new(0, 2));
    }
    // Without a check in between, a later prepare tells, once the news has reached the host.
    let mut group = cuda.group(GroupConfig::new(4, 2))?;
    let spec = DispatchSpec { reporting: Reporting::Deferred, ..DispatchSpec::new(0, 2) };
    let ids = Tensor::from_vec(vec![0i32, 9, 1, 2], &[2, 2])?.to(cuda)?;
    group.dispatcher().prepare(ids.view(), None, &spec)?;
    cuda.stream().synchronize().expect("the stream");
    let error = group.dispatcher().prepare(ids.view(), None, &spec).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("topk_ids[0, 1] = 9")), "{error:?}");
    cuda.check()
}

fn too_small_a_capacity_is_told_later(cuda: &Cuda) -> Result<()> {
    let mut config = GroupConfig::new(4, 8);
    config.max_rows = 16;
    let mut group = cuda.group(config)?;
    let spec =
        DispatchSpec { capacity: Capacity::Static(3), reporting: Reporting::Deferred, ..DispatchSpec::new(6, 2) };
    let ids = Tensor::from_vec(vec![0i32, 1, 1, 2], &[2, 2])?.to(cuda)?;
    group.dispatcher().prepare(ids.view(), None, &spec)?;
    let error = group.dispatcher().check().err();
    assert!(matches!(error, Some(Error::Capacity { rank: 0, layer: 6, needed: 4, capacity: 3 })), "{error:?}");
    group.dispatcher().check()
}

/// A layer with its parameters on the GPU, and memory for its results.
struct Steps {
    cuda: Cuda,
    layer: Layer,
    group: Group<Cuda>,
    params: Vec<(ParamKind, Tensor<Cuda>)>,
    x: Tensor<Cuda>,
    d_y: Tensor<Cuda>,
    y: Tensor<Cuda>,
    d_x: Tensor<Cuda>,
    d_router: Tensor<Cuda>,
    d_up: Tensor<Cuda>,
    d_down: Tensor<Cuda>,
    /// The auxiliary losses' sum.
    aux: Tensor<Cuda>,
    /// Their gradient, if the device has it.
    d_aux: Option<Tensor<Cuda>>,
}

impl Steps {
    fn new(cuda: &Cuda, case: &Case) -> Result<Self> {
        let data = Data::new(case)?;
        let put = |t: &Tensor<Cpu>| t.to(cuda);
        let params: Vec<_> = data.params.iter().map(|(kind, t)| Ok((*kind, put(t)?))).collect::<Result<_>>()?;
        let like = |wanted: ParamKind| {
            let dims = wanted.dims(&case.config, case.config.router.num_experts).unwrap_or_default();
            Tensor::empty(cuda, case.dtype, &dims)
        };
        Ok(Self {
            cuda: cuda.clone(),
            layer: Layer::new(case.config.clone(), 0)?,
            group: cuda.group(GroupConfig::new(case.config.router.num_experts, case.tokens))?,
            y: Tensor::empty(cuda, case.dtype, data.x.dims())?,
            d_x: Tensor::empty(cuda, case.dtype, data.x.dims())?,
            d_router: like(ParamKind::Router)?,
            d_up: like(ParamKind::Up)?,
            d_down: like(ParamKind::Down)?,
            aux: Tensor::empty(cuda, DType::F32, &[])?,
            d_aux: None,
            x: put(&data.x)?,
            d_y: put(&data.d_y)?,
            params,
        })
    }

    /// Forward and backward, into the same memory each time.
    fn step(&mut self) -> Result<()> {
        let views =
            ParamViews::collect(|kind| Ok(self.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
        let params = views.params();
        let mode = Mode { backward: true, noise: None };
        let inputs = Inputs { x: self.x.view(), params: &params };
        let made = self.layer.forward_into(&mut self.group, mode, inputs, self.y.view_mut())?;
        made.aux.write(self.aux.view_mut())?;
        let Some(context) = made.context else { return Ok(()) };
        let inputs = Inputs { x: self.x.view(), params: &params };
        let aux = self.d_aux.as_ref().map_or(Scalar::Host(0.3), |d| Scalar::Device(d.view()));
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux };
        let into = GradientsMut {
            x: Some(self.d_x.view_mut()),
            params: PerParam {
                router: Some(self.d_router.view_mut()),
                up: Some(self.d_up.view_mut()),
                down: Some(self.d_down.view_mut()),
                ..PerParam::none()
            },
            ..GradientsMut::none()
        };
        self.layer.backward_into(&mut self.group, context, inputs, cotangents, into)
    }

    /// Bits of all results.
    fn results(&self) -> Result<Vec<Vec<u8>>> {
        let all = [&self.y, &self.d_x, &self.d_router, &self.d_up, &self.d_down, &self.aux];
        all.iter().map(|t| self.cuda.download(t.view())).collect()
    }

    fn set_x(&mut self, x: &Tensor<Cpu>) -> Result<()> {
        self.cuda.upload(x.as_bytes(), self.x.view_mut())
    }

    /// The losses' gradient as a tensor of the device, in the same memory each time.
    fn set_d_aux(&mut self, value: f32) -> Result<()> {
        let d_aux = match self.d_aux.take() {
            Some(t) => t,
            None => Tensor::empty(&self.cuda, DType::F32, &[1])?,
        };
        let d_aux = self.d_aux.insert(d_aux);
        self.cuda.upload(&value.to_ne_bytes(), d_aux.view_mut())
    }
}

fn layers() -> Vec<Case> {
    let mut with_aux = MoeConfig::new(64, 40, 16, 4);
    (with_aux.aux.balance, with_aux.aux.z) = (0.1, 0.01);
    let mut shared = MoeConfig::new(128, 64, 8, 2);
    shared.router.expert_capacity =
        Some(ExpertCapacity { factor: 0.9, order: CapacityOrder::Position, renormalize: true });
    let quantized = |hidden, payload| {
        let mut config = MoeConfig::new(hidden, 40, 16, 4);
        config.payload = payload;
        config
    };
    vec![
        Case::new(quantized(96, Payload::Nvfp4), 150, DType::BF16),
        Case::new(quantized(512, Payload::Mxfp8), 150, DType::BF16),
        Case::new(quantized(512, Payload::Fp8Block), 150, DType::BF16),
        Case::new(MoeConfig::new(64, 40, 16, 4), 200, DType::F32),
        Case::new(with_aux, 333, DType::BF16),
        Case::new(shared, 500, DType::BF16),
        Case::new(MoeConfig::new(256, 128, 32, 8), 1000, DType::BF16),
    ]
}

fn a_seen_step_asks_the_driver_for_nothing(cuda: &Cuda) -> Result<()> {
    for case in layers() {
        let mut steps = Steps::new(cuda, &case)?;
        steps.step()?;
        steps.step()?;
        let before = cuda.memory();
        for _ in 0..5 {
            steps.step()?;
        }
        assert_eq!(cuda.memory(), before);
        cuda.check()?;
    }
    Ok(())
}

fn graphs_replay_the_bits_of_eager_steps(cuda: &Cuda) -> Result<()> {
    for case in layers() {
        let mut random = Random::new(77);
        let inputs: Vec<_> = (0..5)
            .map(|_| random.tensor(&[case.tokens, case.config.hidden], case.dtype, 1.0))
            .collect::<Result<_>>()?;
        let mut steps = Steps::new(cuda, &case)?;
        let mut eager = Vec::new();
        for x in &inputs {
            steps.set_x(x)?;
            steps.step()?;
            eager.push(steps.results()?);
        }
        assert!(eager.windows(2).all(|w| w[0] != w[1]), "inputs differ, so results do");
        let mut graph = cuda.capture(|| steps.step())?;
        for (x, expected) in inputs.iter().zip(&eager).rev() {
            steps.set_x(x)?;
            graph.replay()?;
            assert!(steps.results()? == *expected, "a replay differs from the eager step");
        }
        // Eager steps and other tensors between replays do not disturb it.
        let (x, expected) = (&inputs[2], &eager[2]);
        steps.set_x(x)?;
        steps.step()?;
        let noise = random.tensor(&[1 << 16], DType::F32, 1.0)?;
        let others: Vec<_> = (0..8).map(|_| noise.to(cuda)).collect::<Result<_>>()?;
        graph.replay()?;
        assert!(steps.results()? == *expected, "a replay after other work differs");
        for t in &others {
            assert!(cuda.to_host(t.view())?.as_bytes() == noise.as_bytes(), "a replay wrote into another tensor");
        }
        cuda.check()?;
    }
    Ok(())
}

fn losses_of_the_device_are_replayed_with_other_gradients(cuda: &Cuda) -> Result<()> {
    for kind in [BalanceKind::Switch, BalanceKind::HuggingFace, BalanceKind::Sequence { length: 50 }] {
        let mut config = MoeConfig::new(64, 40, 16, 4);
        (config.aux.balance, config.aux.balance_kind, config.aux.z) = (0.7, kind, 0.05);
        let case = Case::new(config, 333, DType::F32);
        let mut random = Random::new(78);
        let mut tokens = || random.tensor(&[case.tokens, case.config.hidden], case.dtype, 1.0);
        let xs = [tokens()?, tokens()?];
        let inputs = [(0, 0.3), (1, 0.3), (1, -1.7), (0, 0.0), (0, 40.0)];
        let mut steps = Steps::new(cuda, &case)?;
        let mut eager = Vec::new();
        for (x, d_aux) in inputs {
            steps.set_x(&xs[x])?;
            steps.set_d_aux(d_aux)?;
            steps.step()?;
            eager.push(steps.results()?);
        }
        let (y, d_x, d_router, losses) = (0, 1, 2, 5);
        let (a, b) = (&eager[1], &eager[2]);
        assert!(a[y] == b[y] && a[losses] == b[losses], "{kind:?}: what does not depend on the losses' gradient");
        assert!(a[d_x] != b[d_x] && a[d_router] != b[d_router], "{kind:?}: what does");
        assert!(eager[0][losses] != a[losses], "{kind:?}: losses of other tokens");
        let mut graph = cuda.capture(|| steps.step())?;
        for ((x, d_aux), expected) in inputs.into_iter().zip(&eager).rev() {
            steps.set_x(&xs[x])?;
            steps.set_d_aux(d_aux)?;
            graph.replay()?;
            assert!(steps.results()? == *expected, "{kind:?}, gradient {d_aux}: a replay differs from the eager step");
        }
        cuda.check()?;
    }
    Ok(())
}

/// NaN weights of the router, finite tokens: what follows is NaN, not 0, and every choice stands until the host is
/// told.
fn a_nan_that_is_told_later_goes_its_way(cuda: &Cuda) -> Result<()> {
    for experts in [16, 64, 257] {
        let mut config = MoeConfig::new(64, 40, experts, 4);
        config.router.renorm = None;
        let case = Case::new(config, 100, DType::F32);
        let mut steps = Steps::new(cuda, &case)?;
        let router = steps.params.iter_mut().find(|(kind, _)| *kind == ParamKind::Router).map(|(_, t)| t);
        let router = router.expect("every layer has one");
        let mut weights = cuda.read(router.view())?;
        *weights.last_mut().expect("experts") = f64::NAN;
        *router = cuda.write(&weights, DType::F32, &[experts, 64])?;
        let views =
            ParamViews::collect(|kind| Ok(steps.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
        let (mode, params) = (Mode { backward: false, noise: None }, views.params());
        let inputs = Inputs { x: steps.x.view(), params: &params };
        let made = steps.layer.forward_into(&mut steps.group, mode, inputs, steps.y.view_mut())?;
        let told = cuda.check();
        let last = experts - 1;
        assert!(matches!(told, Err(Error::NanLogits { token: 0, expert, .. }) if expert == last), "{told:?}");
        let y = cuda.read(steps.y.view())?;
        assert!(y.iter().all(|v| v.is_nan()), "E {experts}: a NaN was lost on its way");
        let load = made.routing.load.get()?;
        assert_eq!((load.dropped, load.total()), (0, 400), "E {experts}: choices were masked");
    }
    Ok(())
}

fn memory_that_a_graph_reads_stays_while_it_lives(cuda: &Cuda) -> Result<()> {
    let case = &layers()[0];
    let mut steps = Steps::new(cuda, case)?;
    steps.step()?;
    let expected = steps.results()?;
    let mut graph = cuda.capture(|| steps.step().map(|()| cuda.trim()))?;
    // The caller's tensors go; what is allocated next must not get their memory, nor what the graph had for its own.
    let Steps { x, params, d_y, y, .. } = steps;
    let bytes = x.bytes();
    drop((x, params, d_y));
    let zeros: Vec<_> = (0..64).map(|_| Tensor::zeros(cuda, DType::U8, &[bytes])).collect::<Result<_>>()?;
    graph.replay()?;
    assert!(cuda.download(y.view())? == expected[0]);
    for t in &zeros {
        assert!(cuda.download(t.view())?.iter().all(|b| *b == 0));
    }
    Ok(())
}

fn what_waits_for_the_gpu_cannot_be_captured(cuda: &Cuda) -> Result<()> {
    let t = Tensor::zeros(cuda, DType::F32, &[4])?;
    let error = cuda.capture(|| cuda.read(t.view())).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("captured into a graph")), "{error:?}");
    let nested = cuda.capture(|| cuda.capture(|| Ok(())).map(drop)).err().map(|e| e.to_string());
    assert!(nested.as_ref().is_some_and(|e| e.contains("no capture under way")), "{nested:?}");
    // The device works on.
    assert!(!cuda.is_capturing()?);
    assert_eq!(cuda.read(t.view())?, [0.0; 4]);
    let mut config = MoeConfig::new(64, 40, 16, 4);
    config.router.expert_capacity =
        Some(ExpertCapacity { factor: 0.9, order: CapacityOrder::Probability, renormalize: false });
    let mut steps = Steps::new(cuda, &Case::new(config, 100, DType::F32))?;
    steps.step()?;
    assert!(cuda.capture(|| steps.step()).is_err(), "a plan on the host");
    steps.step()
}
