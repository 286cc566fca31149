//! All kernels of this crate, each a field: what a launch takes is found when the modules are loaded, so a name that is
//! wrong, or a kernel that a cubin lacks, fails there and not at a launch.
//!
//! A table is made by a function that finds one kernel; that of a GPU asks the driver, and tests collect the names.

mod find;
mod per_type;
mod quant_stages;
mod sm90_stages;
mod stages;

use crate::error::Result;

use find::Stage;
use per_type::{PerFormat, PerProduct, PerType};
use quant_stages::{
    DecodeKernels, DequantizeKernels, Fp8BlockCastKernels, Mxfp8CastKernels, Nvfp4AlignedKernels, Nvfp4CastKernels,
    QuantAmaxKernels,
};
use stages::{
    AdamWKernels, AllToAllPlanKernels, AuxLossKernels, LinearKernels, PermuteKernels, PlanKernels, RouterKernels,
    RoutingRecordsKernels, WgradKernels,
};

pub(super) use find::{BlockStart, KernelSpec, Traits};
pub(super) use per_type::{Half, HalfOrAny, Product, TileShape};
pub(super) use quant_stages::Nvfp4Mode;
pub(super) use sm90_stages::Sm90Kernels;

/// All of them.
#[derive(Debug)]
pub(super) struct Table<K> {
    pub(super) adamw: AdamWKernels<K>,
    pub(super) aux_loss: AuxLossKernels<K>,
    pub(super) grouped_gemm: PerProduct<PerType<K>>,
    pub(super) concat_rows: K,
    pub(super) linear: LinearKernels<K>,
    pub(super) all_to_all_plan: AllToAllPlanKernels<K>,
    pub(super) mxfp8_cast: Mxfp8CastKernels<K>,
    pub(super) fp8_block_cast: Fp8BlockCastKernels<K>,
    pub(super) nvfp4_cast: Nvfp4CastKernels<K>,
    pub(super) nvfp4_aligned: Nvfp4AlignedKernels<K>,
    pub(super) permute: PermuteKernels<K>,
    pub(super) plan: PlanKernels<K>,
    pub(super) quant_amax: QuantAmaxKernels<K>,
    pub(super) dequantize: DequantizeKernels<K>,
    pub(super) routing_records: RoutingRecordsKernels<K>,
    pub(super) router: RouterKernels<K>,
    pub(super) w4a16: PerFormat<PerProduct<PerType<K>>>,
    pub(super) w4a16_decode: DecodeKernels<K>,
    pub(super) wgrad: WgradKernels<K>,
    /// `None`: a GPU that they are not for.
    pub(super) sm90: Option<Sm90Kernels<K>>,
}

impl<K> Table<K> {
    /// The table of a GPU of these traits.
    ///
    /// # Errors
    /// The first that `find` returns.
    pub(super) fn new(traits: Traits, mut find: impl FnMut(KernelSpec) -> Result<K>) -> Result<Self> {
        let find = &mut find;
        Ok(Self {
            adamw: stages::adamw(Stage { stage: "adamw", find })?,
            aux_loss: stages::aux_loss(Stage { stage: "aux_loss", find })?,
            grouped_gemm: stages::grouped_gemm(Stage { stage: "grouped_gemm", find })?,
            concat_rows: Stage { stage: "concat_rows", find }.one("concat_rows")?,
            linear: stages::linear(Stage { stage: "linear", find })?,
            all_to_all_plan: stages::all_to_all_plan(Stage { stage: "all_to_all_plan", find })?,
            fp8_block_cast: quant_stages::fp8_block_cast(Stage { stage: "fp8_block_cast", find })?,
            mxfp8_cast: quant_stages::mxfp8_cast(Stage { stage: "mxfp8_cast", find })?,
            nvfp4_cast: quant_stages::nvfp4_cast(Stage { stage: "nvfp4_cast", find })?,
            nvfp4_aligned: quant_stages::nvfp4_aligned(Stage { stage: "nvfp4_cast_aligned", find })?,
            permute: stages::permute(Stage { stage: "permute", find })?,
            plan: stages::plan(Stage { stage: "plan", find })?,
            quant_amax: quant_stages::quant_amax(Stage { stage: "quant_amax", find })?,
            dequantize: quant_stages::dequantize(Stage { stage: "dequantize", find })?,
            routing_records: stages::routing_records(Stage { stage: "routing_records", find })?,
            router: stages::router(Stage { stage: "router", find })?,
            w4a16: quant_stages::w4a16(Stage { stage: "w4a16", find })?,
            w4a16_decode: quant_stages::w4a16_decode(Stage { stage: "w4a16_decode", find }, traits.decode_shared)?,
            wgrad: stages::wgrad(Stage { stage: "wgrad", find })?,
            sm90: if traits.sm90 { Some(sm90_stages::sm90(find)?) } else { None },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::cubins::{CUBINS, arch_is_hopper};
    use super::*;

    /// All kernels that a GPU of this architecture asks for, as (stage, name).
    fn wanted(arch: &str) -> Vec<(&'static str, &'static str)> {
        let mut all = Vec::new();
        let traits = Traits { sm90: arch_is_hopper(arch), decode_shared: 0 };
        let table = Table::new(traits, |kernel| {
            all.push((kernel.stage, kernel.name));
            Ok(())
        });
        assert!(table.is_ok());
        all
    }

    /// Both ways: a name that no cubin has would fail when it is loaded, a kernel that nobody names is dead.
    #[test]
    fn the_cubins_hold_what_the_table_names_and_nothing_else() {
        let archs: BTreeSet<&str> = CUBINS.iter().map(|c| c.arch).collect();
        assert!(!archs.is_empty(), "this build has no kernels");
        for arch in archs {
            let of_arch = CUBINS.iter().filter(|c| c.arch == arch);
            let held: BTreeSet<_> = of_arch.flat_map(|c| c.kernels.iter().map(|name| (c.stage, *name))).collect();
            let named = wanted(arch);
            let once: BTreeSet<_> = named.iter().copied().collect();
            assert_eq!(named.len(), once.len(), "sm_{arch}: a kernel is named twice");
            let missing: Vec<_> = once.difference(&held).collect();
            let unnamed: Vec<_> = held.difference(&once).collect();
            assert!(
                missing.is_empty() && unnamed.is_empty(),
                "sm_{arch}: no cubin has {missing:?}, nobody names {unnamed:?}"
            );
        }
    }

    #[test]
    fn the_first_kernel_that_is_missing_is_told() {
        let traits = Traits { sm90: true, decode_shared: 0 };
        for missing in ["aux_loss_scores", "wgrad_bf16", "sm90_wgrad_bf16"] {
            let table = Table::new(traits, |kernel| match kernel.name == missing {
                true => Err(crate::error::Error::invalid("test", kernel.name, kernel.stage, "nothing")),
                false => Ok(()),
            });
            assert!(table.is_err_and(|e| e.to_string().contains(missing)), "{missing}");
        }
    }
}
