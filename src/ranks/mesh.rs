//! How a world divides into groups.

use std::fmt;

use super::MAX_WORLD;
use crate::error::{Error, Result};

/// Kind of work that the ranks of a group divide among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Axis {
    /// The experts: each rank has some of them.
    Expert,
    /// The rows of each expert's weights: each rank keeps a shard of them, and multiplies by the whole ([`etp`](crate::etp)).
    /// Not Megatron's expert tensor parallelism, which splits the product.
    ExpertShard,
    /// The tokens: each rank has all parameters of its place on the other axes.
    Data,
    /// The matrices of the rest of the model (TP).
    Tensor,
}

impl Axis {
    /// Every axis.
    pub const ALL: [Axis; 4] = [Axis::Expert, Axis::ExpertShard, Axis::Data, Axis::Tensor];

    /// As an axis of a [`Mesh`], with so many ranks.
    pub const fn of_size(self, size: usize) -> AxisSize {
        AxisSize { axis: self, size }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Expert => "expert",
            Axis::ExpertShard => "expert_shard",
            Axis::Data => "data",
            Axis::Tensor => "tensor",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An axis of a [`Mesh`] and the number of ranks in each of its groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisSize {
    /// The axis.
    pub axis: Axis,
    /// Ranks in a group.
    pub size: usize,
}

/// A world as a grid of ranks.
///
/// The order is the caller's: axes from the slowest to the fastest, ranks counted as digits are. Neighboring ranks
/// differ in the last axis, so name that one last whose group exchanges most: ranks of one host are neighbors.
///
/// ```
/// use moebius::ranks::{Axis, Mesh};
/// let mesh = Mesh::new(8, &[Axis::Data.of_size(2), Axis::Expert.of_size(2), Axis::Tensor.of_size(2)]).unwrap();
/// assert_eq!(mesh.groups(Axis::Tensor), [[0, 1], [2, 3], [4, 5], [6, 7]]);
/// assert_eq!(mesh.groups(Axis::Expert), [[0, 2], [1, 3], [4, 6], [5, 7]]);
/// assert_eq!(mesh.groups(Axis::Data), [[0, 4], [1, 5], [2, 6], [3, 7]]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    world: usize,
    /// Axes from the slowest to the fastest.
    axes: Vec<AxisSize>,
}

/// A rank's place in its group of one axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMember {
    /// Number of the group among those of the axis, in the order of their first ranks (a split's color).
    pub group: usize,
    /// Rank inside the group: the coordinate on the axis (a split's key).
    pub rank: usize,
    /// Ranks of the world that form the group, ascending.
    pub ranks: Vec<usize>,
}

impl Mesh {
    /// A grid of `world` ranks, axes from the slowest to the fastest. An axis that is not named has size 1.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the sizes' product is not `world`, a size is 0, an axis is named twice.
    pub fn new(world: usize, axes: &[AxisSize]) -> Result<Self> {
        const CALL: &str = "ranks::Mesh::new";
        if world == 0 || world > MAX_WORLD {
            return Err(Error::invalid(CALL, "world", format!("1..={MAX_WORLD}"), world));
        }
        let mut product = 1usize;
        for (i, AxisSize { axis, size }) in axes.iter().enumerate() {
            if *size == 0 {
                return Err(Error::invalid(CALL, axis, "at least 1", 0));
            }
            if axes[..i].iter().any(|other| other.axis == *axis) {
                return Err(Error::invalid(CALL, axis, "named once", "named twice"));
            }
            product = product.saturating_mul(*size);
        }
        if product != world {
            let sizes = axes.iter().map(|of| format!("{} {}", of.axis, of.size)).collect::<Vec<_>>().join(" x ");
            return Err(Error::invalid(CALL, "axes", format!("a product of {world}"), format!("{sizes} = {product}")));
        }
        Ok(Self { world, axes: axes.to_vec() })
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Ranks in each group of an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.axes.iter().find(|of| of.axis == axis).map_or(1, |of| of.size)
    }

    /// Place of a rank on an axis, `0..size(axis)`.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no rank of this world.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> Result<usize> {
        self.check("ranks::Mesh::coordinate", rank)?;
        Ok(rank / self.stride(axis) % self.size(axis))
    }

    /// A rank's group on an axis: the ranks equal to it on all other axes.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no rank of this world.
    pub fn member(&self, axis: Axis, rank: usize) -> Result<GroupMember> {
        self.check("ranks::Mesh::member", rank)?;
        let (stride, size) = (self.stride(axis), self.size(axis));
        let place = rank / stride % size;
        let first = rank - place * stride;
        // First ranks are those with 0 on the axis: their order is that of the digits left when it is taken out.
        let group = first / (stride * size) * stride + first % stride;
        Ok(GroupMember { group, rank: place, ranks: (0..size).map(|i| first + i * stride).collect() })
    }

    /// Every group of an axis, in the order of their first ranks: each rank is in exactly one.
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        let (stride, size) = (self.stride(axis), self.size(axis));
        let first = (0..self.world).filter(|rank| rank / stride % size == 0);
        first.map(|first| (0..size).map(|i| first + i * stride).collect()).collect()
    }

    /// Distance of neighbors on the axis: the product of all faster axes.
    fn stride(&self, axis: Axis) -> usize {
        match self.axes.iter().position(|of| of.axis == axis) {
            Some(at) => self.axes[at + 1..].iter().map(|of| of.size).product(),
            None => 1,
        }
    }

    fn check(&self, call: &'static str, rank: usize) -> Result<()> {
        if rank < self.world {
            return Ok(());
        }
        Err(Error::invalid(call, "rank", format!("0..{}", self.world), rank))
    }
}
