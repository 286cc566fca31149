//! Models all of whose weights are shards, of one chain, or of one of all ranks and one of the ranks with the same
//! experts: training, memory, and what is saved at one size and loaded at another.

mod refused;
pub mod stored;
mod training;

use std::any::TypeId;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::nn::{Embedding, Linear};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Int, Tensor, TensorData};
use moebius::burn::{
    AdamW, AdamWParam, DenseLoad, DeviceGroup, ExpertParallelMoE, MoeBackend, ReduceOptions, ShardHolder, ShardedDense,
    ShardedLoad, ShardedParams, reduce_gradients_over,
};
use moebius::checkpoint::{Checkpoint, LoadOptions, RankModel, SaveOptions};
use moebius::comm::Solo;
use moebius::config::Payload;
use moebius::cpu::{Cpu, ThreadComm, ThreadWorld};
use moebius::ep::{Group, GroupConfig};
use moebius::etp::{Chain, Comms, EtpOptions, Phase, Shards};
use moebius::layer::ParamKind;
use moebius::optim::AdamWOptions;
use moebius::{CommError, Error, Result};

use super::main_gradients::read;
use super::sharded::{Comm, Mesh, Meshed, Place, on_mesh};
use super::support::*;
use super::token_model::{Around, VOCABULARY, ids};
use crate::goldens::golden_of;
use crate::trials::tests;

const STEPS: usize = 3;

/// EP times ETP ranks: `ep` of them divide the experts, and `n` share those of each.
#[derive(Debug, Clone, Copy)]
struct Size {
    ep: usize,
    n: usize,
}

/// A rank of a model.
struct Rank<S: Meshed = Flex> {
    rank: usize,
    group: DeviceGroup,
    /// The chain of the ranks with the same experts, and that of all where it is another.
    experts: ShardedParams<S>,
    dense: Option<ShardedParams<S>>,
    same_experts: Comm<S>,
    world: Comm<S>,
}

impl<S: Meshed> Rank<S> {
    fn dense(&self) -> &ShardedParams<S> {
        self.dense.as_ref().unwrap_or(&self.experts)
    }

    fn chains(&self) -> Vec<&ShardedParams<S>> {
        std::iter::once(&self.experts).chain(&self.dense).collect()
    }

    /// The modules with weights in a chain: the layers have some in each.
    fn modules<'m>(
        &self,
        model: &'m impl Holders<S>,
        chain: &ShardedParams<S>,
    ) -> Vec<&'m dyn ShardHolder<Backend = Autodiff<S>>> {
        let of_experts = Arc::ptr_eq(chain.chain(), self.experts.chain());
        if of_experts && self.dense.is_some() { model.layers() } else { model.holders() }
    }

    /// A pass of all chains, each of which has some of the modules.
    fn pass<T>(&self, phase: Phase, model: &impl Holders<S>, run: impl FnOnce() -> Result<T>) -> Result<T> {
        for chain in self.chains() {
            chain.begin(phase, self.modules(model, chain))?;
        }
        let done = run()?;
        self.chains().into_iter().try_for_each(ShardedParams::end)?;
        Ok(done)
    }

    fn finish(&self, model: &impl Holders<S>, gradients: &mut GradientsParams) -> Result<()> {
        self.chains().into_iter().try_for_each(|chain| chain.finish(None, self.modules(model, chain), gradients))
    }

    fn recover(&self, reason: &Error) {
        let chains: Vec<_> = self.chains().into_iter().map(|shards| &**shards.chain()).collect();
        Chain::recover_all(&chains, Some(reason)).unwrap();
    }
}

/// A model of sharded modules.
trait Holders<S: Meshed> {
    fn holders(&self) -> Vec<&dyn ShardHolder<Backend = Autodiff<S>>>;

    fn layers(&self) -> Vec<&dyn ShardHolder<Backend = Autodiff<S>>>;
}

fn on<T: Send>(size: Size, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let Size { ep, n } = size;
    // Rank w has the experts of EP rank w % ep.
    let among = |place: &dyn Fn(usize) -> (usize, usize), parts: usize| {
        let mut of_part: Vec<_> = (0..parts).map(|_| ThreadWorld::create(ep * n / parts, LONG)).collect();
        of_part.iter_mut().for_each(|part| part.reverse());
        let mut all: Vec<_> = (0..ep * n).map(|w| (place(w), w)).collect();
        all.sort_unstable();
        let mut taken: Vec<_> = all.into_iter().map(|((part, _), w)| (w, of_part[part].pop().unwrap())).collect();
        taken.sort_unstable_by_key(|(w, _)| *w);
        taken.into_iter().map(|(_, comm)| comm).collect::<Vec<_>>().into_iter()
    };
    let divided = || among(&|w| (w / ep, w % ep), n);
    let same = || among(&|w| (w % ep, w / ep), ep);
    let all = || among(&|w| (0, w), 1);
    let comms = divided().zip(same().zip(same())).zip(all().zip(all())).zip(same().zip(all()));
    thread::scope(|scope| {
        let start = |(rank, (((group, own), all), (same_experts, world)))| {
            let run = &run;
            scope.spawn(move || {
                let chain = |(gather, reduce): (ThreadComm, ThreadComm)| {
                    let comms = Comms::<Cpu> { gather: Box::new(gather), reduce: Box::new(reduce) };
                    let chain = Chain::new(Cpu::poisoning(), comms, EtpOptions::default()).unwrap();
                    ShardedParams::new(Arc::new(chain))
                };
                let group = Group::new(Cpu::poisoning(), Box::new(group), GroupConfig::new(E, 64)).unwrap().into();
                let (experts, all) = (chain(own), chain(all));
                let dense = (ep > 1).then_some(all);
                let (same_experts, world) = (Box::new(same_experts) as Comm<Flex>, Box::new(world) as Comm<Flex>);
                run(Rank { rank, group, experts, dense, same_experts, world })
            })
        };
        let threads: Vec<_> = comms.enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[derive(Module, Debug)]
struct Whole<B: MoeBackend> {
    embed: Embedding<B>,
    proj: Linear<B>,
    moe: ExpertParallelMoE<B>,
    head: Linear<B>,
}

#[derive(Module, Debug)]
struct Sharded<B: MoeBackend> {
    embed: ShardedDense<B>,
    proj: ShardedDense<B>,
    moe: ExpertParallelMoE<B>,
    head: ShardedDense<B>,
}

impl Whole<B> {
    fn new(group: &DeviceGroup) -> Self {
        let Around { embed, proj, head } = Around::new();
        Self { embed, proj, moe: module(&biased(), group), head }
    }

    fn sharded(self, rank: &Rank) -> Result<Sharded<B>> {
        let dense = rank.dense();
        Ok(Sharded {
            embed: dense.embedding("embed", self.embed)?,
            proj: dense.linear("proj", self.proj)?,
            moe: self.moe.into_all_sharded(&rank.experts, Payload::Plain, dense)?,
            head: dense.linear("head", self.head)?,
        })
    }

    fn loss(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let x = self.embed.forward(ids);
        let x = self.proj.forward(x.clone()) + x;
        let out = self.moe.forward_full(x, None).unwrap();
        self.head.forward(out.y).powi_scalar(2).sum() + out.aux
    }

    /// The weights as they are cut, with the sizes of the whole: those of linear layers `[output, input]`.
    fn weights(&self) -> Vec<(Vec<f32>, Vec<usize>)> {
        let around = [
            (floats(self.embed.weight.val()), vec![VOCABULARY, H]),
            (floats(self.proj.weight.val().transpose()), vec![H, H]),
            (floats(self.proj.bias.as_ref().unwrap().val()), vec![H]),
            (floats(self.head.weight.val().transpose()), vec![VOCABULARY, H]),
        ];
        let config = biased();
        let local = self.moe.group().local_experts();
        let of_layer = |kind: ParamKind| Some((layer_values(&self.moe, kind)?, kind.dims(&config, local)?));
        around.into_iter().chain(ParamKind::ALL.into_iter().filter_map(of_layer)).collect()
    }
}

/// A parameter of a layer.
fn layer_values(moe: &ExpertParallelMoE<B>, kind: ParamKind) -> Option<Vec<f32>> {
    fn of<const D: usize>(param: &Param<Tensor<B, D>>) -> Vec<f32> {
        floats(param.val())
    }
    let (router, experts, shared) = (&moe.router, &moe.experts, moe.shared.as_ref());
    match kind {
        ParamKind::Router => Some(of(&router.weight)),
        ParamKind::RouterBias => router.bias.as_ref().map(of),
        ParamKind::SelectionBias => router.selection_bias.as_ref().map(of),
        ParamKind::Up => Some(of(&experts.up)),
        ParamKind::UpBias => experts.up_bias.as_ref().map(of),
        ParamKind::Down => Some(of(&experts.down)),
        ParamKind::DownBias => experts.down_bias.as_ref().map(of),
        ParamKind::SharedUp => shared.map(|s| of(&s.up)),
        ParamKind::SharedUpBias => shared.and_then(|s| s.up_bias.as_ref()).map(of),
        ParamKind::SharedDown => shared.map(|s| of(&s.down)),
        ParamKind::SharedDownBias => shared.and_then(|s| s.down_bias.as_ref()).map(of),
        ParamKind::SharedGate => shared.and_then(|s| s.gate.as_ref()).map(of),
    }
}

impl Sharded<B> {
    fn loss(&self, ids: Tensor<B, 2, Int>) -> Result<Tensor<B, 1>> {
        let x = self.embed.embed(ids)?;
        let x = self.proj.forward(x.clone())? + x;
        let out = self.moe.forward_full(x, None)?;
        Ok(self.head.forward(out.y)?.powi_scalar(2).sum() + out.aux)
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        let dense = [&self.embed, &self.proj, &self.head].into_iter();
        let dense = dense.flat_map(|dense| dense.shards.iter().map(|shard| floats(shard.val())));
        dense.chain(ParamKind::ALL.into_iter().filter_map(|kind| layer_values(&self.moe, kind))).collect()
    }
}

impl Holders<Flex> for Sharded<B> {
    fn holders(&self) -> Vec<&dyn ShardHolder<Backend = B>> {
        vec![&self.embed, &self.proj, &self.moe, &self.head]
    }

    fn layers(&self) -> Vec<&dyn ShardHolder<Backend = B>> {
        vec![&self.moe]
    }
}

/// A weight's rank's shard.
fn cut(whole: &[f32], dims: &[usize], [rank, ranks]: [usize; 2]) -> Vec<f32> {
    let whole = CoreTensor::from_vec(whole.to_vec(), dims).unwrap();
    let shards = Shards::new(dims, ranks, EtpOptions::default().pad).unwrap();
    shards.cut(&Cpu::new(), whole.view(), rank).unwrap().as_slice::<f32>().unwrap().to_vec()
}

/// What a rank holds of the weights of [`Whole::weights`], in their order.
fn own(whole: &[(Vec<f32>, Vec<usize>)], Size { ep, n }: Size, rank: usize) -> Vec<Vec<f32>> {
    let config = biased();
    let kinds = ParamKind::ALL.into_iter().filter(|kind| kind.dims(&config, E).is_some());
    let kinds: Vec<_> = std::iter::repeat_n(None, 4).chain(kinds.map(Some)).collect();
    assert_eq!(kinds.len(), whole.len());
    let of = |((values, dims), kind): (&(Vec<f32>, Vec<usize>), Option<ParamKind>)| match kind {
        Some(ParamKind::SelectionBias) => values.clone(),
        Some(ParamKind::Up | ParamKind::Down) => cut(values, dims, [rank / ep, n]),
        Some(ParamKind::UpBias | ParamKind::DownBias) => cut(values, &Shards::lines(dims), [rank / ep, n]),
        _ => cut(values, &Shards::lines(dims), [rank, ep * n]),
    };
    whole.iter().zip(kinds).map(of).collect()
}

const SIZES: [Size; 5] =
    [Size { ep: 1, n: 1 }, Size { ep: 1, n: 2 }, Size { ep: 1, n: 4 }, Size { ep: 2, n: 1 }, Size { ep: 2, n: 2 }];

/// The tests by name.
pub fn cases() -> Vec<(&'static str, fn())> {
    [training::cases(), stored::cases(), refused::cases()].concat()
}
