//! Passes that are refused or fail, wrong use, and a checkpoint of whole experts.

use super::*;

/// Whatever is wrong with the modules of a `finish`, the sums are there for the next.
pub fn sums_are_kept<S: Meshed>(mesh: Mesh) {
    let config = config();
    let run = |wrong: bool| {
        on_mesh::<S, _>(mesh, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<Autodiff<S>>::new(&config, &group).sharded(&shards, Payload::Plain);
            let mut gradients = passes(&model, &shards, rank);
            if wrong {
                let [first, second] = &model.layers[..] else { panic!("two layers") };
                let (mut other, mut typed) = (second.clone(), second.clone());
                other.experts.up = first.experts.down.clone();
                typed.experts.up = typed.experts.up.map(|up| up.cast(DType::F16).detach().require_grad());
                let whole = Model::<Autodiff<S>>::new(&config, &group).layers.remove(0);
                let cases: [(Vec<&ExpertParallelMoE<Autodiff<S>>>, &str); 6] = [
                    (vec![first], "all 4"),
                    (vec![], "all 4"),
                    (vec![first, &whole], "all 4"),
                    (vec![first, second, first], "each once"),
                    (vec![first, &other], "shard"),
                    (vec![first, &typed], "f16"),
                ];
                for (modules, word) in cases {
                    let error = shards.finish(None, modules, &mut gradients).err();
                    let error = error.map(|e| e.to_string().to_lowercase());
                    assert!(error.as_ref().is_some_and(|e| e.contains(word)), "{word}: {error:?}");
                    assert!(gradients.get::<S, 3>(first.experts.up.id).is_none(), "all sums or none");
                }
            }
            shards.finish(None, &model.layers, &mut gradients).unwrap();
            // The next step's are not added to these.
            let next = |gradients: &mut GradientsParams| {
                shards.finish(None, &model.layers, gradients).unwrap();
                of_experts(&model, gradients)
            };
            (of_experts(&model, &gradients), next(&mut passes(&model, &shards, rank)))
        })
    };
    let expected = run(false);
    assert_eq!(run(true), expected);
    assert!(expected.iter().all(|(one, next)| one == next && one.iter().flatten().any(|v| *v != 0.0)));
}

fn sums_are_kept_until_all_modules_are_given() {
    sums_are_kept::<Flex>(Mesh { world: 1, ep: 1 });
    sums_are_kept::<Flex>(Mesh { world: 2, ep: 1 });
    sums_are_kept::<Flex>(Mesh { world: 4, ep: 2 });
}

/// The last rank's modules are refused: it has its own error, every other rank one that is no timeout, and all go on.
pub fn begin_is_told<S: Meshed>(mesh: Mesh) {
    let config = config();
    // Where all are in the collective in which the last is missing, none waits for another's recovery.
    let together = mesh.ep == 1 || mesh.ep == mesh.world;
    let all_failed = Barrier::new(if together { mesh.world } else { 1 });
    let y = |wrong: bool| {
        on_mesh::<S, _>(mesh, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let model = Model::<S>::new(&config, &group).sharded(&shards, Payload::Plain);
            let forward = |modules: &[ExpertParallelMoE<S>]| {
                shards.begin(Phase::Forward, modules)?;
                let (y, _) = model.forward(tensor::<S, 2>(inputs(rank).0, [token_counts()[rank], H]))?;
                shards.end()?;
                Ok(floats(y))
            };
            // In the first pass, whose order nobody knows, and in the second.
            for pass in 0..2 {
                if wrong {
                    let last = rank + 1 == mesh.world;
                    let outcome = forward(if last { &model.layers[..1] } else { &model.layers });
                    all_failed.wait();
                    let error = outcome.unwrap_err();
                    let as_meant = match &error {
                        Error::Invalid { .. } => last && error.to_string().contains("all 4"),
                        Error::Peer { reason, .. } | Error::Comm(CommError::Refused { reason, .. }) => {
                            !last && reason.contains("all 4")
                        }
                        _ => false,
                    };
                    assert!(as_meant, "rank {rank} of {mesh:?}, pass {pass}: {error:?}");
                    shards.chain().recover(Some(&error)).unwrap();
                }
                forward(&model.layers).unwrap();
            }
            forward(&model.layers).unwrap()
        })
    };
    assert_eq!(y(true), y(false));
}

fn a_rank_that_cannot_begin_tells_the_others() {
    for (world, ep) in [(2, 1), (2, 2), (4, 1), (4, 2)] {
        begin_is_told::<Flex>(Mesh { world, ep });
    }
}

/// A checkpoint's experts as shards, a step, and back under the published names, over any number of ranks that share them.
fn sharded_experts_of_a_checkpoint_are_saved_whole() {
    let dir = &golden_of("qwen3_moe");
    let checkpoint = Checkpoint::open(dir).unwrap();
    let layers = checkpoint.moe_layers().to_vec();
    let hidden = checkpoint.block_config(layers[0]).unwrap().hidden;
    let block = |ranks: usize, train: bool| {
        let mesh = Mesh { world: ranks, ep: 1 };
        let mut found = on_mesh::<Flex, _>(mesh, true, |place| {
            let Place { group, shards, .. } = place;
            // Shards alone, or of whole weights.
            let load = |&layer: &usize| match ranks {
                1 => {
                    let load = LoadAs::default();
                    let moe = ExpertParallelMoE::<B>::from_checkpoint(&checkpoint, layer, &group, load, &device());
                    moe.unwrap().into_sharded(&shards, Payload::Plain).unwrap()
                }
                _ => {
                    let from = ShardedLoad { checkpoint: &checkpoint, layer, dtype: None, payload: Payload::Plain };
                    shards.load::<B>(from, &group, &device()).unwrap()
                }
            };
            let mut model = Model { layers: layers.iter().map(load).collect() };
            if train {
                // The same tokens on every rank, so that their number decides nothing but a power of two.
                let x = tensor::<B, 2>(values(7, 3 * hidden, 1.0), [3, hidden]);
                shards.begin(Phase::Forward, &model.layers).unwrap();
                let (y, _) = model.forward(x).unwrap();
                shards.end().unwrap();
                shards.begin(Phase::Backward, &model.layers).unwrap();
                let mut all = y.powi_scalar(2).mean().mul_scalar(1.0 / ranks as f64).backward();
                shards.end().unwrap();
                let mut gradients = GradientsParams::from_module(&mut all, &model);
                for moe in &model.layers {
                    gradients.remove::<Flex, 2>(moe.router.weight.id);
                }
                shards.finish(None, &model.layers, &mut gradients).unwrap();
                model = SgdConfig::new().init().step(0.5, model, gradients);
            }
            let blocks = shards.to_blocks(&model.layers).unwrap();
            assert!(model.layers[0].to_block().is_err_and(|e| e.to_string().contains("whole weights")));
            blocks
        });
        let first = found.remove(0);
        for other in &found {
            for (a, b) in first.iter().zip(other) {
                assert_eq!(bytes(a), bytes(b), "the same on all ranks");
            }
        }
        first
    };
    let saved = |blocks: &[Block]| {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<_> = layers.iter().zip(blocks).map(|(layer, block)| block.params.at_layer(*layer)).collect();
        checkpoint.save(folder.path(), &all).unwrap();
        let again = Checkpoint::open(folder.path()).unwrap();
        let options = || LoadOptions { rank: 0, ranks: 1, dtype: None };
        layers.iter().map(|layer| bytes(&again.load_block(*layer, options()).unwrap())).collect::<Vec<_>>()
    };
    let options = || LoadOptions { rank: 0, ranks: 1, dtype: None };
    let stored: Vec<_> = layers.iter().map(|layer| bytes(&checkpoint.load_block(*layer, options()).unwrap())).collect();
    let trained = saved(&block(1, true));
    assert_ne!(trained, stored, "a step changes them");
    for ranks in [1, 2, 4] {
        assert_eq!(saved(&block(ranks, false)), stored, "{ranks} ranks");
        assert_eq!(saved(&block(ranks, true)), trained, "{ranks} ranks");
    }
}

/// A block's parameters by name, as bytes.
fn bytes(block: &Block) -> Vec<(&'static str, Vec<u8>)> {
    let views = block.params.views().unwrap();
    ParamKind::ALL.into_iter().filter_map(|kind| Some((kind.name(), views.get(kind)?.data().to_vec()))).collect()
}

fn alone() -> ShardedParams<Flex> {
    let comm = || Box::new(Solo::new(Cpu::new())) as Box<dyn Communicator<Cpu>>;
    let chain = Chain::new(Cpu::new(), Comms { gather: comm(), reduce: comm() }, EtpOptions::default()).unwrap();
    ShardedParams::new(Arc::new(chain))
}

fn wrong_use_is_refused() {
    let (shards, other) = (alone(), alone());
    let moe = module::<B>(&config(), single()).into_sharded(&shards, Payload::Plain).unwrap();
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
    let text = |error: Option<moebius::Error>| error.map(|e| e.to_string()).unwrap_or_default();
    let error = text(moe.forward(x()).err());
    assert!(error.contains("expected a pass, found none"), "{error}");
    let error = text(other.begin(Phase::Forward, [&moe]).err());
    assert!(error.contains("one of another"), "{error}");
    let none: [&ExpertParallelMoE<B>; 0] = [];
    let error = text(shards.begin(Phase::Forward, none).err());
    assert!(error.contains("all 2") && error.contains("0"), "{error}");
    let error = text(moe.to_block().err());
    assert!(error.contains("whole weights"), "{error}");
    let error = text(moe.clone().into_sharded(&other, Payload::Plain).err());
    assert!(error.contains("whole weights"), "{error}");
    let mut wrong = moe.clone();
    wrong.experts.up = moe.experts.down.clone();
    let error = text(shards.begin(Phase::Forward, [&wrong]).err());
    assert!(error.contains("shard"), "{error}");
    let error = text(shards.begin(Phase::Forward, [&moe, &moe]).err());
    assert!(error.contains("each once"), "{error}");
    let mut typed = moe.clone();
    typed.experts.down = typed.experts.down.map(|down| down.cast(DType::F64).detach().require_grad());
    let error = text(shards.begin(Phase::Forward, [&typed]).err()).to_lowercase();
    assert!(error.contains("shard") && error.contains("f64"), "{error}");
    // The other chain's weights have the same numbers.
    let of_other = module::<B>(&config(), single()).into_sharded(&other, Payload::Plain).unwrap();
    let error = text(shards.begin(Phase::Forward, [&of_other]).err());
    assert!(error.contains("one of another"), "{error}");
    let error = text(shards.to_blocks([&of_other]).err());
    assert!(error.contains("one of another"), "{error}");
    // And goes on: without autodiff too, of the same parameters.
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let y = floats(moe.forward(x()).unwrap());
    shards.end().unwrap();
    let valid = burn::module::AutodiffModule::valid(&moe);
    shards.begin(Phase::Forward, [&valid]).unwrap();
    assert_eq!(floats(valid.forward(x().inner()).unwrap()), y);
    shards.end().unwrap();
    let whole = module::<Flex>(&config(), single()).forward(x().inner()).unwrap();
    assert_eq!(floats(whole), y);
}

/// `experts.down` of an odd inner size cannot be sent in NVFP4, while all else of the layer can: none of it is in the
/// chain afterwards, which trains other layers as one that was never asked.
fn a_layer_that_is_refused_leaves_nothing_in_its_chain() {
    let config = config();
    let run = |asked: bool| {
        on_mesh::<Flex, _>(Mesh { world: 2, ep: 1 }, true, |place| {
            let Place { rank, group, shards, .. } = place;
            let mut odd = config.clone();
            odd.intermediate = 5;
            let all = |shards: &ShardedParams<Flex>, payload, config: &MoeConfig| {
                let layers = Model::<B>::new(config, &group).layers.into_iter();
                let layers = layers.map(|moe| moe.into_all_sharded(shards, payload, shards));
                layers.collect::<moebius::Result<Vec<_>>>().map(|layers| Model { layers })
            };
            if asked {
                let error = all(&shards, Payload::Nvfp4, &odd).unwrap_err();
                let Error::Shard { call, rank: at, weight, expected, found } = &error else { panic!("{error:?}") };
                assert_eq!((*call, *at, &weight[..]), ("Chain::add", rank, "layer 0 experts.down"), "{error}");
                assert!(expected.contains("even number") && found.contains('5'), "{error}");
            }
            let model = all(&shards, Payload::Plain, &config).unwrap();
            let mut gradients = passes(&model, &shards, rank);
            shards.finish(None, &model.layers, &mut gradients).unwrap();
            (of_experts(&model, &gradients), shards.chain().order())
        })
    };
    assert_eq!(run(true), run(false));
}

/// A pass has the parameters of all its modules, or those of before.
fn a_begin_that_fails_changes_no_parameter() {
    let shards = alone();
    let moe = module::<B>(&config(), single()).into_sharded(&shards, Payload::Plain).unwrap();
    let x = || tensor::<B, 2>(inputs(0).0, [token_counts()[0], H]);
    let forward = || {
        let y = floats(moe.forward(x()).unwrap());
        shards.end().unwrap();
        y
    };
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let y = forward();
    let mut half = moe.clone();
    half.experts.up = half.experts.up.map(|up| up.mul_scalar(2.0).detach().require_grad());
    let doubled = half.clone();
    half.experts.down = moe.experts.up.clone();
    assert!(shards.begin(Phase::Forward, [&half]).is_err());
    // The chain's own call gathers what it has.
    shards.chain().begin(Phase::Forward).unwrap();
    assert_eq!(forward(), y);
    // A pass that runs goes on with what it has begun with.
    shards.begin(Phase::Forward, [&moe]).unwrap();
    let error = shards.begin(Phase::Forward, [&doubled]).err().map(|e| e.to_string());
    assert!(error.as_ref().is_some_and(|e| e.contains("not ended")), "{error:?}");
    assert_eq!(forward(), y);
    shards.begin(Phase::Forward, [&doubled]).unwrap();
    assert_ne!(forward(), y);
}

tests! {
    fn();
    sums_are_kept_until_all_modules_are_given,
    a_rank_that_cannot_begin_tells_the_others,
    sharded_experts_of_a_checkpoint_are_saved_whole,
    a_begin_that_fails_changes_no_parameter,
    a_layer_that_is_refused_leaves_nothing_in_its_chain,
    wrong_use_is_refused,
}
