//! The loop over ranks that share a decoder's experts.

use std::thread;
use std::time::Duration;

use moebius::cpu::ThreadWorld;

use super::super::super::decoder::OverRanks;
use super::*;

type Shapes = Vec<(usize, usize)>;

/// Runs `shares[r]` on rank r, each with a toy of its own; gives outputs and the shapes of its steps.
fn over(shares: &[Vec<Request>], toy: impl Fn(usize) -> Toy + Sync) -> Vec<(Result<Vec<Output>>, Shapes)> {
    over_with(shares, toy, |generator| generator)
}

type Ranked<'t> = OverRanks<&'t Toy>;

/// The same with another generator.
fn over_with(
    shares: &[Vec<Request>],
    toy: impl Fn(usize) -> Toy + Sync,
    options: for<'a, 't> fn(Generator<'a, &'t Ranked<'t>>) -> Generator<'a, &'t Ranked<'t>>,
) -> Vec<(Result<Vec<Output>>, Shapes)> {
    let toy = &toy;
    thread::scope(|scope| {
        let threads: Vec<_> = ThreadWorld::create(shares.len(), Duration::from_secs(60))
            .into_iter()
            .zip(shares)
            .enumerate()
            .map(|(rank, (comm, requests))| {
                scope.spawn(move || {
                    let toy = toy(rank);
                    let ranked = OverRanks::new(&toy, Box::new(comm));
                    let generator = options(Generator::new(&ranked, None).expect("a generator"));
                    let outputs = generator.run(requests, go).map(|(outputs, _)| outputs);
                    drop(ranked);
                    (outputs, toy.shapes.take())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

#[test]
fn all_ranks_step_until_the_last_has_ended() {
    let shares = [requests()[..3].to_vec(), vec![Request::new(vec![7], 40)], vec![]];
    let got = over(&shares, |_| Toy::new());
    for (requests, (outputs, shapes)) in shares.iter().zip(&got) {
        let outputs = outputs.as_ref().expect("outputs");
        let expected: Vec<_> = requests.iter().map(|r| Toy::new().expected(r)).collect();
        assert_eq!(outputs.iter().map(|o| o.tokens.clone()).collect::<Vec<_>>(), expected);
        assert_eq!(shapes.len(), 40, "the same number of steps on every rank");
    }
    assert!(got[2].1.iter().all(|shape| *shape == (0, 1)), "{:?}", got[2].1);
}

/// A rank of long prompts reads them in more steps than another, which decodes meanwhile.
#[test]
fn ranks_read_prompts_in_pieces_of_their_own() {
    let shares = [vec![Request::new((0..30).collect(), 3)], vec![Request::new(vec![7], 5)], vec![]];
    let got = over_with(&shares, |_| Toy::new(), |generator| generator.prefill_tokens(8));
    for (requests, (outputs, shapes)) in shares.iter().zip(&got) {
        let outputs = outputs.as_ref().expect("outputs");
        let expected: Vec<_> = requests.iter().map(|r| Toy::new().expected(r)).collect();
        assert_eq!(outputs.iter().map(|o| o.tokens.clone()).collect::<Vec<_>>(), expected);
        assert_eq!(shapes.len(), 6, "the same number of steps on every rank");
    }
    assert_eq!(got[0].1, [(1, 8), (1, 8), (1, 8), (1, 6), (1, 1), (1, 1)]);
}

#[test]
fn a_rank_that_fails_tells_the_others_why() {
    let shares = [vec![Request::new(vec![7], 40)], vec![Request::new(vec![8], 40)], vec![]];
    for (rank, (outputs, _)) in
        over(&shares, |rank| Toy { spoiled: (rank == 1).then_some(3), ..Toy::new() }).into_iter().enumerate()
    {
        let message = outputs.expect_err("every rank fails").to_string();
        assert!(message.contains("that of id 0 is NaN"), "rank {rank}: {message}");
    }
    // A request that cannot be is told as well.
    let shares = [vec![Request::new(vec![7], 40)], vec![Request::new(vec![], 40)]];
    for (rank, (outputs, shapes)) in over(&shares, |_| Toy::new()).into_iter().enumerate() {
        let message = outputs.expect_err("every rank fails").to_string();
        assert!(message.contains("the prompt has no token"), "rank {rank}: {message}");
        assert!(shapes.is_empty(), "no step");
    }
}

#[test]
fn a_step_that_fails_on_one_rank_behind_its_collectives_is_told_to_the_others() {
    let shares = [vec![Request::new(vec![7], 40)], vec![Request::new(vec![8], 40)], vec![]];
    let one = over(&shares, |rank| Toy { fails: (rank == 1).then_some(3), ..Toy::new() });
    // All of them fail in the same step, as where it is one of its collectives that does.
    let all = over(&shares, |_| Toy { fails: Some(3), ..Toy::new() });
    for (rank, (outputs, shapes)) in one.into_iter().chain(all).enumerate() {
        let message = outputs.expect_err("every rank fails").to_string();
        assert!(message.contains("out of toys"), "rank {rank}: {message}");
        assert_eq!(shapes.len(), 3, "rank {rank}");
    }
}
