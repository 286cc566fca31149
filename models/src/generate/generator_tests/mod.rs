//! The loop over a decoder whose logits follow from a sequence's ids.

mod ranks;
mod toy;

use super::super::sampling::Sampling;
use super::super::tokenizer::tests::bytes;
use super::*;
use toy::Toy;

fn go(_: Event<'_>) -> ControlFlow<EndOf> {
    ControlFlow::Continue(())
}

/// Prompts of lengths 1 to 12, not in order, some sampled, some that end early.
fn requests() -> Vec<Request> {
    [5usize, 1, 12, 5, 3, 7, 12, 2]
        .into_iter()
        .enumerate()
        .map(|(i, len)| {
            let prompt = (0..len as u32).map(|at| at * 31 % 250 + i as u32).collect();
            let mut request = Request::new(prompt, 3 + i % 4 * 4);
            request.sampling.temperature = if i % 2 == 0 { 0.0 } else { 0.9 };
            request.sampling.seed = i as u64;
            request.stop_tokens = (0..20).collect();
            request
        })
        .collect()
}

#[test]
fn a_sequences_tokens_do_not_depend_on_its_batch() {
    for (spread, sequences, can_keep) in
        [(0, 64, false), (0, 64, true), (32, 64, false), (32, 64, true), (3, 2, true), (4, 3, false), (0, 1, false)]
    {
        let toy = Toy { can_keep, ..Toy::new() };
        let generator = Generator::new(&toy, None).expect("a generator").spread(spread).max_sequences(sequences);
        let requests = requests();
        let mut seen: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
        let (outputs, stats) = generator
            .run(&requests, |event| {
                seen[event.request].push(event.token);
                ControlFlow::Continue(())
            })
            .expect("outputs");
        for (i, (request, output)) in requests.iter().zip(&outputs).enumerate() {
            let at = format!("request {i}, spread {spread}, {sequences} sequences, keep {can_keep}");
            assert_eq!(output.tokens, toy.expected(request), "{at}");
            assert_eq!(seen[i], output.tokens, "{at}");
            let last = output.tokens[output.tokens.len() - 1];
            let ended = if last < 20 { Finish::Token(last) } else { Finish::MaxTokens };
            assert_eq!(output.finish, ended, "{at}");
        }
        assert_eq!(stats.generated_tokens, outputs.iter().map(|o| o.tokens.len()).sum::<usize>());
        assert_eq!(stats.prompt_tokens, 47);
        let shapes = toy.shapes.borrow();
        assert!(shapes.iter().all(|(b, _)| *b <= sequences), "{shapes:?}");
    }
}

/// Nothing is chosen from logits that are worth nothing.
#[test]
fn a_step_that_has_lost_a_rank_gives_no_token() {
    let toy = Toy { lost: Some(3), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let mut request = Request::new(vec![7], 20);
    request.sampling.temperature = 0.9;
    let mut tokens = 0;
    let error = generator.run(&[request], |_| {
        tokens += 1;
        ControlFlow::Continue(())
    });
    assert!(error.expect_err("a lost rank").to_string().contains("a toy is lost"));
    assert_eq!(tokens, 2);
}

#[test]
fn batches_share_steps_and_what_has_ended_leaves() {
    let shapes = |can_keep: bool, spread: usize| {
        let toy = Toy { can_keep, ..Toy::new() };
        let generator = Generator::new(&toy, None).expect("a generator").spread(spread);
        let requests = [Request::new(vec![1, 2], 2), Request::new(vec![3, 4, 5], 3), Request::new(vec![6, 7], 1)];
        let (_, stats) = generator.run(&requests, go).expect("outputs");
        (toy.shapes.take(), stats.prefill_tokens, stats.decode_steps, stats.decode_tokens)
    };
    // Together: two of each prompt; then the third prompt's last id beside the first's second token; then its rest.
    assert_eq!(shapes(false, 1), (vec![(3, 2), (3, 1), (3, 1), (3, 1)], 6, 3, 4));
    assert_eq!(shapes(true, 1), (vec![(3, 2), (2, 1), (1, 1), (1, 1)], 6, 3, 4));
    // Apart: the prompts of two ids, then that of three.
    assert_eq!(shapes(true, 0), (vec![(2, 2), (1, 1), (1, 3), (1, 1), (1, 1)], 7, 3, 3));
}

/// A step that is captured is slower by far than those that replay it, and is in no rate.
#[test]
fn captures_have_a_time_of_their_own() {
    let time = std::time::Duration::from_millis(20);
    let toy = Toy { can_keep: true, capture: Some(time), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let requests = [Request::new(vec![1, 2], 4), Request::new(vec![3, 4], 9)];
    let (_, stats) = generator.run(&requests, go).expect("outputs");
    // Of three steps of both sequences, and of five that the second goes on alone, the first ones.
    assert_eq!((stats.capture_steps, stats.decode_steps, stats.decode_tokens), (2, 6, 8));
    assert_eq!(stats.generated_tokens, 13);
    assert!(stats.capture >= 2 * time, "{stats:?}");
    let (_, stats) = Generator::new(&Toy::new(), None).expect("a generator").run(&requests, go).expect("outputs");
    assert_eq!((stats.capture_steps, stats.capture, stats.decode_steps), (0, std::time::Duration::ZERO, 8));
}

/// No forward has more tokens than were asked for, unless there are more sequences; the same tokens come of it.
#[test]
fn prompts_are_read_in_pieces() {
    let requests: Vec<Request> =
        [10, 11, 10].into_iter().map(|len| Request::new((0..len).map(|at| at * 31 % 250).collect(), 3)).collect();
    let run = |tokens: Option<usize>| {
        let toy = Toy::new();
        let generator = Generator::new(&toy, None).expect("a generator");
        let generator = match tokens {
            Some(tokens) => generator.prefill_tokens(tokens),
            None => generator,
        };
        let (outputs, stats) = generator.run(&requests, go).expect("outputs");
        assert_eq!((stats.prefill_tokens, stats.decode_steps, stats.generated_tokens), (30, 3, 9));
        (outputs, toy.shapes.take())
    };
    let (expected, whole) = run(None);
    let decode = [(3, 1); 3];
    assert_eq!(whole, [&[(3, 10)], &decode[..]].concat());
    for (tokens, pieces) in [
        (30, &[10][..]),
        (29, &[9, 1]),
        (14, &[4, 4, 2]),
        (6, &[2; 5]),
        // A token of each sequence at least.
        (1, &[1; 10]),
        (0, &[1; 10]),
    ] {
        let (outputs, shapes) = run(Some(tokens));
        assert_eq!(outputs, expected, "{tokens}");
        let pieces: Vec<(usize, usize)> = pieces.iter().map(|len| (3, *len)).collect();
        assert_eq!(shapes, [&pieces[..], &decode].concat(), "{tokens}");
        let largest = shapes.iter().map(|(b, s)| b * s).max();
        assert!(largest <= Some(tokens.max(3)), "{tokens}: {largest:?}");
    }
}

#[test]
fn text_comes_in_whole_characters_and_ends_at_a_stop_token() {
    let tokenizer = bytes();
    let ids: Vec<u32> = "a€b".bytes().map(u32::from).chain([257, 65]).collect();
    let toy = Toy::saying(&ids);
    let generator = Generator::new(&toy, Some(&tokenizer)).expect("a generator");
    let mut request = Request::new(vec![33], 20);
    request.stop_tokens = vec![257];
    let mut pieces = Vec::new();
    let (outputs, _) = generator
        .run(&[request], |event| {
            pieces.push((event.text.to_string(), event.finish.cloned()));
            ControlFlow::Continue(())
        })
        .expect("outputs");
    let texts: Vec<&str> = pieces.iter().map(|(text, _)| text.as_str()).collect();
    assert_eq!(texts, ["a", "", "", "€", "b", ""]);
    assert!(pieces[..5].iter().all(|(_, finish)| finish.is_none()));
    assert_eq!(pieces[5].1, Some(Finish::Token(257)));
    let output = &outputs[0];
    assert_eq!((output.text.as_str(), &output.tokens[..], output.incomplete), ("a€b", &ids[..6], false));
    assert_eq!(output.complete_text(0).expect("a text"), "a€b");
}

#[test]
fn a_text_that_ends_inside_a_character_says_so() {
    let tokenizer = bytes();
    let toy = Toy::saying(&[65, 0xf0, 0x9f]);
    let generator = Generator::new(&toy, Some(&tokenizer)).expect("a generator");
    let (outputs, _) = generator.run(&[Request::new(vec![33], 3)], go).expect("outputs");
    assert_eq!((outputs[0].text.as_str(), outputs[0].incomplete), ("A\u{fffd}", true));
    let message = outputs[0].complete_text(7).expect_err("incomplete").to_string();
    assert_eq!(message, "request 7: the text ends inside a character, after 3 tokens");
}

#[test]
fn a_stop_string_over_tokens_is_never_seen() {
    let tokenizer = bytes();
    let ids: Vec<u32> = "one\n\ntwo".bytes().map(u32::from).collect();
    let toy = Toy::saying(&ids);
    let generator = Generator::new(&toy, Some(&tokenizer)).expect("a generator");
    let mut request = Request::new(vec![33], 20);
    request.stop_strings = vec!["\n\nt".into()];
    let mut pieces = Vec::new();
    let (outputs, _) = generator
        .run(&[request.clone()], |event| {
            pieces.push(event.text.to_string());
            ControlFlow::Continue(())
        })
        .expect("outputs");
    assert_eq!(pieces, ["o", "n", "e", "", "", ""]);
    assert_eq!((outputs[0].text.as_str(), outputs[0].tokens.len()), ("one", 6));
    assert_eq!(outputs[0].finish, Finish::Text("\n\nt".into()));
    // What only began like one comes with the end.
    request.max_tokens = 5;
    let (outputs, _) = generator.run(&[request], go).expect("outputs");
    assert_eq!((outputs[0].text.as_str(), &outputs[0].finish), ("one\n\n", &Finish::MaxTokens));
}

#[test]
fn a_sequence_ends_with_the_context() {
    let toy = Toy { context: 6, ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let (outputs, _) =
        generator.run(&[Request::new(vec![30, 31, 32], 50), Request::new(vec![33; 5], 50)], go).expect("outputs");
    // The last token is made of a full context, and has no place in it.
    assert_eq!(outputs[0].tokens.len(), 4);
    assert_eq!(outputs[1].tokens.len(), 2);
    assert!(outputs.iter().all(|o| o.finish == Finish::Context));
}

#[test]
fn the_caller_can_end_a_run() {
    let toy = Toy::new();
    let generator = Generator::new(&toy, None).expect("a generator");
    let mut left = 3;
    let requests = vec![Request::new(vec![1, 2], 9); 3];
    let (outputs, stats) = generator
        .run(&requests, |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(EndOf::Run) } else { ControlFlow::Continue(()) }
        })
        .expect("outputs");
    assert_eq!(stats.generated_tokens, 3);
    assert!(outputs.iter().all(|o| o.finish == Finish::Caller && o.tokens.len() == 1));
}

/// A text leaves it out, where a stop string would be looked for in vain.
#[test]
fn a_special_tokens_text_is_a_stop_token_too() {
    let tokenizer = bytes();
    let stop_strings = ["</s>", "</think>", "s"].map(str::to_string).to_vec();
    let request = Request { stop_tokens: vec![7], stop_strings, ..Request::new(vec![1], 1) };
    let sequence = || Sequence::new(0, &request, Some(&tokenizer), Channels::default()).expect("a sequence");
    assert_eq!(sequence().stop_tokens, [7, 257]);
    for text in ["</s>", "</think>", "s"] {
        assert_eq!(sequence().stops.push(text).1.as_deref(), Some(text));
    }
}

/// Whatever it was, the others' tokens stay what they are.
#[test]
fn the_caller_can_end_one_request() {
    let toy = Toy::new();
    let generator = Generator::new(&toy, None).expect("a generator");
    let requests: Vec<Request> = (0..3).map(|first| Request::new(vec![first, 2], 9)).collect();
    let (whole, _) = generator.run(&requests, go).expect("outputs");
    assert!(whole.iter().all(|output| output.tokens.len() > 3), "{whole:?}");
    let mut of_one = Vec::new();
    let (outputs, _) = generator
        .run(&requests, |event| {
            if event.request != 1 {
                return ControlFlow::Continue(());
            }
            of_one.push(event.token);
            if of_one.len() == 3 { ControlFlow::Break(EndOf::Request) } else { ControlFlow::Continue(()) }
        })
        .expect("outputs");
    assert_eq!((&outputs[0], &outputs[2]), (&whole[0], &whole[2]));
    assert_eq!((&outputs[1].finish, &outputs[1].tokens[..]), (&Finish::Caller, &whole[1].tokens[..3]));
    assert_eq!(of_one, outputs[1].tokens);
    // With its last token it has ended already.
    let (ended, _) = generator
        .run(&requests, |event| match event.finish {
            Some(_) => ControlFlow::Break(EndOf::Request),
            None => ControlFlow::Continue(()),
        })
        .expect("outputs");
    assert_eq!(ended, whole);
}

#[test]
fn requests_that_cannot_be_are_refused_before_anything_runs() {
    let toy = Toy { context: 6, ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let good = Request::new(vec![1], 1);
    let message = |bad: Request| {
        let error = generator.run(&[good.clone(), bad], go).expect_err("refused");
        assert!(toy.shapes.borrow().is_empty(), "a step ran");
        error.to_string()
    };
    assert_eq!(message(Request::new(vec![], 1)), "request 1: the prompt has no token");
    let long = message(Request::new(vec![1; 6], 1));
    assert_eq!(long, "request 1: the prompt has 6 tokens, the decoder's context 6; expected fewer");
    let past = message(Request::new(vec![1, 260], 1));
    assert_eq!(past, "request 1: id 260 at position 1 of the prompt; the embedding has 260 rows");
    assert!(message(Request::new(vec![1], 0)).contains("max_tokens"));
    assert!(message(Request { stop_strings: vec!["a".into()], ..good.clone() }).contains("stop_strings"));
    let sampling = Sampling { top_p: 2.0, ..Sampling::default() };
    assert!(message(Request { sampling, ..good.clone() }).contains("top_p"));
    assert_eq!(generator.run(&[], go).expect("nothing to do").0, []);
}

#[test]
fn a_tokenizer_of_more_ids_than_the_embedding_is_refused() {
    struct Small(Toy);
    impl Decoder for Small {
        type Cache<'d> = Vec<Vec<u32>>;
        fn vocabulary(&self) -> usize {
            258
        }
        fn context(&self) -> usize {
            self.0.context()
        }
        fn cache(&self, request: CacheRequest) -> crate::Result<Self::Cache<'_>> {
            self.0.cache(request)
        }
        fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> crate::Result<Tensor> {
            self.0.step(tokens, cache)
        }
    }
    let tokenizer = bytes();
    let refused = Generator::new(Small(Toy::new()), Some(&tokenizer)).err().expect("refused").to_string();
    assert!(refused.contains("id 258; the embedding has 258 rows"), "{refused}");
    // And logits of another size than the vocabulary.
    let generator = Generator::new(Small(Toy::new()), None).expect("a generator");
    let message = generator.run(&[Request::new(vec![1], 1)], go).expect_err("refused").to_string();
    assert!(message.contains("expected shape [1, 258], found [1, 260]"), "{message}");
}

#[test]
fn logits_that_are_no_numbers_end_the_run() {
    let toy = Toy { spoiled: Some(2), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let message = generator.run(&[Request::new(vec![1], 5)], go).expect_err("refused").to_string();
    assert_eq!(message, "logits of a step: that of id 0 is NaN, in request 0");
    // Batches are in order of length: the request's number is the caller's.
    let requests = [Request::new(vec![1, 1, 1], 5), Request::new(vec![1], 5)];
    let toy = Toy { spoiled: Some(2), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator").spread(0);
    let message = generator.run(&requests, go).expect_err("refused").to_string();
    assert_eq!(message, "logits of a step: that of id 0 is NaN, in request 1");
}

/// The decoder's own choice is another here than the logits', so that it shows which one counts.
#[test]
fn the_decoders_own_choice_counts_where_nobody_asks_for_more() {
    let toy = Toy { likeliest: Some(7), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let tokens = |requests: &[Request]| -> Vec<Vec<u32>> {
        let (outputs, _) = generator.run(requests, go).expect("outputs");
        outputs.into_iter().map(|output| output.tokens).collect()
    };
    let greedy = [Request::new(vec![1, 2], 3), Request::new(vec![3], 3)];
    assert_eq!(tokens(&greedy), [[7; 3], [7; 3]]);
    for change in [|o: &mut Sampling| o.temperature = 0.5, |o: &mut Sampling| o.repetition_penalty = 1.1] {
        let mut requests = greedy.clone();
        change(&mut requests[1].sampling);
        let alone = [toy.expected(&requests[0]), toy.expected(&requests[1])];
        // The second chooses from the first step on, the first from the second step on; both have three tokens.
        assert_eq!(tokens(&requests)[1], alone[1]);
    }
    // Logits that are no numbers are found all the same, and so are choices of another number.
    let wrong = Toy { likeliest: Some(7), extra: 1, ..Toy::new() };
    let generator = Generator::new(&wrong, None).expect("a generator");
    let message = generator.run(&greedy, go).expect_err("refused").to_string();
    assert!(message.contains("Decoder::likeliest") && message.contains("[2]"), "{message}");
    let toy = Toy { likeliest: Some(7), spoiled: Some(2), ..Toy::new() };
    let generator = Generator::new(&toy, None).expect("a generator");
    let message = generator.run(&[Request::new(vec![1], 5)], go).expect_err("refused").to_string();
    assert_eq!(message, "logits of a step: that of id 0 is NaN, in request 0");
}
