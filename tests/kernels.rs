//! The seam that fused back-ends override: row maps, destinations that add, padding, typed errors.
//! Values are small integers, so every sum is exact in f32 and results are compared for equality.

mod devices;

use moebius::config::{Activation, WeightAt};
use moebius::kernels::*;
use moebius::{DType, Error, Tensor};

use devices::{Target, cases};

cases!(
    padding_is_neither_read_nor_written,
    rows_come_from_where_the_map_says,
    rows_are_added_to_what_is_there,
    down_multiplies_filled_slots_by_their_experts,
    weight_gradients_sum_over_filled_slots_only_and_add,
    wrong_arguments_are_errors,
    segments_outside_are_errors,
    weights_at_activation_and_output_agree_and_input_differs,
    half_types_accumulate_in_f32,
);

const H: usize = 8;
const I: usize = 4;
const EXPERTS: usize = 3;
/// Whose segments these are, in errors.
const ORIGIN: Origin = Origin { rank: 2, layer: 9 };

fn segments_of<D: Target>(device: &D, offsets: [i64; EXPERTS], counts: [i64; EXPERTS]) -> Segments<D> {
    let put = |v: [i64; EXPERTS]| device.host(&Tensor::from_vec(v.to_vec(), &[EXPERTS]).expect("segments"));
    Segments::new(put(offsets), put(counts), 8).with_origin(ORIGIN)
}

/// Segments of 3, 0 and 2 filled slots, padded to 4: slots 3, 6 and 7 are padding.
fn segments<D: Target>(device: &D) -> Segments<D> {
    segments_of(device, [0, 4, 4], [3, 0, 2])
}

const FILLED: [(usize, usize); 5] = [(0, 0), (1, 0), (2, 0), (4, 2), (5, 2)];
const PADDING: [usize; 3] = [3, 6, 7];

fn integers(count: usize, own: u64) -> Vec<f64> {
    let mut state = devices::seed::seed(own);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % 7) as f64 - 3.0
    };
    (0..count).map(|_| next()).collect()
}

fn with_nan_padding(mut rows: Vec<f64>, width: usize) -> Vec<f64> {
    for pad in PADDING {
        rows[pad * width..(pad + 1) * width].fill(f64::NAN);
    }
    rows
}

/// relu² without gate keeps integers integers.
fn up_reference(x: &[f64], weight: &[f64], expert: usize) -> Vec<f64> {
    (0..I)
        .map(|i| {
            let row = &weight[(expert * I + i) * H..][..H];
            let sum: f64 = row.iter().zip(x).map(|(w, x)| w * x).sum();
            sum.max(0.0) * sum.max(0.0)
        })
        .collect()
}

fn f32s<D: Target>(device: &D, values: &[f64], dims: &[usize]) -> Tensor<D> {
    device.put(DType::F32, values, dims)
}

fn map<D: Target>(device: &D, entries: &[i32]) -> Tensor<D> {
    device.host(&Tensor::from_vec(entries.to_vec(), &[entries.len()]).expect("map"))
}

struct UpCase<'a, D: Target> {
    device: &'a D,
    x: Vec<f64>,
    weight: Vec<f64>,
}

impl<'a, D: Target> UpCase<'a, D> {
    fn new(device: &'a D) -> Self {
        Self { device, x: integers(8 * H, 1), weight: integers(EXPERTS * I * H, 2) }
    }

    fn run(&self, rows: RowSource<'_, D>, out: RowDest<'_, D>) -> moebius::Result<()> {
        self.run_in(&segments(self.device), rows, out)
    }

    fn run_in(&self, segments: &Segments<D>, rows: RowSource<'_, D>, mut out: RowDest<'_, D>) -> moebius::Result<()> {
        let weight = f32s(self.device, &self.weight, &[EXPERTS, I, H]);
        let call = Up {
            rows: rows.borrow(),
            segments,
            weight: weight.view().into(),
            bias: None,
            slot_weights: None,
            activation: Activation::Relu2,
            pre: None,
            out: out.reborrow(),
            movement_sms: None,
        };
        self.device.settled(self.device.up(call))
    }
}

fn padding_is_neither_read_nor_written<D: Target>(device: &D) {
    let case = UpCase::new(device);
    let x = f32s(device, &with_nan_padding(case.x.clone(), H), &[8, H]);
    let mut out = f32s(device, &[-7.0; 8 * I], &[8, I]);
    case.run(RowSource::direct(x.view()), RowDest::direct(out.view_mut())).unwrap();
    let out = device.values(out.view());
    for (slot, expert) in FILLED {
        assert_eq!(out[slot * I..][..I], up_reference(&case.x[slot * H..][..H], &case.weight, expert), "slot {slot}");
    }
    for pad in PADDING {
        assert_eq!(out[pad * I..][..I], [-7.0; I], "padding slot {pad}");
    }
}

fn rows_come_from_where_the_map_says<D: Target>(device: &D) {
    let case = UpCase::new(device);
    let entries = [7i32, 0, 0, -1, 2, 5, -1, -1];
    let (x, map) = (f32s(device, &case.x, &[8, H]), map(device, &entries));
    let mut out = f32s(device, &[0.0; 8 * I], &[8, I]);
    case.run(RowSource::mapped(x.view(), map.view()), RowDest::direct(out.view_mut())).unwrap();
    let out = device.values(out.view());
    for (slot, expert) in FILLED {
        let row = entries[slot] as usize;
        assert_eq!(out[slot * I..][..I], up_reference(&case.x[row * H..][..H], &case.weight, expert), "slot {slot}");
    }
}

fn rows_are_added_to_what_is_there<D: Target>(device: &D) {
    let case = UpCase::new(device);
    let x = f32s(device, &with_nan_padding(case.x.clone(), H), &[8, H]);
    let mut out = f32s(device, &[10.0; 8 * I], &[8, I]);
    case.run(RowSource::direct(x.view()), RowDest::adding(out.view_mut())).unwrap();
    let out = device.values(out.view());
    for (slot, expert) in FILLED {
        let expected: Vec<f64> =
            up_reference(&case.x[slot * H..][..H], &case.weight, expert).iter().map(|v| v + 10.0).collect();
        assert_eq!(out[slot * I..][..I], expected, "slot {slot}");
    }
    for pad in PADDING {
        assert_eq!(out[pad * I..][..I], [10.0; I], "padding slot {pad}");
    }
}

fn down_multiplies_filled_slots_by_their_experts<D: Target>(device: &D) {
    let rows = with_nan_padding(integers(8 * I, 7), I);
    let down = integers(EXPERTS * H * I, 3);
    let (hidden, weight) = (f32s(device, &rows, &[8, I]), f32s(device, &down, &[EXPERTS, H, I]));
    let mut out = f32s(device, &[-7.0; 8 * H], &[8, H]);
    let call = Down {
        rows: RowSource::direct(hidden.view()),
        segments: &segments(device),
        weight: weight.view().into(),
        bias: None,
        slot_weights: None,
        out: RowDest::direct(out.view_mut()),
    };
    device.settled(device.down(call)).unwrap();
    let out = device.values(out.view());
    for (slot, expert) in FILLED {
        let x = &rows[slot * I..][..I];
        let expected: Vec<f64> =
            (0..H).map(|h| down[(expert * H + h) * I..][..I].iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        assert_eq!(out[slot * H..][..H], expected, "slot {slot}");
    }
    for pad in PADDING {
        assert_eq!(out[pad * H..][..H], [-7.0; H], "padding slot {pad}");
    }
}

fn weight_gradients_sum_over_filled_slots_only_and_add<D: Target>(device: &D) {
    let left = with_nan_padding(integers(8 * I, 4), I);
    let right = with_nan_padding(integers(8 * H, 5), H);
    let (left_rows, right_rows) = (f32s(device, &left, &[8, I]), f32s(device, &right, &[8, H]));
    let segments = segments(device);
    for accumulate in [false, true] {
        let mut out = f32s(device, &[5.0; EXPERTS * I * H], &[EXPERTS, I, H]);
        let mut bias = f32s(device, &[5.0; EXPERTS * I], &[EXPERTS, I]);
        let call = Wgrad {
            left: RowSource::direct(left_rows.view()),
            right: RowSource::direct(right_rows.view()),
            slot_weights: None,
            segments: &segments,
            out: out.view_mut(),
            bias: Some(BiasGrad { slot_weights: None, out: bias.view_mut() }),
            accumulate,
            movement_sms: None,
        };
        device.settled(device.wgrad(call)).unwrap();
        let (out, bias) = (device.values(out.view()), device.values(bias.view()));
        let start = if accumulate { 5.0 } else { 0.0 };
        for e in 0..EXPERTS {
            for i in 0..I {
                let of = |f: &dyn Fn(usize) -> f64| -> f64 {
                    FILLED.iter().filter(|(_, owner)| *owner == e).map(|(s, _)| f(*s)).sum::<f64>() + start
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

fn wrong_arguments_are_errors<D: Target>(device: &D) {
    let case = UpCase::new(device);
    let run = |rows: RowSource<'_, D>, dims: &[usize]| {
        let mut out = f32s(device, &[0.0; 8 * I], dims);
        case.run(rows.borrow(), RowDest::direct(out.view_mut()))
    };
    let base = f32s(device, &case.x, &[8, H]);
    let narrow = f32s(device, &case.x, &[16, H / 2]);
    assert!(matches!(run(RowSource::direct(narrow.view()), &[8, I]), Err(Error::Shape { .. })));
    assert!(matches!(run(RowSource::direct(base.view()), &[16, I / 2]), Err(Error::Shape { .. })));
    for bad in [8, -1] {
        let map = map(device, &[bad, 0, 0, -1, 2, 5, -1, -1]);
        let error = run(RowSource::mapped(base.view(), map.view()), &[8, I]).unwrap_err();
        let Error::RowMap { call: "up", rank: 2, layer: 9, ref map, entry: 0, found } = error else {
            panic!("{error:?}");
        };
        assert!(map == "rows.map" && found == Some(i64::from(bad)), "{error}");
    }
    let other = device.put(DType::I32, &case.x, &[8, H]);
    let error = run(RowSource::direct(other.view()), &[8, I]).unwrap_err();
    assert!(matches!(error, Error::DType { .. } | Error::Invalid { .. }), "{error:?}");
}

/// An empty segment may lie anywhere; filled ones must be in order, apart and inside.
fn segments_outside_are_errors<D: Target>(device: &D) {
    let case = UpCase::new(device);
    let x = f32s(device, &case.x, &[8, H]);
    for (offsets, counts, bad) in [
        ([0i64, 4, 4], [3i64, 0, 2], None),
        ([0, 2, 4], [3, 0, 2], None),
        ([0, 2, 4], [3, 1, 2], Some(1)),
        ([0, 4, 7], [3, 0, 2], Some(2)),
        ([0, 4, 4], [3, 0, -1], Some(2)),
    ] {
        let mut out = f32s(device, &[0.0; 8 * I], &[8, I]);
        let segments = segments_of(device, offsets, counts);
        let result = case.run_in(&segments, RowSource::direct(x.view()), RowDest::direct(out.view_mut()));
        let found = match &result {
            Ok(_) => None,
            Err(Error::Segment { call: "up", rank: 2, layer: 9, segment, found }) => {
                assert_eq!(*found, Some((offsets[*segment], counts[*segment])), "{offsets:?} {counts:?}");
                Some(*segment)
            }
            Err(error) => panic!("{offsets:?} {counts:?}: {error:?}"),
        };
        assert_eq!(found, bad, "{offsets:?} {counts:?}: {result:?}");
    }
}

fn weights_at_activation_and_output_agree_and_input_differs<D: Target>(device: &D) {
    let weights = f32s(device, &[0.5, 2.0, -1.0, f64::NAN, 0.25, 4.0, f64::NAN, f64::NAN], &[8]);
    let (segments, case) = (segments(device), UpCase::new(device));
    let x = f32s(device, &case.x, &[8, H]);
    let up_weight = f32s(device, &case.weight, &[EXPERTS, I, H]);
    let down_weight = f32s(device, &integers(EXPERTS * H * I, 6), &[EXPERTS, H, I]);
    let run = |at: WeightAt| {
        let mut hidden = f32s(device, &[0.0; 8 * I], &[8, I]);
        let mut out = f32s(device, &[0.0; 8 * H], &[8, H]);
        let up = Up {
            rows: RowSource::direct(x.view()),
            segments: &segments,
            weight: up_weight.view().into(),
            bias: None,
            slot_weights: Some(SlotWeights { values: weights.view(), map: None, at }),
            activation: Activation::Relu2,
            pre: None,
            out: RowDest::direct(hidden.view_mut()),
            movement_sms: None,
        };
        device.up(up).unwrap();
        let down = Down {
            rows: RowSource::direct(hidden.view()),
            segments: &segments,
            weight: down_weight.view().into(),
            bias: None,
            slot_weights: Some(SlotWeights { values: weights.view(), map: None, at }),
            out: RowDest::direct(out.view_mut()),
        };
        device.settled(device.down(down)).unwrap();
        let out = device.values(out.view());
        FILLED.iter().flat_map(|(s, _)| out[s * H..][..H].to_vec()).collect::<Vec<_>>()
    };
    let (activation, output, input) = (run(WeightAt::Activation), run(WeightAt::Output), run(WeightAt::Input));
    // Powers of two scale exactly.
    assert_eq!(activation, output);
    assert_ne!(activation, input, "relu² is not linear");
}

fn half_types_accumulate_in_f32<D: Target>(device: &D) {
    // 4096 ones times ones: in a bf16 accumulator the sum would stick at 256.
    let long = 4096;
    let ones = device.put(DType::BF16, &vec![1.0; long], &[1, long]);
    let mut out = f32s(device, &[0.0], &[1, 1]);
    let call = Linear { x: ones.view(), weight: ones.view(), bias: None, out: out.view_mut() };
    device.settled(device.linear(call)).unwrap();
    assert_eq!(device.values(out.view()), [4096.0]);
    assert_eq!(DType::BF16.accumulator(), DType::F32);
}
