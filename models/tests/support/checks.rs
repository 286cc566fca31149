//! What holds for the decoder of every golden folder, on whatever device its model is. Failures are panics that name the
//! folder.
#![allow(dead_code, reason = "every suite takes a part")]

use std::collections::HashMap;

use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use moebius::checkpoint::BlockParams;
use moebius::cpu::{Cpu, HostBuffer};
use moebius::layer::ParamKind;
use moebius_models::{Model, Point};

use crate::support::{Golden, Rotation, relative};

/// Lengths of a prompt of `first` tokens and of pieces behind it, `s` tokens in all, the last two alone.
pub fn pieces(first: usize, s: usize) -> Vec<usize> {
    let first = first.min(s);
    let rest = (s - first).saturating_sub(5);
    let mut left = s - first;
    let lengths = [2, 1, rest, 1, 1].map(|len| {
        let len = len.min(left);
        left -= len;
        len
    });
    let mut pieces = vec![first];
    pieces.extend(lengths);
    pieces.retain(|len| *len > 0);
    pieces
}

/// A prompt, more pieces, and token by token, of `ids` `[B, S]` against the logits of all tokens at once. Both have errors
/// of a forward, `tolerance` at most. Nothing where rotations change with every token: earlier ones have seen others than
/// a forward of all.
pub fn decoding(golden: &Golden, model: &Model, ids: &Tensor, tolerance: f64) {
    let s = ids.dim(1).expect("tokens");
    let first = match golden.rotation() {
        Rotation::OfEveryLength => return,
        // A prompt beyond the change has one rotation alone.
        Rotation::TwoFrequencies { original } if s > original => original + 1,
        Rotation::TwoFrequencies { .. } | Rotation::Fixed => 5,
    };
    let expected = model.forward(ids).expect("logits");
    let mut cache = model.cache();
    let mut start = 0;
    for len in pieces(first, s) {
        let logits = model.decode(&ids.narrow(1, start, len).expect("tokens"), &mut cache).expect("logits");
        let error = relative(&logits, &expected.narrow(1, start, len).expect("positions"));
        let at = format!("{}, tokens {start}..{}", golden.name, start + len);
        assert!(error <= 2.0 * tolerance, "{at}: logits differ by {error:e}");
        start += len;
        assert_eq!(cache.len(), start);
    }
    assert_eq!(start, s);
    cache.clear();
    assert!(cache.is_empty());
}

/// Whether a stepper can be had, and has tokens enough to be checked.
pub fn can_step(golden: &Golden) -> bool {
    golden.rotation() == Rotation::Fixed && golden.ids().dim(1).expect("tokens") >= 8
}

/// Steps over memory that stays, of `ids` `[1, S]`: a prompt in two pieces, then a token at a time, twice over the same
/// memory. As [`decoding`]. How many of the steppers replay a graph at their end.
pub fn stepping(golden: &Golden, model: &Model, ids: &Tensor, tolerance: f64) -> usize {
    let s = ids.dim(1).expect("tokens");
    let expected = model.forward(ids).expect("logits");
    let check = |at: usize, logits: &Tensor| {
        let error = relative(logits, &expected.narrow(1, at, 1).and_then(|t| t.squeeze(1)).expect("a position"));
        assert!(error <= 2.0 * tolerance, "{}, token {at}: logits differ by {error:e}", golden.name);
    };
    let mut graphs = 0;
    for (capacity, first) in [(s, 5), (model.context().min(s + 3), s - 4)] {
        let mut stepper = model.stepper(1, capacity).expect("a stepper");
        for round in 0..2 {
            let mut start = 0;
            for len in [first, 3] {
                let logits = stepper.feed(&ids.narrow(1, start, len).expect("tokens")).expect("logits");
                start += len;
                check(start - 1, &logits);
            }
            for at in start..s {
                let id = ids.narrow(1, at, 1).and_then(|t| t.to_dtype(DType::U32)?.to_vec2::<u32>()).expect("an id");
                stepper.set_next_ids(&id[0]).expect("an id of the vocabulary");
                check(at, stepper.step().expect("logits"));
            }
            assert_eq!((stepper.len(), round), (s, round));
            assert_eq!(stepper.capture_error(), None, "{}", golden.name);
            graphs += usize::from(round == 1 && stepper.is_captured());
            stepper.clear().expect("an empty stepper");
            assert!(stepper.is_empty());
        }
    }
    graphs
}

/// Two sequences of which both change places and get more room, and then one goes on alone, against the logits of a
/// forward. As [`decoding`]; whether every step was `captured`, before and behind each change.
pub fn resizing(golden: &Golden, model: &Model, tolerance: f64, captured: bool) {
    let ids =
        Tensor::cat(&[golden.row(0), golden.row(1)], 0).and_then(|ids| ids.to_dtype(DType::U32)).expect("two rows");
    let s = ids.dim(1).expect("tokens");
    let (expected, rows) = (model.forward(&ids).expect("logits"), ids.to_vec2::<u32>().expect("ids"));
    let id = |row: usize, at: usize| rows[row][at];
    let mut stepper = model.stepper(2, 4).expect("a stepper");
    stepper.feed(&ids.narrow(1, 0, 3).expect("tokens")).expect("logits");
    let mut held = vec![0, 1];
    for at in 3..s {
        // Room for one more token of both, the other way around; then for all, and the first one alone.
        let resized = [(4, vec![1, 0], vec![1, 0], 5), (5, vec![1], vec![0], s)];
        if let Some((_, keep, left, capacity)) = resized.into_iter().find(|(when, ..)| *when == at) {
            stepper.resize(&keep, capacity).expect("another size");
            held = left;
            assert_eq!((stepper.sequences(), stepper.len(), stepper.capacity()), (held.len(), at, capacity));
            assert!(!stepper.is_captured(), "{}: a graph over memory that went", golden.name);
        }
        let next: Vec<u32> = held.iter().map(|row| id(*row, at)).collect();
        stepper.set_next_ids(&next).expect("ids of the vocabulary");
        let logits = stepper.step().expect("logits");
        for (i, row) in held.iter().enumerate() {
            let expected = expected.get(*row).and_then(|t| t.get(at)).expect("a position");
            let error = relative(&logits.get(i).expect("a row"), &expected);
            assert!(error <= 2.0 * tolerance, "{}, row {row}, token {at}: {error:e}", golden.name);
        }
        assert_eq!(stepper.is_captured(), captured, "{}, token {at}: {:?}", golden.name, stepper.capture_error());
    }
    let refused = |result: moebius_models::Result<()>, word: &str| {
        let text = result.expect_err(word).to_string();
        assert!(text.contains("Stepper::resize") && text.contains(word), "{text}");
    };
    refused(stepper.resize(&[1], s), "sequence 1: there are 1");
    refused(stepper.resize(&[0], s - 1), "room for");
    refused(stepper.resize(&[0], model.context() + 1), "room for");
    stepper.resize(&[], s).expect("a rank without sequences");
    assert_eq!(stepper.sequences(), 0);
}

/// The experts that the first block with experts chose, each token's in their order.
pub fn choices(golden: &Golden, model: &Model) -> Vec<Vec<u32>> {
    let layer = golden.layer();
    let mut chosen = None;
    let mut tap = |point: Point, x: Tensor| {
        if point == (Point::Choices { layer }) {
            chosen = Some(x.clone());
        }
        Ok(x)
    };
    model.forward_tapped(golden.ids(), &mut tap).expect("logits");
    sorted(&chosen.expect("choices"))
}

/// Each token's choices in order of the experts: within a token their order is free.
pub fn sorted(ids: &Tensor) -> Vec<Vec<u32>> {
    let mut rows = ids.to_dtype(DType::U32).and_then(|ids| ids.to_vec2::<u32>()).expect("choices");
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows
}

/// One rank's share of the gradients around and in a block.
#[derive(Debug)]
pub struct BlockGradients {
    input: Tensor,
    output: Tensor,
    params: Vec<(ParamKind, Tensor)>,
}

/// Positions of a folder's sequences that have a next token: the loss is their mean.
fn positions(golden: &Golden) -> f64 {
    let (rows, tokens) = golden.ids().dims2().expect("[B, S]");
    (rows * (tokens - 1)) as f64
}

/// Gradient of this rank's part `ids` of the mean loss, around and in the first block with experts, with zeros added
/// where gradients are wanted.
pub fn block_gradients(golden: &Golden, model: &Model, ids: &Tensor) -> CandleResult<BlockGradients> {
    let layer = golden.layer();
    let dtype = model.vars()[0].1.dtype();
    // A GPU has no memory of no bytes; a rank without sequences is a CPU's here.
    let zeros = Tensor::zeros((ids.elem_count(), model.hidden_size()), dtype, model.device())?;
    let (input, output) = (Var::from_tensor(&zeros)?, Var::from_tensor(&zeros)?);
    let mut tap = |point: Point, x: Tensor| match point {
        // candle forgets the right operand of empty tensors: the model's own stands first.
        Point::MoeInput { layer: l } if l == layer => x + input.as_tensor(),
        Point::MoeOutput { layer: l } if l == layer => x + output.as_tensor(),
        _ => Ok(x),
    };
    let loss = model.loss_tapped(ids, &mut tap).expect("a loss");
    let grads = (loss.sum / positions(golden))?.backward()?;
    let moe = model.moe(layer).expect("experts");
    let trained = ParamKind::ALL.into_iter().filter(|kind| *kind != ParamKind::SelectionBias);
    let of = |kind: ParamKind| Some((kind, grads.get(moe.param(kind)?).expect("a gradient").clone()));
    let around = |var: &Var| grads.get(var).unwrap_or(&zeros).clone();
    Ok(BlockGradients { input: around(&input), output: around(&output), params: trained.filter_map(of).collect() })
}

/// The gradients of a whole block: experts one behind the other, the sum of what all ranks hold.
fn whole(parts: &[BlockGradients]) -> CandleResult<BlockParams> {
    let mut tensors = HashMap::new();
    for (index, (kind, first)) in parts[0].params.iter().enumerate() {
        let shares: Vec<&Tensor> = parts.iter().map(|part| &part.params[index].1).collect();
        let grad = match kind.is_replicated() {
            false => Tensor::cat(&shares, 0)?,
            true => shares[1..].iter().try_fold(first.clone(), |sum, share| sum + *share)?,
        };
        let values = HostBuffer::F32(grad.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?);
        tensors
            .insert(*kind, moebius::Tensor::from_buffer(values, moebius::DType::F32, grad.dims()).expect("a tensor"));
    }
    Ok(BlockParams::new(tensors.into_iter().collect()).expect("a router and experts"))
}

fn in_candle(t: moebius::Tensor<Cpu>) -> Tensor {
    let dims = t.dims().to_vec();
    let HostBuffer::F32(values) = t.into_buffer() else { panic!("f32") };
    Tensor::from_vec(values, dims, &Device::Cpu).expect("a tensor")
}

/// By name the relative errors of the ranks' gradients of what enters and leaves the block, and of all its parameters.
pub fn block_gradient_errors(golden: &Golden, parts: &[BlockGradients]) -> Vec<(String, f64)> {
    let g = &golden.tensors;
    let joined = |of: &dyn Fn(&BlockGradients) -> Tensor| {
        let parts: Vec<Tensor> = parts.iter().map(of).collect();
        Tensor::cat(&parts, 0).and_then(|t| t.reshape(g["grad_moe_output"].dims())).expect("all rows")
    };
    let mut errors = vec![
        ("output".to_string(), relative(&joined(&|p| p.output.clone()), &g["grad_moe_output"])),
        ("input".to_string(), relative(&joined(&|p| p.input.clone()), &g["grad_moe_input"])),
    ];
    let block = whole(parts).expect("a whole block");
    let disk = golden.checkpoint.disk_tensors(golden.layer(), &block, 0, 1).expect("tensors on disk");
    let mut given = g.keys().filter(|name| name.starts_with("grad.")).count();
    for (name, grad) in disk {
        let Some(expected) = g.get(&format!("grad.{name}")) else { panic!("{name}: no such golden") };
        errors.push((name, relative(&in_candle(grad), expected)));
        given -= 1;
    }
    assert_eq!(given, 0, "{}: gradients without a parameter", golden.name);
    errors
}

/// Gradients that a folder has of parameters outside the experts, by name.
fn expected_replicated(golden: &Golden) -> impl Iterator<Item = (&str, &Tensor)> {
    golden.tensors.iter().filter_map(|(name, t)| Some((name.strip_prefix("whole_grad.")?, t)))
}

/// By name those of them that a rank with sequences `ids` has of its part of the mean loss.
pub fn replicated_gradients(golden: &Golden, model: &Model, ids: &Tensor) -> HashMap<String, Tensor> {
    let mut names = expected_replicated(golden).map(|(name, _)| name).peekable();
    if names.peek().is_none() {
        return HashMap::new();
    }
    let loss = model.loss(ids).expect("a loss");
    let grads = (loss.sum / positions(golden)).and_then(|loss| loss.backward()).expect("gradients");
    let own = |name: &str| {
        let (_, var) = model.vars().iter().find(|(n, _)| n == name).expect("a variable");
        Some((name.to_string(), grads.get(var)?.clone()))
    };
    names.filter_map(own).collect()
}

/// By name the relative errors of their sums over the ranks.
pub fn replicated_gradient_errors(golden: &Golden, parts: &[HashMap<String, Tensor>]) -> Vec<(String, f64)> {
    // A key's bias shifts all scores of a query alike, which softmax undoes: its gradient is rounding alone, but for what
    // a rotation behind it leaves.
    let expected = expected_replicated(golden).filter(|(name, _)| !name.ends_with("k_proj.bias"));
    let error = |(name, expected): (&str, &Tensor)| {
        // A rank without sequences has none.
        let given: Vec<&Tensor> = parts.iter().filter_map(|part| part.get(name)).collect();
        let sum = given[1..].iter().try_fold(given[0].clone(), |sum, t| sum + *t).expect("a sum");
        (name.to_string(), relative(&sum, expected))
    };
    expected.map(error).collect()
}
