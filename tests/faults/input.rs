//! Bad input on one rank: an error on every rank, and the same group goes on.

use std::time::Instant;

use moebius::checkpoint::BlockParams;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius::ep::{Capacity, DispatcherKind, Overflow};
use moebius::layer::{DispatchOptions, Layer, ParamKind};
use moebius::{DType, Error, Result, Tensor};

use super::devices::cases;
use super::support::*;

cases!(
    bad_input_on_one_rank_is_an_error_on_all_and_the_group_goes_on,
    an_overflowing_capacity_is_an_error_on_all_and_the_group_goes_on,
);

/// One fault: its name, and what the step with it gives on a rank.
type Fault<D> = (&'static str, fn(&mut Rank<D>) -> Result<()>);

fn forward_with<D: Target>(r: &mut Rank<D>, x: &Tensor<Cpu>) -> Result<()> {
    forward_of(r, x, |_| ())
}

/// A forward of this rank's tokens, with parameters that the culprit spoils.
fn forward_without<D: Target>(r: &mut Rank<D>, spoil: fn(&mut BlockParams)) -> Result<()> {
    let x = r.x();
    forward_of(r, &x, spoil)
}

fn forward_of<D: Target>(r: &mut Rank<D>, x: &Tensor<Cpu>, spoil: fn(&mut BlockParams)) -> Result<()> {
    let mut params = params(r.rank, r.group.ranks());
    if r.is_culprit() {
        spoil(&mut params);
    }
    let (own, x) = (r.own(&params), r.put(x));
    r.forward(x.view(), &own.views()?.params()).map(drop)
}

/// This rank's tokens, or `bad` on the culprit.
fn tokens<D: Target>(r: &Rank<D>, bad: impl FnOnce() -> Tensor<Cpu>) -> Tensor<Cpu> {
    if r.is_culprit() { bad() } else { r.x() }
}

fn forward_faults<D: Target>() -> Vec<Fault<D>> {
    vec![
        ("NaN", |r| {
            let x = tokens(r, || Tensor::from_vec(vec![f64::NAN; HIDDEN], &[1, HIDDEN]).expect("x"));
            forward_with(r, &x)
        }),
        ("router", |r| forward_without(r, |own| own.router = tensor(1, 0, &[EXPERTS + 1, HIDDEN]))),
        ("tensor x", |r| {
            let x = tokens(r, || tensor(4, 0, &[TOKENS, HIDDEN + 1]));
            forward_with(r, &x)
        }),
        ("tensor x", |r| {
            let x = tokens(r, || Tensor::zeros(&Cpu::new(), DType::I32, &[TOKENS, HIDDEN]).expect("x"));
            forward_with(r, &x)
        }),
        ("tensor x: expected f", |r| {
            let x = tokens(r, || Tensor::zeros(&Cpu::new(), DType::F16, &[TOKENS, HIDDEN]).expect("x"));
            forward_with(r, &x)
        }),
        ("max_tokens_per_rank", |r| {
            let x = tokens(r, || tensor(4, 0, &[4 * TOKENS + 1, HIDDEN]));
            forward_with(r, &x)
        }),
        ("up", |r| forward_without(r, |own| own.up = tensor(2, 0, &[1, 2 * INNER, HIDDEN]))),
        ("router.bias", |r| forward_without(r, |own| own.others.router_bias = Some(tensor(6, 0, &[EXPERTS])))),
        ("tensor experts.down: expected f", |r| {
            forward_without(r, |own| {
                own.down = Tensor::zeros(&Cpu::new(), DType::F16, own.down.dims()).expect("down");
            })
        }),
        ("no weight", |r| {
            let own = r.own(&params(r.rank, r.group.ranks()));
            let views = own.views()?;
            let mut params = views.params();
            let up = Troubled::new(own.get(ParamKind::Up).expect("up"), r.is_culprit(), Trouble::Fail);
            params.up = &up;
            let x = r.put(&r.x());
            r.forward(x.view(), &params).map(drop)
        }),
    ]
}

/// A good forward, and a backward that the culprit spoils by `spoil(x, d y)`.
fn backward_with<D: Target>(r: &mut Rank<D>, spoil: fn(&mut Tensor<Cpu>, &mut Tensor<Cpu>)) -> Result<()> {
    let own = r.own(&params(r.rank, r.group.ranks()));
    let views = own.views()?;
    let (mut x, mut d_y) = (r.x(), r.x());
    let good = r.put(&x);
    let (_, context) = r.forward(good.view(), &views.params())?;
    if r.is_culprit() {
        spoil(&mut x, &mut d_y);
    }
    let (x, d_y) = (r.put(&x), r.put(&d_y));
    r.backward(context, &x, &views.params(), &d_y).map(drop)
}

/// A good forward, and a backward for which the culprit has another layer.
fn backward_of<D: Target>(r: &mut Rank<D>, other: fn(&Layer) -> Result<Layer>) -> Result<()> {
    let own = r.own(&params(r.rank, r.group.ranks()));
    let views = own.views()?;
    let x = r.put(&r.x());
    let (_, context) = r.forward(x.view(), &views.params())?;
    let right = r.layer.clone();
    if r.is_culprit() {
        r.layer = other(&right)?;
    }
    let result = r.backward(context, &x, &views.params(), &x);
    r.layer = right;
    result.map(drop)
}

fn backward_faults<D: Target>() -> Vec<Fault<D>> {
    vec![
        ("gradient of y", |r| backward_with(r, |_, d_y| *d_y = tensor(4, 0, &[TOKENS + 1, HIDDEN]))),
        ("gradient of y", |r| {
            backward_with(r, |_, d_y| *d_y = Tensor::zeros(&Cpu::new(), DType::F16, d_y.dims()).expect("d y"))
        }),
        ("tensor x", |r| backward_with(r, |x, _| *x = tensor(4, 0, &[TOKENS - 1, HIDDEN]))),
        ("context", |r| backward_of(r, |_| Layer::new(config(), 6))),
        ("context: expected one of this configuration", |r| {
            backward_of(r, |right| {
                let mut other = config();
                other.router.scale = 2.0;
                Layer::new(other, right.number())
            })
        }),
        ("no weight", |r| {
            let own = r.own(&params(r.rank, r.group.ranks()));
            let views = own.views()?;
            let mut params = views.params();
            let up = Troubled::new(own.get(ParamKind::Up).expect("up"), false, Trouble::Fail);
            params.up = &up;
            let x = r.put(&r.x());
            let (_, context) = r.forward(x.view(), &params)?;
            if r.is_culprit() {
                up.arm();
            }
            r.backward(context, &x, &params, &x).map(drop)
        }),
    ]
}

fn bad_input_on_one_rank_is_an_error_on_all_and_the_group_goes_on<D: Target>(device: &D) {
    let alone = alone();
    each_kind(device, "bad input", |r| {
        for (name, fault) in forward_faults().into_iter().chain(backward_faults()) {
            if name == "max_tokens_per_rank" && r.group.ranks() == 1 {
                // Tokens that stay where they are may be any number.
                fault(r).expect(name);
                r.works(&alone);
                continue;
            }
            let start = Instant::now();
            let error = fault(r).expect_err(name);
            match &error {
                Error::Peer { rank, peer, reason, .. } => {
                    assert_eq!((*rank, *peer, r.is_culprit()), (r.rank, CULPRIT, false), "{name}: {error}");
                    assert!(reason.contains(name), "{name}: {error}");
                }
                own => {
                    assert!(r.is_culprit(), "{name}: {own} on rank {}", r.rank);
                    assert!(own.to_string().contains(name), "{name}: {own}");
                }
            }
            assert!(start.elapsed() < AT_ONCE, "{name}");
            r.works(&alone);
        }
    });
}

/// Tokens of another type on one rank, each fine by itself: found where rows meet.
#[test]
fn another_dtype_on_one_rank_is_an_error_on_all_and_the_group_goes_on() {
    let alone = alone();
    for kind in KINDS {
        let results = on_ranks(TIMEOUT, |comm| {
            let mut r = Rank::new(comm, kind);
            let x = tokens(&r, || Tensor::zeros(&Cpu::new(), DType::F32, &[TOKENS, HIDDEN]).expect("x"));
            let error = forward_with(&mut r, &x).expect_err("dtypes differ");
            assert!(matches!(error, Error::Comm(_) | Error::Peer { .. } | Error::DType { .. }), "{error:?}");
            let lost = ["did not arrive", "has left", "unusable"];
            assert!(lost.iter().all(|l| !error.to_string().contains(l)), "{error}");
            r.works(&alone);
        });
        all_well("dtypes", results);
    }
}

/// A layer of another formula on one rank, of the same shapes: nothing else would notice.
#[test]
fn a_formula_that_differs_is_an_error_on_all() {
    let alone = alone();
    for kind in KINDS {
        let results = on_ranks(TIMEOUT, |comm| {
            let mut r = Rank::new(comm, kind);
            let own = r.layer.clone();
            type Change = fn(&mut moebius::MoeConfig);
            let changes: [(&str, &str, Change); 4] = [
                ("activation", "GeluGlu", |c| c.activation = moebius::config::Activation::GeluGlu),
                ("router.scale", "2.0", |c| c.router.scale = 2.0),
                ("aux.z", "0.5", |c| c.aux.z = 0.5),
                ("router.jitter, aux.balance", "0.1, 0.25", |c| (c.router.jitter, c.aux.balance) = (0.1, 0.25)),
            ];
            for (fields, changed, change) in changes {
                let mut config = own.config().clone();
                if r.is_culprit() {
                    change(&mut config);
                }
                r.layer = Layer::new(config, own.number()).expect("a layer");
                let x = r.x();
                match forward_with(&mut r, &x) {
                    Err(Error::ConfigMismatch { field, value, peer_value, .. }) => {
                        assert_eq!(field, fields);
                        assert_ne!(value, peer_value);
                        assert_eq!(if r.is_culprit() { value } else { peer_value }, changed);
                    }
                    other => panic!("{other:?}"),
                }
                r.layer = own.clone();
                r.works(&alone);
            }
            // How a rank saves memory is its own affair.
            let mut config = own.config().clone();
            config.recompute = r.is_culprit();
            r.layer = Layer::new(config, own.number()).expect("a layer");
            r.works(&alone);
        });
        all_well("formulas", results);
    }
}

/// All ranks learn which rank overflows and by how much; the next call may have more room.
fn an_overflowing_capacity_is_an_error_on_all_and_the_group_goes_on<D: Target>(device: &D) {
    let alone = alone();
    each_kind(device, "capacity", |r| {
        let roomy = r.layer.clone();
        let capacity =
            DispatchOptions { capacity: Capacity::Static(1), overflow: Overflow::Error, ..Default::default() };
        r.layer = roomy.clone().with_dispatch(capacity);
        let x = r.x();
        match forward_with(r, &x) {
            Err(Error::Capacity { rank, layer, needed, capacity: 1 }) => {
                assert!(rank < RANKS && layer == r.layer.number() && needed > 1);
            }
            other => panic!("{other:?}"),
        }
        r.layer = roomy;
        r.works(&alone);
    });
}

/// The comparison of the tests above finds a step that is off by a little.
#[test]
#[should_panic(expected = "after a fault")]
fn a_wrong_step_is_found() {
    let mut wrong = alone();
    wrong.d_x[0] += 1e-9;
    let comm = ThreadWorld::create(1, TIMEOUT).pop().expect("one rank");
    Rank::new(comm, DispatcherKind::Local).works(&wrong);
}
