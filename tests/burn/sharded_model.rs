//! Models all of whose weights are shards, of one chain, or of one of all ranks and one of the ranks with the same
//! experts: training, memory, and what is saved at one size and loaded at another.

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

/// Three steps of burn's AdamW leave what they leave of whole weights, to the bit.
fn three_steps_are_those_of_whole_weights() {
    for size in SIZES {
        let whole = on(size, |place| {
            let mut model = Whole::new(&place.group);
            let Rank { rank, mut same_experts, mut world, .. } = place;
            let (mut adam, mut losses) = (AdamWConfig::new().init(), Vec::new());
            for step in 0..STEPS {
                let loss = model.loss(ids(rank, step));
                losses.extend(floats(loss.clone()));
                let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
                let experts = model.moe.expert_ids();
                let (all, own) = (ReduceOptions::except(&experts), ReduceOptions::only(&experts));
                reduce_gradients_over(&mut *world, &Cpu::new(), &model, all, &mut gradients).unwrap();
                reduce_gradients_over(&mut *same_experts, &Cpu::new(), &model, own, &mut gradients).unwrap();
                model = adam.step(1e-2, model, gradients);
            }
            (losses, model.weights())
        });
        let found = on(size, |place| {
            let mut model = Whole::new(&place.group).sharded(&place).unwrap();
            let (mut adam, mut losses) = (AdamWConfig::new().init(), Vec::new());
            for step in 0..STEPS {
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, step))).unwrap();
                losses.extend(floats(loss.clone()));
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                assert!(gradients.is_empty(), "backward gives none of shards");
                place.finish(&model, &mut gradients).unwrap();
                model = adam.step(1e-2, model, gradients);
            }
            (losses, model.weights())
        });
        for (rank, (found, whole)) in found.into_iter().zip(whole).enumerate() {
            assert_eq!(found.0, whole.0, "losses of rank {rank} at {size:?}");
            for (i, (found, expected)) in found.1.into_iter().zip(own(&whole.1, size, rank)).enumerate() {
                assert_eq!(found, expected, "weight {i} of rank {rank} at {size:?}");
            }
        }
    }
}

/// Parameters, gradients and main gradients of a rank are its shards of all weights but the selection bias.
fn a_rank_holds_its_part_of_everything() {
    let whole = on(SIZES[0], |place| Whole::new(&place.group).num_params()).remove(0);
    for n in [1, 2, 4] {
        let size = Size { ep: 1, n };
        on(size, |place| {
            let weights = Whole::new(&place.group).weights();
            let model = Whole::new(&place.group).sharded(&place).unwrap();
            let expected: usize = own(&weights, size, place.rank).iter().map(Vec::len).sum();
            assert_eq!(model.num_params(), expected);
            // At most 16 lines of padding a rank and weight, of a width that they have.
            let widest = weights.iter().map(|(_, dims)| dims[dims.len() - 1]).max().unwrap();
            assert!(model.num_params() <= (whole - E) / n + E + 16 * widest * weights.len(), "of {whole} over {n}");
            let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
            let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
            let mut gradients = GradientsParams::from_grads(all, &model);
            place.finish(&model, &mut gradients).unwrap();
            assert_eq!(place.experts.chain().memory().main, 4 * (expected - E), "main gradients");
            assert_eq!(gradients.len(), weights.len() - 1);
            let router = gradients.get::<Flex, 2>(model.moe.router.weight.id).unwrap();
            assert_eq!(router.dims(), model.moe.router.weight.dims());
        });
    }
}

/// The shared expert's biases train beside weights that are frozen, where all are shards: their gradients, and all
/// others, are those beside weights that train.
fn shared_biases_train_beside_frozen_weights() {
    for size in [Size { ep: 1, n: 2 }, Size { ep: 2, n: 2 }] {
        let run = |frozen: bool| {
            on(size, |place| {
                let mut model = Whole::new(&place.group).sharded(&place).unwrap();
                if frozen {
                    let shared = model.moe.shared.as_mut().unwrap();
                    for weight in [&mut shared.up, &mut shared.down] {
                        *weight = weight.clone().set_require_grad(false);
                    }
                }
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                place.finish(&model, &mut gradients).unwrap();
                read::<Flex>(&model, &gradients)
            })
        };
        for (found, mut expected) in run(true).into_iter().zip(run(false)) {
            let all = expected.len();
            expected.retain(|(name, ..)| !["moe.shared.up", "moe.shared.down"].contains(&name.as_str()));
            assert_eq!(expected.len(), all - 2);
            assert!(expected.iter().any(|(name, ..)| name == "moe.shared.up_bias"));
            assert_eq!(found, expected, "{size:?}");
        }
    }
}

/// AdamW with main weights over shards of everything: the norm of the gradients, and what the steps leave of the head,
/// have the same bits at every N, where all ranks have the same tokens.
fn main_weights_of_shards_of_everything() {
    let run = |n: usize| {
        let found = on(Size { ep: 1, n }, |place| {
            let mut model = Whole::new(&place.group).sharded(&place).unwrap();
            let mut params = AdamWParam::of_module::<B, _>(&model);
            model.moe.place_shards(&mut params).unwrap();
            for dense in [&model.embed, &model.proj, &model.head] {
                dense.place_shards(&mut params).unwrap();
            }
            let options = AdamWOptions { max_norm: Some(0.5), ..AdamWOptions::default() };
            let groups = [options.group];
            let Rank { rank, group, experts, dense, same_experts, world } = place;
            let mut adam = AdamW::<B>::over_ranks(&Cpu::new(), world, &model, params, options, &groups).unwrap();
            let place = Rank { rank, group, experts, dense, same_experts, world: Box::new(Solo::new(Cpu::new())) };
            for step in 0..2 {
                let loss = place.pass(Phase::Forward, &model, || model.loss(ids(0, step))).unwrap();
                let loss = loss.mul_scalar(1.0 / n as f64);
                let all = place.pass(Phase::Backward, &model, || Ok(loss.backward())).unwrap();
                let mut gradients = GradientsParams::from_grads(all, &model);
                place.finish(&model, &mut gradients).unwrap();
                model = adam.step(model, gradients).unwrap();
            }
            (adam.stats().unwrap(), floats(model.head.shards[0].val()))
        });
        assert!(found.iter().all(|(stats, _)| *stats == found[0].0), "one norm for all ranks");
        let head: Vec<f32> = found.iter().flat_map(|(_, own)| own.clone()).take(VOCABULARY * H).collect();
        (found[0].0, head)
    };
    let alone = run(1);
    assert!(alone.0.steps == 2 && alone.0.norm > 0.5);
    for n in [2, 4] {
        assert!(run(n) == alone, "over {n}");
    }
}

/// A decoder's embedding, one projection, its layers, norm and head.
#[derive(Module, Debug)]
struct Stored<B: MoeBackend> {
    embed: ShardedDense<B>,
    proj: ShardedDense<B>,
    layers: Vec<ExpertParallelMoE<B>>,
    norm: ShardedDense<B>,
    head: Option<ShardedDense<B>>,
}

impl<S: Meshed> Stored<Autodiff<S>> {
    fn load(place: &Rank<S>, checkpoint: &Checkpoint) -> Result<Self> {
        let (device, dense) = (here::<Autodiff<S>>(), place.dense());
        let proj = format!("{}self_attn.q_proj", checkpoint.layer_prefix(checkpoint.moe_layers()[0]));
        let of = |name| DenseLoad { checkpoint, name, dtype: None };
        let layer = |&layer: &usize| {
            let from = ShardedLoad { checkpoint, layer, dtype: None, payload: Payload::Plain };
            place.experts.load_all(from, dense, &place.group, &device)
        };
        let head = checkpoint.has("lm_head.weight").then(|| dense.load_linear(of("lm_head"), &device));
        Ok(Self {
            embed: dense.load_embedding(of("model.embed_tokens"), &device)?,
            proj: dense.load_linear(of(&proj), &device)?,
            layers: checkpoint.moe_layers().iter().map(layer).collect::<Result<_>>()?,
            norm: dense.load_rms_norm(of("model.norm"), 1e-6, &device)?,
            head: head.transpose()?,
        })
    }

    fn loss(&self) -> Result<Tensor<Autodiff<S>, 1>> {
        let x = self
            .embed
            .embed(Tensor::from_data(TensorData::new(vec![1i64, 5, 3, 8], [1, 4]), &here::<Autodiff<S>>()))?;
        let q = self.proj.forward(x.clone())?;
        let mut x = x;
        for layer in &self.layers {
            x = layer.forward(x.clone())? + x;
        }
        let y = self.norm.forward(x)?;
        let y = self.head.as_ref().map_or(Ok(y.clone()), |head| head.forward(y))?;
        Ok(y.powi_scalar(2).mean() + q.powi_scalar(2).mean())
    }

    /// A step with the same tokens on every rank, so that their number decides nothing but a power of two.
    fn step(self, place: &Rank<S>, ranks: usize) -> Result<Self> {
        let loss = place.pass(Phase::Forward, &self, || self.loss())?;
        let all = place.pass(Phase::Backward, &self, || Ok(loss.mul_scalar(1.0 / ranks as f64).backward()))?;
        let mut gradients = GradientsParams::from_grads(all, &self);
        place.finish(&self, &mut gradients)?;
        Ok(SgdConfig::new().init().step(0.5, self, gradients))
    }

    fn save(&self, place: &mut Rank<S>, source: &Checkpoint, to: &Path) -> Result<()> {
        let blocks = self.layers.iter().map(ExpertParallelMoE::to_parts).collect::<Result<Vec<_>>>()?;
        let dense = [Some(&self.embed), Some(&self.proj), Some(&self.norm), self.head.as_ref()];
        let tensors = dense.into_iter().flatten().map(ShardedDense::to_parts).collect::<Result<Vec<_>>>()?.concat();
        let model = RankModel { blocks: &blocks, tensors: &tensors };
        let device = place.experts.chain().device().clone();
        source.save_parts(to, model, &device, &mut *place.world, SaveOptions::default())
    }
}

impl<S: Meshed> Holders<S> for Stored<Autodiff<S>> {
    fn holders(&self) -> Vec<&dyn ShardHolder<Backend = Autodiff<S>>> {
        let dense: [&dyn ShardHolder<Backend = Autodiff<S>>; 3] = [&self.embed, &self.proj, &self.norm];
        self.layers().into_iter().chain(dense).chain(self.head.iter().map(|head| head as _)).collect()
    }

    fn layers(&self) -> Vec<&dyn ShardHolder<Backend = Autodiff<S>>> {
        self.layers.iter().map(|layer| layer as _).collect()
    }
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut all: Vec<String> = std::fs::read_dir(dir).unwrap().map(name).collect();
    all.sort();
    all.into_iter().map(|name| (name.clone(), std::fs::read(dir.join(&name)).unwrap())).collect()
}

/// Published weights as shards, trained at N = 2 and saved; loaded at other sizes they are saved with the same bytes, and
/// the next step has the same bits at each N.
fn what_is_saved_at_one_size_is_loaded_at_another() {
    for family in ["qwen3_moe", "qwen2_moe", "gpt_oss"] {
        let source = Checkpoint::open(golden_of(family)).unwrap();
        let run = |size: Size, from: &Checkpoint, train: bool| {
            let to = tempfile::tempdir().unwrap();
            let saved = on(size, |mut place| {
                let mut model = Stored::load(&place, from)?;
                if train {
                    model = model.step(&place, size.n)?;
                }
                model.save(&mut place, from, to.path())
            });
            saved.into_iter().for_each(|saved| saved.unwrap_or_else(|e| panic!("{family} at {size:?}: {e}")));
            to
        };
        let same = |a: &Path, b: &Path, at: &str| {
            let (a, b) = (files(a), files(b));
            assert_eq!(a.len(), b.len(), "{family}, {at}");
            a.iter().zip(&b).for_each(|(a, b)| assert!(a == b, "{family}, {at}: {}", a.0));
        };
        // What was loaded is what is saved.
        let options = LoadOptions { rank: 0, ranks: 1, dtype: None };
        let blocks: Vec<_> =
            source.moe_layers().iter().map(|layer| (*layer, source.load_block(*layer, options).unwrap())).collect();
        let blocks: Vec<_> = blocks.iter().map(|(layer, block)| block.params.at_layer(*layer)).collect();
        let untrained = tempfile::tempdir().unwrap();
        source.save(untrained.path(), &blocks).unwrap();
        for size in SIZES {
            same(run(size, &source, false).path(), untrained.path(), &format!("untrained at {size:?}"));
        }
        let two = run(Size { ep: 1, n: 2 }, &source, true);
        let trained = Checkpoint::open(two.path()).unwrap();
        assert!(files(two.path()) != files(untrained.path()), "{family}: a step changes them");
        for size in SIZES {
            same(run(size, &trained, false).path(), two.path(), &format!("loaded at {size:?}"));
        }
        let next = run(Size { ep: 1, n: 2 }, &trained, true);
        for n in [1, 4] {
            let size = Size { ep: 1, n };
            same(run(size, &source, true).path(), two.path(), &format!("the first step over {n}"));
            same(run(size, &trained, true).path(), next.path(), &format!("the second step over {n}"));
        }
    }
}

/// The same over so many ranks that hold all experts, and over one, on any back end: what is saved has the bytes of what
/// was published, and what a step over all left is loaded at both numbers. On CPUs the step's weights have the same bits at
/// both; burn's CUDA back end tunes its products for each GPU, whose sums then differ in their order.
pub fn saved_over_ranks<S: Meshed>(ranks: usize) {
    let reproducible = TypeId::of::<S>() == TypeId::of::<Flex>();
    for family in ["qwen3_moe", "qwen2_moe", "gpt_oss"] {
        let source = Checkpoint::open(golden_of(family)).unwrap();
        let experts = source.block_config(source.moe_layers()[0]).unwrap().router.num_experts;
        let run = |n: usize, from: &Checkpoint, train: bool| {
            let to = tempfile::tempdir().unwrap();
            let saved = on_mesh::<S, _>(Mesh { world: n, ep: 1 }, true, |place| {
                let Place { rank, shards, data, world, .. } = place;
                let device = shards.chain().device().clone();
                let alone = Box::new(moebius::comm::Solo::new(device.clone()));
                let group = S::group_of(device, alone, GroupConfig::new(experts, 64));
                let mut place = Rank::<S> { rank, group, experts: shards, dense: None, same_experts: data, world };
                let mut model = Stored::load(&place, from)?;
                if train {
                    model = model.step(&place, n)?;
                }
                model.save(&mut place, from, to.path())
            });
            saved.into_iter().for_each(|saved| saved.unwrap_or_else(|e| panic!("{family} over {n}: {e}")));
            to
        };
        let same = |a: &Path, b: &Path, at: &str| {
            let (a, b) = (files(a), files(b));
            assert_eq!(a.len(), b.len(), "{family}, {at}");
            a.iter().zip(&b).for_each(|(a, b)| assert!(a == b, "{family}, {at}: {}", a.0));
        };
        let untrained = run(1, &source, false);
        same(run(ranks, &source, false).path(), untrained.path(), "untrained");
        let trained = run(ranks, &source, true);
        assert!(files(trained.path()) != files(untrained.path()), "{family}: a step changes them");
        let reopened = Checkpoint::open(trained.path()).unwrap();
        for n in [1, ranks] {
            if reproducible {
                same(run(n, &source, true).path(), trained.path(), &format!("a step over {n}"));
            }
            same(run(n, &reopened, false).path(), trained.path(), &format!("loaded over {n}"));
        }
    }
}

fn what_some_ranks_save_others_load() {
    saved_over_ranks::<Flex>(2);
}

/// The last rank cannot begin: each other rank has a typed error that is no timeout, and all go on.
fn a_rank_that_cannot_begin_tells_the_others() {
    let size = Size { ep: 2, n: 2 };
    let told = Barrier::new(4);
    on(size, |place| {
        let model = Whole::new(&place.group).sharded(&place).unwrap();
        // A wrong list for the chain of the experts, and one for that of all.
        for wrong in 0..2 {
            let begin = |at: usize, chain: &ShardedParams<Flex>| {
                let list = if at == wrong && place.rank == 3 { Vec::new() } else { place.modules(&model, chain) };
                chain.begin(Phase::Forward, list)
            };
            let run = || -> Result<_> {
                place.chains().into_iter().enumerate().try_for_each(|(at, chain)| begin(at, chain))?;
                model.loss(ids(place.rank, 0))
            };
            let outcome = run();
            told.wait();
            let error = outcome.unwrap_err();
            let as_meant = match &error {
                Error::Peer { reason, .. } | Error::Comm(CommError::Refused { reason, .. }) => {
                    place.rank != 3 && reason.contains("found 0")
                }
                error => place.rank == 3 && error.to_string().contains("found 0"),
            };
            assert!(as_meant, "rank {}, wrong {wrong}: {error:?}", place.rank);
            place.recover(&error);
            place.pass(Phase::Forward, &model, || model.loss(ids(place.rank, 0))).unwrap();
        }
    });
}

fn wrong_use_is_refused() {
    let source = Checkpoint::open(golden_of("qwen3_moe")).unwrap();
    on(Size { ep: 2, n: 1 }, |place| {
        let text = |error: Option<Error>| error.map(|e| e.to_string()).unwrap_or_default();
        // Routers are shards over all ranks, not over those with the same experts.
        let moe = || module::<B>(&biased(), &place.group);
        let found = text(moe().into_all_sharded(&place.experts, Payload::Plain, &place.experts).err());
        assert!(found.contains("a chain of all ranks"), "{found}");
        let sharded = moe().into_all_sharded(&place.experts, Payload::Plain, place.dense()).unwrap();
        let found = text(place.experts.to_blocks([&sharded]).err());
        assert!(found.contains("to_parts"), "{found}");
        let found = text(sharded.into_sharded(&place.experts, Payload::Plain).err());
        assert!(found.contains("whole weights"), "{found}");
        let of = |name| DenseLoad { checkpoint: &source, name, dtype: None };
        let found = text(place.dense().load_linear::<B>(of("model.norm"), &device()).err());
        assert!(found.contains("2 dimensions") && found.contains("model.norm.weight"), "{found}");
        let found = text(place.dense().load_rms_norm::<B>(of("lm_head"), 1e-6, &device()).err());
        assert!(found.contains("1 dimensions"), "{found}");
        let found = text(place.dense().load_linear::<B>(of("model.nothing"), &device()).err());
        assert!(found.contains("model.nothing.weight"), "{found}");
    });
}

tests! {
    fn();
    three_steps_are_those_of_whole_weights,
    a_rank_holds_its_part_of_everything,
    shared_biases_train_beside_frozen_weights,
    main_weights_of_shards_of_everything,
    what_is_saved_at_one_size_is_loaded_at_another,
    what_some_ranks_save_others_load,
    a_rank_that_cannot_begin_tells_the_others,
    wrong_use_is_refused,
}
