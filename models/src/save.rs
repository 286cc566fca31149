//! A trained model in its published format.

use std::path::Path;

use moebius::candle::{CandleDevice, EpGroup, whole_tensor};
use moebius::checkpoint::{Checkpoint, RankBlock, RankModel, RankTensor, SaveOptions};
use moebius::comm::{Op, Tag};
use moebius::cpu::Cpu;

use crate::Model;
use crate::error::{Error, Result};

impl Model {
    /// Writes the model to `dir` as it is published: its parameters as they are now, in their types, everything else as
    /// `checkpoint` has it, which it was loaded from; what was quantized there is written plain. [`load`](Self::load) reads
    /// the folder on any number of ranks. A collective of the group's ranks, whose first one writes.
    ///
    /// ```
    /// use candle_core::Device;
    /// use moebius::candle::Parameters;
    /// use moebius::checkpoint::{Checkpoint, SaveOptions};
    /// use moebius_models::{LoadOptions, Model};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/small");
    /// # let out = tempfile::tempdir()?;
    /// # let out = out.path().join("trained");
    /// let options = LoadOptions { parameters: Parameters::Trainable, ..LoadOptions::default() };
    /// let model = Model::load(folder, &Device::Cpu, options)?;
    /// // … train it …
    /// model.save(&Checkpoint::open(folder)?, &out, SaveOptions::default())?;
    /// # assert_eq!(Model::load(&out, &Device::Cpu, LoadOptions::default())?.vocabulary(), model.vocabulary());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A model that was not loaded as trainable; what [`Checkpoint::save_parts`] refuses, as a checkpoint of other layers.
    /// The other ranks are told.
    pub fn save(&self, checkpoint: &Checkpoint, dir: impl AsRef<Path>, options: SaveOptions) -> Result<()> {
        self.compare()?;
        let call = SaveCall { checkpoint, dir: dir.as_ref(), options };
        #[cfg(feature = "cuda")]
        if let Some(group) = self.group().on::<moebius::cuda::Cuda>() {
            return call.over(group, self.parts());
        }
        match self.group().on::<Cpu>() {
            Some(group) => call.over(group, self.parts()),
            None => Err(Error::Usage { call: "Model::save", problem: "a group of no device".into() }),
        }
    }

    /// This rank's parameters.
    fn parts(&self) -> Result<Parts> {
        if !self.is_trainable() {
            let problem = "the model was not loaded as trainable, so that its folder has its parameters".into();
            return Err(Error::Usage { call: "Model::save", problem });
        }
        let experts = (0..self.num_layers()).filter_map(|layer| self.moe(layer));
        let blocks = experts.map(|moe| moe.to_parts()).collect::<candle_core::Result<Vec<_>>>()?;
        let tensors = self.vars().iter().map(|(name, var)| whole_tensor(name, var.as_tensor()));
        Ok((blocks, tensors.collect::<candle_core::Result<Vec<_>>>()?))
    }
}

type Parts = (Vec<RankBlock<'static>>, Vec<RankTensor<'static>>);

/// Where a save goes.
struct SaveCall<'a> {
    checkpoint: &'a Checkpoint,
    dir: &'a Path,
    options: SaveOptions,
}

impl SaveCall<'_> {
    fn over<D: CandleDevice>(self, group: &EpGroup<D>, parts: Result<Parts>) -> Result<()> {
        let mut group = group.lock();
        let device = group.device().clone();
        let ranks = group.dispatcher().communicator();
        // The others are in the save's first collective, or on their way to it.
        let tag = Tag { layer: 0, op: Op::Weights, sequence: 0 };
        let parts = parts.inspect_err(|error| drop(ranks.refuse(tag, &error.refusal_reason())));
        let (blocks, tensors) = parts?;
        let model = RankModel { blocks: &blocks, tensors: &tensors };
        Ok(self.checkpoint.save_parts(self.dir, model, &device, ranks, self.options)?)
    }
}
