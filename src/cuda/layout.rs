//! Layouts, row sources and destinations, checked and as kernels take them.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::{RowDest, RowSource, Segments};
use crate::tensor::{Tensor, TensorMut, TensorRef};

use super::device::Cuda;
use super::heuristics::few_rows;
use super::launch::Grid;
use super::params;
use super::tile_config::{SM90_DECODE, SM90_GROUPED_GEMM};

/// Bytes of a tile in a list.
const TILE_BYTES: u64 = 16;

/// Where kernels write a tensor.
pub(super) fn at(t: &mut Tensor<Cuda>) -> u64 {
    t.view_mut().into_data().ptr
}

/// Pointer of a view that may be absent.
pub(super) fn pointer(t: &Option<TensorRef<'_, Cuda>>) -> u64 {
    t.as_ref().map_or(0, |t| t.data().ptr)
}

/// Whether rows of `width` elements from here on start at multiples of 16 bytes.
pub(super) fn aligned(t: TensorRef<'_, Cuda>, width: usize) -> bool {
    t.data().ptr.is_multiple_of(16) && (width * t.dtype().size()).is_multiple_of(16)
}

/// Refuses more rows or choices than kernels number, in 32 bits.
pub(super) fn check_number(call: &'static str, name: &str, number: Option<usize>) -> Result<usize> {
    let fits = number.filter(|n| i32::try_from(*n).is_ok());
    let found = number.map_or("more".to_string(), |n| n.to_string());
    fits.ok_or_else(|| Error::invalid(call, name, format!("at most {}", i32::MAX), found))
}

/// Checks a layout of `experts` segments.
pub(super) fn check_segments(call: &'static str, segments: &Segments<Cuda>, experts: usize) -> Result<()> {
    for (name, t) in [("segments.offsets", &segments.offsets), ("segments.counts", &segments.counts)] {
        Error::check_shape(call, name, &[experts], t.dims())?;
        Error::check_dtype(call, name, DType::I64, t.dtype())?;
    }
    check_number(call, "segments.rows", Some(segments.rows)).map(drop)
}

/// A checked source of rows.
pub(super) struct SourceRows {
    pub(super) base: u64,
    pub(super) map: u64,
    pub(super) rows: i64,
    pub(super) vector: bool,
    /// The call and this operand, as a fault's detail has them.
    pub(super) site: i64,
}

impl SourceRows {
    pub(super) fn new(
        call: &'static str,
        name: &str,
        source: &RowSource<'_, Cuda>,
        dtype: DType,
        width: usize,
        (slots, site): (usize, i64),
    ) -> Result<Self> {
        Error::check_dtype(call, name, dtype, source.base.dtype())?;
        let rows = source.base.rows();
        Error::check_shape(call, name, &[rows, width], source.base.dims())?;
        match &source.map {
            None => Error::check_shape(call, name, &[slots, width], &[rows, width])?,
            Some(map) => {
                Error::check_shape(call, &format!("{name}.map"), &[slots], map.dims())?;
                Error::check_dtype(call, &format!("{name}.map"), DType::I32, map.dtype())?;
            }
        }
        Ok(Self {
            base: source.base.data().ptr,
            map: pointer(&source.map),
            rows: rows as i64,
            vector: aligned(source.base, width),
            site,
        })
    }
}

/// A checked destination of rows: where it is, and whether they are added.
pub(super) fn row_dest(
    call: &'static str,
    dest: RowDest<'_, Cuda>,
    dtype: DType,
    dims: &[usize; 2],
) -> Result<(u64, i64)> {
    let accumulate = i64::from(dest.accumulate);
    Ok((output(call, "out", dest.base, dtype, dims)?, accumulate))
}

/// A checked tensor of a known shape and type.
pub(super) fn input(
    call: &'static str,
    name: &str,
    t: &TensorRef<'_, Cuda>,
    dtype: DType,
    dims: &[usize],
) -> Result<u64> {
    Error::check_dtype(call, name, dtype, t.dtype())?;
    Error::check_shape(call, name, dims, t.dims())?;
    Ok(t.data().ptr)
}

/// As [`input`], where it may be absent.
pub(super) fn optional(
    call: &'static str,
    name: &str,
    t: &Option<TensorRef<'_, Cuda>>,
    dtype: DType,
    dims: &[usize],
) -> Result<u64> {
    t.as_ref().map_or(Ok(0), |t| input(call, name, t, dtype, dims))
}

/// A checked output.
pub(super) fn output(
    call: &'static str,
    name: &str,
    t: TensorMut<'_, Cuda>,
    dtype: DType,
    dims: &[usize],
) -> Result<u64> {
    Error::check_dtype(call, name, dtype, t.dtype())?;
    Error::check_shape(call, name, dims, t.dims())?;
    Ok(t.into_data().ptr)
}

/// As [`output`], where it may be absent.
pub(super) fn optional_output(
    call: &'static str,
    name: &str,
    t: Option<TensorMut<'_, Cuda>>,
    dtype: DType,
    dims: &[usize],
) -> Result<u64> {
    t.map_or(Ok(0), |t| output(call, name, t, dtype, dims))
}

/// Row tiles of a layout, listed on the device: in one list, or in one for every so many experts.
pub(super) struct Tiles {
    list: u64,
    count: u64,
    tickets: u64,
    /// Most tiles that a list can have.
    pub(super) most: usize,
    /// Lists.
    chunks: usize,
    /// Where the list is not the layout's own.
    _made: Option<[Tensor<Cuda>; 2]>,
}

/// Which row tiles are listed.
#[derive(Debug, Clone, Copy)]
pub(super) struct TileListSpec {
    /// Rows of a tile.
    pub(super) tile: usize,
    pub(super) order: TileOrder,
    /// Experts of a list, whose tiles number them from its first on; `None`: all are in one.
    pub(super) chunk: Option<usize>,
}

/// The order of row tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TileOrder {
    /// That of the slots.
    Slots,
    /// Tiles 2 i and 2 i + 1 are of one expert where possible, for pairs of blocks.
    Pairs,
}

impl TileOrder {
    /// Most tiles of `tile` rows that there can be: every filled segment has one that may not be full, and a last pair
    /// may want one of no rows.
    fn most(self, rows: usize, groups: usize, tile: usize) -> usize {
        rows / tile + groups.min(rows) + usize::from(self == Self::Pairs)
    }
}

/// The list of tiles that a plan makes with its layout, behind an entry that holds their number, then the ticket: for few
/// rows those of [`SM90_DECODE`], which `w4a16_decode.cu` takes too, else pairs of [`SM90_GROUPED_GEMM`]'s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlannedTiles {
    /// Rows of a tile.
    pub(super) tile: usize,
    pub(super) order: TileOrder,
    /// Most tiles that there can be.
    pub(super) most: usize,
}

impl PlannedTiles {
    pub(super) fn new(rows: usize, groups: usize) -> Self {
        let (tile, order) = match few_rows(rows as i64, groups as i64) {
            true => (SM90_DECODE.tile, TileOrder::Slots),
            false => (SM90_GROUPED_GEMM.tile, TileOrder::Pairs),
        };
        Self { tile, order, most: order.most(rows, groups, tile) }
    }

    /// Room for it. `None`: the device has no kernels that take it.
    pub(super) fn empty(self, device: &Cuda) -> Result<Option<Tensor<Cuda>>> {
        device.sm90().then(|| Tensor::empty(device, DType::I32, &[1 + self.most, 4])).transpose()
    }
}

/// Lists of tiles to make.
struct ListRequest {
    site: i64,
    tile: usize,
    order: TileOrder,
    /// Experts of a list.
    chunk: i64,
    chunks: usize,
    /// Where lists, their lengths and tickets begin.
    lists: [u64; 3],
    /// Room of a list.
    most: usize,
}

fn enqueue_list(call: &'static str, device: &Cuda, segments: &Segments<Cuda>, request: ListRequest) -> Result<()> {
    let ListRequest { site, tile, order, chunk, chunks, lists: [tiles, tile_count, tickets], most } = request;
    let p = params::TileListParams {
        offsets: segments.offsets.view().data().ptr,
        counts: segments.counts.view().data().ptr,
        groups: segments.offsets.dims().first().copied().unwrap_or(0) as i64,
        chunk,
        rows: segments.rows as i64,
        tile_rows: tile as i64,
        tiles,
        tile_count,
        tickets,
        max_tiles: most as i64,
        fault: device.inner.status,
        site,
    };
    let kernels = &device.kernels().plan;
    let kernel = match order {
        TileOrder::Slots => &kernels.list_tiles,
        TileOrder::Pairs => &kernels.list_tiles_paired,
    };
    // SAFETY: offsets and counts have `groups` entries, each block's list `most`; the kernel writes no more.
    unsafe { device.launch(call, kernel, Grid::new(chunks, params::PLAN_THREADS), &p) }
}

/// Makes the list that a plan makes, where it has made none.
pub(super) fn list_planned(call: &'static str, device: &Cuda, segments: &Segments<Cuda>, site: i64) -> Result<()> {
    if segments.tiles().is_some() {
        return Ok(());
    }
    let groups = segments.offsets.dims().first().copied().unwrap_or(0);
    let PlannedTiles { tile, order, most } = PlannedTiles::new(segments.rows, groups);
    let Some(mut list) = (PlannedTiles { tile, order, most }).empty(device)? else { return Ok(()) };
    let count = at(&mut list);
    let lists = [count + TILE_BYTES, count, count + size_of::<i32>() as u64];
    let request = ListRequest { site, tile, order, chunk: groups.max(1) as i64, chunks: 1, lists, most };
    enqueue_list(call, device, segments, request)?;
    // Another thread's is as good.
    let _ = segments.tiles.set(list);
    Ok(())
}

impl Tiles {
    pub(super) fn new(
        call: &'static str,
        device: &Cuda,
        segments: &Segments<Cuda>,
        site: i64,
        TileListSpec { tile, order, chunk }: TileListSpec,
    ) -> Result<Self> {
        let groups = segments.offsets.dims()[0];
        let chunk = chunk.unwrap_or(groups).clamp(1, groups.max(1));
        let chunks = groups.div_ceil(chunk).max(1);
        let most = order.most(segments.rows, chunk.min(groups), tile);
        if let Some(tiles) = segments.tiles()
            && chunks == 1
            && PlannedTiles::new(segments.rows, groups) == (PlannedTiles { tile, order, most })
        {
            Error::check_shape(call, "segments.tiles", &[1 + most, 4], tiles.dims())?;
            Error::check_dtype(call, "segments.tiles", DType::I32, tiles.dtype())?;
            let count = tiles.data().ptr;
            let tickets = count + size_of::<i32>() as u64;
            return Ok(Self { list: count + TILE_BYTES, count, tickets, most, chunks, _made: None });
        }
        let mut list = Tensor::empty(device, DType::I32, &[chunks * most, 4])?;
        let mut count = Tensor::empty(device, DType::I32, &[2, chunks])?;
        let made = (at(&mut list), at(&mut count));
        let tickets = made.1 + (chunks * size_of::<i32>()) as u64;
        let (chunk, lists) = (chunk as i64, [made.0, made.1, tickets]);
        enqueue_list(call, device, segments, ListRequest { site, tile, order, chunk, chunks, lists, most })?;
        Ok(Self { list: made.0, count: made.1, tickets, most, chunks, _made: Some([list, count]) })
    }

    /// The first list.
    pub(super) fn list(&self) -> u64 {
        self.list
    }

    /// The number of its tiles.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// What products that share its tiles out as they go count in, one after the other.
    pub(super) fn ticket(&self) -> u64 {
        self.ticket_of(0)
    }

    /// Whether the layout's plan has made it, so that nothing was enqueued for it.
    pub(super) fn is_planned(&self) -> bool {
        self._made.is_none()
    }

    /// Whether there is but one.
    pub(super) fn is_whole(&self) -> bool {
        self.chunks == 1
    }

    /// That of a chunk of experts.
    pub(super) fn list_of(&self, chunk: usize) -> u64 {
        self.list + (chunk * self.most) as u64 * TILE_BYTES
    }

    /// The number of its tiles.
    pub(super) fn count_of(&self, chunk: usize) -> u64 {
        self.count + (chunk * size_of::<i32>()) as u64
    }

    /// Its ticket.
    pub(super) fn ticket_of(&self, chunk: usize) -> u64 {
        self.tickets + (chunk * size_of::<i32>()) as u64
    }
}
