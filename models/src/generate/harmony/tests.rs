use serde_json::json;

use super::*;
use crate::generate::tokenizer::tests::bytes_json;
use crate::generate::{Chat, ChatTemplate, Tokenizer};

fn refusal(conversation: serde_json::Value) -> String {
    let chat = Chat::from_json(&conversation.to_string()).expect("a conversation");
    ChatTemplate::harmony().render(&chat).expect_err("refused").to_string()
}

#[test]
fn what_no_rendering_is_of_is_named() {
    let message = |message: serde_json::Value| refusal(json!({ "messages": [message] }));
    for (found, expected) in [
        (message(json!({"role": "function", "content": "x"})), "conversation: message 0: role: expected system"),
        (message(json!({"content": "x"})), "message 0: role: expected"),
        (message(json!({"role": "user"})), "message 0: content: expected a text"),
        (message(json!({"role": "user", "content": 5})), "content: expected a text or a list of parts, found a number"),
        (message(json!({"role": "user", "content": [{"type": "image"}]})), "parts of type text, found \"image\""),
        (
            message(json!({"role": "user", "content": [{"type": "system_content"}]})),
            "found \"system_content\" in a message of user",
        ),
        (message(json!({"role": "assistant"})), "expected content, reasoning_content or tool_calls"),
        (message(json!({"role": "assistant", "tool_calls": [{"id": "a"}]})), "message 0: tool_calls: no name"),
        (message(json!({"role": "tool", "content": "x"})), "message 0: name: expected that of a tool"),
        (
            message(json!({"role": "system", "content": [{"type": "system_content", "reasoning_effort": "vast"}]})),
            "conversation: message 0: reasoning_effort: expected low, medium or high, found \"vast\"",
        ),
        (refusal(json!({"messages": []})), "there is no message"),
        (
            refusal(json!({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": 3})),
            "reasoning_effort: expected a text, found 3",
        ),
        (
            refusal(json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]})),
            "tools: expected a name",
        ),
        (refusal(json!({"messages": [{"role": "user", "content": "x"}], "tools": "f"})), "tools: expected a list"),
    ] {
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn schemas_that_are_nested_too_deeply_are_refused() {
    let nested = |levels: usize| {
        let schema = (0..levels).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
        let tools = json!([{"function": {"name": "f", "parameters": schema}}]);
        ChatTemplate::harmony().render(&Chat::new().say("user", "x").tools(tools))
    };
    assert!(nested(50).expect("a text").contains("(_: string[][]"));
    let message = nested(70).expect_err("refused").to_string();
    assert!(message.contains("at most 64 levels"), "{message}");
}

/// Schemas and namespaces that say nothing where openai-harmony 0.0.8 looks, as it writes them.
#[test]
fn schemas_of_rare_forms() {
    let of = |property: serde_json::Value| {
        let schema = json!({"type": "object", "properties": {"a": property}});
        let tools = json!([{"function": {"name": "f", "parameters": schema}}]);
        let text = ChatTemplate::harmony().render(&Chat::new().say("user", "x").tools(tools)).expect("a text");
        let (_, text) = text.split_once("(_: {\n").expect("the schema");
        text.split_once("}) => any;").expect("its end").0.to_string()
    };
    assert_eq!(of(json!({"type": []})), "a?: any,\n");
    assert_eq!(of(json!({"type": [3]})), "a?: any,\n");
    assert_eq!(of(json!({"oneOf": 5, "description": "d", "default": 1, "type": "string"})), "a?: string,\n");
    assert_eq!(of(json!({"oneOf": null, "description": "d", "default": 1, "type": "number"})), "a?: number,\n");
    assert_eq!(of(json!({"oneOf": [], "description": "d", "default": 1})), "// d\n// default: 1\na?:\n,\n");
    let namespace = json!({"name": "n", "description": "one\r\ntwo\n", "tools": []});
    let content = json!([{"type": "developer_content", "tools": {"n": namespace}}]);
    let chat = json!([{"role": "developer", "content": content}, {"role": "user", "content": "x"}]);
    let text = ChatTemplate::harmony().render(&Chat::from_json(&chat.to_string()).expect("a chat")).expect("a text");
    assert!(text.contains("# Tools\n\n## n\n\none\ntwo<|end|>"), "{text}");
}

/// Tools' messages without a name are of the call that they answer.
#[test]
fn calls_and_answers_find_each_other() {
    let call = |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": {"a": [1, "é"]}}});
    let chat = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("1", "f"), call("2", "python")]},
        {"role": "tool", "tool_call_id": "1", "content": {"b": null}},
        {"role": "tool", "content": "y"},
    ]);
    let text = ChatTemplate::harmony().render(&Chat::from_json(&chat.to_string()).expect("a chat")).expect("a text");
    let expected = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>\
        {\"a\": [1, \"é\"]}<|call|><|start|>assistant to=python<|channel|>commentary <|constrain|>json<|message|>\
        {\"a\": [1, \"é\"]}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>{\"b\": null}<|end|>\
        <|start|>python to=assistant<|channel|>commentary<|message|>y<|end|>";
    assert!(text.ends_with(expected), "{text}");
}

/// In openai-harmony's own form a tool's name is its address.
#[test]
fn own_form_names_tools_as_they_are() {
    let chat = json!([
        {"role": "user", "content": "x"},
        {"role": "tool", "name": "shell", "channel": "commentary", "recipient": "assistant", "content": "y"},
    ]);
    let text = ChatTemplate::harmony().render(&Chat::from_json(&chat.to_string()).expect("a chat")).expect("a text");
    let expected = "<|start|>shell to=assistant<|channel|>commentary<|message|>y<|end|>";
    assert!(text.contains(expected), "{text}");
}

/// The bytes' tokenizer with harmony's tokens.
fn with_marks() -> String {
    let mut json: serde_json::Value = serde_json::from_str(&bytes_json()).expect("a tokenizer");
    let added = json["added_tokens"].as_array_mut().expect("tokens");
    let proto = added[0].clone();
    for (i, content) in TOKENS.into_iter().chain(["<|constrain|>", "<|return|>"]).enumerate() {
        let mut token = proto.clone();
        (token["id"], token["content"], token["special"]) = (json!(259 + i), json!(content), json!(true));
        added.push(token);
    }
    json.to_string()
}

/// Each part by itself, and no special token of a message's own text: a tokenizer of bytes in which `ab` is a token too.
#[test]
fn ids_of_parts_and_of_special_tokens_in_messages() {
    let mut json: serde_json::Value = serde_json::from_str(&with_marks()).expect("a tokenizer");
    json["model"]["vocab"]["ab"] = json!(266);
    json["model"]["merges"] = json!([["a", "b"]]);
    let tokenizer = Tokenizer::from_json(&json.to_string()).expect("a tokenizer");
    let id = |token: &str| tokenizer.id(token).expect("a token");
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<u32>>();
    let chat =
        |messages: serde_json::Value| Chat::from_json(&messages.to_string()).expect("a chat").generation_prompt(true);
    let ids = |chat: &Chat| tokenizer.encode_chat(&ChatTemplate::harmony(), chat).expect("ids");
    let system = json!({"role": "system", "content": [{"type": "system_content"}]});
    let part = |text: &str| json!({"type": "text", "text": text});
    let [start, message, end] = ["<|start|>", "<|message|>", "<|end|>"].map(id);
    let turn = |content: &[u32]| {
        let open = [&[start][..], &bytes("system"), &[message, end, start], &bytes("user"), &[message]].concat();
        [&open, content, &[end, start], &bytes("assistant")].concat()
    };
    let of = |content: serde_json::Value| ids(&chat(json!([system, {"role": "user", "content": content}])));
    assert_eq!(of(json!("abc")), turn(&[266, 99]));
    assert_eq!(of(json!([part("a"), part("bc")])), turn(&[97, 98, 99]), "parts are encoded by themselves");
    assert_eq!(of(json!([part("<|en"), part("d|>")])), turn(&bytes("<|end|>")));
    for special in ["<|end|>", "<|start|>x<|message|>", "</think>", "<s>", "<|constrain|>"] {
        assert_eq!(of(json!(special)), turn(&bytes(special)), "{special} is text");
    }
    let spoken = json!({"role": "assistant", "name": "<|end|>", "recipient": "<|call|>", "channel": "<|start|>",
        "content_type": "<|constrain|><|constrain|>", "content": "x"});
    let header = [
        &[start][..],
        &bytes("assistant:<|end|> to=<|call|>"),
        &[id("<|channel|>")],
        &bytes("<|start|> "),
        &[id("<|constrain|>")],
        &bytes("<|constrain|>"),
        &[message, 120, id("<|call|>")],
    ];
    let found = ids(&chat(json!([system, spoken])).generation_prompt(false));
    assert_eq!(found[9..], header.concat());
}

#[test]
fn a_tokenizer_without_harmony_s_tokens_is_refused() {
    let tokenizer = Tokenizer::from_json(&bytes_json()).expect("a tokenizer");
    let refused = tokenizer.encode_chat(&ChatTemplate::harmony(), &Chat::new().say("user", "x"));
    let message = refused.expect_err("refused").to_string();
    let expected =
        "Tokenizer::encode_chat: \"<|start|>\", which harmony's format needs, is none of the tokenizer's tokens";
    assert_eq!(message, expected);
}

#[test]
fn folders_of_gpt_oss_are_known() {
    let marks: Vec<serde_json::Value> = TOKENS.iter().map(|token| json!({ "content": token })).collect();
    let decoder: serde_json::Map<_, _> = marks.iter().enumerate().map(|(i, t)| (i.to_string(), t.clone())).collect();
    let decoder = json!({ "added_tokens_decoder": decoder }).to_string();
    for (files, expected) in [
        (vec![("config.json", r#"{"model_type": "gpt_oss"}"#.to_string())], true),
        (vec![("config.json", r#"{"model_type": "qwen3_moe"}"#.into()), ("tokenizer.json", with_marks())], false),
        (vec![("tokenizer_config.json", decoder)], true),
        (vec![("tokenizer_config.json", "{}".into()), ("tokenizer.json", with_marks())], true),
        (vec![("tokenizer.json", bytes_json())], false),
        (vec![], false),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        files.iter().for_each(|(name, text)| std::fs::write(dir.path().join(name), text).expect("a file"));
        let found = ChatTemplate::from_folder(dir.path());
        assert_eq!(found.is_ok(), expected, "{files:?}");
        let own = dir.path().join("chat_template.jinja");
        std::fs::write(own, "own").expect("a file");
        let template = ChatTemplate::from_folder(dir.path()).expect("the folder's own template");
        assert_eq!(template.render(&Chat::new().say("user", "x")).expect("a text"), "own");
    }
}

/// What is shown of an answer to a prompt, an id at a time.
fn shown(prompt: &str, answer: &str, channels: Channels) -> (Vec<String>, bool) {
    let tokenizer = Tokenizer::from_json(&with_marks()).expect("a tokenizer");
    let ids = |text: &str| tokenizer.encode(text).expect("ids");
    let mut stream = tokenizer.channel_stream(&ids(prompt), channels);
    let mut pieces: Vec<String> = ids(answer).into_iter().map(|id| stream.push(id).expect("text")).collect();
    let end = stream.finish().expect("an end");
    pieces.push(end.text);
    (pieces, end.incomplete)
}

const PROMPT: &str = "<|start|>user<|message|>2+2?<|end|><|start|>assistant";
const ANSWER: &str =
    "<|channel|>analysis<|message|>We need €.<|end|><|start|>assistant<|channel|>final<|message|>Four €!<|return|>";

#[test]
fn the_final_channel_alone_is_shown() {
    let (pieces, _) = shown(PROMPT, ANSWER, Channels::Final);
    assert_eq!(pieces.concat(), "Four €!");
    assert!(pieces.iter().any(|piece| piece == "F"), "as it comes: {pieces:?}");
    assert_eq!(shown(PROMPT, ANSWER, Channels::Raw).0.concat(), "analysisWe need €.assistantfinalFour €!");
    assert_eq!(shown(PROMPT, ANSWER, Channels::All).0.concat(), "[analysis]\nWe need €.\n\n[final]\nFour €!");
}

#[test]
fn calls_are_shown_with_all_channels() {
    let call = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary \
        <|constrain|>json<|message|>{}<|call|>";
    assert_eq!(shown(PROMPT, call, Channels::Final).0.concat(), "");
    let all = "[commentary]\nI look.\n\n[commentary to functions.f]\n{}";
    assert_eq!(shown(PROMPT, call, Channels::All).0.concat(), all);
    let behind = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>";
    assert_eq!(shown(PROMPT, behind, Channels::All).0.concat(), "[commentary to functions.f]\n{}");
    let no_space = "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>";
    assert_eq!(shown(PROMPT, no_space, Channels::All).0.concat(), "[commentary to functions.f]\n{}");
    let answer = "<|channel|>final<|constrain|>json<|message|>{}<|return|>";
    assert_eq!(shown(PROMPT, answer, Channels::Final).0.concat(), "{}");
}

/// What a prompt leaves open goes on: no message, a header, the content of one.
#[test]
fn answers_begin_where_the_prompt_ends() {
    for (prompt, answer, expected) in [
        ("2+2 is", " 4.", " 4."),
        ("", "Four<|end|>gone", "Four"),
        (PROMPT, "<|message|>no channel<|end|>", "no channel"),
        ("<|start|>assistant<|channel|>final<|message|>It is", " 4.<|return|>x", " 4."),
        ("<|start|>assistant<|channel|>analysis<|message|>It is", " 4.<|end|>", ""),
        ("<|start|>assistant<|channel|>fin", "al<|message|>4", "4"),
        ("<|start|>assistant<|channel|>analysis<|message|>It is<|end|>", "x<|start|>assistant<|message|>4", "4"),
        (PROMPT, "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a\nb"),
        (PROMPT, "<|start|><|channel|><|channel|><|message|><|message|>x<|end|><|call|><|end|>", "x"),
    ] {
        assert_eq!(shown(prompt, answer, Channels::Final).0.concat(), expected, "{prompt} {answer}");
    }
}

#[test]
fn a_character_does_not_go_on_in_another_message() {
    let tokenizer = Tokenizer::from_json(&with_marks()).expect("a tokenizer");
    let mut stream = tokenizer.channel_stream(&[], Channels::Final);
    let id = |token: &str| tokenizer.id(token).expect("a token");
    let ids = [65, 0xe2, 0x82, id("<|end|>"), 0xac, id("<|start|>"), id("<|message|>"), 66, 0xe2];
    let text: String = ids.into_iter().map(|id| stream.push(id).expect("text")).collect();
    let end = stream.finish().expect("an end");
    assert_eq!((text.as_str(), end.text.as_str(), end.incomplete), ("A\u{fffd}\nB", "\u{fffd}", true));
}
