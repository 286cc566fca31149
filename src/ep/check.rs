//! Checks of a prepare's arguments, before anything is exchanged.

use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::TensorRef;

use super::dispatcher_state::{DispatcherState, PREPARE};
use super::{Capacity, DispatchSpec, DispatcherKind};

impl<D: Kernels> DispatcherState<D> {
    /// Checks a prepare of this rank's choices against the rules.
    pub fn check_call(
        &self,
        ids: TensorRef<'_, D>,
        weights: Option<TensorRef<'_, D>>,
        spec: &DispatchSpec,
    ) -> Result<()> {
        self.check_sizes(spec)?;
        self.check_spec(spec)?;
        Self::check_weights(ids, weights)?;
        self.check_ids(ids, spec).map(|_| ())
    }

    /// Whether the numbers fit that all ranks know alike, the size of a record among them.
    pub(super) fn check_sizes(&self, spec: &DispatchSpec) -> Result<()> {
        let experts = self.config.num_experts;
        if !(1..=experts).contains(&spec.top_k) {
            return Err(Error::invalid(PREPARE, "spec.top_k", format!("1..={experts} (num_experts)"), spec.top_k));
        }
        self.check_choices(self.most_choices(spec))
    }

    /// Segments count rows in i32, an expert's padding of one row at least included.
    fn check_choices(&self, choices: usize) -> Result<()> {
        let most = i32::MAX as usize - self.config.num_experts;
        if choices > most {
            let most = format!("at most {most} choices of all ranks' tokens (max_tokens_per_rank)");
            return Err(Error::invalid(PREPARE, "spec.top_k", most, choices));
        }
        Ok(())
    }

    /// Choices of all ranks where each brings as many tokens as it may; a rank alone is asked when it brings its
    /// tokens.
    pub(super) fn most_choices(&self, spec: &DispatchSpec) -> usize {
        let most = if self.is_local() { 0 } else { self.max_tokens(spec) };
        self.ranks().saturating_mul(most).saturating_mul(spec.top_k)
    }

    pub(super) fn check_spec(&self, spec: &DispatchSpec) -> Result<()> {
        if !spec.alignment.is_power_of_two() {
            return Err(Error::invalid(PREPARE, "spec.alignment", "a power of two", spec.alignment));
        }
        if spec.backward && self.config.forward_only {
            return Err(Error::invalid(PREPARE, "spec.backward", "false (the group is forward_only)", "true"));
        }
        if let Some(tokens) = spec.max_tokens.filter(|_| !self.is_local())
            && !(1..=self.config.max_tokens_per_rank).contains(&tokens)
        {
            let range = format!("1..={} (the group's max_tokens_per_rank)", self.config.max_tokens_per_rank);
            return Err(Error::invalid(PREPARE, "spec.max_tokens", range, tokens));
        }
        // Known to all ranks alike, unlike the rows that each needs.
        self.check_rows(spec, self.most_choices(spec))?;
        if let Capacity::Static(rows) = spec.capacity
            && rows > self.config.max_rows
        {
            let most = format!("at most {} (the group's max_rows)", self.config.max_rows);
            return Err(Error::invalid(PREPARE, "spec.capacity", most, rows));
        }
        match &spec.expert_capacity {
            Some(c) if !(c.factor.is_finite() && c.factor > 0.0) => {
                Err(Error::invalid(PREPARE, "spec.expert_capacity.factor", "a finite number > 0", c.factor))
            }
            _ => Ok(()),
        }
    }

    /// Whether tokens stay where they are, so that their number is nobody else's concern.
    pub(super) fn is_local(&self) -> bool {
        self.ranks() == 1 && matches!(self.config.dispatcher, DispatcherKind::Auto | DispatcherKind::Local)
    }

    /// Refuses more rows than kernels count.
    pub(super) fn check_rows(&self, spec: &DispatchSpec, choices: usize) -> Result<()> {
        self.check_choices(choices)?;
        if choices.saturating_add(self.config.num_experts.saturating_mul(spec.alignment)) > i32::MAX as usize {
            let most = format!("segments of at most {} rows, padding included", i32::MAX);
            return Err(Error::invalid(PREPARE, "spec.alignment", most, spec.alignment));
        }
        Ok(())
    }

    /// T of this rank's choices `[T, K]`.
    pub(super) fn check_ids(&self, ids: TensorRef<'_, D>, spec: &DispatchSpec) -> Result<usize> {
        let k = spec.top_k;
        let tokens = match ids.dims() {
            [tokens, width] if *width == k => *tokens,
            dims => return Err(Error::invalid(PREPARE, "tensor topk_ids", format!("[T, {k}]"), format!("{dims:?}"))),
        };
        let (most, bound) = match spec.max_tokens {
            Some(most) => (most, "spec.max_tokens"),
            None if self.is_local() => (usize::MAX, "any number"),
            None => (self.config.max_tokens_per_rank, "the group's max_tokens_per_rank"),
        };
        if tokens > most {
            let most = format!("at most {most} tokens ({bound})");
            return Err(Error::invalid(PREPARE, "tensor topk_ids", most, tokens));
        }
        if self.is_local() {
            self.check_rows(spec, tokens.saturating_mul(k))?;
        }
        Ok(tokens)
    }

    /// Checks the weights of choices, whether or not anything reads them.
    pub(super) fn check_weights(ids: TensorRef<'_, D>, weights: Option<TensorRef<'_, D>>) -> Result<()> {
        let Some(weights) = weights else { return Ok(()) };
        Error::check_shape(PREPARE, "topk_weights", ids.dims(), weights.dims())?;
        match weights.dtype().is_float() {
            true => Ok(()),
            false => Err(Error::invalid(PREPARE, "tensor topk_weights", "a floating dtype", weights.dtype())),
        }
    }
}
