//! A model of shards that is saved, and loaded at another number of ranks.

use super::*;

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

tests! {
    fn();
    what_is_saved_at_one_size_is_loaded_at_another,
    what_some_ranks_save_others_load,
}
