//! The kernels that this build holds, and the choice among them.

use crate::error::{Error, Result};

/// One stage, compiled for one architecture.
pub(super) struct Cubin {
    pub(super) stage: &'static str,
    /// `"80"`, `"90a"`, `"100f"` …
    pub(super) arch: &'static str,
    /// Names of its kernels.
    pub(super) kernels: &'static [&'static str],
    pub(super) image: &'static [u8],
}

/// Prefix of the names of stages that exist for sm_90a alone.
#[cfg(test)]
pub(super) const SM90_STAGES: &str = "sm90_";

include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// Whether code for `arch` runs on a GPU of compute capability `major.minor`, and how well it fits.
fn fit(arch: &str, (major, minor): (u32, u32)) -> Option<u32> {
    let digits = arch.trim_end_matches(['a', 'f']);
    let number: u32 = digits.parse().ok()?;
    let (arch_major, arch_minor) = (number / 10, number % 10);
    if arch_major != major || arch_minor > minor {
        return None;
    }
    match &arch[digits.len()..] {
        // Architecture-specific code runs on exactly that capability.
        "a" => (arch_minor == minor).then_some(30),
        "f" => Some(20 + arch_minor),
        _ => Some(arch_minor),
    }
}

/// Whether code for `arch` has the stages that exist for Hopper alone.
pub(super) fn arch_is_hopper(arch: &str) -> bool {
    arch == "90a"
}

/// The best architecture among `built` for a GPU.
pub(super) fn choose<'a>(built: impl Iterator<Item = &'a str> + Clone, capability: (u32, u32)) -> Result<&'a str> {
    built.clone().filter_map(|a| Some((fit(a, capability)?, a))).max().map(|(_, a)| a).ok_or_else(|| {
        let mut list: Vec<&str> = built.collect();
        list.sort_unstable();
        list.dedup();
        let (major, minor) = capability;
        Error::Device {
            call: "Cuda::new",
            operation: format!("kernels for compute capability {major}.{minor}"),
            message: match list.is_empty() {
                true => "this build has none (it was made without nvcc)".to_string(),
                false if major < 8 => "8.0 or later is needed (bf16)".to_string(),
                false => {
                    format!("this build has sm_{}; rebuild with CUDA_COMPUTE_CAP={major}{minor}", list.join(", sm_"))
                }
            },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        let mut seen = std::collections::BTreeSet::new();
        for cubin in CUBINS {
            // Hopper's own are empty elsewhere.
            let there = !cubin.kernels.is_empty() || cubin.stage.starts_with(SM90_STAGES) && cubin.arch != "90a";
            assert!(there, "{} for sm_{}", cubin.stage, cubin.arch);
            for kernel in cubin.kernels {
                assert!(seen.insert((cubin.arch, kernel)), "{kernel} twice for sm_{}", cubin.arch);
            }
        }
    }

    #[test]
    fn the_closest_architecture_wins() -> Result<()> {
        let built = ["80", "86", "90a", "100f", "100"];
        let of = |capability| choose(built.iter().copied(), capability);
        assert_eq!(of((8, 0))?, "80");
        assert_eq!(of((8, 9))?, "86");
        assert_eq!(of((9, 0))?, "90a");
        assert_eq!(of((10, 3))?, "100f");
        let error = of((12, 0)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("12.0") && error.contains("CUDA_COMPUTE_CAP=120"), "{error}");
        let old = of((7, 5)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(old.contains("8.0 or later") && !old.contains("rebuild"), "{old}");
        assert!(choose(["90a"].into_iter(), (9, 1)).is_err(), "architecture-specific code runs nowhere else");
        assert!(choose(["86"].into_iter(), (8, 0)).is_err(), "newer code does not run on older GPUs");
        Ok(())
    }
}
