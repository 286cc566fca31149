//! Outputs in memory that the caller gives.

use super::*;

/// Into memory of the caller's: the values of candle's own, at the same addresses each time.
fn outputs_in_given_memory_have_the_same_values(place: &Place) -> AnyResult<()> {
    for cuts in place.cuts() {
        on_ranks(place, cuts.len() - 1, |group| {
            let rows = cuts[group.rank()]..cuts[group.rank() + 1];
            let options = DispatchOptions { capacity: Capacity::Static(CAPACITY), ..Default::default() };
            let layer = Layer::new(config(), 0)?.with_dispatch(options);
            let moe = DispatchCombine::new(layer, group)?.detached();
            let device = group.device();
            let (x, ids) = (table(3, &rows, H, DType::F32, device)?, choices(rows.clone(), device)?);
            let weights = table(4, &rows, 2, DType::F32, device)?;
            let (into, of) = (poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?);
            let y = poisoned((rows.len(), H), device)?;
            for _ in 0..2 {
                let expected = moe.dispatch(&x, &ids, &weights)?;
                let outputs = DispatchedRowsMut { rows: &into, weights: &of };
                let found = moe.dispatch_into(&x, &ids, &weights, outputs)?;
                assert_eq!(flat(&into)?, flat(&expected.rows)?);
                assert_eq!(flat(&of)?, flat(&expected.weights)?);
                assert_eq!(flat(&found.rows)?, flat(&into)?, "the rows are that memory");
                assert_eq!(found.segments()?, expected.segments()?);
                let outputs = weighted(&found.rows, &found.weights)?;
                found.combine_into(&outputs, &y)?;
                assert_eq!(flat(&y)?, flat(&expected.combine(&outputs)?)?);
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn poisoned(shape: impl Into<candle_core::Shape>, device: &Device) -> AnyResult<Tensor> {
    Ok(Tensor::full(f32::NAN, shape, device)?)
}

/// Memory that does not fit: typed, on every rank, and the group goes on.
fn memory_that_does_not_fit_is_refused(place: &Place) -> AnyResult<()> {
    const TOKENS: usize = 5;
    let count = place.count();
    let wrong = ["rows", "type", "weights", "layout", "x's own", "one for both", "tracked", "y", "y's own"];
    for (number, wrong) in wrong.into_iter().enumerate() {
        let failed = on_ranks(place, count, |group| {
            let (device, last) = (group.device(), group.rank() == count - 1);
            let options = DispatchOptions { capacity: Capacity::Static(CAPACITY), ..Default::default() };
            let layer = Layer::new(config(), number as u32)?.with_dispatch(options);
            let tracked = DispatchCombine::new(layer, group)?;
            let moe = tracked.detached();
            let (x, ids) = (poisoned((TOKENS, H), device)?.zeros_like()?, choices(0..TOKENS, device)?);
            let weights = table(4, &(0..TOKENS), 2, DType::F32, device)?;
            let [mut rows, mut of] = [poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?];
            let mut y = poisoned((TOKENS, H), device)?;
            let outputs = poisoned((CAPACITY, H), device)?.zeros_like()?;
            match wrong {
                _ if !last => {}
                "rows" => rows = poisoned((CAPACITY - 1, H), device)?,
                "type" => rows = rows.to_dtype(DType::F64)?,
                "weights" => of = poisoned(CAPACITY + 1, device)?,
                "layout" => rows = poisoned((H, CAPACITY), device)?.t()?,
                "x's own" => rows = x.clone(),
                "one for both" => of = rows.flatten_all()?.narrow(0, 0, CAPACITY)?,
                "y" => y = poisoned((TOKENS, H + 1), device)?,
                "y's own" => y = outputs.clone(),
                _ => {}
            }
            let into = DispatchedRowsMut { rows: &rows, weights: &of };
            let with = if last && wrong == "tracked" { &tracked } else { &moe };
            let result =
                with.dispatch_into(&x, &ids, &weights, into).and_then(|found| found.combine_into(&outputs, &y));
            let error = result.expect_err(wrong);
            assert!(error_of(&error).is_some(), "{wrong}: {error}");
            let text = error.to_string();
            // The group goes on.
            let [rows, of] = [poisoned((CAPACITY, H), device)?, poisoned(CAPACITY, device)?];
            let into = DispatchedRowsMut { rows: &rows, weights: &of };
            let found = moe.dispatch_into(&x, &ids, &weights, into)?;
            found.combine_into(&outputs, &poisoned((TOKENS, H), device)?)?;
            Ok(text)
        })?;
        let own = &failed[count - 1];
        assert!(own.contains("_into") || own.contains("outputs"), "{wrong}: {own}");
    }
    Ok(())
}

tests! {
    fn(&Place) -> AnyResult<()>;
    outputs_in_given_memory_have_the_same_values,
    memory_that_does_not_fit_is_refused,
}
