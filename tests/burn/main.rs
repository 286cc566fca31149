//! The layer as a burn module: against a dense reference of burn operations, and as a citizen of burn's autodiff,
//! records and optimizers. With the feature `burn-cuda` on a GPU too.

mod dense;
mod dispatch;
mod exact;
mod facade;
mod faults;
#[path = "../common/faulty_comm.rs"]
mod faulty_comm;
#[cfg(feature = "burn-cuda")]
mod gpu;
mod module;
#[cfg(feature = "burn-cuda")]
mod order;
mod support;
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
        ("module", module::cases()),
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
    trials.run()
}
