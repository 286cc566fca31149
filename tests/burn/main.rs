//! The layer as a burn module: against a dense reference of burn operations, and as a citizen of burn's autodiff,
//! records and optimizers. With the feature `burn-cuda` on a GPU too.

mod dense;
mod dispatch;
mod exact;
mod facade;
mod faults;
#[path = "../common/faulty_comm.rs"]
mod faulty_comm;
#[path = "../common/goldens.rs"]
mod goldens;
#[cfg(feature = "burn-cuda")]
mod gpu;
#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
mod gpus;
mod gradients;
#[path = "../common/limits.rs"]
mod limits;
mod main_gradients;
mod module;
#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
#[path = "../devices/gpus.rs"]
#[allow(dead_code, reason = "a suite takes a part")]
mod nccl_gpus;
#[cfg(feature = "burn-cuda")]
mod order;
mod quantized_shards;
mod reduce;
mod reducer;
mod sharded;
mod sharded_dense;
mod sharded_model;
mod sharded_replicas;
mod support;
mod token_model;
#[path = "../common/trials.rs"]
mod trials;
mod user;

use std::process::ExitCode;

use trials::Trials;

fn main() -> ExitCode {
    #[cfg(feature = "burn-cuda")]
    let gpu = moebius::cuda::Cuda::new(0).map(drop);
    #[cfg(not(feature = "burn-cuda"))]
    let gpu = Err("built without the feature `burn-cuda`");
    let mut trials = Trials::new(gpu);
    let files = [
        ("dense", dense::cases()),
        ("dispatch", dispatch::cases()),
        ("exact", exact::cases()),
        ("facade", facade::cases()),
        ("faults", faults::cases()),
        ("gradients", gradients::cases()),
        ("main_gradients", main_gradients::cases()),
        ("module", module::cases()),
        ("quantized_shards", quantized_shards::cases()),
        ("reduce", reduce::cases()),
        ("reducer", reducer::cases()),
        ("sharded", sharded::cases()),
        ("sharded_dense", sharded_dense::cases()),
        ("sharded_model", sharded_model::cases()),
        ("sharded_replicas", sharded_replicas::cases()),
        ("user", user::cases()),
    ];
    for (file, cases) in files {
        for (name, body) in cases {
            trials.add(format!("{file}::{name}"), body);
        }
    }
    #[cfg(feature = "burn-cuda")]
    {
        for (name, body) in gpu::cases() {
            trials.add_gpu(format!("gpu::{name}"), body);
        }
        for (name, body) in order::cases() {
            trials.add_gpu(format!("order::{name}"), body);
        }
        trials.add_inner("gpu::a_bf16_back_end_alone".to_string(), gpu::a_bf16_back_end_alone);
    }
    #[cfg(all(feature = "burn-cuda", feature = "nccl"))]
    gpus::add(&mut trials);
    let code = trials.run();
    #[cfg(all(feature = "burn-cuda", feature = "nccl"))]
    nccl_gpus::close();
    code
}

/// A rank's device, and how it reaches the others.
#[cfg(all(feature = "burn-cuda", feature = "nccl"))]
#[allow(dead_code, reason = "other suites read it")]
struct Endpoint<D: moebius::kernels::Kernels> {
    device: D,
    comm: Box<dyn moebius::comm::Communicator<D>>,
}
