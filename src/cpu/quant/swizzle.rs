//! Swizzle of block scales on the CPU.

use crate::cpu::Cpu;
use crate::error::Result;
use crate::quant::Swizzle;
use crate::quant::{check, swizzled_index};

pub(super) fn swizzle(call: Swizzle<'_, Cpu>) -> Result<()> {
    let [_, columns] = check::swizzle("swizzle", &call, false)?;
    let (from, to) = (call.from.data(), call.to.into_data());
    to.fill(0);
    for (i, row) in from.chunks_exact(columns).enumerate() {
        for (j, scale) in row.iter().enumerate() {
            to[swizzled_index(i, j, columns)] = *scale;
        }
    }
    Ok(())
}

pub(super) fn unswizzle(call: Swizzle<'_, Cpu>) -> Result<()> {
    let [_, columns] = check::swizzle("unswizzle", &call, true)?;
    let (from, to) = (call.from.data(), call.to.into_data());
    for (i, row) in to.chunks_exact_mut(columns).enumerate() {
        for (j, scale) in row.iter_mut().enumerate() {
            *scale = from[swizzled_index(i, j, columns)];
        }
    }
    Ok(())
}
