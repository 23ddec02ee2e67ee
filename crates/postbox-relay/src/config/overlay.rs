//! One table out of a file and the environment, in which every value still knows where it came from: values of the
//! file keep their place in it, values of the environment get a place behind the file's end.

use std::collections::BTreeMap;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// The prefix of every variable that sets a key: POSTBOX__SECTION__KEY.
const PREFIX: &str = "POSTBOX__";

/// The variables that set a key, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables(Vec<Variable>);

#[derive(Clone, Debug)]
struct Variable {
    name: String,
    value: String,
    /// Its value was refused as a string: read as a TOML value (a number, a list, ..) instead.
    typed: bool,
}

/// Where a value came from.
#[derive(Debug, PartialEq)]
pub(super) enum Origin {
    /// Byte offset in the file.
    File(usize),
    /// Name of the variable.
    Variable(String),
}

impl Variables {
    pub(super) fn new(environment: &BTreeMap<String, String>) -> Variables {
        let ours = environment.iter().filter(|(name, _)| name.starts_with(PREFIX));
        let variable =
            |(name, value): (&String, &String)| Variable { name: name.clone(), value: value.clone(), typed: false };
        Variables(ours.map(variable).collect())
    }

    /// Where the value with this span came from, in a file of `length` bytes.
    pub(super) fn origin(&self, span: &Range<usize>, length: usize) -> Origin {
        match span.start.checked_sub(length + 1).and_then(|n| self.0.get(n)) {
            Some(variable) => Origin::Variable(variable.name.clone()),
            None => Origin::File(span.start),
        }
    }

    /// Has the variable at this span read as a TOML value from now on; false when it was already, or is none.
    pub(super) fn retype(&mut self, span: &Range<usize>, length: usize) -> bool {
        let variable = span.start.checked_sub(length + 1).and_then(|n| self.0.get_mut(n));
        variable.is_some_and(|variable| !std::mem::replace(&mut variable.typed, true))
    }

    /// Lays the variables over the table of a file of `length` bytes.
    pub(super) fn apply<'a>(&'a self, table: &mut DeTable<'a>, length: usize) {
        for (n, variable) in self.0.iter().enumerate() {
            let span = length + 1 + n..length + 2 + n;
            let path: Vec<String> = variable.name[PREFIX.len()..].split("__").map(str::to_lowercase).collect();
            let (key, sections) = path.split_last().expect("split yields at least one part");
            let mut at = &mut *table;
            for section in sections {
                at = sub_table(at, section, &span);
            }
            at.remove(key.as_str());
            at.insert(name(key, &span), Spanned::new(span.clone(), variable.value(&span)));
        }
    }
}

impl Variable {
    fn value(&self, span: &Range<usize>) -> DeValue<'_> {
        let typed = self.typed.then(|| DeValue::parse(&self.value).ok()).flatten();
        match typed {
            Some(value) => moved(value.into_inner(), span),
            None => DeValue::String(self.value.as_str().into()),
        }
    }
}

fn name<'a>(text: &str, span: &Range<usize>) -> Spanned<DeString<'a>> {
    Spanned::new(span.clone(), text.to_owned().into())
}

/// The table of that name inside; made when it is not there, or is something else.
fn sub_table<'t, 'a>(table: &'t mut DeTable<'a>, section: &str, span: &Range<usize>) -> &'t mut DeTable<'a> {
    if !table.get(section).is_some_and(|value| value.get_ref().is_table()) {
        table.remove(section);
        table.insert(name(section, span), Spanned::new(span.clone(), DeValue::Table(DeTable::new())));
    }
    match table.get_mut(section).map(Spanned::get_mut) {
        Some(DeValue::Table(inner)) => inner,
        _ => unreachable!("a table of this name was just seen or put there"),
    }
}

/// The value with all inside it at one place.
fn moved<'a>(value: DeValue<'a>, span: &Range<usize>) -> DeValue<'a> {
    let respan = |value: Spanned<DeValue<'a>>| Spanned::new(span.clone(), moved(value.into_inner(), span));
    match value {
        DeValue::Array(items) => DeValue::Array(items.into_iter().map(respan).collect()),
        DeValue::Table(items) => {
            let rekey = |key: Spanned<DeString<'a>>| Spanned::new(span.clone(), key.into_inner());
            DeValue::Table(items.into_iter().map(|(key, value)| (rekey(key), respan(value))).collect())
        }
        other => other,
    }
}
