//! What must come of each call of the flat layout, in closed forms, so that no wrong call is timed.

use std::ops::Range;

use moebius::comm::Communicator;
use moebius::cuda::Cuda;
use moebius::kernels::Kernels;
use moebius::{Device, Result, Tensor, TensorRef};

use crate::bench::{Phase, Step, value};
use crate::flat::Flat;
use crate::raw::Endpoint;

/// Rows at either end of a tensor that are looked at whole.
const LOOKED_AT: usize = 64;

/// Some rows of a tensor.
fn read(endpoint: &Endpoint<'_>, t: &Tensor<Cuda>, range: Range<usize>) -> Result<Vec<f64>> {
    let bytes = t.view().row_bytes();
    let data = Cuda::slice(t.view().data(), range.start * bytes..range.end * bytes);
    let width = t.dims().get(1).copied().unwrap_or(1);
    endpoint.cuda().read(TensorRef::new(data, t.dtype(), &[range.len(), width])?)
}

/// Both ends of so many rows.
fn ends(rows: usize) -> [Range<usize>; 2] {
    [0..rows.min(LOOKED_AT), rows.saturating_sub(LOOKED_AT)..rows]
}

impl Flat<'_> {
    /// One round of the calls, each looked at (collective); `all` has every rank's choices.
    pub fn check(&mut self, endpoint: &Endpoint<'_>, step: &Step, all: &[Vec<i64>]) -> Result<()> {
        let (rank, k, local) = (self.comm.rank(), self.rows_w.dims()[1], self.counts.dims()[0]);
        let (tokens, expected) = (self.y.dims()[0], self.arrivals(all, (k, local)));
        self.call(Phase::Dispatch, step)?;
        let weights = read(endpoint, &self.rows_w, 0..expected.len())?;
        let experts = read(endpoint, &self.rows_ids, 0..expected.len())?;
        // The weights say whose choices these are, and the expert of each must be the one that was chosen.
        let mut arrived = Vec::with_capacity(expected.len());
        for (slot, (weights, experts)) in weights.chunks(k).zip(experts.chunks(k)).enumerate() {
            let mut sources = Vec::new();
            for (weight, expert) in weights.iter().zip(experts).filter(|(_, expert)| **expert >= 0.0) {
                let choice = (*weight as usize).checked_sub(1).filter(|c| *c < all.len() * tokens * k);
                let choice = choice.unwrap_or_else(|| panic!("flat slot {slot}: weights {weights:?}"));
                let (source, at) = (choice / (tokens * k), choice % (tokens * k));
                // The header leaves open whether a rank's experts are numbered from 0.
                assert_eq!(all[source][at] as usize, rank * local + *expert as usize % local, "flat slot {slot}");
                sources.push((source, at / k));
            }
            assert!(sources.windows(2).all(|pair| pair[0] == pair[1]), "flat slot {slot}: {sources:?}");
            let (source, t) = *sources.first().unwrap_or_else(|| panic!("flat slot {slot}: {experts:?}"));
            let chosen = all[source][t * k..(t + 1) * k].iter().filter(|id| **id as usize / local == rank);
            assert_eq!(sources.len(), chosen.count(), "flat slot {slot}");
            arrived.push((source, t));
        }
        let mut sorted = arrived.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, expected, "flat: tokens that came");
        self.check_rows(endpoint, &arrived, "dispatch")?;
        self.call(Phase::Combine, step)?;
        self.check_sums(endpoint, &all[rank], "combine")?;
        // Backward's outputs lie where forward's did, so those go first.
        endpoint.cuda().zero(self.rows.view_mut().into_data())?;
        endpoint.cuda().zero(self.y.view_mut().into_data())?;
        self.call(Phase::CombineBwd, step)?;
        self.check_rows(endpoint, &arrived, "combine_bwd")?;
        self.call(Phase::DispatchBwd, step)?;
        self.check_sums(endpoint, &all[rank], "dispatch_bwd")?;
        assert_eq!(endpoint.get(&self.d_w)?, endpoint.get(&step.w)?, "flat dispatch_bwd: weights");
        Ok(())
    }

    /// Rows are those of the tokens that the weights named.
    fn check_rows(&self, endpoint: &Endpoint<'_>, arrived: &[(usize, usize)], phase: &str) -> Result<()> {
        let h = self.rows.dims()[1];
        for range in ends(arrived.len()) {
            for (i, v) in read(endpoint, &self.rows, range.clone())?.into_iter().enumerate() {
                let (source, token) = arrived[range.start + i / h];
                assert_eq!(
                    v,
                    value(source, token, i % h),
                    "flat {phase}: slot {}, column {}",
                    range.start + i / h,
                    i % h
                );
            }
        }
        Ok(())
    }

    /// Rows went there and back as they are: sums are a token's row times its ranks.
    fn check_sums(&self, endpoint: &Endpoint<'_>, own: &[i64], phase: &str) -> Result<()> {
        let ([tokens, h], local) = ([self.y.dims()[0], self.y.dims()[1]], self.counts.dims()[0]);
        let k = own.len() / tokens;
        for range in ends(tokens) {
            for (i, v) in read(endpoint, &self.y, range.clone())?.into_iter().enumerate() {
                let t = range.start + i / h;
                let mut ranks: Vec<_> = own[t * k..(t + 1) * k].iter().map(|id| *id as usize / local).collect();
                ranks.sort_unstable();
                ranks.dedup();
                let exact = ranks.len() as f64 * value(self.comm.rank(), t, i % h);
                assert_eq!(v, exact, "flat {phase}: token {t}, column {}", i % h);
            }
        }
        Ok(())
    }
}
