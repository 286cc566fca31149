//! Which rows of a whole parameter a rank holds.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::etp::Shards;

/// The rows of a parameter that a rank holds. All dimensions but the last count rows, as in
/// [`Shards`]; a vector is one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamShard {
    dims: Vec<usize>,
    rows: Range<usize>,
}

impl ParamShard {
    /// All of it: one rank, or a parameter that every rank holds.
    pub fn whole(dims: &[usize]) -> Self {
        let rows = 0..row_count(dims);
        Self { dims: dims.to_vec(), rows }
    }

    /// The experts of rank `rank` of `ranks`: `local` (`[L, …]`) are the sizes of what it holds, and the whole parameter
    /// is `[ranks · L, …]`, in rank order. So is a parameter of one expert that every rank has under the same name: a
    /// matrix `[n, m]` is rows of `[ranks · n, m]`, and a vector `[n]`, a bias, a row of `[ranks, n]`.
    ///
    /// # Errors
    /// A rank that there is not; sizes of no dimension.
    pub fn of_experts(local: &[usize], rank: usize, ranks: usize) -> Result<Self> {
        const CALL: &str = "ParamShard::of_experts";
        if rank >= ranks {
            return Err(Error::invalid(CALL, "rank", format!("one of {ranks}"), rank));
        }
        match local {
            [] => Err(Error::invalid(CALL, "local", "one dimension or more", format!("{local:?}"))),
            [n] => Ok(Self::experts(&[1, *n], rank, ranks)),
            _ => Ok(Self::experts(local, rank, ranks)),
        }
    }

    /// The same of sizes that are known to be sound.
    pub(crate) fn experts(local: &[usize], rank: usize, ranks: usize) -> Self {
        let own = row_count(local);
        let mut dims = local.to_vec();
        if let Some(first) = dims.first_mut() {
            *first = first.saturating_mul(ranks);
        }
        Self { dims, rows: rank * own..(rank + 1) * own }
    }

    /// Rank `rank`'s shard of these rows, as a chain cuts them. Padding is not part of it.
    ///
    /// # Errors
    /// A cut of another number of rows.
    pub fn shard(&self, shards: &Shards, rank: usize) -> Result<Self> {
        const CALL: &str = "ParamShard::shard";
        Error::check_shape(
            CALL,
            "shards",
            &[self.rows.len(), self.width()],
            &[row_count(shards.dims()), shards.dims().last().copied().unwrap_or(1)],
        )?;
        let own = shards.rows_of(rank);
        let rows = self.rows.start + own.start..self.rows.start + own.end;
        Ok(Self { dims: self.dims.clone(), rows })
    }

    /// Sizes of the whole parameter.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The rows held.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Rows of the whole parameter.
    pub fn all_rows(&self) -> usize {
        row_count(&self.dims)
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Elements held.
    pub fn count(&self) -> usize {
        self.rows.len() * self.width()
    }

    /// Number of the first element held.
    pub(crate) fn first_element(&self) -> u64 {
        (self.rows.start * self.width()) as u64
    }
}

fn row_count(dims: &[usize]) -> usize {
    dims.split_last().map_or(1, |(_, outer)| outer.iter().product())
}
