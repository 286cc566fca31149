use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use moebius::CommError;
use moebius::cpu::{Cpu, ThreadWorld};
use moebius_models::Error as ModelError;
use moebius_models::generate::{Error as TextError, Finish, Output, Stats};

use crate::Piece;
use crate::launch::command;
use crate::output::Answers;
use crate::results::{ExpertChoices, Outcome, exchange, merge};

fn output(text: &str, finish: Finish) -> Output {
    Output { tokens: text.bytes().map(u32::from).collect(), text: text.into(), finish, incomplete: text.is_empty() }
}

/// What rank `rank` has: outputs of the requests that are dealt to it, and numbers of its own.
fn outcome(rank: usize, outputs: Vec<Output>) -> Outcome {
    let n = rank + 1;
    let choices = ExpertChoices { tokens: vec![n, 10 * n], dropped: rank };
    Outcome {
        stats: Stats {
            prompt_tokens: n,
            generated_tokens: 10 * n,
            prefill_tokens: 100 * n,
            prefill: Duration::from_millis(7 * n as u64),
            decode_steps: 20 - n,
            decode_tokens: 1000 * n,
            decode: Duration::from_nanos(1_234_567_891 - n as u64),
            capture_steps: n,
            capture: Duration::from_millis(30 - n as u64),
        },
        outputs,
        loading: Duration::from_secs(n as u64),
        loads: BTreeMap::from([(3, choices)]),
        host_memory: Some(1 << (40 - rank)),
        gpu_memory: (rank == 1).then_some(17),
        processes: 1,
    }
}

/// The launcher's command has all arguments but the number of ranks, and a shell gives each to the program as it was.
#[test]
fn a_command_for_several_gpus_says_what_was_asked() {
    let of = |arguments: &[&str]| command(2, arguments.iter().map(|argument| argument.to_string()));
    let expected =
        "moebius-run -n 2 target/generate FOLDER --device cuda --chat 'Name a prime.' --stop '' --prompt 'it'\\''s'";
    let asked = [
        "target/generate",
        "FOLDER",
        "--ranks",
        "2",
        "--device",
        "cuda",
        "--chat",
        "Name a prime.",
        "--stop",
        "",
        "--prompt",
        "it's",
    ];
    assert_eq!(of(&asked), expected);
    assert_eq!(of(&["a", "--ranks=2", "--cache=static"]), "moebius-run -n 2 a --cache=static");
}

/// An answer is written once it has ended and all before it are, whatever the order in which they end.
#[test]
fn answers_come_in_the_prompts_order_as_they_end() {
    let mut answers = Answers::new(true);
    let mut add = |request: usize, text: &str, is_last: bool| {
        answers.add(Piece { request, token: 7, text: text.into(), is_last })
    };
    assert_eq!(add(1, "b", false), "");
    assert_eq!(add(2, "c", true), "");
    assert_eq!(add(0, "a", false), "");
    assert_eq!(add(0, "a\n", true), "== 0\naa\n\n");
    assert_eq!(add(1, "", true), "== 1\nb\n== 2\nc\n");
    assert_eq!(add(3, "d", true), "== 3\nd\n");
    // The run fails: what has ended is written, though others before it have not.
    assert_eq!(add(5, "f", true), "");
    assert_eq!(add(4, "e", false), "");
    assert_eq!(add(6, "g", true), "");
    assert_eq!((answers.written, answers.ended().as_str()), (4, "== 5\nf\n== 6\ng\n"));
    let mut ids = Answers::new(false);
    assert_eq!(ids.add(Piece { request: 0, token: 7, text: String::new(), is_last: false }), "");
    assert_eq!(ids.add(Piece { request: 0, token: 8, text: String::new(), is_last: true }), "== 0\n7 8\n");
}

/// Three requests over two ranks, and over four, of which the last has none; texts of different lengths, with characters
/// of several bytes.
#[test]
fn every_rank_gets_all_results_in_the_requests_order() {
    let requests = [
        output("a line\n", Finish::MaxTokens),
        output("\u{20ac} \"\u{fffd}", Finish::Token(u32::MAX)),
        output("", Finish::Text("\n\n".into())),
    ];
    for ranks in [2usize, 4] {
        let own = |rank: usize| outcome(rank, requests.iter().skip(rank).step_by(ranks).cloned().collect());
        let gathered: Vec<Vec<Outcome>> = thread::scope(|scope| {
            let threads: Vec<_> = ThreadWorld::create(ranks, Duration::from_secs(60))
                .into_iter()
                .enumerate()
                .map(|(rank, mut comm)| {
                    scope.spawn(move || exchange(&Cpu::new(), &mut comm, &own(rank)).expect("results"))
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect()
        });
        let expected: Vec<Outcome> = (0..ranks).map(|rank| Outcome { processes: ranks, ..own(rank) }).collect();
        assert!(gathered.iter().all(|all| *all == expected), "{ranks} ranks");
        let all = merge(expected.into_iter().map(Ok).collect(), requests.len()).expect("one outcome");
        assert_eq!(all.outputs, requests);
        // Whichever rank had it, a text that ends inside a character is told of behind all of them.
        let whole: Vec<bool> = (0..).zip(&all.outputs).map(|(i, output)| output.complete_text(i).is_ok()).collect();
        assert_eq!(whole, [true, true, false]);
        let sum = ranks * (ranks + 1) / 2;
        assert_eq!((all.stats.prompt_tokens, all.stats.decode_tokens), (sum, 1000 * sum));
        assert_eq!((all.stats.decode_steps, all.stats.decode), (19, Duration::from_nanos(1_234_567_890)));
        assert_eq!((all.stats.capture_steps, all.stats.capture), (ranks, Duration::from_millis(29)));
        assert_eq!(all.loading, Duration::from_secs(ranks as u64));
        assert_eq!((all.host_memory, all.gpu_memory, all.processes), (Some(1 << 40), Some(17), ranks));
        let choices = ExpertChoices { tokens: vec![sum, 10 * sum], dropped: ranks * (ranks - 1) / 2 };
        assert_eq!(all.loads, BTreeMap::from([(3, choices)]));
    }
}

#[test]
fn the_first_rank_that_failed_is_named() {
    let outcomes = vec![Ok(outcome(0, vec![])), Err("out of luck".into()), Err("too".into())];
    assert_eq!(merge(outcomes, 0).expect_err("an error").to_string(), "rank 1: out of luck");
    assert_eq!(merge(vec![Err("alone".into())], 0).expect_err("an error").to_string(), "alone");
    // What a rank failed at goes before that others found it gone.
    let tag = moebius::comm::Tag { layer: 0, op: moebius::comm::Op::User, sequence: 0 };
    let gone = || moebius::Error::from(CommError::PeerGone { operation: "barrier", tag, rank: 0, peer: 1 });
    let found = [gone().into(), ModelError::from(gone()).into(), TextError::from(ModelError::from(gone())).into()];
    for error in found {
        let outcomes = vec![Err(error), Err("out of memory".into())];
        assert_eq!(merge(outcomes, 0).expect_err("an error").to_string(), "rank 1: out of memory");
    }
}
