//! The end of a step: numbers of microbatches that differ, and failures that the replicas hear of.

use moebius::comm::{Communicator, Op, Tag};
use moebius::cpu::Cpu;
use moebius::etp::{Comms, EtpOptions, Phase};
use moebius::{CommError, Error, Result, TensorMut};

use super::faulty_comm::FaultyComm;
use super::test_ranks::{MINUTE, ON, Place, TestChain};
use super::world::mesh;

/// A rank of chains of `n` ranks each, beside each other as replicas.
struct Rank {
    w: usize,
    test_chain: TestChain<Cpu>,
    replicas: Box<dyn Communicator<Cpu>>,
}

impl Rank {
    /// A forward and a backward of all weights, whose gradients are rank · 100 + `what`.
    fn microbatch(&self, what: f32) -> Result<()> {
        self.test_chain.pass(Phase::Forward, &[0, 1])?;
        self.test_chain.chain.begin(Phase::Backward)?;
        for i in [1, 0] {
            self.test_chain.read(i)?;
            self.test_chain.gradient(i, what)?;
        }
        self.test_chain.chain.end()
    }

    /// The first value of each weight's gradient.
    fn finish(&mut self) -> Result<Vec<f32>> {
        let mut found = Vec::new();
        let replicas =
            if self.replicas.size() > 1 { Some(&mut *self.replicas as &mut dyn Communicator<Cpu>) } else { None };
        self.test_chain.chain.finish(replicas, |_, gradient| {
            found.push(gradient.as_slice::<f32>()?[0]);
            Ok(())
        })?;
        Ok(found)
    }

    /// Whether the replicas' communicator brings all ranks together.
    fn replicas_meet(&mut self) {
        let (mut all, own) = (vec![0f32; self.replicas.size()], [self.w as f32]);
        let dims = [all.len()];
        let (send, recv) = (moebius::TensorRef::<Cpu>::from_slice(&own, &[1]), TensorMut::from_slice(&mut all, &dims));
        let tag = Tag { layer: 0, op: Op::User, sequence: 0 };
        self.replicas.all_gather(tag, send.unwrap(), recv.unwrap()).unwrap();
    }
}

/// `world` ranks, chains of `n`. `fails_from`: this rank's reductions fail from that collective on.
fn ranks<R: Send>(
    [world, n]: [usize; 2],
    options: EtpOptions,
    fails_from: Option<(usize, u64)>,
    run: impl Fn(Rank) -> R + Sync,
) -> Vec<R> {
    let comms = || mesh(&Cpu::new(), (world, ""), |w| (w / n, w % n), MINUTE).into_iter();
    let replicas = mesh(&Cpu::new(), (world, ""), |w| (w % n, w / n), MINUTE).into_iter();
    std::thread::scope(|scope| {
        let start = |(w, ((gather, reduce), replicas))| {
            let run = &run;
            scope.spawn(move || {
                let fails_from = fails_from.filter(|(rank, _)| *rank == w).map(|(_, first)| first);
                let reduce = Box::new(FaultyComm { fails_from, ..FaultyComm::<Cpu>::new(reduce) });
                let device = Cpu::poisoning();
                let place = Place { device, comms: Comms { gather, reduce } };
                let options = EtpOptions { replicas: world / n, ..options };
                run(Rank { w, test_chain: TestChain::new(place, options, 2, false).unwrap(), replicas })
            })
        };
        let threads: Vec<_> = comms().zip(comms()).zip(replicas).enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn is_count(error: &Error) -> bool {
    matches!(error, Error::Invalid { name, .. } if name == "microbatches")
}

/// In one chain: the rank that goes on, and those that end the step, get an error each, and the next step works.
#[test]
fn other_numbers_of_microbatches_in_a_chain() {
    for (prefetch, in_turn, counts) in
        [(true, false, [1, 2]), (false, false, [2, 1]), (true, true, [2, 3]), (false, true, [1, 2])]
    {
        let found = ranks([2, 2], EtpOptions { prefetch, in_turn, ..ON }, None, |mut rank| {
            let error =
                (0..counts[rank.w]).try_for_each(|_| rank.microbatch(1.0)).and_then(|()| rank.finish().map(drop));
            rank.test_chain.chain.recover(error.as_ref().err().map(|error| error as _))?;
            (0..2).try_for_each(|_| rank.microbatch(1.0))?;
            assert_eq!(rank.finish()?, [2.0 * rank.test_chain.sum(1.0); 2]);
            Ok::<_, Error>(error)
        });
        for found in found {
            let error = found.unwrap().unwrap_err();
            assert!(is_count(&error), "{prefetch} {in_turn} {counts:?}: {error}");
        }
    }
}

/// Over replicas that each hold whole weights: every rank hears of it, and nothing is lost: the one that is behind does
/// what it has left out, and all finish.
#[test]
fn other_numbers_of_microbatches_on_replicas() {
    let found = ranks([2, 1], ON, None, |mut rank| {
        (0..2 - rank.w).try_for_each(|_| rank.microbatch(1.0))?;
        let error = rank.finish().unwrap_err();
        if rank.w == 1 {
            rank.microbatch(1.0)?;
        }
        Ok::<_, Error>((error, rank.finish()?))
    });
    for (w, found) in found.into_iter().enumerate() {
        let (error, sums) = found.unwrap();
        assert!(is_count(&error) && error.to_string().contains(["found 2", "found 1"][w]), "{error}");
        assert_eq!(sums, [4.0; 2]);
    }
}

/// A rank whose `finish` fails before its first sum: its replicas hear of it in theirs, and so do the ranks of the
/// chains around them. The replicas' communicators go on.
#[test]
fn a_finish_that_fails_is_one_on_all_replicas() {
    for n in [1, 2] {
        // The second gradient of the first microbatch, which `finish` takes.
        let found = ranks([2 * n, n], EtpOptions { in_turn: false, ..ON }, Some((n - 1, 1)), |mut rank| {
            rank.microbatch(1.0)?;
            let error = rank.finish().unwrap_err();
            rank.replicas_meet();
            Ok::<_, Error>(error)
        });
        for (w, found) in found.into_iter().enumerate() {
            let error = found.unwrap();
            let own = w == n - 1;
            let told = matches!(&error, Error::Comm(CommError::Refused { .. }));
            assert!(own || told, "rank {w}: {error}");
            assert!(error.to_string().contains("an illegal address"), "rank {w}, N = {n}: {error}");
        }
    }
}
