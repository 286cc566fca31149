//! A reference written straight from the formulas, element by element: every operation in binary64 and rounded to
//! binary32 once, which for one operation on binary32 values is the binary32 operation (53 ≥ 2·24 + 2 bits); codes
//! found by searching the table of values. Shares no code with the crate but the tables of values and Philox.

use moebius::quant::{E2M1, E4M3, Random, philox4x32};

/// One rounding to binary32.
fn f(v: f64) -> f64 {
    f64::from(v as f32)
}

/// Index of the nearest of `grid`, of two the even one; values above saturate.
fn search(grid: &[f32], v: f64) -> u8 {
    let v = v.abs().min(f64::from(grid[grid.len() - 1]));
    // The last value not above v, or the one after it.
    let below = grid.iter().rposition(|g| f64::from(*g) <= v).unwrap_or(0);
    let above = (below + 1).min(grid.len() - 1);
    let [down, up] = [v - f64::from(grid[below]), f64::from(grid[above]) - v];
    (if down < up || (down == up && below % 2 == 0) { below } else { above }) as u8
}

pub fn e4m3(v: f64) -> u8 {
    match v.is_nan() {
        true => 0x7F,
        false => search(&E4M3[..0x7F], v) | if v.is_sign_negative() { 0x80 } else { 0 },
    }
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    let all: Vec<f64> = values.collect();
    match all.iter().any(|v| v.is_nan()) {
        true => f64::NAN,
        false => all.into_iter().fold(0.0, |m, v| m.max(v.abs())),
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Te,
    Tiled,
    RowScaled,
    ModelOpt,
}

/// Lines of a matrix, quantized.
pub struct Expected {
    pub amax: Vec<f32>,
    pub scales: Vec<u8>,
    /// Packed.
    pub codes: Vec<u8>,
}

/// Random bytes of a block, as documented.
pub struct Bits {
    pub random: Random,
    pub columns: bool,
}

impl Bits {
    fn byte(&self, line: usize, k: usize) -> u32 {
        let (first_line, first_block) = match self.columns {
            false => (self.random.first_row, 0),
            true => (0, self.random.first_row / 16),
        };
        let place = [(first_block + k / 16) as u32, (first_line + line) as u32];
        let counter = [place[0], place[1], u32::from(self.columns), self.random.stream];
        let key = [self.random.seed as u32, (self.random.seed >> 32) as u32];
        philox4x32(counter, key)[k % 16 / 4] >> (8 * (k % 4)) & 255
    }
}

/// The code of y, stochastically: t = |y| + u·step truncated.
fn stochastic(y: f64, byte: u32) -> u8 {
    let a = y.abs();
    let step = if a < 2.0 {
        0.5
    } else if a < 4.0 {
        1.0
    } else {
        2.0
    };
    let t = f(a + f64::from(byte) / 256.0 * step);
    (0..8u8).rev().find(|i| f64::from(E2M1[*i as usize]) <= t).unwrap()
}

/// `lines` are those of the direction: rows, or columns after the transform, if any.
pub fn nvfp4(lines: &[Vec<f32>], kind: Kind, bits: Option<Bits>) -> Expected {
    let len = lines.first().map_or(0, Vec::len);
    let at = |i: usize, k: usize| lines.get(i).and_then(|l| l.get(k)).map_or(0.0, |v| f64::from(*v));
    let of_line = |i: usize| largest((0..len).map(|k| at(i, k)));
    let whole = largest((0..lines.len()).map(of_line));
    let max = f64::from(f32::MAX);
    let mut expected = Expected { amax: vec![whole as f32], scales: Vec::new(), codes: Vec::new() };
    if kind == Kind::RowScaled {
        expected.amax = (0..lines.len()).map(|i| of_line(i) as f32).collect();
    }
    for i in 0..lines.len() {
        let amax = f64::from(if kind == Kind::RowScaled { expected.amax[i] } else { whole as f32 });
        let mut codes = Vec::new();
        for block in 0..len.div_ceil(16) {
            let columns = block * 16..block * 16 + 16;
            let rows = if kind == Kind::Tiled { i / 16 * 16..i / 16 * 16 + 16 } else { i..i + 1 };
            let b = largest(rows.flat_map(|r| columns.clone().map(move |k| (r, k))).map(|(r, k)| at(r, k)));
            let (scale, encode): (u8, Box<dyn Fn(f64) -> f64>) = if kind == Kind::ModelOpt {
                let second = f(amax / 2688.0);
                let d = f(b / f(6.0 * second));
                let d = if d == 0.0 { 1.0 } else { d };
                let scale = e4m3(if d < 2f64.powi(-9) {
                    2f64.powi(-9)
                } else if d > 448.0 {
                    448.0
                } else {
                    d
                });
                let t = f(f64::from(E4M3[scale as usize]) * second);
                (scale, Box::new(move |x| f(x / t)))
            } else {
                let quotient = f(2688.0 / amax);
                let s = if quotient > max {
                    max
                } else if quotient == 0.0 {
                    1.0
                } else {
                    quotient
                };
                let k = f(s * f(1.0 / 6.0));
                let d = f(b * k);
                let scale = e4m3(if d > 448.0 { 448.0 } else { d });
                let e = f(1.0 / f(f64::from(E4M3[scale as usize]) * f(1.0 / s)));
                let e = if e > max { max } else { e };
                (
                    scale,
                    Box::new(move |x| {
                        let y = f(x * e);
                        y.clamp(-6.0, 6.0)
                    }),
                )
            };
            expected.scales.push(scale);
            for k in columns {
                let y = encode(at(i, k));
                let sign = if y < 0.0 { 8 } else { 0 };
                codes.push(match &bits {
                    _ if y.is_nan() => {
                        if kind == Kind::ModelOpt || bits.is_some() {
                            7
                        } else {
                            0
                        }
                    }
                    None => search(&E2M1[..8], y) | sign,
                    Some(bits) => stochastic(y, bits.byte(i, k)) | sign,
                });
            }
        }
        if kind != Kind::ModelOpt {
            codes.truncate(len);
        }
        expected.codes.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4));
    }
    expected
}

/// Values of rows of `len` elements each; an amax a matrix or a row.
pub fn back(codes: &[u8], scales: &[u8], amax: &[f32], (len, modelopt): (usize, bool)) -> Vec<f32> {
    let blocks = len.div_ceil(16);
    let rows = scales.len() / blocks;
    let row_bytes = codes.len() / rows;
    let value = |i: usize, k: usize| {
        let scale = f64::from(E4M3[scales[i * blocks + k / 16] as usize]);
        let amax = f64::from(amax[if amax.len() == 1 { 0 } else { i }]);
        let code = codes[i * row_bytes + k / 2] >> (k % 2 * 4) & 15;
        let factor = if modelopt { f(scale * f(amax / 2688.0)) } else { f(f(scale * amax) * f(1.0 / 2688.0)) };
        // ModelOpt's table has +0 for code 8.
        let code = if modelopt && code == 8 { 0 } else { code };
        f(f64::from(E2M1[code as usize]) * factor) as f32
    };
    (0..rows).flat_map(|i| (0..len).map(move |k| value(i, k))).collect()
}

/// Each 16 values of a line through the transform: added in the order of k.
pub fn hadamard(line: &[f32], signs: u16) -> Vec<f32> {
    let mut out = Vec::new();
    for block in line.chunks(16) {
        for j in 0..16usize {
            let mut sum = 0.0;
            for (k, v) in block.iter().enumerate() {
                let negative = (k & j).count_ones() % 2 == 1;
                let sign = if negative != (signs >> k & 1 == 1) { -0.25 } else { 0.25 };
                sum = f(sum + f64::from(*v) * sign);
            }
            // Through f32: `bf16::from_f64` drops bits before it rounds.
            out.push(half::bf16::from_f32(sum as f32).to_f32());
        }
    }
    out
}

/// Codes and scale of the elements of one fp8 block.
pub fn fp8_block(block: &[f32]) -> (Vec<u8>, f32) {
    let max = block.iter().filter(|v| !v.is_nan()).fold(0f64, |m, v| m.max(f64::from(*v).abs()));
    let scale = f(max / 448.0).max(2f64.powi(-126)).min(2f64.powi(127));
    (block.iter().map(|v| e4m3(f(f64::from(*v) / scale))).collect(), scale as f32)
}

/// Code and scale of MXFP8 elements `x` of one block.
pub fn mxfp8(block: &[f32], floor: bool) -> (Vec<u8>, u8) {
    let code = |v: f64| e4m3(f(v));
    let wide = |v: &f32| f64::from(*v);
    if floor {
        let max = largest(block.iter().map(wide));
        if max.is_nan() {
            // Divided by infinity.
            return (block.iter().map(|v| code(wide(v) / f64::INFINITY)).collect(), 255);
        }
        let exponent = if max == 0.0 {
            -1000.0
        } else if max.is_infinite() {
            128.0
        } else {
            max.log2().floor()
        };
        // log2 may round up to the next integer just below a power of two.
        let exponent = if max.is_finite() && 2f64.powf(exponent) > max { exponent - 1.0 } else { exponent };
        let e = (exponent - 8.0).max(-127.0);
        let divisor = 2f64.powf(e).max(2f64.powi(-126));
        return (block.iter().map(|v| code(wide(v) / divisor)).collect(), (e + 127.0) as u8);
    }
    let max = block.iter().filter(|v| !v.is_nan()).fold(0f64, |m, v| m.max(wide(v).abs()));
    let v = f(max * f(1.0 / 448.0));
    // The least power of two that is at least v.
    let byte = (0..=254).find(|b| 2f64.powi(b - 127) >= v).unwrap_or(254);
    (block.iter().map(|v| code(wide(v) * 2f64.powi(127 - byte))).collect(), byte as u8)
}
