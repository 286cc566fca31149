//! The seam that fused back-ends override: row maps, tile counters, destinations that add, padding, typed errors.
//! Values are small integers, so every sum is exact in f32 and results are compared for equality.

use std::sync::atomic::{AtomicU32, Ordering};

use moebius::config::{Activation, WeightAt};
use moebius::cpu::Cpu;
use moebius::kernels::*;
use moebius::{DType, Error, Tensor, TensorMut, TensorRef};

const H: usize = 8;
const I: usize = 4;
const EXPERTS: usize = 3;

/// Zones of 3, 0 and 2 filled slots, padded to 4: slots 3, 6 and 7 are padding.
fn zones() -> Zones<Cpu> {
    Zones {
        offsets: Tensor::from_vec(vec![0i64, 4, 4], &[EXPERTS]).unwrap(),
        counts: Tensor::from_vec(vec![3i64, 0, 2], &[EXPERTS]).unwrap(),
        rows: 8,
    }
}

const FILLED: [(usize, usize); 5] = [(0, 0), (1, 0), (2, 0), (4, 2), (5, 2)];

fn integers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % 7) as f32 - 3.0
    };
    (0..count).map(|_| next()).collect()
}

/// relu² without gate keeps integers integers.
fn up_reference(x: &[f32], weight: &[f32], expert: usize) -> Vec<f32> {
    (0..I)
        .map(|i| {
            let row = &weight[(expert * I + i) * H..][..H];
            let sum: f32 = row.iter().zip(x).map(|(w, x)| w * x).sum();
            sum.max(0.0) * sum.max(0.0)
        })
        .collect()
}

struct UpCase {
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl UpCase {
    fn new() -> Self {
        Self { x: integers(8 * H, 1), weight: integers(EXPERTS * I * H, 2) }
    }

    fn run(&self, rows: RowSource<'_, Cpu>, mut out: RowDest<'_, Cpu>) -> moebius::Result<()> {
        let zones = zones();
        let weight = TensorRef::from_slice(&self.weight, &[EXPERTS, I, H])?;
        let call = Up {
            rows: rows.borrow(),
            zones: &zones,
            weight,
            bias: None,
            slot_weights: None,
            activation: Activation::Relu2,
            pre: None,
            out: out.reborrow(),
        };
        Cpu::new().up(&(), call)
    }
}

#[test]
fn padding_is_neither_read_nor_written() {
    let case = UpCase::new();
    let mut x = case.x.clone();
    for pad in [3, 6, 7] {
        x[pad * H..(pad + 1) * H].fill(f32::NAN);
    }
    let mut out = vec![-7.0f32; 8 * I];
    let rows = RowSource::direct(TensorRef::from_slice(&x, &[8, H]).unwrap());
    case.run(rows, RowDest::direct(TensorMut::from_slice(&mut out, &[8, I]).unwrap())).unwrap();
    for (slot, expert) in FILLED {
        assert_eq!(out[slot * I..][..I], up_reference(&x[slot * H..][..H], &case.weight, expert), "slot {slot}");
    }
    for pad in [3, 6, 7] {
        assert_eq!(out[pad * I..][..I], [-7.0; I], "padding slot {pad}");
    }
}

#[test]
fn rows_come_from_where_the_map_says() {
    let case = UpCase::new();
    let map = [7i32, 0, 0, -1, 2, 5, -1, -1];
    let mut out = vec![0f32; 8 * I];
    let base = TensorRef::from_slice(&case.x, &[8, H]).unwrap();
    let rows = RowSource::mapped(base.borrow(), TensorRef::from_slice(&map, &[8]).unwrap());
    case.run(rows, RowDest::direct(TensorMut::from_slice(&mut out, &[8, I]).unwrap())).unwrap();
    for (slot, expert) in FILLED {
        let row = map[slot] as usize;
        assert_eq!(out[slot * I..][..I], up_reference(&case.x[row * H..][..H], &case.weight, expert), "slot {slot}");
    }
}

#[test]
fn rows_go_where_the_map_says_and_add() {
    let case = UpCase::new();
    let map = [1i32, -1, 0, -1, 3, 2, -1, -1];
    let mut out = vec![10.0f32; 4 * I];
    let zones_done: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
    let rows = RowSource::direct(TensorRef::from_slice(&case.x, &[8, H]).unwrap());
    let dest = RowDest {
        base: TensorMut::from_slice(&mut out, &[4, I]).unwrap(),
        map: Some(TensorRef::from_slice(&map, &[8]).unwrap()),
        done: Some(TileCounters { counters: &zones_done, rows_per_tile: 2 }),
        accumulate: true,
    };
    case.run(rows, dest).unwrap();
    for (slot, expert) in FILLED {
        let Ok(row) = usize::try_from(map[slot]) else { continue };
        let expected: Vec<f32> =
            up_reference(&case.x[slot * H..][..H], &case.weight, expert).iter().map(|v| v + 10.0).collect();
        assert_eq!(out[row * I..][..I], expected, "slot {slot}");
    }
    let done: Vec<u32> = zones_done.iter().map(|c| c.load(Ordering::Acquire)).collect();
    assert_eq!(done, [2, 1, 2, 0], "filled slots of each tile of two");
}

#[test]
fn a_gemm_waits_for_the_rows_of_its_producer() {
    let case = UpCase::new();
    let zones = zones();
    let down = integers(EXPERTS * H * I, 3);
    let ready: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
    let hidden: Vec<f32> =
        FILLED.iter().flat_map(|(s, e)| up_reference(&case.x[s * H..][..H], &case.weight, *e)).collect();
    let mut slots = vec![f32::NAN; 8 * I];
    for (i, (slot, _)) in FILLED.iter().enumerate() {
        slots[slot * I..][..I].copy_from_slice(&hidden[i * I..][..I]);
    }
    let mut out = vec![0f32; 8 * H];
    std::thread::scope(|scope| {
        let (ready, slots, down, zones, out) = (&ready, &slots, &down, &zones, &mut out);
        let consumer = scope.spawn(move || {
            let base = TensorRef::from_slice(slots, &[8, I]).unwrap();
            let rows = RowSource {
                ready: Some(TileCounters { counters: ready.as_slice(), rows_per_tile: 2 }),
                ..RowSource::direct(base)
            };
            let call = Down {
                rows,
                zones,
                weight: TensorRef::from_slice(down, &[EXPERTS, H, I]).unwrap(),
                bias: None,
                slot_weights: None,
                out: RowDest::direct(TensorMut::from_slice(out, &[8, H]).unwrap()),
            };
            Cpu::new().down(&(), call).unwrap();
        });
        for (tile, rows) in [(2, 2), (0, 2), (1, 1)] {
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!consumer.is_finished(), "finished before tile {tile} was ready");
            ready[tile].fetch_add(rows, Ordering::Release);
        }
    });
    for (slot, expert) in FILLED {
        let x = &slots[slot * I..][..I];
        let expected: Vec<f32> =
            (0..H).map(|h| down[(expert * H + h) * I..][..I].iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        assert_eq!(out[slot * H..][..H], expected, "slot {slot}");
    }
}

#[test]
fn weight_gradients_sum_over_filled_slots_only_and_add() {
    let mut left = integers(8 * I, 4);
    let mut right = integers(8 * H, 5);
    for pad in [3, 6, 7] {
        left[pad * I..(pad + 1) * I].fill(f32::NAN);
        right[pad * H..(pad + 1) * H].fill(f32::NAN);
    }
    let zones = zones();
    for accumulate in [false, true] {
        let mut out = vec![5.0f32; EXPERTS * I * H];
        let mut bias = vec![5.0f32; EXPERTS * I];
        let call = Wgrad {
            left: RowSource::direct(TensorRef::from_slice(&left, &[8, I]).unwrap()),
            right: RowSource::direct(TensorRef::from_slice(&right, &[8, H]).unwrap()),
            slot_weights: None,
            zones: &zones,
            out: TensorMut::from_slice(&mut out, &[EXPERTS, I, H]).unwrap(),
            bias: Some(BiasGrad { slot_weights: None, out: TensorMut::from_slice(&mut bias, &[EXPERTS, I]).unwrap() }),
            accumulate,
        };
        Cpu::new().wgrad(&(), call).unwrap();
        let start = if accumulate { 5.0 } else { 0.0 };
        for e in 0..EXPERTS {
            for i in 0..I {
                let of = |f: &dyn Fn(usize) -> f32| -> f32 {
                    FILLED.iter().filter(|(_, owner)| *owner == e).map(|(s, _)| f(*s)).sum::<f32>() + start
                };
                assert_eq!(bias[e * I + i], of(&|s| left[s * I + i]), "bias of expert {e}");
                for h in 0..H {
                    let expected = of(&|s| left[s * I + i] * right[s * H + h]);
                    assert_eq!(out[(e * I + i) * H + h], expected, "expert {e}, {i}, {h}, accumulate {accumulate}");
                }
            }
        }
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let case = UpCase::new();
    let base = TensorRef::from_slice(&case.x, &[8, H]).unwrap();
    let mut out = vec![0f32; 8 * I];
    let run = |rows: RowSource<'_, Cpu>, out: &mut [f32], dims: &[usize]| {
        case.run(rows.borrow(), RowDest::direct(TensorMut::from_slice(out, dims).unwrap()))
    };
    let narrow = TensorRef::from_slice(&case.x, &[16, H / 2]).unwrap();
    assert!(matches!(run(RowSource::direct(narrow), &mut out, &[8, I]), Err(Error::Shape { .. })));
    assert!(matches!(run(RowSource::direct(base), &mut out, &[16, I / 2]), Err(Error::Shape { .. })));
    for bad in [8, -1] {
        let map = [bad, 0, 0, -1, 2, 5, -1, -1];
        let rows = RowSource::mapped(base.borrow(), TensorRef::from_slice(&map, &[8]).unwrap());
        let error = run(rows, &mut out, &[8, I]).unwrap_err();
        assert!(error.to_string().contains("rows.map"), "{error}");
    }
    let wide: Vec<f64> = case.x.iter().map(|v| f64::from(*v)).collect();
    let rows = RowSource::direct(TensorRef::from_slice(&wide, &[8, H]).unwrap());
    assert!(matches!(run(rows, &mut out, &[8, I]), Err(Error::DType { .. })));

    for (offsets, counts) in [([0i64, 2, 4], [3i64, 0, 2]), ([0, 4, 7], [3, 0, 2]), ([0, 4, 4], [3, 0, -1])] {
        let zones = Zones::<Cpu> {
            offsets: Tensor::from_vec(offsets.to_vec(), &[3]).unwrap(),
            counts: Tensor::from_vec(counts.to_vec(), &[3]).unwrap(),
            rows: 8,
        };
        let overlapping = offsets[1] < 3 && counts[1] == 0;
        let call = Up {
            rows: RowSource::direct(base.borrow()),
            zones: &zones,
            weight: TensorRef::from_slice(&case.weight, &[EXPERTS, I, H]).unwrap(),
            bias: None,
            slot_weights: None,
            activation: Activation::Relu2,
            pre: None,
            out: RowDest::direct(TensorMut::from_slice(&mut out, &[8, I]).unwrap()),
        };
        // An empty zone may lie anywhere; filled ones must be in order, apart and inside.
        assert_eq!(Cpu::new().up(&(), call).is_ok(), overlapping, "{offsets:?} {counts:?}");
    }
}

#[test]
fn weights_at_activation_and_output_agree_and_input_differs() {
    let weights = [0.5f32, 2.0, -1.0, f32::NAN, 0.25, 4.0, f32::NAN, f32::NAN];
    let (zones, case) = (zones(), UpCase::new());
    let down = integers(EXPERTS * H * I, 6);
    let run = |at: WeightAt| {
        let values = TensorRef::from_slice(&weights, &[8]).unwrap();
        let mut hidden = vec![0f32; 8 * I];
        let mut out = vec![0f32; 8 * H];
        let up = Up {
            rows: RowSource::direct(TensorRef::from_slice(&case.x, &[8, H]).unwrap()),
            zones: &zones,
            weight: TensorRef::from_slice(&case.weight, &[EXPERTS, I, H]).unwrap(),
            bias: None,
            slot_weights: Some(SlotWeights { values: values.borrow(), at }),
            activation: Activation::Relu2,
            pre: None,
            out: RowDest::direct(TensorMut::from_slice(&mut hidden, &[8, I]).unwrap()),
        };
        Cpu::new().up(&(), up).unwrap();
        let down = Down {
            rows: RowSource::direct(TensorRef::from_slice(&hidden, &[8, I]).unwrap()),
            zones: &zones,
            weight: TensorRef::from_slice(&down, &[EXPERTS, H, I]).unwrap(),
            bias: None,
            slot_weights: Some(SlotWeights { values: values.borrow(), at }),
            out: RowDest::direct(TensorMut::from_slice(&mut out, &[8, H]).unwrap()),
        };
        Cpu::new().down(&(), down).unwrap();
        FILLED.iter().flat_map(|(s, _)| out[s * H..][..H].to_vec()).collect::<Vec<_>>()
    };
    let (activation, output, input) = (run(WeightAt::Activation), run(WeightAt::Output), run(WeightAt::Input));
    // Powers of two scale exactly.
    assert_eq!(activation, output);
    assert_ne!(activation, input, "relu² is not linear");
}

#[test]
fn half_types_accumulate_in_f32() {
    // 4096 ones times ones: in a bf16 accumulator the sum would stick at 256.
    let long = 4096;
    let one = half::bf16::from_f32(1.0);
    let (x, weight) = (vec![one; long], vec![one; long]);
    let mut out = vec![0f32; 1];
    let call = Linear {
        x: TensorRef::<Cpu>::from_slice(&x, &[1, long]).unwrap(),
        weight: TensorRef::from_slice(&weight, &[1, long]).unwrap(),
        bias: None,
        out: TensorMut::from_slice(&mut out, &[1, 1]).unwrap(),
    };
    Cpu::new().linear(&(), call).unwrap();
    assert_eq!(out, [4096.0]);
    assert_eq!(DType::BF16.accumulator(), DType::F32);
}
