//! What ranks compare of an optimizer but for its parameters.

use crate::DType;
use crate::compare::ComparedField;
use crate::kernels::optimizer::LossScaling;

use super::{AdamWOptions, GroupOptions};

/// What is the same on all ranks. 0 stands for an option that is `None`: none of these may be 0.
pub(super) fn fields(options: &AdamWOptions, groups: usize, parameters: usize) -> [ComparedField; 11] {
    let AdamWOptions { max_norm, loss_scaling, moments, seed, .. } = options;
    let count = ComparedField::number;
    let float = |name, value: Option<f64>| ComparedField {
        name,
        value: value.unwrap_or(0.0).to_bits(),
        text: |n| if n == 0 { "none".to_string() } else { f64::from_bits(n).to_string() },
    };
    let scaling = |name, of: fn(&LossScaling) -> f64| float(name, loss_scaling.as_ref().map(of));
    [
        count("optimizer.parameters", parameters as u64),
        count("optimizer.groups", groups as u64),
        float("optimizer.max_norm", *max_norm),
        ComparedField {
            name: "optimizer.moments",
            value: u64::from(*moments == DType::BF16),
            text: |n| if n == 0 { DType::F32.to_string() } else { DType::BF16.to_string() },
        },
        count("optimizer.seed", *seed),
        scaling("optimizer.loss_scaling.initial", |s| s.initial),
        scaling("optimizer.loss_scaling.growth", |s| s.growth),
        scaling("optimizer.loss_scaling.backoff", |s| s.backoff),
        scaling("optimizer.loss_scaling.interval", |s| f64::from(s.interval)),
        scaling("optimizer.loss_scaling.min", |s| s.min),
        scaling("optimizer.loss_scaling.max", |s| s.max),
    ]
}

/// The groups' options, which are the same on all ranks as well.
pub(super) fn group_fields(groups: &[GroupOptions]) -> Vec<ComparedField> {
    let field = |name, value: f64| ComparedField {
        text: |bits| f64::from_bits(bits).to_string(),
        ..ComparedField::number(name, value.to_bits())
    };
    let of = |group: &GroupOptions| {
        [
            field("optimizer.group.lr", group.lr),
            field("optimizer.group.betas[0]", group.betas[0]),
            field("optimizer.group.betas[1]", group.betas[1]),
            field("optimizer.group.eps", group.eps),
            field("optimizer.group.weight_decay", group.weight_decay),
        ]
    };
    groups.iter().flat_map(of).collect()
}
