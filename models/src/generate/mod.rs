//! Text generation: from a folder's tokenizer and chat template over a decoder's steps to text as it comes.
//!
//! - [`Tokenizer`]: texts as ids and back; [`TextStream`] gives the text of ids that come one at a time.
//! - [`ChatTemplate`]: conversations as the text that a model was trained to continue.
//! - [`Channels`]: which messages of an answer are shown, of models that reason in a channel of its own.
//! - [`Sampling`]: how a token is chosen; [`Sampler`] does it for one sequence.
//! - [`Decoder`]: what is asked of a model, a step at a time; [`OverRanks`] where ranks share its experts,
//!   [`ModelCache`] what a model remembers, in memory that stays where it can.
//! - [`CountChoices`]: a model that counts which experts are chosen.
//! - [`Generator`]: the loop over a batch of [`Request`]s.

mod chat;
mod choices;
mod decoder;
mod error;
mod folder;
mod generator;
mod harmony;
mod model_decoder;
mod python;
mod python_budget;
mod python_filters;
mod request;
mod sampling;
mod stop;
mod stream;
mod template_files;
mod template_operands;
mod tokenizer;

pub use chat::{Chat, ChatTemplate};
pub use choices::CountChoices;
pub use decoder::{CacheKind, CacheRequest, Decoder, OverRanks, StepPlan};
pub use error::Error;
pub use generator::{Generator, PREFILL_TOKENS};
pub use harmony::Channels;
pub use model_decoder::ModelCache;
pub use request::{EndOf, Event, Finish, Output, Request, Stats};
pub use sampling::{Sampler, Sampling};
pub use stream::{TextEnd, TextStream};
pub use tokenizer::{Tokenizer, eos_ids};
