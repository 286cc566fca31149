"""Renderings of gpt-oss conversations by openai-harmony 0.0.8 (PyPI), as tests/golden-chat/harmony.json has them.

    TIKTOKEN_ENCODINGS_BASE=DIR python3 make_harmony.py > harmony.json

DIR has o200k_base.tiktoken, where the library cannot fetch it: one can be made of gpt-oss's tokenizer.json. Each record
has the messages as chat templates take them, and what else a template is told.
"""
import json
import sys

import openai_harmony as h

DATE = "2026-11-27"
encoding = h.load_harmony_encoding(h.HarmonyEncodingName.HARMONY_GPT_OSS)


def tool(name, description, parameters):
    function = {"name": name, "description": description}
    return {"type": "function", "function": function | ({"parameters": parameters} if parameters else {})}


def fields(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


WEATHER = tool("get_weather", "Weather of a city.\nToday's.", fields(
    ["city"],
    city={"type": "string", "description": "Its name,\nin any language"},
    unit={"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
    days={"type": "integer", "default": 3, "description": "How many"},
    hours={"type": ["integer", "null"]},
    stations={"type": "array", "items": {"type": "string"}, "default": ["all"]},
    wind={"type": "boolean", "default": False},
    note={"type": "string", "nullable": True, "default": None}))
ORDER = tool("order", "Orders.", fields(
    ["what"],
    what={"oneOf": [{"type": "string", "description": "a name"}, {"type": "number", "description": "a number"}],
          "default": "tea", "description": "What to bring"},
    to={"type": "object", "description": "An address", "properties": {
        "street": {"type": "string", "description": "with the house"},
        "floors": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}}},
        "kind": {"type": "string", "enum": ["home", "work"], "default": "home"}}, "required": ["street"]},
    parts={"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
    modes={"type": "array", "items": {"type": "string", "enum": ["p", "q"]}},
    options={"type": "object", "default": {"fast": True}, "properties": {"fast": {"type": "boolean"}}},
    any={"anyOf": [{"type": "string"}, {"type": "number"}]},
    code={"type": "string", "title": "Code", "description": "of the shop", "examples": ["a1", "b2"], "default": "a1"},
    list={"type": "array"}, bag={"type": "object"}, nothing={}))
NOW = tool("now", "The time.", None)
BARE = tool("bare", "", {"type": "object", "properties": {}})


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text} | more


RECORDS = [
    {"messages": [user("Hi")]},
    {"messages": [user("Hi")], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be terse."}, user("  spaces\n\nkept  ")], "reasoning_effort": "high"},
    {"messages": [{"role": "developer", "content": "Be terse."}, user("größe 日本 🙂")], "model_identity": "You are a test."},
    {"messages": [user("2+2?"), answer("4"), user("3+3?")], "reasoning_effort": "low"},
    {"messages": [user("a"), answer("b", thinking="t1"), user("c"), answer("d", thinking="t2"), user("e")]},
    {"messages": [user("a"), answer("b", thinking="t1")], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Ask."}, user("a")], "tools": [WEATHER]},
    {"messages": [user("a")], "tools": [WEATHER, ORDER, NOW, BARE]},
    {"messages": [user("a"), answer("", thinking="t", tool_calls=[call("now", "{}")]),
                  {"role": "tool", "name": "now", "content": "12:00"}], "tools": [NOW]},
    {"messages": [user("a"), answer("b", thinking="t1"), user("c"),
                  answer("", thinking="t2", tool_calls=[call("get_weather", '{"city":"x"}')]),
                  {"role": "tool", "name": "get_weather", "content": '{"t": 3}'}], "tools": [WEATHER]},
    {"messages": [user("a"), answer("I look.", thinking="t1", tool_calls=[call("now", "{}"), call("now", '{"z": 1}')]),
                  {"role": "tool", "name": "now", "content": "12:00"}, answer("Noon.", thinking="t2"), user("Thanks")],
     "tools": [NOW]},
]


def messages(record):
    role, message = h.Role, h.Message.from_role_and_content
    system = h.SystemContent.new().with_conversation_start_date(DATE)
    system = system.with_reasoning_effort(record.get("reasoning_effort", "medium").capitalize())
    if "model_identity" in record:
        system = system.with_model_identity(record["model_identity"])
    yield message(role.SYSTEM, system)
    rest, tools = record["messages"], record.get("tools", [])
    told = rest[0]["role"] in ("system", "developer")
    if told or tools:
        developer = h.DeveloperContent.new()
        if told:
            developer = developer.with_instructions(rest[0]["content"])
        if tools:
            of = lambda f: h.ToolDescription.new(f["name"], f["description"], parameters=f.get("parameters"))
            developer = developer.with_function_tools([of(tool["function"]) for tool in tools])
        yield message(role.DEVELOPER, developer)
    for one in rest[told:]:
        if one["role"] == "user":
            yield message(role.USER, one["content"])
        elif one["role"] == "tool":
            author = h.Author.new(role.TOOL, "functions." + one["name"])
            result = h.Message.from_author_and_content(author, one["content"])
            yield result.with_channel("commentary").with_recipient("assistant")
        else:
            if "thinking" in one:
                yield message(role.ASSISTANT, one["thinking"]).with_channel("analysis")
            calls = one.get("tool_calls", [])
            if one["content"]:
                yield message(role.ASSISTANT, one["content"]).with_channel("commentary" if calls else "final")
            for made in calls:
                to = message(role.ASSISTANT, made["function"]["arguments"]).with_channel("commentary")
                to = to.with_recipient("functions." + made["function"]["name"])
                yield to.with_content_type("<|constrain|>json")


for record in RECORDS:
    record.setdefault("add_generation_prompt", True)
    conversation = h.Conversation.from_messages(list(messages(record)))
    if record["add_generation_prompt"]:
        record["ids"] = encoding.render_conversation_for_completion(conversation, h.Role.ASSISTANT)
    else:
        record["ids"] = encoding.render_conversation(conversation)
    record["rendered"] = encoding.decode(record["ids"])
json.dump({"date": DATE, "chat": RECORDS}, sys.stdout, ensure_ascii=False, indent=0)
print()
