//! A rank that cannot begin, and wrong use.

use super::*;

/// The last rank cannot begin: each other rank has a typed error that is no timeout, and all go on.
fn a_rank_that_cannot_begin_tells_the_others() {
    let size = Size { ep: 2, n: 2 };
    let told = Barrier::new(4);
    on(size, |place| {
        let model = Whole::new(&place.group).sharded(&place).unwrap();
        // A wrong list for the chain of the experts, and one for that of all.
        for wrong in 0..2 {
            let begin = |at: usize, chain: &ShardedParams<Flex>| {
                let list = if at == wrong && place.rank == 3 { Vec::new() } else { place.modules(&model, chain) };
                chain.begin(Phase::Forward, list)
            };
            let run = || -> Result<_> {
                place.chains().into_iter().enumerate().try_for_each(|(at, chain)| begin(at, chain))?;
                model.loss(ids(place.rank, 0))
            };
            let outcome = run();
            told.wait();
            let error = outcome.unwrap_err();
            let as_meant = match &error {
                Error::Peer { reason, .. } | Error::Comm(CommError::Refused { reason, .. }) => {
                    place.rank != 3 && reason.contains("found 0")
                }
                error => place.rank == 3 && error.to_string().contains("found 0"),
            };
            assert!(as_meant, "rank {}, wrong {wrong}: {error:?}", place.rank);
            place.recover(&error);
            place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
        }
    });
}

fn wrong_use_is_refused() {
    let source = Checkpoint::open(golden_of("qwen3_moe")).unwrap();
    on(Size { ep: 2, n: 1 }, |place| {
        let text = |error: Option<Error>| error.map(|e| e.to_string()).unwrap_or_default();
        // Routers are shards over all ranks, not over those with the same experts.
        let moe = || module::<B>(&biased(), &place.group);
        let found = text(moe().into_all_sharded(&place.experts, Payload::Plain, &place.experts).err());
        assert!(found.contains("a chain of all ranks"), "{found}");
        let sharded = moe().into_all_sharded(&place.experts, Payload::Plain, place.dense()).unwrap();
        let found = text(place.experts.to_blocks([&sharded]).err());
        assert!(found.contains("to_parts"), "{found}");
        let found = text(sharded.into_sharded(&place.experts, Payload::Plain).err());
        assert!(found.contains("whole weights"), "{found}");
        let of = |name| DenseLoad { checkpoint: &source, name, dtype: None };
        let found = text(place.dense().load_linear::<B>(of("model.norm"), &device()).err());
        assert!(found.contains("2 dimensions") && found.contains("model.norm.weight"), "{found}");
        let found = text(place.dense().load_rms_norm::<B>(of("lm_head"), 1e-6, &device()).err());
        assert!(found.contains("1 dimensions"), "{found}");
        let found = text(place.dense().load_linear::<B>(of("model.nothing"), &device()).err());
        assert!(found.contains("model.nothing.weight"), "{found}");
    });
}

tests! {
    fn();
    a_rank_that_cannot_begin_tells_the_others,
    wrong_use_is_refused,
}
