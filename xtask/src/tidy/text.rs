//! Rules about text: how long files and headers may be, which words must not stand anywhere.

use super::Tree;

const LINES_MAX: usize = 700;
const HEADER_LINES_MAX: usize = 10;

/// No file is longer than 700 lines.
pub(super) fn size(tree: &Tree) -> Vec<String> {
    let own = tree.files().filter(|(path, _)| *path != "Cargo.lock");
    let long = own.map(|(path, text)| (path, text.lines().count())).filter(|(_, lines)| *lines > LINES_MAX);
    long.map(|(path, lines)| format!("{path}: {lines} lines, {LINES_MAX} at most; split it by reason to change"))
        .collect()
}

/// A module header has at most ten lines.
pub(super) fn header(tree: &Tree) -> Vec<String> {
    let lines = |text: &str| text.lines().take_while(|l| l.starts_with("//!")).count();
    let long = tree.ending(".rs").map(|(path, text)| (path, lines(text))).filter(|(_, n)| *n > HEADER_LINES_MAX);
    long.map(|(path, n)| {
        format!("{path}:1: a header of {n} lines, {HEADER_LINES_MAX} at most; keep what, where, never")
    })
    .collect()
}

/// Each word with its remedy. Written in two halves, so that this file passes its own rule.
const WORDS: &[(&str, &str)] = &[
    (concat!("/wo", "rk/"), "a path of one machine"),
    (concat!("/ro", "ot/"), "a path of one machine"),
    (concat!("issue ", "#"), "say what it was about"),
    (concat!("TO", "DO"), "do it, or name it under `open` in docs/requirements.md"),
    (concat!("FIX", "ME"), "mend it"),
    (concat!("to", "do!"), "finish it or leave it out"),
    (concat!("unimpl", "emented!"), "finish it or leave it out"),
    (concat!("#[ign", "ore"), "a skipped test shows nothing: mend or delete it"),
    (concat!("index.crates", ".io"), "the package client knows its registry"),
    (concat!("static.crates", ".io"), "the package client knows its registry"),
    (concat!("registry.npm", "js.org"), "the package client knows its registry"),
    (concat!("pypi", ".org"), "the package client knows its registry"),
    (concat!("pythonhosted", ".org"), "the package client knows its registry"),
    (concat!("repo.maven", ".apache.org"), "the package client knows its registry"),
    (concat!("repo1.maven", ".org"), "the package client knows its registry"),
    (concat!("proxy.golang", ".org"), "the package client knows its registry"),
    (concat!("deb.debian", ".org"), "the package client knows its registry"),
];

/// No word that speaks of this machine, of work left undone, or of a registry.
pub(super) fn words(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.files().filter(|(path, _)| *path != "Cargo.lock") {
        for (n, line) in text.lines().enumerate() {
            let found = WORDS.iter().filter(|(word, _)| line.contains(word));
            problems.extend(found.map(|(word, remedy)| format!("{path}:{}: `{word}`; {remedy}", n + 1)));
        }
    }
    problems
}

/// No test sleeps and hopes: it waits for a fact, with a deadline. A sleep says, on its line or the one above, that it
/// is "the step of a wait", or part of "the schedule" that the test plays. In virtual time it is a schedule anyway.
pub(super) fn sleeps(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let real_time = |(_, text): &(&str, &str)| !text.contains("start_paused = true");
    for (path, text) in tree.ending(".rs").filter(real_time) {
        let whole = path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs");
        let lines: Vec<&str> = text.lines().collect();
        let from = if whole { 0 } else { lines.iter().take_while(|l| l.trim() != "#[cfg(test)]").count() };
        for n in from..lines.len() {
            let said = [lines[n], lines[n.saturating_sub(1)]].concat();
            if sleeps_here(lines[n]) && !said.contains("step of a wait") && !said.contains("the schedule") {
                problems.push(format!("{path}:{}: a test sleeps; wait for a fact, with a deadline", n + 1));
            }
        }
    }
    problems
}

/// A call of something whose name is `sleep`, outside a comment.
fn sleeps_here(line: &str) -> bool {
    let named = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    !line.trim().starts_with("//") && line.match_indices(concat!("sle", "ep(")).any(|(at, _)| named(at))
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    #[test]
    fn a_long_file_is_found() {
        assert_eq!(size(&tree(&[("a.rs", &"x\n".repeat(700))])).len(), 0);
        assert_eq!(size(&tree(&[("a.rs", &"x\n".repeat(701))])).len(), 1);
        assert_eq!(size(&tree(&[("Cargo.lock", &"x\n".repeat(701))])).len(), 0);
    }

    #[test]
    fn a_long_header_is_found() {
        assert_eq!(header(&tree(&[("a.rs", &"//! x\n".repeat(10))])).len(), 0);
        assert_eq!(header(&tree(&[("a.rs", &"//! x\n".repeat(11))])).len(), 1);
    }

    #[test]
    fn every_forbidden_word_is_found() {
        for (word, _) in WORDS {
            let text = format!("fine\nsome {word} here\n");
            let problems = words(&tree(&[("docs/a.md", &text)]));
            assert_eq!(problems.len(), 1, "{word}: {problems:?}");
            assert!(problems[0].starts_with("docs/a.md:2: "), "{problems:?}");
        }
    }

    #[test]
    fn a_test_that_sleeps_is_found() {
        let call = concat!("    tokio::time::sle", "ep(d).await;\n");
        let product = format!("fn pause() {{\n{call}}}\n");
        assert_eq!(sleeps(&tree(&[("crates/a/src/lib.rs", &product)])).len(), 0);
        let with_tests = format!("{product}#[cfg(test)]\nmod tests {{\n{call}}}\n");
        let found = sleeps(&tree(&[("crates/a/src/lib.rs", &with_tests)]));
        assert_eq!(found, ["crates/a/src/lib.rs:6: a test sleeps; wait for a fact, with a deadline"]);
        assert_eq!(sleeps(&tree(&[("crates/a/tests/e2e/main.rs", &product)])).len(), 1);
        let virtual_time = format!("#[tokio::test(start_paused = true)]\n{product}");
        assert_eq!(sleeps(&tree(&[("crates/a/tests/e2e/main.rs", &virtual_time)])).len(), 0);
        let step = product.replace('\n', " // the step of a wait with a deadline\n");
        assert_eq!(sleeps(&tree(&[("crates/a/tests/e2e/main.rs", &step)])).len(), 0);
    }
}
