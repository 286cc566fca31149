//! Errors of words that are written as the kernels write them.

use super::*;

const ORIGINS_OF_TEST: [Origin; 2] = [Origin { rank: 0, layer: 3 }, Origin { rank: 2, layer: 9 }];

fn error_of(words: &[u64; WORDS]) -> Option<Error> {
    Raised { call: "check", words: *words, origins: &ORIGINS_OF_TEST }.error()
}

/// As `raise_fault` of `common.cuh` writes it.
fn fault(words: &mut [u64; WORDS], code: u64, detail: u64) {
    words[FAULT] = words[FAULT].max(code << params::FAULT_DETAIL_BITS | (DETAIL - detail));
}

/// As `raise_capacity` does.
fn capacity(words: &mut [u64; WORDS], [needed, rank, origin, rows]: [u64; 4]) {
    fault(words, params::FAULT_CAPACITY, rows);
    let [of_rank, of_rows] = [params::STATUS_NEEDED_RANK, params::STATUS_NEEDED_ROWS].map(|i| i as usize);
    words[of_rank] = words[of_rank].max((needed << 16 | rank) << params::ORIGIN_BITS | origin);
    words[of_rows] = words[of_rows].max(needed << 32 | (ROWS - rows));
}

/// Both words of `found_word`.
fn found(words: &mut [u64; WORDS], at: params::StatusWord, entry: u64, found: u32) {
    let first = (u64::from(u32::MAX) - (entry & u64::from(u32::MAX))) << 32;
    for (word, half) in words[at as usize..][..2].iter_mut().zip([found, !found]) {
        *word = (*word).max(first | u64::from(half));
    }
}

/// A call and the first operand that it follows, on the rank and layer of this number.
#[derive(Clone, Copy)]
struct Mapped {
    call: MappedCall,
    operand: params::Operand,
    origin: i64,
    entry: u64,
}

impl Mapped {
    fn new(call: MappedCall, entry: u64) -> Self {
        Self { call, operand: params::OPERAND_FIRST, origin: 1, entry }
    }

    fn detail(self) -> u64 {
        self.entry << params::SITE_BITS | site(self.call, self.origin, self.operand) as u64
    }
}

/// As `raise_map` does.
fn map(at: Mapped, holds: i32) -> Raise {
    Box::new(move |words| {
        fault(words, params::FAULT_MAP, at.detail());
        found(words, params::STATUS_MAP_FOUND, at.entry, holds as u32);
    })
}

/// As `raise_segment` does.
fn segment(at: Mapped, (offset, count): (i64, i64)) -> Raise {
    Box::new(move |words| {
        fault(words, params::FAULT_SEGMENT, at.detail());
        let halves = [offset, offset >> 32, count, count >> 32];
        for (half, word) in halves.into_iter().zip((params::STATUS_SEGMENT_FOUND..).step_by(2)) {
            found(words, word, at.entry, half as u32);
        }
    })
}

/// As the router does.
fn nan(words: &mut [u64; WORDS], token: u64, expert: u64, origin: u64) {
    let word = (token << params::NAN_EXPERT_BITS | expert) << params::ORIGIN_BITS | origin;
    words[NAN] = words[NAN].min(word);
}

/// A choice of a token of 4, among 16 experts.
#[derive(Clone, Copy)]
struct Choice {
    at: u64,
    origin: u64,
    id: i64,
    first: Option<u64>,
}

/// As the two walks of `plan.cu` do.
fn choice(words: &mut [u64; WORDS], Choice { at, origin, id, first }: Choice) {
    let detail = at << params::ORIGIN_BITS | origin;
    fault(words, params::FAULT_CHOICE, detail);
    let own = params::FAULT_CHOICE << params::FAULT_DETAIL_BITS | (DETAIL - detail);
    if words[FAULT] == own && words[params::STATUS_CHOICE as usize] != own {
        words[params::STATUS_CHOICE as usize] = own;
        words[params::STATUS_CHOICE_ID as usize] = id as u64;
        words[params::STATUS_CHOICE_FIRST as usize] = first.map_or(0, |f| f + 1);
        words[params::STATUS_CHOICE_SIZES as usize] = 16 << 32 | 4;
    }
}

/// As `raise_id` of `common.cuh` does.
fn routed(words: &mut [u64; WORDS], Choice { at, origin, id, .. }: Choice) {
    fault(words, params::FAULT_ID, at << params::ORIGIN_BITS | origin);
    let first = (u64::from(u32::MAX) - (at & u64::from(u32::MAX))) << 32;
    let below = [(params::STATUS_ID, id as u32), (params::STATUS_ID_TOP_K, 4), (params::STATUS_ID_EXPERTS, 16)];
    below.iter().for_each(|(i, word)| {
        let found = &mut words[*i as usize];
        *found = (*found).max(first | u64::from(*word));
    });
}

type Raise = Box<dyn Fn(&mut [u64; WORDS])>;

/// The fault told when all of these are raised, in every order that begins with another of them.
fn met(all: &[Raise]) -> String {
    let one = |first: usize| {
        let mut words = CLEAR;
        all.iter().cycle().skip(first).take(all.len()).for_each(|raise| raise(&mut words));
        let forward = error_of(&words);
        words = CLEAR;
        all.iter().rev().cycle().skip(first).take(all.len()).for_each(|raise| raise(&mut words));
        assert_eq!(error_of(&words).map(|e| e.to_string()), forward.as_ref().map(|e| e.to_string()));
        forward.expect("something was raised").to_string()
    };
    let said: Vec<String> = (0..all.len()).map(one).collect();
    assert!(said.iter().all(|text| *text == said[0]), "{said:?}");
    said[0].clone()
}

fn of(code: u64, detail: u64) -> Raise {
    Box::new(move |words| fault(words, code, detail))
}

fn choosing(of: Choice) -> Raise {
    Box::new(move |words| choice(words, of))
}

#[test]
fn every_code_is_known_and_no_other() {
    let mut words = CLEAR;
    assert_eq!(error_of(&words).map(|e| e.to_string()), None);
    let named =
        ["segment 5", "map[5]", "topk_ids[1, 1]", "aux.sums", "topk_ids", "rows", "record of rank 5", "had given up"];
    let record = 5 << params::ORIGIN_BITS | 1;
    assert_eq!(named.len() as u64 + 1, params::FAULT_END, "a name for each code");
    for (code, name) in (1..params::FAULT_END).zip(named) {
        let error = match code {
            params::FAULT_CHOICE => met(&[choosing(Choice { at: 5, origin: 0, id: 99, first: None })]),
            params::FAULT_ID => met(&[routing(Choice { at: 5, origin: 0, id: 99, first: None })]),
            params::FAULT_CAPACITY => met(&[Box::new(|words| capacity(words, [9, 0, 0, 8]))]),
            params::FAULT_RECORD => met(&[of(code, record)]),
            params::FAULT_SEGMENT => met(&[segment(Mapped::new(MappedCall::Up, 5), (-1, 1))]),
            params::FAULT_MAP => met(&[map(Mapped::new(MappedCall::GatherRows, 5), -1)]),
            code => met(&[of(code, 5)]),
        };
        assert!(error.contains(name), "{code}: {error}");
        fault(&mut words, code, Mapped::new(MappedCall::Up, 5).detail());
        assert!(!matches!(error_of(&words), Some(Error::UnknownFault { .. })), "{code}");
    }
    for unknown in [params::FAULT_END, params::FAULT_END + 1, 0xffff] {
        words = CLEAR;
        fault(&mut words, unknown, 5);
        let error = error_of(&words);
        assert!(matches!(error, Some(Error::UnknownFault { code, detail: 5, .. }) if code == unknown), "{error:?}");
    }
    let error = met(&[of(params::FAULT_RECORD, record)]);
    assert!(error.starts_with("check on rank 2, layer 9: record of rank 5"), "{error}");
    // Code 0 is raised by nobody.
    words = CLEAR;
    words[FAULT] = 1;
    assert!(matches!(error_of(&words), Some(Error::UnknownFault { code: 0, .. })));
}

#[test]
fn a_bad_id_is_told_as_the_cpu_tells_it() {
    let expert = |origin: Origin, at: usize, id, problem| {
        let Origin { rank, layer } = origin;
        Error::ExpertId { call: "prepare", rank, layer, token: at / 4, k: at % 4, id, problem }.to_string()
    };
    let outside = IdProblem::OutOfRange { num_experts: 16 };
    for id in [16, -2, i64::MIN, i64::MAX, 1 << 40] {
        let text = met(&[choosing(Choice { at: 6, origin: 1, id, first: None })]);
        assert_eq!(text, expert(ORIGINS_OF_TEST[1], 6, id, outside));
    }
    let most = i32::MAX as u64;
    let text = met(&[choosing(Choice { at: most, origin: 0, id: 3, first: Some(2) })]);
    assert_eq!(text, expert(ORIGINS_OF_TEST[0], most as usize, 3, IdProblem::Duplicate { first: 2 }));
    // The first choice's id, whatever was raised before or behind it.
    let late = choosing(Choice { at: 9, origin: 0, id: 77, first: None });
    let early = choosing(Choice { at: 2, origin: 1, id: 99, first: None });
    assert_eq!(met(&[late, early, of(params::FAULT_MAP, 0)]), expert(ORIGINS_OF_TEST[1], 2, 99, outside));
    // Of several calls the first stays.
    let mut words = CLEAR;
    for id in [1000, 2000] {
        choice(&mut words, Choice { at: 0, origin: 0, id, first: None });
    }
    assert!(matches!(error_of(&words), Some(Error::ExpertId { id: 1000, .. })));
    // Without the walk that tells the id.
    assert!(met(&[of(params::FAULT_CHOICE, 7 << params::ORIGIN_BITS)]).contains("topk_ids, choice 7"));
}

fn routing(of: Choice) -> Raise {
    Box::new(move |words| routed(words, of))
}

#[test]
fn a_bad_id_of_a_backward_is_told_as_the_cpu_tells_it() {
    let expert = |origin: Origin, at: usize, id| {
        let (Origin { rank, layer }, problem) = (origin, IdProblem::NotRouted { num_experts: 16 });
        Error::ExpertId { call: "route_bwd", rank, layer, token: at / 4, k: at % 4, id, problem }.to_string()
    };
    for id in [16, -1, i32::MIN, i32::MAX].map(i64::from) {
        let [late, early] =
            [(9, 0, 77), (6, 1, id)].map(|(at, origin, id)| routing(Choice { at, origin, id, first: None }));
        assert_eq!(met(&[late, early]), expert(ORIGINS_OF_TEST[1], 6, id));
    }
    // A choice past what the words keep of its number.
    let far = (1 << 33) + 5;
    let text = met(&[routing(Choice { at: far, origin: 1, id: 3, first: None })]);
    assert!(text.contains(&format!("choice {far}, on rank 2, layer 9")), "{text}");
}

#[test]
fn sums_over_no_tokens_are_told_with_rank_and_layer() {
    let error = raised(&[of(params::FAULT_SUMS, 1)]);
    assert!(matches!(error, Some(Error::EmptySums { call: "route_bwd", rank: 2, layer: 9 })), "{error:?}");
}

/// Segments and maps: told with the call that followed them, its operand, rank and layer, and with what was found, as
/// the CPU tells them.
#[test]
fn maps_and_segments_are_told_as_the_cpu_tells_them() {
    for slots in [(-1, 1), (6, -1), (i64::MIN, i64::MAX), (1 << 40, 3), (0, 0), (-1, -1), (7, i64::from(i32::MAX))] {
        let text = met(&[segment(Mapped::new(MappedCall::Down, 6), slots)]);
        let expected = Error::Segment { call: "down", rank: 2, layer: 9, segment: 6, found: Some(slots) };
        assert_eq!(text, expected.to_string());
    }
    let most = u64::from(u32::MAX);
    for (call, operand, name, entry, holds) in [
        (MappedCall::Up, params::OPERAND_FIRST, "rows.map", 0, 8),
        (MappedCall::DownBwd, params::OPERAND_FIRST, "grad.map", 5, i32::MAX),
        (MappedCall::UpDgrad, params::OPERAND_SECOND, "input_weight.rows.map", most, -1),
        (MappedCall::Wgrad, params::OPERAND_SECOND, "right.map", 7, i32::MIN),
        (MappedCall::ReduceRows, params::OPERAND_FIRST, "map", 8, 0),
    ] {
        let text = met(&[map(Mapped { call, operand, origin: 0, entry }, holds)]);
        let (map, found) = (name.to_string(), Some(i64::from(holds)));
        let expected = Error::RowMap { call: call.name(), rank: 0, layer: 3, map, entry: entry as usize, found };
        assert_eq!(text, expected.to_string());
    }
    // The first entry and what it holds, whatever call it is of, and whatever was met behind it.
    let of_call = |call, entry, holds| map(Mapped::new(call, entry), holds);
    let (later, first) = (of_call(MappedCall::Up, 4, 99), of_call(MappedCall::Wgrad, 3, 70));
    let text = met(&[later, first, of_call(MappedCall::Down, 5, -7)]);
    assert!(text.starts_with("wgrad on rank 2, layer 9: left.map[3]") && text.ends_with("found 70"), "{text}");
}

/// Two calls with other values at the same entry: which of them the told call met is not known, and nothing is made
/// of halves of both.
#[test]
fn values_of_two_calls_are_not_taken_for_one() {
    let of_call = |call, holds| map(Mapped::new(call, 3), holds);
    for (one, other) in [(8, 9), (-1, 8), (i32::MIN, i32::MAX), (0x0001_0002, 0x0002_0001)] {
        let text = met(&[of_call(MappedCall::Up, one), of_call(MappedCall::Wgrad, other)]);
        assert!(text.starts_with("up on rank 2, layer 9: rows.map[3]"), "{text}");
        assert!(text.ends_with("found another (seen by a kernel)"), "{text}");
    }
    assert!(met(&[of_call(MappedCall::Up, 8), of_call(MappedCall::Wgrad, 8)]).ends_with("found 8"));
    let slots = [(0x1_0000_0002, 4), (0x2_0000_0001, 4)];
    let [one, other] = slots.map(|slots| segment(Mapped::new(MappedCall::Up, 3), slots));
    assert!(met(&[one, other]).ends_with("found others (seen by a kernel)"));
    // The fault without the words, as of a map's entry whose number they do not keep.
    let text = met(&[of(params::FAULT_MAP, Mapped::new(MappedCall::Up, 3).detail())]);
    assert!(text.ends_with("found another (seen by a kernel)"), "{text}");
}

/// A site that no call has given is told as itself, and not as some call's.
#[test]
fn a_fault_of_no_known_call_is_its_own_error() {
    for code in [params::FAULT_MAP, params::FAULT_SEGMENT] {
        let detail = 5 << params::SITE_BITS;
        let error = raised(&[of(code, detail)]);
        let as_meant = matches!(error, Some(Error::UnknownFault { call: "check", code: c, detail: d }) if (c, d) == (code, detail));
        assert!(as_meant, "{error:?}");
    }
}

/// The error of these.
fn raised(all: &[Raise]) -> Option<Error> {
    let mut words = CLEAR;
    all.iter().for_each(|raise| raise(&mut words));
    error_of(&words)
}

#[test]
fn a_nan_is_told_with_rank_and_layer() {
    let nan: Raise = Box::new(|words| nan(words, 3, 4, 1));
    let text = met(&[nan]);
    assert_eq!(text, Error::NanLogits { call: "route", rank: 2, layer: 9, token: 3, expert: 4 }.to_string());
}

/// As `raise_odd_record` of `routing_records.cu` does: a record with a bad id of its rank's.
fn bad_record(words: &mut [u64; WORDS], origin: u64, bad: BadId) {
    let own = params::FAULT_RECORD << params::FAULT_DETAIL_BITS
        | (DETAIL - ((bad.rank as u64) << params::ORIGIN_BITS | origin));
    fault(words, params::FAULT_RECORD, (bad.rank as u64) << params::ORIGIN_BITS | origin);
    if words[FAULT] == own && words[params::STATUS_RECORD as usize] != own {
        words[params::STATUS_RECORD as usize] = own;
        let first = bad.first.map_or(0, |first| first as u64 + 1);
        let named = [bad.rank as u64, bad.token as u64, bad.k as u64, bad.id as u64, first];
        words[params::STATUS_RECORD_BAD as usize..][..5].copy_from_slice(&named);
        words[params::STATUS_RECORD_LAYER as usize] = u64::from(bad.layer);
        words[params::STATUS_RECORD_EXPERTS as usize] = 16;
    }
}

#[test]
fn a_bad_id_in_a_record_is_told_as_its_own_rank_tells_it() {
    let late = BadId { rank: 3, layer: 9, token: 7, k: 1, id: -5, first: None };
    let early = BadId { rank: 1, layer: 4, token: 2, k: 3, id: 6, first: Some(0) };
    let raised = |origin, bad: BadId| -> Raise { Box::new(move |words| bad_record(words, origin, bad)) };
    for bad in [late, early] {
        assert_eq!(met(&[raised(1, bad)]), bad.error(16).to_string());
    }
    // The first rank's, whatever was raised before or behind it.
    let met = met(&[raised(0, late), raised(1, early), of(params::FAULT_MAP, 0)]);
    assert_eq!(met, early.error(16).to_string());
    // Of several prepares with a bad id of the same rank the first stays.
    let mut words = CLEAR;
    for id in [1000, 2000] {
        bad_record(&mut words, 1, BadId { id, ..late });
    }
    assert!(matches!(error_of(&words), Some(Error::ExpertId { rank: 3, layer: 9, id: 1000, .. })));
    // A record with another problem of a rank before it.
    fault(&mut words, params::FAULT_RECORD, 1);
    let error = error_of(&words);
    assert!(matches!(error, Some(Error::OddRecord { rank: 2, layer: 9, peer: 0, .. })), "{error:?}");
    let text = error.map(|e| e.to_string()).unwrap_or_default();
    assert!(text.contains("TokenDispatcher::check") && !text.contains("ids"), "{text}");
}

#[test]
fn origins_keep_their_numbers() {
    let (mut known, at) = (Vec::new(), |layer| Origin { rank: 1, layer });
    for layer in (0..ORIGINS as u32).chain(0..3) {
        assert_eq!(numbered("route", &mut known, at(layer)).ok(), Some(i64::from(layer)));
    }
    let error = numbered("route", &mut known, at(1 << 20)).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error.contains("2048 layers"), "{error}");
    assert_eq!(known.len(), ORIGINS);
}
#[test]
fn what_is_told_of_several_does_not_depend_on_their_order() {
    // Of one kind the first in the tensor; of several kinds the largest code.
    let entry = |entry: u64| map(Mapped::new(MappedCall::GatherRows, entry), entry as i32 + 8);
    assert!(met(&[entry(9), entry(0), entry(4)]).ends_with("map[0]: expected a row of its tensor, found 8"));
    let [bad, worse] = [8, 7].map(|choice| of(params::FAULT_CHOICE, choice << params::ORIGIN_BITS));
    assert!(met(&[of(params::FAULT_SEGMENT, 0), bad, entry(3), worse]).contains("choice 7"));
    // A NaN goes before everything but a lost rank, the first of them.
    let nans: [Raise; 2] = [Box::new(|words| nan(words, 6, 0, 0)), Box::new(|words| nan(words, 5, 9, 1))];
    let [later, first] = nans;
    let text = met(&[of(params::FAULT_RECORD, 1), later, of(params::FAULT_SUMS, 0), first]);
    assert_eq!(text, Error::NanLogits { call: "route", rank: 2, layer: 9, token: 5, expert: 9 }.to_string());
}

/// A lost rank goes before what comes of it: routers that read rows which nobody had written, and what other ranks say of
/// it, whichever of a rank's waits it was.
#[test]
fn a_lost_rank_is_told_before_what_follows_from_it() {
    let peer = |phase: params::NvLinkPhase, peer: u64| {
        of(params::FAULT_PEER, ((phase as u64) << params::NVLINK_PEER_BITS | peer) << params::ORIGIN_BITS | 1)
    };
    let waits = [
        (params::NVLINK_WAIT_READY, "did not come to the call in time"),
        (params::NVLINK_WAIT_DONE, "did not end the call in time"),
        (params::NVLINK_WAIT_ROW, "did not send a row in time"),
        (params::NVLINK_WAIT_MARK, "did not send an expert's rows in time"),
    ];
    for (phase, problem) in waits {
        let unread: Raise = Box::new(|words| nan(words, 0, 0, 0));
        let text = met(&[unread, peer(params::NVLINK_STOPPED, 0), peer(phase, 3), of(params::FAULT_RECORD, 1)]);
        assert_eq!(text, Error::LatePeer { call: "check", rank: 2, layer: 9, peer: 3, problem }.to_string());
    }
    let unread: Raise = Box::new(|words| nan(words, 0, 0, 0));
    let text = met(&[peer(params::NVLINK_STOPPED, 3), unread]);
    assert!(text.contains("rank 3 had given up"), "{text}");
}

#[test]
fn a_capacity_is_told_with_its_own_need() {
    let raise = |of: [u64; 4]| -> Raise { Box::new(move |words| capacity(words, of)) };
    let text = |needed, rank, origin: usize, capacity| {
        Error::Capacity { rank, layer: ORIGINS_OF_TEST[origin].layer, needed, capacity }.to_string()
    };
    // Two layers: the need of the one is not told with the capacity or the number of the other.
    let (small, large) = ([9, 1, 1, 8], [120, 0, 0, 100]);
    assert_eq!(met(&[raise(small), raise(large)]), text(120, 0, 0, 100));
    assert_eq!(
        met(&[raise([120, 1, 1, 100]), raise(large), raise(small), of(params::FAULT_CHOICE, 0)]),
        text(120, 1, 1, 100)
    );
    assert_eq!(met(&[raise([i32::MAX as u64, 65_535, 1, 0])]), text(i32::MAX as usize, 65_535, 1, 0));
    assert_eq!(met(&[raise([1 << 31, 0, 0, (1 << 31) - 1])]), text(1 << 31, 0, 0, (1 << 31) - 1));
}
