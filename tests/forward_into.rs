//! Outputs and gradients in the caller's memory: the bits of the owned ones, only what was asked for, added where
//! asked.

use std::time::Duration;

use moebius::config::SharedConfig;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::kernels::Kernels;
use moebius::layer::{
    Cotangents, GradientMask, GradientRequest, GradientsMut, Inputs, Layer, Mode, ParamKind, ParamViews, PerParam,
    StepSizes,
};
use moebius::{DType, Error, MoeConfig, Result, Tensor};
use rand::{Rng, rngs::StdRng};

#[path = "common/received_rows.rs"]
mod received_rows;
#[path = "common/seed.rs"]
mod seed;

const T: usize = 11;
const BACKWARD: Mode = Mode { backward: true, noise: None };

struct Setup {
    layer: Layer,
    group: Group<Cpu>,
    params: Vec<(ParamKind, Tensor<Cpu>)>,
    x: Tensor<Cpu>,
    d_y: Tensor<Cpu>,
}

fn random(rng: &mut StdRng, dims: &[usize]) -> Result<Tensor<Cpu>> {
    let values = (0..dims.iter().product()).map(|_| rng.random_range(-0.5f32..0.5)).collect();
    Tensor::from_vec(values, dims)
}

impl Setup {
    fn new() -> Result<Self> {
        let mut config = MoeConfig::new(12, 8, 6, 2);
        config.expert_bias = true;
        config.router.logit_bias = true;
        let rng = &mut seed::generator(3);
        let (x, d_y) = (random(rng, &[T, 12])?, random(rng, &[T, 12])?);
        let params = ParamKind::ALL
            .into_iter()
            .filter_map(|kind| Some((kind, kind.dims(&config, 6)?)))
            .map(|(kind, dims)| Ok((kind, random(rng, &dims)?)))
            .collect::<Result<_>>()?;
        let group = Group::<Cpu>::single(GroupConfig::new(6, T))?;
        Ok(Self { layer: Layer::new(config, 0)?, group, params, x, d_y })
    }

    /// Runs a backward behind a forward.
    fn backward<R>(
        &mut self,
        run: impl FnOnce(
            &Layer,
            &mut Group<Cpu>,
            moebius::layer::Context<Cpu>,
            Inputs<'_, '_, Cpu>,
            Cotangents<'_, Cpu>,
        ) -> R,
    ) -> Result<R> {
        let views =
            ParamViews::collect(|kind| Ok(self.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
        let params = views.params();
        let forward = self.layer.forward(&mut self.group, BACKWARD, self.x.view(), &params)?;
        let context = forward.context.expect("backward was asked for");
        let inputs = Inputs { x: self.x.view(), params: &params };
        let cotangents = Cotangents { y: Some(self.d_y.view()), aux: 0.0 };
        Ok(run(&self.layer, &mut self.group, context, inputs, cotangents))
    }
}

fn poisoned(dims: &[usize]) -> Result<Tensor<Cpu>> {
    Tensor::empty(&Cpu::poisoning(), DType::F32, dims)
}

#[test]
fn forward_into_writes_the_bits_of_forward() -> Result<()> {
    let mut s = Setup::new()?;
    let views = ParamViews::collect(|kind| Ok(s.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let owned = s.layer.forward(&mut s.group, Mode::default(), s.x.view(), &params)?;
    let mut y = poisoned(&[T, 12])?;
    let made =
        s.layer.forward_into(&mut s.group, Mode::default(), Inputs { x: s.x.view(), params: &params }, y.view_mut())?;
    assert_eq!(y.as_bytes(), owned.y.as_bytes());
    assert_eq!(made.routing.load.get()?, owned.routing.load.get()?);
    assert!(made.context.is_none());
    let mut short = poisoned(&[T - 1, 12])?;
    let error = s.layer.forward_into(
        &mut s.group,
        Mode::default(),
        Inputs { x: s.x.view(), params: &params },
        short.view_mut(),
    );
    assert!(matches!(error, Err(Error::Shape { ref tensor, .. }) if tensor == "y"), "{error:?}");
    let mut wide = Tensor::empty(&Cpu::new(), DType::F64, &[T, 12])?;
    let error =
        s.layer.forward_into(&mut s.group, Mode::default(), Inputs { x: s.x.view(), params: &params }, wide.view_mut());
    assert!(matches!(error, Err(Error::DType { ref tensor, .. }) if tensor == "y"), "{error:?}");
    Ok(())
}

#[test]
fn backward_into_writes_what_it_is_given_room_for() -> Result<()> {
    let mut s = Setup::new()?;
    let owned = s.backward(|l, g, c, i, d| l.backward(g, c, i, d, GradientMask::ALL))??;
    let of = |t: &Option<Tensor<Cpu>>| t.as_ref().map(|t| t.as_bytes().to_vec());
    let (mut x, mut router) = (poisoned(&[T, 12])?, poisoned(&[6, 12])?);
    let (mut up, mut up_bias) = (poisoned(&[6, 16, 12])?, poisoned(&[6, 16])?);
    let into = GradientsMut {
        x: Some(x.view_mut()),
        params: PerParam {
            router: Some(router.view_mut()),
            up: Some(up.view_mut()),
            up_bias: Some(up_bias.view_mut()),
            ..PerParam::none()
        },
        ..GradientsMut::none()
    };
    s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, into))??;
    let found = [&x, &router, &up, &up_bias].map(|t| Some(t.as_bytes().to_vec()));
    assert_eq!(found, [of(&owned.x), of(&owned.router), of(&owned.up), of(&owned.up_bias)]);
    // Room for nothing: everything still runs.
    s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, GradientsMut::none()))?
}

/// What is given is written where it is, and not made again; the rest is made as `wanted` says.
#[test]
fn backward_with_writes_what_it_is_given_and_makes_the_rest() -> Result<()> {
    let mut s = Setup::new()?;
    let owned = s.backward(|l, g, c, i, d| l.backward(g, c, i, d, GradientMask::ALL))??;
    let of = |t: &Option<Tensor<Cpu>>| t.as_ref().map(|t| t.as_bytes().to_vec());
    for x_wanted in [false, true] {
        let (mut x, mut up) = (poisoned(&[T, 12])?, poisoned(&[6, 16, 12])?);
        let given = GradientsMut {
            x: Some(x.view_mut()),
            params: PerParam { up: Some(up.view_mut()), ..PerParam::none() },
            ..GradientsMut::none()
        };
        let wanted = GradientMask { x: x_wanted, router: false, ..GradientMask::ALL };
        let made = s.backward(|l, g, c, i, d| {
            let cotangents = Cotangents { y: d.y, aux: d.aux.into() };
            l.backward_with(g, c, i, cotangents, GradientRequest { wanted, given })
        })??;
        assert_eq!([&x, &up].map(|t| Some(t.as_bytes().to_vec())), [of(&owned.x), of(&owned.up)]);
        assert!(made.x.is_none() && made.up.is_none() && made.router.is_none());
        assert_eq!(of(&made.down), of(&owned.down));
    }
    Ok(())
}

#[test]
fn experts_gradients_are_added_where_asked() -> Result<()> {
    let mut s = Setup::new()?;
    let owned = s.backward(|l, g, c, i, d| l.backward(g, c, i, d, GradientMask::ALL))??;
    let zeros = |dims: &[usize]| Tensor::zeros(&Cpu::new(), DType::F32, dims);
    // The router's is overwritten each time, also where NaN was.
    let (mut up, mut down, mut router) = (zeros(&[6, 16, 12])?, zeros(&[6, 12, 8])?, poisoned(&[6, 12])?);
    for _ in 0..2 {
        let into = GradientsMut {
            accumulate: true,
            params: PerParam {
                up: Some(up.view_mut()),
                down: Some(down.view_mut()),
                router: Some(router.view_mut()),
                ..PerParam::none()
            },
            ..GradientsMut::none()
        };
        s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, into))??;
    }
    let cpu = Cpu::new();
    for (found, once) in [(&up, &owned.up), (&down, &owned.down)] {
        let once = cpu.read(once.as_ref().expect("a gradient").view())?;
        // g + g is exact.
        let twice: Vec<f64> = once.iter().map(|g| 2.0 * g).collect();
        assert_eq!(cpu.read(found.view())?, twice);
    }
    assert_eq!(router.as_bytes(), owned.router.as_ref().expect("a gradient").as_bytes());
    Ok(())
}

#[test]
fn wrong_room_is_an_error_that_names_it() -> Result<()> {
    let mut s = Setup::new()?;
    let mut wrong = poisoned(&[6, 12, 16])?;
    let into =
        GradientsMut { params: PerParam { up: Some(wrong.view_mut()), ..PerParam::none() }, ..GradientsMut::none() };
    let error = s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, into))?;
    assert!(matches!(error, Err(Error::Shape { ref tensor, .. }) if tensor.contains("experts.up")), "{error:?}");
    let mut bias = poisoned(&[6, 16])?;
    let into = GradientsMut {
        params: PerParam { up_bias: Some(bias.view_mut()), ..PerParam::none() },
        ..GradientsMut::none()
    };
    let error = s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, into))?.err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("a bias alone")), "{error:?}");
    let mut none = poisoned(&[8, 12])?;
    let into = GradientsMut {
        params: PerParam { shared_up: Some(none.view_mut()), ..PerParam::none() },
        ..GradientsMut::none()
    };
    let error = s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, into))?.err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("shared.up")), "{error:?}");
    // The group works on.
    s.backward(|l, g, c, i, d| l.backward_into(g, c, i, d, GradientsMut::none()))?
}

/// The losses' sum and its gradient as tensors: the bits of the host's numbers, and nobody reads them.
#[test]
fn auxiliary_losses_stay_on_the_device() -> Result<()> {
    let mut s = Setup::new()?;
    let mut config = s.layer.config().clone();
    (config.aux.balance, config.aux.z) = (0.02, 0.003);
    s.layer = Layer::new(config, 0)?;
    let views = ParamViews::collect(|kind| Ok(s.params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let params = views.params();
    let mut run = |aux: Option<f64>, on_device: Option<&Tensor<Cpu>>| -> Result<_> {
        let forward = s.layer.forward(&mut s.group, BACKWARD, s.x.view(), &params)?;
        let mut total = poisoned(&[])?;
        forward.aux.write(total.view_mut())?;
        let context = forward.context.expect("backward was asked for");
        let (inputs, y) = (Inputs { x: s.x.view(), params: &params }, Some(s.d_y.view()));
        let gradients = match (aux, on_device) {
            (Some(aux), _) => {
                let cotangents = Cotangents { y, aux };
                s.layer.backward(&mut s.group, context, inputs, cotangents, GradientMask::ALL)
            }
            (_, on_device) => {
                let aux = on_device.expect("a scalar").view();
                s.layer.backward(&mut s.group, context, inputs, Cotangents { y, aux }, GradientMask::ALL)
            }
        };
        assert!(forward.aux.value().known().is_none(), "nobody has read it");
        assert_eq!(total.as_slice::<f32>()?, [forward.aux.get()?.total() as f32]);
        assert!(total.as_slice::<f32>()?[0] > 0.02);
        Ok(gradients.map(|g| [g.x, g.params.router].map(|t| t.expect("a gradient").as_bytes().to_vec())))
    };
    let without = run(Some(0.0), None)??;
    let from_host = run(Some(0.75), None)??;
    assert_ne!(from_host, without);
    for dims in [&[] as &[usize], &[1]] {
        let scalar = Tensor::from_vec(vec![0.75f32], dims)?;
        assert_eq!(run(None, Some(&scalar))??, from_host);
    }
    let wide = run(None, Some(&Tensor::from_vec(vec![0.75f64], &[])?))?;
    assert!(matches!(wide, Err(Error::DType { ref tensor, .. }) if tensor == "gradient of aux"), "{wide:?}");
    let long = run(None, Some(&Tensor::from_vec(vec![0.75f32; 2], &[2])?))?;
    assert!(matches!(long, Err(Error::Shape { ref tensor, .. }) if tensor == "gradient of aux"), "{long:?}");
    // The group works on, and a layer without losses writes a zero.
    assert_eq!(run(Some(0.75), None)??, from_host);
    let plain = Setup::new()?.layer;
    let forward = plain.forward(&mut s.group, Mode::default(), s.x.view(), &params)?;
    let mut total = poisoned(&[1])?;
    forward.aux.write(total.view_mut())?;
    assert_eq!(total.as_slice::<f32>()?, [0.0]);
    assert!(matches!(forward.aux.write(poisoned(&[2])?.view_mut()), Err(Error::Shape { .. })));
    let mut wide = Tensor::from_vec(vec![1f64], &[])?;
    assert!(matches!(forward.aux.write(wide.view_mut()), Err(Error::DType { .. })));
    Ok(())
}

#[test]
fn what_is_kept_is_known_before() -> Result<()> {
    let config = |change: fn(&mut MoeConfig)| {
        let mut config = MoeConfig::new(12, 8, 8, 3);
        change(&mut config);
        config
    };
    let configs = [
        config(|_| {}),
        config(|c| c.recompute = true),
        config(|c| {
            (c.aux.balance, c.shared) = (0.1, Some(SharedConfig { intermediate: 10, gated: true, bias: false }))
        }),
    ];
    for ranks in [1, 2, 4] {
        for kind in [DispatcherKind::Auto, DispatcherKind::AllGather].into_iter().take(ranks) {
            for config in &configs {
                let mut limits = GroupConfig::new(8, T);
                limits.dispatcher = kind;
                let one = |comm| {
                    let mut group = Group::new(Cpu::new(), Box::new(comm), limits.clone())?;
                    kept_of(config, &mut group)
                };
                let found: Result<Vec<_>> = std::thread::scope(|scope| {
                    let comms = ThreadWorld::create(ranks, Duration::from_secs(60));
                    let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| one(comm))).collect();
                    threads.into_iter().map(|t| t.join().expect("no panic")).collect()
                });
                let found = found?;
                let ids: Vec<Vec<usize>> = found.iter().map(|(_, _, ids)| ids.clone()).collect();
                let rows = received_rows::received_rows(kind, &ids, config.router.top_k, config.router.num_experts);
                for ((sizes, bytes, _), rows) in found.into_iter().zip(rows) {
                    let sizes = StepSizes { rows, ..sizes };
                    assert_eq!(sizes.memory(config).saved, bytes, "R = {ranks}, {kind:?}, {config:?}");
                    let worst = StepSizes::worst(config, T, ranks, DType::F32, kind);
                    assert!(sizes.slots <= worst.slots && sizes.rows <= worst.rows, "{sizes:?}, {worst:?}");
                }
            }
        }
    }
    Ok(())
}

/// Sizes of one forward but for the rows that it brought, the bytes that it kept, and its choices.
fn kept_of(config: &MoeConfig, group: &mut Group<Cpu>) -> Result<(StepSizes, usize, Vec<usize>)> {
    let rng = &mut seed::generator(group.rank() as u64);
    let local = group.local_experts();
    let params: Vec<(ParamKind, Tensor<Cpu>)> = ParamKind::ALL
        .into_iter()
        .filter_map(|kind| Some((kind, kind.dims(config, local)?)))
        .map(|(kind, dims)| Ok((kind, random(&mut seed::generator(9), &dims)?)))
        .collect::<Result<_>>()?;
    let views = ParamViews::collect(|kind| Ok(params.iter().find(|(r, _)| *r == kind).map(|(_, t)| t.view())))?;
    let x = random(rng, &[T, 12])?;
    let forward = Layer::new(config.clone(), 0)?.forward(group, BACKWARD, x.view(), &views.params())?;
    let context = forward.context.expect("backward was asked for");
    let handle = context.handle();
    let sizes = StepSizes {
        tokens: T,
        slots: handle.rows(),
        rows: 0,
        ranks: group.ranks(),
        dtype: DType::F32,
        kind: group.config().dispatcher,
    };
    let ids = group.device().read(forward.routing.ids.view())?;
    Ok((sizes, context.bytes(), ids.iter().map(|id| *id as usize).collect()))
}
