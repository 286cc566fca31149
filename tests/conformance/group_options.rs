//! Options of a group: timing dispatchers as it is formed, what NCCL EP takes of a GPU, and in which type sums return.

use std::time::Duration;

use moebius::ep::{Capacity, DispatchShape, DispatcherKind, Group, GroupConfig, ReturnFormat};
use moebius::{CommError, DType, Error, Result};

use super::devices::{Endpoint, Target};
use super::faulty_comm::FaultyComm;
use super::harness::{Case, F32, Rank, Setup, Slots, TIMEOUT, TokenGrads, case, round_robin, training, x};

/// Once for each device: what is timed does not depend on the dispatcher under test.
const KINDS: &[DispatcherKind] = &[DispatcherKind::AllToAll, DispatcherKind::NcclEp];
const T: usize = 4;
/// A row that every library carries.
const H: usize = 64;
/// How much longer a collective takes that is to be the slower one: far above what a step of these sizes does, on a
/// machine whose threads stand still now and then.
const LONGER: Duration = Duration::from_millis(50);

pub fn cases<D: Target>() -> Vec<Case<D>> {
    vec![
        case!(slower_dispatchers_are_not_taken, 2, KINDS),
        case!(a_timed_group_is_the_one_of_its_kind, 2, KINDS),
        case!(every_type_is_timed, 2, KINDS),
        case!(named_dispatchers_are_not_timed, 1),
        case!(shapes_that_differ, 2, KINDS),
        case!(impossible_shapes, 2, KINDS),
        case!(a_failure_while_dispatchers_are_timed, 2, KINDS),
        case!(a_capacity_that_random_choices_exceed, 2, KINDS),
        case!(a_bound_of_sms_changes_no_value, 2, KINDS),
        case!(other_dispatchers_return_no_quantized_sums, 2, KINDS),
        case!(return_formats_that_differ, 2, KINDS),
        case!(sums_in_the_order_of_k_are_not_taken_of_others, 2, KINDS),
    ]
}

fn shape<D: Target>() -> DispatchShape {
    let dtype = D::FLOATS[D::FLOATS.len() - 1];
    DispatchShape { tokens: T, hidden: H, top_k: 2, dtype, capacity: Capacity::Eager, backward: true }
}

fn config<D: Target>(s: &Setup<D>, shape: DispatchShape) -> GroupConfig {
    GroupConfig { measure: Some(shape), ..GroupConfig::new(s.experts(2), T) }
}

/// The ranks' results, in rank order.
fn on_ranks<D: Target, T: Send>(s: &Setup<D>, body: impl Fn(Endpoint<D>) -> T + Sync) -> Vec<T> {
    s.on_threads(TIMEOUT, body).into_iter().map(|rank| rank.expect("no rank panics")).collect()
}

/// Joins over a communicator with changes.
fn changed<D: Target>(
    endpoint: Endpoint<D>,
    config: GroupConfig,
    change: impl FnOnce(&mut FaultyComm<D>),
) -> Result<Group<D>> {
    let mut comm = FaultyComm::new(endpoint.comm);
    change(&mut comm);
    Group::new(endpoint.device, Box::new(comm), config)
}

/// One rank alone is slow, and all take the other.
fn slower_dispatchers_are_not_taken<D: Target>(s: &Setup<D>) {
    // When errors are reported is nothing to it, and the delays add up.
    if s.later {
        return;
    }
    let forward = DispatchShape { backward: false, ..shape::<D>() };
    let slow_ones = [("all_to_all_v", DispatcherKind::AllToAll), ("reduce_scatter", DispatcherKind::AllGather)];
    for (slow, not) in slow_ones {
        let taken = on_ranks(s, |endpoint| {
            let late = endpoint.comm.rank() == 1;
            let slow = late.then_some((slow, LONGER));
            changed(endpoint, config(s, forward), |comm| comm.slow = slow).expect("group").dispatcher_kind()
        });
        assert!(taken.iter().all(|kind| *kind == taken[0] && *kind != not), "{taken:?}");
        assert!(!matches!(taken[0], DispatcherKind::Auto | DispatcherKind::Local), "{taken:?}");
    }
}

/// What a step brings, in the order of its calls.
type Step = (u64, Slots, Vec<f64>, Vec<f64>, TokenGrads);

fn step<D: Target>(r: &mut Rank<D>) -> Step {
    let experts = r.group.config().num_experts;
    let handle = r.prepare(&round_robin(r.rank, T, 2, experts), &training(3, 2)).expect("prepare");
    let (tokens, weights) = (x(r.rank, T, H), vec![0.5; 2 * T]);
    let slots = r.dispatch(&handle, F32(H), &tokens, Some(&weights)).expect("dispatch");
    let y = r.combine(&handle, F32(H), &slots.rows).expect("combine");
    let d_rows = r.combine_bwd(&handle, F32(H), &tokens).expect("combine_bwd");
    let grads = r.dispatch_bwd(&handle, F32(H), &slots.rows, Some(&slots.weights)).expect("dispatch_bwd");
    (handle.sequence(), slots, y, d_rows, grads)
}

/// To the bit, with the same numbers of prepares; the timed group is given a step's errors as ever.
fn a_timed_group_is_the_one_of_its_kind<D: Target>(s: &Setup<D>) {
    let run = |s: &Setup<D>, config: GroupConfig| {
        on_ranks(s, |endpoint| {
            let mut rank = s.rank(endpoint, config.clone()).expect("group");
            let found = (rank.group.dispatcher_kind(), step(&mut rank));
            assert_eq!(rank.group.dispatcher().name(), found.0.name());
            rank.works();
            found
        })
    };
    let timed = run(s, config(s, shape::<D>()));
    let kind = timed[0].0;
    let named = Setup { kind, ..s.clone() };
    assert_eq!(timed, run(&named, GroupConfig { dispatcher: kind, ..config(s, shape::<D>()) }), "{kind}");
}

fn every_type_is_timed<D: Target>(s: &Setup<D>) {
    for dtype in D::FLOATS {
        // Rows that some libraries cannot carry too.
        for hidden in [H, 3] {
            let one = DispatchShape { dtype: *dtype, hidden, tokens: 1, top_k: 1, ..shape::<D>() };
            let taken = on_ranks(s, |endpoint| endpoint.join(config(s, one)).expect("group").dispatcher_kind());
            assert!(taken.iter().all(|kind| *kind == taken[0]), "{dtype}: {taken:?}");
        }
    }
}

/// No collective more than without a shape; a rank alone has nothing to time either.
fn named_dispatchers_are_not_timed<D: Target>(s: &Setup<D>) {
    let alone = s.kind == DispatcherKind::Local;
    let config = GroupConfig { dispatcher: s.kind, ..config(s, shape::<D>()) };
    for dispatcher in if alone { vec![s.kind, DispatcherKind::Auto] } else { vec![s.kind] } {
        let config = GroupConfig { dispatcher, ..config.clone() };
        on_ranks(s, |endpoint| {
            let mut rank = s.rank(endpoint, config.clone()).expect("group");
            assert_eq!((rank.group.dispatcher_kind(), rank.calls()), (s.kind, s.joining()));
        });
    }
}

fn shapes_that_differ<D: Target>(s: &Setup<D>) {
    let good = shape::<D>();
    let config = |measure| GroupConfig { measure, max_rows: 64, ..GroupConfig::new(s.experts(2), T) };
    let odd_ones = [
        ("measure", None),
        ("measure.tokens", Some(DispatchShape { tokens: T - 1, ..good })),
        ("measure.hidden", Some(DispatchShape { hidden: 2 * H, ..good })),
        ("measure.top_k", Some(DispatchShape { top_k: 1, ..good })),
        ("measure.dtype", Some(DispatchShape { dtype: DType::F32, ..good })),
        ("measure.capacity", Some(DispatchShape { capacity: Capacity::Static(64), ..good })),
        ("measure.backward", Some(DispatchShape { backward: false, ..good })),
    ];
    for (name, odd_one) in odd_ones {
        on_ranks(s, |endpoint| {
            let rank = endpoint.comm.rank();
            match endpoint.join(config(if rank == 1 { odd_one } else { Some(good) })) {
                Err(Error::ConfigMismatch { call, field, rank: found, peer, value, peer_value }) => {
                    assert_eq!((call, &field[..], found), ("Group::new", name, rank));
                    assert_eq!(peer, if rank == 1 { 0 } else { 1 });
                    assert_ne!(value, peer_value);
                }
                other => panic!("{name}: {other:?}"),
            }
        });
    }
}

fn impossible_shapes<D: Target>(s: &Setup<D>) {
    let good = shape::<D>();
    let shapes = [
        ("measure.tokens", DispatchShape { tokens: 0, ..good }),
        ("measure.tokens", DispatchShape { tokens: T + 1, ..good }),
        ("measure.hidden", DispatchShape { hidden: 0, ..good }),
        ("measure.hidden", DispatchShape { hidden: usize::MAX, ..good }),
        ("measure.top_k", DispatchShape { top_k: 0, ..good }),
        ("measure.top_k", DispatchShape { top_k: s.experts(2) + 1, ..good }),
        ("measure.dtype", DispatchShape { dtype: DType::I32, ..good }),
        ("measure.capacity", DispatchShape { capacity: Capacity::Static(0), ..good }),
        ("measure.capacity", DispatchShape { capacity: Capacity::Static(1), ..good }),
    ];
    for (name, shape) in shapes {
        on_ranks(s, |endpoint| {
            let error = endpoint.join(config(s, shape));
            assert!(matches!(&error, Err(Error::Invalid { name: found, .. }) if found == name), "{name}: {error:?}");
        });
    }
}

/// A communicator that ends on rank 1 in some collective: of the first candidate, between two, of another.
fn a_failure_while_dispatchers_are_timed<D: Target>(s: &Setup<D>) {
    for first in [1, 2, 3, 5, 60, 300] {
        let errors = on_ranks(s, |endpoint| {
            let fails_from = (endpoint.comm.rank() == 1).then_some(first);
            changed(endpoint, config(s, shape::<D>()), |comm| comm.fails_from = fails_from).expect_err("a failure")
        });
        for (rank, error) in errors.iter().enumerate() {
            match error {
                Error::Comm(CommError::Transport { .. }) => assert_eq!(rank, 1, "collective {first}"),
                Error::Peer { peer: 1, reason, .. } => assert!(reason.contains("illegal address"), "{reason}"),
                other => panic!("collective {first}, rank {rank}: {other:?}"),
            }
        }
    }
}

fn a_capacity_that_random_choices_exceed<D: Target>(s: &Setup<D>) {
    let small = DispatchShape { capacity: Capacity::Static(1), ..shape::<D>() };
    let config = GroupConfig { max_rows: 1, ..config(s, small) };
    for error in on_ranks(s, |endpoint| endpoint.join(config.clone())) {
        assert!(matches!(error, Err(Error::Capacity { capacity: 1, .. })), "{error:?}");
    }
}

/// Values are such as every order of sums gives exactly.
fn a_bound_of_sms_changes_no_value<D: Target>(s: &Setup<D>) {
    let run = |max_sms| s.run(GroupConfig { max_sms, ..GroupConfig::new(s.experts(2), T) }, step);
    assert_eq!(run(8), run(0));
}

fn quantized<D: Target>(s: &Setup<D>, dispatcher: DispatcherKind) -> GroupConfig {
    GroupConfig { dispatcher, return_format: ReturnFormat::Mxfp8, ..GroupConfig::new(s.experts(2), T) }
}

/// Nor does NVLink's where no sums travel.
fn other_dispatchers_return_no_quantized_sums<D: Target>(s: &Setup<D>) {
    let others = [DispatcherKind::Auto, s.kind, DispatcherKind::AllGather, DispatcherKind::NvLinkLowLatency];
    let in_k_order = GroupConfig { in_k_order: true, ..quantized(s, DispatcherKind::NvLink) };
    for config in others.map(|kind| quantized(s, kind)).into_iter().chain([in_k_order]) {
        let reason = if config.in_k_order { "in_k_order".to_string() } else { config.dispatcher.to_string() };
        on_ranks(s, |endpoint| match endpoint.join(config.clone()) {
            Err(Error::Invalid { call, name, found, .. }) => {
                assert_eq!((call, &name[..]), ("Group::new", "return_format"));
                assert!(found.contains("mxfp8") && found.contains(&reason), "{found}");
            }
            other => panic!("{reason}: {other:?}"),
        });
    }
}

/// `Auto` takes one whose sums are in this order.
fn sums_in_the_order_of_k_are_not_taken_of_others<D: Target>(s: &Setup<D>) {
    use DispatcherKind::{AllGather, AllToAll, Auto, Hierarchical, NcclEp, NcclEpLowLatency, NvLink, NvLinkLowLatency};
    let config = |dispatcher| GroupConfig { dispatcher, in_k_order: true, ..GroupConfig::new(s.experts(2), T) };
    for kind in [AllGather, Hierarchical, NcclEp, NcclEpLowLatency, NvLinkLowLatency] {
        on_ranks(s, |endpoint| match endpoint.join(config(kind)) {
            Err(Error::Invalid { call, name, expected, found }) => {
                assert_eq!((call, &name[..]), ("Group::new", "in_k_order"));
                assert!(expected.contains("all_to_all") && expected.contains("nvlink"), "{expected}");
                assert!(found.contains(&kind.to_string()), "{found}");
            }
            other => panic!("{kind}: {other:?}"),
        });
    }
    let timed = GroupConfig { measure: Some(shape::<D>()), ..config(Auto) };
    for config in [config(Auto), config(AllToAll), timed] {
        for taken in on_ranks(s, |endpoint| endpoint.join(config.clone()).map(|group| group.dispatcher_kind())) {
            assert!(matches!(taken, Ok(AllToAll | NvLink)), "{taken:?}");
        }
    }
}

fn return_formats_that_differ<D: Target>(s: &Setup<D>) {
    on_ranks(s, |endpoint| {
        let rank = endpoint.comm.rank();
        let one = quantized(s, DispatcherKind::NvLink);
        let config = if rank == 1 { one } else { GroupConfig { return_format: ReturnFormat::Tokens, ..one } };
        match endpoint.join(config) {
            Err(Error::ConfigMismatch { field, value, peer_value, .. }) => {
                let values = if rank == 1 { ["mxfp8", "tokens"] } else { ["tokens", "mxfp8"] };
                assert_eq!((&field[..], [&value[..], &peer_value[..]]), ("return_format", values));
            }
            other => panic!("{other:?}"),
        }
    });
}

/// Joins a group that is to time its dispatchers, and says how many collectives that took on which dispatcher.
pub fn joined<D: Target>(s: &Setup<D>) -> Vec<(DispatcherKind, u64)> {
    on_ranks(s, |endpoint| {
        let mut group = endpoint.join(config(s, shape::<D>())).expect("group");
        (group.dispatcher_kind(), group.dispatcher().communicator().calls())
    })
}
