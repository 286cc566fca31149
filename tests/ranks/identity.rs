//! Who am I: from recorded environments, and from broken ones.

use std::collections::HashMap;
use std::ffi::OsString;

use moebius::Error;
use moebius::ranks::{Identity, Launcher, RankError};

type Vars = HashMap<String, OsString>;

/// A fixture, with variables added or (empty) taken out.
fn fixture(name: &str, changes: &[(&str, &str)]) -> Vars {
    let path = format!("{}/tests/ranks/fixtures/{name}.env", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| line.split_once('=').unwrap());
    changed(lines.map(|(name, value)| (name.to_string(), value.into())).collect(), changes)
}

fn vars(changes: &[(&str, &str)]) -> Vars {
    changed(Vars::new(), changes)
}

fn changed(mut vars: Vars, changes: &[(&str, &str)]) -> Vars {
    for (name, value) in changes {
        match value.is_empty() {
            true => drop(vars.remove(*name)),
            false => drop(vars.insert(name.to_string(), value.into())),
        }
    }
    vars
}

fn read(vars: &Vars) -> Result<Identity, RankError> {
    Identity::read(&|name| vars.get(name).cloned()).map_err(|error| match error {
        Error::Rank(error) => error,
        other => panic!("{other}"),
    })
}

fn found(vars: Vars) -> (Launcher, [usize; 3], Option<String>) {
    let me = read(&vars).unwrap();
    (me.launcher, [me.rank, me.world, me.local_rank], me.address)
}

#[test]
fn recorded() {
    use Launcher::{Mpirun, Slurm, Torchrun};
    // torchrun's agent has the master port itself: the next one.
    assert_eq!(found(fixture("torchrun-2.11", &[])), (Torchrun, [1, 2, 1], Some("127.0.0.1:29512".into())));
    assert_eq!(found(fixture("torchrun", &[])), (Torchrun, [5, 8, 1], Some("node1:29401".into())));
    let own_store = [("TORCHELASTIC_USE_AGENT_STORE", "False")];
    assert_eq!(found(fixture("torchrun", &own_store)).2.as_deref(), Some("node1:29400"));
    assert_eq!(found(fixture("openmpi-5.0", &[])), (Mpirun, [1, 2, 1], None));
    assert_eq!(found(fixture("mpich-5.0", &[])), (Mpirun, [3, 4, 3], None));
    // Job 1, step 0.
    assert_eq!(found(fixture("slurm-22.05", &[])), (Slurm, [2, 3, 2], Some("node1:20031".into())));
    // Slurm's PMI tells no local rank; Slurm does. Job 2.
    assert_eq!(found(fixture("slurm-22.05-pmi2", &[])), (Slurm, [1, 2, 1], Some("node1:20062".into())));
    // SLURM_PROCID = 0 there is the batch script's, and no contradiction.
    assert_eq!(found(fixture("slurm-22.05-batch-openmpi", &[])), (Mpirun, [1, 2, 1], None));
}

#[test]
fn batch_script_is_no_rank() {
    let error = read(&fixture("slurm-22.05-batch", &[])).unwrap_err();
    let RankError::Partial { present, missing, .. } = &error else { panic!("{error}") };
    assert_eq!((present.as_str(), missing.as_str()), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"));
    assert!(error.to_string().contains("srun"), "{error}");
}

#[test]
fn given() {
    let me = Identity::new(3, 8, 1, Some("[::1]:29500")).unwrap();
    assert_eq!((me.rank, me.world, me.local_rank, me.launcher), (3, 8, 1, Launcher::Explicit));
    assert_eq!(me.address.as_deref(), Some("[::1]:29500"));
    assert_eq!(Identity::new(0, 2, 0, Some("29500")).unwrap().address.as_deref(), Some("127.0.0.1:29500"));
    for (rank, world, local, address, field) in [
        (0, 0, 0, None, "world"),
        (0, 65537, 0, None, "world"),
        (8, 8, 0, None, "rank"),
        (0, 8, 8, None, "local_rank"),
        (0, 8, 0, Some("nohost"), "address"),
        (0, 8, 0, Some(":1"), "address"),
        (0, 8, 0, Some("host:0"), "address"),
        (0, 8, 0, Some(""), "address"),
        (0, 8, 0, Some("0"), "address"),
        (0, 8, 0, Some("host:65536"), "address"),
        (0, 8, 0, Some("host:+1"), "address"),
        (0, 8, 0, Some("::1:5"), "address"),
        (0, 8, 0, Some("a b:5"), "address"),
    ] {
        let Err(Error::Invalid { name, .. }) = Identity::new(rank, world, local, address) else {
            panic!("{rank} {world} {local} {address:?}")
        };
        assert_eq!(name, field);
    }
}

/// moebius-run inside another launcher's job, or around it.
#[test]
fn own_variables_come_first() {
    let own = [("MOEBIUS_RANK", "1"), ("MOEBIUS_WORLD", "4"), ("MOEBIUS_LOCAL_RANK", "1"), ("MOEBIUS_ADDRESS", "h:1")];
    for name in ["slurm-22.05", "slurm-22.05-batch"] {
        assert_eq!(found(fixture(name, &own)), (Launcher::Moebius, [1, 4, 1], Some("h:1".into())), "{name}");
    }
    // Nothing tells which of these started the other.
    for name in ["torchrun", "openmpi-5.0", "mpich-5.0"] {
        let error = read(&fixture(name, &own)).unwrap_err();
        assert!(matches!(error, RankError::Conflict { variable: "MOEBIUS_RANK" | "MOEBIUS_WORLD", .. }), "{error}");
    }
    let chosen = fixture("torchrun", &[&own[..], &[("MOEBIUS_LAUNCHER", "torchrun")]].concat());
    assert_eq!(found(chosen), (Launcher::Torchrun, [5, 8, 1], Some("h:1".into())), "the address holds for all");
    let chosen = fixture("torchrun", &[&own[..], &[("MOEBIUS_LAUNCHER", "moebius")]].concat());
    assert_eq!(found(chosen).1, [1, 4, 1]);
}

#[test]
fn nested_launchers() {
    // srun starts one torchrun a node: Slurm counts nodes, torchrun ranks.
    let slurm = fixture("slurm-22.05", &[]);
    let mut nested = fixture("torchrun", &[]);
    nested.extend(slurm.clone());
    assert_eq!(found(nested.clone()).1, [5, 8, 1]);
    nested.insert("MOEBIUS_LAUNCHER".into(), "slurm".into());
    assert_eq!(found(nested).1, [2, 3, 2]);
    // An mpirun inside a step tells its own local ranks.
    let mut nested = fixture("mpich-5.0", &[]);
    nested.extend(slurm);
    assert_eq!((found(nested.clone()).0, found(nested).1), (Launcher::Mpirun, [3, 4, 3]));
}

/// torchrun's variables set by hand, as job scripts do.
#[test]
fn set_by_hand() {
    let hand = [("RANK", "2"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "2")];
    assert_eq!(found(vars(&hand)), (Launcher::Torchrun, [2, 3, 2], None));
    let master = [&hand[..], &[("MASTER_ADDR", "2001:db8::1"), ("MASTER_PORT", "29500")]].concat();
    assert_eq!(found(vars(&master)).2.as_deref(), Some("[2001:db8::1]:29500"), "no agent: the port itself");
    // From the step's own variables they agree; from the shell that submitted it they do not.
    assert_eq!(found(fixture("slurm-22.05", &master)).1, [2, 3, 2]);
    let stale = [("RANK", "0"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "0")];
    let error = read(&fixture("slurm-22.05", &stale)).unwrap_err();
    let expected = RankError::Conflict { variable: "RANK", value: 0, other: "SLURM_PROCID", other_value: 2 };
    assert_eq!(error, expected);
    assert_eq!(error.to_string(), "identity: RANK = 0, but SLURM_PROCID = 2; unset one, or choose by MOEBIUS_LAUNCHER");
    let error = read(&fixture("openmpi-5.0", &[("RANK", "1"), ("WORLD_SIZE", "4")])).unwrap_err();
    assert!(matches!(error, RankError::Conflict { variable: "WORLD_SIZE", other: "OMPI_COMM_WORLD_SIZE", .. }));
    let error = read(&fixture("openmpi-5.0", &[("PMI_RANK", "0"), ("PMI_SIZE", "2")])).unwrap_err();
    assert!(matches!(error, RankError::Conflict { variable: "OMPI_COMM_WORLD_RANK", other: "PMI_RANK", .. }));
    let error = read(&fixture("slurm-22.05-pmi2", &[("PMI_RANK", "0")])).unwrap_err();
    assert!(matches!(error, RankError::Conflict { variable: "PMI_RANK", other: "SLURM_PROCID", .. }));
}

#[test]
fn partial() {
    for (name, changes, present, missing) in [
        ("torchrun", ("WORLD_SIZE", ""), "RANK", "WORLD_SIZE"),
        ("torchrun", ("RANK", ""), "WORLD_SIZE", "RANK"),
        ("torchrun", ("LOCAL_RANK", ""), "RANK, WORLD_SIZE", "LOCAL_RANK"),
        ("torchrun", ("MASTER_ADDR", ""), "MASTER_PORT", "MASTER_ADDR"),
        ("torchrun", ("MASTER_PORT", ""), "MASTER_ADDR", "MASTER_PORT"),
        ("openmpi-5.0", ("OMPI_COMM_WORLD_RANK", ""), "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        (
            "openmpi-5.0",
            ("OMPI_COMM_WORLD_LOCAL_RANK", ""),
            "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        ),
        ("openmpi-5.0", ("RANK", "1"), "RANK", "WORLD_SIZE"),
        ("mpich-5.0", ("PMI_SIZE", ""), "PMI_RANK", "PMI_SIZE"),
        ("mpich-5.0", ("MPI_LOCALRANKID", ""), "PMI_RANK, PMI_SIZE", "MPI_LOCALRANKID"),
        ("slurm-22.05", ("SLURM_PROCID", ""), "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("slurm-22.05", ("SLURM_LOCALID", ""), "SLURM_PROCID, SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ("slurm-22.05", ("MOEBIUS_RANK", "0"), "MOEBIUS_RANK", "MOEBIUS_WORLD"),
    ] {
        let error = read(&fixture(name, &[changes])).unwrap_err();
        let RankError::Partial { present: p, missing: m, .. } = &error else { panic!("{name} {changes:?}: {error}") };
        assert_eq!((p.as_str(), m.as_str()), (present, missing), "{name} {changes:?}");
        assert!(error.to_string().contains(missing), "{error}");
    }
}

#[test]
fn impossible_values() {
    for (name, (variable, value)) in [
        ("torchrun", ("RANK", "8")),
        ("torchrun", ("RANK", "-1")),
        ("torchrun", ("RANK", "+1")),
        ("torchrun", ("RANK", " 1")),
        ("torchrun", ("RANK", "99999999999999999999999")),
        ("torchrun", ("WORLD_SIZE", "0")),
        ("torchrun", ("WORLD_SIZE", "1000000")),
        ("torchrun", ("LOCAL_RANK", "8")),
        ("torchrun", ("MASTER_PORT", "65535")),
        ("torchrun", ("MASTER_ADDR", "no host")),
        ("mpich-5.0", ("PMI_SIZE", "four")),
        ("slurm-22.05", ("SLURM_STEP_NODELIST", "node[")),
        ("slurm-22.05", ("MOEBIUS_ADDRESS", "node1")),
        ("slurm-22.05", ("MOEBIUS_LAUNCHER", "pbs")),
    ] {
        let error = read(&fixture(name, &[(variable, value)])).unwrap_err();
        let RankError::Variable { variable: v, .. } = &error else { panic!("{variable}={value}: {error}") };
        assert_eq!(*v, variable, "{value}");
    }
    let mut empty = fixture("torchrun", &[]);
    empty.insert("RANK".into(), "".into());
    assert!(matches!(read(&empty), Err(RankError::Variable { variable: "RANK", .. })));
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStringExt;
        empty.insert("RANK".into(), OsString::from_vec(vec![0xff]));
        assert!(matches!(read(&empty), Err(RankError::Variable { variable: "RANK", .. })));
    }
}

#[test]
fn nobody_told() {
    for changes in [vec![], vec![("SLURM_JOB_ID", "5"), ("SLURM_NTASKS", "8")], vec![("LOCAL_RANK", "0")]] {
        let error = read(&vars(&changes)).unwrap_err();
        assert!(matches!(error, RankError::NotLaunched { .. }), "{error}");
        assert!(error.to_string().contains("MOEBIUS_RANK, RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID"));
    }
    let error = read(&fixture("torchrun", &[("MOEBIUS_LAUNCHER", "slurm")])).unwrap_err();
    assert!(error.to_string().contains("SLURM_PROCID"), "{error}");
}

/// Several hosts, as Slurm would write them (the recorded step has one).
#[test]
fn first_host_of_the_step() {
    let several = [("SLURM_STEP_NODELIST", "gpu[07-08,12],login"), ("SLURM_JOB_ID", "400123"), ("SLURM_STEP_ID", "2")];
    // 20000 + (31 · 400123 + 2) mod 10000.
    assert_eq!(found(fixture("slurm-22.05", &several)).2.as_deref(), Some("gpu07:23815"));
    let master = [("MASTER_ADDR", "gpu12"), ("MASTER_PORT", "29500")];
    assert_eq!(found(fixture("slurm-22.05", &master)).2.as_deref(), Some("gpu12:29500"), "the script's own choice");
}
