//! Configurations that cannot be.

use moebius::comm::Communicator;
use moebius::config::{Activation, ExpertCapacity, GroupLimit, GroupScore, MAX_EXPERTS, Renorm, Score, SharedConfig};
use moebius::config::{BalanceKind, CapacityOrder};
use moebius::cpu::Cpu;
use moebius::ep::{DispatchSpec, Group, GroupConfig};
use moebius::layer::Layer;
use moebius::{Error, MoeConfig, Tensor};

use super::support::*;

#[test]
fn absurd_configurations_name_their_field() {
    type Change = fn(&mut MoeConfig);
    let cases: &[(&str, Change)] = &[
        ("hidden", |c| c.hidden = 0),
        ("hidden", |c| c.hidden = usize::MAX),
        ("intermediate", |c| c.intermediate = 0),
        ("intermediate", |c| c.intermediate = usize::MAX / 2 + 1),
        ("shared.intermediate", |c| {
            c.shared = Some(SharedConfig { intermediate: usize::MAX, gated: false, bias: false })
        }),
        ("num_experts, intermediate, hidden", |c| {
            (c.hidden, c.intermediate, c.router.num_experts) = (1 << 24, 1 << 24, 1 << 16);
        }),
        ("num_experts", |c| c.router.num_experts = 0),
        ("num_experts", |c| c.router.num_experts = MAX_EXPERTS + 1),
        ("top_k", |c| c.router.top_k = 0),
        ("top_k", |c| c.router.top_k = EXPERTS + 1),
        ("top_k", |c| c.router.top_k = usize::MAX),
        ("top_k", |c| {
            (c.router.score, c.router.top_k) = (Score::SparseMixer { epsilon: 0.01 }, 3);
        }),
        ("score.epsilon", |c| c.router.score = Score::SparseMixer { epsilon: f64::NAN }),
        ("groups.groups", |c| c.router.groups = Some(limit(0, 0))),
        ("groups.groups", |c| c.router.groups = Some(limit(3, 1))),
        ("groups.keep", |c| c.router.groups = Some(limit(4, 5))),
        ("groups.keep", |c| c.router.groups = Some(limit(8, 1))),
        ("renorm", |c| c.router.renorm = Some(Renorm { p: 0.0, epsilon: 0.0, floor: 0.0 })),
        ("renorm", |c| c.router.renorm = Some(Renorm { p: 1.0, epsilon: f64::NAN, floor: 0.0 })),
        ("renorm", |c| c.router.renorm = Some(Renorm { p: 1.0, epsilon: f64::INFINITY, floor: 0.0 })),
        ("scale", |c| c.router.scale = f64::INFINITY),
        ("scale", |c| c.router.scale = 1e300),
        ("jitter", |c| c.router.jitter = 1.0),
        ("jitter", |c| c.router.jitter = f64::NAN),
        ("expert_capacity.factor", |c| {
            let order = CapacityOrder::Position;
            c.router.expert_capacity = Some(ExpertCapacity { factor: -1.0, order, renormalize: false });
        }),
        ("activation", |c| c.activation = Activation::ClampedGlu { alpha: 1.0, limit: 0.0 }),
        ("aux.balance", |c| c.aux.balance = f64::NAN),
        ("aux.balance_kind.length", |c| c.aux.balance_kind = BalanceKind::Sequence { length: 0 }),
    ];
    Layer::new(config(), 0).expect("the unchanged configuration");
    for (field, change) in cases {
        let mut bad = config();
        change(&mut bad);
        match Layer::new(bad.clone(), 0) {
            Err(Error::Invalid { name, .. }) => assert_eq!(name, *field),
            other => panic!("{field}: {other:?}"),
        }
        assert!(bad.validate().is_err());
    }
}

fn limit(groups: usize, keep: usize) -> GroupLimit {
    GroupLimit { groups, keep, rank_by: GroupScore::Max }
}

#[test]
fn experts_that_the_ranks_do_not_divide() {
    let results = on_ranks(TIMEOUT, |comm| {
        let error = Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(6, TOKENS)).expect_err("6 over 4");
        assert!(matches!(&error, Error::Invalid { name, .. } if name == "num_experts"), "{error}");
        assert!(error.to_string().contains("a multiple of the 4 ranks"), "{error}");
    });
    all_well("6 experts over 4 ranks", results);
}

#[test]
fn a_group_of_differing_configurations() {
    let more_tokens = GroupConfig::new(EXPERTS, TOKENS + 1);
    let forward_only = GroupConfig { forward_only: true, ..GroupConfig::new(EXPERTS, TOKENS) };
    for (name, other) in [("max_tokens_per_rank", more_tokens), ("forward_only", forward_only)] {
        let results = on_ranks(TIMEOUT, |comm| {
            let rank = Communicator::<Cpu>::rank(&comm);
            let config = if rank == CULPRIT { other.clone() } else { GroupConfig::new(EXPERTS, TOKENS) };
            let error = Group::new(Cpu::new(), Box::new(comm), config).expect_err("differ");
            match error {
                Error::ConfigMismatch { call, field, rank: found, peer, .. } => {
                    assert_eq!((call, &field[..], found), ("Group::new", name, rank));
                    assert_eq!(peer, if rank == CULPRIT { 0 } else { CULPRIT });
                }
                other => panic!("{other:?}"),
            }
        });
        all_well("differing configurations", results);
    }
}

/// A group without backward refuses a step that has one, on every rank, and serves the next.
#[test]
fn a_backward_in_a_group_that_is_forward_only() {
    let results = on_ranks(TIMEOUT, |comm| {
        let config = GroupConfig { forward_only: true, ..GroupConfig::new(EXPERTS, TOKENS) };
        let mut group = Group::new(Cpu::new(), Box::new(comm), config).expect("a group");
        let ids = Tensor::from_vec(vec![0i64, 1], &[2, 1]).expect("ids");
        let mut prepare = |backward| {
            let spec = DispatchSpec { backward, ..DispatchSpec::new(0, 1) };
            group.dispatcher().prepare(ids.view(), None, &spec)
        };
        match prepare(true) {
            Err(Error::Invalid { name, expected, .. }) => {
                assert!(name == "spec.backward" && expected.contains("forward_only"), "{name}: {expected}");
            }
            other => panic!("{other:?}"),
        }
        assert!(prepare(false).is_ok());
    });
    all_well("a backward in a group that is forward only", results);
}

/// A layer of other experts than the group's, on one rank.
#[test]
fn a_layer_of_other_experts_than_the_groups() {
    let alone = alone();
    let results = on_ranks(TIMEOUT, |comm| {
        let mut r = Rank::new(comm, KINDS[0]);
        let right = r.layer.clone();
        if r.is_culprit() {
            r.layer = Layer::new(MoeConfig::new(HIDDEN, INNER, 2 * EXPERTS, 2), 5).expect("layer");
        }
        let own = params(r.rank, RANKS);
        let x = r.x();
        let error = r.forward(x.view(), &own.views().expect("views").params()).expect_err("other experts");
        assert_eq!(matches!(error, Error::Peer { peer: CULPRIT, .. }), !r.is_culprit(), "{error}");
        r.layer = right;
        r.works(&alone);
    });
    all_well("other experts", results);
}
