//! Through a real PgBouncer: in session mode all works; in transaction mode the relay and `check` say so.

use crate::harness::{Folder, until};
use crate::postgres::{execute, migrated, refused};
use postbox_testkit::services::{PgBouncer, PgVersion, Postgres};

const UNKNOWN: &str = "01980000-0000-7000-8000-000000000000";

fn pooler(mode: &str) -> PgBouncer {
    PgBouncer::start(Postgres::shared(PgVersion::V15).port(), mode).unwrap()
}

#[test]
fn case_d4_a_pooler_in_transaction_mode_is_refused_with_the_remedy() {
    let (direct, database) = migrated();
    let pooler = pooler("transaction");
    let words = ["pool_mode = transaction", "session mode", "the server's own address", "source.listen_url"];
    let listen_url = Postgres::shared(PgVersion::V15).url(&database);
    let through = Folder::new().env("DATABASE_URL", &pooler.url(&database));
    let through = through.env("POSTBOX__SOURCE__LISTEN_URL", &listen_url);
    for _ in 0..3 {
        let check = through.run(&["check"]); // the pool has sessions of the one before
        assert!(check.code == Some(3) && words.iter().all(|word| check.stdout.contains(word)), "{check:?}");
        refused(&through, &words);
        let taken = execute(&database, "SELECT count(*) FROM postbox.lease WHERE until IS NOT NULL");
        assert_eq!(taken[0][0].as_deref(), Some("0"), "who cannot begin keeps no other from it");
        for command in
            [&["status"][..], &["trace", UNKNOWN], &["migrate"], &["publish", "order", "1", "order.placed", "{}"]]
        {
            through.run(command).failed_with(1, &words);
        }
    }
    // The pool's sessions serve others next: nothing of ours is set in any.
    let ours = "SELECT count(*) FROM pg_settings WHERE source = 'session' AND name IN ('synchronous_commit', 'statement_timeout', \
                'lock_timeout', 'jit', 'plan_cache_mode', 'enable_seqscan', 'default_transaction_isolation')";
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'";
    assert_ne!(pooler.execute(&database, sessions).unwrap()[0][0].as_deref(), Some("0"));
    for _ in 0..5 {
        assert_eq!(pooler.execute(&database, ours).unwrap()[0][0].as_deref(), Some("0"));
    }
    // Nothing is sent, nothing is lost.
    let id = direct.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
    let relay = direct.leading_relay();
    relay.stdout.wait_for(id.trim());
    relay.stop();
}

#[test]
fn case_d4_through_a_pooler_in_session_mode_the_relay_works_and_is_woken() {
    let (direct, database) = migrated();
    execute(&database, &format!("ALTER DATABASE {database} SET postbox.wake = on"));
    let pooler = pooler("session");
    let folder = Folder::new().env("DATABASE_URL", &pooler.url(&database));
    let folder = folder.env("POSTBOX__SOURCE__LISTEN_URL", &Postgres::shared(PgVersion::V15).url(&database));
    let one = |sql: &str| execute(&database, sql)[0][0].clone().unwrap();
    folder.ok(&["check"]);
    let relay = folder.leading_relay();
    for _ in 0..3 {
        // It lies down only while it listens: then the wake lease is over, and writers notify.
        until("it sleeps", || one("SELECT last_value FROM postbox.wake") == "1");
        let id = direct.ok(&["publish", "order", "1", "order.placed", "{}"]).stdout;
        relay.stdout.wait_for(id.trim());
    }
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    assert_eq!(one(listening), "1");
    folder.ok(&["status"]);
    relay.stop();
}
