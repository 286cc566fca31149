//! Sums over ranks whose variables or gradients differ.

use super::*;

/// Sums in f32 of bf16 variables where a rank has no gradient of one: every rank has the sum in f32.
fn an_absent_gradient_has_the_other_ranks_type() -> AnyResult<()> {
    let types = [DType::BF16, DType::F32, DType::F16, DType::F64];
    for (count, wide) in [2, 4].into_iter().flat_map(|count| [(count, false), (count, true)]) {
        let results = ranks(count, TIMEOUT, |group| {
            let vars: Vec<Var> =
                types.into_iter().map(|dtype| wide_tokens(0..2, 3, dtype, &Device::Cpu)).collect::<AnyResult<_>>()?;
            let mut main = if wide { MainGradients::in_f32() } else { MainGradients::new() };
            let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu)?;
            for (at, var) in vars.iter().enumerate() {
                // Each has none on one rank.
                if at % count != group.rank() {
                    let factor = 1.0 + group.rank() as f64 / 512.0;
                    loss = ((var.sqr()?.to_dtype(DType::F64)?.sum_all()? * factor)? + loss)?;
                }
            }
            main.backward(&loss)?;
            reduce_gradients(&group.clone().into(), &vars, main.store_mut())?;
            let sum = |var: &Var| -> AnyResult<_> {
                let sum = main.get(var)?;
                Ok((sum.dtype(), sum.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?))
            };
            vars.iter().map(sum).collect::<AnyResult<Vec<_>>>()
        });
        let results = results.into_iter().collect::<AnyResult<Vec<_>>>()?;
        for (at, own) in types.into_iter().enumerate() {
            let expected = if wide && own != DType::F64 { DType::F32 } else { own };
            assert_eq!(results[0][at].0, expected);
            assert!(results[0][at].1.iter().any(|v| *v != 0.0));
            assert!(results.iter().all(|rank| rank[at] == results[0][at]), "{own:?}: {results:?}");
        }
    }
    Ok(())
}

/// Ranks that list other variables, or others first, sum nothing, and work on.
fn variables_that_differ_are_refused_before_sums() -> AnyResult<()> {
    type Make = fn(usize) -> candle_core::Result<Vec<Var>>;
    let cases: [Make; 3] = [
        |rank| {
            let [first, second] = if rank == CULPRIT { [4, 3] } else { [3, 4] };
            Ok(vec![Var::ones(first, DType::F32, &Device::Cpu)?, Var::ones(second, DType::F32, &Device::Cpu)?])
        },
        |rank| {
            let dims = if rank == CULPRIT { (2, 3) } else { (3, 2) };
            Ok(vec![Var::ones(dims, DType::F32, &Device::Cpu)?])
        },
        |rank| {
            let dtype = if rank == CULPRIT { DType::BF16 } else { DType::F32 };
            Ok(vec![Var::ones(4, dtype, &Device::Cpu)?])
        },
    ];
    for (count, make) in [2, 4].into_iter().flat_map(|count| cases.map(|make| (count, make))) {
        ranks(count, TIMEOUT, |group| {
            let vars = make(group.rank())?;
            let of = |vars: &[Var]| -> candle_core::Result<GradStore> {
                let sums = vars.iter().map(|var| var.to_dtype(DType::F32)?.sum_all());
                sums.reduce(|a, b| a? + b?).ok_or_else(|| candle_core::Error::msg("no variable"))??.backward()
            };
            let mut gradients = of(&vars)?;
            let group = group.into();
            let error = reduce_gradients(&group, &vars, &mut gradients).expect_err("other variables");
            let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "variables");
            assert!(named, "{error}");
            for var in &vars {
                let values = gradients.get(var).ok_or("no gradient")?.flatten_all()?.to_dtype(DType::F32)?;
                assert!(values.to_vec1::<f32>()?.iter().all(|v| *v == 1.0));
            }
            let same = make(0)?;
            let mut gradients = of(&same)?;
            reduce_gradients(&group, &same, &mut gradients)?;
            let sum = gradients.get(&same[0]).ok_or("no gradient")?.flatten_all()?;
            assert!(sum.to_vec1::<f32>()?.iter().all(|v| *v == count as f32));
            Ok(())
        })
        .into_iter()
        .collect::<AnyResult<Vec<_>>>()?;
    }
    Ok(())
}

/// One rank has its gradients in f32, the others in bf16, and one has none: their sums would step replicas apart.
fn gradients_of_another_type_are_an_error_on_every_rank() -> AnyResult<()> {
    ranks(4, TIMEOUT, |group| {
        let group_rank = group.rank();
        let var = wide_tokens(0..2, 3, DType::BF16, &Device::Cpu)?;
        let mut main = if group.rank() == 1 { MainGradients::in_f32() } else { MainGradients::new() };
        match group.rank() {
            3 => main.backward(&Var::zeros((), DType::F32, &Device::Cpu)?.sqr()?)?,
            _ => main.backward(&var.to_dtype(DType::F32)?.sqr()?.sum_all()?)?,
        }
        let vars = [var];
        // All are compared before the first bucket is summed.
        let (first, second) = (Var::ones(5, DType::F32, &Device::Cpu)?, vars[0].clone());
        main.store_mut().insert(&first, first.ones_like()?);
        let vars = [first, second];
        let before = main.get(&vars[1]).ok().map(flat).transpose()?;
        let mut comm = group.lock();
        let error = reduce_gradients_over(comm.dispatcher().communicator(), &Cpu::new(), &vars, 1, main.store_mut());
        let error = error.expect_err("another type");
        match error_of(&error) {
            Some(Error::Invalid { name, found, .. }) => {
                assert!(name.contains("bf16") && found.contains("1 of the 3 ranks"), "{error}");
            }
            other => panic!("{other:?} {error}"),
        }
        assert_eq!(flat(main.get(&vars[0])?)?, [1.0; 5]);
        assert_eq!(main.get(&vars[1]).ok().map(flat).transpose()?, before);
        // Ranks that cut their buckets otherwise would be in other collectives.
        let bytes = if group_rank == CULPRIT { 1 } else { 2 };
        let mut all = GradStore::default();
        let error = reduce_gradients_over(comm.dispatcher().communicator(), &Cpu::new(), &vars, bytes, &mut all);
        let error = error.expect_err("other buckets");
        let named = matches!(error_of(&error), Some(Error::Invalid { name, .. }) if name == "bucket_bytes");
        assert!(named, "{error}");
        Ok(())
    })
    .into_iter()
    .collect::<AnyResult<Vec<_>>>()?;
    Ok(())
}

tests! {
    fn() -> AnyResult<()>;
    variables_that_differ_are_refused_before_sums,
    an_absent_gradient_has_the_other_ranks_type,
    gradients_of_another_type_are_an_error_on_every_rank,
}
