//! A decoder of any family.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor, Var};
use moebius::candle::{DeviceGroup, ExpertParallelMoE, HostExperts, Parameters};
use moebius::checkpoint::{Checkpoint, Form, OpenOptions};
use moebius::ep::GroupConfig;

use crate::cache::Cache;
use crate::config_entries::config_entries;
use crate::decoder::{DecoderStack, ForwardCaches, ForwardProgress, Tap};
use crate::error::{Error, Result};
use crate::family;
use crate::loss::{self, Loss};
use crate::params::{LoadOptions, Loader, ProgressFn};

/// One rank's copy of a decoder of any [supported family](crate::families): all of it but for the experts, of which the
/// rank holds its E / R.
#[derive(Debug)]
pub struct Model {
    family: String,
    decoder: DecoderStack,
    vars: Vec<(String, Var)>,
    trainable: bool,
    dequantized: Vec<(usize, Form)>,
    group: DeviceGroup,
    /// What all ranks' models have alike, by name.
    alike: BTreeMap<String, String>,
    /// Set once the ranks have compared it.
    compared: OnceLock<()>,
}

impl Model {
    /// Loads a published folder for one rank on `device`. `config.json` alone says which family it is.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use moebius_models::{LoadOptions, Model};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/small");
    /// let model = Model::load(folder, &Device::Cpu, LoadOptions::default())?;
    /// let prompt = Tensor::new(&[[3u32, 14, 15]], &Device::Cpu)?;
    /// let mut cache = model.cache();
    /// let logits = model.decode(&prompt, &mut cache)?; // [1, 3, vocabulary]
    /// let next = logits.get(0)?.get(2)?.argmax(0)?.reshape((1, 1))?;
    /// let logits = model.decode(&next, &mut cache)?; // [1, 1, vocabulary]
    /// # assert_eq!(logits.dims(), [1, 1, model.vocabulary()]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A folder of an unknown family, a configuration that the decoder does not do, missing or mis-shaped tensors.
    pub fn load(folder: impl AsRef<Path>, device: &Device, options: LoadOptions) -> Result<Self> {
        let mut open = OpenOptions::default();
        open.follow_links = options.follow_links;
        let checkpoint = match options.random {
            None => Checkpoint::open_with(folder, open)?,
            Some(_) => Checkpoint::open_config_with(folder, open)?,
        };
        let group = match checkpoint.moe_layers().first() {
            Some(&layer) => DeviceGroup::single(&checkpoint.block_config(layer)?, device)?,
            None => DeviceGroup::single(GroupConfig::one_rank(1), device)?,
        };
        Self::load_on(&checkpoint, group, options)
    }

    /// Loads this rank's part of a checkpoint to the group's device. No collective; every rank loads for itself. The
    /// group is one for the checkpoint's number of experts. In a model's first call the ranks compare it, so all ranks make as
    /// many models of a group and call them in the same order.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_on(checkpoint: &Checkpoint, group: impl Into<DeviceGroup>, options: LoadOptions) -> Result<Self> {
        Self::load_with_progress(checkpoint, group, options, &mut |_| {})
    }

    /// As [`load_on`](Self::load_on); `watch` is called before each layer, and when all is there.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_with_progress(
        checkpoint: &Checkpoint,
        group: impl Into<DeviceGroup>,
        options: LoadOptions,
        watch: &mut ProgressFn<'_>,
    ) -> Result<Self> {
        let group = group.into();
        let mut watch = |progress| watch(progress);
        let mut p = Loader::new(checkpoint, &group, options, &mut watch)?;
        let decoder = family::load(&mut p)?;
        let family = checkpoint.family().to_string();
        let (trainable, dequantized) = (options.parameters == Parameters::Trainable, p.take_dequantized());
        let vars = p.into_vars();
        let mut alike = config_entries(checkpoint.config());
        alike.insert("type of the embedding".into(), format!("{:?}", decoder.dtype()));
        alike.insert("option random".into(), format!("{:?}", options.random));
        // Steps with experts on the host are never captured, so all ranks have them there or none.
        alike.insert("option experts_on_host".into(), options.experts_on_host.to_string());
        let compared = OnceLock::new();
        Ok(Self { family, decoder, vars, trainable, dequantized, group, alike, compared })
    }

    /// The `model_type` that named the family.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// Layers whose experts are de-quantized although [`ExpertWeights::AsStored`](crate::ExpertWeights::AsStored) was asked
    /// for, as no product reads the form that they are stored in; with that form.
    pub fn dequantized_experts(&self) -> &[(usize, Form)] {
        &self.dequantized
    }

    /// Number of tokens V.
    pub fn vocabulary(&self) -> usize {
        self.decoder.vocabulary()
    }

    /// Hidden size H.
    pub fn hidden_size(&self) -> usize {
        self.decoder.hidden_size()
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.decoder.num_layers()
    }

    /// Most tokens of a sequence.
    pub fn context(&self) -> usize {
        self.decoder.context()
    }

    /// Where the decoder lives.
    pub fn device(&self) -> &Device {
        self.decoder.device()
    }

    /// Logits `[B, S, V]` of `ids` (integers, `[B, S]`, on any device). Collective: every rank calls with sequences of
    /// its own, of any number and length; a rank without any gives `[0, S]`.
    ///
    /// # Errors
    /// Mis-shaped ids, empty sequences, ids outside the vocabulary, sequences longer than [`context`](Self::context),
    /// and what the layer reports. The other ranks get an error too. Ranks whose models differ in `config.json`, in
    /// [`LoadOptions::random`], in [`LoadOptions::experts_on_host`] or in the type of the embedding all get
    /// `Error::ConfigMismatch` from their first call.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.logits(&self.hidden(ids)?)
    }

    /// Hidden states that [`forward`](Self::forward) projects to logits, after the last norm: `[B, S, H]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.run("Model::forward", ids, None, None)
    }

    /// As [`forward`](Self::forward), with a tap.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and the tap's.
    pub fn forward_tapped(&self, ids: &Tensor, tap: &mut Tap<'_>) -> Result<Tensor> {
        self.logits(&self.run("Model::forward_tapped", ids, None, Some(tap))?)
    }

    /// Logits `[B, S, V]` of hidden states `[B, S, H]`: of the last position alone, say.
    ///
    /// # Errors
    /// candle's, for another shape.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let (b, s, h) = hidden.dims3()?;
        let logits = self.decoder.logits(&hidden.reshape((b * s, h))?)?;
        Ok(logits.reshape((b, s, self.vocabulary()))?)
    }

    /// Cross-entropy of each next token of `ids`, as [`forward`](Self::forward) takes them. Logits are made for some
    /// hundred tokens at a time.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn loss(&self, ids: &Tensor) -> Result<Loss> {
        self.loss_of("Model::loss", ids, None)
    }

    /// As [`loss`](Self::loss), with a tap.
    ///
    /// # Errors
    /// As [`loss`](Self::loss), and the tap's.
    pub fn loss_tapped(&self, ids: &Tensor, tap: &mut Tap<'_>) -> Result<Loss> {
        self.loss_of("Model::loss_tapped", ids, Some(tap))
    }

    fn loss_of(&self, call: &'static str, ids: &Tensor, mut tap: Option<&mut Tap<'_>>) -> Result<Loss> {
        self.run_or_refuse(|at| {
            let ids = self.checked(call, ids, 0, |_| Ok(()))?;
            let hidden = self.decoder.hidden(&ids, None, &mut tap, at)?;
            Ok(loss::next_token(&hidden, &ids, &self.decoder.head())?)
        })
    }

    /// An empty cache for [`decode`](Self::decode).
    pub fn cache(&self) -> Cache {
        self.decoder.cache()
    }

    /// Logits `[B, S, V]` of `ids` as continuation of what the cache holds, and keeps them there. Collective.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); a cache of another model or of other sequences; a trainable model, because a
    /// cache cuts the gradient's way. After an error the cache must be cleared.
    pub fn decode(&self, ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.logits(&self.decode_hidden(ids, cache)?)
    }

    /// Hidden states that [`decode`](Self::decode) projects to logits, after the last norm: `[B, S, H]`.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_hidden(&self, ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        self.run("Model::decode", ids, Some(cache), None)
    }

    /// As [`decode_hidden`](Self::decode_hidden), with a tap.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), and the tap's.
    pub fn decode_hidden_tapped(&self, ids: &Tensor, cache: &mut Cache, tap: &mut Tap<'_>) -> Result<Tensor> {
        self.run("Model::decode_hidden_tapped", ids, Some(cache), Some(tap))
    }

    /// Replicated parameters with their names on disk, where the model is trainable. Their gradients are this
    /// rank's share: sum them over the ranks.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }

    /// The experts of a layer, with parameters of their own; `None` for dense layers.
    pub fn moe(&self, layer: usize) -> Option<&ExpertParallelMoE> {
        self.decoder.moe(layer)
    }

    /// The routed experts that are on the host ([`LoadOptions::experts_on_host`]), all layers'.
    pub fn host_experts(&self) -> Option<&HostExperts> {
        self.decoder.host_experts()
    }

    /// The ranks' group.
    pub(crate) fn group(&self) -> &DeviceGroup {
        &self.group
    }

    /// A layer with experts, if there is one; all of them are in one group.
    pub(crate) fn first_moe(&self) -> Option<&ExpertParallelMoE> {
        (0..self.num_layers()).find_map(|layer| self.moe(layer))
    }

    /// Ranks that share the experts.
    pub(crate) fn ranks(&self) -> usize {
        self.first_moe().map_or(1, |moe| moe.group().ranks())
    }

    /// Logits `[0, V]` of a rank without sequences, on the CPU: a GPU has no memory of no bytes.
    pub(crate) fn no_logits(&self) -> Result<Tensor> {
        Ok(Tensor::zeros((0, self.vocabulary()), DType::F32, &Device::Cpu)?)
    }

    /// The layers.
    pub(crate) fn decoder(&self) -> &DecoderStack {
        &self.decoder
    }

    /// True of a model whose weights are variables.
    pub(crate) fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// Runs all layers. A failure on one rank is told to the others, which go on to the next layer with experts and
    /// would wait there.
    fn run(
        &self,
        call: &'static str,
        ids: &Tensor,
        mut cache: Option<&mut Cache>,
        mut tap: Option<&mut Tap<'_>>,
    ) -> Result<Tensor> {
        let past = cache.as_ref().map_or(0, |cache| cache.len);
        self.run_or_refuse(|at| {
            let ids = self.checked(call, ids, past, |sequences| self.check_cache(call, cache.as_deref(), sequences))?;
            let caches = cache.as_mut().map(|cache| ForwardCaches {
                layers: &mut cache.layers,
                past,
                position: None,
                most_tokens: None,
            });
            let hidden = self.decoder.hidden(&ids, caches, &mut tap, at)?;
            if let Some(cache) = cache {
                let (sequences, len) = ids.dims2()?;
                // A rank without sequences takes part for as long as others have some: it holds nothing that could be full.
                cache.len += if sequences > 0 { len } else { 0 };
                cache.sequences = Some(sequences);
            }
            Ok(hidden)
        })
    }

    /// Compares the model with the other ranks' in the first call that they make together: ranks with other layers would
    /// wait for each other, or go on to other logits without a word. Every rank has the error.
    pub(crate) fn compare(&self) -> Result<()> {
        if self.compared.get().is_none() {
            self.group.compare_texts("Model", &self.alike)?;
            let _ = self.compared.set(());
        }
        Ok(())
    }

    /// Tells the other ranks of an error.
    pub(crate) fn run_or_refuse<T>(&self, run: impl FnOnce(&mut ForwardProgress) -> Result<T>) -> Result<T> {
        self.compare()?;
        let mut at = ForwardProgress::default();
        run(&mut at).inspect_err(|error| self.decoder.refuse(at, &error.refusal_reason()))
    }

    fn check_cache(&self, call: &'static str, cache: Option<&Cache>, sequences: usize) -> Result<()> {
        let fail = |problem: String| Err(Error::Usage { call, problem });
        let Some(cache) = cache else { return Ok(()) };
        if self.trainable {
            return fail("the model was loaded as trainable; load another".into());
        }
        if !self.decoder.made(cache) {
            return fail("the cache is of another model: expected one that this model's cache() made".into());
        }
        match cache.sequences {
            Some(held) if held != sequences => {
                fail(format!("the cache holds {held} sequences, the call has {sequences}"))
            }
            _ => Ok(()),
        }
    }

    /// The ids as U32 on the model's device, none on the CPU, if the call can be made behind `past` tokens; `check` gets the
    /// number of sequences.
    pub(crate) fn checked(
        &self,
        call: &'static str,
        ids: &Tensor,
        past: usize,
        check: impl FnOnce(usize) -> Result<()>,
    ) -> Result<Tensor> {
        let fail = |problem: String| Err(Error::Usage { call, problem });
        let &[sequences, len] = ids.dims() else {
            return Err(Error::Shape {
                call,
                tensor: "ids".into(),
                expected: "[B, S]".into(),
                found: ids.dims().to_vec(),
            });
        };
        if !matches!(ids.dtype(), DType::U8 | DType::U32 | DType::I64) {
            return fail(format!("ids: expected integers, found {:?}", ids.dtype()));
        }
        check(sequences)?;
        if sequences > 0 && len == 0 {
            return fail("an empty prompt: a sequence has at least one token".into());
        }
        if past + len > self.context() {
            let most = self.context();
            return fail(format!("sequences of {past} cached and {len} new tokens; the context is {most}"));
        }
        if ids.elem_count() == 0 {
            // None are not copied or converted: a GPU has no memory of no bytes, and starts no kernel of no elements.
            return Ok(Tensor::zeros((sequences, len), DType::U32, &Device::Cpu)?);
        }
        let values = ids.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let vocabulary = self.vocabulary();
        if let Some(wrong) = values.iter().position(|id| !(0..vocabulary as i64).contains(id)) {
            let (row, position) = (wrong / len, wrong % len);
            return Err(Error::TokenId { call, row, position, id: values[wrong], vocabulary });
        }
        Ok(ids.to_dtype(DType::U32)?.to_device(self.device())?)
    }
}
