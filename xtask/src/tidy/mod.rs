//! The house's rules that a compiler does not know, as pure functions over the tree's text. Each rule names the
//! file, the line and the remedy, and has a test with a planted violation.

mod crates;
mod documents;
mod requirements;
mod text;

use crate::shell;
use anyhow::Result;
use std::collections::BTreeMap;

/// The repository's text files by path.
#[derive(Default)]
pub(crate) struct Tree(BTreeMap<String, String>);

impl Tree {
    /// All files that git knows or would take, as they stand on the disk; binary ones are left out.
    pub(crate) fn of_repository() -> Result<Tree> {
        let list = shell::output(shell::command("git", &["ls-files", "-co", "--exclude-standard", "-z"]))?;
        let read = |path: &str| Some((path.to_string(), std::fs::read_to_string(shell::root().join(path)).ok()?));
        Ok(Tree(list.split('\0').filter(|p| !p.is_empty()).filter_map(read).collect()))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    fn ending<'a>(&'a self, end: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files().filter(move |(path, _)| path.ends_with(end))
    }

    fn get(&self, path: &str) -> Option<&str> {
        self.0.get(path).map(String::as_str)
    }

    /// Whether it is a file, or a folder with files in it.
    fn has(&self, path: &str) -> bool {
        let folder = format!("{}/", path.trim_end_matches('/'));
        self.0.contains_key(path) || self.0.keys().any(|k| k.starts_with(&folder))
    }
}

/// All rules; a problem is "path:line: what; remedy".
pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let rules = [
        text::size,
        text::header,
        text::words,
        text::sleeps,
        crates::arrows,
        documents::changelog,
        documents::decisions,
        documents::links,
        requirements::map,
        requirements::cases,
    ];
    rules.iter().flat_map(|rule| rule(tree)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of these files, for the rules' own tests.
    pub(super) fn tree(files: &[(&str, &str)]) -> Tree {
        Tree(files.iter().map(|(p, t)| (p.to_string(), t.to_string())).collect())
    }

    #[test]
    fn the_repository_is_tidy() {
        let problems = check(&Tree::of_repository().unwrap());
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
}
