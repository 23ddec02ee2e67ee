//! Whether the cursor may be trusted. It counts transactions of one cluster, in one database; on a restored dump, a copy
//! or a server that lost its tail it would skip events or send them again. Looked at on each connection that settles,
//! before any lease is taken. It never mends anything: an operator does, by the SQL of docs/guide/mending.md.

use crate::postgres::connect::Session;
use crate::postgres::error::{STATEMENT_TIMEOUT, refused, within};
use crate::postgres::sql::quoted;
use postbox_engine::SourceError;
use tokio_postgres::error::SqlState;

/// Where we are: stored in each cursor row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The cluster's; zero where the server refuses to tell.
    pub(crate) system_id: i64,
    pub(crate) database: u32,
    /// Of the bins; raised when the outbox goes on in another cluster.
    pub(crate) generation: i16,
}

/// What the newest cursor row of any stream says.
struct Stored {
    system_id: i64,
    database: u32,
    generation: i16,
    ahead: bool,
}

/// # Errors
/// `Refused`, with the reason and the remedy, when one of the checks fails.
pub(crate) async fn examine(session: &Session, schema: &str) -> Result<Identity, SourceError> {
    let name = quoted(schema);
    let sql = "SELECT oid, datname::text FROM pg_database WHERE datname = current_database()";
    let row = within(STATEMENT_TIMEOUT, "read the database's oid", session.query_one(sql, &[])).await?;
    let (database, datname): (u32, String) = (row.get(0), row.get(1));
    let system_id = system_id(session).await?;
    let sql = format!(
        "SELECT system_id, database, generation, pg_snapshot_xmax(since) > pg_snapshot_xmax(pg_current_snapshot()) \
         FROM {name}.cursor ORDER BY seq DESC LIMIT 1"
    );
    let row = within(STATEMENT_TIMEOUT, "read the cursor", session.query_opt(&sql, &[])).await?;
    let stored = row.map(|r| Stored { system_id: r.get(0), database: r.get(1), generation: r.get(2), ahead: r.get(3) });
    let generation = stored.as_ref().map_or(0, |s| s.generation);
    if let Some(why) = stored.and_then(|s| mistrust(&s, system_id, database, &datname)) {
        return Err(refused(format!("the cursor of schema {schema} cannot be trusted: {why}")));
    }
    numbers(session, schema, generation).await?;
    Ok(Identity { system_id, database, generation })
}

async fn system_id(session: &Session) -> Result<i64, SourceError> {
    let answer = session.query_one("SELECT system_identifier FROM pg_control_system()", &[]);
    match answer.await {
        Ok(row) => Ok(row.get(0)),
        Err(e) if e.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(0),
        Err(e) => Err(crate::postgres::error::failed("read the cluster's identifier", e)),
    }
}

/// What mends it, in the words of every refusal here.
const MEND: &str = "Nothing is lost while relays stand still. Stop them all, then run the SQL under \"After a restore or a copy\" in docs/guide/mending.md";

fn mistrust(stored: &Stored, system_id: i64, database: u32, datname: &str) -> Option<String> {
    if stored.system_id != system_id && stored.system_id != 0 && system_id != 0 {
        return Some(format!(
            "it was written in cluster {}, and this is cluster {system_id} (a restored dump, a logical copy, or an upgrade by pg_upgrade): \
             its transaction ids mean nothing here. {MEND}",
            stored.system_id
        ));
    }
    if stored.database != database {
        return Some(format!(
            "database {datname} is a copy of another one in this cluster, and waiting events would be sent a second time. \
             If this copy is to go on in the original's place: {MEND}"
        ));
    }
    stored.ahead.then(|| {
        format!(
            "it is ahead of the server's transaction ids: the server was restored to an earlier time or lost its tail in a promotion. {MEND}"
        )
    })
}

/// The transaction ids and event ids must be this cluster's, and ids must be drawn one by one.
async fn numbers(session: &Session, schema: &str, generation: i16) -> Result<(), SourceError> {
    let name = quoted(schema);
    let sql = format!(
        "SELECT (SELECT txid::text FROM {name}.outbox WHERE bin >= 6 * {generation} AND txid >= pg_snapshot_xmax(pg_current_snapshot()) \
          ORDER BY txid, id LIMIT 1), \
         (SELECT id FROM {name}.outbox ORDER BY id DESC LIMIT 1) > (SELECT last_value FROM {name}.outbox_id_seq), \
         (SELECT seqcache FROM pg_sequence WHERE seqrelid = $1::text::regclass)"
    );
    let sequence = format!("{name}.outbox_id_seq");
    let row = within(STATEMENT_TIMEOUT, "check the outbox's ids", session.query_one(&sql, &[&sequence])).await?;
    if let Some(txid) = row.get::<_, Option<String>>(0) {
        return Err(refused(format!(
            "the outbox of schema {schema} holds transaction {txid}, which this server has not begun yet: the rows come from another cluster. {MEND}"
        )));
    }
    if row.get::<_, Option<bool>>(1) == Some(true) {
        return Err(refused(format!(
            "the outbox of schema {schema} holds ids beyond its sequence, as a logical copy does. Run \
             SELECT setval('{sequence}', (SELECT max(id) FROM {name}.outbox))"
        )));
    }
    match row.get::<_, Option<i64>>(2) {
        None | Some(1) => Ok(()),
        Some(n) => Err(refused(format!(
            "the sequence {sequence} has CACHE {n}: ids would not follow the order of row locks. Run ALTER SEQUENCE {sequence} CACHE 1"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_for_mistrust_names_the_remedy() {
        let stored = |system_id, database, ahead| Stored { system_id, database, generation: 0, ahead };
        assert_eq!(mistrust(&stored(7, 5, false), 7, 5, "shop"), None);
        assert_eq!(mistrust(&stored(0, 5, false), 7, 5, "shop"), None, "a server that did not tell");
        for (row, word) in
            [(stored(8, 5, false), "cluster 8"), (stored(7, 6, false), "copy"), (stored(7, 5, true), "ahead")]
        {
            let why = mistrust(&row, 7, 5, "shop").unwrap();
            assert!(why.contains(word) && why.contains("docs/guide/mending.md"), "{why}");
        }
    }
}
