//! A rank's membership in a group of ranks that share experts.

use crate::comm::refusal::refuse_on_error;
use crate::comm::{Communicator, Op, Tag};
use crate::config::MAX_EXPERTS;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;
use crate::tensor::Tensor;

use super::dispatcher_state::DispatcherState;
use super::{DispatcherKind, GroupConfig, LibraryDispatchers, TokenDispatcher, select};

const CALL: &str = "Group::new";

impl GroupConfig {
    /// `source`: what has chosen the dispatcher, the field or the variable.
    fn validate(&self, ranks: usize, source: &'static str) -> Result<()> {
        let experts = self.num_experts;
        if !(1..=MAX_EXPERTS).contains(&experts) {
            return Err(Error::invalid(CALL, "num_experts", format!("1..={MAX_EXPERTS}"), experts));
        }
        if !experts.is_multiple_of(ranks) {
            return Err(Error::invalid(CALL, "num_experts", format!("a multiple of the {ranks} ranks"), experts));
        }
        let most = i32::MAX as usize / ranks;
        if !(1..=most).contains(&self.max_tokens_per_rank) {
            return Err(Error::invalid(CALL, "max_tokens_per_rank", format!("1..={most}"), self.max_tokens_per_rank));
        }
        if self.max_rows > i32::MAX as usize {
            return Err(Error::invalid(CALL, "max_rows", format!("at most {}", i32::MAX), self.max_rows));
        }
        if self.dispatcher == DispatcherKind::Local && ranks != 1 {
            let expected = format!("a dispatcher between the {ranks} ranks");
            return Err(Error::invalid(CALL, source, expected, "local, which is for one rank"));
        }
        Ok(())
    }

    /// Name, number for comparison, and text of every field.
    fn fields(&self) -> [(&'static str, u64, String); 5] {
        let number = |name, v: usize| (name, v as u64, v.to_string());
        [
            number("num_experts", self.num_experts),
            number("max_tokens_per_rank", self.max_tokens_per_rank),
            number("max_rows", self.max_rows),
            ("dispatcher", self.dispatcher as u64, format!("{:?}", self.dispatcher)),
            number("windows", self.windows),
        ]
    }
}

/// Finds the first field in which the ranks' configurations differ: one all-gather.
fn compare<D: Kernels>(device: &D, comm: &mut dyn Communicator<D>, config: &GroupConfig) -> Result<()> {
    let fields = config.fields();
    let bytes: Vec<u8> = fields.iter().flat_map(|(_, number, _)| number.to_ne_bytes()).collect();
    let tag = Tag { layer: 0, op: Op::Init, sequence: 0 };
    let buffers = Tensor::empty(device, DType::U8, &[bytes.len()]).and_then(|mut send| {
        device.upload(&bytes, send.view_mut())?;
        Ok((send, Tensor::empty(device, DType::U8, &[comm.size(), bytes.len()])?))
    });
    let (send, mut recv) = refuse_on_error(comm, tag, buffers)?;
    comm.all_gather(tag, send.view(), recv.view_mut())?;
    let all: Vec<u64> = device.download(recv.view())?.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect();
    for (i, (field, number, value)) in fields.iter().enumerate() {
        let theirs = all.iter().skip(i).step_by(fields.len());
        if let Some((peer, other)) = theirs.enumerate().find(|(_, other)| *other != number) {
            let peer_value = match *field {
                "dispatcher" => DispatcherKind::name_of(*other),
                _ => other.to_string(),
            };
            let (field, value) = ((*field).to_string(), value.clone());
            return Err(Error::ConfigMismatch { call: CALL, field, rank: comm.rank(), value, peer, peer_value });
        }
    }
    Ok(())
}

/// A rank's membership in a group. Serves any number of layers, one call at a time; owns the dispatcher and through
/// it the communicator.
#[derive(Debug)]
pub struct Group<D: Kernels> {
    config: GroupConfig,
    device: D,
    rank: usize,
    ranks: usize,
    dispatcher: Box<dyn TokenDispatcher<D>>,
}

impl<D: LibraryDispatchers> Group<D> {
    /// Joins the group (collective): compares configurations over the ranks first.
    ///
    /// # Errors
    /// [`Error::ConfigMismatch`] on every rank, naming the field; E not divisible by R; a communicator's error.
    pub fn new(device: D, mut comm: Box<dyn Communicator<D>>, mut config: GroupConfig) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.size());
        let requested = config.dispatcher;
        // A bad value of the variable fails below, when the other ranks have met this one.
        let named = select::named(requested, std::env::var_os(select::DISPATCHER_VARIABLE).as_deref());
        config.dispatcher = *named.as_ref().unwrap_or(&requested);
        let compared = compare(&device, &mut *comm, &config);
        named?;
        compared?;
        // All ranks hold the same values from here on, so they fail alike.
        let source = if config.dispatcher == requested { "dispatcher" } else { select::DISPATCHER_VARIABLE };
        config.validate(ranks, source)?;
        let core = DispatcherState::new(device.clone(), comm, config.clone());
        let (dispatcher, reason) = select::dispatcher(core, source)?;
        tracing::info!(rank, ranks, dispatcher = dispatcher.name(), ?requested, reason, "joined a group");
        Ok(Self { config, device, rank, ranks, dispatcher })
    }
}

impl<D: Kernels> Group<D> {
    /// The configuration that was agreed on.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks R.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts of this rank, L = E / R.
    pub fn local_experts(&self) -> usize {
        self.config.num_experts / self.ranks
    }

    /// The dispatcher.
    pub fn dispatcher(&mut self) -> &mut dyn TokenDispatcher<D> {
        &mut *self.dispatcher
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::comm::Solo;
    use crate::cpu::Cpu;

    /// Keeps what is logged.
    #[derive(Default, Clone)]
    struct Log(Arc<Mutex<Vec<String>>>);

    struct Line(String);

    impl Visit for Line {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            self.0.push_str(&format!("{}={value:?};", field.name()));
        }
    }

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            let mut line = Line(String::new());
            event.record(&mut line);
            self.0.lock().expect("no panic").push(line.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// The variable may have been set far from the program that reads it.
    #[test]
    fn a_dispatcher_that_cannot_be_is_blamed_on_what_named_it() {
        let config = GroupConfig { dispatcher: DispatcherKind::Local, ..GroupConfig::new(4, 8) };
        for source in ["dispatcher", select::DISPATCHER_VARIABLE] {
            let error = config.validate(2, source).expect_err("two ranks").to_string();
            assert!(error.contains(source) && error.contains("2 ranks") && error.contains("local"), "{error}");
        }
        assert!(config.validate(1, "dispatcher").is_ok());
    }

    #[test]
    fn a_dispatcher_and_the_reason_for_it_are_logged_once_a_group() {
        for (dispatcher, reason) in [(DispatcherKind::Auto, "one rank"), (DispatcherKind::AllGather, "asked for")] {
            let log = Log::default();
            tracing::subscriber::with_default(log.clone(), || {
                let config = GroupConfig { dispatcher, ..GroupConfig::new(4, 8) };
                let mut group = Group::new(Cpu::new(), Box::new(Solo::new(Cpu::new())), config).expect("a group");
                let ids = Tensor::from_vec(vec![0i32, 1], &[1, 2]).expect("ids");
                let spec = crate::ep::DispatchSpec::new(0, 2);
                (0..2).for_each(|_| drop(group.dispatcher().prepare(ids.view(), None, &spec).expect("prepare")));
                let lines = log.0.lock().expect("no panic").clone();
                assert_eq!(lines.len(), 1, "{lines:?}");
                let name = group.dispatcher().name();
                for part in [name, reason, "rank=0", "ranks=1", &format!("requested={dispatcher:?}")] {
                    assert!(lines[0].contains(part), "{part} is not in {}", lines[0]);
                }
            });
        }
    }
}
