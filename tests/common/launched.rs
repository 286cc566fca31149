//! Ranks that are processes, one a GPU: the test's program starts itself once a rank.

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moebius::comm::{Op, Tag};
use moebius::cuda::Cuda;
use moebius::kernels::Kernels;
use moebius::nccl::{NcclComm, NcclLibrary};
use moebius::ranks::{Bootstrap, Identity, JobToken};
use moebius::{DType, Tensor};

/// Which body a child runs; its rank and job are in the variables of `moebius-run`.
pub const CHILD: &str = "MOEBIUS_TEST_RANK_BODY";
const TIMEOUT: Duration = Duration::from_secs(60);
/// Seconds after which a child is killed.
const LIMIT: &str = "45";
/// Limit for failures that are told at once, well within the above.
pub const AT_ONCE: Duration = Duration::from_secs(10);

/// A child's exit and what it said.
pub struct Said {
    pub ok: bool,
    /// By signal 9, as `timeout` tells it.
    pub killed: bool,
    pub text: String,
}

pub fn start(body: &str, ranks: usize, environment: &[(&str, &str)]) -> Vec<Said> {
    // The port is free when it is asked for; the next to ask is a child a moment later.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let token = JobToken::random().expect("a token").to_hex();
    let me = std::env::current_exe().expect("this program");
    let children: Vec<Child> = (0..ranks)
        .map(|rank| {
            // A rank that hangs is what these tests are about: it ends, and fails them.
            let mut command = Command::new("timeout");
            command.args(["--signal=KILL", LIMIT]).arg(&me);
            command.env(CHILD, body).env("MOEBIUS_LAUNCHER", "moebius").env("MOEBIUS_TOKEN", &token);
            command.env("MOEBIUS_RANK", rank.to_string()).env("MOEBIUS_LOCAL_RANK", rank.to_string());
            command.env("MOEBIUS_WORLD", ranks.to_string()).env("MOEBIUS_ADDRESS", port.to_string());
            for (name, value) in environment {
                match *name {
                    "HALVES" => command.env("NCCL_HOSTID", format!("half{}", 2 * rank / ranks)),
                    name => command.env(name, value),
                };
            }
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a child")
        })
        .collect();
    let finished = children.into_iter().map(|child| child.wait_with_output().expect("a child's end"));
    let said = |out: std::process::Output| Said {
        ok: out.status.success(),
        killed: out.status.signal() == Some(9) || out.status.code() == Some(128 + 9),
        text: [out.stdout, out.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat(),
    };
    finished.map(said).collect()
}

pub fn succeed(said: &[Said]) {
    for (rank, one) in said.iter().enumerate() {
        assert!(one.ok, "rank {rank}: {}", one.text);
    }
}

pub fn tag(sequence: u64) -> Tag {
    Tag { layer: 0, op: Op::User, sequence }
}

pub fn join(round: u32) -> NcclComm {
    join_within(round, TIMEOUT)
}

pub fn join_within(round: u32, limit: Duration) -> NcclComm {
    let me = Identity::from_env().expect("an identity");
    let mut job = Bootstrap::new(&me, JobToken::from_env().expect("a token"), limit).expect("a job");
    job.round = round;
    let cuda = Cuda::new(me.local_rank).expect("a GPU").poisoning();
    NcclComm::join(&NcclLibrary::open().expect("NCCL"), &job, &cuda).expect("a communicator")
}

pub fn word(cuda: &Cuda, value: f64) -> Tensor<Cuda> {
    cuda.write(&[value], DType::F32, &[1]).expect("a tensor")
}
