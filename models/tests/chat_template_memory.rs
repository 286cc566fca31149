//! Chat templates that make as much as they can, each in a process with a bound on its memory: they end in errors, and no
//! allocation of theirs fails.
#![cfg(target_os = "linux")]

use std::process::{Command, Output};
use std::time::Duration;

use moebius_models::generate::{Chat, ChatTemplate};

/// Names the template of a process.
const SOURCE: &str = "MOEBIUS_TEST_TEMPLATE";

/// Address space of such a process, in KiB: 2 GiB, of which the stack of a rendering takes 256 MiB before it is used.
const MEMORY: u32 = 2 << 20;

/// A list, a dictionary and a chain that have 2⁴⁰ leaves, and texts of some MB.
const BEGINNING: &str = "{% set ns = namespace(x=[1], d={'a': 1}, c=[1], s='ab\n, ' * 300000) %}{% for i in range(40) %}\
    {% set ns.x = [ns.x, ns.x] %}{% set ns.d = {'a': ns.d, 'b': ns.d} %}{% set ns.c = ns.c + ns.c %}{% endfor %}\
    {% set x = ns.x %}{% set d = ns.d %}{% set c = ns.c %}{% set s = ns.s %}{% set big = 'a,\n' * 12000000 %}";

/// What templates do with them.
fn ends() -> Vec<String> {
    let mut ends: Vec<String> = [
        "{{ 'a' ~ V }}",
        "{{ V ~ 'a' }}",
        "{% set y = V ~ V %}",
        "{% set y = 'a' ~ (V if true else 1) %}",
        "{% set y = V.a ~ 'a' %}",
        "{% set y = [V][0] ~ [V] %}",
        "{{ V in 'a' }}",
        "{% if V not in 'a' %}{% endif %}",
        "{% for i in [1] if V in 'a' %}{% endfor %}",
        "{% macro m(a) %}{{ a ~ '' }}{% endmacro %}{{ m(V) }}",
        "{{ V }}",
        "{{ V|tojson }}",
        "{{ V|tojson(separators=[V, ':']) }}",
        "{{ [1]|tojson(indent=V) }}",
        "{{ 'a'.replace('a', V) }}",
        "{{ 'a'.join([V]) }}",
        "{{ '{}'.format(V) }}",
        "{{ 'a'.split(V) }}",
        "{{ 'a'.strip(V) }}",
        "{{ 'a'.startswith(V) }}",
        "{{ raise_exception(V) }}",
        "{{ strftime_now(V) }}",
        "{{ cycler(V).next() }}",
        "{{ joiner(V)() }}{{ joiner(V)() }}",
        "{{ range(V) }}",
        "{{ dict(a=V) }}",
        "{{ namespace(a=V) }}",
        "{% for i in [1, 2] %}{{ loop.cycle(V, V) }}{% endfor %}",
        "{{ d[V] }}",
        "{{ V.nope() }}",
        "{{ V + 'a' }}",
        "{{ V * 100000000000 ~ '' }}",
        "{% set y = V * 100000000000 %}{{ y|list }}",
        "{% set y = (V * 100000000)[5:] %}",
        "{% set y = (V * 100000000)[::-1] %}",
        "{% set y = (V * 100000000)|reverse|list %}",
        "{% for i in V * 100000000000 %}{% endfor %}",
    ]
    .iter()
    .flat_map(|end| ["x", "d", "c"].map(|value| end.replace('V', value)))
    .collect();
    let filters = [
        "abs",
        "attr",
        "batch",
        "bool",
        "capitalize",
        "chain",
        "count",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "format",
        "groupby",
        "indent",
        "int",
        "items",
        "join",
        "last",
        "length",
        "lines",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "pprint",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "slice",
        "sort",
        "split",
        "string",
        "sum",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
        "urlencode",
        "zip",
    ];
    for filter in filters {
        for value in ["x", "big", "'a'"] {
            for args in ["", "(x)", "(big)"] {
                // Comparisons count nothing, and end by their time.
                let compares = ["sort", "unique", "min", "max", "dictsort", "groupby"].contains(&filter);
                if !(compares && value == "x") && (value != "'a'") == args.is_empty() {
                    ends.push(format!("{{% set y = {value}|{filter}{args} %}}{{% set z = y|list %}}"));
                }
            }
        }
    }
    for form in [
        "{% set y = 'a' * 1000000000000 %}",
        "{% set y = (1, 2) * 1000000000000 %}",
        "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s = ns.s|join(ns.s) %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s = ns.s|replace('a', ns.s) %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% for i in range(40) %}{% set ns.s = ns.s|list + ns.s|list %}{% endfor %}",
        "{% set y = range(100000)|list %}{% for i in range(100) %}{% set ns.x = (ns.x, y|list) %}{% endfor %}",
        "{% set y %}{% for i in range(100000) %}{{ s }}{% endfor %}{% endset %}",
        "{% macro m(n) %}{{ 'a' * 1000000 }}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% set y = big.split(',') %}{% set z = big.splitlines() %}",
        "{% set y = big|split(',') %}{% set z = big|lines %}",
        "{% set y = big|split('') %}",
        "{% set y = ('\n' * 70000000)|lines %}",
        "{% set y = (',' * 70000000)|split(',') %}",
        "{% set y = ('a ' * 70000000)|split %}",
        "{% set y = big|list %}",
        "{% set y = big|urlencode %}",
        "{% set y = big|tojson %}",
        "{% set y = big|indent(1000000) %}",
        "{% set y = big.upper().title().swapcase() %}",
        "{% set y = 'a'.ljust(10000000000) ~ 'a'.zfill(10000000000) %}",
        "{% set y = '%100000000s' |format('a') %}",
        "{% set y = '{:>100000000}'.format('a') %}",
        "{% set y = 1.5|round(1000000000) %}",
        "{% set y = 2 ** 100000000000 %}",
        "{% for i in range(100000) %}{% set ns.x = namespace(a=ns.x) %}{% set ns.d = cycler([ns.d]) %}{% endfor %}",
        "{% for i in range(100000) %}{% set ns.x = {'a': ns.x, 'b': {}, 'c': {}} %}{% endfor %}",
        "{% for i in range(100000) %}{% set ns.x = [ns.x, 'abcdefghijklmnopqrstuvwxyz' ~ i, [], {}] %}{% endfor %}",
        "{% for i in range(100) %}{% set ns.x = [ns.x, range(100000)|batch(1)|list] %}{% endfor %}",
        "{% for i in range(100) %}{% set ns.x = [ns.x, ('a' * 100000)|list] %}{% endfor %}",
        "{% for i in range(100) %}{% set ns.x = [ns.x, [1]|slice(100000000)] %}{% endfor %}",
    ] {
        ends.push(form.into());
    }
    ends
}

/// A process's part: renders the template that it is told of, and says how it ended.
#[test]
#[ignore = "a part of the test below"]
fn render() {
    let source = std::env::var(SOURCE).expect("a template");
    let template = ChatTemplate::from_source(&source).map(|template| template.with_time(Duration::from_secs(2)));
    let rendered = template.and_then(|template| template.render(&Chat::new().say("user", "Hi")));
    match rendered {
        Ok(text) => println!("ended: {} bytes", text.len()),
        Err(error) => println!("ended: {error}"),
    }
    // A rendering that takes too long goes on.
    std::process::exit(0);
}

fn run(end: &str) -> Output {
    let limited = format!("ulimit -v {MEMORY}; exec \"$0\" render --exact --ignored --nocapture");
    let program = std::env::current_exe().expect("a path");
    let mut command = Command::new("sh");
    command.arg("-c").arg(limited).arg(program).env(SOURCE, format!("{BEGINNING}{end}"));
    command.output().expect("a process")
}

#[test]
#[ignore = "takes some minutes, a process for each template"]
fn templates_have_no_more_memory_than_steps_pay_for() {
    let ends = ends();
    let mut failed = Vec::new();
    for end in &ends {
        let output = run(end);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() || !said.contains("ended: ") {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            let failure = format!("{end}: {:?} {}", output.status, error.lines().next().unwrap_or_default());
            println!("{failure}");
            failed.push(failure);
        }
    }
    println!("{} templates", ends.len());
    assert!(failed.is_empty(), "{} of {} fail:\n{}", failed.len(), ends.len(), failed.join("\n"));
}
