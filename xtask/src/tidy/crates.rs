//! The rule about crates: `postbox ◄ engine ◄ {sources, sinks} ◄ relay`; testkit and sim know the engine only.

use super::Tree;

/// Which crates of ours each may use: in its code, and in its tests.
const ARROWS: &[(&str, &[&str], &[&str])] = &[
    ("postbox", &[], &["postbox-testkit"]),
    ("postbox-engine", &[], &[]),
    ("postbox-sources", &["postbox", "postbox-engine"], &["postbox-testkit"]),
    ("postbox-sinks", &["postbox-engine"], &["postbox-testkit"]),
    ("postbox-relay", &["postbox", "postbox-engine", "postbox-sinks", "postbox-sources"], &["postbox-testkit"]),
    ("postbox-testkit", &["postbox-engine"], &[]),
    ("postbox-sim", &["postbox-engine"], &[]),
    ("xtask", &["postbox-engine", "postbox-sim", "postbox-testkit"], &[]),
    ("embedded", &["postbox", "postbox-relay"], &[]),
];

/// No crate uses another than its arrows say.
pub(super) fn arrows(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.ending("/Cargo.toml") {
        let name = text.lines().find_map(|l| l.strip_prefix("name = \"")).map_or("", |n| n.trim_end_matches('"'));
        let Some((_, code, tests)) = ARROWS.iter().find(|(crate_, ..)| *crate_ == name) else {
            problems.push(format!("{path}:1: the crate `{name}` has no place; give it one in {}", file!()));
            continue;
        };
        for (n, in_tests, used) in ours(text) {
            // A crate's tests may ask for its own features.
            let allowed = code.contains(&used) || in_tests && (tests.contains(&used) || used == name);
            if !allowed {
                problems.push(format!("{path}:{n}: `{name}` must not use `{used}`; see {}", file!()));
            }
        }
    }
    problems
}

/// Our own crates that a manifest depends on: line, whether for tests only, name.
fn ours(manifest: &str) -> Vec<(usize, bool, &str)> {
    let (mut section, mut found) = ("", Vec::new());
    for (n, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']);
        }
        let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
        if section.ends_with("dependencies") && (name == "postbox" || name.starts_with("postbox-")) {
            found.push((n + 1, section.ends_with("dev-dependencies"), name));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    fn manifest(name: &str, rest: &str) -> Vec<String> {
        arrows(&tree(&[("crates/x/Cargo.toml", &format!("[package]\nname = \"{name}\"\n{rest}"))]))
    }

    #[test]
    fn a_forbidden_arrow_is_found() {
        let fine =
            "[dependencies]\npostbox-engine.workspace = true\n[dev-dependencies]\npostbox-testkit.workspace = true\n";
        assert_eq!(manifest("postbox-sinks", fine), [""; 0]);
        let planted = "[dependencies]\npostbox-sources = { workspace = true }\n";
        assert_eq!(manifest("postbox-sinks", planted).len(), 1);
        assert!(manifest("postbox-sinks", planted)[0].starts_with("crates/x/Cargo.toml:4: "));
    }

    #[test]
    fn a_test_dependency_does_not_serve_the_code() {
        let planted = "[dependencies]\npostbox-testkit.workspace = true\n";
        assert_eq!(manifest("postbox-sinks", planted).len(), 1);
    }

    #[test]
    fn an_unknown_crate_is_found() {
        assert_eq!(manifest("postbox-new", "").len(), 1);
    }
}
