//! The layer as a candle user meets it: inside a model, trained, with odd shapes, and used wrongly. What one rank does
//! is done on every device: the CPU, and with the `cuda` feature a GPU. Dispatch and combine are done over several GPUs
//! too, with the feature `nccl`.

#[cfg(feature = "cuda")]
mod ahead;
#[cfg(feature = "cuda")]
mod capture;
mod dispatch;
mod facade;
#[path = "../common/faulty_comm.rs"]
mod faulty_comm;
mod forward_into;
#[path = "../common/goldens.rs"]
mod goldens;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "nccl")]
mod gpus;
#[cfg(feature = "nccl")]
mod gpus_training;
mod host_experts;
mod initial;
mod main_gradients;
mod module;
mod optimizer;
mod quantized;
mod rank_gradients;
mod ranks;
mod reducer;
mod sharded;
mod support;
#[path = "../common/trials.rs"]
mod trials;
mod user;

use std::process::ExitCode;
#[cfg(feature = "cuda")]
use std::sync::{PoisonError, RwLock};

use candle_core::Device;
use dispatch::Place;
#[cfg(feature = "nccl")]
use trials::GPUS;
use trials::Trials;

/// Held by every test of the GPU; alone by one that captures, or that measures what the host waits for.
#[cfg(feature = "cuda")]
static CONTEXT: RwLock<()> = RwLock::new(());

/// The suites of every device.
#[allow(clippy::type_complexity, reason = "names and functions, no more")]
fn suites() -> [(&'static str, Vec<(&'static str, fn(&Device) -> support::AnyResult<()>)>); 7] {
    [
        ("facade", facade::cases()),
        ("host_experts", host_experts::cases()),
        ("main_gradients", main_gradients::cases()),
        ("module", module::cases()),
        ("optimizer", optimizer::cases()),
        ("quantized", quantized::cases()),
        ("user", user::cases()),
    ]
}

fn main() -> ExitCode {
    #[cfg(feature = "cuda")]
    let device = Device::new_cuda_with_stream(0);
    #[cfg(not(feature = "cuda"))]
    let device: Result<Device, &str> = Err("built without the feature `cuda`");
    let mut trials = Trials::new(device.as_ref().map(drop));
    for (file, cases) in [
        ("ranks", ranks::cases()),
        ("initial", initial::cases()),
        ("rank_gradients", rank_gradients::cases()),
        ("reducer", reducer::cases()),
    ] {
        for (name, body) in cases {
            trials.add(format!("{file}::{name}"), body);
        }
    }
    for (file, cases) in suites() {
        for (name, body) in cases {
            trials.add(format!("{file}::{name}"), move || body(&Device::Cpu));
        }
    }
    for ((name, body), ranks) in sharded::cases().into_iter().flat_map(|case| [1, 2, 4].map(|ranks| (case, ranks))) {
        trials.add(format!("sharded::{name}, {ranks} ranks"), move || body(ranks));
    }
    #[cfg(feature = "nccl")]
    let found = gpus::available();
    for (name, body) in dispatch::cpu_cases() {
        trials.add(format!("dispatch::{name}"), body);
    }
    let dispatch = dispatch::cases().into_iter().map(|case| ("dispatch", case));
    for (file, (name, body)) in dispatch.chain(forward_into::cases().into_iter().map(|case| ("forward_into", case))) {
        trials.add(format!("{file}::{name}"), move || body(&Place::Cpu));
        #[cfg(feature = "cuda")]
        trials.add_gpu(format!("{file}::{name}, GPU"), move || {
            let _beside = CONTEXT.read().unwrap_or_else(PoisonError::into_inner);
            body(&Place::Gpu(Device::new_cuda_with_stream(0)?))
        });
        #[cfg(feature = "nccl")]
        for ranks in GPUS {
            trials.add_gpus(format!("{file}::{name}, {ranks} GPUs"), (ranks, found), move || {
                let _alone = CONTEXT.write().unwrap_or_else(PoisonError::into_inner);
                body(&Place::Gpus(ranks))
            });
        }
    }
    #[cfg(feature = "nccl")]
    for (file, cases) in
        [("gpus_training", gpus_training::cases().to_vec()), ("sharded", sharded::gpus_cases().to_vec())]
    {
        for ((name, body), ranks) in cases.into_iter().flat_map(|case| GPUS.map(|ranks| (case, ranks))) {
            trials.add_gpus(format!("{file}::{name}, {ranks} GPUs"), (ranks, found), move || {
                let _alone = CONTEXT.write().unwrap_or_else(PoisonError::into_inner);
                body(ranks)
            });
        }
    }
    #[cfg(feature = "cuda")]
    for (file, cases) in suites().into_iter().chain([("gpu", gpu::cases())]) {
        for (name, body) in cases {
            // A device of its own for each: they run side by side.
            trials.add_gpu(format!("{file}::{name}, GPU"), move || {
                let _beside = CONTEXT.read().unwrap_or_else(PoisonError::into_inner);
                body(&Device::new_cuda_with_stream(0)?)
            });
        }
    }
    // A capture ends where another thread makes a device of the same GPU.
    #[cfg(feature = "cuda")]
    for (file, cases) in [("ahead", ahead::cases()), ("capture", capture::cases())] {
        for (name, body) in cases {
            trials.add_gpu(format!("{file}::{name}, GPU"), move || {
                let _alone = CONTEXT.write().unwrap_or_else(PoisonError::into_inner);
                body(&Device::new_cuda_with_stream(0)?)
            });
        }
    }
    let code = trials.run();
    #[cfg(feature = "nccl")]
    gpus::close();
    code
}
