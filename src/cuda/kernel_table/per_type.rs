//! Kernels by element type, product and format of weights.

use crate::dtype::DType;
use crate::quant::WeightFormat;

/// A kernel for each type of floating point.
#[derive(Debug)]
pub(in crate::cuda) struct PerType<K> {
    pub(super) f32: K,
    pub(super) half: Half<K>,
}

/// A kernel for each 16-bit type.
#[derive(Debug)]
pub(in crate::cuda) struct Half<K> {
    pub(super) f16: K,
    pub(super) bf16: K,
}

/// Kernels for operands of a 16-bit type, and one for any, also different, types.
#[derive(Debug)]
pub(in crate::cuda) struct HalfOrAny<K> {
    pub(in crate::cuda) any: K,
    pub(in crate::cuda) half: Half<K>,
}

impl<K> PerType<K> {
    /// That of a type, f32's where it is no 16-bit one.
    pub(in crate::cuda) fn of(&self, dtype: DType) -> &K {
        self.half.of(dtype).unwrap_or(&self.f32)
    }
}

impl<K> Half<K> {
    /// That of a 16-bit type.
    pub(in crate::cuda) fn of(&self, dtype: DType) -> Option<&K> {
        match dtype {
            DType::F16 => Some(&self.f16),
            DType::BF16 => Some(&self.bf16),
            _ => None,
        }
    }
}

/// Which product a kernel makes, as far as its operands' layout depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum Product {
    /// Gate and up rows of `[E, 2 n, k]`.
    Up,
    /// Rows of `[E, n, k]`.
    Down,
    /// Columns of `[E, k, n]`.
    Dgrad,
    /// The same, and the gradient of the activation.
    DownBwd,
}

/// The shape of a product's tiles on Hopper (`kernels/sm90/grouped_gemm_mainloop.cuh`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cuda) enum TileShape {
    /// Up's, or 192 columns.
    Usual,
    /// More columns.
    Wide,
    /// As many columns as rows.
    Square,
}

/// Something for each product of experts.
#[derive(Debug)]
pub(in crate::cuda) struct PerProduct<T> {
    pub(super) up: T,
    pub(super) down: T,
    pub(super) down_bwd: T,
    pub(super) up_dgrad: T,
}

impl<T> PerProduct<T> {
    pub(in crate::cuda) fn of(&self, product: Product) -> &T {
        match product {
            Product::Up => &self.up,
            Product::Down => &self.down,
            Product::DownBwd => &self.down_bwd,
            Product::Dgrad => &self.up_dgrad,
        }
    }
}

/// Something for each format of quantized weights.
#[derive(Debug)]
pub(in crate::cuda) struct PerFormat<T> {
    pub(super) nvfp4: T,
    pub(super) mxfp4: T,
    pub(super) fp8: T,
}

impl<T> PerFormat<T> {
    pub(in crate::cuda) fn of(&self, format: WeightFormat) -> &T {
        match format {
            WeightFormat::Nvfp4 => &self.nvfp4,
            WeightFormat::Mxfp4 => &self.mxfp4,
            WeightFormat::Fp8Block => &self.fp8,
        }
    }
}

/// Kernels for bf16 rows and few of them, forward.
#[derive(Debug)]
pub(in crate::cuda) struct FewRowsForward<K> {
    pub(super) fp4: Fp4Forward<K>,
    pub(super) up_fp8: K,
    pub(super) down_fp8: K,
}

impl<K> FewRowsForward<K> {
    /// That of a product and format, if they have one.
    pub(in crate::cuda) fn of(&self, product: Product, format: WeightFormat) -> Option<&K> {
        match (product, format) {
            (Product::Up, WeightFormat::Fp8Block) => Some(&self.up_fp8),
            (Product::Down, WeightFormat::Fp8Block) => Some(&self.down_fp8),
            _ => self.fp4.of(product, format),
        }
    }
}

/// Kernels for bf16 rows and 4-bit weights, forward.
#[derive(Debug)]
pub(in crate::cuda) struct Fp4Forward<K> {
    pub(super) up_nvfp4: K,
    pub(super) up_mxfp4: K,
    pub(super) down_nvfp4: K,
    pub(super) down_mxfp4: K,
}

impl<K> Fp4Forward<K> {
    /// That of a product and format, if they have one.
    pub(in crate::cuda) fn of(&self, product: Product, format: WeightFormat) -> Option<&K> {
        match (product, format) {
            (Product::Up, WeightFormat::Nvfp4) => Some(&self.up_nvfp4),
            (Product::Up, WeightFormat::Mxfp4) => Some(&self.up_mxfp4),
            (Product::Down, WeightFormat::Nvfp4) => Some(&self.down_nvfp4),
            (Product::Down, WeightFormat::Mxfp4) => Some(&self.down_mxfp4),
            _ => None,
        }
    }
}
