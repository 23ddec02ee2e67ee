//! Rules about documents: the changelog is kept, decisions are whole, links lead somewhere.

use super::Tree;

/// The changelog has a section for what is not released yet.
pub(super) fn changelog(tree: &Tree) -> Vec<String> {
    let kept = tree.get("CHANGELOG.md").is_some_and(|text| text.lines().any(|l| l.starts_with("## [Unreleased]")));
    if kept {
        vec![]
    } else {
        vec!["CHANGELOG.md:1: no `## [Unreleased]`; each change for users has a line there".into()]
    }
}

const PARTS: [&str; 4] = ["## Decision", "## Context", "## Why", "## What would reopen it"];

/// A decision says what, in which situation, why (and why not otherwise), and what would reopen it.
pub(super) fn decisions(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.ending(".md").filter(|(path, _)| path.starts_with("docs/decisions/")) {
        let has = |part: &str| text.lines().any(|l| l.starts_with(part));
        let missing = PARTS.iter().filter(|part| !has(part));
        problems.extend(missing.map(|part| format!("{path}:1: no `{part}`; a decision has all four parts")));
        let number = path.trim_start_matches("docs/decisions/").split('-').next().unwrap_or_default();
        if number.len() != 4 || !number.bytes().all(|b| b.is_ascii_digit()) {
            problems.push(format!("{path}:1: call it NNNN-title.md"));
        }
        let twins = tree.files().filter(|(p, _)| p.starts_with(&format!("docs/decisions/{number}-"))).count();
        if twins > 1 {
            problems.push(format!("{path}:1: the number {number} is taken; take the next one"));
        }
    }
    problems
}

/// Relative links of Markdown files lead to a file of the tree, and to a heading where they name one.
pub(super) fn links(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, text) in tree.ending(".md") {
        for (n, target) in targets(text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { path.to_string() } else { join(path, file) };
            if !tree.has(&file) {
                problems.push(format!("{path}:{n}: the link to `{target}` leads nowhere"));
            } else if !anchor.is_empty()
                && file.ends_with(".md")
                && !tree.get(&file).is_some_and(|t| has_heading(t, anchor))
            {
                problems.push(format!("{path}:{n}: `{file}` has no heading `#{anchor}`"));
            }
        }
    }
    problems
}

/// The relative targets of `](target)` outside code, with their lines.
pub(super) fn targets(text: &str) -> Vec<(usize, &str)> {
    let (mut code, mut found) = (false, Vec::new());
    for (n, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            let ends = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            found.extend(ends.filter(|t| !t.contains("://") && !t.starts_with("mailto:")).map(|t| (n + 1, t)));
        }
    }
    found
}

/// `target` as seen from the file `from`, without `.` and `..`.
pub(super) fn join(from: &str, target: &str) -> String {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn has_heading(text: &str, anchor: &str) -> bool {
    let slug = |heading: &str| -> String {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    text.lines().any(|l| l.starts_with('#') && slug(l) == anchor)
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    #[test]
    fn a_changelog_without_unreleased_is_found() {
        assert_eq!(changelog(&tree(&[("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n")])).len(), 0);
        assert_eq!(changelog(&tree(&[("CHANGELOG.md", "# Changelog\n\n## 0.1.0\n")])).len(), 1);
        assert_eq!(changelog(&tree(&[])).len(), 1);
    }

    #[test]
    fn a_decision_without_its_parts_is_found() {
        let whole = PARTS.join("\n\ntext\n\n");
        assert_eq!(decisions(&tree(&[("docs/decisions/0001-a.md", &whole)])).len(), 0);
        for part in PARTS {
            let planted = whole.replace(part, "## Other");
            assert_eq!(decisions(&tree(&[("docs/decisions/0001-a.md", &planted)])).len(), 1, "{part}");
        }
        assert_eq!(decisions(&tree(&[("docs/decisions/first.md", &whole)])).len(), 1);
        let twins = tree(&[("docs/decisions/0001-a.md", &whole[..]), ("docs/decisions/0001-b.md", &whole[..])]);
        assert_eq!(decisions(&twins).len(), 2);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let page = |link: &str| {
            links(&tree(&[("docs/a.md", &format!("see [it]({link}).")[..]), ("b.md", "# The Part, two\n")]))
        };
        for fine in ["../b.md", "../b.md#the-part-two", "../docs", "https://example.com/x"] {
            assert_eq!(page(fine), [""; 0], "{fine}");
        }
        for planted in ["b.md", "../b.md#the-part", "../c.md"] {
            assert_eq!(page(planted).len(), 1, "{planted}");
        }
        let code = tree(&[("a.md", "```\n[x](nowhere.md)\n```\n")]);
        assert_eq!(links(&code).len(), 0, "code is not a link");
    }
}
