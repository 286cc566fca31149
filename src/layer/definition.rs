//! A layer as all its calls see it: configuration, number, and how its tokens travel.

use crate::comm::{Communicator, Op, Tag};
use crate::compare::gather_numbers;
use crate::config::{FieldValues, Fingerprint, MoeConfig};
use crate::ep::{Capacity, Overflow, Reporting};
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::TensorRef;

/// A Mixture-of-Experts layer without its parameters, which the host framework owns.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    pub(super) config: MoeConfig,
    pub(super) number: u32,
    pub(super) dispatch: DispatchOptions,
    /// Of the configuration, to be compared over the ranks.
    pub(super) fingerprint: Fingerprint,
}

/// How a layer's tokens travel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DispatchOptions {
    /// Rows of the receive layout.
    pub capacity: Capacity,
    /// Most tokens that a rank brings to a call, the same on all ranks; `None`: the group's `max_tokens_per_rank`. With a
    /// static capacity and deferred reporting all-gather sends so many rows of each rank.
    pub max_tokens: Option<usize>,
    /// Treatment of rows past a static capacity.
    pub overflow: Overflow,
    /// Segments are padded to a multiple of this power of two.
    pub alignment: usize,
    /// When what only the device sees is reported; `None`: as suits the device ([`Kernels::REPORTING`]: at once on
    /// the CPU, later on a GPU).
    pub reporting: Option<Reporting>,
}

impl Default for DispatchOptions {
    fn default() -> Self {
        Self { capacity: Capacity::Eager, max_tokens: None, overflow: Overflow::Error, alignment: 1, reporting: None }
    }
}

impl Layer {
    /// A layer of `config`; `number` names it in tags and errors and must be the same on all ranks.
    ///
    /// # Errors
    /// Errors of [`MoeConfig::validate`].
    pub fn new(config: MoeConfig, number: u32) -> Result<Self> {
        config.validate()?;
        let fingerprint = Fingerprint::of(&config);
        Ok(Self { config, number, dispatch: DispatchOptions::default(), fingerprint })
    }

    /// Compares the configuration over the ranks, before they exchange parameters: each rank's error names the fields.
    #[cfg_attr(
        not(any(feature = "candle", feature = "burn")),
        allow(dead_code, reason = "adapters alone make modules")
    )]
    pub(crate) fn compare_over_ranks<D: Kernels>(
        &self,
        call: &'static str,
        device: &D,
        comm: &mut dyn Communicator<D>,
    ) -> Result<()> {
        let rank = comm.rank();
        let mut text = self.fingerprint.values().text().as_bytes().to_vec();
        text.resize(FieldValues::BYTES.next_multiple_of(size_of::<u64>()), 0);
        let text = text.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let router = &self.config.router;
        // What a dispatch's own fields compare, and a fingerprint does not name.
        let counts = [("router.num_experts", router.num_experts as u64), ("router.top_k", router.top_k as u64)];
        let own = self.fingerprint.words().into_iter().chain(counts.map(|(_, count)| count)).chain(text);
        let own: Vec<u64> = own.collect();
        let all = gather_numbers(device, comm, Tag { layer: self.number, op: Op::Weights, sequence: 0 }, &own)?;
        let words = Fingerprint::WORDS;
        let mut ranks = all.chunks(own.len());
        let Some(peer) = ranks.position(|theirs| theirs[..words] != own[..words]) else { return Ok(()) };
        let theirs = &all[peer * own.len()..(peer + 1) * own.len()];
        let text_at = words + counts.len();
        let mut other = counts.into_iter().enumerate().filter(|(i, (_, count))| theirs[words + i] != *count);
        if let Some((i, (field, count))) = other.next() {
            let [value, peer_value] = [count, theirs[words + i]].map(|count| count.to_string());
            return Err(Error::ConfigMismatch { call, field: field.into(), rank, value, peer, peer_value });
        }
        let text: Vec<u8> = theirs[text_at..].iter().flat_map(|word| word.to_le_bytes()).collect();
        let text = String::from_utf8_lossy(&text);
        let values = FieldValues::from_text(text.trim_end_matches('\0'));
        let two = [(&own[..words], self.fingerprint.values()), (&theirs[..words], &values)];
        let (field, [value, peer_value]) = Fingerprint::difference(two, "router.expert_capacity");
        Err(Error::ConfigMismatch { call, field, rank, value, peer, peer_value })
    }

    /// The same layer with other dispatch options.
    pub fn with_dispatch(mut self, dispatch: DispatchOptions) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// How its tokens travel.
    pub fn dispatch(&self) -> DispatchOptions {
        self.dispatch
    }

    /// Sizes and formulas.
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The layer's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// True where kept weights are scaled to the sum they had before dropping.
    pub(super) fn renormalizes_kept(&self) -> bool {
        self.config.router.expert_capacity.is_some_and(|c| c.renormalize)
    }

    pub(super) fn check_x<D: Kernels>(&self, call: &'static str, x: TensorRef<'_, D>) -> Result<usize> {
        match x.dims() {
            [t, h] if *h == self.config.hidden && x.dtype().is_float() => Ok(*t),
            dims => Err(Error::invalid(
                call,
                "tensor x",
                format!("a floating [T, {}]", self.config.hidden),
                format!("{} {dims:?}", x.dtype()),
            )),
        }
    }
}
