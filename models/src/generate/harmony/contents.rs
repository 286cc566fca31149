//! What system and developer messages say.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::problem;
use super::typescript::{field, items, list, text, type_of};
use crate::generate::error::Result;

/// Who the model is, where a conversation does not say.
const IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.";
/// How far its knowledge goes.
const CUTOFF: &str = "2024-06";
const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];
/// The tools that calls in the commentary channel are of.
const FUNCTIONS: &str = "functions";

/// A system message.
#[derive(Debug, Clone)]
pub(super) struct SystemMessage {
    identity: Option<String>,
    cutoff: Option<String>,
    date: Option<String>,
    effort: Option<String>,
    tools: Vec<Namespace>,
    channels: Option<ValidChannels>,
}

#[derive(Debug, Clone)]
struct ValidChannels {
    names: Vec<String>,
    required: bool,
}

/// A developer message.
#[derive(Debug, Clone, Default)]
pub(super) struct DeveloperMessage {
    instructions: Option<String>,
    /// With the name that the message has them under.
    tools: Vec<(String, Namespace)>,
}

/// Tools that are called by one prefix.
#[derive(Debug, Clone)]
struct Namespace {
    name: String,
    description: Option<String>,
    tools: Vec<Tool>,
}

#[derive(Debug, Clone)]
struct Tool {
    name: String,
    description: String,
    parameters: Option<Value>,
}

impl SystemMessage {
    /// Of a conversation that has no such message: what its variables say, else the usual. There is no date unless one is
    /// given, so that a rendering can be made again.
    pub fn from_variables(variable: impl Fn(&str) -> Option<Value>) -> Result<Self> {
        let or = |name: &str, usual: &str| match variable(name) {
            None => Ok(Some(usual.to_string())),
            Some(value) => optional(name, &value),
        };
        let date = variable("current_date").or_else(|| variable("conversation_start_date"));
        let names = match variable("valid_channels") {
            None => Some(CHANNELS.map(String::from).to_vec()),
            Some(value) if value.is_none() => None,
            Some(value) => Some(texts("valid_channels", &value)?),
        };
        Ok(Self {
            identity: or("model_identity", IDENTITY)?,
            cutoff: or("knowledge_cutoff", CUTOFF)?,
            date: date.map_or(Ok(None), |date| optional("current_date", &date))?,
            effort: or("reasoning_effort", "medium")?.map(effort).transpose()?,
            tools: Vec::new(),
            channels: names.map(|names| ValidChannels { names, required: true }),
        })
    }

    /// Of an object of type `system_content`; what it lacks is not there.
    pub fn from_content(content: &Value) -> Result<Self> {
        let channels = match field(content, "channel_config").filter(|config| !config.is_none()) {
            None => None,
            Some(config) => {
                let names = field(&config, "valid_channels").unwrap_or_default();
                let required = field(&config, "channel_required").is_some_and(|required| required.is_true());
                Some(ValidChannels { names: texts("valid_channels", &names)?, required })
            }
        };
        Ok(Self {
            identity: text(content, "model_identity"),
            cutoff: text(content, "knowledge_cutoff"),
            date: text(content, "conversation_start_date"),
            effort: text(content, "reasoning_effort").map(effort).transpose()?,
            tools: namespaces(content)?.into_iter().map(|(_, namespace)| namespace).collect(),
            channels,
        })
    }

    /// `has_functions`: the conversation's developer has tools that are called in the commentary channel.
    pub fn text(&self, has_functions: bool) -> Result<String> {
        let line = |name: &str, value: &Option<String>| value.as_ref().map(|value| format!("{name}: {value}"));
        let lines = [self.identity.clone(), line("Knowledge cutoff", &self.cutoff), line("Current date", &self.date)];
        let lines: Vec<String> = lines.into_iter().flatten().collect();
        let mut sections: Vec<String> = Vec::new();
        sections.extend((!lines.is_empty()).then(|| lines.join("\n")));
        sections.extend(line("Reasoning", &self.effort));
        sections.extend(section(self.tools.iter())?);
        if let Some(channels) = self.channels.as_ref().filter(|channels| !channels.names.is_empty()) {
            let mut text = format!("# Valid channels: {}.", channels.names.join(", "));
            if channels.required {
                text += " Channel must be included for every message.";
            }
            if has_functions {
                text += "\nCalls to these tools must go to the commentary channel: 'functions'.";
            }
            sections.push(text);
        }
        Ok(sections.join("\n\n"))
    }
}

impl DeveloperMessage {
    pub fn of_instructions(text: String) -> Self {
        Self { instructions: Some(text), ..Self::default() }
    }

    /// Of an object of type `developer_content`.
    pub fn from_content(content: &Value) -> Result<Self> {
        Ok(Self { instructions: text(content, "instructions"), tools: namespaces(content)? })
    }

    /// Adds the tools of a conversation, a list of functions as chat templates take them.
    pub fn add_functions(&mut self, tools: &Value) -> Result<()> {
        let tools = items(tools).ok_or_else(|| problem(format!("tools: expected a list, found a {}", tools.kind())))?;
        if tools.is_empty() {
            return Ok(());
        }
        let tools = tools.iter().map(|tool| Tool::read(&field(tool, "function").unwrap_or_else(|| tool.clone())));
        let tools: Vec<Tool> = tools.collect::<Result<_>>()?;
        match self.tools.iter_mut().find(|(key, _)| key == FUNCTIONS) {
            Some((_, functions)) => functions.tools.extend(tools),
            None => {
                let functions = Namespace { name: FUNCTIONS.into(), description: None, tools };
                self.tools.push((FUNCTIONS.into(), functions));
            }
        }
        Ok(())
    }

    pub fn has_functions(&self) -> bool {
        self.tools.iter().any(|(key, namespace)| key == FUNCTIONS && !namespace.tools.is_empty())
    }

    pub fn text(&self) -> Result<String> {
        let instructions = self.instructions.as_ref().map(|text| format!("# Instructions\n\n{text}"));
        let mut tools: Vec<&(String, Namespace)> = self.tools.iter().collect();
        tools.sort_by(|(a, _), (b, _)| a.cmp(b));
        let tools = section(tools.into_iter().map(|(_, namespace)| namespace))?;
        Ok(instructions.into_iter().chain(tools).collect::<Vec<_>>().join("\n\n"))
    }
}

/// The part of a message that lists tools.
fn section<'a>(namespaces: impl Iterator<Item = &'a Namespace>) -> Result<Option<String>> {
    let parts: Vec<String> = namespaces.map(Namespace::text).collect::<Result<_>>()?;
    Ok((!parts.is_empty()).then(|| format!("# Tools\n\n{}", parts.join("\n\n"))))
}

impl Namespace {
    fn text(&self) -> Result<String> {
        let name = &self.name;
        let mut out = format!("## {name}\n");
        let description = self.description.as_deref().unwrap_or_default();
        if self.tools.is_empty() {
            // Such a tool takes text as it is.
            if !description.is_empty() {
                out += &format!("\n{}", description.lines().collect::<Vec<_>>().join("\n"));
            }
            return Ok(out);
        }
        out += &format!("\n{}namespace {name} {{\n", comments(description));
        for tool in &self.tools {
            let parameters = match &tool.parameters {
                Some(schema) => format!("_: {}", type_of(schema)?),
                None => String::new(),
            };
            out += &format!("\n{}type {} = ({parameters}) => any;\n", comments(&tool.description), tool.name);
        }
        Ok(format!("{out}\n}} // namespace {name}"))
    }
}

impl Tool {
    fn read(value: &Value) -> Result<Self> {
        let name = text(value, "name").ok_or_else(|| problem(format!("tools: expected a name in {value}")))?;
        let description = text(value, "description").unwrap_or_default();
        Ok(Self { name, description, parameters: field(value, "parameters").filter(|schema| !schema.is_none()) })
    }
}

/// Tools of a content, in the order of their names there.
fn namespaces(content: &Value) -> Result<Vec<(String, Namespace)>> {
    let Some(tools) = field(content, "tools").filter(|tools| tools.kind() == ValueKind::Map) else {
        return Ok(Vec::new());
    };
    let mut all = Vec::new();
    for key in tools.try_iter().into_iter().flatten() {
        let value = tools.get_item(&key).unwrap_or_default();
        let name = text(&value, "name").unwrap_or_else(|| key.to_string());
        let functions = list(&value, "tools").unwrap_or_default();
        let functions = functions.iter().map(Tool::read).collect::<Result<_>>()?;
        all.push((key.to_string(), Namespace { name, description: text(&value, "description"), tools: functions }));
    }
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}

fn comments(text: &str) -> String {
    text.lines().map(|line| format!("// {line}\n")).collect()
}

fn optional(name: &str, value: &Value) -> Result<Option<String>> {
    match value.as_str() {
        Some(text) => Ok(Some(text.into())),
        None if value.is_none() => Ok(None),
        None => Err(problem(format!("{name}: expected a text, found {value}"))),
    }
}

fn texts(name: &str, value: &Value) -> Result<Vec<String>> {
    let texts = items(value).and_then(|all| all.iter().map(|text| text.as_str().map(str::to_string)).collect());
    texts.ok_or_else(|| problem(format!("{name}: expected a list of texts, found {value}")))
}

fn effort(text: String) -> Result<String> {
    match text.to_lowercase() {
        lower if ["low", "medium", "high"].contains(&&lower[..]) => Ok(lower),
        _ => Err(problem(format!("reasoning_effort: expected low, medium or high, found {text:?}"))),
    }
}
