//! Who this process is, as its launcher told it in the environment.

use std::ffi::OsString;

use super::MAX_WORLD;
use super::address;
use super::nodes::first_host;
use crate::error::{Error, Launcher, RankError, Result};

/// A rank's place in the world.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Identity {
    /// This rank, `0..world`.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Its number among the ranks of its host: which GPU it takes.
    pub local_rank: usize,
    /// `host:port` where rank 0 can be met, if the launcher tells. (A port alone may be given: one of 127.0.0.1.)
    pub address: Option<String>,
    /// Who told.
    pub launcher: Launcher,
}

/// Variables that make up an identity, other than Slurm's. A launcher inside another's job removes them, so that its
/// ranks see one identity only; Slurm's are the allocation's too and stay.
pub const VARIABLES: [&str; 12] = [
    "MOEBIUS_LAUNCHER",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
];

/// The variables of one launcher.
struct Names {
    rank: &'static str,
    world: &'static str,
    local: &'static str,
}

const MOEBIUS: Names = Names { rank: "MOEBIUS_RANK", world: "MOEBIUS_WORLD", local: "MOEBIUS_LOCAL_RANK" };
const TORCH: Names = Names { rank: "RANK", world: "WORLD_SIZE", local: "LOCAL_RANK" };
const OMPI: Names =
    Names { rank: "OMPI_COMM_WORLD_RANK", world: "OMPI_COMM_WORLD_SIZE", local: "OMPI_COMM_WORLD_LOCAL_RANK" };
const PMI: Names = Names { rank: "PMI_RANK", world: "PMI_SIZE", local: "MPI_LOCALRANKID" };
/// Not SLURM_NTASKS: a batch script has that too, with SLURM_PROCID = 0, without being a rank.
const SLURM: Names = Names { rank: "SLURM_PROCID", world: "SLURM_STEP_NUM_TASKS", local: "SLURM_LOCALID" };

/// Values of one launcher's variables.
struct Found {
    names: &'static Names,
    rank: usize,
    world: usize,
    local: Option<usize>,
}

impl Identity {
    /// An identity that the caller knows.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a rank out of range, or an address that is not `host:port`.
    pub fn new(rank: usize, world: usize, local_rank: usize, address: Option<&str>) -> Result<Self> {
        const CALL: &str = "ranks::Identity::new";
        if world == 0 || world > MAX_WORLD {
            return Err(Error::invalid(CALL, "world", format!("1..={MAX_WORLD}"), world));
        }
        for (name, value) in [("rank", rank), ("local_rank", local_rank)] {
            if value >= world {
                return Err(Error::invalid(CALL, name, format!("0..{world}"), value));
            }
        }
        let address = match address.map(|text| address::parse(text).ok_or(text)) {
            None => None,
            Some(Ok(address)) => Some(address),
            Some(Err(text)) => return Err(Error::invalid(CALL, "address", "host:port, or a port of 127.0.0.1", text)),
        };
        Ok(Self { rank, world, local_rank, address, launcher: Launcher::Explicit })
    }

    /// From this process's environment. The innermost launcher counts: `moebius-run`, then torchrun, then mpirun,
    /// then Slurm; `MOEBIUS_LAUNCHER` (`moebius`, `torchrun`, `mpirun`, `slurm`) takes one and ignores the others.
    /// `MOEBIUS_ADDRESS` overrides the address that the launcher tells.
    ///
    /// # Errors
    /// [`RankError`]: no launcher; some of its variables are missing; an impossible value; two launchers of which
    /// neither can have started the other disagree.
    pub fn from_env() -> Result<Self> {
        Self::read(&|name| std::env::var_os(name))
    }

    /// As [`Identity::from_env`], from any source of variables.
    ///
    /// # Errors
    /// As there.
    pub fn read(source: &dyn Fn(&str) -> Option<OsString>) -> Result<Self> {
        Ok(Environment { source }.identity()?)
    }
}

struct Environment<'a> {
    source: &'a dyn Fn(&str) -> Option<OsString>,
}

type EnvResult<T> = std::result::Result<T, RankError>;

impl Environment<'_> {
    fn identity(&self) -> EnvResult<Identity> {
        let (launcher, found, local) = match self.text("MOEBIUS_LAUNCHER")? {
            Some(name) => self.chosen(&name)?,
            None => self.innermost()?,
        };
        let address = match self.text("MOEBIUS_ADDRESS")? {
            Some(text) => {
                let address = address::parse(&text);
                Some(address.ok_or_else(|| variable("MOEBIUS_ADDRESS", "host:port, or a port of 127.0.0.1", text))?)
            }
            None => self.address(launcher)?,
        };
        Ok(Identity { rank: found.rank, world: found.world, local_rank: local, address, launcher })
    }

    /// The launcher that MOEBIUS_LAUNCHER names.
    fn chosen(&self, name: &str) -> EnvResult<(Launcher, Found, usize)> {
        let (launcher, names) = match name {
            "moebius" => (Launcher::Moebius, &MOEBIUS),
            "torchrun" => (Launcher::Torchrun, &TORCH),
            "mpirun" if self.text(OMPI.rank)?.is_some() => (Launcher::Mpirun, &OMPI),
            "mpirun" => (Launcher::Mpirun, &PMI),
            "slurm" => (Launcher::Slurm, &SLURM),
            _ => return Err(variable("MOEBIUS_LAUNCHER", "moebius, torchrun, mpirun or slurm", name)),
        };
        let found = self.found(names)?.ok_or_else(|| RankError::NotLaunched { looked_for: names.rank.to_string() })?;
        let local = found.local()?;
        Ok((launcher, found, local))
    }

    fn innermost(&self) -> EnvResult<(Launcher, Found, usize)> {
        let own = self.found(&MOEBIUS)?;
        let torch = self.found(&TORCH)?;
        let (ompi, pmi) = (self.found(&OMPI)?, self.found(&PMI)?);
        agree(ompi.as_ref(), pmi.as_ref())?;
        let mpi = ompi.or(pmi);
        // A batch script's variables are no rank's: they count only where nobody else says anything.
        let alone = own.is_none() && torch.is_none() && mpi.is_none();
        let slurm = if alone || self.text(SLURM.world)?.is_some() { self.found(&SLURM)? } else { None };

        if let Some(own) = own {
            // moebius-run removes these: they come from a launcher inside its job, or were set by hand.
            agree(Some(&own), torch.as_ref())?;
            agree(Some(&own), mpi.as_ref())?;
            let local = own.local()?;
            return Ok((Launcher::Moebius, own, local));
        }
        if let Some(torch) = torch {
            // torchrun's own workers may well run inside another launcher's rank; variables set by hand may not.
            if self.text("TORCHELASTIC_RUN_ID")?.is_none() {
                agree(Some(&torch), mpi.as_ref())?;
                agree(Some(&torch), slurm.as_ref())?;
            }
            let local = torch.local()?;
            return Ok((Launcher::Torchrun, torch, local));
        }
        if let Some(mpi) = mpi {
            // Without a local rank this is Slurm's own PMI; an mpirun inside a step tells its own.
            if let (None, Some(slurm)) = (mpi.local, &slurm) {
                agree(Some(&mpi), Some(slurm))?;
                let local = slurm.local()?;
                return Ok((Launcher::Slurm, mpi, local));
            }
            let local = mpi.local()?;
            return Ok((Launcher::Mpirun, mpi, local));
        }
        if let Some(slurm) = slurm {
            let local = slurm.local()?;
            return Ok((Launcher::Slurm, slurm, local));
        }
        let looked_for = [MOEBIUS.rank, TORCH.rank, OMPI.rank, PMI.rank, SLURM.rank].join(", ");
        Err(RankError::NotLaunched { looked_for })
    }

    /// A launcher's variables: none of them, or rank and world.
    fn found(&self, names: &'static Names) -> EnvResult<Option<Found>> {
        let (rank, world) = (self.number(names.rank)?, self.number(names.world)?);
        let local = self.number(names.local)?;
        let (rank, world) = match (rank, world) {
            (Some(rank), Some(world)) => (rank, world),
            // A local rank alone names nobody.
            (None, None) => return Ok(None),
            (rank, _) => {
                let (present, missing) =
                    if rank.is_some() { (names.rank, names.world) } else { (names.world, names.rank) };
                let batch = names.rank == SLURM.rank && rank.is_some();
                let hint = if batch { "; a batch script is no rank: start the program with srun" } else { "" };
                return Err(RankError::Partial { present: present.to_string(), missing: missing.to_string(), hint });
            }
        };
        if world == 0 || world > MAX_WORLD {
            return Err(variable(names.world, &format!("1..={MAX_WORLD}"), world));
        }
        if rank >= world {
            return Err(variable(names.rank, &format!("0..{world} ({})", names.world), rank));
        }
        if let Some(local) = local.filter(|local| *local >= world) {
            return Err(variable(names.local, &format!("0..{world} ({})", names.world), local));
        }
        Ok(Some(Found { names, rank, world, local }))
    }

    fn address(&self, launcher: Launcher) -> EnvResult<Option<String>> {
        match (launcher, self.master()?) {
            (Launcher::Moebius | Launcher::Explicit, _) => Ok(None),
            (_, Some(master)) => Ok(Some(master)),
            (Launcher::Slurm, None) => self.slurm_address(),
            (_, None) => Ok(None),
        }
    }

    /// torchrun's MASTER_ADDR and MASTER_PORT, which many a job script sets for other launchers too.
    fn master(&self) -> EnvResult<Option<String>> {
        let (host, port) = (self.text("MASTER_ADDR")?, self.number("MASTER_PORT")?);
        let (host, port) = match (host, port) {
            (Some(host), Some(port)) => (host, port),
            (None, None) => return Ok(None),
            (host, _) => {
                let (present, missing) =
                    if host.is_some() { ("MASTER_ADDR", "MASTER_PORT") } else { ("MASTER_PORT", "MASTER_ADDR") };
                return Err(RankError::Partial { present: present.into(), missing: missing.into(), hint: "" });
            }
        };
        // torchrun's agent listens at that port itself, unless it says that it does not.
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE")?.is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let port = port.saturating_add(usize::from(agent));
        if port == 0 || port > usize::from(u16::MAX) {
            return Err(variable("MASTER_PORT", "a port, with one more after it for torchrun", port));
        }
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        address::parse(&address).map(Some).ok_or_else(|| variable("MASTER_ADDR", "a host", host))
    }

    /// The step's first host, and a port below the ones that systems give to connections, by the numbers of job and
    /// step.
    fn slurm_address(&self) -> EnvResult<Option<String>> {
        let list = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"];
        let (job, step) = (self.number("SLURM_JOB_ID")?, self.number("SLURM_STEP_ID")?);
        for name in list {
            let (Some(hosts), Some(job), Some(step)) = (self.text(name)?, job, step) else { continue };
            let Some(host) = first_host(&hosts) else { return Err(variable(name, "a list of hosts", hosts)) };
            let port = 20_000 + (job.wrapping_mul(31).wrapping_add(step)) % 10_000;
            return Ok(Some(format!("{host}:{port}")));
        }
        Ok(None)
    }

    fn text(&self, name: &'static str) -> EnvResult<Option<String>> {
        let Some(value) = (self.source)(name) else { return Ok(None) };
        match value.into_string() {
            Ok(text) => Ok(Some(text)),
            Err(bytes) => Err(variable(name, "UTF-8", bytes.to_string_lossy())),
        }
    }

    fn number(&self, name: &'static str) -> EnvResult<Option<usize>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits => Ok(Some(number)),
            _ => Err(variable(name, "a number", format!("{text:?}"))),
        }
    }
}

impl Found {
    fn local(&self) -> EnvResult<usize> {
        self.local.ok_or_else(|| RankError::Partial {
            present: format!("{}, {}", self.names.rank, self.names.world),
            missing: self.names.local.to_string(),
            hint: "",
        })
    }
}

/// Both say the same, or one says nothing.
fn agree(a: Option<&Found>, b: Option<&Found>) -> EnvResult<()> {
    let (Some(a), Some(b)) = (a, b) else { return Ok(()) };
    for (name, value, other, other_value) in
        [(a.names.rank, a.rank, b.names.rank, b.rank), (a.names.world, a.world, b.names.world, b.world)]
    {
        if value != other_value {
            return Err(RankError::Conflict { variable: name, value, other, other_value });
        }
    }
    Ok(())
}

fn variable(variable: &'static str, expected: &str, found: impl ToString) -> RankError {
    RankError::Variable { variable, expected: expected.to_string(), found: found.to_string() }
}
