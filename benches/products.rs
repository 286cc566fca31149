//! The CPU's products of rows with a weight, which have one order of sums for all numbers of rows (`src/cpu/ordered/`),
//! against the same products by the `gemm` crate, which changes its order with them. f32, one thread, random data. One
//! JSON line a product and number of rows: microseconds of either, and ours over gemm's.
//!
//! ```text
//! cargo bench -p moebius --bench products [-- [--avx2] [LAYOUT …]]
//! ```
//!
//! LAYOUT: `rows` (x · wᵀ, a weight `[n, k]`) or `columns` (x · w, `[k, n]`). `--avx2` keeps ours to AVX2's registers where
//! the machine has wider ones; gemm uses AVX2 in either case.
//!
//! Both run by turns; the lowest time of a turn counts, of the thread's own clock, so that other work on the machine falls
//! on neither.

#[path = "../src/cpu/heuristics.rs"]
#[allow(dead_code, reason = "the part of it that these products read")]
mod heuristics;
#[path = "../src/cpu/ordered/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "a part of it, which is private in the crate")]
mod ordered;
#[path = "../examples/support/output.rs"]
mod output;

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use ordered::{OrderedProduct, WeightLayout};
use output::{complain, say};
use pulp::Arch;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const ROWS: [usize; 11] = [1, 2, 3, 4, 6, 8, 16, 64, 65, 128, 256];
/// Weights of x · wᵀ: published routers and experts, the gate of a shared expert, and a small one.
const BY_ROWS: [[usize; 2]; 7] = [[128, 2048], [64, 2048], [1536, 2048], [2048, 768], [1408, 4096], [1, 2048], [8, 64]];
/// Weights of x · w: the same, and small ones.
const BY_COLUMNS: [[usize; 2]; 9] =
    [[128, 2048], [64, 2048], [1536, 2048], [2048, 768], [1408, 4096], [512, 128], [256, 64], [8, 64], [1, 2048]];
/// Time of one turn of either: long beside the clock's steps.
const TURN: Duration = Duration::from_millis(4);
const TURNS: usize = 25;

/// A product of `[rows, k]` with a weight.
struct Product {
    layout: WeightLayout,
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f32>,
}

impl Product {
    fn new(layout: WeightLayout, dims: [usize; 2], rows: usize) -> Self {
        let [n, k] = match layout {
            WeightLayout::Rows => dims,
            WeightLayout::Columns => [dims[1], dims[0]],
        };
        let mut random = StdRng::seed_from_u64(7);
        let mut draw = |count| (0..count).map(|_| random.random_range(-1.0..1.0)).collect();
        Self { layout, rows, n, k, x: draw(rows * k), weight: draw(n * k), out: vec![0.0; rows * n] }
    }

    fn ours(&mut self, arch: Arch) {
        let Self { layout, n, k, x, weight, out, .. } = self;
        OrderedProduct { out, x: black_box(x), weight, layout: *layout, k: *k, n: *n }.run_on(arch);
        black_box(&self.out);
    }

    fn gemm(&mut self) {
        let (m, n, k) = (self.rows, self.n, self.k);
        // Strides of the weight's k and n.
        let [along_k, along_n] = match self.layout {
            WeightLayout::Rows => [1, k as isize],
            WeightLayout::Columns => [n as isize, 1],
        };
        // SAFETY: `out` has m·n numbers, `x` m·k and `weight` n·k, as `new` made them, and the strides are those of their
        // layouts; `out` is borrowed alone.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                self.out.as_mut_ptr(),
                1,
                n as isize,
                false,
                black_box(&self.x).as_ptr(),
                1,
                k as isize,
                self.weight.as_ptr(),
                along_n,
                along_k,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        black_box(&self.out);
    }

    /// The largest difference of both, of the largest sum.
    fn difference(&mut self, arch: Arch) -> f32 {
        self.ours(arch);
        let ours = self.out.clone();
        self.gemm();
        let most = ours.iter().fold(0f32, |most, v| most.max(v.abs()));
        ours.iter().zip(&self.out).fold(0f32, |most, (a, b)| most.max((a - b).abs())) / most
    }
}

/// Time that this thread has computed.
#[cfg(target_os = "linux")]
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of this thread's stack.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "every Linux has this clock");
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Time since the first call: what there is elsewhere.
#[cfg(not(target_os = "linux"))]
fn now() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}

/// Microseconds of one of so many calls.
fn turn(times: u32, mut call: impl FnMut()) -> f64 {
    let from = now();
    (0..times).for_each(|_| call());
    (now() - from).as_secs_f64() * 1e6 / f64::from(times)
}

/// Measures a product and prints its line.
fn measure(mut product: Product, arch: Arch) {
    // Sums of k products of numbers up to 1, in two orders: k roundings of 2⁻²⁴ at most, of sums of about √k.
    let bound = (product.k as f32).sqrt() * 2f32.powi(-23) + f32::EPSILON;
    let difference = product.difference(arch);
    assert!(difference <= 8.0 * bound, "{difference:e} of the largest");
    let once = turn(8, || product.ours(arch)).max(0.01);
    let times = (TURN.as_secs_f64() * 1e6 / once).clamp(1.0, 1e5) as u32;
    let mut least = [f64::INFINITY; 2];
    for _ in 0..TURNS {
        least[0] = least[0].min(turn(times, || product.ours(arch)));
        least[1] = least[1].min(turn(times, || product.gemm()));
    }
    let name = match product.layout {
        WeightLayout::Rows => "x·wᵀ",
        WeightLayout::Columns => "x·w",
    };
    let Product { layout, rows, n, k, .. } = product;
    let dims = if layout == WeightLayout::Rows { [n, k] } else { [k, n] };
    let ([ours, gemm], ratio) = (least, least[0] / least[1]);
    say(format_args!(
        "{{\"product\":\"{name}\",\"weight\":{dims:?},\"rows\":{rows},\"arch\":\"{arch:?}\",\"us\":{ours:.3},\
         \"gemm_us\":{gemm:.3},\"ratio\":{ratio:.3}}}"
    ));
}

/// AVX2's registers, where the machine has them.
#[cfg(target_arch = "x86_64")]
fn avx2() -> Option<Arch> {
    pulp::x86::V3::try_new().map(Arch::V3)
}

#[cfg(not(target_arch = "x86_64"))]
fn avx2() -> Option<Arch> {
    None
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let arch = match arguments.iter().any(|a| a == "--avx2") {
        false => Some(Arch::new()),
        true => avx2(),
    };
    let Some(arch) = arch else {
        complain("this machine has no AVX2");
        return ExitCode::FAILURE;
    };
    let layouts = [("rows", WeightLayout::Rows, &BY_ROWS[..]), ("columns", WeightLayout::Columns, &BY_COLUMNS[..])];
    let asked = |name: &str| arguments.iter().any(|a| a == name) || arguments.iter().all(|a| a.starts_with("--"));
    for (_, layout, weights) in layouts.into_iter().filter(|(name, ..)| asked(name)) {
        for (dims, rows) in weights.iter().flat_map(|dims| ROWS.map(|rows| (*dims, rows))) {
            measure(Product::new(layout, dims, rows), arch);
        }
    }
    ExitCode::SUCCESS
}
