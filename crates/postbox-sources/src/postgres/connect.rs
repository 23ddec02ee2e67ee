//! Connections: each owned by one role, none from a pool, so that settling never waits behind reading.
//! A connection is handed out only after its server has shown that it is PostgreSQL 14 or later and no standby.
//! No error and no log line here ever shows the URL.

use crate::postgres::dial::{Dial, Shared};
use crate::postgres::error::{STATEMENT_TIMEOUT, failed, refused, unavailable, within};
use crate::postgres::tls::{Protection, Target};
use crate::postgres::wire::Wire;
use postbox_engine::{SourceError, SourceErrorKind};
use std::borrow::Cow;
use std::future::poll_fn;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, Connection, SimpleQueryMessage};
use tokio_postgres_rustls::MakeRustlsConnect;

/// A server that does not answer a connection attempt within this is tried again later.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// When unanswered packets end a connection. Less than the lease, so that a half-open connection costs one tenure at most.
const UNANSWERED_MAX: Duration = Duration::from_secs(8);

/// What a connection is for; its name in `pg_stat_activity`, after the relay's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Windows and pages.
    Reader,
    /// The lease and the cursor.
    Settler,
    /// Held events and retention.
    Keeper,
    /// `LISTEN`.
    Listener,
    /// The command line.
    Admin,
}

/// One connection and the task that drives it; dropping it ends both.
pub(crate) struct Session {
    pub(crate) client: Client,
    driver: JoinHandle<()>,
    stream: Shared,
    /// Process id of the server's session, as it was when this one was set up.
    pub(crate) backend: i32,
    /// The database's encoding may lack characters.
    narrow: bool,
}

impl Session {
    /// Gives the connection to who reads it otherwise.
    pub(crate) async fn into_wire(mut self) -> Result<Wire, SourceError> {
        // Statements that were dropped are closed in the background: what answers after that has found nothing under way.
        within(STATEMENT_TIMEOUT, "end what is under way", self.batch_execute("")).await?;
        self.driver.abort();
        let _ = (&mut self.driver).await; // then it holds the stream no more
        let stream = self.stream.clone();
        drop(self);
        stream.into_stream().map(Wire::new).ok_or_else(|| unavailable("PostgreSQL: the connection is in use"))
    }

    /// A text of ours as any database takes it: an error that cannot be stored would stop the settle that it is in.
    pub(crate) fn storable<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let fits = |c: char| c != '\0' && (c.is_ascii() || !self.narrow);
        if text.chars().all(fits) {
            return text.into();
        }
        text.chars().map(|c| if fits(c) { c.to_string() } else { c.escape_unicode().to_string() }).collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.driver.abort(); // a half-open connection would linger otherwise
    }
}

impl std::ops::Deref for Session {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

/// Connects. `on_notice` runs in the driving task for each notification, and once with `None` when the connection ends.
///
/// # Errors
/// `Refused` for what only an operator can mend, `Unavailable` for the rest.
pub(crate) async fn connect(
    url: &str,
    role: Role,
    on_notice: impl FnMut(Option<()>) + Send + 'static,
) -> Result<Session, SourceError> {
    let (mut session, raw) = reach(url, role, on_notice).await?;
    require_fit(&session, role).await?;
    if !matches!(role, Role::Reader | Role::Keeper) {
        // Those two are compared with the settler. Nothing is set before this: a pool's sessions go on to others.
        let before = first_cell(&session, IDENTITY).await?;
        let (beside, _) = reach(url, role, |_| ()).await?;
        let other = first_cell(&beside, IDENTITY).await?;
        if before == other || before != first_cell(&session, IDENTITY).await? {
            return Err(pooled());
        }
    }
    session.backend = set_up(&session, role, raw).await?;
    Ok(session)
}

/// One of the server's sessions, told from all others.
const IDENTITY: &str = "SELECT pg_catalog.pg_backend_pid()::text || ' of ' || pg_catalog.pg_postmaster_start_time()";

/// A connection on which nothing is set yet. True: the database's encoding is SQL_ASCII.
async fn reach(
    url: &str,
    role: Role,
    on_notice: impl FnMut(Option<()>) + Send + 'static,
) -> Result<(Session, bool), SourceError> {
    let mut target = Target::parse(url)?;
    let config = &mut target.config;
    if config.get_application_name().is_none() {
        config.application_name(format!("postbox {}", format!("{role:?}").to_lowercase()));
    }
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    config.tcp_user_timeout(UNANSWERED_MAX).keepalives(true);
    config.keepalives_idle(UNANSWERED_MAX / 2).keepalives_interval(Duration::from_secs(2)).keepalives_retries(2);
    let tls = match target.protection {
        Protection::Plain => None,
        _ => Some(MakeRustlsConnect::new(target.tls()?)),
    };
    let (dial, doing) = (Dial::new(tls, &mut target.config), format!("connect to {}", target.places()));
    match target.socket() {
        None => {
            let connecting = target.config.connect(dial.clone());
            let (client, connection) = within(CONNECT_TIMEOUT, &doing, connecting).await.map_err(unreachable)?;
            Ok(drive(client, connection, &dial, on_notice))
        }
        Some(path) => {
            let stream = UnixStream::connect(path).await;
            let stream = stream.map_err(|e| unreachable(unavailable(format!("PostgreSQL: could not {doing}: {e}"))))?;
            let connecting = target.config.connect_raw(stream, dial.clone());
            let (client, connection) = within(CONNECT_TIMEOUT, &doing, connecting).await.map_err(unreachable)?;
            Ok(drive(client, connection, &dial, on_notice))
        }
    }
}

/// Starts the task that drives the connection. True: the database's encoding is SQL_ASCII.
fn drive<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    client: Client,
    mut connection: Connection<S, Shared>,
    dial: &Dial,
    mut on_notice: impl FnMut(Option<()>) + Send + 'static,
) -> (Session, bool) {
    let encoding = connection.parameter("server_encoding").unwrap_or("UTF8");
    let (raw, narrow) = (encoding == "SQL_ASCII", !matches!(encoding, "SQL_ASCII" | "UTF8"));
    let driver = tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if matches!(message, AsyncMessage::Notification(_)) {
                on_notice(Some(()));
            }
        }
        on_notice(None);
    });
    let stream = dial.made().expect("a connection has a stream");
    (Session { client, driver, stream, backend: 0, narrow }, raw)
}

/// What may be wrong where nobody answered; what a server answered says it itself.
fn unreachable(mut error: SourceError) -> SourceError {
    let answered = error.source.as_ref().and_then(|e| e.downcast_ref::<tokio_postgres::Error>()?.as_db_error());
    if error.kind == SourceErrorKind::Unavailable && answered.is_none() {
        let tls = error.source.as_ref().is_some_and(|e| e.to_string().contains("TLS"));
        error.message += match tls {
            true => "; if the server has no TLS, turn it on there, or put sslmode=disable into the database URL",
            false => "; is the server running there, and does the database URL name it rightly?",
        };
    }
    error
}

/// Refuses servers whose snapshots would not say what the log rests on.
async fn require_fit(session: &Session, role: Role) -> Result<(), SourceError> {
    let version = first_cell(session, "SELECT version()").await?;
    if let Some(why) = unfit(&version) {
        return Err(refused(why));
    }
    let recovery = first_cell(session, "SELECT pg_catalog.pg_is_in_recovery()::text").await?;
    if recovery == "true" && role != Role::Admin {
        return Err(refused(
            "this server is a standby: its snapshots list no running transactions, so their events would be skipped. \
             Connect to the primary (several hosts in the URL with target_session_attrs=read-write find it)",
        ));
    }
    Ok(())
}

/// Sets the session up. Returns its process id.
async fn set_up(session: &Session, role: Role, raw: bool) -> Result<i32, SourceError> {
    // A database of encoding SQL_ASCII takes any bytes; asked for UTF-8 it would fail the whole page that they are in.
    let encoding = if raw { "; SET client_encoding = SQL_ASCII" } else { "" };
    let settings = format!("{}{encoding}; SELECT pg_catalog.pg_backend_pid()", settings(role));
    let backend = first_cell(session, &settings).await?;
    backend.parse().map_err(|_| unavailable("PostgreSQL: the server's answer to pg_backend_pid() is no number"))
}

/// What a pooler does that gives a client another of the server's sessions for each transaction.
pub(crate) const POOLED: &str = "a pooler in transaction mode stands between (PgBouncer: pool_mode = transaction). \
     Give source.url, and source.listen_url if it is set, a pool in session mode or the server's own address; one of the two alone does not do";

/// Refuses a pooler that lends one of the server's sessions to several of ours, or several to one: settings, prepared
/// statements and LISTEN would be another's. `now`: the process id of `session` as a statement just read it; `other`:
/// that of a connection that is open beside it. A busy pool may have hidden from `connect`; then what was set up is undone
/// where it is found: others get that session next.
pub(crate) async fn require_own(session: &Session, now: i32, other: i32) -> Result<(), SourceError> {
    if now == session.backend && now != other {
        return Ok(());
    }
    let _ = within(STATEMENT_TIMEOUT, "reset the session", session.batch_execute("RESET ALL")).await;
    Err(pooled())
}

fn pooled() -> SourceError {
    refused(format!("PostgreSQL: connections do not keep sessions of their own: {POOLED}"))
}

fn settings(role: Role) -> &'static str {
    match role {
        // JIT costs 83 ms a poll. Plans made while the table was empty cost 4x, and custom plans plan six bins anew.
        Role::Reader | Role::Keeper | Role::Admin => {
            "SET standard_conforming_strings = on; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; \
             SET statement_timeout = '60s'; SET lock_timeout = '10s'; SET bytea_output = hex; SET default_transaction_isolation = 'read committed'"
        }
        // A settle lost in a crash is a duplicate, never a loss.
        Role::Settler => {
            "SET standard_conforming_strings = on; SET jit = off; SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_bitmapscan = off; \
             SET statement_timeout = '10s'; SET synchronous_commit = off; SET default_transaction_isolation = 'read committed'"
        }
        Role::Listener => "SET standard_conforming_strings = on; SET statement_timeout = '10s'",
    }
}

async fn first_cell(session: &Session, sql: &str) -> Result<String, SourceError> {
    let messages = within(CONNECT_TIMEOUT, "set the session up", session.simple_query(sql)).await?;
    let cell = messages.iter().find_map(|m| match m {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    cell.map(str::to_string)
        .ok_or_else(|| unavailable("PostgreSQL: the server answers nothing when the session is set up"))
}

/// Why a server that calls itself so cannot hold the log; `None` for PostgreSQL 14 and later.
fn unfit(version: &str) -> Option<String> {
    const PROTOCOL_ONLY: [&str; 7] =
        ["CockroachDB", "-YB-", "Redshift", "Materialize", "Greenplum", "Spanner", "CrateDB"];
    let number = version.strip_prefix("PostgreSQL ").and_then(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    let name = version.split(" (").next().unwrap_or(version);
    if PROTOCOL_ONLY.iter().any(|other| version.contains(other)) || number.is_none() {
        return Some(format!(
            "this server is {name}: it speaks PostgreSQL's protocol, but has not its transaction snapshots, on which the log \
             rests. Use PostgreSQL 14 or later"
        ));
    }
    number.filter(|n| *n < 14).map(|_| format!("this server is {name}: the log needs PostgreSQL 14 or later"))
}

/// `LISTEN channel` on a connection made for it.
pub(crate) async fn listen(session: &Session, channel: &str) -> Result<(), SourceError> {
    let sql = format!("LISTEN {}", super::sql::quoted(channel));
    tokio::time::timeout(CONNECT_TIMEOUT, session.batch_execute(&sql))
        .await
        .map_err(|_| unavailable("PostgreSQL: could not listen: no answer"))?
        .map_err(|e| failed("listen", e))
}

#[cfg(test)]
mod tests {
    use super::unfit;

    #[test]
    fn only_postgresql_14_and_later_will_do() {
        for good in
            ["PostgreSQL 14.23 on x86_64", "PostgreSQL 18.6 (Debian 18.6-1) on x86_64", "PostgreSQL 19beta1 on arm"]
        {
            assert_eq!(unfit(good), None);
        }
        assert!(unfit("PostgreSQL 13.9 on x86_64").unwrap().contains("14 or later"));
        assert!(unfit("CockroachDB CCL v25.1.0 (x86_64)").unwrap().contains("CockroachDB CCL v25.1.0"));
        assert!(unfit("PostgreSQL 15.2-YB-2.25.1.0 on x86_64").unwrap().contains("snapshots"));
        assert!(unfit("PostgreSQL 8.0.2 on i686, Redshift 1.0.48805").is_some());
    }
}
