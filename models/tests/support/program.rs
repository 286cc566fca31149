//! The programs of `examples`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// Built from these sources with this test's profile: what an earlier build has left may be another.
static EXAMPLES: LazyLock<PathBuf> = LazyLock::new(|| {
    let this = std::env::current_exe().expect("this program");
    let profile = this.ancestors().nth(2).expect("a profile's folder");
    let name = match profile.file_name().and_then(|name| name.to_str()).expect("a name") {
        "debug" => "dev",
        other => other,
    };
    let mut command = Command::new(env!("CARGO"));
    // All default members' examples, as `cargo test` builds them: others would be compiled with other features.
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("..")).args(["build", "--quiet", "--examples"]);
    command.args(["--profile", name, "--target-dir"]).arg(profile.parent().expect("target")).stdin(Stdio::null());
    let done = command.output().expect("cargo");
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    profile.join("examples")
});

/// Runs `generate` to its end.
pub fn run(arguments: &[&str]) -> Output {
    run_example("generate", arguments)
}

/// The same with these variables in its environment.
#[allow(dead_code, reason = "every suite takes a part")]
pub fn run_with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let program = EXAMPLES.join("generate").with_extension(std::env::consts::EXE_EXTENSION);
    let variables = variables.iter().copied();
    Command::new(program).envs(variables).args(arguments).stdin(Stdio::null()).output().expect("the program")
}

/// Runs the example of this name to its end.
pub fn run_example(name: &str, arguments: &[&str]) -> Output {
    let program = EXAMPLES.join(name).with_extension(std::env::consts::EXE_EXTENSION);
    Command::new(program).args(arguments).stdin(Stdio::null()).output().expect("the program")
}

/// What it printed, if all went well.
pub fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}
