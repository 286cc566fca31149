//! Numbers that were measured or weighed, and that nothing else determines: how work is cut into tasks, and where one
//! loop takes over from another. None changes what is computed, except those marked "Changes the order of sums", whose
//! results have other bits with another number: [`DOT_REGISTERS`], [`AXPY_CHUNK`], [`WGRAD_SLOTS`], [`AUX_PARTIAL_TOKENS`].

// --------------------------------------------------------------------------------------------------- experts' products

/// Rows of a product that one task computes. Large enough that packing the weight is a small part of a task, small
/// enough that a few hot experts still fill all cores.
pub(super) const ROW_TILE: usize = 256;

/// Slots that one step of a weight gradient reads: bounds the memory of gathered rows. Changes the order of sums.
pub(super) const WGRAD_SLOTS: usize = 2048;

/// Rows of a weight gradient that one task computes.
pub(super) const WGRAD_ROWS: usize = 256;

// ---------------------------------------------------------------------------------------- rows by a weight (`ordered`)

/// A chunk of the terms of `x · wᵀ`, in SIMD registers. Behind each chunk the lanes of a sum are added up: the chunk is so
/// long that this takes little of the time, and so short that the rows of a tile stay in a cache near the core. Changes
/// the order of sums.
pub(super) const DOT_REGISTERS: usize = 128;

/// Terms between two additions to an element of `x · w`. Changes the order of sums.
pub(super) const AXPY_CHUNK: usize = 256;

/// Rows of x that pass over a chunk of the weight together, at most: all of a task ([`ROW_TILE`]). The more, the less the
/// copies of the weight cost.
pub(super) const BLOCK_ROWS: usize = 256;

/// The same of `x · wᵀ` with few registers, whose small tiles read x more often: what stays in a cache of 1 MiB.
pub(super) const NARROW_DOT_BLOCK_ROWS: usize = 128;

/// Rows and columns from which on `x · wᵀ` copies what it reads again and again: registers are then loaded from whole
/// lines of a cache, and rows a power of two apart do not share places in it. `x · w` copies x from as many rows on.
pub(super) const COPY_ROWS: usize = 12;
pub(super) const COPY_COLUMNS: usize = 16;

/// Tiles of rows above which `x · w` copies the weight even where a cache near the core holds all of it.
pub(super) const COPY_TILES: usize = 4;

/// Columns of `x · w` that one row sums at a time: in f32 32 KiB of sums, which stay in a cache near the core.
pub(super) const STREAM_COLUMNS: usize = 8192;

/// Bytes of a weight from which on streaming it, or copying it for a few tiles of rows, pays: what no cache near the
/// core holds.
pub(super) const STREAM_BYTES: usize = 2 << 20;

/// Columns from which on streaming pays.
pub(super) const STREAM_MIN_COLUMNS: usize = 512;

/// Rows of w that one row multiplies by at a time.
pub(super) const STREAM_DEPTH: usize = 8;

// ---------------------------------------------------------------------------------------------------------- the router

/// Tokens of one task of the router: enough to hide the cost of a task, few enough to share a small batch.
pub(super) const TASK_TOKENS: usize = 64;

/// Tokens of a partial sum of the auxiliary losses. Changes the order of sums, unlike how these are shared out.
pub(super) const AUX_PARTIAL_TOKENS: usize = 64;

// ------------------------------------------------------------------------------------------------- loops over elements

/// Bytes of rows moved or added below which a parallel loop costs more than it saves.
pub(super) const PARALLEL_BYTES: usize = 1 << 18;

/// Bytes of one task of such a loop.
pub(super) const TASK_BYTES: usize = 1 << 16;

/// Elements of one task of a loop over elements, of an optimizer or a codec.
pub(super) const TASK_ELEMENTS: usize = 1 << 14;

/// Leaves of a tree of sums that one task of an optimizer adds.
pub(super) const TASK_LEAVES: usize = 8;
