//! The maps of a routing's two hops, made on the device.

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
use crate::ep::packing::{ReceivedRows, entries, flat, part_mut};

use super::lists::{Choices, HopLists, Place};

/// Numbers of a block for each rank, in the order of ranks.
type Counts<'a> = &'a [usize];

impl Place {
    /// Ranks in the order in which what they have sent reaches this one: by the rank of this host that passes it on, then source host.
    fn senders(self) -> impl Iterator<Item = usize> {
        let each = self.ranks_per_host;
        (0..each).flat_map(move |local| (0..self.hosts).map(move |host| host * each + local))
    }

    /// For each rank of this host, the sum over its counterparts, whose rows it passes on.
    fn passed_on(self, counts: Counts<'_>) -> Vec<usize> {
        let sum = |local| (0..self.hosts).map(|host| counts[host * self.ranks_per_host + local]).sum();
        self.within(&(0..self.ranks_per_host).map(sum).collect::<Vec<_>>())
    }
}

/// The maps of the choices that a prepare has kept, which counterparts tell each other (one collective).
pub(super) fn exchange_choices<D: Kernels>(
    core: &mut DispatcherState<D>,
    place: Place,
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
fn on_device<D: Kernels>(device: &D, place: Place, lists: HopLists, handle: &Handle<D>) -> Result<HopMaps<D>> {
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

/// The slots to return, in the order of [`Place::senders`].
fn by_sender<D: Kernels>(device: &D, place: Place, maps: &MessageMaps<D>) -> Result<Tensor<D>> {
    let starts = starts(&maps.slots_from);
    let blocks = place.senders().map(|rank| (starts[rank], maps.slots_from[rank]));
    reordered(device, maps.return_slots.view(), 1, blocks)
}

/// Where each rank's block begins.
fn starts(counts: Counts<'_>) -> Vec<usize> {
    let begin = |at: &mut usize, count: &usize| {
        let start = *at;
        *at += count;
        Some(start)
    };
    counts.iter().scan(0, begin).collect()
}

/// Blocks of a list, each a start and a number of entries of `width` elements, behind each other.
fn reordered<D: Kernels>(
    device: &D,
    from: TensorRef<'_, D>,
    width: usize,
    blocks: impl Iterator<Item = (usize, usize)>,
) -> Result<Tensor<D>> {
    let list = from.reshape(&[from.count()])?;
    let mut all = Tensor::empty(device, list.dtype(), list.dims())?;
    let (size, mut at) = (width * list.dtype().size(), 0);
    for (start, count) in blocks.filter(|(_, count)| *count > 0) {
        let to = part_mut(all.view_mut(), at, count, size)?;
        device.copy(entries(list, start * width..(start + count) * width)?.data(), to.into_data())?;
        at += count * size;
    }
    Ok(all)
}

/// What has come over both hops, in the order of the ranks that it is from.
pub(super) fn in_rank_order<D: Kernels>(
    device: &D,
    place: Place,
    maps: &MessageMaps<D>,
    received: ReceivedRows<D>,
) -> Result<ReceivedRows<D>> {
    if place.hosts == 1 || place.ranks_per_host == 1 {
        return Ok(received);
    }
    let ordered = |list: Option<Tensor<D>>, counts: Counts<'_>, dims: &dyn Fn(&Tensor<D>) -> Vec<usize>| {
        let Some(list) = list else { return Ok(None) };
        let total: usize = counts.iter().sum();
        let width = list.view().count().checked_div(total).unwrap_or(0);
        // Where each rank's block lies among those of all senders.
        let arrived: Vec<usize> = place.senders().map(|rank| counts[rank]).collect();
        let mut at = vec![0; counts.len()];
        place.senders().zip(starts(&arrived)).for_each(|(rank, start)| at[rank] = start);
        let all = reordered(device, list.view(), width, at.into_iter().zip(counts.iter().copied()))?;
        all.reshape(&dims(&list)).map(Some)
    };
    let same = |list: &Tensor<D>| list.view().dims().to_vec();
    Ok(ReceivedRows {
        rows: ordered(received.rows, &maps.recv_rows, &same)?,
        weights: ordered(received.weights, &maps.slots_from, &same)?,
        scales: ordered(received.scales, &maps.recv_rows, &same)?,
    })
}
