//! A rank's membership in a group of ranks that share experts.

use std::fmt::Display;

use crate::comm::refusal::{self, refuse_on_error};
use crate::comm::{Communicator, Op, Tag};
use crate::compare::{ComparedField, compare_fields, gather_numbers};
use crate::config::MAX_EXPERTS;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::Kernels;

use super::config::NAMED;
use super::dispatcher_state::DispatcherState;
use super::{
    Capacity, DispatchShape, DispatcherKind, GroupConfig, LibraryDispatchers, Overlap, ReturnFormat, TokenDispatcher,
    measure, select,
};

const CALL: &str = "Group::new";
const INIT: Tag = Tag { layer: 0, op: Op::Init, sequence: 0 };

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
        let between_hosts = self.dispatcher == DispatcherKind::Hierarchical && self.ranks_per_host != 0;
        if between_hosts && !ranks.is_multiple_of(self.ranks_per_host) {
            let expected = format!("a divisor of the {ranks} ranks, or 0");
            return Err(Error::invalid(CALL, "ranks_per_host", expected, self.ranks_per_host));
        }
        self.overlap.check(CALL)?;
        self.return_format.check(CALL, self.dispatcher, self.in_k_order)?;
        self.dispatcher.check_in_k_order(CALL, self.in_k_order)?;
        if self.patience.is_some_and(|time| time.is_zero()) {
            return Err(Error::invalid(CALL, "patience", "some time, or none", "0 ns"));
        }
        if self.patience.is_some() && self.dispatcher != DispatcherKind::NvLinkLowLatency {
            let alone = DispatcherKind::NvLinkLowLatency;
            let expected = format!("none, or {alone} {NAMED}, which alone goes on without a rank");
            let found = format!("some time, with {}", self.dispatcher);
            return Err(Error::invalid(CALL, "patience", expected, found));
        }
        self.measure.as_ref().map_or(Ok(()), |shape| self.validate_shape(shape))
    }

    fn validate_shape(&self, shape: &DispatchShape) -> Result<()> {
        let counts = [
            ("measure.tokens", shape.tokens, self.max_tokens_per_rank, "max_tokens_per_rank"),
            ("measure.top_k", shape.top_k, self.num_experts, "num_experts"),
        ];
        for (name, found, most, limit) in counts {
            if !(1..=most).contains(&found) {
                return Err(Error::invalid(CALL, name, format!("1..={most} ({limit})"), found));
            }
        }
        if !shape.dtype.is_float() {
            return Err(Error::invalid(CALL, "measure.dtype", "a floating dtype", shape.dtype));
        }
        let most = isize::MAX as usize / shape.dtype.size() / shape.tokens;
        if !(1..=most).contains(&shape.hidden) {
            return Err(Error::invalid(CALL, "measure.hidden", format!("1..={most}"), shape.hidden));
        }
        match shape.capacity {
            Capacity::Static(rows) if !(1..=self.max_rows).contains(&rows) => {
                let expected = format!("1..={} (max_rows), or eager", self.max_rows);
                Err(Error::invalid(CALL, "measure.capacity", expected, rows))
            }
            _ => Ok(()),
        }
    }

    fn fields(&self) -> [ComparedField; 19] {
        let field = |name, value: usize| ComparedField::number(name, value as u64);
        let shape = self.measure;
        let of_shape = |name, value: fn(DispatchShape) -> usize| field(name, shape.map_or(0, value));
        let capacity = |shape: DispatchShape| match shape.capacity {
            Capacity::Eager => 0,
            Capacity::Static(rows) => rows.saturating_add(1),
        };
        [
            field("num_experts", self.num_experts),
            field("max_tokens_per_rank", self.max_tokens_per_rank),
            field("max_rows", self.max_rows),
            ComparedField { text: DispatcherKind::name_of, ..field("dispatcher", self.dispatcher as usize) },
            field("windows", self.windows),
            field("max_sms", self.max_sms),
            field("ranks_per_host", self.ranks_per_host),
            ComparedField { text: |set| (set != 0).to_string(), ..field("in_k_order", usize::from(self.in_k_order)) },
            ComparedField { text: ReturnFormat::name_of, ..field("return_format", self.return_format as usize) },
            ComparedField { text: Overlap::name_of, ..field("overlap", self.overlap.number()) },
            ComparedField {
                text: |time| if time == 0 { "none".into() } else { format!("{time} ns") },
                ..field(
                    "patience",
                    self.patience.map_or(0, |time| usize::try_from(time.as_nanos()).unwrap_or(usize::MAX)),
                )
            },
            ComparedField {
                text: |set| (set != 0).to_string(),
                ..field("forward_only", usize::from(self.forward_only))
            },
            ComparedField {
                text: |asked| if asked == 0 { "none" } else { "a shape" }.into(),
                ..of_shape("measure", |_| 1)
            },
            of_shape("measure.tokens", |shape| shape.tokens),
            of_shape("measure.hidden", |shape| shape.hidden),
            of_shape("measure.top_k", |shape| shape.top_k),
            ComparedField { text: dtype_of, ..of_shape("measure.dtype", |shape| shape.dtype as usize) },
            ComparedField {
                text: |rows| rows.checked_sub(1).map_or_else(|| "eager".into(), |rows| format!("static {rows}")),
                ..of_shape("measure.capacity", capacity)
            },
            ComparedField {
                text: |asked| (asked != 0).to_string(),
                ..of_shape("measure.backward", |shape| usize::from(shape.backward))
            },
        ]
    }
}

fn dtype_of(number: u64) -> String {
    let floats = [DType::F64, DType::F32, DType::F16, DType::BF16];
    floats.into_iter().find(|d| *d as u64 == number).map_or_else(|| number.to_string(), |d| d.to_string())
}

/// Finds the first field in which the ranks' configurations differ: one all-gather.
fn compare<D: Kernels>(device: &D, comm: &mut dyn Communicator<D>, config: &GroupConfig) -> Result<()> {
    let fields = config.fields();
    let all = gather_numbers(device, comm, INIT, &ComparedField::values(&fields))?;
    compare_fields(CALL, comm.rank(), &fields, &all)
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
    /// [`Error::ConfigMismatch`] on every rank, naming the field; E not divisible by R; a communicator's error. Where
    /// dispatchers are timed ([`GroupConfig::measure`]), what fails in that on one rank, which the others return as
    /// [`Error::Peer`].
    pub fn new(device: D, mut comm: Box<dyn Communicator<D>>, mut config: GroupConfig) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.size());
        let requested = config.dispatcher;
        let named = select::named(requested, std::env::var_os(select::DISPATCHER_VARIABLE).as_deref());
        config.dispatcher = refuse_on_error(&mut *comm, INIT, named)?;
        compare(&device, &mut *comm, &config)?;
        // All ranks hold the same values from here on, so they fail alike.
        let source = if config.dispatcher == requested { "dispatcher" } else { select::DISPATCHER_VARIABLE };
        config.validate(ranks, source)?;
        let core = DispatcherState::new(device.clone(), comm, config.clone());
        let (dispatcher, reason) = match &config.measure {
            Some(shape) if config.dispatcher == DispatcherKind::Auto && ranks > 1 => {
                measure::quickest(core, shape, source)?
            }
            _ => select::dispatcher(core, source)?,
        };
        tracing::info!(rank, ranks, dispatcher = dispatcher.name(), %requested, reason, "joined a group");
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

    /// How tokens travel, never [`DispatcherKind::Auto`]: what was named, or what that has taken. To have the same again,
    /// name it in [`GroupConfig::dispatcher`].
    pub fn dispatcher_kind(&self) -> DispatcherKind {
        self.dispatcher.kind()
    }

    /// Meets the other ranks, which are in this collective or on their way to it, as a failure, for this reason; not where
    /// rows are moved by calls in which they go on without this rank.
    pub(crate) fn refuse(&mut self, tag: Tag, reason: &dyn Display) {
        if self.config.patience.is_none() || !tag.op.moves_rows() {
            refusal::refuse(self.dispatcher.communicator(), tag, reason);
        }
    }

    /// The dispatcher.
    pub fn dispatcher(&mut self) -> &mut dyn TokenDispatcher<D> {
        &mut *self.dispatcher
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::comm::Solo;
    use crate::cpu::{Cpu, ThreadWorld};
    use crate::tensor::Tensor;

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
                for part in [name, reason, "rank=0", "ranks=1", &format!("requested={dispatcher}")] {
                    assert!(lines[0].contains(part), "{part} is not in {}", lines[0]);
                }
            });
        }
    }

    /// The lines that ranks as threads log as they form a group.
    fn logged_by_ranks(ranks: usize, config: &GroupConfig) -> Vec<Vec<String>> {
        let one = |comm| {
            let config = config.clone();
            std::thread::spawn(move || {
                let log = Log::default();
                tracing::subscriber::with_default(log.clone(), || {
                    Group::new(Cpu::new(), Box::new(comm), config).expect("a group");
                });
                log.0.lock().expect("no panic").clone()
            })
        };
        let ranks: Vec<_> = ThreadWorld::create(ranks, Duration::from_secs(60)).into_iter().map(one).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    }

    #[test]
    fn hosts_that_are_imitated_are_logged_by_one_rank() {
        // Threads have one host.
        for (ranks_per_host, lines_of_first) in [(1, 2), (2, 1), (0, 1)] {
            let config =
                GroupConfig { dispatcher: DispatcherKind::Hierarchical, ranks_per_host, ..GroupConfig::new(4, 8) };
            let lines = logged_by_ranks(2, &config);
            assert_eq!([lines[0].len(), lines[1].len()], [lines_of_first, 1], "{ranks_per_host}: {lines:?}");
            let warns = lines[0].iter().any(|line| line.contains("ranks_per_host=1") && line.contains("hosts=[0, 0]"));
            assert_eq!(warns, ranks_per_host == 1, "{lines:?}");
        }
    }

    #[test]
    fn times_of_all_candidates_are_the_reason_and_are_logged_once() {
        let shape = DispatchShape {
            tokens: 4,
            hidden: 8,
            top_k: 1,
            dtype: DType::F32,
            capacity: Capacity::Eager,
            backward: true,
        };
        let config = GroupConfig { measure: Some(shape), ..GroupConfig::new(4, 8) };
        for lines in logged_by_ranks(2, &config) {
            assert_eq!(lines.len(), 1, "{lines:?}");
            for part in ["timed, ms: all_to_all ", ", all_gather ", "nccl_ep cannot be had", "requested=auto"] {
                assert!(lines[0].contains(part), "{part} is not in {}", lines[0]);
            }
        }
        // What adds otherwise is not timed.
        for lines in logged_by_ranks(2, &GroupConfig { in_k_order: true, ..config }) {
            assert!(lines[0].contains("timed, ms: all_to_all ") && !lines[0].contains("all_gather"), "{lines:?}");
        }
    }
}
