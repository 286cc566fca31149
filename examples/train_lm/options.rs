//! What ranks that are processes have been told: each by a command line of its own, the same on all.

use std::error::Error;
use std::fmt;

use clap::ValueEnum;
use moebius::comm::{Op, Tag};

use crate::lm::Settings;
use crate::{Failure, Framework, state};

/// An option in which two ranks differ.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherOption {
    pub option: String,
    pub ranks: [usize; 2],
    pub values: [String; 2],
}

impl fmt::Display for OtherOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { option, ranks: [first, other], values: [expected, found] } = self;
        write!(
            f,
            "{option}: expected one value on all ranks, found {expected} on rank {first} and {found} on rank {other}"
        )
    }
}

impl Error for OtherOption {}

/// Compares the options before ranks do anything else together; where they differ each rank gets the same error. `gather`
/// has every rank's bytes, in rank order.
///
/// # Errors
/// [`OtherOption`]; those of `gather`.
pub fn compare(
    settings: &Settings,
    (framework, check_every): (Framework, usize),
    gather: impl FnOnce(Tag, &[u8]) -> Result<Vec<Vec<u8>>, Failure>,
) -> Result<(), Failure> {
    let lines = |(option, value)| format!("{option}\t{value}\n");
    let own: String = options(settings, framework, check_every).into_iter().map(lines).collect();
    let all = gather(Tag { layer: 0, op: Op::Init, sequence: 0 }, own.as_bytes())?;
    let all: Vec<_> = all.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
    let all: Vec<Vec<_>> =
        all.iter().map(|text| text.lines().filter_map(|line| line.split_once('\t')).collect()).collect();
    let Some(first) = all.first() else { return Ok(()) };
    for (rank, other) in all.iter().enumerate() {
        // Another build may have other options.
        let names = first.iter().chain(other).map(|(option, _)| *option);
        let mut both = names.map(|option| (option, [first, other].map(|options| value(options, option))));
        if let Some((option, values)) = both.find(|(_, [expected, found])| expected != found) {
            let (ranks, values) = ([0, rank], values.map(str::to_string));
            return Err(OtherOption { option: option.to_string(), ranks, values }.into());
        }
    }
    Ok(())
}

/// An option's value among a rank's.
fn value<'a>(options: &[(&str, &'a str)], option: &str) -> &'a str {
    options.iter().find(|(name, _)| *name == option).map_or("no such option", |(_, value)| value)
}

/// Options that decide what ranks do together. Folders may differ.
fn options(settings: &Settings, framework: Framework, check_every: usize) -> Vec<(&'static str, String)> {
    let Settings { mesh, range, resume, save, dispatcher, measure_dispatcher, .. } = settings;
    let given = |is: bool| if is { "given" } else { "not given" }.to_string();
    let mut all = state::run(settings).to_vec();
    all.extend([
        ("--framework", framework.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())),
        ("--ep", mesh.ep.to_string()),
        ("--etp", mesh.etp.map_or_else(|| "none".to_string(), |etp| etp.to_string())),
        ("--copy-engines", given(mesh.engines)),
        ("first and last step", format!("{range:?}")),
        ("--check-every", check_every.to_string()),
        ("--resume", given(resume.is_some())),
        ("--save", given(save.is_some())),
        ("--dispatcher", dispatcher.map_or("none", |kind| kind.name()).to_string()),
        ("--measure-dispatcher", given(*measure_dispatcher)),
    ]);
    all
}
