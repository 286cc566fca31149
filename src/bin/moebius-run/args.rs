//! The command line.

use std::ffi::OsString;
use std::time::Duration;

pub const HELP: &str = "\
moebius-run -n RANKS [OPTIONS] [--] PROGRAM [ARGS...]

Starts RANKS processes of PROGRAM on this host, with MOEBIUS_RANK, MOEBIUS_WORLD, MOEBIUS_LOCAL_RANK, MOEBIUS_ADDRESS
and MOEBIUS_TOKEN in their environment and nothing on their standard input. Their output comes line by line, each with
its rank before it. Signals (HUP, INT, QUIT, TERM, USR1, USR2) are passed to the ranks' process group and to ranks that
have left it. When a rank fails, the others get TERM; its status (128 + signal) is this program's. What still runs a
grace period after that, or after a HUP, INT, QUIT or TERM, gets KILL. A rank that ends with status 0 ends no other. When
nobody reads this program's output any more, the ranks get TERM too, and its status is 141 (SIGPIPE). What is left in the
group when all ranks have ended, or when this program is killed, is killed.

  -n RANKS              ranks to start here
  --grace SECONDS       between TERM and KILL (5): when a rank has failed, and after HUP, INT, QUIT, TERM from outside
  --keep-going          a rank that fails ends no other: for programs that go on without one (GroupConfig::patience). The
                        status is still the first failed rank's
  --address HOST:PORT   where rank 0 is to be met (127.0.0.1 and a free port)
  --world RANKS         ranks on all hosts together: start moebius-run once on each, with --address, --first-rank and
                        the same MOEBIUS_TOKEN in the environment
  --first-rank RANK     this host's first rank (0)
  --print-token         print a new token for MOEBIUS_TOKEN, and do nothing else
  --help                print this

Status 2: wrong options; 126, 127: PROGRAM cannot be started, is not found.
";

#[derive(Debug, PartialEq)]
pub enum Request {
    Run(Options),
    PrintToken,
    Help,
}

#[derive(Debug, PartialEq)]
pub struct Options {
    /// Ranks to start here.
    pub ranks: usize,
    /// This host's first.
    pub first: usize,
    /// Ranks on all hosts, if there are several.
    pub world: Option<usize>,
    pub address: Option<String>,
    pub grace: Duration,
    /// A rank that fails ends no other.
    pub keep_going: bool,
    pub program: OsString,
    pub args: Vec<OsString>,
}

/// Ranks that one host is asked for at most: a slip of the finger is no fork bomb.
const MOST: usize = 1024;

pub fn parse(mut args: impl Iterator<Item = OsString>) -> Result<Request, String> {
    let (mut ranks, mut first, mut world, mut address, mut grace) = (None, None, None, None, 5);
    let mut keep_going = false;
    let program = loop {
        let arg = args.next().ok_or("no PROGRAM")?;
        let Some(text) = arg.to_str().filter(|text| text.starts_with('-')) else { break arg };
        match text {
            "--help" | "-h" => return Ok(Request::Help),
            "--print-token" => return Ok(Request::PrintToken),
            "--" => break args.next().ok_or("no PROGRAM")?,
            "-n" => ranks = Some(number("-n", args.next(), 1..=MOST)?),
            "--first-rank" => first = Some(number("--first-rank", args.next(), 0..=usize::from(u16::MAX))?),
            "--world" => world = Some(number("--world", args.next(), 1..=usize::from(u16::MAX) + 1)?),
            "--grace" => grace = number("--grace", args.next(), 0..=86_400)?,
            "--keep-going" => keep_going = true,
            "--address" => {
                let text = args.next().and_then(|value| value.into_string().ok());
                address = Some(text.ok_or("--address: expected HOST:PORT")?);
            }
            _ => return Err(format!("unknown option {text}")),
        }
    };
    let ranks = ranks.ok_or("-n RANKS is missing")?;
    if world.is_some() != first.is_some() || world.is_some() && address.is_none() {
        return Err("--world, --first-rank and --address belong together".to_string());
    }
    let first = first.unwrap_or(0);
    if world.is_some_and(|world| first + ranks > world) {
        return Err(format!("--first-rank {first} and -n {ranks} reach past --world {}", world.unwrap_or(0)));
    }
    let grace = Duration::from_secs(grace as u64);
    Ok(Request::Run(Options { ranks, first, world, address, grace, keep_going, program, args: args.collect() }))
}

fn number(name: &str, value: Option<OsString>, range: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
    let number = value.as_ref().and_then(|value| value.to_str()).and_then(|text| text.parse().ok());
    number.filter(|number| range.contains(number)).ok_or_else(|| {
        let found = value.map_or("nothing".to_string(), |value| format!("{value:?}"));
        format!("{name}: expected {} to {}, found {found}", range.start(), range.end())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Request, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn command_lines() {
        let Ok(Request::Run(options)) = of("-n 8 --grace 0 prog -n 3 --help") else { panic!() };
        assert_eq!((options.ranks, options.first, options.world, options.address), (8, 0, None, None));
        assert_eq!((options.grace, options.program.to_str()), (Duration::ZERO, Some("prog")));
        assert_eq!(options.args, ["-n", "3", "--help"], "the program's own");
        assert!(!options.keep_going);
        let Ok(Request::Run(options)) = of("-n 2 --keep-going prog --keep-going") else { panic!() };
        assert_eq!((options.keep_going, options.args.len()), (true, 1));
        let Ok(Request::Run(options)) = of("-n 1 -- -odd x") else { panic!() };
        assert_eq!((options.program.to_str(), options.args.len()), (Some("-odd"), 1));
        let Ok(Request::Run(options)) = of("-n 2 --world 4 --first-rank 2 --address h:1 p") else { panic!() };
        assert_eq!((options.first, options.world, options.address.as_deref()), (2, Some(4), Some("h:1")));
        assert_eq!(of("--help"), Ok(Request::Help));
        assert_eq!(of("--print-token"), Ok(Request::PrintToken));
        for (bad, why) in [
            ("", "no PROGRAM"),
            ("prog", "-n RANKS"),
            ("-n 2", "no PROGRAM"),
            ("-n 0 prog", "-n: expected 1 to 1024"),
            ("-n 1025 prog", "-n: expected"),
            ("-n x prog", "-n: expected 1 to 1024, found \"x\""),
            ("-n", "-n: expected 1 to 1024, found nothing"),
            ("-n 2 --what prog", "unknown option --what"),
            ("-n 2 --world 4 prog", "belong together"),
            ("-n 2 --world 4 --first-rank 2 prog", "belong together"),
            ("-n 2 --first-rank 2 --address h:1 prog", "belong together"),
            ("-n 2 --world 4 --first-rank 3 --address h:1 prog", "reach past"),
        ] {
            let error = of(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
