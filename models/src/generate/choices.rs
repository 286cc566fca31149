//! Which experts a generation's tokens choose.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{DType, Result as CandleResult, Tensor};
use moebius::metrics::Load;

use super::decoder::{CacheRequest, Decoder};
use super::model_decoder::last_logits;
use crate::error::Result;
use crate::{Cache, Model, Point};

/// A model that counts how often each expert is chosen by the tokens of its steps, prompts' and generated ones. A step
/// waits for its device in every layer with experts, so that it cannot be replayed from a graph: caches grow.
#[derive(Debug)]
pub struct CountChoices<'a> {
    model: &'a Model,
    loads: RefCell<BTreeMap<usize, Load>>,
}

impl<'a> CountChoices<'a> {
    /// Nothing is counted yet.
    pub fn new(model: &'a Model) -> Self {
        Self { model, loads: RefCell::default() }
    }

    /// Layers that have run, with how often these chose each of all E experts. Tokens are this rank's; sums over
    /// the ranks are what all tokens chose.
    pub fn into_loads(self) -> BTreeMap<usize, Load> {
        self.loads.into_inner()
    }

    fn count(&self, layer: usize, ids: &Tensor) -> CandleResult<()> {
        let Some(moe) = self.model.moe(layer) else { return Ok(()) };
        let mut loads = self.loads.borrow_mut();
        let experts = moe.layer().config().router.num_experts;
        let load = loads.entry(layer).or_insert_with(|| Load::new(vec![0; experts], 0));
        for id in ids.flatten_all()?.to_dtype(DType::U32)?.to_vec1::<u32>()? {
            // A choice that a capacity dropped has no expert.
            match load.tokens_per_expert.get_mut(id as usize) {
                Some(count) => *count += 1,
                None => load.dropped += 1,
            }
        }
        Ok(())
    }
}

impl Decoder for CountChoices<'_> {
    type Cache<'d>
        = Cache
    where
        Self: 'd;

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn context(&self) -> usize {
        self.model.context()
    }

    fn cache(&self, _: CacheRequest) -> Result<Cache> {
        Ok(self.model.cache())
    }

    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> Result<Tensor> {
        let mut tap = |point: Point, x: Tensor| {
            if let Point::Choices { layer } = point {
                self.count(layer, &x)?;
            }
            Ok(x)
        };
        last_logits(self.model, tokens, self.model.decode_hidden_tapped(tokens, cache, &mut tap)?)
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> Result<bool> {
        cache.keep_sequences(rows)?;
        Ok(true)
    }
}
