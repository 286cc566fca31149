//! Steps, texts and captures on one GPU, against forwards of whole sequences.

use super::*;

/// How steps are run, and how far from a forward they may be.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) options: LoadOptions,
    pub(super) captured: bool,
    pub(super) tolerance: f64,
}

/// Steps over a static cache against a forward of all tokens.
pub(super) fn steps(config: &Value, Case { options, captured, tolerance }: Case) -> Result<()> {
    let device = match captured {
        true => moebius::candle::device_for_capture(0)?,
        false => Device::new_cuda_with_stream(0)?,
    };
    let model = load(config, &device, options)?;
    let ids: Vec<u32> = (0..(SEQUENCES * TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) % 512).collect();
    let ids = Tensor::from_vec(ids, (SEQUENCES, TOKENS), &Device::Cpu)?;
    let expected = model.forward(&ids)?;
    for first in [1, 70] {
        let mut stepper = model.stepper(SEQUENCES, TOKENS)?;
        for round in 0..2 {
            stepper.feed(&ids.narrow(1, 0, first)?)?;
            for at in first..TOKENS {
                stepper.set_next_ids(&ids.narrow(1, at, 1)?.flatten_all()?.to_vec1::<u32>()?)?;
                let logits = stepper.step()?.copy()?;
                let error = relative(&logits, &expected.narrow(1, at, 1)?.squeeze(1)?)?;
                if error.is_nan() || error > tolerance {
                    return Err(format!("round {round}, token {at}: logits differ by {error:e}").into());
                }
                for (row, id) in logits.to_dtype(DType::F32)?.to_vec2::<f32>()?.iter().zip(stepper.next_ids()?) {
                    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    // Of equal ones, which 16 bits make common, the kernel takes the first.
                    let first = row.iter().position(|logit| *logit == most);
                    if row[id as usize] != most || logits.dtype() != DType::F32 && first != Some(id as usize) {
                        return Err(format!("token {at}: the next id is {id}, the likeliest {first:?}").into());
                    }
                }
            }
            if stepper.is_captured() != captured {
                return Err("captured or not, other than asked".into());
            }
            stepper.clear()?;
        }
    }
    Ok(())
}

/// A captured stepper that is resized: sequences change places and get more room, then some leave, and steps are captured
/// again over the new memory. Against a forward of all tokens, in f32.
pub(super) fn resized(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() })?;
    let ids: Vec<u32> = (0..(SEQUENCES * TOKENS) as u32).map(|i| i.wrapping_mul(2_654_435_761) % 512).collect();
    let ids = Tensor::from_vec(ids, (SEQUENCES, TOKENS), &Device::Cpu)?;
    let (expected, rows) = (model.forward(&ids)?, ids.to_vec2::<u32>()?);
    // Behind so many tokens, the stepper's sequences that stay, and room for so many tokens. More than windows and the
    // block of a cache's attention lie between.
    let changes = [(50, vec![2, 0, 1], 60), (60, vec![1, 2], 130), (130, vec![1], TOKENS)];
    let mut stepper = model.stepper(SEQUENCES, 50)?;
    stepper.feed(&ids.narrow(1, 0, 45)?)?;
    let mut held: Vec<usize> = (0..SEQUENCES).collect();
    let id = |row: usize, at: usize| rows[row][at];
    for at in 45..TOKENS {
        if let Some((_, keep, capacity)) = changes.iter().find(|(when, ..)| *when == at) {
            stepper.resize(keep, *capacity)?;
            held = keep.iter().map(|row| held[*row]).collect();
            if stepper.is_captured() {
                return Err(format!("token {at}: a graph over memory that went").into());
            }
        }
        stepper.set_next_ids(&held.iter().map(|row| id(*row, at)).collect::<Vec<_>>())?;
        let logits = stepper.step()?.copy()?;
        if !stepper.is_captured() {
            return Err(format!("token {at}: not captured: {:?}", stepper.capture_error()).into());
        }
        for (i, row) in held.iter().enumerate() {
            let error = relative(&logits.get(i)?, &expected.get(*row)?.get(at)?)?;
            if error.is_nan() || error > F32 {
                return Err(format!("sequence {row}, token {at}: logits differ by {error:e}").into());
            }
        }
    }
    Ok(())
}

/// Texts over a replayed static cache against those over a cache that grows, in f32.
pub(super) fn texts(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::F32), ..LoadOptions::default() })?;
    for requests in [requests(false), requests(true)] {
        let [fixed, growing] = [CacheKind::Static, CacheKind::Growing].map(|kind| generate(&model, kind, &requests));
        if fixed? != growing? {
            return Err("the texts differ".into());
        }
    }
    Ok(())
}

/// Greedy tokens in bf16: each has the largest logit of a forward of all tokens before it, or one as near to it as two
/// ways to round are apart.
pub(super) fn greedy(config: &Value, tolerance: f64) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() })?;
    let requests = requests(false);
    for (request, tokens) in requests.iter().zip(generate(&model, CacheKind::Static, &requests)?) {
        let all: Vec<u32> = request.prompt.iter().chain(&tokens).copied().collect();
        let ids = Tensor::from_slice(&all, (1, all.len()), &Device::Cpu)?;
        let logits = model.forward(&ids)?.squeeze(0)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        for (at, token) in (request.prompt.len()..).zip(tokens) {
            let row = &logits[at - 1];
            let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            // `tolerance` is of the row's norm; an entry's error is at most the whole row's.
            let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let behind = most - f64::from(row[token as usize]);
            if behind.is_nan() || behind > 2.0 * tolerance * norm {
                return Err(format!("token {at}: {behind} behind the likeliest").into());
            }
        }
    }
    Ok(())
}

/// A model's static cache is captured with the first step of a token, and again where rows leave.
pub(super) fn captured_again(config: &Value) -> Result<()> {
    let device = moebius::candle::device_for_capture(0)?;
    let model = load(config, &device, LoadOptions { dtype: Some(DType::BF16), ..LoadOptions::default() })?;
    let request = CacheRequest { sequences: 4, prompt_tokens: 3, max_tokens: 20, kind: CacheKind::Static };
    let mut cache = Decoder::cache(&model, request)?;
    let ids = |rows: usize, len: usize| Tensor::ones((rows, len), DType::U32, &Device::Cpu);
    model.step(&ids(4, 3)?, &mut cache)?;
    let mut captured = vec![!cache.is_captured()];
    model.step(&ids(4, 1)?, &mut cache)?;
    captured.push(cache.is_captured());
    let moved = model.keep(&[2], &mut cache)?;
    captured.push(!cache.is_captured());
    let logits = model.step(&ids(1, 1)?, &mut cache)?;
    captured.push(cache.is_captured());
    match (moved, &captured[..], logits.dims()) {
        (true, [true, true, true, true], [1, 512]) => Ok(()),
        found => Err(format!("{found:?}").into()),
    }
}
