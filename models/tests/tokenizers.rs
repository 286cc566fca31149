//! Real tokenizers and chat templates against what transformers made of them (`tests/golden-chat`, or the folder that
//! `MOEBIUS_CHAT` names: every file of it), and gpt-oss' conversations against what openai-harmony made of them. The
//! tokenizers are in folders of `MOEBIUS_TOKENIZERS` (`scripts/tokenizers` fetches them); without it the tests that need
//! one count as ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use minijinja::Value;
use moebius_models::generate::{Chat, ChatTemplate, Tokenizer};
use serde::Deserialize;

#[path = "support/chat_folder.rs"]
mod chat_folder;

/// What openai-harmony made of conversations, beside the tokenizers' files.
const HARMONY: &str = "harmony.json";

/// Tokenizers that are tested whatever the folder has.
const TOKENIZERS: [&str; 3] = ["qwen3", "deepseek_v3", "gptoss"];

/// What transformers made with one tokenizer; a file may be the list of its conversations alone.
#[derive(Default, Deserialize)]
struct Golden {
    /// The name of the tokenizer's folder, which is the file's own where it is absent.
    #[serde(default)]
    tokenizer: Option<String>,
    #[serde(default)]
    encode: Vec<Encoding>,
    /// Values whose keys keep their order, as Python's dictionaries do.
    #[serde(default)]
    chat: Vec<Value>,
    #[serde(flatten)]
    other: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    ids: Vec<u32>,
    #[serde(default)]
    decoded: Option<String>,
}

impl Golden {
    fn read(path: &Path) -> Result<Self, Failed> {
        let fail = |problem: String| Failed::from(format!("{}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
        let golden: Self = match text.trim_start().starts_with('[') {
            true => Self { chat: serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?, ..Self::default() },
            false => serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?,
        };
        match golden.other.iter().find(|(_, value)| value.is_array() || value.is_object()) {
            Some((name, _)) => Err(fail(format!("{name}: expected encode and chat"))),
            None => Ok(golden),
        }
    }

    /// The tokenizer that a file is of: the one it names, or its own name's beginning does.
    fn tokenizer(&self, path: &Path) -> String {
        let stem = path.file_stem().map_or(String::new(), |stem| stem.to_string_lossy().into_owned());
        let begins = |name: &&&str| stem == **name || stem.starts_with(&format!("{name}_"));
        let by_name = || match stem.as_str() {
            "harmony" => "gptoss".into(),
            _ => TOKENIZERS.iter().find(begins).map_or(stem.clone(), ToString::to_string),
        };
        self.tokenizer.clone().unwrap_or_else(by_name)
    }
}

/// Relative paths count from the repository's root.
fn folder(variable: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os(variable).filter(|dir| !dir.is_empty()).map(|dir| root.join(dir))
}

/// The files of a folder, by the tokenizer that they are of.
fn files(folder: &Path) -> Result<BTreeMap<String, Vec<PathBuf>>, Failed> {
    let fail = |e: std::io::Error| Failed::from(format!("{}: {e}", folder.display()));
    let mut files: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            files.entry(Golden::read(&path)?.tokenizer(&path)).or_default().push(path);
        }
    }
    files.values_mut().for_each(|files| files.sort());
    Ok(files)
}

fn main() -> ExitCode {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden-chat");
    let (given, tokenizers) = (folder("MOEBIUS_CHAT"), folder("MOEBIUS_TOKENIZERS"));
    let mut trials = vec![Trial::test("expectations", expectations)];
    let own = shipped.join(HARMONY);
    trials.push(Trial::test("harmony", move || renderings(&own)));
    let found = files(given.as_deref().unwrap_or(&shipped)).and_then(|found| Ok((found, files(&shipped)?)));
    let (mut found, shipped_files) = match found {
        Ok(found) => found,
        Err(error) => {
            let problem = error.message().unwrap_or_default().to_string();
            trials.push(Trial::test("files", move || Err(problem.into())));
            return libtest_mimic::run(&Arguments::from_args(), trials).exit_code();
        }
    };
    for name in TOKENIZERS {
        found.entry(name.into()).or_default();
    }
    for (name, given_files) in found {
        // Conversations with tools and reasoning, and gpt-oss' all, beside those of another folder.
        let more = shipped_files.get(&name).cloned().unwrap_or_default();
        let more = if given.is_some() { more } else { Vec::new() };
        let checks: [(&str, Check); 3] = [("texts", texts), ("conversations", conversations), ("streams", streams)];
        let all = [&given_files[..], &more].concat();
        let goldens: Vec<Golden> = all.iter().filter_map(|path| Golden::read(path).ok()).collect();
        // A file need not have both; one that cannot be read fails by its conversations.
        let has_texts = goldens.iter().any(|golden| !golden.encode.is_empty());
        let has_chat = goldens.len() < all.len() || goldens.iter().any(|golden| !golden.chat.is_empty());
        let is_asked = |kind: &str| if kind == "conversations" { has_chat || !has_texts } else { has_texts };
        for (kind, check) in checks.into_iter().filter(|(kind, _)| is_asked(kind)) {
            let (files, tokenizers, name) = ([&given_files[..], &more].concat(), tokenizers.clone(), name.clone());
            let ignored = tokenizers.is_none();
            let trial = Trial::test(format!("{name}::{kind}"), move || {
                let dir = tokenizers.ok_or("MOEBIUS_TOKENIZERS is not set")?.join(&name);
                let mut golden = Golden::default();
                for path in files {
                    let file = Golden::read(&path)?;
                    println!("{}: {} texts, {} conversations", path.display(), file.encode.len(), file.chat.len());
                    golden.encode.extend(file.encode);
                    golden.chat.extend(file.chat);
                }
                check(&Case { name, tokenizer: Tokenizer::from_folder(&dir)?, dir, golden })
            });
            trials.push(trial.with_ignored_flag(ignored));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

type Check = fn(&Case) -> Result<(), Failed>;

/// A tokenizer, and what is expected of it.
struct Case {
    name: String,
    dir: PathBuf,
    tokenizer: Tokenizer,
    golden: Golden,
}

/// Passes where nothing differs and something was compared.
fn conclude(name: &str, what: &str, compared: usize, differences: &[String]) -> Result<(), Failed> {
    println!("{name}: {compared} {what} compared, {} differ", differences.len());
    match differences {
        [] if compared == 0 => Err(format!("{name}: no {what} compared").into()),
        [] => Ok(()),
        _ => Err(format!("{} of {compared} differ:\n{}", differences.len(), differences.join("\n")).into()),
    }
}

fn texts(case: &Case) -> Result<(), Failed> {
    let encodings = &case.golden.encode;
    let mut differences = Vec::new();
    for Encoding { text, ids, decoded } in encodings {
        let (found, back) = (case.tokenizer.encode(text)?, case.tokenizer.decode(ids, false)?);
        if found != *ids || decoded.as_ref().is_some_and(|decoded| back != *decoded) {
            differences.push(format!("{text:?}: ids {ids:?}, text {decoded:?}; found {found:?}, {back:?}"));
        }
    }
    conclude(&case.name, "texts", encodings.len(), &differences)
}

fn conversations(case: &Case) -> Result<(), Failed> {
    let template = ChatTemplate::from_folder(&case.dir)?;
    let (compared, differences) = differences(&template, &case.golden.chat, Some(&case.tokenizer))?;
    conclude(&case.name, "conversations", compared, &differences)
}

/// Conversations that need no tokenizer: without ids.
fn renderings(path: &Path) -> Result<(), Failed> {
    let (compared, differences) = differences(&ChatTemplate::harmony(), &Golden::read(path)?.chat, None)?;
    conclude("harmony", "conversations", compared, &differences)
}

/// How many records were compared, and those that the template renders to another text (`rendered`), or to other ids
/// (`ids`) by the tokenizer, where there is one, or does not refuse as it should (`error`). One that expects nothing differs.
fn differences(
    template: &ChatTemplate,
    records: &[Value],
    tokenizer: Option<&Tokenizer>,
) -> Result<(usize, Vec<String>), Failed> {
    let (mut compared, mut differences) = (0, Vec::new());
    for record in records {
        let chat = conversation(record)?;
        let got = template.render(&chat);
        let field = |name: &str| record.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none());
        let (rendered, ids) = (field("rendered"), field("ids"));
        let same = match got {
            // Where transformers failed.
            Err(_) => field("error").is_some() && rendered.is_none() && ids.is_none(),
            Ok(_) if rendered.is_none() && ids.is_none() => false,
            Ok(ref text) => {
                let same_text = rendered.as_ref().is_none_or(|rendered| rendered.as_str() == Some(text));
                let same_ids = match (&ids, tokenizer) {
                    (Some(ids), Some(tokenizer)) => {
                        let expected: Vec<u32> = Deserialize::deserialize(ids.clone())?;
                        tokenizer.encode_chat(template, &chat)? == expected
                    }
                    // Without a tokenizer ids alone compare nothing.
                    (Some(_), None) if rendered.is_none() => continue,
                    _ => true,
                };
                same_text && same_ids
            }
        };
        compared += 1;
        if !same {
            let ids = tokenizer.map(|tokenizer| tokenizer.encode_chat(template, &chat));
            differences.push(format!("{record}\nfound {got:?}, {ids:?}"));
        }
    }
    Ok((compared, differences))
}

/// Every kind of expectation counts, and none passes for another.
fn expectations() -> Result<(), Failed> {
    let dir = chat_folder::chat_folder(&chat_folder::tokenizer_json(false));
    let (template, tokenizer) = (ChatTemplate::from_folder(dir.path())?, Tokenizer::from_folder(dir.path())?);
    let text = "[user] Hi\n";
    let ids = tokenizer.encode(text)?;
    let wrong = tokenizer.encode("[user] Ho\n")?;
    let user = serde_json::json!({"role": "user", "content": "Hi"});
    let system = serde_json::json!({"role": "system", "content": "Hi"});
    let record = |message: &serde_json::Value, fields: serde_json::Value| {
        let mut record = fields;
        record["messages"] = serde_json::json!([message]);
        record
    };
    // Compared with a tokenizer and without; differing with one and without.
    let cases = [
        (record(&user, serde_json::json!({"rendered": text, "ids": ids})), [1, 1, 0, 0]),
        (record(&user, serde_json::json!({"ids": ids})), [1, 0, 0, 0]),
        (record(&user, serde_json::json!({"rendered": null, "ids": wrong})), [1, 0, 1, 0]),
        (record(&user, serde_json::json!({"rendered": text, "ids": wrong})), [1, 1, 1, 0]),
        (record(&user, serde_json::json!({"rendered": text})), [1, 1, 0, 0]),
        (record(&user, serde_json::json!({"rendered": "[user] Ho\n"})), [1, 1, 1, 1]),
        (record(&user, serde_json::json!({})), [1, 1, 1, 1]),
        (record(&user, serde_json::json!({"error": "no system"})), [1, 1, 1, 1]),
        (record(&system, serde_json::json!({"error": "no system"})), [1, 1, 0, 0]),
        (record(&system, serde_json::json!({"ids": ids})), [1, 1, 1, 1]),
    ];
    for (case, [compared, plain, differ, differ_plain]) in cases {
        let records: [Value; 1] = [serde_json::from_str(&case.to_string())?];
        for (tokenizer, expected) in [(Some(&tokenizer), (compared, differ)), (None, (plain, differ_plain))] {
            let found = differences(&template, &records, tokenizer)?;
            if (found.0, found.1.len()) != expected {
                return Err(format!("{case}: expected {expected:?}, found {found:?}").into());
            }
        }
    }
    conclude("none", "records", 0, &[]).err().map(drop).ok_or_else(|| "nothing compared passes".into())
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
    let mut sequences: Vec<Vec<u32>> = case.golden.encode.iter().map(|e| e.ids.clone()).collect();
    let known: Vec<u32> = sequences.concat();
    if known.is_empty() {
        return Err("no text".into());
    }
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
    conclude(&case.name, "streams", sequences.len(), &differences)
}
