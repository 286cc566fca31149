//! Clipping by the global norm, with the same bits however weights are cut into rows.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use moebius::comm::{Op, Tag};

use crate::Failure;
use crate::mesh::Mesh;
use crate::world::World;

/// Parameters of a rank.
pub struct Gradients<'a> {
    /// Those that all ranks hold, with their whole gradients.
    pub replicated: Vec<&'a Var>,
    /// Those of which it holds whole rows.
    pub shares: Vec<&'a Var>,
    pub store: &'a mut GradStore,
}

/// Sums of the squares of each row, each in the row's order.
fn rows(gradient: &Tensor) -> Result<Vec<f64>, Failure> {
    let width = gradient.dims().last().copied().unwrap_or(1).max(1);
    let values = gradient.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.chunks(width).map(|row| row.iter().map(|v| f64::from(*v).powi(2)).sum()).collect())
}

impl Gradients<'_> {
    fn get(&self, var: &Var) -> Result<Vec<f64>, Failure> {
        self.store.get(var).map_or_else(|| Ok(Vec::new()), rows)
    }

    /// The norm of all ranks' gradients: rows are added in the order in which the whole weights have them, whoever
    /// holds them. Padding adds zeros at the end.
    pub fn norm(&self, world: &mut World, mesh: Mesh, step: usize) -> Result<f64, Failure> {
        let mut squares = 0.0;
        for var in &self.replicated {
            squares += self.get(var)?.iter().sum::<f64>();
        }
        for (number, var) in self.shares.iter().enumerate() {
            let own = self.get(var)?;
            let tag = Tag { layer: number as u32, op: Op::User, sequence: step as u64 };
            let all = world.gather(tag, &own)?;
            for p in 0..mesh.ep {
                for n in 0..mesh.shards() {
                    let first = mesh.rank(p, n, 0) * own.len();
                    squares = all[first..first + own.len()].iter().fold(squares, |sum, row| sum + row);
                }
            }
        }
        Ok(squares.sqrt())
    }

    /// Scales all gradients, if the norm exceeds `most`.
    pub fn clip(&mut self, norm: f64, most: f64) -> Result<(), Failure> {
        if norm <= most {
            return Ok(());
        }
        for var in self.replicated.iter().chain(&self.shares) {
            if let Some(gradient) = self.store.get(var) {
                let clipped = (gradient * (most / norm))?;
                self.store.insert(var, clipped);
            }
        }
        Ok(())
    }
}
