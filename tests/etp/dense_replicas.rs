//! A candle model of shards alone whose gradients are summed over replicas beside its backward.

use std::sync::Arc;

use candle_core::Tensor;
use moebius::candle::{GradientType, MainGradients, finish_sharded};
use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::etp::{EtpOptions, Phase, Reduction};

use super::dense_model::{Failure, PAIRS, Rank, Sharded, WORLD, bits, flat, ids, ranks, shards_of};

const STEPS: usize = 2;
const MICROBATCHES: usize = 2;

fn given(replicas: &mut Option<Box<dyn Communicator<Cpu>>>) -> Option<&mut dyn Communicator<Cpu>> {
    replicas.as_mut().map(|comm| &mut **comm as &mut dyn Communicator<Cpu>)
}

/// Bits of all shards' gradients in each step; `beside`: sums begin in a step's last backward.
fn gradients(n: usize, reduction: Reduction, beside: bool) -> Vec<Vec<Vec<u32>>> {
    let results = ranks(n, EtpOptions { reduction, ..PAIRS }, |rank| {
        let Rank { w, mut chain, mut replicas, .. } = rank;
        if let (true, Some(own)) = (beside, replicas.take_if(|_| beside)) {
            chain = Arc::new(Arc::into_inner(chain).ok_or("a chain of its own")?.with_replicas(own)?);
        }
        let sharded = Sharded::new(&chain, shards_of(&chain)?)?;
        let (mut main, mut found) = (MainGradients::new(), Vec::new());
        for step in 0..STEPS {
            for microbatch in 0..MICROBATCHES {
                if beside && microbatch + 1 == MICROBATCHES {
                    chain.last_backward()?;
                }
                chain.begin(Phase::Forward)?;
                let loss = sharded.model().loss(ids(step * MICROBATCHES + microbatch, w))?;
                chain.end()?;
                chain.begin(Phase::Backward)?;
                main.backward(&loss)?;
                chain.end()?;
            }
            let (sums, shards) = (main.store_mut(), sharded.shards());
            // Without one of them, whose gradient may be in a reduction or a sum: nothing is lost.
            let [first, last] = [&shards[1..], &shards[..shards.len() - 1]];
            for some in [first, last] {
                let refused = finish_sharded(&chain, given(&mut replicas), some, sums, GradientType::AsSummed);
                let refused = refused.expect_err("a weight without its variable").to_string();
                assert!(refused.contains("all shards of a chain"), "{refused}");
            }
            finish_sharded(&chain, given(&mut replicas), &shards, sums, GradientType::AsSummed)?;
            let of = |var: &Tensor| bits(&flat(sums.get(var).expect("a gradient")));
            found.push(sharded.shards().iter().flat_map(|shard| of(&shard.var)).collect());
            main.reset();
        }
        let traffic = chain.traffic();
        let several = beside && n < WORLD;
        assert_eq!(traffic.sums, if several { (STEPS * sharded.shards().len()) as u64 } else { 0 });
        assert_eq!(traffic.sums_beside > 0, several, "{traffic:?}");
        Ok::<_, Failure>(found)
    });
    results.into_iter().map(|found| found.unwrap()).collect()
}

/// At every number of ranks a chain and of replicas.
#[test]
fn sums_beside_backward_have_the_same_bits() {
    for (n, reduction) in [1, 2, 4].into_iter().flat_map(|n| [(n, Reduction::Native), (n, Reduction::Pairwise)]) {
        let [beside, behind] = [true, false].map(|beside| gradients(n, reduction, beside));
        assert!(beside == behind, "N = {n}, {reduction:?}");
    }
}
