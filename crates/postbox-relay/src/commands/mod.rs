//! One file per command.

pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod migrate;
pub(crate) mod publish;
pub(crate) mod relay;
pub(crate) mod status;
pub(crate) mod trace;

use crate::failure::Failure;
use std::io::Write;

/// Writes data. A reader that has gone (`| head`) is no error.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Writes one JSON value, for scripts.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{value:#}\n"))
}

/// Rows below their names, in columns.
pub(crate) fn table(names: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).chain([names[column].len()]).max();
    let widths: Vec<usize> = (0..names.len()).map(|column| width(column).unwrap_or_default()).collect();
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let body = rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
    line(names.to_vec()) + &body.collect::<String>()
}

#[cfg(test)]
mod tests {
    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["main".into(), "1".into()], vec!["a".into(), "é22".into()]];
        assert_eq!(super::table(&["stream", "n"], &rows), "stream  n\nmain    1\na       é22\n");
    }
}
