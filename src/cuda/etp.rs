//! Sharded weights on a GPU.

use crate::error::{Error, Result};
use crate::etp::ShardDevice;
use crate::tensor::{TensorMut, TensorRef};

use super::device::{Cuda, Event, Stream};
use super::launch::Grid;
use super::params::{self, type_code};

const THREADS: u32 = 256;
/// Most parts whose sums the kernel can hold (`Pairs` in `kernels/permute.cu`).
const MOST_PARTS: usize = (1 << 16) - 1;
/// Blocks a multiprocessor has at the same time.
const BLOCKS: usize = 8;

impl ShardDevice for Cuda {
    const ENQUEUES: bool = true;

    fn add_shares(
        &self,
        stream: &Stream,
        shares: TensorRef<'_, Self>,
        main: TensorMut<'_, Self>,
        scale: f64,
    ) -> Result<()> {
        const CALL: &str = "add_shares";
        self.on_stream(CALL, stream)?;
        let dtype = shares.dtype();
        type_code(CALL, "shares", dtype)?;
        Error::check_dtype(CALL, "main", dtype.accumulator(), main.dtype())?;
        let count = main.count();
        let parts = shares.count().checked_div(count).unwrap_or(0);
        if count == 0 || parts * count != shares.count() || parts > MOST_PARTS {
            let found = format!("{dtype} {:?} for {:?}", shares.dims(), main.dims());
            return Err(Error::invalid(CALL, "shares", "floating blocks of main's size", found));
        }
        let (from, to) = (shares.data().ptr, main.into_data().ptr);
        let lanes = 16 / dtype.size();
        let wide = (from | to).is_multiple_of(16) && count.is_multiple_of(lanes);
        let p = params::Shares {
            shares: from,
            main: to,
            count: count as i64,
            parts: parts as i64,
            wide: i64::from(wide),
            scale,
        };
        let threads = count / if wide { lanes } else { 1 };
        let blocks = threads.div_ceil(THREADS as usize).min(BLOCKS * self.inner.processors);
        let kernel = format!("add_shares_{dtype}");
        // SAFETY: `shares` has `parts` blocks of `main`'s size.
        unsafe { self.launch(CALL, &kernel, Grid::new(blocks, THREADS), &p) }
    }

    fn own_stream(&self) -> Stream {
        self.stream()
    }

    fn mark(&self) -> Result<Option<Event>> {
        self.record().map(Some)
    }

    fn heed(&self, other: &Self) {
        self.heed_guards(other);
    }

    fn refuse_recording(&self, call: &'static str) -> Result<()> {
        self.not_captured(call, "start collectives on streams of their own, from threads of their own")
    }

    fn in_order(&self, call: &'static str, stream: &Stream) -> Result<()> {
        self.on_stream(call, stream)
    }
}
