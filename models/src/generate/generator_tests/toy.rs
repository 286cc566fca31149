//! A decoder without weights.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use super::*;

/// Ids of the byte tokenizer, and one more.
pub(super) const VOCABULARY: usize = 260;

/// A decoder whose logits come from a sequence's ids alone, by a hash, so that any id that a batch puts elsewhere, or
/// leaves out, shows in all that follows.
pub(super) struct Toy {
    pub(super) context: usize,
    pub(super) can_keep: bool,
    /// Every token is this one where set, and the logits of the call of this number are NaN.
    pub(super) says: Option<Vec<u32>>,
    pub(super) spoiled: Option<usize>,
    /// The call of this number fails, behind what would be its last collective.
    pub(super) fails: Option<usize>,
    /// The step whose logits are worth nothing: it has lost a rank.
    pub(super) lost: Option<usize>,
    /// What it gives as every row's likeliest token, which its logits do not say.
    pub(super) likeliest: Option<u32>,
    /// So many more than there are rows.
    pub(super) extra: usize,
    /// Steps of one token are captured anew where that before was of other sequences, which takes this long.
    pub(super) capture: Option<Duration>,
    pub(super) captures: Cell<usize>,
    pub(super) shapes: RefCell<Vec<(usize, usize)>>,
}

impl Toy {
    pub(super) fn new() -> Self {
        Self {
            context: 64,
            can_keep: false,
            says: None,
            spoiled: None,
            fails: None,
            lost: None,
            likeliest: None,
            extra: 0,
            capture: None,
            captures: Cell::new(0),
            shapes: RefCell::default(),
        }
    }

    /// Says these ids after a prompt of one id, whatever it is.
    pub(super) fn saying(ids: &[u32]) -> Self {
        Self { says: Some(ids.to_vec()), ..Self::new() }
    }

    pub(super) fn logits(&self, ids: &[u32]) -> Vec<f32> {
        if let Some(says) = &self.says {
            let says = says.get(ids.len() - 1).copied().unwrap_or(0);
            return (0..VOCABULARY as u32).map(|id| if id == says { 1.0 } else { 0.0 }).collect();
        }
        let mut hash = ids.iter().fold(1u64, |h, id| (h ^ u64::from(*id)).wrapping_mul(0x0100_0000_01b3));
        (0..VOCABULARY)
            .map(|_| {
                hash = hash.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (hash >> 40) as f32 / (1 << 22) as f32
            })
            .collect()
    }

    /// A sequence's continuation, worked out alone and without a cache.
    pub(super) fn expected(&self, request: &Request) -> Vec<u32> {
        let mut sampler = Sampler::new(request.sampling, &request.prompt).expect("a sampler");
        let mut ids = request.prompt.clone();
        for _ in 0..request.max_tokens.min(self.context + 1 - ids.len()) {
            let id = sampler.choose(&mut self.logits(&ids)).expect("a token");
            ids.push(id);
            if request.stop_tokens.contains(&id) {
                break;
            }
        }
        ids.split_off(request.prompt.len())
    }
}

impl Decoder for Toy {
    type Cache<'d> = Vec<Vec<u32>>;

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn context(&self) -> usize {
        self.context
    }

    fn cache(&self, request: CacheRequest) -> crate::Result<Self::Cache<'_>> {
        Ok(vec![Vec::new(); request.sequences])
    }

    fn step<'d>(&'d self, tokens: &Tensor, cache: &mut Self::Cache<'d>) -> crate::Result<Tensor> {
        let (b, s) = tokens.dims2()?;
        assert_eq!(b, cache.len(), "a row for each sequence of the cache");
        if let Some(time) = self.capture.filter(|_| s == 1 && self.shapes.borrow().last() != Some(&(b, s))) {
            std::thread::sleep(time);
            self.captures.set(self.captures.get() + 1);
        }
        self.shapes.borrow_mut().push((b, s));
        let mut logits: Vec<f32> = Vec::new();
        for (ids, new) in cache.iter_mut().zip(tokens.to_vec2::<u32>()?) {
            ids.extend(new);
            assert!(ids.len() <= self.context, "more tokens than the context has");
            logits.extend(self.logits(ids));
        }
        if self.spoiled == Some(self.shapes.borrow().len()) {
            logits.fill(f32::NAN);
        }
        if self.fails == Some(self.shapes.borrow().len()) {
            return Err(crate::Error::Usage { call: "Toy::step", problem: "out of toys".into() });
        }
        Ok(Tensor::from_vec(logits, (b, VOCABULARY), &Device::Cpu)?)
    }

    fn likeliest<'d>(&'d self, cache: &Self::Cache<'d>) -> crate::Result<Option<Vec<u32>>> {
        Ok(self.likeliest.map(|id| vec![id; cache.len() + self.extra]))
    }

    fn check<'d>(&'d self, _: &Self::Cache<'d>) -> crate::Result<()> {
        match self.lost == Some(self.shapes.borrow().len()) {
            true => Err(crate::Error::Usage { call: "Toy::check", problem: "a toy is lost".into() }),
            false => Ok(()),
        }
    }

    fn captures<'d>(&'d self, _: &Self::Cache<'d>) -> usize {
        self.captures.get()
    }

    fn keep<'d>(&'d self, rows: &[usize], cache: &mut Self::Cache<'d>) -> crate::Result<bool> {
        if self.can_keep {
            *cache = rows.iter().map(|row| cache[*row].clone()).collect();
        }
        Ok(self.can_keep)
    }
}
