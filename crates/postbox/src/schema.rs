//! The schema as numbered SQL, for whoever applies it: `postbox migrate`, `migrate --print`, a service's own migrations.
//! `{schema}` in the text stands for the quoted name of the schema. A step that was released never changes.

/// One step of a schema.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// 1, 2, 3, .. without gaps.
    pub version: i32,
    /// What the step is about, for people.
    pub name: &'static str,
    /// Statements with `{schema}` in place of the schema's name; see [`Migration::sql`].
    pub template: &'static str,
}

impl Migration {
    /// The statements for a schema of this name.
    ///
    /// ```
    /// let sql = postbox::schema::POSTGRES[0].sql(r#"My-App"x"#);
    /// assert!(sql.contains(r#"CREATE TABLE "My-App""x".outbox"#));
    /// ```
    pub fn sql(&self, schema: &str) -> String {
        self.template.replace("{schema}", &quote(schema))
    }
}

/// PostgreSQL 14 and later.
pub const POSTGRES: &[Migration] =
    &[Migration { version: 1, name: "log", template: include_str!("../schema/postgres/0001_log.sql") }];

/// A name as a quoted SQL identifier. Names with a quote, a space or capital letters are the same to it.
///
/// ```
/// assert_eq!(postbox::schema::quote(r#"My-App"x"#), r#""My-App""x""#);
/// ```
pub fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}
