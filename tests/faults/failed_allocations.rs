//! A rank that has no memory for what a collective needs tells the others, which are in that collective: they get its
//! error's text at once, and the group goes on.

use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::ep::{DispatcherKind, Group, GroupConfig};
use moebius::layer::{Layer, Mode, Noise, Params};
use moebius::optim::{AdamW, AdamWOptions, ParamShard, ParamSpec};
use moebius::{CommError, DType, Error, Result, Tensor};

use super::failing_allocator::{without, zeroed_sizes};
use super::support::{
    AT_ONCE, CULPRIT, EXPERTS, HIDDEN, KINDS, RANKS, Rank, TIMEOUT, TOKENS, all_well, alone, config, on_ranks, params,
};

/// Bytes of three numbers of each rank: seed and step of the jitter, and its tokens.
const COUNTS: usize = 8 * 3 * RANKS;
const NOISE: Noise = Noise { seed: 3, step: 1 };

/// The result of `work`, in which the culprit does not get a tensor of so many bytes.
fn without_memory<T>(rank: usize, bytes: usize, work: impl FnOnce() -> T) -> T {
    if rank == CULPRIT { without(bytes, work) } else { work() }
}

fn is_own<T>(bytes: usize, result: &Result<T>) -> bool {
    matches!(result, Err(Error::OutOfMemory { bytes: found, .. }) if *found == bytes)
}

/// The culprit's own error, and `Error::Peer` with its text on the others.
fn check_layer<T>(rank: usize, reason: &str, result: &Result<T>) {
    let found = result.as_ref().err();
    match result {
        Err(Error::Peer { call: "Layer::forward", rank: own, peer: CULPRIT, reason: told }) => {
            assert!(rank != CULPRIT && *own == rank && told.contains(reason), "rank {rank}: {found:?}");
        }
        _ => {
            assert!(rank == CULPRIT && found.is_some_and(|e| e.to_string().contains(reason)), "rank {rank}: {found:?}")
        }
    }
}

/// A forward of a layer that is changed so, and a step of the usual one afterwards.
fn forward(
    name: &str,
    layer: impl Fn() -> Result<Layer> + Sync,
    fails: impl Fn(&mut Rank, &Layer) -> Result<()> + Sync,
) {
    let alone = alone();
    all_well(
        name,
        on_ranks(AT_ONCE, |comm| {
            let mut rank = Rank::new(comm, DispatcherKind::AllToAll);
            let result = fails(&mut rank, &layer().expect("a layer"));
            check_layer(rank.rank, if name == "refused" { "not today" } else { "no memory" }, &result);
            rank.works(&alone);
        }),
    );
}

fn run(rank: &mut Rank, layer: &Layer) -> Result<()> {
    let own = rank.own(&params(rank.rank, RANKS));
    let (views, x) = (own.views()?, rank.x());
    let mode = Mode { backward: false, noise: Some(NOISE) };
    layer.forward(&mut rank.group, mode, x.view(), &views.params()).map(drop)
}

fn with_jitter() -> Result<Layer> {
    let mut config = config();
    config.router.jitter = 0.1;
    Layer::new(config, 5)
}

/// Jitter counts the ranks' tokens in a collective of its own.
#[test]
fn no_memory_for_the_counts_of_jitter() {
    forward("jitter", with_jitter, |rank, layer| without_memory(rank.rank, COUNTS, || run(rank, layer)));
}

/// A rank that does not come to its forward meets the others there.
#[test]
fn a_refusal_in_the_collective_of_jitter_is_of_the_forward() {
    forward("refused", with_jitter, |rank, layer| match rank.is_culprit() {
        true => {
            let error = Error::Framework { call: "test", framework: "test", message: "not today".into() };
            Err(layer.refuse_forward(&mut rank.group, error))
        }
        false => run(rank, layer),
    });
}

/// So do the auxiliary losses over the ranks.
#[test]
fn no_memory_for_the_sums_of_auxiliary_losses() {
    let layer = || {
        let mut config = config();
        config.aux.balance = 0.01;
        config.aux.over_ranks = true;
        Layer::new(config, 5)
    };
    // Counts and scores of each expert, and four numbers, in f64.
    let bytes = 8 * (2 * EXPERTS + 4);
    forward("aux", layer, |rank, layer| without_memory(rank.rank, bytes, || run(rank, layer)));
}

/// Sizes of the tensors of a step on the culprit that are no smaller than its tokens, each once.
fn sizes_of_a_step(kind: DispatcherKind) -> Vec<usize> {
    let sizes = on_ranks(TIMEOUT, |comm| {
        let mut rank = Rank::new(comm, kind);
        let (own, x) = (rank.own(&params(rank.rank, RANKS)), rank.put(&rank.x()));
        let views = own.views().expect("views");
        zeroed_sizes(|| step(&mut rank, &x, &views.params()).expect("a step"))
    });
    let mut sizes = all_well("sizes", sizes).swap_remove(CULPRIT);
    // Others may be a kernel's own numbers, a few for each expert, or a product's scratch, without which a process ends.
    let row = HIDDEN * size_of::<f64>();
    sizes.retain(|bytes| bytes % row == 0 && *bytes >= TOKENS * row);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

fn step<'a>(rank: &mut Rank, x: &'a Tensor<Cpu>, params: &'a Params<'a, Cpu>) -> Result<()> {
    let mode = Mode { backward: true, noise: None };
    let forward = rank.layer.forward(&mut rank.group, mode, x.view(), params)?;
    rank.backward(forward.context.expect("a context"), x, params, x).map(drop)
}

/// A rank has no memory for the first tensor of some size: the others hear of it at once, unless all rows have moved, and the
/// group works.
#[test]
fn no_memory_for_rows_of_a_step() {
    let alone = alone();
    for kind in KINDS {
        let sizes = sizes_of_a_step(kind);
        let mut told = 0;
        for &bytes in &sizes {
            let name = format!("{kind:?}, {bytes} bytes");
            let results = on_ranks(AT_ONCE, |comm| {
                let mut rank = Rank::new(comm, kind);
                let (own, x) = (rank.own(&params(rank.rank, RANKS)), rank.put(&rank.x()));
                let views = own.views().expect("views");
                let params = views.params();
                let result = match rank.is_culprit() {
                    true => without(bytes, || step(&mut rank, &x, &params)),
                    false => step(&mut rank, &x, &params),
                };
                rank.works(&alone);
                result
            });
            let results = all_well(&name, results);
            assert!(is_own(bytes, &results[CULPRIT]), "{name}: {:?}", results[CULPRIT]);
            let hears = |result: &Result<()>| match result {
                Err(Error::Peer { peer: CULPRIT, reason, .. }) => reason.contains("no memory"),
                other => panic!("{name}: {other:?}"),
            };
            let others = || results.iter().enumerate().filter(|(rank, _)| *rank != CULPRIT).map(|(_, result)| result);
            if others().any(Result::is_err) {
                assert!(others().all(hears), "{name}");
                told += 1;
            }
        }
        // The gradients of the router are made behind the last movement.
        assert!(told >= 3 && told + 3 >= sizes.len(), "{kind:?}: {told} of {sizes:?}");
    }
}

/// A communicator's own error names the reason too, where the ranks have no group yet.
fn check_refused<T>(name: &str, bytes: usize, results: Vec<Result<T>>) {
    for (rank, result) in results.iter().enumerate() {
        let error = result.as_ref().err();
        match result {
            Err(Error::Comm(CommError::Refused { peer: CULPRIT, reason, .. })) => {
                assert!(rank != CULPRIT && reason.contains("no memory"), "{name}, rank {rank}: {error:?}");
            }
            result => assert!(rank == CULPRIT && is_own(bytes, result), "{name}, rank {rank}: {error:?}"),
        }
    }
}

#[test]
fn no_memory_to_compare_configurations() {
    // Nineteen fields of eight bytes: this rank's, and all ranks'.
    for bytes in [8 * 19, RANKS * 8 * 19] {
        let results = on_ranks(AT_ONCE, |comm| {
            without_memory(comm.rank(), bytes, || {
                Group::new(Cpu::new(), Box::new(comm), GroupConfig::new(EXPERTS, TOKENS)).map(drop)
            })
        });
        check_refused("Group::new", bytes, all_well("Group::new", results));
    }
}

/// An optimizer of three parameters that all ranks hold.
fn optimizer(comm: impl Communicator<Cpu> + 'static) -> Result<AdamW<Cpu>> {
    let spec =
        |name: &str| ParamSpec { name: name.into(), shard: ParamShard::whole(&[3]), dtype: DType::F32, group: 0 };
    let (options, specs) = (AdamWOptions::default(), ["a", "b", "c"].map(spec));
    AdamW::new(&Cpu::new(), options, &[options.group], specs.into(), Some(Box::new(comm)))
}

#[test]
fn no_memory_to_compare_optimizers() {
    // Eleven fields; six numbers of each parameter.
    for bytes in [8 * 11, RANKS * 8 * 11, 8 * 18, RANKS * 8 * 18] {
        let results = on_ranks(AT_ONCE, |comm| without_memory(comm.rank(), bytes, || optimizer(comm).map(drop)));
        check_refused("AdamW::new", bytes, all_well("AdamW::new", results));
    }
}

/// The optimizer keeps its communicator: nobody hears that it is gone.
#[test]
fn no_memory_to_compare_loaded_states() {
    let dir = tempfile::tempdir().expect("a folder");
    // Five numbers of a state: this rank's, and all ranks'.
    for bytes in [8 * 5, RANKS * 8 * 5] {
        let results = on_ranks(AT_ONCE, |comm| {
            let rank = comm.rank();
            let mut adam = optimizer(comm).expect("an optimizer");
            adam.save(dir.path()).expect("a state");
            let result = without_memory(rank, bytes, || adam.load(dir.path()));
            assert_eq!(adam.load(dir.path()).expect("a second load"), 0);
            result
        });
        check_refused("AdamW::load", bytes, all_well("AdamW::load", results));
    }
}
