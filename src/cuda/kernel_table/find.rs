//! Finding a stage's kernels by their names.

use crate::error::Result;

use super::per_type::{FewRowsForward, Fp4Forward, Half, HalfOrAny, PerType};

/// A kernel to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) struct KernelSpec {
    /// The file in `kernels/` that has it.
    pub(in crate::cuda) stage: &'static str,
    pub(in crate::cuda) name: &'static str,
    /// Shared memory beside its own variables that it is to be allowed; 0: what every kernel has.
    pub(in crate::cuda) shared: u32,
}

/// Kernels of a decode step, short ones, that wait themselves for what the kernel before them in the stream writes
/// (`wait_for_previous_kernel` in `kernels/common/common.cuh`), so that they are started while it runs.
const PROGRAMMATIC: [&str; 33] = [
    "decode16_down_fp8",
    "decode16_down_mxfp4",
    "decode16_down_nvfp4",
    "decode16_up_fp8",
    "decode16_up_mxfp4",
    "decode16_up_nvfp4",
    "decode8_down_fp8",
    "decode8_down_mxfp4",
    "decode8_narrow_down_fp8",
    "decode8_narrow_down_mxfp4",
    "decode8_narrow_down_nvfp4",
    "decode8_narrow_up_fp8",
    "decode8_narrow_up_mxfp4",
    "decode8_narrow_up_nvfp4",
    "decode8_down_nvfp4",
    "decode8_up_fp8",
    "decode8_up_mxfp4",
    "decode8_up_nvfp4",
    "gather_rows",
    "list_tiles",
    "plan_small",
    "reduce_few_rows",
    "reduce_rows",
    "route",
    "route_softmax",
    "sm90_decode_down_bf16",
    "sm90_decode_down_f16",
    "sm90_decode_linear_bf16",
    "sm90_decode_linear_f16",
    "sm90_decode_up_bf16",
    "sm90_decode_up_f16",
    "sm90_route_plan_bf16",
    "sm90_route_plan_f16",
];

/// Kernels whose blocks wait for each other, so that all of them have to run at once.
const COOPERATIVE: [&str; 2] = ["sm90_nvlink_exchange", "sm90_nvlink_plan"];

/// When a launch's blocks start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum BlockStart {
    /// Behind the kernel before in the stream, as there is room for them.
    Plain,
    /// While that runs (programmatic dependent launch).
    Programmatic,
    /// Behind it, and all at once (cooperative launch).
    Cooperative,
}

impl KernelSpec {
    /// When its blocks start, on a GPU that has programmatic dependent launches or not.
    pub(in crate::cuda) fn start(&self, programmatic: bool) -> BlockStart {
        match self.name {
            name if COOPERATIVE.contains(&name) => BlockStart::Cooperative,
            name if programmatic && PROGRAMMATIC.contains(&name) => BlockStart::Programmatic,
            _ => BlockStart::Plain,
        }
    }
}

/// A GPU, as far as kernels depend on it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Traits {
    /// It has those of sm_90a.
    pub(in crate::cuda) sm90: bool,
    /// Shared memory that the kernels of few rows with quantized weights may take.
    pub(in crate::cuda) decode_shared: u32,
}

/// Finds the kernels of a stage.
pub(super) struct Stage<'a, K> {
    pub(super) stage: &'static str,
    pub(super) find: &'a mut dyn FnMut(KernelSpec) -> Result<K>,
}

impl<K> Stage<'_, K> {
    /// A kernel that needs no more shared memory than every kernel has.
    pub(super) fn one(&mut self, name: &'static str) -> Result<K> {
        self.asking(name, 0)
    }

    pub(super) fn asking(&mut self, name: &'static str, shared: u32) -> Result<K> {
        (self.find)(KernelSpec { stage: self.stage, name, shared })
    }

    pub(super) fn half(&mut self, [f16, bf16]: [&'static str; 2], shared: u32) -> Result<Half<K>> {
        Ok(Half { f16: self.asking(f16, shared)?, bf16: self.asking(bf16, shared)? })
    }

    /// `shared` is what those of 16-bit types ask for.
    pub(super) fn types(&mut self, [f32, f16, bf16]: [&'static str; 3], shared: u32) -> Result<PerType<K>> {
        Ok(PerType { f32: self.one(f32)?, half: self.half([f16, bf16], shared)? })
    }

    pub(super) fn half_or_any(&mut self, [any, f16, bf16]: [&'static str; 3], shared: u32) -> Result<HalfOrAny<K>> {
        Ok(HalfOrAny { any: self.one(any)?, half: self.half([f16, bf16], shared)? })
    }

    pub(super) fn fp4_forward(&mut self, names: [&'static str; 4], shared: u32) -> Result<Fp4Forward<K>> {
        let [up_nvfp4, up_mxfp4, down_nvfp4, down_mxfp4] = names;
        Ok(Fp4Forward {
            up_nvfp4: self.asking(up_nvfp4, shared)?,
            up_mxfp4: self.asking(up_mxfp4, shared)?,
            down_nvfp4: self.asking(down_nvfp4, shared)?,
            down_mxfp4: self.asking(down_mxfp4, shared)?,
        })
    }

    /// Those of few rows: of 4-bit weights as [`fp4_forward`](Self::fp4_forward) has them, then of fp8 blocks.
    pub(super) fn few_rows_forward(
        &mut self,
        fp4: [&'static str; 4],
        [up_fp8, down_fp8]: [&'static str; 2],
        shared: u32,
    ) -> Result<FewRowsForward<K>> {
        Ok(FewRowsForward {
            fp4: self.fp4_forward(fp4, shared)?,
            up_fp8: self.asking(up_fp8, shared)?,
            down_fp8: self.asking(down_fp8, shared)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of a kernel in its file, or of the macro that makes it.
    fn definition<'a>(source: &'a str, name: &str) -> Option<&'a str> {
        let made = source.lines().find_map(|line| line.split_once(&format!("({name}, ")).map(|(made_by, _)| made_by));
        let start = match made {
            Some(made_by) => source.find(&format!("#define {made_by}("))?,
            None => source.find(&format!(" {name}(const __grid_constant__ "))?,
        };
        let end = source[start..].find(if made.is_some() { "\n\n" } else { "\n}\n" })?;
        Some(&source[start..start + end])
    }

    /// One that is named and does not wait would read what is not there yet.
    #[test]
    fn early_kernels_wait_themselves_first() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let sources: Vec<String> = files
            .filter(|path| path.extension().is_some_and(|e| e == "cu"))
            .filter_map(|path| std::fs::read_to_string(path).ok())
            .collect();
        for name in PROGRAMMATIC {
            let found: Vec<&str> = sources.iter().filter_map(|source| definition(source, name)).collect();
            assert_eq!(found.len(), 1, "{name}");
            let body = found[0].split_once("GemmParams p").map_or(found[0], |(_, rest)| rest);
            let first = body.split_once('{').map_or("", |(_, rest)| rest).trim_start_matches(['\\', ' ', '\n']);
            assert!(first.starts_with("wait_for_previous_kernel();"), "{name}: {first}");
        }
    }
}
