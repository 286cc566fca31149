//! A rank whose gradient cannot be summed.

use std::time::Duration;

use candle_core::{DType, Device};

use super::*;
use crate::candle::error_of;
use crate::cpu::{Cpu, ThreadComm, ThreadWorld};
use crate::error::CommError;

/// A rank of a mesh of so many replicas and ranks of each.
struct Place {
    replica: usize,
    rank: usize,
    comms: ReduceComms<Cpu>,
}

fn places([replicas, ranks]: [usize; 2], run: impl Fn(Place) -> Result<()> + Sync) {
    let world = |size| ThreadWorld::create(size, Duration::from_secs(60));
    let boxed = |comm: ThreadComm| Box::new(comm) as Box<dyn crate::comm::Communicator<Cpu>>;
    let mut across: Vec<_> = (0..ranks).map(|_| world(replicas).into_iter()).collect();
    std::thread::scope(|scope| {
        let run = &run;
        for replica in 0..replicas {
            for (rank, group) in world(ranks).into_iter().enumerate() {
                let comms = ReduceComms { group: boxed(group), replicas: across[rank].next().map(boxed) };
                scope.spawn(move || run(Place { replica, rank, comms }).unwrap());
            }
        }
    });
}

/// One rank's gradient has another shape: of what all ranks hold nothing changes, and of experts, whose sums have begun,
/// nothing is left, on any rank.
#[test]
fn a_rank_whose_gradient_cannot_be_summed() {
    for (mesh, is_expert) in [([1, 2], false), ([2, 2], false), ([2, 1], true), ([2, 2], true)] {
        places(mesh, |Place { replica, rank, comms }| {
            let var = |count: usize| Var::ones(count, DType::F32, &Device::Cpu);
            let (shared, expert) = (var(3)?, var(4)?);
            let reducer = GradientReducer::new(&Cpu::new(), comms)?;
            let reducer = reducer.with_vars(std::slice::from_ref(&shared));
            let reducer = reducer.with_experts(std::slice::from_ref(&expert));
            let loss = ((shared.sum_all()? * 2.0)? + (expert.sum_all()? * 3.0)?)?;
            let mut main = MainGradients::new();
            main.backward(&loss)?;
            let of = if is_expert { &expert } else { &shared };
            let own = main.get(of)?.clone();
            let is_culprit = (replica, rank) == (0, 0);
            if is_culprit {
                main.sums_mut().insert(of, Tensor::zeros(7, DType::F32, &Device::Cpu)?);
            }
            let error = main.reduce(&reducer).expect_err("a gradient of another shape");
            match error_of(&error) {
                Some(Error::Shape { .. }) if is_culprit => {}
                Some(Error::Comm(CommError::Refused { .. })) if !is_culprit => {}
                other => panic!("{other:?} {error}"),
            }
            if is_expert {
                assert_eq!(main.microbatches(), 0);
                main.backward(&loss)?;
            } else {
                assert_eq!(main.microbatches(), 1);
                main.sums_mut().insert(of, own);
            }
            // The reducer works on, of what was there before.
            main.reduce(&reducer)?;
            let [replicas, ranks] = mesh.map(|count| count as f32);
            assert_eq!(main.get(&shared)?.to_vec1::<f32>()?, [2.0 * replicas * ranks; 3]);
            assert_eq!(main.get(&expert)?.to_vec1::<f32>()?, [3.0 * replicas; 4]);
            Ok(())
        });
    }
}
