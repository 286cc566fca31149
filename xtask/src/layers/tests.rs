//! Rules over files in memory.

use super::*;

fn module(path: &str) -> Module {
    path.split("::").filter(|s| !s.is_empty()).map(str::to_string).collect()
}

/// Files by module, and what is wrong with them.
fn found(rules: &str, files: &[(&str, &str)]) -> Vec<String> {
    let rules = Rules::parse(rules).expect("rules");
    let all: BTreeMap<Module, File> =
        files.iter().map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens"))).collect();
    let places = all.keys().map(|m| (m.clone(), m.join("/"))).collect();
    problems_of(&rules, &all, &places)
}

const RULES: &str = "low:\nhigh: low\ninside high: a b+c d\n";

#[test]
fn what_is_below_may_not_name_what_is_above() {
    let broken = found(RULES, &[("low", "\n\nfn f() { crate::high::g() }"), ("high", "use crate::low::f;")]);
    assert_eq!(broken, ["low:3: names high::g; low may name: "]);
}

#[test]
fn braces_macros_and_names_that_the_root_hands_on_are_followed() {
    let root = ("", "mod low; mod high; pub use high::G;");
    for text in ["use crate::{low::f, high::{self, G}};", "m!(crate::high::g);", "type T = crate::G;"] {
        assert!(!found(RULES, &[root, ("low", text), ("high", "pub struct G;")]).is_empty(), "{text}");
    }
}

#[test]
fn tests_comments_and_documentation_may_name_anything() {
    let text = "/// [`crate::high::G`]\nfn f() {} // crate::high\n#[cfg(test)]\nmod tests { use crate::high::G; }";
    assert!(found(RULES, &[("low", text), ("high", "")]).is_empty());
    let declared = ("low", "#[cfg(test)]\nmod tests;");
    assert!(found(RULES, &[declared, ("low::tests", "use crate::high::G;"), ("high", "")]).is_empty());
}

#[test]
fn files_of_a_folder_name_those_before_them_and_those_of_their_group() {
    let files = [("high::a", "use super::b::B;"), ("high::b", "use super::c::C; use super::a::A;")];
    let more = [("high::c", "use crate::high::b::B;"), ("high::d", "use super::a::A;"), ("high", "mod a;")];
    let broken = found(RULES, &[&files[..], &more[..]].concat());
    assert_eq!(broken, ["high/a:1: names high::b::B; inside high, b stands above a"]);
    let handed = [("high::a", "use super::D;"), ("high", "pub use d::D;"), ("high::d", "pub struct D;")];
    assert_eq!(found(RULES, &handed), ["high/a:1: names high::D; inside high, d stands above a"]);
}

#[test]
fn names_of_no_file_are_refused() {
    let rules = Rules::parse(RULES).expect("rules");
    let files = |names: &[&str]| names.iter().map(|name| (module(name), File::default())).collect();
    let all = files(&["low", "high::a", "high::b", "high::d"]);
    assert_eq!(stale(&rules, &all), ["xtask/layers.txt: there is no high::c"]);
    let all = files(&["low", "high::a", "high::b", "high::c::inner", "high::d"]);
    assert!(stale(&rules, &all).is_empty());
    let rules = Rules::parse("high:\ninside high/c: inner outer\n").expect("rules");
    assert_eq!(stale(&rules, &all), ["xtask/layers.txt: there is no high::c::outer"]);
}

#[test]
fn folders_in_folders_have_an_order_of_their_own() {
    let rules = format!("{RULES}inside high/c: x y\n");
    let files = [("high::c::x", "use crate::high::c::y::Y;"), ("high::c::y", "use super::x::X; use super::Own;")];
    let broken = found(&rules, &[&files[..], &[("high::c", "struct Own;")]].concat());
    assert_eq!(broken, ["high/c/x:1: names high::c::y::Y; inside high/c, y stands above x"]);
    // Outside their folder they stand where it does.
    let files = [("high::c::x", "use crate::high::a::A; use crate::high::d::D;"), ("high::a", ""), ("high::d", "")];
    assert_eq!(found(&rules, &files), ["high/c/x:1: names high::d::D; inside high, d stands above c"]);
}

#[test]
fn a_mod_rs_stands_among_the_files_of_its_folder() {
    fn files(own: &str) -> [(&str, &str); 4] {
        [("high", own), ("high::a", "pub struct A;"), ("high::b", "use super::{a::A, Own};"), ("high::d", "")]
    }
    let rules = "high:\ninside high: a mod b d\n";
    assert!(found(rules, &files("mod a; mod b; mod d; pub use d::D; use a::A; struct Own;")).is_empty());
    for above in ["use b::B;", "fn f() { b::g() }", "use self::b::B;", "use crate::high::b;"] {
        let broken = found(rules, &files(&format!("mod a; mod b;\n{above}")));
        let rule = ["inside high, b stands above mod"];
        assert_eq!(broken.iter().filter_map(|b| b.split("; ").nth(1)).collect::<Vec<_>>(), rule, "{above}");
    }
    let above = found("high:\ninside high: a b mod d\n", &files("mod a; struct Own;"));
    assert_eq!(above, ["high/b:1: names high::Own; inside high, mod stands above b"]);
    // What a module calls by a child's name is another's inside another module.
    let inner = [("high", "mod b; mod inner { fn f() { b::g() } }"), ("high::b", ""), ("high::a", "")];
    assert!(found(rules, &inner).is_empty());
}

#[test]
fn every_file_of_a_folder_of_several_is_listed() {
    let rules = Rules::parse(RULES).expect("rules");
    let all = |names: &[&str]| -> BTreeMap<Module, File> {
        names.iter().map(|name| (module(name), File::default())).collect()
    };
    assert!(unlisted(&rules, &all(&["", "low", "low::alone", "high::a", "high::c::alone"])).is_empty());
    assert_eq!(
        unlisted(&rules, &all(&["high::a", "high::e", "high::c::x", "high::c::y"])),
        ["high e", "high/c x", "high/c y"]
            .map(|at| at.split_once(' ').expect("two"))
            .map(|(folder, name)| format!("xtask/layers.txt: the line `inside {folder}` lacks {name}"))
    );
    let mut with_tests = all(&["low", "low::alone", "low::tests"]);
    with_tests.entry(module("low")).or_default().tests.push(module("low::tests"));
    assert!(unlisted(&rules, &with_tests).is_empty());
}

#[test]
fn a_mod_rs_with_items_is_listed() {
    let rules = Rules::parse("high:\ninside high: a b\n").expect("rules");
    let lacks = |own: &str, rules: &Rules| -> Vec<String> {
        let files = [("high", own), ("high::a", ""), ("high::b", "")];
        let all = files.map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens")));
        unlisted(rules, &all.into_iter().collect())
    };
    let without = "//! Docs.\n#![allow(x)]\npub(crate) mod a; mod b; /// More.\npub use a::{A, B}; use crate::low::C;\n\
         #[cfg(test)] mod tests { fn f() {} }\n#[cfg(doctest)]\nstruct Page;\nmod names { pub use super::a::A; }";
    assert!(lacks(without, &rules).is_empty());
    let items = ["struct Own;", "/// Own.\npub(super) fn f() {}", "impl A {}", "const N: usize = 1;", "m!();"];
    for item in items.into_iter().chain(["mod inner { fn f() {} }", "#[cfg(unix)]\nstruct Own;"]) {
        let own = format!("{without}\n{item}\n");
        assert_eq!(lacks(&own, &rules), ["xtask/layers.txt: the line `inside high` lacks mod"], "{item}");
        let listed = Rules::parse("high:\ninside high: a mod b\n").expect("rules");
        assert!(lacks(&own, &listed).is_empty(), "{item}");
    }
    // With one file beside it, they are two.
    let alone: BTreeMap<Module, File> = [("high", "struct Own; mod a;"), ("high::a", "use super::Own;")]
        .map(|(m, text)| (module(m), read(text, &module(m)).expect("tokens")))
        .into_iter()
        .collect();
    let rules = Rules::parse("high:\n").expect("rules");
    assert_eq!(unlisted(&rules, &alone).len(), 2);
}

#[test]
fn a_mod_rs_names_what_it_hands_on_and_uses() {
    let rules = "high:\ninside high: mod b\n";
    let files = |own: &'static str| [("high", own), ("high::b", "pub struct B; use super::Own;")];
    assert!(found(rules, &files("mod b; pub use b::B; struct Own;")).is_empty());
    let broken = found(rules, &files("mod b; pub use b::B;\nstruct Own(B);"));
    assert_eq!(broken, ["high:2: names high::b::B; inside high, b stands above mod"]);
    for other in ["fn f() { x.B() }", "fn f() { x::B }", "#[cfg(test)] mod tests { fn f(b: B) {} }"] {
        let own: &'static str = format!("mod b; pub use b::B;\nstruct Own; {other}").leak();
        assert!(found(rules, &files(own)).is_empty(), "{other}");
    }
}

#[test]
fn erased_types_and_modules_without_a_line_are_refused() {
    assert_eq!(found(RULES, &[("low", "fn f(a: &dyn std::any::Any) {}")]).len(), 1);
    assert_eq!(found(RULES, &[("other", "use crate::low::f;"), ("low", "")]).len(), 1);
    assert!(Rules::parse("low: high\nhigh:").is_err());
}
