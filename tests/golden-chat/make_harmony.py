"""Expected renderings of gpt-oss' conversations, made with openai-harmony 0.0.8, and their ids by tokenizer.json.

usage: TIKTOKEN_ENCODINGS_BASE=DIR make_harmony.py TOKENIZER_JSON OUT   (DIR holds o200k_base.tiktoken)

Records have the keys that chat templates take, which is the form that most callers have; `harmony` says how each of
these becomes openai-harmony's messages. Records of messages in openai-harmony's own form are its own JSON."""
import json
import random
import sys

from openai_harmony import (
    Author, Conversation, DeveloperContent, HarmonyEncodingName, Message, ReasoningEffort, RenderConversationConfig, Role,
    SystemContent, ToolDescription, ToolNamespaceConfig, load_harmony_encoding)
from tokenizers import Tokenizer

encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
tokenizer = Tokenizer.from_file(sys.argv[1])
rng = random.Random(18)


def functions(tools):
    each = [tool["function"] for tool in tools]
    return [ToolDescription(name=f["name"], description=f.get("description", ""), parameters=f.get("parameters")) for f in each]


def harmony(record):
    """A conversation in chat templates' form as openai-harmony's messages."""
    system = SystemContent.new()
    fields = {"model_identity": "model_identity", "knowledge_cutoff": "knowledge_cutoff", "current_date": "conversation_start_date"}
    for name, field in fields.items():
        if name in record:
            setattr(system, field, record[name])
    if "reasoning_effort" in record:
        system.reasoning_effort = ReasoningEffort(record["reasoning_effort"].capitalize())
    out, called = [Message.from_role_and_content(Role.SYSTEM, system)], []
    tools = record.get("tools")
    roles = [m["role"] for m in record["messages"]]
    if tools and "system" not in roles and "developer" not in roles:
        out.append(Message.from_role_and_content(Role.DEVELOPER, DeveloperContent.new().with_function_tools(functions(tools))))
        tools = None
    for m in record["messages"]:
        role, content = m["role"], m.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if role in ("system", "developer"):
            developer = DeveloperContent.new().with_instructions(content)
            if tools:
                developer, tools = developer.with_function_tools(functions(tools)), None
            out.append(Message.from_role_and_content(Role.DEVELOPER, developer))
        elif role == "user":
            out.append(Message.from_role_and_content(Role.USER, content))
        elif role == "tool":
            name = m.get("name") or next(name for key, name in called if key == m["tool_call_id"])
            author = Author.new(Role.TOOL, "functions." + name)
            out.append(Message.from_author_and_content(author, content).with_channel("commentary").with_recipient("assistant"))
        else:
            say = lambda text, channel: out.append(Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel))
            if m.get("reasoning_content") or m.get("thinking"):
                say(m.get("reasoning_content") or m["thinking"], "analysis")
            calls = m.get("tool_calls") or []
            if calls and content:
                say(content, "commentary")
            elif not calls and content is not None:
                say(content, "final")
            for call in calls:
                f = call["function"]
                called.append((call.get("id"), f["name"]))
                arguments = f["arguments"] if isinstance(f["arguments"], str) else json.dumps(f["arguments"], ensure_ascii=False)
                say(arguments, "commentary")
                out[-1] = out[-1].with_recipient("functions." + f["name"]).with_content_type("<|constrain|>json")
    return out


records = []


def add(record, messages=None):
    for prompt in (True, False):
        conversation = Conversation.from_messages(messages or harmony(record))
        config = RenderConversationConfig(auto_drop_analysis=record.get("auto_drop_analysis", True))
        if prompt:
            ids = encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, config)
        else:
            ids = encoding.render_conversation(conversation, config)
        rendered = encoding.decode(ids)
        own = tokenizer.encode(rendered, add_special_tokens=False).ids
        # It tokenizes a message's parts one by one, and what looks like a special token in them as text.
        assert tokenizer.decode(own, skip_special_tokens=False) == rendered
        records.append({**record, "add_generation_prompt": prompt, "rendered": rendered, "ids": own})


user = lambda text: {"role": "user", "content": text}
system = lambda text: {"role": "system", "content": text}
final = lambda text, **more: {"role": "assistant", "content": text, **more}
city = {"type": "object", "properties": {
    "location": {"type": "string", "description": "City and country, e.g. \"Köln, Germany\""},
    "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}, "required": ["location"]}
weather = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.\nNow.", "parameters": city}}
location = {"type": "function", "function": {"name": "get_location", "description": "Where the user is."}}
call = lambda arguments, key=None: {"type": "function", "function": {"name": "get_weather", "arguments": arguments}, **({"id": key} if key else {})}
ask = final(None, reasoning_content="I need the weather.", tool_calls=[call("{\"location\":\"Köln\"}", "c1")])
answer = {"role": "tool", "tool_call_id": "c1", "content": "{\"temperature\": 20}"}

add({"messages": [user("Hi")]})
add({"messages": [system("You are terse."), user("Name a prime.")]})
add({"messages": [{"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]}, user("日本語のテスト 🙂")]})
add({"messages": [system(""), user("  spaces kept?  ")]})
add({"messages": [user("2+2?"), final("4"), user("And 3+3?")]})
for effort in ("low", "medium", "high"):
    add({"messages": [user("Hi")], "reasoning_effort": effort, "current_date": "2025-06-28"})
add({"messages": [user("Hi")], "model_identity": "You are a helper.", "knowledge_cutoff": "2025-01"})
add({"messages": [user("Hi")], "model_identity": None, "knowledge_cutoff": None})
reasoned = [user("2+2?"), final("4", reasoning_content="Easy."), user("3+3?"), final("6", reasoning_content="As easy.")]
add({"messages": reasoned})
add({"messages": [*reasoned, user("4+4?")]})
add({"messages": reasoned, "auto_drop_analysis": False})
add({"messages": [user("2+2?"), final(None, reasoning_content="Easy.")]})
add({"messages": [user("Weather?")], "tools": [weather]})
add({"messages": [system("Be brief."), user("Weather?")], "tools": [weather, location]})
add({"messages": [user("Weather?"), ask], "tools": [weather]})
add({"messages": [user("Weather?"), ask, answer], "tools": [weather]})
add({"messages": [user("Weather?"), ask, answer, final("20 degrees.", reasoning_content="It is 20."), user("Thanks")], "tools": [weather]})
add({"messages": [user("1?"), final("1", reasoning_content="One."), user("Weather?"), final("I look.", tool_calls=[call({"location": "Köln", "n": [1, 2.5, None, True]}, "c1"), call({}, "c2")]),
                  answer, {"role": "tool", "name": "get_weather", "content": "none"}], "tools": [weather]})


def tool(name, description, parameters):
    function = {"name": name, "description": description}
    return {"type": "function", "function": function | ({"parameters": parameters} if parameters else {})}


def fields(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


CITY_WEATHER = tool("get_weather", "Weather of a city.\nToday's.", fields(
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


made = lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}}
for record in [
    {"messages": [user("Hi")]},
    {"messages": [user("Hi")], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be terse."}, user("  spaces\n\nkept  ")], "reasoning_effort": "high"},
    {"messages": [{"role": "developer", "content": "Be terse."}, user("größe 日本 🙂")], "model_identity": "You are a test."},
    {"messages": [user("2+2?"), final("4"), user("3+3?")], "reasoning_effort": "low"},
    {"messages": [user("a"), final("b", thinking="t1"), user("c"), final("d", thinking="t2"), user("e")]},
    {"messages": [user("a"), final("b", thinking="t1")], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Ask."}, user("a")], "tools": [CITY_WEATHER]},
    {"messages": [user("a")], "tools": [CITY_WEATHER, ORDER, NOW, BARE]},
    {"messages": [user("a"), final("", thinking="t", tool_calls=[made("now", "{}")]),
                  {"role": "tool", "name": "now", "content": "12:00"}], "tools": [NOW]},
    {"messages": [user("a"), final("b", thinking="t1"), user("c"),
                  final("", thinking="t2", tool_calls=[made("get_weather", '{"city":"x"}')]),
                  {"role": "tool", "name": "get_weather", "content": '{"t": 3}'}], "tools": [CITY_WEATHER]},
    {"messages": [user("a"), final("I look.", thinking="t1", tool_calls=[made("now", "{}"), made("now", '{"z": 1}')]),
                  {"role": "tool", "name": "now", "content": "12:00"}, final("Noon.", thinking="t2"), user("Thanks")],
     "tools": [NOW]},
]:
    record.pop("add_generation_prompt", None)
    add({**record, "current_date": "2026-11-27"})


def schema(depth):
    """A random schema, with all that openai-harmony knows of."""
    x, r = {}, rng.random()
    if r < .3 and depth:
        x["type"] = "object"
    elif r < .45 and depth:
        x["type"] = "array"
    elif r < .6:
        x["type"] = "string"
    elif r < .7:
        x["type"] = rng.choice(["number", "integer", "boolean", "null", "foo"])
    elif r < .8:
        x["type"] = rng.sample(["null", "string", "integer", "number", "array", "object", "boolean"], rng.randint(1, 3))
    elif r < .95 and depth:
        x["oneOf"] = [schema(depth - 1) for _ in range(rng.randint(0, 3))]
    names = ["a", "bb", "c_c", "null", "é"]
    if x.get("type") == "object":
        x["properties"] = {name: schema(depth - 1) for name in rng.sample(names, rng.randint(0, 3))}
        x["required"] = rng.sample(names, rng.randint(0, 3))
    if x.get("type") == "array" and rng.random() < .8:
        x["items"] = schema(depth - 1)
    for share, key, values in [(.3, "description", ["d", "same", "two\nlines", ""]), (.1, "title", ["T", "t\nu"]),
                               (.1, "examples", [[], ["a", "b"], [1, "x"]]), (.25, "enum", [["a", "b"], [], ["x", 1, None], [1, 2]]),
                               (.25, "default", ["a", 1, 1.0, 2.5e-7, None, [1, "é"], {"k": 1.5}, "q\"\n", True]), (.2, "nullable", [True, True, False])]:
        if rng.random() < share:
            x[key] = rng.choice(values)
    return x


for _ in range(12):
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": rng.choice(["D", "", "a\n\nb\n"]), "parameters": schema(4)}} for i in range(3)]
    add({"messages": [user("Call.")], "tools": tools})


def own(*messages, **more):
    record = Conversation.from_messages(messages).to_dict()
    add({"messages": record["messages"], **more}, list(messages))


M, A, T = Message.from_role_and_content, Role.ASSISTANT, Role.TOOL
S, D = SystemContent.new, DeveloperContent.new
note = ToolNamespaceConfig(name="notes", description="Notes of\nthe user.", tools=functions([location]))
plain = ToolNamespaceConfig(name="shell", description="Runs a command.\n\nGives its output.", tools=[])
own(M(Role.SYSTEM, S()), M(Role.USER, "Hi"))
own(M(Role.SYSTEM, S().with_conversation_start_date("2025-06-28").with_reasoning_effort(ReasoningEffort.HIGH).with_tools(plain).with_tools(note)), M(Role.USER, "Hi"))
own(M(Role.SYSTEM, S().with_required_channels(["analysis", "final"])), M(Role.DEVELOPER, D().with_instructions("Rhyme.").with_tools(note).with_function_tools(functions([weather]))), M(Role.USER, "Hi"))
own(M(Role.SYSTEM, SystemContent(model_identity=None, reasoning_effort=None, knowledge_cutoff=None, channel_config=None)), M(Role.USER, "Hi"))
own(M(Role.SYSTEM, S()), Message.from_author_and_content(Author.new(Role.USER, "ann"), "x?"),
    M(A, "look").with_channel("analysis"), M(A, "ls").with_channel("analysis").with_recipient("shell").with_content_type("code"),
    Message.from_author_and_content(Author.new(T, "shell"), "a b").with_channel("analysis"),
    M(A, "seen").with_channel("analysis"), M(A, "a and b").with_channel("final").with_recipient("all"), M(Role.USER, "so"))
with open(sys.argv[2], "w") as file:
    file.write("[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n]\n")
print(len(records))
