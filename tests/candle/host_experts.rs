//! Modules whose experts are on the host against the same modules with experts on the device: the same bits.

use candle_core::{DType, Device, Module, Tensor};
use moebius::Error;
use moebius::candle::{DeviceGroup, ExpertParallelMoE, HostExperts, LoadAs, Parameters, error_of};
use moebius::checkpoint::Checkpoint;
use moebius::cpu::Cpu;
use moebius::etp::Phase;
use moebius::layer::ParamKind;

use crate::goldens::golden_of;
use crate::support::{AnyResult, config, flat, group, of_type, wide_tokens};
use crate::trials::tests;

const QUANTIZED: [&str; 4] = ["qwen3_moe_nvfp4_modelopt", "qwen3_moe_nvfp4_ct", "gpt_oss_mxfp4", "deepseek_v3_fp8"];
/// Layers that a test stacks.
const LAYERS: usize = 3;

fn dtype(device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { DType::BF16 }
}

/// A checkpoint of the repository, and how its experts are loaded.
struct Source {
    name: &'static str,
    checkpoint: Checkpoint,
    quantized: bool,
    group: DeviceGroup,
}

impl Source {
    fn open(name: &'static str, quantized: bool, device: &Device) -> AnyResult<Self> {
        let checkpoint = Checkpoint::open(golden_of(name))?;
        let config = checkpoint.block_config(checkpoint.moe_layers()[0])?;
        Ok(Self { name, group: DeviceGroup::single(&config, device)?, checkpoint, quantized })
    }

    fn all(device: &Device) -> AnyResult<Vec<Self>> {
        let stored = QUANTIZED.into_iter().map(|name| (name, true));
        let floats = ["qwen3_moe", "gpt_oss", "gpt_oss_mxfp4"].into_iter().map(|name| (name, false));
        stored.chain(floats).map(|(name, quantized)| Self::open(name, quantized, device)).collect()
    }

    fn load(&self, params: Parameters) -> LoadAs<'static> {
        let load = LoadAs::new(params).dtype(dtype(self.group.device()));
        if self.quantized { load.quantized() } else { load }
    }

    /// Layers of the checkpoint, the first ones again where it has few.
    fn layers(&self) -> impl Iterator<Item = usize> {
        self.checkpoint.moe_layers().iter().copied().cycle().take(LAYERS)
    }

    fn tokens(&self) -> AnyResult<Tensor> {
        let hidden = self.checkpoint.block_config(self.checkpoint.moe_layers()[0])?.hidden;
        Ok(wide_tokens(0..9, hidden, dtype(self.group.device()), self.group.device())?.as_detached_tensor())
    }
}

fn stack(layers: &[ExpertParallelMoE], x: &Tensor) -> candle_core::Result<Tensor> {
    layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)? + x)
}

/// Every stored form and dense experts, loaded to the host or moved there; the first forward and those behind it.
fn experts_on_the_host_give_the_bits_of_those_at_hand(device: &Device) -> AnyResult<()> {
    for source in Source::all(device)? {
        let name = source.name;
        let at_hand: Vec<_> = source
            .layers()
            .map(|l| {
                ExpertParallelMoE::from_checkpoint(
                    &source.checkpoint,
                    l,
                    &source.group,
                    source.load(Parameters::Frozen),
                )
            })
            .collect::<Result<_, _>>()?;
        let x = source.tokens()?;
        let expected = flat(&stack(&at_hand, &x)?)?;
        let (loaded, placed) = (HostExperts::new(&source.group)?, HostExperts::new(&source.group)?);
        let load = |l| loaded.load(&source.checkpoint, l, source.load(Parameters::Frozen));
        let of = [
            (&loaded, source.layers().map(load).collect::<Result<Vec<_>, _>>()?),
            (&placed, at_hand.iter().map(|moe| placed.place(moe)).collect::<Result<Vec<_>, _>>()?),
        ];
        for (way, (host, layers)) in ["loaded", "placed"].iter().zip(&of) {
            for pass in 0..3 {
                let y = host.forward(|| stack(layers, &x))?;
                assert!(flat(&y)? == expected, "{name}, {way}, quantized: {}, forward {pass}", source.quantized);
            }
            let no_tensors = |moe: &ExpertParallelMoE| moe.param(ParamKind::Up).is_none() && moe.quantized().is_none();
            assert!(layers.iter().all(no_tensors) && layers[0].vars().is_empty(), "{name}, {way}");
            assert!(layers[0].to_block().is_err(), "{name}, {way}");
        }
        // Lines of 256 bytes behind each of the parts of a quantized weight.
        let bytes: usize = at_hand.iter().filter_map(|moe| moe.quantized().map(|(_, bytes)| bytes)).sum();
        let padding = if source.quantized { LAYERS * 2 * 3 * 256 } else { 0 };
        let floats = at_hand.iter().flat_map(|moe| [ParamKind::Up, ParamKind::Down].map(|kind| moe.param(kind)));
        let floats: usize = floats.flatten().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
        for (host, _) in &of {
            assert!((bytes + floats..=bytes + floats + padding).contains(&host.bytes()), "{name}: {}", host.bytes());
        }
    }
    Ok(())
}

/// Bits of y and of the gradients of x and the router.
fn pass(
    moe: &ExpertParallelMoE,
    x: &Tensor,
    mut begin: impl FnMut(Option<Phase>) -> AnyResult<()>,
) -> AnyResult<[Vec<f32>; 3]> {
    begin(Some(Phase::Forward))?;
    let y = moe.forward(x)?;
    begin(None)?;
    begin(Some(Phase::Backward))?;
    let gradients = y.to_dtype(DType::F32)?.sqr()?.sum_all()?.backward()?;
    begin(None)?;
    let router = moe.param(ParamKind::Router).ok_or("no router")?;
    let of = |t: &Tensor| flat(gradients.get(t).ok_or("no gradient")?);
    Ok([flat(&y)?, of(x)?, of(router)?])
}

/// Quantized experts on the host, a router that trains: the gradients are those of experts at hand.
fn a_router_trains_around_experts_on_the_host(device: &Device) -> AnyResult<()> {
    for name in QUANTIZED {
        let source = Source::open(name, true, device)?;
        let load = || source.load(Parameters::Trainable);
        let layer = source.checkpoint.moe_layers()[0];
        let at_hand = ExpertParallelMoE::from_checkpoint(&source.checkpoint, layer, &source.group, load())?;
        let host = HostExperts::new(&source.group)?;
        let moe = host.load(&source.checkpoint, layer, load())?;
        assert_eq!(moe.vars().len(), at_hand.vars().len(), "{name}");
        let x = candle_core::Var::from_tensor(&source.tokens()?)?;
        let expected = pass(&at_hand, &x, |_| Ok(()))?;
        let chain = host.on::<Cpu>();
        #[cfg(feature = "cuda")]
        let cuda = host.on::<moebius::cuda::Cuda>();
        for step in 0..3 {
            let found = pass(&moe, &x, |phase| {
                #[cfg(feature = "cuda")]
                if let Some(chain) = cuda {
                    return Ok(phase.map_or_else(|| chain.end(), |phase| chain.begin(phase))?);
                }
                let chain = chain.ok_or("a chain of the device")?;
                Ok(phase.map_or_else(|| chain.end(), |phase| chain.begin(phase))?)
            })?;
            assert!(found == expected, "{name}, step {step}");
        }
    }
    Ok(())
}

/// Failures between the layers, in the first forward and later: the next forward has the same bits.
fn a_forward_behind_one_that_failed(device: &Device) -> AnyResult<()> {
    for (name, quantized) in [("qwen3_moe", false), ("gpt_oss_mxfp4", true)] {
        let source = Source::open(name, quantized, device)?;
        let host = HostExperts::new(&source.group)?;
        let load = |l| host.load(&source.checkpoint, l, source.load(Parameters::Frozen));
        let layers = source.layers().map(load).collect::<Result<Vec<_>, _>>()?;
        let x = source.tokens()?;
        let fail = |after: usize| {
            let failed = host.forward(|| -> candle_core::Result<Tensor> {
                stack(&layers[..after], &x)?;
                Err(candle_core::Error::Msg("out of luck".into()))
            });
            assert!(failed.is_err_and(|error| error.to_string().contains("out of luck")), "{name}");
        };
        fail(2);
        let expected = flat(&host.forward(|| stack(&layers, &x))?)?;
        for after in [0, 1, 2, LAYERS] {
            fail(after);
            fail(after);
            for _again in 0..2 {
                assert!(flat(&host.forward(|| stack(&layers, &x))?)? == expected, "{name} behind {after} layers");
            }
        }
        // Another order of the layers is an error, of which nothing is left.
        let other = host.forward(|| layers[1].forward(&x)).map(drop);
        assert!(other.is_err_and(|error| matches!(error_of(&error), Some(Error::WeightState { .. }))), "{name}");
        assert!(flat(&host.forward(|| stack(&layers, &x))?)? == expected, "{name} behind another order");
    }
    Ok(())
}

fn what_cannot_be_is_refused(device: &Device) -> AnyResult<()> {
    let source = Source::open("qwen3_moe", false, device)?;
    let host = HostExperts::new(&source.group)?;
    let refused = |made: candle_core::Result<()>, name: &str| {
        let error = made.expect_err(name);
        let named = matches!(error_of(&error), Some(Error::Invalid { name: found, .. }) if found == name);
        assert!(named, "{name}: {error}");
    };
    let layer = source.checkpoint.moe_layers()[0];
    refused(host.load(&source.checkpoint, layer, Parameters::Trainable).map(drop), "parameters");
    let load = LoadAs::new(Parameters::Frozen).experts_on_host();
    let whole = ExpertParallelMoE::from_checkpoint(&source.checkpoint, layer, &source.group, load);
    refused(whole.map(drop), "experts_on_host");
    let trained = of_type(group(device)?, config(), dtype(device))?;
    refused(HostExperts::new(trained.group())?.place(&trained).map(drop), "experts.up");
    let placed = host.load(&source.checkpoint, layer, source.load(Parameters::Frozen))?;
    refused(host.place(&placed).map(drop), "experts");
    // A forward within a forward, and another layer behind the first forward.
    let x = source.tokens()?;
    host.forward(|| {
        let inner = host.forward(|| placed.forward(&x)).map(drop);
        refused(inner, "forward");
        placed.forward(&x)
    })?;
    let late = host.load(&source.checkpoint, layer, source.load(Parameters::Frozen)).map(drop);
    assert!(late.is_err_and(|error| matches!(error_of(&error), Some(Error::WeightState { .. }))));
    host.forward(|| placed.forward(&x))?;
    Ok(())
}

tests! {
    fn(&Device) -> AnyResult<()>;
    experts_on_the_host_give_the_bits_of_those_at_hand,
    a_router_trains_around_experts_on_the_host,
    a_forward_behind_one_that_failed,
    what_cannot_be_is_refused,
}
