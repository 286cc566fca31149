//! The configuration of a group, which its ranks compare as they form it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::MoeConfig;
use crate::dtype::DType;
use crate::error::Error;
use crate::plan::Capacity;

/// A group's configuration, the same on all of its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupConfig {
    /// Experts E over all ranks; a multiple of the number of ranks.
    pub num_experts: usize,
    /// Most tokens that one rank may bring to a call, where tokens travel; more are refused. It does not bound
    /// a group of one rank whose dispatcher is [`DispatcherKind::Auto`] or [`DispatcherKind::Local`]: its tokens stay
    /// where they are, and any number of them is taken ([`DispatchSpec::max_tokens`](super::DispatchSpec::max_tokens) bounds
    /// its calls, too). Reserve no more than needed: prepare ships this many rows of K
    /// ids whatever a step has, 4 bytes an id (12 where an expert capacity keeps by probability), to every rank.
    pub max_tokens_per_rank: usize,
    /// Largest static capacity in rows; 0: eager calls only.
    pub max_rows: usize,
    /// How tokens travel.
    pub dispatcher: DispatcherKind,
    /// NCCL EP, high throughput, static capacities: windows that rows arrive in, which peers write directly; one for each
    /// dispatch whose rows are kept, forward and backward, and one more (at least 2). Each has room for a capacity's rows.
    /// 0: none; the library stages rows. [`DispatcherKind::Auto`] decides without them.
    ///
    /// NVLink: zones that rows arrive in and stay (0: 2); a dispatch that finds none free copies its rows.
    pub windows: usize,
    /// NCCL EP: SMs that its kernels take at most; 0: as the library chooses. More than the GPU has, or for low latency
    /// fewer than one for 14 experts, are [`NcclEpError::Argument`](crate::NcclEpError::Argument) where NCCL EP is named,
    /// and keep [`DispatcherKind::Auto`] from taking it. NVLink: blocks of its kernels at most; 0: one an SM, of
    /// prepare 64, of low latency three an SM where the device reserves none (`Cuda::reserving_sms`).
    pub max_sms: usize,
    /// [`DispatcherKind::Hierarchical`]: ranks of each host, which divide the ranks and lie behind each other (ranks 0 to
    /// L − 1 on the first host, …); 0: as the ranks find by asking each other for their hosts. Any divisor imitates hosts;
    /// rank 0 warns where the ranks' own are others. Other dispatchers do not read it.
    pub ranks_per_host: usize,
    /// A token's rank adds its slots' rows in the order of k: results have the bits of [`AllToAll`](super::AllToAll), whatever
    /// the number of ranks. All-to-all and local do so anyway; with NVLink every slot's row then returns by itself, at the
    /// price of more bytes, where otherwise each rank adds its own slots' first. Every other dispatcher that is named refuses
    /// it, and [`DispatcherKind::Auto`] takes none of those.
    pub in_k_order: bool,
    /// NVLink: the type in which a forward's sums return to their tokens' ranks. What is not the default is refused of every
    /// other dispatcher, of [`DispatcherKind::Auto`] too, which may take one of them, and with
    /// [`in_k_order`](Self::in_k_order), where no sums travel.
    pub return_format: ReturnFormat,
    /// NVLink: whether products of a layer run while its rows travel. Results are the same to the bit.
    pub overlap: Overlap,
    /// NVLink with low latency: how long a step waits for a rank before it goes on without it, and without its experts' share.
    /// [`TokenDispatcher::check`](super::TokenDispatcher::check) tells of that once, and the rank is taken in again when it
    /// comes to a later step of the layer. One that is gone for good, its process dead or its group dropped, is gone on without
    /// too; what needs all ranks is then [`CommError::PeerGone`](crate::CommError::PeerGone), and a layer that needs them in
    /// each step is refused: by capacities that drop choices, [`AuxConfig::over_ranks`](crate::config::AuxConfig::over_ranks)
    /// or noise. So are more tokens than those whose choices, 4 bytes each, fit a record of 14,336 bytes with its head: 432 of
    /// eight choices. `None`: ranks meet in every call, and one that does not come is an error on all, as it is with every
    /// other dispatcher, which refuse a time here.
    pub patience: Option<Duration>,
    /// No step has a backward, as where a model generates: [`DispatcherKind::Auto`] may then take low latency, which has none.
    /// A step that asks for one all the same is refused, whatever the dispatcher.
    pub forward_only: bool,
    /// [`DispatcherKind::Auto`] times each dispatcher that every rank can have, but low latency and hierarchical, in steps of
    /// this shape, once, as the group is formed, and takes the quickest, the same on all ranks; `None`: it decides from
    /// its table. A dispatcher that is
    /// named, here or by `MOEBIUS_EP`, is not timed, nor is that of a rank alone. Times differ from run to run, and with
    /// the dispatcher the order of sums: a run that is to go on with the same bits stores
    /// [`Group::dispatcher_kind`](super::Group::dispatcher_kind) and names it from then on.
    pub measure: Option<DispatchShape>,
}

/// Where a dispatcher is named, as messages have it.
pub(super) const NAMED: &str = "named by GroupConfig::dispatcher or MOEBIUS_EP";

/// The type of the sums that return in [`combine`](super::TokenDispatcher::combine): a rank adds its slots of a token in
/// f32, in the order of k, and sends one row of H elements to the token's rank, which adds the ranks' rows in f32, in their
/// order, and rounds to the tokens' type. Gradients that return
/// ([`dispatch_bwd`](super::TokenDispatcher::dispatch_bwd)) are of the tokens' type in any case, and are those of sums that
/// are not quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReturnFormat {
    /// Sums are rounded to the tokens' type: 2 H bytes a row of 16-bit tokens.
    #[default]
    Tokens,
    /// Sums are quantized to MXFP8 in place of being rounded, also those of the tokens' own rank: E4M3 with an E8M0 scale
    /// for each 32 columns, as [`Mxfp8::TE`](crate::quant::Mxfp8::TE) has it of the sums in f32. H bytes a row, and H / 32
    /// rounded up to 16 beside them: 0.516 of the bytes of 16-bit tokens where H is a multiple of 512.
    ///
    /// A rank's finite sum v is off by at most |v| / 16, or by a / 229,376 where that is more, a being the largest
    /// magnitude of its 32 columns, if that is at least 10⁻³⁵ (in the tokens' type by |v| / 256 in bf16, |v| / 2048 in
    /// f16). Where |v| is 248 · 2¹²⁰ (3.296 · 10³⁸) or more, next to the largest that f32 has, it returns as an infinity. A NaN
    /// stays one, and leaves its block's other columns alone; an infinity stays one, and what is below 10³⁵ in its block is 0.
    ///
    /// `combine` refuses rows of an H that is no multiple of 32.
    Mxfp8,
}

impl ReturnFormat {
    const ALL: [Self; 2] = [Self::Tokens, Self::Mxfp8];

    const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Mxfp8 => "mxfp8",
        }
    }

    /// As ranks compare it.
    pub(super) fn name_of(number: u64) -> String {
        Self::ALL.iter().find(|f| **f as u64 == number).map_or_else(|| number.to_string(), |f| f.name().to_string())
    }

    /// Refuses groups whose sums do not return so.
    pub(super) fn check(self, call: &'static str, dispatcher: DispatcherKind, in_k_order: bool) -> Result<(), Error> {
        if self == Self::Tokens {
            return Ok(());
        }
        if dispatcher != DispatcherKind::NvLink {
            let expected = format!("tokens, or {} {NAMED}, which alone has another", DispatcherKind::NvLink);
            let found = format!("{}, with {dispatcher}", self.name());
            return Err(Error::invalid(call, "return_format", expected, found));
        }
        if in_k_order {
            let found = format!("{}, with in_k_order", self.name());
            return Err(Error::invalid(call, "return_format", "tokens: in the order of k no sums travel", found));
        }
        Ok(())
    }
}

/// Whether products of a layer run while its rows travel, and how many SMs the movements then take: up and down's gradient
/// start while the rows come that they read, and weight gradients run under the way back of the rows' gradient.
///
/// It is for gated activations, weights that are not at the experts' input, tokens and experts' weights of 16 bits as they
/// are multiplied, fewer than 8192 columns of gate and up, more rows than decoding has, and no shards of weights; and for
/// groups whose [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank), divided by the SMs that rows travel on to their
/// experts, rounded up, and times the ranks, is at most 32,768, as each of these SMs lists the rows of its tokens: with 8
/// ranks 65,536 tokens on 16 SMs, 8192 on 2. Elsewhere one follows the other, also where [`Overlap::Sms`] asks for SMs.
///
/// A shared expert of 1024 columns or more (gated, of 16 bits, sizes in eights) has its first product beside dispatch in place of the
/// experts', in messages of any width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overlap {
    /// As measured: on 16 SMs (fewer where [`GroupConfig::max_sms`] or what a rank's device reserves leaves no 16), for
    /// messages of 1024 rows and more of at most 8192 bytes each.
    #[default]
    Auto,
    /// One after the other.
    Off,
    /// Rows travel to their experts on so many SMs, and back on up to twice as many: an even number from 2 to 16, at most
    /// [`GroupConfig::max_sms`] where that is set, and two fewer than any rank's device may fill
    /// (`Cuda::reserving_sms`), so that a product has SMs beside them. None at all would
    /// be a product that waits for rows which nothing brings. What does not fit is [`Error::Invalid`].
    Sms(usize),
}

impl Overlap {
    /// SMs of the movements where kernels may take `max_sms` (0: any number) and fill `usable` on every rank. A product
    /// takes a pair at least.
    #[cfg(any(test, feature = "nccl"))]
    pub(crate) fn movement_sms(self, call: &'static str, max_sms: usize, usable: usize) -> Result<MovementSms, Error> {
        let most = usable.saturating_sub(Self::PAIR);
        let most = if max_sms == 0 { most } else { most.min(max_sms) } / Self::PAIR * Self::PAIR;
        let dispatch = match self {
            Self::Auto => Self::MOST_SMS.min(most),
            Self::Off => 0,
            Self::Sms(sms) if sms <= most => sms,
            Self::Sms(sms) => {
                let expected = format!("at most {most} SMs, where kernels may fill {usable} and max_sms is {max_sms}");
                return Err(Error::invalid(call, "overlap", expected, sms));
            }
        };
        Ok(MovementSms { dispatch, back: (2 * dispatch).min(most) })
    }

    /// As ranks compare it.
    pub(super) fn number(self) -> usize {
        match self {
            Self::Auto => 0,
            Self::Off => 1,
            Self::Sms(sms) => sms.saturating_add(2),
        }
    }

    pub(super) fn name_of(number: u64) -> String {
        match number {
            0 => "auto".into(),
            1 => "off".into(),
            sms => format!("{} SMs", sms - 2),
        }
    }

    const MOST_SMS: usize = 16;
    /// Blocks of products work in pairs.
    const PAIR: usize = 2;

    /// Refuses what can bring no rows.
    pub(super) fn check(self, call: &'static str) -> Result<(), Error> {
        match self {
            Self::Sms(sms) if sms == 0 || sms > Self::MOST_SMS || !sms.is_multiple_of(Self::PAIR) => {
                let expected = format!("an even number of SMs from 2 to {}", Self::MOST_SMS);
                Err(Error::invalid(call, "overlap", expected, sms))
            }
            _ => Ok(()),
        }
    }
}

/// SMs of movements that products run beside, the same on all ranks.
#[cfg(any(test, feature = "nccl"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MovementSms {
    /// Of rows to their experts; 0: nothing runs beside them.
    pub dispatch: usize,
    /// Of rows' gradients on their way back.
    pub back: usize,
}

/// The step that dispatchers are timed in: every rank brings as many tokens, whose choices are random and even.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchShape {
    /// Tokens T of each rank, at most the group's `max_tokens_per_rank`.
    pub tokens: usize,
    /// Elements H of a token.
    pub hidden: usize,
    /// Choices K of a token.
    pub top_k: usize,
    /// Type of the tokens, a floating one.
    pub dtype: DType,
    /// Rows that a rank has room for, as the layers ask for them; a static capacity has to hold random choices.
    pub capacity: Capacity,
    /// Whether the way back of the gradients counts too.
    pub backward: bool,
}

impl DispatchShape {
    /// Steps of a layer of this many tokens a rank, forward and backward, with an eager capacity.
    pub fn of(layer: &MoeConfig, tokens: usize, dtype: DType) -> Self {
        let (hidden, top_k) = (layer.hidden, layer.router.top_k);
        Self { tokens, hidden, top_k, dtype, capacity: Capacity::Eager, backward: true }
    }
}

/// How tokens travel between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DispatcherKind {
    /// The dispatcher that `MOEBIUS_EP` names ([`DISPATCHER_VARIABLE`](super::DISPATCHER_VARIABLE)); where that is not
    /// set, local for one rank, the quickest where [`GroupConfig::measure`] asks for it, else all-to-all between CPU
    /// ranks, and between GPUs what a table of measured times names for the number of ranks and of tokens. Two ranks that
    /// reach each other's memory: NVLink, and with low latency for few tokens or few static rows
    /// ([`max_rows`](GroupConfig::max_rows)), as decoding has them, where all is [`forward_only`](GroupConfig::forward_only).
    /// Three to a host's eight: all-gather for few tokens and few static rows, else NCCL EP where it is built in and its
    /// checks pass on every rank. What is left: all-gather within a host, and all-to-all.
    #[default]
    Auto,
    /// One rank: tokens stay where they are.
    Local,
    /// Each (token, destination rank) travels once.
    AllToAll,
    /// Between hosts: each (token, destination host) crosses once, and is passed on to the host's ranks; a host's outputs are
    /// added there, and one row for each (token, host) returns. Over any communicator; both hops are its all-to-alls. Never
    /// taken by `Auto`.
    Hierarchical,
    /// Every rank gets all tokens, and sums are reduce-scattered.
    AllGather,
    /// NVIDIA's NCCL EP, high throughput (feature `nccl-ep`): each (token, destination rank) travels once, and rows
    /// arrive in the order of experts.
    NcclEp,
    /// NVIDIA's NCCL EP, low latency (feature `nccl-ep`), for decoding: few tokens a rank, forward only. Never taken by
    /// `Auto`.
    NcclEpLowLatency,
    /// Each (token, destination rank) once, stored by this crate's kernels into the memory of the host's other GPUs
    /// (feature `nccl`, compute capability 9.0, NCCL 2.29, up to 8 ranks): sums are made where the experts are and added
    /// per rank, as [`AllGather`](super::AllGather) adds them.
    NvLink,
    /// The same for decoding, with low latency: few tokens a rank, forward only, sums per rank, at most 8 ranks and 24 choices
    /// of a token, not [`in_k_order`](GroupConfig::in_k_order). Each 16 bytes of a row carry the number of their call, by
    /// which the receiver knows that they have come. Every rank has memory for
    /// [`max_tokens_per_rank`](GroupConfig::max_tokens_per_rank) T of R ranks: 2 · R · T rows and a third more. `Auto`
    /// takes it where all is [`forward_only`](GroupConfig::forward_only).
    NvLinkLowLatency,
}

impl DispatcherKind {
    const ALL: [Self; 9] = [
        Self::Auto,
        Self::Local,
        Self::AllToAll,
        Self::Hierarchical,
        Self::AllGather,
        Self::NcclEp,
        Self::NcclEpLowLatency,
        Self::NvLink,
        Self::NvLinkLowLatency,
    ];

    /// Lower-case name (`"all_to_all"`), which [`str::parse`] reads again.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::AllToAll => "all_to_all",
            Self::Hierarchical => "hierarchical",
            Self::AllGather => "all_gather",
            Self::NcclEp => "nccl_ep",
            Self::NcclEpLowLatency => "nccl_ep_ll",
            Self::NvLink => "nvlink",
            Self::NvLinkLowLatency => "nvlink_ll",
        }
    }

    pub(super) fn name_of(number: u64) -> String {
        Self::ALL.iter().find(|k| **k as u64 == number).map_or_else(|| number.to_string(), |k| k.name().to_string())
    }

    /// Whether a token's slots are added in the order of k where that is asked for
    /// ([`in_k_order`](GroupConfig::in_k_order)), or a dispatcher is chosen that does so.
    pub(super) const fn may_sum_in_k_order(self) -> bool {
        matches!(self, Self::Auto | Self::Local | Self::AllToAll | Self::NvLink)
    }

    /// Refuses to be named where sums are to be in the order of k, and this one's are not.
    pub(super) fn check_in_k_order(self, call: &'static str, in_k_order: bool) -> Result<(), Error> {
        if !in_k_order || self.may_sum_in_k_order() {
            return Ok(());
        }
        // Of several ranks, for which one is to be named.
        let others = [Self::AllToAll, Self::NvLink].map(Self::name);
        let expected = format!("false, or one of {} {NAMED}", others.join(", "));
        Err(Error::invalid(call, "in_k_order", expected, format!("true, with {self}")))
    }
}

impl fmt::Display for DispatcherKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Of a [`name`](DispatcherKind::name); `-` counts as `_`.
impl FromStr for DispatcherKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.replace('-', "_");
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let counts = Self::ALL.map(Self::name).join(", ");
            Error::invalid("DispatcherKind::from_str", "dispatcher", format!("one of {counts}"), text)
        })
    }
}

impl GroupConfig {
    /// Eager calls of up to [`max_tokens_per_rank`](Self::max_tokens_per_rank) tokens over `num_experts` experts; a rank
    /// alone takes any number of tokens.
    pub fn new(num_experts: usize, max_tokens_per_rank: usize) -> Self {
        let dispatcher = DispatcherKind::Auto;
        Self {
            num_experts,
            max_tokens_per_rank,
            max_rows: 0,
            dispatcher,
            windows: 0,
            max_sms: 0,
            ranks_per_host: 0,
            in_k_order: false,
            return_format: ReturnFormat::default(),
            overlap: Overlap::default(),
            patience: None,
            forward_only: false,
            measure: None,
        }
    }

    /// The group of a layer: its experts, and up to [`max_tokens_per_rank`](Self::max_tokens_per_rank) tokens a call.
    pub fn of(layer: &MoeConfig, max_tokens_per_rank: usize) -> Self {
        Self::new(layer.router.num_experts, max_tokens_per_rank)
    }

    /// A group of one rank, whose tokens stay where they are and may be any number.
    pub fn one_rank(num_experts: usize) -> Self {
        Self { dispatcher: DispatcherKind::Local, ..Self::new(num_experts, i32::MAX as usize) }
    }
}

/// [`GroupConfig::one_rank`] with the layer's experts.
impl From<&MoeConfig> for GroupConfig {
    fn from(layer: &MoeConfig) -> Self {
        Self::one_rank(layer.router.num_experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kinds_name_is_read_again() {
        for kind in DispatcherKind::ALL {
            assert_eq!(kind.name().parse::<DispatcherKind>().ok(), Some(kind));
            assert_eq!(kind.to_string().replace('_', "-").parse::<DispatcherKind>().ok(), Some(kind));
            assert_eq!(DispatcherKind::name_of(kind as u64), kind.name());
        }
        let error = "ncclep".parse::<DispatcherKind>().expect_err("no kind").to_string();
        assert!(error.contains("ncclep") && error.contains("nccl_ep_ll"), "{error}");
    }

    #[test]
    fn quantized_sums_return_over_nvlink_alone() {
        for kind in DispatcherKind::ALL {
            assert!(ReturnFormat::Tokens.check("a test", kind, true).is_ok());
            let checked = ReturnFormat::Mxfp8.check("a test", kind, false).map_err(|e| e.to_string());
            match checked {
                Ok(()) => assert_eq!(kind, DispatcherKind::NvLink),
                Err(error) => {
                    let parts = ["a test", "return_format", "mxfp8", kind.name()];
                    assert!(kind != DispatcherKind::NvLink && parts.iter().all(|part| error.contains(part)), "{error}");
                }
            }
        }
        let error = ReturnFormat::Mxfp8.check("a test", DispatcherKind::NvLink, true).expect_err("no sums travel");
        assert!(error.to_string().contains("in_k_order"), "{error}");
        for format in ReturnFormat::ALL {
            assert_eq!(ReturnFormat::name_of(format as u64), format.name());
        }
    }

    #[test]
    fn sums_in_the_order_of_k_are_refused_of_dispatchers_that_add_otherwise() {
        use DispatcherKind::{AllToAll, Auto, Local, NvLink};
        for kind in DispatcherKind::ALL {
            assert!(kind.check_in_k_order("a test", false).is_ok());
            match kind.check_in_k_order("a test", true).map_err(|e| e.to_string()) {
                Ok(()) => assert!([Auto, Local, AllToAll, NvLink].contains(&kind), "{kind}"),
                Err(error) => {
                    let parts = ["a test", "in_k_order", "all_to_all, nvlink", "MOEBIUS_EP", kind.name()];
                    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
                }
            }
        }
        assert!(!DispatcherKind::AllGather.may_sum_in_k_order());
    }

    #[test]
    fn movements_leave_a_pair_of_sms_and_keep_to_what_the_group_allows() {
        let sms = |overlap: Overlap, max_sms, usable| {
            overlap.movement_sms("a test", max_sms, usable).ok().map(|sms| [sms.dispatch, sms.back])
        };
        assert_eq!(sms(Overlap::Auto, 0, 132), Some([16, 32]));
        assert_eq!(sms(Overlap::Auto, 21, 132), Some([16, 20]));
        assert_eq!(sms(Overlap::Auto, 7, 132), Some([6, 6]));
        assert_eq!(sms(Overlap::Auto, 0, 9), Some([6, 6]));
        assert_eq!(sms(Overlap::Auto, 1, 132), Some([0, 0]), "nothing that could be shared");
        assert_eq!(sms(Overlap::Auto, 0, 2), Some([0, 0]));
        assert_eq!(sms(Overlap::Off, 0, 132), Some([0, 0]));
        assert_eq!(sms(Overlap::Sms(8), 0, 132), Some([8, 16]));
        assert_eq!(sms(Overlap::Sms(8), 8, 10), Some([8, 8]));
        assert_eq!(sms(Overlap::Sms(8), 7, 132), None);
        assert_eq!(sms(Overlap::Sms(8), 0, 9), None);
        assert_eq!(sms(Overlap::Sms(2), 0, 0), None);
    }
}
