//! The library's own calls through this crate's safe layer: closed forms that need no reference.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use moebius::comm::Communicator;
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::Kernels;
use moebius::nccl::NcclComm;
use moebius::nccl_ep::{
    CombineArgs, DispatchArgs, HandleOptions, HighThroughputGroup, HighThroughputHandle, HighThroughputOptions,
    NcclEpError, NcclEpLibrary, PassDirection, UpdateCounters,
};
use moebius::{DType, Error, Result, Tensor};

use crate::conformance::seed;
use crate::gpus;

#[allow(clippy::type_complexity, reason = "names and functions, no more")]
pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("rows_and_weights_go_there_and_back", rows_and_weights_go_there_and_back),
        ("three_handles_in_flight", three_handles_in_flight),
        ("opaque_rows_with_scales", opaque_rows_with_scales),
        ("past_the_capacity_rows_are_dropped_and_counted", past_the_capacity_rows_are_dropped_and_counted),
        ("rules_are_checked_before_the_library_is_called", rules_are_checked_before_the_library_is_called),
    ]
}

const TIMEOUT: Duration = Duration::from_secs(60);

/// One rank of a test.
pub struct Endpoint<'a> {
    pub library: NcclEpLibrary,
    pub comm: NcclComm,
    pub together: &'a Barrier,
}

impl Endpoint<'_> {
    pub fn cuda(&self) -> &Cuda {
        self.comm.cuda()
    }

    pub fn put(&self, dtype: DType, values: &[f64], dims: &[usize]) -> Result<Tensor<Cuda>> {
        self.cuda().write(values, dtype, dims)
    }

    pub fn ids(&self, dtype: DType, ids: &[i64], k: usize) -> Result<Tensor<Cuda>> {
        let dims = [ids.len() / k, k];
        match dtype {
            DType::I64 => Tensor::<Cpu>::from_vec(ids.to_vec(), &dims)?.to(self.cuda()),
            _ => Tensor::<Cpu>::from_vec(ids.iter().map(|i| *i as i32).collect(), &dims)?.to(self.cuda()),
        }
    }

    pub fn get(&self, t: &Tensor<Cuda>) -> Result<Vec<f64>> {
        self.cuda().read(t.view())
    }
}

/// Every rank's body on a thread.
pub fn each(ranks: usize, body: impl Fn(&mut Endpoint<'_>) -> Result<()> + Sync) {
    let (nccl, _) = gpus::first(1);
    let library = NcclEpLibrary::open(&nccl).expect("NCCL EP");
    let (body, together) = (&body, &Barrier::new(ranks));
    thread::scope(|scope| {
        let threads: Vec<_> = gpus::communicators(ranks, TIMEOUT)
            .into_iter()
            .map(|comm| {
                let mut endpoint = Endpoint { library: library.clone(), comm, together };
                scope.spawn(move || {
                    let done = body(&mut endpoint);
                    // Groups are gone on every rank before the communicator goes.
                    let tag = moebius::comm::Tag { layer: 0, op: moebius::comm::Op::User, sequence: 99 };
                    done.and(endpoint.comm.barrier(tag))
                })
            })
            .collect();
        for (rank, thread) in threads.into_iter().enumerate() {
            thread.join().expect("a rank").unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        }
    });
}

/// Seeded choices of a rank, distinct in a token; a tenth dropped.
pub fn choices(own: u64, rank: usize, tokens: usize, (k, experts): (usize, usize)) -> Vec<i64> {
    let mut state = seed::seed(own * 1_000_003 + rank as u64 * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize
    };
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut all: Vec<usize> = (0..experts).collect();
        for j in 0..k {
            let pick = j + next() % (experts - j);
            all.swap(j, pick);
            ids.push(if next() % 10 == 0 { -1 } else { all[j] as i64 });
        }
    }
    ids
}

/// A configuration of the round trip.
#[derive(Debug, Clone, Copy)]
struct Trip {
    experts: usize,
    k: usize,
    hidden: usize,
    alignment: usize,
    capacity: Option<usize>,
    ids: DType,
    rows: DType,
    /// Tokens of even and odd ranks.
    tokens: [usize; 2],
}

fn trips(ranks: usize) -> Vec<Trip> {
    let base = Trip {
        experts: 4 * ranks,
        k: 2,
        hidden: 64,
        alignment: 1,
        capacity: None,
        ids: DType::I32,
        rows: DType::BF16,
        tokens: [32, 20],
    };
    let wide = ranks * 32 * 2 + 4 * 15;
    vec![
        base,
        Trip { alignment: 16, ids: DType::I64, ..base },
        Trip { tokens: [0, 31], rows: DType::F32, ..base },
        Trip { capacity: Some(wide), rows: DType::F16, ..base },
        Trip { capacity: Some(wide.next_multiple_of(16)), alignment: 16, ids: DType::I64, ..base },
        Trip { k: 1, hidden: 8, ..base },
        Trip { k: 5, hidden: 1024, tokens: [7, 1], ..base },
    ]
}

/// Figures of a step that every rank knows.
struct Step {
    ids: Vec<Vec<i64>>,
    /// Choices of each expert.
    loads: Vec<usize>,
}

impl Step {
    fn new(seed: u64, ranks: usize, trip: &Trip) -> Self {
        let tokens = |r: usize| trip.tokens[r % 2];
        let ids: Vec<_> = (0..ranks).map(|r| choices(seed, r, tokens(r), (trip.k, trip.experts))).collect();
        let mut loads = vec![0; trip.experts];
        ids.iter().flatten().filter(|id| **id >= 0).for_each(|id| loads[*id as usize] += 1);
        Self { ids, loads }
    }

    /// Padded rows of a rank's experts.
    fn padded(&self, rank: usize, local: usize, alignment: usize) -> Vec<usize> {
        self.loads[rank * local..(rank + 1) * local].iter().map(|n| n.next_multiple_of(alignment)).collect()
    }
}

/// A value that tells source rank, token and column apart, exact in 8 bits of mantissa.
pub fn value(rank: usize, token: usize, column: usize) -> f64 {
    let base = ((rank * 37 + token) % 120 + 1) as f64;
    if column.is_multiple_of(2) { base } else { -base }
}

fn group(endpoint: &Endpoint<'_>, trip: &Trip) -> Result<HighThroughputGroup> {
    let options = HighThroughputOptions {
        num_experts: trip.experts,
        max_tokens: 32,
        capacity: trip.capacity,
        max_row_bytes: (trip.hidden * trip.rows.size()).next_multiple_of(16),
        max_top_k: trip.k,
        trap: false,
        max_sms: 0,
    };
    HighThroughputGroup::new(&endpoint.library, &endpoint.comm, options)
}

/// Counts, offsets and total of an update.
fn updated(endpoint: &Endpoint<'_>, handle: &mut HighThroughputHandle, ids: &Tensor<Cuda>) -> Result<[Vec<usize>; 3]> {
    let local = handle.group().local_experts();
    let of = |n: usize| Tensor::<Cuda>::empty(endpoint.cuda(), DType::I64, &[n]);
    let (mut counts, mut offsets, mut total) = (of(local)?, of(local)?, of(1)?);
    handle.update(
        ids.view(),
        UpdateCounters { counts: counts.view_mut(), offsets: offsets.view_mut(), total: total.view_mut() },
    )?;
    let whole = |t: &Tensor<Cuda>| Ok::<_, Error>(endpoint.get(t)?.iter().map(|v| *v as usize).collect());
    Ok([whole(&counts)?, whole(&offsets)?, whole(&total)?])
}

fn rows_and_weights_go_there_and_back(ranks: usize) {
    for (seed, trip) in trips(ranks).into_iter().enumerate() {
        let step = Step::new(seed as u64 + 1, ranks, &trip);
        each(ranks, |endpoint| there_and_back(endpoint, &trip, &step));
        println!("{trip:?}: holds");
    }
}

fn there_and_back(endpoint: &mut Endpoint<'_>, trip: &Trip, step: &Step) -> Result<()> {
    let (rank, ranks, k, h) = (endpoint.comm.rank(), endpoint.comm.size(), trip.k, trip.hidden);
    let local = trip.experts / ranks;
    let group = group(endpoint, trip)?;
    let mut handle = HighThroughputHandle::new(&group, HandleOptions { top_k: k, alignment: trip.alignment })?;
    let own = &step.ids[rank];
    let tokens = own.len() / k;
    let [counts, offsets, total] = updated(endpoint, &mut handle, &endpoint.ids(trip.ids, own, k)?)?;
    let padded = step.padded(rank, local, trip.alignment);
    let starts: Vec<usize> = (0..local).map(|j| padded[..j].iter().sum()).collect();
    let filled: usize = padded.iter().sum();
    assert_eq!((&counts, &offsets, &total), (&padded, &starts, &vec![filled]), "{trip:?}");

    let n = trip.capacity.unwrap_or(filled);
    let x: Vec<f64> = (0..tokens * h).map(|i| value(rank, i / h, i % h)).collect();
    let w: Vec<f64> = (0..tokens * k).map(|i| (rank * 1000 + i) as f64 + 0.5).collect();
    let (x, w) = (endpoint.put(trip.rows, &x, &[tokens, h])?, endpoint.put(DType::F32, &w, &[tokens, k])?);
    let mut rows = Tensor::empty(endpoint.cuda(), trip.rows, &[n, h])?;
    let mut weights = Tensor::empty(endpoint.cuda(), DType::F32, &[n])?;
    let out = DispatchArgs {
        tokens: x.view(),
        weights: Some(w.view()),
        scales: None,
        out: rows.view_mut(),
        out_weights: Some(weights.view_mut()),
        out_scales: None,
    };
    handle.dispatch(PassDirection::Forward, out)?;
    let (got, got_w) = (endpoint.get(&rows)?, endpoint.get(&weights)?);
    for j in 0..local {
        let expert = (rank * local + j) as i64;
        let mut expected = Vec::new();
        for (source, ids) in step.ids.iter().enumerate() {
            let hits = ids.iter().enumerate().filter(|(_, id)| **id == expert);
            expected.extend(hits.map(|(i, _)| ((source * 1000 + i) as f64 + 0.5, value(source, i / k, 0))));
        }
        let segment = starts[j]..starts[j] + expected.len();
        for slot in segment.clone() {
            let whole = got[slot * h..(slot + 1) * h].iter().enumerate();
            let base = got[slot * h];
            whole.for_each(|(c, v)| {
                assert_eq!(*v, if c.is_multiple_of(2) { base } else { -base }, "{trip:?}: slot {slot}")
            });
        }
        let mut found: Vec<(f64, f64)> = segment.map(|slot| (got_w[slot], got[slot * h])).collect();
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        expected.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert_eq!(found, expected, "{trip:?}: expert {expert}");
        for slot in starts[j] + expected.len()..starts[j] + padded[j] {
            assert!(got[slot * h..(slot + 1) * h].iter().all(|v| *v == 0.0), "{trip:?}: pad {slot}");
        }
    }
    // Forward sums are x times the kept choices; so are backward ones, and each weight comes home.
    let kept = kept(own, k);
    let mut sums = Tensor::empty(endpoint.cuda(), trip.rows, &[tokens, h])?;
    summed(&mut handle, &rows, &mut sums)?;
    check_sums(endpoint, &sums, (rank, h), &kept)?;

    let mut again = Tensor::empty(endpoint.cuda(), trip.rows, &[n, h])?;
    swung(&mut handle, &x, &mut again)?;
    assert_eq!(endpoint.get(&again)?[..filled * h], got[..filled * h], "{trip:?}: backward rows");
    let mut d_w = Tensor::empty(endpoint.cuda(), DType::F32, &[tokens, k])?;
    let back = CombineArgs {
        rows: again.view(),
        weights: Some(weights.view()),
        out: sums.view_mut(),
        out_weights: Some(d_w.view_mut()),
    };
    handle.combine(PassDirection::Backward, back)?;
    check_sums(endpoint, &sums, (rank, h), &kept)?;
    let expected: Vec<f64> =
        own.iter().enumerate().map(|(i, id)| if *id >= 0 { (rank * 1000 + i) as f64 + 0.5 } else { 0.0 }).collect();
    assert_eq!(endpoint.get(&d_w)?, expected, "{trip:?}: weights");
    Ok(())
}

/// Rows out and back as they are, without weights: backward out, forward back.
fn swung(handle: &mut HighThroughputHandle, x: &Tensor<Cuda>, rows: &mut Tensor<Cuda>) -> Result<()> {
    let (tokens, out) = (x.view(), rows.view_mut());
    let rows = DispatchArgs { tokens, weights: None, scales: None, out, out_weights: None, out_scales: None };
    handle.dispatch(PassDirection::Backward, rows)
}

fn summed(handle: &mut HighThroughputHandle, rows: &Tensor<Cuda>, sums: &mut Tensor<Cuda>) -> Result<()> {
    let back = CombineArgs { rows: rows.view(), weights: None, out: sums.view_mut(), out_weights: None };
    handle.combine(PassDirection::Forward, back)
}

/// Kept choices of each token.
fn kept(ids: &[i64], k: usize) -> impl Fn(usize) -> f64 {
    move |t| ids[t * k..(t + 1) * k].iter().filter(|id| **id >= 0).count() as f64
}

fn check_sums(
    endpoint: &Endpoint<'_>,
    sums: &Tensor<Cuda>,
    (rank, h): (usize, usize),
    times: &dyn Fn(usize) -> f64,
) -> Result<()> {
    for (i, found) in endpoint.get(sums)?.iter().enumerate() {
        let (exact, f) = (times(i / h) * value(rank, i / h, i % h), *found);
        // Up to 5 × 120: above 256 a bf16 is a multiple of 2 or 4, and partial sums round too.
        assert!((f - exact).abs() <= exact.abs() / 128.0, "token {}: {f}, exactly {exact}", i / h);
    }
    Ok(())
}

fn three_handles_in_flight(ranks: usize) {
    let trip = trips(ranks)[0];
    let steps: Vec<Step> = (0..3).map(|s| Step::new(40 + s, ranks, &trip)).collect();
    each(ranks, |endpoint| {
        let (rank, k, h) = (endpoint.comm.rank(), trip.k, trip.hidden);
        let group = group(endpoint, &trip)?;
        let mut handles = Vec::new();
        for step in &steps {
            let mut handle = HighThroughputHandle::new(&group, HandleOptions { top_k: k, alignment: 1 })?;
            let [.., total] = updated(endpoint, &mut handle, &endpoint.ids(DType::I32, &step.ids[rank], k)?)?;
            handles.push((handle, total[0]));
        }
        for i in [2, 0, 1] {
            let (handle, n) = &mut handles[i];
            let own = &steps[i].ids[rank];
            let tokens = own.len() / k;
            let x: Vec<f64> = (0..tokens * h).map(|i| value(rank, i / h, i % h)).collect();
            let x = endpoint.put(trip.rows, &x, &[tokens, h])?;
            let mut rows = Tensor::empty(endpoint.cuda(), trip.rows, &[*n, h])?;
            swung(handle, &x, &mut rows)?;
            let mut sums = Tensor::empty(endpoint.cuda(), trip.rows, &[tokens, h])?;
            summed(handle, &rows, &mut sums)?;
            check_sums(endpoint, &sums, (rank, h), &kept(own, k))?;
        }
        Ok(())
    });
}

/// Bytes of fp8, MXFP8 or packed fp4 rows and of their scales arrive together and unchanged.
fn opaque_rows_with_scales(ranks: usize) {
    for (row, scale) in [(512, 16), (512, 0), (256, 32), (128, 64)] {
        let trip = Trip { hidden: (row + scale) / 2, ..trips(ranks)[0] };
        let step = Step::new(7, ranks, &trip);
        each(ranks, |endpoint| opaque(endpoint, (row, scale), &trip, &step));
    }
}

fn opaque(endpoint: &mut Endpoint<'_>, (row, scale): (usize, usize), trip: &Trip, step: &Step) -> Result<()> {
    let (rank, k) = (endpoint.comm.rank(), trip.k);
    let group = group(endpoint, trip)?;
    let mut handle = HighThroughputHandle::new(&group, HandleOptions { top_k: k, alignment: 1 })?;
    let own = &step.ids[rank];
    let tokens = own.len() / k;
    let [counts, offsets, total] = updated(endpoint, &mut handle, &endpoint.ids(DType::I32, own, k)?)?;
    assert_eq!(counts, step.padded(rank, trip.experts / endpoint.comm.size(), 1), "row {row}, scales {scale}");
    let byte = |rank: usize, token: usize, column: usize| ((rank * 71 + token * 5 + column * 3) % 251) as f64;
    let filled = |width: usize, salt: usize| -> Vec<f64> {
        (0..tokens * width).map(|i| byte(rank, i / width, i % width + salt)).collect()
    };
    let x = endpoint.put(DType::U8, &filled(row, 0), &[tokens, row])?;
    let s = endpoint.put(DType::U8, &filled(scale, 17), &[tokens, scale])?;
    let w: Vec<f64> = (0..tokens * k).map(|i| (rank * 1000 + i) as f64).collect();
    let w = endpoint.put(DType::F32, &w, &[tokens, k])?;
    let n = total[0];
    let mut rows = Tensor::empty(endpoint.cuda(), DType::U8, &[n, row])?;
    let mut scales = Tensor::empty(endpoint.cuda(), DType::U8, &[n, scale])?;
    let mut weights = Tensor::empty(endpoint.cuda(), DType::F32, &[n])?;
    let out = DispatchArgs {
        tokens: x.view(),
        weights: Some(w.view()),
        scales: (scale > 0).then(|| s.view()),
        out: rows.view_mut(),
        out_weights: Some(weights.view_mut()),
        out_scales: (scale > 0).then(|| scales.view_mut()),
    };
    handle.dispatch(PassDirection::Forward, out)?;
    let (got, got_s, got_w) = (endpoint.get(&rows)?, endpoint.get(&scales)?, endpoint.get(&weights)?);
    let mut seen = 0;
    for (start, count) in offsets.iter().zip(&counts) {
        for slot in *start..start + count {
            // The weight says whose row it is.
            let (source, i) = (got_w[slot] as usize / 1000, got_w[slot] as usize % 1000);
            let same = |got: &[f64], width: usize, salt: usize| {
                (0..width).all(|c| got[slot * width + c] == byte(source, i / k, c + salt))
            };
            assert!(same(&got, row, 0) && same(&got_s, scale, 17), "row {row}, scales {scale}: slot {slot}");
            seen += 1;
        }
    }
    assert_eq!(seen, n);
    Ok(())
}

fn past_the_capacity_rows_are_dropped_and_counted(ranks: usize) {
    let trip = Trip { capacity: Some(32), tokens: [32, 32], ..trips(ranks)[0] };
    let step = Step::new(3, ranks, &trip);
    each(ranks, |endpoint| {
        let (rank, ranks, k, h) = (endpoint.comm.rank(), endpoint.comm.size(), trip.k, trip.hidden);
        let local = trip.experts / ranks;
        let group = group(endpoint, &trip)?;
        let mut handle = HighThroughputHandle::new(&group, HandleOptions { top_k: k, alignment: 1 })?;
        let [counts, _, total] = updated(endpoint, &mut handle, &endpoint.ids(DType::I32, &step.ids[rank], k)?)?;
        let needed: usize = step.padded(rank, local, 1).iter().sum();
        assert!(needed > 32, "the test wants an overflow");
        assert_eq!((total[0], counts.iter().sum::<usize>()), (needed, 32));
        let x = Tensor::zeros(endpoint.cuda(), trip.rows, &[32, h])?;
        let w: Vec<f64> = (0..32 * k).map(|i| (1 + rank * 1000 + i) as f64).collect();
        let w = endpoint.put(DType::F32, &w, &[32, k])?;
        let mut rows = Tensor::empty(endpoint.cuda(), trip.rows, &[32, h])?;
        let mut weights = Tensor::empty(endpoint.cuda(), DType::F32, &[32])?;
        let out = DispatchArgs {
            tokens: x.view(),
            weights: Some(w.view()),
            scales: None,
            out: rows.view_mut(),
            out_weights: Some(weights.view_mut()),
            out_scales: None,
        };
        handle.dispatch(PassDirection::Forward, out)?;
        let mut sums = Tensor::empty(endpoint.cuda(), trip.rows, &[32, h])?;
        let mut d_w = Tensor::empty(endpoint.cuda(), DType::F32, &[32, k])?;
        let back = CombineArgs {
            rows: rows.view(),
            weights: Some(weights.view()),
            out: sums.view_mut(),
            out_weights: Some(d_w.view_mut()),
        };
        handle.combine(PassDirection::Backward, back)?;
        // Dropped choices have no gradient; the others have their own weight back.
        let home = endpoint.get(&d_w)?;
        let given = endpoint.get(&w)?;
        assert!(home.iter().zip(&given).all(|(d, w)| *d == 0.0 || d == w), "{home:?}");
        assert!(home.iter().filter(|d| **d == 0.0).count() > step.ids[rank].iter().filter(|id| **id < 0).count());
        Ok(())
    });
}

fn rules_are_checked_before_the_library_is_called(ranks: usize) {
    each(ranks, |endpoint| {
        let good = HighThroughputOptions {
            num_experts: 4 * ranks,
            max_tokens: 32,
            capacity: None,
            max_row_bytes: 64,
            max_top_k: 2,
            trap: false,
            max_sms: 0,
        };
        let refused =
            |options: HighThroughputOptions| match HighThroughputGroup::new(&endpoint.library, &endpoint.comm, options)
            {
                Err(Error::NcclEp(error)) => error,
                other => panic!("{options:?}: {other:?}"),
            };
        let experts = 4 * ranks + 1;
        assert_eq!(
            refused(HighThroughputOptions { num_experts: experts, ..good }),
            NcclEpError::Experts { experts, ranks }
        );
        assert_eq!(
            refused(HighThroughputOptions { max_row_bytes: 40, ..good }),
            NcclEpError::RowBytes { what: "max_row_bytes", bytes: 40 }
        );
        let odd = refused(HighThroughputOptions { max_tokens: 33, ..good });
        assert!(matches!(odd, NcclEpError::Argument { name: "max_tokens", .. }), "{odd}");
        let small = refused(HighThroughputOptions { capacity: Some(31), ..good });
        assert_eq!(small, NcclEpError::Capacity { expected: "at least 32 rows (max_tokens)".into(), found: 31 });
        let many = refused(HighThroughputOptions { max_sms: 1 << 20, ..good });
        assert!(matches!(many, NcclEpError::Argument { name: "max_sms", .. }), "{many}");
        if ranks == 2 {
            assert_eq!(
                refused(HighThroughputOptions { num_experts: 2, ..good }),
                NcclEpError::Fours { local: 1, domain: 2 }
            );
        }
        let group = HighThroughputGroup::new(&endpoint.library, &endpoint.comm, good)?;
        let unaligned = HighThroughputHandle::new(&group, HandleOptions { top_k: 2, alignment: 12 }).map(|_| ());
        assert!(matches!(unaligned, Err(Error::NcclEp(NcclEpError::Alignment { found: 12 }))), "{unaligned:?}");
        Ok(())
    });
}
