//! Layers whose products run while their rows travel: the same bits as one after the other.

use std::time::Duration;

use moebius::comm::Communicator;
use moebius::config::{MoeConfig, SharedConfig, WeightAt};
use moebius::cuda::Cuda;
use moebius::ep::{Capacity, DispatcherKind, Group, GroupConfig, Overflow, Overlap};
use moebius::layer::{DispatchOptions, Layer, Mode, Params, PerParam};
use moebius::nccl::NcclComm;
use moebius::weights::{WeightGuard, WeightSource};
use moebius::{DType, Error, Result, Tensor, TensorRef};

use crate::Run;
use crate::conformance::gpus;
use crate::steps::{Bits, Shape, Steps, each};

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("products_during_movements_give_the_same_bits", same_bits),
        ("a_rank_without_tokens_and_experts_without_rows", uneven),
        ("graphs_replay_products_during_movements", graphs_replay),
        ("no_sms_for_the_movements_are_refused", no_sms),
        ("a_rank_that_decides_otherwise_is_told", undecided),
    ]
}

fn config(hidden: usize, intermediate: usize, experts: usize, top_k: usize) -> MoeConfig {
    MoeConfig::new(hidden, intermediate, experts, top_k)
}

/// With a shared expert of columns enough to begin while rows travel.
fn shared(mut config: MoeConfig, gated: bool) -> MoeConfig {
    config.shared = Some(SharedConfig { intermediate: 1024, gated, bias: false });
    config
}

/// Layers of Hopper's kernels for many rows, with usual tiles and square ones, and of kernels that wait for nothing.
fn configs() -> Vec<(&'static str, MoeConfig, usize)> {
    let mut recomputed = config(512, 192, 64, 6);
    recomputed.recompute = true;
    let mut at_output = config(256, 128, 32, 4);
    at_output.weight_at = WeightAt::Output;
    let mut at_input = config(256, 128, 32, 4);
    at_input.weight_at = WeightAt::Input;
    vec![
        // Its up runs beside the rows, in place of the routed experts', with a gate behind it; of sizes that Hopper's kernels do not
        // serve it follows them.
        ("a shared expert", shared(config(512, 128, 32, 4), true), 700),
        ("a shared expert of long rows", shared(config(8192, 64, 8, 2), false), 300),
        ("a shared expert of odd sizes", shared(config(76, 40, 16, 4), true), 300),
        ("many experts", config(1024, 256, 128, 8), 1500),
        ("few experts", config(2048, 512, 8, 2), 900),
        ("recomputed", recomputed, 600),
        ("weights at the output", at_output, 500),
        ("weights at the input", at_input, 500),
        ("rows of odd sizes", config(72, 40, 16, 4), 300),
        ("few rows", config(256, 128, 64, 2), 20),
    ]
}

fn steps(comm: NcclComm, (config, tokens, fewer): (&MoeConfig, usize, usize), overlap: Overlap) -> Result<Steps> {
    let (kind, config) = (DispatcherKind::NvLink, config.clone());
    let rows = comm.size() * tokens * config.router.top_k;
    let options = DispatchOptions {
        capacity: Capacity::Static(rows.min(1 << 16)),
        overflow: Overflow::Error,
        ..Default::default()
    };
    Steps::new(comm, (Shape { kind, config, tokens, fewer, backward: true, windows: 0, overlap }, options))
}

/// Every rank's results of these inputs.
fn over(ranks: usize, shape: (&MoeConfig, usize, usize), overlap: Overlap, rounds: u64) -> Vec<Vec<Bits>> {
    each(ranks, |comm, _| {
        let mut steps = steps(comm, shape, overlap)?;
        steps.over(0..rounds)
    })
}

fn same_bits(_: &Cuda, ranks: usize) {
    const ROUNDS: u64 = 6;
    for (name, config, tokens) in configs() {
        let shape = (&config, tokens, 37 % tokens / 2);
        let alone = over(ranks, shape, Overlap::Off, ROUNDS);
        for sms in [2, 16] {
            assert!(over(ranks, shape, Overlap::Sms(sms), ROUNDS) == alone, "{name}, {sms} SMs");
        }
    }
}

/// The last rank brings nothing, and all others' choices are the first four experts.
fn uneven(_: &Cuda, ranks: usize) {
    let config = config(512, 256, 32, 4);
    let run = |overlap| {
        each(ranks, |comm, _| {
            let mut steps = steps(comm, (&config, 300 * (ranks - 1), 300), overlap)?;
            steps.choose_the_first_four()?;
            (0..5).map(|_| steps.step().and_then(|()| steps.results())).collect::<Result<Vec<_>>>()
        })
    };
    assert!(run(Overlap::Sms(4)) == run(Overlap::Off));
}

fn graphs_replay(_: &Cuda, ranks: usize) {
    let plain = config(512, 256, 32, 4);
    for config in [shared(plain.clone(), true), plain] {
        let run = |overlap| {
            each(ranks, |comm, together| {
                let mut steps = steps(comm, (&config, 700, 31), overlap)?;
                let (graph, eager) = steps.replays()?;
                // Before any rank leaves what it calls.
                drop(graph);
                together.wait();
                Ok(eager)
            })
        };
        assert!(run(Overlap::Sms(8)) == run(Overlap::Off));
    }
}

fn no_sms(_: &Cuda, ranks: usize) {
    for sms in [0, 3, 18] {
        let all = gpus::communicators(ranks, Duration::from_secs(60)).into_iter().map(|comm| {
            std::thread::spawn(move || {
                let config = GroupConfig {
                    dispatcher: DispatcherKind::NvLink,
                    overlap: Overlap::Sms(sms),
                    ..GroupConfig::new(8 * ranks, 16)
                };
                match Group::new(comm.cuda().clone(), Box::new(comm), config) {
                    Err(Error::Invalid { .. }) => {}
                    other => panic!("{sms} SMs: {other:?}"),
                }
            })
        });
        all.collect::<Vec<_>>().into_iter().for_each(|rank| rank.join().expect("a refusal"));
    }
}

/// Weights of which nobody knows the type before they are there, as quantized ones are.
#[derive(Debug)]
struct Untyped<'a>(TensorRef<'a, Cuda>);

impl WeightSource<Cuda> for Untyped<'_> {
    fn dims(&self) -> &[usize] {
        self.0.dims()
    }
    fn acquire(&self) -> Result<WeightGuard<'_, Cuda>> {
        self.0.acquire()
    }
}

/// Rows are sent in one of two ways, so a rank whose weights alone are such that its products wait for none is told, as
/// are the others, before any row is sent; where all ranks have such weights, all is well.
fn undecided(_: &Cuda, ranks: usize) {
    let config = config(256, 128, 4 * ranks, 2);
    let run = |untyped: fn(usize) -> bool| {
        each(ranks, |comm, _| {
            let (cuda, rank) = (comm.cuda().clone(), comm.rank());
            let group = GroupConfig {
                dispatcher: DispatcherKind::NvLink,
                overlap: Overlap::Sms(4),
                ..GroupConfig::of(&config, 200)
            };
            let mut group = Group::new(cuda.clone(), Box::new(comm), group)?;
            let zeros = |dims: &[usize]| Tensor::<Cuda>::zeros(&cuda, DType::BF16, dims);
            let (x, router) = (zeros(&[200, 256])?, zeros(&[4 * ranks, 256])?);
            let (up, down) = (zeros(&[4, 256, 256])?, zeros(&[4, 256, 128])?);
            let (up, down) = (up.view(), down.view());
            let hidden = Untyped(up.borrow());
            let up: &dyn WeightSource<Cuda> = if untyped(rank) { &hidden } else { &up };
            let params = Params { router: router.view(), up, down: &down, others: PerParam::none() };
            let layer = Layer::new(config.clone(), 0)?;
            let mode = Mode { backward: false, noise: None };
            let done = layer.forward(&mut group, mode, x.view(), &params).map(drop);
            cuda.check()?;
            Ok(done)
        })
    };
    for refused in run(|rank| rank == 0) {
        match refused {
            Err(Error::ConfigMismatch { field, .. }) => assert_eq!(field, "whether products run while rows travel"),
            other => panic!("{other:?}"),
        }
    }
    run(|_| true).into_iter().for_each(|done| done.expect("one after the other"));
}
