//! NVIDIA GPUs: this crate's own kernels, compiled ahead by `build.rs`, loaded through the driver.
//!
//! A [`Cuda`] is one stream of one context, its own or the host framework's. All its work (kernels, copies,
//! allocations and frees) is ordered on that stream, which is what makes borrowed views safe: memory that a kernel
//! still uses can be given back only behind it. A second stream is a `Cuda` of its own ([`Cuda::with_new_stream`]),
//! ordered with the first by events alone.
//!
//! Types: bf16 and f16 with sums in f32, and f32; `F64` is for the CPU. Gradients of weights may be f32 where rows are
//! 16-bit. Results are the same bits in every run: no kernel adds floats with atomics.
//!
//! A kernel cannot return an error. It raises a fault word, which the next call that waits for the GPU anyway
//! ([`Cuda::check`], `read`, `download`) returns, or a prepare that finds it has reached the host.
//!
//! With one rank, forward and backward of a layer wait for nothing and, once they have seen their sizes, ask the driver
//! for no memory ([`Cuda::memory`]); so they can be captured ([`Cuda::capture`]). With several ranks the same holds
//! over all-gather, NVLink and NCCL EP with a static capacity; all-to-all, and an eager capacity, wait in prepare for
//! numbers of rows. What waits in any case: reading a load or an auxiliary loss, an expert capacity that keeps by
//! probability (planned on the host), and [`Reporting::Immediate`](crate::ep::Reporting::Immediate).
//!
//! ```text
//! params, bindings, heuristics                                what kernels are told, and choices that were measured
//! driver, failure, exit                                       the driver's errors, streams that do not end, and processes
//! cubins, tile_config, kernel_table, context_kernels          kernels as they are compiled and loaded
//! page_locked, memory, status_words, capture_state            what else a GPU is made of
//! device, graph, sync, buffer, context_sync                   a GPU; its captures, waits, tensors, and order with others
//! launch, tensor_map, fault_site, status, init                launches, errors that kernels raise, and how a GPU is opened
//! layout, plan, routing_records, low_latency_sort, permute    slots: tiled, planned, moved
//! experts, linear, wgrad, sm90_grouped_gemm                   products
//! w4a16, dequantized                                          and those with quantized weights
//! peers, nvlink                                               other GPUs of a host, and rows stored there
//! router, quant, etp                                          routing, casts, sums of sharded gradients
//! optimizer                                                   norms, and steps of AdamW
//! kernels                                                     all of it as the trait has it
//! preferred_dispatchers, group                                what `Auto` takes between GPUs, and a group of one rank
//! ```

mod bindings;
mod buffer;
mod capture_state;
mod context_kernels;
mod context_sync;
mod cubins;
mod dequantized;
mod device;
mod driver;
mod etp;
#[cfg(all(feature = "nccl", target_os = "linux", target_env = "gnu"))]
mod exit;
mod experts;
mod failure;
mod fault_site;
mod graph;
mod group;
mod heuristics;
mod init;
mod kernel_table;
mod kernels;
mod launch;
mod layout;
mod linear;
#[cfg(feature = "nccl-ep")]
pub(crate) mod low_latency_sort;
mod memory;
#[cfg(feature = "nccl")]
pub(crate) mod nvlink;
#[cfg(feature = "nccl")]
pub(crate) mod nvlink_low_latency;
#[cfg(feature = "nccl")]
pub(crate) mod nvlink_plan;
mod optimizer;
mod page_locked;
mod params;
#[cfg(feature = "nccl")]
pub(crate) mod peers;
mod permute;
pub(crate) mod plan;
mod preferred_dispatchers;
mod quant;
mod route_plan;
mod router;
mod routing_records;
mod sm90_decode;
mod sm90_grouped_gemm;
mod status;
mod status_words;
mod sync;
mod tensor_map;
mod tile_config;
mod w4a16;
mod wgrad;

/// The driver bindings whose streams [`Cuda::on`] takes.
pub use cudarc;

pub use crate::device::Waited;
pub use buffer::{DeviceBuffer, DeviceMut, DeviceRef};
pub use device::{Cuda, Event};
#[cfg(feature = "nccl")]
pub(crate) use failure::{FailureSource, ReplayGate, StuckFlag};
pub use graph::Captured;
pub use memory::Memory;
#[cfg(all(feature = "nccl", not(feature = "nccl-ep")))]
pub(crate) use preferred_dispatchers::dispatcher_not_built;
#[cfg(feature = "nccl")]
pub(crate) use preferred_dispatchers::preferred_dispatchers;
