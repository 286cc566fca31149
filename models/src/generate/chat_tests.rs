use super::*;

/// A conversation with what templates meet: calls of tools, parts of content, keys that are not in order.
fn chat() -> Chat {
    let text = r#"{
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments":
                {"z": 1.0, "a": [true, null, "x\"y\n\u0001"], "é": 1e-7, "c": {}}}}]},
            {"role": "user", "content": [{"type": "text", "text": "part"}]}
        ],
        "tools": [{"type": "function", "function": {"name": "get", "parameters": {"items": 1, "a": "<b>&'"}}}],
        "enable_thinking": false
    }"#;
    Chat::from_json(text).expect("a conversation")
}

fn render(source: &str) -> String {
    ChatTemplate::from_source(source).and_then(|t| t.render(&chat())).unwrap_or_else(|e| panic!("{source}: {e}"))
}

/// The first text is a template, the second what transformers 5.17 made of it.
#[test]
fn templates_mean_what_they_mean_in_python() {
    for (source, expected) in [
        (
            "{{ messages[1].tool_calls[0].function.arguments|tojson }}",
            r#"{"z": 1.0, "a": [true, null, "x\"y\n\u0001"], "é": 1e-07, "c": {}}"#,
        ),
        (
            "{{ tools[0]|tojson(indent=1) }}",
            "{\n \"type\": \"function\",\n \"function\": {\n  \"name\": \"get\",\n  \"parameters\": {\n   \"items\": 1,\n   \"a\": \"<b>&'\"\n  }\n }\n}",
        ),
        (
            "{{ {'é': 1, 'a': []}|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=True) }}",
            r#"{"a":[],"\u00e9":1}"#,
        ),
        (
            "{{ true }} {{ none }} {{ 1e16 }} {{ [1, 'a', none] }} {{ {'k': 'v'} }}",
            "True None 1e+16 [1, 'a', None] {'k': 'v'}",
        ),
        (
            "{{ x }}|{{ x is defined }}|{{ x|length }}|{{ messages[0].nope }}|{% for i in x %}a{% else %}b{% endfor %}",
            "|False|0||b",
        ),
        (
            "{{ tools is none }}{{ documents is none }}{{ enable_thinking is false }}{{ bos_token is defined }}",
            "FalseTrueTrueFalse",
        ),
        ("{% for k, v in tools[0].function.parameters.items() %}{{ k }}={{ v }};{% endfor %}", "items=1;a=<b>&';"),
        ("{{ tools[0].function.get('x') }}{{ tools[0].function.get('x', 'd') }}", "Noned"),
        (
            "{{ 'x' is sequence }}{{ {} is sequence }}{{ 1 is sequence }}{{ 'x' is iterable }}{{ {} is mapping }}",
            "TrueTrueFalseTrueTrue",
        ),
        (
            "{{ 'a</t>b</t>\n\nc'.split('</t>')[-1].lstrip('\n') }}{{ ' a  b c '.split(None, 1) }}{{ ' a b '.rsplit(maxsplit=1) }}",
            "c['a', 'b c '][' a', 'b']",
        ),
        (
            "{{ 'abc'.removeprefix('a').removesuffix('c') }}{{ 'a=b=c'.partition('=') }}{{ \"they're\".title() }}{{ '7'.zfill(3) }}{{ '--5'.zfill(5) }}",
            "b('a', '=', 'b=c')They'Re007-00-5",
        ),
        (
            "{{ messages[::-1][0].role }}{{ messages[:-1]|length }}{{ 'abc'[1:] }}{{ messages[-1].content[0]['text'] }}",
            "user2bcpart",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% set ns.n = ns.n + loop.index %}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}",
            "2",
        ),
        ("  {% if true %}\n  a\n  {%- endif %}\n\n  {% for i in [1] %}\n    b\n  {% endfor %}\nc\n", "  a\n    b\nc"),
        ("{% if true %}\r\nx\r\n{% endif %}\r\ny", "x\ny"),
        ("a\n{%- generation -%}\n {% set q = 1 %}b{{ q }}\n{%- endgeneration %}|{{ q }}", "ab1|"),
        ("{% macro m(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}", "1x12"),
        (
            "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='role')|join(',') }}",
            "2user,assistant,user",
        ),
        ("{{ 'x'|int }}{{ '12'|int + 1 }}{{ '2.5'|float }}{{ 3.7|int }}{{ 'q'|float }}{{ '2.9'|int }}", "0132.530.02"),
        ("{{ 'a' ~ 1 ~ true ~ none }}{{ '<b>' }}", "a1TrueNone<b>"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

#[test]
fn what_fails_in_python_is_an_error() {
    for source in [
        "{{ x.y }}",
        "{{ x + 'a' }}",
        "{{ 'a' + 1 }}",
        "{{ messages[1].content + 'a' }}",
        "{{ x|tojson }}",
        "{{ 'a'.nope() }}",
        "{% set _ = [].append(1) %}",
        "{% include 'other' %}",
        "{{ 1 // 0 }}",
        "{{ ', '.join(['a', 1]) }}",
    ] {
        let error = ChatTemplate::from_source(source).expect("it compiles").render(&chat()).expect_err(source);
        assert!(matches!(error, Error::Template { .. }), "{source}: {error}");
        assert!(error.to_string().contains("chat template \"default\": "), "{error}");
    }
    for source in ["{% if %}", "{{ 'a }}", "{% for x in y %}", "{% nope %}", "{% endfor %}"] {
        let error = ChatTemplate::from_source(source).expect_err(source);
        assert!(matches!(error, Error::Template { .. }), "{source}: {error}");
    }
}

#[test]
fn a_template_that_refuses_says_so_in_its_own_words() {
    let template =
        ChatTemplate::from_source("{% macro m() %}{{ raise_exception('no ' ~ 'system') }}{% endmacro %}{{ m() }}");
    let error = template.expect("it compiles").render(&chat()).expect_err("refused");
    assert!(matches!(&error, Error::Refused { message, .. } if message == "no system"), "{error}");
}

/// The engine counts no steps where it compares.
#[test]
fn a_template_that_takes_too_long_is_an_error() {
    // 2³⁰ ways, so that the threads that are left behind end some time.
    let nested = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(30) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    for end in ["{{ ns.x == ns.y }}", "{{ ns.x in [ns.y] }}", "{{ {ns.x: 1} }}"] {
        let template = ChatTemplate::from_source(&format!("{nested}{end}")).expect("it compiles");
        let start = std::time::Instant::now();
        let error = template.with_time(Duration::from_millis(300)).render(&chat()).expect_err(end).to_string();
        assert!(error.contains("it takes longer than 300ms; it may not end"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(20), "{end}");
    }
}

/// What is bounded still does what Python does.
#[test]
fn bounded_methods_mean_what_they_mean_in_python() {
    for (source, expected) in [
        (
            "{{ 'a.b.c'.replace('.', '--') }}{{ 'aaa'.replace('a', 'bb', 2) }}{{ 'ab'.replace('', '-') }}",
            "a--b--cbbbba-a-b-",
        ),
        ("{{ ', '.join(['a', 'b', '']) }}{{ '-'.join('abc') }}{{ ''.join([]) }}", "a, b, a-b-c"),
        ("{{ '{}-{:>5}-{x}'.format('a', 12, x='y') }}{{ '{{}} 99999'.format() }}", "a-   12-y{} 99999"),
        ("{{ 'a,b'.split(',') }}{{ 'a\nb'.splitlines() }}", "['a', 'b']['a', 'b']"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

/// As the engine's own: they are bounded, and no more.
#[test]
fn bounded_filters_mean_what_they_did() {
    for (source, expected) in [
        ("{{ [1, 'a']|string }}{{ 1.5|string }}{{ 'a'|string }}{{ none|string }}", "[1, 'a']1.5aNone"),
        (
            "{{ [1, 'a', none]|join('-') }}{{ [{'a': 1}, {'a': 2}]|join(', ', attribute='a') }}{{ 'ab'|join(d='.') }}",
            "1-a-None1, 2a.b",
        ),
        ("{{ ' aB '|trim }}{{ 'xax'|trim('x') }}{{ 'aB'|upper }}{{ 'aB'|lower }}{{ 12|upper }}", "aBaABab12"),
        ("{{ 'a bC'|title }}{{ 'aBC'|capitalize }}{{ '<a>'|e }}{{ '<a>'|safe }}", "A BcAbc&lt;a&gt;<a>"),
        (
            "{{ 'aaa'|replace('a', 'bb') }}{{ 'aaa'|replace('a', '', 2) }}{{ 'aaa'|replace('a', 'b', count=1) }}{{ 121|replace(1, 3) }}",
            "bbbbbbabaa323",
        ),
        (
            "{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(width=1, first=true) }}|{{ 'a\nb'|indent }}",
            "a\n  b| a\n b|a\n    b",
        ),
        (
            "{{ '%s, %05.1f, %(a)s'|format(1, 2.5) if false else '%s, %05.1f'|format(1, 2.5) }}{{ '%(a)s'|format(a=1) }}",
            "1, 002.51",
        ),
        (
            "{{ [1, 0, 2]|select|list }}{{ [1, 2]|reject('odd')|list }}{{ messages|rejectattr('role', 'eq', 'user')|list|length }}",
            "[1, 2][2]1",
        ),
        (
            "{{ 'ab' is startingwith 'a' }}{{ 'ab' is endingwith('a') }}{{ 'a' is in 'ab' }}{{ 1 is in [1] }}",
            "TrueFalseTrueTrue",
        ),
        ("{{ [1]|pprint }}", "[\n    1,\n]"),
    ] {
        assert_eq!(render(source), expected, "{source}");
    }
}

/// A long text is split where its pieces are few, and a field's name is no width.
#[test]
fn what_is_split_and_formatted_costs_what_it_makes() {
    let long = "{% set s = 'a' * 30000000 %}";
    for (source, expected) in [
        (
            format!("{long}{{{{ s.split(',')|length }}}}{{{{ s.rsplit()|length }}}}{{{{ s.splitlines()|length }}}}"),
            "111",
        ),
        ("{% set s = ',' * 30000000 %}{{ s.split(',', 2)|length }}{{ s.rsplit(',', maxsplit=1)|length }}".into(), "32"),
        ("{{ '{x10000}{x5:>3}'.format(x10000='a', x5='b') }}".into(), "a  b"),
    ] {
        assert_eq!(render(&source), expected, "{source}");
    }
    // 300 thousand pieces are more than the rest of so few steps pays for, however short the text is beside it.
    let few = |source: &str| ChatTemplate::from_source(source).expect("it compiles").with_fuel(30_000).render(&chat());
    assert_eq!(few("{{ '{}-{:>4}'.format('a', 1.5) }}").expect("a text"), "a- 1.5");
    few("{% set x = (',' * 300000).split(',') %}").expect_err("pieces");
}

#[test]
fn a_template_without_end_is_an_error() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ messages|tojson }}{{ 'a' * 100000 }}{% endfor %}",
        "{{ 'a' * 100000000000 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(10000000000)|list }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        // Twice what it was, forty times over.
        "{% set ns = namespace(x=[]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x={}) %}{% for i in range(40) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ' '.join([ns.x]) }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '{}'.format(ns.x) }}",
        "{{ ([0] * 10000000000)|tojson }}",
        "{{ ('\u{1}' * 50000000)|tojson }}",
        "{% set x = ('a' * 1000000).replace('a', 'b' * 1000000) %}",
        "{% set x = ('a' * 1000000).replace('', 'b' * 1000000, 1000000) %}",
        "{% set x = ('x' * 1000000).join(range(100000)) %}",
        "{% set x = '{:>99999999999}'.format(1) %}",
        "{% set x = '{:.99999999999}'.format(1.5) %}",
        "{% set x = ('{0}' * 30000).format('a' * 1000000) %}",
        "{% set x = (',' * 70000000).split(',') %}",
        "{% set x = ('\n' * 70000000).splitlines() %}",
        "{% set s = 'a' * 40000000 %}{% for i in range(100000) %}{% set x = s.find('b') %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}",
        // What one call makes is far more than its arguments.
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('x' * 1000000).join(range(100000)|map('string')) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999999) }}",
    ] {
        let error = ChatTemplate::from_source(source).expect("it compiles").render(&chat()).expect_err(source);
        assert!(matches!(error, Error::Template { .. }), "{source}: {error}");
    }
    // The text of what is nested forty times over is not made.
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}";
    for end in [
        "{{ ns.x }}",
        "{% set x %}{{ ns.x }}{% endset %}",
        "{% set x = ns.x|string %}",
        "{% set x = ns.x|pprint %}",
        "{% set x = [1, ns.x]|join %}",
        "{% set x = [{'a': ns.x}]|join('', attribute='a') %}",
        "{% set x = ['a', 'b']|join(ns.x) %}",
        "{% set x = ns.x|upper %}",
        "{% set x = ns.x|lower %}",
        "{% set x = ns.x|title %}",
        "{% set x = ns.x|capitalize %}",
        "{% set x = ns.x|trim %}",
        "{% set x = 'a'|trim(ns.x) %}",
        "{% set x = ns.x|escape %}",
        "{% set x = ns.x|e %}",
        "{% set x = ns.x|safe %}",
        "{% set x = ns.x|indent %}",
        "{% set x = ns.x|replace('a', 'b') %}",
        "{% set x = 'a'|replace('a', ns.x) %}",
        "{% set x = '%s'|format(ns.x) %}",
        "{% set x = [ns.x]|map('string')|list %}",
        "{% set x = [1]|select(ns.x)|list %}",
        "{% set x = [1]|rejectattr(ns.x)|list %}",
        "{% set x = ns.x is startingwith 'a' %}",
        "{% set x = 'a' is endingwith ns.x %}",
        "{% set x = ns.x is in 'a' %}",
        "{% set x = [ns.x]|select('in', 'a')|list %}",
        "{% set x = ns.x ~ 'a' %}",
        "{% set x = 'a' ~ ns.x %}",
        "{% if ns.x in 'a' %}{% endif %}",
        "{% if ns.x not in 'a' %}{% endif %}",
        "{% set x = (',' * 1000000)|split(',') %}",
        "{% set x = ('\n' * 1000000)|lines %}",
        "{{ raise_exception(ns.x) }}",
        "{{ debug(ns.x) }}",
        "{% set x = ([[0] * 50000] * 50000)|string %}",
        "{% set x = ('x' * 1000000)|replace('x', 'y' * 1000000) %}",
        "{% set x = ('\n' * 1000000)|indent(1000000) %}",
        "{% set x = ('\n' * 1000000)|indent(width=1000000) %}",
        "{% set x = ('%(a)s' * 30000)|format({'a': 'x' * 1000000}) %}",
    ] {
        let template = ChatTemplate::from_source(&format!("{nested}{end}")).expect("it compiles").with_fuel(100_000);
        let error = template.render(&chat()).expect_err(end).to_string();
        assert!(
            error.contains("more steps than a rendering may") || error.contains("debug is unknown"),
            "{end}: {error}"
        );
    }
    let few = ChatTemplate::from_source("{% for i in range(100) %}{% endfor %}").expect("it compiles").with_fuel(50);
    let message = few.render(&chat()).expect_err("out of fuel").to_string();
    assert!(message.contains("may not end"), "{message}");
    render("{% for i in range(10000) %}{{ i }}{% endfor %}");
    for (source, text) in [
        (
            "{{ 'aXbXc'.replace('X', '--') }} {{ 'aXbXc'.replace('X', '', 1) }} {{ 'ab'.replace('', '.') }}",
            "a--b--c abXc .a.b.",
        ),
        ("{{ ', '.join(['a', 'b']) }}{{ '-'.join([]) }} {{ '|'.join('ab') }}", "a, b a|b"),
        ("{{ '{:>4}|{}|{{}}'.format(1, 'x') }}", "   1|x|{}"),
    ] {
        assert_eq!(render(source), text);
    }
    // Nested as deep as steps allow: written, compared and freed without an overflow of the stack.
    let nested = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}\
        {% set ns.y = [ns.y] %}{% endfor %}{{ ns.x == ns.y }}{{ ns.x }}";
    let rendered = ChatTemplate::from_source(nested).expect("it compiles").render(&chat());
    assert!(rendered.is_ok() || matches!(rendered, Err(Error::Template { .. })), "{rendered:?}");
}

/// The compiler goes as deep as a template, and what is written many times over is short.
#[test]
fn templates_that_are_deep_or_wide_end_in_errors() {
    let deep = [
        format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(10_000)),
        format!("{{{{ x{} }}}}", ".a".repeat(60_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(60_000)),
    ];
    for source in deep {
        // Compiled or refused, as the engine likes: it ends.
        let _ = ChatTemplate::from_source(&source).and_then(|template| template.render(&chat()));
    }
    let long = ChatTemplate::from_source(&"x".repeat(1 << 20)).expect_err("too long").to_string();
    assert!(long.contains("at most 131072 bytes"), "{long}");
    for (source, words) in [
        ("{{ ''.ljust(9, 'xy') }}", "one character"),
        ("{{ ''.rjust(9, '') }}", "one character"),
        ("{{ [1, 2]|tojson(indent='x' * 100) }}", "at most 64 bytes"),
        ("{{ [1, 2]|tojson(separators=['x' * 100, ':']) }}", "at most 64 bytes"),
    ] {
        let error = ChatTemplate::from_source(source).and_then(|template| template.render(&chat()));
        let error = error.expect_err(source).to_string();
        assert!(error.contains(words), "{source}: {error}");
    }
}

#[test]
fn the_clock_can_be_set() {
    let template = ChatTemplate::from_source("{{ strftime_now('%d %b %Y') }}").expect("it compiles");
    let today = template.render(&chat()).expect("a date");
    assert_eq!(today.split(' ').count(), 3, "{today}");
    assert!(today[today.len() - 4..].parse::<u32>().is_ok_and(|year| year >= 2026), "{today}");
    let set = template.with_strftime(|format| format!("<{format}>"));
    assert_eq!(set.render(&chat()).expect("a date"), "<%d %b %Y>");
}

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
    dir
}

#[test]
fn templates_of_a_folder() {
    let one = (
        "tokenizer_config.json",
        r#"{"chat_template": "one {{ bos_token }}{{ pad_token is defined }}",
        "bos_token": {"__type": "AddedToken", "content": "<s>"}, "pad_token": null}"#,
    );
    let several = (
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r{{ documents|length }}"}]}"#,
    );
    let file = ("chat_template.jinja", "file {{ eos_token }}");
    let map = ("special_tokens_map.json", r#"{"eos_token": "</s>", "bos_token": "other"}"#);
    let more = ("additional_chat_templates/tool_use.jinja", "more");
    let rendered = |files: &[(&str, &str)], chat: &Chat| {
        let dir = folder(files);
        ChatTemplate::from_folder(dir.path()).and_then(|t| t.render(chat))
    };
    let plain = Chat::new().say("user", "Hi");
    let tools = plain.clone().tools([1]);
    assert_eq!(rendered(&[one], &plain).expect("a text"), "one <s>False");
    assert_eq!(rendered(&[one, map], &plain).expect("a text"), "one <s>False");
    assert_eq!(rendered(&[one], &plain.clone().variable("bos_token", "x")).expect("a text"), "one xFalse");
    assert_eq!(rendered(&[several], &plain).expect("a text"), "d");
    assert_eq!(rendered(&[several], &tools).expect("a text"), "t");
    assert_eq!(rendered(&[several], &tools.clone().template("default")).expect("a text"), "d");
    assert_eq!(rendered(&[several], &plain.clone().template("rag").documents([1, 2])).expect("a text"), "r2");
    assert_eq!(rendered(&[one, file, map], &plain).expect("a text"), "file </s>", "the file comes first");
    assert_eq!(rendered(&[one, file, more], &tools).expect("a text"), "more");
    assert_eq!(rendered(&[file], &tools).expect("a text"), "file ");

    let error = |files: &[(&str, &str)], chat: &Chat| rendered(files, chat).expect_err("refused").to_string();
    assert!(error(&[], &plain).contains("neither chat_template.jinja nor"), "{}", error(&[], &plain));
    // One that cannot be read is not as if it were not there.
    let unreadable = error(&[file, ("additional_chat_templates", "no folder")], &plain);
    assert!(unreadable.contains("additional_chat_templates: "), "{unreadable}");
    assert!(error(&[more], &plain).contains("none of name \"default\"; there are [\"tool_use\"]"));
    assert!(error(&[several], &plain.clone().template("x")).contains("none of name \"x\""));
    assert!(
        error(&[("tokenizer_config.json", r#"{"chat_template": 3}"#)], &plain).contains("expected a text, or a list")
    );
    assert!(
        error(&[("tokenizer_config.json", r#"{"chat_template": [{"name": "a"}]}"#)], &plain)
            .contains("expected a text")
    );
    assert!(error(&[("chat_template.jinja", "{% if %}")], &plain).contains("chat template \"default\""));
}

#[test]
fn conversations_that_are_none() {
    let refused = |text: &str| {
        let template = ChatTemplate::from_source("x").expect("it compiles");
        Chat::from_json(text).and_then(|chat| template.render(&chat)).expect_err(text).to_string()
    };
    assert_eq!(refused("[]"), "conversation: there is no message");
    assert_eq!(refused("{}"), "conversation: there is no message");
    assert_eq!(refused(r#"["Hi"]"#), "conversation: message 0: expected an object, found a string");
    assert_eq!(refused(r#"{"messages": "Hi"}"#), "conversation: messages: expected a list, found a string");
    assert!(refused("[").contains("conversation: "));
    assert!(refused("3").contains("expected a list"));
}
