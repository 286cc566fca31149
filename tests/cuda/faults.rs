//! What a caller gets wrong is an error, also where only the GPU can see it.

use moebius::config::Activation;
use moebius::cuda::Cuda;
use moebius::kernels::*;
use moebius::{DType, Error, Result, Tensor};

use crate::harness::{Case, Data, gpu, on_gpu};

fn tensor<T: moebius::cpu::Element>(cuda: &Cuda, values: Vec<T>, dims: &[usize]) -> Result<Tensor<Cuda>> {
    cuda.tensor(&Tensor::from_vec(values, dims)?)
}

#[test]
fn nan_logits_name_token_and_expert() {
    let Some(cuda) = gpu() else { return };
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F32);
    let mut data = Data::new(&case).expect("inputs");
    let mut x = data.x.to_f64();
    x[3 * 16] = f64::NAN;
    data.x = moebius::cpu::Cpu::new().write(&(), &x, DType::F32, &[6, 16]).expect("x");
    let error = on_gpu(&case, &data, &cuda).err();
    assert!(matches!(error, Some(Error::NanLogits { token: 3, expert: 0, .. })), "{error:?}");
    // The next call is not blamed for it.
    on_gpu(&case, &Data::new(&case).expect("inputs"), &cuda).expect("a good run");
}

#[test]
fn maps_outside_are_reported_and_not_followed() -> Result<()> {
    let Some(cuda) = gpu() else { return Ok(()) };
    let source = tensor(&cuda, vec![1f32, 2.0, 3.0, 4.0], &[2, 2])?;
    for (entries, bad) in [(vec![1i32, -1, 0], false), (vec![1, 0, 7], true)] {
        let map = tensor(&cuda, entries, &[3])?;
        let mut out = Tensor::empty(&cuda, DType::F32, &[3, 2])?;
        cuda.gather_rows(&cuda.stream(), GatherRows { source: source.view(), map: map.view(), out: out.view_mut() })?;
        match cuda.check() {
            Ok(()) => {
                assert!(!bad);
                assert_eq!(cuda.read(&cuda.stream(), out.view())?, [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
            }
            Err(e) => assert!(bad && e.to_string().contains("map[2]"), "{e}"),
        }
        cuda.check()?;
    }
    Ok(())
}

#[test]
fn zones_outside_are_reported() -> Result<()> {
    let Some(cuda) = gpu() else { return Ok(()) };
    let x = tensor(&cuda, vec![1f32; 8 * 8], &[8, 8])?;
    let weight = tensor(&cuda, vec![1f32; 3 * 4 * 8], &[3, 4, 8])?;
    for (offsets, counts, good) in
        [([0i64, 4, 4], [3i64, 0, 2], true), ([0, 2, 4], [3, 1, 2], false), ([0, 4, 7], [3, 0, 2], false)]
    {
        let zones = Zones {
            offsets: tensor(&cuda, offsets.to_vec(), &[3])?,
            counts: tensor(&cuda, counts.to_vec(), &[3])?,
            rows: 8,
        };
        let mut out = Tensor::zeros(&cuda, DType::F32, &[8, 4])?;
        let call = Up {
            rows: RowSource::direct(x.view()),
            zones: &zones,
            weight: weight.view(),
            bias: None,
            slot_weights: None,
            activation: Activation::Relu2,
            pre: None,
            out: RowDest::direct(out.view_mut()),
        };
        cuda.up(&cuda.stream(), call)?;
        assert_eq!(cuda.check().is_ok(), good, "{offsets:?} {counts:?}");
        if good {
            let values = cuda.read(&cuda.stream(), out.view())?;
            for slot in 0..8 {
                let filled = [0, 1, 2, 4, 5].contains(&slot);
                assert_eq!(values[slot * 4], if filled { 64.0 } else { 0.0 }, "slot {slot}");
            }
        }
    }
    Ok(())
}

/// Rows with a map and destinations that add, as fused dispatchers use them.
#[test]
fn rows_go_where_the_map_says_and_add() -> Result<()> {
    let Some(cuda) = gpu() else { return Ok(()) };
    let h: Vec<f32> = (0..8 * 4).map(|i| (i % 5) as f32).collect();
    let rows = tensor(&cuda, h.clone(), &[8, 4])?;
    let weight = tensor(&cuda, vec![1f32; 3 * 2 * 4], &[3, 2, 4])?;
    let zones = Zones {
        offsets: tensor(&cuda, vec![0i64, 4, 4], &[3])?,
        counts: tensor(&cuda, vec![3i64, 0, 2], &[3])?,
        rows: 8,
    };
    let map = tensor(&cuda, vec![1i32, -1, 0, -1, 3, 2, -1, -1], &[8])?;
    let mut out = tensor(&cuda, vec![10f32; 4 * 2], &[4, 2])?;
    let dest = RowDest { base: out.view_mut(), map: Some(map.view()), done: None, accumulate: true };
    let call = Down {
        rows: RowSource::direct(rows.view()),
        zones: &zones,
        weight: weight.view(),
        bias: None,
        slot_weights: None,
        out: dest,
    };
    cuda.down(&cuda.stream(), call)?;
    let sum = |slot: usize| 10.0 + f64::from(h[slot * 4..][..4].iter().sum::<f32>());
    let expected: Vec<f64> = [2, 0, 5, 4].iter().flat_map(|s| [sum(*s); 2]).collect();
    assert_eq!(cuda.read(&cuda.stream(), out.view())?, expected);
    cuda.check()
}

#[test]
fn f64_is_refused() {
    let Some(cuda) = gpu() else { return };
    let case = Case::new(moebius::MoeConfig::new(16, 8, 4, 2), 6, DType::F64);
    let error = on_gpu(&case, &Data::new(&case).expect("inputs"), &cuda).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("on CUDA")), "{error:?}");
}
