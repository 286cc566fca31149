//! The maps of a routing's two hops, made on the device.

use std::ops::Range;

use crate::comm::{Exchange, Op};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Kernels;
use crate::tensor::{Tensor, TensorRef};

use crate::ep::MessageMaps;
use crate::ep::all_to_all::message_maps;
use crate::ep::dispatcher_state::DispatcherState;
use crate::ep::handle::Handle;
use crate::ep::hop_maps::HopMaps;
use crate::ep::messages::range;
use crate::ep::packing::{ReceivedRows, entries, flat, part_mut};

use super::lists::{Choices, HopLists, HostPlace};

impl<D: Kernels> HopMaps<D> {
    /// One of the lists.
    pub(super) fn list(&self, range: &Range<usize>) -> Result<TensorRef<'_, D>> {
        entries(self.lists.view(), range.clone())
    }

    /// One of the lists in rows of so many numbers.
    pub(super) fn rows(&self, range: &Range<usize>, width: usize) -> Result<TensorRef<'_, D>> {
        self.list(range)?.reshape(&[range.len().checked_div(width).unwrap_or(0), width])
    }
}

impl HostPlace {
    /// Ranks in the order in which what they have sent reaches this one: by the rank of this host that passes it on, then
    /// source host.
    fn senders(self) -> impl Iterator<Item = usize> {
        let each = self.ranks_per_host;
        (0..each).flat_map(move |local| (0..self.hosts).map(move |host| host * each + local))
    }

    /// For each rank of this host, the sum over its counterparts, whose rows it passes on.
    fn passed_on(self, counts: &[usize]) -> Vec<usize> {
        let sum = |local| (0..self.hosts).map(|host| counts[host * self.ranks_per_host + local]).sum();
        self.within(&(0..self.ranks_per_host).map(sum).collect::<Vec<_>>())
    }
}

/// The maps of the choices that a prepare has kept, which counterparts tell each other (one collective).
pub(super) fn exchange_choices<D: Kernels>(
    core: &mut DispatcherState<D>,
    place: HostPlace,
    handle: &Handle<D>,
) -> Result<HopMaps<D>> {
    let tag = DispatcherState::tag(handle, Op::Prepare);
    let device = core.device.clone();
    let row = handle.spec().top_k * size_of::<i32>();
    let sent = place.across(&vec![handle.tokens() * row; place.hosts]);
    let by_host: Vec<usize> = (0..place.hosts).map(|host| handle.tokens[place.counterpart(host)] * row).collect();
    let recv_bytes = place.across(&by_host);
    let buffers = copies(&device, flat(handle.kept_ids())?, place.hosts)
        .and_then(|send| Ok((send, Tensor::empty(&device, DType::U8, &[by_host.iter().sum()])?)));
    let (send, mut recv) = core.check_or_refuse(tag, buffers)?;
    let exchange = Exchange {
        send: send.view(),
        send_bytes: &sent,
        recv: recv.view_mut(),
        recv_bytes: &recv_bytes,
        dtype: DType::I32,
    };
    core.comm.all_to_all_v(tag, exchange)?;
    // A bad choice that has been masked is told when the group is asked, not here.
    let made = device.download_unchecked(recv.view()).and_then(|bytes| {
        let mut rest = &bytes[..];
        let ids = by_host.iter().map(|bytes| {
            let (own, behind) = rest.split_at(*bytes);
            rest = behind;
            own.as_chunks().0.iter().map(|id| i32::from_le_bytes(*id)).collect()
        });
        let by_host: Vec<Vec<i32>> = ids.collect();
        let experts_per_rank = core.config.num_experts / place.ranks();
        let choices = Choices { top_k: handle.spec().top_k, experts_per_rank, by_host: &by_host };
        on_device(&device, place, HopLists::new(place, choices), handle)
    });
    core.check_or_refuse(tag, made)
}

/// The lists on the device, and what comes from each rank of this host.
fn on_device<D: Kernels>(device: &D, place: HostPlace, lists: HopLists, handle: &Handle<D>) -> Result<HopMaps<D>> {
    let maps = message_maps(&handle.plan)?;
    let mut all: Vec<i32> = Vec::new();
    let mut put = |numbers: Vec<i32>| {
        let first = all.len();
        all.extend(numbers);
        first..all.len()
    };
    let rows: usize = lists.arriving.iter().sum();
    let crossing_tokens = put(lists.crossing_tokens);
    let arrived_rows = put((0..rows as i32).collect());
    let forwarded_rows = put(lists.forwarded_rows);
    let forwarded_choices = put(lists.forwarded_choices);
    let (choice_of, row_of, weight_of) = (put(lists.choice_of), put(lists.row_of), put(lists.weight_of));
    let mut there = Tensor::empty(device, DType::I32, &[all.len()])?;
    device.upload(bytemuck::cast_slice(&all), there.view_mut())?;
    Ok(HopMaps {
        lists: there,
        crossing_tokens,
        crossing: place.across(&lists.crossing),
        arrived_rows,
        arriving: place.across(&lists.arriving),
        forwarded_rows,
        forwarded: place.within(&lists.forwarded),
        forwarded_choices,
        choices: place.within(&lists.choices),
        choice_of,
        row_of,
        weight_of,
        return_slots: by_sender(device, place, maps)?,
        slots: place.passed_on(&maps.slots_from),
        received: place.passed_on(&maps.recv_rows),
    })
}

/// As many copies of some bytes behind each other.
fn copies<D: Kernels>(device: &D, from: TensorRef<'_, D>, count: usize) -> Result<Tensor<D>> {
    let bytes = from.count();
    let mut all = Tensor::empty(device, DType::U8, &[count * bytes])?;
    for i in 0..count {
        device.copy(from.data(), part_mut(all.view_mut(), i * bytes, 1, bytes)?.into_data())?;
    }
    Ok(all)
}

/// The slots to return, in the order of [`HostPlace::senders`].
fn by_sender<D: Kernels>(device: &D, place: HostPlace, maps: &MessageMaps<D>) -> Result<Tensor<D>> {
    let blocks = place.senders().map(|rank| range(&maps.slots_from, rank));
    reordered(device, maps.return_slots.view(), 1, blocks)
}

/// Blocks of a list, in entries of `width` elements, behind each other.
fn reordered<D: Kernels>(
    device: &D,
    from: TensorRef<'_, D>,
    width: usize,
    blocks: impl Iterator<Item = Range<usize>>,
) -> Result<Tensor<D>> {
    let list = from.reshape(&[from.count()])?;
    let mut all = Tensor::empty(device, list.dtype(), list.dims())?;
    let (size, mut at) = (width * list.dtype().size(), 0);
    for block in blocks.filter(|block| !block.is_empty()) {
        let to = part_mut(all.view_mut(), at, block.len(), size)?;
        device.copy(entries(list, block.start * width..block.end * width)?.data(), to.into_data())?;
        at += block.len() * size;
    }
    Ok(all)
}

/// What has come over both hops, in the order of the ranks that it is from.
pub(super) fn in_rank_order<D: Kernels>(
    device: &D,
    place: HostPlace,
    maps: &MessageMaps<D>,
    received: ReceivedRows<D>,
) -> Result<ReceivedRows<D>> {
    if place.hosts == 1 || place.ranks_per_host == 1 {
        return Ok(received);
    }
    let ordered = |list: Option<Tensor<D>>, counts: &[usize]| {
        let Some(list) = list else { return Ok(None) };
        let width = list.view().count().checked_div(counts.iter().sum()).unwrap_or(0);
        // Where each rank's block lies among those of all senders.
        let arrived: Vec<usize> = place.senders().map(|rank| counts[rank]).collect();
        let mut blocks = vec![0..0; counts.len()];
        place.senders().enumerate().for_each(|(at, rank)| blocks[rank] = range(&arrived, at));
        let all = reordered(device, list.view(), width, blocks.into_iter())?;
        all.reshape(list.view().dims()).map(Some)
    };
    Ok(ReceivedRows {
        rows: ordered(received.rows, &maps.recv_rows)?,
        weights: ordered(received.weights, &maps.slots_from)?,
        scales: ordered(received.scales, &maps.recv_rows)?,
    })
}
