//! Low latency through this crate's safe layer: closed forms in both layouts, work beside calls, a late rank.

use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::cuda::Cuda;
use moebius::kernels::Kernels;
use moebius::nccl_ep::{
    LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyGroup, LowLatencyHandle, LowLatencyLayout,
    LowLatencyOptions, LowLatencyReceiveArgs, NcclEpError,
};
use moebius::{DType, Error, Result, Tensor};

use crate::raw::{Endpoint, choices, each, value};

pub fn cases() -> Vec<(&'static str, fn(usize))> {
    vec![
        ("rows_go_there_and_back", rows_go_there_and_back),
        ("work_runs_beside", work_runs_beside),
        ("a_late_rank_is_skipped_and_readmitted", a_late_rank_is_skipped_and_readmitted),
        ("opaque_rows_with_scales", opaque_rows_with_scales),
        ("rules_are_checked_before_the_library_is_called", rules_are_checked_before_the_library_is_called),
    ]
}

/// Most tokens M of a rank.
const M: usize = 32;
const K: usize = 3;

/// A configuration of the round trip.
#[derive(Debug, Clone, Copy)]
struct Trip {
    layout: LowLatencyLayout,
    hidden: usize,
    ids: DType,
    rows: DType,
    /// Tokens of even and odd ranks.
    tokens: [usize; 2],
    seed: u64,
}

const PLAIN: Trip = Trip {
    layout: LowLatencyLayout::ExpertMajor,
    hidden: 512,
    ids: DType::I32,
    rows: DType::BF16,
    tokens: [32, 20],
    seed: 1,
};

fn trips() -> Vec<Trip> {
    let both = [LowLatencyLayout::ExpertMajor, LowLatencyLayout::RankMajor].into_iter();
    let each = |layout| {
        let plain = Trip { layout, ..PLAIN };
        let wide = Trip { hidden: 7168, ids: DType::I64, tokens: [7, 1], seed: 2, ..plain };
        [plain, wide, Trip { tokens: [0, 31], rows: DType::F32, seed: 3, ..plain }]
    };
    both.flat_map(each).collect()
}

fn options(trip: &Trip, ranks: usize) -> LowLatencyOptions {
    LowLatencyOptions {
        num_experts: 4 * ranks,
        max_tokens: M,
        max_row_bytes: trip.hidden * trip.rows.size(),
        timeout: None,
        max_sms: 0,
    }
}

/// One rank's group, handle and tensors.
struct Step {
    trip: Trip,
    /// Choices of every rank.
    ids: Vec<Vec<i64>>,
    rank: usize,
    handle: LowLatencyHandle,
    x: Tensor<Cuda>,
    w: Tensor<Cuda>,
    rows: Tensor<Cuda>,
    counts: Tensor<Cuda>,
    out_w: Tensor<Cuda>,
    out_ids: Tensor<Cuda>,
    out: Tensor<Cuda>,
}

/// Exact in bf16, as are sums of a few times values below 128.
fn weight(token: usize, k: usize) -> f64 {
    ((token + k) % 2 + 1) as f64 / 2.0
}

impl Step {
    fn new(endpoint: &Endpoint<'_>, trip: Trip, group: &LowLatencyGroup) -> Result<Self> {
        let (rank, ranks, h) = (endpoint.comm.rank(), endpoint.comm.size(), trip.hidden);
        let experts = 4 * ranks;
        let ids: Vec<_> = (0..ranks).map(|r| choices(trip.seed, r, trip.tokens[r % 2], (K, experts))).collect();
        let tokens = ids[rank].len() / K;
        let mut handle = LowLatencyHandle::new(group, trip.layout, K)?;
        handle.update(endpoint.ids(trip.ids, &ids[rank], K)?)?;
        let x: Vec<f64> = (0..tokens * h).map(|i| value(rank, i / h, i % h)).collect();
        let w: Vec<f64> = (0..tokens * K).map(|i| weight(i / K, i % K)).collect();
        let (cuda, n) = (endpoint.cuda(), handle.rows());
        let entries = if trip.layout == LowLatencyLayout::ExpertMajor { 4 } else { ranks };
        Ok(Self {
            x: endpoint.put(trip.rows, &x, &[tokens, h])?,
            w: endpoint.put(DType::F32, &w, &[tokens, K])?,
            rows: Tensor::empty(cuda, trip.rows, &[n, h])?,
            counts: Tensor::empty(cuda, DType::I32, &[entries])?,
            out_w: Tensor::empty(cuda, DType::F32, &[n, K])?,
            out_ids: Tensor::empty(cuda, DType::I32, &[n, K])?,
            out: Tensor::empty(cuda, trip.rows, &[tokens, h])?,
            trip,
            ids,
            rank,
            handle,
        })
    }

    fn dispatch(&mut self, beside: Option<&mut dyn FnMut() -> Result<()>>) -> Result<()> {
        let by_rank = self.trip.layout == LowLatencyLayout::RankMajor;
        let from =
            LowLatencyDispatchArgs { tokens: self.x.view(), weights: by_rank.then(|| self.w.view()), scales: None };
        let to = LowLatencyReceiveArgs {
            rows: self.rows.view_mut(),
            counts: self.counts.view_mut(),
            weights: by_rank.then(|| self.out_w.view_mut()),
            ids: by_rank.then(|| self.out_ids.view_mut()),
            scales: None,
        };
        match beside {
            None => self.handle.dispatch(from, to),
            Some(beside) => self.handle.dispatch_overlapped(from, to, beside),
        }
    }

    fn combine(&mut self, beside: Option<&mut dyn FnMut() -> Result<()>>) -> Result<()> {
        let by_expert = self.trip.layout == LowLatencyLayout::ExpertMajor;
        let back = LowLatencyCombineArgs {
            rows: self.rows.view(),
            weights: by_expert.then(|| self.w.view()),
            out: self.out.view_mut(),
        };
        match beside {
            None => self.handle.combine(back),
            Some(beside) => self.handle.combine_overlapped(back, beside),
        }
    }

    /// Checks what arrived; by rank, puts each row times its weights in its place.
    fn look(&mut self, endpoint: &Endpoint<'_>) -> Result<()> {
        let (h, rows, counts) = (self.trip.hidden, endpoint.get(&self.rows)?, endpoint.get(&self.counts)?);
        let mine = |id: i64| id >= 0 && id as usize / 4 == self.rank;
        match self.trip.layout {
            LowLatencyLayout::ExpertMajor => {
                let per = rows.len() / h / 4;
                for (e, count) in counts.iter().enumerate() {
                    let id = (4 * self.rank + e) as i64;
                    let all = self.ids.iter().enumerate().flat_map(|(r, ids)| {
                        ids.iter().enumerate().filter(|(_, i)| **i == id).map(move |(i, _)| value(r, i / K, 0))
                    });
                    let found = (0..*count as usize).map(|s| e * per + s);
                    self.same(&rows, found.collect(), all.collect());
                }
            }
            LowLatencyLayout::RankMajor => {
                let (w, ids) = (endpoint.get(&self.out_w)?, endpoint.get(&self.out_ids)?);
                let mut scaled = rows.clone();
                for (r, count) in counts.iter().enumerate() {
                    let theirs = self.ids[r].chunks(K).enumerate();
                    let all = theirs.filter(|(_, ids)| ids.iter().any(|id| mine(*id))).map(|(t, _)| value(r, t, 0));
                    let slots: Vec<usize> = (0..*count as usize).map(|s| r * M + s).collect();
                    self.same(&rows, slots.clone(), all.collect());
                    for slot in r * M..(r + 1) * M {
                        let local = |k: &usize| ids[slot * K + k] >= 0.0;
                        let sum: f64 = (0..K).filter(local).map(|k| w[slot * K + k]).sum();
                        assert!(slots.contains(&slot) || (0..K).all(|k| !local(&k)), "slot {slot}");
                        scaled[slot * h..(slot + 1) * h].iter_mut().for_each(|v| *v *= sum);
                    }
                }
                // What nobody sent is not read: it may be anything.
                self.rows = endpoint.put(self.trip.rows, &scaled, &[scaled.len() / h, h])?;
            }
        }
        Ok(())
    }

    /// Ranks and tokens, in order, of what part of the layout (an expert's, or a rank's) has on this rank.
    fn sent(&self, part: usize) -> Vec<(usize, usize)> {
        let by_expert = self.trip.layout == LowLatencyLayout::ExpertMajor;
        let here = |r: usize, id: i64| match by_expert {
            true => id == (4 * self.rank + part) as i64,
            false => r == part && id >= 0 && id as usize / 4 == self.rank,
        };
        let tokens = self.ids.iter().enumerate().flat_map(|(r, ids)| {
            ids.chunks(K)
                .enumerate()
                .filter(move |(_, ids)| ids.iter().any(|id| here(r, *id)))
                .map(move |(t, _)| (r, t))
        });
        tokens.collect()
    }

    /// Rows of these slots are whole, and those that are expected.
    fn same(&self, rows: &[f64], slots: Vec<usize>, mut expected: Vec<f64>) {
        let h = self.trip.hidden;
        let mut found: Vec<f64> = slots.iter().map(|s| rows[s * h]).collect();
        for slot in slots {
            let base = rows[slot * h];
            let whole = rows[slot * h..(slot + 1) * h].iter().enumerate();
            whole.for_each(|(c, v)| assert_eq!(*v, if c.is_multiple_of(2) { base } else { -base }, "slot {slot}"));
        }
        found.sort_by(f64::total_cmp);
        expected.sort_by(f64::total_cmp);
        assert_eq!(found, expected, "{:?}", self.trip);
    }

    /// Sums are x times the kept weights, without those of a rank that was skipped.
    fn check_sums(&self, endpoint: &Endpoint<'_>, skipped: Option<usize>) -> Result<()> {
        let h = self.trip.hidden;
        for (i, found) in endpoint.get(&self.out)?.iter().enumerate() {
            let t = i / h;
            let kept = |k: &usize| {
                let id = self.ids[self.rank][t * K + k];
                id >= 0 && skipped != Some(id as usize / 4)
            };
            let exact = (0..K).filter(kept).map(|k| weight(t, k)).sum::<f64>() * value(self.rank, t, i % h);
            // Below 3 · 120; each rank's sum is rounded to 8 bits, and so is theirs.
            assert!((found - exact).abs() <= exact.abs() / 128.0, "{:?}: token {t}: {found}, not {exact}", self.trip);
        }
        Ok(())
    }
}

fn rows_go_there_and_back(ranks: usize) {
    for trip in trips() {
        each(ranks, |endpoint| {
            let group = LowLatencyGroup::new(&endpoint.library, &endpoint.comm, options(&trip, endpoint.comm.size()))?;
            let mut step = Step::new(endpoint, trip, &group)?;
            // The buffers of both halves of its ring, and the first again.
            for _ in 0..3 {
                step.dispatch(None)?;
                step.look(endpoint)?;
                step.combine(None)?;
                step.check_sums(endpoint, None)?;
            }
            Ok(())
        });
        println!("{trip:?}: holds");
    }
}

fn work_runs_beside(ranks: usize) {
    for layout in [LowLatencyLayout::ExpertMajor, LowLatencyLayout::RankMajor] {
        let trip = Trip { layout, ..PLAIN };
        each(ranks, |endpoint| {
            let group = LowLatencyGroup::new(&endpoint.library, &endpoint.comm, options(&trip, endpoint.comm.size()))?;
            let mut step = Step::new(endpoint, trip, &group)?;
            let cuda = endpoint.cuda().clone();
            let mut made = Vec::new();
            for round in 0..3 {
                let mut beside = || {
                    made.push(cuda.write(&[round as f64; 4], DType::F32, &[4])?);
                    Ok(())
                };
                step.dispatch(Some(&mut beside))?;
                step.look(endpoint)?;
                step.combine(Some(&mut beside))?;
                step.check_sums(endpoint, None)?;
            }
            for (i, t) in made.iter().enumerate() {
                assert_eq!(endpoint.get(t)?, [(i / 2) as f64; 4]);
            }
            // Its error is the call's, which has ended nevertheless.
            let own = || Error::Device { call: "test", operation: "work".into(), message: "on purpose".into() };
            let failed = step.dispatch(Some(&mut || Err(own())));
            assert!(failed.as_ref().is_err_and(|e| e.to_string().contains("on purpose")), "{failed:?}");
            step.look(endpoint)?;
            step.combine(None)?;
            step.check_sums(endpoint, None)
        });
    }
}

/// Time that a rank is given; the first calls compile, one rank after another.
const TIMEOUT: Duration = Duration::from_secs(2);

fn a_late_rank_is_skipped_and_readmitted(ranks: usize) {
    let trip = Trip { layout: LowLatencyLayout::RankMajor, tokens: [32, 20], ..PLAIN };
    each(ranks, |endpoint| {
        let options = LowLatencyOptions { timeout: Some(TIMEOUT), ..options(&trip, ranks) };
        let group = LowLatencyGroup::new(&endpoint.library, &endpoint.comm, options)?;
        let mut step = Step::new(endpoint, trip, &group)?;
        let whole = |step: &mut Step, endpoint: &Endpoint<'_>| {
            step.dispatch(None)?;
            step.look(endpoint)?;
            step.combine(None)?;
            step.check_sums(endpoint, None)
        };
        // Compiles; whoever waited too long for that is taken in again.
        step.dispatch(None)?;
        step.combine(None)?;
        endpoint.cuda().check()?;
        endpoint.together.wait();
        group.readmit()?;
        endpoint.together.wait();
        whole(&mut step, endpoint)?;
        assert_eq!((group.active()?, group.was_late()?), (vec![true; ranks], false));
        endpoint.together.wait();

        let late = ranks - 1;
        if endpoint.comm.rank() == late {
            std::thread::sleep(2 * TIMEOUT);
        }
        let began = Instant::now();
        step.dispatch(None)?;
        endpoint.cuda().check()?;
        if endpoint.comm.rank() != late {
            assert!(began.elapsed() >= TIMEOUT / 2, "{:?}", began.elapsed());
            let counts = endpoint.get(&step.counts)?;
            assert_eq!(counts[late], 0.0, "{counts:?}");
            let active = group.active()?;
            assert_eq!((active[late], group.was_late()?), (false, true));
            // Skipped now, so nobody waits again.
            let again = Instant::now();
            let theirs = std::mem::take(&mut step.ids[late]);
            step.look(endpoint)?;
            step.ids[late] = theirs;
            step.combine(None)?;
            step.check_sums(endpoint, Some(late))?;
            assert!(again.elapsed() < TIMEOUT, "{:?}", again.elapsed());
        }
        endpoint.together.wait();
        if endpoint.comm.rank() == late {
            // The others' answers were not for it.
            step.combine(None)?;
            endpoint.cuda().check()?;
            assert!(group.was_late()?);
        }
        endpoint.together.wait();
        group.readmit()?;
        endpoint.together.wait();
        assert_eq!((group.active()?, group.was_late()?), (vec![true; ranks], false));
        for _ in 0..3 {
            whole(&mut step, endpoint)?;
        }
        // By hand, and back.
        let mut some = vec![true; ranks];
        some[(endpoint.comm.rank() + 1) % ranks] = false;
        group.set_active(&some)?;
        assert_eq!(group.active()?, some);
        endpoint.together.wait();
        group.readmit()?;
        endpoint.together.wait();
        whole(&mut step, endpoint)
    });
}

/// Bytes of fp8, MXFP8 or packed fp4 rows and of their scales arrive together and unchanged.
fn opaque_rows_with_scales(ranks: usize) {
    for (layout, row, scale) in [
        (LowLatencyLayout::RankMajor, 512, 0),
        (LowLatencyLayout::RankMajor, 512, 16),
        (LowLatencyLayout::ExpertMajor, 512, 32),
    ] {
        let trip = Trip { layout, hidden: (row + scale) / 2, ..PLAIN };
        each(ranks, |endpoint| {
            let group = LowLatencyGroup::new(&endpoint.library, &endpoint.comm, options(&trip, ranks))?;
            let mut step = Step::new(endpoint, trip, &group)?;
            let (rank, by_rank) = (step.rank, layout == LowLatencyLayout::RankMajor);
            let tokens = step.ids[rank].len() / K;
            let byte = |rank: usize, t: usize, c: usize| ((rank * 71 + t * 5 + c * 3) % 251) as f64;
            let filled = |width: usize, salt| (0..tokens * width).map(move |i| byte(rank, i / width, i % width + salt));
            let x = endpoint.put(DType::U8, &filled(row, 0).collect::<Vec<_>>(), &[tokens, row])?;
            let s = endpoint.put(DType::U8, &filled(scale, 17).collect::<Vec<_>>(), &[tokens, scale])?;
            let n = step.handle.rows();
            let mut rows = Tensor::<Cuda>::empty(endpoint.cuda(), DType::U8, &[n, row])?;
            let mut scales = Tensor::<Cuda>::empty(endpoint.cuda(), DType::U8, &[n, scale])?;
            let from = LowLatencyDispatchArgs {
                tokens: x.view(),
                weights: by_rank.then(|| step.w.view()),
                scales: (scale > 0).then(|| s.view()),
            };
            let to = LowLatencyReceiveArgs {
                rows: rows.view_mut(),
                counts: step.counts.view_mut(),
                weights: by_rank.then(|| step.out_w.view_mut()),
                ids: by_rank.then(|| step.out_ids.view_mut()),
                scales: (scale > 0).then(|| scales.view_mut()),
            };
            step.handle.dispatch(from, to)?;
            let (rows, scales, counts) = (endpoint.get(&rows)?, endpoint.get(&scales)?, endpoint.get(&step.counts)?);
            let per = n / counts.len();
            for (part, count) in counts.iter().enumerate() {
                let whose = |slot: usize| {
                    let same = |got: &[f64], width: usize, salt, (r, t)| {
                        (0..width).all(|c| got[slot * width + c] == byte(r, t, c + salt))
                    };
                    let mut all = (0..ranks).flat_map(|r| (0..step.ids[r].len() / K).map(move |t| (r, t)));
                    all.find(|w| same(&rows, row, 0, *w) && same(&scales, scale, 17, *w))
                };
                let mut found: Vec<_> = (0..*count as usize).map(|s| whose(part * per + s)).collect();
                found.sort_unstable();
                let expected: Vec<_> = step.sent(part).into_iter().map(Some).collect();
                assert_eq!(found, expected, "{layout:?}, row {row}, scales {scale}: part {part}");
            }
            Ok(())
        });
    }
}

fn rules_are_checked_before_the_library_is_called(ranks: usize) {
    each(ranks, |endpoint| {
        let good = options(&PLAIN, ranks);
        let refused = |options| match LowLatencyGroup::new(&endpoint.library, &endpoint.comm, options) {
            Err(Error::NcclEp(error)) => error,
            other => panic!("{options:?}: {other:?}"),
        };
        let experts = 4 * ranks + 1;
        let uneven = LowLatencyOptions { num_experts: experts, ..good };
        assert_eq!(refused(uneven), NcclEpError::Experts { experts, ranks });
        let none = refused(LowLatencyOptions { max_tokens: 0, ..good });
        assert!(matches!(none, NcclEpError::Argument { name: "max_tokens", .. }), "{none}");
        let wide = refused(LowLatencyOptions { max_sms: 1 << 20, ..good });
        assert!(matches!(wide, NcclEpError::Argument { name: "max_sms", .. }), "{wide}");
        let group = LowLatencyGroup::new(&endpoint.library, &endpoint.comm, good)?;
        let many = LowLatencyHandle::new(&group, LowLatencyLayout::RankMajor, 4 * ranks + 1).map(|_| ());
        assert!(matches!(many, Err(Error::NcclEp(NcclEpError::Argument { name: "top_k", .. }))), "{many:?}");
        let unmasked = group.was_late();
        assert!(matches!(unmasked, Err(Error::NcclEp(NcclEpError::Argument { name: "timeout", .. }))), "{unmasked:?}");
        let mut step = Step::new(endpoint, PLAIN, &group)?;
        step.x = Tensor::zeros(endpoint.cuda(), DType::BF16, &[step.x.dims()[0], 128])?;
        step.rows = Tensor::zeros(endpoint.cuda(), DType::BF16, &[step.handle.rows(), 128])?;
        let narrow = step.dispatch(None);
        assert!(
            matches!(narrow, Err(Error::NcclEp(NcclEpError::LowLatencyWidth { lanes: 256, width: 128, .. }))),
            "{narrow:?}"
        );
        Ok(())
    });
}
