//! What a writer and a relay need, and nothing more, as SQL for whoever owns the schema. Printed, never run by postbox.

use super::migrate::{checked, literal};
use postbox::schema::quote;
use postbox_engine::SourceError;

/// Creates the two roles where they are missing, without login, and grants what each needs. Grant them to the roles
/// that applications and relays log in as. To be run after `postbox migrate`; safe to run again.
///
/// # Errors
/// `Refused`: a name that PostgreSQL could not hold.
pub fn roles_script(schema: &str, writer: &str, relay: &str) -> Result<String, SourceError> {
    for name in [schema, writer, relay] {
        checked(name)?;
    }
    let (s, w, r) = (quote(schema), quote(writer), quote(relay));
    let mut text = String::from("BEGIN;\nSET LOCAL standard_conforming_strings = on;\n");
    for role in [writer, relay] {
        text += &format!(
            "DO $postbox$ BEGIN\nIF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {}) THEN\n  CREATE ROLE {} NOLOGIN;\nEND IF;\nEND $postbox$;\n",
            literal(role),
            quote(role),
        );
    }
    text += &format!(
        "\n-- Writer: INSERT and publish(), nothing else. It reads nothing back: an ORM that wants the id returned needs\n\
         -- GRANT SELECT (event_id) in addition. txid, id and bin are the log's own.\n\
         GRANT USAGE ON SCHEMA {s} TO {w};\n\
         GRANT INSERT ({WRITTEN}) ON {s}.outbox TO {w};\n\
         \n-- Relay: reads events, records progress, empties bins. No superuser. It also calls pg_control_system(), which\n\
         -- PUBLIC may do unless that was revoked.\n\
         GRANT USAGE ON SCHEMA {s} TO {r};\n\
         GRANT SELECT ON ALL TABLES IN SCHEMA {s} TO {r};\n\
         GRANT INSERT, DELETE ON {s}.cursor TO {r};\n\
         GRANT INSERT, UPDATE ON {s}.lease TO {r};\n\
         GRANT INSERT, UPDATE, DELETE ON {s}.held TO {r};\n\
         GRANT SELECT ON SEQUENCE {s}.outbox_id_seq TO {r};\n\
         GRANT SELECT, UPDATE ON SEQUENCE {s}.wake TO {r};\n\
         GRANT TRUNCATE ON {} TO {r};\n\
         COMMIT;\n",
        (0..6).map(|bin| format!("{s}.outbox_{bin}")).collect::<Vec<_>>().join(", "),
    );
    Ok(text)
}

/// The columns that are the writer's to give.
const WRITTEN: &str = "event_id, aggregate_type, aggregate_id, aggregate_seq, event_type, schema_version, payload, \
     payload_binary, content_type, headers, destination, available_at, created_at";
