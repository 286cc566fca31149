//! A product that waits in its kernel for rows of other ranks: that it starts before they have come, that it needs its
//! wait, and ranks that come late, or not at all, while it waits.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use moebius::comm::Communicator;
use moebius::config::Activation;
use moebius::cpu::Cpu;
use moebius::cuda::{Captured, Cuda};
use moebius::ep::{ArrivingRows, DispatchInputs, DispatchSpec, DispatcherKind, Group, GroupConfig, Handle, Overlap};
use moebius::kernels::{Kernels, RowDest, RowSource, Up};
use moebius::nccl::{NcclComm, NcclWorld};
use moebius::{DType, Error, Result, Tensor};

use crate::Run;
use crate::conformance::gpus;
use crate::nvlink::end_on_first;
use crate::nvlink_graphs::told_of_the_lost;
use crate::several::numbers;

pub fn cases() -> Vec<(&'static str, Run)> {
    vec![
        ("a_product_waits_for_rows_of_a_late_rank", late),
        ("a_product_that_does_not_wait_reads_what_has_not_come", without_its_wait),
        ("a_rank_lost_while_a_product_waits", lost),
        ("an_end_while_a_product_waits", ended),
        ("reserved_sms_and_max_sms", sms),
    ]
}

const MINUTE: Duration = Duration::from_secs(60);
/// Tokens of a rank, their choices, experts of a rank, elements of a row and of an activation: rows enough for kernels
/// that wait.
pub const TOKENS: usize = 600;
pub const TOP_K: usize = 4;
const EXPERTS: usize = 16;
pub const SIZES: [usize; 2] = [512, 256];
/// The layer of all calls.
pub const LAYER: u32 = 5;

pub fn group_config(ranks: usize) -> GroupConfig {
    GroupConfig {
        dispatcher: DispatcherKind::NvLink,
        overlap: Overlap::Sms(4),
        ..GroupConfig::new(EXPERTS * ranks, TOKENS)
    }
}

/// A rank with an up product of rows that dispatch brings.
pub struct Product {
    pub cuda: Cuda,
    pub group: Group<Cuda>,
    pub handle: Handle<Cuda>,
    pub ids: Tensor<Cuda>,
    pub x: Tensor<Cuda>,
    pub weight: Tensor<Cuda>,
    pub out: Tensor<Cuda>,
}

impl Product {
    pub fn new(cuda: Cuda, comm: NcclComm, config: GroupConfig) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.size());
        let mut group = Group::new(cuda.clone(), Box::new(comm), config)?;
        let ids = (0..TOKENS * TOP_K).map(|i| ((i / TOP_K * 5 + i % TOP_K * 7 + rank) % (EXPERTS * ranks)) as i64);
        let ids = Tensor::from_vec(ids.collect(), &[TOKENS, TOP_K])?.to(&cuda)?;
        let spec = DispatchSpec { backward: true, ..DispatchSpec::new(LAYER, TOP_K) };
        let handle = group.dispatcher().prepare(ids.view(), None, &spec)?;
        let [hidden, inner] = SIZES;
        let put = |seed, dims: &[usize]| cuda.write(&numbers(seed, dims.iter().product(), 1.0), DType::BF16, dims);
        let weight = put(100 + rank as u64, &[EXPERTS, 2 * inner, hidden])?;
        let (x, out) = (put(7, &[TOKENS, hidden])?, put(0, &[handle.rows(), inner])?);
        cuda.list_tiles(handle.segments())?;
        assert!(group.dispatcher().overlaps_products(&handle, DType::BF16, hidden));
        Ok(Self { cuda, group, handle, ids, x, weight, out })
    }

    /// Other tokens in the same memory.
    fn set_x(&mut self, seed: u64) -> Result<()> {
        let values: Tensor<Cpu> =
            Cpu::new().write(&numbers(seed, self.x.dims().iter().product(), 1.0), DType::BF16, self.x.dims())?;
        self.cuda.upload(values.as_bytes(), self.x.view_mut())
    }

    /// The product of rows that have come, bit by bit.
    fn one_after_the_other(&mut self) -> Result<Vec<u8>> {
        let inputs = DispatchInputs { tokens: self.x.view(), weights: None, scales: None };
        let received = self.group.dispatcher().dispatch_rows(&self.handle, inputs)?;
        let rows = received.source(self.x.view(), &self.handle);
        up(&self.cuda, (rows, &self.handle), &self.weight, &mut self.out)?;
        self.result()
    }

    /// The product of rows on their way; of what it waits for, `pretended`, if there is one.
    pub fn overlapped(&mut self, pretended: Option<&Tensor<Cuda>>) -> Result<()> {
        let Self { cuda, group, handle, x, weight, out, .. } = self;
        let inputs = DispatchInputs { tokens: x.view(), weights: None, scales: None };
        let mut done = Ok(());
        let mut start = |arriving: ArrivingRows<'_, Cuda>| {
            let rows = arriving.rows;
            let told = rows.arrivals.as_ref().expect("rows that are on their way");
            let arrivals = match pretended {
                Some(groups) => told.borrow().with_groups(groups.view()),
                None => told.borrow(),
            };
            let rows = RowSource { arrivals: Some(arrivals), ..rows.borrow() };
            done = up(cuda, (rows, handle), weight, out);
        };
        group.dispatcher().dispatch_rows_with_product(handle, inputs, &mut start)?;
        done
    }

    fn captured(&mut self, pretended: Option<&Tensor<Cuda>>) -> Result<Captured<()>> {
        let cuda = self.cuda.clone();
        // What a capture cannot make.
        self.overlapped(None)?;
        cuda.check()?;
        cuda.capture(|| self.overlapped(pretended))
    }

    /// Bits of the slots that experts have.
    fn result(&self) -> Result<Vec<u8>> {
        self.cuda.check()?;
        Ok(self.cuda.to_host(self.out.view())?.as_bytes().to_vec())
    }
}

pub fn up(
    cuda: &Cuda,
    (rows, handle): (RowSource<'_, Cuda>, &Handle<Cuda>),
    weight: &Tensor<Cuda>,
    out: &mut Tensor<Cuda>,
) -> Result<()> {
    cuda.up(Up {
        rows: rows.borrow(),
        segments: handle.segments(),
        weight: weight.view().into(),
        bias: None,
        slot_weights: None,
        activation: Activation::SiluGlu,
        pre: None,
        out: RowDest::direct(out.view_mut()),
        movement_sms: None,
    })
}

fn on<T: Send>(comms: Vec<NcclComm>, body: impl Fn(Product, &Barrier) -> Result<T> + Sync) -> Vec<T> {
    let (together, body, ranks) = (&Barrier::new(comms.len()), &body, comms.len());
    thread::scope(|scope| {
        let spawn = |comm: NcclComm| {
            scope.spawn(move || {
                let cuda = comm.cuda().clone();
                body(Product::new(cuda, comm, group_config(ranks))?, together)
            })
        };
        let threads: Vec<_> = comms.into_iter().map(spawn).collect();
        threads.into_iter().map(|t| t.join().expect("no panic").expect("no error")).collect()
    })
}

/// Replays over new tokens, for which the last rank comes late, and whether each rank's product is that of the rows.
fn replay_with_a_late_rank(ranks: usize, pretends: bool) -> Vec<bool> {
    on(gpus::communicators(ranks, MINUTE), |mut product, together| {
        product.set_x(900)?;
        let wanted = product.one_after_the_other()?;
        product.set_x(800)?;
        // More groups than there are experts.
        let all: Tensor<Cuda> = Tensor::from_vec(vec![1_i64 << 20], &[1])?.to(&product.cuda)?;
        let mut graph = product.captured(pretends.then_some(&all))?;
        graph.replay()?;
        product.cuda.check()?;
        product.set_x(900)?;
        together.wait();
        if product.group.rank() + 1 == ranks {
            thread::sleep(Duration::from_millis(300));
        }
        graph.replay()?;
        let same = product.result()? == wanted;
        together.wait();
        drop(graph);
        product.group.dispatcher().check()?;
        Ok(same)
    })
}

fn late(_: &Cuda, ranks: usize) {
    assert_eq!(replay_with_a_late_rank(ranks, false), vec![true; ranks]);
}

/// Told that all rows are there, products that are ahead of the last rank multiply what lies in the zone: they do start
/// before rows come, and nothing but their wait keeps results right.
fn without_its_wait(_: &Cuda, ranks: usize) {
    let same = replay_with_a_late_rank(ranks, true);
    assert_eq!(same[..ranks - 1], vec![false; ranks - 1]);
}

/// The product ends with the kernel that gives up, its rank is told of whom it has waited for, and the GPU works on.
fn lost(_: &Cuda, ranks: usize) {
    const LIMIT: Duration = Duration::from_secs(2);
    on(gpus::communicators(ranks, LIMIT), |mut product, together| {
        let wanted = product.one_after_the_other()?;
        let mut graph = product.captured(None)?;
        graph.replay()?;
        assert!(product.result()? == wanted);
        together.wait();
        let rank = product.group.rank();
        // The last does not come. Of several that wait for it the first gives up, and the others hear that it has.
        if rank + 1 < ranks {
            thread::sleep(Duration::from_millis(300) * rank as u32);
            let start = Instant::now();
            graph.replay()?;
            match product.cuda.check() {
                Err(Error::LatePeer { rank: own, layer: LAYER, .. }) => assert_eq!(own, rank),
                other => panic!("{other:?}"),
            }
            assert!(start.elapsed() < LIMIT + Duration::from_secs(3));
        }
        together.wait();
        told_of_the_lost(&mut graph, &product.cuda, (rank, ranks), LAYER);
        works_on(&mut product)?;
        together.wait();
        drop(graph);
        Ok(())
    });
}

/// A product of rows that are there.
fn works_on(product: &mut Product) -> Result<()> {
    let Product { cuda, handle, x, weight, out, .. } = product;
    let map = vec![0_i32; handle.rows()];
    let map = Tensor::from_vec(map, &[handle.rows()])?.to(cuda)?;
    up(cuda, (RowSource::mapped(x.view(), map.view()), handle), weight, out)?;
    cuda.check()
}

/// The first rank's communicator ends while its product waits: both kernels are out of the way before the peers' memory
/// goes, though their own patience is far longer, and the GPU works on.
fn ended(_: &Cuda, ranks: usize) {
    const PATIENCE: Duration = Duration::from_secs(60);
    let (library, gpus) = gpus::first(ranks);
    let world = NcclWorld::new(&library, &gpus, MINUTE).expect("a world");
    on(world.communicators(PATIENCE).expect("communicators"), |mut product, together| {
        let mut graph = product.captured(None)?;
        graph.replay()?;
        product.cuda.check()?;
        together.wait();
        let (start, first) = (Instant::now(), product.group.rank() == 0);
        if first {
            graph.replay()?;
        }
        end_on_first(&mut product.group);
        if first {
            assert!(matches!(product.cuda.check(), Err(Error::Comm(_))), "as long as the communicator lives");
        }
        drop((graph, product));
        assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
        together.wait();
        Ok(())
    });
    drop(world);
    gpus.iter().for_each(|gpu| gpu.check().expect("the GPU works on"));
}

/// Movements and products keep to what devices reserve and groups allow, to the same bits, and what leaves no SM for one
/// of the two is refused on every rank.
fn sms(_: &Cuda, ranks: usize) {
    let run = |comm: NcclComm, reserved: usize, (overlap, max_sms): (Overlap, usize)| -> Result<()> {
        // One rank alone reserves: the others keep to it.
        let cuda = if comm.rank() == 0 { comm.cuda().reserving_sms(reserved) } else { comm.cuda().clone() };
        let mut product = Product::new(cuda, comm, GroupConfig { overlap, max_sms, ..group_config(ranks) })?;
        let wanted = product.one_after_the_other()?;
        product.overlapped(None)?;
        assert!(product.result()? == wanted, "{reserved} reserved, {overlap:?}, {max_sms}");
        product.group.dispatcher().check()
    };
    let each = |reserved: usize, setting: (Overlap, usize)| -> Vec<Result<()>> {
        let comms = gpus::communicators(ranks, MINUTE);
        thread::scope(|scope| {
            let threads: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(move || run(comm, reserved, setting))).collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        })
    };
    for (reserved, setting) in [(100, (Overlap::Sms(16), 0)), (16, (Overlap::Sms(4), 6)), (0, (Overlap::Sms(2), 2))] {
        each(reserved, setting).into_iter().for_each(|done| done.expect("SMs for both"));
    }
    for (reserved, setting) in [(10_000, (Overlap::Sms(2), 0)), (120, (Overlap::Sms(16), 0)), (0, (Overlap::Sms(8), 6))]
    {
        for refused in each(reserved, setting) {
            match refused {
                Err(Error::Invalid { name, .. }) => assert_eq!(name, "overlap"),
                other => panic!("{reserved} reserved, {setting:?}: {other:?}"),
            }
        }
    }
}
