//! The sampler of one sequence: penalty, greedy choice or a draw, with random numbers of its own.

use std::collections::HashSet;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::filters::{Candidate, Softmax, min_p, pick, top_k, top_p};
use super::options::Sampling;
use crate::generate::error::{Error, Result};

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: Sampling,
    random: ChaCha8Rng,
    /// Ids of prompt and text, as far as the penalty asks for them.
    seen: HashSet<u32>,
    kept: Vec<Candidate>,
}

impl Sampler {
    /// For a sequence that begins with `prompt`. Its random numbers are ChaCha8's of the seed, one of 64 bits for each
    /// token that is drawn.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn new(options: Sampling, prompt: &[u32]) -> Result<Self> {
        options.check()?;
        let random = ChaCha8Rng::seed_from_u64(options.seed);
        let mut this = Self { options, random, seen: HashSet::new(), kept: Vec::new() };
        prompt.iter().for_each(|id| this.see(*id));
        Ok(this)
    }

    /// The next token from its logits, `[V]`, which are changed.
    ///
    /// # Errors
    /// [`Error::Logits`]: one is not a number or infinite, there is none, or all are −∞.
    pub fn choose(&mut self, logits: &mut [f32]) -> Result<u32> {
        check(logits)?;
        self.penalize(logits);
        let id = match self.options.temperature {
            0.0 => largest(logits),
            temperature => self.draw(logits, temperature),
        };
        self.see(id);
        Ok(id)
    }

    /// Whether it takes the token of the largest logit, whatever came before.
    pub(in crate::generate) fn is_plain(&self) -> bool {
        self.options.temperature == 0.0 && self.options.repetition_penalty == 1.0
    }

    fn see(&mut self, id: u32) {
        if self.options.repetition_penalty == 1.0 {
            return;
        }
        self.seen.insert(id);
    }

    fn penalize(&self, logits: &mut [f32]) {
        let penalty = self.options.repetition_penalty;
        for id in &self.seen {
            if let Some(logit) = logits.get_mut(*id as usize) {
                let penalized = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
                *logit = penalized.clamp(-f32::MAX, f32::MAX);
            }
        }
    }

    fn draw(&mut self, logits: &[f32], temperature: f32) -> u32 {
        let (kept, softmax) = (&mut self.kept, Softmax { temperature: f64::from(temperature) });
        kept.clear();
        kept.extend((0..).zip(logits).map(|(id, logit)| Candidate { id, logit: *logit }));
        top_k(kept, self.options.top_k);
        top_p(kept, softmax, f64::from(self.options.top_p));
        min_p(kept, softmax, f64::from(self.options.min_p));
        // 53 bits: all that an f64 below 1 holds.
        let uniform = (self.random.next_u64() >> 11) as f64 * (-53f64).exp2();
        pick(kept, softmax, uniform)
    }
}

/// The next token of each of several sequences, side by side on all cores: one of 150 thousand logits takes some
/// milliseconds, and each has random numbers of its own.
pub(in crate::generate) fn choose_all(mut sequences: Vec<(&mut Sampler, &mut [f32])>) -> Vec<Result<u32>> {
    if let [(sampler, logits)] = &mut sequences[..] {
        return vec![sampler.choose(logits)];
    }
    sequences.into_par_iter().map(|(sampler, logits)| sampler.choose(logits)).collect()
}

fn check(logits: &[f32]) -> Result<()> {
    let fail = |problem: String| Err(Error::Logits { problem });
    if let Some(id) = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY) {
        return fail(format!("that of id {id} is {}", logits[id]));
    }
    match logits.iter().any(|x| x.is_finite()) {
        true => Ok(()),
        false => fail(format!("none of {} is finite", logits.len())),
    }
}

/// Of equals, the smallest id.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}
