use super::*;

/// The source, where an operand is in brackets of its own and the filter is left out.
fn marked(source: &str) -> String {
    let counted = with_counted_operands(source).expect("operands");
    counted.replace(&format!(")|{COUNTED}"), "⟩")
}

#[test]
fn operands_are_found_as_the_engine_binds_them() {
    for (source, expected) in [
        ("{{ a ~ b }}", "{{ (a⟩ ~ (b⟩ }}"),
        ("{{ a~b~ 'c' }}", "{{ (a⟩~(b⟩~ ('c'⟩ }}"),
        ("{{ a.x[1 ~ 2](c ~ 'd', e=f ~ 1) ~ g }}", "{{ (a.x[(1⟩ ~ (2⟩]((c⟩ ~ ('d'⟩, e=(f⟩ ~ (1⟩)⟩ ~ (g⟩ }}"),
        ("{{ 1 + a * 2 ~ b|trim + c }}", "{{ 1 + (a * 2⟩ ~ (b|trim⟩ + c }}"),
        ("{{ x == a ~ -b - c }}", "{{ x == (a⟩ ~ (-b⟩ - c }}"),
        ("{{ -a ~ 1e-3 ~ 2.5 - 1 }}", "{{ (-a⟩ ~ (1e-3⟩ ~ (2.5⟩ - 1 }}"),
        ("{{- a.1.0 ~ b -}}", "{{- (a.1.0⟩ ~ (b⟩ -}}"),
        ("{{ a if b ~ c else not d ~ e }}", "{{ a if (b⟩ ~ (c⟩ else not (d⟩ ~ (e⟩ }}"),
        ("{{ {'a': b ~ c}['a'] ~ [d, e ~ f] }}", "{{ ({'a': (b⟩ ~ (c⟩}['a']⟩ ~ ([d, (e⟩ ~ (f⟩]⟩ }}"),
        ("{{ a is none ~ b is not in c ~ d }}", "{{ (a is none⟩ ~ (b is not in c⟩ ~ (d⟩ }}"),
        ("{{ x.in ~ y.is ~ z|in }}", "{{ (x.in⟩ ~ (y.is⟩ ~ (z|in⟩ }}"),
        ("{{ 'a' + b in c and d not in e }}", "{{ ('a' + b⟩ in c and (d⟩ not in e }}"),
        ("{{ a ~ b in c }}", "{{ ((a⟩ ~ (b⟩⟩ in c }}"),
        ("{% if a in b %}{% elif not c in d < e in f %}", "{% if (a⟩ in b %}{% elif not (c⟩ in d < (e⟩ in f %}"),
        ("{% for a, (b, c) in d ~ e if b in f %}", "{% for a, (b, c) in (d⟩ ~ (e⟩ if (b⟩ in f %}"),
        ("{% set ns.x = a ~ b %}{%- set y = c -%}", "{% set ns.x = (a⟩ ~ (b⟩ %}{%- set y = c -%}"),
        ("{%set a = '~ %}' ~ \"}}\\\"'\" %}", "{%set a = ('~ %}'⟩ ~ (\"}}\\\"'\"⟩ %}"),
        ("{#}{{ '#}{{ a ~ b }}{#' }}#}", "{#}{{ '#}{{ (a⟩ ~ (b⟩ }}{#' }}#}"),
        ("{{ is in a }}{{ b.is in a }}{{ b|is in a }}", "{{ (is⟩ in a }}{{ (b.is⟩ in a }}{{ (b|is⟩ in a }}"),
        ("{{ is not in a and b is in }}", "{{ (is⟩ not in a and b is in }}"),
        ("{{ recursive ~ f(*a ~ b, **c ~ d) }}", "{{ (recursive⟩ ~ (f(*(a⟩ ~ (b⟩, **(c⟩ ~ (d⟩)⟩ }}"),
        ("{% for a in b ~ c recursive %}", "{% for a in (b⟩ ~ (c⟩ recursive %}"),
        ("{# a ~ b #}{{ 'é' ~ é }} c ~ d { ~ }", "{# a ~ b #}{{ ('é'⟩ ~ (é⟩ }} c ~ d { ~ }"),
        ("{% raw %}{{ a ~ b }}{%- endraw +%}{{ a ~ b }}", "{% raw %}{{ a ~ b }}{%- endraw +%}{{ (a⟩ ~ (b⟩ }}"),
        ("{%- macro m(a, b=c ~ d) %}", "{%- macro m(a, b=(c⟩ ~ (d⟩) %}"),
        ("{{ {'a': {'b': c ~ d}}}}", "{{ {'a': {'b': (c⟩ ~ (d⟩}}}}"),
        ("{{ a\n  ~ b }}\n{{ unended ~ ", "{{ (a⟩\n  ~ (b⟩ }}\n"),
    ] {
        match source.ends_with("~ ") {
            false => assert_eq!(marked(source), expected, "{source}"),
            true => {
                let error = with_counted_operands(source).expect_err(source);
                assert_eq!(error, "line 3: an operator without an operand");
            }
        }
    }
    for source in ["{{ ~ a }}", "{{ a ~ }}", "{{ in a }}", "{% for in in a %}", "{{ (~) }}", "{% set as = in in x %}"] {
        let error = with_counted_operands(source).expect_err(source);
        assert!(error.contains("an operator without an operand"), "{source}: {error}");
    }
    let deep = |brackets: usize| format!("{{{{ {}a ~ b{} }}}}", "(".repeat(brackets), ")".repeat(brackets));
    assert!(with_counted_operands(&deep(500)).is_ok());
    let error = with_counted_operands(&deep(501)).expect_err("brackets");
    assert!(error.contains("at most 500 brackets"), "{error}");
    // Whatever bytes there are, it ends.
    for source in
        ["{", "{{", "{%", "{#", "{{ 'a", "{{ \"\\", "{% raw %}", "{{ )", "{{ 1.", "{{ 0x", "{{ 1e", "{{ é", "{{-", "}}"]
    {
        assert_eq!(with_counted_operands(source).expect("nothing to find"), source);
    }
}
