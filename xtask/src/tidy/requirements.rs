//! The rule about requirements: docs/requirements.md maps each number to tests that exist and to a page.
//! A row: `| Q1 | short form | done, part or open | tests in backticks | page as a link |`.

use super::{Tree, documents};
use std::collections::HashSet;

const MAP: &str = "docs/requirements.md";

/// The numbers that the project was given; none may be dropped from the map.
fn numbers() -> impl Iterator<Item = u32> {
    (1..=6).chain(10..=21).chain(30..=33).chain(40..=45).chain(50..=51).chain(60..=61)
}

/// Every requirement has a row; what is `done` or `part` names tests that exist and a page that exists.
pub(super) fn map(tree: &Tree) -> Vec<String> {
    let Some(text) = tree.get(MAP) else { return vec![format!("{MAP}: missing")] };
    let rows: Vec<(usize, Vec<&str>)> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.starts_with("| Q"))
        .map(|(n, line)| (n + 1, line.trim_matches('|').split('|').map(str::trim).collect()))
        .collect();
    let mut problems: Vec<String> = numbers()
        .map(|q| format!("Q{q}"))
        .filter(|q| rows.iter().filter(|(_, cells)| cells[0] == q).count() != 1)
        .map(|q| format!("{MAP}: {q} needs one row"))
        .collect();
    for (n, cells) in &rows {
        problems.extend(row(tree, cells).into_iter().map(|what| format!("{MAP}:{n}: {}: {what}", cells[0])));
    }
    problems
}

fn row(tree: &Tree, cells: &[&str]) -> Vec<String> {
    let &[_, _, status, tests, page] = cells else {
        return vec!["five cells: number, short form, status, tests, page".into()];
    };
    let tests: Vec<&str> = quoted(tests).collect();
    let mut problems = missing(tree, &tests);
    let pages = documents::targets(page);
    match status {
        "open" => {}
        "done" | "part" => {
            if tests.is_empty() {
                problems.push(format!("`{status}` without a test; name one, or say open"));
            }
            if !pages
                .iter()
                .any(|(_, target)| tree.has(&documents::join(MAP, target.split('#').next().unwrap_or_default())))
            {
                problems.push(format!("`{status}` without a page; link one that exists"));
            }
        }
        other => problems.push(format!("`{other}` is no status; say done, part or open")),
    }
    problems
}

/// What stands in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn missing(tree: &Tree, tests: &[&str]) -> Vec<String> {
    let exists = |name: &&&str| {
        let (head, generic) = (format!("fn {name}("), format!("fn {name}<"));
        tree.ending(".rs").any(|(_, text)| text.contains(&head) || text.contains(&generic))
    };
    let gone = tests.iter().filter(|name| !exists(name));
    gone.map(|name| format!("there is no `fn {name}`; name a test that exists")).collect()
}

const CASES: &str = "docs/cases.md";

/// Every test that the table of cases names exists, and every test that is called after a case is in the table.
pub(super) fn cases(tree: &Tree) -> Vec<String> {
    let text = tree.get(CASES).unwrap_or_default();
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with('|'));
    let tests = |line| quoted(line).filter(|name| name.contains('_')).collect::<Vec<_>>();
    let gone = rows.flat_map(|(n, line)| {
        missing(tree, &tests(line)).into_iter().map(move |what| format!("{CASES}:{}: {what}", n + 1))
    });
    let listed: HashSet<&str> = quoted(text).collect();
    let name = |text: &'_ str| text.find(['(', '<']).map(|end| format!("case_{}", &text[..end]));
    let sources = tree.ending(".rs").filter(|(path, _)| path.starts_with("crates/"));
    let named = sources.flat_map(|(_, text)| text.split("fn case_").skip(1).filter_map(name).collect::<Vec<_>>());
    let unlisted = named.filter(|name| !listed.contains(name.as_str()));
    gone.chain(unlisted.map(|name| format!("{CASES}: `{name}` stands in no row"))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::tree;
    use super::*;

    /// The map with every requirement open, but the first as given.
    fn with_first(first: &str) -> Vec<String> {
        let open = numbers().skip(1).map(|q| format!("| Q{q} | short | open | – | – |\n"));
        let text = format!("{first}\n{}", open.collect::<String>());
        map(&tree(&[(MAP, &text[..]), ("README.md", "# x\n"), ("crates/a/tests/t.rs", "fn it_works() {}\n")]))
    }

    #[test]
    fn a_whole_map_passes() {
        assert_eq!(with_first("| Q1 | short | done | `it_works` | [README](../README.md) |"), [""; 0]);
        assert_eq!(with_first("| Q1 | short | open | – | – |"), [""; 0]);
    }

    #[test]
    fn a_case_names_tests_that_exist() {
        let table = |test: &str| {
            let text = format!("| W1 | what `status` says | `{test}` |\n");
            cases(&tree(&[(CASES, &text[..]), ("crates/a/tests/t.rs", "fn case_w1_it_works() {}\n")]))
        };
        assert_eq!(table("case_w1_it_works"), [""; 0]);
        let problems = table("case_w1_it_worked");
        assert!(problems[0].starts_with("docs/cases.md:1: there is no `fn case_w1_it_worked`"), "{problems:?}");
        assert_eq!(problems[1], "docs/cases.md: `case_w1_it_works` stands in no row");
    }

    #[test]
    fn planted_gaps_are_found() {
        for (planted, what) in [
            ("", "Q1 needs one row"),
            ("| Q1 | short | done | `it_worked` | [README](../README.md) |", "no `fn it_worked`"),
            ("| Q1 | short | done | – | [README](../README.md) |", "without a test"),
            ("| Q1 | short | part | `it_works` | [guide](guide.md) |", "without a page"),
            ("| Q1 | short | nearly | – | – |", "no status"),
            ("| Q1 | short | open | – |", "five cells"),
        ] {
            let problems = with_first(planted);
            assert!(problems.len() == 1 && problems[0].contains(what), "{planted}: {problems:?}");
        }
    }
}
