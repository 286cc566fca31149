//! Mistakes of a caller are errors, also where only the GPU can see them.

use moebius::comm::Solo;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatchSpec, Group, GroupConfig, LibraryDispatchers, Overflow, Reporting};
use moebius::kernels::*;
use moebius::{DType, Error, Tensor};

use crate::harness::{Case, Data, on_cpu, on_gpu, tests};

tests!(
    nan_logits_name_token_and_expert,
    the_gpu_returns_the_errors_of_the_cpu,
    maps_outside_are_reported_and_not_followed,
    what_a_map_holds_is_told_of_its_first_entry,
    where_a_segment_lies_is_told,
    f64_is_refused,
);

fn tensor<T: moebius::cpu::Element>(cuda: &Cuda, values: Vec<T>, dims: &[usize]) -> Tensor<Cuda> {
    Tensor::from_vec(values, dims).expect("values").to(cuda).expect("a tensor")
}

fn nan_logits_name_token_and_expert(cuda: &Cuda) {
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F32);
    let mut data = Data::new(&case).expect("inputs");
    let mut x = data.x.to_f64();
    x[3 * 16] = f64::NAN;
    data.x = moebius::cpu::Cpu::new().write(&x, DType::F32, &[6, 16]).expect("x");
    let error = on_gpu(&case, &data, cuda).err();
    assert!(matches!(error, Some(Error::NanLogits { token: 3, expert: 0, .. })), "{error:?}");
    // The next call is not blamed for it.
    on_gpu(&case, &Data::new(&case).expect("inputs"), cuda).expect("a good run");
}

/// The words of an error, without the call that was told.
fn text<T>(result: Result<T, Error>) -> String {
    result.err().map_or("no error".to_string(), |e| e.to_string())
}

/// Answer of prepare, over a group of one rank, to these ids, now or when it is asked.
fn prepared<D: LibraryDispatchers>(device: D, ids: &[i64], spec: &DispatchSpec) -> String {
    let dims = [ids.len() / spec.top_k, spec.top_k];
    let ids = Tensor::from_vec(ids.to_vec(), &dims).and_then(|ids| ids.to(&device)).expect("ids");
    let config = GroupConfig { max_rows: 1 << 17, ..GroupConfig::new(8, dims[0]) };
    let solo = Box::new(Solo::new(device.clone()));
    let mut group = Group::new(device, solo, config).expect("a group");
    let prepared = group.dispatcher().prepare(ids.view(), None, spec).map(drop);
    text(prepared.and_then(|()| group.dispatcher().check()))
}

/// Whatever the host finds on the one, a kernel finds on the other.
fn the_gpu_returns_the_errors_of_the_cpu(cuda: &Cuda) {
    let both = |ids: &[i64], spec: &DispatchSpec| {
        let (gpu, cpu) = (prepared(cuda.clone(), ids, spec), prepared(Cpu::new(), ids, spec));
        assert_eq!(gpu, cpu);
        cpu
    };
    // Few choices, which one block plans, and many.
    for (tokens, rows) in [(6, 64), (20_000, 1 << 17)] {
        let spec = DispatchSpec {
            layer: 11,
            capacity: Capacity::Static(rows),
            reporting: Reporting::Deferred,
            ..DispatchSpec::new(0, 2)
        };
        let (good, last) = ([0, 1, 2, 3].repeat(tokens / 2), 2 * tokens - 1);
        assert_eq!(both(&good, &spec), "no error");
        for (at, id) in [(3, 8), (3, -2), (2, i64::MAX), (4, i64::MIN), (5, 1 << 40), (7, 2), (last, 77)] {
            let mut ids = good.clone();
            // The last one is told only where there is no other.
            (ids[last], ids[at]) = (99, id);
            let place = format!("on rank 0, layer 11: topk_ids[{}, {}] = {id}", at / 2, at % 2);
            let said = both(&ids, &spec);
            assert!(said.contains(&place), "{said}");
        }
        let short = DispatchSpec { capacity: Capacity::Static(last), overflow: Overflow::Error, ..spec };
        let said = both(&good, &short);
        assert!(said.contains(&format!("{} rows, its capacity is {last}", 2 * tokens)), "{said}");
    }
    // A layer's own rank and number.
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F32);
    let mut data = Data::new(&case).expect("inputs");
    let mut x = data.x.to_f64();
    (x[2 * 16], x[5 * 16]) = (f64::NAN, f64::NAN);
    data.x = Cpu::new().write(&x, DType::F32, &[6, 16]).expect("x");
    assert_eq!(text(on_gpu(&case, &data, cuda)), text(on_cpu(&case, &data)));
}

fn maps_outside_are_reported_and_not_followed(cuda: &Cuda) {
    let source = tensor(cuda, vec![1f32, 2.0, 3.0, 4.0], &[2, 2]);
    for (entries, bad) in [(vec![1i32, -1, 0], false), (vec![1, 0, 7], true)] {
        let map = tensor(cuda, entries, &[3]);
        let mut out = Tensor::empty(cuda, DType::F32, &[3, 2]).expect("out");
        let origin = Origin { rank: 2, layer: 9 };
        let call = GatherRows { source: source.view(), map: map.view(), origin, out: out.view_mut() };
        cuda.gather_rows(call).expect("enqueued");
        match cuda.check() {
            Ok(()) => {
                assert!(!bad);
                assert_eq!(cuda.read(out.view()).expect("out"), [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
            }
            Err(e) => {
                let told = matches!(&e, Error::RowMap { call: "gather_rows", rank: 2, layer: 9, map, entry: 2, found: Some(7) } if map == "map");
                assert!(bad && told, "{e}");
            }
        }
        cuda.check().expect("told once");
    }
}

/// What is told is what the first entry holds, of several that threads and kernels meet in any order; where two calls
/// have met different values at that entry, none of them is.
fn what_a_map_holds_is_told_of_its_first_entry(cuda: &Cuda) {
    const ENTRIES: usize = 6000;
    let source = tensor(cuda, vec![0f32; 8 * 64], &[8, 64]);
    let origin = Origin { rank: 2, layer: 9 };
    // Entries are bad from `first` on, and hold other values each.
    let entries = |first: usize, holds: usize| -> Vec<i32> {
        (0..ENTRIES).map(|i| if i < first { (i % 8) as i32 } else { (holds + i - first) as i32 }).collect()
    };
    let gather = |first, holds| {
        let map = tensor(cuda, entries(first, holds), &[ENTRIES]);
        let mut out = Tensor::empty(cuda, DType::F32, &[ENTRIES, 64]).expect("out");
        cuda.gather_rows(GatherRows { source: source.view(), map: map.view(), origin, out: out.view_mut() })
    };
    let reduce = |first, holds, fan: usize| {
        let map = tensor(cuda, entries(first, holds), &[ENTRIES / fan, fan]);
        let mut out = Tensor::empty(cuda, DType::F32, &[ENTRIES / fan, 64]).expect("out");
        cuda.reduce_rows(ReduceRows { source: source.view(), map: map.view(), origin, out: out.view_mut() })
    };
    let told = |call: &'static str, entry: usize, found: Option<i64>| {
        let map = "map".to_string();
        let expected = Error::RowMap { call, rank: 2, layer: 9, map, entry, found }.to_string();
        assert_eq!(cuda.check().err().map(|e| e.to_string()), Some(expected));
    };
    let most = i32::MAX as usize - ENTRIES;
    for (first, holds) in [(0, 8), (17, most), (ENTRIES - 1, 1 << 20)] {
        gather(first, holds).expect("enqueued");
        told("gather_rows", first, Some(holds as i64));
        // Three at a time, and two, which are all under way before the first is added.
        for fan in [3, 2] {
            reduce(first, holds, fan).expect("enqueued");
            told("reduce_rows", first, Some(holds as i64));
        }
    }
    gather(40, 9).expect("enqueued");
    reduce(30, 70, 2).expect("enqueued");
    gather(50, 8).expect("enqueued");
    told("reduce_rows", 30, Some(70));
    gather(30, 9).expect("enqueued");
    gather(30, 10).expect("enqueued");
    told("gather_rows", 30, None);
    cuda.check().expect("told once");
}

/// A segment of a weight gradient, whose kernels walk segments themselves: of bf16 rows Hopper's, else the portable one.
/// Beside a movement of 1000 SMs Hopper's takes two launches, and this expert is the second one's first.
fn where_a_segment_lies_is_told(cuda: &Cuda) {
    for (dtype, movement_sms) in [(DType::BF16, None), (DType::BF16, Some(1000)), (DType::F32, None)] {
        let rows = Tensor::zeros(cuda, dtype, &[16, 64]).expect("rows");
        for (offset, count) in [(-1i64, 3i64), (14, 3), (1 << 40, 1), (3, -(1 << 33))] {
            let [offsets, counts] = [[0, offset], [2, count]].map(|list| tensor(cuda, list.to_vec(), &[2]));
            let segments = Segments::new(offsets, counts, 16).with_origin(Origin { rank: 2, layer: 9 });
            let mut out = Tensor::zeros(cuda, DType::F32, &[2, 64, 64]).expect("out");
            let call = Wgrad {
                left: RowSource::direct(rows.view()),
                right: RowSource::direct(rows.view()),
                slot_weights: None,
                segments: &segments,
                out: out.view_mut(),
                bias: None,
                accumulate: false,
                movement_sms,
            };
            cuda.stream().synchronize().expect("what the call reads is there");
            cuda.wgrad(call).expect("enqueued");
            let found = Some((offset, count));
            let expected = Error::Segment { call: "wgrad", rank: 2, layer: 9, segment: 1, found }.to_string();
            let told = cuda.check().err().map(|e| e.to_string());
            assert_eq!(told, Some(expected), "{dtype:?}, beside {movement_sms:?}");
        }
    }
    cuda.check().expect("told once");
}

fn f64_is_refused(cuda: &Cuda) {
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F64);
    let error = on_gpu(&case, &Data::new(&case).expect("inputs"), cuda).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("on CUDA")), "{error:?}");
}
