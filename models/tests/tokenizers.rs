//! Real tokenizers and chat templates against what transformers made of them (`tests/golden-chat`, or the folder that
//! `MOEBIUS_CHAT` names), and gpt-oss' conversations against what openai-harmony made of them. The tokenizers are in
//! folders of `MOEBIUS_TOKENIZERS` (`scripts/tokenizers` fetches them); without it the tests that need one count as
//! ignored.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use minijinja::Value;
use moebius_models::generate::{Chat, ChatTemplate, Tokenizer};
use serde::Deserialize;

/// What openai-harmony made of conversations, beside the tokenizers' files.
const HARMONY: &str = "harmony.json";

/// What transformers made with one tokenizer.
#[derive(Deserialize)]
struct Golden {
    encode: Vec<Encoding>,
    /// Values whose keys keep their order, as Python's dictionaries do.
    chat: Vec<Value>,
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

/// Relative paths count from the repository's root.
fn folder(variable: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os(variable).filter(|dir| !dir.is_empty()).map(|dir| root.join(dir))
}

fn main() -> ExitCode {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden-chat");
    let golden = folder("MOEBIUS_CHAT").unwrap_or_else(|| shipped.clone());
    let tokenizers = folder("MOEBIUS_TOKENIZERS");
    let own = shipped.clone();
    let harmony = Trial::test("harmony", move || renderings(&own));
    let trials = ["qwen3", "deepseek_v3", "gptoss"].into_iter().flat_map(|name| {
        let checks: [(&str, Check); 3] = [("texts", texts), ("conversations", conversations), ("streams", streams)];
        let (golden, tokenizers, shipped) = (golden.clone(), tokenizers.clone(), shipped.clone());
        checks.into_iter().map(move |(kind, check)| {
            let (golden, tokenizers, shipped) = (golden.clone(), tokenizers.clone(), shipped.clone());
            let ignored = tokenizers.is_none();
            Trial::test(format!("{name}::{kind}"), move || {
                let dir = tokenizers.ok_or("MOEBIUS_TOKENIZERS is not set")?.join(name);
                let path = golden.join(format!("{name}.json"));
                let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
                check(&Case { name, tokenizer: Tokenizer::from_folder(&dir)?, dir, shipped, text })
            })
            .with_ignored_flag(ignored)
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.chain([harmony]).collect()).exit_code()
}

type Check = fn(&Case) -> Result<(), Failed>;

/// A tokenizer, and the file of what is expected of it.
struct Case {
    name: &'static str,
    dir: PathBuf,
    /// The folder of the repository's own expectations.
    shipped: PathBuf,
    tokenizer: Tokenizer,
    text: String,
}

impl Case {
    fn golden(&self) -> Result<Golden, Failed> {
        Ok(serde_json::from_str(&self.text)?)
    }

    /// Passes where nothing differs and something was compared.
    fn conclude(&self, what: &str, compared: usize, differences: Vec<String>) -> Result<(), Failed> {
        println!("{}: {compared} {what} compared, {} differ", self.name, differences.len());
        match differences.is_empty() {
            true => Ok(()),
            false => Err(format!("{} of {compared} differ:\n{}", differences.len(), differences.join("\n")).into()),
        }
    }
}

fn texts(case: &Case) -> Result<(), Failed> {
    let encodings = case.golden()?.encode;
    let mut differences = Vec::new();
    for Encoding { text, ids, decoded } in &encodings {
        let got = (case.tokenizer.encode(text)?, case.tokenizer.decode(ids, false)?);
        if (&got.0, &got.1) != (ids, decoded) {
            differences.push(format!("{text:?}: ids {ids:?}, text {decoded:?}; found {got:?}"));
        }
    }
    if encodings.is_empty() {
        return Err("no text".into());
    }
    case.conclude("texts", encodings.len(), differences)
}

fn conversations(case: &Case) -> Result<(), Failed> {
    let mut records = case.golden()?.chat;
    // Conversations with tools and reasoning, and gpt-oss' all.
    let more = if case.name == "gptoss" { HARMONY.into() } else { format!("{}_turns.json", case.name) };
    records.extend(shipped_records(&case.shipped, &more)?);
    if records.is_empty() {
        return Err("no conversation".into());
    }
    let template = ChatTemplate::from_folder(&case.dir)?;
    case.conclude("conversations", records.len(), differences(&template, &records, Some(&case.tokenizer))?)
}

/// Conversations that need no tokenizer: without ids.
fn renderings(golden: &Path) -> Result<(), Failed> {
    let records = shipped_records(golden, HARMONY)?;
    let differences = differences(&ChatTemplate::harmony(), &records, None)?;
    println!("harmony: {} conversations compared, {} differ", records.len(), differences.len());
    let failed = || Failed::from(differences.join("\n"));
    if records.is_empty() || !differences.is_empty() { Err(failed()) } else { Ok(()) }
}

fn shipped_records(folder: &Path, name: &str) -> Result<Vec<Value>, Failed> {
    let path = folder.join(name);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(serde_json::from_str(&text)?)
}

/// Records that the template renders to another text, or to other ids by the tokenizer, where there is one.
fn differences(
    template: &ChatTemplate,
    records: &[Value],
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<String>, Failed> {
    let mut differences = Vec::new();
    for record in records {
        let chat = conversation(record)?;
        let got = template.render(&chat);
        let field = |name: &str| record.get_attr(name).map_err(|e| e.to_string());
        match (field("rendered")?.as_str(), got) {
            (Some(rendered), Ok(got)) => {
                let expected: Vec<u32> = Deserialize::deserialize(field("ids")?)?;
                let got_ids = match tokenizer {
                    Some(tokenizer) => tokenizer.encode_chat(template, &chat)?,
                    None => expected.clone(),
                };
                if got != rendered || got_ids != expected {
                    differences.push(format!("{record}\nfound {got:?}, {got_ids:?}"));
                }
            }
            // Where transformers failed.
            (None, Err(_)) if !field("error")?.is_undefined() => {}
            (_, got) => differences.push(format!("{record}\nfound {got:?}")),
        }
    }
    Ok(differences)
}

/// What of a record went into the template.
fn conversation(record: &Value) -> Result<Chat, Failed> {
    let mut chat = Chat::new();
    for name in record.try_iter()? {
        let field = record.get_item(&name)?;
        chat = match name.as_str().unwrap_or_default() {
            "messages" => field.try_iter()?.fold(chat, Chat::message),
            "tools" => chat.tools(field),
            "documents" => chat.documents(field),
            "add_generation_prompt" => chat.generation_prompt(field.is_true()),
            "rendered" | "ids" | "error" => chat,
            other => chat.variable(other, field),
        };
    }
    Ok(chat)
}

/// Ids one at a time give the text of all of them, those of the texts and any others.
fn streams(case: &Case) -> Result<(), Failed> {
    let mut sequences: Vec<Vec<u32>> = case.golden()?.encode.into_iter().map(|e| e.ids).collect();
    let known: Vec<u32> = sequences.concat();
    let mut state = 1u32;
    sequences.extend((0..50).map(|i| {
        let draw = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Ids of the texts have many that are parts of characters.
            if i % 2 == 0 { known[(state >> 8) as usize % known.len()] } else { (state >> 8) % 100_000 }
        };
        (0..80).map(draw).collect()
    }));
    let mut differences = Vec::new();
    for ids in &sequences {
        let mut stream = case.tokenizer.stream(&[]);
        let mut got = String::new();
        for id in ids {
            got.push_str(&stream.push(*id)?);
        }
        got.push_str(&stream.finish()?.text);
        let expected = case.tokenizer.decode(ids, true)?;
        if got != expected {
            differences.push(format!("{ids:?}: {expected:?}; found {got:?}"));
        }
    }
    case.conclude("streams", sequences.len(), differences)
}
