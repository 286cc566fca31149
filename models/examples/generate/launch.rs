//! The command that starts this program's ranks as processes, a GPU each.

/// `moebius-run` with the program and its arguments (the program's path first), as a shell takes them; without `--ranks`,
/// which the launcher says itself.
pub fn command(ranks: usize, arguments: impl IntoIterator<Item = String>) -> String {
    let mut command = format!("moebius-run -n {ranks}");
    let mut is_number = false;
    for argument in arguments {
        if std::mem::take(&mut is_number) || argument.starts_with("--ranks=") {
            continue;
        }
        if argument == "--ranks" {
            is_number = true;
            continue;
        }
        command.push(' ');
        command.push_str(&quoted(&argument));
    }
    command
}

fn quoted(argument: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return argument.to_string();
    }
    format!("'{}'", argument.replace('\'', r"'\''"))
}
