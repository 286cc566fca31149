//! The README's examples are those of the crate's documentation, which are compiled and run as its tests.

/// Lines between the first fence that is `fence` behind `heading` and the fence that ends it.
fn example<'a>(lines: impl Iterator<Item = &'a str>, heading: &str, fence: &str) -> Vec<&'a str> {
    let lines = lines.skip_while(|line| !line.contains(heading)).skip_while(|line| *line != fence).skip(1);
    lines.take_while(|line| *line != "```").collect()
}

#[test]
fn the_readmes_burn_example_is_a_test_of_the_module() {
    let readme = example(include_str!("../README.md").lines(), "In a burn model:", "```rust,ignore");
    let docs = include_str!("../src/burn/mod.rs").lines().filter_map(|line| line.strip_prefix("//!"));
    let docs = example(docs.map(|line| line.strip_prefix(' ').unwrap_or(line)), "The layer as a burn module", "```");
    let shown: Vec<_> = docs.into_iter().filter(|line| !line.starts_with("# ")).collect();
    assert!(readme.len() > 20);
    assert_eq!(readme, shown);
}

#[test]
fn the_front_page_has_the_readmes_examples() {
    let front = || include_str!("../src/lib.rs").lines().filter_map(|line| line.strip_prefix("//!"));
    let front = || front().map(|line| line.strip_prefix(' ').unwrap_or(line));
    let readme = || include_str!("../README.md").lines();
    let candle = example(readme(), "In a candle model:", "```rust");
    assert!(candle.len() > 10);
    assert_eq!(candle, example(front(), "# From candle", "```"));
    assert_eq!(example(readme(), "In a burn model:", "```rust,ignore"), example(front(), "# From burn", "```ignore"));
}
