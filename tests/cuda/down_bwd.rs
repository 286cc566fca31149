//! Down's gradient through the activation by itself: every place a tile can end at, with every activation that has a
//! gate, against the CPU.

use moebius::config::{Activation, WeightAt};
use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::{DownBwd, Kernels, RowSource, Segments, SlotWeights};
use moebius::{DType, Result, Tensor};

use crate::harness::{Random, distance, tests, tolerance};

tests!(tiles_end_everywhere_with_every_activation, the_bits_are_those_of_every_run_and_of_a_row_alone);

/// Rows of experts: around a warp's 16 rows, half a tile and a tile, none, and several tiles, whole and not.
const COUNTS: [i64; 20] = [0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 0, 80, 127, 128, 129, 300, 385, 449, 640, 0];
/// Slots of padding behind each segment.
const PADDING: i64 = 3;
/// Rows that the map chooses from.
const ROWS: usize = 90;
/// What outputs hold before.
const BEFORE: f64 = 7.0;

struct Setting {
    dtype: DType,
    activation: Activation,
    /// Rows lie behind a map.
    mapped: bool,
    /// The activations, and the gradients of the weights, are asked for.
    all: bool,
    weights: bool,
    hidden: usize,
    inner: usize,
}

/// Inputs of a call, on the host.
struct Data {
    slots: usize,
    offsets: Vec<i64>,
    map: Vec<i32>,
    grad: Tensor<Cpu>,
    weight: Tensor<Cpu>,
    pre: Tensor<Cpu>,
    slot_weights: Tensor<Cpu>,
}

impl Data {
    fn new(s: &Setting) -> Result<Self> {
        let mut random = Random::new(11);
        let mut offsets = Vec::new();
        let slots = COUNTS.iter().fold(0, |at, count| {
            offsets.push(at);
            at + count + PADDING
        }) as usize;
        let map: Vec<i32> = (0..slots).map(|_| (random.next() % ROWS as u64) as i32).collect();
        let rows = if s.mapped { ROWS } else { slots };
        Ok(Self {
            slots,
            grad: random.tensor(&[rows, s.hidden], s.dtype, 1.0)?,
            weight: random.tensor(&[COUNTS.len(), s.hidden, s.inner], s.dtype, 1.0 / (s.hidden as f64).sqrt())?,
            pre: random.tensor(&[slots, 2 * s.inner], s.dtype, 2.0)?,
            slot_weights: random.tensor(&[slots], DType::F32, 1.0)?,
            offsets,
            map,
        })
    }

    fn inside(&self, slot: usize) -> bool {
        self.offsets.iter().zip(COUNTS).any(|(o, c)| (*o..o + c).contains(&(slot as i64)))
    }
}

/// Gradients of the pre-activations, activations, gradients of the weights.
type Outputs = [Vec<f64>; 3];

/// One call. Outputs that are not asked for stay as they were.
fn down_bwd<D: Kernels>(
    device: &D,
    s: &Setting,
    data: &Data,
    put: &dyn Fn(&Tensor<Cpu>) -> Result<Tensor<D>>,
) -> Result<Outputs> {
    let n = data.slots;
    let filled = |dims: &[usize], dtype| put(&Cpu::new().write(&vec![BEFORE; dims.iter().product()], dtype, dims)?);
    let integers = |values: &[i64]| put(&Tensor::from_vec(values.to_vec(), &[COUNTS.len()])?);
    let segments = Segments::new(integers(&data.offsets)?, integers(&COUNTS)?, n);
    let map = put(&Tensor::from_vec(data.map.clone(), &[n])?)?;
    let (grad, weight, pre) = (put(&data.grad)?, put(&data.weight)?, put(&data.pre)?);
    let slot_weights = put(&data.slot_weights)?;
    let mut d_pre = filled(&[n, 2 * s.inner], s.dtype)?;
    let mut hidden = filled(&[n, s.inner], s.dtype)?;
    let mut d_slot_weights = filled(&[n], DType::F32)?;
    device.down_bwd(DownBwd {
        grad: if s.mapped { RowSource::mapped(grad.view(), map.view()) } else { RowSource::direct(grad.view()) },
        segments: &segments,
        weight: weight.view().into(),
        bias: None,
        pre: pre.view(),
        slot_weights: s.weights.then(|| SlotWeights {
            values: slot_weights.view(),
            map: None,
            at: WeightAt::Activation,
        }),
        activation: s.activation,
        d_pre: d_pre.view_mut(),
        hidden: s.all.then(|| hidden.view_mut()),
        d_slot_weights: (s.all && s.weights).then(|| d_slot_weights.view_mut()),
    })?;
    Ok([device.read(d_pre.view())?, device.read(hidden.view())?, device.read(d_slot_weights.view())?])
}

fn on_gpu(cuda: &Cuda, s: &Setting, data: &Data) -> Result<Outputs> {
    down_bwd(cuda, s, data, &|t| t.to(cuda))
}

fn check(cuda: &Cuda, s: &Setting) -> Result<()> {
    let data = Data::new(s)?;
    let copied = |t: &Tensor<Cpu>| -> Result<Tensor<Cpu>> {
        let mut new = Tensor::empty(&Cpu::new(), t.dtype(), t.dims())?;
        new.as_bytes_mut().copy_from_slice(t.as_bytes());
        Ok(new)
    };
    let want = down_bwd(&Cpu::new(), s, &data, &copied)?;
    // With no more than two SMs one cluster walks over all tiles.
    for device in [cuda.clone(), cuda.reserving_sms(10_000), cuda.portable()] {
        let got = on_gpu(&device, s, &data)?;
        let Setting { dtype, activation, mapped, all, weights, hidden, inner } = s;
        let name = format!(
            "{dtype:?}, {activation:?}, mapped {mapped}, all {all}, weights {weights}, {hidden} to {inner}, {device:?}"
        );
        for (output, (got, want)) in ["d_pre", "hidden", "d_slot_weights"].iter().zip(got.iter().zip(&want)) {
            let width = got.len() / data.slots;
            let (mut of_slots, mut wanted) = (Vec::new(), Vec::new());
            for slot in 0..data.slots {
                let row = slot * width..(slot + 1) * width;
                if data.inside(slot) {
                    of_slots.extend_from_slice(&got[row.clone()]);
                    wanted.extend_from_slice(&want[row]);
                } else {
                    assert!(got[row].iter().all(|v| *v == BEFORE), "{name}: {output} of padding, slot {slot}");
                }
            }
            // Rows are the same numbers on both sides and products exact in f32: what differs is the sums' order, a
            // logistic function by a few units in f32's last place, and the result's rounding. Dots are sums of f32.
            let off = distance(&of_slots, &wanted);
            assert!(off <= tolerance(s.dtype), "{name}: {output} is off by {off:e}");
        }
    }
    Ok(())
}

const SILU: Activation = Activation::SiluGlu;

fn tiles_end_everywhere_with_every_activation(cuda: &Cuda) -> Result<()> {
    let clamped = Activation::ClampedGlu { alpha: 1.702, limit: 1.5 };
    for dtype in [DType::BF16, DType::F16] {
        // Columns: less than a piece of 64, one, two, a tile of 192 and what is left over it; sums shorter than a step
        // of 64, of whole steps, and not; 200 columns, for which tiles are square everywhere where the sum is not long.
        const SIZES: [(usize, usize); 9] =
            [(40, 8), (64, 64), (136, 128), (256, 136), (328, 192), (320, 200), (192, 456), (136, 584), (4104, 200)];
        for (hidden, inner) in SIZES {
            for mapped in [true, false] {
                let s = Setting { dtype, activation: SILU, mapped, all: true, weights: true, hidden, inner };
                check(cuda, &s)?;
            }
        }
        for activation in [SILU, Activation::GeluGlu, clamped] {
            for (all, weights) in [(true, true), (false, true), (true, false), (false, false)] {
                for (hidden, inner) in [(200, 264), (200, 200), (4104, 264)] {
                    check(cuda, &Setting { dtype, activation, mapped: true, all, weights, hidden, inner })?;
                }
            }
        }
    }
    cuda.check()
}

/// A result that moves between runs is a barrier that is missing. Rows of one source row and one pre-activation in
/// different places of tiles of different experts with the same weight must have the same bits.
fn the_bits_are_those_of_every_run_and_of_a_row_alone(cuda: &Cuda) -> Result<()> {
    // Tiles of 192 columns for a long sum, square ones for the others where L2 is small, for the last one everywhere.
    for (hidden, inner) in [(4104, 456), (384, 456), (384, 200)] {
        check_bits(cuda, hidden, inner)?;
    }
    cuda.check()
}

fn check_bits(cuda: &Cuda, hidden: usize, inner: usize) -> Result<()> {
    const RUNS: usize = 60;
    let s = Setting { dtype: DType::BF16, activation: SILU, mapped: true, all: true, weights: true, hidden, inner };
    let mut data = Data::new(&s)?;
    let first = on_gpu(cuda, &s, &data)?;
    for run in 0..RUNS {
        assert!(on_gpu(cuda, &s, &data)? == first, "run {run} has other bits");
    }
    // One weight, one row, one pre-activation and one factor for all slots.
    let repeated = |t: &Tensor<Cpu>| {
        let (values, count) = (t.to_f64(), t.dims()[0]);
        let one = values[..values.len() / count].repeat(count);
        Cpu::new().write(&one, t.dtype(), t.dims())
    };
    data.weight = repeated(&data.weight)?;
    data.grad = repeated(&data.grad)?;
    data.pre = repeated(&data.pre)?;
    data.slot_weights = repeated(&data.slot_weights)?;
    let all = on_gpu(cuda, &s, &data)?;
    for output in &all {
        let width = output.len() / data.slots;
        let row = |slot: usize| &output[slot * width..][..width];
        let alone = data.offsets[1] as usize;
        for slot in (0..data.slots).filter(|slot| data.inside(*slot)) {
            assert!(row(slot) == row(alone), "slot {slot} has other bits than the row of an expert alone");
        }
    }
    Ok(())
}
