//! Wrong use: typed errors on every rank.

use super::*;

/// A dispatch that is given something else by the last rank.
fn bad_dispatch(moe: &DispatchCombine, bad: &str) -> AnyResult<candle_core::Result<Dispatched>> {
    let device = moe.group().device();
    let f32s = |dims: (usize, usize)| Tensor::ones(dims, DType::F32, device);
    let (mut x, mut ids, mut weights) = (f32s((4, H))?, choices(0..4, device)?, f32s((4, 2))?);
    match bad {
        "width" => x = f32s((4, H + 1))?,
        "cube" => x = x.reshape((2, 2, H))?,
        "integer x" => x = x.to_dtype(DType::U32)?,
        "x and weights of another type" => (x, weights) = (x.to_dtype(DType::F64)?, weights.to_dtype(DType::F64)?),
        "bf16 weights" => weights = weights.to_dtype(DType::BF16)?,
        "more weights" => weights = f32s((4, 3))?,
        "fewer ids" => ids = choices(0..3, device)?,
        "floating ids" => ids = ids.to_dtype(DType::F32)?,
        "an expert too far" => ids = Tensor::full(EXPERTS as u32, (4, 2), device)?,
        "an expert twice" => ids = Tensor::zeros((4, 2), DType::U32, device)?,
        other => return Err(format!("no such case: {other}").into()),
    }
    Ok(moe.dispatch(&x, &ids, &weights))
}

pub(super) fn good(moe: &DispatchCombine) -> AnyResult<Dispatched> {
    let device = moe.group().device();
    let ones = |dims| Tensor::ones(dims, DType::F32, device);
    Ok(moe.dispatch(&ones((4, H))?, &choices(0..4, device)?, &ones((4, 2))?)?)
}

/// A whole step, after which the group must be usable.
pub(super) fn whole(moe: &DispatchCombine) -> AnyResult<()> {
    let received = good(moe)?;
    received.combine(&received.rows)?.sum_all()?.backward()?;
    Ok(())
}

/// The last rank's error is typed; that of the others names the rank.
fn refused(name: &str, rank: usize, last: usize, error: &candle_core::Error) {
    let own = error_of(error).unwrap_or_else(|| panic!("{name}, rank {rank}: {error}"));
    let as_meant = match own {
        Error::Peer { peer, .. } => rank != last && *peer == last,
        Error::ConfigMismatch { .. } => name == "x and weights of another type",
        Error::ExpertId { rank: culprit, .. } => *culprit == last,
        Error::Invalid { .. } | Error::Shape { .. } | Error::DType { .. } => rank == last,
        _ => false,
    };
    assert!(as_meant, "{name}, rank {rank}: {own:?}");
}

fn wrong_tensors_are_typed_errors_on_every_rank(place: &Place) -> AnyResult<()> {
    let dispatches = [
        "width",
        "cube",
        "integer x",
        "x and weights of another type",
        "bf16 weights",
        "more weights",
        "fewer ids",
        "floating ids",
        "an expert too far",
        "an expert twice",
    ];
    for count in place.cuts().into_iter().map(|cuts| cuts.len() - 1) {
        let last = count - 1;
        on_ranks(place, count, |group| {
            let device = group.device();
            let moe = DispatchCombine::new(config(), group)?;
            for bad in dispatches {
                // Alone, f64 tokens are as good as any; a GPU tells of ids later.
                if count == 1 && bad == "x and weights of another type" || !place.is_cpu() && bad.starts_with("an ") {
                    continue;
                }
                let made = if group.rank() == last { bad_dispatch(&moe, bad)? } else { good(&moe).map_err(as_candle) };
                let error = made.err().ok_or_else(|| format!("{bad}: taken"))?;
                refused(bad, group.rank(), last, &error);
                whole(&moe)?;
            }
            for bad in ["type", "width", "rows", "flat"] {
                let received = good(&moe)?;
                let n = received.rows.dims()[0];
                let outputs = match (group.rank() == last, bad) {
                    (true, "type") => received.rows.to_dtype(DType::BF16)?,
                    (true, "width") => Tensor::zeros((n, H - 1), DType::F32, device)?,
                    (true, "rows") => Tensor::zeros((n + 1, H), DType::F32, device)?,
                    (true, _) => received.rows.flatten_all()?,
                    _ => received.rows.clone(),
                };
                let error = received.combine(&outputs).err().ok_or_else(|| format!("{bad}: taken"))?;
                refused(bad, group.rank(), last, &error);
                whole(&moe)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// candle's error again, which the helpers box.
fn as_candle(error: crate::support::AnyError) -> candle_core::Error {
    match error.downcast::<candle_core::Error>() {
        Ok(error) => *error,
        Err(other) => candle_core::Error::msg(other),
    }
}

fn a_layer_that_the_group_has_no_experts_for_is_refused(place: &Place) -> AnyResult<()> {
    on_ranks(place, place.count(), |group| {
        let error = DispatchCombine::new(MoeConfig::new(H, 24, EXPERTS * 2, 2), group).err().ok_or("taken")?;
        assert!(matches!(error_of(&error), Some(Error::Invalid { .. })), "{error}");
        Ok(())
    })?;
    Ok(())
}

fn a_second_backward_is_an_error_before_any_collective(place: &Place) -> AnyResult<()> {
    let count = place.count();
    on_ranks(place, count, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let received = good(&moe)?;
        let loss = received.combine(&received.rows)?.sum_all()?;
        loss.backward()?;
        let calls = || group.on::<Cpu>().map(|group| group.lock().dispatcher().communicator().calls());
        let before = calls();
        let error = loss.backward().err().ok_or("taken")?;
        assert!(matches!(error_of(&error), Some(Error::ContextConsumed { .. })), "{error}");
        assert_eq!(calls(), before);
        whole(&moe)
    })?;
    Ok(())
}

fn a_rank_that_is_detached_agrees_to_no_backward(place: &Place) -> AnyResult<()> {
    let count = place.count();
    on_ranks(place, count, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let frozen = group.rank() == count - 1;
        let used = if frozen { moe.detached() } else { moe.clone() };
        let received = good(&used)?;
        let y = received.combine(&received.rows)?;
        assert_eq!(y.track_op(), !frozen);
        if !frozen {
            let error = y.sum_all()?.backward().err().ok_or("taken")?;
            assert!(
                matches!(error_of(&error), Some(Error::BackwardNotAgreed { absent, .. }) if absent == &[count - 1]),
                "{error}"
            );
        }
        whole(&moe)
    })?;
    Ok(())
}

pub(super) fn a_rank_that_fails_among_its_experts_tells_the_others() -> AnyResult<()> {
    on_ranks(&Place::Cpu, 2, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let received = good(&moe)?;
        if group.rank() == 1 {
            moe.refuse("no adapter for expert 5");
        } else {
            let error = received.combine(&received.rows).err().ok_or("taken")?;
            assert!(error.to_string().contains("no adapter for expert 5"), "{error}");
            refused("refuse", 0, 1, &error);
        }
        whole(&moe)
    })?;
    Ok(())
}

/// A number of rows that is not the expert's would shift those behind it; another width or type is no output of combine.
pub(super) fn experts_that_give_other_rows_are_typed_errors() -> AnyResult<()> {
    type Made = fn(&Tensor) -> candle_core::Result<Tensor>;
    let cases: [(Made, &str); 4] = [
        (|rows| Tensor::cat(&[rows, rows], 0), "rows of expert"),
        (|rows| rows.narrow(1, 0, H - 1), "rows of expert"),
        (|rows| rows.unsqueeze(0), "rows of expert"),
        (|rows| rows.to_dtype(DType::F64), "type of expert"),
    ];
    for (made, expected) in cases {
        on_ranks(&Place::Cpu, 2, |group| {
            let moe = DispatchCombine::new(config(), group)?;
            let received = good(&moe)?;
            if group.rank() == 1 {
                let error = received.map_experts(|_, rows, _| made(rows)).expect_err("other rows");
                let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name.starts_with(expected));
                assert!(named, "{error}");
            } else {
                let error = received.combine(&received.rows).err().ok_or("taken")?;
                assert!(error.to_string().contains(expected), "{error}");
            }
            whole(&moe)
        })?;
    }
    Ok(())
}

pub(super) fn a_router_that_fails_tells_the_others() -> AnyResult<()> {
    on_ranks(&Place::Cpu, 2, |group| {
        let moe = DispatchCombine::new(config(), group)?;
        let device = group.device();
        for bad in ["NaN", "width", "type", "bias"] {
            let logits = |value: f32, width| Tensor::full(value, (4, width), device);
            let bias = Tensor::zeros(EXPERTS, DType::F32, device)?;
            let error = match (group.rank(), bad) {
                (1, "NaN") => moe.route(&logits(f32::NAN, EXPERTS)?, None).err(),
                (1, "width") => moe.route(&logits(0.0, EXPERTS + 1)?, None).err(),
                (1, "type") => moe.route(&logits(0.0, EXPERTS)?.to_dtype(DType::BF16)?, None).err(),
                (1, _) => moe.route(&logits(0.0, EXPERTS)?, Some(&bias)).err(),
                _ => good(&moe).map_err(as_candle).err(),
            };
            let error = error.ok_or_else(|| format!("{bad}: taken"))?;
            match error_of(&error) {
                Some(Error::Peer { peer: 1, .. }) if group.rank() == 0 => {}
                Some(own) if group.rank() == 1 && !matches!(own, Error::Peer { .. }) => {}
                _ => panic!("{bad}, rank {}: {error}", group.rank()),
            }
            whole(&moe)?;
        }
        Ok(())
    })?;
    Ok(())
}

tests! {
    fn(&Place) -> AnyResult<()>;
    wrong_tensors_are_typed_errors_on_every_rank,
    a_layer_that_the_group_has_no_experts_for_is_refused,
    a_second_backward_is_an_error_before_any_collective,
    a_rank_that_is_detached_agrees_to_no_backward,
}
