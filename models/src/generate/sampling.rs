//! One token from a step's logits.
//!
//! The order of operations is transformers' (`generate` with these parameters): the repetition penalty on the logits
//! of all ids of the prompt and of the text so far; then, where sampling is on, the temperature, the `top_k` largest,
//! of these the fewest that together have a probability of `top_p`, of these those with at least `min_p` times the
//! largest probability; the rest has probability zero, and one token is drawn from a softmax of what is left. Each
//! filter sees probabilities that sum to one over what the one before left.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::error::{Error, Result};
use super::folder;

/// How a token is chosen from logits. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0: greedy, the token of the largest logit.
    pub temperature: f32,
    /// So many tokens of the largest logits are left, and what equals the last of them; 0: all.
    pub top_k: usize,
    /// The fewest tokens of the largest logits with this probability together are left, in `0.0..=1.0`; 1: all.
    pub top_p: f32,
    /// Tokens with at least this share of the largest probability are left, in `0.0..=1.0`; 0: all.
    pub min_p: f32,
    /// Logits of ids that are in prompt or text already are divided by it where they are above zero, else multiplied;
    /// 1: not at all. It works with greedy choice too.
    pub repetition_penalty: f32,
    /// Seed of a sequence's random numbers: the same seed, prompt and logits give the same tokens, whatever else is in
    /// the batch. (A batch may round logits differently; what a decoder says of that is its own affair.)
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// The sampling of a folder's `generation_config.json`, with transformers' defaults where it samples and does not
    /// say: temperature 1, `top_k` 50. Greedy where it does not sample, or there is no such file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Parameter`].
    pub fn from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        Self::read(dir.as_ref(), false)
    }

    /// The same as if the file said that it samples, which is what transformers does where a caller asks it to.
    ///
    /// # Errors
    /// As [`from_folder`](Self::from_folder).
    pub fn drawing_from_folder(dir: impl AsRef<Path>) -> Result<Self> {
        Self::read(dir.as_ref(), true)
    }

    fn read(dir: &Path, draws: bool) -> Result<Self> {
        const FILE: &str = "generation_config.json";
        let file = folder::json(dir, FILE)?;
        let number = |name: &str, default: f64| match file.get(name) {
            None | Some(serde_json::Value::Null) => Ok(default),
            Some(value) => value
                .as_f64()
                .ok_or_else(|| folder::problem(dir, FILE, &format!("{name}: expected a number, found {value}"))),
        };
        let wrong = |name: &str, expected: &str| {
            folder::problem(dir, FILE, &format!("{name}: expected {expected}, found {}", file[name]))
        };
        if !file.is_object() && !file.is_null() {
            return Err(folder::problem(dir, FILE, "expected an object"));
        }
        if !matches!(file["do_sample"], serde_json::Value::Null | serde_json::Value::Bool(_)) {
            return Err(wrong("do_sample", "true or false"));
        }
        let mut this = Self { repetition_penalty: number("repetition_penalty", 1.0)? as f32, ..Self::default() };
        if draws || file["do_sample"] == true {
            this.temperature = number("temperature", 1.0)? as f32;
            let top_k = number("top_k", 50.0)?;
            if !(0.0..=f64::from(u32::MAX)).contains(&top_k) || top_k.fract() != 0.0 {
                return Err(wrong("top_k", "a whole number from 0 on"));
            }
            this.top_k = top_k as usize;
            this.top_p = number("top_p", 1.0)? as f32;
            this.min_p = number("min_p", 0.0)? as f32;
        }
        this.check().map_err(|e| folder::problem(dir, FILE, &e.to_string()))?;
        Ok(this)
    }

    /// Refuses values outside their ranges.
    ///
    /// # Errors
    /// [`Error::Parameter`], naming the first.
    pub fn check(&self) -> Result<()> {
        let finite = |name, expected, value: f32, ok: bool| match ok && value.is_finite() {
            true => Ok(()),
            false => Err(Error::Parameter { name, expected, found: value.to_string() }),
        };
        let probability = "a number of 0 to 1";
        finite("temperature", "0, or a finite number above 0", self.temperature, self.temperature >= 0.0)?;
        finite("top_p", probability, self.top_p, (0.0..=1.0).contains(&self.top_p))?;
        finite("min_p", probability, self.min_p, (0.0..=1.0).contains(&self.min_p))?;
        let penalty = self.repetition_penalty;
        finite("repetition_penalty", "a number above 0", penalty, penalty > 0.0)
    }
}

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: Sampling,
    random: ChaCha8Rng,
    /// Ids of prompt and text, as far as the penalty asks for them.
    seen: HashSet<u32>,
    kept: Vec<Candidate>,
}

/// A token that may be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Larger logits first, then smaller ids.
    fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
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
    pub(super) fn is_plain(&self) -> bool {
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

/// The next tokens of several sequences, side by side on all cores: one of 150 thousand logits takes some milliseconds,
/// and each has random numbers of its own. Of those that fail, the first is told.
pub(super) fn choose_all(mut sequences: Vec<(&mut Sampler, &mut [f32])>) -> Result<Vec<u32>> {
    if let [(sampler, logits)] = &mut sequences[..] {
        return Ok(vec![sampler.choose(logits)?]);
    }
    let tokens: Vec<Result<u32>> = sequences.into_par_iter().map(|(sampler, logits)| sampler.choose(logits)).collect();
    tokens.into_iter().collect()
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

/// The softmax of what is left. The temperature divides no logit but its distance from the largest, which a small one
/// cannot make infinite; the order of logits is the same with and without.
#[derive(Debug, Clone, Copy)]
struct Softmax {
    temperature: f64,
}

impl Softmax {
    /// exp((logit − largest) / temperature), and their sum.
    fn exponents(self, kept: &[Candidate]) -> (impl Fn(&Candidate) -> f64 + use<>, f64) {
        let most = f64::from(kept.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max));
        let exp = move |c: &Candidate| ((f64::from(c.logit) - most) / self.temperature).exp();
        let sum = kept.iter().map(&exp).sum();
        (exp, sum)
    }
}

fn top_k(kept: &mut Vec<Candidate>, k: usize) {
    if k == 0 || k >= kept.len() {
        return;
    }
    let (_, last, _) = kept.select_nth_unstable_by(k - 1, Candidate::order);
    let last = last.logit;
    kept.retain(|c| c.logit >= last);
}

/// Leaves the candidates before which, in their order, there is less than `p`; one at least.
fn top_p(kept: &mut Vec<Candidate>, softmax: Softmax, p: f64) {
    if p >= 1.0 {
        return;
    }
    in_id_order(kept);
    let (exp, sum) = softmax.exponents(kept);
    let (mut sorted, mut before) = (0, 0.0);
    let mut left = 0;
    while left < kept.len() && (left == 0 || before < p * sum) {
        if left == sorted {
            // Most of a vocabulary is never looked at: sort a part, and twice as much if that is not enough.
            let more = (sorted + 256).min(kept.len() - sorted);
            let rest = &mut kept[sorted..];
            if more < rest.len() {
                rest.select_nth_unstable_by(more, Candidate::order);
            }
            rest[..more].sort_unstable_by(Candidate::order);
            sorted += more;
        }
        before += exp(&kept[left]);
        left += 1;
    }
    kept.truncate(left);
}

fn min_p(kept: &mut Vec<Candidate>, softmax: Softmax, p: f64) {
    if p > 0.0 {
        let (exp, _) = softmax.exponents(kept);
        // The largest probability is that of exponent 1.
        kept.retain(|c| exp(c) >= p);
    }
}

/// Selections leave what they select in an order of their own; sums and draws are made in that of ids.
fn in_id_order(kept: &mut [Candidate]) {
    kept.sort_unstable_by_key(|c| c.id);
}

/// The candidate in whose part of the sum of all `uniform`, in `0.0..1.0`, lies.
fn pick(kept: &mut [Candidate], softmax: Softmax, uniform: f64) -> u32 {
    in_id_order(kept);
    let (exp, sum) = softmax.exponents(kept);
    let mut left = uniform * sum;
    let mut last = kept[0].id;
    for candidate in kept.iter() {
        let weight = exp(candidate);
        if weight > 0.0 {
            last = candidate.id;
            if left < weight {
                break;
            }
            left -= weight;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(change: impl FnOnce(&mut Sampling)) -> Sampling {
        let mut options = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
        change(&mut options);
        options
    }

    /// How often each id is drawn from the same logits.
    fn counts(options: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(options, &[]).expect("a sampler");
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.choose(&mut logits.to_vec()).expect("a token") as usize] += 1;
        }
        counts
    }

    fn left(options: Sampling, logits: &[f32]) -> Vec<usize> {
        let counts = counts(options, logits, 4000);
        (0..logits.len()).filter(|id| counts[*id] > 0).collect()
    }

    /// Logits of given probabilities.
    fn logs(p: &[f32]) -> Vec<f32> {
        p.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_first() {
        let mut sampler = Sampler::new(Sampling::default(), &[]).expect("a sampler");
        assert_eq!(sampler.choose(&mut [0.0, 2.0, f32::NEG_INFINITY, 2.0]).expect("a token"), 1);
    }

    /// 20,000 draws: the count of an id of probability p has a deviation of √(20000 p (1 − p)) ≤ 71, of which five are
    /// allowed; by chance one seed in some 500,000 would fail, and this one is fixed.
    #[test]
    fn draws_have_the_probabilities_of_the_softmax() {
        for (temperature, power) in [(1.0, 1.0), (0.5, 2.0), (2.0, 0.5)] {
            let p = [0.5f32, 0.1, 0.25, 0.15];
            let total: f32 = p.iter().map(|p| p.powf(power)).sum();
            let counts = counts(sampled(|o| o.temperature = temperature), &logs(&p), 20_000);
            for (id, count) in counts.iter().enumerate() {
                let expected = 20_000.0 * p[id].powf(power) / total;
                assert!((*count as f32 - expected).abs() < 355.0, "id {id}: {count}, expected {expected}");
            }
        }
    }

    #[test]
    fn top_k_keeps_what_equals_the_last() {
        let logits = [1.0, 3.0, 2.0, 2.0, 0.0];
        assert_eq!(left(sampled(|o| o.top_k = 1), &logits), [1]);
        assert_eq!(left(sampled(|o| o.top_k = 2), &logits), [1, 2, 3]);
        assert_eq!(left(sampled(|o| o.top_k = 9), &logits), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_it() {
        let logits = logs(&[0.1, 0.5, 0.25, 0.15]);
        assert_eq!(left(sampled(|o| o.top_p = 0.0), &logits), [1]);
        assert_eq!(left(sampled(|o| o.top_p = 0.45), &logits), [1]);
        assert_eq!(left(sampled(|o| o.top_p = 0.6), &logits), [1, 2]);
        assert_eq!(left(sampled(|o| o.top_p = 0.8), &logits), [1, 2, 3]);
        assert_eq!(left(sampled(|o| o.top_p = 0.95), &logits), [0, 1, 2, 3]);
    }

    /// Over more candidates than one part of the sort.
    #[test]
    fn top_p_of_many_equals_a_sort_of_all() {
        let logits: Vec<f32> = (0..3000).map(|i| ((i * 7919) % 3001) as f32 / 600.0).collect();
        let all: Vec<Candidate> = (0..).zip(&logits).map(|(id, logit)| Candidate { id, logit: *logit }).collect();
        let softmax = Softmax { temperature: 1.0 };
        for p in [0.05, 0.3, 0.7, 0.99] {
            let mut kept = all.clone();
            top_p(&mut kept, softmax, p);
            let (exp, sum) = softmax.exponents(&all);
            let mut sorted = all.clone();
            sorted.sort_by(Candidate::order);
            let mut before = 0.0;
            let expected: Vec<u32> = sorted
                .iter()
                .take_while(|c| {
                    let take = before < p * sum;
                    before += exp(c);
                    take
                })
                .map(|c| c.id)
                .collect();
            assert_eq!(kept.iter().map(|c| c.id).collect::<Vec<_>>(), expected, "{p}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_largest() {
        let logits = logs(&[0.1, 0.5, 0.25, 0.15]);
        assert_eq!(left(sampled(|o| o.min_p = 0.25), &logits), [1, 2, 3]);
        assert_eq!(left(sampled(|o| o.min_p = 1.0), &logits), [1]);
    }

    /// With p = 0.5, 0.3, 0.2: the two largest have 0.625 and 0.375 of what is left, so that a top-p of 0.6 leaves one
    /// of them; without top-k before it, it would leave both.
    #[test]
    fn each_filter_sees_what_the_one_before_left() {
        let logits = logs(&[0.5, 0.3, 0.2]);
        assert_eq!(left(sampled(|o| (o.top_k, o.top_p) = (2, 0.6)), &logits), [0]);
        assert_eq!(left(sampled(|o| o.top_p = 0.6), &logits), [0, 1]);
        // The temperature comes before both: squares of the probabilities are 0.66, 0.24, 0.11.
        assert_eq!(left(sampled(|o| (o.temperature, o.top_p) = (0.5, 0.6)), &logits), [0]);
    }

    #[test]
    fn the_penalty_is_for_ids_of_prompt_and_text_once_each() {
        let options = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(options, &[0, 0, 77]).expect("a sampler");
        let mut logits = [4.0, 2.5, -1.0];
        assert_eq!(sampler.choose(&mut logits).expect("a token"), 1);
        assert_eq!(logits, [2.0, 2.5, -1.0]);
        let mut logits = [4.0, 3.0, -1.0];
        assert_eq!(sampler.choose(&mut logits).expect("a token"), 0, "1 is seen now");
        assert_eq!(logits, [2.0, 1.5, -1.0]);
        let mut below = [-4.0, -3.0, -5.0];
        assert_eq!(sampler.choose(&mut below).expect("a token"), 2);
        assert_eq!(below, [-8.0, -6.0, -5.0]);
    }

    /// Rows that are sampled side by side give what each gives alone, and the first of those that fail.
    #[test]
    fn rows_side_by_side_have_the_tokens_of_each_alone() {
        let logits =
            |row: usize| -> Vec<f32> { (0..3000).map(|i| ((i * 7919 + row * 31) % 3001) as f32 / 300.0).collect() };
        let samplers = || -> Vec<Sampler> {
            let of = |seed| sampled(|o| (o.top_p, o.seed) = (0.9, seed));
            (0..9).map(|seed| Sampler::new(of(seed), &[]).expect("a sampler")).collect()
        };
        let (mut alone, mut together) = (samplers(), samplers());
        for step in 0..3 {
            let mut rows: Vec<Vec<f32>> = (0..9).map(|row| logits(row + step)).collect();
            let expected: Vec<u32> =
                alone.iter_mut().zip(rows.clone()).map(|(s, mut row)| s.choose(&mut row).expect("a token")).collect();
            let work = together.iter_mut().zip(rows.iter_mut().map(Vec::as_mut_slice)).collect();
            assert_eq!(choose_all(work).expect("tokens"), expected);
        }
        let mut rows: Vec<Vec<f32>> = (0..9).map(logits).collect();
        (rows[7][0], rows[3][5]) = (f32::NAN, f32::NAN);
        let work = together.iter_mut().zip(rows.iter_mut().map(Vec::as_mut_slice)).collect();
        let message = choose_all(work).expect_err("refused").to_string();
        assert_eq!(message, "logits of a step: that of id 5 is NaN");
        assert!(choose_all(Vec::new()).expect("none").is_empty());
    }

    /// A penalty that no f32 holds leaves logits that can be drawn from.
    #[test]
    fn a_penalty_without_bounds_leaves_a_token() {
        for change in [|o: &mut Sampling| o.min_p = 0.1, |o: &mut Sampling| o.top_p = 0.5] {
            let mut options = sampled(change);
            options.repetition_penalty = 3e38;
            let mut sampler = Sampler::new(options, &[0, 1]).expect("a sampler");
            assert!(sampler.choose(&mut [-2.0, -3.0]).expect("a token") < 2);
        }
    }

    /// The numbers themselves are fixed: a change of generator or of the way from its bits to a token shows here.
    #[test]
    fn a_seed_gives_the_same_tokens_for_ever() {
        let logits = vec![0.0; 1000];
        let draw = |seed| {
            let mut sampler = Sampler::new(sampled(|o| o.seed = seed), &[]).expect("a sampler");
            (0..5).map(|_| sampler.choose(&mut logits.clone()).expect("a token")).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert_eq!(draw(42), [681, 950, 427, 627, 288]);
    }

    #[test]
    fn a_small_temperature_does_not_overflow() {
        let options = sampled(|o| o.temperature = 1e-38);
        assert_eq!(left(options, &[1.0, 50.0, -3.0]), [1]);
    }

    #[test]
    fn parameters_outside_their_range_are_named() {
        let refused = |change: fn(&mut Sampling)| Sampler::new(sampled(change), &[]).expect_err("refused").to_string();
        assert_eq!(refused(|o| o.temperature = -1.0), "temperature: expected 0, or a finite number above 0, found -1");
        assert!(refused(|o| o.temperature = f32::NAN).contains("found NaN"));
        assert!(refused(|o| o.temperature = f32::INFINITY).contains("temperature"));
        assert_eq!(refused(|o| o.top_p = 1.5), "top_p: expected a number of 0 to 1, found 1.5");
        assert!(refused(|o| o.min_p = -0.1).contains("min_p"));
        assert!(refused(|o| o.repetition_penalty = 0.0).contains("repetition_penalty"));
    }

    #[test]
    fn logits_that_are_no_numbers_are_errors() {
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(sampled(|o| o.temperature = temperature), &[]).expect("a sampler");
            let message = sampler.choose(&mut [0.0, f32::NAN]).expect_err("refused").to_string();
            assert_eq!(message, "logits of a step: that of id 1 is NaN");
            let message = sampler.choose(&mut [f32::INFINITY, 0.0]).expect_err("refused").to_string();
            assert!(message.contains("inf"), "{message}");
            let message = sampler.choose(&mut [f32::NEG_INFINITY; 3]).expect_err("refused").to_string();
            assert_eq!(message, "logits of a step: none of 3 is finite");
            sampler.choose(&mut []).expect_err("no logits");
        }
    }

    #[test]
    fn a_folders_configuration() {
        let dir = tempfile::tempdir().expect("a folder");
        let read = |text: &str| {
            std::fs::write(dir.path().join("generation_config.json"), text).expect("a file");
            Sampling::from_folder(dir.path())
        };
        assert_eq!(Sampling::from_folder(dir.path().join("none")).expect("greedy"), Sampling::default());
        assert_eq!(read(r#"{"temperature": 0.6}"#).expect("greedy"), Sampling::default(), "without do_sample");
        let published =
            r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}"#;
        let expected =
            Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, repetition_penalty: 1.05, ..Sampling::default() };
        assert_eq!(read(published).expect("options"), expected);
        assert_eq!(read(r#"{"do_sample": true}"#).expect("options").top_k, 50);
        read(r#"{"top_p": 0.9}"#).expect("greedy");
        let drawing = Sampling::drawing_from_folder(dir.path()).expect("options");
        assert_eq!(drawing, Sampling { temperature: 1.0, top_k: 50, top_p: 0.9, ..Sampling::default() });
        for (text, field) in [
            (r#"{"do_sample": true, "top_p": 2}"#, "top_p"),
            (r#"{"do_sample": true, "top_p": "a"}"#, "top_p"),
            (r#"{"do_sample": true, "temperature": -1}"#, "temperature"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"do_sample": true, "top_k": -5}"#, "top_k: expected a whole number"),
            (r#"{"do_sample": true, "top_k": 0.5}"#, "top_k: expected a whole number"),
            (r#"{"do_sample": true, "top_k": 1e300}"#, "top_k: expected a whole number"),
            (r#"{"do_sample": "true"}"#, "do_sample: expected true or false"),
            ("[]", "expected an object"),
        ] {
            let message = read(text).expect_err(text).to_string();
            assert!(message.contains("generation_config.json") && message.contains(field), "{text}: {message}");
        }
    }
}
