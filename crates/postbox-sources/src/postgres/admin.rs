//! What people ask of a PostgreSQL outbox: see [`crate::admin`](mod@crate::admin). Works while no relay runs, and disturbs none that does.
//! Each question has a connection of its own. Only `migrate` changes anything.

use super::connect::{Role, Session, connect};
use super::error::{STATEMENT_TIMEOUT, failed, refused, within};
use super::identity::examine;
use super::sql::quoted;
use super::wake::writers_notify;
use super::{migrate, retention};
use crate::admin::{Finding, Migrated, StreamStatus, Trace};
use postbox_engine::SourceError;
use std::time::Duration;
use tokio_postgres::Row;

/// One row per stream and shard that a relay ever worked for.
pub async fn status(url: &str, schema: &str) -> Result<Vec<StreamStatus>, SourceError> {
    let session = open(url, schema).await?;
    let ages = ["oldest_unpublished", "oldest_held", "oldest_dead", "last_settled"];
    let ages: String = ages.map(|age| format!(", extract(epoch FROM {age})::float8")).concat();
    let sql = format!(
        "SELECT stream, shard, owner, pending, pending_is_estimate, retry, waiting, delayed, dead{ages}, last_error FROM {}.lag ORDER BY 1, 2",
        quoted(schema)
    );
    let rows = within(STATEMENT_TIMEOUT, "read the status", session.query(&sql, &[])).await?;
    let mut streams: Vec<StreamStatus> = rows.iter().map(stream_status).collect();
    // The figures rest on the cursor, and no relay runs on one that cannot be trusted.
    if let Err(error) = examine(&session, schema).await {
        streams.iter_mut().for_each(|stream| stream.last_error = Some(error.message.clone()));
    }
    Ok(streams)
}

fn stream_status(row: &Row) -> StreamStatus {
    let count = |column: usize| row.get::<_, i64>(column).max(0) as u64;
    let age = |column: usize| row.get::<_, Option<f64>>(column).map(|s| Duration::from_secs_f64(s.max(0.0)));
    StreamStatus {
        stream: row.get(0),
        shard: row.get(1),
        owner: row.get(2),
        pending: count(3),
        pending_is_estimate: row.get(4),
        retry: count(5),
        waiting: count(6),
        delayed: count(7),
        dead: count(8),
        oldest_unpublished: age(9),
        oldest_held: age(10),
        oldest_dead: age(11),
        last_settled: age(12),
        last_error: row.get(13),
    }
}

/// What became of an event, in each stream; empty when the log does not have it.
pub async fn trace(url: &str, schema: &str, event_id: &str) -> Result<Vec<Trace>, SourceError> {
    let session = open(url, schema).await?;
    let rfc3339 = |column: &str| format!("to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')");
    let sql = format!(
        "SELECT coalesce(stream, ''), state, {}, {}, {}, relay, attempts, error FROM {}.trace($1::text::uuid)",
        rfc3339("written_at"),
        rfc3339("sent_at"),
        rfc3339("published_at"),
        quoted(schema)
    );
    let rows = within(STATEMENT_TIMEOUT, "trace the event", session.query(&sql, &[&event_id])).await?;
    let trace = |row: &Row| Trace {
        stream: row.get(0),
        state: row.get(1),
        written_at: row.get(2),
        sent_at: row.get(3),
        published_at: row.get(4),
        relay: row.get(5),
        attempts: row.get::<_, i32>(6).unsigned_abs(),
        error: row.get(7),
    };
    Ok(rows.iter().map(trace).collect())
}

/// Makes the schema, or brings it up to date, and has it keep events for `retention`.
pub async fn migrate(url: &str, schema: &str, retention: Duration) -> Result<Migrated, SourceError> {
    let mut session = connect(url, Role::Admin, |_| ()).await?;
    migrate::migrate(&mut session.client, schema, retention).await
}

/// Writes one event in a transaction of its own.
pub async fn publish(url: &str, schema: &str, event: &postbox::Event) -> Result<(), SourceError> {
    let mut session = connect(url, Role::Admin, |_| ()).await?; // a writer has no right to look at the version
    let tx = within(STATEMENT_TIMEOUT, "begin", session.client.transaction()).await?;
    let published = postbox::Outbox::new(schema).publish(&tx, event).await;
    published.map_err(|e| refused(e.to_string()).caused_by(e))?;
    within(STATEMENT_TIMEOUT, "commit", tx.commit()).await
}

async fn open(url: &str, schema: &str) -> Result<Session, SourceError> {
    let session = connect(url, Role::Admin, |_| ()).await?;
    migrate::require(&session, schema).await?;
    Ok(session)
}

/// Looks at all that a relay with this retention needs of the database; changes nothing.
pub async fn check(url: &str, schema: &str, retention: Duration) -> Vec<Finding> {
    let mut findings = Vec::new();
    match look(url, schema, retention, &mut findings).await {
        Ok(()) => {}
        Err(error) => findings.push(bad(error.message, None)),
    }
    findings
}

async fn look(url: &str, schema: &str, keep: Duration, findings: &mut Vec<Finding>) -> Result<(), SourceError> {
    let session = connect(url, Role::Admin, |_| ()).await?;
    let sql =
        "SELECT current_setting('server_version'), current_database()::text, current_user::text, pg_is_in_recovery()";
    let row = within(STATEMENT_TIMEOUT, "ask who I am", session.query_one(sql, &[])).await?;
    let (version, database, role): (String, String, String) = (row.get(0), row.get(1), row.get(2));
    findings.push(good(format!("PostgreSQL {version}: connected to database {database} as role {role}")));
    if row.get(3) {
        findings.push(bad("this server is a standby".into(), Some("connect to the primary".into())));
        return Ok(());
    }
    let writable =
        within(STATEMENT_TIMEOUT, "ask whether it takes writes", session.query_one("SHOW transaction_read_only", &[]))
            .await?;
    if writable.get::<_, &str>(0) == "on" {
        let remedy = format!("ALTER ROLE {} SET default_transaction_read_only = off", quoted(&role));
        findings.push(bad("sessions are read-only: default_transaction_read_only is on".into(), Some(remedy)));
        return Ok(());
    }
    migrate::require(&session, schema).await?;
    findings.push(good(format!("schema {schema}: version {}", migrate::NEWEST)));
    rights(&session, schema, &role, findings).await?;
    let sql = retention::installed(schema);
    let installed = within(STATEMENT_TIMEOUT, "read the retention", session.query_one(&sql, &[])).await?.get(0);
    findings.push(match retention::mismatch(installed, keep) {
        None => good(format!("retention: published events stay for {installed} s at least")),
        Some(what) => bad(what, Some("postbox migrate".into())),
    });
    findings.push(good(if writers_notify(&session).await? {
        "waking: writers notify, an idle relay sleeps".into()
    } else {
        "waking: an idle relay polls four times a second, since this server allows prepared transactions, which bar NOTIFY; \
         ALTER DATABASE .. SET postbox.wake = on lets writers that prepare none notify"
            .into()
    }));
    match examine(&session, schema).await {
        Ok(identity) if identity.system_id == 0 => findings.push(good(
            "cursor: of this database, as far as can be seen; the server does not tell its identifier (pg_control_system)".into(),
        )),
        Ok(_) => findings.push(good("cursor: of this cluster and this database".into())),
        Err(error) => findings.push(bad(error.message, None)),
    }
    Ok(())
}

/// Each right that a relay uses, as `roles` grants them.
async fn rights(session: &Session, schema: &str, role: &str, findings: &mut Vec<Finding>) -> Result<(), SourceError> {
    let s = quoted(schema);
    let mut wanted = vec![];
    for table in ["outbox", "cursor", "lease", "held", "migration"] {
        wanted.push(("table", format!("{s}.{table}"), "SELECT"));
    }
    for (table, rights) in [("cursor", "INSERT DELETE"), ("lease", "INSERT UPDATE"), ("held", "INSERT UPDATE DELETE")] {
        wanted.extend(rights.split(' ').map(|right| ("table", format!("{s}.{table}"), right)));
    }
    wanted.extend((0..6).map(|bin| ("table", format!("{s}.outbox_{bin}"), "TRUNCATE")));
    wanted.push(("sequence", format!("{s}.outbox_id_seq"), "SELECT"));
    wanted.push(("sequence", format!("{s}.wake"), "UPDATE"));
    let mut missing = Vec::new();
    for (kind, name, right) in wanted {
        let sql = format!("SELECT has_{kind}_privilege($1::text, $2::text)");
        let row = session.query_one(&sql, &[&name, &right]).await.map_err(|e| failed("look at the rights", e))?;
        if !row.get::<_, bool>(0) {
            missing.push(format!("{right} on {name}"));
        }
    }
    findings.push(if missing.is_empty() {
        good(format!("role {role}: has the rights of a relay"))
    } else {
        let remedy = "grant it the relay's role: postbox migrate --print --roles WRITER,RELAY prints the SQL for the schema's owner";
        bad(format!("role {role} lacks {}", missing.join(", ")), Some(remedy.into()))
    });
    Ok(())
}

fn good(what: String) -> Finding {
    Finding { ok: true, what, remedy: None }
}

fn bad(what: String, remedy: Option<String>) -> Finding {
    Finding { ok: false, what, remedy }
}
