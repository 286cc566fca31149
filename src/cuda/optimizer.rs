//! Steps of an optimizer on a GPU: `kernels/adamw.cu`.
//!
//! Descriptions of parameters are kernel parameters, as many as fit a launch at a time, so that a step copies nothing
//! from the host, waits for nothing and can be captured.

use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::optimizer::{
    AdamWTensor, AdamWUpdate, COEFFICIENTS, Convert, GROUP_STATE, LEAF, LEAF_SUMS, OptimizerDevice, SETTINGS,
    STATE_NUMBERS, SquareSums, StepControl, coefficient, state,
};
use crate::quant::philox;
use crate::tensor::Tensor;

use super::device::Cuda;
use super::heuristics::LOOP_BLOCKS;
use super::launch::Grid;
use super::params::{self, ADAMW_JOBS, ADAMW_SPAN, ADAMW_THREADS, NORM_TASK_HEIGHT, SQUARE_JOBS, TREE_JOBS, type_code};

// Kernels and descriptions agree.
const _: () = assert!(params::NORM_LEAF as usize == LEAF && params::NORM_LEAF_SUMS as usize == LEAF_SUMS);
const _: () = assert!(params::STATE_NUMBERS as usize == STATE_NUMBERS && params::GROUP_STATE as usize == GROUP_STATE);
const _: () = assert!(params::GROUP_SETTINGS as usize == SETTINGS && params::COEFFICIENTS as usize == COEFFICIENTS);
const _: () = {
    use params::*;
    assert!(STATE_SCALE as usize == state::SCALE && STATE_GOOD as usize == state::GOOD);
    assert!(STATE_STEP as usize == state::STEP && STATE_SKIPPED as usize == state::SKIPPED);
    assert!(STATE_NORM as usize == state::NORM && STATE_FACTOR as usize == state::FACTOR);
    assert!(STATE_SKIP as usize == state::SKIP && COEFFICIENT_SKIP as usize == coefficient::SKIP);
    assert!(COEFFICIENT_FACTOR as usize == coefficient::FACTOR && COEFFICIENT_FIRST as usize == coefficient::FIRST);
    assert!(COEFFICIENT_SECOND as usize == coefficient::SECOND && COEFFICIENT_RATE as usize == coefficient::RATE);
    assert!(COEFFICIENT_ROOT as usize == coefficient::ROOT && COEFFICIENT_STEP as usize == coefficient::STEP);
    assert!(COEFFICIENT_EPSILON as usize == coefficient::EPSILON && COEFFICIENT_DECAY as usize == coefficient::DECAY);
};

impl OptimizerDevice for Cuda {
    fn square_sums(&self, call: SquareSums<'_, Self>) -> Result<()> {
        const CALL: &str = "square_sums";
        call.check(CALL)?;
        let SquareSums { tensors, out } = call;
        let out = out.into_data().ptr;
        // The sums of tasks go to their node, or to scratch memory where a node has several tasks.
        let tasks = |leaves: usize, height: u32| leaves.div_ceil(1 << height.min(NORM_TASK_HEIGHT as u32));
        let several = |height: u32| height > NORM_TASK_HEIGHT as u32;
        let length = tensors.iter().filter(|t| several(t.height)).map(|t| tasks(t.leaves(), t.height)).sum();
        let scratch = Tensor::empty(self, DType::F64, &[length])?;
        let scratch = scratch.view().data().ptr;
        let (mut squares, mut trees, mut next) = (Vec::new(), Vec::new(), 0);
        for tensor in tensors.iter().filter(|t| t.leaves() > 0) {
            let to = out + (tensor.node * size_of::<f64>()) as u64;
            let count = tasks(tensor.leaves(), tensor.height);
            let (height, mut own) = (tensor.height.min(NORM_TASK_HEIGHT as u32), to);
            if several(tensor.height) {
                own = scratch + (next * size_of::<f64>()) as u64;
                next += count;
                // A height above that of all there is adds zeros alone.
                let most = count.next_power_of_two().trailing_zeros();
                let height = i64::from((tensor.height - height).min(most));
                let job = params::TreeJob { values: own, out: to, count: count as i64, height, ..Default::default() };
                trees.push((tensor.nodes(), job));
            }
            let gradient = tensor.gradient.data().ptr;
            let word = (4 * tensor.gradient.dtype().size()) as u64;
            let job = params::SquareJob {
                gradient,
                out: own,
                width: tensor.width as i64,
                row_leaves: tensor.leaves_of_row() as i64,
                leaves: tensor.leaves() as i64,
                height: i64::from(height),
                type_: type_code(CALL, "gradient", tensor.gradient.dtype())?,
                wide: i64::from(tensor.width.is_multiple_of(4) && gradient.is_multiple_of(word)),
                first_task: 0,
            };
            squares.push((count, job));
        }
        for jobs in squares.chunks(SQUARE_JOBS) {
            let mut p =
                params::SquareJobs { jobs: [Default::default(); SQUARE_JOBS], count: jobs.len() as i64, tasks: 0 };
            for (to, (count, job)) in p.jobs.iter_mut().zip(jobs) {
                *to = params::SquareJob { first_task: p.tasks, ..*job };
                p.tasks += *count as i64;
            }
            // SAFETY: each gradient has its rows, as was checked; each output a number a task.
            unsafe {
                self.launch(
                    CALL,
                    &self.kernels().adamw.square_leaves,
                    Grid::warps_of(p.tasks as usize, ADAMW_THREADS),
                    &p,
                )
            }?;
        }
        for jobs in trees.chunks(TREE_JOBS) {
            let mut p = params::TreeJobs { jobs: [Default::default(); TREE_JOBS], count: jobs.len() as i64 };
            let mut blocks = 0;
            for (to, (nodes, job)) in p.jobs.iter_mut().zip(jobs) {
                *to = params::TreeJob { first_node: blocks as i64, ..*job };
                blocks += nodes;
            }
            // SAFETY: `count` numbers are where the kernel before has put them, and `out` holds the nodes.
            unsafe { self.launch(CALL, &self.kernels().adamw.square_nodes, Grid::new(blocks, ADAMW_THREADS), &p) }?;
        }
        Ok(())
    }

    fn step_control(&self, call: StepControl<'_, Self>) -> Result<()> {
        const CALL: &str = "step_control";
        let groups = call.check(CALL)?;
        let scaling = call.scaling.unwrap_or_default();
        let mut p = params::StepControlParams {
            sums: 0,
            weights: 0,
            settings: call.settings.data().ptr,
            state: call.state.into_data().ptr,
            coefficients: call.coefficients.into_data().ptr,
            groups: groups as i64,
            scaled: i64::from(call.scaling.is_some()),
            max_norm: call.max_norm.unwrap_or(f64::INFINITY),
            growth: scaling.growth,
            backoff: scaling.backoff,
            interval: f64::from(scaling.interval),
            min: scaling.min,
            max: scaling.max,
        };
        if let Some(norm) = call.norm {
            let weights = norm.sums.count();
            let sums = norm.sums.into_data().ptr;
            (p.sums, p.weights) = (sums, weights as i64);
            let of = params::NormSumsParams {
                nodes: norm.nodes.data().ptr,
                order: norm.order.data().ptr,
                starts: norm.starts.data().ptr,
                sums,
                node_count: norm.nodes.count() as i64,
            };
            // SAFETY: a sum a weight; nodes outside are not read. `order` is as long as its ends say: the host's.
            unsafe { self.launch(CALL, &self.kernels().adamw.norm_sums, Grid::new(weights, ADAMW_THREADS), &of) }?;
        }
        // SAFETY: sizes were checked.
        unsafe { self.launch(CALL, &self.kernels().adamw.step_control, Grid::new(1, ADAMW_THREADS), &p) }
    }

    fn adamw(&self, call: AdamWUpdate<'_, Self>) -> Result<()> {
        const CALL: &str = "adamw";
        call.check(CALL)?;
        let AdamWUpdate { tensors, coefficients, group, seed } = call;
        let coefficients = coefficients.data().ptr + (group * COEFFICIENTS * size_of::<f64>()) as u64;
        let keys = bytemuck::cast(philox::keys(philox::key(seed)));
        let mut jobs = Vec::with_capacity(tensors.len());
        for t in tensors.into_iter().filter(|t| t.count > 0) {
            jobs.push(job(CALL, t)?);
        }
        for jobs in jobs.chunks(ADAMW_JOBS) {
            let none = params::AdamWJob::default();
            let mut p = params::AdamWJobs { jobs: [none; ADAMW_JOBS], coefficients, count: jobs.len() as i64, keys };
            let mut blocks = 0;
            for (to, job) in p.jobs.iter_mut().zip(jobs) {
                *to = params::AdamWJob { first_block: blocks as i64, ..*job };
                blocks += (job.count as usize).div_ceil(ADAMW_SPAN as usize);
            }
            // SAFETY: each tensor has `count` elements of its type, as was checked, and borrows keep those that are
            // written apart.
            unsafe { self.launch(CALL, &self.kernels().adamw.adamw, Grid::new(blocks, ADAMW_THREADS), &p) }?;
        }
        Ok(())
    }

    fn convert(&self, call: Convert<'_, Self>) -> Result<()> {
        const CALL: &str = "convert";
        call.check(CALL)?;
        let from_type = match call.from.dtype() {
            DType::F64 => -1,
            other => type_code(CALL, "from", other)?,
        };
        let count = call.from.count();
        let p = params::ConvertTypeParams {
            from: call.from.data().ptr,
            from_type,
            to_type: type_code(CALL, "to", call.to.dtype())?,
            to: call.to.into_data().ptr,
            count: count as i64,
        };
        let blocks = count.div_ceil(ADAMW_THREADS as usize).min(LOOP_BLOCKS);
        // SAFETY: both tensors have `count` elements of their types.
        unsafe { self.launch(CALL, &self.kernels().adamw.convert_type, Grid::new(blocks, ADAMW_THREADS), &p) }
    }
}

/// A parameter as the kernel takes it.
fn job(call: &'static str, t: AdamWTensor<'_, Cuda>) -> Result<params::AdamWJob> {
    let gradient_type = type_code(call, "gradient", t.gradient.dtype())?;
    let rounded_type = t.rounded.as_ref().map_or(Ok(0), |r| type_code(call, "rounded", r.dtype()))?;
    let half_moments = t.first.dtype() == DType::BF16;
    let word = |dtype: DType| 4 * dtype.size() as u64;
    let (gradient_word, moment_word) = (word(t.gradient.dtype()), word(t.first.dtype()));
    let (gradient, main) = (t.gradient.data().ptr, t.main.into_data().ptr);
    let rounded = t.rounded.map_or(0, |r| r.into_data().ptr);
    let (first, second) = (t.first.into_data().ptr, t.second.into_data().ptr);
    let four = gradient.is_multiple_of(gradient_word)
        && main.is_multiple_of(word(DType::F32))
        && rounded.is_multiple_of(word(DType::BF16))
        && (first | second).is_multiple_of(moment_word)
        && (t.element.is_multiple_of(4) || !half_moments);
    Ok(params::AdamWJob {
        gradient,
        main,
        rounded,
        first,
        second,
        count: t.count as i64,
        element: t.element as i64,
        number: i64::from(t.number),
        types: gradient_type | rounded_type << 2 | i64::from(half_moments) << 4 | i64::from(four) << 5,
        first_block: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernel parameters have 4 KiB.
    #[test]
    fn descriptions_fit_a_launch() {
        let sizes = [size_of::<params::AdamWJobs>(), size_of::<params::SquareJobs>(), size_of::<params::TreeJobs>()];
        assert!(sizes.iter().all(|size| *size <= 4096), "{sizes:?}");
    }
}
