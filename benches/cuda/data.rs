//! Random inputs. The host makes a few rows of normal values, and the GPU repeats them in random order: its tensor
//! cores see random bits everywhere, and the host is not the slowest part.

#[path = "../../tests/common/gathered_rows.rs"]
mod gathered_rows;

use moebius::cpu::Cpu;
use moebius::cuda::Cuda;
use moebius::kernels::{Kernels, Segments};
use moebius::{DType, Result, Tensor};

use crate::Workload;
use gathered_rows::gathered_rows;

/// How tokens choose experts where the products are measured alone. Choices of a token are distinct.
#[derive(Debug, Clone, Copy)]
pub enum Routing {
    /// Every expert as likely.
    Uniform,
    /// Expert e with a probability in proportion to 1 / (e + 1).
    Zipf,
    /// Expert 0 by every token, the others as likely.
    OneHot,
    /// The first half of the experts as likely, the others by none.
    HalfEmpty,
}

impl Routing {
    /// As peers read it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
            Self::OneHot => "one-hot",
            Self::HalfEmpty => "half-empty",
        }
    }
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Sum of four uniforms, scaled to variance 1.
    fn normal(&mut self) -> f64 {
        let sum: f64 = (0..4).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum();
        (sum - 2.0) * 3f64.sqrt()
    }

    /// A bf16 tensor of normal values of this deviation.
    pub fn tensor(&mut self, cuda: &Cuda, dims: &[usize], deviation: f64) -> Result<Tensor<Cuda>> {
        const ROWS: usize = 257;
        let width = dims[dims.len() - 1];
        let rows: usize = dims[..dims.len() - 1].iter().product();
        let values: Vec<f64> = (0..ROWS * width).map(|_| self.normal() * deviation).collect();
        let source = Cpu::new().write(&values, DType::BF16, &[ROWS, width])?.to(cuda)?;
        let map = (0..rows).map(|_| (self.next() % ROWS as u64) as i32).collect();
        gathered_rows(cuda, &source, map)?.reshape(dims)
    }

    /// Bytes that `of` makes of random numbers.
    pub fn bytes(&mut self, cuda: &Cuda, dims: &[usize], of: impl Fn(u64) -> u8) -> Result<Tensor<Cuda>> {
        const ROWS: usize = 257;
        let width = dims[dims.len() - 1];
        let rows: usize = dims[..dims.len() - 1].iter().product();
        let values = (0..ROWS * width).map(|_| of(self.next())).collect();
        let source = Tensor::from_vec(values, &[ROWS, width])?.to(cuda)?;
        let map = (0..rows).map(|_| (self.next() % ROWS as u64) as i32).collect();
        gathered_rows(cuda, &source, map)?.reshape(dims)
    }

    /// Distinct experts of each token.
    pub fn experts(&mut self, w: &Workload) -> Vec<i32> {
        // What each expert's probability and those before it sum to.
        let sums: Vec<f64> = (0..w.experts)
            .map(|e| match w.routing {
                Routing::Zipf => 1.0 / (e + 1) as f64,
                Routing::HalfEmpty if e >= w.experts / 2 => 0.0,
                _ => 1.0,
            })
            .scan(0.0, |sum, p| {
                *sum += p;
                Some(*sum)
            })
            .collect();
        let all = sums[w.experts - 1];
        let mut ids = Vec::with_capacity(w.slots());
        for _ in 0..w.tokens {
            let first = ids.len();
            if matches!(w.routing, Routing::OneHot) {
                ids.push(0);
            }
            while ids.len() < first + w.top_k {
                let at = (self.next() >> 11) as f64 / (1u64 << 53) as f64 * all;
                let e = sums.partition_point(|sum| *sum <= at) as i32;
                if !ids[first..].contains(&e) {
                    ids.push(e);
                }
            }
        }
        ids
    }
}

/// Slots of a routing: its segments, and the token of each slot.
pub fn slots(cuda: &Cuda, w: &Workload, ids: &[i32]) -> Result<(Segments<Cuda>, Tensor<Cuda>)> {
    let mut of_expert = vec![Vec::new(); w.experts];
    for (choice, e) in ids.iter().enumerate() {
        of_expert[*e as usize].push((choice / w.top_k) as i32);
    }
    let counts: Vec<i64> = of_expert.iter().map(|l| l.len() as i64).collect();
    let offsets: Vec<i64> = counts.iter().scan(0, |sum, c| Some(std::mem::replace(sum, *sum + c))).collect();
    let put = |v: Vec<i64>| Tensor::from_vec(v, &[w.experts])?.to(cuda);
    let segments = Segments::new(put(offsets)?, put(counts)?, w.slots());
    Ok((segments, Tensor::from_vec(of_expert.concat(), &[w.slots()])?.to(cuda)?))
}
